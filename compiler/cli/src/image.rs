//! Images in the place of models: what they are, and their inputs.

use crate::args::{CompileArgs, DimFlags};
use crate::inputs::{self, InputArgs, Inputs};
use crate::output::{noteln, outln};
use crate::{load, print_json};
use gristmill::DimRange;
use gristmill::Tensor;
use gristmill::ir::{Bindings, Type};
use gristmill::{Error, Result};
use gristmill_runtime::command::given::{
    check_names, check_ranks, checked, cpu_text, dims_text, has_shape, input_names, n_elements,
    no_code, only, shapes_text, value_text,
};
use gristmill_runtime::command::state::variables;
use gristmill_runtime::cpu::n_cores;
use gristmill_runtime::exec::{ExecOptions, Executor, Lanes, Pool, Resources};
use gristmill_runtime::files;
use gristmill_runtime::image::{Image, Kind, MAGIC, Variant};
use gristmill_runtime::nearest::unknown;
use gristmill_runtime::program::{IoSpec, Program};
use gristmill_runtime::units::{printable, size};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
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
    pub resources: Arc<Resources>,
    pub program: Arc<Program>,
    pub inputs: Inputs,
}

impl Ready {
    /// The program for the inputs of flags, with threads and variables.
    pub fn of(path: &Path, args: &InputArgs, flags: &CompileArgs) -> Result<Ready> {
        if let Some(flag) = flags.given_for_compilation().first() {
            let message = format!("{flag} is for compilation, and the image is compiled");
            return Err(Error::invalid(message).hint("gristmill compile takes it"));
        }
        let image = open(path)?;
        let given = given(args, &image)?;
        let chosen = Wanted::of(&image, &given, &flags.dims)?.variant(&image)?;
        let program = chosen.program.clone();
        let inputs = gather(args, &given, chosen)?;
        announce(&image, chosen, &inputs);
        let resources = Arc::new(Resources::default());
        args.set_variables(&variables(&program), &resources)?;
        let threads = flags.threads.map_or_else(n_cores, usize::from);
        let options = ExecOptions {
            pool: Arc::new(Pool::new(threads)),
            resources,
            ..ExecOptions::validated()
        };
        let lanes = Lanes::concurrent(program.clone(), &options, threads)?;
        Ok(Ready {
            lanes,
            resources: options.resources,
            program,
            inputs,
        })
    }
}

/// Says which of several variants runs where no tensor does.
fn announce(image: &Image, chosen: Variant, inputs: &Inputs) {
    let is_one_of_several = image.programs().len() > 1;
    if is_one_of_several && inputs.random.len() == inputs.tensors.len() {
        noteln!(
            "variant {}",
            printable(&dims_text(chosen.fixed.dims.iter()))
        );
    }
}

/// Tensors by the names of flags; those of test data without a name stand for the inputs in order.
fn given(args: &InputArgs, image: &Image) -> Result<Vec<(String, Tensor)>> {
    if let Some(folder) = &args.test_data {
        let mut tensors = load::test_data(folder, "input", &[])?;
        for ((name, _), declared) in tensors.iter_mut().zip(input_names(image)) {
            if name.is_empty() {
                declared.clone_into(name);
            }
        }
        return Ok(tensors);
    }
    let mut list = match &args.inputs {
        Some(path) => load::archive(path)?,
        None => Vec::new(),
    };
    for flag in &args.input {
        let (name, path) = inputs::name_and_file(flag)?;
        list.push((name.to_owned(), load::array(Path::new(path))?));
    }
    check_names(image, &list)?;
    Ok(list)
}

/// Sizes of dims, and shapes of tensors, that a run is to have.
struct Wanted<'g> {
    sizes: Bindings,
    ranges: BTreeMap<String, DimRange>,
    given: &'g [(String, Tensor)],
}

impl<'g> Wanted<'g> {
    /// Errors with a dim that no variant has, a tensor that is given twice, or one that no variant could take.
    fn of(image: &Image, given: &'g [(String, Tensor)], flags: &DimFlags) -> Result<Wanted<'g>> {
        let (sizes, ranges) = flags.parse()?;
        check_dims(image, sizes.keys().chain(ranges.keys()))?;
        check_ranks(image, given)?;
        Ok(Wanted {
            sizes,
            ranges,
            given,
        })
    }

    /// The variant that fits; the one of the largest inputs where several do.
    fn variant<'i>(&self, image: &'i Image) -> Result<Variant<'i>> {
        let fitting = image.variants().filter(|v| self.fits(v));
        let largest = fitting.max_by_key(|v| n_elements(v.program));
        largest.ok_or_else(|| self.no_variant(image))
    }

    fn fits(&self, v: &Variant) -> bool {
        let mut dims = v.fixed.dims.iter();
        let has_dims = dims.all(|(dim, n)| {
            let is_size = self.sizes.get(dim).is_none_or(|want| want == n);
            is_size && self.ranges.get(dim).is_none_or(|range| range.contains(*n))
        });
        let mut inputs = v.program.inputs.iter();
        has_dims && inputs.all(|spec| has_shape(spec, self.given))
    }

    fn no_variant(&self, image: &Image) -> Error {
        let sizes = self.sizes.iter().map(|(dim, n)| format!("{dim}={n}"));
        let ranges = self
            .ranges
            .iter()
            .map(|(dim, range)| format!("{dim}={range}"));
        let message = no_code(image, sizes.chain(ranges), self.given);
        Error::invalid(message).hint("gristmill compile with --shape DIM=N,N,.. for further sizes")
    }
}

