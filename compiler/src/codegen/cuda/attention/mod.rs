//! Attention in one pass over the keys: scores and their weights stay on chip.
//!
//! A block holds a tile of queries and goes through the keys a tile at a time, keeping per query
//! the largest score, the sum of the weights relative to it and the weighted sum of values so far
//! (Dao, arXiv:2307.08691). Where queries are too few to keep a GPU busy, the keys are split among
//! blocks, whose partial results a second kernel joins, in order. Operands are pulled into the
//! tiles, and the epilogue is computed from the result, as in [`super::contract`].
//!
//! `f32` and `f64` are computed in their own dtype. Half types accumulate in `f32`; where tiles are
//! large enough for tensor cores, the weights of the values, which lie between 0 and 1, are rounded
//! to the operands' dtype (the sum that divides them is not), which is an error of at most half a
//! unit in the last place of the largest value.
//!
//! On `sm_90a` large attentions of half types go by warp groups ([`group`]).
//!
//! Keys that `causal` hides from all queries of a tile are not visited, so that infinities and NaNs
//! in their values do not reach the result.

mod few;
mod group;
mod join;
mod load;
mod variant;

use super::Arch;
use super::candidates::{Candidate, Candidates, Resources, Work, in_parts};
use super::emit::{Emitter, Value};
use super::fusion::{FusedNode, stored_before};
use super::text::{element_type, literal};
use crate::codegen::body::Body;
use crate::codegen::phases::{Cover, MatchContext};
use crate::codegen::pull::{Emit, Ix, Kind, Order, Puller};
use crate::error::Result;
use crate::ir::vecprog::real_bits;
use crate::ir::{Graph, Node, NodeId, Op, ScalarOp, ValueId};
use few::Few;
use gristmill_runtime::DType;
use gristmill_runtime::gpu::TensorMap;
use load::Tile;
use variant::{Extents, Registers, STEP, Variant, accumulator};

/// Operations per element up to which an operand is computed again in every tile that needs it.
const CHEAP_FLOPS: u32 = 8;
/// Blocks that keep every GPU of today busy: keys are split until there are so many.
const ENOUGH_BLOCKS: usize = 128;
/// Fewest tiles of keys that are worth a block of their own.
const LEAST_KEY_TILES: usize = 4;

/// An attention, and the element-wise ops that follow it.
#[derive(Clone, Debug)]
struct Attention {
    node: FusedNode,
    /// Extents of the leading axes, and their product.
    lead: Vec<usize>,
    n_batch: usize,
    x: Extents,
    scale: f64,
    causal: bool,
    has_mask: bool,
    /// Dtype of scores and results.
    acc: DType,
    variant: Variant,
    /// Tensor maps of warp-group variants.
    operands: Option<group::Operands>,
    /// Blocks that share a tile of queries.
    n_parts: usize,
}

/// True if an attention is kept as one op because a tile of it fits on chip.
pub(super) fn keeps(graph: &Graph, node: &Node, arch: Arch) -> bool {
    let Op::Attention { .. } = node.op else {
        return false;
    };
    let shape = |i: usize| {
        let shape = graph.ty(node.inputs[i]).static_shape();
        shape.filter(|s| !s.contains(&0))
    };
    let (Some(q), Some(k), Some(v)) = (shape(0), shape(1), shape(2)) else {
        return false;
    };
    let x = extents(graph.ty(node.inputs[0]).dtype, &q, &k, &v);
    !x.variants(arch).is_empty()
}

/// Extents of an attention of values of these shapes.
fn extents(dtype: DType, q: &[usize], k: &[usize], v: &[usize]) -> Extents {
    let rank = q.len();
    Extents {
        dtype,
        n_queries: q[rank - 2],
        n_keys: k[rank - 2],
        depth: q[rank - 1],
        value_depth: v[rank - 1],
    }
}

