//! Every form of the kernels of a graph on a GPU, one after the other: an experiment, of which tuning
//! keeps the fastest alone.

use super::{Bench, collect};
use crate::error::Result;
use crate::ir::{Graph, NodeId};
use crate::pipeline::{Config, fused, partitioned};
use crate::tune::interpreted;
use gristmill_runtime::Tensor;
use gristmill_runtime::device::DeviceKind;
use std::collections::BTreeMap;

/// One form of a cluster's kernels.
#[derive(Debug)]
pub struct FormTime {
    /// Path of the cluster's node in the model.
    pub node: String,
    /// Number of the cluster in the graph.
    pub cluster: usize,
    /// Number of the form, 0 for the predicted one.
    pub form: u8,
    /// Forms of the cluster.
    pub n: u8,
    /// Description; empty where there is no choice.
    pub words: String,
    /// Time on the GPU in ns. An error where the form fails, or gives other results than the interpreter
    /// (than the predicted form where interpreting would take too long).
    pub ns: Result<u64>,
}

/// Runs every form of each cluster of a graph of static shapes on the GPU of a configuration. `inputs`
/// makes the operands of a cluster, `see` gets each form once it is timed.
///
/// Errors when the graph is refused, or the GPU is not there.
pub fn each_form(
    graph: Graph,
    config: Config,
    inputs: &dyn Fn(&Graph) -> Result<Vec<Tensor>>,
    see: &mut dyn FnMut(FormTime),
) -> Result<()> {
    let lowered = partitioned(fused(graph, config)?, config)?;
    let parts = lowered.partitions.iter();
    for part in parts.filter(|p| p.device.kind == DeviceKind::Gpu) {
        let mut bench = Bench::new(&part.device, config.settings, &lowered.settings)?;
        let mut singles = BTreeMap::new();
        collect(&part.graph, &lowered.settings, &mut singles)?;
        for (cluster, single) in singles.into_values().enumerate() {
            let operands = inputs(&single)?;
            let mut expected = interpreted(&single, &operands)?;
            let n = bench.forms(&single, None)?.map_or(1, |(n, _)| n);
            for form in 0..n {
                see(FormTime {
                    node: single.node(NodeId(0)).origin.to_string(),
                    cluster,
                    form,
                    n,
                    words: bench.words(&single, form)?,
                    ns: bench.timed(&single, form, &operands, &mut expected),
                });
            }
        }
    }
    Ok(())
}
