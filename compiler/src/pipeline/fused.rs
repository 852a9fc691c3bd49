//! The stages that do not depend on the sizes of symbolic dims, from the imported graph to fused
//! kernels. One result serves all shapes of a model.
//!
//! Rules of rewriting hold whatever the sizes are, since they see dims as expressions. Which of them
//! pay, and which ops become one kernel, is decided by predicted time at [`representative`](representative()) sizes.

use super::representative::representative;
use super::timing::Passes;
use super::{fusion, pricing, request};
use crate::cluster::{Fusion, Traffic, cluster_at};
use crate::deadline::Deadline;
use crate::error::Result;
use crate::ir::{Bindings, Graph, Node, Requested};
use crate::options::{AllReduce, Options, Precision};
use crate::place::{self, DeviceSet, Request};
use crate::report::{Pass, Report, Scope};
use crate::{passes, rewrite};
use gristmill_runtime::device::DeviceKind;

/// Results of the stages up to fused kernels.
#[derive(Clone)]
pub struct Fused {
    /// The imported graph, constants folded.
    pub(super) graph: Graph,
    /// After equality saturation and the plain passes that follow it.
    pub(super) rewritten: Graph,
    /// One node per kernel.
    pub(super) clusters: Graph,
    /// Bytes that they move.
    traffic: Traffic,
    /// Devices and pins.
    pub(super) request: Request,
    report: Report,
    deadline: Deadline,
}

/// Lowers a graph, whose dims may be symbolic, to fused kernels.
pub fn fused(graph: Graph, options: &Options) -> Result<Fused> {
    fused_for(graph, &Bindings::new(), options)
}

/// [`fused`] for a graph that is first run with some sizes of its symbols.
pub fn fused_for(graph: Graph, first: &Bindings, options: &Options) -> Result<Fused> {
    let mut p = Passes::new(options);
    let mut request = request(options);
    let graph = prepared(graph, &mut request, &mut p)?;
    let sizes = representative(&graph, first, options);
    let rewritten = simplified(&graph, &sizes, &request, &mut p)?;
    let graph = p.keep(graph);
    let (clusters, traffic) = clustered(&rewritten, &sizes, &mut p)?;
    p.report.cluster.set_traffic(&traffic, &sizes);
    Ok(Fused {
        graph,
        rewritten: p.keep(rewritten),
        clusters,
        traffic,
        request,
        report: p.report,
        deadline: p.deadline,
    })
}

impl Fused {
    /// The same kernels for given sizes of all dims. Their report has the time of this pass only.
    ///
    /// Errors when the sizes contradict a type rule, naming the node.
    pub fn bind(&self, sizes: &Bindings, options: &Options) -> Result<Fused> {
        let mut p = self.binding(sizes, options);
        let clusters = p.run(Pass::Bind, |_| passes::specialise(&self.clusters, sizes))?;
        p.check(&clusters)?;
        Ok(Fused {
            graph: kept(&self.graph, sizes, options)?,
            rewritten: kept(&self.rewritten, sizes, options)?,
            clusters,
            traffic: Traffic::default(),
            request: self.request.clone(),
            report: p.report,
            deadline: p.deadline,
        })
    }

    /// The pass that puts sizes in.
    pub(super) fn binding<'o>(&self, sizes: &Bindings, options: &'o Options) -> Passes<'o> {
        let mut p = Passes::new(options);
        p.report = Report {
            passes: Vec::new(),
            scope: Scope::AllShapes,
            ..self.report.clone()
        };
        p.report.cluster.set_traffic(&self.traffic, sizes);
        p
    }

    /// Adds a note to the report.
    pub(crate) fn add_note(&mut self, note: String) {
        self.report.notes.push(note);
    }

    /// The passes that follow, with the report and the deadline of those before.
    pub(super) fn passes<'o>(&self, options: &'o Options) -> Passes<'o> {
        Passes {
            options,
            deadline: self.deadline,
            report: self.report.clone(),
        }
    }
}

/// The graph for given sizes if stages are kept; otherwise an empty one.
fn kept(g: &Graph, sizes: &Bindings, options: &Options) -> Result<Graph> {
    match options.keep_stages {
        true => passes::specialise(g, sizes),
        false => Ok(Graph::default()),
    }
}

