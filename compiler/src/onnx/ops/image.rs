//! Sampling grids, and operators that put windows back into an image.

use super::super::import::{Ctx, FOLD_LIMIT_BYTES, OpDef, Outs, one, product};
use super::contract::list;
use super::resize::{Mode, cubic_kernel, polynomial};
use crate::error::{Error, Result};
use crate::ir::{Dim, Op, PadMode, ScalarOp, ScatterKind, Shape, ValueId};
use gristmill_runtime::DType;

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("AffineGrid", (2, 2), affine_grid),
    OpDef::new("GridSample", (2, 2), grid_sample),
    OpDef::new("Col2Im", (3, 3), col2im),
    OpDef::new("MaxUnpool", (2, 3), max_unpool),
];

/// A list of extents from a constant operand.
fn extents(cx: &mut Ctx, operand: usize) -> Result<Vec<usize>> {
    let ints = cx.ints_in(operand)?;
    let all: Option<Vec<usize>> = ints
        .iter()
        .map(|&i| usize::try_from(i).ok().filter(|i| *i < 1 << 31))
        .collect();
    all.ok_or_else(|| Error::invalid(format!("operand {operand} = {ints:?} is out of range")))
}

/// Normalised coordinates of the output pixels, transformed by `theta: [n, k, k + 1]` (Jaderberg et
/// al., arXiv:1506.02025, eq. 1): `[n, spatial.., k]`, the last spatial axis first among
/// coordinates.
fn affine_grid(cx: &mut Ctx) -> Result<Outs> {
    let align = cx.flag("align_corners", false)?;
    let theta = cx.val(0)?;
    let size = extents(cx, 1)?;
    let spatial = size.get(2..).filter(|s| matches!(s.len(), 2 | 3));
    let spatial = spatial.ok_or_else(|| {
        Error::invalid(format!("size {size:?} is not that of 2 or 3 spatial axes"))
    })?;
    let points = homogeneous_points(cx, theta, spatial, align)?;
    let theta_t = cx.transpose(theta, &[0, 2, 1])?;
    let grid = cx.matmul(points, theta_t)?;
    let mut shape = vec![cx.shape_of(theta)[0].clone()];
    shape.extend(spatial.iter().map(|&n| Dim::from(n)));
    shape.push(spatial.len().into());
    one(cx.reshape(grid, shape)?)
}

/// Coordinates of all pixels, each with a 1 after them: `[pixels, k + 1]`.
fn homogeneous_points(
    cx: &mut Ctx,
    theta: ValueId,
    spatial: &[usize],
    align: bool,
) -> Result<ValueId> {
    let (width, pixels) = (spatial.len() + 1, spatial.iter().product::<usize>());
    if pixels.saturating_mul(8 * width) > FOLD_LIMIT_BYTES * 16 {
        return Err(Error::unsupported(format!("a grid of {pixels} points")));
    }
    let mut points = Vec::with_capacity(pixels * width);
    for p in 0..pixels {
        let mut rest = p;
        for &n in spatial.iter().rev() {
            points.push(normalised(rest % n, n, align));
            rest /= n;
        }
        points.push(1.0);
    }
    let dtype = cx.dtype_of(theta);
    cx.reals(dtype, &points, &[pixels, width])
}

