//! Chrome's trace format (catapult's "Trace Event Format"): devices and links are threads; opens in
//! Perfetto and `chrome://tracing`.

use super::Subject;
use crate::cost::Nanos;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Process of the devices, and of the links.
const DEVICES: u32 = 1;
const LINKS: u32 = 2;

/// The predicted timeline: complete events with `ts` and `dur` in microseconds, and exact
/// nanoseconds in `args`.
pub fn trace(s: &Subject) -> String {
    let t = &s.solution.timeline;
    let mut events = vec![
        metadata("process_name", DEVICES, 0, &format!("devices: {}", s.name)),
        metadata("process_name", LINKS, 0, "links"),
    ];
    events.extend(
        s.devices
            .iter()
            .enumerate()
            .map(|(d, name)| metadata("thread_name", DEVICES, d, name)),
    );
    let mut threads: BTreeMap<(u32, u32), usize> =
        t.transfers.iter().map(|x| ((x.from, x.to), 0)).collect();
    threads
        .values_mut()
        .enumerate()
        .for_each(|(i, thread)| *thread = i);
    let name = |&(from, to): &(u32, u32)| {
        format!("{} -> {}", s.devices[from as usize], s.devices[to as usize])
    };
    events.extend(
        threads
            .iter()
            .map(|(link, &thread)| metadata("thread_name", LINKS, thread, &name(link))),
    );
    for (i, label) in s.tasks.iter().enumerate() {
        let args = json!({ "op": label.op, "start_ns": t.start[i].0, "end_ns": t.end[i].0 });
        events.push(complete(
            &label.name,
            "task",
            (DEVICES, t.device[i] as usize),
            (t.start[i], t.end[i]),
            args,
        ));
    }
    for x in &t.transfers {
        let bytes = s.problem.tensors[x.tensor as usize].bytes().0;
        let args = json!({ "bytes": bytes, "start_ns": x.start.0, "end_ns": x.end.0 });
        let thread = (LINKS, threads[&(x.from, x.to)]);
        events.push(complete(
            s.maker(x.tensor),
            "transfer",
            thread,
            (x.start, x.end),
            args,
        ));
    }
    json!({ "displayTimeUnit": "ns", "traceEvents": events }).to_string()
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
