//! Copies of nodes, each for the part of one device.

use super::sharding::{Computation, Plan};
use super::{Cut, Sharding, Shares};
use crate::error::{Error, Result};
use crate::ir::{Dim, Graph, Node, Op, Origin, ReduceKind, ScalarOp, Type, ValueId};
use crate::passes::all_reduce::reshape;
use crate::{DType, Tensor};
use gristmill_runtime::program::replica_name;
use std::collections::BTreeMap;

/// The copies of nodes of a graph, or of the body of one of its scans.
#[derive(Clone, Copy)]
pub(super) struct Copies<'a> {
    pub(super) old: &'a Graph,
    pub(super) shares: &'a Shares,
}

/// The name of a share's own variable: `folder/share_1/name`, which no other variable of `folder` has.
fn name_of_share(name: &str, r: usize) -> String {
    match (r, name.split_once('/')) {
        (0, _) => name.to_owned(),
        (r, Some((folder, rest))) => format!("{folder}/share_{r}/{rest}"),
        (r, None) => format!("share_{r}/{name}"),
    }
}

impl Copies<'_> {
    /// Adds what device `r` computes of a node.
    pub(super) fn add(
        &self,
        new: &mut Graph,
        node: &Node,
        computed: &Computation,
        r: usize,
        operands: &[ValueId],
    ) -> Result<Vec<ValueId>> {
        let mut copy = node.clone();
        match &mut copy.op {
            Op::ReadVariable { name, .. } | Op::AssignVariable { name, .. } => {
                *name = match computed.sharding() {
                    Sharding::Partial => name_of_share(name, r),
                    _ => replica_name(name, r),
                };
            }
            _ => {}
        }
        if let (Some(plan), [body]) = (&computed.body, &node.regions[..]) {
            let copies = Copies {
                old: body,
                shares: self.shares,
            };
            copy.regions = vec![copies.body(plan, r)?];
            return new.add_copy(&copy, operands);
        }
        match computed.sharding() {
            Sharding::Replicated => new.add_copy(&copy, operands),
            Sharding::Shard(cut) => self.shard(new, copy, cut, r, operands),
            Sharding::Partial => self.partial(new, &copy, r, operands),
        }
    }

    fn shard(
        &self,
        new: &mut Graph,
        mut node: Node,
        cut: Cut,
        r: usize,
        operands: &[ValueId],
    ) -> Result<Vec<ValueId>> {
        let axis = cut.axis;
        let whole = self.extent(node.outputs[0], axis)?;
        let extent: Dim = self.shares.extent(r, whole).into();
        let before = self.shares.part(r, whole).start;
        match &mut node.op {
            Op::Broadcast { shape } | Op::Reshape { shape } | Op::Iota { shape, .. } => {
                shape[axis] = extent;
            }
            Op::RandomBits { shape, first, .. } => {
                shape[axis] = extent;
                let inner = &self.shape(node.outputs[0])?[axis + 1..];
                *first += (before * inner.iter().product::<usize>()) as u64;
            }
            Op::Slice { sizes, .. } => sizes[axis] = extent,
            _ => {}
        }
        let results = new.add_copy(&node, operands)?;
        match node.op {
            Op::Iota { dtype, axis, .. } if axis == cut.axis && before > 0 => {
                let start = Tensor::from_f64s(dtype, &[], &[before as f64])?;
                let start = new.add1(Op::constant(start), &[], &node.origin)?;
                let sum = Op::Map(ScalarOp::Add);
                Ok(vec![new.add1(sum, &[results[0], start], &node.origin)?])
            }
            _ => Ok(results),
        }
    }

    /// A device's partial sum; for a mean, the mean of its shard times the shard's part of all examples.
    fn partial(
        &self,
        new: &mut Graph,
        node: &Node,
        r: usize,
        operands: &[ValueId],
    ) -> Result<Vec<ValueId>> {
        let results = new.add_copy(node, operands)?;
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
        let (dtype, origin) = (new.ty(results[0]).dtype, &node.origin);
        let wide = accumulator(dtype);
        let part = Tensor::from_f64s(wide, &[], &[part])?;
        let part = new.add1(Op::constant(part), &[], origin)?;
        let mean = cast(new, results[0], wide, origin)?;
        let scaled = new.add1(Op::Map(ScalarOp::Mul), &[mean, part], origin)?;
        Ok(vec![cast(new, scaled, dtype, origin)?])
    }

    /// The body of a scan, for the steps of device `r`.
    fn body(&self, plan: &Plan, r: usize) -> Result<Graph> {
        let mut new = self.old.emptied();
        let mut values = BTreeMap::new();
        for (&v, name) in self.old.inputs.iter().zip(&self.old.input_names) {
            let sharding = plan.sharding(v);
            let formal = new.add_input(name, self.part_of_type(v, sharding, r)?);
            values.insert((v, sharding), formal);
        }
        let mut of_device = OfDevice {
            copies: *self,
            r,
            new,
            values,
        };
        for (id, node) in self.old.nodes() {
            for computed in plan.computations_of(id) {
                of_device.compute(node, computed)?;
            }
        }
        for (o, &sharding) in self.old.outputs.iter().zip(plan.outputs()) {
            let value = of_device.value(o.value, sharding)?;
            of_device.new.add_output(&o.name, value);
        }
        Ok(of_device.new)
    }

    fn part_of_type(&self, v: ValueId, sharding: Sharding, r: usize) -> Result<Type> {
        let mut ty = self.old.ty(v).clone();
        if let Sharding::Shard(cut) = sharding {
            let extent = self.shares.extent(r, self.extent(v, cut.axis)?);
            ty.shape.0[cut.axis] = extent.into();
        }
        Ok(ty)
    }

    fn extent(&self, v: ValueId, axis: usize) -> Result<usize> {
        let extent = self.shape(v)?.get(axis).copied();
        extent.ok_or_else(|| Error::internal("a shard along an axis that a value has not"))
    }

    /// The shape of an old value.
    pub(super) fn shape(&self, v: ValueId) -> Result<Vec<usize>> {
        let shape = self.old.ty(v).static_shape();
        shape.ok_or_else(|| Error::internal("a shard of a value without extents"))
    }

    /// Device `r`'s shard of an old value, of a copy of the whole.
    pub(super) fn cut(
        &self,
        new: &mut Graph,
        v: ValueId,
        whole: ValueId,
        cut: Cut,
        r: usize,
    ) -> Result<ValueId> {
        let origin = &origin(self.old, v);
        let shape = self.shape(v)?;
        let Cut { axis, outer } = cut;
        let extent = shape[axis] / outer;
        let part = self.shares.part(r, extent);
        let (blocks, own) = blocks(&shape, cut, extent);
        let mut sizes = blocks.clone();
        sizes[own] = part.len();
        let mut starts = vec![0_usize; blocks.len()];
        starts[own] = part.start;
        let slice = Op::Slice {
            starts: starts.into_iter().map(Into::into).collect(),
            sizes: sizes.into_iter().map(Into::into).collect(),
            steps: vec![1; blocks.len()],
        };
        if outer == 1 {
            return new.add1(slice, &[whole], origin);
        }
        let split = new.add1(reshape(&blocks), &[whole], origin)?;
        let shard = new.add1(slice, &[split], origin)?;
        let mut joined = shape;
        joined[axis] = outer * part.len();
        new.add1(reshape(&joined), &[shard], origin)
    }

    /// An old value, of the shards of all devices.
    pub(super) fn join(
        &self,
        new: &mut Graph,
        v: ValueId,
        parts: &[ValueId],
        cut: Cut,
    ) -> Result<ValueId> {
        let origin = &origin(self.old, v);
        if cut.outer == 1 {
            return new.add1(Op::Concat { axis: cut.axis }, parts, origin);
        }
        let shape = self.shape(v)?;
        let extent = shape[cut.axis] / cut.outer;
        let split = |(r, &part): (usize, &ValueId)| {
            let (blocks, _) = blocks(&shape, cut, self.shares.extent(r, extent));
            new.add1(reshape(&blocks), &[part], origin)
        };
        let split: Vec<ValueId> = parts.iter().enumerate().map(split).collect::<Result<_>>()?;
        let axis = cut.axis + 1;
        let joined = new.add1(Op::Concat { axis }, &split, origin)?;
        new.add1(reshape(&shape), &[joined], origin)
    }
}

