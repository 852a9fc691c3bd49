//! Addresses of the input pixels that each output pixel of a block sees. Elements are `f32` or
//! words of four bytes, which are only moved.

use super::{ConvDesc, Form};
use crate::gemm::tile::Lhs;
use crate::window::Window;
use std::ops::Range;

/// Offsets of the workspace's parts, in bytes.
pub(super) struct Layout {
    /// After the zeros.
    table: usize,
    /// After the table.
    image: usize,
    pub(super) bytes: usize,
}

/// A block's table of addresses: entry `tap * row_block + r` is where the run of `tap` starts for
/// the block's row `r`.
pub(super) struct Lookup<'a> {
    desc: &'a ConvDesc,
    form: Form,
    /// The input, or the padded copy of the rows that the block needs.
    window: Window,
    x: *const f32,
    zeros: *mut f32,
    table: *mut *const f32,
    image: *mut f32,
    /// Byte of all padding.
    padding: u8,
    prepared: Range<usize>,
}

impl<'a> Lookup<'a> {
    pub(super) fn layout(desc: &ConvDesc) -> Layout {
        let w = &desc.window;
        let padded = desc.form() == Form::PaddedRows;
        let zeros = if padded {
            0
        } else {
            desc.groups * desc.in_channels * size_of::<f32>()
        };
        let table = zeros.next_multiple_of(64);
        let image =
            (table + n_runs(desc) * desc.row_block * size_of::<*const f32>()).next_multiple_of(64);
        let image_bytes = if padded {
            rows_of_block(desc) * padded_width(w) * desc.in_channels * size_of::<f32>()
        } else {
            0
        };
        Layout {
            table,
            image,
            bytes: (image + image_bytes).next_multiple_of(64),
        }
    }

