//! Data sets, what is done to their examples, and batches of them.

mod files;
mod images;
mod loader;
mod map;
mod random;
mod tokens;

pub use files::FileDataset;
pub use images::{ImageOp, Images};
pub(super) use loader::Loader;
pub use loader::Loading;
pub use map::{Example, Map};
pub use random::Random;
pub use tokens::{Tokens, Vocabulary};

use super::philox::permutation;
use crate::cost::Fnv;
use crate::error::{Error, Result};
use gristmill_runtime::Tensor;
use std::sync::Arc;

/// Examples of a step or an evaluation: tensors by the names of inputs, with one row per example.
pub type Batch = Vec<(String, Tensor)>;

/// A pass over the examples: with the place of an example, it decides all random numbers of its augmentation. So neither threads nor
/// interruptions change them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Epoch {
    /// The seed of the training.
    pub seed: u64,
    /// The number of the epoch, from 0.
    pub number: u64,
}

/// Examples by their places, from 0. [`Trainer::fit`](super::Trainer::fit) asks for those of a whole step, whatever devices compute it.
pub trait Dataset: Sync {
    /// Number of examples.
    fn len(&self) -> usize;

    /// The examples at these places, in this order, as an epoch has them: tensors whose first axes are examples. Data sets without
    /// randomness have the same in each epoch; those on top of another one hand the epoch on.
    ///
    /// Errors with `InvalidInput` when a place is out of range or an example cannot be read.
    fn rows(&self, places: &[usize], epoch: Epoch) -> Result<Batch>;

    /// Number of data sets with random numbers of their own below this one, itself included. One on top of another adds to the number of the other.
    fn n_random(&self) -> u32 {
        0
    }

    /// True without examples.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The examples as a function changes them: [`Map`].
    fn map<F>(self, f: F) -> Map<Self, F>
    where
        Self: Sized,
        F: Fn(Example, &mut Random) -> Result<Example> + Sync,
    {
        Map::new(self, f)
    }

    /// The examples with images as operations change them: [`Images`].
    fn images(self, name: &str, ops: impl IntoIterator<Item = ImageOp>) -> Images<Self>
    where
        Self: Sized,
    {
        Images::new(self, name, ops)
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

    fn rows(&self, places: &[usize], _: Epoch) -> Result<Batch> {
        check_places(places, self.n)?;
        let tensors = self.tensors.iter();
        let picked = tensors.map(|(name, t)| Ok((name.clone(), rows(t, places)?)));
        picked.collect()
    }
}

impl<D: Dataset + Send> Dataset for Arc<D> {
    fn len(&self) -> usize {
        (**self).len()
    }

    fn rows(&self, places: &[usize], epoch: Epoch) -> Result<Batch> {
        (**self).rows(places, epoch)
    }

    fn n_random(&self) -> u32 {
        (**self).n_random()
    }
}

impl<D: Dataset + ?Sized> Dataset for Box<D> {
    fn len(&self) -> usize {
        (**self).len()
    }

    fn rows(&self, places: &[usize], epoch: Epoch) -> Result<Batch> {
        (**self).rows(places, epoch)
    }

    fn n_random(&self) -> u32 {
        (**self).n_random()
    }
}

/// Errors when a place is not below `n`.
fn check_places(places: &[usize], n: usize) -> Result<()> {
    match places.iter().find(|&&place| place >= n) {
        None => Ok(()),
        Some(place) => Err(Error::invalid(format!(
            "example {place} of a data set of {n}"
        ))),
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
    epoch: Epoch,
    size: usize,
    next: usize,
}

impl<'d> Batches<'d> {
    /// [`Dataset::batches`] of any data set.
    pub fn in_order(data: &'d dyn Dataset, size: usize) -> Batches<'d> {
        Batches::new(data, (0..data.len()).collect(), Epoch::default(), size)
    }

    /// [`Dataset::shuffled`] of any data set.
    pub fn shuffled(data: &'d dyn Dataset, size: usize, seed: u64, epoch: u64) -> Batches<'d> {
        let order = permutation(data.len(), seed, epoch);
        let number = epoch;
        Batches::new(data, order, Epoch { seed, number }, size)
    }

    fn new(data: &'d dyn Dataset, order: Vec<usize>, epoch: Epoch, size: usize) -> Batches<'d> {
        Batches {
            data,
            order,
            epoch,
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

impl Batches<'_> {
    /// The places of the next batch.
    fn next_places(&mut self) -> Option<Vec<usize>> {
        let end = self.next.saturating_add(self.size).min(self.order.len());
        let places = self.order.get(self.next..end)?.to_vec();
        self.next = end;
        Some(places).filter(|places| !places.is_empty())
    }
}

impl Iterator for Batches<'_> {
    type Item = Result<Batch>;

    fn next(&mut self) -> Option<Self::Item> {
        let places = self.next_places()?;
        Some(load(self.data, &places, self.epoch))
    }
}

/// The rows of a batch. Errors when a data set gives another number of them, or none.
fn load(data: &dyn Dataset, places: &[usize], epoch: Epoch) -> Result<Batch> {
    let batch = data.rows(places, epoch)?;
    let n = places.len();
    if batch.is_empty() {
        return Err(Error::invalid(format!(
            "the data set gave no tensor for {n} examples"
        )));
    }
    match batch.iter().find(|(_, t)| t.shape().first() != Some(&n)) {
        None => Ok(batch),
        Some((name, t)) => {
            let shape = t.shape();
            Err(Error::invalid(format!(
                "the data set gave {name:?} of shape {shape:?} for {n} examples"
            )))
        }
    }
}

/// Rows of a tensor.
pub(super) fn rows(t: &Tensor, places: &[usize]) -> Result<Tensor> {
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
