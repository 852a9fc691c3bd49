//! The reference interpreter: every other execution is compared with it.
//!
//! It runs graphs node by node with the evaluators of the op table ([`crate::ir::eval`]), which
//! define the ops; regions, variables and transfers are its own.
//!
//! Errors carry [`ErrorKind::InvalidInput`](crate::ErrorKind) for operands that do not fit and for
//! errors that only the data shows (an index out of range, an integer division by zero),
//! `OutOfMemory` for impossible sizes, and name the node's origin.

mod budget;
pub mod compare;
mod control;
pub(crate) mod random;
#[cfg(test)]
mod tests;

pub use budget::WorkBudget;

use crate::error::{Error, ErrorKind, Result};
use crate::ir::eval::{Evaluator, eval_selection, eval_tensors};
use crate::ir::{Bindings, Dim, Graph, MAX_DIM_SIZE, Node, Op, Shape, Type, ValueId};
use budget::Meter;
use gristmill_runtime::Tensor;
use std::collections::BTreeMap;

/// Values of variables by resource container and name; they outlive a run.
#[derive(Clone, Debug, Default)]
pub struct Store {
    variables: BTreeMap<(String, String), Tensor>,
}

impl Store {
    /// An empty store.
    pub fn new() -> Store {
        Store::default()
    }

    /// Sets a variable.
    pub fn set(&mut self, container: &str, name: &str, value: Tensor) {
        self.variables
            .insert((container.to_owned(), name.to_owned()), value);
    }

    /// The value of a variable.
    pub fn get(&self, container: &str, name: &str) -> Option<&Tensor> {
        self.variables.get(&(container.to_owned(), name.to_owned()))
    }
}

/// Runs a graph. Symbols get their values from the inputs' shapes; variables start without a value.
pub fn run(graph: &Graph, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
    run_with_state(graph, inputs, &mut Store::new())
}

/// Runs a graph that reads and assigns the variables of `store`.
pub fn run_with_state(graph: &Graph, inputs: &[Tensor], store: &mut Store) -> Result<Vec<Tensor>> {
    // Assignments of a run that fails do not hold.
    let mut assigned = store.clone();
    let results =
        Machine::new(&mut assigned, Meter::unlimited()).run(graph, inputs, &Bindings::new())?;
    *store = assigned;
    Ok(results)
}

/// Runs a graph as [`run`] does; `None` when that takes more work than `budget` allows.
pub fn run_within(
    graph: &Graph,
    inputs: &[Tensor],
    budget: &mut WorkBudget,
) -> Result<Option<Vec<Tensor>>> {
    within(budget, |m| m.run(graph, inputs, &Bindings::new()))
}

/// Evaluates one op. Attributes must be constant, except that symbols of a region's inputs are
/// bound by the operands.
pub fn eval(op: &Op, inputs: &[&Tensor], regions: &[Graph]) -> Result<Vec<Tensor>> {
    eval_with_state(op, inputs, regions, &mut Store::new())
}

/// Evaluates one op that reads and assigns the variables of `store`.
pub fn eval_with_state(
    op: &Op,
    inputs: &[&Tensor],
    regions: &[Graph],
    store: &mut Store,
) -> Result<Vec<Tensor>> {
    Machine::new(store, Meter::unlimited()).eval(op, inputs, regions, &Bindings::new())
}

/// Evaluates one op as [`eval`] does; `None` when that takes more work than `budget` allows.
pub fn eval_within(
    op: &Op,
    inputs: &[&Tensor],
    regions: &[Graph],
    budget: &mut WorkBudget,
) -> Result<Option<Vec<Tensor>>> {
    within(budget, |m| m.eval(op, inputs, regions, &Bindings::new()))
}

/// Computes the results of the segment of a number.
pub type RunSegment<'a> = &'a dyn Fn(usize, &[Tensor]) -> Result<Vec<Tensor>>;

