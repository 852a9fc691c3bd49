//! The inputs of a run: tensors that the user gives, and random ones for the others.

use crate::heading;
use crate::output::noteln;
use crate::{load, parse};
use clap::Args;
use gristmill::Options;
use gristmill::command_line::{InputShapes, indexed_extents, wrong_index};
use gristmill::ir::{Bindings, Type};
use gristmill::onnx;
use gristmill::{Compiled, Source};
use gristmill::{DType, Tensor};
use gristmill::{Error, ErrorKind, Result};
use gristmill_runtime::command::given::as_declared;
use gristmill_runtime::command::state::{self, StateFlags, Variable};
use gristmill_runtime::dtype::Element;
use gristmill_runtime::exec::Resources;
use gristmill_runtime::nearest::unknown;
use gristmill_runtime::status;
use gristmill_runtime::units::printable;
use gristmill_runtime::with_dtype;
use gristmill_solver::rng::Rng;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Flags that say where the inputs of a run come from.
#[derive(Args)]
pub struct InputArgs {
    /// Read inputs by name from a NumPy archive. Missing inputs are random.
    #[arg(long, value_name = "FILE.npz", help_heading = heading::INPUTS)]
    pub inputs: Option<PathBuf>,
    /// Read one input from a NumPy file.
    #[arg(long, value_name = "NAME=FILE.npy", help_heading = heading::INPUTS)]
    pub input: Vec<String>,
    /// Read the inputs `input_N.pb` of an ONNX test-data folder.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["inputs", "input"], help_heading = heading::INPUTS)]
    pub test_data: Option<PathBuf>,
    /// Seed of random inputs and of `Dropout` with `training_mode`.
    #[arg(long, default_value_t = 0, help_heading = heading::INPUTS)]
    pub seed: u64,
    /// Set a variable of the graph before the run, from a NumPy file. CONTAINER/NAME is a variable of a container.
    #[arg(long, value_name = "NAME=FILE.npy", help_heading = heading::INPUTS)]
    pub variable: Vec<String>,
    /// Set variables before the run, from a safetensors file written by --save-state.
    #[arg(long, value_name = "FILE.safetensors", help_heading = heading::INPUTS)]
    pub state: Option<PathBuf>,
    /// Stop a run that takes longer, e.g. `10s` or `2m`, with exit code 5.
    #[arg(long, value_name = "TIME", value_parser = timeout)]
    pub timeout: Option<Duration>,
    /// Range of the random values of an input, ends included, e.g. `token_type_ids=0..1`.
    ///
    /// By default, floats are normal and booleans are true. Integers are valid indices of the axis they select from, or 0 to 63.
    #[arg(long, value_name = "NAME=LOW..HIGH", help_heading = heading::INPUTS)]
    pub input_range: Vec<String>,
}

impl InputArgs {
    /// The options with the seed.
    pub fn seeded(&self, options: Options) -> Options {
        Options {
            seed: self.seed,
            ..options
        }
    }

    /// Sets variables to the values of flags, and says which ones a file of state leaves as they are.
    pub fn set_variables(&self, known: &[Variable], resources: &Resources) -> Result<()> {
        let flags = StateFlags {
            state: self.state.as_ref(),
            variables: &self.variable,
        };
        let missing = state::set(&flags, known, resources)?;
        if let (Some(path), false) = (&self.state, missing.is_empty()) {
            noteln!("{}", state::missing_text(path, &missing));
        }
        Ok(())
    }
}

/// The inputs of one run, in the model's order.
pub struct Inputs {
    /// The tensors.
    pub tensors: Vec<Tensor>,
    /// Names of the random ones.
    pub random: Vec<String>,
}

impl Inputs {
    /// Says which inputs are random.
    pub fn announce(&self, seed: u64) {
        if !self.random.is_empty() {
            let names: Vec<_> = self.random.iter().map(|name| printable(name)).collect();
            noteln!("random inputs (--seed {seed}): {}", names.join(", "));
        }
    }

    /// An error of a run of a model, with the index that is out of range where inputs give it, and with hints.
    pub fn explain_for(&self, compiled: &Compiled, e: Error) -> Error {
        let e = match is_of_index(&e)
            .then(|| self.wrong_index(compiled))
            .flatten()
        {
            Some(index) => e.detail(index),
            None => e,
        };
        self.explain(e)
    }

    /// The index that is out of range. The graph is imported again for it.
    fn wrong_index(&self, compiled: &Compiled) -> Option<String> {
        match compiled.graph_for(&self.tensors) {
            Ok(graph) => wrong_index(&graph, &self.tensors),
            // The error of the run is the one to report.
            Err(_) => None,
        }
    }

