//! Trainings that are killed: their files are whole at every moment, and a training that goes on comes to the same end.

use super::fit::{AtStep, events, lines};
use super::{examples, state, trainer};
use gristmill::testing::{Rng, Setup};
use gristmill::train::{
    Checkpoints, EarlyStopping, EventLog, Every, Fit, FitContext, JsonLines, ModelCheckpoint,
    Monitor, Summaries, TensorBoard, Trainer,
};
use serde_json::Value;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Killed trainings, unless the environment variable asks for another number.
const N_KILLS: usize = 40;
const N_KILLS_VARIABLE: &str = "GRISTMILL_TEST_KILLS";

/// The folder in which the process is to train.
const FOLDER_VARIABLE: &str = "GRISTMILL_TEST_TRAINS_IN";

/// Lines of a process that trains: before it touches a file, and after its first step, which takes long to compile.
const LINES: [&str; 2] = ["the training begins", "the first step is done"];

/// Trains in a folder; goes on from its newest checkpoint. Gives the times of the first step and of all others, too.
fn train(folder: &Path) -> (Trainer, [Duration; 2]) {
    let (data, held_out) = (examples(100), examples(50));
    let own = trainer(Setup::default());
    println!("\n{}", LINES[0]);
    let (begin, mut first) = (Instant::now(), None);
    let checkpoints = Checkpoints::new(folder.join("checkpoints"), 2).unwrap();
    let fit = Fit {
        epochs: 60,
        seed: 7,
        held_out: Some(&held_out),
        evaluate: Every::Steps(3),
        resumed: checkpoints.resume(&own).unwrap(),
        ..Fit::new(&data, 24)
    };
    // Weights take no program of their own.
    let summaries = Summaries {
        activations: false,
        gradients: false,
        ..Summaries::new(Every::Steps(3))
    };
    let mut board = TensorBoard::new(folder.join("events"))
        .scalars(Every::Steps(2))
        .summaries(summaries);
    let mut newest = ModelCheckpoint::newest(checkpoints, Every::Steps(4));
    let lowest = || Monitor::lowest("held_out/loss");
    let mut best = ModelCheckpoint::best(lowest(), best_file(folder));
    let mut patience = EarlyStopping::new(lowest(), 30);
    let mut log = JsonLines::new(log_file(folder));
    let mut step = AtStep(|_: &mut FitContext| {
        if first.is_none() {
            println!("{}", LINES[1]);
            first = Some(begin.elapsed());
        }
        Ok(())
    });
    let report = own.fit(
        &fit,
        &mut [
            &mut board,
            &mut newest,
            &mut best,
            &mut patience,
            &mut log,
            &mut step,
        ],
    );
    assert_eq!(report.unwrap().warnings, [""; 0]);
    let first = first.unwrap_or_default();
    (own, [first, begin.elapsed() - first])
}

fn best_file(folder: &Path) -> PathBuf {
    folder.join("best.safetensors")
}

fn log_file(folder: &Path) -> PathBuf {
    folder.join("log.jsonl")
}

/// Unfinished files in a folder and in its folder of checkpoints.
fn unfinished(folder: &Path) -> Vec<OsString> {
    let folders = [folder.to_owned(), folder.join("checkpoints")];
    let entries = folders.iter().flat_map(|f| fs::read_dir(f).unwrap());
    let names = entries.map(|e| e.unwrap().file_name());
    names
        .filter(|name| name.to_str().unwrap().ends_with(".new"))
        .collect()
}

/// Trains in another process, and kills it some time after it has written a line. True when the training ended before.
fn killed(folder: &Path, line: &str, delay: Duration) -> bool {
    let errors = tempfile::NamedTempFile::new().unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", NAME, "--nocapture", "--test-threads", "1"])
        .env(FOLDER_VARIABLE, folder)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(File::create(errors.path()).unwrap())
        .spawn()
        .unwrap();
    // Open until the end: a process that cannot write would fail.
    let mut said = BufReader::new(child.stdout.take().unwrap()).lines();
    let has_begun = said.any(|said| said.unwrap().contains(line));
    // A training may go on from its end, without a step.
    if has_begun {
        sleep(delay);
        child.kill().unwrap();
    }
    let status = child.wait().unwrap();
    let is_killed = status.code().is_none();
    let errors = fs::read_to_string(errors.path()).unwrap();
    assert!(is_killed || status.success(), "{status}: {errors}");
    !is_killed
}

