//! Extents of inputs that are taken to be equal, as nodes whose type rules hold for equal ones alone.

use crate::error::Result;
use crate::ir::{Dim, Graph, Op, Origin};
use gristmill_runtime::DType;
use std::collections::BTreeSet;

/// Two extents that are taken to be equal.
#[derive(Clone)]
pub(in crate::onnx) struct Condition {
    pub have: Dim,
    pub want: Dim,
    /// The node that needs it.
    pub origin: Origin,
}

impl Condition {
    /// Where a slice begins that fits equal extents alone.
    fn start(&self) -> Dim {
        self.want.clone() - self.have.clone()
    }
}

/// Adds the conditions that no node of a graph shows. A result that is used for its shape alone has none, since the
/// shape is known without it.
pub(super) fn add(g: &mut Graph, conditions: &[Condition]) -> Result<()> {
    let mut known = BTreeSet::new();
    shown(g, &mut known);
    for condition in conditions {
        let (start, size) = (condition.start(), condition.want.clone());
        if !known.insert((start.clone(), size.clone())) {
            continue;
        }
        let iota = Op::Iota {
            dtype: DType::I64,
            shape: vec![condition.have.clone()],
            axis: 0,
        };
        let line = g.add1(iota, &[], &condition.origin)?;
        let slice = Op::Slice {
            starts: vec![start],
            sizes: vec![size],
            steps: vec![1],
        };
        g.add1(slice, &[line], &condition.origin)?;
    }
    Ok(())
}

/// Starts and sizes of all slices.
fn shown(g: &Graph, known: &mut BTreeSet<(Dim, Dim)>) {
    for (_, node) in g.nodes() {
        if let Op::Slice { starts, sizes, .. } = &node.op {
            known.extend(starts.iter().cloned().zip(sizes.iter().cloned()));
        }
        node.regions.iter().for_each(|region| shown(region, known));
    }
}
