//! Random dims beside integers, and their text.

use super::*;
use crate::ir::attr::Attr;
use crate::testing::Rng;

#[test]
fn canonical_forms() {
    let n = Dim::symbol("n");
    assert_eq!(n.clone() + n.clone() - n.scale(2), Dim::constant(0));
    assert_eq!((n.scale(4) + 8.into()).floor_div(4), n.clone() + 2.into());
    assert_eq!(n.scale(6).exact_div(&n.scale(2)), Some(Dim::constant(3)));
    assert_eq!(n.product(&Dim::symbol("m")), Dim::symbol("m").product(&n));
    let (b, h) = (Dim::symbol("b"), Dim::symbol("h"));
    assert_eq!(
        b.product(&h.scale(8)).product(&n),
        n.product(&b).scale(2).product(&h).scale(4)
    );
    assert_eq!(
        b.product(&h.scale(8))
            .product(&n)
            .exact_div(&n.product(&h).scale(2)),
        Some(b.scale(4))
    );
    assert_eq!(
        (b.clone() + 1.into()).product(&h).exact_div(&h),
        Some(b.clone() + 1.into())
    );
    assert_eq!(b.product(&h).exact_div(&n), None);
    let half = (n.clone() + 1.into()).floor_div(2);
    assert_eq!(half.to_string(), "(n + 1)//2");
    assert_eq!(
        half.bind(&Bindings::from([("n".into(), 6)])),
        Dim::constant(3)
    );
}

/// An operation on integers.
type Arithmetic = fn(i64, i64) -> i64;

/// Random expressions, and sizes of their symbols.
struct Random {
    rng: Rng,
}

const NAMES: [&str; 4] = ["n", "m", "a dim", "loop.1"];

impl Random {
    fn dim(&mut self, depth: usize) -> Dim {
        if depth == 0 {
            return match self.rng.below(3) {
                0 => Dim::constant(self.rng.below(13) as i64 - 6),
                _ => Dim::symbol(NAMES[self.rng.below(NAMES.len())]),
            };
        }
        let next = |r: &mut Random| {
            let shallower = r.rng.below(depth);
            r.dim(shallower)
        };
        match self.rng.below(9) {
            0 | 1 => next(self) + next(self),
            2 => next(self) - next(self),
            3 => next(self).scale(self.rng.below(9) as i64 - 4),
            4 => next(self).floor_div(1 + self.rng.below(6) as i64),
            5 => next(self).product(&next(self)),
            6 => next(self).least(&next(self)),
            7 => next(self).greatest(&next(self)),
            _ => {
                let d = next(self);
                d.least(&next(self)).least(&next(self))
            }
        }
    }

    fn sizes(&mut self) -> Bindings {
        let of = |rng: &mut Rng| [0, 1, 2, rng.below(9), rng.below(100), 1 << 20][rng.below(6)];
        let sizes = NAMES.map(|name| (name.to_owned(), of(&mut self.rng)));
        sizes.into()
    }
}

#[test]
fn text_parses_back_to_the_same_dim() {
    let mut random = Random { rng: Rng(1) };
    for i in 0..10_000 {
        let d = random.dim(1 + i % 6);
        let text = d.to_string();
        assert_eq!(Dim::parse(&text), Some(d), "{text}");
    }
}

#[test]
fn arithmetic_is_that_of_integers_and_bounds_hold() {
    let mut random = Random { rng: Rng(2) };
    let value = |d: &Dim, sizes: &Bindings| d.bind(sizes).as_const();
    let mut n_bounds = 0;
    for i in 0..1_500 {
        let (a, b) = (random.dim(1 + i % 4), random.dim(1 + i % 3));
        let results: [(Dim, Arithmetic); 6] = [
            (a.clone() + b.clone(), |a, b| a + b),
            (a.clone() - b.clone(), |a, b| a - b),
            (a.product(&b), |a, b| a * b),
            (a.least(&b), i64::min),
            (a.greatest(&b), i64::max),
            (a.floor_div(3), |a, _| a.div_euclid(3)),
        ];
        let bounds = results.each_ref().map(|(d, _)| {
            let ranges = Ranges::new();
            (d.lower_bound(&ranges), d.upper_bound(&ranges))
        });
        n_bounds += bounds.iter().filter(|(low, _)| low.is_some()).count();
        for _ in 0..6 {
            let sizes = random.sizes();
            let (Some(x), Some(y)) = (value(&a, &sizes), value(&b, &sizes)) else {
                continue;
            };
            if x.abs().max(y.abs()) > 1 << 30 {
                continue;
            }
            for (i, (d, f)) in results.iter().enumerate() {
                let found = value(d, &sizes);
                assert_eq!(found, Some(f(x, y)), "{i}: {a} and {b}: {d} at {sizes:?}");
                // Symbols that are bound one by one lead to the same.
                let parts = sizes.iter().map(|(k, v)| Bindings::from([(k.clone(), *v)]));
                let bound = parts.fold(d.clone(), |d, part| d.bind(&part));
                assert_eq!(bound.as_const(), found, "{d} at {sizes:?}");
                let (low, high) = bounds[i];
                let holds =
                    low.is_none_or(|low| low <= f(x, y)) && high.is_none_or(|h| h >= f(x, y));
                assert!(holds, "{d} at {sizes:?}: {low:?} to {high:?}");
            }
        }
    }
    assert!(n_bounds > 1_000, "{n_bounds}");
}

