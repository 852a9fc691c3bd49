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

mod form;
mod group;
mod join;
mod load;

use super::Arch;
use super::candidates::{Candidate, Candidates, Resources, Work, in_parts};
use super::emit::{Emitter, Value};
use super::fusion::{followers, stored_before};
use super::text::{element_type, literal};
use crate::codegen::body::Body;
use crate::codegen::phases::{Cover, MatchContext};
use crate::codegen::pull::{Emit, Ix, Kind, Order, Puller};
use crate::error::{Error, Result};
use crate::ir::vecprog::real_bits;
use crate::ir::{Graph, Node, NodeId, Op, ScalarOp, ValueId};
use form::{Extents, Form, Registers, STEP, accumulator};
use gristmill_runtime::DType;
use gristmill_runtime::gpu::TensorMap;
use load::Tile;

/// Operations per element up to which an operand is computed again in every tile that needs it.
const CHEAP_FLOPS: u32 = 8;
/// Blocks that keep every GPU of today busy: keys are split until there are so many.
const ENOUGH_BLOCKS: usize = 128;
/// Fewest tiles of keys that are worth a block of their own.
const LEAST_KEY_TILES: usize = 4;

/// An attention, and the element-wise ops that follow it.
#[derive(Clone, Debug)]
struct Attention {
    node: NodeId,
    result: ValueId,
    /// Extents of the leading axes, and their product.
    lead: Vec<usize>,
    n_batch: usize,
    x: Extents,
    scale: f64,
    causal: bool,
    has_mask: bool,
    /// Dtype of scores and results.
    acc: DType,
    form: Form,
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
        graph
            .ty(node.inputs[i])
            .static_shape()
            .filter(|s| !s.contains(&0))
    };
    let (Some(q), Some(k), Some(v)) = (shape(0), shape(1), shape(2)) else {
        return false;
    };
    !extents(graph.ty(node.inputs[0]).dtype, &q, &k, &v)
        .forms(arch)
        .is_empty()
}

