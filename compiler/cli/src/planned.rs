//! The placement of a model as JSON.

use gristmill::Bytes;
use gristmill::ir::NodeId;
use gristmill::pipeline::Planned;
use gristmill::place::explain::Explanation;
use gristmill::place::{Placed, Stream};
use gristmill_solver::search::portfolio::Candidate;
use serde_json::{Value, json};

/// The answer of `gristmill place MODEL --json`.
pub(super) fn to_json(planned: &Planned, explanation: Option<Explanation>) -> Value {
    let p = &planned.placement;
    let ids = planned.clusters.nodes().map(|(id, _)| id);
    let nodes = ids.zip(&p.nodes);
    let nodes = nodes.filter_map(|(id, placed)| Some(node_json(planned, id, placed.as_ref()?)));
    let (lower_bound, bound) = &p.lower_bound;
    let peaks = p.devices.iter().zip(&p.peak_bytes);
    let peaks = peaks.map(|(device, bytes)| (device.to_string(), json!(bytes.0)));
    let mut answer = json!({
        "warnings": p.warnings,
        "log": p.log,
        "makespan_ns": p.makespan.0,
        "lower_bound_ns": lower_bound.0,
        "bound": bound,
        "algorithm": p.algorithm,
        "time_sources": p.sources,
        "nodes": nodes.collect::<Vec<_>>(),
        "copies": copies_json(planned),
        "candidates": p.candidates.iter().map(candidate_json).collect::<Vec<_>>(),
        "kernels": { "chosen": p.joining, "tried": p.rivals },
        "peak_bytes": peaks.collect::<serde_json::Map<_, _>>(),
    });
    if let Some(stream) = &p.stream {
        answer["stream"] = stream_json(stream);
    }
    if let Some(e) = explanation {
        answer["explain"] = json!(e);
    }
    answer
}

fn node_json(planned: &Planned, id: NodeId, placed: &Placed) -> Value {
    let node = planned.clusters.node(id);
    let device = &planned.placement.devices[placed.device];
    json!({
        "name": node.origin.as_str(),
        "op": node.op.name(),
        "device": device.to_string(),
        "start_ns": placed.start.0,
        "end_ns": placed.end.0,
        "reason": placed.reason.to_string(),
    })
}

fn copies_json(planned: &Planned) -> Vec<Value> {
    let mut copies = Vec::new();
    for copy in &planned.placement.copies {
        let mut value = node_json(planned, copy.node, &copy.placed);
        value["parked"] = copy.parked.is_some().into();
        copies.push(value);
    }
    copies
}

fn candidate_json(c: &Candidate) -> Value {
    json!({
        "algorithm": c.algorithm,
        "makespan_ns": c.score.1.0,
        "devices": c.n_devices,
        "fits_memory": c.score.0 == Bytes::ZERO,
    })
}

fn stream_json(s: &Stream) -> Value {
    json!({
        "samples": s.samples,
        "time_ns": s.time().0,
        "period_ns": s.period.0,
        "latency_ns": s.latency.0,
        "in_flight": s.in_flight,
        "lower_bound_ns": s.lower_bound.0,
    })
}
