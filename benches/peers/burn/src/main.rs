//! Time of a step of training in burn, with Adam: the perceptron and LeNet of `benches/examples/training.rs`, batch 128, random data, one thread.
//!
//! `burn-training MODEL BACKEND`, models `mlp` and `lenet`, back ends `flex` (pure Rust) and `ndarray` (deprecated). The row: model, median time
//! of a step in ms, time from the model to the end of the first step, and back end. In turn with ours, bound to one core:
//! `for i in 1 2 3; do taskset -c 0 burn-training lenet flex; taskset -c 0 training lenet --threads 1; done`.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::{CrossEntropyLoss, CrossEntropyLossConfig};
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::{Linear, LinearConfig, PaddingConfig2d};
use burn::optim::{AdamConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Distribution, Int, Tensor};
use std::time::Instant;

const BATCH: usize = 128;
/// Steps before the timed ones.
const N_WARM: usize = 4;
/// Steps that are timed.
const N_STEPS: usize = 30;

#[derive(Module, Debug)]
struct Net {
    convolutions: Vec<Conv2d>,
    pool: MaxPool2d,
    dense: Vec<Linear>,
}

impl Net {
    fn new(channels: &[usize], units: &[usize], device: &Device) -> Net {
        let convolution = |pair: &[usize]| {
            let padding = PaddingConfig2d::Explicit(2, 2, 2, 2);
            let config = Conv2dConfig::new([pair[0], pair[1]], [5, 5]);
            config.with_padding(padding).init(device)
        };
        let dense = |pair: &[usize]| LinearConfig::new(pair[0], pair[1]).init(device);
        Net {
            convolutions: channels.windows(2).map(convolution).collect(),
            pool: MaxPool2dConfig::new([2, 2]).init(),
            dense: units.windows(2).map(dense).collect(),
        }
    }

    /// From `[batch, 1, 28, 28]` to logits `[batch, 10]`.
    fn forward(&self, mut images: Tensor<4>) -> Tensor<2> {
        for convolution in &self.convolutions {
            images = self.pool.forward(relu(convolution.forward(images)));
        }
        let mut x: Tensor<2> = images.flatten(1, 3);
        for (i, layer) in self.dense.iter().enumerate() {
            x = layer.forward(x);
            if i + 1 < self.dense.len() {
                x = relu(x);
            }
        }
        x
    }
}

/// A net, its optimiser and a batch.
struct Training {
    device: Device,
    net: Option<Net>,
    optimiser: ModuleOptimizer,
    loss: CrossEntropyLoss,
    images: Tensor<4>,
    labels: Tensor<1, Int>,
}

impl Training {
    fn new(model: &str, device: Device) -> Training {
        let net = match model {
            "mlp" => Net::new(&[], &[784, 512, 256, 10], &device),
            _ => Net::new(&[1, 6, 16], &[784, 120, 84, 10], &device),
        };
        let labels: Vec<i64> = (0..BATCH as i64).map(|i| i % 10).collect();
        Training {
            net: Some(net),
            optimiser: AdamConfig::new().with_epsilon(1e-8).init(),
            loss: CrossEntropyLossConfig::new().init(&device),
            images: Tensor::random([BATCH, 1, 28, 28], Distribution::Normal(0.0, 1.0), &device),
            labels: Tensor::from_data(labels.as_slice(), &device),
            device,
        }
    }

    fn step(&mut self) {
        let net = self.net.take().expect("each step puts the net back");
        let logits = net.forward(self.images.clone());
        let gradients = self.loss.forward(logits, self.labels.clone()).backward();
        let gradients = GradientsParams::from_grads(gradients, &net);
        self.net = Some(self.optimiser.step(1e-3, net, gradients));
        self.device.sync().expect("the device is the CPU");
    }
}

#[expect(deprecated, reason = "programs from before `flex` have it")]
fn device(backend: &str) -> Device {
    match backend {
        "ndarray" => Device::ndarray(),
        _ => Device::flex(),
    }
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        [model @ ("mlp" | "lenet"), backend @ ("flex" | "ndarray")] => time(model, backend),
        _ => {
            eprintln!("error: expected mlp or lenet, and flex or ndarray");
            std::process::exit(2);
        }
    }
}

fn time(model: &str, backend: &str) {
    let begin = Instant::now();
    let mut training = Training::new(model, device(backend).autodiff());
    training.step();
    let first = begin.elapsed().as_secs_f64();
    (1..N_WARM).for_each(|_| training.step());
    let mut times = [0.0; N_STEPS];
    for time in &mut times {
        let begin = Instant::now();
        training.step();
        *time = begin.elapsed().as_secs_f64() * 1e3;
    }
    times.sort_unstable_by(f64::total_cmp);
    let median = times[N_STEPS / 2];
    println!("{model}\t{median:.3} ms\tfirst step after {first:.2} s\t{backend}");
}
