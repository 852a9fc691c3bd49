//! Reverse-mode differentiation: a pass that adds gradients to a graph.
//!
//! [`grad`] works on a finished graph, [`GraphBuilder::grad`] on one under construction. The rules are a column of the op
//! table, [`ir::gradient`](crate::ir::gradient); this pass finds the nodes that need them ([`activity`]) and walks them
//! backwards ([`sweep`]). The gradient of an `If` is one on the same condition ([`branches`]), that of a scan one the other way ([`steps`]);
//! a loop of a known number of iterations is made a scan first ([`loops`]).
//!
//! Gradients are those of values. Of a variable that is read twice, each read is a value of its own, and the gradient
//! of one counts the uses of that read alone.
//!
//! A value gets the sum of the contributions of its uses: the last use first, added from left to right. Gradients are
//! made of ops of the table, so that they can be differentiated themselves, and have the origins `grad(ORIGIN)` and the
//! device requests of the nodes that they belong to.
//!
//! ```
//! use gristmill::ir::GraphBuilder;
//! use gristmill::DType;
//! let mut b = GraphBuilder::new("square");
//! let x = b.input("x", DType::F32, [] as [usize; 0]);
//! let y = b.mul(x, x)?;
//! let dx = b.grad(y, &[x])?[0];
//! b.output("dx", dx);
//! # b.finish()?;
//! # Ok::<(), gristmill::Error>(())
//! ```

mod activity;
mod branches;
mod loops;
mod products;
mod steps;
mod sweep;
#[cfg(test)]
pub(crate) mod tests;
mod tiles;

use crate::error::{Error, Result};
use crate::ir::verify::verify;
use crate::ir::{Def, Graph, GraphBuilder, Op, ValueId};
use activity::Activity;
use std::panic::Location;
use sweep::Sweep;

/// Options of a differentiation.
#[derive(Clone, Debug, Default)]
pub struct GradOptions {
    /// Gives zeros for a value that the loss does not depend on, which is an error otherwise.
    pub allow_unused: bool,
    /// Values that count as constants: no gradient flows to their operands.
    pub stop: Vec<ValueId>,
}

/// A copy of the graph with an output `grad/NAME` for each value of `wrt`, in this order: the gradient of `loss`.
///
/// NAME is that of the input, output or variable, or the number of the value. A name that is taken gets a number behind it.
///
/// Errors with `InvalidInput` when `loss` is not one floating-point element, when a value of `wrt` is not of a
/// floating-point type, and when `loss` does not depend on it; with `Unsupported`, naming the node, when an op between
/// them has no gradient.
pub fn grad(graph: &Graph, loss: ValueId, wrt: &[ValueId], options: &GradOptions) -> Result<Graph> {
    let mut out = graph.clone();
    let gradients = append_gradients(&mut out, loss, wrt, options)?;
    name_outputs(&mut out, wrt, &gradients);
    verify(&out)?;
    Ok(out)
}

fn name_outputs(graph: &mut Graph, wrt: &[ValueId], gradients: &[ValueId]) {
    let names: Vec<String> = wrt.iter().map(|&v| name_of(graph, v)).collect();
    for (name, &gradient) in names.iter().zip(gradients) {
        let is_taken = |name: &str| graph.outputs.iter().any(|o| o.name == name);
        let name = free_name(&format!("grad/{name}"), is_taken);
        graph.add_output(&name, gradient);
    }
}

impl GraphBuilder {
    /// Gradients of `loss`, one per value of `wrt`: see [`grad`]. Open scopes do not apply to their nodes, which are where
    /// those of the loss are.
    #[track_caller]
    pub fn grad(&mut self, loss: ValueId, wrt: &[ValueId]) -> Result<Vec<ValueId>> {
        self.grad_with(loss, wrt, &GradOptions::default())
    }

    /// [`GraphBuilder::grad`] with options.
    #[track_caller]
    pub fn grad_with(
        &mut self,
        loss: ValueId,
        wrt: &[ValueId],
        options: &GradOptions,
    ) -> Result<Vec<ValueId>> {
        let at = Location::caller();
        let values = arguments(loss, wrt, options);
        values.iter().try_for_each(|&v| self.check_own(v, at))?;
        // Appended to a copy, so that an error leaves no nodes behind.
        let mut graph = self.graph().clone();
        let gradients = append_gradients(&mut graph, loss, wrt, options)?;
        *self.graph_mut() = graph;
        Ok(gradients.into_iter().map(|v| self.adopted(v)).collect())
    }
}

