//! Gradients of scans: recurrences, sums over sequences, steps in either direction, one scan within another.

use super::second_order::check_second;
use super::*;
use crate::ir::Dim;

/// Results of a body for its formals: carried values first, then elements of stacked results.
pub(super) type Body = fn(&mut GraphBuilder, &[ValueId]) -> Result<Vec<ValueId>>;

/// Numbers of carried values and sequences, and the direction.
#[derive(Clone, Copy)]
pub(super) struct Form {
    carried: usize,
    scanned: usize,
    reverse: bool,
}

pub(super) fn form(carried: usize, scanned: usize) -> Form {
    Form {
        carried,
        scanned,
        reverse: false,
    }
}

/// A scan over the operands.
pub(super) fn scan(
    b: &mut GraphBuilder,
    x: &[ValueId],
    form: Form,
    body: Body,
) -> Result<Vec<ValueId>> {
    let mut inner = GraphBuilder::new("step");
    let mut formals = Vec::new();
    let mut length: Option<Dim> = None;
    for (i, &v) in x.iter().enumerate() {
        let ty = b.ty(v).clone();
        let mut shape = ty.shape.0;
        if (form.carried..form.carried + form.scanned).contains(&i) {
            length = Some(shape.remove(0));
        }
        formals.push(inner.input(&format!("a{i}"), ty.dtype, shape));
    }
    for (i, v) in body(&mut inner, &formals)?.into_iter().enumerate() {
        inner.output(&format!("r{i}"), v);
    }
    let op = Op::Scan {
        carried: form.carried,
        scanned: form.scanned,
        length: length.unwrap_or(3.into()),
        reverse: form.reverse,
    };
    b.add_with_regions(op, x, vec![inner.into_graph()])
}

/// `h' = tanh(h w + x)`, and the sum of `h'` and `x`.
fn recurrence(b: &mut GraphBuilder, a: &[ValueId]) -> Result<Vec<ValueId>> {
    let [h, x, w] = a[..] else { unreachable!() };
    let product = b.matmul(h, w)?;
    let sum = b.add_(product, x)?;
    let h = b.map(ScalarOp::Tanh, &[sum])?;
    let y = b.add_(h, x)?;
    Ok(vec![h, y])
}

fn recurrence_operands() -> [Operand; 3] {
    [reals(&[2, 3]), reals(&[4, 2, 3]), reals(&[3, 3])]
}

#[test]
fn recurrences_forward_and_backward() {
    for reverse in [false, true] {
        let build = |b: &mut GraphBuilder, x: &[ValueId]| {
            let form = Form {
                reverse,
                ..form(1, 1)
            };
            scan(b, x, form, recurrence)
        };
        check("recurrence", &recurrence_operands(), &build);
        check_second("recurrence", &recurrence_operands(), &build);
    }
}

#[test]
fn parts_of_the_results() {
    for kept in [0, 1] {
        let build = |b: &mut GraphBuilder, x: &[ValueId]| {
            Ok(vec![scan(b, x, form(1, 1), recurrence)?[kept]])
        };
        check("one result", &recurrence_operands(), &build);
    }
}

/// Three values that go round: each is the one before it, and the first takes in an element.
fn round(b: &mut GraphBuilder, a: &[ValueId]) -> Result<Vec<ValueId>> {
    let [p, q, r, x] = a[..] else { unreachable!() };
    let p2 = b.mul(r, x)?;
    Ok(vec![p2, p, q])
}

#[test]
fn values_that_matter_after_some_steps_only() {
    let all = [reals(&[2]), reals(&[2]), reals(&[2]), reals(&[5, 2])];
    let build = |b: &mut GraphBuilder, x: &[ValueId]| Ok(vec![scan(b, x, form(3, 1), round)?[0]]);
    check("round", &all, &build);
    check_second("round", &all, &build);
}

/// A counter of integers, a sum weighted by it, and an invariant under a nonlinearity that no step changes.
fn counted(b: &mut GraphBuilder, a: &[ValueId]) -> Result<Vec<ValueId>> {
    let [n, sum, x, w] = a[..] else {
        unreachable!()
    };
    let one = b.scalar(DType::I64, 1.0);
    let next = b.add_(n, one)?;
    let factor = b.cast(next, DType::F64)?;
    let bent = b.map(ScalarOp::Exp, &[w])?;
    let part = b.mul(x, bent)?;
    let part = b.mul(part, factor)?;
    let sum = b.add_(sum, part)?;
    let square = b.mul(sum, sum)?;
    Ok(vec![next, sum, square])
}

