//! Examples of an archive for the inputs of a model.

use super::super::output::noteln;
use gristmill::ir::Type;
use gristmill::train::{Batch, Dataset, Epoch, TensorDataset};
use gristmill::{DType, Tensor};
use gristmill::{Error, Result};
use gristmill_runtime::nearest::unknown;
use gristmill_runtime::npy;
use gristmill_runtime::units::{plural, printable};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Keys of an archive by inputs.
pub type Keys = BTreeMap<String, String>;

/// A NumPy archive.
pub struct Archive {
    path: PathBuf,
    tensors: Vec<(String, Tensor)>,
}

/// Examples as the inputs take them.
pub struct Examples {
    /// The examples as the archive has them, by the names of inputs.
    pub data: TensorDataset,
    /// The dtypes that inputs have.
    dtypes: BTreeMap<String, DType>,
}

impl Archive {
    /// Reads a file.
    pub fn read(path: &Path) -> Result<Archive> {
        Ok(Archive {
            path: path.to_owned(),
            tensors: npy::read_npz(path)?,
        })
    }

    /// The tensor of a key.
    pub fn get(&self, key: &str) -> Result<&Tensor> {
        let found = self.tensors.iter().find(|(known, _)| known == key);
        let known = || self.tensors.iter().map(|(known, _)| known.as_str());
        found.map(|(_, t)| t).ok_or_else(|| {
            let e = Error::invalid(unknown("key", key, known())).context(self.path.display());
            e.hint("--input NAME=KEY and --label KEY say which keys are for the model's inputs")
        })
    }

    /// The examples for these inputs, whose keys have the inputs' names unless `keys` has others. Says which values are converted.
    pub fn examples(&self, inputs: &[(String, Type)], keys: &Keys) -> Result<Examples> {
        let (mut tensors, mut dtypes) = (Vec::new(), BTreeMap::new());
        for (name, ty) in inputs {
            let tensor = self.get(keys.get(name).unwrap_or(name))?;
            let fits = check(tensor, ty);
            fits.map_err(|e| e.context(self.of(name)))?;
            if tensor.dtype() != ty.dtype {
                let (name, from, to) = (printable(name), tensor.dtype(), ty.dtype);
                noteln!(
                    "{}: {name}: values of {from} are taken as {to}",
                    self.path.display()
                );
            }
            tensors.push((name.clone(), tensor.clone()));
            dtypes.insert(name.clone(), ty.dtype);
        }
        let data = TensorDataset::new(tensors).map_err(|e| e.context(self.path.display()))?;
        if data.is_empty() {
            let message = format!("{}: no examples", self.path.display());
            return Err(Error::invalid(message));
        }
        Ok(Examples { data, dtypes })
    }

    /// Errors when a label is none of `n` classes.
    pub fn check_labels(&self, key: &str, n: usize) -> Result<()> {
        let is_class = |v: f64| (0.0..n as f64).contains(&v);
        let expected = format!("a class from 0 to {}", n.saturating_sub(1));
        self.check_values(key, &is_class, &expected)
    }

    /// Errors when a label is not from 0 to 1.
    pub fn check_probabilities(&self, key: &str) -> Result<()> {
        let is_probability = |v: f64| (0.0..=1.0).contains(&v);
        self.check_values(key, &is_probability, "a probability from 0 to 1")
    }

    fn check_values(&self, key: &str, is_good: &dyn Fn(f64) -> bool, expected: &str) -> Result<()> {
        let labels = self.get(key)?;
        let per_example = labels.len() / labels.shape().first().copied().unwrap_or(1).max(1);
        let values = labels.to_f64s();
        let Some(at) = values.iter().position(|&v| !is_good(v)) else {
            return Ok(());
        };
        let (path, label, example) = (self.path.display(), values[at], at / per_example.max(1));
        Err(Error::invalid(format!(
            "{path}: {key:?} of example {example} is {label}, expected {expected}"
        )))
    }

    /// Errors when labels are one-hot: as many axes as the output has, with a 1 for one of `n` classes along the axis of classes.
    pub fn check_one_hot(&self, key: &str, rank: usize, axis: usize, n: usize) -> Result<()> {
        let labels = self.get(key)?;
        let shape = labels.shape();
        if shape.len() != rank || shape[axis] != n || n < 2 || !is_one_hot(labels, axis) {
            return Ok(());
        }
        let (path, dtype) = (self.path.display(), labels.dtype());
        let e = Error::invalid(format!(
            "{path}: {key:?} is one-hot, {dtype}{shape:?}: expected the number of a class for each row"
        ));
        Err(e.hint(format!("store numpy.argmax({key}, axis={axis})")))
    }