    /// # Safety
    /// `workspace` has the layout's size, unless the form needs none and it is null.
    pub(super) unsafe fn new(
        desc: &'a ConvDesc,
        x: *const f32,
        workspace: *mut u8,
        padding: u8,
    ) -> Lookup<'a> {
        let form = desc.form();
        let layout = Lookup::layout(desc);
        let zeros: *mut f32 = workspace.cast();
        if form == Form::Table {
            // SAFETY: the workspace starts with room for one pixel of zeros.
            unsafe { std::ptr::write_bytes(zeros, padding, desc.groups * desc.in_channels) };
        }
        Lookup {
            desc,
            form,
            window: desc.window,
            x,
            zeros,
            table: workspace.wrapping_add(layout.table).cast(),
            image: workspace.wrapping_add(layout.image).cast(),
            padding,
            prepared: 0..0,
        }
    }

    /// Elements of one run.
    pub(super) fn span(&self) -> usize {
        match self.form {
            Form::PaddedRows => self.desc.window.kernel_w * self.desc.in_channels,
            _ => self.desc.in_channels,
        }
    }

    /// The left-hand side of the prepared block, for one group.
    pub(super) fn lhs(&self, group: usize) -> Lhs {
        Lhs {
            a: std::ptr::null(),
            lda: 0,
            rows: self.table,
            tap_stride: self.desc.row_block,
            taps: n_runs(self.desc),
            offset: group * self.desc.in_channels,
            zeros: match self.form {
                Form::Table if self.padding == 0 => self.zeros,
                _ => std::ptr::null(),
            },
            ..Lhs::strided(std::ptr::null(), 0)
        }
    }

    /// Fills the table for `rows`, which are output pixels.
    ///
    /// # Safety
    /// `x` covers the input; `rows` are at most a block.
    pub(super) unsafe fn prepare(&mut self, rows: Range<usize>) {
        if self.prepared == rows {
            return;
        }
        self.prepared = rows.clone();
        let w = self.desc.window;
        let mut row = rows.start;
        let mut copy = self.image;
        // SAFETY: each run of pixels stays inside its image, the table and the copy.
        unsafe {
            while row < rows.end {
                let (image, entry) = (row / (w.out_h * w.out_w), row - rows.start);
                let start = row;
                if self.form == Form::PaddedRows {
                    // All of the block's rows in this image at once.
                    row = rows.end.min((image + 1) * w.out_h * w.out_w);
                    copy = self.copy_image(image, start..row, entry, copy);
                } else {
                    let (oh, ow) = (row / w.out_w % w.out_h, row % w.out_w);
                    row = rows.end.min(row + w.out_w - ow);
                    for d in 0..w.kernel_d {
                        let entry = d * w.kernel_h * w.kernel_w * self.desc.row_block + entry;
                        let x = self.input_depth(image, d);
                        self.point_into_input(x, entry, oh, ow..ow + row - start);
                    }
                }
            }
        }
    }

    /// The input under window depth `d` of an output image, if not on padding.
    fn input_depth(&self, image: usize, d: usize) -> Option<*const f32> {
        let w = &self.window;
        let id = w.input_depth(image % w.out_d, d)?;
        let offset = image / w.out_d * w.x_n_stride + id * w.x_d_stride;
        Some(self.x.wrapping_add(offset))
    }

    /// Copies the input under output pixels `pixels` of an image, and fills the table from `entry`
    /// on. Returns the end of the copy.
    ///
    /// # Safety
    /// As for [`Lookup::prepare`]; `copy` lies in the workspace.
    unsafe fn copy_image(
        &mut self,
        image: usize,
        pixels: Range<usize>,
        entry: usize,
        mut copy: *mut f32,
    ) -> *mut f32 {
        let w = self.window;
        let oh = |pixel: usize| pixel / w.out_w % w.out_h;
        let (first, last) = (oh(pixels.start), oh(pixels.end - 1));
        for d in 0..w.kernel_d {
            let entry = d * w.kernel_h * self.desc.row_block + entry;
            let x = self.input_depth(image, d);
            // SAFETY: by contract; the table has an entry per run and pixel.
            unsafe {
                for (r, pixel) in pixels.clone().enumerate() {
                    let at = [oh(pixel) - first, pixel % w.out_w];
                    self.point_into_copy(entry + r, at, copy);
                }
                copy = self.copy_rows(x, first, last, copy);
            }
        }
        copy
    }

    /// Fills the table from `entry` on for output pixels `ow` of output row `oh`, whose input is
    /// `x`; without one it is padding.
    ///
    /// # Safety
    /// As for [`Lookup::prepare`].
    unsafe fn point_into_input(
        &mut self,
        x: Option<*const f32>,
        entry: usize,
        oh: usize,
        ow: Range<usize>,
    ) {
        let w = &self.window;
        for i in 0..w.kernel_h {
            let input = x
                .zip(w.input_row(oh, i))
                .map(|(x, ih)| x.wrapping_add(ih * w.x_h_stride));
            for j in 0..w.kernel_w {
                let (first, end) = w.columns_inside(j);
                let (first, end) = (first.clamp(ow.start, ow.end), end.clamp(ow.start, ow.end));
                let table = self
                    .table
                    .wrapping_add((i * w.kernel_w + j) * self.desc.row_block + entry);
                let zeros = self.zeros.cast_const();
                // SAFETY: one entry per output pixel of the run.
                unsafe {
                    let Some(input) = input.filter(|_| first < end) else {
                        (0..ow.len()).for_each(|r| *table.add(r) = zeros);
                        continue;
                    };
                    (0..first - ow.start).for_each(|r| *table.add(r) = zeros);
                    let iw = first * w.stride_w + j * w.dilation_w - w.pad_left;
                    let pixel = input.wrapping_add(iw * w.x_w_stride);
                    let step = w.stride_w * w.x_w_stride;
                    (0..end - first).for_each(|r| {
                        *table.add(first - ow.start + r) = pixel.wrapping_add(r * step)
                    });
                    (end - ow.start..ow.len()).for_each(|r| *table.add(r) = zeros);
                }
            }
        }
    }

    /// Copies the input rows that output rows `first..=last` see, with their padding, to `image`;
    /// without input all is padding. Returns the end of the copy.
    ///
    /// # Safety
    /// As for [`Lookup::prepare`]; `image` lies in the workspace.
    unsafe fn copy_rows(
        &mut self,
        x: Option<*const f32>,
        first: usize,
        last: usize,
        image: *mut f32,
    ) -> *mut f32 {
        let w = &self.window;
        let channels = self.desc.in_channels;
        let (width, height) = (padded_width(w), copied_rows(w, last - first + 1));
        let left = w.pad_left.min(width);
        let inside = w.in_w.min(width - left);
        for i in 0..height {
            let ih = (first * w.stride_h + i)
                .checked_sub(w.pad_top)
                .filter(|&ih| ih < w.in_h);
            // SAFETY: `height` rows of `width` pixels fit, as the layout counted them.
            unsafe {
                let row = image.add(i * width * channels);
                let Some((x, ih)) = x.zip(ih) else {
                    std::ptr::write_bytes(row, self.padding, width * channels);
                    continue;
                };
                std::ptr::write_bytes(row, self.padding, left * channels);
                let source = x.add(ih * w.x_h_stride);
                if w.x_w_stride == channels {
                    copy_words(source, row.add(left * channels), inside * channels);
                } else {
                    for iw in 0..inside {
                        copy_words(
                            source.add(iw * w.x_w_stride),
                            row.add((left + iw) * channels),
                            channels,
                        );
                    }
                }
                let right = row.add((left + inside) * channels);
                std::ptr::write_bytes(right, self.padding, (width - left - inside) * channels);
            }
        }
        image.wrapping_add(height * width * channels)
    }

    /// Fills one entry per window row for output pixel (`oh`, `ow`), whose rows are counted from the
    /// first of the copy.
    ///
    /// # Safety
    /// The table has these entries.
    unsafe fn point_into_copy(&mut self, entry: usize, [oh, ow]: [usize; 2], copy: *mut f32) {
        let w = &self.window;
        let row = padded_width(w) * self.desc.in_channels;
        let copy = copy.cast_const();
        for i in 0..w.kernel_h {
            let offset = (oh * w.stride_h + i * w.dilation_h) * row
                + ow * w.stride_w * self.desc.in_channels;
            // SAFETY: one entry per tap and output pixel of the block.
            unsafe { *self.table.add(i * self.desc.row_block + entry) = copy.wrapping_add(offset) };
        }
    }
}

