//! `train`: models that go on learning, interrupted, killed and resumed; what is wrong with data and flags.

use super::{data, run};
use crate::process::{Ended, Start, gristmill, start};
use gristmill::train::EventLog;
use gristmill::{DType, Tensor, write_npz};
use std::fs;
use std::path::Path;

/// The arguments of a training of the digits.
fn digits<'a>(model: &'a str, train: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let args = [
        "train", model, "--data", train, "--batch", "64", "--lr", "3e-4",
    ];
    let out = ["-o", "out.onnx", "--threads", "1"];
    [&args[..], &out, more].concat()
}

fn train(folder: &Path, more: &[&str]) -> Ended {
    let (model, examples) = (data("digits/model.onnx"), data("digits/train.npz"));
    gristmill(folder, &digits(&model, &examples, more))
}

#[test]
fn a_model_learns_and_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let held_out = data("digits/held_out.npz");
    let ended = train(folder.path(), &["--eval", &held_out, "--epochs", "2"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let lines: Vec<&str> = ended.stdout.lines().collect();
    assert!(lines[0].starts_with("epoch 1/2: loss 0."), "{}", lines[0]);
    assert!(lines[1].contains("held out: loss 0."), "{}", lines[1]);
    let end = "out.onnx: trained 10 tensors (9,394 parameters) in ";
    assert!(lines[2].starts_with(end), "{}", lines[2]);
    assert!(
        ended
            .stderr
            .contains("image: values of u8 are taken as f32"),
        "{}",
        ended.stderr
    );
    let (images, labels) = (data("digits/batch.npz"), data("digits/labels.npy"));
    let args = ["run", "out.onnx", "--inputs", &images, "--labels", &labels];
    let ended = gristmill(folder.path(), &args);
    // The figure of the last epoch, `accuracy 0.9889` of 360, holds for the file.
    let said = lines[1].split("held out: ").nth(1).unwrap();
    let said = said.split("accuracy 0.").nth(1).unwrap();
    let (whole, part) = (&said[..2], &said[2..4]);
    let accuracy = format!("accuracy {whole}.{part} %");
    assert!(
        ended.stdout.contains(&accuracy),
        "{accuracy}: {}{}",
        ended.stdout,
        ended.stderr
    );
}

#[test]
fn a_fixed_batch_leaves_out_a_rest() {
    let folder = tempfile::tempdir().unwrap();
    let ended = train(folder.path(), &["--set", "batch=64"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let left = "so each epoch leaves out 29 examples";
    assert!(ended.stderr.contains(left), "{}", ended.stderr);
    // 16 at once, four times for a step.
    let more = ["--set", "batch=16", "--accumulate", "4", "--json"];
    let ended = train(folder.path(), &more);
    assert!(ended.stderr.contains(left), "{}", ended.stderr);
    let value: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!((&value["steps"], &value["batch"]), (&22.into(), &64.into()));
    let ended = train(folder.path(), &["--set", "batch=16", "--accumulate", "3"]);
    let said = "16 examples at once, so --accumulate 3 takes 48 (try: --batch 48)";
    assert!(ended.stderr.contains(said), "{}", ended.stderr);
}

#[test]
fn json_has_every_epoch() {
    let folder = tempfile::tempdir().unwrap();
    let ended = train(
        folder.path(),
        &[
            "--json",
            "--epochs",
            "2",
            "--optimizer",
            "sgd",
            "--momentum",
            "0.9",
            "--schedule",
            "cosine",
            "--warmup",
            "3",
        ],
    );
    let value: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(value["format"], "gristmill/train/1");
    assert_eq!(
        (&value["steps"], &value["interrupted"]),
        (&46.into(), &false.into())
    );
    assert_eq!(value["epochs"].as_array().unwrap().len(), 2);
    assert_eq!(value["weights"].as_array().unwrap().len(), 10);
}

#[test]
fn every_optimiser_learns() {
    let choices = [
        "adamw",
        "sgd --momentum 0.9",
        "rmsprop --momentum 0.5",
        "adagrad",
    ];
    for choice in choices {
        let folder = tempfile::tempdir().unwrap();
        let flags = format!("--json --epochs 2 --weight-decay 1e-4 --optimizer {choice}");
        let ended = train(folder.path(), &flags.split(' ').collect::<Vec<_>>());
        assert_eq!(ended.code, Some(0), "{choice}: {}", ended.stderr);
        let value: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
        let losses: Vec<f64> = (0..2)
            .map(|i| value["epochs"][i]["trained"]["loss"].as_f64().unwrap())
            .collect();
        assert!(losses[1] < losses[0], "{choice}: {losses:?}");
    }
}

#[test]
fn a_training_goes_on_with_the_same_label_smoothing_only() {
    let folder = tempfile::tempdir().unwrap();
    let run = |checkpoints: &str, flags: &str| {
        let flags = format!("--checkpoint-dir {checkpoints} {flags}");
        train(folder.path(), &flags.split(' ').collect::<Vec<_>>())
    };
    let ended = run("smoothed", "--label-smoothing 0.1");
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let ended = run("plain", "--epochs 1");
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let smoothed = "cross-entropy with label smoothing 0.1";
    let cases = [
        ("smoothed", "0", smoothed, "cross-entropy"),
        (
            "smoothed",
            "0.2",
            smoothed,
            "cross-entropy with label smoothing 0.2",
        ),
        ("plain", "0.1", "cross-entropy", smoothed),
    ];
    for (checkpoints, smoothing, there, here) in cases {
        let flags = format!("--epochs 2 --resume --label-smoothing {smoothing}");
        let ended = run(checkpoints, &flags);
        assert_eq!(ended.code, Some(2), "{}", ended.stderr);
        let expected = format!("loss was {there}, here it is {here} (try");
        assert!(ended.stderr.contains(&expected), "{}", ended.stderr);
    }
    let ended = run("smoothed", "--epochs 2 --resume --label-smoothing 0.1");
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
}

#[test]
fn huber_loss_is_between_both_errors() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("train.npz");
    let images = Tensor::zeros(DType::F32, &[4, 1, 8, 8]).unwrap();
    let labels: Vec<f32> = (0..40).map(|i| (i % 7) as f32 - 3.0).collect();
    let labels = Tensor::from_slice(&labels, &[4, 10]).unwrap();
    write_npz(&path, [("image", &images), ("label", &labels)]).unwrap();
    let model = data("digits/model.onnx");
    let loss = |flags: &str| {
        let flags = format!("train {model} --data train.npz -o out.onnx --json --loss {flags}");
        let ended = gristmill(folder.path(), &flags.split(' ').collect::<Vec<_>>());
        assert_eq!(ended.code, Some(0), "{flags}: {}", ended.stderr);
        let value: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
        value["epochs"][0]["trained"]["loss"].as_f64().unwrap()
    };
    let (mse, mae) = (loss("mse"), loss("mae"));
    let near = |x: f64, y: f64| assert!((x - y).abs() <= 1e-4 * y, "{x} {y}");
    near(loss("huber --huber-delta 100"), mse / 2.0);
    near(loss("huber --huber-delta 1e-6"), mae * 1e-6);
    let middle = loss("huber");
    assert!(mae - 0.5 < middle && middle < mae, "{middle} {mae}");
}

/// Bytes of the model that a training of four epochs writes.
fn whole(folder: &Path) -> Vec<u8> {
    let ended = train(folder, &["--epochs", "4"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    fs::read(folder.join("out.onnx")).unwrap()
}

#[test]
fn a_training_goes_on_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    let whole = whole(folder.path());
    let kept = ["--checkpoint-dir", "kept", "--keep-checkpoints", "1"];
    let ended = train(folder.path(), &[&kept[..], &["--epochs", "2"]].concat());
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert_eq!(fs::read_dir(folder.path().join("kept")).unwrap().count(), 1);
    let ended = train(
        folder.path(),
        &[&kept[..], &["--epochs", "4", "--resume"]].concat(),
    );
    assert!(ended.stderr.contains("after 46 steps"), "{}", ended.stderr);
    assert_eq!(ended.stdout.lines().count(), 3, "{}", ended.stdout);
    assert!(fs::read(folder.path().join("out.onnx")).unwrap() == whole);
    let ended = train(
        folder.path(),
        &[&kept[..], &["--resume", "--seed", "1"]].concat(),
    );
    assert_eq!(ended.code, Some(2));
    assert!(
        ended.stderr.contains("seed 0; this training has"),
        "{}",
        ended.stderr
    );
    let args = [&kept[..], &["--resume", "--optimizer", "sgd"]].concat();
    let ended = train(folder.path(), &args);
    assert!(
        ended.stderr.contains("of another model or optimiser"),
        "{}",
        ended.stderr
    );
}

/// Runs a training under a shell that does something to it.
fn disturbed(folder: &Path, shell: &str, more: &[&str]) -> Ended {
    let (model, examples) = (data("digits/model.onnx"), data("digits/train.npz"));
    let how = Start {
        folder,
        shell,
        ..Start::default()
    };
    start(how, &digits(&model, &examples, more))
}

#[cfg(unix)]
#[test]
fn an_interrupt_ends_after_the_step_with_a_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let whole = whole(folder.path());
    fs::remove_file(folder.path().join("out.onnx")).unwrap();
    let shell = "(sleep 1.5; kill -INT $$) &";
    let ended = disturbed(folder.path(), shell, &["--epochs", "1000000"]);
    assert_eq!(ended.code, Some(130), "{}{}", ended.stdout, ended.stderr);
    assert!(
        ended
            .stderr
            .contains("--resume continues from out.onnx.checkpoints"),
        "{}",
        ended.stderr
    );
    assert!(!folder.path().join("out.onnx").exists());
    // As many steps give the same file; more than are asked for are not taken back.
    let ended = train(folder.path(), &["--epochs", "4", "--resume"]);
    match ended.code {
        Some(0) => assert!(fs::read(folder.path().join("out.onnx")).unwrap() == whole),
        _ => assert!(
            ended.stderr.contains("more than the 92 asked for"),
            "{}",
            ended.stderr
        ),
    }
}

#[cfg(unix)]
fn has_checkpoint(folder: &Path) -> bool {
    let names = fs::read_dir(folder).into_iter().flatten();
    let mut names = names.map(|e| e.unwrap().file_name());
    names.any(|name| name.to_str().unwrap().starts_with("step-"))
}

/// Kills trainings that write checkpoints after every epoch of one step, after `ms` milliseconds each; gives how many had come to a checkpoint.
#[cfg(unix)]
fn killed(moments: impl Iterator<Item = u64>) -> usize {
    let folder = tempfile::tempdir().unwrap();
    let kept = folder.path().join("kept");
    let args = [
        "--checkpoint-dir",
        "kept",
        "--batch",
        "1437",
        "--trainable",
        "16",
    ];
    let mut n_resumed = 0;
    for ms in moments {
        let has_one = has_checkpoint(&kept);
        let shell = format!("(sleep {}; kill -9 $$) &", ms as f64 / 1000.0);
        let resume: &[&str] = if has_one { &["--resume"] } else { &[] };
        let (model, examples) = (data("digits/model.onnx"), data("digits/train.npz"));
        let all = [
            "train", &model, "--data", &examples, "-o", "out.onnx", "--epochs", "1000000",
        ];
        let how = Start {
            folder: folder.path(),
            shell: &shell,
            ..Start::default()
        };
        let ended = start(how, &[&all[..], &args, resume].concat());
        assert_eq!(ended.code, None, "{}", ended.stderr);
        let is_whole = !ended.stderr.contains("warning") && !ended.stderr.contains("error");
        assert!(is_whole, "{ms} ms: {}", ended.stderr);
        n_resumed += usize::from(ended.stderr.contains("resuming from"));
    }
    n_resumed
}

#[cfg(unix)]
#[test]
fn checkpoints_are_whole_whenever_the_process_is_killed() {
    // 200 were tried by hand.
    let n = killed((0..8).map(|i| 700 + 37 * i));
    assert!(n > 4, "{n} of 8 went on");
}

#[cfg(unix)]
#[test]
fn a_full_disk_loses_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let kept = ["--checkpoint-dir", "kept"];
    let ended = train(folder.path(), &kept);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let model = fs::read(folder.path().join("out.onnx")).unwrap();
    let shell = "trap '' XFSZ; ulimit -f 16";
    let more = [&kept[..], &["--resume", "--epochs", "2"]].concat();
    let ended = disturbed(folder.path(), shell, &more);
    assert_eq!(ended.code, Some(2), "{}{}", ended.stdout, ended.stderr);
    assert!(
        ended.stderr.contains("step-000000000046.safetensors"),
        "{}",
        ended.stderr
    );
    let names = fs::read_dir(folder.path().join("kept")).unwrap();
    let names: Vec<_> = names.map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names, ["step-000000000023.safetensors"]);
    assert!(fs::read(folder.path().join("out.onnx")).unwrap() == model);
}

