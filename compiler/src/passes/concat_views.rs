//! Views of concatenations as concatenations of views, so that elements move once.
//!
//! A shuffle of channels (Zhang et al., "ShuffleNet", arXiv:1707.01083) stores a concatenation, transposes it and cuts it in
//! halves. Channel `2 i + j` of the result is channel `i` of operand `j`: each half is a concatenation, along a new innermost
//! axis, of slices of the operands. Convolutions by constant weights that alone read one read the channels in the order of the
//! operands, and have their weights permuted.

mod view;

use super::Rebuild;
use super::rebuild::each_node;
use crate::error::Result;
use crate::ir::{Dim, Graph, Layout, Node, NodeId, Op, ValueId};
use std::collections::BTreeMap;
use view::{Joined, Piece, Reorder};

/// Replaces concatenations of which slices, transposes and reshapes alone are read, where fewer bytes are stored without them.
/// Regions are gone through too.
pub fn concat_views(g: &Graph) -> Result<Graph> {
    let plan = Finder::new(g).plan();
    each_node(g, &concat_views, &mut |r, g, id, node| {
        if plan.is_dropped[id.0 as usize] {
            return Ok(());
        }
        if let Some(leaf) = node.outputs.first().and_then(|v| plan.leaves.get(v)) {
            let y = emit(r, node, &leaf.joined)?;
            r.set(node.outputs[0], y);
            return Ok(());
        }
        let read = node.inputs.first().and_then(|v| plan.leaves.get(v));
        match read.and_then(|leaf| leaf.reorder.as_ref()) {
            Some(reorder) => emit_reordered(r, g, id, node, reorder),
            None => r.copy(id, node),
        }
    })
}

/// A value that is read, as a view of the operands of a concatenation.
struct Leaf {
    value: ValueId,
    joined: Joined,
    /// Permutation of the weights of its readers.
    reorder: Option<Reorder>,
}

/// Values to be computed from the operands of concatenations, and nodes that only they need.
struct Plan {
    leaves: BTreeMap<ValueId, Leaf>,
    is_dropped: Vec<bool>,
}

struct Finder<'g> {
    g: &'g Graph,
    users: Vec<Vec<(NodeId, usize)>>,
    ordered: Vec<bool>,
    is_output: Vec<bool>,
}

/// Views of one concatenation.
#[derive(Default)]
struct Tree {
    leaves: Vec<Leaf>,
    /// Values that need not be computed.
    inner: Vec<ValueId>,
}

