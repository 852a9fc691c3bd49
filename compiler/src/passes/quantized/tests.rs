//! Snapshots of quantised graphs after the passes, and the error of their results.

use super::*;
use crate::ir::{GraphBuilder, Layout, Window};
use crate::passes::clean;
use crate::rng::Rng;

fn random_bytes(dtype: DType, shape: &[usize], rng: &mut Rng) -> Tensor {
    let n = shape.iter().product::<usize>();
    Tensor::from_bytes(
        dtype,
        shape,
        &(0..n).map(|_| rng.bits() as u8).collect::<Vec<_>>(),
    )
    .unwrap()
}

/// `(q - zero) * scale` as the importer writes it; parameters are constants.
fn dequantized(b: &mut GraphBuilder, q: ValueId, zero: Option<Tensor>, scale: Tensor) -> ValueId {
    let mut x = b.cast(q, DType::I32).unwrap();
    if let Some(zero) = zero {
        let zero = b.constant(zero);
        let zero = b.cast(zero, DType::I32).unwrap();
        x = b.sub(x, zero).unwrap();
    }
    let x = b.cast(x, DType::F32).unwrap();
    let scale = b.constant(scale);
    b.mul(x, scale).unwrap()
}

fn quantized(b: &mut GraphBuilder, x: ValueId, zero: u8, scale: f32) -> ValueId {
    let scale = b.scalar(DType::F32, scale.into());
    let x = b.map(ScalarOp::Div, &[x, scale]).unwrap();
    let x = b.map(ScalarOp::Round, &[x]).unwrap();
    let zero = b.constant(Tensor::from_slice(&[zero], &[]).unwrap());
    let zero = b.cast(zero, DType::F32).unwrap();
    let x = b.add_(x, zero).unwrap();
    b.cast(x, DType::U8).unwrap()
}

fn scalar(v: f32) -> Tensor {
    Tensor::from_slice(&[v], &[]).unwrap()
}

fn byte(v: u8) -> Option<Tensor> {
    Some(Tensor::from_slice(&[v], &[]).unwrap())
}

fn scales(shape: &[usize]) -> Tensor {
    let n = shape.iter().product::<usize>();
    Tensor::from_slice(
        &(0..n)
            .map(|i| 0.011 + 0.003 * (i as f32).sin())
            .collect::<Vec<_>>(),
        shape,
    )
    .unwrap()
}

/// The text without origins, which are lines of this file.
fn text(g: &Graph) -> String {
    let text = g.to_text(crate::ir::print::PrintOptions::SHORT);
    text.lines()
        .map(|line| format!("{}\n", line.split(" @ ").next().unwrap_or(line)))
        .collect()
}

/// The graph in doubles: casts to `f32` and constants of it are wider.
fn in_doubles(g: &Graph) -> Graph {
    let wide = |d: DType| if d == DType::F32 { DType::F64 } else { d };
    let mut r = Rebuild::new(g);
    for (id, node) in g.nodes() {
        match &node.op {
            Op::Constant { value } if value.dtype() == DType::F32 => {
                let t = value.tensor().unwrap();
                let t = Tensor::from_f64s(DType::F64, t.shape(), &t.to_f64s()).unwrap();
                let v = r.graph.add_constant(t, &node.origin);
                r.set(node.outputs[0], v);
            }
            Op::Map(ScalarOp::Cast(to)) => {
                let x = [r.get(node.inputs[0])];
                let v = r
                    .graph
                    .add1(Op::Map(ScalarOp::Cast(wide(*to))), &x, &node.origin)
                    .unwrap();
                r.set(node.outputs[0], v);
            }
            _ => r.copy(id, node).unwrap(),
        }
    }
    r.finish(g)
}

