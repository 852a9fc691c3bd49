//! CUDA code: kernels in CUDA C++ for every cluster, compiled by NVRTC.
//!
//! As on the CPU, a cluster's body is cut into phases ([`super::phases`]), each of which becomes
//! one kernel. The general kernel of a phase pulls values element by element ([`super::pull`]) and
//! takes every op and dtype; faster kernels are tried first. A kernel is one source of its own,
//! independent of its place in the model: repeated layers share it, and so do models through the
//! cache.

mod attention;
mod bundle;
mod candidates;
mod cluster;
mod contract;
mod disassemble;
mod emit;
mod fusion;
mod groups;
mod lines;
mod map;
mod mapped;
pub mod nvrtc;
mod rows;
mod scalar;
mod skinny;
mod source;
#[cfg(test)]
mod tests;
mod text;
mod transposed;
mod vector_access;
mod windows;

use super::kernel_forms::{Choice, Forms, LibraryForm, Preferred};
use super::plan::KernelPlan;
use crate::cost::signature;
use crate::error::Result;
use crate::ir::{Graph, Node, NodeId, Op};
use crate::target::Arch;
use cluster::ClusterCompiler;
use contract::Library;
pub use disassemble::disassemble;
pub use gristmill_kernels::cuda::PRELUDE;
use gristmill_runtime::gpu::{GpuCode, GpuKernel, Launch};
use gristmill_runtime::product::Product;
use nvrtc::{Cache, Nvrtc, Unit};
use source::Source;
use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;

/// The kernels of a graph's clusters as sources, with their launches.
#[derive(Clone, Debug)]
pub struct Generated {
    /// Sources; [`GpuKernel::code`] is an index into it.
    pub units: Vec<Unit>,
    /// Kernels; [`super::plan::PlanStep::kernel`] is an index into it. Several may have one source.
    pub kernels: Vec<GpuKernel>,
    /// Products of libraries; their numbers come after those of the kernels.
    pub products: Vec<Product>,
    /// A plan for each cluster node. Steps have one item: the launch extents are part of the
    /// kernel.
    pub plans: BTreeMap<NodeId, KernelPlan>,
    /// Number of variants of each cluster, and the chosen ones.
    pub forms: BTreeMap<NodeId, ClusterForms>,
    /// Kernels without the prelude, with their names and launches.
    pub listing: String,
}

/// Target and settings of code generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// GPUs that the code is for.
    pub arch: Arch,
    /// Let products of `f32` round their operands to 10 bits of fraction, for tensor cores (from `sm_80` on).
    pub tf32: bool,
    /// Variant of clusters for which none is preferred.
    pub form: u8,
}

/// The variants of one cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterForms {
    /// Number of variants.
    pub n: u8,
    /// Chosen variants of the kernels that have several.
    pub choices: Vec<Choice>,
}

/// Everything exact.
impl From<Arch> for Options {
    fn from(arch: Arch) -> Options {
        Options {
            arch,
            tf32: false,
            form: 0,
        }
    }
}

/// Kernels generated so far, shared by all clusters of a graph.
struct GraphCompiler {
    options: Options,
    units: Vec<Unit>,
    kernels: Vec<GpuKernel>,
    /// Sources by their text, with the name of the first kernel.
    of_source: HashMap<String, (usize, String)>,
    forms: BTreeMap<NodeId, ClusterForms>,
    listing: String,
}

/// [`generate_with`] the default options.
pub fn generate(graph: &Graph, arch: Arch) -> Result<Generated> {
    generate_with(graph, arch.into())
}

/// Generates code for every `Op::Cluster` node of `graph` (not those inside control-flow regions). All shapes must be static.
///
/// Errors with `Unsupported`, naming the node, when a body holds an op for which there is no code.
pub fn generate_with(graph: &Graph, options: Options) -> Result<Generated> {
    generate_forms(graph, options, &Forms::new())
}

/// [`generate_with`], with preferred variants of some clusters.
pub fn generate_forms(graph: &Graph, options: Options, forms: &Forms) -> Result<Generated> {
    let mut graph_compiler = GraphCompiler::new(options);
    let (mut plans, mut of_libraries) = (BTreeMap::new(), Vec::new());
    let clusters = graph
        .nodes()
        .filter(|(_, n)| matches!(n.op, Op::Cluster { .. }));
    for (id, node) in clusters {
        let preferred = graph_compiler.preferred(graph, node, forms);
        let library = match preferred.library {
            Some(_) => Library::find(node, options.tf32)?,
            None => None,
        };
        if let Some(library) = library {
            of_libraries.push((id, library, preferred));
            continue;
        }
        let plan = ClusterCompiler::compile(&mut graph_compiler, graph, (id, node), preferred);
        plans.insert(id, plan.map_err(|e| e.at_origin(&node.origin))?);
    }
    let mut products = Vec::new();
    for (id, library, preferred) in of_libraries {
        let name = graph_compiler.name(graph, id, 0, "product");
        let (product, plan) =
            graph_compiler.product(id, name, products.len(), library, preferred)?;
        products.push(product);
        plans.insert(id, plan);
    }
    Ok(Generated {
        units: graph_compiler.units,
        kernels: graph_compiler.kernels,
        products,
        plans,
        forms: graph_compiler.forms,
        listing: graph_compiler.listing,
    })
}

