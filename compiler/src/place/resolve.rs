//! From requests to the devices that each node may be on: TensorFlow's rules for colocation, hard
//! and soft placement.
//!
//! In order: requests of a node and of its regions; users of one variable (reference edges);
//! colocation groups. Then each group gets the devices that (1) fit its request and have kernels;
//! with soft placement else those that (2) fit without type and index, except where state or a
//! variable's maker fixed them, (3) fit without those of a variable's maker; else (4) it is an
//! error.

use super::Reason;
use super::colocate::{Colocation, Group, Member};
use super::conflict;
use super::device::DeviceSet;
use super::pins::{Fallback, Request, named, paths, unused, wishes};
use crate::error::{Error, Result};
use crate::ir::{DeviceRequest, Graph, Node, NodeId, Op};
use crate::schedule::{Variable, variable_uses};
use crate::units::printable;
use gristmill_runtime::device::{DeviceName, DeviceSpec, Merge};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Errors that are told in full; a model that asks for a missing device everywhere would repeat
/// itself.
const MAX_ERRORS: usize = 10;

/// Devices that a node may be on.
#[derive(Clone, Debug)]
pub(super) struct Allowed {
    /// By index into the device set; not empty.
    pub devices: Vec<usize>,
    /// The request or rule that narrowed them.
    pub reason: Reason,
    /// Nodes of one group are on one device, and have the same `devices`.
    pub group: Option<usize>,
}

/// Result of [`resolve`].
#[derive(Debug, Default)]
pub(super) struct Resolved {
    /// By node; none for constants.
    pub allowed: Vec<Option<Allowed>>,
    /// Number of groups.
    pub n_groups: usize,
    /// Requests that were released.
    pub warnings: Vec<String>,
    /// Requests that were released quietly.
    pub log: Vec<String>,
}

/// Allowed devices of every node but constants. All problems are reported at once.
pub(super) fn resolve(g: &Graph, request: &Request) -> Result<Resolved> {
    check_set(&request.devices)?;
    check_state(request)?;
    let mut r = Resolver {
        g,
        request,
        node_of: Vec::new(),
        member_of: BTreeMap::new(),
        resolved: Resolved::default(),
        same_kernels: same_kernels(&request.devices),
        released: BTreeMap::new(),
    };
    let mut errors: Vec<Error> = unused_pins(g, request);
    let mut colocation = match r.members() {
        Ok(members) => members,
        Err(e) => {
            errors.extend(e);
            return Err(join_first(errors));
        }
    };
    errors.extend(r.join_variables(&mut colocation));
    errors.extend(r.join_groups(&mut colocation));
    if errors.is_empty() {
        errors.extend(r.grant(&colocation));
    }
    if errors.is_empty() {
        Ok(r.resolved)
    } else {
        Err(join_first(errors))
    }
}

/// One error out of several, the first [`MAX_ERRORS`] in full.
fn join_first(mut errors: Vec<Error>) -> Error {
    if errors.len() > MAX_ERRORS {
        let n_more = errors.len() - MAX_ERRORS;
        let kind = errors
            .iter()
            .map(Error::kind)
            .min()
            .expect("there are errors");
        errors.truncate(MAX_ERRORS);
        errors.push(Error::new(
            kind,
            format!("and {n_more} more nodes that cannot be placed"),
        ));
    }
    Error::join(errors)
}

/// There must be a device.
fn check_set(set: &DeviceSet) -> Result<()> {
    if set.devices.is_empty() {
        return Err(Error::invalid("No devices are registered").hint("--devices cpu:1"));
    }
    Ok(())
}

/// State must be on devices of the set.
fn check_state(request: &Request) -> Result<()> {
    let is_known = |name: &DeviceName| request.devices.devices.iter().any(|d| d.name == *name);
    let unknown = request
        .state
        .iter()
        .filter(|(_, device)| !is_known(device))
        .map(|((container, name), device)| {
            let slash = if container.is_empty() { "" } else { "/" };
            Error::invalid(format!(
                "variable \"{container}{slash}{name}\" is on {} unknown device.",
                device.full()
            ))
            .hint("--devices with the device in it")
        });
    let errors: Vec<Error> = unknown.collect();
    if errors.is_empty() {
        Ok(())
    } else {
        Err(join_first(errors))
    }
}

