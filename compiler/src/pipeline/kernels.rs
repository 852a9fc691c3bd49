//! Kernels of a graph. With several devices there are alternatives, and the placer chooses.
//!
//! Joined products and fused ops run on one device. Joining the first products of two branches
//! therefore ties the branches together and may cost more than it saves. With several devices, up to
//! five graphs of kernels are placed (see [`Joining`]). Two of them follow a first placement of the
//! graph whose branches are separate: they join and fuse only ops that it has on the same device.

use super::Config;
use super::timing::Passes;
use super::{costs, fusion, pricing};
use crate::cluster::{self, Clustered, Fusion, Traffic, cluster_at};
use crate::codegen::workers::Workers;
use crate::error::{Error, ErrorKind, Result};
use crate::ir::{Bindings, Graph, Node, NodeId, Op};
use crate::options::{Options, Precision};
use crate::passes;
use crate::place::{
    self, Joining, Placement, Request,
    groups::{self, Group},
};
use crate::report::{Pass, Report};
use std::sync::Arc;

/// One node per kernel, over symbols or static shapes.
#[derive(Clone)]
pub(super) struct Kernels {
    joining: Joining,
    /// The graph that the kernels were formed of, if stages are kept.
    lowered: Lowered,
    clusters: Graph,
    /// Bytes that they move.
    traffic: Traffic,
    fused: cluster::Report,
}

/// A graph whose products have the precision that was asked for.
#[derive(Clone)]
struct Lowered {
    graph: Graph,
    n_products: Option<(Precision, usize)>,
    warnings: Vec<String>,
}

impl Lowered {
    fn with(&self, graph: Graph) -> Lowered {
        Lowered {
            graph,
            n_products: self.n_products,
            warnings: self.warnings.clone(),
        }
    }

    fn grouped(&self, groups: &[Option<Group>]) -> Lowered {
        self.with(groups::grouped(&self.graph, groups))
    }
}

/// A rewritten graph to form kernels of.
pub(super) struct Source<'a> {
    pub graph: &'a Graph,
    /// Sizes at which kernels are chosen, and a first placement is made.
    pub sizes: &'a Bindings,
    pub request: &'a Request,
}

