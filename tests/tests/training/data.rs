//! Data sets: files, images, tokens; the same batches whoever loads them.

use super::{examples, perceptron, state, trainer};
use gristmill::testing::Setup;
use gristmill::train::{
    Adam, Batch, Checkpoints, Dataset, Epoch, Every, Example, FileDataset, Fit, ImageOp, Loading,
    ModelCheckpoint, Random, TensorDataset, Tokens, Trainer, Training, Vocabulary,
};
use gristmill::{DType, Result, Tensor};
use std::fs;
use std::path::Path;

const EPOCH: Epoch = Epoch { seed: 3, number: 0 };

/// `[n, 2, 3, 4]`, each image by its own numbers.
fn images(n: usize) -> TensorDataset {
    let pixels: Vec<u8> = (0..n * 24).map(|i| ((i * 37) % 11) as u8).collect();
    let images = Tensor::from_slice(&pixels, &[n, 2, 3, 4]).unwrap();
    let labels: Vec<i64> = (0..n as i64).collect();
    let labels = Tensor::from_slice(&labels, &[n]).unwrap();
    TensorDataset::new([("image", images), ("label", labels)]).unwrap()
}

fn pixels(batch: &Batch) -> Vec<f32> {
    batch[0].1.as_slice::<f32>().to_vec()
}

fn changed(ops: impl IntoIterator<Item = ImageOp>) -> Vec<f32> {
    let data = images(3).images("image", ops);
    pixels(&data.rows(&[0], EPOCH).unwrap())
}

#[track_caller]
fn assert_near(own: &[f32], expected: &[f32]) {
    let pairs = own.iter().zip(expected);
    let is_near = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-6 * b.abs().max(1.0);
    assert!(
        own.len() == expected.len() && pairs.clone().all(is_near),
        "{own:?}, expected {expected:?}"
    );
}

#[test]
fn operations_on_images_give_the_numbers_of_numpy() {
    // x = (numpy.arange(24) * 37 % 11).astype("f4").reshape(2, 3, 4)
    // m = x.mean((1, 2), keepdims=True); (x - m) * 1.5 + m
    let contrast = ImageOp::RandomContrast {
        low: 1.5,
        high: 1.5,
    };
    assert_near(
        &changed([contrast]),
        &[
            -2.291_666_5,
            3.708_333_3,
            9.708_334,
            -0.791_666_5,
            5.208_333,
            11.208_334,
            0.708_333_25,
            6.708_333,
            12.708_334,
            2.208_333_3,
            8.208_333,
            -2.291_666_5,
            3.541_666_7,
            9.541_666,
            -0.958_333_5,
            5.041_667,
            11.041_667,
            0.541_666_5,
            6.541_666_5,
            12.541_667,
            2.041_666_7,
            8.041_667,
            -2.458_333_3,
            3.541_666_7,
        ],
    );
    // (x - x.mean()) / max(x.std(), 1 / sqrt(24))
    let standard = changed([ImageOp::Standardize]);
    assert_near(
        &standard[..6],
        &[
            -1.488_194_8,
            -0.234_978_14,
            1.018_238_5,
            -1.174_890_6,
            0.078_326_05,
            1.331_542_7,
        ],
    );
    // x[:, 0:2, 1:3], as (3 - 2) // 2 = 0 and (4 - 2) // 2 = 1
    let center = ImageOp::CenterCrop {
        height: 2,
        width: 2,
    };
    assert_near(
        &changed([center]),
        &[4.0, 8.0, 9.0, 2.0, 8.0, 1.0, 2.0, 6.0],
    );
    let normalize = ImageOp::Normalize {
        mean: vec![1.0, 2.0],
        deviation: vec![2.0, 4.0],
    };
    let own = changed([ImageOp::Scale(2.0), normalize]);
    assert_near(&own[..3], &[-0.5, 3.5, 7.5]);
    assert_near(&own[12..15], &[1.5, 3.5, 0.0]);
    // A plain image has one value, deviation 0, and is divided by 1 / sqrt(n).
    let plain = Tensor::from_slice(&[3u8; 12], &[1, 3, 4]).unwrap();
    let plain = TensorDataset::new([("image", plain)]).unwrap();
    let plain = plain.images("image", [ImageOp::Standardize]);
    let batch = plain.rows(&[0], EPOCH).unwrap();
    assert_eq!(batch[0].1.shape(), [1, 1, 3, 4]);
    assert_eq!(pixels(&batch), [0.0; 12]);
}