/// The error of a training with these examples.
fn refused(image: &[usize], labels: Tensor, more: &[&str]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("train.npz");
    let images = Tensor::zeros(DType::F32, image).unwrap();
    write_npz(&path, [("image", &images), ("label", &labels)]).unwrap();
    let model = data("digits/model.onnx");
    let args = ["train", &model, "--data", "train.npz", "-o", "out.onnx"];
    let ended = gristmill(folder.path(), &[&args[..], more].concat());
    assert_eq!(ended.code, Some(2), "{}{}", ended.stdout, ended.stderr);
    assert!(!folder.path().join("out.onnx").exists());
    ended.stderr
}

#[test]
fn data_that_do_not_fit_are_refused_before_the_first_step() {
    let labels = |n: usize, label: i64| Tensor::from_slice(&vec![label; n], &[n]).unwrap();
    let check = |image: &[usize], labels: Tensor, more: &[&str], expected: &str| {
        let error = refused(image, labels, more);
        assert!(error.contains(expected), "{expected}: {error}");
    };
    check(
        &[4, 1, 8, 9],
        labels(4, 1),
        &[],
        "expected rows of f32[batch, 1, 8, 8]",
    );
    check(
        &[4, 1, 8, 8],
        labels(3, 1),
        &[],
        "expected as many examples as \"image\"",
    );
    check(
        &[4, 1, 8, 8],
        labels(4, 10),
        &[],
        "of example 0 is 10, expected a class from 0 to 9",
    );
    check(
        &[4, 1, 8, 8],
        labels(4, -1),
        &[],
        "of example 0 is -1, expected a class",
    );
    check(&[0, 1, 8, 8], labels(0, 1), &[], "no examples");
    check(
        &[4, 1, 8, 8],
        labels(4, 1),
        &["--label", "labels"],
        "did you mean \"label\"?",
    );
    check(
        &[4, 1, 8, 8],
        labels(4, 1),
        &["--input", "imag=image"],
        "did you mean \"image\"?",
    );
    check(
        &[4, 1, 8, 8],
        labels(4, 1),
        &["--set", "batch=8"],
        "4 examples, and a batch takes 8",
    );
    check(
        &[4, 1, 8, 8],
        labels(4, 1),
        &["--loss", "binary-cross-entropy"],
        "--loss cross-entropy",
    );
    check(
        &[4, 1, 8, 8],
        labels(4, 1),
        &["--input", "label=label"],
        "unknown input \"label\"",
    );
    check(&[4, 1, 8, 8], Tensor::scalar(1i64), &[], "expected rows of");
    check(
        &[4, 1, 8, 8],
        labels(4, 1),
        &["--set", "batch=0"],
        "it takes no examples",
    );
    check(
        &[4, 1, 8, 8],
        labels(4, 1),
        &["--optimizer", "sgd", "--lr", "1e300"],
        "is not finite any more",
    );
    check(
        &[4, 1, 8, 8],
        labels(4, 1),
        &["--momentum", "0.9"],
        "--optimizer sgd",
    );
    check(
        &[4, 1, 8, 8],
        labels(4, 1),
        &["--optimizer", "adagrad", "--momentum", "0.9"],
        "--momentum is for --optimizer sgd and --optimizer rmsprop",
    );
    let flags = [
        ("mse --label-smoothing 0.1", "is for --loss cross-entropy"),
        ("cross-entropy --huber-delta 2", "is for --loss huber"),
        (
            "cross-entropy --label-smoothing 1.5",
            "label smoothing: 1.5, expected a number from 0 to 1",
        ),
        (
            "huber --huber-delta 0",
            "delta is 0, expected a finite number above 0",
        ),
    ];
    for (flags, expected) in flags {
        let flags = format!("--loss {flags}");
        let flags: Vec<&str> = flags.split(' ').collect();
        check(&[4, 1, 8, 8], labels(4, 1), &flags, expected);
    }
    check(
        &[4, 1, 8, 8],
        labels(4, 1),
        &["--lr", "nan"],
        "learning rate",
    );
    check(
        &[4, 1, 8, 8],
        labels(4, 1),
        &["--lr", "1e30", "--epochs", "9"],
        "changes nothing: in node \"/",
    );
}

