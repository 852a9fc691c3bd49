//! Matrix products with few rows or columns: time goes into reading the other operand once, in wide
//! accesses.
//!
//! Of the two operands, one has few lines (up to [`FEW`]), the other many. Where the latter's
//! elements are contiguous along the summed axis, a group of threads computes the results of a few
//! of its lines; where they lie side by side across lines, a block computes those of neighbouring
//! lines, its threads sharing the sum. Where that gives too few blocks, several share a sum, and a
//! second kernel adds theirs, in order. Accumulation is as in [`super::contract`].

use super::candidates::{Candidate, Candidates, Resources, Work, in_parts};
use super::contract::accumulator;
use super::emit::{Emitter, Value};
use super::fusion::{followers, stored_before};
use super::runs::{Runs, is_dense};
use super::text::{element_type, literal};
use crate::codegen::body::Body;
use crate::codegen::phases::{Cover, MatchContext};
use crate::codegen::pull::{Emit, Ix, Kind, Puller};
use crate::error::Result;
use crate::ir::{Node, NodeId, Op, ScalarOp, ValueId};
use gristmill_runtime::DType;

/// Threads of a block.
const BLOCK: usize = 256;
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
enum Form {
    /// `group` threads go along the depth for `lines` lines at a time.
    Along { group: usize, lines: usize },
    /// So many threads have neighbouring runs of lines; the others of the block share the depth.
    Across { lanes: usize },
}

/// A product, and the element-wise ops that follow it.
#[derive(Clone, Debug)]
struct Skinny {
    node: NodeId,
    result: ValueId,
    n_batch: usize,
    /// Lines of the operand that has few, and of the other.
    n_few: usize,
    n_many: usize,
    depth: usize,
    /// True if the left-hand operand is the one with few lines.
    few_is_lhs: bool,
    /// Elements of a run of the operand with many lines.
    width: usize,
    form: Form,
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
    let out = body.shape(node.outputs[0]);
    let (lead, &[m, n]) = out.split_at(out.len() - 2) else {
        return None;
    };
    let depth = *body.shape(lhs).last()?;
    let few_is_lhs = m <= n;
    let (n_few, n_many) = (m.min(n), m.max(n));
    let n_batch: usize = lead.iter().product();
    if n_few > FEW || depth < LEAST_DEPTH || n_few * n_batch == 0 {
        return None;
    }
    let (few, many) = if few_is_lhs { (lhs, rhs) } else { (rhs, lhs) };
    let needs = stored_before(body, around, [(few, CHEAP_FLOPS), (many, PROLOGUE_FLOPS)]);
    let in_memory = |v: ValueId| (around.in_memory)(v) || needs.contains(&v);
    let rank = body.shape(many).len();
    let (line_axis, depth_axis) = if few_is_lhs {
        (rank - 1, rank - 2)
    } else {
        (rank - 2, rank - 1)
    };
    let [along, across] =
        [depth_axis, line_axis].map(|axis| Runs::of(body, many, axis, &in_memory).width());
    let [dense_along, dense_across] =
        [depth_axis, line_axis].map(|axis| is_dense(body, many, axis, &in_memory));
    let dtype = body.dtype(lhs);
    let (form, width) = if (across, dense_across) > (along, dense_along) {
        let lanes = (ACROSS_BYTES / (across * dtype.size_bytes()))
            .next_power_of_two()
            .clamp(1, 32);
        (Form::Across { lanes }, across)
    } else {
        (along_form([n_batch, n_many, depth], n_few, along), along)
    };
    let (nodes, result) = followers(body, around, id);
    let skinny = Skinny {
        node: id,
        result,
        n_batch,
        n_few,
        n_many,
        depth,
        few_is_lhs,
        width,
        form,
        n_parts: 1,
        size_bytes: dtype.size_bytes(),
        acc: accumulator(dtype),
    };
    Some((
        Cover {
            needs,
            nodes,
            results: vec![result],
        },
        Candidates::new(skinny.all())?,
    ))
}

