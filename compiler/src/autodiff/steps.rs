//! Gradients of scans.
//!
//! The gradient is a scan the other way, which carries the cotangents of carried values and the sums of those of invariants. A step of it
//! takes what its step forward computed: the forward scan stacks these values as further results, so that nothing is computed twice.

use super::activity::{Activity, VariableUses, mark};
use super::branches::{add_input, pulled_back};
use super::products::Product;
use super::sweep::Sweep;
use crate::error::Result;
use crate::ir::gradient::{gradient_origin, no_gradient};
use crate::ir::{Def, Dim, Graph, Node, NodeId, Op, Origin, ScalarOp, ValueId};
use crate::passes::{Rebuild, dce};
use std::collections::BTreeSet;

/// Reason of bodies whose steps have effects.
pub const STATEFUL: &str = "its body reads or assigns variables";

/// Appends the scan backwards. Gives the gradients of the needed operands.
pub fn gradients(
    sweep: &mut Sweep,
    id: NodeId,
    node: &Node,
    cotangents: &[Option<ValueId>],
    needed: &[bool],
) -> Result<Vec<Option<ValueId>>> {
    if !VariableUses::of(node).is_none() {
        return Err(no_gradient(node, STATEFUL));
    }
    let scan = Scan::of(node)?;
    let part = Part::new(&scan, cotangents, needed);
    let back = Back::new(&scan, part)?;
    let stacked = back.stack(sweep.graph_mut(), id, node)?;
    back.append(sweep, node, cotangents, &stacked)
}

/// A scan.
struct Scan<'n> {
    body: &'n Graph,
    carried: usize,
    scanned: usize,
    length: &'n Dim,
    reverse: bool,
}

impl<'n> Scan<'n> {
    fn of(node: &'n Node) -> Result<Scan<'n>> {
        match (&node.op, &node.regions[..]) {
            (
                Op::Scan {
                    carried,
                    scanned,
                    length,
                    reverse,
                },
                [body],
            ) => Ok(Scan {
                body,
                carried: *carried,
                scanned: *scanned,
                length,
                reverse: *reverse,
            }),
            _ => Err(no_gradient(node, "the op is no scan")),
        }
    }

    fn output(&self, i: usize) -> ValueId {
        self.body.outputs[i].value
    }

    /// Formals of the body by their numbers.
    fn formals(&self, numbers: &[usize]) -> Vec<ValueId> {
        numbers.iter().map(|&i| self.body.inputs[i]).collect()
    }

    /// Results of the body by their numbers.
    fn results(&self, numbers: &[usize]) -> Vec<ValueId> {
        numbers.iter().map(|&i| self.output(i)).collect()
    }

    fn activity(&self, formals: &[usize], results: &[usize]) -> Activity {
        let (formals, results) = (self.formals(formals), self.results(results));
        Activity::new(self.body, &results, &formals, &[])
    }
}

/// The part of a scan that a gradient is asked of, by numbers of operands and results.
struct Part {
    /// Carried values that have cotangents in every step.
    carried: Vec<usize>,
    /// Sequences whose gradients are needed.
    sequences: Vec<usize>,
    /// Invariants whose gradients are needed; from [`Back::give`] on, those whose gradients are summed step by step.
    invariants: Vec<usize>,
    /// Stacked results that have cotangents.
    given: Vec<usize>,
}

impl Part {
    fn new(scan: &Scan, cotangents: &[Option<ValueId>], needed: &[bool]) -> Part {
        let k = scan.carried;
        let given = |i: &usize| cotangents[*i].is_some();
        let wanted = |i: &usize| needed[*i];
        let sequences = k..k + scan.scanned;
        let invariants = sequences.end..needed.len();
        let mut part = Part {
            carried: Vec::new(),
            sequences: sequences.filter(wanted).collect(),
            invariants: invariants.filter(wanted).collect(),
            given: (k..cotangents.len()).filter(given).collect(),
        };
        let (wanted, given) = ((0..k).filter(wanted), (0..k).filter(given));
        part.carried = part.active(scan, wanted.collect(), given.collect());
        part
    }

