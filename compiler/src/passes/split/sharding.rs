//! The sharding of each value, and the shardings in which each node is computed.

use super::rules::Rules;
use super::{Sharding, Shares, scans};
use crate::ir::{Def, Graph, Node, NodeId, Op, ScalarOp, ValueId};
use crate::schedule::variable_uses;
use std::collections::{BTreeMap, BTreeSet};

/// One computation of a node.
#[derive(Clone)]
pub(super) struct Computation {
    /// The shardings of its results.
    pub(super) results: Vec<Sharding>,
    /// The shardings of its operands.
    pub(super) operands: Vec<Sharding>,
    /// The plan of a step, for a scan that is not replicated.
    pub(super) body: Option<Box<Plan>>,
}

impl Computation {
    /// A computation with all results in one sharding.
    fn uniform(node: &Node, sharding: Sharding, operands: Vec<Sharding>) -> Computation {
        Computation {
            results: vec![sharding; node.outputs.len()],
            operands,
            body: None,
        }
    }

    /// The whole node by each device.
    fn whole(node: &Node) -> Computation {
        let operands = vec![Sharding::Replicated; node.inputs.len()];
        Computation::uniform(node, Sharding::Replicated, operands)
    }

    /// The sharding of the first result.
    pub(super) fn sharding(&self) -> Sharding {
        self.results
            .first()
            .copied()
            .unwrap_or(Sharding::Replicated)
    }

    /// True when each device computes the whole node.
    pub(super) fn is_whole(&self) -> bool {
        self.results.iter().all(|s| *s == Sharding::Replicated)
    }
}

/// Shardings of all values of a graph.
#[derive(Clone)]
pub(super) struct Plan {
    /// The sharding in which each value is made, by value.
    made: Vec<Sharding>,
    /// The computations of each node, by node; none where nobody needs its results.
    computed: Vec<Vec<Computation>>,
    /// Scans that are not replicated.
    scans: BTreeMap<NodeId, Computation>,
    /// Inputs that may be taken for partial sums, as zeros are.
    open: BTreeSet<ValueId>,
    /// Folder of the variables in partial sums; empty for none.
    sums: String,
    /// The nodes that add to them.
    adds: BTreeSet<NodeId>,
    /// The shardings in which the outputs are needed.
    outputs: Vec<Sharding>,
}

impl Plan {
    /// Shardings with few transfers. The first axis of the inputs named is the batch.
    pub(super) fn of(g: &Graph, inputs: &[String], shares: &Shares, sums: &str) -> Plan {
        let formal = |name| match inputs.contains(name) && shares.n() > 1 {
            true => Sharding::along(0),
            false => Sharding::Replicated,
        };
        let formals: Vec<Sharding> = g.input_names.iter().map(formal).collect();
        let mut plan = Plan::made_of(&formals, g);
        plan.sums = sums.to_owned();
        plan.adds = plan.adding(g);
        plan.choose(g, shares);
        plan.outputs = vec![Sharding::Replicated; g.outputs.len()];
        plan.find_needed(g, shares);
        plan
    }

    /// The shardings in which the results of a step are made, if these inputs may be partial sums as well.
    pub(super) fn of_results(
        step: &Graph,
        formals: &[Sharding],
        open: BTreeSet<ValueId>,
        shares: &Shares,
    ) -> Vec<Sharding> {
        let plan = Plan::chosen(step, formals, open, shares);
        let outputs = step.outputs.iter().map(|o| plan.sharding(o.value));
        outputs.collect()
    }

    /// The plan of a step with outputs of some shardings; `None` if it needs transfers.
    pub(super) fn of_step(
        step: &Graph,
        formals: &[Sharding],
        outputs: Vec<Sharding>,
        shares: &Shares,
    ) -> Option<Plan> {
        let mut plan = Plan::chosen(step, formals, BTreeSet::new(), shares);
        plan.outputs = outputs;
        plan.find_needed(step, shares);
        plan.is_local(step).then_some(plan)
    }

    /// Shardings in which values of a step are made.
    fn chosen(g: &Graph, formals: &[Sharding], open: BTreeSet<ValueId>, shares: &Shares) -> Plan {
        let mut plan = Plan::made_of(formals, g);
        plan.open = open;
        plan.choose(g, shares);
        plan
    }

