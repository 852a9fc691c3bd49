//! Resizing and sampling against results of PyTorch 2.15 and onnxruntime, which agree on all that
//! is here.

use super::*;
use crate::interp;
use gristmill_runtime::Tensor;

fn text(name: &str, s: &str) -> AttributeProto {
    AttributeProto {
        s: s.as_bytes().to_vec().into(),
        ..attribute(name, attribute_type::STRING)
    }
}

fn f32s(name: &str, values: &[f32]) -> TensorProto {
    TensorProto {
        name: name.to_owned(),
        data_type: 1,
        dims: vec![values.len() as i64],
        float_data: values.to_vec(),
        ..Default::default()
    }
}

/// A model of one node over `x` of `[1, 1, n]`, by a scale of the last axis.
fn resize(n: usize, scale: f32, attributes: Vec<AttributeProto>) -> Model {
    let mut resize = node("Resize", &["x", "", "scales"], &["y"]);
    resize.attribute = attributes;
    model(GraphProto {
        initializer: vec![f32s("scales", &[1.0, 1.0, scale])],
        input: vec![info("x", 1, &["1", "1", &n.to_string()])],
        ..unary(vec![resize])
    })
}

/// The result for `x = 0, 1, ..`.
fn of_ramp(m: &Model, n: usize) -> Vec<f32> {
    let g = m.graph(&Specialisation::default()).unwrap();
    let x: Vec<f32> = (0..n).map(|i| i as f32).collect();
    let x = Tensor::from_slice(&x, &[1, 1, n]).unwrap();
    interp::run(&g, &[x]).unwrap()[0].as_slice::<f32>().to_vec()
}

fn rules(m: &Model) -> Vec<&'static str> {
    let loops = Loops {
        why: |_, _| None,
        share: None,
    };
    let report = m.capabilities(&Specialisation::default(), loops).unwrap();
    report.notes.iter().map(|n| n.rule).collect()
}

fn assert_near(got: &[f32], expected: &[f32]) {
    let near = |(g, e): (&f32, &f32)| (g - e).abs() <= 1e-5 * e.abs().max(1.0);
    let all = got.len() == expected.len() && got.iter().zip(expected).all(near);
    assert!(all, "{got:?}, expected {expected:?}");
}

#[test]
fn aligned_corners_are_those_of_the_rounded_down_length() {
    let aligned = |mode: &str, scale: f32| {
        let corners = text("coordinate_transformation_mode", "align_corners");
        resize(4, scale, vec![text("mode", mode), corners])
    };
    let linear = aligned("linear", 1.7);
    assert_near(&of_ramp(&linear, 4), &[0.0, 0.6, 1.2, 1.8, 2.4, 3.0]);
    let cubic = of_ramp(&aligned("cubic", 1.7), 4);
    assert_near(&cubic, &[0.0, 0.504, 1.248, 1.752, 2.496, 3.0]);
    assert_near(&of_ramp(&aligned("linear", 0.6), 4), &[0.0, 3.0]);
    insta::assert_snapshot!(rules(&linear).concat(), @"align_corners aligns the last element of the rounded-down length, as in PyTorch and onnxruntime; the ONNX reference does not round first");
    assert_eq!(rules(&aligned("linear", 2.0)), [""; 0]);
}

fn nearest(n: usize, scale: f32) -> Model {
    let asymmetric = text("coordinate_transformation_mode", "asymmetric");
    let floor = text("nearest_mode", "floor");
    resize(n, scale, vec![text("mode", "nearest"), asymmetric, floor])
}

#[test]
fn nearest_elements_are_found_by_division_in_f32() {
    let m = nearest(9, 0.6);
    assert_eq!(of_ramp(&m, 9), [0.0, 1.0, 3.0, 5.0, 6.0]);
    insta::assert_snapshot!(rules(&m).concat(), @"positions are quotients in f32, as in PyTorch and onnxruntime; the ONNX reference divides in f64");
    assert_eq!(rules(&nearest(4, 2.0)), [""; 0]);
}

#[test]
fn lengths_are_products_in_f32() {
    let m = nearest(10, 0.7);
    assert_eq!(of_ramp(&m, 10), [0.0, 1.0, 2.0, 4.0, 5.0, 7.0, 8.0]);
    assert!(rules(&m)[0].starts_with("lengths are products in f32"));
}

/// Cubic samples of a 2 by 3 image beyond its border.
fn border_samples(align: i64) -> (Model, Vec<f32>) {
    let mut sample = node("GridSample", &["x", "grid"], &["y"]);
    sample.attribute = vec![
        text("mode", "cubic"),
        text("padding_mode", "border"),
        int("align_corners", align),
    ];
    let m = model(GraphProto {
        input: vec![
            info("x", 1, &["1", "1", "2", "3"]),
            info("grid", 1, &["1", "1", "5", "2"]),
        ],
        ..unary(vec![sample])
    });
    let x = Tensor::from_slice(&[1f32, 4.0, 9.0, 16.0, 25.0, 36.0], &[1, 1, 2, 3]).unwrap();
    let points = [-1.4f32, -1.4, -1.1, 0.3, 0.9, 0.95, 1.3, -0.2, 0.1, 1.7];
    let grid = Tensor::from_slice(&points, &[1, 1, 5, 2]).unwrap();
    let g = m.graph(&Specialisation::default()).unwrap();
    let y = interp::run(&g, &[x, grid]).unwrap();
    (m, y[0].as_slice::<f32>().to_vec())
}

