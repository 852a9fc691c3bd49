//! Bilinear samples of images.

use super::Op;
use super::product::accumulators;
use crate::error::{Error, Result};
use crate::ir::eval::Call;
use crate::ir::gradient::Vjp;
use crate::ir::graph::Graph;
use crate::ir::infer::{self, Inferred};
use crate::ir::types::Type;
use crate::ir::{Dim, ReduceKind, ScalarOp, ScatterKind, ValueId};
use gristmill_runtime::{DType, Tensor};

pub(super) fn sample_infer(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, Sample { groups });
    let (x, positions) = (&args[0], &args[1]);
    if x.rank() != 4 || !x.dtype.is_float() || x.dtype.is_float8() {
        return Err(format!("expected floats [n, c, h, w], got {x}"));
    }
    if *groups == 0 || x.shape[1].exact_div(&(*groups).into()).is_none() {
        let channels = &x.shape[1];
        return Err(format!(
            "{channels} channels do not divide into {groups} groups of positions"
        ));
    }
    let is_position = matches!(positions.dtype, DType::F32 | DType::F64);
    let lead = [x.shape[0].clone(), (*groups).into()];
    let fits = positions.rank() == 5 && positions.shape[..2] == lead && positions.shape[3].is(2);
    if !is_position || !fits {
        let [n, groups] = lead;
        return Err(format!(
            "expected positions f32 or f64 [{n}, {groups}, taps, 2, points], got {positions}"
        ));
    }
    let (taps, points) = (&positions.shape[2], &positions.shape[4]);
    let mask = Type::new(x.dtype, lead.iter().chain([taps, points]));
    if let Some(found) = args.get(2).filter(|t| **t != mask) {
        return Err(format!("expected a mask {mask}, got {found}"));
    }
    let shape = [&x.shape[0], &x.shape[1], taps, points];
    infer::one(x.dtype, shape.map(Clone::clone).to_vec())
}

/// Weights are computed in the dtype of the positions, samples in `f64`, rounded once.
pub(super) fn sample_eval(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c.op, Sample { groups });
    let &[_, channels, taps, points] = c.shape else {
        return Err(Error::internal("samples of another rank"));
    };
    let (x, plane) = (c.inputs[0].to_f64s(), &c.inputs[0].shape()[2..]);
    let positions = c.inputs[1].to_f64s();
    let mask = c.inputs.get(2).map(|m| m.to_f64s());
    let is_double = c.inputs[1].dtype() == DType::F64;
    let n_pixels = plane[0] * plane[1];
    let mut samples = accumulators::<f64>(c.shape)?;
    for (i, to) in samples.iter_mut().enumerate() {
        let (point, tap) = (i % points, i / points % taps);
        let (image, channel) = (i / points / taps / channels, i / points / taps % channels);
        let group = channel / (channels / groups);
        let row = (image * groups + group) * taps + tap;
        let along = |d: usize| Neighbours::of(positions[(row * 2 + d) * points + point], is_double);
        let pixels = &x[(image * channels + channel) * n_pixels..][..n_pixels];
        let sample = sample([along(0), along(1)], plane, pixels, is_double);
        let weight = mask.as_ref().map_or(1.0, |m| m[row * points + point]);
        *to = weight * sample;
    }
    Ok(vec![Tensor::from_f64s(
        c.inputs[0].dtype(),
        c.shape,
        &samples,
    )?])
}

/// Two neighbouring pixels along one axis, with their weights.
struct Neighbours([(f64, f64); 2]);

impl Neighbours {
    fn of(at: f64, is_double: bool) -> Neighbours {
        let round = rounding(is_double);
        let rest = round(at - at.floor());
        Neighbours([(at.floor(), round(1.0 - rest)), (at.floor() + 1.0, rest)])
    }
}

