//! Regions of interest: averages and maxima of bilinear samples.

use super::gather::{check_index_dtype, indices, position};
use super::{MAX_ROI_SAMPLES, Op, PoolKind};
use crate::error::{Error, Result};
use crate::ir::attr::Attr;
use crate::ir::dim::Dim;
use crate::ir::eval::Call;
use crate::ir::eval::scalar::{Scalar, Wide};
use crate::ir::eval::view::count;
use crate::ir::graph::Graph;
use crate::ir::infer;
use crate::ir::infer::Inferred;
use crate::ir::types::Type;
use gristmill_runtime::{DType, Tensor, with_dtype};

pub(super) fn roi_align_infer(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(
        op,
        RoiAlign {
            kind,
            size,
            sampling
        }
    );
    let (x, regions, images) = (&args[0], &args[1], &args[2]);
    check_index_dtype(images)?;
    let is_region = regions.rank() == 2 && regions.shape[1].is(4) && regions.dtype == x.dtype;
    if x.rank() != 4 || !x.dtype.is_float() || x.dtype.is_float8() || !is_region {
        return Err(format!(
            "expected floats [n, c, h, w] and regions [regions, 4] of their dtype, got {x} and {regions}"
        ));
    }
    if images.rank() != 1 || images.shape[0] != regions.shape[0] {
        return Err(format!(
            "expected an image per region of {regions}, got {images}"
        ));
    }
    let fits = size.len() == 2 && !size.contains(&0) && *sampling <= MAX_ROI_SAMPLES;
    if !fits || *kind == PoolKind::AvgIncludePad {
        return Err(format!(
            "expected two extents of bins, at most {MAX_ROI_SAMPLES} samples, and kind max or avg, got {size:?}, {sampling}, {}",
            kind.print()
        ));
    }
    let of_bins = size.iter().map(|&n| Dim::from(n));
    let lead = [regions.shape[0].clone(), x.shape[1].clone()];
    infer::one(x.dtype, lead.into_iter().chain(of_bins).collect())
}

/// An image without pixels gives zeros.
pub(super) fn roi_align_eval(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c.op, RoiAlign { kind, size });
    let (x, rois, images) = (c.inputs[0], c.inputs[1], c.inputs[2]);
    let mut out = Tensor::zeros(x.dtype(), c.shape)?;
    if x.is_empty() || out.is_empty() {
        return Ok(vec![out]);
    }
    let is_double = x.dtype() == DType::F64;
    let rounding = Rounding { is_double };
    let op = c.op;
    let geometry = Geometry { op, size, rounding };
    let (channels, plane) = (x.shape()[1], [x.shape()[2], x.shape()[3]]);
    let bounds = rois.to_f64s();
    let n_per_region = channels * count(size);
    with_dtype!(x.dtype(), T => {
        let from = x.as_slice::<T>();
        for (region, results) in out.as_mut_slice::<T>().chunks_exact_mut(n_per_region).enumerate() {
            let image = position(indices(images)[region], x.shape()[0], 0)?;
            let b = &bounds[4 * region..];
            let samples = [geometry.samples(0, b[1], b[3])?, geometry.samples(1, b[0], b[2])?];
            for (i, o) in results.iter_mut().enumerate() {
                let (channel, i) = (i / count(size), i % count(size));
                let number = [i / size[1], i % size[1]];
                let bin = Bin { kind: *kind, samples: &samples, number, plane };
                let first = (image * channels + channel) * count(&plane);
                let pixel = |at: usize| match from[first + at].to_wide() {
                    Wide::Float(v) => v,
                    Wide::Int(v) => v as f64,
                };
                *o = T::from_wide(Wide::Float(bin.value(&pixel)));
            }
        }
    });
    Ok(vec![out])
}

/// Geometry that all regions share.
struct Geometry<'a> {
    op: &'a Op,
    size: &'a [usize],
    rounding: Rounding,
}

