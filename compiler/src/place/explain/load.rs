//! Load of devices and links, and the contents of memory at its peak.

use super::Subject;
use crate::cost::{Bytes, Nanos};
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Things of the live set that are named.
const N_LIVE: usize = 5;

/// A device and its load.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DeviceUse {
    /// Its name.
    pub device: String,
    /// Nodes that it runs.
    pub n_nodes: usize,
    /// Time that it computes.
    pub busy_ns: u64,
    /// The same in percent of the makespan.
    pub busy_percent: f64,
    /// Most bytes that it holds.
    pub peak_bytes: u64,
    /// Its limit.
    pub limit_bytes: Option<u64>,
    /// When it first holds the most.
    pub peak_at_ns: u64,
    /// The largest values held at the peak, largest first; the rest is counted in `n_live`.
    pub live: Vec<Live>,
    /// Number of things that it holds then.
    pub n_live: usize,
}

/// Something that a device holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Live {
    /// `output of a`, `copy of a`, `weights of a`, `scratch of a`.
    pub what: String,
    /// Its size.
    pub bytes: u64,
}

/// A link and its load.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LinkUse {
    /// Source device.
    pub from: String,
    /// Destination device.
    pub to: String,
    /// Number of transfers.
    pub n_transfers: usize,
    /// Bytes over all transfers.
    pub bytes: u64,
    /// Time that it is busy.
    pub busy_ns: u64,
    /// The same in percent of the makespan.
    pub busy_percent: f64,
    /// Node whose output is the longest on its way.
    pub longest: String,
}

/// A holder of memory: a task, or a constant by its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum What {
    Weights(u32),
    Constant(u32),
    Output(u32),
    Copy(u32),
    Scratch(u32),
}

/// Something held from a time to a time.
#[derive(Clone, Copy, Debug)]
struct Held {
    from: Nanos,
    to: Nanos,
    bytes: Bytes,
    what: What,
}

/// Load and memory of all devices.
pub(super) fn devices(s: &Subject) -> Vec<DeviceUse> {
    let (p, t) = (s.problem, &s.solution.timeline);
    let held = held(s);
    let load = |(d, held): (usize, &Vec<Held>)| {
        let mine = (0..p.n_tasks()).filter(|&i| t.device[i] as usize == d);
        let busy: Nanos = mine.clone().map(|i| p.cost(i, d)).sum();
        let (peak, at) = peak(held);
        let live = live_at(s, held, at);
        DeviceUse {
            device: s.devices[d].clone(),
            n_nodes: mine.count(),
            busy_ns: busy.0,
            busy_percent: s.share(busy.0),
            peak_bytes: peak.0,
            limit_bytes: p.devices[d].memory.map(|m| m.0),
            peak_at_ns: at.0,
            n_live: live.len(),
            live: live.into_iter().take(N_LIVE).collect(),
        }
    };
    held.iter().enumerate().map(load).collect()
}

/// Load of all links that are used, in order of source and destination.
pub(super) fn links(s: &Subject) -> Vec<LinkUse> {
    let (p, t) = (s.problem, &s.solution.timeline);
    let mut by_link: BTreeMap<(u32, u32), Vec<usize>> = BTreeMap::new();
    t.transfers
        .iter()
        .enumerate()
        .for_each(|(i, x)| by_link.entry((x.from, x.to)).or_default().push(i));
    let load = |((from, to), transfers): ((u32, u32), Vec<usize>)| {
        let length = |i: &usize| t.transfers[*i].end.saturating_sub(t.transfers[*i].start);
        let busy: Nanos = transfers.iter().map(length).sum();
        let bytes: Bytes = transfers
            .iter()
            .map(|&i| p.tensors[t.transfers[i].tensor as usize].bytes())
            .sum();
        let longest = transfers
            .iter()
            .max_by_key(|i| (length(i), Reverse(**i)))
            .copied()
            .unwrap_or_default();
        LinkUse {
            from: s.devices[from as usize].clone(),
            to: s.devices[to as usize].clone(),
            n_transfers: transfers.len(),
            bytes: bytes.0,
            busy_ns: busy.0,
            busy_percent: s.share(busy.0),
            longest: s.maker(t.transfers[longest].tensor).to_owned(),
        }
    };
    by_link.into_iter().map(load).collect()
}

