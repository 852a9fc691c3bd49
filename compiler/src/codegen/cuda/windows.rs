//! Poolings and depthwise convolutions: each thread computes a few neighbouring results.
//!
//! With channels last, they are of neighbouring channels, which are loaded and stored in vectors of
//! up to 16 bytes, and lie along the last spatial axis; with channels first, one below the other:
//! neighbouring threads load neighbouring pixels. Either way a pixel is loaded once for all
//! windows over it, and an element of the filter once for all results. Averages are summed up as
//! reductions are, products as in [`super::contract`]; as there, operands are pulled and the
//! epilogue is computed from the result.

use super::candidates::{Candidate, Candidates, MULTIPROCESSORS, Resources, Work};
use super::emit::{Emitter, Value};
use super::fusion::{FusedNode, stored_before};
use super::rows::exchanged;
use super::text::element_type;
use super::vector_access::{RunLoads, Runs, is_dense};
use crate::codegen::body::Body;
use crate::codegen::phases::{Cover, MatchContext};
use crate::codegen::pull::{
    Emit, Ix, Kind, Order, Puller, Weights, accumulator, activation_index, average, channel_axis,
    extreme_bits, spatial_axes,
};
use crate::error::{Error, Result};
use crate::ir::{Extremum, Layout, Node, NodeId, Op, PoolKind, ScalarOp, ValueId, Window};
use gristmill_runtime::DType;

/// Bytes of the widest access.
const WIDEST: usize = 16;
/// Threads of a block.
const BLOCK: usize = 256;
/// Numbers of results of a thread along an axis.
const RESULTS: [usize; 3] = [4, 2, 1];
/// Most elements of a window along the axis, whose code is written out.
const MOST_ALONG: usize = 11;
/// Most elements along the other axes for which it is written out, too.
const MOST_UNROLLED: usize = 11;
/// Threads of a multiprocessor to hide the time of loads.
const ENOUGH_THREADS: usize = 1024;
/// Operations per element up to which an operand is computed again in every window.
const CHEAP_FLOPS: u32 = 4;
/// Multiplications in the time of a byte.
const PRODUCTS_PER_BYTE: f64 = 8.0;

/// Result of a window's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Combination {
    Greatest,
    /// Divided by the number of elements, of the padding as well or not.
    Average {
        padded: bool,
    },
    /// Summed up, each times an element of the filter.
    Weighted,
}

/// A pooling or depthwise convolution, and the element-wise ops after it.
#[derive(Clone, Debug)]
struct Windows {
    node: FusedNode,
    combination: Combination,
    /// Elements of a window along each spatial axis.
    size: Vec<usize>,
    window: Window,
    layout: Layout,
    n_images: usize,
    n_channels: usize,
    /// Spatial extents of the operand and of the result.
    operand: Vec<usize>,
    result: Vec<usize>,
    /// Spatial axis of a thread's results.
    axis: usize,
    /// Dtypes of the operand, and of sums or extremes.
    dtype: DType,
    acc: DType,
    /// Channels of a thread, and results of each.
    width: usize,
    n_results: usize,
}

/// The windows of a node, if a thread of few results suits them.
pub(super) fn find(
    body: &Body,
    around: &MatchContext,
    id: NodeId,
    node: &Node,
) -> Option<(Cover, Candidates)> {
    let parts = Parts::of(body, node)?;
    let (operand, result) = (body.shape(node.inputs[0]), body.shape(node.outputs[0]));
    let dtype = body.dtype(node.inputs[0]);
    let axis = parts.axis()?;
    if parts.size[axis] > MOST_ALONG || !parts.suits(dtype) || result.contains(&0) {
        return None;
    }
    let needs = parts.needs(body, around, node);
    let width = parts.width(body, node, &|v| (around.in_memory)(v) || needs.contains(&v))?;
    let (node, cover) = FusedNode::find(body, around, id, needs);
    // Widths are powers of two; the epilogue may widen results.
    let width = width.min(WIDEST / body.dtype(node.result).size_bytes());
    let layout = parts.layout;
    let one = Windows {
        node,
        n_images: result[0],
        n_channels: channel_axis(layout, result),
        operand: spatial_axes(layout, operand).to_vec(),
        result: spatial_axes(layout, result).to_vec(),
        combination: parts.combination,
        size: parts.size,
        window: parts.window,
        layout,
        axis,
        dtype,
        acc: match parts.combination {
            Combination::Average { .. } => accumulator(dtype),
            _ => exchanged(dtype),
        },
        width,
        n_results: 1,
    };
    Some((cover, Candidates::new(one.all())?))
}

