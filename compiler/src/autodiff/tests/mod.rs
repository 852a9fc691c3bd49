//! Gradients against central differences through the interpreter, in `f64`.

mod branches;
mod errors;
mod kinks;
mod loops;
mod map;
mod ops;
mod pytorch;
mod random;
mod second_order;
mod steps;
mod structure;
mod tiles;

use super::{GradOptions, grad};
use crate::error::Result;
use crate::interp::run;
use crate::ir::{Dim, Graph, GraphBuilder, Op, ReduceKind, ScalarOp, Type, ValueId};
use gristmill_runtime::{DType, Tensor};

/// Step of a difference for an element of magnitude 1 or less.
const STEP: f64 = 6e-6;
/// Largest error relative to the difference.
const TOLERANCE: f64 = 1e-6;
/// Derivatives below this are compared by their absolute error.
const SMALL: f64 = 0.02;

/// An input with its declared extents.
#[derive(Clone)]
pub(crate) struct Operand {
    dims: Vec<Dim>,
    pub(crate) value: Tensor,
}

impl Operand {
    fn of(value: Tensor) -> Operand {
        let dims = value.shape().iter().map(|&n| n.into()).collect();
        Operand { dims, value }
    }

    /// The operand with the first extent as a symbol.
    pub(crate) fn batched(mut self) -> Operand {
        self.dims[0] = "batch".into();
        self
    }

    /// The operand with its elements moved by 2, which makes those of [`reals`] positive.
    fn positive(self) -> Operand {
        let values: Vec<f64> = self.value.to_f64s().iter().map(|v| v + 2.0).collect();
        let value = Tensor::from_f64s(DType::F64, self.value.shape(), &values).unwrap();
        Operand { value, ..self }
    }

    fn is_float(&self) -> bool {
        self.value.dtype().is_float()
    }
}

/// Distinct numbers between -2 and 2 that follow no pattern.
pub(crate) fn reals(shape: &[usize]) -> Operand {
    let n: usize = shape.iter().product();
    let element = |i: usize| 1.9 * (2.3 * i as f64 + 0.4 * (shape.len() + n) as f64).sin();
    numbers(shape, &(0..n).map(element).collect::<Vec<_>>())
}

pub(crate) fn numbers(shape: &[usize], values: &[f64]) -> Operand {
    Operand::of(Tensor::from_f64s(DType::F64, shape, values).unwrap())
}

pub(crate) fn indices(shape: &[usize], values: &[i64]) -> Operand {
    Operand::of(Tensor::from_slice(values, shape).unwrap())
}

fn truths(shape: &[usize], values: &[f64]) -> Operand {
    Operand::of(Tensor::from_f64s(DType::Bool, shape, values).unwrap())
}

pub(crate) type Build<'a> = &'a dyn Fn(&mut GraphBuilder, &[ValueId]) -> Result<Vec<ValueId>>;

/// The sum of all floating-point elements, each times a weight of its own.
fn weighted(b: &mut GraphBuilder, values: &[ValueId]) -> Result<ValueId> {
    let mut loss = b.scalar(DType::F64, 0.0);
    for &v in values {
        let ty = b.ty(v).clone();
        if !ty.dtype.is_float() {
            continue;
        }
        let iota = Op::Iota {
            dtype: DType::F64,
            shape: vec![ty.shape.n_elements()],
            axis: 0,
        };
        let (rate, shift) = (b.scalar(DType::F64, 1.3), b.scalar(DType::F64, 0.7));
        let i = b.add1(iota, &[])?;
        let angle = b.mul(i, rate)?;
        let angle = b.add_(angle, shift)?;
        let weights = b.map(ScalarOp::Sin, &[angle])?;
        let weights = b.reshape(weights, ty.shape.iter())?;
        let product = b.mul(v, weights)?;
        let axes: Vec<usize> = (0..ty.rank()).collect();
        let sum = b.reduce(ReduceKind::Sum, product, &axes, false)?;
        loss = b.add_(loss, sum)?;
    }
    Ok(loss)
}

/// A graph of a loss over the results of `build`, with the loss and its inputs of floating-point type.
pub(crate) fn graph_of(
    operands: &[Operand],
    build: Build,
) -> Result<(Graph, ValueId, Vec<ValueId>)> {
    let mut b = GraphBuilder::new("case");
    let mut inputs = Vec::new();
    for (i, operand) in operands.iter().enumerate() {
        let dims = operand.dims.clone();
        inputs.push(b.input(&format!("x{i}"), operand.value.dtype(), dims));
    }
    let results = build(&mut b, &inputs)?;
    let loss = weighted(&mut b, &results)?;
    b.output("loss", loss);
    let floats = inputs.iter().zip(operands).filter(|(_, o)| o.is_float());
    let wrt = floats.map(|(&v, _)| v).collect();
    Ok((b.finish()?, loss, wrt))
}

