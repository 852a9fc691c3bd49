//! Schedules that keep memory limits: for a placement that is given, and for one that is changed
//! until it fits.

use crate::problem::Problem;
use crate::schedule::list::{List, Sending};
use crate::schedule::timeline::Timeline;
use crate::{Bytes, Nanos};
use std::collections::BTreeSet;

/// The order of schedules, smallest first: bytes over the limits of all devices, then time.
pub type Key = (Bytes, Nanos);

/// Bytes over the limits, summed over devices, and the makespan.
pub fn key(p: &Problem, timeline: &Timeline) -> Key {
    (excess(p, timeline), timeline.makespan)
}

/// Bytes by which the peaks of all devices pass their limits.
pub fn excess(p: &Problem, timeline: &Timeline) -> Bytes {
    if p.devices.iter().all(|d| d.memory.is_none()) {
        return Bytes::ZERO;
    }
    let peaks = timeline.peak_bytes(p);
    let over = |(peak, device): (&Bytes, &crate::problem::Device)| match device.memory {
        Some(limit) => peak.saturating_sub(limit),
        None => Bytes::ZERO,
    };
    peaks.iter().zip(&p.devices).map(over).sum()
}

/// The best schedule of a placement under memory limits, of a few: tasks in `order`, which is
/// topological, each as soon as it fits; transfers early or late.
pub fn schedule(p: &Problem, device: &[u32], order: &[u32]) -> Timeline {
    let run = |sending: Sending| {
        let mut list = List::planned(p, sending, device);
        for &t in order {
            list.commit(t as usize, device[t as usize] as usize);
        }
        list.timeline()
    };
    let early = run(Sending::Early);
    let key_of = |t: &Timeline| key(p, t);
    if key_of(&early).0 == Bytes::ZERO {
        return early;
    }
    let late = run(Sending::Late);
    if key_of(&late) < key_of(&early) {
        late
    } else {
        early
    }
}

/// A topological order that continues with tasks that the last one made ready: little is live at a
/// time.
pub fn depth_first(p: &Problem) -> Vec<u32> {
    let mut waiting: Vec<u32> = (0..p.n_tasks())
        .map(|t| p.inputs.row(t).len() as u32)
        .collect();
    let mut ready: Vec<u32> = p
        .order
        .iter()
        .rev()
        .copied()
        .filter(|&t| waiting[t as usize] == 0)
        .collect();
    let mut order = Vec::with_capacity(p.n_tasks());
    while let Some(t) = ready.pop() {
        order.push(t);
        for c in p.successors(t as usize) {
            waiting[c as usize] -= 1;
            if waiting[c as usize] == 0 {
                ready.push(c);
            }
        }
    }
    order
}

/// A topological order that keeps little live: of the ready tasks always the one that leaves least
/// behind, results less operands that it is the last to use; ties to the task made ready last.
pub fn least_live(p: &Problem) -> Vec<u32> {
    let mut waiting: Vec<u32> = (0..p.n_tasks())
        .map(|t| p.inputs.row(t).len() as u32)
        .collect();
    let mut live = Live::new(p);
    for &t in p.order.iter().rev() {
        if waiting[t as usize] == 0 {
            live.enter(t);
        }
    }
    let mut order = Vec::with_capacity(p.n_tasks());
    while let Some((_, _, t)) = live.ready.pop_first() {
        order.push(t);
        live.use_operands(t);
        for c in p.successors(t as usize) {
            waiting[c as usize] -= 1;
            if waiting[c as usize] == 0 {
                live.enter(c);
            }
        }
    }
    order
}

/// Ready tasks by the bytes that they leave live.
struct Live<'p> {
    p: &'p Problem,
    /// Uses of each tensor that are still to come.
    uses: Vec<u32>,
    /// Bytes left, a stamp that falls with each entry, and the task.
    ready: BTreeSet<(i128, u64, u32)>,
    /// Bytes left and stamp of each task that entered.
    entry: Vec<(i128, u64)>,
    stamp: u64,
}

