//! Matrix products, convolutions and attention.
//!
//! Floating-point dtypes accumulate in `f64` and round once, at the end; integers accumulate in 64 bits, wrapping, which
//! gives the same as wrapping in their own width.

use super::reduce::{from_f64, softmax_line};
use super::scalar::{Scalar, Wide};
use super::view::{broadcast_strides, count, for_each_offset, transpose};
use crate::error::Result;
use crate::ir::{Layout, Window};
use gristmill_runtime::{DType, Tensor, with_dtype};

/// Accumulator of products.
trait Acc: Copy + Default {
    /// `self + a * b`.
    fn add_product(self, a: Self, b: Self) -> Self;
    fn load(t: &Tensor) -> Vec<Self>;
    fn store(values: &[Self], dtype: DType, shape: &[usize]) -> Result<Tensor>;
}

impl Acc for f64 {
    fn add_product(self, a: f64, b: f64) -> f64 {
        self + a * b
    }
    fn load(t: &Tensor) -> Vec<f64> {
        t.to_f64s()
    }
    fn store(values: &[f64], dtype: DType, shape: &[usize]) -> Result<Tensor> {
        from_f64(values, dtype, shape)
    }
}

impl Acc for i64 {
    fn add_product(self, a: i64, b: i64) -> i64 {
        self.wrapping_add(a.wrapping_mul(b))
    }
    fn load(t: &Tensor) -> Vec<i64> {
        let low_bits = |w: Wide| match w {
            Wide::Int(v) => v as i64,
            Wide::Float(v) => v as i64,
        };
        with_dtype!(t.dtype(), T => t.as_slice::<T>().iter().map(|v| low_bits(v.to_wide())).collect())
    }
    fn store(values: &[i64], dtype: DType, shape: &[usize]) -> Result<Tensor> {
        let mut out = Tensor::zeros(dtype, shape)?;
        with_dtype!(dtype, T => {
            out.as_mut_slice::<T>().iter_mut().zip(values).for_each(|(o, &v)| *o = T::from_wide(Wide::Int(v.into())));
        });
        Ok(out)
    }
}

/// Zeros for the accumulators of `shape`; the size is checked as that of a tensor.
fn accumulators<A: Acc>(shape: &[usize]) -> Result<Vec<A>> {
    let bytes = gristmill_runtime::tensor::checked_size_bytes(DType::F64, shape)?;
    Ok(vec![A::default(); bytes / DType::F64.size_bytes()])
}

/// `out += a b` for row-major `a: [m, k]`, `b: [k, n]`, `out: [m, n]`.
fn product<A: Acc>(a: &[A], b: &[A], out: &mut [A], (m, k, n): (usize, usize, usize)) {
    for i in 0..m {
        let row = &mut out[i * n..(i + 1) * n];
        for p in 0..k {
            let scale = a[i * k + p];
            row.iter_mut()
                .zip(&b[p * n..(p + 1) * n])
                .for_each(|(o, &v)| *o = o.add_product(scale, v));
        }
    }
}

/// [`Op::MatMul`](crate::ir::Op::MatMul) into `shape`.
pub fn matmul(a: &Tensor, b: &Tensor, shape: &[usize]) -> Result<Tensor> {
    if a.dtype().is_float() {
        matmul_in::<f64>(a, b, shape)
    } else {
        matmul_in::<i64>(a, b, shape)
    }
}

fn matmul_in<A: Acc>(a: &Tensor, b: &Tensor, shape: &[usize]) -> Result<Tensor> {
    let (lead_a, lead_b) = (
        &a.shape()[..a.shape().len() - 2],
        &b.shape()[..b.shape().len() - 2],
    );
    let (lead, matrix) = shape.split_at(shape.len() - 2);
    let (m, n, k) = (matrix[0], matrix[1], a.shape()[a.shape().len() - 1]);
    let mut out = accumulators::<A>(shape)?;
    let (x, y) = (A::load(a), A::load(b));
    let mut starts = Vec::new();
    for_each_offset(lead, &broadcast_strides(lead_a, lead), 0, |i| {
        starts.push((i as usize, 0))
    });
    let mut batch = starts.iter_mut();
    for_each_offset(lead, &broadcast_strides(lead_b, lead), 0, |i| {
        batch.next().expect("both walk the same batches").1 = i as usize;
    });
    for (i, &(ia, ib)) in starts.iter().enumerate() {
        let (x, y) = (&x[ia * m * k..][..m * k], &y[ib * k * n..][..k * n]);
        product(x, y, &mut out[i * m * n..(i + 1) * m * n], (m, k, n));
    }
    A::store(&out, a.dtype(), shape)
}