#[test]
fn check_says_what_would_learn() {
    let model = data("digits/model.onnx");
    let (code, out, err) = run(&["check", &model, "--train"]);
    assert_eq!(code, 0, "{err}");
    assert!(
        out.contains("training: 10 of 12 float initialisers trainable"),
        "{out}"
    );
    assert!(out.contains("frozen: it is a scalar"), "{out}");
    let (code, out, _) = run(&["check", &model, "--train", "--json", "--trainable", "bias"]);
    assert_eq!(code, 0);
    let value: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(value["training"]["weights"].as_array().unwrap().len(), 12);
    let detector = data("detector/model.onnx");
    let args = [
        "check", &detector, "--train", "--output", "scores", "--loss", "mse",
    ];
    let (code, out, err) = run(&args);
    assert_eq!(code, 3, "{out}{err}");
    assert!(out.contains("no gradient"), "{out}");
}

#[test]
fn stages_of_a_step_are_shown() {
    let model = data("digits/model.onnx");
    let (code, out, err) = run(&["dump", &model, "--stage", "gradients", "--lr", "0.25"]);
    assert_eq!(code, 0, "{err}");
    assert!(
        out.contains("grad(") && out.contains("assign_variable"),
        "{out}"
    );
    let (code, out, err) = run(&[
        "dump", &model, "--train", "--stage", "clusters", "--set", "batch=4",
    ]);
    assert_eq!(code, 0, "{err}");
    assert!(out.contains("assign_variable"), "{out}");
}

