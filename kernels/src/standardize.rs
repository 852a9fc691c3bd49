//! Standardisation of matrices by columns, in f32: `y = (x - mean) / sqrt(variance + eps)`.
//!
//! `x: [batch, n_rows, n_cols]` and `y` are contiguous. `group` neighbouring columns of a matrix have
//! one mean and one variance. [`gm_column_moments_f32`] computes the mean and the sum of squared
//! deviations of each column in each part of the rows, `[batch, n_parts, 2, n_cols]`;
//! [`gm_standardize_f32`] joins these (Chan, Golub and LeVeque, "Algorithms for computing the sample
//! variance", 1983, eq. 2.1) and applies them, so that `x` is read from memory twice.

use crate::descriptor::descriptor;
use crate::isa::Isa;
use crate::simd::{Simd, Task, dispatch};
use crate::{INVALID, LHS, OK, OUT, RHS, UNSUPPORTED_ISA, WORKSPACE, pointer};

/// Elements of a part, about: it is read twice.
const PART_ELEMENTS: usize = 8 * 1024;
/// Rows of a part.
const PART_ROWS: std::ops::RangeInclusive<usize> = 64..=256;
/// Blocks of rows of a matrix that the second kernel computes, each of which joins all parts.
const N_BLOCKS: usize = 8;

/// A standardisation, for both kernels.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StandardizeDesc {
    /// The [`Isa`] to use, as its number.
    pub isa: u32,
    /// Added to the variance.
    pub eps: f32,
    /// Matrices.
    pub batch: usize,
    /// Rows of a matrix.
    pub n_rows: usize,
    /// Columns of a matrix, a multiple of `group`.
    pub n_cols: usize,
    /// Columns that have one mean.
    pub group: usize,
    /// Rows of a part.
    pub part_rows: usize,
    /// Rows of an item of the second kernel.
    pub block_rows: usize,
}

descriptor!(StandardizeDesc {
    isa,
    eps,
    batch,
    n_rows,
    n_cols,
    group,
    part_rows,
    block_rows
});

impl StandardizeDesc {
    /// A standardisation of matrices of `shape`, `[batch, rows, columns]`, for an instruction set.
    pub fn new(isa: Isa, shape: [usize; 3], group: usize, eps: f32) -> StandardizeDesc {
        let [batch, n_rows, n_cols] = shape;
        let part_rows = PART_ELEMENTS / n_cols.max(1);
        StandardizeDesc {
            isa: isa as u32,
            eps,
            batch,
            n_rows,
            n_cols,
            group,
            part_rows: part_rows.clamp(*PART_ROWS.start(), *PART_ROWS.end()),
            block_rows: n_rows.div_ceil(N_BLOCKS).max(*PART_ROWS.start()),
        }
    }

    fn n_parts(&self) -> usize {
        self.n_rows.div_ceil(self.part_rows)
    }

    fn n_blocks(&self) -> usize {
        self.n_rows.div_ceil(self.block_rows)
    }

    /// Items of [`gm_column_moments_f32`].
    pub fn n_moment_items(&self) -> usize {
        self.batch * self.n_parts()
    }

    /// Items of [`gm_standardize_f32`].
    pub fn n_items(&self) -> usize {
        self.batch * self.n_blocks()
    }

    /// Bytes of the moments.
    pub fn moment_bytes(&self) -> usize {
        self.n_moment_items() * 2 * self.n_cols * size_of::<f32>()
    }

    /// Bytes that each concurrent call of [`gm_standardize_f32`] needs at `ptrs[WORKSPACE]`.
    pub fn workspace_bytes(&self) -> usize {
        2 * self.n_cols * size_of::<f32>()
    }

    fn is_valid(&self) -> bool {
        let is_split = self.part_rows > 0 && self.block_rows > 0;
        is_split && self.group > 0 && self.n_cols.is_multiple_of(self.group)
    }

    /// The matrix of an item that is one of `n` of its matrix, its first row, and its rows.
    fn rows(&self, item: usize, n: usize, size: usize) -> (usize, usize, usize) {
        let first = item % n * size;
        (item / n, first, size.min(self.n_rows - first))
    }
}

