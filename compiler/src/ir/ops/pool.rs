//! Pooling by means and maxima, positions of maxima, and the gradient of pooling by maxima.

use super::view::pad_with_zeros;
use super::{Extremum, Layout, Op, PoolKind, Window};
use crate::error::Result;
use crate::ir::axes::{channels_first, invert};
use crate::ir::dim::Dim;
use crate::ir::eval::scalar::{Scalar, Wide, beats};
use crate::ir::eval::view::count;
use crate::ir::eval::{Call, view};
use crate::ir::gradient::Vjp;
use crate::ir::graph::{Graph, ValueId};
use crate::ir::infer::{Inferred, channels, windows};
use crate::ir::scalar::ScalarOp;
use crate::ir::types::{Shape, Type};
use crate::ir::work::{Count, Sizes, WorkClass};
use crate::ir::{eval, infer, work};
use gristmill_runtime::{DType, Tensor, with_dtype};

/// Windows of extent `size` over planes of extent `input`.
struct Windows<'a> {
    input: &'a [usize],
    output: &'a [usize],
    size: &'a [usize],
    window: &'a Window,
}

impl Windows<'_> {
    /// Calls `f` with the offset within the plane of each tap of window `number` inside it; gives the number
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

pub(super) fn pool_infer(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(
        op,
        Pool {
            size,
            window,
            ceil,
            layout
        }
    );
    Ok(vec![pool_type(&args[0], size, window, *ceil, *layout)?])
}

fn pool_type(
    x: &Type,
    size: &[usize],
    window: &Window,
    ceil: bool,
    layout: Layout,
) -> Result<Type, String> {
    if x.rank() < 3 || x.dtype == DType::Bool || size.contains(&0) {
        return Err(format!(
            "expected a numeric tensor of rank 3 or more and a non-empty window, got {x}"
        ));
    }
    let n = x.rank() - 2;
    let (c, xs) = match layout {
        Layout::ChannelsFirst => (&x.shape[1], &x.shape[2..]),
        Layout::ChannelsLast => (&x.shape[n + 1], &x.shape[1..=n]),
    };
    let size: Vec<Dim> = size.iter().map(|&s| s.into()).collect();
    let spatial = windows(xs, &size, window, ceil)?;
    Ok(Type {
        dtype: x.dtype,
        shape: Shape(channels(&x.shape[0], c, spatial, layout)),
    })
}

