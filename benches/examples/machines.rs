//! Where the variables of a training belong, by predicted time: `resnet50`, its first `blocks`, `alexnet`, `vgg16` and
//! `bert` on a machine described by a file.
//!
//! `machines TARGET.toml [MODEL] [--batch N]`. Prints the table of `gristmill train --explain` for batches of N examples
//! per GPU (32), SGD with momentum. Nothing is trained: the machine need not be here. The files of `benches/machines`
//! describe the four cases for which TensorFlow's guide to its performance recommended a place.

use gristmill::ir::{Dim, Graph, ReduceKind, ScalarOp, ValueId};
use gristmill::place::Target;
use gristmill::train::{
    BatchNorm, Comparison, Conv2d, Init, Model, Objective, Pool2d, Sgd, Training, loss, step_graph,
};
use gristmill::{DType, Error, Result, Session, Settings};
use gristmill_runtime::device::DeviceKind;

/// Pixels of a side of an image.
const SIDE: usize = 224;
/// Classes of ImageNet.
const CLASSES: usize = 1000;

/// A model from images to logits.
type Body = fn(&mut Model, ValueId) -> Result<ValueId>;

const MODELS: [(&str, Body); 5] = [
    ("resnet50", resnet50),
    ("blocks", blocks),
    ("alexnet", alexnet),
    ("vgg16", vgg16),
    ("bert", bert),
];
/// Tokens of a sequence, where a model takes tokens in the place of images.
const LENGTH: usize = 128;

fn main() {
    if let Err(e) = run() {
        eprintln!("error: {e}");
        std::process::exit(2);
    }
}

fn run() -> Result<()> {
    let mut words: Vec<String> = std::env::args().skip(1).collect();
    let each = examples_per_gpu(&mut words)?;
    let Some(path) = words.first() else {
        return Err(Error::invalid("machines TARGET.toml [MODEL] [--batch N]"));
    };
    let target = target(path)?;
    let mut names: Vec<&str> = words[1..].iter().map(String::as_str).collect();
    if names.is_empty() {
        // The four that the guide speaks of.
        names = MODELS[..4].iter().map(|(name, _)| *name).collect();
    }
    println!("{}", target.name);
    for name in names {
        println!("\n{name}\n{}", compared(&target, name, each)?);
    }
    Ok(())
}

/// Takes the number of `--batch` out of the words; 32 without one.
pub fn examples_per_gpu(words: &mut Vec<String>) -> Result<usize> {
    let Some(at) = words.iter().position(|w| w == "--batch") else {
        return Ok(32);
    };
    let word = words.drain(at..(at + 2).min(words.len())).nth(1);
    let number = word.unwrap_or_default().parse::<usize>();
    number.map_err(|e| Error::invalid(format!("--batch: {e}")))
}

/// The machine of a file.
pub fn target(path: &str) -> Result<Target> {
    let text = std::fs::read_to_string(path);
    Target::parse(&text.map_err(|e| Error::invalid(format!("{path}: {e}")))?)
}

/// The strategies for a model on a machine, with so many examples per GPU.
pub fn compared(target: &Target, name: &str, each: usize) -> Result<Comparison> {
    let body = body(name)?;
    let devices = target.devices.devices.iter();
    let n_gpus = devices.filter(|d| d.name.kind == DeviceKind::Gpu).count();
    let session = Session::new(&Settings {
        devices: target.devices.clone(),
        ..Settings::default()
    })?;
    let objective = |m: &mut Model| objective(m, name, body);
    Comparison::of(&session, name, &training(), each * n_gpus.max(1), objective)
}

/// SGD with momentum.
fn training() -> Training {
    Training::from(Sgd {
        momentum: 0.9,
        ..Sgd::default()
    })
}

/// The graph of a step of a model.
pub fn step(name: &str) -> Result<Graph> {
    let body = body(name)?;
    step_graph(name, &training(), |m| objective(m, name, body))
}

