//! Joins kernels, schedules and partitions into the runtime's [`Program`].

use super::cpu::{self, Collector, Fallback, Listing};
use super::cuda::{self, nvrtc};
use super::kernel_forms::{Choice, Forms};
use super::plan::{Arg, DeviceKernels, KernelPlan, PackedConstant, PlanStep};
use super::store::ConstantStore;
use crate::cluster::{Fusion, cluster_region};
use crate::error::{Error, Result};
use crate::ir::{Bindings, Graph, Node, NodeId, Op, ReduceKind, Type, ValueId};
use crate::partition::Part;
use crate::passes;
use crate::schedule::{self, Action, KeptOrder, Needs, Place, Schedule};
use crate::target::Arch;
use gristmill_runtime::device::DeviceKind;
use gristmill_runtime::driver::Reduction;
use gristmill_runtime::program::{
    AllReduce, Buffer, BufferId, Carried, If, IoSpec, Kernel, KernelId, Key, Loc, Loop, Partition,
    Program, Scanned, Step, StepId, StepKind, TripCount, VariableSpec, invariant_steps,
};
use gristmill_runtime::{DType, DeviceName, Tensor};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// Options of assembly, by device where devices differ.
#[derive(Clone)]
pub struct Settings {
    /// Options of the CPU's code generator.
    pub codegen: cpu::Options,
    /// Target architecture of the CUDA code for each GPU.
    pub gpu_archs: BTreeMap<DeviceName, Arch>,
    /// Options of the CUDA generator, with the architecture of all other devices.
    pub gpu: cuda::Options,
    /// Forms of kernels on each GPU.
    pub forms: BTreeMap<DeviceName, Forms>,
    /// Memory limits of devices in bytes.
    pub memory_limits: BTreeMap<DeviceName, usize>,
    /// Runs that are in flight at a time, each with memory of its own.
    pub n_in_flight: usize,
    /// Options of the clusterer, for regions.
    pub fusion: Fusion,
    /// The order of the graph, from earlier sizes. Regions have none.
    pub order: Option<Arc<KeptOrder>>,
    /// Write updates over the old values of variables.
    pub updates_in_place: bool,
    /// Run the independent checker of schedules.
    pub check: bool,
}

impl Settings {
    /// Options of the CUDA generator for a device.
    pub fn gpu_options(&self, device: &DeviceName) -> cuda::Options {
        cuda::Options {
            arch: self.gpu_archs.get(device).copied().unwrap_or(self.gpu.arch),
            ..self.gpu
        }
    }

    /// The CUDA sources of a graph's clusters on a device.
    pub fn cuda(&self, g: &Graph, device: &DeviceName) -> Result<cuda::Generated> {
        cuda::generate_forms(
            g,
            self.gpu_options(device),
            self.forms.get(device).unwrap_or(&Forms::new()),
        )
    }

    /// The same for regions, of which neither plans nor order are known.
    fn of_regions(&self) -> Settings {
        let mut settings = self.clone();
        (settings.codegen.plans, settings.order) = (None, None);
        settings
    }

    /// A region as it is compiled: cleaned and clustered.
    pub fn clustered(&self, region: &Graph) -> Result<Graph> {
        cluster_region(&passes::clean(region)?, &self.fusion)
    }
}

/// A program, and records of its assembly for reports and dumps.
pub struct Assembled {
    /// Input of the executor.
    pub program: Program,
    /// Its machine code for CPUs.
    pub listing: Listing,
    /// Schedule of each partition, in order.
    pub schedules: Vec<Schedule>,
    /// Node of its part's graph for each step of each partition; none for copies to outputs.
    pub step_nodes: Vec<Vec<Option<NodeId>>>,
    /// Chosen forms of the kernels that have several.
    pub choices: Vec<Choice>,
    /// Failures without an end of assembly.
    pub warnings: Vec<String>,
    /// Ops that run in generated loops on a CPU although they have a kernel.
    pub fallbacks: Vec<(DeviceName, Fallback)>,
}

impl Assembled {
    /// Device, arena bytes and peak of live bytes (a lower bound of the arena) of each partition.
    pub fn arenas(&self) -> Vec<(String, usize, usize)> {
        let row =
            |(p, s): (&Partition, &Schedule)| (p.device.to_string(), p.arena_bytes, s.live_bytes);
        self.program
            .partitions
            .iter()
            .zip(&self.schedules)
            .map(row)
            .collect()
    }
}

