//! Errors: in the text of a module, in a call, and in a kernel that runs.

use std::fmt;

/// Category of a [`Fault`], for callers that act on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FaultKind {
    /// The text is not PTX as NVRTC writes it.
    Syntax,
    /// An instruction or directive that the emulator does not have.
    Unsupported,
    /// A call that no kernel has seen yet is wrong: unknown kernel, sizes of parameters, launch limits, freed pointers.
    InvalidCall,
    /// The device's memory, or the shared memory of a block, does not suffice.
    OutOfMemory,
    /// An access outside every buffer, or outside the block's shared, local or parameter space.
    OutOfBounds,
    /// An address without the alignment that the access needs.
    Misaligned,
    /// Two accesses to shared or global memory with nothing that orders them, one of them a write.
    Race,
    /// Lanes that a `.sync` instruction names never arrive at it together.
    Divergence,
    /// Every warp waits, and nothing under way can wake one.
    Deadlock,
    /// The launch executed more instructions than its budget allows.
    Budget,
    /// The kernel executed `trap`, or failed an assertion.
    Trap,
    /// An instruction was used against its rules: an uninitialised barrier, a wrong descriptor, too many arrivals.
    Misuse,
}

/// An error of the emulator. Its text has the place (PTX line, and CUDA line where the module has one), the attempt and the
/// finding.
#[derive(Clone, Debug)]
pub struct Fault {
    kind: FaultKind,
    message: String,
    ptx_line: Option<u32>,
}

impl Fault {
    pub(crate) fn new(kind: FaultKind, message: impl Into<String>) -> Fault {
        Fault {
            kind,
            message: message.into(),
            ptx_line: None,
        }
    }

    /// A fault at `line` of the PTX text, counted from 1.
    pub(crate) fn at(kind: FaultKind, line: u32, message: impl Into<String>) -> Fault {
        Fault {
            kind,
            message: message.into(),
            ptx_line: Some(line),
        }
    }

    /// Kind of the fault.
    pub fn kind(&self) -> FaultKind {
        self.kind
    }

    /// Line of the PTX text, counted from 1, where one line is to blame.
    pub fn ptx_line(&self) -> Option<u32> {
        self.ptx_line
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.ptx_line {
            Some(line) => write!(f, "PTX line {line}: {}", self.message),
            None => f.write_str(&self.message),
        }
    }
}

impl std::error::Error for Fault {}

/// Shorthand of this crate's own functions.
pub(crate) type Result<T> = std::result::Result<T, Fault>;