/// Computes items `begin..end` of the moments of a [`StandardizeDesc`]: `ptrs[LHS]` is `x`, `ptrs[OUT]`
/// are the moments.
///
/// Returns `OK`, `INVALID` or `UNSUPPORTED_ISA`.
///
/// # Safety
/// The pointers cover the descriptor's operands; no other thread writes these items' moments.
pub unsafe extern "C" fn gm_column_moments_f32(
    desc: *const StandardizeDesc,
    ptrs: *const *mut u8,
    begin: usize,
    end: usize,
) -> u32 {
    // SAFETY: the descriptor is valid by contract.
    let desc = unsafe { &*desc };
    let Some(isa) = Isa::usable(desc.isa) else {
        return UNSUPPORTED_ISA;
    };
    if !desc.is_valid() {
        return INVALID;
    }
    for item in begin..end.min(desc.n_moment_items()) {
        let (matrix, row, n_rows) = desc.rows(item, desc.n_parts(), desc.part_rows);
        // SAFETY: the pointers cover the descriptor's operands.
        unsafe {
            let x = pointer(ptrs, LHS).cast_const();
            let part = Part {
                x: x.wrapping_add((matrix * desc.n_rows + row) * desc.n_cols),
                moments: pointer(ptrs, OUT).wrapping_add(item * 2 * desc.n_cols),
                n_rows,
                n_cols: desc.n_cols,
            };
            dispatch(isa, part);
        }
    }
    OK
}

/// Computes items `begin..end` of a [`StandardizeDesc`]: `ptrs[LHS]` is `x`, `ptrs[RHS]` are its
/// moments, `ptrs[OUT]` is `y`, `ptrs[WORKSPACE]` this call's own workspace.
///
/// Returns `OK`, `INVALID` or `UNSUPPORTED_ISA`.
///
/// # Safety
/// The pointers cover the descriptor's operands; no other thread writes these items' part of `y`, or
/// uses the workspace.
pub unsafe extern "C" fn gm_standardize_f32(
    desc: *const StandardizeDesc,
    ptrs: *const *mut u8,
    begin: usize,
    end: usize,
) -> u32 {
    // SAFETY: the descriptor is valid by contract.
    let desc = unsafe { &*desc };
    let Some(isa) = Isa::usable(desc.isa) else {
        return UNSUPPORTED_ISA;
    };
    if !desc.is_valid() {
        return INVALID;
    }
    for item in begin..end.min(desc.n_items()) {
        let (matrix, row, n_rows) = desc.rows(item, desc.n_blocks(), desc.block_rows);
        let at = (matrix * desc.n_rows + row) * desc.n_cols;
        // SAFETY: the pointers cover the descriptor's operands.
        unsafe {
            let moments = pointer(ptrs, RHS).cast_const();
            let centre: *mut f32 = pointer(ptrs, WORKSPACE);
            let block = Block {
                desc,
                x: pointer(ptrs, LHS).cast_const().wrapping_add(at),
                moments: moments.wrapping_add(matrix * desc.n_parts() * 2 * desc.n_cols),
                y: pointer(ptrs, OUT).wrapping_add(at),
                centre,
                factor: centre.wrapping_add(desc.n_cols),
                n_rows,
            };
            dispatch(isa, block);
        }
    }
    OK
}

/// A part of the rows of a matrix.
struct Part {
    x: *const f32,
    moments: *mut f32,
    n_rows: usize,
    n_cols: usize,
}

impl Task for Part {
    type Out = ();

    /// Safety: `x` is readable for the part, `moments` writable for two rows.
    #[inline(always)]
    unsafe fn run<S: Simd>(self, s: S) {
        let mut col = 0;
        // SAFETY: columns of the part.
        unsafe {
            while col + 4 * S::LANES <= self.n_cols {
                self.columns::<S, 4>(s, col);
                col += 4 * S::LANES;
            }
            while col + 2 * S::LANES <= self.n_cols {
                self.columns::<S, 2>(s, col);
                col += 2 * S::LANES;
            }
            while col < self.n_cols {
                self.columns::<S, 1>(s, col);
                col += S::LANES;
            }
        }
    }
}

impl Part {
    /// Moments of `V` vectors of columns from `col` on; a single one may be partial.
    ///
    /// # Safety
    /// As for `run`.
    #[inline(always)]
    unsafe fn columns<S: Simd, const V: usize>(&self, s: S, col: usize) {
        let n = s.splat(self.n_rows as f32);
        // SAFETY: by contract.
        unsafe {
            let mut mean = self.sum::<S, V>(s, col, |_, x| x);
            for mean in mean.iter_mut() {
                *mean = s.div(*mean, n);
            }
            let squares = self.sum::<S, V>(s, col, |v, x| {
                let d = s.sub(x, mean[v]);
                s.mul(d, d)
            });
            for v in 0..V {
                let (at, rest) = (col + v * S::LANES, self.n_cols - col - v * S::LANES);
                s.store_n(self.moments.add(at), rest, mean[v]);
                s.store_n(self.moments.add(self.n_cols + at), rest, squares[v]);
            }
        }
    }

