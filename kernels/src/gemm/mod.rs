//! Matrix products `c = epilogue(a @ b)` in f32, batched, with `b` packed into panels.
//!
//! `a: [m, k]` has `lda` elements between rows, `c: [m, n]` has `ldc`; both have unit column
//! stride. `b: [k, n]` was packed by [`pack_b`](crate::pack::pack_b) or `gm_pack_b_f32` for the
//! same [`Isa`]. Batch strides are free, so permuted attention layouts need no copies.
//!
//! Operands are `f32`, or 8-bit integers ([`integer`]): then `k`, `lda` and strides of `a` and `b`
//! count words of four elements.
//!
//! Work is split by items: item `i` is block `(batch, panel block, row block)`, row blocks varying
//! fastest. Any split of `0..desc.n_items()` over threads is right; [`GemmDesc::plan`] chooses
//! block sizes for a thread count.

#[cfg(target_arch = "x86_64")]
mod amx;
mod block;
pub mod integer;
pub(crate) mod tile;

#[cfg(test)]
mod tests;

pub(crate) use block::Product;

use crate::descriptor::{descriptor, plain};
use crate::epilogue::{Epilogue, EpilogueOp, MAX_BATCH, MAX_EPILOGUE};
use crate::isa::Isa;
use crate::quantize::Quantize;
use crate::{INVALID, LHS, OK, OPERANDS, RHS, UNSUPPORTED_ISA, output, pointer};
use integer::Integers;
use std::ops::Range;
use tile::Lhs;

/// Rows of a block, at most, when the whole left-hand side would not stay in the second-level
/// cache.
const ROW_BLOCK: usize = 448;
/// Multiply-adds that are worth an item of their own: some 5 us.
const ITEM_MULTIPLY_ADDS: usize = 1 << 19;
/// A product of fewer rows takes about as long as one of so many: it waits for its right-hand side,
/// which a thread reads at 40 GB/s or less where it does not fit the caches.
const LEAST_ROWS: usize = 8;

/// One batch dimension. Strides are in elements; `b`'s counts packed elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BatchDim {
    /// Batch elements along it.
    pub extent: usize,
    /// Left-hand side.
    pub a_stride: isize,
    /// Packed right-hand side.
    pub b_stride: isize,
    /// Output.
    pub c_stride: isize,
}

plain!(BatchDim {
    extent,
    a_stride,
    b_stride,
    c_stride
});

impl Default for BatchDim {
    fn default() -> BatchDim {
        BatchDim {
            extent: 1,
            a_stride: 0,
            b_stride: 0,
            c_stride: 0,
        }
    }
}

/// A batched matrix product: `c[b] = epilogue(a[b] @ b[b])`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GemmDesc {
    /// The [`Isa`] that `b` was packed for, as its number.
    pub isa: u32,
    /// Used entries of `epilogue`.
    pub n_epilogue: u32,
    /// Rows of `a` and `c`.
    pub m: usize,
    /// Columns of `b` and `c`.
    pub n: usize,
    /// Columns of `a`, rows of `b`.
    pub k: usize,
    /// Elements between rows of `a`.
    pub lda: usize,
    /// Elements between rows of `c`.
    pub ldc: usize,
    /// Rows per item.
    pub row_block: usize,
    /// Panels per item; a panel is `isa.nr()` columns.
    pub panel_block: usize,
    /// Batch dimensions, outermost first; unused ones have extent 1.
    pub batch: [BatchDim; MAX_BATCH],
    /// Applied to `c`.
    pub epilogue: [EpilogueOp; MAX_EPILOGUE],
    /// For operands of 8-bit integers.
    pub integers: Integers,
    /// Storage of `c`; its strides count stored elements.
    pub quantize: Quantize,
}

descriptor!(GemmDesc {
    isa,
    n_epilogue,
    m,
    n,
    k,
    lda,
    ldc,
    row_block,
    panel_block,
    batch,
    epilogue,
    integers,
    quantize,
});

impl GemmDesc {
    /// A product of contiguous matrices for an instruction set, one item.
    pub fn new(isa: Isa, m: usize, n: usize, k: usize) -> GemmDesc {
        GemmDesc {
            isa: isa as u32,
            n_epilogue: 0,
            m,
            n,
            k,
            lda: k,
            ldc: n,
            row_block: m.max(1),
            panel_block: n.max(1),
            batch: [BatchDim::default(); MAX_BATCH],
            epilogue: [EpilogueOp::default(); MAX_EPILOGUE],
            integers: Integers::default(),
            quantize: Quantize::default(),
        }
    }