    /// All values replicated, but for the inputs.
    fn made_of(formals: &[Sharding], g: &Graph) -> Plan {
        let mut plan = Plan {
            made: vec![Sharding::Replicated; g.n_values()],
            computed: Vec::new(),
            scans: BTreeMap::new(),
            open: BTreeSet::new(),
            sums: String::new(),
            adds: BTreeSet::new(),
            outputs: Vec::new(),
        };
        for (&v, &sharding) in g.inputs.iter().zip(formals) {
            plan.made[v.0 as usize] = sharding;
        }
        plan
    }

    /// True if variables are in partial sums.
    pub(super) fn has_sums(&self) -> bool {
        !self.sums.is_empty()
    }

    /// True for the use of a variable in partial sums.
    fn is_sum(&self, node: &Node) -> bool {
        let mut used = variable_uses(node).into_iter();
        self.has_sums() && used.any(|((_, name), _)| name.starts_with(&self.sums))
    }

    /// True when no computation and no output needs values of other devices.
    fn is_local(&self, g: &Graph) -> bool {
        let is_sum =
            |v, sharding| self.sharding(v) == Sharding::Partial && sharding != Sharding::Partial;
        let is_at_hand =
            |v, sharding| self.moved_bytes(g, v, sharding).is_some() && !is_sum(v, sharding);
        let mut outputs = g.outputs.iter().zip(&self.outputs);
        let nodes = g.nodes().all(|(id, node)| {
            let mut all = self.computations_of(id).iter();
            all.all(|c| {
                let mut operands = node.inputs.iter().zip(&c.operands);
                operands.all(|(&v, &sharding)| is_at_hand(v, sharding))
            })
        });
        nodes && outputs.all(|(o, &sharding)| is_at_hand(o.value, sharding))
    }

    /// The shardings in which the outputs are needed.
    pub(super) fn outputs(&self) -> &[Sharding] {
        &self.outputs
    }

    pub(super) fn sharding(&self, v: ValueId) -> Sharding {
        self.made[v.0 as usize]
    }

    pub(super) fn computations_of(&self, id: NodeId) -> &[Computation] {
        &self.computed[id.0 as usize]
    }

    /// The nodes between a variable in partial sums and its next value, and those between a gradient and it: by common factors, and chosen
    /// by common conditions.
    fn adding(&self, g: &Graph) -> BTreeSet<NodeId> {
        let (mut is_old, mut found) = (BTreeSet::new(), BTreeSet::new());
        let mut left = Vec::new();
        for (id, node) in g.nodes() {
            let reads_old = node.inputs.iter().any(|v| is_old.contains(v));
            match &node.op {
                _ if self.is_sum(node) => is_old.extend(node.outputs.iter().copied()),
                Op::Map(ScalarOp::Add | ScalarOp::Sub) if reads_old => left.push(id),
                Op::Map(ScalarOp::Select) | Op::Reshape { .. } if reads_old => {
                    is_old.extend(node.outputs.iter().copied());
                }
                _ => {}
            }
        }
        while let Some(id) = left.pop() {
            if !found.insert(id) {
                continue;
            }
            for &v in &g.node(id).inputs {
                if let Def::Node(before, _) = g.value(v).def
                    && is_scaling(&g.node(before).op)
                {
                    left.push(before);
                }
            }
        }
        found
    }

    /// Gives the results of each node a sharding, if there are several shares.
    fn choose(&mut self, g: &Graph, shares: &Shares) {
        if shares.n() < 2 {
            return;
        }
        for (id, node) in g.nodes() {
            let scan = scans::computation(g, node, shares, |v| self.sharding(v));
            let results = match &scan {
                Some(scan) => scan.results.clone(),
                None if self.is_sum(node) => vec![Sharding::Partial],
                None => vec![self.cheapest(g, id, shares); node.outputs.len()],
            };
            for (v, sharding) in node.outputs.iter().zip(results) {
                self.made[v.0 as usize] = sharding;
            }
            self.scans.extend(scan.map(|scan| (id, scan)));
        }
    }

