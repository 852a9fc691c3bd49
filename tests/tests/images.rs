//! Images: what runs from a file gives the bits of what runs where it was compiled; files are reproducible, and damaged ones are refused.

use crate::process::gristmill as command;
use gristmill::testing::Setup;
use gristmill::{Tensor, aot, onnx};
use gristmill_runtime::exec::{ExecOptions, Executor, Pool};
use gristmill_runtime::image::{self, Image};
use gristmill_runtime::program::IoSpec;
use std::path::{Path, PathBuf};
use std::sync::Arc;

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("data")
        .join(name)
}

/// The exports of small models.
pub fn exports() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(data("models")).unwrap();
    let paths = entries.map(|e| e.unwrap().path());
    let mut folders: Vec<PathBuf> = paths.filter(|p| p.is_dir()).collect();
    folders.sort();
    folders
}

/// Opens a file that a test has written.
pub fn open(path: &Path) -> Result<Image, gristmill_runtime::Error> {
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

/// Opens a file that a test has written, and runs its program for these inputs.
pub fn run_image(path: &Path, inputs: &[Tensor]) -> Vec<Tensor> {
    run(&open(path).unwrap(), inputs, 1)
}

/// The same on memory that is aligned to elements only: each tensor begins one element behind a multiple of 64 bytes.
fn run_misaligned(image: &Image, inputs: &[Tensor]) -> Vec<Vec<u8>> {
    let shapes: Vec<&[usize]> = inputs.iter().map(Tensor::shape).collect();
    let program = image.program_for(&shapes).unwrap();
    let executor = Executor::new(program.clone(), &ExecOptions::default()).unwrap();
    let room = |dtype: gristmill::DType, n_bytes: usize| {
        let size = dtype.size_bytes();
        (Tensor::zeros(dtype, &[1 + n_bytes / size]).unwrap(), size)
    };
    let mut given: Vec<_> = inputs
        .iter()
        .map(|t| room(t.dtype(), t.size_bytes()))
        .collect();
    for ((to, size), from) in given.iter_mut().zip(inputs) {
        to.as_bytes_mut()[*size..].copy_from_slice(from.as_bytes());
    }
    let specs = program.outputs.iter();
    let n_bytes = |o: &IoSpec| o.shape.iter().product::<usize>() * o.dtype.size_bytes();
    let mut results: Vec<_> = specs.map(|o| room(o.dtype, n_bytes(o))).collect();
    let inputs: Vec<*const u8> = given
        .iter()
        .map(|(t, size)| t.as_ptr().wrapping_add(*size))
        .collect();
    let outputs: Vec<*mut u8> = results
        .iter_mut()
        .map(|(t, size)| t.as_mut_ptr().wrapping_add(*size))
        .collect();
    // SAFETY: the addresses are one element into tensors that are one element longer than what the program reads and writes.
    unsafe { executor.run_raw(&inputs, &outputs) }.unwrap();
    let bytes = |(t, size): &(Tensor, usize)| t.as_bytes()[*size..].to_vec();
    results.iter().map(bytes).collect()
}

fn bits(tensors: &[Tensor]) -> Vec<(gristmill::DType, Vec<usize>, Vec<u8>)> {
    let parts = |t: &Tensor| (t.dtype(), t.shape().to_vec(), t.as_bytes().to_vec());
    tensors.iter().map(parts).collect()
}

fn setup(devices: &str, threads: usize, target_cpu: &str) -> Setup {
    let target_cpu = gristmill::TargetCpu::parse(target_cpu).unwrap();
    Setup::on(devices, threads).with(|o| o.target_cpu = target_cpu)
}

/// The inputs of an export's test data, in order.
pub fn inputs_of(
    folder: &Path,
    model: &onnx::Model,
    compiled: &gristmill::Compiled,
) -> Vec<Tensor> {
    let declared = model.declared_inputs().unwrap();
    let tensors = declared.iter().enumerate().map(|(i, declared)| {
        let path = folder.join(format!("test_data_set_0/input_{i}.pb"));
        let read = declared.read(&std::fs::read(path).unwrap()).unwrap();
        read.into_iter().next().unwrap()
    });
    compiled.bind(tensors.collect::<Vec<_>>()).unwrap()
}

/// Sizes of the symbolic dims of inputs.
pub fn dims_of(compiled: &gristmill::Compiled, inputs: &[Tensor]) -> aot::Sizes {
    let inputs = compiled.inputs().iter().zip(inputs);
    let dims = inputs.flat_map(|((_, ty), t)| {
        let dims = ty.shape.iter().zip(t.shape());
        dims.filter_map(|(d, &n)| Some((d.as_symbol()?.to_owned(), vec![n])))
    });
    dims.collect()
}

/// Compares an export run by JIT with its image, which is also read and written again.
fn check(folder: &Path, setup: &Setup) {
    let name = folder.file_name().unwrap().to_str().unwrap();
    let model = onnx::load(folder.join("model.onnx")).unwrap();
    let compiled = setup.compile(&model).unwrap();
    let inputs = inputs_of(folder, &model, &compiled);
    let sizes = dims_of(&compiled, &inputs);
    let expected = compiled.run_ordered(&inputs).unwrap().into_tensors();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("model.gmx");
    let write = |file: &Path| {
        let session = setup.session();
        session
            .write_image(&model, &setup.options, &sizes, file)
            .unwrap()
    };
    let written = write(&file);
    let bytes = std::fs::read(&file).unwrap();
    assert_eq!(bytes.len(), written.bytes, "{name}");
    let image = open(&file).unwrap();
    image.verify().unwrap();
    for threads in [1, 2] {
        let got = run(&image, &inputs, threads);
        assert_eq!(bits(&got), bits(&expected), "{name} on {threads} threads");
    }
    let of_tensors: Vec<Vec<u8>> = expected.iter().map(|t| t.as_bytes().to_vec()).collect();
    assert!(
        run_misaligned(&image, &inputs) == of_tensors,
        "{name} misaligned"
    );
    let again = dir.path().join("again.gmx");
    image::write(&again, image.about(), image.programs()).unwrap();
    assert_eq!(std::fs::read(&again).unwrap(), bytes, "{name}");
    write(&again);
    assert_eq!(
        std::fs::read(&again).unwrap(),
        bytes,
        "{name} compiled again"
    );
}

#[test]
pub fn exports_give_the_same_bits_from_an_image() {
    for folder in exports() {
        check(&folder, &setup("cpu:1", 1, "native"));
        check(&folder, &setup("cpu:1", 2, "x86-64-v3"));
        check(&folder, &setup("cpu:1", 2, "x86-64-v2"));
    }
}

#[test]
fn images_do_not_depend_on_threads_or_on_the_cpu_of_the_compiler() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["bert_dynamo", "unet_dynamo"] {
        let model = onnx::load(data("models").join(name).join("model.onnx")).unwrap();
        for target in ["x86-64-v2", "x86-64-v3", "x86-64-v4"] {
            let written = |threads| {
                let file = dir.path().join("model.gmx");
                let setup = setup("cpu:1", threads, target);
                let (session, sizes) = (setup.session(), aot::Sizes::new());
                session
                    .write_image(&model, &setup.options, &sizes, &file)
                    .unwrap();
                std::fs::read(&file).unwrap()
            };
            assert!(written(1) == written(8), "{name} for {target}");
        }
    }
}

