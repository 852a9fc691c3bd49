//! Layers: values of PyTorch in `f64`, and gradients by central differences.

use super::assert_close;
use crate::autodiff::tests::{Operand, check, compare_compiled, graph_of, numbers, reals};
use crate::error::Result;
use crate::interp::run;
use crate::ir::{Dim, GraphBuilder, ValueId};
use crate::train::{Activation, Conv1d, Conv2d, Conv3d, Init, Lrn, Model, Pool2d};
use crate::{DType, Tensor};

type Layer<'a> = &'a dyn Fn(&mut Model, ValueId) -> Result<ValueId>;

/// Adds a layer of a model to a graph.
fn with_model(b: &mut GraphBuilder, x: ValueId, layer: Layer) -> Result<ValueId> {
    let mut m = Model::new("layer", 0, true);
    std::mem::swap(m.builder(), b);
    let y = layer(&mut m, x);
    std::mem::swap(m.builder(), b);
    y
}

/// Compares a layer's result with values, its gradient with differences, and compiled code with the interpreter.
fn check_layer(name: &str, x: Operand, expected: &[f64], layer: Layer) {
    check_values(name, x.clone(), expected, layer);
    let build = |b: &mut GraphBuilder, x: &[ValueId]| Ok(vec![with_model(b, x[0], layer)?]);
    check(name, std::slice::from_ref(&x), &build);
    check(name, &[x.clone().batched()], &build);
    let inputs = [x.value.clone()];
    let (graph, ..) = graph_of(&[x], &build).unwrap();
    compare_compiled(&graph, &inputs).unwrap_or_else(|e| panic!("{name}: {e}"));
}

fn check_values(name: &str, x: Operand, expected: &[f64], layer: Layer) {
    let mut b = GraphBuilder::new(name);
    let input = b.input("x", DType::F64, x.value.shape().iter().copied());
    let y = with_model(&mut b, input, layer).unwrap_or_else(|e| panic!("{name}: {e}"));
    b.output("y", y);
    let graph = b.finish().unwrap();
    let found = run(&graph, &[x.value]).unwrap()[0].to_f64s();
    assert_close(&found, expected, 1e-14);
}

/// The error of a layer of an input of `f32`.
fn refused(shape: &[usize], layer: Layer) -> String {
    let mut m = Model::new("refused", 0, true);
    let x = m.input("x", DType::F32, shape.iter().copied());
    let e = layer(&mut m, x).unwrap_err();
    assert_eq!(e.kind(), crate::ErrorKind::InvalidInput, "{e}");
    e.to_string()
}

#[test]
fn pooling_windows_overlap() {
    let pool = Pool2d {
        size: [3, 2],
        strides: [2, 1],
        same: false,
    };
    // F.max_pool2d(x, (3, 2), (2, 1)), F.avg_pool2d(x, (3, 2), (2, 1))
    let largest = [
        1.7596850392930041,
        1.896250640161087,
        1.896250640161087,
        1.8499263658204583,
    ];
    let means = [
        -0.13023237396679113,
        -0.27998862790612794,
        0.5033317919765785,
        -0.39072717957746644,
    ];
    let x = || reals(&[1, 1, 4, 5]);
    check_layer("max", x(), &largest, &|m, x| m.max_pool(x, pool));
    check_layer("mean", x(), &means, &|m, x| m.avg_pool(x, pool));
}

#[test]
fn pooling_pads_as_same() {
    let pool = Pool2d {
        size: [3, 3],
        strides: [2, 2],
        same: true,
    };
    // p = lambda x, v: F.pad(x, (1, 1, 0, 1), value=v)
    // F.max_pool2d(p(x, -math.inf), 3, 2)
    let largest = [
        1.883944971906868,
        1.883944971906868,
        1.803867335304732,
        1.1598586470299415,
        1.8166205636428403,
        1.803867335304732,
        1.878034318252288,
        1.69859366084106,
        1.69859366084106,
        1.8997847279932032,
        1.8997847279932032,
        1.7234512289864272,
        1.324932237133676,
        1.8685115032329231,
        1.7234512289864272,
        1.8325546104591526,
        1.785087490255,
        1.785087490255,
    ];
    // F.avg_pool2d(p(x, 0), 3, 2) / F.avg_pool2d(p(torch.ones_like(x), 0), 3, 2)
    let means = [
        0.2663174243080329,
        0.10456931150410997,
        0.46800136124603214,
        -0.5087479171720382,
        -0.1320077633729157,
        -0.4182523574725471,
        0.026605969156483226,
        -0.04813370216523575,
        -0.36461605270572495,
        0.21479677656652535,
        0.09352988855961275,
        0.4419996887845857,
        -0.5047395847138075,
        -0.13577850505210334,
        -0.44874003086431874,
        0.10309078144786422,
        -0.0277422327027315,
        -0.2979055156543524,
    ];
    let x = || reals(&[1, 2, 6, 5]);
    check_layer("max", x(), &largest, &|m, x| m.max_pool(x, pool));
    check_layer("mean", x(), &means, &|m, x| m.avg_pool(x, pool));
}

