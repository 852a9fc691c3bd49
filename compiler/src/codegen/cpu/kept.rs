//! Plans of clusters for further shapes of a model: those of a cluster whose symbols all have the
//! sizes of the shapes before. While a decoder's cache of keys and values grows, these are all but
//! the clusters of attention.

use super::jit::{Code, Finished};
use super::rejected::Fallback;
use super::{PendingKernel, Session};
use crate::codegen::plan::KernelPlan;
use crate::error::Result;
use crate::ir::{Bindings, Graph, NodeId, Op};
use crate::passes;
use gristmill_runtime::program::KernelFn;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The last plan of each cluster of a graph over symbols.
#[derive(Clone)]
pub struct KeptPlans {
    by_node: Arc<Mutex<BTreeMap<NodeId, Kept>>>,
    symbols: Arc<BTreeMap<NodeId, BTreeSet<String>>>,
    sizes: Bindings,
}

struct Kept {
    /// Sizes of the symbols of the cluster.
    sizes: Vec<usize>,
    /// Its kernels are indices into `kernels`.
    plan: KernelPlan,
    kernels: Vec<KeptKernel>,
    fallbacks: Vec<Fallback>,
}

#[derive(Clone)]
struct KeptKernel {
    name: String,
    entry: KernelFn,
    code: Arc<Code>,
    workspace_bytes: usize,
}

/// A cluster that was compiled, with its kernels and fallbacks among those of the session.
pub(super) struct Made {
    id: NodeId,
    plan: KernelPlan,
    kernels: Range<usize>,
    fallbacks: Range<usize>,
}

impl KeptPlans {
    /// None yet, for the clusters of a graph over symbols.
    ///
    /// Errors when the graph contradicts a type rule.
    pub fn of(graph: &Graph) -> Result<KeptPlans> {
        let mut symbols = BTreeMap::new();
        for (id, node) in graph.nodes() {
            if let (Op::Cluster { .. }, [body]) = (&node.op, &node.regions[..]) {
                symbols.insert(id, symbols_of(body)?);
            }
        }
        Ok(KeptPlans {
            by_node: Arc::default(),
            symbols: Arc::new(symbols),
            sizes: Bindings::new(),
        })
    }

    /// The plans for the graph with these sizes of its symbols. They go with that graph alone.
    pub fn at(&self, sizes: &Bindings) -> KeptPlans {
        KeptPlans {
            sizes: sizes.clone(),
            ..self.clone()
        }
    }

    /// Sizes of the symbols that a cluster depends on; `None` for a node that is not known.
    fn sizes_of(&self, id: NodeId) -> Option<Vec<usize>> {
        let symbols = self.symbols.get(&id)?.iter();
        symbols.map(|s| self.sizes.get(s).copied()).collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<NodeId, Kept>> {
        self.by_node.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps what a session has compiled, whose kernels and fallbacks these are.
    pub(super) fn keep(
        &self,
        made: Vec<Made>,
        kernels: &[PendingKernel],
        fallbacks: &[Fallback],
        finished: &Finished,
    ) {
        for m in made {
            let Some(sizes) = self.sizes_of(m.id) else {
                continue;
            };
            let kernels = kernels[m.kernels].iter().map(|k| k.kept(finished));
            if let Some(kernels) = kernels.collect() {
                let kept = Kept {
                    sizes,
                    plan: m.plan,
                    kernels,
                    fallbacks: fallbacks[m.fallbacks].to_vec(),
                };
                self.lock().insert(m.id, kept);
            }
        }
    }
}

impl PendingKernel {
    fn kept(&self, finished: &Finished) -> Option<KeptKernel> {
        let (entry, code) = finished.function(self.function)?;
        Some(KeptKernel {
            name: self.name.clone(),
            entry,
            code: code.clone(),
            workspace_bytes: self.workspace_bytes,
        })
    }
}

impl std::fmt::Debug for KeptPlans {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "plans of {} clusters", self.lock().len())
    }
}

/// The symbols that decide the types in a graph.
fn symbols_of(g: &Graph) -> Result<BTreeSet<String>> {
    let symbols = RefCell::new(BTreeSet::new());
    // Types follow from those of inputs and from the dims of attributes, which are all that is mapped.
    passes::map_dims(g, &|dim| {
        dim.visit_symbols(&mut |s| {
            symbols.borrow_mut().insert(s.to_owned());
        });
        dim.clone()
    })?;
    Ok(symbols.into_inner())
}

impl Session<'_> {
    /// The plan of a cluster as it was for the shapes before, its kernels added to the session.
    pub(super) fn kept_plan(&mut self, id: NodeId) -> Option<KernelPlan> {
        let plans = self.options.plans.as_ref()?;
        let sizes = plans.sizes_of(id)?;
        let by_node = plans.lock();
        let kept = by_node.get(&id).filter(|kept| kept.sizes == sizes)?;
        let first = self.kernels.len();
        let mut plan = kept.plan.clone();
        plan.steps.iter_mut().for_each(|s| s.kernel += first);
        self.fallbacks.extend(kept.fallbacks.iter().cloned());
        for k in kept.kernels.iter().cloned() {
            let function = self.jit.add_kept(k.entry, k.code);
            self.add_kernel(k.name, function, k.workspace_bytes);
        }
        Some(plan)
    }

    /// What was compiled for a cluster, given how many kernels and fallbacks there were before.
    pub(super) fn made(&self, id: NodeId, plan: &KernelPlan, before: (usize, usize)) -> Made {
        let mut plan = plan.clone();
        plan.steps.iter_mut().for_each(|s| s.kernel -= before.0);
        Made {
            id,
            plan,
            kernels: before.0..self.kernels.len(),
            fallbacks: before.1..self.fallbacks.len(),
        }
    }
}