    /// Errors when there is no batch of `size` examples, and says which are left out.
    pub fn check_fixed(&self, examples: &Examples, size: usize) -> Result<()> {
        let (n, path) = (examples.data.len(), self.path.display());
        if n < size {
            let message = format!("{path}: {n} examples, and a batch takes {size}");
            return Err(Error::invalid(message));
        }
        if n % size > 0 {
            let left = plural(n % size, "example");
            noteln!("{path}: a batch takes {size}, so each epoch leaves out {left}");
        }
        Ok(())
    }

    fn of(&self, name: &str) -> String {
        format!("{}: input {name:?}", self.path.display())
    }
}

/// True for zeros with a single 1 in each row along an axis.
fn is_one_hot(labels: &Tensor, axis: usize) -> bool {
    let values = labels.to_f64s();
    let n = labels.shape()[axis];
    let inner: usize = labels.shape()[axis + 1..].iter().product();
    let places = (0..values.len() / n).map(|row| row / inner * inner * n + row % inner);
    let count = |wanted: f64, place: usize| {
        let row = (0..n).map(|class| values[place + class * inner]);
        row.filter(|&v| v == wanted).count()
    };
    let is_one = |place: usize| count(1.0, place) == 1 && count(0.0, place) == n - 1;
    places.into_iter().all(is_one)
}

/// Errors unless rows of a tensor are examples for an input.
fn check(tensor: &Tensor, ty: &Type) -> Result<()> {
    let shape = tensor.shape();
    let axes = shape.iter().zip(ty.shape.iter()).skip(1);
    let fits = |(&n, dim): (&usize, &gristmill::ir::Dim)| dim.as_usize().is_none_or(|own| own == n);
    let has_axes = shape.len() == ty.rank() && !shape.is_empty();
    if !has_axes || !axes.into_iter().all(fits) {
        let dtype = tensor.dtype();
        return Err(Error::invalid(format!(
            "the archive has {dtype}{shape:?}, expected rows of {ty}"
        )));
    }
    if tensor.dtype() == ty.dtype || is_taken(tensor.dtype(), ty.dtype) {
        return Ok(());
    }
    let (from, to) = (tensor.dtype(), ty.dtype);
    let message = match changed(tensor, to)? {
        None => return Ok(()),
        Some(value) => {
            format!("the archive has {from}, expected {to}, which does not have {value}")
        }
    };
    Err(Error::invalid(message).hint("convert the array"))
}

/// The first value of a tensor that another dtype does not have; `None` if it has all.
fn changed(tensor: &Tensor, to: DType) -> Result<Option<f64>> {
    /// Beyond 2^53, `f64` does not tell integers apart.
    const EXACT: f64 = 9_007_199_254_740_992.0;
    let values = tensor.to_f64s();
    let converted = Tensor::from_f64s(to, tensor.shape(), &values)?.to_f64s();
    let mut pairs = values.into_iter().zip(converted);
    let differs = |(own, new): &(f64, f64)| own != new || own.abs() >= EXACT;
    Ok(pairs.find(differs).map(|(own, _)| own))
}

/// True for numbers as floats, and integers as wider ones.
fn is_taken(from: DType, to: DType) -> bool {
    let is_number = from.is_float() || from.is_int() || from == DType::Bool;
    match to.is_float() {
        true => is_number,
        false => {
            let widens = from.size_bytes() < to.size_bytes();
            from.is_int()
                && to.is_int()
                && widens
                && (from.is_unsigned_int() || !to.is_unsigned_int())
        }
    }
}

impl Dataset for Examples {
    fn len(&self) -> usize {
        self.data.len()
    }

    /// Rows with the dtypes of the inputs.
    fn rows(&self, places: &[usize], epoch: Epoch) -> Result<Batch> {
        let mut batch = self.data.rows(places, epoch)?;
        for (name, tensor) in &mut batch {
            let dtype = self.dtypes[name.as_str()];
            if tensor.dtype() != dtype {
                *tensor = Tensor::from_f64s(dtype, tensor.shape(), &tensor.to_f64s())?;
            }
        }
        Ok(batch)
    }
}
