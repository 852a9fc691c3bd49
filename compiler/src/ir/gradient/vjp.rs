//! The vector-Jacobian product of one node, as gradient rules see it.

use super::super::dim::Dim;
use super::super::graph::{Graph, Node, NodeId, Origin, ValueId};
use super::super::ops::{Op, ReduceKind, ScatterKind};
use super::super::scalar::ScalarOp;
use super::super::types::{Shape, Type};
use crate::error::{Error, Result};
use gristmill_runtime::{DType, Tensor};

/// A node under differentiation, with the cotangents of its results.
///
/// Emitted nodes are appended to the graph; they have the origin `grad(ORIGIN)` and the device request of the node.
pub struct Vjp<'g> {
    graph: &'g mut Graph,
    node: Node,
    origin: Origin,
    cotangents: Vec<Option<ValueId>>,
    needed: Vec<bool>,
    gradients: Vec<Option<ValueId>>,
}

impl<'g> Vjp<'g> {
    /// The product of a node with the cotangents of its results, for the `needed` ones of its operands. An absent
    /// cotangent is zero.
    pub fn new(
        graph: &'g mut Graph,
        node: Node,
        cotangents: Vec<Option<ValueId>>,
        needed: Vec<bool>,
    ) -> Vjp<'g> {
        let origin = gradient_origin(&node.origin);
        let gradients = vec![None; node.inputs.len()];
        Vjp {
            graph,
            node,
            origin,
            cotangents,
            needed,
            gradients,
        }
    }

    /// The gradients that were given, one per operand.
    pub fn into_gradients(self) -> Vec<Option<ValueId>> {
        self.gradients
    }

    /// The op with its attributes.
    pub fn op(&self) -> Op {
        self.node.op.clone()
    }

    /// Number of operands.
    pub fn n_operands(&self) -> usize {
        self.node.inputs.len()
    }

    /// Operand `i`.
    pub fn x(&self, i: usize) -> ValueId {
        self.node.inputs[i]
    }

    /// The first result.
    pub fn y(&self) -> ValueId {
        self.result(0)
    }

    /// Result `i`.
    pub fn result(&self, i: usize) -> ValueId {
        self.node.outputs[i]
    }

    /// Cotangent of the first result.
    pub fn g(&mut self) -> Result<ValueId> {
        self.cotangent(0)
    }

    /// Cotangent of result `i`, zeros where nothing uses the result.
    pub fn cotangent(&mut self, i: usize) -> Result<ValueId> {
        match self.cotangents[i] {
            Some(g) => Ok(g),
            None => {
                let ty = self.ty(self.result(i)).clone();
                self.full(ty.dtype, &ty.shape, 0.0)
            }
        }
    }

    /// True when the gradient of operand `i` is asked for.
    pub fn needs(&self, i: usize) -> bool {
        self.needed[i]
    }

    /// The operands whose gradients are asked for.
    pub fn needed(&self) -> Vec<usize> {
        (0..self.n_operands()).filter(|&i| self.needs(i)).collect()
    }

    /// Gives the gradient of operand `i`, with the operand's shape or one that the operand broadcasts to. Nothing when it is
    /// not asked for.
    pub fn give(&mut self, i: usize, gradient: ValueId) -> Result<()> {
        if self.needs(i) {
            let shape = self.shape(self.x(i));
            self.gradients[i] = Some(self.unbroadcast(gradient, &shape)?);
        }
        Ok(())
    }

    /// The error for attributes that the op's rule does not cover.
    pub fn refuse<T>(&self, why: &str) -> Result<T> {
        Err(no_gradient(&self.node, why))
    }

    /// Type of a value.
    pub fn ty(&self, v: ValueId) -> &Type {
        self.graph.ty(v)
    }

    /// Shape of a value.
    pub fn shape(&self, v: ValueId) -> Vec<Dim> {
        self.ty(v).shape.to_vec()
    }

    /// Emits an op and gives its first result.
    pub fn emit(&mut self, op: Op, inputs: &[ValueId]) -> Result<ValueId> {
        Ok(self.emit_all(op, inputs)?[0])
    }

    /// Emits an op and gives its results.
    pub fn emit_all(&mut self, op: Op, inputs: &[ValueId]) -> Result<Vec<ValueId>> {
        let is_placed = !matches!(op, Op::Constant { .. });
        let results = self.graph.add(op, inputs, &self.origin)?;
        if is_placed {
            let last = NodeId(self.graph.n_nodes() as u32 - 1);
            self.graph.node_mut(last).device = self.node.device.clone();
        }
        Ok(results)
    }

    /// `x` with updates added at index tuples.
    pub fn add_at(&mut self, x: ValueId, tuples: ValueId, updates: ValueId) -> Result<ValueId> {
        let kind = ScatterKind::Add;
        self.emit(Op::ScatterNd { kind }, &[x, tuples, updates])
    }

    /// Emits an element-wise op.
    pub fn map(&mut self, op: ScalarOp, inputs: &[ValueId]) -> Result<ValueId> {
        self.emit(Op::Map(op), inputs)
    }

    /// A constant of rank 0.
    pub fn scalar(&mut self, dtype: DType, value: f64) -> Result<ValueId> {
        let value = Tensor::from_f64s(dtype, &[], &[value])?;
        self.emit(Op::constant(value), &[])
    }

    /// A tensor of equal elements.
    pub fn full(&mut self, dtype: DType, shape: &[Dim], value: f64) -> Result<ValueId> {
        let value = self.scalar(dtype, value)?;
        self.broadcast(value, shape)
    }

    /// Zeros of the type of a value.
    pub fn zeros_like(&mut self, v: ValueId) -> Result<ValueId> {
        let ty = self.ty(v).clone();
        self.full(ty.dtype, &ty.shape, 0.0)
    }

    /// A constant of rank 0 with the dtype of `like`.
    pub fn real(&mut self, like: ValueId, value: f64) -> Result<ValueId> {
        let dtype = self.ty(like).dtype;
        self.scalar(dtype, value)
    }

    /// Conversion to `dtype`; nothing when the value has it.
    pub fn cast(&mut self, x: ValueId, dtype: DType) -> Result<ValueId> {
        if self.ty(x).dtype == dtype {
            return Ok(x);
        }
        self.map(ScalarOp::Cast(dtype), &[x])
    }

    /// The elements under another shape; nothing when the value has it.
    pub fn reshape(&mut self, x: ValueId, shape: &[Dim]) -> Result<ValueId> {
        if *self.ty(x).shape == *shape {
            return Ok(x);
        }
        let shape = shape.to_vec();
        self.emit(Op::Reshape { shape }, &[x])
    }

    /// The value broadcast to a shape; nothing when it has it.
    pub fn broadcast(&mut self, x: ValueId, shape: &[Dim]) -> Result<ValueId> {
        if *self.ty(x).shape == *shape {
            return Ok(x);
        }
        let shape = shape.to_vec();
        self.emit(Op::Broadcast { shape }, &[x])
    }

    /// The axes permuted; nothing for the identity.
    pub fn transpose(&mut self, x: ValueId, perm: Vec<usize>) -> Result<ValueId> {
        if perm.iter().enumerate().all(|(i, &p)| i == p) {
            return Ok(x);
        }
        self.emit(Op::Transpose { perm }, &[x])
    }

    /// A slice of unit steps; nothing when it is the whole.
    pub fn slice(&mut self, x: ValueId, starts: Vec<Dim>, sizes: Vec<Dim>) -> Result<ValueId> {
        if *self.ty(x).shape == *sizes {
            return Ok(x);
        }
        let steps = vec![1; sizes.len()];
        let op = Op::Slice {
            starts,
            sizes,
            steps,
        };
        self.emit(op, &[x])
    }

    /// A reduction with its axes kept as extents of 1.
    pub fn reduce(&mut self, kind: ReduceKind, x: ValueId, axes: &[usize]) -> Result<ValueId> {
        let op = Op::Reduce {
            kind,
            axes: axes.to_vec(),
            keepdims: true,
        };
        self.emit(op, &[x])
    }

    /// Sum over the axes by which `x` exceeds `shape`, which broadcasts to the shape of `x`.
    pub fn unbroadcast(&mut self, x: ValueId, shape: &[Dim]) -> Result<ValueId> {
        let from = self.shape(x);
        let Some(n_added) = from.len().checked_sub(shape.len()) else {
            let (from, to) = (Shape(from), Shape(shape.to_vec()));
            let message = format!("a gradient of shape {from} for an operand of shape {to}");
            return Err(Error::internal(message).at_origin(&self.origin));
        };
        let is_repeated = |i: &usize| {
            let Some(own) = i.checked_sub(n_added).map(|own| &shape[own]) else {
                return true;
            };
            own.is(1) && !from[*i].is(1)
        };
        let axes: Vec<usize> = (0..from.len()).filter(is_repeated).collect();
        if axes.is_empty() {
            return Ok(x);
        }
        let op = Op::Reduce {
            kind: ReduceKind::Sum,
            axes,
            keepdims: false,
        };
        let sum = self.emit(op, &[x])?;
        self.reshape(sum, shape)
    }
}

