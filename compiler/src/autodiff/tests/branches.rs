//! Branches.

use super::second_order::check_second;
use super::*;
use ScalarOp::{Log, Mul, Sin, Tanh};

pub(super) type Branch<'a> = &'a dyn Fn(&mut GraphBuilder, &[ValueId]) -> Result<Vec<ValueId>>;

/// A region that takes values of some types.
pub(super) fn region(types: &[Type], branch: Branch) -> Result<Graph> {
    let mut b = GraphBuilder::new("branch");
    b.set_origin("/branch");
    let mut formals = Vec::new();
    for (i, ty) in types.iter().enumerate() {
        formals.push(b.input(&format!("x{i}"), ty.dtype, ty.shape.to_vec()));
    }
    for (i, v) in branch(&mut b, &formals)?.into_iter().enumerate() {
        b.output(&format!("y{i}"), v);
    }
    b.finish()
}

/// A choice by the first value among functions of the others.
pub(super) fn choice(
    b: &mut GraphBuilder,
    x: &[ValueId],
    branches: [Branch; 2],
) -> Result<Vec<ValueId>> {
    let types: Vec<Type> = x[1..].iter().map(|&v| b.ty(v).clone()).collect();
    let regions = branches.map(|branch| region(&types, branch));
    let regions = regions.into_iter().collect::<Result<Vec<Graph>>>()?;
    b.add_with_regions(Op::If, x, regions)
}

/// Operands of a choice, for either side.
fn sides() -> [Vec<Operand>; 2] {
    [1.0, 0.0].map(|side| vec![truths(&[], &[side]), reals(&[2, 3]), reals(&[3])])
}

/// Two results: one that uses an operand twice, and one that is an operand itself.
fn product(b: &mut GraphBuilder, x: &[ValueId]) -> Result<Vec<ValueId>> {
    let product = b.map(Mul, &[x[0], x[1]])?;
    let bent = b.map(Tanh, &[product])?;
    Ok(vec![b.mul(bent, x[0])?, x[1]])
}

/// Two results by the second operand alone.
fn wave(b: &mut GraphBuilder, x: &[ValueId]) -> Result<Vec<ValueId>> {
    let wave = b.map(Sin, &[x[1]])?;
    Ok(vec![b.broadcast(wave, [2usize, 3])?, wave])
}

fn either(b: &mut GraphBuilder, x: &[ValueId]) -> Result<Vec<ValueId>> {
    choice(b, x, [&product, &wave])
}

/// A choice of a choice, beside a use of the operand outside.
fn nested(b: &mut GraphBuilder, x: &[ValueId]) -> Result<Vec<ValueId>> {
    let inner = |b: &mut GraphBuilder, x: &[ValueId]| either(b, x);
    let other = |b: &mut GraphBuilder, x: &[ValueId]| product(b, &x[1..]);
    let both = choice(b, &[x[0], x[0], x[1], x[2]], [&inner, &other])?;
    Ok(vec![b.mul(both[0], x[1])?, both[1]])
}

#[test]
fn the_branch_that_is_taken_is_differentiated() {
    for operands in sides() {
        check("choice", &operands, &either);
        check("choice of choices", &operands, &nested);
        let both = |b: &mut GraphBuilder, x: &[ValueId]| Ok(vec![either(b, x)?[1]]);
        let options = GradOptions {
            allow_unused: true,
            ..GradOptions::default()
        };
        check_with("one result", &operands, &both, &options);
    }
}

#[test]
fn choices_have_second_derivatives() {
    for operands in sides() {
        check_second("choice", &operands, &either);
        check_second("choice of choices", &operands, &nested);
    }
}

#[test]
fn symbolic_extents() {
    let bent = |b: &mut GraphBuilder, x: &[ValueId]| b.add(Op::Map(Tanh), x);
    let same = |_: &mut GraphBuilder, x: &[ValueId]| Ok(x.to_vec());
    let build = |b: &mut GraphBuilder, x: &[ValueId]| choice(b, x, [&bent, &same]);
    for side in [0.0, 1.0] {
        check(
            "batch",
            &[truths(&[1], &[side]), reals(&[4, 3]).batched()],
            &build,
        );
    }
}

/// The sum of the squares of the positive elements, whose number the data decides.
fn squares(b: &mut GraphBuilder, x: &[ValueId]) -> Result<Vec<ValueId>> {
    let zero = b.scalar(DType::F64, 0.0);
    let is_positive = b.map(ScalarOp::Gt, &[x[0], zero])?;
    let at = b.non_zero(is_positive, "n_positive")?;
    let at = b.transpose(at, &[1, 0])?;
    let chosen = b.add1(Op::GatherNd { batch_dims: 0 }, &[x[0], at])?;
    let squares = b.mul(chosen, chosen)?;
    Ok(vec![b.reduce(ReduceKind::Sum, squares, &[0], false)?])
}

