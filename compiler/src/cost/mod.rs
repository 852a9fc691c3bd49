//! Predicted times: a roofline over clusters and ops.
//!
//! `time = launch + max(arithmetic, bytes / bandwidth)`, where arithmetic is the sum over the ops
//! of a cluster of `flops / (peak * efficiency of the class)`, and bytes is the memory traffic that
//! the cluster cannot avoid. Measured times correct the estimates of their clusters, and within
//! bounds those of similar ones: see [`measured`].

mod filtering;
pub mod measured;
mod profile;
pub mod store;
mod tiles;
pub mod work;

pub use crate::ir::WorkClass;
pub use gristmill_solver::{Bytes, LinkProfile, Nanos, Picos};
pub use measured::{Evidence, Measured};
pub use profile::DeviceProfile;
pub use work::{Extents, Work};

use crate::ir::{Dim, Graph, Layout, Node, NodeId, Op, Type, ValueId};
use gristmill_runtime::DType;
use gristmill_runtime::device::DeviceKind;
use std::borrow::Borrow;
use std::fmt::Write;
use std::sync::Arc;

/// Predicts times of nodes on devices.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CostModel {
    /// Values of symbolic extents.
    pub extents: Extents,
    /// Measured times; run by run, they replace the prediction of the roofline.
    pub measured: Arc<Measured>,
    /// True where CPUs sum all convolutions directly, and none by minimal filtering.
    pub direct_convolutions: bool,
}

/// An hour: loops that take longer count as this long, so that a model with one can be placed.
const LONGEST_LOOP: Nanos = Nanos(3600 * 1_000_000_000);

/// Bytes that the body of a loop finds in the caches of a CPU, the last-level one included.
const LOOP_CACHE: Bytes = Bytes(16 << 20);

impl CostModel {
    /// Time of one node of a graph, cluster or plain op, on a device. Constants take no time; loops take the time of their bodies.
    pub fn node_ns(&self, g: &Graph, id: NodeId, device: &DeviceProfile) -> Nanos {
        self.time_of(g, g.node(id), device)
    }

    /// The same without any measurement.
    pub fn analytic_ns(&self, g: &Graph, node: &Node, device: &DeviceProfile) -> Nanos {
        CostModel {
            extents: self.extents.clone(),
            measured: Arc::default(),
            direct_convolutions: self.direct_convolutions,
        }
        .roofline_of(g, node, device)
    }

    fn time_of(&self, g: &Graph, node: &Node, device: &DeviceProfile) -> Nanos {
        if self.measured.is_empty() {
            return self.roofline_of(g, node, device);
        }
        self.estimate(g, node, device).0
    }

    /// The time of a node on a device, and whether it was measured.
    pub fn estimate(&self, g: &Graph, node: &Node, device: &DeviceProfile) -> (Nanos, Evidence) {
        let analytic = self.analytic_ns(g, node, device);
        self.measured.estimate(self, (g, node), device, analytic)
    }

    fn roofline_of(&self, g: &Graph, node: &Node, device: &DeviceProfile) -> Nanos {
        let body_ns = |n_runs: &Dim| {
            let (body, n) = (&node.regions[0], self.extents.of(n_runs));
            let first = self.graph_ns(body, device);
            let others = self.warm_ns(body, first, device);
            let all = first.times(n.min(1)) + others.times(n.saturating_sub(1));
            // A body that takes longer is one that the device cannot run.
            if first < LONGEST_LOOP {
                all.min(LONGEST_LOOP)
            } else {
                all
            }
        };
        match &node.op {
            Op::Constant { .. } => Nanos::ZERO,
            // Variables are where they are; without any time, their results would take no memory.
            Op::ReadVariable { .. } | Op::AssignVariable { .. } => Nanos(1),
            Op::If => {
                let branches = node.regions.iter().map(|r| self.graph_ns(r, device));
                branches.max().unwrap_or(Nanos::ZERO)
            }
            Op::Loop { trip, .. } => body_ns(trip),
            Op::Scan { length, .. } => body_ns(length),
            _ => self.kernels_ns(g, node, device),
        }
    }

