//! Strided copies: transposes, permutations, slices, broadcasts and concatenations of any element
//! size.
//!
//! Dimensions of extent 1 are dropped and dimensions that are contiguous in both tensors are joined
//! first. The rest is walked in the output's order, with rows copied whole where both tensors are
//! contiguous, and as tiles of a transposition where they are contiguous along different
//! dimensions. Items are blocks of the walk.

use crate::descriptor::descriptor;
use crate::isa::Isa;
use crate::simd::{Simd, Task, dispatch};
use crate::transpose::{Transpose, transpose};
use crate::{INVALID, LHS, OK, OUT, UNSUPPORTED_ISA};

/// Dimensions of a copy, at most.
pub const MAX_RANK: usize = 8;

/// Bytes of an item's output, about.
const ITEM_BYTES: usize = 64 * 1024;

/// A strided copy: `dst[i . dst_stride] = src[i . src_stride]` for all indices below `extent`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CopyDesc {
    /// The [`Isa`] to use, as its number.
    pub isa: u32,
    /// Bytes of an element: 1, 2, 4 or 8.
    pub element_bytes: u32,
    /// Used entries of the arrays below.
    pub rank: usize,
    /// Elements along each dimension.
    pub extent: [usize; MAX_RANK],
    /// Source elements between neighbours; 0 broadcasts, negative reverses.
    pub src_stride: [isize; MAX_RANK],
    /// Output elements between neighbours.
    pub dst_stride: [isize; MAX_RANK],
}

descriptor!(CopyDesc {
    isa,
    element_bytes,
    rank,
    extent,
    src_stride,
    dst_stride
});

impl CopyDesc {
    /// A copy for an instruction set; `dims` are (extent, source stride, output stride).
    ///
    /// None if there are more than [`MAX_RANK`].
    pub fn new(isa: Isa, element_bytes: u32, dims: &[(usize, isize, isize)]) -> Option<CopyDesc> {
        let zero = [0; MAX_RANK];
        let mut desc = CopyDesc {
            isa: isa as u32,
            element_bytes,
            rank: dims.len(),
            extent: [1; MAX_RANK],
            src_stride: zero,
            dst_stride: zero,
        };
        for (i, &(extent, src_stride, dst_stride)) in dims.iter().enumerate() {
            *desc.extent.get_mut(i)? = extent;
            (desc.src_stride[i], desc.dst_stride[i]) = (src_stride, dst_stride);
        }
        Some(desc)
    }

    /// The copy of a contiguous tensor to a contiguous one whose axis `i` is the source's axis
    /// `perm[i]`.
    ///
    /// None if there are more than [`MAX_RANK`] axes, or `perm` is no permutation of them.
    pub fn permute(element_bytes: u32, shape: &[usize], perm: &[usize]) -> Option<CopyDesc> {
        let mut seen = [false; MAX_RANK];
        for &axis in perm {
            let entry = seen
                .get_mut(axis)
                .filter(|seen| axis < shape.len() && !**seen)?;
            *entry = true;
        }
        let permuted: Vec<usize> = perm.iter().map(|&axis| shape[axis]).collect();
        let dims: Vec<_> = perm
            .iter()
            .enumerate()
            .map(|(i, &axis)| (shape[axis], stride_of(shape, axis), stride_of(&permuted, i)))
            .collect();
        if perm.len() == shape.len() {
            CopyDesc::new(Isa::current(), element_bytes, &dims)
        } else {
            None
        }
    }

    /// Items of the whole copy.
    pub fn n_items(&self) -> usize {
        Walk::new(self).n_items()
    }
}

/// Elements between neighbours along an axis of a contiguous tensor.
fn stride_of(shape: &[usize], axis: usize) -> isize {
    shape[axis + 1..].iter().product::<usize>() as isize
}

#[derive(Clone, Copy, PartialEq)]
struct Dim {
    extent: usize,
    src: isize,
    dst: isize,
}

const UNIT: Dim = Dim {
    extent: 1,
    src: 0,
    dst: 0,
};

/// A copy in its simplest form: outer dimensions, then rows, then columns.
struct Walk {
    outer: [Dim; MAX_RANK],
    rows: Dim,
    /// Contiguous in the output, if any dimension is.
    cols: Dim,
    /// Rows of one item.
    row_block: usize,
    /// Columns of one item.
    col_block: usize,
}

