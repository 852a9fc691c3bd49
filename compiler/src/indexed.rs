//! Inputs that are indices, and the extents of the axes that they index.

use crate::DType;
use crate::ir::{Dim, Graph, Node, Op, ScalarOp};

/// Extent of the axis that each input of a graph indexes, the smallest where there are several. Indices are followed back through ops that
/// only move elements; inside regions they are not looked for.
pub(crate) fn indexed_extents(g: &Graph) -> Vec<Option<u64>> {
    let mut extents: Vec<Option<u64>> = vec![None; g.n_values()];
    let nodes: Vec<&Node> = g.nodes().map(|(_, node)| node).collect();
    for node in nodes.into_iter().rev() {
        if let Some(extent) = indexed_extent(g, node) {
            bound(&mut extents[node.inputs[1].0 as usize], extent);
        }
        if moves_elements(&node.op)
            && let Some(extent) = extents[node.outputs[0].0 as usize]
        {
            for input in &node.inputs {
                bound(&mut extents[input.0 as usize], extent);
            }
        }
    }
    g.inputs.iter().map(|v| extents[v.0 as usize]).collect()
}

fn bound(extent: &mut Option<u64>, limit: u64) {
    *extent = Some(extent.map_or(limit, |known| known.min(limit)));
}

/// Extent that operand 1 of a gather or scatter indexes.
fn indexed_extent(g: &Graph, node: &Node) -> Option<u64> {
    let shape = &g.ty(*node.inputs.first()?).shape;
    let extents: Vec<u64> = shape
        .iter()
        .map(|d| d.as_usize().map_or(0, |n| n as u64))
        .collect();
    let axes = match node.op {
        Op::Gather { axis } | Op::GatherElements { axis } | Op::ScatterElements { axis, .. } => {
            axis..axis + 1
        }
        Op::GatherNd { batch_dims } => batch_dims..batch_dims + tuple_length(g, node)?,
        Op::ScatterNd { .. } => 0..tuple_length(g, node)?,
        _ => return None,
    };
    extents.get(axes)?.iter().copied().min().filter(|&n| n > 0)
}

/// Extents of the axes that the indices of a scatter are positions in, as a check of them has them.
pub(crate) fn scattered_extents<'g>(g: &'g Graph, node: &Node) -> Option<&'g [Dim]> {
    let extents = match node.op {
        Op::ScatterElements { axis, .. } => axis..axis + 1,
        Op::ScatterNd { .. } => 0..tuple_length(g, node)?,
        _ => return None,
    };
    let extents = g.ty(node.inputs[0]).shape.get(extents)?;
    (!extents.is_empty()).then_some(extents)
}

/// Length of the index tuples of operand 1.
fn tuple_length(g: &Graph, node: &Node) -> Option<usize> {
    g.ty(*node.inputs.get(1)?).shape.last()?.as_usize()
}

/// True for ops whose results are elements of their operands. A cast counts, and a check: they keep indices.
fn moves_elements(op: &Op) -> bool {
    matches!(
        op,
        Op::Broadcast { .. }
            | Op::Reshape { .. }
            | Op::Transpose { .. }
            | Op::Slice { .. }
            | Op::Concat { .. }
            | Op::CheckIndices { .. }
            | Op::Map(ScalarOp::Cast(DType::I32 | DType::I64))
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indices_are_followed_back_to_inputs() {
        let text = r#"graph "g" {
            %0 = input "table": f32[5, 4]
            %1 = input "ids": i32[2, 3]
            %2 = input "free": i64[6]
            %3: i64[2, 3] = cast(%1) {to = i64}
            %4: i64[6] = reshape(%3) {shape = [6]}
            %5: f32[6, 4] = gather(%0, %4) {axis = 0}
            %6: f32[5, 6] = gather(%0, %4) {axis = 1}
            output "y" %5
            output "z" %6
            output "n" %2
        }"#;
        let g = Graph::parse(text).unwrap();
        assert_eq!(indexed_extents(&g), [None, Some(4), None]);
    }

    #[test]
    fn index_tuples_are_bounded_by_the_smallest_of_their_axes() {
        let text = r#"graph "g" {
            %0 = input "x": f32[9, 5, 7, 2]
            %1 = input "at": i64[9, 3, 2]
            %2: f32[9, 3, 2] = gather_nd(%0, %1) {batch_dims = 1}
            output "y" %2
        }"#;
        let g = Graph::parse(text).unwrap();
        assert_eq!(indexed_extents(&g), [None, Some(5)]);
    }
}
