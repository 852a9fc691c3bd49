//! Operations of `f32` products, convolutions and pools by our kernels for CPUs: whole vectors of columns or channels, and the time
//! of tiles, windows and tables of rows beside the sums.
//!
//! The constants are fitted to the times of 100 products and convolutions (28 to 100,352 rows, 6 to 2,304 columns, windows of one pixel
//! up to a whole image) and 44 pools, with AVX-512 and with AVX2, on one thread: `benches/NOTES.md`, "Predicted and measured times".

use super::Extents;
use super::profile::DeviceProfile;
use super::work::{self, product as product_of};
use crate::ir::{Graph, Layout, Node, Op, OpClass, Type, ValueId, Window};
use gristmill_runtime::DType;

/// Filling, draining and writing back of a tile, as depth.
const TILE_DEPTH: f64 = 8.0;
/// Change to another tap of a window, or to another row of it where rows are contiguous, as depth.
const TAP_DEPTH: f64 = 1.5;
/// Time of a tile of one vector of columns, as a share of that of two.
const HALF: f64 = 0.75;
/// Copy of a tile whose last vector is not full, as depth.
const RAGGED_DEPTH: f64 = 12.0;
/// Search for the addresses of a row's pixels, or their copy, as depth.
const LOOKUP_DEPTH: f64 = 12.5;
/// Time of a depthwise convolution, as a multiple of that of its sums at the rate of others.
const DEPTHWISE: f64 = 2.0;
/// Bytes of a word, whose products are summed at once.
const WORD: u64 = 4;
/// With fewer channels, the kernel of convolutions copies rows of images instead of finding each pixel.
const FEW_CHANNELS: u64 = 16;

/// Operations of a window: per element, and beside the elements. A gradient of a pool finds the maximum and writes all elements.
const POOL: [f64; 2] = [0.2, 20.0];
const POOL_GRADIENT: [f64; 2] = [0.9, 40.0];

/// A product as the kernels see it.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Product {
    rows: f64,
    columns: u64,
    /// Summed elements.
    depth: u64,
    /// Contiguous runs of these elements, where rows are found by address.
    runs: u64,
    /// Products with the same addresses: groups.
    n_products: u64,
    /// Share of the depth that is summed: taps of dilated windows beside the image are left out.
    inside: f64,
}

impl Product {
    /// The product of bytes, four of which take the time of one `f32`.
    fn in_words(self) -> Product {
        Product {
            depth: self.depth.div_ceil(WORD),
            ..self
        }
    }

    /// Operations, as of full tiles without any loss.
    fn operations(&self, lanes: u64) -> f64 {
        let panel = 2 * lanes;
        let summed = self.depth as f64 * self.inside;
        let depth = summed + self.runs as f64 * TAP_DEPTH + TILE_DEPTH;
        let rest = self.columns % panel;
        let ragged = if rest.is_multiple_of(lanes) {
            0.0
        } else {
            RAGGED_DEPTH
        };
        let last = match rest {
            0 => 0.0,
            _ if rest <= lanes => HALF * depth + ragged,
            _ => depth + ragged,
        };
        let lookup = if self.runs > 0 { LOOKUP_DEPTH } else { 0.0 };
        let panels = (self.columns / panel) as f64 * depth + last;
        2.0 * self.rows * panel as f64 * (self.n_products as f64 * panels + lookup)
    }
}

/// Operations of a product, convolution or pool with a kernel for CPUs, at the efficiency of its class; none of others.
pub(super) fn operations(
    op: &Op,
    operands: &[&Type],
    results: &[&Type],
    extents: &Extents,
    device: &DeviceProfile,
) -> Option<f64> {
    let (x, out) = (*operands.first()?, *results.first()?);
    let is_word = x.dtype == DType::I32 && matches!(op, Op::MatMul | Op::Conv { .. });
    if x.dtype != DType::F32 && !is_word {
        return None;
    }
    let lanes = device.lanes.max(1) as u64;
    match op {
        Op::MatMul | Op::Conv { .. } => {
            let types = [x, *operands.get(1)?, out];
            match product(op, types, extents) {
                // Products of 32-bit integers are of bytes in quantised models.
                Some(of_bytes) if is_word => Some(of_bytes.in_words().operations(lanes)),
                Some(product) => Some(product.operations(lanes)),
                None => depthwise(op, types, extents),
            }
        }
        Op::Pool { size, layout, .. } => windows(size, out, *layout, extents, (lanes, POOL)),
        Op::MaxPoolGrad { size, layout, .. } => {
            let pooled = operands.last()?;
            windows(size, pooled, *layout, extents, (lanes, POOL_GRADIENT))
        }
        _ => None,
    }
}

