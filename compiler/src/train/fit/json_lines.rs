//! A log of epochs and evaluations in JSON.

use super::callback::{Callback, EpochReport, FitContext};
use crate::error::{Error, Result};
use crate::train::metrics::Metrics;
use gristmill_runtime::files;
use serde_json::{Map, Value, json};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::PathBuf;

/// Appends an object of JSON per line to a file: for an epoch
/// `{"event":"epoch","epoch":0,"step":469,"trained":{"loss":0.5},"held_out":null,"learning_rate":0.001,"examples_per_s":50000}`, for an
/// evaluation `{"event":"evaluation","epoch":0,"step":469,"held_out":{"loss":0.4}}`.
///
/// A training that goes on from a checkpoint drops the lines behind it first. A write that fails ends the log with a warning, and not the
/// training.
pub struct JsonLines {
    path: PathBuf,
    file: Option<File>,
}

impl JsonLines {
    /// A log in a file, which a new training creates.
    pub fn new(path: impl Into<PathBuf>) -> JsonLines {
        JsonLines {
            path: path.into(),
            file: None,
        }
    }

    fn write(&mut self, cx: &mut FitContext, line: Value) {
        let Some(file) = &mut self.file else {
            return;
        };
        let written = file.write_all(format!("{line}\n").as_bytes());
        if let Err(e) = written {
            cx.warn(format!("{}: {e}; the log ends here", self.path.display()));
            self.file = None;
        }
    }

    fn error(&self, e: io::Error) -> Error {
        Error::invalid(format!("{}: {e}", self.path.display()))
    }

    /// Drops lines behind a step, and one that a crash has cut.
    fn cut(&self, step: u64) -> Result<()> {
        // Devices and pipes hold no lines.
        if !self.path.is_file() {
            return Ok(());
        }
        let text = fs::read_to_string(&self.path).map_err(|e| self.error(e))?;
        let is_kept = |line: &&str| {
            let value: Option<Value> = serde_json::from_str(line).ok();
            let at = value.and_then(|value| value["step"].as_u64());
            line.ends_with('\n') && at.is_some_and(|at| at <= step)
        };
        let kept: String = text.split_inclusive('\n').filter(is_kept).collect();
        let replaced = files::replace(&self.path, |file| file.write_all(kept.as_bytes()));
        replaced.map_err(|e| self.error(e))
    }
}

fn object(means: &Metrics) -> Value {
    let pairs = means
        .iter()
        .map(|(name, mean)| (name.to_owned(), json!(mean)));
    Value::Object(pairs.collect::<Map<_, _>>())
}

impl Callback for JsonLines {
    fn name(&self) -> String {
        "JsonLines".to_owned()
    }

    fn train_begin(&mut self, cx: &mut FitContext) -> Result<()> {
        let mut options = OpenOptions::new();
        match cx.is_resumed() {
            true => {
                self.cut(cx.step())?;
                options.create(true).append(true);
            }
            false => {
                options.create_new(true).append(true);
            }
        }
        let opened = options.open(&self.path);
        self.file = Some(opened.map_err(|e| match e.kind() {
            io::ErrorKind::AlreadyExists => {
                let path = self.path.display();
                let e = Error::invalid(format!("{path} is the log of an earlier training"));
                e.hint("another file, or remove this one")
            }
            _ => self.error(e),
        })?);
        Ok(())
    }

    fn epoch_end(&mut self, cx: &mut FitContext, epoch: &EpochReport) -> Result<()> {
        let line = json!({
            "event": "epoch",
            "epoch": epoch.epoch,
            "step": cx.step(),
            "trained": object(&epoch.trained),
            "held_out": epoch.held_out.as_ref().map(object),
            "learning_rate": epoch.learning_rate,
            "examples_per_s": epoch.examples_per_s,
        });
        self.write(cx, line);
        Ok(())
    }

    fn evaluation_end(&mut self, cx: &mut FitContext, held_out: &Metrics) -> Result<()> {
        // An evaluation at the end of an epoch is part of the epoch's line.
        if let super::Every::Epochs(_) = cx.evaluate() {
            return Ok(());
        }
        let line = json!({
            "event": "evaluation",
            "epoch": cx.epoch(),
            "step": cx.step(),
            "held_out": object(held_out),
        });
        self.write(cx, line);
        Ok(())
    }
}
