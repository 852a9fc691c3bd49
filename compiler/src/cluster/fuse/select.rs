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
    /// Steps of choice and refinement so far.
    pub(super) steps: u64,
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
        for p in f
            .cones_of(id)
            .flat_map(|cone| shared_producers(f, cone, id))
        {
            let roots = &mut touching[p.0 as usize];
            if roots.last() != Some(&id) {
                roots.push(id);
            }
        }
    }
    touching
}

/// Nodes with several readers that a cone of `id` computes or reads.
fn shared_producers<'c>(
    f: &'c Fuser,
    cone: &'c Cone,
    id: NodeId,
) -> impl Iterator<Item = NodeId> + 'c {
    let touched = cone.nodes().chain(f.leaf_nodes(cone));
    touched.filter(move |&p| p != id && f.n_readers(p) > 1)
}

impl Selection {
    /// The choice of `choose` for each node.
    pub(super) fn by(f: &Fuser, mut choose: impl FnMut(&Selection, NodeId) -> usize) -> Selection {
        let mut s = Selection::empty(f);
        for id in f.fusible() {
            s.chosen[id.0 as usize] = choose(&s, id);
        }
        for id in f.fusible().filter(|id| f.is_needed(*id)) {
            s.reference(id);
        }
        s
    }

    /// The first alternative of each node, none of them needed.
    fn empty(f: &Fuser) -> Selection {
        let n = f.g.n_nodes();
        Selection {
            choices: (0..n as u32).map(|i| alternatives(f, NodeId(i))).collect(),
            chosen: vec![0; n],
            refs: vec![0; n],
            total: Picos::ZERO,
            touching: touching(f),
            steps: 0,
            limit: STEPS + STEPS_PER_NODE * n as u64,
        }
    }

    /// Number of alternatives of a node.
    pub(super) fn n_alternatives(&self, id: NodeId) -> usize {
        self.choices[id.0 as usize].len()
    }

