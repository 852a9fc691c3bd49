//! Matrix products with few rows or columns: time goes into reading the other operand once, in wide
//! accesses.
//!
//! Of the two operands, one has few lines (up to [`FEW`]), the other many. Where the latter's
//! elements are contiguous along the summed axis, a group of threads computes the results of a few
//! of its lines; where they lie side by side across lines, a block computes those of neighbouring
//! lines, its threads sharing the sum. Where that gives too few blocks, several share a sum, and a
//! second kernel adds theirs, in order. Accumulation is as in [`super::contract`].

use super::candidates::{
    Candidate, Candidates, Partials, Resources, Work, in_parts, numbers_of_parts, share_of,
};
use super::contract::{accumulator, matrix_index};
use super::emit::{Emitter, Value};
use super::fusion::{FusedNode, stored_before};
use super::text::{element_type, literal};
use super::vector_access::{Runs, is_dense};
use crate::codegen::body::Body;
use crate::codegen::phases::{Cover, MatchContext};
use crate::codegen::pull::{Emit, Ix, Kind, Puller};
use crate::error::Result;
use crate::ir::{Node, NodeId, Op, ScalarOp, ValueId};
use gristmill_runtime::DType;

/// Threads of a block.
const BLOCK: usize = 256;
/// Blocks of a multiprocessor that must have registers: 80 for each thread. Left to itself, ptxas
/// of CUDA 13.2 spills on `sm_86` and `sm_89`, to fit a sixth block.
const RESIDENT_BLOCKS: u32 = 3;
/// Most lines of the operand that has few.
const FEW: usize = 8;
/// Smallest depth for which threads share a sum.
const LEAST_DEPTH: usize = 16;
/// Blocks that keep every GPU of today busy.
const ENOUGH_BLOCKS: usize = 256;
/// Fewest runs of a thread for which a sum is split further: a second kernel takes as long as a
/// block takes to read so much.
const LEAST_RUNS: usize = 16;
/// Operations per element up to which the operand with many lines is computed on the way.
const PROLOGUE_FLOPS: u32 = 64;
/// The same for the other, which every block reads.
const CHEAP_FLOPS: u32 = 8;
/// Bytes of neighbouring lines that the lanes of a warp read at once, where elements lie side by side across them.
const ACROSS_BYTES: usize = 128;

/// Sums of a thread that has several lines at most.
const MOST_SUMS: usize = 16;
/// Shared memory that a block may declare, bytes.
const SHARED_BYTES: usize = 48 << 10;
/// Multiplications in the time of a byte.
const PRODUCTS_PER_BYTE: f64 = 8.0;

/// Division of the work among threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Variant {
    /// `group` threads go along the depth for `lines` lines at a time.
    Along { group: usize, lines: usize },
    /// So many threads have neighbouring runs of lines; the others of the block share the depth.
    Across { lanes: usize },
}

/// Extents of a product with few rows or columns.
#[derive(Clone, Copy, Debug)]
struct Extents {
    n_batch: usize,
    /// Lines of the operand that has few, and of the other.
    n_few: usize,
    n_many: usize,
    depth: usize,
}

/// A product, and the element-wise ops that follow it.
#[derive(Clone, Debug)]
struct Skinny {
    node: FusedNode,
    x: Extents,
    /// True if the left-hand operand is the one with few lines.
    few_is_lhs: bool,
    /// Elements of a run of the operand with many lines.
    width: usize,
    variant: Variant,
    n_parts: usize,
    /// Bytes of an element, and the dtype of sums.
    size_bytes: usize,
    acc: DType,
}

