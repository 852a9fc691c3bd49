//! The stages of compilation, as one list: every stage is a function, every stage has a text.

mod config;
mod fused;
mod kernels;
mod loops;
mod on_one_device;
mod representative;
mod stage;
mod timing;

pub use crate::report::Scope;
pub use config::Config;
pub use fused::{Fused, fused, fused_for, fused_in_parts};
pub use loops::LoopTime;
pub(crate) use on_one_device::OnOneDevice;
pub use stage::Stage;

use crate::cluster::Fusion;
use crate::codegen::assemble::{Assembled, Interface, Settings, assemble};
use crate::codegen::cpu::Fallback;
use crate::codegen::workers::Workers;
use crate::codegen::{cpu, cuda};
use crate::cost::{CostModel, Nanos};
use crate::error::Result;
use crate::ir::print::PrintOptions;
use crate::ir::{Bindings, Graph, NodeId};
use crate::options::{ConvAlgorithm, Precision};
use crate::partition::Part;
use crate::place::{DeviceSet, Horizon, Placement, Replacement, Request};
use crate::report::{self, Pass, Report};
use crate::rewrite::Pricing;
use crate::schedule::Schedule;
use crate::target::Arch;
use crate::{partition, place};
use gristmill_runtime::DeviceName;
use gristmill_runtime::device::DeviceKind;
use gristmill_runtime::program::{Program, StepKind};
use kernels::Kernels;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;
use timing::Passes;

/// The results of all stages for one set of shapes.
pub struct Lowered {
    /// The imported graph, constants folded.
    pub graph: Graph,
    /// After equality saturation and the plain passes that follow it.
    pub rewritten: Graph,
    /// One node per kernel.
    pub clusters: Graph,
    /// Device of each cluster. On one device, predicted times of executables after a model's first
    /// are those of the first one's shapes.
    pub placement: Placement,
    /// One graph per device.
    pub partitions: Vec<Part>,
    /// Order and memory plan of each partition.
    pub schedules: Vec<Schedule>,
    /// The node of its partition's graph that each step computes, by partition; none for copies to outputs.
    pub step_nodes: Vec<Vec<Option<NodeId>>>,
    /// The executable program.
    pub program: Arc<Program>,
    /// Text of the generated code, when the options asked for it.
    pub clif: String,
    /// Disassembly of the generated code, when the options asked for it.
    pub asm: String,
    /// Options of the code generators.
    settings: Settings,
    /// True when the graphs above still have their constants, and the texts are there.
    has_stages: bool,
    /// Times, choices and warnings of the stages.
    pub report: Report,
}

/// Results of the stages up to placement; devices need no code generator.
pub struct Planned {
    /// One node per kernel.
    pub clusters: Graph,
    /// Device of each cluster.
    pub placement: Placement,
    /// Times, choices and warnings of the stages.
    pub report: Report,
}

/// Lowers fused kernels to a placement, on machines that need not exist.
pub fn plan(fused: Fused, config: Config) -> Result<Planned> {
    let mut p = fused.passes(config);
    let front = front(fused, None, &mut p)?;
    if config.options.check {
        place::check::check(&front.clusters, &front.request, &front.placement)?;
    }
    Ok(Planned {
        clusters: front.clusters,
        placement: front.placement,
        report: p.report,
    })
}

/// Compares an earlier placement of a graph with a new one under the present measured times, on which
/// rewriting and clustering do not depend.
pub fn replan(
    fused: Fused,
    config: Config,
    previous: &Placement,
    horizon: Horizon,
) -> Result<Replacement> {
    let mut p = fused.passes(config);
    let front = front(fused, Some(previous), &mut p)?;
    place::replace(
        &front.clusters,
        &front.request,
        &costs(config),
        previous,
        front.placement,
        horizon,
    )
}

/// The results of the stages up to placement.
struct Front {
    graph: Graph,
    rewritten: Graph,
    clusters: Graph,
    request: Request,
    placement: Placement,
}

/// Placement begins from `previous`, if there is one.
fn front(fused: Fused, previous: Option<&Placement>, p: &mut Passes) -> Result<Front> {
    let mut request = fused.request;
    request.previous = previous.cloned().map(Arc::new);
    let (kernels, placement) = placed(fused.kernels, &mut request, p)?;
    let (clusters, rewritten) = kernels.into_graphs();
    Ok(Front {
        graph: fused.graph,
        rewritten,
        clusters,
        request,
        placement,
    })
}

