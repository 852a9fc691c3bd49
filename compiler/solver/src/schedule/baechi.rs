//! Baechi's memory-constrained placers, as baselines: m-ETF and m-SCT (Jeon et al., "Baechi: Fast
//! Device Placement of Machine Learning Graphs", arXiv:2301.08695, section 3), written from the
//! paper. Its m-TOPO fills devices one after another, as [`super::algorithms::fill`] does.
//!
//! Memory is counted as [`crate::schedule::timeline::Timeline::peak_bytes`] does, copies included,
//! which the paper does not; a task may also wait until memory is given back. Both only help them:
//! where one of these answers, its schedule keeps every limit. A group lands as a whole.

use crate::problem::Problem;
use crate::schedule::list::{Insertion, List};
use crate::schedule::ranks::Means;
use crate::schedule::timeline::Timeline;
use crate::{Bytes, Nanos};
use std::collections::BTreeSet;

/// Most ready tasks that a step looks at, first in topological order first.
const WINDOW: usize = 256;

/// Slots that all steps together look at, about: large problems have a smaller window.
const SLOTS: usize = 4_000_000;

/// m-ETF: of all pairs of a ready task and a device where it fits, the one that can start earliest;
/// ties to the task first in topological order.
///
/// `None` when no ready task fits anywhere.
pub fn m_etf(p: &Problem) -> Option<Timeline> {
    earliest(p, &vec![u32::MAX; p.n_tasks()])
}

/// m-SCT: m-ETF in which a device that ran a task waits for the favourite child of that task,
/// unless an urgent task comes: one whose operands could be anywhere by then.
///
/// In the paper the favourite children come from a rounded linear program; here from
/// [`favourites`], a combinatorial stand-in for it. `None` when no ready task fits anywhere.
pub fn m_sct(p: &Problem) -> Option<Timeline> {
    earliest(p, &favourites(p))
}

/// At most one favourite child for each task, and each the favourite of one task at most, so chosen
/// that the critical path over endlessly many devices, on which the edge to a favourite child takes
/// no time, gets short: as long as the critical path has an edge whose ends are both free, its
/// longest transfer becomes a favourite. The paper minimises the same length by a linear program
/// (section 3.3), relaxed and rounded.
///
/// `u32::MAX` stands for none. Each round costs a pass over the graph; after [`FAVOURITE_WORK`] the
/// rest is left.
pub fn favourites(p: &Problem) -> Vec<u32> {
    let means = Means::new(p);
    let transfer = means.transfers();
    let cost: Vec<u128> = (0..p.n_tasks()).map(|t| means.cost(t)).collect();
    let mut child = vec![u32::MAX; p.n_tasks()];
    let mut parent = vec![u32::MAX; p.n_tasks()];
    let rounds = FAVOURITE_WORK / (p.n_tasks() + p.consumers.n_items()).max(1);
    for _ in 0..rounds.min(p.n_tasks()) {
        let Some((from, to)) = longest_free_edge(p, (&cost, &transfer), &child, &parent) else {
            break;
        };
        child[from as usize] = to;
        parent[to as usize] = from;
    }
    child
}

/// Tasks and edges that the choice of favourites may look at.
const FAVOURITE_WORK: usize = 40_000_000;

/// On the critical path: the edge with the longest transfer of those whose ends have no favourite
/// yet.
///
/// `mean` has the mean times of tasks and of transfers.
fn longest_free_edge(
    p: &Problem,
    mean: (&[u128], &[u128]),
    child: &[u32],
    parent: &[u32],
) -> Option<(u32, u32)> {
    let (cost, transfer) = mean;
    let mut tail = vec![(0u128, u32::MAX, 0u32); p.n_tasks()];
    let way = |x: u32, from: u32, to: u32| {
        if child[from as usize] == to {
            0
        } else {
            transfer[x as usize]
        }
    };
    for &t in p.order.iter().rev() {
        let mut next = (0, u32::MAX, 0);
        for &x in p.outputs.row(t as usize) {
            for &c in p.consumers.row(x as usize) {
                let length = way(x, t, c) + tail[c as usize].0;
                if next.1 == u32::MAX || length > next.0 {
                    next = (length, c, x);
                }
            }
        }
        tail[t as usize] = (cost[t as usize] + next.0, next.1, next.2);
    }
    let mut at =
        (0..p.n_tasks() as u32).max_by_key(|&t| (tail[t as usize].0, std::cmp::Reverse(t)))?;
    let mut best: Option<(u128, u32, u32)> = None;
    while tail[at as usize].1 != u32::MAX {
        let (_, next, x) = tail[at as usize];
        let free = child[at as usize] == u32::MAX && parent[next as usize] == u32::MAX;
        let length = transfer[x as usize];
        if free && length > 0 && best.is_none_or(|b| length > b.0) {
            best = Some((length, at, next));
        }
        at = next;
    }
    best.map(|b| (b.1, b.2))
}

/// Ready tasks, by their place in the topological order.
struct Ready {
    position: Vec<u32>,
    waiting: Vec<u32>,
    tasks: BTreeSet<(u32, u32)>,
}

