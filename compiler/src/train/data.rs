//! Data sets, and batches of them.

use super::philox::permutation;
use crate::cost::Fnv;
use crate::error::{Error, Result};
use gristmill_runtime::Tensor;

/// Examples of a step or an evaluation: tensors by the names of inputs, with one row per example.
pub type Batch = Vec<(String, Tensor)>;

/// Examples by their places, from 0. [`Trainer::fit`](super::Trainer::fit) asks for those of a whole step, whatever devices compute it.
pub trait Dataset: Sync {
    /// Number of examples.
    fn len(&self) -> usize;

    /// The examples at these places, in this order: tensors whose first axes are examples.
    ///
    /// Errors with `InvalidInput` when a place is out of range or an example cannot be read.
    fn rows(&self, places: &[usize]) -> Result<Batch>;

    /// True without examples.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Batches of `size` examples in their own order; the last may be smaller.
    fn batches(&self, size: usize) -> Batches<'_>
    where
        Self: Sized,
    {
        Batches::in_order(self, size)
    }

    /// The same in an order by seed and epoch.
    fn shuffled(&self, size: usize, seed: u64, epoch: u64) -> Batches<'_>
    where
        Self: Sized,
    {
        Batches::shuffled(self, size, seed, epoch)
    }
}

/// A data set in memory.
#[derive(Clone, Debug)]
pub struct TensorDataset {
    tensors: Batch,
    n: usize,
}

impl TensorDataset {
    /// Tensors by name, whose first axes are examples. Errors with `InvalidInput` when there is none, one is a scalar, or first axes differ.
    pub fn new<N: Into<String>>(
        tensors: impl IntoIterator<Item = (N, Tensor)>,
    ) -> Result<TensorDataset> {
        let tensors: Batch = tensors.into_iter().map(|(n, t)| (n.into(), t)).collect();
        let Some((first, n)) = tensors
            .first()
            .map(|(name, t)| (name, t.shape().first().copied()))
        else {
            return Err(Error::invalid("a data set without tensors"));
        };
        for (name, t) in &tensors {
            let own = t.shape().first().copied();
            if own.is_none() || own != n {
                return Err(Error::invalid(format!(
                    "data {name:?} has shape {:?}, expected as many examples as {first:?}",
                    t.shape()
                )));
            }
        }
        Ok(TensorDataset {
            n: n.unwrap_or_default(),
            tensors,
        })
    }

    /// A hash of names, dtypes, shapes and elements, which tells data sets apart.
    pub fn digest(&self) -> u64 {
        let mut hash = Fnv::default();
        for (name, t) in &self.tensors {
            let head = format!("{name:?} {} {:?}", t.dtype(), t.shape());
            hash = hash.with(head.as_bytes()).with_words(t.as_bytes());
        }
        hash.value()
    }
}

impl Dataset for TensorDataset {
    fn len(&self) -> usize {
        self.n
    }

    fn rows(&self, places: &[usize]) -> Result<Batch> {
        if let Some(place) = places.iter().find(|&&place| place >= self.n) {
            let message = format!("example {place} of a data set of {}", self.n);
            return Err(Error::invalid(message));
        }
        let tensors = self.tensors.iter();
        let picked = tensors.map(|(name, t)| Ok((name.clone(), rows(t, places)?)));
        picked.collect()
    }
}

/// Number of examples of a batch.
pub(super) fn n_examples(batch: &[(String, Tensor)]) -> usize {
    let first = batch.first();
    first.map_or(0, |(_, t)| t.shape().first().copied().unwrap_or(0))
}

/// Batches of a data set.
pub struct Batches<'d> {
    data: &'d dyn Dataset,
    order: Vec<usize>,
    size: usize,
    next: usize,
}

impl<'d> Batches<'d> {
    /// [`Dataset::batches`] of any data set.
    pub fn in_order(data: &'d dyn Dataset, size: usize) -> Batches<'d> {
        Batches::new(data, (0..data.len()).collect(), size)
    }

    /// [`Dataset::shuffled`] of any data set.
    pub fn shuffled(data: &'d dyn Dataset, size: usize, seed: u64, epoch: u64) -> Batches<'d> {
        Batches::new(data, permutation(data.len(), seed, epoch), size)
    }

    fn new(data: &'d dyn Dataset, order: Vec<usize>, size: usize) -> Batches<'d> {
        Batches {
            data,
            order,
            size: size.max(1),
            next: 0,
        }
    }

    /// Number of remaining batches.
    pub fn n_left(&self) -> usize {
        self.order
            .len()
            .saturating_sub(self.next)
            .div_ceil(self.size)
    }

    /// Passes over the next `n` batches.
    pub fn skip_batches(&mut self, n: usize) {
        self.next = self.next.saturating_add(n.saturating_mul(self.size));
    }
}

impl Iterator for Batches<'_> {
    type Item = Result<Batch>;

    fn next(&mut self) -> Option<Self::Item> {
        let end = self.next.saturating_add(self.size).min(self.order.len());
        let places = self
            .order
            .get(self.next..end)
            .filter(|places| !places.is_empty())?;
        let batch = self.data.rows(places);
        self.next = end;
        Some(batch)
    }
}

/// Rows of a tensor.
fn rows(t: &Tensor, places: &[usize]) -> Result<Tensor> {
    let mut shape = t.shape().to_vec();
    let row_bytes = t.size_bytes().checked_div(shape[0]).unwrap_or(0);
    shape[0] = places.len();
    let mut picked = Tensor::zeros(t.dtype(), &shape)?;
    let (from, to) = (t.as_bytes(), picked.as_bytes_mut());
    for (i, place) in places.iter().enumerate() {
        let row = &from[place * row_bytes..][..row_bytes];
        to[i * row_bytes..][..row_bytes].copy_from_slice(row);
    }
    Ok(picked)
}
