//! Each rule has a case in `cases/` that fires it; its results are compared with the interpreter's.

use super::*;
use crate::ir::print::PrintOptions;
use crate::testing::Rng;
use crate::{DType, Tensor};
use std::collections::BTreeSet;

const FILES: &[(&str, &str)] = &[
    ("simplify", include_str!("cases/simplify.txt")),
    ("views", include_str!("cases/views.txt")),
    ("layout", include_str!("cases/layout.txt")),
    ("recognise", include_str!("cases/recognise.txt")),
    ("contract", include_str!("cases/contract.txt")),
];

/// Cases of a file: (rule, graph).
fn cases(text: &str) -> Vec<(&str, Graph)> {
    let sections = text.split("## ").skip(1);
    let case = |s: &'static str| {
        let (rule, body) = s.split_once('\n').expect("a rule name, then the graph");
        (
            rule.trim(),
            Graph::parse(&format!("graph \"{}\" {{\n{body}}}", rule.trim()))
                .unwrap_or_else(|e| panic!("{rule}: {e}")),
        )
    };
    // The files are compiled in, so the text is static.
    sections
        .map(|s| case(Box::leak(s.to_owned().into_boxed_str())))
        .collect()
}

#[test]
fn every_rule_has_a_case() {
    let with_case: BTreeSet<&str> = FILES
        .iter()
        .flat_map(|(_, t)| cases(t))
        .map(|(r, _)| r)
        .collect();
    let names: Vec<&str> = rule_list().iter().map(|r| r.name).collect();
    assert_eq!(
        names.iter().collect::<BTreeSet<_>>().len(),
        names.len(),
        "rule names are unique"
    );
    let missing: Vec<&&str> = names.iter().filter(|n| !with_case.contains(**n)).collect();
    assert!(missing.is_empty(), "rules without a case: {missing:?}");
    let unknown: Vec<&&str> = with_case.iter().filter(|c| !names.contains(c)).collect();
    assert!(unknown.is_empty(), "cases of no rule: {unknown:?}");
}

#[test]
fn rules_fire() {
    for (file, text) in FILES {
        let mut out = String::new();
        for (rule, g) in cases(text) {
            let (new, report) = rewrite(&g, &Options::default()).unwrap();
            assert!(report.fired(rule) > 0, "{rule} did not fire:\n{report}");
            assert!(
                report
                    .phases
                    .iter()
                    .all(|p| p.stop == StopReason::Saturated),
                "{rule}:\n{report}"
            );
            out += &format!("{}\n", new.to_text(PrintOptions::SHORT));
        }
        insta::assert_snapshot!(*file, out);
    }
}

/// Values at which an algebraic identity may fail.
const SPECIAL: [f32; 8] = [
    f32::NAN,
    f32::INFINITY,
    f32::NEG_INFINITY,
    -0.0,
    0.0,
    1e-40,
    3e38,
    -1.5,
];
/// Values of [`SPECIAL`] that make no intermediate result overflow or underflow, and ordinary
/// numbers.
const SPECIAL_IN_RANGE: [f32; 8] = [
    f32::NAN,
    f32::INFINITY,
    f32::NEG_INFINITY,
    -0.0,
    0.0,
    0.75,
    2.5,
    -1.5,
];

/// A tensor of a type, symbols bound to `n`: small numbers, or special values if there are any.
fn random_tensor(
    rng: &mut Rng,
    ty: &crate::ir::Type,
    n: usize,
    special: Option<&[f32; 8]>,
) -> Tensor {
    let bindings = [("n".to_owned(), n)].into();
    let shape = ty
        .shape
        .bind(&bindings)
        .as_static()
        .expect("n is the only symbol");
    let len = shape.iter().product();
    let float = |rng: &mut Rng| match special {
        Some(values) => values[rng.below(8)],
        None => rng.below(4000) as f32 / 1000.0 - 2.0,
    };
    match ty.dtype {
        DType::F32 => Tensor::from_slice(&(0..len).map(|_| float(rng)).collect::<Vec<_>>(), &shape),
        DType::Bool => {
            Tensor::from_slice(&(0..len).map(|_| rng.one_in(2)).collect::<Vec<_>>(), &shape)
        }
        d => Tensor::from_bytes(
            d,
            &shape,
            &(0..len * d.size_bytes())
                .map(|_| rng.below(256) as u8)
                .collect::<Vec<_>>(),
        ),
    }
    .unwrap()
}

