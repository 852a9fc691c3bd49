//! Matrix products and convolutions.

use super::super::import::{Ctx, OpDef, Outs, one};
use super::norm::per_channel;
use crate::error::{Error, Result};
use crate::ir::{Dim, Layout, Op, Shape, ValueId, Window, infer};
use gristmill_runtime::DType;

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("MatMul", (2, 2), matmul),
    OpDef::new("Gemm", (2, 3), gemm),
    OpDef::new("Conv", (2, 3), conv),
    OpDef::new("ConvTranspose", (2, 3), conv_transpose),
    OpDef::new("DeformConv", (3, 5), deform_conv),
];

fn matmul(cx: &mut Ctx) -> Result<Outs> {
    let [a, b] = cx.first()?;
    one(matmul_of(cx, a, b)?)
}

/// NumPy `matmul`: a vector on the left is a row, on the right a column, and its axis disappears.
pub(super) fn matmul_of(cx: &mut Ctx, mut a: ValueId, mut b: ValueId) -> Result<ValueId> {
    let (sa, sb) = (cx.shape_of(a), cx.shape_of(b));
    if sa.rank() == 0 || sb.rank() == 0 {
        return Err(Error::invalid("expected rank 1 or more, got a scalar"));
    }
    if sa.rank() == 1 {
        a = cx.reshape(a, [&1.into(), &sa[0]])?;
    }
    if sb.rank() == 1 {
        b = cx.reshape(b, [&sb[0], &1.into()])?;
    }
    let r = cx.matmul(a, b)?;
    let mut shape = cx.shape_of(r).0;
    let columns = shape.pop().expect("a product is a matrix");
    if sa.rank() == 1 {
        shape.pop();
    }
    if sb.rank() != 1 {
        shape.push(columns);
    }
    cx.reshape(r, shape)
}

fn gemm(cx: &mut Ctx) -> Result<Outs> {
    let (alpha, beta) = (cx.f("alpha", 1.0)?, cx.f("beta", 1.0)?);
    if cx.opset < 7 {
        cx.flag("broadcast", false)?;
    }
    let (a, b) = (
        gemm_operand(cx, 0, "transA")?,
        gemm_operand(cx, 1, "transB")?,
    );
    let mut y = cx.matmul(a, b)?;
    if alpha != 1.0 {
        y = cx.mul_real(y, alpha)?;
    }
    let Some(mut c) = cx.opt(2)?.filter(|_| beta != 0.0) else {
        return one(y);
    };
    if beta != 1.0 {
        c = cx.mul_real(c, beta)?;
    }
    let (shape, sc) = (cx.shape_of(y), cx.shape_of(c));
    let sum = cx.add_(y, c)?;
    if cx.shape_of(sum) != shape {
        let message = format!("C {sc} does not broadcast to {shape}");
        return Err(Error::invalid(message));
    }
    one(sum)
}

/// A matrix, transposed when the attribute says so.
fn gemm_operand(cx: &mut Ctx, i: usize, transposed: &'static str) -> Result<ValueId> {
    let x = cx.val(i)?;
    let shape = cx.shape_of(x);
    if shape.rank() != 2 {
        let message = format!("operand {i} must be a matrix, got {shape}");
        return Err(Error::invalid(message));
    }
    if cx.flag(transposed, false)? {
        cx.transpose(x, &[1, 0])
    } else {
        Ok(x)
    }
}

/// Where windows are padded: as numbers, or so that the output has a wanted size.
pub(super) enum Padding {
    /// Low sides, then high sides.
    Given(Vec<usize>),
    /// `ceil(extent / stride)` outputs, the odd element of padding on the high side.
    SameUpper,
    /// The same, the odd element on the low side.
    SameLower,
}

/// Strides, dilations and padding of a window operator over `n` spatial axes.
pub(super) struct Geometry {
    pub strides: Vec<usize>,
    pub dilations: Vec<usize>,
    pub padding: Padding,
}

impl Geometry {
    /// Reads `strides`, `dilations`, `pads` and `auto_pad`.
    pub fn read(cx: &Ctx, n: usize) -> Result<Geometry> {
        let pads = list(cx, "pads", 0, 2 * n)?;
        let names = &["NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"];
        let padding = match cx.name("auto_pad", "NOTSET", names)? {
            "SAME_UPPER" => Padding::SameUpper,
            "SAME_LOWER" => Padding::SameLower,
            "VALID" => Padding::Given(vec![0; 2 * n]),
            _ => Padding::Given(pads),
        };
        let strides = list(cx, "strides", 1, n)?;
        let dilations = list(cx, "dilations", 1, n)?;
        if strides.iter().chain(&dilations).any(|&s| s == 0) {
            return Err(Error::invalid("strides and dilations must be positive"));
        }
        Ok(Geometry {
            strides,
            dilations,
            padding,
        })
    }

