//! Reductions by groups of threads: a group per row, which reads the row once.
//!
//! Sums and extremes go through the row in strides of the group; softmax and the two normalisations keep it in registers, so that it is
//! read once however often they go through it. The row is pulled and what follows the result is pulled from it, as in
//! [`super::contract`]. Plain reductions accumulate as the general code does, the others in `f32` or `f64`.

use super::emit::{Emitter, Value};
use super::fusion::{flops, followers};
use super::text::element_type;
use crate::codegen::body::Body;
use crate::codegen::phases::{Around, Cover};
use crate::codegen::pull::{Emit, Ix, Kind, Order, Puller, accumulator, extreme_bits, mean, reduced_index};
use crate::error::{Error, Result};
use crate::ir::{Extremum, Graph, Node, NodeId, Op, ReduceKind, ScalarOp, ValueId};
use crate::vecprog::real_bits;
use gristmill_runtime::DType;

/// Threads of a block, and the largest group.
pub(super) const BLOCK: usize = 256;
/// Most bytes of a row that one thread keeps in registers.
const KEPT_BYTES: usize = 128;
/// Rows from which on one warp each keeps a GPU busy.
const MANY_ROWS: usize = 2048;
/// Least length of a row for which a group is worth its exchanges.
const LEAST_LENGTH: usize = 8;
/// Most operations per element of a row that are done again rather than stored.
const PROLOGUE_FLOPS: u32 = 128;

/// A reduction, and the element-wise ops that follow it.
#[derive(Clone, Debug)]
pub(super) struct Rows {
    node: NodeId,
    pub(super) result: ValueId,
    n_rows: usize,
    length: usize,
    group: usize,
}

/// Whether a composite op stays whole, because its row fits a group's registers.
pub(super) fn keeps(graph: &Graph, node: &Node) -> bool {
    let Some(&x) = node.inputs.first() else { return false };
    let ty = graph.ty(x);
    let Some(shape) = ty.static_shape().filter(|s| !s.contains(&0)) else { return false };
    let axis = match &node.op {
        Op::Softmax { axis, .. } if axis + 1 == shape.len() => *axis,
        Op::LayerNorm { axis, .. } | Op::RmsNorm { axis, .. } => *axis,
        _ => return false,
    };
    shape[axis..].iter().product::<usize>() * wide(ty.dtype).size_bytes() <= BLOCK * KEPT_BYTES
}

