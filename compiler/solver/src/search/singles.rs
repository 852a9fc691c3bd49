//! Moves of single groups, everything else left where it is: the alternatives in explanations, and
//! the descent that ends a search.
//!
//! A move is measured by simulating the placement in the order of its own timeline, with the group
//! elsewhere. [`descend`] makes such moves as long as one of those that an explanation would show
//! is an improvement, so that none of them is in the end.

use crate::memory::repair::{self, Key};
use crate::problem::Problem;
use crate::schedule::critical_chain::critical_chain;
use crate::schedule::ranks;
use crate::schedule::simulate::{Limits, LinkOrder, Simulator};
use crate::schedule::timeline::Timeline;
use crate::search::refine::{Budget, Move, Moves};
use crate::{Bytes, Nanos};

/// Tasks that measuring all moves of all groups may simulate; where it would take more only the
/// groups of the critical chain are looked at.
const ALL: u64 = 2_000_000;

/// Measures moves from one timeline.
pub struct Singles<'p> {
    p: &'p Problem,
    base: Simulator<'p>,
    trial: Simulator<'p>,
    device: Vec<u32>,
    key: Vec<u64>,
    tails: Vec<Nanos>,
}

impl<'p> Singles<'p> {
    /// Simulates the devices of a timeline in the order in which its tasks start.
    pub fn new(p: &'p Problem, timeline: &Timeline) -> Singles<'p> {
        let mut order: Vec<u32> = p.order.clone();
        order.sort_by_key(|&t| timeline.start[t as usize]);
        let key = ranks::keys_of_order(&order);
        let mut base = Simulator::new(p, LinkOrder::Urgent);
        base.run(&timeline.device, &key, Nanos::INFINITY);
        let mut tails = Vec::new();
        base.placed_tails(&mut tails);
        Singles {
            p,
            trial: base.clone(),
            base,
            device: timeline.device.clone(),
            key,
            tails,
        }
    }

    /// The placement itself, as it was simulated.
    pub fn base(&self) -> &Simulator<'p> {
        &self.base
    }

    /// The placement with a group on another device; `None` as soon as it is seen to take `limit`
    /// or more.
    pub fn moved(&mut self, group: usize, to: usize, limit: Nanos) -> Option<&Simulator<'p>> {
        let members = self.p.members.row(group);
        let from = self.device[members[0] as usize];
        members
            .iter()
            .for_each(|&t| self.device[t as usize] = to as u32);
        self.trial.restore(&self.base);
        let limits = Limits {
            makespan: limit,
            latest: &[],
            tails: &self.tails,
        };
        let makespan = self.trial.rerun(&self.device, &self.key, members, &limits);
        members.iter().for_each(|&t| self.device[t as usize] = from);
        makespan.map(|_| &self.trial)
    }
}

/// Groups whose moves are looked at: those of the critical chain, its first step first, then, where
/// that is not too much, all others.
pub fn looked_at(p: &Problem, timeline: &Timeline) -> Vec<u32> {
    let mut is_listed = vec![false; p.n_groups()];
    let mut groups = Vec::new();
    let mut list = |t: u32| {
        let group = p.group_of[t as usize];
        let is_new = !std::mem::replace(&mut is_listed[group as usize], true);
        let has_choice = || p.feasible(t as usize).nth(1).is_some();
        if is_new && has_choice() {
            groups.push(group);
        }
    };
    critical_chain(p, timeline).tasks().for_each(&mut list);
    if (p.n_groups() as u64 * p.n_devices() as u64).saturating_mul(p.n_tasks() as u64) <= ALL {
        p.order.iter().copied().for_each(&mut list);
    }
    groups
}

/// Moves groups while that is an improvement. Ends when no move of [`looked_at`] is one, when
/// `lower_bound` is reached, or when the budget is spent.
pub(crate) fn descend(
    p: &Problem,
    start: &Timeline,
    lower_bound: Nanos,
    budget: Budget,
    moves: &mut Moves,
) -> Timeline {
    let mut best = (repair::key(p, start), start.clone());
    let (mut left, mut at, mut quiet) = (i64::try_from(budget.tasks).unwrap_or(i64::MAX), 0, 0);
    moves.last.resize(p.n_groups(), None);
    let mut groups = looked_at(p, &best.1);
    let mut singles = Singles::new(p, &best.1);
    while quiet < groups.len()
        && left > 0
        && best.0 > (Bytes::ZERO, lower_bound)
        && !budget.is_late()
    {
        let group = groups[at % groups.len()] as usize;
        moves.steps += 1;
        match improved(p, &mut singles, group, best.0, &mut left) {
            None => quiet += 1,
            Some((key, timeline)) => {
                let from = best.1.device[p.members.row(group)[0] as usize];
                moves.last[group] = Some(Move {
                    step: moves.steps,
                    from,
                });
                best = (key, timeline);
                groups = looked_at(p, &best.1);
                singles = Singles::new(p, &best.1);
                left -= p.n_tasks() as i64;
                quiet = 0;
            }
        }
        at += 1;
    }
    best.1
}

/// The best placement with the group elsewhere, if it is better than `best`.
fn improved(
    p: &Problem,
    singles: &mut Singles,
    group: usize,
    best: Key,
    left: &mut i64,
) -> Option<(Key, Timeline)> {
    let first = p.members.row(group)[0] as usize;
    let own = singles.device[first] as usize;
    let mut found: Option<(Key, Timeline)> = None;
    for to in p.feasible(first).filter(|&to| to != own) {
        let least = found.as_ref().map_or(best, |f| f.0);
        // A placement that is over its memory may take longer when it is less so.
        let limit = if least.0 > Bytes::ZERO {
            Nanos::INFINITY
        } else {
            least.1
        };
        let moved = singles
            .moved(group, to, limit)
            .map(|s| (repair::key(p, s.last_run()), s.last_run()));
        if let Some((key, run)) = moved.filter(|m| m.0 < least) {
            found = Some((key, run.clone()));
        }
        *left -= (singles.trial.n_started() + p.n_tasks() as u64 / 16) as i64;
    }
    found.map(|(key, mut run)| {
        run.sort_transfers();
        (key, run)
    })
}