/// Runs a graph as [`run`] does, but its segments by `segment`.
pub fn run_segments(graph: &Graph, inputs: &[Tensor], segment: RunSegment) -> Result<Vec<Tensor>> {
    let mut store = Store::new();
    let mut machine = Machine::new(&mut store, Meter::unlimited());
    machine.segment = Some(segment);
    machine.run(graph, inputs, &Bindings::new())
}

/// The results of `evaluate`, unless it exceeds the budget.
fn within(
    budget: &mut WorkBudget,
    evaluate: impl FnOnce(&mut Machine) -> Result<Vec<Tensor>>,
) -> Result<Option<Vec<Tensor>>> {
    let mut store = Store::new();
    let mut machine = Machine::new(&mut store, budget.meter());
    let results = evaluate(&mut machine);
    budget.charge(&machine.meter);
    match results {
        Err(_) if machine.meter.exceeded() => Ok(None),
        results => results.map(Some),
    }
}

/// State during a run.
struct Machine<'a> {
    store: &'a mut Store,
    /// Tensors sent so far, by key.
    mail: BTreeMap<String, Tensor>,
    meter: Meter,
    /// Runs segments, which are interpreted without it.
    segment: Option<RunSegment<'a>>,
}

impl<'a> Machine<'a> {
    fn new(store: &'a mut Store, meter: Meter) -> Machine<'a> {
        Machine {
            store,
            mail: BTreeMap::new(),
            meter,
            segment: None,
        }
    }
}

impl Machine<'_> {
    fn run(&mut self, graph: &Graph, inputs: &[Tensor], outer: &Bindings) -> Result<Vec<Tensor>> {
        self.meter.take(graph.n_values() as u64)?;
        let shapes: Vec<Vec<usize>> = inputs.iter().map(|t| t.shape().to_vec()).collect();
        let mut bindings = graph.bindings_within(&shapes, outer)?;
        let mut values = Values::new(graph, inputs)?;
        for (_, node) in graph.nodes() {
            self.step(graph, node, &mut values, &mut bindings)?;
            values.release_operands(node);
        }
        let outputs = graph.outputs.iter();
        outputs.map(|o| values.get(o.value).cloned()).collect()
    }

    /// Evaluates one node and stores its results, whose types must be the declared ones. Symbols in
    /// these that have no value yet get it from the results.
    fn step(
        &mut self,
        graph: &Graph,
        node: &Node,
        values: &mut Values,
        bindings: &mut Bindings,
    ) -> Result<()> {
        let inputs = node.inputs.iter().map(|&v| values.get(v));
        let inputs: Vec<&Tensor> = inputs.collect::<Result<_>>()?;
        let results = self
            .eval(&node.op, &inputs, &node.regions, bindings)
            .map_err(|e| e.at_origin(&node.origin))?;
        if let Op::Extent { symbol } = &node.op {
            let n = extent_of(symbol, &results[0]).map_err(|e| e.at_origin(&node.origin))?;
            bindings.insert(symbol.clone(), n);
        }
        for (&v, t) in node.outputs.iter().zip(results) {
            bind_open(graph.ty(v), &t, bindings);
            check_type(graph.ty(v), &t, bindings).map_err(|m| {
                let kind = match node.op.spec().eval {
                    Evaluator::Selection(_) => ErrorKind::InvalidInput,
                    _ => ErrorKind::Internal,
                };
                let e = Error::new(kind, m).context(node.op.name());
                e.at_origin(&node.origin)
            })?;
            values.tensors[v.0 as usize] = Some(t);
        }
        Ok(())
    }

    fn eval(
        &mut self,
        op: &Op,
        inputs: &[&Tensor],
        regions: &[Graph],
        bindings: &Bindings,
    ) -> Result<Vec<Tensor>> {
        let op = &op.map_dims(&|dim| dim.bind(bindings));
        let (least, most) = op.spec().arity;
        if inputs.len() < least || inputs.len() > most {
            let message = format!(
                "{}: expected {least} to {most} operands, got {}",
                op.name(),
                inputs.len()
            );
            return Err(Error::invalid(message));
        }
        let results = self.dispatch(op, inputs, regions, bindings);
        results.map_err(|e| {
            if e.node().is_none() {
                e.context_once(op)
            } else {
                e
            }
        })
    }

