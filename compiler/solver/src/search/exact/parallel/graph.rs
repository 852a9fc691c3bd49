//! Tasks on identical devices with free links: lengths and precedence, nothing else.

use crate::bounds::{Slack, raise};
use crate::problem::Problem;

/// Begins of stretches times tasks for the bound of one task.
const WORK: usize = 20_000;

/// Tasks that take time, in a topological order, and which of them wait for which.
#[derive(Clone, Debug)]
pub(super) struct Jobs {
    /// Number of identical devices.
    pub n_devices: usize,
    /// Times, in units of their greatest common divisor.
    pub length: Vec<u64>,
    /// Jobs that each waits for directly, ways over tasks of no time included.
    pub before: Vec<Vec<u32>>,
    /// Jobs that wait for each directly.
    pub after: Vec<Vec<u32>>,
    /// Earliest start.
    pub head: Vec<u64>,
    /// Least time from the start of a job to the end of all.
    pub tail: Vec<u64>,
}

/// Most tasks for which heads and tails are sharpened, and schedules improved.
const MOST_TASKS: usize = 1_000;

/// True when devices differ in nothing, links take no time, no groups hold tasks together, memory
/// has no limits, and tasks are not too many.
pub(crate) fn applies(p: &Problem) -> bool {
    if p.n_tasks() > MOST_TASKS {
        return false;
    }
    let n = p.n_devices();
    let free = |x: usize| {
        p.consumers.row(x).is_empty() || (0..n).all(|a| (0..n).all(|b| p.transfer(x, a, b).0 == 0))
    };
    p.n_groups() == p.n_tasks()
        && p.devices.iter().all(|d| d.memory.is_none())
        && (0..p.n_tasks()).all(|t| {
            p.costs(t)
                .iter()
                .all(|c| c.is_finite() && *c == p.cost(t, 0))
        })
        && (0..p.tensors.len()).all(free)
}

