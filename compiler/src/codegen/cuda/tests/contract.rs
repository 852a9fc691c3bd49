//! Products in tiles.

use super::run::check_all;
use super::*;
use crate::codegen::testing::Case;

/// Products of ragged and of whole tiles, in batches that broadcast, of every family of dtypes.
fn products(rng: &mut Rng) -> Vec<Case> {
    let mut all = Vec::new();
    for dtype in [
        DType::F32,
        DType::F64,
        DType::F16,
        DType::BF16,
        DType::I8,
        DType::I32,
        DType::U64,
    ] {
        for (a, b) in [
            (vec![33, 70], vec![70, 65]),
            (vec![64, 16], vec![16, 64]),
            (vec![5, 4], vec![4, 100]),
            (vec![2, 1, 9, 17], vec![3, 17, 40]),
        ] {
            let operands = vec![
                rng.tensor(dtype, &a, -5.0, 5.0),
                rng.tensor(dtype, &b, -5.0, 5.0),
            ];
            all.push(Case::of_op(&Op::MatMul, operands, 1e-6));
        }
    }
    // So many tiles that they are of the largest size; one extent whole, the others ragged.
    for (m, k, n) in [(130, 20, 128), (128, 9, 150)] {
        let operands = vec![
            rng.tensor(DType::F32, &[40, m, k], -1.0, 1.0),
            rng.tensor(DType::F32, &[k, n], -1.0, 1.0),
        ];
        all.push(Case::of_op(&Op::MatMul, operands, 1e-6));
    }
    all
}

#[test]
fn products_of_every_dtype() {
    check_all("products in tiles", &products(&mut Rng(51)));
}

/// `residual - gelu(scale * (cast(x) + shift)^T w + bias) / 2`: the operand's past and the result's future in one kernel.
fn layer(rng: &mut Rng, dtype: DType, [m, k, n]: [usize; 3]) -> Case {
    let mut b = GraphBuilder::new("layer");
    let mut inputs = Vec::new();
    let mut input = |b: &mut GraphBuilder, name: &str, dtype: DType, shape: &[usize]| {
        inputs.push(rng.tensor(dtype, shape, -1.0, 1.0));
        b.input(name, dtype, shape.iter().copied())
    };
    let x = input(&mut b, "x", DType::F16, &[k, m]);
    let shift = input(&mut b, "shift", dtype, &[m]);
    let (w, bias) = (
        input(&mut b, "w", dtype, &[k, n]),
        input(&mut b, "bias", dtype, &[n]),
    );
    let residual = input(&mut b, "residual", dtype, &[m, n]);
    let x = b.cast(x, dtype).unwrap();
    let x = b.add_(x, shift).unwrap();
    let x = b.transpose(x, &[1, 0]).unwrap();
    let y = b.matmul(x, w).unwrap();
    let y = b.add_(y, bias).unwrap();
    let y = b.map(ScalarOp::Gelu, &[y]).unwrap();
    let half = b.scalar(dtype, 0.5);
    let y = b.mul(half, y).unwrap();
    let y = b.sub(residual, y).unwrap();
    b.output("y", y);
    Case {
        body: b.finish().unwrap(),
        inputs,
        tolerance: 1e-5,
    }
}

#[test]
fn neighbours_join_the_product() {
    let rng = &mut Rng(52);
    let cases = vec![
        layer(rng, DType::F32, [40, 33, 50]),
        layer(rng, DType::F64, [17, 20, 64]),
        layer(rng, DType::F16, [32, 16, 32]),
        layer(rng, DType::BF16, [9, 24, 70]),
    ];
    for case in &cases {
        let made = generate(&as_cluster(&case.body), Arch::COMMON).unwrap();
        let names: Vec<&str> = made.kernels.iter().map(|k| k.name.as_str()).collect();
        assert_eq!(names, ["test_0_0_contract"], "{}", case.body);
    }
    check_all("products with neighbours", &cases);
}

/// `select(a > 0, x @ w, 0) * (1 - tanh(a)^2)`.
fn masked(rng: &mut Rng, dtype: DType, [m, k, n]: [usize; 3]) -> Case {
    let mut b = GraphBuilder::new("masked");
    let shapes = [[m, k], [k, n], [m, n]];
    let [x, w, a] = [0, 1, 2].map(|i| b.input(&format!("x{i}"), dtype, shapes[i]));
    let (zero, one) = (b.scalar(dtype, 0.0), b.scalar(dtype, 1.0));
    let mask = b.map(ScalarOp::Gt, &[a, zero]).unwrap();
    let t = b.map(ScalarOp::Tanh, &[a]).unwrap();
    let square = b.mul(t, t).unwrap();
    let slope = b.sub(one, square).unwrap();
    let y = b.matmul(x, w).unwrap();
    let y = b.map(ScalarOp::Select, &[mask, y, zero]).unwrap();
    let y = b.mul(y, slope).unwrap();
    b.output("y", y);
    Case {
        body: b.finish().unwrap(),
        inputs: shapes.map(|s| rng.tensor(dtype, &s, -1.0, 1.0)).into(),
        tolerance: 1e-5,
    }
}