impl<'p> Live<'p> {
    fn new(p: &'p Problem) -> Live<'p> {
        let n_uses = |x: usize| p.consumers.row(x).len() as u32;
        Live {
            p,
            uses: (0..p.tensors.len()).map(n_uses).collect(),
            ready: BTreeSet::new(),
            entry: vec![(0, 0); p.n_tasks()],
            stamp: u64::MAX,
        }
    }

    fn enter(&mut self, t: u32) {
        self.stamp -= 1;
        self.entry[t as usize] = (self.left(t), self.stamp);
        self.ready.insert((self.entry[t as usize].0, self.stamp, t));
    }

    /// Bytes that a task leaves live: its results less the operands that it is the last to use.
    fn left(&self, t: u32) -> i128 {
        let bytes = |x: u32| i128::from(self.p.tensors[x as usize].bytes().0);
        let made = self.p.outputs.row(t as usize).iter().copied();
        let used = self.p.inputs.row(t as usize).iter().copied();
        let made = made.filter(|&x| self.uses[x as usize] > 0).map(bytes);
        let freed = used.filter(|&x| self.uses[x as usize] == 1).map(bytes);
        made.sum::<i128>() - freed.sum::<i128>()
    }

    /// Counts the uses of a task's operands. The one consumer left of a tensor would now free it.
    fn use_operands(&mut self, t: u32) {
        let p = self.p;
        for &x in p.inputs.row(t as usize) {
            self.uses[x as usize] -= 1;
            if self.uses[x as usize] != 1 {
                continue;
            }
            for &c in p.consumers.row(x as usize) {
                let (left, stamp) = self.entry[c as usize];
                if self.ready.remove(&(left, stamp, c)) {
                    self.entry[c as usize].0 = self.left(c);
                    self.ready.insert((self.entry[c as usize].0, stamp, c));
                }
            }
        }
    }
}

/// Why no placement keeps the limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unfit {
    /// While this task runs, its operands, its results and the memory of its group for the whole
    /// step exceed its device.
    Task {
        /// The task.
        task: u32,
        /// Bytes that it needs.
        needs: Bytes,
        /// Most bytes that a device that it can be on may hold.
        most: Bytes,
    },
    /// While this task runs, in whatever order and wherever, that much is live on all devices
    /// together.
    Together {
        /// The task.
        task: u32,
        /// Bytes that are live.
        needs: Bytes,
        /// Sum of the devices' limits.
        most: Bytes,
    },
}

/// Tasks times tensors above which [`unfit`] does not look for tensors that are live together.
const TOGETHER_WORK: usize = 400_000_000;

/// A proof that no valid schedule keeps the memory limits, if one is found. Tasks that take no time
/// prove nothing: they hold nothing for any time.
pub fn unfit(p: &Problem) -> Option<Unfit> {
    let limit = |d: usize| p.devices[d].memory.unwrap_or(Bytes::INFINITY);
    for t in (0..p.n_tasks()).filter(|&t| p.least_cost(t) > Nanos::ZERO) {
        let needs = footprint(p, t);
        let most = p.feasible(t).map(limit).max().unwrap_or_default();
        if needs > most {
            return Some(Unfit::Task {
                task: t as u32,
                needs,
                most,
            });
        }
    }
    let most: Bytes = (0..p.n_devices()).map(limit).sum();
    if !most.is_finite() || p.n_tasks().saturating_mul(p.consumers.n_items()) > TOGETHER_WORK {
        return None;
    }
    let (task, needs) = most_live(p)?;
    (needs > most).then_some(Unfit::Together { task, needs, most })
}

/// Memory of a task on its device while it runs.
fn footprint(p: &Problem, task: usize) -> Bytes {
    let tensors = p.inputs.row(task).iter().chain(p.outputs.row(task));
    let group = p.members.row(p.group_of[task] as usize);
    let constants = p
        .constants_of
        .row(task)
        .iter()
        .map(|&c| p.constants[c as usize]);
    tensors
        .map(|&x| p.tensors[x as usize].bytes())
        .sum::<Bytes>()
        + group.iter().map(|&t| p.resident[t as usize]).sum()
        + constants.sum()
        + p.scratch[task]
}

/// The task during which most is live in every order: all results that an ancestor or the task has
/// made and a descendant or the task still needs, beside resident bytes.
fn most_live(p: &Problem) -> Option<(u32, Bytes)> {
    let resident: Bytes = p.resident.iter().copied().sum();
    let mut used = vec![false; p.constants.len()];
    (0..p.n_tasks())
        .flat_map(|t| p.constants_of.row(t))
        .for_each(|&c| used[c as usize] = true);
    let constants: Bytes = p
        .constants
        .iter()
        .zip(&used)
        .filter(|c| *c.1)
        .map(|c| *c.0)
        .sum();
    let live = |t: usize| -> Bytes {
        let before = reached(p, t, |p, t, f| p.predecessors(t).for_each(f));
        let after = reached(p, t, |p, t, f| p.successors(t).for_each(f));
        let needed = |x: &usize| {
            before[p.tensors[*x].producer as usize]
                && (p.tensors[*x].producer as usize == t
                    || p.consumers.row(*x).iter().any(|&c| after[c as usize]))
        };
        (0..p.tensors.len())
            .filter(needed)
            .map(|x| p.tensors[x].bytes())
            .sum::<Bytes>()
            + p.scratch[t]
    };
    let lives = (0..p.n_tasks())
        .filter(|&t| p.least_cost(t) > Nanos::ZERO)
        .map(|t| (live(t), t as u32));
    lives
        .max_by_key(|l| (l.0, std::cmp::Reverse(l.1)))
        .map(|(bytes, t)| (t, bytes + resident + constants))
}

