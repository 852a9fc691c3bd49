//! Reductions by groups of threads, each of which reads its row once, in wide accesses.
//!
//! A group has a row, or where elements lie side by side across rows, a lane of every warp has a
//! few neighbouring ones. Sums, extremes and their positions go through rows in strides of the
//! group ([`reduce`]); where rows are few and long, several blocks share one and a second kernel
//! joins their results, in order. Softmax and the two normalisations keep the row in registers, so
//! that it is read once however often they go through it ([`kept`]); the softmax of longer rows
//! reads them twice ([`online`]). The row is pulled, and the epilogue is computed from the result,
//! as in [`super::contract`]. Plain reductions accumulate as the general code does, the others in
//! `f32` or `f64`.

mod kept;
mod online;
mod reduce;

use super::candidates::{Candidate, Candidates, Resources, Work, in_parts};
use super::emit::{Emitter, Value};
use super::fusion::{followers, stored_before};
use super::runs::Runs;
use crate::codegen::body::Body;
use crate::codegen::phases::{Cover, MatchContext};
use crate::codegen::pull::{Emit, Ix, Kind, Puller};
use crate::error::{Error, Result};
use crate::ir::{Graph, Node, NodeId, Op, ValueId};
use gristmill_runtime::DType;
use reduce::Reduction;
pub(super) use reduce::exchanged;

/// Threads of a block, and the largest group.
const BLOCK: usize = 256;
/// Most bytes of a row that one thread keeps in registers.
const KEPT_BYTES: usize = 128;
/// Rows from which on one warp each keeps a GPU busy.
const MANY_ROWS: usize = 2048;
/// Blocks that keep a GPU busy: rows are split until there are so many.
const ENOUGH_BLOCKS: usize = 256;
/// Fewest runs of a thread for which a row is split further: a second kernel takes as long as a
/// block takes to read so much.
const LEAST_RUNS: usize = 32;
/// Smallest length of a row for which a group is worth its exchanges.
const LEAST_LENGTH: usize = 8;
/// The same where elements lie side by side across many rows, which a thread per row reads well, too.
const LEAST_COLUMN: usize = 32;
/// Most operations per element of a row that are done again rather than stored.
const PROLOGUE_FLOPS: u32 = 128;

/// Bytes that a thread could load while it waits for the other warps of its group.
const MEETING_BYTES: usize = 16;

/// Threads that share a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sharing {
    /// So many neighbours.
    Group(usize),
    /// One of each warp; each has rows of its own.
    Warps,
}

/// A reduction, and the element-wise ops that follow it.
#[derive(Clone, Debug)]
struct Rows {
    node: NodeId,
    result: ValueId,
    /// Dtype of the operand.
    dtype: DType,
    n_rows: usize,
    length: usize,
    sharing: Sharing,
    /// Elements that a thread loads at once: of a row, or of neighbouring ones when a warp has them.
    width: usize,
    /// Blocks that share a row.
    n_parts: usize,
}

/// True if a composite op is kept as one op because its row fits a group's registers or need not.
pub(super) fn keeps(graph: &Graph, node: &Node) -> bool {
    let Some(&x) = node.inputs.first() else {
        return false;
    };
    let ty = graph.ty(x);
    let Some(shape) = ty.static_shape().filter(|s| !s.contains(&0)) else {
        return false;
    };
    match &node.op {
        Op::Softmax { axis, .. } => axis + 1 == shape.len(),
        Op::LayerNorm { axis, .. } | Op::RmsNorm { axis, .. } => {
            fits_registers(&shape[*axis..], ty.dtype)
        }
        _ => false,
    }
}

fn fits_registers(row: &[usize], dtype: DType) -> bool {
    row.iter().product::<usize>() * wide(dtype).size_bytes() <= BLOCK * KEPT_BYTES
}

/// Accumulator dtype of rows that are kept whole.
fn wide(dtype: DType) -> DType {
    if dtype == DType::F64 {
        DType::F64
    } else {
        DType::F32
    }
}

