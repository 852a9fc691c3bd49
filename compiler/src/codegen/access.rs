//! Element-wise expressions as a scalar program over strided operands, where every index is affine in the loop indices.

use super::body::{Body, const_dim};
use super::strided::Strided;
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

/// Builds the expression of `roots`, all of one shape. `in_memory` says which values are loaded; `keep` which composite ops stay whole.
///
/// `None` when an op is not element-wise, or an index is not affine.
pub(super) fn expression(
    body: &Body,
    roots: &[ValueId],
    in_memory: &dyn Fn(ValueId) -> bool,
    keep: &dyn Fn(ScalarOp, DType) -> bool,
) -> Option<Expression> {
    let rank = body.shape(*roots.first()?).len();
    let expression = Expression {
        program: VecProg::new(),
        leaves: Vec::new(),
    };
    let mut b = Builder {
        body,
        in_memory,
        keep,
        rank,
        expression,
        known: HashMap::new(),
    };
    let identity: Vec<AffineIndex> = (0..rank)
        .map(|axis| AffineIndex {
            constant: 0,
            factors: (0..rank).map(|i| i64::from(i == axis)).collect(),
        })
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
    rank: usize,
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
            Op::Transpose { .. } | Op::Slice { .. } | Op::Reshape { .. } => {
                let from = self.view_index(node, at)?;
                self.value(node.inputs[0], &from)
            }
            _ => None,
        }
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
                self.reshaped(at, self.body.shape(to), self.body.shape(from))
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
            factors: vec![0; self.rank],
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
                factors: vec![0; self.rank],
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

    fn leaf(&mut self, view: &Strided, at: &[AffineIndex]) -> Reg {
        let mut leaf = Leaf {
            value: view.base,
            offset: view.offset,
            strides: vec![0; self.rank],
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
