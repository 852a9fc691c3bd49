//! Decides which values of a body get a buffer, and so cuts a cluster into phases.
//!
//! A phase computes one or more values over their whole index range and stores them. Between phases everything is in memory; within a
//! phase everything is pulled. Values get a buffer of their own when pulling would compute them many times over, or when an op reads or
//! writes memory directly.

use super::body::Body;
use crate::error::{Error, Result};
use crate::ir::{Node, NodeId, Op, OpClass, ScalarOp, ValueId};
use gristmill_runtime::DType;
use std::collections::{BTreeMap, BTreeSet};

/// Most ops that one pulled value may stand for, shared ones counted each time, and their longest chain.
const MAX_PULLED: usize = 512;
const MAX_DEPTH: usize = 96;
/// Flops per element from which recomputation costs more than a store and a load.
const EXPENSIVE_FLOPS: u32 = 8;

/// One unit of emission; see the module doc. `T` is a back end's own kernel for several nodes.
#[derive(Clone, Debug)]
pub(super) enum Phase<T> {
    /// A kernel of the back end's own.
    Task(T),
    /// Element by element; all of one shape.
    Elements(Vec<ValueId>),
    /// Line by line: the cumulative sum's result.
    Lines(NodeId),
    /// Top-k.
    TopK(NodeId),
    /// A copy of the data, then updates in order.
    Scatter(NodeId),
}

/// The interface of a task to the rest of the body.
#[derive(Clone, Debug)]
pub(super) struct Cover {
    /// Values that must be in memory before.
    pub(super) needs: Vec<ValueId>,
    /// Nodes that the task computes.
    pub(super) nodes: Vec<NodeId>,
    /// Values that it writes; it runs where the first is defined.
    pub(super) results: Vec<ValueId>,
}

/// The surroundings of a node that a task is matched to.
pub(super) struct MatchContext<'a> {
    /// Users of each value.
    pub(super) users: &'a [Vec<(NodeId, usize)>],
    /// True for values that have a buffer when the node runs.
    pub(super) in_memory: &'a dyn Fn(ValueId) -> bool,
}

/// Finds the task that computes a node, and perhaps others, with the task's interface.
type Find<'f, T> = dyn FnMut(&MatchContext, NodeId, &Node) -> Option<(Cover, T)> + 'f;

/// Cuts a body into phases, in order of computation.
pub(super) fn cut<T>(body: &Body, find: &mut Find<T>) -> Vec<Phase<T>> {
    let mut planner = Planner::new(body);
    let mut tasks = BTreeMap::new();
    for (id, node) in body.graph.nodes() {
        if planner.absorbed.contains(&id) {
            continue;
        }
        let in_memory = |v| planner.in_memory(v);
        match find(
            &MatchContext {
                users: &planner.users,
                in_memory: &in_memory,
            },
            id,
            node,
        ) {
            Some((cover, task)) => {
                let first = cover.results.first().and_then(|&v| body.graph.def_id(v));
                tasks.insert(first.expect("a task computes a value"), task);
                planner.take(&cover);
            }
            None => planner.visit(node),
        }
    }
    planner.phases(tasks)
}

/// The lines of a `TopK`, and the elements that are selected from each.
pub(super) struct Selection {
    pub(super) x: ValueId,
    pub(super) dtype: DType,
    pub(super) axis: usize,
    pub(super) largest: bool,
    /// Shapes of operand and result.
    pub(super) from: Vec<usize>,
    pub(super) to: Vec<usize>,
}

impl Selection {
    /// Errors are internal: a node of another kind.
    pub(super) fn of(body: &Body, node: &Node) -> Result<Selection> {
        let Op::TopK { axis, largest, .. } = node.op else {
            return Err(wrong_phase(node));
        };
        let x = node.inputs[0];
        Ok(Selection {
            x,
            dtype: body.dtype(x),
            axis,
            largest,
            from: body.shape(x).to_vec(),
            to: body.shape(node.outputs[0]).to_vec(),
        })
    }
}

