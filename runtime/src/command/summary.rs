//! Statistics of tensors, for people and for machines.

use crate::dtype::{DType, Element};
use crate::tensor::Tensor;
use crate::units::printable;
use crate::with_dtype;

/// Number of elements that a summary shows.
const N_FIRST: usize = 6;

/// Statistics of the elements of one tensor. 64-bit integers beyond 2^53 are rounded.
pub struct Statistics {
    /// Smallest element that is not NaN; NaN if there is none.
    pub min: f64,
    /// Largest element that is not NaN; NaN if there is none.
    pub max: f64,
    /// NaN if any element is NaN or there is none.
    pub mean: f64,
    /// Number of elements that are NaN.
    pub n_nan: usize,
    /// Number of infinite elements.
    pub n_infinite: usize,
    /// The first elements.
    pub first: Vec<f64>,
}

impl Statistics {
    /// Statistics of a tensor.
    pub fn of(t: &Tensor) -> Statistics {
        with_dtype!(t.dtype(), T => Statistics::of_elements(t.as_slice::<T>()))
    }

    fn of_elements<T: Element>(elements: &[T]) -> Statistics {
        let mut s = Statistics {
            min: f64::NAN,
            max: f64::NAN,
            mean: f64::NAN,
            n_nan: 0,
            n_infinite: 0,
            first: elements.iter().take(N_FIRST).map(|e| e.to_f64()).collect(),
        };
        let mut sum = 0.0;
        for element in elements {
            let value = element.to_f64();
            s.min = s.min.min(value);
            s.max = s.max.max(value);
            s.n_nan += usize::from(value.is_nan());
            s.n_infinite += usize::from(value.is_infinite());
            sum += value;
        }
        if !elements.is_empty() {
            s.mean = sum / elements.len() as f64;
        }
        s
    }
}

/// `name: f32[2, 3]  min -1.2  mean 0.1  max 3.4  [0.1, 0.2, ..]`, and the numbers of NaN and infinities if there are any.
pub fn text(name: &str, t: &Tensor) -> String {
    let mut text = format!("{}: {}{:?}", printable(name), t.dtype(), t.shape());
    if t.is_empty() {
        return text;
    }
    let s = Statistics::of(t);
    let first: Vec<String> = s.first.iter().map(|v| number(*v, t.dtype())).collect();
    let dots = if t.len() > N_FIRST { ", .." } else { "" };
    text += &format!(
        "  min {}  mean {}  max {}  [{}{dots}]",
        number(s.min, t.dtype()),
        number(s.mean, DType::F64),
        number(s.max, t.dtype()),
        first.join(", ")
    );
    for (n, kind) in [(s.n_nan, "NaN"), (s.n_infinite, "infinite")] {
        if n > 0 {
            text += &format!("  {n} {kind}");
        }
    }
    text
}

/// An element in a few characters: very large and very small ones with an exponent.
fn number(v: f64, dtype: DType) -> String {
    if !dtype.is_float() {
        return format!("{v}");
    }
    let is_plain = v == 0.0 || (1e-4..1e15).contains(&v.abs()) || !v.is_finite();
    if is_plain {
        format!("{v:.6}")
    } else {
        format!("{v:.6e}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn f64s(values: &[f64]) -> Tensor {
        Tensor::from_slice(values, &[values.len()]).unwrap()
    }

    #[test]
    fn numbers_are_short() {
        let t = f64s(&[1e-300, 1.5, 0.0, -1e300]);
        assert_eq!(
            text("x", &t),
            "x: f64[4]  min -1.000000e300  mean -2.500000e299  max 1.500000  \
             [1.000000e-300, 1.500000, 0.000000, -1.000000e300]"
        );
        let t = Tensor::from_slice(&[3u8; 7], &[7]).unwrap();
        assert_eq!(
            text("y", &t),
            "y: u8[7]  min 3  mean 3.000000  max 3  [3, 3, 3, 3, 3, 3, ..]"
        );
        assert_eq!(text("z", &f64s(&[])), "z: f64[0]");
    }

    #[test]
    fn values_without_a_number_are_counted() {
        let t = f64s(&[f64::NAN, 1.0, f64::INFINITY, f64::NAN]);
        assert_eq!(
            text("x", &t),
            "x: f64[4]  min 1.000000  mean NaN  max inf  [NaN, 1.000000, inf, NaN]  2 NaN  1 infinite"
        );
    }
}
