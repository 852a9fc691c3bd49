//! Loops of a known number of iterations, as scans.
//!
//! Before a graph is differentiated, its active loops become scans: their length is the number of iterations, and the iteration number is an
//! element of an iota. A loop that may end early, or whose number of iterations depends on the data, stays and has no gradient.

use super::activity::{Activity, VariableUses};
use super::steps::STATEFUL;
use crate::error::{Error, Result};
use crate::ir::gradient::no_gradient;
use crate::ir::{Dim, Graph, Node, NodeId, Op};
use crate::passes::{Rebuild, dce};
use gristmill_runtime::{DType, Tensor};
use std::collections::BTreeSet;

/// Most iterations of a scan: its steps are stacked for the way back.
const MAX_ITERATIONS: i64 = 1 << 32;

const EARLY_END: &str = "its condition may end it early";
const UNKNOWN_COUNT: &str = "the number of its iterations is decided at run time";
const TOO_MANY: &str = "it has no limit of iterations, or one above 2^32";
const CHANGED_SHAPE: &str = "a carried value changes its shape";
const HINT: &str = "a trip count that is constant, or computed from shapes, and a condition that is constantly true";

type Symbols = BTreeSet<String>;
type Reason = &'static str;

/// Turns loops into scans where it can: active ones, and those in regions of active nodes. Values keep their ids.
pub fn to_scans(graph: &mut Graph, activity: &Activity) -> Result<()> {
    let symbols = graph.symbols().into_iter().collect();
    // From the last node on: an iota moves the nodes behind it.
    for id in (0..graph.n_nodes() as u32).rev().map(NodeId) {
        if activity.is_active_node(graph, graph.node(id)) {
            node_to_scan(graph, id, &symbols)?;
        }
    }
    Ok(())
}

fn node_to_scan(graph: &mut Graph, id: NodeId, symbols: &Symbols) -> Result<()> {
    let id = match scan_of(graph, id, symbols)? {
        Some((scan, length)) => scan.replace(graph, id, length)?,
        None => id,
    };
    // After the node, whose condition is a constant in its region by now.
    let mut regions = graph.node_mut(id).regions.iter_mut();
    regions.try_for_each(|r| all_to_scans(r, symbols))
}

fn all_to_scans(region: &mut Graph, symbols: &Symbols) -> Result<()> {
    let mut ids = (0..region.n_nodes() as u32).rev().map(NodeId);
    ids.try_for_each(|id| node_to_scan(region, id, symbols))
}

/// The scan that a node is as a loop, and its length.
fn scan_of(graph: &Graph, id: NodeId, symbols: &Symbols) -> Result<Option<(Scan, Dim)>> {
    let Some(l) = Loop::of(graph, graph.node(id)) else {
        return Ok(None);
    };
    let length = l.length(symbols).ok();
    length.map(|n| Ok((l.scan()?, n))).transpose()
}

/// The error that a loop has no gradient.
pub fn refusal(graph: &Graph, node: &Node) -> Error {
    let known = Loop::of(graph, node).map(|l| l.length(&Symbols::new()));
    // A number that only symbols tell is unknown here: other loops are scans by now.
    let why = known.and_then(Result::err).unwrap_or(UNKNOWN_COUNT);
    let error = no_gradient(node, why);
    match [EARLY_END, UNKNOWN_COUNT, TOO_MANY].contains(&why) {
        true => error.hint(HINT),
        false => error,
    }
}

/// A loop.
struct Loop<'g> {
    graph: &'g Graph,
    node: &'g Node,
    body: &'g Graph,
    carried: usize,
    trip: &'g Dim,
}