/// Generates code for the partitions of a graph, whose interface is given, and joins it into one program.
///
/// Requires: shapes are static.
pub fn assemble(
    interface: Interface,
    parts: &mut [Part],
    settings: &Settings,
) -> Result<Assembled> {
    let mut code = Collector::new(&settings.codegen)?;
    let made = assemble_into(interface, parts, settings, &mut code, Role::Whole)?;
    Ok(Assembled {
        listing: code.finish()?,
        ..made
    })
}

/// The same with the code of a program that it is a part of.
fn assemble_into(
    interface: Interface,
    parts: &mut [Part],
    settings: &Settings,
    code: &mut Collector,
    role: Role,
) -> Result<Assembled> {
    let mut a = Assembler {
        settings,
        code,
        variables: Vec::new(),
        of_name: HashMap::new(),
        choices: Vec::new(),
        warnings: Vec::new(),
        fallbacks: Vec::new(),
        role,
    };
    let mut made = Vec::new();
    let mut schedules = Vec::new();
    let mut step_nodes = Vec::new();
    for part in parts {
        let (partition, schedule, nodes) = a.partition(part)?;
        made.push(partition);
        schedules.push(schedule);
        step_nodes.push(nodes);
    }
    let program = Program {
        name: interface.name,
        inputs: interface.inputs,
        outputs: interface.outputs,
        variables: a.variables,
        partitions: made,
    };
    let Assembler {
        choices,
        warnings,
        fallbacks,
        ..
    } = a;
    Ok(Assembled {
        program,
        listing: Listing::default(),
        schedules,
        step_nodes,
        choices,
        warnings,
        fallbacks,
    })
}

/// What callers of a graph see.
pub struct Interface {
    /// Name of the graph.
    pub name: String,
    /// Its inputs, in order.
    pub inputs: Vec<IoSpec>,
    /// Its outputs, in order.
    pub outputs: Vec<IoSpec>,
}

impl Interface {
    /// The interface of a graph with given sizes of its symbols.
    ///
    /// Errors with `Unsupported` when there is no size for a symbol of an input or output.
    pub fn of(g: &Graph, sizes: &Bindings) -> Result<Interface> {
        let spec = |name: &String, v: ValueId| {
            let ty = g.ty(v);
            let shape = ty.shape.bind(sizes).as_static();
            let shape = shape.ok_or_else(|| no_static_shape(ty))?;
            Ok(IoSpec::new(name, ty.dtype, &shape))
        };
        let inputs = g.input_names.iter().zip(&g.inputs);
        let outputs = g.outputs.iter();
        Ok(Interface {
            name: g.name.clone(),
            inputs: inputs.map(|(n, &v)| spec(n, v)).collect::<Result<_>>()?,
            outputs: outputs
                .map(|o| spec(&o.name, o.value))
                .collect::<Result<_>>()?,
        })
    }
}

fn static_shape(g: &Graph, v: ValueId) -> Result<Vec<usize>> {
    let ty = g.ty(v);
    ty.static_shape().ok_or_else(|| no_static_shape(ty))
}

fn no_static_shape(ty: &Type) -> Error {
    let message = "has no static shape: code is generated per shape";
    Error::unsupported(format!("a value of type {ty} {message}"))
}

/// Place of a graph in its program.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Whole,
    Branch,
    /// The body of a loop, whose last `n_args` inputs are the same in all iterations.
    Body {
        n_args: usize,
    },
}

impl Role {
    /// Of the regions of control flow with so many operands.
    fn of_regions(op: &Op, n_operands: usize) -> Role {
        let n_args = match op {
            // The bound and the condition come first.
            Op::Loop { carried, .. } => n_operands.checked_sub(2 + carried),
            Op::Scan {
                carried, scanned, ..
            } => n_operands.checked_sub(carried + scanned),
            _ => None,
        };
        n_args.map_or(Role::Branch, |n_args| Role::Body { n_args })
    }
}

