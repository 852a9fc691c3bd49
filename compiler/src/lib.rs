//! A tensor compiler: ONNX models, or graphs built in Rust, to native code for CPUs and GPUs.
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/digits/model.onnx");
//! use gristmill::{DType, Options, Tensor};
//!
//! let model = gristmill::onnx::load(path)?;
//! let program = gristmill::compile(&model, &Options::default())?;
//! let image = Tensor::zeros(DType::F32, &[1, 1, 8, 8])?;
//! let outputs = program.run([("image", image)])?;
//! println!("{}", outputs["probabilities"]);
//! # Ok(())
//! # }
//! ```
//!
//! | to | use |
//! |---|---|
//! | read a model | [`onnx::load`], or [`ir::Graph::parse`] for the text form |
//! | build a graph | [`ir::GraphBuilder`] |
//! | differentiate a graph | [`autodiff::grad`] |
//! | train a model | [`train::Trainer`] |
//! | compile | [`compile`] with [`Options`]: dims, pins, precision, target |
//! | choose devices and threads, compile several models | [`Session`] with [`Settings`] |
//! | run | [`Compiled::run`] by name, [`Executable::run_into`] without allocation of outputs |
//! | compile ahead of time | [`aot::write`] |
//! | keep state between runs | [`Session::resources`], and [`Options::container`] to keep models apart |
//! | read results | [`Outputs`], [`Tensor`] |
//! | ask for devices | [`place::DeviceSet`], [`place::Pin`], [`ir::DeviceScope`] |
//! | read a stage, or pin it in a snapshot test | [`dump`] |
//! | handle errors | [`Error::kind`] and [`Error::node`] |
//!
//! The [`guide`] has a page per subject.

// The promised API: everything that the front page of the documentation lists.
pub mod aot;
pub mod autodiff;
#[cfg(feature = "distributed")]
pub mod distribute;
pub mod dump;
pub mod guide;
pub mod ir;
pub mod onnx;
pub mod place;
pub mod train;

pub use compiled::{
    ClusterTime, Compiled, Executable, Outputs, Source, StepTime, compile, prepare,
};
pub use cost::{Bytes, Measured, Nanos};
pub use error::{Error, ErrorKind, Result};
pub use gristmill_runtime::exec::Resources;
#[cfg(feature = "ndarray")]
pub use gristmill_runtime::ndarray;
pub use gristmill_runtime::npy::{read_npz, write_npz};
pub use gristmill_runtime::{DType, DeviceName, Element, Tensor};
pub use options::{AllReduce, DataParallel, Deal, DimRange, Options, Precision};
pub use session::{HostPool, Session, Settings, Tuning};
pub use target::{Arch, Level, TargetCpu};

// For the command line, tests and benches of this repository: no promise goes with these.
#[doc(hidden)]
pub mod calibrate;
#[doc(hidden)]
pub mod cluster;
#[doc(hidden)]
pub mod codegen;
#[doc(hidden)]
pub mod cost;
#[doc(hidden)]
pub mod interp;
#[doc(hidden)]
pub mod pipeline;
#[doc(hidden)]
pub mod rewrite;
#[doc(hidden)]
pub mod testing;
#[doc(hidden)]
pub mod tune;

/// Items of private modules that the command line uses.
#[doc(hidden)]
pub mod command_line {
    pub use crate::compiled::{InputShapes, ShapeWork, bound, interface};
    pub use crate::options::ConvAlgorithm;
    pub use crate::passes::indexed::{indexed_extents, wrong_index};
    pub use crate::passes::{cut, decides_extents, has_run_time_extents, segments};
    pub use crate::pipeline::LoopTime;
    pub use crate::report::Fallback;
}

mod compiled;
mod error;
mod options;
mod partition;
mod passes;
mod report;
mod schedule;
mod session;
mod target;

pub(crate) use gristmill_runtime::{nearest, units};
pub(crate) use gristmill_solver::rng;

/// Compiles the programs of the README.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
pub struct Readme;
