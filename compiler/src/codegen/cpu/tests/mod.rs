//! Generated code against the interpreter.

mod bytes;
mod columns;
mod contract;
mod harness;
mod lanes;
mod maps;
mod ops;
mod pinned;
mod regions;
mod standardize;
mod target;
