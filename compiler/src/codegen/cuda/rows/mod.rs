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

mod in_registers;
mod online;
mod reduce;

use super::candidates::{Candidate, Candidates, Resources, Work, in_parts, numbers_of_parts};
use super::emit::{Emitter, Value};
use super::fusion::{FusedNode, stored_before};
use super::vector_access::Runs;
use crate::codegen::body::Body;
use crate::codegen::phases::{Cover, MatchContext};
use crate::codegen::pull::{Emit, Ix, Kind, Puller};
use crate::error::{Error, Result};
use crate::ir::{Graph, Node, NodeId, Op, ReduceKind, ValueId};
use gristmill_runtime::DType;
use reduce::Reduction;
pub(super) use reduce::exchanged;

/// Threads of a block, and the largest group.
const BLOCK: usize = 256;
/// Most bytes of a row that one thread keeps in registers.
const KEPT_BYTES: usize = 128;
/// Rows from which on one warp each keeps a GPU busy.
const MANY_ROWS: usize = 2048;
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
    node: FusedNode,
    /// Dtype of the operand.
    dtype: DType,
    layout: Layout,
    /// Blocks that share a row.
    n_parts: usize,
}

/// Rows of a reduction and the threads that read them.
#[derive(Clone, Copy, Debug)]
struct Layout {
    n_rows: usize,
    length: usize,
    sharing: Sharing,
    /// Elements that a thread loads at once: of a row, or of neighbouring ones when a warp has them.
    width: usize,
}

