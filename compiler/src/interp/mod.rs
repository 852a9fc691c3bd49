//! The reference interpreter: it defines what every op means, and every other execution is compared with it.
//!
//! Plain code over whole tensors. Floating-point sums and products accumulate in `f64` and round once at the end, so
//! that results are as good as the dtype allows and do not depend on an order; integers wrap. Element-wise ops run
//! their scalar program one primitive at a time, each rounding to its dtype.
//!
//! Errors carry [`ErrorKind::InvalidInput`](crate::ErrorKind) for operands that do not fit and for what only the
//! data shows (an index out of range, an integer division by zero), `OutOfMemory` for impossible sizes, and name the
//! node's origin.

pub mod compare;
mod contract;
mod control;
mod erf;
mod index;
mod map;
mod pool;
mod reduce;
pub mod scalar;
mod sort;
#[cfg(test)]
mod tests;
mod view;

pub use erf::erf;
pub use map::run_program;

use crate::error::{Error, ErrorKind, Result};
use crate::ir::vecprog::VecProg;
use crate::ir::{Bindings, Dim, Graph, Node, Op, Shape, Type};
use gristmill_runtime::Tensor;
use gristmill_runtime::tensor::checked_size_bytes;
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
    Machine {
        store,
        mail: BTreeMap::new(),
    }
    .run(graph, inputs, &Bindings::new())
}

/// Evaluates one op. Attributes must be constant, except that symbols of a region's inputs are bound by the operands.
pub fn eval(op: &Op, inputs: &[&Tensor], regions: &[Graph]) -> Result<Vec<Tensor>> {
    Machine {
        store: &mut Store::new(),
        mail: BTreeMap::new(),
    }
    .eval(op, inputs, regions, &Bindings::new())
}

/// State during a run.
struct Machine<'a> {
    store: &'a mut Store,
    /// Tensors sent so far, by key.
    mail: BTreeMap<String, Tensor>,
}

/// The extents of a shape under bindings.
fn concrete(shape: &[Dim], bindings: &Bindings) -> Result<Vec<usize>> {
    let shape = Shape(shape.to_vec()).bind(bindings);
    shape
        .as_static()
        .ok_or_else(|| Error::invalid(format!("shape {shape} is not known, or negative")))
}

