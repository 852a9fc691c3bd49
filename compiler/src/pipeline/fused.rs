//! The stages that do not depend on the sizes of symbolic dims, from the imported graph to fused
//! kernels. One result serves all shapes of a model.
//!
//! Rules of rewriting hold whatever the sizes are, since they see dims as expressions. Which of them
//! pay, and which ops become one kernel, is decided by predicted time at [`representative`](representative()) sizes.

use super::Config;
use super::kernels::{Kernels, Source, kept};
use super::representative::representative;
use super::timing::Passes;
use super::{pricing, request};
use crate::cost::Nanos;
use crate::error::Result;
use crate::ir::{Bindings, Graph, Node};
use crate::options::{DataParallel, Precision};
use crate::passes::Machine;
use crate::place::collectives::Collectives;
use crate::place::{self, DeviceSet, Request};
use crate::report::{Pass, Report, Scope};
use crate::rewrite::Deadline;
use crate::{passes, rewrite};
use gristmill_runtime::device::{DeviceKind, DeviceName};

/// Results of the stages up to fused kernels.
#[derive(Clone)]
pub struct Fused {
    /// The imported graph, constants folded.
    pub(super) graph: Graph,
    /// The kernels, or alternatives that placement decides among.
    pub(super) kernels: Vec<Kernels>,
    /// Devices and pins.
    pub(super) request: Request,
    report: Report,
    deadline: Deadline,
}

/// Lowers a graph, whose dims may be symbolic, to fused kernels.
pub fn fused(graph: Graph, config: Config) -> Result<Fused> {
    fused_for(graph, &Bindings::new(), config)
}

/// [`fused`] for a graph that is first run with some sizes of its symbols.
pub fn fused_for(graph: Graph, first: &Bindings, config: Config) -> Result<Fused> {
    let mut p = Passes::new(config);
    let mut request = request(config);
    let form = |graph| in_kernel_form(graph, config);
    let graph = prepared(graph, form, &mut request, &mut p)?;
    let sizes = representative(&graph, first, config);
    let rewritten = simplified(&graph, &sizes, &mut p)?;
    with_kernels([graph, rewritten], &sizes, request, p)
}

/// [`fused`] for a graph of static shapes whose batch several devices share: the first axis of the inputs named. The whole graph is
/// rewritten before it is divided, once for all replicas.
///
/// Errors as [`passes::check_divisible`] does.
pub fn fused_in_parts(
    graph: Graph,
    batched: &[String],
    on: &DataParallel,
    config: Config,
) -> Result<Fused> {
    passes::check_divisible(&graph)?;
    let mut p = Passes::new(config);
    let whole = p.run(Pass::Fold, |_| {
        let mut graph = passes::forward_state(&graph)?;
        graph.order_state();
        passes::clean(&in_kernel_form(graph, config)?)
    })?;
    p.check(&whole)?;
    let sizes = Bindings::new();
    let rewritten = simplified(&whole, &sizes, &mut p)?;
    let parts = p.run(Pass::Divide, |report| {
        let (parts, note) = passes::split_batch(&rewritten, batched, on, &machine(on, config))?;
        report.notes.extend(note);
        Ok(parts)
    })?;
    let mut request = request(config);
    // They are in the form of the whole.
    let parts = prepared(parts, Ok, &mut request, &mut p)?;
    with_kernels([whole, parts], &sizes, request, p)
}

/// Latency of links from which on fewer transfers are worth copies of their tensors.
const SLOW: Nanos = Nanos(4_000);

/// The devices with a share of a batch. Between CPUs of one process, buckets make steps no shorter, and compilation longer.
fn machine(on: &DataParallel, config: Config) -> Machine {
    let set = &config.settings.devices;
    let number = |name: &DeviceName| set.devices.iter().position(|d| d.name == *name);
    let numbers: Vec<usize> = on.devices.iter().filter_map(number).collect();
    let devices = || numbers.iter().map(|&d| &set.devices[d]);
    let link = |a, b| set.links.get(&(a, b)).unwrap_or(&set.link);
    let mut links = numbers
        .iter()
        .flat_map(|a| numbers.iter().map(move |b| (*a, *b)));
    let is_slow = links.any(|(a, b)| a != b && link(a, b).latency >= SLOW);
    Machine {
        speeds: devices().map(|d| d.profile.flops_f32).collect(),
        has_slow_links: is_slow && devices().any(|d| d.name.kind.has_own_memory()),
    }
}

/// The kernels of a rewritten graph, beside the graph before it was rewritten.
fn with_kernels(
    [graph, rewritten]: [Graph; 2],
    sizes: &Bindings,
    request: Request,
    mut p: Passes,
) -> Result<Fused> {
    let graph = p.keep(graph);
    let source = Source {
        graph: &rewritten,
        sizes,
        request: &request,
    };
    let kernels = source.kernels(&mut p)?;
    Ok(Fused {
        graph,
        kernels,
        request,
        report: p.report,
        deadline: p.deadline,
    })
}

