//! Sums, extremes and positions of extremes.

use super::super::emit::{Emitter, Value};
use super::super::runs::Runs;
use super::super::text::element_type;
use super::{BLOCK, Here, Rows, Sharing, wide};
use crate::codegen::body::Body;
use crate::codegen::pull::{
    Emit, Ix, Kind, Order, Puller, accumulator, extreme_bits, mean, reduced_index,
};
use crate::error::{Error, Result};
use crate::ir::vecprog::real_bits;
use crate::ir::{Extremum, Node, Op, ReduceKind, ScalarOp, ValueId};
use gristmill_runtime::DType;

/// Operand, axes and combination of a plain reduction.
pub(super) struct Reduction {
    x: ValueId,
    axes: Vec<usize>,
    keepdims: bool,
    /// Accumulator dtype and identity.
    pub(super) acc: DType,
    initial: u64,
    kind: Kinds,
}

enum Kinds {
    /// The op that combines values, its functor in the prelude, and a flag that divides the result
    /// by the length.
    Values {
        op: ScalarOp,
        functor: &'static str,
        is_mean: bool,
    },
    /// Positions of extremes: a functor that says which of two comes first.
    Positions { better: String, last: bool },
}

impl Reduction {
    pub(super) fn of(body: &Body, node: &Node) -> Result<Reduction> {
        let x = node.inputs[0];
        let dtype = body.dtype(x);
        match &node.op {
            Op::Reduce {
                kind,
                axes,
                keepdims,
            } => {
                let (acc, op, functor, initial) = combination(*kind, dtype);
                let kind = Kinds::Values {
                    op,
                    functor,
                    is_mean: *kind == ReduceKind::Mean,
                };
                Ok(Reduction {
                    x,
                    axes: axes.clone(),
                    keepdims: *keepdims,
                    acc,
                    initial,
                    kind,
                })
            }
            Op::ArgReduce {
                kind,
                axis,
                keepdims,
                select_last,
            } => {
                let (acc, last) = (exchanged(dtype), *select_last);
                let better = format!("gm_better<{}, {last}>()", *kind == Extremum::Max);
                let (axes, kind, initial) = (
                    vec![*axis],
                    Kinds::Positions { better, last },
                    extreme_bits(acc, *kind),
                );
                Ok(Reduction {
                    x,
                    axes,
                    keepdims: *keepdims,
                    acc,
                    initial,
                    kind,
                })
            }
            op => Err(Error::internal(format!(
                "{} is no plain reduction",
                op.name()
            ))),
        }
    }
}

/// Values are exchanged between threads in 32 or 64 bits.
pub(in crate::codegen::cuda) fn exchanged(dtype: DType) -> DType {
    match dtype {
        d if d.is_float() => wide(d),
        DType::I8 | DType::I16 => DType::I32,
        DType::U8 | DType::U16 | DType::Bool => DType::U32,
        d => d,
    }
}

/// Accumulator dtype, combining op (as op and as functor of the prelude) and identity of a
/// reduction.
fn combination(kind: ReduceKind, dtype: DType) -> (DType, ScalarOp, &'static str, u64) {
    let (sum, extreme) = (accumulator(dtype), exchanged(dtype));
    match kind {
        ReduceKind::Sum | ReduceKind::Mean => (sum, ScalarOp::Add, "gm_sum", 0),
        ReduceKind::Prod => (sum, ScalarOp::Mul, "gm_product", real_bits(sum, 1.0)),
        ReduceKind::Max => (
            extreme,
            ScalarOp::Max,
            "gm_greatest",
            extreme_bits(extreme, Extremum::Max),
        ),
        ReduceKind::Min => (
            extreme,
            ScalarOp::Min,
            "gm_least",
            extreme_bits(extreme, Extremum::Min),
        ),
    }
}