/// Arithmetic on values.
impl Vjp<'_> {
    /// `a + b`.
    pub fn add(&mut self, a: ValueId, b: ValueId) -> Result<ValueId> {
        self.map(ScalarOp::Add, &[a, b])
    }

    /// `a - b`.
    pub fn sub(&mut self, a: ValueId, b: ValueId) -> Result<ValueId> {
        self.map(ScalarOp::Sub, &[a, b])
    }

    /// `a * b`.
    pub fn mul(&mut self, a: ValueId, b: ValueId) -> Result<ValueId> {
        self.map(ScalarOp::Mul, &[a, b])
    }

    /// `a / b`.
    pub fn div(&mut self, a: ValueId, b: ValueId) -> Result<ValueId> {
        self.map(ScalarOp::Div, &[a, b])
    }

    /// `-a`.
    pub fn neg(&mut self, a: ValueId) -> Result<ValueId> {
        self.map(ScalarOp::Neg, &[a])
    }

    /// `k * a`.
    pub fn times(&mut self, a: ValueId, k: f64) -> Result<ValueId> {
        let k = self.real(a, k)?;
        self.mul(a, k)
    }

    /// `a + k`.
    pub fn plus(&mut self, a: ValueId, k: f64) -> Result<ValueId> {
        let k = self.real(a, k)?;
        self.add(a, k)
    }

    /// `k - a`.
    pub fn minus_from(&mut self, k: f64, a: ValueId) -> Result<ValueId> {
        let k = self.real(a, k)?;
        self.sub(k, a)
    }

    /// `a * a`.
    pub fn square(&mut self, a: ValueId) -> Result<ValueId> {
        self.mul(a, a)
    }

    /// An op of the value and a number.
    pub fn with_number(&mut self, op: ScalarOp, a: ValueId, k: f64) -> Result<ValueId> {
        let k = self.real(a, k)?;
        self.map(op, &[a, k])
    }

    /// `a` where the condition holds, else `b`.
    pub fn select(&mut self, condition: ValueId, a: ValueId, b: ValueId) -> Result<ValueId> {
        self.map(ScalarOp::Select, &[condition, a, b])
    }

    /// `a` where the condition holds, else 0.
    pub fn keep(&mut self, condition: ValueId, a: ValueId) -> Result<ValueId> {
        let zero = self.real(a, 0.0)?;
        self.select(condition, a, zero)
    }

    /// 0 where the condition holds, else `a`.
    pub fn drop_where(&mut self, condition: ValueId, a: ValueId) -> Result<ValueId> {
        let zero = self.real(a, 0.0)?;
        self.select(condition, zero, a)
    }

    /// `k` where the condition holds, else `a`.
    pub fn replace(&mut self, condition: ValueId, k: f64, a: ValueId) -> Result<ValueId> {
        let k = self.real(a, k)?;
        self.select(condition, k, a)
    }
}

/// Origin of the nodes that differentiate a node of this origin.
pub(crate) fn gradient_origin(origin: &Origin) -> Origin {
    match origin.as_str() {
        "" => Origin::default(),
        text => Origin::new(&format!("grad({text})")),
    }
}

/// The error that a node has no gradient.
pub(crate) fn no_gradient(node: &Node, why: &str) -> Error {
    let message = format!("{}: no gradient: {why}", node.op.name());
    Error::unsupported(message).at_origin(&node.origin)
}
