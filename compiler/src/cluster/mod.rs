//! A graph of ops becomes a graph of clusters, one kernel each.
//!
//! Requires static shapes. After: every top-level node is an [`Op::Cluster`], a constant, control flow, state or transfer. A cluster
//! knows its anchor, the op that decides how its kernel loops, and its root, the op whose results it stores; members are those of the
//! root's producers that it computes. Kernels are chosen by predicted time ([`fuse`]), among several alternatives or greedily (optimisation
//! level 1). The ops that code generation can compute in one kernel are listed in `legal` and `coverage` alone.

mod body;
pub(crate) mod bytes;
pub(crate) mod coverage;
mod fuse;
pub(crate) mod gpu;
pub(crate) mod legal;
pub mod strided;

use crate::error::Result;
use crate::ir::{ClusterKind, Graph, Node, NodeId, Op};
use crate::rewrite::Pricing;
use std::collections::BTreeMap;

pub use fuse::{FusedKernels, fuse_rules};

/// Number and traffic of clusters, for the compile report.
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
    /// The fusion phase, when predicted time decided.
    pub fused: Option<FusedKernels>,
}

/// Policy of fusion.
#[derive(Clone, Debug, PartialEq)]
pub enum Fusion {
    /// One cluster per op.
    Off,
    /// By predicted time.
    Priced {
        /// The target's predicted times.
        pricing: Pricing,
        /// Alternatives that are kept per op: more of them find better kernels, one is found in a fraction of the time.
        n_alternatives: usize,
    },
}

impl Fusion {
    /// Fusion among the usual number of alternatives.
    pub fn priced(pricing: Pricing) -> Fusion {
        Fusion::Priced {
            pricing,
            n_alternatives: fuse::MAX_ALTERNATIVES,
        }
    }

    /// Fusion without alternatives.
    pub fn greedy(pricing: Pricing) -> Fusion {
        Fusion::Priced {
            pricing,
            n_alternatives: 1,
        }
    }
}

/// A kernel, as nodes of the graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// Kind of its anchor.
    pub kind: ClusterKind,
    /// The op that decides how it loops.
    pub anchor: NodeId,
    /// The op whose results it stores.
    pub root: NodeId,
    /// All that it computes, in order.
    pub members: Vec<NodeId>,
}

impl Kernel {
    fn computes(&self, id: NodeId) -> bool {
        self.members.binary_search(&id).is_ok()
    }
}

/// Fuses the nodes of `g` into clusters.
pub fn cluster(g: &Graph, fusion: &Fusion) -> Result<(Graph, Report)> {
    let mut report = Report::default();
    let kernels = match fusion {
        Fusion::Off => singletons(g),
        Fusion::Priced {
            pricing,
            n_alternatives,
        } => {
            let mut fused = fuse::fuse(g, pricing, *n_alternatives);
            report.missed = std::mem::take(&mut fused.missed);
            let kernels = std::mem::take(&mut fused.kernels);
            report.fused = Some(fused);
            kernels
        }
    };
    let clustered = body::build(g, &kernels)?;
    report.count_ops(g);
    report.count_clusters(&clustered);
    Ok((clustered, report))
}

/// One kernel per op.
fn singletons(g: &Graph) -> Vec<Kernel> {
    let single = |(id, node): (NodeId, &Node)| {
        Some(Kernel {
            kind: legal::kind_of(&node.op)?,
            anchor: id,
            root: id,
            members: vec![id],
        })
    };
    g.nodes().filter_map(single).collect()
}

impl Report {
    fn count_ops(&mut self, g: &Graph) {
        for (_, node) in g.nodes() {
            if !matches!(node.op, Op::Constant { .. }) {
                self.ops_before += 1;
                self.bytes_before += traffic(g, node);
            }
        }
    }

    fn count_clusters(&mut self, clustered: &Graph) {
        for (_, node) in clustered.nodes() {
            if let Op::Cluster { kind, .. } = node.op {
                *self.kernels.entry(kind).or_default() += 1;
                self.bytes_after += traffic(clustered, node);
            }
        }
    }
}

/// Bytes of all operands and results of a node.
fn traffic(g: &Graph, node: &Node) -> u64 {
    node.inputs
        .iter()
        .chain(&node.outputs)
        .map(|&v| g.ty(v).size_bytes().unwrap_or(0) as u64)
        .sum()
}

#[cfg(test)]
mod tests;
