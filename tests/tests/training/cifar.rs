//! The program `cifar10` on generated images.

use super::cifar10::{Args, evaluate, shapes, train, trainer};
use super::{cifar10, cifar10_multi};
use crate::multi_device::setup;
use gristmill::ir::Dim;
use gristmill::train::{
    Adam, Dataset, EventLog, Fit, ImageOp, Model, Objective, Strategy, Trainer, Training, loss,
};
use gristmill::{DType, Result};

/// A network of a few filters, and a third of the images.
fn small(folder: &std::path::Path) -> Args {
    Args {
        n_images: 3840,
        n_filters: 16,
        epochs: 6,
        ..Args::new(folder)
    }
}

#[test]
fn shapes_are_learnt_and_evaluated_by_another_process() {
    let folder = tempfile::tempdir().unwrap();
    let whole = small(&folder.path().join("whole"));
    let accuracies = train(&whole).unwrap();
    // A softmax of the pixels stays below 0.6.
    assert!(accuracies.1 > 0.7, "{accuracies:?}");
    // Stopped in between, and gone on: the same numbers.
    let args = small(&folder.path().join("parts"));
    train(&Args { epochs: 2, ..args }).unwrap();
    let parts = small(&folder.path().join("parts"));
    assert_eq!(train(&parts).unwrap(), accuracies);
    evaluate(&Args {
        once: true,
        ..parts
    })
    .unwrap();
    let log = EventLog::read(folder.path().join("parts/logs/train")).unwrap();
    let steps: Vec<u64> = log
        .scalar("loss")
        .into_iter()
        .map(|(step, _)| step)
        .collect();
    let expected: Vec<u64> = (1..=18).map(|n| 10 * n).collect();
    assert_eq!(steps, expected);
    let tags = log.steps.iter().flat_map(|s| &s.histograms);
    let tags: Vec<&str> = tags.map(|(tag, _)| tag.as_str()).collect();
    for tag in [
        "conv1/activations",
        "local3/activations",
        "conv2/weights/gradients",
    ] {
        assert!(tags.contains(&tag), "{tag} of {tags:?}");
    }
    let e = evaluate(&Args {
        once: true,
        ..small(&folder.path().join("nothing"))
    });
    let e = e.unwrap_err().to_string();
    assert!(e.contains("nothing"), "{e}");
}

#[test]
fn the_network_has_the_parameters_of_the_tutorial() {
    let own = trainer(&Args::new("unused"), 1).unwrap();
    let all = own.program().variables();
    let trained = all.iter().filter(|v| own.variables().contains(&v.name));
    let sizes = trained.map(|v| v.dims.iter().map(|n| n.unwrap()).product::<usize>());
    let n: usize = sizes.sum();
    assert_eq!(n, 1_068_298);
}

/// Two and four towers with variables on one CPU, written by hand, and the one line of `Mirrored`.
#[test]
fn towers_by_hand_train_as_replicas_do() {
    let data = cifar10::shapes(384, 1).unwrap();
    let data = data.images("image", cifar10::DISTORTIONS);
    let batches = || data.shuffled(128, 3, 0).map(|batch| batch.unwrap());
    let own = setup("cpu:2", 2);
    let training = Training {
        seed: cifar10::SEED,
        strategy: Strategy::Mirrored {
            devices: Vec::new(),
        },
        options: own.options.clone(),
        ..Training::from(cifar10::update(100))
    };
    let network = |m: &mut Model| cifar10::network(m, 8);
    let replicas = Trainer::in_session(&own.session(), "cifar10", &training, network).unwrap();
    let losses: Vec<f64> = batches().map(|b| replicas.step(b).unwrap().loss).collect();
    for n in [2, 4] {
        let graph = cifar10_multi::step(n, "cpu", 8).unwrap();
        let towers = setup(&format!("cpu:{n}"), 2).compile(&graph).unwrap();
        for (batch, expected) in batches().zip(&losses) {
            let outputs = towers.run(batch).unwrap();
            let loss = outputs["loss"].to_f64s()[0];
            assert!(
                (loss - expected).abs() < 1e-4,
                "{n} towers: {loss} {expected}"
            );
            assert!(outputs["conv1/sparsity"].to_f64s()[0] > 0.1);
        }
        for name in replicas.variables() {
            let value = towers.resources().get("", name).unwrap().unwrap();
            let pairs = value.to_f64s().into_iter();
            let pairs = pairs.zip(replicas.value(name).unwrap().unwrap().to_f64s());
            let worst = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(worst < 1e-4, "{n} towers, {name}: {worst}");
        }
    }
}

/// A softmax of the pixels.
fn linear(m: &mut Model) -> Result<Objective> {
    let image = [Dim::from("batch"), 3.into(), 32.into(), 32.into()];
    let image = m.input("image", DType::F32, image);
    let label = m.input("label", DType::U8, [Dim::from("batch")]);
    let x = m.flatten(image)?;
    let logits = m.dense(x, 10)?;
    let accuracy = loss::accuracy(m.builder(), logits, label)?;
    let loss = loss::sparse_cross_entropy(m.builder(), logits, label)?;
    Ok(Objective::new(loss).metric("accuracy", accuracy))
}

#[test]
fn shapes_are_not_told_by_their_pixels_alone() {
    let standardised = |n, seed| {
        shapes(n, seed)
            .unwrap()
            .images("image", [ImageOp::Standardize])
    };
    let (images, held_out) = (standardised(5120, 1), standardised(1000, 2));
    let trainer = Trainer::new("linear", &Training::from(Adam::default()), linear).unwrap();
    let fit = Fit {
        epochs: 6,
        ..Fit::new(&images, 128)
    };
    trainer.fit(&fit, &mut []).unwrap();
    let means = trainer.evaluate(&held_out, 128).unwrap();
    assert!(means.get("accuracy").unwrap() < 0.6, "{means}");
    assert_eq!(held_out.len(), 1000);
}
