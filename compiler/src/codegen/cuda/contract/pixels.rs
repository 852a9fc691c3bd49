//! Convolutions as implicit products by warp groups: the copy engine gathers the pixels under an
//! element of the filter (im2col mode of tensor maps) to tiles of a matrix with a row for each pixel
//! of the result.
//!
//! The summed axis goes through the elements of the filter and, for each, through the channels in
//! tiles of 64. Channels past the last are zero in both operands.

use super::super::Options;
use super::super::emit::{Emitter, Value};
use super::super::groups::open_fetch;
use super::super::mapped::{COLUMNS, Mapped, tensor_map};
use super::operand::Chunks;
use super::{Contract, Place};
use crate::codegen::body::Body;
use crate::codegen::pull::{Emit, Ix, Kind};
use crate::ir::{Layout, Node, Op, ValueId, Window};
use gristmill_runtime::gpu::{Pixels, TensorMap};

/// Least share of a tile's channels: with fewer, `mma.sync` takes shorter tiles.
const LEAST_CHANNELS: (usize, usize) = (2, 3);

/// A convolution whose operands the copy engine brings.
#[derive(Clone, Debug)]
pub(super) struct Implicit {
    window: Window,
    /// Filter's elements along each spatial axis.
    taps: Vec<usize>,
    /// Channels of a group, in and out.
    channels: [usize; 2],
    /// Extents of the result: images, then spatial axes.
    results: Vec<usize>,
    /// Value with the pixels, and its map.
    base: ValueId,
    map: TensorMap,
}

impl Implicit {
    /// Of a channels-last convolution with pixels in this layout, `n_pixels` to a tile; `None` if
    /// the copy engine does not take it, or channels fill too little of a tile.
    pub(super) fn new(
        body: &Body,
        node: &Node,
        pixels: &Chunks,
        n_pixels: usize,
    ) -> Option<Implicit> {
        let Op::Conv {
            window,
            groups,
            layout: Layout::ChannelsLast,
        } = &node.op
        else {
            return None;
        };
        let (out, filter) = (body.shape(node.outputs[0]), body.shape(node.inputs[1]));
        let (taps, &[c_in, c_out]) = filter.split_last_chunk::<2>()?;
        let padded = c_in.next_multiple_of(COLUMNS);
        let (least, of) = LEAST_CHANNELS;
        // The tile of one group's last channels would have another's.
        let is_whole = *groups == 1 || padded == c_in;
        if !is_whole || c_in * of < padded * least {
            return None;
        }
        let map = pixel_map(body, pixels, (window, taps), n_pixels)?;
        Some(Implicit {
            window: window.clone(),
            taps: taps.to_vec(),
            channels: [c_in, c_out / groups],
            results: out[..out.len() - 1].to_vec(),
            base: pixels.view().base,
            map,
        })
    }

    /// True if a convolution may be one.
    pub(super) fn suits(options: &Options, node: &Node) -> bool {
        let is_last = matches!(
            node.op,
            Op::Conv {
                layout: Layout::ChannelsLast,
                ..
            }
        );
        options.arch.has_wgmma() && is_last
    }

    pub(super) fn map(&self) -> (ValueId, TensorMap) {
        (self.base, self.map.clone())
    }

    /// Tiles of channels for an element of the filter.
    fn blocks(&self) -> usize {
        self.channels[0].div_ceil(COLUMNS)
    }

    /// Steps of 64 along the summed axis.
    pub(super) fn steps(&self) -> usize {
        self.taps.iter().product::<usize>() * self.blocks()
    }

