//! A mean over the lifetimes of a service: its state is two variables, kept in a file.
//!
//! `cargo run --release -p gristmill --example running_mean -- FILE.safetensors NUMBER..`
//!
//! Each number is a request; the answer is the mean of all numbers so far, those of earlier calls of the program included. The state is
//! saved at the end, as a service does now and then.

use gristmill::ir::{Graph, GraphBuilder, ScalarOp};
use gristmill::{Compiled, DType, Error, Options, Tensor, compile};
use std::path::Path;

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if let Err(e) = serve(&words) {
        eprintln!("error: {e}");
        std::process::exit(2);
    }
}

/// The model: the mean moves towards `x` by one part in as many as there were numbers.
fn mean() -> Result<Graph, Error> {
    let mut b = GraphBuilder::new("mean");
    let x = b.input("x", DType::F32, [1]);
    let n = b.variable("n", Tensor::from(vec![0f32]))?;
    let mean = b.variable("mean", Tensor::from(vec![0f32]))?;
    let one = b.constant(Tensor::from(vec![1f32]));
    let n = b.add_(n, one)?;
    let n = b.assign_variable("n", n)?;
    let distance = b.map(ScalarOp::Sub, &[x, mean])?;
    let step = b.map(ScalarOp::Div, &[distance, n])?;
    let mean = b.add_(mean, step)?;
    let mean = b.assign_variable("mean", mean)?;
    b.output("mean", mean);
    b.finish()
}

fn serve(words: &[String]) -> Result<(), Box<dyn std::error::Error>> {
    let [file, numbers @ ..] = words else {
        return Err("usage: running_mean FILE.safetensors NUMBER..".into());
    };
    let file = Path::new(file);
    let model = compile(&mean()?, &Options::default())?;
    if file.exists() {
        model.resources().load(file)?;
    }
    for number in numbers {
        println!("{}", answer(&model, number.parse()?)?);
    }
    model.resources().save(file)?;
    Ok(())
}

fn answer(model: &Compiled, x: f32) -> Result<f32, Error> {
    let outputs = model.run([("x", Tensor::from(vec![x]))])?;
    Ok(outputs["mean"].as_slice::<f32>()[0])
}
