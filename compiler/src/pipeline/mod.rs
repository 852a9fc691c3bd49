//! The way of a model, as one list: every stage is a function, every stage has a text.

use crate::cluster::{Fusion, cluster};
use crate::codegen::assemble::{Settings, assemble};
use crate::codegen::cuda::nvrtc::{self, Cache};
use crate::codegen::{cpu, cuda};
use crate::cost::CostModel;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::ir::print::PrintOptions;
use crate::ir::verify::verify;
use crate::ir::{Graph, Node, NodeId, Op};
use crate::options::{Options, Precision};
use crate::partition::Part;
use crate::place::{Horizon, Placement, Replacement, Request};
use crate::report::Report;
use crate::rewrite::Pricing;
use crate::schedule::Schedule;
use crate::target::Arch;
use crate::units::time_ns;
use crate::{partition, passes, place, rewrite, tune};
use gristmill_runtime::device::{DeviceKind, DeviceName};
use gristmill_runtime::gpu::GpuCode;
use gristmill_runtime::program::Program;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// A stage whose text can be dumped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// The imported graph, constants folded.
    Graph,
    /// After equality saturation.
    Rewritten,
    /// One node per kernel.
    Clusters,
    /// Device of each cluster, and why.
    Placed,
    /// One graph per device, send and recv inserted.
    Partitions,
    /// Order, dependencies and arena offsets.
    Schedule,
    /// Cranelift IR.
    Clif,
    /// Disassembly.
    Asm,
    /// CUDA C++.
    Cuda,
    /// PTX.
    Ptx,
    /// Disassembly of the CUDA kernels.
    Sass,
}

impl Stage {
    /// All stages in order.
    pub const ALL: &'static [Stage] = &[
        Stage::Graph,
        Stage::Rewritten,
        Stage::Clusters,
        Stage::Placed,
        Stage::Partitions,
        Stage::Schedule,
        Stage::Clif,
        Stage::Asm,
        Stage::Cuda,
        Stage::Ptx,
        Stage::Sass,
    ];

    /// Name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Stage::Graph => "graph",
            Stage::Rewritten => "rewritten",
            Stage::Clusters => "clusters",
            Stage::Placed => "placed",
            Stage::Partitions => "partitions",
            Stage::Schedule => "schedule",
            Stage::Clif => "clif",
            Stage::Asm => "asm",
            Stage::Cuda => "cuda",
            Stage::Ptx => "ptx",
            Stage::Sass => "sass",
        }
    }

    /// One line on what it shows.
    pub fn doc(self) -> &'static str {
        match self {
            Stage::Graph => "the imported graph, constants folded",
            Stage::Rewritten => "after equality saturation",
            Stage::Clusters => "one node per kernel",
            Stage::Placed => "device of each cluster, and why",
            Stage::Partitions => "one graph per device, with send and recv",
            Stage::Schedule => "order, dependencies and arena offsets",
            Stage::Clif => "Cranelift IR of the generated kernels",
            Stage::Asm => "disassembly of the generated kernels",
            Stage::Cuda => "CUDA C++ that the clusters would be on a GPU",
            Stage::Ptx => "PTX of the same, compiled by NVRTC",
            Stage::Sass => "disassembly of the same, by nvdisasm",
        }
    }

    /// The stage of a name.
    pub fn parse(name: &str) -> Option<Stage> {
        Stage::ALL.iter().copied().find(|s| s.name() == name)
    }

    /// False for stages that need a compiler of their own, which runs only when one of them is asked for by name.
    pub fn is_cheap(self) -> bool {
        !matches!(self, Stage::Ptx | Stage::Sass)
    }
}

/// The results of all stages for one set of shapes.
pub struct Lowered {
    /// The imported graph, constants folded.
    pub graph: Graph,
    /// After equality saturation and the plain passes that follow it.
    pub rewritten: Graph,
    /// One node per kernel.
    pub clusters: Graph,
    /// Device of each cluster.
    pub placement: Placement,
    /// One graph per device.
    pub partitions: Vec<Part>,
    /// Order and memory plan of each partition.
    pub schedules: Vec<Schedule>,
    /// The node of its partition's graph that each step computes, by partition; none for copies to outputs.
    pub step_nodes: Vec<Vec<Option<NodeId>>>,
    /// What the executor runs.
    pub program: Arc<Program>,
    /// Text of the generated code, when the options asked for it.
    pub clif: String,
    /// Disassembly of the generated code, when the options asked for it.
    pub asm: String,
    /// How the code was generated.
    settings: Settings,
    /// Whether the graphs above still have their constants, and the texts are there.
    kept: bool,
    /// What happened on the way.
    pub report: Report,
}

