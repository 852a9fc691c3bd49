//! Text from a language model in ONNX that takes a cache of keys and values, as PyTorch exports it.
//!
//! `cargo run --release -p gristmill --example generate -- [MODEL] [--prompt TEXT] [--tokens N] [--top-k K]
//! [--temperature T] [--seed S] [--threads N]`
//!
//! The first input of the model is the tokens, `i64[batch, seq]`; its first output the logits,
//! `f32[batch, seq, vocabulary]`; the other inputs are the cache, of any length, which the other
//! outputs have longer by the tokens, in the same order.
//!
//! Where no model is named, a small one is taken whose tokens are bytes: it has read the guide and
//! the comments of this project (`tests/python/train_tiny_gpt.py`). For models with another
//! vocabulary `--prompt` takes numbers, and numbers are printed. Temperature 0 takes the most likely
//! token.

use gristmill::ir::{Bindings, Type};
use gristmill::{Compiled, DType, Error, Options, Session, Settings, Tensor, onnx};
use std::io::Write;
use std::time::{Duration, Instant};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/tiny_gpt.onnx");

fn main() {
    if let Err(e) = run(&std::env::args().skip(1).collect::<Vec<_>>()) {
        eprintln!("error: {e}");
        std::process::exit(2);
    }
}

/// The words of the command line.
struct Request {
    model: String,
    prompt: String,
    n_tokens: usize,
    sampling: Sampling,
    threads: Option<usize>,
}

/// How the next token is chosen.
struct Sampling {
    top_k: usize,
    temperature: f32,
    random: Random,
}

/// Numbers that follow from a seed (Marsaglia's xorshift of 64 bits).
struct Random(u64);

fn run(words: &[String]) -> Result<()> {
    let mut request = Request::of(words)?;
    let session = Session::new(&Settings {
        threads: request.threads,
        ..Settings::default()
    })?;
    let model = onnx::load(&request.model)?;
    let mut decoder = Decoder::new(session.compile(&model, &Options::default())?)?;
    let prompt = Prompt::of(&request.prompt)?;
    let mut tokens = prompt.tokens.clone();
    prompt.print(&tokens)?;
    let mut times = Vec::new();
    for _ in 0..request.n_tokens {
        let started = Instant::now();
        let logits = decoder.step(&tokens)?;
        let next = request.sampling.choose(&logits);
        times.push(started.elapsed());
        tokens = vec![next];
        prompt.print(&tokens)?;
    }
    report(&times);
    Ok(())
}

fn report(times: &[Duration]) {
    let [first, later @ ..] = times else { return };
    let seconds: f64 = later.iter().map(Duration::as_secs_f64).sum();
    let rate = later.len() as f64 / seconds;
    eprintln!("\n{first:.1?} for the prompt, then {rate:.1} tokens/s");
}

impl Request {
    fn of(words: &[String]) -> Result<Request> {
        let mut request = Request {
            model: MODEL.to_owned(),
            prompt: "A placement ".to_owned(),
            n_tokens: 160,
            sampling: Sampling {
                top_k: 8,
                temperature: 0.8,
                random: Random(1),
            },
            threads: None,
        };
        let mut words = words.iter();
        while let Some(word) = words.next() {
            let Some(flag) = word.strip_prefix("--") else {
                request.model.clone_from(word);
                continue;
            };
            let value = words.next();
            let value = value.ok_or_else(|| Error::invalid(format!("--{flag} takes a value")))?;
            request.set(flag, value)?;
        }
        Ok(request)
    }

    fn set(&mut self, flag: &str, value: &str) -> Result<()> {
        match flag {
            "prompt" => value.clone_into(&mut self.prompt),
            "tokens" => self.n_tokens = number(flag, value)?,
            "top-k" => self.sampling.top_k = number(flag, value)?,
            "temperature" => self.sampling.temperature = number(flag, value)?,
            "seed" => self.sampling.random = Random(number::<u64>(flag, value)?.max(1)),
            "threads" => self.threads = Some(number(flag, value)?),
            _ => return Err(Error::invalid(format!("--{flag} is no flag of this example")).into()),
        }
        Ok(())
    }
}

fn number<T: std::str::FromStr>(flag: &str, value: &str) -> Result<T> {
    let parsed = value.parse();
    let refused = |_| Error::invalid(format!("--{flag}: {value:?} is not a number that it takes"));
    Ok(parsed.map_err(refused)?)
}

/// A model, and the keys and values of the tokens that it has read.
struct Decoder {
    model: Compiled,
    cache: Vec<Tensor>,
}