impl<'g> Loop<'g> {
    fn of(graph: &'g Graph, node: &'g Node) -> Option<Loop<'g>> {
        match (&node.op, &node.regions[..]) {
            (Op::Loop { carried, trip }, [body]) => Some(Loop {
                graph,
                node,
                body,
                carried: *carried,
                trip,
            }),
            _ => None,
        }
    }

    /// The number of iterations; the reason why it is not known, or why there is no such scan, otherwise.
    fn length(&self, symbols: &Symbols) -> Result<Dim, Reason> {
        if self.is_stateful() {
            return Err(STATEFUL);
        }
        if !self.goes_on() {
            return Err(EARLY_END);
        }
        if !self.keeps_types() {
            return Err(CHANGED_SHAPE);
        }
        self.count(symbols)
    }

    fn is_stateful(&self) -> bool {
        !VariableUses::of(self.node).is_none()
    }

    /// True when the condition is true in every iteration.
    fn goes_on(&self) -> bool {
        let begins = self.graph.single(self.node.inputs[1]);
        begins.is_some_and(|t| t.as_slice::<bool>()[0]) && self.body.keeps_condition()
    }

    /// True when no extent of a carried value changes.
    fn keeps_types(&self) -> bool {
        (0..self.carried).all(|i| self.keeps_type(i))
    }

    fn keeps_type(&self, i: usize) -> bool {
        let given = self.graph.ty(self.node.inputs[2 + i]);
        let formal = self.body.ty(self.body.inputs[2 + i]);
        given == formal && formal == self.body.ty(self.body.outputs[1 + i].value)
    }

    fn has_rows(&self) -> bool {
        self.body.outputs.len() > 1 + self.carried
    }

    /// The trip count, which is a constant or an extent of known symbols.
    fn count(&self, symbols: &Symbols) -> Result<Dim, Reason> {
        let Some(limit) = self.graph.single(self.node.inputs[0]) else {
            return self.extent(symbols).ok_or(UNKNOWN_COUNT);
        };
        let count = limit.as_slice::<i64>()[0].max(0);
        match self.has_rows() && !self.trip.is(count) {
            true => Err(UNKNOWN_COUNT),
            false if count > MAX_ITERATIONS => Err(TOO_MANY),
            false => Ok(Dim::constant(count)),
        }
    }

    /// The trip count of known symbols.
    fn extent(&self, symbols: &Symbols) -> Option<Dim> {
        let mut is_known = self.has_rows() || !self.trip.is(0);
        self.trip
            .visit_symbols(&mut |s| is_known &= symbols.contains(s));
        is_known.then(|| self.trip.clone())
    }

    /// True when the body takes the iteration number.
    fn is_numbered(&self) -> bool {
        let (body, number) = (self.body, self.body.inputs[0]);
        let is_operand = !body.users()[number.0 as usize].is_empty();
        is_operand || body.outputs.iter().any(|o| o.value == number)
    }

    fn scan(&self) -> Result<Scan> {
        Ok(Scan {
            body: self.step()?,
            carried: self.carried,
            is_numbered: self.is_numbered(),
        })
    }

    /// The body without conditions, with the iteration number behind the carried values.
    fn step(&self) -> Result<Graph> {
        let mut r = self.formals();
        for (id, node) in self.body.nodes() {
            r.copy(id, node)?;
        }
        for o in self.body.outputs.iter().skip(1) {
            let v = r.get(o.value);
            r.graph.add_output(&o.name, v);
        }
        dce(&r.graph)
    }

    /// A step that has its formals and a constant as the condition.
    fn formals(&self) -> Rebuild {
        let body = self.body;
        let mut r = Rebuild::onto(body, body.emptied());
        for i in self.formal_numbers() {
            let ty = body.ty(body.inputs[i]).clone();
            let formal = r.graph.add_input(&body.input_names[i], ty);
            r.set(body.inputs[i], formal);
        }
        let (yes, origin) = (Tensor::scalar(true), &self.node.origin);
        let yes = r.graph.add_constant(yes, origin);
        r.set(body.inputs[1], yes);
        r
    }

    /// Formals of the loop's body in the order of the scan's.
    fn formal_numbers(&self) -> impl Iterator<Item = usize> {
        let rest = 2 + self.carried;
        let number = self.is_numbered().then_some(0);
        (2..rest).chain(number).chain(rest..self.body.inputs.len())
    }
}

/// The scan of a loop.
struct Scan {
    body: Graph,
    carried: usize,
    /// True when the body takes the iteration number.
    is_numbered: bool,
}

impl Scan {
    /// Puts the scan in the place of its loop, and gives its id.
    fn replace(self, graph: &mut Graph, id: NodeId, length: Dim) -> Result<NodeId> {
        let (mut inputs, mut id) = (graph.node(id).inputs[2..].to_vec(), id);
        if self.is_numbered {
            let numbers = graph.add_before(id, numbers(length.clone()))?;
            inputs.insert(self.carried, numbers);
            id = NodeId(id.0 + 1);
        }
        graph.redefine(id, self.op(length), inputs, vec![self.body])?;
        Ok(id)
    }

    fn op(&self, length: Dim) -> Op {
        Op::Scan {
            carried: self.carried,
            scanned: usize::from(self.is_numbered),
            length,
            reverse: false,
        }
    }
}

/// The iteration numbers.
fn numbers(n: Dim) -> Op {
    Op::Iota {
        dtype: DType::I64,
        shape: vec![n],
        axis: 0,
    }
}
