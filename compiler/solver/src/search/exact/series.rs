//! Graphs that single tasks cut into blocks: one block after the other.
//!
//! A task that all others come before or after, and that no tensor passes by, cuts the schedule as
//! well as the graph: when it ends, all before it has ended, links are empty, and all devices wait.
//! So only its device joins the block before it with the block after it, and a table over (task,
//! device) puts the best schedules of the blocks together. Where nothing tells the devices apart
//! not even that matters: the devices of a block are renamed, and each block is solved once. If the
//! blocks are solved to proof, so is the whole.

use super::MOST_DEVICES;
use super::MOST_TASKS;
use super::Proof;
use super::assign;
use super::narrow;
use crate::problem::Problem;
use crate::schedule::list::Insertion;
use crate::schedule::timeline::{Timeline, Transfer};
use crate::schedule::{algorithms, simulate};
use crate::{Nanos, bounds};

/// Most devices, when something tells them apart, for which all pairs of the devices of two cuts
/// are solved.
const MOST_PAIRED: usize = 8;

/// Tasks of blocks too large for a search that may be scheduled for all pairs together.
const PAIRED_WORK: usize = 20_000;

/// Tasks of large blocks, for each pair of devices.
fn paired_work(p: &Problem, blocks: &[Block]) -> usize {
    let large = blocks
        .iter()
        .map(|b| b.tasks.len())
        .filter(|&n| n > MOST_TASKS)
        .sum::<usize>();
    large * p.n_devices() * p.n_devices()
}

/// A block: tasks in topological order, from the cut before it (if any) to the cut after it.
struct Block {
    has_start: bool,
    has_end: bool,
    tasks: Vec<u32>,
}

/// A schedule of a block alone, from the end of its start.
struct Solved {
    timeline: Timeline,
    bound: Nanos,
}

/// The best schedules of the blocks one after the other, with a lower bound. `budget` counts nodes
/// of search for all blocks.
///
/// `None` for a graph that nothing cuts, for more than [`MOST_PAIRED`] devices that differ, and
/// where memory limits forbid the result.
pub fn series(p: &Problem, budget: u64) -> Option<Proof> {
    let blocks = blocks(p);
    if blocks.len() < 2 {
        return None;
    }
    let alike = assign::twins(p).iter().all(|&d| d == 0);
    let proof = if alike {
        renamed(p, &blocks, budget)
    } else if p.n_devices() <= MOST_PAIRED && paired_work(p, &blocks) <= PAIRED_WORK {
        paired(p, &blocks, budget)
    } else {
        return None;
    };
    proof.timeline.as_ref().filter(|t| bounds::fits(p, t))?;
    Some(proof)
}

/// Cuts the graph at each task that all others come before or after, that no tensor passes, and
/// whose group and those of others it does not part.
fn blocks(p: &Problem) -> Vec<Block> {
    let n = p.n_tasks();
    let mut position = vec![0usize; n];
    p.order
        .iter()
        .enumerate()
        .for_each(|(i, &t)| position[t as usize] = i);
    let ties = |t: usize| {
        let group = p.members.row(p.group_of[t] as usize);
        p.successors(t)
            .chain(group.iter().copied())
            .map(|c| position[c as usize])
            .max()
            .unwrap_or(0)
    };
    let (mut cuts, mut farthest) = (Vec::new(), 0);
    let last_source = (0..n)
        .filter(|&t| p.inputs.row(t).is_empty())
        .map(|t| position[t])
        .max()
        .unwrap_or(0);
    for (i, &t) in p.order.iter().enumerate() {
        let alone = p.members.row(p.group_of[t as usize] as usize).len() == 1;
        if farthest <= i && last_source <= i && alone {
            cuts.push(i);
        }
        if p.successors(t as usize).next().is_none() {
            // Successors of a sink do not come after all.
            break;
        }
        farthest = farthest.max(ties(t as usize));
    }
    let mut blocks = Vec::new();
    let mut from = None;
    for to in cuts.into_iter().map(Some).chain([None]) {
        let range = from.unwrap_or(0)..to.map_or(n, |to| to + 1);
        if range.len() > usize::from(from.is_some()) {
            let tasks = p.order[range].to_vec();
            blocks.push(Block {
                has_start: from.is_some(),
                has_end: to.is_some(),
                tasks,
            });
        }
        from = to;
    }
    blocks
}

