//! Graphs of single ops, and of small formulas.

use super::super::ops::{dims, slice, window};
use super::{Case, case, single};
use crate::error::Result;
use crate::ir::PoolKind::{self, Avg, AvgIncludePad, Max};
use crate::ir::{
    GraphBuilder, Layout, Op, PadMode, Real, ReduceKind, ScalarOp, ScatterKind, ValueId,
};
use gristmill_runtime::DType;

pub fn cases() -> Vec<Case> {
    let groups = [
        unary(),
        with_constants(),
        binary(),
        reductions(),
        running_sums(),
        norms(),
        products(),
        convolutions(),
        other_convolutions(),
        transposed_convolutions(),
        max_pools(),
        mean_pools(),
        volumes(),
        vec![case("grid_sample", grid_sample)],
        reads(),
        writes(),
        sorts(),
        pads(),
        views(),
    ];
    groups.into_iter().flatten().collect()
}

fn map(op: ScalarOp) -> Case {
    single(op.spec().name, Op::Map(op))
}

fn unary() -> Vec<Case> {
    use ScalarOp::*;
    let ops = [
        Neg, Abs, Sign, Floor, Ceil, Round, Trunc, Sqrt, Rsqrt, Recip, Exp, Expm1, Log, Log1p, Sin,
        Cos, Tan, Asin, Acos, Atan, Sinh, Cosh, Tanh, Asinh, Acosh, Atanh, Erf, Relu, Sigmoid,
        Softplus, Softsign, Silu, Mish, Gelu, GeluTanh, HardSwish,
    ];
    ops.into_iter().map(map).collect()
}

/// Ops with the constants of the table.
fn with_constants() -> Vec<Case> {
    use ScalarOp::*;
    let alpha = Real(0.75);
    let shrink = |hi| {
        let (lo, hi) = (Real(-0.75), Real(hi));
        Op::Map(Shrink { lo, hi })
    };
    let selu = Selu {
        alpha: Real(1.673_263_242_354_377_2),
        gamma: Real(1.050_700_987_355_480_5),
    };
    let hard_sigmoid = HardSigmoid {
        alpha: Real(1.0 / 6.0),
        beta: Real(0.5),
    };
    let clamp_to = ClampTo {
        lo: Real(-0.8125),
        hi: Real(1.625),
    };
    let leaky_relu = LeakyRelu { alpha: Real(0.25) };
    let units = [Elu { alpha }, Celu { alpha }, ThresholdedRelu { alpha }];
    let gates = [selu, hard_sigmoid, clamp_to, leaky_relu];
    let mut all: Vec<Case> = units.into_iter().chain(gates).map(map).collect();
    all.extend([
        single("hard_shrink", shrink(0.0)),
        single("soft_shrink", shrink(0.75)),
    ]);
    all
}

fn binary() -> Vec<Case> {
    use ScalarOp::*;
    let ops = [
        Add,
        Sub,
        Mul,
        Div,
        ScalarOp::Max,
        Min,
        Atan2,
        Rem,
        Mod,
        Pow,
        Prelu,
        Select,
        Clamp,
    ];
    let mut all: Vec<Case> = ops.into_iter().map(map).collect();
    all.extend([
        case("mul_of_itself", |b, x| b.mul(x[0], x[0])),
        single("atan2_on_axes", Op::Map(Atan2)),
        single("pow_of_zero", Op::Map(Pow)),
        single("pow_of_negative", Op::Map(Pow)),
    ]);
    all
}

fn reduce(name: &'static str, kind: ReduceKind, axes: &[usize], keepdims: bool) -> Case {
    let axes = axes.to_vec();
    let op = Op::Reduce {
        kind,
        axes,
        keepdims,
    };
    single(name, op)
}

fn reductions() -> Vec<Case> {
    vec![
        reduce("sum", ReduceKind::Sum, &[0, 2], false),
        reduce("mean", ReduceKind::Mean, &[1], true),
        reduce("amax", ReduceKind::Max, &[1], false),
        reduce("amin", ReduceKind::Min, &[0, 1], true),
        reduce("prod", ReduceKind::Prod, &[1], false),
        reduce("prod_of_all", ReduceKind::Prod, &[0, 1], false),
        case("log_sum_exp", |b, x| {
            let powers = b.map(ScalarOp::Exp, x)?;
            let sum = b.reduce(ReduceKind::Sum, powers, &[1], false)?;
            b.map(ScalarOp::Log, &[sum])
        }),
        case("variance", |b, x| {
            let mean = b.reduce(ReduceKind::Mean, x[0], &[1], true)?;
            let rest = b.sub(x[0], mean)?;
            let squares = b.mul(rest, rest)?;
            b.reduce(ReduceKind::Mean, squares, &[1], false)
        }),
    ]
}

