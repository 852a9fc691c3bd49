//! Packing of right-hand sides into panels.
//!
//! `b: [k, n]` with any strides becomes `ceil(n / nr)` panels of `k x nr` elements, each row of a
//! panel contiguous, the last panel's missing columns zero. Panels should start at a multiple of 64
//! bytes, so the buffer should.

use crate::descriptor::{descriptor, plain};
use crate::epilogue::MAX_BATCH;
use crate::gemm::{batch_index, batch_offset};
use crate::isa::Isa;
use crate::simd::{Simd, Task, dispatch};
use crate::transpose::{Transpose, transpose};
use crate::{LHS, OK, OUT, UNSUPPORTED_ISA, pointer};

/// Elements of a packed `[k, n]` matrix.
pub fn packed_len(isa: Isa, k: usize, n: usize) -> usize {
    n.div_ceil(isa.nr()) * k * isa.nr()
}

/// One batch dimension of a packing. Strides are in elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PackBatchDim {
    /// Batch elements along it.
    pub extent: usize,
    /// Source.
    pub b_stride: isize,
    /// Packed; normally a multiple of [`packed_len`].
    pub packed_stride: isize,
}

plain!(PackBatchDim {
    extent,
    b_stride,
    packed_stride
});

impl Default for PackBatchDim {
    fn default() -> PackBatchDim {
        PackBatchDim {
            extent: 1,
            b_stride: 0,
            packed_stride: 0,
        }
    }
}

/// A batched packing. Item `i` is panel `i % n_panels` of batch element `i / n_panels`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PackBDesc {
    /// The [`Isa`] to pack for, as its number.
    pub isa: u32,
    /// Unused, zero.
    pub reserved: u32,
    /// Rows of the source.
    pub k: usize,
    /// Columns of the source.
    pub n: usize,
    /// Source elements between rows.
    pub row_stride: isize,
    /// Source elements between columns.
    pub col_stride: isize,
    /// Batch dimensions, outermost first; unused ones have extent 1.
    pub batch: [PackBatchDim; MAX_BATCH],
}

descriptor!(PackBDesc {
    isa,
    reserved,
    k,
    n,
    row_stride,
    col_stride,
    batch
});

impl PackBDesc {
    /// One `[k, n]` matrix for an instruction set.
    pub fn new(isa: Isa, k: usize, n: usize, row_stride: isize, col_stride: isize) -> PackBDesc {
        let batch = [PackBatchDim::default(); MAX_BATCH];
        PackBDesc {
            isa: isa as u32,
            reserved: 0,
            k,
            n,
            row_stride,
            col_stride,
            batch,
        }
    }

    /// Items of the whole packing.
    pub fn n_items(&self) -> usize {
        let n_batch: usize = self.batch.iter().map(|dim| dim.extent).product();
        n_batch * self.n_panels()
    }

    fn n_panels(&self) -> usize {
        Isa::from_u32(self.isa).map_or(0, |isa| self.n.div_ceil(isa.nr()))
    }
}

/// Packs the `[k, n]` matrix whose element `(i, j)` is `b[i * row_stride + j * col_stride]`.
///
/// Panics if `b` is too short.
pub fn pack_b(
    isa: Isa,
    k: usize,
    n: usize,
    b: &[f32],
    row_stride: usize,
    col_stride: usize,
) -> Vec<f32> {
    let mut out = Vec::with_capacity(packed_len(isa, k, n));
    for panel in 0..n.div_ceil(isa.nr()) {
        let cols = panel * isa.nr()..(panel + 1) * isa.nr();
        for i in 0..k {
            out.extend(cols.clone().map(|j| {
                if j < n {
                    b[i * row_stride + j * col_stride]
                } else {
                    0.0
                }
            }));
        }
    }
    out
}