impl Decoder {
    fn new(model: Compiled) -> Result<Decoder> {
        let [(_, tokens), cache @ ..] = model.inputs() else {
            return Err(Error::invalid("the model has no inputs").into());
        };
        if tokens.rank() != 2 || cache.len() + 1 != model.output_names().len() {
            let message = "expected the inputs tokens[batch, seq] and a cache, and as many outputs";
            return Err(Error::invalid(message).into());
        }
        let empty = cache.iter().map(|(_, ty)| empty(ty));
        Ok(Decoder {
            cache: empty.collect::<Result<_>>()?,
            model,
        })
    }

    /// Reads tokens; gives the logits of the next one.
    fn step(&mut self, tokens: &[i64]) -> Result<Vec<f32>> {
        let read = Tensor::from_slice(tokens, &[1, tokens.len()])?;
        let inputs = [read].into_iter().chain(std::mem::take(&mut self.cache));
        let names = self.model.inputs().iter().map(|(name, _)| name.as_str());
        let outputs = self.model.run(names.zip(inputs))?;
        let mut outputs = outputs.into_tensors().into_iter();
        let logits = outputs.next().ok_or_else(|| Error::invalid("no logits"))?;
        self.cache = outputs.collect();
        let vocabulary = logits.shape().last().copied().unwrap_or(0);
        if logits.dtype() != DType::F32 || vocabulary == 0 {
            return Err(Error::invalid("the first output is not f32 logits of tokens").into());
        }
        Ok(logits.as_slice::<f32>()[logits.len() - vocabulary..].to_vec())
    }
}

/// An empty cache of batch 1.
fn empty(ty: &Type) -> Result<Tensor> {
    let symbols = ty.shape.iter().filter_map(|d| d.as_symbol());
    let sizes = symbols
        .enumerate()
        .map(|(i, s)| (s.to_owned(), usize::from(i == 0)));
    let sizes: Bindings = sizes.collect();
    let shape = ty.shape.bind(&sizes).as_static();
    let shape = shape.ok_or_else(|| Error::invalid(format!("a cache of type {ty}")))?;
    Ok(Tensor::zeros(ty.dtype, &shape)?)
}

/// The text of a prompt as tokens.
struct Prompt {
    tokens: Vec<i64>,
    is_text: bool,
}

impl Prompt {
    /// Numbers, or the bytes of a text.
    fn of(text: &str) -> Result<Prompt> {
        let numbers: std::result::Result<Vec<i64>, _> =
            text.split_whitespace().map(str::parse).collect();
        let is_text = numbers.is_err();
        let tokens = numbers.unwrap_or_else(|_| text.bytes().map(i64::from).collect());
        match tokens.is_empty() {
            true => Err(Error::invalid("--prompt has no tokens").into()),
            false => Ok(Prompt { tokens, is_text }),
        }
    }

    /// Prints tokens as the prompt gives them.
    fn print(&self, tokens: &[i64]) -> Result<()> {
        let mut out = std::io::stdout();
        for &token in tokens {
            match u8::try_from(token) {
                Ok(byte) if self.is_text => out.write_all(&[byte])?,
                _ => write!(out, "{token} ")?,
            }
        }
        Ok(out.flush()?)
    }
}

impl Sampling {
    fn choose(&mut self, logits: &[f32]) -> i64 {
        let likely = self.most_likely(logits);
        let best = logits[likely[0]];
        let weight = |&i: &usize| ((logits[i] - best) / self.temperature).exp();
        let weights: Vec<f32> = likely.iter().map(weight).collect();
        let mut left = self.random.unit() * weights.iter().sum::<f32>();
        let chosen = weights.iter().position(|w| {
            left -= w;
            left <= 0.0
        });
        likely[chosen.unwrap_or(0)] as i64
    }

    /// The tokens to choose from, in descending order of their logits.
    fn most_likely(&self, logits: &[f32]) -> Vec<usize> {
        if self.temperature <= 0.0 {
            let best = (0..logits.len()).reduce(|a, b| if logits[b] > logits[a] { b } else { a });
            return best.into_iter().collect();
        }
        let k = self.top_k.clamp(1, logits.len());
        let descending = |a: &usize, b: &usize| logits[*b].total_cmp(&logits[*a]);
        let mut tokens: Vec<usize> = (0..logits.len()).collect();
        tokens.select_nth_unstable_by(k - 1, descending);
        tokens.truncate(k);
        tokens.sort_by(descending);
        tokens
    }
}

impl Random {
    /// A number from 0 to 1.
    fn unit(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 40) as f32 / (1u64 << 24) as f32
    }
}
