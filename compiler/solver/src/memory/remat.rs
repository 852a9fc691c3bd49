//! Rematerialisation: cheap tasks run again where their results are needed, instead of sending
//! them; others run again late, instead of holding their results for long. And offloading: tensors
//! are sent to another device for as long as theirs has no room for them, and back. Every copy is
//! judged by the schedule of the whole problem.
//!
//! Answers to bare problems have every task once; copies are for models, whose graph can have a
//! node twice.

use crate::memory::repair::{self, Key};
use crate::problem::{Parts, Problem, Task};
use crate::schedule::previous::{Starting, replay};
use crate::schedule::ranks;
use crate::schedule::timeline::Timeline;
use crate::search::portfolio;
use crate::{Bytes, LinkOrder, LinkProfile, Nanos, simulate};
use std::collections::{BTreeMap, BTreeSet};

/// Rematerialisation and offloading that are allowed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Freedom {
    /// By task: its only effect is its results, so it may run again. Tasks beyond the end may not.
    pub may_copy: Vec<bool>,
    /// By task: its results are held whether or not anybody waits for them, as a variable is, and are not
    /// offloaded. Results of tasks beyond the end may be.
    pub is_held: Vec<bool>,
    /// By device: how it keeps tensors of others for a while, if it does: the time to take one and
    /// give it on. Nothing is offloaded that such a device has itself. Devices beyond the end keep
    /// none.
    pub parking: Vec<Option<LinkProfile>>,
}

impl Freedom {
    /// The link to a device that keeps offloaded tensors of others, if it does.
    pub fn parking(&self, device: usize) -> Option<LinkProfile> {
        self.parking.get(device).copied().flatten()
    }

    /// For these devices alone, numbered in this order.
    pub fn only(&self, devices: &[usize]) -> Freedom {
        Freedom {
            may_copy: self.may_copy.clone(),
            is_held: self.is_held.clone(),
            parking: devices.iter().map(|&d| self.parking(d)).collect(),
        }
    }

    fn is_none(&self) -> bool {
        !self.may_copy.contains(&true) && self.parking.iter().all(Option::is_none)
    }
}

/// A second run of a task, or a tensor of it that is offloaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Copy {
    /// The task that runs again, or the one that makes the offloaded tensor.
    pub task: u32,
    /// The tensor that is offloaded; none for a second run.
    pub parked: Option<u32>,
    /// Where.
    pub device: u32,
    /// Tasks that take its results instead of those of the task itself; a copy is the task of its
    /// place behind all tasks of the problem.
    pub users: Vec<u32>,
}

/// A problem with copies, solved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Copied {
    /// The copies; the `i`-th is task `n + i` of the problem, if there were `n`.
    pub copies: Vec<Copy>,
    /// The problem with them.
    pub problem: Problem,
    /// Its schedule.
    pub timeline: Timeline,
}

/// The problem with copies. A copy can run on its device only, and takes the operands of its task,
/// or the tensor that it parks. Copies that use others come before these.
fn with_copies(p: &Problem, copies: &[Copy], freedom: &Freedom) -> Option<Problem> {
    let mut parts = p.parts();
    for copy in copies {
        match copy.parked {
            None => add_copy(&mut parts, copy),
            Some(tensor) => add_parked(
                &mut parts,
                copy,
                tensor,
                freedom.parking(copy.device as usize)?,
            ),
        }
    }
    Problem::new(parts).ok()
}

fn add_parked(parts: &mut Parts, copy: &Copy, tensor: u32, parking: LinkProfile) {
    let new = parts.tasks.len() as u32;
    let (parked, consumers) = &mut parts.tensors[tensor as usize];
    let (mine, mut rest): (Vec<u32>, Vec<u32>) =
        consumers.iter().partition(|c| copy.users.contains(c));
    rest.push(new);
    *consumers = rest;
    let (back, time) = (
        crate::Tensor {
            producer: new,
            ..*parked
        },
        parking.transfer(parked.bytes()),
    );
    parts.tensors.push((back, mine));
    let mut cost = vec![Nanos::INFINITY; parts.devices.len()];
    cost[copy.device as usize] = time;
    parts.tasks.push(Task {
        cost,
        ..Task::default()
    });
}

