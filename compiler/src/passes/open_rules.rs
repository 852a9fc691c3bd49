//! Type rules that hold for some sizes of symbols only: those of slices and reshapes whose bounds and
//! numbers of elements are not known to fit, and of results whose extents may be negative.
//!
//! Rewriting takes them to hold, and may remove the nodes that would show the contrary once sizes
//! are put in: a slice of a broadcast value is a broadcast value, wherever the slice begins.

use crate::error::{Error, Result};
use crate::ir::{Bindings, Dim, Graph, Node, Op, Origin, Ranges, Type};
use std::cell::RefCell;
use std::collections::BTreeSet;

/// Nodes whose type rules are to be checked for each set of sizes.
#[derive(Default)]
pub struct OpenRules(Vec<OpenRule>);

struct OpenRule {
    op: Op,
    operands: Vec<Type>,
    origin: Origin,
}

impl OpenRules {
    /// The open rules of a graph and its regions, whose symbols have their declared ranges.
    pub fn of(g: &Graph) -> OpenRules {
        let mut rules = Vec::new();
        collect(g, &g.ranges, &mut rules);
        OpenRules(rules)
    }

    /// Errors, naming the node, when a rule does not hold for these sizes. Rules with symbols that
    /// have none are left out.
    pub fn check(&self, sizes: &Bindings) -> Result<()> {
        self.0.iter().try_for_each(|rule| rule.check(sizes))
    }

    /// The symbols of a rule that these sizes contradict.
    pub fn contradicted(&self, sizes: &Bindings) -> Option<BTreeSet<String>> {
        let rule = self.0.iter().find(|rule| rule.check(sizes).is_err())?;
        let mut symbols = BTreeSet::new();
        rule.visit_dims(&mut |d| d.visit_symbols(&mut |s| symbols.extend([s.to_owned()])));
        Some(symbols)
    }
}

fn collect(g: &Graph, ranges: &Ranges, rules: &mut Vec<OpenRule>) {
    for (_, node) in g.nodes() {
        if is_open(g, node, ranges) {
            rules.push(OpenRule {
                op: node.op.clone(),
                operands: node.inputs.iter().map(|&v| g.ty(v).clone()).collect(),
                origin: node.origin.clone(),
            });
        }
        node.regions.iter().for_each(|r| collect(r, ranges, rules));
    }
}

/// True for a node without regions whose rule depends on sizes.
fn is_open(g: &Graph, node: &Node, ranges: &Ranges) -> bool {
    let is_known = |d: &Dim| d.as_const().is_some() || d.is_at_least(0, ranges);
    let mut results = node.outputs.iter().flat_map(|&v| g.ty(v).shape.iter());
    let fits = match &node.op {
        Op::Slice {
            starts,
            sizes,
            steps,
        } => {
            let extents = g.ty(node.inputs[0]).shape.iter();
            let mut bounds = starts.iter().zip(sizes).zip(steps.iter().zip(extents));
            let is_inside = |((start, size), (&step, extent)): ((&Dim, &Dim), (&i64, &Dim))| {
                let end = start.clone() + size.scale(step);
                step == 1 && is_known(start) && is_known(&(extent.clone() - end))
            };
            bounds.all(is_inside)
        }
        Op::Reshape { shape } => {
            let to = shape.iter().fold(Dim::constant(1), |n, d| n.product(d));
            g.ty(node.inputs[0]).shape.n_elements() == to
        }
        _ => true,
    };
    node.regions.is_empty() && !(fits && results.all(is_known))
}

impl OpenRule {
    fn visit_dims(&self, f: &mut dyn FnMut(&Dim)) {
        let seen = RefCell::new(f);
        let visit = |d: &Dim| {
            seen.borrow_mut()(d);
            d.clone()
        };
        self.op.map_dims(&visit);
        let shapes = self.operands.iter().flat_map(|ty| ty.shape.iter());
        shapes.for_each(|d| drop(visit(d)));
    }

    fn check(&self, sizes: &Bindings) -> Result<()> {
        let op = self.op.map_dims(&|d| d.bind(sizes));
        let bound = |ty: &Type| Type {
            dtype: ty.dtype,
            shape: ty.shape.bind(sizes),
        };
        let operands: Vec<Type> = self.operands.iter().map(bound).collect();
        let results = op.infer(&operands, &[]);
        results.map(drop).map_err(|e| {
            let message = format!("{}: {e}", op.name());
            Error::invalid(message).at_origin(&self.origin)
        })
    }
}
