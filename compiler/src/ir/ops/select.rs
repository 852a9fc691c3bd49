//! Ops whose number of results depends on the data.

use super::Op;
use crate::error::{Error, Result};
use crate::ir::dim::Dim;
use crate::ir::eval::Call;
use crate::ir::graph::Graph;
use crate::ir::infer;
use crate::ir::infer::Inferred;
use crate::ir::types::Type;
use gristmill_runtime::tensor::checked_size_bytes;
use gristmill_runtime::{DType, Tensor};
use std::cmp::Ordering;

pub(super) fn non_zero_infer(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, NonZero { count });
    infer::one(DType::I64, vec![args[0].rank().into(), count.clone()])
}

/// Positions of elements other than 0, in row-major order: one column each.
pub(super) fn non_zero_eval(call: &Call) -> Result<Vec<Tensor>> {
    let x = call.inputs[0];
    let hits: Vec<usize> = match x.dtype().is_float() {
        true => hits(x.to_f64s().iter().map(|v| *v != 0.0)),
        false => {
            let elements = x.as_bytes().chunks_exact(x.dtype().size_bytes());
            hits(elements.map(|bytes| bytes.iter().any(|b| *b != 0)))
        }
    };
    let shape = x.shape();
    let mut places = vec![0i64; shape.len() * hits.len()];
    for (k, &hit) in hits.iter().enumerate() {
        let mut rest = hit;
        for (axis, &extent) in shape.iter().enumerate().rev() {
            places[axis * hits.len() + k] = (rest % extent) as i64;
            rest /= extent;
        }
    }
    Ok(vec![Tensor::from_slice(
        &places,
        &[shape.len(), hits.len()],
    )?])
}

fn hits(flags: impl Iterator<Item = bool>) -> Vec<usize> {
    flags
        .enumerate()
        .filter(|(_, is_hit)| *is_hit)
        .map(|(i, _)| i)
        .collect()
}

pub(super) fn unique_infer(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, Unique { count, axis });
    let mut slices = match axis {
        Some(_) => args[0].shape.0.clone(),
        None => vec![args[0].shape.n_elements()],
    };
    let axis = axis.unwrap_or(0);
    let n = slices.get(axis).cloned();
    let n = n.ok_or_else(|| format!("axis {axis} is out of range for {}", args[0]))?;
    slices[axis] = count.clone();
    let list = |n: &Dim| Type::new(DType::I64, [n]);
    Ok(vec![
        Type::new(args[0].dtype, slices),
        list(count),
        list(&n),
        list(count),
    ])
}

/// Distinct slices, where each comes first, which one each slice is, and how often each comes.
pub(super) fn unique_eval(call: &Call) -> Result<Vec<Tensor>> {
    attrs!(call.op, Unique { axis, sorted });
    let slices = Slices::new(call.inputs[0], *axis);
    let groups = slices.groups(*sorted);
    let firsts: Vec<i64> = groups.iter().map(|g| g[0] as i64).collect();
    let counts: Vec<i64> = groups.iter().map(|g| g.len() as i64).collect();
    let mut inverse = vec![0i64; slices.n];
    for (k, group) in groups.iter().enumerate() {
        group.iter().for_each(|&i| inverse[i] = k as i64);
    }
    let list = |v: &[i64]| Tensor::from_slice(v, &[v.len()]);
    Ok(vec![
        slices.pick(call.inputs[0], &firsts)?,
        list(&firsts)?,
        list(&inverse)?,
        list(&counts)?,
    ])
}

/// Elements in an order in which equal ones are beside each other.
enum Keys {
    Integers(Vec<i128>),
    Reals(Vec<f64>),
}

impl Keys {
    fn of(t: &Tensor) -> Keys {
        match t.dtype() {
            DType::I64 => Keys::Integers(t.as_slice::<i64>().iter().map(|&v| v.into()).collect()),
            DType::U64 => Keys::Integers(t.as_slice::<u64>().iter().map(|&v| v.into()).collect()),
            _ => Keys::Reals(t.to_f64s()),
        }
    }

    /// NaN is greater than all.
    fn compare(&self, a: usize, b: usize) -> Ordering {
        match self {
            Keys::Integers(keys) => keys[a].cmp(&keys[b]),
            Keys::Reals(keys) => {
                let by_value = keys[a].partial_cmp(&keys[b]);
                by_value.unwrap_or_else(|| keys[a].is_nan().cmp(&keys[b].is_nan()))
            }
        }
    }

    fn is_nan(&self, i: usize) -> bool {
        matches!(self, Keys::Reals(keys) if keys[i].is_nan())
    }
}

/// The slices of a tensor along one axis; its elements without one.
struct Slices {
    keys: Keys,
    outer: usize,
    n: usize,
    inner: usize,
    shape: Vec<usize>,
    axis: usize,
}

