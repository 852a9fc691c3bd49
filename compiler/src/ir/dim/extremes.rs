//! The least and the greatest of several dims.

use super::interned::Interned;
use super::{Atom, Dim, Ranges};
use std::cmp::{Ordering, Reverse};

/// Coefficients up to here may be shifted and negated without overflow.
const MAX_SHIFTED: u64 = 1 << 61;

/// Operands beyond which an extreme of extremes stays nested: each is compared with all others.
const MAX_OPERANDS: usize = 32;

/// Atoms in the difference of two operands beyond which no bound of it is looked for.
const MAX_SEARCHED: usize = 1024;

impl Dim {
    /// The least of two dims.
    pub fn least(&self, other: &Dim) -> Dim {
        self.least_within(other, &Ranges::new())
    }

    /// The greatest of two dims.
    pub fn greatest(&self, other: &Dim) -> Dim {
        self.greatest_within(other, &Ranges::new())
    }

    /// The least of two dims whose symbols have these ranges.
    pub fn least_within(&self, other: &Dim, ranges: &Ranges) -> Dim {
        Extreme::of(Kind::Min, vec![self.clone(), other.clone()]).normalised(ranges)
    }

    /// The greatest of two dims whose symbols have these ranges.
    pub fn greatest_within(&self, other: &Dim, ranges: &Ranges) -> Dim {
        Extreme::of(Kind::Max, vec![self.clone(), other.clone()]).normalised(ranges)
    }

    /// `self` between `low` and `high`, which is `low` where they cross.
    pub fn clamp_within(&self, low: &Dim, high: &Dim, ranges: &Ranges) -> Dim {
        self.least_within(high, ranges).greatest_within(low, ranges)
    }

    pub(super) fn extreme(kind: Kind, operands: Vec<Dim>) -> Dim {
        Extreme::of(kind, operands).normalised(&Ranges::new())
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Min,
    Max,
}

/// `scale` times the extreme of the operands, plus `offset`.
struct Extreme {
    kind: Kind,
    operands: Vec<Dim>,
    scale: i64,
    offset: i64,
}

impl Extreme {
    fn of(kind: Kind, operands: Vec<Dim>) -> Extreme {
        Extreme {
            kind,
            operands,
            scale: 1,
            offset: 0,
        }
    }

    /// As a dim: operands that never decide are left out, a common constant and a common factor stand
    /// outside, and the first operand that is no constant begins with a positive coefficient.
    fn normalised(mut self, ranges: &Ranges) -> Dim {
        loop {
            self.flatten();
            self.prune(ranges);
            if let [only] = &self.operands[..] {
                return only.scale(self.scale) + Dim::constant(self.offset);
            }
            if !self.step() {
                break;
            }
        }
        let atom = match self.kind {
            Kind::Min => Atom::Min(self.operands),
            Kind::Max => Atom::Max(self.operands),
        };
        Dim::atom(atom).scale(self.scale) + Dim::constant(self.offset)
    }

    /// Operands of an operand of the same kind become operands.
    fn flatten(&mut self) {
        let counts = self.operands.iter();
        let counts = counts.map(|d| inner(d, self.kind).map_or(1, <[Dim]>::len));
        let are_few = counts.sum::<usize>() <= MAX_OPERANDS;
        let mut flat = Vec::new();
        for d in std::mem::take(&mut self.operands) {
            match (inner(&d, self.kind).filter(|_| are_few), d.constant) {
                (Some(inner), c) if inner.iter().all(|d| d.is_small()) && is_small(c) => {
                    flat.extend(inner.iter().map(|d| d.clone() + Dim::constant(c)));
                }
                _ => flat.push(d),
            }
        }
        flat.sort_unstable_by(order);
        flat.dedup();
        self.operands = flat;
    }

    /// Drops operands that another one is never behind.
    fn prune(&mut self, ranges: &Ranges) {
        let mut i = 0;
        while i < self.operands.len() {
            let d = &self.operands[i];
            let mut others = self.operands.iter().enumerate().filter(|(j, _)| *j != i);
            match others.any(|(_, other)| is_behind(self.kind, d, other, ranges)) {
                true => drop(self.operands.remove(i)),
                false => i += 1,
            }
        }
    }