/// State is ordered and pins become requests of the model's own nodes, so that no pass reorders the one or joins nodes of
/// different devices; then constants are folded.
pub(super) fn prepared(mut graph: Graph, request: &mut Request, p: &mut Passes) -> Result<Graph> {
    let options = p.options;
    let joins = |places: &[Requested]| {
        options.all_reduce == AllReduce::Auto
            && place::gpus::nccl_joins(places, &options.devices, &options.gpus)
    };
    let prepared = p.run(Pass::Fold, |_| {
        place::apply_pins(&mut graph, request)?;
        let mut graph = passes::forward_state(&graph)?;
        let mut devices = options.devices.devices.iter();
        if options.updates_in_place && devices.all(|d| !d.name.kind.has_own_memory()) {
            graph = passes::check_scattered(&graph)?;
        }
        graph.order_state();
        // Before weights are folded, so that those of the phases are.
        if options.opt_level > 0 {
            graph = passes::polyphase(&graph)?;
        }
        let mut cleaned = passes::clean(&quantized(graph, options)?)?;
        place::follow_operands(&mut cleaned, request);
        passes::expand_all_reduce(&cleaned, &joins)
    })?;
    p.check(&prepared)?;
    Ok(prepared)
}

/// Equality saturation, and the plain passes that follow it.
fn simplified(graph: &Graph, sizes: &Bindings, request: &Request, p: &mut Passes) -> Result<Graph> {
    let rewriting = rewrite_options(p.options, sizes, p.deadline);
    let rewritten = p.run(Pass::Rewrite, |report| {
        let (rewritten, rewriting) = rewrite::rewrite(graph, &rewriting)?;
        report.rewrite = rewriting;
        Ok(rewritten)
    })?;
    if p.report.rewrite.ran_out_of_time() {
        p.warn_late("not all rewrite rules were tried");
    }
    let cleaned = p.run(Pass::Fold, |_| passes::clean(&rewritten))?;
    let merged = merge_products(cleaned, p)?;
    let simplified = lower_precision(merged, request, p)?;
    p.check(&simplified)?;
    Ok(simplified)
}

fn merge_products(g: Graph, p: &mut Passes) -> Result<Graph> {
    if p.options.opt_level == 0 {
        return Ok(g);
    }
    p.run(Pass::Merge, |_| passes::merge(&g))
}

/// Kernels are chosen at representative sizes; their bodies keep the symbols.
fn clustered(rewritten: &Graph, sizes: &Bindings, p: &mut Passes) -> Result<(Graph, Traffic)> {
    let mut fusion = fusion(p.options);
    if fusion.has_choice() && p.is_late("kernels are fused as at --opt-level 1") {
        fusion = Fusion::greedy(pricing(p.options));
    }
    let sized = match sizes.is_empty() {
        true => None,
        false => Some(passes::specialise(rewritten, sizes)?),
    };
    let (clusters, traffic) = p.run(Pass::Cluster, |report| {
        let sized = sized.as_ref().unwrap_or(rewritten);
        let (clusters, fused, traffic) = cluster_at(rewritten, sized, &fusion)?;
        report.cluster = fused;
        Ok((clusters, traffic))
    })?;
    p.check(&clusters)?;
    Ok((clusters, traffic))
}

/// Quantised models as their kernels take them, before weights are folded. GPUs multiply dequantised floats.
fn quantized(g: Graph, options: &Options) -> Result<Graph> {
    if options.opt_level == 0 {
        return Ok(g);
    }
    let g = passes::merge_quantization(&g)?;
    if options.devices.devices.iter().any(is_gpu) {
        return Ok(g);
    }
    passes::integer_products(&g)
}

/// Products that must run on GPUs in the precision that was asked for; those that could run on a CPU stay as they are.
fn lower_precision(g: Graph, request: &Request, p: &mut Passes) -> Result<Graph> {
    let (precision, set) = (p.options.precision, &request.devices);
    if precision == Precision::Tf32 && !set.devices.iter().any(is_gpu) {
        p.report.warnings.push(no_product_on_gpu(precision));
    }
    let Some(to) = precision.dtype() else {
        return Ok(g);
    };
    p.run(Pass::Precision, |report| {
        let (lowered, n) = passes::lower_precision(&g, to, &|node| must_be_on_gpu(node, set))?;
        report.lowered = Some((precision, n));
        if n == 0 {
            report.warnings.push(no_product_on_gpu(precision));
        }
        passes::clean(&lowered)
    })
}

fn no_product_on_gpu(precision: Precision) -> String {
    format!("--precision {precision} changes nothing: no f32 product has to run on a GPU")
}

fn is_gpu(device: &place::Device) -> bool {
    device.name.kind != DeviceKind::Cpu
}

/// True when no device that a node may be placed on is a CPU.
fn must_be_on_gpu(node: &Node, set: &DeviceSet) -> bool {
    let Some(asked) = &node.device else {
        return set.devices.iter().all(is_gpu);
    };
    let matching = set.matching(&asked.spec);
    matching.into_iter().all(|d| is_gpu(&set.devices[d]))
}

fn rewrite_options(options: &Options, sizes: &Bindings, deadline: Deadline) -> rewrite::Options {
    let mut pricing = pricing(options);
    pricing.costs.extents.bindings = sizes.clone();
    rewrite::Options {
        pricing,
        deadline,
        ..rewrite::Options::level(options.opt_level)
    }
}