/// The graph with its products of integers, each of whose results must be within three roundings of
/// the true one.
fn check(g: &Graph, inputs: &[Tensor]) -> Graph {
    let after = integer_products(g).unwrap();
    crate::ir::verify::verify(&after).unwrap();
    if text(&after) != text(g) {
        let truth = interp::run(&in_doubles(g), inputs).unwrap()[0].to_f64s();
        let found = interp::run(&after, inputs).unwrap()[0].to_f64s();
        for (have, want) in found.into_iter().zip(truth) {
            let bound = 3.001 * want.abs() / f64::from(1 << 24);
            assert!(
                (have - want).abs() <= bound,
                "{after}\nexpected {want:e}, found {have:e}"
            );
        }
    }
    clean(&after).unwrap()
}

fn product(k: usize, weights: Tensor, zero: Option<Tensor>, scale: Tensor) -> (Graph, Vec<Tensor>) {
    let mut b = GraphBuilder::new("g");
    let q = b.input("q", DType::U8, [5usize, k]);
    let x = dequantized(&mut b, q, byte(117), scalar(0.021));
    let w = b.constant(weights);
    let w = dequantized(&mut b, w, zero, scale);
    let y = b.matmul(x, w).unwrap();
    b.output("y", y);
    let inputs = vec![random_bytes(DType::U8, &[5, k], &mut Rng(3))];
    (b.finish().unwrap(), inputs)
}

#[test]
fn products_are_of_integers() {
    let rng = &mut Rng(1);
    let (g, inputs) = product(
        16,
        random_bytes(DType::I8, &[16, 3], rng),
        byte(0),
        scales(&[1, 3]),
    );
    insta::assert_snapshot!(text(&check(&g, &inputs)));
    let (g, inputs) = product(
        2048,
        random_bytes(DType::I8, &[2048, 70], rng),
        None,
        scalar(0.5),
    );
    assert!(text(&check(&g, &inputs)).contains("i32[5, 70] = matmul"));
}

#[test]
fn products_that_have_no_integer_form_stay() {
    let rng = &mut Rng(2);
    let i8s = |shape: &[usize], rng: &mut Rng| random_bytes(DType::I8, shape, rng);
    let large = Tensor::from_slice(&[200u8; 16], &[8, 2]).unwrap();
    for (why, (g, _)) in [
        (
            "scales along the sum",
            product(8, i8s(&[8, 2], rng), None, scales(&[8, 1])),
        ),
        (
            "no signed bytes",
            product(8, large.clone(), None, scalar(0.5)),
        ),
        (
            "the sum may not fit",
            product(
                MAX_TERMS + 4 - MAX_TERMS % 4,
                i8s(&[MAX_TERMS + 4 - MAX_TERMS % 4, 1], rng),
                None,
                scalar(0.5),
            ),
        ),
        (
            "the product of the scales is no normal number",
            product(8, i8s(&[8, 2], rng), None, scalar(1e-38)),
        ),
    ] {
        assert_eq!(text(&integer_products(&g).unwrap()), text(&g), "{why}");
    }
    // Bytes of either kind are taken as long as their distances from the zero point fit.
    let (g, inputs) = product(8, large, byte(128), scalar(0.5));
    assert!(text(&check(&g, &inputs)).contains("i32[5, 2] = matmul"));
}

#[test]
fn views_of_operands_are_views_of_integers() {
    let rng = &mut Rng(4);
    let mut b = GraphBuilder::new("g");
    let q = b.input("q", DType::I8, [2usize, 3, 4, 2]);
    let x = dequantized(&mut b, q, None, scalar(0.25));
    let x = b.transpose(x, &[0, 1, 3, 2]).unwrap();
    let x = b.reshape(x, [2usize, 3, 8]).unwrap();
    let w = b.constant(random_bytes(DType::I8, &[6, 8], rng));
    let w = dequantized(
        &mut b,
        w,
        Some(Tensor::from_slice(&[0i8; 6], &[6, 1]).unwrap()),
        scales(&[6, 1]),
    );
    let w = b.transpose(w, &[1, 0]).unwrap();
    let y = b.matmul(x, w).unwrap();
    b.output("y", y);
    insta::assert_snapshot!(text(&check(
        &b.finish().unwrap(),
        &[random_bytes(DType::I8, &[2, 3, 4, 2], rng)]
    )));
}