fn add_copy(parts: &mut Parts, copy: &Copy) {
    let new = parts.tasks.len() as u32;
    let original = &parts.tasks[copy.task as usize];
    let open = |(d, cost): (usize, &Nanos)| {
        if d == copy.device as usize {
            *cost
        } else {
            Nanos::INFINITY
        }
    };
    let cost = original.cost.iter().enumerate().map(open).collect();
    let task = Task {
        cost,
        group: None,
        ..original.clone()
    };
    parts.tasks.push(task);
    let mut made = Vec::new();
    for (tensor, consumers) in &mut parts.tensors {
        if consumers.contains(&copy.task) && !consumers.contains(&new) {
            consumers.push(new);
        }
        if tensor.producer == copy.task {
            let (mine, rest): (Vec<u32>, Vec<u32>) =
                consumers.iter().partition(|c| copy.users.contains(c));
            *consumers = rest;
            made.push((
                crate::Tensor {
                    producer: new,
                    ..*tensor
                },
                mine,
            ));
        }
    }
    parts.tensors.extend(made);
}

/// Order of schedules: bytes over the limits, time, bytes moved.
type Score = (Key, Bytes);

fn score(p: &Problem, t: &Timeline) -> Score {
    (repair::key(p, t), t.bytes_moved(p))
}

struct Search<'p> {
    p: &'p Problem,
    freedom: &'p Freedom,
    best: Copied,
    score: Score,
    /// Tasks that may still be simulated.
    left: i64,
}

/// Ancestors that are copied together with a task.
const MOST_DEEP: usize = 3;

/// Runs tasks again on devices that wait for their results, where the task and its missing operands
/// take less time there than the transfers, and the makespan falls, or stays with fewer bytes
/// moved.
///
/// `tasks` is how many may be simulated. Nothing when no copy helps.
pub fn replicate(p: &Problem, start: &Timeline, freedom: &Freedom, tasks: u64) -> Option<Copied> {
    let mut search = Search::new(p, start, freedom, tasks);
    let mut tried: BTreeSet<(u32, u32)> = BTreeSet::new();
    while search.left > 0 {
        let cheap = search.cheap();
        let Some(&(_, task, device)) = cheap.iter().find(|c| !tried.contains(&(c.1, c.2))) else {
            break;
        };
        tried.insert((task, device));
        let copies = search.copied_to(task, device);
        search.attempt(copies, Ways::Any);
    }
    (!search.best.copies.is_empty()).then_some(search.best)
}

/// Runs tasks again shortly before their late uses, or parks their results until then, so that
/// these need not be held: victims with the most bytes held for the longest time, by time to
/// compute, or to send there and back, come first. Nothing when the limits are not kept in the end
/// either.
///
/// `tasks` as for [`replicate`].
pub fn make_room(p: &Problem, start: &Timeline, freedom: &Freedom, tasks: u64) -> Option<Copied> {
    if freedom.is_none() {
        return None;
    }
    let mut search = Search::new(p, start, freedom, tasks);
    let mut tried: Vec<Copy> = Vec::new();
    while search.left > 0 && search.score.0.0 > Bytes::ZERO {
        let Some(victim) = search.victims().into_iter().find(|c| !tried.contains(c)) else {
            break;
        };
        tried.push(victim.clone());
        search.attempt(vec![victim], Ways::Late);
    }
    (search.score.0.0 == Bytes::ZERO).then_some(search.best)
}

/// The best schedule that is found with these copies, tasks and copies on the devices of `start`
/// and of the copies; nothing if they make no problem.
pub fn replay_copies(
    p: &Problem,
    start: &Timeline,
    freedom: &Freedom,
    copies: Vec<Copy>,
) -> Option<Copied> {
    let search = Search::new(p, start, freedom, 0);
    let problem = with_copies(p, &copies, freedom)?;
    let mut trials = search.schedules(&problem, &copies);
    trials.push(search.late(&problem, &copies));
    let mut fixed = problem.clone();
    (0..p.n_tasks()).for_each(|t| fixed.restrict(t, |d| d == start.device[t] as usize));
    let options = portfolio::Options {
        bound_nodes: 0,
        search_nodes: 0,
        refine_tasks: 0,
        ..portfolio::Options::new(&fixed)
    };
    trials.extend(
        portfolio::solve(&fixed, &options, &portfolio::Algorithm::name).map(|s| s.timeline),
    );
    let timeline = trials.into_iter().min_by_key(|t| score(&problem, t))?;
    Some(Copied {
        copies,
        problem,
        timeline,
    })
}

