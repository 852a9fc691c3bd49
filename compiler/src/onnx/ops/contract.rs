//! Matrix products and convolutions.

use super::super::import::{Ctx, OpDef, Outs, one};
use super::norm::per_channel;
use crate::error::{Error, Result};
use crate::ir::{Dim, Layout, Op, ScalarOp, Shape, ValueId, Window};

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("MatMul", (2, 2), matmul),
    OpDef::new("Gemm", (2, 3), gemm),
    OpDef::new("Conv", (2, 3), conv),
    OpDef::new("ConvTranspose", (2, 3), conv_transpose),
];

fn matmul<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let (a, b) = (cx.val(0)?, cx.val(1)?);
    one(matmul_of(cx, a, b)?)
}

/// NumPy `matmul`: a vector on the left is a row, on the right a column, and its axis disappears.
pub(super) fn matmul_of(cx: &mut Ctx<'_, '_>, a: ValueId, b: ValueId) -> Result<ValueId> {
    let (sa, sb) = (cx.shape_of(a), cx.shape_of(b));
    if sa.rank() == 0 || sb.rank() == 0 {
        return Err(Error::invalid("expected rank 1 or more, got a scalar"));
    }
    let one = Dim::constant(1);
    let a = if sa.rank() == 1 {
        cx.b().reshape(a, [one.clone(), sa[0].clone()])?
    } else {
        a
    };
    let b = if sb.rank() == 1 {
        cx.b().reshape(b, [sb[0].clone(), one])?
    } else {
        b
    };
    let r = cx.b().matmul(a, b)?;
    let mut shape = cx.shape_of(r).0;
    if sb.rank() == 1 {
        shape.pop();
    }
    if sa.rank() == 1 {
        shape.remove(shape.len() - if sb.rank() == 1 { 1 } else { 2 });
    }
    cx.b().reshape(r, shape)
}

fn gemm<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let (alpha, beta) = (cx.f("alpha", 1.0)?, cx.f("beta", 1.0)?);
    if cx.opset < 7 {
        cx.flag("broadcast", false)?;
    }
    let transposed = [cx.flag("transA", false)?, cx.flag("transB", false)?];
    let mut args = [cx.val(0)?, cx.val(1)?];
    for i in 0..2 {
        let shape = cx.shape_of(args[i]);
        if shape.rank() != 2 {
            return Err(Error::invalid(format!(
                "operand {i} must be a matrix, got {shape}"
            )));
        }
        if transposed[i] {
            args[i] = cx.b().transpose(args[i], &[1, 0])?;
        }
    }
    let mut y = cx.b().matmul(args[0], args[1])?;
    if alpha != 1.0 {
        y = cx.with_real(ScalarOp::Mul, y, alpha)?;
    }
    let Some(c) = cx.opt(2)?.filter(|_| beta != 0.0) else {
        return one(y);
    };
    let c = if beta == 1.0 {
        c
    } else {
        cx.with_real(ScalarOp::Mul, c, beta)?
    };
    let shape = cx.shape_of(y);
    let y2 = cx.map(ScalarOp::Add, &[y, c])?;
    if cx.shape_of(y2) != shape {
        return Err(Error::invalid(format!(
            "C {} does not broadcast to {shape}",
            cx.shape_of(c)
        )));
    }
    one(y2)
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
    pub fn read(cx: &Ctx<'_, '_>, n: usize) -> Result<Geometry> {
        let list = |name: &'static str, default: usize, len: usize| -> Result<Vec<usize>> {
            let v = cx.usizes(name)?.unwrap_or_else(|| vec![default; len]);
            if v.len() != len {
                return Err(Error::invalid(format!(
                    "attribute {name} = {v:?} needs {len} entries"
                )));
            }
            Ok(v)
        };
        let pads = list("pads", 0, 2 * n)?;
        let choices = &["NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"];
        let padding = match cx.name("auto_pad", "NOTSET", choices)? {
            "SAME_UPPER" => Padding::SameUpper,
            "SAME_LOWER" => Padding::SameLower,
            "VALID" => Padding::Given(vec![0; 2 * n]),
            _ => Padding::Given(pads),
        };
        let (strides, dilations) = (list("strides", 1, n)?, list("dilations", 1, n)?);
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
        let (low, high) = match &self.padding {
            Padding::Given(p) => (p[..n].to_vec(), p[n..].to_vec()),
            same => {
                let mut pads = (Vec::new(), Vec::new());
                for i in 0..n {
                    let extent = spatial[i].as_usize();
                    let extent = extent.ok_or_else(|| {
                        Error::unsupported(format!("auto_pad over the extent {}", spatial[i]))
                    })?;
                    let out = extent.div_ceil(self.strides[i]);
                    let reach = (out.max(1) - 1) * self.strides[i]
                        + (size[i].max(1) - 1) * self.dilations[i]
                        + 1;
                    let total = reach.saturating_sub(extent);
                    let low = if matches!(same, Padding::SameUpper) {
                        total / 2
                    } else {
                        total - total / 2
                    };
                    pads.0.push(low);
                    pads.1.push(total - low);
                }
                pads
            }
        };
        Ok(Window {
            strides: self.strides,
            dilations: self.dilations,
            pads_low: low,
            pads_high: high,
        })
    }
}