fn convolution(groups: usize) -> (Graph, Vec<Tensor>) {
    let rng = &mut Rng(5);
    let mut b = GraphBuilder::new("g");
    let q = b.input("q", DType::U8, [1usize, 8, 5, 5]);
    let x = dequantized(&mut b, q, byte(131), scalar(0.043));
    let w = b.constant(random_bytes(DType::I8, &[4, 8 / groups, 3, 3], rng));
    let w = dequantized(&mut b, w, None, scales(&[4, 1, 1, 1]));
    let window = Window {
        strides: vec![2, 1],
        dilations: vec![1, 1],
        pads_low: vec![1, 1],
        pads_high: vec![1, 0],
    };
    let y = b
        .add1(
            Op::Conv {
                window,
                groups,
                layout: Layout::ChannelsFirst,
            },
            &[x, w],
        )
        .unwrap();
    b.output("y", y);
    (
        b.finish().unwrap(),
        vec![random_bytes(DType::U8, &[1, 8, 5, 5], rng)],
    )
}

#[test]
fn convolutions_are_of_integers() {
    let (g, inputs) = convolution(1);
    insta::assert_snapshot!(text(&check(&g, &inputs)));
    let (g, _) = convolution(2);
    assert_eq!(text(&integer_products(&g).unwrap()), text(&g));
}

/// `ConvInteger` or `MatMulInteger` of bytes with a zero point known at run time; weights are `i32`
/// of bytes minus a zero point.
fn integer_product(op: Op, x: &[usize], weights: Tensor) -> (Graph, Vec<Tensor>) {
    let rng = &mut Rng(8);
    let mut b = GraphBuilder::new("g");
    let q = b.input("q", DType::U8, x.iter().copied());
    let zero = b.input("zero", DType::U8, Vec::<usize>::new());
    let (x32, z) = (
        b.cast(q, DType::I32).unwrap(),
        b.cast(zero, DType::I32).unwrap(),
    );
    let x32 = b.sub(x32, z).unwrap();
    let w = b.constant(weights);
    let y = b.add1(op, &[x32, w]).unwrap();
    b.output("y", y);
    let inputs = vec![random_bytes(DType::U8, x, rng), byte(77).unwrap()];
    (b.finish().unwrap(), inputs)
}

fn conv(rank: usize, groups: usize) -> Op {
    let spatial = rank - 2;
    Op::Conv {
        window: Window {
            strides: vec![2; spatial],
            dilations: vec![1; spatial],
            pads_low: vec![1; spatial],
            pads_high: vec![0; spatial],
        },
        groups,
        layout: Layout::ChannelsFirst,
    }
}

fn small_weights(shape: &[usize], low: i32, high: i32) -> Tensor {
    let rng = &mut Rng(9);
    let n = shape.iter().product::<usize>();
    let made: Vec<i32> = (0..n)
        .map(|_| low + (rng.bits() % (high - low + 1) as u64) as i32)
        .collect();
    Tensor::from_slice(&made, shape).unwrap()
}

/// The op of each product, with the dtype of its result.
fn products(g: &Graph) -> Vec<String> {
    let is_product = |n: &&Node| matches!(n.op, Op::Conv { .. } | Op::MatMul);
    let nodes = g.nodes().map(|(_, n)| n).filter(is_product);
    nodes
        .map(|n| format!("{} {}", g.ty(n.outputs[0]).dtype, n.op.name()))
        .collect()
}

