//! A compiled model: it specialises per input shapes, caches the specialisations, and runs them.

mod fixed;
mod open;
mod segmented;
mod source;
mod text;
mod warnings;

use crate::any_shape::AnyShape;
use crate::codegen::cpu::CodeStore;
use crate::codegen::store::ConstantStore;
use crate::cost::{Measured, Nanos};
use crate::error::{Error, Result};
use crate::ir::{Bindings, Dim, Graph, Type};
use crate::nearest::unknown;
use crate::onnx::{self, LeftOpen};
use crate::options::{MAX_DIM_SIZE, Options};
use crate::partition::Part;
use crate::passes;
use crate::pipeline::{
    self, Fused, Lowered, Partitioned, Planned, Stage, generate, partitioned, plan, replan,
};
use crate::place::{Horizon, Objective, Replacement, gpus};
use crate::report::{Pass, Scope};
use crate::specialisations::{CacheMemory, Held, Key, Specialisations};
use crate::tune::tune;
use crate::units::size;
use gristmill_runtime::command::state::Variable;
use gristmill_runtime::driver::Driver;
use gristmill_runtime::exec::{ExecOptions, Lanes, Pool, Resources, Transaction};
use gristmill_runtime::image::Spool;
use gristmill_runtime::program::Program;
use gristmill_runtime::safetensors::label;
use gristmill_runtime::{DeviceName, Tensor};
use open::{Closed, Open};
use segmented::{Segmented, Watch};
pub use source::Source;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// All that compilation needs to know of inputs.
#[derive(Clone, Debug, Default)]
pub(crate) struct InputShapes {
    /// Shape of each input, in order.
    pub shapes: Vec<Vec<usize>>,
    /// Inputs whose values decide shapes, by name.
    pub values: BTreeMap<String, Tensor>,
}

/// A model ready to run.
///
/// Code is specialised per concrete input shape. A model whose shapes are all constant is compiled
/// at once; one with symbolic dims when a run first shows their values.
/// [`Compiled::specialisations`] reports how many there are, and [`Options::specialisation_bytes`]
/// bounds the memory that they hold. All share weights, threads, arenas and variables.
///
/// Where the data decides extents, such as how many boxes a detector finds, the model is compiled
/// in segments, each when a run first shows its extents: see [`Compiled::is_whole`].
///
/// Any number of threads may run it at once: see [`Options::max_in_flight`].
pub struct Compiled {
    source: Source,
    pub(crate) options: Options,
    inputs: Vec<(String, Type)>,
    outputs: Vec<String>,
    /// Inputs whose contents decide shapes.
    value_inputs: BTreeSet<String>,
    /// Warnings of the import.
    model_warnings: Vec<String>,
    /// Kernels of all shapes, made when the first is needed.
    any_shape: OnceLock<Result<AnyShape>>,
    specialisations: Specialisations<Executable>,
    /// The model by the structure of its inputs, where runs decide that.
    open: Option<Box<Open>>,
    /// The model in parts, where extents are known during a run only.
    segmented: Option<Segmented>,
    /// The same for inputs of given shapes and contents, where the parts depend on these.
    cuts: Specialisations<Segmented>,
    /// Sets of shapes that were compiled alone.
    n_alone: AtomicUsize,
    shared: Arc<Shared>,
}

/// The parts that all specialisations of a model share.
pub(crate) struct Shared {
    /// Drivers of the devices that have memory of their own, and the limits of that.
    drivers: Mutex<BTreeMap<DeviceName, Arc<dyn Driver>>>,
    /// Weights.
    constants: Arc<ConstantStore>,
    /// Machine code.
    code: Arc<CodeStore>,
    /// Threads and arenas.
    pool: Arc<Pool>,
    /// Variables.
    resources: Arc<Resources>,
    /// Memory of all caches by shapes.
    caches: Arc<CacheMemory>,
    /// Warnings of all compilations, each once.
    warnings: Mutex<Vec<String>>,
}

impl Shared {
    pub(crate) fn of(options: &Options) -> Shared {
        Shared {
            drivers: Mutex::default(),
            constants: Arc::default(),
            code: Arc::default(),
            pool: Arc::new(Pool::new(options.threads.unwrap_or(0))),
            resources: options.resources.clone().unwrap_or_default(),
            caches: CacheMemory::new(options.specialisation_bytes),
            warnings: Mutex::default(),
        }
    }

    /// The same with weights in a file instead of memory.
    pub(crate) fn spooled(options: &Options, spool: Spool) -> Shared {
        Shared {
            constants: Arc::new(ConstantStore::spooled(spool)),
            ..Shared::of(options)
        }
    }
}