    /// Chooses `row_block` and `panel_block` so that `n_threads` threads are busy and each item is
    /// worth its call.
    pub fn plan(&mut self, n_threads: usize) {
        let nr = self.nr();
        let (rows, panels) = plan_blocks(self.m, self.n, self.k, self.n_batch(), nr, n_threads);
        self.row_block = rows;
        self.panel_block = panels;
    }

    /// Batch elements.
    pub fn n_batch(&self) -> usize {
        self.batch.iter().map(|dim| dim.extent).product()
    }

    /// Items of the whole product.
    pub fn n_items(&self) -> usize {
        self.n_batch() * self.n_row_blocks() * self.n_panel_blocks()
    }

    /// Multiply-adds, or as many as take the time of reading the right-hand sides if that is longer.
    pub fn work(&self) -> usize {
        work(self.m, self.n, self.k).saturating_mul(self.n_batch())
    }

    fn nr(&self) -> usize {
        Isa::from_u32(self.isa).map_or(1, Isa::nr)
    }

    fn n_row_blocks(&self) -> usize {
        n_parts(self.m, self.row_block)
    }

    fn n_panel_blocks(&self) -> usize {
        n_parts(self.n.div_ceil(self.nr()), self.panel_block)
    }
}

/// See [`GemmDesc::work`].
fn work(m: usize, n: usize, k: usize) -> usize {
    m.max(LEAST_ROWS).saturating_mul(n).saturating_mul(k)
}

/// Least rows of a share where rows are shared: two tiles of the largest.
const LEAST_SHARE: usize = 24;

/// Rows and panels per item of an `m x n x k` product done `n_batch` times by `n_threads` threads.
pub(crate) fn plan_blocks(
    m: usize,
    n: usize,
    k: usize,
    n_batch: usize,
    nr: usize,
    n_threads: usize,
) -> (usize, usize) {
    let (m, n_panels, n_batch) = (m.max(1), n.div_ceil(nr).max(1), n_batch.max(1));
    // A left-hand side beyond 2 MiB is split, so that a block of it stays in the second-level cache
    // while panels pass.
    let cache_blocks = if m * k * 4 > 2 << 20 {
        m.div_ceil(ROW_BLOCK)
    } else {
        1
    };
    let worth = (work(m, n, k).saturating_mul(n_batch) / ITEM_MULTIPLY_ADDS).max(1);
    // A multiple of the threads, so that all end together.
    let wanted = if n_threads <= 1 || worth < 2 {
        1
    } else {
        (worth / n_threads).clamp(1, 4) * n_threads
    };
    if wanted > 1 && n_batch == 1 && m >= n && m >= LEAST_SHARE * n_threads {
        // Each thread has rows of its own, mostly those that it wrote before; the weights, which all
        // read, are the smaller operand.
        let most = (m / (LEAST_SHARE * n_threads)).clamp(1, 4) * n_threads;
        let blocks = wanted.min(most).max(cache_blocks);
        return (m.div_ceil(blocks.next_multiple_of(n_threads)), n_panels);
    }
    let mut row_blocks = cache_blocks;
    let mut panel_blocks = wanted.div_ceil(n_batch * row_blocks).min(n_panels).max(1);
    let divides_evenly = n_panels.is_multiple_of(n_threads.max(1)) || n_panels >= 4 * n_threads;
    if wanted > 1 && !divides_evenly && m >= 16 {
        // Too few panels for all threads: split rows, 8 or more at a time.
        panel_blocks = 1;
        row_blocks = wanted
            .div_ceil(n_batch)
            .clamp(row_blocks, m.div_ceil(8).max(row_blocks));
    }
    (m.div_ceil(row_blocks), n_panels.div_ceil(panel_blocks))
}

/// Indices of batch element `batch`, the last dimension varying fastest.
pub(crate) fn batch_index(mut batch: usize, extents: [usize; MAX_BATCH]) -> [usize; MAX_BATCH] {
    let mut out = [0; MAX_BATCH];
    for (i, extent) in extents.into_iter().enumerate().rev() {
        (batch, out[i]) = quotient_and_rest(batch, extent);
    }
    out
}

