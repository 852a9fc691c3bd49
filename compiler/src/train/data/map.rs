//! Examples as a function changes them.

use super::{Batch, Dataset, Epoch, Random};
use crate::error::{Error, Result};
use gristmill_runtime::Tensor;

/// An example: tensors by the names of inputs, without the axis of examples.
pub type Example = Vec<(String, Tensor)>;

/// The examples of a data set as a function changes them, one by one: [`Dataset::map`].
///
/// The function may run in several threads at once ([`Loading`](super::Loading)). Its random numbers depend on the seed, the epoch and the place of
/// the example alone. All examples of a batch have tensors of the same names, dtypes and shapes.
#[derive(Clone, Debug)]
pub struct Map<D, F> {
    data: D,
    f: F,
}

impl<D, F> Map<D, F> {
    pub(super) fn new(data: D, f: F) -> Map<D, F> {
        Map { data, f }
    }
}

impl<D, F> Dataset for Map<D, F>
where
    D: Dataset,
    F: Fn(Example, &mut Random) -> Result<Example> + Sync,
{
    fn len(&self) -> usize {
        self.data.len()
    }

    fn rows(&self, places: &[usize], epoch: Epoch) -> Result<Batch> {
        let batch = self.data.rows(places, epoch)?;
        let random = Random::new(epoch, self.n_random(), 0);
        let mut stacked = Stack::new(places.len());
        for (i, &place) in places.iter().enumerate() {
            let example = batch.iter().map(|(name, t)| Ok((name.clone(), row(t, i)?)));
            let example = example.collect::<Result<Example>>()?;
            let changed = (self.f)(example, &mut random.at(place));
            let added = changed.and_then(|example| stacked.add(i, example));
            added.map_err(|e| e.context(format!("example {place}")))?;
        }
        Ok(stacked.batch)
    }

    fn n_random(&self) -> u32 {
        self.data.n_random() + 1
    }
}

/// A row of a tensor, without the first axis.
fn row(t: &Tensor, i: usize) -> Result<Tensor> {
    let shape = &t.shape()[1..];
    let n = t.size_bytes() / t.shape()[0].max(1);
    Ok(Tensor::from_bytes(
        t.dtype(),
        shape,
        &t.as_bytes()[i * n..][..n],
    )?)
}

/// A batch in the making.
struct Stack {
    n: usize,
    batch: Batch,
}

impl Stack {
    fn new(n: usize) -> Stack {
        let batch = Batch::new();
        Stack { n, batch }
    }

    /// Adds example `i`. Errors when it has other tensors than the first.
    fn add(&mut self, i: usize, example: Example) -> Result<()> {
        if i == 0 {
            for (name, t) in &example {
                let shape = [&[self.n], t.shape()].concat();
                self.batch
                    .push((name.clone(), Tensor::zeros(t.dtype(), &shape)?));
            }
        }
        let names = example.iter().map(|(name, _)| name);
        if !names.eq(self.batch.iter().map(|(name, _)| name)) {
            return Err(Error::invalid(
                "its tensors have other names than those of the batch's first example",
            ));
        }
        for ((name, t), (_, all)) in example.iter().zip(&mut self.batch) {
            let (dtype, shape) = (all.dtype(), &all.shape()[1..]);
            if (t.dtype(), t.shape()) != (dtype, shape) {
                return Err(Error::invalid(format!(
                    "{name:?} is {}{:?}, and {dtype}{shape:?} in the batch's first example",
                    t.dtype(),
                    t.shape()
                )));
            }
            let n = t.size_bytes();
            all.as_bytes_mut()[i * n..][..n].copy_from_slice(t.as_bytes());
        }
        Ok(())
    }
}
