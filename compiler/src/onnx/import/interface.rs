//! Initialisers, inputs and outputs of graphs.

use super::super::load::{Model, Specialisation};
use super::super::open_inputs::{Declared, element_name};
use super::super::proto::{
    DimensionProto, DimensionValue, GraphProto, SparseTensorProto, TensorProto, TensorTypeProto,
    TypeValue, ValueInfoProto,
};
use super::super::tensor::{constant_of, dense_of, dtype_of, shape_of};
use super::{Contents, FOLD_LIMIT_BYTES, Importer, MAX_TENSOR_BYTES, Slot, V};
use crate::error::{Error, ErrorKind, Result};
use crate::ir::{Bindings, Dim, Shape, Type};
use gristmill_runtime::{DType, Tensor};
use std::collections::BTreeSet;

/// Dtype and dims of a declared tensor; unnamed unknown dims become symbols `name_axis`.
pub(in crate::onnx) fn declared_type(info: &ValueInfoProto) -> Result<(DType, Vec<Dim>)> {
    let name = &info.name;
    let tensor = declared_tensor(info)?;
    let dtype = dtype_of(tensor.elem_type).map_err(|e| e.context(format!("{name:?}")))?;
    let shape = tensor.shape.as_ref().ok_or_else(|| {
        Error::unsupported(format!("{name:?} has no declared rank"))
            .hint("declare a shape in the model, with named dims for open extents")
    })?;
    let dims = shape.dim.iter().enumerate();
    let dims = dims.map(|(axis, d)| declared_dim(name, axis, d));
    Ok((dtype, dims.collect::<Result<_>>()?))
}

fn declared_tensor(info: &ValueInfoProto) -> Result<&TensorTypeProto> {
    if let Some(TypeValue::Tensor(t)) = info.r#type.as_ref().and_then(|t| t.value.as_ref()) {
        return Ok(t);
    }
    Err(Declared::of(info)?.not_given())
}

fn declared_dim(name: &str, axis: usize, d: &DimensionProto) -> Result<Dim> {
    match &d.value {
        // Some exporters write a free extent so, and onnxruntime takes it for one.
        Some(DimensionValue::Value(-1)) => Ok(Dim::symbol(&format!("{name}_{axis}"))),
        Some(DimensionValue::Value(n)) if *n < 0 => Err(Error::invalid(format!(
            "{name:?} has extent {n} on axis {axis}"
        ))),
        Some(DimensionValue::Value(n)) => Ok(Dim::constant(*n)),
        Some(DimensionValue::Param(p)) if !p.is_empty() => Ok(Dim::symbol(p)),
        _ => Ok(Dim::symbol(&format!("{name}_{axis}"))),
    }
}

/// The type, unless it is of a tensor that cannot exist.
pub(super) fn possible(ty: Type) -> Result<Type> {
    let empty = ty.shape.iter().any(|d| d.is(0));
    let bytes = ty.size_bytes().filter(|_| !empty);
    if bytes.is_some_and(|n| n > MAX_TENSOR_BYTES) {
        return Err(Error::invalid(format!(
            "{ty} is larger than {MAX_TENSOR_BYTES} bytes, the limit for one tensor"
        )));
    }
    Ok(ty)
}

impl<'m> Importer<'m> {
    /// Initialisers of the main graph, of which some are variables.
    pub(super) fn weights(&mut self, g: &'m GraphProto, spec: &Specialisation) -> Result<()> {
        let mut unknown = spec.variables.clone();
        unknown.retain(|name| g.initializer.iter().all(|t| t.name != *name));
        if let Some(name) = unknown.first() {
            return Err(Error::invalid(format!(
                "the model has no initialiser {name:?}"
            )));
        }
        self.initialisers(g);
        for t in g
            .initializer
            .iter()
            .filter(|t| spec.variables.contains(&t.name))
        {
            let made = self.variable(t);
            self.reported(&t.name, made);
        }
        Ok(())
    }

