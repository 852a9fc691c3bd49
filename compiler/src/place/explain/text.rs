//! Explanations for people.

use super::candidates::{Alternative, NodeReason};
use super::load::{DeviceUse, LinkUse};
use super::stream::{Stage, StreamUse};
use super::whatif::{Scaling, WhatIf};
use super::{ChainStep, Explanation};
use crate::cost::{Bytes, Nanos};
use crate::units::printable;
use std::fmt::{self, Display, Formatter, Write};

/// Steps of the critical chain that are printed.
const N_STEPS: usize = 40;

impl Display for Explanation {
    /// The stream, devices, links, the critical chain, other machines, and every node with its
    /// alternatives.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.stream.iter().try_for_each(|s| stream(f, s))?;
        self.devices.iter().try_for_each(|d| device(f, d))?;
        self.links.iter().try_for_each(|l| link(f, l))?;
        chain(f, &self.critical_chain)?;
        self.what_if.iter().try_for_each(|w| what_if(f, w))?;
        self.scaling.iter().try_for_each(|s| scaling(f, s))?;
        self.downgrades
            .iter()
            .try_for_each(|d| writeln!(f, "not met: {}", d))?;
        writeln!(f, "nodes:")?;
        self.nodes.iter().try_for_each(|n| node(f, n))
    }
}

fn stream(f: &mut Formatter<'_>, s: &StreamUse) -> fmt::Result {
    let [time, period, latency, bound] =
        [s.time_ns, s.period_ns, s.latency_ns, s.lower_bound_ns].map(|ns| Nanos(ns).to_string());
    let (n, in_flight) = (s.samples, s.in_flight);
    writeln!(
        f,
        "stream: {n} runs in {time}, one every {period}, each takes {latency}; {in_flight} under way at a time"
    )?;
    writeln!(
        f,
        "  no placement is predicted to take less than {bound}; bottleneck: {}",
        s.bottleneck
    )?;
    for (i, stage) in s.stages.iter().enumerate() {
        writeln!(f, "  stage {}: {}", i + 1, stage_text(stage, "node"))?;
    }
    s.links
        .iter()
        .try_for_each(|link| writeln!(f, "  link {}", stage_text(link, "transfer")))
}

fn stage_text(s: &Stage, what: &str) -> String {
    let plural = if s.n_items == 1 { "" } else { "s" };
    let (place, n, load) = (&s.place, s.n_items, Nanos(s.load_ns));
    let items = if s.first == s.last {
        printable(&s.first).into_owned()
    } else {
        format!("{} to {}", printable(&s.first), printable(&s.last))
    };
    format!(
        "{place}: {n} {what}{plural}, {items}; {load} of a period, {} %",
        s.busy_percent
    )
}

fn device(f: &mut Formatter<'_>, d: &DeviceUse) -> fmt::Result {
    let limit = d
        .limit_bytes
        .map(|l| format!(" of {}", Bytes(l)))
        .unwrap_or_default();
    let plural = if d.n_nodes == 1 { "" } else { "s" };
    write!(
        f,
        "{}: {} node{plural}, busy {} %, ",
        d.device, d.n_nodes, d.busy_percent
    )?;
    write!(f, "peak {}{limit}", Bytes(d.peak_bytes))?;
    if d.live.is_empty() {
        return writeln!(f);
    }
    let live: Vec<String> = d
        .live
        .iter()
        .map(|l| format!("{} {}", printable(&l.what), Bytes(l.bytes)))
        .collect();
    let more = d.n_live - d.live.len();
    let more = if more == 0 {
        String::new()
    } else {
        format!(", and {more} more")
    };
    writeln!(f, " at {}: {}{more}", Nanos(d.peak_at_ns), live.join(", "))
}

fn link(f: &mut Formatter<'_>, l: &LinkUse) -> fmt::Result {
    let (plural, bytes) = (if l.n_transfers == 1 { "" } else { "s" }, Bytes(l.bytes));
    let (from, to, n, busy) = (&l.from, &l.to, l.n_transfers, l.busy_percent);
    writeln!(
        f,
        "{from} -> {to}: {n} transfer{plural}, {bytes}, busy {busy} %, longest: {}",
        printable(&l.longest)
    )
}

