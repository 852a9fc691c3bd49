//! Dimensions: constants, symbols, and affine expressions over them.
//!
//! A [`Dim`] is `c + k1*a1 + ... + kn*an` where each atom is a symbol, a floor division of a dim by a constant, a
//! product of two symbolic dims, or the least or greatest of several dims. The form is canonical (atoms sorted, no zero
//! coefficient), so equality is structural.

mod bounds;
mod extremes;
#[cfg(test)]
mod tests;
mod text;

pub use bounds::Ranges;

use extremes::Kind;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// An atom of a dimension expression.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Atom {
    /// A named extent, e.g. `batch`.
    Symbol(Arc<str>),
    /// `floor(dim / divisor)`, divisor > 1.
    FloorDiv(Dim, i64),
    /// Product of atoms, the least first and the product of the others second; or of two dims too large to multiply out, the lesser first.
    Mul(Dim, Dim),
    /// The least of two dims or more, none of which is known never to be it; made by [`Dim::least`].
    Min(Vec<Dim>),
    /// The greatest, likewise; made by [`Dim::greatest`].
    Max(Vec<Dim>),
}

/// A dimension, or any integer computed from dimensions. Negative values are possible in intermediate expressions only.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Dim {
    constant: i64,
    terms: Vec<(Box<Atom>, i64)>,
}

/// Terms of a product beyond which it is not multiplied out.
const MAX_TERMS: usize = 64;

/// Largest size of a dim: no tensor may have more bytes than this.
pub const MAX_DIM_SIZE: usize = 1 << 40;

/// Sizes that a symbolic dim may have, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DimRange {
    /// The least.
    pub min: usize,
    /// The greatest: where a size has to be chosen, for random inputs and for plans, it is this one.
    pub max: usize,
}

impl DimRange {
    /// True when a size is in the range.
    pub fn contains(self, size: usize) -> bool {
        (self.min..=self.max).contains(&size)
    }
}

impl fmt::Display for DimRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.min, self.max)
    }
}

/// Values of symbols.
pub type Bindings = BTreeMap<String, usize>;

impl Dim {
    /// A constant.
    pub const fn constant(value: i64) -> Dim {
        Dim {
            constant: value,
            terms: Vec::new(),
        }
    }

    /// A symbol.
    pub fn symbol(name: &str) -> Dim {
        Dim::atom(Atom::Symbol(name.into()))
    }

    fn atom(atom: Atom) -> Dim {
        Dim {
            constant: 0,
            terms: vec![(Box::new(atom), 1)],
        }
    }

    /// The value, when it does not depend on a symbol.
    pub fn as_const(&self) -> Option<i64> {
        self.terms.is_empty().then_some(self.constant)
    }

    /// The value as an extent, when it is constant and not negative.
    pub fn as_usize(&self) -> Option<usize> {
        self.as_const().and_then(|c| usize::try_from(c).ok())
    }

    /// True for the constant `value`.
    pub fn is(&self, value: i64) -> bool {
        self.as_const() == Some(value)
    }

    /// `self * factor`. Saturates on overflow, which later size checks refuse.
    pub fn scale(&self, factor: i64) -> Dim {
        if factor == 0 {
            return Dim::constant(0);
        }
        Dim {
            constant: self.constant.saturating_mul(factor),
            terms: self
                .terms
                .iter()
                .map(|(a, k)| (a.clone(), k.saturating_mul(factor)))
                .collect(),
        }
    }

    /// Product, as a sum of products of atoms; stays affine when either side is constant.
    pub fn product(&self, other: &Dim) -> Dim {
        match (self.as_const(), other.as_const()) {
            (Some(c), _) => return other.scale(c),
            (_, Some(c)) => return self.scale(c),
            _ => {}
        }
        if (self.terms.len() + 1) * (other.terms.len() + 1) > MAX_TERMS {
            let (a, b) = if self <= other {
                (self, other)
            } else {
                (other, self)
            };
            return Dim::atom(Atom::Mul(a.clone(), b.clone()));
        }
        let mut out = self.scale(other.constant) + other.without_constant().scale(self.constant);
        for (a, j) in &self.terms {
            for (b, k) in &other.terms {
                let factors = [a.factors(), b.factors()].concat();
                out = out + Dim::monomial(factors).scale(j.saturating_mul(*k));
            }
        }
        out
    }

