//! Gradients of pooling.

use super::super::axes::{channels_first, invert};
use super::super::dim::Dim;
use super::super::graph::ValueId;
use super::super::ops::{Op, PoolKind, Window};
use super::super::scalar::ScalarOp;
use super::Vjp;
use super::view::pad_with_zeros;
use crate::error::Result;
use gristmill_runtime::Tensor;

/// Windows of a mean.
struct Pool {
    size: Vec<usize>,
    window: Window,
}

pub fn pool(v: &mut Vjp) -> Result<()> {
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
    let of = Pool { size, window };
    let perm = channels_first(v.ty(v.x(0)).rank(), layout);
    let g = v.g()?;
    let g = v.transpose(g, perm.clone())?;
    let x = v.transpose(v.x(0), perm.clone())?;
    let gradient = mean(v, &of, g, x, kind == PoolKind::AvgIncludePad)?;
    let gradient = v.transpose(gradient, invert(&perm))?;
    v.give(0, gradient)
}

/// It is linear in the cotangent: that takes the elements at the first maxima. The derivative by the pooled operand is zero wherever
/// it exists.
pub fn max_pool_grad(v: &mut Vjp) -> Result<()> {
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

pub fn max_pool_indices(v: &mut Vjp) -> Result<()> {
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

/// The cotangent over the number of elements, spread over each window: by a transposed convolution with ones where windows overlap.
fn mean(v: &mut Vjp, of: &Pool, g: ValueId, x: ValueId, counts_pads: bool) -> Result<ValueId> {
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
fn repeated(v: &mut Vjp, of: &Pool, share: ValueId, n: &[usize]) -> Result<ValueId> {
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

impl Pool {
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

    /// The transposed convolution that gives each element the sum over its windows.
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