/// A bilinear sample. Pixels outside of the plane are 0, and so is a sample that is a pixel or more outside.
fn sample(along: [Neighbours; 2], plane: &[usize], pixels: &[f64], is_double: bool) -> f64 {
    let is_inside = |i: f64, d: usize| (0.0..plane[d] as f64).contains(&i);
    if along.iter().any(|n| n.0[0].0 == -1.0 && n.0[1].1 == 0.0) {
        return 0.0;
    }
    let mut sum = 0.0;
    for (y, wy) in along[0].0 {
        for (x, wx) in along[1].0 {
            if is_inside(y, 0) && is_inside(x, 1) {
                let weight = rounding(is_double)(wy * wx);
                sum += weight * pixels[y as usize * plane[1] + x as usize];
            }
        }
    }
    sum
}

fn rounding(is_double: bool) -> fn(f64) -> f64 {
    match is_double {
        true => |v| v,
        false => |v| f64::from(v as f32),
    }
}

/// The gradient of the image goes to the four neighbours of each sample by their weights; that of a position
/// is how much the weights change along an axis.
pub(super) fn sample_gradient(v: &mut Vjp) -> Result<()> {
    let shapes = SampleShapes::of(v)?;
    let corners = shapes.corners(v)?;
    let g = v.g()?;
    let g = v.reshape(g, &shapes.of_channels)?;
    let weighted = match v.n_operands() {
        3 => {
            let mask = v.reshape(v.x(2), &shapes.of_group)?;
            v.mul(g, mask)?
        }
        _ => g,
    };
    if v.needs(0) {
        shapes.give_image(v, &corners, weighted)?;
    }
    let gives_mask = v.n_operands() == 3 && v.needs(2);
    if !v.needs(1) && !gives_mask {
        return Ok(());
    }
    let pixels = shapes.pixels(v, &corners)?;
    shapes.give_positions(v, &corners, &pixels, weighted)?;
    if !gives_mask {
        return Ok(());
    }
    let terms = |c: &Corner| c.weight;
    let sample = sum_of_products(v, &corners, &pixels, &terms)?;
    let term = v.mul(g, sample)?;
    let sum = v.reduce(ReduceKind::Sum, term, &[2])?;
    let mask = v.shape(v.x(2));
    let sum = v.reshape(sum, &mask)?;
    v.give(2, sum)
}

/// Shapes of the operands with the samples along one axis.
struct SampleShapes {
    plane: [usize; 2],
    /// `[n, groups, channels, pixels]`.
    image: Vec<Dim>,
    /// `[n, groups, channels, samples]`.
    of_channels: Vec<Dim>,
    /// `[n, groups, 1, samples]`.
    of_group: Vec<Dim>,
}

/// One of the four pixels around each sample.
struct Corner {
    /// True in the image.
    inside: ValueId,
    /// Number of the pixel, for each channel; 0 beside the image.
    index: ValueId,
    weight: ValueId,
    /// Derivatives of the weight by the position.
    slopes: [ValueId; 2],
}

/// One of the two pixels along an axis, of shape `[n, groups, 1, samples]`.
struct Side {
    inside: ValueId,
    index: ValueId,
    weight: ValueId,
    /// Derivative of the weight by the position.
    slope: ValueId,
}

impl SampleShapes {
    fn of(v: &Vjp) -> Result<SampleShapes> {
        let Op::Sample { groups } = v.op() else {
            return v.refuse("the op is no sample");
        };
        let (image, at) = (v.shape(v.x(0)), v.shape(v.x(1)));
        let Some((height, width)) = image[2].as_usize().zip(image[3].as_usize()) else {
            return v.refuse("the planes of its images have no known extents");
        };
        let of_group = image[1].exact_div(&groups.into());
        let Some(channels) = of_group.filter(|_| height > 0 && width > 0) else {
            return v.refuse("its images are empty");
        };
        let (n, groups) = (image[0].clone(), Dim::from(groups));
        let samples = at[2].product(&at[4]);
        let with = |a: &Dim, b: &Dim| vec![n.clone(), groups.clone(), a.clone(), b.clone()];
        Ok(SampleShapes {
            plane: [height, width],
            image: with(&channels, &image[2].product(&image[3])),
            of_channels: with(&channels, &samples),
            of_group: with(&1.into(), &samples),
        })
    }

