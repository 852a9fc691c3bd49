//! Bilinear samples.

use super::regions::isizes;
use super::rejected::Rejected;
use super::strided::Strided;
use super::task::{Call, Context, Task, pointers, read, result};
use crate::ir::{Node, NodeId, Op};
use gristmill_kernels::calls;
use gristmill_kernels::sample::SampleDesc;

/// Estimated time of a sample in ns (measured: 1.5 to 1.6 for planes of 7x7 to 56x56).
const SAMPLE_NS: f64 = 1.6;
/// The same of a pixel that is copied.
const PIXEL_NS: f64 = 0.5;
/// Pixels of a plane for each of its samples, at most: the kernel copies whole planes.
const MOST_PIXELS: usize = 32;

/// The task of a [`Op::Sample`].
pub(super) fn task(cx: &Context, id: NodeId, node: &Node) -> Result<Task, Rejected> {
    let x = cx.view(node.inputs[0], |_| true);
    let desc = describe(cx, node, &x).ok_or(Rejected::Empty)?;
    let (pixels, samples) = (desc.plane[0] * desc.plane[1], desc.taps * desc.points);
    if pixels > samples.saturating_mul(MOST_PIXELS) {
        return Err(Rejected::Loops);
    }
    let operand = |i: usize| Some(read(&cx.view(*node.inputs.get(i)?, Strided::is_contiguous)));
    let positions = operand(1).ok_or(Rejected::Empty)?;
    let mask = operand(2).into_iter().collect();
    let ptrs = pointers(read(&x), positions, result(node), true, mask);
    let n_pixels = (desc.images * desc.channels * pixels) as f64;
    let ns = desc.n_samples() as f64 * SAMPLE_NS + n_pixels * PIXEL_NS;
    let call = Call {
        workspace_bytes: desc.workspace_bytes(),
        ..Call::new(calls::gm_sample_f32(&desc), ptrs, desc.n_items(), ns)
    };
    Task::single(cx, id, node, call)
}

/// `None` where an extent is 0.
fn describe(cx: &Context, node: &Node, x: &Strided) -> Option<SampleDesc> {
    let Op::Sample { groups } = &node.op else {
        return None;
    };
    let samples = cx.body.shape(node.outputs[0]);
    if x.shape.contains(&0) || samples.contains(&0) {
        return None;
    }
    Some(SampleDesc {
        isa: cx.isa as u32,
        is_masked: u32::from(node.inputs.len() == 3),
        images: x.shape[0],
        channels: x.shape[1],
        groups: *groups,
        plane: [x.shape[2], x.shape[3]],
        taps: samples[2],
        points: samples[3],
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
    fn tensor(rng: &mut Rng, dtype: DType, shape: &[usize], [low, high]: [f64; 2]) -> Tensor {
        let n = shape.iter().product::<usize>();
        let mut x: Vec<f64> = (0..n).map(|_| rng.real(low, high)).collect();
        for _ in 0..rng.below(3) {
            x[rng.below(n)] = [f64::NAN, f64::INFINITY, -3e4][rng.below(3)];
        }
        Tensor::from_f64s(dtype, shape, &x).unwrap()
    }

    #[test]
    fn random_samples_are_the_interpreters() {
        let rng = &mut Rng(63);
        for _ in 0..100 {
            let dtype = [DType::F32, DType::F32, DType::F64][rng.below(3)];
            let wide = [DType::F32, DType::F32, DType::F64][rng.below(3)];
            let groups = 1 + rng.below(2);
            let (n, c) = (1 + rng.below(2), groups * [1, 3, 17][rng.below(3)]);
            let plane = [3 + rng.below(8), 3 + rng.below(8)];
            let (taps, points) = (1 + rng.below(9), 1 + rng.below(80));
            let is_last = rng.below(2) == 0;
            let shape = match is_last {
                true => [n, plane[0], plane[1], c],
                false => [n, c, plane[0], plane[1]],
            };
            let ends = [-2.5, plane[0] as f64 + 1.5];
            let mut operands = vec![
                tensor(rng, dtype, &shape, [-1.0, 1.0]),
                tensor(rng, wide, &[n, groups, taps, 2, points], ends),
            ];
            if rng.below(2) == 0 {
                let mask = tensor(rng, dtype, &[n, groups, taps, points], [-1.0, 1.0]);
                operands.push(mask);
            }
            let graph = image_graph(&Op::Sample { groups }, is_last, &operands);
            let steps = steps(&graph);
            let has_kernel = steps.iter().any(|s| s.ends_with("gm_sample_f32"));
            let is_single = dtype == DType::F32 && wide == DType::F32;
            assert_eq!(has_kernel, is_single, "{graph}");
            check(&graph, &operands, 1e-6, rng);
        }
    }
}