/// A mean accumulates as a reduction does. `avg_include_pad` counts elements within the padded input, so not the part
/// of a last window that `ceil` lets stick out. A window with nothing to count gives NaN (0 for integers), and the
/// dtype's least element for a maximum.
pub(super) fn pool_eval(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(
        c.op,
        Pool {
            kind,
            size,
            window,
            layout
        }
    );
    let to_first = channels_first(c.shape.len(), *layout);
    let x = view::transpose(c.inputs[0], &to_first)?;
    let shape: Vec<usize> = to_first.iter().map(|&p| c.shape[p]).collect();
    let y = match kind {
        PoolKind::Max => max_pool(&x, size, window, &shape)?.swap_remove(0),
        PoolKind::Avg => average(&x, false, size, window, &shape)?,
        PoolKind::AvgIncludePad => average(&x, true, size, window, &shape)?,
    };
    eval::one(view::transpose(&y, &invert(&to_first)))
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

/// One operation per element of each window.
pub(super) fn pool_work(s: &Sizes) -> Count {
    let taps = match s.op {
        Op::Pool { size, .. } | Op::MaxPoolIndices { size, .. } => size.as_slice(),
        _ => &[],
    };
    work::windows(s, work::product(taps.iter().map(|&n| n as u64)))
}

pub(super) fn pool_gradient(v: &mut Vjp) -> Result<()> {
    let Op::Pool {
        kind,
        size,
        window,
        ceil,
        layout,
    } = v.op()
    else {
        return v.refuse("the op is no pooling");
    };
    if kind == PoolKind::Max {
        let op = Op::MaxPoolGrad {
            size,
            window,
            ceil,
            layout,
        };
        let g = v.g()?;
        let gradient = v.emit(op, &[v.x(0), g])?;
        return v.give(0, gradient);
    }
    let of = Mean { size, window };
    let perm = channels_first(v.ty(v.x(0)).rank(), layout);
    let g = v.g()?;
    let g = v.transpose(g, perm.clone())?;
    let x = v.transpose(v.x(0), perm.clone())?;
    let gradient = mean_gradient(v, &of, g, x, kind == PoolKind::AvgIncludePad)?;
    let gradient = v.transpose(gradient, invert(&perm))?;
    v.give(0, gradient)
}

/// Windows of a mean.
struct Mean {
    size: Vec<usize>,
    window: Window,
}

/// The cotangent over the number of elements, spread over each window: by a transposed convolution with ones where windows overlap.
fn mean_gradient(
    v: &mut Vjp,
    of: &Mean,
    g: ValueId,
    x: ValueId,
    counts_pads: bool,
) -> Result<ValueId> {
    let (Some(n), Some(n_windows)) = (spatial(v, x), spatial(v, g)) else {
        return v.refuse("a mean is pooled along an axis of symbolic extent");
    };
    let mut share = g;
    for i in 0..n.len() {
        let counts = of.counts(i, n[i], n_windows[i], counts_pads);
        share = divided(v, share, 2 + i, &counts)?;
    }
    if of.is_tiling() {
        return repeated(v, of, share, &n);
    }
    let share = as_images(v, share)?;
    let taps: Vec<Dim> = [1, 1].iter().chain(&of.size).map(|&n| n.into()).collect();
    let dtype = v.ty(g).dtype;
    let ones = v.full(dtype, &taps, 1.0)?;
    let spread = v.emit(of.spread(&n, &n_windows), &[share, ones])?;
    let shape = v.shape(x);
    v.reshape(spread, &shape)
}

/// Each element of windows side by side, repeated over its window. Elements behind the last window are zero.
fn repeated(v: &mut Vjp, of: &Mean, share: ValueId, n: &[usize]) -> Result<ValueId> {
    let shape = v.shape(share);
    let (mut split, mut tiled, mut joined) = (
        shape[..2].to_vec(),
        shape[..2].to_vec(),
        shape[..2].to_vec(),
    );
    for (windows, &size) in shape[2..].iter().zip(&of.size) {
        split.extend([windows.clone(), 1.into()]);
        tiled.extend([windows.clone(), size.into()]);
        joined.push(windows.scale(size as i64));
    }
    let split = v.reshape(share, &split)?;
    let tiled = v.broadcast(split, &tiled)?;
    let joined = v.reshape(tiled, &joined)?;
    let (mut starts, mut sizes, mut borders) =
        (vec![0.into(); 2], shape[..2].to_vec(), vec![(0, 0); 2]);
    for (i, &n) in n.iter().enumerate() {
        let low = of.window.pads_low[i];
        let covered = v.ty(joined).shape[2 + i]
            .as_usize()
            .map_or(0, |all| all.saturating_sub(low));
        let own = covered.min(n);
        starts.push(low.into());
        sizes.push(own.into());
        borders.push((0, n - own));
    }
    let inner = v.slice(joined, starts, sizes)?;
    pad_with_zeros(v, inner, &borders)
}

/// Extents of the spatial axes.
fn spatial(v: &Vjp, x: ValueId) -> Option<Vec<usize>> {
    v.ty(x).shape.iter().skip(2).map(Dim::as_usize).collect()
}

/// `[n, c, ..]` as `[n * c, 1, ..]`.
fn as_images(v: &mut Vjp, x: ValueId) -> Result<ValueId> {
    let shape = v.shape(x);
    let images = shape[0].product(&shape[1]);
    let flat = [&[images, 1.into()], &shape[2..]].concat();
    v.reshape(x, &flat)
}

/// The quotient by numbers along an axis.
fn divided(v: &mut Vjp, g: ValueId, axis: usize, counts: &[f64]) -> Result<ValueId> {
    let ty = v.ty(g).clone();
    let mut shape = vec![1; ty.rank()];
    shape[axis] = counts.len();
    let counts = Tensor::from_f64s(ty.dtype, &shape, counts)?;
    let counts = v.emit(Op::constant(counts), &[])?;
    v.div(g, counts)
}

impl Mean {
    /// True for windows side by side.
    fn is_tiling(&self) -> bool {
        self.window.strides == self.size && self.window.dilations.iter().all(|&d| d == 1)
    }

    /// Elements of each window along spatial axis `i` of extent `n`, those of the padding among them where they count. A window
    /// without any passes nothing on; it is given 1.
    fn counts(&self, i: usize, n: usize, n_windows: usize, counts_pads: bool) -> Vec<f64> {
        let w = &self.window;
        let (low, high) = (w.pads_low[i], w.pads_high[i]);
        let inside = if counts_pads {
            0..low.saturating_add(n).saturating_add(high)
        } else {
            low..low.saturating_add(n)
        };
        let count = |window: usize| {
            let taps = (0..self.size[i]).map(|tap| window * w.strides[i] + tap * w.dilations[i]);
            taps.filter(|at| inside.contains(at)).count().max(1) as f64
        };
        (0..n_windows).map(count).collect()
    }

    /// The transposed convolution: each element gets the sum over its windows.
    fn spread(&self, n: &[usize], n_windows: &[usize]) -> Op {
        let mut window = self.window.clone();
        let mut output_pads = Vec::new();
        for i in 0..n.len() {
            let reach = (self.size[i] - 1) * window.dilations[i] + 1;
            let end = n_windows[i].saturating_sub(1) * window.strides[i] + reach;
            let needed = window.pads_low[i] + n[i];
            window.pads_high[i] = end.saturating_sub(needed);
            output_pads.push(needed.saturating_sub(end));
        }
        Op::ConvTranspose {
            window,
            output_pads,
            groups: 1,
        }
    }
}

pub(super) fn max_pool_indices_infer(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, MaxPoolIndices { size, window, ceil });
    let values = pool_type(&args[0], size, window, *ceil, Layout::ChannelsFirst)?;
    let indices = Type {
        dtype: DType::I64,
        shape: values.shape.clone(),
    };
    Ok(vec![values, indices])
}

