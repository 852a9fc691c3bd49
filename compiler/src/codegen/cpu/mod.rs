//! CPU code: Cranelift functions for every cluster, precompiled kernels where shapes fit.
//!
//! A cluster's body is cut into phases ([`phases`]), each of which becomes one kernel. The generic code of a phase pulls values element by
//! element ([`pull`]) and takes every op and dtype; the fast paths stand in front of it.

mod cluster;
mod emit;
mod jit;
mod kernels;
mod lanes;
mod lines;
mod link;
mod native;
mod plan_cache;
mod rejected;
mod reuse;
mod scalar;
mod task;
#[cfg(test)]
mod tests;
mod thunk;
mod vector;

use super::plan::{Arg, CompiledKernels, Elements, KernelPlan};
use super::store::ConstantStore;
use super::{access, body, loops, phases, pull, strided};
use crate::codegen::packing::Packing;
use crate::codegen::workers::Workers;
use crate::error::Result;
use crate::ir::{Graph, Node, NodeId, Op, ValueId};
use crate::options::ConvAlgorithm;
use crate::target::TargetCpu;
use cluster::ClusterCompiler;
use gristmill_runtime::program::CpuKernel;
use jit::{Jit, Kernel};
pub use jit::{Listing, required_features};
pub use native::why_loops;
use plan_cache::Made;
pub use plan_cache::PlanCache;
pub use rejected::{Fallback, Rejected};
pub use reuse::CodeStore;
use std::collections::BTreeMap;
use std::sync::Arc;
use thunk::Slot;

/// Target and outputs of the code generator.
#[derive(Clone, Debug)]
pub struct Options {
    /// The CPU that code is made for.
    pub target: TargetCpu,
    /// Algorithm of convolutions.
    pub conv: ConvAlgorithm,
    /// Collect [`Listing::clif`] and [`Listing::asm`].
    pub listings: bool,
    /// Release constants as soon as they are packed: the graph is of no further use but for its types.
    pub release_constants: bool,
    /// Holder of the constants, shared by all programs of a session.
    pub constants: Arc<ConstantStore>,
    /// Threads that pack constants and compile functions.
    pub workers: Workers,
    /// Functions of all programs of the session.
    pub code: Option<Arc<CodeStore>>,
    /// True for a program of one of many shapes: its functions may read the constants in which those of other shapes differ.
    pub is_one_of_many: bool,
    /// Plans of clusters of the graph that is compiled, from earlier shapes, which also bind the
    /// symbols in their bodies. Regions have none.
    pub plans: Option<PlanCache>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            target: TargetCpu::Native,
            conv: ConvAlgorithm::default(),
            listings: false,
            release_constants: false,
            constants: Arc::default(),
            workers: Workers::default(),
            code: None,
            is_one_of_many: false,
            plans: None,
        }
    }
}

/// The code of a program under construction, from all of its partitions and regions.
pub struct Collector(Jit);

impl Collector {
    /// No code yet.
    ///
    /// Errors with `Unsupported` for a CPU of another architecture than this one.
    pub fn new(options: &Options) -> Result<Collector> {
        Ok(Collector(Jit::new(options)?))
    }

    /// Links the code: from now on the kernels that were compiled run.
    pub fn finish(self) -> Result<Listing> {
        self.0.finish()
    }
}

/// The clusters of a graph while they are compiled.
struct GraphCompiler<'a> {
    jit: &'a mut Jit,
    kernels: Vec<CpuKernel>,
    /// Functions that arrange the addresses of a task kernel, by symbol and slots.
    thunks: BTreeMap<(&'static str, Vec<Slot>), Kernel>,
    fallbacks: Vec<Fallback>,
    options: &'a Options,
    constants: Packing<'a>,
}

