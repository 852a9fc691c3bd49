//! `fit`: the order of events, the numbers it reports, resumed trainings, callbacks.

use super::{examples, perceptron, state, trainer};
use gristmill::testing::Setup;
use gristmill::train::{
    Adam, Batch, Callback, Checkpoints, Dataset, EarlyStopping, End, Epoch, EpochReport, Every,
    Fit, FitContext, FitReport, JsonLines, LearningRateScheduler, Metrics, ModelCheckpoint,
    Monitor, Schedule, Sgd, StepOutputs, TensorDataset, Trainer, Training, Update, Weights,
    latest_checkpoint,
};
use gristmill::{Error, ErrorKind, Options, Result, Tensor};
use serde_json::Value;
use std::fs;
use std::path::Path;

const BATCH: usize = 24;

/// Calls a function at the end of each step.
struct AtStep<F>(F);

impl<F: FnMut(&mut FitContext) -> Result<()>> Callback for AtStep<F> {
    fn name(&self) -> String {
        "AtStep".to_owned()
    }

    fn step_end(&mut self, cx: &mut FitContext, _: &StepOutputs) -> Result<()> {
        (self.0)(cx)
    }
}

/// Stops a training after a number of steps.
fn stop_at(n: u64) -> AtStep<impl FnMut(&mut FitContext) -> Result<()>> {
    AtStep(move |cx: &mut FitContext| {
        if cx.step() == n {
            cx.stop("enough");
        }
        Ok(())
    })
}

/// Writes events down.
struct Recorded<'a>(&'a str, &'a std::cell::RefCell<Vec<String>>);

impl Recorded<'_> {
    fn note(&self, cx: &FitContext, event: &str) -> Result<()> {
        let (name, epoch, step) = (self.0, cx.epoch(), cx.step());
        let line = format!("{name} {event}: epoch {epoch}, step {step}");
        self.1.borrow_mut().push(line);
        Ok(())
    }
}

impl Callback for Recorded<'_> {
    fn name(&self) -> String {
        self.0.to_owned()
    }
    fn train_begin(&mut self, cx: &mut FitContext) -> Result<()> {
        self.note(cx, "train_begin")
    }
    fn train_end(&mut self, cx: &mut FitContext, end: &End) -> Result<()> {
        self.note(cx, &format!("train_end {end:?}"))
    }
    fn epoch_begin(&mut self, cx: &mut FitContext) -> Result<()> {
        self.note(cx, "epoch_begin")
    }
    fn epoch_end(&mut self, cx: &mut FitContext, epoch: &EpochReport) -> Result<()> {
        self.note(cx, &format!("epoch_end {}", epoch.epoch))
    }
    fn step_begin(&mut self, cx: &mut FitContext, batch: &Batch) -> Result<()> {
        self.note(cx, &format!("step_begin {:?}", batch[0].1.shape()))
    }
    fn step_end(&mut self, cx: &mut FitContext, step: &StepOutputs) -> Result<()> {
        self.note(cx, &format!("step_end {}", step.number))
    }
    fn evaluation_begin(&mut self, cx: &mut FitContext) -> Result<()> {
        self.note(cx, "evaluation_begin")
    }
    fn evaluation_end(&mut self, cx: &mut FitContext, held_out: &Metrics) -> Result<()> {
        self.note(cx, &format!("evaluation_end {}", held_out.n_examples()))
    }
}

fn short(data: &TensorDataset) -> Fit<'_> {
    Fit {
        seed: 7,
        ..Fit::new(data, BATCH)
    }
}

