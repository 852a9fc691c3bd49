//! Extraction: one cone for each node that has to be stored, with the smallest total predicted time.
//!
//! The first choice of each node has the smallest area flow. Then, as long as it helps and within a
//! fixed number of steps, single nodes change to the alternative that adds the least given all other
//! choices (exact area), and shared producers are stored or computed in all their readers at once,
//! which no single change can reach. Cones only read earlier nodes, so any choice is acyclic.

use super::Fuser;
use super::cone::Cone;
use crate::cluster::legal;
use crate::cost::Picos;
use crate::ir::{ClusterKind, NodeId};
use std::cmp::Reverse;

/// Most rounds of refinement.
const ROUNDS: usize = 4;

/// Most steps of refinement: a number for small graphs, and so many per node.
const STEPS: u64 = 1_000_000;
const STEPS_PER_NODE: u64 = 200;

/// The chosen cones.
pub(super) struct Selection {
    /// Alternatives of each node: number of the cone, price, nodes that it reads.
    choices: Vec<Vec<Choice>>,
    /// Index of the chosen alternative of each node.
    chosen: Vec<usize>,
    /// Number of needed cones that read a node; results of the graph count as one more.
    refs: Vec<u32>,
    /// Predicted time of all needed cones.
    total: Picos,
    /// For each node with several readers: the nodes some alternative of which computes or reads it.
    touching: Vec<Vec<NodeId>>,
    steps: u64,
    /// No refinement after so many steps.
    limit: u64,
}

struct Choice {
    cone: u32,
    price: Picos,
    reads: Vec<NodeId>,
}

/// Chooses the cones with the smallest total predicted time that refinement finds.
pub(super) fn select(f: &Fuser) -> Selection {
    let least_flow = |s: &Selection, id: NodeId| {
        let key = |i: &usize| {
            let cone = s.cone(f, id, *i);
            (
                f.flow_of(cone),
                cone.arithmetic(),
                Reverse(cone.members.len()),
            )
        };
        (0..s.n_alternatives(id)).min_by_key(key).unwrap_or(0)
    };
    let mut s = Selection::by(f, least_flow);
    s.refine(f);
    s
}

fn alternatives(f: &Fuser, id: NodeId) -> Vec<Choice> {
    let choice = |n: &super::Alternative| {
        let cone = &f.cones[n.cone as usize];
        Choice {
            cone: n.cone,
            price: f.price(cone),
            reads: f.leaf_nodes(cone).collect(),
        }
    };
    f.eg[f.classes[id.0 as usize]]
        .nodes
        .iter()
        .map(choice)
        .collect()
}

fn touching(f: &Fuser) -> Vec<Vec<NodeId>> {
    let mut touching: Vec<Vec<NodeId>> = vec![Vec::new(); f.g.n_nodes()];
    for id in f.fusible() {
        for cone in f.cones_of(id) {
            for p in cone
                .nodes()
                .chain(f.leaf_nodes(cone))
                .filter(|&p| p != id && f.n_readers(p) > 1)
            {
                let roots = &mut touching[p.0 as usize];
                if roots.last() != Some(&id) {
                    roots.push(id);
                }
            }
        }
    }
    touching
}

impl Selection {
    /// The choice of `choose` for each node.
    pub(super) fn by(f: &Fuser, mut choose: impl FnMut(&Selection, NodeId) -> usize) -> Selection {
        let n = f.g.n_nodes();
        let choices = (0..n as u32).map(|i| alternatives(f, NodeId(i))).collect();
        let (chosen, refs) = (vec![0; n], vec![0; n]);
        let mut s = Selection {
            choices,
            chosen,
            refs,
            total: Picos::ZERO,
            touching: touching(f),
            steps: 0,
            limit: STEPS + STEPS_PER_NODE * n as u64,
        };
        let nodes: Vec<NodeId> = f.fusible().collect();
        for &id in &nodes {
            s.chosen[id.0 as usize] = choose(&s, id);
        }
        for &id in &nodes {
            if f.g
                .node(id)
                .outputs
                .iter()
                .any(|v| f.is_needed[v.0 as usize])
            {
                s.reference(id);
            }
        }
        s
    }