/// Times stages and checks what they give.
struct Stages<'o> {
    options: &'o Options,
    deadline: Deadline,
    report: Report,
}

impl Stages<'_> {
    fn new(options: &Options) -> Stages<'_> {
        Stages {
            options,
            deadline: Deadline::after(options.budget),
            report: Report::default(),
        }
    }

    /// Whether the budget is over; a warning says what that leaves out.
    fn is_late(&mut self, left_out: &str) -> bool {
        let late = self.deadline.has_passed();
        if late {
            self.warn_late(left_out);
        }
        late
    }

    fn warn_late(&mut self, left_out: &str) {
        let budget = time_ns(self.options.budget.map_or(0, |b| b.as_nanos() as u64));
        self.report
            .warnings
            .push(format!("the budget of {budget} was over: {left_out}"));
    }

    /// Runs a stage; its time is added to earlier ones of the same name.
    fn run<T>(
        &mut self,
        name: &'static str,
        stage: impl FnOnce(&mut Report) -> Result<T>,
    ) -> Result<T> {
        let started = Instant::now();
        let result = stage(&mut self.report)?;
        let ns = started.elapsed().as_nanos() as u64;
        match self.report.stages.iter_mut().find(|(n, _)| *n == name) {
            Some((_, total)) => *total += ns,
            None => self.report.stages.push((name, ns)),
        }
        Ok(result)
    }

    /// The graph if stages are kept, or nothing, so that its weights can go.
    fn keep(&self, g: Graph) -> Graph {
        if self.options.keep_stages {
            g
        } else {
            Graph::default()
        }
    }

    fn check(&self, g: &Graph) -> Result<()> {
        if self.options.check {
            verify(g)
        } else {
            Ok(())
        }
    }
}

/// The way of a graph as far as its placement; devices need no code generator.
pub struct Planned {
    /// One node per kernel.
    pub clusters: Graph,
    /// Device of each cluster.
    pub placement: Placement,
    /// What happened on the way.
    pub report: Report,
}

/// The way of a graph of static shapes to a placement: what can be said about machines that are not there.
pub fn plan(graph: Graph, options: &Options) -> Result<Planned> {
    let mut s = Stages::new(options);
    let front = front(graph, None, &mut s)?;
    if options.check {
        place::check::check(&front.clusters, &front.request, &front.placement)?;
    }
    Ok(Planned {
        clusters: front.clusters,
        placement: front.placement,
        report: s.report,
    })
}