fn request(config: Config) -> Request {
    Request {
        devices: config.settings.devices.clone(),
        pins: config.options.pins.clone(),
        fallback: config.options.fallback,
        plan: config.options.plan.clone(),
        objective: config.options.objective,
        kept: config.settings.kept.clone(),
        ..Request::default()
    }
}

/// The graph with the pins of the options as requests of its nodes.
///
/// Errors when a pin finds no node.
pub(crate) fn with_pins(mut graph: Graph, config: Config) -> Result<Graph> {
    place::apply_pins(&mut graph, &mut request(config))?;
    Ok(graph)
}

fn placed(
    kernels: Vec<Kernels>,
    request: &mut Request,
    p: &mut Passes,
) -> Result<(Kernels, Placement)> {
    let config = p.config;
    let has_choice = config.settings.devices.devices.len() > 1;
    request.is_brief = has_choice && p.is_late("the placement is not refined");
    p.run(Pass::Place, |report| {
        let (kernels, placement) = kernels::best(kernels, request, config)?;
        kernels.report_to(report, None);
        report.warnings.extend(placement.warnings.iter().cloned());
        Ok((kernels, placement))
    })
}

/// Results of the stages up to one graph per device, from which code is generated.
pub struct Partitioned {
    /// The inputs and outputs of all.
    pub interface: Interface,
    graph: Graph,
    rewritten: Graph,
    pub(crate) clusters: Graph,
    pub(crate) placement: Placement,
    /// One graph per device.
    pub partitions: Vec<Part>,
    /// Options of the code generators.
    pub settings: Settings,
    /// Times, choices and warnings of the stages.
    pub report: Report,
}

/// Compiles a graph of static shapes to a program.
pub fn lower(graph: Graph, config: Config) -> Result<Lowered> {
    generate(partitioned(fused(graph, config)?, config)?, config)
}

/// The text of [`Stage::Graph`] of a graph whose shapes may be symbolic.
pub(crate) fn symbolic_text(graph: Graph, config: Config, full: bool) -> Result<String> {
    let mut request = request(config);
    let form = |graph| fused::in_kernel_form(graph, config);
    let prepared = fused::prepared(graph, form, &mut request, &mut Passes::new(config))?;
    Ok(prepared.to_text(PrintOptions::of(full)))
}

/// Lowers fused kernels to one graph per device.
pub fn partitioned(fused: Fused, config: Config) -> Result<Partitioned> {
    let parts = partitioned_anywhere(fused, config)?;
    parts.check_presence(config)?;
    Ok(parts)
}

/// [`partitioned`] for devices that need not exist.
pub(crate) fn partitioned_anywhere(fused: Fused, config: Config) -> Result<Partitioned> {
    let mut p = fused.passes(config);
    let mut front = front(fused, None, &mut p)?;
    let partitions = partition_checked(&front, &mut p)?;
    let mut settings = settings(config);
    if settings.codegen.release_constants {
        front.clusters.release_constants();
    }
    let stream = front.placement.stream;
    settings.n_in_flight = stream.map_or(1, |stream| stream.in_flight as usize);
    Ok(Partitioned {
        interface: Interface::of(&front.clusters, &Bindings::new())?,
        graph: front.graph,
        rewritten: front.rewritten,
        clusters: front.clusters,
        placement: front.placement,
        partitions,
        settings,
        report: p.report,
    })
}

impl Partitioned {
    /// The stages up to partitions. There is no program.
    pub(crate) fn without_code(self, config: Config) -> Lowered {
        Lowered {
            graph: self.graph,
            rewritten: self.rewritten,
            clusters: self.clusters,
            placement: self.placement,
            partitions: self.partitions,
            schedules: Vec::new(),
            step_nodes: Vec::new(),
            program: Arc::default(),
            clif: String::new(),
            asm: String::new(),
            settings: self.settings,
            has_stages: config.options.keep_stages,
            report: self.report,
        }
    }

    /// Errors with `Unsupported` when nodes are on GPUs that are not there, as plans for absent machines may have them.
    pub(crate) fn check_presence(&self, config: Config) -> Result<()> {
        let mut used: BTreeMap<usize, usize> = BTreeMap::new();
        for placed in self.placement.nodes.iter().flatten() {
            *used.entry(placed.device).or_default() += 1;
        }
        used.into_iter().try_for_each(|(device, n_nodes)| {
            let device = &self.placement.devices[device];
            let checked = place::gpus::check_presence(device, &config.settings.gpus);
            checked.map_err(|e| e.context(format!("the plan has {n_nodes} nodes on a GPU")))
        })
    }
}

