//! Event files: their numbers, what TensorBoard reads of them, logs that cannot be written.

use super::fit::AtStep;
use super::{examples, perceptron, state, trainer};
use gristmill::ir::{GraphBuilder, Op, ReduceKind, ScalarOp};
use gristmill::testing::Setup;
use gristmill::train::{
    Adam, Callback, Checkpoints, Dataset, EarlyStopping, EventLog, Every, Fit, FitContext,
    Histogram, Model, ModelCheckpoint, Monitor, Objective, Sgd, Summaries, TensorBoard, Trainer,
    Training, Update,
};
use gristmill::{DType, ErrorKind, Result, Tensor};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A file of this package.
fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

const BATCH: usize = 24;

fn fit<'d>(data: &'d dyn Dataset, held_out: &'d dyn Dataset) -> Fit<'d> {
    Fit {
        epochs: 2,
        seed: 7,
        held_out: Some(held_out),
        ..Fit::new(data, BATCH)
    }
}

/// Two epochs of five steps with a log of each second step, and histograms of each third.
fn logged(folder: &Path) -> Trainer {
    let (data, held_out) = (examples(100), examples(50));
    let own = trainer(Setup::default());
    let mut board = TensorBoard::new(folder)
        .scalars(Every::Steps(2))
        .summaries(Summaries::new(Every::Steps(3)));
    own.fit(&fit(&data, &held_out), &mut [&mut board]).unwrap();
    own
}

#[test]
fn a_log_has_the_numbers_of_shown_steps() {
    let folder = tempfile::tempdir().unwrap();
    logged(folder.path());
    let train = EventLog::read(folder.path().join("train")).unwrap();
    let mut text = String::new();
    for step in &train.steps {
        let scalars = step.scalars.iter().map(|(tag, _)| tag.as_str());
        let histograms = step.histograms.iter();
        let histograms = histograms.map(|(tag, h)| format!("[{tag} {}]", h.n));
        let numbers: Vec<String> = scalars.map(str::to_owned).chain(histograms).collect();
        text += &format!("step {}: {}\n", step.step, numbers.join(" "));
    }
    insta::assert_snapshot!(text, @r#"
step 2: loss accuracy optimizer/learning_rate examples_per_s optimizer/largest_gradient optimizer/norm
step 3: first/activations/sparsity first/weights/gradients/sparsity first/bias/gradients/sparsity first/scale/gradients/sparsity first/shift/gradients/sparsity second/weights/gradients/sparsity second/bias/gradients/sparsity first/weights/sparsity first/bias/sparsity first/scale/sparsity first/shift/sparsity second/weights/sparsity second/bias/sparsity [first/activations 384] [first/weights/gradients 96] [first/bias/gradients 16] [first/scale/gradients 16] [first/shift/gradients 16] [second/weights/gradients 48] [second/bias/gradients 3] [first/weights 96] [first/bias 16] [first/scale 16] [first/shift 16] [second/weights 48] [second/bias 3]
step 4: loss accuracy optimizer/learning_rate examples_per_s optimizer/largest_gradient optimizer/norm
step 5: loss accuracy optimizer/learning_rate examples_per_s optimizer/largest_gradient optimizer/norm
step 6: first/activations/sparsity first/weights/gradients/sparsity first/bias/gradients/sparsity first/scale/gradients/sparsity first/shift/gradients/sparsity second/weights/gradients/sparsity second/bias/gradients/sparsity first/weights/sparsity first/bias/sparsity first/scale/sparsity first/shift/sparsity second/weights/sparsity second/bias/sparsity [first/activations 384] [first/weights/gradients 96] [first/bias/gradients 16] [first/scale/gradients 16] [first/shift/gradients 16] [second/weights/gradients 48] [second/bias/gradients 3] [first/weights 96] [first/bias 16] [first/scale 16] [first/shift 16] [second/weights 48] [second/bias 3]
step 6: loss accuracy optimizer/learning_rate optimizer/largest_gradient optimizer/norm
step 8: loss accuracy optimizer/learning_rate examples_per_s optimizer/largest_gradient optimizer/norm
step 9: first/activations/sparsity first/weights/gradients/sparsity first/bias/gradients/sparsity first/scale/gradients/sparsity first/shift/gradients/sparsity second/weights/gradients/sparsity second/bias/gradients/sparsity first/weights/sparsity first/bias/sparsity first/scale/sparsity first/shift/sparsity second/weights/sparsity second/bias/sparsity [first/activations 384] [first/weights/gradients 96] [first/bias/gradients 16] [first/scale/gradients 16] [first/shift/gradients 16] [second/weights/gradients 48] [second/bias/gradients 3] [first/weights 96] [first/bias 16] [first/scale 16] [first/shift 16] [second/weights 48] [second/bias 3]
step 10: loss accuracy optimizer/learning_rate examples_per_s optimizer/largest_gradient optimizer/norm
"#);
    let validation = EventLog::read(folder.path().join("validation")).unwrap();
    let steps: Vec<u64> = validation.steps.iter().map(|s| s.step).collect();
    assert_eq!(steps, [5, 10]);
    assert!(validation.nodes.is_empty());
    // The curve is that of the steps.
    let plain = trainer(Setup::default());
    let data = examples(100);
    let mut losses = Vec::new();
    for epoch in 0..2 {
        for batch in data.shuffled(BATCH, 7, epoch) {
            losses.push(plain.step(batch.unwrap()).unwrap().loss as f32);
        }
    }
    let expected = [2, 4, 5, 6, 8, 10].map(|n| (n as u64, losses[n - 1]));
    assert_eq!(train.scalar("loss"), expected);
}

#[test]
fn a_graph_has_nodes_by_scope() {
    let folder = tempfile::tempdir().unwrap();
    logged(folder.path());
    let nodes = EventLog::read(folder.path().join("train")).unwrap().nodes;
    let has = |name: &str| nodes.iter().any(|node| node == name);
    for name in [
        "x",
        "first/weights",
        "first/weights/assign",
        "outputs/loss",
        "outputs/optimizer/step",
    ] {
        assert!(has(name), "{name} of {nodes:?}");
    }
    let within = |scope: &str| nodes.iter().filter(|n| n.starts_with(scope)).count();
    assert!(
        within("first/") > 5 && within("gradients/") > 5,
        "{nodes:?}"
    );
    let mut names = nodes.clone();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), nodes.len());
}