    /// An error of a run, with a hint where random values may be the cause.
    pub fn explain(&self, e: Error) -> Error {
        if e.to_string().ends_with("is read before it was assigned") {
            return e.hint("--variable NAME=FILE.npy or --state FILE.safetensors gives it a value");
        }
        if self.random.is_empty() || e.kind() != ErrorKind::InvalidInput {
            return e;
        }
        e.hint("real values with --inputs, or other random ones with --input-range NAME=LOW..HIGH")
    }
}

/// True for the error of kernels that an index is out of range, without the index.
fn is_of_index(e: &Error) -> bool {
    let known = status::to_error(status::INDEX_OUT_OF_RANGE);
    known.is_some_and(|known| e.to_string().ends_with(&known.to_string()))
}

fn timeout(text: &str) -> Result<Duration, String> {
    parse::time(text).map_err(|e| e.to_string())
}

/// Tensors that the user gives, as read: before compilation, since they may say how many there are.
pub struct Given {
    tensors: Vec<(String, Tensor)>,
    /// True when no input is random.
    is_complete: bool,
}

/// Reads the tensors that flags name.
pub fn read(args: &InputArgs, source: &Source) -> Result<Given> {
    if let Some(folder) = &args.test_data {
        let declared = match source {
            Source::Graph(_) => Vec::new(),
            Source::Onnx(m) => m.declared_inputs()?,
        };
        let tensors = load::test_data(folder, "input", &declared)?;
        return Ok(Given {
            tensors,
            is_complete: true,
        });
    }
    let mut list = match &args.inputs {
        Some(path) => load::archive(path)?,
        None => Vec::new(),
    };
    for flag in &args.input {
        list.push(named_file(flag, source)?);
    }
    Ok(Given {
        tensors: list,
        is_complete: false,
    })
}

impl Given {
    /// A model with an input for each tensor of those that its sequences and optional inputs have here. Sizes in `dims` go first.
    pub fn closing(&self, source: Source, dims: &mut Bindings) -> Result<Source> {
        let Source::Onnx(m) = &source else {
            return Ok(source);
        };
        let mut known = m.structure_by(dims)?;
        if self.is_complete {
            known.extend(self.empty_sequences(m)?);
        }
        let given = self
            .tensors
            .iter()
            .map(|(n, t)| (n.as_str(), t.shape().len()));
        let structure = m.structure_of(&known, given)?;
        Ok(match structure.is_empty() {
            true => source,
            false => Arc::new(m.closed(&structure)?).into(),
        })
    }
}

impl Given {
    /// The sequences of which there is no tensor.
    fn empty_sequences(&self, m: &onnx::Model) -> Result<onnx::Structure> {
        let open = m.open_inputs()?.into_iter();
        let has = |name: String| self.tensors.iter().any(|(given, _)| *given == name);
        let is_empty = |input: &onnx::Declared| {
            input.is_sequence() && !has(onnx::element_name(&input.name, 0))
        };
        Ok(open
            .filter(is_empty)
            .map(|input| (input.name, Vec::new()))
            .collect())
    }
}

/// Collects the inputs of one run, and sets the variables that flags give.
pub fn gather(args: &InputArgs, given: Given, compiled: &Compiled) -> Result<Inputs> {
    args.set_variables(&compiled.variables(), compiled.resources())?;
    let given = match &args.test_data {
        Some(folder) => return test_data(folder, given, compiled),
        None => checked(given, compiled)?,
    };
    let mut source = RandomInputs::new(compiled, args.seed, &args.input_range)?;
    let shapes = source.shapes(&given)?;
    let mut inputs = Inputs {
        tensors: Vec::new(),
        random: Vec::new(),
    };
    for (i, (name, _)) in compiled.inputs().iter().enumerate() {
        let tensor = match given.get(name) {
            Some(tensor) => tensor.clone(),
            None => {
                inputs.random.push(name.clone());
                source.tensor(i, &shapes)?
            }
        };
        inputs.tensors.push(tensor);
    }
    Ok(inputs)
}

/// Shapes of random inputs, and the values of those that decide shapes: enough for compilation, and no large tensor is made.
pub fn shapes(compiled: &Compiled) -> Result<InputShapes> {
    RandomInputs::new(compiled, 0, &[])?.shapes(&BTreeMap::new())
}

/// The inputs of a test-data folder. Files without a name stand for the inputs in order.
fn test_data(folder: &Path, given: Given, compiled: &Compiled) -> Result<Inputs> {
    let mut tensors = given.tensors;
    for ((name, _), (declared, _)) in tensors.iter_mut().zip(compiled.inputs()) {
        if name.is_empty() {
            name.clone_from(declared);
        }
    }
    let bound = compiled.bind(tensors);
    Ok(Inputs {
        tensors: bound.map_err(|e| e.context(folder.display()))?,
        random: Vec::new(),
    })
}

