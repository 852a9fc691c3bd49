//! Devices that share batches train as one does.

use super::{examples, state, trainer};
use crate::multi_device::setup;
use gristmill::cost::{LinkProfile, Nanos};
use gristmill::ir::{
    Dim, GraphBuilder, Layout, Op, PoolKind, Real, ReduceKind, ScalarOp, ValueId, Window,
};
use gristmill::testing::{Rng, Setup, nvrtc_or_left_out, random_tensor};
use gristmill::train::{
    Adam, BatchNorm, Checkpoints, Comparison, Conv2d, Dataset, Every, Fit, Model, ModelCheckpoint,
    Objective, Parameter, Prediction, Sgd, Strategy, TensorDataset, Trainer, Training, Update,
    Updates, loss,
};
use gristmill::{AllReduce, Compiled, DType, DataParallel, Deal, DeviceName, Result, Tensor};
use gristmill_runtime::program::{Partition, StepKind};
use std::collections::BTreeMap;

fn mirrored(setup: &Setup) -> Result<Trainer> {
    mirrored_on(setup, Vec::new())
}

fn mirrored_on(setup: &Setup, devices: Vec<DeviceName>) -> Result<Trainer> {
    with_strategy(setup, Strategy::Mirrored { devices })
}

/// Variables on the first CPU.
fn central(setup: &Setup) -> Result<Trainer> {
    let strategy = Strategy::CentralStorage {
        central: None,
        devices: Vec::new(),
    };
    with_strategy(setup, strategy)
}

/// Variables on all CPUs.
fn served(setup: &Setup) -> Result<Trainer> {
    with_strategy(setup, servers(Vec::new(), Deal::BySize))
}

fn servers(servers: Vec<DeviceName>, deal: Deal) -> Strategy {
    Strategy::ParameterServer {
        servers,
        workers: Vec::new(),
        deal,
        updates: Updates::InStep,
    }
}

fn with_strategy(setup: &Setup, strategy: Strategy) -> Result<Trainer> {
    let training = Training {
        strategy,
        ..super::training(setup)
    };
    Trainer::in_session(&setup.session(), "perceptron", &training, super::perceptron)
}

/// Losses and accuracies of three epochs.
fn steps(trainer: &Trainer, data: &TensorDataset) -> Vec<f64> {
    let mut losses = Vec::new();
    for epoch in 0..3 {
        for batch in data.shuffled(32, 9, epoch) {
            let step = trainer.step(batch.unwrap()).unwrap();
            losses.push(step.loss);
            losses.extend(step.metrics["accuracy"].to_f64s());
        }
    }
    losses
}

#[track_caller]
fn assert_near(expected: &[f64], found: &[f64], what: &str) {
    assert_eq!(expected.len(), found.len(), "{what}");
    let pairs = expected.iter().zip(found);
    let worst = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(worst < 1e-5, "{what}: {worst}");
}

/// Batches of 32 and of 3 examples, on more devices than that, too.
#[test]
fn replicas_train_as_one_device() {
    let data = examples(67);
    let one = trainer(Setup::default());
    let expected = steps(&one, &data);
    let names = |t: &Trainer| state(t).into_iter().map(|(n, _)| n).collect::<Vec<_>>();
    let all: [fn(&Setup) -> Result<Trainer>; 3] = [mirrored, central, served];
    for (n, make) in (1..=4).flat_map(|n| all.map(|make| (n, make))) {
        let own = make(&setup(&format!("cpu:{n}"), 2)).unwrap();
        assert_eq!(own.n_replicas(), n);
        assert_near(&expected, &steps(&own, &data), &format!("{n} replicas"));
        assert_eq!(names(&own), names(&one));
        own.resources()
            .restore(one.resources().values(|_, _| true).unwrap())
            .unwrap();
        let loss = |t: &Trainer| t.evaluate(&data, 30).unwrap().get("loss").unwrap();
        assert_near(&[loss(&one)], &[loss(&own)], "evaluation");
    }
}

#[test]
fn a_training_goes_on_with_another_number_of_replicas() {
    let data = examples(100);
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = || Checkpoints::new(folder.path(), 2).unwrap();
    let train = |own: &Trainer, steps: u64, resumes: bool| {
        let resumed = checkpoints().resume(own).unwrap().filter(|_| resumes);
        let mut newest = ModelCheckpoint::newest(checkpoints(), Every::Steps(1));
        let fit = Fit {
            steps: Some(steps),
            resumed,
            ..Fit::new(&data, 24)
        };
        own.fit(&fit, &mut [&mut newest]).unwrap();
    };
    let three = mirrored(&setup("cpu:3", 2)).unwrap();
    train(&three, 7, false);
    let two = mirrored(&setup("cpu:2", 2)).unwrap();
    train(&two, 12, true);
    let one = trainer(Setup::default());
    train(&one, 15, true);
    assert_eq!(one.n_steps().unwrap(), 15);
    let whole = trainer(Setup::default());
    let fit = Fit {
        steps: Some(15),
        ..Fit::new(&data, 24)
    };
    whole.fit(&fit, &mut []).unwrap();
    for name in ["first/weights", "second/bias", "average/first/weights"] {
        let value = |t: &Trainer| t.value(name).unwrap().unwrap().to_f64s();
        assert_near(&value(&whole), &value(&one), name);
    }
}