/// Errors with a dim that no variant has.
fn check_dims<'d>(image: &Image, mut dims: impl Iterator<Item = &'d String>) -> Result<()> {
    let sizes = image.variants().flat_map(|v| &v.fixed.dims);
    let known: BTreeSet<&str> = sizes.map(|(dim, _)| dim.as_str()).collect();
    match dims.find(|dim| !known.contains(dim.as_str())) {
        Some(dim) => Err(Error::invalid(unknown("dim", dim, known))),
        None => Ok(()),
    }
}

fn gather(args: &InputArgs, given: &[(String, Tensor)], chosen: Variant) -> Result<Inputs> {
    let types = types(chosen.program);
    let random = inputs::Random::new(&types, args.seed, &args.input_range)?;
    let mut found = Inputs {
        tensors: Vec::new(),
        random: Vec::new(),
    };
    for (i, (name, ty)) in types.iter().enumerate() {
        let tensor = match only(name, given)? {
            Some(tensor) => checked(&chosen.program.inputs[i], tensor)?,
            None if args.test_data.is_some() => {
                return Err(Error::invalid(format!("input {name:?} ({ty}) is missing")));
            }
            None => {
                found.random.push(name.clone());
                let extent = chosen.fixed.indexed.get(i).copied().flatten();
                random.filled(i, &chosen.program.inputs[i].shape, extent)?
            }
        };
        found.tensors.push(tensor);
    }
    Ok(found)
}

/// Names and types of a program's inputs.
fn types(program: &Program) -> Vec<(String, Type)> {
    let ty = |spec: &IoSpec| Type::new(spec.dtype, spec.shape.iter().copied());
    let inputs = program.inputs.iter();
    inputs.map(|spec| (spec.name.clone(), ty(spec))).collect()
}

/// `gristmill inspect` of an image.
pub fn inspect(path: &Path, set: &[String], json: bool) -> Result<()> {
    let image = open(path)?;
    let chosen = with_sizes(&image, set)?;
    if json {
        print_json("inspect", to_json(&image));
    } else {
        print(&image, chosen);
    }
    Ok(())
}

/// The variant of flags `--set`; the first where there are none.
fn with_sizes<'i>(image: &'i Image, set: &[String]) -> Result<Option<Variant<'i>>> {
    if set.is_empty() {
        return Ok(image.variants().next());
    }
    let flags = DimFlags {
        set: set.to_vec(),
        shape: Vec::new(),
    };
    Wanted::of(image, &[], &flags)?.variant(image).map(Some)
}

fn print(image: &Image, chosen: Option<Variant>) {
    let about = image.about();
    let (name, version, system) = (&about.name, &about.version, &about.system);
    outln!("image of {name:?}  gristmill {version}");
    outln!("for {system}, {}", cpu_text(image));
    if let Some(Variant { program, .. }) = chosen {
        program
            .inputs
            .iter()
            .for_each(|i| outln!("{}", value_text("input ", i)));
        program
            .outputs
            .iter()
            .for_each(|o| outln!("{}", value_text("output", o)));
        for variable in variables(program) {
            outln!("{variable}");
        }
    }
    for v in image.variants() {
        let dims = dims_text(v.fixed.dims.iter());
        outln!("variant {}: {}", printable(&dims), shapes_text(v.program));
    }
    for section in image.sections() {
        outln!("{:<10} {}", section.kind.name(), size(section.bytes as u64));
    }
}

fn to_json(image: &Image) -> Value {
    let about = image.about();
    let spec = |s: &IoSpec| json!({ "name": s.name, "dtype": s.dtype.name(), "shape": s.shape });
    let variant = |v: Variant| {
        json!({
            "dims": v.fixed.dims.iter().cloned().collect::<Bindings>(),
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
        "measured": about.measured != 0,
        "variants": image.variants().map(variant).collect::<Vec<_>>(),
        "sections": sections.collect::<Vec<_>>(),
    })
}

/// `gristmill check` of an image: that it runs here, and is as it was written.
pub fn check(path: &Path, set: &[String], json: bool) -> Result<()> {
    let image = open(path)?;
    with_sizes(&image, set)?;
    image.verify().map_err(|e| e.context(path.display()))?;
    for program in image.programs() {
        Executor::new(program.clone(), &ExecOptions::validated())?;
    }
    let constants = image
        .sections()
        .iter()
        .filter(|s| [Kind::Constants, Kind::Weights].contains(&s.kind));
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