    /// Sums of `f` over the rows, of even and of odd ones apart, so that additions wait less.
    ///
    /// # Safety
    /// As for `run`.
    #[inline(always)]
    unsafe fn sum<S: Simd, const V: usize>(
        &self,
        s: S,
        col: usize,
        f: impl Fn(usize, S::F) -> S::F,
    ) -> [S::F; V] {
        let mut sums = [[s.zero(); V]; 2];
        for row in 0..self.n_rows {
            let x = self.x.wrapping_add(row * self.n_cols + col);
            for (v, sum) in sums[row % 2].iter_mut().enumerate() {
                let rest = self.n_cols - col - v * S::LANES;
                // SAFETY: elements of the row.
                let x = unsafe { s.load_n(x.add(v * S::LANES), rest) };
                *sum = s.add(*sum, f(v, x));
            }
        }
        let [mut even, odd] = sums;
        for (a, b) in even.iter_mut().zip(odd) {
            *a = s.add(*a, b);
        }
        even
    }
}

/// A block of the rows of a matrix.
struct Block<'a> {
    desc: &'a StandardizeDesc,
    x: *const f32,
    /// Of the whole matrix.
    moments: *const f32,
    y: *mut f32,
    centre: *mut f32,
    factor: *mut f32,
    n_rows: usize,
}

impl Task for Block<'_> {
    type Out = ();

    /// Safety: the pointers cover the block, and a row of centres and of factors.
    #[inline(always)]
    unsafe fn run<S: Simd>(self, s: S) {
        let n_cols = self.desc.n_cols;
        // SAFETY: by contract.
        unsafe {
            for col in (0..n_cols).step_by(S::LANES) {
                self.join(s, col);
            }
            for first in (0..n_cols).step_by(self.desc.group) {
                self.join_group(first);
            }
            for row in 0..self.n_rows {
                let (x, y) = (self.x.add(row * n_cols), self.y.add(row * n_cols));
                for col in (0..n_cols).step_by(S::LANES) {
                    let rest = n_cols - col;
                    let centred = s.sub(
                        s.load_n(x.add(col), rest),
                        s.load_n(self.centre.add(col), rest),
                    );
                    let y_at = s.mul(centred, s.load_n(self.factor.add(col), rest));
                    s.store_n(y.add(col), rest, y_at);
                }
            }
        }
    }
}

