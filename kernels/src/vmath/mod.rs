//! Elementary functions of f32 vectors, and the leaf kernels that map them over arrays.
//!
//! Each function is one polynomial and one order of operations for every instruction set: AVX-512
//! and AVX2 agree bit for bit, the portable form up to double rounding where the target has no
//! fused multiply-add. NaN gives NaN; infinities, overflow, denormal numbers and the sign of zero
//! follow C99's functions unless a function's comment says otherwise. [`FUNCTIONS`] states each
//! function's error bound, which the tests measure against f64. Polynomials were fitted for this
//! crate (weighted minimax over the reduced range).

mod functions;
#[cfg(test)]
mod tests;

pub(crate) use functions::*;

use crate::epilogue::Map;
use crate::isa::Isa;
use crate::simd::{Simd, Task, dispatch};

/// `fn(n, x, y)`: `y[i] = f(x[i])`. `x` and `y` may be the same array, and may not overlap
/// otherwise.
pub type UnaryFn = unsafe extern "C" fn(n: usize, x: *const f32, y: *mut f32);

/// `fn(n, a, b, y)`: `y[i] = f(a[i], b[i])`. `y` may be one of the inputs, and may not overlap them
/// otherwise.
pub type BinaryFn = unsafe extern "C" fn(n: usize, a: *const f32, b: *const f32, y: *mut f32);

/// A function of one variable.
#[derive(Clone, Copy)]
pub struct Function {
    /// The exported leaf kernel's name.
    pub symbol: &'static str,
    /// The leaf kernel, by number of the instruction set, which the CPU must have: see [`Function::kernel`].
    kernels: [UnaryFn; Isa::ALL.len()],
    /// The function in f64.
    #[cfg(test)]
    pub(crate) reference: fn(f64) -> f64,
    /// Largest error in units of the last place of the result...
    #[cfg(test)]
    max_ulp: f64,
    /// ...beyond this absolute error, relative to `max(1, |x|)`.
    #[cfg(test)]
    max_abs: f64,
}

impl Function {
    /// The leaf kernel for an instruction set that this CPU has.
    pub fn kernel(&self, isa: Isa) -> UnaryFn {
        self.kernels[isa as usize - 1]
    }
}

struct MapArray<T> {
    n: usize,
    x: *const f32,
    y: *mut f32,
    f: T,
}

impl<T: Map> Task for MapArray<T> {
    type Out = ();

    /// Safety: `x` is readable and `y` writable for `n` elements.
    #[inline(always)]
    unsafe fn run<S: Simd>(self, s: S) {
        let mut i = 0;
        // SAFETY: whole vectors, then at most `n` elements from `i` on.
        unsafe {
            while i + S::LANES <= self.n {
                s.store(self.y.add(i), self.f.map(s, s.load(self.x.add(i))));
                i += S::LANES;
            }
            if i < self.n {
                let n = self.n - i;
                s.store_n(self.y.add(i), n, self.f.map(s, s.load_n(self.x.add(i), n)));
            }
        }
    }
}

