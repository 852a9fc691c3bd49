//! Code generation: each cluster of a partition becomes kernels and a plan of their calls.
//!
//! [`cpu::compile_clusters`] takes a graph whose top-level nodes are clusters with static shapes and
//! returns [`plan::CompiledKernels`]. The schedule later decides the addresses of a plan's buffers
//! and the order of its steps.

mod access;
pub mod assemble;
mod body;
pub mod cpu;
pub mod cuda;
pub mod kernel_forms;
mod loops;
pub mod packing;
mod phases;
mod placed;
pub mod plan;
mod pull;
pub mod store;
mod strided;
#[cfg(test)]
pub(crate) mod testing;
pub mod workers;
