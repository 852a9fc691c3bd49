//! Pull-based code of bilinear samples: an element of [`Op::Sample`] is one, and an element of a region of
//! interest loops over those of its bin.

use super::{Emit, Ix, Kind, Order, Puller};
use crate::error::{Error, Result};
use crate::ir::ops::MAX_ROI_SAMPLES;
use crate::ir::vecprog::real_bits;
use crate::ir::{Node, Op, PoolKind, Real, ScalarOp};
use gristmill_runtime::{DType, status};
use std::hash::Hash;

/// Attributes of the op, and the dtype of positions: that of the regions, `f32` at least.
struct Regions<'a> {
    kind: PoolKind,
    size: &'a [usize],
    sampling: usize,
    scale: Real,
    half_pixel: bool,
    dtype: DType,
}

/// Samples of a bin along one axis.
struct Samples<V> {
    /// Where the bin starts.
    start: V,
    /// Extent of the bin.
    bin: V,
    /// Number of samples.
    n: V,
}

/// A position between two pixels.
struct Neighbours<V> {
    /// True inside of the image.
    inside: V,
    /// Both pixels, with their weights.
    pixels: [(V, V); 2],
}

/// Arithmetic on positions of one dtype.
struct Positions<'e, E: Emit> {
    e: &'e mut E,
    dtype: DType,
}

impl<E: Emit> Positions<'_, E> {
    fn constant(&mut self, v: f64) -> E::Value {
        self.e.constant(self.dtype, real_bits(self.dtype, v))
    }

    fn op(&mut self, op: ScalarOp, args: &[E::Value]) -> Result<E::Value> {
        self.e.primitive(op, self.dtype, self.dtype, args)
    }

    fn op_real(&mut self, op: ScalarOp, x: E::Value, v: f64) -> Result<E::Value> {
        let v = self.constant(v);
        self.op(op, &[x, v])
    }

    fn compare(&mut self, op: ScalarOp, x: E::Value, v: f64) -> Result<E::Value> {
        let v = self.constant(v);
        self.e.primitive(op, self.dtype, DType::Bool, &[x, v])
    }

    fn position_of_index(&mut self, i: E::Value) -> Result<E::Value> {
        let i = self.e.index_to_i64(i);
        self.e.convert(i, DType::I64, self.dtype)
    }

    /// A position that is a whole number, as an index.
    fn index_of_position(&mut self, x: E::Value) -> Result<E::Value> {
        let i = self.e.convert(x, self.dtype, DType::I64)?;
        Ok(self.e.i64_to_index(i))
    }

    /// Neighbours of sample `i` in an image of `extent` pixels.
    fn neighbours(
        &mut self,
        samples: &Samples<E::Value>,
        i: E::Value,
        extent: usize,
    ) -> Result<Neighbours<E::Value>> {
        let at = self.sample(samples, i)?;
        let above = self.compare(ScalarOp::Ge, at, -1.0)?;
        let below = self.compare(ScalarOp::Le, at, extent as f64)?;
        let inside = self.e.both(above, below)?;
        // Outside, and for NaN, the pixels stay in the image too.
        let zero = self.constant(0.0);
        let at = self.e.choose(inside, at, zero);
        let at = self.op(ScalarOp::Max, &[at, zero])?;
        let at = self.op_real(ScalarOp::Min, at, extent as f64 - 1.0)?;
        let floor = self.op(ScalarOp::Floor, &[at])?;
        let rest = self.op(ScalarOp::Sub, &[at, floor])?;
        let one = self.constant(1.0);
        let first = self.op(ScalarOp::Sub, &[one, rest])?;
        let low = self.index_of_position(floor)?;
        let high = self.e.index_add_const(low, 1);
        let last = self.e.index(extent as i64 - 1);
        let high = self.e.index_min(high, last);
        Ok(Neighbours {
            inside,
            pixels: [(low, first), (high, rest)],
        })
    }

    /// Position of sample `i`.
    fn sample(&mut self, samples: &Samples<E::Value>, i: E::Value) -> Result<E::Value> {
        let i = self.position_of_index(i)?;
        let middle = self.op_real(ScalarOp::Add, i, 0.5)?;
        let reach = self.op(ScalarOp::Mul, &[middle, samples.bin])?;
        let n = self.position_of_index(samples.n)?;
        let within = self.op(ScalarOp::Div, &[reach, n])?;
        self.op(ScalarOp::Add, &[samples.start, within])
    }

    /// Number of samples of a bin, where it depends on the bin's extent.
    fn adaptive(&mut self, bin: E::Value) -> Result<E::Value> {
        let n = self.op(ScalarOp::Ceil, &[bin])?;
        let excess = self.compare(ScalarOp::Gt, n, MAX_ROI_SAMPLES as f64)?;
        self.e.fault_if(excess, status::INDEX_OUT_OF_RANGE);
        let least = self.compare(ScalarOp::Ge, n, 0.0)?;
        let zero = self.constant(0.0);
        let n = self.e.choose(least, n, zero);
        self.index_of_position(n)
    }

    /// Samples of bin `number` of a region between two coordinates.
    fn samples(
        &mut self,
        regions: &Regions,
        [from, to]: [E::Value; 2],
        (number, n_bins): (E::Value, usize),
    ) -> Result<Samples<E::Value>> {
        let offset = if regions.half_pixel { 0.5 } else { 0.0 };
        let scaled = self.op_real(ScalarOp::Mul, from, regions.scale.0)?;
        let start = self.op_real(ScalarOp::Sub, scaled, offset)?;
        let scaled = self.op_real(ScalarOp::Mul, to, regions.scale.0)?;
        let end = self.op_real(ScalarOp::Sub, scaled, offset)?;
        let mut extent = self.op(ScalarOp::Sub, &[end, start])?;
        if !regions.half_pixel {
            extent = self.op_real(ScalarOp::Max, extent, 1.0)?;
        }
        let bin = self.op_real(ScalarOp::Div, extent, n_bins as f64)?;
        let number = self.position_of_index(number)?;
        let before = self.op(ScalarOp::Mul, &[number, bin])?;
        let start = self.op(ScalarOp::Add, &[start, before])?;
        let n = match regions.sampling {
            0 => self.adaptive(bin)?,
            n => self.e.index(n as i64),
        };
        Ok(Samples { start, bin, n })
    }
}

