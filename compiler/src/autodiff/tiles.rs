//! Cotangents of values that are cut into slices: the gates of a recurrence, queries, keys and values.

use crate::ir::{Graph, Op, PadMode, ValueId};

/// Values that lie side by side along an axis.
pub struct Tiles {
    /// The axis.
    pub axis: usize,
    /// The values, in their order there.
    pub parts: Vec<ValueId>,
}

/// A value with zeros before and after it along one axis.
struct Padded {
    inner: ValueId,
    axis: usize,
    before: usize,
    after: usize,
}

impl Padded {
    fn of(graph: &Graph, v: ValueId) -> Option<Padded> {
        let node = graph.def_node(v)?;
        let (Op::Pad { low, high, mode }, &[inner, border]) = (&node.op, &node.inputs[..]) else {
            return None;
        };
        let axis = only_axis(low, high)?;
        (*mode == PadMode::Constant && is_zero(graph, border)).then(|| Padded {
            inner,
            axis,
            before: low[axis],
            after: high[axis],
        })
    }

    fn extent(&self, graph: &Graph) -> Option<usize> {
        graph.ty(self.inner).shape[self.axis].as_usize()
    }
}

/// The axis of the only borders.
fn only_axis(low: &[usize], high: &[usize]) -> Option<usize> {
    let mut axes = (0..low.len()).filter(|&i| low[i] + high[i] > 0);
    let axis = axes.next()?;
    axes.next().is_none().then_some(axis)
}

fn is_zero(graph: &Graph, v: ValueId) -> bool {
    graph.single(v).is_some_and(|t| t.to_f64s() == [0.0])
}

/// True when each part begins where the one before it ends, from the first element to the last.
fn is_covered(graph: &Graph, parts: &[Padded]) -> Option<bool> {
    let mut end = 0;
    for part in parts {
        if part.before != end {
            return Some(false);
        }
        end += part.extent(graph)?;
    }
    Some(parts.last()?.after == 0)
}

impl Tiles {
    /// The slices whose sum, each with zeros for the others, is their concatenation.
    pub fn of(graph: &Graph, sum: &[ValueId]) -> Option<Tiles> {
        let parts = sum.iter().map(|&v| Padded::of(graph, v));
        let mut parts = parts.collect::<Option<Vec<Padded>>>()?;
        parts.sort_by_key(|p| p.before);
        let axis = parts.first()?.axis;
        let is_one_axis = parts.iter().all(|p| p.axis == axis);
        (is_one_axis && is_covered(graph, &parts)?).then(|| Tiles {
            axis,
            parts: parts.iter().map(|p| p.inner).collect(),
        })
    }
}
