//! Regions of interest: the kernel and the generated loops are the interpreter's, to the bit.

use super::harness::compile_clusters;
use super::harness::{check, run, steps};
use crate::codegen::cpu::Options;
use crate::codegen::testing::{Rng, as_cluster, graph_of};
use crate::ir::*;
use gristmill_runtime::{DType, Tensor, status};

/// Corners within, across and outside of the image, turned over, and NaN.
fn corners(rng: &mut Rng, n: usize) -> Vec<f64> {
    let mut corners = Vec::new();
    for _ in 0..n {
        let reach = [4.0, 20.0, 300.0][rng.below(3)];
        corners.extend((0..4).map(|_| rng.real(-reach / 4.0, reach)));
        let at = corners.len() - 1 - rng.below(4);
        // An infinite extent has too many samples where the region decides.
        corners[at] = [corners[at], f64::NAN, -1.0, 0.0][rng.below(4)];
    }
    corners
}

fn indices(rng: &mut Rng, n: usize, images: usize) -> Tensor {
    let some = |rng: &mut Rng| rng.below(2 * images) as i64 - images as i64;
    let wide: Vec<i64> = (0..n).map(|_| some(rng)).collect();
    let narrow: Vec<i32> = wide.iter().map(|&i| i as i32).collect();
    match rng.below(2) {
        0 => Tensor::from_slice(&wide, &[n]).unwrap(),
        _ => Tensor::from_slice(&narrow, &[n]).unwrap(),
    }
}

fn random_op(rng: &mut Rng) -> Op {
    Op::RoiAlign {
        kind: [PoolKind::Avg, PoolKind::Max][rng.below(2)],
        size: vec![1 + rng.below(4), 1 + rng.below(4)],
        sampling: rng.below(4),
        scale: Real([1.0, 0.25, 0.3][rng.below(3)]),
        half_pixel: rng.below(2) == 0,
    }
}

/// An image, some of whose pixels are NaN or a negative zero.
fn image(rng: &mut Rng, dtype: DType, shape: &[usize]) -> Tensor {
    let n = shape.iter().product::<usize>();
    let mut x: Vec<f64> = (0..n).map(|_| rng.real(-1.0, 1.0)).collect();
    for _ in 0..rng.below(3) {
        x[rng.below(n)] = [f64::NAN, -0.0][rng.below(2)];
    }
    Tensor::from_f64s(dtype, shape, &x).unwrap()
}

/// An op on an image whose channels come first, or last and are transposed.
fn graph(op: &Op, is_last: bool, operands: &[Tensor]) -> Graph {
    let mut b = GraphBuilder::new("g");
    let mut inputs = Vec::new();
    for (i, t) in operands.iter().enumerate() {
        inputs.push(b.input(&format!("x{i}"), t.dtype(), t.shape().iter().copied()));
    }
    if is_last {
        let perm = vec![0, 3, 1, 2];
        inputs[0] = b.add1(Op::Transpose { perm }, &inputs[..1]).unwrap();
    }
    let y = b.add1(op.clone(), &inputs).unwrap();
    b.output("y", y);
    b.finish().unwrap()
}

#[test]
fn random_regions_are_the_interpreters() {
    let rng = &mut Rng(61);
    for _ in 0..150 {
        let dtype = [DType::F32, DType::F32, DType::F64, DType::F16][rng.below(4)];
        let (n, c) = (1 + rng.below(3), [1, 3, 17, 70][rng.below(4)]);
        let (h, w) = (1 + rng.below(9), 1 + rng.below(9));
        let is_last = rng.below(2) == 0;
        let shape = if is_last { [n, h, w, c] } else { [n, c, h, w] };
        let regions = 1 + rng.below(6);
        let corners = corners(rng, regions);
        let operands = [
            image(rng, dtype, &shape),
            Tensor::from_f64s(dtype, &[regions, 4], &corners).unwrap(),
            indices(rng, regions, n),
        ];
        let graph = graph(&random_op(rng), is_last, &operands);
        let has_kernel = steps(&graph).iter().any(|s| s.ends_with("gm_roi_align"));
        assert_eq!(has_kernel, dtype == DType::F32, "{graph}");
        let tolerance = if dtype == DType::F16 { 1e-3 } else { 0.0 };
        check(&graph, &operands, tolerance, rng);
    }
}

/// The status of an op with samples by the region, on an image of two.
fn status_of(dtype: DType, image: i64, right: f64) -> u32 {
    let op = Op::RoiAlign {
        kind: PoolKind::Avg,
        size: vec![2, 2],
        sampling: 0,
        scale: Real(1.0),
        half_pixel: false,
    };
    let corners = [0.0, 0.0, 2.0, 2.0, 0.0, 0.0, right, 2.0];
    let operands = [
        Tensor::zeros(dtype, &[2, 3, 4, 4]).unwrap(),
        Tensor::from_f64s(dtype, &[2, 4], &corners).unwrap(),
        Tensor::from_slice(&[0, image], &[2]).unwrap(),
    ];
    let graph = as_cluster(&graph_of(&op, &operands));
    let compiled = compile_clusters(&mut graph.clone(), &Options::default()).unwrap();
    match run(&graph, &compiled, &operands, &mut Rng(62)) {
        Ok(_) => status::OK,
        Err(status) => status,
    }
}

#[test]
fn images_and_samples_out_of_range_are_faults() {
    for dtype in [DType::F32, DType::F64] {
        assert_eq!(status_of(dtype, -2, 3.0), status::OK);
        assert_eq!(status_of(dtype, 2, 3.0), status::INDEX_OUT_OF_RANGE);
        assert_eq!(status_of(dtype, -3, 3.0), status::INDEX_OUT_OF_RANGE);
        assert_eq!(status_of(dtype, 1, 1e6), status::INDEX_OUT_OF_RANGE);
        assert_eq!(
            status_of(dtype, 1, f64::INFINITY),
            status::INDEX_OUT_OF_RANGE
        );
    }
}
