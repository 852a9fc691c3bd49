//! Pull-based code of ops with inner loops: reductions, products, convolutions, pooling.
//!
//! Slow but correct for every dtype: floats accumulate in `f64` and round once, integers in 64 bits,
//! wrapping.

use super::{Emit, Ix, Kind, Order, Puller};
use crate::codegen::body::Body;
use crate::error::{Error, Result};
use crate::ir::{Extremum, Layout, Node, Op, PoolKind, ReduceKind, ScalarOp, ValueId, Window};
use gristmill_runtime::DType;
use std::hash::Hash;

/// Accumulator dtype of sums and products of a dtype.
pub(in crate::codegen) fn accumulator(dtype: DType) -> DType {
    match dtype {
        d if d.is_float() => DType::F64,
        d if d.is_unsigned_int() => DType::U64,
        _ => DType::I64,
    }
}

/// Bits of the identity of `max` or `min`: the smallest or largest element of a dtype.
pub(in crate::codegen) fn extreme_bits(dtype: DType, identity_of: Extremum) -> u64 {
    use crate::ir::vecprog::real_bits;
    use gristmill_runtime::float8::F8E5M2;
    let max = identity_of == Extremum::Max;
    match dtype {
        DType::Bool => u64::from(!max),
        // Conversion to a float of 8 bits saturates, so `real_bits` would give a finite number.
        DType::F8E5M2 => if max { F8E5M2::LEAST } else { F8E5M2::GREATEST }
            .to_bits()
            .into(),
        d if d.is_float() => real_bits(
            d,
            if max {
                f64::NEG_INFINITY
            } else {
                f64::INFINITY
            },
        ),
        d if d.is_unsigned_int() => {
            if max {
                0
            } else {
                u64::MAX >> (64 - 8 * d.size_bytes())
            }
        }
        d => {
            let most = (1u64 << (8 * d.size_bytes() - 1)) - 1;
            if max { most + 1 } else { most }
        }
    }
}

/// Body of a loop nest: the emitter, the indices of all loops, and the carried values; gives the next carried values.
type NestedBody<'f, S, E> =
    dyn FnMut(&mut S, &mut E, &[Ix<Of<E>>], &[Of<E>]) -> Result<Vec<Of<E>>> + 'f;

/// Body of a loop nest that carries one accumulator.
type ProductBody<'f, S, E> = dyn FnMut(&mut S, &mut E, &[Ix<Of<E>>], Of<E>) -> Result<Of<E>> + 'f;

/// Input positions of a window's tap, and the condition that they lie inside; `None` when they
/// always do.
type Tap<E> = (Vec<Ix<Of<E>>>, Option<Of<E>>);

/// The values of an emitter.
type Of<E> = <E as Emit>::Value;

