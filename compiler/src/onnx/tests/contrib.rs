//! Operators of `com.microsoft`, against their definitions in standard operators.

use super::{info, node};
use crate::interp;
use crate::onnx::{Model, Specialisation, proto::*};
use gristmill_runtime::Tensor;

fn run(
    nodes: Vec<NodeProto>,
    inputs: &[(&str, &[&str])],
    outputs: &[&str],
    values: &[Tensor],
) -> Vec<Tensor> {
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
    let g = Model::from_proto(model)
        .unwrap()
        .graph(&Specialisation::default())
        .unwrap();
    interp::run(&g, values).unwrap()
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
