//! `fit`: the order of events, the numbers it reports, resumed trainings, callbacks.

use super::{examples, perceptron, state, trainer};
use gristmill::testing::Setup;
use gristmill::train::{
    Adam, Batch, Callback, Checkpoints, Dataset, EarlyStopping, End, Epoch, EpochReport, EventLog,
    Every, Fit, FitContext, FitReport, JsonLines, LearningRateScheduler, LoggedStep, Metrics,
    ModelCheckpoint, Monitor, Schedule, Sgd, StepOutputs, Summaries, TensorBoard, TensorDataset,
    Trainer, Training, Update, Weights, latest_checkpoint,
};
use gristmill::{Error, ErrorKind, Result, Tensor};
use serde_json::Value;
use std::fs;
use std::path::Path;

const BATCH: usize = 24;

/// Calls a function at the end of each step.
pub(super) struct AtStep<F>(pub(super) F);

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
        ..Training::from(update)
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
pub(super) fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    let value = |line: &str| {
        let mut value: Value = serde_json::from_str(line).unwrap();
        value.as_object_mut().unwrap().remove("examples_per_s");
        value
    };
    text.lines().map(value).collect()
}

/// Steps of a log without times.
pub(super) fn events(folder: &Path) -> Vec<LoggedStep> {
    let mut steps = EventLog::read(folder).unwrap().steps;
    for step in &mut steps {
        step.wall_time = 0.0;
        step.scalars.retain(|(tag, _)| tag != "examples_per_s");
    }
    steps
}

/// A training with all callbacks.
#[derive(Clone, Copy)]
struct Case {
    epochs: u64,
    evaluate: Every,
    saved: Every,
    stop: u64,
}

