//! Branches, loops, scans, variables, send and receive.

use super::super::{Store, WorkBudget, eval_within, run, run_with_state};
use super::*;
use crate::ir::{ClusterKind, Dim, Graph, Origin, ReduceKind, ScalarOp, Type};
use gristmill_runtime::DType;

/// A region over inputs of the given types whose outputs `f` gives.
fn region(
    types: &[(DType, &[usize])],
    f: impl Fn(&mut GraphBuilder, &[ValueId]) -> Vec<ValueId>,
) -> Graph {
    let mut b = GraphBuilder::new("region");
    let args: Vec<ValueId> = types
        .iter()
        .enumerate()
        .map(|(i, (d, s))| b.input(&format!("a{i}"), *d, s.iter().copied()))
        .collect();
    for (i, v) in f(&mut b, &args).into_iter().enumerate() {
        b.output(&format!("r{i}"), v);
    }
    b.finish().unwrap()
}

#[test]
fn if_runs_one_branch() {
    let types = [(DType::I32, &[2][..])];
    let negate = region(&types, |b, a| vec![b.map(ScalarOp::Neg, &[a[0]]).unwrap()]);
    // The other branch divides by zero: it must not run.
    let divide = region(&types, |b, a| {
        let zero = b.scalar(DType::I32, 0.0);
        vec![b.div(a[0], zero).unwrap()]
    });
    let x = t(&[1i32, 2], &[2]);
    let run = |c: bool| {
        eval(
            &Op::If,
            &[&t(&[c], &[1]), &x],
            &[negate.clone(), divide.clone()],
        )
    };
    assert_eq!(run(true).unwrap(), [t(&[-1i32, -2], &[2])]);
    run(false).unwrap_err();
}

/// Carries `a`, adds `step` each time, goes on while `a < 10`; stacks the iteration number.
fn counting_loop(stacked: bool) -> Graph {
    region(
        &[
            (DType::I64, &[]),
            (DType::Bool, &[]),
            (DType::I64, &[]),
            (DType::I64, &[]),
        ],
        |b, a| {
            let next = b.add_(a[2], a[3]).unwrap();
            let ten = b.scalar(DType::I64, 10.0);
            let go_on = b.map(ScalarOp::Lt, &[next, ten]).unwrap();
            let mut results = vec![go_on, next];
            results.extend(stacked.then_some(a[0]));
            results
        },
    )
}

#[test]
fn loop_ends_early_or_at_its_trip_count() {
    let go = |trip: i64, condition: bool, step: i64| {
        let args = [
            Tensor::scalar(trip),
            Tensor::scalar(condition),
            Tensor::scalar(0i64),
            Tensor::scalar(step),
        ];
        let op = Op::Loop {
            carried: 1,
            trip: Dim::symbol("unknown"),
        };
        eval(&op, &args.each_ref(), &[counting_loop(false)])
            .unwrap()
            .remove(0)
            .as_slice::<i64>()[0]
    };
    assert_eq!(go(100, true, 4), 12);
    assert_eq!(go(2, true, 4), 8);
    assert_eq!(go(i64::MAX, true, 1), 10);
    assert_eq!(go(100, false, 4), 0);
    assert_eq!(go(-5, true, 4), 0);
}

#[test]
fn loop_stacks_exactly_its_trip_count() {
    let go = |trip: i64, declared: usize| {
        let args = [
            Tensor::scalar(trip),
            Tensor::scalar(true),
            Tensor::scalar(0i64),
            Tensor::scalar(1i64),
        ];
        eval(
            &Op::Loop {
                carried: 1,
                trip: declared.into(),
            },
            &args.each_ref(),
            &[counting_loop(true)],
        )
    };
    assert_eq!(
        go(3, 3).unwrap(),
        [Tensor::scalar(3i64), t(&[0i64, 1, 2], &[3])]
    );
    assert_eq!(
        go(0, 0).unwrap(),
        [Tensor::scalar(0i64), t::<i64>(&[], &[0])]
    );
    assert_eq!(
        go(12, 12).unwrap_err().kind(),
        crate::ErrorKind::Unsupported
    );
}

