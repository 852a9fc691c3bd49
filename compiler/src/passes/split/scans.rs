//! Scans whose steps each device computes for its examples, without transfers between the steps.

use super::sharding::{Computation, Plan, is_zero};
use super::{Cut, Sharding, Shares};
use crate::ir::{Graph, Node, Op, ValueId};
use Sharding::{Partial, Replicated, Shard};
use std::collections::BTreeSet;

/// The shardings of a scan's operands and results, and the plan of a step. `None` where a step needs other devices, or
/// no result is in shards or partial sums.
pub(super) fn computation(
    g: &Graph,
    node: &Node,
    shares: &Shares,
    made: impl Fn(ValueId) -> Sharding,
) -> Option<Computation> {
    let (
        &Op::Scan {
            carried, scanned, ..
        },
        [body],
    ) = (&node.op, &node.regions[..])
    else {
        return None;
    };
    let scan = Scan {
        body,
        carried,
        scanned,
        zeros: (0..carried)
            .filter(|&i| is_zero(g, node.inputs[i]))
            .collect(),
    };
    let operands = node.inputs.iter().map(|&v| whole_or_shard(made(v)));
    scan.computation(operands.collect(), shares)
}

struct Scan<'g> {
    body: &'g Graph,
    carried: usize,
    scanned: usize,
    /// Carried values of zeros at first.
    zeros: BTreeSet<usize>,
}

impl Scan<'_> {
    fn computation(&self, mut operands: Vec<Sharding>, shares: &Shares) -> Option<Computation> {
        // Each round gives at least one carried value its sharding.
        for _ in 0..=self.carried {
            let formals = self.formals(&operands)?;
            let zeros = self.zeros.iter().map(|&i| self.body.inputs[i]).collect();
            let results = Plan::of_results(self.body, &formals, zeros, shares);
            let next = self.carried_on(&operands, &results)?;
            if next == operands[..self.carried] {
                let outputs = [&next, &results[self.carried..]].concat();
                let plan = Plan::of_step(self.body, &formals, outputs, shares)?;
                return computed(operands, plan, self.carried);
            }
            operands[..self.carried].copy_from_slice(&next);
        }
        None
    }

    /// The shardings of a step's inputs.
    fn formals(&self, operands: &[Sharding]) -> Option<Vec<Sharding>> {
        let sequences = self.carried..self.carried + self.scanned;
        let formal = |(i, &sharding)| match sequences.contains(&i) {
            true => moved(sharding, -1),
            false => Some(sharding),
        };
        operands.iter().enumerate().map(formal).collect()
    }

    /// The shardings of carried values, from those before and those behind a step.
    fn carried_on(&self, before: &[Sharding], behind: &[Sharding]) -> Option<Vec<Sharding>> {
        let both = before.iter().zip(behind).take(self.carried).enumerate();
        let next = both.map(|(i, (&before, &behind))| match (before, behind) {
            _ if before == behind => Some(before),
            // Cut behind each step.
            (Shard(_), Replicated) => Some(before),
            (Replicated, Shard(_)) => Some(behind),
            (Replicated, Partial) => self.zeros.contains(&i).then_some(Partial),
            _ => None,
        });
        next.collect()
    }
}

/// The computation with the plan of a step.
fn computed(operands: Vec<Sharding>, plan: Plan, carried: usize) -> Option<Computation> {
    let (kept, stacked) = plan.outputs().split_at(carried);
    let stacked = stacked.iter().map(|&sharding| moved(sharding, 1));
    let stacked: Vec<Sharding> = stacked.collect::<Option<_>>()?;
    let results = [kept, &stacked[..]].concat();
    let is_divided = results.iter().any(|s| *s != Replicated);
    is_divided.then(|| Computation {
        results,
        operands,
        body: Some(Box::new(plan)),
    })
}

/// A sharding in which a scan takes a value: partial sums are added up before it.
fn whole_or_shard(sharding: Sharding) -> Sharding {
    match sharding {
        Partial => Replicated,
        other => other,
    }
}

/// A sharding with its axis so many places farther; `None` for shards along the axis of the steps.
fn moved(sharding: Sharding, by: isize) -> Option<Sharding> {
    match sharding {
        Shard(Cut { axis, outer }) => {
            let axis = axis.checked_add_signed(by)?;
            Some(Shard(Cut { axis, outer }))
        }
        other => Some(other),
    }
}