#[test]
fn products_of_integers_take_forms_that_have_kernels() {
    let cases: [(Op, &[usize], Tensor, &[&str]); 10] = [
        // One channel and three are padded to words.
        (
            conv(4, 1),
            &[1, 3, 8, 7],
            small_weights(&[5, 3, 3, 3], -128, 127),
            &["i32 conv"],
        ),
        (
            conv(3, 1),
            &[2, 1, 9],
            small_weights(&[2, 1, 5], -128, 127),
            &["i32 conv"],
        ),
        (
            conv(5, 1),
            &[1, 6, 4, 5, 4],
            small_weights(&[3, 6, 2, 3, 3], -9, 127),
            &["i32 conv"],
        ),
        (
            Op::MatMul,
            &[5, 6],
            small_weights(&[6, 3], -128, 127),
            &["i32 matmul"],
        ),
        // Whole words, channels first.
        (
            conv(4, 1),
            &[1, 8, 8, 7],
            small_weights(&[5, 8, 3, 3], -128, 127),
            &["i32 conv"],
        ),
        // Unsigned weights without a zero point are up to 255.
        (
            Op::MatMul,
            &[5, 8],
            small_weights(&[8, 30], 0, 200),
            &["i32 matmul"; 2],
        ),
        (
            Op::MatMul,
            &[5, 8],
            small_weights(&[8, 300], 0, 255),
            &["i32 matmul"; 3],
        ),
        (
            conv(4, 6),
            &[1, 6, 8, 7],
            small_weights(&[6, 1, 3, 3], -255, 255),
            &["i32 conv"],
        ),
        // Sums of small groups are exact in `f32`, those of large groups are not.
        (
            conv(3, 2),
            &[1, 12, 30],
            small_weights(&[4, 6, 9], -128, 127),
            &["f32 conv"],
        ),
        (
            conv(4, 2),
            &[1, 148, 5, 5],
            small_weights(&[4, 74, 3, 3], -128, 127),
            &["i32 conv"; 2],
        ),
    ];
    for (op, x, weights, expected) in cases {
        let (g, inputs) = integer_product(op, x, weights);
        let after = clean(&integer_products(&g).unwrap()).unwrap();
        assert_eq!(products(&after), expected, "{g}");
        assert_eq!(
            interp::run(&after, &inputs).unwrap(),
            interp::run(&g, &inputs).unwrap(),
            "{g}"
        );
        let setup = crate::testing::Setup::default();
        let lowered = crate::pipeline::lower(g.clone(), setup.config()).unwrap();
        let kernels = lowered.program.partitions[0].kernels.iter();
        let names: Vec<&str> = kernels.map(|k| k.name()).collect();
        let is_product = |name: &&&str| {
            let of = ["gm_conv_f32", "gm_gemm_f32", "gm_depthwise_f32"];
            of.iter().any(|f| name.ends_with(f))
        };
        let n_found = names.iter().filter(is_product).count();
        assert_eq!(n_found, expected.len(), "{names:?} of {g}");
        let compiled = crate::compile(&g, &crate::Options::default()).unwrap();
        let found = compiled
            .run([("q", inputs[0].clone()), ("zero", inputs[1].clone())])
            .unwrap();
        assert_eq!(found["y"], interp::run(&g, &inputs).unwrap()[0], "{g}");
    }
}

#[test]
fn bytes_are_transposed_before_they_are_widened() {
    let (g, inputs) = {
        let mut b = GraphBuilder::new("g");
        let q = b.input("q", DType::I8, [2usize, 3, 4]);
        let x = b.cast(q, DType::I32).unwrap();
        let zero = b.scalar(DType::I32, 7.0);
        let x = b.add_(x, zero).unwrap();
        let y = b.transpose(x, &[2, 0, 1]).unwrap();
        let ones = b.constant(Tensor::from_slice(&[1i32, 2, 3, 4], &[4]).unwrap());
        let x = b.sub(x, ones).unwrap();
        let z = b.transpose(x, &[1, 2, 0]).unwrap();
        b.output("y", y);
        b.output("z", z);
        let inputs = [random_bytes(DType::I8, &[2, 3, 4], &mut Rng(12))];
        (b.finish().unwrap(), inputs)
    };
    let after = clean(&transposed_bytes(&g).unwrap()).unwrap();
    let transposed = after.nodes().map(|(_, n)| n);
    let dtypes: Vec<DType> = transposed
        .filter(|n| matches!(n.op, Op::Transpose { .. }))
        .map(|n| after.ty(n.outputs[0]).dtype)
        .collect();
    assert_eq!(dtypes, [DType::I8, DType::I32], "{after}");
    assert_eq!(
        interp::run(&after, &inputs).unwrap(),
        interp::run(&g, &inputs).unwrap()
    );
}

