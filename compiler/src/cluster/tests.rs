//! Groupings of small graphs, and equality of clustered and plain graphs.

use super::*;
use crate::ir::{GraphBuilder, Layout, ReduceKind, ScalarOp, Window};
use crate::{DType, Tensor};

fn kinds(g: &Graph) -> Vec<String> {
    let body = |n: &crate::ir::Node| {
        n.regions[0]
            .nodes()
            .map(|(_, n)| n.op.name())
            .filter(|n| *n != "constant")
            .collect::<Vec<_>>()
            .join("+")
    };
    g.nodes()
        .filter(|(_, n)| matches!(n.op, Op::Cluster { .. }))
        .map(|(_, n)| body(n))
        .collect()
}

#[test]
fn linear_layer_takes_bias_and_activation() {
    let mut b = GraphBuilder::new("g");
    let x = b.input("x", DType::F32, [8usize, 16]);
    let w = b.constant(Tensor::zeros(DType::F32, &[16, 4]).unwrap());
    let c = b.constant(Tensor::zeros(DType::F32, &[4]).unwrap());
    let y = b.matmul(x, w).unwrap();
    let y = b.add_(y, c).unwrap();
    let y = b.map(ScalarOp::Gelu, &[y]).unwrap();
    b.output("y", y);
    let (g, report) = cluster(&b.finish().unwrap(), &Fusion::greedy(Default::default())).unwrap();
    crate::ir::verify::verify(&g).unwrap();
    assert_eq!(kinds(&g), ["matmul+add+gelu"]);
    assert_eq!(
        (report.ops_before, report.kernels.values().sum::<usize>()),
        (3, 1)
    );
    assert!(report.bytes_after < report.bytes_before);
}

#[test]
fn the_gates_of_a_recurrent_step_are_one_kernel() {
    let mut b = GraphBuilder::new("step");
    let [h, c] = ["h", "c"].map(|name| b.input(name, DType::F32, [8usize, 16]));
    let w = b.input("w", DType::F32, [16usize, 64]);
    let all = b.matmul(h, w).unwrap();
    let gate = |b: &mut GraphBuilder, i: usize, op| {
        let part = b.slice_axis(all, 1, 16 * i, 16).unwrap();
        b.map(op, &[part]).unwrap()
    };
    let ops = [
        ScalarOp::Sigmoid,
        ScalarOp::Sigmoid,
        ScalarOp::Tanh,
        ScalarOp::Sigmoid,
    ];
    let [i, f, g, o] = [0, 1, 2, 3].map(|k| gate(&mut b, k, ops[k]));
    let (kept, new) = (b.mul(c, f).unwrap(), b.mul(i, g).unwrap());
    let c = b.add_(kept, new).unwrap();
    let t = b.map(ScalarOp::Tanh, &[c]).unwrap();
    let h = b.mul(o, t).unwrap();
    for (name, v) in [
        ("h", h),
        ("c", c),
        ("i", i),
        ("f", f),
        ("g", g),
        ("o", o),
        ("t", t),
    ] {
        b.output(name, v);
    }
    let step = b.finish().unwrap();
    let fusion = Fusion::greedy(Pricing {
        only_cpus: true,
        ..Pricing::default()
    });
    let joined = cluster_region(&step, &fusion).unwrap();
    crate::ir::verify::verify(&joined).unwrap();
    assert_eq!(kinds(&joined).len(), 2, "{joined}");
    let (apart, _) = cluster(&step, &fusion).unwrap();
    assert!(kinds(&apart).len() > 2);
    let tensor = |shape: &[usize]| {
        let n = shape.iter().product::<usize>();
        let x: Vec<f32> = (0..n).map(|i| (i as f32 * 0.37).sin()).collect();
        Tensor::from_slice(&x, shape).unwrap()
    };
    let inputs = [&[8, 16][..], &[8, 16], &[16, 64]].map(tensor);
    let run = |g: &Graph| crate::interp::run(g, &inputs).unwrap();
    assert_eq!(run(&joined), run(&step));
}

