//! Messages about nodes that no device can take: TensorFlow's contents, and who asked and the
//! shortest chain of edges between two nodes that contradict each other.

use super::colocate::{Colocation, Group, Member};
use super::device::DeviceSet;
use crate::error::{Error, ErrorKind};
use crate::ir::{Graph, NodeId};
use crate::nearest::nearest;
use gristmill_runtime::device::{DeviceKind, DeviceSpec};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// Members listed of a group; more are counted.
const MAX_LISTED: usize = 8;

/// The error of an edge between `a` and `b` that cannot be: `cause` says which rule it breaks.
pub(super) fn cannot_colocate(
    c: &Colocation,
    (a, b): (usize, usize),
    why: &str,
    cause: Error,
) -> Error {
    let (x, y) = (&c.members[a].name, &c.members[b].name);
    let kind = cause.kind();
    let text = match kind {
        ErrorKind::Unsupported => format!("Cannot colocate nodes '{x}' and '{y}' because {cause}"),
        _ => format!("Cannot colocate nodes '{x}' and '{y}': {cause}"),
    };
    let chain =
        chain_across(c, a, b, why).map_or(String::new(), |chain| format!("\n  chain: {chain}"));
    Error::new(
        kind,
        format!(
            "{text}{chain}{}{}",
            debug_info(c, c.group(a)),
            debug_info(c, c.group(b))
        ),
    )
}

/// The members on the way from one member back to another, each with the edge that leads on from
/// it.
type Way = Vec<(usize, Rc<str>)>;

/// A member of each distinct demand, nearest first, with its way back to `start`.
fn demands(c: &Colocation, start: usize) -> Vec<(usize, Way)> {
    let reached = c.reach(&[start]);
    let back: BTreeMap<usize, (usize, Rc<str>)> = reached
        .iter()
        .map(|(m, p, why)| (*m, (*p, why.clone())))
        .collect();
    let mut seen = BTreeSet::new();
    let mut found = Vec::new();
    for (member, _, _) in &reached {
        let m = &c.members[*member];
        if seen.insert((&m.requested, &m.resource, &m.assigned, &m.supports)) {
            let mut way = Way::new();
            let mut at = *member;
            while at != start {
                let (previous, why) = back[&at].clone();
                way.push((at, why));
                at = previous;
            }
            found.push((*member, way));
        }
    }
    found
}

fn contradict(a: &Member, b: &Member) -> bool {
    let specs = |m: &Member| [m.requested.clone(), m.resource.clone(), m.assigned.clone()];
    specs(a)
        .iter()
        .any(|x| specs(b).iter().any(|y| !x.is_compatible(y)))
        || !a.supports.iter().zip(&b.supports).any(|(x, y)| *x && *y)
}

/// The shortest chain from a member on the side of `a` to one on the side of `b` that contradicts
/// it, through the edge between them.
fn chain_across(c: &Colocation, a: usize, b: usize, why: &str) -> Option<String> {
    let (left, right) = (demands(c, a), demands(c, b));
    let pairs = left.iter().flat_map(|l| right.iter().map(move |r| (l, r)));
    let (l, r) = pairs
        .filter(|((p, _), (q, _))| contradict(&c.members[*p], &c.members[*q]))
        .min_by_key(|((p, there), (q, back))| (there.len() + back.len(), *p, *q))?;
    let mut text = link(c, l.0);
    let mut names = Way::new();
    // The way of `l` leads from it to `a`; that of `r`, backwards, from `b` to it.
    for (i, (_, why)) in l.1.iter().enumerate() {
        names.push((l.1.get(i + 1).map_or(a, |(m, _)| *m), why.clone()));
    }
    names.push((b, why.into()));
    names.extend(r.1.iter().rev().cloned());
    for (i, (member, why)) in names.iter().enumerate() {
        let end = i + 1 == names.len();
        let name = if end {
            link(c, *member)
        } else {
            format!("'{}'", c.members[*member].name)
        };
        text.push_str(&format!(" -- {why} -- {name}"));
    }
    Some(text)
}

/// An end of a chain: the name and its demand.
fn link(c: &Colocation, member: usize) -> String {
    let m = &c.members[member];
    format!("'{}' ({})", m.name, demand(c, m))
}

