//! Random legal placements partition into graphs that the checkers accept; broken ones are refused.

use super::*;
use crate::cost::CostModel;
use crate::ir::print::PrintOptions;
use crate::ir::{GraphBuilder, ScalarOp};
use crate::place::collectives::Way;
use crate::place::{CopiedNode, DeviceSet, Placed, Request, User, place};
use crate::schedule::{self, Needs, schedule, variable_uses};
use crate::testing::{Rng, random_wiring};
use gristmill_runtime::device::DeviceKind;

fn cpus(n: usize) -> Vec<DeviceName> {
    (0..n as u32)
        .map(|i| DeviceName::local(DeviceKind::Cpu, i))
        .collect()
}

/// A random device for each node; users of variables together.
fn random_placement(rng: &mut Rng, g: &Graph, n_devices: usize) -> Placement {
    let home = rng.below(n_devices);
    let device = |(_, n): (NodeId, &Node)| match n.op {
        Op::Constant { .. } => None,
        _ if !variable_uses(n).is_empty() => Some(home),
        _ => Some(rng.below(n_devices)),
    };
    let devices: Vec<Option<usize>> = g.nodes().map(device).collect();
    Placement::by_hand(cpus(n_devices), &devices)
}

/// True when receives have no dependencies and sends no dependants, except through control edges,
/// variables and collectives.
fn crossing_waits_for_producers_only(part: &Part, s: &schedule::Schedule) -> bool {
    let node = |i: usize| match s.steps[i].action {
        schedule::Action::Node(id) => Some(part.graph.node(id)),
        schedule::Action::CopyToOutput { .. } => None,
    };
    let is_free = |n: &&Node| {
        n.control.is_empty()
            && variable_uses(n).is_empty()
            && !matches!(n.op, Op::Collective { .. })
    };
    s.steps.iter().enumerate().all(|(i, step)| {
        let Some(own) = node(i).filter(is_free) else {
            return true;
        };
        let mut before = step.deps.iter().filter_map(|&d| node(d as usize));
        match own.op {
            Op::Recv { .. } => before.all(|n| matches!(n.op, Op::Collective { .. })),
            _ => !before.any(|n| matches!(n.op, Op::Send { .. })),
        }
    })
}

/// Partition and schedules of a placement, all checked.
fn check_all(g: &Graph, placement: &Placement) -> Vec<Part> {
    let parts = partition(g, placement).unwrap();
    let show = |e: Error| -> ! { panic!("{e}\n{g}\n{}", to_text(&parts, PrintOptions::SHORT)) };
    check::check(g, placement, &parts).unwrap_or_else(|e| show(e));
    let mut arenas = [0, 0];
    for has_disjoint_transfers in [false, true] {
        let needs = Needs {
            has_disjoint_transfers,
            ..Needs::default()
        };
        let schedules: Vec<_> = parts
            .iter()
            .map(|p| schedule(&p.graph, &needs).unwrap())
            .collect();
        for (p, s) in parts.iter().zip(&schedules) {
            crate::ir::verify::verify(&p.graph).unwrap_or_else(|e| show(e));
            schedule::check::check(&p.graph, &needs, s).unwrap_or_else(|e| show(e));
            assert!(
                !has_disjoint_transfers || crossing_waits_for_producers_only(p, s),
                "{}",
                s.to_text(&p.graph)
            );
        }
        check::check_schedules(g, &parts, &schedules).unwrap_or_else(|e| show(e));
        arenas[usize::from(has_disjoint_transfers)] =
            schedules.iter().map(|s| s.live_bytes).sum::<usize>();
    }
    assert!(arenas[0] <= arenas[1]);
    parts
}

#[test]
fn random_partitions_are_right() {
    let mut rng = Rng(4);
    for n in 0..300 {
        let g = random_wiring(&mut rng, 1 + n % 40);
        let n_devices = 1 + rng.below(4);
        let placement = random_placement(&mut rng, &g, n_devices);
        check_all(&g, &placement);
    }
}

#[test]
fn placed_graphs_partition() {
    let mut rng = Rng(5);
    for n in 0..100 {
        let g = random_wiring(&mut rng, 1 + n % 40);
        let mut r = Request {
            devices: DeviceSet::parse("cpu:3", 3).unwrap(),
            ..Request::default()
        };
        r.devices.link.latency = crate::cost::Nanos(rng.below(200) as u64);
        let placement = place(&g, &r, &CostModel::default()).unwrap();
        let (g, placement) = placement.expand(&g).unwrap();
        check_all(&g, &placement);
    }
}

