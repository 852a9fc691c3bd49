//! Importing: names to values, nodes to IR, through functions and subgraphs.
//!
//! A [`V`] is a value of the model during import. Its contents may be known (a constant, or small
//! integers that contain symbols); then no IR value exists until a node needs it as a tensor. IR
//! graphs under construction form a stack of frames, one per region; an outer value used inside a
//! region becomes an operand of the region when it is used.

mod build;
mod conditions;
mod ctx;
mod fold;
mod interface;
mod nodes;
mod run_time;
mod subgraphs;
mod symbolic;
mod values;

pub(super) use build::{moved_axis, product};
pub(super) use ctx::{Ctx, OpDef, Out, Outs, axes_of, axis_of, one};
pub(super) use interface::declared_type;
pub(super) use run_time::Element;

use super::load::{Form, Model, Opsets, Specialisation};
use super::proto::{AttributeProto, FunctionProto, TensorProto};
use crate::error::{Error, Result};
use crate::interp::WorkBudget;
use crate::ir::verify::verify;
use crate::ir::{Dim, Graph, GraphBuilder, Ranges, Type, ValueId};
use crate::passes;
use conditions::Condition;
use gristmill_runtime::{DType, Tensor};
use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;

/// Nesting of functions and subgraphs beyond which a model is refused.
const MAX_DEPTH: usize = 48;
/// Nodes imported, functions expanded, beyond which a model is refused.
const MAX_NODES: usize = 1 << 18;
/// Bytes of a tensor beyond which a model is refused: no machine holds it, and sizes computed from
/// it stay far from overflow.
const MAX_TENSOR_BYTES: usize = 1 << 40;
/// Bytes up to which a value computed from constants is folded during import.
pub(super) const FOLD_LIMIT_BYTES: usize = 1 << 22;

/// A value of the model during import.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct V(u32);

/// Contents of a value, when known.
#[derive(Clone, Debug)]
pub(super) enum Contents<'m> {
    /// A tensor.
    Tensor(Tensor),
    /// Row-major elements, each an expression over symbols.
    Dims(Vec<Dim>),
    /// An initialiser not yet decoded.
    Proto(&'m TensorProto),
    /// The elements of a sequence, which is no tensor.
    List(Vec<V>),
    /// An optional value without element.
    Absent,
}

impl Contents<'_> {
    /// A type for a value that has none: see [`Contents::List`] and [`Contents::Absent`].
    pub fn list_type() -> Type {
        Type::new(DType::U8, [0usize])
    }

    /// The error for contents that are none of a tensor where one belongs.
    fn not_a_tensor(&self, name: &str) -> Error {
        let kind = match self {
            Contents::Absent => "an optional value without element",
            _ => "a sequence",
        };
        Error::unsupported(format!("{name:?} is {kind}, expected a tensor"))
    }
}

struct Slot<'m> {
    name: &'m str,
    /// `None` when the node that defines the value could not be imported.
    ty: Option<Type>,
    known: Option<Contents<'m>>,
    /// Frame in which the value has an IR value, if it has one.
    home: usize,
}

struct Frame {
    b: GraphBuilder,
    ids: HashMap<V, ValueId>,
    /// Outer values that the region uses, in the order of its trailing inputs.
    captures: Vec<V>,
    /// Symbols that get their values from elements of the frame.
    extents: HashMap<ValueId, Dim>,
    /// Symbols that stand for the elements of values.
    elements: HashMap<V, Vec<Dim>>,
}

struct Scope<'m> {
    names: HashMap<&'m str, V>,
    /// Attributes of the call, for the body of a function; such a scope does not see outer names.
    call: Option<Call<'m>>,
    opsets: Rc<Opsets>,
    /// Path of the surrounding nodes, with a trailing slash.
    path: String,
}

struct Call<'m> {
    function: &'m FunctionProto,
    attributes: HashMap<&'m str, &'m AttributeProto>,
}

/// Result of importing the main graph.
pub(super) struct Imported {
    /// The graph, unless there were errors.
    pub graph: Option<Graph>,
    /// All errors found.
    pub errors: Vec<Error>,
    /// The part of the graph that was imported when there were errors.
    pub draft: Graph,
    /// Inputs and variables whose values were needed and not known.
    pub needs: BTreeSet<String>,
    /// All nodes of the model, in order, inner ones before those that hold them.
    pub visits: Vec<Visit>,
}

/// Outcome of a node of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Visited {
    /// It was imported.
    Imported,
    /// It could not be.
    Failed,
    /// An operand could not be.
    Unreached,
}

