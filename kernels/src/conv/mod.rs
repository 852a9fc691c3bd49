//! Convolution of images over two or three axes, channels last, in f32 or of 8-bit integers: a
//! matrix product whose left-hand rows are found by address, not copied.
//!
//! `x: [batch, in_d, in_h, in_w, groups * in_channels]`, weights packed by [`pack_weights`],
//! `y: [batch, out_d, out_h, out_w, groups * out_channels]` with `ldy` elements between pixels. For
//! the epilogue, a row is an output pixel and a column an output channel over all groups. The forms'
//! "image" is an output depth of an image: depth is a loop around them.
//!
//! The descriptor's numbers choose between three forms:
//! - 1x1 windows without stride: a plain product.
//! - Few input channels: the block's input rows are copied with their padding, so that a window row
//!   is contiguous.
//! - Otherwise: a table with the address of each input pixel that each output pixel sees; padding
//!   is the address of zeros.
//!
//! Images of bytes are words of four channels ([`crate::gemm::integer`]): `in_channels` and the
//! strides of `x` count words, and padding is the zero point.
//!
//! Item `i` is block `(group, panel block, row block)`, row blocks (of output pixels) varying
//! fastest.

mod lookup;
#[cfg(test)]
pub(crate) mod tests;

use crate::descriptor::descriptor;
use crate::epilogue::{Epilogue, EpilogueOp, MAX_BATCH, MAX_EPILOGUE};
use crate::gemm::integer::{Integers, Resolved};
use crate::gemm::tile::Lhs;
use crate::gemm::{Product, plan_blocks};
use crate::isa::Isa;
use crate::pack::{pack_b, packed_len};
use crate::quantize::Quantize;
use crate::window::Window;
use crate::{INVALID, LHS, OK, OPERANDS, RHS, UNSUPPORTED_ISA, WORKSPACE, output, pointer};
use lookup::Lookup;
use std::ops::Range;

/// Output pixels per block, at most, so that the block's input and table stay in the second-level
/// cache.
const ROW_BLOCK: usize = 256;
/// With fewer input channels than this, a pixel is too short a run.
const FEW_CHANNELS: usize = 16;

/// A convolution.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ConvDesc {
    /// The [`Isa`] that the weights were packed for, as its number.
    pub isa: u32,
    /// Used entries of `epilogue`.
    pub n_epilogue: u32,
    /// Geometry.
    pub window: Window,
    /// Groups.
    pub groups: usize,
    /// Input channels of a group.
    pub in_channels: usize,
    /// Output channels of a group.
    pub out_channels: usize,
    /// Elements between output pixels.
    pub ldy: usize,
    /// Output pixels per item.
    pub row_block: usize,
    /// Panels per item; a panel is `isa.nr()` output channels.
    pub panel_block: usize,
    /// Applied to `y`.
    pub epilogue: [EpilogueOp; MAX_EPILOGUE],
    /// For images of 8-bit integers.
    pub integers: Integers,
    /// Storage of `y`; its strides count stored elements.
    pub quantize: Quantize,
}

descriptor!(ConvDesc {
    isa,
    n_epilogue,
    window,
    groups,
    in_channels,
    out_channels,
    ldy,
    row_block,
    panel_block,
    epilogue,
    integers,
    quantize,
});

/// Addressing of the left-hand rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Pointwise,
    PaddedRows,
    Table,
}

impl ConvDesc {
    /// A convolution for an instruction set with contiguous output, planned for one thread.
    pub fn new(
        isa: Isa,
        window: Window,
        groups: usize,
        in_channels: usize,
        out_channels: usize,
    ) -> ConvDesc {
        let mut desc = ConvDesc {
            isa: isa as u32,
            n_epilogue: 0,
            window,
            groups,
            in_channels,
            out_channels,
            ldy: groups * out_channels,
            row_block: 1,
            panel_block: 1,
            epilogue: [EpilogueOp::default(); MAX_EPILOGUE],
            integers: Integers::default(),
            quantize: Quantize::default(),
        };
        desc.plan(1);
        desc
    }