/// What rows are kept and computed in.
fn wide(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// The reduction that a node is, if groups suit it; always for those that are kept whole.
pub(super) fn find(body: &Body, around: &Around, id: NodeId, node: &Node) -> Option<(Cover, Rows)> {
    let shape = || body.shape(node.inputs[0]);
    let (n_rows, length) = match &node.op {
        Op::Reduce { axes, .. } => {
            let length: usize = axes.iter().map(|&a| shape()[a]).product();
            let n_rows = body.n_elements(node.outputs[0]);
            let last = shape().iter().rposition(|&d| d != 1);
            let along = last.is_some_and(|l| axes.contains(&l)) || n_rows < MANY_ROWS;
            if !along || length < LEAST_LENGTH || n_rows == 0 {
                return None;
            }
            (n_rows, length)
        }
        Op::Softmax { axis, .. } | Op::LayerNorm { axis, .. } | Op::RmsNorm { axis, .. } => {
            (shape()[..*axis].iter().product(), shape()[*axis..].iter().product())
        }
        _ => return None,
    };
    let least = length.next_power_of_two().clamp(1, 32);
    let dtype = body.dtype(node.inputs[0]);
    let fits = |g: &usize| length.div_ceil(*g) * wide(dtype).size_bytes() <= KEPT_BYTES;
    let groups = [least, 64, 128, BLOCK];
    let group = match &node.op {
        Op::Reduce { .. } if n_rows >= MANY_ROWS || length <= 4 * least => least,
        Op::Reduce { .. } => BLOCK,
        _ => *groups.iter().find(|g| **g >= least && fits(g))?,
    };
    let dear = |v: &ValueId| flops(body, around, *v).is_none_or(|f| f > PROLOGUE_FLOPS);
    let needs = node.inputs.iter().copied().filter(dear).collect();
    let (nodes, result) = followers(body, around, id);
    Some((Cover { needs, nodes, results: vec![result] }, Rows { node: id, result, n_rows, length, group }))
}

/// Where a thread is.
struct Here {
    /// Number of the group's row, and of the thread in the group.
    row: Value,
    lane: Value,
    /// Whether there is such a row; `None` when there always is.
    has_row: Option<Value>,
}

impl Rows {
    /// Blocks that give every row a group.
    pub(super) fn n_blocks(&self) -> usize {
        self.n_rows.div_ceil(BLOCK / self.group)
    }

    /// Writes the kernel's body; the result goes to `out`.
    pub(super) fn emit(&self, p: &mut Puller<Value>, e: &mut Emitter, out: Value) -> Result<()> {
        let rows = BLOCK / self.group;
        let first = format!("ix(blockIdx.x) * {rows}");
        let step = format!("ix(gridDim.x) * {rows}");
        e.counted([&first, &self.n_rows.to_string(), &step], |e, base| {
            let row = format!("{} + ix(threadIdx.x / {})", e.text(base), self.group);
            let row = e.define(Kind::Index, &row);
            let lane = e.define(Kind::Index, &format!("ix(threadIdx.x % {})", self.group));
            let has_row = self.below(e, row, self.n_rows, rows);
            let here = Here { row, lane, has_row };
            let node = p.body.graph.node(self.node).clone();
            p.scoped(|p| match &node.op {
                Op::Reduce { kind, axes, keepdims } => self.reduce(p, e, &here, *kind, axes, *keepdims, out),
                Op::Softmax { log, .. } => self.softmax(p, e, &here, *log, out),
                Op::LayerNorm { epsilon, .. } => self.norm(p, e, &here, epsilon.0, true, out),
                Op::RmsNorm { epsilon, .. } => self.norm(p, e, &here, epsilon.0, false, out),
                op => Err(Error::internal(format!("{} is no reduction", op.name()))),
            })
        })
    }

    /// Whether `i < extent`; `None` when whole steps fit exactly.
    fn below(&self, e: &mut Emitter, i: Value, extent: usize, step: usize) -> Option<Value> {
        let limit = e.index(extent as i64);
        (!extent.is_multiple_of(step)).then(|| e.index_compare(Order::Less, i, limit))
    }

    /// Runs `f` where all of the conditions hold.
    fn guarded(
        &self,
        e: &mut Emitter,
        conditions: &[Option<Value>],
        f: impl FnOnce(&mut Emitter) -> Result<()>,
    ) -> Result<()> {
        let all: Vec<&str> = conditions.iter().flatten().map(|&c| e.text(c)).collect();
        if all.is_empty() {
            return f(e);
        }
        let line = format!("if ({})", all.join(" && "));
        e.open(&line);
        f(e)?;
        e.close();
        Ok(())
    }

    /// The value that `op` makes of the group's `value`s.
    fn group(&self, e: &mut Emitter, value: Value, op: &str) -> Value {
        let expression = format!("gm_group<{}, {BLOCK}>({}, {op}())", self.group, e.text(value));
        e.define(e.kind(value), &expression)
    }

    #[allow(clippy::too_many_arguments)]
    fn reduce(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        here: &Here,
        kind: ReduceKind,
        axes: &[usize],
        keepdims: bool,
        out: Value,
    ) -> Result<()> {
        let node = p.body.graph.node(self.node).clone();
        let x = node.inputs[0];
        let (dtype, shape) = (p.body.dtype(x), p.body.shape(x).to_vec());
        let (acc, op, functor, initial) = combination(kind, dtype);
        let at = e.delinearise(Ix::V(here.row), p.body.shape(node.outputs[0]));
        let extents: Vec<usize> = axes.iter().map(|&a| shape[a]).collect();
        let initial = e.constant(acc, initial);
        let initial = e.text(initial).to_owned();
        let sum = e.variable(Kind::Element(acc), Some(&initial));
        self.guarded(e, &[here.has_row], |e| {
            let (first, end, step) = (e.text(here.lane).to_owned(), self.length.to_string(), self.group.to_string());
            e.counted([&first, &end, &step], |e, i| {
                p.scoped(|p| {
                    let inner = e.delinearise(Ix::V(i), &extents);
                    let from = reduced_index(&at, &inner, axes, shape.len(), keepdims);
                    let v = p.value(e, x, &from)?;
                    let v = e.convert(v, dtype, acc)?;
                    let next = e.scalar_op(op, &[acc, acc], &[sum, v])?;
                    e.assign(&[sum], &[next]);
                    Ok(())
                })
            })
        })?;
        let total = self.group(e, sum, functor);
        let zero = e.index(0);
        let leads = e.index_compare(Order::Equal, here.lane, zero);
        self.guarded(e, &[Some(leads), here.has_row], |e| {
            let value = if kind == ReduceKind::Mean { mean(e, total, acc, self.length)? } else { total };
            let value = e.convert(value, acc, dtype)?;
            self.store(p, e, &at, value, out)
        })
    }

    /// Pulls what follows `value`, the result's element at `at`, and stores it.
    fn store(&self, p: &mut Puller<Value>, e: &mut Emitter, at: &[Ix<Value>], value: Value, out: Value) -> Result<()> {
        p.scoped(|p| {
            let own = p.body.graph.node(self.node).outputs[0];
            p.remember(own, at, value);
            let value = p.value(e, self.result, at)?;
            let linear = e.linearise(at, p.body.shape(self.result));
            e.store(p.body.dtype(self.result), value, out, linear);
            Ok(())
        })
    }

    /// Elements of the row that each thread keeps.
    fn n_kept(&self) -> usize {
        self.length.div_ceil(self.group)
    }

    /// For each element that the thread keeps: `f` gets its position in the row, and whether there is such an element.
    fn each(
        &self,
        e: &mut Emitter,
        here: &Here,
        f: impl FnOnce(&mut Emitter, Value, [Option<Value>; 2]) -> Result<()>,
    ) -> Result<()> {
        e.line("#pragma unroll");
        e.open(&format!("for (int j = 0; j < {}; ++j)", self.n_kept()));
        let k = format!("{} + j * {}", e.text(here.lane), self.group);
        let k = e.define(Kind::Index, &k);
        let inside = self.below(e, k, self.length, self.group);
        f(e, k, [here.has_row, inside])?;
        e.close();
        Ok(())
    }

    /// The thread's part of the row, into `row[j]`; zero where there is none.
    fn keep(&self, p: &mut Puller<Value>, e: &mut Emitter, here: &Here) -> Result<DType> {
        let node = p.body.graph.node(self.node).clone();
        let x = node.inputs[0];
        let (dtype, shape) = (p.body.dtype(x), p.body.shape(x).to_vec());
        let acc = wide(dtype);
        e.line(&format!("{} row[{}] = {{}};", element_type(acc), self.n_kept()));
        self.each(e, here, |e, k, inside| {
            self.guarded(e, &inside, |e| {
                p.scoped(|p| {
                    let at = self.position(e, here, k, &shape);
                    let v = p.value(e, x, &at)?;
                    let v = e.convert(v, dtype, acc)?;
                    e.line(&format!("row[j] = {};", e.text(v)));
                    Ok(())
                })
            })
        })?;
        Ok(acc)
    }

    /// Index of element `k` of the thread's row in `shape`.
    fn position(&self, e: &mut Emitter, here: &Here, k: Value, shape: &[usize]) -> Vec<Ix<Value>> {
        let mut inner = 1;
        let axis = shape.iter().rposition(|&d| {
            let ends = inner == self.length;
            inner *= d;
            ends
        });
        let (lead, row) = shape.split_at(axis.map_or(0, |a| a + 1));
        let mut at = e.delinearise(Ix::V(here.row), lead);
        at.extend(e.delinearise(Ix::V(k), row));
        at
    }

    /// Joins `expression` over the kept elements, then over the group.
    fn total(
        &self,
        e: &mut Emitter,
        here: &Here,
        acc: DType,
        op: ScalarOp,
        initial: u64,
        expression: &str,
    ) -> Result<Value> {
        let initial = e.constant(acc, initial);
        let initial = e.text(initial).to_owned();
        let sum = e.variable(Kind::Element(acc), Some(&initial));
        self.each(e, here, |e, _, inside| {
            self.guarded(e, &inside, |e| {
                let v = e.define(Kind::Element(acc), expression);
                let next = e.scalar_op(op, &[acc, acc], &[sum, v])?;
                e.assign(&[sum], &[next]);
                Ok(())
            })
        })?;
        Ok(self.group(e, sum, if op == ScalarOp::Max { "gm_greatest" } else { "gm_sum" }))
    }

    /// Stores `value` of each kept element, given the element.
    fn store_each(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        here: &Here,
        acc: DType,
        out: Value,
        value: impl FnOnce(&mut Puller<Value>, &mut Emitter, Value, &[Ix<Value>]) -> Result<Value>,
    ) -> Result<()> {
        let own = p.body.graph.node(self.node).outputs[0];
        let shape = p.body.shape(own).to_vec();
        self.each(e, here, |e, k, inside| {
            self.guarded(e, &inside, |e| {
                p.scoped(|p| {
                    let at = self.position(e, here, k, &shape);
                    let element = e.named(Kind::Element(acc), "row[j]");
                    let value = value(p, e, element, &at)?;
                    let value = e.convert(value, acc, p.body.dtype(own))?;
                    self.store(p, e, &at, value, out)
                })
            })
        })
    }

    fn softmax(&self, p: &mut Puller<Value>, e: &mut Emitter, here: &Here, log: bool, out: Value) -> Result<()> {
        let acc = self.keep(p, e, here)?;
        let exp = if acc == DType::F64 { "exp" } else { "expf" };
        let max = self.total(e, here, acc, ScalarOp::Max, extreme_bits(acc, Extremum::Max), "row[j]")?;
        // The row becomes what is summed, or with `log` what is left over its logarithm.
        self.each(e, here, |e, _, _| {
            let shifted = format!("row[j] - {}", e.text(max));
            let line = if log { format!("row[j] = {shifted};") } else { format!("row[j] = {exp}({shifted});") };
            e.line(&line);
            Ok(())
        })?;
        let term = if log { format!("{exp}(row[j])") } else { "row[j]".to_owned() };
        let sum = self.total(e, here, acc, ScalarOp::Add, 0, &term)?;
        let divisor = if log { e.scalar_op(ScalarOp::Log, &[acc], &[sum])? } else { sum };
        let last = if log { ScalarOp::Sub } else { ScalarOp::Div };
        self.store_each(p, e, here, acc, out, |_, e, x, _| e.scalar_op(last, &[acc, acc], &[x, divisor]))
    }

    /// `(x - mean) / sqrt(variance + epsilon) * gamma + beta`; without `centred`, mean and beta are zero.
    fn norm(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        here: &Here,
        epsilon: f64,
        centred: bool,
        out: Value,
    ) -> Result<()> {
        let acc = self.keep(p, e, here)?;
        let pair = [acc, acc];
        let n = e.constant(acc, real_bits(acc, self.length as f64));
        if centred {
            let sum = self.total(e, here, acc, ScalarOp::Add, 0, "row[j]")?;
            let mean = e.scalar_op(ScalarOp::Div, &pair, &[sum, n])?;
            self.each(e, here, |e, _, _| {
                let line = format!("row[j] = row[j] - {};", e.text(mean));
                e.line(&line);
                Ok(())
            })?;
        }
        let squares = self.total(e, here, acc, ScalarOp::Add, 0, "row[j] * row[j]")?;
        let variance = e.scalar_op(ScalarOp::Div, &pair, &[squares, n])?;
        let epsilon = e.constant(acc, real_bits(acc, epsilon));
        let shifted = e.scalar_op(ScalarOp::Add, &pair, &[variance, epsilon])?;
        let root = e.scalar_op(ScalarOp::Sqrt, &[acc], &[shifted])?;
        let node = p.body.graph.node(self.node).clone();
        let dtype = p.body.dtype(node.inputs[0]);
        self.store_each(p, e, here, acc, out, |p, e, x, at| {
            let factor = |p: &mut Puller<Value>, e: &mut Emitter, i: usize| {
                let v = p.broadcast_value(e, node.inputs[i], at)?;
                e.convert(v, dtype, acc)
            };
            let unit = e.scalar_op(ScalarOp::Div, &pair, &[x, root])?;
            let gamma = factor(p, e, 1)?;
            let scaled = e.scalar_op(ScalarOp::Mul, &pair, &[unit, gamma])?;
            if !centred {
                return Ok(scaled);
            }
            let beta = factor(p, e, 2)?;
            e.scalar_op(ScalarOp::Add, &pair, &[scaled, beta])
        })
    }
}

/// What a reduction accumulates in, how two values join, in the thread and in the group, and what it begins with.
fn combination(kind: ReduceKind, dtype: DType) -> (DType, ScalarOp, &'static str, u64) {
    // Values are exchanged between threads in 32 or 64 bits.
    let extreme = match dtype {
        d if d.is_float() => wide(d),
        DType::I8 | DType::I16 => DType::I32,
        DType::U8 | DType::U16 | DType::Bool => DType::U32,
        d => d,
    };
    let sum = accumulator(dtype);
    match kind {
        ReduceKind::Sum | ReduceKind::Mean => (sum, ScalarOp::Add, "gm_sum", 0),
        ReduceKind::Prod => (sum, ScalarOp::Mul, "gm_product", real_bits(sum, 1.0)),
        ReduceKind::Max => (extreme, ScalarOp::Max, "gm_greatest", extreme_bits(extreme, Extremum::Max)),
        ReduceKind::Min => (extreme, ScalarOp::Min, "gm_least", extreme_bits(extreme, Extremum::Min)),
    }
}
