#![doc = include_str!("../../README.md")]

pub mod calibrate;
pub mod cli;
pub mod cluster;
pub mod codegen;
mod compiled;
pub mod cost;
pub mod deadline;
pub mod error;
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
pub use gristmill_runtime::{DType, DeviceName, Tensor};
pub use gristmill_solver::rng;
pub use options::{AllReduce, DimRange, Options, Precision, Tuning};
pub use target::TargetCpu;
