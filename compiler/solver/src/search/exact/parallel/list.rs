//! Good schedules of jobs on identical devices: list scheduling under many orders, forwards and
//! backwards.

use super::graph::Jobs;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Start of each job, and the end of all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Starts {
    pub start: Vec<u64>,
    pub makespan: u64,
}

/// Runs list scheduling over and over, reusing its memory.
#[derive(Debug, Default)]
pub(super) struct Lists {
    waiting: Vec<u32>,
    ready: BinaryHeap<(u64, Reverse<u32>)>,
    running: BinaryHeap<Reverse<(u64, u32)>>,
    /// Number of running jobs from each time on.
    load: Vec<(u64, u32)>,
}

impl Lists {
    /// Whenever a device is idle and jobs are ready, the one of largest weight starts.
    pub fn run(&mut self, jobs: &Jobs, weight: &[u64], start: &mut Vec<u64>) -> u64 {
        self.waiting.clear();
        self.waiting
            .extend(jobs.before.iter().map(|b| b.len() as u32));
        start.clear();
        start.resize(jobs.n(), 0);
        for j in (0..jobs.n()).filter(|&j| jobs.before[j].is_empty()) {
            self.ready.push((weight[j], Reverse(j as u32)));
        }
        let (mut now, mut idle) = (0, jobs.n_devices);
        loop {
            while idle > 0
                && let Some((_, Reverse(j))) = self.ready.pop()
            {
                start[j as usize] = now;
                self.running
                    .push(Reverse((now + jobs.length[j as usize], j)));
                idle -= 1;
            }
            let Some(&Reverse((end, _))) = self.running.peek() else {
                return now;
            };
            now = end;
            while let Some(&Reverse((end, j))) = self.running.peek().filter(|r| r.0.0 == now) {
                debug_assert_eq!(end, now);
                self.running.pop();
                idle += 1;
                for &k in &jobs.after[j as usize] {
                    self.waiting[k as usize] -= 1;
                    if self.waiting[k as usize] == 0 {
                        self.ready.push((weight[k as usize], Reverse(k)));
                    }
                }
            }
        }
    }

    /// Jobs one after another by rising `order`, each at the earliest time at which all it waits
    /// for has ended and a device is idle for as long as it takes. Unlike [`Self::run`] this leaves
    /// devices idle for jobs that come soon.
    pub fn insert(&mut self, jobs: &Jobs, order: &[u32], start: &mut Vec<u64>) -> u64 {
        start.clear();
        start.resize(jobs.n(), 0);
        self.load.clear();
        self.load.push((0, 0));
        let (mut makespan, mut full) = (0, 0);
        for &j in order {
            let j = j as usize;
            let ready = jobs.before[j]
                .iter()
                .map(|&i| start[i as usize] + jobs.length[i as usize])
                .max()
                .unwrap_or(0);
            // Before this index all devices are busy.
            while self.load[full].1 as usize >= jobs.n_devices {
                full += 1;
            }
            start[j] = self.place(jobs.n_devices as u32, full, ready, jobs.length[j]);
            makespan = makespan.max(start[j] + jobs.length[j]);
        }
        makespan
    }

    /// Takes the earliest time at which a device is idle for `length`, from index `full` of the
    /// load on.
    fn place(&mut self, n_devices: u32, full: usize, ready: u64, length: u64) -> u64 {
        let load = &mut self.load;
        let mut first = (full + load[full..].partition_point(|l| l.0 <= ready))
            .saturating_sub(1)
            .max(full);
        let mut last = first;
        // The last stretch never ends and is idle.
        loop {
            if load[last].1 >= n_devices {
                first = last + 1;
            } else if load
                .get(last + 1)
                .is_none_or(|next| next.0 >= load[first].0.max(ready) + length)
            {
                break;
            }
            last += 1;
        }
        let begin = load[first].0.max(ready);
        let end = begin + length;
        if load.get(last + 1).is_none_or(|next| next.0 > end) {
            load.insert(last + 1, (end, load[last].1));
        }
        if load[first].0 < begin {
            load.insert(first + 1, (begin, load[first].1));
            (first, last) = (first + 1, last + 1);
        }
        load[first..=last].iter_mut().for_each(|l| l.1 += 1);
        begin
    }
}

