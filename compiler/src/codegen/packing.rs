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
        let spares = Spares::of(match self.store.is_spooled() {
            true => 0,
            false => workers.n(),
        });
        let made = workers.map(jobs, |job| job.run(self.store, &spares));
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
