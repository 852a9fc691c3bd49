//! Products in tiles of shared memory: matrix products and convolutions (as implicit products) of
//! every dtype, with prologues of the operands and epilogues of the result fused.
//!
//! Operands are loaded or pulled into the tiles and the epilogue is computed from the accumulators,
//! so views, casts and cheap element-wise ops on either side cost no memory traffic. Three main
//! loops: threads that multiply ([`simt`]), for every dtype, in its own precision; and tensor cores
//! ([`mma`], [`wgmma`]), for operands of half types and bytes, and for `f32` when `tf32` is asked
//! for.

mod epilogue;
mod library;
mod mma;
mod operand;
mod simt;
mod tensor;
mod wgmma;

use super::Options;
use super::candidates::{Candidate, Candidates, Resources, Work};
use super::emit::{Emitter, Value};
use super::fusion::{followers, stored_before};
use crate::codegen::body::Body;
use crate::codegen::phases::{Cover, MatchContext};
use crate::codegen::pull::{Emit, Ix, Kind, Order, Puller};
use crate::error::Result;
use crate::ir::{Layout, Node, NodeId, Op, ScalarOp, ValueId};
use gristmill_runtime::DType;
use gristmill_runtime::gpu::TensorMap;
pub(super) use library::Library;
use mma::Mma;
use simt::Simt;
pub(super) use simt::accumulator;
use tensor::Operands;
use wgmma::Wgmma;

/// Operations per element up to which an operand is computed again in every tile that needs it.
const CHEAP_FLOPS: u32 = 8;
/// Smallest extent of each side for which a tile is worth its synchronisation.
const LEAST_SIDE: usize = 4;
/// Blocks that keep every GPU of today busy: a smaller tile is taken until there are so many.
const ENOUGH_BLOCKS: usize = 128;
/// Smallest depth of a block's share of a sum: joining shares takes about as long as computing one.
const LEAST_DEPTH: usize = 512;

/// A product, and the element-wise ops that follow it.
#[derive(Clone, Debug)]
struct Contract {
    node: NodeId,
    result: ValueId,
    sizes: Sizes,
    form: Form,
}

/// Main loop of a variant.
#[derive(Clone, Debug)]
enum Form {
    Simt(Simt),
    Mma(Mma),
    Wgmma(Wgmma),
}

/// Extents of a product: batches, rows, columns and the summed axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sizes {
    n_batch: usize,
    m: usize,
    n: usize,
    k: usize,
}

impl Sizes {
    /// Multiplications of elements.
    fn n_products(&self) -> usize {
        [self.m, self.n, self.k]
            .into_iter()
            .fold(self.n_batch, usize::saturating_mul)
    }

    /// Blocks that have a tile of `m` x `n` each.
    fn n_tiles(&self, m: usize, n: usize) -> usize {
        self.n_batch * self.m.div_ceil(m) * self.n.div_ceil(n)
    }

    /// Blocks that share the sums of such a tile, which are `depth` deep, where there are few tiles and much to sum up.
    fn n_parts(&self, [m, n, depth]: [usize; 3]) -> usize {
        let most = (ENOUGH_BLOCKS / self.n_tiles(m, n))
            .min(self.k / LEAST_DEPTH)
            .max(1);
        let steps = self.k.div_ceil(depth);
        steps.div_ceil(steps.div_ceil(most))
    }

    /// Numbers of blocks that may share the sums as well: half and twice as many.
    fn other_parts(&self, tile: [usize; 3]) -> Vec<usize> {
        let (n_parts, steps) = (self.n_parts(tile), self.k.div_ceil(tile[2]));
        let twice = Some(2 * n_parts).filter(|n| {
            self.k / n >= LEAST_DEPTH / 2
                && self.n_tiles(tile[0], tile[1]) * n_parts < ENOUGH_BLOCKS
        });
        let half = Some(n_parts / 2).filter(|&n| n > 0);
        half.into_iter()
            .chain(twice)
            .map(|n| steps.div_ceil(steps.div_ceil(n)))
            .collect()
    }

    /// Work of tiles, given the multiplications in the time of a byte and the size of an element.
    fn work(
        &self,
        tile: [usize; 2],
        n_parts: usize,
        size_bytes: usize,
        products_per_byte: f64,
    ) -> Work {
        let [m, n] = tile;
        let n_tiles = self.n_tiles(m, n);
        let of_tiles = |per_tile: usize| (n_tiles * per_tile) as f64 * self.k as f64;
        let partial = if n_parts > 1 {
            n_parts * n_tiles * m * n * 4
        } else {
            0
        };
        Work {
            n_tiles: n_tiles * n_parts,
            bytes: of_tiles(m + n) * size_bytes as f64,
            n_products: of_tiles(m * n),
            products_per_byte,
            partial_bytes: partial as f64,
        }
    }

    /// True if such tiles give nearly every multiprocessor a block.
    fn fills(&self, tile: [usize; 3]) -> bool {
        self.n_tiles(tile[0], tile[1]) * self.n_parts(tile) * 8 >= ENOUGH_BLOCKS * 7
    }
}

