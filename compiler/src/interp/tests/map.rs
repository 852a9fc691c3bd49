//! Element-wise ops: broadcasting, dtypes and division by zero.

use super::*;
use crate::ir::eval::scalar;
use crate::ir::{Real, ScalarOp};
use gristmill_runtime::DType;
use gristmill_runtime::half::{bf16, f16};

fn map(op: ScalarOp, inputs: &[&Tensor]) -> Tensor {
    ev(Op::Map(op), inputs)
}

const NAN: f32 = f32::NAN;
const INF: f32 = f32::INFINITY;

#[test]
fn broadcasts_like_numpy() {
    let (a, b) = (t(&[1i32, 2], &[2, 1]), t(&[10i32, 20, 30], &[3]));
    assert_eq!(
        map(ScalarOp::Add, &[&a, &b]),
        t(&[11i32, 21, 31, 12, 22, 32], &[2, 3])
    );
    let empty = t::<i32>(&[], &[0, 1]);
    assert_eq!(map(ScalarOp::Add, &[&empty, &b]).shape(), [0, 3]);
    assert_eq!(
        map(ScalarOp::Div, &[&empty, &t(&[0i32], &[])]).shape(),
        [0, 1]
    );
    fails(Op::Map(ScalarOp::Add), &[&b, &t(&[1i32, 2], &[2])]);
    fails(Op::Map(ScalarOp::Add), &[&b, &t(&[1f32], &[])]);
}

#[test]
fn min_and_max_keep_nan() {
    let (a, b) = (
        t(&[1.0, NAN, 2.0, -0.0, 0.0], &[5]),
        t(&[NAN, 1.0, 3.0, 0.0, -0.0], &[5]),
    );
    for (op, expected) in [
        (ScalarOp::Min, [NAN, NAN, 2.0, -0.0, -0.0]),
        (ScalarOp::Max, [NAN, NAN, 3.0, 0.0, 0.0]),
    ] {
        let bits = |v: &[f32]| {
            v.iter()
                .map(|v| if v.is_nan() { 1 } else { v.to_bits() })
                .collect::<Vec<_>>()
        };
        assert_eq!(bits(map(op, &[&a, &b]).as_slice()), bits(&expected), "{op}");
    }
    let clamped = map(
        ScalarOp::ClampTo {
            lo: Real(0.0),
            hi: Real(1.0),
        },
        &[&t(&[NAN, -1.0, 0.5, INF], &[4])],
    );
    assert_close(&t(&[NAN, 0.0, 0.5, 1.0], &[4]), &clamped, 0.0, 0.0);
    assert_close(
        &t(&[NAN, 0.0], &[2]),
        &map(ScalarOp::Relu, &[&t(&[NAN, -1.0], &[2])]),
        0.0,
        0.0,
    );
}

#[test]
fn rounding_and_sign() {
    let x = t(&[0.5f32, 1.5, 2.5, -0.5, -1.5, NAN], &[6]);
    assert_close(
        &t(&[0f32, 2.0, 2.0, -0.0, -2.0, NAN], &[6]),
        &map(ScalarOp::Round, &[&x]),
        0.0,
        0.0,
    );
    assert_close(
        &t(&[0f32, 1.0, 2.0, -0.0, -1.0, NAN], &[6]),
        &map(ScalarOp::Trunc, &[&x]),
        0.0,
        0.0,
    );
    assert_close(
        &t(&[1f32, 1.0, 1.0, -1.0, -1.0, NAN], &[6]),
        &map(ScalarOp::Sign, &[&x]),
        0.0,
        0.0,
    );
    assert_eq!(
        map(ScalarOp::Sign, &[&t(&[-5i8, 0, 5], &[3])]),
        t(&[-1i8, 0, 1], &[3])
    );
    assert_eq!(
        map(ScalarOp::Sign, &[&t(&[0u8, 200], &[2])]),
        t(&[0u8, 1], &[2])
    );
}

