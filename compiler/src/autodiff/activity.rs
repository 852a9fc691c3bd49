//! Activity analysis: the nodes between the loss and the values that it is differentiated by.
//!
//! A value is *varied* when it depends on one of them through floating-point results, and *useful* when the loss depends
//! on it (Hascoet and Pascual, ACM TOMS 39(3), 2013, section 2). Values that are both get cotangents. Dependence ends at
//! integers and `bool`, at ops of zero gradient, and at values that count as constants.

use super::name_of;
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
    pub fn new(graph: &Graph, loss: ValueId, wrt: &[ValueId], stop: &[ValueId]) -> Activity {
        let n = graph.n_values();
        let mut activity = Activity {
            varied: marked(n, wrt),
            useful: marked(n, &[loss]),
            stopped: marked(n, stop),
        };
        activity.spread_varied(graph);
        activity.spread_useful(graph);
        activity
    }

    fn spread_varied(&mut self, graph: &Graph) {
        for (_, node) in graph.nodes() {
            if is_any(&self.varied, &node.inputs) {
                let passing = self.passing(graph, node);
                mark(&mut self.varied, &passing);
            }
        }
    }

    fn spread_useful(&mut self, graph: &Graph) {
        for (_, node) in graph.nodes().rev() {
            if is_any(&self.useful, &self.passing(graph, node)) {
                mark(&mut self.useful, &node.inputs);
            }
        }
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
        let active = graph.nodes().filter(|(_, n)| self.is_active_node(graph, n));
        for (_, node) in active {
            if let Gradient::None(why) = node.op.spec().gradient {
                return Err(no_gradient(node, why));
            }
        }
        self.check_reads(graph)
    }

    /// Errors when the loss depends on the read of a variable to which the run has assigned a varied value: the dependence
    /// goes through the state, where no gradient flows.
    fn check_reads(&self, graph: &Graph) -> Result<()> {
        let mut assigned = BTreeSet::new();
        for (_, node) in graph.nodes() {
            match &node.op {
                Op::AssignVariable { container, name } if is_any(&self.varied, &node.inputs) => {
                    assigned.insert((container, name));
                }
                Op::ReadVariable {
                    container, name, ..
                } if assigned.contains(&(container, name))
                    && is_any(&self.useful, &node.outputs) =>
                {
                    return Err(no_gradient(node, READ_BACK));
                }
                _ => {}
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

fn marked(n: usize, values: &[ValueId]) -> Vec<bool> {
    let mut marks = vec![false; n];
    mark(&mut marks, values);
    marks
}

fn mark(marks: &mut [bool], values: &[ValueId]) {
    values.iter().for_each(|v| marks[v.0 as usize] = true);
}

fn is_any(marks: &[bool], values: &[ValueId]) -> bool {
    values.iter().any(|v| marks[v.0 as usize])
}