/// Tasks that are reached from one, itself included.
fn reached(
    p: &Problem,
    task: usize,
    next: impl Fn(&Problem, usize, &mut dyn FnMut(u32)),
) -> Vec<bool> {
    let mut is_reached = vec![false; p.n_tasks()];
    let mut stack = vec![task as u32];
    is_reached[task] = true;
    while let Some(t) = stack.pop() {
        next(p, t as usize, &mut |n| {
            if !is_reached[n as usize] {
                is_reached[n as usize] = true;
                stack.push(n);
            }
        });
    }
    is_reached
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::check;
    use crate::rng::Rng;
    use crate::samples::{Shape, random};
    use crate::schedule::algorithms;
    use crate::schedule::list::Insertion;
    use crate::search::slices;

    fn shape(rng: &mut Rng, n_tasks: usize, memory: Option<u64>) -> Shape {
        let constrained = rng.one_in(2);
        Shape {
            memory,
            constrained,
            ..Shape::small(2 + rng.below(n_tasks), 1 + rng.below(3))
        }
    }

    #[test]
    fn schedules_are_valid_whatever_the_memory() {
        let mut rng = Rng(3);
        let mut n_sliced = 0;
        for _ in 0..300 {
            let memory = Some(5 + rng.number(60));
            let shape = shape(&mut rng, 14, memory);
            let p = random(&mut rng, shape);
            let sliced = slices::place(&p);
            let listed = algorithms::heft(&p, Insertion::Gaps);
            let fitted = schedule(&p, &listed.device, &least_live(&p));
            n_sliced += usize::from(sliced.is_some());
            for timeline in [Some(listed), Some(fitted), sliced].into_iter().flatten() {
                assert_eq!(check(&p, &timeline), Vec::<String>::new());
            }
        }
        assert!(n_sliced > 100, "{n_sliced} problems were sliced");
    }

    #[test]
    fn orders_are_topological() {
        let mut rng = Rng(4);
        for _ in 0..100 {
            let shape = shape(&mut rng, 14, None);
            let p = random(&mut rng, shape);
            for order in [depth_first(&p), least_live(&p)] {
                let mut place = vec![usize::MAX; p.n_tasks()];
                order
                    .iter()
                    .enumerate()
                    .for_each(|(i, &t)| place[t as usize] = i);
                assert!(place.iter().all(|&i| i != usize::MAX));
                assert!(
                    (0..p.n_tasks())
                        .all(|t| p.predecessors(t).all(|q| place[q as usize] < place[t]))
                );
            }
        }
    }

    #[test]
    fn what_is_proven_unfit_has_no_fitting_schedule() {
        let mut rng = Rng(5);
        let (mut n_unfit, mut n_fit) = (0, 0);
        for _ in 0..200 {
            let memory = Some(4 + rng.number(30));
            let shape = shape(&mut rng, 4, memory);
            let p = random(&mut rng, shape);
            let fits = any_fits(&p);
            let proof = unfit(&p);
            assert!(!(fits && proof.is_some()), "{proof:?} but a schedule fits");
            n_unfit += usize::from(proof.is_some());
            n_fit += usize::from(fits);
        }
        assert!(
            n_unfit > 20 && n_fit > 20,
            "{n_unfit} proofs, {n_fit} fitting schedules"
        );
    }

    /// Whether one of all placements and task orders fits, scheduled as here.
    fn any_fits(p: &Problem) -> bool {
        let n = p.n_devices().pow(p.n_tasks() as u32);
        let digit =
            |code: usize, t: usize| (code / p.n_devices().pow(t as u32) % p.n_devices()) as u32;
        let placements = (0..n).map(|code| {
            (0..p.n_tasks())
                .map(|t| digit(code, t))
                .collect::<Vec<u32>>()
        });
        let feasible = |d: &Vec<u32>| {
            let is_whole = |t: usize| {
                p.members
                    .row(p.group_of[t] as usize)
                    .iter()
                    .all(|&m| d[m as usize] == d[t])
            };
            (0..p.n_tasks()).all(|t| p.cost(t, d[t] as usize).is_finite() && is_whole(t))
        };
        let orders = [depth_first(p), least_live(p), p.order.clone()];
        placements.filter(feasible).any(|d| {
            orders
                .iter()
                .any(|o| excess(p, &schedule(p, &d, o)) == Bytes::ZERO)
        })
    }
}
