//! Matrix products and convolutions as sums of products.

use super::heavy::{ValueOf, no_code};
use super::reduce::accumulator;
use super::window::{
    activation_index, channel_axis, spatial_axes, tap_positions, transposed_positions,
};
use super::{Emit, Ix, Puller, broadcast_index};
use crate::error::{Error, Result};
use crate::ir::{Layout, Node, Op, ScalarOp, ValueId};
use gristmill_runtime::DType;
use std::hash::Hash;

/// Body of a loop nest that carries one accumulator.
type ProductBody<'f, S, E> =
    dyn FnMut(&mut S, &mut E, &[Ix<ValueOf<E>>], ValueOf<E>) -> Result<ValueOf<E>> + 'f;

impl<V: Copy + Eq + Hash> Puller<'_, V> {
    /// Loops over `extents` that carry a sum from zero on, of elements of `dtype`.
    fn product_loop<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        dtype: DType,
        extents: &[usize],
        f: &mut ProductBody<Self, E>,
    ) -> Result<V> {
        let acc = accumulator(dtype);
        let zero = e.constant(acc, 0);
        let sum = self.loops(e, extents, &[zero], &mut |s, e, at, c| {
            Ok(vec![f(s, e, at, c[0])?])
        })?;
        e.convert(sum[0], acc, dtype)
    }

    /// A loop over `n` indices that carries a sum.
    fn sum_over<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        n: usize,
        sum: V,
        mut f: impl FnMut(&mut Self, &mut E, Ix<V>, V) -> Result<V>,
    ) -> Result<V> {
        let out = self.loops(e, &[n], &[sum], &mut |s, e, at, c| {
            Ok(vec![f(s, e, at[0], c[0])?])
        })?;
        Ok(out[0])
    }

    /// `sum + x[x_at] * w[w_at]` in the accumulator's dtype.
    fn add_product<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        sum: V,
        (x, x_at): (ValueId, &[Ix<V>]),
        (w, w_at): (ValueId, &[Ix<V>]),
    ) -> Result<V> {
        let dtype = self.body.dtype(x);
        let acc = accumulator(dtype);
        let (a, b) = (self.value(e, x, x_at)?, self.value(e, w, w_at)?);
        let (a, b) = (e.convert(a, dtype, acc)?, e.convert(b, dtype, acc)?);
        let product = e.scalar_op(ScalarOp::Mul, &[acc, acc], &[a, b])?;
        e.scalar_op(ScalarOp::Add, &[acc, acc], &[sum, product])
    }

    pub(super) fn matmul<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        node: &Node,
        at: &[Ix<V>],
    ) -> Result<V> {
        let (lhs, rhs, body) = (node.inputs[0], node.inputs[1], self.body);
        let (Some((batch, &[row, column])), Some(&k)) =
            (at.split_last_chunk(), body.shape(lhs).last())
        else {
            return Err(Error::internal("matmul takes rank 2 or more"));
        };
        let lhs_batch = broadcast_index(batch_axes(body.shape(lhs)), batch);
        let rhs_batch = broadcast_index(batch_axes(body.shape(rhs)), batch);
        self.product_loop(e, body.dtype(lhs), &[k], &mut |s, e, inner, sum| {
            let a = [&lhs_batch[..], &[row, inner[0]]].concat();
            let b = [&rhs_batch[..], &[inner[0], column]].concat();
            s.add_product(e, sum, (lhs, &a), (rhs, &b))
        })
    }

    pub(super) fn conv<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        node: &Node,
        at: &[Ix<V>],
    ) -> Result<V> {
        let Op::Conv {
            window,
            groups,
            layout,
        } = &node.op
        else {
            return Err(no_code(&node.op));
        };
        let (x, w, body) = (node.inputs[0], node.inputs[1], self.body);
        let (spatial, outer) = (
            spatial_axes(*layout, body.shape(x)),
            spatial_axes(*layout, at),
        );
        let weights = Weights::new(*layout, body.shape(w));
        let channel = channel_axis(*layout, at);
        let (group, _) = e.div_rem(channel, (weights.c_out / groups).max(1));
        let first = e.mul(group, weights.c_in as i64);
        let dtype = body.dtype(x);
        let acc = accumulator(dtype);
        self.product_loop(e, dtype, weights.taps, &mut |s, e, tap, sum| {
            let (position, inside) = tap_positions(e, outer, tap, window, spatial)?;
            s.guarded(e, inside, acc, sum, |s, e, sum| {
                s.sum_over(e, weights.c_in, sum, |s, e, i, sum| {
                    let c = e.add(first, i);
                    let x_at = activation_index(*layout, at[0], c, &position);
                    let w_at = weights.index(tap, i, channel);
                    s.add_product(e, sum, (x, &x_at), (w, &w_at))
                })
            })
        })
    }

    /// A convolution as a product of `[positions, taps and channels]` and `[taps and channels, output
    /// channels]` per group: the element of the left-hand side in row `position` (image and output
    /// position) and column `k` (taps, then channels); zero outside of the input.
    pub(in crate::codegen) fn conv_input<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        node: &Node,
        group: Ix<V>,
        position: Ix<V>,
        k: Ix<V>,
    ) -> Result<V> {
        let (from, inside) = self.conv_input_at(e, node, group, position, k)?;
        let x = node.inputs[0];
        let dtype = self.body.dtype(x);
        let zero = e.constant(dtype, 0);
        self.guarded(e, inside, dtype, zero, |s, e, _| s.value(e, x, &from))
    }

    /// The index of the same element in the input, and the condition that it lies inside (`None`:
    /// always).
    pub(in crate::codegen) fn conv_input_at<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        node: &Node,
        group: Ix<V>,
        position: Ix<V>,
        k: Ix<V>,
    ) -> Result<(Vec<Ix<V>>, Option<V>)> {
        let Op::Conv { window, layout, .. } = &node.op else {
            return Err(Error::internal("not a convolution"));
        };
        let body = self.body;
        let (shape, out) = (body.shape(node.inputs[0]), body.shape(node.outputs[0]));
        let weights = Weights::new(*layout, body.shape(node.inputs[1]));
        let at = e.delinearise(position, &[&out[..1], spatial_axes(*layout, out)].concat());
        let (tap, c) = weights.tap_and_channel(e, k);
        let first = e.mul(group, weights.c_in as i64);
        let channel = e.add(first, c);
        let spatial = spatial_axes(*layout, shape);
        let (within, inside) = tap_positions(e, &at[1..], &tap, window, spatial)?;
        Ok((activation_index(*layout, at[0], channel, &within), inside))
    }

    /// The index in the weights of the element of the right-hand side of the same product in row `k`
    /// and column `column` (output channel of the group).
    pub(in crate::codegen) fn conv_weight_at<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        node: &Node,
        group: Ix<V>,
        k: Ix<V>,
        column: Ix<V>,
    ) -> Result<Vec<Ix<V>>> {
        let Op::Conv { groups, layout, .. } = &node.op else {
            return Err(Error::internal("not a convolution"));
        };
        let weights = Weights::new(*layout, self.body.shape(node.inputs[1]));
        let (tap, c) = weights.tap_and_channel(e, k);
        let first = e.mul(group, (weights.c_out / groups) as i64);
        let channel = e.add(first, column);
        Ok(weights.index(&tap, c, channel))
    }

    /// Each output element gathers the inputs whose windows cover it.
    pub(super) fn conv_transpose<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        node: &Node,
        at: &[Ix<V>],
    ) -> Result<V> {
        let Op::ConvTranspose { window, groups, .. } = &node.op else {
            return Err(no_code(&node.op));
        };
        let (x, w, body) = (node.inputs[0], node.inputs[1], self.body);
        let (x_shape, w_shape) = (body.shape(x), body.shape(w));
        let c_in = x_shape[1] / groups;
        let (group, channel) = e.div_rem(at[1], w_shape[1].max(1));
        let first = e.mul(group, c_in as i64);
        let dtype = body.dtype(x);
        let acc = accumulator(dtype);
        self.product_loop(e, dtype, &w_shape[2..], &mut |s, e, tap, sum| {
            let (position, inside) = transposed_positions(e, &at[2..], tap, window, &x_shape[2..])?;
            s.guarded(e, inside, acc, sum, |s, e, sum| {
                s.sum_over(e, c_in, sum, |s, e, i, sum| {
                    let c = e.add(first, i);
                    let x_at = [&[at[0], c], &position[..]].concat();
                    let w_at = [&[c, channel], tap].concat();
                    s.add_product(e, sum, (x, &x_at), (w, &w_at))
                })
            })
        })
    }
}

