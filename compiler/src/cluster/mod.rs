//! The grouping pass: a graph of ops becomes a graph of clusters, one kernel each.
//!
//! Requires static shapes. After: every top-level node is a [`Op::Cluster`], a constant, control flow, state or transfer.
//! Clusters that rewriting chose are kept. What is left is grouped in three steps: views are folded into the contractions
//! that can read them by strides; contractions and reductions take element-wise epilogues; element-wise producers join
//! their consumers. Each group stays convex: a node joins only when all its other uses are inside, or as a duplicate.

mod body;
mod group;
mod legal;
pub mod strided;

use crate::error::Result;
use crate::ir::{ClusterKind, Graph, Op};
use std::collections::BTreeMap;

pub use legal::is_epilogue;

/// What the pass did, for the compile report.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Number of clusters of each kind.
    pub kernels: BTreeMap<ClusterKind, usize>,
    /// Ops before grouping, each of which would have been a kernel.
    pub ops_before: usize,
    /// Bytes read and written if every op were a kernel.
    pub bytes_before: u64,
    /// Bytes read and written by the clusters.
    pub bytes_after: u64,
    /// Fusions that were wanted and refused: origin of the producer, reason.
    pub missed: Vec<(String, String)>,
}

/// Whether nodes share clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fusion {
    /// One cluster per op.
    Off,
    /// As the module doc says.
    On,
}

/// Groups the nodes of `g` into clusters.
pub fn cluster(g: &Graph, fusion: Fusion) -> Result<(Graph, Report)> {
    let grouping = match fusion {
        Fusion::Off => group::Grouping::singletons(g),
        Fusion::On => group::Grouping::of(g),
    };
    let mut report = Report { missed: grouping.missed.clone(), ..Report::default() };
    let clustered = body::build(g, &grouping)?;
    for (_, node) in g.nodes().filter(|(_, n)| !matches!(n.op, Op::Constant { .. })) {
        report.ops_before += 1;
        report.bytes_before += traffic(g, node);
    }
    for (_, node) in clustered.nodes() {
        if let Op::Cluster { kind } = node.op {
            *report.kernels.entry(kind).or_default() += 1;
            report.bytes_after += traffic(&clustered, node);
        }
    }
    Ok((clustered, report))
}

/// Bytes of all operands and results of a node.
fn traffic(g: &Graph, node: &crate::ir::Node) -> u64 {
    node.inputs.iter().chain(&node.outputs).map(|&v| g.ty(v).size_bytes().unwrap_or(0) as u64).sum()
}

#[cfg(test)]
mod tests;
