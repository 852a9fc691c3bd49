//! Nodes in their form for training, in models that are not trained.

use super::{floats, info, int, model, node};
use crate::compiled::compile;
use crate::interp;
use crate::onnx::{Model, Specialisation, proto::*};
use crate::options::Options;
use gristmill_runtime::Tensor;

fn norm(inputs: &[&str], outputs: &[&str]) -> NodeProto {
    let mut norm = node("BatchNormalization", inputs, outputs);
    norm.attribute = vec![
        int("training_mode", 1),
        AttributeProto {
            f: 0.75,
            ..super::attribute("momentum", attribute_type::FLOAT)
        },
    ];
    norm
}

/// Two batch normalisations of `x: f32[4, 1]` with the running statistics of the first.
fn norms() -> Model {
    let statistics = ["scale", "offset", "mean", "var"];
    let operands = |x: &'static str| [&[x][..], &statistics].concat();
    let y = info("y", 1, &["4", "1"]);
    let outputs = ["first", "moved_mean", "moved_var"];
    let results = outputs.map(|name| info(name, 1, &[]));
    model(GraphProto {
        name: "norms".to_owned(),
        node: vec![
            norm(&operands("x"), &outputs),
            norm(&operands("first"), &["y"]),
        ],
        initializer: vec![
            floats("scale", &[1], &[2.0]),
            floats("offset", &[1], &[1.0]),
            floats("mean", &[1], &[8.0]),
            floats("var", &[1], &[9.0]),
        ],
        input: vec![info("x", 1, &["4", "1"])],
        output: results.into_iter().chain([y]).collect(),
        ..Default::default()
    })
}

#[test]
fn batch_norms_take_statistics_of_the_batch_with_a_warning() {
    let x = Tensor::from_slice(&[1f32, 3.0, 5.0, 7.0], &[4, 1]).unwrap();
    let compiled = compile(&norms(), &Options::default()).unwrap();
    let warnings = compiled.warnings();
    insta::assert_snapshot!(warnings.join("\n"), @r#"2 batch norms take statistics of the batch, as in training: the first is node "BatchNormalization_0:first" (try: export for inference)"#);
    let outputs = compiled.run([("x", x.clone())]).unwrap();
    // The mean is 4, the biased variance 5.
    for (got, x) in outputs["first"].to_f64s().iter().zip([1.0, 3.0, 5.0, 7.0]) {
        let want: f64 = (x - 4.0) / 5.00001f64.sqrt() * 2.0 + 1.0;
        assert!((got - want).abs() < 1e-5, "{got}, expected {want}");
    }
    assert_eq!(outputs["moved_mean"].to_f64s(), [8.0 * 0.75 + 4.0 * 0.25]);
    assert_eq!(outputs["moved_var"].to_f64s(), [9.0 * 0.75 + 5.0 * 0.25]);
    let graph = norms().graph(&Specialisation::default()).unwrap();
    let interpreted = interp::run(&graph, &[x]).unwrap();
    for (got, want) in outputs["y"].to_f64s().iter().zip(interpreted[3].to_f64s()) {
        assert!((got - want).abs() < 1e-5, "{got}, expected {want}");
    }
}

/// A dropout of 1000 elements at a rate of a quarter, with its mask.
fn dropout() -> Model {
    let yes = TensorProto {
        name: "training".to_owned(),
        data_type: 9,
        raw_data: vec![1].into(),
        ..Default::default()
    };
    let mut node = node("Dropout", &["x", "rate", "training"], &["y", "mask"]);
    node.name = "drop".to_owned();
    model(GraphProto {
        name: "dropout".to_owned(),
        node: vec![node],
        initializer: vec![floats("rate", &[], &[0.25]), yes],
        input: vec![info("x", 1, &["n"])],
        output: vec![info("y", 1, &["n"]), info("mask", 9, &["n"])],
        ..Default::default()
    })
}

#[test]
fn dropout_is_drawn_by_the_seed_with_a_warning() {
    let run = |seed: u64| {
        let options = Options {
            seed,
            ..Options::default()
        };
        let compiled = compile(&dropout(), &options).unwrap();
        insta::allow_duplicates! {
            insta::assert_snapshot!(compiled.warnings().join("\n"), @r#"1 dropout drops random elements, as in training: node "drop" (try: export for inference)"#);
        }
        let x = Tensor::from_slice(&[3f32; 1000], &[1000]).unwrap();
        let outputs = compiled.run([("x", x)]).unwrap();
        let (y, mask) = (outputs["y"].to_f64s(), outputs["mask"].to_f64s());
        let is_consistent = |(y, mask): (&f64, &f64)| *y == mask * 4.0;
        assert!(y.iter().zip(&mask).all(is_consistent));
        mask
    };
    let mask = run(1);
    let n_kept = mask.iter().sum::<f64>();
    assert!((700.0..800.0).contains(&n_kept), "{n_kept}");
    assert_eq!(run(1), mask);
    assert_ne!(run(2), mask);
}

#[test]
fn state_in_training_form_is_refused() {
    let source = crate::compiled::Source::from(&norms());
    let pairs = [("x".to_owned(), "y".to_owned())];
    let error = source.keeping(&pairs, &Default::default()).err().unwrap();
    insta::assert_snapshot!(error, @r#"state with nodes in their form for training: 2 batch norms take statistics of the batch, as in training: the first is node "BatchNormalization_0:first" (try: export for inference)"#);
}
