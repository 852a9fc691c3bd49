//! Random graphs on several devices mean the same as on one.

use super::sharding::Plan;
use super::{Machine, Sharding, Shares, check_divisible};
use crate::interp::{self, Store, compare::allclose};
use crate::ir::verify::verify;
use crate::ir::{Dim, Graph, GraphBuilder, Node, Op, ReduceKind, ScalarOp, ScatterKind};
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
        shards: 0,
        parts: 1,
        sums: String::new(),
    }
}

/// The graph of devices of equal speed, and its note.
fn split_batch(
    g: &Graph,
    inputs: &[String],
    on: &DataParallel,
) -> crate::Result<(Graph, Option<String>)> {
    let machine = Machine {
        speeds: vec![1.0; on.devices.len()],
        has_slow_links: true,
    };
    super::split_batch(g, inputs, on, &machine)
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
    let plan = Plan::of(g, &inputs, &Shares::of_devices(batch, &vec![1.0; n]), "");
    for (id, node) in g.nodes() {
        for computed in plan.computations_of(id) {
            let of = counts.entry(node.op.name()).or_default();
            match computed.sharding() {
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
fn shares_are_as_large_as_devices_are_fast() {
    let sizes = |batch, speeds: &[f64]| {
        let shares = Shares::of_devices(batch, speeds);
        shares.ranges.iter().map(|r| r.len()).collect::<Vec<_>>()
    };
    assert_eq!(sizes(10, &[1.0, 1.0, 1.05]), [3, 3, 4]);
    assert_eq!(sizes(12, &[1.0, 2.0]), [4, 8]);
    assert_eq!(sizes(12, &[3.0, 1.0, 2.0]), [6, 2, 4]);
    // Each has one.
    assert_eq!(sizes(4, &[1.0, 100.0, 1.0]), [1, 2, 1]);
    assert_eq!(sizes(2, &[1.0, 100.0, 1.0]), [1, 1]);
    assert_eq!(sizes(0, &[1.0, 2.0]), [0]);
    assert_eq!(sizes(6, &[0.0, 2.0]), [3, 3]);
    assert_eq!(sizes(6, &[f64::NAN, f64::INFINITY, 1.0]), [2, 2, 2]);
}

/// All devices work on a batch with fewer examples than shards, in blocks of the same pairs.
#[test]
fn few_examples_in_many_shares_are_for_all_devices() {
    let devices = |batch, leaves, n| Shares::in_tree(batch, leaves, n).devices;
    assert_eq!(devices(8, 4, 2), [0, 0, 1, 1]);
    assert_eq!(devices(4, 64, 2), [0, 0, 1, 1]);
    assert_eq!(devices(5, 64, 2), [0, 0, 0, 0, 1]);
    assert_eq!(devices(2, 8, 4), [0, 1]);
    assert_eq!(devices(0, 8, 4), [0]);
}

/// Sums over eight shards on one to eight devices, with servers, and of batches with fewer examples than shards.
#[test]
fn shards_give_the_same_bits_on_any_number_of_devices() {
    let mut rng = crate::testing::Rng(3);
    for (batch, dtype) in [
        (24_usize, DType::F32),
        (19, DType::F32),
        (6, DType::F32),
        (1, DType::F32),
        (16, DType::BF16),
    ] {
        let mut b = GraphBuilder::new("sums");
        let x = b.input("x", dtype, [batch, 5]);
        let square = b.mul(x, x).unwrap();
        let sums = b.reduce(ReduceKind::Sum, square, &[0], false).unwrap();
        let turned = b.transpose(x, &[1, 0]).unwrap();
        let product = b.matmul(turned, x).unwrap();
        let mean = b.reduce(ReduceKind::Mean, x, &[0, 1], false).unwrap();
        let rest = b.sub(x, mean).unwrap();
        for (name, v) in [("sums", sums), ("product", product), ("rest", rest)] {
            b.output(name, v);
        }
        let g = b.finish().unwrap();
        let x = crate::testing::random_tensor(&mut rng, dtype, &[batch, 5], false);
        let found = [(1, 0), (2, 0), (4, 0), (8, 0), (4, 1), (2, 2)].map(|(n, n_servers)| {
            let on = DataParallel {
                shards: 8,
                ..devices(n, n_servers)
            };
            let (split, _) = split_batch(&g, &batched(&g), &on).unwrap();
            verify(&split).unwrap();
            interp::run(&split, std::slice::from_ref(&x)).unwrap()
        });
        let one = interp::run(&g, std::slice::from_ref(&x)).unwrap();
        let tolerance = if dtype == DType::F32 { 1e-5 } else { 2e-2 };
        for (a, b) in one.iter().zip(&found[0]) {
            let c = allclose(a, b, tolerance, tolerance);
            assert!(c.ok, "{batch} {dtype}: {c}");
        }
        assert!(found.iter().all(|own| *own == found[0]), "{batch} {dtype}");
    }
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
        let machine = Machine {
            speeds: [1.0, 3.0, 2.0, 1.0][..n].to_vec(),
            has_slow_links: seed % 3 > 0,
        };
        let on = devices(n, [0, 1, 0, 2, 3][seed as usize % 5]);
        let (split, _) = super::split_batch(&divided, &batched(&g), &on, &machine).unwrap();
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
    let (split, _) = split_batch(g, &batched(g), &devices(2, 0)).unwrap();
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

/// The number of nodes of an op in the graph of two devices, which means what the graph for one does.
fn n_nodes(g: &Graph, x: &Tensor, is: fn(&Op) -> bool) -> usize {
    let [one, two] = on_one_and_two(g, x);
    assert!(one == two, "{two:?}");
    let (split, _) = split_batch(g, &batched(g), &devices(2, 0)).unwrap();
    split.nodes().filter(|(_, n)| is(&n.op)).count()
}

#[test]
fn random_bits_are_those_of_one_device() {
    // Of positions that are not consecutive, each device draws all, and takes its own.
    for (is_turned, n_slices) in [(false, 2), (true, 4)] {
        let mut b = GraphBuilder::new("bits");
        let x = b.input("x", DType::U32, [6_usize, 3]);
        let stream = b.constant(Tensor::from_slice(&[7_i64], &[1]).unwrap());
        let mut shape = vec![Dim::from(6), 3.into()];
        if is_turned {
            shape.reverse();
        }
        let op = Op::RandomBits {
            seed: 3,
            first: 2,
            shape,
        };
        let bits = b.add1(op, &[stream]).unwrap();
        let bits = match is_turned {
            false => bits,
            true => b.transpose(bits, &[1, 0]).unwrap(),
        };
        let y = b.map(ScalarOp::BitXor, &[x, bits]).unwrap();
        b.output("y", y);
        let x = Tensor::zeros(DType::U32, &[6, 3]).unwrap();
        let g = b.finish().unwrap();
        assert_eq!(
            n_nodes(&g, &x, |op| matches!(op, Op::Slice { .. })),
            n_slices
        );
    }
}

/// Reshapes that join the batch to axes before it, and back: shards of shards.
#[test]
fn a_batch_may_lie_several_times_along_an_axis() {
    let mut b = GraphBuilder::new("nested");
    b.set_origin("/rows");
    let x = b.input("x", DType::F32, [4_usize, 3, 2]);
    let w = Tensor::from_slice(&[1_f32, 2.0, 3.0, 4.0], &[2, 2]).unwrap();
    let w = b.constant(w);
    let rows = b.transpose(x, &[1, 0, 2]).unwrap();
    let rows = b.reshape(rows, [12_usize, 2]).unwrap();
    let y = b.matmul(rows, w).unwrap();
    let turned = b.transpose(y, &[1, 0]).unwrap();
    let square = b.matmul(turned, rows).unwrap();
    // Along the rows there is no rule.
    let sorted = b
        .add1(
            Op::CumSum {
                axis: 0,
                exclusive: false,
                reverse: false,
            },
            &[y],
        )
        .unwrap();
    let back = b.reshape(sorted, [3_usize, 4, 2]).unwrap();
    let again = b.map(ScalarOp::Add, &[sorted, y]).unwrap();
    for (name, v) in [
        ("y", y),
        ("square", square),
        ("back", back),
        ("again", again),
    ] {
        b.output(name, v);
    }
    let g = b.finish().unwrap();
    let values: Vec<f32> = (0..24).map(|i| (i % 7) as f32).collect();
    let x = Tensor::from_slice(&values, &[4, 3, 2]).unwrap();
    for n in 2..=4 {
        let (split, note) = split_batch(&g, &batched(&g), &devices(n, n % 2)).unwrap();
        verify(&split).unwrap();
        let [one, all] = [&g, &split].map(|g| interp::run(g, std::slice::from_ref(&x)).unwrap());
        assert!(one == all, "{n} devices: {all:?}");
        insta::allow_duplicates! {
            insta::assert_snapshot!(note.unwrap(), @r#"
1 op is computed for the whole batch, of shards of 96 B that are joined: cum_sum at /rows
"#);
        }
    }
}

/// Half of a sum may be too large for `f16`.
#[test]
fn sums_of_f16_are_whole() {
    let mut b = GraphBuilder::new("halves");
    let x = b.input("x", DType::F16, [4_usize]);
    let sum = b.reduce(ReduceKind::Sum, x, &[0], false).unwrap();
    b.output("sum", sum);
    let values = [40_000.0, 30_000.0, -40_000.0, -20_000.0];
    let x = Tensor::from_f64s(DType::F16, &[4], &values).unwrap();
    let [one, two] = on_one_and_two(&b.finish().unwrap(), &x);
    assert!(one == two, "{two:?}");
}

/// Sums of `bf16` are added up in `f32`, and each device rounds its own.
#[test]
fn sums_of_half_types_are_in_parts() {
    let dtype = DType::BF16;
    let mut b = GraphBuilder::new("halves");
    let x = b.input("x", dtype, [4_usize, 2]);
    let turned = b.transpose(x, &[1, 0]).unwrap();
    let product = b.matmul(turned, x).unwrap();
    b.output("product", product);
    let sums = b.reduce(ReduceKind::Sum, x, &[0], false).unwrap();
    b.output("sums", sums);
    let x = Tensor::from_f64s(dtype, &[4, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]).unwrap();
    let g = b.finish().unwrap();
    // Both in one bucket.
    assert_eq!(n_nodes(&g, &x, |op| matches!(op, Op::AllReduce { .. })), 1);
    let (on_server, _) = split_batch(&g, &batched(&g), &devices(3, 1)).unwrap();
    let [one, three] = [&g, &on_server].map(|g| interp::run(g, std::slice::from_ref(&x)).unwrap());
    assert!(one == three, "{three:?}");
    let sums = on_server
        .nodes()
        .filter(|(_, n)| n.op == Op::Map(ScalarOp::Add));
    let dtypes: Vec<DType> = sums
        .map(|(_, n)| on_server.ty(n.outputs[0]).dtype)
        .collect();
    assert_eq!(dtypes, [DType::F32; 4]);
}

/// Ops on values with the batch three times along an axis, beside another axis of three.
#[test]
fn ops_on_nested_batches_mean_the_same() {
    let mut b = GraphBuilder::new("nested");
    let x = b.input("x", DType::F32, [4_usize, 3, 2]);
    let rows = b.transpose(x, &[1, 0, 2]).unwrap();
    let rows = b.reshape(rows, [12_usize, 2]).unwrap();
    let wide = b.broadcast(rows, [3_usize, 12, 2]).unwrap();
    let index = b.constant(Tensor::from_slice(&[1_i64, 0, 1], &[3]).unwrap());
    let iota = |dtype| Op::Iota {
        dtype,
        shape: vec![12.into(), 2.into()],
        axis: 0,
    };
    let places = b.add1(iota(DType::F32), &[]).unwrap();
    let softmax = Op::Softmax {
        axis: 1,
        log: false,
    };
    let slice = b.slice_axis(wide, 0, 1, 2).unwrap();
    let joined = b.add1(Op::Concat { axis: 2 }, &[wide, wide]).unwrap();
    let picked = b.add1(Op::Gather { axis: 1 }, &[rows, index]).unwrap();
    let soft = b.add1(softmax, &[rows]).unwrap();
    let placed = b.add_(rows, places).unwrap();
    let mean = b.reduce(ReduceKind::Mean, rows, &[0], true).unwrap();
    let sorted = b.map(ScalarOp::Max, &[rows, mean]).unwrap();
    let rows_of = b.add1(iota(DType::I64), &[]).unwrap();
    let rows_of = b.slice_axis(rows_of, 1, 0, 1).unwrap();
    let zero = b.scalar(DType::F32, 0.0);
    let zeros = b.broadcast(zero, [12_usize, 2]).unwrap();
    let kind = ScatterKind::Add;
    let scattered = b
        .add1(Op::ScatterNd { kind }, &[zeros, rows_of, rows])
        .unwrap();
    let all = [slice, joined, picked, soft, placed, mean, sorted, scattered];
    for (i, v) in all.into_iter().enumerate() {
        b.output(&format!("y{i}"), v);
    }
    let g = b.finish().unwrap();
    let values: Vec<f32> = (0..24).map(|i| (i * 5 % 7) as f32 - 2.0).collect();
    let x = Tensor::from_slice(&values, &[4, 3, 2]).unwrap();
    for n in 2..=4 {
        let machine = Machine {
            speeds: [1.0, 2.0, 1.0, 3.0][..n].to_vec(),
            has_slow_links: true,
        };
        let on = devices(n, n % 2);
        let (split, _) = super::split_batch(&g, &batched(&g), &on, &machine).unwrap();
        verify(&split).unwrap();
        let [one, all] = [&g, &split].map(|g| interp::run(g, std::slice::from_ref(&x)).unwrap());
        for (i, (e, f)) in one.iter().zip(&all).enumerate() {
            let c = allclose(e, f, 1e-6, 1e-6);
            assert!(c.ok, "{n} devices, output {i}: {c}");
        }
    }
}

/// A bucket is full with 256 KiB, and takes one dtype; later uses of a variable wait for its update.
#[test]
fn buckets_are_of_one_dtype_and_of_a_size() {
    let mut b = GraphBuilder::new("buckets");
    let x = b.input("x", DType::F32, [4_usize, 15_000]);
    let wide = b.input("wide", DType::F64, [4_usize, 2]);
    let v = b
        .variable("v", Tensor::zeros(DType::F32, &[15_000]).unwrap())
        .unwrap();
    let sum = |b: &mut GraphBuilder, v| b.reduce(ReduceKind::Sum, v, &[0], false).unwrap();
    for i in 0..7 {
        let factor = b.scalar(DType::F32, f64::from(i));
        let scaled = b.mul(x, factor).unwrap();
        let mut total = sum(&mut b, scaled);
        if i == 0 {
            total = b.add_(total, v).unwrap();
            b.assign_variable("v", total).unwrap();
        }
        b.output(&format!("y{i}"), total);
        let wide = sum(&mut b, wide);
        b.output(&format!("wide{i}"), wide);
    }
    let g = b.finish().unwrap();
    let (split, _) = split_batch(&g, &batched(&g), &devices(2, 0)).unwrap();
    let all = split
        .nodes()
        .filter(|(_, n)| matches!(n.op, Op::AllReduce { .. }));
    let members = all.map(|(_, n)| split.def_node(n.inputs[0]).map_or(0, |n| n.inputs.len()));
    let mut members: Vec<usize> = members.collect();
    members.sort_unstable();
    // 60,000 bytes each: five make a bucket.
    assert_eq!(members, [2, 5, 7]);
    let x = Tensor::from_f64s(DType::F32, &[4, 15_000], &vec![1.0; 60_000]).unwrap();
    let wide = Tensor::from_f64s(DType::F64, &[4, 2], &[1.0; 8]).unwrap();
    let (mut one, mut two) = (Store::new(), Store::new());
    for _ in 0..2 {
        let inputs = [x.clone(), wide.clone()];
        let expected = interp::run_with_state(&g, &inputs, &mut one).unwrap();
        assert!(expected == interp::run_with_state(&split, &inputs, &mut two).unwrap());
    }
}

/// A recurrence over the second axis, with sums over steps and examples.
fn recurrence(reads_all: bool) -> Graph {
    let mut step = GraphBuilder::new("step");
    let h = step.input("h", DType::F32, [4_usize, 2]);
    let total = step.input("total", DType::F32, [2_usize, 2]);
    let x = step.input("x", DType::F32, [4_usize, 2]);
    let w = step.input("w", DType::F32, [2_usize, 2]);
    let product = step.matmul(h, w).unwrap();
    let mut next = step.add_(product, x).unwrap();
    if reads_all {
        let mean = step.reduce(ReduceKind::Mean, next, &[0], false).unwrap();
        next = step.sub(next, mean).unwrap();
    }
    let turned = step.transpose(x, &[1, 0]).unwrap();
    let outer = step.matmul(turned, next).unwrap();
    let total = step.add_(total, outer).unwrap();
    for (name, v) in [("h", next), ("total", total), ("all", next)] {
        step.output(name, v);
    }
    let mut b = GraphBuilder::new("recurrence");
    let x = b.input("x", DType::F32, [4_usize, 3, 2]);
    let x = b.transpose(x, &[1, 0, 2]).unwrap();
    let zero = b.scalar(DType::F32, 0.0);
    let h = b.broadcast(zero, [4_usize, 2]).unwrap();
    let total = b.broadcast(zero, [2_usize, 2]).unwrap();
    let w = b.constant(Tensor::from_slice(&[1_f32, -1.0, 0.5, 1.0], &[2, 2]).unwrap());
    let scan = Op::Scan {
        carried: 2,
        scanned: 1,
        length: 3.into(),
        reverse: true,
    };
    let results = b
        .add_with_regions(scan, &[h, total, x, w], vec![step.into_graph()])
        .unwrap();
    for (name, v) in ["h", "total", "all"].into_iter().zip(results) {
        b.output(name, v);
    }
    b.finish().unwrap()
}

#[test]
fn steps_of_a_scan_are_in_shards_unless_they_need_all_examples() {
    let values: Vec<f32> = (0..24).map(|i| (i * 5 % 7) as f32 - 3.0).collect();
    let x = Tensor::from_slice(&values, &[4, 3, 2]).unwrap();
    for (reads_all, n) in [(false, 2), (false, 3), (true, 2), (false, 4)] {
        let g = recurrence(reads_all);
        for n_servers in 0..2 {
            let (split, note) = split_batch(&g, &batched(&g), &devices(n, n_servers)).unwrap();
            verify(&split).unwrap();
            let [one, all] =
                [&g, &split].map(|g| interp::run(g, std::slice::from_ref(&x)).unwrap());
            assert!(one == all, "{n} devices, {reads_all}: {all:?}");
            assert_eq!(note.is_some(), reads_all, "{note:?}");
        }
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

/// The variables of a graph, each once.
fn variables(g: &Graph) -> Vec<String> {
    let all = g.variables().into_keys();
    all.map(|(_, name)| name).collect()
}

/// A weighted gradient, and a term of weights alone, are added to sums of the shares: nothing crosses. A use of the new sums joins them.
#[test]
fn sums_of_shares_are_joined_where_they_are_used() {
    let graph = |is_used: bool| {
        let mut b = GraphBuilder::new("sums");
        let x = b.input("x", DType::F32, [8, 3]);
        let zeros = Tensor::zeros(DType::F32, &[3]).unwrap();
        let old = b.variable("sums/w", zeros.clone()).unwrap();
        let w = Tensor::from_slice(&[2.0f32, 4.0, 6.0], &[3]).unwrap();
        let w = b.variable("w", w).unwrap();
        let factor = b.variable("factor", Tensor::scalar(0.5f32)).unwrap();
        let gradient = b.reduce(ReduceKind::Sum, x, &[0], false).unwrap();
        let gradient = b.add_(gradient, w).unwrap();
        let own = b.mul(gradient, factor).unwrap();
        let sum = b.add_(old, own).unwrap();
        match is_used {
            true => b.output("sum", sum),
            false => drop(b.assign_variable("sums/w", sum).unwrap()),
        }
        b.finish().unwrap()
    };
    for (n_servers, is_used) in [(0, false), (0, true), (1, false)] {
        let on = DataParallel {
            sums: "sums/".to_owned(),
            ..devices(2, n_servers)
        };
        let (g, _) = split_batch(&graph(is_used), &["x".to_owned()], &on).unwrap();
        let is_joined = |node: &&Node| matches!(node.op, Op::AllReduce { .. });
        let n_joined = g.nodes().map(|(_, node)| node).filter(is_joined).count();
        assert_eq!(n_joined, usize::from(is_used));
        let names = variables(&g);
        assert!(names.contains(&"sums/share_1/w".to_owned()), "{names:?}");
        let x: Vec<f32> = (0..24).map(|i| i as f32).collect();
        let x = Tensor::from_slice(&x, &[8, 3]).unwrap();
        let found = interp::run(&g, &[x]).unwrap();
        if is_used {
            assert_eq!(found[0].as_slice::<f32>(), [43.0, 48.0, 53.0]);
        }
    }
}