#[test]
fn integers_wrap_shift_and_divide() {
    let a = t(&[i8::MIN, 7, -7, 7], &[4]);
    assert_eq!(map(ScalarOp::Neg, &[&a]), t(&[i8::MIN, -7, 7, -7], &[4]));
    assert_eq!(map(ScalarOp::Abs, &[&a]), t(&[i8::MIN, 7, 7, 7], &[4]));
    let b = t(&[-1i8, 2, 2, -2], &[4]);
    assert_eq!(
        map(ScalarOp::Div, &[&a, &b]),
        t(&[i8::MIN, 3, -3, -3], &[4])
    );
    assert_eq!(map(ScalarOp::Rem, &[&a, &b]), t(&[0i8, 1, -1, 1], &[4]));
    assert_eq!(map(ScalarOp::Mod, &[&a, &b]), t(&[0i8, 1, 1, -1], &[4]));
    let n = t(&[7i8, 8, -1, 1], &[4]);
    assert_eq!(
        map(ScalarOp::Shl, &[&t(&[1i8; 4], &[4]), &n]),
        t(&[i8::MIN, 0, 0, 2], &[4])
    );
    assert_eq!(
        map(ScalarOp::Shr, &[&t(&[-128i8; 4], &[4]), &n]),
        t(&[-1i8, -1, -1, -64], &[4])
    );
    assert_eq!(
        map(
            ScalarOp::Shr,
            &[&t(&[128u8, 128], &[2]), &t(&[7u8, 8], &[2])]
        ),
        t(&[1u8, 0], &[2])
    );
    assert_eq!(
        map(ScalarOp::BitNot, &[&t(&[5u16], &[1])]),
        t(&[!5u16], &[1])
    );
    let (bases, powers) = (
        t(&[3i32, -1, -1, 1, 2, 0, 0, 10], &[8]),
        t(&[4i32, -3, -4, -9, -1, -1, 0, 10], &[8]),
    );
    assert_eq!(
        map(ScalarOp::Pow, &[&bases, &powers]),
        t(&[81i32, -1, 1, 1, 0, 0, 1, 1_410_065_408], &[8])
    );
    for op in [ScalarOp::Div, ScalarOp::Rem, ScalarOp::Mod] {
        let e = fails(Op::Map(op), &[&t(&[1i64, 1], &[2]), &t(&[1i64, 0], &[2])]);
        assert_eq!(e.kind(), crate::ErrorKind::InvalidInput);
    }
}

#[test]
fn float_remainders() {
    let (a, b) = (
        t(&[5.5f32, -5.5, 5.5, -5.5], &[4]),
        t(&[2f32, 2.0, -2.0, -2.0], &[4]),
    );
    assert_eq!(
        map(ScalarOp::Rem, &[&a, &b]),
        t(&[1.5f32, -1.5, 1.5, -1.5], &[4])
    );
    assert_eq!(
        map(ScalarOp::Mod, &[&a, &b]),
        t(&[1.5f32, 0.5, -0.5, -1.5], &[4])
    );
}

#[test]
fn comparisons_and_logic() {
    let (a, b) = (t(&[1f32, 2.0, NAN], &[3]), t(&[1f32, 1.0, NAN], &[3]));
    for (op, expected) in [
        (ScalarOp::Eq, [true, false, false]),
        (ScalarOp::Ne, [false, true, true]),
        (ScalarOp::Lt, [false, false, false]),
        (ScalarOp::Le, [true, false, false]),
        (ScalarOp::Gt, [false, true, false]),
        (ScalarOp::Ge, [true, true, false]),
    ] {
        assert_eq!(map(op, &[&a, &b]), t(&expected, &[3]), "{op}");
    }
    let (p, q) = (
        t(&[false, false, true, true], &[4]),
        t(&[false, true, false, true], &[4]),
    );
    assert_eq!(
        map(ScalarOp::And, &[&p, &q]),
        t(&[false, false, false, true], &[4])
    );
    assert_eq!(
        map(ScalarOp::Or, &[&p, &q]),
        t(&[false, true, true, true], &[4])
    );
    assert_eq!(
        map(ScalarOp::Xor, &[&p, &q]),
        t(&[false, true, true, false], &[4])
    );
    assert_eq!(
        map(ScalarOp::Not, &[&p]),
        t(&[true, true, false, false], &[4])
    );
    assert_eq!(
        map(ScalarOp::Eq, &[&p, &q]),
        t(&[true, false, false, true], &[4])
    );
    let s = map(
        ScalarOp::Select,
        &[&t(&[true, false, true], &[3]), &a, &t(&[9f32], &[])],
    );
    assert_close(&t(&[1f32, 9.0, NAN], &[3]), &s, 0.0, 0.0);
    assert_eq!(
        map(ScalarOp::IsPosInf, &[&t(&[INF, -INF, NAN], &[3])]),
        t(&[true, false, false], &[3])
    );
    assert_eq!(
        map(ScalarOp::IsNegInf, &[&t(&[INF, -INF, NAN], &[3])]),
        t(&[false, true, false], &[3])
    );
    assert_eq!(
        map(ScalarOp::IsNan, &[&t(&[INF, -INF, NAN], &[3])]),
        t(&[false, false, true], &[3])
    );
}