/// Number of parts of `size` that `n` elements are cut into. One part, the rule for small products,
/// takes no division.
fn n_parts(n: usize, size: usize) -> usize {
    if n <= size {
        usize::from(n > 0)
    } else {
        n.div_ceil(size.max(1))
    }
}

/// Quotient and rest. Divisors of 1, the rule for small products, take no division, which would be
/// a third of the call.
fn quotient_and_rest(n: usize, by: usize) -> (usize, usize) {
    if by <= 1 { (n, 0) } else { (n / by, n % by) }
}

/// Offset of the batch element at `idx`.
pub(crate) fn batch_offset(
    idx: [usize; MAX_BATCH],
    strides: impl IntoIterator<Item = isize>,
) -> isize {
    let terms = idx.into_iter().zip(strides);
    terms.map(|(i, stride)| i as isize * stride).sum()
}

/// Computes items `begin..end` of a [`GemmDesc`].
///
/// `ptrs[LHS]` is `a`, `ptrs[RHS]` the packed `b`, `ptrs[OUT]` is `c`, `ptrs[OPERANDS..]` are the
/// epilogue's operands. Returns `OK`, `INVALID` or `UNSUPPORTED_ISA`.
///
/// # Safety
/// The pointers cover the descriptor's operands; no other thread writes these items' part of `c`.
pub unsafe extern "C" fn gm_gemm_f32(
    desc: *const GemmDesc,
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
    if !Epilogue::valid(&desc.epilogue, desc.n_epilogue)
        || !desc.integers.valid(desc.n_epilogue, desc.quantize)
        || !blocks_valid
    {
        return INVALID;
    }
    let n_blocks = desc.n_row_blocks() * desc.n_panel_blocks();
    let end = end.min(desc.n_batch() * n_blocks);
    let mut item = begin;
    while item < end {
        // Items of one batch element share its addresses.
        let (batch, block) = quotient_and_rest(item, n_blocks);
        let batch_end = ((batch + 1) * n_blocks).min(end);
        let blocks = block..block + batch_end - item;
        // SAFETY: `ptrs` holds the operands, and they cover this batch element's blocks.
        unsafe { run_blocks(isa, desc, ptrs, batch, blocks) };
        item = batch_end;
    }
    OK
}

/// Computes some blocks of one batch element.
///
/// # Safety
/// As for [`gm_gemm_f32`], with a valid descriptor.
unsafe fn run_blocks(
    isa: Isa,
    desc: &GemmDesc,
    ptrs: *const *mut u8,
    batch: usize,
    blocks: Range<usize>,
) {
    let idx = batch_index(batch, desc.batch.map(|dim| dim.extent));
    let ops = &desc.epilogue[..desc.n_epilogue as usize];
    // SAFETY: `ptrs` holds the operands.
    let (epilogue, a, b, c, integers) = unsafe {
        (
            Epilogue::resolve(ops, ptrs.add(OPERANDS), idx),
            pointer(ptrs, LHS).wrapping_offset(batch_offset(idx, desc.batch.map(|d| d.a_stride))),
            pointer(ptrs, RHS).wrapping_offset(batch_offset(idx, desc.batch.map(|d| d.b_stride))),
            output(
                ptrs,
                desc.quantize,
                batch_offset(idx, desc.batch.map(|d| d.c_stride)),
            ),
            desc.integers.resolve(ptrs.add(OPERANDS)),
        )
    };
    let product = Product {
        isa,
        n: desc.n,
        k: desc.k,
        lhs: Lhs::strided(a, desc.lda),
        b,
        c,
        ldc: desc.ldc,
        accumulate: false,
        epilogue: &epilogue,
        epilogue_col: 0,
        integers,
        quantize: desc.quantize,
    };
    let (row_blocks, n_panels) = (desc.n_row_blocks(), desc.n.div_ceil(isa.nr()));
    for block in blocks {
        let (panel, row) = quotient_and_rest(block, row_blocks);
        let (row, panel) = (row * desc.row_block, panel * desc.panel_block);
        let rows = row..(row + desc.row_block).min(desc.m);
        // SAFETY: the operands cover the block.
        unsafe { product.block(rows, panel..(panel + desc.panel_block).min(n_panels)) };
    }
}
