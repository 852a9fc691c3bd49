//! Steps in micro-batches against steps on whole batches.

use super::{examples, perceptron, state};
use crate::multi_device::setup;
use gristmill::ir::{Dim, ReduceKind};
use gristmill::testing::{Rng, random_tensor};
use gristmill::train::{
    Adam, Checkpoints, Dataset, Epoch, EventLog, Every, Fit, Init, Model, ModelCheckpoint,
    Objective, Strategy, Summaries, TensorBoard, Trainer, Training, Update, WeightDecay, loss,
};
use gristmill::{DType, ErrorKind, Result, Tensor};
use gristmill_runtime::program::StepKind;

/// Two layers whose loss has a term of the weights.
fn net(m: &mut Model) -> Result<Objective> {
    net_of(m, Dim::from("batch"))
}

fn net_of(m: &mut Model, batch: Dim) -> Result<Objective> {
    let x = m.input("x", DType::F32, [batch.clone(), 6.into()]);
    let y = m.input("y", DType::I64, [batch]);
    let h = m.scope("first", |m| m.dense(x, 16))?;
    let h = m.builder().map(gristmill::ir::ScalarOp::Tanh, &[h])?;
    m.scope("first", |m| m.collect("summaries", h))?;
    let logits = m.scope("second", |m| m.dense(h, 3))?;
    let accuracy = loss::accuracy(m.builder(), logits, y)?;
    let own = loss::sparse_cross_entropy(m.builder(), logits, y)?;
    let weights = m.reusing(|m| {
        m.scope("first", |m| {
            m.variable("weights", &[6, 16], Init::GlorotUniform)
        })
    })?;
    let b = m.builder();
    let (decay, part) = (loss::l2(b, weights)?, b.scalar(DType::F32, 0.01));
    let decay = b.mul(decay, part)?;
    let sum = b.add_(own, decay)?;
    Ok(Objective::new(sum).metric("accuracy", accuracy))
}

fn training(accumulate: usize) -> Training {
    Training {
        seed: 5,
        accumulate,
        ..Training::from(Update {
            clip_norm: Some(0.5),
            average: Some(0.9),
            weight_decay: WeightDecay::L2(0.01),
            ..Adam::default().into()
        })
    }
}

fn trainer(accumulate: usize) -> Trainer {
    Trainer::new("net", &training(accumulate), net).unwrap()
}

fn assert_near(name: &str, found: f64, expected: f64, tolerance: f64) {
    let is_near = (found - expected).abs() <= tolerance * expected.abs().max(1e-3);
    assert!(is_near, "{name}: {found}, expected {expected}");
}

#[test]
fn micro_batches_train_as_one_batch() {
    let data = examples(100);
    // 24 rows in parts of 6, of 5 and 4, of 1; the last batch has 4.
    for n in [4, 5, 24, 100] {
        let (whole, parts) = (trainer(1), trainer(n));
        for batch in data.shuffled(24, 7, 0) {
            let batch = batch.unwrap();
            let expected = whole.step(batch.clone()).unwrap();
            let found = parts.step(batch).unwrap();
            assert_eq!(found.number, expected.number);
            assert_eq!(found.learning_rate, expected.learning_rate);
            assert_near("loss", found.loss, expected.loss, 1e-5);
            assert_near("norm", found.norm.unwrap(), expected.norm.unwrap(), 1e-4);
            let accuracy =
                |step: &gristmill::train::StepOutputs| step.metrics["accuracy"].to_f64s()[0];
            assert_near("accuracy", accuracy(&found), accuracy(&expected), 1e-6);
        }
        let (found, expected) = (state(&parts), state(&whole));
        let names = |state: &[(String, Vec<u8>)]| -> Vec<String> {
            let own = state.iter().map(|(name, _)| name.clone());
            own.filter(|name| !name.starts_with("accumulation/"))
                .collect()
        };
        assert_eq!(names(&found), names(&expected));
        for name in whole.variables() {
            let value = |t: &Trainer| t.value(name).unwrap().unwrap().to_f64s();
            for (found, expected) in value(&parts).into_iter().zip(value(&whole)) {
                assert!(
                    (found - expected).abs() < 2e-5,
                    "{name}: {found}, {expected}"
                );
            }
        }
    }
}

