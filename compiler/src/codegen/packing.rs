//! Constants in the layouts of kernels, made together once all kernels of a graph are chosen.

use super::plan::Elements;
use super::store::{ConstantStore, Key, PLAIN};
use super::workers::Workers;
use crate::error::{Error, Result};
use crate::ir::{ConstData, Origin};
use gristmill_runtime::tensor::Spares;
use gristmill_runtime::{DType, Tensor};
use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::HashMap;

/// Bytes of constants below which one thread packs all of them.
const SMALL_BYTES: usize = 1 << 20;

/// Constants of one graph which the store does not have yet.
pub struct Packing<'s> {
    store: &'s ConstantStore,
    jobs: RefCell<Vec<Job>>,
    of_key: RefCell<HashMap<Key, Elements>>,
}

/// Makes the elements of a layout from those of its constant.
type Make = Box<dyn FnOnce(&Tensor) -> Result<Tensor> + Send>;

struct Job {
    key: Key,
    constant: ConstData,
    make: Make,
    elements: Elements,
    /// The first node with this constant, for errors.
    origin: Origin,
}

impl<'s> Packing<'s> {
    pub fn new(store: &'s ConstantStore) -> Packing<'s> {
        Packing {
            store,
            jobs: RefCell::default(),
            of_key: RefCell::default(),
        }
    }

    /// The store of all constants.
    pub fn store(&self) -> &'s ConstantStore {
        self.store
    }

    /// The constant as `make` lays it out, of this type. The elements are there after [`Packing::run`], unless the store has them. `layout` names everything
    /// else behind them.
    pub fn laid_out(
        &self,
        constant: &ConstData,
        layout: String,
        (dtype, shape): (DType, &[usize]),
        origin: &Origin,
        make: impl FnOnce(&Tensor) -> Result<Tensor> + Send + 'static,
    ) -> Elements {
        let key = Key::new(constant, layout);
        if let Some(there) = self.store.find(&key) {
            return there.into();
        }
        let mut of_key = self.of_key.borrow_mut();
        let elements = of_key.entry(key.clone()).or_insert_with(|| {
            let elements = Elements::of(dtype, shape);
            self.jobs.borrow_mut().push(Job {
                key,
                constant: constant.clone(),
                make: Box::new(make),
                elements: elements.clone(),
                origin: origin.clone(),
            });
            elements
        });
        elements.clone()
    }

    /// The constant's elements in row-major order.
    pub fn plain(&self, constant: &ConstData, origin: &Origin) -> Elements {
        let ty = (constant.dtype(), constant.shape());
        self.laid_out(constant, PLAIN.to_owned(), ty, origin, |t| Ok(t.clone()))
    }

    /// Makes all elements in use.
    ///
    /// Errors with the failure of the largest constant, naming the node: a file cannot be read, or a spool cannot be written.
    pub fn run(self, workers: Workers) -> Result<()> {
        let spares = Spares::of(match self.store.is_spooled() {
            true => 0,
            false => workers.n(),
        });
        self.run_in(workers, &spares)
    }

    /// [`Packing::run`], reading into spare memory.
    fn run_in(self, workers: Workers, spares: &Spares) -> Result<()> {
        drop(self.of_key);
        let mut jobs = self.jobs.into_inner();
        // Kernels tried and not taken have left their constants.
        jobs.retain(|job| job.elements.is_shared());
        let bytes: usize = jobs.iter().map(|job| job.constant.size_bytes()).sum();
        // A spool promises one constant in memory at a time.
        let workers = match bytes < SMALL_BYTES || self.store.is_spooled() {
            true => Workers::default(),
            false => workers,
        };
        // The largest first: threads end at about the same time, and the memory of one is enough for the next.
        jobs.sort_by_key(|job| Reverse(job.constant.size_bytes()));
        let made = workers.map(jobs, |job| job.run(self.store, spares));
        made.into_iter().collect()
    }
}

impl Job {
    fn run(self, store: &ConstantStore, spares: &Spares) -> Result<()> {
        let made = self.constant.tensor_in(spares).and_then(|t| {
            let made = (self.make)(&t);
            spares.give(t);
            made
        });
        drop(self.constant);
        let kept = made.and_then(|made| store.keep(self.key, made));
        self.elements
            .set(kept.map_err(|e: Error| e.at_origin(&self.origin))?);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::constant::DataFile;
    use std::collections::BTreeSet;
    use std::sync::{Arc, Mutex};

    #[test]
    fn weights_are_read_into_spare_memory() {
        const SHAPE: [usize; 2] = [512, 1024];
        let (n, len) = (8, 4 * SHAPE[0] * SHAPE[1]);
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), vec![1u8; n * len]).unwrap();
        let file = Arc::new(DataFile::open(file.path()).unwrap());
        let (store, spares) = (ConstantStore::default(), Spares::of(1));
        let spare = Tensor::zeros(DType::F32, &SHAPE).unwrap();
        let address = spare.as_ptr() as usize;
        spares.give(spare);

        let (packing, origin) = (Packing::new(&store), Origin::new("w"));
        let seen = Arc::new(Mutex::new(BTreeSet::new()));
        let mut packed = Vec::new();
        for i in 0..n {
            let weight = ConstData::stored(&file, (i * len) as u64, DType::F32, &SHAPE).unwrap();
            let seen = seen.clone();
            let make = move |t: &Tensor| {
                seen.lock().unwrap().insert(t.as_ptr() as usize);
                Ok(Tensor::zeros(DType::F32, &[1])?)
            };
            let ty = (DType::F32, &[1][..]);
            packed.push(packing.laid_out(&weight, format!("layout {i}"), ty, &origin, make));
        }
        packing.run_in(Workers::default(), &spares).unwrap();
        assert!(packed.iter().all(|p| p.tensor().len() == 1));
        assert_eq!(*seen.lock().unwrap(), [address].into());
        let left = spares.tensor(DType::U8, &[len]).unwrap();
        assert_eq!(left.as_slice::<u8>()[..4], [1; 4], "given back");
    }
}