    /// Number of alternatives of a node.
    pub(super) fn n_alternatives(&self, id: NodeId) -> usize {
        self.choices[id.0 as usize].len()
    }

    fn cone<'f>(&self, f: &'f Fuser, id: NodeId, i: usize) -> &'f Cone {
        &f.cones[self.choices[id.0 as usize][i].cone as usize]
    }

    fn choice(&self, id: NodeId) -> &Choice {
        &self.choices[id.0 as usize][self.chosen[id.0 as usize]]
    }

    fn is_needed(&self, id: NodeId) -> bool {
        self.refs[id.0 as usize] > 0
    }

    /// Counts one more reader of a node. The first reader pays for the node's cone, which then reads
    /// its own leaves.
    fn reference(&mut self, id: NodeId) {
        let mut stack = vec![id];
        while let Some(id) = stack.pop() {
            self.steps += 1;
            self.refs[id.0 as usize] += 1;
            if self.refs[id.0 as usize] == 1 {
                let price = self.choice(id).price;
                self.total += price;
                stack.extend(&self.choice(id).reads);
            }
        }
    }

    /// The opposite of [`Selection::reference`].
    fn release(&mut self, id: NodeId) {
        let mut stack = vec![id];
        while let Some(id) = stack.pop() {
            self.steps += 1;
            self.refs[id.0 as usize] -= 1;
            if self.refs[id.0 as usize] == 0 {
                self.total = self.total.saturating_sub(self.choice(id).price);
                stack.extend(&self.choice(id).reads);
            }
        }
    }

    /// Changes the alternative of a node.
    fn switch(&mut self, id: NodeId, to: usize) {
        let needed = self.is_needed(id);
        if needed {
            self.total = self.total.saturating_sub(self.choice(id).price);
            self.choice(id)
                .reads
                .clone()
                .into_iter()
                .for_each(|p| self.release(p));
        }
        self.chosen[id.0 as usize] = to;
        if needed {
            let price = self.choice(id).price;
            self.total += price;
            self.choice(id)
                .reads
                .clone()
                .into_iter()
                .for_each(|p| self.reference(p));
        }
    }

    fn refine(&mut self, f: &Fuser) {
        let nodes: Vec<NodeId> = f.fusible().collect();
        for _ in 0..ROUNDS {
            let before = (self.total, self.chosen.clone());
            for &id in &nodes {
                if self.steps >= self.limit {
                    return;
                }
                self.change_one(f, id);
            }
            for &id in &nodes {
                if self.steps >= self.limit {
                    return;
                }
                self.change_readers(f, id);
            }
            if (self.total, &self.chosen) == (before.0, &before.1) {
                return;
            }
        }
    }

    /// Chooses the alternative of a needed node with the smallest total; ties go to the smallest
    /// arithmetic, then to the most members.
    fn change_one(&mut self, f: &Fuser, id: NodeId) {
        let n = self.choices[id.0 as usize].len();
        if !self.is_needed(id) || n < 2 {
            return;
        }
        let old = self.chosen[id.0 as usize];
        let mut best = None;
        for i in (0..n).map(|i| (old + i) % n) {
            self.switch(id, i);
            let cone = self.cone(f, id, i);
            let key = (self.total, cone.arithmetic(), Reverse(cone.members.len()));
            if best.as_ref().is_none_or(|(b, _)| key < *b) {
                best = Some((key, i));
            }
        }
        self.switch(id, best.map_or(old, |(_, i)| i));
    }

    /// Stores a producer that its readers compute, or lets all of them compute it, when that is
    /// cheaper.
    fn change_readers(&mut self, f: &Fuser, p: NodeId) {
        let stored = self.is_needed(p);
        let touches = |c: &Choice| {
            if stored {
                c.reads.contains(&p)
            } else {
                f.cones[c.cone as usize].contains(p)
            }
        };
        let affected = |r: &NodeId| self.is_needed(*r) && touches(self.choice(*r));
        let roots: Vec<NodeId> = self.touching[p.0 as usize]
            .iter()
            .copied()
            .filter(affected)
            .collect();
        let mut changes = Vec::new();
        for &r in &roots {
            let others = 0..self.choices[r.0 as usize].len();
            let fits = |i: &usize| !touches(&self.choices[r.0 as usize][*i]);
            let Some(i) = others
                .filter(fits)
                .min_by_key(|&i| self.choices[r.0 as usize][i].price)
            else {
                return;
            };
            changes.push((r, i));
        }
        let before = self.total;
        let old: Vec<usize> = changes
            .iter()
            .map(|(r, _)| self.chosen[r.0 as usize])
            .collect();
        changes.iter().for_each(|&(r, i)| self.switch(r, i));
        if self.total >= before {
            changes
                .iter()
                .zip(old)
                .rev()
                .for_each(|(&(r, _), i)| self.switch(r, i));
        }
    }

    /// Predicted time.
    pub(super) fn total(&self) -> Picos {
        self.total
    }

    /// Needed nodes and their cones.
    pub(super) fn kernels<'f>(&'f self, f: &'f Fuser) -> impl Iterator<Item = (NodeId, &'f Cone)> {
        f.fusible()
            .filter(|&id| self.is_needed(id))
            .map(|id| (id, self.cone(f, id, self.chosen[id.0 as usize])))
    }

    /// Values between kernels that one of two fusible ops might have kept to itself, and why they are stored.
    pub(super) fn missed(&mut self, f: &Fuser) -> Vec<(String, String)> {
        let mut missed = Vec::new();
        let needed: Vec<NodeId> = self.kernels(f).map(|(id, _)| id).collect();
        for root in needed {
            let cone = self.cone(f, root, self.chosen[root.0 as usize]);
            for reader in cone.nodes() {
                let inputs = &f.g.node(reader).inputs;
                let mut stored: Vec<NodeId> =
                    inputs.iter().filter_map(|&v| f.producer(v)).collect();
                stored.retain(|&p| !cone.contains(p) && is_wanted(f, p, reader));
                stored.dedup();
                for p in stored {
                    if let Some(why) = self.reason(f, p, reader, root) {
                        let (from, to) = (f.g.node(p), f.g.node(reader));
                        let text = format!(
                            "{} into {} of {}: {why}",
                            from.op.name(),
                            to.op.name(),
                            to.origin
                        );
                        missed.push((from.origin.to_string(), text));
                    }
                }
            }
        }
        missed
    }

    /// Why `p`, which `reader` in the kernel of `root` reads, is stored: the time that storing saves,
    /// or the condition that failed.
    fn reason(&mut self, f: &Fuser, p: NodeId, reader: NodeId, root: NodeId) -> Option<String> {
        let takes =
            |i: &usize| f.cones[self.choices[root.0 as usize][*i].cone as usize].contains(p);
        let others: Vec<usize> = (0..self.n_alternatives(root)).filter(takes).collect();
        let (total, chosen) = (self.total, self.chosen[root.0 as usize]);
        let mut least = Picos::INFINITY;
        for &i in &others {
            if self.steps < self.limit {
                self.switch(root, i);
                least = least.min(self.total.saturating_sub(total));
            }
        }
        self.switch(root, chosen);
        match others.is_empty() {
            true => f.refused.get(&(p, reader)).cloned(),
            false if least == Picos::ZERO => {
                Some("storing it is predicted to take no longer".into())
            }
            false if least.is_finite() => Some(format!(
                "storing it is predicted to be faster by {}",
                least.nanos()
            )),
            false => Some("storing it is predicted to be faster".into()),
        }
    }
}

/// Fusions that people look for: of element-wise ops and views into their readers, and onto contractions and reductions.
fn is_wanted(f: &Fuser, p: NodeId, reader: NodeId) -> bool {
    let kind = |id: NodeId| legal::kind_of(&f.g.node(id).op);
    kind(p) == Some(ClusterKind::Map)
        || (kind(reader) == Some(ClusterKind::Map)
            && matches!(kind(p), Some(ClusterKind::Contract | ClusterKind::Reduce)))
}