/// Checks a histogram of numbers that are known up to rounding.
fn check(tag: &str, h: &Histogram, values: &[f64]) {
    let near = |name: &str, found: f64, expected: f64, size: f64| {
        let is_near = (found - expected).abs() <= 1e-4 * size;
        assert!(is_near, "{name} of {tag}: {found}, expected {expected}");
    };
    let size: f64 = values.iter().map(|x| x.abs()).sum();
    assert_eq!(h.n, values.len() as u64, "{tag}");
    near("sum", h.sum, values.iter().sum(), size);
    let squares: f64 = values.iter().map(|x| x * x).sum();
    near("squares", h.sum_of_squares, squares, 2.0 * squares);
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    let greatest = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    near("min", h.min, least, size);
    near("max", h.max, greatest, size);
    assert_eq!(h.buckets.iter().map(|(_, n)| n).sum::<u64>(), h.n, "{tag}");
    // As many numbers below each limit, those next to it apart.
    let mut below = 0;
    for (limit, n) in &h.buckets {
        below += n;
        let count = |limit: f64| values.iter().filter(|x| **x <= limit).count() as u64;
        let (least, most) = (limit - 1e-4 * size, limit + 1e-4 * size);
        assert!(
            (count(least)..=count(most)).contains(&below),
            "{tag} below {limit}"
        );
    }
}

