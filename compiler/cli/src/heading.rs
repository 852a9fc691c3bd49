//! Headings of the groups of flags in `--help`.

/// Inputs of a run, sizes of dims, examples.
pub const INPUTS: &str = "Inputs";
/// Devices, their memory and threads, and the placement of nodes.
pub const DEVICES: &str = "Devices and placement";
/// Search and code generation for CPUs.
pub const COMPILATION: &str = "Compilation";
/// Code for GPUs, and the GPUs to use.
pub const GPUS: &str = "GPUs";
/// Loss and update.
pub const TRAINING: &str = "Training";
/// Length of a measurement.
pub const MEASUREMENT: &str = "Measurement";
/// Problems of `place` without a model.
pub const BARE_PROBLEM: &str = "Bare problem";
/// Files and texts to write.
pub const OUTPUT: &str = "Output";
/// Stages, checks and profilers.
pub const DIAGNOSTICS: &str = "Diagnostics";