/// The skinny product that a node is, if it is one.
pub(super) fn find(
    body: &Body,
    around: &MatchContext,
    id: NodeId,
    node: &Node,
) -> Option<(Cover, Candidates)> {
    let Op::MatMul = node.op else { return None };
    let (lhs, rhs) = (node.inputs[0], node.inputs[1]);
    let (lead, &[m, n]) = body.shape(node.outputs[0]).split_last_chunk::<2>()?;
    let x = Extents {
        n_batch: lead.iter().product(),
        n_few: m.min(n),
        n_many: m.max(n),
        depth: *body.shape(lhs).last()?,
    };
    if x.n_few > FEW || x.depth < LEAST_DEPTH || x.n_few * x.n_batch == 0 {
        return None;
    }
    let few_is_lhs = m <= n;
    let (few, many) = if few_is_lhs { (lhs, rhs) } else { (rhs, lhs) };
    let needs = stored_before(body, around, [(few, CHEAP_FLOPS), (many, PROLOGUE_FLOPS)]);
    let in_memory = |v: ValueId| (around.in_memory)(v) || needs.contains(&v);
    let (variant, width) = variant(body, &x, (many, few_is_lhs), &in_memory);
    let dtype = body.dtype(lhs);
    let (node, cover) = FusedNode::find(body, around, id, needs);
    let skinny = Skinny {
        node,
        x,
        few_is_lhs,
        width,
        variant,
        n_parts: 1,
        size_bytes: dtype.size_bytes(),
        acc: accumulator(dtype),
    };
    Some((cover, Candidates::new(skinny.all())?))
}

/// The first variant and the width of runs, for the memory layout of the operand with many lines,
/// which is the right-hand one if `few_is_lhs`.
fn variant(
    body: &Body,
    x: &Extents,
    (many, few_is_lhs): (ValueId, bool),
    in_memory: &dyn Fn(ValueId) -> bool,
) -> (Variant, usize) {
    let rank = body.shape(many).len();
    let mut axes = [rank - 1, rank - 2];
    if few_is_lhs {
        axes.reverse();
    }
    let [along, across] = axes.map(|axis| {
        let width = Runs::of(body, many, axis, in_memory).width();
        (width, is_dense(body, many, axis, in_memory))
    });
    if across <= along {
        return (along_variant(x, along.0), along.0);
    }
    let lanes = ACROSS_BYTES / (across.0 * body.dtype(many).size_bytes());
    let lanes = lanes.next_power_of_two().clamp(1, 32);
    (Variant::Across { lanes }, across.0)
}

/// Groups as small as keep a GPU busy, and as many lines each.
fn along_variant(x: &Extents, width: usize) -> Variant {
    let blocks = |group: usize, lines: usize| x.n_batch * x.n_many.div_ceil(BLOCK / group * lines);
    // One row is not read again for further lines, so that these only give more loads at a time.
    let fits = |l: &usize| blocks(32, *l) >= 2 * ENOUGH_BLOCKS && x.n_few * l <= MOST_SUMS;
    let lines = [4, 2, 1].into_iter().find(fits).unwrap_or(1);
    let is_idle = |group: usize| blocks(group, lines) < 2 * ENOUGH_BLOCKS;
    let mut group = 32;
    while group < BLOCK && is_idle(group) && x.depth >= 2 * group * width * LEAST_RUNS {
        group *= 2;
    }
    Variant::Along { group, lines }
}

/// Where a block is: its batch as a number and as indices, its first line, and its part of the depth.
struct BlockPosition {
    batch: Ix<Value>,
    first: Ix<Value>,
    part: Ix<Value>,
    start: Ix<Value>,
    end: Ix<Value>,
}

/// A run to load: of the operand with few lines or of the other, in a matrix of the batch.
struct Run {
    few: bool,
    batch: Ix<Value>,
}

/// Opens two nested unrolled loops; gives the names of their indices.
fn open_nested(e: &mut Emitter, lengths: [usize; 2]) -> [String; 2] {
    lengths.map(|n| {
        let i = e.open_unrolled(n);
        e.text(i).to_owned()
    })
}

