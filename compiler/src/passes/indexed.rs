//! Inputs used as indices, and the extents of their axes.

use crate::interp;
use crate::ir::{Dim, Graph, Node, Op, ScalarOp, ValueId};
use crate::{DType, Tensor};
use std::collections::{BTreeSet, HashMap};

/// Extent of the axis indexed by each input of a graph, the smallest of several. Indices are followed back through ops which
/// only move elements; inside regions they are not looked for.
pub fn indexed_extents(g: &Graph) -> Vec<Option<u64>> {
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

/// Extent of the axis indexed by operand 1 of a gather or scatter.
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

/// Extents of the axes indexed by a scatter, for the check of its indices.
pub(crate) fn scattered_extents<'g>(g: &'g Graph, node: &Node) -> Option<&'g [Dim]> {
    let extents = match node.op {
        Op::ScatterElements { axis, .. } => axis..axis + 1,
        Op::ScatterNd { .. } => 0..tuple_length(g, node)?,
        _ => return None,
    };
    let extents = g.ty(node.inputs[0]).shape.get(extents)?;
    (!extents.is_empty()).then_some(extents)
}

/// Indices with their sources among the inputs of a graph.
type Known = HashMap<ValueId, (Tensor, BTreeSet<usize>)>;

/// The first index of a gather or scatter out of range: its input, its place there, and its range.
///
/// Indices are followed from the inputs through ops which only move elements, outside of regions.
pub fn wrong_index(g: &Graph, inputs: &[Tensor]) -> Option<String> {
    let indices = g.inputs.iter().zip(inputs).enumerate();
    let indices = indices.filter(|(_, (_, tensor))| is_index(tensor.dtype()));
    let mut known: Known = indices
        .map(|(i, (&v, tensor))| (v, (tensor.clone(), BTreeSet::from([i]))))
        .collect();
    for (_, node) in g.nodes() {
        if let Some((at, extents)) = indices_of(g, node)
            && let Some((tensor, sources)) = known.get(&at)
            && let Some((index, axis)) = first_outside(tensor, &extents)
        {
            let mut sources = sources.iter();
            let place = |&i: &usize| place_of(index, &g.input_names[i], &inputs[i]);
            let place = sources.find_map(place)?;
            return Some(format!("{place}, {}", allowed_indices(extents[axis])));
        }
        if !moves_elements(&node.op) {
            continue;
        }
        if let Some(moved) = moved(node, &known) {
            known.insert(node.outputs[0], moved);
        }
    }
    None
}

/// The result of an op on known indices, and its sources among the inputs.
fn moved(node: &Node, known: &Known) -> Option<(Tensor, BTreeSet<usize>)> {
    let operands = node.inputs.iter().map(|v| known.get(v));
    let operands: Vec<_> = operands.collect::<Option<_>>()?;
    let tensors: Vec<&Tensor> = operands.iter().map(|(tensor, _)| tensor).collect();
    let sources = operands.iter().flat_map(|(_, sources)| sources).copied();
    let [moved] = interp::eval(&node.op, &tensors, &[])
        .ok()?
        .try_into()
        .ok()?;
    Some((moved, sources.collect()))
}

/// Indices into an axis, as a part of an error.
fn allowed_indices(extent: usize) -> String {
    match extent as i64 {
        0 => "where an axis is empty".to_owned(),
        n => format!("expected {} to {}", -n, n - 1),
    }
}

fn is_index(dtype: DType) -> bool {
    matches!(dtype, DType::I32 | DType::I64)
}

