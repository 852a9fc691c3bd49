//! NVRTC, NVIDIA's run-time compiler of CUDA C++: found when it is first asked for, and called through cudarc's bindings. Nothing links it, and no GPU
//! and no driver are needed.
//!
//! [`get`] gives the one library of this process, [`Nvrtc::compile`] PTX and machine code of a source, [`build`] the same for many sources on
//! all cores and through the [`Cache`] on disk. Three floors: the C interface (`sys`), statuses as errors (`program`), and here its owner.

mod cache;
mod find;
mod program;
mod resources;
mod sys;
#[cfg(test)]
mod tests;

use crate::codegen::workers::Workers;
use crate::error::{Error, Result};
use crate::target::Arch;
pub use cache::Cache;
use find::Found;
use program::{Failure, Program};
pub use resources::Resources;
use std::collections::BTreeMap;
use std::ffi::CString;
use std::sync::OnceLock;
use std::time::Instant;

/// An opened NVRTC library.
pub struct Nvrtc {
    found: Found,
    archs: Vec<u32>,
    build: OnceLock<Result<String>>,
}

/// One translation unit for one architecture.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Unit {
    /// CUDA C++ that includes nothing.
    pub source: String,
    /// Name of the source in messages.
    pub name: String,
    /// For which GPUs.
    pub arch: Arch,
}

/// Code of a compiled source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compiled {
    /// PTX for the unit's architecture.
    pub ptx: String,
    /// Machine code; empty when the architecture asks for PTX only.
    pub cubin: Vec<u8>,
    /// Output of compiler and assembler.
    pub log: String,
    /// Resources of each kernel, out of the log.
    pub resources: BTreeMap<String, Resources>,
    /// Time the compilation took when it was done.
    pub compile_ns: u64,
}

/// The library of this process; it is looked for once.
///
/// Errors with `Unsupported` when there is none, naming every place that was looked in.
pub fn get() -> Result<&'static Nvrtc> {
    static OPENED: OnceLock<Result<Nvrtc>> = OnceLock::new();
    let driver = || {
        gristmill_runtime::cuda::driver_version()
            .ok()
            .map(|(major, _)| major)
    };
    OPENED
        .get_or_init(|| Nvrtc::open(&|name| std::env::var_os(name), driver()))
        .as_ref()
        .map_err(Error::clone)
}

impl Nvrtc {
    fn open(env: find::Environment, driver: Option<u32>) -> Result<Nvrtc> {
        let found = find::find(env, driver).map_err(|tried| {
            let places: String = tried.iter().map(|t| format!("\n  {t}")).collect();
            Error::unsupported(format!(
                "NVRTC, the run-time compiler of CUDA, was not found; looked in:{places}"
            ))
            .hint("pip install nvidia-cuda-nvrtc, or GRISTMILL_NVRTC with the path of libnvrtc.so")
        })?;
        let broken = |f: Failure| {
            Error::unsupported(format!("{}: {} failed: {}", found.place, f.call, f.message))
        };
        let mut archs = found.api.get_archs().map_err(broken)?;
        archs.sort_unstable();
        Ok(Nvrtc {
            archs,
            found,
            build: OnceLock::new(),
        })
    }

    /// Path of the library, or the name under which the loader found it.
    pub fn place(&self) -> &str {
        &self.found.place
    }

    /// Major and minor version of the CUDA toolkit that it belongs to.
    pub fn version(&self) -> (u32, u32) {
        self.found.version
    }

    /// Compute capabilities that it compiles for, times ten, ascending.
    pub fn archs(&self) -> &[u32] {
        &self.archs
    }

    /// Version and build as the PTX tells them; two libraries that give different code differ here. Compiles an empty source once.
    pub fn build(&self) -> Result<&str> {
        let build = self.build.get_or_init(|| {
            let least = self.archs.first().copied().unwrap_or(75);
            let empty = Unit {
                source: String::new(),
                name: "empty.cu".to_owned(),
                arch: Arch::new(least, None).ptx_only(),
            };
            let ptx = self.compile(&empty)?.ptx;
            let said = |line: &&str| {
                line.starts_with("// Compiler Build ID") || line.starts_with("// Cuda compilation")
            };
            let lines: Vec<&str> = ptx.lines().filter(said).collect();
            let (major, minor) = self.version();
            Ok(format!("{major}.{minor} {}", lines.join(" ")))
        });
        build.as_ref().map(String::as_str).map_err(Error::clone)
    }

