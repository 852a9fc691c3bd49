//! What a caller can ask of the compiler.

use crate::codegen::cuda::Arch;
use crate::codegen::target::TargetCpu;
use crate::cost::Measured;
use crate::ir::Bindings;
use crate::place::{DeviceSet, Fallback, Pin, Plan};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Options of [`crate::compile`]. Any value is valid; what contradicts the model is an error when it is compiled.
#[derive(Clone, Debug)]
pub struct Options {
    /// Logical devices with their memory limits; one CPU by default.
    pub devices: DeviceSet,
    /// Devices forced on nodes by regular expressions over their paths.
    pub pins: Vec<Pin>,
    /// What to do when a requested device cannot run a node.
    pub fallback: Fallback,
    /// Devices of all nodes, instead of a search for them.
    pub plan: Option<Plan>,
    /// Values of symbolic dims.
    pub dims: Bindings,
    /// Sizes that symbolic dims may have: a contract that every run is held to.
    pub ranges: BTreeMap<String, DimRange>,
    /// 0: no rewriting and one kernel per op; 1: simplification and grouping; 2: all rules; 3: as 2 with larger limits.
    pub opt_level: u8,
    /// Time for compiling one set of shapes after which nothing better is searched for: rules, fusions and placements found until then count, and a
    /// warning says where it stopped. `None`: searches end by number alone, so that results are the same on every machine.
    pub budget: Option<Duration>,
    /// CPU threads over all logical CPU devices; `None`: one per available core.
    pub threads: Option<usize>,
    /// The CPU that code is made for.
    pub target_cpu: TargetCpu,
    /// Measured times that correct the predicted ones.
    pub measured: Arc<Measured>,
    /// GPUs that CUDA code is made for.
    pub gpu_arch: Arch,
    /// Run the verifier and the independent checkers between stages, and look for races in emulated kernels (always on in debug builds).
    pub check: bool,
    /// Keep what every stage made, for [`crate::pipeline::Lowered::text`]. Otherwise weights are let go as soon as they are packed.
    pub keep_stages: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            devices: DeviceSet::default(),
            pins: Vec::new(),
            fallback: Fallback::Error,
            plan: None,
            dims: Bindings::new(),
            ranges: BTreeMap::new(),
            opt_level: 2,
            budget: None,
            threads: None,
            target_cpu: TargetCpu::Native,
            measured: Arc::default(),
            gpu_arch: Arch::COMMON,
            check: cfg!(debug_assertions),
            keep_stages: false,
        }
    }
}

/// Sizes that a symbolic dim may have, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DimRange {
    /// The least.
    pub min: usize,
    /// The greatest: where a size has to be chosen, for random inputs and for plans, it is this one.
    pub max: usize,
}

impl DimRange {
    /// Whether a size is in the range.
    pub fn contains(self, size: usize) -> bool {
        (self.min..=self.max).contains(&size)
    }
}

impl fmt::Display for DimRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.min, self.max)
    }
}

/// One thread per core that this process may use.
pub(crate) fn default_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}