#[test]
fn gradients_of_activations_join_the_product() {
    let rng = &mut Rng(56);
    let cases = vec![
        masked(rng, DType::F32, [40, 33, 50]),
        masked(rng, DType::F32, [2, 64, 96]),
        masked(rng, DType::F16, [64, 48, 64]),
        masked(rng, DType::BF16, [9, 24, 70]),
    ];
    for case in &cases {
        let made = generate(&as_cluster(&case.body), Arch::COMMON).unwrap();
        assert_eq!(made.kernels.len(), 1, "{}", made.listing);
    }
    check_all("products with gradients of activations", &cases);
}

#[test]
fn canonical_product() {
    let case = layer(&mut Rng(55), DType::F16, [40, 16, 64]);
    insta::assert_snapshot!("contract_layer", listing(&case.body));
}

/// A value that others use too, or that something dear leads up to, is computed once and stored.
#[test]
fn dear_operands_and_shared_results_are_stored() {
    let rng = &mut Rng(53);
    let mut b = GraphBuilder::new("shared");
    let (x, w) = (
        b.input("x", DType::F32, [20, 30]),
        b.input("w", DType::F32, [30, 40]),
    );
    let e = b.map(ScalarOp::Exp, &[x]).unwrap();
    let y = b.matmul(e, w).unwrap();
    let r = b.map(ScalarOp::Relu, &[y]).unwrap();
    let t = b.map(ScalarOp::Tanh, &[y]).unwrap();
    let s = b.reduce(ReduceKind::Sum, t, &[1], false).unwrap();
    [r, s]
        .into_iter()
        .enumerate()
        .for_each(|(i, v)| b.output(&format!("y{i}"), v));
    let body = b.finish().unwrap();
    let made = generate(&as_cluster(&body), Arch::COMMON).unwrap();
    let names: Vec<&str> = made.kernels.iter().map(|k| k.name.as_str()).collect();
    assert_eq!(
        names,
        ["test_0_0_map", "test_0_1_contract", "test_0_2_bundle"]
    );
    let inputs = vec![
        rng.tensor(DType::F32, &[20, 30], -1.0, 1.0),
        rng.tensor(DType::F32, &[30, 40], -1.0, 1.0),
    ];
    check_all(
        "products with shared results",
        &[Case {
            body,
            inputs,
            tolerance: 1e-5,
        }],
    );
}

#[test]
fn convolutions_are_products() {
    let rng = &mut Rng(54);
    let mut all = Vec::new();
    for layout in [Layout::ChannelsFirst, Layout::ChannelsLast] {
        for (groups, c_in, c_out) in [(1, 8, 20), (2, 8, 10), (1, 3, 33)] {
            for dtype in [DType::F32, DType::F16, DType::I32] {
                let (x, w) = match layout {
                    Layout::ChannelsFirst => {
                        (vec![2, c_in, 9, 8], vec![c_out, c_in / groups, 3, 2])
                    }
                    Layout::ChannelsLast => (vec![2, 9, 8, c_in], vec![3, 2, c_in / groups, c_out]),
                };
                let (strides, dilations) = (vec![2, 1], vec![1, 2]);
                let window = Window {
                    strides,
                    dilations,
                    pads_low: vec![1, 0],
                    pads_high: vec![2, 1],
                };
                let operands = vec![
                    rng.tensor(dtype, &x, -2.0, 2.0),
                    rng.tensor(dtype, &w, -2.0, 2.0),
                ];
                all.push(Case::of_op(
                    &Op::Conv {
                        window,
                        groups,
                        layout,
                    },
                    operands,
                    1e-6,
                ));
            }
        }
    }
    for case in &all {
        let made = generate(&as_cluster(&case.body), Arch::COMMON).unwrap();
        assert!(
            made.kernels.iter().any(|k| k.name.ends_with("_contract")),
            "{}",
            case.body
        );
    }
    check_all("convolutions as products", &all);
}

