//! The sharding of each value, and the shardings in which each node is computed.

use super::rules::{self, Sizes};
use super::{Sharding, Shares};
use crate::ir::{Def, Graph, Node, NodeId, Op, ValueId};
use std::collections::BTreeSet;

/// One computation of a node.
pub(super) struct Computation {
    /// The sharding of its results.
    pub(super) sharding: Sharding,
    /// The shardings of its operands.
    pub(super) operands: Vec<Sharding>,
}

/// Shardings of all values of a graph.
pub(super) struct Plan {
    /// The sharding in which each value is made, by value.
    made: Vec<Sharding>,
    /// The computations of each node, by node; none where nobody needs its results.
    computed: Vec<Vec<Computation>>,
}

impl Plan {
    /// Shardings with few transfers. The first axis of the inputs named is the batch.
    pub(super) fn of(g: &Graph, inputs: &[String], shares: &Shares) -> Plan {
        let mut plan = Plan {
            made: vec![Sharding::Replicated; g.n_values()],
            computed: Vec::new(),
        };
        if shares.n() > 1 {
            for (v, name) in g.inputs.iter().zip(&g.input_names) {
                if inputs.contains(name) {
                    plan.made[v.0 as usize] = Sharding::Shard(0);
                }
            }
            plan.choose(g, shares);
        }
        plan.find_needed(g, shares);
        plan
    }

    pub(super) fn sharding(&self, v: ValueId) -> Sharding {
        self.made[v.0 as usize]
    }

    pub(super) fn computations_of(&self, id: NodeId) -> &[Computation] {
        &self.computed[id.0 as usize]
    }

    /// Gives the results of each node a sharding.
    fn choose(&mut self, g: &Graph, shares: &Shares) {
        for (_, node) in g.nodes() {
            let sharding = self.cheapest(g, node, shares);
            for v in &node.outputs {
                self.made[v.0 as usize] = sharding;
            }
        }
    }

    /// The sharding of a node's results with the fewest bytes of operands to be summed. Shards of operands
    /// stay, or the node is replicated.
    fn cheapest(&self, g: &Graph, node: &Node, shares: &Shares) -> Sharding {
        let has = |is: fn(&Sharding) -> bool| node.inputs.iter().any(|&v| is(&self.sharding(v)));
        let is_shard = |sharding: &Sharding| matches!(sharding, Sharding::Shard(_));
        let has_shard = has(is_shard);
        if !has_shard && !has(|sharding| *sharding == Sharding::Partial) {
            return Sharding::Replicated;
        }
        let Some(sizes) = Sizes::of(g, node) else {
            return Sharding::Replicated;
        };
        let axes = sizes.cut_axes(shares).filter(|_| has_shard);
        let shardings = [Sharding::Partial]
            .into_iter()
            .chain(axes.map(Sharding::Shard));
        let mut best = (usize::MAX, Sharding::Replicated);
        for sharding in shardings {
            for operands in rules::operands(g, node, &sizes, sharding, shares) {
                if let Some(moved) = self.moved_bytes(g, node, &operands)
                    && moved < best.0
                {
                    best = (moved, sharding);
                }
            }
        }
        // Without shards, results are partial sums only where all operands are.
        match best {
            (moved, _) if !has_shard && moved > 0 => Sharding::Replicated,
            (_, sharding) => sharding,
        }
    }

    /// Bytes of partial sums to be added up for operands of some shardings; `None` where shards would have to
    /// be joined, or a value has no partial sums.
    fn moved_bytes(&self, g: &Graph, node: &Node, shardings: &[Sharding]) -> Option<usize> {
        let mut moved = 0_usize;
        for (&v, &sharding) in node.inputs.iter().zip(shardings) {
            match (self.sharding(v), sharding) {
                (made, sharding) if made == sharding => {}
                (Sharding::Replicated, Sharding::Shard(_)) => {}
                (Sharding::Partial, Sharding::Replicated | Sharding::Shard(_)) => {
                    moved = moved.saturating_add(g.ty(v).size_bytes()?);
                }
                _ => return None,
            }
        }
        Some(moved)
    }

    /// Finds the computations behind the outputs and the assignments.
    fn find_needed(&mut self, g: &Graph, shares: &Shares) {
        let mut needed: Vec<BTreeSet<Sharding>> = vec![BTreeSet::new(); g.n_values()];
        let mut computed: Vec<Vec<Computation>> = Vec::new();
        for o in &g.outputs {
            needed[o.value.0 as usize].insert(Sharding::Replicated);
        }
        for (_, node) in g.nodes().rev() {
            let shardings: BTreeSet<Sharding> = node
                .outputs
                .iter()
                .flat_map(|v| needed[v.0 as usize].iter().copied())
                .collect();
            let is_effect = matches!(node.op, Op::AssignVariable { .. });
            let own = match shardings.is_empty() && !is_effect {
                true => Vec::new(),
                false => self.computations(g, node, &shardings, shares),
            };
            for Computation { operands, .. } in &own {
                for (&v, &sharding) in node.inputs.iter().zip(operands) {
                    needed[v.0 as usize].insert(sharding);
                }
            }
            computed.push(own);
        }
        computed.reverse();
        self.computed = computed;
    }

    /// Computations of a node for its results in these shardings.
    fn computations(
        &self,
        g: &Graph,
        node: &Node,
        needed: &BTreeSet<Sharding>,
        shares: &Shares,
    ) -> Vec<Computation> {
        let whole = || Computation {
            sharding: Sharding::Replicated,
            operands: vec![Sharding::Replicated; node.inputs.len()],
        };
        let made = node
            .outputs
            .first()
            .map_or(Sharding::Replicated, |&v| self.sharding(v));
        if made == Sharding::Replicated
            && (needed.is_empty() || needed.contains(&Sharding::Replicated))
        {
            return vec![whole()];
        }
        let Some(sizes) = Sizes::of(g, node) else {
            return vec![whole()];
        };
        let best = |sharding: Sharding| {
            let all = rules::operands(g, node, &sizes, sharding, shares);
            let priced = all.into_iter().filter_map(|operands| {
                let moved = self.moved_bytes(g, node, &operands)?;
                Some((moved, Computation { sharding, operands }))
            });
            priced.min_by_key(|(moved, _)| *moved).map(|(_, c)| c)
        };
        let shardings = match made {
            Sharding::Replicated => needed.iter().copied().collect(),
            made => vec![made],
        };
        let all: Option<Vec<Computation>> = shardings.into_iter().map(best).collect();
        // Without a rule, shards are cut out of the replicated value.
        all.unwrap_or_else(|| vec![whole()])
    }
}

/// True when all elements of a value are known to be 0.
pub(super) fn is_zero(g: &Graph, v: ValueId) -> bool {
    let Def::Node(id, _) = g.value(v).def else {
        return false;
    };
    let node = g.node(id);
    match &node.op {
        Op::Broadcast { .. } | Op::Reshape { .. } => is_zero(g, node.inputs[0]),
        Op::Constant { value } => value
            .in_memory()
            .is_some_and(|t| t.as_bytes().iter().all(|b| *b == 0)),
        _ => false,
    }
}