#[test]
fn casts_saturate_wrap_and_round() {
    let cast = |x: &Tensor, to| map(ScalarOp::Cast(to), &[x]);
    let x = t(&[300.7f32, -300.7, NAN, -1.9, INF], &[5]);
    assert_eq!(cast(&x, DType::I8), t(&[127i8, -128, 0, -1, 127], &[5]));
    assert_eq!(cast(&x, DType::U8), t(&[255u8, 0, 0, 0, 255], &[5]));
    assert_eq!(cast(&x, DType::Bool), t(&[true; 5], &[5]));
    assert_eq!(
        cast(&t(&[300i32, -1], &[2]), DType::U8),
        t(&[44u8, 255], &[2])
    );
    assert_eq!(cast(&t(&[u64::MAX], &[1]), DType::I64), t(&[-1i64], &[1]));
    assert_eq!(
        cast(&t(&[u64::MAX], &[1]), DType::F32),
        t(&[18_446_744_073_709_551_616f32], &[1])
    );
    assert_eq!(
        cast(&t(&[16_777_217i32], &[1]), DType::F32),
        t(&[16_777_216f32], &[1])
    );
    assert_eq!(
        cast(&t(&[1.0009765f32], &[1]), DType::F16),
        t(&[f16::from_f32(1.0009765)], &[1])
    );
    assert_eq!(
        cast(&t(&[70000i32], &[1]), DType::F16),
        t(&[f16::INFINITY], &[1])
    );
    assert_eq!(
        cast(&t(&[bf16::from_f32(-2.5)], &[1]), DType::I32),
        t(&[-2i32], &[1])
    );
    assert_eq!(
        cast(
            &t(&[f16::from_f32(0.0), f16::from_f32(0.5)], &[2]),
            DType::Bool
        ),
        t(&[false, true], &[2])
    );
    assert_eq!(
        cast(&t(&[true, false], &[2]), DType::BF16),
        t(&[bf16::ONE, bf16::ZERO], &[2])
    );
}

#[test]
fn every_cast_pair_evaluates() {
    for &from in DType::ALL {
        for &to in DType::ALL {
            let x = scalar::real(from, 1.0);
            assert_eq!(
                map(ScalarOp::Cast(to), &[&x]),
                scalar::real(to, 1.0),
                "{from} to {to}"
            );
        }
    }
}

#[test]
fn bit_casts_keep_bits() {
    let bits = |x: &Tensor, to| map(ScalarOp::BitCast(to), &[x]);
    let numbers = [
        1.5f32,
        -0.0,
        f32::from_bits(0x7fc0_1234),
        f32::MIN_POSITIVE / 2.0,
    ];
    let codes = t(&numbers.map(f32::to_bits), &[2, 2]);
    assert_eq!(bits(&t(&numbers, &[2, 2]), DType::U32), codes);
    let back = bits(&codes, DType::F32);
    assert_eq!(back.as_bytes(), codes.as_bytes());
    assert_eq!(bits(&t(&[-2i64], &[]), DType::U64), t(&[u64::MAX - 1], &[]));
    let one = f16::ONE.to_bits();
    assert_eq!(bits(&t(&[one], &[1]), DType::F16), t(&[f16::ONE], &[1]));
    assert_eq!(
        bits(&t(&[f16::ONE], &[1]), DType::BF16),
        t(&[bf16::from_bits(one)], &[1])
    );
    assert_eq!(bits(&t(&[true], &[1]), DType::U8), t(&[1u8], &[1]));
    assert_eq!(
        bits(&t(&[0i8, 1, -128], &[3]), DType::Bool),
        t(&[false, true, true], &[3])
    );
}