/// The attention that a node is. Attentions for which [`keeps`] is true always have one.
pub(super) fn find(
    body: &Body,
    around: &MatchContext,
    id: NodeId,
    node: &Node,
    arch: Arch,
) -> Option<(Cover, Candidates)> {
    let Op::Attention { .. } = node.op else {
        return None;
    };
    let [q, k, v] = [0, 1, 2].map(|i| body.shape(node.inputs[i]));
    let x = extents(body.dtype(node.inputs[0]), q, k, v);
    let variants = x.variants(arch);
    let mut needs = stored_before(body, around, node.inputs.iter().map(|&v| (v, CHEAP_FLOPS)));
    let groups = group::find(body, around, node, &x, arch);
    needs.extend(groups.iter().flat_map(|g| g.1.iter().copied()));
    let (fused, cover) = FusedNode::find(body, around, id, needs);
    let first = Attention::new(body, fused, x, *variants.first()?)?;
    let mut all: Vec<Box<dyn Candidate>> = Vec::new();
    all.extend(Few::all(&first).into_iter().map(boxed));
    if let Some((operands, _)) = groups {
        all.extend(first.by_warp_groups(&operands).into_iter().map(boxed));
    }
    let tiles = variants.into_iter().flat_map(|v| first.in_parts(v));
    all.extend(tiles.map(boxed));
    Some((cover, Candidates::of(all)?))
}

fn boxed(candidate: impl Candidate + 'static) -> Box<dyn Candidate> {
    Box::new(candidate)
}

/// Where a block is: its batch, as a number and as indices, its first query, and which part of the keys it has.
struct BlockPosition {
    batch: Ix<Value>,
    lead: Vec<Ix<Value>>,
    first: Ix<Value>,
    part: Ix<Value>,
}

impl Attention {
    /// One variant in one part.
    fn new(body: &Body, fused: FusedNode, x: Extents, variant: Variant) -> Option<Attention> {
        let node = fused.of(body);
        let Op::Attention { scale, causal } = node.op else {
            return None;
        };
        let q = body.shape(node.inputs[0]);
        let lead = q[..q.len() - 2].to_vec();
        Some(Attention {
            node: fused,
            n_batch: lead.iter().product(),
            lead,
            x,
            scale: scale.0,
            causal,
            has_mask: node.inputs.len() > 3,
            acc: accumulator(x.dtype),
            variant,
            operands: None,
            n_parts: 1,
        })
    }

    /// All variants by warp groups, which copy `operands`.
    fn by_warp_groups(&self, operands: &group::Operands) -> Vec<Attention> {
        let variants = self.x.group_variants().into_iter();
        let of = |variant| Attention {
            variant,
            operands: Some(operands.clone()),
            ..self.clone()
        };
        variants.map(of).collect()
    }

    /// One variant with as many parts of the keys as predicted times choose, then with half and
    /// twice as many.
    fn in_parts(&self, variant: Variant) -> Vec<Attention> {
        let n_blocks = self.n_batch * self.x.n_queries.div_ceil(variant.n_queries());
        let n_tiles = self.x.n_keys.div_ceil(variant.n_keys());
        let enough = ENOUGH_BLOCKS.div_ceil(n_blocks);
        let n_parts = enough.min(n_tiles / LEAST_KEY_TILES).max(1);
        let mut all = vec![n_parts, n_parts / 2, 2 * n_parts];
        let fits = |n: usize| n == n_parts || n > 0 && n_tiles / n >= LEAST_KEY_TILES / 2;
        all.retain(|&n| fits(n));
        let of = |n_parts| Attention {
            variant,
            n_parts,
            ..self.clone()
        };
        all.into_iter().map(of).collect()
    }

    /// Extents of a thread's array of scores or results.
    fn registers(&self, which: Registers) -> [usize; 2] {
        self.variant.registers(which, self.x.value_depth)
    }

    /// Tiles of queries, or parts of the keys for one.
    fn n_tiles(&self) -> usize {
        self.n_batch * self.x.n_queries.div_ceil(self.variant.n_queries()) * self.n_parts
    }

    /// A loop over the tiles of a block.
    fn each_tile(
        &self,
        e: &mut Emitter,
        f: impl FnOnce(&mut Emitter, &BlockPosition) -> Result<()>,
    ) -> Result<()> {
        let (n_tiles, n_queries) = (self.n_tiles(), self.variant.n_queries());
        e.by_block(n_tiles, |e, tile| {
            let (rest, part) = e.div_rem(Ix::V(tile), self.n_parts);
            let (batch, row) = e.div_rem(rest, self.x.n_queries.div_ceil(n_queries));
            let first = e.mul(row, n_queries as i64);
            let here = BlockPosition {
                batch,
                lead: e.delinearise(batch, &self.lead),
                first,
                part,
            };
            f(e, &here)
        })
    }

