//! The smallest and the largest of all elements, in one pass, or noted by the kernel that makes them.

use super::task::{Call, Context, Place, Ptr, Task, pointers, written};
use crate::cluster::ranges::{Range, extreme, ranges};
use crate::ir::{Node, NodeId, ValueId};
use gristmill_kernels::calls;
use gristmill_kernels::range::RangeDesc;

/// Estimated time of an element in ns.
const ELEMENT_NS: f64 = 0.03;

/// The results of a range in a body.
#[derive(Clone, Debug)]
pub(super) struct Noted {
    /// The smallest and the largest.
    pub(super) values: [ValueId; 2],
    /// The reductions.
    pub(super) nodes: [NodeId; 2],
}

impl Noted {
    /// The range of a tensor, if the body reduces it to both.
    pub(super) fn of(cx: &Context, v: ValueId) -> Option<Noted> {
        let Range { smallest, largest } = *ranges(&cx.body.graph).get(&v)?;
        let nodes = [smallest, largest];
        Some(Noted {
            values: nodes.map(|id| cx.body.graph.node(id).outputs[0]),
            nodes,
        })
    }

    /// The call that comes before those that note.
    pub(super) fn start(&self, cx: &Context) -> Call {
        self.call(&RangeDesc::start(cx.isa), Ptr::Null, 0)
    }

    fn call(&self, desc: &RangeDesc, from: Ptr, n: usize) -> Call {
        let [smallest, largest] = self.values.map(written);
        let ptrs = pointers(from, Ptr::Null, smallest, false, vec![largest]);
        let ns = n as f64 * ELEMENT_NS;
        Call::new(calls::gm_range_f32(desc), ptrs, desc.n_items(), ns)
    }
}

/// The task of both reductions of a range, where `node` is one of them.
pub(super) fn task(cx: &Context, node: &Node) -> Option<Task> {
    let of = extreme(&cx.body.graph, node)?.of;
    let (noted, n) = (Noted::of(cx, of)?, cx.body.n_elements(of));
    if n == 0 {
        return None;
    }
    let from = Ptr::Read(Place::Value(of), 0);
    let find = noted.call(&RangeDesc::new(cx.isa, n), from, n);
    let mut results = noted.values;
    if results[0] != node.outputs[0] {
        results.reverse();
    }
    Some(Task {
        calls: vec![noted.start(cx), find],
        temps: vec![],
        nodes: noted.nodes.to_vec(),
        results: results.to_vec(),
        apart: None,
    })
}

#[cfg(test)]
mod tests {
    use crate::codegen::cpu::tests::harness::{check, steps};
    use crate::codegen::testing::{Rng, plant_specials};
    use crate::ir::{Graph, GraphBuilder, Layout, Op, ReduceKind, ScalarOp, ValueId, Window};
    use gristmill_runtime::{DType, Tensor};

    /// Outputs of a tensor, and its range through views.
    fn with_range(mut b: GraphBuilder, y: ValueId, rng: &mut Rng) -> Graph {
        b.output("y", y);
        let rank = b.graph().ty(y).rank();
        let axes: Vec<usize> = (0..rank).collect();
        let mut reductions = [("low", ReduceKind::Min), ("high", ReduceKind::Max)];
        if rng.below(2) == 0 {
            reductions.reverse();
        }
        for (name, kind) in reductions {
            let mut perm = axes.clone();
            perm.rotate_left(rng.below(rank));
            let view = b.transpose(y, &perm).unwrap();
            let z = b.reduce(kind, view, &axes, rng.below(2) == 0).unwrap();
            b.output(name, z);
        }
        b.finish().unwrap()
    }

    fn product(shape: [usize; 3], ops: &[ScalarOp], rng: &mut Rng) -> (Graph, Vec<Tensor>) {
        let [m, k, n] = shape;
        let mut b = GraphBuilder::new("product");
        let x = b.input("x", DType::F32, [m, k]);
        let w = b.input("w", DType::F32, [k, n]);
        let mut y = b.matmul(x, w).unwrap();
        for op in ops {
            y = b.map(*op, &[y]).unwrap();
        }
        let inputs = [&[m, k][..], &[k, n]].map(|s| rng.tensor(DType::F32, s, -1.0, 1.0));
        (with_range(b, y, rng), inputs.to_vec())
    }

    #[test]
    fn products_note_the_range_of_their_results() {
        let rng = &mut Rng(71);
        for _ in 0..40 {
            let shape = [1 + rng.below(70), 1 + rng.below(50), 1 + rng.below(90)];
            let ops = [ScalarOp::Relu, ScalarOp::Gelu, ScalarOp::Neg];
            let (g, mut inputs) = product(shape, &ops[..rng.below(4)], rng);
            assert!(steps(&g).iter().all(|step| !step.contains("reduce")));
            check(&g, &inputs, 1e-5, rng);
            plant_specials(&mut inputs[0], rng);
            check(&g, &inputs, 1e-5, rng);
        }
    }

