//! Decides which nodes share a cluster.

use super::fuse::Kernel;
use super::{bytes, legal};
use crate::ir::{ClusterKind, Graph, NodeId, Op, ValueId};
use std::collections::BTreeSet;

/// A producer of at most this many operations per element may be computed again in each consumer.
const CHEAP_FLOPS: u32 = 8;

/// A cluster to be.
#[derive(Clone, Debug)]
pub struct Group {
    /// Kind of its anchor.
    pub kind: ClusterKind,
    /// The node that founded it.
    pub anchor: NodeId,
    /// Members; a node that is duplicated is a member of several groups.
    pub members: BTreeSet<NodeId>,
}

/// The groups, and for each node the one that computes it for everybody outside.
#[derive(Debug)]
pub struct Grouping {
    /// All groups, in order of their founding.
    pub groups: Vec<Group>,
    /// Home group of each node.
    pub home: Vec<Option<usize>>,
    /// Refused fusions: origin, reason.
    pub missed: Vec<(String, String)>,
}

struct Grouper<'g> {
    g: &'g Graph,
    users: Vec<Vec<(NodeId, usize)>>,
    is_output: Vec<bool>,
    groups: Vec<Group>,
    home: Vec<Option<usize>>,
    /// Groups that each node is a member of.
    member_of: Vec<Vec<usize>>,
    missed: Vec<(String, String)>,
    /// Nodes with control edges.
    ordered: Vec<bool>,
}

impl Grouping {
    /// One group per node.
    pub fn singletons(g: &Graph) -> Grouping {
        let mut grouping = Grouping {
            groups: Vec::new(),
            home: vec![None; g.n_nodes()],
            missed: Vec::new(),
        };
        for (id, node) in g.nodes() {
            if let Some(kind) = legal::kind_of(&node.op) {
                grouping.home[id.0 as usize] = Some(grouping.groups.len());
                grouping.groups.push(Group {
                    kind,
                    anchor: id,
                    members: BTreeSet::from([id]),
                });
            }
        }
        grouping
    }

    /// One group for each of the kernels that were chosen by predicted time.
    pub fn chosen(g: &Graph, kernels: &[Kernel]) -> Grouping {
        let mut home = vec![None; g.n_nodes()];
        for (i, kernel) in kernels.iter().enumerate() {
            // What is stored lives where it is stored, the rest where it is computed first.
            for id in &kernel.members {
                home[id.0 as usize].get_or_insert(i);
            }
        }
        kernels
            .iter()
            .enumerate()
            .for_each(|(i, k)| home[k.root.0 as usize] = Some(i));
        let group = |k: &Kernel| Group {
            kind: k.kind,
            anchor: k.anchor,
            members: k.members.iter().copied().collect(),
        };
        Grouping {
            groups: kernels.iter().map(group).collect(),
            home,
            missed: Vec::new(),
        }
    }

    /// Groups the nodes of a graph.
    pub fn of(g: &Graph) -> Grouping {
        let mut is_output = vec![false; g.n_values()];
        g.outputs
            .iter()
            .for_each(|o| is_output[o.value.0 as usize] = true);
        let n = g.n_nodes();
        let mut grouper = Grouper {
            g,
            users: g.users(),
            is_output,
            groups: Vec::new(),
            home: vec![None; n],
            member_of: vec![Vec::new(); n],
            missed: Vec::new(),
            ordered: g.ordered(),
        };
        grouper.found_anchors();
        grouper.grow_epilogues();
        grouper.join_producers();
        Grouping {
            groups: grouper.groups,
            home: grouper.home,
            missed: grouper.missed,
        }
    }
}