/// The reduction that a node is, if groups suit it. Ops for which [`keeps`] is true always have
/// one.
pub(super) fn find(
    body: &Body,
    around: &MatchContext,
    id: NodeId,
    node: &Node,
) -> Option<(Cover, Candidates)> {
    let x = *node.inputs.first()?;
    let needs = stored_before(
        body,
        around,
        node.inputs.iter().map(|&v| (v, PROLOGUE_FLOPS)),
    );
    let in_memory = |v: ValueId| (around.in_memory)(v) || needs.contains(&v);
    let shape = body.shape(x);
    let last = shape.len().checked_sub(1)?;
    let runs = || Runs::of(body, x, last, &in_memory).width();
    let (n_rows, length, sharing, width) = match &node.op {
        Op::Reduce { axes, .. } => plain(body, node, axes, runs())?,
        Op::ArgReduce { axis, .. } => {
            let (n_rows, length, sharing, width) = plain(body, node, &[*axis], runs())?;
            // Positions are compared one by one.
            (
                n_rows,
                length,
                sharing,
                if sharing == Sharing::Warps { 1 } else { width },
            )
        }
        Op::Softmax { axis, .. } | Op::LayerNorm { axis, .. } | Op::RmsNorm { axis, .. } => {
            let (lead, row) = shape.split_at(*axis);
            let (n_rows, length, width) = (lead.iter().product(), row.iter().product(), runs());
            (
                n_rows,
                length,
                Sharing::Group(kept_group(body.dtype(x), length, width)),
                width,
            )
        }
        _ => return None,
    };
    let (nodes, result) = followers(body, around, id);
    let dtype = body.dtype(x);
    let rows = Rows {
        node: id,
        result,
        dtype,
        n_rows,
        length,
        sharing,
        width,
        n_parts: 1,
    };
    Some((
        Cover {
            needs,
            nodes,
            results: vec![result],
        },
        Candidates::new(rows.all(&node.op))?,
    ))
}

/// Rows, their length and their threads, for a reduction over `axes` whose operand has runs of
/// `width` along its last axis.
fn plain(
    body: &Body,
    node: &Node,
    axes: &[usize],
    width: usize,
) -> Option<(usize, usize, Sharing, usize)> {
    let shape = body.shape(node.inputs[0]);
    let length: usize = axes.iter().map(|&a| shape[a]).product();
    let n_rows = body.n_elements(node.outputs[0]);
    if length < LEAST_LENGTH || n_rows == 0 {
        return None;
    }
    let last = shape.iter().rposition(|&d| d != 1)?;
    if !axes.contains(&last) && n_rows >= 32 {
        let few = length < LEAST_COLUMN && n_rows >= MANY_ROWS;
        return (!few).then_some((
            n_rows,
            length,
            Sharing::Warps,
            if last + 1 == shape.len() { width } else { 1 },
        ));
    }
    let width = if axes.contains(&(shape.len() - 1)) {
        width
    } else {
        1
    };
    let least = (length / width).next_power_of_two().clamp(1, 32);
    let group = if n_rows >= MANY_ROWS || length <= 4 * least * width {
        least
    } else {
        BLOCK
    };
    Some((n_rows, length, Sharing::Group(group), width))
}

/// The smallest group that keeps a row in registers, or the largest when none does.
fn kept_group(dtype: DType, length: usize, width: usize) -> usize {
    let least = (length / width).next_power_of_two().clamp(1, 32);
    let fits = |g: &usize| *g >= least && keeps_row(*g, dtype, length, width);
    [least, 64, 128, BLOCK]
        .into_iter()
        .find(fits)
        .unwrap_or(BLOCK)
}

/// True if a group keeps a row in registers.
fn keeps_row(group: usize, dtype: DType, length: usize, width: usize) -> bool {
    length.div_ceil(group * width) * width * wide(dtype).size_bytes() <= KEPT_BYTES
}