#[test]
fn histograms_are_of_the_values_at_the_beginning_of_a_step() {
    let folder = tempfile::tempdir().unwrap();
    let (data, held_out) = (examples(100), examples(50));
    let sgd = Sgd {
        learning_rate: 0.5.into(),
        ..Sgd::default()
    };
    let training = Training {
        seed: 5,
        ..Training::from(sgd)
    };
    let new = || Trainer::new("perceptron", &training, perceptron).unwrap();
    let (own, plain) = (new(), new());
    let mut board = TensorBoard::new(folder.path()).summaries(Summaries::new(Every::Steps(1)));
    own.fit(&fit(&data, &held_out), &mut [&mut board]).unwrap();
    let log = EventLog::read(folder.path().join("train")).unwrap();
    let logged = |n: u64, tag: &str| {
        let mut steps = log.steps.iter().filter(|s| s.step == n);
        let found = steps.find_map(|s| s.histograms.iter().find(|(own, _)| own == tag));
        found.unwrap_or_else(|| panic!("no {tag}")).1.clone()
    };
    let mut batches = data.shuffled(BATCH, 7, 0);
    for n in 1..=5 {
        // The first step's initial values are there before it.
        assert_eq!(logged(n, "first/weights").n, 96);
        let names = plain.variables().to_vec();
        let values = || -> Vec<Vec<f64>> {
            let value = |name: &String| plain.value(name).unwrap().unwrap().to_f64s();
            names.iter().map(value).collect()
        };
        let before = if n == 1 { None } else { Some(values()) };
        plain.step(batches.next().unwrap().unwrap()).unwrap();
        let Some(before) = before else {
            continue;
        };
        for ((name, old), new) in names.iter().zip(&before).zip(values()) {
            check(name, &logged(n, name), old);
            let gradients: Vec<f64> = old.iter().zip(new).map(|(a, b)| (a - b) / 0.5).collect();
            // Biases before a batch normalisation have none but rounding.
            if name != "first/bias" {
                let tag = format!("{name}/gradients");
                check(&tag, &logged(n, &tag), &gradients);
            }
        }
    }
    let activations = logged(1, "first/activations");
    assert!(activations.min >= -1.0 && activations.max <= 1.0);
    assert_eq!(activations.n, (BATCH * 16) as u64);
}

#[test]
fn a_log_changes_no_bit_of_a_training() {
    let folder = tempfile::tempdir().unwrap();
    let (data, held_out) = (examples(100), examples(50));
    let plain = trainer(Setup::default());
    plain.fit(&fit(&data, &held_out), &mut []).unwrap();
    assert_eq!(state(&logged(folder.path())), state(&plain));
}

