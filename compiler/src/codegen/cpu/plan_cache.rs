//! Plans of clusters for further shapes of a model.
//!
//! A cluster whose symbols all have the sizes of the shapes before has its plan of then: while a
//! decoder's cache of keys and values grows, these are all but the clusters of attention. Of
//! clusters that are alike, as those of repeated layers, one is compiled, and the plans of the
//! others follow from its change.

use super::GraphCompiler;
use super::rejected::Fallback;
use crate::codegen::plan::{KernelPlan, PlanStep};
use crate::error::{Error, Result};
use crate::ir::{Bindings, Graph, Node, NodeId, Op, ValueId};
use crate::passes;
use gristmill_runtime::program::CpuKernel;
use gristmill_runtime::text::Function as Linked;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The last plan of each cluster of a graph over symbols.
#[derive(Clone)]
pub struct PlanCache {
    last: Arc<Mutex<BTreeMap<NodeId, Arc<CachedPlan>>>>,
    clusters: Arc<BTreeMap<NodeId, Cluster>>,
    sizes: Bindings,
}

/// A cluster over symbols.
struct Cluster {
    /// The symbols of its types.
    symbols: BTreeSet<String>,
    /// The first cluster that differs from this one in names and in the elements of weights only.
    alike: NodeId,
}

struct CachedPlan {
    /// Sizes of the symbols of the cluster.
    sizes: Vec<usize>,
    /// Its kernels are indices into `kernels`.
    plan: KernelPlan,
    kernels: Vec<CpuKernel>,
    fallbacks: Vec<Fallback>,
}

/// A compiled cluster, with its kernels and fallbacks among those of the graph.
pub(super) struct Made {
    plan: KernelPlan,
    kernels: Range<usize>,
    fallbacks: Range<usize>,
}

impl PlanCache {
    /// None yet, for the clusters of a graph over symbols.
    ///
    /// Errors when the graph contradicts a type rule.
    pub fn of(graph: &Graph) -> Result<PlanCache> {
        let mut clusters = BTreeMap::new();
        let mut firsts: Vec<NodeId> = Vec::new();
        for (id, node) in graph.nodes() {
            if let (Op::Cluster { .. }, [body]) = (&node.op, &node.regions[..]) {
                let mut known = firsts.iter().copied();
                let alike = known.find(|&first| are_alike(graph, graph.node(first), node));
                if alike.is_none() {
                    firsts.push(id);
                }
                let (alike, symbols) = (alike.unwrap_or(id), symbols_of(body)?);
                clusters.insert(id, Cluster { symbols, alike });
            }
        }
        Ok(PlanCache {
            last: Arc::default(),
            clusters: Arc::new(clusters),
            sizes: Bindings::new(),
        })
    }

    /// The plans for the graph with these sizes of its symbols. They go with that graph alone.
    pub fn at(&self, sizes: &Bindings) -> PlanCache {
        PlanCache {
            sizes: sizes.clone(),
            ..self.clone()
        }
    }

    /// A cluster of `graph`, in which values have the types of these sizes, with symbols in its body
    /// replaced.
    ///
    /// Errors, as one of sizes, when these contradict a type rule.
    pub(super) fn bound(&self, graph: &Graph, node: &Node) -> Result<Node> {
        passes::specialise_node(graph, node, &self.sizes).map_err(Error::of_sizes)
    }

    /// True for a cluster with plans.
    pub fn has(&self, id: NodeId) -> bool {
        self.clusters.contains_key(&id)
    }