/// True if a composite op is kept as one op because its row fits a group's registers or need not.
pub(super) fn keeps(graph: &Graph, node: &Node) -> bool {
    let Some(ty) = node.inputs.first().map(|&x| graph.ty(x)) else {
        return false;
    };
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

/// The reduction that a node is, if groups suit it. Ops for which [`keeps`] is true always have one.
pub(super) fn find(
    body: &Body,
    around: &MatchContext,
    id: NodeId,
    node: &Node,
) -> Option<(Cover, Candidates)> {
    let x = *node.inputs.first()?;
    let operands = node.inputs.iter().map(|&v| (v, PROLOGUE_FLOPS));
    let needs = stored_before(body, around, operands);
    let in_memory = |v: ValueId| (around.in_memory)(v) || needs.contains(&v);
    let last = body.shape(x).len().checked_sub(1)?;
    let layout = layout(body, node, &|| Runs::of(body, x, last, &in_memory).width())?;
    let (fused, cover) = FusedNode::find(body, around, id, needs);
    let rows = Rows {
        node: fused,
        dtype: body.dtype(x),
        layout,
        n_parts: 1,
    };
    Some((cover, Candidates::new(rows.all(&node.op))?))
}

/// The first layout of a reduction whose operand has runs of such a width along its last axis.
fn layout(body: &Body, node: &Node, run_width: &dyn Fn() -> usize) -> Option<Layout> {
    let x = node.inputs[0];
    match &node.op {
        // Infinities of 8-bit floats do not survive a conversion to `f32` and back.
        Op::Reduce {
            kind: ReduceKind::Max | ReduceKind::Min,
            ..
        } if body.dtype(x).is_float8() => None,
        Op::Reduce { axes, .. } => plain(body, node, axes, run_width()),
        Op::ArgReduce { axis, .. } => {
            let mut layout = plain(body, node, &[*axis], run_width())?;
            if layout.sharing == Sharing::Warps {
                // Positions are compared one by one.
                layout.width = 1;
            }
            Some(layout)
        }
        Op::Softmax { axis, .. } | Op::LayerNorm { axis, .. } | Op::RmsNorm { axis, .. } => {
            let (lead, row) = body.shape(x).split_at(*axis);
            let (length, width) = (row.iter().product(), run_width());
            Some(Layout {
                n_rows: lead.iter().product(),
                length,
                sharing: Sharing::Group(kept_group(body.dtype(x), length, width)),
                width,
            })
        }
        _ => None,
    }
}

/// Layout of a reduction over `axes` whose operand has runs of `width` along its last axis.
fn plain(body: &Body, node: &Node, axes: &[usize], width: usize) -> Option<Layout> {
    let shape = body.shape(node.inputs[0]);
    let length: usize = axes.iter().map(|&a| shape[a]).product();
    let n_rows = body.n_elements(node.outputs[0]);
    if length < LEAST_LENGTH || n_rows == 0 {
        return None;
    }
    let inner = shape.iter().rposition(|&d| d != 1)?;
    let last = shape.len() - 1;
    let (sharing, runs_axis) = if !axes.contains(&inner) && n_rows >= 32 {
        if length < LEAST_COLUMN && n_rows >= MANY_ROWS {
            return None;
        }
        (Sharing::Warps, inner == last)
    } else {
        let has_runs = axes.contains(&last);
        let group = plain_group(n_rows, length, if has_runs { width } else { 1 });
        (Sharing::Group(group), has_runs)
    };
    Some(Layout {
        n_rows,
        length,
        sharing,
        width: if runs_axis { width } else { 1 },
    })
}

/// Threads of a row of a plain reduction.
fn plain_group(n_rows: usize, length: usize, width: usize) -> usize {
    let smallest = (length / width).next_power_of_two().clamp(1, 32);
    let is_short = length <= 4 * smallest * width;
    if n_rows >= MANY_ROWS || is_short {
        smallest
    } else {
        BLOCK
    }
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
struct ThreadPosition {
    /// Number of the group's row, or of the first of the thread's rows, and of the thread among those that share it.
    row: Value,
    lane: Value,
    /// Condition that this row exists; `None` when it always does.
    has_row: Option<Value>,
    /// The block's part of the row.
    part: Ix<Value>,
}

impl Layout {
    /// Expressions of a thread's row in the block, and of its number among the threads of the row.
    fn thread(&self) -> [String; 2] {
        match self.sharing {
            Sharing::Group(group) => ["/", "%"].map(|op| format!("ix(threadIdx.x {op} {group})")),
            Sharing::Warps => {
                let own = format!("ix(threadIdx.x % 32) * {}", self.width);
                [own, "ix(threadIdx.x / 32)".to_owned()]
            }
        }
    }
}

impl Rows {
    /// Variants with as many parts as predicted times choose, then with half and twice as many,
    /// then with other groups. Only plain reductions are split; rows that are kept need a group
    /// that keeps them.
    fn all(self, op: &Op) -> Vec<Rows> {
        let in_parts = self.parts(op).into_iter().map(|n_parts| Rows {
            n_parts,
            ..self.clone()
        });
        let others = self.other_groups(op).into_iter().map(|r| Rows {
            n_parts: r.parts(op)[0],
            ..r
        });
        in_parts.chain(others).collect()
    }

    /// Numbers of parts of a row.
    fn parts(&self, op: &Op) -> Vec<usize> {
        match op {
            Op::Reduce { .. } => {
                numbers_of_parts(self.layout.length / self.step(), self.n_tiles(), LEAST_RUNS)
            }
            _ => vec![1],
        }
    }

    /// All groups of threads of a row, as far as they keep rows that must be kept.
    fn other_groups(&self, op: &Op) -> Vec<Rows> {
        if self.layout.sharing == Sharing::Warps {
            return Vec::new();
        }
        let Layout { length, width, .. } = self.layout;
        let is_plain = matches!(op, Op::Reduce { .. } | Op::ArgReduce { .. });
        let is_kept = !is_plain && fits_registers(&[length], self.dtype);
        let fits = |g: &usize| !is_kept || keeps_row(*g, self.dtype, length, width);
        let of = |group| Rows {
            layout: Layout {
                sharing: Sharing::Group(group),
                ..self.layout
            },
            ..self.clone()
        };
        let groups = [8, 16, 32, 64, 128, BLOCK].into_iter().filter(fits);
        groups.map(of).collect()
    }

    /// Threads that share a row.
    fn sharers(&self) -> usize {
        match self.layout.sharing {
            Sharing::Group(group) => group,
            Sharing::Warps => BLOCK / 32,
        }
    }

    /// Rows of a thread, and of a block.
    fn rows_per_thread(&self) -> usize {
        if self.layout.sharing == Sharing::Warps {
            self.layout.width
        } else {
            1
        }
    }

    fn rows_per_block(&self) -> usize {
        BLOCK / self.sharers() * self.rows_per_thread()
    }

    /// Elements of a row that the threads that share it read at once.
    fn step(&self) -> usize {
        self.sharers() * self.layout.width / self.rows_per_thread()
    }

    /// Blocks that give every row its threads.
    fn n_tiles(&self) -> usize {
        self.layout.n_rows.div_ceil(self.rows_per_block())
    }

    /// Blocks that give every row, or part of one, its threads.
    fn n_blocks(&self) -> usize {
        self.n_tiles() * self.n_parts
    }

    fn here(&self, e: &mut Emitter, block: Value) -> ThreadPosition {
        let (number, part) = e.div_rem(Ix::V(block), self.n_parts);
        let first = e.mul(number, self.rows_per_block() as i64);
        let [own, lane] = self.layout.thread().map(|at| e.define(Kind::Index, &at));
        let row = e.add(first, Ix::V(own));
        let has_row = e.below(row, self.layout.n_rows, self.rows_per_block());
        ThreadPosition {
            row: e.val(row),
            lane,
            has_row,
            part,
        }
    }

    /// Reduces the values of all threads that share the row with `op`.
    fn joined(&self, e: &mut Emitter, value: Value, op: &str) -> Value {
        let own = e.text(value);
        let expression = match self.layout.sharing {
            Sharing::Group(group) => format!("gm_group<{group}, {BLOCK}>({own}, {op}())"),
            Sharing::Warps => format!("gm_warps<{BLOCK}>({own}, {op}())"),
        };
        e.define(e.kind(value), &expression)
    }

    /// Runs of `width` of the operand along its last axis.
    fn runs(&self, p: &Puller<Value>) -> Runs {
        let x = self.node.of(p.body).inputs[0];
        let last = p.body.shape(x).len().saturating_sub(1);
        let stored = |v: ValueId| p.stored.contains_key(&v);
        Runs::of_width(p.body, x, last, &stored, self.layout.width)
    }

    /// Code of the rows of a block.
    fn emit_rows(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        here: &ThreadPosition,
        out: Value,
    ) -> Result<()> {
        let node = self.node.of(p.body);
        let is_kept = fits_registers(&[self.layout.length], self.dtype);
        match &node.op {
            Op::Reduce { .. } | Op::ArgReduce { .. } => {
                let reduction = Reduction::of(p.body, node)?;
                self.reduce(p, e, here, &reduction, out)
            }
            Op::Softmax { log, .. } if is_kept => self.softmax(p, e, here, *log, out),
            Op::Softmax { log, .. } => self.online_softmax(p, e, here, *log, out),
            Op::LayerNorm { epsilon, .. } => self.norm(p, e, here, epsilon.0, true, out),
            Op::RmsNorm { epsilon, .. } => self.norm(p, e, here, epsilon.0, false, out),
            op => Err(Error::internal(format!("{} is no reduction", op.name()))),
        }
    }

    /// Index of element `k` of the thread's row in `shape`.
    fn position(
        &self,
        e: &mut Emitter,
        here: &ThreadPosition,
        k: Value,
        shape: &[usize],
    ) -> Vec<Ix<Value>> {
        let mut inner = 1;
        let axis = shape.iter().rposition(|&d| {
            let ends = inner == self.layout.length;
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
        match self.layout.sharing {
            Sharing::Group(group) => format!("{group} threads per row{parts}"),
            Sharing::Warps => format!(
                "{} threads per row, {} rows each{parts}",
                self.sharers(),
                self.layout.width
            ),
        }
    }

    fn result(&self) -> ValueId {
        self.node.result
    }

    fn resources(&self) -> Resources {
        Resources::new(self.n_blocks(), BLOCK)
    }

    fn work(&self) -> Work {
        let Layout { n_rows, length, .. } = self.layout;
        let rows = n_rows.next_multiple_of(self.rows_per_block());
        let per_part = length.div_ceil(self.n_parts).next_multiple_of(self.step());
        let elements = rows as f64 * (per_part * self.n_parts) as f64;
        // Groups of several warps meet in shared memory.
        let n_sharers = if self.sharers() > 32 {
            self.sharers()
        } else {
            0
        };
        let meetings = (rows * self.n_parts * n_sharers * MEETING_BYTES) as f64;
        let n_partial = if self.n_parts > 1 {
            self.n_parts * n_rows
        } else {
            0
        };
        Work {
            n_tiles: self.n_blocks(),
            bytes: elements * self.dtype.size_bytes() as f64 + meetings,
            n_products: 0.0,
            products_per_byte: 1.0,
            partial_bytes: (n_partial * wide(self.dtype).size_bytes()) as f64,
        }
    }

    fn partial(&self, body: &Body) -> Option<(DType, usize)> {
        let reduction = Reduction::of(body, self.node.of(body)).ok()?;
        (self.n_parts > 1).then(|| (reduction.acc, self.n_parts * self.layout.n_rows))
    }

    /// Elements of the result of a plain reduction.
    fn n_results(&self) -> usize {
        self.layout.n_rows
    }

    fn emit(&self, p: &mut Puller<Value>, e: &mut Emitter, out: Value) -> Result<()> {
        e.by_block(self.n_blocks(), |e, block| {
            let here = self.here(e, block);
            p.scoped(|p| self.emit_rows(p, e, &here, out))
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
