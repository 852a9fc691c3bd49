//! Gradients of loops whose number of iterations is known: by a constant or by extents, numbered or not, nested, without iterations.

use super::branches::{choice, region};
use super::second_order::check_second;
use super::steps::{form, scan};
use super::*;
use crate::rng::Rng;

/// Results of a body for iteration number, condition, carried values and invariants: condition, carried values, elements of stacked results.
type Body<'a> = &'a dyn Fn(&mut GraphBuilder, &[ValueId]) -> Result<Vec<ValueId>>;

/// A loop over operands, the first of which are carried.
struct Repeat {
    count: ValueId,
    condition: ValueId,
    carried: usize,
    trip: Dim,
}

impl Repeat {
    fn times(b: &mut GraphBuilder, n: i64, carried: usize) -> Repeat {
        Repeat {
            count: b.constant(Tensor::scalar(n)),
            condition: b.constant(Tensor::scalar(true)),
            carried,
            trip: Dim::constant(n),
        }
    }

    fn over(self, b: &mut GraphBuilder, x: &[ValueId], body: Body) -> Result<Vec<ValueId>> {
        let operands = [&[self.count, self.condition], x].concat();
        let types: Vec<Type> = operands.iter().map(|&v| b.ty(v).clone()).collect();
        let (carried, trip) = (self.carried, self.trip);
        let body = region(&types, body)?;
        b.add_with_regions(Op::Loop { carried, trip }, &operands, vec![body])
    }
}

/// `h' = tanh(h w + i / 4)`, and `h' h`.
fn recurrence(b: &mut GraphBuilder, a: &[ValueId]) -> Result<Vec<ValueId>> {
    let [i, go, h, w] = a[..] else { unreachable!() };
    let (number, quarter) = (b.cast(i, DType::F64)?, b.scalar(DType::F64, 0.25));
    let shift = b.mul(number, quarter)?;
    let product = b.matmul(h, w)?;
    let sum = b.add_(product, shift)?;
    let next = b.map(ScalarOp::Tanh, &[sum])?;
    Ok(vec![go, next, b.mul(next, h)?])
}

fn recurrence_operands() -> [Operand; 2] {
    [reals(&[2, 3]), reals(&[3, 3])]
}

/// `v' = sin(v) w`, without a use of the number, with a condition of its own.
fn wave(b: &mut GraphBuilder, a: &[ValueId]) -> Result<Vec<ValueId>> {
    let go = b.constant(Tensor::scalar(true));
    let bent = b.map(ScalarOp::Sin, &[a[2]])?;
    Ok(vec![go, b.mul(bent, a[3])?])
}

fn wave_operands() -> [Operand; 2] {
    [reals(&[4]), reals(&[4])]
}

fn recurrent(n: i64) -> impl Fn(&mut GraphBuilder, &[ValueId]) -> Result<Vec<ValueId>> {
    move |b, x| Repeat::times(b, n, 1).over(b, x, &recurrence)
}

fn waves(b: &mut GraphBuilder, x: &[ValueId]) -> Result<Vec<ValueId>> {
    Repeat::times(b, 3, 1).over(b, x, &wave)
}

#[test]
fn constant_counts() {
    for n in [1, 4] {
        check("recurrence", &recurrence_operands(), &recurrent(n));
        check_second("recurrence", &recurrence_operands(), &recurrent(n));
    }
    check("wave", &wave_operands(), &waves);
    check_second("wave", &wave_operands(), &waves);
}

#[test]
fn no_iterations() {
    check("none", &recurrence_operands(), &recurrent(0));
    check_second("none", &recurrence_operands(), &recurrent(0));
    let negative = |b: &mut GraphBuilder, x: &[ValueId]| {
        let mut repeat = Repeat::times(b, -2, 1);
        repeat.trip = 0.into();
        repeat.over(b, x, &wave)
    };
    check("negative", &wave_operands(), &negative);
}

/// The extent of an axis as a number.
fn extent(b: &mut GraphBuilder, v: ValueId) -> Result<(ValueId, Dim)> {
    let extent = b.ty(v).shape[0].clone();
    let one = b.constant(Tensor::scalar(1i64));
    let ones = b.broadcast(one, [extent.clone()])?;
    Ok((b.reduce(ReduceKind::Sum, ones, &[0], false)?, extent))
}

#[test]
fn counts_of_extents() {
    let bodies: [Body; 2] = [&wave, &|b, a| {
        let mut results = wave(b, a)?;
        results.push(b.cast(a[0], DType::F64)?);
        results.push(a[2]);
        Ok(results)
    }];
    for body in bodies {
        let build = |b: &mut GraphBuilder, x: &[ValueId]| {
            let (count, trip) = extent(b, x[0])?;
            let repeat = Repeat {
                count,
                trip,
                ..Repeat::times(b, 0, 1)
            };
            repeat.over(b, x, body)
        };
        let [v, w] = wave_operands();
        check("extent", &[v.batched(), w.batched()], &build);
    }
}