impl Skinny {
    /// Variants with as many parts as predicted times choose, then with half and twice as many,
    /// then with other divisions of the work.
    fn all(self) -> Vec<Skinny> {
        let in_parts = self.parts().into_iter().map(|n_parts| Skinny {
            n_parts,
            ..self.clone()
        });
        let others = self.variants().into_iter().map(|s| Skinny {
            n_parts: s.parts()[0],
            ..s
        });
        in_parts.chain(others).collect()
    }

    /// Numbers of parts of the depth.
    fn parts(&self) -> Vec<usize> {
        numbers_of_parts(self.x.depth / self.depth_step(), self.n_tiles(), LEAST_RUNS)
    }

    /// Divisions of the work for the same memory layout, as far as registers and shared memory go.
    fn variants(&self) -> Vec<Skinny> {
        let all: Vec<Variant> = match self.variant {
            Variant::Along { .. } => {
                let lines = [1, 2, 4].into_iter();
                let lines = lines.filter(|l| *l == 1 || self.x.n_few * l <= MOST_SUMS);
                let groups = [32, 64, 128, BLOCK, 16].into_iter();
                let of = |group| {
                    lines
                        .clone()
                        .map(move |lines| Variant::Along { group, lines })
                };
                groups.flat_map(of).collect()
            }
            Variant::Across { .. } => [4, 8, 16, 32].map(|lanes| Variant::Across { lanes }).into(),
        };
        let of = |variant| Skinny {
            variant,
            ..self.clone()
        };
        let fits = |s: &Skinny| s.shared_bytes() <= SHARED_BYTES;
        all.into_iter().map(of).filter(fits).collect()
    }

    /// Shared memory that a block declares for sums.
    fn shared_bytes(&self) -> usize {
        let n_copies = match self.variant {
            Variant::Along { .. } => 1,
            Variant::Across { .. } => BLOCK / 32 + 1,
        };
        n_copies * self.x.n_few * self.lines() * self.acc.size_bytes()
    }

    /// Lines of a block.
    fn lines(&self) -> usize {
        match self.variant {
            Variant::Along { group, lines } => BLOCK / group * lines,
            Variant::Across { lanes } => lanes * self.width,
        }
    }

    /// Elements of the depth that all threads of a block, or of a group, read at once.
    fn depth_step(&self) -> usize {
        match self.variant {
            Variant::Along { group, .. } => group * self.width,
            Variant::Across { lanes } => BLOCK / lanes,
        }
    }

    /// Blocks that have some lines each.
    fn n_tiles(&self) -> usize {
        self.x.n_batch * self.x.n_many.div_ceil(self.lines())
    }

    /// Blocks that have some lines, or a part of their sums, each.
    fn n_blocks(&self) -> usize {
        self.n_tiles() * self.n_parts
    }

    fn partial_shape(&self) -> [usize; 4] {
        [self.n_parts, self.x.n_batch, self.x.n_few, self.x.n_many]
    }

    /// Number of partial sums.
    fn n_partial(&self) -> usize {
        self.n_parts * self.n_results()
    }

    /// Stores the run of an operand that begins in a line at some depth into the array `name`.
    fn fetch(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        run: &Run,
        at: [Ix<Value>; 2],
        name: &str,
    ) -> Result<()> {
        let [line, k] = at;
        let is_lhs = run.few == self.few_is_lhs;
        let (node, i) = (self.node.of(p.body), usize::from(!is_lhs));
        let position = if is_lhs { [line, k] } else { [k, line] };
        let index = matrix_index(p, e, node, i, (run.batch, position));
        let along = matches!(self.variant, Variant::Along { .. });
        let axis = index.len() - 1 - usize::from(is_lhs != along);
        let width = if along || !run.few { self.width } else { 1 };
        let (v, stored) = (node.inputs[i], |v| p.stored.contains_key(&v));
        let runs = Runs::of_width(p.body, v, axis, &stored, width);
        runs.each(p, e, v, &index, |e, k, value| {
            let value = e.cast(value, self.acc)?;
            let element = format!("{name}[{}]", e.position(k));
            e.set(&element, value);
            Ok(())
        })
    }

