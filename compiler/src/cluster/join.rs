//! Kernels with several results: updates of variables, as a step of an optimiser makes them of weights
//! and moments, steps of loops, such as the gates of an LSTM, and all that is computed of single elements.
//!
//! Fusion stores the results of one op per kernel, so that a step of Adam is three kernels, which read
//! gradient and moments again. Here element-wise kernels of one index space are joined where they read
//! a value in common, or one reads or computes the result of the other. Two are joined only if nothing
//! else waits between them.

use super::{Kernel, legal, stored_by};
use crate::ir::{ClusterKind, Def, Graph, Node, NodeId, Op, ScalarOp, Type, ValueId};
use gristmill_runtime::DType;
use std::collections::{BTreeMap, BTreeSet};

/// Most nodes and stored results of a joined kernel, and of kernels that are launched together.
const MAX_MEMBERS: usize = 48;
const MAX_RESULTS: usize = 8;
const MAX_BUNDLED_MEMBERS: usize = 512;
const MAX_BUNDLED_RESULTS: usize = 96;
/// Bytes that a GPU reads and writes while it launches a kernel: two microseconds at 4 TB/s.
const SMALL_BYTES: usize = 8 << 20;

/// The kernels, with those joined that update variables.
pub fn join_updates(g: &Graph, kernels: Vec<Kernel>) -> Vec<Kernel> {
    let assigned: BTreeSet<NodeId> = g.nodes().filter_map(|(_, n)| assigned_by(g, n)).collect();
    if assigned.len() < 2 {
        return kernels;
    }
    let joiner = Joiner::new(g, kernels);
    let updates = joiner.updates(&assigned);
    joiner.joined(&updates)
}

/// The kernels, with those joined that compute single elements: scales and zero points of a quantised
/// tensor, rates of an optimiser.
pub fn join_scalars(g: &Graph, kernels: Vec<Kernel>) -> Vec<Kernel> {
    let joiner = Joiner::new(g, kernels);
    let all = 0..joiner.kernels.len();
    let is_scalar = |&kernel: &usize| joiner.makes_single(kernel) && joiner.is_element_wise(kernel);
    let scalars: BTreeSet<usize> = all.filter(is_scalar).collect();
    joiner.joined(&scalars)
}

/// The kernels of a GPU, with small ones put together to be launched at once where a graph updates
/// variables: the updates, reductions to single elements, such as the largest gradient of each
/// parameter, and gradients by reductions. Static shapes.
pub fn bundle_updates(g: &Graph, kernels: Vec<Kernel>) -> Vec<Kernel> {
    let assigned: BTreeSet<NodeId> = g.nodes().filter_map(|(_, n)| assigned_by(g, n)).collect();
    if assigned.len() < 2 {
        return kernels;
    }
    let mut joiner = Joiner::new(g, kernels);
    let updates = joiner.updates(&assigned);
    let reduces = |kernel: &usize| joiner.kernels[*kernel].kind == ClusterKind::Reduce;
    let all = 0..joiner.kernels.len();
    let singles = all.filter(|kernel| reduces(kernel) && joiner.makes_single(*kernel));
    let singles: BTreeSet<usize> = singles.collect();
    let read = updates.iter().map(|&kernel| joiner.operands(kernel));
    let makers = read.flat_map(|values| joiner.makers(&values).collect::<Vec<_>>());
    let gradients: BTreeSet<usize> = makers.filter(reduces).collect();
    let others = gradients.difference(&singles).copied().collect();
    for set in [updates, singles, others] {
        joiner.bundle(&set);
    }
    joiner.left()
}

/// The kernels of a region, with element-wise ones joined.
pub fn join_maps(g: &Graph, kernels: Vec<Kernel>) -> Vec<Kernel> {
    let joiner = Joiner {
        takes_slices: true,
        ..Joiner::new(g, kernels)
    };
    let all = 0..joiner.kernels.len();
    let maps = all
        .filter(|&kernel| joiner.is_element_wise(kernel))
        .collect();
    joiner.joined(&maps)
}

