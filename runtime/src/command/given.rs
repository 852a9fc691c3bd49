//! Tensors that are given by name, and the programs of an image that they are for.

use crate::dtype::DType;
use crate::error::Error;
use crate::files;
use crate::image::Image;
use crate::nearest::unknown;
use crate::printable::printable;
use crate::program::{IoSpec, Program};
use crate::tensor::Tensor;
use std::path::Path;

/// Tensors by name.
pub type Given = [(String, Tensor)];

/// Errors when a file that a flag writes is one of those that are read, each with what it is.
pub fn check_target(flag: &str, target: &Path, read: &[(&str, &Path)]) -> Result<(), Error> {
    match read.iter().find(|(_, path)| files::is_same(target, path)) {
        None => Ok(()),
        Some((what, _)) => Err(Error::invalid(format!(
            "{flag} {}: refusing to overwrite {what} (try: another name)",
            target.display()
        ))),
    }
}

/// Errors when a flag that writes an archive names a file for one array.
pub fn check_archive_name(flag: &str, target: &Path) -> Result<(), Error> {
    match target.extension() {
        Some(e) if e.eq_ignore_ascii_case("npy") => {
            let npz = target.with_extension("npz");
            Err(Error::invalid(format!(
                "{flag} {}: outputs are written as an archive of arrays, not as one array (try: {flag} {})",
                target.display(),
                npz.display()
            )))
        }
        _ => Ok(()),
    }
}

/// Restores narrow floats that NumPy has no name for: they come as unsigned integers of the same bits.
pub fn as_declared(tensor: Tensor, declared: DType) -> Result<Tensor, Error> {
    let given = tensor.dtype();
    let same_size = given.size_bytes() == declared.size_bytes();
    if declared.is_narrow_float() && given.is_unsigned_int() && same_size {
        return tensor.with_bits_as(declared);
    }
    Ok(tensor)
}

/// The one tensor of a name, if there is one.
pub fn only<'t>(name: &str, given: &'t Given) -> Result<Option<&'t Tensor>, Error> {
    let mut own = given.iter().filter(|(known, _)| known == name);
    match (own.next(), own.next()) {
        (_, Some(_)) => Err(Error::invalid(format!("input {name:?} is given twice"))),
        (found, None) => Ok(found.map(|(_, tensor)| tensor)),
    }
}

/// The tensor for an input, which has its dtype and shape.
pub fn checked(spec: &IoSpec, tensor: &Tensor) -> Result<Tensor, Error> {
    as_specified(tensor.clone(), spec).map_err(|e| e.context(format!("input {:?}", spec.name)))
}

fn as_specified(tensor: Tensor, spec: &IoSpec) -> Result<Tensor, Error> {
    let tensor = as_declared(tensor, spec.dtype)?;
    if tensor.dtype() == spec.dtype && tensor.shape() == spec.shape {
        return Ok(tensor);
    }
    let expected = type_text(spec);
    let (dtype, shape) = (tensor.dtype(), tensor.shape());
    let message = format!("expected {expected}, got {dtype}{shape:?}");
    Err(Error::invalid(message))
}

/// `f32[4, 10]`.
pub fn type_text(spec: &IoSpec) -> String {
    format!("{}{:?}", spec.dtype, spec.shape)
}

/// `input x: f32[4, 10]`.
pub fn value_text(label: &str, spec: &IoSpec) -> String {
    format!("{label} {}: {}", printable(&spec.name), type_text(spec))
}

/// `batch=8, sequence=128`.
pub fn dims_text<'a>(dims: impl Iterator<Item = &'a (String, usize)>) -> String {
    let dims: Vec<String> = dims.map(|(dim, n)| format!("{dim}={n}")).collect();
    match dims.is_empty() {
        true => "fixed shapes".to_owned(),
        false => dims.join(", "),
    }
}

/// Names and shapes of the inputs of a program.
pub fn shapes_text(program: &Program) -> String {
    let inputs = program.inputs.iter();
    let shapes = inputs.map(|i| format!("{} {:?}", printable(&i.name), i.shape));
    shapes.collect::<Vec<_>>().join(", ")
}

/// True unless there is a tensor of another shape for an input.
pub fn has_shape(spec: &IoSpec, given: &Given) -> bool {
    let mut own = given.iter().filter(|(name, _)| *name == spec.name);
    own.all(|(_, tensor)| tensor.shape() == spec.shape)
}

/// Names of the inputs, which all programs of an image have.
pub fn input_names(image: &Image) -> impl Iterator<Item = &str> {
    let first = image.programs().iter().take(1);
    first.flat_map(|p| p.inputs.iter().map(|i| i.name.as_str()))
}

/// Errors with a tensor that is for no input of an image.
pub fn check_names(image: &Image, given: &Given) -> Result<(), Error> {
    let is_unknown = |name: &str| input_names(image).all(|known| known != name);
    match given.iter().find(|(name, _)| is_unknown(name)) {
        Some((name, _)) => Err(Error::invalid(unknown("input", name, input_names(image)))),
        None => Ok(()),
    }
}

/// Errors with a tensor that is given twice, or has a rank that its input has in no program.
pub fn check_ranks(image: &Image, given: &Given) -> Result<(), Error> {
    for spec in image.programs().iter().take(1).flat_map(|p| &p.inputs) {
        if let Some(tensor) = only(&spec.name, given)?
            && tensor.shape().len() != spec.shape.len()
        {
            checked(spec, tensor)?;
        }
    }
    Ok(())
}

/// Number of elements of all inputs.
pub fn n_elements(program: &Program) -> usize {
    let inputs = program.inputs.iter();
    inputs.map(|i| i.shape.iter().product::<usize>()).sum()
}

/// `the image has no code for x [3, 8]; it has x [1, 8]; x [2, 8]`, for sizes that were asked for besides those of tensors.
pub fn no_code(image: &Image, sizes: impl Iterator<Item = String>, given: &Given) -> String {
    let shape = |(name, t): &(String, Tensor)| format!("{} {:?}", printable(name), t.shape());
    let asked: Vec<String> = sizes.chain(given.iter().map(shape)).collect();
    let known: Vec<String> = image.programs().iter().map(|p| shapes_text(p)).collect();
    format!(
        "the image has no code for {}; it has {}",
        asked.join(", "),
        known.join("; ")
    )
}

/// The features of the CPU that an image needs.
pub fn cpu_text(image: &Image) -> String {
    let features = image.about().features.iter();
    let features: Vec<&str> = features.map(|f| f.trim_start_matches("has_")).collect();
    match features.is_empty() {
        true => "any CPU".to_owned(),
        false => features.join(" "),
    }
}