/// Bytes of what describes a step: buffers, operands and names; and with the graphs that it was made
/// from. Measured: 0.7 MiB of resident memory for each further set of shapes of GPT-2, which has 179
/// steps, and 1.8 MiB with graphs.
const STEP_BYTES: [usize; 2] = [4 << 10, 10 << 10];

/// The memory of a model for some inputs without code: that of its graph.
pub(crate) fn held_by_graph(n_nodes: usize) -> Held {
    Held {
        is_cheap: true,
        own_bytes: (n_nodes * STEP_BYTES[1]) as u64,
        ..Held::default()
    }
}

/// One specialisation: every stage's result, and the executors that run it.
pub struct Executable {
    /// The stages. Those of shapes after the first have no graphs, unless
    /// [`Options::keep_stages`] says so: they would take most of the memory.
    #[doc(hidden)]
    pub lowered: Lowered,
    /// As many as runs can be in flight.
    pub(crate) lanes: Lanes,
}

/// Named results of a run, in the model's order.
#[derive(Clone, Debug, PartialEq)]
pub struct Outputs(Vec<(String, Tensor)>);

/// Compiles a model or graph. See [`Compiled`] for when code is generated.
///
/// Errors name the node of the user's model; [`Error::kind`] tells bad input from unsupported ops.
pub fn compile(source: impl Into<Source>, options: &Options) -> Result<Compiled> {
    let compiled = prepare(source, options)?;
    compiled.compile_static()?;
    Ok(compiled)
}

/// As [`compile`], but without any code yet: for [`Compiled::plan`], which needs none.
pub fn prepare(source: impl Into<Source>, options: &Options) -> Result<Compiled> {
    let mut options = options.clone();
    // Code for another CPU is planned by that CPU's rates, here as in files.
    options.devices.assume_cpus(options.target_cpu.isa());
    Compiled::of(source.into(), &options, &Arc::new(Shared::of(&options)))
}

/// A graph with sizes in the place of symbols. Errors with a symbol that it does not have, as the import of a model does.
pub(crate) fn bound(g: &Graph, dims: &Bindings) -> Result<Graph> {
    let mut known = BTreeSet::new();
    let results = g.nodes().flat_map(|(_, node)| &node.outputs);
    for v in g.inputs.iter().chain(results) {
        for dim in g.ty(*v).shape.iter() {
            dim.visit_symbols(&mut |symbol| known.extend([symbol.to_owned()]));
        }
    }
    match dims.keys().find(|dim| !known.contains(*dim)) {
        Some(dim) => {
            let known = known.iter().map(String::as_str);
            Err(Error::invalid(unknown("dim", dim, known)))
        }
        None => passes::specialise(g, dims),
    }
}

/// Sizes must be possible; ranges must name dims of the inputs, be no contradiction in themselves, and hold the values that are set.
fn check_ranges(inputs: &[(String, Type)], options: &Options) -> Result<()> {
    for (dim, &size) in &options.dims {
        if size > MAX_DIM_SIZE {
            return Err(Error::invalid(format!(
                "dim {dim:?}: {size} is too large, sizes go up to {MAX_DIM_SIZE}"
            )));
        }
    }
    let mut known: BTreeSet<&str> = options.dims.keys().map(String::as_str).collect();
    known.extend(
        inputs
            .iter()
            .flat_map(|(_, t)| t.shape.iter().filter_map(|d| d.as_symbol())),
    );
    for (dim, &range) in &options.ranges {
        if !known.contains(dim.as_str()) {
            return Err(Error::invalid(unknown("dim", dim, known.iter().copied())));
        }
        if range.min > range.max {
            return Err(
                Error::invalid(format!("dim {dim:?}: the range {range} is empty"))
                    .hint("the lesser size first"),
            );
        }
        in_range(dim, options.dims.get(dim).copied(), options)?;
    }
    Ok(())
}

/// The options, with the ranges that a graph declares where these are narrower.
fn with_ranges(source: &Source, options: &Options) -> Options {
    let mut options = options.clone();
    if let Source::Graph(g) = source {
        for (dim, range) in &g.ranges {
            let own = options.ranges.entry(dim.clone()).or_insert(*range);
            own.min = own.min.max(range.min);
            own.max = own.max.min(range.max);
        }
    }
    options
}

/// True when a tensor has the dtype and the rank of a type, and its constant extents.
pub(crate) fn fits(ty: &Type, tensor: &Tensor) -> bool {
    let mut extents = ty.shape.iter().zip(tensor.shape());
    tensor.dtype() == ty.dtype
        && tensor.shape().len() == ty.rank()
        && extents.all(|(d, &n)| d.as_usize().is_none_or(|d| d == n))
}

fn in_range(dim: &str, size: Option<usize>, options: &Options) -> Result<()> {
    match (size, options.ranges.get(dim)) {
        (Some(size), Some(range)) if !range.contains(size) => Err(Error::invalid(format!(
            "dim {dim:?} is {size}, outside of its declared range {range}"
        ))),
        _ => Ok(()),
    }
}