fn demand(c: &Colocation, m: &Member) -> String {
    let mut parts = Vec::new();
    if !m.assigned.is_open() {
        parts.push(format!("assigned to {}", m.assigned));
    }
    if !m.requested.is_open() {
        let by = if m.asked_by.is_empty() {
            String::new()
        } else {
            format!(" by {}", m.asked_by)
        };
        let what = if m.resource.is_open() {
            "asked for"
        } else {
            "variable asked for"
        };
        parts.push(format!("{what} {}{by}", m.requested));
    }
    if parts.is_empty() || m.supports.contains(&false) {
        parts.push(format!("kernels on [{}]", kinds(c, &m.supports)));
    }
    parts.join(", ")
}

fn kinds(c: &Colocation, supports: &[bool]) -> String {
    let kinds: BTreeSet<&str> = c
        .kinds
        .iter()
        .zip(supports)
        .filter(|(_, s)| **s)
        .map(|(k, _)| *k)
        .collect();
    kinds.into_iter().collect::<Vec<_>>().join(", ")
}

/// The members of a group with op, kernels and demands; nothing for a single node.
fn debug_info(c: &Colocation, group: &Group) -> String {
    if group.members.len() < 2 {
        return String::new();
    }
    let mut text = format!(
        "\n  colocation group: requested '{}', resource '{}', assigned '{}', kernels for all on [{}]",
        group.requested,
        group.resource,
        group.assigned,
        kinds(c, &group.supports)
    );
    let mut members = group.members.clone();
    members.sort_unstable();
    for &member in members.iter().take(MAX_LISTED) {
        let m = &c.members[member];
        text.push_str(&format!("\n    '{}' ({}): {}", m.name, m.op, demand(c, m)));
    }
    if group.members.len() > MAX_LISTED {
        text.push_str(&format!(
            "\n    and {} more",
            group.members.len() - MAX_LISTED
        ));
    }
    text
}

/// The error of a node whose group no device can take.
pub(super) fn unplaceable(
    c: &Colocation,
    member: usize,
    g: &Graph,
    node_of: &[NodeId],
    set: &DeviceSet,
) -> Error {
    let (m, group) = (&c.members[member], c.group(member));
    let spec = &group.requested;
    let (blocker, chain) = blocker(c, member, &set.matching(spec));
    let (blocker, op) = (node_of[blocker], c.members[blocker].op);
    let details = format!(
        "{chain}{}\n  kernels of {op}: {}",
        debug_info(c, group),
        registered(set, g, blocker)
    );
    let error = if spec.is_open() {
        no_kernel_at_all(g, node_of[member], set)
    } else if m.requested.is_open() {
        // Nobody asks for the devices that are fixed, so state fixed them.
        let kind = spec.device_type.as_deref().unwrap_or("such");
        Error::unsupported(format!(
            "Could not keep '{}' on '{spec}', where its variable is, because no supported kernel for {kind} devices is available.{details}",
            m.name
        ))
        .hint("a new session, whose variables are placed again")
    } else if m.requested == *spec {
        match set.matching(spec).is_empty() {
            true => unknown(
                &format!("{} was explicitly assigned to {spec} but", m.name),
                spec,
                set,
            ),
            false => no_kernel(spec, &details),
        }
    } else {
        Error::unsupported(format!(
            "Could not satisfy explicit device specification '{}' because the node '{}' was colocated with a group of nodes that required \
             incompatible device '{spec}'. All available devices [{}]{details}",
            m.requested,
            m.name,
            available(set),
        ))
        .hint("--fallback warn, or one device that all of them can be on")
    };
    let asked = if m.requested.is_open() || m.asked_by.is_empty() {
        String::new()
    } else {
        format!("{}: ", m.asked_by)
    };
    error.context(format!(
        "{asked}Cannot assign a device for operation {}",
        m.name
    ))
}

/// The error of a node that no device of the set has a kernel for.
pub(super) fn no_kernel_at_all(g: &Graph, id: NodeId, set: &DeviceSet) -> Error {
    Error::unsupported(format!(
        "no kernel registered to support this operation: {}\n  devices: [{}]\n  kernels of {}: {}",
        signature(g, id),
        available(set),
        g.node(id).op.name(),
        registered(set, g, id)
    ))
    .hint("--devices with a device that has the kernel")
}

