//! Hand-computed work and orderings that must hold on any device.

use super::*;
use crate::cluster;
use crate::ir::{Dim, GraphBuilder, ScalarOp, Shape};
use crate::{DType, Tensor};
use gristmill_kernels::Isa;

fn device() -> DeviceProfile {
    DeviceProfile::cpu(Isa::Avx512, 1)
}

fn f32s(shape: &[usize]) -> Type {
    Type::new(DType::F32, shape.iter().copied())
}

#[test]
fn flops_of_contractions() {
    let extents = Extents::default();
    let matmul = work::of_op(&Op::MatMul, &[f32s(&[2, 3, 5]), f32s(&[5, 7])], &[f32s(&[2, 3, 7])], &extents);
    assert_eq!((matmul.class, matmul.flops), (WorkClass::MatMul, 2 * 2 * 3 * 5 * 7));
    let window =
        crate::ir::Window { strides: vec![1; 2], dilations: vec![1; 2], pads_low: vec![1; 2], pads_high: vec![1; 2] };
    for (layout, w) in
        [(crate::ir::Layout::ChannelsFirst, [8, 2, 3, 3]), (crate::ir::Layout::ChannelsLast, [3, 3, 2, 8])]
    {
        let op = Op::Conv { window: window.clone(), groups: 2, layout };
        let conv = work::of_op(&op, &[f32s(&[1, 4, 6, 6]), f32s(&w)], &[f32s(&[1, 8, 6, 6])], &extents);
        assert_eq!((conv.class, conv.flops), (WorkClass::Conv, 2 * 8 * 36 * 2 * 9));
    }
    let op = Op::Attention { scale: 1.0.into(), causal: false };
    let qkv = [f32s(&[2, 4, 8]), f32s(&[2, 6, 8]), f32s(&[2, 6, 8])];
    assert_eq!(work::of_op(&op, &qkv, &[f32s(&[2, 4, 8])], &extents).flops, 2 * 4 * 6 * (16 + 16 + 14));
}

#[test]
fn symbols_count_as_the_stated_extent() {
    let shape = Shape::from_iter([Dim::symbol("batch"), 4.into()]);
    assert_eq!(Extents::default().elements(&shape), 4);
    let eight = Extents { bindings: [("batch".to_owned(), 8)].into(), unknown_extent: 1 };
    assert_eq!(eight.elements(&shape), 32);
}

#[test]
fn a_gather_does_not_read_its_whole_table() {
    let mut b = GraphBuilder::new("g");
    let table = b.input("table", DType::F32, [50_000usize, 64]);
    let ids = b.input("ids", DType::I64, [4usize]);
    let rows = b.add1(Op::Gather { axis: 0 }, &[table, ids]).unwrap();
    b.output("rows", rows);
    let g = b.finish().unwrap();
    let (clustered, _) = cluster::cluster(&g, &cluster::Fusion::Grouped).unwrap();
    for g in [&g, &clustered] {
        let (_, node) = g.nodes().next().unwrap();
        assert_eq!(work::traffic(g, node, &Extents::default()), Bytes(2 * 4 * 64 * 4 + 4 * 8));
    }
}

#[test]
fn a_fused_epilogue_is_cheaper_than_two_kernels() {
    let mut b = GraphBuilder::new("g");
    let x = b.input("x", DType::F32, [64usize, 256]);
    let w = b.constant(Tensor::zeros(DType::F32, &[256, 256]).unwrap());
    let y = b.matmul(x, w).unwrap();
    let y = b.map(ScalarOp::Relu, &[y]).unwrap();
    b.output("y", y);
    let g = b.finish().unwrap();
    let (clustered, _) = cluster::cluster(&g, &cluster::Fusion::Grouped).unwrap();
    let model = CostModel::default();
    assert!(model.graph_ns(&clustered, &device()) < model.graph_ns(&g, &device()));
    let bigger = DeviceProfile::cpu(Isa::Avx2, 1);
    assert!(model.graph_ns(&clustered, &device()) < model.graph_ns(&clustered, &bigger));
}

#[test]
fn measured_times_replace_estimates() {
    let mut b = GraphBuilder::new("g");
    let x = b.input("x", DType::F32, [16usize]);
    let y = b.map(ScalarOp::Exp, &[x]).unwrap();
    b.output("y", y);
    let g = b.finish().unwrap();
    let mut model = CostModel::default();
    let estimate = model.node_ns(&g, NodeId(0), &device());
    model.measured.insert((DeviceKind::Cpu, signature(&g, g.node(NodeId(0)))), Nanos(123_456));
    assert_ne!(estimate, Nanos(123_456));
    assert_eq!(model.node_ns(&g, NodeId(0), &device()), Nanos(123_456));
}