impl Walk {
    fn new(desc: &CopyDesc) -> Walk {
        let (mut dims, n) = simplify(desc);
        let cols = if n > 0 { dims[n - 1] } else { UNIT };
        let n = n.saturating_sub(1);
        // Rows are the dimension contiguous in the source, if another than the columns is; else the
        // next.
        let is_rows = |dim: &Dim| cols.src != 1 && dim.src == 1;
        let mut rows = UNIT;
        if n > 0 {
            let idx = dims[..n].iter().position(is_rows).unwrap_or(n - 1);
            rows = std::mem::replace(&mut dims[idx], UNIT);
        }
        // Whole rows if they are copied whole, else squares that keep the lines of both tensors in
        // the first-level cache.
        let item_elements = ITEM_BYTES / desc.element_bytes.max(1) as usize;
        let (longest, unit) = if cols.src == 1 && cols.dst == 1 {
            (item_elements, 1)
        } else {
            (1024, 16)
        };
        let col_block = cols.extent.clamp(1, longest);
        let row_block = (item_elements / col_block)
            .max(1)
            .next_multiple_of(unit)
            .min(rows.extent.max(1));
        let mut outer = [UNIT; MAX_RANK];
        outer[MAX_RANK - n..].copy_from_slice(&dims[..n]);
        Walk {
            outer,
            rows,
            cols,
            row_block,
            col_block,
        }
    }

    fn row_blocks(&self) -> usize {
        self.rows.extent.div_ceil(self.row_block)
    }

    fn col_blocks(&self) -> usize {
        self.cols.extent.div_ceil(self.col_block)
    }

    fn n_items(&self) -> usize {
        self.outer.iter().map(|dim| dim.extent).product::<usize>()
            * self.row_blocks()
            * self.col_blocks()
    }

    /// An item's offset in the source and the output, its rows and its columns.
    fn item(&self, item: usize) -> (isize, isize, usize, usize) {
        let col = item % self.col_blocks() * self.col_block;
        let rest = item / self.col_blocks();
        let row = rest % self.row_blocks() * self.row_block;
        let mut rest = rest / self.row_blocks();
        let mut src = row as isize * self.rows.src + col as isize * self.cols.src;
        let mut dst = row as isize * self.rows.dst + col as isize * self.cols.dst;
        for dim in self.outer.iter().rev() {
            if dim.extent > 1 {
                let i = (rest % dim.extent) as isize;
                rest /= dim.extent;
                (src, dst) = (src + i * dim.src, dst + i * dim.dst);
            }
        }
        (
            src,
            dst,
            self.row_block.min(self.rows.extent - row),
            self.col_block.min(self.cols.extent - col),
        )
    }
}

/// Dimensions of more than one element in the output's order, outermost first, joined where both
/// tensors are contiguous; and their number.
fn simplify(desc: &CopyDesc) -> ([Dim; MAX_RANK], usize) {
    let mut dims = [UNIT; MAX_RANK];
    let mut n = 0;
    for i in 0..desc.rank.min(MAX_RANK) {
        let dim = Dim {
            extent: desc.extent[i],
            src: desc.src_stride[i],
            dst: desc.dst_stride[i],
        };
        if dim.extent != 1 {
            dims[n] = dim;
            n += 1;
        }
    }
    // Stable, by hand: there are at most eight, and the standard sort may allocate.
    for i in 1..n {
        let mut j = i;
        while j > 0 && dims[j - 1].dst.unsigned_abs() < dims[j].dst.unsigned_abs() {
            dims.swap(j - 1, j);
            j -= 1;
        }
    }
    // Joins each dimension with the one outside of it, if both tensors are contiguous over the two.
    let mut last = 0;
    for i in 1..n {
        let (outer, inner) = (dims[last], dims[i]);
        let size = inner.extent as isize;
        if outer.src == inner.src * size && outer.dst == inner.dst * size {
            dims[last] = Dim {
                extent: outer.extent * inner.extent,
                ..inner
            };
        } else {
            last += 1;
            dims[last] = inner;
        }
    }
    (dims, if n == 0 { 0 } else { last + 1 })
}

/// Computes items `begin..end` of a [`CopyDesc`]: `ptrs[LHS]` is the source, `ptrs[OUT]` the
/// output.
///
/// Returns `OK`, `INVALID` or `UNSUPPORTED_ISA`.
///
/// # Safety
/// The pointers cover the descriptor's operands and do not overlap; no other thread writes these
/// items' output.
pub unsafe extern "C" fn gm_copy(
    desc: *const CopyDesc,
    ptrs: *const *mut u8,
    begin: usize,
    end: usize,
) -> u32 {
    // SAFETY: the descriptor is valid by contract.
    let desc = unsafe { &*desc };
    let Some(isa) = Isa::usable(desc.isa) else {
        return UNSUPPORTED_ISA;
    };
    // SAFETY: the pointers cover the descriptor's operands.
    unsafe {
        let (src, dst) = ((*ptrs.add(LHS)).cast_const(), *ptrs.add(OUT));
        match desc.element_bytes {
            1 => run::<u8>(isa, desc, src.cast(), dst.cast(), begin, end),
            2 => run::<u16>(isa, desc, src.cast(), dst.cast(), begin, end),
            4 => run::<u32>(isa, desc, src.cast(), dst.cast(), begin, end),
            8 => run::<u64>(isa, desc, src.cast(), dst.cast(), begin, end),
            _ => return INVALID,
        }
    }
    OK
}