    /// Carried values that depend on needed operands and that given cotangents depend on: in some step, after any number of others.
    fn active(&self, scan: &Scan, wanted: Vec<usize>, given: Vec<usize>) -> Vec<usize> {
        let rest = [&self.sequences[..], &self.invariants].concat();
        let all: Vec<usize> = (0..scan.body.outputs.len()).collect();
        let mut varied = grown(wanted, scan.carried, |varied, i| {
            let activity = scan.activity(&[varied, &rest].concat(), &all);
            activity.is_active(scan.output(i))
        });
        let formals = [&varied[..], &rest].concat();
        let useful = grown(given, scan.carried, |useful, i| {
            let activity = scan.activity(&formals, &[useful, &self.given].concat());
            activity.is_active(scan.body.inputs[i])
        });
        varied.retain(|i| useful.contains(i));
        varied
    }

    /// Operands that get gradients.
    fn formals(&self) -> Vec<usize> {
        [&self.carried[..], &self.sequences, &self.invariants].concat()
    }

    /// The results of the scan backwards by the operands that they are gradients of.
    fn by_operand(&self, n: usize, results: Vec<ValueId>) -> Vec<Option<ValueId>> {
        let order = [&self.carried[..], &self.invariants, &self.sequences].concat();
        let mut all = vec![None; n];
        for (i, gradient) in order.into_iter().zip(results) {
            all[i] = Some(gradient);
        }
        all
    }

    /// Results that have cotangents.
    fn results(&self) -> Vec<usize> {
        [&self.carried[..], &self.given].concat()
    }
}

/// A set of numbers below `n`, with those that follow from it.
fn grown(mut set: Vec<usize>, n: usize, follows: impl Fn(&[usize], usize) -> bool) -> Vec<usize> {
    loop {
        let is_new = |i: &usize| !set.contains(i) && follows(&set, *i);
        match (0..n).find(is_new) {
            Some(i) => set.push(i),
            None => {
                set.sort_unstable();
                return set;
            }
        }
    }
}

/// A step forward and, behind it, the step backward.
struct Back<'s> {
    scan: &'s Scan<'s>,
    part: Part,
    /// The nodes of both steps.
    both: Graph,
    /// Number of nodes of the step forward.
    n_forward: usize,
    /// Formals for the cotangents of results, in the order of [`Part::results`].
    cotangents: Vec<ValueId>,
    /// Formals for the sums of gradients of invariants.
    sums: Vec<ValueId>,
    /// Gradients of invariants that are products.
    products: Vec<Product>,
    /// The gradients of carried values, new sums, the gradients of elements of sequences, and the factors of products.
    results: Vec<ValueId>,
    /// Values of the step forward that the step backward takes.
    residuals: Vec<ValueId>,
}

