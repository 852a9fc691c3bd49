//! Inputs and outputs of a model: names, types, ranges of dims, and checks of tensors against them.

use super::{Compiled, Source};
use crate::error::{Error, Result};
use crate::ir::{Bindings, Dim, Graph, Type};
use crate::nearest::unknown;
use crate::options::{MAX_DIM_SIZE, Options};
use gristmill_runtime::Tensor;
use gristmill_runtime::command::state::Variable;
use gristmill_runtime::safetensors::label;
use std::collections::{BTreeMap, BTreeSet};

/// Sizes must be possible; ranges must name dims of the inputs, not be empty, and contain the values of dims.
pub(super) fn check_ranges(inputs: &[(String, Type)], options: &Options) -> Result<()> {
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

/// The options, with the declared ranges of the graph where these are narrower.
pub(super) fn with_ranges(source: &Source, options: &Options) -> Options {
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
pub fn interface(g: &Graph) -> (Vec<(String, Type)>, Vec<String>) {
    let inputs = g
        .inputs
        .iter()
        .zip(&g.input_names)
        .map(|(&v, n)| (n.clone(), g.ty(v).clone()))
        .collect();
    (inputs, g.outputs.iter().map(|o| o.name.clone()).collect())
}

impl Compiled {
    /// The largest sizes of dims with a range and without a value.
    pub fn largest_dims(&self) -> Bindings {
        let open = self
            .options
            .ranges
            .iter()
            .filter(|(dim, _)| !self.options.dims.contains_key(*dim));
        open.map(|(dim, range)| (dim.clone(), range.max)).collect()
    }

    /// Shape of an input by its declared type, dims with a range at their greatest. The error lists those without a size.
    #[doc(hidden)]
    pub fn declared_shape(&self, input: usize) -> Result<Vec<usize>, Vec<String>> {
        let shape = self.inputs[input].1.shape.bind(&self.largest_dims());
        shape.as_static().ok_or_else(|| {
            let open = shape.iter().filter(|d| d.as_const().is_none());
            open.map(ToString::to_string).collect()
        })
    }

    /// True when no dim of an input is without a size or a range.
    #[doc(hidden)]
    pub fn has_declared_shapes(&self) -> bool {
        (0..self.inputs.len()).all(|i| self.declared_shape(i).is_ok())
    }

    /// Variables of the graph.
    #[doc(hidden)]
    pub fn variables(&self) -> Vec<Variable> {
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
    #[doc(hidden)]
    pub fn input_type(&self, name: &str) -> Result<&Type> {
        let found = self.inputs.iter().find(|(known, _)| known == name);
        found.map(|(_, ty)| ty).ok_or_else(|| {
            let known = self.inputs.iter().map(|(known, _)| known.as_str());
            Error::invalid(unknown("input", name, known))
        })
    }

    /// Errors when dtype or shape of an input do not fit the declared type, or a dim is outside of its range.
    #[doc(hidden)]
    pub fn check_input(&self, name: &str, tensor: &Tensor) -> Result<()> {
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
}
