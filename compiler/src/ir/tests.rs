//! Round trips of the text form.

use super::*;
use gristmill_runtime::{DType, Tensor};

fn sample() -> Graph {
    let mut b = GraphBuilder::new("sample \"q\"");
    b.set_origin("/layer/0");
    let x = b.input("x", DType::F32, [Dim::symbol("batch"), 4.into()]);
    let w =
        b.constant(Tensor::from_slice(&[0.1f32, f32::NAN, f32::INFINITY, -0.0], &[4, 1]).unwrap());
    let big = b.constant(
        Tensor::from_slice(&(0..20).map(|i| i as f32).collect::<Vec<_>>(), &[4, 5]).unwrap(),
    );
    let y = b.matmul(x, w).unwrap();
    let z = b.matmul(x, big).unwrap();
    let s = b.add_(y, z).unwrap();
    let s = b
        .with_device("/device:CPU:1", |b| {
            b.map(ScalarOp::LeakyRelu { alpha: Real(0.01) }, &[s])
        })
        .unwrap();
    let t = b
        .add(
            Op::TopK {
                k: 2.into(),
                axis: 1,
                largest: true,
            },
            &[s],
        )
        .unwrap();
    let c = b.map(ScalarOp::Cast(DType::F16), &[t[0]]).unwrap();
    let cond = b.scalar(DType::Bool, 1.0);
    let mut then = GraphBuilder::new("then");
    let a = then.input("a", DType::F16, [Dim::symbol("batch"), 2.into()]);
    then.output("r", a);
    let other = then.into_graph();
    let r = b
        .add_with_regions(Op::If, &[cond, c], vec![other.clone(), other])
        .unwrap();
    b.output("y", r[0]);
    b.output("i", t[1]);
    b.finish().unwrap()
}

#[test]
fn text_round_trips() {
    let g = sample();
    let text = g.to_string();
    let parsed = Graph::parse(&text).unwrap();
    assert_eq!(parsed, g);
    assert_eq!(parsed.to_string(), text);
    insta::assert_snapshot!(text);
}

