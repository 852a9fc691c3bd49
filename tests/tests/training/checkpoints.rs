//! Checkpoints: resumed bit for bit, whole at every moment, refused where they do not fit.

use super::{examples, perceptron, state, trainer};
use gristmill::testing::Setup;
use gristmill::train::{
    Checkpoints, Dataset, Model, Position, Sgd, TensorDataset, Trainer, Training,
};
use gristmill::{DType, ErrorKind, Tensor};
use gristmill_runtime::safetensors::{self, Saved};
use std::fs;
use std::path::Path;

const BATCH: usize = 24;

/// Trains until `n` batches in all were seen, with a checkpoint after each third.
fn train(
    trainer: &Trainer,
    data: &TensorDataset,
    checkpoints: &Checkpoints,
    position: &mut Position,
    n: u64,
) {
    let per_epoch = data.len().div_ceil(BATCH) as u64;
    while position.epoch * per_epoch + position.n_batches < n {
        for batch in position.rest(data).unwrap() {
            trainer.step(batch.unwrap()).unwrap();
            position.n_batches += 1;
            let seen = position.epoch * per_epoch + position.n_batches;
            if seen.is_multiple_of(3) {
                checkpoints.save(trainer, position).unwrap();
            }
            if seen == n {
                return;
            }
        }
        position.next_epoch();
    }
}

fn new(folder: &Path) -> Checkpoints {
    Checkpoints::new(folder, 2).unwrap()
}

#[test]
fn training_goes_on_bit_for_bit_from_the_last_checkpoint() {
    let data = examples(100);
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let start = Position::start(&data, BATCH, 7);
    let whole = trainer(Setup::default());
    train(
        &whole,
        &data,
        &new(folders[0].path()),
        &mut start.clone(),
        20,
    );
    let checkpoints = new(folders[1].path());
    let first = trainer(Setup::default());
    train(&first, &data, &checkpoints, &mut start.clone(), 14);
    assert_eq!(checkpoints.files().unwrap().len(), 2);
    let second = trainer(Setup::default());
    let resumed = checkpoints.resume(&second).unwrap().unwrap();
    let mut position = resumed.position;
    assert_eq!((position.epoch, position.n_batches), (2, 2));
    assert_eq!(second.n_steps().unwrap(), 12);
    train(&second, &data, &checkpoints, &mut position, 20);
    assert_eq!(state(&second), state(&whole));
}

#[test]
fn the_newest_checkpoint_that_is_whole_counts() {
    let data = examples(100);
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = new(folder.path());
    let own = trainer(Setup::default());
    let mut position = Position::start(&data, BATCH, 7);
    assert!(checkpoints.resume(&own).unwrap().is_none());
    train(&own, &data, &checkpoints, &mut position, 6);
    let files = checkpoints.files().unwrap();
    let bytes = fs::read(&files[1]).unwrap();
    fs::write(&files[1], &bytes[..bytes.len() / 2]).unwrap();
    fs::write(
        folder.path().join(".gristmill-0123456789abcdef.new"),
        "unfinished",
    )
    .unwrap();
    let again = new(folder.path());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    let resumed = again.resume(&own).unwrap().unwrap();
    assert_eq!((&resumed.path, resumed.damaged.len()), (&files[0], 1));
    assert_eq!(own.n_steps().unwrap(), 3);
    fs::write(&files[0], "nothing").unwrap();
    let before = state(&own);
    let message = again.resume(&own).unwrap_err().to_string();
    assert!(message.starts_with("no checkpoint is whole"), "{message}");
    assert_eq!(state(&own), before);
}

#[test]
fn metrics_have_names_of_their_own() {
    let training = Training {
        seed: 5,
        ..Training::from(Sgd::default())
    };
    let refused = |names: &[&str]| {
        let build = |m: &mut Model| {
            let z = m.input("z", DType::F32, [2usize]);
            let objective = perceptron(m)?;
            Ok(names.iter().fold(objective, |o, name| o.metric(name, z)))
        };
        let e = Trainer::new("w", &training, build).err().unwrap();
        assert_eq!(e.kind(), ErrorKind::InvalidInput, "{e}");
        e.to_string()
    };
    for name in ["loss", "optimizer/learning_rate"] {
        assert_eq!(
            refused(&[name]),
            format!("metric {name:?}: training already uses this name (try: another name)")
        );
    }
    assert_eq!(
        refused(&["a", "a"]),
        "metric \"a\": another metric already uses this name (try: another name)"
    );
}

#[test]
fn checkpoints_of_others_are_refused() {
    let data = examples(100);
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = new(folder.path());
    let own = trainer(Setup::default());
    let mut position = Position::start(&data, BATCH, 7);
    train(&own, &data, &checkpoints, &mut position, 3);
    let training = Training {
        seed: 5,
        ..Training::from(Sgd::default())
    };
    let other = Trainer::new("perceptron", &training, perceptron).unwrap();
    let message = checkpoints.resume(&other).unwrap_err().to_string();
    assert!(
        message.contains("of another model or optimiser"),
        "{message}"
    );
    assert!(state(&other).is_empty());
    let message = position.rest(&examples(99)).err().unwrap().to_string();
    assert!(
        message.contains("99 examples, the checkpoint's had 100"),
        "{message}"
    );
    // A file of state that is no checkpoint.
    let plain = tempfile::tempdir().unwrap();
    let path = plain.path().join("step-000000000001.safetensors");
    own.resources().save(&path).unwrap();
    let message = new(plain.path()).resume(&own).unwrap_err().to_string();
    assert!(message.contains("not a checkpoint"), "{message}");
    // A variable of another model of the session is not saved; a file that has one is of another model.
    let value = Tensor::zeros(DType::F32, &[2]).unwrap();
    own.resources().set("", "another", &value).unwrap();
    let file = checkpoints.save(&own, &position).unwrap();
    let mut contents = safetensors::read(&file).unwrap();
    assert!(contents.variables.iter().all(|v| v.name != "another"));
    contents.variables.push(Saved {
        container: String::new(),
        name: "another".to_owned(),
        value,
    });
    safetensors::write(&file, &contents.variables, &contents.notes).unwrap();
    let fresh = trainer(Setup::default());
    let message = checkpoints.resume(&fresh).unwrap_err().to_string();
    assert!(
        message.contains("\"another\", which the trainer lacks"),
        "{message}"
    );
}
