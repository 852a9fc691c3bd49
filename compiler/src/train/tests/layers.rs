//! Layers: values of PyTorch in `f64`, and gradients by central differences.

use super::assert_close;
use crate::autodiff::tests::{Operand, check, compare_compiled, graph_of, reals};
use crate::error::Result;
use crate::interp::run;
use crate::ir::{GraphBuilder, ValueId};
use crate::train::{Conv2d, Model, Pool2d};
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
    let mut b = GraphBuilder::new(name);
    let input = b.input("x", DType::F64, x.value.shape().iter().copied());
    let y = with_model(&mut b, input, layer).unwrap_or_else(|e| panic!("{name}: {e}"));
    b.output("y", y);
    let graph = b.finish().unwrap();
    let inputs = [x.value.clone()];
    let found = run(&graph, &inputs).unwrap()[0].to_f64s();
    assert_close(&found, expected, 1e-14);
    let build = |b: &mut GraphBuilder, x: &[ValueId]| Ok(vec![with_model(b, x[0], layer)?]);
    check(name, std::slice::from_ref(&x), &build);
    check(name, &[x.clone().batched()], &build);
    let (graph, ..) = graph_of(&[x], &build).unwrap();
    compare_compiled(&graph, &inputs).unwrap_or_else(|e| panic!("{name}: {e}"));
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
