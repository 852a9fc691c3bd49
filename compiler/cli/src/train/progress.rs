//! Progress of a training: a line that moves on a terminal, a line for each epoch, and JSON at the end.

use super::super::output::outln;
use gristmill::Tensor;
use gristmill::train::StepOutputs;
use gristmill_runtime::units::time_ns;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::{Value, json};
use std::iter;
use std::time::{Duration, Instant};

/// The first element of a tensor.
pub fn first(t: &Tensor) -> f64 {
    t.to_f64s().first().copied().unwrap_or(f64::NAN)
}

/// Means over batches, by name: the loss, and metrics.
#[derive(Clone, Debug, Default)]
pub struct Means {
    sums: Vec<(String, f64)>,
    n: usize,
}

impl Means {
    /// Adds the means of a batch of `n` examples.
    pub fn add(&mut self, n: usize, values: impl Iterator<Item = (String, f64)>) {
        for (i, (name, value)) in values.enumerate() {
            if i == self.sums.len() {
                self.sums.push((name, 0.0));
            }
            self.sums[i].1 += value * n as f64;
        }
        self.n += n;
    }

    /// Number of examples.
    pub fn n_examples(&self) -> usize {
        self.n
    }

    fn means(&self) -> impl Iterator<Item = (&str, f64)> {
        let n = self.n.max(1) as f64;
        self.sums
            .iter()
            .map(move |(name, sum)| (name.as_str(), sum / n))
    }

    /// `loss 0.4321, accuracy 0.9120`.
    pub fn text(&self) -> String {
        let texts = self.means().map(|(name, mean)| format!("{name} {mean:.4}"));
        texts.collect::<Vec<_>>().join(", ")
    }

    fn json(&self) -> Value {
        let pairs = self
            .means()
            .map(|(name, mean)| (name.to_owned(), json!(mean)));
        Value::Object(pairs.collect())
    }
}

/// An epoch that has ended.
pub struct Epoch {
    /// Its number, from 1.
    pub number: u64,
    /// Means over its batches, each before its step.
    pub trained: Means,
    /// Means over the examples of `--eval`, after it.
    pub held_out: Option<Means>,
    /// The learning rate of its last step.
    pub learning_rate: f64,
    /// Time of its steps.
    pub time: Duration,
}

impl Epoch {
    /// An epoch without batches.
    pub fn begin(number: u64) -> Epoch {
        Epoch {
            number,
            trained: Means::default(),
            held_out: None,
            learning_rate: 0.0,
            time: Duration::ZERO,
        }
    }

    /// Adds a step on `n` examples, which ended at a time after the epoch's begin.
    pub fn add(&mut self, n: usize, step: &StepOutputs, time: Duration) {
        let metrics = step.metrics.iter();
        let metrics = metrics.map(|(name, t)| (name.to_owned(), first(t)));
        let loss = iter::once(("loss".to_owned(), step.loss));
        self.trained.add(n, loss.chain(metrics));
        self.learning_rate = step.learning_rate;
        self.time = time;
    }

    fn examples_per_s(&self) -> f64 {
        self.trained.n_examples() as f64 / self.time.as_secs_f64().max(1e-9)
    }

    /// Prints it as a line.
    pub fn print(&self, n_epochs: u64) {
        let held_out = self.held_out.as_ref();
        let held_out = held_out.map_or_else(String::new, |m| format!("; held out: {}", m.text()));
        let (number, trained) = (self.number, self.trained.text());
        let rate = rounded(self.examples_per_s());
        outln!("epoch {number}/{n_epochs}: {trained}{held_out}; {rate} examples/s");
    }

    /// The same for machines.
    pub fn json(&self) -> Value {
        json!({
            "epoch": self.number,
            "trained": self.trained.json(),
            "held_out": self.held_out.as_ref().map(Means::json),
            "learning_rate": self.learning_rate,
            "examples_per_s": self.examples_per_s(),
        })
    }
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

    /// Shows a step.
    pub fn step(&self, epoch: &Epoch, loss: f64) {
        self.bar.inc(1);
        if self.bar.is_hidden() {
            return;
        }
        let done = self.bar.position().saturating_sub(self.n_first).max(1);
        let left = self
            .bar
            .length()
            .unwrap_or(0)
            .saturating_sub(self.bar.position());
        let left = self.begin.elapsed().as_nanos() as f64 / done as f64 * left as f64;
        let (rate, left) = (rounded(epoch.examples_per_s()), time_ns(left as u64));
        let epoch = epoch.number;
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
