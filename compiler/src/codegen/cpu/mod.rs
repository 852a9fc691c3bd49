//! CPU code: Cranelift functions for every cluster, precompiled kernels where shapes fit.

use super::plan::CompiledKernels;
use crate::error::{Error, Result};
use crate::ir::Graph;

/// What the generator should assume and emit.
#[derive(Clone, Debug)]
pub struct Options {
    /// Threads that a kernel may be split over; block sizes of contractions depend on it.
    pub n_threads: usize,
    /// Collect [`CompiledKernels::clif`] and [`CompiledKernels::asm`].
    pub listings: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options { n_threads: 1, listings: false }
    }
}

/// Compiles every `Op::Cluster` node of `graph` (not those inside control-flow regions). All shapes must be static.
///
/// Errors with `Unsupported`, naming the node, when a body holds an op that no CPU kernel computes.
pub fn compile_clusters(graph: &Graph, _options: &Options) -> Result<CompiledKernels> {
    Err(Error::unsupported(format!("code generation of graph {:?} is not implemented yet", graph.name)))
}
