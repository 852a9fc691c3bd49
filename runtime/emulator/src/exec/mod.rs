//! Runs a decoded kernel: launch checks, and blocks in parallel on the threads of the host.

mod access;
mod async_copies;
mod atomics;
mod barrier;
mod bulk;
mod cluster;
mod gang;
mod matrix;
mod mbarrier;
mod quick;
mod race;
mod report;
mod warp;
mod warp_sync;
mod wgmma;

use std::{
    collections::HashMap,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use gristmill_runtime::sync::lock;

use crate::{
    decode::program::Program,
    device::{Checks, LaunchConfig, Limits},
    fault::{Fault, FaultKind, Result},
    memory::Memory,
};

/// Threads per block that CUDA allows.
const MAX_THREADS: u64 = 1024;
/// Blocks per cluster that any architecture allows.
const MAX_CLUSTER: u64 = 16;

/// Counts of one launch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Instructions times lanes that executed them. A PTX instruction may count as two or three.
    pub thread_instructions: u64,
    /// Instructions of whole warps.
    pub warp_instructions: u64,
}

impl Stats {
    fn add(&mut self, other: Stats) {
        self.thread_instructions += other.thread_instructions;
        self.warp_instructions += other.warp_instructions;
    }
}

/// Everything a launch is told.
pub(crate) struct Call<'a> {
    pub program: &'a Program,
    /// Addresses of the module's variables.
    pub globals: &'a HashMap<String, u64>,
    pub memory: &'a Memory,
    pub config: &'a LaunchConfig,
    pub params: &'a [u8],
    pub checks: &'a Checks,
}

/// State shared by all threads of a launch.
struct Launch<'a> {
    call: &'a Call<'a>,
    /// Blocks per cluster by axis.
    cluster: [u32; 3],
    threads_per_block: usize,
    shared_bytes: usize,
    files: &'a HashMap<u32, String>,
    /// Warp instructions that are left.
    budget: AtomicU64,
    /// Index of the first gang known to have a fault: later ones need not go on.
    first_fault: AtomicU64,
}

/// Runs all blocks, or says why not.
pub(crate) fn launch(call: &Call, limits: &Limits, files: &HashMap<u32, String>) -> Result<Stats> {
    let cluster = check(call, limits)?;
    let launch = Launch {
        call,
        cluster,
        threads_per_block: product(call.config.block) as usize,
        shared_bytes: shared_bytes(call),
        files,
        budget: AtomicU64::new(limits.instruction_budget),
        first_fault: AtomicU64::new(u64::MAX),
    };
    let blocks = product(call.config.grid);
    if blocks == 0 || call.program.code.is_empty() {
        return Ok(Stats::default());
    }
    let gang = if call.config.cooperative {
        blocks
    } else {
        product(cluster)
    };
    let threads = match limits.host_threads {
        0 => gristmill_runtime::cpu::n_cores(),
        n => n,
    };
    let result = run_threads(&launch, threads, blocks / gang, gang);
    result.map_err(|(_, fault)| fault)
}

/// Runs gangs of so many blocks on up to `threads` threads.
fn run_threads(launch: &Launch, threads: usize, gangs: u64, size: u64) -> GangResult {
    // Gangs start in order: a block may wait for those before it.
    let next = AtomicU64::new(0);
    let result = Mutex::new(Ok(Stats::default()));
    let work = || {
        let outcome = run_gangs(launch, &next, gangs, size);
        let mut result = lock(&result);
        merge(&mut result, outcome);
    };
    match threads.min(gangs as usize) {
        0 | 1 => work(),
        threads => std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(work);
            }
        }),
    }
    result.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// Statistics, or a fault and the index of its gang.
type GangResult = std::result::Result<Stats, (u64, Fault)>;

/// Adds one thread's share. Of several faults, the one of the first block is reported: that is the same on every run.
fn merge(result: &mut GangResult, outcome: GangResult) {
    match (&mut *result, outcome) {
        (Ok(total), Ok(stats)) => total.add(stats),
        (Ok(_), Err(fault)) => *result = Err(fault),
        (Err(first), Err(fault)) if fault.0 < first.0 => *result = Err(fault),
        (Err(_), _) => {}
    }
}