/// Tensors by name, checked against the declared types.
fn checked(list: Given, compiled: &Compiled) -> Result<BTreeMap<String, Tensor>> {
    let mut given = BTreeMap::new();
    for (name, tensor) in list.tensors {
        let tensor = as_declared(tensor, compiled.input_type(&name)?.dtype)?;
        compiled.check_input(&name, &tensor)?;
        if given.insert(name.clone(), tensor).is_some() {
            return Err(Error::invalid(format!("input {name:?} is given twice")));
        }
    }
    Ok(given)
}

/// The parts of a flag `--input`.
pub fn name_and_file(flag: &str) -> Result<(&str, &str)> {
    let parts = flag.split_once('=');
    parts.ok_or_else(|| Error::invalid(format!("--input {flag:?}: expected NAME=FILE.npy")))
}

/// The name and the tensor of a flag `--input`.
fn named_file(flag: &str, source: &Source) -> Result<(String, Tensor)> {
    let (name, path) = name_and_file(flag)?;
    let known = match source {
        Source::Graph(g) => g.input_names.clone(),
        Source::Onnx(m) => names_of(m.declared_inputs()?),
    };
    let whole = name.split_once('[').map_or(name, |(sequence, _)| sequence);
    if !known.iter().any(|known| known == name || known == whole) {
        let known = known.iter().map(String::as_str);
        return Err(Error::invalid(unknown("input", name, known)));
    }
    Ok((name.to_owned(), load::array(Path::new(path))?))
}

fn names_of(declared: Vec<onnx::Declared>) -> Vec<String> {
    declared.into_iter().map(|input| input.name).collect()
}

/// Makes the inputs that nothing gives. Each has a stream of random numbers of its own, so that its values do not depend on the others.
struct RandomInputs<'c> {
    compiled: &'c Compiled,
    random: Random,
    /// Extent of the axis that each input indexes, once it is known.
    extents: Option<Vec<Option<u64>>>,
}

/// Random numbers for each input.
pub struct Random {
    dtypes: Vec<DType>,
    /// Seed of each input.
    seeds: Vec<u64>,
    /// Ranges that the user gives, by input.
    ranges: BTreeMap<usize, (f64, f64)>,
}

impl Random {
    /// Numbers for inputs of these types, with ranges from flags `--input-range`.
    pub fn new(inputs: &[(String, Type)], seed: u64, flags: &[String]) -> Result<Random> {
        let mut seeds = Rng(seed);
        let mut ranges = BTreeMap::new();
        for flag in flags {
            let (input, range) = input_range(flag, inputs)?;
            ranges.insert(input, range);
        }
        Ok(Random {
            dtypes: inputs.iter().map(|(_, ty)| ty.dtype).collect(),
            seeds: inputs.iter().map(|_| seeds.bits()).collect(),
            ranges,
        })
    }

    /// The tensor of input `i`, whose integers are below `extent`.
    pub fn filled(&self, i: usize, shape: &[usize], extent: Option<u64>) -> Result<Tensor> {
        let dtype = self.dtypes[i];
        let mut tensor = Tensor::zeros(dtype, shape)?;
        let mut rng = Rng(self.seeds[i]);
        let last = extent.map_or(63.0, |n| n.saturating_sub(1) as f64);
        let range = self.ranges.get(&i).copied();
        with_dtype!(dtype, T => {
            let elements = tensor.as_mut_slice::<T>();
            match range {
                Some(range) => fill(elements, || between(&mut rng, dtype, range)),
                None if dtype.is_float() => fill(elements, || rng.normal()),
                None if dtype == DType::Bool => fill(elements, || 1.0),
                None => fill(elements, || between(&mut rng, dtype, (0.0, last))),
            }
        });
        Ok(tensor)
    }
}