    /// Time of a cluster, or of an op as a kernel of its own.
    fn kernels_ns(&self, g: &Graph, node: &Node, device: &DeviceProfile) -> Nanos {
        let (arithmetic, factor) = match (&node.op, node.regions.first()) {
            (Op::Cluster { .. }, Some(body)) => {
                let ops = || body.nodes().map(|(_, n)| n);
                let seconds = ops().map(|n| self.arithmetic_seconds(body, n, device));
                let factor = ops().map(|n| layout_factor(&n.op)).max();
                (seconds.sum(), factor.unwrap_or(1))
            }
            (op, _) => (self.arithmetic_seconds(g, node, device), layout_factor(op)),
        };
        let seconds = arithmetic + self.packing_seconds(g, node, device);
        self.kernel_ns(g, node, seconds, factor, device)
    }

    /// Time of an iteration that is not the first, which takes `cold`: where all that a body touches fits the caches of a CPU, it is there.
    fn warm_ns(&self, body: &Graph, cold: Nanos, device: &DeviceProfile) -> Nanos {
        // Loops in a loop find the larger cache already, and are not priced twice.
        if device.cache_bytes >= LOOP_CACHE {
            return cold;
        }
        let traffic = body
            .nodes()
            .map(|(_, n)| work::traffic(body, n, &self.extents));
        if device.kind != DeviceKind::Cpu || traffic.sum::<Bytes>() > LOOP_CACHE {
            return cold;
        }
        let warm = DeviceProfile {
            cache_bytes: LOOP_CACHE,
            ..device.clone()
        };
        self.graph_ns(body, &warm)
    }

    /// Time of a node with so much arithmetic (seconds), multiplied by `factor`.
    fn kernel_ns(
        &self,
        g: &Graph,
        node: &Node,
        arithmetic_seconds: f64,
        factor: u64,
        device: &DeviceProfile,
    ) -> Nanos {
        let traffic = work::traffic(g, node, &self.extents);
        self.roofline(arithmetic_seconds, traffic, factor, device)
            .nanos()
    }

    /// Time of all nodes of a graph one after another.
    pub fn graph_ns(&self, g: &Graph, device: &DeviceProfile) -> Nanos {
        g.nodes().map(|(_, n)| self.time_of(g, n, device)).sum()
    }

    /// Seconds of arithmetic of one op on a device, and the bytes that it moves as a kernel of its own.
    pub fn of_op(
        &self,
        op: &Op,
        operands: &[&Type],
        results: &[Type],
        device: &DeviceProfile,
    ) -> (f64, Bytes) {
        (
            self.arithmetic(op, operands, results, device),
            work::op_traffic(op, operands, results, &self.extents),
        )
    }

    /// Seconds of arithmetic of a node, regions aside: neither launch nor memory traffic.
    pub fn arithmetic_seconds(&self, g: &Graph, node: &Node, device: &DeviceProfile) -> f64 {
        let types = |ids: &[ValueId]| -> Vec<&Type> { ids.iter().map(|&v| g.ty(v)).collect() };
        self.arithmetic(
            &node.op,
            &types(&node.inputs),
            &types(&node.outputs),
            device,
        )
    }

    fn arithmetic(
        &self,
        op: &Op,
        operands: &[&Type],
        results: &[impl Borrow<Type>],
        device: &DeviceProfile,
    ) -> f64 {
        let work = work::of_op(op, operands, results, &self.extents);
        if device.kind != DeviceKind::Cpu {
            return seconds(work, device);
        }
        let results: Vec<&Type> = results.iter().map(Borrow::borrow).collect();
        let direct = match tiles::operations(op, operands, &results, &self.extents, device) {
            // Operations of kernels count in time of `f32`, those of bytes too.
            Some(operations) => {
                let dtype = DType::F32;
                operations / rate(&Work { dtype, ..work }, device)
            }
            None => seconds(work, device),
        };
        let stores = match op {
            Op::MatMul | Op::Conv { .. } => self.store_seconds(&results, device),
            _ => 0.0,
        };
        let share = match self.direct_convolutions {
            true => 1.0,
            false => filtering::share(op, operands, &self.extents),
        };
        direct * share + stores
    }