struct Assembler<'s> {
    settings: &'s Settings,
    code: &'s mut Collector,
    role: Role,
    variables: Vec<VariableSpec>,
    /// The variables of a name, in any container.
    of_name: HashMap<String, Vec<u32>>,
    choices: Vec<Choice>,
    warnings: Vec<String>,
    fallbacks: Vec<(DeviceName, Fallback)>,
}

/// One partition under construction.
struct Draft<'g> {
    g: &'g Graph,
    part: &'g Part,
    schedule: &'g Schedule,
    store: &'g ConstantStore,
    buffers: Vec<Buffer>,
    constants: Vec<Tensor>,
    of_value: BTreeMap<ValueId, BufferId>,
    of_constant: BTreeMap<NodeId, u32>,
    /// Constants by address, dtype and shape.
    of_tensor: BTreeMap<(usize, DType, Vec<usize>), u32>,
    steps: Vec<Step>,
    /// Node of each step.
    step_nodes: Vec<Option<NodeId>>,
    /// Index among the program's variables of each of the schedule's residents.
    residents: Vec<u32>,
    /// The resident that a node reads or assigns.
    of_resident: BTreeMap<NodeId, u32>,
}

impl Assembler<'_> {
    fn partition(&mut self, part: &mut Part) -> Result<(Partition, Schedule, Vec<Option<NodeId>>)> {
        let compiled = match part.device.kind {
            DeviceKind::Cpu => self.cpu_kernels(part)?,
            DeviceKind::Gpu | DeviceKind::Emu => self.gpu_kernels(part)?,
        };
        let part = &*part;
        let limit = self.settings.memory_limits.get(&part.device).copied();
        let has_residents = self.role == Role::Whole;
        let scratch = compiled
            .plans
            .iter()
            .map(|(&id, p)| (id, p.scratch.clone()))
            .collect();
        let kept = match self.role {
            // A limit may have no room for kept buffers.
            Role::Body { n_args } if part.device.kind == DeviceKind::Cpu && limit.is_none() => {
                kept_scratch(&part.graph, &compiled, n_args)
            }
            _ => BTreeMap::new(),
        };
        let needs = Needs {
            scratch,
            kept,
            in_place: in_place(&part.device, &compiled),
            limit_bytes: limit,
            has_residents,
            updates_in_place: has_residents
                && part.updates_in_place
                && self.settings.updates_in_place,
            ..Needs::default()
        };
        if part.device.kind == DeviceKind::Gpu {
            // Copies beside kernels, if there is memory for it.
            let apart = Needs {
                has_disjoint_transfers: true,
                limit_bytes: None,
                ..needs.clone()
            };
            let made = self.scheduled(part, &compiled, &apart)?;
            let need = made
                .0
                .memory_use(&self.variables)
                .total_bytes(1)
                .saturating_mul(self.settings.n_in_flight);
            if limit.is_none_or(|limit| need <= limit) {
                return Ok(made);
            }
        }
        self.scheduled(part, &compiled, &needs)
    }

    /// A partition, its schedule, and the node of each of its steps.
    fn scheduled(
        &mut self,
        part: &Part,
        compiled: &DeviceKernels,
        needs: &Needs,
    ) -> Result<(Partition, Schedule, Vec<Option<NodeId>>)> {
        let g = &part.graph;
        let schedule = match &self.settings.order {
            Some(order) => order.schedule(g, needs)?,
            None => schedule::schedule(g, needs)?,
        };
        if self.settings.check {
            schedule::check::check(g, needs, &schedule)?;
        }
        let mut draft = Draft::new(part, &schedule, &self.settings.codegen.constants);
        self.add_residents(&mut draft);
        self.steps(&mut draft, compiled)?;
        let step_nodes = std::mem::take(&mut draft.step_nodes);
        let partition = Partition {
            device: part.device.clone(),
            arena_bytes: schedule.arena_bytes,
            buffers: draft.buffers,
            constants: draft.constants,
            kernels: compiled.kernels.clone(),
            gpu_code: compiled.gpu_code.clone(),
            steps: draft.steps,
            memory_limit: self.settings.memory_limits.get(&part.device).copied(),
        };
        Ok((partition, schedule, step_nodes))
    }

    fn cpu_kernels(&mut self, part: &mut Part) -> Result<DeviceKernels> {
        let compiled = cpu::compile_clusters(&mut part.graph, &self.settings.codegen, self.code)?;
        let fallbacks = compiled.fallbacks.into_iter();
        self.fallbacks
            .extend(fallbacks.map(|f| (part.device.clone(), f)));
        let kernels = compiled.kernels.into_iter().map(Kernel::Cpu).collect();
        Ok(DeviceKernels {
            kernels,
            gpu_code: Vec::new(),
            plans: compiled.plans,
        })
    }

    fn gpu_kernels(&mut self, part: &Part) -> Result<DeviceKernels> {
        let mut generated = self.settings.cuda(&part.graph, &part.device)?;
        if part.device.kind == DeviceKind::Emu {
            // Emulated devices run PTX, so no machine code is made for them.
            generated
                .units
                .iter_mut()
                .for_each(|u| u.arch = u.arch.ptx_only());
        }
        self.choices.extend(
            generated
                .forms
                .values()
                .flat_map(|f| f.choices.iter().cloned()),
        );
        let nvrtc = nvrtc::get()
            .map_err(|e| e.context(format!("{} needs a compiler of CUDA", part.device)))?;
        let cache = nvrtc::Cache::of_user();
        let gpu_code = generated.compile(nvrtc, cache.as_ref())?;
        self.warnings
            .extend(cache.iter().flat_map(nvrtc::Cache::take_warnings));
        let products = generated.products.into_iter().map(Kernel::Product);
        let kernels = generated
            .kernels
            .into_iter()
            .map(Kernel::Gpu)
            .chain(products)
            .collect();
        Ok(DeviceKernels {
            kernels,
            gpu_code,
            plans: generated.plans,
        })
    }

    /// Expands each scheduled step. A cluster's steps follow each other; others wait for its last.
    fn steps(&mut self, d: &mut Draft, compiled: &DeviceKernels) -> Result<()> {
        let mut last: Vec<Vec<StepId>> = Vec::new();
        for step in &d.schedule.steps {
            let deps = step.deps.iter().flat_map(|&i| &last[i as usize]);
            let deps: BTreeSet<StepId> = deps.copied().collect();
            let mut deps: Vec<StepId> = deps.into_iter().collect();
            let (kinds, node, origin) = match step.action {
                Action::Node(id) => {
                    let origin = d.g.node(id).origin.to_string();
                    (self.node_steps(d, id, compiled)?, Some(id), origin)
                }
                Action::CopyToOutput { value, output } => {
                    let name = &d.g.outputs[output as usize].name;
                    (
                        vec![d.copy(value, output)?],
                        None,
                        format!("output {name:?}"),
                    )
                }
            };
            for kind in kinds {
                d.step_nodes.push(node);
                let id = StepId(d.steps.len() as u32);
                d.steps.push(Step {
                    kind,
                    origin: origin.clone(),
                    deps: std::mem::replace(&mut deps, vec![id]),
                });
            }
            last.push(deps);
        }
        Ok(())
    }

    fn node_steps(
        &mut self,
        d: &mut Draft,
        id: NodeId,
        compiled: &DeviceKernels,
    ) -> Result<Vec<StepKind>> {
        let node = d.g.node(id);
        let kind = match &node.op {
            Op::Cluster { .. } => return d.kernels(id, compiled),
            Op::Send { key, to } => d.send(node, key, to)?,
            Op::Recv { key, from, .. } => d.recv(node, key, from)?,
            Op::Collective { .. } => d.all_reduce(node)?,
            Op::If | Op::Loop { .. } | Op::Scan { .. } => self.control(d, node)?,
            Op::ReadVariable {
                container,
                name,
                initial,
                ..
            } => {
                let dst = node.outputs[0];
                let variable = self.variable(d.g, dst, container, name);
                if let Some(initial) = initial {
                    self.variables[variable as usize].initial = Some(initial.tensor()?);
                }
                if d.of_resident.contains_key(&id) {
                    return Ok(Vec::new());
                }
                let dst = d.value(dst)?;
                StepKind::ReadVariable { variable, dst }
            }
            Op::AssignVariable { container, name } => {
                let src = node.inputs[0];
                let variable = self.variable(d.g, src, container, name);
                if let Some(&i) = d.of_resident.get(&id) {
                    return d.assignment(src, i);
                }
                let src = d.value(src)?;
                StepKind::AssignVariable { variable, src }
            }
            other => {
                let message = format!("{} cannot be executed yet", other.name());
                return Err(Error::unsupported(message).at_origin(&node.origin));
            }
        };
        Ok(vec![kind])
    }

    /// Declares the variables that a partition uses where they are.
    fn add_residents(&mut self, d: &mut Draft) {
        for (i, resident) in (0..).zip(&d.schedule.residents) {
            let uses = resident.reads.iter().chain(&resident.assignment);
            for &id in uses.clone() {
                d.of_resident.insert(id, i);
            }
            let value = uses.map(|&id| d.g.node(id).outputs[0]).next();
            let value = value.expect("a resident has a use");
            let index = self.variable(d.g, value, &resident.container, &resident.name);
            self.variables[index as usize].in_place = d.schedule.in_place.contains(&i);
            d.residents.push(index);
        }
    }

    fn variable(&mut self, g: &Graph, value: ValueId, container: &str, name: &str) -> u32 {
        let namesakes = self.of_name.get(name).into_iter().flatten();
        let mut found = namesakes.filter(|&&i| self.variables[i as usize].container == container);
        if let Some(&i) = found.next() {
            return i;
        }
        let i = self.variables.len() as u32;
        let dtype = g.ty(value).dtype;
        self.variables
            .push(VariableSpec::new(container, name, dtype));
        self.of_name.entry(name.to_owned()).or_default().push(i);
        i
    }

    /// `if`, `loop` and `scan` become steps with sub-programs on the same device.
    fn control(&mut self, d: &mut Draft, node: &Node) -> Result<StepKind> {
        let args = d.values(&node.inputs)?;
        let results = d.values(&node.outputs)?;
        let role = Role::of_regions(&node.op, args.len());
        let regions = node.regions.iter();
        let bodies = regions.map(|r| self.region(r, &d.part.device, role).map(Arc::new));
        let bodies = bodies.collect::<Result<Vec<_>>>()?;
        let once = match (role, &bodies[..]) {
            (Role::Body { n_args }, [body]) => invariant_steps(body, n_args),
            _ => Vec::new(),
        };
        let made = match (&node.op, bodies.as_slice()) {
            (Op::If, [then_branch, else_branch]) => StepKind::If(Box::new(If {
                cond: args[0],
                then_branch: then_branch.clone(),
                else_branch: else_branch.clone(),
                args: args[1..].to_vec(),
                results,
            })),
            (Op::Loop { carried, .. }, [body]) => {
                let repeated = while_loop(*carried, body, &args, &results);
                StepKind::Loop(Box::new(Loop { once, ..repeated }))
            }
            (Op::Scan { .. }, [body]) => {
                let scan = scan_loop(&node.op, body, &args, &results);
                let repeated = scan.map_err(|e| e.at_origin(&node.origin))?;
                StepKind::Loop(Box::new(Loop { once, ..repeated }))
            }
            _ => {
                let message = format!("{} with {} regions", node.op.name(), bodies.len());
                return Err(Error::internal(message).at_origin(&node.origin));
            }
        };
        Ok(made)
    }

    /// A region as a program of one partition.
    fn region(&mut self, region: &Graph, device: &DeviceName, role: Role) -> Result<Program> {
        let clusters = self.settings.clustered(region)?;
        let made = assemble_into(
            Interface::of(&clusters, &Bindings::new())?,
            &mut [Part::whole(device.clone(), clusters.clone())],
            &self.settings.of_regions(),
            self.code,
            role,
        )?;
        self.choices.extend(made.choices);
        self.warnings.extend(made.warnings);
        self.fallbacks.extend(made.fallbacks);
        Ok(made.program)
    }
}

