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
//! | compile | [`compile`] with [`Options`]: devices, dims, limits, precision |
//! | run | [`Compiled::run`] by name, [`Executable::run_into`] without allocation of outputs |
//! | read results | [`Outputs`], [`Tensor`] |
//! | ask for devices | [`place::DeviceSet`], [`place::Pin`], [`ir::DeviceScope`] |
//! | read a stage | [`pipeline::Lowered::text`] with [`pipeline::Stage`] |
//! | handle errors | [`Error::kind`] and [`Error::node`] |
//!
//! The [`guide`] has a page per subject. The other modules are the stages of the compiler, public for
//! its own tests and tools; they change with it.

pub mod calibrate;
pub mod cli;
pub mod cluster;
pub mod codegen;
mod compiled;
pub mod cost;
pub mod deadline;
pub mod dump;
pub mod error;
pub mod guide;
pub mod interp;
pub mod ir;
pub mod nearest;
pub mod onnx;
mod options;
pub mod partition;
pub mod passes;
pub mod pipeline;
pub mod place;
mod random;
pub mod report;
pub mod rewrite;
pub mod schedule;
mod specialisations;
pub mod target;
pub mod testing;
pub mod tune;
pub mod units;

pub use compiled::{Compiled, Executable, Outputs, Source, StepTime, compile, prepare};
pub use error::{Error, ErrorKind, Result};
#[cfg(feature = "ndarray")]
pub use gristmill_runtime::ndarray;
pub use gristmill_runtime::{DType, DeviceName, Tensor};
pub use gristmill_solver::rng;
pub use options::{AllReduce, DimRange, Options, Precision, Tuning};
pub use target::TargetCpu;

/// Compiles the programs of the README.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
pub struct Readme;
