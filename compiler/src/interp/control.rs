//! Regions: if, loop, scan.

use super::{Machine, mismatch};
use crate::error::{Error, Result};
use crate::ir::eval::{concrete, view};
use crate::ir::{Bindings, Dim, Graph, Op};
use gristmill_runtime::Tensor;

/// One element along axis 0, without the axis.
fn row(t: &Tensor, i: usize) -> Result<Tensor> {
    let size = t.size_bytes() / t.shape()[0];
    Ok(Tensor::from_bytes(
        t.dtype(),
        &t.shape()[1..],
        &t.as_bytes()[i * size..(i + 1) * size],
    )?)
}

/// Rows joined along a new axis 0; without a row, of the type that the region declares.
fn stack(rows: &[Tensor], region: &Graph, output: usize, bindings: &Bindings) -> Result<Tensor> {
    let Some(first) = rows.first() else {
        let ty = region.ty(region.outputs[output].value);
        // No iteration has shown extents that are known inside of the region only.
        let shape: Vec<usize> = ty
            .shape
            .bind(bindings)
            .iter()
            .map(|d| d.as_usize().unwrap_or(0))
            .collect();
        return Ok(Tensor::zeros(ty.dtype, &[&[0], shape.as_slice()].concat())?);
    };
    if let Some(other) = rows.iter().find(|r| r.shape() != first.shape()) {
        let (a, b) = (first.shape(), other.shape());
        return Err(Error::invalid(format!(
            "results of shapes {a:?} and {b:?} cannot be stacked"
        )));
    }
    let one = [&[1], first.shape()].concat();
    let rows: Vec<Tensor> = rows
        .iter()
        .map(|r| r.reshaped(&one))
        .collect::<Result<_, _>>()?;
    let shape = [&[rows.len()], first.shape()].concat();
    view::concat(&rows.iter().collect::<Vec<_>>(), 0, &shape)
}

/// Values that a loop carries, and rows that it stacks.
struct State {
    values: Vec<Tensor>,
    stacks: Vec<Vec<Tensor>>,
}

impl State {
    fn new(initial: &[&Tensor], n_stacks: usize) -> State {
        State {
            values: owned(initial).collect(),
            stacks: vec![Vec::new(); n_stacks],
        }
    }

    /// Takes the results of an iteration: `carried` values, then one row for each stack.
    fn take(&mut self, carried: usize, mut results: impl Iterator<Item = Tensor>) {
        self.values.extend(results.by_ref().take(carried));
        for (rows, row) in self.stacks.iter_mut().zip(results) {
            rows.push(row);
        }
    }

    /// The carried values, then the stacks; the body has `before` outputs before them.
    fn results(mut self, body: &Graph, before: usize, bindings: &Bindings) -> Result<Vec<Tensor>> {
        let first = before + self.values.len();
        for (n, rows) in self.stacks.iter().enumerate() {
            self.values.push(stack(rows, body, first + n, bindings)?);
        }
        Ok(self.values)
    }
}

fn owned<'a>(tensors: &'a [&Tensor]) -> impl Iterator<Item = Tensor> + 'a {
    tensors.iter().map(|&t| t.clone())
}

/// The truth value of a one-element `bool` tensor.
fn truth(t: &Tensor) -> bool {
    t.as_slice::<bool>()[0]
}

fn extent(dim: &Dim, bindings: &Bindings) -> Result<usize> {
    Ok(concrete(std::slice::from_ref(dim), bindings)?[0])
}

/// Errors when a loop with stacked results ends after another number of iterations than these have
/// rows.
fn check_trip(iterations: i64, rows: usize) -> Result<()> {
    if iterations == rows as i64 {
        return Ok(());
    }
    Err(Error::unsupported(format!(
        "loop ended after {iterations} iterations, but its stacked results have {rows} rows"
    )))
}

impl Machine<'_> {
    pub(super) fn branch(
        &mut self,
        inputs: &[&Tensor],
        regions: &[Graph],
        bindings: &Bindings,
    ) -> Result<Vec<Tensor>> {
        let args: Vec<Tensor> = owned(&inputs[1..]).collect();
        self.run(&regions[usize::from(!truth(inputs[0]))], &args, bindings)
    }

    /// A loop that stacks results must run exactly as often as its `trip` says, because that is
    /// their extent.
    pub(super) fn repeat(
        &mut self,
        op: &Op,
        inputs: &[&Tensor],
        body: &Graph,
        bindings: &Bindings,
    ) -> Result<Vec<Tensor>> {
        let Op::Loop { carried, trip } = op else {
            return Err(mismatch(op));
        };
        let limit = inputs[0].as_slice::<i64>()[0];
        let mut condition = inputs[1].clone();
        let (initial, invariant) = inputs[2..].split_at(*carried);
        let mut state = State::new(initial, body.outputs.len() - 1 - carried);
        let mut i = 0;
        while i < limit && truth(&condition) {
            let mut args = vec![Tensor::scalar(i), condition];
            args.append(&mut state.values);
            args.extend(owned(invariant));
            let mut results = self.run(body, &args, bindings)?.into_iter();
            condition = results.next().expect("the type rule asks for a condition");
            state.take(*carried, results);
            i += 1;
        }
        if let Some(rows) = trip.as_usize().filter(|_| !state.stacks.is_empty()) {
            check_trip(i, rows)?;
        }
        state.results(body, 1, bindings)
    }

    pub(super) fn scan(
        &mut self,
        op: &Op,
        inputs: &[&Tensor],
        body: &Graph,
        bindings: &Bindings,
    ) -> Result<Vec<Tensor>> {
        let Op::Scan {
            carried,
            scanned,
            length,
            reverse,
        } = op
        else {
            return Err(mismatch(op));
        };
        let length = extent(length, bindings)?;
        let (initial, rest) = inputs.split_at(*carried);
        let (sequences, invariant) = rest.split_at(*scanned);
        let mut state = State::new(initial, body.outputs.len() - carried);
        for step in 0..length {
            let i = if *reverse { length - 1 - step } else { step };
            let mut args = std::mem::take(&mut state.values);
            for s in sequences {
                args.push(row(s, i)?);
            }
            args.extend(owned(invariant));
            let results = self.run(body, &args, bindings)?;
            state.take(*carried, results.into_iter());
        }
        if *reverse {
            state.stacks.iter_mut().for_each(|rows| rows.reverse());
        }
        state.results(body, 0, bindings)
    }
}
