//! Placements as slices: the tasks in a line, cut into one piece per device, by dynamic programming
//! over the cuts.
//!
//! The baseline of max-throughput partitioning (Archer et al., arXiv:2311.03703, section 4) and the
//! natural shape of a model that is too large for one device. A training step is folded first, so
//! that the backward part of a layer lies beside its forward part. How much a slice holds is
//! estimated with all its tasks run one after the other ([`Load`]); the schedules made from the
//! slices are judged by themselves.

use crate::memory::repair;
use crate::problem::Problem;
use crate::schedule::ranks;
use crate::schedule::timeline::Timeline;
use crate::{Bytes, Nanos};
use std::collections::BTreeSet;

/// The objective of the cuts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Goal {
    /// Time of all tasks and all transfers, one after the other: for chains that are cut because
    /// they must be.
    Sum,
    /// The largest load of a device or link: for streams of samples.
    Bottleneck,
}

/// Tasks and edges that the estimates of one table may look at.
const WORK: usize = 3_000_000;

/// Most pieces that the line is chopped into before it is sliced.
const MOST_PIECES: usize = 160;

/// The best schedule of several slicings: two lines, two goals, three degrees of caution in the
/// estimate of memory. Tasks run depth first, or where that does not fit so that little is live.
pub fn place(p: &Problem) -> Option<Timeline> {
    let mut best: Option<(repair::Key, Timeline)> = None;
    let mut tried: BTreeSet<Vec<u32>> = BTreeSet::new();
    let orders = [repair::depth_first(p), repair::least_live(p)];
    for line in lines(p) {
        let table = Table::new(p, &line, &orders[0]);
        for (goal, percent) in GOALS {
            let Some(device) = table.cut(goal, percent) else {
                continue;
            };
            if tried.contains(&device) {
                continue;
            }
            for order in &orders {
                let timeline = repair::schedule(p, &device, order);
                let key = repair::key(p, &timeline);
                if best.as_ref().is_none_or(|b| key < b.0) {
                    best = Some((key, timeline));
                }
                if key.0 == Bytes::ZERO {
                    break;
                }
            }
            tried.insert(device);
        }
    }
    best.map(|b| b.1)
}

/// Placements cut from the lines for a goal, at all degrees of caution.
pub fn cuts(p: &Problem, goal: Goal) -> Vec<Vec<u32>> {
    let order = repair::depth_first(p);
    let mut found: Vec<Vec<u32>> = Vec::new();
    for line in lines(p) {
        let table = Table::new(p, &line, &order);
        let percents = GOALS.iter().filter(|g| g.0 == goal).map(|g| g.1);
        found.extend(percents.filter_map(|percent| table.cut(goal, percent)));
    }
    found.dedup();
    found
}

/// Goals, with the percentage of a limit that an estimate may reach.
const GOALS: [(Goal, u128); 6] = [
    (Goal::Sum, 100),
    (Goal::Bottleneck, 100),
    (Goal::Sum, 90),
    (Goal::Bottleneck, 90),
    (Goal::Sum, 75),
    (Goal::Bottleneck, 75),
];

/// Groups in a line, in several ways: as they first come, and folded.
pub fn lines(p: &Problem) -> Vec<Vec<u32>> {
    let heads = ranks::least_heads(p);
    let folded = folded(p, &heads);
    let mut lines = vec![line(p, &heads), line(p, &folded)];
    lines.dedup();
    lines
}

/// Groups by the least `place` of their tasks; ties by topological order.
fn line(p: &Problem, place: &[Nanos]) -> Vec<u32> {
    let mut position = vec![0; p.n_tasks()];
    p.order
        .iter()
        .enumerate()
        .for_each(|(i, &t)| position[t as usize] = i);
    let key = |g: &u32| {
        p.members
            .row(*g as usize)
            .iter()
            .map(|&t| (place[t as usize], position[t as usize]))
            .min()
    };
    let mut groups: Vec<u32> = (0..p.n_groups() as u32).collect();
    groups.sort_by_key(key);
    groups
}

