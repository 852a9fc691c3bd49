//! Ops that have a precompiled kernel and are computed by generated loops all the same.

use crate::cluster::coverage::Uncovered;
use crate::cost::Work;
use crate::error::Error;
use gristmill_kernels::epilogue::MAX_EPILOGUE;
use std::fmt;

/// Why no kernel computes an op where it stands.
#[derive(Clone, Debug)]
pub enum Rejected {
    /// No kernel takes the op with these types.
    Uncovered(Uncovered),
    /// The result has no elements, or sums no terms.
    Empty,
    /// No kernel can step through this operand as it lies in memory.
    Strides(usize),
    /// More loops around the kernel than a descriptor holds.
    Loops,
    /// This op, which fusion put on the tile, has no form there.
    Epilogue(&'static str),
    /// More element-wise ops than a descriptor holds.
    EpilogueLength,
    /// Elements of the constant do not fit 8 bits.
    Bytes,
    /// A constant could not be read or packed.
    Failed(Error),
}

impl Rejected {
    /// True where a kernel might have been expected: the op has one for some operands, and there is something to compute.
    pub fn is_fallback(&self) -> bool {
        !matches!(self, Rejected::Uncovered(Uncovered::Op) | Rejected::Empty)
    }
}

impl From<Uncovered> for Rejected {
    fn from(why: Uncovered) -> Rejected {
        Rejected::Uncovered(why)
    }
}

impl From<Error> for Rejected {
    fn from(e: Error) -> Rejected {
        Rejected::Failed(e)
    }
}

impl From<gristmill_runtime::Error> for Rejected {
    fn from(e: gristmill_runtime::Error) -> Rejected {
        Rejected::Failed(e.into())
    }
}

impl fmt::Display for Rejected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Rejected::Uncovered(why) => write!(f, "{why}"),
            Rejected::Empty => f.write_str("there is nothing to compute"),
            Rejected::Strides(operand) => {
                write!(f, "the kernel cannot step through operand {operand}")
            }
            Rejected::Loops => f.write_str("more loops around the kernel than it takes"),
            Rejected::Epilogue(op) => write!(f, "{op} has no form on the kernel's tile"),
            Rejected::EpilogueLength => {
                write!(f, "more than {MAX_EPILOGUE} ops on the kernel's tile")
            }
            Rejected::Bytes => f.write_str("elements of the constant do not fit 8 bits"),
            Rejected::Failed(e) => write!(f, "{e}"),
        }
    }
}

/// An op that runs in generated loops although it has a kernel.
#[derive(Clone, Debug)]
pub struct Fallback {
    /// Path of the node in the user's model.
    pub node: String,
    /// Name of the op.
    pub op: &'static str,
    /// Why the kernel does not compute it.
    pub why: Rejected,
    /// Arithmetic of the op.
    pub work: Work,
}