    /// Sizes of the symbols of a cluster; `None` for an unknown node.
    fn sizes_of(&self, id: NodeId) -> Option<Vec<usize>> {
        let symbols = self.clusters.get(&id)?.symbols.iter();
        symbols.map(|s| self.sizes.get(s).copied()).collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<NodeId, Arc<CachedPlan>>> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn last(&self, id: NodeId) -> Option<Arc<CachedPlan>> {
        self.lock().get(&id).cloned()
    }

    /// The compiled clusters of a graph, to be kept with these kernels and fallbacks.
    pub(super) fn newly_kept(
        &self,
        made: BTreeMap<NodeId, Made>,
        kernels: &[CpuKernel],
        fallbacks: &[Fallback],
    ) -> NewPlans {
        let mut clusters = Vec::new();
        for (id, m) in made {
            let Some(sizes) = self.sizes_of(id) else {
                continue;
            };
            let kept = CachedPlan {
                sizes,
                plan: m.plan,
                kernels: kernels[m.kernels].to_vec(),
                fallbacks: fallbacks[m.fallbacks].to_vec(),
            };
            clusters.push((id, Arc::new(kept)));
        }
        let last = self.last.clone();
        NewPlans { last, clusters }
    }
}

/// Clusters to be kept once their code is linked.
pub(super) struct NewPlans {
    last: Arc<Mutex<BTreeMap<NodeId, Arc<CachedPlan>>>>,
    clusters: Vec<(NodeId, Arc<CachedPlan>)>,
}

impl NewPlans {
    pub(super) fn keep(self) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.extend(self.clusters);
    }
}

impl std::fmt::Debug for PlanCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "plans of {} clusters", self.lock().len())
    }
}

/// The symbols of the types in a graph.
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

/// True for nodes equal but for names and the elements of constant operands.
fn are_alike(g: &Graph, a: &Node, b: &Node) -> bool {
    let operands = a.inputs.iter().zip(&b.inputs);
    let mut kinds = operands.map(|(&a, &b)| g.constant(a).is_some() == g.constant(b).is_some());
    let mut bodies = a.regions.iter().zip(&b.regions);
    a.op == b.op
        && a.inputs.len() == b.inputs.len()
        && a.regions.len() == b.regions.len()
        && kinds.all(|same| same)
        && bodies.all(|(a, b)| are_same(a, b))
}

/// True for regions equal but for names.
fn are_same(a: &Graph, b: &Graph) -> bool {
    let types = |g: &Graph, values: &[ValueId]| -> Vec<_> {
        values.iter().map(|&v| (v.0, g.ty(v).clone())).collect()
    };
    let same = |x: &[ValueId], y: &[ValueId]| types(a, x) == types(b, y);
    let results = |g: &Graph| -> Vec<ValueId> { g.outputs.iter().map(|o| o.value).collect() };
    let mut nodes = a.nodes().zip(b.nodes());
    a.n_nodes() == b.n_nodes()
        && same(&a.inputs, &b.inputs)
        && same(&results(a), &results(b))
        && nodes.all(|((_, x), (_, y))| {
            let mut bodies = x.regions.iter().zip(&y.regions);
            x.op == y.op
                && x.regions.len() == y.regions.len()
                && same(&x.inputs, &y.inputs)
                && same(&x.outputs, &y.outputs)
                && bodies.all(|(a, b)| are_same(a, b))
        })
}