fn unused_pins(g: &Graph, request: &Request) -> Vec<Error> {
    let fresh = request.pins.iter().filter(|p| !p.is_used);
    let finds_none = |p: &&super::Pin| {
        !g.nodes().any(|(_, n)| {
            paths(n)
                .into_iter()
                .any(|path| !path.is_empty() && p.pattern.is_match(path))
        })
    };
    fresh
        .filter(finds_none)
        .map(|p| unused(p, g, p.pattern.as_str()))
        .collect()
}

/// Devices of a group of members, and its number where it has several, by its root.
type ByRoot = BTreeMap<usize, (Vec<usize>, Option<usize>)>;

struct Resolver<'g> {
    g: &'g Graph,
    request: &'g Request,
    /// The node of each member.
    node_of: Vec<NodeId>,
    /// Members are the nodes of which something is asked.
    member_of: BTreeMap<NodeId, usize>,
    resolved: Resolved,
    /// The first device of the set with the kernels of each.
    same_kernels: Vec<usize>,
    /// Warnings about released requests, by request and the devices instead.
    released: BTreeMap<(Why, String), Released>,
}

/// The cause of a release, with the request.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Why {
    /// No device that the request names can run the node.
    NoDevice(String),
    /// Its group or variable is elsewhere.
    Group(String),
}

/// A warning about nodes whose request was released.
struct Released {
    /// Its index among the warnings.
    warning: usize,
    /// The first node, and the number of others.
    name: String,
    n_more: usize,
    /// The problem of the first node.
    why: String,
}

fn same_kernels(set: &DeviceSet) -> Vec<usize> {
    let first = |d: &super::Device| set.devices.iter().position(|e| e.kernels == d.kernels);
    set.devices
        .iter()
        .map(|d| first(d).expect("a device has its own kernels"))
        .collect()
}

/// Names of nodes in messages: the path, or else op and number.
fn name_of(id: NodeId, node: &Node) -> String {
    match node.origin.as_str() {
        "" => format!("{}#{}", node.op.name(), id.0),
        path => printable(path).into_owned(),
    }
}

impl<'g> Resolver<'g> {
    fn mode(&self) -> Merge {
        if self.request.fallback == Fallback::Error {
            Merge::Hard
        } else {
            Merge::Soft
        }
    }

    /// A line about a request that was released.
    fn note(&mut self, line: String) {
        match self.request.fallback {
            Fallback::Allow => self.resolved.log.push(line),
            Fallback::Error | Fallback::Warn => self.resolved.warnings.push(line),
        }
    }

    /// All nodes of which something is asked.
    fn members(&mut self) -> Result<Colocation, Vec<Error>> {
        let (mut members, mut errors) = (Vec::new(), Vec::new());
        let groups = self.group_names();
        for (id, node) in self
            .g
            .nodes()
            .filter(|(_, n)| !matches!(n.op, Op::Constant { .. }))
        {
            let wishes = wishes(node, &self.request.pins);
            let is_named = || paths(node).iter().any(|p| groups.contains(*p));
            if wishes.is_empty()
                && variable_uses(node).is_empty()
                && (groups.is_empty() || !is_named())
            {
                continue;
            }
            match self.member(id, node, wishes) {
                Ok(member) => {
                    self.member_of.insert(id, members.len());
                    self.node_of.push(id);
                    members.push(member);
                }
                Err(e) => errors.push(e.at_origin(&node.origin)),
            }
        }
        let kinds = self
            .request
            .devices
            .devices
            .iter()
            .map(|d| d.name.kind.name())
            .collect();
        if errors.is_empty() {
            Ok(Colocation::new(members, kinds, self.mode()))
        } else {
            Err(errors)
        }
    }