/// A convolution, statistics of the batch, a mask, a recurrence and a weight that is exchanged in shares.
fn several_layers(m: &mut Model) -> Result<Objective> {
    let dims = [Dim::from("batch"), 3.into(), 12.into(), 12.into()];
    let x = m.input("x", DType::F32, dims);
    let y = m.input("y", DType::I64, [Dim::from("batch")]);
    let x = m.scope("conv", |m| m.conv2d(x, Conv2d::same(8, 3)))?;
    let x = m.builder().map(ScalarOp::Relu, &[x])?;
    let x = m.dropout(x, 0.2)?;
    let rows = [Dim::from("batch"), 12.into(), 96.into()];
    let x = m.builder().transpose(x, &[0, 2, 1, 3])?;
    let x = m.builder().reshape(x, rows)?;
    let [_, x] = m.scope("lstm", |m| m.lstm(x, 64))?;
    let x = m.scope("dense", |m| m.dense(x, 300))?;
    let x = m.scope("norm", |m| m.batch_norm(x, BatchNorm::default()))?;
    let x = m.builder().map(ScalarOp::Tanh, &[x])?;
    let logits = m.scope("head", |m| m.dense(x, 10))?;
    let loss = loss::sparse_cross_entropy(m.builder(), logits, y)?;
    Ok(Objective::new(loss))
}

/// Batches of 20 examples, of 5 and of 1, in eight shards on one, two, four and eight devices, and with servers.
#[test]
fn shards_train_to_the_same_bits_on_any_number_of_devices() {
    let trained = |devices: &str, strategy: Strategy| {
        let setup = setup(devices, 2);
        let training = Training {
            strategy,
            shards: 8,
            ..super::training(&setup)
        };
        let own = Trainer::in_session(&setup.session(), "layers", &training, several_layers);
        let own = own.unwrap();
        let mut rng = Rng(6);
        for step in 0..8 {
            let n = [20, 20, 5, 1][step % 4];
            let x = random_tensor(&mut rng, DType::F32, &[n, 3, 12, 12], false);
            let y: Vec<i64> = (0..n as i64).map(|i| (i * 7 + step as i64) % 10).collect();
            let batch = [("x", x), ("y", Tensor::from_slice(&y, &[n]).unwrap())];
            assert!(own.step(batch).unwrap().loss.is_finite());
        }
        own.resources().check_replicas().unwrap();
        state(&own)
    };
    let mirrored = || Strategy::Mirrored {
        devices: Vec::new(),
    };
    let one = trained("cpu:1", Strategy::OneDevice);
    for n in [1, 2, 4, 8] {
        let own = trained(&format!("cpu:{n}"), mirrored());
        assert!(own == one, "{n} devices");
    }
    let central = Strategy::CentralStorage {
        central: None,
        devices: Vec::new(),
    };
    assert!(trained("cpu:2", central) == one);
    assert!(trained("cpu:4", servers(Vec::new(), Deal::InTurn)) == one);
}

/// Four CPUs on two boards: links within a board are 20 times as fast.
fn boards(all_reduce: AllReduce) -> Setup {
    let mut setup = setup("cpu:4", 2);
    setup.options.all_reduce = all_reduce;
    let rate = |bytes_per_second| LinkProfile {
        latency: Nanos(1_000),
        bytes_per_second,
    };
    let set = &mut setup.settings.devices;
    set.link = rate(1_000_000_000);
    for pair in [(0, 1), (1, 0), (2, 3), (3, 2)] {
        set.links.insert(pair, rate(20_000_000_000));
    }
    setup
}