impl GraphCompiler<'_> {
    /// The plan of a cluster as it was for the shapes before, its kernels added to the graph.
    pub(super) fn kept_plan(&mut self, id: NodeId) -> Option<KernelPlan> {
        let plans = self.options.plans.as_ref()?;
        let sizes = plans.sizes_of(id)?;
        let kept = plans.last(id).filter(|kept| kept.sizes == sizes)?;
        let first = self.kernels.len();
        let mut plan = kept.plan.clone();
        plan.steps.iter_mut().for_each(|s| s.kernel += first);
        self.fallbacks.extend(kept.fallbacks.iter().cloned());
        self.kernels.extend(kept.kernels.iter().cloned());
        Some(plan)
    }

    /// The plan of a cluster, from the last one and the change of that of a cluster like it, which
    /// was compiled by this graph.
    pub(super) fn plan_alike(
        &mut self,
        id: NodeId,
        made: &BTreeMap<NodeId, Made>,
    ) -> Option<KernelPlan> {
        let plans = self.options.plans.as_ref()?;
        let alike = plans.clusters.get(&id)?.alike;
        let (own, before, now) = (plans.last(id)?, plans.last(alike)?, made.get(&alike)?);
        let has_their_kernels = own.has_kernels_of(&before) && self.has_kept(now, &before);
        if !has_their_kernels || own.sizes != before.sizes || !now.fallbacks.is_empty() {
            return None;
        }
        let mut plan = changed_alike(&own.plan, &before.plan, &now.plan)?;
        let first = self.kernels.len();
        plan.steps.iter_mut().for_each(|s| s.kernel += first);
        for (kept, pending) in own.kernels.iter().zip(now.kernels.clone()) {
            let alike = self.kernels[pending].clone();
            self.kernels.push(CpuKernel {
                name: kept.name.clone(),
                ..alike
            });
        }
        Some(plan)
    }

    /// True when a compilation of the cluster gives the same plan.
    pub(super) fn is_as_compiled(
        &mut self,
        graph: &Graph,
        id: NodeId,
        plan: &KernelPlan,
    ) -> Result<bool> {
        let n_kernels = self.kernels.len();
        let compiled = self.compile(graph, id)?;
        let function = |step: &PlanStep| self.kernels[step.kernel].function.clone();
        let calls = |plan: &KernelPlan| -> Vec<_> {
            let steps = plan.steps.iter();
            let rest = |s: &PlanStep| (s.args.clone(), s.n_outputs, s.items, s.grain);
            steps.map(|s| (function(s), rest(s))).collect()
        };
        let mut tensors = plan.packed.iter().zip(&compiled.packed);
        let is_same = calls(plan) == calls(&compiled)
            && plan.scratch == compiled.scratch
            && plan.in_place == compiled.in_place
            && plan.begins_with_copy == compiled.begins_with_copy
            && plan.packed.len() == compiled.packed.len()
            && tensors.all(|(a, b)| a.weight == b.weight && a.elements.is_same(&b.elements));
        self.kernels.truncate(n_kernels);
        Ok(is_same)
    }

    /// True when a plan has the kernels of a kept one.
    fn has_kept(&self, made: &Made, kept: &CachedPlan) -> bool {
        let kernels = &self.kernels[made.kernels.clone()];
        let mut pairs = kernels.iter().zip(&kept.kernels);
        kernels.len() == kept.kernels.len() && pairs.all(|(new, k)| new.function == k.function)
    }

    /// A compiled cluster, given the numbers of kernels and fallbacks before it.
    pub(super) fn made(&self, plan: &KernelPlan, before: (usize, usize)) -> Made {
        let mut plan = plan.clone();
        plan.steps.iter_mut().for_each(|s| s.kernel -= before.0);
        Made {
            plan,
            kernels: before.0..self.kernels.len(),
            fallbacks: before.1..self.fallbacks.len(),
        }
    }
}

impl CachedPlan {
    fn has_kernels_of(&self, other: &CachedPlan) -> bool {
        let functions = |kept: &CachedPlan| -> Vec<Linked> {
            kept.kernels.iter().map(|k| k.function.clone()).collect()
        };
        functions(self) == functions(other)
    }
}

/// The plan of a cluster at new sizes, from the one at sizes before (`own`) and from those of a
/// cluster like it at both (`before`, `now`), which have the same kernels.
///
/// The bodies are the same, and so is all that follows from body and sizes: steps, descriptors,
/// tables. Plans differ in the parts of weights that they read. A part that did not change is the
/// cluster's own; where one changed, as that of a weight that is cut at a symbol, there is no plan.
fn changed_alike(own: &KernelPlan, before: &KernelPlan, now: &KernelPlan) -> Option<KernelPlan> {
    let is_call_like = |a: &PlanStep, b: &PlanStep| {
        (a.kernel, a.n_outputs, &a.args) == (b.kernel, b.n_outputs, &b.args)
    };
    let mut calls = before.steps.iter().zip(&now.steps);
    let has_structure = own.steps == before.steps
        && own.scratch == before.scratch
        && own.in_place == before.in_place
        && own.begins_with_copy == before.begins_with_copy
        && before.steps.len() == now.steps.len()
        && calls.all(|(a, b)| is_call_like(a, b));
    let n_packed = [own, before, now].map(|plan| plan.packed.len());
    if !has_structure || n_packed != [n_packed[0]; 3] {
        return None;
    }
    let mut packed = Vec::with_capacity(n_packed[0]);
    for ((own, before), now) in own.packed.iter().zip(&before.packed).zip(&now.packed) {
        if own.weight != before.weight || own.weight != now.weight {
            return None;
        }
        packed.push(match own.weight {
            Some(_) => own.clone(),
            None => now.clone(),
        });
    }
    Some(KernelPlan {
        steps: now.steps.clone(),
        scratch: now.scratch.clone(),
        packed,
        in_place: now.in_place.clone(),
        begins_with_copy: now.begins_with_copy,
    })
}
