//! Random placements pass the checker, the portfolio finds parallelism, and requests hold or fail
//! loudly.

use super::*;
use crate::DType;
use crate::cluster;
use crate::cost::LinkProfile;
use crate::error::Error;
use crate::error::ErrorKind;
use crate::ir::{DeviceRequest, GraphBuilder, Op, Requested, ScalarOp, ValueId};
use crate::testing::{Rng, random_wiring};
use std::collections::BTreeSet;

fn request(devices: &str) -> Request {
    Request {
        devices: DeviceSet::parse(devices, 2).unwrap(),
        ..Request::default()
    }
}

fn on(spec: &str) -> Requested {
    DeviceRequest::parse(spec).unwrap().into_requested()
}

fn place_err(g: &Graph, r: &Request) -> Error {
    place(g, r, &CostModel::default()).unwrap_err()
}

/// Two independent matrix products that are joined at the end.
fn two_branches() -> Graph {
    let mut b = GraphBuilder::new("branches");
    let x = b.input("x", DType::F32, [512usize, 512]);
    let branch = |b: &mut GraphBuilder, name: &str| -> ValueId {
        b.set_origin(&format!("/{name}/a/MatMul"));
        let y = b.matmul(x, x).unwrap();
        b.set_origin(&format!("/{name}/b/MatMul"));
        b.matmul(y, y).unwrap()
    };
    let (l, r) = (branch(&mut b, "left"), branch(&mut b, "right"));
    b.set_origin("/join");
    let y = b.matmul(l, r).unwrap();
    b.output("y", y);
    b.finish().unwrap()
}

#[test]
fn random_placements_are_right() {
    let mut rng = Rng(3);
    let costs = CostModel::default();
    for n in 0..300 {
        let mut g = random_wiring(&mut rng, 1 + n % 40);
        let n_devices = 1 + rng.below(4);
        let mut r = request(&format!("cpu:{n_devices},emu:1"));
        r.devices.link = LinkProfile {
            latency: Nanos(rng.below(3000) as u64),
            bytes_per_second: 10_000_000_000,
        };
        for id in (0..g.n_nodes()).map(|i| NodeId(i as u32)) {
            let is_state = !crate::schedule::variable_uses(g.node(id)).is_empty();
            if rng.one_in(6) && !is_state {
                g.node_mut(id).device = on(&format!("cpu:{}", rng.below(n_devices)));
            }
        }
        let p = place(&g, &r, &costs).unwrap();
        check::check(&g, &r, &p).unwrap_or_else(|e| panic!("{e}\n{g}\n{}", p.to_text(&g)));
        assert_eq!(p, place(&g, &r, &costs).unwrap());
        assert!(p.candidates.iter().all(|c| p.makespan <= c.score.1));
    }
}

#[test]
fn branches_run_side_by_side_unless_the_link_is_slow() {
    let (g, _) = cluster::cluster(
        &two_branches(),
        &cluster::Fusion::greedy(Default::default()),
    )
    .unwrap();
    let mut r = request("cpu:2");
    let p = place(&g, &r, &CostModel::default()).unwrap();
    let used: BTreeSet<usize> = p.nodes.iter().flatten().map(|n| n.device).collect();
    assert_eq!((used.len(), p.algorithm.as_str()), (2, "heft"));
    r.devices.link = LinkProfile {
        latency: Nanos(1_000_000_000),
        bytes_per_second: 1_000,
    };
    let p = place(&g, &r, &CostModel::default()).unwrap();
    assert_eq!(p.algorithm, "single /device:CPU:0");
}

#[test]
fn pins_hold_and_keep_clusters_apart() {
    let mut g = two_branches();
    let mut r = request("cpu:2");
    r.pins = vec![
        Pin::parse("^/left/=cpu:1").unwrap(),
        Pin::parse("/b/MatMul$=/device:CPU:0").unwrap(),
    ];
    apply_pins(&mut g, &mut r).unwrap();
    let (g, _) = cluster::cluster(&g, &cluster::Fusion::greedy(Default::default())).unwrap();
    let p = place(&g, &r, &CostModel::default()).unwrap();
    check::check(&g, &r, &p).unwrap();
    for (id, node) in g.nodes() {
        let device = p.device_of(id).unwrap();
        match node.origin.as_str() {
            "/left/a/MatMul" => assert_eq!(device, 1),
            "/left/b/MatMul" | "/right/b/MatMul" => assert_eq!(device, 0),
            _ => {}
        }
    }
}