/// Searches orders for a schedule that ends at `target`, with `rounds` tries. A try perturbs the
/// best order so far; the schedule is then shifted to the end and back to the start as long as that
/// helps (Tormos and Lova, Annals of Operations Research 102, 2001: forward-backward improvement).
pub(super) fn improve(jobs: &Jobs, target: u64, rounds: u64) -> Starts {
    let back = jobs.reversed();
    let mut search = Improve {
        jobs,
        back,
        lists: Lists::default(),
        random: 1,
        best: Vec::new(),
        makespan: u64::MAX,
    };
    let mut start = Vec::new();
    for weight in weights(jobs) {
        search.lists.run(jobs, &weight, &mut start);
        search.settle(&mut start, target);
    }
    let mut current = search.best.clone();
    let mut at = search.makespan;
    for round in 0..rounds {
        if search.makespan <= target {
            break;
        }
        let reach = 1 + search.below(if round % 16 == 0 { 12 } else { 4 });
        let order = search.perturbed(&current, reach);
        search.lists.insert(jobs, &order, &mut start);
        let found = search.settle(&mut start, target);
        if found <= at || search.below(50) == 0 {
            (at, current) = (found, start.clone());
        }
        if round % 300 == 299 {
            (at, current) = (search.makespan, search.best.clone());
        }
    }
    Starts {
        start: search.best,
        makespan: search.makespan,
    }
}

/// Weights of classic rules: longest path to the end, the same with ties to many successors, with
/// work behind it.
fn weights(jobs: &Jobs) -> Vec<Vec<u64>> {
    let n = jobs.n();
    let mut work = vec![0u64; n];
    for j in (0..n).rev() {
        work[j] = jobs.length[j]
            + jobs.after[j]
                .iter()
                .map(|&k| work[k as usize] / jobs.before[k as usize].len() as u64)
                .sum::<u64>();
    }
    let most = work.iter().copied().max().unwrap_or(0) + 1;
    let tails = jobs.tail.clone();
    let successors = (0..n)
        .map(|j| jobs.tail[j] * (n as u64 + 1) + jobs.after[j].len() as u64)
        .collect();
    let shared = (0..n).map(|j| jobs.tail[j] * most + work[j]).collect();
    let mixed = (0..n)
        .map(|j| jobs.tail[j] * jobs.n_devices as u64 + work[j])
        .collect();
    vec![tails, successors, shared, mixed, work]
}

struct Improve<'a> {
    jobs: &'a Jobs,
    back: Jobs,
    lists: Lists,
    random: u64,
    best: Vec<u64>,
    makespan: u64,
}

impl Improve<'_> {
    fn below(&mut self, n: u64) -> u64 {
        self.random = self
            .random
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.random >> 33) % n
    }

    /// Jobs by start, some exchanged with one that starts a little later; the graph's order is
    /// kept.
    fn perturbed(&mut self, start: &[u64], reach: u64) -> Vec<u32> {
        let n = self.jobs.n();
        let mut order: Vec<u32> = (0..n as u32).collect();
        order.sort_by_key(|&j| (start[j as usize], j));
        for _ in 0..reach {
            // Takes a job out and puts it as far forward or back as it may go, or less.
            let from = self.below(n as u64) as usize;
            let j = order[from];
            let first = (0..from)
                .rev()
                .find(|&k| self.jobs.after[order[k] as usize].contains(&j))
                .map_or(0, |k| k + 1);
            let last = (from + 1..n)
                .find(|&k| self.jobs.before[order[k] as usize].contains(&j))
                .unwrap_or(n)
                - 1;
            let to = first + self.below((last - first + 1) as u64) as usize;
            order.remove(from);
            order.insert(to, j);
        }
        order
    }

    /// Shifts a schedule to its end and back until that gains nothing. `start` becomes the last
    /// one; returns its makespan.
    fn settle(&mut self, start: &mut Vec<u64>, target: u64) -> u64 {
        let n = self.jobs.n();
        let mut best = self.end(start);
        self.keep(start, best);
        let mut mirrored = Vec::new();
        for _ in 0..8 {
            if self.makespan <= target {
                break;
            }
            // Latest ends come first backwards; ties as the graph has them.
            let mut order: Vec<u32> = (0..n as u32).collect();
            let end = |j: u32| start[n - 1 - j as usize] + self.jobs.length[n - 1 - j as usize];
            order.sort_by_key(|&j| (Reverse(end(j)), j));
            let makespan = self.lists.insert(&self.back, &order, &mut mirrored);
            let from_start =
                |j: u32| makespan - mirrored[n - 1 - j as usize] - self.jobs.length[j as usize];
            order.sort_by_key(|&j| (from_start(j), j));
            let makespan = self.lists.insert(self.jobs, &order, start);
            self.keep(start, makespan);
            if makespan >= best {
                return makespan;
            }
            best = makespan;
        }
        best
    }

    fn end(&self, start: &[u64]) -> u64 {
        start
            .iter()
            .zip(&self.jobs.length)
            .map(|(s, l)| s + l)
            .max()
            .unwrap_or(0)
    }

    fn keep(&mut self, start: &[u64], makespan: u64) {
        if makespan < self.makespan {
            self.makespan = makespan;
            self.best = start.to_vec();
        }
    }
}
