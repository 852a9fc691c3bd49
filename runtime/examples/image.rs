//! Runs an image on zeros: `cargo run --release -p gristmill-runtime --no-default-features --example image -- model.gmx`.
//!
//! This is a whole program that ships a model: it links the runtime and its kernels, and no compiler.

use gristmill_runtime::Tensor;
use gristmill_runtime::exec::{ExecOptions, Executor};
use gristmill_runtime::image::Image;
use std::error::Error;
use std::path::PathBuf;
use std::time::Instant;

fn main() -> Result<(), Box<dyn Error>> {
    let path: PathBuf = std::env::args_os()
        .nth(1)
        .ok_or("give the path of an image")?
        .into();
    let started = Instant::now();
    // SAFETY: whoever runs this program trusts the file, as they trust the program.
    let image = unsafe { Image::open(&path) }?;
    let program = image.programs().first().ok_or("the image is empty")?;
    let executor = Executor::new(program.clone(), &ExecOptions::validated())?;
    let inputs = program.inputs.iter();
    let inputs: Vec<Tensor> = inputs
        .map(|i| Tensor::zeros(i.dtype, &i.shape))
        .collect::<Result<_, _>>()?;
    let opened = started.elapsed();
    let outputs = executor.run(&inputs)?;
    let ran = started.elapsed() - opened;
    for (spec, tensor) in program.outputs.iter().zip(&outputs) {
        println!("{}: {tensor}", spec.name);
    }
    println!("opened in {opened:?}, ran in {ran:?}");
    Ok(())
}
