//! A step of training in three parts, for workers in no step with each other: the pull reads the variables, a
//! worker computes gradients of a batch by the values pulled, and the push reads the variables again and assigns
//! their next values by these gradients.
//!
//! (Li et al., Scaling Distributed Machine Learning with the Parameter Server, OSDI 2014, section 3.1.)

use super::{Rebuild, forward_state};
use crate::error::{Error, Result};
use crate::ir::{Def, Graph, Node, NodeId, Op, OpClass, ValueId};
use crate::schedule::{Variable, variable_uses};
use std::collections::{BTreeMap, BTreeSet};

/// The parts of a step.
pub struct PushPull {
    /// Reads the variables: one output each, with the name of an input of `compute`.
    pub pull: Graph,
    /// A worker's part. Inputs: those of the step, then the variables. Outputs: those of the step but for the
    /// push's, then the values for the push.
    pub compute: Graph,
    /// The updates. Inputs: values of `compute`, by the names of its outputs.
    pub push: Graph,
}

/// Cuts a step. Gradients go from `compute` to `push`, and so do further operands of the updates, such as a
/// common norm, or means of a batch for moving averages.
///
/// Errors with `Unsupported`, naming the node, on control dependencies, on variables in regions, on an
/// update by a value of each example, and on a use of a variable's next value outside the updates.
pub fn push_pull(g: &Graph, gradients: &[ValueId]) -> Result<PushPull> {
    g.nodes().try_for_each(|(_, node)| check(node))?;
    let mut marked = g.clone();
    gradients.iter().for_each(|&v| marked.add_output("", v));
    let mut g = forward_state(&marked)?;
    let gradients = g.outputs.split_off(g.outputs.len() - gradients.len());
    let gradients = gradients.into_iter().map(|o| o.value).collect();
    Cut::of(&g, &gradients)?.graphs()
}

fn refused(node: &Node, why: &str) -> Error {
    let message = format!("asynchronous training: {why}");
    let e = Error::unsupported(message).at_origin(&node.origin);
    e.hint("a strategy with updates in step")
}

fn check(node: &Node) -> Result<()> {
    if !node.control.is_empty() {
        return Err(refused(node, "the node has control dependencies"));
    }
    match node.regions.iter().any(Graph::has_state) {
        true => Err(refused(node, "a branch or loop uses variables")),
        false => Ok(()),
    }
}

/// The nodes of the push, and its inputs.
struct Cut<'g> {
    g: &'g Graph,
    /// By node.
    in_push: Vec<bool>,
    passed: BTreeSet<ValueId>,
}

impl<'g> Cut<'g> {
    fn of(g: &'g Graph, gradients: &BTreeSet<ValueId>) -> Result<Cut<'g>> {
        let mut cut = Cut {
            g,
            in_push: joins_variables(g, gradients),
            passed: BTreeSet::new(),
        };
        cut.keep_needed()?;
        cut.check_reads(gradients)?;
        Ok(cut)
    }

    /// Errors on a passed value that a worker computes from a variable, for the update of this variable: updates of
    /// others since the pull would be lost. Gradients are meant so.
    fn check_reads(&self, gradients: &BTreeSet<ValueId>) -> Result<()> {
        let others = self.passed.iter().filter(|v| !gradients.contains(v));
        let reads: Vec<(ValueId, BTreeSet<Variable>)> = others
            .map(|&v| (v, self.variables_behind(v, gradients)))
            .collect();
        for (_, node) in self.g.nodes().filter(|(_, node)| is_assignment(node)) {
            let passed = self.passed_to(node);
            for (variable, _) in variable_uses(node) {
                let mut lost = reads.iter();
                let lost = lost.find(|(v, reads)| passed.contains(v) && reads.contains(&variable));
                if let Some((v, _)) = lost {
                    let maker = self.g.def_node(*v).unwrap_or(node);
                    let why = format!(
                        "the update of variable {:?} is not element by element, so that updates of other workers would be lost",
                        variable.1
                    );
                    return Err(refused(maker, &why));
                }
            }
        }
        Ok(())
    }

    /// The variables that a value depends on, other than by gradients.
    fn variables_behind(
        &self,
        v: ValueId,
        gradients: &BTreeSet<ValueId>,
    ) -> BTreeSet<Variable<'g>> {
        let mut values = BTreeSet::from([v]);
        let mut found = BTreeSet::new();
        for (_, node) in self.g.nodes().rev() {
            let is_behind = |v: &ValueId| values.contains(v) && !gradients.contains(v);
            if node.outputs.iter().any(is_behind) {
                found.extend(
                    variable_uses(node)
                        .into_iter()
                        .map(|(variable, _)| variable),
                );
                values.extend(&node.inputs);
            }
        }
        found
    }

