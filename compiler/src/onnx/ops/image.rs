//! Sampling grids, and operators that put windows back into an image.

use super::super::import::{Ctx, FOLD_LIMIT_BYTES, OpDef, Outs, one};
use crate::error::{Error, Result};
use crate::ir::{Dim, Op, PadMode, ScalarOp, ScatterKind, ValueId};
use gristmill_runtime::{DType, Tensor};

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("AffineGrid", (2, 2), affine_grid),
    OpDef::new("GridSample", (2, 2), grid_sample),
    OpDef::new("Col2Im", (3, 3), col2im),
    OpDef::new("MaxUnpool", (2, 3), max_unpool),
];

/// A list of extents from a constant operand.
fn extents(cx: &mut Ctx<'_, '_>, operand: usize) -> Result<Vec<usize>> {
    let ints = cx.ints_in(operand)?;
    let all: Option<Vec<usize>> = ints
        .iter()
        .map(|&i| usize::try_from(i).ok().filter(|i| *i < 1 << 31))
        .collect();
    all.ok_or_else(|| Error::invalid(format!("operand {operand} = {ints:?} is out of range")))
}

/// Normalised coordinates of the output pixels, transformed by `theta: [n, k, k + 1]` (Jaderberg et al.,
/// arXiv:1506.02025, eq. 1): `[n, spatial.., k]`, the last spatial axis first among coordinates.
fn affine_grid<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let align = cx.flag("align_corners", false)?;
    let theta = cx.val(0)?;
    let size = extents(cx, 1)?;
    let spatial = size.get(2..).filter(|s| matches!(s.len(), 2 | 3));
    let spatial = spatial.ok_or_else(|| {
        Error::invalid(format!("size {size:?} is not that of 2 or 3 spatial axes"))
    })?;
    let (k, dtype) = (spatial.len(), cx.dtype_of(theta));
    let at = |i: usize, n: usize| match align {
        true if n == 1 => -1.0,
        true => -1.0 + 2.0 * i as f64 / (n as f64 - 1.0),
        false => -1.0 + (2.0 * i as f64 + 1.0) / n as f64,
    };
    let pixels: usize = spatial.iter().product();
    if pixels.saturating_mul(8 * (k + 1)) > FOLD_LIMIT_BYTES * 16 {
        return Err(Error::unsupported(format!("a grid of {pixels} points")));
    }
    let mut homogeneous = Vec::with_capacity(pixels * (k + 1));
    for p in 0..pixels {
        let mut rest = p;
        for &n in spatial.iter().rev() {
            homogeneous.push(at(rest % n, n));
            rest /= n;
        }
        homogeneous.push(1.0);
    }
    let points = cx.reals(dtype, &homogeneous, &[pixels, k + 1])?;
    let theta_t = cx.b().transpose(theta, &[0, 2, 1])?;
    let grid = cx.b().matmul(points, theta_t)?;
    let mut shape = vec![cx.shape_of(theta)[0].clone()];
    shape.extend(spatial.iter().map(|&n| Dim::from(n)));
    shape.push(k.into());
    one(cx.b().reshape(grid, shape)?)
}

#[derive(Clone, Copy, PartialEq)]
enum Mode {
    Nearest,
    Linear,
    Cubic,
}

const MODES: &[(&str, Mode)] = &[
    ("linear", Mode::Linear),
    ("nearest", Mode::Nearest),
    ("cubic", Mode::Cubic),
    ("bilinear", Mode::Linear),
    ("bicubic", Mode::Cubic),
];

/// Samples outside the image.
#[derive(Clone, Copy, PartialEq)]
enum Border {
    Zeros,
    Nearest,
    Reflection,
}

const BORDERS: &[(&str, Border)] = &[
    ("zeros", Border::Zeros),
    ("border", Border::Nearest),
    ("reflection", Border::Reflection),
];

/// One spatial axis of the image.
struct Axis {
    extent: usize,
    align: bool,
    border: Border,
}

/// A tap of the interpolation along one axis: index (a float that is whole and inside), weight, and where the tap is in
/// the image, for a zero border.
struct Tap {
    index: ValueId,
    weight: Option<ValueId>,
    inside: Option<ValueId>,
}

