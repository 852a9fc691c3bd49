//! Placement again, once times were measured: a better placement is adopted only where it pays.
//!
//! The decision depends on the old placement and the cost model alone. A proposal whose search
//! began from the old placement ([`Request::previous`]) differs from it only where it is better; so
//! with costs that stay as they are, decisions come to an end.

use super::copied_nodes::{self, Settled};
use super::model::{self, ModelProblem};
use super::{DeviceSet, Placement, Request, Solved, resolve, search};
use crate::cost::{Bytes, CostModel, Nanos};
use crate::error::{Error, Result};
use crate::ir::{Graph, NodeId};
use gristmill_solver::Problem;
use gristmill_solver::memory::remat::Freedom;
use gristmill_solver::search::portfolio;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Least predicted gain for a change, in percent of the predicted step.
pub const LEAST_GAIN_PERCENT: u64 = 3;

/// Cost of a change of placement, and the time it lasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Horizon {
    /// Steps over which a change must repay its cost.
    pub steps: u64,
    /// Time to make the changed partitions anew.
    pub rebuild: Nanos,
}

impl Default for Horizon {
    fn default() -> Horizon {
        Horizon {
            steps: 100,
            rebuild: Nanos::ZERO,
        }
    }
}

/// Outcome of a proposal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replacement {
    /// The placement from now on.
    pub placement: Placement,
    /// True if it is the proposed one.
    pub adopted: bool,
    /// Predicted step of the old placement at current costs; infinite if it has become impossible.
    pub kept: Nanos,
    /// Predicted step of the proposal.
    pub proposed: Nanos,
    /// Cost of the change, once.
    pub cost: Nanos,
    /// Nodes moved by the proposal.
    pub n_moved: usize,
}

/// Decides between the old placement of a graph and the placer's proposal at current costs.
///
/// The old one is scheduled anew on its devices. The proposal is adopted when it gains more than
/// [`LEAST_GAIN_PERCENT`] and, over the horizon, more than it costs to move constants and to make
/// changed partitions; or when the old one has become impossible. Errors when `previous` is of
/// another graph.
pub fn replace(
    g: &Graph,
    request: &Request,
    costs: &CostModel,
    previous: &Placement,
    proposed: Placement,
    horizon: Horizon,
) -> Result<Replacement> {
    if !is_of_same_graph(g, previous, &proposed) {
        return Err(Error::invalid("the previous placement is of another graph")
            .hint("the placement of the same shapes"));
    }
    let resolved = resolve::resolve(g, request)?;
    let model = model::problem(g, &resolved, &request.devices, costs)?;
    let problem = &model.problem;
    let new = devices_of(&proposed, &model.nodes, &request.devices)
        .ok_or_else(|| Error::internal("the proposal uses devices that are not in the set"))?;
    let old = devices_of(previous, &model.nodes, &request.devices);
    let n_moved = old.as_ref().map_or(new.len(), |old| {
        old.iter().zip(&new).filter(|(o, n)| o != n).count()
    });
    let freedom = copied_nodes::freedom(g, &model.nodes, request, &resolved);
    let solution = old.as_ref().and_then(|old| on_devices(problem, old));
    let settled = solution
        .map(|s| copied_nodes::settle(problem, s, &freedom))
        .filter(|s| s.solution.score.0 == Bytes::ZERO);
    let mut replacement = Replacement {
        adopted: true,
        kept: Nanos::INFINITY,
        proposed: proposed.makespan,
        cost: Nanos::ZERO,
        n_moved,
        placement: proposed,
    };
    let (Some(old), Some(settled)) = (old, settled) else {
        return Ok(replacement);
    };
    replacement.kept = settled.solution.timeline.makespan;
    replacement.cost = moved_constants(problem, &old, &new);
    if n_moved > 0 {
        replacement.cost += horizon.rebuild;
    }
    replacement.adopted = replacement.pays(horizon.steps);
    if !replacement.adopted {
        let placement = rescheduled(previous, model, settled, freedom);
        replacement.placement = placement.with_sources(g, &request.devices, costs);
    }
    Ok(replacement)
}

impl Replacement {
    /// True if the proposal moves something, is faster by enough, and repays its cost within so
    /// many steps.
    fn pays(&self, steps: u64) -> bool {
        let gain = self.kept.saturating_sub(self.proposed);
        let least = u128::from(LEAST_GAIN_PERCENT) * u128::from(self.kept.0);
        let is_large = u128::from(gain.0) * 100 > least;
        self.n_moved > 0 && is_large && gain.times(steps) > self.cost
    }
}

/// True if both place the same nodes of a graph.
fn is_of_same_graph(g: &Graph, a: &Placement, b: &Placement) -> bool {
    let is_placed = |p: &Placement| -> Vec<bool> { p.nodes.iter().map(Option::is_some).collect() };
    a.nodes.len() == g.n_nodes() && is_placed(a) == is_placed(b)
}

