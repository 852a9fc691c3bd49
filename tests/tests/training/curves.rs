//! Losses of 100 steps beside those of PyTorch, from the same weights and examples (`tests/python/loss_curves.py`).

use gristmill::ir::{GraphBuilder, Layout, Op, PoolKind, Real, ScalarOp, ValueId, Window};
use gristmill::train::{Adam, Lrn, Model, Parameter, Pool2d, Sgd, Update, WeightDecay, loss};
use gristmill::{DType, Options, Result, Tensor, compile};

/// A net under construction, as `Net` of the script.
struct Net {
    m: Model,
    dtype: DType,
    weights: Vec<ValueId>,
}

impl Net {
    fn b(&mut self) -> &mut GraphBuilder {
        self.m.builder()
    }

    fn shifted(&mut self, shape: &[usize], scale: f64, add: f64) -> Result<ValueId> {
        let n: usize = shape.iter().product();
        let k = self.weights.len();
        let value = |i: usize| scale * (0.37 * i as f64 + 1.7 * k as f64 + 0.5).sin() + add;
        let values: Vec<f64> = (0..n).map(value).collect();
        let initial = Tensor::from_f64s(self.dtype, shape, &values)?;
        let v = self.b().variable(&format!("w{k}"), initial)?;
        self.weights.push(v);
        Ok(v)
    }

    fn weight(&mut self, shape: &[usize], scale: f64) -> Result<ValueId> {
        self.shifted(shape, scale, 0.0)
    }

    fn reals(&mut self, shape: &[usize]) -> Result<ValueId> {
        let n: usize = shape.iter().product();
        let value = |i: usize| {
            let i = i as f64;
            (0.61 * i).sin() + 0.3 * (0.017 * i * i % 1000.0).cos()
        };
        let values: Vec<f64> = (0..n).map(value).collect();
        let values = Tensor::from_f64s(self.dtype, shape, &values)?;
        Ok(self.b().constant(values))
    }

    fn labels(
        &mut self,
        range: std::ops::Range<usize>,
        shape: &[usize],
        classes: usize,
    ) -> Result<ValueId> {
        let labels: Vec<i64> = range.map(|i| ((i * 7 + i / 3) % classes) as i64).collect();
        Ok(self.b().constant(Tensor::from_slice(&labels, shape)?))
    }

    fn map(&mut self, op: ScalarOp, x: ValueId) -> Result<ValueId> {
        self.b().map(op, &[x])
    }

    /// `x w + b`.
    fn linear(&mut self, x: ValueId, w: ValueId, b: ValueId) -> Result<ValueId> {
        let y = self.b().matmul(x, w)?;
        self.b().add_(y, b)
    }

    fn entropy(&mut self, logits: ValueId, y: ValueId) -> Result<ValueId> {
        loss::sparse_cross_entropy(self.b(), logits, y)
    }
}

fn mlp(n: &mut Net) -> Result<ValueId> {
    let (w1, b1) = (n.weight(&[12, 20], 0.3)?, n.weight(&[20], 0.1)?);
    let (w2, b2) = (n.weight(&[20, 5], 0.3)?, n.weight(&[5], 0.1)?);
    let (x, y) = (n.reals(&[16, 12])?, n.labels(0..16, &[16], 5)?);
    let hidden = n.linear(x, w1, b1)?;
    let hidden = n.map(ScalarOp::Tanh, hidden)?;
    let logits = n.linear(hidden, w2, b2)?;
    n.entropy(logits, y)
}