/// The state after batches of 20 examples and of 2, and transfers of the first one's program.
fn trained_on_boards(all_reduce: AllReduce, shards: usize) -> (Vec<(String, Vec<f64>)>, usize) {
    let setup = boards(all_reduce);
    let training = Training {
        strategy: Strategy::Mirrored {
            devices: Vec::new(),
        },
        shards,
        ..super::training(&setup)
    };
    let own = Trainer::in_session(&setup.session(), "layers", &training, several_layers);
    let own = own.unwrap();
    let mut rng = Rng(6);
    let mut n_sent = 0;
    for n in [20, 2, 20] {
        let x = random_tensor(&mut rng, DType::F32, &[n, 3, 12, 12], false);
        let y: Vec<i64> = (0..n as i64).map(|i| i * 7 % 10).collect();
        let batch = vec![
            ("x".to_owned(), x),
            ("y".to_owned(), Tensor::from_slice(&y, &[n]).unwrap()),
        ];
        own.step(batch.clone()).unwrap();
        let executable = own.executable_for(&batch).unwrap().unwrap();
        let parts = &executable.lowered.program.partitions;
        let steps = parts.iter().flat_map(|part| &part.steps);
        n_sent += steps
            .filter(|s| matches!(s.kind, StepKind::Send { .. }))
            .count();
    }
    own.resources().check_replicas().unwrap();
    (values(&own), n_sent)
}

/// The values of all variables.
fn values(trainer: &Trainer) -> Vec<(String, Vec<f64>)> {
    let all = trainer.resources().values(|_, _| true).unwrap();
    let named = all
        .into_iter()
        .map(|saved| (saved.name, saved.value.to_f64s()));
    named.collect()
}

#[test]
fn gradients_are_added_up_within_boards_and_on_one_device() {
    let (exchanged, n_exchanged) = trained_on_boards(AllReduce::Exchange, 0);
    for (way, shards) in [
        (AllReduce::Hierarchical, 0),
        (AllReduce::OneDevice, 0),
        (AllReduce::Hierarchical, 4),
    ] {
        let (found, n_sent) = trained_on_boards(way, shards);
        let both = exchanged.iter().zip(&found);
        // Its gradient is 0 but for rounding, since a normalisation follows, and Adam divides it by its own size.
        let decided = both.filter(|((name, _), _)| !name.contains("dense/bias"));
        for ((name, a), (_, b)) in decided {
            let worst = a
                .iter()
                .zip(b)
                .map(|(a, b)| (a - b).abs())
                .fold(0.0, f64::max);
            assert!(worst < 2e-3, "{way:?} {name}: {worst}");
        }
        assert!(n_sent < n_exchanged, "{way:?}: {n_sent} of {n_exchanged}");
    }
}

/// Weights stay in memory of the devices.
#[test]
fn emulated_gpus_train_as_one_cpu() {
    if nvrtc_or_left_out("training on emulated GPUs").is_none() {
        return;
    }
    let data = examples(67);
    let expected = steps(&trainer(Setup::default()), &data);
    let devices = ["emu:0", "emu:1"].map(|name| DeviceName::parse(name).unwrap());
    let own = mirrored_on(&setup("cpu:1,emu:2", 2), devices.to_vec()).unwrap();
    assert_near(&expected, &steps(&own, &data), "emulated GPUs");
    own.resources().check_replicas().unwrap();
}

/// Each replica writes new values over old ones, as one device does.
#[test]
fn replicas_are_updated_where_they_are() {
    let data = examples(32);
    let in_place = |devices: &str, strategy: Strategy| {
        let setup = setup(devices, 2);
        let training = Training {
            strategy,
            ..Training::from(Adam::default())
        };
        let session = setup.session();
        let own = Trainer::in_session(&session, "perceptron", &training, super::perceptron);
        let own = own.unwrap();
        let batch = data.shuffled(32, 9, 0).next().unwrap().unwrap();
        own.step(batch.clone()).unwrap();
        let executable = own.executable_for(&batch).unwrap().unwrap();
        let variables = &executable.lowered.program.variables;
        let changed = variables.iter().filter(|v| v.in_place);
        let names = changed.map(|v| v.name.split("/replica_").next().unwrap().to_owned());
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    };
    let once = in_place("cpu:1", Strategy::OneDevice);
    // All but the number of steps: weights, and averages of gradients and of statistics.
    assert_eq!(once.len(), 3 * 6 + 2);
    let both = once.iter().flat_map(|name| [name.clone(), name.clone()]);
    let both: Vec<String> = both.collect();
    let devices = Vec::new();
    let mirrored = Strategy::Mirrored { devices };
    assert_eq!(in_place("cpu:2", mirrored), both);
    let central = Strategy::CentralStorage {
        central: None,
        devices: Vec::new(),
    };
    assert_eq!(in_place("cpu:2", central), once);
    for deal in [Deal::BySize, Deal::InTurn] {
        assert_eq!(in_place("cpu:3", servers(Vec::new(), deal)), once);
    }
}