impl<'c> RandomInputs<'c> {
    fn new(compiled: &'c Compiled, seed: u64, flags: &[String]) -> Result<RandomInputs<'c>> {
        Ok(RandomInputs {
            compiled,
            random: Random::new(compiled.inputs(), seed, flags)?,
            extents: None,
        })
    }

    /// Shapes of all inputs, and values of those that decide shapes.
    fn shapes(&self, given: &BTreeMap<String, Tensor>) -> Result<InputShapes> {
        let mut shapes = InputShapes::default();
        for (i, (name, _)) in self.compiled.inputs().iter().enumerate() {
            let shape = match given.get(name) {
                Some(tensor) => tensor.shape().to_vec(),
                None => self.shape(i)?,
            };
            if self.compiled.value_inputs().contains(name) {
                let value = match given.get(name) {
                    Some(tensor) => tensor.clone(),
                    None => self.random.filled(i, &shape, None)?,
                };
                shapes.values.insert(name.clone(), value);
            }
            shapes.shapes.push(shape);
        }
        Ok(shapes)
    }

    /// Shape of an input that nothing gives. Errors when a symbol has no value.
    fn shape(&self, i: usize) -> Result<Vec<usize>> {
        self.compiled.declared_shape(i).map_err(|open| {
            let (name, ty) = &self.compiled.inputs()[i];
            let symbols = open.join(", ");
            Error::invalid(format!(
                "input {name:?} has type {ty}: give the tensor, or a value for {symbols}"
            ))
            .hint(format!("--set {}=1", open.join("=1 --set ")))
        })
    }

    /// A random tensor for an input.
    fn tensor(&mut self, i: usize, shapes: &InputShapes) -> Result<Tensor> {
        let (name, ty) = &self.compiled.inputs()[i];
        if let Some(value) = shapes.values.get(name) {
            return Ok(value.clone());
        }
        let is_index = matches!(ty.dtype, DType::I32 | DType::I64);
        let extent = if is_index && !self.random.ranges.contains_key(&i) {
            self.extents(shapes)[i]
        } else {
            None
        };
        self.random.filled(i, &shapes.shapes[i], extent)
    }

    /// Extents that inputs index. None are known where the graph cannot be made: compilation says why.
    fn extents(&mut self, shapes: &InputShapes) -> &[Option<u64>] {
        let (compiled, n) = (self.compiled, self.random.seeds.len());
        self.extents.get_or_insert_with(|| {
            let graph = compiled.graph(shapes);
            graph.map_or_else(|_| vec![None; n], |g| indexed_extents(&g))
        })
    }
}

fn fill<T: Element>(elements: &mut [T], mut next: impl FnMut() -> f64) {
    for element in elements {
        *element = T::from_f64(next());
    }
}

/// A uniform number: whole unless the dtype is a float.
fn between(rng: &mut Rng, dtype: DType, (low, high): (f64, f64)) -> f64 {
    if dtype.is_float() {
        let unit = (rng.bits() >> 11) as f64 / (1u64 << 53) as f64;
        return low + unit * (high - low);
    }
    low + rng.number((high - low) as u64 + 1) as f64
}

/// The input that `--input-range` names, and its range.
fn input_range(flag: &str, inputs: &[(String, Type)]) -> Result<(usize, (f64, f64))> {
    let wrong = |why: &str| Error::invalid(format!("--input-range {flag:?}: {why}"));
    let (name, range) = flag
        .rsplit_once('=')
        .ok_or_else(|| wrong("expected NAME=LOW..HIGH"))?;
    let known = || inputs.iter().map(|(known, _)| known.as_str());
    let input = known().position(|known| known == name);
    let input = input.ok_or_else(|| {
        let message = unknown("input", name, known());
        Error::invalid(message).context("--input-range")
    })?;
    let ty = &inputs[input].1;
    let (low, high) = two_numbers(range).ok_or_else(|| wrong("expected two numbers, LOW..HIGH"))?;
    if !holds(ty.dtype, low) || !holds(ty.dtype, high) {
        return Err(wrong(&format!("not a range of {} values", ty.dtype)));
    }
    if low > high {
        return Err(wrong("the range is empty").hint("the smaller number first"));
    }
    Ok((input, (low, high)))
}

/// `-1..0.5`.
fn two_numbers(range: &str) -> Option<(f64, f64)> {
    let (low, high) = range.split_once("..")?;
    Some((low.parse().ok()?, high.parse().ok()?))
}

/// True when a dtype has a number: whole for integers, and in a range in which every whole number is exact.
fn holds(dtype: DType, value: f64) -> bool {
    if dtype.is_float() {
        return value.is_finite();
    }
    let is_exact = value.abs() <= (1u64 << 53) as f64;
    is_exact && with_dtype!(dtype, T => T::from_f64(value).to_f64() == value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_must_be_values_of_the_dtype() {
        assert!(holds(DType::F32, -0.5) && !holds(DType::F32, f64::INFINITY));
        assert!(holds(DType::I8, -128.0) && !holds(DType::I8, 128.0));
        assert!(!holds(DType::I64, 0.5) && !holds(DType::I64, 1e17) && !holds(DType::U8, -1.0));
        assert!(holds(DType::Bool, 1.0) && !holds(DType::Bool, 2.0));
        let mut rng = Rng(1);
        for dtype in [DType::I32, DType::F32] {
            let values = (0..200).map(|_| between(&mut rng, dtype, (-1.0, 2.0)));
            assert!(values.into_iter().all(|v| (-1.0..=2.0).contains(&v)));
        }
    }
}