impl Ready {
    fn new(p: &Problem) -> Ready {
        let mut position = vec![0; p.n_tasks()];
        p.order
            .iter()
            .enumerate()
            .for_each(|(i, &t)| position[t as usize] = i as u32);
        let waiting: Vec<u32> = (0..p.n_tasks())
            .map(|t| p.inputs.row(t).len() as u32)
            .collect();
        let tasks = p
            .order
            .iter()
            .filter(|&&t| waiting[t as usize] == 0)
            .map(|&t| (position[t as usize], t));
        Ready {
            tasks: tasks.collect(),
            position,
            waiting,
        }
    }

    fn is_ready(&self, task: u32) -> bool {
        self.tasks.contains(&(self.position[task as usize], task))
    }

    fn run(&mut self, p: &Problem, task: u32) {
        self.tasks.remove(&(self.position[task as usize], task));
        for c in p.successors(task as usize) {
            self.waiting[c as usize] -= 1;
            if self.waiting[c as usize] == 0 {
                self.tasks.insert((self.position[c as usize], c));
            }
        }
    }
}

/// The pair that can start earliest, again and again.
fn earliest(p: &Problem, favourite: &[u32]) -> Option<Timeline> {
    let mut list = List::new(p, Insertion::Append);
    let mut ready = Ready::new(p);
    let mut last = vec![u32::MAX; p.n_devices()];
    let window = (SLOTS / (p.n_tasks() * p.n_devices()).max(1)).clamp(8, WINDOW);
    while !ready.tasks.is_empty() {
        let awake: Vec<u32> = (0..p.n_devices())
            .map(|d| awaited(&list, &ready, favourite, last[d], d))
            .collect();
        let pairs = ready.tasks.iter().take(window).flat_map(|&(place, t)| {
            let urgent = urgent_from(p, &list, t as usize);
            let (list, awake) = (&list, &awake);
            let fits = list
                .open(t as usize)
                .filter(move |&d| list.excess(t as usize, d) == Bytes::ZERO);
            fits.map(move |d| {
                let start = list.slot(t as usize, d).start;
                let held_back = awake[d] != u32::MAX && awake[d] != t;
                (
                    if held_back { start.max(urgent) } else { start },
                    place,
                    d,
                    t,
                )
            })
        });
        let (_, _, d, t) = pairs.min()?;
        list.commit(t as usize, d);
        last[d] = t;
        ready.run(p, t);
    }
    Some(list.timeline())
}

/// The favourite child that a device waits for: that of its last task, if it is ready and can start
/// here as early as anywhere.
fn awaited(list: &List, ready: &Ready, favourite: &[u32], last: u32, device: usize) -> u32 {
    let child = favourite.get(last as usize).copied().unwrap_or(u32::MAX);
    if child == u32::MAX
        || !ready.is_ready(child)
        || !list.open(child as usize).any(|d| d == device)
    {
        return u32::MAX;
    }
    let here = list.slot(child as usize, device).start;
    let soonest = list
        .open(child as usize)
        .all(|d| list.slot(child as usize, d).start >= here);
    if soonest { child } else { u32::MAX }
}

/// When the operands of a task could be on every device.
fn urgent_from(p: &Problem, list: &List, task: usize) -> Nanos {
    let arrival = |x: &u32| {
        let producer = p.tensors[*x as usize].producer as usize;
        let from = list.device(producer).unwrap_or(0);
        let way = (0..p.n_devices())
            .map(|d| p.transfer(*x as usize, from, d))
            .max();
        list.end(producer) + way.unwrap_or_default()
    };
    p.inputs
        .row(task)
        .iter()
        .map(arrival)
        .max()
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::check;
    use crate::memory::repair;
    use crate::rng::Rng;
    use crate::samples::{Shape, random};

    #[test]
    fn answers_are_valid_and_keep_every_limit() {
        let mut rng = Rng(1);
        let mut n_fitted = 0;
        for i in 0..600 {
            let memory = (i % 4 != 0).then(|| 10 + rng.number(50));
            let shape = Shape {
                memory,
                constrained: i % 2 == 0,
                ..Shape::small(2 + rng.below(14), 1 + rng.below(4))
            };
            let p = random(&mut rng, shape);
            for timeline in [m_etf(&p), m_sct(&p)].into_iter().flatten() {
                assert_eq!(check(&p, &timeline), Vec::<String>::new());
                assert_eq!(repair::excess(&p, &timeline), Bytes::ZERO);
                n_fitted += usize::from(memory.is_some());
            }
            if memory.is_none() {
                assert!(m_etf(&p).is_some() && m_sct(&p).is_some());
            }
        }
        assert!(
            n_fitted > 200,
            "only {n_fitted} limited problems were answered"
        );
    }

    #[test]
    fn favourites_match_each_task_once() {
        let mut rng = Rng(2);
        for _ in 0..50 {
            let p = random(&mut rng, Shape::small(12, 3));
            let child = favourites(&p);
            let mut chosen: Vec<u32> = child.iter().copied().filter(|&c| c != u32::MAX).collect();
            assert!(
                (0..12).all(|t| child[t] == u32::MAX || p.successors(t).any(|c| c == child[t]))
            );
            let n_chosen = chosen.len();
            chosen.sort_unstable();
            chosen.dedup();
            assert_eq!(chosen.len(), n_chosen);
        }
    }
}