/// Computes items `begin..end` of a [`PackBDesc`]: `ptrs[LHS]` is the source, `ptrs[OUT]` the
/// packed matrix.
///
/// Panels are laid out for the descriptor's instruction set also on a CPU that lacks it, so that
/// weights can be packed for another machine. Returns `OK`, or `UNSUPPORTED_ISA` for an unknown
/// instruction set.
///
/// # Safety
/// The pointers cover the descriptor's operands; no other thread writes these panels.
pub unsafe extern "C" fn gm_pack_b_f32(
    desc: *const PackBDesc,
    ptrs: *const *mut u8,
    begin: usize,
    end: usize,
) -> u32 {
    // SAFETY: the descriptor is valid by contract.
    let desc = unsafe { &*desc };
    let Some(isa) = Isa::from_u32(desc.isa) else {
        return UNSUPPORTED_ISA;
    };
    let (n_panels, nr) = (desc.n_panels(), isa.nr());
    for item in begin..end.min(desc.n_items()) {
        let (batch, panel) = (item / n_panels, item % n_panels);
        let idx = batch_index(batch, desc.batch.map(|dim| dim.extent));
        let b_offset = batch_offset(idx, desc.batch.map(|dim| dim.b_stride));
        let packed_offset = batch_offset(idx, desc.batch.map(|dim| dim.packed_stride));
        let col = panel * nr;
        // SAFETY: the pointers cover this panel.
        unsafe {
            let b = pointer(ptrs, LHS).wrapping_offset(b_offset + col as isize * desc.col_stride);
            let packed = pointer(ptrs, OUT)
                .wrapping_offset(packed_offset)
                .wrapping_add(col * desc.k);
            pack_panel(isa, desc, b, (desc.n - col).min(nr), packed);
        }
    }
    OK
}

/// Packs a whole `[k, n]` matrix.
///
/// # Safety
/// `b` is readable where the strides say, `packed` writable for [`packed_len`] elements.
pub(crate) unsafe fn pack_matrix(
    isa: Isa,
    k: usize,
    n: usize,
    b: *const f32,
    row_stride: isize,
    col_stride: isize,
    packed: *mut f32,
) {
    let desc = PackBDesc::new(isa, k, n, row_stride, col_stride);
    for col in (0..n).step_by(isa.nr()) {
        let b = b.wrapping_offset(col as isize * col_stride);
        let (cols, packed) = ((n - col).min(isa.nr()), packed.wrapping_add(col * k));
        // SAFETY: one panel of the whole.
        unsafe { pack_panel(isa, &desc, b, cols, packed) };
    }
}

/// # Safety
/// `b` is readable for `k x cols` elements, `packed` writable for `k x nr`.
unsafe fn pack_panel(isa: Isa, desc: &PackBDesc, b: *const f32, cols: usize, packed: *mut f32) {
    let nr = isa.nr();
    // SAFETY: inside the ranges that the caller promised.
    unsafe {
        if desc.row_stride == 1 && desc.col_stride != 1 {
            let columns = Transpose {
                rows: cols,
                cols: desc.k,
                src: b,
                src_stride: desc.col_stride,
                dst: packed,
                dst_stride: nr as isize,
            };
            transpose(isa.or_portable(), columns);
        } else if desc.col_stride == 1 && cols == nr {
            let rows = CopyRows {
                nr,
                n_rows: desc.k,
                src: b,
                src_stride: desc.row_stride,
                dst: packed,
            };
            dispatch(isa.or_portable(), rows);
        } else {
            for i in 0..desc.k {
                let (src, dst) = (b.offset(i as isize * desc.row_stride), packed.add(i * nr));
                (0..cols).for_each(|j| *dst.add(j) = *src.offset(j as isize * desc.col_stride));
            }
        }
        if cols < nr {
            (0..desc.k)
                .for_each(|i| std::ptr::write_bytes(packed.add(i * nr + cols), 0, nr - cols));
        }
    }
}

/// Copies a panel of full columns, which are contiguous.
struct CopyRows {
    nr: usize,
    n_rows: usize,
    src: *const f32,
    src_stride: isize,
    dst: *mut f32,
}

impl Task for CopyRows {
    type Out = ();

    /// Safety: `src` is readable and `dst` writable for the rows; vectors of `S` divide a panel's.
    #[inline(always)]
    unsafe fn run<S: Simd>(self, s: S) {
        for i in 0..self.n_rows {
            // SAFETY: by contract.
            unsafe {
                let src = self.src.offset(i as isize * self.src_stride);
                let dst = self.dst.add(i * self.nr);
                for j in (0..self.nr).step_by(S::LANES) {
                    s.store(dst.add(j), s.load(src.add(j)));
                }
            }
        }
    }
}
