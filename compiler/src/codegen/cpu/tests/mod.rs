//! Generated code against the interpreter.

mod harness;
mod ops;
