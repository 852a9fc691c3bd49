//! The examples of training, on data made here.

use super::{char_gpt, fashion_mnist};
use fashion_mnist::{Net, On};
use gristmill::ErrorKind;
use gristmill::train::EventLog;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Writes bytes in the IDX format.
fn write_idx(path: &Path, shape: &[usize], bytes: &[u8]) {
    let mut file = vec![0, 0, 8, shape.len() as u8];
    let extents = shape.iter().flat_map(|&n| (n as u32).to_be_bytes());
    file.extend(extents);
    file.extend(bytes);
    fs::write(path, file).unwrap();
}

/// Images whose class is the place of a bright bar among noise.
fn write_images(folder: &Path, part: &str, n: usize) {
    let class = |image: usize| image * 7 % 10;
    let pixel = |at: usize| {
        let (image, row) = (at / 784, at % 784 / 28);
        let noise = (at * 7919 + 13) % 101;
        let is_bar = row / 2 == class(image) + 2;
        (noise + if is_bar { 150 } else { 0 }) as u8
    };
    let pixels: Vec<u8> = (0..784 * n).map(pixel).collect();
    let classes: Vec<u8> = (0..n).map(|image| class(image) as u8).collect();
    let path = |name: &str| folder.join(format!("{part}-{name}"));
    write_idx(&path("images-idx3-ubyte"), &[n, 28, 28], &pixels);
    write_idx(&path("labels-idx1-ubyte"), &[n], &classes);
}

fn one() -> On {
    On::parse("cpu:1", "one").unwrap()
}

fn fashion_program(net: Net) {
    let (data, run) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_images(data.path(), "train", 320);
    write_images(data.path(), "t10k", 100);
    let trained = fashion_mnist::train(data.path(), run.path(), net, 1, &one()).unwrap();
    let rates: Vec<f64> = trained.epochs.iter().map(|e| e.learning_rate).collect();
    let expected = [[1e-3; 3].as_slice(), &[1e-4; 4], &[1e-5; 5]].concat();
    assert_eq!(rates, expected);
    let files = fs::read_dir(run.path().join("checkpoints")).unwrap();
    assert_eq!(files.count(), 12);
    // A trainer with other initial values computes the metrics of the end of training.
    let metrics = fashion_mnist::evaluate(data.path(), run.path(), net).unwrap();
    let last = trained.epochs.last().unwrap().held_out.as_ref().unwrap();
    assert_eq!(&metrics, last);
    assert!(metrics.get("accuracy").unwrap() > 0.9, "{metrics}");
    let log = EventLog::read(run.path().join("logs/validation")).unwrap();
    let logged = log.scalar("accuracy");
    assert_eq!(logged.len(), 12);
    assert_eq!(
        Some(f64::from(logged[11].1)),
        last.get("accuracy").map(|a| f64::from(a as f32))
    );
}

#[test]
fn fashion_mnist_loads_the_last_weights_of_the_perceptron() {
    fashion_program(Net::Mlp);
}

#[test]
fn fashion_mnist_loads_the_last_weights_of_lenet() {
    fashion_program(Net::LeNet);
}

/// Two replicas, and four workers in no step with each other.
#[test]
fn fashion_mnist_is_learnt_by_several_devices() {
    let (data, run) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_images(data.path(), "train", 320);
    write_images(data.path(), "t10k", 100);
    for (devices, strategy, n_workers) in [("cpu:2", "mirrored", 0), ("cpu:4", "async", 4)] {
        let on = On::parse(devices, strategy).unwrap();
        let run = run.path().join(strategy);
        let trained = fashion_mnist::train(data.path(), &run, Net::Mlp, 1, &on).unwrap();
        assert_eq!(trained.workers.len(), n_workers);
        let metrics = fashion_mnist::evaluate(data.path(), &run, Net::Mlp).unwrap();
        assert!(
            metrics.get("accuracy").unwrap() > 0.9,
            "{strategy}: {metrics}"
        );
    }
}

#[test]
fn fashion_mnist_names_what_is_missing() {
    let empty = tempfile::tempdir().unwrap();
    let e = fashion_mnist::train(empty.path(), empty.path(), Net::Mlp, 1, &one()).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::InvalidInput);
    assert!(e.to_string().contains("train-images-idx3-ubyte.gz"), "{e}");
    let e = fashion_mnist::evaluate(empty.path(), empty.path(), Net::Mlp).unwrap_err();
    assert!(e.to_string().contains("checkpoints"), "{e}");
    let e = "vgg".parse::<Net>().err().unwrap();
    assert_eq!(e.to_string(), "network \"vgg\": expected mlp or lenet");
}

/// Least mean loss of any prediction of a character from the one before: the entropy of a text's pairs, given their first characters.
fn pair_entropy(text: &str) -> f64 {
    let mut firsts: BTreeMap<char, f64> = BTreeMap::new();
    let mut pairs: BTreeMap<(char, char), f64> = BTreeMap::new();
    for pair in text.chars().zip(text.chars().skip(1)) {
        *firsts.entry(pair.0).or_default() += 1.0;
        *pairs.entry(pair).or_default() += 1.0;
    }
    let terms = pairs.iter().map(|((a, _), n)| n * (firsts[a] / n).ln());
    terms.sum::<f64>() / firsts.values().sum::<f64>()
}

#[test]
fn char_gpt_learns_more_than_pairs_of_characters() {
    let text = "the cat sat on the hat and the bat ran to that man. ".repeat(60);
    let sizes = char_gpt::Sizes {
        context: 16,
        layers: 2,
        width: 32,
        batch: 8,
        steps: 300,
    };
    let (loss, pairs, written) = char_gpt::train(&text, sizes, 40).unwrap();
    // No table of pairs has a lower loss than the one counted in the held-out text itself. Below it, a model knows earlier characters.
    let bound = pair_entropy(&text[text.len() / 10 * 9..]);
    assert!(pairs >= bound && pairs < bound + 0.3, "{pairs} {bound}");
    assert!(loss < bound / 2.0, "{loss} {bound} {written:?}");
    assert_eq!(written.chars().count(), 40);
    let words = written.split([' ', '.']);
    let known = words.filter(|word| text.contains(word)).count();
    assert!(known >= 5, "{written:?}");
    let again = char_gpt::train(&text, sizes, 40).unwrap();
    assert_eq!(again, (loss, pairs, written));
}

#[test]
fn char_gpt_refuses_a_short_text() {
    let sizes = char_gpt::Sizes {
        context: 16,
        layers: 1,
        width: 8,
        batch: 8,
        steps: 1,
    };
    let e = char_gpt::train(&"ab".repeat(50), sizes, 1).unwrap_err();
    assert_eq!(e.to_string(), "windows of 16 of 10 tokens: expected 1 to 9");
}