/// Compares every derivative of a weighted sum of the results with a central difference.
pub(crate) fn check(name: &str, operands: &[Operand], build: Build) {
    check_with(name, operands, build, &GradOptions::default());
}

fn check_with(name: &str, operands: &[Operand], build: Build, options: &GradOptions) {
    let (graph, loss, wrt) = graph_of(operands, build).unwrap_or_else(|e| panic!("{name}: {e}"));
    let differentiated =
        grad(&graph, loss, &wrt, options).unwrap_or_else(|e| panic!("{name}: {e}"));
    let tensors: Vec<Tensor> = operands.iter().map(|o| o.value.clone()).collect();
    let results =
        run(&differentiated, &tensors).unwrap_or_else(|e| panic!("{name}: {e}\n{differentiated}"));
    let floats = (0..operands.len()).filter(|&i| operands[i].is_float());
    for (i, gradient) in floats.zip(&results[1..]) {
        assert_eq!(gradient.shape(), operands[i].value.shape(), "{name}");
        for (at, &found) in gradient.to_f64s().iter().enumerate() {
            let expected = difference(&graph, &tensors, i, at, 1.0);
            let limit = TOLERANCE * expected.abs().max(SMALL);
            assert!(
                (found - expected).abs() <= limit,
                "{name}: operand {i}, element {at}: found {found}, expected {expected}\n{differentiated}"
            );
        }
    }
}

/// Central difference of the loss by an element of an input, with a step of some times [`STEP`].
fn difference(graph: &Graph, inputs: &[Tensor], input: usize, at: usize, scale: f64) -> f64 {
    let x = inputs[input].as_slice::<f64>()[at];
    let h = scale * STEP * x.abs().max(1.0);
    let loss_at = |x: f64| {
        let mut moved = inputs.to_vec();
        moved[input].as_mut_slice::<f64>()[at] = x;
        run(graph, &moved).unwrap()[0].to_f64s()[0]
    };
    (loss_at(x + h) - loss_at(x - h)) / ((x + h) - (x - h))
}

/// Gradients of the plain sum of the elements of an op's result.
fn gradients_of(op: Op, operands: &[Operand]) -> Vec<Vec<f64>> {
    let mut b = GraphBuilder::new("sum");
    let mut inputs = Vec::new();
    for (i, operand) in operands.iter().enumerate() {
        let dims = operand.dims.clone();
        inputs.push(b.input(&format!("x{i}"), operand.value.dtype(), dims));
    }
    let y = b.add1(op, &inputs).unwrap();
    let axes: Vec<usize> = (0..b.ty(y).rank()).collect();
    let loss = b.reduce(ReduceKind::Sum, y, &axes, false).unwrap();
    let floats = inputs.iter().zip(operands).filter(|(_, o)| o.is_float());
    let wrt: Vec<ValueId> = floats.map(|(&v, _)| v).collect();
    for (i, gradient) in b.grad(loss, &wrt).unwrap().into_iter().enumerate() {
        b.output(&format!("g{i}"), gradient);
    }
    let tensors: Vec<Tensor> = operands.iter().map(|o| o.value.clone()).collect();
    let results = run(&b.finish().unwrap(), &tensors).unwrap();
    results.iter().map(Tensor::to_f64s).collect()
}

/// Compares the results of a compiled graph with those of the interpreter.
pub(crate) fn compare_compiled(graph: &Graph, inputs: &[Tensor]) -> Result<(), String> {
    let expected = run(graph, inputs).map_err(|e| e.to_string())?;
    let compiled = crate::compile(graph, &crate::Options::default()).map_err(|e| e.to_string())?;
    let names = graph.input_names.iter().map(String::as_str);
    let found = compiled.run(names.zip(inputs.iter().cloned()));
    let found = found.map_err(|e| e.to_string())?;
    for (output, expected) in graph.outputs.iter().zip(&expected) {
        let found = found[output.name.as_str()].to_f64s();
        for (found, expected) in found.into_iter().zip(expected.to_f64s()) {
            let is_near = (found - expected).abs() <= 1e-5 * expected.abs().max(0.1);
            if !is_near {
                return Err(format!("{}: {found}, expected {expected}", output.name));
            }
        }
    }
    Ok(())
}