    /// The sharding of a node's results with the fewest bytes of operands to be summed. Shards of operands
    /// stay, or the node is replicated.
    fn cheapest(&self, g: &Graph, id: NodeId, shares: &Shares) -> Sharding {
        let node = g.node(id);
        let has = |is: fn(&Sharding) -> bool| node.inputs.iter().any(|&v| is(&self.sharding(v)));
        let is_shard = |sharding: &Sharding| matches!(sharding, Sharding::Shard(_));
        let has_shard = has(is_shard);
        if !has_shard && !has(|sharding| *sharding == Sharding::Partial) {
            return Sharding::Replicated;
        }
        let Some(rules) = self.rules(g, id, shares) else {
            return Sharding::Replicated;
        };
        let cuts = rules.cuts().filter(|_| has_shard);
        let shardings = [Sharding::Partial]
            .into_iter()
            .chain(cuts.map(Sharding::Shard));
        let mut best = (usize::MAX, Sharding::Replicated);
        for sharding in shardings {
            for operands in rules.operands(sharding) {
                if let Some(moved) = self.moved_by(g, id, &operands)
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

    fn rules<'a>(&self, g: &'a Graph, id: NodeId, shares: &'a Shares) -> Option<Rules<'a>> {
        let rules = Rules::of(g, g.node(id), shares, |v| self.sharding(v))?;
        Some(rules.with_sums(self.adds.contains(&id)))
    }

    /// Bytes of partial sums to be added up for operands of some shardings; `None` where shards would have to
    /// be joined, or a value has no partial sums.
    fn moved_by(&self, g: &Graph, id: NodeId, shardings: &[Sharding]) -> Option<usize> {
        let operands = g.node(id).inputs.iter().zip(shardings);
        let moved = operands.map(|(&v, &sharding)| match (self.sharding(v), sharding) {
            (Sharding::Replicated, Sharding::Partial) if self.adds.contains(&id) => Some(0),
            _ => self.moved_bytes(g, v, sharding),
        });
        moved.sum()
    }

    /// Bytes of partial sums to be added up for a value of a sharding; `None` as above.
    fn moved_bytes(&self, g: &Graph, v: ValueId, sharding: Sharding) -> Option<usize> {
        match (self.sharding(v), sharding) {
            (made, sharding) if made == sharding => Some(0),
            (Sharding::Replicated, Sharding::Shard(_)) => Some(0),
            (Sharding::Replicated, Sharding::Partial) => {
                (self.open.contains(&v) || is_zero(g, v)).then_some(0)
            }
            (Sharding::Partial, Sharding::Replicated | Sharding::Shard(_)) => g.ty(v).size_bytes(),
            _ => None,
        }
    }

    /// Finds the computations behind the outputs and the assignments.
    fn find_needed(&mut self, g: &Graph, shares: &Shares) {
        let mut needed: Vec<BTreeSet<Sharding>> = vec![BTreeSet::new(); g.n_values()];
        let mut computed: Vec<Vec<Computation>> = Vec::new();
        for (o, &sharding) in g.outputs.iter().zip(&self.outputs) {
            needed[o.value.0 as usize].insert(sharding);
        }
        for (id, node) in g.nodes().rev() {
            let shardings: BTreeSet<Sharding> = node
                .outputs
                .iter()
                .flat_map(|v| needed[v.0 as usize].iter().copied())
                .collect();
            let is_effect = matches!(node.op, Op::AssignVariable { .. });
            let own = match shardings.is_empty() && !is_effect {
                true => Vec::new(),
                false => match self.scans.get(&id) {
                    Some(scan) => vec![scan.clone()],
                    None => self.computations(g, id, &shardings, shares),
                },
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
        id: NodeId,
        needed: &BTreeSet<Sharding>,
        shares: &Shares,
    ) -> Vec<Computation> {
        let node = g.node(id);
        let whole = || Computation::whole(node);
        if self.is_sum(node) && shares.n() > 1 {
            let operands = vec![Sharding::Partial; node.inputs.len()];
            return vec![Computation::uniform(node, Sharding::Partial, operands)];
        }
        let made = node
            .outputs
            .first()
            .map_or(Sharding::Replicated, |&v| self.sharding(v));
        if made == Sharding::Replicated
            && (needed.is_empty() || needed.contains(&Sharding::Replicated))
        {
            return vec![whole()];
        }
        let Some(rules) = self.rules(g, id, shares) else {
            return vec![whole()];
        };
        let best = |sharding: Sharding| {
            let priced = rules.operands(sharding).into_iter();
            let priced = priced.filter_map(|way| Some((self.moved_by(g, id, &way)?, way)));
            let (_, operands) = priced.min_by_key(|(moved, _)| *moved)?;
            Some(Computation::uniform(node, sharding, operands))
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

/// True for ops that make partial sums of such ones, and of common factors and conditions.
fn is_scaling(op: &Op) -> bool {
    match op {
        Op::Map(op) => matches!(
            op,
            ScalarOp::Add
                | ScalarOp::Sub
                | ScalarOp::Neg
                | ScalarOp::Mul
                | ScalarOp::Div
                | ScalarOp::Select
        ),
        Op::Reshape { .. } | Op::Transpose { .. } => true,
        _ => false,
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
