//! Fourier transforms as products with constant matrices, and filter banks.

use super::super::import::{Ctx, FOLD_LIMIT_BYTES, OpDef, Outs, axis_of, one};
use super::super::tensor::dtype_of;
use crate::error::{Error, Result};
use crate::ir::{Dim, Op, PadMode, ScalarOp, ValueId};
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

    /// Cosine and sine parts of the factors, `[before, after]`: the kernel of the transform with its scale, and, where a
    /// onesided spectrum stands for both sides, the weights of its bins.
    fn matrices(&self, cx: &mut Ctx<'_, '_>, dtype: DType) -> Result<[ValueId; 2]> {
        let (before, after) = self.extents();
        if before.saturating_mul(after).saturating_mul(8) > FOLD_LIMIT_BYTES * 16 {
            return Err(Error::unsupported(format!(
                "a Fourier transform of length {}",
                self.n
            )));
        }
        let sign = if self.inverse { 1.0 } else { -1.0 };
        let scale = if self.inverse {
            1.0 / self.n as f64
        } else {
            1.0
        };
        let doubled = |i: usize| self.onesided && self.inverse && i != 0 && 2 * i != self.n;
        let part = |f: fn(f64) -> f64| -> Vec<f64> {
            (0..before * after)
                .map(|e| {
                    let (i, k) = (e / after, e % after);
                    // Reduced first: the angle of a large product would lose digits.
                    let angle = sign * 2.0 * PI * ((i * k) % self.n) as f64 / self.n as f64;
                    scale * f(angle) * if doubled(i) { 2.0 } else { 1.0 }
                })
                .collect()
        };
        let shape = [before, after];
        Ok([
            cx.reals(dtype, &part(f64::cos), &shape)?,
            cx.reals(dtype, &part(f64::sin), &shape)?,
        ])
    }

    /// The transform along the axis before the last of `x: [.., n, 1 or 2]`; the last axis is that of real and imaginary
    /// parts.
    fn apply(&self, cx: &mut Ctx<'_, '_>, x: ValueId) -> Result<ValueId> {
        let (s, dtype) = (cx.shape_of(x), cx.dtype_of(x));
        let rank = s.rank();
        let [cos, sin] = self.matrices(cx, dtype)?;
        let part = |cx: &mut Ctx<'_, '_>, i: usize| {
            let p = cx.b().slice_axis(x, rank - 1, i, 1)?;
            let mut dims = s[..rank - 1].to_vec();
            if rank == 2 {
                dims.insert(0, 1.into());
            }
            cx.b().reshape(p, dims)
        };
        let real = part(cx, 0)?;
        let (mut re, mut im) = (cx.b().matmul(real, cos)?, cx.b().matmul(real, sin)?);
        if s[rank - 1].is(2) {
            let imaginary = part(cx, 1)?;
            let (a, b) = (
                cx.b().matmul(imaginary, sin)?,
                cx.b().matmul(imaginary, cos)?,
            );
            re = cx.b().sub(re, a)?;
            im = cx.b().add_(im, b)?;
        }
        let mut dims = s[..rank - 2].to_vec();
        dims.extend([self.extents().1.into(), 1.into()]);
        let re = cx.b().reshape(re, dims.clone())?;
        if self.onesided && self.inverse {
            return Ok(re);
        }
        let im = cx.b().reshape(im, dims)?;
        cx.b().concat(&[re, im], rank - 1)
    }
}

/// The axis is an attribute before version 20, operand 2 since.
fn dft<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let (inverse, onesided) = (cx.flag("inverse", false)?, cx.flag("onesided", false)?);
    cx.require(&[1, 2])?;
    let x = cx.val(0)?;
    let s = cx.shape_of(x);
    let axis = match cx.opset < 20 {
        true => cx.i("axis", 1)?,
        false => cx
            .opt_ints_in(2)?
            .and_then(|a| a.first().copied())
            .unwrap_or(-2),
    };
    let axis = axis_of(axis, s.rank())?;
    let complex = s.last().is_some_and(|d| d.is(2));
    if s.rank() < 2
        || axis + 1 == s.rank()
        || !complex && !s[s.rank() - 1].is(1)
        || onesided && complex != inverse
    {
        return Err(Error::invalid(format!(
            "a transform of {s} along axis {axis}, onesided {onesided}"
        )));
    }
    let extent = s[axis]
        .as_usize()
        .ok_or_else(|| Error::unsupported(format!("a transform along {}", s[axis])))?;
    let n = match cx.opt_ints_in(1)?.and_then(|n| n.first().copied()) {
        Some(n) => usize::try_from(n)
            .map_err(|_| Error::invalid(format!("dft_length must be a positive number, is {n}")))?,
        None if onesided && inverse => 2 * extent.saturating_sub(1),
        None => extent,
    };
    if n == 0 {
        return Err(Error::invalid("a transform of length 0"));
    }
    let transform = Transform {
        n,
        inverse,
        onesided,
    };
    let before = transform.extents().0;
    let x = resized(cx, x, axis, extent, before)?;
    // The axis goes before that of real and imaginary parts.
    let rank = s.rank();
    let mut perm: Vec<usize> = (0..rank).filter(|&a| a != axis).collect();
    perm.insert(rank - 2, axis);
    let x = cx.b().transpose(x, &perm)?;
    let y = transform.apply(cx, x)?;
    let mut back: Vec<usize> = (0..rank).filter(|&a| a != rank - 2).collect();
    back.insert(axis, rank - 2);
    one(cx.b().transpose(y, &back)?)
}

