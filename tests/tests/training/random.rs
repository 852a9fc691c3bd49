//! Random bits in a graph, and dropout by them.

use super::{epoch, examples, state};
use crate::multi_device::setup;
use gristmill::ir::{Dim, Graph, GraphBuilder, Op, ReduceKind, ScalarOp, ValueId};
use gristmill::testing::Setup;
use gristmill::train::{Model, Objective, Sgd, Trainer, Training, loss};
use gristmill::{DType, ErrorKind, Options, Result, Tensor, compile, interp};

/// Philox4x32-10 as its paper writes it: word `i % 4` of block `i / 4`.
fn bits(seed: u64, stream: i64, i: usize) -> u32 {
    let [block, stream] = [(i / 4) as u64, stream as u64].map(|x| [x as u32, (x >> 32) as u32]);
    let (mut left, mut right) = ([block[1], stream[1]], [block[0], stream[0]]);
    let mut key = [seed as u32, (seed >> 32) as u32];
    for _ in 0..10 {
        let products = [
            u64::from(right[0]) * 0xD251_1F53,
            u64::from(right[1]) * 0xCD9E_8D57,
        ];
        right = [
            (products[1] >> 32) as u32 ^ left[0] ^ key[0],
            (products[0] >> 32) as u32 ^ left[1] ^ key[1],
        ];
        left = [products[1] as u32, products[0] as u32];
        key = [
            key[0].wrapping_add(0x9E37_79B9),
            key[1].wrapping_add(0xBB67_AE85),
        ];
    }
    [right[0], left[0], right[1], left[1]][i % 4]
}

fn random_bits(seed: u64, shape: &[usize]) -> Op {
    let shape = shape.iter().map(|&n| n.into()).collect();
    random_bits_from(0, seed, shape)
}

fn random_bits_from(first: u64, seed: u64, shape: Vec<Dim>) -> Op {
    Op::RandomBits { seed, first, shape }
}

/// Bits of two seeds, the second ones on the second device if there are two, and a sum that is made of both.
fn pair(seeds: [u64; 2], shape: &[usize], n_devices: usize) -> Graph {
    let mut b = GraphBuilder::new("bits");
    let stream = b.input("stream", DType::I64, [1usize]);
    let first = b.add1(random_bits(seeds[0], shape), &[stream]).unwrap();
    let other = |b: &mut GraphBuilder| b.add1(random_bits(seeds[1], shape), &[stream]);
    let second = match n_devices {
        1 => other(&mut b),
        _ => b.with_device("/device:CPU:1", other),
    };
    let second = second.unwrap();
    let both = b.map(ScalarOp::BitXor, &[first, second]).unwrap();
    b.output("first", first);
    b.output("second", second);
    b.output("both", both);
    b.finish().unwrap()
}

#[test]
fn bits_depend_on_position_seed_and_stream_alone() {
    let shapes: [&[usize]; 6] = [&[], &[1], &[3, 0, 2], &[7, 11, 13], &[40_001], &[2, 1024]];
    for (k, shape) in shapes.into_iter().enumerate() {
        let seeds = [u64::MAX - k as u64, 0x0123_4567_89AB_CDEF << k];
        let n: usize = shape.iter().product();
        for stream in [0, 1, -1, i64::MAX - 5] {
            let want = seeds.map(|seed| (0..n).map(|i| bits(seed, stream, i)).collect::<Vec<_>>());
            let both: Vec<u32> = want[0].iter().zip(&want[1]).map(|(a, b)| a ^ b).collect();
            let want = [&want[0], &want[1], &both].map(|v| Tensor::from_slice(v, shape).unwrap());
            let input = [Tensor::from_slice(&[stream], &[1]).unwrap()];
            let one = pair(seeds, shape, 1);
            assert_eq!(interp::run(&one, &input).unwrap(), want);
            for (threads, level, n_devices) in
                [(1, 0, 1), (1, 2, 1), (2, 2, 1), (2, 3, 1), (2, 2, 2)]
            {
                let mut setup = setup(&format!("cpu:{n_devices}"), level);
                setup.settings.threads = Some(threads);
                let compiled = setup.compile(&pair(seeds, shape, n_devices)).unwrap();
                let found = compiled.run_ordered(&input).unwrap().into_tensors();
                assert_eq!(found, want, "{shape:?} {threads} {level} {n_devices}");
            }
        }
    }
}

