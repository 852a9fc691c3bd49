//! Colocation: union-find over the nodes to place, with three specifications per group, as
//! TensorFlow's `ColocationGraph` has them.
//!
//! *Assigned* is the device that already holds state; *resource* is requested of a node that makes
//! a variable's value; *requested* is requested of any member, and always at least as specific as
//! the other two. Requests that differ are merged by [`Merge`]; the other two never give way.

use super::conflict;
use crate::error::{Error, Result};
use gristmill_runtime::device::{DeviceSpec, Merge};
use std::collections::BTreeSet;
use std::rc::Rc;

/// A node to place.
#[derive(Clone, Debug, Default)]
pub(super) struct Member {
    /// Its path, or another name where it has none.
    pub name: String,
    /// Its op.
    pub op: &'static str,
    /// By device of the set, true where the device has kernels for it.
    pub supports: Vec<bool>,
    /// Where its state is.
    pub assigned: DeviceSpec,
    /// Request made of it as the maker of a variable's value.
    pub resource: DeviceSpec,
    /// Request made of it.
    pub requested: DeviceSpec,
    /// Who asked.
    pub asked_by: String,
    /// Why its request does not count: that of its variable does.
    pub overridden: Option<String>,
}

/// Members that must be on one device.
#[derive(Clone, Debug)]
pub(super) struct Group {
    /// In no order that means anything; see [`Group::first`].
    pub members: Vec<usize>,
    /// Devices with kernels for all members.
    pub supports: Vec<bool>,
    /// Where state of a member is.
    pub assigned: DeviceSpec,
    /// Requests made of members that make a variable's value, merged.
    pub resource: DeviceSpec,
    /// Requests made of any member, merged.
    pub requested: DeviceSpec,
}

impl Group {
    /// The first member.
    pub fn first(&self) -> usize {
        self.members
            .iter()
            .copied()
            .min()
            .expect("a group has a member")
    }
}

/// The groups so far, and the edges that made them.
pub(super) struct Colocation {
    /// The nodes.
    pub members: Vec<Member>,
    /// Kind of each device of the set, for messages.
    pub kinds: Vec<&'static str>,
    mode: Merge,
    parent: Vec<usize>,
    groups: Vec<Option<Group>>,
    edges: Vec<Vec<(usize, Rc<str>)>>,
}

impl Colocation {
    /// Each member a group of its own.
    pub fn new(members: Vec<Member>, kinds: Vec<&'static str>, mode: Merge) -> Colocation {
        let group = |(i, m): (usize, &Member)| {
            Some(Group {
                members: vec![i],
                supports: m.supports.clone(),
                assigned: m.assigned.clone(),
                resource: m.resource.clone(),
                requested: specialise(specialise(m.requested.clone(), &m.assigned), &m.resource),
            })
        };
        Colocation {
            parent: (0..members.len()).collect(),
            groups: members.iter().enumerate().map(group).collect(),
            edges: vec![Vec::new(); members.len()],
            members,
            kinds,
            mode,
        }
    }

    /// The member that stands for the group.
    pub fn root(&self, mut member: usize) -> usize {
        while self.parent[member] != member {
            member = self.parent[member];
        }
        member
    }

    /// The group of a member.
    pub fn group(&self, member: usize) -> &Group {
        self.groups[self.root(member)]
            .as_ref()
            .expect("a root has its group")
    }

    /// Joins two groups through an edge between `a` and `b`.
    ///
    /// Errors, and changes nothing, when their specifications cannot be merged or no device has
    /// kernels for both; the message has the groups' members and the shortest chain of edges
    /// between two members that contradict each other.
    pub fn join(&mut self, a: usize, b: usize, why: &str) -> Result<()> {
        let (x, y) = (self.root(a), self.root(b));
        if x != y {
            let mut merged = self
                .merged(a, b)
                .map_err(|e| conflict::cannot_colocate(self, (a, b), why, e))?;
            let (large, small) = if self.group(x).members.len() >= self.group(y).members.len() {
                (x, y)
            } else {
                (y, x)
            };
            self.parent[small] = large;
            let mut members = |half: usize| {
                self.groups[half]
                    .take()
                    .expect("a root has its group")
                    .members
            };
            merged.members = members(large);
            merged.members.extend(members(small));
            self.groups[large] = Some(merged);
        }
        let why: Rc<str> = why.into();
        self.edges[a].push((b, why.clone()));
        self.edges[b].push((a, why));
        Ok(())
    }

    /// The two groups as one, its members left out.
    fn merged(&self, a: usize, b: usize) -> Result<Group> {
        let (x, y) = (self.group(a), self.group(b));
        let assigned = x.assigned.merge(&y.assigned, Merge::Hard)?;
        let resource = x.resource.merge(&y.resource, Merge::Hard)?;
        assigned.merge(&resource, Merge::Hard)?;
        let requested = x.requested.merge(&y.requested, self.mode)?;
        let supports: Vec<bool> = x
            .supports
            .iter()
            .zip(&y.supports)
            .map(|(p, q)| *p && *q)
            .collect();
        if !supports.contains(&true) {
            return Err(Error::unsupported(
                "no device type supports both of those nodes and the other nodes colocated with them",
            ));
        }
        let requested = specialise(specialise(requested, &assigned), &resource);
        Ok(Group {
            members: Vec::new(),
            supports,
            assigned,
            resource,
            requested,
        })
    }

    /// Joins a use of a variable to the node that stands for it. Where their requests contradict,
    /// that of the user does not count.
    ///
    /// Returns the log line, if a request was dropped. Errors as [`Colocation::join`].
    pub fn join_reference(
        &mut self,
        source: usize,
        user: usize,
        why: &str,
    ) -> Result<Option<String>> {
        let (from, to) = (
            self.group(source).requested.clone(),
            self.group(user).requested.clone(),
        );
        let line = (!from.is_compatible(&to)).then(|| {
            format!(
                "Ignoring device specification {to} for node '{}' because the input edge from '{}' is a reference connection and already has \
                 a device field set to {from}",
                self.members[user].name, self.members[source].name
            )
        });
        if let Some(line) = &line {
            for member in self.group(user).members.clone() {
                let m = &mut self.members[member];
                if !m.requested.is_compatible(&from) && m.resource.is_open() {
                    m.requested = DeviceSpec::default();
                    m.overridden = Some(line.clone());
                }
            }
            let root = self.root(user);
            let group = self.groups[root].as_mut().expect("a root has its group");
            group.requested = specialise(specialise(from, &group.assigned), &group.resource);
        }
        self.join(source, user, why)?;
        Ok(line)
    }

    /// Members by distance in edges from the nearest of `starts`, each with the way back: (member,
    /// previous member, edge).
    pub fn reach(&self, starts: &[usize]) -> Vec<(usize, usize, Rc<str>)> {
        let mut seen: BTreeSet<usize> = starts.iter().copied().collect();
        let mut found: Vec<(usize, usize, Rc<str>)> =
            seen.iter().map(|&s| (s, s, "".into())).collect();
        let mut at = 0;
        while at < found.len() {
            let member = found[at].0;
            for (next, why) in self.edges[member]
                .iter()
                .filter(|(next, _)| seen.insert(*next))
            {
                found.push((*next, member, why.clone()));
            }
            at += 1;
        }
        found
    }
}

/// `spec` with the fields that `by` has.
fn specialise(spec: DeviceSpec, by: &DeviceSpec) -> DeviceSpec {
    by.clone().fill(&spec)
}