/// Positions `o` in `0..n_out` whose tap `o * stride + tap - pad` lies in `0..n_in`.
fn valid_range(
    n_out: usize,
    n_in: usize,
    stride: usize,
    tap: usize,
    pad: usize,
) -> std::ops::Range<usize> {
    let first = pad.saturating_sub(tap).div_ceil(stride);
    let end = (n_in + pad).saturating_sub(tap).div_ceil(stride).min(n_out);
    first.min(end)..end
}

/// Geometry of one convolution over one plane: `wide` is the side that windows slide over, `narrow` the side with one
/// element per window.
struct Plane<'a> {
    wide: &'a [usize],
    narrow: &'a [usize],
    kernel: &'a [usize],
    window: &'a Window,
}

impl Plane<'_> {
    /// Calls `f(tap, narrow offset, wide offset)` for every tap and window where the tap lies inside.
    fn for_each(&self, mut f: impl FnMut(usize, usize, usize)) {
        let taps = count(self.kernel);
        for tap in 0..taps {
            let (mut rest, rank) = (tap, self.kernel.len());
            let mut ranges = vec![0..0; rank];
            let mut shifts = vec![0isize; rank];
            for d in (0..rank).rev() {
                let at = (rest % self.kernel[d]) * self.window.dilations[d];
                rest /= self.kernel[d];
                let (stride, pad) = (self.window.strides[d], self.window.pads_low[d]);
                ranges[d] = valid_range(self.narrow[d], self.wide[d], stride, at, pad);
                shifts[d] = at as isize - pad as isize;
            }
            self.rows(&ranges, &shifts, 0, (0, 0), &mut |n, w| f(tap, n, w));
        }
    }

    fn rows(
        &self,
        ranges: &[std::ops::Range<usize>],
        shifts: &[isize],
        axis: usize,
        (narrow, wide): (usize, usize),
        f: &mut impl FnMut(usize, usize),
    ) {
        let (narrow, wide) = (narrow * self.narrow[axis], wide * self.wide[axis]);
        let is_last = axis + 1 == ranges.len();
        for o in ranges[axis].clone() {
            let at = (o * self.window.strides[axis]) as isize + shifts[axis];
            let next = (narrow + o, wide + at as usize);
            if is_last {
                f(next.0, next.1)
            } else {
                self.rows(ranges, shifts, axis + 1, next, f)
            }
        }
    }
}

/// Permutations that bring `channels_last` activations and weights to channels first.
fn to_channels_first(rank: usize) -> (Vec<usize>, Vec<usize>) {
    let spatial = 1..rank - 1;
    let x = [0, rank - 1].into_iter().chain(spatial).collect();
    let w = [rank - 1, rank - 2]
        .into_iter()
        .chain(0..rank - 2)
        .collect();
    (x, w)
}

/// [`Op::Conv`](crate::ir::Op::Conv) into `shape`.
pub fn conv(
    x: &Tensor,
    w: &Tensor,
    window: &Window,
    groups: usize,
    layout: Layout,
    shape: &[usize],
) -> Result<Tensor> {
    if layout == Layout::ChannelsLast {
        let rank = shape.len();
        let (to_x, to_w) = to_channels_first(rank);
        let first: Vec<usize> = to_x.iter().map(|&p| shape[p]).collect();
        let y = conv(
            &transpose(x, &to_x)?,
            &transpose(w, &to_w)?,
            window,
            groups,
            Layout::ChannelsFirst,
            &first,
        )?;
        let back: Vec<usize> = [0].into_iter().chain(2..rank).chain([1]).collect();
        return transpose(&y, &back);
    }
    if x.dtype().is_float() {
        conv_in::<f64>(x, w, window, groups, shape)
    } else {
        conv_in::<i64>(x, w, window, groups, shape)
    }
}

