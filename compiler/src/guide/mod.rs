//! The guide: a page per subject, for users and contributors.
//!
//! - [`devices`]: logical devices, requests by scope and by pin, control dependencies, memory limits, all-reduce.
//! - [`machines`]: servers of several machines, sessions on them, pins across tasks.
//! - [`placement`]: choice and explanation of devices, objectives, plans, planning for another
//!   machine, bare problems and their files.
//! - [`gpus`]: CUDA kernels without a GPU, the emulator, GPUs, precision.
//! - [`quantised`]: 8-bit integer models.
//! - [`state`]: variables, in-place updates, state files.
//! - [`training`]: training and fine-tuning, optimisers, checkpoints, gradients.
//! - [`caching`]: code per shape, measured times, the cache folder, tuning.
//! - [`ahead_of_time`]: executables, libraries and images, to run without a compiler.
//! - [`command_line`]: inputs, dims, search limits, exit codes, JSON.
//! - [`internals`]: for contributors, the code map, invariants, and how to add an op, a pass, a
//!   back end.

#[doc = include_str!("ahead_of_time.md")]
pub mod ahead_of_time {}

#[doc = include_str!("caching.md")]
pub mod caching {}

#[doc = include_str!("command_line.md")]
pub mod command_line {}

#[doc = include_str!("devices.md")]
pub mod devices {}

#[doc = include_str!("gpus.md")]
pub mod gpus {}

#[doc = include_str!("internals.md")]
pub mod internals {}

#[doc = include_str!("machines.md")]
pub mod machines {}

#[doc = include_str!("placement.md")]
pub mod placement {}

#[doc = include_str!("quantised.md")]
pub mod quantised {}

#[doc = include_str!("state.md")]
pub mod state {}

#[doc = include_str!("training.md")]
pub mod training {}
