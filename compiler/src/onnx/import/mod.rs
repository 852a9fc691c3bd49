//! Importing: names to values, nodes to IR, through functions and subgraphs.
//!
//! A [`V`] is a value of the model during import. Its contents may be known (a constant, or small integers that contain
//! symbols); then no IR value exists until a node needs it as a tensor. IR graphs under construction form a stack of
//! frames, one per region; an outer value used inside a region becomes an operand of the region when it is used.

mod ctx;
mod fold;
mod prune;
mod symbolic;

pub(super) use ctx::{Ctx, OpDef, Out, Outs, axes_of, axis_of, one};

use super::load::{Model, Opsets, Specialisation, domain, opsets_of};
use super::ops;
use super::proto::{
    AttributeProto, DimensionValue, FunctionProto, GraphProto, NodeProto, TypeValue, ValueInfoProto,
};
use super::proto::{SparseTensorProto, TensorProto};
use super::tensor::{constant_of, dense_of, dtype_of, shape_of, tensor_of};
use crate::error::{Error, ErrorKind, Result};
use crate::interp::WorkBudget;
use crate::ir::{Bindings, Def, Dim, Graph, GraphBuilder, Shape, Type, ValueId, verify::verify};
use gristmill_runtime::{DType, Tensor};
use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;
use symbolic::{depends_on_symbols, symbolic_tensor};

/// Nesting of functions and subgraphs beyond which a model is refused.
const MAX_DEPTH: usize = 48;
/// Nodes imported, functions expanded, beyond which a model is refused.
const MAX_NODES: usize = 1 << 18;
/// Bytes of a tensor beyond which a model is refused: no machine holds it, and sizes computed from it stay far from overflow.
const MAX_TENSOR_BYTES: usize = 1 << 40;
/// Bytes up to which a value computed from constants is folded during import.
pub(super) const FOLD_LIMIT_BYTES: usize = 1 << 22;

/// A value of the model during import.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct V(u32);

/// Contents of a value, when known.
#[derive(Clone, Debug)]
pub(super) enum Known<'m> {
    /// A tensor.
    Tensor(Tensor),
    /// Row-major elements, each an expression over symbols.
    Dims(Vec<Dim>),
    /// An initialiser not yet decoded.
    Proto(&'m TensorProto),
    /// The elements of a sequence, which is no tensor.
    List(Vec<V>),
}

impl Known<'_> {
    /// What stands for a type where there is none: see [`Known::List`].
    pub fn list_type() -> Type {
        Type::new(DType::U8, [0usize])
    }
}

struct Slot<'m> {
    name: &'m str,
    /// `None` when the node that defines the value could not be imported.
    ty: Option<Type>,
    known: Option<Known<'m>>,
    /// Frame in which the value has an IR value, if it has one.
    home: usize,
}

struct Frame {
    b: GraphBuilder,
    ids: HashMap<V, ValueId>,
    /// Outer values that the region uses, in the order of its trailing inputs.
    captures: Vec<V>,
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
    /// What there is of the graph when there were errors.
    pub draft: Graph,
    /// Inputs whose values were needed and not known.
    pub needs: BTreeSet<String>,
    /// All nodes of the model, in order, inner ones before those that hold them.
    pub visits: Vec<Visit>,
}

/// What came of a node of the model.
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
    /// What came of it.
    pub outcome: Visited,
    /// Rules beside the ONNX reference that decide some of its results.
    pub rules: Vec<&'static str>,
}

/// A region as imported.
pub(super) struct Region {
    /// The closed graph: formal inputs first, then one input per capture.
    pub graph: Graph,
    /// Outer values that it uses.
    pub captures: Vec<V>,
}

/// Whether large initialisers are read.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Weights {
    /// All that the graph uses.
    Read,
    /// Those beyond the folding limit stand in the graph as inputs: enough to learn whether it imports.
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
    needs: BTreeSet<String>,
    folding: WorkBudget,
    n_nodes: usize,
    depth: usize,
}

