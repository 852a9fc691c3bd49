//! Sums, extremes and positions of extremes.

use super::super::candidates::{Partials, share_of};
use super::super::emit::{Emitter, Value};

use super::super::text::element_type;
use super::{BLOCK, Rows, Sharing, ThreadPosition, wide};
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
    identity: u64,
    kind: ReductionKind,
}

enum ReductionKind {
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
                let (acc, op, functor, identity) = combination(*kind, dtype);
                let is_mean = *kind == ReduceKind::Mean;
                let kind = ReductionKind::Values {
                    op,
                    functor,
                    is_mean,
                };
                Ok(Reduction {
                    x,
                    axes: axes.clone(),
                    keepdims: *keepdims,
                    acc,
                    identity,
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
                Ok(Reduction {
                    x,
                    axes: vec![*axis],
                    keepdims: *keepdims,
                    acc,
                    identity: extreme_bits(acc, *kind),
                    kind: ReductionKind::Positions { better, last },
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
        here: &ThreadPosition,
        r: &Reduction,
        out: Value,
    ) -> Result<()> {
        match &r.kind {
            ReductionKind::Values { op, functor, .. } => {
                self.accumulate(p, e, here, r, *op)?;
                self.join_accumulators(e, functor);
                self.store_values(p, e, here, r, functor, out)
            }
            ReductionKind::Positions { better, last } => {
                let at = self.best(p, e, here, r, better, *last)?;
                self.store_position(p, e, here, at, out)
            }
        }
    }

    /// Goes through the thread's elements of the row: `f` gets the number of each in its run, its position in the row, and it.
    fn each_element(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        here: &ThreadPosition,
        r: &Reduction,
        f: impl FnOnce(&mut Emitter, Ix<Value>, Ix<Value>, Value) -> Result<()>,
    ) -> Result<()> {
        let shape = p.body.shape(r.x);
        let at = e.delinearise(Ix::V(here.row), p.body.shape(self.node.own(p.body)));
        let extents: Vec<usize> = r.axes.iter().map(|&a| shape[a]).collect();
        let runs = self.runs(p);
        let along = self.layout.width / self.rows_per_thread();
        let [first, end] = self.bounds(e, here, along);
        let step = self.step().to_string();
        e.guarded(&[here.has_row], |e| {
            e.line("#pragma unroll 4");
            e.counted([&first, &end, &step], |e, k| {
                let inner = e.delinearise(Ix::V(k), &extents);
                let from = reduced_index(&at, &inner, &r.axes, shape.len(), r.keepdims);
                runs.each(p, e, r.x, &from, |e, number, v| {
                    let v = e.cast(v, r.acc)?;
                    let k = Ix::V(k);
                    let position = if along > 1 { e.add(k, number) } else { k };
                    f(e, number, position, v)
                })
            })
        })
    }

    /// First and last position of the thread's runs, each of `along` elements of the row, as text.
    fn bounds(&self, e: &mut Emitter, here: &ThreadPosition, along: usize) -> [String; 2] {
        let row = (self.layout.length, self.step());
        let [start, end] = share_of(e, here.part, self.n_parts, row);
        let own = e.mul(Ix::V(here.lane), along as i64);
        let first = e.add(start, own);
        [e.position(first), e.position(end)]
    }

    /// Accumulates the thread's elements in `acc`, by their number in the run.
    fn accumulate(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        here: &ThreadPosition,
        r: &Reduction,
        op: ScalarOp,
    ) -> Result<()> {
        let (ty, width) = (element_type(r.acc), self.layout.width);
        let identity = e.constant(r.acc, r.identity);
        e.line(&format!("{ty} acc[{width}];"));
        let w = e.open_unrolled(width);
        let name = format!("acc[{}]", e.text(w));
        e.set(&name, identity);
        e.close();
        self.each_element(p, e, here, r, |e, number, _, v| {
            let name = format!("acc[{}]", e.position(number));
            let sum = e.named(Kind::Element(r.acc), name.clone());
            let next = e.combine(op, sum, v)?;
            e.set(&name, next);
            Ok(())
        })
    }

    /// Joins the thread's accumulators of a row.
    fn join_accumulators(&self, e: &mut Emitter, functor: &str) {
        let width = self.layout.width;
        if self.layout.sharing != Sharing::Warps && width > 1 {
            e.line("#pragma unroll");
            e.line(&format!(
                "for (int w = 1; w < {width}; ++w) acc[0] = {functor}()(acc[0], acc[w]);"
            ));
        }
    }

    /// Joins accumulators over threads, and stores the epilogue of each of the thread's rows.
    fn store_values(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        here: &ThreadPosition,
        r: &Reduction,
        functor: &str,
        out: Value,
    ) -> Result<()> {
        let w = e.open_unrolled(self.rows_per_thread());
        let own = format!("acc[{}]", e.text(w));
        let own = e.named(Kind::Element(r.acc), own);
        let total = self.joined(e, own, functor);
        let row = e.add(Ix::V(here.row), Ix::V(w));
        self.leading(e, here, |e| {
            if self.n_parts == 1 {
                return self.finish(p, e, r, row, total, out);
            }
            let at = e.linearise(&[here.part, row], &[self.n_parts, self.layout.n_rows]);
            e.store(r.acc, total, out, at);
            Ok(())
        })?;
        e.close();
        Ok(())
    }

    /// Runs `f` in the first of the threads that share a row.
    fn leading(
        &self,
        e: &mut Emitter,
        here: &ThreadPosition,
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
        let at = e.delinearise(row, p.body.shape(self.node.own(p.body)));
        let value = match r.kind {
            ReductionKind::Values { is_mean: true, .. } => {
                mean(e, total, r.acc, self.layout.length)?
            }
            _ => total,
        };
        self.node.store(p, e, &at, value, out)
    }

    /// Joins the partial results of row `item`, and stores the epilogue.
    pub(super) fn join_parts(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        item: Value,
        [partial, out]: [Value; 2],
    ) -> Result<()> {
        let r = Reduction::of(p.body, self.node.of(p.body))?;
        let ReductionKind::Values { op, .. } = r.kind else {
            return Err(Error::internal("positions are not split"));
        };
        let partials = Partials {
            n_parts: self.n_parts,
            n_elements: self.layout.n_rows,
            dtype: r.acc,
            op,
            identity: r.identity,
        };
        let total = partials.join(e, partial, item)?;
        self.finish(p, e, &r, Ix::V(item), total, out)
    }

    /// Position of the row's best element by the functor `better`, of all threads.
    fn best(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        here: &ThreadPosition,
        r: &Reduction,
        better: &str,
        last: bool,
    ) -> Result<Value> {
        let identity = e.constant(r.acc, r.identity);
        let identity = e.text(identity).to_owned();
        let best = e.variable(Kind::Element(r.acc), Some(&identity));
        // Any element comes before one that is nowhere.
        let nowhere = e.index(if last { -1 } else { self.layout.length as i64 });
        let nowhere = e.text(nowhere).to_owned();
        let at = e.variable(Kind::Index, Some(&nowhere));
        let names = format!("{}, {}", e.text(best), e.text(at));
        self.each_element(p, e, here, r, |e, _, position, v| {
            let own = format!("{}, {}", e.text(v), e.position(position));
            e.line(&format!("gm_keep_better({names}, {own}, {better});"));
            Ok(())
        })?;
        let function = match self.layout.sharing {
            Sharing::Group(group) => format!("gm_group_best<{group}, {BLOCK}>"),
            Sharing::Warps => format!("gm_warps_best<{BLOCK}>"),
        };
        e.line(&format!("{function}({names}, {better});"));
        Ok(at)
    }

    /// Stores the epilogue of a row's position.
    fn store_position(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        here: &ThreadPosition,
        at: Value,
        out: Value,
    ) -> Result<()> {
        self.leading(e, here, |e| {
            let own = self.node.own(p.body);
            let index = e.delinearise(Ix::V(here.row), p.body.shape(own));
            let position = e.index_to_i64(at);
            self.node.store(p, e, &index, position, out)
        })
    }
}