#[test]
fn random_operations_have_the_distributions_of_their_documentation() {
    const N: usize = 4000;
    // Pixel `i` of an image of 5 x 5 is `i`, so that the first pixel says where a window begins.
    let numbers: Vec<f32> = (0..25).map(|i| i as f32).collect();
    let all: Vec<f32> = numbers.iter().copied().cycle().take(25 * N).collect();
    let all = Tensor::from_slice(&all, &[N, 5, 5]).unwrap();
    let data = || TensorDataset::new([("image", all.clone())]).unwrap();
    let places: Vec<usize> = (0..N).collect();
    let first = |ops: Vec<ImageOp>, of: usize| -> Vec<f32> {
        let batch = data().images("image", ops).rows(&places, EPOCH).unwrap();
        let all = pixels(&batch);
        all.chunks(all.len() / N).map(|image| image[of]).collect()
    };
    let crop = |padding| ImageOp::RandomCrop {
        height: 3,
        width: 4,
        padding,
    };
    let begins = first(vec![crop(0)], 0);
    for (row, column) in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)] {
        let begin = (row * 5 + column) as f32;
        let n = begins.iter().filter(|&&b| b == begin).count();
        // A sixth of 4000, by 5 deviations.
        assert!(
            n.abs_diff(667) < 118,
            "{n} windows begin at {row}, {column}"
        );
    }
    // Of 5 x 4 windows with a border of zeros, 4 begin in its first row and 4 more in its first column; one has pixel 0 first.
    let padded = first(vec![crop(1)], 0);
    let n = padded.iter().filter(|&&b| b == 0.0).count() as f64 / N as f64;
    assert!((n - 9.0 / 20.0).abs() < 0.04, "{n}");
    let flipped = first(vec![ImageOp::RandomFlip], 0);
    let n = flipped.iter().filter(|&&b| b == 4.0).count();
    assert!(
        n.abs_diff(2000) < 160 && flipped.iter().all(|b| [0.0, 4.0].contains(b)),
        "{n}"
    );
    let bright = first(vec![ImageOp::RandomBrightness { delta: 8.0 }], 0);
    let mean = bright.iter().sum::<f32>() / N as f32;
    assert!(
        mean.abs() < 0.4 && bright.iter().all(|b| (-8.0..8.0).contains(b)),
        "{mean}"
    );
    // The mean of 12 is a distance of 12 from pixel 0, times a factor from 0.2 to 1.8.
    let contrast = ImageOp::RandomContrast {
        low: 0.2,
        high: 1.8,
    };
    let contrast = first(vec![contrast], 0);
    let mean = contrast.iter().sum::<f32>() / N as f32;
    let range = 12.0 - 12.0 * 1.8..12.0 - 12.0 * 0.2 + 1e-4;
    assert!(
        mean.abs() < 0.5 && contrast.iter().all(|b| range.contains(b)),
        "{mean}"
    );
}

/// Moves the numbers of an example by a random amount.
fn shaken(mut example: Example, random: &mut Random) -> Result<Example> {
    for (name, t) in &mut example {
        if name == "x" {
            let moved = t
                .to_f64s()
                .into_iter()
                .map(|x| x + random.between(-0.1, 0.1));
            *t = Tensor::from_f64s(DType::F32, t.shape(), &moved.collect::<Vec<_>>())?;
        }
    }
    Ok(example)
}

#[test]
fn an_example_depends_on_seed_epoch_and_place_alone() {
    let data = examples(100).map(shaken);
    let row = |places: &[usize], at: usize, epoch| {
        let batch = data.rows(places, epoch).unwrap();
        batch[0].1.as_slice::<f32>()[at * 6..][..6].to_vec()
    };
    let own = row(&[7], 0, EPOCH);
    assert_eq!(row(&[3, 9, 7, 1], 2, EPOCH), own);
    assert_ne!(row(&[7], 0, Epoch { number: 1, ..EPOCH }), own);
    assert_ne!(row(&[7], 0, Epoch { seed: 4, ..EPOCH }), own);
    // Two maps in a row draw other numbers: the second one does not double the first.
    let twice = examples(100).map(shaken).map(shaken);
    let plain = examples(100).rows(&[7], EPOCH).unwrap();
    let plain = plain[0].1.as_slice::<f32>().to_vec();
    let moved = twice.rows(&[7], EPOCH).unwrap();
    let moved = moved[0].1.as_slice::<f32>();
    let ratio = |i: usize| (moved[i] - plain[i]) / (own[i] - plain[i]);
    assert!((0..6).any(|i| (ratio(i) - 2.0).abs() > 0.1));
}

