//! Batch normalisation by the statistics of each replica's examples.

use crate::multi_device::setup;
use gristmill::ir::{Dim, GraphBuilder, ReduceKind, ScalarOp, ValueId};
use gristmill::testing::{Rng, Setup, random_tensor};
use gristmill::train::{
    BatchNorm, BatchStatistics, Conv2d, Init, Model, Objective, Sgd, Strategy, Trainer, Training,
    Updates, loss,
};
use gristmill::{DType, Deal, Result, Tensor};
use gristmill_runtime::program::StepKind;

const EXAMPLES: usize = 24;
const CHANNELS: usize = 4;

/// Features of images, and the loss of their normalised form.
fn inputs(m: &mut Model, n: Dim) -> Result<[ValueId; 2]> {
    let x = m.input("x", DType::F32, [n.clone(), 3.into(), 6.into(), 6.into()]);
    let y = m.input("y", DType::I64, [n]);
    let conv = Conv2d {
        has_bias: false,
        ..Conv2d::same(CHANNELS, 3)
    };
    Ok([m.scope("conv", |m| m.conv2d(x, conv))?, y])
}

fn objective(m: &mut Model, x: ValueId, y: ValueId) -> Result<Objective> {
    let b = m.builder();
    let x = b.map(ScalarOp::Relu, &[x])?;
    let x = b.reduce(ReduceKind::Mean, x, &[2, 3], false)?;
    let logits = m.scope("head", |m| m.dense(x, 5))?;
    let loss = loss::sparse_cross_entropy(m.builder(), logits, y)?;
    Ok(Objective::new(loss))
}

fn normalised(m: &mut Model) -> Result<Objective> {
    let [x, y] = inputs(m, Dim::from("batch"))?;
    let x = m.scope("norm", |m| m.batch_norm(x, BatchNorm::default()))?;
    objective(m, x, y)
}

/// The mean and the mean square difference from it, by channel.
fn moments(b: &mut GraphBuilder, x: ValueId) -> Result<[ValueId; 2]> {
    let mean = b.reduce(ReduceKind::Mean, x, &[0, 2, 3], true)?;
    let difference = b.sub(x, mean)?;
    let square = b.mul(difference, difference)?;
    Ok([mean, b.reduce(ReduceKind::Mean, square, &[0, 2, 3], true)?])
}

/// The same for a batch of 24 whose parts are normalised one by one, and put together again.
fn by_hand(m: &mut Model, n_parts: usize) -> Result<Objective> {
    let [x, y] = inputs(m, EXAMPLES.into())?;
    let each = EXAMPLES / n_parts;
    let x = m.scope("norm", |m| {
        let along = [1, CHANNELS, 1, 1];
        let mut own = Vec::new();
        for (name, first) in [("scale", 1.0), ("shift", 0.0)] {
            let v = m.variable(name, &[CHANNELS], Init::Constant(first))?;
            own.push(m.builder().reshape(v, along)?);
        }
        let mut moving = Vec::new();
        for (name, first) in [("moving_mean", 0.0), ("moving_variance", 1.0)] {
            moving.push(m.untrained(name, &[CHANNELS], Init::Constant(first))?);
        }
        let b = m.builder();
        let (mut parts, mut sums) = (Vec::new(), [None, None]);
        for i in 0..n_parts {
            let part = b.slice_axis(x, 0, i * each, each)?;
            let [mean, variance] = moments(b, part)?;
            let count = (each * 36) as f64;
            let factor = b.scalar(DType::F32, count / (count - 1.0));
            let unbiased = b.mul(variance, factor)?;
            for (sum, v) in sums.iter_mut().zip([mean, unbiased]) {
                *sum = Some(match *sum {
                    Some(sum) => b.add_(sum, v)?,
                    None => v,
                });
            }
            let epsilon = b.scalar(DType::F32, 1e-5);
            let variance = b.add_(variance, epsilon)?;
            let root = b.map(ScalarOp::Sqrt, &[variance])?;
            let difference = b.sub(part, mean)?;
            let quotient = b.div(difference, root)?;
            let scaled = b.mul(quotient, own[0])?;
            parts.push(b.add_(scaled, own[1])?);
        }
        for ((name, old), sum) in ["moving_mean", "moving_variance"]
            .into_iter()
            .zip(moving)
            .zip(sums.into_iter().flatten())
        {
            let b = m.builder();
            let share = b.scalar(DType::F32, 0.1 / n_parts as f64);
            let (new, kept) = (b.mul(sum, share)?, b.scalar(DType::F32, 0.9));
            let new = b.reshape(new, [CHANNELS])?;
            let kept = b.mul(old, kept)?;
            let next = b.add_(kept, new)?;
            m.assign(name, next)?;
        }
        m.builder().concat(&parts, 0)
    })?;
    objective(m, x, y)
}

fn training(setup: &Setup, strategy: Strategy) -> Training {
    Training {
        seed: 3,
        options: setup.options.clone(),
        strategy,
        statistics: BatchStatistics::PerReplica,
        ..Training::from(Sgd {
            learning_rate: 0.3.into(),
            momentum: 0.9,
            ..Sgd::default()
        })
    }
}

fn mirrored() -> Strategy {
    Strategy::Mirrored {
        devices: Vec::new(),
    }
}

fn batch(n: usize, seed: u64) -> Vec<(String, Tensor)> {
    let x = random_tensor(&mut Rng(seed), DType::F32, &[n, 3, 6, 6], false);
    let y: Vec<i64> = (0..n as i64).map(|i| (i * 3 + seed as i64) % 5).collect();
    let y = Tensor::from_slice(&y, &[n]).unwrap();
    vec![("x".to_owned(), x), ("y".to_owned(), y)]
}