    fn without_constant(&self) -> Dim {
        Dim {
            constant: 0,
            terms: self.terms.clone(),
        }
    }

    /// The product of atoms, sorted so that equal products are equal dims.
    fn monomial(mut factors: Vec<Atom>) -> Dim {
        factors.sort_unstable();
        let mut product = factors.pop().map_or(Dim::constant(1), Dim::atom);
        while let Some(f) = factors.pop() {
            product = Dim::atom(Atom::Mul(Dim::atom(f), product));
        }
        product
    }

    /// Constant part, and the atoms with their factors.
    pub fn parts(&self) -> (i64, impl Iterator<Item = (&Atom, i64)>) {
        (self.constant, self.terms.iter().map(|(a, k)| (&**a, *k)))
    }

    /// `floor(self / divisor)` for a positive divisor.
    pub fn floor_div(&self, divisor: i64) -> Dim {
        debug_assert!(divisor > 0, "floor division by a positive constant only");
        if divisor == 1 {
            return self.clone();
        }
        if let Some(c) = self.as_const() {
            return Dim::constant(c.div_euclid(divisor));
        }
        let whole = self.map_numbers(|k| k.div_euclid(divisor));
        let rest = self.map_numbers(|k| k.rem_euclid(divisor));
        match rest.as_const() {
            Some(_) => whole,
            None => whole + Dim::atom(Atom::FloorDiv(rest, divisor)),
        }
    }

    fn map_numbers(&self, f: impl Fn(i64) -> i64) -> Dim {
        let terms = self.terms.iter().map(|(a, k)| (a.clone(), f(*k)));
        Dim {
            constant: f(self.constant),
            terms: terms.filter(|(_, k)| *k != 0).collect(),
        }
    }

    /// `ceil(self / divisor)` for a positive divisor.
    pub fn ceil_div(&self, divisor: i64) -> Dim {
        (self.clone() + Dim::constant(divisor - 1)).floor_div(divisor)
    }

    /// Exact quotient of two dims when it can be seen: both constant, or one a multiple of the other.
    pub fn exact_div(&self, other: &Dim) -> Option<Dim> {
        if self == other {
            return Some(Dim::constant(1));
        }
        if let Some(c) = other.as_const() {
            let exact =
                c > 0 && self.constant % c == 0 && self.terms.iter().all(|(_, k)| k % c == 0);
            return exact.then(|| self.floor_div(c));
        }
        if let (0, [(atom, k)]) = (other.constant, other.terms.as_slice())
            && let Some(q) = self.over_monomial(&atom.factors(), *k)
        {
            return Some(q);
        }
        // k * other for a constant k.
        let (_, k_other) = other.terms.first()?;
        let (_, k_self) = self.terms.first()?;
        let k = k_self / k_other;
        (k != 0 && other.scale(k) == *self).then(|| Dim::constant(k))
    }

    /// The quotient by `k` times a product of atoms that every term contains.
    fn over_monomial(&self, divisor: &[Atom], k: i64) -> Option<Dim> {
        let mut out = Dim::constant(0);
        for (atom, c) in &self.terms {
            let mut factors = atom.factors();
            for d in divisor {
                factors.remove(factors.iter().position(|f| f == d)?);
            }
            out = out + Dim::monomial(factors).scale((c % k == 0).then(|| c / k)?);
        }
        (self.constant == 0).then_some(out)
    }

    /// Replaces bound symbols by their values.
    pub fn bind(&self, bindings: &Bindings) -> Dim {
        if let Some(value) = self.value(bindings) {
            return Dim::constant(value);
        }
        let mut out = Dim::constant(self.constant);
        for (atom, k) in &self.terms {
            let value = match &**atom {
                Atom::Symbol(s) => match bindings.get(&**s) {
                    Some(&v) => Dim::constant(v as i64),
                    None => Dim::symbol(s),
                },
                Atom::FloorDiv(d, c) => d.bind(bindings).floor_div(*c),
                Atom::Mul(a, b) => a.bind(bindings).product(&b.bind(bindings)),
                Atom::Min(all) => {
                    Dim::extreme(Kind::Min, all.iter().map(|d| d.bind(bindings)).collect())
                }
                Atom::Max(all) => {
                    Dim::extreme(Kind::Max, all.iter().map(|d| d.bind(bindings)).collect())
                }
            };
            out = out + value.scale(*k);
        }
        out
    }

