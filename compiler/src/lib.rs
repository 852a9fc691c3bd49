//! The gristmill tensor compiler.

pub mod cluster;
pub mod codegen;
pub mod cost;
pub mod error;
pub mod interp;
pub mod ir;
pub mod nearest;
pub mod onnx;
pub mod partition;
pub mod place;
pub mod rewrite;
pub mod schedule;
pub mod testing;
pub mod vecprog;

pub use error::{Error, ErrorKind, Result};
pub use gristmill_runtime::{DType, Tensor};
