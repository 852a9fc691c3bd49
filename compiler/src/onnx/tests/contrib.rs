//! Operators of `com.microsoft`, against their definitions in standard operators.

use super::{attribute, info, node};
use crate::error::Result;
use crate::interp;
use crate::ir::Graph;
use crate::onnx::{Model, Specialisation, proto::*};
use gristmill_runtime::Tensor;

fn run(
    nodes: Vec<NodeProto>,
    inputs: &[(&str, &[&str])],
    outputs: &[&str],
    values: &[Tensor],
) -> Vec<Tensor> {
    interp::run(&imported(nodes, inputs, outputs).unwrap(), values).unwrap()
}

fn imported(nodes: Vec<NodeProto>, inputs: &[(&str, &[&str])], outputs: &[&str]) -> Result<Graph> {
    let graph = GraphProto {
        name: "g".to_owned(),
        node: nodes,
        input: inputs.iter().map(|(n, dims)| info(n, 1, dims)).collect(),
        output: outputs.iter().map(|o| info(o, 1, &[])).collect(),
        ..Default::default()
    };
    let domain = |d: &str, version| OperatorSetIdProto {
        domain: d.to_owned(),
        version,
    };
    let opset_import = vec![domain("", 20), domain("com.microsoft", 1)];
    let model = ModelProto {
        ir_version: 9,
        graph: Some(graph),
        opset_import,
        ..Default::default()
    };
    Model::from_proto(model)
        .unwrap()
        .graph(&Specialisation::default())
}

fn contrib(op_type: &str, inputs: &[&str], outputs: &[&str]) -> NodeProto {
    NodeProto {
        domain: "com.microsoft".to_owned(),
        ..node(op_type, inputs, outputs)
    }
}

#[test]
fn a_norm_with_a_skip_connection_is_a_sum_and_a_norm() {
    let t = |v: &[f32], shape: &[usize]| Tensor::from_slice(v, shape).unwrap();
    let inputs = [
        t(&[1.0, -2.0, 3.0, 0.5, 0.25, -1.0], &[2, 3]),
        t(&[0.5, 1.0, -1.0, 2.0, -0.5, 0.0], &[2, 3]),
        t(&[1.0, 2.0, 0.5], &[3]),
        t(&[0.1, 0.2, 0.3], &[3]),
        t(&[1.0, 0.0, -1.0], &[3]),
    ];
    let types: [(&str, &[&str]); 5] = [
        ("x", &["2", "3"]),
        ("skip", &["2", "3"]),
        ("gamma", &["3"]),
        ("beta", &["3"]),
        ("bias", &["3"]),
    ];
    let operands = ["x", "skip", "gamma", "beta", "bias"];
    let fused = vec![contrib(
        "SkipLayerNormalization",
        &operands,
        &["y", "", "", "sum"],
    )];
    let mut norm = node("LayerNormalization", &["s2", "gamma", "beta"], &["y"]);
    norm.attribute = vec![AttributeProto {
        name: "epsilon".to_owned(),
        r#type: attribute_type::FLOAT,
        f: 1e-12,
        ..Default::default()
    }];
    let plain = vec![
        node("Add", &["x", "skip"], &["s1"]),
        node("Add", &["s1", "bias"], &["s2"]),
        norm,
    ];
    let (a, b) = (
        run(fused, &types, &["y", "sum"], &inputs),
        run(plain, &types, &["y", "s2"], &inputs),
    );
    assert_eq!(a, b);
}

#[test]
fn fused_products_swap_axes_and_scale() {
    let a = Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0, 5.0, 6.0], &[3, 2]).unwrap();
    let b = Tensor::from_slice(&[1f32, 0.0, -1.0], &[3, 1]).unwrap();
    let mut n = contrib("FusedMatMul", &["a", "b"], &["y"]);
    let float = |name: &str, f| AttributeProto {
        name: name.to_owned(),
        r#type: attribute_type::FLOAT,
        f,
        ..Default::default()
    };
    let int = |name: &str, i| AttributeProto {
        name: name.to_owned(),
        r#type: attribute_type::INT,
        i,
        ..Default::default()
    };
    n.attribute = vec![float("alpha", 0.5), int("transA", 1)];
    let y = run(
        vec![n],
        &[("a", &["3", "2"]), ("b", &["3", "1"])],
        &["y"],
        &[a, b],
    );
    assert_eq!(y[0], Tensor::from_slice(&[-2f32, -2.0], &[2, 1]).unwrap());
}