/// The product of an op: types of its two operands and its result.
fn product(op: &Op, types: [&Type; 3], extents: &Extents) -> Option<Product> {
    match op {
        Op::Conv {
            window,
            groups,
            layout,
        } => convolution((window, *groups as u64, *layout), types, extents),
        _ => matrices(types, extents),
    }
}

fn matrices([a, b, out]: [&Type; 3], extents: &Extents) -> Option<Product> {
    let last = |ty: &Type| ty.shape.last().map(|d| extents.of(d));
    let columns = last(b)?;
    Some(Product {
        rows: extents.elements(&out.shape) as f64 / columns.max(1) as f64,
        columns,
        depth: last(a)?,
        runs: 0,
        n_products: 1,
        inside: 1.0,
    })
}

/// The products of a convolution. Filters of one channel have another kernel.
fn convolution(
    (window, groups, layout): (&Window, u64, Layout),
    [x, weights, out]: [&Type; 3],
    extents: &Extents,
) -> Option<Product> {
    let dims: Vec<u64> = weights.shape.iter().map(|d| extents.of(d)).collect();
    let (size, channels, filters) = match (layout, &dims[..]) {
        (Layout::ChannelsLast, [size @ .., channels, filters]) => (size, *channels, *filters),
        (Layout::ChannelsFirst, [filters, channels, size @ ..]) => (size, *channels, *filters),
        _ => return None,
    };
    if groups > 1 && channels == 1 {
        return None;
    }
    let taps = product_of(size.iter().copied());
    Some(Product {
        rows: extents.elements(&out.shape) as f64 / filters.max(1) as f64,
        columns: filters / groups.max(1),
        depth: taps.saturating_mul(channels),
        runs: runs(window, size, (channels, groups)),
        n_products: groups,
        inside: match x.dtype {
            DType::F32 => inside_of_dilated((window, layout), size, [x, out], extents),
            _ => 1.0,
        },
    })
}

/// Contiguous runs of input under a window.
fn runs(window: &Window, size: &[u64], (channels, groups): (u64, u64)) -> u64 {
    let (taps, width) = (
        product_of(size.iter().copied()),
        size.last().copied().unwrap_or(1),
    );
    let is_narrow = width > 1 && channels < FEW_CHANNELS;
    let is_copied = groups == 1 && is_narrow && window.dilations.last() == Some(&1);
    let is_pointwise = taps == 1 && window.strides.iter().all(|&s| s == 1);
    match (is_pointwise, is_copied) {
        (true, _) => 0,
        (_, true) => taps / width,
        _ => taps,
    }
}

/// Pixels of a row in a tile, about.
const TILE_PIXELS: u64 = 12;

/// Pixels of the tiles with any of some pixels.
fn in_tiles(first: u64, end: u64) -> u64 {
    (end.div_ceil(TILE_PIXELS) - first / TILE_PIXELS) * TILE_PIXELS
}

/// Share of the taps of dilated windows that lie in the image, for some pixel of a tile; axes without
/// dilation have 1.
fn inside_of_dilated(
    (window, layout): (&Window, Layout),
    size: &[u64],
    [x, out]: [&Type; 2],
    extents: &Extents,
) -> f64 {
    let first = match layout {
        Layout::ChannelsLast => 1,
        Layout::ChannelsFirst => 2,
    };
    let last = size.len().saturating_sub(1);
    let extent = |ty: &Type, i: usize| ty.shape.get(first + i).map_or(0, |d| extents.of(d));
    let share = |(i, &size): (usize, &u64)| {
        let (n, windows, dilation) = (extent(x, i), extent(out, i), window.dilations[i] as u64);
        if dilation == 1 || windows == 0 || size == 0 {
            return 1.0;
        }
        let (stride, pad) = (window.strides[i].max(1) as u64, window.pads_low[i] as u64);
        // A tap sees pixels from the first window at or behind the pads to the last one before the end.
        let seen = |tap: u64| {
            let at = tap.saturating_mul(dilation);
            let first = pad.saturating_sub(at).div_ceil(stride);
            let end = (n + pad).saturating_sub(at).div_ceil(stride);
            match (first, end.min(windows)) {
                (first, end) if i == last && first < end => in_tiles(first, end).min(windows),
                (first, end) => end.saturating_sub(first),
            }
        };
        let seen: u64 = (0..size).map(seen).sum();
        seen as f64 / (size * windows) as f64
    };
    size.iter().enumerate().map(share).product()
}