/// A difference of two results that `exactness` does not permit.
fn difference(a: &Tensor, b: &Tensor, exactness: Exactness) -> Option<String> {
    if a.shape() != b.shape() || a.dtype() != b.dtype() {
        return Some(format!("{a:?} against {b:?}"));
    }
    if a.dtype() != DType::F32 {
        return (a != b).then(|| format!("{a:?} against {b:?}"));
    }
    let (a, b) = (a.as_slice::<f32>(), b.as_slice::<f32>());
    let scale = a
        .iter()
        .filter(|v| v.is_finite())
        .fold(1f32, |m, v| m.max(v.abs()));
    let same = |x: f32, y: f32| match exactness {
        _ if x.is_nan() || y.is_nan() => x.is_nan() && y.is_nan(),
        Exactness::Bits => x.to_bits() == y.to_bits(),
        Exactness::Value => x == y,
        Exactness::Rounding => x == y || (x - y).abs() <= 1e-5 * scale,
    };
    a.iter()
        .zip(b)
        .find(|(x, y)| !same(**x, **y))
        .map(|(x, y)| format!("{x} against {y}"))
}

/// The worst that the rules which fired may do.
fn exactness_of(report: &Report) -> Exactness {
    let fired = |r: &RuleInfo| report.fired(r.name) > 0;
    rule_list()
        .iter()
        .filter(|r| fired(r))
        .map(|r| r.exactness)
        .max()
        .unwrap_or(Exactness::Bits)
}

