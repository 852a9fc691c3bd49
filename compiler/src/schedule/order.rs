//! The serial order of a partition.

use super::Storage;
use crate::ir::{Graph, Node, NodeId, Op, OpClass, ValueId};
use std::collections::BTreeSet;

/// At most this many ready nodes, earliest first, are looked at when the next one is chosen.
const CHOICES: usize = 64;

/// The order to use: that of the graph, or, without transfers, the memory-aware one when it keeps fewer bytes alive.
pub fn choose(s: &Storage, deps: &[BTreeSet<NodeId>]) -> Vec<NodeId> {
    let own = own_order(s.g, deps);
    if s.g.nodes().any(|(_, n)| n.op.class() == OpClass::Transfer) {
        return own;
    }
    let (greedy, peak) = memory_aware(s, deps, None);
    let (_, own_peak) = memory_aware(s, deps, Some(&own));
    if peak < own_peak { greedy } else { own }
}

/// The order of the graph, but that a node waits for all that it depends on: updates in place depend on later nodes.
fn own_order(g: &Graph, deps: &[BTreeSet<NodeId>]) -> Vec<NodeId> {
    let mut ready = Ready::new(g, deps);
    let mut order = Vec::new();
    while let Some(&id) = ready.nodes.first() {
        ready.run(id);
        order.push(id);
    }
    order
}

/// List scheduling by memory: the next node is the ready one that adds least to the live bytes, the
/// earliest on ties; or that of the given order. Returns the order and its peak of live bytes.
fn memory_aware(
    s: &Storage,
    deps: &[BTreeSet<NodeId>],
    given: Option<&[NodeId]>,
) -> (Vec<NodeId>, usize) {
    let mut live = LiveBytes::new(s);
    let mut ready = Ready::new(s.g, deps);
    let mut order = Vec::new();
    let next = |ready: &Ready, live: &LiveBytes, done: usize| match given {
        Some(order) => order.get(done).copied(),
        None => {
            let choices = ready.nodes.iter().take(CHOICES).copied();
            choices.min_by_key(|&id| (live.growth(id), id))
        }
    };
    while let Some(id) = next(&ready, &live, order.len()) {
        ready.run(id);
        live.run(id);
        order.push(id);
    }
    (order, live.peak)
}

/// Nodes whose dependencies have all run, while an order is built.
struct Ready {
    nodes: BTreeSet<NodeId>,
    users: Vec<Vec<NodeId>>,
    /// Number of dependencies of each node that have not run.
    waiting: Vec<usize>,
}

impl Ready {
    fn new(g: &Graph, deps: &[BTreeSet<NodeId>]) -> Ready {
        let waiting: Vec<usize> = deps.iter().map(BTreeSet::len).collect();
        let mut users: Vec<Vec<NodeId>> = vec![Vec::new(); g.n_nodes()];
        for (id, of) in (0..).map(NodeId).zip(deps) {
            of.iter().for_each(|d| users[d.0 as usize].push(id));
        }
        let is_ready = |(id, node): (NodeId, &Node)| {
            let is_step = !matches!(node.op, Op::Constant { .. });
            (is_step && waiting[id.0 as usize] == 0).then_some(id)
        };
        Ready {
            nodes: g.nodes().filter_map(is_ready).collect(),
            users,
            waiting,
        }
    }

    fn run(&mut self, id: NodeId) {
        self.nodes.remove(&id);
        for user in &self.users[id.0 as usize] {
            self.waiting[user.0 as usize] -= 1;
            if self.waiting[user.0 as usize] == 0 {
                self.nodes.insert(*user);
            }
        }
    }
}

/// Effect of a node on the live bytes.
struct Effect {
    /// Bytes of the results.
    created: usize,
    /// Bytes of results that nobody reads.
    unused: usize,
    /// Roots that it reads, with the number of reads.
    reads: Vec<(ValueId, usize)>,
}

/// LiveBytes bytes while an order is built.
struct LiveBytes<'s, 'g> {
    s: &'s Storage<'g>,
    effects: Vec<Effect>,
    /// Uses of each root that are still to come.
    uses: Vec<usize>,
    bytes: usize,
    peak: usize,
}

impl<'s, 'g> LiveBytes<'s, 'g> {
    fn new(s: &'s Storage<'g>) -> LiveBytes<'s, 'g> {
        let mut uses = vec![0; s.g.n_values()];
        for (_, node) in s.g.nodes() {
            node.inputs
                .iter()
                .filter_map(|&v| s.arena_root(v))
                .for_each(|r| uses[r.0 as usize] += 1);
        }
        let effects = s.g.nodes().map(|(_, n)| Effect::of(s, n, &uses)).collect();
        LiveBytes {
            s,
            effects,
            uses,
            bytes: 0,
            peak: 0,
        }
    }

    fn freed(&self, id: NodeId) -> usize {
        let effect = &self.effects[id.0 as usize];
        let dying = effect
            .reads
            .iter()
            .filter(|(r, n)| self.uses[r.0 as usize] == *n);
        effect.unused + dying.map(|(r, _)| self.s.block_bytes(*r)).sum::<usize>()
    }

    /// Change of the live bytes when a node has run.
    fn growth(&self, id: NodeId) -> i128 {
        self.effects[id.0 as usize].created as i128 - self.freed(id) as i128
    }

    fn run(&mut self, id: NodeId) {
        self.bytes = self
            .bytes
            .saturating_add(self.effects[id.0 as usize].created);
        self.peak = self
            .peak
            .max(self.bytes.saturating_add(self.s.scratch_bytes(id)));
        self.bytes -= self.freed(id);
        for (r, n) in &self.effects[id.0 as usize].reads {
            self.uses[r.0 as usize] -= n;
        }
    }
}

impl Effect {
    fn of(s: &Storage, node: &Node, uses: &[usize]) -> Effect {
        let mut reads: Vec<(ValueId, usize)> = Vec::new();
        for root in node.inputs.iter().filter_map(|&v| s.arena_root(v)) {
            match reads.iter_mut().find(|(r, _)| *r == root) {
                Some((_, n)) => *n += 1,
                None => reads.push((root, 1)),
            }
        }
        let own = || node.outputs.iter().filter(|&&v| s.arena_root(v) == Some(v));
        let unused = own()
            .filter(|v| uses[v.0 as usize] == 0)
            .map(|&v| s.block_bytes(v))
            .sum();
        Effect {
            created: own().map(|&v| s.block_bytes(v)).sum(),
            unused,
            reads,
        }
    }
}
