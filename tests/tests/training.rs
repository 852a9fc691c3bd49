//! Training: the digits, state between processes, runs that fail.

mod accumulation;
mod asynchronous;
#[path = "../../compiler/examples/char_gpt.rs"]
#[allow(dead_code, reason = "an example's `main`")]
mod char_gpt;
mod checkpoints;
mod cifar;
#[path = "../../compiler/examples/cifar10_multi.rs"]
#[allow(dead_code, reason = "an example's `main`")]
mod cifar10_multi;
mod crashes;
mod curves;
mod data;
#[path = "../../compiler/examples/digits.rs"]
#[allow(dead_code, reason = "an example's `main`")]
mod digits;
mod events;
#[path = "../../compiler/examples/fashion_mnist.rs"]
#[allow(dead_code, reason = "an example's `main`")]
mod fashion_mnist;
mod fit;
#[cfg(target_os = "linux")]
mod growth;
mod loops;
#[path = "../../benches/examples/machines.rs"]
#[allow(dead_code, reason = "an example's `main`")]
mod machine_models;
mod machines;
mod programs;
mod random;
mod statistics;
mod strategies;
mod tuning;

use crate::multi_device::setup;
use cifar10_multi::cifar10;
use gristmill::ir::{Dim, ReduceKind, ScalarOp, ValueId};
use gristmill::testing::Setup;
use gristmill::train::{
    Adam, BatchNorm, Dataset, Epoch, Init, Model, Objective, Sgd, TensorDataset, Trainer, Training,
    Update, loss,
};
use gristmill::{DType, ErrorKind, Options, Result, Tensor};

#[test]
fn digits_are_learnt() {
    let mut losses = Vec::new();
    let accuracy = digits::train(&mut |_, loss| losses.push(loss)).unwrap();
    assert!(accuracy > 0.98, "{accuracy}, losses {losses:?}");
    assert!(losses.last().unwrap() < &0.01, "{losses:?}");
}

/// A perceptron with batch normalisation for rows of 6 numbers in 3 classes.
fn perceptron(m: &mut Model) -> Result<Objective> {
    let x = m.input("x", DType::F32, [Dim::from("batch"), 6.into()]);
    let y = m.input("y", DType::I64, [Dim::from("batch")]);
    let x = m.scope("first", |m| {
        let x = m.dense(x, 16)?;
        let x = m.batch_norm(x, BatchNorm::default())?;
        let x = m.builder().map(ScalarOp::Tanh, &[x])?;
        m.collect("summaries", x)?;
        Ok(x)
    })?;
    let logits = m.scope("second", |m| m.dense(x, 3))?;
    let accuracy = loss::accuracy(m.builder(), logits, y)?;
    let loss = loss::sparse_cross_entropy(m.builder(), logits, y)?;
    Ok(Objective::new(loss).metric("accuracy", accuracy))
}

fn training(setup: &Setup) -> Training {
    Training {
        seed: 5,
        options: setup.options.clone(),
        ..Training::from(Update {
            clip_norm: Some(1.0),
            average: Some(0.9),
            ..Adam::default().into()
        })
    }
}

fn trainer(setup: Setup) -> Trainer {
    Trainer::in_session(
        &setup.session(),
        "perceptron",
        &training(&setup),
        perceptron,
    )
    .unwrap()
}

/// Rows whose class is the greatest of the first three numbers.
fn examples(n: usize) -> TensorDataset {
    let number = |i: usize| ((i * 7919 + 13) % 101) as f32 / 50.0 - 1.0;
    let x: Vec<f32> = (0..6 * n).map(number).collect();
    let greatest = |row: &[f32]| (0..3).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap() as i64;
    let y: Vec<i64> = x.chunks(6).map(greatest).collect();
    let (x, y) = (
        Tensor::from_slice(&x, &[n, 6]),
        Tensor::from_slice(&y, &[n]),
    );
    TensorDataset::new([("x", x.unwrap()), ("y", y.unwrap())]).unwrap()
}

fn epoch(trainer: &Trainer, data: &TensorDataset, epoch: u64) {
    for batch in data.shuffled(32, 9, epoch) {
        trainer.step(batch.unwrap()).unwrap();
    }
}

/// Bytes of everything that is kept, by name.
fn state(trainer: &Trainer) -> Vec<(String, Vec<u8>)> {
    let names = trainer.resources().names().into_iter();
    let value = |(container, name): (String, String)| {
        let value = trainer.resources().get(&container, &name).unwrap().unwrap();
        (name, value.as_bytes().to_vec())
    };
    names.map(value).collect()
}

