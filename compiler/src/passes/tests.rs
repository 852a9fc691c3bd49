//! What each pass does to a small graph, and that results stay the same.

use super::*;
use crate::interp;
use crate::ir::{Bindings, Dim, Graph, GraphBuilder, ScalarOp};
use crate::{DType, Tensor};

fn names(g: &Graph) -> Vec<&'static str> {
    g.nodes().map(|(_, n)| n.op.name()).collect()
}

fn ramp(shape: &[usize]) -> Tensor {
    let n = shape.iter().product::<usize>();
    Tensor::from_slice(&(0..n).map(|i| (i as f32 * 0.37).sin()).collect::<Vec<_>>(), shape).unwrap()
}

#[test]
fn specialise_binds_attributes_and_types() {
    let mut b = GraphBuilder::new("g");
    let n = Dim::symbol("n");
    let x = b.input("x", DType::F32, [n.clone(), 4.into()]);
    let y = b.reshape(x, [n.product(&4.into())]).unwrap();
    b.output("y", y);
    let g = specialise(&b.finish().unwrap(), &Bindings::from([("n".into(), 3)])).unwrap();
    assert_eq!(g.ty(g.outputs[0].value).to_string(), "f32[12]");
}

#[test]
fn constants_fold_and_dead_code_goes() {
    let mut b = GraphBuilder::new("g");
    let x = b.input("x", DType::F32, [2usize, 3]);
    let w = b.constant(ramp(&[3, 2]));
    let wt = b.transpose(w, &[1, 0]).unwrap();
    let y = b.mul(x, wt).unwrap();
    b.map(ScalarOp::Exp, &[y]).unwrap();
    b.output("y", y);
    let g = b.finish().unwrap();
    let folded = dce(&fold_constants(&g).unwrap()).unwrap();
    assert_eq!(names(&folded), ["constant", "mul"]);
    assert_eq!(interp::run(&folded, &[ramp(&[2, 3])]).unwrap(), interp::run(&g, &[ramp(&[2, 3])]).unwrap());
}

#[test]
fn equal_nodes_merge_but_devices_keep_apart() {
    let mut b = GraphBuilder::new("g");
    let x = b.input("x", DType::F32, [2usize]);
    let (p, q) = (b.map(ScalarOp::Exp, &[x]).unwrap(), b.map(ScalarOp::Exp, &[x]).unwrap());
    let r = b.with_device("/device:CPU:1", |b| b.map(ScalarOp::Exp, &[x])).unwrap();
    let s = b.add_(p, q).unwrap();
    let s = b.add_(s, r).unwrap();
    b.output("s", s);
    assert_eq!(names(&cse(&b.finish().unwrap()).unwrap()), ["exp", "exp", "add", "add"]);
}

#[test]
fn query_key_value_become_one_product() {
    let mut b = GraphBuilder::new("g");
    let x = b.input("x", DType::F32, [2usize, 3, 4]);
    let mut parts = Vec::new();
    for n in [4usize, 4, 8] {
        let w = b.constant(ramp(&[4, n]));
        let bias = b.constant(ramp(&[n]));
        let y = b.matmul(x, w).unwrap();
        parts.push(b.add_(bias, y).unwrap());
    }
    let y = b.concat(&parts, 2).unwrap();
    b.output("y", y);
    let g = b.finish().unwrap();
    let merged = dce(&merge_matmuls(&g).unwrap()).unwrap();
    assert_eq!(merged.nodes().filter(|(_, n)| n.op.name() == "matmul").count(), 1);
    assert_eq!(interp::run(&merged, &[ramp(&[2, 3, 4])]).unwrap(), interp::run(&g, &[ramp(&[2, 3, 4])]).unwrap());
}

#[test]
fn large_weights_with_other_uses_are_not_merged() {
    let products = |shared: bool| {
        let mut b = GraphBuilder::new("g");
        let (x, z) = (b.input("x", DType::F32, [2usize, 128]), b.input("z", DType::F32, [2usize, 128]));
        let (v, w) = (b.constant(ramp(&[128, 128])), b.constant(ramp(&[128, 129])));
        let parts = [b.matmul(x, v).unwrap(), b.matmul(x, w).unwrap()];
        let last = b.matmul(if shared { z } else { x }, w).unwrap();
        for (i, y) in parts.into_iter().chain([last]).enumerate() {
            b.output(&format!("y{i}"), y);
        }
        let merged = dce(&merge_matmuls(&cse(&b.finish().unwrap()).unwrap()).unwrap()).unwrap();
        names(&merged).iter().filter(|n| **n == "matmul").count()
    };
    assert_eq!((products(true), products(false)), (3, 1));
}

/// Two products and a softmax between them, the second in a region's place beside an integer product.
#[test]
fn products_round_their_operands_once_and_keep_sums_wide() {
    let mut b = GraphBuilder::new("g");
    let x = b.input("x", DType::F32, [3usize, 4]);
    let (w, u) = (b.constant(ramp(&[4, 5])), b.constant(ramp(&[4, 5])));
    let (y, z) = (b.matmul(x, w).unwrap(), b.matmul(x, u).unwrap());
    let z = b.transpose(z, &[1, 0]).unwrap();
    let last = b.matmul(y, z).unwrap();
    b.output("y", last);
    let g = b.finish().unwrap();
    let (lowered, n) = lower_precision(&g, DType::BF16, &|_| true).unwrap();
    let lowered = dce(&lowered).unwrap();
    assert_eq!(n, 3);
    // The inputs `x`, `w` and `u` and the transposed product are rounded once each; the product `y` is taken as it is.
    let rounds =
        |to: &str| lowered.to_text(crate::ir::print::PrintOptions::SHORT).matches(&format!("to = {to}")).count();
    assert_eq!((rounds("bf16"), rounds("f32")), (4, 2), "{}", lowered.to_text(crate::ir::print::PrintOptions::SHORT));
    assert_eq!(lowered.ty(lowered.outputs[0].value).dtype, DType::F32);
    let input = ramp(&[3, 4]);
    let (exact, rounded) =
        (interp::run(&g, std::slice::from_ref(&input)).unwrap(), interp::run(&lowered, &[input]).unwrap());
    // Three roundings to 8 bits on the way to each result, and results of two products are at most as large as their sums of magnitudes.
    let error = |(a, b): (&f32, &f32)| (a - b).abs();
    let worst = exact[0].as_slice::<f32>().iter().zip(rounded[0].as_slice::<f32>()).map(error).fold(0.0, f32::max);
    assert!(worst > 0.0 && worst < 0.1, "{worst}");
    let (same, none) = lower_precision(&g, DType::F16, &|_| false).unwrap();
    assert_eq!((names(&same), none), (names(&g), 0));
}
