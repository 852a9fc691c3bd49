//! Images in the place of models: what they are, and their inputs.

use super::compile::dims_text;
use super::inputs::{self, InputArgs, Inputs};
use super::output::outln;
use super::{load, print_json};
use crate::Tensor;
use crate::compiled::fits;
use crate::error::{Error, Result};
use crate::ir::{Bindings, Type};
use crate::nearest::unknown;
use crate::units::{printable, size};
use gristmill_runtime::exec::{ExecOptions, Lanes, Pool, Resources};
use gristmill_runtime::files;
use gristmill_runtime::image::{Image, Kind, MAGIC, Variant};
use gristmill_runtime::npy;
use gristmill_runtime::program::{IoSpec, Program, VariableSpec};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

/// True for a file that begins as images do. A file that cannot be read does not: its reader says why.
pub fn is_image(path: &Path) -> bool {
    let mut begin = [0; MAGIC.len()];
    let read = files::open(path).and_then(|mut file| file.read_exact(&mut begin));
    read.is_ok() && begin == MAGIC
}

/// Opens an image that the user names.
pub fn open(path: &Path) -> Result<Image> {
    // SAFETY: the user asks for the code in this file to be run, as for any program that a command line names; the guide says so.
    let image = unsafe { Image::open(path) };
    Ok(image?)
}

/// A program of an image that is ready to run, and its inputs.
pub struct Ready {
    pub lanes: Lanes,
    pub program: Arc<Program>,
    pub inputs: Inputs,
}

impl Ready {
    /// The program for the inputs of flags, with threads and variables.
    pub fn of(path: &Path, args: &InputArgs, dims: &Bindings, threads: usize) -> Result<Ready> {
        let image = open(path)?;
        let given = given(args, &image)?;
        let number = variant(&image, &given, dims)?;
        let program = image.programs()[number].clone();
        let inputs = gather(args, given, &image, &program)?;
        let resources = Arc::new(Resources::default());
        set_variables(&args.variable, &program, &resources)?;
        let options = ExecOptions {
            pool: Arc::new(Pool::new(threads)),
            resources,
            ..ExecOptions::validated()
        };
        let lanes = Lanes::concurrent(program.clone(), &options, threads)?;
        Ok(Ready {
            lanes,
            program,
            inputs,
        })
    }
}

/// Tensors by the names of flags; those of test data without a name stand for the inputs in order.
fn given(args: &InputArgs, image: &Image) -> Result<Vec<(String, Tensor)>> {
    let names = input_names(image);
    if let Some(folder) = &args.test_data {
        let mut tensors = load::test_data(folder, "input", &[])?;
        for ((name, _), declared) in tensors.iter_mut().zip(&names) {
            if name.is_empty() {
                name.clone_from(declared);
            }
        }
        return Ok(tensors);
    }
    let mut list = match &args.inputs {
        Some(path) => npy::read_npz(path)?,
        None => Vec::new(),
    };
    for flag in &args.input {
        let (name, path) = inputs::name_and_file(flag)?;
        list.push((name.to_owned(), Tensor::from_npy(path)?));
    }
    let known = || names.iter().map(String::as_str);
    match list.iter().find(|(name, _)| !names.contains(name)) {
        Some((name, _)) => Err(Error::invalid(unknown("input", name, known()))),
        None => Ok(list),
    }
}

fn input_names(image: &Image) -> Vec<String> {
    let first = image.programs().first();
    let inputs = first.map_or(&[][..], |p| &p.inputs);
    inputs.iter().map(|i| i.name.clone()).collect()
}

/// The number of the program for dims and shapes that are known; the one of the largest inputs where several fit.
fn variant(image: &Image, given: &[(String, Tensor)], dims: &Bindings) -> Result<usize> {
    check_dims(image, dims)?;
    let fits = |v: &Variant| {
        let mut sizes = v.dims.iter();
        let has_dims = sizes.all(|(dim, n)| dims.get(dim).is_none_or(|want| want == n));
        has_dims && v.program.inputs.iter().all(|spec| given_as(spec, given))
    };
    let found = image.variants().enumerate().filter(|(_, v)| fits(v));
    let largest = found.max_by_key(|(_, v)| n_elements(v.program));
    let number = largest.map(|(number, _)| number);
    number.ok_or_else(|| no_variant(image, given, dims))
}

