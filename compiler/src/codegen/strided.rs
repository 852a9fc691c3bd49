//! Views as strides: where a value's elements lie in the buffer of another value.

use super::body::{Body, const_dim};
use crate::ir::{Dim, Op, ValueId};

/// The elements of a value as positions in the buffer of `base`: `offset + sum(index[i] * strides[i])`, in elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Strided {
    pub(super) base: ValueId,
    pub(super) offset: i64,
    pub(super) shape: Vec<usize>,
    pub(super) strides: Vec<i64>,
}

/// Row-major strides of a shape.
pub(super) fn row_major(shape: &[usize]) -> Vec<i64> {
    let mut strides = vec![1; shape.len()];
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i] * shape[i] as i64;
    }
    strides
}

impl Strided {
    /// A value in its own buffer.
    pub(super) fn own(body: &Body, v: ValueId) -> Strided {
        let shape = body.shape(v).to_vec();
        Strided {
            base: v,
            offset: 0,
            strides: row_major(&shape),
            shape,
        }
    }

    /// Follows the views that define `v` as far as strides can express them; `stop` says which values have a buffer anyway.
    pub(super) fn resolve(body: &Body, v: ValueId, stop: &dyn Fn(ValueId) -> bool) -> Strided {
        let view = (!stop(v))
            .then(|| Strided::through(body, v, stop))
            .flatten();
        view.unwrap_or_else(|| Strided::own(body, v))
    }

    fn through(body: &Body, v: ValueId, stop: &dyn Fn(ValueId) -> bool) -> Option<Strided> {
        let node = body.graph.def_node(v)?;
        let operand = || Strided::resolve(body, node.inputs[0], stop);
        match &node.op {
            Op::Transpose { perm } => {
                let x = operand();
                Some(Strided {
                    shape: perm.iter().map(|&i| x.shape[i]).collect(),
                    strides: perm.iter().map(|&i| x.strides[i]).collect(),
                    ..x
                })
            }
            Op::Broadcast { .. } => operand().broadcast(body.shape(v)),
            Op::Reshape { .. } => operand().reshaped(body.shape(v)),
            Op::Slice { starts, steps, .. } => operand().sliced(starts, steps, body.shape(v)),
            _ => None,
        }
    }

    /// A slice of the elements; `None` when a start is symbolic.
    fn sliced(mut self, starts: &[Dim], steps: &[i64], shape: &[usize]) -> Option<Strided> {
        for (axis, (start, step)) in starts.iter().zip(steps).enumerate() {
            self.offset += const_dim(start).ok()? * self.strides[axis];
            self.strides[axis] *= step;
        }
        self.shape = shape.to_vec();
        Some(self)
    }

    /// The same elements repeated to `shape`, as NumPy broadcasts. `None` when they do not broadcast.
    pub(super) fn broadcast(mut self, shape: &[usize]) -> Option<Strided> {
        let lead = shape.len().checked_sub(self.shape.len())?;
        let mut strides = vec![0; shape.len()];
        for (i, (&extent, &stride)) in self.shape.iter().zip(&self.strides).enumerate() {
            if extent != 1 && extent != shape[lead + i] {
                return None;
            }
            strides[lead + i] = if extent == 1 { 0 } else { stride };
        }
        self.shape = shape.to_vec();
        self.strides = strides;
        Some(self)
    }

    /// The same elements in row-major order under another shape, when strides can express it.
    fn reshaped(self, shape: &[usize]) -> Option<Strided> {
        Some(Strided {
            shape: shape.to_vec(),
            strides: reshaped_strides(&self.shape, &self.strides, shape)?,
            ..self
        })
    }

    /// True when the elements lie row-major without gaps from `offset` on.
    pub(super) fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        self.shape
            .iter()
            .zip(&self.strides)
            .rev()
            .all(|(&extent, &stride)| {
                let fits = extent == 1 || stride == expected;
                expected *= extent as i64;
                fits
            })
    }
}

