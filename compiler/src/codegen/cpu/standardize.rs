//! Standardisation of `f32` through precompiled kernels: of rows, or of columns, alone or in groups.

use super::rejected::Rejected;
use super::rows::{row_norm, single};
use super::strided::Strided;
use super::task::{Call, Context, Place, Ptr, Task, descriptor, pointers, read, result};
use crate::ir::{Node, NodeId, Op};
use gristmill_kernels::standardize::StandardizeDesc;

/// Estimated times of an element in ns: of its moments, and of its result.
const MOMENT_NS: f64 = 0.08;
const RESULT_NS: f64 = 0.06;

/// Axes of a contiguous operand that are reduced, or kept, together.
enum Form {
    /// The last axes.
    Rows { n_cols: usize },
    /// Axes before the columns, and perhaps those of groups of columns.
    Columns { shape: [usize; 3], group: usize },
}

impl Form {
    /// Errors where more than two runs of axes are reduced, or an axis is empty.
    fn of(shape: &[usize], axes: &[usize]) -> Result<Form, Rejected> {
        if shape.contains(&0) {
            return Err(Rejected::Empty);
        }
        // Extents of runs of axes, kept and reduced ones in turn, a kept one first.
        let mut runs = vec![1];
        for (axis, &extent) in shape.iter().enumerate().filter(|(_, e)| **e != 1) {
            let is_reduced = axes.contains(&axis);
            if is_reduced != runs.len().is_multiple_of(2) {
                runs.push(1);
            }
            let last = runs.len() - 1;
            runs[last] *= extent;
        }
        match runs[..] {
            [_] => Ok(Form::Rows { n_cols: 1 }),
            [_, n_cols] => Ok(Form::Rows { n_cols }),
            [batch, rows, cols] => Ok(Form::Columns {
                shape: [batch, rows, cols],
                group: 1,
            }),
            [batch, rows, groups, group] => Ok(Form::Columns {
                shape: [batch, rows, groups * group],
                group,
            }),
            _ => Err(Rejected::Loops),
        }
    }
}

/// The task of a [`Op::Standardize`].
pub(super) fn task(cx: &Context, id: NodeId, node: &Node) -> Result<Task, Rejected> {
    let Op::Standardize { axes, epsilon } = &node.op else {
        return Err(Rejected::Empty);
    };
    let x = cx.view(node.inputs[0], Strided::is_contiguous);
    let eps = epsilon.0 as f32;
    match Form::of(&x.shape, axes)? {
        Form::Rows { n_cols } => row_norm(cx, id, node, &x, n_cols, eps),
        Form::Columns { shape, group } => {
            let desc = StandardizeDesc::new(cx.isa, shape, group, eps);
            by_columns(cx, id, node, &x, &desc)
        }
    }
}

/// Moments of the columns, then the results.
fn by_columns(
    cx: &Context,
    id: NodeId,
    node: &Node,
    x: &Strided,
    desc: &StandardizeDesc,
) -> Result<Task, Rejected> {
    let n_elements = cx.body.n_elements(node.outputs[0]) as f64;
    let moments = pointers(
        read(x),
        Ptr::Null,
        Ptr::Write(Place::Temp(0), 0),
        false,
        vec![],
    );
    let moments = Call::simple(
        "gm_column_moments_f32",
        descriptor(desc),
        moments,
        desc.n_moment_items(),
        n_elements * MOMENT_NS,
    );
    let ptrs = pointers(
        read(x),
        Ptr::Read(Place::Temp(0), 0),
        result(node),
        true,
        vec![],
    );
    let (items, ns) = (desc.n_items(), n_elements * RESULT_NS);
    let apply = Call {
        workspace_bytes: desc.workspace_bytes(),
        ..Call::simple("gm_standardize_f32", descriptor(desc), ptrs, items, ns)
    };
    let mut task = single(cx, id, node, moments)?;
    task.calls.push(apply);
    task.temps = vec![desc.moment_bytes()];
    Ok(task)
}