/// Weights beyond bytes would be many constants, and many groups many convolutions.
#[test]
fn products_of_large_integers_and_of_many_groups_stay() {
    for (op, x, weights) in [
        (
            Op::MatMul,
            &[5usize, 8][..],
            small_weights(&[8, 3], 0, 100_000),
        ),
        (
            conv(4, 40),
            &[1, 320, 9, 9],
            small_weights(&[40, 8, 9, 9], -128, 127),
        ),
        (
            conv(4, 6),
            &[1, 6, 40, 40],
            small_weights(&[6, 1, 31, 31], -128, 127),
        ),
    ] {
        let (g, _) = integer_product(op, x, weights);
        assert_eq!(products(&integer_products(&g).unwrap()).len(), 1, "{g}");
    }
}

/// Filters of one channel keep their axes; their scales are by channel.
#[test]
fn depthwise_convolutions_are_of_integers() {
    let rng = &mut Rng(11);
    let mut b = GraphBuilder::new("g");
    let q = b.input("q", DType::U8, [1usize, 6, 7, 5]);
    let x = dequantized(&mut b, q, byte(131), scalar(0.043));
    let w = b.constant(random_bytes(DType::I8, &[6, 1, 3, 3], rng));
    let w = dequantized(&mut b, w, None, scales(&[6, 1, 1, 1]));
    let y = b.add1(conv(4, 6), &[x, w]).unwrap();
    b.output("y", y);
    let g = b.finish().unwrap();
    let inputs = [random_bytes(DType::U8, &[1, 6, 7, 5], rng)];
    assert_eq!(products(&check(&g, &inputs)), ["i32 conv"]);
}

/// A first convolution, of three channels.
#[test]
fn channels_of_bytes_are_padded_to_words() {
    let rng = &mut Rng(10);
    let mut b = GraphBuilder::new("g");
    let q = b.input("q", DType::U8, [1usize, 3, 6, 6]);
    let x = dequantized(&mut b, q, byte(131), scalar(0.043));
    let w = b.constant(random_bytes(DType::I8, &[4, 3, 3, 3], rng));
    let w = dequantized(&mut b, w, None, scales(&[4, 1, 1, 1]));
    let y = b.add1(conv(4, 1), &[x, w]).unwrap();
    b.output("y", y);
    let inputs = [random_bytes(DType::U8, &[1, 3, 6, 6], rng)];
    insta::assert_snapshot!(text(&check(&b.finish().unwrap(), &inputs)));
}

/// `MatMulInteger` with a dynamic zero point; its weights are too large for folding.
#[test]
fn weights_of_integer_products_become_constants() {
    let rng = &mut Rng(6);
    let mut b = GraphBuilder::new("g");
    let (q, zero) = (
        b.input("q", DType::U8, [2usize, 64]),
        b.input("zero", DType::U8, Vec::<usize>::new()),
    );
    let (x, z) = (
        b.cast(q, DType::I32).unwrap(),
        b.cast(zero, DType::I32).unwrap(),
    );
    let x = b.sub(x, z).unwrap();
    let w = b.constant(random_bytes(DType::I8, &[64, 8192], rng));
    let w = b.cast(w, DType::I32).unwrap();
    let y = b.matmul(x, w).unwrap();
    b.output("y", y);
    let g = b.finish().unwrap();
    let after = clean(&integer_products(&g).unwrap()).unwrap();
    insta::assert_snapshot!(text(&after));
    let inputs = [random_bytes(DType::U8, &[2, 64], rng), byte(77).unwrap()];
    assert_eq!(
        interp::run(&after, &inputs).unwrap(),
        interp::run(&g, &inputs).unwrap()
    );
}