    /// Groups of threads, each with some lines; the threads go along the depth.
    fn along(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        here: &BlockPosition,
        group: usize,
        lines: usize,
    ) -> Result<()> {
        let (ty, width, n_few) = (element_type(self.acc), self.width, self.x.n_few);
        e.line(&format!("{ty} acc[{n_few}][{lines}] = {{}};"));
        let number = e.define(Kind::Index, &format!("ix(threadIdx.x / {group}) * {lines}"));
        let own = e.add(here.first, Ix::V(number));
        let (start, end) = (e.position(here.start), e.position(here.end));
        let first = format!("{start} + ix(threadIdx.x % {group}) * {width}");
        let step = (group * width).to_string();
        e.counted([&first, &end, &step], |e, k| {
            self.load_many(p, e, here.batch, [own, Ix::V(k)], lines)?;
            self.multiply_along(p, e, here.batch, Ix::V(k), lines)
        })?;
        let [i, j] = open_nested(e, [n_few, lines]);
        e.line(&format!(
            "const {ty} sum = gm_group<{group}, {BLOCK}>(acc[{i}][{j}], gm_sum());"
        ));
        let own = format!("sums[{i}][{} + {j}]", e.text(number));
        e.line(&format!("if (threadIdx.x % {group} == 0) {own} = sum;"));
        (0..2).for_each(|_| e.close());
        Ok(())
    }

    /// Loads runs of a thread's lines at some depth into `many`, zeros past the last line.
    fn load_many(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        batch: Ix<Value>,
        [first, k]: [Ix<Value>; 2],
        lines: usize,
    ) -> Result<()> {
        let (ty, width) = (element_type(self.acc), self.width);
        e.line(&format!("{ty} many[{lines}][{width}];"));
        let j = e.open_unrolled(lines);
        let line = e.add(first, Ix::V(j));
        let inside = e.below(line, self.x.n_many, self.lines());
        let row = format!("many[{}]", e.text(j));
        let run = Run { few: false, batch };
        e.guarded(&[inside], |e| self.fetch(p, e, &run, [line, k], &row))?;
        if inside.is_some() {
            let zero = literal(self.acc, 0);
            e.line(&format!(
                "else for (int w = 0; w < {width}; ++w) {row}[w] = {zero};"
            ));
        }
        e.close();
        Ok(())
    }

    /// Adds products of `many` and of the few lines' runs at some depth.
    fn multiply_along(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        batch: Ix<Value>,
        k: Ix<Value>,
        lines: usize,
    ) -> Result<()> {
        let (ty, width) = (element_type(self.acc), self.width);
        let i = e.open_unrolled(self.x.n_few);
        e.line(&format!("{ty} few[{width}];"));
        let run = Run { few: true, batch };
        self.fetch(p, e, &run, [Ix::V(i), k], "few")?;
        let i = e.text(i).to_owned();
        let [j, w] = open_nested(e, [lines, width]);
        e.line(&format!(
            "acc[{i}][{j}] = gm_multiply_add(few[{w}], many[{j}][{w}], acc[{i}][{j}]);"
        ));
        (0..3).for_each(|_| e.close());
        Ok(())
    }