fn squares_or_sum(b: &mut GraphBuilder, x: &[ValueId]) -> Result<Vec<ValueId>> {
    let sum = |b: &mut GraphBuilder, x: &[ValueId]| {
        Ok(vec![b.reduce(ReduceKind::Sum, x[0], &[0, 1], false)?])
    };
    choice(b, x, [&squares, &sum])
}

#[test]
fn extents_by_data() {
    for operands in sides() {
        check("squares", &operands[..2], &squares_or_sum);
    }
}

#[test]
fn compiled_choices_are_those_of_the_interpreter() {
    for operands in sides() {
        for build in [either, nested] {
            let (graph, loss, wrt) = graph_of(&operands, &build).unwrap();
            let d = grad(&graph, loss, &wrt, &GradOptions::default()).unwrap();
            let inputs: Vec<Tensor> = operands.iter().map(|o| o.value.clone()).collect();
            compare_compiled(&d, &inputs).unwrap();
        }
    }
}

/// A choice between a logarithm and the operand, its sum, and the gradient by the operand.
fn logarithm(side: f64, x: &[f64]) -> Vec<f64> {
    let log = |b: &mut GraphBuilder, x: &[ValueId]| b.add(Op::Map(Log), x);
    let same = |_: &mut GraphBuilder, x: &[ValueId]| Ok(x.to_vec());
    let mut b = GraphBuilder::new("logarithm");
    let condition = b.input("condition", DType::Bool, [] as [usize; 0]);
    let v = b.input("x", DType::F64, [x.len()]);
    let y = choice(&mut b, &[condition, v], [&log, &same]).unwrap()[0];
    let loss = b.reduce(ReduceKind::Sum, y, &[0], false).unwrap();
    let gradient = b.grad(loss, &[v]).unwrap()[0];
    b.output("d", gradient);
    let inputs = [truths(&[], &[side]).value, numbers(&[x.len()], x).value];
    run(&b.finish().unwrap(), &inputs).unwrap()[0].to_f64s()
}

#[test]
fn the_other_branch_adds_nothing() {
    assert_eq!(logarithm(1.0, &[0.5, -4.0]), [2.0, -0.25]);
    assert_eq!(logarithm(0.0, &[0.0, f64::INFINITY]), [1.0, 1.0]);
}

/// The error of a gradient through a choice between a function and its operand.
fn error_of(branch: Branch) -> String {
    let same = |_: &mut GraphBuilder, x: &[ValueId]| Ok(vec![x[0]]);
    let mut b = GraphBuilder::new("error");
    b.set_origin("/choice");
    let condition = b.input("condition", DType::Bool, [] as [usize; 0]);
    let x = b.input("x", DType::F64, [] as [usize; 0]);
    let unused = b.input("unused", DType::F64, [] as [usize; 0]);
    let y = choice(&mut b, &[condition, x, unused], [branch, &same]).unwrap()[0];
    b.grad(y, &[x, unused]).unwrap_err().to_string()
}

#[test]
fn branches_without_a_gradient_are_errors() {
    let bits = |b: &mut GraphBuilder, x: &[ValueId]| {
        let sum = b.add_(x[0], x[1])?;
        b.add(Op::Map(ScalarOp::BitCast(DType::F64)), &[sum])
    };
    let state = |b: &mut GraphBuilder, x: &[ValueId]| {
        let sum = b.add_(x[0], x[1])?;
        Ok(vec![b.assign_variable("w", sum)?])
    };
    let one = |b: &mut GraphBuilder, x: &[ValueId]| b.add(Op::Map(Tanh), &x[..1]);
    let branches: [Branch; 3] = [&bits, &state, &one];
    insta::assert_snapshot!(branches.map(error_of).join("\n"), @r#"
    in node "/branch": bit_cast: no gradient: the bits of a number have no derivative
    in node "/choice": if: no gradient: its branches, which the gradient runs again, read or assign variables
    the loss does not depend on "unused" through floating-point values
    "#);
}

#[test]
fn gradients_do_not_flow_through_the_state_of_branches() {
    let assign = |b: &mut GraphBuilder, x: &[ValueId]| Ok(vec![b.assign_variable("w", x[0])?]);
    let same = |_: &mut GraphBuilder, x: &[ValueId]| Ok(x.to_vec());
    let mut b = GraphBuilder::new("state");
    let condition = b.input("condition", DType::Bool, [] as [usize; 0]);
    let x = b.input("x", DType::F64, [] as [usize; 0]);
    choice(&mut b, &[condition, x], [&assign, &same]).unwrap();
    let again = b.read_variable("w", DType::F64, [] as [usize; 0]).unwrap();
    let loss = b.mul(again, x).unwrap();
    assert!(b.grad(loss, &[x]).is_err());
}
