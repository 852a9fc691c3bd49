//! How the nodes of small models would be computed.

use super::*;

fn graph(nodes: Vec<NodeProto>) -> GraphProto {
    GraphProto {
        name: "g".to_owned(),
        node: nodes,
        initializer: vec![i64s("at", &[2], &[1, 0]), i64s("shape", &[2], &[12, 2])],
        input: vec![info("x", 1, &["n", "4"])],
        output: vec![info("y", 1, &[])],
        ..Default::default()
    }
}

/// Treatments of each operator as one line per operator, no time being predicted.
fn lines(nodes: Vec<NodeProto>) -> String {
    lines_with(nodes, None)
}

fn lines_with(nodes: Vec<NodeProto>, share: Option<&dyn Fn(&str) -> f64>) -> String {
    let why = crate::codegen::cpu::why_loops;
    let report = model(graph(nodes))
        .capabilities(&Specialisation::default(), Loops { why, share })
        .unwrap();
    let mut text = String::new();
    for (name, o) in &report.operators {
        let nodes: Vec<String> = o
            .nodes
            .iter()
            .map(|(t, n)| format!("{n} {}", t.name()))
            .collect();
        let loops: Vec<String> = o
            .loops
            .iter()
            .map(|(op, n)| format!(" ({n} {op})"))
            .collect();
        text += &format!("{name}: {}{}\n", nodes.join(", "), loops.concat());
    }
    report
        .problems
        .iter()
        .for_each(|p| text += &format!("{}: {:?}\n", p.message, p.nodes));
    text
}

#[test]
fn nodes_are_native_decomposed_folded_or_fall_back() {
    let nodes = vec![
        node("Transpose", &["x"], &["t"]),
        node("MatMul", &["x", "t"], &["p"]),
        node("Shape", &["x"], &["s"]),
        node("Elu", &["p"], &["e"]),
        node("ReduceL2", &["e"], &["l"]),
        node("Gather", &["l", "at"], &["y"]),
    ];
    insta::assert_snapshot!(lines(nodes), @r"
    Elu: 1 native
    Gather: 1 fallback (1 gather of f32: no kernel computes this op)
    MatMul: 1 native
    ReduceL2: 1 decomposed
    Shape: 1 folded
    Transpose: 1 folded
    ");
}

#[test]
fn loops_are_fallbacks_where_all_of_an_operator_take_their_share_of_the_time() {
    let nodes = || {
        vec![
            node("Gather", &["x", "at"], &["a"]),
            node("Gather", &["a", "at"], &["y"]),
        ]
    };
    let half = |_: &str| SLOW_SHARE / 2.0;
    insta::assert_snapshot!(lines_with(nodes(), Some(&half)), @"Gather: 2 fallback (2 gather of f32: no kernel computes this op)");
    let less = |_: &str| SLOW_SHARE / 2.1;
    insta::assert_snapshot!(lines_with(nodes(), Some(&less)), @"Gather: 2 native");
}

#[test]
fn what_follows_an_impossible_node_is_undecided() {
    let nodes = vec![
        node("Relu", &["x"], &["r"]),
        node("NoSuchOperator", &["r"], &["q"]),
        node("Relu", &["q"], &["y"]),
    ];
    insta::assert_snapshot!(lines(nodes), @r#"
    NoSuchOperator: 1 impossible
    Relu: 1 native, 1 undecided
    operator NoSuchOperator is not supported: ["NoSuchOperator_1:q"]
    "#);
}
