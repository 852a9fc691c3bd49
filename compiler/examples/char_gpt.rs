//! Trains a small GPT on source code, character by character, and lets it write some.
//!
//! `cargo run --release -p gristmill --example char_gpt [STEPS] [FOLDER]`: the text is all `.rs` files below the folder, by default
//! those of this library. The last tenth is held out; counts of pairs of characters give the loss to beat. The sizes are nanoGPT's
//! for a CPU, for about two minutes on two cores.

use gristmill::ir::{Dim, ValueId};
use gristmill::train::{
    Activation, Adam, Callback, Every, Fit, FitContext, Init, Metrics, Model, Objective, Schedule,
    StepOutputs, Tokens, Trainer, Training, Update, Vocabulary, WeightDecay, loss,
};
use gristmill::{DType, Error, Options, Result, Session, Settings, Tensor};
use std::fs;
use std::path::Path;

const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src");
const SEED: u64 = 1;

/// Sizes of the model and its training.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) context: usize,
    pub(crate) layers: usize,
    pub(crate) width: usize,
    pub(crate) batch: usize,
    pub(crate) steps: u64,
}

fn main() -> Result<()> {
    let mut words = std::env::args().skip(1);
    let steps = words.next().map_or(Ok(2000), |word| word.parse());
    let sizes = Sizes {
        context: 64,
        layers: 4,
        width: 128,
        batch: 12,
        steps: steps.map_err(|e| Error::invalid(format!("number of steps: {e}")))?,
    };
    let folder = words.next().unwrap_or_else(|| SOURCES.to_owned());
    let mut text = String::new();
    read(Path::new(&folder), &mut text).map_err(|e| Error::invalid(format!("{folder}: {e}")))?;
    let (loss, pairs, written) = train(&text, sizes, 400)?;
    println!("held out: loss {loss:.4}; by pairs of characters {pairs:.4}\n{written}");
    Ok(())
}

/// Appends the `.rs` files below a folder, in the order of their paths.
fn read(folder: &Path, text: &mut String) -> std::io::Result<()> {
    let mut entries = fs::read_dir(folder)?.collect::<std::io::Result<Vec<_>>>()?;
    entries.sort_by_key(|entry| entry.path());
    for path in entries.iter().map(|entry| entry.path()) {
        if path.is_dir() {
            read(&path, text)?;
        } else if path.extension().is_some_and(|e| e == "rs") {
            text.push_str(&fs::read_to_string(path)?);
        }
    }
    Ok(())
}

/// Trains on nine tenths of a text. Gives the held-out losses of the model and of pairs of characters, in nats per character, and a
/// text of the model with this length.
pub(crate) fn train(text: &str, sizes: Sizes, length: usize) -> Result<(f64, f64, String)> {
    let vocabulary = Vocabulary::of(text);
    let (n, tokens) = (vocabulary.len(), vocabulary.encode(text)?);
    let (first, last) = tokens.split_at(tokens.len() / 10 * 9);
    let examples = Tokens::new(first, sizes.context)?;
    let held_out = Tokens::new(last, sizes.context)?.with_stride(sizes.context)?;
    let session = Session::new(&Settings::default())?;
    let trainer = Trainer::in_session(&session, "char_gpt", &training(sizes), |m| {
        let logits = gpt(m, n, sizes)?;
        let dims = ["batch".into(), Dim::from(sizes.context)];
        let targets = m.input("targets", DType::I64, dims);
        let loss = loss::sparse_cross_entropy(m.builder(), logits, targets)?;
        Ok(Objective::new(loss))
    })?;
    let fit = Fit {
        steps: Some(sizes.steps),
        seed: SEED,
        held_out: Some(&held_out),
        evaluate: Every::Steps(500),
        ..Fit::new(&examples, sizes.batch)
    };
    trainer.fit(&fit, &mut [&mut Print])?;
    let loss = trainer.evaluate(&held_out, sizes.batch)?.loss();
    // A program without targets: the session gives its variables the trained values.
    let mut m = Model::new("char_gpt", SEED, false);
    let logits = gpt(&mut m, n, sizes)?;
    m.builder().output("logits", logits);
    let program = session.compile(&m.finish()?, &Options::default())?;
    let mut written = last[..sizes.context].to_vec();
    let mut random = Random(SEED);
    for i in 0..length {
        let seen = Tensor::from_slice(&written[i..], &[1, sizes.context])?;
        let logits = program.run([("tokens", seen)])?["logits"].to_f64s();
        written.push(random.token(&logits[logits.len() - n..]));
    }
    let written = vocabulary.decode(&written[sizes.context..])?;
    Ok((loss, bigram_loss(first, last, n), written))
}

