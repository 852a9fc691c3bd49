//! Views of a body's values as strides, and the loops over tensors of given strides.

use super::body::Body;
use crate::cluster::strided::is_strided_view;
pub(super) use crate::cluster::strided::{Strided, reshaped_strides, row_major};
use crate::ir::ValueId;

impl Strided {
    /// A value in its own buffer.
    pub(super) fn own(body: &Body, v: ValueId) -> Strided {
        Strided::whole(v, body.shape(v).to_vec())
    }

    /// Follows the views that define `v` as far as strides can express them; `stop` says which values have a buffer anyway.
    pub(super) fn resolve(body: &Body, v: ValueId, stop: &dyn Fn(ValueId) -> bool) -> Strided {
        let node = body
            .graph
            .def_node(v)
            .filter(|node| is_strided_view(&node.op) && !stop(v));
        let view = node.and_then(|node| {
            let operand = Strided::resolve(body, node.inputs[0], stop);
            operand.under(&node.op, body.shape(v))
        });
        view.unwrap_or_else(|| Strided::own(body, v))
    }
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
