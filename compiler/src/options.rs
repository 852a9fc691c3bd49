//! Options of compilation.

use crate::cost::Measured;
use crate::ir::Bindings;
use crate::place::{Fallback, Objective, Pin, Plan};
use crate::target::Arch;
use crate::target::TargetCpu;
use gristmill_runtime::DType;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Options of one model, for [`crate::compile`] and [`Session::compile`](crate::Session::compile). What concerns the machine is in
/// [`Settings`](crate::Settings). Any value is valid; a contradiction to the model is an error of compilation.
///
/// Fields are added from time to time: write `Options { opt_level: 3, ..Options::default() }`, which stays right. The struct is not
/// `#[non_exhaustive]`, since other crates could not write that then.
#[derive(Clone, Debug)]
pub struct Options {
    /// Devices forced on nodes by regular expressions over their paths.
    pub pins: Vec<Pin>,
    /// Treatment of nodes that the requested device cannot run.
    pub fallback: Fallback,
    /// Devices of all nodes, instead of a search for them.
    pub plan: Option<Plan>,
    /// The aim of the placement. For throughput, as many runs are kept in flight as the plan has under way at a time, where so many threads call
    /// [`crate::Compiled::run`] at once.
    pub objective: Objective,
    /// Values of symbolic dims.
    pub dims: Bindings,
    /// Sizes that symbolic dims may have: a contract that every run is held to.
    pub ranges: BTreeMap<String, DimRange>,
    /// 0: no rewriting and one kernel per op; 1: simplification and grouping; 2: all rules; 3: as 2 with larger limits.
    pub opt_level: u8,
    /// Time for compiling one set of shapes after which nothing better is searched for: rules, fusions and placements found until then count, and a
    /// warning says where it stopped. `None`: searches end by number alone, so that results are the same on every machine.
    pub budget: Option<Duration>,
    /// Precision that products on GPUs may round their operands to.
    pub precision: Precision,
    /// Algorithm of convolutions on CPUs.
    pub conv: ConvAlgorithm,
    /// Most runs of one set of shapes that are in flight at a time; further callers wait. `None`:
    /// one per available core. Each has an arena of its own. Models with variables, and placements
    /// on several devices or on one with memory of its own, have one, unless they are placed for
    /// throughput.
    pub max_in_flight: Option<usize>,
    /// Container of the variables for which the graph names none. Models of one session share the variables of a container by name; a
    /// container of its own keeps a model apart. The first model that has a variable gives it its initial value.
    pub container: String,
    /// Element-wise updates are written over the old values of variables, when nothing in the run can fail any more.
    /// Otherwise both are there until the run has ended.
    pub updates_in_place: bool,
    /// The CPU that code is made for.
    pub target_cpu: TargetCpu,
    /// Measured times that correct the predicted ones.
    pub measured: Arc<Measured>,
    /// GPUs that CUDA code is made for; `None`: for each GPU its own, and [`Arch::COMMON`] where there is none.
    pub gpu_arch: Option<Arch>,
    /// Who reduces over GPUs.
    pub all_reduce: AllReduce,
    /// Seed of the elements that `Dropout` with `training_mode` drops in an ONNX model. They are the same in every run.
    pub seed: u64,
    /// Run the verifier and the independent checkers between stages (always on in debug builds).
    pub check: bool,
    /// Keep the results of every stage, for [`crate::pipeline::Lowered::text`]. Otherwise weights are released as soon as they are packed.
    pub keep_stages: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            pins: Vec::new(),
            fallback: Fallback::Error,
            plan: None,
            objective: Objective::Latency,
            dims: Bindings::new(),
            ranges: BTreeMap::new(),
            opt_level: 2,
            budget: None,
            precision: Precision::F32,
            conv: ConvAlgorithm::Auto,
            max_in_flight: None,
            container: String::new(),
            updates_in_place: true,
            target_cpu: TargetCpu::Native,
            measured: Arc::default(),
            gpu_arch: None,
            all_reduce: AllReduce::Auto,
            seed: 0,
            check: cfg!(debug_assertions),
            keep_stages: false,
        }
    }
}

/// Algorithm of convolutions on CPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConvAlgorithm {
    /// Windows of 3x3 and stride 1 by Winograd's minimal filtering, F(2, 3) or F(4, 3), where that is predicted to be faster: f32 throughout, with fewer
    /// products and another order of sums. Errors are up to 2e-6 and 2e-5 of the largest magnitude of the convolution's output, those of direct sums up to
    /// 5e-7 (Lavin and Gray, arXiv:1509.09308). An input that is not finite makes NaN of the tile of outputs around it.
    #[default]
    Auto,
    /// Direct sums of products.
    Direct,
}

/// Who computes [`Op::AllReduce`](crate::ir::Op::AllReduce) where each operand is made on a GPU of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum AllReduce {
    /// NCCL where it is found and computes as the interpreter does, but for the order of a sum; else as [`AllReduce::Exchange`].
    #[default]
    Auto,
    /// The devices themselves, each a share of the elements, in the order of the operands.
    Exchange,
}

/// Precision of the operands of `f32` products, convolutions and attentions on GPUs; they are summed in `f32` in any case. CPUs always
/// compute in the model's own precision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Precision {
    /// To nothing: the model's own precision.
    #[default]
    F32,
    /// 10 bits of mantissa, as tensor cores read `f32`.
    Tf32,
    /// 7 bits of mantissa, in half of the memory.
    Bf16,
    /// 10 bits of mantissa, and overflow above 65504, in half of the memory.
    F16,
}

impl Precision {
    /// All, with their names on the command line.
    pub const NAMES: [(&'static str, Precision); 4] = [
        ("f32", Precision::F32),
        ("tf32", Precision::Tf32),
        ("bf16", Precision::Bf16),
        ("f16", Precision::F16),
    ];

    /// The dtype of operands and results, where it is another than the model's.
    pub fn dtype(self) -> Option<DType> {
        match self {
            Precision::F32 | Precision::Tf32 => None,
            Precision::Bf16 => Some(DType::BF16),
            Precision::F16 => Some(DType::F16),
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Precision::NAMES.iter().find(|(_, p)| p == self);
        f.write_str(name.map_or("", |(name, _)| name))
    }
}

pub use crate::ir::{DimRange, MAX_DIM_SIZE};