impl Lowered {
    /// A program on a cluster: only its interface is known.
    pub(crate) fn elsewhere(program: Program, config: Config) -> Lowered {
        Lowered {
            graph: Graph::default(),
            rewritten: Graph::default(),
            clusters: Graph::default(),
            placement: Placement::by_hand(Vec::new(), &[]),
            partitions: Vec::new(),
            schedules: Vec::new(),
            step_nodes: Vec::new(),
            program: Arc::new(program),
            clif: String::new(),
            asm: String::new(),
            settings: settings(config),
            has_stages: false,
            report: Report::default(),
        }
    }

    /// Drops the graphs, which running does not need.
    pub(crate) fn release_graphs(&mut self) {
        self.clusters = Graph::default();
        self.partitions = Vec::new();
        self.schedules = Vec::new();
    }
}

/// Where nodes run more than once, each copy becomes a node before the graph is partitioned.
fn partition_checked(front: &Front, p: &mut Passes) -> Result<Vec<Part>> {
    let (clusters, placement) = (&front.clusters, &front.placement);
    let expanded = match placement.copies.is_empty() {
        true => None,
        false => Some(placement.expand(clusters)?),
    };
    let (whole, placed) = match &expanded {
        Some((whole, placed)) => (whole, placed),
        None => (clusters, placement),
    };
    let updates_in_place = p.config.options.updates_in_place;
    let partitions = p.run(Pass::Partition, |_| {
        let mut parts = partition::partition(whole, placed)?;
        if updates_in_place {
            partition::add_tokens(&mut parts)?;
        }
        Ok(parts)
    })?;
    if p.config.options.check {
        place::check::check(clusters, &front.request, placement)?;
        partition::check::check(whole, placed, &partitions)?;
    }
    Ok(partitions)
}

/// Code, schedules and memory plans of the partitions, as a program.
pub fn generate(mut partitioned: Partitioned, config: Config) -> Result<Lowered> {
    let mut partitions = std::mem::take(&mut partitioned.partitions);
    let mut lowered = generate_parts(partitioned, &mut partitions, config)?;
    if config.options.check {
        partition::check::check_schedules(&lowered.clusters, &partitions, &lowered.schedules)?;
    }
    lowered.partitions = partitions;
    Ok(lowered)
}

/// The program of parts from elsewhere, with the shared code and weights of a session.
#[cfg(feature = "distributed")]
pub(crate) fn generate_here(
    interface: Interface,
    mut parts: Vec<Part>,
    session: &crate::session::Session,
    config: Config,
) -> Result<(Program, Vec<String>)> {
    let mut settings = settings(config);
    settings.codegen.constants = session.constants().clone();
    settings.codegen.workers = session.workers();
    settings.codegen.code = Some(session.code().clone());
    let mut assembled = assemble(interface, &mut parts, &settings)?;
    assembled.program.divide(n_threads_per_device(config))?;
    Ok((assembled.program, assembled.warnings))
}

/// [`generate`] for graphs of devices that the result does not have.
fn generate_parts(
    partitioned: Partitioned,
    partitions: &mut [Part],
    config: Config,
) -> Result<Lowered> {
    let Partitioned {
        interface,
        settings,
        mut report,
        ..
    } = partitioned;
    let started = Instant::now();
    let mut assembled = assemble(interface, partitions, &settings)?;
    assembled.program.divide(n_threads_per_device(config))?;
    report.add_time(Pass::Codegen, started.elapsed());
    report_code(&mut report, &mut assembled, config);
    Ok(Lowered {
        graph: partitioned.graph,
        rewritten: partitioned.rewritten,
        clusters: partitioned.clusters,
        placement: partitioned.placement,
        partitions: Vec::new(),
        schedules: assembled.schedules,
        step_nodes: assembled.step_nodes,
        program: Arc::new(assembled.program),
        clif: assembled.listing.clif,
        asm: assembled.listing.asm,
        settings,
        has_stages: config.options.keep_stages,
        report,
    })
}

/// Moves arenas, fallbacks, choices and warnings of code generation to the report.
fn report_code(report: &mut Report, assembled: &mut Assembled, config: Config) {
    report.arenas = assembled.arenas();
    for (device, fallback) in std::mem::take(&mut assembled.fallbacks) {
        report.add_fallback(priced(&device, fallback, config));
    }
    report.filtered = filtered(&assembled.program);
    report.choices = std::mem::take(&mut assembled.choices);
    report.warnings.append(&mut assembled.warnings);
    report.constant_bytes = constant_bytes(&assembled.program);
    report.code_bytes = assembled.listing.code_bytes;
}