#[test]
fn tensorboard_reads_the_same_numbers() {
    let root = file("../.venv/bin/python");
    let pythons = [root.to_str().unwrap(), "python3"];
    let has_reader = |python: &&str| {
        let reader = "from tensorboard.backend.event_processing import event_accumulator";
        let output = Command::new(python).args(["-c", reader]).output();
        output.is_ok_and(|output| output.status.success())
    };
    let Some(python) = pythons.into_iter().find(has_reader) else {
        println!("left out: Python with TensorBoard");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    logged(folder.path());
    for run in ["train", "validation"] {
        let folder = folder.path().join(run);
        let log = EventLog::read(&folder).unwrap();
        let mut expected: Vec<String> = Vec::new();
        for step in &log.steps {
            for (tag, x) in &step.scalars {
                expected.push(format!("scalar {tag} {} {:?}", step.step, f64::from(*x)));
            }
            for (tag, h) in &step.histograms {
                let limits: Vec<String> = h.buckets.iter().map(|b| format!("{:?}", b.0)).collect();
                let counts: Vec<String> = h.buckets.iter().map(|b| format!("{}.0", b.1)).collect();
                let (n, limits, counts) = (step.step, limits.join(","), counts.join(","));
                let ends = format!("{}.0 {:?} {:?}", h.n, h.min, h.max);
                expected.push(format!("histogram {tag} {n} {ends} {limits} {counts}"));
            }
        }
        if !log.nodes.is_empty() {
            expected.push(format!("nodes {}", log.nodes.len()));
        }
        let script = file("python/read_events.py");
        let output = Command::new(python)
            .arg(script)
            .arg(&folder)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let mut found: Vec<&str> = said.lines().collect();
        assert!(
            !found.is_empty(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        found.sort_unstable();
        expected.sort_unstable();
        // The two languages write small and large numbers in two ways.
        let words = |line: &str| -> Vec<String> {
            let word = |word: &str| match word.parse::<f64>() {
                Ok(x) => x.to_string(),
                Err(_) => word.to_owned(),
            };
            line.split([' ', ',']).map(word).collect()
        };
        let found: Vec<_> = found.into_iter().map(words).collect();
        let expected: Vec<_> = expected.iter().map(|line| words(line)).collect();
        assert_eq!(found, expected);
    }
}

/// The file of a run.
fn file_of(run: &Path) -> PathBuf {
    let mut files = fs::read_dir(run).unwrap();
    files.next().unwrap().unwrap().path()
}

#[test]
fn logs_that_do_not_fit_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let (data, held_out) = (examples(100), examples(50));
    let own = trainer(Setup::default());
    let refused = |board: TensorBoard| {
        let (mut board, before) = (board, state(&own));
        let callback: &mut dyn Callback = &mut board;
        let e = own
            .fit(&fit(&data, &held_out), &mut [callback])
            .unwrap_err();
        assert_eq!(state(&own), before);
        e.to_string()
            .replace(&folder.path().display().to_string(), "FOLDER")
    };
    fs::write(at("file"), "").unwrap();
    logged(&at("log"));
    let event_file = file_of(&at("log/train"));
    let name = event_file.file_name().unwrap().to_str().unwrap().to_owned();
    let scopes = Summaries {
        scopes: vec!["first".to_owned(), "firs".to_owned()],
        ..Summaries::new(Every::Steps(1))
    };
    let messages = [
        refused(TensorBoard::new(at("file"))),
        refused(TensorBoard::new(at("log"))).replace(&name, "FILE"),
        refused(TensorBoard::new(at("new")).summaries(scopes)),
        refused(TensorBoard::new(at("new")).scalars(Every::Steps(0))),
        refused(TensorBoard::new(at("new")).summaries(Summaries::new(Every::Epochs(0)))),
    ];
    assert!(!at("new").exists());
    insta::assert_snapshot!(messages.join("\n"), @r#"
callback TensorBoard, train_begin: FOLDER/file is a file (try: a folder for the log)
callback TensorBoard, train_begin: FOLDER/log/train/FILE is of an earlier training (try: another folder for the log, or remove this one)
callback TensorBoard, train_begin: summaries: nothing to show is within the scope "firs" (try: the scope of a trainable variable or of Model::collect("summaries", ..))
callback TensorBoard, train_begin: scalars every 0 steps: expected at least 1
callback TensorBoard, train_begin: summaries every 0 epochs: expected at least 1
"#);
    // A record in the middle that changed.
    let mut bytes = fs::read(&event_file).unwrap();
    bytes[100] ^= 1;
    fs::write(&event_file, &bytes).unwrap();
    let e = EventLog::read(at("log/train")).unwrap_err().to_string();
    assert!(e.contains(" is damaged (try: "), "{e}");
    let empty = EventLog::read(at("nothing")).unwrap();
    assert_eq!(empty, EventLog::default());
}

/// The checkpoint of step 3, in a folder with the log `own` of 5 steps.
fn checkpoints(folder: &Path) -> Checkpoints {
    let (data, held_out) = (examples(100), examples(50));
    let checkpoints = Checkpoints::new(folder.join("checkpoints"), 1).unwrap();
    let mut newest = ModelCheckpoint::newest(checkpoints.clone(), Every::Steps(3));
    let mut board = TensorBoard::new(folder.join("own")).scalars(Every::Steps(2));
    let first = Fit {
        epochs: 1,
        ..fit(&data, &held_out)
    };
    let own = trainer(Setup::default());
    own.fit(&first, &mut [&mut board, &mut newest]).unwrap();
    checkpoints
}

/// Trains on from step 3 with a log in a folder.
fn goes_on(checkpoints: &Checkpoints, log: &Path) -> Result<Vec<String>> {
    let (data, held_out) = (examples(100), examples(50));
    let own = trainer(Setup::default());
    let fit = Fit {
        resumed: checkpoints.resume(&own)?,
        ..fit(&data, &held_out)
    };
    let mut board = TensorBoard::new(log).scalars(Every::Steps(2));
    Ok(own.fit(&fit, &mut [&mut board])?.warnings)
}

/// The only file of a run.
fn bytes(log: &Path, run: &str) -> Vec<u8> {
    fs::read(file_of(&log.join(run))).unwrap()
}

#[test]
fn a_training_goes_on_in_its_own_log_or_a_new_one() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let steps = |name: &str, run: &str| -> Vec<u64> {
        let log = EventLog::read(at(name).join(run)).unwrap();
        let loss = log.scalar("loss").into_iter();
        loss.map(|(step, _)| step).collect()
    };
    let saved = checkpoints(folder.path());
    goes_on(&saved, &at("new")).unwrap();
    assert_eq!(steps("new", "train"), [4, 5, 6, 8, 10]);
    let log = EventLog::read(at("new/train")).unwrap();
    assert!(!log.nodes.is_empty());
    // A crash has left half a record.
    assert_eq!(steps("own", "train"), [2, 4, 5]);
    let own = bytes(&at("own"), "train");
    fs::write(file_of(&at("own/train")), &own[..own.len() - 7]).unwrap();
    goes_on(&saved, &at("own")).unwrap();
    assert_eq!(steps("own", "train"), [2, 4, 5, 6, 8, 10]);
    assert_eq!(steps("own", "validation"), [5, 10]);
    assert_eq!(fs::read_dir(at("own/train")).unwrap().count(), 2);
    // Once more: the checkpoint's first loss is still the log's. Without any loss, too, as after a loss of power.
    goes_on(&saved, &at("own")).unwrap();
    assert_eq!(steps("own", "train"), [2, 4, 5, 6, 8, 10]);
    for file in fs::read_dir(at("own/train")).unwrap() {
        fs::write(file.unwrap().path(), "").unwrap();
    }
    goes_on(&saved, &at("own")).unwrap();
    assert_eq!(steps("own", "train"), [4, 5, 6, 8, 10]);
}

#[test]
fn a_log_of_another_training_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let saved = checkpoints(folder.path());
    let (data, held_out) = (examples(100), examples(50));
    let log = |name: &str, training: &Training| {
        let other = Trainer::new("perceptron", training, perceptron).unwrap();
        let mut board = TensorBoard::new(at(name)).scalars(Every::Steps(2));
        other
            .fit(&fit(&data, &held_out), &mut [&mut board])
            .unwrap();
    };
    // Without averages; another seed; from another program.
    log("state", &Training::from(Sgd::default()));
    let update = Update {
        clip_norm: Some(1.0),
        average: Some(0.9),
        ..Adam::default().into()
    };
    log(
        "seed",
        &Training {
            seed: 6,
            ..Training::from(update)
        },
    );
    fs::create_dir_all(at("strange/train")).unwrap();
    fs::write(at("strange/train/events.out.tfevents.1.host"), "?").unwrap();
    for log in ["state", "seed", "strange"] {
        let before = bytes(&at(log), "train");
        let e = goes_on(&saved, &at(log)).unwrap_err().to_string();
        assert!(
            e.contains("is of another training (try: go on with the folder"),
            "{e}"
        );
        assert_eq!(bytes(&at(log), "train"), before);
    }
}

#[test]
fn a_refused_training_leaves_every_log_as_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let saved = checkpoints(folder.path());
    let (data, held_out) = (examples(100), examples(50));
    let own = trainer(Setup::default());
    let mut wrong = EarlyStopping::new(Monitor::lowest("lost"), 3);
    let mut board = TensorBoard::new(at("new"));
    let refused = own.fit(&fit(&data, &held_out), &mut [&mut board, &mut wrong]);
    assert!(refused.unwrap_err().to_string().contains("lost"));
    assert!(!at("new").exists());
    // Records after the checkpoint, which a training that goes on removes.
    let before = [bytes(&at("own"), "train"), bytes(&at("own"), "validation")];
    let fit = Fit {
        resumed: saved.resume(&own).unwrap(),
        ..fit(&data, &held_out)
    };
    let mut board = TensorBoard::new(at("own"));
    own.fit(&fit, &mut [&mut board, &mut wrong]).unwrap_err();
    let strange = at("own/validation/events.out.tfevents.2.host");
    fs::write(&strange, "?").unwrap();
    goes_on(&saved, &at("own")).unwrap_err();
    fs::remove_file(strange).unwrap();
    let after = [bytes(&at("own"), "train"), bytes(&at("own"), "validation")];
    assert_eq!(after, before);
    // A damaged record of a step before the checkpoint.
    let path = file_of(&at("own/train"));
    let mut changed = before[0].clone();
    changed[200] ^= 1;
    fs::write(&path, &changed).unwrap();
    let e = goes_on(&saved, &at("own")).unwrap_err().to_string();
    assert!(e.contains("is damaged (try: remove the file"), "{e}");
    assert_eq!(bytes(&at("own"), "train"), changed);
}