/// The whole graph is rewritten, and then divided: replicas add no terms.
#[test]
fn replicas_share_one_pass_through_rewriting() {
    let rewritten = |devices: &str, make: fn(&Setup) -> Result<Trainer>| {
        let trainer = make(&setup(devices, 4)).unwrap();
        let batch = examples(64).shuffled(64, 9, 0).next().unwrap().unwrap();
        trainer.step(batch.clone()).unwrap();
        let executable = trainer.executable_for(&batch).unwrap().unwrap();
        let phases = &executable.lowered.report.rewrite.phases;
        phases.iter().map(|p| p.e_nodes).collect::<Vec<_>>()
    };
    let two = rewritten("cpu:2", mirrored);
    assert!(two.iter().all(|n| *n > 0), "{two:?}");
    assert_eq!(rewritten("cpu:4", mirrored), two);
    assert_eq!(rewritten("cpu:3", served), two);
}

/// The shortest of the predicted steps is taken, and the table has all of them.
#[test]
fn the_strategy_with_the_shortest_step_is_chosen() {
    let data = examples(64);
    let batch = || data.shuffled(64, 9, 0).next().unwrap().unwrap();
    for devices in ["cpu:1", "cpu:2", "cpu:3"] {
        let setup = setup(devices, 2);
        let training = Training {
            strategy: Strategy::Auto { batch_size: 64 },
            ..super::training(&setup)
        };
        let session = setup.session();
        let compared =
            Comparison::of(&session, "perceptron", &training, 64, super::perceptron).unwrap();
        let n = session.settings().devices.devices.len();
        let names = |all: &[Prediction]| -> Vec<(&'static str, usize)> {
            all.iter()
                .map(|p| (p.strategy.name(), p.n_replicas))
                .collect()
        };
        let mut expected = vec![("one-device", 1)];
        expected.extend((2..=n).map(|k| ("mirrored", k)));
        if n > 1 {
            expected.extend([("central", n), ("parameter-server", n)]);
        }
        assert_eq!(names(&compared.fixed), expected);
        let batches: Vec<usize> = compared.scaled.iter().map(|p| p.batch_size).collect();
        let expected = (1..=n).map(|k| 64 * k).filter(|_| n > 1);
        assert_eq!(batches, expected.collect::<Vec<_>>());
        let least = compared.fixed.iter().map(|p| p.step_ns).min().unwrap();
        assert_eq!(compared.best().step_ns, least);
        let own = Trainer::in_session(&session, "perceptron", &training, super::perceptron);
        let own = own.unwrap();
        assert_eq!(own.strategy(), &compared.best().strategy);
        own.step(batch()).unwrap();
        let text = compared.to_string();
        assert_eq!(text.matches("<- shortest").count(), 1, "{text}");
        assert_eq!(text.contains("N-(N-1)s"), n > 1, "{text}");
    }
}

/// One device is left where a model does not allow others, and a fixed batch does not grow.
#[test]
fn strategies_without_a_prediction_are_left_out() {
    let scoped = |m: &mut Model| {
        let x = m.input("x", DType::F32, [8, 3]);
        let y = m.input("y", DType::I64, [8]);
        let logits = m.with_device("/cpu:0", |m| m.dense(x, 4))?;
        let loss = loss::sparse_cross_entropy(m.builder(), logits, y)?;
        Ok(Objective::new(loss))
    };
    let setup = setup("cpu:2", 2);
    let training = Training {
        strategy: Strategy::Auto { batch_size: 8 },
        ..Training::from(Adam::default())
    };
    let session = setup.session();
    let compared = Comparison::of(&session, "scoped", &training, 8, scoped).unwrap();
    assert_eq!(
        (compared.fixed.len(), compared.left_out.len()),
        (1, 3),
        "{compared}"
    );
    assert!(compared.scaled.is_empty() && compared.serial.is_none());
    assert!(
        compared.to_string().contains("asks for one by itself"),
        "{compared}"
    );
    let e = Comparison::of(&session, "scoped", &training, 9, scoped).unwrap_err();
    let expected = "batches of 9: input \"x\" takes 8 examples at once";
    assert_eq!(e.to_string(), expected);
    let own = Trainer::in_session(&session, "scoped", &training, scoped).unwrap();
    assert_eq!(own.strategy(), &Strategy::OneDevice);
}