    /// Threads across runs of neighbouring lines; the block's warps share the depth.
    fn across(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        here: &BlockPosition,
        lanes: usize,
    ) -> Result<()> {
        let (ty, width, n_few) = (element_type(self.acc), self.width, self.x.n_few);
        let (n_warps, n_lines) = (BLOCK / 32, self.lines());
        e.line(&format!(
            "__shared__ {ty} of_warp[{n_warps}][{n_few}][{n_lines}];"
        ));
        e.line(&format!("{ty} acc[{n_few}][{width}] = {{}};"));
        let number = e.define(Kind::Index, &format!("ix(threadIdx.x % {lanes}) * {width}"));
        let line = e.add(here.first, Ix::V(number));
        let inside = e.below(line, self.x.n_many, n_lines);
        let (start, end) = (e.position(here.start), e.position(here.end));
        let first = format!("{start} + ix(threadIdx.x / {lanes})");
        let step = (BLOCK / lanes).to_string();
        e.guarded(&[inside], |e| {
            e.line("#pragma unroll 4");
            e.counted([&first, &end, &step], |e, k| {
                self.multiply_across(p, e, here.batch, [line, Ix::V(k)])
            })
        })?;
        let [i, w] = open_nested(e, [n_few, width]);
        e.line(&format!(
            "const {ty} sum = gm_strided_lanes<{lanes}>(acc[{i}][{w}], gm_sum());"
        ));
        let own = format!("of_warp[threadIdx.x / 32][{i}][{} + {w}]", e.text(number));
        e.line(&format!("if (threadIdx.x % 32 < {lanes}) {own} = sum;"));
        (0..2).for_each(|_| e.close());
        self.join_warps(e)
    }

    /// Adds products of a run of lines and of the few lines at some depth.
    fn multiply_across(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        batch: Ix<Value>,
        [line, k]: [Ix<Value>; 2],
    ) -> Result<()> {
        let (ty, width) = (element_type(self.acc), self.width);
        e.line(&format!("{ty} many[{width}];"));
        let run = Run { few: false, batch };
        self.fetch(p, e, &run, [line, k], "many")?;
        let i = e.open_unrolled(self.x.n_few);
        e.line(&format!("{ty} few[1];"));
        let run = Run { few: true, batch };
        self.fetch(p, e, &run, [Ix::V(i), k], "few")?;
        let w = e.open_unrolled(width);
        let (i, w) = (e.text(i), e.text(w));
        let line = format!("acc[{i}][{w}] = gm_multiply_add(few[0], many[{w}], acc[{i}][{w}]);");
        e.line(&line);
        (0..2).for_each(|_| e.close());
        Ok(())
    }

    /// Adds the sums of the block's warps.
    fn join_warps(&self, e: &mut Emitter) -> Result<()> {
        let (ty, n_warps) = (element_type(self.acc), BLOCK / 32);
        e.line("__syncthreads();");
        e.by_thread(self.x.n_few * self.lines(), BLOCK, |e, item| {
            let (i, j) = e.div_rem(Ix::V(item), self.lines());
            let at = format!("[{}][{}]", e.position(i), e.position(j));
            e.line(&format!("{ty} sum = of_warp[0]{at};"));
            e.line("#pragma unroll");
            e.line(&format!(
                "for (int w = 1; w < {n_warps}; ++w) sum = gm_sum()(sum, of_warp[w]{at});"
            ));
            e.line(&format!("sums{at} = sum;"));
            Ok(())
        })
    }

    fn position(&self, e: &mut Emitter, block: Value) -> BlockPosition {
        let (rest, part) = e.div_rem(Ix::V(block), self.n_parts);
        let (batch, number) = e.div_rem(rest, self.x.n_many.div_ceil(self.lines()));
        let first = e.mul(number, self.lines() as i64);
        let depth = (self.x.depth, self.depth_step());
        let [start, end] = share_of(e, part, self.n_parts, depth);
        BlockPosition {
            batch,
            first,
            part,
            start,
            end,
        }
    }

    /// Stores the block's results, neighbouring lines by neighbouring threads.
    fn store_all(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        here: &BlockPosition,
        out: Value,
    ) -> Result<()> {
        e.by_thread(self.x.n_few * self.lines(), BLOCK, |e, item| {
            let (i, j) = e.div_rem(Ix::V(item), self.lines());
            let line = e.add(here.first, j);
            let inside = e.below(line, self.x.n_many, self.lines());
            let sum = format!("sums[{}][{}]", e.position(i), e.position(j));
            e.guarded(&[inside], |e| {
                let sum = e.define(Kind::Element(self.acc), &sum);
                if self.n_parts == 1 {
                    return self.store(p, e, [here.batch, i, line], sum, out);
                }
                let at = e.linearise(&[here.part, here.batch, i, line], &self.partial_shape());
                e.store(self.acc, sum, out, at);
                Ok(())
            })
        })
    }