#[test]
fn a_log_has_one_writer() {
    let folder = tempfile::tempdir().unwrap();
    let (data, held_out) = (examples(100), examples(50));
    let own = trainer(Setup::default());
    let saved = Checkpoints::new(folder.path().join("checkpoints"), 1).unwrap();
    let mut newest = ModelCheckpoint::newest(saved.clone(), Every::Steps(1));
    let log = folder.path().join("log");
    let messages = std::cell::RefCell::new(Vec::new());
    let mut nested = AtStep(|cx: &mut FitContext| {
        if cx.step() == 3 {
            let second = trainer(Setup::default());
            let fit = Fit {
                resumed: saved.resume(&second)?,
                ..fit(&data, &held_out)
            };
            let mut board = TensorBoard::new(&log).scalars(Every::Steps(1));
            let e = second.fit(&fit, &mut [&mut board]).unwrap_err();
            messages.borrow_mut().push(e.to_string());
        }
        Ok(())
    });
    let mut board = TensorBoard::new(&log).scalars(Every::Steps(1));
    own.fit(
        &fit(&data, &held_out),
        &mut [&mut board, &mut newest, &mut nested],
    )
    .unwrap();
    let said = messages.borrow().join("\n");
    assert!(
        said.contains("another training writes to this log"),
        "{said}"
    );
    assert_eq!(
        EventLog::read(log.join("train"))
            .unwrap()
            .scalar("loss")
            .len(),
        10
    );
}