    /// Colocation groups that some node asks to be in.
    fn group_names(&self) -> BTreeSet<Arc<str>> {
        let of_node = |(_, n): (NodeId, &Node)| {
            wishes(n, &self.request.pins)
                .into_iter()
                .flat_map(|(_, w)| w.groups.into_keys())
                .collect::<Vec<_>>()
        };
        self.g.nodes().flat_map(of_node).collect()
    }

    /// By device of the set, true where it has kernels for a node; devices with the same kernels
    /// are asked once.
    fn supports(&self, node: &Node) -> Vec<bool> {
        let devices = &self.request.devices.devices;
        let mut supports: Vec<bool> = Vec::with_capacity(devices.len());
        for (device, &same) in devices.iter().zip(&self.same_kernels) {
            let known = supports.get(same).copied();
            supports.push(known.unwrap_or_else(|| device.kernels.lacks(node).is_none()));
        }
        supports
    }

    fn member(
        &self,
        id: NodeId,
        node: &Node,
        wishes: Vec<(&str, DeviceRequest)>,
    ) -> Result<Member> {
        let (requested, asked_by) = self.requested(&wishes)?;
        let resource = match node.op {
            Op::ReadVariable { .. } => requested.clone(),
            _ => DeviceSpec::default(),
        };
        let assigned = self.assigned(node)?;
        let stays = |e| Error::from(e).context(format!("its variable is on {assigned} already"));
        requested.merge(&assigned, self.mode()).map_err(stays)?;
        resource.merge(&assigned, Merge::Hard).map_err(stays)?;
        Ok(Member {
            name: name_of(id, node),
            op: node.op.name(),
            supports: self.supports(node),
            requested,
            resource,
            assigned,
            asked_by,
            ..Member::default()
        })
    }

    /// The requests of a node and of its regions merged, and the author of the first.
    fn requested(&self, wishes: &[(&str, DeviceRequest)]) -> Result<(DeviceSpec, String)> {
        let mut requested = DeviceSpec::default();
        let mut first: Option<(&str, &DeviceRequest)> = None;
        for (path, wish) in wishes.iter().filter(|(_, w)| !w.spec.is_open()) {
            let merged = requested.merge(&wish.spec, self.mode());
            requested = merged.map_err(|e| {
                let other = first.map_or(String::new(), |(other, w)| {
                    format!("{other:?} ({}) and ", named(&w.spec, w.asked_by.as_str()))
                });
                let this = named(&wish.spec, wish.asked_by.as_str());
                Error::from(e).context(format!("one node holds {other}{path:?} ({this})"))
            })?;
            first.get_or_insert((*path, wish));
        }
        let asked_by = first.map(|(_, wish)| wish.asked_by.as_str().to_owned());
        Ok((requested, asked_by.unwrap_or_default()))
    }

    /// The device of the variables that a node uses, as far as they exist already.
    fn assigned(&self, node: &Node) -> Result<DeviceSpec> {
        let mut assigned = DeviceSpec::default();
        for ((container, name), _) in variable_uses(node) {
            let key = (container.to_owned(), name.to_owned());
            if let Some(device) = self.request.state.get(&key) {
                assigned = assigned.merge(&DeviceSpec::only(device), Merge::Hard)?;
            }
        }
        Ok(assigned)
    }

    /// Users of one variable are on one device. The first read stands for the variable; nodes that
    /// use it in their regions keep their requests.
    fn join_variables(&mut self, c: &mut Colocation) -> Vec<Error> {
        let mut users: BTreeMap<Variable<'g>, Vec<usize>> = BTreeMap::new();
        for (member, &id) in self.node_of.iter().enumerate() {
            let uses = variable_uses(self.g.node(id)).into_iter();
            for variable in uses.map(|(v, _)| v).collect::<BTreeSet<_>>() {
                users.entry(variable).or_default().push(member);
            }
        }
        let joined = users
            .into_iter()
            .map(|(variable, users)| self.join_users(c, variable, &users));
        // The other users of a variable would say the same again.
        joined.filter_map(Result::err).collect()
    }

