//! Effects of each pass on a small graph, and equality of results.

use super::*;
use crate::error::ErrorKind;
use crate::interp;
use crate::ir::{Bindings, Dim, Graph, GraphBuilder, Op, ReduceKind, ScalarOp};
use crate::place::collectives::{Asked, Way};
use crate::testing::Setup;
use crate::{DType, Tensor};

fn names(g: &Graph) -> Vec<&'static str> {
    g.nodes().map(|(_, n)| n.op.name()).collect()
}

pub(super) fn ramp(shape: &[usize]) -> Tensor {
    let n = shape.iter().product::<usize>();
    Tensor::from_slice(
        &(0..n).map(|i| (i as f32 * 0.37).sin()).collect::<Vec<_>>(),
        shape,
    )
    .unwrap()
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
    assert_eq!(
        interp::run(&folded, &[ramp(&[2, 3])]).unwrap(),
        interp::run(&g, &[ramp(&[2, 3])]).unwrap()
    );
}

#[test]
fn a_fold_beyond_the_limit_of_work_stays() {
    let product = |n: usize| {
        let mut b = GraphBuilder::new("g");
        let w = b.constant(Tensor::zeros(DType::F32, &[n, n]).unwrap());
        let y = b.matmul(w, w).unwrap();
        b.output("y", y);
        let folded = fold_constants(&b.finish().unwrap()).unwrap();
        names(&dce(&folded).unwrap())
    };
    assert_eq!(product(8), ["constant"]);
    assert_eq!(product(1024), ["constant", "matmul"]);
}

#[test]
fn equal_nodes_merge_but_devices_keep_apart() {
    let mut b = GraphBuilder::new("g");
    let x = b.input("x", DType::F32, [2usize]);
    let (p, q) = (
        b.map(ScalarOp::Exp, &[x]).unwrap(),
        b.map(ScalarOp::Exp, &[x]).unwrap(),
    );
    let r = b
        .with_device("/device:CPU:1", |b| b.map(ScalarOp::Exp, &[x]))
        .unwrap();
    let s = b.add_(p, q).unwrap();
    let s = b.add_(s, r).unwrap();
    b.output("s", s);
    assert_eq!(
        names(&cse(&b.finish().unwrap()).unwrap()),
        ["exp", "exp", "add", "add"]
    );
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
    assert_eq!(
        merged
            .nodes()
            .filter(|(_, n)| n.op.name() == "matmul")
            .count(),
        1
    );
    assert_eq!(
        interp::run(&merged, &[ramp(&[2, 3, 4])]).unwrap(),
        interp::run(&g, &[ramp(&[2, 3, 4])]).unwrap()
    );
}