#[test]
fn a_state_that_was_saved_goes_on_bit_for_bit() {
    let file = tempfile::tempdir().unwrap();
    let file = file.path().join("state.safetensors");
    let data = examples(100);
    let whole = trainer(setup("cpu:1", 2));
    (0..6).for_each(|e| epoch(&whole, &data, e));
    let first = trainer(setup("cpu:1", 2));
    (0..3).for_each(|e| epoch(&first, &data, e));
    first.resources().save(&file).unwrap();
    let second = trainer(setup("cpu:1", 2));
    second.resources().load(&file).unwrap();
    (3..6).for_each(|e| epoch(&second, &data, e));
    assert!(state(&second) == state(&whole));
    let names: Vec<String> = state(&whole).into_iter().map(|(name, _)| name).collect();
    for name in [
        "first/moving_mean",
        "optimizer/step",
        "optimizer/second/bias/mean",
        "average/first/weights",
    ] {
        assert!(names.iter().any(|own| own == name), "{name} in {names:?}");
    }
}

#[test]
fn threads_and_devices_make_the_same_bits_or_nearly() {
    let data = examples(70);
    let run = |setup: Setup| {
        let trainer = trainer(setup);
        (0..3).for_each(|e| epoch(&trainer, &data, e));
        trainer
    };
    let mut one = setup("cpu:1", 2);
    one.settings.threads = Some(1);
    let one = run(one);
    let two = run(setup("cpu:1", 2));
    assert!(state(&one) == state(&two), "one and two threads");
    let all: Vec<usize> = (0..70).collect();
    let batch = || data.rows(&all, Epoch::default()).unwrap();
    let loss = |trainer: &Trainer| trainer.evaluate_batch(batch()).unwrap()["loss"].to_f64s()[0];
    for other in [run(setup("cpu:2", 2)), run(setup("cpu:1", 0))] {
        let (own, other) = (loss(&one), loss(&other));
        assert!((own - other).abs() < 1e-4 * own, "{own} {other}");
    }
}

#[test]
fn a_step_that_fails_changes_nothing() {
    let trainer = trainer(setup("cpu:1", 2));
    let data = examples(64);
    epoch(&trainer, &data, 0);
    let before = state(&trainer);
    let batch = data.rows(&[0, 1], Epoch::default()).unwrap();
    for label in [3i64, -1] {
        let bad = Tensor::from_slice(&[0, label], &[2]).unwrap();
        let error = trainer.step([("x", batch[0].1.clone()), ("y", bad)]);
        let error = error.unwrap_err().to_string();
        assert!(error.contains("out of range"), "{error}");
        assert!(state(&trainer) == before);
    }
    trainer.evaluate_batch(batch).unwrap();
    assert!(state(&trainer) == before, "evaluation changes nothing");
}

/// A root, whose gradient is NaN at 0 where the loss itself is finite.
fn root(m: &mut Model) -> Result<Objective> {
    let x = m.input("x", DType::F32, [1usize]);
    let w = m.variable("w", &[1], Init::Constant(1.0))?;
    let b = m.builder();
    let product = b.mul(x, w)?;
    let root = b.map(ScalarOp::Sqrt, &[product])?;
    let loss = b.reduce(ReduceKind::Sum, root, &[0], false)?;
    Ok(Objective::new(loss))
}

#[test]
fn a_step_that_is_not_finite_changes_nothing() {
    for (device, level) in [("cpu:1", 0), ("cpu:1", 2), ("cpu:2", 2)] {
        let training = Training {
            seed: 1,
            options: setup(device, level).options,
            ..Training::from(Adam::default())
        };
        let session = setup(device, level).session();
        let trainer = Trainer::in_session(&session, "root", &training, root).unwrap();
        let step = |x: f32| trainer.step([("x", Tensor::from_slice(&[x], &[1]).unwrap())]);
        assert_eq!(step(4.0).unwrap().largest_gradient, 1.0);
        let before = state(&trainer);
        for (x, place) in [
            (-1.0, "/loss"),
            (f32::INFINITY, "/loss"),
            (0.0, "/gradients"),
        ] {
            let error = step(x).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NotFinite, "{error}");
            assert!(error.to_string().contains(place), "{error}");
            assert!(state(&trainer) == before, "{device} {level} {x}");
        }
        assert_eq!(step(1.0).unwrap().number, 2);
    }
}

