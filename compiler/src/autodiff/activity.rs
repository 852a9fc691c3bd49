//! Activity analysis: the nodes between the loss and the values that it is differentiated by.
//!
//! A value is *varied* when it depends on one of them through floating-point results, and *useful* when the loss depends
//! on it (Hascoet and Pascual, ACM TOMS 39(3), 2013, section 2). Values that are both get cotangents. Dependence ends at
//! integers and `bool`, at ops of zero gradient, and at values that count as constants.

use super::branches::{captured, formals, has_branches};
use super::{loops, name_of};
use crate::error::{Error, Result};
use crate::ir::gradient::{Gradient, no_gradient};
use crate::ir::{Graph, Node, Op, ValueId};
use std::collections::BTreeSet;

/// Reason of reads behind an assignment.
const READ_BACK: &str =
    "the variable was assigned before in the same run; the result of the assignment has a gradient";

/// Varied and useful values of a graph.
pub struct Activity {
    varied: Vec<bool>,
    useful: Vec<bool>,
    stopped: Vec<bool>,
}

impl Activity {
    /// Analyses a graph; the values are all of it.
    pub fn new(graph: &Graph, losses: &[ValueId], wrt: &[ValueId], stop: &[ValueId]) -> Activity {
        let mut activity = Activity::constant(graph);
        mark(&mut activity.stopped, stop);
        activity.spread_varied(graph, wrt);
        activity.spread_useful(graph, losses);
        activity
    }

    /// Nothing varied, nothing useful.
    fn constant(graph: &Graph) -> Activity {
        let none = vec![false; graph.n_values()];
        Activity {
            varied: none.clone(),
            useful: none.clone(),
            stopped: none,
        }
    }

    fn spread_varied(&mut self, graph: &Graph, from: &[ValueId]) {
        mark(&mut self.varied, from);
        for (_, node) in graph.nodes() {
            if is_any(&self.varied, &node.inputs) {
                let mut results = self.passing(graph, node);
                if has_branches(node) {
                    let varied = self.varied_in_branches(node);
                    results.retain(|v| varied.contains(v));
                }
                mark(&mut self.varied, &results);
            }
        }
    }

    fn spread_useful(&mut self, graph: &Graph, from: &[ValueId]) {
        mark(&mut self.useful, from);
        for (_, node) in graph.nodes().rev() {
            let mut results = self.passing(graph, node);
            results.retain(|v| self.useful[v.0 as usize]);
            if !results.is_empty() {
                mark(&mut self.useful, &useful_operands(node, &results));
            }
        }
    }

    /// The results of a node that vary in one of its branches.
    fn varied_in_branches(&self, node: &Node) -> BTreeSet<ValueId> {
        let regions = node.regions.iter();
        regions.flat_map(|r| self.varied_in(node, r)).collect()
    }

    /// The results of a node that vary in one of its regions.
    fn varied_in(&self, node: &Node, region: &Graph) -> Vec<ValueId> {
        let mut inner = Activity::constant(region);
        let varied = formals(node, region, |v| self.varied[v.0 as usize]);
        inner.spread_varied(region, &varied);
        let results = node.outputs.iter().zip(&region.outputs);
        let varied = results.filter(|(_, o)| inner.varied[o.value.0 as usize]);
        varied.map(|(&v, _)| v).collect()
    }

    /// The results of a node whose cotangents reach its operands.
    fn passing(&self, graph: &Graph, node: &Node) -> Vec<ValueId> {
        if matches!(node.op.spec().gradient, Gradient::Zero) {
            return Vec::new();
        }
        let results = node.outputs.iter().copied();
        results.filter(|&v| self.passes(graph, v)).collect()
    }

    /// True for a value whose cotangent reaches the operands of its node, unless the op's gradient is zero.
    pub fn passes(&self, graph: &Graph, v: ValueId) -> bool {
        graph.ty(v).dtype.is_float() && !self.stopped[v.0 as usize]
    }

    /// True for a value that gets a cotangent.
    pub fn is_active(&self, v: ValueId) -> bool {
        self.varied[v.0 as usize] && self.useful[v.0 as usize]
    }

    /// True for a node that passes cotangents on.
    pub fn is_active_node(&self, graph: &Graph, node: &Node) -> bool {
        let is_any_active = |values: &[ValueId]| values.iter().any(|&v| self.is_active(v));
        is_any_active(&self.passing(graph, node)) && is_any_active(&node.inputs)
    }

    /// Errors, naming the first node, when an active node has no gradient.
    pub fn check_rules(&self, graph: &Graph) -> Result<()> {
        match self.missing_rules(graph).next() {
            Some(e) => Err(e),
            None => self.check_reads(graph),
        }
    }