/// Solves a block with its start and end on given devices.
fn solve(
    p: &Problem,
    block: &Block,
    start: Option<usize>,
    end: Option<usize>,
    share: u64,
    budget: &mut u64,
) -> Solved {
    let mut alone = bounds::cut_out(p, &block.tasks, block.has_start);
    let mut pin = |i: usize, to: Option<usize>| to.map(|to| alone.restrict(i, |d| d == to));
    pin(0, start.filter(|_| block.has_start));
    pin(block.tasks.len() - 1, end.filter(|_| block.has_end));
    let tried = [
        algorithms::heft(&alone, Insertion::Gaps),
        algorithms::etf(&alone),
        algorithms::greedy(&alone),
        together(&alone),
    ];
    let quick = tried
        .into_iter()
        .min_by_key(|t| t.makespan)
        .unwrap_or_default();
    let is_large = block.tasks.len() > MOST_TASKS || p.n_devices() > MOST_DEVICES;
    let known = if is_large {
        bounds::quick(&alone).value
    } else {
        bounds::best(&alone, 0).value
    };
    if known >= quick.makespan || share == 0 || is_large {
        return Solved {
            bound: known.min(quick.makespan),
            timeline: quick,
        };
    }
    let (proof, left) = narrow(&alone, known, quick.makespan, share);
    *budget -= share - left;
    Solved {
        bound: proof.lower_bound,
        timeline: proof.timeline.unwrap_or(quick),
    }
}

/// All on the device that is best for all, tasks that cannot be there elsewhere.
fn together(p: &Problem) -> Timeline {
    let keys = crate::schedule::ranks::keys_of_order(&p.order);
    let on = |d: usize| {
        simulate::simulate(
            p,
            &algorithms::single(p, d),
            &keys,
            simulate::LinkOrder::Urgent,
        )
    };
    (0..p.n_devices())
        .map(on)
        .min_by_key(|t| t.makespan)
        .unwrap_or_default()
}

/// An empty timeline of all tasks.
fn unfilled(p: &Problem) -> Timeline {
    let n = p.n_tasks();
    Timeline {
        device: vec![0; n],
        start: vec![Nanos::ZERO; n],
        end: vec![Nanos::ZERO; n],
        ..Timeline::default()
    }
}

/// Appends a block's schedule, its devices renamed.
fn append(
    p: &Problem,
    whole: &mut Timeline,
    block: &Block,
    solved: &Timeline,
    name: impl Fn(u32) -> u32,
) {
    let after = whole.makespan;
    for (i, &t) in block
        .tasks
        .iter()
        .enumerate()
        .skip(usize::from(block.has_start))
    {
        whole.device[t as usize] = name(solved.device[i]);
        whole.start[t as usize] = after + solved.start[i];
        whole.end[t as usize] = after + solved.end[i];
    }
    let sent = bounds::tensors_of(p, &block.tasks);
    whole
        .transfers
        .extend(solved.transfers.iter().map(|t| Transfer {
            tensor: sent[t.tensor as usize],
            from: name(t.from),
            to: name(t.to),
            start: after + t.start,
            end: after + t.end,
        }));
    whole.makespan = after + solved.makespan;
}

