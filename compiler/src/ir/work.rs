//! Arithmetic, a column of the op table: operations of an op by class, from the types of operands and results.
//!
//! Ops that only name or move data have none, or one operation per element written where positions are computed. Regions count by
//! themselves.

use super::dim::Dim;
use super::ops::{Layout, Op};
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
    /// Time lost beside the arithmetic, as the operations that would take as long.
    pub overhead_flops: u64,
}

/// An op with the types that its arithmetic is counted from.
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
    fn elements(&self, ty: Option<&&Type>) -> u64 {
        ty.map_or(0, |t| self.product(&t.shape))
    }

    fn product(&self, dims: &[Dim]) -> u64 {
        product(dims.iter().map(self.extent))
    }

    /// Elements of the first operand.
    fn n_in(&self) -> u64 {
        self.elements(self.operands.first())
    }

    /// Elements of the first result.
    fn n_out(&self) -> u64 {
        self.elements(self.results.first())
    }

    /// Extent of an axis of an operand, counted from the last.
    fn extent_from_end(&self, operand: usize, i: usize) -> u64 {
        let axis = self.operands[operand].shape.iter().rev().nth(i);
        axis.map_or(1, self.extent)
    }
}

/// A product of extents; saturates.
pub(crate) fn product(extents: impl Iterator<Item = u64>) -> u64 {
    extents.fold(1, u64::saturating_mul)
}

fn count(class: WorkClass, flops: u64) -> Count {
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

pub(super) fn map(s: &Sizes) -> Count {
    let flops = match s.op {
        Op::Map(op) => op.spec().flops.max(1),
        _ => 1,
    };
    count(WorkClass::Map, s.n_out().saturating_mul(u64::from(flops)))
}

/// One operation per element of the operand.
pub(super) fn reduction(s: &Sizes) -> Count {
    count(WorkClass::Reduce, s.n_in())
}

pub(super) fn softmax(s: &Sizes) -> Count {
    count(WorkClass::Reduce, s.n_in().saturating_mul(18))
}

pub(super) fn normalisation(s: &Sizes) -> Count {
    count(WorkClass::Reduce, s.n_in().saturating_mul(6))
}

/// A product of depth `k` takes about as long as one of depth `k` plus this at full speed: tiles are filled, drained and written back.
/// (Measured: batches of depth 64 run at two thirds of the speed of those of depth 768.)
const PRODUCT_OVERHEAD_DEPTH: u64 = 32;

pub(super) fn matmul(s: &Sizes) -> Count {
    let of_depth = |k| product([2, s.n_out(), k].into_iter());
    Count {
        overhead_flops: of_depth(PRODUCT_OVERHEAD_DEPTH),
        ..count(WorkClass::MatMul, of_depth(s.extent_from_end(0, 0)))
    }
}

/// A multiply-add for each tap of one group.
pub(super) fn conv(s: &Sizes) -> Count {
    let weights = &s.operands[1].shape;
    let is_last = matches!(s.op, Op::Conv { layout, .. } if *layout == Layout::ChannelsLast);
    let out_axis = if is_last {
        weights.rank().saturating_sub(1)
    } else {
        0
    };
    let taps = weights.iter().enumerate().filter(|(i, _)| *i != out_axis);
    let taps = product(taps.map(|(_, d)| (s.extent)(d)));
    count(WorkClass::Conv, product([2, s.n_out(), taps].into_iter()))
}

pub(super) fn conv_transpose(s: &Sizes) -> Count {
    let taps = s.product(s.operands[1].shape.get(1..).unwrap_or(&[]));
    count(WorkClass::Conv, product([2, s.n_in(), taps].into_iter()))
}

/// Ten rounds of two products and six other operations for each four elements, with their moves.
pub(super) fn random_bits(s: &Sizes) -> Count {
    count(WorkClass::Map, s.n_out().saturating_mul(30))
}

/// One operation per element of each window.
pub(super) fn pool(s: &Sizes) -> Count {
    let taps = match s.op {
        Op::Pool { size, .. } | Op::MaxPoolIndices { size, .. } => size.as_slice(),
        _ => &[],
    };
    windows(s, product(taps.iter().map(|&n| n as u64)))
}

/// A comparison and an addition per element of each window, of which there are as many as the last operand has elements.
pub(super) fn max_pool_grad(s: &Sizes) -> Count {
    let Op::MaxPoolGrad { size, .. } = s.op else {
        return count(WorkClass::Window, 0);
    };
    let taps = product(size.iter().map(|&n| n as u64));
    let n_windows = s.elements(s.operands.last());
    count(WorkClass::Window, product([2, n_windows, taps].into_iter()))
}

/// Windows that take so many operations each.
pub(super) fn windows(s: &Sizes, flops: u64) -> Count {
    count(WorkClass::Window, s.n_out().saturating_mul(flops))
}

/// Two products and a softmax.
pub(super) fn attention(s: &Sizes) -> Count {
    let n_keys = s.extent_from_end(1, 1);
    let (head, value) = (s.extent_from_end(0, 0), s.extent_from_end(2, 0));
    let scores = (s.n_in() / head.max(1)).saturating_mul(n_keys);
    let per_score = 2 * head + 2 * value + 14;
    count(WorkClass::Attention, scores.saturating_mul(per_score))
}

pub(super) fn gather(s: &Sizes) -> Count {
    count(WorkClass::Gather, s.n_out())
}

/// One operation per element of the last operand, the updates.
pub(super) fn scatter(s: &Sizes) -> Count {
    count(WorkClass::Scatter, s.elements(s.operands.last()))
}

pub(super) fn sort(s: &Sizes) -> Count {
    count(WorkClass::Sort, s.n_in().saturating_mul(16))
}

pub(super) fn scan(s: &Sizes) -> Count {
    count(WorkClass::Scan, s.n_in())
}