    /// Declares the thread's results, sums of weights and largest scores so far.
    fn declare(&self, e: &mut Emitter) {
        let (ty, n) = (element_type(self.acc), self.variant.per_thread());
        let [a, b] = self.registers(Registers::Result);
        e.line(&format!(
            "{ty} result[{a}][{b}] = {{}}, total[{n}] = {{}}, greatest[{n}];"
        ));
        let i = e.open_unrolled(n);
        let lowest = self.minus_infinity();
        e.line(&format!("greatest[{}] = {lowest};", e.text(i)));
        e.close();
    }

    fn minus_infinity(&self) -> String {
        format!("gm_minus_infinity<{}>()", element_type(self.acc))
    }

    /// The tiles of queries, of the keys from `k0` on, and of their values.
    fn tiles(&self, first: Ix<Value>, k0: Ix<Value>, node: &Node) -> [Tile; 3] {
        let transposed = matches!(self.variant, Variant::Simt { .. });
        let queries = Tile {
            name: "queries",
            operand: node.inputs[0],
            first,
            extent: self.x.n_queries,
            rows: self.variant.n_queries(),
            depth: self.x.depth,
            padded: self.x.depth.next_multiple_of(STEP),
            transposed,
        };
        let keys = Tile {
            name: "keys",
            operand: node.inputs[1],
            first: k0,
            extent: self.x.n_keys,
            rows: self.variant.n_keys(),
            ..queries
        };
        let values = Tile {
            // Threads that multiply elements are done with the keys before they load values.
            name: if transposed { "keys" } else { "values" },
            operand: node.inputs[2],
            depth: self.x.value_depth,
            padded: self.variant.padded_value_depth(self.x.value_depth),
            transposed: false,
            ..keys
        };
        [queries, keys, values]
    }

    /// Body of [`Variant::Simt`].
    fn by_elements(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        here: &BlockPosition,
    ) -> Result<()> {
        let [queries, _, _] = self.tiles(here.first, Ix::C(0), self.node.of(p.body));
        self.load(p, e, here, &queries)?;
        self.declare(e);
        let [start, end] = self.keys(e, here);
        let step = self.variant.n_keys().to_string();
        e.counted([&start, &end, &step], |e, k0| {
            self.step_by_elements(p, e, here, k0)
        })
    }

    /// A tile of keys: scores, their weights, and the weighted sum of values.
    fn step_by_elements(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        here: &BlockPosition,
        k0: Value,
    ) -> Result<()> {
        let [_, keys, values] = self.tiles(here.first, Ix::V(k0), self.node.of(p.body));
        self.load(p, e, here, &keys)?;
        e.line("__syncthreads();");
        let ([a, b], ty) = (self.registers(Registers::Scores), element_type(self.acc));
        e.line(&format!("{ty} scores[{a}][{b}] = {{}};"));
        self.multiply(e, Registers::Scores, keys.padded);
        self.scores(p, e, here, k0)?;
        self.weigh_elements(e);
        e.line("__syncthreads();");
        self.load(p, e, here, &values)?;
        e.line("__syncthreads();");
        self.multiply(e, Registers::Result, self.variant.n_keys());
        e.line("__syncthreads();");
        Ok(())
    }

    /// `c += a * b` of tiles of elements with `depth` outermost.
    fn multiply(&self, e: &mut Emitter, which: Registers, depth: usize) {
        self.variant.multiply(e, which, self.x.value_depth, depth);
    }

    /// Turns a tile of scores into weights.
    fn weigh_elements(&self, e: &mut Emitter) {
        let (m, n) = (self.variant.n_queries(), self.variant.n_keys());
        let [a, b] = self.registers(Registers::Scores);
        let [_, per_thread] = self.registers(Registers::Result);
        let power = self.power();
        e.line(&format!(
            "gm_weigh<{m}, {n}, {a}, {b}, {per_thread}>(scores, greatest, total, result, weights, {power});"
        ));
    }