/// A model with dropout and a branch, whose values are shown.
fn branching(m: &mut Model, reads: bool) -> Result<Objective> {
    let objective = perceptron(m)?;
    let b = m.builder();
    let one = b.scalar(DType::F32, 1.0);
    let ones = b.broadcast(one, [512])?;
    let dropped = m.scope("dropped", |m| {
        let dropped = m.dropout(ones, 0.5)?;
        m.collect("summaries", dropped)?;
        Ok(dropped)
    })?;
    let kept = m.builder().reduce(ReduceKind::Mean, dropped, &[0], false)?;
    let b = m.builder();
    let count = b.variable("count", Tensor::scalar(0f32))?;
    let next = b.add_(count, one)?;
    let next = b.assign_variable("count", next)?;
    m.scope("count", |m| m.collect("summaries", next))?;
    if reads {
        let b = m.builder();
        let zero = b.scalar(DType::F32, 0.0);
        let is_late = b.map(ScalarOp::Gt, &[next, zero])?;
        let branch = |reads: bool| {
            let mut inner = GraphBuilder::new("branch");
            let y = match reads {
                true => inner.variable("count", Tensor::scalar(0f32))?,
                false => inner.scalar(DType::F32, -1.0),
            };
            inner.output("y", y);
            inner.finish()
        };
        let branches = vec![branch(true)?, branch(false)?];
        let y = b.add_with_regions(Op::If, &[is_late], branches)?[0];
        m.scope("branch", |m| m.collect("summaries", y))?;
    }
    Ok(objective.metric("kept", kept))
}

