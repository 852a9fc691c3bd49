//! Output of code generation: kernels, and for each cluster the steps that compute it.

use super::cpu::Fallback;
use crate::ir::NodeId;
use gristmill_runtime::gpu::GpuCode;
use gristmill_runtime::program::{CpuKernel, Kernel};
use gristmill_runtime::{DType, Tensor};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, OnceLock};

/// A buffer that a step of a cluster reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Arg {
    /// Operand of the cluster node: the buffer of `node.inputs[i]`.
    Operand(u32),
    /// Result of the cluster node: the buffer of `node.outputs[i]`.
    Result(u32),
    /// Index into [`KernelPlan::scratch`].
    Scratch(u32),
    /// Index into [`KernelPlan::packed`].
    Packed(u32),
}

/// One call of a kernel over its items.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanStep {
    /// Index into [`CompiledKernels::kernels`].
    pub kernel: usize,
    /// Buffers in the kernel's order: first those that it only reads, then those that it writes.
    pub args: Vec<Arg>,
    /// Number of written buffers, the last ones of `args`.
    pub n_outputs: u32,
    /// Work items, at least 1; all are independent.
    pub items: u64,
    /// Smallest number of items for a thread; 0 is serial.
    pub grain: u64,
}

impl PlanStep {
    /// The buffers it reads alone, and those it writes.
    pub fn reads_and_writes(&self) -> (&[Arg], &[Arg]) {
        self.args
            .split_at(self.args.len() - self.n_outputs as usize)
    }
}

/// The computation of one cluster: steps in order, each of which may read results of earlier ones.
///
/// Operands that no step names (weights that were packed, for instance) need no buffer. A result with no elements is written by no step.
#[derive(Clone, Debug, Default)]
pub struct KernelPlan {
    /// Steps in a legal serial order.
    pub steps: Vec<PlanStep>,
    /// Sizes in bytes of the intermediate buffers, which live only within this plan.
    pub scratch: Vec<usize>,
    /// Constants made by code generation: packed weights, tables.
    pub packed: Vec<PackedConstant>,
    /// `(operand, result)` pairs of the cluster node whose bytes may be the same: each element of the
    /// operand is read before its own place is written, and never again.
    pub in_place: Vec<(u32, u32)>,
    /// True when the first step only copies the operand of the one pair of `in_place` to its result: nothing to do where they are in one
    /// place.
    pub begins_with_copy: bool,
}

/// A constant made by code generation.
#[derive(Clone, Debug)]
pub struct PackedConstant {
    /// Its elements.
    pub elements: Elements,
    /// The constant operand that it is a part of. `None` for a constant that follows from the
    /// cluster's body and the target: a descriptor, a table, a constant of the body.
    pub weight: Option<WeightPart>,
}

/// Elements of a constant, made once all kernels of its graph are chosen.
#[derive(Clone, Debug)]
pub struct Elements(Arc<Made>);

#[derive(Debug)]
struct Made {
    dtype: DType,
    shape: Vec<usize>,
    tensor: OnceLock<Tensor>,
}

impl Elements {
    /// Elements of a type, to be made.
    pub(super) fn of(dtype: DType, shape: &[usize]) -> Elements {
        Elements(Arc::new(Made {
            dtype,
            shape: shape.to_vec(),
            tensor: OnceLock::new(),
        }))
    }

    /// The tensor.
    pub fn tensor(&self) -> &Tensor {
        let made = self.0.tensor.get();
        made.expect("constants are packed before the kernels of their graph are used")
    }

    /// True for equal elements, or for elements of one type which are still to be made.
    pub fn is_same(&self, other: &Elements) -> bool {
        let is_equal = |a: &Tensor, b: &Tensor| {
            (a.dtype(), a.shape()) == (b.dtype(), b.shape())
                && (a.as_ptr() == b.as_ptr() || a.as_bytes() == b.as_bytes())
        };
        match (self.0.tensor.get(), other.0.tensor.get()) {
            (Some(a), Some(b)) => is_equal(a, b),
            _ => (self.0.dtype, &self.0.shape) == (other.0.dtype, &other.0.shape),
        }
    }

    /// True if a plan has them.
    pub(super) fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    pub(super) fn set(&self, made: Tensor) {
        // They are set once: a key has one job.
        let _ = self.0.tensor.set(made);
    }
}

impl fmt::Display for Elements {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:?}", self.0.dtype, self.0.shape)
    }
}

impl From<Tensor> for Elements {
    fn from(tensor: Tensor) -> Elements {
        let elements = Elements::of(tensor.dtype(), tensor.shape());
        elements.set(tensor);
        elements
    }
}

/// A part of a constant operand, in a layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightPart {
    /// Index into the inputs of the cluster node.
    pub operand: usize,
    /// View and layout, as [`ConstantStore`](super::store::ConstantStore) describes them: all that
    /// decides the elements beside the operand.
    pub layout: String,
}

impl From<Tensor> for PackedConstant {
    fn from(tensor: Tensor) -> PackedConstant {
        PackedConstant {
            elements: tensor.into(),
            weight: None,
        }
    }
}

/// Kernels of one part in the runtime's types, from any back end.
#[derive(Clone)]
pub struct DeviceKernels {
    /// Entry points.
    pub kernels: Vec<Kernel>,
    /// Code of GPU kernels.
    pub gpu_code: Vec<GpuCode>,
    /// A plan for each cluster node.
    pub plans: BTreeMap<NodeId, KernelPlan>,
}

/// The kernels of a graph's clusters on a CPU and how to call them.
#[derive(Clone)]
pub struct CompiledKernels {
    /// Entry points.
    pub kernels: Vec<CpuKernel>,
    /// A plan for each cluster node.
    pub plans: BTreeMap<NodeId, KernelPlan>,
    /// Ops that run in generated loops although they have a kernel.
    pub fallbacks: Vec<Fallback>,
}