/// Millions of weights and two examples: each replica would make the whole update.
#[test]
fn large_updates_stay_on_few_devices() {
    let wide = |m: &mut Model| {
        let x = m.input("x", DType::F32, [Dim::from("batch"), 64.into()]);
        let y = m.input("y", DType::I64, [Dim::from("batch")]);
        let x = m.scope("wide", |m| m.dense(x, 8192))?;
        let logits = m.scope("last", |m| m.dense(x, 64))?;
        let loss = loss::sparse_cross_entropy(m.builder(), logits, y)?;
        Ok(Objective::new(loss))
    };
    let setup = setup("cpu:4", 2);
    let training = Training::from(Adam::default());
    let compared = Comparison::of(&setup.session(), "wide", &training, 4, wide).unwrap();
    let best = compared.best();
    assert_ne!(best.strategy.name(), "mirrored", "{compared}");
    assert!(compared.serial.unwrap() > 0.5, "{compared}");
    // Fewer examples than devices.
    let few = Comparison::of(&setup.session(), "wide", &training, 2, wide).unwrap();
    assert!(few.fixed.iter().all(|p| p.n_replicas <= 2), "{few}");
    let none = Comparison::of(&setup.session(), "wide", &training, 0, wide).unwrap_err();
    assert_eq!(none.to_string(), "a batch of 0 examples");
    let step = |name| {
        let mut all = compared.fixed.iter().filter(|p| p.strategy.name() == name);
        all.next_back().unwrap().step_ns
    };
    assert!(step("parameter-server") < step("mirrored"), "{compared}");
}

/// Variables of one update are on one server, and the servers have about as many bytes.
#[test]
fn variables_are_dealt_to_servers() {
    let data = examples(32);
    let batch = data.shuffled(32, 9, 0).next().unwrap().unwrap();
    let held = |deal: Deal| -> Vec<Vec<(String, usize)>> {
        let own = with_strategy(&setup("cpu:2", 2), servers(Vec::new(), deal)).unwrap();
        own.step(batch.clone()).unwrap();
        let executable = own.executable_for(&batch).unwrap().unwrap();
        let program = &executable.lowered.program;
        let of_part = |(i, _): (usize, &Partition)| {
            let all = program.variable_buffers();
            let here = all.into_iter().filter(|(_, b)| {
                let mut own = program.partitions[i].buffers.iter();
                own.any(|other| std::ptr::eq(other, *b))
            });
            let named = here.map(|(v, b)| (v, b.size_bytes()));
            let named: BTreeMap<u32, usize> = named.collect();
            let name = |v: u32| program.variables[v as usize].name.clone();
            named.into_iter().map(|(v, n)| (name(v), n)).collect()
        };
        program.partitions.iter().enumerate().map(of_part).collect()
    };
    for deal in [Deal::BySize, Deal::InTurn] {
        let held = held(deal);
        let n_bytes = |own: &[(String, usize)]| own.iter().map(|(_, n)| n).sum::<usize>();
        assert_eq!(held.len(), 2);
        for own in &held {
            let has = |name: &str| own.iter().any(|(other, _)| other == name);
            for weight in [
                "first/weights",
                "first/bias",
                "second/weights",
                "second/bias",
            ] {
                let of = [
                    format!("optimizer/{weight}/mean"),
                    format!("optimizer/{weight}/square"),
                    format!("average/{weight}"),
                ];
                assert!(
                    of.iter().all(|name| has(name) == has(weight)),
                    "{weight}: {own:?}"
                );
            }
        }
        let [a, b] = [n_bytes(&held[0]), n_bytes(&held[1])];
        assert!(
            deal == Deal::InTurn || a.abs_diff(b) < (a + b) / 3,
            "{a} {b}"
        );
    }
}

/// Values that others set between steps are those of all replicas.
#[test]
fn replicas_follow_their_variable() {
    let data = examples(64);
    let own = mirrored(&setup("cpu:2", 2)).unwrap();
    let one = trainer(Setup::default());
    let path = tempfile::tempdir().unwrap();
    let path = path.path().join("state.safetensors");
    steps(&one, &data);
    one.resources().save(&path).unwrap();
    steps(&own, &data);
    own.resources().load(&path).unwrap();
    assert_near(&steps(&one, &data), &steps(&own, &data), "loaded");
    own.resources().reset("");
    one.resources().reset("");
    assert_near(&steps(&one, &data), &steps(&own, &data), "reset");
    let bias = Tensor::from_slice(&[1f32, -2.0, 0.5], &[3]).unwrap();
    for t in [&own, &one] {
        t.resources().set("", "second/bias", &bias).unwrap();
    }
    assert_near(&steps(&one, &data), &steps(&own, &data), "set");
}

#[test]
fn a_step_that_fails_leaves_all_replicas_as_they_were() {
    let data = examples(64);
    let own = mirrored(&setup("cpu:2", 2)).unwrap();
    steps(&own, &data);
    let before = state(&own);
    let mut batch = data.shuffled(32, 1, 0).next().unwrap().unwrap();
    let mut numbers = batch[0].1.as_slice::<f32>().to_vec();
    // Of the second replica.
    *numbers.last_mut().unwrap() = f32::NAN;
    batch[0].1 = Tensor::from_slice(&numbers, &[32, 6]).unwrap();
    let e = own.step(batch).unwrap_err();
    assert_eq!(e.kind(), gristmill::ErrorKind::NotFinite, "{e}");
    assert!(state(&own) == before);
    let one = trainer(Setup::default());
    steps(&one, &data);
    assert_near(&steps(&one, &data), &steps(&own, &data), "later steps");
}

