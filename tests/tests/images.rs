//! Images: what runs from a file gives the bits of what runs where it was compiled; files are reproducible, and damaged ones are refused.

use gristmill::place::DeviceSet;
use gristmill::{Options, Tensor, aot, onnx};
use gristmill_runtime::exec::{ExecOptions, Executor, Pool};
use gristmill_runtime::image::{self, Image};
use std::path::{Path, PathBuf};
use std::sync::Arc;

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("data")
        .join(name)
}

/// The exports of small models.
fn exports() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(data("models")).unwrap();
    let paths = entries.map(|e| e.unwrap().path());
    let mut folders: Vec<PathBuf> = paths.filter(|p| p.is_dir()).collect();
    folders.sort();
    folders
}

/// Opens a file that a test has written.
fn open(path: &Path) -> Result<Image, gristmill_runtime::Error> {
    // SAFETY: tests write their files themselves, and change no file that is open.
    unsafe { Image::open(path) }
}

/// Runs the program of an image for inputs of their shapes.
fn run(image: &Image, inputs: &[Tensor], threads: usize) -> Vec<Tensor> {
    let shapes: Vec<&[usize]> = inputs.iter().map(Tensor::shape).collect();
    let program = image.program_for(&shapes).unwrap();
    let options = ExecOptions {
        pool: Arc::new(Pool::new(threads)),
        ..ExecOptions::default()
    };
    let executor = Executor::new(program.clone(), &options).unwrap();
    executor.run(inputs).unwrap()
}

fn bits(tensors: &[Tensor]) -> Vec<(gristmill::DType, Vec<usize>, Vec<u8>)> {
    let parts = |t: &Tensor| (t.dtype(), t.shape().to_vec(), t.as_bytes().to_vec());
    tensors.iter().map(parts).collect()
}

fn options(devices: &str, threads: usize, target_cpu: &str) -> Options {
    Options {
        devices: DeviceSet::parse(devices, threads).unwrap(),
        threads: Some(threads),
        target_cpu: gristmill::TargetCpu::parse(target_cpu).unwrap(),
        ..Options::default()
    }
}

/// The inputs of an export's test data, in order.
fn inputs_of(folder: &Path, model: &onnx::Model, compiled: &gristmill::Compiled) -> Vec<Tensor> {
    let declared = model.declared_inputs().unwrap();
    let tensors = declared.iter().enumerate().map(|(i, declared)| {
        let path = folder.join(format!("test_data_set_0/input_{i}.pb"));
        let read = declared.read(&std::fs::read(path).unwrap()).unwrap();
        read.into_iter().next().unwrap()
    });
    compiled.bind(tensors.collect::<Vec<_>>()).unwrap()
}

/// Compares an export run by JIT with its image, which is also read and written again.
fn check(folder: &Path, options: &Options) {
    let name = folder.file_name().unwrap().to_str().unwrap();
    let model = onnx::load(folder.join("model.onnx")).unwrap();
    let compiled = gristmill::compile(&model, options).unwrap();
    let inputs = inputs_of(folder, &model, &compiled);
    let dims = compiled
        .inputs()
        .iter()
        .zip(&inputs)
        .flat_map(|((_, ty), t)| {
            let dims = ty.shape.iter().zip(t.shape());
            dims.filter_map(|(d, &n)| Some((d.as_symbol()?.to_owned(), vec![n])))
        });
    let sizes: aot::Sizes = dims.collect();
    let expected = compiled.run_ordered(&inputs).unwrap().into_tensors();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("model.gmx");
    let written = aot::write(&model, options, &sizes, &file).unwrap();
    let bytes = std::fs::read(&file).unwrap();
    assert_eq!(bytes.len(), written.bytes(), "{name}");
    let image = open(&file).unwrap();
    image.verify().unwrap();
    for threads in [1, 2] {
        let got = run(&image, &inputs, threads);
        assert_eq!(bits(&got), bits(&expected), "{name} on {threads} threads");
    }
    let again = dir.path().join("again.gmx");
    image::write(&again, image.about(), image.programs()).unwrap();
    assert_eq!(std::fs::read(&again).unwrap(), bytes, "{name}");
    aot::write(&model, options, &sizes, &again).unwrap();
    assert_eq!(
        std::fs::read(&again).unwrap(),
        bytes,
        "{name} compiled again"
    );
}

#[test]
fn exports_give_the_same_bits_from_an_image() {
    for folder in exports() {
        check(&folder, &options("cpu:1", 1, "native"));
        check(&folder, &options("cpu:1", 2, "x86-64-v3"));
    }
}

#[test]
fn several_devices_and_control_flow_run_from_an_image() {
    for name in ["rnn_dynamo", "bert_dynamo", "unet_dynamo"] {
        check(&data("models").join(name), &options("cpu:2", 2, "native"));
    }
}