#[test]
fn several_devices_and_control_flow_run_from_an_image() {
    for name in ["rnn_dynamo", "bert_dynamo", "unet_dynamo"] {
        check(&data("models").join(name), &setup("cpu:2", 2, "native"));
    }
}

/// Runs a command in the folder of the digits, which must end well; gives its output.
fn digits(words: &[&str]) -> String {
    let ended = command(&data("digits"), words);
    assert_eq!(ended.code, Some(0), "{words:?}: {}", ended.stderr);
    ended.stdout
}

/// The message of a command that must end with an exit code.
fn refused(words: &[&str], code: i32) -> String {
    let ended = command(&data("digits"), words);
    assert_eq!(
        ended.code,
        Some(code),
        "{words:?}: {}{}",
        ended.stdout,
        ended.stderr
    );
    ended.stderr
}

#[test]
fn the_command_line_writes_runs_and_inspects_images() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("digits.gmx");
    let image = file.to_str().unwrap();
    let sizes = ["--shape", "batch=8,1,360"];
    let said = digits(&[&["compile", "model.onnx", "-o", image], &sizes[..]].concat());
    assert!(said.contains("3 variants"), "{said}");
    let labels = ["--labels", "labels.npy"];
    let said = digits(&[&["run", image, "--inputs", "batch.npz"], &labels[..]].concat());
    assert!(
        said.contains("356 of 360") && said.contains("opened in"),
        "{said}"
    );
    let first_line = |words: &[&str]| digits(words).lines().next().unwrap().to_owned();
    assert_eq!(
        first_line(&["run", image, "--set", "batch=8"]),
        first_line(&["run", "model.onnx", "--set", "batch=8"])
    );
    let said = digits(&["inspect", image]);
    for part in ["variant batch=8: image [8, 1, 8, 8]", "constants", "avx2"] {
        let is_x86 = cfg!(target_arch = "x86_64");
        assert!(said.contains(part) || part == "avx2" && !is_x86, "{said}");
    }
    let json: serde_json::Value =
        serde_json::from_str(&digits(&["inspect", image, "--json"])).unwrap();
    assert_eq!(json["variants"][2]["dims"]["batch"], 360);
    assert!(digits(&["check", image]).contains("its checksums agree"));
    let names = |file: &Path| {
        let bytes = std::fs::read(file).unwrap();
        bytes
            .windows(4)
            .filter(|w| w == b"Conv" || w == b"conv")
            .count()
    };
    let bare = dir.path().join("bare.gmx");
    let flags = ["--no-names", "--name", "a model", "--set", "batch=1"];
    digits(
        &[
            &["compile", "model.onnx", "-o", bare.to_str().unwrap()],
            &flags[..],
        ]
        .concat(),
    );
    assert!(names(&file) > 2, "{}", names(&file));
    // The import of a kernel stays.
    assert!(names(&bare) <= 1, "{}", names(&bare));
    let said = digits(&["run", bare.to_str().unwrap()]);
    assert!(said.starts_with("probabilities"), "{said}");
    let timed = digits(&["bench", image, "--set", "batch=1", "--iters", "3", "--json"]);
    assert!(timed.contains("p50_ns"), "{timed}");
}