impl<V: Copy + Eq + Hash> Puller<'_, V> {
    pub(super) fn heavy_value<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        node: &Node,
        which: usize,
        at: &[Ix<V>],
    ) -> Result<V> {
        match &node.op {
            Op::Reduce {
                kind,
                axes,
                keepdims,
            } => self.reduce(e, node, *kind, axes, *keepdims, at),
            Op::ArgReduce {
                kind,
                axis,
                keepdims,
                select_last,
            } => self.arg_reduce(e, node, *kind, *axis, *keepdims, *select_last, at),
            Op::MatMul => self.matmul(e, node, at),
            Op::Conv {
                window,
                groups,
                layout,
            } => self.conv(e, node, window, *groups, *layout, at),
            Op::ConvTranspose { window, groups, .. } => {
                self.conv_transpose(e, node, window, *groups, at)
            }
            Op::Pool {
                kind,
                size,
                window,
                layout,
                ..
            } => {
                let plan = PoolPlan {
                    size,
                    window,
                    layout: *layout,
                };
                match kind {
                    PoolKind::Max => Ok(self.max_pool(e, node, &plan, at)?.0),
                    _ => self.average_pool(e, node, &plan, *kind, at),
                }
            }
            Op::MaxPoolIndices { size, window, .. } => {
                let plan = PoolPlan {
                    size,
                    window,
                    layout: Layout::ChannelsFirst,
                };
                let (value, position) = self.max_pool(e, node, &plan, at)?;
                self.remember(node.outputs[0], at, value);
                self.remember(node.outputs[1], at, position);
                Ok(if which == 0 { value } else { position })
            }
            op => Err(Error::unsupported(format!(
                "{} has no code by elements",
                op.name()
            ))),
        }
    }

    /// Loops over all indices below `extents`, carrying values.
    fn nested<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        extents: &[usize],
        at: &mut Vec<Ix<V>>,
        carried: &[V],
        f: &mut NestedBody<Self, E>,
    ) -> Result<Vec<V>> {
        let Some(&extent) = extents.get(at.len()) else {
            return f(self, e, at, carried);
        };
        if extent == 1 {
            at.push(Ix::C(0));
            let out = self.nested(e, extents, at, carried, f);
            at.pop();
            return out;
        }
        e.for_loop(
            Ix::C(0),
            Ix::C(extent as i64),
            1,
            carried,
            |e, i, carried| {
                self.scoped(|s| {
                    at.push(Ix::V(i));
                    let out = s.nested(e, extents, at, carried, f);
                    at.pop();
                    out
                })
            },
        )
    }

    fn reduce<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        node: &Node,
        kind: ReduceKind,
        axes: &[usize],
        keepdims: bool,
        at: &[Ix<V>],
    ) -> Result<V> {
        let x = node.inputs[0];
        let (dtype, shape) = (self.body.dtype(x), self.body.shape(x).to_vec());
        let extents: Vec<usize> = axes.iter().map(|&a| shape[a]).collect();
        let count: usize = extents.iter().product();
        let acc = match kind {
            ReduceKind::Max | ReduceKind::Min => dtype,
            _ => accumulator(dtype),
        };
        let init = match kind {
            ReduceKind::Max => e.constant(acc, extreme_bits(acc, Extremum::Max)),
            ReduceKind::Min => e.constant(acc, extreme_bits(acc, Extremum::Min)),
            ReduceKind::Prod => e.constant(acc, crate::ir::vecprog::real_bits(acc, 1.0)),
            ReduceKind::Sum | ReduceKind::Mean => e.constant(acc, 0),
        };
        let sum = self.nested(
            e,
            &extents,
            &mut Vec::new(),
            &[init],
            &mut |s, e, inner, carried| {
                let from = reduced_index(at, inner, axes, shape.len(), keepdims);
                let element = s.value(e, x, &from)?;
                let element = e.convert(element, dtype, acc)?;
                let op = match kind {
                    ReduceKind::Sum | ReduceKind::Mean => ScalarOp::Add,
                    ReduceKind::Prod => ScalarOp::Mul,
                    ReduceKind::Max if dtype == DType::Bool => ScalarOp::Or,
                    ReduceKind::Min if dtype == DType::Bool => ScalarOp::And,
                    ReduceKind::Max => ScalarOp::Max,
                    ReduceKind::Min => ScalarOp::Min,
                };
                Ok(vec![e.scalar_op(
                    op,
                    &[acc, acc],
                    &[carried[0], element],
                )?])
            },
        )?[0];
        let result = if kind == ReduceKind::Mean {
            mean(e, sum, acc, count)?
        } else {
            sum
        };
        e.convert(result, acc, dtype)
    }

    #[allow(clippy::too_many_arguments)]
    fn arg_reduce<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        node: &Node,
        kind: Extremum,
        axis: usize,
        keepdims: bool,
        select_last: bool,
        at: &[Ix<V>],
    ) -> Result<V> {
        let x = node.inputs[0];
        let (dtype, shape) = (self.body.dtype(x), self.body.shape(x).to_vec());
        let first = self.value(
            e,
            x,
            &reduced_index(at, &[Ix::C(0)], &[axis], shape.len(), keepdims),
        )?;
        let zero = e.index(0);
        let best = e.for_loop(
            Ix::C(1),
            Ix::C(shape[axis] as i64),
            1,
            &[first, zero],
            |e, i, carried| {
                self.scoped(|s| {
                    let v = s.value(
                        e,
                        x,
                        &reduced_index(at, &[Ix::V(i)], &[axis], shape.len(), keepdims),
                    )?;
                    let better = if select_last {
                        let worse = beats(e, carried[0], v, dtype, kind)?;
                        e.negated(worse)?
                    } else {
                        beats(e, v, carried[0], dtype, kind)?
                    };
                    Ok(vec![
                        e.choose(better, v, carried[0]),
                        e.choose(better, i, carried[1]),
                    ])
                })
            },
        )?;
        Ok(e.index_to_i64(best[1]))
    }

    fn product_loop<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        dtype: DType,
        extents: &[usize],
        f: &mut ProductBody<Self, E>,
    ) -> Result<V> {
        let acc = accumulator(dtype);
        let zero = e.constant(acc, 0);
        let sum = self.nested(e, extents, &mut Vec::new(), &[zero], &mut |s, e, at, c| {
            Ok(vec![f(s, e, at, c[0])?])
        })?;
        e.convert(sum[0], acc, dtype)
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

    fn matmul<E: Emit<Value = V>>(&mut self, e: &mut E, node: &Node, at: &[Ix<V>]) -> Result<V> {
        let (lhs, rhs) = (node.inputs[0], node.inputs[1]);
        let rank = at.len();
        let k = *self
            .body
            .shape(lhs)
            .last()
            .expect("matmul takes rank 2 or more");
        let batch = |s: &Self, v: ValueId| -> Vec<Ix<V>> {
            let shape = s.body.shape(v);
            let lead = &shape[..shape.len() - 2];
            let skip = rank - 2 - lead.len();
            lead.iter()
                .zip(&at[skip..])
                .map(|(&d, &i)| if d == 1 { Ix::C(0) } else { i })
                .collect()
        };
        let (lhs_batch, rhs_batch) = (batch(self, lhs), batch(self, rhs));
        self.product_loop(e, self.body.dtype(lhs), &[k], &mut |s, e, inner, sum| {
            let a: Vec<Ix<V>> = lhs_batch
                .iter()
                .copied()
                .chain([at[rank - 2], inner[0]])
                .collect();
            let b: Vec<Ix<V>> = rhs_batch
                .iter()
                .copied()
                .chain([inner[0], at[rank - 1]])
                .collect();
            s.add_product(e, sum, (lhs, &a), (rhs, &b))
        })
    }

    fn conv<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        node: &Node,
        window: &Window,
        groups: usize,
        layout: Layout,
        at: &[Ix<V>],
    ) -> Result<V> {
        let (x, w) = (node.inputs[0], node.inputs[1]);
        let n = at.len() - 2;
        let (x_shape, w_shape) = (self.body.shape(x).to_vec(), self.body.shape(w).to_vec());
        let (spatial, taps, c_out, c_in, channel) = match layout {
            Layout::ChannelsFirst => (&x_shape[2..], &w_shape[2..], w_shape[0], w_shape[1], at[1]),
            Layout::ChannelsLast => (
                &x_shape[1..=n],
                &w_shape[..n],
                w_shape[n + 1],
                w_shape[n],
                at[n + 1],
            ),
        };
        let outer = if layout == Layout::ChannelsFirst {
            &at[2..]
        } else {
            &at[1..=n]
        };
        let (group, _) = e.div_rem(channel, (c_out / groups).max(1));
        let first = e.mul(group, c_in as i64);
        let dtype = self.body.dtype(x);
        let acc = accumulator(dtype);
        self.product_loop(e, dtype, taps, &mut |s, e, tap, sum| {
            let (position, inside) = tap_positions(e, outer, tap, window, spatial)?;
            s.guarded(e, inside, acc, sum, |s, e, sum| {
                s.sum_over(e, c_in, sum, |s, e, i, sum| {
                    let c = e.add(first, i);
                    let x_at = channels(layout, at[0], c, &position);
                    let w_at: Vec<Ix<V>> = match layout {
                        Layout::ChannelsFirst => {
                            [channel, i].into_iter().chain(tap.to_vec()).collect()
                        }
                        Layout::ChannelsLast => tap.iter().copied().chain([i, channel]).collect(),
                    };
                    s.add_product(e, sum, (x, &x_at), (w, &w_at))
                })
            })
        })
    }

    /// A convolution as a product of `[positions, taps and channels]` and `[taps and channels, output channels]` per group: the element of
    /// the left-hand side in row `position` (image and output position) and column `k` (taps, then channels); zero outside of the input.
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

    /// The index of the same element in the input, and the condition that it lies inside.
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
        let (shape, out) = (
            self.body.shape(node.inputs[0]).to_vec(),
            self.body.shape(node.outputs[0]).to_vec(),
        );
        let (spatial, out_spatial) = match layout {
            Layout::ChannelsFirst => (&shape[2..], &out[2..]),
            Layout::ChannelsLast => (&shape[1..shape.len() - 1], &out[1..out.len() - 1]),
        };
        let (taps, c_in) = conv_depth(*layout, self.body.shape(node.inputs[1]));
        let positions: Vec<usize> = [out[0]].iter().chain(out_spatial).copied().collect();
        let at = e.delinearise(position, &positions);
        let deep = e.delinearise(k, &taps.iter().copied().chain([c_in]).collect::<Vec<_>>());
        let first = e.mul(group, c_in as i64);
        let channel = e.add(first, deep[taps.len()]);
        let (within, inside) = tap_positions(e, &at[1..], &deep[..taps.len()], window, spatial)?;
        Ok((channels(*layout, at[0], channel, &within), inside))
    }

    /// The index in the weights of the element of the right-hand side of the same product in row `k` and column `column` (output channel of the
    /// group).
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
        let shape = self.body.shape(node.inputs[1]).to_vec();
        let (taps, c_in) = conv_depth(*layout, &shape);
        let c_out = if *layout == Layout::ChannelsFirst {
            shape[0]
        } else {
            shape[shape.len() - 1]
        };
        let deep = e.delinearise(k, &taps.iter().copied().chain([c_in]).collect::<Vec<_>>());
        let first = e.mul(group, (c_out / groups) as i64);
        let channel = e.add(first, column);
        let (tap, c) = deep.split_at(taps.len());
        Ok(match layout {
            Layout::ChannelsFirst => [channel, c[0]].iter().chain(tap).copied().collect(),
            Layout::ChannelsLast => tap.iter().copied().chain([c[0], channel]).collect(),
        })
    }

    /// Each output element gathers the inputs whose windows cover it.
    fn conv_transpose<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        node: &Node,
        window: &Window,
        groups: usize,
        at: &[Ix<V>],
    ) -> Result<V> {
        let (x, w) = (node.inputs[0], node.inputs[1]);
        let (x_shape, w_shape) = (self.body.shape(x).to_vec(), self.body.shape(w).to_vec());
        let c_in = x_shape[1] / groups;
        let (group, channel) = e.div_rem(at[1], w_shape[1].max(1));
        let first = e.mul(group, c_in as i64);
        let dtype = self.body.dtype(x);
        let acc = accumulator(dtype);
        self.product_loop(e, dtype, &w_shape[2..], &mut |s, e, tap, sum| {
            let (position, inside) = transposed_positions(e, &at[2..], tap, window, &x_shape[2..])?;
            s.guarded(e, inside, acc, sum, |s, e, sum| {
                s.sum_over(e, c_in, sum, |s, e, i, sum| {
                    let c = e.add(first, i);
                    let x_at = channels(Layout::ChannelsFirst, at[0], c, &position);
                    let w_at: Vec<Ix<V>> = [c, channel].into_iter().chain(tap.to_vec()).collect();
                    s.add_product(e, sum, (x, &x_at), (w, &w_at))
                })
            })
        })
    }

    fn sum_over<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        n: usize,
        sum: V,
        mut f: impl FnMut(&mut Self, &mut E, Ix<V>, V) -> Result<V>,
    ) -> Result<V> {
        let out = self.nested(e, &[n], &mut Vec::new(), &[sum], &mut |s, e, at, c| {
            Ok(vec![f(s, e, at[0], c[0])?])
        })?;
        Ok(out[0])
    }

    /// `f(sum)` where `inside` holds (or is absent), else `sum`; both of dtype `acc`.
    fn guarded<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        inside: Option<V>,
        acc: DType,
        sum: V,
        f: impl FnOnce(&mut Self, &mut E, V) -> Result<V>,
    ) -> Result<V> {
        let Some(inside) = inside else {
            return f(self, e, sum);
        };
        let kinds = [Kind::Element(acc)];
        let out = e.branch(
            inside,
            &kinds,
            self,
            |s, e| s.scoped(|s| Ok(vec![f(s, e, sum)?])),
            |_, _| Ok(vec![sum]),
        )?;
        Ok(out[0])
    }

    fn average_pool<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        node: &Node,
        plan: &PoolPlan,
        kind: PoolKind,
        at: &[Ix<V>],
    ) -> Result<V> {
        let x = node.inputs[0];
        let (dtype, shape) = (self.body.dtype(x), self.body.shape(x).to_vec());
        let acc = accumulator(dtype);
        let (spatial, outer, channel) = plan.split(&shape, at);
        let (sum, count) = (e.constant(acc, 0), e.index(0));
        let out = self.nested(
            e,
            plan.size,
            &mut Vec::new(),
            &[sum, count],
            &mut |s, e, tap, carried| {
                let (position, inside) = tap_positions(e, outer, tap, plan.window, spatial)?;
                let add = |s: &mut Self, e: &mut E| -> Result<V> {
                    let v = s.value(e, x, &channels(plan.layout, at[0], channel, &position))?;
                    let v = e.convert(v, dtype, acc)?;
                    e.scalar_op(ScalarOp::Add, &[acc, acc], &[carried[0], v])
                };
                let sum = s.guarded(e, inside, acc, carried[0], |s, e, _| add(s, e))?;
                let counted = match kind {
                    PoolKind::AvgIncludePad => padded_inside(e, outer, tap, plan.window, spatial)?,
                    _ => inside,
                };
                let one = match counted {
                    None => e.index(1),
                    Some(c) => e.truth_to_index(c),
                };
                Ok(vec![sum, e.index_add(carried[1], one)])
            },
        )?;
        let result = if dtype.is_float() {
            let n = e.index_to_i64(out[1]);
            let n = e.convert(n, DType::I64, DType::F64)?;
            e.primitive(ScalarOp::Div, DType::F64, DType::F64, &[out[0], n])?
        } else {
            // A window without elements gives 0.
            let one = e.index(1);
            let n = e.index_max(out[1], one);
            let n = e.index_to_i64(n);
            let n = e.convert(n, DType::I64, acc)?;
            e.quotient(acc, out[0], n)
        };
        e.convert(result, acc, dtype)
    }

    /// Largest element of a window and its row-major position in the whole input (-1 when the window
    /// holds only padding).
    fn max_pool<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        node: &Node,
        plan: &PoolPlan,
        at: &[Ix<V>],
    ) -> Result<(V, V)> {
        let x = node.inputs[0];
        let (dtype, shape) = (self.body.dtype(x), self.body.shape(x).to_vec());
        let (spatial, outer, channel) = plan.split(&shape, at);
        let (least, none) = (
            e.constant(dtype, extreme_bits(dtype, Extremum::Max)),
            e.index(-1),
        );
        let best = self.nested(
            e,
            plan.size,
            &mut Vec::new(),
            &[least, none],
            &mut |s, e, tap, carried| {
                let (position, inside) = tap_positions(e, outer, tap, plan.window, spatial)?;
                let consider = |s: &mut Self, e: &mut E| -> Result<Vec<V>> {
                    let from = channels(plan.layout, at[0], channel, &position);
                    let v = s.value(e, x, &from)?;
                    let linear = e.linearise(&from, &shape);
                    let linear = e.val(linear);
                    let greater = beats(e, v, carried[0], dtype, Extremum::Max)?;
                    let zero = e.index(0);
                    let first = e.index_compare(Order::Less, carried[1], zero);
                    let better = e.either(greater, first)?;
                    Ok(vec![
                        e.choose(better, v, carried[0]),
                        e.choose(better, linear, carried[1]),
                    ])
                };
                match inside {
                    None => consider(s, e),
                    Some(inside) => {
                        let kinds = [Kind::Element(dtype), Kind::Index];
                        e.branch(
                            inside,
                            &kinds,
                            s,
                            |s, e| s.scoped(|s| consider(s, e)),
                            |_, _| Ok(carried.to_vec()),
                        )
                    }
                }
            },
        )?;
        Ok((best[0], e.index_to_i64(best[1])))
    }
}

