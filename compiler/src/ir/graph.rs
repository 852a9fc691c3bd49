//! The graph: typed SSA over tensors, in dense tables, nodes in topological order.

use super::constant::ConstData;
use super::dim::{Bindings, Dim, Ranges};
use super::ops::Op;
use super::request::Requested;
use super::types::Type;
use crate::error::{Error, Result};
use gristmill_runtime::Tensor;
use std::cell::RefCell;
use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

/// Id of a node within its graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub u32);

/// Id of a value within its graph.
///
/// One that a [`GraphBuilder`](super::GraphBuilder) gives out remembers the builder, which finds values of another one by it. The builder
/// is no part of an id's identity.
#[derive(Clone, Copy)]
pub struct ValueId(pub u32, BuilderId);

/// Number of a graph builder; 0 for a value that none gave out.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct BuilderId(pub(super) u32);

impl ValueId {
    /// The value at `index` of its graph's table.
    pub fn new(index: u32) -> ValueId {
        ValueId(index, BuilderId(0))
    }

    /// The same value, given out by a builder.
    pub(super) fn of(self, builder: BuilderId) -> ValueId {
        ValueId(self.0, builder)
    }

    /// True when `builder` gave the value out, or none did.
    pub(super) fn may_be_of(self, builder: BuilderId) -> bool {
        self.1 == builder || self.1 == BuilderId(0)
    }
}

impl fmt::Debug for ValueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ValueId").field(&self.0).finish()
    }
}

impl PartialEq for ValueId {
    fn eq(&self, other: &ValueId) -> bool {
        self.0 == other.0
    }
}
impl Eq for ValueId {}
impl Hash for ValueId {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.hash(state);
    }
}
impl PartialOrd for ValueId {
    fn partial_cmp(&self, other: &ValueId) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for ValueId {
    fn cmp(&self, other: &ValueId) -> Ordering {
        self.0.cmp(&other.0)
    }
}

/// Where a node comes from: its path in the user's model, or file and line of the Rust call that built it. May be empty.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Origin(pub Option<Arc<str>>);

impl Origin {
    /// An origin from its text; an empty text is no origin.
    pub fn new(text: &str) -> Origin {
        Origin((!text.is_empty()).then(|| text.into()))
    }

    /// The text, empty when unknown.
    pub fn as_str(&self) -> &str {
        self.0.as_deref().unwrap_or("")
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Definition of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Def {
    /// The `n`th graph input.
    Input(u32),
    /// Result `n` of a node.
    Node(NodeId, u32),
}

/// A value.
#[derive(Clone, Debug, PartialEq)]
pub struct Value {
    /// Dtype and shape.
    pub ty: Type,
    /// Definition.
    pub def: Def,
}

/// A node.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// The op with its attributes.
    pub op: Op,
    /// Operands.
    pub inputs: Vec<ValueId>,
    /// Results.
    pub outputs: Vec<ValueId>,
    /// Closed sub-graphs: all outer values that they use are operands of the node.
    pub regions: Vec<Graph>,
    /// Nodes that must run before this one although no tensor says so.
    pub control: Vec<NodeId>,
    /// Where it comes from.
    pub origin: Origin,
    /// Request for its device, or the placed one after placement.
    pub device: Requested,
}

impl Node {
    /// True when operand `i` only has to be made before this runs: it is not needed where this runs.
    pub fn only_orders(&self, i: usize) -> bool {
        matches!(self.op, Op::AllReduceRank { rank, .. } if rank != i)
    }

