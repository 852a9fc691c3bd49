//! The stages of a stream, and its bottleneck.

use super::{Subject, percent};
use crate::cost::Nanos;
use crate::place::Stream;
use serde::Serialize;

/// A stream of runs through the devices.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StreamUse {
    /// Runs that the placement was chosen for.
    pub samples: u64,
    /// Time of all of them.
    pub time_ns: u64,
    /// No placement takes less.
    pub lower_bound_ns: u64,
    /// Time from one run to the next, once they flow.
    pub period_ns: u64,
    /// Time of one run.
    pub latency_ns: u64,
    /// Runs under way at a time.
    pub in_flight: u64,
    /// Device or link that is busy for most of a period.
    pub bottleneck: String,
    /// Devices in the order in which a run comes to them.
    pub stages: Vec<Stage>,
    /// Links in the order in which a run comes to them.
    pub links: Vec<Stage>,
}

/// A device or a link as a stage of a pipeline.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Stage {
    /// Its name.
    pub place: String,
    /// Nodes, or transfers, of a run.
    pub n_items: usize,
    /// The first of them.
    pub first: String,
    /// The last of them.
    pub last: String,
    /// Its time for a run.
    pub load_ns: u64,
    /// The same in percent of the period.
    pub busy_percent: f64,
}

/// Stages and links of a stream.
pub(super) fn stream(s: &Subject, stream: &Stream) -> StreamUse {
    let stages = stages(s, stream);
    let links = links(s, stream);
    let most = stages
        .iter()
        .chain(&links)
        .reduce(|a, b| if b.load_ns > a.load_ns { b } else { a });
    StreamUse {
        samples: stream.samples,
        time_ns: stream.time().0,
        lower_bound_ns: stream.lower_bound.0,
        period_ns: stream.period.0,
        latency_ns: stream.latency.0,
        in_flight: stream.in_flight,
        bottleneck: most.map(|m| m.place.clone()).unwrap_or_default(),
        stages,
        links,
    }
}

/// One use of a resource: start, name and length.
type Item<'a> = (Nanos, &'a str, Nanos);

fn stage(place: String, mut items: Vec<Item>, stream: &Stream) -> Option<(Nanos, Stage)> {
    items.sort_by_key(|i| i.0);
    let load: Nanos = items.iter().map(|i| i.2).sum();
    let (first, last) = (items.first()?, items.last()?);
    let stage = Stage {
        place,
        n_items: items.len(),
        first: first.1.to_owned(),
        last: last.1.to_owned(),
        load_ns: load.0,
        busy_percent: percent(load.0, stream.period.0),
    };
    Some((first.0, stage))
}

fn in_order(mut stages: Vec<(Nanos, Stage)>) -> Vec<Stage> {
    stages.sort_by_key(|s| s.0);
    stages.into_iter().map(|s| s.1).collect()
}

fn stages(s: &Subject, stream: &Stream) -> Vec<Stage> {
    let (p, t) = (s.problem, &s.solution.timeline);
    let of = |d: usize| {
        let mine = (0..p.n_tasks()).filter(|&i| t.device[i] as usize == d);
        let items = mine
            .map(|i| (t.start[i], s.tasks[i].name.as_str(), p.cost(i, d)))
            .collect();
        stage(s.devices[d].clone(), items, stream)
    };
    in_order((0..p.n_devices()).filter_map(of).collect())
}

fn links(s: &Subject, stream: &Stream) -> Vec<Stage> {
    let (p, t) = (s.problem, &s.solution.timeline);
    let n = p.n_devices();
    let of = |pair: usize| {
        let (from, to) = (pair / n, pair % n);
        let mine = t
            .transfers
            .iter()
            .filter(|x| (x.from as usize, x.to as usize) == (from, to));
        let items = mine
            .map(|x| {
                (
                    x.start,
                    s.maker(x.tensor),
                    p.transfer(x.tensor as usize, from, to),
                )
            })
            .collect();
        stage(
            format!("{} -> {}", s.devices[from], s.devices[to]),
            items,
            stream,
        )
    };
    in_order((0..n * n).filter_map(of).collect())
}