/// What becomes of an earlier placement of a graph by today's measured times. Rewriting and clustering do not depend on these.
pub fn replan(
    graph: Graph,
    options: &Options,
    previous: &Placement,
    horizon: Horizon,
) -> Result<Replacement> {
    let mut s = Stages::new(options);
    let front = front(graph, Some(previous), &mut s)?;
    place::replace(
        &front.clusters,
        &front.request,
        &costs(options),
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
fn front(graph: Graph, previous: Option<&Placement>, s: &mut Stages) -> Result<Front> {
    let options = s.options;
    let mut request = Request {
        devices: options.devices.clone(),
        pins: options.pins.clone(),
        fallback: options.fallback,
        plan: options.plan.clone(),
        objective: options.objective,
        kept: options.kept.clone(),
        previous: previous.cloned().map(Arc::new),
        ..Request::default()
    };
    let graph = s.run("fold", |_| {
        // Pins become requests of the model's own nodes, so that no pass joins nodes of different devices.
        let mut pinned = graph.clone();
        place::apply_pins(&mut pinned, &mut request)?;
        let mut cleaned = passes::clean(&quantized(pinned, options)?)?;
        place::follow_operands(&mut cleaned, &request);
        passes::expand_all_reduce(&cleaned, &|places| place::gpus::nccl_joins(places, options))
    })?;
    s.check(&graph)?;
    let deadline = s.deadline;
    let mut rewritten = s.run("rewrite", |report| {
        rewrite(&graph, options, deadline, report)
    })?;
    if s.report.rewrite.ran_out_of_time() {
        s.warn_late("not all rewrite rules were tried");
    }
    rewritten = s.run("fold", |_| passes::clean(&rewritten))?;
    if options.opt_level > 0 {
        rewritten = s.run("merge", |_| {
            passes::clean(&passes::merge_matmuls(&rewritten)?)
        })?;
    }
    rewritten = lower_precision(rewritten, &request, s)?;
    s.check(&rewritten)?;
    let graph = s.keep(graph);
    let mut fusion = fusion(options);
    if matches!(fusion, Fusion::Priced(_)) && s.is_late("kernels are fused as at --opt-level 1") {
        fusion = Fusion::Grouped;
    }
    let clusters = s.run("cluster", |report| {
        let (clusters, r) = cluster(&rewritten, &fusion)?;
        report.cluster = r;
        Ok(clusters)
    })?;
    s.check(&clusters)?;
    let rewritten = s.keep(rewritten);
    request.is_brief =
        options.devices.devices.len() > 1 && s.is_late("the placement is not refined");
    let placement = s.run("place", |report| {
        let placement = place::place(&clusters, &request, &costs(options))?;
        report.warnings.extend(placement.warnings.iter().cloned());
        Ok(placement)
    })?;
    Ok(Front {
        graph,
        rewritten,
        clusters,
        request,
        placement,
    })
}

/// The way of a graph of static shapes to a program.
pub fn lower(graph: Graph, options: &Options) -> Result<Lowered> {
    let mut s = Stages::new(options);
    let Front {
        graph,
        rewritten,
        mut clusters,
        request,
        placement,
    } = front(graph, None, &mut s)?;
    check_presence(&placement, options)?;
    // Where nodes run more than once, each copy becomes a node.
    let expanded = if placement.copies.is_empty() {
        None
    } else {
        Some(placement.expand(&clusters)?)
    };
    let (whole, placed) = expanded
        .as_ref()
        .map_or((&clusters, &placement), |(g, p)| (g, p));
    let mut partitions = s.run("partition", |_| partition::partition(whole, placed))?;
    if options.check {
        place::check::check(&clusters, &request, &placement)?;
        partition::check::check(whole, placed, &partitions)?;
    }
    drop(expanded);
    if settings(options).codegen.release_constants {
        clusters.release_constants();
    }
    let mut settings = settings(options);
    settings.forms = s.run("tune", |report| {
        tune::choose(&partitions, options, &settings, report)
    })?;
    settings.n_in_flight = placement
        .stream
        .map_or(1, |stream| stream.in_flight as usize);
    let mut made = s.run("codegen", |_| {
        assemble(&clusters, &mut partitions, &settings)
    })?;
    if options.check {
        partition::check::check_schedules(&clusters, &partitions, &made.schedules)?;
    }
    s.report.arenas = made.arenas();
    s.report.choices = std::mem::take(&mut made.choices);
    s.report.warnings.append(&mut made.warnings);
    s.report.constant_bytes = made
        .program
        .partitions
        .iter()
        .flat_map(|p| &p.constants)
        .map(|t| t.size_bytes())
        .sum();
    let (clif, asm) = (
        std::mem::take(&mut made.clif),
        std::mem::take(&mut made.asm),
    );
    let program = Arc::new(made.program);
    Ok(Lowered {
        graph,
        rewritten,
        clusters,
        placement,
        partitions,
        schedules: made.schedules,
        step_nodes: made.step_nodes,
        program,
        clif,
        asm,
        settings,
        kept: options.keep_stages,
        report: s.report,
    })
}

/// Errors with `Unsupported` when nodes are on GPUs that are not there, as plans for absent machines may have them.
fn check_presence(placement: &Placement, options: &Options) -> Result<()> {
    let mut used: BTreeMap<usize, usize> = BTreeMap::new();
    for placed in placement.nodes.iter().flatten() {
        *used.entry(placed.device).or_default() += 1;
    }
    used.into_iter().try_for_each(|(device, n_nodes)| {
        let checked = place::gpus::check_presence(&placement.devices[device], &options.gpus);
        checked.map_err(|e| e.context(format!("the plan has {n_nodes} nodes on a GPU")))
    })
}

/// Quantised models as their kernels take them, before weights are folded. GPUs multiply dequantised floats.
fn quantized(g: Graph, options: &Options) -> Result<Graph> {
    if options.opt_level == 0 {
        return Ok(g);
    }
    let g = passes::merge_quantization(&g)?;
    let only_cpus = options
        .devices
        .devices
        .iter()
        .all(|d| d.name.kind == DeviceKind::Cpu);
    if only_cpus {
        passes::integer_products(&g)
    } else {
        Ok(g)
    }
}

/// Products that must run on GPUs in the precision that was asked for; those that could run on a CPU stay as they are.
fn lower_precision(g: Graph, request: &Request, s: &mut Stages) -> Result<Graph> {
    let precision = s.options.precision;
    let set = &request.devices;
    let is_gpu = |d: &place::Device| d.name.kind != DeviceKind::Cpu;
    let useless =
        format!("--precision {precision} changes nothing: no f32 product has to run on a GPU");
    if precision == Precision::Tf32 && !set.devices.iter().any(is_gpu) {
        s.report.warnings.push(useless.clone());
    }
    let Some(to) = precision.dtype() else {
        return Ok(g);
    };
    let anywhere = set.devices.iter().all(is_gpu);
    let on_gpu = |node: &Node| match &node.device {
        Some(asked) => set
            .matching(&asked.spec)
            .into_iter()
            .all(|d| is_gpu(&set.devices[d])),
        None => anywhere,
    };
    s.run("precision", |report| {
        let (lowered, n) = passes::lower_precision(&g, to, &on_gpu)?;
        report.lowered = Some((precision, n));
        if n == 0 {
            report.warnings.push(useless);
        }
        passes::clean(&lowered)
    })
}

fn rewrite(g: &Graph, options: &Options, deadline: Deadline, report: &mut Report) -> Result<Graph> {
    if options.opt_level == 0 {
        return Ok(g.clone());
    }
    let rewrite_options = rewrite::Options {
        deadline,
        ..rewrite_options(options)
    };
    let (rewritten, r) = rewrite::rewrite(g, &rewrite_options)?;
    report.rewrite = r;
    Ok(rewritten)
}

fn rewrite_options(options: &Options) -> rewrite::Options {
    rewrite::Options {
        pricing: pricing(options),
        ..rewrite::Options::level(options.opt_level)
    }
}

/// The model that placement asks: with what was measured.
pub(crate) fn costs(options: &Options) -> CostModel {
    CostModel {
        measured: options.measured.clone(),
        ..CostModel::default()
    }
}

/// Rewriting and fusion price for the device that computes fastest, the first of equals, since that is where most will run. Clusters suit every
/// device of the set: where there is a CPU, they are fused as its kernels can be.
fn pricing(options: &Options) -> Pricing {
    let devices = &options.devices.devices;
    let faster = |a: &place::Device, b: &place::Device| b.profile.flops_f32 > a.profile.flops_f32;
    let fastest = devices
        .iter()
        .reduce(|a, b| if faster(a, b) { b } else { a });
    let only_gpus = !devices.is_empty() && devices.iter().all(|d| d.name.kind != DeviceKind::Cpu);
    fastest.map_or_else(Pricing::default, |d| Pricing {
        only_gpus,
        ..Pricing::of(d.profile.clone())
    })
}

fn fusion(options: &Options) -> Fusion {
    match options.opt_level {
        0 => Fusion::Off,
        1 => Fusion::Grouped,
        _ => Fusion::Priced(pricing(options)),
    }
}

/// How CUDA code is generated, and for what where no GPU decides it.
fn gpu_options(options: &Options) -> cuda::Options {
    let arch = options.gpu_arch.unwrap_or(Arch::COMMON);
    cuda::Options {
        tf32: options.precision == Precision::Tf32,
        ..arch.into()
    }
}

fn settings(options: &Options) -> Settings {
    let n_cpus = options.devices.devices.len().max(1);
    let n_threads = (options
        .threads
        .unwrap_or_else(gristmill_runtime::cpu::n_cores)
        / n_cpus)
        .max(1);
    let limit = |d: &place::Device| d.memory_limit.map(|b| (d.name.clone(), b.0 as usize));
    Settings {
        codegen: cpu::Options {
            target: options.target_cpu,
            n_threads,
            listings: options.keep_stages,
            release_constants: !options.keep_stages && !options.check,
        },
        gpu_archs: place::gpus::archs(options),
        gpu: gpu_options(options),
        forms: BTreeMap::new(),
        memory_limits: options.devices.devices.iter().filter_map(limit).collect(),
        n_in_flight: 1,
        fusion: fusion(options),
        check: options.check,
    }
}

impl Lowered {
    /// The text of a stage. `full` prints constants so that graphs parse back.
    ///
    /// Errors with `Unsupported` for stages whose compiler or disassembler is not installed, with `InvalidInput` when
    /// [`Options::keep_stages`] was off.
    pub fn text(&self, stage: Stage, full: bool) -> Result<String> {
        if !self.kept {
            return Err(Error::invalid("the stages were not kept").hint("Options::keep_stages"));
        }
        let print = if full {
            PrintOptions::FULL
        } else {
            PrintOptions::SHORT
        };
        let schedule = |(part, schedule): (&Part, &Schedule)| {
            format!("// {}\n{}", part.device, schedule.to_text(&part.graph))
        };
        Ok(match stage {
            Stage::Graph => self.graph.to_text(print),
            Stage::Rewritten => self.rewritten.to_text(print),
            Stage::Clusters => self.clusters.to_text(print),
            Stage::Placed => self.placement.to_text(&self.clusters),
            Stage::Partitions => partition::to_text(&self.partitions, print),
            Stage::Schedule => {
                let choices = self
                    .report
                    .choices
                    .iter()
                    .map(|c| format!("// {}: {c}\n", c.kernel));
                self.partitions
                    .iter()
                    .zip(&self.schedules)
                    .map(schedule)
                    .chain(choices)
                    .collect::<String>()
                    + &self.program.to_string()
            }
            Stage::Clif => self.clif.clone(),
            Stage::Asm => self.asm.clone(),
            Stage::Cuda => self.cuda_text()?,
            Stage::Ptx => self.compiled_cuda(|_, code| Ok(code.ptx.clone()))?,
            Stage::Sass => {
                self.compiled_cuda(|nvrtc, code| cuda::disassemble(nvrtc, &code.cubin))?
            }
        })
    }

    fn cuda_text(&self) -> Result<String> {
        let (mut text, mut before) = (String::new(), String::new());
        for (what, generated) in self.cuda()? {
            if text.is_empty() {
                text = format!("// for {what}\n{}\n", cuda::PRELUDE);
            } else if what != before {
                text += &format!("// for {what}\n\n");
            }
            text += &generated.listing;
            before = what;
        }
        Ok(text)
    }

    /// CUDA sources of what runs on GPUs, as it runs there; where nothing does, of all clusters, as they would. Those in regions come last. In front
    /// of each, what they are for.
    fn cuda(&self) -> Result<Vec<(String, cuda::Generated)>> {
        let on_gpus = || {
            self.partitions
                .iter()
                .filter(|p| p.device.kind != DeviceKind::Cpu)
        };
        let mut todo: Vec<(String, &DeviceName, Graph)> = on_gpus()
            .map(|p| {
                (
                    format!(
                        "{}, {}",
                        p.device,
                        self.settings.gpu_options(&p.device).arch
                    ),
                    &p.device,
                    p.graph.clone(),
                )
            })
            .collect();
        if todo.is_empty() {
            let device = &self.partitions[0].device;
            todo.push((
                self.settings.gpu.arch.to_string(),
                device,
                self.clusters.clone(),
            ));
        }
        let mut made = Vec::new();
        todo.reverse();
        while let Some((what, device, g)) = todo.pop() {
            for (_, node) in g
                .nodes()
                .filter(|(_, n)| !matches!(n.op, Op::Cluster { .. }))
            {
                for region in node.regions.iter().rev() {
                    todo.push((what.clone(), device, self.settings.clustered(region)?));
                }
            }
            made.push((what, self.settings.cuda(&g, device)?));
        }
        Ok(made)
    }

    /// What `show` gives for every distinct kernel, compiled by NVRTC.
    fn compiled_cuda(
        &self,
        show: impl Fn(&nvrtc::Nvrtc, &GpuCode) -> Result<String>,
    ) -> Result<String> {
        let nvrtc = nvrtc::get()?;
        let cache = Cache::of_user();
        let mut text = String::new();
        for (_, generated) in self.cuda()? {
            for code in generated.compile(nvrtc, cache.as_ref())? {
                text.push_str(&show(nvrtc, &code)?);
                text.push('\n');
            }
        }
        let warnings = cache
            .iter()
            .flat_map(Cache::take_warnings)
            .map(|w| format!("// warning: {w}\n"));
        Ok(warnings.collect::<String>() + &text)
    }
}

#[cfg(test)]
mod tests;