/// Joins samples: sums, or maxima.
fn join<E: Emit>(e: &mut E, kind: PoolKind, a: E::Value, b: E::Value) -> Result<E::Value> {
    let op = match kind {
        PoolKind::Max => ScalarOp::Max,
        PoolKind::Avg | PoolKind::AvgIncludePad => ScalarOp::Add,
    };
    e.primitive(op, DType::F64, DType::F64, &[a, b])
}

fn f64_constant<E: Emit>(e: &mut E, v: f64) -> E::Value {
    e.constant(DType::F64, v.to_bits())
}

impl<V: Copy + Eq + Hash> Puller<'_, V> {
    /// An element of [`Op::RoiAlign`].
    pub(super) fn roi_align<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        node: &Node,
        at: &[Ix<V>],
    ) -> Result<V> {
        let dtype = self.body.dtype(node.outputs[0]);
        if self.body.n_elements(node.inputs[0]) == 0 {
            return Ok(e.constant(dtype, 0));
        }
        let regions = self.regions(node)?;
        let rows = self.samples(e, node, &regions, (0, at))?;
        let columns = self.samples(e, node, &regions, (1, at))?;
        let first = f64_constant(e, first_value(regions.kind));
        let image = self.index(
            e,
            node.inputs[2],
            &at[..1],
            self.body.shape(node.inputs[0])[0],
        )?;
        let joined = e.for_loop(Ix::C(0), Ix::V(rows.n), 1, &[first], |e, i, carried| {
            e.for_loop(Ix::C(0), Ix::V(columns.n), 1, carried, |e, j, carried| {
                let plane = [image, at[1]];
                let along = [(&rows, i), (&columns, j)];
                let sample = self.scoped(|s| s.region_sample(e, node, &regions, plane, along))?;
                Ok(vec![join(e, regions.kind, carried[0], sample)?])
            })
        })?[0];
        let n = e.index_mul(rows.n, columns.n);
        let result = pooled(e, regions.kind, joined, n)?;
        e.convert(result, DType::F64, dtype)
    }

    fn regions<'n>(&self, node: &'n Node) -> Result<Regions<'n>> {
        let Op::RoiAlign {
            kind,
            size,
            sampling,
            scale,
            half_pixel,
        } = &node.op
        else {
            return Err(Error::internal("regions of another op"));
        };
        let is_double = self.body.dtype(node.inputs[1]) == DType::F64;
        Ok(Regions {
            kind: *kind,
            size,
            sampling: *sampling,
            scale: *scale,
            half_pixel: *half_pixel,
            dtype: if is_double { DType::F64 } else { DType::F32 },
        })
    }

    /// Samples of the bin at `at` along a spatial axis. A region is `[x1, y1, x2, y2]`.
    fn samples<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        node: &Node,
        regions: &Regions,
        (axis, at): (usize, &[Ix<V>]),
    ) -> Result<Samples<V>> {
        let mut bounds = Vec::new();
        for corner in [1 - axis, 3 - axis] {
            let bound = self.value(e, node.inputs[1], &[at[0], Ix::C(corner as i64)])?;
            let from = self.body.dtype(node.inputs[1]);
            bounds.push(e.convert(bound, from, regions.dtype)?);
        }
        let number = e.val(at[2 + axis]);
        let dtype = regions.dtype;
        let bin = (number, regions.size[axis]);
        Positions { e, dtype }.samples(regions, [bounds[0], bounds[1]], bin)
    }

    /// A bilinear sample of the plane of an image and a channel, in `f64`; 0 outside.
    fn region_sample<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        node: &Node,
        regions: &Regions,
        plane: [Ix<V>; 2],
        along: [(&Samples<V>, V); 2],
    ) -> Result<V> {
        let [height, width] = [2, 3].map(|axis| self.body.shape(node.inputs[0])[axis]);
        let dtype = regions.dtype;
        let mut positions = Positions { e, dtype };
        let rows = positions.neighbours(along[0].0, along[0].1, height)?;
        let columns = positions.neighbours(along[1].0, along[1].1, width)?;
        let inside = e.both(rows.inside, columns.inside)?;
        let sampled = |s: &mut Self, e: &mut E| {
            let mut joined = None;
            for (y, wy) in rows.pixels {
                for (x, wx) in columns.pixels {
                    let weight = e.primitive(ScalarOp::Mul, dtype, dtype, &[wy, wx])?;
                    let at = [plane[0], plane[1], Ix::V(y), Ix::V(x)];
                    let term = s.scoped(|s| s.weighted(e, node, &at, (weight, dtype)))?;
                    joined = Some(match joined {
                        None => term,
                        Some(others) => join(e, regions.kind, others, term)?,
                    });
                }
            }
            Ok(joined.into_iter().collect())
        };
        let outside = |_: &mut Self, e: &mut E| Ok(vec![f64_constant(e, 0.0)]);
        let kinds = [Kind::Element(DType::F64)];
        Ok(e.branch(inside, &kinds, self, sampled, outside)?[0])
    }

    fn weighted<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        node: &Node,
        at: &[Ix<V>],
        (weight, dtype): (V, DType),
    ) -> Result<V> {
        let x = node.inputs[0];
        let pixel = self.value(e, x, at)?;
        let pixel = e.convert(pixel, self.body.dtype(x), DType::F64)?;
        let weight = e.convert(weight, dtype, DType::F64)?;
        e.primitive(ScalarOp::Mul, DType::F64, DType::F64, &[weight, pixel])
    }
}