impl Rows {
    pub(super) fn reduce(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        here: &Here,
        r: &Reduction,
        out: Value,
    ) -> Result<()> {
        match &r.kind {
            Kinds::Values { op, functor, .. } => self.values(p, e, here, r, *op, functor, out),
            Kinds::Positions { better, last } => self.positions(p, e, here, r, better, *last, out),
        }
    }

    /// Goes through the thread's elements of the row: `f` gets the number of each in its run, its position in the row, and it.
    fn each_element(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        here: &Here,
        r: &Reduction,
        f: impl FnOnce(&mut Emitter, Ix<Value>, Ix<Value>, Value) -> Result<()>,
    ) -> Result<()> {
        let node = p.body.graph.node(self.node).clone();
        let (dtype, shape) = (p.body.dtype(r.x), p.body.shape(r.x).to_vec());
        let at = e.delinearise(Ix::V(here.row), p.body.shape(node.outputs[0]));
        let extents: Vec<usize> = r.axes.iter().map(|&a| shape[a]).collect();
        let stored = |v: ValueId| p.stored.contains_key(&v);
        let runs = Runs::of_width(
            p.body,
            r.x,
            shape.len().saturating_sub(1),
            &stored,
            self.width,
        );
        let per_part = self
            .length
            .div_ceil(self.n_parts)
            .next_multiple_of(self.step());
        let start = e.mul(here.part, per_part as i64);
        let mut end = Ix::C(self.length as i64);
        if self.n_parts > 1 {
            let own = e.add(start, Ix::C(per_part as i64));
            let (own, all) = (e.val(own), e.val(end));
            end = Ix::V(e.index_min(own, all));
        }
        let along = self.width / self.rows_per_thread();
        let own = e.mul(Ix::V(here.lane), along as i64);
        let first = e.add(start, own);
        let bounds = [first, end].map(|i| {
            let i = e.val(i);
            e.text(i).to_owned()
        });
        e.guarded(&[here.has_row], |e| {
            e.line("#pragma unroll 4");
            e.counted(
                [&bounds[0], &bounds[1], &self.step().to_string()],
                |e, k| {
                    p.scoped(|p| {
                        let inner = e.delinearise(Ix::V(k), &extents);
                        let from = reduced_index(&at, &inner, &r.axes, shape.len(), r.keepdims);
                        runs.each(p, e, r.x, &from, |e, number, v| {
                            let v = e.convert(v, dtype, r.acc)?;
                            let position = if along > 1 {
                                e.add(Ix::V(k), number)
                            } else {
                                Ix::V(k)
                            };
                            f(e, number, position, v)
                        })
                    })
                },
            )
        })
    }

    #[allow(clippy::too_many_arguments)]
    fn values(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        here: &Here,
        r: &Reduction,
        op: ScalarOp,
        functor: &str,
        out: Value,
    ) -> Result<()> {
        let ty = element_type(r.acc);
        let initial = e.constant(r.acc, r.initial);
        e.line(&format!("{ty} acc[{}];", self.width));
        let w = e.open_unrolled(self.width);
        let line = format!("acc[{}] = {};", e.text(w), e.text(initial));
        e.line(&line);
        e.close();
        self.each_element(p, e, here, r, |e, number, _, v| {
            let number = e.val(number);
            let name = format!("acc[{}]", e.text(number));
            let sum = e.named(Kind::Element(r.acc), name.clone());
            let next = e.scalar_op(op, &[r.acc; 2], &[sum, v])?;
            let line = format!("{name} = {};", e.text(next));
            e.line(&line);
            Ok(())
        })?;
        if self.sharing != Sharing::Warps && self.width > 1 {
            e.line("#pragma unroll");
            e.line(&format!(
                "for (int w = 1; w < {}; ++w) acc[0] = {functor}()(acc[0], acc[w]);",
                self.width
            ));
        }
        let w = e.open_unrolled(self.rows_per_thread());
        let own = e.named(Kind::Element(r.acc), format!("acc[{}]", e.text(w)));
        let total = self.joined(e, own, functor);
        let row = e.add(Ix::V(here.row), Ix::V(w));
        self.leading(e, here, |e| {
            if self.n_parts > 1 {
                let at = e.linearise(&[here.part, row], &[self.n_parts, self.n_rows]);
                e.store(r.acc, total, out, at);
                return Ok(());
            }
            self.finish(p, e, r, row, total, out)
        })?;
        e.close();
        Ok(())
    }