/// Where a thread is.
struct Here {
    /// Number of the group's row, or of the first of the thread's rows, and of the thread among those that share it.
    row: Value,
    lane: Value,
    /// Condition that this row exists; `None` when it always does.
    has_row: Option<Value>,
    /// The block's part of the row.
    part: Ix<Value>,
}

impl Rows {
    /// Variants with as many parts as predicted times choose, then with half and twice as many,
    /// then with other groups. Only plain reductions are split; rows that are kept need a group
    /// that keeps them.
    fn all(self, op: &Op) -> Vec<Rows> {
        let is_split = matches!(op, Op::Reduce { .. });
        let in_parts = |r: &Rows, n_parts: usize| Rows {
            n_parts,
            ..r.clone()
        };
        let parts = |r: &Rows| {
            let most = if is_split {
                self.length / (r.step() * LEAST_RUNS)
            } else {
                1
            };
            in_parts(
                r,
                (ENOUGH_BLOCKS / in_parts(r, 1).n_blocks().max(1))
                    .min(most)
                    .max(1),
            )
        };
        let first = parts(&self);
        let runs = |n: usize| self.length / (self.step() * n);
        let others = [first.n_parts / 2, 2 * first.n_parts];
        let others = others
            .into_iter()
            .filter(|&n| is_split && n > 0 && runs(n) >= LEAST_RUNS / 4);
        let mut all = vec![first.clone()];
        all.extend(others.map(|n| in_parts(&first, n)));
        let is_kept = !matches!(op, Op::Reduce { .. } | Op::ArgReduce { .. });
        let kept = is_kept && fits_registers(&[self.length], self.dtype);
        let fits = |g: &usize| !kept || keeps_row(*g, self.dtype, self.length, self.width);
        if let Sharing::Group(_) = self.sharing {
            let groups = [8, 16, 32, 64, 128, BLOCK].into_iter().filter(fits);
            all.extend(groups.map(|g| {
                parts(&Rows {
                    sharing: Sharing::Group(g),
                    ..self.clone()
                })
            }));
        }
        all
    }

    /// Threads that share a row.
    fn sharers(&self) -> usize {
        match self.sharing {
            Sharing::Group(group) => group,
            Sharing::Warps => BLOCK / 32,
        }
    }

    /// Rows of a thread, and of a block.
    fn rows_per_thread(&self) -> usize {
        if self.sharing == Sharing::Warps {
            self.width
        } else {
            1
        }
    }

    fn rows_per_block(&self) -> usize {
        BLOCK / self.sharers() * self.rows_per_thread()
    }

    /// Elements of a row that the threads that share it read at once.
    fn step(&self) -> usize {
        self.sharers() * self.width / self.rows_per_thread()
    }

    /// Blocks that give every row, or part of one, its threads.
    fn n_blocks(&self) -> usize {
        self.n_rows.div_ceil(self.rows_per_block()) * self.n_parts
    }

    fn here(&self, e: &mut Emitter, block: Value) -> Here {
        let (number, part) = e.div_rem(Ix::V(block), self.n_parts);
        let first = e.mul(number, self.rows_per_block() as i64);
        let (own, lane) = match self.sharing {
            Sharing::Group(group) => (
                format!("ix(threadIdx.x / {group})"),
                format!("ix(threadIdx.x % {group})"),
            ),
            Sharing::Warps => {
                let own = format!("ix(threadIdx.x % 32) * {}", self.width);
                (own, "ix(threadIdx.x / 32)".to_owned())
            }
        };
        let (own, lane) = (e.define(Kind::Index, &own), e.define(Kind::Index, &lane));
        let row = e.add(first, Ix::V(own));
        let has_row = e.below(row, self.n_rows, self.rows_per_block());
        Here {
            row: e.val(row),
            lane,
            has_row,
            part,
        }
    }

    /// Reduces the values of all threads that share the row with `op`.
    fn joined(&self, e: &mut Emitter, value: Value, op: &str) -> Value {
        let value_text = e.text(value);
        let expression = match self.sharing {
            Sharing::Group(group) => format!("gm_group<{group}, {BLOCK}>({value_text}, {op}())"),
            Sharing::Warps => format!("gm_warps<{BLOCK}>({value_text}, {op}())"),
        };
        e.define(e.kind(value), &expression)
    }

