//! Fusion: kernels of several ops as alternative e-nodes, chosen by predicted time.
//!
//! Every op of the graph is an e-class. Its e-nodes are [`Cone`]s: one kernel that computes the op and, on the way, some of its
//! producers; the children of the e-node are the classes that this kernel reads from memory. So epilogues, prologues, folded views
//! and producers recomputed in each reader compete with storing the value, and a value that no chosen
//! e-node reads is never stored. Rules ([`rules`]) grow the cones of a class from those of its
//! operands, within the limits of code generation (`cluster::legal`). A class keeps the [`MAX_ALTERNATIVES`] best, as in technology mapping with priority cuts (Mishchenko, Cho, Chatterjee and
//! Brayton, ICCAD 2007), whose area flow and exact area [`select`] uses for extraction. All of it is linear in the graph.
//!
//! Requires static shapes, folded constants and no common subexpressions; runs on its own e-graph, since merged products and
//! folded weights come between the other phases and this one, and since no other rule applies to cones.

mod cone;
mod rules;
mod select;

use crate::cluster::{Kernel, legal};
use crate::cost::{Nanos, Picos};
use crate::ir::{Def, Graph, NodeId, OpClass, ValueId};
use crate::rewrite::Pricing;
use crate::rewrite::{PhaseReport, StopReason};
use cone::Cone;
use egg::{Id, Language};
use std::collections::BTreeMap;

pub use rules::fuse_rules;

/// Most alternatives of a class; large graphs get by with fewer.
pub(super) const MAX_ALTERNATIVES: usize = 8;

/// From this many nodes on, two alternatives are kept per class.
const LARGE_GRAPH: usize = 4000;

/// The kernels of a graph, in order of their roots, and how they were chosen.
#[derive(Clone, Debug)]
pub struct FusedKernels {
    /// The chosen kernels. Ops that no kernel stores are computed inside others, or not at all.
    pub kernels: Vec<Kernel>,
    /// Fusions that would have been possible or wanted and are not there: origin of the producer, reason.
    pub missed: Vec<(String, String)>,
    /// Rules that fired, and the size of the e-graph.
    pub phase: PhaseReport,
    /// Predicted time with one kernel per op.
    pub before: Nanos,
    /// Predicted time of the kernels.
    pub after: Nanos,
}

/// Chooses the kernels of `g` by predicted time, keeping at most `n_alternatives` per op.
pub fn fuse(g: &Graph, pricing: &Pricing, n_alternatives: usize) -> FusedKernels {
    let mut fuser = Fuser::new(g, pricing);
    fuser.enumerate(n_alternatives);
    let mut selection = select::select(&fuser);
    let plain = |id: NodeId| fuser.price(&fuser.plain(id));
    let before: Picos = fuser.fusible().map(plain).sum();
    FusedKernels {
        kernels: selection.cones(&fuser).map(Cone::kernel).collect(),
        missed: selection.missed(&fuser),
        before: before.nanos(),
        after: selection.total().nanos(),
        phase: fuser.report,
    }
}

/// An e-node: a cone and the classes of the values that it reads.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Alternative {
    cone: u32,
    children: Box<[Id]>,
}

impl Language for Alternative {
    type Discriminant = u32;

    fn discriminant(&self) -> u32 {
        self.cone
    }
    fn matches(&self, other: &Alternative) -> bool {
        self.cone == other.cone
    }
    fn children(&self) -> &[Id] {
        &self.children
    }
    fn children_mut(&mut self) -> &mut [Id] {
        &mut self.children
    }
}

/// The e-graph of cones while it grows.
struct Fuser<'g> {
    g: &'g Graph,
    pricing: &'g Pricing,
    users: Vec<Vec<(NodeId, usize)>>,
    /// Values that must be stored: results of the graph, operands of control flow, state and
    /// transfers, and results of nodes that others wait for.
    is_needed: Vec<bool>,
    /// Nodes with control edges.
    ordered: Vec<bool>,
    eg: egg::EGraph<Alternative, ()>,
    classes: Vec<Id>,
    cones: Vec<Cone>,
    /// Area flow: smallest predicted time of a node with all that it needs, where shared producers are
    /// divided among their readers.
    flow: Vec<Picos>,
    /// Why a producer (first) is not computed in the kernel of its reader (second).
    refused: BTreeMap<(NodeId, NodeId), String>,
    report: PhaseReport,
}

fn needed_values(g: &Graph) -> Vec<bool> {
    let top_level = g.nodes().filter(|(_, n)| legal::kind_of(&n.op).is_none());
    let operands = top_level.flat_map(|(_, n)| &n.inputs).copied();
    let mut is_needed = vec![false; g.n_values()];
    let needed = g.outputs.iter().map(|o| o.value).chain(operands);
    for v in needed.chain(g.awaited()) {
        is_needed[v.0 as usize] = true;
    }
    is_needed
}