/// The error of a node in a phase of another kind.
pub(super) fn wrong_phase(node: &Node) -> Error {
    Error::internal(format!("{} is in a phase of another kind", node.op.name()))
}

struct Planner<'a> {
    body: &'a Body,
    users: Vec<Vec<(NodeId, usize)>>,
    is_output: Vec<bool>,
    /// Values with a buffer, except operands and constants.
    stored: BTreeSet<ValueId>,
    /// Size of the expression of each value; zero when it is stored.
    pulled: Vec<ExpressionSize>,
    /// All nodes that tasks compute.
    absorbed: BTreeSet<NodeId>,
}

/// Size of the expression that pulling a value emits.
#[derive(Clone, Copy, Default)]
struct ExpressionSize {
    ops: usize,
    depth: usize,
    flops: u32,
}

/// Ops with an inner loop.
fn is_heavy(op: &Op) -> bool {
    matches!(
        op.class(),
        OpClass::Reduce | OpClass::Contract | OpClass::Window | OpClass::Attention
    )
}

/// Ops that work on memory, not on elements.
fn is_special(op: &Op) -> bool {
    matches!(op.class(), OpClass::Scan | OpClass::Sort | OpClass::Scatter)
}

fn flops(op: &Op) -> u32 {
    match op {
        Op::Map(s) => s.spec().flops,
        _ => 1,
    }
}