/// Geometry of a pooling.
struct PoolPlan<'a> {
    size: &'a [usize],
    window: &'a Window,
    layout: Layout,
}

impl PoolPlan<'_> {
    /// Spatial extents of the input, spatial output index, channel.
    fn split<'s, V: Copy>(
        &self,
        shape: &'s [usize],
        at: &'s [Ix<V>],
    ) -> (&'s [usize], &'s [Ix<V>], Ix<V>) {
        let n = at.len() - 2;
        match self.layout {
            Layout::ChannelsFirst => (&shape[2..], &at[2..], at[1]),
            Layout::ChannelsLast => (&shape[1..=n], &at[1..=n], at[n + 1]),
        }
    }
}

/// Extents of a convolution's window, and its input channels per group, from the shape of its weights.
fn conv_depth(layout: Layout, weights: &[usize]) -> (&[usize], usize) {
    match layout {
        Layout::ChannelsFirst => (&weights[2..], weights[1]),
        Layout::ChannelsLast => (&weights[..weights.len() - 2], weights[weights.len() - 2]),
    }
}

fn channels<V: Copy>(
    layout: Layout,
    batch: Ix<V>,
    channel: Ix<V>,
    spatial: &[Ix<V>],
) -> Vec<Ix<V>> {
    match layout {
        Layout::ChannelsFirst => [batch, channel]
            .into_iter()
            .chain(spatial.to_vec())
            .collect(),
        Layout::ChannelsLast => std::iter::once(batch)
            .chain(spatial.iter().copied())
            .chain([channel])
            .collect(),
    }
}