    /// Time beside the arithmetic for results larger than the cache, in seconds: tiles are written when they are done, and nothing else
    /// happens then.
    fn store_seconds(&self, results: &[&Type], device: &DeviceProfile) -> f64 {
        let bytes: Bytes = results.iter().map(|ty| self.extents.bytes(ty)).sum();
        match bytes <= device.cache_bytes {
            true => 0.0,
            false => self.memory_seconds(bytes, device),
        }
    }

    /// Time to pack variable right-hand sides on a CPU, in seconds.
    fn packing_seconds(&self, g: &Graph, node: &Node, device: &DeviceProfile) -> f64 {
        match device.kind {
            DeviceKind::Cpu => {
                let bytes = tiles::packed_bytes(g, node, &self.extents, device);
                self.memory_seconds(Bytes(bytes), device)
            }
            _ => 0.0,
        }
    }

    /// The rate that limits a cluster: `matmul f32` where most of its arithmetic is that, `memory`
    /// or `cache` where traffic takes longer.
    pub(crate) fn limiting_rate(&self, g: &Graph, node: &Node, device: &DeviceProfile) -> String {
        let body = node.regions.first().unwrap_or(g);
        let (mut arithmetic, mut largest, mut name) = (0.0, 0.0, String::new());
        for (_, n) in body.nodes() {
            let seconds = self.arithmetic_seconds(body, n, device);
            arithmetic += seconds;
            if seconds > largest {
                (largest, name) = (seconds, self.work_name(body, n));
            }
        }
        let traffic = work::traffic(g, node, &self.extents);
        if arithmetic > self.memory_seconds(traffic, device) {
            return name;
        }
        let is_cached = traffic <= device.cache_bytes;
        if is_cached { "cache" } else { "memory" }.to_owned()
    }

    /// Class and dtype of a node's arithmetic.
    fn work_name(&self, g: &Graph, node: &Node) -> String {
        let types = |ids: &[ValueId]| -> Vec<&Type> { ids.iter().map(|&v| g.ty(v)).collect() };
        let (operands, results) = (types(&node.inputs), types(&node.outputs));
        let work = work::of_op(&node.op, &operands, &results, &self.extents);
        format!("{} {}", work.class.name(), work.dtype.name())
    }

    /// Time of a kernel with so much arithmetic (seconds) and memory traffic, multiplied by `factor`.
    pub fn roofline(
        &self,
        arithmetic_seconds: f64,
        traffic: Bytes,
        factor: u64,
        device: &DeviceProfile,
    ) -> Picos {
        let work =
            Picos::from_seconds(arithmetic_seconds.max(self.memory_seconds(traffic, device)));
        (Picos::from(device.launch) + work).times(factor)
    }

    /// Seconds that a kernel takes to move so many bytes.
    pub fn memory_seconds(&self, traffic: Bytes, device: &DeviceProfile) -> f64 {
        let bandwidth = if traffic <= device.cache_bytes {
            device.cache_bandwidth
        } else {
            device.memory_bandwidth
        };
        traffic.0 as f64 / bandwidth
    }

    /// Size of a tensor under the model's assumptions.
    pub fn bytes(&self, ty: &Type) -> Bytes {
        self.extents.bytes(ty)
    }
}

/// Slowdown of an op by the layout of its operands: the kernels of convolutions and pools are
/// channels-last, so that code generation copies operand and result.
pub fn layout_factor(op: &Op) -> u64 {
    match op {
        Op::Conv {
            layout: Layout::ChannelsFirst,
            ..
        }
        | Op::Pool {
            layout: Layout::ChannelsFirst,
            ..
        }
        | Op::MaxPoolGrad {
            layout: Layout::ChannelsFirst,
            ..
        } => 4,
        _ => 1,
    }
}

fn seconds(w: Work, device: &DeviceProfile) -> f64 {
    w.flops.saturating_add(w.overhead_flops) as f64 / rate(&w, device)
}

