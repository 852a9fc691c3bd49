//! Random graphs on several devices mean the same as on one.

use super::sharding::Plan;
use super::{Sharding, Shares, check_divisible, split_batch};
use crate::interp::{self, Store, compare::allclose};
use crate::ir::verify::verify;
use crate::ir::{Graph, GraphBuilder, Node, Op, ReduceKind, ScalarOp};
use crate::options::{DataParallel, Deal};
use crate::passes::forward_state;
use crate::rewrite;
use crate::testing::{RandomOptions, random_graph};
use crate::{DType, Tensor};
use gristmill_runtime::device::DeviceName;
use std::collections::BTreeMap;

/// The first devices, and perhaps servers: the first device and further ones.
fn devices(n: usize, n_servers: usize) -> DataParallel {
    let name = |i| DeviceName::parse(&format!("cpu:{i}")).unwrap();
    DataParallel {
        devices: (0..n).map(name).collect(),
        servers: (n - 1..).map(name).take(n_servers).collect(),
        deal: [Deal::InTurn, Deal::BySize][n % 2],
    }
}

/// The inputs with the first axis of the first one that has an axis.
fn batched(g: &Graph) -> Vec<String> {
    let first = |v| g.ty(v).shape.first().cloned();
    let batch = g.inputs.iter().find_map(|&v| first(v));
    let named = g.inputs.iter().zip(&g.input_names);
    let own = named.filter(|(v, _)| batch.is_some() && first(**v) == batch);
    own.map(|(_, name)| name.clone()).collect()
}

/// Counts the ops of nodes that are computed in shards or as partial sums.
fn count(g: &Graph, n: usize, counts: &mut BTreeMap<&'static str, [usize; 2]>) {
    let inputs = batched(g);
    let at = g.input_names.iter().position(|name| *name == inputs[0]);
    let batch = g.ty(g.inputs[at.unwrap()]).shape[0].as_usize().unwrap();
    let plan = Plan::of(g, &inputs, &Shares::equal(batch, n));
    for (id, node) in g.nodes() {
        for computed in plan.computations_of(id) {
            let of = counts.entry(node.op.name()).or_default();
            match computed.sharding {
                Sharding::Replicated => {}
                Sharding::Shard(_) => of[0] += 1,
                Sharding::Partial => of[1] += 1,
            }
        }
    }
}

fn rewritten(g: &Graph) -> Graph {
    let mut ordered = forward_state(g).unwrap();
    ordered.order_state();
    let options = rewrite::Options::default();
    rewrite::rewrite(&ordered, &options).unwrap().0
}

#[test]
fn any_graph_means_the_same_on_several_devices() {
    let mut counts = BTreeMap::new();
    let mut n_split = 0;
    for seed in 0..2500 {
        let options = RandomOptions {
            dtypes: vec![
                [DType::F32, DType::F64][seed as usize % 2],
                [DType::I64, DType::U8, DType::I32][seed as usize % 3],
            ],
            n_nodes: 6 + seed as usize % 7,
            n_variables: seed as usize % 3,
            initial_values: true,
            ..RandomOptions::default()
        };
        let (g, inputs) = random_graph(seed, &options);
        let has_state = |(_, n): (_, &Node)| n.regions.iter().any(Graph::has_state);
        if batched(&g).is_empty() || g.nodes().any(has_state) {
            continue;
        }
        n_split += 1;
        let n = 2 + seed as usize % 3;
        count(&g, n, &mut counts);
        // A compilation divides rewritten graphs.
        let divided = match seed % 2 {
            0 => g.clone(),
            _ => rewritten(&g),
        };
        let split = split_batch(
            &divided,
            &batched(&g),
            &devices(n, [0, 1, 0, 2, 3][seed as usize % 5]),
        )
        .unwrap();
        verify(&split).unwrap();
        let (mut one, mut all) = (Store::new(), Store::new());
        for run in 0..2 {
            let expected = interp::run_with_state(&g, &inputs, &mut one).unwrap();
            let found = interp::run_with_state(&split, &inputs, &mut all).unwrap();
            for (i, (e, f)) in expected.iter().zip(&found).enumerate() {
                let c = allclose(e, f, 1e-4, 1e-5);
                let is_same = c.ok || c.scaled_err() < 1e-5;
                assert!(is_same, "seed {seed}, run {run}, output {i}: {c}");
            }
        }
    }
    assert!(n_split > 1000, "{n_split}");
    for (sharding, names) in [
        (0, SHARDED),
        (1, &["matmul", "reduce", "reshape", "sub", "transpose"]),
    ] {
        for name in names {
            let found = counts.get(name).copied().unwrap_or_default();
            assert!(
                found[sharding] > 0,
                "{name} in sharding {sharding}: {counts:?}"
            );
        }
    }
}

