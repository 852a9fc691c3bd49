//! A batch over several devices: each computes its examples' share of every value that has the batch along an
//! axis.
//!
//! The result is that of one device, up to the rounding of sums, for any graph. A value has one of three
//! [shardings](Sharding): replicated, in shards along an axis, or in partial sums. A rule of each op gives
//! the shardings of its operands for one of its results, and a walk in the order of the nodes chooses the one
//! with the fewest bytes to move. So means and statistics over a batch, and gradients of weights, become
//! partial sums, with an all-reduce only where the sum itself is needed; values behind sums are computed
//! alike on all devices. A node without a rule is replicated. A scan is in shards if its steps are, without transfers
//! between them. (Xu et al., GSPMD, arXiv:2105.04663, section 3;
//! here with one axis, chosen by the compiler and not by annotations.)
//!
//! Each device has all variables: replica 0 under the variable's own name, and replica `r` under that of
//! [`replica_name`](gristmill_runtime::program::replica_name). All get the same updates. With
//! servers, values without shards, and so variables and their updates, are there alone, each on one.

mod buckets;
mod copies;
mod emit;
mod homes;
mod joined;
mod rules;
mod scans;
mod sharding;
#[cfg(test)]
mod tests;
mod tree;

use crate::error::{Error, Result};
use crate::ir::{DeviceRequest, Graph, Node, Op, Requested};
use crate::options::{DataParallel, Deal};
use crate::schedule::variable_uses;
use emit::Emitter;
use gristmill_runtime::device::DeviceName;
use homes::Homes;
use sharding::Plan;
use std::ops::Range;

/// The way in which a value is held by several devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Sharding {
    /// The whole value by each device.
    Replicated,
    /// The part of an axis for a device's examples.
    Shard(Cut),
    /// Partial sums: the value is the sum over the devices.
    Partial,
}

impl Sharding {
    /// Shards of an axis along which the batch lies once.
    fn along(axis: usize) -> Sharding {
        Sharding::Shard(Cut { axis, outer: 1 })
    }
}

/// A cut of an axis between examples: its elements are `outer` times all examples, and an example's own number of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Cut {
    axis: usize,
    /// Times that the batch lies along the axis: more than 1 where a reshape has joined the batch to axes before it.
    outer: usize,
}

/// Requests for the devices.
struct Places {
    /// Devices with a share of the batch.
    devices: Vec<Requested>,
    /// The devices with all values without shards; none, if each device has them.
    servers: Vec<Requested>,
    /// The server of each value.
    homes: Homes,
}

/// Speeds of devices are alike up to this part of the fastest one.
const ALIKE: f64 = 0.1;
/// Bounds of shares are exact but for the rounding of sums.
const ROUNDING: f64 = 1e-6;

/// The examples of each device, or the parts of a batch where none may be cut.
struct Shares {
    /// Number of examples, or of parts.
    batch: usize,
    /// Examples or parts from and to, by share; none is empty.
    ranges: Vec<Range<usize>>,
    /// The number of the device of each share, from 0 on.
    devices: Vec<usize>,
    /// Number of leaves of the tree of sums, of which the shares are the first; none if each device has one share.
    leaves: Option<usize>,
}

impl Shares {
    /// A share for each device: nearly equal ones, or by speed if the devices' speeds differ. With fewer examples than
    /// devices, the first ones have one each.
    fn of_devices(batch: usize, speeds: &[f64]) -> Shares {
        let n = speeds.len().min(batch).max(1);
        let speeds = &speeds[..n.min(speeds.len())];
        let fastest = speeds.iter().copied().fold(0.0, f64::max);
        let alike = |speed: &f64| *speed > fastest * (1.0 - ALIKE);
        let is_speed = |speed: &f64| speed.is_finite() && *speed > 0.0;
        let is_known = speeds.len() == n && speeds.iter().all(is_speed);
        let weights: Vec<f64> = match is_known && !speeds.iter().all(alike) {
            true => speeds.to_vec(),
            false => vec![1.0; n],
        };
        let all: f64 = weights.iter().sum();
        let mut ranges: Vec<Range<usize>> = Vec::with_capacity(n);
        let (mut before, mut start) = (0.0, 0);
        for (r, weight) in weights.iter().enumerate() {
            before += weight;
            let end = (batch as f64 * before / all + ROUNDING) as usize;
            // Each device has an example, the later ones too.
            let end = end.max(start + 1).min(batch - (n - 1 - r));
            ranges.push(start..end);
            start = end;
        }
        Shares {
            batch,
            ranges,
            devices: (0..n).collect(),
            leaves: None,
        }
    }

    /// A number of equal shares, as many for each device. With fewer examples than shares, each has one, and the devices
    /// have blocks of them, all of a size but for the last.
    fn in_tree(batch: usize, leaves: usize, n_devices: usize) -> Shares {
        let n = leaves.min(batch).max(1);
        let bound = |r: usize| batch * r / n;
        // Aligned with the pairs of the tree.
        let blocks = n.next_power_of_two().min(leaves);
        let n_devices = n_devices.min(blocks);
        Shares {
            batch,
            ranges: (0..n).map(|r| bound(r)..bound(r + 1)).collect(),
            devices: (0..n).map(|r| r * n_devices / blocks).collect(),
            leaves: Some(leaves),
        }
    }

