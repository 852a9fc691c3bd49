//! Control flow: what becomes a region, what is inlined or unrolled, and what is refused.

use super::{i64s, info, int, model, node};
use crate::autodiff::{GradOptions, grad};
use crate::error::Result;
use crate::interp;
use crate::onnx::{Specialisation, proto::*};
use gristmill_runtime::Tensor;
use prost::bytes::Bytes;

fn attr(name: &str, g: Option<GraphProto>, i: i64) -> AttributeProto {
    let r#type = if g.is_some() {
        attribute_type::GRAPH
    } else {
        attribute_type::INT
    };
    AttributeProto {
        name: name.to_owned(),
        r#type,
        g,
        i,
        ..Default::default()
    }
}

fn graph(nodes: Vec<NodeProto>, inputs: Vec<ValueInfoProto>, outputs: &[&str]) -> GraphProto {
    let output = outputs.iter().map(|o| info(o, 1, &[])).collect();
    GraphProto {
        name: "g".to_owned(),
        node: nodes,
        input: inputs,
        output,
        ..Default::default()
    }
}

fn control(
    op_type: &str,
    inputs: &[&str],
    outputs: &[&str],
    attribute: Vec<AttributeProto>,
) -> NodeProto {
    NodeProto {
        attribute,
        ..node(op_type, inputs, outputs)
    }
}

fn f32s(values: &[f32]) -> Tensor {
    Tensor::from_slice(values, &[values.len()]).unwrap()
}

/// Imports with the inputs' values known where named, runs, and gives the first result.
fn run(g: GraphProto, inputs: &[Tensor], known: &[(&str, Tensor)]) -> Result<Vec<f32>> {
    let spec = Specialisation {
        values: known
            .iter()
            .map(|(n, t)| (n.to_string(), t.clone()))
            .collect(),
        ..Specialisation::default()
    };
    let g = model(g).graph(&spec)?;
    Ok(interp::run(&g, inputs)?[0].as_slice::<f32>().to_vec())
}

/// `if c { if d { x + y } else { x } } else { y }`: each branch captures other values of two levels
/// up.
fn nested() -> GraphProto {
    let inner = control(
        "If",
        &["d"],
        &["r"],
        vec![
            attr(
                "then_branch",
                Some(graph(
                    vec![node("Add", &["x", "y"], &["s"])],
                    vec![],
                    &["s"],
                )),
                0,
            ),
            attr("else_branch", Some(graph(vec![], vec![], &["x"])), 0),
        ],
    );
    let outer = control(
        "If",
        &["c"],
        &["z"],
        vec![
            attr("then_branch", Some(graph(vec![inner], vec![], &["r"])), 0),
            attr("else_branch", Some(graph(vec![], vec![], &["y"])), 0),
        ],
    );
    let inputs = vec![
        info("c", 9, &[]),
        info("d", 9, &[]),
        info("x", 1, &["2"]),
        info("y", 1, &["2"]),
    ];
    graph(vec![outer], inputs, &["z"])
}

#[test]
fn branches_capture_from_all_levels_and_a_known_condition_leaves_none() {
    let (x, y) = (f32s(&[1.0, 2.0]), f32s(&[10.0, 20.0]));
    for (c, d, expected) in [
        (true, true, [11.0, 22.0]),
        (true, false, [1.0, 2.0]),
        (false, true, [10.0, 20.0]),
    ] {
        let (c, d) = (Tensor::scalar(c), Tensor::scalar(d));
        let inputs = [c.clone(), d.clone(), x.clone(), y.clone()];
        assert_eq!(run(nested(), &inputs, &[]).unwrap(), expected);
        assert_eq!(
            run(nested(), &inputs, &[("c", c.clone()), ("d", d.clone())]).unwrap(),
            expected
        );
        let spec = Specialisation {
            values: [("c".to_owned(), c), ("d".to_owned(), d)].into(),
            ..Default::default()
        };
        let g = model(nested()).graph(&spec).unwrap();
        assert!(g.nodes().all(|(_, n)| n.regions.is_empty()), "{g}");
    }
}