#[test]
fn a_perceptron_learns_by_batches_of_any_size() {
    let trainer = trainer(setup("cpu:1", 2));
    let data = examples(200);
    let all: Vec<usize> = (0..200).collect();
    for e in 0..60 {
        epoch(&trainer, &data, e);
    }
    let results = trainer
        .evaluate_batch(data.rows(&all, Epoch::default()).unwrap())
        .unwrap();
    let accuracy = results["accuracy"].to_f64s()[0];
    assert!(accuracy > 0.9, "{accuracy}");
    let one = trainer
        .step(data.rows(&[7], Epoch::default()).unwrap())
        .unwrap();
    assert!(one.norm.unwrap().is_finite() && one.number == 60 * 7 + 1);
}

#[test]
fn scopes_name_variables_and_find_them_again() {
    let mut m = Model::new("scopes", 0, true);
    let weights = |m: &mut Model, n: usize| {
        m.scope("a", |m| {
            m.scope("b", |m| m.variable("weights", &[n], Init::HeNormal))
        })
    };
    let first = weights(&mut m, 2).unwrap();
    assert_eq!(m.variables()[0].name, "a/b/weights");
    let error = weights(&mut m, 2).unwrap_err().to_string();
    assert!(error.contains("\"a/b/weights\" exists already"), "{error}");
    assert_eq!(m.reusing(|m| weights(m, 2)).unwrap(), first);
    let error = m.reusing(|m| weights(m, 3)).unwrap_err().to_string();
    assert!(
        error.contains("is f32[2] and cannot be reused with shape [3]"),
        "{error}"
    );
    let error = m
        .reusing(|m| m.variable("new", &[1], Init::FanIn))
        .unwrap_err();
    assert!(
        error.to_string().contains("\"new\" does not exist"),
        "{error}"
    );
}

/// A program without a loss computes with the variables of a trainer, as each step leaves them.
#[test]
fn a_program_of_the_model_follows_the_training() {
    let layer = |m: &mut Model| {
        let x = m.input("x", DType::F32, [Dim::from("batch"), 3.into()]);
        m.scope("layer", |m| m.dense(x, 2))
    };
    let training = Training {
        seed: 4,
        ..Training::from(Sgd::default())
    };
    let session = Setup::default().session();
    let trainer = Trainer::in_session(&session, "layer", &training, |m| {
        let y = layer(m)?;
        let target = m.input("target", DType::F32, [Dim::from("batch"), 2.into()]);
        let loss = loss::mean_squared_error(m.builder(), y, target)?;
        Ok(Objective::new(loss).metric("y", y))
    });
    let trainer = trainer.unwrap();
    let mut m = Model::new("layer", 0, false);
    let y = layer(&mut m).unwrap();
    m.builder().output("y", y);
    let graph = m.finish().unwrap();
    let program = session.compile(&graph, &Options::default()).unwrap();
    let x = Tensor::from_slice(&[1f32, -2.0, 0.5], &[1, 3]).unwrap();
    let batch = || {
        let target = Tensor::from_slice(&[3f32, -3.0], &[1, 2]).unwrap();
        [("x", x.clone()), ("target", target)]
    };
    let mut before = None;
    for _ in 0..3 {
        let y = program.run([("x", x.clone())]).unwrap()["y"].clone();
        assert_eq!(y, trainer.evaluate_batch(batch()).unwrap()["y"]);
        assert_ne!(before.replace(y.clone()), Some(y));
        trainer.step(batch()).unwrap();
    }
}

/// A transformer that says the next of 7 tokens: logits `[batch, 6, 7]`.
fn transformer(m: &mut Model) -> Result<Objective> {
    let dims = || [Dim::from("batch"), 6.into()];
    let (x, y) = (
        m.input("x", DType::I64, dims()),
        m.input("y", DType::I64, dims()),
    );
    let init = Init::Normal {
        mean: 0.0,
        deviation: 0.5,
    };
    let x = m.scope("tokens", |m| m.embedding(x, [7, 16], init))?;
    let places = m.variable("places", &[6, 16], init)?;
    let x = m.builder().add_(x, places)?;
    let normed = m.scope("norm", |m| m.layer_norm(x))?;
    let seen = m.scope("attention", |m| m.self_attention(normed, 2, true))?;
    let x = m.builder().add_(x, seen)?;
    let logits = m.scope("head", |m| m.dense(x, 7))?;
    let loss = loss::sparse_cross_entropy(m.builder(), logits, y)?;
    Ok(Objective::new(loss).metric("logits", logits))
}