#[test]
fn weights_may_be_in_a_file_beside_the_image() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (image, weights) = (path("digits.gmx"), path("digits.weights"));
    let compile = ["compile", "model.onnx", "--shape", "batch=1,360", "-o"];
    let said = digits(&[&compile[..], &[&image, "--weights", "file"]].concat());
    assert!(said.contains("of weights in digits.weights"), "{said}");
    let run = [
        "run",
        &image,
        "--inputs",
        "batch.npz",
        "--labels",
        "labels.npy",
    ];
    assert!(digits(&run).contains("356 of 360"));
    assert!(digits(&["check", &image]).contains("its checksums agree"));
    assert!(digits(&["inspect", &image]).contains("weights "));
    let again = std::fs::read(&weights).unwrap();
    digits(&[&compile[..], &[&image, "--weights", "file"]].concat());
    assert!(std::fs::read(&weights).unwrap() == again, "the same bytes");
    // SAFETY: the image was written just now, and is not run.
    let alone = unsafe { Image::from_bytes(&std::fs::read(&image).unwrap()) };
    assert!(
        alone
            .err()
            .unwrap()
            .to_string()
            .contains("opened by its path")
    );
    // Other weights, damaged ones, none.
    let mut bytes = again.clone();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&weights, &bytes[..]).unwrap();
    digits(&run[..2]);
    assert!(refused(&["check", &image], 2).contains("the checksum of its weights differs"));
    bytes[13] ^= 1;
    std::fs::write(&weights, &bytes[..]).unwrap();
    assert!(refused(&run[..2], 2).contains("does not hold the weights of this image"));
    std::fs::write(&weights, &again[..again.len() - 64]).unwrap();
    assert!(refused(&run[..2], 2).contains("weights end early"));
    std::fs::remove_file(&weights).unwrap();
    assert!(refused(&run[..2], 2).contains("the weights of the image"));
    std::fs::write(&weights, "mine").unwrap();
    let said = refused(&[&compile[..], &[&image, "--weights", "file"]].concat(), 2);
    assert!(said.contains("holds no weights of an image"), "{said}");
    assert_eq!(std::fs::read(&weights).unwrap(), b"mine");
}