#[test]
fn scan_in_both_directions() {
    // Carries a sum over the rows of x, scaled by an invariant; stacks the sums so far.
    let body = region(
        &[(DType::I32, &[2]), (DType::I32, &[2]), (DType::I32, &[])],
        |b, a| {
            let scaled = b.mul(a[1], a[2]).unwrap();
            let sum = b.add_(a[0], scaled).unwrap();
            vec![sum, sum]
        },
    );
    let (zero, x, two) = (
        t(&[0i32, 0], &[2]),
        t(&[1i32, 2, 3, 4, 5, 6], &[3, 2]),
        t(&[2i32], &[]),
    );
    let scan = |reverse, length: usize, x: &Tensor| {
        let op = Op::Scan {
            carried: 1,
            scanned: 1,
            length: length.into(),
            reverse,
        };
        eval(&op, &[&zero, x, &two], std::slice::from_ref(&body)).unwrap()
    };
    assert_eq!(
        scan(false, 3, &x),
        [t(&[18i32, 24], &[2]), t(&[2i32, 4, 8, 12, 18, 24], &[3, 2])]
    );
    assert_eq!(
        scan(true, 3, &x),
        [
            t(&[18i32, 24], &[2]),
            t(&[18i32, 24, 16, 20, 10, 12], &[3, 2])
        ]
    );
    assert_eq!(
        scan(false, 0, &t::<i32>(&[], &[0, 2])),
        [zero.clone(), t::<i32>(&[], &[0, 2])]
    );
}

/// A graph with symbols in its inputs and in a cluster's attributes.
#[test]
fn symbols_bind_in_regions_too() {
    let n = || Dim::symbol("n");
    let mut body = GraphBuilder::new("body");
    let x = body.input("x", DType::F32, [n()]);
    let wide = body.broadcast(x, [n(), n()]).unwrap();
    let s = body.reduce(ReduceKind::Sum, wide, &[0], false).unwrap();
    body.output("s", s);
    let mut b = GraphBuilder::new("g");
    let x = b.input("x", DType::F32, [n()]);
    let y = b
        .add_with_regions(
            Op::Cluster {
                kind: ClusterKind::Reduce,
                anchor: 1,
                root: 1,
            },
            &[x],
            vec![body.finish().unwrap()],
        )
        .unwrap();
    b.output("y", y[0]);
    let g = b.finish().unwrap();
    assert_eq!(
        run(&g, &[t(&[1f32, 2.0, 3.0], &[3])]).unwrap(),
        [t(&[3f32, 6.0, 9.0], &[3])]
    );
    assert!(run(&g, &[t::<f32>(&[], &[0])]).unwrap()[0].is_empty());
    run(&g, &[t(&[1f64], &[1])]).unwrap_err();
    run(&g, &[]).unwrap_err();
    run(&g, &[t(&[1f32], &[1, 1])]).unwrap_err();
}

#[test]
fn variables_outlive_a_run() {
    let mut b = GraphBuilder::new("counter");
    let at = |shape: Vec<Dim>| (DType::I64, shape);
    let (dtype, shape) = at(vec![]);
    let old = b
        .add1(
            Op::ReadVariable {
                container: "c".into(),
                name: "n".into(),
                dtype,
                shape,
                initial: None,
            },
            &[],
        )
        .unwrap();
    let one = b.scalar(DType::I64, 1.0);
    let next = b.add_(old, one).unwrap();
    let new = b
        .add1(
            Op::AssignVariable {
                container: "c".into(),
                name: "n".into(),
            },
            &[next],
        )
        .unwrap();
    b.output("n", new);
    let g = b.finish().unwrap();
    assert!(
        run(&g, &[])
            .unwrap_err()
            .to_string()
            .contains("variable \"n\" of container \"c\" has no value")
    );
    let mut store = Store::new();
    store.set("c", "n", Tensor::scalar(40i64));
    for expected in [41i64, 42] {
        assert_eq!(
            run_with_state(&g, &[], &mut store).unwrap(),
            [Tensor::scalar(expected)]
        );
    }
    assert_eq!(store.get("c", "n"), Some(&Tensor::scalar(42i64)));
    store.set("c", "n", Tensor::scalar(1f32));
    run_with_state(&g, &[], &mut store).unwrap_err();
}

#[test]
fn what_is_sent_is_received() {
    let mut g = Graph::new("g");
    let x = g.add_input("x", Type::new(DType::F32, [2usize]));
    let send = |key: &str| Op::Send {
        key: key.into(),
        to: "/device:CPU:1".into(),
    };
    let recv = |key: &str| Op::Recv {
        key: key.into(),
        from: "/device:CPU:0".into(),
        dtype: DType::F32,
        shape: vec![2.into()],
    };
    let at = Origin::new("/here");
    g.add(send("k"), &[x], &at).unwrap();
    let y = g.add1(recv("k"), &[], &at).unwrap();
    g.add_output("y", y);
    let x = t(&[1f32, 2.0], &[2]);
    assert_eq!(
        run(&g, std::slice::from_ref(&x)).unwrap(),
        std::slice::from_ref(&x)
    );
    let mut lost = Graph::new("lost");
    let y = lost.add1(recv("other"), &[], &at).unwrap();
    lost.add_output("y", y);
    assert_eq!(run(&lost, &[]).unwrap_err().node(), Some("/here"));
}