/// Places at which a task that uses an old result lies beside the task that made it, and its
/// successors no later.
fn folded(p: &Problem, heads: &[Nanos]) -> Vec<Nanos> {
    let all = (0..p.n_tasks())
        .map(|t| heads[t] + p.least_cost(t))
        .max()
        .unwrap_or_default();
    let old = Nanos(all.0 / 20);
    let mut place = vec![Nanos::ZERO; p.n_tasks()];
    let mut is_back = vec![false; p.n_tasks()];
    for &t in &p.order {
        let t = t as usize;
        let before = || p.predecessors(t).map(|q| q as usize);
        let aged = before().filter(|&q| heads[t].saturating_sub(heads[q] + p.least_cost(q)) > old);
        let kept = aged.map(|q| place[q]).max();
        let after = before().filter(|&q| is_back[q]).map(|q| place[q]).min();
        is_back[t] = kept.is_some() || after.is_some();
        place[t] = kept.or(after).unwrap_or(heads[t]);
    }
    place
}

/// Costs of all slices of a line.
struct Table<'p> {
    p: &'p Problem,
    pieces: Vec<Vec<u32>>,
    /// `[first][piece - first]`: bytes that a slice from piece `first` to `piece` holds.
    bytes: Vec<Vec<u128>>,
    /// Time of all pieces before one, by device.
    before: Vec<Vec<Nanos>>,
    /// Transfer time of all that crosses each cut.
    crossing: Vec<Nanos>,
}