/// Strides of elements of shape `from` under shape `to`; `None` when there are none, or no elements.
pub(super) fn reshaped_strides(from: &[usize], strides: &[i64], to: &[usize]) -> Option<Vec<i64>> {
    if to.contains(&0) || from.contains(&0) {
        return None;
    }
    let axes = from.iter().copied().zip(strides.iter().copied());
    let axes: Vec<(usize, i64)> = axes.filter(|axis| axis.0 != 1).collect();
    let (mut from, mut rest) = (&axes[..], to);
    let mut strides = Vec::with_capacity(to.len());
    while !from.is_empty() {
        let (n_from, n_to) = leading_group(from, rest)?;
        let innermost = joined_stride(&from[..n_from])?;
        let extents = &rest[..n_to];
        strides.extend(row_major(extents).iter().map(|s| s * innermost));
        (from, rest) = (&from[n_from..], &rest[n_to..]);
    }
    strides.resize(to.len(), 0);
    Some(strides)
}

/// Numbers of leading axes on either side whose extents have equal products; `None` if none have.
fn leading_group(from: &[(usize, i64)], to: &[usize]) -> Option<(usize, usize)> {
    let (mut i, mut j) = (1, 1);
    let (mut a, mut b) = (from.first()?.0, *to.first()?);
    while a != b {
        if a < b {
            a *= from.get(i)?.0;
            i += 1;
        } else {
            b *= to.get(j)?;
            j += 1;
        }
    }
    Some((i, j))
}

/// The stride of axes, of extents and strides, as a single one; `None` when there are gaps.
fn joined_stride(axes: &[(usize, i64)]) -> Option<i64> {
    let is_joined = axes.windows(2).all(|w| w[0].1 == w[1].1 * w[1].0 as i64);
    let innermost = axes.last()?.1;
    is_joined.then_some(innermost)
}

/// One loop over several tensors: an extent and each tensor's stride.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Axis {
    pub(super) extent: usize,
    pub(super) strides: Vec<i64>,
}

impl Axis {
    /// The loop of a copy: extent, and strides of source and destination.
    pub(super) fn copied(&self) -> (usize, isize, isize) {
        (
            self.extent,
            self.strides[0] as isize,
            self.strides[1] as isize,
        )
    }
}

/// The loops over `shape` for tensors with these strides, outermost first: axes of extent 1 dropped, neighbours joined where every
/// tensor allows it.
pub(super) fn collapse(shape: &[usize], tensors: &[&[i64]]) -> Vec<Axis> {
    let mut axes: Vec<Axis> = Vec::new();
    for (i, &extent) in shape.iter().enumerate() {
        if extent == 1 {
            continue;
        }
        let strides: Vec<i64> = tensors.iter().map(|t| t[i]).collect();
        match axes.last_mut() {
            Some(last)
                if last
                    .strides
                    .iter()
                    .zip(&strides)
                    .all(|(&outer, &inner)| outer == inner * extent as i64) =>
            {
                last.extent *= extent;
                last.strides = strides;
            }
            _ => axes.push(Axis { extent, strides }),
        }
    }
    axes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(shape: &[usize], strides: &[i64]) -> Strided {
        Strided {
            base: ValueId::new(0),
            offset: 0,
            shape: shape.into(),
            strides: strides.into(),
        }
    }

    #[test]
    fn reshapes_that_strides_can_express() {
        assert_eq!(
            at(&[2, 6], &[6, 1]).reshaped(&[3, 4]).unwrap().strides,
            [4, 1]
        );
        assert_eq!(
            at(&[2, 6], &[10, 1]).reshaped(&[2, 2, 3]).unwrap().strides,
            [10, 3, 1]
        );
        assert_eq!(
            at(&[6, 1, 4], &[1, 9, 6])
                .reshaped(&[2, 3, 1, 4])
                .unwrap()
                .strides,
            [3, 1, 24, 6]
        );
        assert_eq!(at(&[2, 6], &[10, 1]).reshaped(&[12]), None);
        assert_eq!(at(&[], &[]).reshaped(&[1, 1]).unwrap().shape, [1, 1]);
    }

    #[test]
    fn neighbouring_axes_join_when_all_tensors_allow() {
        let axes = collapse(&[2, 3, 1, 4], &[&[12, 4, 4, 1], &[0, 0, 0, 1]]);
        assert_eq!(
            axes,
            [
                Axis {
                    extent: 6,
                    strides: vec![4, 0]
                },
                Axis {
                    extent: 4,
                    strides: vec![1, 1]
                }
            ]
        );
        assert_eq!(
            collapse(&[2, 3], &[&[3, 1]]),
            [Axis {
                extent: 6,
                strides: vec![1]
            }]
        );
        assert_eq!(collapse(&[1], &[&[1]]), []);
    }
}
