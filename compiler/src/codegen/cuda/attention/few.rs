//! Attention of few queries, as in the decoding of text: what counts is how fast keys and values are
//! read.
//!
//! Neighbouring threads share a key, each with 16 bytes of it, and several such groups of a block have
//! keys of their own. Each key and value is loaded once for all queries of the block, four of each
//! ahead. A block joins what its groups have seen; keys are split among blocks until there are enough
//! of these, and a second kernel joins their results ([`super::join`]), as in Flash-Decoding (Dao,
//! Haziza, Massa and Sizov, 2023).

use super::super::candidates::{Candidate, Resources, Work, in_parts};
use super::super::emit::{Emitter, Value};
use super::super::text::element_type;
use super::super::vector_access::Runs;
use super::{Attention, BlockPosition};
use crate::codegen::body::Body;
use crate::codegen::pull::{Emit, Ix, Kind, Order, Puller};
use crate::error::{Error, Result};
use crate::ir::{ScalarOp, ValueId};
use gristmill_runtime::DType;

/// Threads of a block.
const BLOCK: usize = 256;
/// Most queries, each of which takes registers for itself and for its result.
const MOST_QUERIES: usize = 4;
/// Bytes of a key for each thread.
const WIDEST: usize = 16;
/// Keys of a group to be loaded ahead.
const AHEAD: usize = 4;
/// Blocks that keep a GPU busy with loads, and fewest steps of a block.
const ENOUGH_BLOCKS: usize = 512;
const LEAST_STEPS: usize = 2;
/// Multiplications in the time in which memory moves a byte.
const PRODUCTS_PER_BYTE: f64 = 8.0;

/// An attention of few queries.
#[derive(Clone, Debug)]
pub(super) struct Few {
    attention: Attention,
    /// Elements of a key that a thread has, and threads that share a key.
    width: usize,
    lanes: usize,
}

impl Few {
    /// With as many parts of the keys as a GPU needs, then with half and twice as many. Empty where
    /// queries are many, or see few keys, and where depths are not divided evenly among a group.
    pub(super) fn all(attention: &Attention) -> Vec<Few> {
        let x = attention.x;
        let width = WIDEST / x.dtype.size_bytes();
        let lanes = x.depth / width;
        let divides = x.depth.is_multiple_of(width) && x.value_depth == x.depth;
        let is_group = lanes.is_power_of_two() && (4..=32).contains(&lanes);
        let is_usual = attention.acc == DType::F32 && !attention.causal;
        if !divides || !is_group || !is_usual || x.n_queries > MOST_QUERIES {
            return Vec::new();
        }
        let few = Few {
            attention: attention.clone(),
            width,
            lanes,
        };
        let enough = ENOUGH_BLOCKS.div_ceil(attention.n_batch);
        let most = x.n_keys / (LEAST_STEPS * few.step());
        let n_parts = enough.min(most).max(1);
        let mut parts = vec![n_parts, n_parts / 2, 2 * n_parts];
        parts.retain(|&n| n == n_parts || n > 0 && n <= most);
        let of = |n_parts| Few {
            attention: Attention {
                n_parts,
                ..attention.clone()
            },
            ..few
        };
        parts.into_iter().map(of).collect()
    }

    /// Groups of a block.
    fn n_groups(&self) -> usize {
        BLOCK / self.lanes
    }

    /// Keys of a block at a time.
    fn step(&self) -> usize {
        self.n_groups() * AHEAD
    }

    fn n_blocks(&self) -> usize {
        self.attention.n_batch * self.attention.n_parts
    }

    /// First and last key of a part.
    fn keys(&self, e: &mut Emitter, part: Ix<Value>) -> [Ix<Value>; 2] {
        let Attention { x, n_parts, .. } = self.attention;
        let per_part = x.n_keys.div_ceil(n_parts) as i64;
        let start = e.mul(part, per_part);
        let mut end = Ix::C(x.n_keys as i64);
        if n_parts > 1 {
            let own = e.add(start, Ix::C(per_part));
            end = e.smaller(own, end);
        }
        [start, end]
    }

