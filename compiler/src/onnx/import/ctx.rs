//! The view of a handler: the node's operands and attributes, and the builder.

use super::super::load::Form;
use super::super::proto::{AttributeProto, GraphProto, NodeProto, attribute_type as at};
use super::super::tensor::{dense_of, tensor_of, to_i64s};
use super::run_time::has_element;
use super::{Contents, FOLD_LIMIT_BYTES, Importer, Region, Slot, TrainingNode, V};
use crate::error::{Error, Result};
use crate::ir::{Dim, GraphBuilder, Type, ValueId};
use crate::nearest::unknown;
use gristmill_runtime::Tensor;
use std::cell::RefCell;
use std::collections::BTreeSet;

/// Imports one node.
pub(in crate::onnx) type Handler = fn(&mut Ctx) -> Result<Outs>;

/// Results of a handler, in order.
pub(in crate::onnx) type Outs = Vec<Out>;

/// A result of a handler.
pub(in crate::onnx) enum Out {
    /// An IR value of the current frame.
    Value(ValueId),
    /// Contents known now.
    Contents(Type, Contents<'static>),
    /// An operand itself.
    Same(V),
}

/// A single IR value as results.
pub(in crate::onnx) fn one(id: ValueId) -> Result<Outs> {
    Ok(vec![Out::Value(id)])
}

impl Out {
    /// A constant as a result.
    pub fn tensor(t: Tensor) -> Out {
        Out::Contents(
            Type::new(t.dtype(), t.shape().iter().copied()),
            Contents::Tensor(t),
        )
    }
}

/// An operator and its handler.
pub(in crate::onnx) struct OpDef {
    /// `op_type`.
    pub name: &'static str,
    /// Smallest and largest number of operands.
    pub inputs: (usize, usize),
    /// The handler.
    pub run: Handler,
    /// True when constant operands make a constant result.
    pub fold: bool,
}

impl OpDef {
    /// An operator whose result is folded when all operands are constants.
    pub const fn new(name: &'static str, inputs: (usize, usize), run: Handler) -> OpDef {
        OpDef {
            name,
            inputs,
            run,
            fold: true,
        }
    }
}

/// The node being imported.
pub(in crate::onnx) struct Ctx<'c, 'm> {
    pub(super) im: &'c mut Importer<'m>,
    /// The node.
    pub node: &'m NodeProto,
    /// Version of the node's operator set.
    pub opset: i64,
    inputs: Vec<Option<V>>,
    read: RefCell<BTreeSet<&'static str>>,
}

impl<'c, 'm> Ctx<'c, 'm> {
    pub(super) fn new(
        im: &'c mut Importer<'m>,
        node: &'m NodeProto,
        inputs: Vec<Option<V>>,
        opset: i64,
    ) -> Self {
        Ctx {
            im,
            node,
            opset,
            inputs,
            read: RefCell::default(),
        }
    }

    /// Builder of the current graph or region.
    pub fn b(&mut self) -> &mut GraphBuilder {
        self.im.b()
    }

    /// The form of nodes with `training_mode`.
    pub fn form(&self) -> Form {
        self.im.form
    }

    /// The seed of nodes that draw random numbers.
    pub fn seed(&self) -> u64 {
        self.im.seed
    }

    /// Notes that the node is in its form for training, where that is not asked for.
    pub fn note_training(&mut self, node: TrainingNode) {
        if self.form() == Form::Inference {
            self.im.training = Some(node);
        }
    }

    /// True for a node of a subgraph.
    pub fn is_in_subgraph(&self) -> bool {
        self.im.frames.len() > 1
    }

    /// Assigns a value to the variable that operand `i` is, and gives it. Errors when it is none.
    pub fn assign(&mut self, i: usize, value: ValueId) -> Result<ValueId> {
        let v = self.v(i)?;
        let Some(name) = self.im.variables.get(&v).copied() else {
            let message = format!("operand {i}, which steps move, is no f32 or f64 initialiser");
            return Err(Error::unsupported(message));
        };
        if self.is_in_subgraph() {
            return Err(Error::unsupported(
                "a running statistic is moved in a subgraph",
            ));
        }
        let value = self.b().assign_variable(name, value)?;
        self.im.assigned.insert(v, value);
        Ok(value)
    }

    /// Operand `i`, a variable, as the nodes so far leave it: the value that the last of them assigned.
    pub fn latest(&mut self, i: usize) -> Result<ValueId> {
        let v = self.v(i)?;
        let is_main = self.im.frames.len() == 1;
        match self.im.assigned.get(&v).filter(|_| is_main) {
            Some(&value) => Ok(value),
            // An assignment in a subgraph is refused.
            None => self.im.materialise(v),
        }
    }