#[test]
fn a_transformer_learns_from_earlier_tokens_alone() {
    let training = Training {
        seed: 2,
        options: setup("cpu:1", 2).options,
        ..Training::from(Adam {
            learning_rate: 0.02.into(),
            ..Adam::default()
        })
    };
    let trainer = Trainer::new("transformer", &training, transformer).unwrap();
    // Each token is the one two places before, which it takes attention to know.
    let sequence = |i: i64| (0..7).map(|t| [i / 7, i % 7][t % 2]).collect();
    let all: Vec<Vec<i64>> = (0..49).map(sequence).collect();
    let part = |from: usize| {
        let tokens: Vec<i64> = all
            .iter()
            .flat_map(|s| s[from..from + 6].to_vec())
            .collect();
        Tensor::from_slice(&tokens, &[49, 6]).unwrap()
    };
    let batch = || [("x", part(0)), ("y", part(1))];
    let losses: Vec<f64> = (0..300)
        .map(|_| trainer.step(batch()).unwrap().loss)
        .collect();
    // The second token of six cannot be known.
    let least = 7f64.ln() / 6.0;
    assert!(
        losses[0] > 1.5 && losses[299] < least + 0.1,
        "{} {}",
        losses[0],
        losses[299]
    );
    let mut changed = part(0);
    changed
        .as_mut_slice::<i64>()
        .chunks_mut(6)
        .for_each(|s| s[4] = 6 - s[4]);
    let logits =
        |x: Tensor| trainer.evaluate_batch([("x", x), ("y", part(1))]).unwrap()["logits"].to_f64s();
    let (before, after) = (logits(part(0)), logits(changed));
    for (i, (a, b)) in before.iter().zip(&after).enumerate() {
        let place = i / 7 % 6;
        assert!(place >= 4 || (a - b).abs() < 1e-5, "{i}: {a} {b}");
    }
    assert!(before != after);
}

/// The class of the token at the first of 8 places, from the state after the last.
fn memory(m: &mut Model) -> Result<Objective> {
    let x = m.input("x", DType::F32, [Dim::from("batch"), 8.into(), 4.into()]);
    let y = m.input("y", DType::I64, [Dim::from("batch")]);
    let [all, last] = m.scope("lstm", |m| m.lstm(x, 12))?;
    let logits = m.scope("head", |m| m.dense(last, 3))?;
    let end = m.builder().slice_axis(all, 1, 7, 1)?;
    let end = m.builder().reshape(end, [Dim::from("batch"), 12.into()])?;
    let loss = loss::sparse_cross_entropy(m.builder(), logits, y)?;
    Ok(Objective::new(loss).metric("end", end).metric("last", last))
}

#[test]
fn an_lstm_remembers() {
    let training = Training {
        seed: 3,
        options: setup("cpu:1", 2).options,
        ..Training::from(Adam {
            learning_rate: 0.02.into(),
            ..Adam::default()
        })
    };
    let trainer = Trainer::new("memory", &training, memory).unwrap();
    let mut rng = gristmill::testing::Rng(4);
    let mut batch = |n: usize| {
        let classes: Vec<i64> = (0..n).map(|_| rng.below(3) as i64).collect();
        let mut x = gristmill::testing::random_tensor(&mut rng, DType::F32, &[n, 8, 4], false);
        let elements = x.as_mut_slice::<f32>();
        for (i, &class) in classes.iter().enumerate() {
            elements[i * 32..][..4].fill(0.0);
            elements[i * 32 + class as usize] = 2.0;
        }
        [("x", x), ("y", Tensor::from_slice(&classes, &[n]).unwrap())]
    };
    let losses: Vec<f64> = (0..150)
        .map(|_| trainer.step(batch(32)).unwrap().loss)
        .collect();
    assert!(
        losses[0] > 0.9 && losses[149] < 0.1,
        "{} {}",
        losses[0],
        losses[149]
    );
    let outputs = trainer.evaluate_batch(batch(5)).unwrap();
    assert_eq!(outputs["end"], outputs["last"]);
    let mut m = Model::new("m", 1, true);
    let x = m.input("x", DType::F32, [2usize, 3]);
    let error = m.lstm(x, 4).unwrap_err().to_string();
    assert!(error.contains("expected [batch, length, width]"), "{error}");
}

/// A weight with a decay of its own, as a term of the collection `losses`.
fn decayed(m: &mut Model, x: ValueId) -> Result<ValueId> {
    let w = m.variable("w", &[1], Init::Constant(2.0))?;
    let decay = loss::l2(m.builder(), w)?;
    m.collect("losses", decay)?;
    let y = m.builder().mul(x, w)?;
    let error = m.builder().reduce(ReduceKind::Sum, y, &[0], false)?;
    m.collect("losses", error)?;
    Ok(error)
}

