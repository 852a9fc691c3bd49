//! Convolutions by minimal filtering: which ones, and their calls.

use super::rejected::Rejected;
use super::strided::Strided;
use super::task::{Context, Place, Ptr};
use super::weights::Source;
use crate::ir::Node;
use crate::options::ConvAlgorithm;
use gristmill_kernels::window::Window;
use gristmill_kernels::winograd::{FilterStrides, Priced, WinogradDesc};
use gristmill_runtime::DType;

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
    let Some(Priced { desc, .. }) = WinogradDesc::cheapest(cx.isa, window, channels) else {
        return Ok(None);
    };
    let resolved = Strided::resolve(cx.body, node.inputs[1], cx.in_memory);
    let Some(source) = cx.source(&resolved, DType::F32) else {
        return Ok(None);
    };
    let weights = packed(cx, &source, &desc)?;
    Ok(weights.map(|weights| (desc, weights)))
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
    let copy = cx.constant_filters(source, desc, strides);
    Ok(Some(Ptr::Read(Place::Packed(copy), 0)))
}
