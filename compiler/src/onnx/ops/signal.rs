//! Fourier transforms as products with constant matrices, and filter banks.

use super::super::import::{Ctx, FOLD_LIMIT_BYTES, OpDef, Outs, axis_of, moved_axis, one};
use super::super::tensor::dtype_of;
use crate::error::{Error, Result};
use crate::ir::{Dim, Op, PadMode, Shape, ValueId};
use gristmill_runtime::DType;
use std::f64::consts::PI;

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("DFT", (1, 3), dft),
    OpDef::new("STFT", (2, 4), stft),
    OpDef::new("MelWeightMatrix", (5, 5), mel_weights),
];

/// A transform of length `n`.
struct Transform {
    n: usize,
    inverse: bool,
    onesided: bool,
}

impl Transform {
    /// Extents along the axis before and after.
    fn extents(&self) -> (usize, usize) {
        let half = self.n / 2 + 1;
        match (self.onesided, self.inverse) {
            (false, _) => (self.n, self.n),
            (true, false) => (self.n, half),
            (true, true) => (half, self.n),
        }
    }

    /// Cosine and sine parts of the factors, `[before, after]`: the kernel of the transform with
    /// its scale, and, where a onesided spectrum stands for both sides, the weights of its bins.
    fn matrices(&self, cx: &mut Ctx, dtype: DType) -> Result<[ValueId; 2]> {
        let (before, after) = self.extents();
        if before.saturating_mul(after).saturating_mul(8) > FOLD_LIMIT_BYTES * 16 {
            let message = format!("a Fourier transform of length {}", self.n);
            return Err(Error::unsupported(message));
        }
        let elements = 0..before * after;
        let factors = elements.map(|e| self.factor(e / after, e % after));
        let (cos, sin): (Vec<f64>, Vec<f64>) = factors.unzip();
        let shape = [before, after];
        Ok([
            cx.reals(dtype, &cos, &shape)?,
            cx.reals(dtype, &sin, &shape)?,
        ])
    }

    /// Cosine and sine of the factor of element `i` in element `k` of the result.
    fn factor(&self, i: usize, k: usize) -> (f64, f64) {
        let n = self.n as f64;
        let (sign, mut scale) = if self.inverse {
            (1.0, 1.0 / n)
        } else {
            (-1.0, 1.0)
        };
        if self.onesided && self.inverse && i != 0 && 2 * i != self.n {
            scale *= 2.0;
        }
        // Reduced first: the angle of a large product would lose digits.
        let angle = sign * 2.0 * PI * ((i * k) % self.n) as f64 / n;
        (scale * angle.cos(), scale * angle.sin())
    }

    /// The transform along the axis before the last of `x: [.., n, 1 or 2]`; the last axis is that
    /// of real and imaginary parts.
    fn apply(&self, cx: &mut Ctx, x: ValueId) -> Result<ValueId> {
        let (s, dtype) = (cx.shape_of(x), cx.dtype_of(x));
        let rank = s.rank();
        let [cos, sin] = self.matrices(cx, dtype)?;
        let real = complex_part(cx, x, 0)?;
        let (mut re, mut im) = (cx.matmul(real, cos)?, cx.matmul(real, sin)?);
        if s[rank - 1].is(2) {
            let imaginary = complex_part(cx, x, 1)?;
            let (a, b) = (cx.matmul(imaginary, sin)?, cx.matmul(imaginary, cos)?);
            re = cx.sub(re, a)?;
            im = cx.add_(im, b)?;
        }
        let mut dims = s[..rank - 2].to_vec();
        dims.extend([self.extents().1.into(), 1.into()]);
        let re = cx.reshape(re, dims.clone())?;
        if self.onesided && self.inverse {
            return Ok(re);
        }
        let im = cx.reshape(im, dims)?;
        cx.concat(&[re, im], rank - 1)
    }
}