impl Machine<'_> {
    fn run(&mut self, graph: &Graph, inputs: &[Tensor], outer: &Bindings) -> Result<Vec<Tensor>> {
        let shapes: Vec<Vec<usize>> = inputs.iter().map(|t| t.shape().to_vec()).collect();
        let mut bindings = outer.clone();
        bindings.extend(graph.bindings_for(&shapes)?);
        let mut values: Vec<Option<Tensor>> = vec![None; graph.n_values()];
        for (i, (&v, t)) in graph.inputs.iter().zip(inputs).enumerate() {
            if graph.ty(v).dtype != t.dtype() {
                let (name, expected) = (&graph.input_names[i], graph.ty(v).dtype);
                return Err(Error::invalid(format!(
                    "input {name:?}: expected dtype {expected}, got {}",
                    t.dtype()
                )));
            }
            values[v.0 as usize] = Some(t.clone());
        }
        let mut uses = vec![0usize; graph.n_values()];
        graph
            .nodes()
            .flat_map(|(_, n)| &n.inputs)
            .for_each(|v| uses[v.0 as usize] += 1);
        graph
            .outputs
            .iter()
            .for_each(|o| uses[o.value.0 as usize] += 1);
        for (_, node) in graph.nodes() {
            self.step(graph, node, &mut values, &bindings)?;
            for v in &node.inputs {
                uses[v.0 as usize] -= 1;
                if uses[v.0 as usize] == 0 {
                    values[v.0 as usize] = None;
                }
            }
        }
        let read = |v: u32| {
            values[v as usize]
                .clone()
                .ok_or_else(|| Error::internal("an output has no value"))
        };
        graph.outputs.iter().map(|o| read(o.value.0)).collect()
    }

    /// Evaluates one node and stores its results, whose types must be the declared ones.
    fn step(
        &mut self,
        graph: &Graph,
        node: &Node,
        values: &mut [Option<Tensor>],
        bindings: &Bindings,
    ) -> Result<()> {
        let results = {
            let operand = |v: &crate::ir::ValueId| {
                values[v.0 as usize]
                    .as_ref()
                    .ok_or_else(|| Error::internal("an operand has no value"))
            };
            let inputs: Vec<&Tensor> = node.inputs.iter().map(operand).collect::<Result<_>>()?;
            self.eval(&node.op, &inputs, &node.regions, bindings)
                .map_err(|e| e.at_origin(&node.origin))?
        };
        for (&v, t) in node.outputs.iter().zip(results) {
            let ty = graph.ty(v);
            let declared = ty.shape.bind(bindings);
            if ty.dtype != t.dtype() || declared.as_static().is_some_and(|s| s != t.shape()) {
                let got = Type::new(t.dtype(), t.shape().iter().copied());
                let message = format!(
                    "{}: declared {}{declared}, got {got}",
                    node.op.name(),
                    ty.dtype
                );
                return Err(Error::internal(message).at_origin(&node.origin));
            }
            values[v.0 as usize] = Some(t);
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
        let op = &op.bind(bindings);
        let (least, most) = op.spec().arity;
        if inputs.len() < least || inputs.len() > most {
            let message = format!(
                "{}: expected {least} to {most} operands, got {}",
                op.name(),
                inputs.len()
            );
            return Err(Error::invalid(message));
        }
        let results = match regions {
            [] => self.eval_tensor_op(op, inputs, bindings),
            _ => self.eval_regions(op, inputs, regions, bindings),
        };
        results.map_err(|e| {
            if e.node().is_none() {
                e.context_once(op)
            } else {
                e
            }
        })
    }

    fn eval_regions(
        &mut self,
        op: &Op,
        inputs: &[&Tensor],
        regions: &[Graph],
        bindings: &Bindings,
    ) -> Result<Vec<Tensor>> {
        match (op, regions) {
            (Op::If, [_, _]) => self.branch(inputs, regions, bindings),
            (Op::Loop { carried, trip }, [body]) => {
                // Without stacked results the extent has no use, and may be unknown.
                let stacks = body.outputs.len() > 1 + carried;
                let trip = if stacks {
                    concrete(std::slice::from_ref(trip), bindings)?[0]
                } else {
                    0
                };
                self.repeat((*carried, trip), inputs, body, bindings)
            }
            (
                Op::Scan {
                    carried,
                    scanned,
                    length,
                    reverse,
                },
                [body],
            ) => {
                let length = concrete(std::slice::from_ref(length), bindings)?[0];
                self.scan(
                    (*carried, *scanned, length, *reverse),
                    inputs,
                    body,
                    bindings,
                )
            }
            (Op::Cluster { .. }, [body]) => self.run(
                body,
                &inputs.iter().map(|&t| t.clone()).collect::<Vec<_>>(),
                bindings,
            ),
            _ => Err(Error::internal(format!(
                "{} regions do not fit",
                regions.len()
            ))),
        }
    }

    /// Every op without regions. The type rule vouches for operands and gives the results' shapes.
    fn eval_tensor_op(
        &mut self,
        op: &Op,
        inputs: &[&Tensor],
        bindings: &Bindings,
    ) -> Result<Vec<Tensor>> {
        let types: Vec<Type> = inputs
            .iter()
            .map(|t| Type::new(t.dtype(), t.shape().iter().copied()))
            .collect();
        let types = (op.spec().infer)(op, &types, &[]).map_err(Error::invalid)?;
        let shape = &concrete(&types[0].shape, bindings)?;
        for t in &types {
            checked_size_bytes(t.dtype, &concrete(&t.shape, bindings)?)?;
        }
        let x = inputs.first().copied();
        let one = match (op, inputs) {
            (Op::Map(s), _) => {
                let dtypes: Vec<_> = inputs.iter().map(|t| t.dtype()).collect();
                return run_program(&VecProg::of_op(*s, &dtypes), inputs, shape);
            }
            (Op::AllReduce { kind }, all) => return reduce::all_reduce(all, *kind),
            (Op::AllReduceRank { kind, .. }, all) => {
                return Ok(reduce::all_reduce(all, *kind)?[..1].to_vec());
            }
            (Op::TopK { axis, largest, .. }, [x]) => return sort::top_k(x, *axis, *largest, shape),
            (Op::MaxPoolIndices { size, window, .. }, [x]) => {
                return pool::max_pool(x, size, window, shape);
            }
            (Op::Constant { value }, _) => value.tensor(),
            (Op::Iota { dtype, axis, .. }, _) => view::iota(*dtype, shape, *axis),
            (Op::Broadcast { .. }, [x]) => view::broadcast(x, shape),
            (Op::Reshape { .. }, [x]) => Ok(x.reshaped(shape)?),
            (Op::Transpose { perm }, [x]) => view::transpose(x, perm),
            // An empty slice may start outside.
            (Op::Slice { .. }, [x]) if shape.contains(&0) => Ok(Tensor::zeros(x.dtype(), shape)?),
            (Op::Slice { starts, steps, .. }, [x]) => {
                view::slice(x, &concrete(starts, bindings)?, shape, steps)
            }
            (Op::Pad { low, high, mode }, [x, rest @ ..]) => {
                view::pad(x, rest.first().copied(), low, high, *mode)
            }
            (Op::Concat { axis }, parts) => view::concat(parts, *axis, shape),
            (Op::Gather { axis }, [x, i]) => index::gather(x, i, *axis, shape),
            (Op::GatherElements { axis }, [x, i]) => index::gather_elements(x, i, *axis),
            (Op::GatherNd { batch_dims }, [x, i]) => index::gather_nd(x, i, *batch_dims, shape),
            (Op::ScatterElements { axis, kind }, [x, i, u]) => {
                index::scatter_elements(x, i, u, *axis, *kind)
            }
            (Op::ScatterNd { kind }, [x, i, u]) => index::scatter_nd(x, i, u, *kind),
            (Op::Reduce { kind, axes, .. }, [x]) => reduce::reduce(x, *kind, axes, shape),
            (
                Op::ArgReduce {
                    kind,
                    axis,
                    select_last,
                    ..
                },
                [x],
            ) => reduce::arg_reduce(x, *kind, *axis, *select_last, shape),
            (Op::Softmax { axis, log }, [x]) => reduce::softmax(x, *axis, *log),
            (Op::LayerNorm { epsilon, .. }, [x, gamma, beta]) => {
                reduce::layer_norm(x, gamma, beta, epsilon.0)
            }
            (Op::RmsNorm { epsilon, .. }, [x, gamma]) => reduce::rms_norm(x, gamma, epsilon.0),
            (
                Op::CumSum {
                    axis,
                    exclusive,
                    reverse,
                },
                [x],
            ) => reduce::cum_sum(x, *axis, *exclusive, *reverse),
            (
                Op::MatMul | Op::Conv { .. } | Op::ConvTranspose { .. } | Op::Attention { .. },
                [x, ..],
            ) if shape.contains(&0) => Ok(Tensor::zeros(x.dtype(), shape)?),
            (Op::MatMul, [a, b]) => contract::matmul(a, b, shape),
            (
                Op::Conv {
                    window,
                    groups,
                    layout,
                },
                [x, w],
            ) => contract::conv(x, w, window, *groups, *layout, shape),
            (Op::ConvTranspose { window, groups, .. }, [x, w]) => {
                contract::conv_transpose(x, w, window, *groups, shape)
            }
            (
                Op::Pool {
                    kind,
                    size,
                    window,
                    layout,
                    ..
                },
                [x],
            ) => pool::pool(x, *kind, size, window, *layout, shape),
            (Op::Attention { scale, causal }, [q, k, v, mask @ ..]) => {
                contract::attention([q, k, v], mask.first().copied(), scale.0, *causal, shape)
            }
            _ => self.eval_effect(op, x),
        };
        Ok(vec![one?])
    }

    /// Ops on variables and channels.
    fn eval_effect(&mut self, op: &Op, x: Option<&Tensor>) -> Result<Tensor> {
        match (op, x) {
            (
                Op::ReadVariable {
                    container, name, ..
                },
                None,
            ) => self.store.get(container, name).cloned().ok_or_else(|| {
                Error::invalid(format!(
                    "variable {name:?} of container {container:?} has no value"
                ))
            }),
            (Op::AssignVariable { container, name }, Some(x)) => {
                self.store.set(container, name, x.clone());
                Ok(x.clone())
            }
            (Op::Send { key, .. }, Some(x)) => {
                self.mail.insert(key.clone(), x.clone());
                Ok(x.clone())
            }
            (Op::Recv { key, from, .. }, None) => self.mail.get(key).cloned().ok_or_else(|| {
                Error::internal(format!(
                    "nothing was sent under key {key:?} by {from:?} before it is received"
                ))
            }),
            (Op::Collective { devices, .. }, Some(_)) => Err(Error::unsupported(format!(
                "the other operands are on {}; the graph before it was partitioned has them all",
                devices.join(", ")
            ))),
            _ => Err(Error::internal(
                "the interpreter has no rule for these operands",
            )),
        }
    }
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
