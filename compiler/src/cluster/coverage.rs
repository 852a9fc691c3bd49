//! Coverage: the one table of precompiled CPU kernels, by op, dtype, rank and layout.
//!
//! Fusion asks it which results stay on a tile, code generation which kernel to call, and capability reports which ops run in loops
//! over single elements. It speaks of types alone: reports can ask before shapes are known. Code generation may still find
//! operands in memory without an address for the kernel, and reports a reason of its own.

use super::bytes;
use crate::ir::{Graph, Layout, Node, Op, ReduceKind};
use gristmill_runtime::DType;
use std::fmt;

/// A family of precompiled kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelFamily {
    /// Matrix products.
    Product,
    /// Convolutions.
    Convolution,
    /// Poolings.
    Pooling,
    /// Bilinear samples.
    Samples,
    /// Bins of regions of interest.
    Regions,
    /// Softmax and its logarithm, by rows.
    Softmax,
    /// Layer and root-mean-square normalisation, by rows.
    Normalisation,
    /// Standardisation, by rows or by columns.
    Standardisation,
    /// Reductions, by rows or by columns.
    Reduction,
    /// Fused attention.
    Attention,
    /// Random bits.
    RandomBits,
    /// Functions of bytes by tables.
    Table,
}

/// Why no kernel computes an op.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Uncovered {
    /// No kernel computes the op, whatever its operands are.
    Op,
    /// Kernels of the op take other dtypes.
    Dtype(DType),
    /// Kernels of the op take other ranks.
    Rank(usize),
    /// Kernels of the op take channels last.
    ChannelsFirst,
    /// Rows must lie along these axes for a kernel: a description of them.
    Axes(&'static str),
    /// Keys must be the last axis of a mask, not broadcast.
    Mask,
}

impl fmt::Display for Uncovered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Uncovered::Op => f.write_str("no kernel computes this op"),
            Uncovered::Dtype(dtype) => write!(f, "no kernel for {dtype}"),
            Uncovered::Rank(rank) => write!(f, "no kernel for rank {rank}"),
            Uncovered::ChannelsFirst => f.write_str("kernels take channels last"),
            Uncovered::Axes(axes) => write!(f, "kernels take {axes} only"),
            Uncovered::Mask => f.write_str("the mask is broadcast along the keys"),
        }
    }
}

/// One row of the table: the kernels of an op.
pub struct Row {
    /// The kernels.
    pub family: KernelFamily,
    /// True for the ops of the row.
    is_op: fn(&Op) -> bool,
    /// Dtype of the first operand.
    dtype: DType,
    /// Ranks of the first operand.
    ranks: std::ops::RangeInclusive<usize>,
    /// Conditions beyond dtype and rank.
    fits: fn(&Graph, &Node) -> Result<(), Uncovered>,
    /// True where code generation transposes channels-first operands for the kernel.
    transposes: bool,
    /// True where kernels apply element-wise ops to their tiles.
    pub takes_epilogue: bool,
    /// True for composite ops: code generation writes them out where no kernel computes them.
    pub is_composite: bool,
}

/// The usual values of a row: those of a kernel of `f32` operands of any rank.
const F32: Row = Row {
    family: KernelFamily::Product,
    is_op: |_| false,
    dtype: DType::F32,
    ranks: 0..=usize::MAX,
    fits: |_, _| Ok(()),
    transposes: false,
    takes_epilogue: false,
    is_composite: false,
};

/// Lookups of bytes, for which [`bytes`] decides.
const TABLES: Row = Row {
    family: KernelFamily::Table,
    is_op: |op| matches!(op, Op::Gather { .. }),
    dtype: DType::U8,
    ..F32
};

/// Kernels by the dtype of the first operand; [`bytes`] decides for 8-bit integers.
const TABLE: &[Row] = &[
    Row {
        family: KernelFamily::Product,
        is_op: |op| matches!(op, Op::MatMul),
        takes_epilogue: true,
        ..F32
    },
    Row {
        family: KernelFamily::Convolution,
        is_op: |op| matches!(op, Op::Conv { .. }),
        ranks: 3..=5,
        fits: channels_last,
        transposes: true,
        takes_epilogue: true,
        ..F32
    },
    Row {
        family: KernelFamily::Pooling,
        is_op: |op| matches!(op, Op::Pool { .. } | Op::MaxPoolGrad { .. }),
        ranks: 3..=5,
        fits: channels_last,
        transposes: true,
        ..F32
    },
    Row {
        family: KernelFamily::Samples,
        is_op: |op| matches!(op, Op::Sample { .. }),
        ranks: 4..=4,
        fits: single_positions,
        ..F32
    },
    Row {
        family: KernelFamily::Regions,
        is_op: |op| matches!(op, Op::RoiAlign { .. }),
        ranks: 4..=4,
        ..F32
    },
    Row {
        family: KernelFamily::Softmax,
        is_op: |op| matches!(op, Op::Softmax { .. }),
        fits: along_last_axis,
        is_composite: true,
        ..F32
    },
    Row {
        family: KernelFamily::Normalisation,
        is_op: |op| matches!(op, Op::LayerNorm { .. } | Op::RmsNorm { .. }),
        is_composite: true,
        ..F32
    },
    Row {
        family: KernelFamily::Standardisation,
        is_op: |op| matches!(op, Op::Standardize { .. }),
        is_composite: true,
        ..F32
    },
    Row {
        family: KernelFamily::Reduction,
        is_op: |op| matches!(op, Op::Reduce { .. }),
        fits: reduced_axes,
        ..F32
    },
    Row {
        family: KernelFamily::Attention,
        is_op: |op| matches!(op, Op::Attention { .. }),
        ranks: 0..=4,
        fits: mask_with_keys,
        is_composite: true,
        ..F32
    },
    Row {
        family: KernelFamily::RandomBits,
        is_op: |op| matches!(op, Op::RandomBits { .. }),
        dtype: DType::I64,
        ..F32
    },
];