/// Copies of random nodes, and parked results of them, on random devices, each for some of the users of its node there and elsewhere.
#[test]
fn graphs_with_copies_partition() {
    let mut rng = Rng(8);
    let mut n_copies = 0;
    for n in 0..200 {
        let g = random_wiring(&mut rng, 1 + n % 40);
        let n_devices = 1 + rng.below(4);
        let mut placement = random_placement(&mut rng, &g, n_devices);
        let users = g.users();
        for (id, node) in g
            .nodes()
            .filter(|(_, n)| variable_uses(n).is_empty() && !matches!(n.op, Op::Constant { .. }))
        {
            let parked = node.outputs.first().copied().filter(|_| rng.one_in(3));
            let taken = node
                .outputs
                .iter()
                .filter(|v| parked.is_none_or(|p| p == **v));
            let all: BTreeSet<NodeId> = taken
                .flat_map(|v| users[v.0 as usize].iter().map(|u| u.0))
                .collect();
            let users: Vec<User> = all
                .into_iter()
                .filter(|_| rng.one_in(2))
                .map(User::Node)
                .collect();
            if rng.one_in(3) && !users.is_empty() {
                let placed = placement.nodes[id.0 as usize].clone().unwrap();
                let placed = Placed {
                    device: rng.below(n_devices),
                    ..placed
                };
                placement.copies.push(CopiedNode {
                    node: id,
                    parked,
                    placed,
                    users,
                });
            }
        }
        n_copies += placement.copies.len();
        let (expanded, placed) = placement.expand(&g).unwrap();
        assert_eq!(expanded.n_nodes(), g.n_nodes() + placement.copies.len());
        crate::ir::verify::verify(&expanded).unwrap();
        check_all(&expanded, &placed);
        assert!(placement.copies.is_empty() || partition(&g, &placement).is_err());
    }
    assert!(n_copies > 200, "only {n_copies} copies");
}

#[test]
fn the_checker_sees_broken_transfers() {
    let mut rng = Rng(6);
    let mut seen = [0usize; 3];
    let mut tried = 0;
    while tried < 100 {
        let g = random_wiring(&mut rng, 20);
        let placement = random_placement(&mut rng, &g, 3);
        let good = partition(&g, &placement).unwrap();
        let recv_at = |p: &Part| {
            p.graph
                .nodes()
                .find(|(_, n)| matches!(n.op, Op::Recv { .. }))
                .map(|(id, _)| id)
        };
        let Some((p, recv)) = good
            .iter()
            .enumerate()
            .find_map(|(p, part)| Some((p, recv_at(part)?)))
        else {
            continue;
        };
        tried += 1;
        let mut renamed = good.clone();
        if let Op::Recv { key, .. } = &mut renamed[p].graph.node_mut(recv).op {
            key.push('x');
        }
        let mut swapped = good.clone();
        let user = swapped[p]
            .graph
            .nodes()
            .find(|(_, n)| n.inputs.contains(&good[p].graph.node(recv).outputs[0]))
            .map(|(id, _)| id);
        let mut lost = good;
        lost.remove(p);
        if let Some(user) = user {
            swapped[p].nodes[user.0 as usize] = None;
        }
        for (seen, parts) in seen.iter_mut().zip([&renamed, &swapped, &lost]) {
            *seen += usize::from(check::check(&g, &placement, parts).is_err());
        }
    }
    assert_eq!((seen[0], seen[2]), (100, 100));
    assert!(seen[1] >= 90, "{} of 100", seen[1]);
}

#[test]
fn the_checker_sees_rings_through_reused_memory() {
    let mut rng = Rng(7);
    let mut found = false;
    for _ in 0..200 {
        let g = random_wiring(&mut rng, 24);
        let placement = random_placement(&mut rng, &g, 2);
        let parts = partition(&g, &placement).unwrap();
        let mut schedules: Vec<_> = parts
            .iter()
            .map(|p| schedule(&p.graph, &Needs::default()).unwrap())
            .collect();
        // Each part waits for all that it receives before it sends anything: a cycle as soon as tensors
        // go both ways.
        for (part, s) in parts.iter().zip(&mut schedules) {
            let is = |action: schedule::Action, send: bool| match action {
                schedule::Action::Node(id) => match part.graph.node(id).op {
                    Op::Send { .. } => send,
                    Op::Recv { .. } => !send,
                    _ => false,
                },
                _ => false,
            };
            let recvs: Vec<u32> = (0..s.steps.len())
                .filter(|&i| is(s.steps[i].action, false))
                .map(|i| i as u32)
                .collect();
            s.steps
                .iter_mut()
                .filter(|step| is(step.action, true))
                .for_each(|step| step.deps.extend(&recvs));
        }
        found |= check::check_schedules(&g, &parts, &schedules).is_err();
    }
    assert!(found);
}

