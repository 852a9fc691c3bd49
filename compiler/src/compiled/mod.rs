//! A compiled model: it specialises per input shapes, caches the specialisations, and runs them.

mod any_shape;
mod common;
mod data_parallel;
mod executable;
mod fixed;
mod interface;
mod open;
mod outputs;
mod segmented;
mod source;
mod specialise;
mod step_times;
mod text;
mod warnings;

pub use any_shape::ShapeWork;
pub(crate) use common::Common;
pub use executable::Executable;
pub use interface::interface;
pub use outputs::Outputs;
pub use source::Source;
pub use step_times::{ClusterTime, StepTime};

use crate::cost::{Measured, Nanos};
use crate::error::{Error, Result};
use crate::ir::{Bindings, Graph, Type};
use crate::nearest::unknown;
use crate::onnx::{self, LeftOpen};
use crate::options::Options;
use crate::partition::Part;
use crate::passes;
use crate::pipeline::Config;
use crate::pipeline::{Planned, partitioned, plan, replan};
use crate::place::{Horizon, Objective, Replacement};
use crate::report::Pass;
use crate::session::cache::Specialisations;
use crate::session::{Session, Settings};
use any_shape::AnyShape;
use executable::held_by_graph;
use gristmill_runtime::Tensor;
use gristmill_runtime::exec::Resources;
use interface::{check_ranges, with_ranges};
use open::{Closed, Open};
use segmented::{Segmented, Watch};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

/// The facts about inputs for compilation.
#[derive(Clone, Debug, Default)]
pub struct InputShapes {
    /// Shape of each input, in order.
    pub shapes: Vec<Vec<usize>>,
    /// Inputs whose values decide shapes, by name.
    pub values: BTreeMap<String, Tensor>,
}

/// A model ready to run.
///
/// Code is specialised per concrete input shape. A model whose shapes are all constant is compiled
/// at once; one with symbolic dims when a run first shows their values.
/// [`Compiled::specialisations`] reports how many there are, and [`Settings::specialisation_bytes`]
/// bounds their memory. All share the weights, code, threads, arenas and variables of the [`Session`].
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
    /// Number of sets of shapes compiled alone.
    n_alone: AtomicUsize,
    common: Arc<Common>,
}

/// Compiles a model or graph in a session of its own, with default [`Settings`]: see [`Session::compile`].
pub fn compile(source: impl Into<Source>, options: &Options) -> Result<Compiled> {
    Session::new(&Settings::default())?.compile(source, options)
}

/// [`Session::prepare`] in a session of its own, with default [`Settings`].
pub fn prepare(source: impl Into<Source>, options: &Options) -> Result<Compiled> {
    Session::new(&Settings::default())?.prepare(source, options)
}

impl Session {
    /// Compiles a model or graph into the session. See [`Compiled`] for when code is generated.
    ///
    /// Errors name the node of the user's model; [`Error::kind`] tells bad input from unsupported ops. A variable with another type in
    /// another model of the session is `InvalidInput`.
    pub fn compile(&self, source: impl Into<Source>, options: &Options) -> Result<Compiled> {
        let compiled = self.undeclared(source.into(), options)?;
        compiled.compile_static()?;
        compiled.declare_variables()?;
        Ok(compiled)
    }

    /// [`Session::compile`] without any code yet: for [`Compiled::plan`], which needs none.
    pub fn prepare(&self, source: impl Into<Source>, options: &Options) -> Result<Compiled> {
        let compiled = self.undeclared(source.into(), options)?;
        compiled.declare_variables()?;
        Ok(compiled)
    }

    /// A model whose variables the session does not know yet, since compilation may fail.
    pub(crate) fn undeclared(&self, source: Source, options: &Options) -> Result<Compiled> {
        let source = source.in_container(&options.container)?;
        if let Source::Graph(g) = &source
            && g.has_state()
        {
            self.variables().check(&bound(g, &options.dims)?)?;
        }
        let compiled = Compiled::of(source, options, &Common::new(self, options))?;
        data_parallel::check(&compiled)?;
        Ok(compiled)
    }
}

