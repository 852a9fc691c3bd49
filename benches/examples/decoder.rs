//! Tokens per second of a decoder whose caches are variables: `decoder MODEL.onnx [--threads T] [--tokens N]`.
//!
//! Each input `past_X` of the model takes what the output `present_X` gave in the run before; the other inputs are `token`, `i64[1, 1]`, and
//! `position`, `i64[1]`, the other output is the next token. Prints the rate, then the tokens after token 1. `decoder.py` among the peers
//! writes the model, and compares.

use gristmill::{Compiled, Options, Result, Session, Settings, Source, Tensor, onnx};
use std::time::Instant;

fn main() {
    if let Err(e) = run() {
        eprintln!("error: {e}");
        std::process::exit(2);
    }
}

fn run() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let number = |flag: &str| {
        let at = words.iter().position(|w| w == flag)?;
        words.get(at + 1)?.parse::<usize>().ok()
    };
    let Some(path) = words.first() else {
        return Err(gristmill::Error::invalid(
            "usage: decoder MODEL.onnx [--threads T] [--tokens N]",
        ));
    };
    let model = onnx::load(path)?;
    let names = model.graph_proto().input.iter().map(|i| i.name.clone());
    let pair = |past: String| {
        let present = past
            .strip_prefix("past_")
            .map(|rest| format!("present_{rest}"));
        present.map(|present| (past, present))
    };
    let pairs: Vec<(String, String)> = names.filter_map(pair).collect();
    let session = Session::new(&Settings {
        threads: number("--threads"),
        ..Settings::default()
    })?;
    let options = Options::default();
    let source = Source::from(&model).keeping(&pairs, &options.dims)?;
    let model = session.compile(source, &options)?;
    let n = number("--tokens").unwrap_or(128);
    tokens(&model, n)?;
    model.resources().reset("");
    let start = Instant::now();
    let tokens = tokens(&model, n)?;
    println!("{}", n as f64 / start.elapsed().as_secs_f64());
    let tokens = tokens.iter().map(i64::to_string);
    println!("{}", tokens.collect::<Vec<_>>().join(" "));
    Ok(())
}

fn tokens(model: &Compiled, n: usize) -> Result<Vec<i64>> {
    let mut tokens = Vec::new();
    let mut token = 1i64;
    for at in 0..n {
        let inputs = [
            Tensor::from_slice(&[token], &[1, 1])?,
            Tensor::from_slice(&[at as i64], &[1])?,
        ];
        let outputs = model.run([
            ("token", inputs[0].clone()),
            ("position", inputs[1].clone()),
        ])?;
        token = outputs
            .iter()
            .next()
            .map_or(0, |(_, t)| t.as_slice::<i64>()[0]);
        tokens.push(token);
    }
    Ok(tokens)
}
