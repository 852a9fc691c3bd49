//! Lower and upper bounds of dims, from the ranges of their symbols.
//!
//! Interval arithmetic alone cannot show that `n - n//2` is not negative, since both terms contain
//! `n`. So atoms that are not linear are replaced one by one: `min` and `max` by each of their
//! operands in turn, which is exact, and `d//c` by the rational bounds `(d - c + 1)/c` and `d/c`.
//! The rest is linear in symbols and products, and its coefficients have cancelled.

use super::interned::Interned;
use super::{Atom, Dim, DimRange, MAX_DIM_SIZE, merged};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};

/// Declared ranges of symbols. A symbol without one is an extent, from 0 to [`MAX_DIM_SIZE`]; one
/// whose name begins with a NUL is any integer.
pub type Ranges = BTreeMap<String, DimRange>;

/// Atoms that are replaced in one search for a bound; beyond, intervals have to do.
const MAX_REPLACED: usize = 64;

/// Atoms in the dims that have one replaced, in one search.
const MAX_REPLACED_ATOMS: usize = MAX_REPLACED * 256;

/// A bound; `None` when there is none.
type Bound = Option<i128>;

impl Dim {
    /// A lower bound for all values that symbols may have; `None` when none was found.
    pub fn lower_bound(&self, ranges: &Ranges) -> Option<i64> {
        let search = Search::new(self, ranges);
        search.lower(self).and_then(|b| i64::try_from(b).ok())
    }

    /// An upper bound for all values that symbols may have; `None` when none was found.
    pub fn upper_bound(&self, ranges: &Ranges) -> Option<i64> {
        let search = Search::new(self, ranges);
        search.upper(self).and_then(|b| i64::try_from(b).ok())
    }

    /// True when the dim is shown to be `limit` or more.
    pub fn is_at_least(&self, limit: i64, ranges: &Ranges) -> bool {
        self.lower_bound(ranges).is_some_and(|b| b >= limit)
    }

    /// True when the dim is shown to be `limit` or less.
    pub fn is_at_most(&self, limit: i64, ranges: &Ranges) -> bool {
        self.upper_bound(ranges).is_some_and(|b| b <= limit)
    }

    /// `self * factor + other`, unless a number leaves the range of `i64`.
    fn scaled_sum(&self, factor: i64, other: &Dim) -> Option<Dim> {
        let scaled = self.terms.iter();
        let scaled = scaled.map(|(atom, k)| Some((atom.clone(), k.checked_mul(factor)?)));
        let mut scaled = scaled.collect::<Option<Vec<_>>>()?;
        scaled.retain(|(_, k)| *k != 0);
        let constant = self.constant.checked_mul(factor)?;
        Some(Dim {
            constant: constant.checked_add(other.constant)?,
            terms: merged(scaled, other.terms.clone(), i64::checked_add)?,
        })
    }
}

/// A search for the bounds of one dim. It remembers those of its parts, so that each is looked at once.
struct Search<'r> {
    ranges: &'r Ranges,
    /// Atoms that may still be replaced.
    n_replaceable: Cell<usize>,
    of_atoms: RefCell<HashMap<Interned, [Bound; 2]>>,
}

