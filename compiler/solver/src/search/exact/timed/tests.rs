//! The search under memory limits against plain enumeration of devices and of starts in order of
//! time, on problems of a few tasks.

use super::super::Proof;
use super::super::solve;
use super::*;
use crate::bounds;
use crate::check::check;
use crate::rng::Rng;
use crate::samples::{self, Shape};
use crate::schedule::algorithms;
use crate::schedule::list::Insertion;
use crate::search::portfolio::{self, Algorithm, Options};

/// All schedules in which each start is at the end of something, on given devices; memory is looked
/// at when a schedule is whole.
struct Plain<'p> {
    p: &'p Problem,
    device: Vec<u32>,
    /// Tasks, then transfers: length, resource, and what it waits for.
    ops: Vec<(u64, usize, Vec<usize>)>,
    sent: Vec<(u32, u32)>,
    start: Vec<Option<u64>>,
    least: Option<u64>,
}

impl<'p> Plain<'p> {
    fn new(p: &'p Problem, device: Vec<u32>) -> Plain<'p> {
        let home = |t: u32| device[t as usize] as usize;
        let n = p.n_devices();
        let mut ops: Vec<(u64, usize, Vec<usize>)> = (0..p.n_tasks())
            .map(|t| (p.cost(t, home(t as u32)).0, home(t as u32), Vec::new()))
            .collect();
        let mut sent = Vec::new();
        for (x, tensor) in p.tensors.iter().enumerate() {
            let (q, from) = (tensor.producer as usize, home(tensor.producer));
            for to in (0..n).filter(|&to| to != from) {
                let there: Vec<usize> = p
                    .consumers
                    .row(x)
                    .iter()
                    .filter(|&&c| home(c) == to)
                    .map(|&c| c as usize)
                    .collect();
                if !there.is_empty() {
                    there
                        .iter()
                        .for_each(|&c| ops[c].2.push(p.n_tasks() + sent.len()));
                    sent.push((x as u32, to as u32));
                    ops.push((p.transfer(x, from, to).0, n + from * n + to, vec![q]));
                }
            }
            p.consumers
                .row(x)
                .iter()
                .filter(|&&c| home(c) == from)
                .for_each(|&c| ops[c as usize].2.push(q));
        }
        let start = vec![None; ops.len()];
        Plain {
            p,
            ops,
            sent,
            start,
            least: None,
            device,
        }
    }

    fn end(&self, i: usize) -> Option<u64> {
        self.start[i].map(|s| s + self.ops[i].0)
    }

    fn timeline(&self) -> Timeline {
        let span = |i: usize| {
            (
                Nanos(self.start[i].unwrap_or(0)),
                Nanos(self.end(i).unwrap_or(0)),
            )
        };
        let n = self.p.n_tasks();
        let transfer = |(i, &(tensor, to)): (usize, &(u32, u32))| {
            let from = self.device[self.p.tensors[tensor as usize].producer as usize];
            Transfer {
                tensor,
                from,
                to,
                start: span(n + i).0,
                end: span(n + i).1,
            }
        };
        Timeline {
            device: self.device.clone(),
            start: (0..n).map(|t| span(t).0).collect(),
            end: (0..n).map(|t| span(t).1).collect(),
            transfers: self.sent.iter().enumerate().map(transfer).collect(),
            makespan: (0..n).map(|t| span(t).1).max().unwrap_or_default(),
        }
    }

    /// Starts what can start at `now`, in any order, or goes on to the next end.
    fn visit(&mut self, now: u64) {
        let last = (0..self.ops.len())
            .filter_map(|i| self.end(i))
            .max()
            .unwrap_or(0);
        if self.least.is_some_and(|l| last >= l) {
            return;
        }
        if self.start.iter().all(Option::is_some) {
            if bounds::fits(self.p, &self.timeline()) {
                self.least = Some(last);
            }
            return;
        }
        for i in 0..self.ops.len() {
            let ended = |&q: &usize| self.end(q).is_some_and(|e| e <= now);
            let idle =
                |j: usize| self.ops[j].1 != self.ops[i].1 || self.end(j).is_none_or(|e| e <= now);
            if self.start[i].is_none()
                && self.ops[i].2.iter().all(ended)
                && (0..self.ops.len()).all(idle)
            {
                self.start[i] = Some(now);
                self.visit(now);
                self.start[i] = None;
            }
        }
        if let Some(next) = (0..self.ops.len())
            .filter_map(|i| self.end(i))
            .filter(|&e| e > now)
            .min()
        {
            self.visit(next);
        }
    }
}

/// Least makespan of all schedules that keep the limits.
fn enumerate(p: &Problem) -> Option<u64> {
    let n = p.n_devices() as u32;
    let codes = 0..n.pow(p.n_tasks() as u32);
    let devices = codes.map(|code| {
        (0..p.n_tasks() as u32)
            .map(|t| code / n.pow(t) % n)
            .collect::<Vec<u32>>()
    });
    let is_open = |device: &Vec<u32>| {
        (0..p.n_tasks()).all(|t| {
            let group = p.members.row(p.group_of[t] as usize);
            p.cost(t, device[t] as usize).is_finite()
                && group.iter().all(|&m| device[m as usize] == device[t])
        })
    };
    let least = devices.filter(is_open).filter_map(|device| {
        let mut plain = Plain::new(p, device);
        plain.visit(0);
        plain.least
    });
    least.min()
}

#[test]
fn searches_under_limits_find_the_best_of_all_schedules() {
    let (mut n_found, mut n_none, mut n_late) = (0, 0, 0);
    for seed in 0..400 {
        let mut rng = Rng(seed);
        let memory = Some(4 + rng.number(14));
        let (n, constrained) = (2 + rng.below(3), rng.one_in(2));
        let p = samples::random(
            &mut rng,
            Shape {
                memory,
                constrained,
                ..Shape::small(n, 2)
            },
        );
        let least = enumerate(&p);
        let incumbent = algorithms::heft(&p, Insertion::Gaps);
        let Proof {
            timeline,
            lower_bound,
            complete,
        } = solve(&p, &incumbent, Nanos::ZERO, 1_000_000);
        assert!(complete, "seed {seed}: not proven");
        let fitting = bounds::fits(&p, &incumbent).then_some(incumbent.makespan.0);
        let found = timeline.as_ref().map(|t| t.makespan.0).or(fitting);
        assert_eq!(found, least, "seed {seed}");
        assert!(
            least.is_none_or(|l| lower_bound.0 == l),
            "seed {seed}: {lower_bound} {least:?}"
        );
        if let Some(t) = &timeline {
            assert_eq!(check(&p, t), Vec::<String>::new(), "seed {seed}");
            assert!(bounds::fits(&p, t), "seed {seed}");
        }
        let mut free = p.clone();
        free.devices.iter_mut().for_each(|d| d.memory = None);
        let unlimited = solve(
            &free,
            &algorithms::heft(&free, Insertion::Gaps),
            Nanos::ZERO,
            1_000_000,
        )
        .lower_bound;
        n_late += usize::from(least.is_some_and(|l| l > unlimited.0));
        *(if least.is_some() {
            &mut n_found
        } else {
            &mut n_none
        }) += 1;
    }
    assert!(
        n_found > 100 && n_none > 50 && n_late > 20,
        "{n_found} found, {n_none} without, {n_late} longer for memory"
    );
}

/// What the whole portfolio says, against all schedules. `GRISTMILL_FUZZ_ROUNDS` times as many
/// problems are tried.
#[test]
fn answers_that_are_called_optimal_are_the_best_of_all_schedules() {
    let rounds = std::env::var("GRISTMILL_FUZZ_ROUNDS").map_or(1, |n| n.parse().expect("a number"));
    let (mut n_optimal, mut n_none, mut n_all) = (0, 0, 0);
    for seed in 700..700 + 300 * rounds {
        let mut rng = Rng(70_000 + seed);
        let memory = rng.one_in(2).then(|| 4 + rng.number(16));
        let (n_devices, constrained) = (2 + rng.below(2), rng.one_in(2));
        let n = if n_devices == 2 {
            2 + rng.below(4)
        } else {
            2 + rng.below(3)
        };
        let p = samples::random(
            &mut rng,
            Shape {
                memory,
                constrained,
                ..Shape::small(n, n_devices)
            },
        );
        let least = enumerate(&p);
        let s =
            portfolio::solve(&p, &Options::new(&p), &Algorithm::name).expect("all members propose");
        assert_eq!(check(&p, &s.timeline), Vec::<String>::new(), "seed {seed}");
        assert!(
            least.is_none_or(|l| s.lower_bound.0 <= l),
            "seed {seed}: {} {least:?}",
            s.lower_bound
        );
        n_all += 1;
        if !bounds::fits(&p, &s.timeline) {
            assert_eq!(least, None, "seed {seed}: nothing that fits was found");
            n_none += 1;
            continue;
        }
        assert!(
            least.is_some_and(|l| s.timeline.makespan.0 >= l),
            "seed {seed}: {least:?}"
        );
        if s.timeline.makespan == s.lower_bound {
            assert_eq!(
                Some(s.timeline.makespan.0),
                least,
                "seed {seed}: called optimal"
            );
            n_optimal += 1;
        }
    }
    assert!(
        n_optimal + n_none == n_all,
        "{n_optimal} proven and {n_none} without an answer, of {n_all}"
    );
}
