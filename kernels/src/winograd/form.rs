//! The transforms of the minimal filtering algorithms F(2, 3) and F(4, 3).

use crate::simd::Simd;

/// F(M, 3): `M` outputs of a filter of 3 taps, from `A = M + 2` inputs and as many products.
pub(super) trait Form<const M: usize, const A: usize> {
    /// `G`: filters to products.
    const FILTER: [[f64; 3]; A];
    /// `B^T d`: inputs to products.
    fn input<S: Simd>(s: S, d: [S::F; A]) -> [S::F; A];
    /// `A^T m`: products to outputs.
    fn output<S: Simd>(s: S, m: [S::F; A]) -> [S::F; M];
}

/// F(2, 3) over the points 0, 1, -1 and infinity.
pub(super) struct Form2;

impl Form<2, 4> for Form2 {
    const FILTER: [[f64; 3]; 4] = [
        [1.0, 0.0, 0.0],
        [0.5, 0.5, 0.5],
        [0.5, -0.5, 0.5],
        [0.0, 0.0, 1.0],
    ];

    #[inline(always)]
    fn input<S: Simd>(s: S, d: [S::F; 4]) -> [S::F; 4] {
        [
            s.sub(d[0], d[2]),
            s.add(d[1], d[2]),
            s.sub(d[2], d[1]),
            s.sub(d[3], d[1]),
        ]
    }

    #[inline(always)]
    fn output<S: Simd>(s: S, m: [S::F; 4]) -> [S::F; 2] {
        let (sum, difference) = (s.add(m[1], m[2]), s.sub(m[1], m[2]));
        [s.add(m[0], sum), s.add(difference, m[3])]
    }
}

/// F(4, 3) over the points 0, 1/2, -1/2, 3/2, -3/2 and infinity: exact numbers that keep the entries of
/// all three transforms near 1, and errors below those of 0, 1, -1, 2, -2 (see Barabasz et al.,
/// arXiv:1803.10986, on the choice of points).
pub(super) struct Form4;

/// The finite points other than 0.
const P: f64 = 0.5;
const Q: f64 = 1.5;
const P2: f64 = P * P;
const Q2: f64 = Q * Q;
/// 1 over the product of the distances of a point to the others.
const NP: f64 = 1.0 / (2.0 * P2 * (P2 - Q2));
const NQ: f64 = 1.0 / (2.0 * Q2 * (Q2 - P2));

impl Form<4, 6> for Form4 {
    const FILTER: [[f64; 3]; 6] = [
        [1.0 / (P2 * Q2), 0.0, 0.0],
        [NP, NP * P, NP * P2],
        [NP, -NP * P, NP * P2],
        [NQ, NQ * Q, NQ * Q2],
        [NQ, -NQ * Q, NQ * Q2],
        [0.0, 0.0, 1.0],
    ];

    /// Coefficients of the products of `x - point` over all finite points but one, or over all.
    #[inline(always)]
    fn input<S: Simd>(s: S, d: [S::F; 6]) -> [S::F; 6] {
        let (a, b) = (fma(s, -Q2, d[2], d[4]), fma(s, -Q2, d[1], d[3]));
        let (c, e) = (fma(s, -P2, d[2], d[4]), fma(s, -P2, d[1], d[3]));
        [
            fma(s, P2 * Q2, d[0], fma(s, -P2 - Q2, d[2], d[4])),
            fma(s, P, b, a),
            fma(s, -P, b, a),
            fma(s, Q, e, c),
            fma(s, -Q, e, c),
            fma(s, P2 * Q2, d[1], fma(s, -P2 - Q2, d[3], d[5])),
        ]
    }

    #[inline(always)]
    fn output<S: Simd>(s: S, m: [S::F; 6]) -> [S::F; 4] {
        let (even_p, odd_p) = (s.add(m[1], m[2]), s.sub(m[1], m[2]));
        let (even_q, odd_q) = (s.add(m[3], m[4]), s.sub(m[3], m[4]));
        [
            s.add(m[0], s.add(even_p, even_q)),
            fma(s, Q, odd_q, scaled(s, P, odd_p)),
            fma(s, Q2, even_q, scaled(s, P2, even_p)),
            fma(s, Q * Q2, odd_q, fma(s, P * P2, odd_p, m[5])),
        ]
    }
}

/// `c * a + b`.
#[inline(always)]
fn fma<S: Simd>(s: S, c: f64, a: S::F, b: S::F) -> S::F {
    s.mul_acc(s.splat(c as f32), a, b)
}

#[inline(always)]
fn scaled<S: Simd>(s: S, c: f64, a: S::F) -> S::F {
    s.mul(s.splat(c as f32), a)
}
