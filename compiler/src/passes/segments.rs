//! Cuts a graph whose extents are not all known before a run into segments.
//!
//! A segment is compiled by itself, as soon as all of its symbols have values. Between segments are
//! the nodes that give symbols their values, and regions that hold such nodes; the interpreter runs
//! these. Nodes that need the same values go into one segment, so that there are no more segments
//! than extents that depend on each other.

use super::Rebuild;
use crate::error::{Error, Result};
use crate::ir::eval::Evaluator;
use crate::ir::{Def, Dim, Graph, Node, NodeId, Op, OpClass, Origin, Requested, Type, ValueId};
use gristmill_runtime::DType;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Elements of the largest result that is computed between segments: of counters and conditions.
const MAX_SMALL: usize = 16;

/// True when a node of the graph, or of its regions, gives a symbol its value during a run, or when
/// the graph was cut.
pub fn has_run_time_extents(g: &Graph) -> bool {
    let known: BTreeSet<String> = g.symbols().into_iter().collect();
    let is_cut = |node: &Node| matches!(node.op, Op::Segment { .. });
    g.nodes().any(|(_, node)| {
        is_cut(node) || decides_extents(node) || !unknown(g, node, &known).is_empty()
    })
}

/// True for a node that gives symbols their values, and for one with such a node in a region.
pub fn decides_extents(node: &Node) -> bool {
    let eval = node.op.spec().eval;
    let inner = node.regions.iter().flat_map(Graph::nodes);
    matches!(
        eval,
        Evaluator::Extent | Evaluator::Shaped | Evaluator::Selection(_)
    ) || inner.map(|(_, node)| node).any(decides_extents)
}

/// Symbols of a node without those that are known.
fn unknown(g: &Graph, node: &Node, known: &BTreeSet<String>) -> BTreeSet<String> {
    let mut symbols = BTreeSet::new();
    node.visit_symbols(g, &mut |symbol| {
        if !known.contains(symbol) {
            symbols.insert(symbol.to_owned());
        }
    });
    symbols
}

/// The graph with its parts as segments, numbered from 0, in its regions as well.
///
/// Requires: every symbol is one of an input, or has a node before its first use that gives it a
/// value. After: nodes outside of segments are those that give values to symbols, control flow
/// around them, and arithmetic on few elements.
///
/// Errors when a symbol has no value where it is used, naming the node.
pub fn cut(g: &Graph) -> Result<Graph> {
    let mut ordered = joined(g)?;
    ordered.order_state();
    cut_region(&ordered, &BTreeSet::new(), &mut 0)
}

/// The graph with the nodes of its segments in their place.
fn joined(g: &Graph) -> Result<Graph> {
    let mut whole = Rebuild::new(g);
    for (id, node) in g.nodes() {
        match (&node.op, &node.regions[..]) {
            (Op::Segment { .. }, [body]) => {
                let args = whole.inputs(node);
                let results = inlined(&mut whole.graph, &joined(body)?, &args)?;
                whole.set_all(&node.outputs, &results);
            }
            _ => whole.copy_with_regions(id, node, &joined)?,
        }
    }
    Ok(whole.finish(g))
}

/// Copies the nodes of a region to a graph; gives its results.
fn inlined(g: &mut Graph, body: &Graph, args: &[ValueId]) -> Result<Vec<ValueId>> {
    let formals = body.inputs.iter().copied();
    let mut values: HashMap<ValueId, ValueId> = formals.zip(args.iter().copied()).collect();
    for (_, node) in body.nodes() {
        let inputs: Vec<ValueId> = node.inputs.iter().map(|v| values[v]).collect();
        let outputs = g.add_copy(node, &inputs)?;
        values.extend(node.outputs.iter().copied().zip(outputs));
    }
    Ok(body.outputs.iter().map(|o| values[&o.value]).collect())
}

/// The segments of a graph that was cut, by number.
pub fn segments(g: &Graph) -> Vec<&Graph> {
    let mut found = BTreeMap::new();
    collect(g, &mut found);
    found.into_values().collect()
}

fn collect<'g>(g: &'g Graph, found: &mut BTreeMap<usize, &'g Graph>) {
    for (_, node) in g.nodes() {
        match node.op {
            Op::Segment { number } => {
                found.insert(number, &node.regions[0]);
            }
            _ => node.regions.iter().for_each(|r| collect(r, found)),
        }
    }
}