/// `for i in 0..n { v = concat(v, x) }`: the value grows.
fn growing() -> GraphProto {
    let mut join = node("Concat", &["v", "x"], &["w"]);
    join.attribute = vec![attr("axis", None, 0)];
    let formals = vec![info("i", 7, &[]), info("go", 9, &[]), info("v", 1, &["a"])];
    let body = graph(
        vec![node("Identity", &["go"], &["again"]), join],
        formals,
        &["again", "w"],
    );
    let turn = control(
        "Loop",
        &["n", "", "x"],
        &["z"],
        vec![attr("body", Some(body), 0)],
    );
    graph(
        vec![turn],
        vec![info("n", 7, &[]), info("x", 1, &["1"])],
        &["z"],
    )
}

#[test]
fn a_loop_whose_values_grow_is_unrolled_when_its_count_is_known() {
    let inputs = [Tensor::scalar(3i64), f32s(&[5.0])];
    let known = [("n", Tensor::scalar(3i64))];
    assert_eq!(run(growing(), &inputs, &known).unwrap(), [5.0; 4]);
    assert_eq!(run(growing(), &inputs, &[]).unwrap(), [5.0; 4]);
    let spec = Specialisation {
        values: known.map(|(n, t)| (n.to_owned(), t)).into(),
        ..Specialisation::default()
    };
    let g = model(growing()).graph(&spec).unwrap();
    assert!(g.nodes().all(|(_, n)| n.regions.is_empty()), "{g}");
}

#[test]
fn a_loop_without_a_condition_operand_ignores_that_of_its_body() {
    let no = AttributeProto {
        name: "value".to_owned(),
        r#type: attribute_type::TENSOR,
        t: Some(TensorProto {
            data_type: 9,
            raw_data: Bytes::from_static(&[0]),
            ..Default::default()
        }),
        ..Default::default()
    };
    let body_nodes = vec![
        control("Constant", &[], &["stop"], vec![no]),
        node("Add", &["v", "v"], &["w"]),
    ];
    let formals = vec![info("i", 7, &[]), info("go", 9, &[]), info("v", 1, &["1"])];
    let body = graph(body_nodes, formals, &["stop", "w"]);
    let turn = control(
        "Loop",
        &["n", "", "x"],
        &["z"],
        vec![attr("body", Some(body), 0)],
    );
    let g = graph(
        vec![turn],
        vec![info("n", 7, &[]), info("x", 1, &["1"])],
        &["z"],
    );
    assert_eq!(
        run(g, &[Tensor::scalar(3i64), f32s(&[1.0])], &[]).unwrap(),
        [8.0]
    );
}

#[test]
fn a_loop_body_without_its_results_is_an_error() {
    let body = graph(
        vec![],
        vec![info("i", 7, &[]), info("go", 9, &[]), info("v", 1, &["1"])],
        &["go"],
    );
    let turn = control(
        "Loop",
        &["n", "", "x"],
        &["z"],
        vec![attr("body", Some(body), 0)],
    );
    let mut g = graph(vec![turn], vec![info("x", 1, &["1"])], &["z"]);
    g.initializer = vec![i64s("n", &[], &[2])];
    let e = model(g)
        .graph(&Specialisation::default())
        .unwrap_err()
        .to_string();
    assert!(e.contains("the body has 1 outputs for 1 values"), "{e}");
}

#[test]
fn a_scan_walks_backwards_and_stacks_from_the_end() {
    // Running sums from the last element on; row i of the result belongs to the sum that ends at i.
    let body_nodes = vec![
        node("Add", &["s", "e"], &["t"]),
        node("Identity", &["t"], &["u"]),
    ];
    let body = graph(
        body_nodes,
        vec![info("s", 1, &[]), info("e", 1, &[])],
        &["t", "u"],
    );
    let ints = |name: &str| AttributeProto {
        name: name.to_owned(),
        r#type: attribute_type::INTS,
        ints: vec![1],
        ..Default::default()
    };
    let attributes = vec![
        attr("body", Some(body), 0),
        attr("num_scan_inputs", None, 1),
        ints("scan_input_directions"),
        ints("scan_output_directions"),
    ];
    let scan = control("Scan", &["zero", "x"], &["", "z"], attributes);
    let g = graph(
        vec![scan],
        vec![info("zero", 1, &[]), info("x", 1, &["3"])],
        &["z"],
    );
    let inputs = [Tensor::scalar(0f32), f32s(&[1.0, 2.0, 4.0])];
    assert_eq!(run(g, &inputs, &[]).unwrap(), [7.0, 6.0, 4.0]);
}