/// Coordinate of pixel `i` of `n`: from -1 to 1 between the centres of the corners, or between
/// their edges.
fn normalised(i: usize, n: usize, align: bool) -> f64 {
    let (i, n) = (i as f64, n as f64);
    match align {
        true if n == 1.0 => -1.0,
        true => -1.0 + 2.0 * i / (n - 1.0),
        false => -1.0 + (2.0 * i + 1.0) / n,
    }
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

/// A tap of the interpolation along one axis: index (a float that is whole and inside), weight, and
/// where the tap is in the image, for a zero border.
struct Tap {
    index: ValueId,
    weight: Option<ValueId>,
    inside: Option<ValueId>,
}

impl Axis {
    /// Smallest and largest coordinate of the image's area.
    fn limits(&self) -> (f64, f64) {
        let n = self.extent as f64;
        if self.align {
            (0.0, n - 1.0)
        } else {
            (-0.5, n - 0.5)
        }
    }

    /// Pixel coordinate of a normalised one.
    fn pixel(&self, cx: &mut Ctx, x: ValueId) -> Result<ValueId> {
        let n = self.extent as f64;
        let x = cx.add_real(x, 1.0)?;
        if self.align {
            return cx.mul_real(x, (n - 1.0) / 2.0);
        }
        let x = cx.mul_real(x, n)?;
        let x = cx.with_real(ScalarOp::Sub, x, 1.0)?;
        cx.with_real(ScalarOp::Div, x, 2.0)
    }

    fn clamp(&self, cx: &mut Ctx, x: ValueId) -> Result<ValueId> {
        let x = cx.with_real(ScalarOp::Max, x, 0.0)?;
        cx.with_real(ScalarOp::Min, x, self.extent as f64 - 1.0)
    }

    /// Mirrors a coordinate at the limits until it lies between them.
    fn reflect(&self, cx: &mut Ctx, x: ValueId) -> Result<ValueId> {
        let (low, high) = self.limits();
        let span = high - low;
        if span <= 0.0 {
            return cx.mul_real(x, 0.0);
        }
        let d = cx.with_real(ScalarOp::Sub, x, low)?;
        let d = cx.abs(d)?;
        let turns = cx.with_real(ScalarOp::Div, d, span)?;
        let turns = cx.floor(turns)?;
        let passed = cx.mul_real(turns, span)?;
        let rest = cx.sub(d, passed)?;
        let up = cx.add_real(rest, low)?;
        let down = cx.neg(rest)?;
        let down = cx.add_real(down, high)?;
        let odd = cx.with_real(ScalarOp::Rem, turns, 2.0)?;
        let odd = cx.with_real(ScalarOp::Eq, odd, 1.0)?;
        cx.select(odd, down, up)
    }

    fn inside(&self, cx: &mut Ctx, x: ValueId) -> Result<ValueId> {
        let a = cx.with_real(ScalarOp::Ge, x, 0.0)?;
        let b = cx.with_real(ScalarOp::Le, x, self.extent as f64 - 1.0)?;
        cx.map(ScalarOp::And, &[a, b])
    }

    /// The tap at a whole coordinate, brought inside the image.
    fn tap(&self, cx: &mut Ctx, x: ValueId, weight: Option<ValueId>) -> Result<Tap> {
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
    /// Cubic taps are brought inside one by one, while their weights are of the position outside:
    /// so PyTorch and onnxruntime do it. (The ONNX reference clamps the position too where
    /// `padding_mode` is `border`.)
    fn taps(&self, cx: &mut Ctx, coordinate: ValueId, mode: Mode) -> Result<Vec<Tap>> {
        let x = self.position(cx, coordinate, mode)?;
        if mode == Mode::Nearest {
            return Ok(vec![self.tap(cx, x, None)?]);
        }
        let base = cx.floor(x)?;
        let t = cx.sub(x, base)?;
        let (first, weights) = if mode == Mode::Linear {
            let rest = cx.neg(t)?;
            (0.0, vec![cx.add_real(rest, 1.0)?, t])
        } else {
            (-1.0, cubic_weights(cx, t)?)
        };
        let mut taps = Vec::new();
        for (i, w) in weights.into_iter().enumerate() {
            let x = cx.add_real(base, first + i as f64)?;
            taps.push(self.tap(cx, x, Some(w))?);
        }
        Ok(taps)
    }

    /// Pixel coordinate that is interpolated at.
    fn position(&self, cx: &mut Ctx, coordinate: ValueId, mode: Mode) -> Result<ValueId> {
        let mut x = self.pixel(cx, coordinate)?;
        if mode == Mode::Nearest {
            x = cx.round(x)?;
        }
        match self.border {
            Border::Nearest if mode != Mode::Cubic => self.clamp(cx, x),
            Border::Reflection => self.reflect(cx, x),
            _ => Ok(x),
        }
    }
}

/// Weights of the four pixels around the fraction `t`.
fn cubic_weights(cx: &mut Ctx, t: ValueId) -> Result<Vec<ValueId>> {
    let [near, far] = cubic_kernel(-0.75);
    let rest = cx.neg(t)?;
    let rest = cx.add_real(rest, 1.0)?;
    let (before, after) = (cx.add_real(t, 1.0)?, cx.add_real(rest, 1.0)?);
    Ok(vec![
        polynomial(cx, before, far)?,
        polynomial(cx, t, near)?,
        polynomial(cx, rest, near)?,
        polynomial(cx, after, far)?,
    ])
}

/// Samples `x: [n, c, spatial..]` at the normalised points of `grid: [n, out.., k]`.
fn grid_sample(cx: &mut Ctx) -> Result<Outs> {
    let mode = cx.choice("mode", "linear", MODES)?;
    let border = cx.choice("padding_mode", "zeros", BORDERS)?;
    let align = cx.flag("align_corners", false)?;
    if (mode, border) == (Mode::Cubic, Border::Nearest) {
        cx.note("cubic taps are clamped to the border one by one, as in PyTorch and onnxruntime; the ONNX reference clamps the position");
    }
    let [x, grid] = cx.first()?;
    let (sx, sg) = (cx.shape_of(x), cx.shape_of(grid));
    let spatial = sampled_axes(&sx, &sg)?;
    let axis = |&extent: &usize| Axis {
        extent,
        align,
        border,
    };
    let axes: Vec<Axis> = spatial.iter().map(axis).collect();
    if let (Mode::Linear, [rows, columns]) = (mode, &axes[..]) {
        return one(bilinear(cx, [x, grid], [rows, columns])?);
    }
    one(by_taps(cx, [x, grid], (&axes, mode))?)
}

/// Samples as sums of taps, each gathered for itself.
fn by_taps(
    cx: &mut Ctx,
    [x, grid]: [ValueId; 2],
    (axes, mode): (&[Axis], Mode),
) -> Result<ValueId> {
    let (sx, sg) = (cx.shape_of(x), cx.shape_of(grid));
    let spatial: Vec<usize> = axes.iter().map(|axis| axis.extent).collect();
    let mut taps = Vec::new();
    for (i, axis) in axes.iter().enumerate() {
        let c = coordinates(cx, grid, spatial.len() - 1 - i)?;
        taps.push(axis.taps(cx, c, mode)?);
    }
    let (n, c) = (sx[0].clone(), sx[1].clone());
    let pixels: usize = spatial.iter().product();
    let flat = cx.reshape(x, [n.clone(), c.clone(), pixels.into()])?;
    let y = weighted_taps(cx, flat, &taps, &spatial)?;
    let mut shape = vec![n, c];
    shape.extend(sg[1..=spatial.len()].iter().cloned());
    cx.reshape(y, shape)
}

/// Bilinear samples of images at the points of a grid.
fn bilinear(cx: &mut Ctx, [x, grid]: [ValueId; 2], axes: [&Axis; 2]) -> Result<ValueId> {
    let (sx, sg) = (cx.shape_of(x), cx.shape_of(grid));
    let points = sg[1].product(&sg[2]);
    let mut positions = Vec::new();
    for (d, axis) in axes.iter().enumerate() {
        let c = coordinates(cx, grid, 1 - d)?;
        let mut at = axis.position(cx, c, Mode::Linear)?;
        if axis.border == Border::Reflection {
            // A mirror is half a pixel beside the last pixel, which both neighbours are there.
            at = axis.clamp(cx, at)?;
        }
        positions.push(cx.reshape(at, [&sg[0], &1.into(), &1.into(), &1.into(), &points])?);
    }
    let positions = cx.concat(&positions, 3)?;
    let y = cx.add(Op::Sample { groups: 1 }, &[x, positions])?;
    cx.reshape(y, [&sx[0], &sx[1], &sg[1], &sg[2]])
}

/// Extents of the image's spatial axes, which the grid must fit.
fn sampled_axes(image: &Shape, grid: &Shape) -> Result<Vec<usize>> {
    let spatial: Option<Vec<usize>> = image.iter().skip(2).map(Dim::as_usize).collect();
    let spatial =
        spatial.ok_or_else(|| Error::unsupported(format!("an image of shape {image}")))?;
    let k = spatial.len();
    let fits = k > 0 && grid.rank() == k + 2 && grid[k + 1].is(k as i64);
    if fits && !spatial.contains(&0) {
        return Ok(spatial);
    }
    let message = format!("a grid of shape {grid} for an image of shape {image}");
    Err(Error::invalid(message))
}

/// Coordinate `i` of all points of the grid: `[n, 1, points]`, of single precision at least.
fn coordinates(cx: &mut Ctx, grid: ValueId, i: usize) -> Result<ValueId> {
    let shape = cx.shape_of(grid);
    let wide = match cx.dtype_of(grid) {
        DType::F64 => DType::F64,
        _ => DType::F32,
    };
    let grid = cx.cast(grid, wide)?;
    let last = shape.rank() - 1;
    let c = cx.slice_axis(grid, last, i, 1)?;
    let points = product(&shape[1..last]);
    cx.reshape(c, [shape[0].clone(), 1.into(), points])
}

/// The sum over all combinations of one tap per axis: `[n, c, points]` from `flat: [n, c, pixels]`.
fn weighted_taps(
    cx: &mut Ctx,
    flat: ValueId,
    taps: &[Vec<Tap>],
    spatial: &[usize],
) -> Result<ValueId> {
    let n_combinations: usize = taps.iter().map(Vec::len).product();
    let mut sum: Option<ValueId> = None;
    for combination in 0..n_combinations {
        let mut rest = combination;
        let mut chosen = Vec::new();
        for axis in taps {
            chosen.push(&axis[rest % axis.len()]);
            rest /= axis.len();
        }
        let v = weighted_tap(cx, flat, &chosen, spatial)?;
        sum = both(cx, ScalarOp::Add, sum, Some(v))?;
    }
    sum.ok_or_else(|| Error::internal("an interpolation without taps"))
}

/// The pixels that one tap per axis names, times the weights, 0 outside.
fn weighted_tap(cx: &mut Ctx, flat: ValueId, taps: &[&Tap], spatial: &[usize]) -> Result<ValueId> {
    let (mut weight, mut inside) = (None, None);
    for tap in taps {
        weight = both(cx, ScalarOp::Mul, weight, tap.weight)?;
        inside = both(cx, ScalarOp::And, inside, tap.inside)?;
    }
    let dtype = cx.dtype_of(flat);
    let mut v = tapped(cx, flat, taps, spatial)?;
    if let Some(w) = weight {
        let w = cx.cast(w, dtype)?;
        v = cx.mul(v, w)?;
    }
    if let Some(inside) = inside {
        let zero = cx.scalar(dtype, 0.0);
        v = cx.select(inside, v, zero)?;
    }
    Ok(v)
}

/// The pixels that one tap per axis names.
fn tapped(cx: &mut Ctx, flat: ValueId, taps: &[&Tap], spatial: &[usize]) -> Result<ValueId> {
    let mut index = None;
    for (tap, &extent) in taps.iter().zip(spatial) {
        let i = cx.cast(tap.index, DType::I64)?;
        index = Some(match index {
            None => i,
            Some(before) => {
                let before = cx.mul_real(before, extent as f64)?;
                cx.add_(before, i)?
            }
        });
    }
    let index = index.ok_or_else(|| Error::internal("an image without axes"))?;
    let (shape, points) = (cx.shape_of(flat), cx.shape_of(index)[2].clone());
    let index = cx.broadcast(index, [shape[0].clone(), shape[1].clone(), points])?;
    cx.add(Op::GatherElements { axis: 2 }, &[flat, index])
}

/// `op` of two operands, or the one that is given.
fn both(
    cx: &mut Ctx,
    op: ScalarOp,
    a: Option<ValueId>,
    b: Option<ValueId>,
) -> Result<Option<ValueId>> {
    match (a, b) {
        (Some(a), Some(b)) => cx.map(op, &[a, b]).map(Some),
        (a, b) => Ok(a.or(b)),
    }
}

/// Adds the columns `[n, c * block, positions]` into images: every column element knows its place.
fn col2im(cx: &mut Ctx) -> Result<Outs> {
    cx.require(&[1, 2])?;
    let columns = Columns::read(cx)?;
    let x = cx.val(0)?;
    let shape = cx.shape_of(x);
    let c = columns.channels(&shape)?;
    let (n, dtype) = (shape[0].clone(), cx.dtype_of(x));
    let (rows, width) = (n.product(&c), columns.taps() * columns.positions());
    let updates = cx.reshape(x, [rows.clone(), width.into()])?;
    let places = cx.i64s(&columns.places(), &[1, width])?;
    let places = cx.broadcast(places, [rows.clone(), width.into()])?;
    let zero = cx.scalar(dtype, 0.0);
    let empty = cx.broadcast(zero, [rows, count(&columns.padded).into()])?;
    let op = Op::ScatterElements {
        axis: 1,
        kind: ScatterKind::Add,
    };
    let full = cx.add(op, &[empty, places, updates])?;
    let mut shape = vec![n, c];
    shape.extend(columns.padded.iter().map(|&n| Dim::from(n)));
    let y = cx.reshape(full, shape)?;
    one(columns.without_pads(cx, y)?)
}

fn count(extents: &[usize]) -> usize {
    extents.iter().fold(1, |n, &d| n.saturating_mul(d))
}

/// Geometry of `Col2Im`, by spatial axis.
struct Columns {
    image: Vec<usize>,
    block: Vec<usize>,
    strides: Vec<usize>,
    dilations: Vec<usize>,
    /// Low sides, then high sides.
    pads: Vec<usize>,
    /// Extents of the image with its pads.
    padded: Vec<usize>,
    /// Number of blocks.
    steps: Vec<usize>,
}

impl Columns {
    fn read(cx: &mut Ctx) -> Result<Columns> {
        let (image, block) = (extents(cx, 1)?, extents(cx, 2)?);
        let k = image.len();
        let pads = list(cx, "pads", 0, 2 * k)?;
        let padded = (0..k).map(|i| image[i] + pads[i] + pads[i + k]).collect();
        let mut columns = Columns {
            strides: list(cx, "strides", 1, k)?,
            dilations: list(cx, "dilations", 1, k)?,
            steps: Vec::new(),
            image,
            block,
            pads,
            padded,
        };
        columns.steps = columns.count_steps()?;
        Ok(columns)
    }

    fn count_steps(&self) -> Result<Vec<usize>> {
        let (image, block, k) = (&self.image, &self.block, self.image.len());
        let bad = || Error::invalid(format!("an image {image:?} does not hold blocks {block:?}"));
        if block.len() != k || k == 0 {
            return Err(bad());
        }
        let mut steps = Vec::new();
        for (i, &size) in block.iter().enumerate() {
            let reach = (size.max(1) - 1) * self.dilations[i] + 1;
            let free = self.padded[i].checked_sub(reach).ok_or_else(bad)?;
            steps.push(free.checked_div(self.strides[i]).ok_or_else(bad)? + 1);
        }
        Ok(steps)
    }

    fn taps(&self) -> usize {
        count(&self.block)
    }

    fn positions(&self) -> usize {
        count(&self.steps)
    }

    /// Number of channels of columns of this shape.
    fn channels(&self, shape: &Shape) -> Result<Dim> {
        let (taps, positions) = (self.taps(), self.positions());
        if taps.saturating_mul(positions).saturating_mul(8) > FOLD_LIMIT_BYTES * 16 {
            return Err(Error::unsupported(format!("{taps} by {positions} columns")));
        }
        let fits = shape.rank() == 3 && taps > 0 && shape[2].is(positions as i64);
        let c = fits.then(|| shape[1].exact_div(&taps.into())).flatten();
        c.ok_or_else(|| {
            Error::invalid(format!(
                "columns {shape}: expected {taps} rows a channel, {positions} columns"
            ))
        })
    }

    /// Row-major position in the padded image of each element of a channel's columns.
    fn places(&self) -> Vec<i64> {
        let n = self.taps() * self.positions();
        (0..n).map(|i| self.place(i) as i64).collect()
    }

    fn place(&self, i: usize) -> usize {
        let positions = self.positions();
        let (mut tap, mut position, mut stride) = (i / positions, i % positions, 1);
        let mut place = 0;
        for axis in (0..self.image.len()).rev() {
            let (block, steps) = (self.block[axis], self.steps[axis]);
            let along = (tap % block) * self.dilations[axis];
            place += (along + (position % steps) * self.strides[axis]) * stride;
            (tap, position) = (tap / block, position / steps);
            stride *= self.padded[axis];
        }
        place
    }

    fn without_pads(&self, cx: &mut Ctx, mut y: ValueId) -> Result<ValueId> {
        for (i, &extent) in self.image.iter().enumerate() {
            if self.padded[i] != extent {
                y = cx.slice_axis(y, 2 + i, self.pads[i], extent)?;
            }
        }
        Ok(y)
    }
}

/// Puts maxima back at their row-major positions; the rest is 0.
fn max_unpool(cx: &mut Ctx) -> Result<Outs> {
    let shape = unpooled_shape(cx)?;
    let wanted = if cx.has(2) {
        Some(extents(cx, 2)?)
    } else {
        None
    };
    let [x, indices] = cx.first()?;
    let (elements, dtype) = (cx.shape_of(x).n_elements(), cx.dtype_of(x));
    let zero = cx.scalar(dtype, 0.0);
    let empty = cx.broadcast(zero, [product(&shape)])?;
    let flat = cx.reshape(x, [elements.clone()])?;
    let places = cx.reshape(indices, [elements])?;
    let op = Op::ScatterElements {
        axis: 0,
        kind: ScatterKind::Set,
    };
    let y = cx.add(op, &[empty, places, flat])?;
    let y = cx.reshape(y, shape.clone())?;
    match wanted {
        Some(wanted) => one(grown(cx, y, &shape, &wanted)?),
        None => one(y),
    }
}

/// The smallest shape that the pooling may have had.
fn unpooled_shape(cx: &mut Ctx) -> Result<Vec<Dim>> {
    let size = cx
        .usizes("kernel_shape")?
        .ok_or_else(|| Error::invalid("kernel_shape is missing"))?;
    let k = size.len();
    let (strides, pads) = (list(cx, "strides", 1, k)?, list(cx, "pads", 0, 2 * k)?);
    let s = cx.ty(0)?.shape;
    if s.rank() != k + 2 || cx.ty(1)?.shape != s {
        let message = format!("kernel_shape {size:?} does not fit {s}");
        return Err(Error::invalid(message));
    }
    let mut shape = vec![s[0].clone(), s[1].clone()];
    for i in 0..k {
        let d = (s[2 + i].clone() - 1.into()).scale(strides[i] as i64) + size[i].into();
        shape.push(d - (pads[i] + pads[i + k]).into());
    }
    Ok(shape)
}

/// `y` with zeros behind it along each axis, up to `wanted`.
fn grown(cx: &mut Ctx, y: ValueId, shape: &[Dim], wanted: &[usize]) -> Result<ValueId> {
    let more = |(w, d): (&usize, &Dim)| (Dim::from(*w) - d.clone()).as_usize();
    let high: Option<Vec<usize>> = wanted.iter().zip(shape).map(more).collect();
    let high = high.filter(|_| wanted.len() == shape.len());
    let high = high.ok_or_else(|| {
        Error::unsupported(format!("output_shape {wanted:?} below the inferred one"))
    })?;
    let fill = cx.scalar_like(y, 0.0);
    let op = Op::Pad {
        low: vec![0; high.len()],
        high,
        mode: PadMode::Constant,
    };
    cx.add(op, &[y, fill])
}