#[test]
fn the_model_is_not_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model.gmx");
    std::fs::copy(data("digits").join("model.onnx"), &model).unwrap();
    let before = std::fs::read(&model).unwrap();
    let words = [
        "compile",
        "model.gmx",
        "-o",
        "./model.gmx",
        "--set",
        "batch=1",
    ];
    let ended = command(dir.path(), &words);
    assert_eq!(ended.code, Some(2), "{}", ended.stderr);
    assert!(
        ended.stderr.contains("is the model itself"),
        "{}",
        ended.stderr
    );
    assert!(std::fs::read(&model).unwrap() == before);
}

#[test]
fn the_command_line_refuses_what_images_do_not_hold() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("digits.gmx");
    let image = file.to_str().unwrap();
    let compile =
        |more: &[&str]| refused(&[&["compile", "model.onnx", "-o", image], more].concat(), 2);
    assert!(compile(&[]).contains("--shape batch=1,8,32"));
    assert!(compile(&["--shape", "batch=1,x"]).contains("\"x\" is not a size"));
    assert!(compile(&["--shape", "batch=1,2", "--set", "batch=3"]).contains("given twice"));
    let many: Vec<String> = (1..=65).map(|n| n.to_string()).collect();
    assert!(compile(&["--shape", &format!("batch={}", many.join(","))]).contains("64 variants"));
    let unsupported = |more: &[&str]| refused(&[&["compile"], more].concat(), 3);
    let range = ["model.onnx", "-o", image, "--shape", "batch=1..4"];
    assert!(unsupported(&range).contains("not for ranges"));
    assert!(unsupported(&["model.onnx", "-o", "digits.exe"]).contains("-o MODEL.gmx"));
    assert!(unsupported(&["../detector/model.onnx", "-o", image]).contains("the data decides"));
    assert!(!file.exists());
    digits(&["compile", "model.onnx", "-o", image, "--set", "batch=2"]);
    let said = refused(&["run", image, "--inputs", "batch.npz"], 2);
    assert!(said.contains("it has image [2, 1, 8, 8]"), "{said}");
    assert!(refused(&["run", image, "--set", "batch=3"], 2).contains("no code for batch=3"));
    assert!(refused(&["run", image, "--set", "size=3"], 2).contains("known: batch"));
    assert!(refused(&["run", image, "--input", "x=labels.npy"], 2).contains("known: image"));
    assert!(refused(&["place", image], 2).contains("run, bench, inspect and check"));
    assert!(refused(&["bench", image, "--profile"], 3).contains("--profile"));
    assert!(
        refused(&["run", image, "--shape", "batch=3..9"], 2).contains("no code for batch=3..9")
    );
    assert!(refused(&["run", image, "--shape", "size=1..2"], 2).contains("known: batch"));
    assert!(refused(&["check", image, "--set", "batch=9"], 2).contains("no code for batch=9"));
    for flags in [
        ["--opt-level", "0"],
        ["--mem", "cpu:0=1"],
        ["--devices", "cpu:2"],
    ] {
        let said = refused(&["run", image, flags[0], flags[1]], 2);
        assert!(
            said.contains(&format!("{} is for compilation", flags[0])),
            "{said}"
        );
    }
    let said = refused(&["run", image, "--input", "image=labels.npy"], 2);
    assert!(said.contains("expected f32[2, 1, 8, 8], got"), "{said}");
    assert!(compile(&["--set", "batch=1", "-v"]).contains("-v"));
    let mut bytes = std::fs::read(&file).unwrap();
    bytes.pop();
    std::fs::write(&file, &bytes).unwrap();
    assert!(refused(&["run", image], 2).contains("the image is damaged"));
}