/// Identity of joining.
fn first_value(kind: PoolKind) -> f64 {
    match kind {
        PoolKind::Max => f64::NEG_INFINITY,
        PoolKind::Avg | PoolKind::AvgIncludePad => 0.0,
    }
}

/// The bin's value from its `n` joined samples; 0 of none.
fn pooled<E: Emit>(e: &mut E, kind: PoolKind, joined: E::Value, n: E::Value) -> Result<E::Value> {
    if kind == PoolKind::Max {
        let one = e.index(1);
        let is_empty = e.index_compare(Order::Less, n, one);
        let zero = f64_constant(e, 0.0);
        return Ok(e.choose(is_empty, zero, joined));
    }
    let one = e.index(1);
    let n = e.index_max(n, one);
    let n = e.index_to_i64(n);
    let n = e.convert(n, DType::I64, DType::F64)?;
    e.primitive(ScalarOp::Div, DType::F64, DType::F64, &[joined, n])
}

impl<V: Copy + Eq + Hash> Puller<'_, V> {
    /// An element of [`Op::Sample`].
    pub(super) fn sample<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        node: &Node,
        at: &[Ix<V>],
    ) -> Result<V> {
        let Op::Sample { groups } = &node.op else {
            return Err(Error::internal("samples of another op"));
        };
        let channels = self.body.shape(node.inputs[0])[1];
        let (group, _) = e.div_rem(at[1], channels / groups);
        let mut sample = match self.body.n_elements(node.inputs[0]) {
            0 => f64_constant(e, 0.0),
            _ => self.bilinear_sample(e, node, group, at)?,
        };
        if let Some(&mask) = node.inputs.get(2) {
            let weight = self.value(e, mask, &[at[0], group, at[2], at[3]])?;
            let weight = e.convert(weight, self.body.dtype(mask), DType::F64)?;
            sample = e.primitive(ScalarOp::Mul, DType::F64, DType::F64, &[weight, sample])?;
        }
        e.convert(sample, DType::F64, self.body.dtype(node.outputs[0]))
    }

    /// A bilinear sample of `x`, in `f64`.
    fn bilinear_sample<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        node: &Node,
        group: Ix<V>,
        at: &[Ix<V>],
    ) -> Result<V> {
        let (rows, columns) = (
            self.neighbours(e, node, group, (0, at))?,
            self.neighbours(e, node, group, (1, at))?,
        );
        let inside = e.both(rows.inside, columns.inside)?;
        let dtype = self.body.dtype(node.inputs[1]);
        let sampled = |s: &mut Self, e: &mut E| {
            let plane = [at[0], at[1]];
            Ok(vec![s.scoped(|s| {
                s.bilinear(e, node, dtype, plane, [&rows, &columns])
            })?])
        };
        let outside = |_: &mut Self, e: &mut E| Ok(vec![f64_constant(e, 0.0)]);
        let kinds = [Kind::Element(DType::F64)];
        Ok(e.branch(inside, &kinds, self, sampled, outside)?[0])
    }

    /// The pixels around a position along an axis, and the condition that one of them may be in the image.
    fn neighbours<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        node: &Node,
        group: Ix<V>,
        (d, at): (usize, &[Ix<V>]),
    ) -> Result<Neighbours<V>> {
        let (positions, extent) = (node.inputs[1], self.body.shape(node.inputs[0])[2 + d]);
        let axis = Ix::C(d as i64);
        let at = self.value(e, positions, &[at[0], group, at[2], axis, at[3]])?;
        let dtype = self.body.dtype(positions);
        let mut p = Positions { e, dtype };
        let above = p.compare(ScalarOp::Gt, at, -1.0)?;
        let below = p.compare(ScalarOp::Lt, at, extent as f64)?;
        let inside = p.e.both(above, below)?;
        // Elsewhere, and for NaN, positions are small numbers too.
        let zero = p.constant(0.0);
        let at = p.e.choose(inside, at, zero);
        let floor = p.op(ScalarOp::Floor, &[at])?;
        let rest = p.op(ScalarOp::Sub, &[at, floor])?;
        let one = p.constant(1.0);
        let first = p.op(ScalarOp::Sub, &[one, rest])?;
        let low = p.index_of_position(floor)?;
        let high = p.e.index_add_const(low, 1);
        Ok(Neighbours {
            inside,
            pixels: [(low, first), (high, rest)],
        })
    }

    /// The weighted sum of four pixels, of which those outside of the image are 0.
    fn bilinear<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        node: &Node,
        dtype: DType,
        plane: [Ix<V>; 2],
        [rows, columns]: [&Neighbours<V>; 2],
    ) -> Result<V> {
        let extents = [2, 3].map(|axis| self.body.shape(node.inputs[0])[axis] as i64);
        let mut sum = f64_constant(e, 0.0);
        for (y, wy) in rows.pixels {
            for (x, wx) in columns.pixels {
                let weight = e.primitive(ScalarOp::Mul, dtype, dtype, &[wy, wx])?;
                let is_row = e.compare_const(Order::Within, Ix::V(y), extents[0]);
                let is_column = e.compare_const(Order::Within, Ix::V(x), extents[1]);
                let is_pixel = e.both(is_row, is_column)?;
                let at = [plane[0], plane[1], Ix::V(y), Ix::V(x)];
                let pixel = |s: &mut Self, e: &mut E| {
                    let term = s.scoped(|s| s.weighted(e, node, &at, (weight, dtype)))?;
                    Ok(vec![e.primitive(
                        ScalarOp::Add,
                        DType::F64,
                        DType::F64,
                        &[sum, term],
                    )?])
                };
                let kinds = [Kind::Element(DType::F64)];
                sum = e.branch(is_pixel, &kinds, self, pixel, |_, _| Ok(vec![sum]))?[0];
            }
        }
        Ok(sum)
    }
}
