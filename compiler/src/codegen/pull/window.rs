//! Windows: poolings, and the positions of taps.

use super::heavy::{ValueOf, no_code};
use super::reduce::{accumulator, beats, extreme_bits};
use super::{Emit, Ix, Kind, Order, Puller};
use crate::codegen::body::Body;
use crate::error::Result;
use crate::ir::{Extremum, Layout, Node, Op, PoolKind, ScalarOp, ValueId, Window};
use gristmill_runtime::DType;
use std::hash::Hash;

/// Input positions of a window's tap, and the condition that they lie inside; `None` when they
/// always do.
type Tap<E> = (Vec<Ix<ValueOf<E>>>, Option<ValueOf<E>>);

/// A pooling at an index of its result; the gradient of one at an index of its operand.
#[derive(Clone, Copy)]
struct Pooling<'a, V> {
    x: ValueId,
    dtype: DType,
    shape: &'a [usize],
    size: &'a [usize],
    window: &'a Window,
    layout: Layout,
    at: &'a [Ix<V>],
}

impl<'a, V: Copy> Pooling<'a, V> {
    fn new(body: &'a Body, node: &'a Node, at: &'a [Ix<V>]) -> Result<Pooling<'a, V>> {
        let (size, window, layout) = match &node.op {
            Op::Pool {
                size,
                window,
                layout,
                ..
            } => (size, window, *layout),
            Op::MaxPoolGrad {
                size,
                window,
                layout,
                ..
            } => (size, window, *layout),
            Op::MaxPoolIndices { size, window, .. } => (size, window, Layout::ChannelsFirst),
            op => return Err(no_code(op)),
        };
        let x = node.inputs[0];
        Ok(Pooling {
            x,
            dtype: body.dtype(x),
            shape: body.shape(x),
            size,
            window,
            layout,
            at,
        })
    }

    /// Index in the input of a tap of the window, and the condition that it lies inside.
    fn tap<E: Emit<Value = V>>(&self, e: &mut E, tap: &[Ix<V>]) -> Result<Tap<E>> {
        let outer = spatial_axes(self.layout, self.at);
        let spatial = spatial_axes(self.layout, self.shape);
        let (position, inside) = tap_positions(e, outer, tap, self.window, spatial)?;
        let channel = channel_axis(self.layout, self.at);
        let from = activation_index(self.layout, self.at[0], channel, &position);
        Ok((from, inside))
    }

    /// The condition that a tap lies inside the input and its padding; `None` when it always does.
    fn is_padded_tap<E: Emit<Value = V>>(&self, e: &mut E, tap: &[Ix<V>]) -> Result<Option<V>> {
        let outer = spatial_axes(self.layout, self.at);
        let bare = Window {
            pads_low: vec![0; outer.len()],
            ..self.window.clone()
        };
        let pads = self.window.pads_low.iter().zip(&self.window.pads_high);
        let spatial = spatial_axes(self.layout, self.shape).iter();
        let padded: Vec<usize> = spatial.zip(pads).map(|(d, (l, h))| d + l + h).collect();
        Ok(tap_positions(e, outer, tap, &bare, &padded)?.1)
    }

    /// Along axis `d`: a window, counted backwards from the last that begins before position `at`, and its distance to that.
    fn back_along<E: Emit<Value = V>>(
        &self,
        e: &mut E,
        d: usize,
        at: Ix<V>,
        back: Ix<V>,
        n_windows: usize,
    ) -> (V, V) {
        let stride = self.window.strides[d];
        let padded = e.add(at, Ix::C(self.window.pads_low[d] as i64));
        let (last, _) = e.div_rem(padded, stride);
        let (last, end) = (e.val(last), e.index(n_windows as i64 - 1));
        let (last, back) = (e.index_min(last, end), e.val(back));
        let window = e.index_sub(last, back);
        let start = e.mul(Ix::V(window), stride as i64);
        let (start, padded) = (e.val(start), e.val(padded));
        (window, e.index_sub(padded, start))
    }

    /// Index of a window that may have the element `at`, counted backwards along each axis from the last that begins before it,
    /// and the condition that there is such a window and that it reaches the element.
    fn window_back<E: Emit<Value = V>>(
        &self,
        e: &mut E,
        back: &[Ix<V>],
        n_windows: &[usize],
    ) -> Result<Tap<E>> {
        let at = spatial_axes(self.layout, self.at);
        let (mut inside, mut position) = (None, Vec::new());
        for d in 0..at.len() {
            let (window, offset) = self.back_along(e, d, at[d], back[d], n_windows[d]);
            let exists = e.compare_const(Order::AtLeast, Ix::V(window), 0);
            let reach = (self.size[d] - 1) * self.window.dilations[d] + 1;
            let reaches = e.compare_const(Order::Less, Ix::V(offset), reach as i64);
            let both = e.both(exists, reaches)?;
            inside = Some(e.all(inside, both)?);
            position.push(Ix::V(window));
        }
        let channel = channel_axis(self.layout, self.at);
        let window = activation_index(self.layout, self.at[0], channel, &position);
        Ok((window, inside))
    }
}

impl<V: Copy + Eq + Hash> Puller<'_, V> {
    /// Element of the result of a pooling, of its gradient, or of regions of interest.
    pub(super) fn window<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        node: &Node,
        result: usize,
        at: &[Ix<V>],
    ) -> Result<V> {
        match node.op {
            Op::MaxPoolGrad { .. } => self.max_pool_grad(e, node, at),
            Op::RoiAlign { .. } => self.roi_align(e, node, at),
            _ => self.pool(e, node, result, at),
        }
    }

    /// Element of a pooling's result; of the positions of maxima when `result` is 1.
    fn pool<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        node: &Node,
        result: usize,
        at: &[Ix<V>],
    ) -> Result<V> {
        let plan = Pooling::new(self.body, node, at)?;
        match &node.op {
            Op::Pool {
                kind: PoolKind::Max,
                ..
            } => Ok(self.max_pool(e, &plan)?.0),
            Op::Pool { kind, .. } => self.average_pool(e, &plan, *kind),
            _ => {
                let (value, position) = self.max_pool(e, &plan)?;
                self.remember(node.outputs[0], at, value);
                self.remember(node.outputs[1], at, position);
                Ok(if result == 0 { value } else { position })
            }
        }
    }

    /// Element of the gradient of a max pooling: the sum over the windows whose first maximum it is.
    fn max_pool_grad<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        node: &Node,
        at: &[Ix<V>],
    ) -> Result<V> {
        let plan = Pooling::new(self.body, node, at)?;
        let (g, acc) = (node.inputs[1], accumulator(plan.dtype));
        let n_windows = spatial_axes(plan.layout, self.body.shape(g));
        let over = |d: usize| windows_over(plan.size, plan.window, d).min(n_windows[d]);
        let extents: Vec<usize> = (0..n_windows.len()).map(over).collect();
        let own = e.linearise(at, plan.shape);
        let (own, zero) = (e.val(own), e.constant(acc, 0));
        let sum = self.loops(e, &extents, &[zero], &mut |s, e, back, carried| {
            let (window, inside) = plan.window_back(e, back, n_windows)?;
            let pooled = Pooling {
                at: &window,
                ..plan
            };
            let add = |s: &mut Self, e: &mut E, sum| s.add_where_first(e, &pooled, own, g, sum);
            Ok(vec![s.guarded(e, inside, acc, carried[0], add)?])
        })?;
        e.convert(sum[0], acc, plan.dtype)
    }

    /// `sum` and the element of `g` of a window, if the window's first maximum is at row-major position `own`.
    fn add_where_first<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        pooled: &Pooling<V>,
        own: V,
        g: ValueId,
        sum: V,
    ) -> Result<V> {
        let (_, first) = self.max_pool(e, pooled)?;
        let first = e.i64_to_index(first);
        let is_own = e.index_compare(Order::Equal, first, own);
        let add = |s: &mut Self, e: &mut E, sum| s.add_element(e, sum, g, pooled.at);
        self.guarded(e, Some(is_own), accumulator(pooled.dtype), sum, add)
    }

    fn average_pool<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        plan: &Pooling<V>,
        kind: PoolKind,
    ) -> Result<V> {
        let acc = accumulator(plan.dtype);
        let (sum, count) = (e.constant(acc, 0), e.index(0));
        let out = self.loops(e, plan.size, &[sum, count], &mut |s, e, tap, carried| {
            let (from, inside) = plan.tap(e, tap)?;
            let sum = s.guarded(e, inside, acc, carried[0], |s, e, sum| {
                s.add_element(e, sum, plan.x, &from)
            })?;
            let counted = match kind {
                PoolKind::AvgIncludePad => plan.is_padded_tap(e, tap)?,
                _ => inside,
            };
            let one = counted.map(|c| e.truth_to_index(c));
            let one = one.unwrap_or_else(|| e.index(1));
            Ok(vec![sum, e.index_add(carried[1], one)])
        })?;
        let result = average(e, acc, out[0], out[1])?;
        e.convert(result, acc, plan.dtype)
    }

    /// `sum + x[at]` in the accumulator's dtype.
    fn add_element<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        sum: V,
        x: ValueId,
        at: &[Ix<V>],
    ) -> Result<V> {
        let dtype = self.body.dtype(x);
        let acc = accumulator(dtype);
        let v = self.value(e, x, at)?;
        let v = e.convert(v, dtype, acc)?;
        e.scalar_op(ScalarOp::Add, &[acc, acc], &[sum, v])
    }

    /// Largest element of a window and its row-major position in the whole input (-1 when the window
    /// holds only padding).
    fn max_pool<E: Emit<Value = V>>(&mut self, e: &mut E, plan: &Pooling<V>) -> Result<(V, V)> {
        let dtype = plan.dtype;
        let smallest = e.constant(dtype, extreme_bits(dtype, Extremum::Max));
        let none = e.index(-1);
        let best = self.loops(
            e,
            plan.size,
            &[smallest, none],
            &mut |s, e, tap, carried| {
                let (from, inside) = plan.tap(e, tap)?;
                let Some(inside) = inside else {
                    return s.larger(e, plan.x, &from, carried);
                };
                e.branch(
                    inside,
                    &[Kind::Element(dtype), Kind::Index],
                    s,
                    |s, e| s.scoped(|s| s.larger(e, plan.x, &from, carried)),
                    |_, _| Ok(carried.to_vec()),
                )
            },
        )?;
        Ok((best[0], e.index_to_i64(best[1])))
    }

    /// The larger of the element at `from` and the carried one, with its position. A carried position
    /// of -1 stands for none.
    fn larger<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        x: ValueId,
        from: &[Ix<V>],
        carried: &[V],
    ) -> Result<Vec<V>> {
        let v = self.value(e, x, from)?;
        let linear = e.linearise(from, self.body.shape(x));
        let linear = e.val(linear);
        let greater = beats(e, v, carried[0], self.body.dtype(x), Extremum::Max)?;
        let first = e.compare_const(Order::Less, Ix::V(carried[1]), 0);
        let better = e.either(greater, first)?;
        Ok(vec![
            e.choose(better, v, carried[0]),
            e.choose(better, linear, carried[1]),
        ])
    }
}