/// The product that a node is, if tiles suit it.
pub(super) fn find(
    body: &Body,
    around: &MatchContext,
    options: &Options,
    id: NodeId,
    node: &Node,
) -> Option<(Cover, Candidates)> {
    let sizes = sizes(body, node)?;
    let Sizes { n_batch, m, n, k } = sizes;
    if m < LEAST_SIDE || n < LEAST_SIDE || k < LEAST_SIDE || n_batch == 0 {
        return None;
    }
    let (forms, needs): (Vec<Form>, Vec<ValueId>) =
        match Operands::find(body, around, options, node, sizes) {
            Some((operands, needs)) => {
                let wgmma = Wgmma::all(body, options, node, &operands, sizes)
                    .into_iter()
                    .map(Form::Wgmma);
                (
                    wgmma
                        .chain(
                            Mma::all(options, operands, sizes)
                                .into_iter()
                                .map(Form::Mma),
                        )
                        .collect(),
                    needs,
                )
            }
            None => {
                let needs =
                    stored_before(body, around, node.inputs.iter().map(|&v| (v, CHEAP_FLOPS)));
                let all = Simt::all(node, body.dtype(node.inputs[0]), sizes);
                (all.into_iter().map(Form::Simt).collect(), needs)
            }
        };
    let (nodes, result) = followers(body, around, id);
    let forms = forms.into_iter().map(|form| Contract {
        node: id,
        result,
        sizes,
        form,
    });
    Some((
        Cover {
            needs,
            nodes,
            results: vec![result],
        },
        Candidates::new(forms)?,
    ))
}

/// The tile that `best` says, or the last, then the others.
fn best_first<T: Copy + PartialEq>(tiles: &[T], best: impl Fn(&T) -> bool) -> Vec<T> {
    let Some(first) = tiles.iter().find(|t| best(t)).or(tiles.last()) else {
        return Vec::new();
    };
    std::iter::once(first)
        .chain(tiles.iter().filter(|t| *t != first))
        .copied()
        .collect()
}

fn sizes(body: &Body, node: &Node) -> Option<Sizes> {
    let (lhs, rhs) = (node.inputs.first()?, node.inputs.get(1)?);
    let out = body.shape(node.outputs[0]);
    match &node.op {
        Op::MatMul => {
            let (batch, sides) = out.split_at(out.len() - 2);
            let k = *body.shape(*lhs).last()?;
            Some(Sizes {
                n_batch: batch.iter().product(),
                m: sides[0],
                n: sides[1],
                k,
            })
        }
        Op::Conv { groups, layout, .. } => {
            let channels = if *layout == Layout::ChannelsFirst {
                out[1]
            } else {
                *out.last()?
            };
            let k = body.shape(*rhs).iter().product::<usize>() / channels.max(1);
            let m = out.iter().product::<usize>() / channels.max(1);
            Some(Sizes {
                n_batch: *groups,
                m,
                n: channels / groups,
                k,
            })
        }
        _ => None,
    }
}

impl Contract {
    /// Blocks that share a sum.
    fn n_parts(&self) -> usize {
        match &self.form {
            Form::Simt(simt) => simt.n_parts,
            Form::Mma(mma) => mma.n_parts,
            Form::Wgmma(_) => 1,
        }
    }

    /// Extents of partial sums: parts, batches, rows, columns.
    fn partial_shape(&self) -> [usize; 4] {
        let Sizes { n_batch, m, n, .. } = self.sizes;
        [self.n_parts(), n_batch, m, n]
    }

    fn acc(&self) -> DType {
        match &self.form {
            Form::Simt(simt) => simt.acc,
            Form::Mma(mma) => mma.acc(),
            Form::Wgmma(_) => DType::F32,
        }
    }
}