/// The product that a cluster is, if a library can be asked for it. It has no name and no workspace.
pub fn library_product(cluster: &Node, options: Options) -> Result<Option<Product>> {
    let found = Library::find(cluster, options.tf32).map_err(|e| e.at_origin(&cluster.origin))?;
    Ok(found.map(|library| library.product().clone()))
}

impl GraphCompiler {
    fn new(options: Options) -> GraphCompiler {
        GraphCompiler {
            options,
            units: Vec::new(),
            kernels: Vec::new(),
            of_source: HashMap::new(),
            forms: BTreeMap::new(),
            listing: String::new(),
        }
    }

    /// The preferred variant of a cluster, otherwise that of the options.
    fn preferred(&self, graph: &Graph, node: &Node, forms: &Forms) -> Preferred {
        let known = match forms.is_empty() {
            true => None,
            false => forms.get(&signature(graph, node)),
        };
        known.cloned().unwrap_or(Preferred {
            form: self.options.form,
            ..Preferred::default()
        })
    }

    /// Name of a kernel, from its position: the same in every run.
    fn name(&self, graph: &Graph, id: NodeId, step: usize, what: &str) -> String {
        let clean = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
        format!(
            "{}_{}_{step}_{what}",
            graph.name.chars().map(clean).collect::<String>(),
            id.0
        )
    }

    /// Notes the variant of the next kernel.
    fn chosen(&mut self, id: NodeId, choice: Choice) {
        let _ = writeln!(self.listing, "// {choice}");
        self.forms.entry(id).or_default().choices.push(choice);
    }

    /// Lists a product of a library, which is number `i` of those; gives it and its plan.
    fn product(
        &mut self,
        id: NodeId,
        name: String,
        i: usize,
        library: Library,
        preferred: Preferred,
    ) -> Result<(Product, KernelPlan)> {
        let Preferred {
            form,
            why,
            library: chosen,
        } = preferred;
        let LibraryForm {
            name: library_name,
            workspace_bytes,
            ..
        } = chosen.unwrap_or_default();
        let (product, plan) =
            library.plan(name.clone(), self.kernels.len() + i, workspace_bytes)?;
        let number = usize::from(form);
        let _ = writeln!(self.listing, "// {name}: a product of a library");
        self.chosen(
            id,
            Choice {
                kernel: name,
                number,
                n: number + 1,
                form: format!("{library_name}, {product}"),
                why,
            },
        );
        self.listing.push('\n');
        Ok((product, plan))
    }

    /// Adds a kernel; gives its number.
    fn kernel(&mut self, name: String, entry: String, source: Source, launch: Launch) -> usize {
        let Launch {
            grid: [gx, gy, gz],
            block: [bx, by, bz],
            shared_bytes,
        } = launch;
        let _ = write!(
            self.listing,
            "// {name}: grid {gx} x {gy} x {gz}, block {bx} x {by} x {bz}"
        );
        let _ = if shared_bytes > 0 {
            writeln!(self.listing, ", {shared_bytes} bytes shared")
        } else {
            writeln!(self.listing)
        };
        let code = match self.of_source.get(&source.kernel) {
            Some((code, first)) => {
                let _ = writeln!(self.listing, "// the code of {first}\n");
                *code
            }
            None => {
                let _ = writeln!(self.listing, "{}", source.kernel);
                self.units.push(Unit {
                    source: source.unit(),
                    name: format!("{entry}.cu"),
                    arch: self.options.arch,
                });
                self.of_source
                    .insert(source.kernel, (self.units.len() - 1, name.clone()));
                self.units.len() - 1
            }
        };
        self.kernels.push(GpuKernel {
            name,
            code,
            entry,
            launch,
            params: source.params,
        });
        self.kernels.len() - 1
    }
}

impl Generated {
    /// Compiles all sources; the result has the order of [`Generated::units`].
    ///
    /// Errors with `Internal` when a source does not compile.
    pub fn compile(&self, nvrtc: &Nvrtc, cache: Option<&Cache>) -> Result<Vec<GpuCode>> {
        let made = nvrtc::build(nvrtc, cache, &self.units)
            .into_iter()
            .zip(&self.units);
        made.map(|(c, u)| {
            c.map(|c| GpuCode {
                arch: u.arch.to_string(),
                ptx: c.ptx,
                cubin: c.cubin,
            })
        })
        .collect()
    }
}
