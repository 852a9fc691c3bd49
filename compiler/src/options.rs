//! Options of compilation.

use crate::cost::Measured;
use crate::ir::Bindings;
use crate::place::{Fallback, Objective, Pin, Plan};
use crate::target::Arch;
use crate::target::TargetCpu;
use gristmill_runtime::DType;
use gristmill_runtime::device::DeviceName;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Options of one model, for [`crate::compile`] and [`Session::compile`](crate::Session::compile). [`Settings`](crate::Settings) hold the
/// options of the machine. Any value is valid by itself; compilation fails if a value contradicts the model.
///
/// Later versions may add fields: write `Options { opt_level: 3, ..Options::default() }`. The struct is not `#[non_exhaustive]`,
/// because other crates could not use this form then.
#[derive(Clone, Debug)]
pub struct Options {
    /// Device pins: regular expressions over node paths.
    pub pins: Vec<Pin>,
    /// Treatment of nodes without a kernel on the requested device.
    pub fallback: Fallback,
    /// Devices of all nodes, in place of a search.
    pub plan: Option<Plan>,
    /// Devices that share each batch: each computes the share of its examples, and what is over all of them, such as means, by sums over the
    /// devices. Results are those of one device, up to the rounding of sums. The batch is the first axis of the first input with an axis, and of
    /// the others where it has the same extent. Not with pins, plans and extents that the data decides.
    pub data_parallel: Option<DataParallel>,
    /// Objective of the placement. For throughput, as many runs are in flight as the plan overlaps, if enough threads call
    /// [`crate::Compiled::run`] at once.
    pub objective: Objective,
    /// Values of symbolic dims.
    pub dims: Bindings,
    /// Ranges of symbolic dims. A run with a size outside of them is an error.
    pub ranges: BTreeMap<String, DimRange>,
    /// 0: no rewriting and one kernel per op; 1: simplification and grouping; 2: all rules; 3: as 2 with larger limits.
    pub opt_level: u8,
    /// Time limit of the searches for one set of shapes. When it is reached, compilation uses the best rules, fusions and placements so far
    /// and warns where it stopped. `None`: only counts limit the searches, so results are the same on every machine.
    pub budget: Option<Duration>,
    /// Lowest precision of the operands of products on GPUs.
    pub precision: Precision,
    /// Algorithm of convolutions on CPUs.
    pub conv: ConvAlgorithm,
    /// Most runs in flight for one set of shapes; further callers wait. `None`: one per available
    /// core. Each run in flight has its own arena. Models with variables, and placements on
    /// several devices or on a device with its own memory, have one run in flight, unless they are
    /// placed for throughput.
    pub max_in_flight: Option<usize>,
    /// Container of variables without a container in the graph. Models of one session share the variables of a container by name; give a
    /// model its own container to keep its variables separate. The first model compiled for shapes sets the initial value of a variable. Values and
    /// types stay as long as the session. A run with assignments excludes all runs with variables, of other containers too.
    pub container: String,
    /// Overwrites old values of variables by element-wise updates and scatters, once nothing can fail any more in the run, on other
    /// devices neither.
    /// Without it, old and new values are both in memory until the end of the run.
    pub updates_in_place: bool,
    /// Runs with variables overlap with each other, even if they assign, and with those of other models compiled so. They change variables
    /// element by element: of two updates of an element at the same time, one may be lost, and a run may read some elements before
    /// and some after an update (Niu et al., Hogwild!, NeurIPS 2011). All other runs with variables wait. Errors with `Unsupported` when a variable
    /// is assigned in a branch or loop, or is on a device with memory of its own, and when extents are known in a run only.
    pub updates_overlap: bool,
    /// Target CPU of generated code.
    pub target_cpu: TargetCpu,
    /// Measured times, which correct predicted times.
    pub measured: Arc<Measured>,
    /// Target architecture of CUDA code. `None`: that of each GPU, or [`Arch::COMMON`] without a GPU.
    pub gpu_arch: Option<Arch>,
    /// Implementation of all-reduce between devices.
    pub all_reduce: AllReduce,
    /// Seed of `Dropout` with `training_mode` in an ONNX model. Every run drops the same elements.
    pub seed: u64,
    /// Runs the verifier and the independent checkers between stages (always on in debug builds).
    pub check: bool,
    /// Keeps the results of every stage, for [`crate::pipeline::Lowered::text`]. Otherwise weights are released as soon as they are packed.
    pub keep_stages: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            pins: Vec::new(),
            fallback: Fallback::Error,
            plan: None,
            data_parallel: None,
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
            updates_overlap: false,
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

/// Devices that share each batch of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataParallel {
    /// The devices, without repetition.
    pub devices: Vec<DeviceName>,
    /// The devices with the variables, and with all other values that do not have the batch along an axis. None: each of `devices` has
    /// them all.
    pub servers: Vec<DeviceName>,
    /// The server of each variable, if there are several.
    pub deal: Deal,
    /// Shares of a batch. 0: one for each device, by its arithmetic rate. A power of two: as many equal ones, for 1, 2, 4, .. devices up to
    /// their number. Sums over the batch are then joined in one fixed tree of the shares, so that results have the same bits on each number
    /// of devices of a kind.
    pub shards: usize,
    /// Equal parts of a batch with statistics of their own, none of which is cut; 1 for none.
    pub parts: usize,
    /// Folder of variables in partial sums: each share has one of its own, and the value is the sum of them all. Empty for none.
    pub sums: String,
}

/// Distribution of variables over servers. Those of one update are together: a weight, its slots and its averages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Deal {
    /// Each to the server with the fewest bytes so far.
    #[default]
    BySize,
    /// One after the other.
    InTurn,
}

/// Algorithm of convolutions on CPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConvAlgorithm {
    /// Windows of 3x3 and stride 1 by Winograd's minimal filtering, F(2, 3) or F(4, 3), if predicted to be faster: f32 throughout, with fewer
    /// products and another order of sums. Errors are up to 2e-6 and 2e-5 of the largest magnitude of the convolution's output, those of direct sums up to
    /// 5e-7 (Lavin and Gray, arXiv:1509.09308). An input that is not finite makes NaN of the tile of outputs around it.
    #[default]
    Auto,
    /// Direct sums of products.
    Direct,
}

/// Implementation of [`Op::AllReduce`](crate::ir::Op::AllReduce) between several devices. All get the same bits. Programs whose variables
/// are on servers have none: the servers add up what they get.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum AllReduce {
    /// NCCL, if it joins the devices, is installed, and its results differ from the interpreter's only by the order of a sum; else the
    /// way of the shortest predicted transfers, for each tensor.
    #[default]
    Auto,
    /// NCCL. Tensors below 64 KiB, and sums that it would round differently, go by [`AllReduce::Exchange`].
    Nccl,
    /// Within groups of devices whose links are fast, then between the groups.
    Hierarchical,
    /// One of the devices reduces for all.
    OneDevice,
    /// Each device reduces a share of the elements for all, in the order of the operands; tensors below 64 KiB by itself as a whole.
    Exchange,
}

/// Precision of the operands of `f32` products, convolutions and attentions on GPUs. Sums are always `f32`. CPUs always compute in the
/// model's own precision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Precision {
    /// No rounding: the model's own precision.
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
    /// All precisions with their names on the command line.
    pub const NAMES: [(&'static str, Precision); 4] = [
        ("f32", Precision::F32),
        ("tf32", Precision::Tf32),
        ("bf16", Precision::Bf16),
        ("f16", Precision::F16),
    ];

    /// The dtype of operands and results, if it differs from the model's.
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
