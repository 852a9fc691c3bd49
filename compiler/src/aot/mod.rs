//! Ahead of time: compiled programs as an image, a file that [`gristmill_runtime::image::Image`] maps and runs without a compiler.
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/digits/model.onnx");
//! # let folder = tempfile::tempdir()?;
//! # let file = folder.path().join("digits.gmx");
//! use gristmill::{DType, Options, Tensor, aot, onnx};
//! use gristmill_runtime::exec::{ExecOptions, Executor};
//! use gristmill_runtime::image::Image;
//!
//! let sizes = aot::Sizes::from([("batch".to_owned(), vec![1, 8])]);
//! aot::write(&onnx::load(model)?, &Options::default(), &sizes, &file)?;
//!
//! // In a program that links the runtime alone. SAFETY: the file was written just now.
//! let image = unsafe { Image::open(&file) }?;
//! let program = image.program_for(&[&[8, 1, 8, 8]])?;
//! let executor = Executor::new(program.clone(), &ExecOptions::validated())?;
//! let outputs = executor.run(&[Tensor::zeros(DType::F32, &[8, 1, 8, 8])?])?;
//! # assert_eq!(outputs.len(), 1);
//! # Ok(())
//! # }
//! ```

mod elf;
mod embedding;
#[doc(hidden)]
pub mod executable;
mod exports;
mod interface;
#[doc(hidden)]
pub mod program_file;

pub use executable::write_executable;

use crate::codegen::cpu::required_features;
use crate::compiled::{Common, Compiled, Source};
use crate::cost::Fnv;
use crate::error::{Error, Result};
use crate::ir::Bindings;
use crate::options::Options;
use crate::pipeline::Config;
use crate::place::Device;
use crate::session::{Session, Settings};
use gristmill_runtime::device::DeviceKind;
use gristmill_runtime::image::{self, About, Fixed, Kind, Section, Spool, system};
use gristmill_runtime::program::{Kernel, Program, Step, StepKind};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::sync::Arc;

/// Sizes of symbolic dims for which an image holds code: several of a dim make several variants, those of several dims all combinations.
pub type Sizes = BTreeMap<String, Vec<usize>>;

/// Most variants of an image.
pub const MAX_VARIANTS: usize = 64;

/// An image that was written.
#[derive(Clone, Debug)]
pub struct Written {
    /// The machine and the model.
    pub about: About,
    /// Parts of the image.
    pub sections: Vec<Section>,
    /// Size of the file in bytes.
    pub bytes: usize,
    /// Warnings about the model, each once.
    pub warnings: Vec<String>,
}

impl Written {
    /// Bytes of constants in a file of their own, whose name [`About::weights`] is.
    pub fn weights_bytes(&self) -> usize {
        let apart = self.sections.iter().filter(|s| s.kind == Kind::Weights);
        apart.map(|s| s.bytes).sum()
    }
}

/// Compiles a model for CPUs and writes it to a file, which is replaced as a whole. Packed weights are in a temporary file without a name
/// beside it meanwhile, so that the disk has room for them twice, and memory for one at a time.
///
/// The devices are those of default [`Settings`]: see [`Session::write_image`] for others.
///
/// Errors for dims without a size, with their names; for models whose extents the data decides; for other devices than CPUs.
pub fn write(
    source: impl Into<Source>,
    options: &Options,
    sizes: &Sizes,
    path: &Path,
) -> Result<Written> {
    Session::new(&Settings::default())?.write_image(source, options, sizes, path)
}

impl Session {
    /// [`write()`] for the devices, and with the measurements, of the session.
    pub fn write_image(
        &self,
        source: impl Into<Source>,
        options: &Options,
        sizes: &Sizes,
        path: &Path,
    ) -> Result<Written> {
        let settings = self.settings();
        let config = Config { settings, options };
        write_with(source.into(), config, sizes, path, &Extra::default())
    }
}