    /// Chooses `row_block` and `panel_block` so that `n_threads` threads are busy and each item is
    /// worth its call.
    pub fn plan(&mut self, n_threads: usize) {
        let (m, k) = (self.window.n_pixels(), self.n_taps() * self.in_channels);
        let nr = Isa::from_u32(self.isa).map_or(1, Isa::nr);
        let (rows, panels) = plan_blocks(m, self.out_channels, k, self.groups, nr, n_threads);
        (self.row_block, self.panel_block) = (rows, panels);
        if self.form() != Form::Pointwise {
            let n_blocks = m.div_ceil(rows.min(ROW_BLOCK)).max(1);
            self.row_block = m.div_ceil(n_blocks).max(1);
        }
        if self.form() == Form::PaddedRows {
            self.row_block = self.row_block.next_multiple_of(self.window.out_w.max(1));
        }
    }

    /// Items of the whole convolution.
    pub fn n_items(&self) -> usize {
        self.groups * self.n_row_blocks() * self.n_panel_blocks()
    }

    /// Bytes for each concurrent call at `ptrs[WORKSPACE]`.
    pub fn workspace_bytes(&self) -> usize {
        if self.form() == Form::Pointwise {
            0
        } else {
            Lookup::layout(self).bytes
        }
    }

    /// Elements, or words, of the packed weights.
    pub fn packed_len(&self) -> usize {
        let k = self.n_taps() * self.in_channels + usize::from(self.integers.operands != 0);
        self.groups * Isa::from_u32(self.isa).map_or(0, |isa| packed_len(isa, k, self.out_channels))
    }

    fn n_taps(&self) -> usize {
        self.window.n_taps()
    }

    fn n_row_blocks(&self) -> usize {
        self.window.n_pixels().div_ceil(self.row_block.max(1))
    }

    fn n_panel_blocks(&self) -> usize {
        let nr = Isa::from_u32(self.isa).map_or(1, Isa::nr);
        self.out_channels
            .div_ceil(nr)
            .div_ceil(self.panel_block.max(1))
    }

    fn form(&self) -> Form {
        let w = &self.window;
        let contiguous = w.x_h_stride == w.in_w * w.x_w_stride
            && (w.in_d <= 1 || w.x_d_stride == w.in_h * w.x_h_stride)
            && (w.batch <= 1 || w.x_n_stride == w.in_d * w.in_h * w.x_h_stride);
        let same_size = [w.out_d, w.out_h, w.out_w] == [w.in_d, w.in_h, w.in_w]
            && [w.pad_front, w.pad_top, w.pad_left] == [0; 3];
        let all_pixels = same_size && [w.stride_d, w.stride_h, w.stride_w] == [1; 3];
        if self.n_taps() == 1 && all_pixels && contiguous {
            Form::Pointwise
        } else if self.in_channels < FEW_CHANNELS
            && w.kernel_w > 1
            && w.dilation_w == 1
            && self.groups == 1
        {
            Form::PaddedRows
        } else {
            Form::Table
        }
    }
}

/// Packs ONNX weights `[groups * out_channels, in_channels, kernel_d, kernel_h, kernel_w]` for a
/// convolution of `groups` groups, each `n_taps` ([`Window::n_taps`]) x `in_channels` rows by
/// `out_channels` columns.
///
/// Panics if `weights` is too short.
pub fn pack_weights(
    isa: Isa,
    groups: usize,
    out_channels: usize,
    in_channels: usize,
    n_taps: usize,
    weights: &[f32],
) -> Vec<f32> {
    let k = n_taps * in_channels;
    let mut out = Vec::with_capacity(groups * packed_len(isa, k, out_channels));
    for group in weights.chunks_exact((out_channels * k).max(1)).take(groups) {
        let by_tap: Vec<f32> = group
            .chunks_exact(k)
            .flat_map(|o| (0..k).map(|row| o[row % in_channels * n_taps + row / in_channels]))
            .collect();
        out.extend(pack_b(isa, k, out_channels, &by_tap, 1, k));
    }
    out
}