fn batch_axes(matrices: &[usize]) -> &[usize] {
    &matrices[..matrices.len() - 2]
}

/// Axes of a convolution's weights: output channels, input channels of a group, and taps; for
/// channels last in the opposite order.
pub(in crate::codegen) struct Weights<'a> {
    layout: Layout,
    pub(in crate::codegen) taps: &'a [usize],
    pub(in crate::codegen) c_in: usize,
    pub(in crate::codegen) c_out: usize,
}

impl<'a> Weights<'a> {
    pub(in crate::codegen) fn new(layout: Layout, shape: &'a [usize]) -> Weights<'a> {
        let n = shape.len();
        let (taps, c_in, c_out) = match layout {
            Layout::ChannelsFirst => (&shape[2..], shape[1], shape[0]),
            Layout::ChannelsLast => (&shape[..n - 2], shape[n - 2], shape[n - 1]),
        };
        Weights {
            layout,
            taps,
            c_in,
            c_out,
        }
    }

    pub(in crate::codegen) fn index<V: Copy>(
        &self,
        tap: &[Ix<V>],
        c_in: Ix<V>,
        c_out: Ix<V>,
    ) -> Vec<Ix<V>> {
        match self.layout {
            Layout::ChannelsFirst => [&[c_out, c_in], tap].concat(),
            Layout::ChannelsLast => [tap, &[c_in, c_out]].concat(),
        }
    }

    /// Tap and input channel of a row of the weights as a matrix: taps, then channels.
    fn tap_and_channel<E: Emit>(
        &self,
        e: &mut E,
        k: Ix<ValueOf<E>>,
    ) -> (Vec<Ix<ValueOf<E>>>, Ix<ValueOf<E>>) {
        let mut tap = e.delinearise(k, &[self.taps, &[self.c_in]].concat());
        let channel = tap.remove(self.taps.len());
        (tap, channel)
    }
}
