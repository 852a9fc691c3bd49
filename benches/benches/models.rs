//! Compile time and run time of the small real models in `tests/data`, f32 on the CPU, one thread.
//!
//! Peers are compared by `benches/peers/compare.py`, on the full-size models.

use criterion::{Criterion, criterion_main};
use gristmill::testing::Setup;
use gristmill::{Tensor, onnx};
use std::path::PathBuf;

const MODELS: [&str; 4] = [
    "models/mlp_dynamo",
    "models/resnet_dynamo",
    "models/bert_dynamo",
    "models/gpt2_dynamo",
];

fn directory(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data")).join(name)
}

fn inputs(name: &str) -> Vec<(String, Tensor)> {
    let data = directory(name).join("test_data_set_0");
    let paths = (0..)
        .map(|i| data.join(format!("input_{i}.pb")))
        .take_while(|p| p.exists());
    paths
        .map(|p| {
            onnx::tensor_from_pb(&std::fs::read(p).expect("the file exists"))
                .expect("a good tensor")
        })
        .collect()
}

fn models(c: &mut Criterion) {
    let setup = Setup::with_threads(1);
    for name in MODELS {
        let model = onnx::load(directory(name).join("model.onnx")).expect("a good model");
        let named = inputs(name);
        c.bench_function(&format!("compile {name}"), |b| {
            b.iter(|| {
                let compiled = setup.compile(&model).expect("it compiles");
                let tensors = compiled.bind(named.clone()).expect("inputs fit");
                compiled.for_inputs(&tensors).expect("it compiles")
            })
        });
        let compiled = setup.compile(&model).expect("it compiles");
        let tensors = compiled.bind(named.clone()).expect("inputs fit");
        let executable = compiled.for_inputs(&tensors).expect("it compiles");
        let mut outputs = executable.run(&tensors).expect("it runs").into_tensors();
        c.bench_function(&format!("run {name}"), |b| {
            b.iter(|| {
                executable
                    .run_into(&tensors, &mut outputs)
                    .expect("it runs")
            })
        });
    }
}

#[allow(missing_docs)]
mod group {
    use super::models;
    use criterion::{Criterion, criterion_group};

    criterion_group! {
        name = benches;
        config = Criterion::default().sample_size(10);
        targets = models
    }
}
criterion_main!(group::benches);