/// Trains in a folder; goes on from its newest checkpoint.
fn with_callbacks(folder: &Path, case: Case) -> (FitReport, Trainer) {
    let (data, held_out) = (examples(100), examples(50));
    let own = complete();
    let checkpoints = Checkpoints::new(folder.join("checkpoints"), 2).unwrap();
    let evaluate = case.evaluate;
    let fit = Fit {
        epochs: case.epochs,
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
    let mut newest = ModelCheckpoint::newest(checkpoints, case.saved);
    let mut log = JsonLines::new(folder.join("log.jsonl"));
    let shown = match evaluate {
        Every::Epochs(_) => Every::Epochs(1),
        Every::Steps(_) => Every::Steps(2),
    };
    // Gradients take a program of their own: only where steps are lost.
    let inspects = case.saved != Every::Steps(1);
    let summaries = Summaries {
        activations: inspects,
        gradients: inspects,
        ..Summaries::new(Every::Steps(4))
    };
    let mut board = TensorBoard::new(folder.join("events"))
        .scalars(shown)
        .summaries(summaries);
    let mut stop = stop_at(case.stop);
    let report = own.fit(
        &fit,
        &mut [
            &mut rate,
            &mut newest,
            &mut patience,
            &mut best,
            &mut trained,
            &mut log,
            &mut board,
            &mut stop,
        ],
    );
    (report.unwrap(), own)
}

/// Trains whole, and with stops, and compares all that is left.
fn goes_on(epochs: u64, evaluate: Every, saved: Every, stops: &[u64]) -> FitReport {
    let case = Case {
        epochs,
        evaluate,
        saved,
        stop: u64::MAX,
    };
    let whole = tempfile::tempdir().unwrap();
    let (report, expected) = with_callbacks(whole.path(), case);
    let file = |folder: &Path, name: &str| fs::read(folder.join(name)).unwrap();
    for &stop in stops {
        let folder = tempfile::tempdir().unwrap();
        let (first, _) = with_callbacks(folder.path(), Case { stop, ..case });
        assert_eq!(first.n_steps, stop);
        assert_eq!(first.stopped.as_deref(), Some("enough"));
        // Again at the end: nothing is left to do, whatever ended it.
        for _ in 0..2 {
            let (second, own) = with_callbacks(folder.path(), case);
            assert_eq!(second.n_steps, report.n_steps, "from {stop}");
            assert_eq!(second.stopped, report.stopped, "from {stop}");
            assert_eq!(state(&own), state(&expected), "from {stop}");
            for name in ["best.safetensors", "trained.safetensors"] {
                let is_same = file(folder.path(), name) == file(whole.path(), name);
                assert!(is_same, "{name} from {stop}");
            }
            let log = |folder: &Path| lines(&folder.join("log.jsonl"));
            assert_eq!(log(folder.path()), log(whole.path()), "from {stop}");
            for run in ["train", "validation"] {
                let events = |folder: &Path| events(&folder.join("events").join(run));
                let (found, expected) = (events(folder.path()), events(whole.path()));
                let steps = |log: &[LoggedStep]| log.iter().map(|s| s.step).collect::<Vec<_>>();
                assert_eq!(steps(&found), steps(&expected), "{run} from {stop}");
                assert!(found == expected, "{run} from {stop}");
            }
        }
    }
    report
}

#[test]
fn a_stopped_training_goes_on_bit_for_bit_with_its_callbacks() {
    // In the middle of epochs of five steps, at their ends, behind the best one.
    for evaluate in [Every::Epochs(1), Every::Steps(3)] {
        let report = goes_on(
            9,
            evaluate,
            Every::Steps(1),
            &[1, 3, 5, 7, 10, 12, 15, 19, 20],
        );
        let reason = report.stopped.unwrap();
        assert!(
            reason.starts_with("held_out/loss did not improve 3 times in a row"),
            "{reason}"
        );
    }
    // Steps are lost, with their lines in the log.
    goes_on(9, Every::Steps(3), Every::Steps(4), &[6, 7, 10, 11]);
    // A training that ends by itself, stopped after its last step.
    let report = goes_on(2, Every::Epochs(1), Every::Steps(1), &[5, 9, 10]);
    assert_eq!((report.stopped, report.epochs.len()), (None, 2));
}

#[test]
fn the_end_of_an_epoch_comes_after_its_last_step() {
    let case = Case {
        epochs: 1,
        evaluate: Every::Epochs(1),
        saved: Every::Steps(1),
        stop: 5,
    };
    let folder = tempfile::tempdir().unwrap();
    let (first, _) = with_callbacks(folder.path(), case);
    assert_eq!((first.n_steps, first.epochs.len()), (5, 0));
    let (second, _) = with_callbacks(folder.path(), Case { stop: 0, ..case });
    assert_eq!((second.n_steps, second.epochs.len()), (5, 1));
    assert_eq!(second.epochs[0].trained.n_examples(), 100);
    let names: Vec<&str> = second.epochs[0]
        .trained
        .iter()
        .map(|(name, _)| name)
        .collect();
    assert_eq!(names, ["loss", "accuracy"]);
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
fn a_resumed_training_that_cannot_begin_changes_nothing() {
    let case = Case {
        epochs: 9,
        evaluate: Every::Epochs(1),
        saved: Every::Steps(1),
        stop: 12,
    };
    let folder = tempfile::tempdir().unwrap();
    with_callbacks(folder.path(), case);
    let (data, held_out) = (examples(100), examples(50));
    let own = complete();
    let checkpoints = Checkpoints::new(folder.path().join("checkpoints"), 2).unwrap();
    let fit = Fit {
        epochs: 9,
        held_out: Some(&held_out),
        resumed: checkpoints.resume(&own).unwrap(),
        ..short(&data)
    };
    let before = state(&own);
    let mut patience = EarlyStopping::new(Monitor::lowest("held_out/loss"), 3);
    let mut wrong = EarlyStopping::new(Monitor::lowest("lost"), 3);
    let refused = |fit: &Fit, callbacks: &mut [&mut dyn Callback]| {
        let e = own.fit(fit, callbacks).unwrap_err().to_string();
        e.replace(&folder.path().display().to_string(), "FOLDER")
    };
    let mut other = EarlyStopping::new(Monitor::highest("held_out/accuracy"), 3);
    let mut messages = vec![
        refused(&fit, &mut [&mut patience, &mut wrong]),
        refused(&fit, &mut [&mut other]),
        refused(
            &Fit {
                steps: Some(11),
                ..fit.clone()
            },
            &mut [],
        ),
        refused(
            &Fit {
                epochs: 2,
                ..fit.clone()
            },
            &mut [],
        ),
        refused(
            &Fit {
                seed: 8,
                ..fit.clone()
            },
            &mut [],
        ),
        refused(
            &Fit {
                drops_last: true,
                ..fit.clone()
            },
            &mut [],
        ),
    ];
    assert_eq!(state(&own), before);
    // The trainer has moved on.
    own.step(data.rows(&[0, 1], Epoch::default()).unwrap())
        .unwrap();
    messages.push(refused(&fit, &mut []));
    let log = folder.path().join("notes.jsonl");
    fs::write(&log, "my notes\n").unwrap();
    let fit = Fit {
        resumed: checkpoints.resume(&own).unwrap(),
        ..fit.clone()
    };
    messages.push(refused(&fit, &mut [&mut JsonLines::new(&log)]));
    assert_eq!(fs::read_to_string(&log).unwrap(), "my notes\n");
    insta::assert_snapshot!(messages.join("\n"), @r#"
callback EarlyStopping 2, train_begin: unknown metric "lost"; known: loss, accuracy, held_out/loss, held_out/accuracy; did you mean "loss"?
FOLDER/checkpoints/step-000000000012.safetensors: callback EarlyStopping: it waited for the lowest held_out/loss, and now for the highest held_out/accuracy (try: the same monitor, or a new training)
FOLDER/checkpoints/step-000000000012.safetensors: it has 12 steps, more than the 11 asked for
FOLDER/checkpoints/step-000000000012.safetensors: it has 12 steps, more than the 10 asked for
FOLDER/checkpoints/step-000000000012.safetensors: it was saved with 100 examples, batch size 24 and seed 7; this training has 100 examples, batch size 24 and seed 8
FOLDER/checkpoints/step-000000000012.safetensors: its epochs have 5 batches, those of this training 4
FOLDER/checkpoints/step-000000000012.safetensors is of step 12, and the trainer is at step 13 (try: Checkpoints::resume with this trainer, right before fit)
callback JsonLines, train_begin: FOLDER/notes.jsonl: line 1 is not of such a log (try: another file)
"#);
    // A state that no callback takes is said.
    let report = own.fit(&fit, &mut []).unwrap();
    assert_eq!(report.warnings.len(), 4, "{:?}", report.warnings);
    assert!(report.warnings[0].ends_with("no callback EarlyStopping to take its state"));
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
    // Its values are better than those of the first epoch, and worse than the file's.
    let own = with_rate(0.01.into());
    let resumed = checkpoints.resume(&own).unwrap();
    let mut again = ModelCheckpoint::best(Monitor::lowest("held_out/loss"), &path).weights_only();
    let again_fit = Fit {
        resumed,
        ..fit.clone()
    };
    let report = own.fit(&again_fit, &mut [&mut again]).unwrap();
    let last = report.epochs[2].held_out.as_ref().unwrap().loss();
    assert!(last > value.unwrap(), "{last}, {value:?}");
    assert!(fs::read(&path).unwrap() == bytes);
    assert_eq!(again.best_value(), value);
    // Another training does not take the file, nor the folder, nor a file by another value.
    let new = with_rate(0.1.into());
    let resumed = with_rate(0.1.into());
    let resumed_fit = Fit {
        resumed: checkpoints.resume(&resumed).unwrap(),
        ..fit.clone()
    };
    let refused = |trainer: &Trainer, callback: &mut dyn Callback, fit: &Fit| {
        let e = trainer.fit(fit, &mut [callback]).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidInput);
        e.to_string()
            .replace(&folder.path().display().to_string(), "FOLDER")
    };
    let mut by_accuracy = ModelCheckpoint::best(Monitor::highest("held_out/accuracy"), &path);
    let messages = [
        refused(&new, &mut best, &fit),
        refused(&new, &mut newest, &fit),
        refused(&resumed, &mut by_accuracy, &resumed_fit),
    ];
    insta::assert_snapshot!(messages.join("\n"), @r#"
callback ModelCheckpoint, train_begin: FOLDER/best.safetensors is the best of an earlier training (try: Fit::resumed continues it; another path begins a new one)
callback ModelCheckpoint, train_begin: FOLDER/all has checkpoints of an earlier training (try: Fit::resumed continues it; another path begins a new one)
callback ModelCheckpoint, train_begin: FOLDER/best.safetensors is no file of the highest held_out/accuracy: it has the lowest held_out/loss (try: another file)
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
        assert_eq!(evaluate(&other), evaluate(&own), "{weights:?}");
        // A whole checkpoint does, too.
        let whole = Checkpoints::new(folder.path().join("whole"), 1).unwrap();
        let position = gristmill::train::Position::start(&data, BATCH, 7);
        let path = whole.save(&own, &position).unwrap();
        let third = complete();
        third.load_weights(&path).unwrap();
        assert_eq!(evaluate(&third), evaluate(&own), "{weights:?}");
    }
    // Before the first step there are no averages: they are the weights, in files too.
    let (new, third) = (complete(), complete());
    let start = folder.path().join("start");
    let whole = Checkpoints::new(&start, 1).unwrap();
    let position = gristmill::train::Position::start(&data, BATCH, 7);
    let e = whole.save(&new, &position).unwrap_err().to_string();
    assert!(
        e.starts_with("variables have no values before the first step"),
        "{e}"
    );
    // A step that fails leaves them as they are at first.
    let nan = Tensor::from_slice(&[f32::NAN; 6], &[1, 6]).unwrap();
    let y = Tensor::from_slice(&[0i64], &[1]).unwrap();
    let failed = new.step([("x", nan), ("y", y)]).unwrap_err();
    assert_eq!(failed.kind(), ErrorKind::NotFinite);
    let path = whole.save(&new, &position).unwrap();
    third.load_weights(path).unwrap();
    let averages = third.evaluate_with(Weights::Averages, &held_out, BATCH);
    assert_eq!(averages.unwrap(), new.evaluate(&held_out, BATCH).unwrap());
    // A damaged file is passed over.
    fs::write(&latest, "half").unwrap();
    let before = latest_checkpoint(folder.path()).unwrap().unwrap();
    assert!(before.ends_with("weights-000000000010.safetensors"));
    let e = own.load_weights(&latest).unwrap_err().to_string();
    assert!(e.contains("weights-000000000015"), "{e}");
    let resumed = Checkpoints::new(folder.path(), 2).unwrap().resume(&own);
    assert_eq!(resumed.unwrap(), None);
    fs::write(&before, "half").unwrap();
    let e = latest_checkpoint(folder.path()).unwrap_err().to_string();
    assert!(e.starts_with("no checkpoint is whole"), "{e}");
}

#[test]
fn what_does_not_fit_is_refused_before_training() {
    let data = examples(40);
    let none = TensorDataset::new([("x", Tensor::zeros(gristmill::DType::F32, &[0, 6]).unwrap())]);
    let none = none.unwrap();
    let zeros = |shape: &[usize]| Tensor::zeros(gristmill::DType::F32, shape).unwrap();
    let unlabelled = TensorDataset::new([("x", zeros(&[9, 6]))]).unwrap();
    let narrow = TensorDataset::new([("x", zeros(&[9, 5])), ("y", zeros(&[9]))]).unwrap();
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
            Fit {
                steps: Some(1),
                ..short(&data)
            },
            &mut [&mut stopping(Monitor::lowest("loss"))],
        ),
        refused(
            Fit {
                held_out: Some(&data),
                evaluate: Every::Steps(3),
                ..short(&data)
            },
            &mut [&mut stopping(Monitor::lowest("held_out/loss"))],
        ),
        refused(
            Fit {
                held_out: Some(&unlabelled),
                ..short(&data)
            },
            &mut [],
        ),
        refused(
            Fit {
                held_out: Some(&narrow),
                ..short(&data)
            },
            &mut [],
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
held-out data: the data set has no example
evaluate every 0 steps: expected at least 1
callback EarlyStopping, train_begin: "held_out/loss" needs held-out data (try: Fit { held_out: Some(&data), .. })
callback EarlyStopping, train_begin: unknown metric "acuracy"; known: loss, accuracy; did you mean "accuracy"?
callback EarlyStopping, train_begin: patience 0: expected at least 1
callback EarlyStopping, train_begin: "loss" is first known after an epoch, and the training has 1 steps
callback EarlyStopping, train_begin: "held_out/loss" is first known after 3 steps, and the training has 2 steps
held-out data: input "y" (i64[batch]) is missing
held-out data: input "x": expected f32[batch, 6], got f32[9, 5]
callback ModelCheckpoint, train_begin: save every 0 epochs: expected at least 1
"#);
    assert_eq!(state(&own), before);
    // Averages that are not kept are asked for.
    let without = with_rate(0.1.into());
    let fit = Fit {
        held_out: Some(&data),
        weights: Weights::Averages,
        ..short(&data)
    };
    let e = without.fit(&fit, &mut []).unwrap_err().to_string();
    assert!(e.starts_with("training keeps no averages"), "{e}");
    assert_eq!(without.n_steps().unwrap(), 0);
    // Notes of a checkpoint are its own.
    let folder = tempfile::tempdir().unwrap();
    let facts = [("epoch", "3")].map(|(name, fact)| (name.to_owned(), fact.to_owned()));
    let checkpoints = Checkpoints::new(folder.path(), 2).unwrap();
    let checkpoints = checkpoints.with_facts(facts.into());
    let mut newest = ModelCheckpoint::newest(checkpoints, Every::Epochs(1));
    let e = own.fit(&short(&data), &mut [&mut newest]).unwrap_err();
    assert_eq!(
        e.to_string(),
        "checkpoints have a note \"epoch\" of their own (try: another name for this fact)"
    );
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
    assert_eq!(steps(1, Some(19)), (19, 3));
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
    fs::write(&log, "{}\n").unwrap();
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
