//! Random bodies.

use super::{Case, Rng};
use crate::ir::*;
use gristmill_runtime::{DType, Tensor};

/// `n` bodies of element-wise ops over views.
pub fn random_maps(rng: &mut Rng, n: usize) -> Vec<Case> {
    let mut case = || {
        let (body, inputs) = random_body(rng);
        Case {
            body,
            inputs,
            tolerance: 1e-5,
        }
    };
    (0..n).map(|_| case()).collect()
}

/// A random body of element-wise ops and views over a few operands; values stay near 1.
fn random_body(rng: &mut Rng) -> (Graph, Vec<Tensor>) {
    let mut b = GraphBuilder::new("random");
    let rank = 1 + rng.below(4);
    let shape: Vec<usize> = (0..rank)
        .map(|_| [1, 2, 3, 5, 8, 70][rng.below(6)])
        .collect();
    let mut values = Vec::new();
    let mut inputs = Vec::new();
    for i in 0..3 {
        let own: Vec<usize> = shape
            .iter()
            .map(|&d| if rng.below(4) == 0 { 1 } else { d })
            .collect();
        let skip = rng.below(2).min(rank - 1);
        values.push(b.input(&format!("x{i}"), DType::F32, own[skip..].iter().copied()));
        inputs.push(rng.tensor(DType::F32, &own[skip..], 0.25, 1.5));
    }
    for _ in 0..2 + rng.below(10) {
        let (x, y) = (
            values[rng.below(values.len())],
            values[rng.below(values.len())],
        );
        let v = match rng.below(10) {
            0 => b.map(ScalarOp::Exp, &[x]),
            1 => b.map(ScalarOp::Tanh, &[x]),
            2 => b.map(ScalarOp::Silu, &[x]),
            3 => b.map(ScalarOp::Relu, &[x]),
            4 => b.map(ScalarOp::Mul, &[x, y]),
            5 => b.map(ScalarOp::Max, &[x, y]),
            6 => {
                let c = b.map(ScalarOp::Lt, &[x, y]).unwrap();
                b.map(ScalarOp::Select, &[c, y, x])
            }
            7 => {
                let perm: Vec<usize> = (0..b.ty(x).rank()).rev().collect();
                let t = b.transpose(x, &perm).unwrap();
                let t = b.map(ScalarOp::Sqrt, &[t]).unwrap();
                b.transpose(t, &perm)
            }
            8 => {
                let n = b.ty(x).shape.n_elements();
                let flat = b.reshape(x, [n]).unwrap();
                let half = b.scalar(DType::F32, 0.5);
                let flat = b.add_(flat, half).unwrap();
                let s = b.ty(x).shape.0.clone();
                b.reshape(flat, s)
            }
            _ => b.map(ScalarOp::Sub, &[x, y]),
        };
        values.extend(v);
    }
    for (i, &v) in values.iter().rev().take(2).enumerate() {
        b.output(&format!("y{i}"), v);
    }
    (b.finish().unwrap(), inputs)
}

/// A random node over `values`; errors of the type rules are expected.
fn random_node(b: &mut GraphBuilder, values: &[ValueId], rng: &mut Rng) -> crate::Result<ValueId> {
    let (x, y) = (
        values[rng.below(values.len())],
        values[rng.below(values.len())],
    );
    let ty = b.ty(x).clone();
    let shape = ty.static_shape().unwrap();
    let axis = rng.below(shape.len());
    let keepdims = rng.below(2) == 0;
    match rng.below(16) {
        0 => b.map(ScalarOp::Tanh, &[x]),
        1 => b.map(ScalarOp::Sigmoid, &[x]),
        2 => b.map(ScalarOp::Add, &[x, y]),
        3 => b.map(ScalarOp::Mul, &[x, y]),
        4 => b.reduce(ReduceKind::Mean, x, &[axis], keepdims),
        5 => b.reduce(ReduceKind::Max, x, &[axis], keepdims),
        6 => b.reduce(
            ReduceKind::Sum,
            x,
            &(axis..shape.len()).collect::<Vec<_>>(),
            true,
        ),
        7 => b.add1(Op::Softmax { axis, log: false }, &[x]),
        8 => {
            let perm: Vec<usize> = (0..shape.len()).map(|i| (i + axis) % shape.len()).collect();
            b.transpose(x, &perm)
        }
        9 => b.concat(&[x, y], axis),
        10 => {
            let zero = b.scalar(ty.dtype, 0.5);
            let mut low = vec![0; shape.len()];
            low[axis] = 1;
            b.add1(
                Op::Pad {
                    high: low.iter().map(|l| 2 * l).collect(),
                    low,
                    mode: PadMode::Constant,
                },
                &[x, zero],
            )
        }
        11 => {
            let mut perm: Vec<usize> = (0..shape.len()).collect();
            perm[shape.len().saturating_sub(2)..].reverse();
            let t = b.transpose(y, &perm)?;
            b.matmul(x, t)
        }
        12 => b.slice_axis(x, axis, shape[axis] / 2, shape[axis] - shape[axis] / 2),
        13 => b.reshape(x, [shape.iter().product::<usize>()]),
        14 => b.add1(
            Op::CumSum {
                axis,
                exclusive: keepdims,
                reverse: false,
            },
            &[x],
        ),
        _ => {
            let other = if ty.dtype == DType::F32 {
                DType::F64
            } else {
                DType::F32
            };
            b.cast(x, other)
        }
    }
}

/// `n` bodies of ops of many kinds.
pub fn random_phases(rng: &mut Rng, n: usize) -> Vec<Case> {
    (0..n).map(|_| mixed(rng)).collect()
}

fn mixed(rng: &mut Rng) -> Case {
    let mut b = GraphBuilder::new("mixed");
    let rank = 2 + rng.below(2);
    let shape: Vec<usize> = (0..rank).map(|_| [1, 3, 4, 17][rng.below(4)]).collect();
    let mut values = Vec::new();
    let mut inputs = Vec::new();
    for i in 0..2 {
        values.push(b.input(&format!("x{i}"), DType::F32, shape.iter().copied()));
        inputs.push(rng.tensor(DType::F32, &shape, -1.0, 1.0));
    }
    for _ in 0..4 + rng.below(12) {
        let added = random_node(&mut b, &values, rng);
        let small = |v: &ValueId| {
            let shape = b.ty(*v).static_shape().unwrap();
            !shape.is_empty() && (1..5_000usize).contains(&shape.iter().product())
        };
        values.extend(added.ok().filter(small));
    }
    let first = rng.below(values.len());
    for (i, &v) in [values[first], *values.last().unwrap()].iter().enumerate() {
        b.output(&format!("y{i}"), v);
    }
    Case {
        body: b.finish().unwrap(),
        inputs,
        tolerance: 1e-4,
    }
}