#[test]
fn batches_do_not_depend_on_the_threads_that_load_them() {
    let held_out = examples(50);
    let run = |threads, ahead| {
        let data = examples(100).map(shaken);
        let own = trainer(Setup::default());
        let fit = Fit {
            epochs: 3,
            seed: 7,
            held_out: Some(&held_out),
            loading: Loading { threads, ahead },
            ..Fit::new(&data, 24)
        };
        let report = own.fit(&fit, &mut []).unwrap();
        (report.epochs[2].trained.clone(), state(&own))
    };
    let expected = run(0, 0);
    for (threads, ahead) in [(1, 1), (1, 2), (2, 2), (2, 5), (4, 8), (4, 1), (0, 3)] {
        assert!(run(threads, ahead) == expected, "{threads} threads");
    }
}

#[test]
fn a_training_with_augmentation_goes_on_in_the_middle_of_an_epoch() {
    let data = examples(100).map(shaken);
    let fit = Fit {
        epochs: 3,
        seed: 7,
        ..Fit::new(&data, 24)
    };
    let whole = trainer(Setup::default());
    whole.fit(&fit, &mut []).unwrap();
    for n in 1..15 {
        let folder = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(folder.path(), 1).unwrap();
        let mut newest = ModelCheckpoint::newest(checkpoints.clone(), Every::Steps(1));
        let cut = Fit {
            steps: Some(n),
            ..fit.clone()
        };
        let first = trainer(Setup::default());
        first.fit(&cut, &mut [&mut newest]).unwrap();
        let second = trainer(Setup::default());
        let fit = Fit {
            resumed: checkpoints.resume(&second).unwrap(),
            ..fit.clone()
        };
        second.fit(&fit, &mut []).unwrap();
        assert!(state(&second) == state(&whole), "after {n} steps");
    }
}

#[test]
fn examples_that_cannot_be_loaded_end_a_training_with_their_place() {
    let own = |threads, f: fn(Example, &mut Random) -> Result<Example>| {
        let data = examples(100).map(f);
        let fit = Fit {
            loading: Loading { threads, ahead: 4 },
            ..Fit::new(&data, 24)
        };
        let e = trainer(Setup::default()).fit(&fit, &mut []);
        e.unwrap_err().to_string()
    };
    for threads in [0, 2] {
        let wrong = own(threads, |mut example, _| {
            if example[1].1.to_f64s()[0] == 1.0 {
                example[0].1 = Tensor::zeros(DType::F32, &[5])?;
            }
            Ok(example)
        });
        assert!(wrong.starts_with("example "), "{wrong}");
        assert!(wrong.contains("in the batch's first example"), "{wrong}");
        let names = own(threads, |mut example, _| {
            if example[1].1.to_f64s()[0] == 1.0 {
                example.pop();
            }
            Ok(example)
        });
        assert!(names.contains("its tensors have other names"), "{names}");
    }
    // A data set that gives fewer rows than it is asked for.
    struct Short(TensorDataset);
    impl Dataset for Short {
        fn len(&self) -> usize {
            self.0.len()
        }
        fn rows(&self, places: &[usize], epoch: Epoch) -> Result<Batch> {
            self.0.rows(&places[1..], epoch)
        }
    }
    let short = Short(examples(100));
    for drops_last in [false, true] {
        let fit = Fit {
            drops_last,
            ..Fit::new(&short, 24)
        };
        let e = trainer(Setup::default()).fit(&fit, &mut []).unwrap_err();
        assert_eq!(
            e.to_string(),
            "the data set gave \"x\" of shape [23, 6] for 24 examples"
        );
    }
    let none = images(3).images("picture", []).rows(&[0], EPOCH);
    assert_eq!(
        none.unwrap_err().to_string(),
        "images: unknown tensor \"picture\"; known: image, label"
    );
    let large = ImageOp::CenterCrop {
        height: 4,
        width: 4,
    };
    let large = images(3).images("image", [large]).rows(&[0], EPOCH);
    assert_eq!(
        large.unwrap_err().to_string(),
        "images \"image\": a window of 4 rows of an image of 3"
    );
}

fn arrays(n: usize) -> [Tensor; 3] {
    let x: Vec<f32> = (0..n * 6).map(|i| i as f32 / 7.0).collect();
    let y: Vec<i64> = (0..n as i64).collect();
    let z: Vec<u8> = (0..n).map(|i| (i % 2) as u8).collect();
    [
        Tensor::from_slice(&x, &[n, 2, 3]).unwrap(),
        Tensor::from_slice(&y, &[n]).unwrap(),
        Tensor::from_slice(&z, &[n, 1]).unwrap(),
    ]
}