impl Fused {
    /// The same kernels for given sizes of all dims. Their report has the time of this pass only.
    ///
    /// Errors when the sizes contradict a type rule, naming the node.
    pub fn bind(&self, sizes: &Bindings, config: Config) -> Result<Fused> {
        let mut p = self.binding(config);
        let kernels = self.kernels.iter().map(|k| k.bind(sizes, &mut p));
        Ok(Fused {
            kernels: kernels.collect::<Result<_>>()?,
            graph: kept(&self.graph, sizes, config)?,
            request: self.request.clone(),
            report: p.report,
            deadline: p.deadline,
        })
    }

    /// The pass that puts sizes in.
    fn binding<'o>(&self, config: Config<'o>) -> Passes<'o> {
        let mut p = Passes::new(config);
        p.report = Report {
            passes: Vec::new(),
            scope: Scope::AllShapes,
            ..self.report.clone()
        };
        p
    }

    /// The kernels as for a single device.
    pub(super) fn first_clusters(&self) -> &Graph {
        self.kernels[0].clusters()
    }

    /// The pass that puts sizes into [`Fused::first_clusters`].
    pub(super) fn binding_first<'o>(&self, sizes: &Bindings, config: Config<'o>) -> Passes<'o> {
        let mut p = self.binding(config);
        self.kernels[0].report_to(&mut p.report, Some(sizes));
        p
    }

    /// Adds a note to the report.
    pub(crate) fn add_note(&mut self, note: String) {
        self.report.notes.push(note);
    }

    /// The passes that follow, with the report and the deadline of those before.
    pub(super) fn passes<'o>(&self, config: Config<'o>) -> Passes<'o> {
        Passes {
            config,
            deadline: self.deadline,
            report: self.report.clone(),
        }
    }
}

/// State is ordered and pins become requests of the model's own nodes, so that no pass reorders the one or joins nodes of
/// different devices; `form` makes kernel form of the graph, and constants are folded.
pub(super) fn prepared(
    mut graph: Graph,
    form: impl FnOnce(Graph) -> Result<Graph>,
    request: &mut Request,
    p: &mut Passes,
) -> Result<Graph> {
    let config = p.config;
    let collectives = Collectives {
        set: &config.settings.devices,
        gpus: &config.settings.gpus,
        kind: config.options.all_reduce,
    };
    let prepared = p.run(Pass::Fold, |_| {
        place::apply_pins(&mut graph, request)?;
        let mut graph = passes::forward_state(&graph)?;
        let mut devices = config.settings.devices.devices.iter();
        if config.options.updates_in_place && devices.all(|d| !d.name.kind.has_own_memory()) {
            graph = passes::check_scattered(&graph)?;
        }
        graph.order_state();
        let mut cleaned = passes::clean(&form(graph)?)?;
        place::follow_operands(&mut cleaned, request);
        passes::expand_all_reduce(&cleaned, &|asked| collectives.way(asked))
    })?;
    p.check(&prepared)?;
    Ok(prepared)
}

/// Equality saturation, then constant folding.
fn simplified(graph: &Graph, sizes: &Bindings, p: &mut Passes) -> Result<Graph> {
    let rewriting = rewrite_options(p.config, sizes, p.deadline);
    let rewritten = p.run(Pass::Rewrite, |report| {
        let (rewritten, rewriting) = rewrite::rewrite(graph, &rewriting)?;
        report.rewrite = rewriting;
        Ok(rewritten)
    })?;
    if p.report.rewrite.ran_out_of_time() {
        p.warn_late("not all rewrite rules were tried");
    }
    p.run(Pass::Fold, |_| {
        passes::clean(&passes::transposed_bytes(&rewritten)?)
    })
}

/// Convolutions in phases and quantised forms, as kernels take them. Weights are folded afterwards, so that those of the phases are.
pub(super) fn in_kernel_form(graph: Graph, config: Config) -> Result<Graph> {
    let graph = match config.options.opt_level > 0 {
        true => passes::polyphase(&graph)?,
        false => graph,
    };
    quantized(graph, config)
}

/// Quantised models as their kernels take them, before weights are folded. GPUs multiply dequantised floats.
fn quantized(g: Graph, config: Config) -> Result<Graph> {
    if config.options.opt_level == 0 {
        return Ok(g);
    }
    let g = passes::merge_quantization(&g)?;
    if config.settings.devices.devices.iter().any(is_gpu) {
        return Ok(g);
    }
    let g = passes::integer_products(&g)?;
    // Folding would make the old weights, which nobody reads any more.
    passes::byte_tables(&passes::dce(&g)?)
}

/// Products that must run on GPUs in the precision that was asked for; those that could run on a CPU stay as they are.
pub(super) fn lower_precision(g: Graph, request: &Request, p: &mut Passes) -> Result<Graph> {
    let (precision, set) = (p.config.options.precision, &request.devices);
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

fn rewrite_options(config: Config, sizes: &Bindings, deadline: Deadline) -> rewrite::Options {
    let mut pricing = pricing(config);
    pricing.costs.extents.bindings = sizes.clone();
    rewrite::Options {
        pricing,
        deadline,
        ..rewrite::Options::level(config.options.opt_level)
    }
}