#[test]
fn a_training_in_micro_batches_goes_on_bit_for_bit() {
    let (data, held_out) = (examples(100), examples(50));
    let fit = Fit {
        epochs: 2,
        held_out: Some(&held_out),
        ..Fit::new(&data, 24)
    };
    // With dropout, batch normalisation and a moving average, which have states and masks of their own.
    let new = || Trainer::new("net", &training(3), perceptron_with_dropout).unwrap();
    let whole = new();
    let report = whole.fit(&fit, &mut []).unwrap();
    for stop in [1, 3, 5, 8] {
        let folder = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(folder.path(), 1).unwrap();
        let first = Fit {
            steps: Some(stop),
            ..fit.clone()
        };
        let mut newest = ModelCheckpoint::newest(checkpoints.clone(), Every::Steps(1));
        new().fit(&first, &mut [&mut newest]).unwrap();
        let own = new();
        let second = Fit {
            resumed: checkpoints.resume(&own).unwrap(),
            ..fit.clone()
        };
        let found = own.fit(&second, &mut []).unwrap();
        assert_eq!(
            found.epochs.last().map(|e| &e.trained),
            report.epochs.last().map(|e| &e.trained)
        );
        let kept = |t: &Trainer| {
            let mut state = state(t);
            state.retain(|(name, _)| !name.starts_with("accumulation/"));
            state
        };
        assert_eq!(kept(&own), kept(&whole), "from {stop}");
        let files = std::fs::read_dir(folder.path()).unwrap();
        for file in files {
            let bytes = std::fs::read(file.unwrap().path()).unwrap();
            let text = String::from_utf8_lossy(&bytes);
            assert!(!text.contains("accumulation/"));
        }
    }
}

fn perceptron_with_dropout(m: &mut Model) -> Result<Objective> {
    let objective = perceptron(m)?;
    let x = m.builder().scalar(DType::F32, 1.0);
    let ones = m.builder().broadcast(x, [64])?;
    let dropped = m.dropout(ones, 0.5)?;
    let axes = [0];
    let kept = m
        .builder()
        .reduce(ReduceKind::Mean, dropped, &axes, false)?;
    let average = m.moving_average("kept", kept, 0.5)?;
    Ok(objective.metric("kept", kept).metric("average", average))
}

#[test]
fn each_micro_batch_has_a_mask_of_its_own() {
    let data = examples(48);
    let step = |accumulate: usize| {
        let own = Trainer::new("net", &training(accumulate), perceptron_with_dropout).unwrap();
        let batch = data.rows(&(0..48).collect::<Vec<_>>(), Epoch::default());
        let (first, second) = (batch.clone().unwrap(), batch.unwrap());
        let kept = |step: gristmill::train::StepOutputs| step.metrics["kept"].to_f64s()[0];
        let first = kept(own.step(first).unwrap());
        (first, kept(own.step(second).unwrap()))
    };
    let (one, two) = (step(1), step(2));
    // The first two masks of single steps are those of one step's two parts.
    assert_near("kept", two.0, (one.0 + one.1) / 2.0, 1e-6);
    assert!(one.0 != one.1 && two.0 != two.1, "{one:?}, {two:?}");
}

#[test]
fn a_part_that_fails_changes_no_weight_and_no_later_step() {
    let own = trainer(3);
    let x = |bad: f32| {
        let mut x = vec![0.5f32; 36];
        x[30] = bad;
        Tensor::from_slice(&x, &[6, 6]).unwrap()
    };
    let y = Tensor::from_slice(&[0i64, 1, 2, 0, 1, 2], &[6]).unwrap();
    let batch = |bad: f32| [("x", x(bad)), ("y", y.clone())];
    own.step(batch(1.0)).unwrap();
    let before = |t: &Trainer| {
        let mut state = state(t);
        state.retain(|(name, _)| !name.starts_with("accumulation/"));
        state
    };
    let kept = before(&own);
    let e = own.step(batch(f32::NAN)).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::NotFinite);
    assert!(e.to_string().contains("micro-batch 3 of 3"), "{e}");
    assert_eq!(before(&own), kept);
    own.step(batch(1.0)).unwrap();
    let plain = trainer(3);
    plain.step(batch(1.0)).unwrap();
    plain.step(batch(1.0)).unwrap();
    assert_eq!(before(&own), before(&plain));
}

