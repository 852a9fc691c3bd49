//! List scheduling in its classic forms. Each gives a whole timeline.

use crate::Nanos;
use crate::problem::Problem;
use crate::schedule::list::{Insertion, List};
use crate::schedule::ranks;
use crate::schedule::timeline::Timeline;
use std::cmp::Reverse;
use std::collections::BTreeSet;

/// Everything on `device`; groups that may not run there go to the first device where they may.
pub fn single(p: &Problem, device: usize) -> Vec<u32> {
    let home = |t: usize| {
        if p.cost(t, device).is_finite() {
            device
        } else {
            p.first_device(t)
        }
    };
    (0..p.n_tasks()).map(|t| home(t) as u32).collect()
}

/// TensorFlow's simple placer: the first device of `preference`; a task that only moves data stays
/// with its operand; a task without operands whose consumers are all on one device joins them.
pub fn simple(p: &Problem, preference: &[usize]) -> Vec<u32> {
    let mut device = vec![u32::MAX; p.n_tasks()];
    let mut of_group: Vec<Option<u32>> = vec![None; p.n_groups()];
    for &t in &p.order {
        let t = t as usize;
        let group = p.group_of[t] as usize;
        let operand = p
            .predecessors(t)
            .next()
            .filter(|_| p.is_view[t])
            .map(|q| device[q as usize]);
        let with_operand = operand.filter(|&d| p.cost(t, d as usize).is_finite());
        let preferred = || {
            preference
                .iter()
                .copied()
                .find(|&d| p.cost(t, d).is_finite())
        };
        let chosen = of_group[group]
            .or(with_operand)
            .or_else(|| preferred().map(|d| d as u32));
        device[t] = chosen.unwrap_or_else(|| p.first_device(t) as u32);
        of_group[group] = Some(device[t]);
    }
    for t in 0..p.n_tasks() {
        let mut homes = p.successors(t).map(|c| device[c as usize]);
        let alone = p.members.row(p.group_of[t] as usize).len() == 1;
        let is_source = p.inputs.row(t).is_empty() && p.outputs.row(t).len() == 1 && alone;
        if let Some(home) = homes
            .next()
            .filter(|&h| is_source && p.cost(t, h as usize).is_finite())
            && homes.all(|h| h == home)
        {
            device[t] = home;
        }
    }
    device
}

/// Fills devices one after another in topological order, each until its constants and the largest
/// working set so far (operands and results of a task) take `percent` of its memory limit (m-TOPO
/// of Baechi, arXiv:2301.08695). Finds a split when no single device can hold all.
pub fn fill(p: &Problem, percent: u128) -> Vec<u32> {
    let mut filling = Filling::new(p, percent);
    let mut current = 0;
    let mut device = vec![0u32; p.n_tasks()];
    for &t in &p.order {
        let t = t as usize;
        let has_room = |d: &usize| p.cost(t, *d).is_finite() && filling.has_room(t, *d);
        let next = (current..p.n_devices()).find(has_room);
        let group = p.group_of[t] as usize;
        let of_group = filling.of_group[group].map(|d| d as usize);
        let chosen = of_group.or(next).unwrap_or_else(|| p.first_device(t));
        filling.put(t, chosen);
        current = next.unwrap_or(current);
        device[t] = chosen as u32;
    }
    device
}

/// Devices that are filled.
struct Filling<'p> {
    p: &'p Problem,
    percent: u128,
    /// Constants of each device, and its largest working set, in bytes.
    held: Vec<(u128, u128)>,
    /// Devices and their shared constants.
    copied: BTreeSet<(usize, u32)>,
    /// Devices of groups.
    of_group: Vec<Option<u32>>,
}