fn body(name: &str) -> Result<Body> {
    let found = MODELS.iter().find(|(own, _)| *own == name);
    found.map(|(_, body)| *body).ok_or_else(|| {
        let known = MODELS.map(|(name, _)| name).join(", ");
        Error::invalid(format!("model {name:?}, expected one of {known}"))
    })
}

fn objective(m: &mut Model, name: &str, body: Body) -> Result<Objective> {
    let batch = || Dim::from("batch");
    let x = match name {
        "bert" => m.input("x", DType::I64, [batch(), LENGTH.into()]),
        _ => m.input(
            "x",
            DType::F32,
            [batch(), 3.into(), SIDE.into(), SIDE.into()],
        ),
    };
    let label = m.input("label", DType::I64, [batch()]);
    let logits = body(m, x)?;
    let loss = loss::sparse_cross_entropy(m.builder(), logits, label)?;
    Ok(Objective::new(loss))
}

fn relu(m: &mut Model, x: ValueId) -> Result<ValueId> {
    m.builder().map(ScalarOp::Relu, &[x])
}

/// A convolution without values: plans need none.
fn conv(m: &mut Model, x: ValueId, filters: usize, size: usize, stride: usize) -> Result<ValueId> {
    let conv = Conv2d {
        strides: [stride; 2],
        init: Init::Constant(0.0),
        ..Conv2d::same(filters, size)
    };
    m.conv2d(x, conv)
}

fn dense(m: &mut Model, x: ValueId, inputs: usize, units: usize) -> Result<ValueId> {
    let weights = m.variable("weights", &[inputs, units], Init::Constant(0.0))?;
    let bias = m.variable("bias", &[units], Init::Constant(0.0))?;
    let product = m.builder().matmul(x, weights)?;
    m.builder().add_(product, bias)
}

fn pool(m: &mut Model, x: ValueId, size: usize) -> Result<ValueId> {
    let pool = Pool2d {
        size: [size; 2],
        strides: [2; 2],
        same: true,
    };
    m.max_pool(x, pool)
}

/// Dense layers of 4,096 units before the classes, of images with so many elements.
fn classifier(m: &mut Model, x: ValueId, elements: usize) -> Result<ValueId> {
    let mut x = m.flatten(x)?;
    let mut inputs = elements;
    for (i, units) in [4096, 4096, CLASSES].into_iter().enumerate() {
        x = m.scope(&format!("dense{i}"), |m| dense(m, x, inputs, units))?;
        if units != CLASSES {
            x = relu(m, x)?;
        }
        inputs = units;
    }
    Ok(x)
}

/// Krizhevsky, "One weird trick for parallelizing convolutional neural networks" (2014), without its normalisation: 61
/// million weights.
fn alexnet(m: &mut Model, mut x: ValueId) -> Result<ValueId> {
    let layers = [
        (64, 11, 4, true),
        (192, 5, 1, true),
        (384, 3, 1, false),
        (256, 3, 1, false),
        (256, 3, 1, true),
    ];
    for (i, (filters, size, stride, is_pooled)) in layers.into_iter().enumerate() {
        x = m.scope(&format!("conv{i}"), |m| conv(m, x, filters, size, stride))?;
        x = relu(m, x)?;
        if is_pooled {
            x = pool(m, x, 3)?;
        }
    }
    classifier(m, x, 256 * 7 * 7)
}

/// Simonyan and Zisserman (2014), configuration D: 138 million weights.
fn vgg16(m: &mut Model, mut x: ValueId) -> Result<ValueId> {
    for (i, (n, filters)) in [(2, 64), (2, 128), (3, 256), (3, 512), (3, 512)]
        .into_iter()
        .enumerate()
    {
        for j in 0..n {
            x = m.scope(&format!("conv{i}_{j}"), |m| conv(m, x, filters, 3, 1))?;
            x = relu(m, x)?;
        }
        x = pool(m, x, 2)?;
    }
    classifier(m, x, 512 * 7 * 7)
}