impl<'g> Finder<'g> {
    fn new(g: &'g Graph) -> Finder<'g> {
        let mut is_output = vec![false; g.n_values()];
        for o in &g.outputs {
            is_output[o.value.0 as usize] = true;
        }
        Finder {
            g,
            users: g.users(),
            ordered: g.ordered(),
            is_output,
        }
    }

    fn plan(&self) -> Plan {
        let mut plan = Plan {
            leaves: BTreeMap::new(),
            is_dropped: vec![false; self.g.n_nodes()],
        };
        let trees = self.g.nodes().filter_map(|(id, node)| self.tree(id, node));
        for tree in trees {
            for (id, _) in tree.inner.iter().filter_map(|&v| self.definition(v)) {
                plan.is_dropped[id.0 as usize] = true;
            }
            plan.leaves
                .extend(tree.leaves.into_iter().map(|leaf| (leaf.value, leaf)));
        }
        plan
    }

    fn definition(&self, v: ValueId) -> Option<(NodeId, &Node)> {
        match self.g.value(v).def {
            crate::ir::Def::Node(id, _) => Some((id, self.g.node(id))),
            _ => None,
        }
    }

    /// The views of a concatenation, where its operands had better be read instead.
    fn tree(&self, id: NodeId, node: &Node) -> Option<Tree> {
        let Op::Concat { axis } = node.op else {
            return None;
        };
        if self.ordered[id.0 as usize] {
            return None;
        }
        let (root, mut tree) = (node.outputs[0], Tree::default());
        let piece = |&v: &ValueId| Piece::new(v, self.shape(v).to_vec());
        let joined = Joined::new(node.inputs.iter().map(piece).collect(), axis);
        self.grow(root, joined, node, &mut tree);
        let is_left_out = tree.inner.contains(&root);
        (is_left_out && self.gains(root, &tree)).then_some(tree)
    }

    fn shape(&self, v: ValueId) -> &[Dim] {
        &self.g.ty(v).shape.0
    }

    /// Adds the views of `v` to a tree: `v` itself when something else reads it.
    fn grow(&self, v: ValueId, joined: Joined, concat: &Node, tree: &mut Tree) {
        let users = &self.users[v.0 as usize];
        let views = users.iter().map(|&(id, _)| self.view(id, &joined, concat));
        let views = (!self.is_output[v.0 as usize])
            .then(|| views.collect::<Option<Vec<_>>>())
            .flatten();
        let Some(views) = views else {
            tree.leaves.push(self.leaf(v, joined));
            return;
        };
        tree.inner.push(v);
        for (view, joined) in views {
            self.grow(view, joined, concat, tree);
        }
    }

    /// The result of a node that is a view of `joined`.
    fn view(&self, id: NodeId, joined: &Joined, concat: &Node) -> Option<(ValueId, Joined)> {
        let node = self.g.node(id);
        if self.ordered[id.0 as usize] || node.device != concat.device {
            return None;
        }
        let result = *node.outputs.first()?;
        let view = joined.under(&node.op, self.shape(result))?;
        Some((result, view))
    }

    fn leaf(&self, value: ValueId, joined: Joined) -> Leaf {
        let in_order = joined.in_order();
        let (joined, reorder) = match in_order.filter(|(_, order)| self.is_summed(value, order)) {
            Some((joined, reorder)) => (joined, Some(reorder)),
            None => (joined, None),
        };
        Leaf {
            value,
            joined,
            reorder,
        }
    }

    /// True when every reader sums over the axis that a permutation is of.
    fn is_summed(&self, v: ValueId, order: &Reorder) -> bool {
        let mut readers = self.users[v.0 as usize].iter();
        !self.is_output[v.0 as usize]
            && readers.all(|&(id, i)| i == 0 && self.can_reorder(id, order.axis))
    }

    /// True when a node sums over all of the given axis of its first operand, by constant weights.
    fn can_reorder(&self, id: NodeId, axis: usize) -> bool {
        let node = self.g.node(id);
        let summed = summed_axes(self.g, node);
        let is_constant = |v: &ValueId| self.g.constant(*v).is_some();
        !self.ordered[id.0 as usize]
            && summed.is_some_and(|(of_x, _)| of_x == axis)
            && node.inputs.get(1).is_some_and(is_constant)
    }

    /// True when fewer elements are stored without the concatenation `root`.
    fn gains(&self, root: ValueId, tree: &Tree) -> bool {
        let mut difference = self.g.ty(root).shape.n_elements();
        for leaf in &tree.leaves {
            let n = self.g.ty(leaf.value).shape.n_elements();
            let was_stored = self.is_stored(leaf);
            let is_whole = leaf.joined.pieces.iter().all(|p| p.ops.is_empty());
            let is_joined = leaf.joined.pieces.len() > 1;
            match (was_stored, is_joined || was_stored && !is_whole) {
                (true, false) => difference = difference + n,
                (false, true) => difference = difference - n,
                _ => {}
            }
        }
        let (constant, mut terms) = difference.parts();
        let is_more = constant > 0 || terms.next().is_some();
        let (constant, mut terms) = difference.parts();
        is_more && constant >= 0 && terms.all(|(_, n)| n > 0)
    }

    /// True when a reader takes the view from memory, in its order.
    fn is_stored(&self, leaf: &Leaf) -> bool {
        let mut readers = self.users[leaf.value.0 as usize].iter();
        readers.any(|&(id, i)| match self.g.node(id).op {
            Op::Conv { .. } | Op::ConvTranspose { .. } | Op::Pool { .. } => true,
            Op::MatMul => i == 0 && leaf.joined.is_moved,
            Op::Attention { .. } => false,
            _ => leaf.joined.is_moved,
        })
    }
}

/// The axes of the first operand and of the weights that a node sums over together.
fn summed_axes(g: &Graph, node: &Node) -> Option<(usize, usize)> {
    let ranks = node.inputs.get(..2)?;
    let (x, w) = (g.ty(ranks[0]).rank(), g.ty(ranks[1]).rank());
    match &node.op {
        Op::MatMul if w == 2 => Some((x - 1, 0)),
        Op::Conv {
            groups: 1, layout, ..
        } => Some(match layout {
            Layout::ChannelsLast => (x - 1, w - 2),
            Layout::ChannelsFirst => (1, 1),
        }),
        _ => None,
    }
}

fn emit(r: &mut Rebuild, node: &Node, joined: &Joined) -> Result<ValueId> {
    let mut parts = Vec::new();
    for piece in &joined.pieces {
        let mut x = r.get(piece.base);
        for op in &piece.ops {
            x = r.add_like(node, op.clone(), &[x], &node.origin)?;
        }
        parts.push(x);
    }
    let axis = joined.axis;
    let y = match parts[..] {
        [one] => one,
        _ => r.add_like(node, Op::Concat { axis }, &parts, &node.origin)?,
    };
    match &joined.outer {
        Some(shape) => reshape(r, node, y, shape.clone()),
        None => Ok(y),
    }
}

fn reshape(r: &mut Rebuild, node: &Node, x: ValueId, shape: Vec<Dim>) -> Result<ValueId> {
    r.add_like(node, Op::Reshape { shape }, &[x], &node.origin)
}

/// A reader whose operand comes in another order, by permuted weights.
fn emit_reordered(
    r: &mut Rebuild,
    g: &Graph,
    id: NodeId,
    node: &Node,
    reorder: &Reorder,
) -> Result<()> {
    let mut inputs = r.inputs(node);
    if let Some((_, axis)) = summed_axes(g, node) {
        inputs[1] = permuted_weights(r, node, inputs[1], axis, reorder)?;
    }
    let outputs = r.graph.add_copy(node, &inputs)?;
    r.mapped(id, node, &outputs);
    Ok(())
}

fn permuted_weights(
    r: &mut Rebuild,
    node: &Node,
    w: ValueId,
    axis: usize,
    reorder: &Reorder,
) -> Result<ValueId> {
    let whole = r.graph.ty(w).shape.0.clone();
    let extents = reorder.extents.iter().map(|&n| Dim::constant(n));
    let (front, back) = (&whole[..axis], &whole[axis + 1..]);
    let split = [front, &extents.collect::<Vec<_>>(), back].concat();
    let n = reorder.extents.len();
    let inner = reorder.perm.iter().map(|i| axis + i);
    let perm = (0..axis).chain(inner).chain(axis + n..split.len());
    let perm: Vec<usize> = perm.collect();
    let w = reshape(r, node, w, split)?;
    let w = r.add_like(node, Op::Transpose { perm }, &[w], &node.origin)?;
    reshape(r, node, w, whole)
}

#[cfg(test)]
mod tests;
