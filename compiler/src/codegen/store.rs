//! The constants that programs keep: packed weights, tables, and weights as they are. The programs
//! of one session have one store, so that a weight is read, folded and packed
//! once, and is in memory once in each layout.

use crate::error::Error;
use crate::ir::ConstData;
use crate::ir::constant::Recipe;
use gristmill_runtime::Tensor;
use gristmill_runtime::image::Spool;
use gristmill_runtime::tensor::WeakTensor;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Constants in the layouts that kernels read. It holds none itself: a tensor is there as long as a
/// program has it.
#[derive(Default)]
pub struct ConstantStore(Mutex<Entries>);

#[derive(Default)]
struct Entries {
    /// File for the bytes of tensors, which are in memory where there is none.
    spool: Option<Spool>,
    by_source: HashMap<Key, WeakTensor>,
    /// The same by layout. What folding computes at once is another constant in each program, with
    /// the same elements.
    by_layout: HashMap<String, Vec<WeakTensor>>,
}

/// Layout of elements in row-major order.
pub(super) const PLAIN: &str = "plain";

/// A constant and the layout that it is made for.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) struct Key {
    constant: Recipe,
    layout: String,
}

impl Key {
    pub(super) fn new(constant: &ConstData, layout: String) -> Key {
        Key {
            constant: constant.recipe(),
            layout,
        }
    }
}

impl ConstantStore {
    /// A store that has the bytes of tensors in a file from the time that they are made.
    pub fn spooled(spool: Spool) -> ConstantStore {
        ConstantStore(Mutex::new(Entries {
            spool: Some(spool),
            ..Entries::default()
        }))
    }

    /// True if tensors are in a file.
    pub(super) fn is_spooled(&self) -> bool {
        self.lock().spool.is_some()
    }

    fn lock(&self) -> MutexGuard<'_, Entries> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The constant as `make` lays it out, or as it was laid out before under the same description,
    /// which therefore has all that decides the result beside the constant.
    ///
    /// Errors with those of `make`, when a file cannot be read, and when that of a spool cannot be
    /// written.
    pub fn laid_out<E: From<Error>>(
        &self,
        constant: &ConstData,
        layout: String,
        make: impl FnOnce(&Tensor) -> Result<Tensor, E>,
    ) -> Result<Tensor, E> {
        let key = Key::new(constant, layout);
        if let Some(found) = self.find(&key) {
            return Ok(found);
        }
        let made = make(&constant.tensor()?)?;
        Ok(self.keep(key, made)?)
    }

    /// The constant in a layout, if a program has it.
    pub(super) fn find(&self, key: &Key) -> Option<Tensor> {
        let entries = self.lock();
        entries.by_source.get(key).and_then(WeakTensor::upgrade)
    }

    /// Keeps a tensor, or gives the equal one of a program.
    ///
    /// Errors when the file of a spool cannot be written.
    pub(super) fn keep(&self, key: Key, made: Tensor) -> Result<Tensor, Error> {
        self.lock().keep(key, made)
    }

    /// The constant's elements in row-major order.
    ///
    /// Errors when a file cannot be read, and when that of a spool cannot be written.
    pub fn plain(&self, constant: &ConstData) -> Result<Tensor, Error> {
        self.laid_out(constant, PLAIN.to_owned(), |t| Ok(t.clone()))
    }

    /// Number of tensors, and their bytes, that some program has.
    pub fn size(&self) -> (usize, usize) {
        let entries = self.lock();
        let mut seen = std::collections::BTreeMap::new();
        for tensor in entries.by_source.values().filter_map(WeakTensor::upgrade) {
            seen.insert(tensor.as_ptr() as usize, tensor.size_bytes());
        }
        (seen.len(), seen.values().sum())
    }
}

impl Entries {
    /// Keeps a tensor, or gives the equal one that is there.
    fn keep(&mut self, key: Key, made: Tensor) -> Result<Tensor, Error> {
        let there = self.by_source.get(&key).and_then(WeakTensor::upgrade);
        if let Some(there) = there {
            return Ok(there);
        }
        let tensor = self.shared(&key.layout, made)?;
        self.forget_dropped();
        self.by_source.insert(key, tensor.downgrade());
        Ok(tensor)
    }

    /// A tensor of the same layout with the same elements, if there is one.
    fn shared(&mut self, layout: &str, made: Tensor) -> Result<Tensor, Error> {
        let alike = self.by_layout.entry(layout.to_owned()).or_default();
        let mut there = alike.iter().filter_map(WeakTensor::upgrade);
        if let Some(same) = there.find(|t| is_same(t, &made)) {
            return Ok(same);
        }
        let kept = match &self.spool {
            Some(spool) => spool.keep(&made)?,
            None => made,
        };
        alike.push(kept.downgrade());
        Ok(kept)
    }

