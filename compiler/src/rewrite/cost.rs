//! Predicted time of single ops, before clusters are formed, from the one cost model.
//!
//! Views that fold into their users cost nothing. Element-wise ops cost the share of their traffic
//! that remains in a cluster. Ops on constants cost nothing, since constant folding computes them
//! once.

use super::lang::{ENode, Sym};
use super::terms::Terms;
use crate::cost::{Bytes, CostModel, DeviceProfile, Extents, Picos, layout_factor};
use crate::ir::{Bindings, Op, OpClass, Type};
use egg::Id;
use gristmill_kernels::Isa;

/// Extent assumed for a symbolic dim.
const SYMBOL_EXTENT: usize = 32;

/// The target and the model that predicts its times.
#[derive(Clone, Debug, PartialEq)]
pub struct Pricing {
    /// Rates of the target.
    pub device: DeviceProfile,
    /// Predicts times.
    pub costs: CostModel,
    /// True when only GPUs, real or emulated, run the clusters, so that these need to suit no CPU.
    pub only_gpus: bool,
    /// True when only CPUs do.
    pub only_cpus: bool,
    /// True when one device runs all clusters, and none is left to others.
    pub is_one_device: bool,
}

impl Default for Pricing {
    /// One core with AVX-512, on every machine.
    fn default() -> Pricing {
        Pricing::of(DeviceProfile::cpu(Isa::Avx512, 1))
    }
}

/// Kernels and bytes of one op or of a graph, at op granularity, and their predicted time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Ops that need a kernel.
    pub kernels: u64,
    /// Bytes read and written by them.
    pub bytes: Bytes,
    /// Predicted time.
    pub time: Picos,
}

impl std::ops::AddAssign for Work {
    fn add_assign(&mut self, o: Work) {
        self.kernels += o.kernels;
        self.bytes += o.bytes;
        self.time += o.time;
    }
}

/// Share of the traffic of an element-wise op that is left when it joins a cluster, as nearly all do.
const FUSED_TRAFFIC: f64 = 0.3;

/// Launches of so many element-wise ops make one.
const OPS_PER_FUSED_LAUNCH: u64 = 50;

impl Pricing {
    /// Prices of a device; symbols count as [`SYMBOL_EXTENT`] elements.
    pub fn of(device: DeviceProfile) -> Pricing {
        let extents = Extents {
            bindings: Bindings::new(),
            unknown_extent: SYMBOL_EXTENT,
        };
        Pricing {
            device,
            costs: CostModel {
                extents,
                ..CostModel::default()
            },
            only_gpus: false,
            only_cpus: true,
            is_one_device: true,
        }
    }

    /// Work of one op from its operand and result types.
    pub fn op(&self, op: &Op, args: &[&Type], results: &[Type]) -> Work {
        if is_free(op) {
            return Work::default();
        }
        let (arithmetic, bytes) = self.costs.of_op(op, args, results, &self.device);
        let time = match op.class() {
            OpClass::Map => self.fused(arithmetic, bytes),
            _ => self
                .costs
                .roofline(arithmetic, bytes, layout_factor(op), &self.device),
        };
        Work {
            kernels: 1,
            bytes,
            time,
        }
    }

    /// Time of an element-wise op as part of a cluster.
    fn fused(&self, arithmetic: f64, bytes: Bytes) -> Picos {
        let memory = FUSED_TRAFFIC * self.costs.memory_seconds(bytes, &self.device);
        let launch = Picos::from(self.device.launch).0 / OPS_PER_FUSED_LAUNCH;
        Picos::from_seconds(arithmetic + memory) + Picos(launch)
    }

    /// Work of an e-node as the choice for its class.
    pub(crate) fn node(&self, terms: &Terms, class: Id, node: &ENode) -> Work {
        let Sym::Op(id) = node.sym else {
            return Work::default();
        };
        if terms.is_constant(class) {
            return Work::default();
        }
        let args: Vec<&Type> = node.children.iter().map(|c| terms.ty(*c)).collect();
        let results = terms.eg.analysis.types(terms.facts(class).types);
        self.op(&terms.eg.analysis.op(id).op, &args, results)
    }
}

/// True for sources and for views that fold into their users.
fn is_free(op: &Op) -> bool {
    let copies = matches!(
        op,
        Op::Transpose { .. } | Op::Pad { .. } | Op::Concat { .. }
    );
    match op.class() {
        OpClass::Source => true,
        OpClass::View => !copies,
        _ => false,
    }
}
