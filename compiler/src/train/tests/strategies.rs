//! Transfers of a step whose batch is divided.

use crate::ir::{Bindings, Dim, Graph, Op, ScalarOp};
use crate::passes::{specialise, split_batch};
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
    };
    split_batch(&g, &["x".to_owned(), "y".to_owned()], &on).unwrap()
}

/// The numbers of all-reduces and of values that are joined from pieces.
fn transfers(g: &Graph) -> [usize; 2] {
    let count = |is: fn(&Op) -> bool| g.nodes().filter(|(_, n)| is(&n.op)).count();
    [
        count(|op| matches!(op, Op::AllReduce { .. })),
        count(|op| matches!(op, Op::Concat { .. })),
    ]
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
    assert_eq!(transfers(&g), [8, 0]);
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
    assert_eq!(transfers(&g), [n_variables, 0]);
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
    // Six variables, the loss, the metric; the mean, the variance, and one sum more in their gradients.
    assert_eq!(transfers(&g), [11, 0]);
}