/// The most windows that one element is in, along an axis.
pub(super) fn windows_over(size: &[usize], window: &Window, d: usize) -> usize {
    (size[d] - 1) * window.dilations[d] / window.strides[d] + 1
}

/// Entries of the spatial axes of activations.
pub(in crate::codegen) fn spatial_axes<T>(layout: Layout, axes: &[T]) -> &[T] {
    match layout {
        Layout::ChannelsFirst => &axes[2..],
        Layout::ChannelsLast => &axes[1..axes.len() - 1],
    }
}

/// Entry of the channel axis of activations.
pub(in crate::codegen) fn channel_axis<T: Copy>(layout: Layout, axes: &[T]) -> T {
    match layout {
        Layout::ChannelsFirst => axes[1],
        Layout::ChannelsLast => axes[axes.len() - 1],
    }
}

/// Index into activations.
pub(in crate::codegen) fn activation_index<V: Copy>(
    layout: Layout,
    batch: Ix<V>,
    channel: Ix<V>,
    spatial: &[Ix<V>],
) -> Vec<Ix<V>> {
    match layout {
        Layout::ChannelsFirst => [&[batch, channel], spatial].concat(),
        Layout::ChannelsLast => [&[batch], spatial, &[channel]].concat(),
    }
}

/// A sum divided by an index that counts its terms; a sum of no integers is 0.
pub(in crate::codegen) fn average<E: Emit>(
    e: &mut E,
    acc: DType,
    sum: ValueOf<E>,
    count: ValueOf<E>,
) -> Result<ValueOf<E>> {
    if acc.is_float() {
        let n = e.index_to_i64(count);
        let n = e.convert(n, DType::I64, acc)?;
        return e.primitive(ScalarOp::Div, acc, acc, &[sum, n]);
    }
    let one = e.index(1);
    let n = e.index_max(count, one);
    let n = e.index_to_i64(n);
    let n = e.convert(n, DType::I64, acc)?;
    Ok(e.quotient(acc, sum, n))
}