/// Appends the gradients of `loss` to a graph, and gives them in the order of `wrt`.
fn append_gradients(
    graph: &mut Graph,
    loss: ValueId,
    wrt: &[ValueId],
    options: &GradOptions,
) -> Result<Vec<ValueId>> {
    check_values(graph, &arguments(loss, wrt, options))?;
    check_loss(graph, loss)?;
    wrt.iter().try_for_each(|&v| check_wrt(graph, v))?;
    let activity = prepared(graph, |g| Activity::new(g, &[loss], wrt, &options.stop))?;
    activity.check_rules(graph)?;
    if !options.allow_unused {
        activity.check_used(graph, wrt)?;
    }
    let mut sweep = Sweep::new(graph, &activity);
    sweep.run(loss)?;
    wrt.iter().map(|&v| sweep.gradient(v)).collect()
}

/// Turns active loops into scans where it can, and gives the activity of the graph.
fn prepared(graph: &mut Graph, analysed: impl Fn(&Graph) -> Activity) -> Result<Activity> {
    let activity = analysed(graph);
    loops::to_scans(graph, &activity)?;
    Ok(analysed(graph))
}

/// All values that a call names.
fn arguments(loss: ValueId, wrt: &[ValueId], options: &GradOptions) -> Vec<ValueId> {
    [&[loss], wrt, &options.stop].concat()
}

/// The values among `values` that none of `losses` depends on through floating-point values.
pub(crate) fn unreached(graph: &Graph, losses: &[ValueId], values: &[ValueId]) -> Vec<ValueId> {
    let activity = Activity::new(graph, losses, values, &[]);
    let mut values = values.to_vec();
    values.retain(|&v| !activity.is_active(v));
    values
}

/// An error for each node between `losses` and `values` that has no gradient.
pub(crate) fn without_gradient(
    graph: &Graph,
    losses: &[ValueId],
    values: &[ValueId],
) -> Vec<Error> {
    let mut graph = graph.clone();
    match prepared(&mut graph, |g| Activity::new(g, losses, values, &[])) {
        Ok(activity) => activity.missing_rules(&graph).collect(),
        Err(e) => vec![e],
    }
}

fn check_values(graph: &Graph, values: &[ValueId]) -> Result<()> {
    match values.iter().find(|v| v.0 as usize >= graph.n_values()) {
        None => Ok(()),
        Some(v) => Err(Error::invalid(format!(
            "value {} is not of graph {:?}",
            v.0, graph.name
        ))),
    }
}

fn check_loss(graph: &Graph, loss: ValueId) -> Result<()> {
    let ty = graph.ty(loss);
    if ty.dtype.is_float() && ty.shape.n_elements().is(1) {
        return Ok(());
    }
    let name = name_of(graph, loss);
    let message = format!("loss {name:?} is {ty}: expected one floating-point element");
    Err(Error::invalid(message))
}

fn check_wrt(graph: &Graph, v: ValueId) -> Result<()> {
    let ty = graph.ty(v);
    if ty.dtype.is_float() {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "{:?} is {ty}: only floating-point values have gradients",
        name_of(graph, v)
    )))
}

/// Name of a value for messages and outputs.
fn name_of(graph: &Graph, v: ValueId) -> String {
    let output = graph.outputs.iter().find(|o| o.value == v);
    let name = output.map(|o| &o.name).or_else(|| source_name(graph, v));
    name.map_or_else(|| v.0.to_string(), String::clone)
}

/// Name of an input or a variable.
fn source_name(graph: &Graph, v: ValueId) -> Option<&String> {
    if let Def::Input(i) = graph.value(v).def {
        return graph.input_names.get(i as usize);
    }
    match &graph.def_node(v)?.op {
        Op::ReadVariable { name, .. } => Some(name),
        _ => None,
    }
}

/// The name, or with the least number from 2 on behind it, that is not taken.
fn free_name(name: &str, is_taken: impl Fn(&str) -> bool) -> String {
    let mut free = name.to_owned();
    let mut n = 1;
    while is_taken(&free) {
        n += 1;
        free = format!("{name}#{n}");
    }
    free
}
