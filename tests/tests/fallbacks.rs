//! Ops of exported models that run in generated loops on a CPU although they have a kernel: the list of those that are known.
//!
//! A model that loses a kernel changes the snapshot; so does one that gains one.

use gristmill::{Options, Tensor, compile, onnx};
use std::path::{Path, PathBuf};

fn exported_models() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/models");
    let entries = std::fs::read_dir(folder).expect("the folder of models is there");
    let mut models: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    models.retain(|path| path.is_dir());
    models.sort();
    models
}

fn test_inputs(folder: &Path, n: usize) -> Vec<Tensor> {
    let path = |i| folder.join(format!("test_data_set_0/input_{i}.pb"));
    let read = |i| onnx::tensor_from_pb(&std::fs::read(path(i)).unwrap()).unwrap();
    (0..n).map(|i| read(i).1).collect()
}

/// A line for each fallback of a model.
fn fallbacks(folder: &Path) -> String {
    let model = onnx::load(folder.join("model.onnx")).unwrap();
    let compiled = compile(&model, &Options::default()).unwrap();
    let inputs = test_inputs(folder, compiled.inputs().len());
    let executable = compiled.for_inputs(&inputs).unwrap();
    let name = folder.file_name().unwrap().to_string_lossy();
    let mut text = format!("{name}:\n");
    for f in &executable.lowered.report.fallbacks {
        text += &format!("    {} ({}): {}\n", f.node, f.op, f.why);
    }
    text
}

#[test]
fn exported_models_have_the_known_fallbacks() {
    let models = exported_models();
    assert_eq!(models.len(), 17);
    let found: String = models.iter().map(|folder| fallbacks(folder)).collect();
    insta::assert_snapshot!(found);
}
