//! Decides which nodes share a cluster.

use super::legal;
use crate::ir::{ClusterKind, Graph, NodeId, Op, OpClass, ReduceKind, ValueId};
use std::collections::BTreeSet;

/// A producer of at most this many operations per element may be computed again in each consumer.
const CHEAP_FLOPS: u32 = 8;

/// Most nodes of a cluster: code generation visits a body recursively, and a longer chain gains nothing.
const MAX_MEMBERS: usize = 128;

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
        let mut grouping = Grouping { groups: Vec::new(), home: vec![None; g.n_nodes()], missed: Vec::new() };
        for (id, node) in g.nodes() {
            if let Some(kind) = legal::kind_of(&node.op) {
                grouping.home[id.0 as usize] = Some(grouping.groups.len());
                grouping.groups.push(Group { kind, anchor: id, members: BTreeSet::from([id]) });
            }
        }
        grouping
    }

    /// Groups the nodes of a graph.
    pub fn of(g: &Graph) -> Grouping {
        let mut is_output = vec![false; g.n_values()];
        g.outputs.iter().for_each(|o| is_output[o.value.0 as usize] = true);
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
        Grouping { groups: grouper.groups, home: grouper.home, missed: grouper.missed }
    }
}

impl Grouper<'_> {
    fn found(&mut self, id: NodeId, kind: ClusterKind) -> usize {
        self.groups.push(Group { kind, anchor: id, members: BTreeSet::new() });
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

    /// Every op that is not a view, a source or element-wise founds a group; contractions take the views they can read by strides.
    fn found_anchors(&mut self) {
        for (id, node) in self.g.nodes() {
            let Some(kind) = legal::kind_of(&node.op) else { continue };
            if kind == ClusterKind::Map && !is_barrier(&node.op) {
                continue;
            }
            let group = self.found(id, kind);
            if matches!(node.op, Op::MatMul | Op::Attention { .. }) {
                for i in 0..node.inputs.len() {
                    if legal::reads_by_strides(self.g, node, i) {
                        self.take_views(group, node.inputs[i], id);
                    }
                }
            }
        }
    }

    /// Adds the views that define `v` to the group as duplicates.
    fn take_views(&mut self, group: usize, mut v: ValueId, anchor: NodeId) {
        while let Some((id, node)) = self.def(v) {
            if !matches!(node.op, Op::Transpose { .. } | Op::Reshape { .. } | Op::Broadcast { .. } | Op::Slice { .. })
                || !self.may_join(anchor, id)
            {
                return;
            }
            let next = node.inputs[0];
            self.insert(group, id);
            v = next;
        }
    }

    fn def(&self, v: ValueId) -> Option<(NodeId, &crate::ir::Node)> {
        match self.g.value(v).def {
            crate::ir::Def::Node(id, _) => Some((id, self.g.node(id))),
            crate::ir::Def::Input(_) => None,
        }
    }

    /// Whether two nodes may share a cluster: their requests are the same, and no control edge orders them.
    fn may_join(&self, a: NodeId, b: NodeId) -> bool {
        let ordered = self.ordered[a.0 as usize] || self.ordered[b.0 as usize];
        !ordered && self.g.node(a).device == self.g.node(b).device
    }

    /// The only user of a value, when it has one, is not an output, and has no home yet.
    fn only_user(&self, v: ValueId) -> Option<NodeId> {
        let users = &self.users[v.0 as usize];
        let first = users.first()?.0;
        let free = !self.is_output[v.0 as usize] && users.iter().all(|u| u.0 == first);
        (free && self.home[first.0 as usize].is_none() && legal::kind_of(&self.g.node(first).op).is_some())
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
        let is_matmul = self.g.node(anchor).op == Op::MatMul;
        let mut viewed = false;
        while let Some(id) = self.only_user(chain) {
            if self.is_taken(id) || !self.may_join(anchor, id) {
                return;
            }
            let node = self.g.node(id);
            let fits = match &node.op {
                Op::Reshape { .. } => Ok(()),
                Op::Transpose { perm } if is_matmul && !viewed && legal::keeps_inner_axis(self.g, chain, perm) => {
                    Ok(())
                }
                Op::Map(_) if !viewed => legal::is_epilogue(self.g, node, chain),
                _ => Err(format!("{} cannot follow on the tile", node.op.name())),
            };
            if let Err(reason) = fits {
                self.missed
                    .push((self.g.node(anchor).origin.to_string(), format!("epilogue {}: {reason}", node.op.name())));
                return;
            }
            viewed |= !matches!(node.op, Op::Map(_));
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
            let shape = &self.g.ty(chain).shape;
            let same_shape = matches!(node.op, Op::Map(_)) && self.g.ty(node.outputs[0]).shape == *shape;
            if !same_shape || self.is_taken(id) || !self.may_join(anchor, id) {
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
            let Some(kind) = legal::kind_of(&node.op) else { continue };
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
                (None, many) if self.is_duplicable(id) => many.iter().for_each(|&u| self.insert(u, id)),
                (refusal, _) => {
                    if let Some(reason) = refusal.filter(|_| !outside) {
                        self.missed.push((node.origin.to_string(), format!("{}: {reason}", node.op.name())));
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
                groups.extend(member_of.iter().filter(|&&u| !self.groups[u].members.contains(&id)));
            }
        }
        (groups.into_iter().collect(), outside)
    }

    fn is_duplicable(&self, id: NodeId) -> bool {
        let node = self.g.node(id);
        match &node.op {
            Op::Map(op) => {
                let wide = node.inputs.iter().filter(|&&v| legal::n_elements(self.g, v) > 1).count();
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
        if !self.may_join(anchor, id) {
            return Err("another device is requested, or a control edge orders them".into());
        }
        if self.groups[group].members.len() >= MAX_MEMBERS {
            return Err(format!("the cluster has {MAX_MEMBERS} nodes already"));
        }
        let loops_over = match (&anchor_node.op, self.groups[group].kind) {
            (Op::Concat { .. } | Op::Pad { .. }, _) => return Err("a copy takes no producers".into()),
            (Op::Transpose { .. }, _) if is_tiled_transpose(g, anchor_node) => {
                return Err("a tiled transpose takes no producers".into());
            }
            (_, ClusterKind::Map) => legal::n_elements(g, anchor_node.outputs[0]),
            (Op::Reduce { kind, .. }, _) if *kind != ReduceKind::Prod => legal::n_elements(g, anchor_node.inputs[0]),
            (Op::Reduce { .. } | Op::ArgReduce { .. }, _) => legal::n_elements(g, anchor_node.inputs[0]),
            _ => return Err(format!("{} takes no producers", anchor_node.op.name())),
        };
        if self.feeds_reshape(group, id) {
            return Err("its consumer reads it through a reshape".into());
        }
        let computed = legal::n_elements(g, node.outputs[0]);
        match &node.op {
            Op::Map(op) if computed < loops_over && op.spec().flops > 4 => {
                Err(format!("{op} would be computed {} times per element", loops_over / computed.max(1)))
            }
            Op::Map(_) | Op::Iota { .. } => Ok(()),
            _ if legal::is_foldable_view(g, node) => Ok(()),
            _ => Err(format!("{} is not an index map", node.op.name())),
        }
    }

    /// A reshape inside a loop is free only on a stored tensor.
    fn feeds_reshape(&self, group: usize, id: NodeId) -> bool {
        let is_view = self.g.node(id).op.class() == OpClass::View;
        let reshapes = |u: &(NodeId, usize)| {
            self.groups[group].members.contains(&u.0) && matches!(self.g.node(u.0).op, Op::Reshape { .. })
        };
        !is_view && self.g.node(id).outputs.iter().any(|v| self.users[v.0 as usize].iter().any(reshapes))
    }
}

/// Ops that copy element ranges and are best as kernels of their own.
fn is_barrier(op: &Op) -> bool {
    matches!(op, Op::Concat { .. } | Op::Pad { .. })
}

fn is_tiled_transpose(g: &Graph, node: &crate::ir::Node) -> bool {
    matches!(&node.op, Op::Transpose { perm } if !legal::keeps_inner_axis(g, node.inputs[0], perm))
}