    // ---- operands

    /// Number of operands, absent ones in between included.
    pub fn n_inputs(&self) -> usize {
        self.inputs.len()
    }

    /// True when operand `i` is given.
    pub fn has(&self, i: usize) -> bool {
        self.inputs.get(i).is_some_and(Option::is_some)
    }

    /// Operand `i` as a value of the model.
    pub fn v(&self, i: usize) -> Result<V> {
        self.inputs
            .get(i)
            .copied()
            .flatten()
            .ok_or_else(|| Error::invalid(format!("operand {i} is missing")))
    }

    /// Type of operand `i`.
    pub fn ty(&self, i: usize) -> Result<Type> {
        self.im.ty(self.v(i)?).cloned()
    }

    /// Operand `i` as an IR value.
    pub fn val(&mut self, i: usize) -> Result<ValueId> {
        let v = self.v(i)?;
        self.im.materialise(v)
    }

    /// All operands as IR values; none may be absent.
    pub fn vals(&mut self) -> Result<Vec<ValueId>> {
        (0..self.inputs.len()).map(|i| self.val(i)).collect()
    }

    /// The first operands as IR values.
    pub fn first<const N: usize>(&mut self) -> Result<[ValueId; N]> {
        let mut values = [ValueId::new(0); N];
        for (i, v) in values.iter_mut().enumerate() {
            *v = self.val(i)?;
        }
        Ok(values)
    }

    /// Operand `i` as an IR value, `None` when absent.
    pub fn opt(&mut self, i: usize) -> Result<Option<ValueId>> {
        if self.has(i) {
            self.val(i).map(Some)
        } else {
            Ok(None)
        }
    }

    /// The elements of operand `i`, which must be a sequence.
    pub fn list(&self, i: usize) -> Result<Vec<V>> {
        match self.contents(i) {
            Some(Contents::List(elements)) => Ok(elements.clone()),
            _ => Err(Error::invalid(format!("operand {i} must be a sequence"))),
        }
    }

    /// True when operand `i` is a sequence.
    pub fn is_list(&self, i: usize) -> bool {
        matches!(self.contents(i), Some(Contents::List(_)))
    }

    /// True when operand `i` is not given, or an optional value without element.
    pub fn is_absent(&self, i: usize) -> bool {
        !self.has(i) || matches!(self.contents(i), Some(Contents::Absent))
    }

    fn contents(&self, i: usize) -> Option<&Contents<'m>> {
        let v = self.inputs.get(i).copied().flatten()?;
        self.im.slots[v.0 as usize].known.as_ref()
    }

    /// The operand that has the elements of the result, in their order.
    pub(super) fn source_of_result(&self) -> Option<V> {
        match self.node.op_type.as_str() {
            "Cast" | "Reshape" | "Squeeze" | "Unsqueeze" => self.inputs.first().copied().flatten(),
            _ => None,
        }
    }

    /// The operands that are given.
    pub(super) fn operands(&self) -> impl Iterator<Item = V> {
        self.inputs.iter().copied().flatten()
    }

    /// True when all operands that are given are constants.
    pub fn all_known(&self) -> bool {
        let known = |v: &V| {
            matches!(
                self.im.slots[v.0 as usize].known,
                Some(Contents::Tensor(_) | Contents::Proto(_))
            )
        };
        self.inputs.iter().flatten().all(known)
    }

    /// True when the contents of operand `i` contain symbols.
    pub fn is_symbolic(&self, i: usize) -> bool {
        matches!(self.contents(i), Some(Contents::Dims(_)))
    }

    /// True when the contents of some operand contain symbols.
    pub fn any_symbolic(&self) -> bool {
        (0..self.inputs.len()).any(|i| self.is_symbolic(i))
    }

    /// Operand `i` as a constant, `None` when it is absent or not one.
    pub fn constant(&mut self, i: usize) -> Result<Option<Tensor>> {
        if !self.has(i) {
            return Ok(None);
        }
        let v = self.v(i)?;
        self.im.constant(v)
    }

    /// Operand `i` as a constant; an error naming the inputs it depends on when it is not one.
    pub fn tensor(&mut self, i: usize) -> Result<Tensor> {
        match self.constant(i)? {
            Some(t) => Ok(t),
            None => Err(self.unknown(i)),
        }
    }