fn int_attribute(name: &str, i: i64) -> AttributeProto {
    AttributeProto {
        i,
        ..attribute(name, attribute_type::INT)
    }
}

/// An LSTM in two directions with weights of 8 bits, a scale and a zero point for each.
#[test]
fn a_quantised_lstm_is_one_of_dequantised_weights_and_input() {
    let whole = |n: usize| -> Vec<f32> {
        let value = |i: usize| (90.0 * (1.7 * i as f32).sin()).round();
        (0..n).map(value).collect()
    };
    let t = |v: &[f32], shape: &[usize]| Tensor::from_slice(v, shape).unwrap();
    let x: Vec<f32> = (0..30).map(|i| (0.7 * i as f32).cos() * 2.0).collect();
    let bias: Vec<f32> = (0..64).map(|i| (0.3 * i as f32).sin()).collect();
    let (scales, zeros) = (t(&[0.02, 0.015], &[2]), t(&[3.0, -5.0], &[2]));
    let inputs = [
        t(&x, &[5, 2, 3]),
        t(&whole(2 * 3 * 16), &[2, 3, 16]),
        t(&whole(2 * 4 * 16), &[2, 4, 16]),
        t(&bias, &[2, 32]),
        scales,
        zeros,
    ];
    let types: [(&str, &[&str]); 6] = [
        ("x", &["5", "2", "3"]),
        ("w", &["2", "3", "16"]),
        ("r", &["2", "4", "16"]),
        ("b", &["2", "32"]),
        ("scale", &["2"]),
        ("zero", &["2"]),
    ];
    let with = |n: NodeProto, attributes: Vec<AttributeProto>| NodeProto {
        attribute: attributes,
        ..n
    };
    let of_lstm = || {
        let direction = AttributeProto {
            s: "bidirectional".to_owned().into(),
            ..attribute("direction", attribute_type::STRING)
        };
        vec![direction, int_attribute("hidden_size", 4)]
    };
    let bytes =
        |from: &str, to: &str| with(node("Cast", &[from], &[to]), vec![int_attribute("to", 3)]);
    let operands = [
        "x", "w8", "r8", "b", "", "", "", "", "scale", "zero8", "scale", "zero8",
    ];
    let lstm = contrib("DynamicQuantizeLSTM", &operands, &["y", "h"]);
    let fused = vec![
        bytes("w", "w8"),
        bytes("r", "r8"),
        bytes("zero", "zero8"),
        with(lstm, of_lstm()),
    ];
    let axes = || AttributeProto {
        ints: vec![0, 2, 1],
        ..attribute("perm", attribute_type::INTS)
    };
    let stacked = [&inputs[4], &inputs[5]].map(|v| v.reshaped(&[2, 1, 1]).unwrap());
    let mut plain = vec![
        node("DynamicQuantizeLinear", &["x"], &["q", "s", "z"]),
        node("DequantizeLinear", &["q", "s", "z"], &["xq"]),
    ];
    for [from, centred, real, transposed] in [["w", "wc", "wr", "wt"], ["r", "rc", "rr", "rt"]] {
        plain.push(node("Sub", &[from, "zeros"], &[centred]));
        plain.push(node("Mul", &[centred, "scales"], &[real]));
        let transpose = node("Transpose", &[real], &[transposed]);
        plain.push(with(transpose, vec![axes()]));
    }
    plain.push(with(
        node("LSTM", &["xq", "wt", "rt", "b"], &["y", "h"]),
        of_lstm(),
    ));
    let of_stacked: [(&str, &[&str]); 2] =
        [("scales", &["2", "1", "1"]), ("zeros", &["2", "1", "1"])];
    let with_stacked = [&types[..], &of_stacked].concat();
    let values = [&inputs[..], &stacked].concat();
    let (a, b) = (
        run(fused, &types, &["y", "h"], &inputs),
        run(plain, &with_stacked, &["y", "h"], &values),
    );
    for (a, b) in a.iter().zip(&b) {
        assert_eq!(a.shape(), b.shape());
        for (a, b) in a.to_f64s().iter().zip(b.to_f64s()) {
            assert!((a - b).abs() < 1e-5, "{a} and {b}");
        }
    }
}