#[test]
fn arrays_of_files_are_read_row_by_row() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let tensors = arrays(50);
    let named = ["x", "y", "z"].into_iter().zip(&tensors);
    gristmill_runtime::npy::write_npz(path("all.npz"), named.clone()).unwrap();
    for (name, t) in named.clone() {
        t.to_npy(path(&format!("{name}.npy"))).unwrap();
    }
    let memory = TensorDataset::new(named.map(|(name, t)| (name, t.clone()))).unwrap();
    let archive = FileDataset::npz(path("all.npz")).unwrap();
    let single = ["x", "y", "z"].map(|name| (name, path(&format!("{name}.npy"))));
    let single = FileDataset::npy(single).unwrap();
    let places = [49, 0, 7, 7, 31];
    let expected = memory.rows(&places, EPOCH).unwrap();
    for data in [&archive, &single] {
        assert_eq!(data.len(), 50);
        assert_eq!(data.rows(&places, EPOCH).unwrap(), expected);
        assert!(data.rows(&[50], EPOCH).is_err());
        assert_eq!(data.rows(&[], EPOCH).unwrap()[0].1.shape(), [0, 2, 3]);
    }
    let message = |e: Result<FileDataset>| {
        let e = e.err().unwrap().to_string();
        e.replace(&folder.path().display().to_string(), "FOLDER")
    };
    tensors[1].to_npy(path("seven.npy")).unwrap();
    arrays(7)[0].to_npy(path("few.npy")).unwrap();
    let short = fs::read(path("x.npy")).unwrap();
    fs::write(path("short.npy"), &short[..short.len() - 1]).unwrap();
    let messages = [
        message(FileDataset::npy([
            ("x", path("few.npy")),
            ("y", path("y.npy")),
        ])),
        message(FileDataset::npy([("x", path("short.npy"))])),
        message(FileDataset::npy([("x", path("none.npy"))])),
        message(FileDataset::npz(path("x.npy"))),
        message(FileDataset::npz("../tests/data/digits/train.npz")),
    ];
    insta::assert_snapshot!(messages.join("\n"), @r#"
array "y" has shape [50], expected as many examples as "x"
FOLDER/short.npy: f32[50, 2, 3] takes 1200 bytes, the file has 1199
FOLDER/none.npy: cannot open it: No such file or directory (os error 2)
FOLDER/x.npy: it is one NumPy array (.npy), expected an archive of arrays (.npz)
../tests/data/digits/train.npz: array "image": it is compressed and can only be read as a whole; numpy.savez stores arrays, numpy.savez_compressed compresses them
"#);
    // A file that is cut behind the program's back.
    fs::write(path("x.npy"), &short[..short.len() / 2]).unwrap();
    let e = single.rows(&[3, 48], EPOCH).unwrap_err().to_string();
    assert!(e.contains("x.npy: example 48: cannot read \"x\""), "{e}");
}

/// A file of records of CIFAR-10 whose images are made of their number.
fn cifar10(path: &Path, numbers: std::ops::Range<usize>) {
    let mut bytes = Vec::new();
    for i in numbers {
        bytes.push((i % 10) as u8);
        bytes.extend((0..3072).map(|k| (i + k) as u8));
    }
    fs::write(path, bytes).unwrap();
}

#[test]
fn binary_files_of_cifar10_are_one_data_set() {
    let folder = tempfile::tempdir().unwrap();
    let paths = ["data_batch_1.bin", "data_batch_2.bin"].map(|name| folder.path().join(name));
    cifar10(&paths[0], 0..5);
    cifar10(&paths[1], 5..12);
    let data = FileDataset::cifar10(&paths).unwrap();
    assert_eq!(data.len(), 12);
    let batch = data.rows(&[4, 5, 11], EPOCH).unwrap();
    assert_eq!(batch[0].1.shape(), [3, 3, 32, 32]);
    assert_eq!(
        batch[1],
        (
            "label".to_owned(),
            Tensor::from_slice(&[4u8, 5, 1], &[3]).unwrap()
        )
    );
    let pixels = batch[0].1.as_slice::<u8>();
    let expected = |i: usize, k: usize| (i + k) as u8;
    assert!((0..3072).all(|k| pixels[3072 + k] == expected(5, k)));
    let mut bytes = fs::read(&paths[1]).unwrap();
    bytes[2 * 3073] = 77;
    fs::write(&paths[1], &bytes).unwrap();
    let data = FileDataset::cifar10(&paths).unwrap();
    assert!(data.rows(&[6], EPOCH).is_ok());
    let e = data.rows(&[7], EPOCH).unwrap_err().to_string();
    let file = "data_batch_2.bin: example 2: \"label\" is 77, expected a class from 0 to 9";
    assert!(e.ends_with(file), "{e}");
    fs::write(&paths[1], &bytes[1..]).unwrap();
    let e = FileDataset::cifar10(&paths).err().unwrap().to_string();
    assert!(
        e.ends_with("21510 bytes, expected records of 3073 bytes (CIFAR-10, binary version)"),
        "{e}"
    );
    let none: [&Path; 0] = [];
    assert!(FileDataset::cifar10(none).is_err());
}

