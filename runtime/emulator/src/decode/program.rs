//! The interpreter's program: one entry, functions inlined, operands as register slots.

use crate::{
    lanes::{LaneFn, Slots},
    parse::ast::LaunchBounds,
    special::Special,
    types::Type,
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
    /// Narrowest access to shared memory in bytes: the grain of the race check.
    pub shared_grain: usize,
    pub bounds: LaunchBounds,
}

/// One parameter of a kernel.
#[derive(Clone, Debug)]
pub(crate) struct ParamLayout {
    pub offset: usize,
    pub size_bytes: usize,
}

/// Contents of a register before a block starts.
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
    pub const ALWAYS: Guard = Guard {
        predicate: NONE,
        flip: 0,
    };
}

/// Operation of an instruction. Operands are in the instruction's slots unless they are here.
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
    LoadMatrix(Box<MatrixAccess>),
    StoreMatrix(Box<MatrixAccess>),
    Mma(Box<Mma>),
    /// `cp.async` of one lane.
    Copy(Box<Copy>),
    CopyCommit,
    /// Until at most this many groups are under way; `None` for all copies, committed or not.
    CopyWait(Option<u32>),
    /// An mbarrier's arrival once the lane's copies are complete.
    CopyArrive(Address),
    Mbarrier(Box<Mbarrier>),
    Bulk(Box<Bulk>),
    BulkCommit,
    BulkWait(u32),
    Wgmma(Box<Wgmma>),
    WgmmaCommit,
    WgmmaWait(u32),
    /// `fence.proxy.async`
    ProxyFence,
    ClusterArrive,
    ClusterWait,
    /// Address `a` in the block of rank `b`, into `d`.
    MapRank {
        wide: bool,
    },
    /// Rank of the block that address `a` is of, into `d`.
    RankOf {
        wide: bool,
    },
}

/// `ldmatrix` and `stmatrix`: 8 x 8 matrices of 16-bit elements, a row per lane.
pub(crate) struct MatrixAccess {
    pub address: Address,
    pub transposed: bool,
    /// A register per matrix.
    pub registers: Vec<u32>,
}

/// Shape of a product: rows, columns, and the axis that is summed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub m: usize,
    pub n: usize,
    pub k: usize,
}

/// `mma.sync`
pub(crate) struct Mma {
    pub shape: Shape,
    pub a: Type,
    pub b: Type,
    pub accumulator: Type,
    /// Clamps integer sums.
    pub saturates: bool,
    pub d: Vec<u32>,
    pub fragments: [Vec<u32>; 3],
}

/// A copy of 4, 8 or 16 bytes from global to shared memory.
pub(crate) struct Copy {
    pub to: Address,
    pub from: Address,
    pub bytes: u32,
    /// Register with the bytes that are read, the rest being zero; [`NONE`] for all.
    pub source_bytes: u32,
}

/// Instructions on mbarriers.
pub(crate) struct Mbarrier {
    pub op: MbarrierOp,
    pub address: Address,
    /// Count, transaction bytes, parity or token: a register, or [`NONE`].
    pub operand: u32,
    /// Token (64 bits) that arrivals return, or [`NONE`].
    pub token: u32,
    /// Predicate: true once the phase is complete.
    pub done: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MbarrierOp {
    Init,
    Invalidate,
    Arrive,
    ArriveDrop,
    /// An arrival that announces bytes.
    ArriveExpect,
    Expect,
    /// `try_wait` and `test_wait`, by parity or by token.
    Wait {
        parity: bool,
        blocking: bool,
    },
}

/// Bulk copies: whole ranges, or tiles of tensors by a tensor map.
pub(crate) struct Bulk {
    pub kind: BulkKind,
    /// In shared memory.
    pub shared: Address,
    /// In global memory, or of the tensor map.
    pub global: Address,
    /// Bytes (a register) of a range; [`NONE`] for tiles.
    pub size: u32,
    /// Of a tile, innermost first: registers.
    pub coordinates: Vec<u32>,
    /// Of a tile in im2col mode: registers with what is added to the places of its pixels.
    pub offsets: Vec<u32>,
    /// Barrier that loads complete on.
    pub mbarrier: Option<Address>,
    /// Register with the ranks that receive a load, or [`NONE`].
    pub ranks: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BulkKind {
    /// Global to shared.
    Load,
    /// Shared to global.
    Store,
    /// Shared to global, combined with the contents there; a range names its element type.
    Reduce(AtomicOp, Option<Type>),
    /// Shared to shared memory of another block: `global` is the source.
    Across,
}

/// `wgmma.mma_async`
pub(crate) struct Wgmma {
    pub shape: Shape,
    pub a: Type,
    pub b: Type,
    pub accumulator: Type,
    pub d: Vec<u32>,
    /// Registers, or the register of a descriptor.
    pub a_registers: Vec<u32>,
    pub a_descriptor: u32,
    pub b_descriptor: u32,
    /// Predicate (and its flip) that keeps the accumulators, or [`NONE`] to always do.
    pub scale_d: (u32, u32),
    pub negate: [bool; 2],
    pub transposed: [bool; 2],
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

/// Extension of an element that is shorter than its register.
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
    /// Volatile, relaxed, acquire or release: such accesses do not race with each other.
    pub is_strong: bool,
    /// A register per element, and whether it is 64 bits wide; slot [`NONE`] discards.
    pub parts: Vec<(u32, bool)>,
}

impl Access {
    /// Of all elements.
    pub fn total_bytes(&self) -> u64 {
        (self.size_bytes * self.parts.len()) as u64
    }
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
    pub ty: Type,
    pub address: Address,
    /// Old values, or [`NONE`].
    pub d: Vec<u32>,
    pub b: Vec<u32>,
    pub c: u32,
}

/// Number and participants of a barrier.
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

/// Operation of the lanes when they have met.
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
    Reduce { op: AtomicOp, ty: Type },
    /// One member is elected: predicate `p`, its lane into `d`.
    Elect,
}