fn running_sums() -> Vec<Case> {
    let sum = |name, axis, exclusive, reverse| {
        let op = Op::CumSum {
            axis,
            exclusive,
            reverse,
        };
        single(name, op)
    };
    vec![
        sum("cum_sum", 1, false, false),
        sum("cum_sum_reverse", 0, false, true),
        sum("cum_sum_exclusive", 1, true, false),
    ]
}

fn norms() -> Vec<Case> {
    let softmax = |name, axis, log| single(name, Op::Softmax { axis, log });
    let layer_norm = |name, axis, epsilon| {
        let epsilon = Real(epsilon);
        single(name, Op::LayerNorm { axis, epsilon })
    };
    let rms_norm = Op::RmsNorm {
        axis: 2,
        epsilon: Real(1e-6),
    };
    vec![
        softmax("softmax", 1, false),
        softmax("log_softmax", 0, true),
        softmax("softmax_of_large", 1, false),
        layer_norm("layer_norm", 2, 1e-5),
        layer_norm("layer_norm_of_two_axes", 1, 1e-3),
        single("rms_norm", rms_norm),
    ]
}

fn products() -> Vec<Case> {
    let attention = |name, scale, causal| {
        let scale = Real(scale);
        single(name, Op::Attention { scale, causal })
    };
    let usual = 1.0 / 3f64.sqrt();
    vec![
        single("matmul_matrices", Op::MatMul),
        single("matmul_batch_by_matrix", Op::MatMul),
        single("matmul_matrix_by_batch", Op::MatMul),
        single("matmul_broadcast", Op::MatMul),
        attention("attention", usual, false),
        attention("attention_causal", usual, true),
        attention("attention_scaled", 0.75, false),
        attention("attention_masked", usual, false),
    ]
}

type Extents<'a> = &'a [usize];

fn conv(
    name: &'static str,
    [strides, dilations]: [Extents; 2],
    [low, high]: [Extents; 2],
    groups: usize,
) -> Case {
    let op = Op::Conv {
        window: window(strides, dilations, low, high),
        groups,
        layout: Layout::ChannelsFirst,
    };
    single(name, op)
}

fn convolutions() -> Vec<Case> {
    let conv = |name, strides: [usize; 2], dilations: [usize; 2], low: [usize; 2], high, groups| {
        let high: [usize; 2] = high;
        conv(name, [&strides, &dilations], [&low, &high], groups)
    };
    let (none, one) = ([0, 0], [1, 1]);
    vec![
        conv("conv2d_plain", one, one, none, none, 1),
        conv("conv2d_padded", one, one, one, one, 1),
        conv("conv2d_strided", [2, 3], one, [1, 0], [0, 2], 1),
        conv("conv2d_dilated", one, [3, 2], [1, 2], [2, 1], 1),
        conv("conv2d_strided_dilated", [2, 2], [2, 3], [2, 1], [1, 0], 1),
        conv("conv2d_grouped", [2, 1], one, one, one, 2),
        conv("conv2d_depthwise", [1, 2], one, one, one, 3),
        conv("conv2d_depthwise_twofold", one, [2, 1], none, none, 2),
        conv("conv2d_pointwise_strided", [2, 2], one, none, none, 1),
    ]
}

fn other_convolutions() -> Vec<Case> {
    let last = Op::Conv {
        window: window(&[2, 2], &[1, 1], &[1, 1], &[1, 1]),
        groups: 1,
        layout: Layout::ChannelsLast,
    };
    let (three, ones) = ([1, 2, 1], [1; 3]);
    vec![
        single("conv2d_channels_last", last),
        conv("conv1d", [&[2], &[2]], [&[2], &[2]], 1),
        conv("conv3d", [&three, &ones], [&ones, &ones], 1),
    ]
}