/// Two loops within each other, which have one condition, and a scan over the rows of `x` with a loop in each step.
fn nested(b: &mut GraphBuilder, x: &[ValueId]) -> Result<Vec<ValueId>> {
    let outer = |b: &mut GraphBuilder, a: &[ValueId]| {
        let mut repeat = Repeat::times(b, 3, 1);
        repeat.condition = a[1];
        let inner = repeat.over(b, &a[2..], &wave)?[0];
        let number = b.cast(a[0], DType::F64)?;
        let product = b.mul(inner, number)?;
        Ok(vec![a[1], b.add_(product, a[2])?, inner])
    };
    let mut results = Repeat::times(b, 2, 1).over(b, &x[..2], &outer)?;
    let steps = scan(b, &[x[0], x[2]], form(1, 1), |b, a| {
        let inner = waves(b, a)?[0];
        Ok(vec![b.add_(inner, a[0])?, inner])
    })?;
    results.extend(steps);
    Ok(results)
}

/// A choice between a loop and a scan.
fn chosen(b: &mut GraphBuilder, x: &[ValueId]) -> Result<Vec<ValueId>> {
    let either = |b: &mut GraphBuilder, a: &[ValueId]| Ok(vec![waves(b, &a[..2])?[0]]);
    let other = |b: &mut GraphBuilder, a: &[ValueId]| {
        let steps = scan(b, &[a[0], a[2]], form(1, 1), |b, a| {
            let product = b.mul(a[0], a[1])?;
            Ok(vec![b.map(ScalarOp::Sin, &[product])?])
        })?;
        Ok(vec![b.mul(steps[0], a[1])?])
    };
    choice(b, x, [&either, &other])
}

/// A choice in each step of a loop, by the parity of its number.
fn alternating(b: &mut GraphBuilder, x: &[ValueId]) -> Result<Vec<ValueId>> {
    let body = |b: &mut GraphBuilder, a: &[ValueId]| {
        let (two, zero) = (b.scalar(DType::I64, 2.0), b.scalar(DType::I64, 0.0));
        let parity = b.map(ScalarOp::Mod, &[a[0], two])?;
        let is_even = b.map(ScalarOp::Eq, &[parity, zero])?;
        let sin = |b: &mut GraphBuilder, a: &[ValueId]| b.add(Op::Map(ScalarOp::Sin), &a[..1]);
        let product = |b: &mut GraphBuilder, a: &[ValueId]| Ok(vec![b.mul(a[0], a[1])?]);
        let next = choice(b, &[is_even, a[2], a[3]], [&sin, &product])?[0];
        Ok(vec![a[1], next, next])
    };
    Repeat::times(b, 3, 1).over(b, x, &body)
}

#[test]
fn loops_scans_and_choices_within_each_other() {
    let all = [reals(&[4]), reals(&[4]), reals(&[3, 4])];
    check("nested", &all, &nested);
    check_second("nested", &all, &nested);
    check("alternating", &wave_operands(), &alternating);
    check_second("alternating", &wave_operands(), &alternating);
    for side in [0.0, 1.0] {
        let all = [&[truths(&[], &[side])], &all[..]].concat();
        check("chosen", &all, &chosen);
        check_second("chosen", &all, &chosen);
    }
}

/// Random smooth functions of the values of a body, of which there are `carried` and some invariants.
fn random_body(
    seed: u64,
    carried: usize,
) -> impl Fn(&mut GraphBuilder, &[ValueId]) -> Result<Vec<ValueId>> {
    move |b, a| {
        let mut rng = Rng(seed);
        let mut values = a[2..].to_vec();
        values.push(b.cast(a[0], DType::F64)?);
        for _ in 0..6 {
            let (p, q) = (rng.pick(&values), rng.pick(&values));
            values.push(match rng.below(4) {
                0 => b.map(ScalarOp::Sin, &[p])?,
                1 => b.map(ScalarOp::Tanh, &[p])?,
                2 => b.add_(p, q)?,
                _ => b.mul(p, q)?,
            });
        }
        let mut results = vec![a[1]];
        for _ in 0..carried + 2 {
            // Bounded, so that iterations do not grow, and of the type of the carried values.
            let bent = rng.pick(&values);
            let bent = b.map(ScalarOp::Tanh, &[bent])?;
            results.push(b.broadcast(bent, [2usize, 2])?);
        }
        Ok(results)
    }
}

#[test]
fn random_bodies() {
    let all = [reals(&[2, 2]), reals(&[2, 2]), reals(&[2]), reals(&[2, 1])];
    let options = GradOptions {
        allow_unused: true,
        ..GradOptions::default()
    };
    for seed in 0..24 {
        let build = |b: &mut GraphBuilder, x: &[ValueId]| {
            Repeat::times(b, seed as i64 % 4, 2).over(b, x, &random_body(seed, 2))
        };
        check_with(&format!("seed {seed}"), &all, &build, &options);
        if seed < 6 {
            check_second(&format!("seed {seed}"), &all, &build);
        }
    }
}

