//! Gradients of gradients.

use super::*;
use crate::ir::Real;

/// Compares the derivatives of the gradients with differences of them.
pub(super) fn check_second(name: &str, operands: &[Operand], build: Build) {
    let options = GradOptions {
        allow_unused: true,
        ..GradOptions::default()
    };
    let gradients = |b: &mut GraphBuilder, x: &[ValueId]| {
        let results = build(b, x)?;
        let loss = weighted(b, &results)?;
        let floats = x.iter().filter(|&&v| b.ty(v).dtype.is_float());
        let floats: Vec<ValueId> = floats.copied().collect();
        b.grad_with(loss, &floats, &options)
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

#[test]
fn windows_and_attention() {
    let window = crate::ir::Window {
        strides: vec![2],
        dilations: vec![1],
        pads_low: vec![1],
        pads_high: vec![0],
    };
    let layout = crate::ir::Layout::ChannelsLast;
    let pool = |kind| Op::Pool {
        kind,
        size: vec![2],
        window: window.clone(),
        ceil: false,
        layout,
    };
    let conv = Op::Conv {
        window: window.clone(),
        groups: 1,
        layout,
    };
    let attention = Op::Attention {
        scale: Real(0.7),
        causal: true,
    };
    let tanh = |op: Op| {
        move |b: &mut GraphBuilder, x: &[ValueId]| {
            let y = b.add1(op.clone(), x)?;
            Ok(vec![b.map(ScalarOp::Tanh, &[y])?])
        }
    };
    check_second("conv", &[reals(&[1, 5, 2]), reals(&[3, 2, 2])], &tanh(conv));
    for kind in [crate::ir::PoolKind::Max, crate::ir::PoolKind::Avg] {
        check_second("pool", &[reals(&[1, 5, 2])], &tanh(pool(kind)));
    }
    let qkv = [reals(&[1, 2, 2]), reals(&[1, 3, 2]), reals(&[1, 3, 2])];
    check_second("attention", &qkv, &tanh(attention));
}

#[test]
fn reads_and_writes_at_positions() {
    let at = indices(&[3], &[0, 2, 0]);
    let tanh = |op: Op| {
        move |b: &mut GraphBuilder, x: &[ValueId]| {
            let y = b.add1(op.clone(), x)?;
            Ok(vec![b.map(ScalarOp::Tanh, &[y])?])
        }
    };
    check_second("gather", &[reals(&[3, 2]), at.clone()], &|b, x| {
        let y = b.add1(Op::Gather { axis: 0 }, x)?;
        Ok(vec![b.mul(y, y)?])
    });
    for kind in [crate::ir::ScatterKind::Set, crate::ir::ScatterKind::Mul] {
        let op = Op::ScatterElements { axis: 0, kind };
        check_second(
            "scatter",
            &[reals(&[3]), at.clone(), reals(&[3])],
            &tanh(op),
        );
    }
    for mode in [crate::ir::PadMode::Reflect, crate::ir::PadMode::Wrap] {
        let op = Op::Pad {
            low: vec![1],
            high: vec![2],
            mode,
        };
        check_second("pad", &[reals(&[4])], &tanh(op));
    }
}