impl Search<'_> {
    fn new<'r>(d: &Dim, ranges: &'r Ranges) -> Search<'r> {
        let n_replaceable = MAX_REPLACED_ATOMS / d.n_atoms().max(1);
        Search {
            ranges,
            n_replaceable: Cell::new(n_replaceable.min(MAX_REPLACED)),
            of_atoms: RefCell::default(),
        }
    }

    fn lower(&self, d: &Dim) -> Bound {
        higher(self.interval(d), self.by_replacement(d))
    }

    fn upper(&self, d: &Dim) -> Bound {
        let negative = d.scaled_sum(-1, &Dim::constant(0))?;
        self.lower(&negative)?.checked_neg()
    }

    /// The sum of the bounds of all terms.
    fn interval(&self, d: &Dim) -> Bound {
        let mut sum = i128::from(d.constant);
        for (atom, k) in &d.terms {
            let [low, high] = self.of_atom(atom);
            let bound = if *k > 0 { low? } else { high? };
            sum = sum.checked_add(bound.checked_mul(i128::from(*k))?)?;
        }
        Some(sum)
    }

    fn of_atom(&self, atom: &Interned) -> [Bound; 2] {
        if let Some(known) = self.of_atoms.borrow().get(atom) {
            return *known;
        }
        let found = self.new_bounds(atom);
        if atom.n_atoms() == 1 {
            return found;
        }
        self.of_atoms.borrow_mut().insert(atom.clone(), found);
        found
    }

    fn new_bounds(&self, atom: &Atom) -> [Bound; 2] {
        match atom {
            Atom::Symbol(name) if name.starts_with('\0') => [None, None],
            Atom::Symbol(name) => {
                let range = self.ranges.get(&**name);
                let [low, high] = range.map_or([0, MAX_DIM_SIZE], |r| [r.min, r.max]);
                [Some(low as i128), Some(high as i128)]
            }
            Atom::FloorDiv(d, c) => [self.lower(d), self.upper(d)]
                .map(|bound| bound.map(|b| b.div_euclid(i128::from(*c)))),
            Atom::Mul(a, b) => product(
                [self.lower(a), self.upper(a)],
                [self.lower(b), self.upper(b)],
            ),
            Atom::Min(operands) => [
                least(operands.iter().map(|d| self.lower(d))),
                operands.iter().filter_map(|d| self.upper(d)).min(),
            ],
            Atom::Max(operands) => [
                operands.iter().filter_map(|d| self.lower(d)).max(),
                least(operands.iter().map(|d| self.upper(d).map(|b| -b))).map(|b| -b),
            ],
        }
    }

    /// The bound with one atom that is not linear replaced; extremes first, as they are exact.
    fn by_replacement(&self, d: &Dim) -> Bound {
        let extreme = |a: &Atom| matches!(a, Atom::Min(_) | Atom::Max(_));
        let quotient = |a: &Atom| matches!(a, Atom::FloorDiv(..));
        let at = |which: &dyn Fn(&Atom) -> bool| d.terms.iter().position(|(a, _)| which(a));
        let at = at(&extreme).or_else(|| at(&quotient))?;
        let n_left = self.n_replaceable.get().checked_sub(1)?;
        self.n_replaceable.set(n_left);
        let mut rest = d.clone();
        let (atom, k) = rest.terms.remove(at);
        let with = |operand: &Dim| self.lower(&operand.scaled_sum(k, &rest)?);
        match &*atom {
            Atom::Min(operands) | Atom::Max(operands) => {
                // k * min(a, b) is the lesser of k*a and k*b when k is positive, else the greater.
                let is_lesser = matches!(&*atom, Atom::Min(_)) == (k > 0);
                match is_lesser {
                    true => least(operands.iter().map(with)),
                    false => operands.iter().filter_map(with).max(),
                }
            }
            Atom::FloorDiv(e, c) => {
                let low = if k > 0 { *c - 1 } else { 0 };
                let scaled = rest.scaled_sum(*c, &Dim::constant(0))?;
                let e = e.scaled_sum(1, &Dim::constant(low.checked_neg()?))?;
                let bound = self.lower(&e.scaled_sum(k, &scaled)?)?;
                // Rounded up: the dim is an integer.
                Some(-(-bound).div_euclid(i128::from(*c)))
            }
            Atom::Symbol(_) | Atom::Mul(..) => None,
        }
    }
}

fn higher(a: Bound, b: Bound) -> Bound {
    a.max(b)
}

/// The least bound; `None` when one is missing.
fn least(mut bounds: impl Iterator<Item = Bound>) -> Bound {
    let first = bounds.next()??;
    bounds.try_fold(first, |low, b| Some(low.min(b?)))
}

fn product(a: [Bound; 2], b: [Bound; 2]) -> [Bound; 2] {
    let all = || -> Option<[i128; 4]> {
        let ([a0, a1], [b0, b1]) = ([a[0]?, a[1]?], [b[0]?, b[1]?]);
        Some([
            a0.checked_mul(b0)?,
            a0.checked_mul(b1)?,
            a1.checked_mul(b0)?,
            a1.checked_mul(b1)?,
        ])
    };
    if let Some(all) = all() {
        return [all.iter().min().copied(), all.iter().max().copied()];
    }
    match (a[0], b[0]) {
        (Some(x), Some(y)) if x >= 0 && y >= 0 => [x.checked_mul(y), None],
        _ => [None, None],
    }
}