/// The scheduler of a trial.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ways {
    /// For time: the order that there is, with copies early or late, or anew.
    Any,
    /// For memory: each task as soon as it fits, copies right before their users.
    Late,
}

impl<'p> Search<'p> {
    fn new(p: &'p Problem, start: &Timeline, freedom: &'p Freedom, tasks: u64) -> Search<'p> {
        let best = Copied {
            copies: Vec::new(),
            problem: p.clone(),
            timeline: start.clone(),
        };
        Search {
            p,
            freedom,
            score: score(p, start),
            best,
            left: i64::try_from(tasks).unwrap_or(i64::MAX),
        }
    }

    /// Takes copies beside those that there are, if the whole gets better.
    fn attempt(&mut self, more: Vec<Copy>, ways: Ways) {
        let mut copies = self.best.copies.clone();
        copies.extend(more);
        self.left -= 3 * (self.p.n_tasks() + copies.len()) as i64;
        let Some(problem) = with_copies(self.p, &copies, self.freedom) else {
            return;
        };
        let trials = match ways {
            Ways::Any => self.schedules(&problem, &copies),
            Ways::Late => vec![self.late(&problem, &copies)],
        };
        let scored = trials.into_iter().map(|t| (score(&problem, &t), t));
        let Some((score, timeline)) = scored.min_by_key(|s| s.0) else {
            return;
        };
        if score < self.score {
            // Copies of the consumers of a copy take its results too.
            for (i, copy) in copies.iter_mut().enumerate() {
                copy.users = problem.successors(self.p.n_tasks() + i).collect();
                copy.users.sort_unstable();
                copy.users.dedup();
            }
            self.score = score;
            self.best = Copied {
                copies,
                problem,
                timeline,
            };
        }
    }

    /// The timeline that there is, with copies that begin at the given times; new ones have no
    /// length yet.
    fn extended(&self, copies: &[Copy], start: impl Fn(&Copy) -> Nanos) -> Timeline {
        let mut t = self.best.timeline.clone();
        for copy in &copies[self.best.copies.len()..] {
            let start = start(copy);
            t.device.push(copy.device);
            t.start.push(start);
            t.end.push(start);
        }
        t
    }

    /// When the first user of a copy starts, as things are; users that are copies themselves start
    /// with theirs.
    fn first_use(&self, copies: &[Copy], copy: &Copy) -> Nanos {
        let known = self.best.timeline.start.len();
        let start = |&u: &u32| match (u as usize) < known {
            true => self.best.timeline.start[u as usize],
            false => self.first_use(copies, &copies[u as usize - self.p.n_tasks()]),
        };
        copy.users.iter().map(start).min().unwrap_or_default()
    }

    fn schedules(&self, problem: &Problem, copies: &[Copy]) -> Vec<Timeline> {
        let early = self.extended(copies, |_| Nanos::ZERO);
        let late = self.extended(copies, |c| self.first_use(copies, c));
        let mut order: Vec<u32> = problem.order.clone();
        order.sort_by_key(|&t| (late.start[t as usize], late.end[t as usize]));
        let anew = simulate(
            problem,
            &late.device,
            &ranks::keys_of_order(&order),
            LinkOrder::Urgent,
        );
        let again = [&early, &late]
            .into_iter()
            .filter_map(|t| replay(problem, t, Starting::AtOnce));
        again.chain([anew]).collect()
    }

    fn late(&self, problem: &Problem, copies: &[Copy]) -> Timeline {
        // An offloaded tensor is sent as soon as it is made, before the tasks that need its room.
        let is_parked = |t: u32| {
            copies
                .get((t as usize).wrapping_sub(self.p.n_tasks()))
                .is_some_and(|c| c.parked.is_some())
        };
        let made = |c: &Copy| self.best.timeline.end[c.task as usize];
        let late = self.extended(copies, |c| {
            if c.parked.is_some() {
                made(c)
            } else {
                self.first_use(copies, c)
            }
        });
        let mut order: Vec<u32> = problem.order.clone();
        // The sort is stable: tasks with the same start stay in topological order.
        order.sort_by_key(|&t| (late.start[t as usize], !is_parked(t)));
        let order = crate::search::pipeline::topological(problem, &order);
        repair::schedule(problem, &late.device, &order)
    }

    /// Tasks whose results cross to a device in more time than they need there: time gained, task,
    /// device.
    fn cheap(&self) -> Vec<(Nanos, u32, u32)> {
        let (p, t) = (&self.best.problem, &self.best.timeline);
        let mut crossing: BTreeMap<(u32, u32), Nanos> = BTreeMap::new();
        for x in &t.transfers {
            let entry = crossing
                .entry((p.tensors[x.tensor as usize].producer, x.to))
                .or_default();
            *entry += x.end.saturating_sub(x.start);
        }
        let gain = |(&(task, to), &comm): (&(u32, u32), &Nanos)| {
            let need = self.need(task, to, 0)?;
            (need < comm).then(|| (comm.saturating_sub(need), task, to))
        };
        let mut cheap: Vec<(Nanos, u32, u32)> = crossing.iter().filter_map(gain).collect();
        cheap.sort_by_key(|c| (std::cmp::Reverse(c.0), c.1, c.2));
        cheap
    }

    fn is_copyable(&self, task: u32) -> bool {
        self.freedom
            .may_copy
            .get(task as usize)
            .copied()
            .unwrap_or(false)
    }

    /// True if a tensor is on a device without a copy.
    fn is_there(&self, x: u32, device: u32) -> bool {
        let (p, t) = (&self.best.problem, &self.best.timeline);
        t.device[p.tensors[x as usize].producer as usize] == device
            || t.transfers.iter().any(|s| s.tensor == x && s.to == device)
    }

    /// Time to have the results of a task on a device by running it there, with its missing
    /// operands; `None` if it cannot run there.
    fn need(&self, task: u32, device: u32, depth: usize) -> Option<Nanos> {
        if !self.is_copyable(task) {
            return None;
        }
        let (p, cost) = (
            &self.best.problem,
            self.p.cost(task as usize, device as usize),
        );
        let missing = p
            .inputs
            .row(task as usize)
            .iter()
            .filter(|&&x| !self.is_there(x, device));
        cost.is_finite()
            .then(|| cost + missing.map(|&x| self.bring(x, device, depth).0).sum())
    }

    /// Time to have a tensor on a device, sent or made there; and whether made.
    fn bring(&self, x: u32, device: u32, depth: usize) -> (Nanos, bool) {
        let (p, t) = (&self.best.problem, &self.best.timeline);
        let producer = p.tensors[x as usize].producer;
        let sent = p.transfer(
            x as usize,
            t.device[producer as usize] as usize,
            device as usize,
        );
        let made = if depth < MOST_DEEP {
            self.need(producer, device, depth + 1)
        } else {
            None
        };
        made.filter(|m| *m < sent)
            .map_or((sent, false), |m| (m, true))
    }

    /// The copy of a task on a device for all its consumers there, and of ancestors that are sooner
    /// made there than sent.
    fn copied_to(&self, task: u32, device: u32) -> Vec<Copy> {
        let t = &self.best.timeline;
        let here = self
            .best
            .problem
            .successors(task as usize)
            .filter(|&c| t.device[c as usize] == device);
        let mut users: Vec<u32> = here.collect();
        users.sort_unstable();
        users.dedup();
        let mut copies = vec![Copy {
            task,
            parked: None,
            device,
            users,
        }];
        let mut next = 0;
        while next < copies.len() && next <= MOST_DEEP {
            let user = (self.p.n_tasks() + self.best.copies.len() + next) as u32;
            for &x in self.best.problem.inputs.row(copies[next].task as usize) {
                let producer = self.best.problem.tensors[x as usize].producer;
                if self.is_there(x, device) || !self.bring(x, device, next + 1).1 {
                    continue;
                }
                match copies.iter_mut().find(|c| c.task == producer) {
                    Some(known) if !known.users.contains(&user) => known.users.push(user),
                    Some(_) => {}
                    None => copies.push(Copy {
                        task: producer,
                        parked: None,
                        device,
                        users: vec![user],
                    }),
                }
            }
            next += 1;
        }
        copies
    }

    /// Copies that would shorten how long something is held over the peak of a device that is over
    /// its limit, best first.
    fn victims(&self) -> Vec<Copy> {
        let mut victims: Vec<(u128, Copy)> = Vec::new();
        for (d, at) in peaks_over(&self.best.problem, &self.best.timeline) {
            for x in 0..self.best.problem.tensors.len() {
                victims.extend(self.shorter(x, d, at));
            }
        }
        victims.sort_by(|a, b| {
            b.0.cmp(&a.0)
                .then_with(|| (a.1.task, a.1.device).cmp(&(b.1.task, b.1.device)))
        });
        victims.into_iter().map(|v| v.1).collect()
    }

    /// Copies for the consumers of a tensor on a device that start after a time, at which the
    /// tensor is held there: with the bytes and the time that they save for each ns they cost.
    fn shorter(&self, x: usize, d: u32, at: Nanos) -> Vec<(u128, Copy)> {
        let (p, t) = (&self.best.problem, &self.best.timeline);
        let task = p.tensors[x].producer;
        if t.device[task as usize] != d || t.end[task as usize] > at {
            return Vec::new();
        }
        let is_late = |c: &u32| t.device[*c as usize] == d && t.start[*c as usize] > at;
        let consumers = p.consumers.row(x).iter().copied();
        let users: Vec<u32> = consumers.filter(is_late).collect();
        let Some(until) = users.iter().map(|&c| t.end[c as usize]).max() else {
            return Vec::new();
        };
        let held = until.saturating_sub(t.end[task as usize]);
        let saved = u128::from(p.tensors[x].bytes().0) * u128::from(held.0);
        let worth = |time: Nanos| saved / u128::from(time.0.max(1));
        let copy = |device: u32, parked: Option<u32>| Copy {
            task,
            parked,
            device,
            users: users.clone(),
        };
        let mut copies = Vec::new();
        if self.is_copyable(task) {
            let cost = p.cost(task as usize, d as usize);
            copies.push((worth(cost), copy(d, None)));
        }
        let is_held = self.freedom.is_held.get(task as usize) == Some(&true);
        let parks = self.parks(x, d).filter(|_| !is_held);
        copies.extend(parks.map(|(host, time)| (worth(time), copy(host, Some(x as u32)))));
        copies
    }

    /// Devices that can keep a tensor for `device`, and the time to send it there and back. Only
    /// tensors of the original problem are offloaded.
    fn parks(&self, x: usize, device: u32) -> impl Iterator<Item = (u32, Nanos)> {
        let (p, d) = (self.p, device as usize);
        let is_open = x < p.tensors.len()
            && p.tensors[x].bytes() > Bytes::ZERO
            && self.freedom.parking(d).is_none();
        let hosts = if is_open { 0..p.n_devices() } else { 0..0 };
        hosts.filter(move |&h| h != d).filter_map(move |h| {
            let parking = self.freedom.parking(h)?;
            let way = p.transfer(x, d, h) + p.transfer(x, h, d);
            Some((h as u32, way + parking.transfer(p.tensors[x].bytes())))
        })
    }
}