#[test]
fn a_log_ends_with_a_warning_where_the_disk_is_full() {
    let folder = tempfile::tempdir().unwrap();
    // The model that is written has 40 KB.
    let limited = Start {
        folder: folder.path(),
        shell: "trap '' XFSZ; ulimit -f 256",
        ..Start::default()
    };
    let more = ["--epochs", "4", "--logdir", "log", "--histograms", "1"];
    let (model, examples) = (data("digits/model.onnx"), data("digits/train.npz"));
    let ended = start(limited, &digits(&model, &examples, &more));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let lines = ended.stderr.lines();
    let warnings: Vec<&str> = lines.filter(|l| l.contains("the log ends here")).collect();
    assert_eq!(warnings.len(), 1, "{}", ended.stderr);
    let log = EventLog::read(folder.path().join("log/train")).unwrap();
    assert!(!log.steps.is_empty());
    let ended = train(folder.path(), &["--logdir", "log"]);
    assert_eq!(ended.code, Some(2));
    assert!(
        ended.stderr.contains("is of an earlier training"),
        "{}",
        ended.stderr
    );
}

#[test]
fn replicas_train_the_model_of_one_device() {
    let folder = tempfile::tempdir().unwrap();
    let (model, examples) = (data("digits/model.onnx"), data("digits/train.npz"));
    let losses = |more: &[&str]| -> Vec<f64> {
        let args = ["train", &model, "--data", &examples, "--lr", "3e-4"];
        let out = ["-o", "out.onnx", "--json", "--epochs", "2"];
        let ended = gristmill(folder.path(), &[&args[..], &out, more].concat());
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        let json: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
        let epochs = json["epochs"].as_array().unwrap();
        epochs
            .iter()
            .map(|e| e["trained"]["loss"].as_f64().unwrap())
            .collect()
    };
    let one = losses(&["--batch", "66"]);
    let mirrored = ["--strategy", "mirrored", "--devices", "cpu:3"];
    let served = ["--strategy", "parameter-server", "--devices", "cpu:3"];
    assert_eq!(one.len(), 2);
    for strategy in [mirrored, served] {
        let three = losses(&[&strategy[..], &["--batch-per-replica", "22"]].concat());
        for (a, b) in one.iter().zip(&three) {
            assert!((a - b).abs() < 1e-3 * a, "{one:?} {three:?}");
        }
    }
    let explain = |more: &[&str]| {
        let args = ["train", &model, "--data", &examples, "--explain"];
        let all = [&args[..], &["--devices", "cpu:2"], more].concat();
        let ended = gristmill(folder.path(), &all);
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        ended.stdout
    };
    let table = explain(&[]);
    for name in [
        "one-device",
        "mirrored",
        "central",
        "parameter-server",
        "N-(N-1)s",
    ] {
        assert!(table.contains(name), "{table}");
    }
    let json: serde_json::Value = serde_json::from_str(&explain(&["--json"])).unwrap();
    assert_eq!(json["same_batch"].as_array().unwrap().len(), 4);
    assert!(!folder.path().join("none.onnx").exists());
    let alone = ["--strategy", "parameter-server", "--servers", "emu:1"];
    let ended = train(folder.path(), &alone);
    assert_eq!(ended.code, Some(2), "{}", ended.stdout);
    assert!(
        ended.stderr.contains("/device:EMU:0 is not there"),
        "{}",
        ended.stderr
    );
    let auto = losses(&["--batch", "66", "--strategy", "auto", "--devices", "cpu:2"]);
    assert!((auto[1] - one[1]).abs() < 1e-3 * one[1], "{one:?} {auto:?}");
    for flag in [&["--async"][..], &["--hogwild"], &["--servers", "cpu:2"]] {
        let ended = train(folder.path(), flag);
        assert_eq!(ended.code, Some(2), "{}", ended.stdout);
        assert!(ended.stderr.contains("the weights have no servers"));
    }
    let two = losses(&[&served[..], &["--servers", "cpu:2", "--batch", "66"]].concat());
    assert!((two[1] - one[1]).abs() < 1e-3 * one[1], "{one:?} {two:?}");
    for (list, message) in [
        ("cpu:9", "/device:CPU:3"),
        ("tpu:1", "--servers"),
        ("", "--servers"),
    ] {
        let ended = train(folder.path(), &[&served[..], &["--servers", list]].concat());
        assert_eq!(ended.code, Some(2), "{}", ended.stdout);
        assert!(ended.stderr.contains(message), "{}", ended.stderr);
    }
    let own = [&mirrored[..], &["--statistics", "per-replica"]].concat();
    let ended = train(folder.path(), &own);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let expected = "64 examples have no 3 equal shares, so each batch has common statistics";
    assert!(ended.stderr.contains(expected), "{}", ended.stderr);
    let ended = train(folder.path(), &[&own[..], &["--accumulate", "2"]].concat());
    assert_eq!(ended.code, Some(3), "{}", ended.stdout);
    assert!(
        ended
            .stderr
            .contains("statistics per replica, and steps in micro-batches")
    );
    for flag in ["--async", "--hogwild"] {
        let ended = train(folder.path(), &[&served[..], &[flag]].concat());
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        assert_eq!(ended.stdout.matches("worker on /device:CPU:").count(), 3);
    }
    let ended = train(
        folder.path(),
        &[&mirrored[..], &["--accumulate", "30"]].concat(),
    );
    assert_eq!(ended.code, Some(2), "{}", ended.stdout);
    assert!(
        ended
            .stderr
            .contains("batches of 64 in 30 parts for 3 replicas"),
        "{}",
        ended.stderr
    );
}

