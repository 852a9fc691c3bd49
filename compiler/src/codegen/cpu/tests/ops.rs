//! Every op of the table that can stand in a cluster.

use super::harness::compile_clusters;
use super::harness::{check, run};
use crate::codegen::cpu::Options;
use crate::codegen::testing::{self, Case, Rng, as_cluster, cases, graph_of, in_clusters};
use crate::ir::*;
use gristmill_runtime::{DType, Tensor};

fn check_all(seed: u64, cases: fn(&mut Rng) -> Vec<Case>) {
    let rng = &mut Rng(seed);
    cases(rng)
        .iter()
        .for_each(|c| check(&c.body, &c.inputs, c.tolerance, rng));
}

#[test]
fn every_scalar_op_on_every_dtype() {
    check_all(1, testing::scalar_ops);
}

#[test]
fn every_cast() {
    check_all(2, testing::casts);
}

#[test]
fn broadcasting_operands() {
    check_all(3, testing::broadcasts);
}

#[test]
fn every_tensor_op() {
    check_all(4, testing::tensor_ops);
}

/// What is selected, ordered or normalised treats NaN, infinities and zeros of both signs as the interpreter does.
#[test]
fn special_values_through_every_selection() {
    check_all(8, testing::special_selections);
}

#[test]
fn attention_and_softmax_of_hidden_rows() {
    check_all(9, testing::hidden_rows);
}

#[test]
fn unary_ops_over_shapes() {
    check_all(5, testing::unary_shapes);
}

#[test]
fn faults_are_reported_as_status() {
    let rng = &mut Rng(6);
    for (op, operands, expected) in testing::faults(rng) {
        let graph = as_cluster(&graph_of(&op, &operands));
        let compiled = compile_clusters(&mut graph.clone(), &Options::default()).unwrap();
        assert_eq!(
            run(&graph, &compiled, &operands, rng),
            Err(expected),
            "{op:?}"
        );
    }
}

/// The capability report's idea of what has a kernel is what code generation does.
#[test]
fn native_ops_are_those_without_element_loops() {
    let rng = &mut Rng(10);
    let mut all: Vec<(Op, Vec<Tensor>)> = Vec::new();
    for (name, class, _) in Op::catalogue() {
        if in_clusters(class) {
            all.extend(cases(name, rng));
        }
    }
    for op in ScalarOp::samples() {
        for dtype in [DType::F32, DType::F64, DType::I32, DType::Bool, DType::F16] {
            let mut dtypes = vec![dtype; op.spec().arity];
            if op == ScalarOp::Select {
                dtypes[0] = DType::Bool;
            }
            if op.result_dtype(&dtypes).is_ok() {
                all.push((
                    Op::Map(op),
                    dtypes
                        .iter()
                        .map(|&d| rng.tensor(d, &[7, 5], 1.0, 3.0))
                        .collect(),
                ));
            }
        }
    }
    // Transposed convolutions become others before they are clusters.
    let is_lowered = |op: &Op| !matches!(op.name(), "constant" | "conv_transpose");
    for (op, operands) in all
        .into_iter()
        .filter(|(op, o)| !o.iter().any(Tensor::is_empty) && is_lowered(op))
    {
        let g = graph_of(&op, &operands);
        if g.outputs
            .iter()
            .any(|o| g.ty(o.value).static_shape().unwrap().contains(&0))
        {
            continue;
        }
        let steps = super::harness::steps(&g);
        let kernel =
            |s: &String| s.contains("_gm_") || s.ends_with("_vector") || s.ends_with("_top_k");
        let expected = steps.iter().all(kernel);
        let (_, node) = g.nodes().next().unwrap();
        assert_eq!(
            crate::codegen::cpu::why_loops(&g, node).is_none(),
            expected,
            "{g} {steps:?}"
        );
    }
}
