//! Each rule has a case that fires it; any choice computes the same as the graph; prices decide
//! between storing and recomputing.

use super::*;
use crate::cluster::body;
use crate::ir::print::PrintOptions;
use crate::ir::{GraphBuilder, Op, ReduceKind, ScalarOp};
use crate::testing::Rng;
use crate::{DType, Tensor, interp};
use std::collections::BTreeSet;

/// Cases: (rule, graph).
fn build(g: &Graph, kernels: &[Kernel]) -> crate::error::Result<Graph> {
    Ok(body::build(g, kernels)?.0)
}

fn cases() -> Vec<(String, Graph)> {
    let case = |s: &str| {
        let (rule, body) = s.split_once('\n').expect("a rule name, then the graph");
        let g = Graph::parse(&format!("graph \"{rule}\" {{\n{body}}}"))
            .unwrap_or_else(|e| panic!("{rule}: {e}"));
        (rule.to_owned(), g)
    };
    include_str!("cases.txt")
        .split("## ")
        .skip(1)
        .map(case)
        .collect()
}

fn random_tensor(rng: &mut Rng, ty: &crate::ir::Type) -> Tensor {
    let shape = ty.static_shape().unwrap();
    let n = shape.iter().product();
    match ty.dtype {
        DType::F32 => {
            let values: Vec<f32> = (0..n)
                .map(|_| rng.below(4000) as f32 / 1000.0 - 2.0)
                .collect();
            Tensor::from_slice(&values, &shape).unwrap()
        }
        DType::U8 => Tensor::from_slice(
            &(0..n).map(|_| rng.below(256) as u8).collect::<Vec<_>>(),
            &shape,
        )
        .unwrap(),
        DType::I32 => Tensor::from_slice(
            &(0..n).map(|_| rng.below(100) as i32).collect::<Vec<_>>(),
            &shape,
        )
        .unwrap(),
        d => panic!("no case has inputs of {d}"),
    }
}

fn assert_same(g: &Graph, clustered: &Graph, inputs: &[Tensor], what: &str) {
    crate::ir::verify::verify(clustered).unwrap_or_else(|e| panic!("{what}: {e}\n{clustered}"));
    let expected = interp::run(g, inputs).unwrap();
    let found =
        interp::run(clustered, inputs).unwrap_or_else(|e| panic!("{what}: {e}\n{clustered}"));
    let bytes = |ts: &[Tensor]| ts.iter().map(|t| t.as_bytes().to_vec()).collect::<Vec<_>>();
    assert_eq!(bytes(&expected), bytes(&found), "{what}:\n{clustered}");
}

#[test]
fn every_rule_has_a_case_that_fires_it() {
    let names: BTreeSet<&str> = fuse_rules().map(|(name, _)| name).collect();
    let cases = cases();
    assert_eq!(names, cases.iter().map(|(rule, _)| rule.as_str()).collect());
    let mut out = String::new();
    for (rule, g) in &cases {
        let fused = fuse(g, &Pricing::default(), MAX_ALTERNATIVES);
        assert!(
            fused.phase.fired.contains_key(rule.as_str()),
            "{rule} did not fire: {:?}",
            fused.phase.fired
        );
        assert!(fused.after <= fused.before, "{rule}");
        out += &format!(
            "{}\n",
            build(g, &fused.kernels)
                .unwrap()
                .to_text(PrintOptions::SHORT)
        );
    }
    insta::assert_snapshot!("fuse", out);
}

/// Any choice of e-nodes computes the same bits: random ones, and the cheapest.
fn check_alternatives(g: &Graph, inputs: &[Tensor], seed: u64, what: &str) {
    let pricing = Pricing::default();
    let mut fuser = Fuser::new(g, &pricing);
    fuser.enumerate(MAX_ALTERNATIVES);
    assert_same(
        g,
        &build(g, &fuse(g, &pricing, MAX_ALTERNATIVES).kernels).unwrap(),
        inputs,
        what,
    );
    let mut rng = Rng(seed);
    for _ in 0..6 {
        let random = select::Selection::by(&fuser, |s, id| rng.below(s.n_alternatives(id)));
        let kernels: Vec<Kernel> = random.cones(&fuser).map(Cone::kernel).collect();
        assert_same(g, &build(g, &kernels).unwrap(), inputs, what);
    }
}