/// A shape with an axis of its own for the batch, of some extent, and that axis.
fn blocks(shape: &[usize], cut: Cut, extent: usize) -> (Vec<usize>, usize) {
    let (before, rest) = shape.split_at(cut.axis);
    match cut.outer {
        1 => ([before, &[extent], &rest[1..]].concat(), cut.axis),
        outer => (
            [before, &[outer, extent], &rest[1..]].concat(),
            cut.axis + 1,
        ),
    }
}

/// The dtype of sums of values of a dtype.
pub(super) fn accumulator(dtype: DType) -> DType {
    match dtype {
        DType::BF16 => DType::F32,
        other => other,
    }
}

/// A value in a dtype.
pub(super) fn cast(g: &mut Graph, v: ValueId, to: DType, origin: &Origin) -> Result<ValueId> {
    match g.ty(v).dtype == to {
        true => Ok(v),
        false => g.add1(Op::Map(ScalarOp::Cast(to)), &[v], origin),
    }
}

/// The origin of the node that makes a value.
pub(super) fn origin(g: &Graph, v: ValueId) -> Origin {
    let maker = g.def_node(v);
    maker.map_or_else(Origin::default, |node| node.origin.clone())
}

/// The body of a scan for one device, under construction.
struct OfDevice<'a> {
    copies: Copies<'a>,
    r: usize,
    new: Graph,
    /// Values by old value and sharding.
    values: BTreeMap<(ValueId, Sharding), ValueId>,
}

impl OfDevice<'_> {
    fn compute(&mut self, node: &Node, computed: &Computation) -> Result<()> {
        let pairs = node.inputs.iter().zip(&computed.operands);
        let operands = pairs.map(|(&v, &sharding)| self.value(v, sharding));
        let operands: Vec<ValueId> = operands.collect::<Result<_>>()?;
        let Self { copies, r, new, .. } = self;
        let made = copies.add(new, node, computed, *r, &operands)?;
        for ((&v, &sharding), made) in node.outputs.iter().zip(&computed.results).zip(made) {
            self.values.insert((v, sharding), made);
        }
        Ok(())
    }

    /// A value in a sharding, cut out of the whole if need be. Zeros are partial sums of zeros.
    fn value(&mut self, v: ValueId, sharding: Sharding) -> Result<ValueId> {
        if let Some(&value) = self.values.get(&(v, sharding)) {
            return Ok(value);
        }
        let Some(&whole) = self.values.get(&(v, Sharding::Replicated)) else {
            return Err(Error::internal("a step of a scan needs another device"));
        };
        let value = match sharding {
            Sharding::Shard(cut) => self.copies.cut(&mut self.new, v, whole, cut, self.r)?,
            _ => whole,
        };
        self.values.insert((v, sharding), value);
        Ok(value)
    }
}