    /// Writes the function of the fetching thread for a tile of pixels.
    pub(super) fn fetch_pixels(&self, c: &Contract, e: &mut Emitter, place: Place) {
        let m = c.sizes.m;
        // Of a pair of tiles the second may lie outside as a whole: it gets the first pixels.
        let row = e.position(place.row);
        let row = e.define(Kind::Index, &format!("{row} < {m} ? {row} : 0"));
        let at = e.delinearise(Ix::V(row), &self.results);
        let Window {
            strides, pads_low, ..
        } = &self.window;
        let spatial: Vec<String> = (0..self.taps.len())
            .map(|d| {
                let first = e.mul(at[d + 1], strides[d] as i64);
                let first = e.add(first, Ix::C(-(pads_low[d] as i64)));
                format!("int({})", e.position(first))
            })
            .collect();
        let image = format!("int({})", e.position(at[0]));
        open_fetch(e, "lhs");
        let (tap, channel) = self.tap_and_channel(e);
        let first = e.mul(place.batch, self.channels[0] as i64);
        let first = e.add(first, channel);
        let offsets: Vec<String> = (0..self.taps.len())
            .map(|d| {
                let offset = e.mul(tap[d], self.window.dilations[d] as i64);
                format!("u16({})", e.position(offset))
            })
            .collect();
        // The engine has the innermost axis first.
        let inner_first = |list: Vec<String>| list.into_iter().rev().collect::<Vec<_>>().join(", ");
        let at = format!("int({}), {}", e.position(first), inner_first(spatial));
        let offsets = inner_first(offsets);
        e.line(&format!(
            "gm_load_pixels(to, &map0, barrier, {at}, {image}, {offsets});"
        ));
        e.close_with("};");
    }

    /// Writes the function of the fetching thread for a tile of the filter.
    pub(super) fn fetch_filter(
        &self,
        e: &mut Emitter,
        place: Place,
        (filter, along_k): (&Mapped, bool),
    ) {
        let first = e.mul(place.batch, self.channels[1] as i64);
        let column = e.add(first, place.column);
        let column = format!("int({}) + first", e.position(column));
        open_fetch(e, "rhs");
        let (tap, channel) = self.tap_and_channel(e);
        let channel = format!("int({})", e.position(channel));
        let at = if along_k {
            [channel, column]
        } else {
            [column, channel]
        };
        let at = filter.coordinates(e, [&at[0], &at[1]], &tap);
        e.line(&format!("gm_load_tile(to, &map1, barrier, shares{at});"));
        e.close_with("};");
    }

    /// Place in the filter, and first channel of the group, of the step at `k0`.
    fn tap_and_channel(&self, e: &mut Emitter) -> (Vec<Ix<Value>>, Ix<Value>) {
        let k0 = e.named(Kind::Index, "ix(k0)");
        let (tap, channel) = e.div_rem(Ix::V(k0), self.blocks() * COLUMNS);
        (e.delinearise(tap, &self.taps), channel)
    }
}

/// The map of the pixels, in tiles of so many with [`COLUMNS`] channels.
fn pixel_map(
    body: &Body,
    pixels: &Chunks,
    (window, taps): (&Window, &[usize]),
    n_pixels: usize,
) -> Option<TensorMap> {
    let (view, rank) = (pixels.view(), pixels.view().shape.len());
    let dtype = body.dtype(view.base);
    // Channels, spatial axes and images. Each must be as far apart as all before it: that is what
    // NVIDIA's description has.
    let axes: Vec<usize> = [rank - 1].into_iter().chain((0..rank - 1).rev()).collect();
    let mut end = 1;
    for &a in axes.iter().filter(|&&a| view.shape[a] != 1) {
        if view.strides[a] < end {
            return None;
        }
        end = view.strides[a] * view.shape[a] as i64;
    }
    let spatial = || (0..taps.len()).rev();
    let span = |d: usize| (taps[d] - 1) * window.dilations[d];
    let most = Pixels::max_offset(taps.len())?;
    if spatial().any(|d| span(d) > most as usize) {
        return None;
    }
    let corner = |n: usize| i32::try_from(n).ok();
    let lower = spatial().map(|d| Some(-corner(window.pads_low[d])?));
    let upper = spatial().map(|d| Some(corner(window.pads_high[d])? - corner(span(d))?));
    let steps = spatial().map(|d| u32::try_from(window.strides[d]).ok());
    let mut map = tensor_map(view, dtype, &axes, vec![COLUMNS as u32, n_pixels as u32])?;
    map.pixels = Some(Pixels {
        lower: lower.collect::<Option<_>>()?,
        upper: upper.collect::<Option<_>>()?,
        steps: steps.collect::<Option<_>>()?,
    });
    let buffer_bytes = (body.n_elements(view.base) * dtype.size_bytes()) as u64;
    map.problem(buffer_bytes).is_none().then_some(map)
}