fn chain(f: &mut Formatter<'_>, steps: &[ChainStep]) -> fmt::Result {
    if steps.is_empty() {
        return Ok(());
    }
    let sum = |kind: &str| -> u64 {
        steps
            .iter()
            .filter(|s| s.kind == kind)
            .map(|s| s.end_ns.saturating_sub(s.start_ns))
            .sum()
    };
    let (tasks, transfers) = (Nanos(sum("task")), Nanos(sum("transfer")));
    writeln!(
        f,
        "critical chain: {} steps, {tasks} of compute, {transfers} of transfers",
        steps.len()
    )?;
    let hidden = steps.len().saturating_sub(N_STEPS);
    if hidden > 0 {
        writeln!(f, "  ({hidden} earlier steps are in --json)")?;
    }
    for s in &steps[hidden..] {
        let (start, end) = (Nanos(s.start_ns), Nanos(s.end_ns));
        let kind = if s.kind == "transfer" {
            "transfer of "
        } else {
            ""
        };
        writeln!(
            f,
            "  {start}..{end} {kind}{} on {}, waited for {}",
            printable(&s.name),
            s.place,
            printable(&s.waited_for)
        )?;
    }
    Ok(())
}

fn what_if(f: &mut Formatter<'_>, w: &WhatIf) -> fmt::Result {
    match (w.makespan_ns, w.change_percent) {
        (Some(ns), Some(change)) => writeln!(f, "{}: {}, {}", w.what, Nanos(ns), signed(change)),
        _ => writeln!(
            f,
            "{}: impossible: {}",
            w.what,
            w.why_not.as_deref().unwrap_or_default()
        ),
    }
}

fn signed(percent: f64) -> String {
    if percent == 0.0 {
        "no change".to_owned()
    } else {
        format!("{percent:+} %")
    }
}

fn scaling(f: &mut Formatter<'_>, s: &Scaling) -> fmt::Result {
    let first = s.makespan_ns.first().map_or(0, |r| r.1);
    let mut line = String::new();
    for (n, ns) in &s.makespan_ns {
        let comma = if line.is_empty() { "" } else { ", " };
        write!(
            line,
            "{comma}{n}: {} (x{:.2})",
            Nanos(*ns),
            first as f64 / (*ns).max(1) as f64
        )?;
    }
    let of = s.devices.len();
    let verdict = match s.enough == of {
        true => format!("all {of} help"),
        false => format!("more than {} do not help", s.enough),
    };
    writeln!(f, "by number of devices: {line}; {verdict}")
}

fn node(f: &mut Formatter<'_>, n: &NodeReason) -> fmt::Result {
    let op = if n.op.is_empty() {
        String::new()
    } else {
        format!(" ({})", n.op)
    };
    let (start, end) = (Nanos(n.start_ns), Nanos(n.end_ns));
    write!(
        f,
        "{} {start}..{end} {}{op}: {}",
        n.device,
        printable(&n.name),
        printable(&n.reason)
    )?;
    match &n.group {
        Some(first) => writeln!(f, "; alternatives: see {}", printable(first))?,
        None => writeln!(f)?,
    }
    let now = n
        .alternatives
        .iter()
        .find(|a| a.device == n.device)
        .map_or(0, |a| a.makespan_ns);
    n.alternatives
        .iter()
        .filter(|a| a.device != n.device)
        .try_for_each(|a| alternative(f, a, now))
}

fn alternative(f: &mut Formatter<'_>, a: &Alternative, now: u64) -> fmt::Result {
    let times = [
        a.ready_ns,
        a.transfer_ns,
        a.start_ns,
        a.end_ns,
        a.makespan_ns,
    ]
    .map(|ns| Nanos(ns).to_string());
    let [ready, transfers, start, end, makespan] = times;
    let change = match a.makespan_ns >= now {
        true => format!("+{}", Nanos(a.makespan_ns - now)),
        false => format!("-{}", Nanos(now - a.makespan_ns)),
    };
    let over = if a.excess_bytes == 0 {
        String::new()
    } else {
        format!(", {} over the memory limit", Bytes(a.excess_bytes))
    };
    let device = &a.device;
    writeln!(
        f,
        "    on {device}: ready {ready}, transfers {transfers}, runs {start}..{end}, makespan {makespan} ({change}){over}"
    )
}