/// Devices over their limits, each with the time of its peak.
fn peaks_over(p: &Problem, t: &Timeline) -> Vec<(u32, Nanos)> {
    let peaks = t.peak_bytes(p);
    let resident = t.resident_bytes(p);
    let holds = t.holds(p);
    let over = (0..p.n_devices()).filter(|&d| p.devices[d].memory.is_some_and(|m| peaks[d] > m));
    let at = |d: usize| {
        let level = |at: Nanos| -> Bytes {
            let live = holds
                .iter()
                .filter(|h| h.0 as usize == d && h.1 <= at && at < h.2);
            resident[d] + live.map(|h| h.3).sum()
        };
        holds
            .iter()
            .filter(|h| h.0 as usize == d)
            .map(|h| h.1)
            .find(|&at| level(at) == peaks[d])
    };
    over.filter_map(|d| at(d).map(|at| (d as u32, at)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::check;
    use crate::rng::Rng;
    use crate::samples::{self, Shape};
    use crate::search::portfolio::{self, Algorithm, Options};
    use crate::{Device, LinkProfile, Links, Payload, Tensor};

    /// That a problem with copies is the old one with the copies, and its schedule one of it.
    fn expect_copies(p: &Problem, found: &Copied, what: &str) {
        assert_eq!(
            check(&found.problem, &found.timeline),
            Vec::<String>::new(),
            "{what}"
        );
        let n = p.n_tasks();
        assert_eq!(found.problem.n_tasks(), n + found.copies.len(), "{what}");
        assert!(
            (0..n).all(|t| found.problem.costs(t) == p.costs(t)),
            "{what}"
        );
        for (i, copy) in found.copies.iter().enumerate() {
            assert_eq!(found.timeline.device[n + i], copy.device, "{what}");
            let users: BTreeSet<u32> = found.problem.successors(n + i).collect();
            assert_eq!(
                users,
                copy.users.iter().copied().collect(),
                "{what}: users of copy {i}"
            );
        }
        // Every user has each operand once: from the task itself, or from one copy of it.
        let maker = |t: u32| {
            if (t as usize) < n {
                t
            } else {
                found.copies[t as usize - n].task
            }
        };
        for t in 0..found.problem.n_tasks() {
            let mut operands: Vec<u32> = found.problem.predecessors(t).map(maker).collect();
            let is_parked = t >= n && found.copies[t - n].parked.is_some();
            let task = maker(t as u32);
            let mut expected: Vec<u32> = if is_parked {
                vec![task]
            } else {
                p.predecessors(task as usize).collect()
            };
            operands.sort_unstable();
            expected.sort_unstable();
            assert_eq!(operands, expected, "{what}: task {t}");
        }
    }

    fn solved(p: &Problem) -> Timeline {
        let options = Options {
            refine_tasks: 500,
            bound_nodes: 0,
            search_nodes: 0,
            ..Options::new(p)
        };
        portfolio::solve(p, &options, &Algorithm::name)
            .expect("something is proposed")
            .timeline
    }

    #[test]
    fn replicas_make_schedules_better_and_stay_valid() {
        let mut n_copies = 0;
        for seed in 0..150 {
            let mut rng = Rng(seed);
            let shape = Shape {
                constrained: rng.one_in(2),
                ..Shape::any(&mut rng, 20, 4)
            };
            let p = samples::random(&mut rng, shape);
            let may_copy: Vec<bool> = (0..p.n_tasks())
                .map(|t| p.members.row(p.group_of[t] as usize).len() == 1 && rng.one_in(2))
                .collect();
            let freedom = Freedom {
                may_copy,
                is_held: Vec::new(),
                parking: Vec::new(),
            };
            let start = solved(&p);
            if repair::excess(&p, &start) > Bytes::ZERO {
                continue;
            }
            let Some(found) = replicate(&p, &start, &freedom, 20_000) else {
                continue;
            };
            expect_copies(&p, &found, &format!("seed {seed}"));
            assert!(
                score(&found.problem, &found.timeline) < score(&p, &start),
                "seed {seed}"
            );
            assert!(
                found
                    .copies
                    .iter()
                    .all(|c| freedom.may_copy[c.task as usize]),
                "seed {seed}"
            );
            n_copies += found.copies.len();
            assert_eq!(replicate(&p, &start, &freedom, 20_000), Some(found));
        }
        assert!(n_copies > 10, "only {n_copies} copies");
    }

    #[test]
    fn what_runs_again_keeps_limits_that_nothing_else_keeps() {
        let mut n_kept = 0;
        for seed in 0..400 {
            let mut rng = Rng(seed);
            let memory = Some(20 + rng.number(30));
            let shape = Shape {
                memory,
                ..Shape::small(6 + rng.below(12), 1 + rng.below(2))
            };
            let p = samples::random(&mut rng, shape);
            let start = solved(&p);
            if repair::excess(&p, &start) == Bytes::ZERO {
                continue;
            }
            let freedom = Freedom {
                may_copy: vec![true; p.n_tasks()],
                is_held: Vec::new(),
                parking: Vec::new(),
            };
            let Some(found) = make_room(&p, &start, &freedom, 20_000) else {
                continue;
            };
            expect_copies(&p, &found, &format!("seed {seed}"));
            assert_eq!(
                repair::excess(&found.problem, &found.timeline),
                Bytes::ZERO,
                "seed {seed}"
            );
            assert_eq!(make_room(&p, &start, &Freedom::default(), 20_000), None);
            n_kept += 1;
        }
        assert!(n_kept > 3, "only {n_kept} problems were made to fit");
    }

    /// What one device has no room for is kept by another on which no task can run.
    #[test]
    fn what_is_parked_keeps_limits_that_nothing_else_keeps() {
        let mut n_kept = 0;
        for seed in 0..400 {
            let mut rng = Rng(seed);
            let memory = Some(20 + rng.number(30));
            let shape = Shape {
                memory,
                ..Shape::small(6 + rng.below(12), 1)
            };
            let alone = samples::random(&mut rng, shape);
            let mut parts = alone.parts();
            parts.devices.push(Device {
                memory: None,
                is_host: true,
            });
            parts.links = Links::uniform(
                2,
                LinkProfile {
                    latency: Nanos(1),
                    bytes_per_second: 1_000_000_000,
                },
            );
            parts
                .tasks
                .iter_mut()
                .for_each(|t| t.cost.push(Nanos::INFINITY));
            let p = Problem::new(parts).unwrap();
            let start = solved(&p);
            if repair::excess(&p, &start) == Bytes::ZERO {
                continue;
            }
            let parking = vec![
                None,
                Some(LinkProfile {
                    latency: Nanos(1),
                    bytes_per_second: 1_000_000_000,
                }),
            ];
            let freedom = Freedom {
                may_copy: Vec::new(),
                is_held: (0..p.n_tasks()).map(|task| task % 4 == 0).collect(),
                parking,
            };
            let Some(found) = make_room(&p, &start, &freedom, 20_000) else {
                continue;
            };
            expect_copies(&p, &found, &format!("seed {seed}"));
            assert!(
                found
                    .copies
                    .iter()
                    .all(|c| c.parked.is_some() && c.device == 1 && c.task % 4 > 0),
                "seed {seed}"
            );
            assert_eq!(
                repair::excess(&found.problem, &found.timeline),
                Bytes::ZERO,
                "seed {seed}"
            );
            let again = replay_copies(&p, &start, &freedom, found.copies.clone()).unwrap();
            assert_eq!(
                check(&again.problem, &again.timeline),
                Vec::<String>::new(),
                "seed {seed}"
            );
            assert_eq!(
                repair::excess(&again.problem, &again.timeline),
                Bytes::ZERO,
                "seed {seed}"
            );
            n_kept += 1;
        }
        assert!(n_kept > 3, "only {n_kept} problems were made to fit");
    }

    /// A cheap task with a large result that two devices need, and an expensive one with a small
    /// result.
    #[test]
    fn a_large_result_is_made_where_it_is_needed() {
        let task = |cost: [u64; 2]| Task {
            cost: cost.map(Nanos).to_vec(),
            ..Task::default()
        };
        let only = |d: usize, ns: u64| {
            let mut task = task([ns; 2]);
            task.cost[1 - d] = Nanos::INFINITY;
            task
        };
        let tensor = |producer, bytes, to: Vec<u32>| {
            (
                Tensor {
                    producer,
                    payload: Payload::Bytes(Bytes(bytes)),
                },
                to,
            )
        };
        let p = Problem::new(Parts {
            devices: vec![
                Device {
                    memory: None,
                    is_host: false
                };
                2
            ],
            links: Links::uniform(
                2,
                LinkProfile {
                    latency: Nanos(5),
                    bytes_per_second: 1_000_000_000,
                },
            ),
            tasks: vec![task([10, 10]), task([200, 200]), only(0, 50), only(1, 50)],
            tensors: vec![tensor(0, 1_000, vec![2, 3]), tensor(1, 10, vec![2, 3])],
            constants: vec![],
        })
        .expect("four tasks");
        let start = solved(&p);
        let freedom = Freedom {
            may_copy: vec![true; 4],
            is_held: Vec::new(),
            parking: Vec::new(),
        };
        let found = replicate(&p, &start, &freedom, 1_000).expect("a copy helps");
        let copied: Vec<u32> = found.copies.iter().map(|c| c.task).collect();
        assert_eq!(copied, [0]);
        // The expensive one, its result on the way, and what needs it there.
        assert_eq!(found.timeline.makespan, Nanos(200 + 15 + 50));
    }
}