impl Source<'_> {
    /// The alternatives, at least one.
    pub fn kernels(&self, p: &mut Passes) -> Result<Vec<Kernels>> {
        let joined = self.lowered(merged(self.graph, p)?, p)?;
        let joined = self.formed(Joining::Joined, joined, p)?.0;
        let has_choice = p.config.options.opt_level > 0 && self.has_choice_of_devices();
        if !has_choice || p.is_late("products are joined as for one device") {
            return Ok(vec![joined]);
        }
        let mut all = vec![joined];
        let separate = p.run(Pass::Merge, |_| {
            passes::clean(&passes::concat_views(self.graph)?)
        })?;
        all.extend(self.apart(&self.lowered(separate, p)?, p)?);
        Ok(distinct(all))
    }

    /// Kernels of a graph whose products are separate, and kernels that follow a placement of it.
    fn apart(&self, separate: &Lowered, p: &mut Passes) -> Result<Vec<Kernels>> {
        let lines = separate.grouped(&groups::lines(&separate.graph));
        let (lines, owners) = self.formed(Joining::Lines, lines, p)?;
        let mut all = vec![self.formed(Joining::Separate, separate.clone(), p)?.0];
        if let Some(placed) = self.first_placement(&lines.clusters, p)? {
            for (joining, of_clusters) in [
                (Joining::ByDevice, groups::by_device(&placed)),
                (Joining::ByTime, groups::by_busy_time(&placed)),
            ] {
                let group =
                    |owner: &Option<NodeId>| of_clusters[owner.as_ref()?.0 as usize].clone();
                let groups: Vec<_> = owners.iter().map(group).collect();
                let mut lowered = separate.grouped(&groups);
                lowered.graph = merged(&lowered.graph, p)?;
                all.push(self.formed(joining, lowered, p)?.0);
            }
        }
        all.push(lines);
        Ok(all)
    }

    /// True when a node may be on several devices.
    fn has_choice_of_devices(&self) -> bool {
        let set = &self.request.devices;
        let is_free = |node: &Node| match node.device.as_deref() {
            _ if matches!(node.op, Op::Constant { .. }) => false,
            Some(asked) => set.matching(&asked.spec).len() > 1,
            None => true,
        };
        set.devices.len() > 1 && self.graph.nodes().any(|(_, node)| is_free(node))
    }

    /// A graph in the precision that was asked for.
    fn lowered(&self, g: Graph, p: &mut Passes) -> Result<Lowered> {
        let n_warnings = p.report.warnings.len();
        Ok(Lowered {
            graph: super::fused::lower_precision(g, self.request, p)?,
            n_products: p.report.lowered.take(),
            warnings: p.report.warnings.split_off(n_warnings),
        })
    }

    /// Kernels of a graph, and the kernel of each of its nodes. Groups only keep kernels apart.
    fn formed(
        &self,
        joining: Joining,
        mut lowered: Lowered,
        p: &mut Passes,
    ) -> Result<(Kernels, Vec<Option<NodeId>>)> {
        p.check(&lowered.graph)?;
        let mut clustered = clustered(&lowered.graph, self.sizes, p)?;
        if !matches!(joining, Joining::Joined | Joining::Separate) {
            groups::leave(&mut lowered.graph);
            groups::leave(&mut clustered.graph);
        }
        clustered.report.set_traffic(&clustered.traffic, self.sizes);
        lowered.graph = p.keep(lowered.graph);
        let kernels = Kernels {
            joining,
            lowered,
            clusters: clustered.graph,
            traffic: clustered.traffic,
            fused: clustered.report,
        };
        Ok((kernels, clustered.owners))
    }

    /// A placement of a graph by predicted times alone. `None` where one device has all nodes, or
    /// where no such placement keeps the memory limits.
    fn first_placement(&self, g: &Graph, p: &mut Passes) -> Result<Option<Placement>> {
        let request = Request {
            plan: None,
            kept: None,
            previous: None,
            ..self.request.clone()
        };
        let options = Options {
            measured: Arc::default(),
            ..p.config.options.clone()
        };
        let config = Config {
            options: &options,
            ..p.config
        };
        let placed = p.run(Pass::Place, |_| {
            let sized = passes::specialise(g, self.sizes)?;
            possible(place::place(&sized, &request, &costs(config)))
        })?;
        Ok(placed.filter(Placement::is_spread))
    }
}

/// The kernels, equal ones once.
fn distinct(all: Vec<Kernels>) -> Vec<Kernels> {
    let mut distinct: Vec<Kernels> = Vec::new();
    for kernels in all {
        if distinct.iter().all(|k| k.clusters != kernels.clusters) {
            distinct.push(kernels);
        }
    }
    distinct
}

/// The graph for given sizes if stages are kept; otherwise an empty one.
pub(super) fn kept(g: &Graph, sizes: &Bindings, config: Config) -> Result<Graph> {
    match config.options.keep_stages {
        true => passes::specialise(g, sizes),
        false => Ok(Graph::default()),
    }
}

/// A result that may be out of memory.
fn possible<T>(result: Result<T>) -> Result<Option<T>> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(e) if e.kind() == ErrorKind::OutOfMemory => Ok(None),
        Err(e) => Err(e),
    }
}

fn merged(g: &Graph, p: &mut Passes) -> Result<Graph> {
    match p.config.options.opt_level {
        0 => Ok(g.clone()),
        _ => p.run(Pass::Merge, |_| passes::merge(g)),
    }
}