    fn dispatch(
        &mut self,
        op: &Op,
        inputs: &[&Tensor],
        regions: &[Graph],
        bindings: &Bindings,
    ) -> Result<Vec<Tensor>> {
        match op.spec().eval {
            Evaluator::Tensors(_) => {
                self.meter.take_op(op, inputs)?;
                eval_tensors(op, inputs)
            }
            Evaluator::Branch => self.branch(inputs, regions, bindings),
            Evaluator::Repeat => self.repeat(op, inputs, only_region(regions)?, bindings),
            Evaluator::Scan => self.scan(op, inputs, only_region(regions)?, bindings),
            Evaluator::Body => {
                let inputs: Vec<Tensor> = inputs.iter().map(|&t| t.clone()).collect();
                match (op, self.segment) {
                    (Op::Segment { number }, Some(run)) => run(*number, &inputs),
                    _ => self.run(only_region(regions)?, &inputs, bindings),
                }
            }
            Evaluator::Selection(_) => eval_selection(op, inputs),
            Evaluator::Extent => Ok(vec![inputs[0].clone()]),
            Evaluator::Shaped => Ok(vec![shaped(op, inputs[0])?]),
            Evaluator::Read => Ok(vec![self.read(op)?]),
            Evaluator::Assign => self.assign(op, inputs[0]),
            Evaluator::Send => self.send(op, inputs[0]),
            Evaluator::Receive => Ok(vec![self.receive(op)?]),
            Evaluator::Elsewhere => Err(elsewhere(op)),
        }
    }

    fn read(&self, op: &Op) -> Result<Tensor> {
        let Op::ReadVariable {
            container,
            name,
            shape,
            initial,
            ..
        } = op
        else {
            return Err(mismatch(op));
        };
        let label = format!("variable {name:?} of container {container:?}");
        let value = match (self.store.get(container, name), initial) {
            (Some(value), _) => value.clone(),
            (None, Some(initial)) => initial.tensor()?,
            (None, None) => return Err(Error::invalid(format!("{label} has no value"))),
        };
        let expected = Shape(shape.clone()).as_static();
        match expected.filter(|expected| value.shape() != expected) {
            None => Ok(value),
            Some(expected) => Err(Error::invalid(format!(
                "{label} has the shape {:?}, and is read as {expected:?}",
                value.shape()
            ))),
        }
    }

    fn assign(&mut self, op: &Op, x: &Tensor) -> Result<Vec<Tensor>> {
        let Op::AssignVariable { container, name } = op else {
            return Err(mismatch(op));
        };
        self.store.set(container, name, x.clone());
        Ok(vec![x.clone()])
    }

    fn send(&mut self, op: &Op, x: &Tensor) -> Result<Vec<Tensor>> {
        let Op::Send { key, .. } = op else {
            return Err(mismatch(op));
        };
        self.mail.insert(key.clone(), x.clone());
        Ok(vec![x.clone()])
    }

    fn receive(&self, op: &Op) -> Result<Tensor> {
        let Op::Recv { key, from, .. } = op else {
            return Err(mismatch(op));
        };
        self.mail.get(key).cloned().ok_or_else(|| {
            let message =
                format!("nothing was sent under key {key:?} by {from:?} before it is received");
            Error::internal(message)
        })
    }
}

/// Values of a graph during a run, each until its last use.
struct Values {
    tensors: Vec<Option<Tensor>>,
    /// Uses to come.
    uses: Vec<usize>,
}