/// The convolutions that kernels of minimal filtering sum, and their tiles.
fn filtered(program: &Program) -> Vec<(String, usize)> {
    let mut found = Vec::new();
    for partition in &program.partitions {
        for step in &partition.steps {
            let StepKind::Kernel { kernel, .. } = &step.kind else {
                continue;
            };
            let name = partition.kernels[kernel.0 as usize].name();
            let tile = FILTERING.iter().find(|(symbol, _)| name.ends_with(symbol));
            found.extend(tile.map(|(_, tile)| (step.origin.clone(), *tile)));
        }
    }
    found
}

/// Kernels of minimal filtering, and the pixels on a side of their tiles.
const FILTERING: [(&str, usize); 2] = [("gm_winograd2_f32", 2), ("gm_winograd4_f32", 4)];

fn priced(device: &DeviceName, fallback: Fallback, config: Config) -> report::Fallback {
    let mut known = config.settings.devices.devices.iter();
    let profile = known.find(|d| d.name == *device).map(|d| &d.profile);
    let loss = profile.map_or(Nanos::ZERO, |p| p.loop_penalty(&fallback.work));
    report::Fallback {
        node: fallback.node,
        op: fallback.op,
        device: device.to_string(),
        why: fallback.why.to_string(),
        loss,
    }
}

fn constant_bytes(program: &Program) -> usize {
    let constants = program.partitions.iter().flat_map(|p| &p.constants);
    constants.map(|t| t.size_bytes()).sum()
}

/// The cost model of placement, with measured times.
pub(crate) fn costs(config: Config) -> CostModel {
    CostModel {
        measured: config.options.measured.clone(),
        direct_convolutions: config.options.conv == ConvAlgorithm::Direct,
        ..CostModel::default()
    }
}

/// Rewriting and fusion price for the fastest device, the first of equals, since most ops will run
/// there. Clusters suit every device of the set: where there is a CPU, fusion keeps to its kernels.
fn pricing(config: Config) -> Pricing {
    let devices = &config.settings.devices.devices;
    let fastest = config.settings.devices.fastest();
    let is_cpu = |d: &place::Device| d.name.kind == DeviceKind::Cpu;
    let only_gpus = !devices.is_empty() && !devices.iter().any(is_cpu);
    fastest.map_or_else(Pricing::default, |d| Pricing {
        only_gpus,
        only_cpus: devices.iter().all(is_cpu),
        is_one_device: devices.len() == 1,
        ..Pricing::of(d.profile.clone())
    })
}

fn fusion(config: Config) -> Fusion {
    match config.options.opt_level {
        0 => Fusion::Off,
        1 => Fusion::greedy(pricing(config)),
        _ => Fusion::priced(pricing(config)),
    }
}

/// Options of CUDA code generation, with the architecture for clusters that no GPU runs.
fn gpu_options(config: Config) -> cuda::Options {
    let arch = config.options.gpu_arch.unwrap_or(Arch::COMMON);
    cuda::Options {
        tf32: config.options.precision == Precision::Tf32,
        ..arch.into()
    }
}

fn settings(config: Config) -> Settings {
    Settings {
        codegen: cpu_options(config),
        gpu_archs: place::gpus::archs(
            &config.settings.devices,
            &config.settings.gpus,
            config.options.gpu_arch,
        ),
        gpu: gpu_options(config),
        forms: BTreeMap::new(),
        memory_limits: memory_limits(&config.settings.devices),
        n_in_flight: 1,
        fusion: fusion(config),
        order: None,
        updates_in_place: config.options.updates_in_place,
        check: config.options.check,
    }
}

fn cpu_options(config: Config) -> cpu::Options {
    cpu::Options {
        target: config.options.target_cpu,
        conv: config.options.conv,
        listings: config.options.keep_stages,
        release_constants: !config.options.keep_stages && !config.options.check,
        constants: Arc::default(),
        workers: Workers::default(),
        code: None,
        is_one_of_many: false,
        plans: None,
    }
}

/// An equal share of the threads for each device.
fn n_threads_per_device(config: Config) -> usize {
    let n_devices = config.settings.devices.devices.len().max(1);
    (config.settings.n_threads() / n_devices).max(1)
}

/// Memory limits of the devices that have one, in bytes.
fn memory_limits(set: &DeviceSet) -> BTreeMap<DeviceName, usize> {
    let limit = |d: &place::Device| Some((d.name.clone(), d.memory_limit?.0 as usize));
    set.devices.iter().filter_map(limit).collect()
}

#[cfg(test)]
mod tests;
