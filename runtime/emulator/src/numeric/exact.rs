//! Floating-point operations in every rounding mode and format, by integer arithmetic.
//!
//! Slow and plain: operations that Rust's `f32` and `f64` have are done natively; the rest comes here. A value is a sign, an
//! exponent and a 128-bit magnitude whose last bit also stands for everything below it ("sticky"), so that rounding
//! once at the end is rounding the exact result (Muller et al., Handbook of Floating-Point Arithmetic, chapter 7).

use super::format::Format;

/// Rounding modes, by their PTX names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rounding {
    /// `.rn`: to nearest, ties to even.
    Nearest,
    /// `.rna`: to nearest, ties away from zero.
    NearestAway,
    /// `.rz`
    Zero,
    /// `.rm`
    Down,
    /// `.rp`
    Up,
}

/// A number of a wider range and precision than any format.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Number {
    Nan,
    Infinite {
        negative: bool,
    },
    /// `magnitude * 2^exponent`, magnitude 0 for zero. Bit 0 is sticky.
    Finite {
        negative: bool,
        magnitude: u128,
        exponent: i32,
    },
}

use Number::{Finite, Infinite, Nan};

/// Leading bit of a normalised magnitude: one bit of room for the carry of an addition.
const TOP: u32 = 126;

impl Number {
    /// The exact value of `x`.
    pub fn from_f64(x: f64) -> Number {
        let bits = x.to_bits();
        let negative = bits >> 63 != 0;
        let (exponent, fraction) = ((bits >> 52 & 0x7ff) as i32, bits & ((1 << 52) - 1));
        match exponent {
            0x7ff if fraction != 0 => Nan,
            0x7ff => Infinite { negative },
            0 => Finite {
                negative,
                magnitude: u128::from(fraction),
                exponent: -1074,
            },
            _ => Finite {
                negative,
                magnitude: u128::from(fraction | 1 << 52),
                exponent: exponent - 1075,
            },
        }
    }

    /// The exact value of an integer.
    pub fn from_integer(x: i128) -> Number {
        Finite {
            negative: x < 0,
            magnitude: x.unsigned_abs() << 1,
            exponent: -1,
        }
        .normalised()
    }

    fn normalised(self) -> Number {
        match self {
            Finite {
                negative,
                magnitude,
                exponent,
            } if magnitude != 0 => {
                let shift = TOP as i32 - (127 - magnitude.leading_zeros() as i32);
                if shift < 0 {
                    return Finite {
                        negative,
                        magnitude: magnitude >> 1 | magnitude & 1,
                        exponent: exponent + 1,
                    };
                }
                Finite {
                    negative,
                    magnitude: magnitude << shift,
                    exponent: exponent - shift,
                }
            }
            other => other,
        }
    }

    fn negated(self) -> Number {
        match self {
            Nan => Nan,
            Infinite { negative } => Infinite {
                negative: !negative,
            },
            Finite {
                negative,
                magnitude,
                exponent,
            } => Finite {
                negative: !negative,
                magnitude,
                exponent,
            },
        }
    }

    /// `self + other`; an exact zero of operands with different signs is negative only when rounding down.
    pub fn add(self, other: Number, rounding: Rounding) -> Number {
        let (a, b) = (self.normalised(), other.normalised());
        match (a, b) {
            (Nan, _) | (_, Nan) => Nan,
            (Infinite { negative: x }, Infinite { negative: y }) if x != y => Nan,
            (Infinite { .. }, _) => a,
            (_, Infinite { .. }) => b,
            (
                Finite {
                    negative: x,
                    magnitude: 0,
                    ..
                },
                Finite {
                    negative: y,
                    magnitude: 0,
                    ..
                },
            ) => Number::zero(if x == y {
                x
            } else {
                rounding == Rounding::Down
            }),
            (Finite { magnitude: 0, .. }, _) => b,
            (_, Finite { magnitude: 0, .. }) => a,
            (Finite { exponent: x, .. }, Finite { exponent: y, .. }) if x < y => {
                add_finite(b, a, rounding)
            }
            _ => add_finite(a, b, rounding),
        }
    }

    pub fn subtract(self, other: Number, rounding: Rounding) -> Number {
        self.add(other.negated(), rounding)
    }

    pub fn multiply(self, other: Number) -> Number {
        match (self, other) {
            (Nan, _) | (_, Nan) => Nan,
            (Infinite { .. }, Finite { magnitude: 0, .. })
            | (Finite { magnitude: 0, .. }, Infinite { .. }) => Nan,
            (Infinite { negative: x }, Infinite { negative: y } | Finite { negative: y, .. })
            | (Finite { negative: x, .. }, Infinite { negative: y }) => {
                Infinite { negative: x != y }
            }
            (
                Finite {
                    negative: x,
                    magnitude: m,
                    exponent: e,
                },
                Finite {
                    negative: y,
                    magnitude: n,
                    exponent: f,
                },
            ) => Finite {
                negative: x != y,
                magnitude: m * n,
                exponent: e + f,
            },
        }
    }

    pub fn divide(self, other: Number) -> Number {
        match (self, other) {
            (Nan, _) | (_, Nan) | (Infinite { .. }, Infinite { .. }) => Nan,
            (Finite { magnitude: 0, .. }, Finite { magnitude: 0, .. }) => Nan,
            (Infinite { negative: x }, Finite { negative: y, .. })
            | (
                Finite { negative: x, .. },
                Finite {
                    negative: y,
                    magnitude: 0,
                    ..
                },
            ) => Infinite { negative: x != y },
            (Finite { negative: x, .. }, Infinite { negative: y })
            | (
                Finite {
                    negative: x,
                    magnitude: 0,
                    ..
                },
                Finite { negative: y, .. },
            ) => Number::zero(x != y),
            (
                Finite {
                    negative: x,
                    magnitude: m,
                    exponent: e,
                },
                Finite {
                    negative: y,
                    magnitude: n,
                    exponent: f,
                },
            ) => {
                // Operands have at most 53 bits, so the quotient has at least 73.
                let up = m.leading_zeros() - 1;
                let (m, e) = (m << up, e - up as i32);
                let quotient = (m / n) << 1 | u128::from(!m.is_multiple_of(n));
                Finite {
                    negative: x != y,
                    magnitude: quotient,
                    exponent: e - f - 1,
                }
            }
        }
    }