/// The nearest member that has no kernel on any of `devices`, else that asks for something else,
/// and the shortest chain to it.
fn blocker(c: &Colocation, member: usize, devices: &[usize]) -> (usize, String) {
    let demands = demands(c, member);
    let lacks = |m: &Member| !devices.is_empty() && !devices.iter().any(|&d| m.supports[d]);
    let differs = |m: &Member| !m.requested.is_open() && m.requested != c.members[member].requested;
    let found = demands.iter().find(|(q, _)| lacks(&c.members[*q]));
    let found = found.or_else(|| demands.iter().find(|(q, _)| differs(&c.members[*q])));
    let Some((end, way)) = found.filter(|(q, _)| *q != member) else {
        return (member, String::new());
    };
    let mut text = format!("\n  chain: {}", link(c, member));
    for (i, (m, why)) in way.iter().rev().enumerate() {
        let name = if i + 1 == way.len() {
            link(c, *m)
        } else {
            format!("'{}'", c.members[*m].name)
        };
        text.push_str(&format!(" -- {why} -- {name}"));
    }
    (*end, text)
}

fn available(set: &DeviceSet) -> String {
    let mut names: Vec<String> = set.devices.iter().map(|d| d.name.to_string()).collect();
    names.sort();
    names.join(", ")
}

/// The error of a specification that fits no device; the message opens with `what`, and ends with
/// the devices there are.
pub(super) fn unknown(what: &str, spec: &DeviceSpec, set: &DeviceSet) -> Error {
    let cuda = match spec.device_type.as_deref() {
        Some("GPU") if !set.devices.iter().any(|d| d.name.kind == DeviceKind::Gpu) => {
            " None of them is a GPU."
        }
        _ => "",
    };
    let error = Error::invalid(format!(
        "{what} available devices are [{}]. Make sure the device specification refers to a valid device.{cuda}",
        available(set)
    ));
    error.hint(near_device(spec, set))
}

/// An alternative to a specification that fits no device.
fn near_device(spec: &DeviceSpec, set: &DeviceSet) -> String {
    let names: Vec<String> = set.devices.iter().map(|d| d.name.to_string()).collect();
    let near = nearest(&spec.to_string(), names.iter().map(String::as_str), 1);
    near.first()
        .map_or("--devices with the device in it".to_owned(), |n| {
            format!("{n}, or --devices with the device in it")
        })
}

fn no_kernel(spec: &DeviceSpec, details: &str) -> Error {
    let why = match &spec.device_type {
        Some(t) => format!("because no supported kernel for {t} devices is available"),
        None => "because no device that fits has a kernel".to_owned(),
    };
    Error::unsupported(format!(
        "Could not satisfy explicit device specification '{spec}' {why}.{details}"
    ))
    .hint("--devices with a CPU in it, or --fallback allow")
}

/// `matmul(f32[2, 3], f32[3, 4]) {attributes} -> f32[2, 4]`, with the devices there are and their
/// kernels.
fn signature(g: &Graph, id: NodeId) -> String {
    let node = g.node(id);
    let types = |values: &[crate::ir::ValueId]| -> String {
        values
            .iter()
            .map(|&v| g.ty(v).to_string())
            .collect::<Vec<_>>()
            .join(", ")
    };
    let attrs: Vec<String> = node
        .op
        .attrs()
        .into_iter()
        .map(|(name, value)| format!("{name} = {value}"))
        .collect();
    let attrs = if attrs.is_empty() {
        String::new()
    } else {
        format!(" {{{}}}", attrs.join(", "))
    };
    format!(
        "{}({}){attrs} -> {}",
        node.op.name(),
        types(&node.inputs),
        types(&node.outputs)
    )
}

/// `CPU yes; GPU no (why)`, kinds in order.
pub(super) fn registered(set: &DeviceSet, g: &Graph, id: NodeId) -> String {
    let mut by_kind: BTreeMap<&str, Option<String>> = BTreeMap::new();
    for d in &set.devices {
        let lacks = d.kernels.lacks(g.node(id));
        let entry = by_kind.entry(d.name.kind.name()).or_insert(lacks.clone());
        if lacks.is_none() {
            *entry = None;
        }
    }
    let text = |(kind, lacks): (&str, Option<String>)| match lacks {
        None => format!("{kind} yes"),
        Some(why) => format!("{kind} no ({why})"),
    };
    by_kind.into_iter().map(text).collect::<Vec<_>>().join("; ")
}
