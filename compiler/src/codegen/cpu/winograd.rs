//! Convolutions by minimal filtering: which ones, and their calls.

use super::rejected::Rejected;
use super::strided::Strided;
use super::task::{Context, Place, Ptr};
use super::weights::Source;
use crate::ir::Node;
use crate::options::ConvAlgorithm;
use gristmill_kernels::Isa;
use gristmill_kernels::window::Window;
use gristmill_kernels::winograd::{FilterStrides, WinogradDesc};
use gristmill_runtime::DType;

/// Fewest input and output channels: below, transforms are most of the work.
const LEAST_CHANNELS: usize = 16;
/// Largest transformed weights, in bytes.
const MOST_WEIGHTS: usize = 64 << 20;

// Prices in multiply-adds, fitted to 22 shapes on a Zen 4 core: the share of the direct time comes out within 16 % of the measured one,
// but for images of 7x7 whose weights are in the cache, where F(4, 3) takes half of its price.

/// To read a weight from memory, all of it where nothing else takes as long.
const WEIGHT: f64 = 11.4;
/// The part of that which is not hidden behind products.
const NOT_HIDDEN: f64 = 0.4;
/// To transform an element, for tiles of 2 and of 4 pixels.
const ELEMENT: [f64; 2] = [10.0, 13.0];
/// Least gain that a byte of memory is worth.
const BYTE: f64 = 2.5;

/// A convolution as minimal filtering, with its packed weights; `None` where a direct sum is the better
/// price, or nothing else is possible.
pub(super) fn choose(
    cx: &Context,
    node: &Node,
    window: Window,
    channels: [usize; 2],
) -> Result<Option<(WinogradDesc, Ptr)>, Rejected> {
    if cx.conv == ConvAlgorithm::Direct {
        return Ok(None);
    }
    let Some(desc) = best(cx.isa, window, channels) else {
        return Ok(None);
    };
    let resolved = Strided::resolve(cx.body, node.inputs[1], cx.in_memory);
    let Some(source) = cx.source(&resolved, DType::F32) else {
        return Ok(None);
    };
    let weights = packed(cx, &source, &desc)?;
    Ok(weights.map(|weights| (desc, weights)))
}

/// The form of the least price.
pub(super) fn best(isa: Isa, window: Window, [c, k]: [usize; 2]) -> Option<WinogradDesc> {
    if !WinogradDesc::takes(&window) || c.min(k) < LEAST_CHANNELS {
        return None;
    }
    let forms = [2, 4].map(|tile| WinogradDesc::new(isa, tile, window, c, k));
    let fits = |desc: &WinogradDesc| desc.n_weights() * size_of::<f32>() <= MOST_WEIGHTS;
    let priced = forms
        .into_iter()
        .filter(fits)
        .map(|desc| (price(&desc), desc));
    let least = priced.min_by(|(a, _), (b, _)| a.total_cmp(b))?;
    let direct = sums(9 * window.n_pixels() * c * k, 9 * c * k);
    (least.0 < direct).then_some(least.1)
}

fn price(desc: &WinogradDesc) -> f64 {
    let transforms = desc.n_transformed() as f64 * ELEMENT[usize::from(desc.tile == 4)];
    sums(desc.multiply_adds(), desc.n_weights()) + transforms
}

/// The price of products, of their weights' way from memory, and of the memory.
fn sums(multiply_adds: usize, n_weights: usize) -> f64 {
    let (products, reads) = (multiply_adds as f64, n_weights as f64 * WEIGHT);
    let hidden = products.min(reads) * NOT_HIDDEN;
    products.max(reads) + hidden + (n_weights * size_of::<f32>()) as f64 * BYTE
}

/// The transformed filters of `[3, 3, in, out]`; `None` where their view runs backwards.
fn packed(cx: &Context, source: &Source, desc: &WinogradDesc) -> Result<Option<Ptr>, Rejected> {
    let [h, w, input, output] = source.view.strides[..] else {
        return Ok(None);
    };
    if [h, w, input, output].iter().any(|&s| s < 0) {
        return Ok(None);
    }
    let strides = FilterStrides {
        taps: [h as isize, w as isize],
        input: input as isize,
        output: output as isize,
    };
    let copy = cx.constant_filters(source, desc, strides)?;
    Ok(Some(Ptr::Read(Place::Packed(copy), 0)))
}