/// Groups as small as keep a GPU busy, and as many lines each.
fn along_form([n_batch, n_many, depth]: [usize; 3], n_few: usize, width: usize) -> Form {
    let blocks = |group: usize, lines: usize| n_batch * n_many.div_ceil(BLOCK / group * lines);
    // One row is not read again for further lines, so that these only give more loads at a time.
    let lines = [4, 2, 1]
        .into_iter()
        .find(|&l| blocks(32, l) >= 2 * ENOUGH_BLOCKS && n_few * l <= MOST_SUMS)
        .unwrap_or(1);
    let mut group = 32;
    while group < BLOCK
        && blocks(group, lines) < 2 * ENOUGH_BLOCKS
        && depth >= 2 * group * width * LEAST_RUNS
    {
        group *= 2;
    }
    Form::Along { group, lines }
}

/// Where a block is: its batch as a number and as indices, its first line, and its part of the depth.
struct Here {
    batch: Ix<Value>,
    first: Ix<Value>,
    part: Ix<Value>,
    start: Ix<Value>,
    end: Ix<Value>,
}

impl Skinny {
    /// Variants with as many parts as predicted times choose, then with half and twice as many,
    /// then with other divisions of the work.
    fn all(self) -> Vec<Skinny> {
        let in_parts = |s: &Skinny, n_parts: usize| Skinny {
            n_parts,
            ..s.clone()
        };
        let parts = |s: &Skinny| {
            let most = s.depth / (s.depth_step() * LEAST_RUNS);
            in_parts(
                s,
                (ENOUGH_BLOCKS / in_parts(s, 1).n_blocks()).min(most).max(1),
            )
        };
        let first = parts(&self);
        let runs = |n: usize| self.depth / (self.depth_step() * n);
        let others = [first.n_parts / 2, 2 * first.n_parts]
            .into_iter()
            .filter(|&n| n > 0 && runs(n) >= LEAST_RUNS / 4);
        let mut all = vec![first.clone()];
        all.extend(others.map(|n| in_parts(&first, n)));
        all.extend(self.forms().into_iter().map(|form| {
            parts(&Skinny {
                form,
                ..self.clone()
            })
        }));
        all
    }

    /// Divisions of the work for the same memory layout, as far as registers and shared memory go.
    fn forms(&self) -> Vec<Form> {
        let all: Vec<Form> = match self.form {
            Form::Along { .. } => [32, 64, 128, BLOCK, 16]
                .into_iter()
                .flat_map(|group| [1, 2, 4].map(|lines| Form::Along { group, lines }))
                .filter(|f| !matches!(f, Form::Along { lines, .. } if *lines > 1 && self.n_few * lines > MOST_SUMS))
                .collect(),
            Form::Across { .. } => [4, 8, 16, 32].map(|lanes| Form::Across { lanes }).into(),
        };
        let shared = |form: &Form| {
            let lines = Skinny {
                form: *form,
                ..self.clone()
            }
            .lines();
            let copies = if matches!(form, Form::Across { .. }) {
                BLOCK / 32 + 1
            } else {
                1
            };
            copies * self.n_few * lines * self.acc.size_bytes()
        };
        all.into_iter()
            .filter(|f| shared(f) <= SHARED_BYTES)
            .collect()
    }

    /// Lines of a block.
    fn lines(&self) -> usize {
        match self.form {
            Form::Along { group, lines } => BLOCK / group * lines,
            Form::Across { lanes } => lanes * self.width,
        }
    }

    /// Elements of the depth that all threads of a block, or of a group, read at once.
    fn depth_step(&self) -> usize {
        match self.form {
            Form::Along { group, .. } => group * self.width,
            Form::Across { lanes } => BLOCK / lanes,
        }
    }

    /// Blocks that have some lines, or a part of their sums, each.
    fn n_blocks(&self) -> usize {
        self.n_batch * self.n_many.div_ceil(self.lines()) * self.n_parts
    }

    fn partial_shape(&self) -> [usize; 4] {
        [self.n_parts, self.n_batch, self.n_few, self.n_many]
    }

    /// Index of the element of an operand in a line at some depth; leading axes of extent 1 are broadcast.
    fn index(
        &self,
        p: &Puller<Value>,
        e: &mut Emitter,
        few: bool,
        batch: Ix<Value>,
        [line, k]: [Ix<Value>; 2],
    ) -> (ValueId, Vec<Ix<Value>>) {
        let node = p.body.graph.node(self.node);
        let is_lhs = few == self.few_is_lhs;
        let v = node.inputs[usize::from(!is_lhs)];
        let (out, own) = (p.body.shape(node.outputs[0]), p.body.shape(v));
        let lead = e.delinearise(batch, &out[..out.len() - 2]);
        let skip = lead.len() + 2 - own.len();
        let fixed = own
            .iter()
            .zip(&lead[skip..])
            .map(|(&d, &i)| if d == 1 { Ix::C(0) } else { i });
        let pair = if is_lhs { [line, k] } else { [k, line] };
        (v, fixed.chain(pair).collect())
    }