/// Computes items `begin..end` of a [`ConvDesc`].
///
/// `ptrs[LHS]` is `x`, `ptrs[RHS]` the packed weights, `ptrs[OUT]` is `y`, `ptrs[WORKSPACE]` this
/// call's own workspace, `ptrs[OPERANDS..]` are the epilogue's operands. Returns `OK`, `INVALID` or
/// `UNSUPPORTED_ISA`.
///
/// # Safety
/// The pointers cover the descriptor's operands; no other thread writes these items' part of `y`,
/// or uses the workspace.
pub unsafe extern "C" fn gm_conv_f32(
    desc: *const ConvDesc,
    ptrs: *const *mut u8,
    begin: usize,
    end: usize,
) -> u32 {
    // SAFETY: the descriptor is valid by contract.
    let desc = unsafe { &*desc };
    let Some(isa) = Isa::usable(desc.isa) else {
        return UNSUPPORTED_ISA;
    };
    let blocks_valid = desc.row_block > 0 && desc.panel_block > 0;
    let epilogue_valid = Epilogue::valid(&desc.epilogue, desc.n_epilogue)
        && desc.integers.valid(desc.n_epilogue, desc.quantize);
    if !epilogue_valid || !desc.window.valid() || !blocks_valid {
        return INVALID;
    }
    // SAFETY: the pointers cover the descriptor's operands.
    unsafe { run(isa, desc, ptrs, begin, end.min(desc.n_items())) };
    OK
}

/// Part of the output of an item.
struct Block {
    group: usize,
    rows: Range<usize>,
    panels: Range<usize>,
}

impl Block {
    fn new(desc: &ConvDesc, isa: Isa, item: usize) -> Block {
        let (row_blocks, panel_blocks) = (desc.n_row_blocks(), desc.n_panel_blocks());
        let row = item % row_blocks * desc.row_block;
        let panel = item / row_blocks % panel_blocks * desc.panel_block;
        let n_panels = desc.out_channels.div_ceil(isa.nr());
        Block {
            group: item / (row_blocks * panel_blocks),
            rows: row..(row + desc.row_block).min(desc.window.n_pixels()),
            panels: panel..(panel + desc.panel_block).min(n_panels),
        }
    }
}

/// # Safety
/// As for [`gm_conv_f32`], with a valid descriptor.
unsafe fn run(isa: Isa, desc: &ConvDesc, ptrs: *const *mut u8, begin: usize, end: usize) {
    let is_pointwise = desc.form() == Form::Pointwise;
    let packed_group = desc.packed_len() / desc.groups.max(1);
    let ops = &desc.epilogue[..desc.n_epilogue as usize];
    // SAFETY: the pointers cover the descriptor's operands.
    unsafe {
        let (x, weights) = (pointer(ptrs, LHS), pointer(ptrs, RHS));
        let epilogue = Epilogue::resolve(ops, ptrs.add(OPERANDS), [0; MAX_BATCH]);
        let integers = desc.integers.resolve(ptrs.add(OPERANDS));
        let workspace = if is_pointwise {
            std::ptr::null_mut()
        } else {
            *ptrs.add(WORKSPACE)
        };
        let padding = integers.as_ref().map_or(0, Resolved::zero_byte);
        let mut lookup = Lookup::new(desc, x, workspace, padding);
        for item in begin..end {
            let Block {
                group,
                rows,
                panels,
            } = Block::new(desc, isa, item);
            let (k, lhs) = if is_pointwise {
                let a = x.wrapping_add(group * desc.in_channels);
                (desc.in_channels, Lhs::strided(a, desc.window.x_w_stride))
            } else {
                lookup.prepare(rows.clone());
                (lookup.span(), lookup.lhs(group))
            };
            let col = group * desc.out_channels;
            let product = Product {
                isa,
                n: desc.out_channels,
                k,
                lhs,
                b: weights.wrapping_add(group * packed_group),
                c: output(ptrs, desc.quantize, col as isize),
                ldc: desc.ldy,
                accumulate: false,
                epilogue: &epilogue,
                epilogue_col: col,
                integers,
                quantize: desc.quantize,
            };
            product.block(rows, panels);
        }
    }
}
