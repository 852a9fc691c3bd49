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
//! A library that joins the places and gives the interpreter's results, but for the order of a sum,
//! does large tensors: one [`Op::AllReduceRank`] for each place.

use super::Rebuild;
use crate::error::Result;
use crate::ir::vecprog::real_bits;
use crate::ir::{Def, Graph, Node, Op, Origin, ReduceKind, Requested, ScalarOp, Type, ValueId};
use crate::{DType, Tensor};

/// Tensors of fewer bytes are reduced as a whole at each place.
const SHARED_BYTES: usize = 64 << 10;

/// True when a library joins the places of several operands.
pub type HasLibrary<'a> = &'a dyn Fn(&[Requested]) -> bool;

/// Replaces every all-reduce, in regions too, where it is one reduction.
///
/// A request of its own is one place for all of it. The new nodes have the request of their place,
/// so that they share kernels with the nodes there.
pub fn expand_all_reduce(g: &Graph, has_library: HasLibrary<'_>) -> Result<Graph> {
    expand_graph(g, Some(has_library))
}

/// In a region there are no places.
fn expand_graph(g: &Graph, placed: Option<HasLibrary<'_>>) -> Result<Graph> {
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
        let library = placed.filter(|_| is_for_library(kind, g.ty(node.inputs[0]), places.len()));
        let by_library = library.is_some_and(|has_library| has_library(&places));
        let operands = r.inputs(node);
        let mut e = Expansion {
            g: &mut r.graph,
            origin: &node.origin,
            kind,
            places,
        };
        let results = if by_library {
            n_groups += 1;
            e.by_library(&operands, n_groups - 1)?
        } else {
            e.results(&operands)?
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

/// True when an all-reduce is worth a library's launches, and a library gives the interpreter's
/// results, but for the order of a sum.
///
/// Libraries round narrow floats after each operand, so the sums of two are right and those of more
/// are not; their maxima and minima of floats may lose a NaN. A mean is a sum that each place
/// divides, which integers and narrow floats do not bear.
fn is_for_library(kind: ReduceKind, ty: &Type, n: usize) -> bool {
    use DType::*;
    let is_large = ty.static_shape().is_some() && ty.size_bytes() >= Some(SHARED_BYTES);
    is_large
        && match kind {
            ReduceKind::Mean => matches!(ty.dtype, F32 | F64),
            ReduceKind::Sum | ReduceKind::Prod if matches!(ty.dtype, F32 | F64) => true,
            ReduceKind::Sum | ReduceKind::Prod if matches!(ty.dtype, F16 | BF16) => n == 2,
            _ => matches!(ty.dtype, I8 | U8 | I32 | U32 | I64 | U64),
        }
}

fn reshape(shape: &[usize]) -> Op {
    let shape = shape.iter().map(|&d| d.into()).collect();
    Op::Reshape { shape }
}

/// Elements of a vector.
fn slice(begin: usize, end: usize) -> Op {
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
    fn results(&mut self, operands: &[ValueId]) -> Result<Vec<ValueId>> {
        let mut places: Vec<Requested> = Vec::new();
        for p in &self.places {
            if !places.contains(p) {
                places.push(p.clone());
            }
        }
        let ty = self.g.ty(operands[0]).clone();
        let is_shared = places.len() > 1 && ty.size_bytes() >= Some(SHARED_BYTES);
        let results = match ty.static_shape().filter(|_| is_shared) {
            Some(shape) => self.in_shares(operands, &places, &shape)?,
            None => places
                .iter()
                .map(|place| self.reduce(operands, place))
                .collect::<Result<_>>()?,
        };
        let result_at = |place| {
            let i = places.iter().position(|p| p == place);
            results[i.expect("every operand's place is listed")]
        };
        Ok(self.places.iter().map(result_at).collect())
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
        let dtype = self.g.ty(values[0]).dtype;
        let wide = self.accumulator(dtype);
        let join = joining(self.kind, dtype);
        let mut sum = self.cast(values[0], wide, place)?;
        for &v in &values[1..] {
            let v = self.cast(v, wide, place)?;
            sum = self.add(Op::Map(join), &[sum, v], place)?;
        }
        if self.kind == ReduceKind::Mean && values.len() > 1 {
            sum = self.divided(sum, values.len(), place)?;
        }
        self.cast(sum, dtype, place)
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
