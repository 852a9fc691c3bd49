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
#[cfg(test)]
mod tests;

use crate::cluster::{Kernel, legal};
use crate::cost::{Nanos, Picos};
use crate::ir::{Def, Graph, NodeId, ValueId};
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
pub struct Fused {
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
pub fn fuse(g: &Graph, pricing: &Pricing, n_alternatives: usize) -> Fused {
    let mut fuser = Fuser::new(g, pricing);
    fuser.enumerate(n_alternatives);
    let mut selection = select::select(&fuser);
    let plain = |id: NodeId| fuser.price(&fuser.plain(id));
    let before: Picos = fuser.fusible().map(plain).sum();
    Fused {
        kernels: kernels(&fuser, &selection),
        missed: selection.missed(&fuser),
        before: before.nanos(),
        after: selection.total().nanos(),
        phase: fuser.report,
    }
}

fn kernels(fuser: &Fuser, selection: &select::Selection) -> Vec<Kernel> {
    let kernel = |(root, cone): (NodeId, &Cone)| Kernel {
        kind: cone.kind,
        anchor: cone.anchor,
        root,
        members: cone.nodes().collect(),
    };
    selection.kernels(fuser).map(kernel).collect()
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
    /// Values that must be stored: results of the graph, and operands of control flow, state and
    /// transfers.
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

impl<'g> Fuser<'g> {
    fn new(g: &'g Graph, pricing: &'g Pricing) -> Fuser<'g> {
        let mut is_needed = vec![false; g.n_values()];
        g.outputs
            .iter()
            .for_each(|o| is_needed[o.value.0 as usize] = true);
        for (_, node) in g.nodes().filter(|(_, n)| legal::kind_of(&n.op).is_none()) {
            node.inputs
                .iter()
                .for_each(|v| is_needed[v.0 as usize] = true);
        }
        Fuser {
            g,
            pricing,
            users: g.users(),
            is_needed,
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
        self.g
            .nodes()
            .filter(|(_, n)| legal::kind_of(&n.op).is_some())
            .map(|(id, _)| id)
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
        for i in 0..self.g.n_nodes() as u32 {
            let cones = if self.is_fusible(NodeId(i)) {
                self.cones_at(NodeId(i), limit)
            } else {
                vec![Cone::none(NodeId(i))]
            };
            self.flow.push(
                cones
                    .iter()
                    .map(|c| self.flow_of(c))
                    .min()
                    .unwrap_or(Picos::ZERO),
            );
            for cone in cones {
                self.add(NodeId(i), cone);
            }
        }
        self.eg.rebuild();
        self.report.iterations = 1;
        self.report.stop = StopReason::Saturated;
        self.report.e_nodes = self.eg.total_number_of_nodes();
        self.report.e_classes = self.eg.number_of_classes();
    }

    /// Adds a cone as an e-node of its root's class.
    fn add(&mut self, root: NodeId, cone: Cone) {
        let children = self
            .leaf_nodes(&cone)
            .map(|p| self.classes[p.0 as usize])
            .collect();
        let id = self.eg.add(Alternative {
            cone: self.cones.len() as u32,
            children,
        });
        self.cones.push(cone);
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
        let mut nodes: Vec<NodeId> = cone
            .leaves
            .iter()
            .filter_map(|(v, _)| self.producer(*v))
            .collect();
        nodes.sort_unstable();
        nodes.dedup();
        nodes.into_iter()
    }

    /// Area flow of a cone: its price and its share of the flow of its leaves.
    fn flow_of(&self, cone: &Cone) -> Picos {
        let share = |p: NodeId| Picos(self.flow[p.0 as usize].0 / self.n_readers(p).max(1) as u64);
        self.price(cone) + self.leaf_nodes(cone).map(share).sum::<Picos>()
    }

    /// Ops that read a node's results.
    fn n_readers(&self, id: NodeId) -> usize {
        let readers = |v: &ValueId| self.users[v.0 as usize].iter().map(|u| u.0);
        let mut all: Vec<NodeId> = self.g.node(id).outputs.iter().flat_map(readers).collect();
        all.dedup();
        all.len()
    }

    /// True when nothing but `reader` reads the node's results.
    fn is_only_reader(&self, id: NodeId, reader: NodeId) -> bool {
        let only = |v: &ValueId| {
            !self.is_needed[v.0 as usize] && self.users[v.0 as usize].iter().all(|u| u.0 == reader)
        };
        self.g.node(id).outputs.iter().all(only)
    }

    fn refuse(&mut self, producer: NodeId, reader: NodeId, why: String) {
        self.refused.insert((producer, reader), why);
    }
}
