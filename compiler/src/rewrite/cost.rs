//! Predicted time of single ops, in nanoseconds: the roofline `max(flops / peak, bytes / bandwidth)` plus a launch.
//!
//! It prices ops one by one, before clusters are formed. Views that fold into their users cost nothing; what depends on
//! constants only costs nothing, since constant folding computes it once.

use super::lang::{ENode, Sym};
use super::terms::Terms;
use crate::ir::{Bindings, Dim, Layout, Op, OpClass, Type};
use egg::Id;

/// What the target can do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostParams {
    /// Floating-point operations per nanosecond of contractions, at their best.
    pub flops_per_ns: f64,
    /// Floating-point operations per nanosecond of element-wise code.
    pub map_flops_per_ns: f64,
    /// Bytes per nanosecond to and from memory.
    pub bytes_per_ns: f64,
    /// Nanoseconds to start one kernel.
    pub launch_ns: f64,
    /// Extent assumed for a symbolic dim.
    pub symbol_extent: usize,
}

impl Default for CostParams {
    fn default() -> CostParams {
        CostParams {
            flops_per_ns: 250.0,
            map_flops_per_ns: 60.0,
            bytes_per_ns: 40.0,
            launch_ns: 1000.0,
            symbol_extent: 32,
        }
    }
}

/// Kernels and bytes of one op or of a graph, at op granularity, and their predicted time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Ops that need a kernel.
    pub kernels: u64,
    /// Bytes read and written by them.
    pub bytes: f64,
    /// Predicted nanoseconds.
    pub ns: f64,
}

impl std::ops::AddAssign for Work {
    fn add_assign(&mut self, o: Work) {
        self.kernels += o.kernels;
        self.bytes += o.bytes;
        self.ns += o.ns;
    }
}

/// Operations per element of a softmax.
const SOFTMAX_FLOPS: f64 = 18.0;

/// Channels-first convolutions and pools read their operands with strides; the kernels are channels-last.
const CHANNELS_FIRST_FACTOR: f64 = 4.0;

/// Shares of the traffic and of the launch of an element-wise op that are left when it joins a cluster, as nearly all do.
const FUSED_TRAFFIC: f64 = 0.3;
const FUSED_LAUNCH: f64 = 0.02;

impl CostParams {
    /// Number of elements, symbols taken as [`CostParams::symbol_extent`].
    fn n_elements(&self, ty: &Type) -> f64 {
        ty.shape.iter().map(|d| self.extent(d)).product()
    }

    fn extent(&self, d: &Dim) -> f64 {
        if let Some(c) = d.as_const() {
            return c.max(0) as f64;
        }
        let mut bindings = Bindings::new();
        d.visit_symbols(&mut |s| {
            bindings.insert(s.to_owned(), self.symbol_extent);
        });
        d.bind(&bindings).as_const().unwrap_or(1).max(0) as f64
    }

    fn bytes(&self, ty: &Type) -> f64 {
        self.n_elements(ty) * ty.dtype.size_bytes() as f64
    }

    /// Work of one op from its operand and result types.
    pub fn op(&self, op: &Op, args: &[&Type], results: &[Type]) -> Work {
        let moved =
            || args.iter().map(|t| self.bytes(t)).sum::<f64>() + results.iter().map(|t| self.bytes(t)).sum::<f64>();
        let out = results.first().map_or(0.0, |t| self.n_elements(t));
        let (flops_ns, bytes) = match op.class() {
            OpClass::Source => return Work::default(),
            OpClass::View if !matches!(op, Op::Transpose { .. } | Op::Pad { .. } | Op::Concat { .. }) => {
                return Work::default();
            }
            OpClass::Map => {
                let compute = self.map_flops(op) * out / self.map_flops_per_ns;
                let ns = compute + FUSED_TRAFFIC * moved() / self.bytes_per_ns + FUSED_LAUNCH * self.launch_ns;
                return Work { kernels: 1, bytes: moved(), ns };
            }
            OpClass::Contract => (self.contract_flops(op, args, results) / self.flops_per_ns, moved()),
            OpClass::Window => (out * self.window_taps(op) / self.map_flops_per_ns, moved()),
            OpClass::Attention => {
                let (q, k) = (args[0], args[1]);
                let scores = self.n_elements(q) / self.last(q).max(1.0) * self.extent(&k.shape[k.rank() - 2]);
                (
                    (4.0 * scores * self.last(q)) / self.flops_per_ns + SOFTMAX_FLOPS * scores / self.map_flops_per_ns,
                    moved(),
                )
            }
            OpClass::Reduce => {
                let passes = match op {
                    Op::Softmax { .. } => SOFTMAX_FLOPS,
                    Op::LayerNorm { .. } => 8.0,
                    Op::RmsNorm { .. } => 5.0,
                    _ => 1.0,
                };
                (passes * self.n_elements(args[0]) / self.map_flops_per_ns, moved())
            }
            OpClass::Gather => (0.0, 2.0 * self.bytes(&results[0]) + self.bytes(args[1])),
            _ => (0.0, moved()),
        };
        let ns = flops_ns.max(bytes / self.bytes_per_ns) + self.launch_ns;
        let slow = matches!(
            op,
            Op::Conv { layout: Layout::ChannelsFirst, .. } | Op::Pool { layout: Layout::ChannelsFirst, .. }
        );
        Work { kernels: 1, bytes, ns: if slow { ns * CHANNELS_FIRST_FACTOR } else { ns } }
    }

    fn last(&self, ty: &Type) -> f64 {
        ty.shape.last().map_or(1.0, |d| self.extent(d))
    }

    fn map_flops(&self, op: &Op) -> f64 {
        match op {
            Op::Map(s) => f64::from(s.spec().flops),
            _ => 1.0,
        }
    }

    fn contract_flops(&self, op: &Op, args: &[&Type], results: &[Type]) -> f64 {
        let out = self.n_elements(&results[0]);
        match op {
            Op::Conv { layout: Layout::ChannelsLast, .. } => {
                2.0 * out * self.n_elements(args[1]) / self.last(args[1]).max(1.0)
            }
            Op::Conv { .. } => 2.0 * out * self.n_elements(args[1]) / self.extent(&args[1].shape[0]).max(1.0),
            Op::ConvTranspose { .. } => {
                2.0 * self.n_elements(args[0]) * self.n_elements(args[1]) / self.extent(&args[1].shape[0]).max(1.0)
            }
            _ => 2.0 * out * self.last(args[0]),
        }
    }

    fn window_taps(&self, op: &Op) -> f64 {
        match op {
            Op::Pool { size, .. } | Op::MaxPoolIndices { size, .. } => size.iter().map(|&s| s as f64).product(),
            _ => 1.0,
        }
    }

    /// Work of an e-node as the choice for its class.
    pub(crate) fn node(&self, terms: &Terms, class: Id, node: &ENode) -> Work {
        let Sym::Op(id) = node.sym else { return Work::default() };
        if terms.is_constant(class) {
            return Work::default();
        }
        let args: Vec<&Type> = node.children.iter().map(|c| terms.ty(*c)).collect();
        let results = terms.eg.analysis.types(terms.facts(class).types);
        self.op(&terms.eg.analysis.op(id).op, &args, results)
    }
}
