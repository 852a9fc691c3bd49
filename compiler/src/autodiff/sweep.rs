//! The reverse sweep: cotangents from the loss backwards.

use super::activity::Activity;
use super::name_of;
use super::tiles::Tiles;
use super::{branches, steps};
use crate::error::Result;
use crate::ir::gradient::{Gradient, Rule, Vjp, gradient_origin, no_gradient};
use crate::ir::{Graph, Node, NodeId, Op, Origin, Requested, ScalarOp, ValueId};
use gristmill_runtime::Tensor;
use std::mem::take;

/// A graph under differentiation.
pub struct Sweep<'g> {
    graph: &'g mut Graph,
    activity: &'g Activity,
    /// Cotangents of each value by its uses, the last use first; none is zero.
    contributions: Vec<Vec<ValueId>>,
}

impl<'g> Sweep<'g> {
    /// A sweep over the nodes that the graph has now.
    pub fn new(graph: &'g mut Graph, activity: &'g Activity) -> Sweep<'g> {
        let contributions = vec![Vec::new(); graph.n_values()];
        Sweep {
            graph,
            activity,
            contributions,
        }
    }

    /// Computes the cotangents of all active values, that of the loss being 1.
    pub fn run(&mut self, loss: ValueId) -> Result<()> {
        let n_nodes = self.graph.n_nodes() as u32;
        if self.activity.is_active(loss) {
            let one = self.full(loss, 1.0)?;
            self.seed(loss, one);
        }
        self.pull_all_back(n_nodes)
    }

    /// Computes the cotangents of all active values from those of some, which are pairs of value and cotangent.
    pub fn run_from(&mut self, seeds: &[(ValueId, ValueId)]) -> Result<()> {
        for &(v, g) in seeds.iter().rev() {
            self.seed(v, g);
        }
        self.pull_all_back(self.graph.n_nodes() as u32)
    }

    fn pull_all_back(&mut self, n_nodes: u32) -> Result<()> {
        for id in (0..n_nodes).rev().map(NodeId) {
            self.pull_back(id)?;
        }
        Ok(())
    }

    fn seed(&mut self, v: ValueId, g: ValueId) {
        if self.activity.is_active(v) {
            self.contributions[v.0 as usize].push(g);
        }
    }

    /// The gradient of a value once all its users are behind; zeros where nothing uses it.
    pub fn gradient(&mut self, v: ValueId) -> Result<ValueId> {
        match self.cotangent(v)? {
            Some(g) => Ok(g),
            None => self.full(v, 0.0),
        }
    }

    /// Passes the cotangents of a node's results on to its operands.
    fn pull_back(&mut self, id: NodeId) -> Result<()> {
        let node = self.graph.node(id);
        if !self.activity.is_active_node(self.graph, node) {
            return Ok(());
        }
        let node = node.clone();
        let cotangents = self.cotangents(&node)?;
        if cotangents.iter().all(Option::is_none) {
            return Ok(());
        }
        let gradients = self.gradients(id, &node, cotangents)?;
        for (v, gradient) in node.inputs.iter().zip(gradients).rev() {
            self.contributions[v.0 as usize].extend(gradient);
        }
        Ok(())
    }

    fn cotangents(&mut self, node: &Node) -> Result<Vec<Option<ValueId>>> {
        let mut cotangents = Vec::new();
        for &v in &node.outputs {
            let passes = self.activity.passes(self.graph, v);
            cotangents.push(if passes { self.cotangent(v)? } else { None });
        }
        Ok(cotangents)
    }

    /// Gradients of a node's operands.
    fn gradients(
        &mut self,
        id: NodeId,
        node: &Node,
        cotangents: Vec<Option<ValueId>>,
    ) -> Result<Vec<Option<ValueId>>> {
        let needed = node.inputs.iter().map(|&v| self.activity.is_active(v));
        let needed: Vec<bool> = needed.collect();
        let rule = match node.op.spec().gradient {
            Gradient::Branches => {
                return branches::gradients(self.graph, node, &cotangents, &needed);
            }
            Gradient::Steps => return steps::gradients(self, id, node, &cotangents, &needed),
            _ => rule_of(node)?,
        };
        let mut vjp = Vjp::new(self.graph, node.clone(), cotangents, needed);
        rule(&mut vjp)?;
        Ok(vjp.into_gradients())
    }

    /// The sum of a value's contributions so far, which takes their place.
    fn cotangent(&mut self, v: ValueId) -> Result<Option<ValueId>> {
        let parts = take(&mut self.contributions[v.0 as usize]);
        let sum = self.sum(v, &parts)?;
        self.contributions[v.0 as usize].extend(sum);
        Ok(sum)
    }

    /// The sum of contributions to a value, from left to right; the parts side by side where they are its slices.
    fn sum(&mut self, of: ValueId, parts: &[ValueId]) -> Result<Option<ValueId>> {
        if let Some(tiles) = Tiles::of(self.graph, parts) {
            let axis = tiles.axis;
            return Ok(Some(self.emit(of, Op::Concat { axis }, &tiles.parts)?));
        }
        let Some((&first, others)) = parts.split_first() else {
            return Ok(None);
        };
        let mut sum = first;
        for &part in others {
            sum = self.emit(of, Op::Map(ScalarOp::Add), &[sum, part])?;
        }
        Ok(Some(sum))
    }

    /// The graph under differentiation.
    pub fn graph_mut(&mut self) -> &mut Graph {
        self.graph
    }

    /// A tensor of the type of a value with equal elements.
    pub fn full(&mut self, like: ValueId, element: f64) -> Result<ValueId> {
        let ty = self.graph.ty(like).clone();
        let element = Tensor::from_f64s(ty.dtype, &[], &[element])?;
        let scalar = self.graph.add_constant(element, &self.origin_of(like));
        if ty.rank() == 0 {
            return Ok(scalar);
        }
        let shape = ty.shape.0;
        self.emit(like, Op::Broadcast { shape }, &[scalar])
    }

    /// Emits a node that belongs to a value.
    pub fn emit(&mut self, of: ValueId, op: Op, inputs: &[ValueId]) -> Result<ValueId> {
        let (origin, device) = (self.origin_of(of), self.device_of(of));
        let result = self.graph.add1(op, inputs, &origin)?;
        let last = NodeId(self.graph.n_nodes() as u32 - 1);
        self.graph.node_mut(last).device = device;
        Ok(result)
    }

    /// Origin of nodes that belong to a value.
    fn origin_of(&self, v: ValueId) -> Origin {
        match self.graph.def_node(v) {
            Some(node) => gradient_origin(&node.origin),
            None => gradient_origin(&Origin::new(&name_of(self.graph, v))),
        }
    }

    /// Device request of nodes that belong to a value.
    fn device_of(&self, v: ValueId) -> Requested {
        let node = self.graph.def_node(v)?;
        node.device.clone()
    }
}

fn rule_of(node: &Node) -> Result<Rule> {
    match node.op.spec().gradient {
        Gradient::Rule(rule) => Ok(rule),
        Gradient::None(why) => Err(no_gradient(node, why)),
        Gradient::Zero => Err(no_gradient(node, "it is zero")),
        Gradient::Branches | Gradient::Steps | Gradient::Iterations => {
            Err(no_gradient(node, "it is that of its regions"))
        }
    }
}
