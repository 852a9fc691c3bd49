//! The processors that code is made for: CPUs by their instruction sets, GPUs by their architectures.

mod cpu;
mod gpu;

pub use cpu::{Level, TargetCpu};
pub use gpu::Arch;
