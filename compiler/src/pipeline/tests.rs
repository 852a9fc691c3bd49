//! Texts of the stages of a small model, pinned. Stages that depend on the machine (predicted times, packed sizes) are not.

use super::*;
use crate::ir::{GraphBuilder, Layout, Op, ScalarOp, Window};
use crate::place::Pin;
use crate::testing::Setup;
use crate::{DType, Tensor};
use gristmill_runtime::program::{Program, StepKind};
use std::time::Duration;

fn ramp(shape: &[usize]) -> Tensor {
    let n = shape.iter().product::<usize>();
    Tensor::from_slice(
        &(0..n).map(|i| (i % 7) as f32 - 3.0).collect::<Vec<_>>(),
        shape,
    )
    .unwrap()
}

/// Convolution with bias and relu, then a linear layer whose activation is written out as `x * sigmoid(x)`.
fn small_model() -> Graph {
    let mut b = GraphBuilder::new("small");
    b.set_origin("/conv");
    let x = b.input("x", DType::F32, [1usize, 2, 4, 4]);
    let w = b.constant(ramp(&[3, 2, 3, 3]));
    let window = Window {
        strides: vec![1; 2],
        dilations: vec![1; 2],
        pads_low: vec![1; 2],
        pads_high: vec![1; 2],
    };
    let y = b
        .add1(
            crate::ir::Op::Conv {
                window,
                groups: 1,
                layout: Layout::ChannelsFirst,
            },
            &[x, w],
        )
        .unwrap();
    let bias = b.constant(ramp(&[1, 3, 1, 1]));
    let y = b.add_(y, bias).unwrap();
    let y = b.map(ScalarOp::Relu, &[y]).unwrap();
    b.set_origin("/linear");
    let y = b.reshape(y, [1usize, 48]).unwrap();
    let w = b.constant(ramp(&[48, 2]));
    let y = b.matmul(y, w).unwrap();
    let s = b.map(ScalarOp::Sigmoid, &[y]).unwrap();
    let y = b.mul(s, y).unwrap();
    b.output("y", y);
    b.finish().unwrap()
}

/// Two devices; stages are checked and kept.
fn two_devices() -> Setup {
    Setup::on("cpu:2", 2).with(|o| (o.keep_stages, o.check) = (true, true))
}

fn lowered() -> Lowered {
    let pins = ["/linear=/device:CPU:1", "/conv=/device:CPU:0"];
    let setup = two_devices().with(|o| o.pins = pins.map(|pin| Pin::parse(pin).unwrap()).into());
    lower(small_model(), setup.config()).unwrap()
}

#[test]
fn stages_print_as_pinned() {
    let lowered = lowered();
    for stage in [
        Stage::Graph,
        Stage::Rewritten,
        Stage::Clusters,
        Stage::Partitions,
    ] {
        insta::assert_snapshot!(stage.name(), lowered.text(stage, false).unwrap());
    }
}

#[test]
fn other_stages_print_the_same_every_time() {
    let (a, b) = (lowered(), lowered());
    for stage in [Stage::Placed, Stage::Schedule, Stage::Clif, Stage::Asm] {
        let text = a.text(stage, false).unwrap();
        assert!(!text.is_empty());
        assert_eq!(text, b.text(stage, false).unwrap(), "{}", stage.name());
    }
}

#[test]
fn stages_that_were_not_kept_are_an_error() {
    let lowered = lower(small_model(), Setup::default().config()).unwrap();
    insta::assert_snapshot!(lowered.text(Stage::Graph, false).unwrap_err(), @"the stages were not kept (try: Options::keep_stages)");
}