fn carried(inits: &[BufferId], results: &[BufferId]) -> Vec<Carried> {
    let pairs = inits.iter().zip(results);
    pairs
        .map(|(&init, &result)| Carried { init, result })
        .collect()
}

fn scanned(buffers: &[BufferId], reverse: bool) -> Vec<Scanned> {
    let scanned = |&buffer| Scanned { buffer, reverse };
    buffers.iter().map(scanned).collect()
}

/// An `Op::Loop`: operands are the bound of trips, the condition, then the carried values.
fn while_loop(
    n_carried: usize,
    body: &Arc<Program>,
    args: &[BufferId],
    results: &[BufferId],
) -> Loop {
    Loop {
        trips: TripCount::While {
            max_trips: Some(args[0]),
            condition: Some(args[1]),
        },
        body: body.clone(),
        carried: carried(&args[2..2 + n_carried], results),
        scan_inputs: Vec::new(),
        scan_outputs: scanned(&results[n_carried..], false),
        args: args[2 + n_carried..].to_vec(),
        once: Vec::new(),
    }
}

/// An `Op::Scan`: operands are the carried values, then the scanned tensors.
fn scan_loop(
    op: &Op,
    body: &Arc<Program>,
    args: &[BufferId],
    results: &[BufferId],
) -> Result<Loop> {
    let Op::Scan {
        carried: n_carried,
        scanned: n_scanned,
        length,
        reverse,
    } = op
    else {
        return Err(Error::internal(format!("{} is no scan", op.name())));
    };
    let trips = length.as_usize().ok_or_else(|| {
        Error::internal(format!(
            "length {length} of a scan is not static: specialise first"
        ))
    })?;
    let (inits, operands) = args.split_at(*n_carried);
    let (scan_inputs, rest) = operands.split_at(*n_scanned);
    Ok(Loop {
        trips: TripCount::Fixed(trips as u64),
        body: body.clone(),
        carried: carried(inits, results),
        scan_inputs: scanned(scan_inputs, *reverse),
        scan_outputs: scanned(&results[*n_carried..], *reverse),
        args: rest.to_vec(),
        once: Vec::new(),
    })
}

