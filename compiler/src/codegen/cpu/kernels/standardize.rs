//! Standardisation of `f32` through precompiled kernels: of rows, or of columns, alone or in groups.

use super::rejected::Rejected;
use super::rows::row_norm;
use super::strided::Strided;
use super::task::{Call, Context, Place, Ptr, Task, pointers, read, result};
use crate::ir::{Node, NodeId, Op};
use gristmill_kernels::calls;
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
    let temp = Ptr::Write(Place::Temp(0), 0);
    let ptrs = pointers(read(x), Ptr::Null, temp, false, vec![]);
    let (items, ns) = (desc.n_moment_items(), n_elements * MOMENT_NS);
    let moments = Call::new(calls::gm_column_moments_f32(desc), ptrs, items, ns);
    let temp = Ptr::Read(Place::Temp(0), 0);
    let ptrs = pointers(read(x), temp, result(node), true, vec![]);
    let (items, ns) = (desc.n_items(), n_elements * RESULT_NS);
    let apply = Call {
        workspace_bytes: desc.workspace_bytes(),
        ..Call::new(calls::gm_standardize_f32(desc), ptrs, items, ns)
    };
    let mut task = Task::single(cx, id, node, moments)?;
    task.calls.push(apply);
    task.temps = vec![desc.moment_bytes()];
    Ok(task)
}

#[cfg(test)]
mod tests {
    use crate::codegen::cpu::tests::harness::{check, steps};
    use crate::codegen::testing::Rng;
    use crate::ir::*;
    use gristmill_runtime::DType;

    fn standardized(shape: &[usize], axes: &[usize]) -> Graph {
        let mut b = GraphBuilder::new("standardize");
        let x = b.input("x", DType::F32, shape.iter().copied());
        let (axes, epsilon) = (axes.to_vec(), 1e-3.into());
        let y = b.add1(Op::Standardize { axes, epsilon }, &[x]).unwrap();
        b.output("y", y);
        b.finish().unwrap()
    }

    #[test]
    fn random_axes_agree_with_the_interpreter() {
        let rng = &mut Rng(31);
        for _ in 0..80 {
            let rank = 1 + rng.below(5);
            let shape: Vec<usize> = (0..rank).map(|_| 1 + rng.below(9)).collect();
            let axes: Vec<usize> = (0..rank).filter(|_| rng.below(2) == 0).collect();
            let x = rng.tensor(DType::F32, &shape, -1.0, 3.0);
            check(&standardized(&shape, &axes), &[x], 2e-5, rng);
        }
    }

    #[test]
    fn no_elements_are_none() {
        let rng = &mut Rng(32);
        for shape in [[0, 3, 2], [2, 0, 3], [2, 3, 0]] {
            let x = rng.tensor(DType::F32, &shape, -1.0, 1.0);
            check(&standardized(&shape, &[1]), &[x], 0.0, rng);
        }
    }

    #[test]
    fn kernels_take_rows_columns_and_groups_of_columns() {
        let columns = [
            "test_0_0_gm_column_moments_f32",
            "test_0_1_gm_standardize_f32",
        ];
        for (shape, axes, kernels) in [
            (vec![2, 3, 40], vec![2], &["test_0_0_gm_norm_f32"][..]),
            (vec![2, 3, 4, 5], vec![2, 3], &["test_0_0_gm_norm_f32"]),
            (vec![2, 9, 7, 16], vec![1, 2], &columns),
            (vec![900, 24], vec![0], &columns),
            (vec![2, 9, 7, 8, 2], vec![1, 2, 4], &columns),
        ] {
            assert_eq!(steps(&standardized(&shape, &axes)), kernels, "{shape:?}");
        }
    }
}