/// Static extents of the spatial axes of weights, checked against `kernel_shape`.
fn kernel_extents(cx: &Ctx<'_, '_>, weights: &Shape) -> Result<Vec<usize>> {
    let size: Option<Vec<usize>> = weights.iter().skip(2).map(Dim::as_usize).collect();
    let size = size.ok_or_else(|| Error::unsupported(format!("weights of shape {weights}")))?;
    match cx.usizes("kernel_shape")? {
        Some(k) if k != size => Err(Error::invalid(format!(
            "kernel_shape {k:?}, but weights are {weights}"
        ))),
        _ => Ok(size),
    }
}

fn group_count(cx: &Ctx<'_, '_>) -> Result<usize> {
    let groups = cx.i("group", 1)?;
    usize::try_from(groups)
        .ok()
        .filter(|g| *g > 0)
        .ok_or_else(|| Error::invalid(format!("group {groups}")))
}

/// The convolution of `x` and `w` by the node's attributes, without bias.
pub(super) fn conv_of(cx: &mut Ctx<'_, '_>, x: ValueId, w: ValueId) -> Result<ValueId> {
    let (sx, sw) = (cx.shape_of(x), cx.shape_of(w));
    if sx.rank() < 3 || sx.rank() != sw.rank() {
        return Err(Error::invalid(format!(
            "expected x and weights of one rank of at least 3, got {sx} and {sw}"
        )));
    }
    let groups = group_count(cx)?;
    let size = kernel_extents(cx, &sw)?;
    let window = Geometry::read(cx, size.len())?.window(&sx[2..], &size)?;
    cx.add(
        Op::Conv {
            window,
            groups,
            layout: Layout::ChannelsFirst,
        },
        &[x, w],
    )
}

fn with_bias(cx: &mut Ctx<'_, '_>, y: ValueId) -> Result<ValueId> {
    let Some(bias) = cx.opt(2)? else { return Ok(y) };
    let rank = cx.shape_of(y).rank();
    let bias = per_channel(cx, bias, rank)?;
    cx.map(ScalarOp::Add, &[y, bias])
}

fn conv<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let (x, w) = (cx.val(0)?, cx.val(1)?);
    let y = conv_of(cx, x, w)?;
    one(with_bias(cx, y)?)
}

fn conv_transpose<'m>(cx: &mut Ctx<'_, 'm>) -> Result<Outs<'m>> {
    let (x, w) = (cx.val(0)?, cx.val(1)?);
    let (sx, sw) = (cx.shape_of(x), cx.shape_of(w));
    if sx.rank() < 3 || sx.rank() != sw.rank() {
        return Err(Error::invalid(format!(
            "expected x and weights of one rank of at least 3, got {sx} and {sw}"
        )));
    }
    let groups = group_count(cx)?;
    let size = kernel_extents(cx, &sw)?;
    let geometry = Geometry::read(cx, size.len())?;
    let mut output_pads = cx
        .usizes("output_padding")?
        .unwrap_or_else(|| vec![0; size.len()]);
    let output_shape = cx.usizes("output_shape")?;
    if output_pads.len() != size.len() {
        return Err(Error::invalid(format!(
            "output_padding {output_pads:?} needs {} entries",
            size.len()
        )));
    }
    let window = transposed_window(geometry, &sx[2..], &size, output_shape, &mut output_pads)?;
    let y = cx.add(
        Op::ConvTranspose {
            window,
            output_pads,
            groups,
        },
        &[x, w],
    )?;
    one(with_bias(cx, y)?)
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
    let upper = matches!(g.padding, Padding::SameUpper);
    let wanted = match (wanted, &g.padding) {
        (Some(w), _) => Some(w[w.len().saturating_sub(n)..].to_vec()),
        (None, Padding::Given(_)) => None,
        (None, _) => Some(
            (0..n)
                .map(|i| spatial[i].as_usize().map(|d| d * g.strides[i]))
                .collect::<Option<Vec<usize>>>()
                .ok_or_else(|| Error::unsupported("auto_pad over symbolic extents"))?,
        ),
    };
    let (mut low, mut high) = match &g.padding {
        Padding::Given(p) => (p[..n].to_vec(), p[n..].to_vec()),
        _ => (vec![0; n], vec![0; n]),
    };
    if let Some(wanted) = wanted {
        for i in 0..n {
            let extent = spatial[i].as_usize();
            let extent =
                extent.ok_or_else(|| Error::unsupported("output_shape over symbolic extents"))?;
            let out = *wanted
                .get(i)
                .ok_or_else(|| Error::invalid("output_shape is too short"))?;
            let full = g.strides[i] * extent.saturating_sub(1)
                + output_pads[i]
                + (size[i].max(1) - 1) * g.dilations[i]
                + 1;
            let total = full.saturating_sub(out);
            output_pads[i] += out.saturating_sub(full);
            low[i] = if upper { total / 2 } else { total - total / 2 };
            high[i] = total - low[i];
        }
    }
    Ok(Window {
        strides: g.strides,
        dilations: g.dilations,
        pads_low: low,
        pads_high: high,
    })
}