/// The indices of a node and the extents of their axes: one, or one for each entry of a tuple.
fn indices_of(g: &Graph, node: &Node) -> Option<(ValueId, Vec<usize>)> {
    let tuple = |v: ValueId| g.ty(v).shape.last()?.as_usize();
    let at = *node.inputs.get(1).or(node.inputs.first())?;
    let axes = match &node.op {
        Op::CheckIndices { extents } => {
            let extents = extents.iter().map(Dim::as_usize).collect::<Option<_>>()?;
            return Some((at, extents));
        }
        Op::Gather { axis } | Op::GatherElements { axis } | Op::ScatterElements { axis, .. } => {
            *axis..axis + 1
        }
        Op::GatherNd { batch_dims } => *batch_dims..batch_dims + tuple(at)?,
        Op::ScatterNd { .. } => 0..tuple(at)?,
        _ => return None,
    };
    let shape = g.ty(node.inputs[0]).shape.get(axes)?;
    Some((at, shape.iter().map(Dim::as_usize).collect::<Option<_>>()?))
}

/// The first index outside of its axis, and the number of the axis among `extents`.
fn first_outside(indices: &Tensor, extents: &[usize]) -> Option<(i64, usize)> {
    let axes = (0..extents.len()).cycle();
    let mut all = elements(indices).into_iter().zip(axes);
    all.find(|&(index, axis)| {
        let n = extents[axis] as i64;
        !(-n..n).contains(&index)
    })
}

fn elements(indices: &Tensor) -> Vec<i64> {
    match indices.dtype() {
        DType::I32 => indices
            .as_slice::<i32>()
            .iter()
            .map(|&i| i.into())
            .collect(),
        _ => indices.as_slice::<i64>().to_vec(),
    }
}

/// `index 7 at [0, 2] of input "ids"`; `None` if it is not there.
fn place_of(index: i64, name: &str, input: &Tensor) -> Option<String> {
    let mut rest = elements(input).iter().position(|&i| i == index)?;
    let mut position = Vec::new();
    for &extent in input.shape().iter().rev() {
        position.insert(0, rest % extent);
        rest /= extent;
    }
    Some(match position.is_empty() {
        true => format!("input {name:?} is {index}"),
        false => format!("input {name:?} has {index} at {position:?}"),
    })
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

    fn wrong(text: &str, inputs: &[Tensor]) -> String {
        wrong_index(&Graph::parse(text).unwrap(), inputs).unwrap_or_default()
    }

    #[test]
    fn indices_out_of_range_are_found_in_inputs() {
        let text = r#"graph "g" {
            %0 = input "table": f32[5, 4]
            %1 = input "ids": i32[2, 3]
            %2: i64[2, 3] = cast(%1) {to = i64}
            %3: i64[3, 2] = transpose(%2) {perm = [1, 0]}
            %4: f32[3, 2, 4] = gather(%0, %3) {axis = 0}
            output "y" %4
        }"#;
        let table = Tensor::zeros(DType::F32, &[5, 4]).unwrap();
        let ids = |ids: [i32; 6]| Tensor::from_slice(&ids, &[2, 3]).unwrap();
        let found = wrong(text, &[table.clone(), ids([0, 4, -5, 1, 2, 5])]);
        assert_eq!(found, r#"input "ids" has 5 at [1, 2], expected -5 to 4"#);
        assert_eq!(wrong(text, &[table, ids([0, 4, -5, 1, 2, 3])]), "");

        let text = r#"graph "g" {
            %0 = input "x": f32[9, 5, 7, 2]
            %1 = input "at": i64[9, 3, 2]
            %2: f32[9, 3, 2] = gather_nd(%0, %1) {batch_dims = 1}
            output "y" %2
        }"#;
        let x = Tensor::zeros(DType::F32, &[9, 5, 7, 2]).unwrap();
        let mut at = vec![4i64; 54];
        at[9] = 6;
        let tensor = |at: &[i64]| Tensor::from_slice(at, &[9, 3, 2]).unwrap();
        assert_eq!(wrong(text, &[x.clone(), tensor(&at)]), "");
        at[10] = -6;
        let found = wrong(text, &[x, tensor(&at)]);
        assert_eq!(found, r#"input "at" has -6 at [1, 2, 0], expected -5 to 4"#);
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
