//! Losses: values of PyTorch in `f64`, and gradients by central differences.

use super::assert_close;
use crate::autodiff::tests::{Operand, check, compare_compiled, graph_of, indices, numbers, reals};
use crate::error::Result;
use crate::interp::run;
use crate::ir::{Dim, GraphBuilder, ValueId};
use crate::train::loss::{self, CrossEntropy};
use crate::train::{Model, Objective, Sgd, Trainer, Training};
use crate::{DType, ErrorKind, Tensor};

type Loss<'a> = &'a dyn Fn(&mut GraphBuilder, &[ValueId]) -> Result<ValueId>;

/// The value of a loss of operands.
fn value(operands: &[Operand], loss: Loss) -> f64 {
    let mut b = GraphBuilder::new("loss");
    let mut inputs = Vec::new();
    for (i, operand) in operands.iter().enumerate() {
        let (dtype, shape) = (operand.value.dtype(), operand.value.shape());
        inputs.push(b.input(&format!("x{i}"), dtype, shape.iter().copied()));
    }
    let loss = loss(&mut b, &inputs).unwrap();
    b.output("loss", loss);
    let tensors: Vec<Tensor> = operands.iter().map(|o| o.value.clone()).collect();
    run(&b.finish().unwrap(), &tensors).unwrap()[0].to_f64s()[0]
}

/// Compares a loss with a value, its gradients with differences, and compiled code with the interpreter; for a symbolic batch too.
fn check_loss(name: &str, operands: &[Operand], expected: f64, loss: Loss) {
    assert_close(&[value(operands, loss)], &[expected], 1e-14);
    let build = |b: &mut GraphBuilder, x: &[ValueId]| Ok(vec![loss(b, x)?]);
    let batched: Vec<Operand> = operands.iter().map(|o| o.clone().batched()).collect();
    let inputs: Vec<Tensor> = operands.iter().map(|o| o.value.clone()).collect();
    for operands in [operands, &batched] {
        check(name, operands, &build);
        let (graph, ..) = graph_of(operands, &build).unwrap();
        compare_compiled(&graph, &inputs).unwrap_or_else(|e| panic!("{name}: {e}"));
    }
}

#[test]
fn cross_entropy_smooths_and_ignores_labels() {
    let smoothed = CrossEntropy {
        label_smoothing: 0.2,
        ignored_label: None,
    };
    let sparse = |ignored| CrossEntropy {
        ignored_label: Some(ignored),
        ..CrossEntropy::default()
    };
    let both = CrossEntropy {
        label_smoothing: 0.2,
        ..sparse(-100)
    };
    let whole = [2, 0, 1, 2];
    // F.cross_entropy(logits, labels), with label_smoothing=0.2, of labels [2, -100, 1, -100], and with both
    let cases = [
        (CrossEntropy::default(), whole, 2.2397375629107077),
        (smoothed, whole, 2.1658257671150167),
        (sparse(-100), [2, -100, 1, -100], 2.1455379278251434),
        (both, [2, -100, 1, -100], 2.094186869780634),
        // Inside of the classes, and beyond them.
        (sparse(0), [2, 0, 1, 0], 2.1455379278251434),
        (sparse(3), [2, 3, 1, 3], 2.1455379278251434),
        (sparse(-100), whole, 2.2397375629107077),
    ];
    for (settings, labels, expected) in cases {
        let name = format!("{settings:?}");
        let operands = [reals(&[4, 3]), indices(&[4], &labels)];
        check_loss(&name, &operands, expected, &|b, x| {
            settings.build(b, x[0], x[1])
        });
        // Two axes of rows.
        let logits = numbers(&[2, 2, 3], &operands[0].value.to_f64s());
        let operands = [logits, indices(&[2, 2], &labels)];
        check_loss(&name, &operands, expected, &|b, x| {
            settings.build(b, x[0], x[1])
        });
    }
}

#[test]
fn labels_out_of_range_are_errors_unless_ignored() {
    let settings = CrossEntropy {
        ignored_label: Some(-100),
        ..CrossEntropy::default()
    };
    for label in [-1, -99, 3] {
        let mut b = GraphBuilder::new("loss");
        let logits = b.input("logits", DType::F64, [4usize, 3]);
        let labels = b.input("labels", DType::I64, [4usize]);
        let loss = settings.build(&mut b, logits, labels).unwrap();
        b.output("loss", loss);
        let given = [
            reals(&[4, 3]).value,
            indices(&[4], &[2, label, 1, -100]).value,
        ];
        let e = run(&b.finish().unwrap(), &given).unwrap_err();
        assert!(e.to_string().contains("out of range"), "{label}: {e}");
    }
}

