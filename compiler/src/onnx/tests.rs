//! Tests of the front end on models built here.

use super::proto::*;
use super::*;

fn node(op_type: &str, inputs: &[&str], outputs: &[&str]) -> NodeProto {
    NodeProto {
        op_type: op_type.to_owned(),
        input: inputs.iter().map(|s| s.to_string()).collect(),
        output: outputs.iter().map(|s| s.to_string()).collect(),
        ..Default::default()
    }
}

/// A dim: a number, or a name.
fn dim(text: &str) -> DimensionProto {
    let value = text.parse().map_or(DimensionValue::Param(text.to_owned()), DimensionValue::Value);
    DimensionProto { value: Some(value) }
}

fn info(name: &str, elem_type: i32, dims: &[&str]) -> ValueInfoProto {
    let shape = TensorShapeProto { dim: dims.iter().map(|d| dim(d)).collect() };
    let tensor = TensorTypeProto { elem_type, shape: Some(shape) };
    ValueInfoProto { name: name.to_owned(), r#type: Some(TypeProto { value: Some(TypeValue::Tensor(tensor)) }) }
}

fn i64s(name: &str, dims: &[i64], values: &[i64]) -> TensorProto {
    TensorProto {
        name: name.to_owned(),
        data_type: 7,
        dims: dims.to_vec(),
        int64_data: values.to_vec(),
        ..Default::default()
    }
}

fn model(graph: GraphProto) -> Model {
    let opset_import = vec![OperatorSetIdProto { domain: String::new(), version: 18 }];
    Model::from_proto(ModelProto { ir_version: 9, graph: Some(graph), opset_import, ..Default::default() }).unwrap()
}

#[test]
fn shape_arithmetic_leaves_no_nodes() {
    let graph = GraphProto {
        name: "flatten".to_owned(),
        node: vec![
            node("Shape", &["x"], &["s"]),
            node("Gather", &["s", "zero"], &["n"]),
            node("Concat", &["n", "minus"], &["target"]),
            node("Reshape", &["x", "target"], &["y"]),
        ],
        initializer: vec![i64s("zero", &[1], &[0]), i64s("minus", &[1], &[-1])],
        input: vec![info("x", 1, &["batch", "3", "4"])],
        output: vec![info("y", 1, &[])],
        ..Default::default()
    };
    let g = model(graph).graph(&Specialisation::default()).unwrap();
    insta::assert_snapshot!(g, @r#"
    graph "flatten" {
      %0 = input "x": f32[batch, 3, 4]
      %1: f32[batch, 12] = reshape(%0) {shape = [batch, 12]} @ "Reshape_3:y"
      output "y" %1
    }
    "#);
}