/// `while true { v = v + v }` over a constant, `n` times or for ever.
fn endless(n: Option<i64>) -> GraphProto {
    let body_nodes = vec![
        node("Identity", &["go"], &["again"]),
        node("Add", &["v", "v"], &["w"]),
    ];
    let formals = vec![info("i", 7, &[]), info("go", 9, &[]), info("v", 7, &[])];
    let body = graph(body_nodes, formals, &["again", "w"]);
    let count = if n.is_some() { "n" } else { "" };
    let inputs = [count, "", "one"];
    let turn = control("Loop", &inputs, &["z"], vec![attr("body", Some(body), 0)]);
    let mut g = graph(vec![turn], vec![], &["z"]);
    g.initializer = vec![i64s("one", &[], &[1]), i64s("n", &[], &[n.unwrap_or(0)])];
    g
}

#[test]
fn a_loop_over_constants_is_folded_within_the_limit_of_work() {
    let ops = |n| {
        let g = model(endless(n)).graph(&Specialisation::default()).unwrap();
        g.nodes().map(|(_, n)| n.op.name()).collect::<Vec<_>>()
    };
    assert_eq!(ops(Some(5)), ["constant"]);
    assert!(ops(Some(1_000_000_000_000)).contains(&"loop"));
    assert!(ops(None).contains(&"loop"));
}

/// Code for each value of the data would never be used again.
#[test]
fn contents_of_floats_are_not_folded_in() {
    let mut cast = node("Cast", &["x"], &["axes"]);
    cast.attribute = vec![int("to", 7)];
    let mut first = node("Slice", &["axes", "zero", "one"], &["axis"]);
    first.attribute = vec![];
    let graph = GraphProto {
        name: "g".to_owned(),
        node: vec![cast, first, node("CumSum", &["x", "axis"], &["y"])],
        initializer: vec![i64s("zero", &[1], &[0]), i64s("one", &[1], &[1])],
        input: vec![info("x", 1, &["100"])],
        output: vec![info("y", 1, &["100"])],
        ..Default::default()
    };
    let error = model(graph).graph(&Specialisation::default()).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("the contents of \"x\", which are no sizes but data"),
        "{error}"
    );
}

/// `for i in 0..n { v = v * w }` from `v = x`, and the sum of the last `v`; `n` is 3, the extent of `x`, or that less 3.
fn power(n: &str) -> GraphProto {
    let body_nodes = vec![
        node("Identity", &["go"], &["still"]),
        node("Mul", &["v", "w"], &["product"]),
    ];
    let formals = vec![info("i", 7, &[]), info("go", 9, &[]), info("v", 1, &["N"])];
    let body = graph(body_nodes, formals, &["still", "product"]);
    let inputs = [n, "yes", "x"];
    let body = attr("body", Some(body), 0);
    let nodes = vec![
        node("Shape", &["x"], &["extent"]),
        node("Sub", &["extent", "three"], &["rest"]),
        control("Loop", &inputs, &["y"], vec![body]),
        control("ReduceSum", &["y"], &["z"], vec![int("keepdims", 0)]),
    ];
    let vectors = vec![info("x", 1, &["N"]), info("w", 1, &["N"])];
    let mut g = graph(nodes, vectors, &["z"]);
    let yes = TensorProto {
        name: "yes".to_owned(),
        data_type: 9,
        raw_data: Bytes::from_static(&[1]),
        ..Default::default()
    };
    g.initializer = vec![i64s("three", &[], &[3]), yes];
    g
}

#[test]
fn a_loop_of_known_length_has_a_gradient() {
    for (count, n, [dx, dw]) in [
        ("three", 2, [8.0, 12.0]),
        ("extent", 2, [4.0, 4.0]),
        ("extent", 0, [1.0, 0.0]),
        ("rest", 4, [2.0, 1.0]),
        ("rest", 2, [1.0, 0.0]),
    ] {
        let g = model(power(count)).graph(&Specialisation::default());
        let g = g.unwrap();
        let d = grad(&g, g.outputs[0].value, &g.inputs, &GradOptions::default()).unwrap();
        let twos = f32s(&vec![2.0; n]);
        let results = interp::run(&d, &[f32s(&vec![1.0; n]), twos]).unwrap();
        assert_eq!(results[1].to_f64s(), vec![dx; n]);
        assert_eq!(results[2].to_f64s(), vec![dw; n]);
    }
}