    /// Calls `f` with the symbols in attributes and result types of the node, which is one of `g`,
    /// and of those in its regions.
    pub fn visit_symbols(&self, g: &Graph, f: &mut dyn FnMut(&str)) {
        let visitor = RefCell::new(&mut *f);
        self.op.map_dims(&|dim| {
            dim.visit_symbols(&mut |s| (visitor.borrow_mut())(s));
            dim.clone()
        });
        for dim in self.outputs.iter().flat_map(|&v| g.ty(v).shape.iter()) {
            dim.visit_symbols(f);
        }
        for region in &self.regions {
            let nodes = region.nodes.iter();
            nodes.for_each(|inner| inner.visit_symbols(region, f));
        }
    }
}

/// A named result of a graph.
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    /// Name in the user's model.
    pub name: String,
    /// The value.
    pub value: ValueId,
}

/// A typed graph in SSA form.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Graph {
    /// Name of the model.
    pub name: String,
    /// Inputs, in order.
    pub inputs: Vec<ValueId>,
    /// Names of the inputs.
    pub input_names: Vec<String>,
    /// Results, in order.
    pub outputs: Vec<Output>,
    /// Declared ranges of symbols, by which the graph was simplified: it is right within them only.
    pub ranges: Ranges,
    nodes: Vec<Node>,
    values: Vec<Value>,
}

impl Graph {
    /// An empty graph.
    pub fn new(name: &str) -> Graph {
        Graph {
            name: name.to_owned(),
            ..Graph::default()
        }
    }

    /// An empty graph of the same name and ranges of symbols.
    pub fn emptied(&self) -> Graph {
        Graph {
            ranges: self.ranges.clone(),
            ..Graph::new(&self.name)
        }
    }

    /// Gives each node a request for devices.
    pub(crate) fn request_each(&mut self, request: impl Fn(&Graph, NodeId) -> Requested) {
        for id in (0..self.nodes.len() as u32).map(NodeId) {
            self.nodes[id.0 as usize].device = request(self, id);
        }
    }

    /// Adds an input.
    pub fn add_input(&mut self, name: &str, ty: Type) -> ValueId {
        let v = self.push_value(ty, Def::Input(self.inputs.len() as u32));
        self.inputs.push(v);
        self.input_names.push(name.to_owned());
        v
    }

    /// Adds a result.
    pub fn add_output(&mut self, name: &str, value: ValueId) {
        self.outputs.push(Output {
            name: name.to_owned(),
            value,
        });
    }

    /// Adds a node without regions; its result types follow from the op's type rule.
    ///
    /// Errors, naming the origin and the op, when the operands do not fit.
    pub fn add(&mut self, op: Op, inputs: &[ValueId], origin: &Origin) -> Result<Vec<ValueId>> {
        self.add_with_regions(op, inputs, Vec::new(), origin)
    }

    /// Adds a node with one result; see [`Graph::add`].
    pub fn add1(&mut self, op: Op, inputs: &[ValueId], origin: &Origin) -> Result<ValueId> {
        Ok(self.add(op, inputs, origin)?[0])
    }

    /// Adds a node with regions; see [`Graph::add`].
    pub fn add_with_regions(
        &mut self,
        op: Op,
        inputs: &[ValueId],
        regions: Vec<Graph>,
        origin: &Origin,
    ) -> Result<Vec<ValueId>> {
        let types = self
            .infer(&op, inputs, &regions)
            .map_err(|m| Error::invalid(m).context(op.name()).at_origin(origin))?;
        let id = NodeId(self.nodes.len() as u32);
        let outputs: Vec<ValueId> = types
            .into_iter()
            .enumerate()
            .map(|(i, ty)| self.push_value(ty, Def::Node(id, i as u32)))
            .collect();
        self.nodes.push(Node {
            op,
            inputs: inputs.to_vec(),
            outputs: outputs.clone(),
            regions,
            control: Vec::new(),
            origin: origin.clone(),
            device: None,
        });
        Ok(outputs)
    }

    /// Puts regions in the place of a node's own; see [`Graph::redefine`].
    pub(crate) fn add_results(&mut self, id: NodeId, regions: Vec<Graph>) -> Result<()> {
        let node = self.node(id);
        self.redefine(id, node.op.clone(), node.inputs.clone(), regions)
    }