macro_rules! unary {
    ($(
        $(#[doc = $doc:literal])*
        $name:ident = $f:ident, $symbol:ident, $reference:expr, ulp $ulp:literal, abs $abs:literal;
    )*) => {
        $(
            $(#[doc = $doc])*
            #[derive(Clone, Copy)]
            pub(crate) struct $name;

            impl Map for $name {
                #[inline(always)]
                fn map<S: Simd>(self, s: S, x: S::F) -> S::F {
                    $f(s, x)
                }
            }

            $(#[doc = $doc])*
            ///
            /// # Safety
            /// `x` is readable and `y` writable for `n` elements; they are equal or do not overlap. The CPU has the instruction set
            /// of number `ISA`.
            pub unsafe extern "C" fn $symbol<const ISA: u32>(n: usize, x: *const f32, y: *mut f32) {
                // SAFETY: the caller's contract is the task's.
                unsafe { dispatch(Isa::of::<ISA>(), MapArray { n, x, y, f: $name }) }
            }
        )*

        /// The functions of one variable.
        pub static FUNCTIONS: &[Function] = &[$(Function {
            symbol: stringify!($symbol),
            kernels: [$symbol::<1>, $symbol::<2>, $symbol::<3>],
            #[cfg(test)]
            reference: $reference,
            #[cfg(test)]
            max_ulp: $ulp,
            #[cfg(test)]
            max_abs: $abs,
        }),*];
    };
}

unary! {
    /// `e^x`
    Exp = exp, gm_vexp_f32, f64::exp, ulp 1.1, abs 0.0;
    /// `2^x`
    Exp2 = exp2, gm_vexp2_f32, f64::exp2, ulp 1.1, abs 0.0;
    /// `e^x - 1`
    Expm1 = expm1, gm_vexpm1_f32, f64::exp_m1, ulp 2.0, abs 0.0;
    /// `ln(x)`
    Log = log, gm_vlog_f32, f64::ln, ulp 1.5, abs 0.0;
    /// `log2(x)`
    Log2 = log2, gm_vlog2_f32, f64::log2, ulp 2.0, abs 0.0;
    /// `ln(1 + x)`
    Log1p = log1p, gm_vlog1p_f32, f64::ln_1p, ulp 2.5, abs 0.0;
    /// Hyperbolic tangent.
    Tanh = tanh, gm_vtanh_f32, f64::tanh, ulp 3.0, abs 0.0;
    /// Error function.
    Erf = erf, gm_verf_f32, reference::erf, ulp 2.0, abs 0.0;
    /// `1 / (1 + e^-x)`
    Sigmoid = sigmoid, gm_vsigmoid_f32, reference::sigmoid, ulp 3.0, abs 0.0;
    /// `x * sigmoid(x)`
    Silu = silu, gm_vsilu_f32, |x| x * reference::sigmoid(x), ulp 4.0, abs 1e-44;
    /// `x / 2 * (1 + erf(x / sqrt 2))`
    Gelu = gelu, gm_vgelu_f32, reference::gelu, ulp 4.0, abs 1.2e-7;
    /// `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))`
    GeluTanh = gelu_tanh, gm_vgelu_tanh_f32, reference::gelu_tanh, ulp 4.0, abs 1e-6;
    /// `ln(1 + e^x)`
    Softplus = softplus, gm_vsoftplus_f32, reference::softplus, ulp 4.0, abs 0.0;
    /// `x * tanh(softplus(x))`
    Mish = mish, gm_vmish_f32, reference::mish, ulp 5.0, abs 1e-44;
    /// Sine; exact reduction up to 1e6, lane by lane beyond.
    Sin = sin, gm_vsin_f32, f64::sin, ulp 1.6, abs 0.0;
    /// Cosine; exact reduction up to 1e6, lane by lane beyond.
    Cos = cos, gm_vcos_f32, f64::cos, ulp 1.6, abs 0.0;
    /// Tangent, lane by lane.
    Tan = tan, gm_vtan_f32, f64::tan, ulp 1.0, abs 0.0;
    /// Arc sine, lane by lane.
    Asin = asin, gm_vasin_f32, f64::asin, ulp 1.0, abs 0.0;
    /// Arc cosine, lane by lane.
    Acos = acos, gm_vacos_f32, f64::acos, ulp 1.0, abs 0.0;
    /// Arc tangent, lane by lane.
    Atan = atan, gm_vatan_f32, f64::atan, ulp 1.0, abs 0.0;
    /// Hyperbolic sine, lane by lane.
    Sinh = sinh, gm_vsinh_f32, f64::sinh, ulp 1.0, abs 0.0;
    /// Hyperbolic cosine, lane by lane.
    Cosh = cosh, gm_vcosh_f32, f64::cosh, ulp 1.0, abs 0.0;
    /// Inverse hyperbolic sine, lane by lane.
    Asinh = asinh, gm_vasinh_f32, f64::asinh, ulp 1.0, abs 0.0;
    /// Inverse hyperbolic cosine, lane by lane.
    Acosh = acosh, gm_vacosh_f32, f64::acosh, ulp 1.0, abs 0.0;
    /// Inverse hyperbolic tangent, lane by lane.
    Atanh = atanh, gm_vatanh_f32, f64::atanh, ulp 1.0, abs 0.0;
    /// Square root.
    Sqrt = sqrt, gm_vsqrt_f32, f64::sqrt, ulp 0.5, abs 0.0;
    /// `1 / sqrt(x)`
    Rsqrt = rsqrt, gm_vrsqrt_f32, |x| 1.0 / x.sqrt(), ulp 1.5, abs 0.0;
    /// `1 / x`
    Reciprocal = reciprocal, gm_vrecip_f32, |x| 1.0 / x, ulp 0.5, abs 0.0;
}

struct PowArray {
    n: usize,
    a: *const f32,
    b: *const f32,
    y: *mut f32,
}

impl Task for PowArray {
    type Out = ();

    /// Safety: `a` and `b` are readable and `y` writable for `n` elements.
    #[inline(always)]
    unsafe fn run<S: Simd>(self, s: S) {
        let mut i = 0;
        while i < self.n {
            let n = self.n - i;
            // SAFETY: at most `n` elements from `i` on.
            unsafe {
                let (a, b) = (s.load_n(self.a.add(i), n), s.load_n(self.b.add(i), n));
                s.store_n(self.y.add(i), n, pow(s, a, b));
            }
            i += S::LANES;
        }
    }
}

/// `a[i]` to the power `b[i]`; at most 1.1 units of the last place off.
///
/// # Safety
/// As for [`BinaryFn`]. The CPU has the instruction set of number `ISA`.
pub unsafe extern "C" fn gm_vpow_f32<const ISA: u32>(
    n: usize,
    a: *const f32,
    b: *const f32,
    y: *mut f32,
) {
    // SAFETY: the caller's contract is the task's.
    unsafe { dispatch(Isa::of::<ISA>(), PowArray { n, a, b, y }) }
}

/// Functions that `f64` lacks.
#[cfg(test)]
mod reference {
    pub(super) fn sigmoid(x: f64) -> f64 {
        1.0 / (1.0 + (-x).exp())
    }

    pub(super) fn softplus(x: f64) -> f64 {
        x.max(0.0) + (-x.abs()).exp().ln_1p() + if x.is_nan() { f64::NAN } else { 0.0 }
    }

    pub(super) fn mish(x: f64) -> f64 {
        x * softplus(x).tanh()
    }

    pub(super) fn gelu(x: f64) -> f64 {
        0.5 * x * (1.0 + erf(x * std::f64::consts::FRAC_1_SQRT_2))
    }

    pub(super) fn gelu_tanh(x: f64) -> f64 {
        let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
        0.5 * x * (1.0 + u.tanh())
    }

    /// Maclaurin series near zero, Lentz's continued fraction of erfc beyond: some 1e-14.
    pub(super) fn erf(x: f64) -> f64 {
        let t = x.abs();
        if t.is_nan() || t == 0.0 {
            return x;
        }
        if t > 6.0 {
            return 1f64.copysign(x);
        }
        if t < 2.5 {
            let (mut term, mut sum) = (x, x);
            for n in 1..100 {
                term *= -x * x / f64::from(n);
                sum += term / f64::from(2 * n + 1);
            }
            return sum * std::f64::consts::FRAC_2_SQRT_PI;
        }
        let mut fraction = 0.0;
        for n in (1..200).rev() {
            fraction = f64::from(n) / 2.0 / (t + fraction);
        }
        let erfc = (-t * t).exp() / (t + fraction) * std::f64::consts::FRAC_2_SQRT_PI / 2.0;
        (1.0 - erfc).copysign(x)
    }
}