/// Rarely used options.
#[doc(hidden)]
pub struct Extra<'a> {
    /// Another name than that of the model.
    pub name: Option<&'a str>,
    /// True to leave the names of nodes, values and kernels out.
    pub is_nameless: bool,
    /// Name of a file beside the image for the constants.
    pub weights: Option<String>,
    /// Called before each variant is compiled: number, total, sizes of its dims.
    pub progress: &'a dyn Fn(usize, usize, &Bindings),
}

impl Default for Extra<'_> {
    fn default() -> Self {
        Extra {
            name: None,
            is_nameless: false,
            weights: None,
            progress: &|_, _, _| {},
        }
    }
}

/// [`write()`] with rarely used options.
#[doc(hidden)]
pub fn write_with(
    source: Source,
    config: Config,
    sizes: &Sizes,
    path: &Path,
    extra: &Extra,
) -> Result<Written> {
    let Made {
        about,
        programs,
        warnings,
    } = made(source, config, sizes, path, extra)?;
    let sections = image::write(path, &about, &programs)?;
    let bytes = image::total_bytes(&sections);
    Ok(Written {
        about,
        sections,
        bytes,
        warnings,
    })
}

/// A model that was compiled for all sizes.
struct Made {
    about: About,
    programs: Vec<Arc<Program>>,
    warnings: Vec<String>,
}

/// Compiles a model for a file, beside which weights are kept until it is written.
fn made(source: Source, config: Config, sizes: &Sizes, path: &Path, extra: &Extra) -> Result<Made> {
    let source = source.in_container(&config.options.container)?;
    let variants = combinations(sizes, &config.options.dims)?;
    let mut programs = Vec::new();
    let mut about = about(config)?;
    let settings = Settings {
        // Blocks are chosen where the image runs.
        threads: Some(1),
        ..config.settings.clone()
    };
    let session = Session::spooled(&settings, Spool::beside(path)?, config.settings.n_threads())?;
    let common = Common::new(&session, config.options);
    for (i, dims) in variants.iter().enumerate() {
        (extra.progress)(i, variants.len(), dims);
        let options = Options {
            dims: dims.clone(),
            ..config.options.clone()
        };
        let made = variant(&source, &options, &common);
        let (program, fixed) = made.map_err(|e| with_dims(e, dims, sizes))?;
        about.variants.push(fixed);
        programs.push(match extra.is_nameless {
            true => Arc::new(without_names(&program)),
            false => program,
        });
    }
    let name = extra.name.map(str::to_owned);
    about.name = name.unwrap_or_else(|| name_of(&programs));
    about.weights = extra.weights.clone().unwrap_or_default();
    Ok(Made {
        about,
        programs,
        warnings: common.warnings().clone(),
    })
}

/// The program for the dims of some options.
fn variant(
    source: &Source,
    options: &Options,
    common: &Arc<Common>,
) -> Result<(Arc<Program>, Fixed)> {
    let compiled = Compiled::of(source.clone(), options, common)?;
    let (program, indexed) = compiled.static_program()?;
    check_devices(&program)?;
    let dims = options.dims.clone().into_iter().collect();
    Ok((program, Fixed { dims, indexed }))
}

/// The name that programs have from their model.
fn name_of(programs: &[Arc<Program>]) -> String {
    let first = programs.first();
    first.map(|p| p.name.clone()).unwrap_or_default()
}

/// An error with the sizes of the variant in which it arose, where there are several.
fn with_dims(e: Error, dims: &Bindings, sizes: &Sizes) -> Error {
    let chosen = dims.iter().filter(|(dim, _)| sizes.contains_key(*dim));
    let chosen: Vec<String> = chosen.map(|(dim, n)| format!("{dim}={n}")).collect();
    match chosen.is_empty() {
        true => e,
        false => e.context(chosen.join(", ")),
    }
}

/// A program without the names that only people read: those of its interface stay, and so do the keys of tensors between devices.
fn without_names(program: &Program) -> Program {
    let mut program = program.clone();
    for partition in &mut program.partitions {
        partition.buffers.iter_mut().for_each(|b| b.name.clear());
        partition.steps.iter_mut().for_each(strip);
        for kernel in &mut partition.kernels {
            if let Kernel::Cpu(kernel) = kernel {
                kernel.name.clear();
            }
        }
    }
    program
}