/// Errors with a dim that no variant has.
fn check_dims(image: &Image, dims: &Bindings) -> Result<()> {
    let sizes = image.about().variants.iter().flatten();
    let known: BTreeSet<&str> = sizes.map(|(dim, _)| dim.as_str()).collect();
    match dims.keys().find(|dim| !known.contains(dim.as_str())) {
        Some(dim) => Err(Error::invalid(unknown("dim", dim, known))),
        None => Ok(()),
    }
}

fn n_elements(program: &Program) -> usize {
    let inputs = program.inputs.iter();
    inputs.map(|i| i.shape.iter().product::<usize>()).sum()
}

/// True unless there is a tensor of another shape for an input.
fn given_as(spec: &IoSpec, given: &[(String, Tensor)]) -> bool {
    let mut own = given.iter().filter(|(name, _)| *name == spec.name);
    own.all(|(_, tensor)| tensor.shape() == spec.shape)
}

fn no_variant(image: &Image, given: &[(String, Tensor)], dims: &Bindings) -> Error {
    let shapes = given
        .iter()
        .map(|(n, t)| format!("{} {:?}", printable(n), t.shape()));
    let sizes = dims.iter().map(|(dim, n)| format!("{dim}={n}"));
    let asked: Vec<String> = sizes.chain(shapes).collect();
    let known: Vec<String> = image.programs().iter().map(|p| shapes_text(p)).collect();
    let message = format!(
        "the image has no code for {}; it has {}",
        asked.join(", "),
        known.join("; ")
    );
    Error::invalid(message).hint("gristmill compile with --shape DIM=N,N,.. for further sizes")
}

fn shapes_text(program: &Program) -> String {
    let inputs = program.inputs.iter();
    let shapes = inputs.map(|i| format!("{} {:?}", printable(&i.name), i.shape));
    shapes.collect::<Vec<_>>().join(", ")
}

fn gather(
    args: &InputArgs,
    given: Vec<(String, Tensor)>,
    image: &Image,
    program: &Program,
) -> Result<Inputs> {
    let types: Vec<(String, Type)> = program.inputs.iter().map(type_of).collect();
    let random = inputs::Random::new(&types, args.seed, &args.input_range)?;
    let mut found = Inputs {
        tensors: Vec::new(),
        random: Vec::new(),
    };
    for (i, (name, ty)) in types.iter().enumerate() {
        let tensor = match only(name, &given)? {
            Some(tensor) => checked(name, tensor, ty)?,
            None if args.test_data.is_some() => {
                return Err(Error::invalid(format!("input {name:?} ({ty}) is missing")));
            }
            None => {
                found.random.push(name.clone());
                let extent = image.about().indexed.get(i).copied().flatten();
                random.filled(i, &program.inputs[i].shape, extent)?
            }
        };
        found.tensors.push(tensor);
    }
    Ok(found)
}

fn type_of(spec: &IoSpec) -> (String, Type) {
    let ty = Type::new(spec.dtype, spec.shape.iter().copied());
    (spec.name.clone(), ty)
}

/// The one tensor of a name, if there is one.
fn only<'t>(name: &str, given: &'t [(String, Tensor)]) -> Result<Option<&'t Tensor>> {
    let mut own = given.iter().filter(|(known, _)| known == name);
    match (own.next(), own.next()) {
        (_, Some(_)) => Err(Error::invalid(format!("input {name:?} is given twice"))),
        (found, None) => Ok(found.map(|(_, tensor)| tensor)),
    }
}

fn checked(name: &str, tensor: &Tensor, ty: &Type) -> Result<Tensor> {
    let tensor = inputs::as_declared(tensor.clone(), ty)?;
    if fits(ty, &tensor) {
        return Ok(tensor);
    }
    let (dtype, shape) = (tensor.dtype(), tensor.shape());
    let message = format!("input {name:?}: expected {ty}, got {dtype}{shape:?}");
    Err(Error::invalid(message))
}

fn set_variables(flags: &[String], program: &Program, resources: &Resources) -> Result<()> {
    let known: Vec<String> = program.variables.iter().map(label).collect();
    for flag in flags {
        let (name, path) = inputs::variable_and_file(flag)?;
        let found = known.iter().zip(&program.variables);
        let found = found
            .filter(|(known, _)| *known == name)
            .map(|(_, spec)| spec)
            .next();
        let labels = known.iter().map(String::as_str);
        let spec = found.ok_or_else(|| Error::invalid(unknown("variable", name, labels)))?;
        let value = value_of(spec, Tensor::from_npy(path)?)?;
        resources.set(&spec.container, &spec.name, &value)?;
    }
    Ok(())
}