    /// Errors when one of these operands is given but not known; all such are reported as needing a
    /// value.
    pub fn require(&mut self, operands: &[usize]) -> Result<()> {
        let mut first = None;
        for &i in operands {
            if self.has(i) && !self.is_symbolic(i) && self.constant(i)?.is_none() {
                let e = self.unknown(i);
                first.get_or_insert(e);
            }
        }
        first.map_or(Ok(()), Err)
    }

    /// The error for operand `i` that should have been known.
    pub fn unknown(&mut self, i: usize) -> Error {
        let v = match self.v(i) {
            Ok(v) => v,
            Err(e) => return e,
        };
        match &self.im.slots[v.0 as usize].known {
            Some(Contents::Dims(dims)) if !dims.iter().any(has_element) => {
                super::symbolic::depends_on_symbols(&format!("operand {i}"), dims)
            }
            _ => self.im.needs_value(v, &format!("operand {i}")),
        }
    }
    /// Row-major elements of the integer operand `i`, symbols allowed; `None` when absent or not
    /// known.
    pub fn try_dims(&mut self, i: usize) -> Result<Option<Vec<Dim>>> {
        if !self.has(i) {
            return Ok(None);
        }
        let v = self.v(i)?;
        if let Some(Contents::Dims(d)) = &self.im.slots[v.0 as usize].known {
            return Ok(Some(d.clone()).filter(|d| !d.iter().any(has_element)));
        }
        let Some(t) = self.im.constant(v)? else {
            return Ok(None);
        };
        let ints = to_i64s(&t).ok_or_else(|| {
            Error::invalid(format!("operand {i} must hold integers, got {}", t.dtype()))
        })?;
        Ok(Some(ints.into_iter().map(Dim::constant).collect()))
    }

    /// Row-major elements of the integer operand `i`, which are extents: symbols where they are not
    /// known; an error when they must be.
    pub fn dims(&mut self, i: usize) -> Result<Vec<Dim>> {
        let elements = self.elements(i)?.into_iter();
        elements.map(|e| self.extent_of(e)).collect()
    }

    /// Elements of the integer operand `i`, which must be a constant; `None` when absent.
    pub fn opt_ints_in(&mut self, i: usize) -> Result<Option<Vec<i64>>> {
        if self.has(i) {
            self.ints_in(i).map(Some)
        } else {
            Ok(None)
        }
    }

    /// First element of the integer operand `i`, which must be a constant; `None` when it is absent
    /// or empty.
    pub fn first_int(&mut self, i: usize) -> Result<Option<i64>> {
        let ints = self.opt_ints_in(i)?;
        Ok(ints.and_then(|v| v.first().copied()))
    }

    /// Elements of the integer operand `i`, which must be a constant.
    pub fn ints_in(&mut self, i: usize) -> Result<Vec<i64>> {
        let t = self.tensor(i)?;
        to_i64s(&t).ok_or_else(|| {
            Error::invalid(format!("operand {i} must hold integers, got {}", t.dtype()))
        })
    }

    /// Elements of the numeric operand `i`, which must be a constant.
    pub fn reals_in(&mut self, i: usize) -> Result<Vec<f64>> {
        Ok(self.tensor(i)?.to_f64s())
    }

    /// The only element of operand `i`, which must be a constant; `default` when absent.
    pub fn real_in(&mut self, i: usize, default: f64) -> Result<f64> {
        if !self.has(i) {
            return Ok(default);
        }
        match self.reals_in(i)?.as_slice() {
            [v] => Ok(*v),
            v => Err(Error::invalid(format!(
                "operand {i} must have one element, has {}",
                v.len()
            ))),
        }
    }

    // ---- attributes