    /// Stores the epilogue of `sum`, the product's element of these lines of a batch.
    fn store(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        [batch, few, many]: [Ix<Value>; 3],
        sum: Value,
        out: Value,
    ) -> Result<()> {
        let shape = p.body.shape(self.node.own(p.body));
        let mut at = e.delinearise(batch, &shape[..shape.len() - 2]);
        let lines = [few, many];
        at.extend(lines);
        if !self.few_is_lhs {
            let rank = at.len();
            at.swap(rank - 2, rank - 1);
        }
        self.node.store(p, e, &at, sum, out)
    }
}

impl Candidate for Skinny {
    fn name(&self) -> &'static str {
        "skinny"
    }

    fn words(&self) -> String {
        let parts = in_parts(self.n_parts);
        match self.variant {
            Variant::Along { group, lines } => {
                format!("{group} threads for {lines} lines at a time{parts}")
            }
            Variant::Across { lanes } => {
                format!("{lanes} threads across {} lines{parts}", self.lines())
            }
        }
    }

    fn result(&self) -> ValueId {
        self.node.result
    }

    fn resources(&self) -> Resources {
        Resources {
            per_multiprocessor: RESIDENT_BLOCKS,
            ..Resources::new(self.n_blocks(), BLOCK)
        }
    }

    fn work(&self) -> Work {
        // All lines of a group, or of a block's thread, use an element of the few at a time.
        let per_load = match self.variant {
            Variant::Along { lines, .. } => lines,
            Variant::Across { .. } => self.width,
        };
        let Extents {
            n_batch,
            n_few,
            n_many,
            depth,
        } = self.x;
        let many = (n_batch * n_many.next_multiple_of(self.lines())) as f64 * depth as f64;
        let few = many * n_few as f64 / (per_load * BLOCK) as f64;
        let n_partial = if self.n_parts > 1 {
            self.n_partial()
        } else {
            0
        };
        Work {
            n_tiles: self.n_blocks(),
            bytes: (many + few) * self.size_bytes as f64,
            n_products: many * n_few as f64,
            products_per_byte: PRODUCTS_PER_BYTE,
            partial_bytes: (n_partial * 4) as f64,
        }
    }

    fn partial(&self, _: &Body) -> Option<(DType, usize)> {
        (self.n_parts > 1).then(|| (self.acc, self.n_partial()))
    }

    fn n_results(&self) -> usize {
        self.x.n_batch * self.x.n_few * self.x.n_many
    }

    fn emit(&self, p: &mut Puller<Value>, e: &mut Emitter, out: Value) -> Result<()> {
        let (ty, n_few, n_lines) = (element_type(self.acc), self.x.n_few, self.lines());
        e.line(&format!("__shared__ {ty} sums[{n_few}][{n_lines}];"));
        e.by_block(self.n_blocks(), |e, block| {
            let here = self.position(e, block);
            match self.variant {
                Variant::Along { group, lines } => self.along(p, e, &here, group, lines)?,
                Variant::Across { lanes } => self.across(p, e, &here, lanes)?,
            }
            e.line("__syncthreads();");
            self.store_all(p, e, &here, out)?;
            e.line("__syncthreads();");
            Ok(())
        })
    }

    /// Adds partial sums of batches, few and many lines.
    fn join(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        item: Value,
        [partial, out]: [Value; 2],
    ) -> Result<()> {
        let partials = Partials {
            n_parts: self.n_parts,
            n_elements: self.n_results(),
            dtype: self.acc,
            op: ScalarOp::Add,
            identity: 0,
        };
        let sum = partials.join(e, partial, item)?;
        let at = e.delinearise(Ix::V(item), &self.partial_shape()[1..]);
        self.store(p, e, [at[0], at[1], at[2]], sum, out)
    }
}
