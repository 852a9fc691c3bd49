//! Executes compiled gristmill programs: tensors, devices, the plain-data [`program::Program`] and the executor.
//!
//! This crate never sees ONNX, egg or Cranelift: an ahead-of-time binary links it and `gristmill-kernels` only. Without its default
//! features (`cuda`, for GPUs, `npz`, for NumPy files, and `safetensors`, for saved variables) it is what an [`image`] of a program for CPUs needs, and no more.

pub use gristmill_kernels::float8;
pub use half;
#[cfg(feature = "ndarray")]
pub use ndarray;

#[cfg(feature = "ndarray")]
mod arrays;
#[cfg(all(feature = "npz", feature = "safetensors"))]
pub mod command;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod device;
mod display;
pub mod driver;
pub mod dtype;
pub mod error;
pub mod exec;
pub mod files;
pub mod gpu;
pub mod heap;
pub mod image;
pub mod kernel_abi;
pub mod nearest;
#[cfg(feature = "npz")]
pub mod npy;
pub mod perf;
pub mod printable;
pub mod product;
pub mod program;
#[cfg(feature = "safetensors")]
pub mod safetensors;
pub mod status;
#[doc(hidden)]
pub mod sync;
pub mod tensor;
pub mod text;
pub mod units;

pub use device::DeviceName;
pub use dtype::{DType, Element};
pub use error::{Error, ErrorKind};
pub use tensor::Tensor;