#[test]
fn requests_that_cannot_be_had_are_errors() {
    let (g, _) = cluster::cluster(
        &two_branches(),
        &cluster::Fusion::greedy(Default::default()),
    )
    .unwrap();
    let mut pinned = request("cpu:2");
    pinned.pins = vec![Pin::parse("^/lift/a/MatMul$=cpu:0").unwrap()];
    let mut elsewhere = request("cpu:2,gpu:1");
    elsewhere.devices.devices[2].kernels = Kernels::default().without("cluster", "not written");
    elsewhere.pins = vec![
        Pin::parse("/left/a=cpu:2").unwrap(),
        Pin::parse("/right/a=gpu:0").unwrap(),
    ];
    let errors = [place_err(&g, &pinned), place_err(&g, &elsewhere)];
    insta::assert_snapshot!(errors.map(|e| e.to_string()).join("\n"), @r#"
    --pin "^/lift/a/MatMul$=/device:CPU:0" finds none of the model's 5 node paths (try: /left/a/MatMul, /left/b/MatMul, /right/a/MatMul)
    2 problems:
      - in node "/left/a/MatMul": pin "/left/a=/device:CPU:2": Cannot assign a device for operation /left/a/MatMul: /left/a/MatMul was explicitly assigned to /device:CPU:2 but available devices are [/device:CPU:0, /device:CPU:1, /device:GPU:0]. Make sure the device specification refers to a valid device. (try: /device:CPU:0, or --devices with the device in it)
      - in node "/right/a/MatMul": pin "/right/a=/device:GPU:0": Cannot assign a device for operation /right/a/MatMul: Could not satisfy explicit device specification '/device:GPU:0' because no supported kernel for GPU devices is available.
      kernels of cluster: CPU yes; GPU no (cluster: not written) (try: --devices with a CPU in it, or --fallback allow)
    "#);
    elsewhere.fallback = Fallback::Warn;
    let p = place(&g, &elsewhere, &CostModel::default()).unwrap();
    check::check(&g, &elsewhere, &p).unwrap();
    assert_eq!(p.warnings.len(), 2);
}

#[test]
fn memory_limits_are_kept_or_named() {
    let (g, _) = cluster::cluster(
        &two_branches(),
        &cluster::Fusion::greedy(Default::default()),
    )
    .unwrap();
    let mut r = request("cpu:2");
    r.devices.limit_memory("cpu:0", Bytes(1 << 20)).unwrap();
    let p = place(&g, &r, &CostModel::default()).unwrap();
    assert!(p.peak_bytes[0] <= Bytes(1 << 20));
    r.devices.limit_memory("cpu:*", Bytes(1000)).unwrap();
    let e = place_err(&g, &r);
    assert_eq!(e.kind(), ErrorKind::OutOfMemory);
    insta::assert_snapshot!(e, @r#"no placement found that keeps the memory limits; nearest: /device:CPU:0 needs 3.0 MiB of 1000 B; /left/a/MatMul alone needs 1.0 MiB while it runs: 1023.0 KiB more than /device:CPU:0 has, the largest device that it can be on; largest tensors: f32[512, 512] input "x" (1048576 bytes), f32[512, 512] result of "/left/a/MatMul" (1048576 bytes), f32[512, 512] result of "/left/b/MatMul" (1048576 bytes) (try: --mem /device:CPU:0=3145728 (3.0 MiB more), or a smaller batch)"#);
    assert!(r.devices.limit_memory("gpu:0", Bytes(1)).is_err());
}

#[test]
fn a_model_too_large_for_one_device_is_split() {
    let mut b = GraphBuilder::new("deep");
    let mut x = b.input("x", DType::F32, [1usize, 64]);
    for i in 0..8 {
        let w = b.constant(crate::Tensor::from_slice(&vec![i as f32; 64 * 64], &[64, 64]).unwrap());
        x = b.matmul(x, w).unwrap();
    }
    b.output("y", x);
    let (g, _) = cluster::cluster(
        &b.finish().unwrap(),
        &cluster::Fusion::greedy(Default::default()),
    )
    .unwrap();
    let mut r = request("cpu:3");
    // Weights take 16 KiB each, 128 KiB in all.
    r.devices.limit_memory("cpu", Bytes(50 << 10)).unwrap();
    let p = place(&g, &r, &CostModel::default()).unwrap();
    check::check(&g, &r, &p).unwrap();
    assert!(
        p.peak_bytes.iter().all(|b| *b <= Bytes(50 << 10)),
        "{:?}",
        p.peak_bytes
    );
    let e = place_err(
        &g,
        &Request {
            devices: DeviceSet {
                devices: r.devices.devices[..2].to_vec(),
                ..r.devices
            },
            ..Request::default()
        },
    );
    assert_eq!(e.kind(), ErrorKind::OutOfMemory);
}

/// `y` is used early, then what is between needs much memory, then `y` is used again: only a second
/// run of it keeps the limit.
fn early_and_late() -> Graph {
    let mut g = Graph::new("early and late");
    let x = g.add_input("x", crate::ir::Type::new(DType::F32, [4096usize]));
    let at = crate::ir::Origin::new;
    let y = g.add1(Op::Map(ScalarOp::Exp), &[x], &at("/y")).unwrap();
    let slice = Op::Slice {
        starts: vec![0.into()],
        sizes: vec![16.into()],
        steps: vec![1],
    };
    let early = g.add1(slice.clone(), &[y], &at("/early")).unwrap();
    let wide = g
        .add1(
            Op::Concat { axis: 0 },
            &[early, x, x, x, x, x, x],
            &at("/wide"),
        )
        .unwrap();
    let narrow = g.add1(slice, &[wide], &at("/narrow")).unwrap();
    let late = g
        .add1(Op::Concat { axis: 0 }, &[y, narrow], &at("/late"))
        .unwrap();
    g.add_output("late", late);
    g
}

#[test]
fn what_is_cheap_runs_again_to_keep_a_limit() {
    let g = early_and_late();
    let mut r = request("cpu:1");
    let free = place(&g, &r, &CostModel::default()).unwrap();
    assert!(free.copies.is_empty() && free.peak_bytes[0] > Bytes(7 << 14));
    let limit = Bytes((6 << 14) + 4096);
    r.devices.limit_memory("cpu", limit).unwrap();
    let p = place(&g, &r, &CostModel::default()).unwrap();
    check::check(&g, &r, &p).unwrap();
    assert!(p.peak_bytes[0] <= limit, "{:?}", p.peak_bytes);
    assert_eq!(p.algorithm.rsplit('+').next(), Some("recompute"));
    let copies: Vec<(NodeId, &[User])> = p
        .copies
        .iter()
        .map(|c| (c.node, c.users.as_slice()))
        .collect();
    assert_eq!(copies, [(NodeId(0), [User::Node(NodeId(4))].as_slice())]);
    let text = explain::explain(&p.subject(&g).unwrap()).to_string();
    assert!(
        text.contains("/y (copy)") && text.contains("again instead of holding the results"),
        "{text}"
    );
    // A plan says which nodes run again, and a replay keeps it.
    let plan = p.plan_text(&g).unwrap();
    assert!(
        plan.contains("\"/y (copy)\" = /device:CPU:0 runs /y for /late\n"),
        "{plan}"
    );
    let planned = Request {
        plan: Some(Plan::parse(&plan, "p.plan").unwrap()),
        ..r.clone()
    };
    let again = place(&g, &planned, &CostModel::default()).unwrap();
    assert_eq!(
        (&again.copies, &again.peak_bytes),
        (&p.copies, &p.peak_bytes)
    );
    assert_eq!(again.plan_text(&g).unwrap(), plan);
    // The schedule of the only device keeps the order, and so the limit.
    let (expanded, placed) = p.expand(&g).unwrap();
    let parts = crate::partition::partition(&expanded, &placed).unwrap();
    let needs = crate::schedule::Needs {
        limit_bytes: Some(limit.0 as usize),
        ..Default::default()
    };
    let schedule = crate::schedule::schedule(&parts[0].graph, &needs).unwrap();
    assert!(schedule.arena_bytes < 7 << 14, "{}", schedule.arena_bytes);
    // One that writes a variable cannot run again.
    let mut stateful = Graph::new("stateful");
    let x = stateful.add_input("x", crate::ir::Type::new(DType::F32, [4096usize]));
    let origin = crate::ir::Origin::new("/assign");
    let assign = Op::AssignVariable {
        container: String::new(),
        name: "v".into(),
    };
    let y = stateful.add1(assign, &[x], &origin).unwrap();
    stateful.add_output("y", y);
    r.devices.limit_memory("cpu", Bytes(1 << 10)).unwrap();
    assert_eq!(place_err(&stateful, &r).kind(), ErrorKind::OutOfMemory);
}

#[test]
fn what_a_device_has_no_room_for_is_parked_on_the_host() {
    let mut g = early_and_late();
    // What is asked for runs once, where it is asked for.
    for id in (0..g.n_nodes() as u32).map(NodeId) {
        g.node_mut(id).device = DeviceRequest::parse("/device:EMU:0")
            .unwrap()
            .into_requested();
    }
    let mut r = request("cpu:1,emu:1");
    let limit = Bytes((6 << 14) + 4096);
    r.devices.limit_memory("emu", limit).unwrap();
    let p = place(&g, &r, &CostModel::default()).unwrap();
    check::check(&g, &r, &p).unwrap();
    let emu = p
        .devices
        .iter()
        .position(|d| d.kind == gristmill_runtime::device::DeviceKind::Emu)
        .unwrap();
    assert!(p.peak_bytes[emu] <= limit, "{:?}", p.peak_bytes);
    assert_eq!(p.algorithm.rsplit('+').next(), Some("park"));
    let y = g.node(NodeId(0)).outputs[0];
    let copies: Vec<_> = p
        .copies
        .iter()
        .map(|c| (c.node, c.parked, c.placed.device, c.users.as_slice()))
        .collect();
    assert_eq!(
        copies,
        [(
            NodeId(0),
            Some(y),
            1 - emu,
            [User::Node(NodeId(4))].as_slice()
        )]
    );
    let text = explain::explain(&p.subject(&g).unwrap()).to_string();
    assert!(
        text.contains("/y (parked) (kept for another device): parked: "),
        "{text}"
    );
    let listed = p.to_text(&g);
    assert!(
        listed.contains("results that are parked on another device for a while: 1"),
        "{listed}"
    );
    assert!(
        listed.contains(" keep @ \"/y\": parked: ")
            && listed.contains("instead of holding 16.0 KiB"),
        "{listed}"
    );
    // There and back are two transfers, and the memory plan keeps the limit.
    let (expanded, placed) = p.expand(&g).unwrap();
    let parts = crate::partition::partition(&expanded, &placed).unwrap();
    crate::partition::check::check(&expanded, &placed, &parts).unwrap();
    let kinds = |part: &crate::partition::Part| -> Vec<&str> {
        let moves = part
            .graph
            .nodes()
            .filter(|(_, n)| n.op.class() == crate::ir::OpClass::Transfer);
        moves.map(|(_, n)| n.op.name()).collect()
    };
    assert_eq!(
        (kinds(&parts[emu]), kinds(&parts[1 - emu])),
        (vec!["send", "recv"], vec!["recv", "send"])
    );
    let needs = crate::schedule::Needs {
        limit_bytes: Some(limit.0 as usize),
        ..Default::default()
    };
    let schedule = crate::schedule::schedule(&parts[emu].graph, &needs).unwrap();
    assert!(schedule.arena_bytes < 7 << 14, "{}", schedule.arena_bytes);
    // A plan says what is offloaded; without that line it does not keep the limit.
    let plan = p.plan_text(&g).unwrap();
    let line = "\"/y (parked)\" = /device:CPU:0 parks /y for /late\n";
    assert!(plan.contains(line), "{plan}");
    let planned = |text: &str| Request {
        plan: Some(Plan::parse(text, "p.plan").unwrap()),
        ..r.clone()
    };
    let again = place(&g, &planned(&plan), &CostModel::default()).unwrap();
    assert_eq!(
        (&again.copies, &again.peak_bytes),
        (&p.copies, &p.peak_bytes)
    );
    assert_eq!(again.plan_text(&g).unwrap(), plan);
    let without = planned(&plan.replace(line, ""));
    assert_eq!(place_err(&g, &without).kind(), ErrorKind::OutOfMemory);
    let wrong = place_err(&g, &planned(&plan.replace("parks /y", "parks /narrow")));
    assert!(
        wrong.to_string().contains("/late takes") || wrong.kind() == ErrorKind::OutOfMemory,
        "{wrong}"
    );
}

#[test]
fn users_of_a_variable_stay_together() {
    let mut b = GraphBuilder::new("state");
    let read = Op::ReadVariable {
        container: String::new(),
        name: "v".into(),
        dtype: DType::F32,
        shape: vec![4.into()],
        initial: None,
    };
    let x = b.with_device("cpu:1", |b| b.add1(read, &[])).unwrap();
    let y = b.map(ScalarOp::Neg, &[x]).unwrap();
    let z = b
        .add1(
            Op::AssignVariable {
                container: String::new(),
                name: "v".into(),
            },
            &[y],
        )
        .unwrap();
    b.output("z", z);
    let g = b.finish().unwrap();
    let r = request("cpu:2");
    let p = place(&g, &r, &CostModel::default()).unwrap();
    check::check(&g, &r, &p).unwrap();
    assert_eq!(
        (p.device_of(NodeId(0)), p.device_of(NodeId(2))),
        (Some(1), Some(1))
    );
    assert!(p.warnings.is_empty());
}

#[test]
fn text_form() {
    let (g, _) = cluster::cluster(
        &two_branches(),
        &cluster::Fusion::greedy(Default::default()),
    )
    .unwrap();
    let mut r = request("cpu:2");
    for d in &mut r.devices.devices {
        d.profile = crate::cost::DeviceProfile::cpu(gristmill_kernels::Isa::Avx2, 1);
    }
    insta::assert_snapshot!(place(&g, &r, &CostModel::default()).unwrap().to_text(&g), @r#"
    placement "branches": heft, predicted 7.97 ms
      optimal for these kernels: the critical-path bound is 7.97 ms
      /device:CPU:0: peak 3.0 MiB
      /device:CPU:1: peak 2.0 MiB
      candidate single /device:CPU:0: 13.10 ms on 1 device
      candidate simple: 13.10 ms on 1 device
      candidate heft: 7.97 ms on 2 devices
    /device:CPU:0 0 ns..2.62 ms cluster contract @ "/left/a/MatMul": least makespan
    /device:CPU:1 0 ns..2.62 ms cluster contract @ "/right/a/MatMul": least makespan
    /device:CPU:0 2.62 ms..5.24 ms cluster contract @ "/left/b/MatMul": least makespan
    /device:CPU:1 2.62 ms..5.24 ms cluster contract @ "/right/b/MatMul": least makespan
    /device:CPU:0 5.35 ms..7.97 ms cluster contract @ "/join": least makespan
    "#);
}

#[test]
fn errors_name_the_lines_of_scopes() {
    let mut b = GraphBuilder::new("g");
    let x = b.input("x", DType::F32, [2usize]);
    let neg = |b: &mut GraphBuilder| b.map(ScalarOp::Neg, &[x]);
    let line = line!();
    let y = b.with_device("/cpu:0", neg).unwrap();
    let z = b
        .colocate_with(y, |b| b.with_device("/cpu:1", neg))
        .unwrap();
    b.output("y", y);
    b.output("z", z);
    let e = place_err(&b.finish().unwrap(), &request("cpu:2")).to_string();
    let at = |n: u32| format!("{}:{}", file!(), line + n);
    for part in [
        "Cannot merge devices with incompatible ids: '/device:CPU:0' and '/device:CPU:1'"
            .to_owned(),
        format!(
            "(asked for /device:CPU:0 by scope \"/device:CPU:0\" at {})",
            at(1)
        ),
        format!("by colocate_with at {} -- ", at(3)),
        format!(
            "(asked for /device:CPU:1 by scope \"/device:CPU:1\" at {})",
            at(3)
        ),
    ] {
        assert!(e.contains(&part), "{part:?} in {e}");
    }
    let mut b = GraphBuilder::new("g");
    let x = b.input("x", DType::F32, [2usize]);
    let neg = |b: &mut GraphBuilder| b.map(ScalarOp::Neg, &[x]);
    let inner = |b: &mut GraphBuilder| b.with_device("/cpu:7", neg);
    let inner_line = line!() - 1;
    let y = b.with_device("/job:localhost", inner).unwrap();
    let line = line!() - 1;
    b.output("y", y);
    let e = place_err(&b.finish().unwrap(), &request("cpu:2")).to_string();
    let scopes = format!(
        "scope \"/device:CPU:7\" at {0}:{inner_line}, scope \"/job:localhost\" at {0}:{line}: ",
        file!()
    );
    assert!(
        e.contains(&scopes) && e.contains("refers to a valid device"),
        "{e}"
    );
}

#[test]
fn plans_of_models_are_replayed() {
    let (g, _) = cluster::cluster(
        &two_branches(),
        &cluster::Fusion::greedy(Default::default()),
    )
    .unwrap();
    let mut r = request("cpu:2");
    let first = place(&g, &r, &CostModel::default()).unwrap();
    let text = first.plan_text(&g).unwrap();
    let devices = |p: &Placement| {
        p.nodes
            .iter()
            .map(|n| n.as_ref().map(|n| n.device))
            .collect::<Vec<_>>()
    };
    r.plan = Some(Plan::parse(&text, "p.plan").unwrap());
    let again = place(&g, &r, &CostModel::default()).unwrap();
    check::check(&g, &r, &again).unwrap();
    assert_eq!(
        (devices(&again), again.algorithm.as_str()),
        (devices(&first), "plan")
    );
    assert!(again.lower_bound.0 <= again.makespan);
    // Changed by hand: everything on the second device.
    let moved = text.replace("CPU:0\n", "CPU:1\n");
    r.plan = Some(Plan::parse(&moved, "p.plan").unwrap());
    let moved = place(&g, &r, &CostModel::default()).unwrap();
    assert!(moved.nodes.iter().flatten().all(|n| n.device == 1));
    let reasons = crate::place::explain::explain(&moved.subject(&g).unwrap()).nodes;
    assert!(
        reasons
            .iter()
            .all(|n| n.reason.starts_with("plan p.plan, line ") && n.alternatives.len() == 2),
        "{reasons:?}"
    );
}

#[test]
fn plans_against_a_pin_or_of_another_model_are_errors() {
    let (g, _) = cluster::cluster(
        &two_branches(),
        &cluster::Fusion::greedy(Default::default()),
    )
    .unwrap();
    let mut r = request("cpu:2");
    let text = place(&g, &r, &CostModel::default())
        .unwrap()
        .plan_text(&g)
        .unwrap();
    r.plan = Some(Plan::parse(&text.replace("CPU:1\n", "CPU:7\n"), "p.plan").unwrap());
    let e = place_err(&g, &r);
    assert_eq!(e.kind(), ErrorKind::InvalidInput);
    assert!(
        e.to_string().contains(
            "there is no device \"/device:CPU:7\"; available: /device:CPU:0, /device:CPU:1"
        ),
        "{e}"
    );
    r.plan = Some(Plan::parse(&text.replace("CPU:1\n", "CPU:0\n"), "p.plan").unwrap());
    r.pins = vec![Pin::parse("/join=/cpu:1").unwrap()];
    let e = place_err(&g, &r).to_string();
    assert!(
        e.contains("/join cannot be on /device:CPU:0: pin \"/join=/device:CPU:1\"; it can be on /device:CPU:1"),
        "{e}"
    );
    r.plan = Some(Plan::parse(&text.replace("/join", "/joint"), "p.plan").unwrap());
    let e = place_err(&g, &r).to_string();
    assert!(
        e.contains("there is no node \"/joint\" to place (try: /join"),
        "{e}"
    );
}