/// The mean of no row is NaN, and ends a training.
#[test]
fn ignored_rows_alone_are_an_error_of_the_step() {
    let training = Training::from(Sgd::default());
    let settings = CrossEntropy {
        label_smoothing: 0.1,
        ignored_label: Some(-100),
    };
    let trainer = Trainer::new("ignored", &training, |m: &mut Model| {
        let x = m.input("x", DType::F32, [Dim::from("batch"), 2.into()]);
        let y = m.input("y", DType::I64, [Dim::from("batch")]);
        let logits = m.scope("classes", |m| m.dense(x, 3))?;
        Ok(Objective::new(settings.build(m.builder(), logits, y)?))
    })
    .unwrap();
    let x = Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0], &[2, 2]).unwrap();
    let step = |labels: [i64; 2]| {
        let y = Tensor::from_slice(&labels, &[2]).unwrap();
        trainer.step([("x", x.clone()), ("y", y)])
    };
    assert!(step([2, -100]).unwrap().loss.is_finite());
    let weights = || trainer.value("classes/weights").unwrap().unwrap().to_f64s();
    let before = weights();
    let e = step([-100, -100]).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::NotFinite, "{e}");
    assert_eq!(weights(), before);
    assert_eq!(trainer.n_steps().unwrap(), 1);
}

#[test]
fn huber_is_squared_near_0_and_linear_beyond() {
    // F.huber_loss(x, x.flip(0, 1), delta=1.0), and delta=0.4
    let x = reals(&[2, 3]);
    let mut flipped = x.value.to_f64s();
    flipped.reverse();
    let operands = [x, numbers(&[2, 3], &flipped)];
    for (delta, expected) in [(1.0, 1.442858375341385), (0.4, 0.6971433501365542)] {
        check_loss("huber", &operands, expected, &|b, x| {
            loss::huber(b, x[0], x[1], delta)
        });
    }
    // d = -0.5, 0.25, 2, -3 with delta 1: d^2 / 2, d^2 / 2, |d| - 1 / 2 twice.
    let x = numbers(&[4], &[0.5, 0.25, 3.0, -1.0]);
    let y = numbers(&[4], &[1.0, 0.0, 1.0, 2.0]);
    let expected = (0.125 + 0.03125 + 1.5 + 2.5) / 4.0;
    check_loss("by hand", &[x, y], expected, &|b, x| {
        loss::huber(b, x[0], x[1], 1.0)
    });
}

#[test]
fn labels_are_found_among_the_largest() {
    let operands = [reals(&[6, 5]), indices(&[6], &[0, 1, 2, 3, 4, 0])];
    // (logits.topk(k, -1).indices == labels[:, None]).any(-1).double().mean()
    for (k, right) in [(1, 1.0), (2, 3.0), (3, 4.0), (5, 6.0)] {
        let found = value(&operands, &|b, x| loss::top_k_accuracy(b, x[0], x[1], k));
        assert_close(&[found], &[right / 6.0], 1e-7);
    }
    let best = value(&operands, &|b, x| loss::accuracy(b, x[0], x[1]));
    assert_close(&[best], &[1.0 / 6.0], 1e-7);
    // A label outside of the classes is wrong; of equal logits the first ones are the largest.
    let equal = [numbers(&[3, 3], &[1.0; 9]), indices(&[3], &[-100, 2, 1])];
    for (k, right) in [(1, 0.0), (2, 1.0), (3, 2.0)] {
        let found = value(&equal, &|b, x| loss::top_k_accuracy(b, x[0], x[1], k));
        assert_close(&[found], &[right / 3.0], 1e-7);
    }
}

#[test]
fn settings_out_of_range_are_refused() {
    let refused = |loss: Loss| {
        let mut b = GraphBuilder::new("refused");
        let x = b.input("x", DType::F32, [Dim::from("batch"), 3.into()]);
        let y = b.input("y", DType::I64, [Dim::from("batch")]);
        let e = loss(&mut b, &[x, y]).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidInput, "{e}");
        e.to_string()
    };
    for smoothing in [-0.1, 1.5, f64::NAN] {
        let settings = CrossEntropy {
            label_smoothing: smoothing,
            ignored_label: None,
        };
        assert_eq!(
            refused(&|b, x| settings.build(b, x[0], x[1])),
            format!("label smoothing: {smoothing}, expected a number from 0 to 1")
        );
    }
    for delta in [0.0, -1.0, f64::INFINITY, f64::NAN] {
        assert_eq!(
            refused(&|b, x| loss::huber(b, x[0], x[0], delta)),
            format!("Huber loss: delta is {delta}, expected a finite number above 0")
        );
    }
    for k in [0, 4] {
        assert_eq!(
            refused(&|b, x| loss::top_k_accuracy(b, x[0], x[1], k)),
            format!("top-k accuracy: k is {k}, expected a number from 1 to the 3 classes")
        );
    }
    let swapped = refused(&|b, x| loss::top_k_accuracy(b, x[0], x[0], 1));
    assert!(
        swapped.starts_with("top-k accuracy: labels are f32[batch, 3]"),
        "{swapped}"
    );
}