#[test]
fn gradients_are_added_up_in_the_way_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let mirrored = ["--strategy", "mirrored", "--devices", "cpu:2"];
    let weights = |more: &[&str]| {
        let ended = train(folder.path(), more);
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        std::fs::read(folder.path().join("out.onnx")).unwrap()
    };
    let of = |way| weights(&[&mirrored[..], &["--all-reduce", way]].concat());
    assert!(of("one-device") == of("exchange"));
    for (way, message) in [
        (
            "nccl",
            "all-reduce by NCCL between /device:CPU:0, /device:CPU:1",
        ),
        ("hierarchical", "links make no groups"),
        (
            "ring",
            "possible values: auto, nccl, hierarchical, one-device, exchange",
        ),
    ] {
        let ended = train(
            folder.path(),
            &[&mirrored[..], &["--all-reduce", way]].concat(),
        );
        assert_eq!(ended.code, Some(2), "{}", ended.stdout);
        assert!(ended.stderr.contains(message), "{}", ended.stderr);
    }
    let sharded = |devices, strategy| {
        weights(&[
            "--shards",
            "4",
            "--devices",
            devices,
            "--strategy",
            strategy,
        ])
    };
    let one = sharded("cpu:1", "one-device");
    assert!(one == sharded("cpu:2", "mirrored"));
    assert!(one == sharded("cpu:4", "central"));
    for (shards, message) in [
        ("3", "expected a power of two"),
        ("1", "1 shards on 2 devices"),
    ] {
        let ended = train(
            folder.path(),
            &[&mirrored[..], &["--shards", shards]].concat(),
        );
        assert_eq!(ended.code, Some(2), "{}", ended.stdout);
        assert!(ended.stderr.contains(message), "{}", ended.stderr);
    }
}