#[test]
fn same_pooling_has_a_window_per_stride() {
    for n in 1..9usize {
        for size in 1..5 {
            for stride in 1..5 {
                let pool = Pool2d {
                    size: [size, 1],
                    strides: [stride, 1],
                    same: true,
                };
                let mut m = Model::new("same", 0, true);
                let x = m.input("x", DType::F32, [1, 1, n, 1]);
                let y = m.avg_pool(x, pool).unwrap();
                let shape = m.builder().ty(y).static_shape().unwrap();
                assert_eq!(shape, [1, 1, n.div_ceil(stride), 1], "{n} {pool:?}");
            }
        }
    }
    let mut m = Model::new("symbols", 0, true);
    let x = m.input("x", DType::F32, ["b", "c", "h", "w"]);
    let mut pool = Pool2d {
        size: [2, 3],
        strides: [1, 1],
        same: true,
    };
    let y = m.max_pool(x, pool).unwrap();
    let kept = m.builder().ty(x).clone();
    assert_eq!(*m.builder().ty(y), kept);
    pool.strides = [1, 2];
    let e = m.max_pool(x, pool).unwrap_err().to_string();
    let expected =
        "max_pool: the image is [h, w]; `same` with strides [1, 2] needs known extents above 0";
    assert!(e.ends_with(expected), "{e}");
}

#[test]
fn a_global_mean_is_of_each_channel() {
    let x = reals(&[2, 3, 2, 2]);
    let means = |four: &[f64]| four.iter().sum::<f64>() / 4.0;
    let expected: Vec<f64> = x.value.to_f64s().chunks(4).map(means).collect();
    check_layer("global", x, &expected, &|m, x| {
        let y = m.global_avg_pool2d(x)?;
        assert_eq!(m.builder().ty(y).rank(), 2);
        Ok(y)
    });
}

#[test]
fn windows_that_do_not_fit_are_refused() {
    let rank = refused(&[1, 4, 4], &|m, x| m.max_pool2d(x, [2, 2]));
    let expected = "the operand has the shape [1, 4, 4], expected [batch, channels, height, width]";
    assert!(rank.contains(expected), "{rank}");
    let global = refused(&[4, 4], &|m, x| m.global_avg_pool2d(x));
    assert!(
        global.contains("global_avg_pool2d: the operand"),
        "{global}"
    );
    for same in [false, true] {
        for (size, stride) in [(0, 1), (0, 2), (2, 0)] {
            let pool = Pool2d {
                size: [size; 2],
                strides: [stride; 2],
                same,
            };
            refused(&[1, 1, 4, 4], &|m, x| m.avg_pool(x, pool));
        }
    }
    refused(&[1, 1, 1, 1], &|m, x| m.max_pool2d(x, [2, 2]));
    let conv = refused(&[1, 1, 4, 4], &|m, x| m.conv2d(x, Conv2d::same(1, 0)));
    assert!(conv.contains("conv2d: filters of [0, 0]"), "{conv}");
    let video = refused(&[1, 1, 4, 4], &|m, x| m.conv3d(x, Conv3d::same(1, 3)));
    let expected = "conv3d: the operand has the shape [1, 1, 4, 4], expected [batch, channels, depth, height, width]";
    assert!(video.contains(expected), "{video}");
}

