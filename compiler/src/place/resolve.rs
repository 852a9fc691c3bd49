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
        let supports = self.supports(node);
        let mut m = Member {
            name: name_of(id, node),
            op: node.op.name(),
            supports,
            ..Member::default()
        };
        let mut from: Option<(&str, &DeviceRequest)> = None;
        for (path, wish) in wishes.iter().filter(|(_, w)| !w.spec.is_open()) {
            m.requested = m.requested.merge(&wish.spec, self.mode()).map_err(|e| {
                let other = from.map_or(String::new(), |(other, w)| {
                    format!("{other:?} ({}) and ", named(&w.spec, w.asked_by.as_str()))
                });
                let this = named(&wish.spec, wish.asked_by.as_str());
                Error::from(e).context(format!("one node holds {other}{path:?} ({this})"))
            })?;
            from.get_or_insert((*path, wish));
        }
        m.asked_by = from
            .map(|(_, wish)| wish.asked_by.as_str().to_owned())
            .unwrap_or_default();
        if let Op::ReadVariable { .. } = node.op {
            m.resource = m.requested.clone();
        }
        for ((container, name), _) in variable_uses(node) {
            if let Some(device) = self
                .request
                .state
                .get(&(container.to_owned(), name.to_owned()))
            {
                m.assigned = m.assigned.merge(&DeviceSpec::only(device), Merge::Hard)?;
            }
        }
        let stays =
            |e| Error::from(e).context(format!("its variable is on {} already", m.assigned));
        m.requested.merge(&m.assigned, self.mode()).map_err(stays)?;
        m.resource.merge(&m.assigned, Merge::Hard).map_err(stays)?;
        Ok(m)
    }

    /// Users of one variable are on one device. The first read stands for the variable; nodes that
    /// use it in their regions keep their requests.
    fn join_variables(&mut self, c: &mut Colocation) -> Vec<Error> {
        let mut users: BTreeMap<Variable<'g>, Vec<usize>> = BTreeMap::new();
        for (member, &id) in self.node_of.iter().enumerate() {
            let uses: BTreeSet<Variable<'g>> = variable_uses(self.g.node(id))
                .into_iter()
                .map(|(v, _)| v)
                .collect();
            uses.into_iter()
                .for_each(|v| users.entry(v).or_default().push(member));
        }
        let (g, node_of) = (self.g, self.node_of.clone());
        let of = |m: usize| g.node(node_of[m]);
        let mut errors = Vec::new();
        for ((container, name), users) in users {
            let is_read = |m: &&usize| matches!(of(**m).op, Op::ReadVariable { .. });
            let source = users.iter().find(is_read).copied().unwrap_or(users[0]);
            let slash = if container.is_empty() { "" } else { "/" };
            let why = format!("same variable \"{container}{slash}{name}\"");
            for &user in users.iter().filter(|&&u| u != source) {
                let (is_plain, origin) = (of(user).regions.is_empty(), of(user).origin.clone());
                let joined = match is_plain {
                    true => c.join_reference(source, user, &why),
                    false => c.join(source, user, &why).map(|()| None),
                };
                match joined {
                    Ok(line) => line.into_iter().for_each(|line| self.note(line)),
                    Err(e) => {
                        // The other users would say the same again.
                        errors.push(e.at_origin(&origin));
                        break;
                    }
                }
            }
        }
        errors
    }

    /// Nodes of one colocation group are on one device; the node of the group's name belongs to it.
    fn join_groups(&mut self, c: &mut Colocation) -> Vec<Error> {
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
                    // The named node comes first, so that chains go through it.
                    users.insert(0, (member, String::new()));
                }
            }
        }
        let mut errors = Vec::new();
        for (group, users) in groups {
            let source = users[0].0;
            for (user, by) in users.into_iter().filter(|(u, _)| *u != source) {
                let by = if by.is_empty() {
                    by
                } else {
                    format!(" by {by}")
                };
                if let Err(e) = c.join(source, user, &format!("loc:@{group}{by}")) {
                    let node = self.g.node(self.node_of[user]);
                    match self.mode() {
                        Merge::Hard => {
                            errors.push(e.at_origin(&node.origin));
                            break;
                        }
                        Merge::Soft => self.note(format!(
                            "Ignoring request to colocate node '{}' with nodes in colocation group '{group}' because soft placement is on and \
                             an attempt at doing so resulted in the following error: {e}",
                            c.members[user].name
                        )),
                    }
                }
            }
        }
        errors
    }

    /// Devices of every node.
    fn grant(&mut self, c: &Colocation) -> Vec<Error> {
        let mut errors: Vec<Error> = Vec::new();
        let mut by_root: BTreeMap<usize, (Vec<usize>, Option<usize>)> = BTreeMap::new();
        for member in 0..c.members.len() {
            if c.root(member) != member {
                continue;
            }
            match self.devices_of(c, c.group(member)) {
                Ok(devices) => {
                    let is_group = c.group(member).members.len() > 1;
                    by_root.insert(
                        member,
                        (devices, is_group.then_some(self.resolved.n_groups)),
                    );
                    self.resolved.n_groups += usize::from(is_group);
                }
                Err(e) => errors.push(e),
            }
        }
        if !errors.is_empty() {
            return errors;
        }
        let whys = colocated_through(c);
        for (id, node) in self.g.nodes() {
            let allowed = match (&node.op, self.member_of.get(&id)) {
                (Op::Constant { .. }, _) => None,
                (_, None) => match self.unasked(id) {
                    Ok(a) => Some(a),
                    Err(e) => {
                        errors.push(e.at_origin(&node.origin));
                        None
                    }
                },
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
        let names: Vec<&DeviceName> = devices
            .iter()
            .map(|&d| &self.request.devices.devices[d].name)
            .collect();
        let instead = names
            .iter()
            .map(|n| n.to_string())
            .collect::<Vec<_>>()
            .join(", ");
        let mut members = group.members.clone();
        members.sort_unstable();
        for m in members {
            let member = &c.members[m];
            if names.iter().all(|n| member.requested.fits(n)) {
                continue;
            }
            let why = match &culprit {
                Some((culprit, problem)) if *culprit == m => problem.to_string(),
                _ => format!(
                    "{} cannot be had where its group or variable is",
                    named(&member.requested, &member.asked_by)
                ),
            };
            self.note(format!(
                "'{}' is placed on [{instead}] instead: {why}",
                member.name
            ));
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
