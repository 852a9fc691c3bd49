//! Progress of a training: a line that moves on a terminal, a line for each epoch, and JSON at the end.

use super::super::output::outln;
use gristmill::train::{EpochReport, Metrics};
use gristmill_runtime::units::time_ns;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::{Value, json};
use std::time::Instant;

/// Prints an epoch as a line.
pub fn print(epoch: &EpochReport, n_epochs: u64) {
    let held_out = epoch.held_out.as_ref();
    let held_out = held_out.map_or_else(String::new, |m| format!("; held out: {m}"));
    let (number, trained) = (epoch.epoch + 1, &epoch.trained);
    let rate = rounded(epoch.examples_per_s);
    outln!("epoch {number}/{n_epochs}: {trained}{held_out}; {rate} examples/s");
}

/// An epoch for machines.
pub fn json(epoch: &EpochReport) -> Value {
    let object = |means: &Metrics| {
        let pairs = means
            .iter()
            .map(|(name, mean)| (name.to_owned(), json!(mean)));
        Value::Object(pairs.collect())
    };
    json!({
        "epoch": epoch.epoch + 1,
        "trained": object(&epoch.trained),
        "held_out": epoch.held_out.as_ref().map(object),
        "learning_rate": epoch.learning_rate,
        "examples_per_s": epoch.examples_per_s,
    })
}

/// `1,234`.
fn rounded(rate: f64) -> String {
    let digits = format!("{rate:.0}");
    let n = digits.len();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (n - i) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// The line that moves.
pub struct Line {
    bar: ProgressBar,
    begin: Instant,
    n_first: u64,
}

impl Line {
    /// A line for all steps, of which some are done; none unless the errors of this process go to a terminal.
    pub fn new(n_steps: u64, n_done: u64, is_shown: bool) -> Line {
        let target = match is_shown {
            true => ProgressDrawTarget::stderr(),
            false => ProgressDrawTarget::hidden(),
        };
        let bar = ProgressBar::with_draw_target(Some(n_steps), target);
        let style = ProgressStyle::with_template("{bar:30} step {pos}/{len}  {msg}");
        if let Ok(style) = style {
            bar.set_style(style);
        }
        bar.set_position(n_done);
        Line {
            bar,
            begin: Instant::now(),
            n_first: n_done,
        }
    }

    /// Shows a step of an epoch, from 0.
    pub fn step(&self, epoch: u64, n_examples: usize, loss: f64) {
        self.bar.inc(1);
        if self.bar.is_hidden() {
            return;
        }
        let done = self.bar.position().saturating_sub(self.n_first).max(1);
        let (all, at) = (self.bar.length().unwrap_or(0), self.bar.position());
        let per_step = self.begin.elapsed().as_secs_f64() / done as f64;
        let left = per_step * all.saturating_sub(at) as f64;
        let rate = rounded(n_examples as f64 / per_step.max(1e-9));
        let (epoch, left) = (epoch + 1, time_ns((left * 1e9) as u64));
        self.bar.set_message(format!(
            "epoch {epoch}, loss {loss:.4}, {rate} examples/s, {left} left"
        ));
    }

    /// Prints with the line out of the way.
    pub fn aside(&self, print: impl FnOnce()) {
        self.bar.suspend(print);
    }

    /// Takes the line away.
    pub fn end(&self) {
        self.bar.finish_and_clear();
    }
}
