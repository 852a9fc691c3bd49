//! TensorFlow's `cifar10_multi_gpu_train`, as it is written there: a tower for each device, with variables on the first CPU, shared by
//! `reusing`; the mean of the towers' gradients makes the update. `strategy: Strategy::Mirrored` does the same in one line, for any model.
//!
//! `cargo run --release -p gristmill --example cifar10_multi -- [TOWERS] [STEPS] [DEVICE]` trains on generated images, two towers on `cpu` unless
//! told otherwise. With `gpu`, tower 0 is on `/gpu:0`, and so on.

#[path = "cifar10.rs"]
#[allow(dead_code, reason = "an example of its own")]
pub mod cifar10;

use gristmill::ir::{DeviceScope, Graph, GraphBuilder, Op, ScalarOp, ValueId};
use gristmill::place::{DeviceSet, DeviceSpec};
use gristmill::train::{Dataset, Model, Parameter};
use gristmill::{DType, Error, Result, Session, Settings};
use std::time::Instant;

const BATCH: usize = 128;

fn main() -> Result<()> {
    let mut words = std::env::args().skip(1);
    let mut number = |default: usize| match words.next() {
        None => Ok(default),
        Some(word) => word
            .parse()
            .map_err(|_| Error::invalid(format!("{word:?}: expected a number"))),
    };
    let (n_towers, n_steps) = (number(2)?, number(100)?);
    let kind = words.next().unwrap_or_else(|| "cpu".into());
    let devices = match kind.as_str() {
        "cpu" => format!("cpu:{n_towers}"),
        kind => format!("cpu:1,{kind}:{n_towers}"),
    };
    let n_threads = std::thread::available_parallelism().map_or(1, Into::into);
    let session = Session::new(&Settings {
        devices: DeviceSet::parse(&devices, n_threads)?,
        ..Settings::default()
    })?;
    let step = session.compile(&step(n_towers, &kind, 64)?, &Default::default())?;
    let images = cifar10::shapes(12_800, 1)?.images("image", cifar10::DISTORTIONS);
    let mut begin = Instant::now();
    let batches = (0..).flat_map(|epoch| images.shuffled(BATCH, 0, epoch));
    for (i, batch) in (1..=n_steps).zip(batches) {
        let outputs = step.run(batch?)?;
        if i.is_multiple_of(10) {
            let loss = outputs["loss"].to_f64s()[0];
            let speed = (10 * BATCH) as f64 / begin.elapsed().as_secs_f64();
            let zeros = outputs["conv1/sparsity"].to_f64s()[0];
            println!(
                "step {i}: loss {loss:.3}, {speed:.0} images/s, {zeros:.2} of conv1 is 0 in the last tower"
            );
            begin = Instant::now();
        }
    }
    Ok(())
}

/// A step of towers on devices of a kind. Each takes a part of a batch of 128 images.
pub fn step(n_towers: usize, kind: &str, n_filters: usize) -> Result<Graph> {
    let mut m = Model::new("cifar10_multi", cifar10::SEED, true);
    let image = m.input("image", DType::F32, [BATCH, 3, 24, 24]);
    let label = m.input("label", DType::U8, [BATCH]);
    if n_towers == 0 || !BATCH.is_multiple_of(n_towers) {
        return Err(Error::invalid(format!(
            "{n_towers} towers: expected a divisor of {BATCH}"
        )));
    }
    let mut towers = Vec::new();
    for i in 0..n_towers {
        let name = format!("tower_{i}");
        let tower = |m: &mut Model| {
            m.with_device(variables_on_cpu(format!("/{kind}:{i}")), |m| {
                m.name_scope(&name, |m| {
                    let size = BATCH / n_towers;
                    let image = rows(m.builder(), image, i * size, size)?;
                    let label = rows(m.builder(), label, i * size, size)?;
                    Ok(cifar10::tower(m, image, label, n_filters, &name)?.0)
                })
            })
        };
        // The first tower creates the variables.
        let loss = match i {
            0 => tower(&mut m)?,
            _ => m.reusing(tower)?,
        };
        let weights: Vec<ValueId> = m.variables().iter().map(|v| v.value).collect();
        towers.push((loss, m.builder().grad(loss, &weights)?));
    }
    let activations = m.collection("summaries", &format!("tower_{}", n_towers - 1));
    let variables = m.variables().to_vec();
    m.with_device("/cpu:0", |m| {
        let b = m.builder();
        let mut parameters = Vec::new();
        for (k, variable) in variables.iter().enumerate() {
            let own: Vec<ValueId> = towers.iter().map(|(_, gradients)| gradients[k]).collect();
            parameters.push(Parameter {
                name: variable.name.clone(),
                value: variable.value,
                gradient: mean(b, &own)?,
            });
        }
        cifar10::update(100).apply(b, &parameters)?;
        let losses: Vec<ValueId> = towers.iter().map(|(loss, _)| *loss).collect();
        let loss = mean(b, &losses)?;
        b.output("loss", loss);
        let zero = b.scalar(DType::F32, 0.0);
        let is_zero = b.map(ScalarOp::Eq, &[activations[0], zero])?;
        let is_zero = b.cast(is_zero, DType::F32)?;
        let axes: Vec<usize> = (0..4).collect();
        let sparsity = b.reduce(gristmill::ir::ReduceKind::Mean, is_zero, &axes, false)?;
        b.output("conv1/sparsity", sparsity);
        Ok(())
    })?;
    m.finish()
}

/// A scope with variables on the first CPU, and all else on a device.
fn variables_on_cpu(device: String) -> DeviceScope {
    DeviceScope::function(move |node| {
        let is_variable = matches!(node.op, Op::ReadVariable { .. } | Op::AssignVariable { .. });
        Ok(DeviceSpec::parse(match is_variable {
            true => "/cpu:0",
            false => &device,
        })?)
    })
}

/// Rows of a batch.
fn rows(b: &mut GraphBuilder, x: ValueId, start: usize, n: usize) -> Result<ValueId> {
    let mut sizes = b.ty(x).shape.0.clone();
    let mut starts = vec![0.into(); sizes.len()];
    let steps = vec![1; sizes.len()];
    (starts[0], sizes[0]) = (start.into(), n.into());
    let op = Op::Slice {
        starts,
        sizes,
        steps,
    };
    b.add1(op, &[x])
}

/// The mean of towers' values: `average_gradients`.
fn mean(b: &mut GraphBuilder, values: &[ValueId]) -> Result<ValueId> {
    let sum = gristmill::train::loss::add_n(b, values)?;
    let part = b.scalar(DType::F32, 1.0 / values.len() as f64);
    b.mul(sum, part)
}
