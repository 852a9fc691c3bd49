//! A graph of ops becomes a graph of clusters, one kernel each.
//!
//! Kernels are chosen at static shapes. After: every top-level node is an [`Op::Cluster`], a constant, control flow, state or transfer. A cluster
//! knows its anchor, the op that decides how its kernel loops, and its root, the op whose results it stores; members are those of the
//! root's producers that it computes. Kernels are chosen by predicted time ([`fuse`]), among several alternatives or greedily (optimisation
//! level 1). The ops that code generation can compute in one kernel are listed in `legal` and `coverage` alone.

mod body;
pub(crate) mod bytes;
pub(crate) mod coverage;
mod fuse;
pub(crate) mod gpu;
mod join;
pub(crate) mod legal;
pub(crate) mod ranges;
pub mod strided;

use crate::error::Result;
use crate::ir::{Bindings, ClusterKind, Dim, Graph, Node, NodeId, Op};
use crate::rewrite::Pricing;
use std::collections::BTreeMap;

use join::{bundle_updates, join_maps, join_scalars, join_updates};

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

    /// True when there are alternatives.
    pub fn has_choice(&self) -> bool {
        let n = match self {
            Fusion::Off => 0,
            Fusion::Priced { n_alternatives, .. } => *n_alternatives,
        };
        n > 1
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
    /// The ops whose results it stores: one, but for joined kernels.
    pub roots: Vec<NodeId>,
    /// All that it computes, in order.
    pub members: Vec<NodeId>,
}

impl Kernel {
    fn computes(&self, id: NodeId) -> bool {
        self.members.binary_search(&id).is_ok()
    }
}

/// A graph of clusters.
pub(crate) struct Clustered {
    pub graph: Graph,
    /// The cluster, or the copy, that computes each node of the graph before.
    pub owners: Vec<Option<NodeId>>,
    pub report: Report,
    pub traffic: Traffic,
}

/// Fuses the nodes of `g`, of static shapes, into clusters.
pub fn cluster(g: &Graph, fusion: &Fusion) -> Result<(Graph, Report)> {
    let mut clustered = cluster_at(g, g, fusion)?;
    clustered
        .report
        .set_traffic(&clustered.traffic, &Bindings::new());
    Ok((clustered.graph, clustered.report))
}

/// Fuses the nodes of `g` into clusters. Which nodes is decided on `sized`: the same graph, dims
/// bound to representative sizes. The traffic is not yet in the report.
pub(crate) fn cluster_at(g: &Graph, sized: &Graph, fusion: &Fusion) -> Result<Clustered> {
    clustered(g, sized, fusion, join_updates)
}

/// Fuses the nodes of a region, of static shapes, into clusters. Most regions are bodies of loops, whose
/// kernels run many times with little work: element-wise ones are joined beyond [`join_updates`].
pub(crate) fn cluster_region(region: &Graph, fusion: &Fusion) -> Result<Graph> {
    Ok(clustered(region, region, fusion, join_maps)?.graph)
}

fn clustered(
    g: &Graph,
    sized: &Graph,
    fusion: &Fusion,
    join: fn(&Graph, Vec<Kernel>) -> Vec<Kernel>,
) -> Result<Clustered> {
    let mut report = Report::default();
    let kernels = match fusion {
        Fusion::Off => singletons(sized),
        Fusion::Priced {
            pricing,
            n_alternatives,
        } => {
            let mut fused = fuse::fuse(sized, pricing, *n_alternatives);
            report.missed = std::mem::take(&mut fused.missed);
            let kernels = std::mem::take(&mut fused.kernels);
            report.fused = Some(fused);
            let kernels = match pricing.only_cpus {
                true => ranges::join_ranges(g, kernels),
                false => kernels,
            };
            let kernels = join(g, join_scalars(g, kernels));
            match pricing.only_gpus && pricing.is_one_device {
                true => bundle_updates(sized, kernels),
                false => kernels,
            }
        }
    };
    let (graph, owners) = body::build(g, &kernels)?;
    let traffic = Traffic {
        before: report.count_ops(g),
        after: report.count_clusters(&graph),
    };
    Ok(Clustered {
        graph,
        owners,
        report,
        traffic,
    })
}

/// The kernel that stores the results of each node.
fn stored_by(g: &Graph, kernels: &[Kernel]) -> Vec<Option<usize>> {
    let mut stored_by = vec![None; g.n_nodes()];
    for (i, kernel) in kernels.iter().enumerate() {
        for root in &kernel.roots {
            stored_by[root.0 as usize] = Some(i);
        }
    }
    stored_by
}

/// One kernel per op.
fn singletons(g: &Graph) -> Vec<Kernel> {
    let single = |(id, node): (NodeId, &Node)| {
        Some(Kernel {
            kind: legal::kind_of(&node.op)?,
            anchor: id,
            roots: vec![id],
            members: vec![id],
        })
    };
    g.nodes().filter_map(single).collect()
}

impl Report {
    /// Counts the ops of a graph; gives their traffic.
    fn count_ops(&mut self, g: &Graph) -> Sum {
        let mut traffic = Sum::default();
        for (_, node) in g.nodes() {
            if !matches!(node.op, Op::Constant { .. }) {
                self.ops_before += 1;
                traffic.add(g, node);
            }
        }
        traffic
    }

    /// Counts clusters; gives their traffic.
    fn count_clusters(&mut self, clustered: &Graph) -> Sum {
        let mut traffic = Sum::default();
        for (_, node) in clustered.nodes() {
            if let Op::Cluster { kind, .. } = node.op {
                *self.kernels.entry(kind).or_default() += 1;
                traffic.add(clustered, node);
            }
        }
        traffic
    }

    /// Sets the traffic for given sizes of symbolic dims.
    pub(crate) fn set_traffic(&mut self, traffic: &Traffic, sizes: &Bindings) {
        self.bytes_before = traffic.before.at(sizes);
        self.bytes_after = traffic.after.at(sizes);
    }
}

/// Bytes read and written by ops and by clusters, over symbols.
#[derive(Clone, Debug, Default)]
pub(crate) struct Traffic {
    before: Sum,
    after: Sum,
}

/// Bytes for numbers of elements.
#[derive(Clone, Debug, Default)]
struct Sum(BTreeMap<Dim, u64>);

impl Sum {
    /// Adds the bytes of all operands and results of a node.
    fn add(&mut self, g: &Graph, node: &Node) {
        for &v in node.inputs.iter().chain(&node.outputs) {
            let (elements, bytes) = (g.ty(v).shape.n_elements(), g.ty(v).dtype.size_bytes());
            *self.0.entry(elements).or_default() += bytes as u64;
        }
    }

    fn at(&self, sizes: &Bindings) -> u64 {
        let elements = |d: &Dim| d.bind(sizes).as_const().unwrap_or(0).max(0) as u64;
        let terms = self.0.iter().map(|(d, n)| n.saturating_mul(elements(d)));
        terms.fold(0, u64::saturating_add)
    }
}

#[cfg(test)]
mod tests;
