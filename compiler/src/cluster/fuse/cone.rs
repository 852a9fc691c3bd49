//! Cones: members and leaves of one kernel, and its predicted time.

use super::Fuser;
use crate::cluster::Kernel;
use crate::cluster::legal::{self, Tail};
use crate::cost::{Bytes, Picos, layout_factor, work};
use crate::ir::{ClusterKind, NodeId, ValueId};
use std::collections::BTreeMap;

/// A kernel that computes its root and some of the root's producers.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Cone {
    pub(super) kind: ClusterKind,
    /// The op that decides how the kernel loops.
    pub(super) anchor: NodeId,
    pub(super) root: NodeId,
    /// Computed nodes, in order, and the arithmetic of each, repetitions included.
    pub(super) members: Vec<(NodeId, Picos)>,
    /// Values that it reads from memory, in order, and how many bytes of each.
    pub(super) leaves: Vec<(ValueId, Bytes)>,
    /// Ops behind the anchor of a contraction.
    pub(super) tail: Tail,
}

impl Cone {
    /// The cone of a node that is no kernel.
    pub(super) fn none(root: NodeId) -> Cone {
        Cone {
            kind: ClusterKind::Map,
            anchor: root,
            root,
            members: vec![],
            leaves: vec![],
            tail: Tail::default(),
        }
    }

    pub(super) fn kernel(&self) -> Kernel {
        Kernel {
            kind: self.kind,
            anchor: self.anchor,
            roots: vec![self.root],
            members: self.nodes().collect(),
        }
    }

    pub(super) fn nodes(&self) -> impl Iterator<Item = NodeId> {
        self.members.iter().map(|m| m.0)
    }

    pub(super) fn contains(&self, id: NodeId) -> bool {
        self.members.binary_search_by_key(&id, |m| m.0).is_ok()
    }

    pub(super) fn reads(&self, v: ValueId) -> bool {
        self.leaves.binary_search_by_key(&v, |l| l.0).is_ok()
    }

    /// Time of the arithmetic alone.
    pub(super) fn arithmetic(&self) -> Picos {
        self.members.iter().map(|m| m.1).sum()
    }
}

impl Fuser<'_> {
    /// The cone of one op alone.
    pub(super) fn plain(&self, id: NodeId) -> Cone {
        let kind = legal::kind_of(&self.g.node(id).op).unwrap_or(ClusterKind::Map);
        let mut cone = Cone {
            kind,
            anchor: id,
            ..Cone::none(id)
        };
        cone.members.push((id, self.arithmetic(id)));
        cone.leaves = self.leaves(&cone.members);
        cone
    }

    fn arithmetic(&self, id: NodeId) -> Picos {
        let Fuser { g, pricing, .. } = self;
        Picos::from_seconds(
            pricing
                .costs
                .arithmetic_seconds(g, g.node(id), &pricing.device),
        )
    }

    /// Operands of the members that they do not compute, constants included, with the bytes that are read of each.
    fn leaves(&self, members: &[(NodeId, Picos)]) -> Vec<(ValueId, Bytes)> {
        let extents = &self.pricing.costs.extents;
        let is_member = |p: NodeId| members.binary_search_by_key(&p, |m| m.0).is_ok();
        let is_leaf = |v: &ValueId| !self.producer(*v).is_some_and(is_member);
        let mut leaves: BTreeMap<ValueId, Bytes> = BTreeMap::new();
        for &(id, _) in members {
            let node = self.g.node(id);
            let operands = node.inputs.iter().enumerate();
            for (i, &v) in operands.filter(|(_, v)| is_leaf(v)) {
                let whole = extents.bytes(self.g.ty(v));
                let read = leaves.entry(v).or_insert(Bytes::ZERO);
                *read = (*read + work::bytes_read(self.g, node, i, extents)).min(whole);
            }
        }
        leaves.into_iter().collect()
    }

    /// `cone` with more members, each with its arithmetic, and another root.
    pub(super) fn grown(
        &self,
        cone: &Cone,
        more: impl Iterator<Item = (NodeId, Picos)>,
        root: NodeId,
    ) -> Cone {
        let mut members: BTreeMap<NodeId, Picos> = cone.members.iter().copied().collect();
        for (id, time) in more {
            let own = members.entry(id).or_insert(time);
            *own = time.max(*own);
        }
        let members: Vec<_> = members.into_iter().collect();
        let leaves = self.leaves(&members);
        Cone {
            root,
            leaves,
            members,
            ..cone.clone()
        }
    }

    /// `cone` with its reader `id` computed behind it.
    pub(super) fn extended(&self, cone: &Cone, id: NodeId) -> Cone {
        self.grown(cone, [(id, self.arithmetic(id))].into_iter(), id)
    }

    /// Predicted time of a kernel.
    pub(super) fn price(&self, cone: &Cone) -> Picos {
        if cone.members.is_empty() {
            return Picos::ZERO;
        }
        let (costs, device) = (&self.pricing.costs, &self.pricing.device);
        let results = self.g.node(cone.root).outputs.iter();
        let written: Bytes = results.map(|v| costs.bytes(self.g.ty(*v))).sum();
        let read: Bytes = cone.leaves.iter().map(|l| l.1).sum();
        let bytes = written + read + self.scratch(cone);
        let factors = cone.nodes().map(|m| layout_factor(&self.g.node(m).op));
        let factor = factors.max().unwrap_or(1);
        costs.roofline(cone.arithmetic().seconds(), bytes, factor, device)
    }

    /// Bytes that the kernel's parts pass on through memory: a reduction kernel reads its pulled operand
    /// from memory, and a view behind a contraction is copied out of its result.
    fn scratch(&self, cone: &Cone) -> Bytes {
        let twice = |v: ValueId| self.pricing.costs.bytes(self.g.ty(v)).times(2);
        if self.pricing.only_gpus {
            Bytes::ZERO
        } else if cone.tail.viewed {
            twice(self.g.node(cone.root).outputs[0])
        } else {
            self.pulled_reduction(cone).map_or(Bytes::ZERO, twice)
        }
    }

    /// The operand of a reduction kernel, when the cone computes it.
    fn pulled_reduction(&self, cone: &Cone) -> Option<ValueId> {
        let anchor = self.g.node(cone.anchor);
        let &x = anchor.inputs.first()?;
        let is_pulled = |p: NodeId| cone.contains(p) && !self.is_view(p);
        let stored = legal::reduces_stored(self.g, anchor).then_some(x);
        stored.filter(|_| self.producer(x).is_some_and(is_pulled))
    }
}
