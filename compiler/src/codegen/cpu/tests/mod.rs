//! Generated code against the interpreter.

mod contract;
mod harness;
mod ops;