    /// Number of shares.
    fn n(&self) -> usize {
        self.ranges.len()
    }

    /// Devices with a share.
    fn n_devices(&self) -> usize {
        self.devices.last().map_or(1, |last| last + 1)
    }

    /// The first share of a device.
    fn first_of(&self, device: usize) -> usize {
        let found = self.devices.iter().position(|d| *d == device);
        found.unwrap_or(0)
    }

    /// The part of an axis of some extent, along which the batch lies once, of a share.
    fn part(&self, r: usize, extent: usize) -> Range<usize> {
        let unit = extent / self.batch;
        let Range { start, end } = &self.ranges[r];
        start * unit..end * unit
    }

    /// The extent of a share's shard of an axis of some extent.
    fn extent(&self, r: usize, extent: usize) -> usize {
        extent / self.batch * self.ranges[r].len()
    }

    /// True when an axis of this extent can be cut between examples, with the batch so many times along it.
    fn cuts(&self, extent: usize, outer: usize) -> bool {
        extent > 0 && extent.is_multiple_of(self.batch.saturating_mul(outer))
    }
}

/// The devices of a division.
pub struct Machine {
    /// Speeds of those with a share, in any unit.
    pub speeds: Vec<f64>,
    /// True if small sums are to be joined to buckets: fewer transfers, for more copies.
    pub has_slow_links: bool,
}

/// Errors with `Unsupported` when a node asks for a device by itself or waits for others by control dependencies, when a
/// region uses variables, and on an all-reduce.
pub fn check_divisible(g: &Graph) -> Result<()> {
    g.nodes().try_for_each(|(_, node)| check(node))
}

/// Puts a graph of static shapes on several devices, each with a share of the batch, which is the first axis
/// of the inputs named. [`check_divisible`] has passed it, before state was ordered; that order is to be made again.
/// Gives a note, too, if there are nodes for which shards are joined.
pub fn split_batch(
    g: &Graph,
    inputs: &[String],
    on: &DataParallel,
    machine: &Machine,
) -> Result<(Graph, Option<String>)> {
    let extent = |name: &String| {
        let at = g.input_names.iter().position(|own| own == name)?;
        g.ty(g.inputs[at]).shape.first()?.as_usize()
    };
    let batch = inputs.first().and_then(extent).unwrap_or(1);
    let has_parts = on.parts > 1 && batch.is_multiple_of(on.parts);
    let n = if has_parts { on.parts } else { batch };
    let shares = match on.shards {
        0 => Shares::of_devices(n, &machine.speeds),
        leaves => Shares::in_tree(n, leaves, on.devices.len()),
    };
    let plan = Plan::of(g, inputs, &shares, &on.sums);
    let request = |d: &DeviceName| DeviceRequest::from(d).into_requested();
    let places = Places {
        devices: on.devices.iter().map(request).collect(),
        servers: on.servers.iter().map(request).collect(),
        homes: Homes::of(g, &plan, on.servers.len(), on.deal),
    };
    let note = joined::note(g, &plan);
    let divided = Emitter::new(g, &plan, &shares, &places).graph()?;
    let divided = match machine.has_slow_links {
        true => buckets::in_buckets(divided)?,
        false => divided,
    };
    Ok((divided, note))
}

/// Puts a push and a pull of its variables on servers: the variables as they are dealt, other nodes where the fewest
/// bytes cross.
pub fn place_on_servers([push, pull]: [&mut Graph; 2], servers: &[DeviceName], deal: Deal) {
    let plan = Plan::of(push, &[], &Shares::in_tree(1, 1, 1), "");
    let homes = Homes::of(push, &plan, servers.len(), deal);
    let mut of_variables = homes.of_variables(push);
    homes::deal_others(pull, &mut of_variables, servers.len(), deal);
    let request = |home: usize| match servers.get(home) {
        Some(server) => DeviceRequest::from(server).into_requested(),
        None => Requested::default(),
    };
    push.request_each(|g, node| request(homes.at(g.node(node).outputs[0])));
    pull.request_each(|g, node| {
        let mut used = variable_uses(g.node(node)).into_iter();
        let (container, name) = used.next().map_or(("", ""), |(variable, _)| variable);
        let key = (container.to_owned(), name.to_owned());
        request(of_variables.get(&key).copied().unwrap_or(0))
    });
}

fn check(node: &Node) -> Result<()> {
    if node.device.as_ref().is_some_and(|d| !d.is_open()) {
        let message = "a batch is divided among devices, and the node asks for one by itself";
        return Err(Error::unsupported(message)
            .at_origin(&node.origin)
            .hint("without device scopes, or without a strategy"));
    }
    let refused = |why: &str, hint: &str| {
        let e = Error::unsupported(format!("a batch is divided among devices, and {why}"));
        Err(e.at_origin(&node.origin).hint(hint))
    };
    if node.regions.iter().any(Graph::has_state) {
        return refused(
            "a branch or loop uses variables",
            "read them before it, and assign them behind it",
        );
    }
    if !node.control.is_empty() {
        return refused(
            "the node waits for others by control dependencies",
            "without with_control_dependencies",
        );
    }
    if matches!(node.op, Op::AllReduce { .. }) {
        return refused(
            "the graph has an all-reduce of its own",
            "without it: sums over the batch are over all devices",
        );
    }
    Ok(())
}
