//! Models whose extents are not all known before a run: segments that are compiled one by one, and
//! the nodes between them.

use super::{Common, Compiled, Executable, InputShapes, Outputs};
use crate::error::{Error, Result};
use crate::interp;
use crate::ir::print::PrintOptions;
use crate::ir::{Bindings, Graph};
use crate::options::Options;
use crate::passes::{self, OpenRules};
use crate::pipeline::{Stage, with_pins};
use crate::place::Fallback;
use gristmill_runtime::Tensor;
use gristmill_runtime::exec::{Resources, Transaction};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

/// Sees a segment, by its number, before it runs.
pub(crate) type Watch<'a> = &'a dyn Fn(usize, &Executable) -> Result<()>;

/// Gives the shapes of the inputs of a segment.
pub(crate) type PartShapes<'a> = &'a dyn Fn(&Compiled) -> Result<InputShapes>;

/// A model in segments.
///
/// Nodes between them, which give symbols their values, are run by the interpreter. Tensors go from
/// segment to segment through the memory of the host.
pub(crate) struct Segmented {
    /// The segments, in their order, as nodes.
    graph: Graph,
    /// Type rules that some sizes contradict.
    rules: OpenRules,
    /// The last shapes that were found to fit: those of a service seldom change.
    last_fit: Mutex<Vec<Vec<usize>>>,
    parts: Vec<Compiled>,
    /// Variables, where a segment uses some: a run of all segments is one use of them.
    resources: Option<Arc<Resources>>,
    /// True when a node assigns a variable.
    assigns: bool,
}

impl Segmented {
    /// Cuts a graph, in which the sizes of `options` stand for their symbols.
    pub(crate) fn of(graph: Graph, options: &Options, common: &Arc<Common>) -> Result<Segmented> {
        check_plan(options)?;
        if options.updates_overlap && graph.has_state() {
            let message = "updates overlap, and extents of the model are known in a run only";
            return Err(Error::unsupported(message).hint("updates_overlap: false"));
        }
        let graph = with_pins(graph, common.config(options))?;
        if options.fallback == Fallback::Error {
            check_requests(&graph)?;
        }
        let rules = OpenRules::of(&graph);
        let graph = passes::cut(&graph)?;
        let parts = passes::segments(&graph).into_iter();
        let parts = parts.map(|part| Compiled::of(part.into(), &options_of(part, options), common));
        let parts = parts.collect::<Result<_>>()?;
        let resources = graph
            .has_state()
            .then(|| common.session.resources().clone());
        Ok(Segmented {
            assigns: graph.assigns(),
            graph,
            rules,
            last_fit: Mutex::default(),
            parts,
            resources,
        })
    }

    /// True unless the sizes of these inputs contradict what the segments take to hold.
    pub(crate) fn fits(&self, shapes: &[Vec<usize>]) -> bool {
        let mut last = self.last_fit.lock().unwrap_or_else(PoisonError::into_inner);
        if !shapes.is_empty() && *last == shapes {
            return true;
        }
        // Inputs of other ranks are refused when they are run.
        let sizes = self.graph.bindings_for(shapes);
        let fits = sizes.is_ok_and(|sizes| self.rules.check(&sizes).is_ok());
        if fits {
            *last = shapes.to_vec();
        }
        fits
    }

    pub(crate) fn n_segments(&self) -> usize {
        self.parts.len()
    }

    pub(crate) fn parts(&self) -> &[Compiled] {
        &self.parts
    }

    pub(crate) fn compile_static(&self) -> Result<()> {
        self.parts.iter().try_for_each(Compiled::compile_static)
    }

    /// The results for inputs of the declared types; `watch` sees each segment before it runs.
    pub(crate) fn run(&self, inputs: &[Tensor], watch: Watch) -> Result<Outputs> {
        let resources = self.resources.as_ref();
        let transaction = resources.map(|r| r.begin_as(self.assigns));
        let segment = |number: usize, inputs: &[Tensor]| {
            let part = &self.parts[number];
            let results = part.run_part(number, inputs, transaction.as_ref(), watch);
            results.map_err(|e| part.with_sizes(e, inputs))
        };
        let results = interp::run_segments(&self.graph, inputs, &segment)?;
        if let Some(transaction) = transaction {
            transaction.commit();
        }
        Ok(self.named(results))
    }

    fn named(&self, results: Vec<Tensor>) -> Outputs {
        let names = self.graph.outputs.iter().map(|o| o.name.clone());
        Outputs::of(names.zip(results).collect())
    }