/// One thread's share: gangs from the common counter until none is left. A fault comes with the gang it is of.
fn run_gangs(launch: &Launch, next: &AtomicU64, gangs: u64, size: u64) -> GangResult {
    let first = next.fetch_add(1, Relaxed);
    if first >= gangs {
        return Ok(Stats::default());
    }
    let mut gang = gang::Gang::new(launch, size as usize);
    let mut index = first;
    while index < gangs && index < launch.first_fault.load(Relaxed) {
        gang.run(index).map_err(|fault| {
            launch.first_fault.fetch_min(index, Relaxed);
            (index, fault)
        })?;
        index = next.fetch_add(1, Relaxed);
    }
    Ok(gang.stats())
}

fn product(sizes: [u32; 3]) -> u64 {
    sizes
        .iter()
        .fold(1u64, |all, n| all.saturating_mul(u64::from(*n)))
}

fn shared_bytes(call: &Call) -> usize {
    let program = call.program;
    match call.config.dynamic_shared_bytes {
        0 => program.shared_static_bytes,
        dynamic => program.shared_dynamic_offset.saturating_add(dynamic),
    }
}

/// Checks a launch against the kernel and the device; returns the cluster's shape.
fn check(call: &Call, limits: &Limits) -> Result<[u32; 3]> {
    check_threads(call)?;
    let (program, config) = (call.program, call.config);
    if config.grid.contains(&0) {
        let what = format!("a grid of {:?} blocks has none", config.grid);
        return Err(invalid_call(call, what));
    }
    if call.params.len() != program.param_bytes {
        let (given, expected) = (call.params.len(), program.param_bytes);
        let what = format!("{given} bytes of parameters given, {expected} expected");
        return Err(invalid_call(call, what));
    }
    if shared_bytes(call) > limits.shared_bytes_per_block {
        let (has, needs) = (limits.shared_bytes_per_block, shared_bytes(call));
        let message = format!(
            "kernel `{}`: needs {needs} bytes of shared memory, a block has {has}",
            program.name
        );
        return Err(Fault::new(FaultKind::OutOfMemory, message));
    }
    cluster_shape(call)
}

fn invalid_call(call: &Call, what: String) -> Fault {
    let message = format!("kernel `{}`: {what}", call.program.name);
    Fault::new(FaultKind::InvalidCall, message)
}

fn check_threads(call: &Call) -> Result<()> {
    let (bounds, config) = (&call.program.bounds, call.config);
    let threads = product(config.block);
    if threads == 0 || threads > MAX_THREADS {
        let what = format!("{threads} threads per block; 1 to {MAX_THREADS} are possible");
        return Err(invalid_call(call, what));
    }
    let most = bounds.max_threads.map(product);
    if let Some(most) = most.filter(|most| threads > *most) {
        let what = format!("{threads} threads per block, but its launch bounds say at most {most}");
        return Err(invalid_call(call, what));
    }
    let required = bounds.required_threads;
    if let Some(required) = required.filter(|required| *required != config.block) {
        let what = format!(
            "blocks of {:?} threads, but it requires {required:?}",
            config.block
        );
        return Err(invalid_call(call, what));
    }
    Ok(())
}

fn cluster_shape(call: &Call) -> Result<[u32; 3]> {
    let config = call.config;
    let cluster = match call.program.bounds.cluster {
        Some(required) if config.cluster != [1; 3] && config.cluster != required => {
            let what = format!(
                "clusters of {:?} blocks, but it requires {required:?}",
                config.cluster
            );
            return Err(invalid_call(call, what));
        }
        Some(required) => required,
        None => config.cluster,
    };
    if product(cluster) == 0 || product(cluster) > MAX_CLUSTER {
        let what =
            format!("clusters of {cluster:?} blocks; 1 to {MAX_CLUSTER} blocks are possible");
        return Err(invalid_call(call, what));
    }
    if (0..3).any(|k| !config.grid[k].is_multiple_of(cluster[k])) {
        let what = format!(
            "a grid of {:?} blocks is not made of clusters of {cluster:?}",
            config.grid
        );
        return Err(invalid_call(call, what));
    }
    Ok(cluster)
}