/// A step of an optimiser on the first device, and a pick on the second, which may fail, after what it sends.
fn update_beside_a_pick() -> (Graph, Placement) {
    let mut b = GraphBuilder::new("update");
    let x = b.input("x", DType::F32, [4usize]);
    let at = b.input("at", DType::I64, [1usize]);
    let old = b.read_variable("v", DType::F32, [4usize]).unwrap();
    let y = b.map(ScalarOp::Exp, &[x]).unwrap();
    let new = b.add_(old, y).unwrap();
    b.assign_variable("v", new).unwrap();
    let z = b.add1(Op::Gather { axis: 0 }, &[y, at]).unwrap();
    b.output("z", z);
    let g = b.finish().unwrap();
    let on = |n: &Node| usize::from(matches!(n.op, Op::Map(ScalarOp::Exp) | Op::Gather { .. }));
    let devices: Vec<_> = g.nodes().map(|(_, n)| Some(on(n))).collect();
    let placement = Placement::by_hand(cpus(2), &devices);
    (g, placement)
}

#[test]
fn the_checker_sees_updates_that_do_not_wait_for_other_parts() {
    let (g, placement) = update_beside_a_pick();
    let schedules = |parts: &[Part]| -> Vec<_> {
        let of = |p: &Part| {
            let adds = p
                .graph
                .nodes()
                .filter(|(_, n)| n.op == Op::Map(ScalarOp::Add));
            let needs = Needs {
                has_residents: true,
                updates_in_place: true,
                in_place: adds.map(|(id, _)| (id, vec![(0, 0)])).collect(),
                ..Needs::default()
            };
            let s = schedule(&p.graph, &needs).unwrap();
            schedule::check::check(&p.graph, &needs, &s).unwrap();
            s
        };
        parts.iter().map(of).collect()
    };
    let apart = partition(&g, &placement).unwrap();
    let error = check::check_schedules(&g, &apart, &schedules(&apart)).unwrap_err();
    let expected = "variable 0 is changed in place before what may fail on /device:CPU:1 (gather)";
    assert!(error.to_string().contains(expected), "{error}");
    let mut joined = apart;
    add_tokens(&mut joined).unwrap();
    check::check(&g, &placement, &joined).unwrap();
    let mut made = schedules(&joined);
    assert_eq!(made[0].in_place.len(), 1);
    check::check_schedules(&g, &joined, &made).unwrap();
    // A second look adds nothing.
    let mut again = joined.clone();
    add_tokens(&mut again).unwrap();
    assert_eq!(again, joined);
    // The update forgets the token, and a device is another one.
    let last = made[0].steps.len() - 2;
    made[0].steps[last].deps.retain(|&d| d != last as u32 - 1);
    check::check_schedules(&g, &joined, &made).unwrap_err();
    let made = schedules(&joined);
    joined[1].device = DeviceName::local(DeviceKind::Gpu, 0);
    let error = check::check_schedules(&g, &joined, &made).unwrap_err();
    let expected = "variables are changed in place beside /device:GPU:0";
    assert!(error.to_string().contains(expected), "{error}");
}