impl Geometry<'_> {
    /// Samples between two coordinates along an axis of the result.
    fn samples(&self, axis: usize, from: f64, to: f64) -> Result<Samples> {
        let Op::RoiAlign {
            sampling,
            scale,
            half_pixel,
            ..
        } = self.op
        else {
            return Err(Error::internal("samples of another op"));
        };
        let r = |v| self.rounding.of(v);
        let offset = if *half_pixel { 0.5 } else { 0.0 };
        let scale = r(scale.0);
        let [start, end] = [from, to].map(|v| r(r(v * scale) - offset));
        let extent = r(end - start);
        // Without the shift of half a pixel, malformed regions count as a pixel.
        let extent = if *half_pixel || extent >= 1.0 || extent.is_nan() {
            extent
        } else {
            1.0
        };
        let bin = r(extent / self.size[axis] as f64);
        let n = match sampling {
            0 => bin.ceil() as usize,
            &n => n,
        };
        if n > MAX_ROI_SAMPLES {
            let message = format!(
                "a region takes {n} samples along an axis, at most {MAX_ROI_SAMPLES} are computed"
            );
            return Err(Error::invalid(message));
        }
        Ok(Samples {
            start,
            bin,
            n,
            rounding: self.rounding,
        })
    }
}

/// Positions are computed in the dtype of the regions, in `f32` at least.
#[derive(Clone, Copy)]
struct Rounding {
    is_double: bool,
}

impl Rounding {
    fn of(self, v: f64) -> f64 {
        if self.is_double {
            v
        } else {
            f64::from(v as f32)
        }
    }
}

/// Samples of a region's bins along one axis.
#[derive(Clone, Copy)]
struct Samples {
    start: f64,
    /// Extent of a bin.
    bin: f64,
    /// Number of samples of a bin.
    n: usize,
    rounding: Rounding,
}

/// Two neighbours of a position, with their weights.
type Corners = [(usize, f64); 2];

impl Samples {
    /// Neighbours of sample `i` of bin `number` in an image of `extent` pixels; `None` outside.
    fn corners(&self, number: usize, i: usize, extent: usize) -> Option<Corners> {
        let r = |v| self.rounding.of(v);
        let of_bin = r(self.start + r(number as f64 * self.bin));
        let within = r(r((i as f64 + 0.5) * self.bin) / self.n as f64);
        let at = r(of_bin + within);
        if !(-1.0..=extent as f64).contains(&at) {
            return None;
        }
        let at = at.clamp(0.0, extent as f64 - 1.0);
        let low = at.floor();
        let rest = r(at - low);
        let high = (low as usize + 1).min(extent - 1);
        Some([(low as usize, r(1.0 - rest)), (high, rest)])
    }
}

/// One bin of a plane.
struct Bin<'a> {
    kind: PoolKind,
    samples: &'a [Samples; 2],
    number: [usize; 2],
    /// Extents of the plane.
    plane: [usize; 2],
}

impl Bin<'_> {
    fn value(&self, pixel: &dyn Fn(usize) -> f64) -> f64 {
        let [rows, columns] = self.samples;
        let n = rows.n * columns.n;
        let mut all = None;
        for i in 0..n {
            let sample = self.sample([i / columns.n, i % columns.n], pixel);
            all = Some(all.map_or(sample, |a| joined(self.kind, a, sample)));
        }
        match self.kind {
            PoolKind::Max => all.unwrap_or(0.0),
            PoolKind::Avg | PoolKind::AvgIncludePad => all.unwrap_or(0.0) / n.max(1) as f64,
        }
    }

    /// The weighted neighbours of a sample, joined; 0 outside of the plane.
    fn sample(&self, i: [usize; 2], pixel: &dyn Fn(usize) -> f64) -> f64 {
        let along = |d: usize| self.samples[d].corners(self.number[d], i[d], self.plane[d]);
        let (Some(rows), Some(columns)) = (along(0), along(1)) else {
            return 0.0;
        };
        let weighted = rows.into_iter().flat_map(|(y, wy)| {
            columns.map(|(x, wx)| {
                let weight = self.samples[0].rounding.of(wy * wx);
                weight * pixel(y * self.plane[1] + x)
            })
        });
        let all = weighted.reduce(|a, b| joined(self.kind, a, b));
        all.unwrap_or(0.0)
    }
}

/// Joined samples: a sum, or a maximum in which NaN wins.
fn joined(kind: PoolKind, a: f64, b: f64) -> f64 {
    match kind {
        PoolKind::Max if a.is_nan() || b.is_nan() => f64::NAN,
        PoolKind::Max => a.max(b),
        PoolKind::Avg | PoolKind::AvgIncludePad => a + b,
    }
}
