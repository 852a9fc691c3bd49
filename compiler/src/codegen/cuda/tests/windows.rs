//! Poolings and depthwise convolutions by threads of a few neighbouring results.

use super::run::check_with;
use super::*;
use crate::codegen::cuda::{Options, generate_with};

/// Strides, dilations and padding before and behind, per axis.
type Axis = [usize; 4];

fn window(axes: &[Axis]) -> Window {
    let of = |i: usize| axes.iter().map(|a| a[i]).collect();
    Window {
        strides: of(0),
        dilations: of(1),
        pads_low: of(2),
        pads_high: of(3),
    }
}

/// Image, spatial axes and channels in the order of a layout.
fn ordered(layout: Layout, shape: &[usize]) -> Vec<usize> {
    let (channels, outer) = shape.split_last().unwrap();
    match layout {
        Layout::ChannelsLast => shape.to_vec(),
        Layout::ChannelsFirst => [&outer[..1], &[*channels], &outer[1..]].concat(),
    }
}

/// Shape of a value per channel that is broadcast to results of `n_spatial` axes.
fn per_channel(layout: Layout, channels: usize, n_spatial: usize) -> Vec<usize> {
    match layout {
        Layout::ChannelsLast => vec![channels],
        Layout::ChannelsFirst => [&[channels][..], &vec![1; n_spatial]].concat(),
    }
}

/// A pooling of `kind`, of a shape with its channels last; `joined` if its operand is computed on
/// the way and a product follows.
fn pool(
    rng: &mut Rng,
    (kind, dtype, layout): (PoolKind, DType, Layout),
    shape: &[usize],
    size: &[usize],
    (axes, ceil, joined): (&[Axis], bool, bool),
) -> Case {
    let channels = shape[shape.len() - 1];
    let shape = ordered(layout, shape);
    let mut b = GraphBuilder::new("pool");
    let x = b.input("x", dtype, shape.clone());
    let mut v = x;
    if joined {
        v = b.map(ScalarOp::Neg, &[v]).unwrap();
    }
    let op = Op::Pool {
        kind,
        size: size.to_vec(),
        window: window(axes),
        ceil,
        layout,
    };
    let mut y = b.add1(op, &[v]).unwrap();
    let mut inputs = vec![rng.tensor(dtype, &shape, -9.0, 9.0)];
    if joined {
        let scales = per_channel(layout, channels, size.len());
        let scale = b.input("scale", dtype, scales.clone());
        y = b.mul(y, scale).unwrap();
        inputs.push(rng.tensor(dtype, &scales, -1.0, 1.0));
    }
    b.output("y", y);
    Case {
        body: b.finish().unwrap(),
        inputs,
        tolerance: tolerance(dtype),
    }
}

fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 0.5f64.powi(10),
        DType::BF16 => 0.5f64.powi(7),
        DType::F32 => 1e-6,
        DType::F64 => 1e-14,
        _ => 0.0,
    }
}

/// A depthwise convolution of a shape with its channels last, and a relu of its biased result.
fn depthwise(
    rng: &mut Rng,
    (dtype, layout): (DType, Layout),
    shape: &[usize],
    taps: &[usize],
    axes: &[Axis],
) -> Case {
    let channels = shape[shape.len() - 1];
    let shape = ordered(layout, shape);
    let filter = match layout {
        Layout::ChannelsLast => [taps, &[1, channels]].concat(),
        Layout::ChannelsFirst => [&[channels, 1], taps].concat(),
    };
    let biases = per_channel(layout, channels, taps.len());
    let mut b = GraphBuilder::new("depthwise");
    let (x, w) = (
        b.input("x", dtype, shape.clone()),
        b.input("w", dtype, filter.clone()),
    );
    let bias = b.input("bias", dtype, biases.clone());
    let op = Op::Conv {
        window: window(axes),
        groups: channels,
        layout,
    };
    let y = b.add1(op, &[x, w]).unwrap();
    let y = b.add_(y, bias).unwrap();
    let y = b.map(ScalarOp::Relu, &[y]).unwrap();
    b.output("y", y);
    Case {
        body: b.finish().unwrap(),
        inputs: vec![
            rng.tensor(dtype, &shape, -1.0, 1.0),
            rng.tensor(dtype, &filter, -1.0, 1.0),
            rng.tensor(dtype, &biases, -1.0, 1.0),
        ],
        tolerance: tolerance(dtype),
    }
}

fn entries(body: &Graph) -> Vec<String> {
    let made = generate(&as_cluster(body), Arch::COMMON).unwrap();
    made.kernels.into_iter().map(|k| k.entry).collect()
}

fn is_first(case: &Case) -> bool {
    case.body.to_string().contains("channels_first")
}

const LAYOUTS: [Layout; 2] = [Layout::ChannelsLast, Layout::ChannelsFirst];

