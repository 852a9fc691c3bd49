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
