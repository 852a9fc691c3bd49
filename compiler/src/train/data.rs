//! Examples in memory, and batches of them.

use super::philox::permutation;
use crate::cost::Fnv;
use crate::error::{Error, Result};
use gristmill_runtime::Tensor;

/// Tensors whose first axes are examples.
#[derive(Clone, Debug)]
pub struct Dataset {
    tensors: Vec<(String, Tensor)>,
    n: usize,
}

impl Dataset {
    /// Tensors by name. Errors with `InvalidInput` when there is none, one is a scalar, or first axes differ.
    pub fn new<N: Into<String>>(tensors: impl IntoIterator<Item = (N, Tensor)>) -> Result<Dataset> {
        let tensors: Vec<(String, Tensor)> =
            tensors.into_iter().map(|(n, t)| (n.into(), t)).collect();
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
        Ok(Dataset {
            n: n.unwrap_or_default(),
            tensors,
        })
    }

    /// Number of examples.
    pub fn len(&self) -> usize {
        self.n
    }

    /// True without examples.
    pub fn is_empty(&self) -> bool {
        self.n == 0
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

    /// The examples at these places, in this order. Errors with `InvalidInput` when one is out of range.
    pub fn rows(&self, places: &[usize]) -> Result<Vec<(String, Tensor)>> {
        if let Some(place) = places.iter().find(|&&place| place >= self.n) {
            let message = format!("example {place} of a data set of {}", self.n);
            return Err(Error::invalid(message));
        }
        let picked = self
            .tensors
            .iter()
            .map(|(name, t)| Ok((name.clone(), rows(t, places)?)));
        picked.collect()
    }

    /// Batches of `size` examples in their own order; the last may be smaller.
    pub fn batches(&self, size: usize) -> Batches<'_> {
        self.in_order((0..self.n).collect(), size)
    }

    /// The same in an order by seed and epoch.
    pub fn shuffled(&self, size: usize, seed: u64, epoch: u64) -> Batches<'_> {
        self.in_order(permutation(self.n, seed, epoch), size)
    }

    fn in_order(&self, order: Vec<usize>, size: usize) -> Batches<'_> {
        Batches {
            data: self,
            order,
            size: size.max(1),
            next: 0,
        }
    }
}

/// Batches of a data set.
pub struct Batches<'d> {
    data: &'d Dataset,
    order: Vec<usize>,
    size: usize,
    next: usize,
}

impl Batches<'_> {
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
    type Item = Result<Vec<(String, Tensor)>>;

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