/// Names and types of a graph's inputs, and names of its outputs.
pub(crate) fn interface(g: &Graph) -> (Vec<(String, Type)>, Vec<String>) {
    let inputs = g
        .inputs
        .iter()
        .zip(&g.input_names)
        .map(|(&v, n)| (n.clone(), g.ty(v).clone()))
        .collect();
    (inputs, g.outputs.iter().map(|o| o.name.clone()).collect())
}

/// The facts about an ONNX model that options say.
fn specialisation(options: &Options) -> onnx::Specialisation {
    onnx::Specialisation {
        dims: options.dims.clone(),
        ranges: options.ranges.clone(),
        seed: options.seed,
        ..Default::default()
    }
}

impl Compiled {
    /// A model that has `shared` in common with others.
    pub(crate) fn of(source: Source, options: &Options, shared: &Arc<Shared>) -> Result<Compiled> {
        let mut options = options.clone();
        let (source, open) = match &source {
            Source::Graph(_) => (source, None),
            Source::Onnx(m) => match Closed::of(m, &mut options, shared)? {
                Closed::Model(closed) => (closed.into(), None),
                Closed::Open(open) => (source, Some(open)),
            },
        };
        match open {
            None => Compiled::of_closed(source, &options, shared),
            Some(open) => Ok(Compiled::of_open(source, open, options, shared)),
        }
    }

    /// A model that has no code before a run shows the structure of its inputs.
    fn of_open(
        source: Source,
        open: Box<Open>,
        options: Options,
        shared: &Arc<Shared>,
    ) -> Compiled {
        let outputs = open.output_names();
        Compiled {
            open: Some(open),
            ..Compiled::new(source, options, Vec::new(), outputs, shared)
        }
    }

    /// A model without code.
    fn new(
        source: Source,
        options: Options,
        inputs: Vec<(String, Type)>,
        outputs: Vec<String>,
        shared: &Arc<Shared>,
    ) -> Compiled {
        Compiled {
            specialisations: Specialisations::new(&shared.caches),
            cuts: Specialisations::new(&shared.caches),
            options,
            source,
            inputs,
            outputs,
            value_inputs: BTreeSet::new(),
            model_warnings: Vec::new(),
            any_shape: OnceLock::new(),
            open: None,
            segmented: None,
            n_alone: AtomicUsize::new(0),
            shared: shared.clone(),
        }
    }

    fn of_closed(source: Source, options: &Options, shared: &Arc<Shared>) -> Result<Compiled> {
        let (symbolic, left_open) = match &source {
            Source::Onnx(m) => {
                let spec = specialisation(options);
                (m.interface(&spec)?, m.left_open(&spec)?)
            }
            Source::Graph(g) => {
                let bound = bound(g, &options.dims)?;
                bound.check_state()?;
                let left_open = LeftOpen {
                    has_extents: passes::has_run_time_extents(&bound),
                    ..LeftOpen::default()
                };
                (interface(&bound), left_open)
            }
        };
        let ranged = with_ranges(&source, options);
        check_ranges(&symbolic.0, &ranged)?;
        shared.add_warnings(&left_open.warnings);
        let mut compiled = Compiled {
            value_inputs: left_open.values,
            model_warnings: left_open.warnings,
            ..Compiled::new(source, ranged, symbolic.0, symbolic.1, shared)
        };
        if left_open.has_extents {
            let graph = compiled.symbolic_graph()?;
            compiled.segmented = Some(Segmented::of(graph, options, shared)?);
        }
        Ok(compiled)
    }

    /// Generates code for shapes that are known now.
    pub(crate) fn compile_static(&self) -> Result<()> {
        if self.open.is_some() {
            return Ok(());
        }
        if let Some(segmented) = &self.segmented {
            return segmented.compile_static();
        }
        let shapes = self.inputs.iter().map(|(_, t)| t.static_shape());
        let shapes: Option<Vec<Vec<usize>>> = shapes.collect();
        if let (Some(shapes), true) = (shapes, self.value_inputs.is_empty()) {
            let values = BTreeMap::new();
            self.specialise(InputShapes { shapes, values })?;
        }
        Ok(())
    }

    /// Names and types of the inputs; dims not bound by [`Options::dims`] are symbols.
    ///
    /// Element `i` of an input `x` that is a sequence is the input `x[i]`. There are none of a model whose runs decide the number
    /// of elements, which [`Options::dims`] can say under the name of the sequence: [`Compiled::run`] alone takes such a model.
    pub fn inputs(&self) -> &[(String, Type)] {
        &self.inputs
    }