/// Dtype and dims of a declared tensor; unnamed unknown dims become symbols `name_axis`.
pub(super) fn declared_type(info: &ValueInfoProto) -> Result<(DType, Vec<Dim>)> {
    let tensor = match info.r#type.as_ref().and_then(|t| t.value.as_ref()) {
        Some(TypeValue::Tensor(t)) => t,
        Some(other) => {
            let what = match other {
                TypeValue::Sequence(_) => "a sequence",
                TypeValue::Map(_) => "a map",
                TypeValue::Optional(_) => "an optional value",
                _ => "a sparse tensor",
            };
            return Err(Error::unsupported(format!(
                "{:?} is {what}; only dense tensors are supported",
                info.name
            )));
        }
        None => return Err(Error::invalid(format!("{:?} has no type", info.name))),
    };
    let dtype = dtype_of(tensor.elem_type).map_err(|e| e.context(format!("{:?}", info.name)))?;
    let shape = tensor.shape.as_ref().ok_or_else(|| {
        Error::unsupported(format!("{:?} has no declared rank", info.name))
            .hint("give its shape when importing")
    })?;
    let dims = shape
        .dim
        .iter()
        .enumerate()
        .map(|(axis, d)| match &d.value {
            Some(DimensionValue::Value(n)) if *n < 0 => Err(Error::invalid(format!(
                "{:?} has extent {n} on axis {axis}",
                info.name
            ))),
            Some(DimensionValue::Value(n)) => Ok(Dim::constant(*n)),
            Some(DimensionValue::Param(p)) if !p.is_empty() => Ok(Dim::symbol(p)),
            _ => Ok(Dim::symbol(&format!("{}_{axis}", info.name))),
        });
    Ok((dtype, dims.collect::<Result<_>>()?))
}

/// The type, unless it is of a tensor that cannot exist.
fn possible(ty: Type) -> Result<Type> {
    let empty = ty.shape.iter().any(|d| d.is(0));
    if !empty
        && ty
            .size_bytes()
            .is_some_and(|bytes| bytes > MAX_TENSOR_BYTES)
    {
        return Err(Error::invalid(format!(
            "{ty} is larger than {MAX_TENSOR_BYTES} bytes, the limit for one tensor"
        )));
    }
    Ok(ty)
}

impl<'m> Importer<'m> {
    /// Imports the main graph. Errors only when `spec` does not fit the model; the rest is in [`Imported`].
    pub fn run(model: &'m Model, spec: &Specialisation, weights: Weights) -> Result<Imported> {
        let g = model.graph_proto();
        let mut im = Importer {
            model,
            weights,
            slots: Vec::new(),
            frames: vec![Frame::new(&g.name)],
            scopes: vec![Scope {
                names: HashMap::new(),
                call: None,
                opsets: Rc::new(model.opsets.clone()),
                path: String::new(),
            }],
            errors: Vec::new(),
            visits: Vec::new(),
            rules: Vec::new(),
            needs: BTreeSet::new(),
            folding: fold::budget(),
            n_nodes: 0,
            depth: 0,
        };
        im.initialisers(g);
        im.inputs(g, spec)?;
        im.nodes(&g.node);
        if g.output.is_empty() {
            im.errors.push(Error::invalid("the graph has no outputs"));
        }
        im.outputs(g);
        let draft = im.frames.pop().expect("the main frame").b.into_graph();
        let mut graph = None;
        if im.errors.is_empty() {
            let g = prune::prune(&draft)?;
            verify(&g)?;
            graph = Some(g);
        }
        Ok(Imported {
            graph,
            errors: im.errors,
            draft,
            needs: im.needs,
            visits: im.visits,
        })
    }

    fn initialisers(&mut self, g: &'m GraphProto) {
        for t in &g.initializer {
            let ty = dtype_of(t.data_type).and_then(|d| Ok(Type::new(d, shape_of(t)?)));
            let ty = self.note(ty.map_err(|e| e.context(format!("initialiser {:?}", t.name))));
            let v = self.slot(Slot {
                name: &t.name,
                ty,
                known: Some(Known::Proto(t)),
                home: 0,
            });
            self.define(&t.name, v);
        }
        for s in &g.sparse_initializer {
            let name = s.values.as_ref().map_or("", |v| v.name.as_str());
            let tensor = sparse(s, self.model);
            let tensor = self.note(tensor.map_err(|e| e.context(format!("initialiser {name:?}"))));
            let ty = tensor
                .as_ref()
                .map(|t| Type::new(t.dtype(), t.shape().iter().copied()));
            let v = self.slot(Slot {
                name,
                ty,
                known: tensor.map(Known::Tensor),
                home: 0,
            });
            self.define(name, v);
        }
    }

