//! Generated code against the interpreter.

mod contract;
mod harness;
mod lanes;
mod maps;
mod ops;