#[test]
fn bits_from_a_position_on_are_a_part_of_all_bits() {
    for first in [1, 6, 8, 1027, (1 << 34) + 2] {
        let shape = [5usize, 103];
        let mut b = GraphBuilder::new("bits");
        let stream = b.input("stream", DType::I64, [1usize]);
        let op = random_bits_from(first, 77, shape.map(Dim::from).to_vec());
        let y = b.add1(op, &[stream]).unwrap();
        b.output("y", y);
        let one = b.scalar(DType::U32, 1.0);
        let other = b.map(ScalarOp::BitXor, &[y, one]).unwrap();
        b.output("other", other);
        let g = b.finish().unwrap();
        assert_eq!(Graph::parse(&g.to_string()).unwrap(), g);
        let want: Vec<u32> = (0..515).map(|i| bits(77, 4, first as usize + i)).collect();
        let want = Tensor::from_slice(&want, &shape).unwrap();
        let input = [Tensor::from_slice(&[4i64], &[1]).unwrap()];
        assert_eq!(interp::run(&g, &input).unwrap()[0], want);
        for level in [0, 2] {
            let compiled = setup("cpu:1", level).compile(&g).unwrap();
            assert_eq!(compiled.run_ordered(&input).unwrap()["y"], want, "{first}");
        }
    }
}

#[test]
fn extents_may_be_symbols_and_the_text_has_all() {
    let mut b = GraphBuilder::new("bits");
    let stream = b.input::<Dim>("stream", DType::I64, []);
    let x = b.input("x", DType::U32, [Dim::from("n"), 3.into()]);
    let op = Op::RandomBits {
        seed: u64::MAX,
        first: 0,
        shape: vec![Dim::from("n"), 3.into()],
    };
    let y = b.add1(op, &[stream]).unwrap();
    let y = b.map(ScalarOp::BitXor, &[x, y]).unwrap();
    b.output("y", y);
    let g = b.finish().unwrap();
    let text = g.to_string();
    assert!(text.contains("random_bits"), "{text}");
    assert!(text.contains("18446744073709551615"), "{text}");
    assert_eq!(Graph::parse(&text).unwrap(), g);
    let compiled = compile(&g, &Options::default()).unwrap();
    for n in [1usize, 4, 0, 333] {
        let inputs = [
            Tensor::scalar(9i64),
            Tensor::zeros(DType::U32, &[n, 3]).unwrap(),
        ];
        let want: Vec<u32> = (0..3 * n).map(|i| bits(u64::MAX, 9, i)).collect();
        let found = compiled.run_ordered(&inputs).unwrap();
        assert_eq!(found["y"].as_slice::<u32>(), want);
    }
}

#[test]
fn a_stream_is_one_number() {
    for (dtype, shape) in [
        (DType::I32, &[1][..]),
        (DType::I64, &[2]),
        (DType::I64, &[0]),
    ] {
        let mut b = GraphBuilder::new("bits");
        let stream = b.input("stream", dtype, shape.iter().copied());
        let error = b.add1(random_bits(1, &[3]), &[stream]).unwrap_err();
        assert!(error.to_string().contains("a stream of one i64"), "{error}");
    }
}

const RATE: f64 = 0.3;

/// Two dropouts of one value, whose sum is the loss: the gradient is the sum of both masks.
fn two_masks(m: &mut Model) -> Result<Objective> {
    let w = m.variable("w", &[100, 100], gristmill::train::Init::Constant(1.0))?;
    let first = m.scope("a", |m| m.dropout(w, RATE))?;
    let second = m.scope("a", |m| m.dropout(w, RATE))?;
    let sum = |m: &mut Model, x: ValueId| m.builder().reduce(ReduceKind::Sum, x, &[0, 1], false);
    let (one, two) = (sum(m, first)?, sum(m, second)?);
    let ten = m.builder().scalar(DType::F32, 10.0);
    let two = m.builder().mul(two, ten)?;
    let loss = m.builder().add_(one, two)?;
    Ok(Objective::new(loss)
        .metric("first", first)
        .metric("second", second))
}

fn masks(seed: u64, setup: Setup) -> Trainer {
    let update = Sgd {
        learning_rate: 1.0.into(),
        ..Sgd::default()
    };
    let training = Training {
        seed,
        options: setup.options.clone(),
        ..Training::from(update)
    };
    Trainer::new("masks", &training, two_masks).unwrap()
}