#[test]
fn every_alternative_is_right() {
    for (rule, g) in cases() {
        let mut rng = Rng(7);
        let inputs: Vec<Tensor> = g
            .inputs
            .iter()
            .map(|&v| random_tensor(&mut rng, g.ty(v)))
            .collect();
        check_alternatives(&g, &inputs, 3, &rule);
    }
}

#[test]
fn random_graphs_are_equal_however_they_are_fused() {
    for seed in 0..60 {
        let options = crate::testing::RandomOptions {
            n_nodes: 20,
            allow_empty_axes: seed % 5 == 0,
            n_variables: (seed % 3) as usize,
            ..Default::default()
        };
        let (mut g, inputs) = crate::testing::random_graph(seed, &options);
        g.order_state();
        check_alternatives(&g, &inputs, seed, &format!("seed {seed}"));
    }
}

/// A producer `op(x)` of many elements and `n` readers of different forms, whose results are all needed.
fn shared(op: ScalarOp, n: usize) -> Graph {
    let mut b = GraphBuilder::new("g");
    let x = b.input("x", DType::F32, [4096usize, 1024]);
    let p = b.map(op, &[x]).unwrap();
    for i in 0..n {
        let c = b.constant(Tensor::from_slice(&[i as f32 + 2.0], &[]).unwrap());
        let y = b.map(ScalarOp::Mul, &[p, c]).unwrap();
        b.output(&format!("y{i}"), y);
    }
    b.finish().unwrap()
}

fn n_kernels(g: &Graph) -> usize {
    fuse(g, &Pricing::default(), MAX_ALTERNATIVES).kernels.len()
}

#[test]
fn a_cheap_producer_is_computed_again_and_a_dear_one_stored() {
    for n in [2, 3, 6] {
        assert_eq!(
            n_kernels(&shared(ScalarOp::Abs, n)),
            n,
            "{n} readers of a cheap producer"
        );
        assert_eq!(
            n_kernels(&shared(ScalarOp::Tan, n)),
            n + 1,
            "{n} readers of a dear producer"
        );
    }
}

/// A sum of two tensors is read by one kernel: computing it there reads one tensor more, storing it writes and reads one. The more
/// readers there are, the dearer the former.
#[test]
fn the_number_of_readers_decides() {
    let graph = |n: usize| {
        let mut b = GraphBuilder::new("g");
        let (x, z) = (
            b.input("x", DType::F32, [4096usize, 1024]),
            b.input("z", DType::F32, [4096usize, 1024]),
        );
        let p = b.add_(x, z).unwrap();
        for i in 0..n {
            let c = b.constant(Tensor::from_slice(&[i as f32 + 2.0], &[]).unwrap());
            let y = b.map(ScalarOp::Mul, &[p, c]).unwrap();
            b.output(&format!("y{i}"), y);
        }
        b.finish().unwrap()
    };
    assert_eq!((n_kernels(&graph(2)), n_kernels(&graph(8))), (2, 9));
}

#[test]
fn a_value_that_is_stored_anyway_is_read() {
    let mut b = GraphBuilder::new("g");
    let x = b.input("x", DType::F32, [4096usize, 1024]);
    let p = b.map(ScalarOp::Tanh, &[x]).unwrap();
    let y = b.map(ScalarOp::Neg, &[p]).unwrap();
    b.output("p", p);
    b.output("y", y);
    let g = b.finish().unwrap();
    let fused = fuse(&g, &Pricing::default(), MAX_ALTERNATIVES);
    assert_eq!(fused.kernels.len(), 2);
    assert!(
        fused
            .missed
            .iter()
            .any(|(_, why)| why.contains("storing it is predicted to be faster")),
        "{:?}",
        fused.missed
    );
}