/// A padded convolution of 3 x 3, ReLU, and pooling of 2 x 2.
fn pooled(n: &mut Net, x: ValueId, [w, b]: [ValueId; 2], filters: usize) -> Result<ValueId> {
    let window = |stride: usize, pad: usize| Window {
        strides: vec![stride; 2],
        dilations: vec![1; 2],
        pads_low: vec![pad; 2],
        pads_high: vec![pad; 2],
    };
    let conv = Op::Conv {
        window: window(1, 1),
        groups: 1,
        layout: Layout::ChannelsFirst,
    };
    let pool = Op::Pool {
        kind: PoolKind::Max,
        size: vec![2; 2],
        window: window(2, 0),
        ceil: false,
        layout: Layout::ChannelsFirst,
    };
    let x = n.b().add1(conv, &[x, w])?;
    let b = n.b().reshape(b, [filters, 1, 1])?;
    let x = n.b().add_(x, b)?;
    let x = n.map(ScalarOp::Relu, x)?;
    n.b().add1(pool, &[x])
}

fn lenet(n: &mut Net) -> Result<ValueId> {
    let first = [n.weight(&[4, 1, 3, 3], 0.4)?, n.weight(&[4], 0.1)?];
    let second = [n.weight(&[6, 4, 3, 3], 0.3)?, n.weight(&[6], 0.1)?];
    let (w, b) = (n.weight(&[54, 5], 0.2)?, n.weight(&[5], 0.1)?);
    let (x, y) = (n.reals(&[8, 1, 12, 12])?, n.labels(0..8, &[8], 5)?);
    let x = pooled(n, x, first, 4)?;
    let x = pooled(n, x, second, 6)?;
    let x = n.b().reshape(x, [8usize, 54])?;
    let logits = n.linear(x, w, b)?;
    n.entropy(logits, y)
}

/// A convolution of 5 x 5 that keeps the extents, and ReLU.
fn convolved(n: &mut Net, x: ValueId, [w, b]: [ValueId; 2]) -> Result<ValueId> {
    let conv = Op::Conv {
        window: Window {
            strides: vec![1; 2],
            dilations: vec![1; 2],
            pads_low: vec![2; 2],
            pads_high: vec![2; 2],
        },
        groups: 1,
        layout: Layout::ChannelsFirst,
    };
    let x = n.b().add1(conv, &[x, w])?;
    let b = n.b().reshape(b, [8usize, 1, 1])?;
    let x = n.b().add_(x, b)?;
    n.map(ScalarOp::Relu, x)
}

/// The network of the example `cifar10` with 8 filters. PyTorch divides the alpha of a local response normalisation by the size.
fn cifar(n: &mut Net) -> Result<ValueId> {
    let first = [n.weight(&[8, 3, 5, 5], 0.15)?, n.weight(&[8], 0.1)?];
    let second = [n.weight(&[8, 8, 5, 5], 0.1)?, n.shifted(&[8], 0.1, 0.1)?];
    let (w3, b3) = (n.weight(&[72, 16], 0.2)?, n.shifted(&[16], 0.1, 0.1)?);
    let (w4, b4) = (n.weight(&[16, 5], 0.3)?, n.weight(&[5], 0.1)?);
    let (x, y) = (n.reals(&[8, 3, 12, 12])?, n.labels(0..8, &[8], 5)?);
    let overlapping = Pool2d {
        size: [3, 3],
        strides: [2, 2],
        same: true,
    };
    let lrn = |size, beta, bias| Lrn {
        size,
        alpha: 0.1,
        beta,
        bias,
    };
    let x = convolved(n, x, first)?;
    let x = n.m.max_pool(x, overlapping)?;
    let x = n.m.local_response_norm(x, lrn(9, 0.75, 1.0))?;
    let x = convolved(n, x, second)?;
    let x = n.m.local_response_norm(x, lrn(4, 0.6, 2.0))?;
    let x = n.m.max_pool(x, overlapping)?;
    let x = n.m.flatten(x)?;
    let x = n.linear(x, w3, b3)?;
    let x = n.map(ScalarOp::Relu, x)?;
    let logits = n.linear(x, w4, b4)?;
    let error = n.entropy(logits, y)?;
    let decay = loss::l2(n.b(), w3)?;
    let dtype = n.dtype;
    let factor = n.b().scalar(dtype, 0.004);
    let decay = n.b().mul(decay, factor)?;
    n.b().add_(error, decay)
}

