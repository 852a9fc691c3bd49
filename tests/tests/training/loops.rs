//! Training of ONNX loops.

use super::tuning::{small, training};
use crate::lists::{info, node, tensor};
use gristmill::Tensor;
use gristmill::onnx::{Model, proto::*};
use gristmill::train::{Adam, FineTuning, Pretrained, Trainer};

/// A value of a body, whose type follows from the node.
fn inner(name: &str) -> ValueInfoProto {
    ValueInfoProto {
        name: name.to_owned(),
        ..Default::default()
    }
}

/// `h = tanh(h w)`.
fn body() -> GraphProto {
    GraphProto {
        name: "body".to_owned(),
        node: vec![
            node("Identity", &["go"], "still"),
            node("MatMul", &["h", "w"], "product"),
            node("Tanh", &["product"], "next"),
        ],
        input: ["i", "go", "h"].map(inner).to_vec(),
        output: ["still", "next"].map(inner).to_vec(),
        ..Default::default()
    }
}

/// The body three times, from the rows of `x` on.
fn model() -> Model {
    let mut iterations = node("Loop", &["three", "", "x"], "last");
    iterations.attribute = vec![AttributeProto {
        name: "body".to_owned(),
        r#type: attribute_type::GRAPH,
        g: Some(body()),
        ..Default::default()
    }];
    let three = TensorProto {
        name: "three".to_owned(),
        data_type: 7,
        int64_data: vec![3],
        ..Default::default()
    };
    let weight = TensorProto {
        name: "w".to_owned(),
        data_type: 1,
        dims: vec![4, 4],
        float_data: (0..16).map(|i| (1.7 * i as f32).sin()).collect(),
        ..Default::default()
    };
    let rows = || tensor(Some(&["N", "4"]));
    let graph = GraphProto {
        name: "iterations".to_owned(),
        node: vec![iterations],
        initializer: vec![three, weight],
        input: vec![info("x", rows())],
        output: vec![info("last", rows())],
        ..Default::default()
    };
    let standard = OperatorSetIdProto {
        domain: String::new(),
        version: 18,
    };
    let proto = ModelProto {
        ir_version: 9,
        graph: Some(graph),
        opset_import: vec![standard],
        ..Default::default()
    };
    Model::from_proto(proto).unwrap()
}

#[test]
fn a_loop_of_known_length_learns() {
    let net = Pretrained::new(&model(), &FineTuning::default()).unwrap();
    assert!(net.without_gradient().is_empty());
    assert!(net.weights().iter().all(|w| w.frozen.is_none()));
    let training = training(Adam::default());
    let trainer = Trainer::new("iterations", &training, |m| small(m, &net)).unwrap();
    let x: Vec<f32> = (0..8).map(|i| i as f32 / 4.0 - 1.0).collect();
    let x = Tensor::from_slice(&x, &[2, 4]).unwrap();
    let step = || trainer.step([("x".to_owned(), x.clone())]).unwrap().loss;
    let losses: Vec<f64> = (0..4).map(|_| step()).collect();
    assert!(losses.is_sorted_by(|a, b| a > b), "{losses:?}");
}