/// The device of each node, by its index in a set; `None` where one is not in the set.
fn devices_of(p: &Placement, nodes: &[NodeId], set: &DeviceSet) -> Option<Vec<usize>> {
    let index = |id: &NodeId| {
        let name = &p.devices[p.device_of(*id)?];
        set.devices.iter().position(|d| d.name == *name)
    };
    nodes.iter().map(index).collect()
}

/// The best schedule with every task on a given device; `None` if there is none.
fn on_devices(p: &Problem, device: &[usize]) -> Option<portfolio::Solution> {
    if (0..p.n_tasks()).any(|t| !p.cost(t, device[t]).is_finite()) {
        return None;
    }
    let mut fixed = p.clone();
    (0..p.n_tasks()).for_each(|t| fixed.restrict(t, |d| d == device[t]));
    let refine_tasks = (search::REFINE_TASKS * p.n_tasks() as u64).min(search::MAX_REFINE_TASKS);
    let options = portfolio::Options {
        refine_tasks,
        bound_nodes: 0,
        search_nodes: 0,
        ..portfolio::Options::new(&fixed)
    };
    portfolio::solve(&fixed, &options, &|a| a.name())
}

/// Time to copy constants to their new devices, one after another.
fn moved_constants(p: &Problem, old: &[usize], new: &[usize]) -> Nanos {
    let held = |device: &[usize]| -> BTreeSet<(u32, usize)> {
        (0..p.n_tasks())
            .flat_map(|t| p.constants_of.row(t).iter().map(move |&c| (c, device[t])))
            .collect()
    };
    let before = held(old);
    let brought = held(new);
    let time = |&(constant, to): &(u32, usize)| {
        let from = before
            .range((constant, 0)..=(constant, usize::MAX))
            .next()
            .map_or(to, |&(_, from)| from);
        p.links
            .get(from, to)
            .transfer(p.constants[constant as usize])
    };
    brought.difference(&before).map(time).sum()
}

