//! Times of the steps of compiled models, and of their clusters.

use super::{Compiled, Executable};
use crate::cost::{DeviceProfile, Measured, Nanos, measured};
use crate::error::Result;
use crate::ir::NodeId;
use crate::pipeline::costs;
use gristmill_runtime::exec::Executor;
use gristmill_runtime::program::{Partition, Step, StepKind};
use gristmill_runtime::{DeviceName, Tensor};
use std::collections::BTreeMap;
use std::time::Duration;

/// Time of one step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepTime {
    /// The device that runs it.
    pub device: String,
    /// Kernel name, or kind of step.
    pub what: String,
    /// Path in the user's model.
    pub node: String,
    /// Nanoseconds.
    pub ns: u64,
}

/// Time of one cluster, beside the prediction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterTime {
    /// Path in the user's model.
    pub node: String,
    /// The kind of cluster and the rate that limits it: `contract conv f32`.
    pub class: String,
    /// By the rates of the device, without any measurement.
    pub predicted: Nanos,
    /// Median of the measured runs.
    pub measured: Nanos,
}

impl StepTime {
    fn new(partition: &Partition, step: &Step, ns: u64) -> StepTime {
        StepTime {
            device: partition.device.to_string(),
            what: label(partition, &step.kind).to_owned(),
            node: step.origin.clone(),
            ns,
        }
    }
}

fn label<'p>(partition: &'p Partition, kind: &StepKind) -> &'p str {
    match kind {
        StepKind::Kernel { kernel, .. } => partition.kernels[kernel.0 as usize].name(),
        StepKind::Send { .. } => "send",
        StepKind::Recv { .. } => "recv",
        StepKind::Copy { .. } => "copy",
        StepKind::AllReduce(_) => "all-reduce",
        StepKind::If(_) => "if",
        StepKind::Loop(_) => "loop",
        StepKind::ReadVariable { .. } | StepKind::AssignVariable { .. } => "variable",
    }
}

impl Executable {
    /// Starts to measure each kernel; [`Executable::profile`] returns the times. Where several runs are in flight, those of the first lane are measured.
    pub fn start_profile(&self) -> Result<()> {
        Ok(self.executor()?.start_profile()?)
    }

    /// Time of each kernel on a GPU or an emulator of one, started again and again for at least `at_least`, after a run.
    pub fn time_kernels(&self, at_least: Duration) -> Result<Vec<StepTime>> {
        let mut times = Vec::new();
        for t in self.executor()?.time_launches(at_least)? {
            let partition = &self.lowered.program.partitions[t.partition];
            let (step, ns) = (&partition.steps[t.step], t.time.as_nanos() as u64);
            times.push(StepTime::new(partition, step, ns));
        }
        Ok(times)
    }

    /// Time of each step, summed over the runs since [`Executable::start_profile`].
    pub fn profile(&self) -> Vec<StepTime> {
        let mut all = Vec::new();
        // There are no partitions where a cluster runs it.
        let times = self.executor().map_or(Vec::new(), Executor::step_times);
        for (partition, times) in self.lowered.program.partitions.iter().zip(times) {
            let steps = partition.steps.iter().zip(times);
            all.extend(steps.map(|(step, ns)| StepTime::new(partition, step, ns)));
        }
        all
    }

    /// Times in ns of each step of each partition, of each of some runs. One run before them does not count: it faults pages in.
    fn recorded_runs(&self, tensors: &[Tensor], n_runs: usize) -> Result<Vec<Vec<Vec<u64>>>> {
        let mut outputs = self.run(tensors)?.into_tensors();
        let mut runs = Vec::with_capacity(n_runs);
        for _ in 0..n_runs {
            self.start_profile()?;
            self.run_into(tensors, &mut outputs)?;
            runs.push(self.executor()?.step_times());
        }
        Ok(runs)
    }
}

impl Compiled {
    /// Measures every cluster: adds the times of `n_runs` runs with given inputs to `measured`. Returns the median of each cluster.
    pub fn measure(
        &self,
        tensors: &[Tensor],
        n_runs: usize,
        measured: &mut Measured,
    ) -> Result<Vec<ClusterTime>> {
        let executable = self.for_inputs(tensors)?;
        let runs = executable.recorded_runs(tensors, n_runs)?;
        let costs = costs(self.config());
        let lowered = &executable.lowered;
        let made_again = match lowered.partitions.is_empty() {
            true => self.partitions(tensors)?,
            false => Vec::new(),
        };
        let parts = lowered.partitions.iter().chain(&made_again);
        let mut clusters = Vec::new();
        for (p, (part, nodes)) in parts.zip(&lowered.step_nodes).enumerate() {
            let Some(profile) = self.rates(&part.device) else {
                continue;
            };
            let runs: Vec<&[u64]> = runs.iter().map(|run| &run[p][..]).collect();
            let times = cluster_times(nodes, &runs);
            let graph = &part.graph;
            clusters.extend(times.iter().map(|(&id, times)| {
                let node = graph.node(id);
                ClusterTime {
                    node: node.origin.to_string(),
                    class: measured::class(&costs, graph, node, profile).unwrap_or_default(),
                    predicted: costs.analytic_ns(graph, node, profile),
                    measured: median(times),
                }
            }));
            let rows = times.into_iter();
            let rows = rows.map(|(id, times)| (graph, graph.node(id), times));
            measured.record(&costs, profile, rows);
        }
        Ok(clusters)
    }

    fn rates(&self, device: &DeviceName) -> Option<&DeviceProfile> {
        let mut devices = self.config().settings.devices.devices.iter();
        devices.find(|d| d.name == *device).map(|d| &d.profile)
    }
}

/// The middle one of some times, the upper of two.
fn median(times: &[Nanos]) -> Nanos {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    sorted.get(sorted.len() / 2).copied().unwrap_or_default()
}

/// Time of each cluster in each run: the sum over its steps.
fn cluster_times(nodes: &[Option<NodeId>], runs: &[&[u64]]) -> BTreeMap<NodeId, Vec<Nanos>> {
    let mut times: BTreeMap<NodeId, Vec<Nanos>> = BTreeMap::new();
    for (step, node) in nodes.iter().enumerate() {
        let Some(id) = node else { continue };
        let sums = times.entry(*id);
        let sums = sums.or_insert_with(|| vec![Nanos::ZERO; runs.len()]);
        for (sum, run) in sums.iter_mut().zip(runs) {
            *sum += Nanos(run[step]);
        }
    }
    times
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_of_a_cluster_are_added_in_each_run() {
        let nodes = [Some(NodeId(4)), None, Some(NodeId(4)), Some(NodeId(2))];
        let times = cluster_times(&nodes, &[&[1, 2, 3, 4], &[10, 20, 30, 40]]);
        let rows: Vec<(u32, Vec<u64>)> = times
            .into_iter()
            .map(|(id, t)| (id.0, t.into_iter().map(|ns| ns.0).collect()))
            .collect();
        assert_eq!(rows, [(2, vec![4, 40]), (4, vec![4, 40])]);
    }
}
