//! Element-wise expressions as a scalar program over strided operands, where every index is affine in the loop indices.

use super::body::{Body, const_dim};
use super::loops::Loops;
use super::strided::{Strided, row_major};
use crate::ir::vecprog::{Inst, Reg, VecOp, VecProg};
use crate::ir::{Dim, Node, Op, OpClass, ScalarOp, ValueId};
use gristmill_runtime::DType;
use std::collections::HashMap;

/// Most instructions of a program.
const MAX_INSTS: usize = 256;

/// An operand of the program: the buffer of a value, read at `offset + sum(index[i] * strides[i])` elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Leaf {
    pub(super) value: ValueId,
    pub(super) offset: i64,
    pub(super) strides: Vec<i64>,
}

/// The expression of one or more values of one shape. `VecOp::Input(n)` reads leaf `n`. Composite ops that `keep` accepts stay whole.
pub(super) struct Expression {
    pub(super) program: VecProg,
    pub(super) leaves: Vec<Leaf>,
}

/// Index along one axis of a value: a constant plus a multiple of each loop index.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct AffineIndex {
    constant: i64,
    factors: Vec<i64>,
}

impl AffineIndex {
    /// The index before a slice of the axis; `None` when `start` is symbolic.
    fn sliced(&self, start: &Dim, step: i64) -> Option<AffineIndex> {
        Some(AffineIndex {
            constant: self.constant * step + const_dim(start).ok()?,
            factors: self.factors.iter().map(|f| f * step).collect(),
        })
    }
}

/// The expression of `roots`, all of one shape, in a loop for each axis: see [`expression_in`].
pub(super) fn expression(
    body: &Body,
    roots: &[ValueId],
    in_memory: &dyn Fn(ValueId) -> bool,
    keep: &dyn Fn(ScalarOp, DType) -> bool,
) -> Option<Expression> {
    let loops = Loops::over(body.shape(*roots.first()?));
    expression_in(body, roots, in_memory, keep, &loops)
}

/// Builds the expression of `roots`, all of the shape that `loops` go over. `in_memory` says which values are loaded; `keep` which composite ops stay whole.
///
/// `None` when an op is not element-wise, or an index is not affine.
pub(super) fn expression_in(
    body: &Body,
    roots: &[ValueId],
    in_memory: &dyn Fn(ValueId) -> bool,
    keep: &dyn Fn(ScalarOp, DType) -> bool,
    loops: &Loops,
) -> Option<Expression> {
    let expression = Expression {
        program: VecProg::new(),
        leaves: Vec::new(),
    };
    let mut b = Builder {
        body,
        in_memory,
        keep,
        extents: &loops.extents,
        expression,
        known: HashMap::new(),
    };
    let identity: Vec<AffineIndex> = loops
        .indices()
        .map(|(constant, factors)| AffineIndex { constant, factors })
        .collect();
    for &root in roots {
        let r = b.value(root, &identity)?;
        b.expression.program.outputs.push(r);
    }
    Some(b.expression)
}

struct Builder<'a> {
    body: &'a Body,
    in_memory: &'a dyn Fn(ValueId) -> bool,
    keep: &'a dyn Fn(ScalarOp, DType) -> bool,
    /// Iterations of each loop.
    extents: &'a [usize],
    expression: Expression,
    known: HashMap<(ValueId, Vec<AffineIndex>), Reg>,
}