/// The result of a `FusedConv` of 2 channels with an addend.
fn fused_conv(activation: &str, params: &[f32]) -> Tensor {
    let mut fused = contrib("FusedConv", &["x", "w", "bias", "z"], &["y"]);
    let text = AttributeProto {
        s: activation.to_owned().into(),
        ..attribute("activation", attribute_type::STRING)
    };
    let params = AttributeProto {
        floats: params.to_vec(),
        ..attribute("activation_params", attribute_type::FLOATS)
    };
    fused.attribute = vec![text, params];
    conv_result(vec![fused], &["z"])
}

/// The result `y` of nodes on the operands of a convolution and some others.
fn conv_result(nodes: Vec<NodeProto>, others: &[&str]) -> Tensor {
    let t = |n: usize, shape: &[usize]| {
        let values: Vec<f32> = (0..n).map(|i| (1.7 * i as f32).sin()).collect();
        Tensor::from_slice(&values, shape).unwrap()
    };
    let mut types: Vec<(&str, &[&str])> = vec![
        ("x", &["1", "2", "4"]),
        ("w", &["2", "2", "3"]),
        ("bias", &["2"]),
    ];
    let mut values = vec![t(8, &[1, 2, 4]), t(12, &[2, 2, 3]), t(2, &[2])];
    for name in others {
        types.push((name, &["1", "2", "2"]));
        values.push(t(4, &[1, 2, 2]));
    }
    run(nodes, &types, &["y"], &values).remove(0)
}

#[test]
fn a_fused_convolution_is_a_convolution_an_addition_and_an_activation() {
    let float = |name: &str, f| AttributeProto {
        f,
        ..attribute(name, attribute_type::FLOAT)
    };
    let activations = [
        ("", vec![]),
        ("Relu", vec![]),
        ("Tanh", vec![]),
        ("Sigmoid", vec![]),
        ("LeakyRelu", vec![("alpha", 0.25)]),
        ("HardSigmoid", vec![("alpha", 0.25), ("beta", 0.375)]),
    ];
    for (name, params) in activations {
        let numbers: Vec<f32> = params.iter().map(|(_, f)| *f).collect();
        let mut last = node(
            if name.is_empty() { "Identity" } else { name },
            &["s"],
            &["y"],
        );
        last.attribute = params.iter().map(|(name, f)| float(name, *f)).collect();
        let plain = vec![
            node("Conv", &["x", "w", "bias"], &["c"]),
            node("Add", &["c", "z"], &["s"]),
            last,
        ];
        assert_eq!(
            fused_conv(name, &numbers),
            conv_result(plain, &["z"]),
            "{name}"
        );
    }
    let clipped = fused_conv("Clip", &[-0.25, 0.5]).to_f64s();
    let whole = fused_conv("", &[]).to_f64s();
    let want: Vec<f64> = whole.iter().map(|y| y.clamp(-0.25, 0.5)).collect();
    assert_eq!(clipped, want);
    assert_ne!(clipped, whole);

    let alone = contrib("FusedConv", &["x", "w"], &["y"]);
    let plain = node("Conv", &["x", "w"], &["y"]);
    assert_eq!(conv_result(vec![alone], &[]), conv_result(vec![plain], &[]));
}

#[test]
fn wrong_parts_of_fused_convolutions_are_errors() {
    let error = |activation: &str, addend: &[&str]| {
        let mut fused = contrib("FusedConv", &["x", "w", "", "z"], &["y"]);
        fused.attribute = vec![AttributeProto {
            s: activation.to_owned().into(),
            ..attribute("activation", attribute_type::STRING)
        }];
        let inputs: [(&str, &[&str]); 3] = [
            ("x", &["1", "2", "4"]),
            ("w", &["2", "2", "3"]),
            ("z", addend),
        ];
        let graph = imported(vec![fused], &inputs, &["y"]);
        graph.unwrap_err().to_string()
    };
    insta::assert_snapshot!(error("Relu", &["1", "2", "1"]), @r#"in node "FusedConv_0:y": FusedConv (opset 1): operand 3 is [1, 2, 1], expected the shape of the result, [1, 2, 2]"#);
    insta::assert_snapshot!(error("Elu", &["1", "2", "2"]), @r#"in node "FusedConv_0:y": FusedConv (opset 1): unknown activation "Elu"; known: Relu, Tanh, Sigmoid, LeakyRelu, Clip, HardSigmoid; did you mean "Relu"?"#);
    insta::assert_snapshot!(error("Clip", &["1", "2", "2"]), @r#"in node "FusedConv_0:y": FusedConv (opset 1): activation "Clip" takes 2 activation_params, got 0"#);
}