/// # Safety
/// As for [`gm_copy`]; `T` has the descriptor's element size.
unsafe fn run<T: Copy>(
    isa: Isa,
    desc: &CopyDesc,
    src: *const T,
    dst: *mut T,
    begin: usize,
    end: usize,
) {
    let walk = Walk::new(desc);
    for item in begin..end.min(walk.n_items()) {
        let (src_offset, dst_offset, n_rows, n_cols) = walk.item(item);
        // SAFETY: the offsets are those of indices below the extents.
        unsafe {
            rectangle(
                isa,
                &walk,
                n_rows,
                n_cols,
                src.offset(src_offset),
                dst.offset(dst_offset),
            )
        };
    }
}

/// # Safety
/// `src` is readable and `dst` writable for `n_rows` rows and `n_cols` columns of the walk.
unsafe fn rectangle<T: Copy>(
    isa: Isa,
    walk: &Walk,
    n_rows: usize,
    n_cols: usize,
    src: *const T,
    dst: *mut T,
) {
    let (rows, cols) = (walk.rows, walk.cols);
    // SAFETY: indices stay below the extents.
    unsafe {
        if cols.src == 1 && cols.dst == 1 && size_of::<T>() == 4 && n_cols <= SHORT_RUN {
            let (src, dst) = (src.cast(), dst.cast());
            dispatch(
                isa,
                Runs {
                    n_rows,
                    n_cols,
                    src,
                    src_stride: rows.src,
                    dst,
                    dst_stride: rows.dst,
                },
            );
        } else if cols.src == 1 && cols.dst == 1 {
            for i in 0..n_rows as isize {
                std::ptr::copy_nonoverlapping(
                    src.offset(i * rows.src),
                    dst.offset(i * rows.dst),
                    n_cols,
                );
            }
        } else if size_of::<T>() == 4 && rows.src == 1 && cols.dst == 1 {
            // The output's columns are the transposition's rows.
            let t = Transpose {
                rows: n_cols,
                cols: n_rows,
                src: src.cast(),
                src_stride: cols.src,
                dst: dst.cast(),
                dst_stride: rows.dst,
            };
            transpose(isa, t);
        } else {
            one_by_one(walk, n_rows, n_cols, src, dst);
        }
    }
}

/// Elements without vectors.
///
/// # Safety
/// As for [`rectangle`].
unsafe fn one_by_one<T: Copy>(
    walk: &Walk,
    n_rows: usize,
    n_cols: usize,
    src: *const T,
    dst: *mut T,
) {
    let (rows, cols) = (walk.rows, walk.cols);
    let interleaves = size_of::<T>() == 1 && rows.src == 1 && cols.dst == 1;
    // SAFETY: by contract.
    unsafe {
        match (cols.src, cols.dst) {
            _ if interleaves && n_cols == 3 => interleave::<T, 3>(walk, n_rows, src, dst),
            _ if interleaves && n_cols == 4 => interleave::<T, 4>(walk, n_rows, src, dst),
            (1, 2) => by_row::<T, 1, 2>(walk, n_rows, n_cols, src, dst),
            (2, 1) => by_row::<T, 2, 1>(walk, n_rows, n_cols, src, dst),
            _ => by_element(walk, n_rows, n_cols, src, dst),
        }
    }
}

/// Elements of 4 bytes in a run for which a call of `memcpy` takes longer than the copy.
const SHORT_RUN: usize = 256;

/// Short runs of elements of 4 bytes.
struct Runs {
    n_rows: usize,
    n_cols: usize,
    src: *const f32,
    src_stride: isize,
    dst: *mut f32,
    dst_stride: isize,
}

impl Task for Runs {
    type Out = ();

    /// Safety: `src` is readable and `dst` writable for all runs.
    #[inline(always)]
    unsafe fn run<S: Simd>(self, s: S) {
        for i in 0..self.n_rows as isize {
            let src = self.src.wrapping_offset(i * self.src_stride);
            let dst = self.dst.wrapping_offset(i * self.dst_stride);
            // SAFETY: a run.
            unsafe { copy_run(s, self.n_cols, src, dst) };
        }
    }
}