/// The axis is an attribute before version 20, operand 2 since.
fn dft(cx: &mut Ctx) -> Result<Outs> {
    let (inverse, onesided) = (cx.flag("inverse", false)?, cx.flag("onesided", false)?);
    cx.require(&[1, 2])?;
    let x = cx.val(0)?;
    let s = cx.shape_of(x);
    let axis = match cx.opset < 20 {
        true => cx.i("axis", 1)?,
        false => cx.first_int(2)?.unwrap_or(-2),
    };
    let axis = axis_of(axis, s.rank())?;
    check_parts(&s, axis, inverse, onesided)?;
    let extent = s[axis].as_usize();
    let extent =
        extent.ok_or_else(|| Error::unsupported(format!("a transform along {}", s[axis])))?;
    let transform = Transform {
        n: transform_length(cx, extent, inverse && onesided)?,
        inverse,
        onesided,
    };
    let x = resized(cx, x, axis, extent, transform.extents().0)?;
    // The axis goes before that of real and imaginary parts.
    let rank = s.rank();
    let x = cx.transpose(x, &moved_axis(rank, axis, rank - 2))?;
    let y = transform.apply(cx, x)?;
    one(cx.transpose(y, &moved_axis(rank, rank - 2, axis))?)
}

/// Errors unless the last axis is that of the parts that the transform reads.
fn check_parts(s: &Shape, axis: usize, inverse: bool, onesided: bool) -> Result<()> {
    let parts = s.last().and_then(Dim::as_const);
    let fits = match parts {
        Some(1) => !onesided || !inverse,
        Some(2) => !onesided || inverse,
        _ => false,
    };
    if fits && axis + 1 < s.rank() {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "a transform of {s} along axis {axis}, onesided {onesided}"
    )))
}

/// Number of samples; `half` when the operand is the half of a spectrum.
fn transform_length(cx: &mut Ctx, extent: usize, half: bool) -> Result<usize> {
    let inferred = if half {
        2 * extent.saturating_sub(1)
    } else {
        extent
    };
    let n = cx.first_int(1)?.unwrap_or(inferred as i64);
    let positive = usize::try_from(n).ok().filter(|n| *n > 0);
    positive.ok_or_else(|| Error::invalid(format!("dft_length must be a positive number, is {n}")))
}

/// Real (0) or imaginary (1) part of `x: [.., n, 2]`, a matrix at least.
fn complex_part(cx: &mut Ctx, x: ValueId, i: usize) -> Result<ValueId> {
    let mut dims = cx.shape_of(x).0;
    let p = cx.slice_axis(x, dims.len() - 1, i, 1)?;
    dims.pop();
    if dims.len() == 1 {
        dims.insert(0, 1.into());
    }
    cx.reshape(p, dims)
}

/// Cut or filled up with zeros along an axis.
fn resized(cx: &mut Ctx, x: ValueId, axis: usize, from: usize, to: usize) -> Result<ValueId> {
    if to == from {
        return Ok(x);
    }
    if to < from {
        return cx.slice_axis(x, axis, 0usize, to);
    }
    let (rank, dtype) = (cx.shape_of(x).rank(), cx.dtype_of(x));
    let mut high = vec![0; rank];
    high[axis] = to - from;
    let zero = cx.scalar(dtype, 0.0);
    let pad = Op::Pad {
        low: vec![0; rank],
        high,
        mode: PadMode::Constant,
    };
    cx.add(pad, &[x, zero])
}

fn stft(cx: &mut Ctx) -> Result<Outs> {
    let onesided = cx.flag("onesided", true)?;
    cx.require(&[1, 3])?;
    let x = cx.val(0)?;
    let window = cx.opt(2)?;
    let s = cx.shape_of(x);
    let dims = s.rank() == 3 && (s[2].is(1) || s[2].is(2) && !onesided);
    let length = s.get(1).and_then(Dim::as_usize).filter(|_| dims);
    let length = length
        .ok_or_else(|| Error::unsupported(format!("a signal of shape {s}, onesided {onesided}")))?;
    let frame = frame_length(cx, window, length)?;
    let mut framed = frames(cx, x, length, frame)?;
    if let Some(w) = window {
        let w = cx.reshape(w, [frame, 1])?;
        framed = cx.mul(framed, w)?;
    }
    let transform = Transform {
        n: frame,
        inverse: false,
        onesided,
    };
    one(transform.apply(cx, framed)?)
}

/// Samples of a frame: as given, those of the window, or all.
fn frame_length(cx: &mut Ctx, window: Option<ValueId>, length: usize) -> Result<usize> {
    let given = cx.first_int(3)?.and_then(|n| usize::try_from(n).ok());
    let inferred = match window {
        Some(w) => cx.shape_of(w).first().and_then(Dim::as_usize),
        None => Some(length),
    };
    let frame = given.or(inferred).filter(|f| (1..=length).contains(f));
    frame.ok_or_else(|| Error::invalid(format!("the frame length does not fit {length} samples")))
}