    /// Body of [`Variant::Tensor`]. Values are in flight while scores are computed, and the next
    /// keys while the results are.
    fn by_fragments(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        here: &BlockPosition,
    ) -> Result<()> {
        let [start, end] = self.keys(e, here);
        let first_key = e.named(Kind::Index, start.clone());
        let [queries, keys, _] = self.tiles(here.first, Ix::V(first_key), self.node.of(p.body));
        let depth = keys.padded;
        self.load(p, e, here, &queries)?;
        wait_for_copies(e);
        e.line(&format!("u32 query[{}][4];", depth / STEP));
        e.line(&format!("gm_load_queries<{depth}>(queries, query);"));
        self.load(p, e, here, &keys)?;
        self.declare(e);
        let step = self.variant.n_keys().to_string();
        e.counted([&start, &end, &step], |e, k0| {
            self.step_by_fragments(p, e, here, k0, &end)
        })?;
        wait_for_copies(e);
        Ok(())
    }

    /// A tile of keys: scores, their weights, and the weighted sum of values.
    fn step_by_fragments(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        here: &BlockPosition,
        k0: Value,
        end: &str,
    ) -> Result<()> {
        let (half, n) = (element_type(self.x.dtype), self.variant.n_keys());
        let node = self.node.of(p.body);
        let [_, keys, values] = self.tiles(here.first, Ix::V(k0), node);
        let (depth, value_depth) = (keys.padded, values.padded);
        wait_for_copies(e);
        self.load(p, e, here, &values)?;
        e.line(&format!("f32 scores[{}][4] = {{}};", n / 8));
        e.line(&format!(
            "gm_multiply_keys<{half}, {depth}, {n}>(query, keys, scores);"
        ));
        wait_for_copies(e);
        let next = e.add(Ix::V(k0), Ix::C(n as i64));
        e.open(&format!("if ({} < {end})", e.position(next)));
        let [_, keys, _] = self.tiles(here.first, next, node);
        self.load(p, e, here, &keys)?;
        e.close();
        self.scores(p, e, here, k0)?;
        e.line("f32 rest[2];");
        let power = self.power();
        e.line(&format!(
            "gm_weigh(scores, greatest, total, rest, {power});"
        ));
        e.line("gm_scale(result, rest);");
        e.line(&format!(
            "gm_multiply_values<{half}, {value_depth}, {n}>(scores, values, result);"
        ));
        Ok(())
    }

    /// First and last key that the block visits, as text.
    fn keys(&self, e: &mut Emitter, here: &BlockPosition) -> [String; 2] {
        let per_part = self.x.n_keys.div_ceil(self.n_parts);
        let per_part = per_part.next_multiple_of(self.variant.n_keys());
        let start = e.mul(here.part, per_part as i64);
        let mut end = Ix::C(self.x.n_keys as i64);
        if self.n_parts > 1 {
            let own = e.add(start, Ix::C(per_part as i64));
            end = e.smaller(end, own);
        }
        if self.causal {
            let visible = e.add(here.first, Ix::C(self.variant.n_queries() as i64));
            end = e.smaller(end, visible);
        }
        [e.position(start), e.position(end)]
    }

    /// True if the scale is applied together with the exponential: a positive factor keeps the
    /// order of scores. A mask rules this out, because it is added after scaling.
    fn scales_late(&self) -> bool {
        self.acc == DType::F32 && !self.has_mask && self.scale > 0.0
    }

    /// The functor that turns scores, or products, into weights.
    fn power(&self) -> String {
        if !self.scales_late() {
            return "gm_power_of_e()".to_owned();
        }
        let factor = self.scale * std::f64::consts::LOG2_E;
        let factor = literal(DType::F32, real_bits(DType::F32, factor));
        format!("gm_power_scaled{{{factor}}}")
    }

    /// For each of the thread's registers: `f` gets its name, the number of its query in the thread, and its row and column in the tile.
    fn each(
        &self,
        e: &mut Emitter,
        which: Registers,
        f: impl FnOnce(&mut Emitter, [&str; 2], [Value; 2]) -> Result<()>,
    ) -> Result<()> {
        let [a, b] = self.registers(which);
        let (i, j) = (e.open_unrolled(a), e.open_unrolled(b));
        let (i, j) = (e.text(i).to_owned(), e.text(j).to_owned());
        let [row, column, query] = self.variant.place(which, self.x.value_depth, [&i, &j]);
        let (row, column) = (e.define(Kind::Index, &row), e.define(Kind::Index, &column));
        let array = which.name();
        f(e, [&format!("{array}[{i}][{j}]"), &query], [row, column])?;
        e.close();
        e.close();
        Ok(())
    }

