//! The ONNX package's own backend test cases, as `tests/python/export_onnx_cases.py` writes them.
//!
//! `tests/data/onnx_cases_passing.txt` lists the cases that pass and may only grow: a listed case
//! that fails is an error, and so is a passing case that is not listed; what fails by decision is
//! in [`EXCEPTIONS`]. `GRISTMILL_UPDATE_CASES=1` rewrites the list, refusing to drop a line. The
//! cases are found through `GRISTMILL_ONNX_CASES`; without it the test says what it left out.

use crate::images::run_image;
use gristmill::interp::compare::allclose;
use gristmill::testing::Setup;
use gristmill::testing::nvrtc_or_left_out;
use gristmill::{Tensor, aot, onnx};
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Cases that fail by decision, and the rule that is followed instead.
///
/// PyTorch and onnxruntime agree on both; the models that PyTorch exports need what it computes.
/// `check` notes such nodes.
const EXCEPTIONS: [(&str, &str); 2] = [
    (
        "node/test_resize_downsample_scales_cubic_align_corners",
        "corners are aligned with those of the rounded-down length",
    ),
    (
        "node/test_resize_downsample_scales_linear_align_corners",
        "corners are aligned with those of the rounded-down length",
    ),
];

const LIST: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/data/onnx_cases_passing.txt");

/// All case directories under `root`, as `kind/name`.
fn cases(root: &Path) -> Vec<String> {
    let list = |dir: &Path| -> Vec<PathBuf> {
        let mut entries: Vec<PathBuf> = std::fs::read_dir(dir)
            .unwrap()
            .map(|e| e.unwrap().path())
            .filter(|p| p.is_dir())
            .collect();
        entries.sort();
        entries
    };
    let kinds = list(root);
    let relative = |p: PathBuf| p.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
    kinds.iter().flat_map(|k| list(k)).map(relative).collect()
}

/// Runs one case on `devices`. `Err` tells why it does not pass.
fn run_case(dir: &Path, devices: &str) -> Result<(), String> {
    let json = std::fs::read_to_string(dir.join("case.json")).map_err(|e| e.to_string())?;
    let case: serde_json::Value = serde_json::from_str(&json).map_err(|e| e.to_string())?;
    let (rtol, atol) = (
        case["rtol"].as_f64().unwrap_or(1e-3),
        case["atol"].as_f64().unwrap_or(1e-7),
    );
    let model = onnx::load(dir.join("model.onnx")).map_err(|e| e.to_string())?;
    let declared = (model.declared_inputs(), model.declared_outputs());
    let declared_inputs = declared.0.map_err(|e| e.to_string())?;
    let declared_outputs = declared.1.map_err(|e| e.to_string())?;
    let dims = empty_sequences(&dir.join("test_data_set_0"), &declared_inputs)?;
    let setup = Setup::on(devices, 1).with(|o| o.dims = dims);
    let compiled = setup.compile(&model).map_err(|e| e.to_string())?;
    for k in 0.. {
        let data = dir.join(format!("test_data_set_{k}"));
        if !data.exists() {
            break;
        }
        let inputs = tensors(&data, "input", &declared_inputs)?;
        let expected = tensors(&data, "output", &declared_outputs)?;
        let outputs = compiled.run(inputs).map_err(|e| e.to_string())?;
        let (n_got, n_want) = (outputs.iter().count(), expected.len());
        // Old cases do not test all outputs.
        let has_lists = declared_outputs.iter().any(|output| output.is_list());
        if n_got < n_want || has_lists && n_got > n_want {
            return Err(format!("{n_got} outputs, expected {n_want}"));
        }
        for ((_, want), (name, got)) in expected.iter().zip(outputs.iter()) {
            let c = allclose(want, got, rtol, atol);
            if !c.ok {
                return Err(format!("output {name:?} differs: {c}"));
            }
        }
    }
    Ok(())
}

/// The values of a data set with the names of the tensors that they consist of; names in the files
/// are preferred to declared ones.
fn tensors(
    dir: &Path,
    prefix: &str,
    declared: &[onnx::Declared],
) -> Result<Vec<(String, Tensor)>, String> {
    let mut found = Vec::new();
    for (i, value) in declared.iter().enumerate() {
        let path = dir.join(format!("{prefix}_{i}.pb"));
        if !path.exists() {
            break;
        }
        let bytes = std::fs::read(&path).map_err(|e| e.to_string())?;
        found.extend(value.read(&bytes).map_err(|e| e.to_string())?);
    }
    Ok(found)
}

