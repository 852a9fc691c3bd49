//! Element-wise bodies on 8-bit integers: they are vector kernels, and every element is the interpreter's.

use super::harness::{check, steps};
use crate::codegen::testing::Rng;
use crate::ir::*;
use gristmill_runtime::{DType, Tensor};

const BYTES: [DType; 2] = [DType::U8, DType::I8];

fn all_bytes(dtype: DType, shape: &[usize]) -> Tensor {
    let n = shape.iter().product::<usize>();
    Tensor::from_bytes(dtype, shape, &(0..n).map(|i| i as u8).collect::<Vec<_>>()).unwrap()
}

/// Ties, bounds of the integers and their neighbours, infinities, NaN, and random bits.
fn floats(n: usize, rng: &mut Rng) -> Tensor {
    let mut all = vec![
        0.0,
        -0.0,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        -f32::NAN,
        f32::MAX,
        f32::MIN_POSITIVE,
    ];
    for bound in [0.0f32, 127.0, 128.0, 255.0, 256.0, 2147483648.0] {
        for step in [-1.0, -0.75, -0.5, -0.25, 0.0, 0.25, 0.5, 0.75, 1.0] {
            all.extend([bound + step, -(bound + step)]);
        }
    }
    while all.len() < n {
        let bits = (rng.next() as u32) << 1 ^ rng.next() as u32;
        all.push(f32::from_bits(bits));
        all.push(rng.real(-300.0, 300.0) as f32);
    }
    Tensor::from_slice(&all[..n], &[n]).unwrap()
}

fn quantized(b: &mut GraphBuilder, x: ValueId, scale: f64, zero: f64, to: DType) -> ValueId {
    let (scale, zero) = (b.scalar(DType::F32, scale), b.scalar(DType::F32, zero));
    let x = b.map(ScalarOp::Div, &[x, scale]).unwrap();
    let x = b.map(ScalarOp::Round, &[x]).unwrap();
    let x = b.add_(x, zero).unwrap();
    b.cast(x, to).unwrap()
}

fn dequantized(b: &mut GraphBuilder, q: ValueId, scale: f64, zero: f64) -> ValueId {
    let (scale, zero) = (b.scalar(DType::F32, scale), b.scalar(DType::I32, zero));
    let q = b.cast(q, DType::I32).unwrap();
    let q = b.sub(q, zero).unwrap();
    let q = b.cast(q, DType::F32).unwrap();
    b.mul(q, scale).unwrap()
}

fn only_vectors(g: &Graph) {
    let steps = steps(g);
    assert!(
        steps.iter().all(|s| s.ends_with("_vector")),
        "{g} {steps:?}"
    );
}

#[test]
fn quantised_sums_are_one_kernel() {
    let rng = &mut Rng(41);
    for dtype in BYTES {
        let mut b = GraphBuilder::new("sum");
        let (p, q) = (b.input("p", dtype, [7, 331]), b.input("q", dtype, [331]));
        let (x, y) = (
            dequantized(&mut b, p, 0.021, 3.0),
            dequantized(&mut b, q, 0.5, -7.0),
        );
        let sum = b.add_(x, y).unwrap();
        let sum = b.map(ScalarOp::Relu, &[sum]).unwrap();
        let sum = quantized(&mut b, sum, 0.31, 5.0, dtype);
        b.output("sum", sum);
        let g = b.finish().unwrap();
        assert_eq!(steps(&g), ["test_0_0_vector"]);
        check(
            &g,
            &[all_bytes(dtype, &[7, 331]), all_bytes(dtype, &[331])],
            0.0,
            rng,
        );
    }
}

/// The calls of a transcendental function cut the kernel into stages, and integers cross them.
#[test]
fn quantised_functions_are_one_kernel() {
    let rng = &mut Rng(42);
    for dtype in BYTES {
        let mut b = GraphBuilder::new("gelu");
        let q = b.input("q", dtype, [3, 300]);
        let x = dequantized(&mut b, q, 0.02, 10.0);
        let wide = b.cast(q, DType::I32).unwrap();
        let y = b.map(ScalarOp::Gelu, &[x]).unwrap();
        let back = quantized(&mut b, y, 0.01, 4.0, dtype);
        let z = dequantized(&mut b, back, 0.01, 4.0);
        let wide = b.cast(wide, DType::F32).unwrap();
        let z = b.add_(z, wide).unwrap();
        b.output("z", z);
        let g = b.finish().unwrap();
        assert_eq!(steps(&g), ["test_0_0_vector"]);
        // A result of gelu near a tie may be rounded the other way, which is a step of the scale.
        check(&g, &[all_bytes(dtype, &[3, 300])], 1e-4, rng);
    }
}

