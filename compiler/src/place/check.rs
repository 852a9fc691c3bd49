//! Independent checker of placements.
//!
//! Invariants:
//!
//! 1. every node but constants has one device of the set, on which it can run;
//! 2. pins and requests hold, unless the fallback released them and the reason says so; job,
//!    replica and task hold even then. Of a node that uses a variable, that of another user may
//!    count instead, if the reason says so;
//! 3. nodes that use the same variable are on one device, where its state is if there is any;
//! 4. nodes of one colocation group are on one device, unless the fallback released one and a
//!    warning or the log says so;
//! 5. predicted times: nodes of one device do not overlap, and no node starts before its operands
//!    are made;
//! 6. all of this of the graph in which each copy is a node; and nodes with copies have no effect
//!    but their results.

use super::pins::{paths, wishes};
use super::{Fallback, Placed, Placement, Reason, Request};
use crate::error::{Error, Result};
use crate::ir::verify::verify;
use crate::ir::{Def, Graph, Node, Op};
use std::collections::BTreeMap;

/// All violations of the invariants, as an `Internal` error.
pub fn check(g: &Graph, request: &Request, placement: &Placement) -> Result<()> {
    if !placement.copies.is_empty() {
        let (expanded, placed) = placement.expand(g)?;
        verify(&expanded)?;
        if let Some(copy) = placement
            .copies
            .iter()
            .find(|c| !crate::schedule::variable_uses(g.node(c.node)).is_empty())
        {
            return Err(Error::internal("a node that uses a variable has a copy")
                .at_origin(&g.node(copy.node).origin));
        }
        return check(&expanded, request, &placed);
    }
    let mut problems = Vec::new();
    if placement.nodes.len() != g.n_nodes() {
        problems.push(format!(
            "{} entries for {} nodes",
            placement.nodes.len(),
            g.n_nodes()
        ));
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
                        problems.push(format!(
                            "{at} is not with the other users of variable {variable:?}"
                        ));
                    }
                    let state = request
                        .state
                        .get(&(variable.0.to_owned(), variable.1.to_owned()));
                    if state.is_some_and(|s| Some(s) != placement.devices.get(p.device)) {
                        problems.push(format!("{at} is not where variable {variable:?} is"));
                    }
                }
            }
        }
    }
    check_groups(g, request, placement, &mut problems);
    check_overlap(placement, &mut problems);
    if problems.is_empty() {
        return Ok(());
    }
    Err(Error::internal(format!(
        "placement of graph {:?} is wrong:\n  {}",
        g.name,
        problems.join("\n  ")
    )))
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
        problems.push(format!(
            "{at} is on device {} of {}",
            p.device,
            placement.devices.len()
        ));
        return;
    };
    let Some(device) = request.devices.devices.iter().find(|d| d.name == *name) else {
        problems.push(format!("{at} is on {name}, which is not in the set"));
        return;
    };
    if let Some(why) = device.kernels.lacks(node) {
        problems.push(format!("{at} is on {name}: {why}"));
    }
    if matches!(p.reason, Reason::Overridden(_)) && !crate::schedule::variable_uses(node).is_empty()
    {
        return;
    }
    let let_go = matches!(p.reason, Reason::Fallback(_)) && request.fallback != Fallback::Error;
    for (path, wish) in wishes(node, &request.pins) {
        let wanted = if let_go {
            wish.spec.relaxed()
        } else {
            wish.spec
        };
        if !wanted.fits(name) {
            problems.push(format!(
                "{at} is on {name} against the request {wanted} of {path:?}"
            ));
        }
    }
}

/// Every colocation group that a node asks to be in, with the nodes of that name.
fn check_groups(g: &Graph, request: &Request, placement: &Placement, problems: &mut Vec<String>) {
    let mut members: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (id, node) in g.nodes() {
        for (_, wish) in wishes(node, &request.pins) {
            wish.groups.keys().for_each(|k| {
                members
                    .entry(k.to_string())
                    .or_default()
                    .push(id.0 as usize)
            });
        }
    }
    for (id, node) in g.nodes() {
        for path in paths(node) {
            if let Some(members) = members.get_mut(path) {
                members.push(id.0 as usize);
            }
        }
    }
    for (group, members) in members {
        let mut devices: Vec<usize> = members
            .iter()
            .filter_map(|&m| placement.nodes[m].as_ref())
            .map(|p| p.device)
            .collect();
        devices.sort_unstable();
        devices.dedup();
        let said = || {
            placement
                .warnings
                .iter()
                .chain(&placement.log)
                .any(|l| l.contains(&format!("colocation group '{group}'")))
        };
        if devices.len() > 1 && (request.fallback == Fallback::Error || !said()) {
            problems.push(format!(
                "the nodes of colocation group {group:?} are on {} devices",
                devices.len()
            ));
        }
    }
}

fn check_times(
    g: &Graph,
    node: &Node,
    placement: &Placement,
    p: &Placed,
    at: &str,
    problems: &mut Vec<String>,
) {
    for &v in &node.inputs {
        let Def::Node(d, _) = g.value(v).def else {
            continue;
        };
        if placement.nodes[d.0 as usize]
            .as_ref()
            .is_some_and(|source| source.end > p.start)
        {
            problems.push(format!("{at} starts before its operand {} is made", v.0));
        }
    }
}

fn check_overlap(placement: &Placement, problems: &mut Vec<String>) {
    let mut by_device: BTreeMap<usize, Vec<(u64, u64)>> = BTreeMap::new();
    for p in placement.nodes.iter().flatten() {
        by_device
            .entry(p.device)
            .or_default()
            .push((p.start.0, p.end.0));
    }
    for (device, mut times) in by_device {
        times.sort_unstable();
        if times.windows(2).any(|w| w[0].1 > w[1].0) {
            problems.push(format!("device {device} runs two nodes at a time"));
        }
    }
}