impl<'p> Filling<'p> {
    fn new(p: &'p Problem, percent: u128) -> Filling<'p> {
        Filling {
            p,
            percent,
            held: vec![(0, 0); p.n_devices()],
            copied: BTreeSet::new(),
            of_group: vec![None; p.n_groups()],
        }
    }

    /// Constants and largest working set of a device with a task.
    fn with(&self, t: usize, device: usize) -> (u128, u128) {
        let (p, group) = (self.p, self.p.group_of[t] as usize);
        let bytes = |x: &u32| u128::from(p.tensors[*x as usize].bytes().0);
        let tensors = p.inputs.row(t).iter().chain(p.outputs.row(t));
        let working = tensors.map(bytes).sum::<u128>() + u128::from(p.scratch[t].0);
        let own: &[u32] = match self.of_group[group] {
            None => p.members.row(group),
            Some(_) => &[],
        };
        let resident = own.iter().map(|&m| u128::from(p.resident[m as usize].0));
        let is_new = |c: &&u32| !self.copied.contains(&(device, **c));
        let new = p.constants_of.row(t).iter().filter(is_new);
        let new = new.map(|&c| u128::from(p.constants[c as usize].0));
        let (constants, largest) = self.held[device];
        (
            constants + resident.sum::<u128>() + new.sum::<u128>(),
            largest.max(working),
        )
    }

    fn has_room(&self, t: usize, device: usize) -> bool {
        let Some(limit) = self.p.devices[device].memory else {
            return true;
        };
        let (constants, working) = self.with(t, device);
        (constants + working) * 100 <= u128::from(limit.0) * self.percent
    }

    fn put(&mut self, t: usize, device: usize) {
        self.held[device] = self.with(t, device);
        let constants = self.p.constants_of.row(t).iter();
        self.copied.extend(constants.map(|&c| (device, c)));
        self.of_group[self.p.group_of[t] as usize] = Some(device as u32);
    }
}

/// The greedy simulation of the TensorFlow white paper (Abadi et al. 2015, 3.2.1): tasks in the
/// order in which they become ready, each to the device where it finishes soonest, after all that
/// is there.
pub fn greedy(p: &Problem) -> Timeline {
    let mut list = List::new(p, Insertion::Append);
    let mut waiting: Vec<u32> = (0..p.n_tasks())
        .map(|t| p.inputs.row(t).len() as u32)
        .collect();
    let mut position = vec![0u32; p.n_tasks()];
    p.order
        .iter()
        .enumerate()
        .for_each(|(i, &t)| position[t as usize] = i as u32);
    let mut ready: BTreeSet<(Nanos, u32, u32)> = BTreeSet::new();
    ready.extend(
        p.order
            .iter()
            .filter(|&&t| waiting[t as usize] == 0)
            .map(|&t| (Nanos::ZERO, position[t as usize], t)),
    );
    let mut room = Vec::new();
    while let Some((_, _, t)) = ready.pop_first() {
        let device = list.soonest(t as usize, 1, |_| 0, &mut room);
        list.commit(t as usize, device);
        for c in p.successors(t as usize) {
            waiting[c as usize] -= 1;
            if waiting[c as usize] == 0 {
                let when = p
                    .predecessors(c as usize)
                    .map(|q| list.end(q as usize))
                    .max()
                    .unwrap_or_default();
                ready.insert((when, position[c as usize], c));
            }
        }
    }
    list.timeline()
}

/// HEFT (Topcuoglu, Hariri and Wu 2002): tasks by falling upward rank, each to the device where it
/// finishes earliest.
pub fn heft(p: &Problem, insertion: Insertion) -> Timeline {
    let ranks = ranks::upward(p);
    in_order(p, &by_tail(p, &ranks), insertion, 1, |_, _| 0)
}

/// HEFT that lets groups vote: each task first goes where it would finish soonest, whatever its
/// group; then each group goes where its tasks spend most of their time. Of use where a group has
/// members far apart, as the two passes of a training step have.
pub fn heft_by_vote(p: &Problem) -> Vec<u32> {
    let mut list = List::new(p, Insertion::Gaps).ignore_groups();
    let mut room = Vec::new();
    for t in by_tail(p, &ranks::upward(p)) {
        let device = list.soonest(t as usize, 1, |_| 0, &mut room);
        list.commit(t as usize, device);
    }
    let wish = list.timeline().device;
    let mut device = vec![0u32; p.n_tasks()];
    // Time, then number of tasks.
    let mut votes = vec![(Nanos::ZERO, 0u32); p.n_devices()];
    for group in 0..p.n_groups() {
        votes.fill((Nanos::ZERO, 0));
        let members = p.members.row(group);
        for &t in members {
            let d = wish[t as usize] as usize;
            votes[d] = (votes[d].0 + p.cost(t as usize, d), votes[d].1 + 1);
        }
        let most = (0..p.n_devices())
            .max_by_key(|&d| (votes[d], Reverse(d)))
            .unwrap_or(0);
        members
            .iter()
            .for_each(|&t| device[t as usize] = most as u32);
    }
    device
}

/// Tasks by falling tail; those of equal tail in topological order.
pub fn by_tail(p: &Problem, tails: &[u128]) -> Vec<u32> {
    let mut order: Vec<u32> = p.order.clone();
    order.sort_by_key(|&t| Reverse(tails[t as usize]));
    order
}

/// HEFT that looks ahead: adds to the end on a device the optimistic cost table of PEFT (Arabnejad
/// and Barbosa 2014, eq. 3): the least time from there to the end of all, every later task where it
/// is fastest.
pub fn peft(p: &Problem) -> Timeline {
    let means = ranks::Means::new(p);
    let table = optimistic_costs(p, &means);
    let n = p.n_devices();
    let look = |t: usize, d: usize| table[t * n + d];
    in_order(
        p,
        &by_tail(p, &ranks::upward(p)),
        Insertion::Gaps,
        means.per_ns,
        look,
    )
}

/// For each task and device the longest path to the end when each later task is where that way is
/// shortest, in the fractions of the means.
fn optimistic_costs(p: &Problem, means: &ranks::Means) -> Vec<u128> {
    let n = p.n_devices();
    let mean = means.transfers();
    let mut table = vec![0; p.n_tasks() * n];
    let mut on = vec![0; n];
    for &t in p.order.iter().rev() {
        let t = t as usize;
        for &x in p.outputs.row(t) {
            for &c in p.consumers.row(x as usize) {
                let c = c as usize;
                (0..n).for_each(|d| {
                    on[d] = u128::from(p.cost(c, d).0) * means.per_ns + table[c * n + d]
                });
                let anywhere = on.iter().copied().min().unwrap_or_default() + mean[x as usize];
                (0..n).for_each(|d| table[t * n + d] = table[t * n + d].max(on[d].min(anywhere)));
            }
        }
    }
    table
}

/// Tasks in the given order, each to the open device with the least end plus `look`, which has
/// `per_ns` parts in a nanosecond.
fn in_order(
    p: &Problem,
    order: &[u32],
    insertion: Insertion,
    per_ns: u128,
    look: impl Fn(usize, usize) -> u128,
) -> Timeline {
    let mut list = List::new(p, insertion);
    let mut room = Vec::new();
    for &t in order {
        let device = list.soonest(t as usize, per_ns, |d| look(t as usize, d), &mut room);
        list.commit(t as usize, device);
    }
    list.timeline()
}

/// Ready tasks that ETF looks at in one step.
const ETF_WINDOW: usize = 48;

/// ETF (Hwang et al. 1989): of all pairs of a ready task and a device the one that can start
/// earliest; ties to the longer upward rank. Of more ready tasks than [`ETF_WINDOW`] only those of
/// longest rank are looked at.
pub fn etf(p: &Problem) -> Timeline {
    let ranks = ranks::upward(p);
    let mut list = List::new(p, Insertion::Append);
    let mut waiting: Vec<u32> = (0..p.n_tasks())
        .map(|t| p.inputs.row(t).len() as u32)
        .collect();
    let mut ready: BTreeSet<(Reverse<u128>, u32)> = BTreeSet::new();
    ready.extend(
        (0..p.n_tasks())
            .filter(|&t| waiting[t] == 0)
            .map(|t| (Reverse(ranks[t]), t as u32)),
    );
    while !ready.is_empty() {
        let pairs = ready.iter().take(ETF_WINDOW).flat_map(|&(rank, t)| {
            let list = &list;
            list.open(t as usize).map(move |d| {
                let slot = list.slot(t as usize, d);
                (list.excess(t as usize, d), slot.start, rank, slot.end, t, d)
            })
        });
        let Some((_, _, rank, _, t, d)) = pairs.min() else {
            break;
        };
        ready.remove(&(rank, t));
        list.commit(t as usize, d);
        for c in p.successors(t as usize) {
            waiting[c as usize] -= 1;
            if waiting[c as usize] == 0 {
                ready.insert((Reverse(ranks[c as usize]), c));
            }
        }
    }
    list.timeline()
}