#[test]
fn events_have_a_fixed_order() {
    let (data, held_out) = (examples(40), examples(30));
    let events = std::cell::RefCell::new(Vec::new());
    let fit = Fit {
        held_out: Some(&held_out),
        ..short(&data)
    };
    let mut callbacks = [Recorded("a", &events), Recorded("b", &events)];
    let [a, b] = &mut callbacks;
    trainer(Setup::default()).fit(&fit, &mut [a, b]).unwrap();
    insta::assert_snapshot!(events.take().join("\n"), @r#"
a train_begin: epoch 0, step 0
b train_begin: epoch 0, step 0
a epoch_begin: epoch 0, step 0
b epoch_begin: epoch 0, step 0
a step_begin [24, 6]: epoch 0, step 0
b step_begin [24, 6]: epoch 0, step 0
a step_end 1: epoch 0, step 1
b step_end 1: epoch 0, step 1
a step_begin [16, 6]: epoch 0, step 1
b step_begin [16, 6]: epoch 0, step 1
a step_end 2: epoch 0, step 2
b step_end 2: epoch 0, step 2
a evaluation_begin: epoch 0, step 2
b evaluation_begin: epoch 0, step 2
a evaluation_end 30: epoch 0, step 2
b evaluation_end 30: epoch 0, step 2
a epoch_end 0: epoch 0, step 2
b epoch_end 0: epoch 0, step 2
a train_end Finished: epoch 1, step 2
b train_end Finished: epoch 1, step 2
"#);
    let mut failing = AtStep(|_: &mut FitContext| Err(Error::invalid("no more")));
    let mut first = Recorded("first", &events);
    let e = trainer(Setup::default()).fit(&fit, &mut [&mut first, &mut failing]);
    assert_eq!(
        e.unwrap_err().to_string(),
        "callback AtStep, step_end: no more"
    );
    insta::assert_snapshot!(events.take().join("\n"), @r#"
first train_begin: epoch 0, step 0
first epoch_begin: epoch 0, step 0
first step_begin [24, 6]: epoch 0, step 0
first step_end 1: epoch 0, step 1
first train_end Failed("callback AtStep, step_end: no more"): epoch 0, step 1
"#);
}

/// Every number of a report but times.
fn numbers(report: &FitReport) -> Vec<(u64, Metrics, Option<Metrics>, f64)> {
    let epochs = report.epochs.iter().cloned();
    let numbers = epochs.map(|e| (e.epoch, e.trained, e.held_out, e.learning_rate));
    numbers.collect()
}

#[test]
fn a_fit_is_the_plain_loop() {
    let (data, held_out) = (examples(100), examples(50));
    let (plain, fitted) = (trainer(Setup::default()), trainer(Setup::default()));
    let (mut losses, mut rights) = (0.0, 0.0);
    for epoch in 0..2 {
        (losses, rights) = (0.0, 0.0);
        for batch in data.shuffled(BATCH, 7, epoch) {
            let batch = batch.unwrap();
            let n = batch[0].1.shape()[0] as f64;
            let step = plain.step(batch).unwrap();
            losses += n * step.loss;
            rights += n * step.metrics["accuracy"].to_f64s()[0];
        }
    }
    let fit = Fit {
        epochs: 2,
        held_out: Some(&held_out),
        ..short(&data)
    };
    let report = fitted.fit(&fit, &mut []).unwrap();
    assert_eq!(state(&fitted), state(&plain));
    assert_eq!((report.epochs.len(), report.n_steps), (2, 10));
    let last = &report.epochs[1].trained;
    assert_eq!(last.n_examples(), 100);
    assert_eq!(last.loss(), losses / 100.0);
    assert_eq!(last.get("accuracy"), Some(rights / 100.0));
    // By examples: the last batch is smaller.
    let mut loss = 0.0;
    for batch in held_out.batches(BATCH) {
        let batch = batch.unwrap();
        let n = batch[0].1.shape()[0] as f64;
        loss += n * plain.evaluate_batch(batch).unwrap()["loss"].to_f64s()[0];
    }
    let held_out_loss = report.epochs[1].held_out.as_ref().unwrap().loss();
    assert_eq!(held_out_loss, loss / 50.0);
    let text = plain.evaluate(&held_out, BATCH).unwrap().to_string();
    assert!(
        text.starts_with("loss ") && text.contains(", accuracy "),
        "{text}"
    );
}

#[test]
fn evaluation_by_averages_gives_the_weights_back() {
    let (data, held_out) = (examples(100), examples(50));
    let own = trainer(Setup::default());
    let by_weights = own.evaluate(&held_out, BATCH).unwrap();
    let averages = || own.evaluate_with(Weights::Averages, &held_out, BATCH);
    // Before the first step, averages are the weights.
    assert_eq!(averages().unwrap(), by_weights);
    let fit = Fit {
        epochs: 3,
        held_out: Some(&held_out),
        weights: Weights::Averages,
        ..short(&data)
    };
    let report = own.fit(&fit, &mut []).unwrap();
    let before = state(&own);
    let by_averages = averages().unwrap();
    assert_eq!(report.epochs[2].held_out.as_ref(), Some(&by_averages));
    assert_eq!(state(&own), before);
    // By hand: the averages in place of the weights.
    for name in own.variables().to_vec() {
        let average = own.value(&format!("average/{name}")).unwrap().unwrap();
        own.resources().set("", &name, &average).unwrap();
    }
    assert_eq!(own.evaluate(&held_out, BATCH).unwrap(), by_averages);
    // An evaluation that fails gives them back, too.
    let wrong = TensorDataset::new([("x", Tensor::from_slice(&[1f32, 2.0], &[2, 1]).unwrap())]);
    let before = state(&own);
    own.evaluate_with(Weights::Averages, &wrong.unwrap(), 2)
        .unwrap_err();
    assert_eq!(state(&own), before);
    let without = with_rate(0.1.into());
    let e = without.evaluate_with(Weights::Averages, &held_out, BATCH);
    assert_eq!(
        e.unwrap_err().to_string(),
        "training keeps no averages of the variables (try: Update { average: Some(0.999), .. } keeps them)"
    );
}

fn with_rate(learning_rate: Schedule) -> Trainer {
    let sgd = Sgd {
        learning_rate,
        momentum: 0.9,
        ..Sgd::default()
    };
    with_update(sgd.into())
}

fn with_update(update: Update) -> Trainer {
    let training = Training {
        seed: 5,
        update,
        options: Options::default(),
    };
    Trainer::new("perceptron", &training, perceptron).unwrap()
}

#[test]
fn a_rate_that_a_callback_sets_gives_the_curve_of_the_schedule() {
    let data = examples(100);
    let fit = Fit {
        epochs: 4,
        ..short(&data)
    };
    let staircase = with_rate(Schedule::staircase(0.1, 0.5, 5));
    let set = with_rate(Schedule::Variable(0.7));
    assert_eq!(set.learning_rate().unwrap(), 0.7);
    let expected = staircase.fit(&fit, &mut []).unwrap();
    let mut scheduler = LearningRateScheduler::new(|epoch| 0.1 * 0.5f64.powi(epoch as i32));
    let report = set.fit(&fit, &mut [&mut scheduler]).unwrap();
    assert_eq!(numbers(&report), numbers(&expected));
    assert_eq!(set.learning_rate().unwrap(), 0.0125);
    let own = |t: &Trainer| t.value("first/weights").unwrap().unwrap();
    assert_eq!(own(&set), own(&staircase));
    let e = staircase.fit(&fit, &mut [&mut scheduler]).unwrap_err();
    assert_eq!(
        e.to_string(),
        "callback LearningRateScheduler, train_begin: the optimiser's schedule decides the learning rate \
         (try: Schedule::Variable(0.1) is a rate to be set between steps)"
    );
    set.set_learning_rate(f64::NAN).unwrap_err();
    // Behind a warm-up, too.
    let warm = with_rate(Schedule::Variable(1.0).warmed_up(10));
    warm.set_learning_rate(0.5).unwrap();
    assert_eq!(warm.learning_rate().unwrap(), 0.05);
    let batch = data.rows(&[0, 1, 2], Epoch::default()).unwrap();
    assert_eq!(warm.step(batch).unwrap().learning_rate, 0.05);
}

/// A trainer with all state that an update can have, and a rate that callbacks set.
fn complete() -> Trainer {
    let adam = Adam {
        learning_rate: Schedule::Variable(0.01),
        ..Adam::default()
    };
    with_update(Update {
        clip_norm: Some(1.0),
        average: Some(0.9),
        ..adam.into()
    })
}

/// Lines of a log without times.
fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    let value = |line: &str| {
        let mut value: Value = serde_json::from_str(line).unwrap();
        value.as_object_mut().unwrap().remove("examples_per_s");
        value
    };
    text.lines().map(value).collect()
}

/// A training with all callbacks in a folder; goes on from its newest checkpoint.
fn with_callbacks(folder: &Path, evaluate: Every, stop: u64) -> (FitReport, Trainer) {
    let (data, held_out) = (examples(100), examples(50));
    let own = complete();
    let checkpoints = Checkpoints::new(folder.join("checkpoints"), 2).unwrap();
    let fit = Fit {
        epochs: 9,
        held_out: Some(&held_out),
        evaluate,
        resumed: checkpoints.resume(&own).unwrap(),
        ..short(&data)
    };
    // The rate rises until training gets worse: patience ends it.
    let mut rate = LearningRateScheduler::new(|epoch| 0.01 * 4f64.powi(epoch as i32));
    let mut patience = EarlyStopping::new(Monitor::lowest("held_out/loss"), 3);
    let mut best = ModelCheckpoint::best(
        Monitor::highest("held_out/accuracy"),
        folder.join("best.safetensors"),
    );
    let mut trained =
        ModelCheckpoint::best(Monitor::lowest("loss"), folder.join("trained.safetensors"));
    let mut newest = ModelCheckpoint::newest(checkpoints, Every::Steps(1));
    let mut log = JsonLines::new(folder.join("log.jsonl"));
    let mut stop = stop_at(stop);
    let report = own.fit(
        &fit,
        &mut [
            &mut rate,
            &mut patience,
            &mut best,
            &mut trained,
            &mut newest,
            &mut log,
            &mut stop,
        ],
    );
    (report.unwrap(), own)
}

#[test]
fn a_stopped_training_goes_on_bit_for_bit_with_its_callbacks() {
    for evaluate in [Every::Epochs(1), Every::Steps(3)] {
        let whole = tempfile::tempdir().unwrap();
        let (report, expected) = with_callbacks(whole.path(), evaluate, u64::MAX);
        let reason = report.stopped.unwrap();
        assert!(
            reason.starts_with("held_out/loss has not improved 3 times"),
            "{reason}"
        );
        let best = |folder: &Path| fs::read(folder.join("best.safetensors")).unwrap();
        let trained = |folder: &Path| fs::read(folder.join("trained.safetensors")).unwrap();
        // In the middle of epochs, at their ends, behind the best one.
        for stop in [1, 3, 5, 7, 10, 12, 19, 20] {
            let folder = tempfile::tempdir().unwrap();
            let (first, _) = with_callbacks(folder.path(), evaluate, stop);
            assert_eq!(
                (first.n_steps, first.stopped.as_deref()),
                (stop, Some("enough"))
            );
            let (second, own) = with_callbacks(folder.path(), evaluate, u64::MAX);
            assert_eq!(second.n_steps, report.n_steps, "from {stop}");
            assert_eq!(second.stopped.as_deref(), Some(reason.as_str()));
            assert_eq!(state(&own), state(&expected), "from {stop}");
            assert!(best(folder.path()) == best(whole.path()), "from {stop}");
            assert!(
                trained(folder.path()) == trained(whole.path()),
                "from {stop}"
            );
            let log = |folder: &Path| lines(&folder.join("log.jsonl"));
            assert_eq!(log(folder.path()), log(whole.path()), "from {stop}");
        }
    }
}

#[test]
fn early_stopping_gives_the_best_weights_back_however_training_ends() {
    let (data, held_out) = (examples(100), examples(50));
    let fit = Fit {
        epochs: 6,
        held_out: Some(&held_out),
        ..short(&data)
    };
    let best = |report: &FitReport| {
        let losses = report
            .epochs
            .iter()
            .map(|e| e.held_out.as_ref().unwrap().loss());
        losses.fold(f64::INFINITY, f64::min)
    };
    let loss = |t: &Trainer| t.evaluate(&held_out, BATCH).unwrap().loss();
    // Rates that ruin what the first epochs have learnt.
    let rates = |epoch: u64| if epoch < 2 { 0.1 } else { 30.0 };
    for patience in [2, 100] {
        let own = with_rate(Schedule::Variable(0.1));
        let mut stopping = EarlyStopping::new(Monitor::lowest("held_out/loss"), patience);
        let mut rate = LearningRateScheduler::new(rates);
        let report = own.fit(&fit, &mut [&mut rate, &mut stopping]).unwrap();
        assert_eq!(report.stopped.is_some(), patience == 2);
        assert_eq!(loss(&own), best(&report));
        assert_eq!(stopping.best(), Some(best(&report)));
    }
    let own = with_rate(Schedule::Variable(0.1));
    let mut stopping = EarlyStopping::new(Monitor::lowest("held_out/loss"), 100);
    let mut rate = LearningRateScheduler::new(rates);
    let mut failing = AtStep(|cx: &mut FitContext| match cx.step() {
        18 => Err(Error::invalid("a wire fell out")),
        _ => Ok(()),
    });
    let ended = own.fit(&fit, &mut [&mut rate, &mut stopping, &mut failing]);
    assert_eq!(
        ended.unwrap_err().to_string(),
        "callback AtStep, step_end: a wire fell out"
    );
    assert_eq!(Some(loss(&own)), stopping.best());
}

#[test]
fn a_better_file_is_never_overwritten() {
    let (data, held_out) = (examples(100), examples(50));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("best.safetensors");
    let checkpoints = Checkpoints::new(folder.path().join("all"), 100).unwrap();
    let mut best = ModelCheckpoint::best(Monitor::lowest("held_out/loss"), &path).weights_only();
    let mut newest = ModelCheckpoint::newest(checkpoints.clone(), Every::Epochs(1));
    let fit = Fit {
        epochs: 4,
        held_out: Some(&held_out),
        ..short(&data)
    };
    let own = with_rate(0.1.into());
    own.fit(&fit, &mut [&mut best, &mut newest]).unwrap();
    let (bytes, value) = (fs::read(&path).unwrap(), best.best_value());
    // Checkpoints of later epochs are lost, and what comes after the first is worse.
    for lost in &checkpoints.files().unwrap()[1..] {
        fs::remove_file(lost).unwrap();
    }
    let own = with_rate(0.0.into());
    let resumed = checkpoints.resume(&own).unwrap();
    let mut again = ModelCheckpoint::best(Monitor::lowest("held_out/loss"), &path).weights_only();
    let again_fit = Fit {
        resumed,
        ..fit.clone()
    };
    own.fit(&again_fit, &mut [&mut again]).unwrap();
    assert!(fs::read(&path).unwrap() == bytes);
    assert_eq!(again.best_value(), value);
    // Another training does not take the file, nor the folder, nor a file by another value.
    let new = with_rate(0.1.into());
    let refused = |callback: &mut dyn Callback, fit: &Fit| {
        let e = new.fit(fit, &mut [callback]).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidInput);
        e.to_string()
            .replace(&folder.path().display().to_string(), "FOLDER")
    };
    let mut by_accuracy = ModelCheckpoint::best(Monitor::highest("held_out/accuracy"), &path);
    let messages = [
        refused(&mut best, &fit),
        refused(&mut newest, &fit),
        refused(&mut by_accuracy, &again_fit),
    ];
    insta::assert_snapshot!(messages.join("\n"), @r#"
callback ModelCheckpoint, train_begin: FOLDER/best.safetensors is the best of an earlier training (try: Fit::resumed goes on from it; another place begins anew)
callback ModelCheckpoint, train_begin: FOLDER/all has checkpoints of an earlier training (try: Fit::resumed goes on from it; another place begins anew)
callback ModelCheckpoint, train_begin: FOLDER/best.safetensors is the best by held_out/loss, not by held_out/accuracy (try: another file)
"#);
    // The weights, in another process.
    assert_eq!(new.n_steps().unwrap(), 0);
    new.load_weights(&path).unwrap();
    assert_eq!(Some(new.evaluate(&held_out, BATCH).unwrap().loss()), value);
}

#[test]
fn the_latest_weights_are_found_and_evaluated() {
    let (data, held_out) = (examples(100), examples(50));
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(latest_checkpoint(folder.path()).unwrap(), None);
    let checkpoints = Checkpoints::new(folder.path(), 2).unwrap();
    let mut saved = ModelCheckpoint::newest(checkpoints, Every::Epochs(1)).weights_only();
    let fit = Fit {
        epochs: 3,
        ..short(&data)
    };
    let own = complete();
    own.fit(&fit, &mut [&mut saved]).unwrap();
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    let latest = latest_checkpoint(folder.path()).unwrap().unwrap();
    assert!(latest.ends_with("weights-000000000015.safetensors"));
    for weights in [Weights::Current, Weights::Averages] {
        let other = complete();
        other.load_weights(&latest).unwrap();
        let evaluate = |t: &Trainer| t.evaluate_with(weights, &held_out, BATCH).unwrap();
        if weights == Weights::Current {
            assert_eq!(evaluate(&other), evaluate(&own));
        }
        // A whole checkpoint does, too.
        let whole = Checkpoints::new(folder.path().join("whole"), 1).unwrap();
        let position = gristmill::train::Position::start(&data, BATCH, 7);
        let path = whole.save(&own, &position).unwrap();
        other.load_weights(&path).unwrap();
        assert_eq!(evaluate(&other).loss(), evaluate(&other).loss());
    }
    // A damaged file is passed over.
    fs::write(&latest, "half").unwrap();
    let before = latest_checkpoint(folder.path()).unwrap().unwrap();
    assert!(before.ends_with("weights-000000000010.safetensors"));
    let e = own.load_weights(&latest).unwrap_err().to_string();
    assert!(e.contains("weights-000000000015"), "{e}");
    let resumed = Checkpoints::new(folder.path(), 2).unwrap().resume(&own);
    assert_eq!(resumed.unwrap(), None);
}

#[test]
fn what_does_not_fit_is_refused_before_training() {
    let data = examples(40);
    let none = TensorDataset::new([("x", Tensor::zeros(gristmill::DType::F32, &[0, 6]).unwrap())]);
    let none = none.unwrap();
    let own = trainer(Setup::default());
    let before = state(&own);
    let refused = |fit: Fit, callbacks: &mut [&mut dyn Callback]| {
        let e = own.fit(&fit, callbacks).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidInput);
        e.to_string()
    };
    let stopping = |monitor| EarlyStopping::new(monitor, 2);
    let checkpoints = Checkpoints::new(tempfile::tempdir().unwrap().path(), 2).unwrap();
    let messages = [
        refused(short(&none), &mut []),
        refused(Fit::new(&data, 0), &mut []),
        refused(
            Fit {
                drops_last: true,
                ..Fit::new(&data, 64)
            },
            &mut [],
        ),
        refused(
            Fit {
                held_out: Some(&none),
                ..short(&data)
            },
            &mut [],
        ),
        refused(
            Fit {
                evaluate: Every::Steps(0),
                ..short(&data)
            },
            &mut [],
        ),
        refused(
            short(&data),
            &mut [&mut stopping(Monitor::lowest("held_out/loss"))],
        ),
        refused(
            short(&data),
            &mut [&mut stopping(Monitor::highest("acuracy"))],
        ),
        refused(
            short(&data),
            &mut [&mut EarlyStopping::new(Monitor::lowest("loss"), 0)],
        ),
        refused(
            short(&data),
            &mut [&mut ModelCheckpoint::newest(checkpoints, Every::Epochs(0))],
        ),
    ];
    insta::assert_snapshot!(messages.join("\n"), @r#"
an epoch: the data set has no example
a batch of 0 examples
an epoch: the data set has 40 examples, and whole batches take 64
the held-out data have no example
times of evaluation: Steps(0), expected at least 1
callback EarlyStopping, train_begin: "held_out/loss" takes held-out data (try: Fit { held_out: Some(&data), .. })
callback EarlyStopping, train_begin: unknown metric "acuracy"; known: loss, accuracy; did you mean "accuracy"?
callback EarlyStopping, train_begin: patience 0: expected at least 1
callback ModelCheckpoint, train_begin: times of checkpoints: Epochs(0), expected at least 1
"#);
    assert_eq!(state(&own), before);
}

#[test]
fn the_length_is_of_epochs_or_steps() {
    let data = examples(100);
    let steps = |epochs, steps| {
        let fit = Fit {
            epochs,
            steps,
            ..short(&data)
        };
        let report = trainer(Setup::default()).fit(&fit, &mut []).unwrap();
        (report.n_steps, report.epochs.len())
    };
    assert_eq!(steps(2, None), (10, 2));
    assert_eq!(steps(2, Some(7)), (7, 1));
    assert_eq!(steps(2, Some(99)), (10, 2));
    assert_eq!(steps(u64::MAX, Some(5)), (5, 1));
    assert_eq!(steps(0, None), (0, 0));
    // An incomplete batch is left out on demand.
    let fit = Fit {
        drops_last: true,
        ..short(&data)
    };
    let report = trainer(Setup::default()).fit(&fit, &mut []).unwrap();
    assert_eq!(report.n_steps, 4);
    assert_eq!(report.epochs[0].trained.n_examples(), 96);
}

#[test]
fn a_log_that_cannot_be_written_ends_with_a_warning() {
    let data = examples(40);
    let own = trainer(Setup::default());
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log.jsonl");
    fs::write(&log, "").unwrap();
    let e = own.fit(&short(&data), &mut [&mut JsonLines::new(&log)]);
    let e = e.unwrap_err().to_string();
    assert!(
        e.contains("is the log of an earlier training (try: another file"),
        "{e}"
    );
    if !Path::new("/dev/full").exists() {
        return;
    }
    // A resumed training opens what is there: a device that is always full.
    let checkpoints = Checkpoints::new(folder.path().join("all"), 2).unwrap();
    let mut newest = ModelCheckpoint::newest(checkpoints.clone(), Every::Epochs(1));
    own.fit(&short(&data), &mut [&mut newest]).unwrap();
    std::os::unix::fs::symlink("/dev/full", folder.path().join("full")).unwrap();
    let fit = Fit {
        epochs: 3,
        resumed: checkpoints.resume(&own).unwrap(),
        ..short(&data)
    };
    let mut full = JsonLines::new(folder.path().join("full"));
    let report = own.fit(&fit, &mut [&mut full]).unwrap();
    assert_eq!((report.n_steps, report.warnings.len()), (6, 1));
    assert!(
        report.warnings[0].ends_with("the log ends here"),
        "{:?}",
        report.warnings
    );
}