    /// Makes an initialiser a variable: nothing is known of its contents.
    fn variable(&mut self, t: &'m TensorProto) -> Result<()> {
        let Some(v) = self.lookup(&t.name) else {
            return Ok(());
        };
        let initial = constant_of(t, &self.model.external)?;
        let id = self.b().variable(&t.name, initial)?;
        self.slots[v.0 as usize].known = None;
        self.frames[0].ids.insert(v, id);
        self.variables.insert(v, &t.name);
        Ok(())
    }

    pub(super) fn initialisers(&mut self, g: &'m GraphProto) {
        for t in &g.initializer {
            let ty = self.reported(&t.name, stored_type(t));
            let v = self.unplaced(&t.name, ty, Some(Contents::Proto(t)));
            self.define(&t.name, v);
        }
        for s in &g.sparse_initializer {
            let name = s.values.as_ref().map_or("", |v| v.name.as_str());
            let tensor = self.reported(name, sparse(s, self.model));
            let ty = tensor.as_ref().map(type_of);
            let v = self.unplaced(name, ty, tensor.map(Contents::Tensor));
            self.define(name, v);
        }
    }

    /// A part of an initialiser; an error is kept for the report.
    fn reported<T>(&mut self, name: &str, result: Result<T>) -> Option<T> {
        self.note(result.map_err(|e| e.context(format!("initialiser {name:?}"))))
    }

    pub(super) fn inputs(&mut self, g: &'m GraphProto, spec: &Specialisation) -> Result<()> {
        let names = &self.scopes[0].names;
        let is_free = |i: &&ValueInfoProto| !names.contains_key(i.name.as_str());
        let free: Vec<&ValueInfoProto> = g.input.iter().filter(is_free).collect();
        check_names(&free, spec)?;
        let bindings = bindings_of(&free, spec);
        for info in free {
            self.input(info, spec, &bindings);
        }
        Ok(())
    }

    fn input(&mut self, info: &'m ValueInfoProto, spec: &Specialisation, bindings: &Bindings) {
        let ty = self.note(input_type(info, spec, bindings).and_then(possible));
        let value = spec.values.get(&info.name);
        let v = self.slot(Slot {
            name: &info.name,
            ty: ty.clone(),
            known: value.map(|t| Contents::Tensor(t.clone())),
            home: 0,
        });
        if let Some(ty) = ty {
            for dim in ty.shape.iter() {
                dim.visit_symbols(&mut |s| self.symbols.extend([s.to_owned()]));
            }
            let id = self.frames[0].b.input(&info.name, ty.dtype, ty.shape.0);
            if value.is_none() {
                self.frames[0].ids.insert(v, id);
            }
        }
        self.define(&info.name, v);
    }

    pub(super) fn outputs(&mut self, g: &'m GraphProto) {
        for (i, o) in g.output.iter().enumerate() {
            let name = &o.name;
            let n_before = g.output[..i].iter().filter(|e| e.name == *name).count();
            let found = self.lookup(name);
            let found =
                found.ok_or_else(|| Error::invalid(format!("output {name:?} is not defined")));
            let Some(v) = self.note(found) else { continue };
            if self.slots[v.0 as usize].ty.is_none() {
                continue;
            }
            let output = match n_before {
                0 => self.output(name, v),
                _ => self.output_again(name, n_before, v),
            };
            self.note(output.map_err(|e| e.context(format!("output {name:?}"))));
        }
    }

    /// A value that is an output already, `n` times. Those of a region go by their positions.
    fn output_again(&mut self, name: &str, n: usize, v: V) -> Result<()> {
        if self.frames.len() > 1 {
            return self.output(&format!("{name}#{n}"), v);
        }
        let message = "it is listed twice, and results go by their names";
        Err(Error::unsupported(message).hint("an Identity node gives the second another name"))
    }

    /// An output of the model or of a region; each element of a list is one of the model.
    fn output(&mut self, name: &str, v: V) -> Result<()> {
        let of_model = self.frames.len() == 1;
        match &self.slots[v.0 as usize].known {
            Some(Contents::Absent) if of_model => Ok(()),
            Some(Contents::List(elements)) if of_model => {
                let elements = elements.clone().into_iter().enumerate();
                elements.into_iter().try_for_each(|(i, element)| {
                    let id = self.materialise(element)?;
                    self.b().output(&element_name(name, i), id);
                    Ok(())
                })
            }
            _ => {
                let id = self.materialise(v)?;
                self.b().output(name, id);
                Ok(())
            }
        }
    }
}

