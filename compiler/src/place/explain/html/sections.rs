//! Tables and nodes of the page, as HTML that is readable without its script.

use super::super::candidates::{Alternative, NodeReason};
use super::super::load::{DeviceUse, LinkUse};
use super::super::stream::Stage;
use super::super::whatif::{Scaling, WhatIf};
use super::super::{ChainStep, Explanation, Subject};
use super::chart::counted;
use super::escaped;
use crate::cost::{Bytes, Nanos};
use std::collections::BTreeMap;

/// The explanation, with the numbers of the nodes that it links to.
pub(super) struct Sections<'a> {
    e: &'a Explanation,
    numbers: BTreeMap<&'a str, usize>,
}

impl<'a> Sections<'a> {
    pub(super) fn new(s: &'a Subject, e: &'a Explanation) -> Sections<'a> {
        let names = s.tasks.iter().enumerate();
        let numbers = names.map(|(i, task)| (task.name.as_str(), i)).collect();
        Sections { e, numbers }
    }

    /// All tables, those without rows left out.
    pub(super) fn tables(&self) -> String {
        let e = self.e;
        let stages = e
            .stream
            .iter()
            .flat_map(|s| s.stages.iter().chain(&s.links));
        let downgrades = e.downgrades.iter().map(|d| vec![escaped(d)]).collect();
        [
            table("Stages", &STAGES, stages.map(|s| self.stage(s)).collect()),
            table("Devices", &DEVICES, e.devices.iter().map(device).collect()),
            table(
                "Links",
                &LINKS,
                e.links.iter().map(|l| self.link(l)).collect(),
            ),
            self.critical_path(),
            table(
                "Other machines",
                &WHAT_IF,
                e.what_if.iter().map(what_if).collect(),
            ),
            table(
                "Fewer devices",
                &SCALING,
                e.scaling.iter().flat_map(scaling).collect(),
            ),
            table("Requests that were dropped", &["request"], downgrades),
        ]
        .concat()
    }

    /// The nodes by start, each an element that a bar leads to.
    pub(super) fn nodes(&self) -> String {
        self.e.nodes.iter().map(|n| self.node(n)).collect()
    }

    /// A link to the explanation of a node.
    fn node_link(&self, name: &str) -> String {
        let text = escaped(name);
        match self.numbers.get(name) {
            Some(i) => format!("<a href=\"#n{i}\">{text}</a>"),
            None => text,
        }
    }

    fn stage(&self, s: &Stage) -> Vec<String> {
        vec![
            escaped(&s.place),
            s.n_items.to_string(),
            self.node_link(&s.first),
            self.node_link(&s.last),
            Nanos(s.load_ns).to_string(),
            share(s.busy_percent),
        ]
    }

    fn link(&self, l: &LinkUse) -> Vec<String> {
        vec![
            escaped(&format!("{} → {}", l.from, l.to)),
            l.n_transfers.to_string(),
            Bytes(l.bytes).to_string(),
            Nanos(l.busy_ns).to_string(),
            share(l.busy_percent),
            self.node_link(&l.longest),
        ]
    }

    fn critical_path(&self) -> String {
        let steps = &self.e.critical_chain;
        if steps.is_empty() {
            return String::new();
        }
        let sum = |kind: &str| -> Nanos {
            let of_kind = steps.iter().filter(|s| s.kind == kind);
            of_kind
                .map(|s| Nanos(s.end_ns.saturating_sub(s.start_ns)))
                .sum()
        };
        let (n, tasks, transfers) = (counted(steps.len(), "step"), sum("task"), sum("transfer"));
        let rows = steps.iter().map(|s| self.step(s)).collect();
        let table = table("", &PATH, rows);
        format!(
            "<section>\n<h2>Critical path</h2>\n<details><summary>{n}: {tasks} of compute, \
             {transfers} of transfers</summary>\n{table}</details>\n</section>\n"
        )
    }

    fn step(&self, s: &ChainStep) -> Vec<String> {
        let node = self.node_link(&s.name);
        let node = match s.kind {
            "transfer" => format!("transfer of {node}"),
            _ => node,
        };
        vec![
            interval(s.start_ns, s.end_ns),
            node,
            escaped(&s.place),
            escaped(&s.waited_for),
        ]
    }

    fn node(&self, n: &NodeReason) -> String {
        let id = self.numbers[n.name.as_str()];
        let (name, op, device) = (escaped(&n.name), escaped(&n.op), escaped(&n.device));
        let (times, reason) = (interval(n.start_ns, n.end_ns), escaped(&n.reason));
        let alternatives = self.alternatives(n);
        let merged = merged(&n.merged);
        format!(
            "<details id=\"n{id}\"><summary><b>{name}</b> <i>{op}</i> <span>{device}</span> \
             <span>{times}</span></summary><p>{reason}</p>{merged}{alternatives}</details>\n"
        )
    }

    fn alternatives(&self, n: &NodeReason) -> String {
        if let Some(first) = &n.group {
            return format!("<p>Alternatives: see {}</p>", self.node_link(first));
        }
        let own = n.alternatives.iter().find(|a| a.device == n.device);
        let now = own.map_or(0, |a| a.makespan_ns);
        let rows = n.alternatives.iter().map(|a| alternative(a, now)).collect();
        table("", &ALTERNATIVES, rows)
    }
}