#[test]
fn shown_values_are_those_of_the_step() {
    let folder = tempfile::tempdir().unwrap();
    let data = examples(100);
    let training = Training {
        seed: 5,
        ..Training::from(Sgd::default())
    };
    let own = Trainer::new("branching", &training, |m| branching(m, false)).unwrap();
    let summaries = Summaries {
        scopes: vec!["dropped".into(), "count".into()],
        weights: false,
        ..Summaries::new(Every::Steps(1))
    };
    let mut board = TensorBoard::new(folder.path())
        .scalars(Every::Steps(1))
        .summaries(summaries.clone());
    own.fit(&Fit::new(&data, BATCH), &mut [&mut board]).unwrap();
    let log = EventLog::read(folder.path().join("train")).unwrap();
    let kept = log.scalar("kept");
    assert_eq!(kept.len(), 5);
    let shown = |tag: &str| -> Vec<f64> {
        let all = log.steps.iter().flat_map(|s| &s.histograms);
        let own = all.filter(|(own, _)| own == tag);
        own.map(|(_, h)| h.sum / h.n as f64).collect()
    };
    let kept: Vec<f64> = kept.into_iter().map(|(_, x)| x.into()).collect();
    assert_eq!(shown("dropped/activations"), kept);
    assert_eq!(shown("count/activations"), [1.0, 2.0, 3.0, 4.0, 5.0]);
    // A branch that reads what was assigned would show an older value.
    let own = Trainer::new("branching", &training, |m| branching(m, true)).unwrap();
    let mut board = TensorBoard::new(folder.path().join("b")).summaries(summaries);
    let e = own
        .fit(&Fit::new(&data, BATCH), &mut [&mut board])
        .unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Unsupported);
    assert!(
        e.to_string().contains("depends on assigned variables"),
        "{e}"
    );
}

#[test]
fn an_unfinished_record_is_left_out() {
    let folder = tempfile::tempdir().unwrap();
    logged(folder.path());
    let run = folder.path().join("train");
    let (whole, file) = (EventLog::read(&run).unwrap(), file_of(&run));
    let bytes = fs::read(&file).unwrap();
    let n = whole.steps.len();
    for (left, expected) in [(1, n - 1), (3, n - 1), (40, n - 1)] {
        fs::write(&file, &bytes[..bytes.len() - left]).unwrap();
        let log = EventLog::read(&run).unwrap();
        assert_eq!(log.steps, whole.steps[..expected]);
    }
}

#[test]
fn values_that_are_not_finite_are_warned_of_once() {
    let folder = tempfile::tempdir().unwrap();
    let data = examples(100);
    let training = Training {
        seed: 5,
        ..Training::from(Sgd::default())
    };
    let own = Trainer::new("perceptron", &training, |m| {
        let objective = perceptron(m)?;
        let one = m
            .builder()
            .constant(Tensor::from_slice(&[1f32, 0.0, f32::NAN], &[3])?);
        m.collect("summaries", one)?;
        Ok(objective)
    });
    let own = own.unwrap();
    let summaries = Summaries {
        gradients: false,
        weights: false,
        ..Summaries::new(Every::Steps(2))
    };
    let mut board = TensorBoard::new(folder.path()).summaries(summaries);
    let report = own.fit(&Fit::new(&data, BATCH), &mut [&mut board]).unwrap();
    let warning = "activations: 1 element NaN or infinite in step 2; its histograms leave them out";
    assert_eq!(report.warnings, [warning]);
    let log = EventLog::read(folder.path().join("train")).unwrap();
    let sparsity = [2, 4].map(|n| (n, 1f32 / 3.0));
    assert_eq!(log.scalar("activations/sparsity"), sparsity);
    assert!(!folder.path().join("validation").exists());
}
