//! Gradients of gradients.

use super::*;
use crate::ir::Real;

/// Compares the derivatives of the gradients with differences of them.
fn check_second(name: &str, operands: &[Operand], build: Build) {
    let options = GradOptions {
        allow_unused: true,
        ..GradOptions::default()
    };
    let gradients = |b: &mut GraphBuilder, x: &[ValueId]| {
        let results = build(b, x)?;
        let loss = weighted(b, &results)?;
        b.grad_with(loss, x, &options)
    };
    check_with(name, operands, &gradients, &options);
}

#[test]
fn element_wise_ops() {
    use ScalarOp::*;
    let unary = [
        Tanh, Sigmoid, Exp, Erf, Gelu, Silu, Softplus, Relu, Sin, Asinh, Recip,
    ];
    for op in unary {
        let build = |b: &mut GraphBuilder, x: &[ValueId]| Ok(vec![b.map(op, x)?]);
        check_second(&op.to_string(), &[reals(&[2, 3])], &build);
    }
    for op in [Mul, Div, Pow, Atan2, Max] {
        let build = |b: &mut GraphBuilder, x: &[ValueId]| Ok(vec![b.map(op, x)?]);
        let operands = [reals(&[2, 3]).positive(), reals(&[3]).positive()];
        check_second(&op.to_string(), &operands, &build);
    }
}

#[test]
fn powers_at_zero() {
    let build = |b: &mut GraphBuilder, x: &[ValueId]| {
        let two = b.scalar(DType::F64, 2.0);
        Ok(vec![b.map(ScalarOp::Pow, &[x[0], two])?])
    };
    check_second("square", &[numbers(&[2], &[0.0, 1.5])], &build);
}

#[test]
fn tensor_ops() {
    let softmax = Op::Softmax {
        axis: 1,
        log: false,
    };
    let norm = Op::LayerNorm {
        axis: 1,
        epsilon: Real(1e-2),
    };
    let (mean, product) = (ReduceKind::Mean, ReduceKind::Prod);
    let x = || reals(&[2, 3]);
    let add = |op: Op| move |b: &mut GraphBuilder, x: &[ValueId]| b.add(op.clone(), x);
    check_second("softmax", &[x()], &add(softmax));
    check_second("layer_norm", &[x(), reals(&[3]), reals(&[3])], &add(norm));
    check_second("matmul", &[x(), reals(&[3, 2])], &add(Op::MatMul));
    for kind in [mean, product] {
        let build = |b: &mut GraphBuilder, x: &[ValueId]| {
            let squared = b.mul(x[0], x[0])?;
            Ok(vec![b.reduce(kind, squared, &[1], false)?])
        };
        check_second("reduce", &[x().batched()], &build);
    }
}