/// Intermediate buffers of clusters in the body of a loop which its first iteration fills for all, such as
/// packed weights: one step writes each, of constants and the last `n_args` inputs of the body.
fn kept_scratch(
    g: &Graph,
    compiled: &DeviceKernels,
    n_args: usize,
) -> BTreeMap<NodeId, BTreeSet<usize>> {
    let first = g.inputs.len().saturating_sub(n_args);
    let is_same = |v: ValueId| g.inputs[first..].contains(&v) || g.constant(v).is_some();
    let kept = compiled.plans.iter().map(|(&id, plan)| {
        let mut kept = BTreeSet::new();
        for step in &plan.steps {
            let (reads, writes) = step.reads_and_writes();
            let reads_the_same = reads.iter().all(|arg| match *arg {
                Arg::Operand(i) => is_same(g.node(id).inputs[i as usize]),
                Arg::Packed(_) => true,
                Arg::Result(_) | Arg::Scratch(_) => false,
            });
            let writes_to = |arg: &Arg, s: &PlanStep| s.reads_and_writes().1.contains(arg);
            let is_alone = |arg: &Arg| plan.steps.iter().filter(|s| writes_to(arg, s)).count() == 1;
            if let ([to @ Arg::Scratch(i)], true) = (writes, reads_the_same)
                && is_alone(to)
            {
                kept.insert(*i as usize);
            }
        }
        (id, kept)
    });
    kept.filter(|(_, kept)| !kept.is_empty()).collect()
}