/// `x` in `u8` by its range, as `DynamicQuantizeLinear` makes it.
fn quantized_by_range(b: &mut GraphBuilder, x: crate::ir::ValueId) -> crate::ir::ValueId {
    let rank = b.graph().ty(x).rank();
    let axes: Vec<usize> = (0..rank).collect();
    let [largest, smallest] =
        [ReduceKind::Max, ReduceKind::Min].map(|kind| b.reduce(kind, x, &axes, false).unwrap());
    let zero = b.scalar(DType::F32, 0.0);
    let largest = b.map(ScalarOp::Max, &[largest, zero]).unwrap();
    let smallest = b.map(ScalarOp::Min, &[smallest, zero]).unwrap();
    let range = b.sub(largest, smallest).unwrap();
    let steps = b.scalar(DType::F32, 255.0);
    let scale = b.div(range, steps).unwrap();
    let below = b.div(smallest, scale).unwrap();
    let point = b.map(ScalarOp::Neg, &[below]).unwrap();
    let point = b.map(ScalarOp::Round, &[point]).unwrap();
    let point = b.cast(point, DType::U8).unwrap();
    let (q, point) = (b.div(x, scale).unwrap(), b.cast(point, DType::F32).unwrap());
    let q = b.map(ScalarOp::Round, &[q]).unwrap();
    let q = b.add_(q, point).unwrap();
    b.cast(q, DType::U8).unwrap()
}

#[test]
fn a_tensor_quantised_by_its_range_takes_two_more_kernels() {
    let mut b = GraphBuilder::new("g");
    let x = b.input("x", DType::F32, [8usize, 16]);
    let w = b.constant(Tensor::zeros(DType::F32, &[16, 4]).unwrap());
    let y = b.matmul(x, w).unwrap();
    let y = b.map(ScalarOp::Gelu, &[y]).unwrap();
    let q = quantized_by_range(&mut b, y);
    b.output("q", q);
    let g = b.finish().unwrap();
    let pricing = Pricing {
        only_cpus: true,
        ..Pricing::default()
    };
    for fusion in [Fusion::greedy(pricing.clone()), Fusion::priced(pricing)] {
        let (joined, _) = cluster(&g, &fusion).unwrap();
        crate::ir::verify::verify(&joined).unwrap();
        let kinds = kinds(&joined);
        assert_eq!(kinds.len(), 3, "{joined}");
        assert!(
            kinds[0].starts_with("matmul+gelu+reduce+reduce"),
            "{kinds:?}"
        );
        assert!(kinds[2].ends_with("round+add+cast"), "{kinds:?}");
        let x: Vec<f32> = (0..128).map(|i| (i as f32 * 0.37).sin()).collect();
        let inputs = [Tensor::from_slice(&x, &[8, 16]).unwrap()];
        let run = |g: &Graph| crate::interp::run(g, &inputs).unwrap();
        assert_eq!(run(&joined), run(&g));
    }
}

#[test]
fn the_range_of_an_operand_is_one_kernel() {
    let mut b = GraphBuilder::new("g");
    let x = b.input("x", DType::F32, [8usize, 16]);
    let q = quantized_by_range(&mut b, x);
    b.output("q", q);
    let fusion = Fusion::greedy(Pricing {
        only_cpus: true,
        ..Pricing::default()
    });
    let (joined, _) = cluster(&b.finish().unwrap(), &fusion).unwrap();
    let kinds = kinds(&joined);
    assert_eq!(
        (kinds.len(), &kinds[0][..]),
        (3, "reduce+reduce"),
        "{joined}"
    );
}

fn only_cpus() -> Fusion {
    Fusion::greedy(Pricing {
        only_cpus: true,
        ..Pricing::default()
    })
}

/// The smallest and the largest of all elements.
fn range_of(b: &mut GraphBuilder, x: crate::ir::ValueId) -> [crate::ir::ValueId; 2] {
    let axes: Vec<usize> = (0..b.graph().ty(x).rank()).collect();
    [ReduceKind::Min, ReduceKind::Max].map(|kind| b.reduce(kind, x, &axes, false).unwrap())
}

/// The clusters of a graph, which compute the same.
fn clustered_alike(g: &Graph, inputs: &[Tensor]) -> Graph {
    let (clusters, _) = cluster(g, &only_cpus()).unwrap_or_else(|e| panic!("{e}\n{g}"));
    crate::ir::verify::verify(&clusters).unwrap();
    let run = |g: &Graph| crate::interp::run(g, inputs).unwrap();
    assert_eq!(run(&clusters), run(g));
    clusters
}