#[test]
fn compiled_loops_are_those_of_the_interpreter() {
    let three = vec![reals(&[4]), reals(&[4]), reals(&[3, 4])];
    let cases: [(Vec<Operand>, Build); 4] = [
        (recurrence_operands().to_vec(), &recurrent(4)),
        (recurrence_operands().to_vec(), &recurrent(0)),
        (wave_operands().to_vec(), &alternating),
        (three, &nested),
    ];
    for (operands, build) in cases {
        let (graph, loss, wrt) = graph_of(&operands, build).unwrap();
        let d = grad(&graph, loss, &wrt, &GradOptions::default()).unwrap();
        let inputs: Vec<Tensor> = operands.iter().map(|o| o.value.clone()).collect();
        compare_compiled(&d, &inputs).unwrap();
    }
}

#[test]
fn loops_beside_the_path_stay() {
    let mut b = GraphBuilder::new("beside");
    let x = b.input("x", DType::F64, [4]);
    let w = b.input("w", DType::F64, [4]);
    let kept = waves(&mut b, &[x, x]).unwrap()[0];
    let on_path = waves(&mut b, &[w, kept]).unwrap()[0];
    let loss = b.reduce(ReduceKind::Sum, on_path, &[0], false).unwrap();
    b.grad(loss, &[w]).unwrap();
    let names = b.graph().nodes().map(|(_, n)| n.op.name());
    let regions: Vec<_> = names.filter(|n| ["loop", "scan"].contains(n)).collect();
    assert_eq!(regions, ["loop", "scan", "scan"]);
}

/// The error of a gradient through a loop.
fn error_of(change: &dyn Fn(&mut GraphBuilder, &mut Repeat), body: Body) -> String {
    let mut b = GraphBuilder::new("error");
    b.set_origin("/loop");
    let x = b.input("x", DType::F64, [2]);
    let mut repeat = Repeat::times(&mut b, 3, 1);
    change(&mut b, &mut repeat);
    let y = repeat.over(&mut b, &[x, x], body).unwrap()[0];
    let loss = b.reduce(ReduceKind::Sum, y, &[0], false).unwrap();
    b.grad(loss, &[x]).unwrap_err().to_string()
}

#[test]
fn other_loops_are_errors() {
    let count = |b: &mut GraphBuilder, r: &mut Repeat| {
        r.count = b.input("n", DType::I64, [] as [usize; 0]);
        r.trip = 0.into();
    };
    let endless = |b: &mut GraphBuilder, r: &mut Repeat| {
        r.count = b.constant(Tensor::scalar(i64::MAX));
    };
    let condition = |b: &mut GraphBuilder, r: &mut Repeat| {
        r.condition = b.input("go", DType::Bool, [] as [usize; 0]);
    };
    let until = |b: &mut GraphBuilder, a: &[ValueId]| {
        let next = wave(b, a)?[1];
        let ten = b.scalar(DType::I64, 10.0);
        Ok(vec![b.map(ScalarOp::Lt, &[a[0], ten])?, next])
    };
    let state = |b: &mut GraphBuilder, a: &[ValueId]| {
        let read = b.variable("v", Tensor::zeros(DType::F64, &[2])?)?;
        Ok(vec![a[1], b.mul(a[2], read)?])
    };
    let within = |b: &mut GraphBuilder, a: &[ValueId]| {
        let next = Repeat::times(b, 2, 1).over(b, &a[2..], &until)?[0];
        Ok(vec![a[1], next])
    };
    let same = |_: &mut GraphBuilder, _: &mut Repeat| {};
    let errors = [
        error_of(&count, &wave),
        error_of(&endless, &wave),
        error_of(&condition, &wave),
        error_of(&same, &until),
        error_of(&same, &state),
        error_of(&same, &within),
    ];
    insta::assert_snapshot!(errors.join("\n"), @r#"
    in node "/loop": loop: no gradient: the number of its iterations is decided at run time (try: a trip count that is constant, or computed from shapes, and a condition that is constantly true)
    in node "/loop": loop: no gradient: it has no limit of iterations, or one above 2^32 (try: a trip count that is constant, or computed from shapes, and a condition that is constantly true)
    in node "/loop": loop: no gradient: its condition may end it early (try: a trip count that is constant, or computed from shapes, and a condition that is constantly true)
    in node "/loop": loop: no gradient: its condition may end it early (try: a trip count that is constant, or computed from shapes, and a condition that is constantly true)
    in node "/loop": loop: no gradient: its body reads or assigns variables
    in node "/branch": loop: no gradient: its condition may end it early (try: a trip count that is constant, or computed from shapes, and a condition that is constantly true)
    "#);
}