    /// Runs `f` in the first of the threads that share a row.
    fn leading(
        &self,
        e: &mut Emitter,
        here: &Here,
        f: impl FnOnce(&mut Emitter) -> Result<()>,
    ) -> Result<()> {
        let zero = e.index(0);
        let leads = e.index_compare(Order::Equal, here.lane, zero);
        e.guarded(&[Some(leads), here.has_row], f)
    }

    /// Stores the epilogue of a row's reduced value.
    fn finish(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        r: &Reduction,
        row: Ix<Value>,
        total: Value,
        out: Value,
    ) -> Result<()> {
        let own = p.body.graph.node(self.node).outputs[0];
        let at = e.delinearise(row, p.body.shape(own));
        let is_mean = matches!(r.kind, Kinds::Values { is_mean: true, .. });
        let value = if is_mean {
            mean(e, total, r.acc, self.length)?
        } else {
            total
        };
        let value = e.convert(value, r.acc, p.body.dtype(own))?;
        self.store(p, e, &at, value, out)
    }

    /// Joins the partial results of row `item`, and stores the epilogue.
    pub(super) fn join_parts(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        item: Value,
        [partial, out]: [Value; 2],
    ) -> Result<()> {
        let r = Reduction::of(p.body, p.body.graph.node(self.node))?;
        let Kinds::Values { op, .. } = r.kind else {
            return Err(Error::internal("positions are not split"));
        };
        let initial = e.constant(r.acc, r.initial);
        let total = e.for_loop(
            Ix::C(0),
            Ix::C(self.n_parts as i64),
            1,
            &[initial],
            |e, part, carried| {
                let at = e.linearise(&[Ix::V(part), Ix::V(item)], &[self.n_parts, self.n_rows]);
                let own = e.load(r.acc, partial, at);
                Ok(vec![e.scalar_op(op, &[r.acc; 2], &[carried[0], own])?])
            },
        )?[0];
        self.finish(p, e, &r, Ix::V(item), total, out)
    }

    #[allow(clippy::too_many_arguments)]
    fn positions(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        here: &Here,
        r: &Reduction,
        better: &str,
        last: bool,
        out: Value,
    ) -> Result<()> {
        let initial = e.constant(r.acc, r.initial);
        let initial = e.text(initial).to_owned();
        let best = e.variable(Kind::Element(r.acc), Some(&initial));
        // Any element comes before one that is nowhere.
        let nowhere = e.index(if last { -1 } else { self.length as i64 });
        let nowhere = e.text(nowhere).to_owned();
        let at = e.variable(Kind::Index, Some(&nowhere));
        let names = [best, at].map(|v| e.text(v).to_owned());
        self.each_element(p, e, here, r, |e, _, position, v| {
            let position = e.val(position);
            let (v, position) = (e.text(v).to_owned(), e.text(position).to_owned());
            e.line(&format!(
                "gm_keep_better({}, {}, {v}, {position}, {better});",
                names[0], names[1]
            ));
            Ok(())
        })?;
        e.line(&match self.sharing {
            Sharing::Group(group) => format!(
                "gm_group_best<{group}, {BLOCK}>({}, {}, {better});",
                names[0], names[1]
            ),
            Sharing::Warps => format!(
                "gm_warps_best<{BLOCK}>({}, {}, {better});",
                names[0], names[1]
            ),
        });
        self.leading(e, here, |e| {
            let own = p.body.graph.node(self.node).outputs[0];
            let index = e.delinearise(Ix::V(here.row), p.body.shape(own));
            let position = e.index_to_i64(at);
            self.store(p, e, &index, position, out)
        })
    }
}