/// Both masks of a step, as the elements over those of the variable, and the step's change of the variable.
fn step(t: &Trainer) -> [Vec<f32>; 3] {
    let w = |t: &Trainer| t.resources().get("", "w").unwrap();
    let ones = || Tensor::from_slice(&[1f32; 10_000], &[100, 100]).unwrap();
    t.resources().set("", "w", &ones()).unwrap();
    let outputs = t.step::<&str>([]).unwrap();
    let after = w(t).unwrap().as_slice::<f32>().to_vec();
    let [first, second] =
        ["first", "second"].map(|name| outputs.metrics[name].as_slice::<f32>().to_vec());
    [first, second, after.into_iter().map(|w| 1.0 - w).collect()]
}

#[test]
fn dropout_keeps_its_share_and_gradients_see_the_mask() {
    let trainer = masks(3, setup("cpu:1", 2));
    let factor = (1.0 / (1.0 - RATE)) as f32;
    let [first, second, gradient] = step(&trainer);
    for mask in [&first, &second] {
        assert!(mask.iter().all(|&x| x == 0.0 || x == factor));
        let share = mask.iter().filter(|&&x| x > 0.0).count() as f64 / 1e4;
        assert!((share - (1.0 - RATE)).abs() < 0.02, "{share}");
    }
    for ((a, b), g) in first.iter().zip(&second).zip(gradient) {
        assert!((a + 10.0 * b - g).abs() < 1e-5, "{a} {b} {g}");
    }
    let n_equal = first.iter().zip(&second).filter(|(a, b)| a == b).count();
    assert!((5000..6600).contains(&n_equal), "{n_equal} elements alike");
    let next = step(&trainer);
    assert!(next[0] != first && next[1] != second && next[0] != second);
    let used = trainer.evaluate_batch::<&str>([]).unwrap();
    let w = trainer.resources().get("", "w").unwrap().unwrap();
    assert_eq!((&used["first"], &used["second"]), (&w, &w));
}

#[test]
fn masks_are_those_of_the_seed_and_the_step() {
    let path = |t: &Trainer, n: usize| (0..n).map(|_| step(t)).collect::<Vec<_>>();
    let whole = path(&masks(3, setup("cpu:1", 2)), 4);
    assert!(path(&masks(3, setup("cpu:1", 0)), 4) == whole);
    assert!(path(&masks(4, setup("cpu:1", 2)), 1)[0] != whole[0]);
    let file = tempfile::tempdir().unwrap();
    let file = file.path().join("state.safetensors");
    let first = masks(3, setup("cpu:1", 2));
    assert!(path(&first, 2) == whole[..2]);
    first.resources().save(&file).unwrap();
    let second = masks(3, setup("cpu:1", 2));
    second.resources().load(&file).unwrap();
    assert!(path(&second, 2) == whole[2..]);
}

fn perceptron(m: &mut Model) -> Result<Objective> {
    let x = m.input("x", DType::F32, [Dim::from("batch"), 6.into()]);
    let y = m.input("y", DType::I64, [Dim::from("batch")]);
    let x = m.scope("first", |m| {
        let x = m.dense(x, 64)?;
        let x = m.builder().map(ScalarOp::Relu, &[x])?;
        m.dropout(x, 0.2)
    })?;
    let logits = m.scope("second", |m| m.dense(x, 3))?;
    let loss = loss::sparse_cross_entropy(m.builder(), logits, y)?;
    Ok(Objective::new(loss))
}

#[test]
fn training_with_dropout_is_the_same_on_one_and_two_threads() {
    let data = examples(70);
    let run = |threads| {
        let training = Training {
            seed: 5,
            ..Training::from(gristmill::train::Adam::default())
        };
        let session = Setup::with_threads(threads).session();
        let trainer = Trainer::in_session(&session, "perceptron", &training, perceptron).unwrap();
        (0..3).for_each(|e| epoch(&trainer, &data, e));
        state(&trainer)
    };
    assert!(run(1) == run(2));
}

#[test]
fn rates_are_checked() {
    let mut m = Model::new("m", 1, true);
    let x = m.input("x", DType::F32, [4usize]);
    assert_eq!(m.dropout(x, 0.0).unwrap(), x);
    for rate in [-0.1, 1.0, f64::NAN] {
        let error = m.dropout(x, rate).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        assert!(
            error.to_string().contains("expected 0 to below 1"),
            "{error}"
        );
    }
    let i = m.input("i", DType::I32, [4usize]);
    assert!(m.dropout(i, 0.5).is_err());
    let mut m = Model::new("m", 1, false);
    let x = m.input("x", DType::F32, [4usize]);
    assert_eq!(m.dropout(x, 0.5).unwrap(), x);
}
