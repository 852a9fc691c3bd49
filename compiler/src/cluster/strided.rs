//! Strided views: chains of transposes, reshapes, broadcasts and slices of one contiguous tensor.

use crate::ir::{Graph, Op, ValueId};

/// A read-only view of a contiguous row-major tensor `root`: element `i` is at `offset + sum(i[a] * strides[a])`, in elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Strided {
    /// The tensor that is read.
    pub root: ValueId,
    /// Extents of the view.
    pub shape: Vec<usize>,
    /// Step of each axis; 0 for broadcast axes.
    pub strides: Vec<i64>,
    /// Position of the first element.
    pub offset: i64,
}

/// Row-major strides of `shape`, in elements.
pub fn contiguous_strides(shape: &[usize]) -> Vec<i64> {
    let mut strides = vec![1i64; shape.len()];
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i] * shape[i].max(1) as i64;
    }
    strides
}

impl Strided {
    /// The whole of `root`.
    pub fn whole(root: ValueId, shape: Vec<usize>) -> Strided {
        let strides = contiguous_strides(&shape);
        Strided {
            root,
            shape,
            strides,
            offset: 0,
        }
    }

    /// Follows view ops up from `v` to the first value for which `is_root` holds, or which no view op defines.
    ///
    /// `None` when the chain has no strided form (a reshape across incompatible strides) or a shape is not static.
    pub fn of(g: &Graph, v: ValueId, is_root: &dyn Fn(ValueId) -> bool) -> Option<Strided> {
        let mut chain = Vec::new();
        let mut at = v;
        while !is_root(at) {
            let Some(node) = g.def_node(at).filter(|n| is_strided_view(&n.op)) else {
                break;
            };
            chain.push((&node.op, g.ty(at).static_shape()?));
            at = node.inputs[0];
        }
        let mut view = Strided::whole(at, g.ty(at).static_shape()?);
        for (op, shape) in chain.into_iter().rev() {
            view = view.under(op, &shape)?;
        }
        Some(view)
    }

    /// The view under one more op, whose result has the given shape.
    fn under(&self, op: &Op, shape: &[usize]) -> Option<Strided> {
        match op {
            Op::Transpose { perm } => Some(self.transpose(perm)),
            Op::Reshape { .. } => self.reshape(shape),
            Op::Broadcast { .. } => Some(self.broadcast(shape)),
            Op::Slice { starts, steps, .. } => {
                let starts: Option<Vec<i64>> = starts.iter().map(|s| s.as_const()).collect();
                Some(self.slice(&starts?, shape, steps))
            }
            _ => None,
        }
    }

    /// Axis `i` becomes old axis `perm[i]`.
    pub fn transpose(&self, perm: &[usize]) -> Strided {
        Strided {
            shape: perm.iter().map(|&p| self.shape[p]).collect(),
            strides: perm.iter().map(|&p| self.strides[p]).collect(),
            ..*self
        }
    }

    /// NumPy broadcast to `shape`.
    pub fn broadcast(&self, shape: &[usize]) -> Strided {
        let lead = shape.len() - self.shape.len();
        let stride = |i: usize| match i.checked_sub(lead) {
            Some(j) if self.shape[j] == shape[i] => self.strides[j],
            _ => 0,
        };
        Strided {
            shape: shape.to_vec(),
            strides: (0..shape.len()).map(stride).collect(),
            ..*self
        }
    }

    /// Along each axis, `size` elements from `start` in steps.
    pub fn slice(&self, starts: &[i64], sizes: &[usize], steps: &[i64]) -> Strided {
        let scaled = |by: &[i64]| -> Vec<i64> {
            let products = self.strides.iter().zip(by).map(|(k, n)| k * n);
            products.collect()
        };
        Strided {
            root: self.root,
            shape: sizes.to_vec(),
            strides: scaled(steps),
            offset: self.offset + scaled(starts).iter().sum::<i64>(),
        }
    }

    /// The view under another shape, when no copy is needed (NumPy's no-copy reshape).
    pub fn reshape(&self, shape: &[usize]) -> Option<Strided> {
        let strides = if shape.contains(&0) {
            contiguous_strides(shape)
        } else {
            self.reshaped_strides(shape)?
        };
        Some(Strided {
            shape: shape.to_vec(),
            strides,
            ..*self
        })
    }