    /// An error for each active node that has no gradient.
    pub fn missing_rules(&self, graph: &Graph) -> impl Iterator<Item = Error> {
        let active = graph.nodes().filter(|(_, n)| self.is_active_node(graph, n));
        active.filter_map(|(_, node)| match node.op.spec().gradient {
            Gradient::None(why) => Some(no_gradient(node, why)),
            Gradient::Iterations => Some(loops::refusal(graph, node)),
            _ => None,
        })
    }

    /// Errors when the loss depends on the read of a variable to which the run has assigned a varied value: the dependence
    /// goes through the state, where no gradient flows. Reads and assignments of regions are those of their node.
    fn check_reads(&self, graph: &Graph) -> Result<()> {
        let mut assigned = BTreeSet::new();
        for (_, node) in graph.nodes() {
            let uses = VariableUses::of(node);
            if is_any(&self.useful, &node.outputs) && !assigned.is_disjoint(&uses.read) {
                return Err(no_gradient(node, READ_BACK));
            }
            if is_any(&self.varied, &node.inputs) {
                assigned.extend(uses.assigned);
            }
        }
        Ok(())
    }

    /// Errors when the loss does not depend on one of some values.
    pub fn check_used(&self, graph: &Graph, wrt: &[ValueId]) -> Result<()> {
        let Some(&v) = wrt.iter().find(|&&v| !self.is_active(v)) else {
            return Ok(());
        };
        let name = name_of(graph, v);
        let message = format!("the loss does not depend on {name:?} through floating-point values");
        Err(Error::invalid(message))
    }
}

/// The operands of a node that some results depend on.
fn useful_operands(node: &Node, results: &[ValueId]) -> Vec<ValueId> {
    match has_branches(node) {
        true => useful_in_branches(node, results),
        false => node.inputs.clone(),
    }
}

/// The operands of a node with branches that some results depend on in one of them.
fn useful_in_branches(node: &Node, results: &[ValueId]) -> Vec<ValueId> {
    let regions = node.regions.iter();
    regions.flat_map(|r| useful_in(node, r, results)).collect()
}

/// The operands of a node that some results depend on in one of its regions.
fn useful_in(node: &Node, region: &Graph, results: &[ValueId]) -> Vec<ValueId> {
    let mut inner = Activity::constant(region);
    inner.spread_useful(region, &outputs_of(node, region, results));
    let operands = captured(node).iter().zip(&region.inputs);
    let useful = operands.filter(|(_, formal)| inner.useful[formal.0 as usize]);
    useful.map(|(&v, _)| v).collect()
}

/// The values of a region that are some results of its node.
fn outputs_of(node: &Node, region: &Graph, results: &[ValueId]) -> Vec<ValueId> {
    let pairs = node.outputs.iter().zip(&region.outputs);
    let chosen = pairs.filter(|(v, _)| results.contains(v));
    chosen.map(|(_, o)| o.value).collect()
}

/// Variables that a node reads and assigns, in its regions too.
#[derive(Default)]
pub struct VariableUses<'g> {
    /// Read variables.
    pub read: BTreeSet<Variable<'g>>,
    /// Assigned variables.
    pub assigned: BTreeSet<Variable<'g>>,
}

/// Container and name.
type Variable<'g> = (&'g str, &'g str);

impl<'g> VariableUses<'g> {
    /// The uses of a node.
    pub fn of(node: &'g Node) -> VariableUses<'g> {
        let mut uses = VariableUses::default();
        uses.add(node);
        uses
    }

    /// True when there are none.
    pub fn is_none(&self) -> bool {
        self.read.is_empty() && self.assigned.is_empty()
    }

    fn add(&mut self, node: &'g Node) {
        self.add_own(&node.op);
        let regions = node.regions.iter();
        regions.for_each(|r| r.nodes().for_each(|(_, inner)| self.add(inner)));
    }

    fn add_own(&mut self, op: &'g Op) {
        match op {
            Op::AssignVariable { container, name } => {
                self.assigned.insert((container, name));
            }
            Op::ReadVariable {
                container, name, ..
            } => {
                self.read.insert((container, name));
            }
            _ => {}
        }
    }
}

/// Marks values.
pub fn mark(marks: &mut [bool], values: &[ValueId]) {
    values.iter().for_each(|v| marks[v.0 as usize] = true);
}

fn is_any(marks: &[bool], values: &[ValueId]) -> bool {
    values.iter().any(|v| marks[v.0 as usize])
}