/// The kernels of an op, whatever its operands are.
///
/// Errors where there are none.
pub fn row(op: &Op) -> Result<&'static Row, Uncovered> {
    let found = TABLE.iter().find(|row| (row.is_op)(op));
    found.ok_or(Uncovered::Op)
}

/// True when kernels of an op take this rank of the first operand.
pub fn takes_rank(op: &Op, rank: usize) -> bool {
    row(op).is_ok_and(|row| row.ranks.contains(&rank))
}

/// The kernels that compute a node as it is.
///
/// Errors tell why there are none.
pub fn kernels(g: &Graph, node: &Node) -> Result<&'static Row, Uncovered> {
    if bytes::lookup(g, node).is_some() {
        return Ok(&TABLES);
    }
    let row = row(&node.op)?;
    if bytes::product(g, node).is_some() {
        return Ok(row);
    }
    let x = g.ty(node.inputs[0]);
    if x.dtype != row.dtype {
        return Err(Uncovered::Dtype(x.dtype));
    }
    if !row.ranks.contains(&x.rank()) {
        return Err(Uncovered::Rank(x.rank()));
    }
    (row.fits)(g, node)?;
    Ok(row)
}

/// The kernels that compute a node, perhaps between transpositions of channels.
///
/// Errors tell why there are none.
pub fn kernels_after_transposition(g: &Graph, node: &Node) -> Result<&'static Row, Uncovered> {
    let found = kernels(g, node);
    match row(&node.op) {
        Ok(row) if row.transposes && matches!(found, Err(Uncovered::ChannelsFirst)) => Ok(row),
        _ => found,
    }
}

/// True for composite ops, written out where no kernel computes them.
pub fn is_composite(op: &Op) -> bool {
    row(op).is_ok_and(|row| row.is_composite)
}

fn channels_last(_: &Graph, node: &Node) -> Result<(), Uncovered> {
    match &node.op {
        Op::Conv { layout, .. } | Op::Pool { layout, .. } | Op::MaxPoolGrad { layout, .. }
            if *layout == Layout::ChannelsFirst =>
        {
            Err(Uncovered::ChannelsFirst)
        }
        _ => Ok(()),
    }
}

fn along_last_axis(g: &Graph, node: &Node) -> Result<(), Uncovered> {
    let rank = g.ty(node.inputs[0]).rank();
    match node.op {
        Op::Softmax { axis, .. } if axis + 1 != rank => Err(Uncovered::Axes("the last axis")),
        _ => Ok(()),
    }
}

/// Positions in `f32`.
fn single_positions(g: &Graph, node: &Node) -> Result<(), Uncovered> {
    match g.ty(node.inputs[1]).dtype {
        DType::F32 => Ok(()),
        other => Err(Uncovered::Dtype(other)),
    }
}

/// Any axes, but the last ones of a product.
fn reduced_axes(g: &Graph, node: &Node) -> Result<(), Uncovered> {
    let Op::Reduce { kind, axes, .. } = &node.op else {
        return Err(Uncovered::Op);
    };
    let Some(first) = axes.first() else {
        return Err(Uncovered::Axes("one axis or several"));
    };
    let are_last = first + axes.len() == g.ty(node.inputs[0]).rank();
    if *kind == ReduceKind::Prod && !are_last {
        return Err(Uncovered::Axes("the last axes"));
    }
    Ok(())
}

/// The kernel reads masks with contiguous key axes.
fn mask_with_keys(g: &Graph, node: &Node) -> Result<(), Uncovered> {
    let keys = &g.ty(node.inputs[1]).shape;
    let n_keys = keys.get(keys.len().wrapping_sub(2));
    match node.inputs.get(3) {
        Some(&mask) if g.ty(mask).shape.last() != n_keys => Err(Uncovered::Mask),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::{GraphBuilder, ScalarOp};

    fn family_of(dtype: DType, op: Op, shapes: &[&[usize]]) -> Result<KernelFamily, Uncovered> {
        let mut b = GraphBuilder::new("g");
        let mut operands = Vec::new();
        for (i, shape) in shapes.iter().enumerate() {
            operands.push(b.input(&format!("x{i}"), dtype, shape.iter().copied()));
        }
        let y = b.add1(op, &operands).unwrap();
        b.output("y", y);
        let g = b.finish().unwrap();
        let (_, node) = g.nodes().last().unwrap();
        kernels_after_transposition(&g, node).map(|row| row.family)
    }

    #[test]
    fn products_have_kernels_for_floats_of_32_bits() {
        let shapes: [&[usize]; 2] = [&[2, 3], &[3, 4]];
        assert_eq!(
            family_of(DType::F32, Op::MatMul, &shapes),
            Ok(KernelFamily::Product)
        );
        let of_doubles = family_of(DType::F64, Op::MatMul, &shapes);
        assert_eq!(of_doubles, Err(Uncovered::Dtype(DType::F64)));
    }

    #[test]
    fn softmax_has_a_kernel_along_the_last_axis() {
        let along = |axis| Op::Softmax { axis, log: false };
        let x: [&[usize]; 1] = [&[2, 3]];
        assert_eq!(
            family_of(DType::F32, along(1), &x),
            Ok(KernelFamily::Softmax)
        );
        let along_first = family_of(DType::F32, along(0), &x);
        assert_eq!(along_first, Err(Uncovered::Axes("the last axis")));
    }

    #[test]
    fn element_wise_ops_have_none() {
        let relu = family_of(DType::F32, Op::Map(ScalarOp::Relu), &[&[2]]);
        assert_eq!(relu, Err(Uncovered::Op));
    }
}
