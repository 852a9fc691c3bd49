//! The data of the drawing: rows, bars with their colours, and memory over time.
//!
//! A stream is drawn from its first run until each device has repeated itself twice: bars of run `k`
//! are those of the first run, `k` periods later.

use super::super::{Explanation, Subject, critical_chain};
use super::escaped;
use crate::cost::{Bytes, Nanos};
use crate::units::printable;
use gristmill_solver::schedule::critical_chain::Step;
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Ops with a colour of their own; the others share one.
const N_COLOURS: usize = 9;
/// Most runs of a stream that are drawn, and most bars of all of them.
const MAX_RUNS: u64 = 40;
const MAX_BARS: u64 = 100_000;

/// Everything that the script draws.
#[derive(Serialize)]
pub(super) struct Chart {
    /// End of the drawing.
    end: u64,
    /// Start and end of one period once the pipeline is full, of a stream.
    #[serde(skip_serializing_if = "Option::is_none")]
    period: Option<(u64, u64)>,
    rows: Vec<Row>,
    /// Names of the colours.
    colours: Vec<String>,
    /// The colour of ops without one of their own, if there are such ops.
    others: Option<usize>,
    /// The colour of transfers, if they share one.
    transfers: Option<usize>,
    /// Names of the tasks.
    names: Vec<String>,
    bars: Vec<Bar>,
    /// Bars of the critical path, in order.
    path: Vec<usize>,
}

/// A device or a link.
#[derive(Serialize)]
struct Row {
    name: String,
    note: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    memory: Option<Memory>,
    /// Source and destination rows of a link.
    #[serde(skip_serializing_if = "Option::is_none")]
    ends: Option<(u32, u32)>,
}

/// Bytes that a device holds over time.
#[derive(Serialize)]
struct Memory {
    limit: Option<u64>,
    peak: u64,
    /// `(from, bytes)`: the level from then on.
    levels: Vec<(u64, u64)>,
}

/// A task or a transfer.
#[derive(Clone, Serialize)]
struct Bar {
    row: usize,
    start: u64,
    end: u64,
    colour: usize,
    /// The task, or the maker of the tensor.
    task: u32,
    #[serde(skip_serializing_if = "is_zero")]
    run: u64,
    /// Of a transfer: its bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<u64>,
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

impl Chart {
    pub(super) fn new(s: &Subject, e: &Explanation) -> Chart {
        let (links, stream) = (links(s), Runs::new(s));
        let colours = Colours::new(s, &stream);
        let first = first_run(s, &links, &colours);
        let path = critical_chain(s.problem, &s.solution.timeline).steps;
        let n_tasks = s.tasks.len();
        Chart {
            end: stream.end.0,
            period: stream.period_once_full(),
            rows: rows(s, e, &links, &stream),
            others: colours.others,
            transfers: colours.transfers,
            colours: colours.names,
            names: s
                .tasks
                .iter()
                .map(|t| printable(&t.name).into_owned())
                .collect(),
            path: path
                .iter()
                .map(|(step, _)| bar_of(*step, n_tasks))
                .collect(),
            bars: stream.repeated(&first),
        }
    }

    /// JSON that cannot end the element that it stands in.
    pub(super) fn json(&self) -> String {
        serde_json::to_string(self)
            .expect("numbers and text are always JSON")
            .replace('<', "\\u003c")
    }