/// Devlin et al., "BERT: pre-training of deep bidirectional transformers" (2019), section 3, the base model: 110 million
/// weights. Blocks of Xiong et al. (2020), with the normalisation before each part.
fn bert(m: &mut Model, x: ValueId) -> Result<ValueId> {
    let mut x = m.scope("tokens", |m| {
        m.embedding(x, [30_522, 768], Init::Constant(0.0))
    })?;
    for i in 0..12 {
        x = m.scope(&format!("block{i}"), |m| block(m, x))?;
    }
    let mean = m.builder().reduce(ReduceKind::Mean, x, &[1], false)?;
    m.scope("dense", |m| dense(m, mean, 768, CLASSES))
}

fn block(m: &mut Model, x: ValueId) -> Result<ValueId> {
    let y = m.scope("norm0", |m| m.layer_norm(x))?;
    let y = m.scope("attention", |m| m.self_attention(y, 12, false))?;
    let x = m.builder().add_(x, y)?;
    let y = m.scope("norm1", |m| m.layer_norm(x))?;
    let y = m.scope("dense0", |m| dense(m, y, 768, 3072))?;
    let y = relu(m, y)?;
    let y = m.scope("dense1", |m| dense(m, y, 3072, 768))?;
    m.builder().add_(x, y)
}

/// A convolution with batch normalisation.
fn normed(
    m: &mut Model,
    x: ValueId,
    filters: usize,
    size: usize,
    stride: usize,
) -> Result<ValueId> {
    let conv = Conv2d {
        strides: [stride; 2],
        has_bias: false,
        init: Init::Constant(0.0),
        ..Conv2d::same(filters, size)
    };
    let x = m.conv2d(x, conv)?;
    m.batch_norm(x, BatchNorm::default())
}

/// He et al., "Deep residual learning for image recognition" (2015), table 1, 50 layers: 26 million weights.
fn resnet50(m: &mut Model, x: ValueId) -> Result<ValueId> {
    resnet(m, x, &[(3, 64), (4, 128), (6, 256), (3, 512)])
}

/// The first three blocks of that: few weights and large images.
fn blocks(m: &mut Model, x: ValueId) -> Result<ValueId> {
    resnet(m, x, &[(3, 64)])
}

/// A residual net with so many blocks of a width in each stage.
fn resnet(m: &mut Model, x: ValueId, stages: &[(usize, usize)]) -> Result<ValueId> {
    let x = m.scope("stem", |m| normed(m, x, 64, 7, 2))?;
    let x = relu(m, x)?;
    let mut x = pool(m, x, 3)?;
    let mut features = 64;
    for (i, &(n, width)) in stages.iter().enumerate() {
        for j in 0..n {
            let stride = if i > 0 && j == 0 { 2 } else { 1 };
            x = m.scope(&format!("block{i}_{j}"), |m| {
                residual(m, x, width, stride, j == 0)
            })?;
        }
        features = 4 * width;
    }
    let x = m.global_avg_pool2d(x)?;
    let x = m.flatten(x)?;
    m.scope("dense", |m| dense(m, x, features, CLASSES))
}

fn residual(
    m: &mut Model,
    x: ValueId,
    width: usize,
    stride: usize,
    is_first: bool,
) -> Result<ValueId> {
    let shortcut = match is_first {
        true => m.scope("shortcut", |m| normed(m, x, 4 * width, 1, stride))?,
        false => x,
    };
    let mut y = x;
    for (i, (filters, size, stride)) in [(width, 1, 1), (width, 3, stride), (4 * width, 1, 1)]
        .into_iter()
        .enumerate()
    {
        y = m.scope(&format!("conv{i}"), |m| normed(m, y, filters, size, stride))?;
        if i < 2 {
            y = relu(m, y)?;
        }
    }
    let sum = m.builder().add_(y, shortcut)?;
    relu(m, sum)
}