    /// The value, when all symbols are bound and it is in the range of `i64`.
    fn value(&self, bindings: &Bindings) -> Option<i64> {
        let mut sum = self.constant;
        for (atom, k) in &self.terms {
            let value = match &**atom {
                Atom::Symbol(s) => i64::try_from(*bindings.get(&**s)?).ok()?,
                Atom::FloorDiv(d, c) => d.value(bindings)?.div_euclid(*c),
                Atom::Mul(a, b) => a.value(bindings)?.checked_mul(b.value(bindings)?)?,
                Atom::Min(all) => values(all, bindings)?.into_iter().min()?,
                Atom::Max(all) => values(all, bindings)?.into_iter().max()?,
            };
            sum = sum.checked_add(value.checked_mul(*k)?)?;
        }
        Some(sum)
    }

    /// Calls `f` with the name of every symbol in the expression.
    pub fn visit_symbols(&self, f: &mut dyn FnMut(&str)) {
        for (atom, _) in &self.terms {
            match &**atom {
                Atom::Symbol(s) => f(s),
                Atom::FloorDiv(d, _) => d.visit_symbols(f),
                Atom::Mul(a, b) => {
                    a.visit_symbols(f);
                    b.visit_symbols(f);
                }
                Atom::Min(all) | Atom::Max(all) => all.iter().for_each(|d| d.visit_symbols(f)),
            }
        }
    }

    /// True when the least or the greatest of several dims is a part of it.
    pub fn has_extreme(&self) -> bool {
        self.terms.iter().any(|(atom, _)| match &**atom {
            Atom::Symbol(_) => false,
            Atom::FloorDiv(d, _) => d.has_extreme(),
            Atom::Mul(a, b) => a.has_extreme() || b.has_extreme(),
            Atom::Min(_) | Atom::Max(_) => true,
        })
    }

    /// The symbol's name when the dim is just one symbol.
    pub fn as_symbol(&self) -> Option<&str> {
        match (self.constant, self.terms.as_slice()) {
            (0, [(atom, 1)]) => match &**atom {
                Atom::Symbol(s) => Some(s),
                _ => None,
            },
            _ => None,
        }
    }
}

impl Atom {
    /// The atoms of a product; the atom itself otherwise.
    fn factors(&self) -> Vec<Atom> {
        let one = |d: &Dim| match (d.constant, d.terms.as_slice()) {
            (0, [(atom, 1)]) => Some(atom.factors()),
            _ => None,
        };
        match self {
            Atom::Mul(a, b) => match (one(a), one(b)) {
                (Some(a), Some(b)) => [a, b].concat(),
                _ => vec![self.clone()],
            },
            _ => vec![self.clone()],
        }
    }
}

impl std::ops::Add for Dim {
    type Output = Dim;
    fn add(self, other: Dim) -> Dim {
        let mut sum: BTreeMap<Box<Atom>, i64> = self.terms.into_iter().collect();
        for (atom, k) in other.terms {
            let entry = sum.entry(atom).or_insert(0);
            *entry = entry.saturating_add(k);
        }
        let terms = sum.into_iter().filter(|(_, k)| *k != 0).collect();
        Dim {
            constant: self.constant.saturating_add(other.constant),
            terms,
        }
    }
}

impl std::ops::Sub for Dim {
    type Output = Dim;
    fn sub(self, other: Dim) -> Dim {
        self + other.scale(-1)
    }
}

impl From<&Dim> for Dim {
    fn from(d: &Dim) -> Dim {
        d.clone()
    }
}
impl From<usize> for Dim {
    fn from(value: usize) -> Dim {
        Dim::constant(i64::try_from(value).unwrap_or(i64::MAX))
    }
}

impl From<i64> for Dim {
    fn from(value: i64) -> Dim {
        Dim::constant(value)
    }
}

impl From<i32> for Dim {
    fn from(value: i32) -> Dim {
        Dim::constant(value.into())
    }
}

impl From<&str> for Dim {
    fn from(name: &str) -> Dim {
        Dim::symbol(name)
    }
}

/// The values of several dims.
fn values(dims: &[Dim], bindings: &Bindings) -> Option<Vec<i64>> {
    dims.iter().map(|d| d.value(bindings)).collect()
}