    /// The colours with their names; each is a button that keeps the bars of that colour only.
    pub(super) fn legend(&self) -> String {
        let item = |(i, name): (usize, &String)| {
            format!(
                "<button type=\"button\" class=\"key c{i}\" data-colour=\"{i}\">{}</button>",
                escaped(name)
            )
        };
        let items: String = self.colours.iter().enumerate().map(item).collect();
        let memory = "<span class=\"key memory\">memory</span>";
        let limits = self.rows.iter().flat_map(|row| &row.memory);
        let limit = match limits.filter_map(|m| m.limit).next() {
            Some(_) => "<span class=\"key limit\">limit</span>",
            None => "",
        };
        format!("<span id=\"legend\">{items}{memory}{limit}</span>")
    }
}

/// Position among the bars of the first run: tasks come before transfers.
fn bar_of(step: Step, n_tasks: usize) -> usize {
    match step {
        Step::Task(i) => i as usize,
        Step::Transfer(i) => n_tasks + i as usize,
    }
}

/// Links that are used, in order.
fn links(s: &Subject) -> Vec<(u32, u32)> {
    let transfers = &s.solution.timeline.transfers;
    let mut links: Vec<(u32, u32)> = transfers.iter().map(|x| (x.from, x.to)).collect();
    links.sort_unstable();
    links.dedup();
    links
}

/// Devices, then links.
fn rows(s: &Subject, e: &Explanation, links: &[(u32, u32)], stream: &Runs) -> Vec<Row> {
    let memory = memory(s, stream);
    let mut rows: Vec<Row> = Vec::with_capacity(memory.len() + links.len());
    for (device, memory) in e.devices.iter().zip(memory) {
        rows.push(Row {
            name: printable(&device.device).into_owned(),
            note: device_note(device.n_nodes, stream.busy(device.busy_ns), &memory),
            memory: (memory.peak > 0).then_some(memory),
            ends: None,
        });
    }
    for (link, ends) in e.links.iter().zip(links) {
        let (n, bytes, busy) = (
            link.n_transfers,
            Bytes(link.bytes),
            stream.busy(link.busy_ns),
        );
        rows.push(Row {
            name: format!("{} → {}", printable(&link.from), printable(&link.to)),
            note: format!("{}, {bytes}, busy {busy} %", counted(n, "transfer")),
            memory: None,
            ends: Some(*ends),
        });
    }
    rows
}

fn device_note(n_nodes: usize, busy: f64, memory: &Memory) -> String {
    let limit = memory.limit.map(|l| format!(" of {}", Bytes(l)));
    let (nodes, limit) = (counted(n_nodes, "node"), limit.unwrap_or_default());
    format!("{nodes}, busy {busy} %, peak {}{limit}", Bytes(memory.peak))
}

/// `1 node`, `2 nodes`.
pub(super) fn counted(n: usize, thing: &str) -> String {
    let plural = if n == 1 { "" } else { "s" };
    format!("{n} {thing}{plural}")
}

/// Memory of each device over the drawn runs: resident bytes, and tensors that each run holds for a
/// while.
fn memory(s: &Subject, stream: &Runs) -> Vec<Memory> {
    let (p, t) = (s.problem, &s.solution.timeline);
    let mut changes: Vec<BTreeMap<u64, i128>> = vec![BTreeMap::new(); p.n_devices()];
    for (device, from, to, bytes) in t.holds(p) {
        let changes = &mut changes[device as usize];
        for shift in stream.shifts() {
            *changes.entry((from + shift).0).or_default() += i128::from(bytes.0);
            *changes.entry((to + shift).0).or_default() -= i128::from(bytes.0);
        }
    }
    let resident = t.resident_bytes(p).into_iter();
    let devices = p.devices.iter().zip(resident).zip(changes);
    devices
        .map(|((device, resident), changes)| {
            let levels = levels(resident, &changes);
            Memory {
                limit: device.memory.map(|m| m.0),
                peak: levels.iter().map(|l| l.1).max().unwrap_or(resident.0),
                levels,
            }
        })
        .collect()
}

/// Levels after each change, from the resident bytes at time 0 on.
fn levels(resident: Bytes, changes: &BTreeMap<u64, i128>) -> Vec<(u64, u64)> {
    let mut now = i128::from(resident.0);
    let mut levels = vec![(0, resident.0)];
    for (&time, change) in changes.iter().filter(|c| *c.1 != 0) {
        now += change;
        let level = u64::try_from(now).expect("nothing is released that was not held");
        match levels.last_mut() {
            Some(last) if last.0 == time => last.1 = level,
            _ => levels.push((time, level)),
        }
    }
    levels
}

/// Bars of the tasks, then those of the transfers.
fn first_run(s: &Subject, links: &[(u32, u32)], colours: &Colours) -> Vec<Bar> {
    let (p, t) = (s.problem, &s.solution.timeline);
    let task = |i: usize| Bar {
        row: t.device[i] as usize,
        start: t.start[i].0,
        end: t.end[i].0,
        colour: colours.of_task[i],
        task: i as u32,
        run: 0,
        bytes: None,
    };
    let mut bars: Vec<Bar> = (0..p.n_tasks()).map(task).collect();
    bars.extend(t.transfers.iter().map(|x| Bar {
        row: p.n_devices() + links.partition_point(|l| *l < (x.from, x.to)),
        start: x.start.0,
        end: x.end.0,
        colour: colours.transfers.unwrap_or_default(),
        task: p.tensors[x.tensor as usize].producer,
        run: 0,
        bytes: Some(p.tensors[x.tensor as usize].bytes().0),
    }));
    bars
}

/// Colours of bars: by op, or by run where there are several.
#[derive(Default)]
struct Colours {
    names: Vec<String>,
    of_task: Vec<usize>,
    /// The colour of ops without one of their own.
    others: Option<usize>,
    transfers: Option<usize>,
}

impl Colours {
    fn new(s: &Subject, stream: &Runs) -> Colours {
        match stream.n {
            1 => Colours::by_op(s),
            n => Colours::by_run(s.tasks.len(), n as usize),
        }
    }