/// Every byte comes back, whatever the scale, as long as nothing overflows.
#[test]
fn quantising_again_is_nothing() {
    let all = Tensor::from_bytes(DType::U8, &[16, 16], &(0..=255).collect::<Vec<_>>()).unwrap();
    for scale in [
        1.0,
        0.1,
        0.0117,
        3.3e-38,
        1.2e-38,
        6.6e35,
        std::f32::consts::PI,
    ] {
        for zero in [0, 3, 128, 255] {
            let mut b = GraphBuilder::new("g");
            let q = b.input("q", DType::U8, [16usize, 16]);
            let x = dequantized(&mut b, q, byte(zero), scalar(scale));
            let x = b.transpose(x, &[1, 0]).unwrap();
            let y = quantized(&mut b, x, zero, scale);
            b.output("y", y);
            let g = b.finish().unwrap();
            let after = clean(&merge_quantization(&g).unwrap()).unwrap();
            assert_eq!(
                after.nodes().map(|(_, n)| n.op.name()).collect::<Vec<_>>(),
                ["transpose"],
                "{scale} {zero}"
            );
            let run = |g: &Graph| interp::run(g, std::slice::from_ref(&all)).unwrap();
            assert_eq!(run(&after), run(&g), "{scale} {zero}");
        }
    }
}

#[test]
fn quantising_with_other_parameters_stays() {
    for (zero, scale) in [(4, 0.5), (3, 0.25), (3, f32::MAX)] {
        let mut b = GraphBuilder::new("g");
        let q = b.input("q", DType::U8, [16usize]);
        let x = dequantized(&mut b, q, byte(3), scalar(0.5));
        let y = quantized(&mut b, x, zero, scale);
        b.output("y", y);
        let g = b.finish().unwrap();
        assert_eq!(text(&merge_quantization(&g).unwrap()), text(&g));
    }
}

#[test]
fn elements_are_looked_up_before_they_are_dequantised() {
    let rng = &mut Rng(7);
    let mut b = GraphBuilder::new("g");
    let at = b.input("at", DType::I64, [2usize, 3]);
    let table = b.constant(random_bytes(DType::U8, &[50, 4], rng));
    let table = dequantized(&mut b, table, byte(9), scalar(0.5));
    let y = b.add1(Op::Gather { axis: 0 }, &[table, at]).unwrap();
    b.output("y", y);
    let g = b.finish().unwrap();
    let after = clean(&merge_quantization(&g).unwrap()).unwrap();
    insta::assert_snapshot!(text(&after));
    let at = [Tensor::from_slice(&[0i64, 49, 7, 7, -1, 3], &[2, 3]).unwrap()];
    assert_eq!(
        interp::run(&after, &at).unwrap(),
        interp::run(&g, &at).unwrap()
    );
}

#[test]
fn weights_that_a_broadcast_would_make_large_are_not_computed() {
    let n = 1 << 10;
    let mut b = GraphBuilder::new("g");
    let x = b.input("x", DType::U8, [4, n]);
    let x = b.cast(x, DType::I32).unwrap();
    let ones = Tensor::from_slice(&vec![1i32; n], &[n, 1]).unwrap();
    let column = b.constant(ones.clone());
    let row = b.constant(ones.reshaped(&[1, n]).unwrap());
    let w = b.mul(column, row).unwrap();
    let y = b.matmul(x, w).unwrap();
    b.output("y", y);
    let g = b.finish().unwrap();
    assert_eq!(text(&integer_products(&g).unwrap()), text(&g));
}