#[test]
fn a_video_is_convolved_and_pooled_over_three_axes() {
    let data: Vec<f32> = (0..2 * 3 * 4).map(|i| i as f32).collect();
    let x = Tensor::from_slice(&data, &[1, 1, 2, 3, 4]).unwrap();
    let mut m = Model::new("video", 0, true);
    let input = m.input("x", DType::F32, [1usize, 1, 2, 3, 4]);
    // A filter of ones over two frames, without padding: the sums of pixels of both.
    let conv = Conv3d {
        size: [2, 1, 1],
        same: false,
        init: Init::Constant(1.0),
        ..Conv3d::same(1, 1)
    };
    let sums = m.scope("conv", |m| m.conv3d(input, conv)).unwrap();
    let pooled = m.max_pool3d(sums, [1, 3, 2]).unwrap();
    let mean = m.global_avg_pool3d(input).unwrap();
    let sequence = m.builder().reshape(input, [1usize, 2, 12]).unwrap();
    let conv = Conv1d {
        init: Init::Constant(1.0),
        same: false,
        strides: [12],
        ..Conv1d::same(1, 1)
    };
    let firsts = m.scope("firsts", |m| m.conv1d(sequence, conv)).unwrap();
    let (mut b, _) = m.into_parts();
    for (name, v) in [("pooled", pooled), ("mean", mean), ("firsts", firsts)] {
        b.output(name, v);
    }
    let found = run(&b.finish().unwrap(), &[x]).unwrap();
    assert_eq!(found[0].as_slice::<f32>(), [9.0 + 21.0, 11.0 + 23.0]);
    assert_eq!(found[1].as_slice::<f32>(), [11.5]);
    assert_eq!(found[2].as_slice::<f32>(), [12.0]);
}

#[test]
fn a_short_form_pools_disjoint_windows() {
    let x = Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], &[1, 1, 2, 4]).unwrap();
    let mut m = Model::new("pool", 0, true);
    let input = m.input("x", DType::F32, [1usize, 1, 2, 4]);
    let y = m.max_pool2d(input, [2, 2]).unwrap();
    let (mut b, _) = m.into_parts();
    b.output("y", y);
    let found = run(&b.finish().unwrap(), &[x]).unwrap();
    assert_eq!(found[0].as_slice::<f32>(), [6.0, 8.0]);
}

#[test]
fn responses_are_divided_by_neighbouring_channels() {
    let lrn = |size, alpha, beta, bias| Lrn {
        size,
        alpha,
        beta,
        bias,
    };
    let cases = [
        // F.local_response_norm(x, 5, alpha=0.3 * 5, beta=0.75, k=2.0)
        (
            lrn(5, 0.3, 0.75, 2.0),
            [
                0.09455073798873612,
                0.47431756086114585,
                -0.6544540184492772,
                0.4553724178856147,
                0.0690800193513082,
                -0.47228710373091815,
                0.5443522910377488,
                -0.30133773262623037,
                -0.21772167557643798,
                0.6220123123606801,
                -0.603013810257216,
                0.2193074213412191,
            ],
        ),
        // F.local_response_norm(x, 4, alpha=0.3 * 4, beta=0.75, k=2.0)
        (
            lrn(4, 0.3, 0.75, 2.0),
            [
                0.09483845175536604,
                0.5579668255638717,
                -0.8112437329123247,
                0.47903987398042713,
                0.07052050138891208,
                -0.5530257502121917,
                0.6272171719329864,
                -0.3057164937071562,
                -0.21772167557643798,
                0.6220123123606801,
                -0.603013810257216,
                0.21930742134121914,
            ],
        ),
        // F.local_response_norm(x, 3, alpha=0.3 * 3, beta=0.6, k=1.0)
        (
            lrn(3, 0.3, 0.6, 1.0),
            [
                0.1419770463433041,
                0.8407912773752966,
                -1.2138002188209096,
                0.7045262483617263,
                0.1033057255816211,
                -0.900548253263194,
                1.1682236853917194,
                -0.4891933478305307,
                -0.31917945085034666,
                1.0735121650403787,
                -1.132141553291268,
                0.35063404488324507,
            ],
        ),
    ];
    for (lrn, expected) in cases {
        let x = reals(&[1, 6, 1, 2]);
        check_layer("lrn", x, &expected, &|m, x| m.local_response_norm(x, lrn));
    }
    let wide = lrn(usize::MAX, 1.0, 1.0, 1.0);
    let x = numbers(&[1, 2, 1, 1], &[1.0, 2.0]);
    let layer: Layer = &|m, x| m.local_response_norm(x, wide);
    check_layer("wide", x, &[1.0 / 6.0, 2.0 / 6.0], layer);
}

#[test]
fn settings_of_response_normalisation_are_checked() {
    let lrn = Lrn::default();
    for bad in [
        Lrn { size: 0, ..lrn },
        Lrn { bias: 0.0, ..lrn },
        Lrn { alpha: -1.0, ..lrn },
        Lrn {
            beta: f64::NAN,
            ..lrn
        },
    ] {
        let e = refused(&[1, 2, 1, 1], &|m, x| m.local_response_norm(x, bad));
        assert!(e.contains("size and bias above 0"), "{e}");
    }
    let mut m = Model::new("refused", 0, true);
    for (dtype, channels) in [(DType::I64, 3.into()), (DType::F32, "c".into())] {
        let x = m.input("x", dtype, [1.into(), channels, Dim::from(2), 2.into()]);
        let e = m.local_response_norm(x, lrn).unwrap_err().to_string();
        assert!(e.contains("expected floats and known channels"), "{e}");
    }
}