    /// The values that the push takes for an assignment.
    fn passed_to(&self, assignment: &Node) -> BTreeSet<ValueId> {
        let mut values: BTreeSet<ValueId> = assignment.inputs.iter().copied().collect();
        for (id, node) in self.g.nodes().rev() {
            if self.in_push[id.0 as usize] && node.outputs.iter().any(|v| values.contains(v)) {
                values.extend(&node.inputs);
            }
        }
        values.retain(|v| self.passed.contains(v));
        values
    }

    fn is_in_push(&self, v: ValueId) -> bool {
        matches!(self.g.value(v).def, Def::Node(id, _) if self.in_push[id.0 as usize])
    }

    /// Drops nodes without effect on an assignment, and finds the values to pass.
    fn keep_needed(&mut self) -> Result<()> {
        let mut needed: BTreeSet<ValueId> = BTreeSet::new();
        for (id, node) in self.g.nodes().rev() {
            let is_needed = is_assignment(node) || node.outputs.iter().any(|v| needed.contains(v));
            self.in_push[id.0 as usize] &= is_needed;
            if !self.in_push[id.0 as usize] {
                continue;
            }
            for &v in &node.inputs {
                if self.is_in_push(v) {
                    needed.insert(v);
                    continue;
                }
                if self.g.ty(v).static_shape().is_none() {
                    let why = "an update needs a value of the batch, and a push has gradients and variables alone";
                    return Err(refused(node, why));
                }
                self.passed.insert(v);
            }
        }
        Ok(())
    }

    fn graphs(&self) -> Result<PushPull> {
        let mut names: BTreeSet<String> = self.g.input_names.iter().cloned().collect();
        names.extend(self.g.outputs.iter().map(|o| o.name.clone()));
        let passed: BTreeMap<ValueId, String> = (self.passed.iter())
            .map(|&v| (v, fresh(&mut names, self.label(v))))
            .collect();
        let (compute, reads) = self.compute(&mut names, &passed)?;
        Ok(PushPull {
            pull: self.pull(&reads)?,
            compute,
            push: self.push(&passed)?,
        })
    }

    /// A name for a passed value.
    fn label(&self, v: ValueId) -> String {
        let origin = self.g.def_node(v).map(|node| node.origin.to_string());
        format!("push {}", origin.unwrap_or_default())
    }

    /// The outputs of a worker.
    fn outputs<'n>(&'n self, passed: &'n BTreeMap<ValueId, String>) -> Vec<(ValueId, &'n str)> {
        let own = self.g.outputs.iter();
        let own = own.filter(|o| !self.is_in_push(o.value));
        let own = own.map(|o| (o.value, o.name.as_str()));
        own.chain(passed.iter().map(|(&v, name)| (v, name.as_str())))
            .collect()
    }

    /// The worker's part, and the name of each variable's value.
    fn compute(
        &self,
        names: &mut BTreeSet<String>,
        passed: &BTreeMap<ValueId, String>,
    ) -> Result<(Graph, BTreeMap<NodeId, String>)> {
        let outputs = self.outputs(passed);
        let needed = self.needed(outputs.iter().map(|(v, _)| *v))?;
        let nodes = self.g.nodes().filter(|(id, _)| needed.contains(id));
        let mut r = Rebuild::new(self.g);
        let mut reads = BTreeMap::new();
        for (id, node) in nodes {
            let Op::ReadVariable { name, .. } = &node.op else {
                r.copy(id, node)?;
                continue;
            };
            let name = fresh(names, format!("pull {name}"));
            let value = node.outputs[0];
            let input = r.graph.add_input(&name, self.g.ty(value).clone());
            r.set(value, input);
            reads.insert(id, name);
        }
        for (v, name) in outputs {
            let new = r.get(v);
            r.graph.add_output(name, new);
        }
        Ok((r.graph, reads))
    }

    /// The nodes of a worker, with the reads of variables.
    fn needed(&self, roots: impl Iterator<Item = ValueId>) -> Result<BTreeSet<NodeId>> {
        let mut values: BTreeSet<ValueId> = roots.collect();
        let mut nodes = BTreeSet::new();
        for (id, node) in self.g.nodes().rev() {
            if !node.outputs.iter().any(|v| values.contains(v)) {
                continue;
            }
            if is_assignment(node) {
                let why = "a worker needs the next value of a variable, which only the push has";
                return Err(refused(node, why));
            }
            nodes.insert(id);
            values.extend(&node.inputs);
        }
        Ok(nodes)
    }

    fn pull(&self, reads: &BTreeMap<NodeId, String>) -> Result<Graph> {
        let mut r = Rebuild::onto(self.g, self.g.emptied());
        for (&id, name) in reads {
            let node = self.g.node(id);
            r.copy(id, node)?;
            let value = r.get(node.outputs[0]);
            r.graph.add_output(name, value);
        }
        Ok(r.graph)
    }

    fn push(&self, passed: &BTreeMap<ValueId, String>) -> Result<Graph> {
        let mut r = Rebuild::onto(self.g, self.g.emptied());
        for (&v, name) in passed {
            let value = r.graph.add_input(name, self.g.ty(v).clone());
            r.set(v, value);
        }
        for (id, node) in self.g.nodes().filter(|(id, _)| self.in_push[id.0 as usize]) {
            r.copy(id, node)?;
        }
        for o in self.g.outputs.iter().filter(|o| self.is_in_push(o.value)) {
            let value = r.get(o.value);
            r.graph.add_output(&o.name, value);
        }
        Ok(r.graph)
    }
}