    /// Stores the epilogue of `value`, the result's element at `at`.
    fn store(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        at: &[Ix<Value>],
        value: Value,
        out: Value,
    ) -> Result<()> {
        let value = self.followed(p, e, at, value)?;
        let linear = e.linearise(at, p.body.shape(self.result));
        e.store(p.body.dtype(self.result), value, out, linear);
        Ok(())
    }

    /// Epilogue of `value`, the reduction's element at `at`.
    fn followed(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        at: &[Ix<Value>],
        value: Value,
    ) -> Result<Value> {
        p.scoped(|p| {
            let own = p.body.graph.node(self.node).outputs[0];
            p.remember(own, at, value);
            p.value(e, self.result, at)
        })
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
}

impl Candidate for Rows {
    fn name(&self) -> &'static str {
        "rows"
    }

    fn words(&self) -> String {
        let parts = in_parts(self.n_parts);
        match self.sharing {
            Sharing::Group(group) => format!("{group} threads per row{parts}"),
            Sharing::Warps => format!(
                "{} threads per row, {} rows each{parts}",
                self.sharers(),
                self.width
            ),
        }
    }

    fn result(&self) -> ValueId {
        self.result
    }

    fn resources(&self) -> Resources {
        Resources::new(self.n_blocks(), BLOCK)
    }

    fn work(&self) -> Work {
        let rows = self.n_rows.next_multiple_of(self.rows_per_block());
        let length = self
            .length
            .div_ceil(self.n_parts)
            .next_multiple_of(self.step())
            * self.n_parts;
        let elements = rows as f64 * length as f64;
        // Groups of several warps meet in shared memory.
        let meetings = if self.sharers() > 32 {
            (rows * self.n_parts * self.sharers() * MEETING_BYTES) as f64
        } else {
            0.0
        };
        let partial = if self.n_parts > 1 {
            self.n_parts * self.n_rows * wide(self.dtype).size_bytes()
        } else {
            0
        };
        Work {
            n_tiles: self.n_blocks(),
            bytes: elements * self.dtype.size_bytes() as f64 + meetings,
            n_products: 0.0,
            products_per_byte: 1.0,
            partial_bytes: partial as f64,
        }
    }

    fn partial(&self, body: &Body) -> Option<(DType, usize)> {
        let node = body.graph.node(self.node);
        let reduction = Reduction::of(body, node)
            .ok()
            .filter(|_| self.n_parts > 1)?;
        Some((reduction.acc, self.n_parts * self.n_rows))
    }

    /// Elements of the result of a plain reduction.
    fn n_results(&self) -> usize {
        self.n_rows
    }

    fn emit(&self, p: &mut Puller<Value>, e: &mut Emitter, out: Value) -> Result<()> {
        e.by_block(self.n_blocks(), |e, block| {
            let here = self.here(e, block);
            let node = p.body.graph.node(self.node).clone();
            let kept = fits_registers(&[self.length], p.body.dtype(node.inputs[0]));
            p.scoped(|p| match &node.op {
                Op::Reduce { .. } | Op::ArgReduce { .. } => {
                    let reduction = Reduction::of(p.body, &node)?;
                    self.reduce(p, e, &here, &reduction, out)
                }
                Op::Softmax { log, .. } if kept => self.softmax(p, e, &here, *log, out),
                Op::Softmax { log, .. } => self.online_softmax(p, e, &here, *log, out),
                Op::LayerNorm { epsilon, .. } => self.norm(p, e, &here, epsilon.0, true, out),
                Op::RmsNorm { epsilon, .. } => self.norm(p, e, &here, epsilon.0, false, out),
                op => Err(Error::internal(format!("{} is no reduction", op.name()))),
            })
        })
    }

    fn join(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        item: Value,
        buffers: [Value; 2],
    ) -> Result<()> {
        self.join_parts(p, e, item, buffers)
    }
}