fn strip(step: &mut Step) {
    step.origin.clear();
    match &mut step.kind {
        StepKind::If(branches) => {
            for body in [&mut branches.then_branch, &mut branches.else_branch] {
                *body = nameless_body(body);
            }
        }
        StepKind::Loop(repeated) => repeated.body = nameless_body(&repeated.body),
        _ => {}
    }
}

/// A sub-program, whose interface is numbered: nobody gives its inputs by name.
fn nameless_body(body: &Program) -> Arc<Program> {
    let mut body = without_names(body);
    body.name.clear();
    let specs = body.inputs.iter_mut().chain(&mut body.outputs);
    for (i, spec) in specs.enumerate() {
        spec.name = i.to_string();
    }
    Arc::new(body)
}

fn about(config: Config) -> Result<About> {
    let options = config.options;
    Ok(About {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        system: system(),
        isa: options.target_cpu.isa() as u32,
        features: required_features(options.target_cpu)?,
        measured: measured(config),
        ..About::default()
    })
}

/// A hash of the measurements that options bring along; 0 for none.
fn measured(Config { settings, options }: Config) -> u64 {
    let mut kept = settings.kept.iter();
    let has_kept = kept.any(|folder| folder.exists());
    let mut devices = settings.devices.devices.iter();
    if devices.all(Device::has_assumed_rates) && options.measured.is_empty() && !has_kept {
        return 0;
    }
    let mut hash = Fnv::default();
    let text = write!(hash, "{:?} {:?}", settings.devices, options.measured);
    text.map_or(1, |()| hash.value().max(1))
}

/// All combinations of sizes, each with the sizes that are fixed.
fn combinations(sizes: &Sizes, fixed: &Bindings) -> Result<Vec<Bindings>> {
    let mut all = vec![fixed.clone()];
    for (dim, sizes) in sizes {
        if all.len().saturating_mul(sizes.len()) > MAX_VARIANTS {
            let message = format!("the sizes make more than {MAX_VARIANTS} variants");
            return Err(Error::invalid(message).hint("fewer sizes, or several images"));
        }
        if fixed.contains_key(dim) {
            return Err(Error::invalid(format!("dim {dim:?} is given twice")));
        }
        let with = |known: &Bindings, size: usize| {
            let mut dims = known.clone();
            dims.insert(dim.clone(), size);
            dims
        };
        let extended = all
            .iter()
            .flat_map(|b| sizes.iter().map(move |&n| with(b, n)));
        all = extended.collect();
    }
    Ok(all)
}

fn check_devices(program: &Program) -> Result<()> {
    let mut devices = program.partitions.iter().map(|p| &p.device);
    match devices.find(|d| d.kind != DeviceKind::Cpu) {
        None => Ok(()),
        Some(device) => {
            let message = format!("images hold programs for CPUs only, {device} has a part");
            Err(Error::unsupported(message).hint("--devices cpu:1"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_make_all_combinations() {
        let fixed = Bindings::from([("h".to_owned(), 4)]);
        let sizes = Sizes::from([("a".to_owned(), vec![1, 2]), ("b".to_owned(), vec![3])]);
        let all = combinations(&sizes, &fixed).unwrap();
        let values: Vec<Vec<usize>> = all.iter().map(|b| b.values().copied().collect()).collect();
        assert_eq!(values, [[1, 3, 4], [2, 3, 4]]);
        let alone = combinations(&Sizes::new(), &fixed).unwrap();
        assert_eq!(alone, std::slice::from_ref(&fixed));
        let many = Sizes::from([("a".to_owned(), (1..66).collect())]);
        assert!(combinations(&many, &fixed).is_err());
        let twice = Sizes::from([("h".to_owned(), vec![1])]);
        assert!(combinations(&twice, &fixed).is_err());
    }
}