    /// Joins the users of a variable, up to the first error.
    fn join_users(
        &mut self,
        c: &mut Colocation,
        (container, name): Variable<'g>,
        users: &[usize],
    ) -> Result<()> {
        let g = self.g;
        let is_read = |m: &&usize| matches!(g.node(self.node_of[**m]).op, Op::ReadVariable { .. });
        let source = users.iter().find(is_read).copied().unwrap_or(users[0]);
        let slash = if container.is_empty() { "" } else { "/" };
        let why = format!("same variable \"{container}{slash}{name}\"");
        for &user in users.iter().filter(|&&u| u != source) {
            let node = g.node(self.node_of[user]);
            let joined = match node.regions.is_empty() {
                true => c.join_reference(source, user, &why),
                false => c.join(source, user, &why).map(|()| None),
            };
            if let Some(line) = joined.map_err(|e| e.at_origin(&node.origin))? {
                self.note(line);
            }
        }
        Ok(())
    }

    /// Nodes of one colocation group are on one device; the node of the group's name belongs to it.
    fn join_groups(&mut self, c: &mut Colocation) -> Vec<Error> {
        let groups = self.groups().into_iter();
        let joined = groups.map(|(group, users)| self.join_group(c, &group, users));
        joined.filter_map(Result::err).collect()
    }

    /// Members of each colocation group, with the authors of their requests; the node that the
    /// group is named after comes first, so that chains go through it.
    fn groups(&self) -> BTreeMap<Arc<str>, Vec<(usize, String)>> {
        let mut groups: BTreeMap<Arc<str>, Vec<(usize, String)>> = BTreeMap::new();
        for (member, &id) in self.node_of.iter().enumerate() {
            for (_, wish) in wishes(self.g.node(id), &self.request.pins) {
                for (group, by) in wish.groups {
                    let users = groups.entry(group).or_default();
                    // All nodes of a cluster say the same.
                    if users.last().is_none_or(|(last, _)| *last != member) {
                        users.push((member, by.as_str().to_owned()));
                    }
                }
            }
        }
        for (member, &id) in self.node_of.iter().enumerate() {
            for path in paths(self.g.node(id)) {
                if let Some(users) = groups.get_mut(path) {
                    users.insert(0, (member, String::new()));
                }
            }
        }
        groups
    }

    /// Joins the members of a group; by hard placement up to the first error.
    fn join_group(
        &mut self,
        c: &mut Colocation,
        group: &str,
        users: Vec<(usize, String)>,
    ) -> Result<()> {
        let source = users[0].0;
        for (user, by) in users.into_iter().filter(|(u, _)| *u != source) {
            let by = if by.is_empty() {
                by
            } else {
                format!(" by {by}")
            };
            let Err(e) = c.join(source, user, &format!("loc:@{group}{by}")) else {
                continue;
            };
            if self.mode() == Merge::Hard {
                let node = self.g.node(self.node_of[user]);
                return Err(e.at_origin(&node.origin));
            }
            self.note(format!(
                "Ignoring request to colocate node '{}' with nodes in colocation group '{group}' because soft placement is on and \
                 an attempt at doing so resulted in the following error: {e}",
                c.members[user].name
            ));
        }
        Ok(())
    }

    /// Devices of every node.
    fn grant(&mut self, c: &Colocation) -> Vec<Error> {
        let (by_root, mut errors) = self.grant_groups(c);
        if !errors.is_empty() {
            return errors;
        }
        let whys = colocated_through(c);
        for (id, node) in self.g.nodes() {
            let allowed = match (&node.op, self.member_of.get(&id)) {
                (Op::Constant { .. }, _) => None,
                (_, None) => {
                    let unasked = self.unasked(id).map_err(|e| e.at_origin(&node.origin));
                    unasked.map_err(|e| errors.push(e)).ok()
                }
                (_, Some(&m)) => {
                    let (devices, group) = by_root[&c.root(m)].clone();
                    let reason = self.reason(&c.members[m], &devices, whys.get(&m));
                    Some(Allowed {
                        devices,
                        reason,
                        group,
                    })
                }
            };
            self.resolved.allowed.push(allowed);
        }
        errors
    }