/// Index into the operand of a reduction: `at` with the reduced axes taken from `inner`.
pub(in crate::codegen) fn reduced_index<V: Copy>(
    at: &[Ix<V>],
    inner: &[Ix<V>],
    axes: &[usize],
    rank: usize,
    keepdims: bool,
) -> Vec<Ix<V>> {
    let mut kept = at.iter();
    (0..rank)
        .map(|axis| match axes.iter().position(|&a| a == axis) {
            Some(i) => {
                if keepdims {
                    kept.next();
                }
                inner[i]
            }
            None => *kept.next().expect("one index per kept axis"),
        })
        .collect()
}

/// The mean of `count` values, given their sum; 0 of no integers.
pub(in crate::codegen) fn mean<E: Emit>(
    e: &mut E,
    sum: E::Value,
    acc: DType,
    count: usize,
) -> Result<E::Value> {
    if acc == DType::F64 {
        let n = e.constant(acc, (count as f64).to_bits());
        return e.primitive(ScalarOp::Div, acc, acc, &[sum, n]);
    }
    let n = e.constant(acc, count as u64);
    Ok(if count == 0 {
        n
    } else {
        e.quotient(acc, sum, n)
    })
}

/// True when `a` is strictly better than `b`; NaN is better than anything but NaN.
pub(in crate::codegen) fn beats<E: Emit>(
    e: &mut E,
    a: E::Value,
    b: E::Value,
    dtype: DType,
    kind: Extremum,
) -> Result<E::Value> {
    let (a, b, dtype) = match dtype {
        d if d.is_narrow_float() => (
            e.convert(a, dtype, DType::F32)?,
            e.convert(b, dtype, DType::F32)?,
            DType::F32,
        ),
        DType::Bool => (a, b, DType::U8),
        _ => (a, b, dtype),
    };
    let op = if kind == Extremum::Max {
        ScalarOp::Gt
    } else {
        ScalarOp::Lt
    };
    let strict = e.scalar_op(op, &[dtype, dtype], &[a, b])?;
    if !dtype.is_float() {
        return Ok(strict);
    }
    let (a_nan, b_number) = (e.is_nan(a), e.is_number(b));
    let by_nan = e.both(a_nan, b_number)?;
    e.either(strict, by_nan)
}