/// Operations of a convolution whose filters have one channel.
fn depthwise(op: &Op, types: [&Type; 3], extents: &Extents) -> Option<f64> {
    let Op::Conv { .. } = op else {
        return None;
    };
    let work = work::of_op(op, &types[..2], &types[2..], extents);
    Some(work.flops as f64 * DEPTHWISE)
}

/// Operations of windows of so many elements, one for each element of `pooled`.
fn windows(
    size: &[usize],
    pooled: &Type,
    layout: Layout,
    extents: &Extents,
    (lanes, [element, window]): (u64, [f64; 2]),
) -> Option<f64> {
    let axis = match layout {
        Layout::ChannelsLast => pooled.rank().checked_sub(1)?,
        Layout::ChannelsFirst => 1,
    };
    let channels = extents.of(pooled.shape.get(axis)?).max(1);
    let n_windows = extents.elements(&pooled.shape) as f64 / channels as f64;
    let taps: f64 = size.iter().map(|&n| n as f64).product();
    Some(n_windows * ((channels.div_ceil(lanes) * lanes) as f64 * taps * element + window))
}

/// Bytes read and written by the packing of a node's right-hand sides. Constants are packed when a program is compiled.
pub(super) fn packed_bytes(
    g: &Graph,
    node: &Node,
    extents: &Extents,
    device: &DeviceProfile,
) -> u64 {
    let body = node
        .regions
        .first()
        .filter(|_| matches!(node.op, Op::Cluster { .. }));
    let of = |inner: &Graph, n: &Node, is_constant: bool| {
        if is_constant || !matches!(n.op, Op::MatMul | Op::Conv { .. }) {
            return 0;
        }
        let types = [n.inputs[0], n.inputs[1], n.outputs[0]].map(|v| inner.ty(v));
        packed(&n.op, types, extents, device).unwrap_or(0)
    };
    match body {
        Some(body) => {
            let of_body = |(_, n): (_, &Node)| match n.inputs.get(1) {
                Some(&b) => of(body, n, is_constant(g, node, body, b)),
                None => 0,
            };
            body.nodes().map(of_body).sum()
        }
        None => match node.inputs.get(1) {
            Some(&b) => of(g, node, is_constant_in(g, b)),
            None => 0,
        },
    }
}

/// Bytes read and written when the right-hand side of a product is packed.
fn packed(op: &Op, types: [&Type; 3], extents: &Extents, device: &DeviceProfile) -> Option<u64> {
    let b = types[1];
    if b.dtype != DType::F32 {
        return None;
    }
    let product = product(op, types, extents)?;
    let panel = 2 * device.lanes.max(1) as u64;
    let read = extents.elements(&b.shape);
    let panels = product.columns.div_ceil(panel).saturating_mul(panel);
    let written = (read / product.columns.max(1)).saturating_mul(panels);
    Some(read.saturating_add(written).saturating_mul(4))
}

/// True for a value of a cluster's body that is a constant, or a view of one.
fn is_constant(g: &Graph, cluster: &Node, body: &Graph, mut v: ValueId) -> bool {
    loop {
        if let Some(i) = body.inputs.iter().position(|&input| input == v) {
            return cluster.inputs.get(i).is_some_and(|&v| is_constant_in(g, v));
        }
        match body.def_node(v) {
            Some(n) if matches!(n.op, Op::Constant { .. }) => return true,
            Some(n) if n.op.class() == OpClass::View => v = n.inputs[0],
            _ => return false,
        }
    }
}

fn is_constant_in(g: &Graph, v: ValueId) -> bool {
    let producer = g.def_node(v).map(|n| &n.op);
    matches!(producer, Some(Op::Constant { .. }))
}