/// Cut or filled up with zeros along an axis.
fn resized(
    cx: &mut Ctx<'_, '_>,
    x: ValueId,
    axis: usize,
    from: usize,
    to: usize,
) -> Result<ValueId> {
    if to <= from {
        return if to == from {
            Ok(x)
        } else {
            cx.b().slice_axis(x, axis, 0usize, to)
        };
    }
    let (rank, dtype) = (cx.shape_of(x).rank(), cx.dtype_of(x));
    let mut high = vec![0; rank];
    high[axis] = to - from;
    let zero = cx.b().scalar(dtype, 0.0);
    cx.add(
        Op::Pad {
            low: vec![0; rank],
            high,
            mode: PadMode::Constant,
        },
        &[x, zero],
    )
}

fn stft<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let onesided = cx.flag("onesided", true)?;
    cx.require(&[1, 3])?;
    let x = cx.val(0)?;
    let window = cx.opt(2)?;
    let s = cx.shape_of(x);
    let dims = s.rank() == 3 && (s[2].is(1) || s[2].is(2) && !onesided);
    let length = s.get(1).and_then(Dim::as_usize).filter(|_| dims);
    let length = length
        .ok_or_else(|| Error::unsupported(format!("a signal of shape {s}, onesided {onesided}")))?;
    let given = cx
        .opt_ints_in(3)?
        .and_then(|n| n.first().copied())
        .and_then(|n| usize::try_from(n).ok());
    let inferred = match window {
        Some(w) => cx.shape_of(w).first().and_then(Dim::as_usize),
        None => Some(length),
    };
    let frame = given.or(inferred).filter(|f| (1..=length).contains(f));
    let frame = frame
        .ok_or_else(|| Error::invalid(format!("the frame length does not fit {length} samples")))?;
    let step = cx
        .ints_in(1)?
        .first()
        .and_then(|&n| usize::try_from(n).ok())
        .filter(|s| *s > 0);
    let step = step.ok_or_else(|| Error::invalid("frame_step must be positive"))?;
    let frames = (length - frame) / step + 1;
    if frames.saturating_mul(frame).saturating_mul(8) > FOLD_LIMIT_BYTES * 16 {
        return Err(Error::unsupported(format!(
            "{frames} frames of {frame} samples"
        )));
    }
    let places: Vec<i64> = (0..frames * frame)
        .map(|i| (i / frame * step + i % frame) as i64)
        .collect();
    let places = cx.i64s(&places, &[frames, frame])?;
    let mut framed = cx.add(Op::Gather { axis: 1 }, &[x, places])?;
    if let Some(w) = window {
        let w = cx.b().reshape(w, [frame, 1])?;
        framed = cx.map(ScalarOp::Mul, &[framed, w])?;
    }
    one(Transform {
        n: frame,
        inverse: false,
        onesided,
    }
    .apply(cx, framed)?)
}

/// Triangular filters, evenly spaced on the mel scale `2595 log10(1 + f / 700)`: `[bins, filters]`.
fn mel_weights<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let dtype = dtype_of(cx.i("output_datatype", 1)? as i32)?;
    cx.require(&[0, 1, 2, 3, 4])?;
    let (n, length, rate) = (
        cx.real_in(0, 0.0)?,
        cx.real_in(1, 0.0)?,
        cx.real_in(2, 0.0)?,
    );
    let (low, high) = (cx.real_in(3, 0.0)?, cx.real_in(4, 0.0)?);
    let (n, bins) = (n.max(0.0) as usize, (length / 2.0).max(0.0) as usize + 1);
    if n.saturating_mul(bins).saturating_mul(8) > FOLD_LIMIT_BYTES || rate <= 0.0 {
        return Err(Error::unsupported(format!(
            "{n} filters over {bins} bins at {rate} samples a second"
        )));
    }
    let mel = |f: f64| 2595.0 * (f / 700.0).ln_1p() / 10f64.ln();
    let step = (mel(high) - mel(low)) / (n as f64 + 2.0);
    let edge = |i: usize| {
        let f = 700.0 * ((i as f64 * step + mel(low)) / 2595.0 * 10f64.ln()).exp_m1();
        (((length + 1.0) * f / rate).floor().max(0.0)) as usize
    };
    let mut weights = vec![0.0; bins * n];
    for i in 0..n {
        let (left, centre, right) = (edge(i), edge(i + 1), edge(i + 2));
        if right > bins || centre >= bins {
            return Err(Error::invalid(format!(
                "filter {i} ends at bin {right} of {bins}"
            )));
        }
        for j in left..=centre {
            let width = (centre - left) as f64;
            weights[j * n + i] = if width == 0.0 {
                1.0
            } else {
                (j - left) as f64 / width
            };
        }
        for j in centre..right {
            weights[j * n + i] = (right - j) as f64 / (right - centre) as f64;
        }
    }
    one(cx.reals(dtype, &weights, &[bins, n])?)
}