    /// Declares queries and what the thread has seen.
    fn declare(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        here: &BlockPosition,
        column: Ix<Value>,
    ) -> Result<()> {
        let (n, width) = (self.attention.x.n_queries, self.width);
        let lowest = self.attention.minus_infinity();
        e.line(&format!(
            "f32 query[{n}][{width}], result[{n}][{width}] = {{}};"
        ));
        e.line(&format!("f32 total[{n}] = {{}}, greatest[{n}];"));
        let i = e.open_unrolled(n);
        e.line(&format!("greatest[{}] = {lowest};", e.text(i)));
        self.load(
            p,
            e,
            0,
            here,
            [Ix::V(i), column],
            &format!("query[{}]", e.text(i).to_owned()),
        )?;
        e.close();
        Ok(())
    }

    /// Loads the thread's elements of a row of operand number `operand` into an array.
    fn load(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        operand: usize,
        here: &BlockPosition,
        place: [Ix<Value>; 2],
        array: &str,
    ) -> Result<()> {
        let v = self.attention.node.of(p.body).inputs[operand];
        let at: Vec<Ix<Value>> = here.lead.iter().copied().chain(place).collect();
        let stored: Vec<ValueId> = p.stored.keys().copied().collect();
        let in_memory = |v: ValueId| stored.contains(&v);
        let runs = Runs::of_width(p.body, v, at.len() - 1, &in_memory, self.width);
        runs.each(p, e, v, &at, |e, k, value| {
            let value = e.cast(value, DType::F32)?;
            let name = format!("{array}[{}]", e.position(k));
            e.set(&name, value);
            Ok(())
        })
    }

    /// Scores of the next keys of the group, from `k0` on, and the weighted sums of their values. With an
    /// `end` some of them may be behind it; conditions would keep loads from being asked for together.
    fn step_of_keys(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        here: &BlockPosition,
        k0: Ix<Value>,
        end: Option<Ix<Value>>,
        column: Ix<Value>,
    ) -> Result<()> {
        let (width, lanes) = (self.width, self.lanes);
        e.line(&format!(
            "f32 keys[{AHEAD}][{width}] = {{}}, values[{AHEAD}][{width}] = {{}};"
        ));
        let u = e.open_unrolled(AHEAD);
        let (key, inside) = self.key(e, k0, u, end);
        let names = ["keys", "values"].map(|name| format!("{name}[{}]", e.text(u)));
        e.guarded(&[inside], |e| {
            self.load(p, e, 1, here, [key, column], &names[0])?;
            self.load(p, e, 2, here, [key, column], &names[1])
        })?;
        e.close();
        let i = e.open_unrolled(self.attention.x.n_queries);
        e.line(&format!("f32 scores[{AHEAD}];"));
        let u = e.open_unrolled(AHEAD);
        let (key, inside) = self.key(e, k0, u, end);
        let [query, k] = [i, u].map(|v| e.text(v).to_owned());
        e.line("f32 product = 0;");
        let w = e.open_unrolled(width);
        let w = e.text(w).to_owned();
        e.line(&format!(
            "product = fmaf(query[{query}][{w}], keys[{k}][{w}], product);"
        ));
        e.close();
        e.line(&format!("product = gm_lanes<{lanes}>(product, gm_sum());"));
        let lowest = self.attention.minus_infinity();
        e.line(&format!("scores[{k}] = {lowest};"));
        e.guarded(&[inside], |e| {
            let product = e.named(Kind::Element(DType::F32), "product");
            let score = match self.attention.scales_late() {
                true => product,
                false => self.attention.score(p, e, here, [Ix::V(i), key], product)?,
            };
            e.set(&format!("scores[{k}]"), score);
            Ok(())
        })?;
        e.close();
        let power = self.attention.power();
        e.line(&format!(
            "gm_weigh_few(scores, values, greatest[{query}], total[{query}], result[{query}], {power});"
        ));
        e.close();
        Ok(())
    }

    /// The group's key number `u` from `k0` on, and the condition of its being before `end`.
    fn key(
        &self,
        e: &mut Emitter,
        k0: Ix<Value>,
        u: Value,
        end: Option<Ix<Value>>,
    ) -> (Ix<Value>, Option<Value>) {
        let behind = e.mul(Ix::V(u), self.n_groups() as i64);
        let key = e.add(k0, behind);
        let inside = end.map(|end| {
            let (own, end) = (e.val(key), e.val(end));
            e.index_compare(Order::Less, own, end)
        });
        (key, inside)
    }