#[test]
fn text_is_windows_of_tokens() {
    let text = "hello, world";
    let vocabulary = Vocabulary::of(text);
    assert_eq!(vocabulary.len(), 9);
    let tokens = vocabulary.encode(text).unwrap();
    assert_eq!(vocabulary.decode(&tokens).unwrap(), text);
    let data = Tokens::new(tokens.clone(), 4).unwrap();
    assert_eq!(data.len(), 8);
    let batch = data.rows(&[0, 7], EPOCH).unwrap();
    let window = |name: usize, row: usize| batch[name].1.as_slice::<i64>()[4 * row..][..4].to_vec();
    assert_eq!(vocabulary.decode(&window(0, 0)).unwrap(), "hell");
    assert_eq!(vocabulary.decode(&window(1, 0)).unwrap(), "ello");
    assert_eq!(vocabulary.decode(&window(1, 1)).unwrap(), "orld");
    // Each target once; the last token is a target only if a whole window has it.
    for (stride, n, last) in [
        (4, 2, "o, w"),
        (5, 2, ", wo"),
        (7, 2, "worl"),
        (8, 1, "hell"),
    ] {
        let data = data.clone().with_stride(stride).unwrap();
        assert_eq!(data.len(), n, "stride {stride}");
        let batch = data.rows(&[n - 1], EPOCH).unwrap();
        let tokens = vocabulary.decode(batch[0].1.as_slice()).unwrap();
        assert_eq!(tokens, last, "stride {stride}");
        assert!(data.rows(&[n], EPOCH).is_err());
    }
    let messages = [
        vocabulary.encode("help").unwrap_err(),
        vocabulary.decode(&[-1]).unwrap_err(),
        Tokens::new(tokens.clone(), 12).unwrap_err(),
        Tokens::new(tokens, 0).unwrap_err(),
        data.clone().with_stride(0).unwrap_err(),
        data.rows(&[8], EPOCH).unwrap_err(),
    ];
    let messages = messages.map(|e| e.to_string());
    insta::assert_snapshot!(messages.join("\n"), @r#"
'p' at byte 3 is not in the vocabulary
token -1 of a vocabulary of 9
windows of 12 of 12 tokens: expected 1 to 11
windows of 0 of 12 tokens: expected 1 to 11
windows 0 tokens apart: expected at least 1
example 8 of a data set of 8
"#);
}

/// A file of 6 GiB, of which a training reads a few rows: none of it stays in memory.
#[test]
fn a_file_larger_than_memory_is_no_load() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.npy");
    let small = Tensor::zeros(DType::F32, &[1, 6]).unwrap();
    small.to_npy(&path).unwrap();
    // The same header for more rows; the rest of the file is a hole.
    let n = 268_435_456u64;
    let bytes = fs::read(&path).unwrap();
    let header = String::from_utf8_lossy(&bytes[10..128]).replace("(1, 6)", "(268435456, 6)");
    let header = header.replacen("        \n", "\n", 1);
    let mut file = bytes[..10].to_vec();
    file.extend(header.as_bytes());
    assert_eq!(file.len(), 128, "{header:?}");
    fs::write(&path, &file).unwrap();
    let opened = fs::OpenOptions::new().write(true).open(&path).unwrap();
    opened.set_len(128 + n * 24).unwrap();
    let data = FileDataset::npy([("x", path)]).unwrap();
    assert_eq!(data.len() as u64, n);
    let last = n as usize - 1;
    let batch = data.rows(&[0, last], EPOCH).unwrap();
    assert_eq!(batch[0].1, Tensor::zeros(DType::F32, &[2, 6]).unwrap());
    let training = Training {
        seed: 5,
        ..Training::from(Adam::default())
    };
    // The labels come with the examples.
    let data = data.map(|mut example, _| {
        example.push(("y".to_owned(), Tensor::from_slice(&[1i64], &[])?));
        Ok(example)
    });
    let own = Trainer::new("perceptron", &training, perceptron).unwrap();
    let batch = data.rows(&[5, last], EPOCH).unwrap();
    own.step(batch).unwrap();
}