/// `[4, 8, 16]` as two heads `[4, 2, 8, 8]`, or back.
fn heads(n: &mut Net, x: ValueId, w: ValueId) -> Result<ValueId> {
    let x = n.b().matmul(x, w)?;
    let x = n.b().reshape(x, [4usize, 8, 2, 8])?;
    n.b().transpose(x, &[0, 2, 1, 3])
}

fn norm(n: &mut Net, x: ValueId, [gamma, beta]: [ValueId; 2]) -> Result<ValueId> {
    let op = Op::LayerNorm {
        axis: 2,
        epsilon: Real(1e-5),
    };
    n.b().add1(op, &[x, gamma, beta])
}

fn gpt(n: &mut Net) -> Result<ValueId> {
    let (table, places) = (n.weight(&[11, 16], 0.5)?, n.weight(&[8, 16], 0.3)?);
    let first = [n.shifted(&[16], 0.1, 1.0)?, n.weight(&[16], 0.1)?];
    let mut square = || n.weight(&[16, 16], 0.3);
    let [wq, wk, wv, wo] = [square()?, square()?, square()?, square()?];
    let second = [n.shifted(&[16], 0.1, 1.0)?, n.weight(&[16], 0.1)?];
    let (up, down) = (n.weight(&[16, 32], 0.2)?, n.weight(&[32, 16], 0.2)?);
    let head = n.weight(&[16, 11], 0.3)?;
    let (tokens, y) = (n.labels(0..32, &[4, 8], 11)?, n.labels(1..33, &[32], 11)?);
    let x = n.b().add1(Op::Gather { axis: 0 }, &[table, tokens])?;
    let x = n.b().add_(x, places)?;
    let normed = norm(n, x, first)?;
    let qkv = [
        heads(n, normed, wq)?,
        heads(n, normed, wk)?,
        heads(n, normed, wv)?,
    ];
    let attention = Op::Attention {
        scale: Real(1.0 / 8f64.sqrt()),
        causal: true,
    };
    let a = n.b().add1(attention, &qkv)?;
    let a = n.b().transpose(a, &[0, 2, 1, 3])?;
    let a = n.b().reshape(a, [4usize, 8, 16])?;
    let a = n.b().matmul(a, wo)?;
    let x = n.b().add_(x, a)?;
    let normed = norm(n, x, second)?;
    let wide = n.b().matmul(normed, up)?;
    let wide = n.map(ScalarOp::Gelu, wide)?;
    let narrow = n.b().matmul(wide, down)?;
    let x = n.b().add_(x, narrow)?;
    let logits = n.b().matmul(x, head)?;
    let logits = n.b().reshape(logits, [32usize, 11])?;
    n.entropy(logits, y)
}

/// Gate `k` of four, `[10, 8]`.
fn gate(n: &mut Net, gates: ValueId, k: i64, op: ScalarOp) -> Result<ValueId> {
    let op_slice = Op::Slice {
        starts: vec![0.into(), (8 * k).into()],
        sizes: vec![10.into(), 8.into()],
        steps: vec![1, 1],
    };
    let gate = n.b().add1(op_slice, &[gates])?;
    n.map(op, gate)
}