    /// The greatest sizes of the dims that have a range and no value.
    pub fn largest_dims(&self) -> Bindings {
        let open = self
            .options
            .ranges
            .iter()
            .filter(|(dim, _)| !self.options.dims.contains_key(*dim));
        open.map(|(dim, range)| (dim.clone(), range.max)).collect()
    }

    /// Shape of an input by its declared type, dims with a range at their greatest. The error lists those without a size.
    pub(crate) fn declared_shape(&self, input: usize) -> Result<Vec<usize>, Vec<String>> {
        let shape = self.inputs[input].1.shape.bind(&self.largest_dims());
        shape.as_static().ok_or_else(|| {
            let open = shape.iter().filter(|d| d.as_const().is_none());
            open.map(ToString::to_string).collect()
        })
    }

    /// True when no dim of an input is without a size or a range.
    pub(crate) fn has_declared_shapes(&self) -> bool {
        (0..self.inputs.len()).all(|i| self.declared_shape(i).is_ok())
    }

    /// Variables that the graph uses.
    pub(crate) fn variables(&self) -> Vec<Variable> {
        let Source::Graph(graph) = &self.source else {
            return Vec::new();
        };
        let known = graph.variables().into_iter();
        let known = known.map(|((container, name), ty)| Variable {
            label: label(&container, &name),
            container,
            name,
            dtype: ty.dtype,
            dims: ty.shape.iter().map(Dim::as_usize).collect(),
            type_text: ty.to_string(),
        });
        known.collect()
    }

    /// Names of the outputs. A sequence is one; its elements are results of their own, see [`Outputs::elements`].
    pub fn output_names(&self) -> &[String] {
        &self.outputs
    }

    /// False when the data decides extents of the model: then it is compiled in segments, and there
    /// is no [`Executable`] for all of it.
    pub fn is_whole(&self) -> bool {
        self.segmented.is_none()
    }

    /// The parts of a model that are compiled one by one, since extents between them are known
    /// during a run only; one where the model is compiled as a whole. The most that a run had so far
    /// where the parts depend on the inputs.
    pub fn n_segments(&self) -> usize {
        let cuts = self.cuts.values();
        let cuts = cuts.iter().map(|cut| cut.n_segments());
        let all = self.segmented.as_ref().map(Segmented::n_segments);
        all.into_iter().chain(cuts).max().unwrap_or(1)
    }

    /// Number of specialisations that are held: those made so far without those evicted. Of those
    /// whose kernels were chosen once for all shapes, which are made again within milliseconds, no
    /// more than 64 are held.
    pub fn specialisations(&self) -> usize {
        self.sum(|part| part.specialisations.len())
    }

    /// Number of sets of input shapes, of segments too, that were compiled all the way by themselves, since they do not fit the
    /// kernels that are chosen once for all shapes, or there are none. All others took milliseconds.
    pub fn compiled_alone(&self) -> usize {
        self.sum(|part| part.n_alone.load(Ordering::Relaxed))
    }

    /// The variables of the model: those that every shape reads and assigns.
    pub fn resources(&self) -> &Arc<Resources> {
        &self.shared.resources
    }

    /// Number of threads that run the model, those of callers not included, whatever the number of
    /// its shapes.
    pub fn n_threads(&self) -> usize {
        self.shared.pool.n_started()
    }

    /// Bytes of weights, code, graphs and device memory that all caches of the model hold; weights that several
    /// entries have count once.
    pub fn held_bytes(&self) -> u64 {
        self.shared.caches.bytes()
    }

    /// Number of entries of caches that were evicted to keep [`Options::specialisation_bytes`].
    pub fn evictions(&self) -> usize {
        self.shared.caches.n_evicted()
    }

    /// The sum over all parts, for whatever inputs.
    fn sum<T: std::iter::Sum>(&self, of: impl Fn(&Compiled) -> T) -> T {
        let forms = self.open.as_ref().map_or(Vec::new(), |open| open.forms());
        let all = || forms.iter().map(Arc::as_ref).chain([self]);
        let cuts: Vec<Arc<Segmented>> = all().flat_map(|form| form.cuts.values()).collect();
        let parts = cuts.iter().flat_map(|cut| cut.parts());
        all().flat_map(Compiled::parts).chain(parts).map(of).sum()
    }

    /// The segments; the model itself where it is compiled as a whole.
    pub(crate) fn parts(&self) -> impl Iterator<Item = &Compiled> {
        let parts = self.segmented.as_ref().map(Segmented::parts);
        parts.unwrap_or(std::slice::from_ref(self)).iter()
    }

