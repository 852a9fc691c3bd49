//! One specialisation of a model, ready to run.

use super::Outputs;
use crate::error::{Error, Result};
use crate::pipeline::Lowered;
use crate::report::Scope;
use crate::session::cache::Held;
use crate::session::cluster::Remote;
use gristmill_runtime::Tensor;
use gristmill_runtime::exec::{Executor, Lanes, Transaction};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Bytes of the description of a step (buffers, operands and names), and with its graphs.
/// Measured: 0.7 MiB of resident memory for each further set of shapes of GPT-2, which has 179
/// steps, and 1.8 MiB with graphs.
const STEP_BYTES: [usize; 2] = [4 << 10, 10 << 10];

/// The memory of a model for some inputs without code: that of its graph.
pub(crate) fn held_by_graph(n_nodes: usize) -> Held {
    Held {
        is_cheap: true,
        own_bytes: (n_nodes * STEP_BYTES[1]) as u64,
        ..Held::default()
    }
}

/// One specialisation: every stage's result, and its executors.
pub struct Executable {
    /// The stages. Those of shapes after the first have no graphs, unless
    /// [`Options::keep_stages`](crate::Options::keep_stages) says so: they would take most of the memory.
    #[doc(hidden)]
    pub lowered: Lowered,
    pub(super) runner: Runner,
}

/// The place where an executable runs.
pub(super) enum Runner {
    /// As many executors as runs can be in flight.
    Here(Lanes),
    /// The tasks of a cluster.
    Elsewhere(Box<dyn Remote>),
}

impl Executable {
    /// Memory of the executable: constants and packed weights, which other shapes may share; code; and arenas not leased from the pool.
    pub(super) fn held(&self) -> Held {
        let partitions = &self.lowered.program.partitions;
        let own = partitions.iter().filter(|p| p.device.kind.has_own_memory());
        let arenas: usize = own.map(|p| p.arena_bytes).sum();
        let constants = partitions.iter().flat_map(|p| &p.constants);
        let n_steps: usize = partitions.iter().map(|p| p.steps.len()).sum();
        let has_graphs = !self.lowered.partitions.is_empty();
        let of_step = STEP_BYTES[usize::from(has_graphs)];
        let mut shared: BTreeMap<usize, u64> = constants
            .map(|t| (t.as_ptr() as usize, t.size_bytes() as u64))
            .collect();
        self.lowered.program.visit_cpu_kernels(&mut |kernel| {
            if let Some((text, _)) = kernel.function.place() {
                shared.insert(Arc::as_ptr(text) as usize, text.bytes().len() as u64);
            }
        });
        Held {
            is_cheap: self.lowered.report.scope != Scope::Alone,
            own_bytes: (n_steps * of_step + arenas * self.n_in_flight()) as u64,
            shared,
        }
    }

    /// Runs with inputs in the model's order.
    pub fn run(&self, inputs: &[Tensor]) -> Result<Outputs> {
        let results = match &self.runner {
            Runner::Here(lanes) => lanes.run(inputs)?,
            Runner::Elsewhere(remote) => remote.run(inputs)?,
        };
        let names = self.lowered.program.outputs.iter().map(|o| o.name.clone());
        Ok(Outputs::of(names.zip(results).collect()))
    }

    /// Sets the variables of the model to its initial values, between runs, wherever they are. Variables without an initial value keep theirs.
    pub fn initialise(&self) -> Result<()> {
        match &self.runner {
            Runner::Here(lanes) => Ok(lanes.first().initialise()?),
            Runner::Elsewhere(remote) => remote.initialise(),
        }
    }

    /// The executors. Errors with `Unsupported` where a cluster runs it.
    fn lanes(&self) -> Result<&Lanes> {
        match &self.runner {
            Runner::Here(lanes) => Ok(lanes),
            Runner::Elsewhere(_) => {
                let message = "this needs the executor, which is in tasks of a cluster";
                Err(Error::unsupported(message).hint("use a session of this process"))
            }
        }
    }

    /// The first executor. Errors as [`Executable::lanes`].
    pub(super) fn executor(&self) -> Result<&Executor> {
        Ok(self.lanes()?.first())
    }

    /// Runs as a part of a transaction on the model's variables.
    pub(super) fn run_in(
        &self,
        transaction: &Transaction,
        inputs: &[Tensor],
    ) -> Result<Vec<Tensor>> {
        Ok(self.lanes()?.run_in(transaction, inputs)?)
    }

    /// Runs into tensors of an earlier run; nothing is allocated. For timing loops.
    pub fn run_into(&self, inputs: &[Tensor], outputs: &mut [Tensor]) -> Result<()> {
        match &self.runner {
            Runner::Here(lanes) => lanes.run_into(inputs, outputs)?,
            Runner::Elsewhere(remote) => {
                let results = remote.run(inputs)?;
                outputs.iter_mut().zip(results).for_each(|(o, r)| *o = r);
            }
        }
        Ok(())
    }

    /// Number of runs kept in flight by a placement for throughput, each started by a thread of
    /// its own; 1 for other placements.
    pub fn n_in_flight(&self) -> usize {
        let stream = self.lowered.placement.stream;
        stream.map_or(1, |stream| stream.in_flight as usize)
    }

    /// Largest number of runs in flight. Further callers wait.
    pub fn max_in_flight(&self) -> usize {
        self.lanes().map_or(1, Lanes::n_lanes)
    }
}