/// Copies whole vectors, the last of which may overlap the one before.
///
/// # Safety
/// `src` is readable and `dst` writable for `n` elements.
#[inline(always)]
unsafe fn copy_run<S: Simd>(s: S, n: usize, src: *const f32, dst: *mut f32) {
    // SAFETY: by contract.
    unsafe {
        if n < S::LANES {
            return s.store_n(dst, n, s.load_n(src, n));
        }
        let last = n - S::LANES;
        for at in (0..last).step_by(S::LANES) {
            s.store(dst.add(at), s.load(src.add(at)));
        }
        s.store(dst.add(last), s.load(src.add(last)));
    }
}

/// Rows of elements that lie next to each other, or next but one.
///
/// # Safety
/// As for [`rectangle`]; `SRC` and `DST` are the strides of the columns.
unsafe fn by_row<T: Copy, const SRC: usize, const DST: usize>(
    walk: &Walk,
    n_rows: usize,
    n_cols: usize,
    src: *const T,
    dst: *mut T,
) {
    for i in 0..n_rows as isize {
        let (src, dst) = (
            src.wrapping_offset(i * walk.rows.src),
            dst.wrapping_offset(i * walk.rows.dst),
        );
        for j in 0..n_cols {
            // SAFETY: indices stay below the extents.
            unsafe { *dst.add(j * DST) = *src.add(j * SRC) };
        }
    }
}

/// Elements of `N` rows of the source, one after the other.
///
/// # Safety
/// As for [`rectangle`], whose columns are `N`; rows are contiguous in the source and columns in the output.
unsafe fn interleave<T: Copy, const N: usize>(
    walk: &Walk,
    n_rows: usize,
    src: *const T,
    dst: *mut T,
) {
    let planes: [*const T; N] =
        std::array::from_fn(|j| src.wrapping_offset(j as isize * walk.cols.src));
    for i in 0..n_rows {
        let dst = dst.wrapping_offset(i as isize * walk.rows.dst);
        for (j, plane) in planes.iter().enumerate() {
            // SAFETY: indices stay below the extents.
            unsafe { *dst.add(j) = *plane.add(i) };
        }
    }
}

