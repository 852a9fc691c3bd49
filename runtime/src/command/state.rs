//! Values of variables before a run and after it, by flags.

use super::given::{as_declared, type_text};
use crate::dtype::DType;
use crate::error::Error;
use crate::exec::Resources;
use crate::nearest::unknown;
use crate::printable::printable;
use crate::program::{IoSpec, Program};
use crate::safetensors::{self, Saved, label};
use crate::tensor::Tensor;
use std::fmt;
use std::path::{Path, PathBuf};

/// A variable of a program, with the type of its first use.
pub struct Variable {
    /// The container, empty for the session's own.
    pub container: String,
    /// The name within the container.
    pub name: String,
    /// `NAME`, or `CONTAINER/NAME`.
    pub label: String,
    /// Element type.
    pub dtype: DType,
    /// Extents; `None`: any.
    pub dims: Vec<Option<usize>>,
    /// The type as it is written in messages.
    pub type_text: String,
}

impl fmt::Display for Variable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "variable {}: {}", printable(&self.label), self.type_text)
    }
}

/// Flags with values of variables.
pub struct StateFlags<'f> {
    /// A file of all variables.
    pub state: Option<&'f PathBuf>,
    /// `NAME=FILE.npy`, which count over the file.
    pub variables: &'f [String],
}

impl Variable {
    /// The value as one of this variable: narrow floats that a NumPy file has as integers of the same bits are restored.
    fn checked(&self, value: Tensor) -> Result<Tensor, Error> {
        let value = as_declared(value, self.dtype)?;
        let (dtype, shape) = (value.dtype(), value.shape());
        let fits = |(dim, n): (&Option<usize>, &usize)| dim.is_none_or(|dim| dim == *n);
        let is_shape = self.dims.len() == shape.len() && self.dims.iter().zip(shape).all(fits);
        if dtype == self.dtype && is_shape {
            return Ok(value);
        }
        let (label, expected) = (&self.label, &self.type_text);
        let message = format!("variable {label:?}: expected {expected}, got {dtype}{shape:?}");
        Err(Error::invalid(message))
    }
}

/// The variables of a program and its sub-programs, in the order of their first uses.
pub fn variables(program: &Program) -> Vec<Variable> {
    let mut found = Vec::new();
    add_variables(program, &mut found);
    found
}

fn add_variables(program: &Program, found: &mut Vec<Variable>) {
    for (variable, buffer) in program.variable_buffers() {
        let variable = &program.variables[variable as usize];
        let label = label(&variable.container, &variable.name);
        if found.iter().all(|known| known.label != label) {
            let spec = IoSpec::new(label.clone(), buffer.dtype, &buffer.shape);
            found.push(Variable {
                container: variable.container.clone(),
                name: variable.name.clone(),
                label,
                dtype: buffer.dtype,
                dims: buffer.shape.iter().copied().map(Some).collect(),
                type_text: type_text(&spec),
            });
        }
    }
    let steps = program.partitions.iter().flat_map(|p| &p.steps);
    let bodies = steps.flat_map(|step| step.kind.sub_programs());
    bodies.for_each(|body| add_variables(body, found));
}

/// The variable of a label.
pub fn variable<'v>(known: &'v [Variable], label: &str) -> Result<&'v Variable, Error> {
    let labels = known.iter().map(|v| v.label.as_str());
    let found = known.iter().find(|v| v.label == label);
    found.ok_or_else(|| Error::invalid(unknown("variable", label, labels)))
}

/// Sets variables to the values of flags. Gives the labels of those that the file of all has no value for.
pub fn set(
    flags: &StateFlags,
    known: &[Variable],
    resources: &Resources,
) -> Result<Vec<String>, Error> {
    let mut missing = Vec::new();
    if let Some(path) = flags.state {
        missing = load(path, known, resources)?;
    }
    for flag in flags.variables {
        let parts = flag.split_once('=');
        let wrong = || Error::invalid(format!("--variable {flag:?}: expected NAME=FILE.npy"));
        let (label, path) = parts.ok_or_else(wrong)?;
        let own = variable(known, label)?;
        let value = own.checked(Tensor::from_npy(path)?)?;
        resources.set(&own.container, &own.name, &value)?;
        missing.retain(|other| other != label);
    }
    Ok(missing)
}

/// Sets variables to the values of a safetensors file, all or none. Gives the labels of those that it has no value for.
///
/// Errors with a value of no variable, or of another type.
pub fn load(path: &Path, known: &[Variable], resources: &Resources) -> Result<Vec<String>, Error> {
    let values = safetensors::read(path)?.variables.into_iter();
    let values = values.map(|saved| own_value(saved, known));
    let values = values.collect::<Result<Vec<Saved>, Error>>();
    let values = values.map_err(|e| e.context(path.display()))?;
    let is_given = |v: &Variable| {
        let mut names = values.iter().map(|s| (&s.container, &s.name));
        names.any(|name| name == (&v.container, &v.name))
    };
    let missing = known.iter().filter(|v| !is_given(v));
    let missing = missing.map(|v| v.label.clone()).collect();
    resources.restore(values)?;
    Ok(missing)
}

/// A value of a file as that of a variable, by its label.
fn own_value(saved: Saved, known: &[Variable]) -> Result<Saved, Error> {
    let own = variable(known, &label(&saved.container, &saved.name))?;
    Ok(Saved {
        container: own.container.clone(),
        name: own.name.clone(),
        value: own.checked(saved.value)?,
    })
}

/// `state.safetensors has no value for: step, mean; they keep their initial ones`.
pub fn missing_text(path: &Path, missing: &[String]) -> String {
    format!(
        "{} has no value for: {}; they keep their initial ones",
        path.display(),
        missing.join(", ")
    )
}