    /// Runs the model once. Inputs are given by name, each exactly once.
    ///
    /// Errors when a name is unknown or missing, a dtype or shape does not fit, or a dim is outside of its range; errors of kernels name their node.
    pub fn run<N: AsRef<str>>(
        &self,
        inputs: impl IntoIterator<Item = (N, Tensor)>,
    ) -> Result<Outputs> {
        if let Some(open) = &self.open {
            let owned = inputs
                .into_iter()
                .map(|(name, t)| (name.as_ref().to_owned(), t));
            return open.run(owned.collect());
        }
        self.run_ordered(&self.bind(inputs)?)
    }

    /// Runs the model once with inputs in the order of [`Compiled::inputs`], whose types were
    /// checked, as [`Compiled::bind`] does.
    pub fn run_ordered(&self, tensors: &[Tensor]) -> Result<Outputs> {
        self.run_watched(tensors, &|_, _| Ok(()))
    }

    /// [`Compiled::run_ordered`]; `watch` sees the segments of a model before they run.
    pub(crate) fn run_watched(&self, tensors: &[Tensor], watch: Watch) -> Result<Outputs> {
        if let Some(executable) = self.executable_for(tensors)? {
            return executable.run(tensors);
        }
        let inputs = self.shapes_of(tensors);
        match self.segmented.as_ref().filter(|s| s.fits(&inputs.shapes)) {
            Some(segmented) => segmented.run(tensors, watch),
            None => self.cut_for(&inputs)?.run(tensors, watch),
        }
    }

