//! Gradients against those of PyTorch, which `tests/python/gradients.py` wrote into a table.
//!
//! The table has numbers alone; the graphs of its cases are here, by name.

mod graphs;
mod nets;

use super::*;
use std::collections::{BTreeMap, BTreeSet};

/// Largest error relative to an element.
const NEAR: f64 = 1e-10;
/// The same for ops whose constants (1/6, 1/alpha) PyTorch keeps as `f32` in a computation with `f64`.
const NEAR_SINGLE: f64 = 4e-8;
/// Elements below this part of the largest of their tensor are compared by their absolute error.
const SMALL_PART: f64 = 1e-3;

type Table = BTreeMap<String, Tensor>;

type BuildOne = dyn Fn(&mut GraphBuilder, &[ValueId]) -> Result<ValueId>;

/// The graph of a case of the table.
struct Case {
    name: &'static str,
    build: Box<BuildOne>,
}

fn case(
    name: &'static str,
    build: impl Fn(&mut GraphBuilder, &[ValueId]) -> Result<ValueId> + 'static,
) -> Case {
    let build = Box::new(build);
    Case { name, build }
}

/// A case of one op, of which the first result counts.
fn single(name: &'static str, op: Op) -> Case {
    case(name, move |b, x| Ok(b.add(op.clone(), x)?[0]))
}

fn cases() -> Vec<Case> {
    let mut all = graphs::cases();
    all.extend(nets::cases());
    all
}

fn table() -> Table {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../tests/data/gradients/table.npz"
    );
    crate::read_npz(path).unwrap().into_iter().collect()
}

/// The operands of a case.
fn operands_of(table: &Table, case: &str) -> Vec<Tensor> {
    let operand = |i| table.get(&format!("{case}.x{i}")).cloned();
    (0..).map_while(operand).collect()
}

/// The gradient by operand `i`, which operands that are constants have not.
fn gradient_of(table: &Table, case: &str, i: usize) -> Option<Tensor> {
    table.get(&format!("{case}.d{i}")).cloned()
}

impl Case {
    fn tolerance(&self) -> f64 {
        match self.name {
            "hard_sigmoid" | "celu" => NEAR_SINGLE,
            _ => NEAR,
        }
    }

    /// The graph with the gradients by some of its operands as its outputs.
    fn graph(&self, operands: &[Tensor], g: &Tensor, wrt: &[usize]) -> Result<Graph> {
        let mut b = GraphBuilder::new(self.name);
        let mut inputs = Vec::new();
        for (i, x) in operands.iter().enumerate() {
            inputs.push(b.input(&format!("x{i}"), x.dtype(), x.shape().to_vec()));
        }
        let g = b.input("g", g.dtype(), g.shape().to_vec());
        let y = (self.build)(&mut b, &inputs)?;
        assert_eq!(b.ty(y), b.ty(g), "result of {}", self.name);
        let loss = product_sum(&mut b, y, g)?;
        let options = GradOptions {
            allow_unused: true,
            ..GradOptions::default()
        };
        let wrt: Vec<ValueId> = wrt.iter().map(|&i| inputs[i]).collect();
        for (i, gradient) in b.grad_with(loss, &wrt, &options)?.into_iter().enumerate() {
            b.output(&format!("d{i}"), gradient);
        }
        b.finish()
    }

    /// The gradients of the graph by some of its operands.
    fn gradients(&self, table: &Table, wrt: &[usize]) -> Result<Vec<Tensor>> {
        let mut inputs = operands_of(table, self.name);
        let g = &table[&format!("{}.g", self.name)];
        let graph = self.graph(&inputs, g, wrt)?;
        inputs.push(g.clone());
        run(&graph, &inputs)
    }

    /// Differences between the gradients of the graph and those of the table.
    fn differences(&self, table: &Table) -> Vec<String> {
        let n = operands_of(table, self.name).len();
        let of = |i: usize| Some((i, gradient_of(table, self.name, i)?));
        let (wrt, expected): (Vec<usize>, Vec<Tensor>) = (0..n).filter_map(of).unzip();
        let found = match self.gradients(table, &wrt) {
            Ok(found) => found,
            Err(e) => return vec![format!("{}: {e}", self.name)],
        };
        let mut all = Vec::new();
        for (i, (found, expected)) in wrt.into_iter().zip(found.iter().zip(&expected)) {
            assert_eq!(found.shape(), expected.shape(), "{} {i}", self.name);
            let difference = different(found, expected, self.tolerance());
            all.extend(difference.map(|d| format!("{} by operand {i}: {d}", self.name)));
        }
        all
    }
}

/// The sum of all elements of a product.
fn product_sum(b: &mut GraphBuilder, x: ValueId, y: ValueId) -> Result<ValueId> {
    let product = b.mul(x, y)?;
    let axes: Vec<usize> = (0..b.ty(x).rank()).collect();
    b.reduce(ReduceKind::Sum, product, &axes, false)
}

/// The first element that is too far from the expected one, if any. Infinities have to be equal.
fn different(found: &Tensor, expected: &Tensor, tolerance: f64) -> Option<String> {
    let (found, expected) = (found.to_f64s(), expected.to_f64s());
    let finite = expected.iter().map(|x| x.abs()).filter(|x| x.is_finite());
    let least = SMALL_PART * finite.fold(0.0, f64::max);
    let mut pairs = found.iter().zip(&expected).enumerate();
    let (at, (found, expected)) = pairs.find(|(_, (found, expected))| {
        let limit = tolerance * expected.abs().max(least);
        let is_near = (*found - *expected).abs() <= limit && limit.is_finite();
        !is_near && found != expected
    })?;
    Some(format!("element {at} is {found}, expected {expected}"))
}

#[test]
fn every_gradient_is_that_of_pytorch() {
    let table = table();
    let cases = cases();
    let wrong: Vec<String> = cases.iter().flat_map(|c| c.differences(&table)).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn each_case_has_one_graph() {
    let table = table();
    let listed = table.keys().filter_map(|name| name.strip_suffix(".g"));
    let listed: BTreeSet<&str> = listed.collect();
    let cases = cases();
    let drawn: BTreeSet<&str> = cases.iter().map(|c| c.name).collect();
    assert_eq!(listed, drawn);
    assert_eq!(cases.len(), drawn.len(), "a case has two graphs");
}