#[test]
fn every_op_evaluates_in_its_whole_domain() {
    for op in ScalarOp::samples() {
        for &d in DType::ALL {
            let mut args = vec![scalar::real(d, 1.0); op.spec().arity];
            if op == ScalarOp::Select {
                args[0] = Tensor::scalar(true);
            }
            let dtypes: Vec<DType> = args.iter().map(Tensor::dtype).collect();
            let result = eval(&Op::Map(op), &args.iter().collect::<Vec<_>>(), &[]);
            assert_eq!(
                result.is_ok(),
                op.result_dtype(&dtypes).is_ok(),
                "{op} of {d}: {result:?}"
            );
        }
    }
}

#[test]
fn half_types_round_once() {
    let x = t(&[f16::from_f32(0.1), f16::from_f32(3.0)], &[2]);
    let expected: Vec<f16> = x
        .as_slice::<f16>()
        .iter()
        .map(|v| f16::from_f32((1.0 / (1.0 + (-v.to_f64()).exp())) as f32))
        .collect();
    assert_eq!(map(ScalarOp::Sigmoid, &[&x]), t(&expected, &[2]));
}

#[test]
fn one_scalar_at_a_time() {
    let f = |v: f32| (DType::F32, u64::from(v.to_bits()));
    assert_eq!(
        scalar::eval(ScalarOp::Add, &[f(1.0), f(2.0)]).unwrap(),
        f(3.0)
    );
    assert_eq!(
        scalar::eval(ScalarOp::Lt, &[f(1.0), f(2.0)]).unwrap(),
        (DType::Bool, 1)
    );
    scalar::eval(ScalarOp::Add, &[f(1.0)]).unwrap_err();
    scalar::eval(ScalarOp::Div, &[(DType::I8, 1), (DType::I8, 0)]).unwrap_err();
}

/// The formula of a one-operand op, straightforward in `f64`; attributes as in
/// [`ScalarOp::samples`].
fn formula(op: ScalarOp, x: f64) -> Option<f64> {
    use ScalarOp::*;
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let softplus = |x: f64| x.exp().ln_1p();
    let pick = |c: bool, a: f64, b: f64| if c { a } else { b };
    Some(match op {
        Neg => -x,
        Abs => x.abs(),
        Sign => x.signum(),
        Floor => x.floor(),
        Ceil => x.ceil(),
        Round => x.round_ties_even(),
        Trunc => x.trunc(),
        Sqrt => x.sqrt(),
        Rsqrt => 1.0 / x.sqrt(),
        Recip => 1.0 / x,
        Exp => x.exp(),
        Expm1 => x.exp_m1(),
        Log => x.ln(),
        Log1p => x.ln_1p(),
        Sin => x.sin(),
        Cos => x.cos(),
        Tan => x.tan(),
        Asin => x.asin(),
        Acos => x.acos(),
        Atan => x.atan(),
        Sinh => x.sinh(),
        Cosh => x.cosh(),
        Tanh => x.tanh(),
        Asinh => x.asinh(),
        Acosh => x.acosh(),
        Atanh => x.atanh(),
        Erf => crate::ir::eval::erf(x),
        Relu => x.max(0.0),
        Sigmoid => sigmoid(x),
        Gelu => 0.5 * x * (1.0 + crate::ir::eval::erf(x / 2f64.sqrt())),
        GeluTanh => {
            0.5 * x
                * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
        }
        Silu => x * sigmoid(x),
        Softplus => softplus(x),
        Softsign => x / (1.0 + x.abs()),
        Mish => x * softplus(x).tanh(),
        HardSwish => x * (x / 6.0 + 0.5).clamp(0.0, 1.0),
        HardSigmoid { alpha, beta } => (alpha.0 * x + beta.0).clamp(0.0, 1.0),
        LeakyRelu { alpha } => pick(x >= 0.0, x, alpha.0 * x),
        Elu { alpha } => pick(x > 0.0, x, alpha.0 * x.exp_m1()),
        Selu { alpha, gamma } => gamma.0 * pick(x > 0.0, x, alpha.0 * x.exp_m1()),
        Celu { alpha } => x.max(0.0) + (alpha.0 * (x / alpha.0).exp_m1()).min(0.0),
        ThresholdedRelu { alpha } => pick(x > alpha.0, x, 0.0),
        Shrink { lo, hi } => pick(x < lo.0, x + hi.0, pick(x > -lo.0, x - hi.0, 0.0)),
        ClampTo { lo, hi } => x.max(lo.0).min(hi.0),
        _ => return None,
    })
}