/// Ops besides element-wise ones that some random graph computes in shards.
const SHARDED: &[&str] = &[
    "arg_reduce",
    "attention",
    "broadcast",
    "concat",
    "conv",
    "conv_transpose",
    "cum_sum",
    "gather",
    "gather_elements",
    "gather_nd",
    "layer_norm",
    "matmul",
    "pad",
    "pool",
    "reduce",
    "reshape",
    "rms_norm",
    "scatter_elements",
    "slice",
    "softmax",
    "standardize",
    "top_k",
    "transpose",
];

fn error(text: &str) -> String {
    let g = Graph::parse(text).unwrap();
    let e = check_divisible(&g).unwrap_err();
    e.to_string()
}

/// Both results of a graph for an input.
fn on_one_and_two(g: &Graph, x: &Tensor) -> [Vec<Tensor>; 2] {
    let split = split_batch(g, &batched(g), &devices(2, 0)).unwrap();
    [g, &split].map(|g| interp::run(g, std::slice::from_ref(x)).unwrap())
}

/// Casts of positions wrap around, and those to narrow floats round once.
#[test]
fn positions_of_narrow_dtypes_are_those_of_one_device() {
    for dtype in [DType::U8, DType::I8, DType::BF16, DType::F16, DType::I64] {
        let mut b = GraphBuilder::new("positions");
        let x = b.input("x", dtype, [602_usize]);
        let iota = Op::Iota {
            dtype,
            shape: vec![602.into()],
            axis: 0,
        };
        let iota = b.add1(iota, &[]).unwrap();
        let y = b.map(ScalarOp::Max, &[x, iota]).unwrap();
        b.output("y", y);
        let x = Tensor::zeros(dtype, &[602]).unwrap();
        let [one, two] = on_one_and_two(&b.finish().unwrap(), &x);
        assert!(one[0].as_bytes() == two[0].as_bytes(), "{dtype}");
    }
}

#[test]
fn means_of_large_numbers_do_not_overflow() {
    let mut b = GraphBuilder::new("mean");
    let x = b.input("x", DType::F32, [4_usize, 3]);
    let mean = b.reduce(ReduceKind::Mean, x, &[0], false).unwrap();
    b.output("mean", mean);
    let x = Tensor::from_slice(&[3e38_f32; 12], &[4, 3]).unwrap();
    let [one, two] = on_one_and_two(&b.finish().unwrap(), &x);
    assert!(one == two, "{two:?}");
}

#[test]
fn nodes_that_wait_for_others_are_refused() {
    let mut b = GraphBuilder::new("waiting");
    b.set_origin("/exp");
    let x = b.input("x", DType::F32, [4_usize]);
    let check = b.add1(Op::CheckFinite, &[x]).unwrap();
    let y = b.with_control_dependencies(&[check], |b| b.map(ScalarOp::Exp, &[x]));
    b.output("y", y.unwrap());
    let g = b.finish().unwrap();
    let e = check_divisible(&g).unwrap_err();
    insta::assert_snapshot!(e, @r#"
in node "/exp": a batch is divided among devices, and the node waits for others by control dependencies (try: without with_control_dependencies)
"#);
}

#[test]
fn nodes_that_ask_for_devices_are_refused() {
    let text = r#"graph "g" {
  %0 = input "x": f32[4, 2]
  %1: f32[4, 2] = neg(%0) on "/device:CPU:1" @ "/layer"
  output "y" %1
}"#;
    insta::assert_snapshot!(error(text), @r#"
in node "/layer": a batch is divided among devices, and the node asks for one by itself (try: without device scopes, or without a strategy)
"#);
}
