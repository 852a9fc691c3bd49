//! A batch over several devices: each computes its examples' share of every value that has the batch along an axis.
//!
//! The result is that of one device, up to the rounding of sums, for any graph. A value has one of three [forms](Form): whole on each device,
//! in pieces along an axis, or as addends of a sum. A rule of each op gives the forms of its operands for a form of its results, and a walk in the
//! order of the nodes chooses for each value the form with the fewest bytes to move. So means over a batch, statistics over it and gradients of
//! weights become sums of addends, with an all-reduce only where their sum is needed; values that depend on sums are computed alike on all devices.
//! An op without a rule is computed whole.
//! (Xu et al., GSPMD, arXiv:2105.04663, section 3, with one split axis, chosen by the program and not by annotations.)
//!
//! Variables are kept by each device: replica 0 has the variable's own name, and replica `r` the name that
//! [`replica_name`](gristmill_runtime::program::replica_name) gives. All get the same updates. With a central device, whole values, and so variables
//! and their updates, are there alone, and cross to the others where pieces need them.

mod emit;
mod forms;
mod rules;
#[cfg(test)]
mod tests;

use crate::error::{Error, Result};
use crate::ir::{DeviceRequest, Graph, Node, Op, Requested};
use crate::options::DataParallel;
use emit::Emitter;
use forms::Plan;
use gristmill_runtime::device::DeviceName;
use std::ops::Range;

/// The way in which a value is held by several devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Form {
    /// The whole value by each device.
    Whole,
    /// The part of this axis for a device's examples. The extent is a multiple of the batch.
    Piece(usize),
    /// An addend of the value by each device.
    Addend,
}

/// Requests for the devices.
struct Places {
    /// Those with a share of the batch.
    devices: Vec<Requested>,
    /// The one with all whole values.
    central: Option<Requested>,
}

/// The examples of each device.
struct Shares {
    /// Number of examples.
    batch: usize,
    /// Examples from and to, by device; none is empty.
    ranges: Vec<Range<usize>>,
}

impl Shares {
    /// Nearly equal shares of a batch; with fewer examples than devices, the first ones have one each.
    fn equal(batch: usize, n_devices: usize) -> Shares {
        let n = n_devices.min(batch).max(1);
        let bound = |r: usize| batch * r / n;
        let ranges = (0..n).map(|r| bound(r)..bound(r + 1));
        Shares {
            batch,
            ranges: ranges.collect(),
        }
    }

    fn n(&self) -> usize {
        self.ranges.len()
    }

    /// The part of an axis of some extent for a device.
    fn part(&self, r: usize, extent: usize) -> Range<usize> {
        let unit = extent / self.batch;
        let Range { start, end } = &self.ranges[r];
        start * unit..end * unit
    }

    /// True when an axis of this extent can be cut between examples.
    fn cuts(&self, extent: usize) -> bool {
        extent > 0 && extent.is_multiple_of(self.batch)
    }
}

/// Puts a graph of static shapes on several devices, each with a share of the batch, which is the first axis of the inputs named.
///
/// Errors with `Unsupported` when a node asks for a device by itself, or a region uses variables.
pub fn split_batch(g: &Graph, inputs: &[String], on: &DataParallel) -> Result<Graph> {
    for (_, node) in g.nodes() {
        check(node)?;
    }
    let extent = |name: &String| {
        let at = g.input_names.iter().position(|own| own == name)?;
        g.ty(g.inputs[at]).shape.first()?.as_usize()
    };
    let batch = inputs.first().and_then(extent).unwrap_or(1);
    let shares = Shares::equal(batch, on.devices.len());
    let plan = Plan::of(g, inputs, &shares);
    let request = |d: &DeviceName| DeviceRequest::from(d).into_requested();
    let places = Places {
        devices: on.devices.iter().map(request).collect(),
        central: on.central.as_ref().map(request),
    };
    Emitter::new(g, &plan, &shares, &places).graph()
}

fn check(node: &Node) -> Result<()> {
    if node.device.as_ref().is_some_and(|d| !d.is_open()) {
        let message = "the node asks for a device, and a strategy puts all nodes on its devices";
        return Err(Error::unsupported(message)
            .at_origin(&node.origin)
            .hint("without device scopes, or without the strategy"));
    }
    if node.regions.iter().any(Graph::has_state) {
        let message = "the region of the node uses variables, which are kept by each device";
        return Err(Error::unsupported(message).at_origin(&node.origin));
    }
    match node.op {
        Op::AllReduce { .. } => {
            let message = "an all-reduce between devices of a strategy";
            Err(Error::unsupported(message).at_origin(&node.origin))
        }
        _ => Ok(()),
    }
}