    fn inputs(&mut self, g: &'m GraphProto, spec: &Specialisation) -> Result<()> {
        let free: Vec<&ValueInfoProto> = g
            .input
            .iter()
            .filter(|i| !self.scopes[0].names.contains_key(i.name.as_str()))
            .collect();
        let bindings = check_names(&free, spec)?;
        for info in free {
            let ty = self.note(input_type(info, spec, &bindings).and_then(possible));
            let known = spec
                .values
                .get(&info.name)
                .map(|t| Known::Tensor(t.clone()));
            let v = self.slot(Slot {
                name: &info.name,
                ty: ty.clone(),
                known,
                home: 0,
            });
            if let Some(ty) = ty {
                let id = self.frames[0].b.input(&info.name, ty.dtype, ty.shape.0);
                if !spec.values.contains_key(&info.name) {
                    self.frames[0].ids.insert(v, id);
                }
            }
            self.define(&info.name, v);
        }
        Ok(())
    }

    fn outputs(&mut self, g: &'m GraphProto) {
        for o in &g.output {
            let found = self
                .lookup(&o.name)
                .ok_or_else(|| Error::invalid(format!("output {:?} is not defined", o.name)));
            let Some(v) = self.note(found) else { continue };
            if self.slots[v.0 as usize].ty.is_none() {
                continue;
            }
            let id = self
                .materialise(v)
                .map_err(|e| e.context(format!("output {:?}", o.name)));
            if let Some(id) = self.note(id) {
                self.b().output(&o.name, id);
            }
        }
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

    fn define(&mut self, name: &'m str, v: V) {
        if self
            .scopes
            .last_mut()
            .expect("a scope")
            .names
            .insert(name, v)
            .is_some()
        {
            self.errors
                .push(Error::invalid(format!("value {name:?} is defined twice")));
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
        if let Some(Known::List(_)) = slot.known {
            return Err(Error::unsupported(format!(
                "{:?} is a sequence, expected a tensor",
                slot.name
            )));
        }
        slot.ty
            .as_ref()
            .ok_or_else(|| Error::unsupported(format!("{:?} could not be imported", slot.name)))
    }

    /// The constant that a value is, decoded; `None` when it is not known or contains symbols.
    pub fn constant(&mut self, v: V) -> Result<Option<Tensor>> {
        let slot = &mut self.slots[v.0 as usize];
        match &slot.known {
            Some(Known::Tensor(t)) => Ok(Some(t.clone())),
            Some(Known::Proto(p)) => {
                let t = tensor_of(p, &self.model.external)?;
                slot.known = Some(Known::Tensor(t.clone()));
                Ok(Some(t))
            }
            _ => Ok(None),
        }
    }

    /// The IR value of a value in the current frame.
    pub fn materialise(&mut self, v: V) -> Result<ValueId> {
        self.materialise_in(v, self.frames.len() - 1)
    }

    fn materialise_in(&mut self, v: V, frame: usize) -> Result<ValueId> {
        if let Some(&id) = self.frames[frame].ids.get(&v) {
            return Ok(id);
        }
        let name = self.slots[v.0 as usize].name;
        let id = if let Some(ty) = self.skipped(v) {
            match frame {
                0 => self.frames[0]
                    .b
                    .input(&format!("\0weight {}", v.0), ty.dtype, ty.shape.0),
                _ => self.capture(v, frame)?,
            }
        } else if let Some(Known::Proto(p)) = self.slots[v.0 as usize].known {
            let value = constant_of(p, &self.model.external)?;
            self.frames[frame].b.constant(value)
        } else if let Some(t) = self.constant(v)? {
            self.frames[frame].b.constant(t)
        } else if let Some(Known::Dims(dims)) = &self.slots[v.0 as usize].known {
            let (dims, ty) = (dims.clone(), self.ty(v)?.clone());
            symbolic_tensor(&mut self.frames[frame].b, &dims, &ty)
                .map_err(|e| e.context(format!("{name:?}")))?
        } else if let Some(Known::List(_)) = self.slots[v.0 as usize].known {
            return Err(Error::unsupported(format!(
                "{name:?} is a sequence, expected a tensor"
            )));
        } else if frame > self.slots[v.0 as usize].home {
            self.capture(v, frame)?
        } else {
            return Err(Error::internal(format!("value {name:?} has no IR value")));
        };
        self.frames[frame].ids.insert(v, id);
        Ok(id)
    }

    /// Makes a value of the outer frame an input of a region.
    fn capture(&mut self, v: V, frame: usize) -> Result<ValueId> {
        self.materialise_in(v, frame - 1)?;
        let ty = self.ty(v)?.clone();
        let f = &mut self.frames[frame];
        f.captures.push(v);
        Ok(f.b.input(
            &format!("outer_{}", f.captures.len() - 1),
            ty.dtype,
            ty.shape.0,
        ))
    }

    /// Type of a large initialiser that is not to be read.
    fn skipped(&self, v: V) -> Option<Type> {
        let slot = &self.slots[v.0 as usize];
        let large = slot
            .ty
            .as_ref()
            .and_then(Type::size_bytes)
            .is_some_and(|b| b > FOLD_LIMIT_BYTES);
        let unread = self.weights == Weights::Skip && matches!(slot.known, Some(Known::Proto(_)));
        slot.ty.clone().filter(|_| large && unread)
    }

    fn nodes(&mut self, nodes: &'m [NodeProto]) {
        for (index, node) in nodes.iter().enumerate() {
            self.n_nodes += 1;
            if self.n_nodes > MAX_NODES {
                self.errors.push(Error::unsupported(format!(
                    "the model expands to more than {MAX_NODES} nodes"
                )));
                return;
            }
            let path = self.path_of(node, index);
            self.b().set_origin(&path);
            let (outs, outcome) = match self.node(node, &path) {
                Ok(outs) if outs.is_empty() && node.output.iter().any(|o| !o.is_empty()) => {
                    (outs, Visited::Unreached)
                }
                Ok(outs) => (outs, Visited::Imported),
                Err(e) => {
                    self.errors.push(e.at(&path));
                    (Vec::new(), Visited::Failed)
                }
            };
            let operator = super::check::operator_name(node);
            let rules = std::mem::take(&mut self.rules);
            self.visits.push(Visit {
                path,
                operator,
                outcome,
                rules,
            });
            for (i, name) in node
                .output
                .iter()
                .enumerate()
                .filter(|(_, n)| !n.is_empty())
            {
                let v = match outs.get(i) {
                    Some(&v) => v,
                    None => self.slot(Slot {
                        name,
                        ty: None,
                        known: None,
                        home: 0,
                    }),
                };
                self.define(name, v);
            }
        }
    }

    fn path_of(&self, node: &NodeProto, index: usize) -> String {
        let prefix = &self.scopes.last().expect("a scope").path;
        if !node.name.is_empty() {
            return format!("{prefix}{}", node.name);
        }
        let output = node
            .output
            .iter()
            .find(|o| !o.is_empty())
            .map_or("", String::as_str);
        format!("{prefix}{}_{index}:{output}", node.op_type)
    }

    /// Imports one node; the results are empty when an operand could not be imported, which was reported before.
    fn node(&mut self, node: &'m NodeProto, path: &str) -> Result<Vec<V>> {
        let mut inputs = Vec::with_capacity(node.input.len());
        for name in &node.input {
            if name.is_empty() {
                inputs.push(None);
                continue;
            }
            let v = self.lookup(name);
            let v = v.ok_or_else(|| {
                Error::invalid(format!(
                    "{}: operand {name:?} is not defined before it",
                    node.op_type
                ))
            })?;
            if self.slots[v.0 as usize].ty.is_none() {
                return Ok(Vec::new());
            }
            inputs.push(Some(v));
        }
        if let Some(a) = node
            .attribute
            .iter()
            .find(|a| !a.ref_attr_name.is_empty() && !self.in_function())
        {
            return Err(Error::invalid(format!(
                "attribute {:?} refers to a function's, outside a function",
                a.name
            )));
        }
        let node_domain = domain(&node.domain);
        let def = ops::find(node_domain, &node.op_type);
        if let Some(f) = self
            .model
            .function(node_domain, &node.op_type, &node.overload)
        {
            // A standard operator's own handler is preferred to a body that comes with the model.
            if def.is_none() || !node_domain.is_empty() {
                return self.call(f, node, inputs, path);
            }
        }
        let Some(def) = def else {
            let known = if node_domain.is_empty() {
                ""
            } else {
                &format!(" of domain {node_domain:?}")
            };
            return Err(Error::unsupported(format!(
                "operator {}{known} is not supported",
                node.op_type
            )));
        };
        let opset = self
            .scopes
            .last()
            .and_then(|s| s.opsets.get(node_domain))
            .copied()
            .ok_or_else(|| {
                Error::invalid(format!(
                    "{}: the model imports no operator set for domain {node_domain:?}",
                    node.op_type
                ))
            })?;
        let what = format!("{} (opset {opset})", node.op_type);
        self.handle(def, node, inputs, opset)
            .map_err(|e| e.context(what))
    }

    fn handle(
        &mut self,
        def: &'static OpDef,
        node: &'m NodeProto,
        inputs: Vec<Option<V>>,
        opset: i64,
    ) -> Result<Vec<V>> {
        if opset < 6 && domain(&node.domain).is_empty() && !ops::unchanged_before_6(&node.op_type) {
            return Err(
                Error::unsupported("operator sets below 6 are not supported")
                    .hint("export with opset 20"),
            );
        }
        let mut inputs = inputs;
        while inputs.last() == Some(&None) {
            inputs.pop();
        }
        let n = inputs.len();
        if n < def.inputs.0 || n > def.inputs.1 {
            let most = if def.inputs.1 == usize::MAX {
                "any number".to_owned()
            } else {
                def.inputs.1.to_string()
            };
            return Err(Error::invalid(format!(
                "takes {} to {most} operands, got {n}",
                def.inputs.0
            )));
        }
        let mut cx = Ctx::new(self, node, inputs, opset);
        let outs = match super::shape_value::rule(&mut cx)? {
            Some(outs) => outs,
            None => {
                let outs = (def.run)(&mut cx)?;
                cx.check_attributes()?;
                outs
            }
        };
        let foldable = def.fold && cx.all_known();
        self.bind(node, outs, foldable)
    }

    fn bind(&mut self, node: &'m NodeProto, outs: Outs<'m>, foldable: bool) -> Result<Vec<V>> {
        let wanted = node
            .output
            .iter()
            .rposition(|o| !o.is_empty())
            .map_or(0, |i| i + 1);
        if outs.len() < wanted {
            return Err(Error::unsupported(format!(
                "gives {} results, result {} is used",
                outs.len(),
                wanted - 1
            )));
        }
        let home = self.frames.len() - 1;
        let mut values = Vec::new();
        for (i, out) in outs.into_iter().take(wanted).enumerate() {
            let name = node.output[i].as_str();
            values.push(match out {
                Out::Same(v) => v,
                Out::Known(ty, known) => self.slot(Slot {
                    name,
                    ty: Some(ty),
                    known: Some(known),
                    home,
                }),
                Out::Value(id) => {
                    let ty = possible(self.b().ty(id).clone())?;
                    let known = if foldable {
                        let graph = self.frames[home].b.graph();
                        fold::constant_value(graph, id, &mut self.folding)?
                    } else {
                        None
                    };
                    let v = self.slot(Slot {
                        name,
                        ty: Some(ty),
                        known: known.map(Known::Tensor),
                        home,
                    });
                    self.frames[home].ids.insert(v, id);
                    if self.slots[v.0 as usize].known.is_some() {
                        self.frames[home].ids.remove(&v);
                    }
                    v
                }
            });
        }
        Ok(values)
    }

    fn enter(&mut self) -> Result<()> {
        if self.depth == MAX_DEPTH {
            return Err(Error::unsupported(format!(
                "functions and subgraphs nest deeper than {MAX_DEPTH}"
            )));
        }
        self.depth += 1;
        Ok(())
    }

    /// Inlines a call of a function of the model.
    fn call(
        &mut self,
        f: &'m FunctionProto,
        node: &'m NodeProto,
        inputs: Vec<Option<V>>,
        path: &str,
    ) -> Result<Vec<V>> {
        let calls = |s: &Scope<'m>| s.call.as_ref().is_some_and(|c| std::ptr::eq(c.function, f));
        if self.scopes.iter().any(calls) {
            return Err(Error::invalid(format!(
                "function {:?} calls itself",
                f.name
            )));
        }
        if inputs.len() > f.input.len() || node.output.len() > f.output.len() {
            return Err(Error::invalid(format!(
                "function {:?} takes {} operands and gives {} results; the call has {} and {}",
                f.name,
                f.input.len(),
                f.output.len(),
                inputs.len(),
                node.output.len()
            )));
        }
        let attributes = self.call_attributes(f, node)?;
        let names = f
            .input
            .iter()
            .zip(&inputs)
            .filter_map(|(n, v)| Some((n.as_str(), (*v)?)))
            .collect();
        let opsets = if f.opset_import.is_empty() {
            self.model.opsets.clone()
        } else {
            opsets_of(&f.opset_import)?
        };
        self.enter()?;
        let n_errors = self.errors.len();
        self.scopes.push(Scope {
            names,
            call: Some(Call {
                function: f,
                attributes,
            }),
            opsets: Rc::new(opsets),
            path: format!("{path}/"),
        });
        self.nodes(&f.node);
        let results: Vec<Option<V>> = f
            .output
            .iter()
            .take(node.output.len())
            .map(|o| self.lookup(o))
            .collect();
        self.scopes.pop();
        self.depth -= 1;
        self.b().set_origin(path);
        if self.errors.len() > n_errors {
            // The reason was reported inside; results are unknown from here on.
            return Ok(Vec::new());
        }
        results
            .into_iter()
            .zip(&f.output)
            .map(|(v, o)| {
                v.ok_or_else(|| {
                    Error::invalid(format!(
                        "function {:?} does not define its result {o:?}",
                        f.name
                    ))
                })
            })
            .collect()
    }

    /// Attributes of a call: those of the node, then the function's defaults.
    fn call_attributes(
        &self,
        f: &'m FunctionProto,
        node: &'m NodeProto,
    ) -> Result<HashMap<&'m str, &'m AttributeProto>> {
        let mut attributes: HashMap<&str, &AttributeProto> = f
            .attribute_proto
            .iter()
            .map(|a| (a.name.as_str(), a))
            .collect();
        for a in &node.attribute {
            let declared =
                attributes.contains_key(a.name.as_str()) || f.attribute.contains(&a.name);
            if !declared {
                return Err(Error::invalid(format!(
                    "function {:?} has no attribute {:?}",
                    f.name, a.name
                )));
            }
            match self.resolve_attribute(a) {
                Some(a2) => drop(attributes.insert(a.name.as_str(), a2)),
                None => continue,
            }
        }
        Ok(attributes)
    }

    fn in_function(&self) -> bool {
        self.scopes.iter().any(|s| s.call.is_some())
    }

    /// The attribute itself, or what the call of the surrounding function gives for it; `None` when it gives nothing.
    fn resolve_attribute(&self, a: &'m AttributeProto) -> Option<&'m AttributeProto> {
        if a.ref_attr_name.is_empty() {
            return Some(a);
        }
        let call = self.scopes.iter().rev().find_map(|s| s.call.as_ref())?;
        call.attributes.get(a.ref_attr_name.as_str()).copied()
    }

    /// Imports a subgraph as a region with the given formal inputs. `captures` are outer values it must take first.
    ///
    /// Errors inside the region are kept for the report like all others; the region is then without use.
    pub fn region(
        &mut self,
        g: &'m GraphProto,
        formals: &[Type],
        captures: &[V],
        path: &str,
    ) -> Result<Region> {
        if g.input.len() != formals.len() {
            return Err(Error::invalid(format!(
                "subgraph {:?} has {} inputs, expected {}",
                g.name,
                g.input.len(),
                formals.len()
            )));
        }
        self.enter()?;
        let n_errors = self.errors.len();
        self.frames.push(Frame::new(&g.name));
        let home = self.frames.len() - 1;
        let opsets = self.scopes.last().expect("a scope").opsets.clone();
        self.scopes.push(Scope {
            names: HashMap::new(),
            call: None,
            opsets,
            path: format!("{path}/"),
        });
        for (info, ty) in g.input.iter().zip(formals) {
            let v = self.slot(Slot {
                name: &info.name,
                ty: Some(ty.clone()),
                known: None,
                home,
            });
            let id = self
                .b()
                .input(&info.name, ty.dtype, ty.shape.0.iter().cloned());
            self.frames[home].ids.insert(v, id);
            self.define(&info.name, v);
        }
        let captured: Result<Vec<ValueId>> =
            captures.iter().map(|&v| self.materialise(v)).collect();
        self.initialisers(g);
        self.nodes(&g.node);
        self.outputs(g);
        self.scopes.pop();
        let frame = self.frames.pop().expect("pushed above");
        self.depth -= 1;
        self.b().set_origin(path);
        captured?;
        if self.errors.len() > n_errors {
            return Err(self.errors.pop().expect("one more than before"));
        }
        Ok(Region {
            graph: prune::prune(&frame.b.into_graph())?,
            captures: frame.captures,
        })
    }

    /// Imports a subgraph into the current frame, its inputs being `args`; the values of its outputs.
    ///
    /// Errors inside are kept for the report as in [`Importer::region`].
    pub fn inline(&mut self, g: &'m GraphProto, args: &[V], path: &str) -> Result<Vec<V>> {
        if g.input.len() != args.len() {
            return Err(Error::invalid(format!(
                "subgraph {:?} has {} inputs, expected {}",
                g.name,
                g.input.len(),
                args.len()
            )));
        }
        self.enter()?;
        let n_errors = self.errors.len();
        let opsets = self.scopes.last().expect("a scope").opsets.clone();
        self.scopes.push(Scope {
            names: HashMap::new(),
            call: None,
            opsets,
            path: format!("{path}/"),
        });
        for (info, &v) in g.input.iter().zip(args) {
            self.define(&info.name, v);
        }
        self.initialisers(g);
        self.nodes(&g.node);
        let outputs: Vec<(&str, Option<V>)> = g
            .output
            .iter()
            .map(|o| (o.name.as_str(), self.lookup(&o.name)))
            .collect();
        self.scopes.pop();
        self.depth -= 1;
        self.b().set_origin(path);
        if self.errors.len() > n_errors {
            return Err(self.errors.pop().expect("one more than before"));
        }
        let defined = |(name, v): (&str, Option<V>)| {
            v.ok_or_else(|| {
                Error::invalid(format!(
                    "subgraph {:?}: output {name:?} is not defined",
                    g.name
                ))
            })
        };
        outputs.into_iter().map(defined).collect()
    }

    /// Runs `f`; when it fails, what it reported on the way is forgotten and its error is given.
    pub fn attempt<T>(&mut self, f: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let (n_errors, needs) = (self.errors.len(), self.needs.clone());
        f(self).inspect_err(|_| {
            self.errors.truncate(n_errors);
            self.needs = needs;
        })
    }

    /// Names the graph inputs that a value is computed from, as needing a value, in the error and for the report.
    pub fn needs_value(&mut self, v: V, what: &str) -> Error {
        let mut inputs = BTreeSet::new();
        let id = self
            .frames
            .iter()
            .enumerate()
            .rev()
            .find_map(|(i, f)| f.ids.get(&v).map(|&id| (i, id)));
        if let Some((0, id)) = id {
            inputs_of(self.frames[0].b.graph(), id, &mut inputs);
        }
        let name = self.slots[v.0 as usize].name;
        if inputs.is_empty() {
            return Error::unsupported(format!(
                "{what} {name:?} must be known when the model is compiled"
            ));
        }
        let list = inputs
            .iter()
            .map(|n| format!("{n:?}"))
            .collect::<Vec<_>>()
            .join(", ");
        self.needs.extend(inputs);
        Error::unsupported(format!(
            "{what} {name:?} depends on the values of the inputs {list}"
        ))
        .hint("give the values of these inputs when compiling")
    }
}

/// Inputs that a value is computed from.
fn inputs_of(g: &Graph, id: ValueId, inputs: &mut BTreeSet<String>) {
    let mut seen = BTreeSet::new();
    let mut open = vec![id];
    while let Some(id) = open.pop() {
        if !seen.insert(id) {
            continue;
        }
        match g.value(id).def {
            Def::Input(i) if g.input_names[i as usize].starts_with('\0') => {}
            Def::Input(i) => inputs.extend([g.input_names[i as usize].clone()]),
            Def::Node(n, _) => open.extend(&g.node(n).inputs),
        }
    }
}

fn sparse(s: &SparseTensorProto, model: &Model) -> Result<Tensor> {
    match (&s.values, &s.indices) {
        (Some(values), Some(indices)) => dense_of(
            values,
            indices,
            &s.dims,
            &model.external,
            FOLD_LIMIT_BYTES * 64,
        ),
        _ => Err(Error::invalid("a sparse tensor needs values and indices")),
    }
}

/// Checks that `spec` names inputs and dims that exist; gives the values of all dims that it fixes.
fn check_names(inputs: &[&ValueInfoProto], spec: &Specialisation) -> Result<Bindings> {
    let mut bindings: Bindings = spec.dims.clone();
    let mut symbols = BTreeSet::new();
    for info in inputs {
        let Ok((_, dims)) = declared_type(info) else {
            continue;
        };
        dims.iter()
            .for_each(|d| d.visit_symbols(&mut |s| symbols.extend([s.to_owned()])));
        let value = spec.values.get(&info.name).map(|t| t.shape().to_vec());
        let Some(shape) = spec.shapes.get(&info.name).cloned().or(value) else {
            continue;
        };
        for (d, &n) in dims.iter().zip(&shape) {
            if let Some(s) = d.as_symbol() {
                bindings.entry(s.to_owned()).or_insert(n);
            }
        }
    }
    let unknown = |what: &str, name: &str, known: Vec<&str>| {
        Error::invalid(format!(
            "the model has no {what} {name:?}; it has {}",
            known.join(", ")
        ))
    };
    if let Some(name) = spec.dims.keys().find(|d| !symbols.contains(*d)) {
        return Err(unknown(
            "dim",
            name,
            symbols.iter().map(String::as_str).collect(),
        ));
    }
    let names: Vec<&str> = inputs.iter().map(|i| i.name.as_str()).collect();
    match spec
        .shapes
        .keys()
        .chain(spec.values.keys())
        .find(|n| !names.contains(&n.as_str()))
    {
        Some(name) => Err(unknown("input", name, names)),
        None => Ok(bindings),
    }
}

/// Type of an input under a specialisation.
fn input_type(info: &ValueInfoProto, spec: &Specialisation, bindings: &Bindings) -> Result<Type> {
    let given = spec
        .shapes
        .get(&info.name)
        .cloned()
        .or(spec.values.get(&info.name).map(|t| t.shape().to_vec()));
    let (dtype, declared) = match (declared_type(info), &given) {
        (Err(e), Some(shape)) if e.kind() == ErrorKind::Unsupported => {
            match info.r#type.as_ref().and_then(|t| t.value.as_ref()) {
                Some(TypeValue::Tensor(t)) => (dtype_of(t.elem_type)?, Shape::of(shape)),
                _ => return Err(e),
            }
        }
        (declared, _) => declared.map(|(d, s)| (d, Shape(s)))?,
    };
    let shape = declared.bind(bindings);
    if let Some(g) = given.filter(|g| shape != Shape::of(g)) {
        return Err(Error::invalid(format!(
            "input {:?} is {dtype}{declared}; shape {g:?} does not fit",
            info.name
        )));
    }
    if let Some(t) = spec.values.get(&info.name).filter(|t| t.dtype() != dtype) {
        return Err(Error::invalid(format!(
            "input {:?} is {dtype}, the value given is {}",
            info.name,
            t.dtype()
        )));
    }
    Ok(Type { dtype, shape })
}

impl Frame {
    fn new(name: &str) -> Frame {
        Frame {
            b: GraphBuilder::new(name),
            ids: HashMap::new(),
            captures: Vec::new(),
        }
    }
}
