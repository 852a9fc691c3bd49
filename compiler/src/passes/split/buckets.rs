//! Small all-reduces joined to buckets, in the order of the backward pass: as many bytes in fewer transfers.
//!
//! Sums are joined if no other all-reduce waits for them, as gradients are: no bucket makes the backward pass wait. Of a tree
//! of shards, this is the last level.
//! (Li et al., "PyTorch Distributed: experiences on accelerating data parallel training", VLDB 2020, section 3.2.3.)

use crate::error::{Error, Result};
use crate::ir::{Graph, Node, NodeId, Op, Requested, ValueId};
use crate::passes::Rebuild;
use crate::passes::all_reduce::{SHARED_BYTES, reshape, slice};
use crate::schedule::{Variable, variable_uses};
use std::collections::{BTreeMap, BTreeSet};

/// A bucket is full from here on.
const BUCKET_BYTES: usize = 256 << 10;

/// The graph with buckets. The order of state is to be made again.
pub(super) fn in_buckets(g: Graph) -> Result<Graph> {
    let buckets = buckets(&g);
    match buckets.is_empty() {
        true => Ok(g),
        false => Joining::new(&g, &buckets).graph(),
    }
}

fn is_all_reduce(node: &Node) -> bool {
    matches!(node.op, Op::AllReduce { .. })
}

/// All-reduces to be joined, at least two each.
fn buckets(g: &Graph) -> Vec<Vec<NodeId>> {
    let mut open: BTreeMap<String, (usize, Vec<NodeId>)> = BTreeMap::new();
    let mut all = Vec::new();
    for id in candidates(g) {
        let node = g.node(id);
        let ty = g.ty(node.inputs[0]);
        let places: Vec<Requested> = node.inputs.iter().map(|&v| place(g, v)).collect();
        let key = format!("{:?} {} {places:?}", node.op, ty.dtype);
        let (bytes, members) = open.entry(key.clone()).or_default();
        *bytes += ty.size_bytes().unwrap_or(0);
        members.push(id);
        if *bytes >= BUCKET_BYTES {
            all.extend(open.remove(&key).map(|(_, members)| members));
        }
    }
    all.extend(open.into_values().map(|(_, members)| members));
    all.retain(|members| members.len() > 1);
    all
}

/// Small all-reduces whose results no other all-reduce waits for.
fn candidates(g: &Graph) -> Vec<NodeId> {
    let mut is_awaited = vec![false; g.n_values()];
    let mut found = Vec::new();
    for (id, node) in g.nodes().rev() {
        let awaited = node.outputs.iter().any(|v| is_awaited[v.0 as usize]);
        if awaited || is_all_reduce(node) {
            for v in &node.inputs {
                is_awaited[v.0 as usize] = true;
            }
        }
        let ty = node.inputs.first().map(|&v| g.ty(v));
        let bytes = ty
            .filter(|ty| ty.static_shape().is_some())
            .and_then(|ty| ty.size_bytes());
        if is_all_reduce(node) && !awaited && bytes.is_some_and(|n| n < SHARED_BYTES) {
            found.push(id);
        }
    }
    found.reverse();
    found
}

fn place(g: &Graph, v: ValueId) -> Requested {
    g.def_node(v).and_then(|maker| maker.device.clone())
}

/// A graph with buckets under construction.
struct Joining<'a> {
    r: Rebuild,
    old: &'a Graph,
    /// The members of each bucket, by its last one.
    buckets: BTreeMap<NodeId, &'a [NodeId]>,
    /// Members before the last one.
    earlier: BTreeSet<NodeId>,
    /// Nodes behind buckets that are not there yet, in their order.
    waiting: Vec<NodeId>,
    /// Variables of waiting nodes, whose later uses wait, too.
    held: BTreeSet<Variable<'a>>,
}

impl<'a> Joining<'a> {
    fn new(old: &'a Graph, buckets: &'a [Vec<NodeId>]) -> Joining<'a> {
        let mut joining = Joining {
            r: Rebuild::new(old),
            old,
            buckets: BTreeMap::new(),
            earlier: BTreeSet::new(),
            waiting: Vec::new(),
            held: BTreeSet::new(),
        };
        for members in buckets {
            if let Some((&last, earlier)) = members.split_last() {
                joining.buckets.insert(last, members);
                joining.earlier.extend(earlier);
            }
        }
        joining
    }

    fn graph(mut self) -> Result<Graph> {
        for (id, _) in self.old.nodes() {
            if self.earlier.contains(&id) {
                continue;
            }
            let Some(members) = self.buckets.get(&id) else {
                self.copy_or_wait(id)?;
                continue;
            };
            self.join(members)?;
            let waiting = std::mem::take(&mut self.waiting);
            self.held.clear();
            waiting
                .into_iter()
                .try_for_each(|id| self.copy_or_wait(id))?;
        }
        match self.waiting.is_empty() {
            true => Ok(self.r.finish(self.old)),
            false => Err(Error::internal(
                "a node waits for a bucket that never comes",
            )),
        }
    }

    fn copy_or_wait(&mut self, id: NodeId) -> Result<()> {
        let node = self.old.node(id);
        let mut used = variable_uses(node)
            .into_iter()
            .map(|(variable, _)| variable);
        let has_all = node.inputs.iter().all(|&v| self.r.has(v));
        if has_all && !used.clone().any(|variable| self.held.contains(&variable)) {
            return self.r.copy(id, node);
        }
        self.held.extend(&mut used);
        self.waiting.push(id);
        Ok(())
    }

    /// One all-reduce of the members' operands, end to end.
    fn join(&mut self, members: &[NodeId]) -> Result<()> {
        let first = self.old.node(members[0]);
        let joined = (0..first.inputs.len()).map(|r| self.end_to_end(members, r));
        let joined: Vec<ValueId> = joined.collect::<Result<_>>()?;
        let sums = self.r.graph.add(first.op.clone(), &joined, &first.origin)?;
        for (r, &sum) in sums.iter().enumerate() {
            let mut start = 0;
            for &id in members {
                let node = self.old.node(id);
                let shape = self.shape(node.inputs[r])?;
                let n: usize = shape.iter().product();
                let part = slice(start, start + n);
                let part = self.add(part, &[sum], node, r)?;
                let part = self.add(reshape(&shape), &[part], node, r)?;
                self.r.set(node.outputs[r], part);
                start += n;
            }
        }
        Ok(())
    }

    /// The operands of place `r`, end to end.
    fn end_to_end(&mut self, members: &[NodeId], r: usize) -> Result<ValueId> {
        let mut flat = Vec::with_capacity(members.len());
        for &id in members {
            let node = self.old.node(id);
            let n: usize = self.shape(node.inputs[r])?.iter().product();
            let operand = self.r.get(node.inputs[r]);
            flat.push(self.add(reshape(&[n]), &[operand], node, r)?);
        }
        self.add(Op::Concat { axis: 0 }, &flat, self.old.node(members[0]), r)
    }

    /// A node for an all-reduce, where its operand `r` is.
    fn add(&mut self, op: Op, operands: &[ValueId], of: &Node, r: usize) -> Result<ValueId> {
        let graph = &mut self.r.graph;
        let result = graph.add1(op, operands, &of.origin)?;
        let last = NodeId(graph.n_nodes() as u32 - 1);
        graph.node_mut(last).device = place(self.old, of.inputs[r]);
        Ok(result)
    }

    fn shape(&self, v: ValueId) -> Result<Vec<usize>> {
        let shape = self.old.ty(v).static_shape();
        shape.ok_or_else(|| Error::internal("a bucket of values without extents"))
    }
}