/// `NAME`, or `CONTAINER/NAME`.
fn label(spec: &VariableSpec) -> String {
    match spec.container.as_str() {
        "" => spec.name.clone(),
        container => format!("{container}/{}", spec.name),
    }
}

/// A value for a variable, of its dtype.
fn value_of(spec: &VariableSpec, value: Tensor) -> Result<Tensor> {
    let ty = Type::new(spec.dtype, value.shape().iter().copied());
    let value = inputs::as_declared(value, &ty)?;
    if value.dtype() == spec.dtype {
        return Ok(value);
    }
    let (name, want, got) = (label(spec), spec.dtype, value.dtype());
    let message = format!("variable {name:?}: expected {want}, got {got}");
    Err(Error::invalid(message))
}

/// `gristmill inspect` of an image.
pub fn inspect(path: &Path, json: bool) -> Result<()> {
    let image = open(path)?;
    if json {
        print_json("inspect", to_json(&image));
    } else {
        print(&image);
    }
    Ok(())
}

fn print(image: &Image) {
    let about = image.about();
    let (name, version, system) = (&about.name, &about.version, &about.system);
    outln!("image of {name:?}  gristmill {version}");
    outln!(
        "for {system}, {}, planned for {} threads",
        cpu(image),
        about.threads
    );
    if let Some(first) = image.programs().first() {
        first.inputs.iter().for_each(|i| print_value("input ", i));
        first.outputs.iter().for_each(|o| print_value("output", o));
    }
    for v in image.variants() {
        let dims = dims_text(v.dims.iter().map(|(dim, n)| (dim, n)));
        outln!("variant {}: {}", printable(&dims), shapes_text(v.program));
    }
    for section in image.sections() {
        outln!("{:<10} {}", section.kind.name(), size(section.bytes as u64));
    }
}

fn print_value(label: &str, spec: &IoSpec) {
    outln!(
        "{label} {}: {}{:?}",
        printable(&spec.name),
        spec.dtype,
        spec.shape
    );
}

/// The features of the CPU that an image needs.
fn cpu(image: &Image) -> String {
    let features = image.about().features.iter();
    let features: Vec<&str> = features.map(|f| f.trim_start_matches("has_")).collect();
    match features.is_empty() {
        true => "any CPU".to_owned(),
        false => features.join(" "),
    }
}

fn to_json(image: &Image) -> Value {
    let about = image.about();
    let spec = |s: &IoSpec| json!({ "name": s.name, "dtype": s.dtype.name(), "shape": s.shape });
    let variant = |v: Variant| {
        json!({
            "dims": v.dims.iter().cloned().collect::<Bindings>(),
            "inputs": v.program.inputs.iter().map(spec).collect::<Vec<_>>(),
            "outputs": v.program.outputs.iter().map(spec).collect::<Vec<_>>(),
        })
    };
    let sections = image
        .sections()
        .iter()
        .map(|s| json!({ "kind": s.kind.name(), "offset": s.offset, "bytes": s.bytes }));
    json!({
        "image": about.name,
        "version": about.version,
        "system": about.system,
        "features": about.features,
        "threads": about.threads,
        "measured": about.measured != 0,
        "variants": image.variants().map(variant).collect::<Vec<_>>(),
        "sections": sections.collect::<Vec<_>>(),
    })
}

/// `gristmill check` of an image: that it runs here, and is as it was written.
pub fn check(path: &Path, json: bool) -> Result<()> {
    let image = open(path)?;
    image.verify().map_err(|e| e.context(path.display()))?;
    let constants = image
        .sections()
        .iter()
        .filter(|s| s.kind == Kind::Constants);
    let bytes: usize = constants.map(|s| s.bytes).sum();
    if json {
        let problems: [Value; 0] = [];
        print_json(
            "check",
            json!({ "image": image.about().name, "problems": problems }),
        );
    } else {
        outln!(
            "the image runs here; its checksums agree, {} of constants too",
            size(bytes as u64)
        );
    }
    Ok(())
}