/// The graph without the assignments of one variable.
pub fn without_assignment(g: &Graph, variable: &str) -> Result<Graph> {
    let mut r = Rebuild::new(g);
    for (id, node) in g.nodes() {
        match &node.op {
            Op::AssignVariable { name, .. } if name == variable => {
                let value = r.get(node.inputs[0]);
                r.set(node.outputs[0], value);
            }
            _ => r.copy(id, node)?,
        }
    }
    for o in &g.outputs {
        let value = r.get(o.value);
        r.graph.add_output(&o.name, value);
    }
    Ok(r.graph)
}

/// By node: true for assignments, and for the nodes before them without an example, or by which gradients and
/// variables are joined element by element.
fn joins_variables(g: &Graph, gradients: &BTreeSet<ValueId>) -> Vec<bool> {
    let has_example = has_example(g);
    let mut is_behind = vec![false; g.n_values()];
    let mut may_push = vec![false; g.n_nodes()];
    for (id, node) in g.nodes().rev() {
        let is_wanted = |v: &ValueId| is_behind[v.0 as usize] && !gradients.contains(v);
        let is_joined = match node.op.class() {
            OpClass::Map | OpClass::View => true,
            _ => !any_of(&node.outputs, &has_example),
        };
        if is_assignment(node) || is_joined && node.outputs.iter().any(is_wanted) {
            may_push[id.0 as usize] = true;
            let inputs = node.inputs.iter();
            inputs.for_each(|v| is_behind[v.0 as usize] = true);
        }
    }
    leave_to_workers(g, &has_example, &mut may_push);
    may_push
}

/// By value: true for the examples of a batch and for their descendants.
fn has_example(g: &Graph) -> Vec<bool> {
    let mut found = vec![false; g.n_values()];
    let inputs = g.inputs.iter();
    inputs.for_each(|v| found[v.0 as usize] = true);
    for (_, node) in g.nodes() {
        let any = any_of(&node.inputs, &found);
        let outputs = node.outputs.iter();
        outputs.for_each(|v| found[v.0 as usize] = any);
    }
    found
}

/// Takes nodes with examples, but without a variable, from the push.
fn leave_to_workers(g: &Graph, has_example: &[bool], may_push: &mut [bool]) {
    let mut has_variable = vec![false; g.n_values()];
    for (id, node) in g.nodes() {
        let may = &mut may_push[id.0 as usize];
        let any = any_of(&node.inputs, &has_variable) || !variable_uses(node).is_empty();
        for v in &node.outputs {
            has_variable[v.0 as usize] = *may && any;
        }
        *may &= any || !any_of(&node.outputs, has_example);
    }
}

fn any_of(values: &[ValueId], is: &[bool]) -> bool {
    values.iter().any(|v| is[v.0 as usize])
}

fn is_assignment(node: &Node) -> bool {
    matches!(node.op, Op::AssignVariable { .. })
}

/// A free name.
fn fresh(names: &mut BTreeSet<String>, name: String) -> String {
    let numbered = (2..).map(|i| format!("{name} {i}"));
    let mut candidates = std::iter::once(name.clone()).chain(numbered);
    let free = candidates.find(|name| !names.contains(name));
    let free = free.unwrap_or(name);
    names.insert(free.clone());
    free
}

#[cfg(test)]
mod tests;
