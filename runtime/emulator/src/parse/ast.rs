//! A parsed module: plain data, names resolved as far as a function's scopes go.

use std::collections::HashMap;

use crate::types::Type;

/// Where a variable lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Space {
    Param,
    Shared,
    Global,
    Const,
    Local,
}

/// A declared variable, parameter or array.
#[derive(Clone, Debug)]
pub(crate) struct Variable {
    pub name: String,
    pub space: Space,
    pub align: usize,
    /// Zero for arrays of no stated length.
    pub size_bytes: usize,
    /// First bytes, as many as the initialiser gives.
    pub init: Vec<u8>,
    /// Pointers in the initialiser: byte offset, name, addend.
    pub pointers: Vec<(usize, String, i64)>,
}

/// One operand of an instruction.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Operand {
    /// Index into [`Function::registers`].
    Register(u32),
    /// A predicate register, negated.
    Not(u32),
    /// The same before names are looked up.
    Negated(String),
    /// `%tid.x` and the like, with the percent sign.
    Special(String),
    /// Two's complement; wide enough for every integer type.
    Integer(u64),
    Float32(u32),
    Float64(u64),
    /// Index into [`Function::variables`], plus bytes.
    Variable(usize, i64),
    /// Index into [`Function::labels`].
    Label(usize),
    /// A module variable or a function, plus bytes.
    Global(String, i64),
    /// `[base + offset]`
    Memory(Box<Operand>, i64),
    /// `[map, {coordinates}]`
    Tensor(Box<Operand>, Vec<Operand>),
    Vector(Vec<Operand>),
    /// Operands between round brackets: arguments of calls.
    List(Vec<Operand>),
    /// `a|b`
    Pair(Box<Operand>, Box<Operand>),
    /// `_`
    Sink,
}

/// One instruction.
#[derive(Clone, Debug)]
pub(crate) struct Statement {
    pub line: u32,
    /// Index into [`Source::files`] and line of the CUDA source, from `.loc`.
    pub loc: Option<(u32, u32)>,
    /// Predicate register, and whether it is negated.
    pub guard: Option<(u32, bool)>,
    pub opcode: String,
    pub operands: Vec<Operand>,
}

/// Directives of an entry about its launch.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LaunchBounds {
    /// Threads per block at most, by `.maxntid`.
    pub max_threads: Option<[u32; 3]>,
    /// Threads per block exactly, by `.reqntid`.
    pub required_threads: Option<[u32; 3]>,
    /// Blocks per cluster, by `.reqnctapercluster`.
    pub cluster: Option<[u32; 3]>,
}

/// An `.entry` or a `.func` with a body.
#[derive(Clone, Debug, Default)]
pub(crate) struct Function {
    pub name: String,
    pub line: u32,
    pub is_entry: bool,
    pub bounds: LaunchBounds,
    /// Types of the virtual registers.
    pub registers: Vec<Type>,
    /// Parameters, return values, and declarations of the body; `params` and `returns` index it.
    pub variables: Vec<Variable>,
    pub params: Vec<usize>,
    pub returns: Vec<usize>,
    /// Statement that each label stands before, with its name.
    pub labels: Vec<(String, usize)>,
    pub body: Vec<Statement>,
}

/// The parsed text.
#[derive(Clone, Debug, Default)]
pub(crate) struct Source {
    pub functions: HashMap<String, Function>,
    /// `.global`, `.const` and module-level `.shared` variables, in order.
    pub variables: Vec<Variable>,
    /// CUDA source files by the numbers of `.file`.
    pub files: HashMap<u32, String>,
}