/// Few tiles of long sums: several blocks share each, and a second kernel joins their parts and computes what follows. Sums of thousands of
/// `f32` are off by some units in the last place of the greatest; followers in `f16` may round a sum on the edge to the other side.
#[test]
fn long_sums_are_split() {
    let rng = &mut Rng(56);
    let mut cases = Vec::new();
    for (dtype, tolerance) in [
        (DType::F32, 1e-5),
        (DType::F64, 1e-12),
        (DType::I32, 0.0),
        (DType::F16, 1e-3),
    ] {
        for ([m, k, n], batch) in [([33, 2100, 40], 2), ([40, 1024, 29], 1)] {
            let operands = [vec![batch, m, k], vec![k, n]]
                .map(|s| rng.tensor(dtype, &s, -1.0, 1.0))
                .to_vec();
            cases.push(Case::of_op(&Op::MatMul, operands, tolerance));
            if dtype.is_float() {
                cases.push(Case {
                    tolerance,
                    ..layer(rng, dtype, [m, k, n])
                });
            }
        }
    }
    for case in &cases {
        let text = listing(&case.body);
        assert!(text.contains("gm_contract_join"), "{text}");
    }
    check_all("products whose sums are split", &cases);
}

/// True if a thread reads or writes memory of its own between the first barrier and the last: in
/// the main loop of a product by threads.
fn spills_between_barriers(text: &str) -> bool {
    let [first, last] = [text.find("BAR.SYNC"), text.rfind("BAR.SYNC")].map(|at| at.unwrap_or(0));
    assert!(
        text[first..last].contains("FFMA"),
        "no main loop between barriers"
    );
    ["LDL", "STL"].iter().any(|i| text[first..last].contains(i))
}

/// Two blocks of a matrix product's largest tile fit the registers of a multiprocessor, nothing is
/// spilled in the main loop, and shared memory is read four elements at a time.
#[test]
fn tiles_stay_in_registers() {
    let Some(nvrtc) = nvrtc_or_left_out("resources of products") else {
        return;
    };
    let zeros = |s: &[usize]| Tensor::zeros(DType::F32, s).unwrap();
    let ones = vec![1, 1];
    let window = Window {
        strides: ones.clone(),
        dilations: ones.clone(),
        pads_low: ones.clone(),
        pads_high: ones,
    };
    let conv = |layout| Op::Conv {
        window: window.clone(),
        groups: 1,
        layout,
    };
    let cases = [
        (
            graph_of(&Op::MatMul, &[zeros(&[1920, 512]), zeros(&[512, 1920])]),
            128,
        ),
        (
            graph_of(&Op::MatMul, &[zeros(&[1900, 510]), zeros(&[510, 1901])]),
            128,
        ),
        (
            graph_of(
                &conv(Layout::ChannelsLast),
                &[zeros(&[9, 56, 56, 64]), zeros(&[3, 3, 64, 128])],
            ),
            255,
        ),
    ];
    for (graph, most) in cases {
        let g = as_cluster(&graph);
        for arch in ARCHS {
            let made = generate(&g, Arch::parse(arch).unwrap()).unwrap();
            let compiled = nvrtc.compile(&made.units[0]).unwrap();
            let r = compiled.resources["gm_contract"];
            // ptxas may keep a word in memory while the loop runs, never in it.
            assert!(
                r.registers <= most && r.spill_store_bytes <= 8 && r.stack_bytes <= 8,
                "{arch}: {r:?}\n{graph}"
            );
            if let Some(text) = machine_code(nvrtc, &compiled.cubin, "products by threads") {
                assert!(!spills_between_barriers(&text), "{arch}: {r:?}\n{graph}");
            }
            assert_eq!(
                compiled.ptx.matches("ld.shared.v4").count(),
                32,
                "{arch}\n{graph}"
            );
        }
    }
}

/// A result under another shape is the same memory: nothing is copied, however many shapes it has.
#[test]
fn reshaped_results_are_written_at_once() {
    let rng = &mut Rng(56);
    let mut b = GraphBuilder::new("reshaped");
    let (x, w) = (
        b.input("x", DType::F32, [12, 20]),
        b.input("w", DType::F32, [20, 30]),
    );
    let y = b.matmul(x, w).unwrap();
    let y = b.map(ScalarOp::Relu, &[y]).unwrap();
    let a = b.reshape(y, [3, 4, 30]).unwrap();
    let c = b.reshape(a, [3, 4, 5, 6]).unwrap();
    let d = b.reshape(y, [360]).unwrap();
    let s = b.reduce(ReduceKind::Sum, c, &[2, 3], false).unwrap();
    [a, d, s]
        .into_iter()
        .enumerate()
        .for_each(|(i, v)| b.output(&format!("y{i}"), v));
    let body = b.finish().unwrap();
    let made = generate(&as_cluster(&body), Arch::COMMON).unwrap();
    let entries: Vec<&str> = made.kernels.iter().map(|k| k.entry.as_str()).collect();
    // The second result needs memory of its own.
    assert_eq!(entries, ["gm_contract", "gm_bundle"]);
    let inputs = vec![
        rng.tensor(DType::F32, &[12, 20], -1.0, 1.0),
        rng.tensor(DType::F32, &[20, 30], -1.0, 1.0),
    ];
    check_all(
        "products under other shapes",
        &[Case {
            body,
            inputs,
            tolerance: 1e-6,
        }],
    );
}
