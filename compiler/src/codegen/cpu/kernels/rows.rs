//! Softmax and normalisation of `f32` through precompiled kernels.

use super::rejected::Rejected;
use super::strided::{Axis, Strided, collapse, row_major};
use super::task::{Call, Context, Ptr, Task, pointers, read, result};
use crate::ir::{Node, NodeId, Op, ValueId};
use gristmill_kernels::calls;
use gristmill_kernels::epilogue::MAX_BATCH;
use gristmill_kernels::rows::{NormDesc, NormKind, RowDim, SoftmaxDesc, SoftmaxKind};

/// Rows of an operand, and the place of each one's result.
pub(super) struct Rows {
    pub(super) dims: [RowDim; MAX_BATCH],
    pub(super) n_rows: usize,
    pub(super) n_cols: usize,
}

impl Rows {
    /// The rows of `x` over the axes from `axis` on; results are `y_cols` elements apart.
    ///
    /// Errors when a row is not contiguous, or there are too many loops around it.
    pub(super) fn of(x: &Strided, axis: usize, y_cols: usize) -> Result<Rows, Rejected> {
        let (outer, inner) = x.shape.split_at(axis);
        match &collapse(inner, &[&x.strides[axis..]])[..] {
            [] => {}
            [one] if one.strides[0] == 1 => {}
            _ => return Err(Rejected::Strides(0)),
        }
        let y = row_major(outer).into_iter().map(|s| s * y_cols as i64);
        let y: Vec<i64> = y.collect();
        Ok(Rows {
            dims: row_dims(&collapse(outer, &[&x.strides[..axis], &y]))?,
            n_rows: outer.iter().product(),
            n_cols: inner.iter().product(),
        })
    }

    /// Operand 0 of a node with its rows, read through views where their rows are contiguous.
    fn of_operand(
        cx: &Context,
        node: &Node,
        axis: usize,
        y_cols: usize,
    ) -> Result<(Strided, Rows), Rejected> {
        let x = cx.view(node.inputs[0], |v| Rows::of(v, axis, y_cols).is_ok());
        let rows = Rows::of(&x, axis, y_cols)?;
        Ok((x, rows))
    }

    fn n_elements(&self) -> f64 {
        (self.n_rows * self.n_cols) as f64
    }
}

fn row_dims(axes: &[Axis]) -> Result<[RowDim; MAX_BATCH], Rejected> {
    let mut dims = [RowDim::default(); MAX_BATCH];
    let first = MAX_BATCH.checked_sub(axes.len()).ok_or(Rejected::Loops)?;
    for (dim, Axis { extent, strides }) in dims[first..].iter_mut().zip(axes) {
        dim.extent = *extent;
        dim.x_stride = strides[0] as isize;
        dim.y_stride = strides[1] as isize;
    }
    Ok(dims)
}

/// Softmax over the last axis.
pub(super) fn softmax(cx: &Context, id: NodeId, node: &Node) -> Result<Task, Rejected> {
    let Op::Softmax { axis, log } = node.op else {
        return Err(Rejected::Empty);
    };
    let n_cols = cx.body.shape(node.inputs[0])[axis];
    let (x, rows) = Rows::of_operand(cx, node, axis, n_cols)?;
    let kind = match log {
        true => SoftmaxKind::LogSoftmax,
        false => SoftmaxKind::Softmax,
    };
    let desc = SoftmaxDesc {
        rows: rows.dims,
        ..SoftmaxDesc::new(cx.isa, kind, rows.n_rows, rows.n_cols)
    };
    let ptrs = pointers(read(&x), Ptr::Null, result(node), false, vec![]);
    let ns = rows.n_elements() * 0.3;
    let call = Call::new(calls::gm_softmax_f32(&desc), ptrs, rows.n_rows, ns);
    Task::single(cx, id, node, call)
}

/// Layer and root-mean-square normalisation.
pub(super) fn norm(cx: &Context, id: NodeId, node: &Node) -> Result<Task, Rejected> {
    let (axis, epsilon, kind) = match node.op {
        Op::LayerNorm { axis, epsilon } => (axis, epsilon, NormKind::Layer),
        Op::RmsNorm { axis, epsilon } => (axis, epsilon, NormKind::Rms),
        _ => return Err(Rejected::Empty),
    };
    let n_cols = cx.body.shape(node.inputs[0])[axis..].iter().product();
    let (x, rows) = Rows::of_operand(cx, node, axis, n_cols)?;
    let desc = NormDesc {
        rows: rows.dims,
        ..NormDesc::new(cx.isa, kind, rows.n_rows, rows.n_cols, epsilon.0 as f32)
    };
    let vector = |v: ValueId| read(&cx.view(v, Strided::is_contiguous));
    let gamma = vector(node.inputs[1]);
    let beta = node.inputs.get(2).map_or(Ptr::Null, |&v| vector(v));
    let ptrs = pointers(read(&x), gamma, result(node), false, vec![beta]);
    let ns = rows.n_elements() * 0.1;
    let call = Call::new(calls::gm_norm_f32(&desc), ptrs, rows.n_rows, ns);
    Task::single(cx, id, node, call)
}

/// Standardisation of the rows of `n_cols` elements of a contiguous operand.
pub(super) fn row_norm(
    cx: &Context,
    id: NodeId,
    node: &Node,
    x: &Strided,
    n_cols: usize,
    eps: f32,
) -> Result<Task, Rejected> {
    let n_elements = cx.body.n_elements(node.outputs[0]);
    let n_rows = n_elements / n_cols;
    let desc = NormDesc::new(cx.isa, NormKind::Layer, n_rows, n_cols, eps);
    let (scale, offset) = (Ptr::Null, Ptr::Null);
    let ptrs = pointers(read(x), scale, result(node), false, vec![offset]);
    let ns = n_elements as f64 * 0.1;
    let call = Call::new(calls::gm_norm_f32(&desc), ptrs, n_rows, ns);
    Task::single(cx, id, node, call)
}