impl Values {
    /// Errors when an input has another dtype than the graph declares.
    fn new(graph: &Graph, inputs: &[Tensor]) -> Result<Values> {
        let mut tensors = vec![None; graph.n_values()];
        for ((&v, name), t) in graph.inputs.iter().zip(&graph.input_names).zip(inputs) {
            let (expected, got) = (graph.ty(v).dtype, t.dtype());
            if expected != got {
                let message = format!("input {name:?}: expected dtype {expected}, got {got}");
                return Err(Error::invalid(message));
            }
            tensors[v.0 as usize] = Some(t.clone());
        }
        let mut uses = vec![0; graph.n_values()];
        let operands = graph.nodes().flat_map(|(_, n)| n.inputs.iter().copied());
        for v in operands.chain(graph.outputs.iter().map(|o| o.value)) {
            uses[v.0 as usize] += 1;
        }
        Ok(Values { tensors, uses })
    }

    fn get(&self, v: ValueId) -> Result<&Tensor> {
        let t = self.tensors[v.0 as usize].as_ref();
        t.ok_or_else(|| Error::internal("a value is used before it is computed"))
    }

    /// Frees the operands of a node that nothing else uses.
    fn release_operands(&mut self, node: &Node) {
        for v in &node.inputs {
            let i = v.0 as usize;
            self.uses[i] -= 1;
            if self.uses[i] == 0 {
                self.tensors[i] = None;
            }
        }
    }
}

/// The value that a scalar gives a symbol.
pub(crate) fn extent_of(symbol: &str, value: &Tensor) -> Result<usize> {
    let n = value.as_slice::<i64>()[0];
    let extent = usize::try_from(n).ok().filter(|n| *n <= MAX_DIM_SIZE);
    extent.ok_or_else(|| {
        Error::invalid(format!(
            "dim {symbol:?}, which the data decides, is {n}: sizes go from 0 up to {MAX_DIM_SIZE}"
        ))
    })
}

/// Gives symbols without a value that of the extents of a tensor.
fn bind_open(ty: &Type, t: &Tensor, bindings: &mut Bindings) {
    for (symbol, &n) in ty.shape.iter().map(Dim::as_symbol).zip(t.shape()) {
        if let Some(symbol) = symbol.filter(|s| !bindings.contains_key(*s)) {
            bindings.insert(symbol.to_owned(), n);
        }
    }
}

/// The operand, if its shape is what it has to be as far as that is known.
fn shaped(op: &Op, x: &Tensor) -> Result<Tensor> {
    let Op::Shaped { shape } = op else {
        return Err(mismatch(op));
    };
    let mut extents = shape.iter().zip(x.shape());
    if shape.len() == x.shape().len()
        && extents.all(|(d, &n)| d.as_const().is_none_or(|d| d == n as i64))
    {
        return Ok(x.clone());
    }
    let (got, shape) = (x.shape(), Shape(shape.clone()));
    Err(Error::invalid(format!(
        "the data gives shape {got:?} where {shape} is needed"
    )))
}

/// Errors when a result has another type than the graph declares.
fn check_type(ty: &Type, t: &Tensor, bindings: &Bindings) -> Result<(), String> {
    let declared = ty.shape.bind(bindings);
    let fits = declared.as_static().is_none_or(|s| s == t.shape());
    if fits && ty.dtype == t.dtype() {
        return Ok(());
    }
    let got = Type::new(t.dtype(), t.shape().iter().copied());
    Err(format!("declared {}{declared}, got {got}", ty.dtype))
}

fn only_region(regions: &[Graph]) -> Result<&Graph> {
    match regions {
        [body] => Ok(body),
        _ => Err(Error::internal(format!(
            "expected one region, got {}",
            regions.len()
        ))),
    }
}

fn elsewhere(op: &Op) -> Error {
    let Op::Collective { devices, .. } = op else {
        return mismatch(op);
    };
    Error::unsupported(format!(
        "the other operands are on {}; the graph before it was partitioned has them all",
        devices.join(", ")
    ))
}

fn mismatch(op: &Op) -> Error {
    Error::internal(format!("evaluator of another op used for {}", op.name()))
}

impl Error {
    /// Puts the op's name before the message.
    fn context_once(self, op: &Op) -> Error {
        match self.kind() {
            ErrorKind::Internal => self.context(format!("interpreting {}", op.name())),
            _ => self.context(op.name()),
        }
    }
}