/// A node of the model.
#[derive(Clone, Debug)]
pub(super) struct Visit {
    /// Its path: the origin of the IR nodes made of it.
    pub path: String,
    /// Operator, with its domain unless it is a standard one.
    pub operator: String,
    /// Its outcome.
    pub outcome: Visited,
    /// Rules beside the ONNX reference that decide some of its results.
    pub rules: Vec<&'static str>,
    /// Its kind, if it is in its form for training.
    pub training: Option<TrainingNode>,
}

/// Kinds of nodes that have a form for training.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TrainingNode {
    /// `BatchNormalization`.
    BatchNorm,
    /// `Dropout`.
    Dropout,
}

impl TrainingNode {
    /// A warning for each kind of node in its form for training, with the first of its nodes and their number.
    pub(super) fn warnings(visits: &[Visit]) -> Vec<String> {
        let kinds = [TrainingNode::BatchNorm, TrainingNode::Dropout].into_iter();
        let warning = |kind: TrainingNode| {
            let of_kind = |visit: &&Visit| visit.training == Some(kind);
            let first = visits.iter().find(of_kind)?;
            let n = visits.iter().filter(of_kind).count();
            Some(kind.warning(&first.path, n))
        };
        kinds.filter_map(warning).collect()
    }

    fn warning(self, first: &str, n: usize) -> String {
        let effect = match (self, n) {
            (TrainingNode::BatchNorm, 1) => "1 batch norm takes statistics of the batch".to_owned(),
            (TrainingNode::BatchNorm, n) => {
                format!("{n} batch norms take statistics of the batch")
            }
            (TrainingNode::Dropout, 1) => "1 dropout drops random elements".to_owned(),
            (TrainingNode::Dropout, n) => format!("{n} dropouts drop random elements"),
        };
        let which = if n == 1 { "" } else { "the first is " };
        let hint = "try: export for inference";
        format!("{effect}, as in training: {which}node {first:?} ({hint})")
    }
}

/// A region as imported.
pub(super) struct Region {
    /// The closed graph: formal inputs first, then one input per capture.
    pub graph: Graph,
    /// Outer values that it uses.
    pub captures: Vec<V>,
}

/// Treatment of large initialisers.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Weights {
    /// All that the graph uses.
    Read,
    /// Values beyond the folding limit stand in the graph as inputs: enough for a report.
    Skip,
}

/// State of one import.
pub(super) struct Importer<'m> {
    model: &'m Model,
    weights: Weights,
    slots: Vec<Slot<'m>>,
    frames: Vec<Frame>,
    scopes: Vec<Scope<'m>>,
    errors: Vec<Error>,
    visits: Vec<Visit>,
    /// Rules that the node being imported follows beside the ONNX reference.
    rules: Vec<&'static str>,
    /// The kind of the node being imported, if it is in its form for training.
    training: Option<TrainingNode>,
    needs: BTreeSet<String>,
    /// True where operands that shapes depend on may be known during a run only.
    run_time: bool,
    /// The form of nodes with `training_mode`.
    form: Form,
    /// The seed of nodes that draw random numbers.
    seed: u64,
    /// Initialisers that are variables.
    variables: HashMap<V, &'m str>,
    /// Values that nodes so far have assigned to variables.
    assigned: HashMap<V, ValueId>,
    /// Symbols of the inputs.
    symbols: BTreeSet<String>,
    /// Declared ranges of symbols.
    ranges: Ranges,
    /// Number of symbols made for extents that a run shows.
    n_symbols: usize,
    /// The elements, one tensor each, that symbols get their values from.
    extent_values: HashMap<String, V>,
    /// Extents that are taken to be equal.
    conditions: Vec<Condition>,
    /// Integer values whose elements are those of another value, in their order.
    sources: HashMap<V, V>,
    folding: WorkBudget,
    n_nodes: usize,
    depth: usize,
}

impl<'m> Importer<'m> {
    /// Imports the main graph. Errors only when `spec` does not fit the model; the rest is in
    /// [`Imported`].
    ///
    /// Extents that depend on data are left to the run. Where that does not go, the inputs that they
    /// depend on are needed.
    pub fn run(model: &'m Model, spec: &Specialisation, weights: Weights) -> Result<Imported> {
        let left_to_run = Importer::attempt_run(model, spec, weights, true)?;
        if left_to_run.errors.is_empty() {
            return Ok(left_to_run);
        }
        let by_value = Importer::attempt_run(model, spec, weights, false)?;
        match by_value.errors.is_empty() || values_help(&left_to_run, &by_value) {
            true => Ok(by_value),
            false => Ok(left_to_run),
        }
    }

