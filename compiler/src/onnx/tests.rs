//! Tests of the front end on models built here.

mod capability;
mod contrib;
mod control;
mod image;
mod run_time;
mod shape_arithmetic;
mod training;

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
    let value = text.parse().map_or(
        DimensionValue::Param(text.to_owned()),
        DimensionValue::Value,
    );
    DimensionProto { value: Some(value) }
}

fn info(name: &str, elem_type: i32, dims: &[&str]) -> ValueInfoProto {
    let shape = TensorShapeProto {
        dim: dims.iter().map(|d| dim(d)).collect(),
    };
    let tensor = TensorTypeProto {
        elem_type,
        shape: Some(shape),
    };
    ValueInfoProto {
        name: name.to_owned(),
        r#type: Some(TypeProto {
            value: Some(TypeValue::Tensor(tensor)),
        }),
    }
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

fn floats(name: &str, dims: &[i64], values: &[f32]) -> TensorProto {
    TensorProto {
        name: name.to_owned(),
        data_type: 1,
        dims: dims.to_vec(),
        float_data: values.to_vec(),
        ..Default::default()
    }
}

fn model(graph: GraphProto) -> Model {
    let opset_import = vec![OperatorSetIdProto {
        domain: String::new(),
        version: 18,
    }];
    Model::from_proto(ModelProto {
        ir_version: 9,
        graph: Some(graph),
        opset_import,
        ..Default::default()
    })
    .unwrap()
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

fn attribute(name: &str, r#type: i32) -> AttributeProto {
    AttributeProto {
        name: name.to_owned(),
        r#type,
        ..Default::default()
    }
}

fn int(name: &str, i: i64) -> AttributeProto {
    AttributeProto {
        i,
        ..attribute(name, attribute_type::INT)
    }
}

fn graph_attribute(name: &str, g: GraphProto) -> AttributeProto {
    AttributeProto {
        g: Some(g),
        ..attribute(name, attribute_type::GRAPH)
    }
}

/// A graph of one f32 input `x` of 4 elements and output `y`.
fn unary(node: Vec<NodeProto>) -> GraphProto {
    GraphProto {
        name: "g".to_owned(),
        node,
        input: vec![info("x", 1, &["4"])],
        output: vec![info("y", 1, &[])],
        ..Default::default()
    }
}

/// Imports and interprets with one input.
fn run(m: &Model, x: &[f32]) -> Vec<f32> {
    let g = m.graph(&Specialisation::default()).unwrap();
    let x = gristmill_runtime::Tensor::from_slice(x, &[x.len()]).unwrap();
    crate::interp::run(&g, &[x]).unwrap()[0]
        .as_slice::<f32>()
        .to_vec()
}

fn error_of(g: GraphProto) -> String {
    model(g)
        .graph(&Specialisation::default())
        .unwrap_err()
        .to_string()
}

#[test]
fn errors_name_node_op_and_version() {
    insta::assert_snapshot!(error_of(unary(vec![node("Frobnicate", &["x"], &["y"])])),
        @r#"in node "Frobnicate_0:y": operator Frobnicate is not supported"#);
    insta::assert_snapshot!(error_of(unary(vec![node("Relu", &["z"], &["y"])])),
        @r#"in node "Relu_0:y": Relu: operand "z" is not defined before it"#);
    insta::assert_snapshot!(error_of(unary(vec![node("Add", &["x"], &["y"])])),
        @r#"in node "Add_0:y": Add (opset 18): takes 2 to 2 operands, got 1"#);
    let mut relu = node("Relu", &["x"], &["y"]);
    relu.attribute.push(int("leak", 1));
    insta::assert_snapshot!(error_of(unary(vec![relu])),
        @r#"in node "Relu_0:y": Relu (opset 18): attribute "leak" is not supported"#);
    for (to, message) in [
        (10, "bit_cast: f32 and f16 differ in width"),
        (22, "element type int4 is not supported"),
    ] {
        let mut bit_cast = node("BitCast", &["x"], &["y"]);
        bit_cast.attribute.push(int("to", to));
        let error = error_of(unary(vec![bit_cast]));
        let place = r#"in node "BitCast_0:y": BitCast (opset 18): "#;
        assert_eq!(error, format!("{place}{message}"));
    }
    let mut concat = node("Concat", &["x", "x"], &["y"]);
    concat.attribute.push(AttributeProto {
        f: 1.0,
        ..attribute("axis", attribute_type::FLOAT)
    });
    insta::assert_snapshot!(error_of(unary(vec![concat])),
        @r#"in node "Concat_0:y": Concat (opset 18): attribute axis must be int, is float"#);
}

#[test]
fn all_problems_are_reported_at_once() {
    let g = unary(vec![
        node("Foo", &["x"], &["a"]),
        node("Relu", &["a"], &["b"]),
        node("Foo", &["x"], &["c"]),
        node("Bar", &["x"], &["y"]),
    ]);
    let problems = model(g).check(&Specialisation::default()).unwrap();
    let short: Vec<(&str, usize)> = problems
        .iter()
        .map(|p| (p.message.as_str(), p.nodes.len()))
        .collect();
    assert_eq!(
        short,
        [
            ("operator Foo is not supported", 2),
            ("operator Bar is not supported", 1)
        ]
    );
}

#[test]
fn functions_are_inlined_with_their_attributes() {
    let mut leaky = node("LeakyRelu", &["p"], &["t"]);
    leaky.attribute.push(AttributeProto {
        ref_attr_name: "slope".to_owned(),
        ..attribute("alpha", attribute_type::FLOAT)
    });
    let function = |name: &str, body: Vec<NodeProto>| FunctionProto {
        name: name.to_owned(),
        domain: "d".to_owned(),
        input: vec!["p".to_owned()],
        output: vec!["q".to_owned()],
        node: body,
        attribute_proto: vec![AttributeProto {
            f: 0.5,
            ..attribute("slope", attribute_type::FLOAT)
        }],
        ..Default::default()
    };
    let call = |name: &str, slope: Option<f32>| {
        let mut n = node(name, &["x"], &["y"]);
        n.domain = "d".to_owned();
        n.attribute.extend(slope.map(|f| AttributeProto {
            f,
            ..attribute("slope", attribute_type::FLOAT)
        }));
        n
    };
    let twice = function("Twice", vec![leaky, node("Add", &["t", "t"], &["q"])]);
    let mut endless = node("Endless", &["p"], &["q"]);
    endless.domain = "d".to_owned();
    let functions = vec![twice, function("Endless", vec![endless])];
    let with = |n: NodeProto| {
        let opset_import = ["", "d"]
            .map(|d| OperatorSetIdProto {
                domain: d.to_owned(),
                version: 18,
            })
            .to_vec();
        let (graph, functions) = (Some(unary(vec![n])), functions.clone());
        Model::from_proto(ModelProto {
            graph,
            opset_import,
            functions,
            ..Default::default()
        })
        .unwrap()
    };
    assert_eq!(
        run(&with(call("Twice", None)), &[1.0, -1.0, 0.0, 2.0]),
        [2.0, -1.0, 0.0, 4.0]
    );
    assert_eq!(
        run(&with(call("Twice", Some(0.25))), &[1.0, -1.0, 0.0, 2.0]),
        [2.0, -0.5, 0.0, 4.0]
    );
    insta::assert_snapshot!(with(call("Endless", None)).graph(&Specialisation::default()).unwrap_err(),
        @r#"in node "Endless_0:y/Endless_0:q": function "Endless" calls itself"#);
}

#[test]
fn outer_values_become_operands_of_regions() {
    let branch = |op: &str| GraphProto {
        node: vec![node(op, &["x"], &["r"])],
        output: vec![info("r", 1, &[])],
        ..unary(vec![])
    };
    let branch = |op: &str| GraphProto {
        input: vec![],
        ..branch(op)
    };
    let mut if_ = node("If", &["c"], &["y"]);
    if_.attribute = vec![
        graph_attribute("then_branch", branch("Abs")),
        graph_attribute("else_branch", branch("Neg")),
    ];
    let nodes = vec![
        node("ReduceSum", &["x"], &["s"]),
        node("Greater", &["s", "zero"], &["c"]),
        if_,
    ];
    let zero = TensorProto {
        name: "zero".to_owned(),
        data_type: 1,
        float_data: vec![0.0],
        ..Default::default()
    };
    let m = model(GraphProto {
        initializer: vec![zero],
        ..unary(nodes)
    });
    assert_eq!(run(&m, &[1.0, -2.0, 3.0, 4.0]), [1.0, 2.0, 3.0, 4.0]);
    assert_eq!(run(&m, &[1.0, -2.0, -3.0, 0.0]), [-1.0, 2.0, 3.0, 0.0]);
}

#[test]
fn a_region_may_give_a_value_twice_and_a_model_may_not() {
    let branch = |op: &str| GraphProto {
        node: vec![node(op, &["x"], &["r"])],
        input: vec![],
        output: vec![info("r", 1, &[]), info("r", 1, &[])],
        ..unary(vec![])
    };
    let mut if_ = node("If", &["c"], &["a", "b"]);
    if_.attribute = vec![
        graph_attribute("then_branch", branch("Abs")),
        graph_attribute("else_branch", branch("Neg")),
    ];
    let mut g = unary(vec![if_, node("Add", &["a", "b"], &["y"])]);
    g.input.push(info("c", 9, &[]));
    let g = model(g).graph(&Specialisation::default()).unwrap();
    let x = gristmill_runtime::Tensor::from(vec![1f32, -2.0, 3.0, -4.0]);
    for (condition, expected) in [
        (true, [2.0, 4.0, 6.0, 8.0]),
        (false, [-2.0, 4.0, -6.0, 8.0]),
    ] {
        let c = gristmill_runtime::Tensor::scalar(condition);
        let outputs = crate::interp::run(&g, &[x.clone(), c]).unwrap();
        assert_eq!(outputs[0].as_slice::<f32>(), expected);
    }
    let mut g = unary(vec![node("Neg", &["x"], &["y"])]);
    g.output.push(info("y", 1, &[]));
    let error = model(g).graph(&Specialisation::default()).unwrap_err();
    assert_eq!(error.kind(), crate::ErrorKind::Unsupported);
    assert!(
        error
            .to_string()
            .contains("output \"y\": it is listed twice"),
        "{error}"
    );
}

#[test]
fn shape_inputs_are_reported_and_taken() {
    let mut g = unary(vec![node("Reshape", &["x", "shape"], &["y"])]);
    g.input.push(info("shape", 7, &["rank"]));
    let m = model(g);
    let spec = Specialisation::default();
    assert_eq!(Vec::from_iter(m.required_values(&spec).unwrap()), ["shape"]);
    insta::assert_snapshot!(m.graph(&spec).unwrap_err(), @r#"in node "Reshape_0:y": Reshape (opset 18): operand 1 "shape" depends on the values of the inputs "shape" (try: give the values of these inputs when compiling)"#);
    let value = gristmill_runtime::Tensor::from_slice(&[2i64, -1], &[2]).unwrap();
    let spec = Specialisation {
        values: [("shape".to_owned(), value)].into(),
        ..spec
    };
    let graph = m.graph(&spec).unwrap();
    assert_eq!(graph.inputs.len(), 2);
    assert_eq!(
        graph.ty(graph.outputs[0].value).static_shape().unwrap(),
        [2, 2]
    );
}

#[test]
fn symbolic_contents_can_be_operands() {
    let mut cast = node("Cast", &["s"], &["f"]);
    cast.attribute.push(int("to", 1));
    let mut g = unary(vec![
        node("Size", &["x"], &["s"]),
        cast,
        node("Mul", &["x", "f"], &["y"]),
    ]);
    g.input = vec![info("x", 1, &["n"])];
    assert_eq!(run(&model(g), &[1.0, 2.0, 3.0]), [3.0, 6.0, 9.0]);
}

/// 1, 2, 3, 4 as `f32`.
fn one_to_four() -> Vec<u8> {
    [1f32, 2.0, 3.0, 4.0]
        .iter()
        .flat_map(|f| f.to_le_bytes())
        .collect()
}

/// The file of a model that adds the four numbers at `location` to its input.
fn external_model(location: &str, length: &str) -> Vec<u8> {
    let entry = |key: &str, value: &str| StringStringEntryProto {
        key: key.to_owned(),
        value: value.to_owned(),
    };
    let w = TensorProto {
        name: "w".to_owned(),
        data_type: 1,
        dims: vec![4],
        data_location: 1,
        external_data: vec![entry("location", location), entry("length", length)],
        ..Default::default()
    };
    let graph = GraphProto {
        initializer: vec![w],
        ..unary(vec![node("Add", &["x", "w"], &["y"])])
    };
    let opset_import = vec![OperatorSetIdProto {
        domain: String::new(),
        version: 18,
    }];
    prost::Message::encode_to_vec(&ModelProto {
        graph: Some(graph),
        opset_import,
        ..Default::default()
    })
}

#[test]
fn external_data_stays_in_the_folder() {
    let folder = tempfile::tempdir().unwrap();
    let inside = folder.path().join("inside");
    std::fs::create_dir(&inside).unwrap();
    std::fs::write(inside.join("w.bin"), one_to_four()).unwrap();
    std::fs::write(folder.path().join("secret.bin"), one_to_four()).unwrap();
    let path = inside.join("model.onnx");
    let load_with = |location: &str, length: &str| {
        std::fs::write(&path, external_model(location, length)).unwrap();
        load(&path).unwrap()
    };
    assert_eq!(
        run(&load_with("w.bin", "16"), &[0.0; 4]),
        [1.0, 2.0, 3.0, 4.0]
    );
    let error = |location: &str, length: &str| {
        load_with(location, length)
            .graph(&Specialisation::default())
            .unwrap_err()
            .to_string()
    };
    assert!(
        error("../secret.bin", "16").contains("must be a relative path inside the model's folder")
    );
    assert!(
        error("/etc/hostname", "16").contains("must be a relative path inside the model's folder")
    );
    assert!(error("w.bin", "8").contains("takes 16 bytes, length says 8"));
    assert!(error("none.bin", "16").contains("external data"));
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink(folder.path().join("secret.bin"), inside.join("link.bin"))
            .unwrap();
        assert!(error("link.bin", "16").contains("leads out of the model's folder"));
        let _socket = std::os::unix::net::UnixListener::bind(inside.join("socket")).unwrap();
        assert!(error("socket", "16").contains("is a device, pipe or socket, not a regular file"));
    }
    assert!(error(".", "16").contains("is a folder, not a regular file"));
}

/// The layout of Hugging Face's cache: a folder of links to files that lie side by side in another
/// folder.
#[cfg(unix)]
#[test]
fn external_data_may_lie_beside_the_file_that_the_model_is_a_link_to() {
    use std::os::unix::fs::symlink;
    let folder = tempfile::tempdir().unwrap();
    let (blobs, snapshot) = (
        folder.path().join("blobs"),
        folder.path().join("snapshots/x"),
    );
    std::fs::create_dir_all(&blobs).unwrap();
    std::fs::create_dir_all(&snapshot).unwrap();
    std::fs::write(blobs.join("a"), external_model("model.onnx_data", "16")).unwrap();
    std::fs::write(blobs.join("b"), one_to_four()).unwrap();
    std::fs::write(folder.path().join("secret"), one_to_four()).unwrap();
    let (model, data) = (
        snapshot.join("model.onnx"),
        snapshot.join("model.onnx_data"),
    );
    symlink("../../blobs/a", &model).unwrap();
    symlink("../../blobs/b", &data).unwrap();
    assert_eq!(run(&load(&model).unwrap(), &[0.0; 4]), [1.0, 2.0, 3.0, 4.0]);
    std::fs::remove_file(&data).unwrap();
    symlink("../../secret", &data).unwrap();
    let e = load(&model).unwrap().graph(&Specialisation::default());
    let e = e.unwrap_err().to_string();
    assert!(e.contains("leads out of the model's folder"), "{e}");
}

#[test]
fn logarithms_of_integer_sums_are_unsupported() {
    for op in ["ReduceLogSum", "ReduceLogSumExp"] {
        let g = GraphProto {
            input: vec![info("x", 6, &["4"])],
            ..unary(vec![node(op, &["x"], &["y"])])
        };
        let e = model(g).graph(&Specialisation::default()).unwrap_err();
        assert_eq!(e.kind(), crate::ErrorKind::Unsupported);
        assert!(e.to_string().contains("a logarithm of i32"), "{e}");
    }
}