pub(super) fn max_pool_indices_eval(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c.op, MaxPoolIndices { size, window });
    max_pool(c.inputs[0], size, window, c.shape)
}

/// Maxima and their positions, into `shape`. Of equal maxima the first counts, NaN wins; the
/// position of a window inside the padding is -1.
fn max_pool(x: &Tensor, size: &[usize], window: &Window, shape: &[usize]) -> Result<Vec<Tensor>> {
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

pub(super) fn max_pool_indices_gradient(v: &mut Vjp) -> Result<()> {
    let g = v.g()?;
    let gradient = scattered(v, g, v.result(1), v.x(0))?;
    v.give(0, gradient)
}

/// Zeros like `x` with `g` added at row-major positions; -1 is none.
fn scattered(v: &mut Vjp, g: ValueId, at: ValueId, x: ValueId) -> Result<ValueId> {
    let n = v.ty(g).shape.n_elements();
    let is_none = v.with_number(ScalarOp::Lt, at, 0.0)?;
    let g = v.drop_where(is_none, g)?;
    let at = v.drop_where(is_none, at)?;
    let updates = v.reshape(g, std::slice::from_ref(&n))?;
    let at = v.reshape(at, &[n, 1.into()])?;
    let ty = v.ty(x).clone();
    let zeros = v.full(ty.dtype, &[ty.shape.n_elements()], 0.0)?;
    let sum = v.add_at(zeros, at, updates)?;
    v.reshape(sum, &ty.shape)
}

pub(super) fn max_pool_grad_infer(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(
        op,
        MaxPoolGrad {
            size,
            window,
            ceil,
            layout
        }
    );
    let (x, g) = (&args[0], &args[1]);
    let pooled = pool_type(x, size, window, *ceil, *layout)?;
    if !x.dtype.is_float() || *g != pooled {
        return Err(format!(
            "expected floats, and a cotangent {pooled} of the pooled {x}, got {g}"
        ));
    }
    infer::one(x.dtype, x.shape.to_vec())
}

/// Sums in `f64`, rounded once.
pub(super) fn max_pool_grad_eval(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(
        c.op,
        MaxPoolGrad {
            size,
            window,
            layout
        }
    );
    let perm = channels_first(c.shape.len(), *layout);
    let (x, g) = (
        view::transpose(c.inputs[0], &perm)?,
        view::transpose(c.inputs[1], &perm)?,
    );
    let positions = max_pool(&x, size, window, g.shape())?.swap_remove(1);
    let mut sums = vec![0.0; x.len()];
    for (g, &at) in g.to_f64s().iter().zip(positions.as_slice::<i64>()) {
        if let Ok(at) = usize::try_from(at) {
            sums[at] += g;
        }
    }
    let sums = Tensor::from_f64s(x.dtype(), x.shape(), &sums)?;
    eval::one(view::transpose(&sums, &invert(&perm)))
}

/// A comparison and an addition per element of each window, of which there are as many as the last operand has elements.
pub(super) fn max_pool_grad_work(s: &Sizes) -> Count {
    let Op::MaxPoolGrad { size, .. } = s.op else {
        return work::count(WorkClass::Window, 0);
    };
    let taps = work::product(size.iter().map(|&n| n as u64));
    let n_windows = s.elements(s.operands.last());
    work::count(
        WorkClass::Window,
        work::product([2, n_windows, taps].into_iter()),
    )
}

/// It is linear in the cotangent: that takes the elements at the first maxima. The derivative by the pooled operand is zero wherever
/// it exists.
pub(super) fn max_pool_grad_gradient(v: &mut Vjp) -> Result<()> {
    let Op::MaxPoolGrad {
        size,
        window,
        ceil,
        layout,
    } = v.op()
    else {
        return v.refuse("the op is no gradient of a max pooling");
    };
    if !v.needs(1) {
        return Ok(());
    }
    let perm = channels_first(v.ty(v.x(0)).rank(), layout);
    let x = v.transpose(v.x(0), perm.clone())?;
    let g = v.g()?;
    let g = v.transpose(g, perm.clone())?;
    let op = Op::MaxPoolIndices { size, window, ceil };
    let at = v.emit_all(op, &[x])?[1];
    let gradient = gathered(v, g, at)?;
    let gradient = v.transpose(gradient, invert(&perm))?;
    v.give(1, gradient)
}

/// The elements of `g` at row-major positions; zero at -1, which is none.
fn gathered(v: &mut Vjp, g: ValueId, at: ValueId) -> Result<ValueId> {
    let is_none = v.with_number(ScalarOp::Lt, at, 0.0)?;
    let at = v.drop_where(is_none, at)?;
    let n = v.ty(g).shape.n_elements();
    let g = v.reshape(g, &[n])?;
    let elements = v.emit(Op::Gather { axis: 0 }, &[g, at])?;
    v.drop_where(is_none, elements)
}
