//! Ranges: reductions to the smallest and the largest of all elements, as dynamic quantisation makes of
//! each operand of its products.
//!
//! The reductions of one tensor are joined to one kernel, which reads it once; or to the contraction
//! behind the tensor, whose kernel notes the extremes of its tiles. Ops on the two numbers are left in
//! kernels of single elements, for [`join`](super::join) to join.

use super::legal::{may_share, takes_epilogue, views_below};
use super::{Kernel, stored_by};
use crate::ir::{ClusterKind, Graph, Node, NodeId, Op, OpClass, ReduceKind, ValueId};
use gristmill_runtime::DType;
use std::collections::BTreeMap;

/// A reduction to the smallest or the largest of all elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extreme {
    /// True for the largest.
    pub is_largest: bool,
    /// The tensor, below views of the same elements.
    pub of: ValueId,
    /// These views.
    pub views: Vec<NodeId>,
}

/// The extreme of all elements computed by a node; `None` for other nodes.
pub fn extreme(g: &Graph, node: &Node) -> Option<Extreme> {
    let Op::Reduce { kind, axes, .. } = &node.op else {
        return None;
    };
    let x = node.inputs[0];
    let is_largest = match kind {
        ReduceKind::Max => true,
        ReduceKind::Min => false,
        _ => return None,
    };
    if g.ty(x).dtype != DType::F32 || axes.is_empty() || axes.len() != g.ty(x).rank() {
        return None;
    }
    let keeps_elements =
        |id: &NodeId| matches!(g.node(*id).op, Op::Reshape { .. } | Op::Transpose { .. });
    let views = views_below(g, x).into_iter().take_while(keeps_elements);
    let views: Vec<NodeId> = views.collect();
    let of = views.last().map_or(x, |&view| g.node(view).inputs[0]);
    Some(Extreme {
        is_largest,
        of,
        views,
    })
}

/// The reductions to the smallest and to the largest of all elements of one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// The reduction to the smallest.
    pub smallest: NodeId,
    /// The reduction to the largest.
    pub largest: NodeId,
}

/// The ranges of tensors, of each both reductions.
pub fn ranges(g: &Graph) -> BTreeMap<ValueId, Range> {
    let mut found: BTreeMap<ValueId, [Option<NodeId>; 2]> = BTreeMap::new();
    for (id, node) in g.nodes() {
        if let Some(extreme) = extreme(g, node) {
            let both = found.entry(extreme.of).or_default();
            both[usize::from(extreme.is_largest)].get_or_insert(id);
        }
    }
    let pairs = found.into_iter().filter_map(|(of, both)| match both {
        [Some(smallest), Some(largest)] => Some((of, Range { smallest, largest })),
        _ => None,
    });
    pairs.collect()
}

/// The kernels, with both reductions of each range joined.
pub fn join_ranges(g: &Graph, mut kernels: Vec<Kernel>) -> Vec<Kernel> {
    let ranges = ranges(g);
    if ranges.is_empty() {
        return kernels;
    }
    let (computed_by, stored_by) = (computed_by(g, &kernels), stored_by(g, &kernels));
    let ordered = g.ordered();
    let fit = |a: NodeId, b: NodeId| may_share(g, &ordered, a, b).is_ok();
    for (of, range) in ranges {
        let reductions = [range.smallest, range.largest];
        let parts = reductions.map(|id| match computed_by[id.0 as usize][..] {
            [kernel] => Parts::of(g, &kernels[kernel], id).map(|parts| (kernel, parts)),
            _ => None,
        });
        if let [Some(smallest), Some(largest)] = parts
            && fit(range.smallest, range.largest)
        {
            let parts = [smallest, largest];
            let reads_all = parts.iter().all(|(_, part)| part.of == of);
            let maker = g.def_id(of).and_then(|id| stored_by[id.0 as usize]);
            let maker = maker.filter(|&i| {
                let anchor = kernels[i].anchor;
                let fits = reductions.iter().all(|&id| fit(anchor, id));
                reads_all && fits && notes(g, &kernels[i], of)
            });
            join_range(&mut kernels, range, maker, parts);
        }
    }
    kernels.retain(|kernel| !kernel.members.is_empty());
    kernels
}

/// Joins the parts of two kernels, each with its number, to that of their operand, if there is one.
fn join_range(
    kernels: &mut Vec<Kernel>,
    range: Range,
    maker: Option<usize>,
    parts: [(usize, Parts); 2],
) {
    let mut joined = match maker {
        Some(i) => std::mem::replace(&mut kernels[i], nothing()),
        None => Kernel {
            kind: ClusterKind::Reduce,
            anchor: range.largest,
            ..nothing()
        },
    };
    joined.roots.splice(0..0, [range.smallest, range.largest]);
    for (kernel, part) in parts {
        joined.members.extend(part.reduction);
        kernels[kernel] = part.rest.unwrap_or_else(nothing);
    }
    joined.members.sort_unstable();
    joined.members.dedup();
    kernels.push(joined);
}

/// The kernels in which each node is computed.
fn computed_by(g: &Graph, kernels: &[Kernel]) -> Vec<Vec<usize>> {
    let mut computed_by = vec![Vec::new(); g.n_nodes()];
    for (i, kernel) in kernels.iter().enumerate() {
        for member in &kernel.members {
            computed_by[member.0 as usize].push(i);
        }
    }
    computed_by
}

/// True for a kernel which stores `v` alone, and can note the range of its tiles.
fn notes(g: &Graph, kernel: &Kernel, v: ValueId) -> bool {
    kernel.kind == ClusterKind::Contract
        && g.def_id(v).is_some_and(|id| kernel.roots == [id])
        && takes_epilogue(g, g.node(kernel.anchor))
}

/// A kernel without members, in the place of one joined to another.
fn nothing() -> Kernel {
    Kernel {
        kind: ClusterKind::Map,
        anchor: NodeId(0),
        roots: vec![],
        members: vec![],
    }
}

/// The kernel of a reduction, taken apart.
struct Parts {
    /// The reduction and the views of its operand in the kernel.
    reduction: Vec<NodeId>,
    /// The tensor below these views.
    of: ValueId,
    /// The kernel of the ops on its result.
    rest: Option<Kernel>,
}

impl Parts {
    /// `None` for a kernel of several results, or one in which the reduced elements are computed.
    fn of(g: &Graph, kernel: &Kernel, id: NodeId) -> Option<Parts> {
        let Extreme { of, views, .. } = extreme(g, g.node(id))?;
        if g.def_id(of).is_some_and(|made| kernel.computes(made)) {
            return None;
        }
        let is_first = |member: &NodeId| *member == id || views.contains(member);
        let (reduction, rest): (Vec<NodeId>, Vec<NodeId>) =
            kernel.members.iter().copied().partition(is_first);
        let [root] = kernel.roots[..] else {
            return None;
        };
        let follows = |member: &NodeId| {
            let node = g.node(*member);
            node.op.class() == OpClass::Map && g.ty(node.outputs[0]).shape.n_elements().is(1)
        };
        if kernel.anchor != id || !rest.iter().all(follows) {
            return None;
        }
        let rest = (root != id).then(|| Kernel {
            kind: ClusterKind::Map,
            anchor: root,
            roots: vec![root],
            members: rest,
        });
        // A view may be another kernel's result.
        let own = views.iter().take_while(|view| kernel.computes(**view));
        let of = g.node(*own.last().unwrap_or(&id)).inputs[0];
        Some(Parts {
            reduction,
            of,
            rest,
        })
    }
}
