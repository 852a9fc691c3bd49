//! Random tensors, the same on every machine for a seed: operands of kernels that are timed, and of tests.

use crate::ir::eval::scalar::{Scalar, Wide};
use crate::rng::Rng;
use gristmill_runtime::{DType, Tensor, with_dtype};

/// A random tensor: floating-point elements are normal (mean 0, deviation 1), integers in `-8..=8` (unsigned: `0..=16`).
/// With `special`, one floating-point element in eight is NaN, an infinity, a zero, or huge or tiny; one integer in
/// eight is the dtype's greatest or least.
pub fn random_tensor(rng: &mut Rng, dtype: DType, shape: &[usize], special: bool) -> Tensor {
    let mut out = Tensor::zeros(dtype, shape).expect("tests ask for sizes that fit");
    with_dtype!(dtype, T => out.as_mut_slice::<T>().iter_mut().for_each(|v| *v = random_element(rng, dtype, special)));
    out
}

fn random_element<T: Scalar>(rng: &mut Rng, dtype: DType, special: bool) -> T {
    let special = special && rng.one_in(8);
    T::from_wide(match dtype {
        DType::Bool => Wide::Int((rng.below(2)) as i128),
        d if d.is_float() && special => Wide::Float(rng.pick(&[
            f64::NAN,
            f64::INFINITY,
            f64::NEG_INFINITY,
            0.0,
            -0.0,
            3e38,
            -6e4,
            1e-40,
            6e-8,
        ])),
        d if d.is_float() => Wide::Float(rng.normal()),
        _ if special => return rng.pick(&[T::LEAST, T::GREATEST]),
        d if d.is_unsigned_int() => Wide::Int(rng.below(17) as i128),
        _ => Wide::Int(rng.below(17) as i128 - 8),
    })
}

/// Random indices for an axis, negative ones among them: `dtype` is `i32` or `i64`, `extent` at least 1.
pub fn random_indices(rng: &mut Rng, dtype: DType, shape: &[usize], extent: usize) -> Tensor {
    let mut out = Tensor::zeros(dtype, shape).expect("tests ask for sizes that fit");
    let n = extent as i128;
    with_dtype!(dtype, T => {
        for v in out.as_mut_slice::<T>() {
            *v = T::from_wide(Wide::Int(rng.below(2 * extent) as i128 - n));
        }
    });
    out
}