/// A placement as it was, with the times of a schedule on the same devices.
fn rescheduled(
    previous: &Placement,
    of: ModelProblem,
    settled: Settled,
    freedom: Freedom,
) -> Placement {
    let ModelProblem {
        problem: p,
        nodes,
        values,
    } = of;
    let s = &settled.solution;
    let mut placement = previous.clone();
    for (t, id) in nodes.iter().enumerate() {
        if let Some(placed) = &mut placement.nodes[id.0 as usize] {
            (placed.start, placed.end) = (s.timeline.start[t], s.timeline.end[t]);
        }
    }
    placement.makespan = s.timeline.makespan;
    placement.lower_bound = (Nanos::ZERO, "none of a placement that was kept".into());
    placement.peak_bytes = s.timeline.peak_bytes(settled.problem(&p));
    placement.copies = copied_nodes::nodes(&p, &settled, &nodes, &values);
    placement.solved = previous.solved.as_deref().map(|old| {
        let (options, names) = (old.options.clone(), old.names.clone());
        Arc::new(Solved::new(
            p,
            settled,
            old.objective,
            options,
            nodes,
            names,
            freedom,
        ))
    });
    placement
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::{LinkProfile, Measured};
    use crate::ir::{GraphBuilder, ScalarOp};
    use crate::place::{DeviceSet, place};
    use crate::{DType, Tensor, cluster};

    /// Two independent chains that meet in the end: one for each of two devices.
    fn branches() -> Graph {
        let mut b = GraphBuilder::new("branches");
        let x = b.input("x", DType::F32, [64usize, 256]);
        let mut ends = Vec::new();
        for op in [ScalarOp::Exp, ScalarOp::Tanh] {
            let mut y = x;
            for _ in 0..3 {
                let w = b.constant(Tensor::zeros(DType::F32, &[256, 256]).unwrap());
                y = b.matmul(y, w).unwrap();
                y = b.map(op, &[y]).unwrap();
            }
            ends.push(y);
        }
        let y = b.add_(ends[0], ends[1]).unwrap();
        b.output("y", y);
        cluster::cluster(
            &b.finish().unwrap(),
            &cluster::Fusion::greedy(Default::default()),
        )
        .unwrap()
        .0
    }

    fn two(latency_ns: u64) -> Request {
        let mut r = Request {
            devices: DeviceSet::parse("cpu:2", 2).unwrap(),
            ..Request::default()
        };
        r.devices.link = LinkProfile {
            latency: Nanos(latency_ns),
            bytes_per_second: 10_000_000_000,
        };
        r
    }

    fn decide(
        g: &Graph,
        r: &Request,
        costs: &CostModel,
        previous: &Placement,
        horizon: Horizon,
    ) -> Replacement {
        let r = Request {
            previous: Some(Arc::new(previous.clone())),
            ..r.clone()
        };
        replace(
            g,
            &r,
            costs,
            previous,
            place(g, &r, costs).unwrap(),
            horizon,
        )
        .unwrap()
    }

    fn devices(p: &Placement) -> Vec<Option<usize>> {
        p.nodes
            .iter()
            .map(|n| n.as_ref().map(|n| n.device))
            .collect()
    }

    #[test]
    fn unchanged_costs_adopt_nothing() {
        let g = branches();
        for latency_ns in [0, 2_000, 20_000, 1_000_000] {
            let (r, costs) = (two(latency_ns), CostModel::default());
            let placement = place(&g, &r, &costs).unwrap();
            let again = decide(&g, &r, &costs, &placement, Horizon::default());
            assert!(!again.adopted && again.n_moved == 0, "{again:?}");
            assert_eq!(devices(&again.placement), devices(&placement));
        }
    }

    #[test]
    fn one_decision_leads_to_a_fixed_point() {
        let (g, slow, fast) = (branches(), two(1_000_000), two(1_000));
        let costs = CostModel::default();
        let mut placement = place(&g, &slow, &costs).unwrap();
        let changed = decide(&g, &fast, &costs, &placement, Horizon::default());
        assert!(
            changed.adopted && changed.proposed < changed.kept,
            "{changed:?}"
        );
        placement = changed.placement;
        for _ in 0..3 {
            let again = decide(&g, &fast, &costs, &placement, Horizon::default());
            assert!(!again.adopted);
            assert_eq!(devices(&again.placement), devices(&placement));
            placement = again.placement;
        }
    }

    #[test]
    fn a_change_must_repay_its_cost() {
        let (g, slow, fast) = (branches(), two(1_000_000), two(1_000));
        let costs = CostModel::default();
        let placement = place(&g, &slow, &costs).unwrap();
        let one = decide(&g, &fast, &costs, &placement, Horizon::default());
        // Every weight on a device that did not have it, 256 KiB, crosses a link of 10 GB/s and 1
        // us.
        let weighs = |n: &crate::ir::Node| n.inputs.iter().any(|&v| g.constant(v).is_some());
        let moved = |id: NodeId| one.placement.device_of(id) != placement.device_of(id);
        let n_weights = g.nodes().filter(|(id, n)| weighs(n) && moved(*id)).count() as u64;
        assert!(one.adopted && n_weights > 0);
        assert_eq!(
            one.cost,
            fast.devices.link.transfer(Bytes(4 << 16)).times(n_weights)
        );
        let gain = one.kept.saturating_sub(one.proposed);
        let horizon = |steps, rebuild| Horizon {
            steps,
            rebuild: Nanos(rebuild),
        };
        let enough = gain.times(100).0 - one.cost.0;
        assert!(decide(&g, &fast, &costs, &placement, horizon(100, enough - 1)).adopted);
        assert!(!decide(&g, &fast, &costs, &placement, horizon(100, enough)).adopted);
        assert!(!decide(&g, &fast, &costs, &placement, horizon(0, 0)).adopted);
    }

    #[test]
    fn measured_times_change_a_placement_once() {
        let (g, r) = (branches(), two(600_000));
        let before = CostModel::default();
        let placement = place(&g, &r, &before).unwrap();
        // Everything takes a hundred times as long as predicted: now a second device pays.
        let mut measured = Measured::default();
        let profile = r.devices.devices[0].profile.clone();
        let runs: Vec<_> = g
            .nodes()
            .map(|(_, n)| (&g, n, before.analytic_ns(&g, n, &profile)))
            .map(|(g, n, t)| (g, n, vec![t.times(100); 4]))
            .collect();
        measured.record(&before, &profile, runs);
        let after = CostModel {
            measured: Arc::new(measured),
            ..CostModel::default()
        };
        let changed = decide(&g, &r, &after, &placement, Horizon::default());
        assert!(changed.adopted, "{changed:?}");
        assert!(!decide(&g, &r, &after, &changed.placement, Horizon::default()).adopted);
    }

    #[test]
    fn a_device_that_is_gone_forces_a_change() {
        let (g, r, costs) = (branches(), two(0), CostModel::default());
        let placement = place(&g, &r, &costs).unwrap();
        let one = Request {
            devices: DeviceSet::parse("cpu:1", 1).unwrap(),
            ..Request::default()
        };
        let changed = decide(&g, &one, &costs, &placement, Horizon::default());
        assert!(changed.adopted && changed.kept == Nanos::INFINITY);
        let other = Placement::by_hand(placement.devices, &[]);
        let error = replace(
            &g,
            &r,
            &costs,
            &other,
            changed.placement,
            Horizon::default(),
        )
        .unwrap_err();
        insta::assert_snapshot!(error, @"the previous placement is of another graph (try: the placement of the same shapes)");
    }
}
