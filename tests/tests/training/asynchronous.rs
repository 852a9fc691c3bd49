//! Workers in no step with each other.

use super::{examples, trainer};
use crate::multi_device::setup;
use gristmill::ir::{Dim, Op, ReduceKind, ScalarOp, ScatterKind};
use gristmill::testing::{Rng, Setup, nvrtc_or_left_out};
use gristmill::train::{
    Checkpoints, Dataset, Every, Fit, Gradients, Init, Model, ModelCheckpoint, Objective, Sgd,
    Strategy, TensorDataset, Trainer, Training, Update, Updates,
};
use gristmill::{DType, Deal, DeviceName, Result, Tensor};
use std::sync::Barrier;

fn servers(updates: Updates) -> Strategy {
    Strategy::ParameterServer {
        servers: Vec::new(),
        workers: Vec::new(),
        deal: Deal::BySize,
        updates,
    }
}

fn asynchronous() -> Strategy {
    servers(Updates::Asynchronous)
}

fn workers_of(n: usize, training: Training, build: fn(&mut Model) -> Result<Objective>) -> Trainer {
    updating(Updates::Asynchronous, n, training, build)
}

fn updating(
    updates: Updates,
    n: usize,
    training: Training,
    build: fn(&mut Model) -> Result<Objective>,
) -> Trainer {
    let setup = setup(&format!("cpu:{n}"), 2);
    let training = Training {
        strategy: servers(updates),
        options: setup.options.clone(),
        ..training
    };
    Trainer::in_session(&setup.session(), "workers", &training, build).unwrap()
}

fn perceptrons(n: usize) -> Trainer {
    workers_of(n, super::training(&Setup::default()), super::perceptron)
}

/// One after the other, workers train as one device does: with clipping, averages, and statistics of batches.
#[test]
fn workers_in_turn_train_as_one_device() {
    let data = examples(67);
    let (one, own) = (trainer(Setup::default()), perceptrons(3));
    assert_eq!((own.n_replicas(), own.workers().len()), (1, 3));
    for (i, batch) in data.shuffled(16, 9, 0).enumerate() {
        let batch = batch.unwrap();
        let [a, b] = [&one, &own].map(|t| t.step(batch.clone()).unwrap());
        assert_eq!((a.number, a.learning_rate), (b.number, b.learning_rate));
        assert_eq!((b.worker, b.staleness), (i % 3, 0));
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-5, "step {i}: {a} {b}");
        near(a.loss, b.loss);
        near(a.norm.unwrap(), b.norm.unwrap());
        near(a.largest_gradient, b.largest_gradient);
        assert_eq!(a.metrics.iter().count(), b.metrics.iter().count());
    }
    let values = |t: &Trainer| -> Vec<(String, Vec<f64>)> {
        let names = t.resources().names().into_iter();
        let value = |(c, n): (String, String)| {
            let value = t.resources().get(&c, &n).unwrap().unwrap();
            (n, value.to_f64s())
        };
        names.map(value).collect()
    };
    let (expected, found) = (values(&one), values(&own));
    assert_eq!(expected.len(), found.len());
    for ((name, a), (other, b)) in expected.iter().zip(&found) {
        assert_eq!(name, other);
        let pairs = a.iter().zip(b);
        let worst = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(worst < 1e-5, "{name}: {worst}");
    }
}

fn floats(values: &[f64], shape: &[usize]) -> Tensor {
    Tensor::from_f64s(DType::F32, shape, values).unwrap()
}

/// The mean of `(x w - y)^2` over examples of three numbers.
fn line(m: &mut Model) -> Result<Objective> {
    let x = m.input("x", DType::F32, [Dim::from("batch"), 3.into()]);
    let y = m.input("y", DType::F32, [Dim::from("batch")]);
    let w = m.variable("w", &[3], Init::Constant(0.0))?;
    let b = m.builder();
    let product = b.mul(x, w)?;
    let found = b.reduce(ReduceKind::Sum, product, &[1], false)?;
    let wrong = b.map(ScalarOp::Sub, &[found, y])?;
    let square = b.mul(wrong, wrong)?;
    Ok(Objective::new(b.reduce(
        ReduceKind::Mean,
        square,
        &[0],
        false,
    )?))
}

/// Its gradient.
fn gradient(w: &[f64; 3], x: &[f64], y: &[f64]) -> [f64; 3] {
    let (mut sum, n) = ([0.0; 3], y.len());
    for (x, y) in x.chunks(3).zip(y) {
        let wrong = x.iter().zip(w).map(|(x, w)| x * w).sum::<f64>() - y;
        let part = 2.0 * wrong / n as f64;
        sum.iter_mut().zip(x).for_each(|(s, x)| *s += part * x);
    }
    sum
}

