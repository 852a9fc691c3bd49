//! Convolution of NHWC images in f32, or of 8-bit integers, as a matrix product whose left-hand rows are looked up instead of copied.
//!
//! `x: [batch, in_h, in_w, groups * in_channels]`, weights packed by [`pack_weights`], `y: [batch, out_h, out_w, groups * out_channels]` with
//! `ldy` elements between pixels. For the epilogue, a row is an output pixel and a column an output channel over all groups.
//!
//! Three forms, chosen by the descriptor's numbers: a plain product for 1x1 windows without stride; for few input channels, a copy of
//! the block's input rows with their padding, in which a whole window row is one contiguous run; else a table with the address of
//! each input pixel that each output pixel sees, padding being an address of zeros.
//!
//! Images of bytes are words of four channels ([`crate::gemm::integer`]): `in_channels` and the strides of `x` count words. Padding is then the zero
//! point.
//!
//! Item `i` is block `(group, panel block, row block)`, row blocks (of output pixels) varying fastest.

mod lookup;
#[cfg(test)]
pub(crate) mod tests;

use crate::descriptor::descriptor;
use crate::epilogue::{Epilogue, EpilogueOp, MAX_BATCH, MAX_EPILOGUE, Quantize};
use crate::gemm::integer::{Integers, Resolved};
use crate::gemm::tile::Lhs;
use crate::gemm::{Product, plan_blocks};
use crate::isa::Isa;
use crate::pack::{pack_b, packed_len};
use crate::window::Window;
use crate::{INVALID, LHS, OK, OPERANDS, RHS, UNSUPPORTED_ISA, WORKSPACE, output, pointer};
use lookup::Lookup;

/// Output pixels per block, at most: what keeps the block's input and table in the second-level cache.
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
    /// How `y` is stored; its strides count stored elements.
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

/// How the left-hand rows are found.
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

    /// Appends an epilogue op. False, and nothing appended, if there is no room.
    #[must_use]
    pub fn push_epilogue(&mut self, op: EpilogueOp) -> bool {
        let has_room = (self.n_epilogue as usize) < MAX_EPILOGUE;
        if has_room {
            self.epilogue[self.n_epilogue as usize] = op;
            self.n_epilogue += 1;
        }
        has_room
    }

    /// Chooses `row_block` and `panel_block` so that `n_threads` threads are busy and each item is worth its call.
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

    /// Bytes that each concurrent call needs at `ptrs[WORKSPACE]`.
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
        self.window.kernel_h * self.window.kernel_w
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
            && (w.batch <= 1 || w.x_n_stride == w.in_h * w.x_h_stride);
        let same_size = w.out_h == w.in_h && w.out_w == w.in_w && w.pad_top == 0 && w.pad_left == 0;
        if self.n_taps() == 1 && w.stride_h == 1 && w.stride_w == 1 && same_size && contiguous {
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

/// Packs ONNX weights `[groups * out_channels, in_channels, kernel_h, kernel_w]` for a convolution of `groups` groups, each `n_taps`
/// (`kernel_h * kernel_w`) x `in_channels` rows by `out_channels` columns.
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
/// `ptrs[LHS]` is `x`, `ptrs[RHS]` the packed weights, `ptrs[OUT]` is `y`, `ptrs[WORKSPACE]` this call's own workspace,
/// `ptrs[OPERANDS..]` are the epilogue's operands. Returns `OK`, `INVALID` or `UNSUPPORTED_ISA`.
///
/// # Safety
/// The pointers cover what the descriptor describes; no other thread writes these items' part of `y`, or uses the workspace.
#[unsafe(no_mangle)]
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
    // SAFETY: the pointers cover what the descriptor describes.
    unsafe { run(isa, desc, ptrs, begin, end.min(desc.n_items())) };
    OK
}

/// # Safety
/// As for [`gm_conv_f32`], with a valid descriptor.
unsafe fn run(isa: Isa, desc: &ConvDesc, ptrs: *const *mut u8, begin: usize, end: usize) {
    let form = desc.form();
    let (row_blocks, panel_blocks) = (desc.n_row_blocks(), desc.n_panel_blocks());
    let (n_panels, m) = (desc.out_channels.div_ceil(isa.nr()), desc.window.n_pixels());
    let packed_group = desc.packed_len() / desc.groups.max(1);
    // SAFETY: the pointers cover what the descriptor describes.
    unsafe {
        let x = pointer(ptrs, LHS).cast_const();
        let epilogue = Epilogue::resolve(
            &desc.epilogue[..desc.n_epilogue as usize],
            ptrs.add(OPERANDS),
            [0; MAX_BATCH],
        );
        let integers = desc.integers.resolve(ptrs.add(OPERANDS));
        let workspace = if form == Form::Pointwise {
            std::ptr::null_mut()
        } else {
            *ptrs.add(WORKSPACE)
        };
        let mut lookup = Lookup::new(
            desc,
            x,
            workspace,
            integers.as_ref().map_or(0, Resolved::zero_byte),
        );
        for item in begin..end {
            let (row_block, rest) = (item % row_blocks, item / row_blocks);
            let (panel_block, group) = (rest % panel_blocks, rest / panel_blocks);
            let rows = row_block * desc.row_block..((row_block + 1) * desc.row_block).min(m);
            let panels = panel_block * desc.panel_block
                ..((panel_block + 1) * desc.panel_block).min(n_panels);
            let (k, lhs) = if form == Form::Pointwise {
                let a = x.wrapping_add(group * desc.in_channels);
                let lhs = Lhs {
                    a,
                    lda: desc.window.x_w_stride,
                    rows: std::ptr::null(),
                    tap_stride: 0,
                    taps: 0,
                    offset: 0,
                };
                (desc.in_channels, lhs)
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
                b: pointer(ptrs, RHS)
                    .cast_const()
                    .wrapping_add(group * packed_group),
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
