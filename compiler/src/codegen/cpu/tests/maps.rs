//! Fused element-wise bodies: random programs over views, and what must become one vector kernel.

use super::harness::{check, steps};
use crate::codegen::testing::{Rng, as_cluster, random_maps, random_phases};
use crate::ir::*;
use gristmill_runtime::DType;

#[test]
fn random_bodies() {
    let rng = &mut Rng(21);
    random_maps(rng, 150)
        .iter()
        .for_each(|c| check(&c.body, &c.inputs, c.tolerance, rng));
}

#[test]
fn chains_over_broadcasts_are_one_kernel() {
    let rng = &mut Rng(22);
    let mut b = GraphBuilder::new("chain");
    let x = b.input("x", DType::F32, [6, 700]);
    let (scale, shift) = (
        b.input("scale", DType::F32, [700]),
        b.input("shift", DType::F32, [6, 1]),
    );
    let y = b.mul(x, scale).unwrap();
    let y = b.add_(y, shift).unwrap();
    let y = b.map(ScalarOp::Gelu, &[y]).unwrap();
    let y = b.map(ScalarOp::Exp, &[y]).unwrap();
    let y = b.sub(y, x).unwrap();
    b.output("y", y);
    let g = b.finish().unwrap();
    assert_eq!(steps(&g), ["test_0_0_vector"]);
    let inputs = [
        rng.tensor(DType::F32, &[6, 700], -2.0, 2.0),
        rng.tensor(DType::F32, &[700], -1.0, 1.0),
        rng.tensor(DType::F32, &[6, 1], -1.0, 1.0),
    ];
    check(&g, &inputs, 1e-6, rng);
}

#[test]
fn results_do_not_depend_on_the_split() {
    let rng = &mut Rng(23);
    let mut b = GraphBuilder::new("split");
    let x = b.input("x", DType::F32, [40_000]);
    let y = b.map(ScalarOp::Silu, &[x]).unwrap();
    let y = b.map(ScalarOp::Softsign, &[y]).unwrap();
    b.output("y", y);
    let g = as_cluster(&b.finish().unwrap());
    let x = [rng.tensor(DType::F32, &[40_000], -9.0, 9.0)];
    let compiled =
        crate::codegen::cpu::compile_clusters(&mut g.clone(), &Default::default()).unwrap();
    let first = super::harness::run(&g, &compiled, &x, rng).unwrap();
    for _ in 0..5 {
        assert_eq!(super::harness::run(&g, &compiled, &x, rng).unwrap(), first);
    }
}

#[test]
fn joins_of_views_and_expressions_write_in_place() {
    let rng = &mut Rng(24);
    let mut b = GraphBuilder::new("join");
    let x = b.input("x", DType::F32, [3, 4, 8]);
    let t = b.transpose(x, &[0, 2, 1]).unwrap();
    let e = b.map(ScalarOp::Relu, &[x]).unwrap();
    let e = b.slice_axis(e, 1, 1, 2).unwrap();
    let t = b.reshape(t, [3, 4, 8]).unwrap();
    let y = b.concat(&[x, e, t], 1).unwrap();
    b.output("y", y);
    let g = b.finish().unwrap();
    check(
        &g,
        &[rng.tensor(DType::F32, &[3, 4, 8], -1.0, 1.0)],
        0.0,
        rng,
    );
}

#[test]
fn random_bodies_of_many_phases() {
    let rng = &mut Rng(25);
    random_phases(rng, 200)
        .iter()
        .for_each(|c| check(&c.body, &c.inputs, c.tolerance, rng));
}