    /// The text of a stage of each segment, and of [`Stage::Segments`]. `shapes` gives those of the
    /// inputs of a segment.
    pub(crate) fn text(&self, stage: Stage, full: bool, shapes: PartShapes) -> Result<String> {
        if stage == Stage::Segments {
            return Ok(self.graph.to_text(PrintOptions::of(full)));
        }
        let mut text = String::new();
        for (number, part) in self.parts.iter().enumerate() {
            text += &format!("// segment {number}\n");
            text += &match part.has_declared_shapes() {
                true => part.lower_for(stage, &shapes(part)?)?.text(stage, full)?,
                false => "// a run decides its extents: see the stage \"segments\"\n".to_owned(),
            };
        }
        Ok(text)
    }

    /// The error where there would have to be one program.
    pub(crate) fn not_whole(&self) -> Error {
        not_whole(Some(self.n_segments()))
    }
}

/// The error where a model has no one program.
pub(super) fn not_whole(n_segments: Option<usize>) -> Error {
    let n = n_segments.map_or(String::new(), |n| format!("{n} "));
    let cause = "the data decides extents of this model";
    let effect = format!("it is compiled in {n}segments, and there is no one program for it");
    Error::unsupported(format!("{cause}: {effect}")).hint("Compiled::run runs it")
}

impl Compiled {
    fn run_part(
        &self,
        number: usize,
        inputs: &[Tensor],
        transaction: Option<&Transaction>,
        watch: Watch,
    ) -> Result<Vec<Tensor>> {
        let executable = self.for_inputs(inputs)?;
        watch(number, &executable)?;
        match transaction {
            Some(transaction) => executable.run_in(transaction, inputs),
            None => Ok(executable.run(inputs)?.into_tensors()),
        }
    }

    /// The error of a segment, with the sizes of symbols in its inputs.
    fn with_sizes(&self, e: Error, inputs: &[Tensor]) -> Error {
        let sizes = self.sizes_of(inputs);
        match sizes.is_empty() {
            true => e,
            false => e.context(format!("where {}", sizes.join(", "))),
        }
    }

    /// Symbols in the inputs of a segment, each with its size.
    fn sizes_of(&self, inputs: &[Tensor]) -> Vec<String> {
        let types = self.inputs().iter().map(|(_, ty)| ty);
        let extents = types
            .zip(inputs)
            .flat_map(|(ty, t)| ty.shape.iter().zip(t.shape()));
        let sizes = extents.filter_map(|(d, n)| Some(format!("{} is {n}", d.as_symbol()?)));
        let sizes: BTreeSet<String> = sizes.collect();
        sizes.into_iter().take(MAX_NAMED).collect()
    }
}

/// Most symbols that an error names.
const MAX_NAMED: usize = 8;

fn check_plan(options: &Options) -> Result<()> {
    if options.plan.is_none() {
        return Ok(());
    }
    let message = "a plan is for a model that is compiled as a whole";
    let e = Error::unsupported(format!("{message}; the data decides extents of this one"));
    Err(e.hint("leave the plan out"))
}

/// Errors when a node that the host computes, since the data decides extents of its result, is to
/// be on another kind of device.
fn check_requests(g: &Graph) -> Result<()> {
    for (_, node) in g.nodes().filter(|(_, node)| passes::decides_extents(node)) {
        node.regions.iter().try_for_each(check_requests)?;
        let asked = node.device.as_ref().filter(|_| node.regions.is_empty());
        let kind = asked.and_then(|asked| asked.spec.device_type.as_deref());
        if let Some(kind) = kind.filter(|kind| *kind != "CPU") {
            let op = node.op.name();
            let message = format!("{op} is computed by the host, is asked for on a {kind}");
            let e = Error::unsupported(message).hint("--fallback warn, or a pin without it");
            return Err(e.at_origin(&node.origin));
        }
    }
    Ok(())
}

/// The options for a segment: sizes are in its graph, and so are pins, as requests of its nodes.
fn options_of(part: &Graph, options: &Options) -> Options {
    let known = part.symbols();
    let mut ranges = options.ranges.clone();
    ranges.retain(|dim, _| known.contains(dim));
    Options {
        dims: Bindings::new(),
        pins: Vec::new(),
        // A later segment may fail.
        updates_in_place: false,
        ranges,
        ..options.clone()
    }
}