/// After 1,000 steps, and before that by a call.
#[test]
fn a_replica_with_other_bits_is_found() {
    let data = examples(8);
    let own = mirrored(&setup("cpu:2", 2)).unwrap();
    let batch = data.shuffled(8, 1, 0).next().unwrap().unwrap();
    let step = || own.step(batch.clone());
    for _ in 0..998 {
        step().unwrap();
    }
    let resources = own.resources();
    resources.check_replicas().unwrap();
    let weights = resources.get("", "second/weights").unwrap().unwrap();
    let mut flipped = weights.as_slice::<f32>().to_vec();
    flipped[5] = f32::from_bits(flipped[5].to_bits() ^ 1);
    let flipped = Tensor::from_slice(&flipped, weights.shape()).unwrap();
    resources
        .set_any("", "second/weights/replica_1", &flipped)
        .unwrap();
    // A step that fails hides nothing.
    let mut bad = batch.clone();
    let labels = bad.iter_mut().find(|(name, _)| name == "y").unwrap();
    labels.1 = Tensor::from_slice(&[99i64; 8], &[8]).unwrap();
    own.step(bad).unwrap_err();
    resources.check_replicas().unwrap_err();
    step().unwrap();
    insta::assert_snapshot!(step().unwrap_err(), @r#"
variable "second/weights" of container "" differs from its replica, variable "second/weights/replica_1" of container "", after the same updates (try: devices of one model; or go on from a checkpoint without the one that failed)
"#);
}

#[test]
fn devices_and_batches_that_do_not_fit_are_refused() {
    let device = |name: &str| DeviceName::parse(name).unwrap();
    let two = setup("cpu:2", 2);
    let refused = |devices: &[&str]| {
        let devices = devices.iter().map(|name| device(name));
        mirrored_on(&two, devices.collect()).err().unwrap()
    };
    insta::assert_snapshot!(refused(&["cpu:0", "cpu:0"]), @"device /device:CPU:0 is named twice: it would have two shares (try: each device once)");
    insta::assert_snapshot!(refused(&["cpu:0", "emu:0"]), @"/device:CPU:0 and /device:EMU:0: replicas on devices of different kinds round differently (try: devices of one kind)");
    insta::assert_snapshot!(refused(&["cpu:0", "cpu:5"]), @"device /device:CPU:5 is not there (try: one of /device:CPU:0, /device:CPU:1)");
    let mut both = setup("cpu:2", 2);
    both.options.data_parallel = Some(DataParallel {
        devices: vec![device("cpu:0")],
        servers: Vec::new(),
        deal: Deal::default(),
        shards: 0,
        parts: 1,
        sums: String::new(),
    });
    insta::assert_snapshot!(mirrored(&both).err().unwrap(), @"a strategy, and Options::data_parallel (try: one of them: both say which devices share a batch)");
    let resources = trainer(Setup::default()).resources().clone();
    let value = Tensor::zeros(DType::F32, &[3]).unwrap();
    let e = resources.set("", "second/bias/replica_1", &value);
    insta::assert_snapshot!(e.unwrap_err(), @r#"
variable "second/bias/replica_1": devices that train together keep replicas of "second/bias" under such names; use another name
"#);
    let data = examples(9);
    let own = mirrored(&setup("cpu:4", 2)).unwrap();
    let e = own.fit(&Fit::new(&data, 3), &mut []).unwrap_err();
    insta::assert_snapshot!(e, @"batches of 3 for 4 replicas (try: batches of 4 at least)");
}

/// A net of `f64` under construction.
struct Net {
    b: GraphBuilder,
    parameters: Vec<ValueId>,
}

impl Net {
    fn weight(&mut self, shape: &[usize]) -> Result<ValueId> {
        let k = self.parameters.len();
        let n: usize = shape.iter().product();
        let value = |i: usize| 0.4 * (0.37 * i as f64 + 1.7 * k as f64 + 0.5).sin();
        let values: Vec<f64> = (0..n).map(value).collect();
        let initial = Tensor::from_f64s(DType::F64, shape, &values)?;
        let v = self.b.variable(&format!("w{k}"), initial)?;
        self.parameters.push(v);
        Ok(v)
    }

    fn dense(&mut self, x: ValueId, inputs: usize, units: usize) -> Result<ValueId> {
        let w = self.weight(&[inputs, units])?;
        let product = self.b.matmul(x, w)?;
        let bias = self.weight(&[units])?;
        self.b.add_(product, bias)
    }

    fn perceptron(&mut self, x: ValueId) -> Result<ValueId> {
        let x = self.b.reshape(x, [Dim::from("batch"), 36.into()])?;
        let x = self.dense(x, 36, 16)?;
        let x = self.b.map(ScalarOp::Tanh, &[x])?;
        self.dense(x, 16, 10)
    }

    fn convolutions(&mut self, x: ValueId) -> Result<ValueId> {
        let window = Window {
            strides: vec![1; 2],
            dilations: vec![1; 2],
            pads_low: vec![1; 2],
            pads_high: vec![1; 2],
        };
        let w = self.weight(&[4, 1, 3, 3])?;
        let conv = Op::Conv {
            window: window.clone(),
            groups: 1,
            layout: Layout::ChannelsFirst,
        };
        let x = self.b.add1(conv, &[x, w])?;
        let x = self.b.map(ScalarOp::Relu, &[x])?;
        let pool = Op::Pool {
            kind: PoolKind::Max,
            size: vec![2; 2],
            window: Window {
                strides: vec![2; 2],
                pads_low: vec![0; 2],
                pads_high: vec![0; 2],
                ..window
            },
            ceil: false,
            layout: Layout::ChannelsFirst,
        };
        let x = self.b.add1(pool, &[x])?;
        let x = self.b.reshape(x, [Dim::from("batch"), 36.into()])?;
        self.dense(x, 36, 10)
    }

    /// With statistics over the batch.
    fn normalised(&mut self, x: ValueId) -> Result<ValueId> {
        let x = self.b.reshape(x, [Dim::from("batch"), 36.into()])?;
        let w = self.weight(&[36, 16])?;
        let x = self.b.matmul(x, w)?;
        let x = self.b.add1(
            Op::Standardize {
                axes: vec![0],
                epsilon: Real(1e-5),
            },
            &[x],
        )?;
        let x = self.b.map(ScalarOp::Tanh, &[x])?;
        self.dense(x, 16, 10)
    }

    /// With a mask that is drawn anew in each step, and a penalty of the weights.
    fn dropped(&mut self, x: ValueId) -> Result<ValueId> {
        let x = self.b.reshape(x, [Dim::from("batch"), 36.into()])?;
        let x = self.dense(x, 36, 16)?;
        let stream = self.b.steps_done()?;
        let bits = Op::RandomBits {
            seed: 3,
            first: 0,
            shape: vec!["batch".into(), 16.into()],
        };
        let bits = self.b.add1(bits, &[stream])?;
        let bits = self.b.cast(bits, DType::F64)?;
        let half = self.b.scalar(DType::F64, 2f64.powi(31));
        let kept = self.b.map(ScalarOp::Gt, &[bits, half])?;
        let kept = self.b.cast(kept, DType::F64)?;
        let x = self.b.mul(x, kept)?;
        self.dense(x, 16, 10)
    }
}

impl Net {
    /// With filters of each channel by itself.
    fn depthwise(&mut self, x: ValueId) -> Result<ValueId> {
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
        let w = self.weight(&[4, 1, 3, 3])?;
        let x = self.b.add1(conv(1), &[x, w])?;
        let x = self.b.map(ScalarOp::Tanh, &[x])?;
        let w = self.weight(&[4, 1, 3, 3])?;
        let x = self.b.add1(conv(4), &[x, w])?;
        let x = self.b.reshape(x, [Dim::from("batch"), 144.into()])?;
        self.dense(x, 144, 10)
    }

    /// Over the rows of the images.
    fn recurrent(&mut self, x: ValueId) -> Result<ValueId> {
        let x = self
            .b
            .reshape(x, [Dim::from("batch"), 6.into(), 6.into()])?;
        let x = self.b.transpose(x, &[1, 0, 2])?;
        let input = self.weight(&[6, 8])?;
        let x = self.b.matmul(x, input)?;
        let own = self.weight(&[8, 8])?;
        let state = || [Dim::from("batch"), 8.into()];
        let mut step = GraphBuilder::new("step");
        let h = step.input("h", DType::F64, state());
        let entering = step.input("entering", DType::F64, state());
        let weights = step.input("weights", DType::F64, [8_usize, 8]);
        let h = step.matmul(h, weights)?;
        let h = step.add_(h, entering)?;
        let h = step.map(ScalarOp::Tanh, &[h])?;
        step.output("h", h);
        let scan = Op::Scan {
            carried: 1,
            scanned: 1,
            length: 6.into(),
            reverse: false,
        };
        let zero = self.b.scalar(DType::F64, 0.0);
        let start = self.b.broadcast(zero, state())?;
        let region = vec![step.into_graph()];
        let last = self.b.add_with_regions(scan, &[start, x, own], region)?;
        self.dense(last[0], 8, 10)
    }
}

type Build = fn(&mut Net, ValueId) -> Result<ValueId>;

/// A program of a step of a net, with its variables on replicas or on so many servers.
fn program(build: Build, n_replicas: usize, n_servers: usize) -> Result<Compiled> {
    let mut b = GraphBuilder::new("net");
    let batch = || Dim::from("batch");
    let x = b.input("x", DType::F64, [batch(), 1.into(), 6.into(), 6.into()]);
    let y = b.input("y", DType::I64, [batch()]);
    let mut net = Net {
        b,
        parameters: Vec::new(),
    };
    let logits = build(&mut net, x)?;
    let Net { mut b, parameters } = net;
    let mut loss = loss::sparse_cross_entropy(&mut b, logits, y)?;
    // A bias, of one axis.
    let last = parameters[parameters.len() - 1];
    let square = b.mul(last, last)?;
    let penalty = b.reduce(ReduceKind::Sum, square, &[0], false)?;
    let part = b.scalar(DType::F64, 0.01);
    let penalty = b.mul(penalty, part)?;
    loss = b.add_(loss, penalty)?;
    let gradients = b.grad(loss, &parameters)?;
    let parameters = parameters.iter().zip(gradients).enumerate();
    let parameters = parameters.map(|(i, (&value, gradient))| Parameter {
        name: format!("w{i}"),
        value,
        gradient,
    });
    let update = Update {
        clip_norm: Some(0.5),
        average: Some(0.9),
        ..Sgd {
            learning_rate: 0.2.into(),
            ..Sgd::default()
        }
        .into()
    };
    update.apply(&mut b, &parameters.collect::<Vec<_>>())?;
    b.output("loss", loss);
    let mut setup = setup(&format!("cpu:{n_replicas}"), 2);
    if n_replicas > 1 {
        let devices = setup.settings.devices.devices.iter();
        let devices: Vec<DeviceName> = devices.map(|d| d.name.clone()).collect();
        setup.options.data_parallel = Some(DataParallel {
            servers: devices[..n_servers].to_vec(),
            deal: [Deal::BySize, Deal::InTurn][n_replicas % 2],
            devices,
            shards: 0,
            parts: 1,
            sums: String::new(),
        });
    }
    setup.compile(&b.finish()?)
}

/// The values of all variables after 50 steps, and the losses.
fn trained(program: &Compiled) -> Result<Vec<(String, Vec<f64>)>> {
    let mut rng = Rng(4);
    let mut losses = Vec::new();
    for step in 0..50 {
        let n = [12, 12, 7, 1][step % 4];
        let x = random_tensor(&mut rng, DType::F64, &[n, 1, 6, 6], false);
        let y: Vec<i64> = (0..n as i64).map(|i| (i * 7 + step as i64) % 10).collect();
        let y = Tensor::from_slice(&y, &[n])?;
        losses.extend(program.run([("x", x), ("y", y)])?["loss"].to_f64s());
    }
    let resources = program.resources();
    let mut values = vec![("losses".to_owned(), losses)];
    for (container, name) in resources.names() {
        let value = resources.get(&container, &name)?.unwrap();
        values.push((name, value.to_f64s()));
    }
    Ok(values)
}

#[test]
fn fifty_steps_of_several_nets_are_those_of_one_device() {
    let nets: [(&str, Build); 6] = [
        ("perceptron", Net::perceptron),
        ("convolutions", Net::convolutions),
        ("normalised", Net::normalised),
        ("dropped", Net::dropped),
        ("depthwise", Net::depthwise),
        ("recurrent", Net::recurrent),
    ];
    for (name, build) in nets {
        let expected = trained(&program(build, 1, 0).unwrap()).unwrap();
        assert!(expected[0].1.iter().all(|loss| loss.is_finite()), "{name}");
        for (n, n_servers) in [(2, 0), (3, 0), (4, 0), (2, 1), (3, 1), (2, 2), (3, 2)] {
            let found = trained(&program(build, n, n_servers).unwrap()).unwrap();
            assert_eq!(expected.len(), found.len());
            for ((own, a), (other, b)) in expected.iter().zip(&found) {
                assert_eq!(own, other);
                let pairs = a.iter().zip(b);
                let worst = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                assert!(
                    worst < 1e-9,
                    "{name}, {n} replicas, {n_servers} servers, {own}: {worst}"
                );
            }
        }
    }
}