impl<'p> Table<'p> {
    fn new(p: &'p Problem, line: &[u32], order: &[u32]) -> Table<'p> {
        let n_pieces = (WORK / (p.n_tasks() + p.consumers.n_items()).max(1))
            .max(4 * p.n_devices())
            .min(MOST_PIECES);
        let pieces = chop(p, line, n_pieces);
        let bytes = estimates(p, &pieces, order);
        let time = |piece: &[u32], d: usize| -> Nanos {
            piece
                .iter()
                .flat_map(|&g| p.members.row(g as usize))
                .map(|&t| p.cost(t as usize, d))
                .sum()
        };
        let before = |d: usize| {
            let mut sum = Nanos::ZERO;
            let mut before = vec![Nanos::ZERO];
            // A piece that may not be on the device is told apart below; it does not spoil the sums
            // after it.
            for piece in &pieces {
                let own = time(piece, d);
                sum += if own.is_finite() { own } else { Nanos::ZERO };
                before.push(sum);
            }
            before
        };
        let before = (0..p.n_devices()).map(before).collect();
        let crossing = crossing(p, &pieces);
        Table {
            p,
            pieces,
            bytes,
            before,
            crossing,
        }
    }

    /// Device of each task for the best cuts, devices in their order, any number of them left out
    /// at any place.
    fn cut(&self, goal: Goal, percent: u128) -> Option<Vec<u32>> {
        let n = self.pieces.len();
        let n_devices = self.p.n_devices();
        let mut best = vec![vec![Nanos::INFINITY; n + 1]; n_devices + 1];
        let mut from = vec![vec![usize::MAX; n + 1]; n_devices + 1];
        best[0][0] = Nanos::ZERO;
        for d in 0..n_devices {
            let runs = self.runs_on(d);
            for end in 0..=n {
                // Nothing on this device.
                (best[d + 1][end], from[d + 1][end]) = (best[d][end], end);
            }
            for first in 0..n {
                if !best[d][first].is_finite() {
                    continue;
                }
                for end in first + 1..=self.last(first, d, percent).min(runs[first]) {
                    let load = self.before[d][end].saturating_sub(self.before[d][first]);
                    let cost = match goal {
                        Goal::Sum => best[d][first] + load + self.crossing[first],
                        Goal::Bottleneck => best[d][first].max(load).max(self.crossing[first]),
                    };
                    if cost < best[d + 1][end] {
                        (best[d + 1][end], from[d + 1][end]) = (cost, first);
                    }
                }
            }
        }
        best[n_devices][n].is_finite().then(|| self.assign(&from))
    }

    fn assign(&self, from: &[Vec<usize>]) -> Vec<u32> {
        let mut device = vec![0; self.p.n_tasks()];
        let mut end = self.pieces.len();
        for d in (0..self.p.n_devices()).rev() {
            let first = from[d + 1][end];
            let groups = self.pieces[first..end].iter().flatten();
            groups
                .flat_map(|&g| self.p.members.row(g as usize))
                .for_each(|&t| device[t as usize] = d as u32);
            end = first;
        }
        device
    }

    /// For each piece the end of the longest slice from there that `device` has kernels for.
    fn runs_on(&self, device: usize) -> Vec<usize> {
        let n = self.pieces.len();
        let mut end = n;
        let mut ends = vec![n; n];
        for first in (0..n).rev() {
            let runs = |&g: &u32| {
                self.p
                    .members
                    .row(g as usize)
                    .iter()
                    .all(|&t| self.p.cost(t as usize, device).is_finite())
            };
            if !self.pieces[first].iter().all(runs) {
                end = first;
            }
            ends[first] = end;
        }
        ends
    }

    /// End of the longest slice from `first` that is estimated to fit on `device`.
    fn last(&self, first: usize, device: usize, percent: u128) -> usize {
        let Some(limit) = self.p.devices[device].memory else {
            return self.pieces.len();
        };
        let room = u128::from(limit.0) * percent / 100;
        first + self.bytes[first].iter().take_while(|&&b| b <= room).count()
    }
}

/// The line in at most about `n` pieces of equal mean time or number.
fn chop(p: &Problem, line: &[u32], n: usize) -> Vec<Vec<u32>> {
    let means = ranks::Means::new(p);
    let weight = |g: u32| -> u128 {
        p.members
            .row(g as usize)
            .iter()
            .map(|&t| means.cost(t as usize))
            .sum()
    };
    let total: u128 = line.iter().map(|&g| weight(g)).sum::<u128>().max(1);
    let n = n.min(line.len()).max(1);
    let mut pieces: Vec<Vec<u32>> = vec![Vec::new()];
    let (mut sum, mut count) = (0u128, 0usize);
    for &g in line {
        let full = sum * n as u128 > total * 2 || count * n > line.len() * 2 || line.len() <= n;
        if full && count > 0 {
            pieces.push(Vec::new());
            (sum, count) = (0, 0);
        }
        (sum, count) = (sum + weight(g), count + 1);
        if let Some(last) = pieces.last_mut() {
            last.push(g);
        }
    }
    pieces
}

/// Time of one transfer of each tensor that is made before a cut and used after it, or the other
/// way, by cut; over the first link.
fn crossing(p: &Problem, pieces: &[Vec<u32>]) -> Vec<Nanos> {
    let mut piece_of = vec![0u32; p.n_tasks()];
    for (i, piece) in pieces.iter().enumerate() {
        let tasks = piece.iter().flat_map(|&g| p.members.row(g as usize));
        tasks.for_each(|&t| piece_of[t as usize] = i as u32);
    }
    let mut crossing = vec![Nanos::ZERO; pieces.len() + 1];
    for x in 0..p.tensors.len() {
        let made = piece_of[p.tensors[x].producer as usize];
        let used = || p.consumers.row(x).iter().map(|&c| piece_of[c as usize]);
        let (first, last) = (
            used().min().unwrap_or(made).min(made),
            used().max().unwrap_or(made).max(made),
        );
        let time = p.transfer(x, 0, 1.min(p.n_devices() - 1));
        crossing[first as usize + 1..=last as usize]
            .iter_mut()
            .for_each(|c| *c += time);
    }
    crossing
}

/// Bytes that each slice holds: `[first][end - first - 1]`, up to the first that is over every
/// limit.
fn estimates(p: &Problem, pieces: &[Vec<u32>], order: &[u32]) -> Vec<Vec<u128>> {
    let most = p
        .devices
        .iter()
        .map(|d| d.memory.map_or(u128::MAX, |m| u128::from(m.0)))
        .max()
        .unwrap_or(0);
    if p.devices.iter().all(|d| d.memory.is_none()) {
        return vec![Vec::new(); pieces.len()];
    }
    let mut position = vec![0u32; p.n_tasks()];
    order
        .iter()
        .enumerate()
        .for_each(|(i, &t)| position[t as usize] = i as u32);
    let mut load = Load::new(p, position);
    let from = |first: usize| {
        load.clear();
        let mut bytes = Vec::new();
        for piece in &pieces[first..] {
            piece
                .iter()
                .flat_map(|&g| p.members.row(g as usize))
                .for_each(|&t| load.add(t));
            bytes.push(load.bytes());
            if load.bytes() > most {
                break;
            }
        }
        bytes
    };
    (0..pieces.len()).map(from).collect()
}

/// Peak memory of a set of tasks that runs alone on a device, in a given order of all tasks: its
/// results from their task to the last use in the set, sent away at once; operands from outside
/// from their first use in the set to the last.
struct Load<'p> {
    p: &'p Problem,
    position: Vec<u32>,
    is_in: Vec<bool>,
    tasks: Vec<u32>,
    /// First and last place where a tensor is held.
    held: Vec<Option<(u32, u32)>>,
    tensors: Vec<u32>,
    constants: std::collections::BTreeSet<u32>,
    lasting: u128,
    live: Peak,
}