impl Builder<'_> {
    fn value(&mut self, v: ValueId, at: &[AffineIndex]) -> Option<Reg> {
        let key = (v, at.to_vec());
        if let Some(&r) = self.known.get(&key) {
            return Some(r);
        }
        if self.expression.program.insts.len() > MAX_INSTS {
            return None;
        }
        let r = self.compute(v, at)?;
        self.known.insert(key, r);
        Some(r)
    }

    fn compute(&mut self, v: ValueId, at: &[AffineIndex]) -> Option<Reg> {
        let body = self.body;
        if let Some(c) = body.graph.single(v) {
            let mut bits = [0; 8];
            bits[..c.size_bytes()].copy_from_slice(c.as_bytes());
            return Some(
                self.expression
                    .program
                    .constant(c.dtype(), u64::from_le_bytes(bits)),
            );
        }
        if (self.in_memory)(v) {
            return Some(self.leaf(&Strided::own(body, v), at));
        }
        let node = body.graph.def_node(v)?;
        if node.op.class() == OpClass::View {
            let view = Strided::resolve(body, v, self.in_memory);
            if view.base != v
                && (self.in_memory)(view.base)
                && body.graph.constant(view.base).is_none_or(|c| c.len() != 1)
            {
                return Some(self.leaf(&view, at));
            }
        }
        self.node(node, at)
    }

    fn node(&mut self, node: &Node, at: &[AffineIndex]) -> Option<Reg> {
        match &node.op {
            Op::Map(op) => {
                let args = node.inputs.iter().map(|&x| self.broadcast(x, at));
                let args = args.collect::<Option<Vec<Reg>>>()?;
                Some(self.map(*op, &args))
            }
            Op::Broadcast { .. } => self.broadcast(node.inputs[0], at),
            Op::Concat { axis } => self.joined(&node.inputs, *axis, at),
            Op::Transpose { .. } | Op::Slice { .. } | Op::Reshape { .. } => {
                let from = self.view_index(node, at)?;
                self.value(node.inputs[0], &from)
            }
            _ => None,
        }
    }

    /// An element of a concatenation, if all loops stay in one operand.
    fn joined(&mut self, operands: &[ValueId], axis: usize, at: &[AffineIndex]) -> Option<Reg> {
        let (first, last) = self.range(&at[axis]);
        let mut start = 0;
        for &x in operands {
            let end = start + self.body.shape(x)[axis] as i64;
            if start <= first && last < end {
                let mut within = at.to_vec();
                within[axis].constant -= start;
                return self.value(x, &within);
            }
            start = end;
        }
        None
    }

    /// Least and greatest value of an index.
    fn range(&self, at: &AffineIndex) -> (i64, i64) {
        let (mut first, mut last) = (at.constant, at.constant);
        for (factor, &n) in at.factors.iter().zip(self.extents) {
            let reach = factor * (n as i64 - 1);
            first += reach.min(0);
            last += reach.max(0);
        }
        (first, last)
    }

    /// The index in the operand of a view for an index of its result.
    fn view_index(&self, node: &Node, at: &[AffineIndex]) -> Option<Vec<AffineIndex>> {
        match &node.op {
            Op::Transpose { perm } => {
                let mut from = at.to_vec();
                perm.iter().zip(at).for_each(|(&p, a)| from[p] = a.clone());
                Some(from)
            }
            Op::Slice { starts, steps, .. } => {
                let axes = at.iter().zip(starts).zip(steps);
                axes.map(|((a, start), &step)| a.sliced(start, step))
                    .collect()
            }
            _ => {
                let (to, from) = (node.outputs[0], node.inputs[0]);
                let (to, from) = (self.body.shape(to), self.body.shape(from));
                self.reshaped(at, to, from)
                    .or_else(|| self.divided(at, to, from))
            }
        }
    }

    fn map(&mut self, op: ScalarOp, args: &[Reg]) -> Reg {
        let p = &mut self.expression.program;
        let dtype = p.dtype(args[0]);
        if !op.spec().primitive && (self.keep)(op, dtype) {
            let inst = Inst {
                op: VecOp::Op(op),
                args: args.to_vec(),
                dtype,
            };
            let found = p.insts.iter().position(|i| *i == inst);
            return Reg(found.unwrap_or_else(|| {
                p.insts.push(inst);
                p.insts.len() - 1
            }) as u32);
        }
        op.expand(p, args)
    }

    fn broadcast(&mut self, x: ValueId, at: &[AffineIndex]) -> Option<Reg> {
        let shape = self.body.shape(x);
        let lead = at.len() - shape.len();
        let zero = AffineIndex {
            constant: 0,
            factors: vec![0; self.extents.len()],
        };
        let from: Vec<AffineIndex> = shape
            .iter()
            .zip(&at[lead..])
            .map(|(&d, a)| if d == 1 { zero.clone() } else { a.clone() })
            .collect();
        self.value(x, &from)
    }

    /// The index in `from` of index `at` in `to`, when each axis of `from` is one or several whole axes of `to`.
    fn reshaped(
        &self,
        at: &[AffineIndex],
        to: &[usize],
        from: &[usize],
    ) -> Option<Vec<AffineIndex>> {
        let mut axes = to.iter().zip(at).filter(|(d, _)| **d != 1);
        let mut out = Vec::with_capacity(from.len());
        for &extent in from {
            let mut joined = AffineIndex {
                constant: 0,
                factors: vec![0; self.extents.len()],
            };
            let mut have = 1;
            while have < extent {
                let (&d, a) = axes.next()?;
                have *= d;
                joined.constant = joined.constant * d as i64 + a.constant;
                joined
                    .factors
                    .iter_mut()
                    .zip(&a.factors)
                    .for_each(|(f, g)| *f = *f * d as i64 + g);
            }
            if have != extent {
                return None;
            }
            out.push(joined);
        }
        Some(out)
    }

    /// The same where an axis of `to` consists of several axes of `from`, if each loop is a part of one
    /// of these.
    fn divided(
        &self,
        at: &[AffineIndex],
        to: &[usize],
        from: &[usize],
    ) -> Option<Vec<AffineIndex>> {
        let flat = self.flat(at, &row_major(to));
        if flat.constant < 0 || from.contains(&0) {
            return None;
        }
        let strides = row_major(from);
        let digit = |(&d, stride): (&usize, &i64)| AffineIndex {
            constant: flat.constant / stride % d as i64,
            factors: vec![0; self.extents.len()],
        };
        let mut out: Vec<AffineIndex> = from.iter().zip(&strides).map(digit).collect();
        for (i, &factor) in flat.factors.iter().enumerate() {
            let n = self.extents[i] as i64;
            if factor == 0 || n < 2 {
                continue;
            }
            let is_part = |j: &usize| {
                let (stride, extent) = (strides[*j], from[*j] as i64);
                extent != 1 && factor % stride == 0 && (1..=stride * extent / n).contains(&factor)
            };
            let j = (0..from.len()).find(is_part)?;
            out[j].factors[i] = factor / strides[j];
        }
        let last = |a: &AffineIndex| {
            let reaches = a.factors.iter().zip(self.extents);
            a.constant + reaches.map(|(f, &n)| f * (n as i64 - 1)).sum::<i64>()
        };
        // No index goes beyond its axis, so that the digits are those of the position.
        let is_inside = out.iter().zip(from).all(|(a, &d)| last(a) < d as i64);
        is_inside.then_some(out)
    }

    /// The position of an index where axes have such strides.
    fn flat(&self, at: &[AffineIndex], strides: &[i64]) -> AffineIndex {
        let mut flat = AffineIndex {
            constant: 0,
            factors: vec![0; self.extents.len()],
        };
        for (a, stride) in at.iter().zip(strides) {
            flat.constant += a.constant * stride;
            for (f, g) in flat.factors.iter_mut().zip(&a.factors) {
                *f += g * stride;
            }
        }
        flat
    }

    fn leaf(&mut self, view: &Strided, at: &[AffineIndex]) -> Reg {
        let mut leaf = Leaf {
            value: view.base,
            offset: view.offset,
            strides: vec![0; self.extents.len()],
        };
        for (a, &stride) in at.iter().zip(&view.strides) {
            leaf.offset += a.constant * stride;
            leaf.strides
                .iter_mut()
                .zip(&a.factors)
                .for_each(|(s, f)| *s += f * stride);
        }
        let dtype = self.body.dtype(view.base);
        let leaves = &mut self.expression.leaves;
        let n = leaves.iter().position(|l| *l == leaf).unwrap_or_else(|| {
            leaves.push(leaf);
            leaves.len() - 1
        });
        self.expression.program.input(n as u32, dtype)
    }
}

impl Expression {
    /// Strides of the leaves, then those of each output.
    pub(super) fn all_strides(&self, output: &[i64]) -> Vec<Vec<i64>> {
        let outputs = std::iter::repeat_n(output.to_vec(), self.program.outputs.len());
        self.leaves
            .iter()
            .map(|l| l.strides.clone())
            .chain(outputs)
            .collect()
    }
}