    #[test]
    fn batches_and_sums_of_bytes_note_one_range() {
        let rng = &mut Rng(76);
        for shared in [true, false] {
            let mut b = GraphBuilder::new("batched");
            let weights: &[usize] = if shared { &[8, 40] } else { &[3, 8, 40] };
            let x = b.input("x", DType::F32, [3usize, 7, 8]);
            let w = b.input("w", DType::F32, weights.iter().copied());
            let y = b.matmul(x, w).unwrap();
            let g = with_range(b, y, rng);
            let inputs = [&[3, 7, 8], weights].map(|s| rng.tensor(DType::F32, s, -1.0, 1.0));
            assert!(steps(&g).iter().all(|step| !step.contains("reduce")));
            check(&g, &inputs, 1e-5, rng);
        }
        let mut b = GraphBuilder::new("bytes");
        let x = b.input("x", DType::U8, [9usize, 16]);
        let w = rng.tensor(DType::I32, &[16, 70], -100.0, 100.0);
        let w = b.constant(w);
        let x = b.cast(x, DType::I32).unwrap();
        let y = b.matmul(x, w).unwrap();
        let y = b.cast(y, DType::F32).unwrap();
        let g = with_range(b, y, rng);
        assert!(steps(&g).last().unwrap().ends_with("gm_gemm_f32"));
        check(&g, &[rng.tensor(DType::U8, &[9, 16], 0.0, 255.0)], 0.0, rng);
    }

    #[test]
    fn a_range_costs_a_product_no_pass() {
        let rng = &mut Rng(72);
        let (g, _) = product([64, 32, 48], &[ScalarOp::Relu], rng);
        let names = steps(&g);
        let kernels: Vec<&str> = names.iter().filter_map(|s| s.split("gm_").nth(1)).collect();
        assert_eq!(kernels, ["range_f32", "pack_b_f32", "gemm_f32"]);
    }

    #[test]
    fn ranges_after_more_ops_than_a_tile_takes_are_found_apart() {
        let rng = &mut Rng(73);
        let ops = [ScalarOp::Neg, ScalarOp::Gelu].repeat(4);
        let (g, inputs) = product([33, 20, 40], &ops, rng);
        let names = steps(&g);
        assert!(names.last().unwrap().ends_with("gm_range_f32"), "{names:?}");
        check(&g, &inputs, 1e-5, rng);
    }

    #[test]
    fn convolutions_note_the_range_of_their_results() {
        let rng = &mut Rng(74);
        for (groups, c_in, c_out) in [(1, 3, 40), (1, 16, 7), (8, 8, 8), (40, 40, 40), (2, 8, 6)] {
            for is_filtered in [false, true] {
                let mut b = GraphBuilder::new("convolution");
                let size = 6 + rng.below(9);
                let image = [1, size, size, c_in];
                let filters = match is_filtered {
                    true => [3, 3, c_in / groups, c_out],
                    false => [1, 2, c_in / groups, c_out],
                };
                let x = b.input("x", DType::F32, image);
                let w = b.input("w", DType::F32, filters);
                let op = Op::Conv {
                    window: Window {
                        strides: vec![1, 1],
                        dilations: vec![1, 1],
                        pads_low: vec![0, 1],
                        pads_high: vec![1, 0],
                    },
                    groups,
                    layout: Layout::ChannelsLast,
                };
                let y = b.add1(op, &[x, w]).unwrap();
                let y = b.map(ScalarOp::Relu, &[y]).unwrap();
                let g = with_range(b, y, rng);
                let inputs = [image, filters].map(|s| rng.tensor(DType::F32, &s, -1.0, 1.0));
                assert!(steps(&g).iter().all(|step| !step.contains("reduce")));
                check(&g, &inputs, 1e-4, rng);
            }
        }
    }

    #[test]
    fn ranges_of_stored_tensors_are_found_in_one_pass() {
        let rng = &mut Rng(75);
        for shape in [&[1][..], &[7], &[3, 5], &[2, 3, 400], &[200, 300]] {
            let mut b = GraphBuilder::new("range");
            let x = b.input("x", DType::F32, shape.iter().copied());
            let y = b.reshape(x, shape.to_vec()).unwrap();
            let g = with_range(b, y, rng);
            let mut x = rng.tensor(DType::F32, shape, -1.0, 1.0);
            check(&g, std::slice::from_ref(&x), 0.0, rng);
            plant_specials(&mut x, rng);
            check(&g, &[x], 0.0, rng);
        }
    }
}
