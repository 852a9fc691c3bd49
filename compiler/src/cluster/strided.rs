//! Strided views: chains of transposes, reshapes, broadcasts and slices of one contiguous tensor.

use crate::ir::{Graph, Op, ValueId};

/// The elements of a value as positions in the contiguous tensor `base`: `offset + sum(index[i] * strides[i])`, in elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Strided {
    /// The tensor that is read.
    pub base: ValueId,
    /// Position of the first element.
    pub offset: i64,
    /// Extents of the view.
    pub shape: Vec<usize>,
    /// Step of each axis; 0 for broadcast axes.
    pub strides: Vec<i64>,
}

/// Row-major strides of `shape`, in elements.
pub fn row_major(shape: &[usize]) -> Vec<i64> {
    let mut strides = vec![1; shape.len()];
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i] * shape[i] as i64;
    }
    strides
}

impl Strided {
    /// The whole of `base`.
    pub fn whole(base: ValueId, shape: Vec<usize>) -> Strided {
        Strided {
            base,
            offset: 0,
            strides: row_major(&shape),
            shape,
        }
    }

    /// Follows view ops up from `v` to the first value for which `is_root` holds, or which no view op defines.
    ///
    /// `None` when the chain has no strided form (a reshape across incompatible strides) or a shape is not static.
    pub fn of(g: &Graph, v: ValueId, is_root: &dyn Fn(ValueId) -> bool) -> Option<Strided> {
        let shape = g.ty(v).static_shape()?;
        let node = g
            .def_node(v)
            .filter(|n| is_strided_view(&n.op) && !is_root(v));
        let Some(node) = node else {
            return Some(Strided::whole(v, shape));
        };
        let operand = Strided::of(g, node.inputs[0], is_root)?;
        match shape.contains(&0) {
            true => Some(Strided::whole(operand.base, shape)),
            false => operand.under(&node.op, &shape),
        }
    }

    /// The view under one more op, whose result has the given shape; `None` when strides cannot express it.
    pub fn under(self, op: &Op, shape: &[usize]) -> Option<Strided> {
        match op {
            Op::Transpose { perm } => Some(self.transposed(perm)),
            Op::Reshape { .. } => self.reshaped(shape),
            Op::Broadcast { .. } => self.broadcast(shape),
            Op::Slice { starts, steps, .. } => {
                let starts: Option<Vec<i64>> = starts.iter().map(|s| s.as_const()).collect();
                Some(self.sliced(&starts?, steps, shape))
            }
            _ => None,
        }
    }

    /// Axis `i` becomes old axis `perm[i]`.
    fn transposed(self, perm: &[usize]) -> Strided {
        Strided {
            shape: perm.iter().map(|&p| self.shape[p]).collect(),
            strides: perm.iter().map(|&p| self.strides[p]).collect(),
            ..self
        }
    }

    /// Along each axis, the elements from a start in steps.
    fn sliced(mut self, starts: &[i64], steps: &[i64], shape: &[usize]) -> Strided {
        for (stride, (start, step)) in self.strides.iter_mut().zip(starts.iter().zip(steps)) {
            self.offset += start * *stride;
            *stride *= step;
        }
        self.shape = shape.to_vec();
        self
    }

    /// The same elements repeated to `shape`, as NumPy broadcasts. `None` when they do not broadcast.
    pub fn broadcast(mut self, shape: &[usize]) -> Option<Strided> {
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

    /// The same elements in row-major order under another shape, when strides can express it (NumPy's no-copy reshape).
    fn reshaped(self, shape: &[usize]) -> Option<Strided> {
        Some(Strided {
            shape: shape.to_vec(),
            strides: reshaped_strides(&self.shape, &self.strides, shape)?,
            ..self
        })
    }

    /// True when the elements lie row-major without gaps from `offset` on.
    pub fn is_contiguous(&self) -> bool {
        let dense = row_major(&self.shape);
        (0..self.shape.len()).all(|i| self.shape[i] == 1 || self.strides[i] == dense[i])
    }

    /// True when neighbours along the last axis are neighbours in memory.
    pub fn has_unit_inner_stride(&self) -> bool {
        match (self.shape.last(), self.strides.last()) {
            (Some(&n), Some(&s)) => n <= 1 || s == 1,
            _ => true,
        }
    }
}

/// Strides of elements of shape `from` under shape `to`; `None` when there are none, or no elements.
pub fn reshaped_strides(from: &[usize], strides: &[i64], to: &[usize]) -> Option<Vec<i64>> {
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

/// True for ops that only rearrange the elements of their operand by strides.
pub(crate) fn is_strided_view(op: &Op) -> bool {
    matches!(
        op,
        Op::Transpose { .. } | Op::Reshape { .. } | Op::Broadcast { .. } | Op::Slice { .. }
    )
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
    fn attention_heads_split_without_a_copy_and_do_not_merge() {
        let qkv = Strided::whole(ValueId::new(0), vec![1, 128, 768]);
        let heads = qkv
            .reshaped(&[1, 128, 12, 64])
            .unwrap()
            .transposed(&[0, 2, 1, 3]);
        assert_eq!(heads.strides, [98304, 64, 768, 1]);
        assert!(heads.has_unit_inner_stride());
        let out = Strided::whole(ValueId::new(0), vec![1, 12, 128, 64]).transposed(&[0, 2, 1, 3]);
        assert_eq!(out.reshaped(&[1, 128, 768]), None);
    }

    #[test]
    fn reshape_agrees_with_enumeration() {
        let positions = |v: &Strided| -> Vec<i64> {
            let n: usize = v.shape.iter().product();
            let dense = row_major(&v.shape);
            (0..n as i64)
                .map(|i| {
                    v.offset
                        + (0..v.shape.len())
                            .map(|a| (i / dense[a]) % v.shape[a] as i64 * v.strides[a])
                            .sum::<i64>()
                })
                .collect()
        };
        let base = Strided::whole(ValueId::new(0), vec![2, 3, 4, 1]);
        let views = [
            base.clone(),
            base.clone().transposed(&[3, 0, 1, 2]),
            base.clone().transposed(&[2, 0, 1, 3]),
            base.clone()
                .sliced(&[0, 1, 0, 0], &[1, 1, 1, 1], &[2, 2, 4, 1]),
            base.clone()
                .sliced(&[1, 0, 3, 0], &[1, 1, -2, 1], &[1, 3, 2, 1]),
            base.broadcast(&[2, 3, 4, 5]).unwrap(),
        ];
        let mut found = 0;
        for v in &views {
            let n: usize = v.shape.iter().product();
            for shape in [
                vec![n],
                vec![1, n],
                vec![2, n / 2],
                vec![n / 2, 2],
                vec![n / 2, 1, 2, 1],
                vec![2, n / 4, 2],
            ] {
                if shape.iter().product::<usize>() != n {
                    continue;
                }
                if let Some(r) = v.clone().reshaped(&shape) {
                    assert_eq!(positions(&r), positions(v), "{v:?} as {shape:?}");
                    found += 1;
                }
            }
        }
        assert!(found > 12);
    }
}