#[test]
fn scales_of_different_tensors_are_apart() {
    let mut b = GraphBuilder::new("g");
    for name in ["x", "y"] {
        let x = b.input(name, DType::F32, [8usize, 16]);
        let q = quantized_by_range(&mut b, x);
        b.output(&format!("q_{name}"), q);
    }
    let g = b.finish().unwrap();
    let (clusters, _) = cluster(&g, &only_cpus()).unwrap();
    assert_eq!(kinds(&clusters).len(), 6, "{clusters}");
}

#[test]
fn a_range_behind_an_ordered_node_stays_behind_it() {
    for (name, is_before) in [("maker", true), ("other", false)] {
        let mut b = GraphBuilder::new("g");
        let [x, w] = ["x", "w"].map(|name| b.input(name, DType::F32, [4usize, 4]));
        let y = b.matmul(x, w).unwrap();
        let axes = [0, 1];
        let first = b.reduce(ReduceKind::Max, y, &axes, false).unwrap();
        // Reads what the reductions read, or the first of them.
        let read = if is_before { y } else { first };
        let ordered = b.map(ScalarOp::Neg, &[read]).unwrap();
        let low =
            b.with_control_dependencies(&[ordered], |b| b.reduce(ReduceKind::Min, y, &axes, false));
        let low = low.unwrap();
        for (i, v) in [y, first, ordered, low].into_iter().enumerate() {
            b.output(&format!("{name}{i}"), v);
        }
        let inputs = [1.5f32, -0.5].map(|v| Tensor::from_slice(&[v; 16], &[4, 4]).unwrap());
        clustered_alike(&b.finish().unwrap(), &inputs);
    }
}

#[test]
fn ranges_through_stored_views_are_found_apart() {
    let mut b = GraphBuilder::new("g");
    let [x, w] = ["x", "w"].map(|name| b.input(name, DType::F32, [4usize, 4]));
    let y = b.matmul(x, w).unwrap();
    let view = b.transpose(y, &[1, 0]).unwrap();
    let [low, high] = range_of(&mut b, view);
    for (name, v) in [("y", y), ("view", view), ("low", low), ("high", high)] {
        b.output(name, v);
    }
    let x: Vec<f32> = (0..16).map(|i| i as f32).collect();
    let x = Tensor::from_slice(&x, &[4, 4]).unwrap();
    clustered_alike(&b.finish().unwrap(), &[x.clone(), x]);
}

#[test]
fn the_range_of_one_element_keeps_what_makes_it() {
    let mut b = GraphBuilder::new("g");
    let x = b.input("x", DType::F32, [1usize]);
    let y = b.map(ScalarOp::Neg, &[x]).unwrap();
    let [low, high] = range_of(&mut b, y);
    let sum = b.add_(low, high).unwrap();
    b.output("sum", sum);
    let x = Tensor::from_slice(&[2.5f32], &[1]).unwrap();
    clustered_alike(&b.finish().unwrap(), &[x]);
}

/// Joins the kernels of single ops that compute single elements, and compares the results.
fn joined_alike(g: &Graph, inputs: &[Tensor]) {
    let kernels = join_scalars(g, singletons(g));
    let (clusters, _) = body::build(g, &kernels).unwrap_or_else(|e| panic!("{e}\n{g}"));
    crate::ir::verify::verify(&clusters).unwrap();
    let run = |g: &Graph| crate::interp::run(g, inputs).unwrap();
    assert_eq!(run(&clusters), run(g));
}

#[test]
fn single_elements_of_two_ranks_do_not_wait_for_each_other() {
    let mut b = GraphBuilder::new("g");
    let x = b.input("x", DType::F32, [1usize; 0]);
    let z = b.input("z", DType::F32, [1usize]);
    let a = b.map(ScalarOp::Exp, &[x]).unwrap();
    let o = b.map(ScalarOp::Tanh, &[z]).unwrap();
    let r = b.reshape(o, [1usize; 0]).unwrap();
    let h = b.mul(x, r).unwrap();
    let wide = b.reshape(a, [1usize]).unwrap();
    let c = b.add_(o, wide).unwrap();
    for (name, v) in [("a", a), ("o", o), ("r", r), ("h", h), ("c", c)] {
        b.output(name, v);
    }
    let inputs = [
        Tensor::scalar(0.5f32),
        Tensor::from_slice(&[0.25f32], &[1]).unwrap(),
    ];
    joined_alike(&b.finish().unwrap(), &inputs);
}