#[test]
fn integers_and_what_no_step_changes() {
    let all = [indices(&[], &[2]), reals(&[2]), reals(&[3, 2]), reals(&[2])];
    let build = |b: &mut GraphBuilder, x: &[ValueId]| scan(b, x, form(2, 1), counted);
    check("counted", &all, &build);
    check_second("counted", &all, &build);
}

/// A scan over the rows of an element: its sum of squares.
fn nested(b: &mut GraphBuilder, a: &[ValueId]) -> Result<Vec<ValueId>> {
    let [h, x] = a[..] else { unreachable!() };
    let inner = scan(b, &[h, x], form(1, 1), |b, a| {
        let product = b.mul(a[1], a[0])?;
        let bent = b.map(ScalarOp::Sin, &[product])?;
        let sum = b.add_(bent, a[0])?;
        Ok(vec![sum, bent])
    })?;
    let total = b.reduce(ReduceKind::Sum, inner[1], &[0], false)?;
    Ok(vec![inner[0], total])
}

#[test]
fn scans_of_scans() {
    let all = [reals(&[2]), reals(&[3, 4, 2])];
    let build = |b: &mut GraphBuilder, x: &[ValueId]| scan(b, x, form(1, 1), nested);
    check("nested", &all, &build);
    check_second("nested", &all, &build);
}

#[test]
fn symbolic_extents_and_no_steps() {
    let build = |b: &mut GraphBuilder, x: &[ValueId]| scan(b, x, form(1, 1), recurrence);
    let [h, x, w] = recurrence_operands();
    check("symbolic length", &[h, x.batched(), w], &build);
    let [h, _, w] = recurrence_operands();
    let none = [h, reals(&[0, 2, 3]), w];
    check("no steps", &none, &build);
    check_second("no steps", &none, &build);
}

#[test]
fn compiled_scans_are_those_of_the_interpreter() {
    let cases: [(Vec<Operand>, Form, Body); 3] = [
        (recurrence_operands().to_vec(), form(1, 1), recurrence),
        (vec![reals(&[2]), reals(&[3, 4, 2])], form(1, 1), nested),
        (
            vec![indices(&[], &[2]), reals(&[2]), reals(&[3, 2]), reals(&[2])],
            form(2, 1),
            counted,
        ),
    ];
    for (operands, form, body) in cases {
        let build = |b: &mut GraphBuilder, x: &[ValueId]| scan(b, x, form, body);
        let (graph, loss, wrt) = graph_of(&operands, &build).unwrap();
        let d = grad(&graph, loss, &wrt, &GradOptions::default()).unwrap();
        let inputs: Vec<Tensor> = operands.iter().map(|o| o.value.clone()).collect();
        compare_compiled(&d, &inputs).unwrap();
    }
}

#[test]
fn bodies_without_a_gradient_are_errors() {
    let mut b = GraphBuilder::new("case");
    let x = b.input("x", DType::F64, [3, 2]);
    let h = b.input("h", DType::F64, [2]);
    let body: Body = |b, a| {
        let read = b.variable("v", Tensor::zeros(DType::F64, &[2])?)?;
        Ok(vec![b.add_(a[0], read)?, a[1]])
    };
    let y = scan(&mut b, &[h, x], form(1, 1), body).unwrap();
    let loss = b.reduce(ReduceKind::Sum, y[0], &[0], false).unwrap();
    let message = b.grad(loss, &[h]).unwrap_err().to_string();
    assert!(message.contains("reads or assigns variables"), "{message}");
}

#[test]
fn weights_of_a_recurrence_have_one_product_after_all_steps() {
    let mut b = GraphBuilder::new("g");
    let dims: [&[usize]; 3] = [&[2, 3], &[4, 2, 3], &[3, 3]];
    let x: Vec<ValueId> = (0..3)
        .map(|i| b.input(&format!("x{i}"), DType::F64, dims[i].iter().copied()))
        .collect();
    let results = scan(&mut b, &x, form(1, 1), recurrence).unwrap();
    let loss = b
        .reduce(ReduceKind::Sum, results[0], &[0, 1], false)
        .unwrap();
    let gradients = b.grad(loss, &x[2..]).unwrap();
    b.output("gradient", gradients[0]);
    let g = b.finish().unwrap();
    let products = |g: &Graph| g.nodes().filter(|(_, n)| n.op == Op::MatMul).count();
    let scans = g.nodes().filter(|(_, n)| matches!(n.op, Op::Scan { .. }));
    let inner: Vec<usize> = scans.map(|(_, n)| products(&n.regions[0])).collect();
    // Forward `h w`; backward the gradient of `h`.
    assert_eq!((products(&g), &inner[..]), (1, &[1, 1][..]));
}