    fn corners(&self, v: &mut Vjp) -> Result<Vec<Corner>> {
        let dtype = v.ty(v.x(0)).dtype;
        let rows = self.sides(v, 0)?;
        let columns = self.sides(v, 1)?;
        let mut corners = Vec::new();
        for row in &rows {
            for column in &columns {
                let index = v.times(row.index, self.plane[1] as f64)?;
                let index = v.add(index, column.index)?;
                let mut product = |a: ValueId, b: ValueId| {
                    let product = v.mul(a, b)?;
                    v.cast(product, dtype)
                };
                let weight = product(row.weight, column.weight)?;
                let slopes = [
                    product(row.slope, column.weight)?,
                    product(row.weight, column.slope)?,
                ];
                corners.push(Corner {
                    inside: v.map(ScalarOp::And, &[row.inside, column.inside])?,
                    index: v.broadcast(index, &self.of_channels)?,
                    weight,
                    slopes,
                });
            }
        }
        Ok(corners)
    }

    /// The pixels before and behind all positions along an axis.
    fn sides(&self, v: &mut Vjp, d: usize) -> Result<[Side; 2]> {
        let (positions, extent) = (v.x(1), self.plane[d]);
        let mut sizes = v.shape(positions);
        sizes[3] = 1.into();
        let mut starts = vec![Dim::from(0); sizes.len()];
        starts[3] = d.into();
        let at = v.slice(positions, starts, sizes)?;
        let at = v.reshape(at, &self.of_group)?;
        // Elsewhere, and for NaN, positions are small numbers too.
        let above = v.with_number(ScalarOp::Gt, at, -1.0)?;
        let below = v.with_number(ScalarOp::Lt, at, extent as f64)?;
        let is_near = v.map(ScalarOp::And, &[above, below])?;
        let at = v.keep(is_near, at)?;
        let floor = v.map(ScalarOp::Floor, &[at])?;
        let rest = v.sub(at, floor)?;
        let before = v.minus_from(1.0, rest)?;
        let next = v.plus(floor, 1.0)?;
        let area = (is_near, extent);
        Ok([
            Side::of(v, area, floor, (before, -1.0))?,
            Side::of(v, area, next, (rest, 1.0))?,
        ])
    }

    /// The elements of the image at the corners, 0 beside it.
    fn pixels(&self, v: &mut Vjp, corners: &[Corner]) -> Result<Vec<ValueId>> {
        let image = v.reshape(v.x(0), &self.image)?;
        let pixel = |c: &Corner| {
            let pixel = v.emit(Op::GatherElements { axis: 3 }, &[image, c.index])?;
            v.keep(c.inside, pixel)
        };
        corners.iter().map(pixel).collect()
    }

    fn give_image(&self, v: &mut Vjp, corners: &[Corner], weighted: ValueId) -> Result<()> {
        let image = v.reshape(v.x(0), &self.image)?;
        let mut sums = v.zeros_like(image)?;
        let (axis, kind) = (3, ScatterKind::Add);
        for c in corners {
            let update = v.mul(weighted, c.weight)?;
            let update = v.keep(c.inside, update)?;
            sums = v.emit(Op::ScatterElements { axis, kind }, &[sums, c.index, update])?;
        }
        let whole = v.shape(v.x(0));
        let sums = v.reshape(sums, &whole)?;
        v.give(0, sums)
    }

    fn give_positions(
        &self,
        v: &mut Vjp,
        corners: &[Corner],
        pixels: &[ValueId],
        weighted: ValueId,
    ) -> Result<()> {
        if !v.needs(1) {
            return Ok(());
        }
        let wide = v.ty(v.x(1)).dtype;
        let mut of_axis = v.shape(v.x(1));
        of_axis[3] = 1.into();
        let mut along = Vec::new();
        for d in 0..2 {
            let slope = sum_of_products(v, corners, pixels, &|c| c.slopes[d])?;
            let term = v.mul(weighted, slope)?;
            let sum = v.reduce(ReduceKind::Sum, term, &[2])?;
            let sum = v.cast(sum, wide)?;
            along.push(v.reshape(sum, &of_axis)?);
        }
        let both = v.emit(Op::Concat { axis: 3 }, &along)?;
        v.give(1, both)
    }
}