impl Axis {
    /// Smallest and greatest coordinate of the image's area.
    fn limits(&self) -> (f64, f64) {
        let n = self.extent as f64;
        if self.align {
            (0.0, n - 1.0)
        } else {
            (-0.5, n - 0.5)
        }
    }

    /// Pixel coordinate of a normalised one.
    fn pixel(&self, cx: &mut Ctx<'_, '_>, x: ValueId) -> Result<ValueId> {
        let n = self.extent as f64;
        let x = cx.with_real(ScalarOp::Add, x, 1.0)?;
        if self.align {
            return cx.with_real(ScalarOp::Mul, x, (n - 1.0) / 2.0);
        }
        let x = cx.with_real(ScalarOp::Mul, x, n)?;
        let x = cx.with_real(ScalarOp::Sub, x, 1.0)?;
        cx.with_real(ScalarOp::Div, x, 2.0)
    }

    fn clamp(&self, cx: &mut Ctx<'_, '_>, x: ValueId) -> Result<ValueId> {
        let x = cx.with_real(ScalarOp::Max, x, 0.0)?;
        cx.with_real(ScalarOp::Min, x, self.extent as f64 - 1.0)
    }

    /// Mirrors a coordinate at the limits until it lies between them.
    fn reflect(&self, cx: &mut Ctx<'_, '_>, x: ValueId) -> Result<ValueId> {
        let (low, high) = self.limits();
        let span = high - low;
        if span <= 0.0 {
            return cx.with_real(ScalarOp::Mul, x, 0.0);
        }
        let d = cx.with_real(ScalarOp::Sub, x, low)?;
        let d = cx.map(ScalarOp::Abs, &[d])?;
        let turns = cx.with_real(ScalarOp::Div, d, span)?;
        let turns = cx.map(ScalarOp::Floor, &[turns])?;
        let passed = cx.with_real(ScalarOp::Mul, turns, span)?;
        let rest = cx.b().sub(d, passed)?;
        let odd = cx.with_real(ScalarOp::Rem, turns, 2.0)?;
        let odd = cx.with_real(ScalarOp::Eq, odd, 1.0)?;
        let up = cx.with_real(ScalarOp::Add, rest, low)?;
        let down = cx.map(ScalarOp::Neg, &[rest])?;
        let down = cx.with_real(ScalarOp::Add, down, high)?;
        cx.map(ScalarOp::Select, &[odd, down, up])
    }

    fn inside(&self, cx: &mut Ctx<'_, '_>, x: ValueId) -> Result<ValueId> {
        let a = cx.with_real(ScalarOp::Ge, x, 0.0)?;
        let b = cx.with_real(ScalarOp::Le, x, self.extent as f64 - 1.0)?;
        cx.map(ScalarOp::And, &[a, b])
    }

    /// The tap at a whole coordinate, brought inside the image.
    fn tap(&self, cx: &mut Ctx<'_, '_>, x: ValueId, weight: Option<ValueId>) -> Result<Tap> {
        let inside = if self.border == Border::Zeros {
            Some(self.inside(cx, x)?)
        } else {
            None
        };
        let x = if self.border == Border::Reflection {
            self.reflect(cx, x)?
        } else {
            x
        };
        let index = self.clamp(cx, x)?;
        Ok(Tap {
            index,
            weight,
            inside,
        })
    }

    /// The taps that interpolate at normalised coordinates.
    ///
    /// Cubic taps are brought inside one by one, while their weights are of the position outside: so PyTorch and onnxruntime do it. (The
    /// ONNX reference clamps the position too where `padding_mode` is `border`.)
    fn taps(&self, cx: &mut Ctx<'_, '_>, coordinate: ValueId, mode: Mode) -> Result<Vec<Tap>> {
        let mut x = self.pixel(cx, coordinate)?;
        if mode == Mode::Nearest {
            x = cx.map(ScalarOp::Round, &[x])?;
        }
        x = match self.border {
            Border::Nearest if mode != Mode::Cubic => self.clamp(cx, x)?,
            Border::Reflection => self.reflect(cx, x)?,
            _ => x,
        };
        if mode == Mode::Nearest {
            return Ok(vec![self.tap(cx, x, None)?]);
        }
        let base = cx.map(ScalarOp::Floor, &[x])?;
        let t = cx.b().sub(x, base)?;
        let (first, weights) = if mode == Mode::Linear {
            let rest = cx.map(ScalarOp::Neg, &[t])?;
            (0.0, vec![cx.with_real(ScalarOp::Add, rest, 1.0)?, t])
        } else {
            (-1.0, cubic_weights(cx, t)?)
        };
        let mut taps = Vec::new();
        for (i, w) in weights.into_iter().enumerate() {
            let x = cx.with_real(ScalarOp::Add, base, first + i as f64)?;
            taps.push(self.tap(cx, x, Some(w))?);
        }
        Ok(taps)
    }
}