    /// Strides under another shape without empty axes. Groups of old axes that are contiguous among
    /// themselves split freely; the stride of new axes of extent 1 behind the last group is 0.
    fn reshaped_strides(&self, shape: &[usize]) -> Option<Vec<i64>> {
        let old = self.wide_axes();
        let mut strides = vec![0; shape.len()];
        let (mut i, mut j) = (0, 0);
        while i < old.len() {
            let (n, m) = equal_products(&old[i..], &shape[j..])?;
            let group = &old[i..i + n];
            let is_contiguous = |w: &[(usize, i64)]| w[0].1 == w[1].1 * w[1].0 as i64;
            if !group.windows(2).all(is_contiguous) {
                return None;
            }
            let mut step = group[n - 1].1;
            for k in (j..j + m).rev() {
                strides[k] = step;
                step *= shape[k] as i64;
            }
            (i, j) = (i + n, j + m);
        }
        Some(strides)
    }

    /// Extent and stride of the axes that carry information: those of another extent than 1.
    fn wide_axes(&self) -> Vec<(usize, i64)> {
        let axes = self.shape.iter().copied().zip(self.strides.iter().copied());
        axes.filter(|(n, _)| *n != 1).collect()
    }

    /// True when the elements are read in storage order without gaps.
    pub fn is_contiguous(&self) -> bool {
        let dense = contiguous_strides(&self.shape);
        self.offset == 0
            && (0..self.shape.len()).all(|i| self.shape[i] <= 1 || self.strides[i] == dense[i])
    }

    /// Step of the innermost axis of more than one element; 1 when there is none.
    pub fn has_unit_inner_stride(&self) -> bool {
        match (self.shape.last(), self.strides.last()) {
            (Some(&n), Some(&s)) => n <= 1 || s == 1,
            _ => true,
        }
    }
}

/// Numbers of the first axes of both shapes that have equal products of extents.
fn equal_products(old: &[(usize, i64)], new: &[usize]) -> Option<(usize, usize)> {
    let (mut p, mut q) = (old.first()?.0, *new.first()?);
    let (mut n, mut m) = (1, 1);
    while p != q {
        if q < p {
            q *= *new.get(m)?;
            m += 1;
        } else {
            p *= old.get(n)?.0;
            n += 1;
        }
    }
    Some((n, m))
}

/// True for ops that only rearrange the elements of their operand by strides.
pub(super) fn is_strided_view(op: &Op) -> bool {
    matches!(
        op,
        Op::Transpose { .. } | Op::Reshape { .. } | Op::Broadcast { .. } | Op::Slice { .. }
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attention_heads_split_without_a_copy_and_do_not_merge() {
        let qkv = Strided::whole(ValueId::new(0), vec![1, 128, 768]);
        let heads = qkv
            .reshape(&[1, 128, 12, 64])
            .unwrap()
            .transpose(&[0, 2, 1, 3]);
        assert_eq!(heads.strides, [98304, 64, 768, 1]);
        assert!(heads.has_unit_inner_stride());
        let out = Strided::whole(ValueId::new(0), vec![1, 12, 128, 64]).transpose(&[0, 2, 1, 3]);
        assert_eq!(out.reshape(&[1, 128, 768]), None);
    }

    #[test]
    fn reshape_agrees_with_enumeration() {
        let positions = |v: &Strided| -> Vec<i64> {
            let n: usize = v.shape.iter().product();
            let dense = contiguous_strides(&v.shape);
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
            base.transpose(&[3, 0, 1, 2]),
            base.transpose(&[2, 0, 1, 3]),
            base.slice(&[0, 1, 0, 0], &[2, 2, 4, 1], &[1, 1, 1, 1]),
            base.slice(&[1, 0, 3, 0], &[1, 3, 2, 1], &[1, 1, -2, 1]),
            base.broadcast(&[2, 3, 4, 5]),
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
                if let Some(r) = v.reshape(&shape) {
                    assert_eq!(positions(&r), positions(v), "{v:?} as {shape:?}");
                    found += 1;
                }
            }
        }
        assert!(found > 12);
    }
}