/// Checks all files of a training that was killed. True when it can go on.
fn check(folder: &Path, checkpoints: &Checkpoints, own: &Trainer) -> bool {
    let resumed = checkpoints.resume(own).unwrap();
    let damaged = resumed.as_ref().map_or(&[][..], |r| &r.damaged);
    assert_eq!(damaged, [""; 0]);
    if best_file(folder).exists() {
        own.load_weights(best_file(folder)).unwrap();
    }
    for run in ["train", "validation"] {
        let mut last = BTreeMap::new();
        for logged in EventLog::read(folder.join("events").join(run))
            .unwrap()
            .steps
        {
            let histograms = logged.histograms.into_iter().map(|(tag, _)| tag);
            for tag in logged
                .scalars
                .into_iter()
                .map(|(tag, _)| tag)
                .chain(histograms)
            {
                let before = last.insert(tag.clone(), logged.step);
                assert!(
                    before < Some(logged.step),
                    "{run} {tag}: {before:?} {}",
                    logged.step
                );
            }
        }
    }
    let log = fs::read_to_string(log_file(folder)).unwrap_or_default();
    let mut last = BTreeMap::new();
    for line in log.split_inclusive('\n').filter(|l| l.ends_with('\n')) {
        let line: Value = serde_json::from_str(line).unwrap();
        let step = line["step"].as_u64().unwrap();
        let before = last.insert(line["event"].to_string(), step);
        assert!(before < Some(step), "{line}: {before:?}");
    }
    resumed.is_some()
}

const NAME: &str = "training::crashes::a_killed_training_goes_on_to_the_same_end";

#[test]
fn a_killed_training_goes_on_to_the_same_end() {
    if let Some(folder) = std::env::var_os(FOLDER_VARIABLE) {
        train(Path::new(&folder));
        return;
    }
    let n_kills = std::env::var(N_KILLS_VARIABLE).map_or(N_KILLS, |n| n.parse().unwrap());
    let whole = tempfile::tempdir().unwrap();
    let (expected, [first, rest]) = train(whole.path());
    let expected = state(&expected);
    let mut rng = Rng(11);
    let probe = trainer(Setup::default());
    let (mut n_killed, mut n_resumed, mut n_trainings) = (0, 0, 0);
    while n_killed < n_kills {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let checkpoints = Checkpoints::new(folder.join("checkpoints"), 2).unwrap();
        while n_killed < n_kills {
            // Some kills for each training, however fast the machine is.
            let (line, longest) = match n_killed % 4 {
                0 => (LINES[0], first),
                _ => (LINES[1], rest / 4),
            };
            let delay_us = rng.below(longest.as_micros() as usize) as u64;
            if killed(folder, line, Duration::from_micros(delay_us)) {
                break;
            }
            n_killed += 1;
            if check(folder, &checkpoints, &probe) {
                n_resumed += 1;
            } else {
                // Without a checkpoint, the logs are of another training.
                fs::remove_dir_all(folder).unwrap();
                fs::create_dir_all(checkpoints.folder()).unwrap();
            }
        }
        n_trainings += 1;
        // A kill in the middle of a file leaves it unfinished.
        for folder in [folder, checkpoints.folder()] {
            fs::write(folder.join(".gristmill-0123456789abcdef.new"), "half").unwrap();
        }
        assert_eq!(state(&train(folder).0), expected);
        assert_eq!(unfinished(folder), [""; 0]);
        let file = |folder: &Path| fs::read(best_file(folder)).unwrap();
        assert!(file(folder) == file(whole.path()));
        assert_eq!(lines(&log_file(folder)), lines(&log_file(whole.path())));
        for run in ["train", "validation"] {
            let events = |folder: &Path| events(&folder.join("events").join(run));
            assert!(events(folder) == events(whole.path()), "{run}");
        }
    }
    println!("{n_killed} kills of {n_trainings} trainings, {n_resumed} behind a checkpoint");
    assert!(4 * n_resumed > n_kills, "{n_resumed} of {n_kills}");
}
