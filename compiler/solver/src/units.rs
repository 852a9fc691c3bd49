//! Quantities with units: nanoseconds and bytes, saturating, with an explicit infinity.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign};

macro_rules! quantity {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
        pub struct $name(pub u64);

        impl $name {
            /// Nothing.
            pub const ZERO: $name = $name(0);
            /// More than any finite amount; adding to it changes nothing.
            pub const INFINITY: $name = $name(u64::MAX);

            /// False for [`Self::INFINITY`].
            pub fn is_finite(self) -> bool {
                self != $name::INFINITY
            }

            /// `n` times as much; saturates.
            pub fn times(self, n: u64) -> $name {
                $name(self.0.saturating_mul(n))
            }

            /// The difference, at least zero. Infinity less anything finite stays infinite.
            pub fn saturating_sub(self, other: $name) -> $name {
                if self.is_finite() { $name(self.0.saturating_sub(other.0)) } else { self }
            }
        }

        impl Add for $name {
            type Output = $name;
            fn add(self, other: $name) -> $name {
                $name(self.0.saturating_add(other.0))
            }
        }

        impl AddAssign for $name {
            fn add_assign(&mut self, other: $name) {
                *self = *self + other;
            }
        }

        impl Sum for $name {
            fn sum<I: Iterator<Item = $name>>(iter: I) -> $name {
                iter.fold($name::ZERO, Add::add)
            }
        }
    };
}

quantity! {
    /// A duration in nanoseconds.
    Nanos
}
quantity! {
    /// A duration in picoseconds: alternatives are compared in these, since theirs may differ by
    /// less than a nanosecond.
    Picos
}
quantity! {
    /// An amount of memory in bytes.
    Bytes
}

impl Nanos {
    /// From seconds, rounded up, so that no work is free. Negative and NaN give zero.
    pub fn from_seconds(seconds: f64) -> Nanos {
        Nanos((seconds * 1e9).ceil() as u64)
    }
}

impl Picos {
    /// From seconds, rounded up, so that no work is free. Negative and NaN give zero.
    pub fn from_seconds(seconds: f64) -> Picos {
        Picos((seconds * 1e12).ceil() as u64)
    }

    /// In nanoseconds, rounded up; infinity stays infinite.
    pub fn nanos(self) -> Nanos {
        if self.is_finite() {
            Nanos(self.0.div_ceil(1000))
        } else {
            Nanos::INFINITY
        }
    }

    /// In seconds.
    pub fn seconds(self) -> f64 {
        self.0 as f64 / 1e12
    }
}

impl From<Nanos> for Picos {
    fn from(ns: Nanos) -> Picos {
        Picos(ns.0.saturating_mul(1000))
    }
}

impl fmt::Display for Nanos {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ns = self.0 as f64;
        match self.0 {
            u64::MAX => f.pad("inf"),
            0..1_000 => f.pad(&format!("{} ns", self.0)),
            1_000..1_000_000 => f.pad(&format!("{:.2} us", ns / 1e3)),
            1_000_000..1_000_000_000 => f.pad(&format!("{:.2} ms", ns / 1e6)),
            _ => f.pad(&format!("{:.2} s", ns / 1e9)),
        }
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0 as f64;
        match self.0 {
            u64::MAX => f.pad("inf"),
            0..1024 => f.pad(&format!("{} B", self.0)),
            1024..1_048_576 => f.pad(&format!("{:.1} KiB", bytes / 1024.0)),
            1_048_576..1_073_741_824 => f.pad(&format!("{:.1} MiB", bytes / 1_048_576.0)),
            _ => f.pad(&format!("{:.2} GiB", bytes / 1_073_741_824.0)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn infinity_absorbs() {
        assert_eq!(Nanos::INFINITY + Nanos(5), Nanos::INFINITY);
        assert_eq!(Nanos(u64::MAX - 1) + Nanos(5), Nanos::INFINITY);
        assert_eq!(Nanos::INFINITY.saturating_sub(Nanos(5)), Nanos::INFINITY);
        assert_eq!([Nanos(1), Nanos(2)].into_iter().sum::<Nanos>(), Nanos(3));
        assert_eq!(Nanos::from_seconds(1.5e-9), Nanos(2));
    }

    #[test]
    fn units_print_for_people() {
        let times = [
            Nanos(999),
            Nanos(1_500),
            Nanos(3_810_000),
            Nanos(2_000_000_000),
            Nanos::INFINITY,
        ];
        assert_eq!(
            times.map(|t| t.to_string()),
            ["999 ns", "1.50 us", "3.81 ms", "2.00 s", "inf"]
        );
        let sizes = [Bytes(64), Bytes(1536), Bytes(102_550_733), Bytes(3 << 30)];
        assert_eq!(
            sizes.map(|s| s.to_string()),
            ["64 B", "1.5 KiB", "97.8 MiB", "3.00 GiB"]
        );
    }
}