    /// Compiles a source to PTX and machine code.
    ///
    /// Errors with `Unsupported` for an architecture that this version does not know, with `Internal` when the source does not compile:
    /// sources are ours. The message holds the compiler's, which quotes the line.
    pub fn compile(&self, unit: &Unit) -> Result<Compiled> {
        self.check_arch(unit.arch)?;
        let started = Instant::now();
        let text =
            |s: &str| CString::new(s).map_err(|_| Error::internal("a CUDA source holds a NUL"));
        let options = options(unit.arch);
        let options: Result<Vec<CString>> = options.iter().map(|o| text(o)).collect();
        let (source, name) = (text(&unit.source)?, text(&unit.name)?);
        let fail =
            |f: Failure| Error::internal(format!("{}: {}: {}", unit.name, f.call, f.message));
        let program = Program::new(&self.found.api, &source, &name).map_err(fail)?;
        let compiled = program.compile(&options?);
        let log = program.log().map_err(fail)?;
        compiled.map_err(|f| {
            let (log, Unit { name, arch, .. }) = (log.trim_end(), unit);
            let message = format!("{name} does not compile for {arch}: {}\n{log}", f.message);
            Error::internal(message)
        })?;
        let (ptx, cubin) = (program.ptx().map_err(fail)?, program.cubin().map_err(fail)?);
        Ok(Compiled {
            ptx,
            cubin,
            resources: resources::parse(&log),
            log,
            compile_ns: started.elapsed().as_nanos() as u64,
        })
    }

    /// Errors with `Unsupported` for an architecture that this version does not know.
    fn check_arch(&self, arch: Arch) -> Result<()> {
        if self.archs.contains(&arch.capability()) {
            return Ok(());
        }
        let known: Vec<String> = self.archs.iter().map(u32::to_string).collect();
        let ((major, minor), known) = (self.version(), known.join(", "));
        let message =
            format!("NVRTC {major}.{minor} does not compile for {arch}, only for {known}");
        Err(Error::unsupported(message)
            .hint("another --gpu-arch, or another NVRTC through GRISTMILL_NVRTC"))
    }
}

/// Options of every source: results are those of the op table, so nothing is contracted, flushed or
/// approximated.
fn options(arch: Arch) -> Vec<String> {
    vec![
        format!("--gpu-architecture={arch}"),
        "--std=c++17".into(),
        "--fmad=false".into(),
        "--ptxas-options=-v".into(),
    ]
}

/// Compiles sources, equal ones once, on all cores, through the cache. Results are in the order of
/// `units`.
pub fn build(nvrtc: &Nvrtc, cache: Option<&Cache>, units: &[Unit]) -> Vec<Result<Compiled>> {
    let mut distinct: Vec<&Unit> = Vec::new();
    let mut of_unit: BTreeMap<(&str, &str, Arch), usize> = BTreeMap::new();
    for u in units {
        of_unit
            .entry((&u.source, &u.name, u.arch))
            .or_insert_with(|| {
                distinct.push(u);
                distinct.len() - 1
            });
    }
    let workers = Workers::new(gristmill_runtime::cpu::n_cores());
    let made = workers.map(distinct, |unit| build_one(nvrtc, cache, unit));
    let result = |u: &Unit| made[of_unit[&(u.source.as_str(), u.name.as_str(), u.arch)]].clone();
    units.iter().map(result).collect()
}

fn build_one(nvrtc: &Nvrtc, cache: Option<&Cache>, unit: &Unit) -> Result<Compiled> {
    let Some(cache) = cache else {
        return nvrtc.compile(unit);
    };
    let key = cache::key(unit, &options(unit.arch), nvrtc.build()?);
    if let Some(found) = cache.get(&key) {
        return Ok(found);
    }
    let compiled = nvrtc.compile(unit)?;
    cache.put(&key, &compiled);
    Ok(compiled)
}