/// Workers pull, compute and push in any order; a sequential model in plain Rust does the same: momentum, and a rate that falls with
/// each push.
#[test]
fn any_schedule_of_workers_is_that_of_a_sequential_model() {
    let sgd = Sgd {
        learning_rate: 0.05.into(),
        momentum: 0.9,
        ..Sgd::default()
    };
    for seed in 0..6 {
        let own = workers_of(3, Training::from(sgd.clone()), line);
        let mut rng = Rng(seed);
        let (mut w, mut speed) = ([0.0; 3], [0.0; 3]);
        let mut n_pushed = 0_u64;
        let workers = own.workers();
        // By worker: the model's gradient, the number of pushes before its pull, and the trainer's gradients.
        let mut under_way: Vec<Option<([f64; 3], u64, Gradients)>> = (0..3).map(|_| None).collect();
        for _ in 0..60 {
            let i = rng.below(3);
            match under_way[i].take() {
                None => {
                    let mut number = || rng.below(2000) as f64 / 1000.0 - 1.0;
                    let x: Vec<f64> = (0..12).map(|_| number()).collect();
                    let y: Vec<f64> = (0..4).map(|_| number()).collect();
                    let batch = vec![
                        ("x".to_owned(), floats(&x, &[4, 3])),
                        ("y".to_owned(), floats(&y, &[4])),
                    ];
                    let pulled = workers[i].pull().unwrap();
                    let gradients = workers[i].compute(&pulled, batch).unwrap();
                    under_way[i] = Some((gradient(&w, &x, &y), n_pushed, gradients));
                }
                Some((expected, since, gradients)) => {
                    let step = workers[i].push(gradients).unwrap();
                    assert_eq!((step.worker, step.staleness), (i, n_pushed - since));
                    n_pushed += 1;
                    assert_eq!(step.number, n_pushed);
                    for k in 0..3 {
                        speed[k] = 0.9 * speed[k] + expected[k];
                        w[k] -= 0.05 * speed[k];
                    }
                    let found = own.value("w").unwrap().unwrap().to_f64s();
                    for (a, b) in w.iter().zip(&found) {
                        assert!((a - b).abs() < 1e-5, "seed {seed}: {w:?} {found:?}");
                    }
                }
            }
        }
        assert!(n_pushed > 15);
    }
}

/// A loss with a gradient of -1.
fn count(m: &mut Model) -> Result<Objective> {
    let x = m.input("x", DType::F32, [Dim::from("batch")]);
    let w = m.variable("w", &[], Init::Constant(0.0))?;
    let b = m.builder();
    let product = b.mul(x, w)?;
    let sum = b.reduce(ReduceKind::Mean, product, &[0], false)?;
    Ok(Objective::new(b.map(ScalarOp::Neg, &[sum])?))
}

/// Four workers make 10,000 increments each: none is lost.
#[test]
fn no_push_is_lost() {
    let sgd = Sgd {
        learning_rate: 1.0.into(),
        ..Sgd::default()
    };
    let own = workers_of(4, Training::from(sgd), count);
    let batch = || vec![("x".to_owned(), floats(&[1.0], &[1]))];
    own.step(batch()).unwrap();
    let stale: u64 = std::thread::scope(|scope| {
        let threads = own.workers().into_iter().map(|worker| {
            scope.spawn(move || {
                let mut stale = 0;
                for _ in 0..10_000 {
                    let gradients = worker.compute(&worker.pull().unwrap(), batch()).unwrap();
                    stale += worker.push(gradients).unwrap().staleness;
                }
                stale
            })
        });
        let threads: Vec<_> = threads.collect();
        threads.into_iter().map(|t| t.join().unwrap()).sum()
    });
    assert_eq!(own.value("w").unwrap().unwrap().to_f64s(), [40_001.0]);
    assert_eq!(own.n_steps().unwrap(), 40_001);
    assert!(stale > 0);
}

/// The reason for reads within a push: of two updates at a time one is lost otherwise.
#[test]
fn a_read_and_an_assignment_in_two_runs_lose_updates() {
    let own = workers_of(2, Training::from(Sgd::default()), count);
    let resources = own.resources();
    let both_have_read = Barrier::new(2);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..100 {
                    let w = resources.get("", "w").unwrap().unwrap().to_f64s()[0];
                    both_have_read.wait();
                    let next = floats(&[w + 1.0], &[]);
                    resources.set("", "w", &next).unwrap();
                    both_have_read.wait();
                }
            });
        }
    });
    assert_eq!(own.value("w").unwrap().unwrap().to_f64s(), [100.0]);
}

