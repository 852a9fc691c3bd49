//! The graph of gradients: its text, names, origins and devices.

use super::*;

fn layer() -> (Graph, ValueId, Vec<ValueId>) {
    let mut b = GraphBuilder::new("layer");
    let x = b.input("x", DType::F32, [Dim::from("batch"), 3.into()]);
    let w = b.input("w", DType::F32, [3usize, 2]);
    let bias = b.input("bias", DType::F32, [2usize]);
    b.set_origin("/dense/MatMul");
    let product = b.matmul(x, w).unwrap();
    b.set_origin("/dense/Add");
    let sum = b.add_(product, bias).unwrap();
    b.set_origin("/relu");
    let y = b.map(ScalarOp::Relu, &[sum]).unwrap();
    b.set_origin("/loss");
    let loss = b.reduce(ReduceKind::Sum, y, &[0, 1], false).unwrap();
    b.output("loss", loss);
    (b.finish().unwrap(), loss, vec![w, bias])
}

#[test]
fn text_of_a_layer() {
    let (graph, loss, wrt) = layer();
    let options = GradOptions::default();
    let d = grad(&graph, loss, &wrt, &options).unwrap();
    assert_eq!(d, grad(&graph, loss, &wrt, &options).unwrap());
    assert_eq!(Graph::parse(&d.to_string()).unwrap(), d);
    insta::assert_snapshot!(d);
}

#[test]
fn names_are_unique() {
    let (graph, loss, wrt) = layer();
    let options = GradOptions::default();
    let once = grad(&graph, loss, &[wrt[0], wrt[0]], &options).unwrap();
    let twice = grad(&once, loss, &[wrt[0], loss], &options).unwrap();
    let names: Vec<&str> = twice.outputs.iter().map(|o| o.name.as_str()).collect();
    assert_eq!(
        names,
        ["loss", "grad/w", "grad/w#2", "grad/w#3", "grad/loss"]
    );
}

#[test]
fn gradients_are_where_their_nodes_are() {
    let mut b = GraphBuilder::new("devices");
    let x = b.input("x", DType::F64, [2usize]);
    let scope = b.enter_device("/device:CPU:1").unwrap();
    let y = b.map(ScalarOp::Tanh, &[x]).unwrap();
    b.exit_scope(scope).unwrap();
    let loss = b.reduce(ReduceKind::Sum, y, &[0], false).unwrap();
    let n_forward = b.graph().n_nodes();
    let dx = b.grad(loss, &[x]).unwrap()[0];
    let def = b.graph().def_node(dx).unwrap();
    assert_eq!(def.device, b.graph().def_node(y).unwrap().device);
    assert!(def.device.is_some() && b.graph().n_nodes() > n_forward);
}

#[test]
fn uses_are_summed_from_the_last() {
    let build = |b: &mut GraphBuilder, x: &[ValueId]| {
        let first = b.map(ScalarOp::Sin, &[x[0]])?;
        let second = b.mul(x[0], first)?;
        let third = b.mul(second, x[0])?;
        Ok(vec![first, third])
    };
    check("several uses", &[reals(&[3])], &build);
}

#[test]
fn gradients_of_inner_values_are_total() {
    let mut b = GraphBuilder::new("inner");
    let x = b.input("x", DType::F64, [] as [usize; 0]);
    let y = b.mul(x, x).unwrap();
    let z = b.mul(y, y).unwrap();
    for (i, g) in b.grad(z, &[x, y, z]).unwrap().into_iter().enumerate() {
        b.output(&format!("g{i}"), g);
    }
    let results = run(&b.finish().unwrap(), &[Tensor::scalar(2.0)]).unwrap();
    let found: Vec<f64> = results.iter().flat_map(|t| t.to_f64s()).collect();
    assert_eq!(found, [32.0, 8.0, 1.0]);
}

/// A convolution, pooling, a normalised layer and cross-entropy.
fn classifier() -> (Graph, ValueId, Vec<ValueId>) {
    let mut b = GraphBuilder::new("classifier");
    let x = b.input(
        "x",
        DType::F32,
        [Dim::from("batch"), 1.into(), 6.into(), 6.into()],
    );
    let target = b.input("target", DType::I64, [Dim::from("batch"), 1.into()]);
    let filters = b.input("filters", DType::F32, [2usize, 1, 3, 3]);
    let gamma = b.input("gamma", DType::F32, [8usize]);
    let beta = b.input("beta", DType::F32, [8usize]);
    let w = b.input("w", DType::F32, [8usize, 3]);
    let window = crate::ir::Window {
        strides: vec![1, 1],
        dilations: vec![1, 1],
        pads_low: vec![0, 0],
        pads_high: vec![0, 0],
    };
    let layout = crate::ir::Layout::ChannelsFirst;
    let conv = Op::Conv {
        window: window.clone(),
        groups: 1,
        layout,
    };
    let pool = Op::Pool {
        kind: crate::ir::PoolKind::Max,
        size: vec![2, 2],
        window: crate::ir::Window {
            strides: vec![2, 2],
            ..window
        },
        ceil: false,
        layout,
    };
    let norm = Op::LayerNorm {
        axis: 1,
        epsilon: crate::ir::Real(1e-5),
    };
    let y = b.add1(conv, &[x, filters]).unwrap();
    let y = b.add1(pool, &[y]).unwrap();
    let y = b.reshape(y, [Dim::from("batch"), 8.into()]).unwrap();
    let y = b.add1(norm, &[y, gamma, beta]).unwrap();
    let y = b.map(ScalarOp::Gelu, &[y]).unwrap();
    let y = b.matmul(y, w).unwrap();
    let y = b.add1(Op::Softmax { axis: 1, log: true }, &[y]).unwrap();
    let y = b
        .add1(Op::GatherElements { axis: 1 }, &[y, target])
        .unwrap();
    let mean = b.reduce(ReduceKind::Mean, y, &[0, 1], false).unwrap();
    let loss = b.map(ScalarOp::Neg, &[mean]).unwrap();
    b.output("loss", loss);
    (b.finish().unwrap(), loss, vec![filters, gamma, beta, w])
}

#[test]
fn compiled_gradients_are_those_of_the_interpreter() {
    let (graph, loss, wrt) = classifier();
    let d = grad(&graph, loss, &wrt, &GradOptions::default()).unwrap();
    let f32s = |shape: &[usize]| {
        let values = reals(shape).value.to_f64s();
        Tensor::from_f64s(DType::F32, shape, &values).unwrap()
    };
    let inputs = [
        f32s(&[2, 1, 6, 6]),
        Tensor::from_slice(&[2i64, 0], &[2, 1]).unwrap(),
        f32s(&[2, 1, 3, 3]),
        f32s(&[8]),
        f32s(&[8]),
        f32s(&[8, 3]),
    ];
    compare_compiled(&d, &inputs).unwrap();
}