    /// Stores the run of an operand that begins in a line at some depth into the array `name`.
    #[allow(clippy::too_many_arguments)]
    fn fetch(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        few: bool,
        along: bool,
        batch: Ix<Value>,
        at: [Ix<Value>; 2],
        name: &str,
    ) -> Result<()> {
        let (v, index) = self.index(p, e, few, batch, at);
        let dtype = p.body.dtype(v);
        let axis = index.len() - 1 - usize::from((few == self.few_is_lhs) != along);
        let width = if along || !few { self.width } else { 1 };
        let runs = Runs::of_width(p.body, v, axis, &|v| p.stored.contains_key(&v), width);
        runs.each(p, e, v, &index, |e, k, value| {
            let value = e.convert(value, dtype, self.acc)?;
            let k = e.val(k);
            let line = format!("{name}[{}] = {};", e.text(k), e.text(value));
            e.line(&line);
            Ok(())
        })
    }

    /// Groups of threads, each with some lines; the threads go along the depth.
    fn along(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        here: &Here,
        group: usize,
        lines: usize,
    ) -> Result<()> {
        let (ty, width, n_few) = (element_type(self.acc), self.width, self.n_few);
        e.line(&format!("{ty} acc[{n_few}][{lines}] = {{}};"));
        let number = e.define(Kind::Index, &format!("ix(threadIdx.x / {group}) * {lines}"));
        let own = e.add(here.first, Ix::V(number));
        let (start, end) = (e.val(here.start), e.val(here.end));
        let first = format!("{} + ix(threadIdx.x % {group}) * {width}", e.text(start));
        let (end, step) = (e.text(end).to_owned(), (group * width).to_string());
        e.counted([&first, &end, &step], |e, k| {
            e.line(&format!("{ty} many[{lines}][{width}];"));
            let j = e.open_unrolled(lines);
            let line = e.add(own, Ix::V(j));
            let inside = e.below(line, self.n_many, self.lines());
            let row = format!("many[{}]", e.text(j));
            e.guarded(&[inside], |e| {
                self.fetch(p, e, false, true, here.batch, [line, Ix::V(k)], &row)
            })?;
            if inside.is_some() {
                e.line(&format!(
                    "else for (int w = 0; w < {width}; ++w) {row}[w] = {};",
                    literal(self.acc, 0)
                ));
            }
            e.close();
            let i = e.open_unrolled(n_few);
            e.line(&format!("{ty} few[{width}];"));
            self.fetch(p, e, true, true, here.batch, [Ix::V(i), Ix::V(k)], "few")?;
            let i = e.text(i).to_owned();
            let (j, w) = (e.open_unrolled(lines), e.open_unrolled(width));
            let (j, w) = (e.text(j).to_owned(), e.text(w).to_owned());
            e.line(&format!(
                "acc[{i}][{j}] = gm_multiply_add(few[{w}], many[{j}][{w}], acc[{i}][{j}]);"
            ));
            (0..3).for_each(|_| e.close());
            Ok(())
        })?;
        let (i, j) = (e.open_unrolled(n_few), e.open_unrolled(lines));
        let (i, j) = (e.text(i).to_owned(), e.text(j).to_owned());
        e.line(&format!(
            "const {ty} sum = gm_group<{group}, {BLOCK}>(acc[{i}][{j}], gm_sum());"
        ));
        let line = format!(
            "if (threadIdx.x % {group} == 0) sums[{i}][{} + {j}] = sum;",
            e.text(number)
        );
        e.line(&line);
        (0..2).for_each(|_| e.close());
        Ok(())
    }