/// Every kind and dtype; one to three spatial axes; windows in the padding alone; lines that end
/// within a thread's results; channels in vectors, one by one and first.
#[test]
fn poolings() {
    let rng = &mut Rng(101);
    let mut all = Vec::new();
    let kinds = [PoolKind::Max, PoolKind::AvgIncludePad, PoolKind::Avg];
    let usual: &[Axis] = &[[2, 1, 1, 1], [1, 1, 1, 0]];
    for (kind, layout) in kinds.into_iter().flat_map(|k| LAYOUTS.map(|l| (k, l))) {
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            let what = (kind, dtype, layout);
            all.push(pool(
                rng,
                what,
                &[3, 9, 14, 24],
                &[3, 3],
                (usual, false, true),
            ));
        }
        let f32 = (kind, DType::F32, layout);
        let line: &[Axis] = &[[3, 2, 2, 5]];
        all.push(pool(rng, f32, &[2, 41, 5], &[4], (line, true, false)));
        let space: &[Axis] = &[[1, 1, 0, 0], [2, 1, 1, 0], [2, 2, 0, 2]];
        all.push(pool(
            rng,
            f32,
            &[1, 5, 6, 9, 8],
            &[2, 3, 2],
            (space, false, false),
        ));
        let bare: &[Axis] = &[[2, 1, 0, 0], [2, 1, 0, 0]];
        all.push(pool(
            rng,
            f32,
            &[2, 8, 16, 12],
            &[2, 2],
            (bare, false, false),
        ));
        // Long along the axis that threads loop over.
        let (shape, size) = match layout {
            Layout::ChannelsLast => ([2, 30, 3, 4], [30, 3]),
            Layout::ChannelsFirst => ([2, 3, 30, 4], [3, 30]),
        };
        let plain: &[Axis] = &[[1, 1, 0, 0], [1, 1, 0, 0]];
        if kind == PoolKind::Max {
            all.push(pool(rng, f32, &shape, &size, (plain, false, false)));
        }
    }
    for dtype in [DType::I8, DType::U8, DType::I32, DType::U64] {
        for layout in LAYOUTS {
            let what = (PoolKind::Max, dtype, layout);
            all.push(pool(
                rng,
                what,
                &[2, 7, 9, 16],
                &[3, 3],
                (usual, false, false),
            ));
        }
    }
    // The first window lies in the padding.
    let alone: &[Axis] = &[[1, 1, 2, 0], [1, 1, 2, 0]];
    for dtype in [DType::I8, DType::I16, DType::U8, DType::I64, DType::F16] {
        let what = (PoolKind::Max, dtype, Layout::ChannelsLast);
        all.push(pool(
            rng,
            what,
            &[1, 4, 5, 16],
            &[2, 2],
            (alone, false, false),
        ));
    }
    for case in &all {
        assert_eq!(entries(&case.body), ["gm_windows"], "{}", case.body);
    }
    check_with(Arch::COMMON.into(), "poolings by windows", &all);
}

#[test]
fn depthwise_convolutions() {
    let rng = &mut Rng(102);
    let mut all = Vec::new();
    let usual: &[Axis] = &[[1, 1, 1, 1], [1, 1, 1, 1]];
    for layout in LAYOUTS {
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            all.push(depthwise(
                rng,
                (dtype, layout),
                &[2, 7, 10, 24],
                &[3, 3],
                usual,
            ));
        }
        let f32 = (DType::F32, layout);
        let far: &[Axis] = &[[2, 3, 4, 2], [2, 2, 0, 3]];
        all.push(depthwise(rng, f32, &[2, 15, 19, 12], &[3, 5], far));
        all.push(depthwise(rng, f32, &[3, 50, 7], &[5], &[[1, 1, 4, 0]]));
        let space: &[Axis] = &[[1, 1, 1, 1], [2, 1, 0, 0], [1, 1, 0, 1]];
        all.push(depthwise(rng, f32, &[1, 4, 6, 9, 20], &[3, 2, 2], space));
    }
    for case in &all {
        // Bodies have convolutions with channels last, between transposes, but for those in `f64`.
        let is_turned = case.inputs[0].dtype() != DType::F64 && is_first(case);
        let mut found = entries(&case.body);
        if is_turned {
            // Both operands are turned in one launch, if both have tiles.
            assert!((3..=4).contains(&found.len()), "{}", case.body);
            found = found[found.len() - 2..][..1].to_vec();
        }
        assert_eq!(found, ["gm_windows"], "{}", case.body);
    }
    insta::assert_snapshot!("depthwise", listing(&all[0].body));
    check_with(
        Arch::COMMON.into(),
        "depthwise convolutions by windows",
        &all,
    );
}

