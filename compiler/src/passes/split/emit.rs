//! The graph of all devices.

use super::copies::{Copies, accumulator, cast, origin};
use super::sharding::{Computation, Plan, is_zero};
use super::{Cut, Places, Sharding, Shares};
use crate::Tensor;
use crate::error::{Error, Result};
use crate::ir::{Graph, Node, NodeId, Op, ReduceKind, Requested, ScalarOp, ValueId};
use std::collections::BTreeMap;

/// A graph of several devices under construction.
pub(super) struct Emitter<'a> {
    pub(super) old: &'a Graph,
    pub(super) new: Graph,
    plan: &'a Plan,
    pub(super) shares: &'a Shares,
    pub(super) places: &'a Places,
    /// The values of the shares, by old value and sharding.
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
        let is_whole = computed.is_whole();
        for r in 0..self.n_copies(is_whole) {
            let (share, place) = match is_whole {
                true => (
                    self.shares.first_of(r),
                    self.place_of_whole(r, node.outputs[0]),
                ),
                false => (r, self.place_of(r)),
            };
            let own: Vec<ValueId> = operands.iter().map(|all| all[share]).collect();
            let of = self.copies();
            let made = self.at(&place, |new| of.add(new, node, computed, r, &own))?;
            results
                .iter_mut()
                .zip(made)
                .for_each(|(all, v)| all.push(v));
        }
        for ((&v, &sharding), made) in node.outputs.iter().zip(&computed.results).zip(results) {
            let all = match is_whole {
                true => self.of_shares(made),
                false => made,
            };
            self.values.insert((v, sharding), all);
        }
        Ok(())
    }

    fn copies(&self) -> Copies<'a> {
        Copies {
            old: self.old,
            shares: self.shares,
        }
    }

    /// Nodes for a value that is whole: one for each device, or one on a server. For another one: one for each share.
    fn n_copies(&self, is_whole: bool) -> usize {
        match (is_whole, self.has_servers()) {
            (true, true) => 1,
            (true, false) => self.shares.n_devices(),
            (false, _) => self.shares.n(),
        }
    }

    pub(super) fn has_servers(&self) -> bool {
        !self.places.servers.is_empty()
    }

    /// The values of the shares, from those of the devices, or from one for all.
    fn of_shares(&self, made: Vec<ValueId>) -> Vec<ValueId> {
        let own = |&device: &usize| made[device.min(made.len() - 1)];
        self.shares.devices.iter().map(own).collect()
    }

    /// The device of a share.
    fn place_of(&self, share: usize) -> Requested {
        self.places.devices[self.shares.devices[share]].clone()
    }

    /// Puts the nodes from one on on a device.
    fn request(&mut self, from: usize, place: &Requested) {
        for id in from..self.new.n_nodes() {
            self.new.node_mut(NodeId(id as u32)).device = place.clone();
        }
    }

    /// The device, or the value's server, of device `r`'s node for an old value without shards.
    pub(super) fn place_of_whole(&self, r: usize, v: ValueId) -> Requested {
        let server = self.places.servers.get(self.places.homes.at(v));
        server.unwrap_or(&self.places.devices[r]).clone()
    }

    /// Nodes on a place.
    pub(super) fn at<T>(
        &mut self,
        place: &Requested,
        f: impl FnOnce(&mut Graph) -> Result<T>,
    ) -> Result<T> {
        let n_before = self.new.n_nodes();
        let made = f(&mut self.new)?;
        self.request(n_before, place);
        Ok(made)
    }

    /// The values of the devices for an old value in a sharding, joined or cut if need be.
    fn resharded(&mut self, v: ValueId, sharding: Sharding) -> Result<Vec<ValueId>> {
        if let Some(all) = self.values.get(&(v, sharding)) {
            return Ok(all.clone());
        }
        let all = match sharding {
            Sharding::Replicated => self.replicated(v)?,
            Sharding::Shard(cut) => self.cut(v, cut)?,
            // Zeros are partial sums of zeros.
            Sharding::Partial if is_zero(self.old, v) => self.resharded(v, Sharding::Replicated)?,
            Sharding::Partial if self.plan.has_sums() => self.as_sums(v)?,
            Sharding::Partial => {
                return Err(Error::internal(
                    "partial sums of a value are asked for, and there are none",
                ));
            }
        };
        self.values.insert((v, sharding), all.clone());
        Ok(all)
    }

    /// Partial sums of a replicated value: itself for the first share, and zeros for the others.
    fn as_sums(&mut self, v: ValueId) -> Result<Vec<ValueId>> {
        let mut all = self.resharded(v, Sharding::Replicated)?;
        let ty = self.old.ty(v).clone();
        let shape = ty.static_shape();
        let shape = shape.ok_or_else(|| Error::internal("a sum without extents"))?;
        let origin = origin(self.old, v);
        for (r, sum) in all.iter_mut().enumerate().skip(1) {
            let place = self.place_of(r);
            *sum = self.at(&place, |new| {
                let zero = Op::constant(Tensor::zeros(ty.dtype, &[])?);
                let zero = new.add1(zero, &[], &origin)?;
                let shape = shape.iter().map(|&n| n.into()).collect();
                new.add1(Op::Broadcast { shape }, &[zero], &origin)
            })?;
        }
        Ok(all)
    }

    fn replicated(&mut self, v: ValueId) -> Result<Vec<ValueId>> {
        let made = self.plan.sharding(v);
        let Some(parts) = self.values.get(&(v, made)).cloned() else {
            return Err(Error::internal("a value is used before it is made"));
        };
        let made = match made {
            Sharding::Shard(cut) => {
                let copies = 0..self.n_copies(true);
                let mut join = |r| {
                    let of = self.copies();
                    let place = self.place_of_whole(r, v);
                    self.at(&place, |new| of.join(new, v, &parts, cut))
                };
                copies.map(&mut join).collect::<Result<_>>()?
            }
            _ => self.sum(v, &parts)?,
        };
        Ok(self.of_shares(made))
    }

    /// The sums of partial sums of an old value; those of half types are in `f32`.
    fn sum(&mut self, v: ValueId, parts: &[ValueId]) -> Result<Vec<ValueId>> {
        if self.shares.leaves.is_some() {
            return self.sum_in_tree(v, parts);
        }
        if self.has_servers() {
            return Ok(vec![self.sum_on_server(v, parts)?]);
        }
        let origin = origin(self.old, v);
        let kind = ReduceKind::Sum;
        self.new.add(Op::AllReduce { kind }, parts, &origin)
    }

    /// The sum on the server of an old value, in the order of the devices.
    fn sum_on_server(&mut self, v: ValueId, parts: &[ValueId]) -> Result<ValueId> {
        let origin = origin(self.old, v);
        let dtype = self.old.ty(v).dtype;
        let accumulator = accumulator(dtype);
        let place = self.place_of_whole(0, v);
        self.at(&place, |new| {
            let parts = parts
                .iter()
                .map(|&part| cast(new, part, accumulator, &origin));
            let parts: Vec<ValueId> = parts.collect::<Result<_>>()?;
            let (&first, rest) = parts
                .split_first()
                .ok_or_else(|| Error::internal("a sum of no devices"))?;
            let add = |sum, &part| new.add1(Op::Map(ScalarOp::Add), &[sum, part], &origin);
            let sum = rest.iter().try_fold(first, add)?;
            cast(new, sum, dtype, &origin)
        })
    }

    /// Shards of a replicated value.
    fn cut(&mut self, v: ValueId, cut: Cut) -> Result<Vec<ValueId>> {
        let whole = self.resharded(v, Sharding::Replicated)?;
        let of = self.copies();
        let shard = |(r, &whole): (usize, &ValueId)| {
            // An input is everywhere; of a value on a server, the shards cross.
            let place = match self.old.def_node(v) {
                None => self.place_of(r),
                Some(_) => self.place_of_whole(self.shares.devices[r], v),
            };
            self.at(&place, |new| of.cut(new, v, whole, cut, r))
        };
        whole.iter().enumerate().map(shard).collect()
    }
}
