//! Models that run elsewhere, as a session sees them.

use crate::error::Result;
use crate::ir::Graph;
use crate::options::Options;
use gristmill_runtime::Tensor;
use gristmill_runtime::program::IoSpec;

/// Tasks that compile and run the models of a session.
pub(crate) trait Cluster: Send + Sync {
    /// Its address, as the user gave it.
    fn target(&self) -> &str;

    /// All tasks, after these containers were reset on each.
    #[cfg(feature = "distributed")]
    fn tasks(&self, reset: &[&str]) -> Result<Vec<gristmill_remote::TaskState>>;

    /// Compiles a graph of static shapes, with the pins of the options.
    fn compile(&self, graph: Graph, options: &Options) -> Result<Box<dyn Remote>>;
}

/// A compiled model elsewhere.
pub(crate) trait Remote: Send + Sync {
    fn inputs(&self) -> &[IoSpec];

    fn outputs(&self) -> &[IoSpec];

    /// The device of each node, a line each.
    fn placement(&self) -> &str;

    /// Wishes that could not be met, and warnings of compilation.
    fn warnings(&self) -> &[String];

    /// Sets its variables to their initial values.
    fn initialise(&self) -> Result<()>;

    /// Runs with inputs in order.
    fn run(&self, inputs: &[Tensor]) -> Result<Vec<Tensor>>;
}