fn lstm(n: &mut Net) -> Result<ValueId> {
    let (w, u, b) = (
        n.weight(&[5, 32], 0.3)?,
        n.weight(&[8, 32], 0.3)?,
        n.weight(&[32], 0.1)?,
    );
    let head = n.weight(&[8, 4], 0.4)?;
    let (x, y) = (n.reals(&[6, 10, 5])?, n.labels(0..10, &[10], 4)?);
    let zeros = Tensor::zeros(n.dtype, &[10, 8])?;
    let zeros = n.b().constant(zeros);
    let (mut h, mut c) = (zeros, zeros);
    for t in 0..6i64 {
        let one = Op::Slice {
            starts: vec![t.into(), 0.into(), 0.into()],
            sizes: vec![1.into(), 10.into(), 5.into()],
            steps: vec![1; 3],
        };
        let step = n.b().add1(one, &[x])?;
        let step = n.b().reshape(step, [10usize, 5])?;
        let (input, before) = (n.linear(step, w, b)?, n.b().matmul(h, u)?);
        let gates = n.b().add_(input, before)?;
        let [i, f, o] = [0, 1, 3].map(|k| gate(n, gates, k, ScalarOp::Sigmoid));
        let g = gate(n, gates, 2, ScalarOp::Tanh)?;
        let (kept, entering) = (n.b().mul(f?, c)?, n.b().mul(i?, g)?);
        c = n.b().add_(kept, entering)?;
        let shown = n.map(ScalarOp::Tanh, c)?;
        h = n.b().mul(o?, shown)?;
    }
    let logits = n.b().matmul(h, head)?;
    n.entropy(logits, y)
}

type Make = fn(&mut Net) -> Result<ValueId>;

/// Name, net and update of each curve.
fn curves() -> Vec<(&'static str, Make, Update)> {
    let adam = |rate: f64| Adam {
        learning_rate: rate.into(),
        ..Adam::default()
    };
    let heavy = Sgd {
        learning_rate: 0.05.into(),
        momentum: 0.9,
        nesterov: true,
        ..Sgd::default()
    };
    let plain = Sgd {
        learning_rate: 0.05.into(),
        ..Sgd::default()
    };
    let decayed = |rate, weight_decay| Update {
        weight_decay,
        ..adam(rate).into()
    };
    vec![
        ("mlp", mlp, adam(1e-2).into()),
        ("lenet", lenet, decayed(3e-3, WeightDecay::L2(1e-2))),
        ("cifar", cifar, plain.into()),
        ("gpt", gpt, decayed(3e-3, WeightDecay::Decoupled(0.1))),
        ("lstm", lstm, heavy.into()),
    ]
}

/// The losses of 100 steps.
fn train(make: Make, update: &Update, dtype: DType) -> Result<Vec<f64>> {
    let mut net = Net {
        m: Model::new("curve", 0, true),
        dtype,
        weights: Vec::new(),
    };
    let loss = make(&mut net)?;
    let Net { mut m, weights, .. } = net;
    let b = m.builder();
    let gradients = b.grad(loss, &weights)?;
    let parameter = |(i, (&value, gradient)): (usize, (&ValueId, ValueId))| Parameter {
        name: format!("w{i}"),
        value,
        gradient,
    };
    let parameters: Vec<_> = weights
        .iter()
        .zip(gradients)
        .enumerate()
        .map(parameter)
        .collect();
    update.apply(b, &parameters)?;
    b.output("loss", loss);
    let model = compile(&m.finish()?, &Options::default())?;
    let step = |_| Ok(model.run_ordered(&[])?["loss"].to_f64s()[0]);
    (0..100).map(step).collect()
}

#[test]
fn losses_are_those_of_pytorch() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/data/training/curves.npz");
    let expected = gristmill::read_npz(path).unwrap();
    assert_eq!(expected.len(), curves().len());
    for (name, make, update) in curves() {
        let expected = expected.iter().find(|(own, _)| own == name).unwrap();
        let expected = expected.1.to_f64s();
        for (dtype, early, late) in [(DType::F64, 1e-9, 1e-9), (DType::F32, 1e-5, 1e-3)] {
            let found = train(make, &update, dtype).unwrap();
            assert_eq!(found.len(), expected.len());
            for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let tolerance = if i < 10 { early } else { late };
                let difference = (found - expected).abs() / expected.abs();
                assert!(
                    difference <= tolerance,
                    "{name} in {dtype}, step {i}: {found} {expected}"
                );
            }
        }
    }
}
