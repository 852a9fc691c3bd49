//! Independent checker of placements.
//!
//! Invariants:
//! 1. every node but constants has one device of the set, on which it can run;
//! 2. pins and requests hold, unless the fallback let them go and the reason says so;
//! 3. nodes that use the same variable are on one device;
//! 4. predicted times: nodes of one device do not overlap, and no node starts before its operands are made.

use super::{Fallback, Placed, Placement, Reason, Request, lacks_kernels};
use crate::error::{Error, Result};
use crate::ir::{Def, Graph, Node, Op};
use std::collections::BTreeMap;

/// All violations of the invariants, as an `Internal` error.
pub fn check(g: &Graph, request: &Request, placement: &Placement) -> Result<()> {
    let mut problems = Vec::new();
    if placement.nodes.len() != g.n_nodes() {
        problems.push(format!("{} entries for {} nodes", placement.nodes.len(), g.n_nodes()));
    }
    let mut of_variable: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for ((id, node), placed) in g.nodes().zip(&placement.nodes) {
        let at = format!("node {} ({} {})", id.0, node.op.name(), node.origin);
        match placed {
            None if matches!(node.op, Op::Constant { .. }) => {}
            None => problems.push(format!("{at} has no device")),
            Some(p) => {
                check_device(node, request, placement, p, &at, &mut problems);
                check_times(g, node, placement, p, &at, &mut problems);
                for (variable, _) in crate::schedule::variable_uses(node) {
                    if *of_variable.entry(variable).or_insert(p.device) != p.device {
                        problems.push(format!("{at} is not with the other users of variable {variable:?}"));
                    }
                }
            }
        }
    }
    check_overlap(placement, &mut problems);
    if problems.is_empty() {
        return Ok(());
    }
    Err(Error::internal(format!("placement of graph {:?} is wrong:\n  {}", g.name, problems.join("\n  "))))
}

fn check_device(
    node: &Node,
    request: &Request,
    placement: &Placement,
    p: &Placed,
    at: &str,
    problems: &mut Vec<String>,
) {
    let Some(name) = placement.devices.get(p.device) else {
        problems.push(format!("{at} is on device {} of {}", p.device, placement.devices.len()));
        return;
    };
    if let Some(why) = lacks_kernels(name.kind) {
        problems.push(format!("{at} is on {name}: {why}"));
    }
    let let_go = matches!(p.reason, Reason::Fallback(_)) && request.fallback != Fallback::Error;
    let path = node.origin.as_str();
    let pin = request.pins.iter().rev().find(|pin| !path.is_empty() && pin.pattern.is_match(path));
    let wish = match (pin, &node.device) {
        (Some(pin), None) => Some(pin.device.clone()),
        // Pins that were written into the graph are its requests.
        (Some(pin), Some(_)) if !pin.is_used => Some(pin.device.clone()),
        (_, Some(d)) => super::DeviceSpec::parse(d).ok(),
        (None, None) => None,
    };
    if wish.is_some_and(|w| !w.fits(name)) && !let_go {
        problems.push(format!("{at} is on {name} against its request"));
    }
}

fn check_times(g: &Graph, node: &Node, placement: &Placement, p: &Placed, at: &str, problems: &mut Vec<String>) {
    for &v in &node.inputs {
        let Def::Node(d, _) = g.value(v).def else { continue };
        if placement.nodes[d.0 as usize].as_ref().is_some_and(|source| source.end > p.start) {
            problems.push(format!("{at} starts before its operand {} is made", v.0));
        }
    }
}

fn check_overlap(placement: &Placement, problems: &mut Vec<String>) {
    let mut by_device: BTreeMap<usize, Vec<(u64, u64)>> = BTreeMap::new();
    for p in placement.nodes.iter().flatten() {
        by_device.entry(p.device).or_default().push((p.start.0, p.end.0));
    }
    for (device, mut times) in by_device {
        times.sort_unstable();
        if times.windows(2).any(|w| w[0].1 > w[1].0) {
            problems.push(format!("device {device} runs two nodes at a time"));
        }
    }
}
