//! Loops over a shape, finer than its axes where reshapes need it.
//!
//! A reshape joins and splits axes. Where those of its two sides have a common refinement, an index on
//! one side is affine in the loops of that refinement, and so is the index on the other side: rows of
//! windows, heads or groups of channels are then read where they lie.

use super::body::Body;
use crate::ir::{Op, ValueId};
use std::collections::BTreeSet;
use std::ops::Range;

/// Values of a chain that are looked at for reshapes.
const MAX_VALUES: usize = 64;

/// Loops over a shape: one for each axis, or several, the last varying fastest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Loops {
    /// Iterations of each loop.
    pub(super) extents: Vec<usize>,
    /// The loops that each axis consists of.
    axes: Vec<Range<usize>>,
    /// First index along each axis.
    starts: Vec<i64>,
}

impl Loops {
    /// One loop for each axis.
    pub(super) fn over(shape: &[usize]) -> Loops {
        Loops {
            extents: shape.to_vec(),
            axes: (0..shape.len()).map(|i| i..i + 1).collect(),
            starts: vec![0; shape.len()],
        }
    }

    /// One loop for each axis, over the part `range` of one of them.
    pub(super) fn over_part(shape: &[usize], axis: usize, range: Range<usize>) -> Loops {
        let mut loops = Loops::over(shape);
        loops.extents[axis] = range.len();
        loops.starts[axis] = range.start as i64;
        loops
    }

    /// Loops over `root` that are finer than its axes, by the factors of the shapes before the reshapes
    /// that it is computed from by element-wise ops. `None` where its axes are as fine, or have no
    /// common refinement with these.
    pub(super) fn refined(
        body: &Body,
        root: ValueId,
        in_memory: &dyn Fn(ValueId) -> bool,
    ) -> Option<Loops> {
        let shape = body.shape(root);
        let own = suffix_products(shape);
        let mut all = own.clone();
        for v in reshaped_values(body, root, in_memory) {
            all.extend(suffix_products(body.shape(v)));
        }
        if all.len() == own.len() || shape.contains(&0) {
            return None;
        }
        Loops::by(&all, shape)
    }

    /// Loops whose suffix products are `products`.
    fn by(products: &BTreeSet<usize>, shape: &[usize]) -> Option<Loops> {
        let mut extents = Vec::with_capacity(products.len());
        let mut before = 1;
        for &product in products {
            if product % before != 0 {
                return None;
            }
            extents.push(product / before);
            before = product;
        }
        extents.reverse();
        let axes = grouped(shape, &extents)?;
        let starts = vec![0; shape.len()];
        Some(Loops {
            extents,
            axes,
            starts,
        })
    }

    /// Strides of the loops, where those of the axes are given.
    pub(super) fn strides(&self, of_axes: &[i64]) -> Vec<i64> {
        let mut strides = vec![0; self.extents.len()];
        for (axis, stride) in self.axes.iter().zip(of_axes) {
            let mut step = *stride;
            for i in axis.clone().rev() {
                strides[i] = step;
                step *= self.extents[i] as i64;
            }
        }
        strides
    }

    /// First index along each axis, and the factors of the loops in the index.
    pub(super) fn indices(&self) -> impl Iterator<Item = (i64, Vec<i64>)> {
        (0..self.axes.len()).map(|axis| {
            let is_axis: Vec<i64> = (0..self.axes.len()).map(|i| i64::from(i == axis)).collect();
            (self.starts[axis], self.strides(&is_axis))
        })
    }
}

/// Products of the last extents of a shape, without 1.
fn suffix_products(shape: &[usize]) -> BTreeSet<usize> {
    let mut product = 1;
    let extents = shape.iter().rev().filter(|d| **d != 1);
    let products = extents.map(|d| {
        product *= d;
        product
    });
    products.collect()
}

/// Operands of the reshapes that `root` is computed from by ops that keep the order of elements.
fn reshaped_values(
    body: &Body,
    root: ValueId,
    in_memory: &dyn Fn(ValueId) -> bool,
) -> Vec<ValueId> {
    let n_elements = body.n_elements(root);
    let (mut open, mut found) = (vec![root], Vec::new());
    let mut seen = BTreeSet::new();
    while let Some(v) = open.pop() {
        let keeps_order = !in_memory(v) && body.n_elements(v) == n_elements;
        if !keeps_order || seen.len() == MAX_VALUES || !seen.insert(v) {
            continue;
        }
        let node = body.graph.def_node(v);
        match node.map(|node| (&node.op, &node.inputs)) {
            Some((Op::Map(_), operands)) => open.extend(operands),
            Some((Op::Reshape { .. }, operands)) => {
                found.push(operands[0]);
                open.push(operands[0]);
            }
            _ => {}
        }
    }
    found
}

/// The loops that each axis of a shape consists of.
fn grouped(shape: &[usize], extents: &[usize]) -> Option<Vec<Range<usize>>> {
    let mut end = 0;
    let mut axes = Vec::with_capacity(shape.len());
    for &d in shape {
        let (start, mut have) = (end, 1);
        while have < d {
            have *= extents.get(end)?;
            end += 1;
        }
        if have != d {
            return None;
        }
        axes.push(start..end);
    }
    Some(axes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn products(shapes: &[&[usize]]) -> BTreeSet<usize> {
        shapes.iter().flat_map(|s| suffix_products(s)).collect()
    }

    #[test]
    fn axes_split_by_the_factors_of_both_sides() {
        let (windows, rows) = ([8, 7, 8, 7, 96], [1, 3136, 96]);
        let loops = Loops::by(&products(&[&windows, &rows]), &rows).unwrap();
        assert_eq!(loops.extents, windows);
        assert_eq!(loops.strides(&[0, 100, 1]), [39200, 5600, 700, 100, 1]);
        let factors: Vec<Vec<i64>> = loops.indices().map(|(_, factors)| factors).collect();
        assert_eq!(factors[0], [0; 5]);
        assert_eq!(factors[1], [392, 56, 7, 1, 0]);
        assert_eq!(factors[2], [0, 0, 0, 0, 1]);
        // 6 = 2 * 3 = 3 * 2: neither 2 nor 3 divides the other.
        assert_eq!(Loops::by(&products(&[&[2, 3], &[3, 2]]), &[2, 3]), None);
    }
}
