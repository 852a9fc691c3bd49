//! Errors, and what counts as constant.

use super::*;
use crate::error::Error;
use crate::ir::Origin;

/// `x: f64[2]`, an integer and `y` in between, and a loss.
struct Small {
    graph: Graph,
    x: ValueId,
    unused: ValueId,
    numbers: ValueId,
    squares: ValueId,
    loss: ValueId,
}

fn small() -> Small {
    let mut b = GraphBuilder::new("small");
    b.set_origin("/model/square");
    let x = b.input("x", DType::F64, [2usize]);
    let unused = b.input("unused", DType::F64, [2usize]);
    let numbers = b.input("numbers", DType::I64, [2usize]);
    let squares = b.mul(x, x).unwrap();
    let loss = b.reduce(ReduceKind::Sum, squares, &[0], false).unwrap();
    b.output("squares", squares);
    b.output("loss", loss);
    let graph = b.finish().unwrap();
    Small {
        graph,
        x,
        unused,
        numbers,
        squares,
        loss,
    }
}

impl Small {
    fn error(&self, loss: ValueId, wrt: ValueId) -> Error {
        grad(&self.graph, loss, &[wrt], &GradOptions::default()).unwrap_err()
    }
}

#[test]
fn values_that_do_not_fit() {
    let s = small();
    let errors = [
        s.error(s.squares, s.x),
        s.error(s.numbers, s.x),
        s.error(s.loss, s.numbers),
        s.error(s.loss, s.unused),
        s.error(s.loss, ValueId::new(99)),
    ];
    let text = errors.map(|e| e.to_string()).join("\n");
    insta::assert_snapshot!(text, @r#"
    loss "squares" is f64[2]: expected one floating-point element
    loss "numbers" is i64[2]: expected one floating-point element
    "numbers" is i64[2]: only floating-point values have gradients
    the loss does not depend on "unused" through floating-point values
    value 99 is not of graph "small"
    "#);
}

#[test]
fn missing_rules_name_the_node() {
    let mut g = Graph::new("missing");
    let origin = Origin::new("/model/bits");
    let x = g.add_input("x", crate::ir::Type::new(DType::F64, [] as [usize; 0]));
    let op = Op::Map(ScalarOp::BitCast(DType::F64));
    let y = g.add1(op, &[x], &origin).unwrap();
    let e = grad(&g, y, &[x], &GradOptions::default()).unwrap_err();
    assert_eq!(e.kind(), crate::ErrorKind::Unsupported);
    assert_eq!(e.node(), Some("/model/bits"));
    insta::assert_snapshot!(e, @r#"in node "/model/bits": bit_cast: no gradient: the bits of a number have no derivative"#);
}

#[test]
fn nodes_beside_the_path_need_no_rule() {
    let mut b = GraphBuilder::new("beside");
    let x = b.input("x", DType::F64, [2usize]);
    let w = b.input("w", DType::F64, [2usize]);
    let bits = b.map(ScalarOp::BitCast(DType::F64), &[x]).unwrap();
    let y = b.mul(bits, w).unwrap();
    let loss = b.reduce(ReduceKind::Sum, y, &[0], false).unwrap();
    assert!(b.grad(loss, &[w]).is_ok());
    assert!(b.grad(loss, &[x]).is_err());
}

#[test]
fn attributes_without_a_rule_are_refused() {
    let mut b = GraphBuilder::new("refused");
    b.set_origin("/model/all");
    let x = b.input("x", DType::F64, [] as [usize; 0]);
    let all = b.all_reduce(ReduceKind::Max, &[x, x]).unwrap();
    let e = b.grad(all[0], &[x]).unwrap_err();
    assert_eq!(e.kind(), crate::ErrorKind::Unsupported);
    insta::assert_snapshot!(e, @r#"in node "/model/all": all_reduce: no gradient: an all-reduce has a gradient rule for sum and mean only"#);
}

#[test]
fn values_of_another_builder_are_refused() {
    let mut a = GraphBuilder::new("a");
    let mut b = GraphBuilder::new("b");
    let x = a.input("x", DType::F64, [] as [usize; 0]);
    let y = b.input("y", DType::F64, [] as [usize; 0]);
    assert!(b.grad(y, &[x]).is_err());
    assert!(b.grad(y, &[y]).is_ok());
}

#[test]
fn unused_values_get_zeros_where_allowed() {
    let s = small();
    let options = GradOptions {
        allow_unused: true,
        ..GradOptions::default()
    };
    let d = grad(&s.graph, s.loss, &[s.unused, s.x], &options).unwrap();
    let x = Tensor::from_slice(&[3.0, -1.0], &[2]).unwrap();
    let n = Tensor::from_slice(&[0i64, 0], &[2]).unwrap();
    let results = run(&d, &[x.clone(), x, n]).unwrap();
    assert_eq!(results[2].to_f64s(), [0.0, 0.0]);
    assert_eq!(results[3].to_f64s(), [6.0, -2.0]);
}

#[test]
fn stopped_values_are_constants() {
    let mut b = GraphBuilder::new("stop");
    let x = b.input("x", DType::F64, [] as [usize; 0]);
    let squared = b.mul(x, x).unwrap();
    let cubed = b.mul(squared, x).unwrap();
    let options = GradOptions {
        stop: vec![squared],
        ..GradOptions::default()
    };
    let all = b.grad_with(cubed, &[x, squared], &options).unwrap();
    b.output("dx", all[0]);
    b.output("dsquared", all[1]);
    let results = run(&b.finish().unwrap(), &[Tensor::scalar(3.0)]).unwrap();
    assert_eq!(results[0].to_f64s(), [9.0]);
    assert_eq!(results[1].to_f64s(), [3.0]);
}

#[test]
fn gradients_do_not_flow_through_state() {
    let mut b = GraphBuilder::new("state");
    let x = b.input("x", DType::F64, [] as [usize; 0]);
    let old = b.variable("w", Tensor::scalar(2.0)).unwrap();
    let product = b.mul(x, old).unwrap();
    let new = b.assign_variable("w", product).unwrap();
    b.set_origin("/model/w");
    let again = b.read_variable("w", DType::F64, [] as [usize; 0]).unwrap();
    assert!(b.grad(new, &[x, old]).is_ok());
    let n_nodes = b.graph().n_nodes();
    let e = b.grad(again, &[x]).unwrap_err();
    assert_eq!(b.graph().n_nodes(), n_nodes);
    insta::assert_snapshot!(e, @r#"in node "/model/w": read_variable: no gradient: the variable was assigned before in the same run; the result of the assignment has a gradient"#);
}

#[test]
fn errors_leave_no_nodes_behind() {
    let mut b = GraphBuilder::new("partial");
    let x = b.input("x", DType::F64, [] as [usize; 0]);
    let all = b.all_reduce(ReduceKind::Max, &[x, x]).unwrap();
    let loss = b.map(ScalarOp::Tanh, &[all[0]]).unwrap();
    let n_nodes = b.graph().n_nodes();
    assert!(b.grad(loss, &[x]).is_err());
    assert_eq!(b.graph().n_nodes(), n_nodes);
}