/// Devices that nothing tells apart: each block once.
fn renamed(p: &Problem, blocks: &[Block], mut budget: u64) -> Proof {
    let (mut whole, mut bound, mut at) = (unfilled(p), Nanos::ZERO, 0u32);
    for (i, block) in blocks.iter().enumerate() {
        let share = budget / (blocks.len() - i) as u64;
        let solved = solve(p, block, None, None, share, &mut budget);
        // The device of the block's start is the one where the block before it ended.
        let first = solved.timeline.device[0];
        let name = |d: u32| match d {
            _ if !block.has_start => d,
            _ if d == first => at,
            _ if d == at => first,
            _ => d,
        };
        append(p, &mut whole, block, &solved.timeline, name);
        bound += solved.bound;
        at = solved.timeline.device.last().map_or(at, |&d| name(d));
    }
    finish(whole, bound)
}

/// Devices that differ: each block with each pair of devices of its start and end.
fn paired(p: &Problem, blocks: &[Block], mut budget: u64) -> Proof {
    let n = p.n_devices();
    let mut ends: Vec<Option<Reached>> = vec![Some(Reached::default()); 1];
    let mut ways: Vec<Vec<Option<(usize, Timeline)>>> = Vec::new();
    for (i, block) in blocks.iter().enumerate() {
        let exits: Vec<Option<usize>> = if block.has_end {
            (0..n).map(Some).collect()
        } else {
            vec![None]
        };
        let last = *block.tasks.last().expect("a block has a task") as usize;
        let (mut next, mut way) = (vec![None; exits.len()], vec![None; exits.len()]);
        let mut n_left = ((blocks.len() - i) * n * n) as u64;
        for (e, exit) in exits.into_iter().enumerate() {
            if exit.is_some_and(|d| !p.cost(last, d).is_finite()) {
                continue;
            }
            for (s, from) in ends.iter().enumerate() {
                let Some(from) = from else { continue };
                let share = budget / n_left.max(1);
                n_left = n_left.saturating_sub(1);
                let start = block.has_start.then_some(s);
                let solved = solve(p, block, start, exit, share, &mut budget);
                let reached = Reached {
                    end: from.end + solved.timeline.makespan,
                    bound: from.bound + solved.bound,
                };
                let known = next[e].get_or_insert(Reached {
                    end: Nanos::INFINITY,
                    bound: Nanos::INFINITY,
                });
                if reached.end < known.end {
                    way[e] = Some((s, solved.timeline));
                }
                known.end = known.end.min(reached.end);
                known.bound = known.bound.min(reached.bound);
            }
        }
        ends = next;
        ways.push(way);
    }
    let bound = ends.iter().flatten().map(|e| e.bound).min();
    let mut whole = unfilled(p);
    for (timeline, block) in shortest_way(&ends, ways).iter().zip(blocks) {
        append(p, &mut whole, block, timeline, |d| d);
    }
    finish(whole, bound.unwrap_or_default())
}

/// A cut on a device: its least end so far, and the least bound of that.
#[derive(Clone, Copy, Default)]
struct Reached {
    end: Nanos,
    bound: Nanos,
}

/// The schedules of blocks on the way to the least end.
fn shortest_way(
    ends: &[Option<Reached>],
    mut ways: Vec<Vec<Option<(usize, Timeline)>>>,
) -> Vec<Timeline> {
    let reached = ends.iter().enumerate();
    let best = reached
        .filter_map(|(d, e)| Some((e.as_ref()?.end, d)))
        .min();
    let mut at = best.map_or(0, |b| b.1);
    let mut chosen = Vec::new();
    for way in ways.iter_mut().rev() {
        if let Some((from, timeline)) = way[at].take() {
            chosen.push(timeline);
            at = from;
        }
    }
    chosen.reverse();
    chosen
}

fn finish(mut whole: Timeline, bound: Nanos) -> Proof {
    whole.transfers.sort_by_key(|t| (t.start, t.tensor, t.to));
    let complete = bound >= whole.makespan;
    Proof {
        timeline: Some(whole),
        lower_bound: bound,
        complete,
    }
}