/// Values of PyTorch's `grid_sample`.
#[test]
fn bilinear_samples_beyond_the_border_are_those_of_the_padding_mode() {
    let x = Tensor::from_slice(&[1f32, 4.0, 9.0, 16.0, 25.0, 36.0], &[1, 1, 2, 3]).unwrap();
    let points = [
        -1.4f32, -1.4, -1.1, 0.3, 0.9, 0.95, 1.3, -0.2, 0.1, 1.7, 5.0, -5.0, -0.3, 0.2, 1.0, 1.0,
    ];
    let grid = Tensor::from_slice(&points, &[1, 1, 8, 2]).unwrap();
    for (padding, align, expected) in [
        ("zeros", 0, [0.0, 4.55, 12.87, 0.855, 0.0, 0.0, 15.46, 9.0]),
        (
            "zeros",
            1,
            [0.48, 9.675, 34.24, 13.86, 16.965, 0.0, 14.62, 36.0],
        ),
        (
            "border",
            0,
            [1.0, 13.0, 36.0, 17.1, 26.65, 9.0, 15.46, 36.0],
        ),
        (
            "border",
            1,
            [1.0, 10.75, 34.24, 19.8, 26.1, 9.0, 14.62, 36.0],
        ),
        (
            "reflection",
            0,
            [1.3, 13.0, 36.0, 17.1, 22.27, 9.0, 15.46, 36.0],
        ),
        (
            "reflection",
            1,
            [5.68, 11.44, 34.24, 17.58, 18.54, 9.0, 14.62, 36.0],
        ),
    ] {
        let mut sample = node("GridSample", &["x", "grid"], &["y"]);
        sample.attribute = vec![
            text("mode", "linear"),
            text("padding_mode", padding),
            int("align_corners", align),
        ];
        let m = model(GraphProto {
            input: vec![
                info("x", 1, &["1", "1", "2", "3"]),
                info("grid", 1, &["1", "1", "8", "2"]),
            ],
            ..unary(vec![sample])
        });
        let g = m.graph(&Specialisation::default()).unwrap();
        let y = interp::run(&g, &[x.clone(), grid.clone()]).unwrap();
        assert_near(y[0].as_slice::<f32>(), &expected);
    }
}

#[test]
fn cubic_taps_are_clamped_to_the_border_one_by_one() {
    let (m, y) = border_samples(0);
    assert_near(&y, &[0.898752, 12.885597, 40.044436, 16.544888, 27.136115]);
    assert!(rules(&m)[0].starts_with("cubic taps are clamped"));
    let (_, y) = border_samples(1);
    assert_near(&y, &[-0.701791, 10.580547, 34.64873, 20.283902, 28.872783]);
}

#[test]
fn unknown_names_are_told_with_the_known_ones() {
    let error = |attributes| {
        let m = resize(4, 2.0, attributes);
        m.graph(&Specialisation::default()).unwrap_err().to_string()
    };
    insta::assert_snapshot!(error(vec![text("mode", "liner")]), @r#"in node "Resize_0:y": Resize (opset 18): unknown mode "liner"; known: nearest, linear, cubic, bilinear; did you mean "linear"?"#);
    insta::assert_snapshot!(error(vec![text("nearest_mode", "up")]), @r#"in node "Resize_0:y": Resize (opset 18): unknown nearest_mode "up"; known: round_prefer_floor, round_prefer_ceil, floor, ceil"#);
}

#[test]
fn operands_of_deformable_convolutions_that_do_not_fit_are_errors() {
    let error = |x: &[&str], weights: &[&str], attributes: Vec<AttributeProto>| {
        let mut deformed = node("DeformConv", &["x", "w", "offset"], &["y"]);
        deformed.attribute = attributes;
        let offset = ["1", "18", "3", "3"];
        let input = [("x", x), ("w", weights), ("offset", &offset)];
        error_of(GraphProto {
            input: input.map(|(n, dims)| info(n, 1, dims)).to_vec(),
            ..unary(vec![deformed])
        })
    };
    let (x, weights) = (["1", "2", "5", "5"], ["4", "2", "3", "3"]);
    insta::assert_snapshot!(error(&x, &weights, vec![int("group", 3)]), @r#"in node "DeformConv_0:y": DeformConv (opset 18): 2 channels and weights [4, 2, 3, 3] do not fit in 3 groups"#);
    insta::assert_snapshot!(error(&x, &weights, vec![int("group", 2)]), @r#"in node "DeformConv_0:y": DeformConv (opset 18): 2 channels and weights [4, 2, 3, 3] do not fit in 2 groups"#);
    insta::assert_snapshot!(error(&x, &weights, vec![int("offset_group", 0)]), @r#"in node "DeformConv_0:y": DeformConv (opset 18): offset_group is 0, expected 1 or more"#);
    insta::assert_snapshot!(error(&x, &weights, vec![int("offset_group", 2)]), @r#"in node "DeformConv_0:y": DeformConv (opset 18): expected offsets of shape [1, 36, 3, 3], got [1, 18, 3, 3]"#);
    insta::assert_snapshot!(error(&["1", "2", "5"], &["4", "2", "3"], vec![]), @r#"in node "DeformConv_0:y": DeformConv (opset 18): expected images with 2 spatial axes, got 1"#);
}