/// Intervals of memory by device: weights and constants all the time, outputs to their last local
/// use or the end of their last transfer, copies from the start of their transfer to their last
/// local use.
fn held(s: &Subject) -> Vec<Vec<Held>> {
    let (p, t) = (s.problem, &s.solution.timeline);
    let mut intervals = Intervals(vec![Vec::new(); p.n_devices()]);
    let mut sent = vec![Nanos::ZERO; p.tensors.len()];
    for x in &t.transfers {
        sent[x.tensor as usize] = sent[x.tensor as usize].max(x.end);
        let tensor = &p.tensors[x.tensor as usize];
        let during = (x.start, t.last_use(p, x.tensor, x.to));
        intervals.add(x.to, during, tensor.bytes(), What::Copy(tensor.producer));
    }
    for task in 0..p.n_tasks() as u32 {
        let i = task as usize;
        let (d, start, end) = (t.device[i], t.start[i], t.end[i]);
        intervals.add(d, ALWAYS, p.resident[i], What::Weights(task));
        for &x in p.outputs.row(i) {
            let until = end.max(t.last_use(p, x, d)).max(sent[x as usize]);
            let bytes = p.tensors[x as usize].bytes();
            intervals.add(d, (start, until), bytes, What::Output(task));
        }
        intervals.add(d, (start, end), p.scratch[i], What::Scratch(task));
    }
    for ((d, c), first_user) in constants(s) {
        let what = What::Constant(first_user);
        intervals.add(d, ALWAYS, p.constants[c as usize], what);
    }
    intervals.0
}

const ALWAYS: (Nanos, Nanos) = (Nanos::ZERO, Nanos::INFINITY);

/// Intervals of memory by device.
struct Intervals(Vec<Vec<Held>>);

impl Intervals {
    fn add(&mut self, device: u32, (from, to): (Nanos, Nanos), bytes: Bytes, what: What) {
        if bytes > Bytes::ZERO && to > from {
            self.0[device as usize].push(Held {
                from,
                to,
                bytes,
                what,
            });
        }
    }
}

/// The first user of each constant on each device that has one.
fn constants(s: &Subject) -> BTreeMap<(u32, u32), u32> {
    let mut first_user = BTreeMap::new();
    for (task, &d) in s.solution.timeline.device.iter().enumerate() {
        for &c in s.problem.constants_of.row(task) {
            first_user.entry((d, c)).or_insert(task as u32);
        }
    }
    first_user
}

/// Most bytes held at a time, and when that is first so.
fn peak(held: &[Held]) -> (Bytes, Nanos) {
    let mut changes: Vec<(Nanos, i128)> = held
        .iter()
        .map(|h| (h.from, i128::from(h.bytes.0)))
        .collect();
    changes.extend(held.iter().map(|h| (h.to, -i128::from(h.bytes.0))));
    changes.sort_unstable();
    let (mut now, mut peak, mut at) = (0i128, 0i128, Nanos::ZERO);
    for (time, change) in changes {
        now += change;
        if now > peak {
            (peak, at) = (now, time);
        }
    }
    (Bytes(u64::try_from(peak).unwrap_or(u64::MAX)), at)
}

/// Values held at a time, largest first.
fn live_at(s: &Subject, held: &[Held], at: Nanos) -> Vec<Live> {
    let mut live: Vec<&Held> = held.iter().filter(|h| h.from <= at && at < h.to).collect();
    live.sort_by_key(|h| (Reverse(h.bytes), h.what));
    let name = |task: u32| &s.tasks[task as usize].name;
    let what = |w: What| match w {
        What::Weights(t) => format!("weights of {}", name(t)),
        What::Constant(t) => format!("constant of {}", name(t)),
        What::Output(t) => format!("output of {}", name(t)),
        What::Copy(t) => format!("copy of {}, from {}", name(t), s.device_of(t as usize)),
        What::Scratch(t) => format!("scratch of {}", name(t)),
    };
    live.into_iter()
        .map(|h| Live {
            what: what(h.what),
            bytes: h.bytes.0,
        })
        .collect()
}