impl Grouper<'_> {
    fn found(&mut self, id: NodeId, kind: ClusterKind) -> usize {
        self.groups.push(Group {
            kind,
            anchor: id,
            members: BTreeSet::new(),
        });
        let group = self.groups.len() - 1;
        self.insert(group, id);
        self.home[id.0 as usize] = Some(group);
        group
    }

    fn insert(&mut self, group: usize, id: NodeId) {
        if self.groups[group].members.insert(id) {
            self.member_of[id.0 as usize].push(group);
        }
    }

    /// Every op that is not a view, a source or element-wise founds a group; contractions take the views they can read by strides, and
    /// what makes 32-bit operands of bytes.
    fn found_anchors(&mut self) {
        for (id, node) in self.g.nodes() {
            let Some(kind) = legal::kind_of(&node.op) else {
                continue;
            };
            if kind == ClusterKind::Map && !is_barrier(&node.op) {
                continue;
            }
            let group = self.found(id, kind);
            if let Some(left) = bytes::product(self.g, node) {
                let may_join = left.nodes.iter().all(|&m| self.may_join(id, m));
                left.nodes
                    .into_iter()
                    .filter(|_| may_join)
                    .for_each(|m| self.insert(group, m));
            } else if matches!(node.op, Op::MatMul | Op::Attention { .. }) {
                for i in 0..node.inputs.len() {
                    if legal::reads_by_strides(self.g, node, i) {
                        self.take_views(group, node.inputs[i], id);
                    }
                }
            }
        }
    }

    /// Adds the views that define `v` to the group as duplicates.
    fn take_views(&mut self, group: usize, v: ValueId, anchor: NodeId) {
        for id in legal::views_below(self.g, v) {
            if !self.may_join(anchor, id) {
                return;
            }
            self.insert(group, id);
        }
    }

    /// Whether two nodes may share a cluster: their requests are the same, and no control edge orders them.
    fn may_join(&self, a: NodeId, b: NodeId) -> bool {
        legal::may_share(self.g, &self.ordered, a, b).is_ok()
    }

    /// The only user of a value, when it has one, is not an output, and has no home yet.
    fn only_user(&self, v: ValueId) -> Option<NodeId> {
        let users = &self.users[v.0 as usize];
        let first = users.first()?.0;
        let free = !self.is_output[v.0 as usize] && users.iter().all(|u| u.0 == first);
        (free
            && self.home[first.0 as usize].is_none()
            && legal::kind_of(&self.g.node(first).op).is_some())
        .then_some(first)
    }

    /// True when some group outside reads the view by strides already.
    fn is_taken(&self, id: NodeId) -> bool {
        !self.member_of[id.0 as usize].is_empty()
    }

    fn grow_epilogues(&mut self) {
        for group in 0..self.groups.len() {
            let anchor = self.groups[group].anchor;
            let node = self.g.node(anchor);
            match node.op {
                Op::MatMul | Op::Conv { .. } if legal::takes_epilogue(self.g, node) => {
                    self.grow_contraction(group, anchor)
                }
                Op::Reduce { .. } => self.grow_reduction(group, anchor),
                _ => {}
            }
        }
    }

    fn grow_contraction(&mut self, group: usize, anchor: NodeId) {
        let mut chain = self.g.node(anchor).outputs[0];
        let mut tail = legal::Tail::default();
        while let Some(id) = self.only_user(chain) {
            if self.is_taken(id) || !self.may_join(anchor, id) {
                return;
            }
            let node = self.g.node(id);
            match tail.with(self.g, self.g.node(anchor), node, chain) {
                Ok(longer) => tail = longer,
                Err(reason) => {
                    let origin = self.g.node(anchor).origin.to_string();
                    return self
                        .missed
                        .push((origin, format!("epilogue {}: {reason}", node.op.name())));
                }
            }
            chain = node.outputs[0];
            self.insert(group, id);
            self.home[id.0 as usize] = Some(group);
        }
    }

    /// Element-wise ops on the reduced result, e.g. `+ epsilon`, `sqrt`.
    fn grow_reduction(&mut self, group: usize, anchor: NodeId) {
        let mut chain = self.g.node(anchor).outputs[0];
        while let Some(id) = self.only_user(chain) {
            let node = self.g.node(id);
            if legal::follows_reduction(self.g, node, chain).is_err()
                || self.is_taken(id)
                || !self.may_join(anchor, id)
            {
                return;
            }
            chain = node.outputs[0];
            self.insert(group, id);
            self.home[id.0 as usize] = Some(group);
        }
    }

    /// From the last node to the first: a producer joins its only consumer group, or all of them as a duplicate, or founds its own.
    fn join_producers(&mut self) {
        for (id, node) in self.g.nodes().rev() {
            if self.home[id.0 as usize].is_some() {
                continue;
            }
            let Some(kind) = legal::kind_of(&node.op) else {
                continue;
            };
            let (groups, outside) = self.uses(id);
            if groups.is_empty() && !outside {
                continue;
            }
            let refusal = if outside {
                Some("its value is needed outside".to_owned())
            } else {
                groups.iter().find_map(|&u| self.accepts(u, id).err())
            };
            match (refusal, groups.as_slice()) {
                (None, [only]) => {
                    self.insert(*only, id);
                    self.home[id.0 as usize] = Some(*only);
                }
                (None, many) if self.is_duplicable(id) => {
                    many.iter().for_each(|&u| self.insert(u, id))
                }
                (refusal, _) => {
                    if let Some(reason) = refusal.filter(|_| !outside) {
                        self.missed.push((
                            node.origin.to_string(),
                            format!("{}: {reason}", node.op.name()),
                        ));
                    }
                    self.found(id, kind);
                }
            }
        }
    }

    /// Groups that read the node's results from outside themselves, and whether something that is no group does.
    fn uses(&self, id: NodeId) -> (Vec<usize>, bool) {
        let (mut groups, mut outside) = (BTreeSet::new(), false);
        for &v in &self.g.node(id).outputs {
            outside |= self.is_output[v.0 as usize];
            for (user, _) in &self.users[v.0 as usize] {
                let member_of = &self.member_of[user.0 as usize];
                outside |= legal::kind_of(&self.g.node(*user).op).is_none();
                groups.extend(
                    member_of
                        .iter()
                        .filter(|&&u| !self.groups[u].members.contains(&id)),
                );
            }
        }
        (groups.into_iter().collect(), outside)
    }

    fn is_duplicable(&self, id: NodeId) -> bool {
        let node = self.g.node(id);
        match &node.op {
            Op::Map(op) => {
                let wide = node
                    .inputs
                    .iter()
                    .filter(|&&v| legal::n_elements(self.g, v) > 1)
                    .count();
                wide <= 1 && op.spec().flops <= CHEAP_FLOPS
            }
            _ => true,
        }
    }

    /// Whether a group can compute `id` inside its loops. Errors say why not.
    fn accepts(&self, group: usize, id: NodeId) -> Result<(), String> {
        let (g, node) = (self.g, self.g.node(id));
        let anchor = self.groups[group].anchor;
        let anchor_node = g.node(anchor);
        legal::may_share(g, &self.ordered, anchor, id)?;
        if self.groups[group].members.len() >= legal::MAX_MEMBERS {
            return Err(format!(
                "the cluster has {} nodes already",
                legal::MAX_MEMBERS
            ));
        }
        let loops_over = legal::loops_over(g, anchor_node)?;
        let computed = legal::n_elements(g, node.outputs[0]);
        match &node.op {
            Op::Map(op) if computed < loops_over && op.spec().flops > 4 => Err(format!(
                "{op} would be computed {} times per element",
                loops_over / computed.max(1)
            )),
            _ => legal::is_pulled(g, &self.users, id, &|m| {
                self.groups[group].members.contains(&m)
            }),
        }
    }
}

/// Ops that copy element ranges and are best as kernels of their own.
fn is_barrier(op: &Op) -> bool {
    matches!(op, Op::Concat { .. } | Op::Pad { .. })
}
