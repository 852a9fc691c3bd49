//! Reads models and tensors that the user names.

use crate::compiled::{Compiled, Source};
use crate::error::{Error, Result};
use crate::ir::{Graph, Type};
use crate::nearest::unknown;
use crate::onnx;
use crate::rng::Rng;
use crate::{DType, Tensor};
use gristmill_runtime::npy;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The text of a file.
pub fn text(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(|e| file_error(path, e))
}

/// Reads `*.onnx`, or the text form of a graph from `*.ir`.
pub fn model(path: &Path) -> Result<Source> {
    if path.extension().is_some_and(|e| e == "ir") {
        let text = text(path)?;
        return Ok(Source::Graph(Arc::new(
            Graph::parse(&text).map_err(|e| e.context(path.display()))?,
        )));
    }
    Ok(Source::Onnx(Arc::new(onnx::load(path)?)))
}

/// An error about a file.
pub fn file_error(path: &Path, e: impl std::fmt::Display) -> Error {
    Error::invalid(format!("{}: {e}", path.display()))
}

/// Where inputs come from.
pub struct InputFlags<'a> {
    /// `--inputs FILE.npz`.
    pub npz: Option<&'a Path>,
    /// `--input name=FILE.npy`.
    pub npy: &'a [String],
    /// Seed of inputs that are not given.
    pub seed: u64,
}

/// The inputs of one run, in order: given ones, the others random. The second result names the random ones.
pub fn inputs(compiled: &Compiled, flags: &InputFlags) -> Result<(Vec<Tensor>, Vec<String>)> {
    let known: Vec<&str> = compiled.inputs().iter().map(|(n, _)| n.as_str()).collect();
    let mut given: Vec<(String, Tensor)> = Vec::new();
    if let Some(path) = flags.npz {
        given.extend(npy::read_npz(path)?);
    }
    for flag in flags.npy {
        let (name, path) = flag
            .split_once('=')
            .ok_or_else(|| Error::invalid(format!("--input {flag:?}: expected NAME=FILE.npy")))?;
        if !known.contains(&name) {
            return Err(Error::invalid(unknown("input", name, known)));
        }
        given.push((name.to_owned(), Tensor::from_npy(path)?));
    }
    if let Some((name, _)) = given.iter().find(|(n, _)| !known.contains(&n.as_str())) {
        return Err(Error::invalid(unknown("input", name, known)));
    }
    // What NumPy has no name for comes as unsigned integers of the same bits.
    for (name, t) in &mut given {
        let wanted = compiled
            .inputs()
            .iter()
            .find(|(n, _)| n == name)
            .map(|(_, ty)| ty.dtype);
        if let Some(wanted) = wanted.filter(|w| {
            w.is_narrow_float()
                && t.dtype().is_unsigned_int()
                && w.size_bytes() == t.dtype().size_bytes()
        }) {
            *t = t.with_bits_as(wanted)?;
        }
    }
    let mut rng = Rng(flags.seed);
    let mut random = Vec::new();
    let largest = compiled.largest_dims();
    for (name, ty) in compiled.inputs() {
        if !given.iter().any(|(n, _)| n == name) {
            given.push((
                name.clone(),
                random_input(
                    &mut rng,
                    name,
                    &Type {
                        dtype: ty.dtype,
                        shape: ty.shape.bind(&largest),
                    },
                )?,
            ));
            random.push(name.clone());
        }
    }
    Ok((compiled.bind(given)?, random))
}

/// Normal floats, small non-negative integers (valid as token ids of most models), `true`.
fn random_input(rng: &mut Rng, name: &str, ty: &Type) -> Result<Tensor> {
    let shape = ty.static_shape().ok_or_else(|| {
        let symbols: Vec<String> = ty
            .shape
            .iter()
            .filter(|d| d.as_const().is_none())
            .map(|d| d.to_string())
            .collect();
        Error::invalid(format!(
            "input {name:?} has type {ty}: give the tensor, or a value for {}",
            symbols.join(", ")
        ))
        .hint(format!("--set {}=1", symbols.join("=1 --set ")))
    })?;
    let mut t = Tensor::zeros(ty.dtype, &shape)?;
    match ty.dtype {
        d if d.is_float() => {
            let values: Vec<f64> = (0..t.len()).map(|_| rng.normal()).collect();
            t = Tensor::from_f64s(d, &shape, &values)?;
        }
        DType::Bool => t.as_mut_slice::<bool>().fill(true),
        DType::I64 => t
            .as_mut_slice::<i64>()
            .fill_with(|| (rng.bits() % 64) as i64),
        DType::I32 => t
            .as_mut_slice::<i32>()
            .fill_with(|| (rng.bits() % 64) as i32),
        other => {
            let size = other.size_bytes();
            t.as_bytes_mut()
                .chunks_mut(size)
                .for_each(|c| c[0] = (rng.bits() % 64) as u8);
        }
    }
    Ok(t)
}

/// The tensors `PREFIX_0.pb`, `PREFIX_1.pb`, ... of a test-data directory, with their names.
pub fn test_data(dir: &Path, prefix: &str) -> Result<Vec<(String, Tensor)>> {
    let mut found = Vec::new();
    loop {
        let path: PathBuf = dir.join(format!("{prefix}_{}.pb", found.len()));
        if !path.exists() {
            return Ok(found);
        }
        let bytes = std::fs::read(&path).map_err(|e| file_error(&path, e))?;
        found.push(onnx::tensor_from_pb(&bytes).map_err(|e| e.context(path.display()))?);
    }
}
