//! Conventions where there is no derivative.

use super::*;
use crate::ir::Real;
use ScalarOp::*;

fn at(op: ScalarOp, operands: &[f64]) -> Vec<f64> {
    let operands: Vec<Operand> = operands.iter().map(|&x| numbers(&[], &[x])).collect();
    gradients_of(Op::Map(op), &operands).concat()
}

#[test]
fn corners_of_one_operand() {
    let alpha = Real(0.25);
    let clamp = ClampTo {
        lo: Real(-1.0),
        hi: Real(2.0),
    };
    for (op, x, expected) in [
        (Relu, 0.0, 0.0),
        (Abs, 0.0, 0.0),
        (LeakyRelu { alpha }, 0.0, 0.25),
        (Elu { alpha }, 0.0, 0.25),
        (Celu { alpha }, 0.0, 1.0),
        (ThresholdedRelu { alpha }, 0.25, 0.0),
        (HardSwish, -3.0, 0.0),
        (HardSwish, 3.0, 1.0),
        (clamp, -1.0, 1.0),
        (clamp, 2.0, 1.0),
        (clamp, 2.5, 0.0),
        (Sqrt, 0.0, f64::INFINITY),
        (Elu { alpha }, -1e6, 0.0),
        (Softplus, 1e6, 1.0),
        (Silu, -1e6, 0.0),
    ] {
        assert_eq!(at(op, &[x]), [expected], "{op} at {x}");
    }
}

#[test]
fn ties_share() {
    assert_eq!(at(Max, &[1.5, 1.5]), [0.5, 0.5]);
    assert_eq!(at(Min, &[1.5, 1.5]), [0.5, 0.5]);
    assert_eq!(at(Max, &[1.5, 2.5]), [0.0, 1.0]);
    for kind in [ReduceKind::Max, ReduceKind::Min] {
        let op = Op::Reduce {
            kind,
            axes: vec![0],
            keepdims: false,
        };
        let x = numbers(&[3, 2], &[2.0, 1.0, 2.0, 1.0, 2.0, 1.0]);
        assert_eq!(gradients_of(op, &[x]), [[1.0 / 3.0; 6]]);
    }
}

#[test]
fn powers_of_zero_and_to_zero() {
    assert_eq!(at(Pow, &[0.0, 2.0]), [0.0, 0.0]);
    assert_eq!(at(Pow, &[0.0, 1.0]), [1.0, 0.0]);
    assert_eq!(at(Pow, &[0.0, 0.0]), [0.0, 0.0]);
    assert_eq!(at(Pow, &[3.0, 0.0]), [0.0, 3f64.ln()]);
    assert_eq!(at(Pow, &[-3.0, 2.0])[0], -6.0);
}

#[test]
fn the_origin_has_no_angle() {
    assert_eq!(at(Atan2, &[0.0, 0.0]), [0.0, 0.0]);
}

#[test]
fn clamp_by_operands() {
    assert_eq!(at(Clamp, &[1.0, 1.0, 2.0]), [1.0, 0.0, 0.0]);
    assert_eq!(at(Clamp, &[2.0, 1.0, 2.0]), [1.0, 0.0, 0.0]);
    assert_eq!(at(Clamp, &[0.5, 1.0, 2.0]), [0.0, 1.0, 0.0]);
    assert_eq!(at(Clamp, &[2.5, 1.0, 2.0]), [0.0, 0.0, 1.0]);
    assert_eq!(at(Clamp, &[0.5, 3.0, 2.0]), [0.0, 0.0, 1.0]);
    // Bounds that are one: the result moves with both of them.
    assert_eq!(at(Clamp, &[0.5, 2.0, 2.0]), [0.0, 1.0, 0.0]);
    assert_eq!(at(Clamp, &[2.5, 2.0, 2.0]), [0.0, 0.0, 1.0]);
}

#[test]
fn parametric_slope_at_zero() {
    assert_eq!(at(Prelu, &[0.0, 0.25]), [0.25, 0.0]);
}

#[test]
fn products_with_zeros() {
    let product = |x: &[f64]| {
        let op = Op::Reduce {
            kind: ReduceKind::Prod,
            axes: vec![0],
            keepdims: false,
        };
        gradients_of(op, &[numbers(&[x.len()], x)]).concat()
    };
    assert_eq!(product(&[2.0, 3.0, 4.0]), [12.0, 8.0, 6.0]);
    assert_eq!(product(&[2.0, 0.0, 4.0]), [0.0, 8.0, 0.0]);
    assert_eq!(product(&[0.0, 3.0, 0.0]), [0.0, 0.0, 0.0]);
}

#[test]
fn replaced_updates_have_no_gradient() {
    let data = numbers(&[3], &[1.0, 2.0, 3.0]);
    let updates = numbers(&[3], &[4.0, 5.0, 6.0]);
    let op = Op::ScatterElements {
        axis: 0,
        kind: crate::ir::ScatterKind::Set,
    };
    let at = indices(&[3], &[0, -1, 0]);
    let found = gradients_of(op, &[data, at, updates]);
    assert_eq!(found, [[0.0, 1.0, 0.0], [0.0, 1.0, 1.0]]);
}

#[test]
fn scattered_factors_of_zero() {
    let op = Op::ScatterElements {
        axis: 0,
        kind: crate::ir::ScatterKind::Mul,
    };
    let at = indices(&[3], &[0, 0, 1]);
    let updates = numbers(&[3], &[0.0, 5.0, 0.0]);
    let found = gradients_of(op, &[numbers(&[2], &[3.0, 0.0]), at, updates]);
    assert_eq!(found, [vec![0.0, 0.0], vec![15.0, 0.0, 0.0]]);
}

#[test]
fn scattered_extremes_share() {
    let op = Op::ScatterElements {
        axis: 0,
        kind: crate::ir::ScatterKind::Max,
    };
    let at = indices(&[3], &[0, 0, 1]);
    let updates = numbers(&[3], &[3.0, 1.0, 2.0]);
    let found = gradients_of(op, &[numbers(&[2], &[3.0, 1.0]), at, updates]);
    assert_eq!(found, [vec![0.5, 0.0], vec![0.5, 0.0, 1.0]]);
}