#[test]
fn models_of_a_fixed_batch_take_as_many_micro_batches() {
    let (data, held_out) = (examples(100), examples(50));
    let fixed = |m: &mut Model| net_of(m, 8.into());
    let own = Trainer::new("net", &training(3), fixed).unwrap();
    let fit = Fit {
        held_out: Some(&held_out),
        ..Fit::new(&data, 24)
    };
    let report = own.fit(&fit, &mut []).unwrap();
    assert_eq!(report.n_steps, 4);
    assert_eq!(report.epochs[0].held_out.as_ref().unwrap().n_examples(), 48);
    let whole = trainer(1);
    let fit = Fit {
        drops_last: true,
        ..fit
    };
    let expected = whole.fit(&fit, &mut []).unwrap();
    let loss = |report: &gristmill::train::FitReport| report.epochs[0].trained.loss();
    assert_near("loss", loss(&report), loss(&expected), 1e-5);
    let batch = data.rows(&[0, 1, 2], Epoch::default()).unwrap();
    let messages = [
        own.step(batch).unwrap_err().to_string(),
        own.fit(&Fit::new(&data, 8), &mut [])
            .unwrap_err()
            .to_string(),
        Trainer::new("net", &training(0), net)
            .err()
            .unwrap()
            .to_string(),
        Trainer::new("net", &training(2), |m| {
            let objective = net(m)?;
            let x = m.input("more", DType::F32, [Dim::from("batch")]);
            Ok(objective.metric("all", x))
        })
        .err()
        .unwrap()
        .to_string(),
        Trainer::new("net", &training(2), |m| {
            let objective = net(m)?;
            let classes = m.input("class_weights", DType::F32, [3usize]);
            m.builder().add_(classes, classes)?;
            Ok(objective)
        })
        .err()
        .unwrap()
        .to_string(),
        Trainer::new("net", &training(1), |m| {
            m.scope("accumulation", |m| {
                m.variable("w", &[1], Init::Constant(0.0))
            })?;
            net(m)
        })
        .err()
        .unwrap()
        .to_string(),
        trainer(2)
            .step([
                ("x", Tensor::zeros(DType::F32, &[4, 6]).unwrap()),
                ("y", Tensor::zeros(DType::I64, &[3]).unwrap()),
            ])
            .unwrap_err()
            .to_string(),
    ];
    insta::assert_snapshot!(messages.join("\n"), @r#"
a batch of 3 examples: expected 24, 3 micro-batches of 8
batches of 8: input "x" takes 8 examples at once, and a step 3 times as many
steps of 0 micro-batches: expected at least 1
metric "all" is f32[batch]: steps in micro-batches give means, of one float each (try: its mean as a metric, or accumulate: 1)
input "class_weights" is f32[3]: steps in micro-batches cut all inputs along one first axis, here batch (try: accumulate: 1)
variable "accumulation/w": training has variables of its own in this folder (try: another name for the outermost scope)
input "y" has 3 rows, and input "x" 4
"#);
}

#[test]
fn summaries_are_of_the_first_micro_batch() {
    let data = examples(48);
    let folder = tempfile::tempdir().unwrap();
    let own = trainer(2);
    let mut board = TensorBoard::new(folder.path()).summaries(Summaries::new(Every::Steps(1)));
    let fit = Fit::new(&data, 24);
    let found = own.fit(&fit, &mut [&mut board]).unwrap();
    let log = EventLog::read(folder.path().join("train")).unwrap();
    let activations = log.steps.iter().flat_map(|s| &s.histograms);
    let mut activations = activations.filter(|(tag, _)| tag == "first/activations");
    let first = activations.next().unwrap();
    assert!(activations.all(|(_, h)| h.n == 12 * 16));
    // The values of the first 12 rows, by a step on them alone.
    let batch = data.shuffled(24, 0, 0).next().unwrap().unwrap();
    let half = |t: &Tensor| {
        let mut shape = t.shape().to_vec();
        shape[0] = 12;
        let bytes = &t.as_bytes()[..t.size_bytes() / 2];
        Tensor::from_bytes(t.dtype(), &shape, bytes).unwrap()
    };
    let half: Vec<(String, Tensor)> = batch.iter().map(|(n, t)| (n.clone(), half(t))).collect();
    let shown = Trainer::new("net", &training(1), |m| {
        let objective = net(m)?;
        let h = m.collection("summaries", "")[0];
        let sum = m.builder().reduce(ReduceKind::Sum, h, &[0, 1], false)?;
        Ok(objective.metric("sum", sum))
    });
    let shown = shown.unwrap().step(half).unwrap();
    let sum = shown.metrics["sum"].to_f64s()[0];
    assert_near("first", first.1.sum, sum, 1e-4);
    let plain = trainer(2);
    assert_eq!(plain.fit(&fit, &mut []).unwrap().n_steps, found.n_steps);
    let weights = |t: &Trainer| t.value("first/weights").unwrap().unwrap();
    assert_eq!(weights(&own), weights(&plain));
}

/// Steps of four micro-batches on devices that share each of them: 24 examples, 23, 5 (micro-batches of fewer examples than devices), and again.
fn on_devices(devices: &str, strategy: Strategy, shards: usize) -> (Trainer, Vec<f64>) {
    let setup = setup(devices, 2);
    let training = Training {
        strategy,
        shards,
        options: setup.options.clone(),
        ..training(4)
    };
    let own = Trainer::in_session(&setup.session(), "net", &training, net).unwrap();
    let mut losses = Vec::new();
    for (n, seed) in [24, 23, 5, 24, 16].into_iter().zip(1..) {
        let x = random_tensor(&mut Rng(seed), DType::F32, &[n, 6], false);
        let y: Vec<i64> = (0..n as i64).map(|i| (i * 5 + seed as i64) % 3).collect();
        let batch = [("x", x), ("y", Tensor::from_slice(&y, &[n]).unwrap())];
        losses.push(own.step(batch).unwrap().loss);
    }
    own.resources().check_replicas().unwrap();
    (own, losses)
}

fn weights(trainer: &Trainer) -> Vec<(String, Vec<f64>)> {
    let all = trainer.resources().values(|_, _| true).unwrap().into_iter();
    let kept = all.filter(|v| !v.name.starts_with("accumulation/"));
    kept.map(|v| (v.name, v.value.to_f64s())).collect()
}

/// Gradients of all micro-batches are summed on their devices, and joined once.
#[test]
fn devices_join_their_sums_once() {
    let mirrored = || Strategy::Mirrored {
        devices: Vec::new(),
    };
    let central = || Strategy::CentralStorage {
        central: None,
        devices: Vec::new(),
    };
    let (one, expected) = on_devices("cpu:1", Strategy::OneDevice, 0);
    for n in [2, 3, 4] {
        for strategy in [mirrored(), central()] {
            let (own, losses) = on_devices(&format!("cpu:{n}"), strategy, 0);
            for (a, b) in expected.iter().zip(&losses) {
                assert!((a - b).abs() < 1e-4, "{n}: {expected:?} {losses:?}");
            }
            for ((name, a), (other, b)) in weights(&one).iter().zip(&weights(&own)) {
                assert_eq!(name, other);
                let pairs = a.iter().zip(b);
                let worst = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                assert!(worst < 1e-4, "{n} devices: {name}: {worst}");
            }
        }
    }
    // As many tensors cross in the last part of a step as in a step on a whole batch.
    let n_sent = |accumulate: usize, strategy: Strategy| {
        let setup = setup("cpu:2", 2);
        let training = Training {
            strategy,
            options: setup.options.clone(),
            ..training(accumulate)
        };
        let own = Trainer::in_session(&setup.session(), "net", &training, net).unwrap();
        let x = random_tensor(&mut Rng(1), DType::F32, &[16, 6], false);
        let y = Tensor::from_slice(&[1i64; 16], &[16]).unwrap();
        let batch = vec![("x".to_owned(), x), ("y".to_owned(), y)];
        let executable = own.executable_for(&batch).unwrap().unwrap();
        let parts = executable.lowered.program.partitions.iter();
        let steps = parts.flat_map(|part| &part.steps);
        let sends = steps.filter(|s| matches!(s.kind, StepKind::Send { .. }));
        sends.count()
    };
    assert_eq!(n_sent(4, mirrored()), n_sent(1, mirrored()));
    // The part of the examples, and whether the micro-batch is the first, are on the device with the variables.
    assert_eq!(n_sent(4, central()), n_sent(1, central()) + 2);
    // In shards, the same bits on any number of devices.
    let (shards, _) = on_devices("cpu:1", Strategy::OneDevice, 4);
    for n in [2, 4] {
        let (own, _) = on_devices(&format!("cpu:{n}"), mirrored(), 4);
        assert_eq!(weights(&own), weights(&shards), "{n} devices");
    }
}