fn transposed_convolutions() -> Vec<Case> {
    let transpose =
        |name, strides: [usize; 2], dilations, pads, output_pads: [usize; 2], groups| {
            let (dilations, pads): ([usize; 2], [usize; 2]) = (dilations, pads);
            let op = Op::ConvTranspose {
                window: window(&strides, &dilations, &pads, &pads),
                output_pads: output_pads.to_vec(),
                groups,
            };
            single(name, op)
        };
    let (none, one) = ([0, 0], [1, 1]);
    vec![
        transpose("conv_transpose2d_plain", one, one, none, none, 1),
        transpose("conv_transpose2d_strided", [2, 3], one, one, none, 1),
        transpose("conv_transpose2d_output_padded", [2, 2], one, one, one, 1),
        transpose("conv_transpose2d_grouped", [2, 1], one, one, [1, 0], 2),
        transpose("conv_transpose2d_dilated", [1, 2], [3, 2], [1, 2], none, 1),
    ]
}

/// Windows over three axes.
fn volumes() -> Vec<Case> {
    use PoolKind::{Avg, AvgIncludePad, Max};
    let conv = |name, strides: [usize; 3], dilations: [usize; 3], pads: [usize; 3], groups| {
        conv(name, [&strides, &dilations], [&pads, &pads], groups)
    };
    let one = [1; 3];
    let transpose = Op::ConvTranspose {
        window: window(&[2, 1, 3], &[1, 2, 1], &one, &one),
        output_pads: vec![1, 0, 2],
        groups: 2,
    };
    let (three, two): (Extents, Extents) = (&[3; 3], &[2; 3]);
    let max: [Extents; 4] = [&[3, 2, 2], &[2, 1, 2], &one, &[1, 0, 1]];
    let mean: [Extents; 4] = [three, two, &one, &one];
    vec![
        conv("conv3d_padded", one, one, one, 1),
        conv("conv3d_strided_dilated", [2, 1, 3], [2, 1, 3], [1, 2, 1], 1),
        conv("conv3d_grouped", one, one, [1, 0, 1], 2),
        conv("conv3d_depthwise", [1, 2, 1], one, one, 3),
        single("conv_transpose3d", transpose),
        pool("max_pool3d", Max, max, false),
        pool("avg_pool3d", Avg, mean, true),
        pool("avg_pool3d_with_pads", AvgIncludePad, mean, true),
    ]
}

/// Bilinear samples at the points of a grid over images of 4x5, whose corners are aligned.
fn grid_sample(b: &mut GraphBuilder, x: &[ValueId]) -> Result<ValueId> {
    let mut along = Vec::new();
    for (axis, extent) in [(1, 4.0), (0, 5.0)] {
        let at = b.slice_axis(x[1], 3, axis, 1)?;
        let one = b.scalar(DType::F64, 1.0);
        let half = b.scalar(DType::F64, (extent - 1.0) / 2.0);
        let at = b.add_(at, one)?;
        let at = b.mul(at, half)?;
        along.push(b.reshape(at, [1usize, 1, 1, 1, 12])?);
    }
    let positions = b.concat(&along, 3)?;
    let y = b.add1(Op::Sample { groups: 1 }, &[x[0], positions])?;
    b.reshape(y, [1usize, 2, 3, 4])
}

/// Pooling with pads that are equal on both sides: size, strides, dilations and pads.
fn pool(name: &'static str, kind: PoolKind, of: [Extents; 4], ceil: bool) -> Case {
    let [size, strides, dilations, pads] = of;
    let op = Op::Pool {
        kind,
        size: size.to_vec(),
        window: window(strides, dilations, pads, pads),
        ceil,
        layout: Layout::ChannelsFirst,
    };
    single(name, op)
}

fn max_pools() -> Vec<Case> {
    let (none, one, two, three) = (&[0, 0], &[1, 1], &[2, 2], &[3, 3]);
    let max = |name, of: [Extents; 4]| pool(name, Max, of, false);
    vec![
        max("max_pool2d", [two, two, one, none]),
        max("max_pool2d_padded", [three, two, one, one]),
        max("max_pool2d_overlapping", [&[3, 2], one, one, none]),
        max("max_pool2d_dilated", [&[2, 3], &[1, 2], two, one]),
        max("max_pool2d_ties", [two, one, one, none]),
        max("max_pool1d", [&[3], &[2], &[1], &[1]]),
        pool("max_pool2d_ceil", Max, [three, two, one, none], true),
    ]
}