/// Lengths of the sequences of a data set that are empty: a run cannot show them.
fn empty_sequences(
    dir: &Path,
    declared: &[onnx::Declared],
) -> Result<BTreeMap<String, usize>, String> {
    let mut empty = BTreeMap::new();
    for (i, value) in declared.iter().enumerate() {
        let path = dir.join(format!("input_{i}.pb"));
        if !value.is_sequence() || !path.exists() {
            continue;
        }
        let bytes = std::fs::read(&path).map_err(|e| e.to_string())?;
        if value.read(&bytes).map_err(|e| e.to_string())?.is_empty() {
            empty.insert(value.name.clone(), 0);
        }
    }
    Ok(empty)
}

/// Outcome of every case; a panic is an outcome too, and never passes.
fn run_all(root: &Path, names: &[String], devices: &str) -> BTreeMap<String, Result<(), String>> {
    let (next, results) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
    let worker = || {
        while let Some(name) = names.get(next.fetch_add(1, Ordering::Relaxed)) {
            let outcome = catch_unwind(AssertUnwindSafe(|| run_case(&root.join(name), devices)))
                .unwrap_or_else(|_| Err("PANIC".into()));
            results.lock().unwrap().insert(name.clone(), outcome);
        }
    };
    std::thread::scope(|s| (0..2).for_each(|_| drop(s.spawn(worker))));
    results.into_inner().unwrap()
}

/// Compares a case's outputs with those from an image, bit for bit. The error is the reason why there is no image.
fn compare_image(dir: &Path) -> Result<(), String> {
    let text = |e: gristmill::Error| e.to_string();
    let model = onnx::load(dir.join("model.onnx")).map_err(text)?;
    let declared = model.declared_inputs().map_err(text)?;
    let data = dir.join("test_data_set_0");
    let dims = empty_sequences(&data, &declared)?;
    let setup = Setup::with_threads(1).with(|o| o.dims = dims);
    let folder = tempfile::tempdir().map_err(|e| e.to_string())?;
    let file = folder.path().join("case.gmx");
    let session = setup.session();
    let written = session.write_image(&model, &setup.options, &aot::Sizes::new(), &file);
    written.map_err(text)?;
    let compiled = session.compile(&model, &setup.options).map_err(text)?;
    let inputs = compiled.bind(tensors(&data, "input", &declared)?);
    let inputs = inputs.map_err(text)?;
    let expected = compiled.run_ordered(&inputs).map_err(text)?.into_tensors();
    let got = run_image(&file, &inputs);
    let is_same = |(a, b): (&Tensor, &Tensor)| {
        (a.dtype(), a.shape(), a.as_bytes()) == (b.dtype(), b.shape(), b.as_bytes())
    };
    assert!(
        got.len() == expected.len() && got.iter().zip(&expected).all(is_same),
        "{}: other bits from an image",
        dir.display()
    );
    Ok(())
}

/// Cases of fixed shapes give the bits of the JIT from an image; the others are refused, by reasons that are counted here.
#[test]
fn cases_give_the_same_bits_from_an_image() {
    let Some(root) = root_or_left_out() else {
        return;
    };
    let listed = std::fs::read_to_string(LIST).expect("the list is in the repository");
    let names: Vec<&str> = listed.lines().filter(|l| !l.is_empty()).collect();
    let (next, refused) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
    let worker = || {
        while let Some(name) = names.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Err(why) = compare_image(&root.join(name)) {
                refused.lock().unwrap().insert(*name, why);
            }
        }
    };
    std::thread::scope(|s| (0..2).for_each(|_| drop(s.spawn(worker))));
    let refused = refused.into_inner().unwrap();
    let reasons = [
        "the data decides extents",
        "decide shapes",
        "a program has fixed sizes",
        "the structure of the inputs",
        "extents are known during a run only",
    ];
    let other: Vec<_> = refused
        .iter()
        .filter(|(_, why)| !reasons.iter().any(|reason| why.contains(reason)))
        .collect();
    assert!(other.is_empty(), "{other:#?}");
    let n_same = names.len() - refused.len();
    eprintln!("{n_same} of {} cases run from an image", names.len());
    assert!(n_same > 1400, "{n_same} of {}: {refused:#?}", names.len());
}