/// The node that makes the value which a node assigns to a variable.
fn assigned_by(g: &Graph, node: &Node) -> Option<NodeId> {
    match (&node.op, &g.value(*node.inputs.first()?).def) {
        (Op::AssignVariable { .. }, Def::Node(id, _)) => Some(*id),
        _ => None,
    }
}

/// Kernels by a value that they read.
type Readers = BTreeMap<ValueId, Vec<usize>>;

struct Joiner<'g> {
    g: &'g Graph,
    ordered: Vec<bool>,
    /// One that was joined to another has no members any more.
    kernels: Vec<Kernel>,
    /// The kernel that stores the results of each node.
    stored_by: Vec<Option<usize>>,
    /// Of each kernel of several results, its first member and the latest node that makes an operand of it.
    /// Other kernels wait for nothing behind their results.
    spans: BTreeMap<usize, (NodeId, Option<NodeId>)>,
    /// True where members may read slices of larger tensors.
    takes_slices: bool,
}

impl<'g> Joiner<'g> {
    fn new(g: &'g Graph, kernels: Vec<Kernel>) -> Joiner<'g> {
        let mut joiner = Joiner {
            g,
            ordered: g.ordered(),
            stored_by: stored_by(g, &kernels),
            kernels,
            spans: BTreeMap::new(),
            takes_slices: false,
        };
        for kernel in 0..joiner.kernels.len() {
            joiner.note_span(kernel);
        }
        joiner
    }

    fn note_span(&mut self, kernel: usize) {
        let k = &self.kernels[kernel];
        if let (Some(&first), true) = (k.members.first(), k.roots.len() > 1) {
            let operands = self.operands(kernel);
            let latest = operands.iter().filter_map(|&v| self.g.def_id(v)).max();
            self.spans.insert(kernel, (first, latest));
        }
    }

    /// The element-wise kernels that make what is assigned.
    fn updates(&self, assigned: &BTreeSet<NodeId>) -> BTreeSet<usize> {
        let made = assigned
            .iter()
            .filter_map(|id| self.stored_by[id.0 as usize]);
        made.filter(|&kernel| self.is_element_wise(kernel))
            .collect()
    }

    /// The kernels, those of a set joined with earlier ones of it.
    fn joined(mut self, set: &BTreeSet<usize>) -> Vec<Kernel> {
        let mut readers = Readers::new();
        for &later in set {
            let partners = self.partners(later, &readers);
            for &earlier in partners.intersection(set) {
                if self.may_join(earlier, later) {
                    self.join(earlier, later);
                }
            }
            for v in self.operands(later) {
                readers.entry(v).or_default().push(later);
            }
        }
        self.left()
    }

    fn left(self) -> Vec<Kernel> {
        let kernels = self.kernels.into_iter();
        kernels.filter(|k| !k.members.is_empty()).collect()
    }

    /// Puts small kernels of a set together, whatever their shapes, where a later one does not wait for an
    /// earlier one.
    fn bundle(&mut self, set: &BTreeSet<usize>) {
        let mut bundles: Vec<usize> = Vec::new();
        let small: Vec<usize> = set.iter().copied().filter(|&k| self.is_small(k)).collect();
        for kernel in small {
            let open = bundles.iter().position(|&b| self.may_bundle(b, kernel));
            match open {
                Some(i) => {
                    self.join(bundles[i], kernel);
                    bundles[i] = kernel;
                }
                None => bundles.push(kernel),
            }
        }
    }

    /// True for a kernel that takes no longer than its launch. Larger ones gain nothing, and their
    /// operands would wait in memory for those of all others.
    fn is_small(&self, kernel: usize) -> bool {
        let results = self.kernels[kernel].roots.iter();
        let results = results.flat_map(|id| &self.g.node(*id).outputs).copied();
        let touched = self.operands(kernel).into_iter().chain(results);
        let bytes = touched.map(|v| {
            let elements = legal::n_elements(self.g, v);
            elements.map(|n| n * self.g.ty(v).dtype.size_bytes())
        });
        bytes
            .sum::<Option<usize>>()
            .is_some_and(|bytes| bytes <= SMALL_BYTES)
    }

    fn may_bundle(&self, first: usize, second: usize) -> bool {
        let (a, b) = (&self.kernels[first], &self.kernels[second]);
        a.members.len() + b.members.len() <= MAX_BUNDLED_MEMBERS
            && a.roots.len() + b.roots.len() <= MAX_BUNDLED_RESULTS
            && legal::may_share(self.g, &self.ordered, a.anchor, b.anchor).is_ok()
            && !self
                .makers(&self.operands(second))
                .any(|maker| maker == first)
            && self.is_nothing_between(first, second)
    }

    /// Kernels that make an operand of a kernel, known readers of one, and those that store what the
    /// kernel computes again.
    fn partners(&self, kernel: usize, readers: &Readers) -> BTreeSet<usize> {
        let operands = self.operands(kernel);
        let known = operands.iter().filter_map(|v| readers.get(v)).flatten();
        let makers = self.makers(&operands).chain(known.copied());
        makers.chain(self.recomputed(kernel)).collect()
    }

    /// Kernels that store members of a later kernel.
    fn recomputed(&self, kernel: usize) -> impl Iterator<Item = usize> {
        let members = self.kernels[kernel].members.iter();
        let stored = members.filter_map(|id| self.stored_by[id.0 as usize]);
        stored.filter(move |&other| other < kernel)
    }

    fn makers(&self, values: &BTreeSet<ValueId>) -> impl Iterator<Item = usize> {
        values.iter().filter_map(|&v| self.maker(v))
    }

    /// The type of the results of a kernel.
    fn result(&self, kernel: usize) -> &'g Type {
        let root = self.kernels[kernel].roots[0];
        self.g.ty(self.g.node(root).outputs[0])
    }