impl<'g> Fuser<'g> {
    fn new(g: &'g Graph, pricing: &'g Pricing) -> Fuser<'g> {
        Fuser {
            g,
            pricing,
            users: g.users(),
            is_needed: needed_values(g),
            ordered: g.ordered(),
            eg: egg::EGraph::default(),
            classes: Vec::with_capacity(g.n_nodes()),
            cones: Vec::new(),
            flow: Vec::with_capacity(g.n_nodes()),
            refused: BTreeMap::new(),
            report: PhaseReport::new("fuse"),
        }
    }

    /// Nodes that become kernels or parts of them.
    fn fusible(&self) -> impl Iterator<Item = NodeId> {
        let all = (0..self.g.n_nodes() as u32).map(NodeId);
        all.filter(|id| self.is_fusible(*id))
    }

    fn is_fusible(&self, id: NodeId) -> bool {
        legal::kind_of(&self.g.node(id).op).is_some()
    }

    /// The fusible node that defines a value.
    fn producer(&self, v: ValueId) -> Option<NodeId> {
        match self.g.value(v).def {
            Def::Node(id, _) if self.is_fusible(id) => Some(id),
            _ => None,
        }
    }

    /// Adds the e-nodes of every class, operands first.
    fn enumerate(&mut self, n_alternatives: usize) {
        let limit = if self.g.n_nodes() < LARGE_GRAPH {
            n_alternatives
        } else {
            n_alternatives.min(2)
        };
        for id in (0..self.g.n_nodes() as u32).map(NodeId) {
            let cones = if self.is_fusible(id) {
                self.cones_at(id, limit)
            } else {
                vec![Cone::none(id)]
            };
            let flow = cones.iter().map(|c| self.flow_of(c)).min();
            self.flow.push(flow.unwrap_or(Picos::ZERO));
            for cone in cones {
                self.add(id, cone);
            }
        }
        self.eg.rebuild();
        self.report_size();
    }

    fn report_size(&mut self) {
        self.report.iterations = 1;
        self.report.stop = StopReason::Saturated;
        self.report.e_nodes = self.eg.total_number_of_nodes();
        self.report.e_classes = self.eg.number_of_classes();
    }

    /// Adds a cone as an e-node of its root's class.
    fn add(&mut self, root: NodeId, cone: Cone) {
        let leaves = self.leaf_nodes(&cone);
        let children = leaves.map(|p| self.classes[p.0 as usize]).collect();
        let index = self.cones.len() as u32;
        self.cones.push(cone);
        let id = self.eg.add(Alternative {
            cone: index,
            children,
        });
        match self.classes.get(root.0 as usize) {
            Some(&class) => {
                self.eg.union(class, id);
            }
            None => self.classes.push(id),
        }
    }

    /// The cones of a node, as they were added.
    fn cones_of(&self, id: NodeId) -> impl Iterator<Item = &Cone> {
        self.eg[self.classes[id.0 as usize]]
            .nodes
            .iter()
            .map(|n| &self.cones[n.cone as usize])
    }

    /// Fusible nodes whose results a cone reads, each once.
    fn leaf_nodes<'c>(&'c self, cone: &'c Cone) -> impl Iterator<Item = NodeId> + 'c {
        let produced = cone.leaves.iter().filter_map(|(v, _)| self.producer(*v));
        let mut nodes: Vec<NodeId> = produced.collect();
        nodes.sort_unstable();
        nodes.dedup();
        nodes.into_iter()
    }

    /// Area flow of a cone: its price and its share of the flow of its leaves.
    fn flow_of(&self, cone: &Cone) -> Picos {
        let leaves = self.leaf_nodes(cone);
        self.price(cone) + leaves.map(|p| self.share_of_flow(p)).sum::<Picos>()
    }

    fn share_of_flow(&self, id: NodeId) -> Picos {
        let flow = self.flow[id.0 as usize].0;
        Picos(flow / self.n_readers(id).max(1) as u64)
    }

    fn results(&self, id: NodeId) -> &[ValueId] {
        &self.g.node(id).outputs
    }

    fn is_view(&self, id: NodeId) -> bool {
        self.g.node(id).op.class() == OpClass::View
    }

    /// Readers of a node's results, with repetition.
    fn readers(&self, id: NodeId) -> impl Iterator<Item = NodeId> {
        let users = |v: &ValueId| self.users[v.0 as usize].iter();
        self.results(id).iter().flat_map(users).map(|u| u.0)
    }

    /// Ops that read a node's results.
    fn n_readers(&self, id: NodeId) -> usize {
        let mut readers: Vec<NodeId> = self.readers(id).collect();
        readers.dedup();
        readers.len()
    }

    /// True when a result of the node must be stored.
    fn is_needed(&self, id: NodeId) -> bool {
        let mut results = self.results(id).iter();
        results.any(|v| self.is_needed[v.0 as usize])
    }

    /// True when nothing but `reader` reads the node's results.
    fn is_only_reader(&self, id: NodeId, reader: NodeId) -> bool {
        !self.is_needed(id) && self.readers(id).all(|r| r == reader)
    }

    fn refuse(&mut self, producer: NodeId, reader: NodeId, why: String) {
        self.refused.insert((producer, reader), why);
    }
}

#[cfg(test)]
mod tests;