#[test]
fn float_ops_follow_their_formulas() {
    let points: Vec<f64> = (-40..=40).map(|i| f64::from(i) * 0.25 + 0.015625).collect();
    for op in ScalarOp::samples()
        .into_iter()
        .filter(|op| formula(*op, 1.0).is_some())
    {
        let expected: Vec<f64> = points.iter().map(|&x| formula(op, x).unwrap()).collect();
        let (n, x) = (points.len(), t(&points, &[points.len()]));
        assert_close(&t(&expected, &[n]), &map(op, &[&x]), 1e-13, 1e-14);
        let x32: Vec<f32> = points.iter().map(|&x| x as f32).collect();
        let expected: Vec<f32> = expected.iter().map(|&y| y as f32).collect();
        assert_close(&t(&expected, &[n]), &map(op, &[&t(&x32, &[n])]), 2e-6, 2e-6);
    }
}

#[test]
fn composites_at_the_ends_of_the_line() {
    let x = t(&[-1000f32, 1000.0, NAN], &[3]);
    for (op, expected) in [
        (ScalarOp::Sigmoid, [0f32, 1.0, NAN]),
        (ScalarOp::Softplus, [0.0, 1000.0, NAN]),
        (ScalarOp::Gelu, [0.0, 1000.0, NAN]),
        (ScalarOp::GeluTanh, [0.0, 1000.0, NAN]),
        (ScalarOp::Mish, [0.0, 1000.0, NAN]),
        (ScalarOp::Elu { alpha: Real(1.0) }, [-1.0, 1000.0, NAN]),
        (
            ScalarOp::LeakyRelu { alpha: Real(0.5) },
            [-500.0, 1000.0, NAN],
        ),
    ] {
        assert_close(&t(&expected, &[3]), &map(op, &[&x]), 0.0, 0.0);
    }
    let slope = t(&[0.5f32, 3.0, 1.0], &[3]);
    assert_close(
        &t(&[-500f32, 1000.0, NAN], &[3]),
        &map(ScalarOp::Prelu, &[&x, &slope]),
        0.0,
        0.0,
    );
    let (lo, hi) = (t(&[-1i32], &[]), t(&[4i32], &[]));
    assert_eq!(
        map(ScalarOp::Clamp, &[&t(&[-9i32, 2, 9], &[3]), &lo, &hi]),
        t(&[-1i32, 2, 4], &[3])
    );
}

#[test]
fn two_operand_float_functions() {
    let (y, x) = (t(&[1f64, -1.0, 0.0], &[3]), t(&[-1f64, 0.0, -1.0], &[3]));
    let pi = std::f64::consts::PI;
    assert_close(
        &t(&[0.75 * pi, -0.5 * pi, pi], &[3]),
        &map(ScalarOp::Atan2, &[&y, &x]),
        1e-15,
        0.0,
    );
    let (a, b) = (
        t(&[2f32, 2.0, -8.0, 0.0], &[4]),
        t(&[0.5f32, -1.0, 3.0, 0.0], &[4]),
    );
    assert_close(
        &t(&[2f32.sqrt(), 0.5, -512.0, 1.0], &[4]),
        &map(ScalarOp::Pow, &[&a, &b]),
        0.0,
        0.0,
    );
}