/// A pooling or depthwise convolution.
struct Parts {
    combination: Combination,
    size: Vec<usize>,
    window: Window,
    layout: Layout,
}

impl Parts {
    fn of(body: &Body, node: &Node) -> Option<Parts> {
        let (combination, size, window, layout) = match &node.op {
            Op::Pool {
                kind,
                size,
                window,
                layout,
                ..
            } => {
                let combination = match kind {
                    PoolKind::Max => Combination::Greatest,
                    kind => Combination::Average {
                        padded: *kind == PoolKind::AvgIncludePad,
                    },
                };
                (combination, &size[..], window, *layout)
            }
            Op::Conv {
                window,
                groups,
                layout,
            } => {
                let w = Weights::new(*layout, body.shape(node.inputs[1]));
                let is_depthwise = w.c_in == 1 && w.c_out == *groups && w.c_out > 1;
                let parts = (Combination::Weighted, w.taps, window, *layout);
                is_depthwise.then_some(parts)?
            }
            _ => return None,
        };
        Some(Parts {
            combination,
            size: size.to_vec(),
            window: window.clone(),
            layout,
        })
    }

    /// True if sums or extremes of such elements can be held. Infinities of 8-bit floats do not
    /// survive a conversion there and back, and the code that counts an average's elements is
    /// written out.
    fn suits(&self, dtype: DType) -> bool {
        let is_wide_float = dtype.is_float() && !dtype.is_float8();
        match self.combination {
            Combination::Greatest => dtype != DType::Bool && !dtype.is_float8(),
            Combination::Average { .. } => {
                is_wide_float && self.size.iter().all(|&n| n <= MOST_ALONG)
            }
            Combination::Weighted => is_wide_float,
        }
    }

    /// Spatial axis of a thread's results: the last, or with channels first the one before it.
    fn axis(&self) -> Option<usize> {
        let last = self.size.len().checked_sub(1)?;
        match self.layout {
            Layout::ChannelsLast => Some(last),
            Layout::ChannelsFirst => Some(last.saturating_sub(1)),
        }
    }

    /// Operands to be stored first.
    fn needs(&self, body: &Body, around: &MatchContext, node: &Node) -> Vec<ValueId> {
        let operands = node.inputs.iter().map(|&v| (v, CHEAP_FLOPS));
        let mut needs = stored_before(body, around, operands);
        if self.layout == Layout::ChannelsLast {
            // Neighbouring threads have neighbouring channels.
            let last = |v: ValueId| body.shape(v).len() - 1;
            let is_spread = |v: ValueId| !is_dense(body, v, last(v), around.in_memory);
            let spread = node.inputs.iter().copied().filter(|&v| is_spread(v));
            let more: Vec<ValueId> = spread.filter(|v| !needs.contains(v)).collect();
            needs.extend(more);
        }
        needs
    }

    /// Channels of a thread.
    fn width(
        &self,
        body: &Body,
        node: &Node,
        in_memory: &dyn Fn(ValueId) -> bool,
    ) -> Option<usize> {
        let of = |&v: &ValueId| Runs::of(body, v, body.shape(v).len() - 1, in_memory).width();
        match self.layout {
            Layout::ChannelsLast => node.inputs.iter().map(of).min(),
            Layout::ChannelsFirst => Some(1),
        }
    }
}

