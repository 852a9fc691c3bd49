//! Generated code against the interpreter.

mod contract;
mod harness;
mod maps;
mod ops;