#[test]
fn one_transfer_per_tensor_and_device() {
    let mut b = GraphBuilder::new("fan");
    b.set_origin("/exp");
    let x = b.input("x", DType::F32, [4usize]);
    let y = b.map(ScalarOp::Exp, &[x]).unwrap();
    b.set_origin("/left");
    let l = b.map(ScalarOp::Neg, &[y]).unwrap();
    b.set_origin("/right");
    let r = b.map(ScalarOp::Abs, &[y]).unwrap();
    b.set_origin("/join");
    let z = b.add_(l, r).unwrap();
    b.output("z", z);
    b.output("x", x);
    let mut g = b.finish().unwrap();
    g.node_mut(NodeId(3)).control.push(NodeId(0));
    let placement = Placement::by_hand(cpus(2), &[Some(0), Some(1), Some(1), Some(0)]);
    let parts = check_all(&g, &placement);
    insta::assert_snapshot!(to_text(&parts, PrintOptions::SHORT), @r#"
    // /device:CPU:0: inputs [0], outputs [0 1]
    graph "fan" {
      %0 = input "x": f32[4]
      %1: f32[4] = exp(%0) on "/device:CPU:0" @ "/exp"
      %2: f32[4] = send(%1) {key = "v1", to = "/device:CPU:1"} on "/device:CPU:0" @ "/exp"
      %3: f32[4] = recv() {key = "v2", from = "/device:CPU:1", dtype = f32, shape = [4]} on "/device:CPU:0" @ "/left"
      %4: f32[4] = recv() {key = "v3", from = "/device:CPU:1", dtype = f32, shape = [4]} on "/device:CPU:0" @ "/right"
      %5: f32[4] = add(%3, %4) after(#0) on "/device:CPU:0" @ "/join"
      output "z" %5
      output "x" %0
    }

    // /device:CPU:1: inputs [], outputs []
    graph "fan" {
      %0: f32[4] = recv() {key = "v1", from = "/device:CPU:0", dtype = f32, shape = [4]} on "/device:CPU:1" @ "/exp"
      %1: f32[4] = neg(%0) on "/device:CPU:1" @ "/left"
      %2: f32[4] = send(%1) {key = "v2", to = "/device:CPU:0"} on "/device:CPU:1" @ "/left"
      %3: f32[4] = abs(%0) on "/device:CPU:1" @ "/right"
      %4: f32[4] = send(%3) {key = "v3", to = "/device:CPU:0"} on "/device:CPU:1" @ "/right"
    }
    "#);
    let apart = Placement::by_hand(cpus(3), &[Some(0), Some(1), Some(1), Some(2)]);
    let parts = check_all(&g, &apart);
    let count = |f: fn(&Op) -> bool| {
        parts
            .iter()
            .flat_map(|p| p.graph.nodes())
            .filter(|(_, n)| f(&n.op))
            .count()
    };
    // One for the tensor, two for the results, one for the control edge.
    assert_eq!(
        (
            count(|op| matches!(op, Op::Send { .. })),
            count(|op| matches!(op, Op::Recv { .. }))
        ),
        (4, 4)
    );
}

/// A graph of nodes anywhere and of all-reduces by a library over some of `n_devices` devices.
fn random_reductions(rng: &mut Rng, n: usize, n_devices: usize) -> Graph {
    let mut b = GraphBuilder::new("reductions");
    let mut values: Vec<ValueId> = (0..2)
        .map(|i| b.input(&format!("x{i}"), DType::F32, [1usize << 14]))
        .collect();
    for _ in 0..n {
        if rng.one_in(3) {
            let first = rng.below(n_devices);
            let ranks = (0..2 + rng.below(n_devices - 1)).map(|r| (first + r) % n_devices);
            let operand = |device| {
                let v = rng.pick(&values);
                b.with_device(format!("/cpu:{device}").as_str(), |b| {
                    b.map(ScalarOp::Neg, &[v])
                })
                .unwrap()
            };
            let operands: Vec<ValueId> = ranks.map(operand).collect();
            values.extend(b.all_reduce(crate::ir::ReduceKind::Sum, &operands).unwrap());
        } else {
            let operands = [rng.pick(&values), rng.pick(&values)];
            values.push(b.map(ScalarOp::Add, &operands).unwrap());
        }
    }
    values
        .iter()
        .enumerate()
        .for_each(|(i, &v)| b.output(&format!("y{i}"), v));
    crate::passes::expand_all_reduce(&b.finish().unwrap(), &|_| Ok(Way::Library)).unwrap()
}

/// Requested devices, or random ones; starts in a random legal order.
fn shuffled_placement(rng: &mut Rng, g: &Graph, n_devices: usize) -> Placement {
    let names = cpus(n_devices);
    let device = |(_, n): (NodeId, &Node)| {
        let asked = n
            .device
            .as_ref()
            .and_then(|asked| names.iter().position(|name| asked.spec.fits(name)));
        (!matches!(n.op, Op::Constant { .. }))
            .then(|| asked.unwrap_or_else(|| rng.below(n_devices)))
    };
    let devices: Vec<Option<usize>> = g.nodes().map(device).collect();
    let mut placement = Placement::by_hand(names.clone(), &devices);
    let mut deps = schedule::node_deps(g);
    let mut left: Vec<usize> = (0..g.n_nodes()).filter(|&i| devices[i].is_some()).collect();
    for start in 0.. {
        let ready: Vec<usize> = left
            .iter()
            .copied()
            .filter(|&i| deps[i].is_empty())
            .collect();
        if ready.is_empty() {
            break;
        }
        let next = rng.pick(&ready);
        left.retain(|&i| i != next);
        deps.iter_mut()
            .for_each(|d| d.retain(|before| before.0 as usize != next));
        let placed = placement.nodes[next].as_mut().unwrap();
        (placed.start, placed.end) = (crate::cost::Nanos(start), crate::cost::Nanos(start + 1));
    }
    assert!(left.is_empty());
    placement
}

/// Whatever the predicted starts, ranks stand side by side, nothing passes them, and operands of other ranks are not sent.
#[test]
fn random_reductions_partition() {
    let mut rng = Rng(9);
    let mut n_groups = 0;
    for n in 0..200 {
        let n_devices = 2 + rng.below(3);
        let g = random_reductions(&mut rng, 1 + n % 20, n_devices);
        let placement = shuffled_placement(&mut rng, &g, n_devices);
        let parts = check_all(&g, &placement);
        let own = |part: &Part| -> Vec<String> {
            let key = |(_, n): (NodeId, &Node)| {
                if let Op::Collective { key, .. } = &n.op {
                    Some(key.clone())
                } else {
                    None
                }
            };
            part.graph.nodes().filter_map(key).collect()
        };
        let lists: Vec<Vec<String>> = parts.iter().map(own).collect();
        n_groups += lists.iter().flatten().collect::<BTreeSet<_>>().len();
        // The order of the all-reduces that two devices share is the same.
        for (a, b) in lists.iter().flat_map(|a| lists.iter().map(move |b| (a, b))) {
            assert!(
                a.iter()
                    .filter(|k| b.contains(k))
                    .eq(b.iter().filter(|k| a.contains(k))),
                "{a:?} {b:?}"
            );
        }
    }
    assert!(n_groups > 400, "only {n_groups} all-reduces");
}

#[test]
fn the_checkers_see_broken_reductions() {
    let mut rng = Rng(10);
    let mut seen = [0usize; 4];
    let mut tried = 0;
    while tried < 60 {
        let g = random_reductions(&mut rng, 8, 3);
        let placement = shuffled_placement(&mut rng, &g, 3);
        let good = partition(&g, &placement).unwrap();
        let is_rank = |n: &Node| matches!(n.op, Op::Collective { .. });
        let ranks: Vec<(usize, NodeId)> = (0..good.len())
            .flat_map(|p| {
                good[p]
                    .graph
                    .nodes()
                    .filter(|(_, n)| is_rank(n))
                    .map(move |(id, _)| (p, id))
            })
            .collect();
        if ranks.is_empty() {
            continue;
        }
        tried += 1;
        let (p, id) = rng.pick(&ranks);
        let broken = |change: &dyn Fn(&mut Op)| {
            let mut parts = good.clone();
            change(&mut parts[p].graph.node_mut(id).op);
            usize::from(check::check(&g, &placement, &parts).is_err())
        };
        seen[0] += broken(&|op| {
            if let Op::Collective { rank, .. } = op {
                *rank = 1 - (*rank).min(1)
            }
        });
        seen[1] += broken(&|op| {
            if let Op::Collective { devices, .. } = op {
                devices.reverse()
            }
        });
        seen[2] += broken(&|op| {
            if let Op::Collective { kind, .. } = op {
                *kind = crate::ir::ReduceKind::Prod
            }
        });
        let mut s = schedule(&good[p].graph, &Needs::default()).unwrap();
        let at = s
            .steps
            .iter()
            .position(|s| s.action == schedule::Action::Node(id))
            .unwrap();
        if s.steps.len() == 1 {
            seen[3] += 1;
            continue;
        }
        // All that keeps the others on their side of it.
        s.steps[at].deps.clear();
        s.steps
            .iter_mut()
            .for_each(|s| s.deps.retain(|&d| d as usize != at));
        seen[3] +=
            usize::from(schedule::check::check(&good[p].graph, &Needs::default(), &s).is_err());
    }
    assert_eq!(seen, [60; 4]);
}
