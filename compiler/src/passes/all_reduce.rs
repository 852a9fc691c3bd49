//! All-reduce in terms of other ops, so that placement, partition and memory plan see the transfers
//! between devices.
//!
//! A place is the request of the node that makes an operand. Each place reduces one share of the
//! elements, for which it gets that share of the operands of all others (reduce-scatter), and gets
//! the other shares of the result from the others (all-gather): over each place's links go
//! `2 (n - 1) / n` of a tensor each way, as in a ring, in two steps instead of `2 (n - 1)`.
//! (Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH,
//! 2005, section 4.5, "long messages", with direct exchange in both halves.) Of tensors too small
//! for their bytes to count, each place gets all and reduces them by itself.
//!
//! Every element is reduced in the order of the operands, and in the second case by the same kernel
//! everywhere: results are the same bits at all places and in every run. Narrow floats are summed
//! in `f32`, and rounded once.
//!
//! Other [ways](Way): a library does large tensors, if it joins the places and gives the interpreter's
//! results, but for the order of a sum: one [`Op::AllReduceRank`] for each place. One place reduces for
//! all. Or groups of places with fast links reduce shares, which their peers of the other groups
//! add up: over a slow link goes each share once. (Jia et al., arXiv:1807.11205, section 4.2.)

use super::Rebuild;
use crate::error::{Error, Result};
use crate::ir::vecprog::real_bits;
use crate::ir::{Def, Graph, Node, Op, Origin, ReduceKind, Requested, ScalarOp, Type, ValueId};
use crate::place::collectives::{Asked, Way};
use crate::{DType, Tensor};

/// Tensors of fewer bytes are reduced as a whole at each place.
pub(super) const SHARED_BYTES: usize = 64 << 10;

/// The way of an all-reduce between several places.
pub type Choose<'a> = &'a dyn Fn(Asked) -> Result<Way>;

/// Replaces every all-reduce, in regions too, where it is one reduction.
///
/// A request of its own is one place for all of it. The new nodes have the request of their place,
/// so that they share kernels with the nodes there.
pub fn expand_all_reduce(g: &Graph, choose: Choose<'_>) -> Result<Graph> {
    expand_graph(g, Some(choose))
}

/// In a region there are no places.
fn expand_graph(g: &Graph, placed: Option<Choose<'_>>) -> Result<Graph> {
    if !has_any(g) {
        return Ok(g.clone());
    }
    let mut r = Rebuild::new(g);
    let mut n_groups = 0;
    for (id, node) in g.nodes() {
        let Op::AllReduce { kind } = node.op else {
            r.copy_with_regions(id, node, &|region| expand_graph(region, None))?;
            continue;
        };
        let places = match placed {
            Some(_) => places(g, node),
            None => vec![node.device.clone(); node.inputs.len()],
        };
        let way = match placed {
            Some(choose) => choose(asked(
                kind,
                g.ty(node.inputs[0]),
                &places,
                &distinct(&places),
            ))
            .map_err(|e| e.at_origin(&node.origin))?,
            None => Way::Exchange,
        };
        let operands = r.inputs(node);
        let mut e = Expansion {
            g: &mut r.graph,
            origin: &node.origin,
            kind,
            places,
        };
        let results = match way {
            Way::Library => {
                n_groups += 1;
                e.by_library(&operands, n_groups - 1)?
            }
            way => e.results(&operands, &way)?,
        };
        r.mapped(id, node, &results);
    }
    Ok(r.finish(g))
}

fn has_any(g: &Graph) -> bool {
    g.nodes()
        .any(|(_, n)| matches!(n.op, Op::AllReduce { .. }) || n.regions.iter().any(has_any))
}

/// The request of each operand's place.
fn places(g: &Graph, node: &Node) -> Vec<Requested> {
    let of_maker = |&v: &ValueId| match g.value(v).def {
        Def::Node(maker, _) => g.node(maker).device.clone(),
        Def::Input(_) => None,
    };
    let place = |v| node.device.clone().or_else(|| of_maker(v));
    node.inputs.iter().map(place).collect()
}

fn distinct(places: &[Requested]) -> Vec<Requested> {
    let mut distinct: Vec<Requested> = Vec::new();
    for place in places {
        if !distinct.contains(place) {
            distinct.push(place.clone());
        }
    }
    distinct
}

/// An all-reduce as its way is asked for. A library takes one operand of each place.
fn asked<'p>(
    kind: ReduceKind,
    ty: &Type,
    operands: &[Requested],
    places: &'p [Requested],
) -> Asked<'p> {
    let is_one_of_each = operands.len() == places.len();
    Asked {
        places,
        bytes: ty.size_bytes().unwrap_or(0),
        is_for_library: is_one_of_each && is_for_library(kind, ty, places.len()),
        is_in_shares: is_large(ty),
    }
}

/// True for tensors of which each place reduces a share.
fn is_large(ty: &Type) -> bool {
    ty.static_shape().is_some() && ty.size_bytes() >= Some(SHARED_BYTES)
}

