//! Dimensions: constants, symbols, and affine expressions over them.
//!
//! A [`Dim`] is `c + k1*a1 + ... + kn*an` where each atom is a symbol, a floor division of a dim by a constant, a
//! product of two symbolic dims, or the least or greatest of several dims. The form is canonical (atoms sorted, no zero
//! coefficient), so equality is structural.

mod bounds;
mod extremes;
mod interned;
#[cfg(test)]
mod tests;
mod text;

pub use bounds::Ranges;

use extremes::Kind;
use interned::Interned;
use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap};
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
    terms: Vec<(Interned, i64)>,
}

/// Atoms beyond which an expression has no text: nobody would read it.
const MAX_TEXT_ATOMS: u32 = 4096;

/// Deepest nesting of atoms in an extent: walks recurse into it.
const MAX_DEPTH: u32 = 250;

/// Atoms up to which walks do not remember parts.
const FEW_ATOMS: u32 = 16;

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
        Dim::unit(Interned::new(atom))
    }

    fn unit(atom: Interned) -> Dim {
        Dim {
            constant: 0,
            terms: vec![(atom, 1)],
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
    fn monomial(mut factors: Vec<Interned>) -> Dim {
        factors.sort_unstable();
        let mut product = factors.pop().map_or(Dim::constant(1), Dim::unit);
        while let Some(f) = factors.pop() {
            product = Dim::atom(Atom::Mul(Dim::unit(f), product));
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
    fn over_monomial(&self, divisor: &[Interned], k: i64) -> Option<Dim> {
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
        let mut evaluation = Evaluation::of(bindings);
        match evaluation.value(self) {
            Some(value) => Dim::constant(value),
            None => evaluation.bind(self),
        }
    }

    /// Calls `f` with the name of every symbol in the expression, with some more than once.
    pub fn visit_symbols(&self, f: &mut dyn FnMut(&str)) {
        let all = self.terms.iter().flat_map(|(atom, _)| atom.symbols());
        all.for_each(|name| f(name));
    }

    /// True when the least or the greatest of several dims is a part of it.
    pub fn has_extreme(&self) -> bool {
        self.terms.iter().any(|(atom, _)| atom.has_extreme())
    }

    /// Number of atoms in its text.
    pub fn n_atoms(&self) -> usize {
        let n_atoms = |sum: u32, atom: &Interned| sum.saturating_add(atom.n_atoms());
        self.terms
            .iter()
            .fold(0, |sum, (atom, _)| n_atoms(sum, atom)) as usize
    }

    /// True for an expression whose text would be too long to read: a summary stands for it.
    pub fn has_summary(&self) -> bool {
        self.n_atoms() > MAX_TEXT_ATOMS as usize
    }

    /// True for an expression that is too deeply nested to be an extent.
    pub fn is_too_deep(&self) -> bool {
        let is_deep = |(atom, _): &(Interned, i64)| atom.depth() > MAX_DEPTH;
        self.terms.iter().any(is_deep)
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

impl Interned {
    /// The atoms of a product; the atom itself otherwise.
    fn factors(&self) -> Vec<Interned> {
        let one = |d: &Dim| match (d.constant, d.terms.as_slice()) {
            (0, [(atom, 1)]) => Some(atom.factors()),
            _ => None,
        };
        match &**self {
            Atom::Mul(a, b) => match (one(a), one(b)) {
                (Some(a), Some(b)) => [a, b].concat(),
                _ => vec![self.clone()],
            },
            _ => vec![self.clone()],
        }
    }
}

/// Dims at some values of their symbols.
struct Evaluation<'b> {
    bindings: &'b Bindings,
    /// Results for atoms of more than [`FEW_ATOMS`].
    values: HashMap<Interned, Option<i64>>,
    bound: HashMap<Interned, Dim>,
}

impl Evaluation<'_> {
    fn of(bindings: &Bindings) -> Evaluation<'_> {
        Evaluation {
            bindings,
            values: HashMap::new(),
            bound: HashMap::new(),
        }
    }

    /// The value, when all symbols are bound and it is in the range of `i64`.
    fn value(&mut self, d: &Dim) -> Option<i64> {
        let mut sum = d.constant;
        for (atom, k) in &d.terms {
            sum = sum.checked_add(self.value_of_atom(atom)?.checked_mul(*k)?)?;
        }
        Some(sum)
    }

    fn value_of_atom(&mut self, atom: &Interned) -> Option<i64> {
        if let Some(known) = self.values.get(atom) {
            return *known;
        }
        let value = self.new_value(atom);
        if atom.n_atoms() > FEW_ATOMS {
            self.values.insert(atom.clone(), value);
        }
        value
    }

    fn new_value(&mut self, atom: &Atom) -> Option<i64> {
        let mut values =
            |all: &[Dim]| -> Option<Vec<i64>> { all.iter().map(|d| self.value(d)).collect() };
        match atom {
            Atom::Symbol(s) => i64::try_from(*self.bindings.get(&**s)?).ok(),
            Atom::FloorDiv(d, c) => Some(self.value(d)?.div_euclid(*c)),
            Atom::Mul(a, b) => self.value(a)?.checked_mul(self.value(b)?),
            Atom::Min(all) => values(all)?.into_iter().min(),
            Atom::Max(all) => values(all)?.into_iter().max(),
        }
    }

    /// The dim with the values of symbols that are bound.
    fn bind(&mut self, d: &Dim) -> Dim {
        let mut out = Dim::constant(d.constant);
        for (atom, k) in &d.terms {
            out = out + self.bind_atom(atom).scale(*k);
        }
        out
    }

    fn bind_atom(&mut self, atom: &Interned) -> Dim {
        if let Some(known) = self.bound.get(atom) {
            return known.clone();
        }
        let dim = self.new_bound(atom);
        if atom.n_atoms() > FEW_ATOMS {
            self.bound.insert(atom.clone(), dim.clone());
        }
        dim
    }

    fn new_bound(&mut self, atom: &Interned) -> Dim {
        if let Some(value) = self.value_of_atom(atom) {
            return Dim::constant(value);
        }
        let mut bound = |all: &[Dim]| all.iter().map(|d| self.bind(d)).collect();
        match &**atom {
            Atom::Symbol(s) => match self.bindings.get(&**s) {
                Some(&v) => Dim::constant(v as i64),
                None => Dim::unit(atom.clone()),
            },
            Atom::FloorDiv(d, c) => self.bind(d).floor_div(*c),
            Atom::Mul(a, b) => self.bind(a).product(&self.bind(b)),
            Atom::Min(all) => Dim::extreme(Kind::Min, bound(all)),
            Atom::Max(all) => Dim::extreme(Kind::Max, bound(all)),
        }
    }
}

/// The sum of two sorted lists of terms by an addition of coefficients; `None` where that gives `None`.
fn merged(
    a: Vec<(Interned, i64)>,
    b: Vec<(Interned, i64)>,
    add: impl Fn(i64, i64) -> Option<i64>,
) -> Option<Vec<(Interned, i64)>> {
    let mut terms = Vec::with_capacity(a.len() + b.len());
    let (mut a, mut b) = (a.into_iter().peekable(), b.into_iter().peekable());
    loop {
        let order = match (a.peek(), b.peek()) {
            (Some((x, _)), Some((y, _))) => x.cmp(y),
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (None, None) => return Some(terms),
        };
        match order {
            Ordering::Less => terms.extend(a.next()),
            Ordering::Greater => terms.extend(b.next()),
            Ordering::Equal => {
                let both = a.next().zip(b.next());
                if let Some(((atom, j), (_, k))) = both {
                    let sum = add(j, k)?;
                    terms.extend((sum != 0).then_some((atom, sum)));
                }
            }
        }
    }
}

impl std::ops::Add for Dim {
    type Output = Dim;
    fn add(self, other: Dim) -> Dim {
        let constant = self.constant.saturating_add(other.constant);
        let sum = |j: i64, k: i64| Some(j.saturating_add(k));
        let terms = merged(self.terms, other.terms, sum).expect("a sum always has a value");
        Dim { constant, terms }
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
