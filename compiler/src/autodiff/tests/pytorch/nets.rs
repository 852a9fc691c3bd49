//! Graphs of whole nets and of layers that are no single op.

use super::super::ops::window;
use super::{Case, case};
use crate::error::Result;
use crate::ir::{GraphBuilder, Layout, Op, PoolKind, Real, ReduceKind, ScalarOp, ValueId};
use gristmill_runtime::DType;

pub fn cases() -> Vec<Case> {
    vec![
        case("net_mlp", mlp),
        case("net_lenet", lenet),
        case("net_residual", residual),
        case("net_transformer", transformer),
        case("net_gated", gated),
        case("net_lstm", lstm),
        case("net_batch_norm", batch_norm),
        case("net_group_norm", group_norm),
    ]
}

/// `x w^T`.
fn product(b: &mut GraphBuilder, x: ValueId, w: ValueId) -> Result<ValueId> {
    let w = b.transpose(w, &[1, 0])?;
    b.matmul(x, w)
}

/// `x w^T + bias` for weights and a bias.
fn linear(b: &mut GraphBuilder, x: ValueId, of: &[ValueId]) -> Result<ValueId> {
    let y = product(b, x, of[0])?;
    b.add_(y, of[1])
}

fn act(b: &mut GraphBuilder, op: ScalarOp, x: ValueId) -> Result<ValueId> {
    b.map(op, &[x])
}

/// The mean of minus the logarithms of the labels' probabilities.
fn cross_entropy(b: &mut GraphBuilder, logits: ValueId, labels: ValueId) -> Result<ValueId> {
    let softmax = Op::Softmax { axis: 1, log: true };
    let all = b.add1(softmax, &[logits])?;
    let column = [b.ty(labels).shape[0].clone(), 1.into()];
    let labels = b.reshape(labels, column)?;
    let chosen = b.add1(Op::GatherElements { axis: 1 }, &[all, labels])?;
    let mean = b.reduce(ReduceKind::Mean, chosen, &[0, 1], false)?;
    act(b, ScalarOp::Neg, mean)
}

fn mlp(b: &mut GraphBuilder, x: &[ValueId]) -> Result<ValueId> {
    let h = linear(b, x[0], &x[1..3])?;
    let h = act(b, ScalarOp::Relu, h)?;
    let h = linear(b, h, &x[3..5])?;
    let h = act(b, ScalarOp::Tanh, h)?;
    let logits = linear(b, h, &x[5..7])?;
    cross_entropy(b, logits, x[7])
}

/// A convolution with the same stride and pad along both axes.
fn conv(
    b: &mut GraphBuilder,
    x: ValueId,
    w: ValueId,
    stride: usize,
    pad: usize,
) -> Result<ValueId> {
    let op = Op::Conv {
        window: window(&[stride; 2], &[1; 2], &[pad; 2], &[pad; 2]),
        groups: 1,
        layout: Layout::ChannelsFirst,
    };
    b.add1(op, &[x, w])
}

/// Numbers of channels as `[c, 1, 1]`.
fn channels(b: &mut GraphBuilder, x: ValueId) -> Result<ValueId> {
    let shape = [b.ty(x).shape[0].clone(), 1.into(), 1.into()];
    b.reshape(x, shape)
}

fn halved(b: &mut GraphBuilder, kind: PoolKind, x: ValueId) -> Result<ValueId> {
    let op = Op::Pool {
        kind,
        size: vec![2; 2],
        window: window(&[2; 2], &[1; 2], &[0; 2], &[0; 2]),
        ceil: false,
        layout: Layout::ChannelsFirst,
    };
    b.add1(op, &[x])
}

fn lenet(b: &mut GraphBuilder, x: &[ValueId]) -> Result<ValueId> {
    let (first, second) = (channels(b, x[2])?, channels(b, x[4])?);
    let h = conv(b, x[0], x[1], 1, 1)?;
    let h = b.add_(h, first)?;
    let h = act(b, ScalarOp::Relu, h)?;
    let h = halved(b, PoolKind::Max, h)?;
    let h = conv(b, h, x[3], 1, 0)?;
    let h = b.add_(h, second)?;
    let h = act(b, ScalarOp::Tanh, h)?;
    let h = halved(b, PoolKind::Avg, h)?;
    let h = b.reshape(h, [2usize, 16])?;
    let logits = linear(b, h, &x[5..7])?;
    cross_entropy(b, logits, x[7])
}

/// `(x - mean) / sqrt(variance + 1e-5)`.
fn standardised(
    b: &mut GraphBuilder,
    x: ValueId,
    mean: ValueId,
    variance: ValueId,
) -> Result<ValueId> {
    let epsilon = b.scalar(DType::F64, 1e-5);
    let sum = b.add_(variance, epsilon)?;
    let deviation = act(b, ScalarOp::Sqrt, sum)?;
    let rest = b.sub(x, mean)?;
    b.div(rest, deviation)
}

/// `x * scale + shift` for numbers of channels.
fn scaled(b: &mut GraphBuilder, x: ValueId, of: &[ValueId]) -> Result<ValueId> {
    let (scale, shift) = (channels(b, of[0])?, channels(b, of[1])?);
    let product = b.mul(x, scale)?;
    b.add_(product, shift)
}

/// A batch norm by stored statistics: scale, shift, mean and variance.
fn stored_norm(b: &mut GraphBuilder, x: ValueId, of: &[ValueId]) -> Result<ValueId> {
    let (mean, variance) = (channels(b, of[2])?, channels(b, of[3])?);
    let x = standardised(b, x, mean, variance)?;
    scaled(b, x, of)
}