    /// Turns the thread's products of queries and keys into scores, except for a scale that
    /// [`Attention::power`] applies. Hidden scores become minus infinity.
    fn scores(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        here: &BlockPosition,
        k0: Value,
    ) -> Result<()> {
        if self.scales_late() {
            return self.hide(e, here, k0);
        }
        self.each(e, Registers::Scores, |e, [name, _], place| {
            let (visible, at) = self.visible(e, here, k0, place);
            e.guarded(&visible, |e| {
                let product = e.named(Kind::Element(self.acc), name);
                let score = self.score(p, e, here, at, product)?;
                e.set(name, score);
                Ok(())
            })?;
            if visible.iter().any(Option::is_some) {
                e.line(&format!("else {name} = {};", self.minus_infinity()));
            }
            Ok(())
        })
    }

    /// A score from the product of its query and key.
    fn score(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        here: &BlockPosition,
        at: [Ix<Value>; 2],
        product: Value,
    ) -> Result<Value> {
        let scale = e.constant(self.acc, real_bits(self.acc, self.scale));
        let score = e.combine(ScalarOp::Mul, product, scale)?;
        let Some(&mask) = self.node.of(p.body).inputs.get(3) else {
            return Ok(score);
        };
        let at: Vec<Ix<Value>> = here.lead.iter().copied().chain(at).collect();
        let added = p.scoped(|p| p.broadcast_value(e, mask, &at))?;
        let added = e.cast(added, self.acc)?;
        e.combine(ScalarOp::Add, score, added)
    }

    /// Conditions under which a score is visible, and its row and column.
    fn visible(
        &self,
        e: &mut Emitter,
        here: &BlockPosition,
        k0: Value,
        place: [Value; 2],
    ) -> (Vec<Option<Value>>, [Ix<Value>; 2]) {
        let [row, column] = place.map(Ix::V);
        let (row, column) = (e.add(here.first, row), e.add(Ix::V(k0), column));
        let mut visible = vec![e.below(column, self.x.n_keys, self.variant.n_keys())];
        if self.has_mask {
            visible.push(e.below(row, self.x.n_queries, self.variant.n_queries()));
        }
        if self.causal {
            let (row, column) = (e.val(row), e.val(column));
            visible.push(Some(e.index_compare(Order::AtLeast, row, column)));
        }
        (visible, [row, column])
    }

    /// Sets hidden scores to minus infinity, in tiles that contain any.
    fn hide(&self, e: &mut Emitter, here: &BlockPosition, k0: Value) -> Result<()> {
        let Some(condition) = self.hidden(e, here, k0) else {
            return Ok(());
        };
        e.open(&format!("if ({condition})"));
        self.each(e, Registers::Scores, |e, [name, _], place| {
            let (visible, _) = self.visible(e, here, k0, place);
            let visible: Vec<&str> = visible.iter().flatten().map(|&c| e.text(c)).collect();
            let (visible, lowest) = (visible.join(" && "), self.minus_infinity());
            e.line(&format!("if (!({visible})) {name} = {lowest};"));
            Ok(())
        })?;
        e.close();
        Ok(())
    }

    /// Condition that the tile of keys from `k0` on contains hidden scores; `None` if no tile does.
    fn hidden(&self, e: &mut Emitter, here: &BlockPosition, k0: Value) -> Option<String> {
        let end = e.add(Ix::V(k0), Ix::C(self.variant.n_keys() as i64));
        let (end, first) = (e.position(end), e.position(here.first));
        let is_ragged = !self.x.n_keys.is_multiple_of(self.variant.n_keys());
        let ragged = is_ragged.then(|| format!("{end} > {}", self.x.n_keys));
        let causal = self.causal.then(|| format!("{end} > {first} + 1"));
        let all: Vec<String> = ragged.into_iter().chain(causal).collect();
        (!all.is_empty()).then(|| all.join(" || "))
    }