    fn attr(&self, name: &'static str, types: &[i32]) -> Result<Option<&'m AttributeProto>> {
        self.read.borrow_mut().insert(name);
        let Some(a) = self.node.attribute.iter().find(|a| a.name == name) else {
            return Ok(None);
        };
        let Some(a) = self.im.resolve_attribute(a) else {
            return Ok(None);
        };
        if a.r#type != 0 && !types.contains(&a.r#type) {
            return Err(Error::invalid(format!(
                "attribute {name} must be {}, is {}",
                at::name(types[0]),
                at::name(a.r#type)
            )));
        }
        Ok(Some(a))
    }

    /// True when the attribute is given.
    pub fn has_attr(&self, name: &str) -> bool {
        self.node
            .attribute
            .iter()
            .any(|a| a.name == name && self.im.resolve_attribute(a).is_some())
    }

    /// Marks attributes that only training or documentation uses as read.
    pub fn ignore(&self, names: &[&'static str]) {
        self.read.borrow_mut().extend(names);
    }

    /// Integer attribute.
    pub fn i(&self, name: &'static str, default: i64) -> Result<i64> {
        Ok(self.attr(name, &[at::INT])?.map_or(default, |a| a.i))
    }

    /// Integer attribute that may be absent.
    pub fn opt_i(&self, name: &'static str) -> Result<Option<i64>> {
        Ok(self.attr(name, &[at::INT])?.map(|a| a.i))
    }

    /// Integer attribute that is 0 or 1.
    pub fn flag(&self, name: &'static str, default: bool) -> Result<bool> {
        Ok(self.i(name, default.into())? != 0)
    }

    /// Attribute `axis`, of operand 0.
    pub fn axis(&self, default: i64) -> Result<usize> {
        axis_of(self.i("axis", default)?, self.ty(0)?.rank())
    }

    /// Float attribute.
    pub fn f(&self, name: &'static str, default: f64) -> Result<f64> {
        Ok(self.opt_f(name)?.unwrap_or(default))
    }

    /// Float attribute that may be absent.
    pub fn opt_f(&self, name: &'static str) -> Result<Option<f64>> {
        Ok(self.attr(name, &[at::FLOAT])?.map(|a| a.f.into()))
    }

    /// String attribute.
    pub fn s(&self, name: &'static str, default: &str) -> Result<String> {
        Ok(self
            .attr(name, &[at::STRING])?
            .map_or(default.to_owned(), |a| {
                String::from_utf8_lossy(&a.s).into_owned()
            }))
    }

    /// String attribute that is one of `names`; `default` when absent.
    pub fn name<'t>(
        &self,
        attribute: &'static str,
        default: &str,
        names: &[&'t str],
    ) -> Result<&'t str> {
        let given = self.s(attribute, default)?;
        let found = names.iter().copied().find(|name| *name == given);
        found.ok_or_else(|| Error::invalid(unknown(attribute, &given, names.iter().copied())))
    }

    /// The value that `choices` has for a string attribute; for `default` when it is absent.
    pub fn choice<T: Copy>(
        &self,
        attribute: &'static str,
        default: &str,
        choices: &[(&str, T)],
    ) -> Result<T> {
        let names: Vec<&str> = choices.iter().map(|c| c.0).collect();
        let name = self.name(attribute, default, &names)?;
        let at = names.iter().position(|n| *n == name);
        Ok(choices[at.expect("the name is one of the choices")].1)
    }

    /// Notes for the capability report that the node follows a rule beside the ONNX reference.
    pub fn note(&mut self, rule: &'static str) {
        self.im.rules.push(rule);
    }

    /// List of integers; `None` when absent.
    pub fn ints(&self, name: &'static str) -> Result<Option<Vec<i64>>> {
        Ok(self.attr(name, &[at::INTS])?.map(|a| a.ints.clone()))
    }

    /// List of integers that are not negative; `None` when absent.
    pub fn usizes(&self, name: &'static str) -> Result<Option<Vec<usize>>> {
        let Some(ints) = self.ints(name)? else {
            return Ok(None);
        };
        let all: std::result::Result<Vec<usize>, _> =
            ints.iter().map(|&i| usize::try_from(i)).collect();
        let small = |v: &Vec<usize>| v.iter().all(|&i| i <= i32::MAX as usize);
        all.ok()
            .filter(small)
            .map(Some)
            .ok_or_else(|| Error::invalid(format!("attribute {name} = {ints:?} is out of range")))
    }

    /// List of floats; `None` when absent.
    pub fn floats(&self, name: &'static str) -> Result<Option<Vec<f64>>> {
        Ok(self
            .attr(name, &[at::FLOATS])?
            .map(|a| a.floats.iter().map(|&f| f.into()).collect()))
    }

    /// List of strings; `None` when absent.
    pub fn strings(&self, name: &'static str) -> Result<Option<Vec<String>>> {
        let text = |s: &prost::bytes::Bytes| String::from_utf8_lossy(s).into_owned();
        Ok(self
            .attr(name, &[at::STRINGS])?
            .map(|a| a.strings.iter().map(text).collect()))
    }

    /// Tensor attribute, dense or sparse; `None` when absent.
    pub fn tensor_attr(&self, name: &'static str) -> Result<Option<Tensor>> {
        let Some(a) = self.attr(name, &[at::TENSOR, at::SPARSE_TENSOR])? else {
            return Ok(None);
        };
        let external = &self.im.model.external;
        match (&a.t, &a.sparse_tensor) {
            (Some(t), _) => tensor_of(t, external).map(Some),
            (None, Some(s)) => match (&s.values, &s.indices) {
                (Some(v), Some(i)) => dense_of(v, i, &s.dims, external, FOLD_LIMIT_BYTES).map(Some),
                _ => Err(Error::invalid(format!(
                    "attribute {name}: a sparse tensor needs values and indices"
                ))),
            },
            _ => Err(Error::invalid(format!("attribute {name} holds no tensor"))),
        }
    }

    /// Graph attribute.
    pub fn graph_attr(&self, name: &'static str) -> Result<&'m GraphProto> {
        let a = self.attr(name, &[at::GRAPH])?;
        a.and_then(|a| a.g.as_ref())
            .ok_or_else(|| Error::invalid(format!("attribute {name} must be a graph")))
    }

    /// Errors when the node has an attribute that the handler did not read.
    pub fn check_attributes(&self) -> Result<()> {
        let read = self.read.borrow();
        let unread = |a: &&AttributeProto| {
            !read.contains(a.name.as_str()) && self.im.resolve_attribute(a).is_some()
        };
        match self.node.attribute.iter().find(unread) {
            Some(a) => Err(Error::unsupported(format!(
                "attribute {:?} is not supported",
                a.name
            ))),
            None => Ok(()),
        }
    }

    // ---- regions

    /// Path of the node, for the origins of nodes in regions.
    pub fn path(&self) -> String {
        let prefix = &self.im.scopes.last().expect("a scope").path;
        let node = if self.node.name.is_empty() {
            &self.node.op_type
        } else {
            &self.node.name
        };
        format!("{prefix}{node}")
    }

    /// Imports a subgraph; see [`Importer::region`].
    pub fn region(
        &mut self,
        g: &'m GraphProto,
        formals: &[Type],
        captures: &[V],
        which: &str,
    ) -> Result<Region> {
        let path = format!("{}/{which}", self.path());
        self.im.region(g, formals, captures, &path)
    }

    /// Imports a subgraph into the current graph; see [`Importer::inline`].
    pub fn inline(&mut self, g: &'m GraphProto, args: &[V]) -> Result<Vec<V>> {
        let path = self.path();
        self.im.inline(g, args, &path)
    }

    /// Imports a subgraph as a region, or gives its first error and reports none.
    pub fn try_region(
        &mut self,
        g: &'m GraphProto,
        formals: &[Type],
        captures: &[V],
        which: &str,
    ) -> Result<Region> {
        let path = format!("{}/{which}", self.path());
        self.im.attempt(|im| im.region(g, formals, captures, &path))
    }

    /// A value of the model that is this constant.
    pub fn known(&mut self, t: Tensor) -> V {
        let ty = Type::new(t.dtype(), t.shape().iter().copied());
        let home = self.im.frames.len() - 1;
        self.im.slot(Slot {
            name: "",
            ty: Some(ty),
            known: Some(Contents::Tensor(t)),
            home,
        })
    }

    /// A value of the model that is this IR value of the current frame.
    pub fn made(&mut self, id: ValueId) -> V {
        self.im.made(id)
    }

    /// The constant that a value of the model is, if it is one.
    pub fn constant_of(&mut self, v: V) -> Result<Option<Tensor>> {
        self.im.constant(v)
    }

    /// Type of a value of the model.
    pub fn ty_of(&self, v: V) -> Result<Type> {
        self.im.ty(v).cloned()
    }

    /// A value of the model as an IR value of the current frame.
    pub fn materialise(&mut self, v: V) -> Result<ValueId> {
        self.im.materialise(v)
    }
}

/// Axis `axis` of a tensor of rank `rank`, negative ones counted from the end.
pub(in crate::onnx) fn axis_of(axis: i64, rank: usize) -> Result<usize> {
    let at = if axis < 0 {
        axis.saturating_add(rank as i64)
    } else {
        axis
    };
    usize::try_from(at)
        .ok()
        .filter(|a| *a < rank)
        .ok_or_else(|| Error::invalid(format!("axis {axis} is out of range for rank {rank}")))
}

/// Several axes, sorted; a repeated one is an error.
pub(in crate::onnx) fn axes_of(axes: &[i64], rank: usize) -> Result<Vec<usize>> {
    let mut out = axes
        .iter()
        .map(|&a| axis_of(a, rank))
        .collect::<Result<Vec<usize>>>()?;
    out.sort_unstable();
    match out.windows(2).find(|w| w[0] == w[1]) {
        Some(w) => Err(Error::invalid(format!(
            "axis {} is named twice in {axes:?}",
            w[0]
        ))),
        None => Ok(out),
    }
}