/// Weights of the four pixels around the fraction `t` (Keys, Cubic convolution interpolation, 1981, with a = -3/4).
fn cubic_weights(cx: &mut Ctx<'_, '_>, t: ValueId) -> Result<Vec<ValueId>> {
    const A: f64 = -0.75;
    let near = [A + 2.0, -(A + 3.0), 0.0, 1.0];
    let far = [A, -5.0 * A, 8.0 * A, -4.0 * A];
    let one_minus = cx.map(ScalarOp::Neg, &[t])?;
    let one_minus = cx.with_real(ScalarOp::Add, one_minus, 1.0)?;
    let mut weights = Vec::new();
    for (x, offset, polynomial) in [
        (t, 1.0, far),
        (t, 0.0, near),
        (one_minus, 0.0, near),
        (one_minus, 1.0, far),
    ] {
        let d = cx.with_real(ScalarOp::Add, x, offset)?;
        let mut y = cx.with_real(ScalarOp::Mul, d, polynomial[0])?;
        for &c in &polynomial[1..3] {
            y = cx.with_real(ScalarOp::Add, y, c)?;
            y = cx.b().mul(y, d)?;
        }
        weights.push(cx.with_real(ScalarOp::Add, y, polynomial[3])?);
    }
    Ok(weights)
}

/// Samples `x: [n, c, spatial..]` at the normalised points of `grid: [n, out.., k]`.
fn grid_sample<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let mode = cx.choice("mode", "linear", MODES)?;
    let border = cx.choice("padding_mode", "zeros", BORDERS)?;
    if (mode, border) == (Mode::Cubic, Border::Nearest) {
        cx.note("cubic taps are clamped to the border one by one, as in PyTorch and onnxruntime; the ONNX reference clamps the position");
    }
    let align = cx.flag("align_corners", false)?;
    let (x, grid) = (cx.val(0)?, cx.val(1)?);
    let (sx, sg) = (cx.shape_of(x), cx.shape_of(grid));
    let k = sx.rank().saturating_sub(2);
    let spatial: Option<Vec<usize>> = sx.iter().skip(2).map(Dim::as_usize).collect();
    let spatial = spatial.ok_or_else(|| Error::unsupported(format!("an image of shape {sx}")))?;
    if k == 0 || sg.rank() != k + 2 || !sg[k + 1].is(k as i64) || spatial.contains(&0) {
        return Err(Error::invalid(format!(
            "a grid of shape {sg} for an image of shape {sx}"
        )));
    }
    let points = sg[1..=k].iter().fold(Dim::constant(1), |n, d| n.product(d));
    let wide = if cx.dtype_of(grid) == DType::F64 {
        DType::F64
    } else {
        DType::F32
    };
    let grid = cx.b().cast(grid, wide)?;
    let grid = cx
        .b()
        .reshape(grid, [sg[0].clone(), 1.into(), points.clone(), k.into()])?;
    let mut taps = Vec::new();
    for (i, &extent) in spatial.iter().enumerate() {
        let c = cx.b().slice_axis(grid, 3, k - 1 - i, 1)?;
        let c = cx
            .b()
            .reshape(c, [sg[0].clone(), 1.into(), points.clone()])?;
        taps.push(
            Axis {
                extent,
                align,
                border,
            }
            .taps(cx, c, mode)?,
        );
    }
    let flat = cx.b().reshape(
        x,
        [
            sx[0].clone(),
            sx[1].clone(),
            spatial.iter().product::<usize>().into(),
        ],
    )?;
    let y = weighted_taps(cx, flat, &taps, &spatial, points)?;
    let mut shape = vec![sx[0].clone(), sx[1].clone()];
    shape.extend(sg[1..=k].iter().cloned());
    one(cx.b().reshape(y, shape)?)
}

