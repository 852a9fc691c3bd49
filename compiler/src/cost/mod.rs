//! Predicted times: a roofline over clusters and ops.
//!
//! `time = launch + max(arithmetic, bytes / bandwidth)`, where arithmetic is the sum over the ops of a cluster of `flops / (peak * efficiency of
//! the class)`, and bytes are what the cluster must read and write. Measured times, once there are any, replace estimates.

mod link;
mod profile;
mod units;
pub mod work;

pub use link::LinkProfile;
pub use profile::DeviceProfile;
pub use units::{Bytes, Nanos, Picos};
pub use work::{Extents, Work, WorkClass};

use crate::ir::{Graph, Layout, Node, NodeId, Op, Type};
use gristmill_runtime::device::DeviceKind;
use std::collections::BTreeMap;

/// Predicts times of nodes on devices.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CostModel {
    /// How symbolic extents are read.
    pub extents: Extents,
    /// Measured times by kind of device and [`signature`]; they replace estimates.
    pub measured: BTreeMap<(DeviceKind, u64), Nanos>,
}

impl CostModel {
    /// Time of one node of a graph, cluster or plain op, on a device. Constants take no time; loops take the time of their bodies.
    pub fn node_ns(&self, g: &Graph, id: NodeId, device: &DeviceProfile) -> Nanos {
        self.time_of(g, g.node(id), device)
    }

    fn time_of(&self, g: &Graph, node: &Node, device: &DeviceProfile) -> Nanos {
        if !self.measured.is_empty()
            && let Some(&t) = self.measured.get(&(device.kind, signature(g, node)))
        {
            return t;
        }
        match &node.op {
            Op::Constant { .. } => Nanos::ZERO,
            Op::Cluster { .. } => {
                let body = &node.regions[0];
                let arithmetic = body.nodes().map(|(_, n)| self.arithmetic_seconds(body, n, device)).sum();
                let factor = body.nodes().map(|(_, n)| layout_factor(&n.op)).max().unwrap_or(1);
                self.roofline(arithmetic, work::traffic(g, node, &self.extents), factor, device).nanos()
            }
            Op::If => node.regions.iter().map(|r| self.graph_ns(r, device)).max().unwrap_or(Nanos::ZERO),
            Op::Loop { trip, .. } => self.graph_ns(&node.regions[0], device).times(self.extents.of(trip)),
            Op::Scan { length, .. } => self.graph_ns(&node.regions[0], device).times(self.extents.of(length)),
            _ => {
                let arithmetic = self.arithmetic_seconds(g, node, device);
                self.roofline(arithmetic, work::traffic(g, node, &self.extents), layout_factor(&node.op), device)
                    .nanos()
            }
        }
    }

    /// Time of all nodes of a graph one after another.
    pub fn graph_ns(&self, g: &Graph, device: &DeviceProfile) -> Nanos {
        g.nodes().map(|(_, n)| self.time_of(g, n, device)).sum()
    }

    /// Seconds of arithmetic of one op on a device, and the bytes that it moves as a kernel of its own.
    pub fn of_op(&self, op: &Op, operands: &[&Type], results: &[Type], device: &DeviceProfile) -> (f64, Bytes) {
        let arithmetic = seconds(work::of_op(op, operands, results, &self.extents), device);
        (arithmetic, work::op_traffic(op, operands, results, &self.extents))
    }

    /// Seconds of arithmetic of a node, regions aside: neither launch nor memory traffic.
    pub fn arithmetic_seconds(&self, g: &Graph, node: &Node, device: &DeviceProfile) -> f64 {
        let types = |ids: &[crate::ir::ValueId]| -> Vec<&Type> { ids.iter().map(|&v| g.ty(v)).collect() };
        seconds(work::of_op(&node.op, &types(&node.inputs), &types(&node.outputs), &self.extents), device)
    }

    /// Time of a kernel with so much arithmetic (seconds) and memory traffic, multiplied by `factor`.
    pub fn roofline(&self, arithmetic_seconds: f64, traffic: Bytes, factor: u64, device: &DeviceProfile) -> Picos {
        let work = Picos::from_seconds(arithmetic_seconds.max(self.memory_seconds(traffic, device)));
        (Picos::from(device.launch) + work).times(factor)
    }

    /// Seconds that a kernel takes to move so many bytes.
    pub fn memory_seconds(&self, traffic: Bytes, device: &DeviceProfile) -> f64 {
        let bandwidth = if traffic <= device.cache_bytes { device.cache_bandwidth } else { device.memory_bandwidth };
        traffic.0 as f64 / bandwidth
    }

    /// Size of a tensor under the model's assumptions.
    pub fn bytes(&self, ty: &Type) -> Bytes {
        self.extents.bytes(ty)
    }
}

/// How many times longer an op takes because of the layout of its operands: the kernels of convolutions and pools are channels-last, so that
/// code generation copies operand and result.
pub fn layout_factor(op: &Op) -> u64 {
    match op {
        Op::Conv { layout: Layout::ChannelsFirst, .. } | Op::Pool { layout: Layout::ChannelsFirst, .. } => 4,
        _ => 1,
    }
}

fn seconds(w: Work, device: &DeviceProfile) -> f64 {
    w.flops.saturating_add(w.overhead_flops) as f64 / (device.peak_flops(w.dtype) * device.efficiency(w.class, w.dtype))
}

/// A stable hash of what a node computes: op, attributes, body, operand and result types; not its names. Keys measured times.
pub fn signature(g: &Graph, node: &Node) -> u64 {
    use crate::ir::print::PrintOptions;
    let mut text = format!("{} {:?}", node.op.name(), node.op.attrs());
    for r in &node.regions {
        text += &r.to_text(PrintOptions { elide_above: 0, origins: false, asked_by: false });
    }
    for &v in node.inputs.iter().chain(&node.outputs) {
        text += &format!(" {}", g.ty(v));
    }
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests;
