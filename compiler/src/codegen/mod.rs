//! Code generation: each cluster of a partition becomes kernels and a plan of how to call them.
//!
//! [`cpu::compile_clusters`] takes a graph whose top-level nodes are clusters with static shapes and gives [`plan::CompiledKernels`]. What
//! the buffers of a plan are, and when its steps run, is decided later by the schedule.

mod access;
pub mod assemble;
mod body;
pub mod cpu;
pub mod cuda;
pub mod forms;
mod phases;
mod placed;
pub mod plan;
mod pull;
mod strided;
#[cfg(test)]
mod testing;