/// The sum over all combinations of one tap per axis: `[n, c, points]` from `flat: [n, c, pixels]`.
fn weighted_taps(
    cx: &mut Ctx<'_, '_>,
    flat: ValueId,
    taps: &[Vec<Tap>],
    spatial: &[usize],
    points: Dim,
) -> Result<ValueId> {
    let (shape, dtype) = (cx.shape_of(flat), cx.dtype_of(flat));
    let target = [shape[0].clone(), shape[1].clone(), points];
    let n_combinations: usize = taps.iter().map(Vec::len).product();
    let mut sum: Option<ValueId> = None;
    for combination in 0..n_combinations {
        let (mut rest, mut index, mut weight, mut inside) = (combination, None, None, None);
        for (axis, &extent) in taps.iter().zip(spatial) {
            let tap = &axis[rest % axis.len()];
            rest /= axis.len();
            let i = cx.b().cast(tap.index, DType::I64)?;
            index = Some(match index {
                None => i,
                Some(before) => {
                    let before = cx.with_real(ScalarOp::Mul, before, extent as f64)?;
                    cx.b().add_(before, i)?
                }
            });
            weight = both(cx, ScalarOp::Mul, weight, tap.weight)?;
            inside = both(cx, ScalarOp::And, inside, tap.inside)?;
        }
        let index = index.ok_or_else(|| Error::internal("an image without axes"))?;
        let index = cx.b().broadcast(index, target.clone())?;
        let mut v = cx.add(Op::GatherElements { axis: 2 }, &[flat, index])?;
        if let Some(w) = weight {
            let w = cx.b().cast(w, dtype)?;
            v = cx.b().mul(v, w)?;
        }
        if let Some(inside) = inside {
            let zero = cx.b().scalar(dtype, 0.0);
            v = cx.map(ScalarOp::Select, &[inside, v, zero])?;
        }
        sum = both(cx, ScalarOp::Add, sum, Some(v))?;
    }
    sum.ok_or_else(|| Error::internal("an interpolation without taps"))
}

/// `op` of what is given.
fn both(
    cx: &mut Ctx<'_, '_>,
    op: ScalarOp,
    a: Option<ValueId>,
    b: Option<ValueId>,
) -> Result<Option<ValueId>> {
    match (a, b) {
        (Some(a), Some(b)) => cx.map(op, &[a, b]).map(Some),
        (a, b) => Ok(a.or(b)),
    }
}

/// A list attribute of `n` entries.
fn list(cx: &Ctx<'_, '_>, name: &'static str, default: usize, n: usize) -> Result<Vec<usize>> {
    let v = cx.usizes(name)?.unwrap_or_else(|| vec![default; n]);
    if v.len() == n {
        Ok(v)
    } else {
        Err(Error::invalid(format!(
            "attribute {name} = {v:?} needs {n} entries"
        )))
    }
}