/// The pairs of operands and results that kernels of the host may have in one place.
fn in_place(device: &DeviceName, compiled: &DeviceKernels) -> BTreeMap<NodeId, Vec<(u32, u32)>> {
    let plans = compiled
        .plans
        .iter()
        .filter(|(_, p)| !p.in_place.is_empty());
    match device.kind.has_own_memory() {
        true => BTreeMap::new(),
        false => plans.map(|(&id, p)| (id, p.in_place.clone())).collect(),
    }
}

/// The reduction of a collective; `None` for a mean, which is a sum and a division on each device.
fn reduction(kind: ReduceKind) -> Option<Reduction> {
    match kind {
        ReduceKind::Sum => Some(Reduction::Sum),
        ReduceKind::Prod => Some(Reduction::Prod),
        ReduceKind::Max => Some(Reduction::Max),
        ReduceKind::Min => Some(Reduction::Min),
        ReduceKind::Mean => None,
    }
}

impl<'g> Draft<'g> {
    fn new(part: &'g Part, schedule: &'g Schedule, store: &'g ConstantStore) -> Draft<'g> {
        Draft {
            g: &part.graph,
            part,
            schedule,
            store,
            buffers: Vec::new(),
            constants: Vec::new(),
            of_value: BTreeMap::new(),
            of_constant: BTreeMap::new(),
            of_tensor: BTreeMap::new(),
            steps: Vec::new(),
            step_nodes: Vec::new(),
            residents: Vec::new(),
            of_resident: BTreeMap::new(),
        }
    }

    fn push(&mut self, name: String, dtype: DType, shape: Vec<usize>, loc: Loc) -> BufferId {
        self.buffers.push(Buffer {
            name,
            dtype,
            shape,
            loc,
        });
        BufferId(self.buffers.len() as u32 - 1)
    }

    fn constant(&mut self, t: Tensor, name: String) -> BufferId {
        let (dtype, shape) = (t.dtype(), t.shape().to_vec());
        let i = self.shared(t);
        self.push(name, dtype, shape, Loc::Constant(i))
    }

    /// The index of a constant; tensors that share their elements are there once.
    fn shared(&mut self, t: Tensor) -> u32 {
        let key = (t.as_ptr() as usize, t.dtype(), t.shape().to_vec());
        *self.of_tensor.entry(key).or_insert_with(|| {
            self.constants.push(t);
            self.constants.len() as u32 - 1
        })
    }

    /// The buffer of a value. Constants that no step names get none.
    fn value(&mut self, v: ValueId) -> Result<BufferId> {
        if let Some(&b) = self.of_value.get(&v) {
            return Ok(b);
        }
        let (dtype, shape) = (self.g.ty(v).dtype, static_shape(self.g, v)?);
        let loc = match self.schedule.places[v.0 as usize] {
            Place::Arena(offset_bytes) => Loc::Arena { offset_bytes },
            Place::Input(i) => Loc::Input(self.part.inputs[i as usize]),
            Place::Output(i) => Loc::Output(self.part.outputs[i as usize]),
            Place::Constant(node) => Loc::Constant(self.graph_constant(node)?),
            Place::Variable(i) => Loc::Variable(self.residents[i as usize]),
            Place::Assigned(i) => Loc::Assigned(self.residents[i as usize]),
        };
        let b = self.push(format!("%{}", v.0), dtype, shape, loc);
        self.of_value.insert(v, b);
        Ok(b)
    }

    fn values(&mut self, values: &[ValueId]) -> Result<Vec<BufferId>> {
        values.iter().map(|&v| self.value(v)).collect()
    }

    fn graph_constant(&mut self, node: NodeId) -> Result<u32> {
        if let Some(&i) = self.of_constant.get(&node) {
            return Ok(i);
        }
        let Op::Constant { value } = &self.g.node(node).op else {
            return Err(Error::internal("a constant's place names another node"));
        };
        let i = self.shared(self.store.plain(value)?);
        self.of_constant.insert(node, i);
        Ok(i)
    }

    fn output(&mut self, i: u32) -> Result<BufferId> {
        let o = &self.g.outputs[i as usize];
        let (dtype, shape) = (self.g.ty(o.value).dtype, static_shape(self.g, o.value)?);
        Ok(self.push(
            format!("out{i}"),
            dtype,
            shape,
            Loc::Output(self.part.outputs[i as usize]),
        ))
    }

    /// The steps that assign a value to a resident: none for a value that is there, a copy for others.
    fn assignment(&mut self, value: ValueId, resident: u32) -> Result<Vec<StepKind>> {
        if self.schedule.places[value.0 as usize] == Place::Assigned(resident) {
            return Ok(Vec::new());
        }
        let src = self.value(value)?;
        let (dtype, shape) = (self.g.ty(value).dtype, static_shape(self.g, value)?);
        let loc = Loc::Assigned(self.residents[resident as usize]);
        let dst = self.push(format!("variable{resident}"), dtype, shape, loc);
        Ok(vec![StepKind::Copy { src, dst }])
    }

    /// The copy of a value to an output.
    fn copy(&mut self, value: ValueId, output: u32) -> Result<StepKind> {
        let src = self.value(value)?;
        let dst = self.output(output)?;
        Ok(StepKind::Copy { src, dst })
    }

    fn send(&mut self, node: &Node, key: &str, to: &str) -> Result<StepKind> {
        let key = Key {
            source: self.part.device.clone(),
            destination: DeviceName::parse(to)?,
            tensor: key.to_owned(),
        };
        let buffer = self.value(node.inputs[0])?;
        Ok(StepKind::Send { key, buffer })
    }

    fn recv(&mut self, node: &Node, key: &str, from: &str) -> Result<StepKind> {
        let key = Key {
            source: DeviceName::parse(from)?,
            destination: self.part.device.clone(),
            tensor: key.to_owned(),
        };
        let buffer = self.value(node.outputs[0])?;
        Ok(StepKind::Recv { key, buffer })
    }

    fn all_reduce(&mut self, node: &Node) -> Result<StepKind> {
        let Op::Collective {
            kind,
            key,
            rank,
            devices,
        } = &node.op
        else {
            return Err(Error::internal("not a collective").at_origin(&node.origin));
        };
        let devices = devices.iter().map(|name| DeviceName::parse(name));
        Ok(StepKind::AllReduce(Box::new(AllReduce {
            key: key.clone(),
            rank: *rank as u32,
            devices: devices.collect::<Result<_, _>>()?,
            kind: reduction(*kind)
                .ok_or_else(|| Error::internal("a collective mean").at_origin(&node.origin))?,
            src: self.value(node.inputs[0])?,
            dst: self.value(node.outputs[0])?,
        })))
    }

    /// The scratch buffers of a cluster.
    fn scratch(&mut self, id: NodeId, plan: &KernelPlan) -> Vec<BufferId> {
        let offsets = self.schedule.scratch.get(&id).cloned().unwrap_or_default();
        let buffers = plan.scratch.iter().zip(offsets).enumerate();
        let push = |(i, (&bytes, offset_bytes))| {
            let name = format!("#{}.scratch{i}", id.0);
            self.push(name, DType::U8, vec![bytes], Loc::Arena { offset_bytes })
        };
        buffers.map(push).collect()
    }

    /// True when an operand and a result of a node are in one place.
    fn is_in_place(&self, node: &Node, (operand, result): (u32, u32)) -> bool {
        let place = |v: ValueId| self.schedule.places[v.0 as usize];
        let from = place(node.inputs[operand as usize]);
        match (from, place(node.outputs[result as usize])) {
            (Place::Variable(i), Place::Assigned(j)) => {
                i == j && self.schedule.in_place.contains(&i)
            }
            (from, to) => from == to,
        }
    }

    /// The kernel calls of a cluster.
    fn kernels(&mut self, id: NodeId, compiled: &DeviceKernels) -> Result<Vec<StepKind>> {
        let node = self.g.node(id);
        let plan = compiled
            .plans
            .get(&id)
            .ok_or_else(|| Error::internal("a cluster has no kernel").at_origin(&node.origin))?;
        let scratch = self.scratch(id, plan);
        let constants = plan.packed.iter().enumerate();
        let pack = |(i, c): (usize, &PackedConstant)| {
            let name = format!("#{}.packed{i}", id.0);
            self.constant(c.elements.tensor().clone(), name)
        };
        let packed: Vec<BufferId> = constants.map(pack).collect();
        let mut steps = Vec::with_capacity(plan.steps.len());
        let is_in_place = plan.begins_with_copy && self.is_in_place(node, plan.in_place[0]);
        if is_in_place {
            // The value before the run is used, though no step names it.
            self.value(node.inputs[plan.in_place[0].0 as usize])?;
        }
        for s in plan.steps.iter().skip(usize::from(is_in_place)) {
            let buffer = |a: &Arg| match *a {
                Arg::Operand(i) => self.value(node.inputs[i as usize]),
                Arg::Result(i) => self.value(node.outputs[i as usize]),
                Arg::Scratch(i) => Ok(scratch[i as usize]),
                Arg::Packed(i) => Ok(packed[i as usize]),
            };
            let args = s.args.iter().map(buffer).collect::<Result<_>>()?;
            steps.push(call(s, args));
        }
        Ok(steps)
    }
}

fn call(step: &PlanStep, args: Vec<BufferId>) -> StepKind {
    StepKind::Kernel {
        kernel: KernelId(step.kernel as u32),
        args,
        n_outputs: step.n_outputs,
        items: step.items,
        grain: step.grain,
    }
}