#[test]
fn floats_become_integers_as_the_interpreter_says() {
    let rng = &mut Rng(43);
    let x = floats(5003, rng);
    for to in [DType::U8, DType::I8, DType::I32, DType::Bool] {
        let mut b = GraphBuilder::new("cast");
        let v = b.input("x", DType::F32, [5003]);
        let direct = b.cast(v, to).unwrap();
        let rounded = b.map(ScalarOp::Round, &[v]).unwrap();
        let rounded = b.cast(rounded, to).unwrap();
        let back = b.cast(rounded, DType::F32).unwrap();
        for (name, v) in [("direct", direct), ("rounded", rounded), ("back", back)] {
            b.output(name, v);
        }
        let g = b.finish().unwrap();
        only_vectors(&g);
        check(&g, std::slice::from_ref(&x), 0.0, rng);
    }
}

#[test]
fn integers_are_cast_as_the_interpreter_says() {
    let rng = &mut Rng(44);
    let lanes = [DType::U8, DType::I8, DType::I32, DType::Bool, DType::F32];
    for from in lanes {
        let x = match from {
            DType::F32 => floats(999, rng),
            DType::I32 => {
                let bits: Vec<i32> = (0..999)
                    .map(|i| {
                        if i < 600 {
                            i - 300
                        } else {
                            (rng.next() as i32) << 1
                        }
                    })
                    .collect();
                Tensor::from_slice(&bits, &[999]).unwrap()
            }
            _ => {
                let bytes: Vec<u8> = (0..999)
                    .map(|i| {
                        if from == DType::Bool {
                            i as u8 & 1
                        } else {
                            i as u8
                        }
                    })
                    .collect();
                Tensor::from_bytes(from, &[999], &bytes).unwrap()
            }
        };
        for to in lanes {
            let op = Op::Map(ScalarOp::Cast(to));
            let g = crate::codegen::testing::graph_of(&op, std::slice::from_ref(&x));
            only_vectors(&g);
            check(&g, std::slice::from_ref(&x), 0.0, rng);
        }
    }
}

#[test]
fn integer_ops_on_all_pairs_of_bytes() {
    use ScalarOp::*;
    let rng = &mut Rng(45);
    for dtype in BYTES {
        let operands = [all_bytes(dtype, &[256, 1]), all_bytes(dtype, &[256])];
        for op in [Add, Sub, Mul, Min, Max, Eq, Ne, Lt, Le, Gt, Ge] {
            let g = crate::codegen::testing::graph_of(&Op::Map(op), &operands);
            only_vectors(&g);
            check(&g, &operands, 0.0, rng);
        }
        for op in [Neg, Abs] {
            let g = crate::codegen::testing::graph_of(&Op::Map(op), &operands[1..]);
            only_vectors(&g);
            check(&g, &operands[1..], 0.0, rng);
        }
    }
}

/// Bodies of all dtypes of lanes, over views, with results of several dtypes.
#[test]
fn random_bodies_of_bytes() {
    let rng = &mut Rng(46);
    for _ in 0..150 {
        let mut b = GraphBuilder::new("random");
        let shape: Vec<usize> = (0..1 + rng.below(3))
            .map(|_| [1, 3, 16, 35, 70][rng.below(5)])
            .collect();
        let mut inputs = Vec::new();
        let mut values = Vec::new();
        for (i, dtype) in [DType::U8, DType::I8, DType::I32, DType::F32, DType::Bool]
            .into_iter()
            .enumerate()
        {
            let own: Vec<usize> = shape
                .iter()
                .map(|&d| if rng.below(4) == 0 { 1 } else { d })
                .collect();
            values.push(b.input(&format!("x{i}"), dtype, own.iter().copied()));
            inputs.push(rng.tensor(dtype, &own, -200.0, 300.0));
        }
        for _ in 0..3 + rng.below(14) {
            let (x, y) = (
                values[rng.below(values.len())],
                values[rng.below(values.len())],
            );
            let to = [DType::U8, DType::I8, DType::I32, DType::F32, DType::Bool][rng.below(5)];
            let added = match rng.below(8) {
                0 | 1 => b.cast(x, to),
                2 => b.map(ScalarOp::Add, &[x, y]),
                3 => b.map(ScalarOp::Max, &[x, y]),
                4 => b.map(ScalarOp::Lt, &[x, y]),
                5 => b.map(ScalarOp::Select, &[x, y, y]),
                6 => b.map(ScalarOp::Select, &[values[4], x, y]),
                _ => b.map(ScalarOp::Round, &[x]),
            };
            values.extend(added);
        }
        for (i, &v) in values.iter().rev().take(3).enumerate() {
            b.output(&format!("y{i}"), v);
        }
        check(&b.finish().unwrap(), &inputs, 0.0, rng);
    }
}