/// Any choice of e-nodes, not only the cheapest, must compute the same as the source graph: random
/// prices choose.
#[test]
fn every_alternative_is_right() {
    let mut wrong = BTreeSet::new();
    for (_, text) in FILES {
        for (rule, g) in cases(text) {
            let mut ins = convert::insert(&g).unwrap();
            let mut report = Report::default();
            saturate(&mut ins, g.n_nodes(), &Options::default(), &mut report);
            let exactness = exactness_of(&report);
            for seed in 0..12 {
                let mut rng = Rng(seed);
                let choice = extract::extract_by(&ins.terms, ins.root, &mut |_, _| {
                    crate::cost::Picos(rng.below(1000) as u64)
                })
                .unwrap();
                let new = convert::emit(&g, &ins, &choice, &BTreeMap::new()).unwrap();
                crate::ir::verify::verify(&new).unwrap();
                for n in [0, 1, 3] {
                    let values = if exactness < Exactness::Rounding {
                        &SPECIAL
                    } else {
                        &SPECIAL_IN_RANGE
                    };
                    // Its doc names its effect on hidden scores that are not finite.
                    let special = (seed % 2 == 0 && rule != "attention").then_some(values);
                    let inputs: Vec<Tensor> = g
                        .inputs
                        .iter()
                        .map(|v| random_tensor(&mut rng, g.ty(*v), n, special))
                        .collect();
                    let expected = crate::interp::run(&g, &inputs).unwrap();
                    let got = crate::interp::run(&new, &inputs)
                        .unwrap_or_else(|e| panic!("{rule}: {e}\n{new}"));
                    for (a, b) in expected.iter().zip(&got) {
                        if let Some(diff) = difference(a, b, exactness) {
                            wrong.insert(format!("{rule}: {diff}"));
                        }
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// The tanh form of GELU with other numbers is none.
#[test]
fn other_cubics_under_tanh_are_no_gelu() {
    let gelu = |text: &str| {
        let (file, _) = FILES[3].1.rsplit_once("## softmax").unwrap_or_default();
        let (_, last) = file.rsplit_once("## gelu\n").expect("a case of gelu");
        let body = last.split("## ").next().unwrap_or_default();
        let (from, to) = text.split_once(" -> ").expect("two texts");
        let changed = body.replace(from, to);
        assert!(from == to || changed != body, "{body}");
        let g = Graph::parse(&format!("graph \"gelu\" {{\n{changed}}}")).unwrap();
        let (new, _) = rewrite(&g, &Options::default()).unwrap();
        new.to_text(PrintOptions::SHORT).contains("gelu_tanh")
    };
    assert!(gelu("<0.044715> -> <0.044715>"));
    assert!(!gelu("<0.044715> -> <0.0452>"), "the cube's factor");
    assert!(!gelu("<0.7978846> -> <0.8>"), "the slope");
    assert!(
        !gelu("add(%7, %8) -> add(%6, %8)"),
        "a square in place of the cube"
    );
    assert!(!gelu("tanh(%10) -> tanh(%9)"), "a constant summand");
}

/// Products of a graph after rewriting.
fn n_products(text: &str) -> usize {
    let g = Graph::parse(&format!("graph \"products\" {{\n{text}}}")).unwrap();
    let (new, _) = rewrite(&g, &Options::default()).unwrap();
    let is_product = |(_, n): &(crate::ir::NodeId, &crate::ir::Node)| n.op == crate::ir::Op::MatMul;
    new.nodes().filter(is_product).count()
}

/// A layer read with several factors is computed once: the factors do not each scale a copy of its weights.
#[test]
fn layers_with_several_factors_stay_one_product() {
    let layer = r#"
  %0 = input "x": f32[n, 64]
  %1: f32[] = constant() {value = f32[] <0.25>}
  %2: f32[64, 256] = broadcast(%1) {shape = [64, 256]}
  %3: f32[n, 256] = matmul(%0, %2)
  %4: f32[256] = broadcast(%1) {shape = [256]}
  %5: f32[n, 256] = add(%3, %4)
  %6: f32[] = constant() {value = f32[] <1.702>}
  %7: f32[n, 256] = mul(%5, %6)
  %8: f32[n, 256] = sigmoid(%7)
"#;
    let own = r#"  %9: f32[n, 256] = mul(%5, %8)
  output "y" %9
"#;
    let halved = r#"  %9: f32[] = constant() {value = f32[] <0.5>}
  %10: f32[n, 256] = mul(%5, %9)
  %11: f32[n, 256] = mul(%10, %8)
  %12: f32[] = constant() {value = f32[] <0.3>}
  %13: f32[n, 256] = mul(%5, %12)
  %14: f32[n, 256] = tanh(%13)
  %15: f32[n, 256] = add(%11, %14)
  output "y" %15
"#;
    assert_eq!(n_products(&format!("{layer}{own}")), 1);
    assert_eq!(n_products(&format!("{layer}{halved}")), 1);
    let only = r#"  output "y" %8"#;
    assert_eq!(
        n_products(&format!(
            "{layer}{only}
"
        )),
        1
    );
}

/// Whole models give the same results before and after, within rounding.
#[test]
fn small_models_are_equal_before_and_after() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/models");
    for name in [
        "resnet_script",
        "mobilenet_dynamo",
        "vit_dynamo",
        "bert_script",
        "gpt2_dynamo",
        "llama_dynamo",
        "swin_script",
        "unet_dynamo",
    ] {
        let model = crate::onnx::load(folder.join(name).join("model.onnx")).unwrap();
        let g = model.graph(&Default::default()).unwrap();
        let (new, report) = rewrite(&g, &Options::default()).unwrap();
        assert!(report.after.time < report.before.time, "{name}: {report}");
        let mut inputs = Vec::new();
        for i in 0..g.inputs.len() {
            let file = folder
                .join(name)
                .join(format!("test_data_set_0/input_{i}.pb"));
            inputs.push(
                crate::onnx::tensor_from_pb(&std::fs::read(file).unwrap())
                    .unwrap()
                    .1,
            );
        }
        let (a, b) = (
            crate::interp::run(&g, &inputs).unwrap(),
            crate::interp::run(&new, &inputs).unwrap(),
        );
        for (a, b) in a.iter().zip(&b) {
            let diff = difference(a, b, Exactness::Rounding);
            assert!(diff.is_none(), "{name}: {}", diff.unwrap_or_default());
        }
    }
}

/// The same graph gives the same text and report every time.
#[test]
fn rewriting_is_deterministic() {
    for (_, g) in FILES.iter().flat_map(|(_, text)| cases(text)) {
        let once = rewrite(&g, &Options::default()).unwrap();
        let twice = rewrite(&g, &Options::default()).unwrap();
        assert_eq!((once.0.to_string(), once.1), (twice.0.to_string(), twice.1));
    }
}

/// Random graphs of all op classes compute the same before and after, for the cheapest choice and for random ones.
#[test]
fn random_graphs_are_equal_before_and_after() {
    for seed in 0..80 {
        let options = crate::testing::RandomOptions {
            n_nodes: 16,
            dtypes: vec![DType::F32],
            allow_empty_axes: seed % 5 == 0,
            n_variables: (seed % 3) as usize,
            ..Default::default()
        };
        let (mut g, inputs) = crate::testing::random_graph(seed, &options);
        g.order_state();
        let mut ins = convert::insert(&g).unwrap();
        saturate(
            &mut ins,
            g.n_nodes(),
            &Options::default(),
            &mut Report::default(),
        );
        let expected = crate::interp::run(&g, &inputs).unwrap();
        let mut rng = Rng(seed);
        for trial in 0..4 {
            let new = if trial == 0 {
                rewrite(&g, &Options::default()).unwrap().0
            } else {
                let choice = extract::extract_by(&ins.terms, ins.root, &mut |_, _| {
                    crate::cost::Picos(rng.below(1000) as u64)
                })
                .unwrap();
                convert::emit(&g, &ins, &choice, &BTreeMap::new()).unwrap()
            };
            crate::ir::verify::verify(&new).unwrap();
            let got = crate::interp::run(&new, &inputs)
                .unwrap_or_else(|e| panic!("seed {seed}: {e}\n{new}"));
            for (a, b) in expected.iter().zip(&got) {
                let diff = difference(a, b, Exactness::Rounding);
                assert!(
                    diff.is_none(),
                    "seed {seed}: {}\n{g}\n{new}",
                    diff.unwrap_or_default()
                );
            }
        }
    }
}

/// Graphs cut into small pieces compute the same, and the pieces are rewritten.
#[test]
fn pieces_of_a_graph_are_equal_before_and_after() {
    let mut fired = 0;
    for seed in 0..40 {
        let options = crate::testing::RandomOptions {
            n_nodes: 30,
            dtypes: vec![DType::F32],
            n_variables: (seed % 3) as usize,
            ..Default::default()
        };
        let (mut g, inputs) = crate::testing::random_graph(seed, &options);
        g.order_state();
        let limits = Limits {
            chunk: 3 + (seed as usize % 9),
            ..Limits::default()
        };
        let (new, report) = rewrite(
            &g,
            &Options {
                limits,
                ..Options::default()
            },
        )
        .unwrap();
        crate::ir::verify::verify(&new).unwrap();
        fired += report
            .phases
            .iter()
            .flat_map(|p| p.fired.values())
            .sum::<u64>();
        let (a, b) = (
            crate::interp::run(&g, &inputs).unwrap(),
            crate::interp::run(&new, &inputs).unwrap(),
        );
        for (a, b) in a.iter().zip(&b) {
            let diff = difference(a, b, Exactness::Rounding);
            assert!(
                diff.is_none(),
                "seed {seed}: {}\n{g}\n{new}",
                diff.unwrap_or_default()
            );
        }
    }
    assert!(fired > 50, "{fired}");
}

/// Control edges stay inside pieces.
#[test]
fn control_edges_survive_pieces() {
    let mut g = Graph::new("g");
    let origin = crate::ir::Origin::default();
    let mut v = g.add_input("x", crate::ir::Type::new(DType::F32, [4usize]));
    for _ in 0..20 {
        v = g
            .add1(crate::ir::Op::Map(crate::ir::ScalarOp::Sin), &[v], &origin)
            .unwrap();
    }
    g.add_output("y", v);
    g.node_mut(crate::ir::NodeId(12)).control = vec![crate::ir::NodeId(3)];
    let limits = Limits {
        chunk: 4,
        ..Limits::default()
    };
    let (new, _) = rewrite(
        &g,
        &Options {
            limits,
            ..Options::default()
        },
    )
    .unwrap();
    let edges: Vec<_> = new
        .nodes()
        .filter(|(_, n)| !n.control.is_empty())
        .map(|(id, n)| (id.0, n.control[0].0))
        .collect();
    assert_eq!(edges, [(12, 3)]);
}

/// A column of the op table that no rule reads would leave transposes where they are.
#[test]
fn transposes_pass_every_op_whose_axes_move() {
    use crate::codegen::testing::{self, Rng};
    use crate::ir::Op;
    use crate::ir::axes::Axes;

    let rules = rules::Phase::Layout.rules();
    let is_passed = |op: &Op| {
        let mut of_op = rules.iter().filter(|r| (r.root)(op));
        of_op.any(|r| r.name.starts_with("transpose-out-of-"))
    };
    let mut n_passed = 0;
    for (name, ..) in Op::catalogue() {
        for (op, _) in testing::cases(name, &mut Rng(1)) {
            // Transposes pass a reshape by a rule of its own: it depends on the shape below.
            let moves = !matches!(op.spec().axes, Axes::Fixed) || name == "reshape";
            assert_eq!(is_passed(&op), moves, "{name}");
            n_passed += usize::from(moves);
        }
    }
    assert!(n_passed > 20);
}