/// Two towers over one weight, each with its terms, and a moving average of their sum.
fn towers(m: &mut Model) -> Result<Objective> {
    let x = m.input("x", DType::F32, [1usize]);
    m.name_scope("tower_0", |m| decayed(m, x))?;
    m.name_scope("tower_1", |m| m.reusing(|m| decayed(m, x)))?;
    let [one, other, all] = ["tower_0", "tower_1", ""].map(|s| m.collection("losses", s));
    assert_eq!((one.len(), other.len()), (2, 2));
    assert_eq!([&one[..], &other].concat(), all);
    assert!(m.collection("losses", "tower").is_empty() && m.collection("loss", "").is_empty());
    assert_eq!(m.variables_within("").count(), 1);
    assert_eq!(m.variables_within("tower_0").count(), 0);
    let total = loss::add_n(m.builder(), &all)?;
    let average = m.moving_average("average", total, 0.75)?;
    Ok(Objective::new(total).metric("average", average))
}

#[test]
fn towers_share_variables_and_find_their_losses() {
    let training = Training {
        seed: 1,
        options: setup("cpu:1", 2).options,
        ..Training::from(Sgd {
            learning_rate: 0.5.into(),
            ..Sgd::default()
        })
    };
    let trainer = Trainer::new("towers", &training, towers).unwrap();
    assert_eq!(trainer.variables(), ["w"]);
    let x = || [("x", Tensor::from_slice(&[1f32], &[1]).unwrap())];
    let average = |metrics: &gristmill::Outputs| metrics["average"].to_f64s()[0];
    // The loss is w^2 + 2 w, its gradient 2 w + 2: w is 2, and then -1.
    let one = trainer.step(x()).unwrap();
    assert_eq!((one.loss, average(&one.metrics)), (8.0, 8.0));
    let two = trainer.step(x()).unwrap();
    assert_eq!((two.loss, average(&two.metrics)), (-1.0, 8.0 - 9.0 / 4.0));
    let used = trainer.evaluate_batch(x()).unwrap();
    assert_eq!(average(&used), 8.0 - 9.0 / 4.0);
    assert_eq!(used["loss"].to_f64s(), [-1.0]);
}

#[test]
fn models_that_cannot_be_trained_are_refused() {
    let refused = |build: &dyn Fn(&mut Model) -> Result<Objective>| {
        let training = Training {
            options: setup("cpu:1", 2).options,
            ..Training::from(Adam::default())
        };
        Trainer::new("refused", &training, build)
            .err()
            .unwrap()
            .to_string()
    };
    let unused = refused(&|m| {
        let x = m.variable("used", &[2], Init::FanIn)?;
        m.variable("idle", &[2], Init::FanIn)?;
        let axes = [0];
        let loss = m
            .builder()
            .reduce(gristmill::ir::ReduceKind::Sum, x, &axes, false)?;
        Ok(Objective::new(loss))
    });
    assert!(unused.contains("idle"), "{unused}");
    let none = refused(&|m| Ok(Objective::new(m.builder().scalar(DType::F32, 1.0))));
    assert_eq!(none, "the model has no trainable variable");
    let wide = refused(&|m| Ok(Objective::new(m.variable("v", &[2], Init::FanIn)?)));
    assert!(
        wide.contains("expected one floating-point element"),
        "{wide}"
    );
    let error = TensorDataset::new([
        ("x", Tensor::zeros(DType::F32, &[2]).unwrap()),
        ("y", Tensor::zeros(DType::F32, &[3]).unwrap()),
    ]);
    assert!(
        error
            .unwrap_err()
            .to_string()
            .contains("expected as many examples as \"x\"")
    );
    assert!(
        examples(3)
            .rows(&[3], Epoch::default())
            .unwrap_err()
            .to_string()
            .contains("example 3 of a data set of 3")
    );
}

/// Of 300 classes, a byte does not hold the number of each.
#[test]
fn classes_beyond_the_labels_type_are_not_right() {
    let mut b = gristmill::ir::GraphBuilder::new("accuracy");
    let x = b.input("x", DType::F32, [2, 300]);
    let y = b.input("y", DType::U8, [2]);
    let accuracy = loss::accuracy(&mut b, x, y).unwrap();
    b.output("accuracy", accuracy);
    let compiled = gristmill::compile(&b.finish().unwrap(), &Options::default()).unwrap();
    let mut rows = vec![0f32; 600];
    rows[256] = 1.0;
    rows[300 + 44] = 1.0;
    let x = Tensor::from_slice(&rows, &[2, 300]).unwrap();
    let y = Tensor::from_slice(&[0u8, 44], &[2]).unwrap();
    let outputs = compiled.run([("x", x), ("y", y)]).unwrap();
    assert_eq!(outputs["accuracy"].to_f64s(), [0.5]);
}