    /// Devices of every group, and its number where it has several members, by its root.
    fn grant_groups(&mut self, c: &Colocation) -> (ByRoot, Vec<Error>) {
        let (mut by_root, mut errors) = (ByRoot::new(), Vec::new());
        for root in (0..c.members.len()).filter(|&m| c.root(m) == m) {
            match self.devices_of(c, c.group(root)) {
                Ok(devices) => {
                    let is_group = c.group(root).members.len() > 1;
                    let group = is_group.then_some(self.resolved.n_groups);
                    by_root.insert(root, (devices, group));
                    self.resolved.n_groups += usize::from(is_group);
                }
                Err(e) => errors.push(e),
            }
        }
        (by_root, errors)
    }

    /// Devices of a node of which nothing is asked.
    fn unasked(&self, id: NodeId) -> Result<Allowed> {
        let supports = self.supports(self.g.node(id));
        let devices: Vec<usize> = (0..supports.len()).filter(|&d| supports[d]).collect();
        if devices.is_empty() {
            return Err(conflict::no_kernel_at_all(
                self.g,
                id,
                &self.request.devices,
            ));
        }
        let reason = if devices.len() == 1 {
            Reason::OnlyDevice
        } else {
            Reason::Chosen
        };
        Ok(Allowed {
            devices,
            reason,
            group: None,
        })
    }

    /// Devices of a group, by the steps of the module doc.
    fn devices_of(&mut self, c: &Colocation, group: &Group) -> Result<Vec<usize>> {
        let set = &self.request.devices;
        let able = |spec: &DeviceSpec| -> Vec<usize> {
            set.matching(spec)
                .into_iter()
                .filter(|&d| group.supports[d])
                .collect()
        };
        let devices = able(&group.requested);
        let is_soft = self.mode() == Merge::Soft;
        if !devices.is_empty() {
            self.note_let_go(c, group, &devices, None);
            return Ok(devices);
        }
        let culprit = culprit(c, group, set);
        let problem = conflict::unplaceable(c, culprit, self.g, &self.node_of, set);
        let problem = problem.at_origin(&self.g.node(self.node_of[culprit]).origin);
        if !is_soft {
            return Err(problem);
        }
        let relaxed = group.requested.relaxed();
        let kept = group.assigned.clone().fill(&group.resource).fill(&relaxed);
        let devices = able(&kept);
        if !devices.is_empty() {
            self.note_let_go(c, group, &devices, Some((culprit, problem)));
            return Ok(devices);
        }
        let devices = able(&group.assigned.clone().fill(&relaxed));
        if devices.is_empty() {
            return Err(problem);
        }
        self.note(format!(
            "Failed to place the graph without changing the devices of some resources; candidates are [{}]. {problem}",
            devices.iter().map(|&d| set.devices[d].name.to_string()).collect::<Vec<_>>().join(", ")
        ));
        self.note_let_go(c, group, &devices, None);
        Ok(devices)
    }

    /// Records the members whose request no longer counts, and the problem of the `culprit`.
    fn note_let_go(
        &mut self,
        c: &Colocation,
        group: &Group,
        devices: &[usize],
        culprit: Option<(usize, Error)>,
    ) {
        let set = &self.request.devices.devices;
        let names: Vec<&DeviceName> = devices.iter().map(|&d| &set[d].name).collect();
        let texts: Vec<String> = names.iter().map(|n| n.to_string()).collect();
        let instead = texts.join(", ");
        let mut members = group.members.clone();
        members.sort_unstable();
        for m in members {
            let member = &c.members[m];
            if names.iter().all(|n| member.requested.fits(n)) {
                continue;
            }
            let request = named(&member.requested, &member.asked_by);
            let (sort, why) = match &culprit {
                Some((culprit, problem)) if *culprit == m => {
                    (Why::NoDevice(request), problem.to_string())
                }
                _ => {
                    let why = format!("{request} cannot be had where its group or variable is");
                    (Why::Group(request), why)
                }
            };
            self.note_released(&member.name, &instead, sort, &why);
        }
    }

