//! Transfers of a step whose batch is divided.

use crate::ir::{Bindings, Dim, Graph, Layout, Op, ScalarOp, Window};
use crate::passes::{Machine, specialise, split_batch};
use crate::train::{
    BatchNorm, Conv2d, Init, Lrn, Model, Objective, Pool2d, Sgd, Training, loss, step_graph,
};
use crate::{DType, DataParallel, Deal, Result};
use gristmill_runtime::device::DeviceName;

/// The graph of a step on two devices.
fn split(build: impl Fn(&mut Model) -> Result<Objective>) -> Graph {
    let g = step_graph("step", &Training::from(Sgd::default()), build).unwrap();
    let sizes: Bindings = [("batch".to_owned(), 8)].into_iter().collect();
    let g = specialise(&g, &sizes).unwrap();
    let devices = ["cpu:0", "cpu:1"].map(|name| DeviceName::parse(name).unwrap());
    let on = DataParallel {
        devices: devices.to_vec(),
        servers: Vec::new(),
        deal: Deal::default(),
        shards: 0,
        parts: 1,
        sums: String::new(),
    };
    let machine = Machine {
        speeds: vec![1.0; 2],
        has_slow_links: true,
    };
    let (g, joined) = split_batch(&g, &["x".to_owned(), "y".to_owned()], &on, &machine).unwrap();
    assert_eq!(joined, None);
    g
}

/// The number of tensors in each all-reduce: those of a bucket are joined end to end for each device.
fn transfers(g: &Graph) -> Vec<usize> {
    let all = g
        .nodes()
        .filter(|(_, n)| matches!(n.op, Op::AllReduce { .. }));
    let members = all.map(|(_, n)| match g.def_node(n.inputs[0]) {
        Some(maker) if matches!(maker.op, Op::Concat { .. }) => maker.inputs.len(),
        _ => 1,
    });
    members.collect()
}

fn image(m: &mut Model) -> crate::ir::ValueId {
    let dims = [Dim::from("batch"), 3.into(), 12.into(), 12.into()];
    m.input("x", DType::F32, dims)
}

fn objective(m: &mut Model, logits: crate::ir::ValueId) -> Result<Objective> {
    let y = m.input("y", DType::I64, [Dim::from("batch")]);
    let accuracy = loss::accuracy(m.builder(), logits, y)?;
    let loss = loss::sparse_cross_entropy(m.builder(), logits, y)?;
    Ok(Objective::new(loss).metric("accuracy", accuracy))
}

#[test]
fn a_step_of_images_exchanges_gradients_alone() {
    let g = split(|m| {
        let x = image(m);
        let x = m.scope("conv0", |m| m.conv2d(x, Conv2d::same(4, 3)))?;
        let x = m.builder().map(ScalarOp::Relu, &[x])?;
        let pool = Pool2d {
            size: [3, 3],
            strides: [2, 2],
            same: true,
        };
        let x = m.max_pool(x, pool)?;
        let x = m.local_response_norm(x, Lrn::default())?;
        let x = m.scope("conv1", |m| m.conv2d(x, Conv2d::same(4, 3)))?;
        let x = m.flatten(x)?;
        let x = m.scope("dense", |m| m.dense(x, 10))?;
        objective(m, x)
    });
    // Six variables, the loss, the metric.
    assert_eq!(transfers(&g), [8]);
}

#[test]
fn a_step_of_tokens_exchanges_gradients_alone() {
    let g = split(|m| {
        let x = m.input("x", DType::I64, [Dim::from("batch"), 6.into()]);
        let x = m.scope("tokens", |m| m.embedding(x, [11, 8], Init::Constant(0.1)))?;
        let seen = m.scope("attention", |m| m.self_attention(x, 2, true))?;
        let x = m.builder().add_(x, seen)?;
        let x = m.scope("norm", |m| m.layer_norm(x))?;
        let logits = m.scope("head", |m| m.dense(x, 11))?;
        let y = m.input("y", DType::I64, [Dim::from("batch"), 6.into()]);
        let loss = loss::sparse_cross_entropy(m.builder(), logits, y)?;
        Ok(Objective::new(loss))
    });
    let n_variables = g.variables().len() / 2;
    // Each variable but the number of steps, and the loss.
    assert_eq!(transfers(&g), [n_variables]);
}

#[test]
fn masks_are_drawn_for_the_own_examples() {
    let g = split(|m| {
        let x = m.input("x", DType::F32, [Dim::from("batch"), 6.into()]);
        let x = m.scope("dense", |m| m.dense(x, 8))?;
        let x = m.dropout(x, 0.5)?;
        let x = m.scope("head", |m| m.dense(x, 10))?;
        objective(m, x)
    });
    assert_eq!(transfers(&g), [6]);
    let draws = g.nodes().filter_map(|(_, n)| match n.op {
        Op::RandomBits { first, .. } => Some((first, g.ty(n.outputs[0]).static_shape())),
        _ => None,
    });
    let expected = [0, 32].map(|first| (first, Some(vec![4, 8])));
    assert_eq!(draws.collect::<Vec<_>>(), expected);
}

#[test]
fn recurrent_layers_walk_over_the_own_examples() {
    let g = split(|m| {
        // As many places and units as examples, too.
        let x = m.input("x", DType::F32, [Dim::from("batch"), 8.into(), 5.into()]);
        let [_, last] = m.scope("lstm", |m| m.lstm(x, 8))?;
        let x = m.scope("head", |m| m.dense(last, 10))?;
        objective(m, x)
    });
    // Five variables, the loss, the metric.
    assert_eq!(transfers(&g), [7]);
    let scans = g.nodes().filter(|(_, n)| matches!(n.op, Op::Scan { .. }));
    let carried = scans.map(|(_, n)| g.ty(n.inputs[0]).static_shape());
    assert_eq!(carried.collect::<Vec<_>>(), vec![Some(vec![4, 8]); 4]);
}

#[test]
fn filters_in_groups_get_their_gradients_from_the_own_examples() {
    let conv = |groups| Op::Conv {
        window: Window {
            strides: vec![1; 2],
            dilations: vec![1; 2],
            pads_low: vec![1; 2],
            pads_high: vec![1; 2],
        },
        groups,
        layout: Layout::ChannelsFirst,
    };
    for (groups, of_group) in [(3, 1), (6, 1), (2, 3)] {
        let g = split(|m| {
            let x = image(m);
            let x = m.scope("conv0", |m| m.conv2d(x, Conv2d::same(groups * of_group, 3)))?;
            let shape = [groups * of_group, of_group, 3, 3];
            let w = m.variable("filters", &shape, Init::Constant(0.1))?;
            let x = m.builder().add1(conv(groups), &[x, w])?;
            let x = m.flatten(x)?;
            let x = m.scope("dense", |m| m.dense(x, 10))?;
            objective(m, x)
        });
        assert_eq!(transfers(&g), [7]);
    }
}

#[test]
fn statistics_of_a_batch_are_over_all_devices() {
    let g = split(|m| {
        let x = m.input("x", DType::F32, [Dim::from("batch"), 6.into()]);
        let x = m.scope("dense", |m| m.dense(x, 8))?;
        let x = m.scope("norm", |m| m.batch_norm(x, BatchNorm::default()))?;
        let x = m.scope("head", |m| m.dense(x, 10))?;
        objective(m, x)
    });
    // The mean, the variance, and two sums in their gradients, for which the backward pass waits; then four
    // variables, the loss, the metric and a further gradient.
    assert_eq!(transfers(&g), [1, 1, 1, 1, 7]);
}
