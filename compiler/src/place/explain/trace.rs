//! Chrome's trace format (catapult's "Trace Event Format"): devices and links are threads; opens in
//! Perfetto and `chrome://tracing`.

use super::Subject;
use crate::cost::Nanos;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// Process of the devices, and of the links.
const DEVICES: u32 = 1;
const LINKS: u32 = 2;

/// The predicted timeline: complete events with `ts` and `dur` in microseconds, and exact
/// nanoseconds in `args`.
pub fn trace(s: &Subject) -> String {
    let transfers = &s.solution.timeline.transfers;
    let links: BTreeSet<(u32, u32)> = transfers.iter().map(|x| (x.from, x.to)).collect();
    let thread_of: BTreeMap<(u32, u32), usize> = links.into_iter().zip(0..).collect();
    let mut events = threads(s, &thread_of);
    events.extend(tasks(s));
    for x in transfers {
        let bytes = s.problem.tensors[x.tensor as usize].bytes().0;
        let args = json!({ "bytes": bytes, "start_ns": x.start.0, "end_ns": x.end.0 });
        let thread = (LINKS, thread_of[&(x.from, x.to)]);
        let name = s.maker(x.tensor);
        events.push(complete(name, "transfer", thread, (x.start, x.end), args));
    }
    json!({ "displayTimeUnit": "ns", "traceEvents": events }).to_string()
}

/// Names of processes and threads.
fn threads(s: &Subject, thread_of: &BTreeMap<(u32, u32), usize>) -> Vec<Value> {
    let device = |d: u32| &s.devices[d as usize];
    let mut events = vec![
        metadata("process_name", DEVICES, 0, &format!("devices: {}", s.name)),
        metadata("process_name", LINKS, 0, "links"),
    ];
    for (d, name) in s.devices.iter().enumerate() {
        events.push(metadata("thread_name", DEVICES, d, name));
    }
    for (&(from, to), &thread) in thread_of {
        let name = format!("{} -> {}", device(from), device(to));
        events.push(metadata("thread_name", LINKS, thread, &name));
    }
    events
}

fn tasks<'a>(s: &'a Subject) -> impl Iterator<Item = Value> + 'a {
    let t = &s.solution.timeline;
    s.tasks.iter().enumerate().map(|(i, label)| {
        let args = json!({ "op": label.op, "start_ns": t.start[i].0, "end_ns": t.end[i].0 });
        let (thread, during) = ((DEVICES, t.device[i] as usize), (t.start[i], t.end[i]));
        complete(&label.name, "task", thread, during, args)
    })
}

fn metadata(what: &str, process: u32, thread: usize, name: &str) -> Value {
    json!({ "ph": "M", "name": what, "pid": process, "tid": thread, "args": { "name": name } })
}

fn complete(
    name: &str,
    category: &str,
    (process, thread): (u32, usize),
    (start, end): (Nanos, Nanos),
    args: Value,
) -> Value {
    let us = |ns: Nanos| ns.0 as f64 / 1000.0;
    let dur = us(end.saturating_sub(start));
    json!({ "ph": "X", "name": name, "cat": category, "pid": process, "tid": thread, "ts": us(start), "dur": dur, "args": args })
}