/// `outer` are the symbols that have values around the region.
fn cut_region(g: &Graph, outer: &BTreeSet<String>, n_segments: &mut usize) -> Result<Graph> {
    let levels = Levels::of(g, outer)?;
    let mut host = Rebuild::new(g);
    for level in 0..=levels.last {
        let part = Part::of(g, &levels, level);
        if part.is_small(g) {
            part.copy_to(&mut host, g)?;
        } else {
            part.make_segment(&mut host, g, n_segments)?;
        }
        for (id, node) in g.nodes().filter(|(id, _)| levels.is_between(*id, level)) {
            levels.copy_sources(&mut host, g, node)?;
            let known = levels.symbols_before(level);
            let regions = node.regions.iter().map(|region| {
                let region = with_request(region, &node.device);
                cut_region(&region, &known, n_segments)
            });
            let regions = regions.collect::<Result<_>>()?;
            let inputs = host.inputs(node);
            let results =
                (host.graph).add_with_regions(node.op.clone(), &inputs, regions, &node.origin)?;
            host.mapped(id, node, &results);
        }
    }
    for o in &g.outputs {
        levels.copy_source(&mut host, g, o.value)?;
    }
    Ok(host.finish(g))
}

/// A region that is not on a device as a whole: its nodes have the request of the node around it,
/// unless they have their own.
fn with_request(region: &Graph, request: &Requested) -> Graph {
    let mut region = region.clone();
    for id in (0..region.n_nodes() as u32).map(NodeId) {
        let device = &mut region.node_mut(id).device;
        if device.is_none() {
            device.clone_from(request);
        }
    }
    region
}

/// The number of nodes on which a node waits, one after the other, that are between segments.
struct Levels {
    nodes: Vec<Place>,
    symbols: BTreeMap<String, usize>,
    last: usize,
}

#[derive(Clone, Copy, PartialEq)]
enum Place {
    /// In the segment of a level.
    Segment(usize),
    /// After the segment of a level.
    After(usize),
    /// Wherever its result is used: it is computed from constants and extents.
    Anywhere(usize),
}

impl Place {
    /// Level from which on the results are there.
    fn ready(self) -> usize {
        match self {
            Place::Segment(level) | Place::Anywhere(level) => level,
            Place::After(level) => level + 1,
        }
    }
}

impl Levels {
    fn of(g: &Graph, outer: &BTreeSet<String>) -> Result<Levels> {
        let known = outer.iter().cloned().chain(g.symbols());
        let mut levels = Levels {
            nodes: Vec::new(),
            symbols: known.map(|symbol| (symbol, 0)).collect(),
            last: 0,
        };
        for (_, node) in g.nodes() {
            let place = levels.place(g, node)?;
            levels.last = levels.last.max(place.ready());
            levels.nodes.push(place);
        }
        Ok(levels)
    }

    /// The place of a node, after those of all nodes before it. Symbols that it gives values are
    /// known from there on.
    fn place(&mut self, g: &Graph, node: &Node) -> Result<Place> {
        let operands = node.inputs.iter().map(|&v| self.ready(g, v));
        let earlier = node
            .control
            .iter()
            .map(|c| self.nodes[c.0 as usize].ready());
        let mut level = operands.chain(earlier).max().unwrap_or(0);
        let mut new = BTreeSet::new();
        node.visit_symbols(g, &mut |symbol| match self.symbols.get(symbol) {
            Some(known) => level = level.max(*known),
            None => {
                new.insert(symbol.to_owned());
            }
        });
        if let Op::Extent { symbol } = &node.op {
            new.insert(symbol.clone());
        }
        if new.is_empty() && !decides_extents(node) {
            let is_source =
                is_source(g, node) && node.inputs.iter().all(|&v| self.is_anywhere(g, v));
            return Ok(match is_source {
                true => Place::Anywhere(level),
                false => Place::Segment(level),
            });
        }
        if node.op.class() != OpClass::Control {
            return Err(without_value(&new).at_origin(&node.origin));
        }
        let ready = new.into_iter().map(|symbol| (symbol, level + 1));
        self.symbols.extend(ready);
        Ok(Place::After(level))
    }

    fn place_of(&self, g: &Graph, v: ValueId) -> Option<Place> {
        match g.value(v).def {
            Def::Node(n, _) => Some(self.nodes[n.0 as usize]),
            Def::Input(_) => None,
        }
    }