    pub fn square_root(self) -> Number {
        match self {
            Finite { magnitude: 0, .. } => self,
            Nan | Infinite { negative: true } | Finite { negative: true, .. } => Nan,
            Infinite { .. } => self,
            Finite {
                magnitude,
                exponent,
                ..
            } => {
                let up = magnitude.leading_zeros()
                    - ((exponent - magnitude.leading_zeros() as i32) & 1) as u32;
                let (m, e) = (magnitude << up, exponent - up as i32);
                let root = m.isqrt();
                Finite {
                    negative: false,
                    magnitude: root << 1 | u128::from(root * root != m),
                    exponent: e / 2 - 1,
                }
            }
        }
    }

    fn zero(negative: bool) -> Number {
        Finite {
            negative,
            magnitude: 0,
            exponent: 0,
        }
    }

    /// Rounds to `format` and returns its bits. Too large becomes infinite or, as mode and format ask, the largest
    /// finite number; `saturate` asks for the latter always (PTX's `.satfinite`).
    pub fn round(self, format: Format, rounding: Rounding, saturate: bool) -> u64 {
        let (negative, magnitude, exponent) = match self.normalised() {
            Nan => return format.nan,
            Infinite { negative } => return format.overflow(negative, Rounding::Nearest, saturate),
            Finite {
                negative,
                magnitude,
                exponent,
            } => (negative, magnitude, exponent),
        };
        if magnitude == 0 {
            return format.signed(negative, 0);
        }
        // Drop the bits below the last place of the format; subnormal numbers have a fixed last place.
        let last =
            (exponent + TOP as i32 - format.fraction_bits as i32).max(format.last_exponent());
        let (kept, up) = drop_bits(magnitude, (last - exponent) as u32, negative, rounding);
        // A carry out of the fraction moves into the exponent field, as it should.
        let biased = (last - format.last_exponent()) as u64;
        let hidden = u64::from(kept >> format.fraction_bits != 0);
        let field = if hidden == 1 { biased + 1 } else { 0 };
        let bits = (field << format.fraction_bits)
            + (kept as u64 - (hidden << format.fraction_bits))
            + u64::from(up);
        if bits > format.largest {
            format.overflow(negative, rounding, saturate)
        } else {
            format.signed(negative, bits)
        }
    }

    /// Rounds to an integer in the mode, and clamps; `None` for NaN.
    pub fn to_integer(self, rounding: Rounding, least: i128, most: i128) -> Option<i128> {
        let (negative, magnitude, exponent) = match self {
            Nan => return None,
            Infinite { negative } => return Some(if negative { least } else { most }),
            Finite {
                negative,
                magnitude,
                exponent,
            } => (negative, magnitude, exponent),
        };
        if magnitude != 0 && exponent + (127 - magnitude.leading_zeros() as i32) > 100 {
            return Some(if negative { least } else { most });
        }
        let (kept, up) = if exponent >= 0 {
            (magnitude << exponent, false)
        } else {
            drop_bits(magnitude, exponent.unsigned_abs(), negative, rounding)
        };
        let value = (kept + u128::from(up)) as i128;
        Some(if negative { -value } else { value }.clamp(least, most))
    }
}

/// `magnitude >> drop`, and whether the mode rounds its size up. `drop` is at least 1.
fn drop_bits(magnitude: u128, drop: u32, negative: bool, rounding: Rounding) -> (u128, bool) {
    let (kept, rest, half) = match drop {
        // Less than half of the last place, but more than nothing.
        128.. => (0, u128::from(magnitude != 0), 2),
        _ => (
            magnitude >> drop,
            magnitude & ((1 << drop) - 1),
            1 << (drop - 1),
        ),
    };
    let up = match rounding {
        Rounding::Nearest => rest > half || rest == half && kept & 1 == 1,
        Rounding::NearestAway => rest >= half,
        Rounding::Zero => false,
        Rounding::Down => negative && rest != 0,
        Rounding::Up => !negative && rest != 0,
    };
    (kept, up)
}

/// Sum of normalised, finite numbers that are not zero; `a` has the larger exponent, so the larger magnitude or nearly.
fn add_finite(a: Number, b: Number, rounding: Rounding) -> Number {
    let (
        Finite {
            negative,
            magnitude: m,
            exponent,
        },
        Finite {
            negative: other,
            magnitude: n,
            exponent: f,
        },
    ) = (a, b)
    else {
        return Nan;
    };
    let shift = (exponent - f) as u32;
    let n = if shift > TOP {
        1
    } else {
        n >> shift | u128::from(n & ((1 << shift) - 1) != 0)
    };
    if negative == other {
        return Finite {
            negative,
            magnitude: m + n,
            exponent,
        };
    }
    match m.cmp(&n) {
        std::cmp::Ordering::Equal => Number::zero(rounding == Rounding::Down),
        std::cmp::Ordering::Greater => Finite {
            negative,
            magnitude: m - n,
            exponent,
        },
        std::cmp::Ordering::Less => Finite {
            negative: other,
            magnitude: n - m,
            exponent,
        },
    }
}