#[test]
fn all_reduce_gives_every_member_the_result() {
    let (a, b, c) = (
        t(&[1f32, 5.0], &[2]),
        t(&[2f32, -7.0], &[2]),
        t(&[4f32, 3.0], &[2]),
    );
    let all = |kind: ReduceKind, operands: &[&Tensor]| eval(&Op::AllReduce { kind }, operands, &[]);
    for (kind, expected) in [
        (ReduceKind::Sum, [7f32, 1.0]),
        (ReduceKind::Mean, [7.0 / 3.0, 1.0 / 3.0]),
        (ReduceKind::Max, [4.0, 5.0]),
        (ReduceKind::Min, [1.0, -7.0]),
        (ReduceKind::Prod, [8.0, -105.0]),
    ] {
        assert_eq!(
            all(kind, &[&a, &b, &c]).unwrap(),
            vec![t(&expected, &[2]); 3],
            "{kind:?}"
        );
    }
    assert_eq!(
        all(ReduceKind::Sum, &[&a]).unwrap(),
        std::slice::from_ref(&a)
    );
    assert!(
        all(ReduceKind::Sum, &[&a, &t(&[1f32], &[1])])
            .unwrap_err()
            .to_string()
            .contains("differ")
    );
    assert!(
        all(ReduceKind::Sum, &[&t(&[true], &[1])])
            .unwrap_err()
            .to_string()
            .contains("sum of bool")
    );
}

#[test]
fn errors_name_the_node() {
    let mut b = GraphBuilder::new("g");
    b.set_origin("/layer/0/Div");
    let x = b.input("x", DType::I32, [2]);
    let y = b.div(x, x).unwrap();
    b.output("y", y);
    let e = run(&b.finish().unwrap(), &[t(&[1i32, 0], &[2])]).unwrap_err();
    insta::assert_snapshot!(e, @r#"in node "/layer/0/Div": div: integer division by zero at element 1 of the divisor i32[2]"#);
}

/// A loop that goes on for ever, over one number.
fn endless_loop() -> Graph {
    let types: [(DType, &[usize]); 3] = [(DType::I64, &[]), (DType::Bool, &[]), (DType::F32, &[])];
    region(&types, |_, a| vec![a[1], a[2]])
}

#[test]
fn a_budget_ends_a_loop_and_is_spent() {
    let op = Op::Loop {
        carried: 1,
        trip: Dim::constant(0),
    };
    let (count, go, x) = (t(&[i64::MAX], &[]), t(&[true], &[]), t(&[0f32], &[]));
    let inputs = [&count, &go, &x];
    let mut budget = WorkBudget::new(1 << 16, 3 << 15);
    for _ in 0..3 {
        let results = eval_within(&op, &inputs, &[endless_loop()], &mut budget).unwrap();
        assert_eq!(results, None);
    }
    // Nothing is left for a small op either.
    let neg = eval_within(&Op::Map(ScalarOp::Neg), &[&x], &[], &mut budget);
    assert_eq!(neg.unwrap(), None);
}

#[test]
fn a_budget_counts_a_large_op_before_it_runs() {
    let mut budget = WorkBudget::new(1 << 20, 1 << 20);
    let (a, b) = (
        t(&vec![1f32; 1 << 14], &[1 << 14, 1]),
        t(&vec![1f32; 1 << 14], &[1, 1 << 14]),
    );
    assert_eq!(
        eval_within(&Op::MatMul, &[&a, &b], &[], &mut budget).unwrap(),
        None
    );
    let mut budget = WorkBudget::new(1 << 20, 1 << 20);
    let neg = eval_within(&Op::Map(ScalarOp::Neg), &[&a], &[], &mut budget);
    assert_eq!(neg.unwrap().unwrap()[0].as_slice::<f32>()[0], -1.0);
}

#[test]
fn an_error_of_the_data_is_not_taken_for_an_exceeded_budget() {
    let mut budget = WorkBudget::new(1 << 20, 1 << 20);
    let (x, zero) = (t(&[1i32], &[]), t(&[0i32], &[]));
    eval_within(&Op::Map(ScalarOp::Div), &[&x, &zero], &[], &mut budget).unwrap_err();
}