/// Kernels are chosen at representative sizes; their bodies keep the symbols.
fn clustered(rewritten: &Graph, sizes: &Bindings, p: &mut Passes) -> Result<Clustered> {
    let mut fusion = fusion(p.config);
    if fusion.has_choice() && p.is_late("kernels are fused as at --opt-level 1") {
        fusion = Fusion::greedy(pricing(p.config));
    }
    let sized = match sizes.is_empty() {
        true => None,
        false => Some(passes::specialise(rewritten, sizes)?),
    };
    let sized = sized.as_ref().unwrap_or(rewritten);
    let clustered = p.run(Pass::Cluster, |_| cluster_at(rewritten, sized, &fusion))?;
    p.check(&clustered.graph)?;
    Ok(clustered)
}

impl Kernels {
    /// The same kernels for given sizes of all dims.
    pub fn bind(&self, sizes: &Bindings, p: &mut Passes) -> Result<Kernels> {
        let clusters = p.run(Pass::Bind, |_| passes::specialise(&self.clusters, sizes))?;
        p.check(&clusters)?;
        let mut fused = self.fused.clone();
        fused.set_traffic(&self.traffic, sizes);
        Ok(Kernels {
            joining: self.joining,
            lowered: self
                .lowered
                .with(kept(&self.lowered.graph, sizes, p.config)?),
            clusters,
            traffic: Traffic::default(),
            fused,
        })
    }

    /// The clusters, and the graph that they were formed of if stages are kept.
    pub fn into_graphs(self) -> (Graph, Graph) {
        (self.clusters, self.lowered.graph)
    }

    pub fn clusters(&self) -> &Graph {
        &self.clusters
    }

    /// True if an earlier placement or a plan is of these kernels, or if there is none.
    fn is_wanted(&self, request: &Request) -> bool {
        if let Some(previous) = &request.previous {
            return previous.joining == self.joining;
        }
        let plan = request.plan.as_ref();
        plan.is_none_or(|plan| plan.names_all_of(&place::names(&self.clusters)))
    }

    /// Adds these kernels, for given sizes, to a report.
    pub fn report_to(&self, report: &mut Report, sizes: Option<&Bindings>) {
        report.cluster = self.fused.clone();
        if let Some(sizes) = sizes {
            report.cluster.set_traffic(&self.traffic, sizes);
        }
        report.lowered = self.lowered.n_products;
        report.warnings.extend_from_slice(&self.lowered.warnings);
    }
}

/// The kernels with the best placement for the objective of a request; the first of equals. A plan
/// is about the kernels that it names. Kernels of an earlier placement stay, and so do those with
/// a cached placement.
///
/// Errors as the placement of the first kernels does, when there is none.
pub(super) fn best(
    mut all: Vec<Kernels>,
    request: &Request,
    config: Config,
) -> Result<(Kernels, Placement)> {
    if all.iter().any(|k| k.is_wanted(request)) {
        all.retain(|k| k.is_wanted(request));
    }
    let costs = costs(config);
    let place = |kernels: Kernels| {
        let placement = place::place(&kernels.clusters, request, &costs);
        (kernels, placement)
    };
    let workers = Workers::new(config.settings.n_threads());
    let (mut placed, mut error) = (Vec::new(), None);
    for (kernels, placement) in workers.map(all, place) {
        match placement {
            Ok(placement) => placed.push((kernels, placement)),
            Err(e) if e.kind() == ErrorKind::OutOfMemory => error = error.or(Some(e)),
            Err(e) => return Err(e),
        }
    }
    let rivals = placed.iter().map(|(k, p)| p.rival(k.joining)).collect();
    let best = placed
        .into_iter()
        .min_by_key(|(_, p)| (!p.is_cached(), p.score()));
    match (best, error) {
        (Some((kernels, placement)), _) => {
            let placement = placement.among(kernels.joining, rivals);
            Ok((kernels, placement))
        }
        (None, Some(e)) => Err(e),
        (None, None) => Err(Error::internal("there are no kernels to place")),
    }
}

#[cfg(test)]
mod tests;
