//! Predicted time of loops over single elements, by node of the model: what `check` lists as slow.

use super::representative::representative;
use super::{Config, costs, fused_for};
use crate::codegen::cpu::why_loops;
use crate::cost::{CostModel, DeviceProfile};
use crate::error::Result;
use crate::ir::{Bindings, Graph, Node, NodeId, Op};
use crate::options::Options;
use crate::passes;
use crate::session::Settings;
use std::collections::BTreeMap;

/// Parts of a model's predicted time on one thread of a CPU in which generated loops compute element by element.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LoopTime {
    /// Sizes of the symbols at which it is predicted.
    pub sizes: Bindings,
    /// Time of all kernels, in ns.
    total: f64,
    /// Time of kernels with loops, by the path of the node, in ns.
    loops: BTreeMap<String, f64>,
}

impl LoopTime {
    /// The times of a graph once it is rewritten and fused, at sizes of its symbols that suit it. Of a graph with extents that
    /// the data decides, those of the segments between its host nodes.
    ///
    /// Errors where the graph is refused without sizes.
    pub fn of(graph: &Graph) -> Result<LoopTime> {
        let settings = Settings {
            threads: Some(1),
            ..Settings::default()
        };
        let config = Config {
            settings: &settings,
            options: &Options::default(),
        };
        let mut times = LoopTime::default();
        if !passes::has_run_time_extents(graph) {
            times.add_fused(graph, config)?;
            return Ok(times);
        }
        let host = passes::cut(graph)?;
        for part in passes::segments(&host) {
            times.add_fused(part, config)?;
        }
        Ok(times)
    }

    /// Part of the predicted time in loops of the node at a path, from 0 to 1.
    pub fn share(&self, path: &str) -> f64 {
        self.loops.get(path).map_or(0.0, |ns| ns / self.total)
    }

    fn add_fused(&mut self, graph: &Graph, config: Config) -> Result<()> {
        let fused = fused_for(graph.clone(), &Bindings::new(), config)?;
        let sizes = representative(graph, &Bindings::new(), config);
        let clusters = passes::specialise(fused.first_clusters(), &sizes)?;
        let costs = costs(config);
        let device = &config.settings.devices.devices[0].profile;
        self.add(&clusters, 1.0, &costs, device);
        self.sizes.extend(sizes);
        Ok(())
    }

    /// Adds the kernels of a graph that runs so many times.
    fn add(&mut self, g: &Graph, times: f64, costs: &CostModel, device: &DeviceProfile) {
        for (id, node) in g.nodes() {
            let n_runs = match &node.op {
                Op::Loop { trip, .. } => costs.extents.of(trip) as f64,
                Op::Scan { length, .. } => costs.extents.of(length) as f64,
                Op::If => 1.0,
                _ => {
                    self.add_kernel(g, id, times, costs, device);
                    continue;
                }
            };
            for region in &node.regions {
                self.add(region, times * n_runs, costs, device);
            }
        }
    }

    fn add_kernel(
        &mut self,
        g: &Graph,
        id: NodeId,
        times: f64,
        costs: &CostModel,
        device: &DeviceProfile,
    ) {
        let time = costs.node_ns(g, id, device).0 as f64 * times;
        self.total += time;
        let node = g.node(id);
        let (members, graph): (Vec<&Node>, &Graph) = match (&node.op, node.regions.first()) {
            (Op::Cluster { .. }, Some(body)) => (body.nodes().map(|(_, n)| n).collect(), body),
            _ => (vec![node], g),
        };
        let arithmetic = |n: &Node| costs.arithmetic_seconds(graph, n, device);
        let all: f64 = members.iter().map(|n| arithmetic(n)).sum();
        for member in members {
            if why_loops(graph, member).is_some() {
                let part = if all > 0.0 {
                    arithmetic(member) / all
                } else {
                    1.0
                };
                *self
                    .loops
                    .entry(member.origin.as_str().to_owned())
                    .or_default() += time * part;
            }
        }
    }
}