    fn by_run(n_tasks: usize, n_runs: usize) -> Colours {
        let name = |first: usize| {
            let runs: Vec<String> = (first..n_runs)
                .step_by(N_COLOURS)
                .map(|run| (run + 1).to_string())
                .collect();
            format!("run {}", runs.join(", "))
        };
        Colours {
            names: (0..n_runs.min(N_COLOURS)).map(name).collect(),
            of_task: vec![0; n_tasks],
            ..Colours::default()
        }
    }

    /// The ops that take most time have colours; the others share one.
    fn by_op(s: &Subject) -> Colours {
        let ops = ops_by_time(s);
        let n = ops.len().min(N_COLOURS);
        let names = ops[..n].iter().map(|op| printable(op).into_owned());
        let colour = |name: &str| ops[..n].iter().position(|op| *op == name).unwrap_or(n);
        let mut colours = Colours {
            names: names.collect(),
            of_task: s.tasks.iter().map(|task| colour(op(&task.op))).collect(),
            ..Colours::default()
        };
        if ops.len() > n {
            colours.others = Some(colours.add("other ops"));
        }
        if !s.solution.timeline.transfers.is_empty() {
            colours.transfers = Some(colours.add("transfer"));
        }
        colours
    }

    fn add(&mut self, name: &str) -> usize {
        self.names.push(name.to_owned());
        self.names.len() - 1
    }
}

/// Ops of the tasks, those that take most time first.
fn ops_by_time<'a>(s: &'a Subject<'_>) -> Vec<&'a str> {
    let t = &s.solution.timeline;
    let mut times: BTreeMap<&str, Nanos> = BTreeMap::new();
    for (i, task) in s.tasks.iter().enumerate() {
        *times.entry(op(&task.op)).or_default() += t.end[i].saturating_sub(t.start[i]);
    }
    let mut ops: Vec<&str> = times.keys().copied().collect();
    ops.sort_by_key(|op| (Reverse(times[op]), *op));
    ops
}

/// The op of a label; of a cluster, its kind.
fn op(label: &str) -> &str {
    let op = label.strip_prefix("cluster ").unwrap_or(label);
    if op.is_empty() { "task" } else { op }
}

/// The runs that are drawn.
struct Runs {
    n: u64,
    period: Nanos,
    /// Time of one run.
    latency: Nanos,
    /// End of the drawing: the next run that is not drawn would begin here.
    end: Nanos,
}

impl Runs {
    fn new(s: &Subject) -> Runs {
        let latency = s.solution.timeline.makespan;
        let Some(stream) = &s.stream else {
            return Runs {
                n: 1,
                period: latency,
                latency,
                end: latency,
            };
        };
        let n_bars = (s.tasks.len() + s.solution.timeline.transfers.len()) as u64;
        let most = (MAX_BARS / n_bars.max(1)).clamp(2, MAX_RUNS);
        let until_full = latency.0.div_ceil(stream.period.0.max(1));
        let n = (until_full + 2).min(most).min(stream.samples).max(1);
        let end = match n == stream.samples {
            true => stream.time(),
            false => stream.period.times(n),
        };
        Runs {
            n,
            period: stream.period,
            latency,
            end,
        }
    }

    /// Time by which each run is later than the first.
    fn shifts(&self) -> impl Iterator<Item = Nanos> + '_ {
        (0..self.n).map(|k| self.period.times(k))
    }

    /// The first period in which as many runs are under way as there can be.
    fn period_once_full(&self) -> Option<(u64, u64)> {
        let start = self.latency.0.next_multiple_of(self.period.0.max(1));
        let end = start + self.period.0;
        (self.n > 1 && end <= self.end.0).then_some((start, end))
    }

    /// Bars of all runs; runs have colours in turn.
    fn repeated(&self, first: &[Bar]) -> Vec<Bar> {
        let mut bars = Vec::with_capacity(first.len() * self.n as usize);
        for (run, shift) in self.shifts().enumerate() {
            bars.extend(first.iter().map(|bar| Bar {
                start: bar.start + shift.0,
                end: bar.end + shift.0,
                colour: if self.n == 1 {
                    bar.colour
                } else {
                    run % N_COLOURS
                },
                run: run as u64,
                ..bar.clone()
            }));
        }
        bars
    }

    /// Percent of a run's time, or of a period where runs follow each other.
    fn busy(&self, busy_ns: u64) -> f64 {
        super::super::percent(busy_ns, self.period.0)
    }
}