/// True when an all-reduce is worth a library's launches, and a library gives the interpreter's
/// results, but for the order of a sum.
///
/// Libraries round narrow floats after each operand, so the sums of two are right and those of more
/// are not; their maxima and minima of floats may lose a NaN. A mean is a sum that each place
/// divides, which integers and narrow floats do not bear.
fn is_for_library(kind: ReduceKind, ty: &Type, n: usize) -> bool {
    use DType::*;
    is_large(ty)
        && match kind {
            ReduceKind::Mean => matches!(ty.dtype, F32 | F64),
            ReduceKind::Sum | ReduceKind::Prod if matches!(ty.dtype, F32 | F64) => true,
            ReduceKind::Sum | ReduceKind::Prod if matches!(ty.dtype, F16 | BF16) => n == 2,
            _ => matches!(ty.dtype, I8 | U8 | I32 | U32 | I64 | U64),
        }
}

pub(super) fn reshape(shape: &[usize]) -> Op {
    let shape = shape.iter().map(|&d| d.into()).collect();
    Op::Reshape { shape }
}

/// Elements of a vector.
pub(super) fn slice(begin: usize, end: usize) -> Op {
    Op::Slice {
        starts: vec![begin.into()],
        sizes: vec![(end - begin).into()],
        steps: vec![1],
    }
}

/// The element-wise op of a reduction.
fn joining(kind: ReduceKind, dtype: DType) -> ScalarOp {
    match (kind, dtype) {
        (ReduceKind::Sum | ReduceKind::Mean, _) => ScalarOp::Add,
        (ReduceKind::Prod, _) => ScalarOp::Mul,
        (ReduceKind::Max, DType::Bool) => ScalarOp::Or,
        (ReduceKind::Min, DType::Bool) => ScalarOp::And,
        (ReduceKind::Max, _) => ScalarOp::Max,
        (ReduceKind::Min, _) => ScalarOp::Min,
    }
}

/// One all-reduce on its way into a graph.
struct Expansion<'a> {
    g: &'a mut Graph,
    origin: &'a Origin,
    kind: ReduceKind,
    /// Of each operand.
    places: Vec<Requested>,
}