/// AdamW with a warm-up, and gradients of a norm of at most 1.
fn training(sizes: Sizes) -> Training {
    let adam = Adam {
        learning_rate: Schedule::cosine(1e-3, sizes.steps).warmed_up(100),
        beta2: 0.99,
        ..Adam::default()
    };
    let update = Update {
        weight_decay: WeightDecay::Decoupled(0.1),
        clip_norm: Some(1.0),
        ..adam.into()
    };
    Training {
        seed: SEED,
        ..Training::from(update)
    }
}

/// Logits of the next character at each place, `[batch, context, characters]` (Radford et al., 2019).
fn gpt(m: &mut Model, n: usize, sizes: Sizes) -> Result<ValueId> {
    let (mean, deviation) = (0.0, 0.02);
    let init = Init::Normal { mean, deviation };
    let dims = ["batch".into(), Dim::from(sizes.context)];
    let x = m.input("tokens", DType::I64, dims);
    let x = m.scope("tokens", |m| m.embedding(x, [n, sizes.width], init))?;
    let places = m.variable("places/table", &[sizes.context, sizes.width], init)?;
    let mut x = m.builder().add_(x, places)?;
    for i in 0..sizes.layers {
        x = m.scope(&format!("block{i}"), |m| block(m, x, sizes))?;
    }
    let x = m.scope("norm", |m| m.layer_norm(x))?;
    m.scope("head", |m| m.dense(x, n))
}

fn block(m: &mut Model, x: ValueId, sizes: Sizes) -> Result<ValueId> {
    let normed = m.scope("norm1", |m| m.layer_norm(x))?;
    let seen = m.scope("attention", |m| m.self_attention(normed, 4, true))?;
    let x = m.builder().add_(x, seen)?;
    let normed = m.scope("norm2", |m| m.layer_norm(x))?;
    let hidden = m.scope("hidden", |m| m.dense(normed, 4 * sizes.width))?;
    let hidden = m.activation(hidden, Activation::Gelu)?;
    let out = m.scope("out", |m| m.dense(hidden, sizes.width))?;
    m.builder().add_(x, out)
}

struct Print;

impl Callback for Print {
    fn name(&self) -> String {
        "Print".to_owned()
    }

    fn step_end(&mut self, _: &mut FitContext, step: &StepOutputs) -> Result<()> {
        if step.number.is_multiple_of(100) {
            println!("step {}: loss {:.4}", step.number, step.loss);
        }
        Ok(())
    }

    fn evaluation_end(&mut self, _: &mut FitContext, held_out: &Metrics) -> Result<()> {
        println!("held out: {held_out}");
        Ok(())
    }
}

/// The mean loss of a text when each character is predicted from the one before, by counts in another text, each plus 1.
fn bigram_loss(counted: &[i64], text: &[i64], n: usize) -> f64 {
    let mut counts = vec![vec![1.0; n]; n];
    for pair in counted.windows(2) {
        counts[pair[0] as usize][pair[1] as usize] += 1.0;
    }
    let totals: Vec<f64> = counts.iter().map(|row| row.iter().sum()).collect();
    let loss = |i: usize, j: usize| (totals[i] / counts[i][j]).ln();
    let losses = text
        .windows(2)
        .map(|pair| loss(pair[0] as usize, pair[1] as usize));
    losses.sum::<f64>() / (text.len() - 1) as f64
}

/// Numbers that follow from a seed (Marsaglia's xorshift of 64 bits).
struct Random(u64);

impl Random {
    fn unit(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A token at temperature 0.8: the greatest sum of a logit and a number of Gumbel's distribution.
    fn token(&mut self, logits: &[f64]) -> i64 {
        let mut gumbel = || -(-self.unit().ln()).ln();
        let scores = logits.iter().map(|x| x / 0.8 + gumbel());
        let best = scores.enumerate().max_by(|a, b| a.1.total_cmp(&b.1));
        best.map_or(0, |(token, _)| token as i64)
    }
}