/// The jobs of a problem, the task of each, and the unit of their times.
pub(super) fn from_problem(p: &Problem) -> (Jobs, Vec<u32>, u64) {
    let tasks: Vec<u32> = p
        .order
        .iter()
        .copied()
        .filter(|&t| p.cost(t as usize, 0).0 > 0)
        .collect();
    let unit = tasks
        .iter()
        .map(|&t| p.cost(t as usize, 0).0)
        .fold(0, gcd)
        .max(1);
    let mut job_of = vec![u32::MAX; p.n_tasks()];
    tasks
        .iter()
        .enumerate()
        .for_each(|(j, &t)| job_of[t as usize] = j as u32);
    // Jobs that a task of no time passes on.
    let mut passes: Vec<Vec<u32>> = vec![Vec::new(); p.n_tasks()];
    let mut before = vec![Vec::new(); tasks.len()];
    for &t in &p.order {
        let mut jobs: Vec<u32> = p
            .predecessors(t as usize)
            .flat_map(|q| passes[q as usize].iter().copied())
            .collect();
        jobs.sort_unstable();
        jobs.dedup();
        match job_of[t as usize] {
            u32::MAX => passes[t as usize] = jobs,
            j => {
                before[j as usize] = jobs;
                passes[t as usize] = vec![j];
            }
        }
    }
    let length = tasks
        .iter()
        .map(|&t| p.cost(t as usize, 0).0 / unit)
        .collect();
    (Jobs::new(p.n_devices(), length, before), tasks, unit)
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

impl Jobs {
    /// Jobs in topological order by their predecessors. Heads and tails are longest paths.
    fn new(n_devices: usize, length: Vec<u64>, before: Vec<Vec<u32>>) -> Jobs {
        let n = length.len();
        let mut after = vec![Vec::new(); n];
        for (j, before) in before.iter().enumerate() {
            before
                .iter()
                .for_each(|&i| after[i as usize].push(j as u32));
        }
        let mut jobs = Jobs {
            n_devices,
            length,
            before,
            after,
            head: vec![0; n],
            tail: vec![0; n],
        };
        jobs.longest_ways();
        jobs
    }

    pub fn n(&self) -> usize {
        self.length.len()
    }

    fn longest_ways(&mut self) {
        for j in 0..self.n() {
            let ends = self.before[j]
                .iter()
                .map(|&i| self.head[i as usize] + self.length[i as usize]);
            self.head[j] = ends.max().unwrap_or(0).max(self.head[j]);
        }
        for j in (0..self.n()).rev() {
            let rest = self.after[j]
                .iter()
                .map(|&k| self.tail[k as usize])
                .max()
                .unwrap_or(0);
            self.tail[j] = (self.length[j] + rest).max(self.tail[j]);
        }
    }

    /// The same jobs with time running backwards.
    pub fn reversed(&self) -> Jobs {
        let n = self.n();
        let flip = |rows: &Vec<Vec<u32>>| -> Vec<Vec<u32>> {
            let row = |r: &Vec<u32>| r.iter().rev().map(|&j| (n - 1) as u32 - j).collect();
            rows.iter().rev().map(row).collect()
        };
        let ends = |from: &[u64], length: &[u64], less: bool| -> Vec<u64> {
            from.iter()
                .zip(length)
                .rev()
                .map(|(f, l)| if less { f - l } else { f + l })
                .collect()
        };
        Jobs {
            n_devices: self.n_devices,
            length: self.length.iter().rev().copied().collect(),
            before: flip(&self.after),
            after: flip(&self.before),
            head: ends(&self.tail, &self.length, true),
            tail: ends(&self.head, &self.length, false),
        }
    }

    /// Raises heads by the work that must be done before each job, then tails by the work that must
    /// be done after it, and returns a lower bound of the makespan.
    ///
    /// Before a job starts all jobs that it waits for have run: a problem of its own, to which the
    /// energetic bound applies, each job with the time from its end to the start of that one as its
    /// rest.
    pub fn sharpen(&mut self) -> u64 {
        self.sharpen_heads();
        let mut back = self.reversed();
        back.sharpen_heads();
        *self = back.reversed();
        let slack = |j: usize| Slack {
            head: self.head[j],
            length: self.length[j],
            tail: self.tail[j],
        };
        let all: Vec<Slack> = (0..self.n()).map(slack).collect();
        let least = (0..self.n())
            .map(|j| self.head[j] + self.tail[j])
            .max()
            .unwrap_or(0);
        let area = self
            .length
            .iter()
            .sum::<u64>()
            .div_ceil(self.n_devices as u64);
        raise(&all, self.n_devices as u64, least.max(area), usize::MAX)
    }

    fn sharpen_heads(&mut self) {
        let mut rest = vec![u64::MAX; self.n()];
        for j in 0..self.n() {
            let ends = self.before[j]
                .iter()
                .map(|&i| self.head[i as usize] + self.length[i as usize]);
            let head = ends.max().unwrap_or(0).max(self.head[j]);
            self.head[j] = head;
            if self.before[j].len() < 2 {
                continue;
            }
            // Longest way from the start of each ancestor to the start of this job.
            rest.fill(u64::MAX);
            let mut slacks = Vec::new();
            for i in (0..j).rev() {
                let next = self.after[i].iter().filter(|&&k| k as usize <= j);
                let ways = next.filter_map(|&k| {
                    if k as usize == j {
                        Some(0)
                    } else {
                        Some(rest[k as usize]).filter(|r| *r < u64::MAX)
                    }
                });
                if let Some(way) = ways.max() {
                    rest[i] = way + self.length[i];
                    slacks.push(Slack {
                        head: self.head[i],
                        length: self.length[i],
                        tail: rest[i],
                    });
                }
            }
            if slacks.len() > self.n_devices {
                self.head[j] = raise(&slacks, self.n_devices as u64, head, WORK);
            }
        }
    }
}
