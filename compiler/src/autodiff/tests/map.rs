//! Every element-wise op.

use super::*;
use crate::ir::gradient::Gradient;
use crate::ir::scalar::Domain;

const POINTS: [f64; 8] = [-3.4, -2.3, -1.3, -0.6, 0.4, 0.9, 1.9, 3.3];

/// Points of an op of one operand that are in its domain and away from its kinks.
fn points(op: ScalarOp) -> Vec<f64> {
    use ScalarOp::*;
    match op {
        Sqrt | Rsqrt | Log | Log1p => vec![0.2, 0.9, 1.7, 3.3],
        Asin | Acos | Atanh => vec![-0.9, -0.4, 0.3, 0.8],
        Acosh => vec![1.2, 1.9, 3.3, 5.0],
        _ => POINTS.to_vec(),
    }
}

/// Operands of an op, those of several broadcast.
fn operands(op: ScalarOp) -> Vec<Operand> {
    let column = numbers(&[4, 1], &[-2.2, -0.7, 0.45, 1.6]);
    let row = numbers(&[3], &[-1.3, 0.6, 2.5]);
    match (op.spec().arity, op) {
        (1, _) => {
            let points = points(op);
            vec![numbers(&[2, points.len() / 2], &points)]
        }
        (2, ScalarOp::Pow) => vec![numbers(&[4, 1], &[0.3, 0.8, 1.7, 2.4]), row],
        (2, ScalarOp::Atan2) => vec![column, numbers(&[], &[0.8])],
        (2, _) => vec![column, row],
        (_, ScalarOp::Select) => vec![truths(&[4, 1], &[1.0, 0.0, 0.0, 1.0]), column, row],
        _ => {
            let x = numbers(&[6], &[-2.0, -1.1, 0.2, 0.9, 1.7, 2.4]);
            vec![x, numbers(&[1], &[-0.9]), numbers(&[], &[1.2])]
        }
    }
}

#[test]
fn every_element_wise_rule_is_the_derivative() {
    let casts = [ScalarOp::Cast(DType::F64)];
    let mut n_checked = 0;
    for op in ScalarOp::samples().into_iter().chain(casts) {
        if matches!(Op::Map(op).spec().gradient, Gradient::Rule(_)) {
            let build = |b: &mut GraphBuilder, x: &[ValueId]| Ok(vec![b.map(op, x)?]);
            check(op.spec().name, &operands(op), &build);
            n_checked += 1;
        }
    }
    assert!(n_checked > 50, "{n_checked}");
}

#[test]
fn steps_have_the_derivative_zero() {
    let options = GradOptions {
        allow_unused: true,
        ..GradOptions::default()
    };
    for op in ScalarOp::samples() {
        let spec = op.spec();
        let takes_floats = matches!(spec.domain, Domain::Float | Domain::Number);
        let is_step = matches!(Op::Map(op).spec().gradient, Gradient::Zero);
        if is_step && takes_floats && spec.arity == 1 {
            let build = |b: &mut GraphBuilder, x: &[ValueId]| Ok(vec![b.map(op, x)?]);
            check_with(spec.name, &operands(op), &build, &options);
        }
    }
}

#[test]
fn rank_zero_and_empty_operands() {
    for op in [ScalarOp::Mul, ScalarOp::Div, ScalarOp::Max] {
        let build = |b: &mut GraphBuilder, x: &[ValueId]| Ok(vec![b.map(op, x)?]);
        check("scalars", &[reals(&[]), reals(&[1])], &build);
        check("empty", &[reals(&[0, 3]), reals(&[1, 3])], &build);
        check("batch", &[reals(&[4, 3]).batched(), reals(&[3])], &build);
        check(
            "batch of 1",
            &[reals(&[4, 3]).batched(), reals(&[1, 3])],
            &build,
        );
    }
}

#[test]
fn casts_between_floats_pass_and_others_cut() {
    let through = |via: DType| {
        move |b: &mut GraphBuilder, x: &[ValueId]| {
            let y = b.cast(x[0], via)?;
            let y = b.cast(y, DType::F64)?;
            Ok(vec![b.mul(y, x[0])?])
        }
    };
    let (graph, loss, wrt) =
        graph_of(&[numbers(&[2], &[0.5, -1.5])], &through(DType::F32)).unwrap();
    let d = grad(&graph, loss, &wrt, &GradOptions::default()).unwrap();
    let x = Tensor::from_slice(&[0.5, -1.5], &[2]).unwrap();
    let narrow = run(&d, std::slice::from_ref(&x)).unwrap()[1].to_f64s();
    let (graph, loss, wrt) =
        graph_of(&[numbers(&[2], &[0.5, -1.5])], &through(DType::I32)).unwrap();
    let d = grad(&graph, loss, &wrt, &GradOptions::default()).unwrap();
    let cut = run(&d, &[x]).unwrap()[1].to_f64s();
    let weights = [0.7f64.sin(), 2.0f64.sin()];
    let expected = [weights[0], -3.0 * weights[1]];
    assert!(
        narrow
            .iter()
            .zip(expected)
            .all(|(a, b)| (a - b).abs() < 1e-6),
        "{narrow:?}"
    );
    assert!(
        cut[0] == 0.0 && (cut[1] + weights[1]).abs() < 1e-12,
        "{cut:?}"
    );
}

#[test]
fn half_floats_have_gradients() {
    for dtype in [DType::F16, DType::BF16, DType::F32] {
        let x = Operand::of(Tensor::from_f64s(dtype, &[2, 2], &[0.5, -1.0, 2.0, 1.5]).unwrap());
        let op = Op::Reduce {
            kind: ReduceKind::Mean,
            axes: vec![0, 1],
            keepdims: false,
        };
        assert_eq!(gradients_of(op, std::slice::from_ref(&x)), [[0.25; 4]]);
        let squared = gradients_of(Op::Map(ScalarOp::Mul), &[x.clone(), x]);
        assert_eq!(squared[0], [0.5, -1.0, 2.0, 1.5]);
    }
}