#[test]
fn large_weights_with_other_uses_are_not_merged() {
    let products = |shared: bool| {
        let mut b = GraphBuilder::new("g");
        let (x, z) = (
            b.input("x", DType::F32, [2usize, 128]),
            b.input("z", DType::F32, [2usize, 128]),
        );
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

/// Two products and a softmax between them, the second in a region's place beside an integer
/// product.
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
    // The inputs `x`, `w` and `u` and the transposed product are rounded once each; the product `y`
    // is taken as it is.
    let rounds = |to: &str| {
        lowered
            .to_text(crate::ir::print::PrintOptions::SHORT)
            .matches(&format!("to = {to}"))
            .count()
    };
    assert_eq!(
        (rounds("bf16"), rounds("f32")),
        (4, 2),
        "{}",
        lowered.to_text(crate::ir::print::PrintOptions::SHORT)
    );
    assert_eq!(lowered.ty(lowered.outputs[0].value).dtype, DType::F32);
    let input = ramp(&[3, 4]);
    let (exact, rounded) = (
        interp::run(&g, std::slice::from_ref(&input)).unwrap(),
        interp::run(&lowered, &[input]).unwrap(),
    );
    // Three roundings to 8 bits on the way to each result, and results of two products are at most
    // as large as their sums of magnitudes.
    let error = |(a, b): (&f32, &f32)| (a - b).abs();
    let worst = exact[0]
        .as_slice::<f32>()
        .iter()
        .zip(rounded[0].as_slice::<f32>())
        .map(error)
        .fold(0.0, f32::max);
    assert!(worst > 0.0 && worst < 0.1, "{worst}");
    let (same, none) = lower_precision(&g, DType::F16, &|_| false).unwrap();
    assert_eq!((names(&same), none), (names(&g), 0));
}

/// Operands `x0`, `x1`, .. that `neg` makes on devices in turn (none for those after), and the
/// results.
fn towers(kind: ReduceKind, dtype: DType, shape: &[usize], n: usize, devices: &[&str]) -> Graph {
    let mut b = GraphBuilder::new("towers");
    b.set_origin("/tower");
    let made = |(i, b): (usize, &mut GraphBuilder)| {
        let x = b.input(&format!("x{i}"), dtype, shape.iter().copied());
        let make = |b: &mut GraphBuilder| b.map(ScalarOp::Abs, &[x]);
        match devices.get(i) {
            Some(device) => b.with_device(*device, make).unwrap(),
            None => make(b).unwrap(),
        }
    };
    let operands: Vec<_> = (0..n).map(|i| made((i, &mut b))).collect();
    b.set_origin("/all");
    let results = b.all_reduce(kind, &operands).unwrap();
    results
        .iter()
        .enumerate()
        .for_each(|(i, &y)| b.output(&format!("y{i}"), y));
    b.finish().unwrap()
}

fn by_library(asked: Asked) -> Way {
    match asked.is_for_library {
        true => Way::Library,
        false => Way::Exchange,
    }
}

#[test]
fn all_reduce_becomes_shares_of_large_tensors_and_sums_of_small_ones() {
    let text = |g: &Graph| {
        expand_all_reduce(g, &|_| Ok(Way::Exchange))
            .unwrap()
            .to_text(crate::ir::print::PrintOptions::SHORT)
    };
    let two = ["/cpu:0", "/cpu:1"];
    insta::assert_snapshot!(text(&towers(ReduceKind::Sum, DType::F32, &[3, 8_001], 2, &two)), @r#"
    graph "towers" {
      %0 = input "x0": f32[3, 8001]
      %1 = input "x1": f32[3, 8001]
      %2: f32[3, 8001] = abs(%0) on "/device:CPU:0" @ "/tower"
      %3: f32[3, 8001] = abs(%1) on "/device:CPU:1" @ "/tower"
      %4: f32[24003] = reshape(%2) {shape = [24003]} on "/device:CPU:0" @ "/all"
      %5: f32[24003] = reshape(%3) {shape = [24003]} on "/device:CPU:1" @ "/all"
      %6: f32[12001] = slice(%4) {starts = [0], sizes = [12001], steps = [1]} on "/device:CPU:0" @ "/all"
      %7: f32[12001] = slice(%5) {starts = [0], sizes = [12001], steps = [1]} on "/device:CPU:1" @ "/all"
      %8: f32[12001] = add(%6, %7) on "/device:CPU:0" @ "/all"
      %9: f32[12002] = slice(%4) {starts = [12001], sizes = [12002], steps = [1]} on "/device:CPU:0" @ "/all"
      %10: f32[12002] = slice(%5) {starts = [12001], sizes = [12002], steps = [1]} on "/device:CPU:1" @ "/all"
      %11: f32[12002] = add(%9, %10) on "/device:CPU:1" @ "/all"
      %12: f32[24003] = concat(%8, %11) {axis = 0} on "/device:CPU:0" @ "/all"
      %13: f32[3, 8001] = reshape(%12) {shape = [3, 8001]} on "/device:CPU:0" @ "/all"
      %14: f32[24003] = concat(%8, %11) {axis = 0} on "/device:CPU:1" @ "/all"
      %15: f32[3, 8001] = reshape(%14) {shape = [3, 8001]} on "/device:CPU:1" @ "/all"
      output "y0" %13
      output "y1" %15
    }
    "#);
    let small = expand_all_reduce(
        &towers(ReduceKind::Mean, DType::F16, &[5], 3, &two),
        &|asked| Ok(by_library(asked)),
    )
    .unwrap();
    let at_each = [
        "cast", "cast", "add", "cast", "add", "constant", "div", "cast",
    ];
    assert_eq!(
        names(&small),
        [&["abs"; 3][..], &at_each, &at_each, &at_each].concat()
    );
}

#[test]
fn expanded_all_reduce_is_what_the_interpreter_says() {
    use ReduceKind::*;
    let places: [&[&str]; 3] = [
        &[],
        &["/cpu:0", "/cpu:1", "/cpu:0"],
        &["/cpu:0", "/cpu:1", "/cpu:2", "/cpu:3"],
    ];
    let mut rng = crate::testing::Rng(5);
    for dtype in [
        DType::F32,
        DType::BF16,
        DType::F64,
        DType::I8,
        DType::U8,
        DType::I64,
        DType::U64,
    ] {
        for kind in [Sum, Mean, Max, Min, Prod] {
            for shape in [&[0, 4][..], &[], &[1], &[7, 3], &[9_363, 7]] {
                let n = 1 + rng.below(5);
                let g = towers(kind, dtype, shape, n, places[rng.below(3)]);
                let inputs: Vec<Tensor> = (0..n)
                    .map(|_| crate::testing::random_tensor(&mut rng, dtype, shape, false))
                    .collect();
                let expected = interp::run(&g, &inputs).unwrap();
                let way = rng.below(4);
                let choose = |asked: Asked| {
                    let all: Vec<usize> = (0..asked.places.len()).collect();
                    let (some, others) = all.split_at(all.len() / 2 + all.len() % 2);
                    Ok(match way {
                        0 => Way::Exchange,
                        1 => by_library(asked),
                        2 => Way::OneDevice(all.len() - 1),
                        _ if others.is_empty() => Way::Exchange,
                        _ => Way::Hierarchical(vec![some.to_vec(), others.to_vec()]),
                    })
                };
                let expanded = expand_all_reduce(&g, &choose).unwrap();
                let found = interp::run(&expanded, &inputs).unwrap();
                // One rounding of the dtype, or as many as there are operands.
                let rtol = match dtype {
                    _ if matches!(kind, Max | Min) || !dtype.is_float() => 0.0,
                    DType::BF16 => 1.0 / 256.0,
                    _ => 1e-6,
                };
                for (e, f) in expected.iter().zip(&found) {
                    let c = interp::compare::allclose(e, f, 0.0, 0.0);
                    assert!(
                        c.ok || c.scaled_err() <= rtol,
                        "{kind:?} of {n} {dtype}{shape:?}: {c}"
                    );
                    assert_eq!(f, &found[0], "{kind:?} of {n} {dtype}{shape:?}");
                }
            }
        }
    }
}

#[test]
fn all_reduce_in_a_region_is_one_reduction() {
    let mut body = GraphBuilder::new("body");
    let x = body.input("x", DType::F32, [2usize]);
    let y = body.all_reduce(ReduceKind::Sum, &[x, x]).unwrap();
    body.output("y", y[1]);
    let body = body.finish().unwrap();
    let mut b = GraphBuilder::new("g");
    let (c, x) = (
        b.input("c", DType::Bool, [] as [usize; 0]),
        b.input("x", DType::F32, [2usize]),
    );
    let y = b
        .add_with_regions(Op::If, &[c, x], vec![body.clone(), body])
        .unwrap();
    b.output("y", y[0]);
    let choose = |asked: Asked| Ok(by_library(asked));
    let expanded = expand_all_reduce(&b.finish().unwrap(), &choose).unwrap();
    let (_, branch) = expanded.nodes().next().unwrap();
    assert_eq!(
        branch.regions.iter().flat_map(names).collect::<Vec<_>>(),
        ["add", "add"]
    );
}

/// A scan whose step multiplies its state by a matrix, and a branch that adds a vector in one
/// region.
fn recurrent() -> Graph {
    let text = r#"graph "g" {
  %0 = input "h": f32[2, 3]
  %1 = input "on": bool[]
  %2 = input "xs": f32[4, 2, 3]
  %3: f32[3, 3] = constant() {value = f32[3, 3] <0.5, 0.0, -0.5, 0.25, 1.0, 0.0, -1.0, 0.5, 0.125>} @ "/w"
  %4: f32[2, 3], %5: f32[4, 2, 3] = scan(%0, %2, %3) {carried = 1, scanned = 1, length = 4, reverse = false} (graph "step" {
    %0 = input "state": f32[2, 3]
    %1 = input "x": f32[2, 3]
    %2 = input "w": f32[3, 3]
    %3: f32[2, 3] = matmul(%0, %2) @ "/matmul"
    %4: f32[2, 3] = add(%3, %1) @ "/add"
    output "state" %4
    output "h" %4
  }) @ "/scan"
  %6: f32[2, 3] = if(%1, %4, %3) (graph "then" {
    %0 = input "a": f32[2, 3]
    %1 = input "w": f32[3, 3]
    %2: f32[2, 3] = matmul(%0, %1) @ "/then"
    output "y" %2
  }) (graph "else" {
    %0 = input "a": f32[2, 3]
    %1 = input "w": f32[3, 3]
    output "y" %0
  }) @ "/if"
  output "y" %6
  output "hs" %5
}
"#;
    Graph::parse(text).unwrap()
}

#[test]
fn constants_become_those_of_regions() {
    let g = recurrent();
    let moved = dce(&constants_into_regions(&g).unwrap()).unwrap();
    assert_eq!(names(&moved), ["scan", "if"]);
    for (_, node) in moved.nodes() {
        let n_operands = |r: &Graph| r.inputs.len();
        let n: Vec<usize> = node.regions.iter().map(n_operands).collect();
        match node.op {
            Op::Scan { .. } => assert_eq!((node.inputs.len(), n), (2, vec![2])),
            _ => assert_eq!((node.inputs.len(), n), (2, vec![1, 1])),
        }
    }
    for on in [false, true] {
        let on = Tensor::from_slice(&[on], &[]).unwrap();
        let inputs = [ramp(&[2, 3]), on, ramp(&[4, 2, 3])];
        assert_eq!(
            interp::run(&moved, &inputs).unwrap(),
            interp::run(&g, &inputs).unwrap()
        );
    }
    assert_eq!(constants_into_regions(&moved).unwrap(), moved);
}

/// `exp(x)` that waits for a check of `x`, whose result nothing uses.
fn checked_exp(devices: &[&str]) -> Graph {
    let mut b = GraphBuilder::new("checked");
    let x = b.input("x", DType::F32, [4usize]);
    let on = |b: &mut GraphBuilder, i: usize, op: Op| match devices.get(i) {
        Some(device) => b.with_device(*device, |b| b.add1(op, &[x])),
        None => b.add1(op, &[x]),
    };
    let check = on(&mut b, 0, Op::CheckFinite).unwrap();
    let exp = |b: &mut GraphBuilder| on(b, 1, Op::Map(ScalarOp::Exp));
    let y = b.with_control_dependencies(&[check], exp).unwrap();
    b.output("y", y);
    b.finish().unwrap()
}

#[test]
fn nodes_that_others_wait_for_run() {
    let g = dce(&checked_exp(&[])).unwrap();
    assert_eq!(names(&g), ["check_finite", "exp"]);
    let tensor = |last: f32| Tensor::from_slice(&[0.0, 1.0, 2.0, last], &[4]).unwrap();
    for (devices, placed) in [("cpu:1", &[][..]), ("cpu:2", &["/cpu:1", "/cpu:0"][..])] {
        for opt_level in 0..=3 {
            let setup = Setup::on(devices, 2).with(|o| o.opt_level = opt_level);
            let compiled = setup.compile(&checked_exp(placed)).unwrap();
            compiled.run([("x", tensor(3.0))]).unwrap();
            let error = compiled.run([("x", tensor(f32::NAN))]).unwrap_err();
            assert_eq!(
                error.kind(),
                ErrorKind::NotFinite,
                "{devices} {opt_level}: {error}"
            );
        }
    }
}