/// The sum of the pixels times something of their corners.
fn sum_of_products(
    v: &mut Vjp,
    corners: &[Corner],
    pixels: &[ValueId],
    factor: &dyn Fn(&Corner) -> ValueId,
) -> Result<ValueId> {
    let mut sum = None;
    for (c, &pixel) in corners.iter().zip(pixels) {
        let term = v.mul(pixel, factor(c))?;
        sum = Some(match sum {
            Some(sum) => v.add(sum, term)?,
            None => term,
        });
    }
    sum.ok_or_else(|| Error::internal("a sample without neighbours"))
}

impl Side {
    /// The pixel of a number, with its weight and the slope of that where it is in the image.
    fn of(
        v: &mut Vjp,
        (is_near, extent): (ValueId, usize),
        number: ValueId,
        (weight, slope): (ValueId, f64),
    ) -> Result<Side> {
        let from = v.with_number(ScalarOp::Ge, number, 0.0)?;
        let to = v.with_number(ScalarOp::Lt, number, extent as f64)?;
        let inside = v.map(ScalarOp::And, &[from, to])?;
        let inside = v.map(ScalarOp::And, &[inside, is_near])?;
        let index = v.keep(inside, number)?;
        let slope = v.real(number, slope)?;
        Ok(Side {
            inside,
            index: v.cast(index, DType::I64)?,
            weight: v.keep(inside, weight)?,
            slope: v.keep(inside, slope)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use insta::assert_snapshot;

    /// The type of samples of `x` in two groups, or the error of the type rule.
    fn found(x: &[usize], positions: &[usize], mask: Option<&[usize]>) -> String {
        let op = Op::Sample { groups: 2 };
        let of = |shape: &[usize]| Type::new(DType::F32, shape.iter().copied());
        let types: Vec<Type> = [x, positions].into_iter().chain(mask).map(of).collect();
        let found = (op.spec().infer)(&op, &types, &[]);
        found.map_or_else(|e| e, |types| types[0].to_string())
    }

    #[test]
    fn operands_that_do_not_fit_are_named() {
        let (x, positions) = (&[2, 4, 5, 6], &[2, 2, 9, 2, 30]);
        assert_snapshot!(found(x, positions, Some(&[2, 2, 9, 30])), @"f32[2, 4, 9, 30]");
        assert_snapshot!(found(&[4, 5, 6], positions, None), @"expected floats [n, c, h, w], got f32[4, 5, 6]");
        assert_snapshot!(found(&[2, 3, 5, 6], positions, None), @"3 channels do not divide into 2 groups of positions");
        assert_snapshot!(found(x, &[2, 1, 9, 2, 30], None), @"expected positions f32 or f64 [2, 2, taps, 2, points], got f32[2, 1, 9, 2, 30]");
        assert_snapshot!(found(x, positions, Some(&[2, 9, 30])), @"expected a mask f32[2, 2, 9, 30], got f32[2, 9, 30]");
    }

    #[test]
    fn planes_and_points_may_be_symbolic() {
        let [h, w, points] = ["h", "w", "points"].map(crate::ir::Dim::symbol);
        let x = Type::new(DType::F32, [1.into(), 3.into(), h, w]);
        let one = || crate::ir::Dim::from(1);
        let positions = Type::new(DType::F32, [one(), one(), one(), 2.into(), points]);
        let op = Op::Sample { groups: 1 };
        let types = (op.spec().infer)(&op, &[x, positions], &[]).unwrap();
        assert_snapshot!(types[0], @"f32[1, 3, 1, points]");
    }
}