#[test]
fn extremes_are_folded_by_what_is_known() {
    let parsed = |text: &str| Dim::parse(text).unwrap();
    let check = |text: &str, expected: &str| assert_eq!(parsed(text).to_string(), expected);
    check("max(n, 0)", "n");
    check("min(n, n + m)", "n");
    check("min(n, 9223372036854775807)", "n");
    check("max(n + -100, 0)", "max(100, n) + -100");
    check("min(2*n, 4)", "2*min(2, n)");
    check("min(-1*n, -2)", "-1*max(2, n)");
    check("max(min(n, 5), 0)", "min(5, n)");
    check("min(max(n + -3, 0), n)", "max(3, n) + -3");
    check("min(n + -1*((n)//2), n)", "n + -1*((n)//2)");
    check("max(n + -2*((n)//2), 1)", "1");
    check("min(min(n, m) + 1, 3)", "min(2, m, n) + 1");
    check("2*(n)//2", "n");
    check("-1*n//2", "-1*n + (n)//2");
    let n = Dim::symbol("n");
    let ranges = Ranges::from([("n".to_owned(), DimRange { min: 8, max: 64 })]);
    assert_eq!(n.least_within(&8.into(), &ranges), 8.into());
    assert_eq!(n.greatest_within(&64.into(), &ranges), 64.into());
    assert_eq!(n.least_within(&9.into(), &ranges).to_string(), "min(9, n)");
}

/// Dims of depth 200, each level with two parts of the level before, whose text would have 2^200 atoms.
#[test]
fn deep_dims_take_time_in_their_different_parts() {
    let mut rng = Rng(3);
    let sizes = NAMES.map(|name| (name.to_owned(), 1 + rng.below(1000)));
    let sizes = Bindings::from(sizes);
    let some = Bindings::from([("n".to_owned(), sizes["n"])]);
    for _ in 0..5 {
        let names = NAMES.map(|name| (Dim::symbol(name), sizes[name] as i64));
        let (mut d, mut value) = names[0].clone();
        for level in 0..200 {
            let (symbol, size) = &names[rng.below(4)];
            let k = rng.below(9) as i64;
            let (other, o) = (symbol.clone() + k.into(), size + k);
            let third = |v: i64| v.div_euclid(3);
            (d, value) = match rng.below(5) {
                0 => (
                    d.least(&(d.clone() + other).floor_div(2)),
                    value.min((value + o).div_euclid(2)),
                ),
                1 => (
                    d.greatest(&(other.scale(2) - d.clone())),
                    value.max(2 * o - value),
                ),
                2 => (
                    d.floor_div(2) + (d.clone() - other).floor_div(3),
                    value.div_euclid(2) + third(value - o),
                ),
                3 => (
                    d.floor_div(2) + d.least(&other).floor_div(3),
                    value.div_euclid(2) + third(value.min(o)),
                ),
                _ => (
                    d.clone() - d.greatest(&other).floor_div(3),
                    value - third(value.max(o)),
                ),
            };
            if level % 40 == 39 {
                assert_eq!(d.bind(&sizes).as_const(), Some(value), "{d}");
                assert_eq!(d.bind(&some).bind(&sizes).as_const(), Some(value), "{d}");
            }
        }
        assert!(d.has_summary());
        let ranges = Ranges::new();
        let (low, high) = (d.lower_bound(&ranges), d.upper_bound(&ranges));
        assert!(low.is_none_or(|low| low <= value), "{low:?} {value}");
        assert!(high.is_none_or(|high| high >= value), "{value} {high:?}");
        assert_eq!(d.clone() - d.clone(), Dim::constant(0));
        assert!(d.to_string().len() < 100, "{d}");
    }
}
