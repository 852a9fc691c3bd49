//! One resource that does one thing at a time, such as a link with the tensors that must cross it.

use super::windows::Windows;
use crate::Nanos;
use crate::problem::Problem;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Something that occupies the resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Job {
    /// It starts no earlier.
    pub head: Nanos,
    /// It takes this long.
    pub length: Nanos,
    /// The end of all comes this long after its end, or later.
    pub rest: Nanos,
}

/// Makespan of Jackson's preemptive schedule: at each time the waiting job with the longest rest
/// runs. It is the optimum if jobs may be interrupted, so no schedule without interruption is
/// shorter (Carlier, "The one-machine sequencing problem", EJOR 11, 1982, section 2). Sorts `jobs`;
/// O(n log n).
pub fn preemptive(jobs: &mut [Job]) -> Nanos {
    jobs.sort_unstable();
    let mut waiting: BinaryHeap<(Nanos, Reverse<usize>)> = BinaryHeap::new();
    let mut left: Vec<u64> = jobs.iter().map(|j| j.length.0).collect();
    let (mut now, mut next, mut makespan) = (Nanos::ZERO, 0, Nanos::ZERO);
    loop {
        if waiting.is_empty() {
            let Some(job) = jobs.get(next) else {
                return makespan;
            };
            now = now.max(job.head);
        }
        while let Some(job) = jobs.get(next).filter(|j| j.head <= now) {
            waiting.push((job.rest, Reverse(next)));
            next += 1;
        }
        let Some(&(rest, Reverse(i))) = waiting.peek() else {
            continue;
        };
        let until = jobs.get(next).map_or(Nanos::INFINITY, |j| j.head);
        let runs = left[i].min(until.0.saturating_sub(now.0));
        left[i] -= runs;
        now += Nanos(runs);
        if left[i] == 0 {
            waiting.pop();
            makespan = makespan.max(now + rest);
        } else if runs == 0 {
            // All times are infinite: no schedule ends.
            return Nanos::INFINITY;
        }
    }
}

/// The link that must carry most: tensors made on the one device that can make them and used on
/// another that alone can use them.
pub(super) fn busiest_link(p: &Problem, w: &Windows) -> Nanos {
    let n = p.n_devices();
    let mut jobs: Vec<Vec<Job>> = vec![Vec::new(); n * n];
    for x in 0..p.tensors.len() {
        let producer = p.tensors[x].producer as usize;
        let Some(from) = only_device(p, producer) else {
            continue;
        };
        let head = w.head(producer, from) + p.cost(producer, from);
        let uses = p
            .consumers
            .row(x)
            .iter()
            .filter_map(|&c| Some((only_device(p, c as usize)?, c as usize)));
        let mut rests: Vec<(usize, Nanos)> = uses.map(|(to, c)| (to, w.tail(c, to))).collect();
        rests.sort_unstable_by_key(|&(to, rest)| (to, Reverse(rest)));
        rests.dedup_by_key(|r| r.0);
        for (to, rest) in rests.into_iter().filter(|r| r.0 != from) {
            jobs[from * n + to].push(Job {
                head,
                length: p.transfer(x, from, to),
                rest,
            });
        }
    }
    jobs.iter_mut()
        .map(|jobs| preemptive(jobs))
        .max()
        .unwrap_or_default()
}

fn only_device(p: &Problem, task: usize) -> Option<usize> {
    let mut open = p.feasible(task);
    open.next().filter(|_| open.next().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(jobs: &[(u64, u64, u64)], expected: u64) {
        let job = |&(head, length, rest): &(u64, u64, u64)| Job {
            head: Nanos(head),
            length: Nanos(length),
            rest: Nanos(rest),
        };
        let mut jobs: Vec<Job> = jobs.iter().map(job).collect();
        assert_eq!(preemptive(&mut jobs), Nanos(expected), "{jobs:?}");
    }

    #[test]
    fn preemptive_schedules() {
        check(&[], 0);
        check(&[(3, 0, 4)], 7);
        // Carlier's example of seven jobs: the preemptive bound is 49 and the best sequence 50.
        check(
            &[
                (10, 5, 7),
                (13, 6, 26),
                (11, 7, 24),
                (20, 4, 21),
                (30, 3, 8),
                (0, 6, 17),
                (30, 2, 0),
            ],
            49,
        );
        check(&[(0, 10, 0), (4, 2, 9)], 15);
    }
}