fn residual(b: &mut GraphBuilder, x: &[ValueId]) -> Result<ValueId> {
    let y = conv(b, x[0], x[1], 2, 1)?;
    let y = stored_norm(b, y, &x[2..6])?;
    let y = act(b, ScalarOp::Relu, y)?;
    let y = conv(b, y, x[6], 1, 1)?;
    let y = stored_norm(b, y, &x[7..11])?;
    let short = conv(b, x[0], x[11], 2, 0)?;
    let sum = b.add_(y, short)?;
    act(b, ScalarOp::Relu, sum)
}

/// `x` standardised by its own statistics over axes.
fn own_norm(b: &mut GraphBuilder, x: ValueId, axes: &[usize]) -> Result<ValueId> {
    let mean = b.reduce(ReduceKind::Mean, x, axes, true)?;
    let rest = b.sub(x, mean)?;
    let squares = b.mul(rest, rest)?;
    let variance = b.reduce(ReduceKind::Mean, squares, axes, true)?;
    standardised(b, x, mean, variance)
}

fn batch_norm(b: &mut GraphBuilder, x: &[ValueId]) -> Result<ValueId> {
    let y = own_norm(b, x[0], &[0, 2, 3])?;
    scaled(b, y, &x[1..])
}

fn group_norm(b: &mut GraphBuilder, x: &[ValueId]) -> Result<ValueId> {
    let groups = b.reshape(x[0], [2usize, 2, 12])?;
    let y = own_norm(b, groups, &[2])?;
    let y = b.reshape(y, [2usize, 4, 2, 3])?;
    scaled(b, y, &x[1..])
}

fn layer_norm(b: &mut GraphBuilder, x: ValueId, of: &[ValueId]) -> Result<ValueId> {
    let op = Op::LayerNorm {
        axis: 2,
        epsilon: Real(1e-5),
    };
    b.add1(op, &[x, of[0], of[1]])
}

/// Two causal heads of width 4 over queries, keys and values side by side.
fn attention(b: &mut GraphBuilder, joined: ValueId) -> Result<ValueId> {
    let mut operands = Vec::new();
    for i in 0..3 {
        let part = b.slice_axis(joined, 2, 8 * i, 8)?;
        let heads = b.reshape(part, [2usize, 5, 2, 4])?;
        operands.push(b.transpose(heads, &[0, 2, 1, 3])?);
    }
    let op = Op::Attention {
        scale: Real(0.5),
        causal: true,
    };
    let y = b.add1(op, &operands)?;
    let y = b.transpose(y, &[0, 2, 1, 3])?;
    b.reshape(y, [2usize, 5, 8])
}

fn transformer(b: &mut GraphBuilder, x: &[ValueId]) -> Result<ValueId> {
    let y = layer_norm(b, x[0], &x[1..3])?;
    let y = linear(b, y, &x[3..5])?;
    let y = attention(b, y)?;
    let y = linear(b, y, &x[5..7])?;
    let x1 = b.add_(x[0], y)?;
    let y = layer_norm(b, x1, &x[7..9])?;
    let y = linear(b, y, &x[9..11])?;
    let y = act(b, ScalarOp::Gelu, y)?;
    let y = linear(b, y, &x[11..13])?;
    b.add_(x1, y)
}

/// RMS norm, a gated layer, and logits by the embedding table itself.
fn gated(b: &mut GraphBuilder, x: &[ValueId]) -> Result<ValueId> {
    let rms_norm = Op::RmsNorm {
        axis: 2,
        epsilon: Real(1e-6),
    };
    let rows = b.add1(Op::Gather { axis: 0 }, &[x[1], x[0]])?;
    let y = b.add1(rms_norm, &[rows, x[2]])?;
    let gate = product(b, y, x[3])?;
    let gate = act(b, ScalarOp::Silu, gate)?;
    let up = product(b, y, x[4])?;
    let inner = b.mul(gate, up)?;
    let y = product(b, inner, x[5])?;
    let y = b.add_(rows, y)?;
    product(b, y, x[1])
}

fn lstm(b: &mut GraphBuilder, x: &[ValueId]) -> Result<ValueId> {
    let mut state = [x[1], x[2]];
    for i in 0..3 {
        let step = b.slice_axis(x[0], 0, i, 1)?;
        let step = b.reshape(step, [2usize, 3])?;
        let gates = linear(b, step, &[x[3], x[5]])?;
        let from_state = linear(b, state[0], &[x[4], x[6]])?;
        let gates = b.add_(gates, from_state)?;
        state = lstm_step(b, gates, state[1])?;
    }
    b.concat(&state, 1)
}

/// The next hidden state and cell; gates are those of input, forgetting, candidate and output.
fn lstm_step(b: &mut GraphBuilder, gates: ValueId, cell: ValueId) -> Result<[ValueId; 2]> {
    use ScalarOp::{Sigmoid, Tanh};
    let mut parts = Vec::new();
    for (i, op) in [Sigmoid, Sigmoid, Tanh, Sigmoid].into_iter().enumerate() {
        let gate = b.slice_axis(gates, 1, 4 * i, 4)?;
        parts.push(act(b, op, gate)?);
    }
    let kept = b.mul(parts[1], cell)?;
    let added = b.mul(parts[0], parts[2])?;
    let cell = b.add_(kept, added)?;
    let bounded = act(b, Tanh, cell)?;
    Ok([b.mul(parts[3], bounded)?, cell])
}
