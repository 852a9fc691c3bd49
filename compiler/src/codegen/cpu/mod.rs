//! CPU code: Cranelift functions for every cluster, precompiled kernels where shapes fit.
//!
//! A cluster's body is cut into phases ([`phases`]), each of which becomes one kernel. The generic code of a phase pulls values element by
//! element ([`pull`]) and takes every op and dtype; the fast paths stand in front of it.

mod attention;
mod bytes;
mod cluster;
mod convolution;
mod emit;
mod epilogue;
mod jit;
mod lanes;
mod match_kernels;
mod native;
mod pack;
mod product;
mod rejected;
mod rows;
mod scalar;
mod task;
#[cfg(test)]
mod tests;
mod thunk;
mod vector;
mod weights;
mod windows;

use super::plan::{Arg, CompiledKernels, KernelPlan};
use super::{access, body, phases, pull, strided};
use crate::error::{Error, Result};
use crate::ir::{Graph, NodeId, Op, ValueId};
use crate::target::TargetCpu;
use cluster::ClusterCompiler;
use cranelift_module::FuncId;
use gristmill_runtime::program::{CpuKernel, KernelEntry};
use jit::Jit;
pub use native::why_loops;
pub use rejected::{Fallback, Rejected};
use std::collections::BTreeMap;
use std::sync::Arc;
use weights::Weights;

/// What the generator should assume and emit.
#[derive(Clone, Debug)]
pub struct Options {
    /// The CPU that code is made for.
    pub target: TargetCpu,
    /// Threads that a kernel may be split over; block sizes of contractions depend on it.
    pub n_threads: usize,
    /// Collect [`CompiledKernels::clif`] and [`CompiledKernels::asm`].
    pub listings: bool,
    /// Let go of constants that were packed, as soon as they are: the graph is of no further use but for its types.
    pub release_constants: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            target: TargetCpu::Native,
            n_threads: 1,
            listings: false,
            release_constants: false,
        }
    }
}

/// A kernel whose address is not known yet.
struct PendingKernel {
    name: String,
    function: FuncId,
    workspace_bytes: usize,
}

/// The module being filled, shared by all clusters of a graph.
struct Session<'a> {
    jit: Jit,
    kernels: Vec<PendingKernel>,
    /// Functions that arrange the addresses of a task kernel, by what they do.
    thunks: BTreeMap<String, FuncId>,
    weights: Weights,
    fallbacks: Vec<Fallback>,
    options: &'a Options,
}

/// Compiles every `Op::Cluster` node of `graph` (not those inside control-flow regions). All shapes must be static.
///
/// Errors with `Unsupported`, naming the node, when a body holds an op that no CPU kernel computes.
pub fn compile_clusters(graph: &mut Graph, options: &Options) -> Result<CompiledKernels> {
    let mut session = Session {
        jit: Jit::new(options.target, options.listings)?,
        kernels: Vec::new(),
        thunks: BTreeMap::new(),
        weights: Weights::default(),
        fallbacks: Vec::new(),
        options,
    };
    let mut plans = BTreeMap::new();
    let mut uses = constant_uses(graph);
    let ids: Vec<NodeId> = graph
        .nodes()
        .filter(|(_, n)| matches!(n.op, Op::Cluster { .. }))
        .map(|(id, _)| id)
        .collect();
    for id in ids {
        let node = graph.node(id);
        let inputs = node.inputs.clone();
        let plan: KernelPlan = ClusterCompiler::compile(&mut session, graph, id, node)
            .map_err(|e| e.at_origin(&node.origin))?;
        for (i, v) in inputs.into_iter().enumerate() {
            let is_read = plan
                .steps
                .iter()
                .any(|s| s.args.contains(&Arg::Operand(i as u32)));
            if is_read && options.release_constants {
                // The program keeps it, so that a later cluster that packs it need not have it twice.
                graph.hold_constant(v)?;
            }
            let Some(left) = uses.get_mut(&v).filter(|_| !is_read) else {
                continue;
            };
            *left -= 1;
            if *left == 0 && options.release_constants {
                graph.release_constant(v);
            }
        }
        plans.insert(id, plan);
    }
    let (code, entries, clif, asm) = session.jit.finish()?;
    let kernels = session
        .kernels
        .into_iter()
        .map(|k| link(k, &entries))
        .collect::<Result<_>>()?;
    Ok(CompiledKernels {
        kernels,
        plans,
        code: Arc::new(code),
        fallbacks: session.fallbacks,
        clif,
        asm,
    })
}

/// Number of uses of each constant; being a result of the graph is one.
fn constant_uses(graph: &Graph) -> BTreeMap<ValueId, usize> {
    let mut uses = BTreeMap::new();
    let operands = graph.nodes().flat_map(|(_, n)| n.inputs.iter().copied());
    for v in operands
        .chain(graph.outputs.iter().map(|o| o.value))
        .filter(|&v| graph.constant(v).is_some())
    {
        *uses.entry(v).or_insert(0) += 1;
    }
    uses
}

fn link(
    k: PendingKernel,
    entries: &[Option<gristmill_runtime::program::KernelFn>],
) -> Result<CpuKernel> {
    let entry = entries.get(k.function.as_u32() as usize).copied().flatten();
    let entry = entry.ok_or_else(|| Error::internal(format!("kernel {} has no code", k.name)))?;
    // SAFETY: generated by this module for the buffers that the plan names, whose sizes follow from the graph's types; the code
    // lives as long as `CompiledKernels::code`.
    let entry = unsafe { KernelEntry::new(entry) };
    Ok(CpuKernel {
        name: k.name,
        entry,
        workspace_bytes_per_thread: k.workspace_bytes,
    })
}

/// Name of a cluster's kernels, from its position: the same in every run.
fn kernel_name(graph: &Graph, id: NodeId, step: usize, what: &str) -> String {
    let clean = |s: &str| {
        s.chars()
            .map(|c| if c.is_ascii_alphanumeric() { c } else { '_' })
            .collect::<String>()
    };
    format!("{}_{}_{step}_{what}", clean(&graph.name), id.0)
}