    fn ready(&self, g: &Graph, v: ValueId) -> usize {
        self.place_of(g, v).map_or(0, Place::ready)
    }

    fn is_anywhere(&self, g: &Graph, v: ValueId) -> bool {
        matches!(self.place_of(g, v), Some(Place::Anywhere(_)))
    }

    fn is_between(&self, id: NodeId, level: usize) -> bool {
        self.nodes[id.0 as usize] == Place::After(level)
    }

    /// Symbols with values after the segment of a level.
    fn symbols_before(&self, level: usize) -> BTreeSet<String> {
        let known = self.symbols.iter().filter(|(_, ready)| **ready <= level);
        known.map(|(symbol, _)| symbol.clone()).collect()
    }

    /// Copies the sources among the operands of a node that is between segments.
    fn copy_sources(&self, host: &mut Rebuild, g: &Graph, node: &Node) -> Result<()> {
        let mut operands = node.inputs.iter();
        operands.try_for_each(|&v| self.copy_source(host, g, v))
    }

    fn copy_source(&self, host: &mut Rebuild, g: &Graph, v: ValueId) -> Result<()> {
        match g.value(v).def {
            Def::Node(n, _) if self.is_anywhere(g, v) && !host.has(v) => {
                self.copy_sources(host, g, g.node(n))?;
                host.copy(n, g.node(n))
            }
            _ => Ok(()),
        }
    }
}

/// True for nodes that are computed where their results are used if that needs no other values: a
/// segment that gets weights as constants can fold and pack them.
fn is_source(g: &Graph, node: &Node) -> bool {
    let is_cheap = matches!(
        node.op,
        Op::Constant { .. } | Op::Iota { .. } | Op::Broadcast { .. } | Op::Reshape { .. }
    );
    let class = node.op.class();
    let has_effects = matches!(
        class,
        OpClass::Control | OpClass::State | OpClass::Transfer | OpClass::Cluster
    );
    is_cheap || !has_effects && unknown(g, node, &BTreeSet::new()).is_empty()
}

fn without_value(symbols: &BTreeSet<String>) -> Error {
    let names: Vec<&str> = symbols.iter().map(String::as_str).collect();
    Error::invalid(format!(
        "no input and no node before gives {} a value",
        names.join(", ")
    ))
}

/// The nodes of one segment, and the sources that they use, in order.
struct Part {
    nodes: Vec<NodeId>,
    /// Values from elsewhere.
    operands: Vec<ValueId>,
    /// Values that are used elsewhere.
    results: Vec<ValueId>,
}

impl Part {
    fn of(g: &Graph, levels: &Levels, level: usize) -> Part {
        let own = g
            .nodes()
            .filter(|(id, _)| levels.nodes[id.0 as usize] == Place::Segment(level));
        let mut nodes: BTreeSet<NodeId> = own.map(|(id, _)| id).collect();
        let results = results(g, &nodes);
        let mut operands = Vec::new();
        let mut open: Vec<ValueId> = nodes
            .iter()
            .flat_map(|&n| g.node(n).inputs.clone())
            .collect();
        while let Some(v) = open.pop() {
            match g.value(v).def {
                Def::Node(n, _) if nodes.contains(&n) => {}
                Def::Node(n, _) if levels.is_anywhere(g, v) => {
                    nodes.insert(n);
                    open.extend(&g.node(n).inputs);
                }
                _ => operands.push(v),
            }
        }
        operands.sort_unstable();
        operands.dedup();
        Part {
            nodes: nodes.into_iter().collect(),
            operands,
            results,
        }
    }

    /// True when the nodes compute few elements: then calling code for them takes longer.
    fn is_small(&self, g: &Graph) -> bool {
        let is_small = |v: &ValueId| {
            let n = g.ty(*v).shape.n_elements().as_usize();
            n.is_some_and(|n| n <= MAX_SMALL)
        };
        self.nodes.iter().map(|&n| g.node(n)).all(|node| {
            let has_state = node.op.class() == OpClass::State || !node.regions.is_empty();
            !has_state && node.inputs.iter().chain(&node.outputs).all(is_small)
        })
    }

    fn copy_to(&self, host: &mut Rebuild, g: &Graph) -> Result<()> {
        let is_new = |host: &Rebuild, node: &Node| !node.outputs.iter().all(|&v| host.has(v));
        for &id in &self.nodes {
            if is_new(host, g.node(id)) {
                host.copy(id, g.node(id))?;
            }
        }
        Ok(())
    }

