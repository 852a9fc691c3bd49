//! Cuts of graphs by hand, interpreted and compiled.

use super::*;
use crate::compile;
use crate::interp;
use crate::ir::{GraphBuilder, ReduceKind, ScalarOp};
use crate::options::Options;
use gristmill_runtime::Tensor;

/// Elements above 1 of the exponentials of `x`, doubled and counted from 0 on.
fn selection() -> Graph {
    let mut b = GraphBuilder::new("selection");
    b.set_origin("/selection");
    let x = b.input("x", DType::F32, ["n"]);
    let (one, two) = (b.scalar(DType::F32, 1.0), b.scalar(DType::F32, 2.0));
    let y = b.map(ScalarOp::Exp, &[x]).unwrap();
    let above = b.map(ScalarOp::Gt, &[y, one]).unwrap();
    let count = Dim::symbol("count");
    let non_zero = Op::NonZero {
        count: count.clone(),
    };
    let places = b.add1(non_zero, &[above]).unwrap();
    let places = b.reshape(places, [&count]).unwrap();
    let axis = 0;
    let kept = b.add1(Op::Gather { axis }, &[y, places]).unwrap();
    let (dtype, shape) = (DType::F32, vec![count]);
    let numbers = b.add1(Op::Iota { dtype, shape, axis }, &[]).unwrap();
    let doubled = b.mul(kept, two).unwrap();
    let numbered = b.add_(doubled, numbers).unwrap();
    let total = b.reduce(ReduceKind::Sum, numbered, &[0], false).unwrap();
    b.output("kept", numbered);
    b.output("numbers", numbers);
    b.output("total", total);
    b.finish().unwrap()
}

fn check(g: &Graph, inputs: &[Tensor]) {
    let expected = interp::run(g, inputs).unwrap();
    let interpreted = interp::run(&cut(g).unwrap(), inputs).unwrap();
    assert_eq!(interpreted, expected);
    let compiled = compile(g, &Options::default()).unwrap();
    let results = compiled.run_ordered(inputs).unwrap().into_tensors();
    for (got, expected) in results.iter().zip(&expected) {
        let close = interp::compare::allclose(expected, got, 1e-5, 1e-6);
        assert!(close.ok, "{close}");
    }
}

#[test]
fn a_selection_is_cut_where_its_extent_is_known() {
    let g = selection();
    insta::assert_snapshot!(cut(&g).unwrap());
    for n in [0, 1, 5, 100] {
        let x: Vec<f32> = (0..n).map(|i| (i as f32 * 0.7).sin()).collect();
        check(&g, &[Tensor::from_slice(&x, &[n]).unwrap()]);
    }
}

/// A graph that was cut is one like any other: `dump --stage segments` prints it.
#[test]
fn a_graph_that_was_cut_can_be_compiled() {
    let g = selection();
    let again = Graph::parse(&cut(&g).unwrap().to_string()).unwrap();
    let x = [Tensor::from_slice(&[1f32, -2.0, 3.0], &[3]).unwrap()];
    check(&again, &x);
    let expected = interp::run(&g, &x).unwrap();
    assert_eq!(interp::run(&again, &x).unwrap(), expected);
}

/// Nodes wait for a check whose result nothing reads: one in the segment of the check, and one in a later segment.
#[test]
fn checks_that_others_wait_for_run_in_every_segment() {
    for is_early in [true, false] {
        let mut b = GraphBuilder::new("checked");
        let x = b.input("x", DType::F32, [40usize]);
        let check = b.add1(Op::CheckFinite, &[x]).unwrap();
        let exp = |b: &mut GraphBuilder, v, waits: bool| {
            let awaited: &[ValueId] = if waits { &[check] } else { &[] };
            b.with_control_dependencies(awaited, |b| b.map(ScalarOp::Exp, &[v]))
        };
        let y = exp(&mut b, x, is_early).unwrap();
        let count = Dim::symbol("count");
        let places = b.add1(Op::NonZero { count }, &[y]).unwrap();
        let places = b.cast(places, DType::F32).unwrap();
        let z = exp(&mut b, places, !is_early).unwrap();
        b.output("z", z);
        let compiled = compile(&b.finish().unwrap(), &Options::default()).unwrap();
        assert!(!compiled.is_whole());
        let run = |last: f32| {
            let mut values = [1f32; 40];
            values[39] = last;
            compiled.run_ordered(&[Tensor::from_slice(&values, &[40]).unwrap()])
        };
        run(2.0).unwrap();
        let error = run(f32::INFINITY).unwrap_err();
        assert_eq!(error.kind(), crate::ErrorKind::NotFinite, "{error}");
    }
}
