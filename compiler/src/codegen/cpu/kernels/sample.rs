//! Windows of deformable convolutions.

use super::regions::isizes;
use super::rejected::Rejected;
use super::strided::Strided;
use super::task::{Call, Context, Task, pointers, read, result};
use crate::ir::{Node, NodeId, Op};
use gristmill_kernels::calls;
use gristmill_kernels::deform::DeformDesc;

/// Estimated time of a sample in ns (measured: 1.5 to 1.6 for planes of 7x7 to 56x56).
const SAMPLE_NS: f64 = 1.6;

/// The task of a [`Op::DeformColumns`].
pub(super) fn task(cx: &Context, id: NodeId, node: &Node) -> Result<Task, Rejected> {
    let x = cx.view(node.inputs[0], |_| true);
    let desc = describe(cx, node, &x).ok_or(Rejected::Empty)?;
    let operand = |i: usize| Some(read(&cx.view(*node.inputs.get(i)?, Strided::is_contiguous)));
    let offsets = operand(1).ok_or(Rejected::Empty)?;
    let mask = operand(2).into_iter().collect();
    let ptrs = pointers(read(&x), offsets, result(node), true, mask);
    let ns = desc.n_samples() as f64 * SAMPLE_NS;
    let call = Call {
        workspace_bytes: desc.workspace_bytes(),
        ..Call::new(
            calls::gm_deform_columns_f32(&desc),
            ptrs,
            desc.n_items(),
            ns,
        )
    };
    Task::single(cx, id, node, call)
}

/// `None` where an extent is 0.
fn describe(cx: &Context, node: &Node, x: &Strided) -> Option<DeformDesc> {
    let Op::DeformColumns {
        size,
        window,
        groups,
    } = &node.op
    else {
        return None;
    };
    let windows = cx.body.shape(node.outputs[0]);
    if x.shape.contains(&0) || windows.contains(&0) {
        return None;
    }
    let pair = |values: &[usize]| [values[0], values[1]];
    Some(DeformDesc {
        isa: cx.isa as u32,
        is_masked: u32::from(node.inputs.len() == 3),
        images: x.shape[0],
        channels: x.shape[1],
        groups: *groups,
        plane: pair(&x.shape[2..]),
        size: pair(size),
        strides: pair(&window.strides),
        dilations: pair(&window.dilations),
        pads: pair(&window.pads_low),
        windows: pair(&windows[3..]),
        x_strides: isizes(&x.strides),
    })
}

#[cfg(test)]
mod tests {
    use crate::codegen::cpu::tests::harness::{check, image_graph, steps};
    use crate::codegen::testing::Rng;
    use crate::ir::*;
    use gristmill_runtime::{DType, Tensor};

    /// Reals, of which some are NaN, infinite or enormous.
    fn tensor(rng: &mut Rng, dtype: DType, shape: &[usize], reach: f64) -> Tensor {
        let n = shape.iter().product::<usize>();
        let mut x: Vec<f64> = (0..n).map(|_| rng.real(-reach, reach)).collect();
        for _ in 0..rng.below(3) {
            x[rng.below(n)] = [f64::NAN, f64::INFINITY, -3e4][rng.below(3)];
        }
        Tensor::from_f64s(dtype, shape, &x).unwrap()
    }

    #[test]
    fn random_windows_are_the_interpreters() {
        let rng = &mut Rng(63);
        for _ in 0..100 {
            let dtype = [DType::F32, DType::F32, DType::F64][rng.below(3)];
            let groups = 1 + rng.below(2);
            let (n, c) = (1 + rng.below(2), groups * [1, 3, 17][rng.below(3)]);
            let plane = [3 + rng.below(8), 3 + rng.below(8)];
            let size = vec![1 + rng.below(3), 1 + rng.below(3)];
            let window = Window {
                strides: vec![1 + rng.below(2), 1 + rng.below(2)],
                dilations: vec![1, 1],
                pads_low: vec![rng.below(3), rng.below(2)],
                pads_high: vec![rng.below(2), rng.below(3)],
            };
            let extent = |d: usize| {
                let room = plane[d] + window.pads_low[d] + window.pads_high[d] - size[d];
                room / window.strides[d] + 1
            };
            let (rows, columns, taps) = (extent(0), extent(1), groups * size[0] * size[1]);
            let is_last = rng.below(2) == 0;
            let shape = match is_last {
                true => [n, plane[0], plane[1], c],
                false => [n, c, plane[0], plane[1]],
            };
            let mut operands = vec![
                tensor(rng, dtype, &shape, 1.0),
                tensor(rng, dtype, &[n, 2 * taps, rows, columns], 4.0),
            ];
            if rng.below(2) == 0 {
                operands.push(tensor(rng, dtype, &[n, taps, rows, columns], 1.0));
            }
            let op = Op::DeformColumns {
                size,
                window,
                groups,
            };
            let graph = image_graph(&op, is_last, &operands);
            let steps = steps(&graph);
            let has_kernel = steps.iter().any(|s| s.ends_with("gm_deform_columns_f32"));
            assert_eq!(has_kernel, dtype == DType::F32, "{graph}");
            check(&graph, &operands, 1e-6, rng);
        }
    }
}