    /// Adds the nodes as one segment. Symbols that no operand has as an extent come with operands
    /// that have no elements.
    fn make_segment(&self, host: &mut Rebuild, g: &Graph, n_segments: &mut usize) -> Result<()> {
        let mut body = Graph::new(&format!("{}.{n_segments}", g.name));
        let operands = self.operands.iter();
        let operands = operands.map(|&v| (v, body.add_input(&name_of(g, v), g.ty(v).clone())));
        let operands: Vec<(ValueId, ValueId)> = operands.collect();
        let mut args: Vec<ValueId> = self.operands.iter().map(|&v| host.get(v)).collect();
        for symbol in self.hidden_symbols(g) {
            let sizes = without_elements(&symbol);
            body.add_input(
                &format!("size of {symbol}"),
                Type::new(DType::I64, sizes.clone()),
            );
            args.push(add_empty(host, sizes)?);
        }
        let body = self.filled(body, g, &operands)?;
        let number = *n_segments;
        *n_segments += 1;
        let op = Op::Segment { number };
        let made = (host.graph).add_with_regions(op, &args, vec![body], &Origin::default())?;
        host.set_all(&self.results, &made);
        Ok(())
    }

    /// The body with the nodes and results; `operands` are its inputs.
    fn filled(&self, body: Graph, g: &Graph, operands: &[(ValueId, ValueId)]) -> Result<Graph> {
        let mut copied = Rebuild::onto(g, body);
        for &(v, input) in operands {
            copied.set(v, input);
        }
        for &n in &self.nodes {
            copied.copy(n, g.node(n))?;
        }
        for &v in &self.results {
            let result = copied.get(v);
            copied.graph.add_output(&name_of(g, v), result);
        }
        Ok(copied.graph)
    }

    /// Symbols of the nodes that are not the whole extent of an operand.
    fn hidden_symbols(&self, g: &Graph) -> BTreeSet<String> {
        let mut symbols = BTreeSet::new();
        for node in self.nodes.iter().map(|&n| g.node(n)) {
            node.visit_symbols(g, &mut |symbol| {
                symbols.insert(symbol.to_owned());
            });
        }
        for v in &self.operands {
            let extents = g.ty(*v).shape.iter();
            extents.for_each(|d| {
                d.visit_symbols(&mut |s| {
                    symbols.insert(s.to_owned());
                })
            });
        }
        for dim in self.operands.iter().flat_map(|&v| g.ty(v).shape.iter()) {
            dim.as_symbol().map(|symbol| symbols.remove(symbol));
        }
        symbols
    }
}

/// Shape of a tensor without elements that has a symbol as an extent.
fn without_elements(symbol: &str) -> Vec<Dim> {
    vec![Dim::symbol(symbol), Dim::constant(0)]
}

fn add_empty(host: &mut Rebuild, shape: Vec<Dim>) -> Result<ValueId> {
    let (dtype, axis) = (DType::I64, 0);
    let empty = Op::Iota { dtype, shape, axis };
    host.graph.add1(empty, &[], &Origin::default())
}

/// Values of some nodes that others use or wait for, or that are outputs.
fn results(g: &Graph, nodes: &BTreeSet<NodeId>) -> Vec<ValueId> {
    let is_own = |v: &ValueId| match g.value(*v).def {
        Def::Node(n, _) => nodes.contains(&n),
        Def::Input(_) => false,
    };
    let others = g.nodes().filter(|(id, _)| !nodes.contains(id));
    let awaited = |&c: &NodeId| g.node(c).outputs.iter().copied();
    let used = others.flat_map(|(_, node)| {
        let awaited = node.control.iter().flat_map(awaited);
        node.inputs.iter().copied().chain(awaited)
    });
    let used = used.chain(g.outputs.iter().map(|o| o.value));
    let used: BTreeSet<ValueId> = used.filter(is_own).collect();
    used.into_iter().collect()
}

/// The name of an input or output, or one that no other value has.
fn name_of(g: &Graph, v: ValueId) -> String {
    if let Def::Input(i) = g.value(v).def {
        return g.input_names[i as usize].clone();
    }
    let output = g.outputs.iter().find(|o| o.value == v);
    output.map_or_else(|| format!("value {}", v.0), |o| o.name.clone())
}

#[cfg(test)]
mod tests;