impl GraphCompiler<'_> {
    /// Adds a kernel of the program; gives its index.
    fn add_kernel(&mut self, kernel: CpuKernel) -> usize {
        self.kernels.push(kernel);
        self.kernels.len() - 1
    }

    /// The plan of a cluster, which is added to those that may be kept if it is a new one.
    fn plan(
        &mut self,
        graph: &Graph,
        id: NodeId,
        made: &mut BTreeMap<NodeId, Made>,
    ) -> Result<KernelPlan> {
        if let Some(plan) = self.kept_plan(id) {
            return Ok(plan);
        }
        let before = (self.kernels.len(), self.fallbacks.len());
        let plan = match self.plan_alike(id, made) {
            Some(plan) => {
                debug_assert!(self.is_as_compiled(graph, id, &plan)?);
                plan
            }
            None => self.compile(graph, id)?,
        };
        if self.options.plans.is_some() {
            made.insert(id, self.made(&plan, before));
        }
        Ok(plan)
    }

    fn compile(&mut self, graph: &Graph, id: NodeId) -> Result<KernelPlan> {
        let node = graph.node(id);
        let bound = self.options.plans.as_ref().map(|p| p.bound(graph, node));
        let bound = bound.transpose()?;
        let compiled = ClusterCompiler::compile(self, graph, id, bound.as_ref().unwrap_or(node));
        compiled.map_err(|e| e.at_origin(&node.origin))
    }
}

/// Compiles every `Op::Cluster` node of `graph` (not those inside control-flow regions). All shapes must be static. The kernels run when
/// the code is linked.
///
/// Errors with `Unsupported`, naming the node, when a body holds an op that no CPU kernel computes.
pub fn compile_clusters(
    graph: &mut Graph,
    options: &Options,
    collector: &mut Collector,
) -> Result<CompiledKernels> {
    let mut graph_compiler = GraphCompiler {
        jit: &mut collector.0,
        kernels: Vec::new(),
        thunks: BTreeMap::new(),
        fallbacks: Vec::new(),
        options,
        constants: Packing::new(&options.constants),
    };
    let (mut plans, mut made, mut held) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    let mut uses = constant_uses(graph);
    let is_cluster = |n: &Node| matches!(n.op, Op::Cluster { .. });
    let clusters = graph.nodes().filter(|(_, n)| is_cluster(n));
    let ids: Vec<NodeId> = clusters.map(|(id, _)| id).collect();
    for id in ids {
        let plan = graph_compiler.plan(graph, id, &mut made)?;
        if options.release_constants {
            let packing = &graph_compiler.constants;
            held.extend(release_constants(graph, id, &plan, &mut uses, packing));
        }
        plans.insert(id, plan);
    }
    if let Some(plans) = &options.plans {
        let kept = plans.newly_kept(made, &graph_compiler.kernels, &graph_compiler.fallbacks);
        graph_compiler.jit.keep(kept);
    }
    graph_compiler.constants.run(options.workers)?;
    for (v, elements) in held {
        graph.hold_constant(v, elements.tensor().clone());
    }
    Ok(CompiledKernels {
        kernels: graph_compiler.kernels,
        plans,
        fallbacks: graph_compiler.fallbacks,
    })
}

/// Releases packed operands of a compiled cluster without another use; `uses` counts the remaining ones. Gives the operands that the program keeps
/// as they are, for later clusters which read or pack them too.
fn release_constants(
    graph: &mut Graph,
    id: NodeId,
    plan: &KernelPlan,
    uses: &mut BTreeMap<ValueId, usize>,
    packing: &Packing,
) -> Vec<(ValueId, Elements)> {
    let mut held = Vec::new();
    let node = graph.node(id);
    let (operands, origin) = (node.inputs.clone(), node.origin.clone());
    for (i, &v) in operands.iter().enumerate() {
        let operand = Arg::Operand(i as u32);
        if plan.steps.iter().any(|s| s.args.contains(&operand)) {
            held.extend(graph.constant(v).map(|c| (v, packing.plain(c, &origin))));
            continue;
        }
        let Some(left) = uses.get_mut(&v) else {
            continue;
        };
        *left -= 1;
        if *left == 0 {
            graph.release_constant(v);
        }
    }
    held
}

/// Number of uses of each constant; being a result of the graph is one.
fn constant_uses(graph: &Graph) -> BTreeMap<ValueId, usize> {
    let mut uses = BTreeMap::new();
    let operands = graph.nodes().flat_map(|(_, n)| n.inputs.iter().copied());
    let results = graph.outputs.iter().map(|o| o.value);
    for v in operands.chain(results) {
        if graph.constant(v).is_some() {
            *uses.entry(v).or_insert(0) += 1;
        }
    }
    uses
}

/// Name of a cluster's kernels, from its position: the same in every run.
fn kernel_name(graph: &Graph, id: NodeId, step: usize, purpose: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric();
    let graph_name = graph.name.chars();
    let graph_name: String = graph_name
        .map(|c| if is_plain(c) { c } else { '_' })
        .collect();
    format!("{graph_name}_{}_{step}_{purpose}", id.0)
}