fn extents(dtype: DType, q: &[usize], k: &[usize], v: &[usize]) -> Extents {
    let rank = q.len();
    let (n_queries, n_keys, depth, value_depth) =
        (q[rank - 2], k[rank - 2], q[rank - 1], v[rank - 1]);
    Extents {
        dtype,
        n_queries,
        n_keys,
        depth,
        value_depth,
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
    let Op::Attention { scale, causal } = node.op else {
        return None;
    };
    let [q, k, v] = [0, 1, 2].map(|i| body.shape(node.inputs[i]));
    let dtype = body.dtype(node.inputs[0]);
    let x = extents(dtype, q, k, v);
    let forms = x.forms(arch);
    let lead = q[..q.len() - 2].to_vec();
    let n_batch = lead.iter().product();
    let mut needs = stored_before(body, around, node.inputs.iter().map(|&v| (v, CHEAP_FLOPS)));
    let (nodes, result) = followers(body, around, id);
    let (scale, has_mask, acc) = (scale.0, node.inputs.len() > 3, accumulator(dtype));
    let form = *forms.first()?;
    let first = Attention {
        node: id,
        result,
        lead,
        n_batch,
        x,
        scale,
        causal,
        has_mask,
        acc,
        form,
        operands: None,
        n_parts: 1,
    };
    let mut all = Vec::new();
    if let Some((mapped, stored)) = group::find(body, around, node, &x, arch) {
        let groups = x.group_forms().into_iter();
        all.extend(groups.map(|form| Attention {
            form,
            operands: Some(mapped.clone()),
            ..first.clone()
        }));
        needs.extend(stored);
    }
    all.extend(forms.into_iter().flat_map(|form| first.in_parts(form)));
    Some((
        Cover {
            needs,
            nodes,
            results: vec![result],
        },
        Candidates::new(all)?,
    ))
}

/// Where a block is: its batch, as a number and as indices, its first query, and which part of the keys it has.
struct Here {
    batch: Ix<Value>,
    lead: Vec<Ix<Value>>,
    first: Ix<Value>,
    part: Ix<Value>,
}

impl Attention {
    /// One variant with as many parts of the keys as predicted times choose, then with half and
    /// twice as many.
    fn in_parts(&self, form: Form) -> Vec<Attention> {
        let n_blocks = self.n_batch * self.x.n_queries.div_ceil(form.n_queries());
        let n_tiles = self.x.n_keys.div_ceil(form.n_keys());
        let n_parts = ENOUGH_BLOCKS
            .div_ceil(n_blocks)
            .min(n_tiles / LEAST_KEY_TILES)
            .max(1);
        let others = [n_parts / 2, 2 * n_parts]
            .into_iter()
            .filter(|&n| n > 0 && n_tiles / n >= LEAST_KEY_TILES / 2);
        [n_parts]
            .into_iter()
            .chain(others)
            .map(|n_parts| Attention {
                form,
                n_parts,
                ..self.clone()
            })
            .collect()
    }

    /// Tiles of queries, or parts of the keys for one.
    fn n_tiles(&self) -> usize {
        self.n_batch * self.x.n_queries.div_ceil(self.form.n_queries()) * self.n_parts
    }

    /// A loop over the tiles of a block.
    fn each_tile(
        &self,
        e: &mut Emitter,
        f: impl FnOnce(&mut Emitter, &Here) -> Result<()>,
    ) -> Result<()> {
        e.by_block(self.n_tiles(), |e, tile| {
            let (rest, part) = e.div_rem(Ix::V(tile), self.n_parts);
            let (batch, row) = e.div_rem(rest, self.x.n_queries.div_ceil(self.form.n_queries()));
            let first = e.mul(row, self.form.n_queries() as i64);
            let here = Here {
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
        let (ty, n) = (element_type(self.acc), self.form.per_thread());
        let [a, b] = self.form.registers(Registers::Result, self.x.value_depth);
        e.line(&format!(
            "{ty} result[{a}][{b}] = {{}}, total[{n}] = {{}}, greatest[{n}];"
        ));
        let i = e.open_unrolled(n);
        let line = format!("greatest[{}] = gm_minus_infinity<{ty}>();", e.text(i));
        e.line(&line);
        e.close();
    }

    /// The tiles of queries, of the keys from `k0` on, and of their values.
    fn tiles(&self, first: Ix<Value>, k0: Ix<Value>, node: &Node) -> [Tile; 3] {
        let turned = matches!(self.form, Form::Simt { .. });
        let (depth, padded) = (self.x.depth, self.x.depth.next_multiple_of(STEP));
        let (extent, rows, operand) = (self.x.n_queries, self.form.n_queries(), node.inputs[0]);
        let queries = Tile {
            name: "queries",
            operand,
            first,
            extent,
            rows,
            depth,
            padded,
            turned,
        };
        let (extent, rows, operand) = (self.x.n_keys, self.form.n_keys(), node.inputs[1]);
        let keys = Tile {
            name: "keys",
            operand,
            first: k0,
            extent,
            rows,
            depth,
            padded,
            turned,
        };
        let name = if turned { "keys" } else { "values" };
        let (depth, padded) = (
            self.x.value_depth,
            self.form.padded_value_depth(self.x.value_depth),
        );
        let values = Tile {
            name,
            operand: node.inputs[2],
            depth,
            padded,
            turned: false,
            ..keys
        };
        [queries, keys, values]
    }

    fn by_elements(&self, p: &mut Puller<Value>, e: &mut Emitter, here: &Here) -> Result<()> {
        let Form::Simt {
            m,
            n,
            thread_m,
            thread_n,
        } = self.form
        else {
            return Ok(());
        };
        let node = p.body.graph.node(self.node).clone();
        let [queries, _, _] = self.tiles(here.first, Ix::C(0), &node);
        self.load(p, e, here, &queries)?;
        self.declare(e);
        let [start, end] = self.keys(e, here);
        e.counted([&start, &end, &n.to_string()], |e, k0| {
            let [_, keys, values] = self.tiles(here.first, Ix::V(k0), &node);
            self.load(p, e, here, &keys)?;
            e.line("__syncthreads();");
            e.line(&format!(
                "{} scores[{thread_m}][{thread_n}] = {{}};",
                element_type(self.acc)
            ));
            self.form
                .multiply(e, Registers::Scores, self.x.value_depth, keys.padded);
            self.scores(p, e, here, k0, &node)?;
            let [_, per_thread] = self.form.registers(Registers::Result, self.x.value_depth);
            let (shape, power) = (
                format!("{m}, {n}, {thread_m}, {thread_n}, {per_thread}"),
                self.power(),
            );
            e.line(&format!(
                "gm_weigh<{shape}>(scores, greatest, total, result, weights, {power});"
            ));
            e.line("__syncthreads();");
            self.load(p, e, here, &values)?;
            e.line("__syncthreads();");
            self.form
                .multiply(e, Registers::Result, self.x.value_depth, n);
            e.line("__syncthreads();");
            Ok(())
        })
    }

    /// Values are on their way while scores are computed, and the next keys while the results are.
    fn by_fragments(&self, p: &mut Puller<Value>, e: &mut Emitter, here: &Here) -> Result<()> {
        let node = p.body.graph.node(self.node).clone();
        let arrived = |e: &mut Emitter| {
            e.line("gm_copies_end();");
            e.line("gm_copies_wait<0>();");
            e.line("__syncthreads();");
        };
        let [start, end] = self.keys(e, here);
        let first_key = e.named(Kind::Index, start.clone());
        let [queries, keys, values] = self.tiles(here.first, Ix::V(first_key), &node);
        let (depth, value_depth, n) = (keys.padded, values.padded, self.form.n_keys());
        let half = element_type(self.x.dtype);
        self.load(p, e, here, &queries)?;
        arrived(e);
        e.line(&format!("u32 query[{}][4];", depth / STEP));
        e.line(&format!("gm_load_queries<{depth}>(queries, query);"));
        self.load(p, e, here, &keys)?;
        self.declare(e);
        e.counted([&start, &end, &n.to_string()], |e, k0| {
            let [_, _, values] = self.tiles(here.first, Ix::V(k0), &node);
            arrived(e);
            self.load(p, e, here, &values)?;
            e.line(&format!("f32 scores[{}][4] = {{}};", n / 8));
            e.line(&format!(
                "gm_multiply_keys<{half}, {depth}, {n}>(query, keys, scores);"
            ));
            arrived(e);
            let next = e.add(Ix::V(k0), Ix::C(n as i64));
            let last = e.val(next);
            let more = format!("if ({} < {end})", e.text(last));
            e.open(&more);
            let [_, keys, _] = self.tiles(here.first, next, &node);
            self.load(p, e, here, &keys)?;
            e.close();
            self.scores(p, e, here, k0, &node)?;
            e.line("f32 rest[2];");
            e.line(&format!(
                "gm_weigh(scores, greatest, total, rest, {});",
                self.power()
            ));
            e.line("gm_scale(result, rest);");
            e.line(&format!(
                "gm_multiply_values<{half}, {value_depth}, {n}>(scores, values, result);"
            ));
            Ok(())
        })?;
        arrived(e);
        Ok(())
    }

    /// First and last key that the block visits, as text.
    fn keys(&self, e: &mut Emitter, here: &Here) -> [String; 2] {
        let per_part = self
            .x
            .n_keys
            .div_ceil(self.n_parts)
            .next_multiple_of(self.form.n_keys());
        let start = e.mul(here.part, per_part as i64);
        let mut end = Ix::C(self.x.n_keys as i64);
        let mut limit = |e: &mut Emitter, to: Ix<Value>| {
            let (own, to) = (e.val(end), e.val(to));
            end = Ix::V(e.index_min(own, to));
        };
        if self.n_parts > 1 {
            let own = e.add(start, Ix::C(per_part as i64));
            limit(e, own);
        }
        if self.causal {
            let seen = e.add(here.first, Ix::C(self.form.n_queries() as i64));
            limit(e, seen);
        }
        [start, end].map(|i| {
            let i = e.val(i);
            e.text(i).to_owned()
        })
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
        let factor = literal(
            DType::F32,
            real_bits(DType::F32, self.scale * std::f64::consts::LOG2_E),
        );
        format!("gm_power_scaled{{{factor}}}")
    }

    /// For each of the thread's registers: `f` gets its name, the number of its query in the thread, and its row and column in the tile.
    fn each(
        &self,
        e: &mut Emitter,
        which: Registers,
        f: impl FnOnce(&mut Emitter, [&str; 2], [Value; 2]) -> Result<()>,
    ) -> Result<()> {
        let [a, b] = self.form.registers(which, self.x.value_depth);
        let (i, j) = (e.open_unrolled(a), e.open_unrolled(b));
        let (i, j) = (e.text(i).to_owned(), e.text(j).to_owned());
        let [row, column, query] = self.form.place(which, self.x.value_depth, [&i, &j]);
        let (row, column) = (e.define(Kind::Index, &row), e.define(Kind::Index, &column));
        let name = if which == Registers::Scores {
            "scores"
        } else {
            "result"
        };
        f(e, [&format!("{name}[{i}][{j}]"), &query], [row, column])?;
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
        here: &Here,
        k0: Value,
        node: &Node,
    ) -> Result<()> {
        if self.scales_late() {
            return self.hide(e, here, k0);
        }
        let scale = e.constant(self.acc, real_bits(self.acc, self.scale));
        self.each(e, Registers::Scores, |e, [name, _], place| {
            let (seen, [row, column]) = self.seen(e, here, k0, place);
            e.guarded(&seen, |e| {
                p.scoped(|p| {
                    let product = e.named(Kind::Element(self.acc), name);
                    let mut score =
                        e.scalar_op(ScalarOp::Mul, &[self.acc; 2], &[product, scale])?;
                    if let Some(&mask) = node.inputs.get(3) {
                        let at: Vec<Ix<Value>> =
                            here.lead.iter().copied().chain([row, column]).collect();
                        let added = p.broadcast_value(e, mask, &at)?;
                        let added = e.convert(added, p.body.dtype(mask), self.acc)?;
                        score = e.scalar_op(ScalarOp::Add, &[self.acc; 2], &[score, added])?;
                    }
                    let line = format!("{name} = {};", e.text(score));
                    e.line(&line);
                    Ok::<(), Error>(())
                })
            })?;
            if seen.iter().any(Option::is_some) {
                e.line(&format!(
                    "else {name} = gm_minus_infinity<{}>();",
                    element_type(self.acc)
                ));
            }
            Ok(())
        })
    }

    /// Conditions under which a score is visible, and its row and column.
    fn seen(
        &self,
        e: &mut Emitter,
        here: &Here,
        k0: Value,
        place: [Value; 2],
    ) -> (Vec<Option<Value>>, [Ix<Value>; 2]) {
        let [row, column] = place.map(Ix::V);
        let (row, column) = (e.add(here.first, row), e.add(Ix::V(k0), column));
        let mut seen = vec![e.below(column, self.x.n_keys, self.form.n_keys())];
        if self.has_mask {
            seen.push(e.below(row, self.x.n_queries, self.form.n_queries()));
        }
        if self.causal {
            let (row, column) = (e.val(row), e.val(column));
            seen.push(Some(e.index_compare(Order::AtLeast, row, column)));
        }
        (seen, [row, column])
    }

    /// Sets hidden scores to minus infinity, in tiles that contain any.
    fn hide(&self, e: &mut Emitter, here: &Here, k0: Value) -> Result<()> {
        let end = e.add(Ix::V(k0), Ix::C(self.form.n_keys() as i64));
        let (end, first) = (e.val(end), e.val(here.first));
        let (end, first) = (e.text(end).to_owned(), e.text(first).to_owned());
        let ragged = (!self.x.n_keys.is_multiple_of(self.form.n_keys()))
            .then(|| format!("{end} > {}", self.x.n_keys));
        let causal = self.causal.then(|| format!("{end} > {first} + 1"));
        let some: Vec<String> = ragged.into_iter().chain(causal).collect();
        if some.is_empty() {
            return Ok(());
        }
        e.open(&format!("if ({})", some.join(" || ")));
        self.each(e, Registers::Scores, |e, [name, _], place| {
            let (seen, _) = self.seen(e, here, k0, place);
            let seen: Vec<&str> = seen.iter().flatten().map(|&c| e.text(c)).collect();
            let line = format!(
                "if (!({})) {name} = gm_minus_infinity<{}>();",
                seen.join(" && "),
                element_type(self.acc)
            );
            e.line(&line);
            Ok(())
        })?;
        e.close();
        Ok(())
    }

    /// For each element of the result that the thread holds: `f` gets the names of its register and its query's number, and its row and column.
    fn each_result(
        &self,
        e: &mut Emitter,
        here: &Here,
        f: impl FnOnce(&mut Emitter, [&str; 2], [Ix<Value>; 2]) -> Result<()>,
    ) -> Result<()> {
        let padded = self.form.padded_value_depth(self.x.value_depth);
        self.each(e, Registers::Result, |e, names, [row, column]| {
            let (row, column) = (e.add(here.first, Ix::V(row)), Ix::V(column));
            let rows = e.below(row, self.x.n_queries, self.form.n_queries());
            let inside = [rows, e.below(column, self.x.value_depth, padded)];
            e.guarded(&inside, |e| f(e, names, [row, column]))
        })
    }

    /// Each thread stores the epilogue of its elements of the result.
    fn store(&self, p: &mut Puller<Value>, e: &mut Emitter, here: &Here, out: Value) -> Result<()> {
        self.each_result(e, here, |e, [name, query], [row, column]| {
            // Warp groups have divided their results.
            let value = match self.form {
                Form::Groups { .. } => e.named(Kind::Element(self.acc), name),
                _ => e.define(Kind::Element(self.acc), &format!("{name} / total[{query}]")),
            };
            let at: Vec<Ix<Value>> = here.lead.iter().copied().chain([row, column]).collect();
            self.follow(p, e, &at, value, out)
        })
    }

    /// Stores the epilogue of `value`, the result's element at `at`.
    fn follow(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        at: &[Ix<Value>],
        value: Value,
        out: Value,
    ) -> Result<()> {
        p.scoped(|p| {
            let own = p.body.graph.node(self.node).outputs[0];
            let value = e.convert(value, self.acc, p.body.dtype(own))?;
            p.remember(own, at, value);
            let value = p.value(e, self.result, at)?;
            let linear = e.linearise(at, p.body.shape(self.result));
            e.store(p.body.dtype(self.result), value, out, linear);
            Ok(())
        })
    }
}

impl Candidate for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn words(&self) -> String {
        let (by, m, n) = (self.form.words(), self.form.n_queries(), self.form.n_keys());
        let stages = if let Form::Groups { stages } = self.form {
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
        self.result
    }

    fn resources(&self) -> Resources {
        match self.form {
            Form::Groups { .. } => self.group_resources(),
            _ => Resources {
                per_multiprocessor: 1,
                ..Resources::new(self.n_tiles(), self.form.threads())
            },
        }
    }

    fn work(&self) -> Work {
        let Extents {
            dtype,
            n_queries,
            n_keys,
            depth,
            value_depth,
        } = self.x;
        let (m, n) = (self.form.n_queries(), self.form.n_keys());
        let pairs = (self.n_batch * n_queries.next_multiple_of(m)) as f64
            * n_keys.next_multiple_of(n) as f64;
        let elements = depth.next_multiple_of(STEP) + self.form.padded_value_depth(value_depth);
        let products = pairs * elements as f64;
        Work {
            n_tiles: self.n_tiles(),
            bytes: products * dtype.size_bytes() as f64 / m as f64,
            n_products: products,
            products_per_byte: self.form.products_per_byte(),
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
        let ty = element_type(self.form.shared_dtype(self.x.dtype));
        for (name, n) in self.form.shared(self.x.depth, self.x.value_depth) {
            e.line(&format!("__shared__ __align__(16) {ty} {name}[{n}];"));
        }
        if let Form::Groups { stages } = self.form {
            return self.by_groups(stages, p, e, out);
        }
        self.each_tile(e, |e, here| {
            match self.form {
                Form::Simt { .. } => self.by_elements(p, e, here)?,
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