    /// Puts op, operands and regions in the place of a node's own. The results that they give are those that it has, of the same types, and
    /// further ones behind them.
    ///
    /// Errors when they do not fit.
    pub(crate) fn redefine(
        &mut self,
        id: NodeId,
        op: Op,
        inputs: Vec<ValueId>,
        regions: Vec<Graph>,
    ) -> Result<()> {
        let node = self.node(id).clone();
        let fits = |m: String| {
            let e = Error::invalid(m).context(op.name());
            e.at_origin(&node.origin)
        };
        let types = self.infer(&op, &inputs, &regions).map_err(fits)?;
        let own = node.outputs.iter().map(|&v| self.ty(v));
        if types.len() < node.outputs.len() || !own.eq(&types[..node.outputs.len()]) {
            let message = "the types of results would change";
            return Err(Error::internal(message).at_origin(&node.origin));
        }
        let mut outputs = node.outputs;
        for ty in types.into_iter().skip(outputs.len()) {
            let i = outputs.len() as u32;
            outputs.push(self.push_value(ty, Def::Node(id, i)));
        }
        let node = self.node_mut(id);
        (node.op, node.inputs) = (op, inputs);
        (node.outputs, node.regions) = (outputs, regions);
        Ok(())
    }

    /// Adds a node without operands before another one, with its origin and device, and gives its only result. The other node and those behind
    /// it get the next ids; values keep theirs.
    pub(crate) fn add_before(&mut self, id: NodeId, op: Op) -> Result<ValueId> {
        let (origin, device) = (self.node(id).origin.clone(), self.node(id).device.clone());
        let result = self.add1(op, &[], &origin)?;
        self.nodes[id.0 as usize..].rotate_right(1);
        self.node_mut(id).device = device;
        let moved = |n: &mut NodeId| n.0 += u32::from(*n >= id);
        for value in &mut self.values {
            if let Def::Node(n, _) = &mut value.def {
                moved(n);
            }
        }
        for node in &mut self.nodes {
            node.control.iter_mut().for_each(moved);
        }
        self.values[result.0 as usize].def = Def::Node(id, 0);
        Ok(result)
    }

    /// Copies a node of another graph with new operands, keeping regions, origin and device; control edges are dropped.
    pub fn add_copy(&mut self, node: &Node, inputs: &[ValueId]) -> Result<Vec<ValueId>> {
        let outputs =
            self.add_with_regions(node.op.clone(), inputs, node.regions.clone(), &node.origin)?;
        self.nodes.last_mut().expect("a node was just added").device = node.device.clone();
        Ok(outputs)
    }

    /// Adds a constant.
    pub fn add_constant(&mut self, value: impl Into<ConstData>, origin: &Origin) -> ValueId {
        let op = Op::Constant {
            value: value.into(),
        };
        self.add1(op, &[], origin)
            .expect("a constant has no operand that could misfit")
    }

    /// Types of the results that an op with these operands and regions has, or the reason why there
    /// is no such op.
    pub(crate) fn infer(
        &self,
        op: &Op,
        inputs: &[ValueId],
        regions: &[Graph],
    ) -> Result<Vec<Type>, String> {
        let spec = op.spec();
        if inputs.len() < spec.arity.0 || inputs.len() > spec.arity.1 {
            return Err(format!(
                "expected {} to {} operands, got {}",
                spec.arity.0,
                spec.arity.1,
                inputs.len()
            ));
        }
        let types: Vec<Type> = inputs.iter().map(|&v| self.ty(v).clone()).collect();
        let results = op.infer(&types, regions)?;
        let mut extents = results.iter().flat_map(|ty| ty.shape.iter());
        match extents.find(|d| d.is_too_deep()) {
            Some(d) => Err(format!("an extent is too deeply nested: {d}")),
            None => Ok(results),
        }
    }

    fn push_value(&mut self, ty: Type, def: Def) -> ValueId {
        self.values.push(Value { ty, def });
        ValueId::new(self.values.len() as u32 - 1)
    }

    /// Nodes in topological order.
    pub fn nodes(&self) -> impl DoubleEndedIterator<Item = (NodeId, &Node)> + ExactSizeIterator {
        self.nodes
            .iter()
            .enumerate()
            .map(|(i, n)| (NodeId(i as u32), n))
    }

