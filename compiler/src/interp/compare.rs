//! Distances of tensors.

use crate::ir::eval::scalar::{Scalar, Wide};
use gristmill_runtime::{Tensor, with_dtype};
use std::fmt;

/// Result of a comparison. Errors of elements that are equal, NaN against NaN and equal infinities
/// included, are 0.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// True when dtype, shape and all elements agree within the tolerance.
    pub ok: bool,
    /// Largest `|actual - expected|`; infinite where just one is NaN or infinite.
    pub max_abs_err: f64,
    /// Largest `|actual - expected| / |expected|` of the elements that differ.
    pub max_rel_err: f64,
    /// Largest finite `|expected|`.
    pub max_abs_expected: f64,
    /// Number of elements beyond the tolerance.
    pub n_bad: usize,
    /// Index of the element that is farthest beyond the tolerance (or nearest to it), unless all
    /// are equal.
    pub worst: Option<Vec<usize>>,
    /// Expected and actual value there, or another difference.
    pub detail: String,
}

impl Comparison {
    /// Largest absolute error over the largest absolute expected value: the error relative to the
    /// tensor's scale. 0 when there is no error.
    pub fn scaled_err(&self) -> f64 {
        if self.max_abs_err == 0.0 {
            0.0
        } else {
            self.max_abs_err / self.max_abs_expected
        }
    }

    /// Counts the error of an element; returns it as a multiple of the allowed one.
    fn add(&mut self, magnitude: f64, error: f64, allowed: f64) -> f64 {
        let is_finite = error.is_finite();
        let relative = if is_finite { error / magnitude } else { error };
        self.max_abs_err = self.max_abs_err.max(error);
        self.max_rel_err = self.max_rel_err.max(relative);
        self.n_bad += usize::from(error > allowed);
        if is_finite {
            error / allowed.max(f64::MIN_POSITIVE)
        } else {
            f64::MAX
        }
    }

    fn differing(detail: String) -> Comparison {
        let inf = f64::INFINITY;
        Comparison {
            ok: false,
            max_abs_err: inf,
            max_rel_err: inf,
            max_abs_expected: 0.0,
            n_bad: 0,
            worst: None,
            detail,
        }
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.ok && self.n_bad == 0 {
            return f.write_str(&self.detail);
        }
        let (abs, rel) = (self.max_abs_err, self.max_rel_err);
        write!(
            f,
            "max abs error {abs:.3e}, max rel error {rel:.3e}, over scale {:.3e}",
            self.scaled_err()
        )?;
        if !self.ok {
            write!(
                f,
                ", {} elements beyond the tolerance; {}",
                self.n_bad, self.detail
            )?;
        }
        Ok(())
    }
}

/// Compares element-wise: floating-point elements agree when `|actual - expected| <= atol + rtol *
/// |expected|`, or both are NaN or the same infinity; integers and truth values must be equal.
pub fn allclose(expected: &Tensor, actual: &Tensor, rtol: f64, atol: f64) -> Comparison {
    if expected.dtype() != actual.dtype() || expected.shape() != actual.shape() {
        let show = |t: &Tensor| format!("{}{:?}", t.dtype(), t.shape());
        return Comparison::differing(format!("expected {}, got {}", show(expected), show(actual)));
    }
    with_dtype!(expected.dtype(), T => compare::<T>(expected, actual, rtol, atol))
}

fn compare<T: Scalar>(expected: &Tensor, actual: &Tensor, rtol: f64, atol: f64) -> Comparison {
    let mut c = Comparison {
        ok: true,
        max_abs_err: 0.0,
        max_rel_err: 0.0,
        max_abs_expected: 0.0,
        n_bad: 0,
        worst: None,
        detail: String::new(),
    };
    let mut worst_excess = 0.0;
    let pairs = expected.as_slice::<T>().iter().zip(actual.as_slice::<T>());
    for (i, (&e, &a)) in pairs.enumerate() {
        let magnitude = e.to_f64().abs();
        if magnitude.is_finite() {
            c.max_abs_expected = c.max_abs_expected.max(magnitude);
        }
        if e == a || e.is_nan() && a.is_nan() {
            continue;
        }
        let (error, allowed) = error_and_tolerance(e, a, rtol, atol);
        let excess = c.add(magnitude, error, allowed);
        if excess > worst_excess {
            worst_excess = excess;
            let at = unravel(i, expected.shape());
            c.detail = format!("worst at {at:?}: expected {e:?}, got {a:?}");
            c.worst = Some(at);
        }
    }
    c.ok = c.n_bad == 0;
    c
}

/// The error of an element that differs, and the largest that is allowed.
fn error_and_tolerance<T: Scalar>(expected: T, actual: T, rtol: f64, atol: f64) -> (f64, f64) {
    match (expected.to_wide(), actual.to_wide()) {
        (Wide::Float(e), Wide::Float(a)) if e.is_finite() && a.is_finite() => {
            ((a - e).abs(), atol + rtol * e.abs())
        }
        (Wide::Int(e), Wide::Int(a)) => ((a - e).unsigned_abs() as f64, 0.0),
        _ => (f64::INFINITY, 0.0),
    }
}

/// The index of row-major position `i`.
fn unravel(mut i: usize, shape: &[usize]) -> Vec<usize> {
    let mut index = vec![0; shape.len()];
    for d in (0..shape.len()).rev() {
        index[d] = i % shape[d];
        i /= shape[d];
    }
    index
}

#[cfg(test)]
mod tests {
    use super::*;

    fn t(v: &[f32]) -> Tensor {
        Tensor::from_slice(v, &[v.len()]).unwrap()
    }

    #[test]
    fn special_values() {
        let c = allclose(
            &t(&[f32::NAN, f32::INFINITY, 0.0]),
            &t(&[f32::NAN, f32::INFINITY, -0.0]),
            0.0,
            0.0,
        );
        assert!(c.ok && c.worst.is_none() && c.scaled_err() == 0.0);
        for (e, a) in [
            (f32::NAN, 0.0),
            (0.0, f32::NAN),
            (f32::INFINITY, f32::NEG_INFINITY),
            (f32::INFINITY, 1.0),
        ] {
            let c = allclose(&t(&[1.0, e]), &t(&[1.0, a]), 1e9, 1e9);
            assert!(!c.ok, "{e} {a}");
            assert_eq!(c.worst, Some(vec![1]));
        }
    }

    #[test]
    fn tolerances_and_the_worst_element() {
        let (e, a) = (t(&[1.0, 100.0, 0.0]), t(&[1.0, 101.0, 0.5]));
        let c = allclose(&e, &a, 0.02, 0.1);
        assert_eq!((c.ok, c.n_bad, c.worst), (false, 1, Some(vec![2])));
        assert_eq!(
            (c.max_abs_err, c.max_rel_err, c.max_abs_expected),
            (1.0, f64::INFINITY, 100.0)
        );
        assert!(allclose(&e, &a, 0.01, 0.5).ok);
    }

    #[test]
    fn integers_are_exact() {
        let big = |v: i64| Tensor::from_slice(&[v], &[1]).unwrap();
        assert!(!allclose(&big(1 << 60), &big((1 << 60) + 1), 1.0, 10.0).ok);
        let c = allclose(&big(1), &Tensor::scalar(1i64), 0.0, 0.0);
        assert!(!c.ok);
        assert_eq!(c.to_string(), "expected i64[1], got i64[]");
    }
}
