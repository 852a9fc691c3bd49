//! Savings of minimal filtering over a convolution's direct sums on CPUs: the price by which code generation chooses it.

use super::Extents;
use crate::ir::{Layout, Op, Shape, Type};
use gristmill_kernels::Isa;
use gristmill_kernels::window::Window;
use gristmill_kernels::winograd::WinogradDesc;
use gristmill_runtime::DType;

/// The instruction set that prices are of, whatever machine they are for: others differ by padding alone.
const ISA: Isa = Isa::Avx2;

/// Time of an op as a share of that of direct sums, which is 1 for all but some convolutions with constant weights. Weights count as
/// constant.
pub(super) fn share(op: &Op, operands: &[&Type], extents: &Extents) -> f64 {
    let found = geometry(op, operands, extents)
        .and_then(|(window, channels)| WinogradDesc::cheapest(ISA, window, channels));
    found.map_or(1.0, |priced| priced.share)
}

/// The window of a convolution over contiguous images in `f32`, and its channels before and after.
fn geometry(op: &Op, operands: &[&Type], extents: &Extents) -> Option<(Window, [usize; 2])> {
    let Op::Conv {
        window,
        groups: 1,
        layout: Layout::ChannelsLast,
    } = op
    else {
        return None;
    };
    let [x, weights] = operands[..] else {
        return None;
    };
    if x.dtype != DType::F32 || x.shape.rank() != 4 {
        return None;
    }
    let of = |shape: &Shape, axis: usize| Some(extents.of(shape.get(axis)?) as usize);
    let size = [of(&weights.shape, 0)?, of(&weights.shape, 1)?];
    let channels = [of(&weights.shape, 2)?, of(&weights.shape, 3)?];
    let [n, h, w] = [of(&x.shape, 0)?, of(&x.shape, 1)?, of(&x.shape, 2)?];
    let [strides, dilations] = [pair(&window.strides)?, pair(&window.dilations)?];
    let [[top, left], [bottom, right]] = [pair(&window.pads_low)?, pair(&window.pads_high)?];
    let window = Window::new(n, h, w, channels[0], size[0], size[1]).with(
        strides,
        dilations,
        [top, left, bottom, right],
    );
    Some((window, channels))
}

/// The values of the two axes of an image.
fn pair(values: &[usize]) -> Option<[usize; 2]> {
    match *values {
        [rows, columns] => Some([rows, columns]),
        _ => None,
    }
}