impl Expansion<'_> {
    /// The result for each operand.
    fn results(&mut self, operands: &[ValueId], way: &Way) -> Result<Vec<ValueId>> {
        let places = distinct(&self.places);
        let ty = self.g.ty(operands[0]).clone();
        let shape = ty.static_shape().filter(|_| places.len() > 1);
        let results = match (way, shape) {
            (Way::OneDevice(i), Some(_)) => {
                let one = self.reduce(operands, &places[*i])?;
                vec![one; places.len()]
            }
            (Way::Hierarchical(groups), Some(shape)) => {
                self.in_groups(operands, &places, groups, &shape)?
            }
            (_, Some(shape)) if is_large(&ty) => self.in_shares(operands, &places, &shape)?,
            _ => {
                let each = places.iter().map(|place| self.reduce(operands, place));
                each.collect::<Result<_>>()?
            }
        };
        let result_at = |place| {
            let i = places.iter().position(|p| p == place);
            results[i.expect("every operand's place is listed")]
        };
        Ok(self.places.iter().map(result_at).collect())
    }

    /// The whole result at each place: each group reduces its operands in shares, peers of all groups add up a share, and
    /// each group joins them.
    fn in_groups(
        &mut self,
        operands: &[ValueId],
        places: &[Requested],
        groups: &[Vec<usize>],
        shape: &[usize],
    ) -> Result<Vec<ValueId>> {
        let n = shape.iter().product::<usize>();
        let n_shares = groups.iter().map(Vec::len).min().unwrap_or(1);
        let flat = self.each(operands, reshape(&[n]))?;
        let mut shares = vec![Vec::new(); groups.len()];
        for k in 0..n_shares {
            let cut = self.each(&flat, slice(n * k / n_shares, n * (k + 1) / n_shares))?;
            let of_groups = self.share_of_groups(&cut, places, groups, k)?;
            for (group, shares) in groups.iter().zip(&mut shares) {
                shares.push(self.finished(&of_groups, operands, &places[group[k]])?);
            }
        }
        self.joined(places, groups, &shares, shape)
    }

    /// Share `k` of the operands of each group, reduced at its member `k`.
    fn share_of_groups(
        &mut self,
        cut: &[ValueId],
        places: &[Requested],
        groups: &[Vec<usize>],
        k: usize,
    ) -> Result<Vec<ValueId>> {
        let of_group = |group: &Vec<usize>| {
            let is_own = |i: &usize| group.iter().any(|&p| places[p] == self.places[*i]);
            let own: Vec<ValueId> = (0..cut.len()).filter(is_own).map(|i| cut[i]).collect();
            self.widened_sum(&own, &places[group[k]])
        };
        groups.iter().map(of_group).collect()
    }

    /// The shares of each group, joined at each of its places.
    fn joined(
        &mut self,
        places: &[Requested],
        groups: &[Vec<usize>],
        shares: &[Vec<ValueId>],
        shape: &[usize],
    ) -> Result<Vec<ValueId>> {
        let group_of = |p: usize| groups.iter().position(|group| group.contains(&p));
        let join = |(p, place): (usize, &Requested)| {
            let group = group_of(p).ok_or_else(|| Error::internal("a place without a group"))?;
            let joined = self.add(Op::Concat { axis: 0 }, &shares[group], place)?;
            self.add(reshape(shape), &[joined], place)
        };
        places.iter().enumerate().map(join).collect()
    }

    /// The result at each place, by a library that joins them all.
    fn by_library(&mut self, operands: &[ValueId], group: usize) -> Result<Vec<ValueId>> {
        let is_mean = self.kind == ReduceKind::Mean;
        let kind = if is_mean { ReduceKind::Sum } else { self.kind };
        let places = self.places.clone();
        let result = |(rank, place)| {
            let sum = self.add(Op::AllReduceRank { kind, group, rank }, operands, place)?;
            if is_mean {
                self.divided(sum, operands.len(), place)
            } else {
                Ok(sum)
            }
        };
        places.iter().enumerate().map(result).collect()
    }

    /// The whole result at each place, of shares that each reduced.
    fn in_shares(
        &mut self,
        operands: &[ValueId],
        places: &[Requested],
        shape: &[usize],
    ) -> Result<Vec<ValueId>> {
        let n = shape.iter().product::<usize>();
        let flat = self.each(operands, reshape(&[n]))?;
        let mut shares = Vec::with_capacity(places.len());
        for (i, place) in places.iter().enumerate() {
            let (begin, end) = (n * i / places.len(), n * (i + 1) / places.len());
            let cut = self.each(&flat, slice(begin, end))?;
            shares.push(self.reduce(&cut, place)?);
        }
        let mut results = Vec::with_capacity(places.len());
        for place in places {
            let joined = self.add(Op::Concat { axis: 0 }, &shares, place)?;
            results.push(self.add(reshape(shape), &[joined], place)?);
        }
        Ok(results)
    }

    /// An op of each value, at its own place.
    fn each(&mut self, values: &[ValueId], op: Op) -> Result<Vec<ValueId>> {
        let places = self.places.clone();
        let each = values.iter().zip(&places);
        each.map(|(&x, place)| self.add(op.clone(), &[x], place))
            .collect()
    }

    /// The reduction of values, in their order, at one place.
    fn reduce(&mut self, values: &[ValueId], place: &Requested) -> Result<ValueId> {
        self.finished(values, values, place)
    }

    /// The reduction of values, which may be reductions of some operands each, as that of all operands.
    fn finished(
        &mut self,
        values: &[ValueId],
        operands: &[ValueId],
        place: &Requested,
    ) -> Result<ValueId> {
        let dtype = self.g.ty(operands[0]).dtype;
        let mut sum = self.widened_sum(values, place)?;
        if self.kind == ReduceKind::Mean && operands.len() > 1 {
            sum = self.divided(sum, operands.len(), place)?;
        }
        self.cast(sum, dtype, place)
    }

    /// The values joined in their order, in the dtype of accumulators.
    fn widened_sum(&mut self, values: &[ValueId], place: &Requested) -> Result<ValueId> {
        let dtype = self.g.ty(values[0]).dtype;
        let wide = self.accumulator(dtype);
        let join = joining(self.kind, dtype);
        let mut sum = self.cast(values[0], wide, place)?;
        for &v in &values[1..] {
            let v = self.cast(v, wide, place)?;
            sum = self.add(Op::Map(join), &[sum, v], place)?;
        }
        Ok(sum)
    }

    fn divided(&mut self, v: ValueId, n: usize, place: &Requested) -> Result<ValueId> {
        let dtype = self.g.ty(v).dtype;
        let bits = real_bits(dtype, n as f64).to_le_bytes();
        let n = Tensor::from_bytes(dtype, &[], &bits[..dtype.size_bytes()])?;
        let n = self.g.add_constant(n, self.origin);
        self.add(Op::Map(ScalarOp::Div), &[v, n], place)
    }

    /// The dtype of accumulators: that of the interpreter, but for `f32`, whose sums stay so.
    fn accumulator(&self, dtype: DType) -> DType {
        let is_mean = self.kind == ReduceKind::Mean;
        match dtype {
            d if d.is_narrow_float() && !matches!(self.kind, ReduceKind::Max | ReduceKind::Min) => {
                DType::F32
            }
            _ if dtype.is_unsigned_int() && is_mean => DType::U64,
            _ if !dtype.is_float() && is_mean => DType::I64,
            _ => dtype,
        }
    }

    fn cast(&mut self, v: ValueId, dtype: DType, place: &Requested) -> Result<ValueId> {
        if self.g.ty(v).dtype == dtype {
            Ok(v)
        } else {
            self.add(Op::Map(ScalarOp::Cast(dtype)), &[v], place)
        }
    }

    fn add(&mut self, op: Op, operands: &[ValueId], place: &Requested) -> Result<ValueId> {
        let result = self.g.add1(op, operands, self.origin)?;
        let last = self.g.n_nodes() as u32 - 1;
        self.g.node_mut(crate::ir::NodeId(last)).device = place.clone();
        Ok(result)
    }
}