/// Each batch of each epoch is pushed once, and a checkpoint has all that were given before it.
#[test]
fn fit_gives_each_batch_to_one_worker() {
    let data = examples(200);
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = || Checkpoints::new(folder.path(), 9).unwrap();
    let own = perceptrons(4);
    let mut newest = ModelCheckpoint::newest(checkpoints(), Every::Steps(5));
    let fit = Fit {
        epochs: 6,
        held_out: Some(&data),
        evaluate: Every::Steps(7),
        ..Fit::new(&data, 16)
    };
    let report = own.fit(&fit, &mut [&mut newest]).unwrap();
    assert_eq!((report.n_steps, own.n_steps().unwrap()), (78, 78));
    assert_eq!(report.workers.len(), 4);
    assert_eq!(report.workers.iter().map(|w| w.n_steps).sum::<u64>(), 78);
    let losses: Vec<f64> = report
        .epochs
        .iter()
        .map(|e| e.trained.get("loss").unwrap())
        .collect();
    assert!(losses[5] < 0.8 * losses[0], "{losses:?}");
    // Every epoch has seen every example.
    assert!(report.epochs.iter().all(|e| e.trained.n_examples() == 200));
    // One device goes on from a checkpoint in the middle of an epoch.
    let one = trainer(Setup::default());
    let resumed = checkpoints().resume(&one).unwrap().unwrap();
    let fit = Fit {
        epochs: 7,
        resumed: Some(resumed),
        ..Fit::new(&data, 16)
    };
    let report = one.fit(&fit, &mut []).unwrap();
    assert_eq!(report.n_steps, 91);
    assert!(report.workers.is_empty());
    let loss = report.epochs.last().unwrap().trained.get("loss").unwrap();
    assert!(loss < losses[0], "{loss} {losses:?}");
}

/// A loss of 1,000 weights, each with a gradient of -1.
fn count_each(m: &mut Model) -> Result<Objective> {
    let x = m.input("x", DType::F32, [Dim::from("batch"), 1_000.into()]);
    let w = m.variable("w", &[1_000], Init::Constant(0.0))?;
    let b = m.builder();
    let product = b.mul(x, w)?;
    let sum = b.reduce(ReduceKind::Sum, product, &[1], false)?;
    let mean = b.reduce(ReduceKind::Mean, sum, &[0], false)?;
    Ok(Objective::new(b.map(ScalarOp::Neg, &[mean])?))
}

/// Pushes at the same time: steps are counted exactly, an element may miss an update, but no element is torn, and values that were
/// taken stay.
#[test]
fn overlapping_pushes_tear_no_element() {
    let sgd = Sgd {
        learning_rate: 1.0.into(),
        ..Sgd::default()
    };
    let own = updating(Updates::Hogwild, 4, Training::from(sgd), count_each);
    let batch = || vec![("x".to_owned(), floats(&[1.0; 1_000], &[1, 1_000]))];
    own.step(batch()).unwrap();
    let check = |values: &[f64], n: u64| {
        let is_whole = |w: &f64| (1.0..=n as f64).contains(w) && w.fract() == 0.0;
        assert!(values.iter().all(is_whole), "{n}");
    };
    let mut numbers: Vec<u64> = std::thread::scope(|scope| {
        let threads = own.workers().into_iter().map(|worker| {
            scope.spawn(move || {
                let push = |_| {
                    let gradients = worker.compute(&worker.pull().unwrap(), batch()).unwrap();
                    worker.push(gradients).unwrap().number
                };
                (0..1_000).map(push).collect::<Vec<u64>>()
            })
        });
        let threads: Vec<_> = threads.collect();
        for _ in 0..50 {
            let taken = own.value("w").unwrap().unwrap();
            let before = taken.to_f64s();
            let n = own.n_steps().unwrap();
            check(&before, n + 4);
            assert_eq!(before, taken.to_f64s());
        }
        let numbers = threads.into_iter().flat_map(|t| t.join().unwrap());
        numbers.collect()
    });
    numbers.sort_unstable();
    assert!(numbers.into_iter().eq(2..=4_001));
    assert_eq!(own.n_steps().unwrap(), 4_001);
    check(&own.value("w").unwrap().unwrap().to_f64s(), 4_001);
}

