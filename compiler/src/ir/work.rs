//! Arithmetic, a column of the op table: operations of an op by class, from the types of operands and results.
//!
//! Ops without arithmetic, such as views, have none, or one operation per element written where positions are computed. Regions count by
//! themselves.

use super::dim::Dim;
use super::ops::Op;
use super::types::Type;

/// Classes of arithmetic with different efficiency.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum WorkClass {
    /// Element-wise arithmetic and index maps.
    Map,
    /// Reductions, softmax, normalisation.
    Reduce,
    /// Matrix products.
    MatMul,
    /// Convolutions.
    Conv,
    /// Pooling.
    Window,
    /// Fused attention.
    Attention,
    /// Reads at computed positions.
    Gather,
    /// Writes at computed positions.
    Scatter,
    /// Sort and top-k.
    Sort,
    /// Running sums.
    Scan,
}

impl WorkClass {
    /// All classes, with their names in profiles.
    pub const NAMES: [(WorkClass, &str); 10] = [
        (WorkClass::Map, "map"),
        (WorkClass::Reduce, "reduce"),
        (WorkClass::MatMul, "matmul"),
        (WorkClass::Conv, "conv"),
        (WorkClass::Window, "window"),
        (WorkClass::Attention, "attention"),
        (WorkClass::Gather, "gather"),
        (WorkClass::Scatter, "scatter"),
        (WorkClass::Sort, "sort"),
        (WorkClass::Scan, "scan"),
    ];

    /// Its name in profiles.
    pub fn name(self) -> &'static str {
        let named = WorkClass::NAMES.iter().find(|(class, _)| *class == self);
        named.expect("NAMES lists all classes").1
    }
}

/// Arithmetic of one op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Count {
    /// Class, which has an efficiency.
    pub class: WorkClass,
    /// Operations; a fused multiply-add counts as two.
    pub flops: u64,
    /// Time lost beside the arithmetic, as a number of operations.
    pub overhead_flops: u64,
}

/// An op with its types, from which its arithmetic is counted.
pub struct Sizes<'a> {
    /// The op.
    pub op: &'a Op,
    /// Types of its operands.
    pub operands: &'a [&'a Type],
    /// Types of its results.
    pub results: &'a [&'a Type],
    /// Extent of a dim, which may be symbolic.
    pub extent: &'a dyn Fn(&Dim) -> u64,
}

impl Sizes<'_> {
    pub(super) fn elements(&self, ty: Option<&&Type>) -> u64 {
        ty.map_or(0, |t| self.product(&t.shape))
    }

    pub(super) fn product(&self, dims: &[Dim]) -> u64 {
        product(dims.iter().map(self.extent))
    }

    /// Elements of the first operand.
    pub(super) fn n_in(&self) -> u64 {
        self.elements(self.operands.first())
    }

    /// Elements of the first result.
    pub(super) fn n_out(&self) -> u64 {
        self.elements(self.results.first())
    }

    /// Extent of an axis of an operand, counted from the last.
    pub(super) fn extent_from_end(&self, operand: usize, i: usize) -> u64 {
        let axis = self.operands[operand].shape.iter().rev().nth(i);
        axis.map_or(1, self.extent)
    }
}

/// A product of extents; saturates.
pub(crate) fn product(extents: impl Iterator<Item = u64>) -> u64 {
    extents.fold(1, u64::saturating_mul)
}

pub(super) fn count(class: WorkClass, flops: u64) -> Count {
    Count {
        class,
        flops,
        overhead_flops: 0,
    }
}

/// No arithmetic.
pub(super) fn none(_: &Sizes) -> Count {
    count(WorkClass::Map, 0)
}

/// One operation per element of the operand.
pub(super) fn reduction(s: &Sizes) -> Count {
    count(WorkClass::Reduce, s.n_in())
}

/// Windows with so many operations each.
pub(super) fn windows(s: &Sizes, flops: u64) -> Count {
    count(WorkClass::Window, s.n_out().saturating_mul(flops))
}
