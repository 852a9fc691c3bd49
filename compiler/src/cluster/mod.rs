//! A graph of ops becomes a graph of clusters, one kernel each.
//!
//! Requires static shapes. After: every top-level node is a [`Op::Cluster`], a constant, control flow, state or transfer.
//! The kernels that the fuse phase of rewriting chose by predicted time are taken as they are. Where it does not run (below
//! optimisation level 2), a grouping pass decides in three steps: views are folded into the contractions that can read them by
//! strides; contractions and reductions take element-wise epilogues; element-wise producers join their consumers. Each group
//! stays convex: a node joins only when all its other uses are inside, or as a duplicate. What code generation can compute in
//! one kernel is said in `legal` alone.

mod body;
pub(crate) mod bytes;
mod fuse;
pub(crate) mod gpu;
mod group;
pub(crate) mod legal;
pub mod strided;

use crate::error::Result;
use crate::ir::{ClusterKind, Graph, Op};
use crate::rewrite::Pricing;
use std::collections::BTreeMap;

pub use fuse::{Fused, Kernel, fuse_rules};

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
    /// How the clusters were chosen, when predicted time decided.
    pub fused: Option<Fused>,
}

/// Which nodes share clusters.
#[derive(Clone, Debug, PartialEq)]
pub enum Fusion {
    /// One cluster per op.
    Off,
    /// As the grouping pass decides.
    Grouped,
    /// As extraction from the e-graph decides by predicted time.
    Priced(Pricing),
}

/// Groups the nodes of `g` into clusters.
pub fn cluster(g: &Graph, fusion: &Fusion) -> Result<(Graph, Report)> {
    let mut report = Report::default();
    let clustered = match fusion {
        Fusion::Off => body::build(g, &group::Grouping::singletons(g))?,
        Fusion::Grouped => {
            let grouping = group::Grouping::of(g);
            report.missed = grouping.missed.clone();
            body::build(g, &grouping)?
        }
        Fusion::Priced(pricing) => {
            let mut fused = fuse::fuse(g, pricing);
            report.missed = std::mem::take(&mut fused.missed);
            let clustered = of_kernels(g, &fused.kernels)?;
            report.fused = Some(fused);
            clustered
        }
    };
    for (_, node) in g
        .nodes()
        .filter(|(_, n)| !matches!(n.op, Op::Constant { .. }))
    {
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

/// The clustered graph of chosen kernels.
pub(crate) fn of_kernels(g: &Graph, kernels: &[Kernel]) -> Result<Graph> {
    body::build(g, &group::Grouping::chosen(g, kernels))
}

/// Bytes of all operands and results of a node.
fn traffic(g: &Graph, node: &crate::ir::Node) -> u64 {
    node.inputs
        .iter()
        .chain(&node.outputs)
        .map(|&v| g.ty(v).size_bytes().unwrap_or(0) as u64)
        .sum()
}

#[cfg(test)]
mod tests;