/// One after the other, overlapping pushes make the same bits; under `fit` they train, and evaluations and checkpoints are whole.
#[test]
fn overlapping_pushes_train() {
    let data = examples(200);
    let made = |updates| {
        updating(
            updates,
            3,
            super::training(&Setup::default()),
            super::perceptron,
        )
    };
    let [own, other] = [Updates::Hogwild, Updates::Asynchronous].map(made);
    for batch in data.shuffled(16, 9, 0) {
        let batch = batch.unwrap();
        let [a, b] = [&own, &other].map(|t| t.step(batch.clone()).unwrap());
        assert_eq!((a.number, a.loss, a.norm), (b.number, b.loss, b.norm));
        assert_eq!((a.learning_rate, a.worker), (b.learning_rate, b.worker));
    }
    for name in own.variables() {
        assert_eq!(
            own.value(name).unwrap(),
            other.value(name).unwrap(),
            "{name}"
        );
    }
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = || Checkpoints::new(folder.path(), 9).unwrap();
    let own = made(Updates::Hogwild);
    let mut newest = ModelCheckpoint::newest(checkpoints(), Every::Steps(5));
    let fit = Fit {
        epochs: 6,
        held_out: Some(&data),
        evaluate: Every::Steps(7),
        ..Fit::new(&data, 16)
    };
    let report = own.fit(&fit, &mut [&mut newest]).unwrap();
    assert_eq!((report.n_steps, own.n_steps().unwrap()), (78, 78));
    assert_eq!(report.workers.iter().map(|w| w.n_steps).sum::<u64>(), 78);
    let loss = |at: usize| report.epochs[at].trained.get("loss").unwrap();
    assert!(loss(5) < 0.8 * loss(0), "{} {}", loss(0), loss(5));
    let one = trainer(Setup::default());
    let resumed = checkpoints().resume(&one).unwrap().unwrap();
    assert_eq!(
        resumed.position.epoch * 13 + resumed.position.n_batches,
        one.n_steps().unwrap()
    );
}

/// Weights are on the host, and cross to emulated GPUs and back.
#[test]
fn workers_on_emulated_gpus_train_as_one_cpu() {
    if nvrtc_or_left_out("asynchronous training on emulated GPUs").is_none() {
        return;
    }
    let own = setup("cpu:1,emu:2", 2);
    let device = |name: &str| DeviceName::parse(name).unwrap();
    let training = Training {
        strategy: Strategy::ParameterServer {
            servers: vec![device("cpu:0")],
            workers: vec![device("emu:0"), device("emu:1")],
            deal: Deal::InTurn,
            updates: Updates::Asynchronous,
        },
        ..super::training(&own)
    };
    let own = Trainer::in_session(&own.session(), "workers", &training, super::perceptron);
    let (one, own) = (trainer(Setup::default()), own.unwrap());
    let data = examples(67);
    for batch in data.shuffled(16, 9, 0) {
        let batch = batch.unwrap();
        let [a, b] = [&one, &own].map(|t| t.step(batch.clone()).unwrap().loss);
        assert!((a - b).abs() < 1e-5, "{a} {b}");
    }
    let report = own.fit(&Fit::new(&data, 16), &mut []).unwrap();
    assert_eq!(report.n_steps, 5);
    let own = setup("cpu:1,emu:2", 2);
    let training = Training {
        strategy: Strategy::ParameterServer {
            servers: vec![device("emu:0")],
            workers: vec![device("emu:0"), device("emu:1")],
            deal: Deal::InTurn,
            updates: Updates::Hogwild,
        },
        ..super::training(&own)
    };
    let made = Trainer::in_session(&own.session(), "workers", &training, super::perceptron);
    let e = made.err().unwrap().to_string();
    assert!(e.contains("is on a device with memory of its own"), "{e}");
}