#[test]
fn a_budget_that_is_over_gives_a_plainer_program_and_says_so() {
    let run = |budget| {
        let setup = two_devices().with(|o| o.budget = budget);
        let lowered = lower(small_model(), setup.config()).unwrap();
        let x = ramp(&[1, 2, 4, 4]);
        let y = setup
            .compile(&small_model())
            .unwrap()
            .run([("x", x)])
            .unwrap()["y"]
            .clone();
        (
            lowered.text(Stage::Clusters, true).unwrap(),
            lowered.report.warnings,
            y,
        )
    };
    let (full, none, expected) = run(None);
    assert!(none.is_empty(), "{none:?}");
    let (enough, none, _) = run(Some(Duration::from_secs(100)));
    assert!(none.is_empty() && enough == full, "{none:?}");
    let (plain, warnings, y) = run(Some(Duration::ZERO));
    assert_ne!(plain, full);
    insta::assert_snapshot!(warnings.join("\n"), @r"
    the budget of 0 ns was over: not all rewrite rules were tried
    the budget of 0 ns was over: kernels are fused as at --opt-level 1
    the budget of 0 ns was over: products are joined as for one device
    the budget of 0 ns was over: the placement is not refined
    ");
    let (y, expected) = (y.as_slice::<f32>(), expected.as_slice::<f32>());
    assert!(
        y.iter()
            .zip(expected)
            .all(|(a, b)| (a - b).abs() <= 1e-4 * b.abs().max(1.0)),
        "{y:?} {expected:?}"
    );
}

#[test]
fn every_cluster_is_measured_and_found_again() {
    let setup = Setup::on("cpu:2", 2);
    let compiled = setup.compile(&small_model()).unwrap();
    let x = [ramp(&[1, 2, 4, 4])];
    let mut measured = crate::cost::Measured::default();
    let planned = compiled.plan(&x).unwrap();
    let kernels = planned
        .clusters
        .nodes()
        .filter(|(_, n)| matches!(n.op, crate::ir::Op::Cluster { .. }))
        .count();
    let times = compiled.measure(&x, 5, &mut measured).unwrap();
    assert_eq!(times.len(), kernels);
    let is_whole = |t: &crate::ClusterTime| t.predicted.0 > 0 && t.measured.0 > 0;
    assert!(times.iter().all(is_whole), "{times:?}");
    assert!(
        measured
            .samples()
            .all(|(_, s)| s.count % 5 == 0 && s.sum.0 > 0 && s.analytic.0 > 0)
    );
    // Each cluster of a graph that is placed anew has its sample: its estimate is not that of a class alone.
    let seen: BTreeMap<_, _> = measured
        .samples()
        .map(|(key, s)| (*key, s.clone()))
        .collect();
    for (id, node) in planned
        .clusters
        .nodes()
        .filter(|(_, n)| matches!(n.op, crate::ir::Op::Cluster { .. }))
    {
        let device = planned.placement.device_of(id).unwrap();
        let profile =
            crate::cost::measured::ProfileKey::of(&setup.settings.devices.devices[device].profile);
        assert!(
            seen.contains_key(&(profile, crate::cost::signature(&planned.clusters, node))),
            "{}",
            node.origin
        );
    }
    let measured = Arc::new(measured);
    let again = compiled.replan(&x, &measured, 100).unwrap();
    let next = setup
        .with(|o| o.measured = measured.clone())
        .compile(&small_model())
        .unwrap()
        .replan(&x, &measured, 100)
        .unwrap();
    assert!(
        !next.adopted && next.n_moved == 0,
        "what these times say is done already: {again:?}"
    );
}

/// A recurrence over the rows of `x` by weights `w`, which an inner loop of as many steps reads too.
fn recurrence(rows: usize) -> Graph {
    let scan = |scanned| Op::Scan {
        carried: 1,
        scanned,
        length: rows.into(),
        reverse: false,
    };
    let cell = |name: &str, scanned: usize, inner: Option<Graph>| {
        let mut b = GraphBuilder::new(name);
        let h = b.input("h", DType::F32, [3usize, 32]);
        let x = (scanned == 1).then(|| b.input("x", DType::F32, [3usize, 32]));
        let w = b.input("w", DType::F32, [32usize, 32]);
        let y = b.matmul(h, w).unwrap();
        let mut y = x.map_or(y, |x| b.add_(y, x).unwrap());
        if let Some(inner) = inner {
            y = b.add_with_regions(scan(0), &[y, w], vec![inner]).unwrap()[0];
        }
        let y = b.map(ScalarOp::Tanh, &[y]).unwrap();
        b.output("h", y);
        b.finish().unwrap()
    };
    let outer = cell("outer", 1, Some(cell("inner", 0, None)));
    let mut b = GraphBuilder::new("recurrence");
    let h = b.input("h", DType::F32, [3usize, 32]);
    let x = b.input("x", DType::F32, [rows, 3, 32]);
    let w = b.input("w", DType::F32, [32usize, 32]);
    let y = b
        .add_with_regions(scan(1), &[h, x, w], vec![outer])
        .unwrap();
    b.output("y", y[0]);
    b.finish().unwrap()
}

/// Steps of each loop, outer ones first, that run in its first iteration alone.
fn steps_run_once(program: &Program) -> Vec<usize> {
    let steps = program.partitions.iter().flat_map(|p| &p.steps);
    let loops = steps.filter_map(|step| match &step.kind {
        StepKind::Loop(repeated) => Some(repeated),
        _ => None,
    });
    loops
        .flat_map(|l| [vec![l.once.len()], steps_run_once(&l.body)].concat())
        .collect()
}

#[test]
fn weights_of_a_loop_are_packed_in_its_first_iteration() {
    for threads in [1, 2] {
        let setup = Setup::on("cpu", threads).with(|o| o.check = true);
        let lowered = lower(recurrence(4), setup.config()).unwrap();
        assert_eq!(steps_run_once(&lowered.program), [1, 1]);
        let compiled = setup.compile(&recurrence(4)).unwrap();
        for seed in 0..3 {
            let tensor = |shape: &[usize]| {
                let n = shape.iter().product::<usize>();
                let x = (0..n).map(|i| ((i + 5 * seed) as f32 * 0.37).sin() * 0.3);
                Tensor::from_slice(&x.collect::<Vec<f32>>(), shape).unwrap()
            };
            // Weights differ from run to run.
            let inputs = [&[3, 32][..], &[4, 3, 32], &[32, 32]].map(tensor);
            let want = crate::interp::run(&recurrence(4), &inputs).unwrap();
            let got = compiled.run_ordered(&inputs).unwrap();
            let pairs = got["y"]
                .as_slice::<f32>()
                .iter()
                .zip(want[0].as_slice::<f32>());
            pairs.for_each(|(a, b)| assert!((a - b).abs() < 1e-5, "{a} {b}"));
        }
    }
}