fn mean_pools() -> Vec<Case> {
    let (one, two) = (&[1, 1], &[2, 2]);
    let plain: [Extents; 4] = [&[3, 3], two, one, one];
    let overlapping: [Extents; 4] = [&[3, 2], one, one, one];
    let ceil: [Extents; 4] = [&[2, 3], two, one, &[0, 1]];
    let counted = AvgIncludePad;
    vec![
        pool("avg_pool2d", Avg, plain, false),
        pool("avg_pool2d_overlapping", Avg, overlapping, false),
        pool("avg_pool2d_ceil", Avg, ceil, true),
        pool("avg_pool2d_with_pads", counted, plain, false),
        pool(
            "avg_pool2d_overlapping_with_pads",
            counted,
            overlapping,
            false,
        ),
        pool("avg_pool2d_ceil_with_pads", counted, ceil, true),
    ]
}

fn reads() -> Vec<Case> {
    vec![
        single("gather", Op::GatherElements { axis: 1 }),
        single("index_select", Op::Gather { axis: 1 }),
        single("embedding", Op::Gather { axis: 0 }),
        single("index_tuples", Op::GatherNd { batch_dims: 0 }),
    ]
}

fn writes() -> Vec<Case> {
    use ScatterKind::*;
    let scatter = |name, axis, kind| single(name, Op::ScatterElements { axis, kind });
    vec![
        scatter("scatter_unique", 1, Set),
        scatter("scatter_add", 0, Add),
        scatter("scatter_amax", 0, Max),
        scatter("scatter_amax_ties", 0, Max),
        scatter("scatter_amin_ties", 0, Min),
        scatter("scatter_prod", 0, Mul),
        scatter("scatter_prod_zeros", 0, Mul),
        case("index_add", |b, x| {
            let at = b.reshape(x[1], [3usize, 1])?;
            b.add1(Op::ScatterNd { kind: Add }, &[x[0], at, x[2]])
        }),
    ]
}

fn sorts() -> Vec<Case> {
    let top_k = |name, k: usize, axis, largest| {
        let k = k.into();
        single(name, Op::TopK { k, axis, largest })
    };
    vec![
        top_k("topk", 3, 1, true),
        top_k("topk_smallest", 2, 0, false),
        top_k("sort", 5, 1, true),
    ]
}

fn pads() -> Vec<Case> {
    let pad = |name, mode| {
        let (low, high) = (vec![0, 0, 0, 2], vec![0, 0, 2, 1]);
        single(name, Op::Pad { low, high, mode })
    };
    vec![
        pad("pad_reflect", PadMode::Reflect),
        pad("pad_replicate", PadMode::Edge),
        pad("pad_circular", PadMode::Wrap),
        case("pad_constant", |b, x| {
            let border = b.scalar(DType::F64, 0.5);
            let op = Op::Pad {
                low: vec![0, 0, 2],
                high: vec![0, 3, 1],
                mode: PadMode::Constant,
            };
            b.add1(op, &[x[0], border])
        }),
    ]
}

fn views() -> Vec<Case> {
    let perm = vec![2, 0, 1];
    let (wide, flat) = (dims(&[2, 4, 3]), dims(&[4, 6]));
    vec![
        single("slice_with_steps", slice(&[1, 0], &[3, 2], &[2, 3])),
        single("slice_backwards", slice(&[0, 4], &[2, 3], &[1, -2])),
        case("concat", |b, x| b.concat(&[x[0], x[1], x[2], x[0]], 1)),
        single("broadcast", Op::Broadcast { shape: wide }),
        single("transpose", Op::Transpose { perm }),
        single("reshape", Op::Reshape { shape: flat }),
        case("lower_triangle", |b, x| lower_triangle(b, x[0])),
    ]
}

fn lower_triangle(b: &mut GraphBuilder, x: ValueId) -> Result<ValueId> {
    let shape = b.ty(x).shape.to_vec();
    let iota = |axis| Op::Iota {
        dtype: DType::I64,
        shape: shape.clone(),
        axis,
    };
    let (row, column) = (b.add1(iota(0), &[])?, b.add1(iota(1), &[])?);
    let is_kept = b.map(ScalarOp::Ge, &[row, column])?;
    let zero = b.scalar(DType::F64, 0.0);
    b.map(ScalarOp::Select, &[is_kept, x, zero])
}