/// The sum of large numbers is no infinity before it is divided.
#[test]
fn averages_of_large_numbers() {
    let axes: &[Axis] = &[[1, 1, 1, 1], [1, 1, 1, 1]];
    let what = (PoolKind::Avg, DType::F32, Layout::ChannelsLast);
    let mut case = pool(
        &mut Rng(107),
        what,
        &[1, 5, 5, 4],
        &[3, 3],
        (axes, false, false),
    );
    case.inputs[0] = Tensor::from_slice(&[1e38f32; 100], &[1, 5, 5, 4]).unwrap();
    check_with(Arch::COMMON.into(), "averages of large numbers", &[case]);
}

/// NaN is the greatest of a window, as in the interpreter; the padding has no part in it.
#[test]
fn extremes_of_windows() {
    let axes: &[Axis] = &[[1, 1, 1, 1], [1, 1, 1, 1]];
    let cases = LAYOUTS.map(|layout| {
        let mut case = pool(
            &mut Rng(103),
            (PoolKind::Max, DType::F32, layout),
            &[1, 6, 6, 4],
            &[3, 3],
            (axes, false, false),
        );
        let mut x = case.inputs[0].as_slice::<f32>().to_vec();
        (x[4], x[50], x[51]) = (f32::NAN, f32::NEG_INFINITY, f32::INFINITY);
        x[100..144].fill(f32::NEG_INFINITY);
        let shape = case.inputs[0].shape().to_vec();
        case.inputs[0] = Tensor::from_slice(&x, &shape).unwrap();
        case
    });
    check_with(Arch::COMMON.into(), "extremes of windows", &cases);
}

/// Results that are wider or narrower than what they are made of.
#[test]
fn results_of_another_dtype() {
    let rng = &mut Rng(106);
    let axes: &[Axis] = &[[1, 1, 1, 1], [1, 1, 1, 1]];
    let cases = [
        (DType::F16, DType::F32),
        (DType::BF16, DType::F64),
        (DType::F32, DType::F16),
        (DType::U8, DType::I64),
        (DType::F32, DType::Bool),
    ]
    .map(|(from, to)| {
        let what = (PoolKind::Max, from, Layout::ChannelsLast);
        let case = pool(rng, what, &[1, 6, 7, 32], &[3, 3], (axes, false, false));
        let mut g = case.body;
        let y = g.outputs.remove(0).value;
        let cast = Op::Map(ScalarOp::Cast(to));
        let y = g.add1(cast, &[y], &Origin::new("cast")).unwrap();
        g.add_output("y", y);
        Case { body: g, ..case }
    });
    for case in &cases {
        assert_eq!(entries(&case.body), ["gm_windows"], "{}", case.body);
    }
    check_with(Arch::COMMON.into(), "windows with another dtype", &cases);
}

/// Windows that other kernels keep: long ones, sums of integers, 8-bit floats.
#[test]
fn windows_of_other_kernels() {
    let rng = &mut Rng(104);
    let axes: &[Axis] = &[[1, 1, 0, 0], [1, 1, 0, 0]];
    let last = Layout::ChannelsLast;
    for (kind, dtype, size) in [
        (PoolKind::Max, DType::F32, [2, 12]),
        (PoolKind::Avg, DType::I32, [2, 2]),
        (PoolKind::Avg, DType::F32, [12, 2]),
        (PoolKind::Max, DType::F8E5M2, [2, 2]),
    ] {
        let what = (kind, dtype, last);
        let case = pool(rng, what, &[1, 14, 20, 8], &size, (axes, false, false));
        assert_eq!(entries(&case.body), ["gm_pool"]);
    }
}

/// A thread loads a pixel once for all of its results, and nothing is spilled on any architecture.
#[test]
fn pixels_are_loaded_once() {
    let Some(nvrtc) = nvrtc_or_left_out("resources of windows") else {
        return;
    };
    let rng = &mut Rng(105);
    let usual: &[Axis] = &[[1, 1, 1, 1], [1, 1, 1, 1]];
    let wide: &[Axis] = &[[1, 1, 3, 3], [1, 1, 3, 3]];
    for (dtype, shape, size, axes) in [
        (DType::F32, [64, 28, 28, 96], [3, 3], usual),
        (DType::F16, [64, 28, 28, 192], [3, 3], usual),
        (DType::F32, [16, 28, 28, 384], [7, 7], wide),
    ] {
        // Rows of a window by the pixels over four results, and by the elements of the filter; the bias.
        let [rows, along] = size;
        let loads = rows * (along + 3 + along) + 1;
        let case = depthwise(rng, (dtype, LAYOUTS[0]), &shape, &size, axes);
        for arch in ARCHS {
            let options: Options = Arch::parse(arch).unwrap().into();
            let made = generate_with(&as_cluster(&case.body), options).unwrap();
            let compiled = nvrtc.compile(&made.units[0]).unwrap();
            let r = compiled.resources["gm_windows"];
            assert!(
                r.stack_bytes == 0 && r.spill_store_bytes == 0,
                "{arch}: {r:?}"
            );
            let n = compiled.ptx.matches("ld.global.nc.v4").count();
            assert_eq!(n, loads, "{arch}: {}", made.listing);
        }
    }
}
