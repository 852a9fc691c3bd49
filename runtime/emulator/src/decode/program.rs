//! What the interpreter runs: one entry, functions inlined, operands as register slots.

use crate::{
    lanes::{LaneFn, Slots},
    parse::ast::LaunchBounds,
    special::Special,
};

/// No guard, or no register.
pub(crate) const NONE: u32 = u32::MAX;

/// A decoded kernel.
pub(crate) struct Program {
    pub name: String,
    pub code: Vec<Instruction>,
    /// Registers of 32 x 32 bits per warp, constants and specials included.
    pub units: usize,
    pub predicates: usize,
    /// Registers that are set before a block starts.
    pub constants: Vec<(u32, Constant)>,
    /// Byte ranges of the parameters in the parameter buffer, by position.
    pub params: Vec<ParamLayout>,
    pub param_bytes: usize,
    pub shared_static_bytes: usize,
    /// Where `extern __shared__` starts; the launch says how long it is.
    pub shared_dynamic_offset: usize,
    /// `.local` variables and parameters of functions, per thread.
    pub local_bytes: usize,
    pub bounds: LaunchBounds,
}

/// One parameter of a kernel.
#[derive(Clone, Debug)]
pub(crate) struct ParamLayout {
    pub offset: usize,
    pub size_bytes: usize,
}

/// What a register holds before a block starts.
#[derive(Clone, Debug)]
pub(crate) enum Constant {
    /// A value in a 32-bit register.
    Narrow(u32),
    Wide(u64),
    /// Address of a module variable, plus bytes.
    Address(String, i64),
    Special(Special),
    /// All bits of a predicate.
    Predicate(bool),
}

/// One step of the interpreter; a PTX instruction is one or a few.
pub(crate) struct Instruction {
    pub action: Action,
    pub slots: Slots,
    pub guard: Guard,
    /// PTX line, from 1.
    pub line: u32,
    /// CUDA file number and line, where the module has them.
    pub loc: Option<(u32, u32)>,
}

/// Lanes that take part: all, or those of a predicate.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Guard {
    pub predicate: u32,
    /// Exclusive-or with the predicate's bits.
    pub flip: u32,
}

impl Guard {
    pub const ALWAYS: Guard = Guard { predicate: NONE, flip: 0 };
}

/// What an instruction does. Operands are in the instruction's slots unless they are here.
pub(crate) enum Action {
    /// Arithmetic without side effects.
    Lanes(LaneFn),
    Branch(u32),
    Exit,
    Trap,
    Nothing,
    /// Instructions so far, into a 32-bit register, or a 64-bit one.
    Clock {
        wide: bool,
    },
    /// Active lanes into `d`.
    ActiveMask,
    Load(Box<Access>),
    Store(Box<Access>),
    Atomic(Box<Atomic>),
    /// Bytes from one place of local memory to another, per lane.
    CopyLocal {
        from: usize,
        to: usize,
        bytes: usize,
    },
    Sync(Box<WarpSync>),
    Barrier(Box<Barrier>),
}

/// State space of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AddressSpace {
    Generic,
    Global,
    Shared,
    Local,
    /// Parameters of the entry.
    Param,
}

/// Base of an address; the offset is beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Base {
    Zero,
    Narrow(u32),
    Wide(u32),
}

/// How an element shorter than its register fills it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extend {
    Zero,
    Sign,
}

/// An address operand.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Address {
    pub space: AddressSpace,
    pub base: Base,
    pub offset: i64,
}

/// A load or store of one or several elements per lane.
#[derive(Clone, Debug)]
pub(crate) struct Access {
    pub address: Address,
    /// Of one element.
    pub size_bytes: usize,
    pub extend: Extend,
    /// A register per element, and whether it is 64 bits wide; slot [`NONE`] discards.
    pub parts: Vec<(u32, bool)>,
}

/// Arithmetic of an atomic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AtomicOp {
    Add,
    Min,
    Max,
    And,
    Or,
    Xor,
    Exchange,
    CompareAndSwap,
    Increment,
    Decrement,
}

/// An atomic or a reduction; several elements are several atomics.
#[derive(Clone, Debug)]
pub(crate) struct Atomic {
    pub op: AtomicOp,
    pub ty: crate::types::Type,
    pub address: Address,
    /// Old values, or [`NONE`].
    pub d: Vec<u32>,
    pub b: Vec<u32>,
    pub c: u32,
}

/// Which barrier, and who takes part.
#[derive(Clone, Debug)]
pub(crate) struct Barrier {
    /// Barrier number: a register.
    pub id: u32,
    /// Threads that take part: a register, or [`NONE`] for all of the block.
    pub threads: u32,
    /// All live lanes of a warp must arrive together.
    pub is_aligned: bool,
    pub kind: BarrierKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BarrierKind {
    Sync,
    Arrive,
    /// Reductions of predicate `r` (exclusive-or flip) into predicate `p` or register `d`.
    Reduce {
        op: Vote,
        flip: u32,
    },
}

/// Reductions of predicates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Vote {
    All,
    Any,
    Uniform,
    Ballot,
    Count,
}

/// Lane exchanges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shuffle {
    Up,
    Down,
    Butterfly,
    Index,
}

/// Instructions at which the lanes of a member mask meet.
pub(crate) struct WarpSync {
    pub op: WarpOp,
    /// Register with the member mask; [`NONE`] for all live lanes of the warp.
    pub members: u32,
}

/// What those lanes do when they have met.
#[derive(Clone, Copy, Debug)]
pub(crate) enum WarpOp {
    /// `bar.warp.sync`
    Barrier,
    /// `d = a` of another lane (`b`, `c`: lane and clamp), predicate `p` whether it was in range.
    Shuffle { mode: Shuffle },
    /// Predicate `r` (exclusive-or `flip`) into predicate `p`, or register `d` for ballots.
    Vote { op: Vote, flip: u32 },
    /// Lanes with the same `a` into `d`; all the same: predicate `p`.
    Match { all: bool, wide: bool },
    /// `a` of all members into `d`.
    Reduce { op: AtomicOp, ty: crate::types::Type },
    /// One member is elected: predicate `p`, its lane into `d`.
    Elect,
}