/// A graph with sizes in the place of symbols. Errors with an unknown symbol, as the import of a model does.
pub fn bound(g: &Graph, dims: &Bindings) -> Result<Graph> {
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

/// The facts about an ONNX model in the options.
fn specialisation(options: &Options) -> onnx::Specialisation {
    onnx::Specialisation {
        dims: options.dims.clone(),
        ranges: options.ranges.clone(),
        seed: options.seed,
        ..Default::default()
    }
}

impl Compiled {
    /// A model, a segment or a form.
    pub(crate) fn of(source: Source, options: &Options, common: &Arc<Common>) -> Result<Compiled> {
        let mut options = options.clone();
        let (source, open) = match &source {
            Source::Graph(_) => (source, None),
            Source::Onnx(m) => match Closed::of(m, &mut options, common)? {
                Closed::Model(closed) => (closed.into(), None),
                Closed::Open(open) => (source, Some(open)),
            },
        };
        match open {
            None => Compiled::of_closed(source, &options, common),
            Some(open) => Ok(Compiled::of_open(source, open, options, common)),
        }
    }

    /// A model without code until a run shows the structure of its inputs.
    fn of_open(
        source: Source,
        open: Box<Open>,
        options: Options,
        common: &Arc<Common>,
    ) -> Compiled {
        let outputs = open.output_names();
        Compiled {
            open: Some(open),
            ..Compiled::new(source, options, Vec::new(), outputs, common)
        }
    }

    /// A model without code.
    fn new(
        source: Source,
        options: Options,
        inputs: Vec<(String, Type)>,
        outputs: Vec<String>,
        common: &Arc<Common>,
    ) -> Compiled {
        Compiled {
            specialisations: Specialisations::new(common.session.caches()),
            cuts: Specialisations::new(common.session.caches()),
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
            common: common.clone(),
        }
    }

    fn of_closed(source: Source, options: &Options, common: &Arc<Common>) -> Result<Compiled> {
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
        common.add_warnings(&left_open.warnings);
        let mut compiled = Compiled {
            value_inputs: left_open.values,
            model_warnings: left_open.warnings,
            ..Compiled::new(source, ranged, symbolic.0, symbolic.1, common)
        };
        if left_open.has_extents {
            common
                .session
                .check_here("extents that the data decides are not supported")?;
            let graph = compiled.symbolic_graph()?;
            compiled.segmented = Some(Segmented::of(graph, options, common)?);
        }
        Ok(compiled)
    }

    /// Notes the types of the variables. Errors when another model has meanwhile declared one with another type.
    pub(crate) fn declare_variables(&self) -> Result<()> {
        match &self.source {
            Source::Graph(g) if g.has_state() => {
                let bound = bound(g, &self.options.dims)?;
                self.session().variables().declare(&bound)
            }
            _ => Ok(()),
        }
    }

    /// Generates code if all shapes are known.
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
    /// Element `i` of a sequence `x` is the input `x[i]`. If runs decide the number of elements, the list is empty and only [`Compiled::run`]
    /// runs the model; [`Options::dims`] can set the number under the name of the sequence.
    pub fn inputs(&self) -> &[(String, Type)] {
        &self.inputs
    }

    /// The graph as it was given, if it was one.
    pub(crate) fn built_graph(&self) -> Option<&Graph> {
        match &self.source {
            Source::Graph(g) => Some(g),
            Source::Onnx(_) => None,
        }
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

    /// Number of segments, compiled one by one because only a run knows the extents between them; 1 for a model compiled as a whole.
    /// The largest number so far if segments depend on the inputs.
    pub fn n_segments(&self) -> usize {
        let cuts = self.cuts.values();
        let cuts = cuts.iter().map(|cut| cut.n_segments());
        let all = self.segmented.as_ref().map(Segmented::n_segments);
        all.into_iter().chain(cuts).max().unwrap_or(1)
    }

    /// Number of specialisations in the cache. At most 64 of them have kernels chosen once for all shapes, since those are compiled again
    /// within milliseconds.
    pub fn specialisations(&self) -> usize {
        self.sum(|part| part.specialisations.len())
    }

    /// Number of sets of input shapes, of segments too, compiled all the way by themselves because no kernels for all shapes fit them.
    /// All others took milliseconds.
    pub fn compiled_alone(&self) -> usize {
        self.sum(|part| part.n_alone.load(Ordering::Relaxed))
    }

    /// The session of the model.
    pub fn session(&self) -> &Session {
        &self.common.session
    }

    /// The variables of the session, those of other models included.
    pub fn resources(&self) -> &Arc<Resources> {
        self.session().resources()
    }

    /// The settings and the options of compilation.
    #[doc(hidden)]
    pub fn config(&self) -> Config<'_> {
        self.common.config(&self.options)
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
    #[doc(hidden)]
    pub fn parts(&self) -> impl Iterator<Item = &Compiled> {
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
    #[doc(hidden)]
    pub fn run_watched(&self, tensors: &[Tensor], watch: Watch) -> Result<Outputs> {
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
    #[doc(hidden)]
    pub fn executable_for(&self, tensors: &[Tensor]) -> Result<Option<Arc<Executable>>> {
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

    /// The segments of a model cut for these inputs alone.
    fn cut_for(&self, inputs: &InputShapes) -> Result<Arc<Segmented>> {
        let make = || {
            let graph = self.graph(inputs)?;
            let options = Options {
                dims: Bindings::new(),
                ..self.options.clone()
            };
            let held = held_by_graph(graph.n_nodes());
            Ok((Segmented::of(graph, &options, &self.common)?, held))
        };
        self.cuts.get_or_make(self.key(inputs), make, |_, _| {})
    }

    /// The placement for given inputs, in the order of [`Compiled::inputs`]. The devices need not exist.
    pub fn plan(&self, tensors: &[Tensor]) -> Result<Planned> {
        self.plan_shapes(&self.shapes_of(tensors))
    }

    /// The same without the tensors.
    #[doc(hidden)]
    pub fn plan_shapes(&self, inputs: &InputShapes) -> Result<Planned> {
        self.session().check_here("plans are not supported")?;
        plan(self.fused(inputs)?, self.config())
    }

    /// The placement to continue with, by the times of `measured`: the compiled one for these inputs, or a better one if it pays over
    /// `steps` runs. Rebuilding costs the time of code generation if a node moves.
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
            self.common.config(&options),
            &executable.lowered.placement,
            horizon,
        )
    }

    /// The graphs of the devices for given inputs, as their executable was made from them.
    pub(crate) fn partitions(&self, tensors: &[Tensor]) -> Result<Vec<Part>> {
        let fused = self.fused(&self.shapes_of(tensors))?;
        Ok(partitioned(fused, self.config())?.partitions)
    }

    /// The specialisation for given inputs, in the order of [`Compiled::inputs`]; made now if it is not there yet.
    ///
    /// Errors with `Unsupported` where the data decides extents: see [`Compiled::is_whole`].
    pub fn for_inputs(&self, tensors: &[Tensor]) -> Result<Arc<Executable>> {
        self.check_whole()?;
        self.specialise(self.shapes_of(tensors))
    }

    /// The graph for given inputs, in the order of [`Compiled::inputs`], not yet rewritten.
    #[doc(hidden)]
    pub fn graph_for(&self, tensors: &[Tensor]) -> Result<Graph> {
        self.graph(&self.shapes_of(tensors))
    }

    /// Names of the inputs whose values decide shapes.
    #[doc(hidden)]
    pub fn value_inputs(&self) -> &BTreeSet<String> {
        &self.value_inputs
    }

    /// Errors when the model is compiled in parts.
    #[doc(hidden)]
    pub fn check_whole(&self) -> Result<()> {
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
}