/// The input positions of a window's tap.
fn tap_positions<E: Emit>(
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
        if matches!(p, Ix::C(c) if (0..spatial[d] as i64).contains(&c)) {
            continue;
        }
        let (v, limit) = (e.val(p), e.index(spatial[d] as i64));
        let within = e.index_compare(Order::Within, v, limit);
        inside = Some(match inside {
            None => within,
            Some(i) => e.both(i, within)?,
        });
    }
    Ok((position, inside))
}

/// True when a tap lies inside the input and its padding; `None` when it always does.
fn padded_inside<E: Emit>(
    e: &mut E,
    outer: &[Ix<E::Value>],
    tap: &[Ix<E::Value>],
    window: &Window,
    spatial: &[usize],
) -> Result<Option<E::Value>> {
    let bare = Window {
        pads_low: vec![0; outer.len()],
        ..window.clone()
    };
    let padded: Vec<usize> = (0..outer.len())
        .map(|d| spatial[d] + window.pads_low[d] + window.pads_high[d])
        .collect();
    Ok(tap_positions(e, outer, tap, &bare, &padded)?.1)
}

/// The input positions from which a tap of the transposed window falls on an output position.
fn transposed_positions<E: Emit>(
    e: &mut E,
    outer: &[Ix<E::Value>],
    tap: &[Ix<E::Value>],
    window: &Window,
    spatial: &[usize],
) -> Result<Tap<E>> {
    let mut inside: Option<E::Value> = None;
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
        inside = Some(match inside {
            None => both,
            Some(i) => e.both(i, both)?,
        });
        position.push(Ix::V(quotient));
    }
    Ok((position, inside))
}

/// Number of operand elements that an op with an inner loop pulls for one result element.
pub(in crate::codegen) fn inner_iterations(body: &Body, op: &Op, node: &Node) -> usize {
    let n = |i: usize| body.n_elements(node.inputs[i]);
    let out = body.n_elements(node.outputs[0]).max(1);
    match op {
        Op::Reduce { .. } | Op::ArgReduce { .. } => n(0) / out,
        Op::MatMul => body.shape(node.inputs[0]).last().copied().unwrap_or(1),
        Op::Conv { .. } | Op::ConvTranspose { .. } => n(1) / body.shape(node.inputs[1])[0].max(1),
        Op::Pool { size, .. } | Op::MaxPoolIndices { size, .. } => size.iter().product(),
        _ => 1,
    }
    .max(1)
}