impl Slices {
    fn new(t: &Tensor, axis: Option<usize>) -> Slices {
        let shape = match axis {
            Some(_) => t.shape().to_vec(),
            None => vec![t.len()],
        };
        let axis = axis.unwrap_or(0);
        Slices {
            keys: Keys::of(t),
            outer: shape[..axis].iter().product(),
            n: shape[axis],
            inner: shape[axis + 1..].iter().product(),
            shape,
            axis,
        }
    }

    /// Positions of the elements of slice `i`.
    fn elements(&self, i: usize) -> impl Iterator<Item = usize> {
        let places = 0..self.outer * self.inner;
        places.map(move |e| (e / self.inner * self.n + i) * self.inner + e % self.inner)
    }

    fn compare(&self, a: usize, b: usize) -> Ordering {
        let mut pairs = self.elements(a).zip(self.elements(b));
        let first = pairs.find_map(|(x, y)| Some(self.keys.compare(x, y)).filter(|o| o.is_ne()));
        first.unwrap_or(Ordering::Equal)
    }

    /// True for slices with the same elements; NaN is equal to nothing.
    fn are_equal(&self, a: usize, b: usize) -> bool {
        let mut elements = self.elements(a);
        self.compare(a, b).is_eq() && !elements.any(|e| self.keys.is_nan(e))
    }

    /// Equal slices together, each group ascending; groups by value, or by first occurrence.
    fn groups(&self, sorted: bool) -> Vec<Vec<usize>> {
        let mut order: Vec<usize> = (0..self.n).collect();
        order.sort_by(|&a, &b| self.compare(a, b));
        let mut groups: Vec<Vec<usize>> = Vec::new();
        for i in order {
            match groups.last_mut() {
                Some(group) if self.are_equal(group[0], i) => group.push(i),
                _ => groups.push(vec![i]),
            }
        }
        if !sorted {
            groups.sort_by_key(|group| group[0]);
        }
        groups
    }

    /// These slices, in this order.
    fn pick(&self, t: &Tensor, slices: &[i64]) -> Result<Tensor> {
        let mut shape = self.shape.clone();
        shape[self.axis] = slices.len();
        checked_size_bytes(t.dtype(), &shape)?;
        let row = self.inner * t.dtype().size_bytes();
        let mut bytes = Vec::with_capacity(self.outer * slices.len() * row);
        for outer in 0..self.outer {
            for &slice in slices {
                let at = (outer * self.n + slice as usize) * row;
                bytes.extend_from_slice(&t.as_bytes()[at..at + row]);
            }
        }
        Ok(Tensor::from_bytes(t.dtype(), &shape, &bytes)?)
    }
}

pub(super) fn non_max_suppression_infer(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, NonMaxSuppression { count });
    let (boxes, scores) = (&args[0], &args[1]);
    let scalars = args[2..].iter().map(|t| (t.dtype, t.rank()));
    let expected = [DType::I64, DType::F32, DType::F32].map(|dtype| (dtype, 0));
    if !scalars.eq(expected) || (boxes.dtype, scores.dtype) != (DType::F32, DType::F32) {
        return Err("operands must be f32, f32, i64[], f32[] and f32[]".into());
    }
    let differ = |a: &Dim, b: &Dim| (a.clone() - b.clone()).as_const().is_some_and(|d| d != 0);
    let fit = match (&boxes.shape[..], &scores.shape[..]) {
        ([images, n, four], [of, _, m]) => !differ(images, of) && !differ(n, m) && four.is(4),
        _ => false,
    };
    if !fit {
        let expected = "expected [images, boxes, 4] and [images, classes, boxes]";
        return Err(format!(
            "boxes {boxes} and scores {scores} do not fit: {expected}"
        ));
    }
    infer::one(DType::I64, vec![count.clone(), 3.into()])
}

/// Greedy selection for each image and class: a box is taken, in the order of scores, unless it
/// overlaps an earlier one.
pub(super) fn non_max_suppression_eval(call: &Call) -> Result<Vec<Tensor>> {
    attrs!(call.op, NonMaxSuppression { center });
    let [boxes, scores, most, overlap, threshold] = call.inputs else {
        return Err(Error::internal("non_max_suppression takes 5 operands"));
    };
    let limits = Limits {
        n: usize::try_from(most.as_slice::<i64>()[0]).unwrap_or(0),
        overlap: overlap.as_slice::<f32>()[0],
        score: threshold.as_slice::<f32>()[0],
    };
    let (n_classes, n_boxes) = (scores.shape()[1], scores.shape()[2]);
    let mut selected: Vec<i64> = Vec::new();
    let lines = scores.as_slice::<f32>().chunks_exact(n_boxes.max(1));
    let mut corners: (usize, Vec<Rect>) = (usize::MAX, Vec::new());
    for (line, scores) in lines.enumerate() {
        let (image, class) = (line / n_classes, line % n_classes);
        if corners.0 != image {
            let of_image = &boxes.as_slice::<f32>()[4 * n_boxes * image..][..4 * n_boxes];
            let of_image = of_image.chunks_exact(4).map(|b| Rect::of(b, *center));
            corners = (image, of_image.collect());
        }
        for taken in limits.select(&corners.1, scores) {
            selected.extend([image as i64, class as i64, taken as i64]);
        }
    }
    Ok(vec![Tensor::from_slice(
        &selected,
        &[selected.len() / 3, 3],
    )?])
}