fn root_or_left_out() -> Option<PathBuf> {
    let root = std::env::var_os("GRISTMILL_ONNX_CASES").map(PathBuf::from);
    if root.is_none() {
        eprintln!(
            "left out: the ONNX package's cases; export them with tests/python/export_onnx_cases.py and set GRISTMILL_ONNX_CASES"
        );
    }
    root
}

/// What passes on the CPU passes through CUDA kernels too. Every eighth case, or all with
/// `GRISTMILL_EMULATE_ALL_CASES=1`, which takes minutes; without the large ones.
#[test]
fn listed_cases_pass_on_an_emulated_gpu() {
    let Some(root) = root_or_left_out() else {
        return;
    };
    if nvrtc_or_left_out("the ONNX package's cases on an emulated GPU").is_none() {
        return;
    }
    let step = if std::env::var_os("GRISTMILL_EMULATE_ALL_CASES").is_some() {
        1
    } else {
        8
    };
    let listed = std::fs::read_to_string(LIST).expect("the list is in the repository");
    let small = listed
        .lines()
        .filter(|l| !l.is_empty() && !l.starts_with("light/"));
    let names: Vec<String> = small.step_by(step).map(str::to_owned).collect();
    let results = run_all(&root, &names, "emu:1");
    let wrong: Vec<String> = results
        .iter()
        .filter_map(|(n, r)| r.as_ref().err().map(|e| format!("{n}: {e}")))
        .collect();
    assert!(
        names.len() > 200 && results.len() == names.len(),
        "{} of {} cases ran",
        results.len(),
        names.len()
    );
    assert!(
        wrong.is_empty(),
        "{} of {} cases fail:\n{}",
        wrong.len(),
        names.len(),
        wrong.join("\n")
    );
}

#[test]
fn conformance_only_grows() {
    let Some(root) = root_or_left_out() else {
        return;
    };
    let filter = std::env::var("GRISTMILL_CASE_FILTER").unwrap_or_default();
    let names: Vec<String> = cases(&root)
        .into_iter()
        .filter(|n| n.contains(&filter))
        .collect();
    assert!(!names.is_empty(), "{} holds no cases", root.display());
    let results = run_all(&root, &names, "cpu:1");
    let passed: BTreeSet<&str> = results
        .iter()
        .filter(|(_, r)| r.is_ok())
        .map(|(n, _)| n.as_str())
        .collect();
    if let Some(path) = std::env::var_os("GRISTMILL_CASE_REPORT") {
        let lines: Vec<String> = results
            .iter()
            .filter_map(|(n, r)| {
                r.as_ref()
                    .err()
                    .map(|e| format!("{n}\t{}", e.replace('\n', " ")))
            })
            .collect();
        std::fs::write(path, lines.join("\n")).unwrap();
    }
    eprintln!("{} of {} cases pass", passed.len(), results.len());
    for (case, rule) in EXCEPTIONS.iter().filter(|(case, _)| case.contains(&filter)) {
        let outcome = &results[*case];
        assert!(outcome.is_err(), "{case} passes, although {rule}");
    }
    let panics: Vec<&str> = results
        .iter()
        .filter(|(_, r)| matches!(r, Err(e) if e == "PANIC"))
        .map(|(n, _)| n.as_str())
        .collect();
    assert!(panics.is_empty(), "panicked: {panics:?}");
    let listed = std::fs::read_to_string(LIST).unwrap_or_default();
    let listed: BTreeSet<&str> = listed
        .lines()
        .filter(|l| !l.is_empty() && l.contains(&filter))
        .collect();
    let broken: Vec<String> = listed
        .iter()
        .filter(|n| !passed.contains(**n))
        .map(|n| format!("{n}: {:?}", results.get(*n)))
        .collect();
    assert!(
        broken.is_empty(),
        "{} listed cases fail:\n{}",
        broken.len(),
        broken.join("\n")
    );
    let new: Vec<&str> = passed.difference(&listed).copied().collect();
    if filter.is_empty() && std::env::var_os("GRISTMILL_UPDATE_CASES").is_some() {
        std::fs::write(
            LIST,
            passed.iter().map(|n| format!("{n}\n")).collect::<String>(),
        )
        .unwrap();
    } else {
        assert!(
            new.is_empty(),
            "{} cases pass that are not listed; set GRISTMILL_UPDATE_CASES=1: {new:?}",
            new.len()
        );
    }
}