/// The frames of the signal, `frame_step` samples apart: `[batch, frames, frame, parts]`.
fn frames(cx: &mut Ctx, x: ValueId, length: usize, frame: usize) -> Result<ValueId> {
    let step = cx.first_int(1)?.and_then(|n| usize::try_from(n).ok());
    let step = step.filter(|s| *s > 0);
    let step = step.ok_or_else(|| Error::invalid("frame_step must be positive"))?;
    let n = (length - frame) / step + 1;
    if n.saturating_mul(frame).saturating_mul(8) > FOLD_LIMIT_BYTES * 16 {
        let message = format!("{n} frames of {frame} samples");
        return Err(Error::unsupported(message));
    }
    let place = |i: usize| (i / frame * step + i % frame) as i64;
    let places: Vec<i64> = (0..n * frame).map(place).collect();
    let places = cx.i64s(&places, &[n, frame])?;
    cx.gather(x, places, 1)
}

/// Triangular filters, evenly spaced on the mel scale `2595 log10(1 + f / 700)`: `[bins, filters]`.
fn mel_weights(cx: &mut Ctx) -> Result<Outs> {
    let dtype = dtype_of(cx.i("output_datatype", 1)? as i32)?;
    cx.require(&[0, 1, 2, 3, 4])?;
    let filters = MelFilters::of(cx)?;
    let (n, bins) = (filters.n, filters.bins);
    let mut weights = vec![0.0; bins * n];
    for i in 0..n {
        triangle(filters.edges(i)?, |j, w| weights[j * n + i] = w);
    }
    one(cx.reals(dtype, &weights, &[bins, n])?)
}

/// Filters over the bins of a transform of `length` samples, `rate` of them a second.
struct MelFilters {
    n: usize,
    bins: usize,
    length: f64,
    rate: f64,
    /// Lowest and highest frequency, on the mel scale.
    range: (f64, f64),
}

impl MelFilters {
    fn of(cx: &mut Ctx) -> Result<MelFilters> {
        let n = cx.real_in(0, 0.0)?.max(0.0) as usize;
        let (length, rate) = (cx.real_in(1, 0.0)?, cx.real_in(2, 0.0)?);
        let range = (mel(cx.real_in(3, 0.0)?), mel(cx.real_in(4, 0.0)?));
        let bins = (length / 2.0).max(0.0) as usize + 1;
        if n.saturating_mul(bins).saturating_mul(8) > FOLD_LIMIT_BYTES || rate <= 0.0 {
            return Err(Error::unsupported(format!(
                "{n} filters over {bins} bins at {rate} samples a second"
            )));
        }
        Ok(MelFilters {
            n,
            bins,
            length,
            rate,
            range,
        })
    }

    /// First, middle and last bin of filter `i`.
    fn edges(&self, i: usize) -> Result<[usize; 3]> {
        let edges @ [_, centre, right] = [i, i + 1, i + 2].map(|i| self.edge(i));
        if right > self.bins || centre >= self.bins {
            let message = format!("filter {i} ends at bin {right} of {}", self.bins);
            return Err(Error::invalid(message));
        }
        Ok(edges)
    }

    fn edge(&self, i: usize) -> usize {
        let (low, high) = self.range;
        let step = (high - low) / (self.n as f64 + 2.0);
        let f = frequency(i as f64 * step + low);
        ((self.length + 1.0) * f / self.rate).floor().max(0.0) as usize
    }
}

fn mel(frequency: f64) -> f64 {
    2595.0 * (frequency / 700.0).ln_1p() / 10f64.ln()
}

fn frequency(mel: f64) -> f64 {
    700.0 * (mel / 2595.0 * 10f64.ln()).exp_m1()
}

/// Weights that rise from 0 at the first edge to 1 at the second and fall to 0 at the third, by
/// bin.
fn triangle([left, centre, right]: [usize; 3], mut set: impl FnMut(usize, f64)) {
    let (rise, fall) = ((centre - left) as f64, (right - centre) as f64);
    for j in left..=centre {
        let w = if rise == 0.0 {
            1.0
        } else {
            (j - left) as f64 / rise
        };
        set(j, w);
    }
    for j in centre..right {
        set(j, (right - j) as f64 / fall);
    }
}