impl<'p> Load<'p> {
    fn new(p: &'p Problem, position: Vec<u32>) -> Load<'p> {
        Load {
            p,
            position,
            is_in: vec![false; p.n_tasks()],
            tasks: Vec::new(),
            held: vec![None; p.tensors.len()],
            tensors: Vec::new(),
            constants: Default::default(),
            lasting: 0,
            live: Peak::new(p.n_tasks()),
        }
    }

    fn clear(&mut self) {
        self.tasks
            .drain(..)
            .for_each(|t| self.is_in[t as usize] = false);
        self.tensors
            .drain(..)
            .for_each(|x| self.held[x as usize] = None);
        self.constants.clear();
        self.lasting = 0;
        self.live.clear();
    }

    fn add(&mut self, task: u32) {
        let p = self.p;
        self.is_in[task as usize] = true;
        self.tasks.push(task);
        self.lasting += u128::from(p.resident[task as usize].0);
        for &c in p.constants_of.row(task as usize) {
            self.lasting += if self.constants.insert(c) {
                u128::from(p.constants[c as usize].0)
            } else {
                0
            };
        }
        for &x in p
            .inputs
            .row(task as usize)
            .iter()
            .chain(p.outputs.row(task as usize))
        {
            let at = self.position[task as usize];
            self.hold(x, at);
        }
        let at = self.position[task as usize] as usize;
        self.live
            .add(at, at, i128::from(p.scratch[task as usize].0));
    }

    /// Holds a tensor at a place too, and at all between. One that waits for its producer to come
    /// in begins there.
    fn hold(&mut self, x: u32, at: u32) {
        let bytes = i128::from(self.p.tensors[x as usize].bytes().0);
        match self.held[x as usize] {
            None => {
                self.tensors.push(x);
                self.held[x as usize] = Some((at, at));
                self.live.add(at as usize, at as usize, bytes);
            }
            Some((first, last)) if at < first => {
                self.held[x as usize] = Some((at, last));
                self.live.add(at as usize, first as usize - 1, bytes);
            }
            Some((first, last)) if at > last => {
                self.held[x as usize] = Some((first, at));
                self.live.add(last as usize + 1, at as usize, bytes);
            }
            Some(_) => {}
        }
    }

    fn bytes(&self) -> u128 {
        self.lasting + self.live.highest().max(0) as u128
    }
}

/// Sums over ranges with their highest: a segment tree.
struct Peak {
    n: usize,
    own: Vec<i128>,
    highest: Vec<i128>,
}

impl Peak {
    fn new(n: usize) -> Peak {
        let n = n.next_power_of_two();
        Peak {
            n,
            own: vec![0; 2 * n],
            highest: vec![0; 2 * n],
        }
    }

    fn clear(&mut self) {
        self.own.fill(0);
        self.highest.fill(0);
    }

    fn highest(&self) -> i128 {
        self.highest[1]
    }

    /// Adds to all from `first` to `last`, both included.
    fn add(&mut self, first: usize, last: usize, bytes: i128) {
        if bytes != 0 {
            self.add_below(1, (0, self.n - 1), (first, last), bytes);
        }
    }

    fn add_below(
        &mut self,
        node: usize,
        (low, high): (usize, usize),
        range: (usize, usize),
        bytes: i128,
    ) {
        if range.1 < low || high < range.0 {
            return;
        }
        if range.0 <= low && high <= range.1 {
            self.own[node] += bytes;
            self.highest[node] += bytes;
            return;
        }
        let middle = (low + high) / 2;
        self.add_below(2 * node, (low, middle), range, bytes);
        self.add_below(2 * node + 1, (middle + 1, high), range, bytes);
        self.highest[node] =
            self.own[node] + self.highest[2 * node].max(self.highest[2 * node + 1]);
    }
}