    /// The windows of extent `size` over `spatial`.
    pub fn window(self, spatial: &[Dim], size: &[usize]) -> Result<Window> {
        let n = spatial.len();
        let (mut low, mut high) = self.given_pads(n);
        if !matches!(self.padding, Padding::Given(_)) {
            for i in 0..n {
                let extent = spatial[i].as_usize();
                let extent = extent.ok_or_else(|| {
                    Error::unsupported(format!("auto_pad over the extent {}", spatial[i]))
                })?;
                let steps = extent.div_ceil(self.strides[i]).max(1) - 1;
                let reach = steps * self.strides[i] + self.reach(i, size[i]);
                (low[i], high[i]) = self.shared(reach.saturating_sub(extent));
            }
        }
        Ok(self.padded(low, high))
    }

    /// Pads given as numbers, 0 without.
    fn given_pads(&self, n: usize) -> (Vec<usize>, Vec<usize>) {
        match &self.padding {
            Padding::Given(p) => (p[..n].to_vec(), p[n..].to_vec()),
            _ => (vec![0; n], vec![0; n]),
        }
    }

    /// Elements from the first to the last tap of a window.
    fn reach(&self, axis: usize, size: usize) -> usize {
        (size.max(1) - 1) * self.dilations[axis] + 1
    }

    /// The parts of a padding on the low and the high side.
    fn shared(&self, total: usize) -> (usize, usize) {
        let half = total / 2;
        match self.padding {
            Padding::SameUpper => (half, total - half),
            _ => (total - half, half),
        }
    }

    fn padded(self, pads_low: Vec<usize>, pads_high: Vec<usize>) -> Window {
        Window {
            strides: self.strides,
            dilations: self.dilations,
            pads_low,
            pads_high,
        }
    }
}

/// Static extents of the spatial axes of weights, checked against `kernel_shape`.
fn kernel_extents(cx: &Ctx, weights: &Shape) -> Result<Vec<usize>> {
    let size: Option<Vec<usize>> = weights.iter().skip(2).map(Dim::as_usize).collect();
    let size = size.ok_or_else(|| Error::unsupported(format!("weights of shape {weights}")))?;
    match cx.usizes("kernel_shape")? {
        Some(k) if k != size => Err(Error::invalid(format!(
            "kernel_shape {k:?}, but weights are {weights}"
        ))),
        _ => Ok(size),
    }
}

fn group_count(cx: &Ctx, name: &'static str) -> Result<usize> {
    let groups = cx.i(name, 1)?;
    usize::try_from(groups)
        .ok()
        .filter(|g| *g > 0)
        .ok_or_else(|| Error::invalid(format!("{name} is {groups}, expected 1 or more")))
}

/// The convolution of `x` and `w` by the node's attributes, without bias.
pub(super) fn conv_of(cx: &mut Ctx, x: ValueId, w: ValueId) -> Result<ValueId> {
    let (sx, size) = conv_shapes(cx, x, w)?;
    let groups = group_count(cx, "group")?;
    let window = Geometry::read(cx, size.len())?.window(&sx[2..], &size)?;
    if size == [3, 3] && window.strides == [1, 1] && groups == 1 {
        cx.note("windows of 3x3 may be summed by minimal filtering where that is faster: f32 in another order, errors up to 2e-5 of the largest output; --conv direct forbids it");
    }
    let op = Op::Conv {
        window,
        groups,
        layout: Layout::ChannelsFirst,
    };
    cx.add(op, &[x, w])
}

/// Shape of `x`, and extents of the kernel.
fn conv_shapes(cx: &mut Ctx, x: ValueId, w: ValueId) -> Result<(Shape, Vec<usize>)> {
    let (sx, sw) = (cx.shape_of(x), cx.shape_of(w));
    if sx.rank() < 3 || sx.rank() != sw.rank() {
        return Err(Error::invalid(format!(
            "expected x and weights of one rank of at least 3, got {sx} and {sw}"
        )));
    }
    let size = kernel_extents(cx, &sw)?;
    Ok((sx, size))
}