/// A reshape that takes two rows only.
const TWO_ROWS: &str = r#"graph "rows" {
    %0 = input "x": f32[n, 2]
    %1: f32[4] = reshape(%0) {shape = [4]}
    output "y" %1
}"#;

#[test]
fn a_variant_that_fails_leaves_the_earlier_image_and_no_other_file() {
    let dir = tempfile::tempdir().unwrap();
    let files = || {
        let entries = std::fs::read_dir(dir.path()).unwrap();
        let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name()).collect();
        names.sort();
        names
    };
    std::fs::write(dir.path().join("rows.ir"), TWO_ROWS).unwrap();
    let compile = |size: &str| {
        let words = ["compile", "rows.ir", "-o", "rows.gmx", "--shape", size];
        command(dir.path(), &words)
    };
    let failed = compile("n=2,3");
    assert_eq!(failed.code, Some(2), "{}", failed.stderr);
    assert_eq!(files(), ["rows.ir"]);
    let ended = compile("n=2");
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let image = std::fs::read(dir.path().join("rows.gmx")).unwrap();
    let failed = compile("n=2,3");
    assert!(failed.stderr.contains("n=3"), "{}", failed.stderr);
    assert_eq!(files(), ["rows.gmx", "rows.ir"]);
    assert!(std::fs::read(dir.path().join("rows.gmx")).unwrap() == image);
}

/// A table of `n` rows, and indices into it.
const ROWS: &str = r#"graph "rows" {
    %0 = input "table": f32[n, 2]
    %1 = input "ids": i64[4]
    %2: f32[4, 2] = gather(%0, %1) {axis = 0}
    output "y" %2
}"#;

#[test]
fn random_inputs_are_those_of_the_model_for_each_variant() {
    let dir = tempfile::tempdir().unwrap();
    let said = |words: &[&str]| {
        let ended = command(dir.path(), words);
        assert_eq!(ended.code, Some(0), "{words:?}: {}", ended.stderr);
        ended.stdout.lines().next().unwrap().to_owned()
    };
    std::fs::write(dir.path().join("rows.ir"), ROWS).unwrap();
    said(&[
        "compile", "rows.ir", "--shape", "n=2,3,50", "-o", "rows.gmx",
    ]);
    for n in ["n=2", "n=3", "n=50"] {
        let of_model = said(&["run", "rows.ir", "--set", n, "--seed", "2"]);
        assert_eq!(
            said(&["run", "rows.gmx", "--set", n, "--seed", "2"]),
            of_model
        );
    }
    let in_range = said(&["run", "rows.gmx", "--shape", "n=1..9", "--seed", "2"]);
    assert_eq!(
        in_range,
        said(&["run", "rows.ir", "--set", "n=3", "--seed", "2"])
    );
}

#[test]
fn values_of_variables_are_checked_and_used() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("state.gmx");
    let image = file.to_str().unwrap();
    let cases = data("cases");
    let value = |name: &str, n: usize| {
        let path = dir.path().join(name);
        Tensor::from(vec![1f32; n]).to_npy(&path).unwrap();
        format!("v={}", path.display())
    };
    let (good, bad) = (value("good.npy", 2), value("bad.npy", 3));
    for (model, flag) in [
        ("read_after_assign.ir", &bad),
        ("read_before_assign.ir", &bad),
    ] {
        let ended = command(&cases, &["compile", model, "-o", image]);
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        let words = |file| ["run", file, "--variable", flag];
        let (of_image, of_model) = (
            command(&cases, &words(image)),
            command(&cases, &words(model)),
        );
        assert_eq!(of_image.code, Some(2), "{}", of_image.stdout);
        assert_eq!(of_image.stderr, of_model.stderr);
    }
    let words = |file| ["run", file, "--variable", good.as_str()];
    let results = [image, "read_before_assign.ir"].map(|file| command(&cases, &words(file)).stdout);
    let first_lines = results.map(|text| text.lines().next().map(str::to_owned));
    assert!(
        first_lines[0].is_some() && first_lines[0] == first_lines[1],
        "{first_lines:?}"
    );
}