fn stored_type(t: &TensorProto) -> Result<Type> {
    Ok(Type::new(dtype_of(t.data_type)?, shape_of(t)?))
}

fn type_of(t: &Tensor) -> Type {
    Type::new(t.dtype(), t.shape().iter().copied())
}

fn sparse(s: &SparseTensorProto, model: &Model) -> Result<Tensor> {
    let (Some(values), Some(indices)) = (&s.values, &s.indices) else {
        return Err(Error::invalid("a sparse tensor needs values and indices"));
    };
    let limit = FOLD_LIMIT_BYTES * 64;
    dense_of(values, indices, &s.dims, &model.external, limit)
}

/// The shape that `spec` gives an input, as such or by a value.
fn given_shape(name: &str, spec: &Specialisation) -> Option<Vec<usize>> {
    let value = spec.values.get(name).map(|t| t.shape().to_vec());
    spec.shapes.get(name).cloned().or(value)
}

/// Checks that `spec` names inputs and dims that exist.
fn check_names(inputs: &[&ValueInfoProto], spec: &Specialisation) -> Result<()> {
    let mut symbols = BTreeSet::new();
    for (_, dims) in inputs.iter().filter_map(|i| declared_type(i).ok()) {
        for d in dims {
            d.visit_symbols(&mut |s| symbols.extend([s.to_owned()]));
        }
    }
    let names: BTreeSet<String> = inputs.iter().map(|i| i.name.clone()).collect();
    let mut given = spec.shapes.keys().chain(spec.values.keys());
    if let Some(dim) = spec.dims.keys().find(|d| !symbols.contains(*d)) {
        return Err(no_such("dim", dim, &symbols));
    }
    match given.find(|n| !names.contains(*n)) {
        Some(name) => Err(no_such("input", name, &names)),
        None => Ok(()),
    }
}

fn no_such(kind: &str, name: &str, known: &BTreeSet<String>) -> Error {
    let known: Vec<&str> = known.iter().map(String::as_str).collect();
    let known = match known.is_empty() {
        true => "none".to_owned(),
        false => known.join(", "),
    };
    Error::invalid(format!("the model has no {kind} {name:?}; it has {known}"))
}

/// Values of all dims that `spec` fixes.
fn bindings_of(inputs: &[&ValueInfoProto], spec: &Specialisation) -> Bindings {
    let mut bindings: Bindings = spec.dims.clone();
    for info in inputs {
        let (Ok((_, dims)), Some(shape)) = (declared_type(info), given_shape(&info.name, spec))
        else {
            continue;
        };
        for (d, &n) in dims.iter().zip(&shape) {
            if let Some(s) = d.as_symbol() {
                bindings.entry(s.to_owned()).or_insert(n);
            }
        }
    }
    bindings
}

/// Type of an input under a specialisation.
fn input_type(info: &ValueInfoProto, spec: &Specialisation, bindings: &Bindings) -> Result<Type> {
    let name = &info.name;
    let given = given_shape(name, spec);
    let (dtype, declared) = match (declared_type(info), &given) {
        // The rank is open, and given.
        (Err(e), Some(shape)) if e.kind() == ErrorKind::Unsupported => {
            let tensor = declared_tensor(info).map_err(|_| e)?;
            (dtype_of(tensor.elem_type)?, Shape::of(shape))
        }
        (declared, _) => declared.map(|(d, s)| (d, Shape(s)))?,
    };
    let shape = declared.bind(bindings);
    if let Some(g) = given.filter(|g| shape != Shape::of(g)) {
        return Err(Error::invalid(format!(
            "input {name:?} is {dtype}{declared}; shape {g:?} does not fit"
        )));
    }
    match spec.values.get(name).map(Tensor::dtype) {
        Some(d) if d != dtype => Err(Error::invalid(format!(
            "input {name:?} is {dtype}, the value given is {d}"
        ))),
        _ => Ok(Type { dtype, shape }),
    }
}