/// Conditions of a selection.
struct Limits {
    n: usize,
    overlap: f32,
    score: f32,
}

impl Limits {
    /// The boxes to take, in the order of their scores; of equal ones the first is first.
    fn select(&self, boxes: &[Rect], scores: &[f32]) -> Vec<usize> {
        let is_candidate = |i: &usize| self.score == f32::NEG_INFINITY || scores[*i] > self.score;
        let mut order: Vec<usize> = (0..scores.len()).filter(is_candidate).collect();
        order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
        let (mut taken, mut groups) = (Vec::new(), Vec::new());
        for i in order {
            if taken.len() >= self.n {
                break;
            }
            let mut groups_met = groups.iter().filter(|g: &&Group| g.may_meet(&boxes[i]));
            if !groups_met.any(|g| g.overlap(&boxes[i]) > self.overlap) {
                let lane = taken.len() % LANES;
                if lane == 0 {
                    groups.push(Group::EMPTY);
                }
                groups[taken.len() / LANES].put(lane, &boxes[i]);
                taken.push(i);
            }
        }
        taken
    }
}

/// Number of boxes compared with another one together.
const LANES: usize = 16;

/// Some of the boxes taken so far, by corner and axis; free places meet no box.
struct Group {
    low: [[f32; LANES]; 2],
    high: [[f32; LANES]; 2],
}

impl Group {
    const EMPTY: Group = Group {
        low: [[f32::INFINITY; LANES]; 2],
        high: [[f32::NEG_INFINITY; LANES]; 2],
    };

    fn put(&mut self, lane: usize, rect: &Rect) {
        for axis in 0..2 {
            self.low[axis][lane] = rect.low[axis];
            self.high[axis][lane] = rect.high[axis];
        }
    }

    fn get(&self, lane: usize) -> Rect {
        Rect {
            low: [self.low[0][lane], self.low[1][lane]],
            high: [self.high[0][lane], self.high[1][lane]],
        }
    }

    /// False when no box has a point in common with `other`: true of most groups, so that this has
    /// no branch.
    fn may_meet(&self, other: &Rect) -> bool {
        let mut any = false;
        for lane in 0..LANES {
            any |= (self.low[0][lane] < other.high[0])
                & (other.low[0] < self.high[0][lane])
                & (self.low[1][lane] < other.high[1])
                & (other.low[1] < self.high[1][lane]);
        }
        any
    }

    /// The largest overlap of a box with `other`.
    fn overlap(&self, other: &Rect) -> f32 {
        let overlaps = (0..LANES).map(|lane| other.overlap(&self.get(lane)));
        overlaps.fold(0.0, f32::max)
    }
}

/// The lesser and the greater corner of a box.
struct Rect {
    low: [f32; 2],
    high: [f32; 2],
}

impl Rect {
    /// From two opposite corners, or from the centre and the extents.
    fn of(b: &[f32], center: bool) -> Rect {
        let sides = |axis: usize| match center {
            true => (b[axis] - b[axis + 2] / 2.0, b[axis] + b[axis + 2] / 2.0),
            false => (b[axis].min(b[axis + 2]), b[axis].max(b[axis + 2])),
        };
        let (x, y) = (sides(0), sides(1));
        Rect {
            low: [x.0, y.0],
            high: [x.1, y.1],
        }
    }

    fn area(&self) -> f32 {
        (self.high[0] - self.low[0]) * (self.high[1] - self.low[1])
    }

    /// Area of the intersection over the area of the union; 0 where either is empty.
    fn overlap(&self, other: &Rect) -> f32 {
        let side = |axis: usize| {
            self.high[axis].min(other.high[axis]) - self.low[axis].max(other.low[axis])
        };
        let (width, height) = (side(0), side(1));
        if width <= 0.0 || height <= 0.0 {
            return 0.0;
        }
        let common = width * height;
        let (a, b) = (self.area(), other.area());
        match a > 0.0 && b > 0.0 {
            true => common / (a + b - common),
            false => 0.0,
        }
    }
}
