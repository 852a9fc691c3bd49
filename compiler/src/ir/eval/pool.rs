//! Pooling.

use super::reduce::beats;
use super::scalar::{Scalar, Wide};
use super::view::{count, transpose};
use crate::error::Result;
use crate::ir::axes::{channels_first, invert};
use crate::ir::{Extremum, Layout, PoolKind, Window};
use gristmill_runtime::{DType, Tensor, with_dtype};

/// Windows of extent `size` over planes of extent `input`.
struct Windows<'a> {
    input: &'a [usize],
    output: &'a [usize],
    size: &'a [usize],
    window: &'a Window,
}

impl Windows<'_> {
    /// Calls `f` with the offset within the plane of each tap of window `number` that lies inside it; gives the number
    /// of taps inside the padded plane.
    fn taps(&self, number: usize, mut f: impl FnMut(usize)) -> usize {
        let mut padded = 0;
        let mut index = vec![0; self.output.len()];
        let mut rest = number;
        for d in (0..index.len()).rev() {
            index[d] = rest % self.output[d];
            rest /= self.output[d];
        }
        for tap in 0..count(self.size) {
            let (mut rest, mut offset, mut scale) = (tap, 0, 1);
            let (mut inside, mut in_padded) = (true, true);
            for d in (0..index.len()).rev() {
                let at = index[d] * self.window.strides[d]
                    + (rest % self.size[d]) * self.window.dilations[d];
                rest /= self.size[d];
                let low = self.window.pads_low[d];
                in_padded &= at < (low + self.input[d]).saturating_add(self.window.pads_high[d]);
                inside &= (low..low + self.input[d]).contains(&at);
                if inside {
                    offset += (at - low) * scale;
                    scale *= self.input[d];
                }
            }
            padded += usize::from(in_padded);
            if inside {
                f(offset);
            }
        }
        padded
    }
}

/// [`Op::Pool`](crate::ir::Op::Pool) into `shape`.
///
/// A mean accumulates as a reduction does. `avg_include_pad` counts elements within the padded input, so not the part
/// of a last window that `ceil` lets stick out. A window with nothing to count gives NaN (0 for integers), and the
/// dtype's least element for a maximum.
pub fn pool(
    x: &Tensor,
    kind: PoolKind,
    size: &[usize],
    window: &Window,
    layout: Layout,
    shape: &[usize],
) -> Result<Tensor> {
    if layout == Layout::ChannelsLast {
        let to_first = channels_first(shape.len(), layout);
        let first: Vec<usize> = to_first.iter().map(|&p| shape[p]).collect();
        let y = pool(
            &transpose(x, &to_first)?,
            kind,
            size,
            window,
            Layout::ChannelsFirst,
            &first,
        )?;
        return transpose(&y, &invert(&to_first));
    }
    match kind {
        PoolKind::Max => Ok(max_pool(x, size, window, shape)?.swap_remove(0)),
        PoolKind::Avg | PoolKind::AvgIncludePad => {
            average(x, kind == PoolKind::AvgIncludePad, size, window, shape)
        }
    }
}

fn average(
    x: &Tensor,
    include_pad: bool,
    size: &[usize],
    window: &Window,
    shape: &[usize],
) -> Result<Tensor> {
    let windows = Windows {
        input: &x.shape()[2..],
        output: &shape[2..],
        size,
        window,
    };
    let (n_in, n_out) = (count(windows.input), count(windows.output));
    let mut out = Tensor::zeros(x.dtype(), shape)?;
    with_dtype!(x.dtype(), T => {
        let from = x.as_slice::<T>();
        for (i, o) in out.as_mut_slice::<T>().iter_mut().enumerate() {
            let (mut real, mut whole, mut n) = (0.0, 0i128, 0);
            let padded = windows.taps(i % n_out, |t| {
                n += 1;
                match from[i / n_out * n_in + t].to_wide() {
                    Wide::Float(v) => real += v,
                    Wide::Int(v) => whole += v,
                }
            });
            let n = if include_pad { padded } else { n };
            *o = T::from_wide(match x.dtype().is_float() {
                true => Wide::Float(real / n as f64),
                false => Wide::Int(whole.checked_div(n as i128).unwrap_or(0)),
            });
        }
    });
    Ok(out)
}

/// [`Op::MaxPoolIndices`](crate::ir::Op::MaxPoolIndices) into `shape`. Of equal maxima the first counts, NaN wins; the
/// position of a window that lies in the padding is -1.
pub fn max_pool(
    x: &Tensor,
    size: &[usize],
    window: &Window,
    shape: &[usize],
) -> Result<Vec<Tensor>> {
    let windows = Windows {
        input: &x.shape()[2..],
        output: &shape[2..],
        size,
        window,
    };
    let (n_in, n_out) = (count(windows.input), count(windows.output));
    let mut values = Tensor::zeros(x.dtype(), shape)?;
    let mut positions = Tensor::zeros(DType::I64, shape)?;
    with_dtype!(x.dtype(), T => {
        let (from, at) = (x.as_slice::<T>(), positions.as_mut_slice::<i64>());
        for (i, o) in values.as_mut_slice::<T>().iter_mut().enumerate() {
            let mut best: Option<usize> = None;
            windows.taps(i % n_out, |t| {
                let t = i / n_out * n_in + t;
                if best.is_none_or(|b| beats(from[t], from[b], Extremum::Max)) {
                    best = Some(t);
                }
            });
            *o = best.map_or(T::LEAST, |b| from[b]);
            at[i] = best.map_or(-1, |b| b as i64);
        }
    });
    Ok(vec![values, positions])
}

/// [`Op::MaxPoolGrad`](crate::ir::Op::MaxPoolGrad): sums in `f64`, rounded once.
pub fn max_pool_grad(
    x: &Tensor,
    g: &Tensor,
    size: &[usize],
    window: &Window,
    layout: Layout,
) -> Result<Tensor> {
    let perm = channels_first(x.shape().len(), layout);
    let (x, g) = (transpose(x, &perm)?, transpose(g, &perm)?);
    let positions = max_pool(&x, size, window, g.shape())?.swap_remove(1);
    let mut sums = vec![0.0; x.len()];
    for (g, &at) in g.to_f64s().iter().zip(positions.as_slice::<i64>()) {
        if let Ok(at) = usize::try_from(at) {
            sums[at] += g;
        }
    }
    let sums = Tensor::from_f64s(x.dtype(), x.shape(), &sums)?;
    transpose(&sums, &invert(&perm))
}