/// The input positions of a window's tap.
pub(super) fn tap_positions<E: Emit>(
    e: &mut E,
    outer: &[Ix<E::Value>],
    tap: &[Ix<E::Value>],
    window: &Window,
    spatial: &[usize],
) -> Result<Tap<E>> {
    let mut inside = None;
    let mut position = Vec::with_capacity(outer.len());
    for d in 0..outer.len() {
        let start = e.mul(outer[d], window.strides[d] as i64);
        let reach = e.mul(tap[d], window.dilations[d] as i64);
        let padded = e.add(start, reach);
        let p = e.add(padded, Ix::C(-(window.pads_low[d] as i64)));
        position.push(p);
        let extent = spatial[d] as i64;
        if !matches!(p, Ix::C(c) if (0..extent).contains(&c)) {
            let within = e.compare_const(Order::Within, p, extent);
            inside = Some(e.all(inside, within)?);
        }
    }
    Ok((position, inside))
}

/// The input positions from which a tap of the transposed window falls on an output position.
pub(super) fn transposed_positions<E: Emit>(
    e: &mut E,
    outer: &[Ix<E::Value>],
    tap: &[Ix<E::Value>],
    window: &Window,
    spatial: &[usize],
) -> Result<Tap<E>> {
    let mut inside = None;
    let mut position = Vec::with_capacity(outer.len());
    for d in 0..outer.len() {
        let reach = e.mul(tap[d], -(window.dilations[d] as i64));
        let padded = e.add(outer[d], Ix::C(window.pads_low[d] as i64));
        let start = e.add(padded, reach);
        let start = e.val(start);
        let stride = e.index(window.strides[d] as i64);
        let (quotient, limit) = (e.index_div(start, stride), e.index(spatial[d] as i64));
        let back = e.index_mul(quotient, stride);
        let exact = e.index_compare(Order::Equal, back, start);
        let within = e.index_compare(Order::Within, quotient, limit);
        let both = e.both(exact, within)?;
        inside = Some(e.all(inside, both)?);
        position.push(Ix::V(quotient));
    }
    Ok((position, inside))
}