const STAGES: [&str; 6] = [
    "place",
    "items",
    "first",
    "last",
    "time of a run",
    "of a period",
];
const DEVICES: [&str; 7] = [
    "device",
    "nodes",
    "busy",
    "of a run",
    "peak of a run",
    "limit",
    "largest at the peak",
];
const LINKS: [&str; 6] = ["link", "transfers", "bytes", "busy", "of a run", "longest"];
const PATH: [&str; 4] = ["time", "node", "place", "waited for"];
const WHAT_IF: [&str; 3] = ["machine", "time of a run", "change"];
const SCALING: [&str; 3] = ["devices", "time of a run", "speed-up"];
const ALTERNATIVES: [&str; 6] = [
    "device",
    "operands ready",
    "transfers",
    "runs",
    "makespan",
    "over the memory limit",
];

/// The nodes of the model in a cluster.
fn merged(names: &[String]) -> String {
    if names.is_empty() {
        return String::new();
    }
    let n = counted(names.len(), "node");
    let names: Vec<String> = names.iter().map(|name| escaped(name)).collect();
    format!("<p>Merges {n} of the model: {}</p>", names.join(", "))
}

/// A table of cells that are HTML, with its heading if that is not empty; nothing without rows.
fn table(heading: &str, columns: &[&str], rows: Vec<Vec<String>>) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let head: String = columns.iter().map(|c| format!("<th>{c}</th>")).collect();
    let cells = |row: &Vec<String>| {
        row.iter()
            .map(|c| format!("<td>{c}</td>"))
            .collect::<String>()
    };
    let body: String = rows
        .iter()
        .map(|r| format!("<tr>{}</tr>\n", cells(r)))
        .collect();
    let table = format!(
        "<div class=\"wide\"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n"
    );
    match heading.is_empty() {
        true => table,
        false => format!("<section>\n<h2>{heading}</h2>\n{table}</section>\n"),
    }
}

/// A percentage with its bar.
fn share(percent: f64) -> String {
    format!("<meter max=\"100\" value=\"{percent}\"></meter> {percent} %")
}

fn interval(start_ns: u64, end_ns: u64) -> String {
    format!("{} to {}", Nanos(start_ns), Nanos(end_ns))
}

fn device(d: &DeviceUse) -> Vec<String> {
    let live = d
        .live
        .iter()
        .map(|l| format!("{} {}", escaped(&l.what), Bytes(l.bytes)));
    let mut live: Vec<String> = live.collect();
    let more = d.n_live - d.live.len();
    if more > 0 {
        live.push(format!("{more} more"));
    }
    let peak = format!("{} at {}", Bytes(d.peak_bytes), Nanos(d.peak_at_ns));
    vec![
        escaped(&d.device),
        d.n_nodes.to_string(),
        Nanos(d.busy_ns).to_string(),
        share(d.busy_percent),
        peak,
        d.limit_bytes
            .map_or("none".to_owned(), |l| Bytes(l).to_string()),
        format!("<div class=\"long\">{}</div>", live.join(", ")),
    ]
}

fn what_if(w: &WhatIf) -> Vec<String> {
    let why_not = || escaped(w.why_not.as_deref().unwrap_or_default());
    vec![
        escaped(&w.what),
        w.makespan_ns
            .map_or("impossible".to_owned(), |ns| Nanos(ns).to_string()),
        w.change_percent
            .map_or_else(why_not, |change| format!("{change:+} %")),
    ]
}

fn scaling(s: &Scaling) -> Vec<Vec<String>> {
    let one = s.makespan_ns.first().map_or(0, |r| r.1);
    let row = |&(n, ns): &(usize, u64)| {
        let speed_up = one as f64 / ns.max(1) as f64;
        vec![
            n.to_string(),
            Nanos(ns).to_string(),
            format!("{speed_up:.2}"),
        ]
    };
    s.makespan_ns.iter().map(row).collect()
}

fn alternative(a: &Alternative, now: u64) -> Vec<String> {
    let change = match a.makespan_ns >= now {
        true => format!("+{}", Nanos(a.makespan_ns - now)),
        false => format!("−{}", Nanos(now - a.makespan_ns)),
    };
    let over = match a.excess_bytes {
        0 => String::new(),
        bytes => Bytes(bytes).to_string(),
    };
    vec![
        escaped(&a.device),
        Nanos(a.ready_ns).to_string(),
        Nanos(a.transfer_ns).to_string(),
        interval(a.start_ns, a.end_ns),
        format!("{} ({change})", Nanos(a.makespan_ns)),
        over,
    ]
}
