//! The program of the only device, for all shapes of a model: there is nothing to place.

use super::Config;
use super::{Fused, Lowered, Partitioned, generate_parts};
use crate::codegen::assemble::{Interface, Settings};
use crate::codegen::cpu::PlanCache;
use crate::error::{Error, Result};
use crate::ir::{Bindings, Graph, NodeId};
use crate::partition::{self, Part};
use crate::passes;
use crate::place::Placement;
use crate::report::{Pass, Scope};
use gristmill_runtime::device::DeviceKind;
use gristmill_runtime::sync::lock;
use std::sync::{Arc, Mutex};

/// Fused kernels over symbols, as the graph of the CPU that runs all of them.
pub(crate) struct OnOneDevice {
    part: Part,
    /// The same with the types of the last shapes. Bodies of clusters keep their symbols; plans bind
    /// those that they need.
    bound: Mutex<Part>,
    /// The nodes with symbols that are no clusters.
    others: Vec<NodeId>,
    /// Predicted times are those of the shapes that came first.
    placement: Placement,
    settings: Settings,
    plans: PlanCache,
}

impl OnOneDevice {
    /// The graph of the device, from the decisions for some sizes of its symbols. `None` where
    /// other sizes may lead to something else: a choice of devices, a limit that is kept by
    /// computing values again, a stream, forms of kernels on a GPU.
    pub(crate) fn of(
        fused: &Fused,
        first: &Partitioned,
        config: Config,
    ) -> Result<Option<OnOneDevice>> {
        let [device] = &config.settings.devices.devices[..] else {
            return Ok(None);
        };
        let placement = &first.placement;
        let depends_on_sizes = device.name.kind != DeviceKind::Cpu
            || device.memory_limit.is_some()
            || placement.stream.is_some()
            || !placement.copies.is_empty();
        if depends_on_sizes || config.options.keep_stages {
            return Ok(None);
        }
        let [part] = partition::partition(fused.first_clusters(), placement)?
            .try_into()
            .map_err(|_| Error::internal("one device has several graphs"))?;
        let mut settings = first.settings.clone();
        settings.codegen.release_constants = false;
        settings.order = Some(Arc::default());
        let plans = PlanCache::of(&part.graph)?;
        Ok(Some(OnOneDevice {
            others: others(&part.graph, &plans),
            plans,
            bound: Mutex::new(part.clone()),
            part,
            placement: placement.clone(),
            settings,
        }))
    }

    /// The program for given sizes of all dims of `fused`; it has no graphs.
    ///
    /// Errors, as one of sizes, when these contradict a type rule.
    pub(crate) fn lower(&self, fused: &Fused, sizes: &Bindings, config: Config) -> Result<Lowered> {
        let mut bound = lock(&self.bound);
        let mut p = fused.binding_first(sizes, config);
        p.run(Pass::Bind, |_| self.bind(&mut bound.graph, sizes))?;
        let mut settings = self.settings.clone();
        settings.codegen.plans = Some(self.plans.at(sizes));
        p.report.scope = Scope::OneDevice;
        let lowered = generate_parts(
            Partitioned {
                interface: Interface::of(fused.first_clusters(), sizes).map_err(Error::of_sizes)?,
                graph: Graph::default(),
                rewritten: Graph::default(),
                clusters: Graph::default(),
                placement: self.placement.clone(),
                partitions: Vec::new(),
                settings,
                report: p.report,
            },
            std::slice::from_mut(&mut bound),
            config,
        )?;
        if config.options.check {
            self.check(fused, sizes, &lowered)?;
        }
        Ok(lowered)
    }

    /// Puts sizes in, but for the bodies of clusters.
    fn bind(&self, graph: &mut Graph, sizes: &Bindings) -> Result<()> {
        graph.retype(&self.part.graph, sizes);
        for &id in &self.others {
            let bound = passes::specialise_node(graph, self.part.graph.node(id), sizes);
            *graph.node_mut(id) = bound.map_err(Error::of_sizes)?;
        }
        Ok(())
    }

    /// Checks a program by the graphs that it is made of, which are bound from the outset.
    fn check(&self, fused: &Fused, sizes: &Bindings, lowered: &Lowered) -> Result<()> {
        let clusters = passes::specialise(fused.first_clusters(), sizes)?;
        let graph = passes::specialise(&self.part.graph, sizes)?;
        let parts = [Part {
            graph,
            ..self.part.clone()
        }];
        partition::check::check(&clusters, &self.placement, &parts)?;
        partition::check::check_schedules(&clusters, &parts, &lowered.schedules)
    }
}

/// Nodes with symbols in attributes, results or regions that are no clusters.
fn others(g: &Graph, plans: &PlanCache) -> Vec<NodeId> {
    let others = g.nodes().filter(|(id, _)| !plans.has(*id));
    let open = others.filter(|(_, node)| {
        let mut has_symbol = false;
        node.visit_symbols(g, &mut |_| has_symbol = true);
        has_symbol
    });
    open.map(|(id, _)| id).collect()
}
