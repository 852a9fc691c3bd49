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
use crate::schedule::variable_uses;
use std::collections::{BTreeMap, BTreeSet};

/// All violations of the invariants, as an `Internal` error.
pub fn check(g: &Graph, request: &Request, placement: &Placement) -> Result<()> {
    if !placement.copies.is_empty() {
        return check_expanded(g, request, placement);
    }
    let mut checker = Checker {
        g,
        request,
        placement,
        problems: Vec::new(),
    };
    checker.check_nodes();
    checker.check_groups();
    checker.check_overlap();
    let problems = checker.problems;
    if problems.is_empty() {
        return Ok(());
    }
    Err(Error::internal(format!(
        "placement of graph {:?} is wrong:\n  {}",
        g.name,
        problems.join("\n  ")
    )))
}

/// Checks the graph in which each copy is a node.
fn check_expanded(g: &Graph, request: &Request, placement: &Placement) -> Result<()> {
    let (expanded, placed) = placement.expand(g)?;
    verify(&expanded)?;
    let mut copied = placement.copies.iter().map(|c| g.node(c.node));
    match copied.find(|node| !variable_uses(node).is_empty()) {
        None => check(&expanded, request, &placed),
        Some(node) => {
            Err(Error::internal("a node that uses a variable has a copy").at_origin(&node.origin))
        }
    }
}

struct Checker<'a> {
    g: &'a Graph,
    request: &'a Request,
    placement: &'a Placement,
    problems: Vec<String>,
}

impl Checker<'_> {
    fn check_nodes(&mut self) {
        let (g, placement) = (self.g, self.placement);
        if placement.nodes.len() != g.n_nodes() {
            let n = placement.nodes.len();
            self.problems
                .push(format!("{n} entries for {} nodes", g.n_nodes()));
        }
        let mut of_variable: BTreeMap<(&str, &str), usize> = BTreeMap::new();
        for ((id, node), placed) in g.nodes().zip(&placement.nodes) {
            let at = format!("node {} ({} {})", id.0, node.op.name(), node.origin);
            let Some(p) = placed else {
                if !matches!(node.op, Op::Constant { .. }) {
                    self.problems.push(format!("{at} has no device"));
                }
                continue;
            };
            self.check_device(node, p, &at);
            self.check_times(node, p, &at);
            for (variable, _) in variable_uses(node) {
                let first = *of_variable.entry(variable).or_insert(p.device);
                self.check_variable(variable, first, p, &at);
            }
        }
    }

    /// A user of a variable is with the first user, and where the state is.
    fn check_variable(&mut self, variable: (&str, &str), first: usize, p: &Placed, at: &str) {
        if first != p.device {
            self.problems.push(format!(
                "{at} is not with the other users of variable {variable:?}"
            ));
        }
        let key = (variable.0.to_owned(), variable.1.to_owned());
        let state = self.request.state.get(&key);
        if state.is_some_and(|s| Some(s) != self.placement.devices.get(p.device)) {
            self.problems
                .push(format!("{at} is not where variable {variable:?} is"));
        }
    }

    fn check_device(&mut self, node: &Node, p: &Placed, at: &str) {
        let (devices, set) = (&self.placement.devices, &self.request.devices.devices);
        let Some(name) = devices.get(p.device) else {
            let n = devices.len();
            self.problems
                .push(format!("{at} is on device {} of {n}", p.device));
            return;
        };
        let Some(device) = set.iter().find(|d| d.name == *name) else {
            self.problems
                .push(format!("{at} is on {name}, which is not in the set"));
            return;
        };
        if let Some(why) = device.kernels.lacks(node) {
            self.problems.push(format!("{at} is on {name}: {why}"));
        }
        let is_overridden = matches!(p.reason, Reason::Overridden(_));
        if !is_overridden || variable_uses(node).is_empty() {
            self.check_requests(node, p, at);
        }
    }

    /// Requests hold, as far as none was released.
    fn check_requests(&mut self, node: &Node, p: &Placed, at: &str) {
        let name = &self.placement.devices[p.device];
        let is_soft = self.request.fallback != Fallback::Error;
        let is_released = matches!(p.reason, Reason::Fallback(_)) && is_soft;
        for (path, wish) in wishes(node, &self.request.pins) {
            let wanted = if is_released {
                wish.spec.relaxed()
            } else {
                wish.spec
            };
            if !wanted.fits(name) {
                self.problems.push(format!(
                    "{at} is on {name} against the request {wanted} of {path:?}"
                ));
            }
        }
    }

    /// Every colocation group that a node asks to be in is on one device, with the nodes of that
    /// name.
    fn check_groups(&mut self) {
        for (group, members) in self.groups() {
            let placed = members.iter().filter_map(|&m| {
                let placed = self.placement.nodes[m].as_ref()?;
                Some(placed.device)
            });
            let n_devices = placed.collect::<BTreeSet<usize>>().len();
            let is_hard = self.request.fallback == Fallback::Error;
            if n_devices > 1 && (is_hard || !self.tells_of(&group)) {
                self.problems.push(format!(
                    "the nodes of colocation group {group:?} are on {n_devices} devices"
                ));
            }
        }
    }

    /// Nodes of each colocation group.
    fn groups(&self) -> BTreeMap<String, Vec<usize>> {
        let mut members: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        for (id, node) in self.g.nodes() {
            for (_, wish) in wishes(node, &self.request.pins) {
                for group in wish.groups.keys() {
                    let members = members.entry(group.to_string()).or_default();
                    members.push(id.0 as usize);
                }
            }
        }
        for (id, node) in self.g.nodes() {
            for path in paths(node) {
                if let Some(members) = members.get_mut(path) {
                    members.push(id.0 as usize);
                }
            }
        }
        members
    }

    /// True if a warning or the log tells of a colocation group.
    fn tells_of(&self, group: &str) -> bool {
        let name = format!("colocation group '{group}'");
        let mut lines = self.placement.warnings.iter().chain(&self.placement.log);
        lines.any(|l| l.contains(&name))
    }

    fn check_times(&mut self, node: &Node, p: &Placed, at: &str) {
        for &v in &node.inputs {
            let Def::Node(d, _) = self.g.value(v).def else {
                continue;
            };
            let source = self.placement.nodes[d.0 as usize].as_ref();
            if source.is_some_and(|source| source.end > p.start) {
                self.problems
                    .push(format!("{at} starts before its operand {} is made", v.0));
            }
        }
    }

    fn check_overlap(&mut self) {
        let mut by_device: BTreeMap<usize, Vec<(u64, u64)>> = BTreeMap::new();
        for p in self.placement.nodes.iter().flatten() {
            by_device
                .entry(p.device)
                .or_default()
                .push((p.start.0, p.end.0));
        }
        for (device, mut times) in by_device {
            times.sort_unstable();
            if times.windows(2).any(|w| w[0].1 > w[1].0) {
                self.problems
                    .push(format!("device {device} runs two nodes at a time"));
            }
        }
    }
}
