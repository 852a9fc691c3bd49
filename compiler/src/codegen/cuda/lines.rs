//! Running sums and top-k of lines, a block per line.

use super::emit::{Emitter, Value};
use super::rows::exchanged;
use super::text::element_type;
use crate::codegen::body::Body;
use crate::codegen::pull::{Emit, Ix, Kind, Puller, extreme_bits};
use crate::error::{Error, Result};
use crate::ir::vecprog::real_bits;
use crate::ir::{Extremum, Node, Op};
use gristmill_runtime::DType;

/// Threads of a block.
pub(super) const BLOCK: usize = 256;
/// Smallest length of a line whose running sums a block computes, and the number of lines from
/// which on a thread each keeps a GPU busy.
const LEAST_SUMS: usize = 64;
const MANY_LINES: usize = 16_384;
/// Smallest length of a line whose top-k a block selects; in shorter ones each element counts those
/// that come before it.
const LEAST_SELECTION: usize = 512;
/// Candidates that a block keeps. At most half of them are wanted.
const CANDIDATES: usize = 2048;

/// A scan or a selection along `axis` of the first operand.
pub(super) struct Lines<'n> {
    node: &'n Node,
    shape: Vec<usize>,
    axis: usize,
    dtype: DType,
}

impl<'n> Lines<'n> {
    /// The block variant of a cumulative sum or a top-k, if lines are long enough for it.
    pub(super) fn find(body: &Body, node: &'n Node) -> Option<Lines<'n>> {
        let shape = body.shape(node.inputs[0]).to_vec();
        let n: usize = shape.iter().product();
        let axis = match &node.op {
            Op::CumSum { axis, .. }
                if shape[*axis] >= LEAST_SUMS && n / shape[*axis] < MANY_LINES =>
            {
                *axis
            }
            Op::TopK { axis, .. } => {
                let k = body.shape(node.outputs[0])[*axis];
                (shape[*axis] >= LEAST_SELECTION && k <= CANDIDATES / 2).then_some(*axis)?
            }
            _ => return None,
        };
        (n > 0).then(|| Lines {
            node,
            axis,
            dtype: body.dtype(node.inputs[0]),
            shape,
        })
    }

    /// Blocks that have a line each.
    pub(super) fn n_blocks(&self) -> usize {
        self.shape.iter().product::<usize>() / self.shape[self.axis]
    }

    /// Writes the kernel's body.
    pub(super) fn emit(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        outs: &[Value],
    ) -> Result<()> {
        let mut lines = self.shape.clone();
        lines[self.axis] = 1;
        if let Op::TopK { .. } = self.node.op {
            let ty = element_type(exchanged(self.dtype));
            e.line(&format!("__shared__ {ty} values[{CANDIDATES}];"));
            e.line(&format!("__shared__ ix positions[{CANDIDATES}];"));
            e.line("__shared__ u32 count;");
        }
        e.by_block(self.n_blocks(), |e, line| {
            let at = e.delinearise(Ix::V(line), &lines);
            p.scoped(|p| match &self.node.op {
                Op::CumSum {
                    exclusive, reverse, ..
                } => self.sums(p, e, &at, *exclusive, *reverse, outs[0]),
                Op::TopK { largest, .. } => self.select(p, e, &at, *largest, [outs[0], outs[1]]),
                op => Err(Error::internal(format!(
                    "{} does not go along lines",
                    op.name()
                ))),
            })
        })
    }

    /// The running sums of a line, [`BLOCK`] elements at a time. Floats accumulate in `f64`.
    fn sums(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        at: &[Ix<Value>],
        exclusive: bool,
        reverse: bool,
        out: Value,
    ) -> Result<()> {
        let acc = match self.dtype.is_float() {
            true => DType::F64,
            false => exchanged(self.dtype),
        };
        let ty = element_type(acc);
        e.line(&format!("{ty} before = 0;"));
        self.each(e, |e, i, inside| {
            let at = self.element(e, at, i, reverse);
            e.line(&format!("{ty} own = 0, all;"));
            e.guarded(&[inside], |e| {
                let v = p.scoped(|p| p.value(e, self.node.inputs[0], &at))?;
                let v = e.convert(v, self.dtype, acc)?;
                e.set("own", v);
                Ok(())
            })?;
            e.line(&format!(
                "const {ty} sum = gm_sum()(before, gm_running<{BLOCK}, {exclusive}>(own, all));"
            ));
            e.guarded(&[inside], |e| {
                let sum = e.named(Kind::Element(acc), "sum");
                let sum = e.convert(sum, acc, self.dtype)?;
                let linear = e.linearise(&at, &self.shape);
                e.store(self.dtype, sum, out, linear);
                Ok(())
            })?;
            e.line("before = gm_sum()(before, all);");
            Ok(())
        })
    }

    /// Goes through a line, [`BLOCK`] elements at a time: `f` gets the position of the thread's
    /// element, and the condition that it exists.
    fn each(
        &self,
        e: &mut Emitter,
        f: impl FnOnce(&mut Emitter, Value, Option<Value>) -> Result<()>,
    ) -> Result<()> {
        let n = self.shape[self.axis];
        e.counted(["0", &n.to_string(), &BLOCK.to_string()], |e, first| {
            let i = format!("{} + ix(threadIdx.x)", e.text(first));
            let i = e.define(Kind::Index, &i);
            let inside = e.below(Ix::V(i), n, BLOCK);
            f(e, i, inside)
        })
    }

    /// Index of element `i` of the line at `at`, counted from its end if `reverse`.
    fn element(
        &self,
        e: &mut Emitter,
        at: &[Ix<Value>],
        i: Value,
        reverse: bool,
    ) -> Vec<Ix<Value>> {
        let mut at = at.to_vec();
        at[self.axis] = Ix::V(i);
        if reverse {
            let last = e.index(self.shape[self.axis] as i64 - 1);
            at[self.axis] = Ix::V(e.index_sub(last, i));
        }
        at
    }

    /// The best elements of a line, in order. Elements better than the worst of the best so far
    /// become candidates, which are sorted when there is no room for more. The order in which they
    /// come does not matter, since no two are equal: positions differ.
    fn select(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        at: &[Ix<Value>],
        largest: bool,
        outs: [Value; 2],
    ) -> Result<()> {
        let k = p.body.shape(self.node.outputs[0])[self.axis];
        let better = match largest {
            true => "gm_better<true, false>()",
            false => "gm_ascending()",
        };
        let sort = self.sort(e, largest, better);
        e.line("if (threadIdx.x == 0) count = 0;");
        e.line("bool full = false;");
        e.line("__syncthreads();");
        self.each(e, |e, i, inside| {
            let at = self.element(e, at, i, false);
            e.guarded(&[inside], |e| {
                let v = p.scoped(|p| p.value(e, self.node.inputs[0], &at))?;
                let v = e.convert(v, self.dtype, exchanged(self.dtype))?;
                add_candidate(e, [v, i], k - 1, better);
                Ok(())
            })?;
            e.line("__syncthreads();");
            e.open(&format!("if (count > {})", CANDIDATES - BLOCK));
            e.line(&sort);
            e.line(&format!("if (threadIdx.x == 0) count = {k};"));
            e.line("full = true;");
            e.close();
            e.line("__syncthreads();");
            Ok(())
        })?;
        e.line(&sort);
        self.store_best(e, at, p.body.shape(self.node.outputs[0]), outs)?;
        e.line("__syncthreads();");
        Ok(())
    }

    /// The call that sorts the candidates.
    fn sort(&self, e: &mut Emitter, largest: bool, better: &str) -> String {
        let (acc, n) = (exchanged(self.dtype), self.shape[self.axis]);
        let worst = e.constant(acc, worst_bits(acc, largest));
        let worst = e.text(worst);
        format!(
            "gm_sort<{BLOCK}, {CANDIDATES}>(values, positions, int(count), {worst}, ix({n}), {better});"
        )
    }

    /// Stores the first candidates and their positions in results of shape `to`.
    fn store_best(
        &self,
        e: &mut Emitter,
        at: &[Ix<Value>],
        to: &[usize],
        outs: [Value; 2],
    ) -> Result<()> {
        e.by_thread(to[self.axis], BLOCK, |e, i| {
            let at = self.element(e, at, i, false);
            let linear = e.linearise(&at, to);
            let value = format!("values[{}]", e.text(i));
            let value = e.named(Kind::Element(exchanged(self.dtype)), value);
            let value = e.cast(value, self.dtype)?;
            e.store(self.dtype, value, outs[0], linear);
            let position = format!("positions[{}]", e.text(i));
            let position = e.named(Kind::Index, position);
            let position = e.index_to_i64(position);
            e.store(DType::I64, position, outs[1], linear);
            Ok(())
        })
    }
}

/// Adds a value and its position to the candidates, if it is better than the one at `last`.
fn add_candidate(e: &mut Emitter, [v, i]: [Value; 2], last: usize, better: &str) {
    let (v, i) = (e.text(v).to_owned(), e.text(i).to_owned());
    e.open(&format!(
        "if (!full || {better}({v}, {i}, values[{last}], positions[{last}]))"
    ));
    e.line("const u32 place = atomicAdd(&count, 1u);");
    e.line(&format!("values[place] = {v};"));
    e.line(&format!("positions[place] = {i};"));
    e.close();
}

/// Bits of an element that no other comes after.
fn worst_bits(dtype: DType, largest: bool) -> u64 {
    match largest {
        true => extreme_bits(dtype, Extremum::Max),
        false if dtype.is_float() => real_bits(dtype, f64::NAN),
        false => extreme_bits(dtype, Extremum::Min),
    }
}
