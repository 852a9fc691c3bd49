//! Event files, which TensorBoard shows.

mod file;
mod graph;
mod histogram;
mod proto;
mod record;

pub use histogram::Histogram;

pub(super) use file::{EventFile, FirstLoss, GoesOn, Log};
pub(super) use histogram::Numbers;

use crate::error::Result;
use crate::ir::Graph;
use prost::Message;
use proto::{Event, GraphDef, Number, Payload, Summary, SummaryValue};
use std::io;
use std::path::Path;

/// Numbers that a log has of a step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LoggedStep {
    /// The step, from 1.
    pub step: u64,
    /// When it was written, in seconds since 1970.
    pub wall_time: f64,
    /// Numbers by tag, such as `loss`.
    pub scalars: Vec<(String, f32)>,
    /// Histograms by tag, such as `dense/weights/gradients`.
    pub histograms: Vec<(String, Histogram)>,
}

/// A log of one run, as it is in a folder's event files.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EventLog {
    /// Records of steps in the order of writing; a step may have several.
    pub steps: Vec<LoggedStep>,
    /// Names of the graph's nodes.
    pub nodes: Vec<String>,
}

impl EventLog {
    /// Reads the event files of a folder, such as `logs/train` of a [`TensorBoard`](super::TensorBoard). Records at the end of a file that are
    /// not finished yet are left out.
    ///
    /// Errors with `InvalidInput` when a file cannot be read, or a record is damaged.
    pub fn read(folder: impl AsRef<Path>) -> Result<EventLog> {
        let mut log = EventLog::default();
        for event in file::read(folder.as_ref())? {
            match event.payload {
                Some(Payload::Summary(ref summary)) => log.steps.push(step(&event, summary)),
                Some(Payload::Graph(bytes)) => {
                    let graph = GraphDef::decode(bytes);
                    let graph = graph.map_err(|e| crate::Error::invalid(format!("graph: {e}")))?;
                    log.nodes = graph.node.into_iter().map(|node| node.name).collect();
                }
                _ => {}
            }
        }
        Ok(log)
    }

    /// Steps and numbers of a tag.
    pub fn scalar(&self, tag: &str) -> Vec<(u64, f32)> {
        let one = |logged: &LoggedStep| {
            let found = logged.scalars.iter().find(|(own, _)| own == tag)?;
            Some((logged.step, found.1))
        };
        self.steps.iter().filter_map(one).collect()
    }
}

fn step(event: &Event, summary: &Summary) -> LoggedStep {
    let mut logged = LoggedStep {
        step: event.step as u64,
        wall_time: event.wall_time,
        ..LoggedStep::default()
    };
    for value in &summary.value {
        let tag = value.tag.clone();
        match &value.number {
            Some(Number::Scalar(x)) => logged.scalars.push((tag, *x)),
            Some(Number::Histogram(h)) => logged.histograms.push((tag, Histogram::of_proto(h))),
            None => {}
        }
    }
    logged
}

/// Numbers of a step in the making.
#[derive(Default)]
pub(super) struct Record(Summary);

impl Record {
    pub(super) fn scalar(&mut self, tag: &str, x: f64) {
        self.add(tag, Number::Scalar(x as f32));
    }

    pub(super) fn histogram(&mut self, tag: &str, histogram: &Histogram) {
        self.add(tag, Number::Histogram(histogram.to_proto()));
    }

    fn add(&mut self, tag: &str, number: Number) {
        self.0.value.push(SummaryValue {
            tag: tag.to_owned(),
            number: Some(number),
        });
    }
}

impl EventFile {
    /// Appends numbers of a step.
    pub(super) fn add_record(&mut self, step: u64, record: Record) -> io::Result<()> {
        self.add(step, Payload::Summary(record.0))
    }

    /// Appends a graph.
    pub(super) fn add_graph(&mut self, g: &Graph) -> io::Result<()> {
        let bytes = graph::graph_def(g).encode_to_vec();
        self.add(0, Payload::Graph(bytes.into()))
    }
}