    /// A node.
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.0 as usize]
    }

    /// Gives each value the type that it has in `from`, a graph of the same values, with bound
    /// symbols replaced. Attributes and regions stay as they are.
    pub(crate) fn retype(&mut self, from: &Graph, bindings: &Bindings) {
        for (value, symbolic) in self.values.iter_mut().zip(&from.values) {
            let extents = value.ty.shape.0.iter_mut().zip(symbolic.ty.shape.iter());
            for (extent, dim) in extents.filter(|(_, dim)| dim.as_const().is_none()) {
                *extent = dim.bind(bindings);
            }
        }
    }

    /// A node, to annotate: origin, device, control edges. Op and operands must keep their types.
    pub fn node_mut(&mut self, id: NodeId) -> &mut Node {
        &mut self.nodes[id.0 as usize]
    }

    /// Number of nodes.
    pub fn n_nodes(&self) -> usize {
        self.nodes.len()
    }

    /// Number of values.
    pub fn n_values(&self) -> usize {
        self.values.len()
    }

    /// A value.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.0 as usize]
    }

    /// Type of a value.
    pub fn ty(&self, id: ValueId) -> &Type {
        &self.values[id.0 as usize].ty
    }

    /// The node that defines a value, unless it is an input.
    pub fn def_node(&self, id: ValueId) -> Option<&Node> {
        self.def_id(id).map(|n| self.node(n))
    }

    /// The id of the node that defines a value; `None` for an input.
    pub fn def_id(&self, id: ValueId) -> Option<NodeId> {
        match self.value(id).def {
            Def::Node(n, _) => Some(n),
            Def::Input(_) => None,
        }
    }

    /// The constant that a value is.
    pub fn constant(&self, id: ValueId) -> Option<&ConstData> {
        match self.def_node(id).map(|n| &n.op) {
            Some(Op::Constant { value }) => Some(value),
            _ => None,
        }
    }

    /// The element of a constant that has only one.
    pub fn single(&self, id: ValueId) -> Option<&Tensor> {
        self.constant(id)?.in_memory().filter(|t| t.len() == 1)
    }

    /// Lets go of a large constant's elements once nothing needs them; the graph must not be printed or evaluated afterwards.
    pub(crate) fn release_constant(&mut self, v: ValueId) {
        let Def::Node(n, _) = self.value(v).def else {
            return;
        };
        if let Op::Constant { value } = &mut self.node_mut(n).op
            && value.len() > 16
        {
            let nothing = Tensor::zeros(value.dtype(), &[0]).expect("no bytes always fit");
            *value = ConstData::held(nothing);
        }
    }

    /// Keeps the elements of a constant in memory.
    pub(crate) fn hold_constant(&mut self, v: ValueId, elements: Tensor) {
        let Def::Node(n, _) = self.value(v).def else {
            return;
        };
        if let Op::Constant { value } = &mut self.node_mut(n).op {
            *value = ConstData::held(elements);
        }
    }

    /// [`Graph::release_constant`] of all.
    pub(crate) fn release_constants(&mut self) {
        (0..self.values.len() as u32).for_each(|v| self.release_constant(ValueId::new(v)));
    }

    /// Nodes that have a control edge or are named by one: passes neither join nor copy them, so that the order keeps its meaning.
    pub fn ordered(&self) -> Vec<bool> {
        let mut ordered = vec![false; self.nodes.len()];
        for (id, node) in self.nodes().filter(|(_, n)| !n.control.is_empty()) {
            ordered[id.0 as usize] = true;
            node.control
                .iter()
                .for_each(|c| ordered[c.0 as usize] = true);
        }
        ordered
    }

    /// Results of the nodes for which others wait by control edges: they are computed even where nothing reads them.
    pub fn awaited(&self) -> impl Iterator<Item = ValueId> {
        let nodes = self.nodes().flat_map(|(_, n)| &n.control);
        nodes.flat_map(|&c| self.node(c).outputs.iter().copied())
    }

    /// Users of each value: `(node, operand index)`, in order. Graph outputs are not listed.
    pub fn users(&self) -> Vec<Vec<(NodeId, usize)>> {
        let mut users = vec![Vec::new(); self.values.len()];
        for (id, node) in self.nodes() {
            for (i, v) in node.inputs.iter().enumerate() {
                users[v.0 as usize].push((id, i));
            }
        }
        users
    }

    /// True for the body of a loop that ends no iteration with another condition than it began with, or than true.
    pub(crate) fn keeps_condition(&self) -> bool {
        let condition = self.outputs.first().map(|o| o.value);
        condition.is_some_and(|v| {
            let is_true = |t: &Tensor| t.as_bytes().first() == Some(&1);
            self.value(v).def == Def::Input(1) || self.single(v).is_some_and(is_true)
        })
    }

    /// Names of all symbols in input types, in order of first appearance.
    pub fn symbols(&self) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        for &v in &self.inputs {
            for d in self.ty(v).shape.iter() {
                d.visit_symbols(&mut |s| {
                    if !names.iter().any(|n| n == s) {
                        names.push(s.to_owned());
                    }
                });
            }
        }
        names
    }

    /// Values of the symbols implied by concrete input shapes. Errors name the input and axis that do not fit.
    pub fn bindings_for(&self, shapes: &[Vec<usize>]) -> Result<Bindings> {
        self.bindings_within(shapes, &Bindings::new())
    }

    /// [`Graph::bindings_for`] of a region, whose types may have symbols of the graph around it, too.
    pub(crate) fn bindings_within(
        &self,
        shapes: &[Vec<usize>],
        outer: &Bindings,
    ) -> Result<Bindings> {
        let mut bindings = Bindings::new();
        if shapes.len() != self.inputs.len() {
            return Err(Error::invalid(format!(
                "expected {} inputs, got {}",
                self.inputs.len(),
                shapes.len()
            )));
        }
        for (i, (&v, shape)) in self.inputs.iter().zip(shapes).enumerate() {
            let declared = &self.ty(v).shape;
            let misfit = || {
                Error::invalid(format!(
                    "input {:?}: expected shape {declared}, got {shape:?}",
                    self.input_names[i]
                ))
            };
            if declared.rank() != shape.len() {
                return Err(misfit());
            }
            for (d, &n) in declared.iter().zip(shape) {
                if let Some(s) = d.as_symbol()
                    && *bindings.entry(s.to_owned()).or_insert(n) != n
                {
                    return Err(misfit().context(format!(
                        "symbol {s} = {} from an earlier input",
                        bindings[s]
                    )));
                }
            }
            let bound = declared.bind(&bindings).as_static();
            if bound.is_some_and(|s| s != *shape) {
                return Err(misfit());
            }
        }
        let mut all = outer.clone();
        all.append(&mut bindings);
        // Extents computed from symbols of later inputs.
        for (i, (&v, shape)) in self.inputs.iter().zip(shapes).enumerate() {
            let (name, bound) = (&self.input_names[i], self.ty(v).shape.bind(&all));
            if bound.as_static().is_none_or(|bound| bound != *shape) {
                let message = format!("input {name:?}: expected shape {bound}, got {shape:?}");
                return Err(Error::invalid(message));
            }
        }
        self.check_ranges(&all)?;
        Ok(all)
    }

    /// Errors when a size is outside of the declared range of its symbol.
    pub fn check_ranges(&self, sizes: &Bindings) -> Result<()> {
        for (dim, range) in &self.ranges {
            if let Some(size) = sizes.get(dim).filter(|size| !range.contains(**size)) {
                let message =
                    format!("dim {dim:?} is {size}, outside of its declared range {range}");
                return Err(Error::invalid(message));
            }
        }
        Ok(())
    }
}

impl Op {
    /// Types of the results for operands of these types, as many as the op takes.
    pub(crate) fn infer(&self, operands: &[Type], regions: &[Graph]) -> Result<Vec<Type>, String> {
        let results = (self.spec().infer)(self, operands, regions)?;
        let is_negative = |d: &Dim| d.as_const().is_some_and(|c| c < 0);
        match results.iter().find(|ty| ty.shape.iter().any(is_negative)) {
            Some(ty) => Err(format!("the result would be {ty}: an extent is negative")),
            None => Ok(results),
        }
    }
}

impl Error {
    /// [`Error::at`] for an origin; an empty origin names nothing.
    pub fn at_origin(self, origin: &Origin) -> Error {
        if origin.as_str().is_empty() {
            self
        } else {
            self.at(origin)
        }
    }
}