fn conv_in<A: Acc>(
    x: &Tensor,
    w: &Tensor,
    window: &Window,
    groups: usize,
    shape: &[usize],
) -> Result<Tensor> {
    let plane = Plane {
        wide: &x.shape()[2..],
        narrow: &shape[2..],
        kernel: &w.shape()[2..],
        window,
    };
    let (n_wide, n_narrow, taps) = (count(plane.wide), count(plane.narrow), count(plane.kernel));
    let (c_in, c_out) = (x.shape()[1], shape[1]);
    let (in_group, out_group) = (c_in / groups, c_out / groups);
    let mut out = accumulators::<A>(shape)?;
    let (x, weights) = (A::load(x), A::load(w));
    for image in 0..shape[0] {
        for o in 0..c_out {
            let to = &mut out[(image * c_out + o) * n_narrow..][..n_narrow];
            for i in 0..in_group {
                let channel = o / out_group * in_group + i;
                let from = &x[(image * c_in + channel) * n_wide..][..n_wide];
                let kernel = &weights[(o * in_group + i) * taps..][..taps];
                plane
                    .for_each(|tap, at, wide| to[at] = to[at].add_product(from[wide], kernel[tap]));
            }
        }
    }
    A::store(&out, w.dtype(), shape)
}

/// [`Op::ConvTranspose`](crate::ir::Op::ConvTranspose) into `shape`: every element of `x` adds its window of weights.
pub fn conv_transpose(
    x: &Tensor,
    w: &Tensor,
    window: &Window,
    groups: usize,
    shape: &[usize],
) -> Result<Tensor> {
    if x.dtype().is_float() {
        conv_transpose_in::<f64>(x, w, window, groups, shape)
    } else {
        conv_transpose_in::<i64>(x, w, window, groups, shape)
    }
}

fn conv_transpose_in<A: Acc>(
    x: &Tensor,
    w: &Tensor,
    window: &Window,
    groups: usize,
    shape: &[usize],
) -> Result<Tensor> {
    let plane = Plane {
        wide: &shape[2..],
        narrow: &x.shape()[2..],
        kernel: &w.shape()[2..],
        window,
    };
    let (n_wide, n_narrow, taps) = (count(plane.wide), count(plane.narrow), count(plane.kernel));
    let (c_in, c_out) = (x.shape()[1], shape[1]);
    let (in_group, out_group) = (c_in / groups, c_out / groups);
    let mut out = accumulators::<A>(shape)?;
    let (from, weights) = (A::load(x), A::load(w));
    for image in 0..shape[0] {
        for i in 0..c_in {
            let x = &from[(image * c_in + i) * n_narrow..][..n_narrow];
            for o in 0..out_group {
                let channel = i / in_group * out_group + o;
                let to = &mut out[(image * c_out + channel) * n_wide..][..n_wide];
                let kernel = &weights[(i * out_group + o) * taps..][..taps];
                plane.for_each(|tap, at, wide| to[wide] = to[wide].add_product(x[at], kernel[tap]));
            }
        }
    }
    A::store(&out, w.dtype(), shape)
}

/// [`Op::Attention`](crate::ir::Op::Attention) into `shape`, all in `f64`. `causal` lets query `i` see keys `0..=i`. A
/// query that sees no key, every score being minus infinity, gives NaN, as the composed ops do.
pub fn attention(
    [q, k, v]: [&Tensor; 3],
    mask: Option<&Tensor>,
    scale: f64,
    causal: bool,
    shape: &[usize],
) -> Result<Tensor> {
    let rank = shape.len();
    let (n_q, n_k, d, d_v) = (
        shape[rank - 2],
        k.shape()[rank - 2],
        q.shape()[rank - 1],
        shape[rank - 1],
    );
    let batches = count(&shape[..rank - 2]);
    let mut scores_shape = shape.to_vec();
    scores_shape[rank - 1] = n_k;
    let mask = match mask {
        Some(m) => Some(super::view::broadcast(m, &scores_shape)?.to_f64s()),
        None => None,
    };
    let mut out = accumulators::<f64>(shape)?;
    let (q, k, values) = (q.to_f64s(), k.to_f64s(), v.to_f64s());
    for row in 0..batches * n_q {
        let (batch, i) = (row / n_q, row % n_q);
        let query = &q[row * d..][..d];
        let mut scores: Vec<f64> = (0..n_k)
            .map(|j| {
                let key = &k[(batch * n_k + j) * d..][..d];
                let dot: f64 = query.iter().zip(key).map(|(a, b)| a * b).sum();
                let score = dot * scale + mask.as_ref().map_or(0.0, |m| m[row * n_k + j]);
                if causal && j > i {
                    f64::NEG_INFINITY
                } else {
                    score
                }
            })
            .collect();
        softmax_line(&mut scores, false);
        product(
            &scores,
            &values[batch * n_k * d_v..][..n_k * d_v],
            &mut out[row * d_v..][..d_v],
            (1, n_k, d_v),
        );
    }
    from_f64(&out, v.dtype(), shape)
}