#[test]
fn constants_beside_the_text_come_back() {
    let g = sample();
    let options = print::PrintOptions::FULL;
    let text = g.to_text_beside(options, &|value| {
        (value.len() == 20).then(|| "f32[4, 5] \"twenty\"".to_owned())
    });
    assert!(
        text.contains("{value = beside \"f32[4, 5] \\\"twenty\\\"\"}"),
        "{text}"
    );
    let twenty: Vec<f32> = (0..20).map(|i| i as f32).collect();
    let twenty = Tensor::from_slice(&twenty, &[4, 5]).unwrap();
    let parsed = Graph::parse_beside(&text, &|name| {
        assert_eq!(name, "f32[4, 5] \"twenty\"");
        Ok(constant::ConstData::held(twenty.clone()))
    });
    assert_eq!(parsed.unwrap(), g);
    // A constant of another type, none at all, and an op that takes none.
    let three = |_: &str| Ok(constant::ConstData::held(Tensor::scalar(3.0f32)));
    let wrong = Graph::parse_beside(&text, &three).unwrap_err().to_string();
    assert!(
        wrong.starts_with("line 4: results are written as f32[4, 5]"),
        "{wrong}"
    );
    insta::assert_snapshot!(Graph::parse(&text).unwrap_err(), @r#"line 4: constant "f32[4, 5] \"twenty\"" is beside the text, and only the text is here"#);
    let odd =
        "graph \"g\" {\n  %0 = input \"x\": f32[]\n  %1: f32[] = cast(%0) {to = beside \"a\"}\n}";
    assert!(Graph::parse_beside(odd, &three).is_err());
}

#[test]
fn elided_constants_are_refused() {
    let text = sample().to_text(print::PrintOptions::SHORT);
    insta::assert_snapshot!(Graph::parse(&text).unwrap_err(), @"line 4: the constant's value is elided; print the graph with all constants, as `dump --full` does");
}

#[test]
fn malformed_text_names_the_line() {
    for bad in [
        "",
        "graph",
        "graph \"g\" {",
        "graph \"g\" {\n  %1 = input \"x\": f32[]\n}",
        "graph \"g\" {\n %0: f32[2] = exp(%0)\n}",
        "graph \"g\" {}\nx",
    ] {
        let e = Graph::parse(bad).unwrap_err().to_string();
        assert!(e.starts_with("line "), "{bad:?}: {e}");
    }
}

#[test]
fn errors_of_nodes_name_their_own_line() {
    let error = |node: &str| {
        let text = format!(
            "graph \"g\" {{\n  %0 = input \"x\": f32[3]\n  {node}\n  output \"y\" %1\n}}\n"
        );
        Graph::parse(&text).unwrap_err().to_string()
    };
    let errors = [
        "%1: f32[3] = rleu(%0)",
        "%1: f32[4] = relu(%0)",
        "%1: f32[3] = matmul(%0)",
        "%1: f32[3] = softmax(%0) {\n    axis = 0 }",
        "%1: f32[3] = relu(%0) @",
        "%1: f32[3] = relu",
    ]
    .map(error);
    insta::assert_snapshot!(errors.join("\n"), @r#"
    line 3: unknown op "rleu"; did you mean "relu"?
    line 3: results are written as f32[4], but the op gives f32[3]
    line 3: matmul: expected 2 to 2 operands, got 1
    line 3: softmax: attribute log is missing
    line 3: expected a quoted name
    line 4: expected "(", got "output \"y\" %1"
    "#);
}

#[test]
fn a_value_of_another_builder_is_an_error_at_the_callers_line() {
    let mut other = GraphBuilder::new("other");
    let foreign = other.input("y", DType::F32, [4usize]);
    let mut b = GraphBuilder::new("g");
    let x = b.input("x", DType::F32, [4usize]);
    let line = line!() + 1;
    let e = b.add_(x, foreign).unwrap_err();
    assert_eq!(e.node(), Some(format!("{}:{line}", file!()).as_str()));
    insta::assert_snapshot!(without_node(&e), @r#"add: value 0 is not of graph "g", but of another builder's"#);
    let line = line!() + 1;
    let e = b.reshape(foreign, [2usize, 2]).unwrap_err();
    assert_eq!(e.node(), Some(format!("{}:{line}", file!()).as_str()));
    b.colocate_with(foreign, |b| b.map(ScalarOp::Exp, &[x]))
        .unwrap_err();
    let line = line!() + 1;
    b.output("y", foreign);
    let e = b.finish().unwrap_err();
    assert_eq!(e.node(), Some(format!("{}:{line}", file!()).as_str()));
    insta::assert_snapshot!(without_node(&e), @r#"output "y": value 0 is not of graph "g", but of another builder's"#);
}

/// The message after the place.
fn without_node(e: &crate::Error) -> String {
    let place = format!("in node {:?}: ", e.node().unwrap_or_default());
    e.to_string().replace(&place, "")
}

#[test]
fn a_node_before_others_moves_them() {
    let mut b = GraphBuilder::new("moved");
    let x = b.input("x", DType::F32, [2]);
    let y = b.mul(x, x).unwrap();
    let z = b.add_(y, x).unwrap();
    let w = b.sub(z, x).unwrap();
    let mut g = b.into_graph();
    g.node_mut(NodeId(1)).control = vec![NodeId(0)];
    g.node_mut(NodeId(2)).control = vec![NodeId(1)];
    let iota = Op::Iota {
        dtype: DType::I64,
        shape: vec![3.into()],
        axis: 0,
    };
    let v = g.add_before(NodeId(1), iota).unwrap();
    let defined = [y, v, z, w].map(|v| g.value(v).def);
    assert_eq!(defined, [0, 1, 2, 3].map(|n| Def::Node(NodeId(n), 0)));
    assert_eq!(g.node(NodeId(2)).control, [NodeId(0)]);
    assert_eq!(g.node(NodeId(3)).control, [NodeId(2)]);
    verify::verify(&g).unwrap();
}