    fn cone<'f>(&self, f: &'f Fuser, id: NodeId, i: usize) -> &'f Cone {
        &f.cones[self.choices[id.0 as usize][i].cone as usize]
    }

    fn chosen_cone<'f>(&self, f: &'f Fuser, id: NodeId) -> &'f Cone {
        self.cone(f, id, self.chosen[id.0 as usize])
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
            for p in self.choice(id).reads.clone() {
                self.release(p);
            }
        }
        self.chosen[id.0 as usize] = to;
        if needed {
            self.total += self.choice(id).price;
            for p in self.choice(id).reads.clone() {
                self.reference(p);
            }
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
        let Some(changes) = self.opposite_choices(f, p) else {
            return;
        };
        let before = self.total;
        let chosen = |r: NodeId| (r, self.chosen[r.0 as usize]);
        let old: Vec<_> = changes.iter().map(|&(r, _)| chosen(r)).collect();
        for (r, i) in changes {
            self.switch(r, i);
        }
        if self.total >= before {
            for (r, i) in old.into_iter().rev() {
                self.switch(r, i);
            }
        }
    }

    /// For each needed reader of `p`: its cheapest alternative that computes `p` where the chosen one
    /// reads it, or the other way round. `None` when a reader has none.
    fn opposite_choices(&self, f: &Fuser, p: NodeId) -> Option<Vec<(NodeId, usize)>> {
        let is_stored = self.is_needed(p);
        let touches = |c: &Choice| {
            if is_stored {
                c.reads.contains(&p)
            } else {
                f.cones[c.cone as usize].contains(p)
            }
        };
        let mut changes = Vec::new();
        for &r in &self.touching[p.0 as usize] {
            if !self.is_needed(r) || !touches(self.choice(r)) {
                continue;
            }
            let choices = self.choices[r.0 as usize].iter().enumerate();
            let others = choices.filter(|(_, c)| !touches(c));
            let cheapest = others.min_by_key(|(_, c)| c.price);
            changes.push((r, cheapest?.0));
        }
        Some(changes)
    }

    /// Predicted time.
    pub(super) fn total(&self) -> Picos {
        self.total
    }

    /// Cones of the needed nodes.
    pub(super) fn cones<'f>(&'f self, f: &'f Fuser) -> impl Iterator<Item = &'f Cone> {
        let needed = f.fusible().filter(|&id| self.is_needed(id));
        needed.map(|id| self.chosen_cone(f, id))
    }

    /// Values between kernels that one of two fusible ops might have kept to itself, and why they are stored.
    pub(super) fn missed(&mut self, f: &Fuser) -> Vec<(String, String)> {
        let mut missed = Vec::new();
        let roots: Vec<NodeId> = self.cones(f).map(|cone| cone.root).collect();
        for root in roots {
            let cone = self.chosen_cone(f, root);
            for reader in cone.nodes() {
                for p in wanted_producers(f, cone, reader) {
                    let why = self.reason(f, p, reader, root);
                    missed.extend(why.map(|why| described(f, p, reader, &why)));
                }
            }
        }
        missed
    }

    /// Why `p`, which `reader` in the kernel of `root` reads, is stored: the time that storing saves,
    /// or the condition that failed.
    fn reason(&mut self, f: &Fuser, p: NodeId, reader: NodeId, root: NodeId) -> Option<String> {
        let Some(saved) = self.saved_by_storing(f, p, root) else {
            return f.refused.get(&(p, reader)).cloned();
        };
        Some(if saved == Picos::ZERO {
            "storing it is predicted to take no longer".into()
        } else if saved.is_finite() {
            let saved = saved.nanos();
            format!("storing it is predicted to be faster by {saved}")
        } else {
            "storing it is predicted to be faster".into()
        })
    }

    /// The time by which any alternative of `root` that computes `p` is slower; infinite when none was
    /// tried, `None` when there is none.
    fn saved_by_storing(&mut self, f: &Fuser, p: NodeId, root: NodeId) -> Option<Picos> {
        let takes = |i: &usize| self.cone(f, root, *i).contains(p);
        let others: Vec<usize> = (0..self.n_alternatives(root)).filter(takes).collect();
        let (total, chosen) = (self.total, self.chosen[root.0 as usize]);
        let mut saved = Picos::INFINITY;
        for &i in &others {
            if self.steps < self.limit {
                self.switch(root, i);
                saved = saved.min(self.total.saturating_sub(total));
            }
        }
        self.switch(root, chosen);
        (!others.is_empty()).then_some(saved)
    }
}

/// Producers that a member of a cone reads from memory, of fusions that people look for.
fn wanted_producers(f: &Fuser, cone: &Cone, reader: NodeId) -> Vec<NodeId> {
    let inputs = f.g.node(reader).inputs.iter();
    let mut stored: Vec<NodeId> = inputs.filter_map(|&v| f.producer(v)).collect();
    stored.retain(|&p| !cone.contains(p) && is_wanted(f, p, reader));
    stored.dedup();
    stored
}

/// Origin of the producer, and the reason with the names of both ops.
fn described(f: &Fuser, p: NodeId, reader: NodeId, why: &str) -> (String, String) {
    let (from, to) = (f.g.node(p), f.g.node(reader));
    let (op, into) = (from.op.name(), to.op.name());
    let text = format!("{op} into {into} of {}: {why}", to.origin);
    (from.origin.to_string(), text)
}

/// Fusions that people look for: of element-wise ops and views into their readers, and onto contractions and reductions.
fn is_wanted(f: &Fuser, p: NodeId, reader: NodeId) -> bool {
    let kind = |id: NodeId| legal::kind_of(&f.g.node(id).op);
    kind(p) == Some(ClusterKind::Map)
        || (kind(reader) == Some(ClusterKind::Map)
            && matches!(kind(p), Some(ClusterKind::Contract | ClusterKind::Reduce)))
}