impl<'a> Planner<'a> {
    fn new(body: &'a Body) -> Planner<'a> {
        let n = body.graph.n_values();
        let mut is_output = vec![false; n];
        body.graph
            .outputs
            .iter()
            .for_each(|o| is_output[o.value.0 as usize] = true);
        Planner {
            body,
            users: body.graph.users(),
            is_output,
            stored: BTreeSet::new(),
            pulled: vec![ExpressionSize::default(); n],
            absorbed: BTreeSet::new(),
        }
    }

    /// In memory when a phase needs it: operand, stored value, or constant.
    fn in_memory(&self, v: ValueId) -> bool {
        match self.body.graph.def_node(v) {
            None => true,
            Some(node) => matches!(node.op, Op::Constant { .. }) || self.stored.contains(&v),
        }
    }

    /// In memory, or a view or a cast of something that is.
    fn is_cheap(&self, v: ValueId) -> bool {
        self.in_memory(v)
            || self.body.graph.def_node(v).is_some_and(|n| {
                let light = matches!(n.op.class(), OpClass::View | OpClass::Source)
                    || matches!(n.op, Op::Map(ScalarOp::Cast(_)));
                light && n.inputs.iter().all(|&x| self.is_cheap(x))
            })
    }

    fn store(&mut self, v: ValueId) {
        if !self.in_memory(v) {
            self.stored.insert(v);
            self.pulled[v.0 as usize] = ExpressionSize::default();
        }
    }

    fn take(&mut self, cover: &Cover) {
        cover
            .needs
            .iter()
            .chain(&cover.results)
            .for_each(|&v| self.store(v));
        self.absorbed.extend(&cover.nodes);
    }

    fn visit(&mut self, node: &Node) {
        for &x in &node.inputs {
            if self.needs_buffer(x, node) {
                self.store(x);
            }
        }
        let pulled = self.expression_of(node);
        for &v in &node.outputs {
            self.pulled[v.0 as usize] = pulled;
            let is_costly = is_heavy(&node.op) && !self.is_pulled_once(v);
            let is_large = pulled.ops > MAX_PULLED || pulled.depth > MAX_DEPTH;
            if is_costly || is_special(&node.op) || is_large {
                self.store(v);
            }
            if self.stored.contains(&v) {
                self.pulled[v.0 as usize] = ExpressionSize::default();
            }
        }
    }

    /// True when operand `x` of a node must be in memory, or is better there.
    fn needs_buffer(&self, x: ValueId, node: &Node) -> bool {
        let op = &node.op;
        let is_reduction = matches!(op, Op::Reduce { .. } | Op::ArgReduce { .. });
        let repeats = is_heavy(op) && !is_reduction || is_special(op);
        let rereads = self.body.n_elements(x) * 2 <= self.body.n_elements(node.outputs[0]);
        let is_expensive = self.pulled[x.0 as usize].flops >= EXPENSIVE_FLOPS;
        let is_shared = is_heavy(op) && self.users[x.0 as usize].len() > 1;
        matches!(op, Op::TopK { .. })
            || is_expensive && (is_shared || rereads)
            || repeats && !self.is_cheap(x)
    }

    /// Size of the expression of a node's results.
    fn expression_of(&self, node: &Node) -> ExpressionSize {
        let mut pulled = ExpressionSize {
            ops: 1,
            depth: 1,
            flops: flops(&node.op),
        };
        for &x in &node.inputs {
            let operand = self.pulled[x.0 as usize];
            pulled.ops += operand.ops;
            pulled.depth = pulled.depth.max(operand.depth + 1);
            pulled.flops = pulled.flops.saturating_add(operand.flops);
        }
        pulled
    }

    /// True when every element reaches one element of a result by maps and permutations alone.
    fn is_pulled_once(&self, v: ValueId) -> bool {
        let users = &self.users[v.0 as usize];
        if self.is_output[v.0 as usize] {
            return users.is_empty();
        }
        let [(user, _)] = users[..] else { return false };
        let node = self.body.graph.node(user);
        let same_count = |x: &ValueId| self.body.n_elements(*x) == self.body.n_elements(v);
        matches!(
            node.op,
            Op::Map(_) | Op::Reshape { .. } | Op::Transpose { .. }
        ) && node.outputs.iter().all(same_count)
            && self.is_pulled_once(node.outputs[0])
    }

    /// Results of a node that a phase computes.
    fn roots(&self, node: &Node) -> Vec<ValueId> {
        let is_root = |v: &ValueId| {
            let has_buffer = self.stored.contains(v) || self.is_output[v.0 as usize];
            has_buffer && self.body.n_elements(*v) > 0
        };
        node.outputs.iter().copied().filter(is_root).collect()
    }

    /// The phases, given tasks by the node of their first result.
    fn phases<T>(&self, mut tasks: BTreeMap<NodeId, T>) -> Vec<Phase<T>> {
        let mut phases = Vec::new();
        for (id, node) in self.body.graph.nodes() {
            phases.extend(tasks.remove(&id).map(Phase::Task));
            if self.absorbed.contains(&id) {
                continue;
            }
            let roots = self.roots(node);
            if roots.is_empty() || matches!(node.op, Op::Constant { .. }) {
                continue;
            }
            match node.op.class() {
                OpClass::Scan => phases.push(Phase::Lines(id)),
                OpClass::Sort => phases.push(Phase::TopK(id)),
                OpClass::Scatter => phases.push(Phase::Scatter(id)),
                OpClass::Reduce | OpClass::Contract | OpClass::Window | OpClass::Attention => {
                    phases.push(Phase::Elements(roots))
                }
                OpClass::Source | OpClass::Map | OpClass::View | OpClass::Gather
                // No cluster holds these; code by elements refuses them.
                | OpClass::Control | OpClass::State | OpClass::Transfer | OpClass::Cluster => {
                    self.push_light(&mut phases, roots[0])
                }
            }
        }
        phases
    }

    /// Adds a light root, to the last phase when that computes light results of the same shape. Values stored because their
    /// expressions are large are not joined, since a phase does not load its own roots.
    fn push_light<T>(&self, phases: &mut Vec<Phase<T>>, root: ValueId) {
        let light = |v: &ValueId| {
            !self.stored.contains(v)
                && self
                    .body
                    .graph
                    .def_node(*v)
                    .is_some_and(|n| !is_heavy(&n.op) && !is_special(&n.op))
        };
        if let Some(Phase::Elements(last)) = phases.last_mut()
            && last.iter().all(light)
            && self.body.shape(last[0]) == self.body.shape(root)
        {
            return last.push(root);
        }
        phases.push(Phase::Elements(vec![root]));
    }
}
