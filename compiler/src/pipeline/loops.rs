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

/// Parts of a model's predicted time on one thread of a CPU in which generated loops compute element by
/// element.
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
    /// The times of a graph once it is rewritten and fused, at suitable sizes of its symbols. Of a graph
    /// with extents decided by the data, those of the segments between its host nodes.
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
        match self.loops.get(path) {
            Some(ns) if self.total > 0.0 => ns / self.total,
            _ => 0.0,
        }
    }

    fn add_fused(&mut self, graph: &Graph, config: Config) -> Result<()> {
        let fused = fused_for(graph.clone(), &Bindings::new(), config)?;
        let sizes = representative(graph, &Bindings::new(), config);
        let clusters = passes::specialise(fused.first_clusters(), &sizes)?;
        let pricing = Pricing {
            costs: &costs(config),
            device: &config.settings.devices.devices[0].profile,
        };
        self.add(&LoopTime::of_kernels(&clusters, &pricing), 1.0);
        self.sizes.extend(sizes);
        Ok(())
    }

    /// Adds other times, so many times.
    fn add(&mut self, other: &LoopTime, times: f64) {
        self.total += other.total * times;
        for (path, ns) in &other.loops {
            *self.loops.entry(path.clone()).or_default() += ns * times;
        }
    }

    /// The times of one run of a graph of kernels.
    fn of_kernels(g: &Graph, pricing: &Pricing) -> LoopTime {
        let mut times = LoopTime::default();
        for (id, node) in g.nodes() {
            let of_node = match &node.op {
                Op::If | Op::Loop { .. } | Op::Scan { .. } => LoopTime::of_control(g, id, pricing),
                _ => LoopTime::of_kernel(g, id, pricing),
            };
            times.add(&of_node, 1.0);
        }
        times
    }

    /// The times of control flow, divided as one run of its regions is. A loop whose number of
    /// iterations is not known runs once.
    fn of_control(g: &Graph, id: NodeId, pricing: &Pricing) -> LoopTime {
        let mut once = LoopTime::default();
        for region in &g.node(id).regions {
            once.add(&LoopTime::of_kernels(region, pricing), 1.0);
        }
        let all = pricing.ns(g, id);
        let mut times = LoopTime::default();
        let is_known = all > 0.0 && once.total > 0.0;
        times.add(&once, if is_known { all / once.total } else { 1.0 });
        times
    }

    fn of_kernel(g: &Graph, id: NodeId, pricing: &Pricing) -> LoopTime {
        let mut times = LoopTime {
            total: pricing.ns(g, id),
            ..LoopTime::default()
        };
        let node = g.node(id);
        let (members, graph): (Vec<&Node>, &Graph) = match (&node.op, node.regions.first()) {
            (Op::Cluster { .. }, Some(body)) => (body.nodes().map(|(_, n)| n).collect(), body),
            _ => (vec![node], g),
        };
        let arithmetic = |n: &Node| pricing.costs.arithmetic_seconds(graph, n, pricing.device);
        let all: f64 = members.iter().map(|n| arithmetic(n)).sum();
        for member in members {
            if why_loops(graph, member).is_some() {
                let part = if all > 0.0 {
                    arithmetic(member) / all
                } else {
                    1.0
                };
                let path = member.origin.as_str().to_owned();
                *times.loops.entry(path).or_default() += times.total * part;
            }
        }
        times
    }
}

/// Prices of kernels on a device.
struct Pricing<'a> {
    costs: &'a CostModel,
    device: &'a DeviceProfile,
}

impl Pricing<'_> {
    fn ns(&self, g: &Graph, id: NodeId) -> f64 {
        self.costs.node_ns(g, id, self.device).0 as f64
    }
}
