//! The graph of the only device, for all shapes of a model: there is nothing to place.

use super::{Fused, Partitioned};
use crate::codegen::assemble::{Interface, Settings};
use crate::codegen::cpu::KeptPlans;
use crate::error::{Error, Result};
use crate::ir::{Bindings, Graph};
use crate::options::Options;
use crate::partition::{self, Part};
use crate::passes;
use crate::place::Placement;
use crate::report::Pass;

/// Fused kernels over symbols, as the graph of the device that runs all of them.
pub(crate) struct OnOneDevice {
    part: Part,
    /// Predicted times are those of the shapes that came first.
    placement: Placement,
    settings: Settings,
    plans: KeptPlans,
}

impl OnOneDevice {
    /// The graph of the device, from what was decided for some sizes of its symbols. `None` where
    /// other sizes may lead to something else: a choice of devices, a limit that is kept by
    /// computing values again, a stream.
    pub(crate) fn of(
        fused: &Fused,
        first: &Partitioned,
        options: &Options,
    ) -> Result<Option<OnOneDevice>> {
        let [device] = &options.devices.devices[..] else {
            return Ok(None);
        };
        let placement = &first.placement;
        let depends_on_sizes = device.memory_limit.is_some()
            || placement.stream.is_some()
            || !placement.copies.is_empty();
        if depends_on_sizes || options.keep_stages {
            return Ok(None);
        }
        let [part] = partition::partition(&fused.clusters, placement)?
            .try_into()
            .map_err(|_| Error::internal("one device has several graphs"))?;
        Ok(Some(OnOneDevice {
            plans: KeptPlans::of(&part.graph)?,
            part,
            placement: placement.clone(),
            settings: first.settings.clone(),
        }))
    }

    /// The graph for given sizes of all dims of `fused`.
    ///
    /// Errors when the sizes contradict a type rule, naming the node.
    pub(crate) fn bind(
        &self,
        fused: &Fused,
        sizes: &Bindings,
        options: &Options,
    ) -> Result<Partitioned> {
        let mut p = fused.binding(sizes, options);
        let graph = p.run(Pass::Bind, |_| passes::specialise(&self.part.graph, sizes))?;
        let partitions = vec![self.with(graph)];
        let mut clusters = Graph::default();
        if options.check {
            clusters = passes::specialise(&fused.clusters, sizes)?;
            partition::check::check(&clusters, &self.placement, &partitions)?;
        }
        Ok(Partitioned {
            interface: Interface::of(&fused.clusters, sizes)?,
            graph: Graph::default(),
            rewritten: Graph::default(),
            clusters,
            placement: self.placement.clone(),
            partitions,
            settings: self.settings_at(sizes),
            report: p.report,
        })
    }

    fn settings_at(&self, sizes: &Bindings) -> Settings {
        let mut settings = self.settings.clone();
        settings.codegen.plans = Some(self.plans.at(sizes));
        settings
    }

    fn with(&self, graph: Graph) -> Part {
        Part {
            device: self.part.device.clone(),
            graph,
            inputs: self.part.inputs.clone(),
            outputs: self.part.outputs.clone(),
            nodes: self.part.nodes.clone(),
        }
    }
}