#[test]
fn asynchronous_training_that_does_not_fit_is_refused() {
    let refused = |training: Training, build: fn(&mut Model) -> Result<Objective>| {
        let setup = setup("cpu:2", 2);
        let training = Training {
            strategy: asynchronous(),
            options: setup.options.clone(),
            ..training
        };
        let made = Trainer::in_session(&setup.session(), "workers", &training, build);
        made.err().unwrap().to_string()
    };
    let accumulated = Training {
        accumulate: 4,
        ..Training::from(Sgd::default())
    };
    insta::assert_snapshot!(refused(accumulated, line), @"asynchronous updates, and steps in micro-batches (try: smaller batches without accumulation: a push moves the weights by each)");
    let waiting = |m: &mut Model| {
        let objective = line(m)?;
        let b = m.builder();
        b.set_origin("/late");
        let w = b.variable("v", floats(&[0.0; 3], &[3]))?;
        let late = b.with_control_dependencies(&[w], |b| b.map(ScalarOp::Neg, &[w]))?;
        Ok(objective.metric("late", late))
    };
    insta::assert_snapshot!(refused(Sgd::default().into(), waiting), @r#"
in node "/late": asynchronous training: the node has control dependencies (try: a strategy with updates in step)
"#);
    // Rows of examples are counted: a worker would add to the counts that it has pulled.
    let counted = |m: &mut Model| {
        let objective = line(m)?;
        let at = m.input("at", DType::I64, [Dim::from("batch"), 1.into()]);
        let b = m.builder();
        b.set_origin("/counts");
        let counts = b.variable("counts", floats(&[0.0; 3], &[3]))?;
        let ones = b.input("ones", DType::F32, [Dim::from("batch")]);
        let kind = ScatterKind::Add;
        let next = b.add1(Op::ScatterNd { kind }, &[counts, at, ones])?;
        b.assign_variable("counts", next)?;
        Ok(objective)
    };
    insta::assert_snapshot!(refused(Sgd::default().into(), counted), @r#"
in node "/counts": asynchronous training: the update of variable "counts" is not element by element, so that updates of other workers would be lost (try: a strategy with updates in step)
"#);
    let read = |m: &mut Model| {
        let objective = line(m)?;
        let z = m.input("z", DType::F32, [Dim::from("batch"), 3.into()]);
        let b = m.builder();
        b.set_origin("/kept");
        let old = b.variable("kept", floats(&[1.0; 3], &[3]))?;
        let next = b.add_(old, old)?;
        let next = b.assign_variable("kept", next)?;
        let z = b.mul(z, next)?;
        Ok(objective.metric("z", b.reduce(ReduceKind::Max, z, &[0, 1], false)?))
    };
    insta::assert_snapshot!(refused(Sgd::default().into(), read), @r#"
in node "/kept": asynchronous training: a worker needs the next value of a variable, which only the push has (try: a strategy with updates in step)
"#);
}

/// Where a batch fails, every checkpoint has all batches before it, and none behind it.
#[test]
fn checkpoints_of_a_training_that_fails_leave_no_batch_out() {
    let x: Vec<f64> = (0..160 * 3)
        .map(|i| if i == 250 { f64::NAN } else { 0.5 })
        .collect();
    let tensors = [
        ("x", floats(&x, &[160, 3])),
        ("y", floats(&[1.0; 160], &[160])),
    ];
    let data = TensorDataset::new(tensors).unwrap();
    for seed in 0..8 {
        let own = workers_of(4, Training::from(Sgd::default()), line);
        let folder = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(folder.path(), 100).unwrap();
        let mut newest = ModelCheckpoint::newest(checkpoints.clone(), Every::Steps(2));
        let fit = Fit {
            seed,
            ..Fit::new(&data, 4)
        };
        own.fit(&fit, &mut [&mut newest]).unwrap_err();
        let is_bad = |batch: Vec<(String, Tensor)>| batch[0].1.to_f64s().iter().any(|x| x.is_nan());
        let mut order = data.shuffled(4, seed, 0);
        let bad = order.position(|batch| is_bad(batch.unwrap())).unwrap() as u64;
        let other = workers_of(4, Training::from(Sgd::default()), line);
        if let Some(resumed) = checkpoints.resume(&other).unwrap() {
            assert!(resumed.position.n_batches <= bad, "seed {seed}: {bad}");
        }
    }
}

/// A batch whose loss is not finite ends the training, and changes nothing.
#[test]
fn a_batch_that_is_not_finite_is_not_pushed() {
    let x: Vec<f64> = (0..40 * 3)
        .map(|i| if i == 90 { f64::NAN } else { 0.5 })
        .collect();
    let tensors = [
        ("x", floats(&x, &[40, 3])),
        ("y", floats(&[1.0; 40], &[40])),
    ];
    let data = TensorDataset::new(tensors).unwrap();
    let own = workers_of(2, Training::from(Update::from(Sgd::default())), line);
    let e = own.fit(&Fit::new(&data, 4), &mut []).unwrap_err();
    assert!(e.to_string().contains("of epoch 1 changes nothing"), "{e}");
    let w = own.value("w").unwrap().unwrap().to_f64s();
    assert!(w.iter().all(|w| w.is_finite()), "{w:?}");
    assert!(own.n_steps().unwrap() < 10);
}