impl<'s> Back<'s> {
    fn new(scan: &'s Scan<'s>, part: Part) -> Result<Back<'s>> {
        let (formals, results) = (part.formals(), part.results());
        let activity = scan.activity(&formals, &results);
        activity.check_rules(scan.body)?;
        let mut both = scan.body.clone();
        let gradients = pulled_back(
            &mut both,
            &activity,
            &scan.results(&results),
            &scan.formals(&formals),
        )?;
        let mut back = Back {
            scan,
            part,
            n_forward: scan.body.n_nodes(),
            cotangents: both.inputs[scan.body.inputs.len()..].to_vec(),
            both,
            sums: Vec::new(),
            products: Vec::new(),
            results: Vec::new(),
            residuals: Vec::new(),
        };
        back.give(&gradients)?;
        back.residuals = back.residuals();
        Ok(back)
    }

    /// Results of the step backward, from the gradients of [`Part::formals`].
    fn give(&mut self, gradients: &[ValueId]) -> Result<()> {
        let (carried, rest) = gradients.split_at(self.part.carried.len());
        let (elements, invariants) = rest.split_at(self.part.sequences.len());
        self.results.extend(carried);
        let changing = self.changing_in_both();
        let numbers = std::mem::take(&mut self.part.invariants);
        for (i, &gradient) in numbers.into_iter().zip(invariants) {
            self.give_invariant(i, gradient, &changing)?;
        }
        self.results.extend(elements);
        let factors = self.products.iter().flat_map(|p| p.factors);
        self.results.extend(factors);
        Ok(())
    }

    /// The gradient of an invariant, as a product after all steps or as a sum over them.
    fn give_invariant(&mut self, i: usize, gradient: ValueId, changing: &[bool]) -> Result<()> {
        let product = Product::of(&self.both, i, gradient);
        // A stack of what never changes would have one element many times.
        if let Some(product) = product.filter(|p| p.is_within(changing)) {
            self.products.push(product);
            return Ok(());
        }
        let sum = self.add_to_sum(gradient)?;
        self.results.push(sum);
        self.part.invariants.push(i);
        Ok(())
    }

    /// True for each value that is not the same in all steps, forward and backward.
    fn changing_in_both(&self) -> Vec<bool> {
        let mut changing = self.changing();
        mark(&mut changing, &self.cotangents);
        for (_, node) in self.both.nodes().skip(self.n_forward) {
            mark(&mut changing, &node.outputs);
        }
        changing
    }

    /// The sum of an invariant's gradients with another one.
    fn add_to_sum(&mut self, gradient: ValueId) -> Result<ValueId> {
        let sum = add_input(&mut self.both, "sum", gradient);
        self.sums.push(sum);
        let origin = gradient_origin(&origin_of(&self.both, gradient));
        let add = Op::Map(ScalarOp::Add);
        self.both.add1(add, &[sum, gradient], &origin)
    }

    /// The nodes of the step forward.
    fn forward_nodes(&self) -> impl Iterator<Item = (NodeId, &Node)> {
        self.both.nodes().take(self.n_forward)
    }

    /// True for each value that is not the same in all steps forward.
    fn changing(&self) -> Vec<bool> {
        let mut changing = vec![false; self.both.n_values()];
        let n = self.scan.carried + self.scan.scanned;
        mark(&mut changing, &self.both.inputs[..n]);
        for (_, node) in self.forward_nodes() {
            if node.inputs.iter().any(|v| changing[v.0 as usize]) {
                mark(&mut changing, &node.outputs);
            }
        }
        changing
    }

    /// Values that the step backward takes, in their order.
    fn taken(&self) -> BTreeSet<ValueId> {
        let nodes = self.both.nodes().skip(self.n_forward);
        let operands = nodes.flat_map(|(_, node)| node.inputs.iter());
        operands.chain(&self.results).copied().collect()
    }

    /// Values that the scan forward is to stack: carried ones, and those that change and were computed.
    fn residuals(&self) -> Vec<ValueId> {
        let changing = self.changing();
        let is_residual =
            |v: &ValueId| self.is_carried(*v) || self.is_forward(*v) && changing[v.0 as usize];
        self.taken().into_iter().filter(is_residual).collect()
    }

    fn is_carried(&self, v: ValueId) -> bool {
        let carried = &self.both.inputs[..self.scan.carried];
        carried.contains(&v)
    }

    /// True for a result of a node of the step forward.
    fn is_forward(&self, v: ValueId) -> bool {
        let def = self.both.value(v).def;
        matches!(def, Def::Node(n, _) if (n.0 as usize) < self.n_forward)
    }

    /// Makes the node stack the values that the step backward takes. Gives the stacks of [`Back::residuals`].
    fn stack(&self, graph: &mut Graph, id: NodeId, node: &Node) -> Result<Vec<ValueId>> {
        let mut r = self.forward()?;
        let mut stacks = Vec::new();
        let mut n = node.outputs.len();
        for &v in &self.residuals {
            let own = self.stacked_already(v);
            stacks.push(own.unwrap_or(n));
            if own.is_none() {
                r.graph.add_output(&format!("residual_{n}"), r.get(v));
                n += 1;
            }
        }
        graph.add_results(id, vec![r.graph])?;
        let results = &graph.node(id).outputs;
        Ok(stacks.into_iter().map(|i| results[i]).collect())
    }

    /// The number of the result that is the stack of a value.
    fn stacked_already(&self, v: ValueId) -> Option<usize> {
        let mut numbers = self.scan.carried..self.scan.body.outputs.len();
        numbers.find(|&i| self.scan.output(i) == v)
    }

    /// The step forward by itself.
    fn forward(&self) -> Result<Rebuild> {
        let body = self.scan.body;
        let mut r = Rebuild::onto(&self.both, body.emptied());
        for (&v, name) in body.inputs.iter().zip(&body.input_names) {
            let input = r.graph.add_input(name, body.ty(v).clone());
            r.set(v, input);
        }
        for (id, node) in self.forward_nodes() {
            r.copy(id, node)?;
        }
        for o in &body.outputs {
            r.graph.add_output(&o.name, r.get(o.value));
        }
        Ok(r)
    }

    /// Appends the scan backwards.
    fn append(
        &self,
        sweep: &mut Sweep,
        node: &Node,
        cotangents: &[Option<ValueId>],
        stacked: &[ValueId],
    ) -> Result<Vec<Option<ValueId>>> {
        let given = self.part.given.iter().filter_map(|&i| cotangents[i]);
        let given: Vec<ValueId> = given.collect();
        let initial = self.initial(sweep, node, cotangents)?;
        let others = &node.inputs[self.scan.carried..];
        let operands = [&initial[..], stacked, &given, others].concat();
        let op = self.op(stacked.len() + given.len());
        let results = self.append_scan(sweep.graph_mut(), node, op, &operands)?;
        let factors = self.factors(&results);
        let mut all = self.part.by_operand(node.inputs.len(), results);
        for (product, stacks) in self.products.iter().zip(factors.chunks_exact(2)) {
            all[product.operand] = Some(product.sum(sweep, node, stacks)?);
        }
        Ok(all)
    }

    /// The last results, which are stacks of factors of products.
    fn factors(&self, results: &[ValueId]) -> Vec<ValueId> {
        let n = 2 * self.products.len();
        results[results.len() - n..].to_vec()
    }

    /// Appends a scan where another one is.
    fn append_scan(
        &self,
        graph: &mut Graph,
        like: &Node,
        op: Op,
        operands: &[ValueId],
    ) -> Result<Vec<ValueId>> {
        let origin = gradient_origin(&like.origin);
        let results = graph.add_with_regions(op, operands, vec![self.body()?], &origin)?;
        let last = NodeId(graph.n_nodes() as u32 - 1);
        graph.node_mut(last).device = like.device.clone();
        Ok(results)
    }

    /// The cotangents of carried results, and sums of nothing.
    fn initial(
        &self,
        sweep: &mut Sweep,
        node: &Node,
        cotangents: &[Option<ValueId>],
    ) -> Result<Vec<ValueId>> {
        let mut initial = Vec::new();
        for &i in &self.part.carried {
            initial.push(match cotangents[i] {
                Some(g) => g,
                None => sweep.full(node.outputs[i], 0.0)?,
            });
        }
        for &i in &self.part.invariants {
            initial.push(sweep.full(node.inputs[i], 0.0)?);
        }
        Ok(initial)
    }

    /// The scan backwards, which has further sequences beside those forward.
    fn op(&self, n_further: usize) -> Op {
        Op::Scan {
            carried: self.part.carried.len() + self.part.invariants.len(),
            scanned: n_further + self.scan.scanned,
            length: self.scan.length.clone(),
            reverse: !self.scan.reverse,
        }
    }

    /// The formals of the body of the scan backwards, by the values that they stand for.
    fn formals(&self) -> Vec<ValueId> {
        let n_formals = self.scan.body.inputs.len();
        let others = &self.both.inputs[self.scan.carried..n_formals];
        let (carried, given) = self.cotangents.split_at(self.part.carried.len());
        [carried, &self.sums, &self.residuals, given, others].concat()
    }

    /// The body of the scan backwards: the step backward, and nodes of the step forward that are the same in all steps.
    fn body(&self) -> Result<Graph> {
        let both = &self.both;
        let mut r = Rebuild::onto(both, Graph::new(&both.name));
        for (i, v) in self.formals().into_iter().enumerate() {
            let input = r.graph.add_input(&format!("a{i}"), both.ty(v).clone());
            r.set(v, input);
        }
        for (i, (id, node)) in both.nodes().enumerate() {
            let has = node.outputs.iter().any(|&v| r.has(v));
            let is_there = i >= self.n_forward || node.inputs.iter().all(|&v| r.has(v));
            if !has && is_there {
                r.copy(id, node)?;
            }
        }
        for (i, &v) in self.results.iter().enumerate() {
            let value = r.get(v);
            r.graph.add_output(&format!("d{i}"), value);
        }
        dce(&r.graph)
    }
}

fn origin_of(graph: &Graph, v: ValueId) -> Origin {
    graph
        .def_node(v)
        .map_or_else(Default::default, |node| node.origin.clone())
}
