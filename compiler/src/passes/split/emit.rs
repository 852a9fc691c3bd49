//! The graph of all devices.

use super::sharding::{Computation, Plan};
use super::{Places, Sharding, Shares};
use crate::Tensor;
use crate::error::{Error, Result};
use crate::ir::{Graph, Node, NodeId, Op, Origin, ReduceKind, Requested, ScalarOp, ValueId};
use gristmill_runtime::program::replica_name;
use std::collections::BTreeMap;

/// A graph of several devices under construction.
pub(super) struct Emitter<'a> {
    old: &'a Graph,
    new: Graph,
    plan: &'a Plan,
    shares: &'a Shares,
    places: &'a Places,
    /// The values of the devices, by old value and sharding.
    values: BTreeMap<(ValueId, Sharding), Vec<ValueId>>,
}

impl<'a> Emitter<'a> {
    /// A graph with the inputs of another.
    pub(super) fn new(
        old: &'a Graph,
        plan: &'a Plan,
        shares: &'a Shares,
        places: &'a Places,
    ) -> Emitter<'a> {
        let mut emitter = Emitter {
            old,
            new: old.emptied(),
            plan,
            shares,
            places,
            values: BTreeMap::new(),
        };
        for (&v, name) in old.inputs.iter().zip(&old.input_names) {
            let input = emitter.new.add_input(name, old.ty(v).clone());
            let all = vec![input; shares.n()];
            emitter.values.insert((v, Sharding::Replicated), all);
        }
        emitter
    }

    pub(super) fn graph(mut self) -> Result<Graph> {
        for (id, node) in self.old.nodes() {
            for computed in self.plan.computations_of(id) {
                self.compute(node, computed)?;
            }
        }
        for o in &self.old.outputs {
            let value = self.resharded(o.value, Sharding::Replicated)?[0];
            self.new.add_output(&o.name, value);
        }
        Ok(self.new)
    }

    /// One node for each device.
    fn compute(&mut self, node: &Node, computed: &Computation) -> Result<()> {
        let pairs = node.inputs.iter().zip(&computed.operands);
        let operands = pairs.map(|(&v, &sharding)| self.resharded(v, sharding));
        let operands: Vec<Vec<ValueId>> = operands.collect::<Result<_>>()?;
        let mut results = vec![Vec::new(); node.outputs.len()];
        for r in 0..self.n_copies(computed.sharding) {
            let own: Vec<ValueId> = operands.iter().map(|all| all[r]).collect();
            let made = self.replica(node, computed, r, &own)?;
            results
                .iter_mut()
                .zip(made)
                .for_each(|(all, v)| all.push(v));
        }
        for (&v, made) in node.outputs.iter().zip(results) {
            let all = self.of_all(made);
            self.values.insert((v, computed.sharding), all);
        }
        Ok(())
    }

    /// Nodes for a value of a sharding.
    fn n_copies(&self, sharding: Sharding) -> usize {
        match sharding {
            Sharding::Replicated if self.has_servers() => 1,
            _ => self.shares.n(),
        }
    }

    fn has_servers(&self) -> bool {
        !self.places.servers.is_empty()
    }

    /// The values of the devices, of which one may stand for all.
    fn of_all(&self, made: Vec<ValueId>) -> Vec<ValueId> {
        match made[..] {
            [one] => vec![one; self.shares.n()],
            _ => made,
        }
    }

    /// The node of one device.
    fn replica(
        &mut self,
        node: &Node,
        computed: &Computation,
        r: usize,
        operands: &[ValueId],
    ) -> Result<Vec<ValueId>> {
        let mut copy = node.clone();
        match &mut copy.op {
            Op::ReadVariable { name, .. } | Op::AssignVariable { name, .. } => {
                *name = replica_name(name, r);
            }
            _ => {}
        }
        match computed.sharding {
            Sharding::Replicated => {
                let results = self.new.add_copy(&copy, operands)?;
                self.request_replicated(r, node.outputs[0]);
                Ok(results)
            }
            Sharding::Shard(axis) => self.shard(copy, axis, r, operands),
            Sharding::Partial => self.partial(&copy, r, operands),
        }
    }

    /// A node on its device.
    fn put(&mut self, node: &Node, r: usize, operands: &[ValueId]) -> Result<Vec<ValueId>> {
        let results = self.new.add_copy(node, operands)?;
        self.request(r);
        Ok(results)
    }

    /// Puts the last node on a device.
    fn request(&mut self, r: usize) {
        self.request_at(self.places.devices[r].clone());
    }

    /// Puts the last node, which makes an old value without shards, on a device or on the value's server.
    fn request_replicated(&mut self, r: usize, v: ValueId) {
        let server = self.places.servers.get(self.places.homes.at(v));
        let own = || self.places.devices[r].clone();
        self.request_at(server.cloned().unwrap_or_else(own));
    }

    fn request_at(&mut self, place: Requested) {
        let last = NodeId(self.new.n_nodes() as u32 - 1);
        self.new.node_mut(last).device = place;
    }

    fn add(&mut self, op: Op, operands: &[ValueId], like: &Origin, r: usize) -> Result<ValueId> {
        let result = self.new.add1(op, operands, like)?;
        self.request(r);
        Ok(result)
    }

    fn shard(
        &mut self,
        mut node: Node,
        axis: usize,
        r: usize,
        operands: &[ValueId],
    ) -> Result<Vec<ValueId>> {
        let part = self.shares.part(r, self.extent(node.outputs[0], axis)?);
        match &mut node.op {
            Op::Broadcast { shape } | Op::Reshape { shape } | Op::Iota { shape, .. } => {
                shape[axis] = part.len().into();
            }
            Op::Slice { sizes, .. } => sizes[axis] = part.len().into(),
            _ => {}
        }
        let results = self.put(&node, r, operands)?;
        match node.op {
            Op::Iota {
                dtype, axis: own, ..
            } if own == axis && part.start > 0 => {
                let start = Tensor::from_f64s(dtype, &[], &[part.start as f64])?;
                let start = self.add(Op::constant(start), &[], &node.origin, r)?;
                let sum = Op::Map(ScalarOp::Add);
                Ok(vec![self.add(
                    sum,
                    &[results[0], start],
                    &node.origin,
                    r,
                )?])
            }
            _ => Ok(results),
        }
    }

    /// A device's partial sum; for a mean, the mean of its shard times the shard's part of all examples.
    fn partial(&mut self, node: &Node, r: usize, operands: &[ValueId]) -> Result<Vec<ValueId>> {
        let results = self.put(node, r, operands)?;
        let is_mean = matches!(
            node.op,
            Op::Reduce {
                kind: ReduceKind::Mean,
                ..
            }
        );
        if !is_mean {
            return Ok(results);
        }
        let part = self.shares.ranges[r].len() as f64 / self.shares.batch as f64;
        let part = Tensor::from_f64s(self.new.ty(results[0]).dtype, &[], &[part])?;
        let part = self.add(Op::constant(part), &[], &node.origin, r)?;
        let product = Op::Map(ScalarOp::Mul);
        Ok(vec![self.add(
            product,
            &[results[0], part],
            &node.origin,
            r,
        )?])
    }

    fn extent(&self, v: ValueId, axis: usize) -> Result<usize> {
        let extent = self.old.ty(v).shape.get(axis).and_then(|d| d.as_usize());
        extent.ok_or_else(|| Error::internal("a shard of a value without extents"))
    }

    /// The values of the devices for an old value in a sharding, joined or cut if need be.
    fn resharded(&mut self, v: ValueId, sharding: Sharding) -> Result<Vec<ValueId>> {
        if let Some(all) = self.values.get(&(v, sharding)) {
            return Ok(all.clone());
        }
        let all = match sharding {
            Sharding::Replicated => self.replicated(v)?,
            Sharding::Shard(axis) => self.cut(v, axis)?,
            Sharding::Partial => {
                return Err(Error::internal(
                    "partial sums of a value are asked for, and there are none",
                ));
            }
        };
        self.values.insert((v, sharding), all.clone());
        Ok(all)
    }

    fn origin(&self, v: ValueId) -> Origin {
        let maker = self.old.def_node(v);
        maker.map_or_else(Origin::default, |node| node.origin.clone())
    }

    fn replicated(&mut self, v: ValueId) -> Result<Vec<ValueId>> {
        let origin = self.origin(v);
        let made = self.plan.sharding(v);
        let Some(parts) = self.values.get(&(v, made)).cloned() else {
            return Err(Error::internal("a value is used before it is made"));
        };
        let made = match made {
            Sharding::Shard(axis) => {
                let copies = 0..self.n_copies(Sharding::Replicated);
                let mut join = |r| {
                    let joined = self.new.add1(Op::Concat { axis }, &parts, &origin)?;
                    self.request_replicated(r, v);
                    Ok(joined)
                };
                copies.map(&mut join).collect::<Result<_>>()?
            }
            _ if self.has_servers() => vec![self.sum_on_server(v, &parts)?],
            _ => {
                let kind = ReduceKind::Sum;
                self.new.add(Op::AllReduce { kind }, &parts, &origin)?
            }
        };
        Ok(self.of_all(made))
    }

    /// The sum on the server of an old value, in the order of the devices.
    fn sum_on_server(&mut self, v: ValueId, parts: &[ValueId]) -> Result<ValueId> {
        let origin = &self.origin(v);
        let (&first, rest) = parts
            .split_first()
            .ok_or_else(|| Error::internal("a sum of no devices"))?;
        let mut sum = first;
        for &part in rest {
            sum = self
                .new
                .add1(Op::Map(ScalarOp::Add), &[sum, part], origin)?;
            self.request_replicated(0, v);
        }
        Ok(sum)
    }

    /// Shards of a replicated value.
    fn cut(&mut self, v: ValueId, axis: usize) -> Result<Vec<ValueId>> {
        let whole = self.resharded(v, Sharding::Replicated)?;
        let shape = self.old.ty(v).static_shape();
        let shape = shape.ok_or_else(|| Error::internal("a shard of a value without extents"))?;
        let origin = self.origin(v);
        let shard = |r: usize| {
            let part = self.shares.part(r, shape[axis]);
            let mut starts = vec![0_usize; shape.len()];
            let mut sizes = shape.clone();
            (starts[axis], sizes[axis]) = (part.start, part.len());
            let op = Op::Slice {
                starts: starts.into_iter().map(Into::into).collect(),
                sizes: sizes.into_iter().map(Into::into).collect(),
                steps: vec![1; shape.len()],
            };
            let shard = self.new.add1(op, &[whole[r]], &origin)?;
            // An input is everywhere; of a value on a server, the shards cross.
            match self.old.def_node(v) {
                None => self.request(r),
                Some(_) => self.request_replicated(r, v),
            }
            Ok(shard)
        };
        (0..whole.len()).map(shard).collect()
    }
}