/// Losses of steps on batches of some sizes.
fn losses(trainer: &Trainer, sizes: &[usize]) -> Vec<f64> {
    let steps = sizes.iter().zip(1..);
    let losses = steps.map(|(&n, seed)| trainer.step(batch(n, seed)).unwrap().loss);
    losses.collect()
}

fn values(trainer: &Trainer) -> Vec<(String, Vec<f64>)> {
    let all = trainer.resources().values(|_, _| true).unwrap();
    let named = all.into_iter();
    named.map(|v| (v.name, v.value.to_f64s())).collect()
}

#[track_caller]
fn assert_alike(a: &Trainer, b: &Trainer, what: &str) {
    let (a, b) = (values(a), values(b));
    assert_eq!(a.len(), b.len(), "{what}");
    for ((name, a), (other, b)) in a.iter().zip(&b) {
        assert_eq!(name, other, "{what}");
        let pairs = a.iter().zip(b);
        let worst = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(worst < 1e-4, "{what}: {name}: {worst}");
    }
}

/// On two, three and four devices of every strategy, and in shards on one.
#[test]
fn each_replica_has_statistics_of_its_own() {
    let central = Strategy::CentralStorage {
        central: None,
        devices: Vec::new(),
    };
    for n in [2, 3, 4] {
        let hand = Trainer::new(
            "hand",
            &Training {
                strategy: Strategy::OneDevice,
                ..training(&Setup::default(), mirrored())
            },
            |m| by_hand(m, n),
        );
        let hand = hand.unwrap();
        let expected = losses(&hand, &[EXAMPLES; 6]);
        for strategy in [mirrored(), central.clone()] {
            let setup = setup(&format!("cpu:{n}"), 2);
            let training = training(&setup, strategy);
            let own = Trainer::in_session(&setup.session(), "own", &training, normalised).unwrap();
            let found = losses(&own, &[EXAMPLES; 6]);
            for (a, b) in expected.iter().zip(&found) {
                assert!((a - b).abs() < 1e-4, "{n}: {expected:?} {found:?}");
            }
            assert_alike(&hand, &own, &format!("{n} devices, {:?}", own.strategy()));
            own.resources().check_replicas().unwrap();
        }
    }
    let one = Training {
        shards: 4,
        ..training(&Setup::default(), Strategy::OneDevice)
    };
    let one = Trainer::new("own", &one, normalised).unwrap();
    let hand = Training {
        strategy: Strategy::OneDevice,
        ..training(&Setup::default(), mirrored())
    };
    let hand = Trainer::new("hand", &hand, |m| by_hand(m, 4)).unwrap();
    losses(&hand, &[EXAMPLES; 6]);
    losses(&one, &[EXAMPLES; 6]);
    assert_alike(&hand, &one, "shards on one device");
}

/// A batch that two replicas cannot share equally has common statistics, and so has a batch that one worker takes alone.
#[test]
fn batches_without_equal_shares_have_common_statistics() {
    let made = |devices: &str, statistics: BatchStatistics| {
        let setup = setup(devices, 2);
        let training = Training {
            statistics,
            ..training(&setup, mirrored())
        };
        Trainer::in_session(&setup.session(), "own", &training, normalised).unwrap()
    };
    let whole = made("cpu:2", BatchStatistics::Whole);
    let own = made("cpu:2", BatchStatistics::PerReplica);
    let sizes = [7, 1, 13, 5];
    let (expected, found) = (losses(&whole, &sizes), losses(&own, &sizes));
    for (a, b) in expected.iter().zip(&found) {
        assert!((a - b).abs() < 1e-5, "{expected:?} {found:?}");
    }
    assert_alike(&whole, &own, "odd batches");
    // Even batches differ.
    let [a, b] = [&whole, &own].map(|t| losses(t, &[8])[0]);
    assert!((a - b).abs() > 1e-5, "{a} {b}");
    let setup = setup("cpu:2", 2);
    let alone = Training {
        strategy: Strategy::ParameterServer {
            servers: Vec::new(),
            workers: Vec::new(),
            deal: Deal::BySize,
            updates: Updates::Asynchronous,
        },
        ..training(&setup, mirrored())
    };
    let alone = Trainer::in_session(&setup.session(), "alone", &alone, normalised).unwrap();
    let one = made("cpu:1", BatchStatistics::Whole);
    let [a, b] = [&one, &alone].map(|t| losses(t, &[8, 8])[1]);
    assert!((a - b).abs() < 1e-5, "{a} {b}");
}

/// Sums of the forward pass and of its gradient do not cross.
#[test]
fn own_statistics_save_transfers() {
    let n_sent = |statistics: BatchStatistics| {
        let setup = setup("cpu:2", 2);
        let training = Training {
            statistics,
            ..training(&setup, mirrored())
        };
        let own = Trainer::in_session(&setup.session(), "own", &training, normalised).unwrap();
        let executable = own.executable_for(&batch(8, 1)).unwrap().unwrap();
        let parts = &executable.lowered.program.partitions;
        let steps = parts.iter().flat_map(|part| &part.steps);
        let sends = steps.filter(|s| matches!(s.kind, StepKind::Send { .. }));
        sends.count()
    };
    let (whole, own) = (
        n_sent(BatchStatistics::Whole),
        n_sent(BatchStatistics::PerReplica),
    );
    assert!(own < whole, "{own} {whole}");
}

#[test]
fn statistics_of_micro_batches_are_refused() {
    let setup = setup("cpu:2", 2);
    let training = Training {
        accumulate: 2,
        ..training(&setup, mirrored())
    };
    let made = Trainer::in_session(&setup.session(), "own", &training, normalised);
    insta::assert_snapshot!(made.err().unwrap(), @"statistics per replica, and steps in micro-batches (try: BatchStatistics::Whole: the statistics of each micro-batch)");
}
