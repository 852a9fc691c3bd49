//! The place of variables for which TensorFlow's guide to its performance gave advice, on the machines of `benches/machines`: by
//! predicted time, of training with variables on the CPU, dealt over the GPUs, or on each of them.

use gristmill::ir::{Dim, ScalarOp, ValueId};
use gristmill::place::Target;
use gristmill::train::{
    BatchNorm, Comparison, Conv2d, Init, Model, Objective, Pool2d, Sgd, Training, loss,
};
use gristmill::{DType, Result, Session, Settings};
use std::path::Path;

/// Pixels of a side of an image.
const SIDE: usize = 224;

fn compared(machine: &str, model: fn(&mut Model, ValueId) -> Result<ValueId>) -> Comparison {
    let file = format!("../benches/machines/{machine}.toml");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
    let target = Target::parse(&std::fs::read_to_string(path).unwrap()).unwrap();
    let settings = Settings {
        devices: target.devices,
        ..Settings::default()
    };
    let session = Session::new(&settings).unwrap();
    let training = Training::from(Sgd {
        momentum: 0.9,
        ..Sgd::default()
    });
    let objective = |m: &mut Model| {
        let batch = || Dim::from("batch");
        let x = m.input(
            "x",
            DType::F32,
            [batch(), 3.into(), SIDE.into(), SIDE.into()],
        );
        let label = m.input("label", DType::I64, [batch()]);
        let logits = model(m, x)?;
        let loss = loss::sparse_cross_entropy(m.builder(), logits, label)?;
        Ok(Objective::new(loss))
    };
    Comparison::of(&session, "machine", &training, 128, objective).unwrap()
}

/// Steps in ns with the variables on the CPU, dealt over the GPUs, and on each of all GPUs.
fn steps(compared: &Comparison) -> [u64; 3] {
    let step = |name: &str| {
        let mut own = compared.fixed.iter().filter(|p| p.strategy.name() == name);
        own.next_back().unwrap().step_ns
    };
    ["central", "parameter-server", "mirrored"].map(step)
}

fn relu(m: &mut Model, x: ValueId) -> Result<ValueId> {
    m.builder().map(ScalarOp::Relu, &[x])
}

/// A convolution; a plan needs no values.
fn conv(m: &mut Model, x: ValueId, [filters, size, stride]: [usize; 3]) -> Result<ValueId> {
    let conv = Conv2d {
        strides: [stride; 2],
        init: Init::Constant(0.0),
        ..Conv2d::same(filters, size)
    };
    m.conv2d(x, conv)
}

fn dense(m: &mut Model, x: ValueId, [inputs, units]: [usize; 2]) -> Result<ValueId> {
    let weights = m.variable("weights", &[inputs, units], Init::Constant(0.0))?;
    m.builder().matmul(x, weights)
}

fn pool(m: &mut Model, x: ValueId) -> Result<ValueId> {
    let pool = Pool2d {
        size: [3; 2],
        strides: [2; 2],
        same: true,
    };
    m.max_pool(x, pool)
}

/// Krizhevsky's second net for ImageNet (2014): 61 million weights, most of them in dense layers.
fn alexnet(m: &mut Model, mut x: ValueId) -> Result<ValueId> {
    let layers = [
        [64, 11, 4],
        [192, 5, 1],
        [384, 3, 1],
        [256, 3, 1],
        [256, 3, 1],
    ];
    for (i, layer) in layers.into_iter().enumerate() {
        x = m.scope(&format!("conv{i}"), |m| conv(m, x, layer))?;
        x = relu(m, x)?;
        if matches!(i, 0 | 1 | 4) {
            x = pool(m, x)?;
        }
    }
    x = m.flatten(x)?;
    x = m.scope("dense0", |m| dense(m, x, [256 * 7 * 7, 4096]))?;
    x = relu(m, x)?;
    x = m.scope("dense1", |m| dense(m, x, [4096, 4096]))?;
    x = relu(m, x)?;
    m.scope("dense2", |m| dense(m, x, [4096, 1000]))
}

/// The first blocks of a residual net (He et al., 2015): 30 thousand sums per weight and example.
fn residual(m: &mut Model, x: ValueId) -> Result<ValueId> {
    let normed = |m: &mut Model, x, layer| {
        let x = conv(m, x, layer)?;
        m.batch_norm(x, BatchNorm::default())
    };
    let mut x = m.scope("stem", |m| normed(m, x, [64, 7, 2]))?;
    x = relu(m, x)?;
    x = pool(m, x)?;
    for i in 0..2 {
        let mut y = x;
        for (j, layer) in [[64, 1, 1], [64, 3, 1], [64, 1, 1]].into_iter().enumerate() {
            y = m.scope(&format!("block{i}_{j}"), |m| normed(m, y, layer))?;
            y = relu(m, y)?;
        }
        x = m.builder().add_(x, y)?;
    }
    let x = m.global_avg_pool2d(x)?;
    let x = m.flatten(x)?;
    m.scope("dense", |m| dense(m, x, [64, 1000]))
}

/// "Tesla K80: If the GPUs are on the same PCI Express and are able to communicate using NVIDIA GPUDirect Peer to Peer, we place the
/// variables equally across the GPUs. Otherwise, we place the variables on the CPU."
#[test]
fn variables_of_k80s_are_on_gpus_with_peer_access_and_else_on_the_cpu() {
    let compared = ["k80_peer", "k80"].map(|machine| compared(machine, alexnet));
    let [peers, others] = [&compared[0], &compared[1]].map(steps);
    let [central, dealt, _] = peers;
    assert!(dealt < central, "{}", compared[0]);
    let [central, dealt, mirrored] = others;
    assert!(central < dealt && central < mirrored, "{}", compared[1]);
}

/// "Titan X, P100: For models like ResNet and InceptionV3, placing variables on the CPU. But for models with a lot of variables like
/// AlexNet and VGG, using GPUs with NCCL is better." On each GPU is what NCCL serves.
#[test]
fn variables_of_p100s_are_on_each_gpu_where_there_are_many() {
    let many = compared("p100", alexnet);
    let [central, dealt, mirrored] = steps(&many);
    assert!(mirrored < central && mirrored < dealt, "{many}");
    let few = compared("p100", residual);
    let [central, _, mirrored] = steps(&few);
    assert!(central < mirrored, "{few}");
}
