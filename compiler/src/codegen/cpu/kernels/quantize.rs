//! Quantisation by a scale and a zero point that are known when a model runs.

use super::task::{Call, Context, Place, Ptr, Task, pointers, result};
use crate::ir::{Graph, Node, NodeId, Op, ScalarOp, ValueId};
use gristmill_kernels::calls;
use gristmill_kernels::quantize::QuantizeDesc;
use gristmill_runtime::{DType, Tensor};

/// Estimated time of an element in ns.
const ELEMENT_NS: f64 = 0.06;

/// `cast(round(x / scale) + zero)`.
struct Quantized {
    x: ValueId,
    scale: ValueId,
    /// In `f32`; 0 if absent.
    zero: Option<ValueId>,
    /// The nodes before the cast.
    nodes: Vec<NodeId>,
}

impl Quantized {
    /// The parts of a cast to 8 bits. Results in between are read by nothing else.
    fn of(cx: &Context, node: &Node) -> Option<Quantized> {
        let g = &cx.body.graph;
        let Op::Map(ScalarOp::Cast(DType::U8 | DType::I8)) = node.op else {
            return None;
        };
        let mut nodes = Vec::new();
        let mut chain = node.inputs[0];
        let mut zero = None;
        if let Some((id, added)) = only_read(cx, chain, ScalarOp::Add) {
            let at = added.inputs.iter().position(|&v| is_single(g, v))?;
            (zero, chain) = (Some(added.inputs[at]), added.inputs[1 - at]);
            nodes.push(id);
        }
        let (id, rounded) = only_read(cx, chain, ScalarOp::Round)?;
        nodes.push(id);
        let (id, quotient) = only_read(cx, rounded.inputs[0], ScalarOp::Div)?;
        nodes.push(id);
        let &[x, scale] = &quotient.inputs[..] else {
            return None;
        };
        nodes.reverse();
        let is_whole = g.ty(x).shape == g.ty(node.outputs[0]).shape;
        let is_fitting = is_whole && is_single(g, scale) && g.ty(x).dtype == DType::F32;
        is_fitting.then_some(Quantized {
            x,
            scale,
            zero,
            nodes,
        })
    }
}

/// The node that computes `v`, if it is this op and `v` is stored nowhere and read once.
fn only_read<'c>(cx: &'c Context, v: ValueId, op: ScalarOp) -> Option<(NodeId, &'c Node)> {
    let g = &cx.body.graph;
    let is_stored = (cx.in_memory)(v) || g.outputs.iter().any(|o| o.value == v);
    if is_stored || cx.users[v.0 as usize].len() != 1 {
        return None;
    }
    let id = g.def_id(v)?;
    let node = g.node(id);
    (node.op == Op::Map(op)).then_some((id, node))
}

fn is_single(g: &Graph, v: ValueId) -> bool {
    g.ty(v).shape.n_elements().is(1)
}

/// The task of a cast to 8 bits that ends a quantisation of elements in memory.
pub(super) fn task(cx: &Context, id: NodeId, node: &Node) -> Option<Task> {
    let quantized = Quantized::of(cx, node)?;
    let n = cx.body.n_elements(quantized.x);
    if !(cx.in_memory)(quantized.x) || n <= 1 {
        return None;
    }
    let is_signed = cx.body.dtype(node.outputs[0]) == DType::I8;
    let desc = QuantizeDesc::new(cx.isa, is_signed, n);
    let read = |v: ValueId| Ptr::Read(Place::Value(v), 0);
    let zero = match quantized.zero {
        Some(zero) => read(zero),
        None => Ptr::Read(Place::Packed(Tensor::scalar(0f32).into()), 0),
    };
    let (x, scale) = (read(quantized.x), read(quantized.scale));
    let ptrs = pointers(x, scale, result(node), false, vec![zero]);
    let ns = n as f64 * ELEMENT_NS;
    let call = Call::new(calls::gm_quantize_f32(&desc), ptrs, desc.n_items(), ns);
    let mut nodes = quantized.nodes;
    nodes.push(id);
    Some(Task {
        nodes,
        ..Task::single(cx, id, node, call).ok()?
    })
}

#[cfg(test)]
mod tests {
    use crate::codegen::cpu::tests::harness::{check, steps};
    use crate::codegen::testing::{Rng, plant_specials};
    use crate::ir::{Graph, GraphBuilder, ScalarOp};
    use gristmill_runtime::{DType, Tensor};

    fn quantized(shape: &[usize], to: DType, has_zero: bool) -> Graph {
        let mut b = GraphBuilder::new("quantized");
        let x = b.input("x", DType::F32, shape.iter().copied());
        let [scale, zero] = ["scale", "zero"].map(|name| b.input(name, DType::F32, [1usize; 0]));
        let y = b.div(x, scale).unwrap();
        let mut y = b.map(ScalarOp::Round, &[y]).unwrap();
        if has_zero {
            y = b.add_(zero, y).unwrap();
        }
        let y = b.cast(y, to).unwrap();
        b.output("y", y);
        b.finish().unwrap()
    }

    #[test]
    fn elements_are_quantised_by_scales_of_the_run() {
        let rng = &mut Rng(81);
        for shape in [&[3][..], &[5, 7], &[2, 3, 64], &[40, 900]] {
            for to in [DType::U8, DType::I8] {
                for zero in [0.0f32, 100.0, -100.0, 0.25, f32::NAN] {
                    let g = quantized(shape, to, zero != 0.0);
                    let kernels = steps(&g);
                    assert!(kernels[0].ends_with("gm_quantize_f32") && kernels.len() == 1);
                    let mut x = rng.tensor(DType::F32, shape, -3.0, 3.0);
                    plant_specials(&mut x, rng);
                    let scale = [0.02f32, 1.0, 0.0, f32::NAN][rng.below(4)];
                    let inputs = [x, Tensor::scalar(scale), Tensor::scalar(zero)];
                    check(&g, &inputs, 0.0, rng);
                }
            }
        }
    }

    #[test]
    fn quotients_that_are_read_again_are_stored_by_loops() {
        let rng = &mut Rng(82);
        let mut b = GraphBuilder::new("read_again");
        let x = b.input("x", DType::F32, [4usize, 30]);
        let scale = b.input("scale", DType::F32, [1usize; 0]);
        let quotient = b.div(x, scale).unwrap();
        let rounded = b.map(ScalarOp::Round, &[quotient]).unwrap();
        let y = b.cast(rounded, DType::U8).unwrap();
        b.output("y", y);
        b.output("rounded", rounded);
        let x = rng.tensor(DType::F32, &[4, 30], -300.0, 300.0);
        let g = b.finish().unwrap();
        check(&g, &[x, Tensor::scalar(0.7f32)], 0.0, rng);
    }
}