fn with_bias(cx: &mut Ctx, y: ValueId, operand: usize) -> Result<ValueId> {
    let Some(bias) = cx.opt(operand)? else {
        return Ok(y);
    };
    let rank = cx.shape_of(y).rank();
    let bias = per_channel(cx, bias, rank)?;
    cx.add_(y, bias)
}

fn conv(cx: &mut Ctx) -> Result<Outs> {
    one(biased_conv(cx)?)
}

/// The convolution of operands 0 and 1, with operand 2 for a bias where it is given.
pub(super) fn biased_conv(cx: &mut Ctx) -> Result<ValueId> {
    let [x, w] = cx.first()?;
    let y = conv_of(cx, x, w)?;
    with_bias(cx, y, 2)
}

fn conv_transpose(cx: &mut Ctx) -> Result<Outs> {
    let [x, w] = cx.first()?;
    let (sx, size) = conv_shapes(cx, x, w)?;
    let groups = group_count(cx, "group")?;
    let geometry = Geometry::read(cx, size.len())?;
    let mut output_pads = list(cx, "output_padding", 0, size.len())?;
    let wanted = cx.usizes("output_shape")?;
    let window = transposed_window(geometry, &sx[2..], &size, wanted, &mut output_pads)?;
    let op = Op::ConvTranspose {
        window,
        output_pads,
        groups,
    };
    let y = cx.add(op, &[x, w])?;
    one(with_bias(cx, y, 2)?)
}

/// Samples at the taps of moved windows, then a product by the weights for each group.
fn deform_conv(cx: &mut Ctx) -> Result<Outs> {
    let [x, w, offsets] = cx.first()?;
    let (sx, size) = conv_shapes(cx, x, w)?;
    if size.len() != 2 {
        let n = size.len();
        let message = format!("expected images with 2 spatial axes, got {n}");
        return Err(Error::unsupported(message));
    }
    let moved = Deformed {
        window: Geometry::read(cx, 2)?.window(&sx[2..], &size)?,
        taps: [size[0], size[1]],
        groups: group_count(cx, "offset_group")?,
    };
    let plane = moved.plane(&sx)?;
    let positions = moved.positions(cx, (x, offsets), &plane)?;
    let mut operands = vec![x, positions];
    if let Some(mask) = cx.opt(4)? {
        operands.push(moved.of_taps(cx, mask, &sx[0], (1, "a mask"), &plane)?);
    }
    let groups = moved.groups;
    let samples = cx.add(Op::Sample { groups }, &operands)?;
    let [rows, columns] = plane;
    let shape = [&sx[0], &sx[1], &moved.n_taps().into(), &rows, &columns];
    let windows = cx.reshape(samples, shape)?;
    let y = columns_by_weights(cx, windows, w)?;
    one(with_bias(cx, y, 3)?)
}

/// Windows whose taps are moved, in groups of channels.
struct Deformed {
    window: Window,
    taps: [usize; 2],
    groups: usize,
}

impl Deformed {
    fn n_taps(&self) -> usize {
        self.taps[0].saturating_mul(self.taps[1])
    }

    /// Rows and columns of windows over images of a shape.
    fn plane(&self, image: &Shape) -> Result<[Dim; 2]> {
        let taps = self.taps.map(Dim::from);
        let plane = infer::windows(&image[2..], &taps, &self.window, false);
        let plane = plane.map_err(Error::invalid)?;
        <[Dim; 2]>::try_from(plane).map_err(|_| Error::internal("windows of another rank"))
    }

    /// `[n, groups * taps * k, rows, columns]` as `[n, groups, taps, k, points]`, without a `k` of 1.
    fn of_taps(
        &self,
        cx: &mut Ctx,
        v: ValueId,
        n: &Dim,
        (k, name): (usize, &str),
        [rows, columns]: &[Dim; 2],
    ) -> Result<ValueId> {
        let channels = self.groups.saturating_mul(self.n_taps()).saturating_mul(k);
        let expected = Shape(vec![
            n.clone(),
            channels.into(),
            rows.clone(),
            columns.clone(),
        ]);
        let found = cx.shape_of(v);
        if found != expected {
            let message = format!("expected {name} of shape {expected}, got {found}");
            return Err(Error::invalid(message));
        }
        let mut shape = vec![n.clone(), self.groups.into(), self.n_taps().into()];
        shape.extend((k > 1).then(|| Dim::from(k)));
        shape.push(rows.product(columns));
        cx.reshape(v, shape)
    }