    /// One step of normalisation; false when there is none left.
    fn step(&mut self) -> bool {
        let small = self.operands.iter().all(Dim::is_small);
        if !small || !is_small(self.scale) || !is_small(self.offset) {
            return false;
        }
        let pivot = self.operands.iter().filter(|d| !d.terms.is_empty());
        let Some(pivot) = pivot.min_by(|a, b| pivot_order(a, b)) else {
            return false;
        };
        let (c, is_negative) = (pivot.constant, pivot.terms[0].1 < 0);
        let shifted = c.checked_mul(self.scale);
        let shifted = shifted.and_then(|c| self.offset.checked_add(c));
        if let Some(offset) = shifted.filter(|_| c != 0) {
            self.map(|d| d.clone() + Dim::constant(-c));
            self.offset = offset;
            return true;
        }
        let factor = self.operands.iter().fold(0, |g, d| gcd(g, d.content()));
        let scaled = i64::try_from(factor).ok();
        let scaled = scaled.and_then(|f| Some((f, self.scale.checked_mul(f)?)));
        if let Some((factor, scale)) = scaled.filter(|_| factor > 1) {
            self.map(|d| d.divided(factor));
            self.scale = scale;
            return true;
        }
        if is_negative {
            self.map(|d| d.scale(-1));
            self.scale = -self.scale;
            self.kind = match self.kind {
                Kind::Min => Kind::Max,
                Kind::Max => Kind::Min,
            };
        }
        is_negative
    }

    fn map(&mut self, f: impl Fn(&Dim) -> Dim) {
        self.operands.iter_mut().for_each(|d| *d = f(d));
    }
}

/// The operands of a dim that is an extreme of this kind plus a constant.
fn inner(d: &Dim, kind: Kind) -> Option<&[Dim]> {
    match (&d.terms[..], kind) {
        ([(atom, 1)], Kind::Min) => match &**atom {
            Atom::Min(operands) => Some(operands),
            _ => None,
        },
        ([(atom, 1)], Kind::Max) => match &**atom {
            Atom::Max(operands) => Some(operands),
            _ => None,
        },
        _ => None,
    }
}

/// True when `d` never decides beside `other`.
fn is_behind(kind: Kind, d: &Dim, other: &Dim, ranges: &Ranges) -> bool {
    if !d.is_small() || !other.is_small() {
        return match (d.as_const(), other.as_const(), kind) {
            (Some(a), Some(b), Kind::Min) => a >= b,
            (Some(a), Some(b), Kind::Max) => a <= b,
            (Some(a), None, Kind::Min) => other.is_at_most(a, ranges),
            (Some(a), None, Kind::Max) => other.is_at_least(a, ranges),
            (None, Some(b), Kind::Min) => d.is_at_least(b, ranges),
            (None, Some(b), Kind::Max) => d.is_at_most(b, ranges),
            (None, None, _) => false,
        };
    }
    let excess = match kind {
        Kind::Min => d.clone() - other.clone(),
        Kind::Max => other.clone() - d.clone(),
    };
    match excess.n_atoms() > MAX_SEARCHED {
        true => excess.as_const().is_some_and(|c| c >= 0),
        false => excess.is_at_least(0, ranges),
    }
}

fn is_small(k: i64) -> bool {
    k.unsigned_abs() < MAX_SHIFTED
}

/// By atoms, then by coefficients: a shift does not change it.
fn order(a: &Dim, b: &Dim) -> Ordering {
    (&a.terms, a.constant).cmp(&(&b.terms, b.constant))
}

/// The same for a dim and its negative, but that the positive one is first.
fn pivot_order(a: &Dim, b: &Dim) -> Ordering {
    let key = |d: &Dim| -> Vec<(Interned, u64)> {
        let terms = d.terms.iter();
        terms.map(|(a, k)| (a.clone(), k.unsigned_abs())).collect()
    };
    let last = |d: &Dim| (Reverse(d.terms[0].1), Reverse(d.constant));
    key(a).cmp(&key(b)).then_with(|| last(a).cmp(&last(b)))
}

impl Dim {
    fn is_small(&self) -> bool {
        is_small(self.constant) && self.terms.iter().all(|(_, k)| is_small(*k))
    }

    /// The greatest common divisor of all coefficients.
    fn content(&self) -> u64 {
        let constant = self.constant.unsigned_abs();
        let terms = self.terms.iter();
        terms.fold(constant, |g, (_, k)| gcd(g, k.unsigned_abs()))
    }

    /// The quotient by a divisor of all coefficients.
    fn divided(&self, divisor: i64) -> Dim {
        let terms = self.terms.iter().map(|(a, k)| (a.clone(), k / divisor));
        Dim {
            constant: self.constant / divisor,
            terms: terms.collect(),
        }
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    match b {
        0 => a,
        _ => gcd(b, a % b),
    }
}