/// Copies `n` words, which may lie anywhere.
///
/// # Safety
/// As for [`std::ptr::copy_nonoverlapping`], but for the alignment.
unsafe fn copy_words(from: *const f32, to: *mut f32, n: usize) {
    // SAFETY: by contract.
    unsafe {
        std::ptr::copy_nonoverlapping(from.cast::<u8>(), to.cast::<u8>(), n * size_of::<f32>())
    }
}

/// Runs of input under an output pixel, its entries in the table.
fn n_runs(desc: &ConvDesc) -> usize {
    match desc.form() {
        Form::PaddedRows => desc.window.kernel_d * desc.window.kernel_h,
        _ => desc.window.n_taps(),
    }
}

/// Pixels of a row with its padding.
fn padded_width(w: &Window) -> usize {
    w.out_w.saturating_sub(1) * w.stride_w + w.kernel_w
}

/// Input rows, padding included, that `n` output rows see.
fn copied_rows(w: &Window, n: usize) -> usize {
    n.saturating_sub(1) * w.stride_h + (w.kernel_h - 1) * w.dilation_h + 1
}

/// Rows of all copies of a block, at most: the block may lie in several images, and each has a copy
/// per window depth.
fn rows_of_block(desc: &ConvDesc) -> usize {
    let w = &desc.window;
    let rows = desc.row_block.div_ceil(w.out_w.max(1)) + 1;
    let images = desc.row_block.div_ceil((w.out_w * w.out_h).max(1)) + 1;
    w.kernel_d * (rows * w.stride_h + images * ((w.kernel_h - 1) * w.dilation_h + 1))
}