    /// A line about the released request of a node; of warnings about one request the first only,
    /// which counts the nodes of the others.
    fn note_released(&mut self, name: &str, instead: &str, sort: Why, why: &str) {
        let line = format!("'{name}' is placed on [{instead}] instead: {why}");
        if self.request.fallback == Fallback::Allow {
            self.resolved.log.push(line);
            return;
        }
        let warnings = &mut self.resolved.warnings;
        let released = self
            .released
            .entry((sort, instead.to_owned()))
            .or_insert_with(|| {
                warnings.push(line);
                Released {
                    warning: warnings.len() - 1,
                    n_more: 0,
                    name: name.to_owned(),
                    why: why.to_owned(),
                }
            });
        if released.name != name {
            released.n_more += 1;
            let nodes = if released.n_more == 1 {
                "node"
            } else {
                "nodes"
            };
            warnings[released.warning] = format!(
                "'{}' and {} more {nodes} are placed on [{instead}] instead: {}",
                released.name, released.n_more, released.why
            );
        }
    }

    fn reason(&self, m: &Member, devices: &[usize], why: Option<&String>) -> Reason {
        let set = &self.request.devices;
        let fits = || {
            devices
                .iter()
                .all(|&d| m.requested.fits(&set.devices[d].name))
        };
        match (&m.overridden, why) {
            (Some(line), _) => Reason::Overridden(line.clone()),
            _ if !m.requested.is_open() && !fits() => {
                Reason::Fallback(named(&m.requested, &m.asked_by))
            }
            _ if !m.requested.is_open() => Reason::Asked(named(&m.requested, &m.asked_by)),
            _ if !m.assigned.is_open() => Reason::Asked("where its variable is".into()),
            (_, Some(why)) => Reason::Colocated(why.clone()),
            _ if devices.len() == 1 => Reason::OnlyDevice,
            _ => Reason::Chosen,
        }
    }
}

/// The member to name when a group cannot be placed: the first whose own request has no device, or
/// else that asked for something.
fn culprit(c: &Colocation, group: &Group, set: &DeviceSet) -> usize {
    let cannot = |&&m: &&usize| {
        let m = &c.members[m];
        !m.requested.is_open() && !set.matching(&m.requested).iter().any(|&d| m.supports[d])
    };
    let asks = |&&m: &&usize| !c.members[m].requested.is_open();
    let found = group
        .members
        .iter()
        .filter(cannot)
        .min()
        .or_else(|| group.members.iter().filter(asks).min());
    found.copied().unwrap_or_else(|| group.first())
}

/// Of each member of a group that asked for nothing: the edge that brought it there, and the member
/// that asked.
fn colocated_through(c: &Colocation) -> BTreeMap<usize, String> {
    let mut whys = BTreeMap::new();
    for root in (0..c.members.len()).filter(|&m| c.root(m) == m && c.group(m).members.len() > 1) {
        let asks =
            |m: &usize| !c.members[*m].requested.is_open() || !c.members[*m].assigned.is_open();
        let group = c.group(root);
        let mut starts: Vec<usize> = group.members.iter().copied().filter(asks).collect();
        if starts.is_empty() {
            starts.push(group.first());
        }
        for (m, previous, why) in c.reach(&starts) {
            let own = if m == previous {
                "others are colocated with it".to_owned()
            } else {
                format!("{why}, with '{}'", c.members[previous].name)
            };
            whys.insert(m, own);
        }
    }
    whys
}

#[cfg(test)]
mod tests;