    /// Joins what the groups have seen, and stores it or the epilogue of the result.
    fn finish(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        here: &BlockPosition,
        out: Value,
    ) -> Result<()> {
        let (lanes, groups) = (self.lanes, self.n_groups());
        let depth = self.attention.x.value_depth;
        let power = self.attention.power();
        let i = e.open_unrolled(self.attention.x.n_queries);
        let query = e.text(i).to_owned();
        let seen = ["greatest", "total", "result"].map(|name| format!("{name}[{query}]"));
        let seen = seen.join(", ");
        e.line(&format!(
            "gm_join_few<{lanes}, {BLOCK}>({seen}, sums, {power});"
        ));
        e.by_thread(depth, BLOCK, |e, column| {
            let sum = format!("gm_column_few<{groups}, {depth}>(sums, {})", e.text(column));
            let sum = e.define(Kind::Element(DType::F32), &sum);
            let place = [Ix::V(i), Ix::V(column)];
            if self.attention.n_parts > 1 {
                let names = ["greatest", "total"].map(|name| format!("{name}[{query}]"));
                return self
                    .attention
                    .store_column(e, here, place, sum, &names, out);
            }
            let total = e.named(Kind::Element(DType::F32), format!("total[{query}]"));
            let value = e.combine(ScalarOp::Div, sum, total)?;
            let at: Vec<Ix<Value>> = here.lead.iter().copied().chain(place).collect();
            p.scoped(|p| self.attention.node.store(p, e, &at, value, out))
        })?;
        e.line("__syncthreads();");
        e.close();
        Ok(())
    }
}

impl Candidate for Few {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn words(&self) -> String {
        let parts = in_parts(self.attention.n_parts);
        format!("{} threads per key{parts}", self.lanes)
    }

    fn result(&self) -> ValueId {
        self.attention.node.result
    }

    fn resources(&self) -> Resources {
        Resources {
            per_multiprocessor: 2,
            ..Resources::new(self.n_blocks(), BLOCK)
        }
    }

    fn work(&self) -> Work {
        let Attention { x, n_batch, .. } = self.attention;
        let elements = (n_batch * x.n_keys * (x.depth + x.value_depth)) as f64;
        Work {
            n_tiles: self.n_blocks(),
            bytes: elements * x.dtype.size_bytes() as f64,
            n_products: elements * x.n_queries as f64,
            products_per_byte: PRODUCTS_PER_BYTE,
            partial_bytes: (self.attention.partial_elements() * DType::F32.size_bytes()) as f64,
        }
    }

    fn partial(&self, body: &Body) -> Option<(DType, usize)> {
        self.attention.partial(body)
    }

    fn n_results(&self) -> usize {
        self.attention.n_results()
    }

    fn emit(&self, p: &mut Puller<Value>, e: &mut Emitter, out: Value) -> Result<()> {
        let sums = BLOCK * self.width;
        e.line(&format!(
            "__shared__ {} sums[{sums}];",
            element_type(DType::F32)
        ));
        e.by_block(self.n_blocks(), |e, block| {
            let (batch, part) = e.div_rem(Ix::V(block), self.attention.n_parts);
            let here = BlockPosition {
                batch,
                lead: e.delinearise(batch, &self.attention.lead),
                first: Ix::C(0),
                part,
            };
            let lanes = self.lanes;
            let own = ["/", "%"].map(|op| format!("ix(threadIdx.x {op} {lanes})"));
            let [group, lane] = own.map(|at| e.define(Kind::Index, &at));
            let column = e.mul(Ix::V(lane), self.width as i64);
            p.scoped(|p| self.declare(p, e, &here, column))?;
            let [start, end] = self.keys(e, here.part);
            // Threads of a warp go through loops together, as they exchange values.
            let (begin, until, step) = (e.position(start), e.position(end), self.step());
            let whole = format!("{begin} + max({until} - {begin}, ix(0)) / {step} * {step}");
            let whole = e.define(Kind::Index, &whole);
            let whole = e.text(whole).to_owned();
            for (from, to, end) in [(&begin, &whole, None), (&whole, &until, Some(end))] {
                e.counted([from, to, &step.to_string()], |e, k0| {
                    let k0 = e.add(Ix::V(k0), Ix::V(group));
                    p.scoped(|p| self.step_of_keys(p, e, &here, k0, end, column))
                })?;
            }
            p.scoped(|p| self.finish(p, e, &here, out))
        })
    }

    fn join(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        item: Value,
        buffers: [Value; 2],
    ) -> Result<()> {
        match self.attention.n_parts {
            1 => Err(Error::internal("one part is not joined")),
            _ => self.attention.join_parts(p, e, item, buffers),
        }
    }
}
