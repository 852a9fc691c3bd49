//! No assignment by pins is predicted faster than the placement without pins.

use super::*;
use crate::cost::{DeviceProfile, Nanos};
use crate::ir::{GraphBuilder, ScalarOp, ValueId};
use crate::pipeline::{Planned, fused, plan};
use crate::place::{Pin, Plan};
use crate::testing::{Rng, Setup};
use crate::{DType, Tensor};

/// Two CPUs with the same rates on every machine.
fn two_devices() -> Setup {
    let mut setup = Setup::on("cpu:2", 8);
    for device in &mut setup.settings.devices.devices {
        device.profile = DeviceProfile::cpu(gristmill_kernels::Isa::Avx2, 4);
    }
    setup
}

fn planned(graph: &Graph, pins: &[String]) -> Planned {
    let setup = two_devices().with(|o| {
        o.pins = pins.iter().map(|pin| Pin::parse(pin).unwrap()).collect();
        o.check = true;
    });
    let config = setup.config();
    plan(fused(graph.clone(), config).unwrap(), config).unwrap()
}

/// A model from whose input branches begin, and the paths of its nodes, one each.
struct Branches {
    b: GraphBuilder,
    n_nodes: usize,
}

impl Branches {
    fn new(name: &str) -> Branches {
        Branches {
            b: GraphBuilder::new(name),
            n_nodes: 0,
        }
    }

    fn name(&mut self) {
        self.b.set_origin(&format!("/n{}", self.n_nodes));
        self.n_nodes += 1;
    }

    fn layer(&mut self, x: ValueId, from: usize, to: usize) -> ValueId {
        self.name();
        // Equal weights would make equal nodes, which become one.
        let weights = vec![self.n_nodes as f32; from * to];
        let w = Tensor::from_slice(&weights, &[from, to]).unwrap();
        let w = self.b.constant(w);
        self.b.matmul(x, w).unwrap()
    }

    fn map(&mut self, op: ScalarOp, operands: &[ValueId]) -> ValueId {
        self.name();
        self.b.map(op, operands).unwrap()
    }

    /// Two to four branches of layers and activations; at most `n_nodes` nodes.
    fn random(rng: &mut Rng, n_nodes: usize) -> (Graph, usize) {
        let mut m = Branches::new("random");
        let (batch, width) = (32 << rng.below(5), 64 << rng.below(4));
        let x = m.b.input("x", DType::F32, [batch, width]);
        let n_branches = (2 + rng.below(3)).min(n_nodes.div_ceil(2));
        let mut ends = Vec::new();
        let n_joins = n_branches - 1;
        let mut left = n_nodes - n_joins;
        for branch in 0..n_branches {
            let most = left - (n_branches - branch - 1);
            let n = 1 + rng.below(most.min(4));
            left -= n;
            let wide = 64 << rng.below(4);
            let mut y = m.layer(x, width, if n == 1 { width } else { wide });
            for i in 1..n {
                y = match rng.below(3) {
                    _ if i + 1 == n => m.layer(y, wide, width),
                    0 => m.map(ScalarOp::Exp, &[y]),
                    1 => m.map(ScalarOp::Relu, &[y]),
                    _ => m.layer(y, wide, wide),
                };
            }
            ends.push(y);
        }
        while ends.len() > 1 {
            let (a, b) = (ends.remove(0), ends.remove(0));
            ends.push(m.map(ScalarOp::Add, &[a, b]));
        }
        m.b.output("y", ends[0]);
        (m.b.finish().unwrap(), m.n_nodes)
    }
}

/// Pins for the nodes of a model, each on the device that its bit says.
fn pins(n_nodes: usize, devices: u64) -> Vec<String> {
    let pin = |i| format!("^/n{i}$=/device:CPU:{}", devices >> i & 1);
    (0..n_nodes).map(pin).collect()
}

/// The least predicted time under some sets of pins, two devices being alike.
fn least_time(g: &Graph, n_nodes: usize, sets: impl Iterator<Item = u64>) -> Nanos {
    let times = sets.map(|set| planned(g, &pins(n_nodes, set)).placement.makespan);
    times.min().unwrap()
}

fn expect_within_a_percent(free: &Planned, pinned: Nanos) {
    let (free_ns, text) = (
        free.placement.makespan.0,
        free.placement.to_text(&free.clusters),
    );
    assert!(free_ns * 100 <= pinned.0 * 101, "pinned {pinned}\n{text}");
}

#[test]
fn branches_are_as_fast_as_with_a_pin_on_each() {
    let mut m = Branches::new("two");
    let x = m.b.input("x", DType::F32, [256usize, 512]);
    let ends: Vec<ValueId> = (0..2)
        .map(|_| (0..4).fold(x, |y, _| m.layer(y, 512, 512)))
        .collect();
    let y = m.map(ScalarOp::Add, &ends);
    m.b.output("y", y);
    let g = m.b.finish().unwrap();
    let free = planned(&g, &[]);
    let on_each = ["^/n[0-3]$=/cpu:0", "^/n[4-7]$=/cpu:1"].map(str::to_owned);
    expect_within_a_percent(&free, planned(&g, &on_each).placement.makespan);
    assert!(free.placement.rivals.len() > 1);
    assert_ne!(free.placement.joining, Joining::Joined);
    let text = free.placement.plan_text(&free.clusters).unwrap();
    let setup = two_devices().with(|o| o.plan = Some(Plan::parse(&text, "p.plan").unwrap()));
    let replayed = plan(fused(g, setup.config()).unwrap(), setup.config()).unwrap();
    assert_eq!(replayed.clusters, free.clusters);
    assert_eq!(replayed.placement.makespan, free.placement.makespan);
}

#[test]
fn no_pins_make_a_small_model_faster() {
    for seed in 4..7 {
        let (g, n) = Branches::random(&mut Rng(seed), 6);
        expect_within_a_percent(&planned(&g, &[]), least_time(&g, n, 0..1 << (n - 1)));
    }
}

#[test]
fn no_random_pins_make_a_larger_model_faster() {
    for seed in 1000..1004 {
        let mut rng = Rng(seed);
        let (g, n) = Branches::random(&mut rng, 10);
        let sets: Vec<u64> = (0..16).map(|_| rng.below(1 << n) as u64).collect();
        expect_within_a_percent(&planned(&g, &[]), least_time(&g, n, sets.into_iter()));
    }
}