#[test]
fn one_of_two_products_takes_their_sum() {
    let mut b = GraphBuilder::new("g");
    let x = b.input("x", DType::F32, [64usize, 64]);
    let w = b.input("w", DType::F32, [64usize, 64]);
    let (p, q) = (b.matmul(x, w).unwrap(), b.matmul(w, x).unwrap());
    let y = b.add_(p, q).unwrap();
    let y = b.map(ScalarOp::Relu, &[y]).unwrap();
    b.output("y", y);
    let sizes: Vec<usize> = fuse(&b.finish().unwrap(), &Pricing::default(), MAX_ALTERNATIVES)
        .kernels
        .iter()
        .map(|k| k.members.len())
        .collect();
    assert_eq!(sizes.iter().sum::<usize>(), 4);
    assert_eq!((sizes.len(), sizes.iter().max()), (2, Some(&3)));
}

/// Why a producer is not in its reader's kernel is said, with both ops.
#[test]
fn missed_fusions_have_reasons() {
    let mut b = GraphBuilder::new("g");
    let x = b.input("x", DType::F32, [8usize, 16]);
    let y = b.map(ScalarOp::Exp, &[x]).unwrap();
    let y = b
        .add1(
            Op::Softmax {
                axis: 1,
                log: false,
            },
            &[y],
        )
        .unwrap();
    let w = b.input("w", DType::F32, [16usize, 4]);
    let y = b.matmul(y, w).unwrap();
    let y = b.map(ScalarOp::Sin, &[y]).unwrap();
    b.output("y", y);
    let missed = fuse(&b.finish().unwrap(), &Pricing::default(), MAX_ALTERNATIVES).missed;
    let reasons: Vec<String> = missed
        .iter()
        .map(|(_, why)| {
            why.split(" of ").next().unwrap().to_owned() + why.rsplit(": ").next().unwrap()
        })
        .collect();
    assert_eq!(
        reasons,
        [
            "exp into softmaxsoftmax takes no producers",
            "matmul into sinno tile form of sin"
        ]
    );
}

/// A chain of element-wise ops, to which a sum of all elements is added after every hundredth.
fn long_chain(n_maps: usize) -> Graph {
    let mut b = GraphBuilder::new("g");
    let mut y = b.input("x", DType::F32, [16usize]);
    for i in 0..n_maps {
        let op = [ScalarOp::Neg, ScalarOp::Abs][i % 2];
        y = b.map(op, &[y]).unwrap();
        if i % 100 == 0 {
            let sum = Op::Reduce {
                kind: ReduceKind::Sum,
                axes: vec![0],
                keepdims: true,
            };
            let s = b.add1(sum, &[y]).unwrap();
            y = b.add_(y, s).unwrap();
        }
    }
    b.output("y", y);
    b.finish().unwrap()
}

#[test]
fn long_chains_have_kernels_of_bounded_size() {
    let g = long_chain(2 * LARGE_GRAPH);
    let fused = fuse(&g, &Pricing::default(), MAX_ALTERNATIVES);
    let largest = fused.kernels.iter().map(|k| k.members.len()).max();
    assert!(largest <= Some(legal::MAX_MEMBERS), "{largest:?}");
    assert!(fused.kernels.len() < 400, "{}", fused.kernels.len());
    let x = Tensor::from_slice(&[0.5f32; 16], &[16]).unwrap();
    assert_same(&g, &build(&g, &fused.kernels).unwrap(), &[x], "chain");
}

/// Fired rules, e-nodes, members of all cones, and steps of extraction grow as the graph does.
#[test]
fn work_is_linear_in_the_graph() {
    let work = |n_maps: usize| {
        let g = long_chain(n_maps);
        let pricing = Pricing::default();
        let mut fuser = Fuser::new(&g, &pricing);
        fuser.enumerate(MAX_ALTERNATIVES);
        let n_steps = select::select(&fuser).steps;
        let n_members = fuser.cones.iter().map(|c| c.members.len() as u64).sum();
        let n_fired = fuser.report.fired.values().sum();
        [n_fired, fuser.report.e_nodes as u64, n_members, n_steps]
    };
    // Graphs of this size on have the same number of alternatives per node.
    let (small, large) = (work(LARGE_GRAPH), work(2 * LARGE_GRAPH));
    let is_linear = |(small, large): (&u64, &u64)| *large * 10 <= *small * 21;
    assert!(
        small.iter().zip(&large).all(is_linear),
        "{small:?} becomes {large:?}"
    );
}

