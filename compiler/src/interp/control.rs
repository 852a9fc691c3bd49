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
        let shape = concrete(&ty.shape, bindings)?;
        return Ok(Tensor::zeros(ty.dtype, &[&[0], shape.as_slice()].concat())?);
    };
    let one = [&[1], first.shape()].concat();
    let rows: Vec<Tensor> = rows
        .iter()
        .map(|r| r.reshaped(&one))
        .collect::<Result<_, _>>()?;
    let shape = [&[rows.len()], first.shape()].concat();
    view::concat(&rows.iter().collect::<Vec<_>>(), 0, &shape)
}

/// The truth value of a one-element `bool` tensor.
fn truth(t: &Tensor) -> bool {
    t.as_slice::<bool>()[0]
}

fn extent(dim: &Dim, bindings: &Bindings) -> Result<usize> {
    Ok(concrete(std::slice::from_ref(dim), bindings)?[0])
}

/// Errors when a loop with stacked results ends after another number of iterations than these have rows.
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
        let args: Vec<Tensor> = inputs[1..].iter().map(|&t| t.clone()).collect();
        self.run(&regions[usize::from(!truth(inputs[0]))], &args, bindings)
    }

    /// A loop that stacks results must run exactly as often as its `trip` says, because that is their extent.
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
        let carried = *carried;
        let limit = inputs[0].as_slice::<i64>()[0];
        let mut condition = inputs[1].clone();
        let mut values: Vec<Tensor> = inputs[2..2 + carried].iter().map(|&t| t.clone()).collect();
        let mut stacks: Vec<Vec<Tensor>> = vec![Vec::new(); body.outputs.len() - 1 - carried];
        let mut i = 0;
        while i < limit && truth(&condition) {
            let mut args = vec![Tensor::scalar(i), condition];
            args.append(&mut values);
            args.extend(inputs[2 + carried..].iter().map(|&t| t.clone()));
            let mut results = self.run(body, &args, bindings)?.into_iter();
            condition = results.next().expect("the type rule asks for a condition");
            values.extend(results.by_ref().take(carried));
            stacks.iter_mut().zip(results).for_each(|(s, r)| s.push(r));
            i += 1;
        }
        if !stacks.is_empty() {
            check_trip(i, extent(trip, bindings)?)?;
        }
        for (n, rows) in stacks.iter().enumerate() {
            values.push(stack(rows, body, 1 + carried + n, bindings)?);
        }
        Ok(values)
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
        let (carried, length) = (*carried, extent(length, bindings)?);
        let (init, rest) = inputs.split_at(carried);
        let (sequences, invariant) = rest.split_at(*scanned);
        let mut values: Vec<Tensor> = init.iter().map(|&t| t.clone()).collect();
        let mut stacks: Vec<Vec<Tensor>> = vec![Vec::new(); body.outputs.len() - carried];
        for step in 0..length {
            let i = if *reverse { length - 1 - step } else { step };
            let mut args = std::mem::take(&mut values);
            for s in sequences {
                args.push(row(s, i)?);
            }
            args.extend(invariant.iter().map(|&t| t.clone()));
            let mut results = self.run(body, &args, bindings)?.into_iter();
            values.extend(results.by_ref().take(carried));
            stacks.iter_mut().zip(results).for_each(|(s, r)| s.push(r));
        }
        for (n, mut rows) in stacks.into_iter().enumerate() {
            if *reverse {
                rows.reverse();
            }
            values.push(stack(&rows, body, carried + n, bindings)?);
        }
        Ok(values)
    }
}