/// Squares of 16, so that whichever tensor is walked across stays in the first-level cache.
///
/// # Safety
/// As for [`rectangle`].
unsafe fn by_element<T: Copy>(
    walk: &Walk,
    n_rows: usize,
    n_cols: usize,
    src: *const T,
    dst: *mut T,
) {
    let (rows, cols) = (walk.rows, walk.cols);
    for i0 in (0..n_rows).step_by(16) {
        for j0 in (0..n_cols).step_by(16) {
            for i in i0..n_rows.min(i0 + 16) {
                for j in j0..n_cols.min(j0 + 16) {
                    let (i, j) = (i as isize, j as isize);
                    // SAFETY: indices stay below the extents.
                    unsafe {
                        *dst.offset(i * rows.dst + j * cols.dst) =
                            *src.offset(i * rows.src + j * cols.src)
                    };
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Rng;

    /// Copies bytes of `T` by the descriptor's own words.
    fn reference(desc: &CopyDesc, src: &[u64], dst: &mut [u64], src_base: isize) {
        let total: usize = desc.extent[..desc.rank].iter().product();
        for mut flat in 0..total {
            let (mut s, mut d) = (src_base, 0);
            for i in (0..desc.rank).rev() {
                let idx = (flat % desc.extent[i]) as isize;
                flat /= desc.extent[i];
                (s, d) = (s + idx * desc.src_stride[i], d + idx * desc.dst_stride[i]);
            }
            dst[d as usize] = src[s as usize];
        }
    }

    fn check<T: Copy + TryFrom<u64> + Into<u64>>(
        desc: &CopyDesc,
        len: usize,
        dst_len: usize,
        base: isize,
    ) where
        <T as TryFrom<u64>>::Error: std::fmt::Debug,
    {
        let values: Vec<u64> = (0..len as u64).map(|i| i * 7 % 251).collect();
        let mut want = vec![255; dst_len];
        reference(desc, &values, &mut want, base);
        let src: Vec<T> = values
            .iter()
            .map(|&x| T::try_from(x).expect("below 256"))
            .collect();
        let mut dst: Vec<T> = vec![T::try_from(255).expect("below 256"); dst_len];
        // SAFETY: the base is inside the source.
        let start = unsafe { src.as_ptr().offset(base) };
        let ptrs = [
            start as *mut u8,
            std::ptr::null_mut(),
            dst.as_mut_ptr().cast(),
        ];
        let n = desc.n_items();
        for (begin, end) in [(n / 2, n), (0, n / 2)] {
            // SAFETY: the buffers cover the descriptor's operands.
            assert_eq!(unsafe { gm_copy(desc, ptrs.as_ptr(), begin, end) }, OK);
        }
        let got: Vec<u64> = dst.into_iter().map(Into::into).collect();
        assert_eq!(got, want, "{desc:?}");
    }

    fn check_all_sizes(desc: CopyDesc, src_len: usize, dst_len: usize, base: isize) {
        check::<u8>(
            &CopyDesc {
                element_bytes: 1,
                ..desc
            },
            src_len,
            dst_len,
            base,
        );
        check::<u16>(
            &CopyDesc {
                element_bytes: 2,
                ..desc
            },
            src_len,
            dst_len,
            base,
        );
        check::<u32>(
            &CopyDesc {
                element_bytes: 4,
                ..desc
            },
            src_len,
            dst_len,
            base,
        );
        check::<u64>(
            &CopyDesc {
                element_bytes: 8,
                ..desc
            },
            src_len,
            dst_len,
            base,
        );
    }

    #[test]
    fn permutations_move_every_element() {
        let mut rng = Rng(61);
        for isa in Isa::available() {
            for _ in 0..200 {
                let rank = rng.below(6);
                let shape: Vec<usize> = (0..rank)
                    .map(|_| rng.pick(&[0, 1, 2, 3, 4, 5, 8, 17, 33]))
                    .collect();
                let len: usize = shape.iter().product();
                if len > 40_000 {
                    continue;
                }
                let mut perm: Vec<usize> = (0..rank).collect();
                (1..rank).for_each(|i| perm.swap(i, rng.below(i + 1)));
                let desc = CopyDesc::permute(4, &shape, &perm).expect("a permutation");
                check_all_sizes(
                    CopyDesc {
                        isa: isa as u32,
                        ..desc
                    },
                    len,
                    len,
                    0,
                );
            }
        }
    }

    #[test]
    fn layouts_change_both_ways() {
        for isa in Isa::available() {
            for (c, pixels) in [(3, 224 * 3), (64, 56 * 56), (17, 49)] {
                for perm in [[0, 2, 1], [0, 1, 2]] {
                    let desc = CopyDesc::permute(4, &[2, c, pixels], &perm).expect("a permutation");
                    check::<u32>(
                        &CopyDesc {
                            isa: isa as u32,
                            ..desc
                        },
                        2 * c * pixels,
                        2 * c * pixels,
                        0,
                    );
                }
            }
        }
    }

    #[test]
    fn slices_broadcasts_and_reversals_are_copied() {
        // A slice of columns into a wider output, a broadcast along rows, and reversed columns.
        let desc = |dims: &[(usize, isize, isize)]| {
            CopyDesc::new(Isa::current(), 4, dims).expect("few dimensions")
        };
        check_all_sizes(desc(&[(5, 20, 9), (7, 1, 1)]), 100, 45, 3);
        check_all_sizes(desc(&[(6, 0, 10), (10, 1, 1)]), 10, 60, 0);
        check_all_sizes(desc(&[(4, 10, 10), (10, -1, 1)]), 40, 40, 9);
        check_all_sizes(desc(&[(4, 10, 20), (10, 1, 2)]), 40, 80, 0);
        check_all_sizes(desc(&[]), 1, 1, 0);
    }

    #[test]
    fn runs_and_strides_of_two_are_copied() {
        for isa in Isa::available() {
            for n in [1, 2, 7, 15, 16, 17, 29, 64, 255, 256, 257] {
                for (src, dst) in [(1, 1), (1, 2), (2, 1), (2, 2)] {
                    let wide = |stride: isize| n as isize * stride + 3;
                    let dims = [(5, wide(src), wide(dst)), (n, src, dst)];
                    let desc = CopyDesc::new(isa, 4, &dims).expect("two dimensions");
                    let len = |stride| 5 * wide(stride) as usize;
                    check::<u32>(&desc, len(src), len(dst), 0);
                    let desc = CopyDesc::new(isa, 1, &dims).expect("two dimensions");
                    check::<u8>(&desc, len(src), len(dst), 0);
                }
            }
        }
    }

    #[test]
    fn no_permutation_is_refused() {
        assert_eq!(CopyDesc::permute(4, &[2, 3], &[0, 0]), None);
        assert_eq!(CopyDesc::permute(4, &[2, 3], &[0, 2]), None);
        assert_eq!(CopyDesc::permute(4, &[2, 3], &[0]), None);
    }
}