/// Adds the columns `[n, c * block, positions]` into images: every column element knows its place.
fn col2im<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    cx.require(&[1, 2])?;
    let (image, block) = (extents(cx, 1)?, extents(cx, 2)?);
    let k = image.len();
    let (strides, dilations) = (list(cx, "strides", 1, k)?, list(cx, "dilations", 1, k)?);
    let pads = list(cx, "pads", 0, 2 * k)?;
    let x = cx.val(0)?;
    let (s, dtype) = (cx.shape_of(x), cx.dtype_of(x));
    let padded: Vec<usize> = (0..k).map(|i| image[i] + pads[i] + pads[i + k]).collect();
    let reach = |i: usize| (block[i].max(1) - 1) * dilations[i] + 1;
    if block.len() != k
        || k == 0
        || s.rank() != 3
        || (0..k).any(|i| strides[i] == 0 || reach(i) > padded[i])
    {
        return Err(Error::invalid(format!(
            "columns {s} do not fit an image {image:?} with blocks {block:?}"
        )));
    }
    let steps: Vec<usize> = (0..k)
        .map(|i| (padded[i] - reach(i)) / strides[i] + 1)
        .collect();
    let count = |v: &[usize]| v.iter().fold(1usize, |n, &d| n.saturating_mul(d));
    let (taps, positions, pixels) = (count(&block), count(&steps), count(&padded));
    let c = s[1]
        .exact_div(&taps.into())
        .filter(|_| taps > 0 && s[2].is(positions as i64));
    let c = c.ok_or_else(|| {
        Error::invalid(format!(
            "columns {s}: expected {taps} rows a channel, {positions} columns"
        ))
    })?;
    if taps.saturating_mul(positions).saturating_mul(8) > FOLD_LIMIT_BYTES * 16 {
        return Err(Error::unsupported(format!("{taps} by {positions} columns")));
    }
    let mut places = vec![0i64; taps * positions];
    for (n, place) in places.iter_mut().enumerate() {
        let (mut tap, mut position, mut stride) = (n / positions, n % positions, 1);
        for i in (0..k).rev() {
            *place += (((tap % block[i]) * dilations[i] + (position % steps[i]) * strides[i])
                * stride) as i64;
            (tap, position, stride) = (tap / block[i], position / steps[i], stride * padded[i]);
        }
    }
    let rows = s[0].product(&c);
    let updates = cx
        .b()
        .reshape(x, [rows.clone(), (taps * positions).into()])?;
    let places = cx.i64s(&places, &[1, taps * positions])?;
    let places = cx
        .b()
        .broadcast(places, [rows.clone(), (taps * positions).into()])?;
    let zero = cx.b().scalar(dtype, 0.0);
    let empty = cx.b().broadcast(zero, [rows, pixels.into()])?;
    let op = Op::ScatterElements {
        axis: 1,
        kind: ScatterKind::Add,
    };
    let full = cx.add(op, &[empty, places, updates])?;
    let mut shape = vec![s[0].clone(), c];
    shape.extend(padded.iter().map(|&n| Dim::from(n)));
    let mut y = cx.b().reshape(full, shape)?;
    for i in 0..k {
        if padded[i] != image[i] {
            y = cx.b().slice_axis(y, 2 + i, pads[i], image[i])?;
        }
    }
    one(y)
}

/// Puts maxima back at their row-major positions; the rest is 0.
fn max_unpool<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let size = cx
        .usizes("kernel_shape")?
        .ok_or_else(|| Error::invalid("kernel_shape is missing"))?;
    let k = size.len();
    let (strides, pads) = (list(cx, "strides", 1, k)?, list(cx, "pads", 0, 2 * k)?);
    let wanted = if cx.has(2) {
        Some(extents(cx, 2)?)
    } else {
        None
    };
    let (x, indices) = (cx.val(0)?, cx.val(1)?);
    let (s, dtype) = (cx.shape_of(x), cx.dtype_of(x));
    if s.rank() != k + 2 || cx.shape_of(indices) != s {
        return Err(Error::invalid(format!(
            "kernel_shape {size:?} does not fit {s}"
        )));
    }
    let mut shape = vec![s[0].clone(), s[1].clone()];
    for i in 0..k {
        let d = (s[2 + i].clone() - 1.into()).scale(strides[i] as i64) + size[i].into();
        shape.push(d - (pads[i] + pads[i + k]).into());
    }
    let total = |dims: &[Dim]| dims.iter().fold(Dim::constant(1), |n, d| n.product(d));
    let zero = cx.b().scalar(dtype, 0.0);
    let empty = cx.b().broadcast(zero, [total(&shape)])?;
    let (flat, places) = (
        cx.b().reshape(x, [total(&s)])?,
        cx.b().reshape(indices, [total(&s)])?,
    );
    let op = Op::ScatterElements {
        axis: 0,
        kind: ScatterKind::Set,
    };
    let y = cx.add(op, &[empty, places, flat])?;
    let y = cx.b().reshape(y, shape.clone())?;
    let Some(wanted) = wanted else { return one(y) };
    let more = |(w, d): (&usize, &Dim)| (Dim::from(*w) - d.clone()).as_usize();
    let high: Option<Vec<usize>> = wanted.iter().zip(&shape).map(more).collect();
    let high = high.filter(|_| wanted.len() == shape.len());
    let high = high.ok_or_else(|| {
        Error::unsupported(format!("output_shape {wanted:?} below the inferred one"))
    })?;
    let fill = cx.b().constant(Tensor::zeros(dtype, &[])?);
    one(cx.add(
        Op::Pad {
            low: vec![0; high.len()],
            high,
            mode: PadMode::Constant,
        },
        &[y, fill],
    )?)
}