/// Random graphs of single elements of two ranks, some read by many.
#[test]
fn random_single_elements_are_joined_without_cycles() {
    let mut rng = crate::testing::Rng(91);
    for _ in 0..300 {
        let mut b = GraphBuilder::new("g");
        let mut values = vec![
            b.input("x", DType::F32, [1usize; 0]),
            b.input("z", DType::F32, [1usize]),
        ];
        for i in 0..3 + rng.below(20) {
            let [x, y] = [0, 1].map(|_| values[rng.below(values.len())]);
            let v = match rng.below(4) {
                0 => b.map(ScalarOp::Tanh, &[x]),
                1 if b.graph().ty(x).rank() == 0 => b.reshape(x, [1usize]),
                1 => b.reshape(x, [1usize; 0]),
                2 => b.add_(x, y),
                _ => b.mul(x, y),
            };
            let v = v.unwrap();
            values.push(v);
            if rng.one_in(2) {
                b.output(&format!("o{i}"), v);
            }
        }
        let last = *values.last().unwrap();
        b.output("last", last);
        let inputs = [
            Tensor::scalar(0.5f32),
            Tensor::from_slice(&[0.25f32], &[1]).unwrap(),
        ];
        joined_alike(&b.finish().unwrap(), &inputs);
    }
}

#[test]
fn attention_heads_are_read_and_written_by_strides() {
    let mut b = GraphBuilder::new("g");
    let q = b.input("q", DType::F32, [1usize, 8, 32]);
    let heads = |b: &mut GraphBuilder, x| {
        let h = b.reshape(x, [1usize, 8, 4, 8]).unwrap();
        b.transpose(h, &[0, 2, 1, 3]).unwrap()
    };
    let (h, k) = (heads(&mut b, q), heads(&mut b, q));
    let k = b.transpose(k, &[0, 1, 3, 2]).unwrap();
    let s = b.matmul(h, k).unwrap();
    let s = b
        .add1(
            Op::Softmax {
                axis: 3,
                log: false,
            },
            &[s],
        )
        .unwrap();
    let o = b.matmul(s, h).unwrap();
    let o = b.transpose(o, &[0, 2, 1, 3]).unwrap();
    let o = b.reshape(o, [1usize, 8, 32]).unwrap();
    b.output("y", o);
    let (g, _) = cluster(&b.finish().unwrap(), &Fusion::greedy(Default::default())).unwrap();
    assert_eq!(
        kinds(&g),
        [
            "reshape+transpose+reshape+transpose+transpose+matmul",
            "softmax",
            "reshape+transpose+matmul+transpose+reshape"
        ]
    );
}

#[test]
fn residual_joins_the_convolution_and_shared_values_are_stored() {
    let window = Window {
        strides: vec![1, 1],
        dilations: vec![1, 1],
        pads_low: vec![0, 0],
        pads_high: vec![0, 0],
    };
    let mut b = GraphBuilder::new("g");
    let x = b.input("x", DType::F32, [1usize, 4, 4, 8]);
    let w = b.constant(Tensor::zeros(DType::F32, &[1, 1, 8, 8]).unwrap());
    let conv = Op::Conv {
        window,
        groups: 1,
        layout: Layout::ChannelsLast,
    };
    let y = b.add1(conv.clone(), &[x, w]).unwrap();
    let y = b.add_(y, x).unwrap();
    let y = b.map(ScalarOp::Relu, &[y]).unwrap();
    let z = b.add1(conv, &[y, w]).unwrap();
    let z = b.add_(z, y).unwrap();
    b.output("z", z);
    let (g, _) = cluster(&b.finish().unwrap(), &Fusion::greedy(Default::default())).unwrap();
    assert_eq!(kinds(&g), ["conv+add+relu", "conv+add"]);
}

#[test]
fn control_edges_survive() {
    let mut rng = crate::testing::Rng(5);
    let mut n_edges = 0;
    for n in 0..200 {
        let whole = crate::testing::random_wiring(&mut rng, 1 + n % 40);
        cluster(&whole, &Fusion::greedy(Default::default())).unwrap();
        let g = crate::passes::dce(&whole).unwrap();
        let (clustered, _) = cluster(&g, &Fusion::greedy(Default::default())).unwrap();
        crate::ir::verify::verify(&clustered).unwrap();
        for (_, node) in g
            .nodes()
            .filter(|(_, n)| !matches!(n.op, Op::Constant { .. }))
        {
            for &before in &node.control {
                let first = g.node(before);
                if matches!(first.op, Op::Constant { .. }) {
                    continue;
                }
                let named = |origin| clustered.nodes().find(|(_, n)| n.origin == origin).unwrap();
                let (from, to) = (named(first.origin.clone()), named(node.origin.clone()));
                assert!(to.1.control.contains(&from.0), "{g}\n{clustered}");
                n_edges += 1;
            }
        }
    }
    assert!(n_edges > 40, "{n_edges}");
}

