//! Training: the digits, state between processes, runs that fail.

mod checkpoints;
mod curves;
#[path = "../../compiler/examples/digits.rs"]
#[allow(dead_code, reason = "an example's `main`")]
mod digits;
mod random;
mod tuning;

use crate::multi_device::options;
use gristmill::ir::{Dim, ScalarOp};
use gristmill::train::{
    Adam, BatchNorm, Dataset, Init, Model, Objective, Trainer, Training, Update, loss,
};
use gristmill::{DType, Options, Result, Tensor};

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
        m.builder().map(ScalarOp::Tanh, &[x])
    })?;
    let logits = m.scope("second", |m| m.dense(x, 3))?;
    let accuracy = loss::accuracy(m.builder(), logits, y)?;
    let loss = loss::sparse_cross_entropy(m.builder(), logits, y)?;
    Ok(Objective::new(loss).metric("accuracy", accuracy))
}

fn trainer(options: Options) -> Trainer {
    let training = Training {
        seed: 5,
        update: Update {
            clip_norm: Some(1.0),
            average: Some(0.9),
            ..Adam::default().into()
        },
        options,
    };
    Trainer::new("perceptron", &training, perceptron).unwrap()
}

/// Rows whose class is the greatest of the first three numbers.
fn examples(n: usize) -> Dataset {
    let number = |i: usize| ((i * 7919 + 13) % 101) as f32 / 50.0 - 1.0;
    let x: Vec<f32> = (0..6 * n).map(number).collect();
    let greatest = |row: &[f32]| (0..3).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap() as i64;
    let y: Vec<i64> = x.chunks(6).map(greatest).collect();
    let (x, y) = (
        Tensor::from_slice(&x, &[n, 6]),
        Tensor::from_slice(&y, &[n]),
    );
    Dataset::new([("x", x.unwrap()), ("y", y.unwrap())]).unwrap()
}

fn epoch(trainer: &Trainer, data: &Dataset, epoch: u64) {
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
    let whole = trainer(options("cpu:1", 2));
    (0..6).for_each(|e| epoch(&whole, &data, e));
    let first = trainer(options("cpu:1", 2));
    (0..3).for_each(|e| epoch(&first, &data, e));
    first.resources().save(&file).unwrap();
    let second = trainer(options("cpu:1", 2));
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
    let run = |options: Options| {
        let trainer = trainer(options);
        (0..3).for_each(|e| epoch(&trainer, &data, e));
        trainer
    };
    let one = run(Options {
        threads: Some(1),
        ..options("cpu:1", 2)
    });
    let two = run(options("cpu:1", 2));
    assert!(state(&one) == state(&two), "one and two threads");
    let batch = || data.rows(&(0..70).collect::<Vec<_>>()).unwrap();
    let loss = |trainer: &Trainer| trainer.evaluate(batch()).unwrap()["loss"].to_f64s()[0];
    for other in [run(options("cpu:2", 2)), run(options("cpu:1", 0))] {
        let (own, other) = (loss(&one), loss(&other));
        assert!((own - other).abs() < 1e-4 * own, "{own} {other}");
    }
}

#[test]
fn a_step_that_fails_changes_nothing() {
    let trainer = trainer(options("cpu:1", 2));
    let data = examples(64);
    epoch(&trainer, &data, 0);
    let before = state(&trainer);
    let batch = data.rows(&[0, 1]).unwrap();
    for label in [3i64, -1] {
        let bad = Tensor::from_slice(&[0, label], &[2]).unwrap();
        let error = trainer.step([("x", batch[0].1.clone()), ("y", bad)]);
        let error = error.unwrap_err().to_string();
        assert!(error.contains("out of range"), "{error}");
        assert!(state(&trainer) == before);
    }
    trainer.evaluate(batch).unwrap();
    assert!(state(&trainer) == before, "evaluation changes nothing");
}

#[test]
fn a_perceptron_learns_by_batches_of_any_size() {
    let trainer = trainer(options("cpu:1", 2));
    let data = examples(200);
    let all: Vec<usize> = (0..200).collect();
    for e in 0..60 {
        epoch(&trainer, &data, e);
    }
    let results = trainer.evaluate(data.rows(&all).unwrap()).unwrap();
    let accuracy = results["accuracy"].to_f64s()[0];
    assert!(accuracy > 0.9, "{accuracy}");
    let one = trainer.step(data.rows(&[7]).unwrap()).unwrap();
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
    assert!(
        error.contains("\"a/b/weights\" is there already"),
        "{error}"
    );
    assert_eq!(m.reusing(|m| weights(m, 2)).unwrap(), first);
    let error = m.reusing(|m| weights(m, 3)).unwrap_err().to_string();
    assert!(
        error.contains("is f32[2], and is used again with the shape [3]"),
        "{error}"
    );
    let error = m
        .reusing(|m| m.variable("new", &[1], Init::FanIn))
        .unwrap_err();
    assert!(
        error.to_string().contains("\"new\" is not there"),
        "{error}"
    );
}

#[test]
fn models_that_cannot_be_trained_are_refused() {
    let refused = |build: &dyn Fn(&mut Model) -> Result<Objective>| {
        let training = Training {
            seed: 0,
            update: Adam::default().into(),
            options: options("cpu:1", 2),
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
    let wide = refused(&|m| Ok(Objective::new(m.variable("v", &[2], Init::FanIn)?)));
    assert!(
        wide.contains("expected one floating-point element"),
        "{wide}"
    );
    let error = Dataset::new([
        ("x", Tensor::zeros(DType::F32, &[2]).unwrap()),
        ("y", Tensor::zeros(DType::F32, &[3]).unwrap()),
    ]);
    assert!(
        error
            .unwrap_err()
            .to_string()
            .contains("as long as that of \"x\"")
    );
    assert!(
        examples(3)
            .rows(&[3])
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