    fn attempt_run(
        model: &'m Model,
        spec: &Specialisation,
        weights: Weights,
        run_time: bool,
    ) -> Result<Imported> {
        let g = model.graph_proto();
        let mut im = Importer::new(model, weights, run_time);
        im.ranges = spec.ranges.clone();
        im.form = spec.form;
        im.seed = spec.seed;
        im.b().set_n_parts(spec.n_parts);
        im.weights(g, spec)?;
        im.inputs(g, spec)?;
        im.nodes(&g.node);
        if g.output.is_empty() {
            im.errors.push(Error::invalid("the graph has no outputs"));
        }
        im.outputs(g);
        im.finish()
    }

    fn new(model: &'m Model, weights: Weights, run_time: bool) -> Importer<'m> {
        let scope = Scope {
            names: HashMap::new(),
            call: None,
            opsets: Rc::new(model.opsets.clone()),
            path: String::new(),
        };
        Importer {
            model,
            weights,
            slots: Vec::new(),
            frames: vec![Frame::new(&model.graph_proto().name)],
            scopes: vec![scope],
            errors: Vec::new(),
            visits: Vec::new(),
            rules: Vec::new(),
            training: None,
            needs: BTreeSet::new(),
            run_time,
            form: Form::default(),
            seed: 0,
            variables: HashMap::new(),
            assigned: HashMap::new(),
            symbols: BTreeSet::new(),
            ranges: Ranges::new(),
            n_symbols: 0,
            extent_values: HashMap::new(),
            conditions: Vec::new(),
            sources: HashMap::new(),
            folding: fold::budget(),
            n_nodes: 0,
            depth: 0,
        }
    }

    fn finish(mut self) -> Result<Imported> {
        let draft = self.frames.pop().expect("the main frame").b.into_graph();
        let mut graph = None;
        if self.errors.is_empty() {
            let mut g = passes::prune(&draft)?;
            conditions::add(&mut g, &self.conditions)?;
            let symbols = &self.symbols;
            g.ranges = self.ranges.clone();
            g.ranges.retain(|dim, _| symbols.contains(dim));
            verify(&g)?;
            graph = Some(g);
        }
        Ok(Imported {
            graph,
            errors: self.errors,
            draft,
            needs: self.needs,
            visits: self.visits,
        })
    }

    /// Keeps an error for the report.
    fn note<T>(&mut self, result: Result<T>) -> Option<T> {
        match result {
            Ok(v) => Some(v),
            Err(e) => {
                self.errors.push(e);
                None
            }
        }
    }

    fn slot(&mut self, slot: Slot<'m>) -> V {
        self.slots.push(slot);
        V(self.slots.len() as u32 - 1)
    }

    /// A value with known contents, or one that could not be imported.
    fn unplaced(&mut self, name: &'m str, ty: Option<Type>, known: Option<Contents<'m>>) -> V {
        self.slot(Slot {
            name,
            ty,
            known,
            home: 0,
        })
    }

    fn scope(&mut self) -> &mut Scope<'m> {
        self.scopes.last_mut().expect("a scope")
    }

    fn define(&mut self, name: &'m str, v: V) {
        if self.scope().names.insert(name, v).is_some() {
            let message = format!("value {name:?} is defined twice");
            self.errors.push(Error::invalid(message));
        }
    }

    fn lookup(&self, name: &str) -> Option<V> {
        for scope in self.scopes.iter().rev() {
            if let Some(v) = scope.names.get(name) {
                return Some(*v);
            }
            if scope.call.is_some() {
                return None;
            }
        }
        None
    }

    /// Builder of the graph or region under construction.
    pub fn b(&mut self) -> &mut GraphBuilder {
        &mut self.frames.last_mut().expect("a frame").b
    }

    /// Type of a value; an error when its definition could not be imported.
    pub fn ty(&self, v: V) -> Result<&Type> {
        let slot = &self.slots[v.0 as usize];
        if let Some(known @ (Contents::List(_) | Contents::Absent)) = &slot.known {
            return Err(known.not_a_tensor(slot.name));
        }
        let ty = slot.ty.as_ref();
        ty.ok_or_else(|| Error::unsupported(format!("{:?} could not be imported", slot.name)))
    }
}

/// True when values of inputs are needed, and nothing else stands in the way of both imports.
fn values_help(left_to_run: &Imported, by_value: &Imported) -> bool {
    let messages: BTreeSet<String> = by_value.errors.iter().map(Error::to_string).collect();
    let is_common = |e: &Error| !e.is_of_values() && messages.contains(&e.to_string());
    !by_value.needs.is_empty() && !left_to_run.errors.iter().any(is_common)
}

impl Frame {
    fn new(name: &str) -> Frame {
        Frame {
            b: GraphBuilder::new(name),
            ids: HashMap::new(),
            captures: Vec::new(),
            extents: HashMap::new(),
            elements: HashMap::new(),
        }
    }
}