/// Operations per second of a class and dtype.
fn rate(w: &Work, device: &DeviceProfile) -> f64 {
    device.peak_flops(w.dtype) * device.efficiency(w.class, w.dtype)
}

/// A stable hash of a node's computation: op, attributes, body, operand and result types; no names
/// and no contents of constants. Keys measured times.
pub fn signature(g: &Graph, node: &Node) -> u64 {
    let mut text = String::new();
    write_node(&mut text, g, node).expect("writing to a String does not fail");
    fnv(text.as_bytes())
}

/// Op and types of a node, then its regions; values of a region by their numbers.
fn write_node(out: &mut String, g: &Graph, node: &Node) -> std::fmt::Result {
    match &node.op {
        Op::Constant { .. } => write!(out, "constant")?,
        op => write!(out, "{} {:?}", op.name(), op.attrs())?,
    }
    for &v in node.inputs.iter().chain(&node.outputs) {
        write!(out, " {}", g.ty(v))?;
    }
    for region in &node.regions {
        writeln!(out, " {{ {:?}", region.inputs)?;
        for (_, n) in region.nodes() {
            write!(out, "{:?} = {:?} ", n.outputs, n.inputs)?;
            write_node(out, region, n)?;
            writeln!(out)?;
        }
        region
            .outputs
            .iter()
            .try_for_each(|o| write!(out, "{:?} ", o.value))?;
        write!(out, "}}")?;
    }
    Ok(())
}

/// FNV-1a.
fn fnv(bytes: &[u8]) -> u64 {
    Fnv::default().with(bytes).0
}

/// FNV-1a of a text while it is written.
#[derive(Clone, Copy)]
pub struct Fnv(u64);

impl Fnv {
    /// The hash with further bytes.
    pub fn with(self, bytes: &[u8]) -> Fnv {
        Fnv(bytes.iter().fold(self.0, |h, &b| {
            (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3)
        }))
    }

    /// The hash with further bytes, eight at a time: another one than that of [`Fnv::with`], for large data.
    pub fn with_words(self, bytes: &[u8]) -> Fnv {
        let (words, rest) = bytes.as_chunks::<8>();
        let hash = words.iter().fold(self.0, |h, word| {
            let h = (h ^ u64::from_le_bytes(*word)).wrapping_mul(0x0100_0000_01b3);
            // A product moves bits up only.
            h ^ h >> 32
        });
        Fnv(hash).with(rest)
    }

    /// The hash of all text so far.
    pub fn value(self) -> u64 {
        self.0
    }
}

impl Default for Fnv {
    fn default() -> Fnv {
        Fnv(0xcbf2_9ce4_8422_2325)
    }
}

impl std::fmt::Write for Fnv {
    fn write_str(&mut self, s: &str) -> std::fmt::Result {
        *self = self.with(s.as_bytes());
        Ok(())
    }
}

/// Operations of a graph by the op table.
pub(crate) fn flops(g: &Graph) -> f64 {
    let unit = DeviceProfile {
        kind: DeviceKind::Gpu,
        ..DeviceProfile::this_cpu(1)
    };
    operations(g, unit)
}

/// Operations of a graph on this CPU, with the time of tiles and windows beside the sums as operations.
pub(crate) fn flops_on_cpu(g: &Graph) -> f64 {
    operations(g, DeviceProfile::this_cpu(1))
}

/// Operations of a graph on a device.
fn operations(g: &Graph, device: DeviceProfile) -> f64 {
    // On a device of one operation per second, at full efficiency, seconds are operations.
    let unit = DeviceProfile {
        flops_f32: 1.0,
        efficiencies: WorkClass::NAMES
            .iter()
            .map(|(class, _)| ((*class, None), 1.0))
            .collect(),
        ..device
    };
    let direct = CostModel {
        direct_convolutions: true,
        ..CostModel::default()
    };
    g.nodes()
        .map(|(_, n)| direct.arithmetic_seconds(g, n, &unit))
        .sum()
}

#[cfg(test)]
mod tests;
