//! Generated code against the interpreter.

mod contract;
pub(super) mod harness;
mod lanes;
mod maps;
mod ops;
mod pinned;
mod target;