impl Block<'_> {
    /// Mean and sum of squared deviations of whole columns, from those of parts.
    ///
    /// # Safety
    /// As for `run`.
    #[inline(always)]
    unsafe fn join<S: Simd>(&self, s: S, col: usize) {
        let d = self.desc;
        let rest = d.n_cols - col;
        let rows_of = |part: usize| d.part_rows.min(d.n_rows - part * d.part_rows) as f32;
        let (mut mean, mut squares) = (s.zero(), s.zero());
        // SAFETY: two rows for each part.
        unsafe {
            for part in 0..d.n_parts() {
                let share = s.splat(rows_of(part) / d.n_rows as f32);
                let of_part = s.load_n(self.moments.add(2 * part * d.n_cols + col), rest);
                mean = s.fma(of_part, share, mean);
            }
            for part in 0..d.n_parts() {
                let at = self.moments.add(2 * part * d.n_cols + col);
                let apart = s.sub(s.load_n(at, rest), mean);
                let own = s.load_n(at.add(d.n_cols), rest);
                let between = s.mul(s.mul(apart, apart), s.splat(rows_of(part)));
                squares = s.add(squares, s.add(own, between));
            }
            s.store_n(self.centre.add(col), rest, mean);
            s.store_n(self.factor.add(col), rest, squares);
        }
    }

    /// Centre and factor of the columns of one group, from mean and sum of squared deviations of each.
    ///
    /// # Safety
    /// As for `run`.
    #[inline(always)]
    unsafe fn join_group(&self, first: usize) {
        let (n_rows, n) = (self.desc.n_rows as f32, self.desc.group);
        // SAFETY: the columns of a group.
        let (centre, factor) = unsafe {
            (
                std::slice::from_raw_parts_mut(self.centre.add(first), n),
                std::slice::from_raw_parts_mut(self.factor.add(first), n),
            )
        };
        let mean = centre.iter().sum::<f32>() / n as f32;
        let mut squares = 0.0;
        for (&own, &of_column) in factor.iter().zip(&*centre) {
            squares += own + n_rows * (of_column - mean) * (of_column - mean);
        }
        let variance = squares / (n_rows * n as f32);
        centre.fill(mean);
        factor.fill(1.0 / (variance + self.desc.eps).sqrt());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Rng, assert_close};

    /// All items of both kernels, the later half first.
    fn run(desc: &StandardizeDesc, x: &[f32]) -> Vec<f32> {
        let mut moments = vec![f32::NAN; desc.moment_bytes() / 4];
        let mut y = vec![f32::NAN; x.len()];
        let mut workspace = vec![f32::NAN; desc.workspace_bytes() / 4];
        let null = std::ptr::null_mut();
        let x = x.as_ptr() as *mut u8;
        let first = [x, null, moments.as_mut_ptr().cast(), null];
        let second = [
            x,
            moments.as_mut_ptr().cast(),
            y.as_mut_ptr().cast(),
            workspace.as_mut_ptr().cast(),
        ];
        let (n, m) = (desc.n_moment_items(), desc.n_items());
        for (begin, end) in [(n / 2, n), (0, n / 2)] {
            // SAFETY: the buffers have the sizes that the descriptor describes.
            let status = unsafe { gm_column_moments_f32(desc, first.as_ptr(), begin, end) };
            assert_eq!(status, OK);
        }
        for (begin, end) in [(m / 2, m), (0, m / 2)] {
            // SAFETY: the buffers have the sizes that the descriptor describes.
            let status = unsafe { gm_standardize_f32(desc, second.as_ptr(), begin, end) };
            assert_eq!(status, OK);
        }
        y
    }

    /// By the definition, in `f64`.
    fn reference(desc: &StandardizeDesc, x: &[f32]) -> Vec<f64> {
        let mut y = vec![0.0; x.len()];
        for matrix in 0..desc.batch {
            for first in (0..desc.n_cols).step_by(desc.group) {
                let rows = matrix * desc.n_rows..(matrix + 1) * desc.n_rows;
                let cells = rows.flat_map(|r| (first..first + desc.group).map(move |c| (r, c)));
                let at: Vec<usize> = cells.map(|(r, c)| r * desc.n_cols + c).collect();
                let n = at.len() as f64;
                let mean = at.iter().map(|&i| f64::from(x[i])).sum::<f64>() / n;
                let squares = at.iter().map(|&i| (f64::from(x[i]) - mean).powi(2));
                let deviation = (squares.sum::<f64>() / n + f64::from(desc.eps)).sqrt();
                at.iter()
                    .for_each(|&i| y[i] = (f64::from(x[i]) - mean) / deviation);
            }
        }
        y
    }

    #[test]
    fn columns_and_groups_agree_with_the_reference() {
        let mut rng = Rng(77);
        for isa in Isa::available() {
            for _ in 0..60 {
                let group = rng.pick(&[1, 1, 2, 3, 8]);
                let n_cols = group * rng.pick(&[1, 2, 5, 16, 33]);
                let shape = [
                    rng.pick(&[1, 3]),
                    rng.pick(&[1, 2, 63, 64, 65, 700]),
                    n_cols,
                ];
                let desc = StandardizeDesc::new(isa, shape, group, 1e-3);
                let x: Vec<f32> = rng
                    .vec(shape.iter().product())
                    .iter()
                    .map(|x| 3.0 + x)
                    .collect();
                let want = reference(&desc, &x);
                assert_close(&run(&desc, &x), &want, 1e-5, &format!("{isa} {desc:?}"));
            }
        }
    }

    /// Sums of squares would lose all digits here.
    #[test]
    fn a_mean_far_from_zero_costs_no_more_than_its_rounding() {
        let mut rng = Rng(78);
        for isa in Isa::available() {
            let desc = StandardizeDesc::new(isa, [1, 5000, 20], 1, 1e-5);
            let x: Vec<f32> = rng.vec(5000 * 20).iter().map(|x| 4096.0 + x).collect();
            let want = reference(&desc, &x);
            assert_close(&run(&desc, &x), &want, 2e-3, &format!("{isa}"));
        }
    }

    #[test]
    fn a_wrong_descriptor_is_refused() {
        let call = |desc: &StandardizeDesc| {
            let ptrs = [std::ptr::null_mut(); 4];
            // SAFETY: nothing is read before the descriptor is refused.
            unsafe {
                (
                    gm_column_moments_f32(desc, ptrs.as_ptr(), 0, 1),
                    gm_standardize_f32(desc, ptrs.as_ptr(), 0, 1),
                )
            }
        };
        let good = StandardizeDesc::new(Isa::Portable, [1, 2, 6], 3, 1e-5);
        for bad in [
            StandardizeDesc { group: 0, ..good },
            StandardizeDesc { group: 4, ..good },
            StandardizeDesc {
                part_rows: 0,
                ..good
            },
            StandardizeDesc {
                block_rows: 0,
                ..good
            },
        ] {
            assert_eq!(call(&bad), (INVALID, INVALID), "{bad:?}");
        }
        assert_eq!(
            call(&StandardizeDesc { isa: 99, ..good }),
            (UNSUPPORTED_ISA, UNSUPPORTED_ISA)
        );
    }
}