    /// For each element of the result that the thread holds: `f` gets the names of its register and its query's number, and its row and column.
    fn each_result(
        &self,
        e: &mut Emitter,
        here: &BlockPosition,
        f: impl FnOnce(&mut Emitter, [&str; 2], [Ix<Value>; 2]) -> Result<()>,
    ) -> Result<()> {
        let padded = self.variant.padded_value_depth(self.x.value_depth);
        self.each(e, Registers::Result, |e, names, [row, column]| {
            let (row, column) = (e.add(here.first, Ix::V(row)), Ix::V(column));
            let rows = e.below(row, self.x.n_queries, self.variant.n_queries());
            let inside = [rows, e.below(column, self.x.value_depth, padded)];
            e.guarded(&inside, |e| f(e, names, [row, column]))
        })
    }

    /// Each thread stores the epilogue of its elements of the result.
    fn store(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        here: &BlockPosition,
        out: Value,
    ) -> Result<()> {
        self.each_result(e, here, |e, [name, query], at| {
            // Warp groups have divided their results.
            let value = match self.variant {
                Variant::Groups { .. } => e.named(Kind::Element(self.acc), name),
                _ => e.define(Kind::Element(self.acc), &format!("{name} / total[{query}]")),
            };
            let at: Vec<Ix<Value>> = here.lead.iter().copied().chain(at).collect();
            self.node.store(p, e, &at, value, out)
        })
    }
}

/// Waits until all copies of the block into shared memory have arrived.
fn wait_for_copies(e: &mut Emitter) {
    e.line("gm_copies_end();");
    e.line("gm_copies_wait<0>();");
    e.line("__syncthreads();");
}

impl Candidate for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn words(&self) -> String {
        let (by, m, n) = (
            self.variant.words(),
            self.variant.n_queries(),
            self.variant.n_keys(),
        );
        let stages = if let Variant::Groups { stages } = self.variant {
            format!(", {stages} stages")
        } else {
            String::new()
        };
        format!(
            "tiles of {m} queries and {n} keys by {by}{stages}{}",
            in_parts(self.n_parts)
        )
    }

    fn result(&self) -> ValueId {
        self.node.result
    }

    fn resources(&self) -> Resources {
        match self.variant {
            Variant::Groups { .. } => self.group_resources(),
            _ => Resources {
                per_multiprocessor: 1,
                ..Resources::new(self.n_tiles(), self.variant.threads())
            },
        }
    }

    fn work(&self) -> Work {
        let (m, n) = (self.variant.n_queries(), self.variant.n_keys());
        let n_queries = self.n_batch * self.x.n_queries.next_multiple_of(m);
        let pairs = n_queries as f64 * self.x.n_keys.next_multiple_of(n) as f64;
        let value_depth = self.variant.padded_value_depth(self.x.value_depth);
        let products = pairs * (self.x.depth.next_multiple_of(STEP) + value_depth) as f64;
        Work {
            n_tiles: self.n_tiles(),
            bytes: products * self.x.dtype.size_bytes() as f64 / m as f64,
            n_products: products,
            products_per_byte: self.variant.products_per_byte(),
            partial_bytes: self.partial_elements() as f64 * self.acc.size_bytes() as f64,
        }
    }

    fn maps(&self) -> Vec<(ValueId, TensorMap)> {
        self.operands
            .iter()
            .flatten()
            .map(|o| (o.base, o.map.clone()))
            .collect()
    }

    fn partial(&self, _: &Body) -> Option<(DType, usize)> {
        (self.n_parts > 1).then(|| (self.acc, self.partial_elements()))
    }

    fn n_results(&self) -> usize {
        self.n_batch * self.x.n_queries * self.x.value_depth
    }

    fn emit(&self, p: &mut Puller<Value>, e: &mut Emitter, out: Value) -> Result<()> {
        let ty = element_type(self.variant.shared_dtype(self.x.dtype));
        for (name, n) in self.variant.shared(self.x.depth, self.x.value_depth) {
            e.line(&format!("__shared__ __align__(16) {ty} {name}[{n}];"));
        }
        if let Variant::Groups { stages } = self.variant {
            return self.by_groups(stages, p, e, out);
        }
        self.each_tile(e, |e, here| {
            match self.variant {
                Variant::Simt { .. } => self.by_elements(p, e, here)?,
                _ => self.by_fragments(p, e, here)?,
            }
            if self.n_parts > 1 {
                self.store_part(e, here, out)
            } else {
                self.store(p, e, here, out)
            }
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