/// The fusion for one GPU.
fn one_gpu() -> Fusion {
    Fusion::greedy(Pricing {
        only_gpus: true,
        only_cpus: false,
        is_one_device: true,
        ..Pricing::default()
    })
}

/// `v -= sum(dz)` for each of some widths; gives the largest magnitude of each sum, and a mean.
fn step_of_sums(widths: &[usize]) -> Graph {
    let mut b = GraphBuilder::new("step");
    let mut sums = Vec::new();
    for (i, &width) in widths.iter().enumerate() {
        let dz = b.input(&format!("dz{i}"), DType::F32, [8usize, width]);
        let sum = b.reduce(ReduceKind::Sum, dz, &[0], false).unwrap();
        let size = b.map(ScalarOp::Abs, &[sum]).unwrap();
        let size = b.reduce(ReduceKind::Max, size, &[0], false).unwrap();
        b.output(&format!("size{i}"), size);
        sums.push(sum);
    }
    let x = b.input("x", DType::F32, [6usize]);
    let mean = b.reduce(ReduceKind::Mean, x, &[0], false).unwrap();
    b.output("mean", mean);
    for (i, (sum, &width)) in sums.into_iter().zip(widths).enumerate() {
        let start = Tensor::zeros(DType::F32, &[width]).unwrap();
        let name = format!("v{i}");
        let v = b.variable(&name, start).unwrap();
        let moved = b.sub(v, sum).unwrap();
        b.assign_variable(&name, moved).unwrap();
    }
    b.finish().unwrap()
}

/// Clusters a step for one GPU, and compares two runs of it; gives the clusters.
fn step_alike(widths: &[usize]) -> Graph {
    let g = step_of_sums(widths);
    let (clusters, _) = cluster(&g, &one_gpu()).unwrap_or_else(|e| panic!("{e}\n{g}"));
    crate::ir::verify::verify(&clusters).unwrap();
    let rng = &mut crate::testing::Rng(17);
    let random = |&n: &usize| crate::testing::random_tensor(rng, DType::F32, &[8, n], false);
    let mut inputs: Vec<Tensor> = widths.iter().map(random).collect();
    inputs.push(Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0, 5.0, 7.0], &[6]).unwrap());
    let [mut plain, mut bundled] = [(); 2].map(|()| crate::interp::Store::new());
    for _ in 0..2 {
        let run = |g: &Graph, store| crate::interp::run_with_state(g, &inputs, store).unwrap();
        assert_eq!(run(&clusters, &mut bundled), run(&g, &mut plain));
    }
    for i in 0..widths.len() {
        let value = |store: &crate::interp::Store| store.get("", &format!("v{i}")).cloned();
        assert_eq!(value(&bundled), value(&plain));
    }
    clusters
}

/// Updates are a cluster, and sums are one, whatever their shapes; gradients of one element are sums and
/// single elements.
#[test]
fn a_gpu_launches_the_parts_of_a_step_together() {
    let clusters = step_alike(&[3, 5, 4]);
    let [sums, sizes] = [
        "reduce+reduce+reduce",
        "abs+reduce+abs+reduce+abs+reduce+reduce",
    ];
    assert_eq!(kinds(&clusters), [sums, sizes, "sub+sub+sub"]);
    for widths in [&[1, 32, 7, 1][..], &[32, 1], &[1, 1, 1], &[6, 1, 32, 1, 9]] {
        step_alike(widths);
    }
}

/// Kernels of many bytes stay alone.
#[test]
fn large_updates_are_apart() {
    let clusters = step_alike(&[1 << 20, 4, 5, 1 << 20]);
    let updates = kinds(&clusters).into_iter().filter(|k| k.contains("sub"));
    let updates: Vec<String> = updates.collect();
    assert_eq!(updates, ["sub", "sub+sub", "sub"]);
}