/// Place of a thread, which is its image, first channel and first spatial position, and the runs of
/// the operands.
struct Thread<'a> {
    image: Ix<Value>,
    channel: Ix<Value>,
    at: Vec<Ix<Value>>,
    x: (ValueId, &'a Runs),
    weights: Option<(ValueId, &'a Runs)>,
}

impl Windows {
    /// The same with each number of results, predicted to be best first.
    fn all(&self) -> Vec<Windows> {
        // Pixels of a single spatial axis are side by side, which is for neighbouring threads.
        let is_line = self.layout == Layout::ChannelsFirst && self.size.len() == 1;
        let most = if is_line { 1 } else { self.result[self.axis] };
        let fitting = RESULTS.into_iter().filter(|&n| n <= most);
        let of = |n_results| Windows {
            n_results,
            ..self.clone()
        };
        let mut all: Vec<Windows> = fitting.map(of).collect();
        let is_busy = |w: &Windows| w.n_items() >= MULTIPROCESSORS * ENOUGH_THREADS;
        let best = all.iter().position(is_busy);
        let best = best.unwrap_or(all.len() - 1);
        all[..=best].rotate_right(1);
        all
    }

    /// Extents of the threads' work: images, channels and spatial axes in the result's order.
    fn extents(&self) -> Vec<usize> {
        let mut spatial = self.result.clone();
        spatial[self.axis] = spatial[self.axis].div_ceil(self.n_results);
        let channels = self.n_channels / self.width;
        match self.layout {
            Layout::ChannelsFirst => [&[self.n_images, channels], &spatial[..]].concat(),
            Layout::ChannelsLast => [&[self.n_images], &spatial[..], &[channels]].concat(),
        }
    }

    fn n_items(&self) -> usize {
        self.extents().iter().product()
    }

    /// Spatial axes other than that of a thread's results.
    fn others(&self) -> Vec<usize> {
        (0..self.size.len()).filter(|&d| d != self.axis).collect()
    }

    /// True if every window lies in the operand along spatial axis `d`, for all results of
    /// threads.
    fn is_inside(&self, d: usize) -> bool {
        let w = &self.window;
        let n = match d == self.axis {
            true => self.result[d].next_multiple_of(self.n_results),
            false => self.result[d],
        };
        let end = (n - 1) * w.strides[d] + (self.size[d] - 1) * w.dilations[d];
        w.pads_low[d] == 0 && end < self.operand[d]
    }

    /// Position in the operand along axis `d`, so far from the start of the window of the result at
    /// `at`, and the condition that it lies there (`None`: always).
    fn place(
        &self,
        e: &mut Emitter,
        d: usize,
        (at, distance): (Ix<Value>, Ix<Value>),
    ) -> (Ix<Value>, Option<Value>) {
        let start = e.mul(at, self.window.strides[d] as i64);
        let padded = e.add(start, distance);
        let place = e.add(padded, Ix::C(-(self.window.pads_low[d] as i64)));
        let within = |e: &mut Emitter| {
            let extent = self.operand[d] as i64;
            e.compare_const(Order::Within, place, extent)
        };
        let inside = (!self.is_inside(d)).then(|| within(e));
        (place, inside)
    }

    /// Loops over the elements of a window along all axes but that of the thread's results; `tap`
    /// has those of the loops around.
    fn each_row(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        thread: &Thread,
        tap: &[Ix<Value>],
    ) -> Result<()> {
        let others = self.others();
        let rest: Vec<usize> = others[tap.len()..].iter().map(|&d| self.size[d]).collect();
        let Some(&n) = rest.first() else {
            return self.row(p, e, thread, tap);
        };
        let of = |t: Ix<Value>| [tap, &[t]].concat();
        if n == 1 {
            return self.each_row(p, e, thread, &of(Ix::C(0)));
        }
        if rest.iter().product::<usize>() <= MOST_UNROLLED {
            e.line("#pragma unroll");
        }
        e.counted(["0", &n.to_string(), "1"], |e, t| {
            p.scoped(|p| self.each_row(p, e, thread, &of(Ix::V(t))))
        })
    }

    /// One row of a window along the axis of the thread's results, for all of them.
    fn row(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        thread: &Thread,
        tap: &[Ix<Value>],
    ) -> Result<()> {
        let (mut position, mut conditions) = (thread.at.clone(), Vec::new());
        let mut taps = vec![Ix::C(0); self.size.len()];
        for (d, &tap) in self.others().into_iter().zip(tap) {
            let distance = e.mul(tap, self.window.dilations[d] as i64);
            let (place, inside) = self.place(e, d, (thread.at[d], distance));
            conditions.push(inside);
            (position[d], taps[d]) = (place, tap);
        }
        e.guarded(&conditions, |e| {
            p.scoped(|p| {
                self.load_weights(p, e, thread, &taps)?;
                let [stride, dilation] =
                    [&self.window.strides, &self.window.dilations].map(|steps| steps[self.axis]);
                let reach = (self.n_results - 1) * stride + (self.size[self.axis] - 1) * dilation;
                (0..=reach).try_for_each(|j| self.pixel(p, e, thread, &position, j))
            })
        })
    }

    /// Loads a row of the filter.
    fn load_weights(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        thread: &Thread,
        taps: &[Ix<Value>],
    ) -> Result<()> {
        let Some((weights, runs)) = thread.weights else {
            return Ok(());
        };
        let (n, width) = (self.size[self.axis], self.width);
        let ty = element_type(self.acc);
        e.line(&format!("{ty} weight[{n}][{width}];"));
        let filter = Weights::new(self.layout, p.body.shape(weights));
        let mut taps = taps.to_vec();
        for t in 0..n {
            taps[self.axis] = Ix::C(t as i64);
            let at = filter.index(&taps, Ix::C(0), thread.channel);
            runs.each(p, e, weights, &at, |e, k, value| {
                let value = e.convert(value, self.dtype, self.acc)?;
                e.set(&format!("weight[{t}][{}]", e.position(k)), value);
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Loads the pixel `j` places after a row's first, for all windows over it.
    fn pixel(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        thread: &Thread,
        position: &[Ix<Value>],
        j: usize,
    ) -> Result<()> {
        let users = self.users(j);
        if users.is_empty() {
            return Ok(());
        }
        let distance = Ix::C(j as i64);
        let (place, inside) = self.place(e, self.axis, (thread.at[self.axis], distance));
        let mut position = position.to_vec();
        position[self.axis] = place;
        let at = activation_index(self.layout, thread.image, thread.channel, &position);
        let (x, runs) = thread.x;
        e.guarded(&[inside], |e| {
            p.scoped(|p| {
                runs.each(p, e, x, &at, |e, k, value| {
                    let value = e.convert(value, self.dtype, self.acc)?;
                    users
                        .iter()
                        .try_for_each(|&user| self.combine(e, user, k, value))
                })
            })
        })
    }

    /// Results of a thread with a pixel `j` places after the first of its row, each with the number
    /// of the pixel in its window.
    fn users(&self, j: usize) -> Vec<(usize, usize)> {
        let axis = self.axis;
        let (stride, dilation) = (self.window.strides[axis], self.window.dilations[axis]);
        let of = |r: usize| {
            let distance = j.checked_sub(r * stride)?;
            let t = distance / dilation;
            let is_one = distance.is_multiple_of(dilation) && t < self.size[axis];
            is_one.then_some((r, t))
        };
        (0..self.n_results).filter_map(of).collect()
    }

    /// Adds channel `k` of a pixel to result `r`, of whose window it is element `t` of the row.
    fn combine(
        &self,
        e: &mut Emitter,
        (r, t): (usize, usize),
        k: Ix<Value>,
        value: Value,
    ) -> Result<()> {
        let k = e.position(k);
        let name = format!("sum[{r}][{k}]");
        let sum = e.named(Kind::Element(self.acc), name.clone());
        let next = match self.combination {
            Combination::Greatest => e.combine(ScalarOp::Max, sum, value)?,
            Combination::Average { .. } => e.combine(ScalarOp::Add, sum, value)?,
            Combination::Weighted => {
                let value = e.text(value).to_owned();
                let next = format!("gm_multiply_add({value}, weight[{t}][{k}], {name})");
                e.define(Kind::Element(self.acc), &next)
            }
        };
        e.set(&name, next);
        Ok(())
    }

    /// Elements of the window at `at` for an average: as many as lie in the operand, or in its
    /// padding, too.
    fn count(&self, e: &mut Emitter, at: &[Ix<Value>], padded: bool) -> Ix<Value> {
        let mut count = Ix::C(1);
        for (d, &at) in at.iter().enumerate() {
            let w = &self.window;
            let (low, high) = (w.pads_low[d], w.pads_high[d]);
            let (first, extent) = match padded {
                true => (0, self.operand[d] + low + high),
                false => (-(low as i64), self.operand[d]),
            };
            let start = e.mul(at, w.strides[d] as i64);
            let start = e.add(start, Ix::C(first));
            let end = (self.result[d] - 1) * w.strides[d] + (self.size[d] - 1) * w.dilations[d];
            let mut own = Ix::C(self.size[d] as i64);
            if first != 0 || end >= extent {
                own = Ix::C(0);
                for t in 0..self.size[d] {
                    let place = e.add(start, Ix::C((t * w.dilations[d]) as i64));
                    let within = e.compare_const(Order::Within, place, extent as i64);
                    let one = e.truth_to_index(within);
                    own = e.add(own, Ix::V(one));
                }
            }
            let (a, b) = (e.val(count), e.val(own));
            count = match (count, own) {
                (Ix::C(1), _) => own,
                _ => Ix::V(e.index_mul(a, b)),
            };
        }
        count
    }

    /// Stores result `r` of a thread.
    fn store(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        thread: &Thread,
        r: usize,
        out: Value,
    ) -> Result<()> {
        let mut at = thread.at.clone();
        at[self.axis] = e.add(at[self.axis], Ix::C(r as i64));
        let inside = e.below(at[self.axis], self.result[self.axis], self.n_results);
        e.guarded(&[inside.filter(|_| r > 0)], |e| {
            let count = match self.combination {
                Combination::Average { padded } => {
                    let count = self.count(e, &at, padded);
                    Some(e.val(count))
                }
                _ => None,
            };
            let (dtype, width) = (p.body.dtype(self.node.result), self.width);
            let name = e.declare_vectors(dtype, width, 1);
            let first = activation_index(self.layout, thread.image, thread.channel, &at);
            let (own, roots) = (self.node.own(p.body), [self.node.result]);
            let loads = RunLoads::new(p, e, &roots, own, &first, width);
            let k = e.open_unrolled(width);
            let sum = format!("sum[{r}][{}]", e.text(k));
            let mut value = e.named(Kind::Element(self.acc), sum);
            if let Some(count) = count {
                value = average(e, self.acc, value, count)?;
            }
            let channel = e.add(thread.channel, Ix::V(k));
            let at = activation_index(self.layout, thread.image, channel, &at);
            loads.remember(p, e, k, &at);
            let y = self.node.epilogue(p, e, &at, value)?;
            e.set(&format!("{name}[0].v[{}]", e.text(k)), y);
            e.close();
            let linear = e.linearise(&first, p.body.shape(self.node.result));
            let to = format!("{} + {}", e.text(out), e.position(linear));
            e.line(&format!("gm_store<{width}>({to}, {name}[0]);"));
            Ok(())
        })
    }

    /// Declares a thread's sums or extremes so far.
    fn declare(&self, e: &mut Emitter) -> Result<()> {
        let (ty, n, width) = (element_type(self.acc), self.n_results, self.width);
        let (dtype, bits) = match self.combination {
            // The least of the operand's elements: a window may lie in the padding alone.
            Combination::Greatest => (self.dtype, extreme_bits(self.dtype, Extremum::Max)),
            _ => (self.acc, 0),
        };
        let identity = e.constant(dtype, bits);
        let identity = e.convert(identity, dtype, self.acc)?;
        e.line(&format!("{ty} sum[{n}][{width}];"));
        let r = e.open_unrolled(n);
        let k = e.open_unrolled(width);
        let name = format!("sum[{}][{}]", e.text(r), e.text(k));
        e.set(&name, identity);
        (0..2).for_each(|_| e.close());
        Ok(())
    }
}

impl Candidate for Windows {
    fn name(&self) -> &'static str {
        "windows"
    }

    fn words(&self) -> String {
        let (results, width) = (self.n_results, self.width);
        format!("{results} x {width} results per thread")
    }

    fn result(&self) -> ValueId {
        self.node.result
    }

    fn resources(&self) -> Resources {
        Resources {
            per_multiprocessor: 2,
            ..Resources::new(self.n_items().div_ceil(BLOCK), BLOCK)
        }
    }

    fn work(&self) -> Work {
        let along = self.size[self.axis];
        let rows: usize = self.others().into_iter().map(|d| self.size[d]).product();
        let reach = (self.n_results - 1) * self.window.strides[self.axis] + along;
        let filter = match self.combination {
            Combination::Weighted => along,
            _ => 0,
        };
        let per_thread = (self.width * rows * (reach + filter)) as f64;
        let n_items = self.n_items() as f64;
        let products = (self.n_results * self.width * rows * along) as f64;
        Work {
            n_tiles: self.n_items().div_ceil(BLOCK),
            bytes: n_items * per_thread * self.dtype.size_bytes() as f64,
            n_products: n_items * products,
            products_per_byte: PRODUCTS_PER_BYTE,
            partial_bytes: 0.0,
        }
    }

    fn partial(&self, _: &Body) -> Option<(DType, usize)> {
        None
    }

    fn n_results(&self) -> usize {
        self.n_images * self.n_channels * self.result.iter().product::<usize>()
    }

    fn emit(&self, p: &mut Puller<Value>, e: &mut Emitter, out: Value) -> Result<()> {
        let inputs = self.node.of(p.body).inputs.clone();
        let stored: Vec<ValueId> = p.stored.keys().copied().collect();
        let in_memory = |v: ValueId| stored.contains(&v);
        let runs: Vec<Runs> = inputs
            .iter()
            .map(|&v| {
                let last = p.body.shape(v).len() - 1;
                Runs::of_width(p.body, v, last, &in_memory, self.width)
            })
            .collect();
        let extents = self.extents();
        let first = "ix(blockIdx.x) * ix(blockDim.x) + ix(threadIdx.x)";
        let end = self.n_items().to_string();
        let step = "ix(gridDim.x) * ix(blockDim.x)";
        e.counted([first, &end, step], |e, item| {
            let at = e.delinearise(Ix::V(item), &extents);
            let mut spatial = spatial_axes(self.layout, &at).to_vec();
            spatial[self.axis] = e.mul(spatial[self.axis], self.n_results as i64);
            let thread = Thread {
                image: at[0],
                channel: e.mul(channel_axis(self.layout, &at), self.width as i64),
                at: spatial,
                x: (inputs[0], &runs[0]),
                weights: inputs.get(1).map(|&w| (w, &runs[1])),
            };
            self.declare(e)?;
            self.each_row(p, e, &thread, &[])?;
            let store = |r| p.scoped(|p| self.store(p, e, &thread, r, out));
            (0..self.n_results).try_for_each(store)
        })
    }

    fn join(&self, _: &mut Puller<Value>, _: &mut Emitter, _: Value, _: [Value; 2]) -> Result<()> {
        Err(Error::internal("windows are not shared among blocks"))
    }
}