#[test]
fn activations_have_names() {
    // F.relu(x), F.gelu(x, approximate="tanh") and so on of x = [-2.5, -0.5, 0.0, 0.7, 3.5]
    let given = [-2.5, -0.5, 0.0, 0.7, 3.5];
    let cases = [
        ("relu", [0.0, 0.0, 0.0, 0.7, 3.5]),
        ("relu6", [0.0, 0.0, 0.0, 0.7, 3.5]),
        ("leaky_relu", [-0.025, -0.005, 0.0, 0.7, 3.5]),
        (
            "elu",
            [-0.9179150013761013, -0.3934693402873666, 0.0, 0.7, 3.5],
        ),
        (
            "selu",
            [
                -1.6137857588732425,
                -0.6917581878028713,
                0.0,
                0.7354906911488363,
                3.677453455744182,
            ],
        ),
        (
            "gelu",
            [
                -0.015524163314440398,
                -0.15426876936299344,
                0.0,
                0.5306254434438489,
                3.4991857982233756,
            ],
        ),
        (
            "gelu_tanh",
            [
                -0.015084266089998577,
                -0.15428599017485606,
                0.0,
                0.5305701347051167,
                3.499383802344626,
            ],
        ),
        (
            "silu",
            [
                -0.18964545005310887,
                -0.1887703343990727,
                0.0,
                0.46773144051771626,
                3.3974071923702525,
            ],
        ),
        (
            "mish",
            [
                -0.19681620390653337,
                -0.22074377465173,
                0.0,
                0.5611483776438518,
                3.4939907151175196,
            ],
        ),
        (
            "tanh",
            [
                -0.9866142981514303,
                -0.4621171572600098,
                0.0,
                0.6043677771171635,
                0.9981778976111987,
            ],
        ),
        (
            "sigmoid",
            [
                0.07585818002124355,
                0.3775406687981454,
                0.5,
                0.6681877721681662,
                0.9706877692486436,
            ],
        ),
        (
            "softplus",
            [
                0.07888973429254963,
                0.4740769841801067,
                std::f64::consts::LN_2,
                1.103186048885458,
                3.5297504182726205,
            ],
        ),
        (
            "softsign",
            [
                -0.7142857142857143,
                -0.3333333333333333,
                0.0,
                0.4117647058823529,
                0.7777777777777778,
            ],
        ),
        (
            "hardswish",
            [
                -0.20833333333333334,
                -0.20833333333333334,
                0.0,
                0.43166666666666664,
                3.5,
            ],
        ),
        (
            "hardsigmoid",
            [
                0.08333333333333333,
                0.4166666666666667,
                0.5,
                0.6166666666666667,
                1.0,
            ],
        ),
        ("linear", given),
    ];
    for (name, expected) in cases {
        let activation: Activation = name.parse().unwrap();
        let layer: Layer = &|m, x| m.activation(x, activation);
        check_values(name, numbers(&[5], &given), &expected, layer);
        // Away from kinks.
        let x = numbers(&[4], &[-2.5, -0.5, 0.7, 3.5]);
        let build = |b: &mut GraphBuilder, x: &[ValueId]| Ok(vec![with_model(b, x[0], layer)?]);
        check(name, &[x], &build);
    }
    let same = [("swish", "silu"), ("identity", "linear")];
    for (a, b) in same.map(|(a, b)| (a.parse::<Activation>(), b.parse())) {
        assert_eq!(a.unwrap(), b.unwrap());
    }
    let e = "rleu".parse::<Activation>().unwrap_err();
    assert_eq!(e.kind(), crate::ErrorKind::InvalidInput);
    assert_eq!(
        e.to_string(),
        "unknown activation \"rleu\"; known: identity, linear, relu, relu6, leaky_relu, elu, selu, gelu, gelu_tanh, silu, swish, mish, tanh, sigmoid, softplus, softsign, hardswish, hardsigmoid; did you mean \"relu\"?"
    );
    let e = refused(&[2], &|m, x| m.activation(x, Activation::Elu(f64::NAN)));
    assert!(e.contains("activation: NaN"), "{e}");
}