    /// Positions of all taps: those of the window, moved by the offsets.
    fn positions(
        &self,
        cx: &mut Ctx,
        (x, offsets): (ValueId, ValueId),
        plane: &[Dim; 2],
    ) -> Result<ValueId> {
        let n = cx.shape_of(x)[0].clone();
        let wide = match cx.dtype_of(offsets) {
            DType::F64 => DType::F64,
            _ => DType::F32,
        };
        let offsets = self.of_taps(cx, offsets, &n, (2, "offsets"), plane)?;
        let offsets = cx.cast(offsets, wide)?;
        let [height, width] = self.taps;
        let [rows, columns] = plane;
        let shape = [height.into(), width.into(), rows.clone(), columns.clone()];
        let mut along = Vec::new();
        for d in 0..2 {
            let at = cx.iota(shape.to_vec(), 2 + d)?;
            let at = cx.mul_real(at, self.window.strides[d] as f64)?;
            let tap = cx.iota(shape.to_vec(), d)?;
            let tap = cx.mul_real(tap, self.window.dilations[d] as f64)?;
            let at = cx.add_(at, tap)?;
            let at = cx.add_real(at, -(self.window.pads_low[d] as f64))?;
            let at = cx.reshape(at, [self.n_taps().into(), 1.into(), rows.product(columns)])?;
            along.push(cx.cast(at, wide)?);
        }
        let unmoved = cx.concat(&along, 1)?;
        cx.add_(offsets, unmoved)
    }
}

/// The product of windows `[n, c, taps, rows, columns]` and weights `[m, c / groups, ..]`: `[n, m, rows, columns]`.
fn columns_by_weights(cx: &mut Ctx, windows: ValueId, weights: ValueId) -> Result<ValueId> {
    let (found, sw) = (cx.shape_of(windows), cx.shape_of(weights));
    let [n, channels, taps, rows, columns] = &found[..] else {
        return Err(Error::internal("windows of another rank"));
    };
    let groups = group_count(cx, "group")?;
    let per_group = sw[0].exact_div(&groups.into());
    let Some(per_group) = per_group.filter(|_| *channels == sw[1].scale(groups as i64)) else {
        let message = format!("{channels} channels and weights {sw} do not fit in {groups} groups");
        return Err(Error::invalid(message));
    };
    let (groups, depth) = (Dim::from(groups), sw[1].product(taps));
    let windows = cx.reshape(windows, [n, &groups, &depth, &rows.product(columns)])?;
    let matrices = cx.reshape(weights, [&groups, &per_group, &depth])?;
    let y = cx.matmul(matrices, windows)?;
    cx.reshape(y, [n, &sw[0], rows, columns])
}

/// A list attribute of `n` entries.
pub(super) fn list(cx: &Ctx, name: &'static str, default: usize, n: usize) -> Result<Vec<usize>> {
    let v = cx.usizes(name)?.unwrap_or_else(|| vec![default; n]);
    if v.len() == n {
        return Ok(v);
    }
    let message = format!("attribute {name} = {v:?} needs {n} entries");
    Err(Error::invalid(message))
}

/// Padding of a transposed convolution, from the wanted output where one is given.
fn transposed_window(
    g: Geometry,
    spatial: &[Dim],
    size: &[usize],
    wanted: Option<Vec<usize>>,
    output_pads: &mut [usize],
) -> Result<Window> {
    let n = size.len();
    let (mut low, mut high) = g.given_pads(n);
    if wanted.is_none() && matches!(g.padding, Padding::Given(_)) {
        return Ok(g.padded(low, high));
    }
    // Axes of the batch and the channels may be among those of the wanted shape.
    let wanted = wanted.map(|w| w[w.len().saturating_sub(n)..].to_vec());
    for i in 0..n {
        let extent = spatial[i]
            .as_usize()
            .ok_or_else(|| Error::unsupported("output_shape or auto_pad over symbolic extents"))?;
        let to = match &wanted {
            Some(w) => w.get(i).copied(),
            None => Some(extent * g.strides[i]),
        };
        let to = to.ok_or_else(|| Error::invalid("output_shape is too short"))?;
        let full = g.strides[i] * extent.saturating_sub(1) + output_pads[i] + g.reach(i, size[i]);
        output_pads[i] += to.saturating_sub(full);
        (low[i], high[i]) = g.shared(full.saturating_sub(to));
    }
    Ok(g.padded(low, high))
}