/// The gradient behind an activation is masked where the product's results are, on GPUs; an operand of
/// the product is stored first.
#[test]
fn gpus_compute_masks_beside_results() {
    let text = r#"graph "gradient" {
        %0 = input "g": f32[128, 64]
        %1 = input "w": f32[64, 96]
        %2 = input "a": f32[128, 96]
        %3: f32[] = constant() {value = f32[] <0.0>}
        %4: bool[128, 96] = gt(%2, %3)
        %5: f32[64, 96] = exp(%1)
        %6: f32[128, 96] = matmul(%0, %5)
        %7: f32[128, 96] = select(%4, %6, %3)
        output "y" %7
    }"#;
    let g = Graph::parse(text).unwrap();
    assert_eq!(names_of(&g, true), ["exp", "gt matmul select"]);
    assert_eq!(names_of(&g, false), ["exp", "matmul", "gt select"]);
    let text = r#"graph "gate" {
        %0 = input "x": f16[128, 128]
        %1 = input "w": f16[128, 128]
        %2 = input "c": f16[128, 128]
        %3 = input "b": f32[128]
        %4: f16[128, 128] = relu(%0)
        %5: f16[128, 128] = matmul(%4, %1)
        %6: f16[128] = cast(%3) {to = f16}
        %7: f16[128, 128] = add(%5, %6)
        %8: f16[128, 128] = mul(%4, %2)
        %9: f16[128, 128] = add(%7, %8)
        output "y" %9
    }"#;
    // Neither an operand of the product nor a bias, which a library may add, is computed beside it.
    let kernels = names_of(&Graph::parse(text).unwrap(), true);
    assert_eq!(kernels, ["relu", "cast", "matmul add mul add"]);
}

/// Ops of each kernel.
fn names_of(g: &Graph, only_gpus: bool) -> Vec<String> {
    let pricing = Pricing {
        only_gpus,
        ..Pricing::default()
    };
    let fused = fuse(g, &pricing, MAX_ALTERNATIVES);
    let of_kernel = |k: &Kernel| {
        let names = k.members.iter().map(|&m| g.node(m).op.name().to_owned());
        names.collect::<Vec<_>>().join(" ")
    };
    fused.kernels.iter().map(of_kernel).collect()
}

/// Where no CPU has to run a cluster, ops before and after a GPU's kernels join them in every dtype.
#[test]
fn clusters_of_gpus_hold_more() {
    let text = r#"graph "block" {
        %0 = input "x": f16[32, 64]
        %1 = input "r": f16[32, 64]
        %2 = input "w": f16[64, 48]
        %3 = input "b": f16[48]
        %4 = input "gamma": f16[64]
        %5 = input "beta": f16[64]
        %6: f16[32, 64] = add(%0, %1)
        %7: f16[32, 64] = layer_norm(%6, %4, %5) {axis = 1, epsilon = 1e-5}
        %8: f16[32, 48] = matmul(%7, %2)
        %9: f16[32, 48] = add(%8, %3)
        %10: f16[32, 48] = gelu(%9)
        %11: f16[4, 8, 48] = reshape(%10) {shape = [4, 8, 48]}
        %12: f16[4, 8, 48] = softmax(%11) {axis = 2, log = false}
        %13: f32[4, 8, 48] = cast(%12) {to = f32}
        output "y" %13
    }"#;
    let g = Graph::parse(text).unwrap();
    assert_eq!(
        names_of(&g, true),
        ["add layer_norm", "matmul add gelu", "reshape softmax cast"]
    );
    assert!(names_of(&g, false).len() > 3);
}