impl Candidate for Contract {
    fn name(&self) -> &'static str {
        "contract"
    }

    fn words(&self) -> String {
        match &self.form {
            Form::Simt(simt) => simt.words(),
            Form::Mma(mma) => mma.words(),
            Form::Wgmma(wgmma) => wgmma.words(),
        }
    }

    fn result(&self) -> ValueId {
        self.result
    }

    fn resources(&self) -> Resources {
        match &self.form {
            Form::Simt(simt) => simt.resources(self.sizes),
            Form::Mma(mma) => mma.resources(self.sizes),
            Form::Wgmma(wgmma) => wgmma.resources(self.sizes),
        }
    }

    fn work(&self) -> Work {
        match &self.form {
            Form::Simt(simt) => simt.work(self.sizes),
            Form::Mma(mma) => mma.work(self.sizes),
            Form::Wgmma(wgmma) => wgmma.work(self.sizes),
        }
    }

    fn maps(&self) -> Vec<(ValueId, TensorMap)> {
        match &self.form {
            Form::Wgmma(wgmma) => wgmma.maps(),
            Form::Simt(_) | Form::Mma(_) => Vec::new(),
        }
    }

    fn partial(&self, _: &Body) -> Option<(DType, usize)> {
        (self.n_parts() > 1).then(|| (self.acc(), self.partial_shape().iter().product()))
    }

    /// Elements of the product.
    fn n_results(&self) -> usize {
        self.sizes.n_batch * self.sizes.m * self.sizes.n
    }

    fn emit(&self, p: &mut Puller<Value>, e: &mut Emitter, out: Value) -> Result<()> {
        match &self.form {
            Form::Simt(simt) => simt.emit(self, p, e, out),
            Form::Mma(mma) => mma.emit(self, p, e, out),
            Form::Wgmma(wgmma) => wgmma.emit(self, p, e, out),
        }
    }

    /// Adds partial sums.
    fn join(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        item: Value,
        [partial, out]: [Value; 2],
    ) -> Result<()> {
        let acc = self.acc();
        let [n_parts, n_batch, m, n] = self.partial_shape();
        let zero = e.constant(acc, 0);
        let sum = e.for_loop(
            Ix::C(0),
            Ix::C(n_parts as i64),
            1,
            &[zero],
            |e, part, carried| {
                let from = e.mul(Ix::V(part), (n_batch * m * n) as i64);
                let at = e.add(from, Ix::V(item));
                let own = e.load(acc, partial, at);
                Ok(vec![e.scalar_op(
                    ScalarOp::Add,
                    &[acc; 2],
                    &[carried[0], own],
                )?])
            },
        )?[0];
        let at = e.delinearise(Ix::V(item), &[n_batch, m, n]);
        let sum = e.text(sum).to_owned();
        epilogue::element(self, p, e, [at[0], at[1], at[2]], (&sum, acc), out)
    }
}

/// A tile that a block computes: its share in the sums, its place.
#[derive(Clone, Copy)]
struct Place {
    part: Ix<Value>,
    batch: Ix<Value>,
    /// First row and column.
    row: Ix<Value>,
    column: Ix<Value>,
}

/// Start of a block's share of the summed axis, and its number of tiles, as text: all of them, or
/// the share `part` of `n_parts`.
fn share(
    e: &mut Emitter,
    part: Ix<Value>,
    n_parts: usize,
    (k, depth): (usize, usize),
) -> [String; 2] {
    let steps = k.div_ceil(depth);
    if n_parts == 1 {
        return ["ix(0)".to_owned(), steps.to_string()];
    }
    let each = steps.div_ceil(n_parts);
    let first = e.mul(part, each as i64);
    let first = e.val(first);
    let left = e.define(Kind::Index, &format!("{steps} - {}", e.text(first)));
    let start = e.define(Kind::Index, &format!("{} * {depth}", e.text(first)));
    let count = format!("int(gm_min(ix({each}), {}))", e.text(left));
    [e.text(start).to_owned(), count]
}

/// Condition that positions lie within their extents, each with the length of its tiles; `None`
/// when whole tiles fit exactly.
fn within<const N: usize>(
    e: &mut Emitter,
    positions: [(Ix<Value>, usize, usize); N],
) -> Result<Option<Value>> {
    let mut inside = None;
    for (at, extent, _) in positions
        .into_iter()
        .filter(|(_, extent, tile)| extent % tile != 0)
    {
        let (at, limit) = (e.val(at), e.index(extent as i64));
        let here = e.index_compare(Order::Less, at, limit);
        inside = both(e, inside, Some(here))?;
    }
    Ok(inside)
}

/// Conjunction of two conditions; `None` always holds.
fn both(e: &mut Emitter, a: Option<Value>, b: Option<Value>) -> Result<Option<Value>> {
    match (a, b) {
        (Some(a), Some(b)) => e.both(a, b).map(Some),
        (a, b) => Ok(a.or(b)),
    }
}

/// Index in the result of an element of the product.
fn result_index(
    body: &Body,
    e: &mut Emitter,
    node: &Node,
    batch: Ix<Value>,
    row: Ix<Value>,
    column: Ix<Value>,
) -> Vec<Ix<Value>> {
    let out = body.shape(node.outputs[0]);
    let Op::Conv { groups, layout, .. } = &node.op else {
        let mut at = e.delinearise(batch, &out[..out.len() - 2]);
        at.extend([row, column]);
        return at;
    };
    let channels = if *layout == Layout::ChannelsFirst {
        out[1]
    } else {
        out[out.len() - 1]
    };
    let first = e.mul(batch, (channels / groups) as i64);
    let channel = e.add(first, column);
    match layout {
        Layout::ChannelsFirst => {
            let positions: Vec<usize> = [out[0]].iter().chain(&out[2..]).copied().collect();
            let mut at = e.delinearise(row, &positions);
            at.insert(1, channel);
            at
        }
        Layout::ChannelsLast => {
            let mut at = e.delinearise(row, &out[..out.len() - 1]);
            at.push(channel);
            at
        }
    }
}