    /// True for a kernel whose results are single elements.
    fn makes_single(&self, kernel: usize) -> bool {
        self.result(kernel).shape.iter().all(|d| d.is(1))
    }

    /// True if one loop can go over the results of two kernels.
    fn have_one_space(&self, a: usize, b: usize) -> bool {
        let (x, y) = (self.result(a), self.result(b));
        x.shape == y.shape && (x.dtype == y.dtype || self.makes_single(a))
    }

    /// True for a kernel whose nodes are element-wise, and may share it.
    fn is_element_wise(&self, kernel: usize) -> bool {
        let (k, ty) = (&self.kernels[kernel], self.result(kernel));
        let is_shared = |id: NodeId| legal::may_share(self.g, &self.ordered, k.anchor, id).is_ok();
        let mut members = k.members.iter();
        k.kind == ClusterKind::Map && members.all(|&id| is_shared(id) && self.follows(id, ty))
    }

    /// True for a node that makes as many elements as a type has, in the same order, or one.
    fn follows(&self, id: NodeId, ty: &Type) -> bool {
        let node = self.g.node(id);
        let v = node.outputs[0];
        let own = self.g.ty(v);
        let is_as_large = own.shape == ty.shape || self.is_single(v);
        is_as_large && self.is_light(node, own.dtype)
    }

    fn is_light(&self, node: &Node, dtype: DType) -> bool {
        match &node.op {
            // A division of integers may fail, and a variable is not updated in place by a kernel that may.
            Op::Map(ScalarOp::Div | ScalarOp::Rem | ScalarOp::Mod) => dtype.is_float(),
            Op::Map(_) => true,
            Op::Broadcast { .. } => self.is_single(node.inputs[0]),
            Op::Slice { .. } => self.takes_slices,
            _ => false,
        }
    }

    fn is_single(&self, v: ValueId) -> bool {
        self.g.ty(v).shape.iter().all(|d| d.is(1))
    }

