//! Pull-based scalar code: the value of a tensor at an index, emitted recursively through maps, views and reductions.
//!
//! A value that a buffer holds is loaded; everything else is computed on the spot. What is worth a buffer is decided in
//! [`super::phases`]. Equal requests within one straight piece of code are answered once.

use super::body::{Body, const_dim};
use super::emit::{Emitter, Ix, clif_type};
use crate::error::{Error, Result};
use crate::ir::{Node, Op, PadMode, ValueId};
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::{InstBuilder, Value};
use gristmill_runtime::{DType, status};
use std::collections::{BTreeMap, HashMap};

/// Emits values at indices within one function.
pub(super) struct Puller<'a> {
    pub(super) body: &'a Body,
    /// Base addresses of the values that are in buffers.
    pub(super) stored: BTreeMap<ValueId, Value>,
    /// Values known in the enclosing blocks, innermost last.
    known: Vec<HashMap<(ValueId, Vec<Ix>), Value>>,
}

impl<'a> Puller<'a> {
    pub(super) fn new(body: &'a Body, stored: BTreeMap<ValueId, Value>) -> Puller<'a> {
        Puller { body, stored, known: vec![HashMap::new()] }
    }

    /// Runs `f` for code that does not dominate what follows: a loop body or one side of a branch.
    pub(super) fn scoped<T>(&mut self, f: impl FnOnce(&mut Self) -> T) -> T {
        self.known.push(HashMap::new());
        let result = f(self);
        self.known.pop();
        result
    }

    /// Element of `v` at `at`, one index per axis.
    pub(super) fn value(&mut self, e: &mut Emitter, v: ValueId, at: &[Ix]) -> Result<Value> {
        let key = (v, at.to_vec());
        if let Some(&found) = self.known.iter().rev().find_map(|scope| scope.get(&key)) {
            return Ok(found);
        }
        let value = self.compute(e, v, at)?;
        self.remember(key.0, at, value);
        Ok(value)
    }

    pub(super) fn remember(&mut self, v: ValueId, at: &[Ix], value: Value) {
        self.known.last_mut().expect("the outermost scope stays").insert((v, at.to_vec()), value);
    }

    fn compute(&mut self, e: &mut Emitter, v: ValueId, at: &[Ix]) -> Result<Value> {
        if let Some(&base) = self.stored.get(&v) {
            let linear = e.linearise(at, self.body.shape(v));
            return Ok(e.load(self.body.dtype(v), base, linear));
        }
        let body = self.body;
        let node = body.graph.def_node(v).ok_or_else(|| Error::internal("a cluster operand has no buffer"))?;
        let which = node.outputs.iter().position(|&o| o == v).unwrap_or(0);
        self.node_value(e, node, which, at).map_err(|err| err.context(node.op.name()).at_origin(&node.origin))
    }

    fn node_value(&mut self, e: &mut Emitter, node: &Node, which: usize, at: &[Ix]) -> Result<Value> {
        match &node.op {
            Op::Map(op) => {
                let args =
                    node.inputs.iter().map(|&x| self.broadcast_value(e, x, at)).collect::<Result<Vec<Value>>>()?;
                let dtypes: Vec<DType> = node.inputs.iter().map(|&x| self.body.dtype(x)).collect();
                e.scalar_op(*op, &dtypes, &args)
            }
            Op::Constant { value } if value.len() == 1 => {
                let t = value.tensor()?;
                let mut bits = [0; 8];
                bits[..t.size_bytes()].copy_from_slice(t.as_bytes());
                Ok(e.constant(t.dtype(), u64::from_le_bytes(bits)))
            }
            Op::Iota { dtype, axis, .. } => {
                let i = e.val(at[*axis]);
                e.convert(i, DType::I64, *dtype)
            }
            Op::Broadcast { .. } => self.broadcast_value(e, node.inputs[0], at),
            Op::Reshape { .. } => {
                let x = node.inputs[0];
                let at = reshape_index(e, at, self.body.shape(node.outputs[0]), self.body.shape(x));
                self.value(e, x, &at)
            }
            Op::Transpose { perm } => {
                let mut from = vec![Ix::C(0); at.len()];
                perm.iter().zip(at).for_each(|(&p, &i)| from[p] = i);
                self.value(e, node.inputs[0], &from)
            }
            Op::Slice { starts, steps, .. } => {
                let mut from = Vec::with_capacity(at.len());
                for ((&i, start), &step) in at.iter().zip(starts).zip(steps) {
                    let moved = e.mul(i, step);
                    from.push(e.add(moved, Ix::C(const_dim(start)?)));
                }
                self.value(e, node.inputs[0], &from)
            }
            Op::Pad { low, mode, .. } => self.pad(e, node, low, *mode, at),
            Op::Concat { axis } => self.concat(e, node, *axis, 0, at),
            Op::Gather { axis } => self.gather(e, node, *axis, at),
            Op::GatherElements { axis } => {
                let n = self.body.shape(node.inputs[0])[*axis];
                let mut from = at.to_vec();
                from[*axis] = self.index(e, node.inputs[1], at, n)?;
                self.value(e, node.inputs[0], &from)
            }
            Op::GatherNd { batch_dims } => self.gather_nd(e, node, *batch_dims, at),
            _ => self.heavy_value(e, node, which, at),
        }
    }

    /// Element of `x` where the index belongs to a shape that `x` broadcasts to.
    pub(super) fn broadcast_value(&mut self, e: &mut Emitter, x: ValueId, at: &[Ix]) -> Result<Value> {
        let shape = self.body.shape(x);
        let lead = at.len() - shape.len();
        let from: Vec<Ix> = shape.iter().zip(&at[lead..]).map(|(&d, &i)| if d == 1 { Ix::C(0) } else { i }).collect();
        self.value(e, x, &from)
    }

    /// Element of an index tensor as a checked position in an axis of extent `n`; negative ones count from the end.
    pub(super) fn index(&mut self, e: &mut Emitter, indices: ValueId, at: &[Ix], n: usize) -> Result<Ix> {
        let raw = self.value(e, indices, at)?;
        let i = e.convert(raw, self.body.dtype(indices), DType::I64)?;
        let zero = e.iconst(0);
        let negative = e.b.ins().icmp(IntCC::SignedLessThan, i, zero);
        let wrapped = e.b.ins().iadd_imm_s(i, n as i64);
        let i = e.b.ins().select(negative, wrapped, i);
        let limit = e.iconst(n as i64);
        let outside = e.b.ins().icmp(IntCC::UnsignedGreaterThanOrEqual, i, limit);
        e.fault_if(outside, status::INDEX_OUT_OF_RANGE);
        Ok(Ix::V(i))
    }

    fn gather(&mut self, e: &mut Emitter, node: &Node, axis: usize, at: &[Ix]) -> Result<Value> {
        let [data, indices] = node.inputs[..] else { return Err(Error::internal("gather takes two operands")) };
        let n_index_axes = self.body.shape(indices).len();
        let i = self.index(e, indices, &at[axis..axis + n_index_axes], self.body.shape(data)[axis])?;
        let from: Vec<Ix> = at[..axis].iter().copied().chain([i]).chain(at[axis + n_index_axes..].to_vec()).collect();
        self.value(e, data, &from)
    }

    fn gather_nd(&mut self, e: &mut Emitter, node: &Node, batch_dims: usize, at: &[Ix]) -> Result<Value> {
        let [data, indices] = node.inputs[..] else { return Err(Error::internal("gather_nd takes two operands")) };
        let (index_shape, data_shape) = (self.body.shape(indices), self.body.shape(data));
        let lead = index_shape.len() - 1;
        let mut from = at[..batch_dims].to_vec();
        for t in 0..index_shape[lead] {
            let tuple_at: Vec<Ix> = at[..lead].iter().copied().chain([Ix::C(t as i64)]).collect();
            from.push(self.index(e, indices, &tuple_at, data_shape[batch_dims + t])?);
        }
        from.extend_from_slice(&at[lead..]);
        self.value(e, data, &from)
    }

    fn concat(&mut self, e: &mut Emitter, node: &Node, axis: usize, first: usize, at: &[Ix]) -> Result<Value> {
        let extent = |s: &Self, i: usize| s.body.shape(node.inputs[i])[axis];
        // Empty parts hold no index.
        let Some(part) = (first..node.inputs.len()).find(|&i| extent(self, i) > 0) else {
            return Err(Error::internal("an index into an empty join"));
        };
        let n = extent(self, part);
        let x = node.inputs[part];
        if (part + 1..node.inputs.len()).all(|i| extent(self, i) == 0) {
            return self.value(e, x, at);
        }
        let (position, limit) = (e.val(at[axis]), e.iconst(n as i64));
        let here = e.b.ins().icmp(IntCC::SignedLessThan, position, limit);
        let ty = clif_type(self.body.dtype(x));
        let values = e.branch(
            here,
            &[ty],
            self,
            |s, e| s.scoped(|s| Ok(vec![s.value(e, x, at)?])),
            |s, e| {
                let mut rest = at.to_vec();
                rest[axis] = e.add(at[axis], Ix::C(-(n as i64)));
                s.scoped(|s| Ok(vec![s.concat(e, node, axis, part + 1, &rest)?]))
            },
        )?;
        Ok(values[0])
    }

    fn pad(&mut self, e: &mut Emitter, node: &Node, low: &[usize], mode: PadMode, at: &[Ix]) -> Result<Value> {
        let x = node.inputs[0];
        let (shape, out) = (self.body.shape(x), self.body.shape(node.outputs[0]));
        let mut from = Vec::with_capacity(at.len());
        let mut inside = None;
        for axis in 0..at.len() {
            let j = e.add(at[axis], Ix::C(-(low[axis] as i64)));
            let n = shape[axis];
            from.push(match mode {
                _ if out[axis] == n => j,
                PadMode::Constant => {
                    // A negative position is a large unsigned one.
                    let (position, limit) = (e.val(j), e.iconst(n as i64));
                    let within = e.b.ins().icmp(IntCC::UnsignedLessThan, position, limit);
                    inside = Some(inside.map_or(within, |i| e.b.ins().band(i, within)));
                    j
                }
                _ => border(e, j, n as i64, mode),
            });
        }
        let Some(inside) = inside else { return self.value(e, x, &from) };
        let ty = clif_type(self.body.dtype(x));
        let fill = node.inputs[1];
        if shape.contains(&0) {
            return self.value(e, fill, &[]);
        }
        let values = e.branch(
            inside,
            &[ty],
            self,
            |s, e| s.scoped(|s| Ok(vec![s.value(e, x, &from)?])),
            |s, e| s.scoped(|s| Ok(vec![s.value(e, fill, &[])?])),
        )?;
        Ok(values[0])
    }
}

/// Position in the interior of extent `n` that a border position `j` repeats.
fn border(e: &mut Emitter, j: Ix, n: i64, mode: PadMode) -> Ix {
    let j = e.val(j);
    let (zero, last, extent) = (e.iconst(0), e.iconst(n - 1), e.iconst(n));
    if mode == PadMode::Edge {
        let low = e.b.ins().smax(j, zero);
        return Ix::V(e.b.ins().smin(low, last));
    }
    let below = e.b.ins().icmp(IntCC::SignedLessThan, j, zero);
    let above = e.b.ins().icmp(IntCC::SignedGreaterThanOrEqual, j, extent);
    let (from_low, from_high) = if mode == PadMode::Reflect {
        let turn = e.iconst(2 * (n - 1));
        (e.b.ins().ineg(j), e.b.ins().isub(turn, j))
    } else {
        (e.b.ins().iadd(j, extent), e.b.ins().isub(j, extent))
    };
    let high = e.b.ins().select(above, from_high, j);
    Ix::V(e.b.ins().select(below, from_low, high))
}

/// The index in `from` of the element at index `at` in `to`; both shapes hold the same elements in row-major order.
///
/// Axes are matched in groups of equal extent products, so that only axes which are really split or joined are divided.
fn reshape_index(e: &mut Emitter, at: &[Ix], to: &[usize], from: &[usize]) -> Vec<Ix> {
    let mut index = vec![Ix::C(0); from.len()];
    let (mut i, mut j) = (0, 0);
    while i < to.len() || j < from.len() {
        let (i0, j0) = (i, j);
        let (mut a, mut b) = (1usize, 1usize);
        loop {
            if (a <= b && i < to.len()) || j == from.len() {
                a = a.saturating_mul(to[i]);
                i += 1;
            } else {
                b = b.saturating_mul(from[j]);
                j += 1;
            }
            if a == b || (i == to.len() && j == from.len()) {
                break;
            }
        }
        let linear = e.linearise(&at[i0..i], &to[i0..i]);
        index[j0..j].copy_from_slice(&e.delinearise(linear, &from[j0..j]));
    }
    index
}