    /// The specialisation for given inputs; `None` where the data decides extents.
    pub(crate) fn executable_for(&self, tensors: &[Tensor]) -> Result<Option<Arc<Executable>>> {
        let inputs = self.shapes_of(tensors);
        if self.segmented.is_some() || self.cuts.has(&self.key(&inputs)) {
            return Ok(None);
        }
        match self.specialise(inputs) {
            Ok(executable) => Ok(Some(executable)),
            Err(e) if e.is_of_extents() => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// The parts for given inputs of a model that is cut for these alone.
    fn cut_for(&self, inputs: &InputShapes) -> Result<Arc<Segmented>> {
        let make = || {
            let graph = self.graph(inputs)?;
            let options = Options {
                dims: Bindings::new(),
                ..self.options.clone()
            };
            let held = held_by_graph(graph.n_nodes());
            Ok((Segmented::of(graph, &options, &self.shared)?, held))
        };
        self.cuts.get_or_make(self.key(inputs), make, |_, _| {})
    }

    /// The placement for given inputs, in the order of [`Compiled::inputs`]. The devices need not exist.
    pub fn plan(&self, tensors: &[Tensor]) -> Result<Planned> {
        self.plan_shapes(&self.shapes_of(tensors))
    }

    /// The same without the tensors.
    pub(crate) fn plan_shapes(&self, inputs: &InputShapes) -> Result<Planned> {
        plan(self.fused(inputs)?, &self.options)
    }

    /// The placement to go on with by the times of `measured`: the one that was compiled for given inputs, or a better one where that pays over
    /// `steps` runs. Time to rebuild is that of code generation, if anything moves.
    ///
    /// Errors when placements are for another objective than latency.
    pub fn replan(
        &self,
        tensors: &[Tensor],
        measured: &Arc<Measured>,
        steps: u64,
    ) -> Result<Replacement> {
        if self.options.objective != Objective::Latency {
            let message = "placements are decided anew by measured times for latency only";
            return Err(Error::invalid(message).hint("Options::objective as it is by default"));
        }
        let executable = self.for_inputs(tensors)?;
        let report = &executable.lowered.report;
        let generated = report.time_ns(Pass::Codegen);
        let rebuild = generated.ok_or_else(|| Error::internal("code generation has no time"))?;
        let options = Options {
            measured: measured.clone(),
            ..self.options.clone()
        };
        let horizon = Horizon {
            steps,
            rebuild: Nanos(rebuild),
        };
        replan(
            self.fused(&self.shapes_of(tensors))?,
            &options,
            &executable.lowered.placement,
            horizon,
        )
    }

    /// The graphs of the devices for given inputs, as their executable was made from them.
    pub(crate) fn partitions(&self, tensors: &[Tensor]) -> Result<Vec<Part>> {
        let fused = self.fused(&self.shapes_of(tensors))?;
        Ok(partitioned(fused, &self.options)?.partitions)
    }

    /// The specialisation for given inputs, in the order of [`Compiled::inputs`]; made now if it is not there yet.
    ///
    /// Errors with `Unsupported` where the data decides extents: see [`Compiled::is_whole`].
    pub fn for_inputs(&self, tensors: &[Tensor]) -> Result<Arc<Executable>> {
        self.check_whole()?;
        self.specialise(self.shapes_of(tensors))
    }

    /// The graph for given inputs, in the order of [`Compiled::inputs`], not yet rewritten.
    pub(crate) fn graph_for(&self, tensors: &[Tensor]) -> Result<Graph> {
        self.graph(&self.shapes_of(tensors))
    }

    /// Names of the inputs whose values decide shapes.
    pub(crate) fn value_inputs(&self) -> &BTreeSet<String> {
        &self.value_inputs
    }

    /// Errors when the model is compiled in parts.
    pub(crate) fn check_whole(&self) -> Result<()> {
        match &self.segmented {
            Some(segmented) => Err(segmented.not_whole()),
            None => Ok(()),
        }
    }

    fn shapes_of(&self, tensors: &[Tensor]) -> InputShapes {
        let named = self.inputs.iter().map(|(name, _)| name).zip(tensors);
        let deciding = named.filter(|(name, _)| self.value_inputs.contains(*name));
        InputShapes {
            shapes: tensors.iter().map(|t| t.shape().to_vec()).collect(),
            values: deciding.map(|(n, t)| (n.clone(), t.clone())).collect(),
        }
    }

    /// Inputs by name, put in order and checked against the declared types.
    pub fn bind<N: AsRef<str>>(
        &self,
        inputs: impl IntoIterator<Item = (N, Tensor)>,
    ) -> Result<Vec<Tensor>> {
        let mut given: BTreeMap<String, Tensor> = BTreeMap::new();
        let known = || self.inputs.iter().map(|(n, _)| n.as_str());
        for (name, tensor) in inputs {
            let name = name.as_ref();
            if !known().any(|k| k == name) {
                return Err(Error::invalid(unknown("input", name, known())));
            }
            if given.insert(name.to_owned(), tensor).is_some() {
                return Err(Error::invalid(format!("input {name:?} is given twice")));
            }
        }
        let mut ordered = Vec::new();
        for (name, ty) in &self.inputs {
            let tensor = given
                .remove(name)
                .ok_or_else(|| Error::invalid(format!("input {name:?} ({ty}) is missing")))?;
            self.check_input(name, &tensor)?;
            ordered.push(tensor);
        }
        Ok(ordered)
    }

    /// Declared type of an input.
    pub(crate) fn input_type(&self, name: &str) -> Result<&Type> {
        let found = self.inputs.iter().find(|(known, _)| known == name);
        found.map(|(_, ty)| ty).ok_or_else(|| {
            let known = self.inputs.iter().map(|(known, _)| known.as_str());
            Error::invalid(unknown("input", name, known))
        })
    }

    /// Errors when dtype or shape of an input do not fit the declared type, or a dim is outside of its range.
    pub(crate) fn check_input(&self, name: &str, tensor: &Tensor) -> Result<()> {
        let ty = self.input_type(name)?;
        if !fits(ty, tensor) {
            let (dtype, shape) = (tensor.dtype(), tensor.shape());
            let message = format!("input {name:?}: expected {ty}, got {dtype}{shape:?}");
            return Err(Error::invalid(message));
        }
        for (d, &size) in ty.shape.iter().zip(tensor.shape()) {
            let symbol = d.as_symbol().unwrap_or_default();
            in_range(symbol, Some(size), &self.options)
                .map_err(|e| e.context(format!("input {name:?}")))?;
        }
        Ok(())
    }

    fn specialise(&self, inputs: InputShapes) -> Result<Arc<Executable>> {
        let make = || {
            let made = self.executable(self.lowered(&inputs)?)?;
            if made.lowered.report.scope == Scope::Alone {
                self.n_alone.fetch_add(1, Ordering::Relaxed);
            }
            let held = made.held();
            Ok((made, held))
        };
        let warn = |made: &mut Executable, bytes| {
            let warning = self.eviction_warning(bytes);
            made.lowered.report.warnings.push(warning);
        };
        self.specialisations
            .get_or_make(self.key(&inputs), make, warn)
    }

    fn key(&self, inputs: &InputShapes) -> Key {
        let named = self.inputs.iter().map(|(name, _)| inputs.values.get(name));
        let deciding = named.enumerate().filter_map(|(i, value)| Some((i, value?)));
        let contents = deciding.map(|(i, value)| (i, value.as_bytes().to_vec()));
        (inputs.shapes.clone(), contents.collect())
    }

    fn eviction_warning(&self, bytes: u64) -> String {
        let limit = self.options.specialisation_bytes;
        format!(
            "code and weights for all shapes take {}, and may take {}: code for the shapes that were used longest ago is dropped, and \
             compiled again when they come back (Options::specialisation_bytes)",
            size(bytes),
            size(limit)
        )
    }

    /// Makes a program ready to run.
    fn executable(&self, lowered: Lowered) -> Result<Executable> {
        self.options.target_cpu.check_runs_here()?;
        let exec_options = ExecOptions {
            pool: self.shared.pool.clone(),
            resources: self.shared.resources.clone(),
            drivers: self.drivers(&lowered.program)?,
            ..Default::default()
        };
        let program = lowered.program.clone();
        let lanes = match lowered.placement.stream {
            Some(stream) => Lanes::new(program, &exec_options, stream.in_flight as usize),
            None => {
                let limit = self.options.max_in_flight;
                let limit = limit.unwrap_or_else(gristmill_runtime::cpu::n_cores);
                Lanes::concurrent(program, &exec_options, limit)
            }
        }?;
        Ok(Executable { lowered, lanes })
    }

    /// A driver for each device of a program that has memory of its own, opened when it is first used.
    fn drivers(&self, program: &Program) -> Result<BTreeMap<DeviceName, Arc<dyn Driver>>> {
        let mut drivers = self
            .shared
            .drivers
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        for device in program.partitions.iter().map(|p| &p.device) {
            if !drivers.contains_key(device)
                && let Some(driver) = gpus::driver(
                    device,
                    &self.options.devices,
                    &self.options.gpus,
                    self.options.check,
                )?
            {
                drivers.insert(device.clone(), driver);
            }
        }
        Ok(drivers.clone())
    }

    /// The stages as far as the text of one of them needs. Code is generated, and devices must exist, where that text is about code.
    pub(crate) fn lower_for(&self, stage: Stage, inputs: &InputShapes) -> Result<Lowered> {
        let fused = self.fused(inputs)?;
        if stage.needs_code() {
            return self.lower(self.partitioned(fused)?);
        }
        let mut parts = pipeline::partitioned_anywhere(fused, &self.options)?;
        if stage > Stage::Partitions && parts.check_presence(&self.options).is_ok() {
            tune(&mut parts, &self.options)?;
        }
        Ok(parts.without_code(&self.options))
    }

    /// The program for given shapes.
    fn lowered(&self, inputs: &InputShapes) -> Result<Lowered> {
        let lowered = self.lowered_quietly(inputs)?;
        self.shared.add_warnings(&lowered.report.warnings);
        Ok(lowered)
    }

    fn lowered_quietly(&self, inputs: &InputShapes) -> Result<Lowered> {
        let any_shape = self.any_shape(inputs)?;
        if let Some(lowered) = any_shape.lower_on_one_device(&inputs.shapes, &self.options)? {
            return Ok(lowered);
        }
        let parts = self.partitioned(self.fused(inputs)?)?;
        if parts.report.scope == Scope::AllShapes {
            any_shape.put_on_one_device(&parts, &self.options)?;
        }
        let mut lowered = self.lower(parts)?;
        if self.specialisations.len() > 0 && !self.options.keep_stages {
            lowered.release_graphs();
        }
        Ok(lowered)
    }

    /// One graph per device, to be compiled with what all programs of the model share.
    fn partitioned(&self, fused: Fused) -> Result<Partitioned> {
        let mut parts = partitioned(fused, &self.options)?;
        parts.settings.codegen.constants = self.shared.constants.clone();
        if parts.report.scope == Scope::AllShapes {
            parts.settings.codegen.code = Some(self.shared.code.clone());
        }
        Ok(parts)
    }

    fn lower(&self, mut parts: Partitioned) -> Result<Lowered> {
        tune(&mut parts, &self.options)?;
        generate(parts, &self.options)
    }

    /// The facts about an ONNX model that are known without inputs.
    fn specialisation(&self) -> onnx::Specialisation {
        specialisation(&self.options)
    }

    /// The graph without sizes for dims that the options leave open, not yet rewritten.
    fn symbolic_graph(&self) -> Result<Graph> {
        match &self.source {
            Source::Onnx(m) => m.graph(&self.specialisation()),
            Source::Graph(g) => bound(g, &self.options.dims),
        }
    }

    /// Fused kernels for given shapes: those of all shapes, where there are such and they take these.
    fn fused(&self, inputs: &InputShapes) -> Result<Fused> {
        self.check_whole()?;
        let any_shape = self.any_shape(inputs)?;
        let why = match any_shape.bind(&inputs.shapes, &self.options)? {
            Ok(bound) => return Ok(bound),
            Err(why) => why,
        };
        let graph = self.graph(inputs)?;
        if passes::has_run_time_extents(&graph) {
            return Err(segmented::not_whole(None).of_extents());
        }
        let mut fused = pipeline::fused(graph, &self.options)?;
        if let Some(why) = why {
            fused.add_note(format!("kernels were chosen for these shapes alone: {why}"));
        }
        Ok(fused)
    }

    /// The kernels of all shapes, of which these are the first.
    fn any_shape(&self, first: &InputShapes) -> Result<&AnyShape> {
        let made = self.any_shape.get_or_init(|| self.of_any_shape(first));
        made.as_ref().map_err(Clone::clone)
    }

    fn of_any_shape(&self, first: &InputShapes) -> Result<AnyShape> {
        let mut inputs = self.inputs.iter();
        let is_static = inputs.all(|(_, ty)| ty.static_shape().is_some());
        match is_static || !self.value_inputs.is_empty() {
            true => Ok(AnyShape::None),
            false => AnyShape::of(self.symbolic_graph(), &first.shapes, &self.options),
        }
    }

    /// The graph for given shapes, not yet rewritten.
    pub(crate) fn graph(&self, inputs: &InputShapes) -> Result<Graph> {
        match &self.source {
            Source::Onnx(m) => {
                let names = self.inputs.iter().map(|(name, _)| name.clone());
                m.graph(&onnx::Specialisation {
                    shapes: names.zip(inputs.shapes.iter().cloned()).collect(),
                    values: inputs.values.clone(),
                    ..self.specialisation()
                })
            }
            Source::Graph(g) => {
                let mut bindings = g.bindings_for(&inputs.shapes)?;
                bindings.extend(self.options.dims.clone());
                passes::specialise(g, &bindings)
            }
        }
    }
}

impl Executable {
    /// Memory that is held as long as this is: constants, packed weights included, which other
    /// shapes may have as well; code; and arenas that are not leased from the pool.
    fn held(&self) -> Held {
        let partitions = &self.lowered.program.partitions;
        let own = partitions.iter().filter(|p| p.device.kind.has_own_memory());
        let arenas: usize = own.map(|p| p.arena_bytes).sum();
        let constants = partitions.iter().flat_map(|p| &p.constants);
        let n_steps: usize = partitions.iter().map(|p| p.steps.len()).sum();
        let has_graphs = !self.lowered.partitions.is_empty();
        let of_step = STEP_BYTES[usize::from(has_graphs)];
        let code = self.lowered.report.code_bytes + n_steps * of_step;
        Held {
            is_cheap: self.lowered.report.scope != Scope::Alone,
            own_bytes: (code + arenas * self.n_in_flight()) as u64,
            shared: constants
                .map(|t| (t.as_ptr() as usize, t.size_bytes() as u64))
                .collect(),
        }
    }

    /// Runs with inputs in the model's order.
    pub fn run(&self, inputs: &[Tensor]) -> Result<Outputs> {
        let results = self.lanes.run(inputs)?;
        let names = self.lowered.program.outputs.iter().map(|o| o.name.clone());
        Ok(Outputs(names.zip(results).collect()))
    }

    /// Runs as a part of a transaction on the model's variables.
    fn run_in(&self, transaction: &Transaction, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        Ok(self.lanes.run_in(transaction, inputs)?)
    }

    /// Runs into tensors of an earlier run; nothing is allocated. For timing loops.
    pub fn run_into(&self, inputs: &[Tensor], outputs: &mut [Tensor]) -> Result<()> {
        Ok(self.lanes.run_into(inputs, outputs)?)
    }

    /// Number of runs that a placement for throughput keeps in flight, each started by a thread of
    /// its own; 1 for other placements.
    pub fn n_in_flight(&self) -> usize {
        let stream = self.lowered.placement.stream;
        stream.map_or(1, |stream| stream.in_flight as usize)
    }

    /// Number of runs that can be in flight. Further callers wait.
    pub fn max_in_flight(&self) -> usize {
        self.lanes.n_lanes()
    }
}

impl Outputs {
    /// The results but for those of these names.
    pub(crate) fn without(self, names: &[&str]) -> Outputs {
        let kept = self
            .0
            .into_iter()
            .filter(|(name, _)| !names.contains(&&name[..]));
        Outputs(kept.collect())
    }

    /// Results with their names.
    pub(crate) fn of(results: Vec<(String, Tensor)>) -> Outputs {
        Outputs(results)
    }

    /// A result by name.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.0.iter().find(|(n, _)| n == name).map(|(_, t)| t)
    }

    /// The elements of a result that is a sequence; those of an empty one are none. Element `i` of `y` is the result `y[i]`.
    pub fn elements(&self, sequence: &str) -> Vec<&Tensor> {
        let element = |i| self.get(&onnx::element_name(sequence, i));
        (0..).map_while(element).collect()
    }

    /// Names and tensors in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.0.iter().map(|(n, t)| (n.as_str(), t))
    }

    /// The tensors in order.
    pub fn into_tensors(self) -> Vec<Tensor> {
        self.0.into_iter().map(|(_, t)| t).collect()
    }
}

impl std::ops::Index<&str> for Outputs {
    type Output = Tensor;

    /// Panics when there is no such output; [`Outputs::get`] does not.
    fn index(&self, name: &str) -> &Tensor {
        self.get(name).unwrap_or_else(|| {
            panic!(
                "{}",
                unknown("output", name, self.0.iter().map(|(n, _)| n.as_str()))
            )
        })
    }
}