    /// Threads across runs of neighbouring lines; the block's warps share the depth.
    fn across(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        here: &Here,
        lanes: usize,
    ) -> Result<()> {
        let (ty, width, n_few) = (element_type(self.acc), self.width, self.n_few);
        e.line(&format!(
            "__shared__ {ty} of_warp[{}][{n_few}][{}];",
            BLOCK / 32,
            self.lines()
        ));
        e.line(&format!("{ty} acc[{n_few}][{width}] = {{}};"));
        let number = e.define(Kind::Index, &format!("ix(threadIdx.x % {lanes}) * {width}"));
        let line = e.add(here.first, Ix::V(number));
        let inside = e.below(line, self.n_many, self.lines());
        let (start, end) = (e.val(here.start), e.val(here.end));
        let first = format!("{} + ix(threadIdx.x / {lanes})", e.text(start));
        let (end, step) = (e.text(end).to_owned(), (BLOCK / lanes).to_string());
        e.guarded(&[inside], |e| {
            e.line("#pragma unroll 4");
            e.counted([&first, &end, &step], |e, k| {
                e.line(&format!("{ty} many[{width}];"));
                self.fetch(p, e, false, false, here.batch, [line, Ix::V(k)], "many")?;
                let i = e.open_unrolled(n_few);
                e.line(&format!("{ty} few[1];"));
                self.fetch(p, e, true, false, here.batch, [Ix::V(i), Ix::V(k)], "few")?;
                let i = e.text(i).to_owned();
                let w = e.open_unrolled(width);
                let w = e.text(w).to_owned();
                e.line(&format!(
                    "acc[{i}][{w}] = gm_multiply_add(few[0], many[{w}], acc[{i}][{w}]);"
                ));
                (0..2).for_each(|_| e.close());
                Ok(())
            })
        })?;
        let (i, w) = (e.open_unrolled(n_few), e.open_unrolled(width));
        let (i, w) = (e.text(i).to_owned(), e.text(w).to_owned());
        e.line(&format!(
            "const {ty} sum = gm_strided_lanes<{lanes}>(acc[{i}][{w}], gm_sum());"
        ));
        let own = format!(
            "of_warp[threadIdx.x / 32][{i}][{} + {w}] = sum;",
            e.text(number)
        );
        e.line(&format!("if (threadIdx.x % 32 < {lanes}) {own}"));
        (0..2).for_each(|_| e.close());
        e.line("__syncthreads();");
        let items = (n_few * self.lines()).to_string();
        e.counted(
            ["ix(threadIdx.x)", &items, &BLOCK.to_string()],
            |e, item| {
                let (i, j) = e.div_rem(Ix::V(item), self.lines());
                let (i, j) = (e.val(i), e.val(j));
                let at = format!("[{}][{}]", e.text(i), e.text(j));
                e.line(&format!("{ty} sum = of_warp[0]{at};"));
                e.line("#pragma unroll");
                e.line(&format!(
                    "for (int w = 1; w < {}; ++w) sum = gm_sum()(sum, of_warp[w]{at});",
                    BLOCK / 32
                ));
                e.line(&format!("sums{at} = sum;"));
                Ok(())
            },
        )
    }

    /// Stores the block's results, neighbouring lines by neighbouring threads.
    fn store_all(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        here: &Here,
        out: Value,
    ) -> Result<()> {
        let items = (self.n_few * self.lines()).to_string();
        e.counted(
            ["ix(threadIdx.x)", &items, &BLOCK.to_string()],
            |e, item| {
                let (i, j) = e.div_rem(Ix::V(item), self.lines());
                let line = e.add(here.first, j);
                let inside = e.below(line, self.n_many, self.lines());
                let (few, own) = (e.val(i), e.val(j));
                let sum = format!("sums[{}][{}]", e.text(few), e.text(own));
                e.guarded(&[inside], |e| {
                    let sum = e.define(Kind::Element(self.acc), &sum);
                    if self.n_parts == 1 {
                        return self.follow(p, e, here.batch, [i, line], sum, out);
                    }
                    let at = e.linearise(&[here.part, here.batch, i, line], &self.partial_shape());
                    e.store(self.acc, sum, out, at);
                    Ok(())
                })
            },
        )
    }

