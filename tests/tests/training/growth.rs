//! Memory of a long training: no more with each step, and of its data only the batches that wait.

use super::fit::AtStep;
use gristmill::ir::Dim;
use gristmill::train::{
    Adam, Checkpoints, Every, FileDataset, Fit, FitContext, JsonLines, Loading, Model,
    ModelCheckpoint, Objective, Summaries, TensorBoard, Trainer, Training, loss,
};
use gristmill::{DType, Result};
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

/// The folder in which the process is to train.
const FOLDER_VARIABLE: &str = "GRISTMILL_TEST_GROWS_IN";

/// Numbers of an example.
const WIDTH: usize = 16 << 10;
const BATCH: usize = 16;
/// Steps until all is compiled and each file has been written once, and steps after them.
const WARM: u64 = 100;
const STEPS: u64 = 1_000;

/// Writes a file of zeros, of which the file system keeps only the header.
fn zeros(path: &Path, dtype: &str, shape: &str, bytes: u64) {
    let mut header = format!("{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}");
    // The magic bytes, the length and the header together are a multiple of 64.
    let length = (header.len() + 11).next_multiple_of(64) - 10;
    header = format!("{header:length$}");
    header.replace_range(length - 1.., "\n");
    let mut file = File::create(path).unwrap();
    file.write_all(b"\x93NUMPY\x01\x00").unwrap();
    file.write_all(&(length as u16).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.set_len(10 + length as u64 + bytes).unwrap();
}

fn model(m: &mut Model) -> Result<Objective> {
    let x = m.input("x", DType::F32, [Dim::from("batch"), WIDTH.into()]);
    let y = m.input("y", DType::I64, [Dim::from("batch")]);
    let logits = m.scope("dense", |m| m.dense(x, 4))?;
    m.scope("dense", |m| m.collect("summaries", logits))?;
    let accuracy = loss::accuracy(m.builder(), logits, y)?;
    let loss = loss::sparse_cross_entropy(m.builder(), logits, y)?;
    Ok(Objective::new(loss).metric("accuracy", accuracy))
}

/// Memory of this process without the pages of files, in bytes.
fn anonymous_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix("RssAnon:"));
    let kib = line.unwrap().trim().trim_end_matches(" kB");
    kib.parse::<u64>().unwrap() << 10
}

/// Trains on a file of 8 GiB; prints the memory before the first step, after the first steps and at the end.
fn train(folder: &Path) {
    let n = (8 << 30) / (4 * WIDTH as u64);
    let [x, y] = ["x.npy", "y.npy"].map(|name| folder.join(name));
    zeros(&x, "<f4", &format!("({n}, {WIDTH})"), n * 4 * WIDTH as u64);
    zeros(&y, "<i8", &format!("({n},)"), n * 8);
    let data = FileDataset::npy([("x", x), ("y", y)]).unwrap();
    let own = Trainer::new("growth", &Training::from(Adam::default()), model).unwrap();
    let fit = Fit {
        steps: Some(WARM + STEPS),
        loading: Loading {
            threads: 2,
            ahead: 4,
        },
        ..Fit::new(&data, BATCH)
    };
    let often = Every::Steps(20);
    let mut board = TensorBoard::new(folder.join("events"))
        .scalars(Every::Steps(1))
        .summaries(Summaries::new(often));
    let checkpoints = Checkpoints::new(folder.join("checkpoints"), 2).unwrap();
    let mut newest = ModelCheckpoint::newest(checkpoints, often);
    let mut log = JsonLines::new(folder.join("log.jsonl"));
    let mut memory = vec![anonymous_bytes()];
    let mut step = AtStep(|cx: &mut FitContext| {
        if [WARM, WARM + STEPS].contains(&cx.step()) {
            memory.push(anonymous_bytes());
        }
        Ok(())
    });
    let report = own.fit(&fit, &mut [&mut board, &mut newest, &mut log, &mut step]);
    assert_eq!(report.unwrap().warnings, [""; 0]);
    println!("\nmemory {memory:?}");
}

const NAME: &str = "training::growth::a_long_training_takes_no_more_memory_with_each_step";

#[test]
fn a_long_training_takes_no_more_memory_with_each_step() {
    if let Some(folder) = std::env::var_os(FOLDER_VARIABLE) {
        train(Path::new(&folder));
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    // Other tests of this process would be measured, too.
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", NAME, "--nocapture", "--test-threads", "1"])
        .env(FOLDER_VARIABLE, folder.path())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&child.stderr);
    assert!(child.status.success(), "{}: {errors}", child.status);
    let said = String::from_utf8(child.stdout).unwrap();
    let line = said.lines().find_map(|l| l.strip_prefix("memory "));
    let memory: Vec<u64> = serde_json::from_str(line.unwrap()).unwrap();
    println!("{memory:?} bytes before the first step, once warm, and 1,000 steps later");
    let [_, warm, end] = memory[..] else {
        panic!("{memory:?}");
    };
    // Less than 1 KiB for each step, and less than a batch.
    let batch = (BATCH * WIDTH * 4) as u64;
    assert!(end < warm + batch, "{memory:?}");
    let limit = memory[0] + (32 << 20);
    assert!(end < limit, "{memory:?}, limit {limit}");
}