    /// Operands of a kernel that it does not compute. Constants of one element are none: every body has a
    /// copy.
    fn operands(&self, kernel: usize) -> BTreeSet<ValueId> {
        let k = &self.kernels[kernel];
        let read = k.members.iter().flat_map(|&id| &self.g.node(id).inputs);
        let outside = read.filter(|&&v| !self.is_inside(k, v) && self.g.single(v).is_none());
        outside.copied().collect()
    }

    fn is_inside(&self, k: &Kernel, v: ValueId) -> bool {
        matches!(self.g.value(v).def, Def::Node(id, _) if k.computes(id))
    }

    /// The kernel that stores a value.
    fn maker(&self, v: ValueId) -> Option<usize> {
        match self.g.value(v).def {
            Def::Node(id, _) => self.stored_by[id.0 as usize],
            Def::Input(_) => None,
        }
    }

    fn may_join(&self, a: usize, b: usize) -> bool {
        self.fit_together(a, b) && self.shares(a, b) && self.is_nothing_between(a, b)
    }

    fn is_nothing_between(&self, a: usize, b: usize) -> bool {
        !self.waits(a, b) && !self.waits(b, a)
    }

    fn fit_together(&self, first: usize, second: usize) -> bool {
        let (a, b) = (&self.kernels[first], &self.kernels[second]);
        !a.members.is_empty()
            && self.have_one_space(first, second)
            && a.members.len() + b.members.len() <= MAX_MEMBERS
            && a.roots.len() + b.roots.len() <= MAX_RESULTS
            && legal::may_share(self.g, &self.ordered, a.anchor, b.anchor).is_ok()
    }

    /// True if two kernels read one value of the size of their results, or the second reads or computes
    /// a result of the first.
    fn shares(&self, a: usize, b: usize) -> bool {
        let (x, y) = (self.operands(a), self.operands(b));
        let is_whole = |v: &ValueId| self.g.ty(*v).shape == self.result(a).shape;
        x.intersection(&y).any(is_whole)
            || self.makers(&y).any(|maker| maker == a)
            || self.recomputed(b).any(|other| other == a)
    }

    /// True if a kernel waits for something that waits for another one.
    fn waits(&self, kernel: usize, other: usize) -> bool {
        let is_far = |v: &ValueId| self.maker(*v) != Some(other);
        // Nothing before the members of a kernel waits for it, unless by a kernel with members on both sides.
        let first = self.kernels[other].members.first();
        let crosses = |(&k, (from, latest)): (&usize, &(NodeId, Option<NodeId>))| {
            k != other && Some(from) < first && latest.as_ref() >= first
        };
        let is_crossed = self.spans.iter().any(crosses);
        let mut todo: Vec<ValueId> = self.operands(kernel).into_iter().filter(is_far).collect();
        let mut seen: BTreeSet<NodeId> = BTreeSet::new();
        while let Some(v) = todo.pop() {
            let Def::Node(id, _) = self.g.value(v).def else {
                continue;
            };
            let is_before = first.is_none_or(|first| id < *first);
            if is_before && !is_crossed || !seen.insert(id) {
                continue;
            }
            match self.stored_by[id.0 as usize] {
                Some(k) if k == other => return true,
                Some(k) => todo.extend(self.operands(k)),
                None => todo.extend(&self.g.node(id).inputs),
            }
            let earlier = self.g.node(id).control.iter().map(|&c| self.g.node(c));
            todo.extend(earlier.flat_map(|n| n.outputs.first()));
        }
        false
    }

    /// Makes one kernel of two, in the place of the second.
    fn join(&mut self, a: usize, b: usize) {
        let first = &mut self.kernels[a];
        let (roots, members) = (
            std::mem::take(&mut first.roots),
            std::mem::take(&mut first.members),
        );
        for root in &roots {
            self.stored_by[root.0 as usize] = Some(b);
        }
        let k = &mut self.kernels[b];
        k.roots.splice(0..0, roots);
        k.members.extend(members);
        k.members.sort_unstable();
        k.members.dedup();
        self.spans.remove(&a);
        self.note_span(b);
    }
}