    /// Drops what stands for tensors that no program has any more, once these are half of all.
    fn forget_dropped(&mut self) {
        if self.by_source.len() < self.by_source.capacity() {
            return;
        }
        let is_there = |t: &WeakTensor| t.upgrade().is_some();
        self.by_source.retain(|_, t| is_there(t));
        self.by_layout.retain(|_, tensors| {
            tensors.retain(is_there);
            !tensors.is_empty()
        });
    }
}

/// True for tensors of one type with the same bits.
fn is_same(a: &Tensor, b: &Tensor) -> bool {
    let same_type = a.dtype() == b.dtype() && a.shape() == b.shape();
    same_type && (a.as_ptr() == b.as_ptr() || a.as_bytes() == b.as_bytes())
}

impl fmt::Debug for ConstantStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (n, bytes) = self.size();
        write!(f, "{n} constants of {bytes} bytes")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::Op;
    use gristmill_runtime::DType;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn numbers(n: usize, first: f32) -> Tensor {
        let values: Vec<f32> = (0..n).map(|i| first + i as f32).collect();
        Tensor::from_slice(&values, &[n]).unwrap()
    }

    /// Elements doubled; counts how often that was done.
    fn doubled(store: &ConstantStore, c: &ConstData, layout: &str, made: &AtomicUsize) -> Tensor {
        let double = |t: &Tensor| {
            made.fetch_add(1, Ordering::Relaxed);
            let values: Vec<f32> = t.as_slice::<f32>().iter().map(|x| 2.0 * x).collect();
            Ok::<_, Error>(Tensor::from_slice(&values, t.shape())?)
        };
        store.laid_out(c, layout.into(), double).unwrap()
    }

    #[test]
    fn a_constant_is_laid_out_once() {
        let (store, made) = (ConstantStore::default(), AtomicUsize::new(0));
        let c = ConstData::held(numbers(4, 1.0));
        let first = doubled(&store, &c, "doubled", &made);
        let again = doubled(&store, &c.clone(), "doubled", &made);
        assert_eq!(first.as_ptr(), again.as_ptr());
        assert_eq!(made.load(Ordering::Relaxed), 1);
        let other = doubled(&store, &c, "another layout", &made);
        assert_ne!(first.as_ptr(), other.as_ptr());
        assert_eq!(store.size(), (2, 32));
    }

    #[test]
    fn equal_constants_of_several_imports_share_their_bytes() {
        let (store, made) = (ConstantStore::default(), AtomicUsize::new(0));
        let [a, b] = [1.0, 1.0].map(|x| ConstData::held(numbers(4, x)));
        let c = ConstData::held(numbers(4, 2.0));
        let [a, b, c] = [a, b, c].map(|x| doubled(&store, &x, "doubled", &made));
        assert_eq!(a.as_ptr(), b.as_ptr());
        assert_ne!(a.as_ptr(), c.as_ptr());
        let zeros = [0.0, -0.0].map(|x| ConstData::held(Tensor::from_slice(&[x], &[1]).unwrap()));
        let [plus, minus] = zeros.map(|x| store.plain(&x).unwrap());
        assert_ne!(plus.as_ptr(), minus.as_ptr(), "bits count, not values");
    }

    /// A large constant's derivation is compared, not its elements.
    #[test]
    fn derived_constants_are_told_by_their_derivation() {
        let (store, made) = (ConstantStore::default(), AtomicUsize::new(0));
        let n = crate::ir::constant::DEFER_BYTES;
        let base = ConstData::held(Tensor::zeros(DType::F32, &[n, 2]).unwrap());
        let transposed = || {
            let op = Op::Transpose { perm: vec![1, 0] };
            ConstData::made(&op, &[&base], DType::F32, &[2, n]).unwrap()
        };
        let [a, b] = [transposed(), transposed()].map(|x| doubled(&store, &x, "doubled", &made));
        assert_eq!(a.as_ptr(), b.as_ptr());
        assert_eq!(made.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_tensor_lives_as_long_as_its_users() {
        let (store, made) = (ConstantStore::default(), AtomicUsize::new(0));
        let c = ConstData::held(numbers(4, 1.0));
        drop(doubled(&store, &c, "doubled", &made));
        assert_eq!(store.size(), (0, 0));
        doubled(&store, &c, "doubled", &made);
        assert_eq!(made.load(Ordering::Relaxed), 2);
        for i in 0..1000 {
            store.plain(&ConstData::held(numbers(1, i as f32))).unwrap();
        }
        assert!(store.lock().by_source.len() < 500, "entries are forgotten");
    }
}
