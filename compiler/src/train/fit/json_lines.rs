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
/// A resumed training first removes the lines of steps after its checkpoint. If a write fails, the log ends with a warning, and the training
/// continues.
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

    /// Removes lines of later steps, and an unfinished one at the end.
    fn cut(&self, cx: &FitContext) -> Result<()> {
        // Devices and pipes hold no lines.
        if !self.path.is_file() {
            return Ok(());
        }
        let text = fs::read_to_string(&self.path).map_err(|e| self.error(e))?;
        let mut kept = String::new();
        let whole = text.split_inclusive('\n').filter(|l| l.ends_with('\n'));
        for (i, line) in whole.enumerate() {
            let value: Option<Value> = serde_json::from_str(line).ok();
            let at = value.as_ref().and_then(|value| value["step"].as_u64());
            let (Some(value), Some(at)) = (value, at) else {
                let (path, number) = (self.path.display(), i + 1);
                let message = format!("{path}: line {number} is not of such a log");
                return Err(Error::invalid(message).hint("another file"));
            };
            // The end of an epoch comes after the step of the same number.
            let comes_again = value["event"] == "epoch" && at == cx.step() && cx.is_at_end();
            if at <= cx.step() && !comes_again {
                kept.push_str(line);
            }
        }
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
        cx.remove_unfinished_beside(&self.path);
        if cx.is_resumed() {
            self.cut(cx)?;
        } else if self.path.metadata().is_ok_and(|m| m.len() > 0) {
            let path = self.path.display();
            let e = Error::invalid(format!("{path} is the log of an earlier training"));
            return Err(e.hint("another file, or remove this one"));
        }
        let opened = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&self.path);
        self.file = Some(opened.map_err(|e| self.error(e))?);
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
