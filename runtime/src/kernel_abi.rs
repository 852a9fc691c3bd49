//! Calling convention of generated and precompiled CPU kernels.
//!
//! A kernel is an `unsafe extern "C" fn(args: *const *mut u8, begin: u64, end: u64) -> u32`.
//!
//! - `args` holds one pointer per buffer of the step: inputs first, then outputs. A kernel with
//!   `workspace_bytes_per_thread > 0` gets the workspace of the calling thread as the last one
//!   (64 B aligned, contents undefined).
//! - `[begin, end)` is a non-empty range of the step's work items. Items are independent, so any
//!   split over threads is legal.
//! - The result is a code of [`crate::status`].
//! - Kernels never unwind and never allocate.
//!
//! Arena buffers and constants are 64 B aligned. Inputs and outputs may be memory of the caller,
//! or slices of larger tensors in a sub-program: they are aligned to their element size only.

/// Signature of CPU kernels; the module documentation has the contract.
pub type KernelFn = unsafe extern "C" fn(args: *const *mut u8, begin: u64, end: u64) -> u32;