    /// Stores the epilogue of `sum`, the product's element of these lines.
    fn follow(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        batch: Ix<Value>,
        [few, many]: [Ix<Value>; 2],
        sum: Value,
        out: Value,
    ) -> Result<()> {
        p.scoped(|p| {
            let product = p.body.graph.node(self.node).outputs[0];
            let shape = p.body.shape(product).to_vec();
            let mut at = e.delinearise(batch, &shape[..shape.len() - 2]);
            at.extend(if self.few_is_lhs {
                [few, many]
            } else {
                [many, few]
            });
            let sum = e.convert(sum, self.acc, p.body.dtype(product))?;
            p.remember(product, &at, sum);
            let value = p.value(e, self.result, &at)?;
            let linear = e.linearise(&at, p.body.shape(self.result));
            e.store(p.body.dtype(self.result), value, out, linear);
            Ok(())
        })
    }
}

impl Candidate for Skinny {
    fn name(&self) -> &'static str {
        "skinny"
    }

    fn words(&self) -> String {
        let parts = in_parts(self.n_parts);
        match self.form {
            Form::Along { group, lines } => {
                format!("{group} threads for {lines} lines at a time{parts}")
            }
            Form::Across { lanes } => {
                format!("{lanes} threads across {} lines{parts}", self.lines())
            }
        }
    }

    fn result(&self) -> ValueId {
        self.result
    }

    fn resources(&self) -> Resources {
        Resources::new(self.n_blocks(), BLOCK)
    }

    fn work(&self) -> Work {
        // All lines of a group, or of a block's thread, use an element of the few at a time.
        let per_load = match self.form {
            Form::Along { lines, .. } => lines,
            Form::Across { .. } => self.width,
        };
        let many =
            (self.n_batch * self.n_many.next_multiple_of(self.lines())) as f64 * self.depth as f64;
        let few = many * self.n_few as f64 / (per_load * BLOCK) as f64;
        let partial = if self.n_parts > 1 {
            self.partial_shape().iter().product::<usize>() * 4
        } else {
            0
        };
        Work {
            n_tiles: self.n_blocks(),
            bytes: (many + few) * self.size_bytes as f64,
            n_products: many * self.n_few as f64,
            products_per_byte: PRODUCTS_PER_BYTE,
            partial_bytes: partial as f64,
        }
    }

    fn partial(&self, _: &Body) -> Option<(DType, usize)> {
        (self.n_parts > 1).then(|| (self.acc, self.partial_shape().iter().product()))
    }

    fn n_results(&self) -> usize {
        self.n_batch * self.n_few * self.n_many
    }

    fn emit(&self, p: &mut Puller<Value>, e: &mut Emitter, out: Value) -> Result<()> {
        let ty = element_type(self.acc);
        e.line(&format!(
            "__shared__ {ty} sums[{}][{}];",
            self.n_few,
            self.lines()
        ));
        e.by_block(self.n_blocks(), |e, block| {
            let (rest, part) = e.div_rem(Ix::V(block), self.n_parts);
            let (batch, number) = e.div_rem(rest, self.n_many.div_ceil(self.lines()));
            let first = e.mul(number, self.lines() as i64);
            let per_part = self
                .depth
                .div_ceil(self.n_parts)
                .next_multiple_of(self.depth_step());
            let start = e.mul(part, per_part as i64);
            let mut end = Ix::C(self.depth as i64);
            if self.n_parts > 1 {
                let own = e.add(start, Ix::C(per_part as i64));
                let (own, all) = (e.val(own), e.val(end));
                end = Ix::V(e.index_min(own, all));
            }
            let here = Here {
                batch,
                first,
                part,
                start,
                end,
            };
            match self.form {
                Form::Along { group, lines } => self.along(p, e, &here, group, lines)?,
                Form::Across { lanes } => self.across(p, e, &here, lanes)?,
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
        let [_, n_batch, n_few, n_many] = self.partial_shape();
        let zero = e.constant(self.acc, 0);
        let (first, end) = (Ix::C(0), Ix::C(self.n_parts as i64));
        let sum = e.for_loop(first, end, 1, &[zero], |e, part, carried| {
            let from = e.mul(Ix::V(part), (n_batch * n_few * n_many) as i64);
            let at = e.add(from, Ix::V(item));
            let own = e.load(self.acc, partial, at);
            Ok(vec![e.scalar_op(
                ScalarOp::Add,
                &[self.acc; 2],
                &[carried[0], own],
            )?])
        })?[0];
        let at = e.delinearise(Ix::V(item), &[n_batch, n_few, n_many]);
        self.follow(p, e, at[0], [at[1], at[2]], sum, out)
    }
}
