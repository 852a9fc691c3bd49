//! Pull-based scalar code: the value of a tensor at an index, emitted recursively through maps, views and reductions.
//!
//! A value with a buffer is loaded; everything else is computed where it is used. [`super::phases`]
//! decides which values have buffers. Equal requests within one basic block share their code. The
//! target is the back end's [`Emit`]: Cranelift IR for the CPU, CUDA source for the GPU.

mod contract;
mod emit;
mod heavy;
mod memory;
mod random;
mod reduce;
mod roi;
mod window;

use super::body::{Body, const_dim};
use crate::error::{Error, Result};
use crate::ir::{ConstData, Dim, Node, Op, PadMode, ScalarOp, ValueId};
pub(super) use contract::Weights;
pub(super) use emit::{Emit, Ix, Kind, Order};
use gristmill_runtime::{DType, status};
pub(super) use heavy::inner_iterations;
use heavy::no_code;
pub(super) use reduce::{accumulator, beats, extreme_bits, mean, reduced_index};
use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
pub(super) use window::{activation_index, average, channel_axis, spatial_axes};

/// Values by tensor and index.
type Scope<V> = HashMap<(ValueId, Vec<Ix<V>>), V>;

/// Emits values at indices within one function.
pub(super) struct Puller<'a, V> {
    pub(super) body: &'a Body,
    /// Buffers of the values that are in memory.
    pub(super) stored: BTreeMap<ValueId, V>,
    /// Values known in the enclosing blocks, innermost last.
    known: Vec<Scope<V>>,
}

impl<'a, V: Copy + Eq + Hash> Puller<'a, V> {
    pub(super) fn new(body: &'a Body, stored: BTreeMap<ValueId, V>) -> Puller<'a, V> {
        Puller {
            body,
            stored,
            known: vec![HashMap::new()],
        }
    }

    /// Runs `f` for code that does not dominate the code after it: a loop body or a side of a branch.
    pub(super) fn scoped<T>(&mut self, f: impl FnOnce(&mut Self) -> T) -> T {
        self.known.push(HashMap::new());
        let result = f(self);
        self.known.pop();
        result
    }

    /// Element of `v` at `at`, one index per axis.
    pub(super) fn value<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        v: ValueId,
        at: &[Ix<V>],
    ) -> Result<V> {
        let key = (v, at.to_vec());
        if let Some(&found) = self.known.iter().rev().find_map(|scope| scope.get(&key)) {
            return Ok(found);
        }
        let value = self.compute(e, v, at)?;
        self.remember(key.0, at, value);
        Ok(value)
    }

    pub(super) fn remember(&mut self, v: ValueId, at: &[Ix<V>], value: V) {
        self.known
            .last_mut()
            .expect("the outermost scope stays")
            .insert((v, at.to_vec()), value);
    }

    fn compute<E: Emit<Value = V>>(&mut self, e: &mut E, v: ValueId, at: &[Ix<V>]) -> Result<V> {
        if let Some(&base) = self.stored.get(&v) {
            let linear = e.linearise(at, self.body.shape(v));
            return Ok(e.load(self.body.dtype(v), base, linear));
        }
        let body = self.body;
        let node = body
            .graph
            .def_node(v)
            .ok_or_else(|| Error::internal("a cluster operand has no buffer"))?;
        let result = node.outputs.iter().position(|&o| o == v);
        let result = result.ok_or_else(|| Error::internal("a value is no result of its node"))?;
        self.node_value(e, node, result, at)
            .map_err(|err| err.context(node.op.name()).at_origin(&node.origin))
    }

    fn node_value<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        node: &Node,
        result: usize,
        at: &[Ix<V>],
    ) -> Result<V> {
        match &node.op {
            Op::Map(op) => self.map(e, node, *op, at),
            Op::Constant { value } if value.len() == 1 => single_constant(e, value),
            Op::Iota { .. } | Op::RandomBits { .. } => self.positional(e, node, at),
            Op::Broadcast { .. } | Op::Reshape { .. } | Op::Transpose { .. } | Op::Slice { .. } => {
                self.viewed(e, node, at)
            }
            Op::Pad { low, mode, .. } => self.pad(e, node, low, *mode, at),
            Op::Concat { axis } => self.concat(e, node, *axis, 0, at),
            Op::Gather { .. }
            | Op::GatherElements { .. }
            | Op::GatherNd { .. }
            | Op::CheckIndices { .. }
            | Op::CheckFinite => self.gathered(e, node, at),
            Op::Reduce { .. } | Op::ArgReduce { .. } => self.reduction(e, node, at),
            Op::MatMul | Op::Conv { .. } | Op::ConvTranspose { .. } => {
                self.contraction(e, node, at)
            }
            Op::Sample { .. } => self.sample(e, node, at),
            Op::Pool { .. }
            | Op::MaxPoolIndices { .. }
            | Op::MaxPoolGrad { .. }
            | Op::RoiAlign { .. } => self.window(e, node, result, at),
            // Constants of several elements are in memory, composite ops are written out, and the
            // others have phases or steps of their own.
            op => Err(no_code(op)),
        }
    }

    /// Element of an op that is a function of the position.
    fn positional<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        node: &Node,
        at: &[Ix<V>],
    ) -> Result<V> {
        match node.op {
            Op::Iota { dtype, axis, .. } => iota(e, at[axis], dtype),
            Op::RandomBits { seed, first, .. } => self.random_bits(e, node, [seed, first], at),
            _ => Err(no_code(&node.op)),
        }
    }

    fn viewed<E: Emit<Value = V>>(&mut self, e: &mut E, node: &Node, at: &[Ix<V>]) -> Result<V> {
        if let Op::Broadcast { .. } = node.op {
            return self.broadcast_value(e, node.inputs[0], at);
        }
        let from = self.view_index(e, node, at)?;
        self.value(e, node.inputs[0], &from)
    }

    fn gathered<E: Emit<Value = V>>(&mut self, e: &mut E, node: &Node, at: &[Ix<V>]) -> Result<V> {
        match node.op {
            Op::CheckFinite => self.checked_finite(e, node.inputs[0], at),
            Op::CheckIndices { ref extents } => self.checked_index(e, node.inputs[0], extents, at),
            Op::GatherElements { axis } => self.gather_elements(e, node, axis, at),
            Op::GatherNd { batch_dims } => self.gather_nd(e, node, batch_dims, at),
            Op::Gather { axis } => self.gather(e, node, axis, at),
            _ => Err(no_code(&node.op)),
        }
    }

    fn reduction<E: Emit<Value = V>>(&mut self, e: &mut E, node: &Node, at: &[Ix<V>]) -> Result<V> {
        match node.op {
            Op::ArgReduce { .. } => self.arg_reduce(e, node, at),
            _ => self.reduce(e, node, at),
        }
    }

    fn contraction<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        node: &Node,
        at: &[Ix<V>],
    ) -> Result<V> {
        match node.op {
            Op::Conv { .. } => self.conv(e, node, at),
            Op::ConvTranspose { .. } => self.conv_transpose(e, node, at),
            _ => self.matmul(e, node, at),
        }
    }

    fn map<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        node: &Node,
        op: ScalarOp,
        at: &[Ix<V>],
    ) -> Result<V> {
        let args = node.inputs.iter();
        let args = args.map(|&x| self.broadcast_value(e, x, at));
        let args = args.collect::<Result<Vec<V>>>()?;
        let dtypes: Vec<DType> = node.inputs.iter().map(|&x| self.body.dtype(x)).collect();
        e.scalar_op(op, &dtypes, &args)
    }

    /// The index in the operand of a view for an index of its result.
    fn view_index<E: Emit<Value = V>>(
        &self,
        e: &mut E,
        node: &Node,
        at: &[Ix<V>],
    ) -> Result<Vec<Ix<V>>> {
        match &node.op {
            Op::Transpose { perm } => {
                let mut from = vec![Ix::C(0); at.len()];
                perm.iter().zip(at).for_each(|(&p, &i)| from[p] = i);
                Ok(from)
            }
            Op::Slice { starts, steps, .. } => {
                let axes = at.iter().zip(starts).zip(steps);
                axes.map(|((&i, start), &step)| {
                    let moved = e.mul(i, step);
                    Ok(e.add(moved, Ix::C(const_dim(start)?)))
                })
                .collect()
            }
            _ => {
                let (to, from) = (node.outputs[0], node.inputs[0]);
                Ok(reshape_index(
                    e,
                    at,
                    self.body.shape(to),
                    self.body.shape(from),
                ))
            }
        }
    }

    /// Element of `x` where the index belongs to a shape that `x` broadcasts to.
    pub(super) fn broadcast_value<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        x: ValueId,
        at: &[Ix<V>],
    ) -> Result<V> {
        self.value(e, x, &broadcast_index(self.body.shape(x), at))
    }

    /// Element of an index tensor as a checked position in an axis of extent `n`; negative ones count
    /// from the end.
    pub(super) fn index<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        indices: ValueId,
        at: &[Ix<V>],
        n: usize,
    ) -> Result<Ix<V>> {
        let raw = self.value(e, indices, at)?;
        let i = e.convert(raw, self.body.dtype(indices), DType::I64)?;
        checked_position(e, i, n)
    }

    /// Element of an index tensor as a position in the axis of the one extent, or in that of its place in the last axis.
    fn checked_index<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        indices: ValueId,
        extents: &[Dim],
        at: &[Ix<V>],
    ) -> Result<V> {
        let raw = self.value(e, indices, at)?;
        let i = e.convert(raw, self.body.dtype(indices), DType::I64)?;
        let extents = extents.iter().map(const_dim);
        let extents = extents.collect::<Result<Vec<i64>>>()?;
        let [earlier @ .., last] = &extents[..] else {
            return Err(Error::internal("indices are checked without an extent"));
        };
        let mut extent = e.constant(DType::I64, *last as u64);
        for (t, &n) in earlier.iter().enumerate().rev() {
            let place = e.val(at[at.len() - 1]);
            let next = e.index(t as i64 + 1);
            let is_before = e.index_compare(Order::Less, place, next);
            let own = e.constant(DType::I64, n as u64);
            extent = e.choose(is_before, own, extent);
        }
        checked(e, i, |e, dtype| e.convert(extent, DType::I64, dtype))
    }

    /// Element that is finite: else the function is left with a status.
    fn checked_finite<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        x: ValueId,
        at: &[Ix<V>],
    ) -> Result<V> {
        let value = self.value(e, x, at)?;
        let wide = e.convert(value, self.body.dtype(x), DType::F64)?;
        let is_bad = is_not_finite(e, wide)?;
        e.fault_if(is_bad, status::NOT_FINITE);
        Ok(value)
    }

    /// Checked positions in axes of these extents, from the tuple at `at` of an index tensor whose
    /// last axis holds tuples.
    fn index_tuple<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        indices: ValueId,
        at: &[Ix<V>],
        extents: &[usize],
    ) -> Result<Vec<Ix<V>>> {
        let mut positions = Vec::with_capacity(extents.len());
        for (t, &extent) in extents.iter().enumerate() {
            let at = [at, &[Ix::C(t as i64)]].concat();
            positions.push(self.index(e, indices, &at, extent)?);
        }
        Ok(positions)
    }

    fn gather<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        node: &Node,
        axis: usize,
        at: &[Ix<V>],
    ) -> Result<V> {
        let [data, indices] = node.inputs[..] else {
            return Err(Error::internal("gather takes two operands"));
        };
        let n = self.body.shape(data)[axis];
        let (outer, rest) = at.split_at(axis);
        let (index_at, inner) = rest.split_at(self.body.shape(indices).len());
        let i = self.index(e, indices, index_at, n)?;
        self.value(e, data, &[outer, &[i], inner].concat())
    }

    fn gather_elements<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        node: &Node,
        axis: usize,
        at: &[Ix<V>],
    ) -> Result<V> {
        let n = self.body.shape(node.inputs[0])[axis];
        let mut from = at.to_vec();
        from[axis] = self.index(e, node.inputs[1], at, n)?;
        self.value(e, node.inputs[0], &from)
    }

    fn gather_nd<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        node: &Node,
        batch_dims: usize,
        at: &[Ix<V>],
    ) -> Result<V> {
        let [data, indices] = node.inputs[..] else {
            return Err(Error::internal("gather_nd takes two operands"));
        };
        let Some((&n_indexed, lead)) = self.body.shape(indices).split_last() else {
            return Err(Error::internal("gather_nd takes indices of rank 1 or more"));
        };
        let (index_at, inner) = at.split_at(lead.len());
        let extents = &self.body.shape(data)[batch_dims..batch_dims + n_indexed];
        let indexed = self.index_tuple(e, indices, index_at, extents)?;
        self.value(e, data, &[&at[..batch_dims], &indexed[..], inner].concat())
    }

    /// Element of the join of the operands from `first` on.
    fn concat<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        node: &Node,
        axis: usize,
        first: usize,
        at: &[Ix<V>],
    ) -> Result<V> {
        let body = self.body;
        let extent = |i: usize| body.shape(node.inputs[i])[axis] as i64;
        // Empty parts hold no index.
        let mut parts = (first..node.inputs.len()).filter(|&i| extent(i) > 0);
        let Some(part) = parts.next() else {
            return Err(Error::internal("an index into an empty join"));
        };
        let x = node.inputs[part];
        if parts.next().is_none() {
            return self.value(e, x, at);
        }
        let n = extent(part);
        let is_here = e.compare_const(Order::Less, at[axis], n);
        let rest = |s: &mut Self, e: &mut E| {
            let mut rest = at.to_vec();
            rest[axis] = e.add(at[axis], Ix::C(-n));
            s.concat(e, node, axis, part + 1, &rest)
        };
        self.branch(e, is_here, body.dtype(x), |s, e| s.value(e, x, at), rest)
    }

    /// Element of `dtype` that `yes` computes where `condition` holds, else `no`; only one of them
    /// runs.
    fn branch<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        condition: V,
        dtype: DType,
        yes: impl FnOnce(&mut Self, &mut E) -> Result<V>,
        no: impl FnOnce(&mut Self, &mut E) -> Result<V>,
    ) -> Result<V> {
        let values = e.branch(
            condition,
            &[Kind::Element(dtype)],
            self,
            |s, e| s.scoped(|s| Ok(vec![yes(s, e)?])),
            |s, e| s.scoped(|s| Ok(vec![no(s, e)?])),
        )?;
        Ok(values[0])
    }

    fn pad<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        node: &Node,
        low: &[usize],
        mode: PadMode,
        at: &[Ix<V>],
    ) -> Result<V> {
        let (x, body) = (node.inputs[0], self.body);
        let (from, inside) = self.interior_index(e, node, low, mode, at)?;
        let Some(inside) = inside else {
            return self.value(e, x, &from);
        };
        let fill = |s: &mut Self, e: &mut E| s.value(e, node.inputs[1], &[]);
        if body.shape(x).contains(&0) {
            return fill(self, e);
        }
        self.branch(e, inside, body.dtype(x), |s, e| s.value(e, x, &from), fill)
    }

    /// The index in the operand of a pad, and the condition that it is not in a constant border;
    /// `None` when it never is.
    fn interior_index<E: Emit<Value = V>>(
        &self,
        e: &mut E,
        node: &Node,
        low: &[usize],
        mode: PadMode,
        at: &[Ix<V>],
    ) -> Result<(Vec<Ix<V>>, Option<V>)> {
        let (shape, out) = (
            self.body.shape(node.inputs[0]),
            self.body.shape(node.outputs[0]),
        );
        let mut from = Vec::with_capacity(at.len());
        let mut inside = None;
        for axis in 0..at.len() {
            let j = e.add(at[axis], Ix::C(-(low[axis] as i64)));
            let n = shape[axis] as i64;
            if out[axis] == shape[axis] {
                from.push(j);
            } else if mode == PadMode::Constant {
                let within = e.compare_const(Order::Within, j, n);
                inside = Some(e.all(inside, within)?);
                from.push(j);
            } else {
                from.push(border(e, j, n, mode));
            }
        }
        Ok((from, inside))
    }
}

/// A constant of one element.
fn single_constant<E: Emit>(e: &mut E, value: &ConstData) -> Result<E::Value> {
    let t = value.tensor()?;
    let mut bits = [0; 8];
    bits[..t.size_bytes()].copy_from_slice(t.as_bytes());
    Ok(e.constant(t.dtype(), u64::from_le_bytes(bits)))
}

/// An index as an element.
fn iota<E: Emit>(e: &mut E, i: Ix<E::Value>, dtype: DType) -> Result<E::Value> {
    let i = e.val(i);
    let i = e.index_to_i64(i);
    e.convert(i, DType::I64, dtype)
}

/// The index into a value of `shape` for an index of a shape that it broadcasts to.
pub(in crate::codegen) fn broadcast_index<V: Copy>(shape: &[usize], at: &[Ix<V>]) -> Vec<Ix<V>> {
    let at = &at[at.len() - shape.len()..];
    let from = shape.iter().zip(at);
    from.map(|(&d, &i)| if d == 1 { Ix::C(0) } else { i })
        .collect()
}

/// True for an `f64` that is NaN or infinite: it has a difference to itself.
fn is_not_finite<E: Emit>(e: &mut E, x: E::Value) -> Result<E::Value> {
    let difference = e.primitive(ScalarOp::Sub, DType::F64, DType::F64, &[x, x])?;
    let zero = e.constant(DType::F64, 0);
    e.primitive(ScalarOp::Ne, DType::F64, DType::Bool, &[difference, zero])
}

/// An `i64` index as a position in an axis of extent `n`; negative ones count from the end. Leaves
/// the function with a status when it is out of range.
fn checked_position<E: Emit>(e: &mut E, i: E::Value, n: usize) -> Result<Ix<E::Value>> {
    let i = checked(e, i, |e, dtype| Ok(e.constant(dtype, n as u64)))?;
    Ok(Ix::V(e.i64_to_index(i)))
}

/// An index as a position, `i64`, in an axis of an extent, which is given in the dtype that is asked for.
fn checked<E: Emit>(
    e: &mut E,
    i: E::Value,
    mut extent_as: impl FnMut(&mut E, DType) -> Result<E::Value>,
) -> Result<E::Value> {
    let zero = e.constant(DType::I64, 0);
    let negative = e.primitive(ScalarOp::Lt, DType::I64, DType::Bool, &[i, zero])?;
    let extent = extent_as(e, DType::I64)?;
    let wrapped = e.primitive(ScalarOp::Add, DType::I64, DType::I64, &[i, extent])?;
    let i = e.choose(negative, wrapped, i);
    let limit = extent_as(e, DType::U64)?;
    let unsigned = e.convert(i, DType::I64, DType::U64)?;
    let outside = e.primitive(ScalarOp::Ge, DType::U64, DType::Bool, &[unsigned, limit])?;
    e.fault_if(outside, status::INDEX_OUT_OF_RANGE);
    Ok(i)
}

/// Position in the interior of extent `n` that a border position `j` repeats.
fn border<E: Emit>(e: &mut E, j: Ix<E::Value>, n: i64, mode: PadMode) -> Ix<E::Value> {
    let j = e.val(j);
    let (zero, last, extent) = (e.index(0), e.index(n - 1), e.index(n));
    if mode == PadMode::Edge {
        let low = e.index_max(j, zero);
        return Ix::V(e.index_min(low, last));
    }
    let below = e.index_compare(Order::Less, j, zero);
    let above = e.index_compare(Order::AtLeast, j, extent);
    let (from_low, from_high) = if mode == PadMode::Reflect {
        let turn = e.index(2 * (n - 1));
        (e.index_neg(j), e.index_sub(turn, j))
    } else {
        (e.index_add(j, extent), e.index_sub(j, extent))
    };
    let high = e.choose(above, from_high, j);
    Ix::V(e.choose(below, from_low, high))
}

/// The index in `from` of the element at index `at` in `to`; both shapes hold the same elements in
/// row-major order.
///
/// Axes are matched in groups of equal extent products, so that only axes which are really split or
/// joined are divided.
fn reshape_index<E: Emit>(
    e: &mut E,
    mut at: &[Ix<E::Value>],
    mut to: &[usize],
    mut from: &[usize],
) -> Vec<Ix<E::Value>> {
    let mut index = Vec::with_capacity(from.len());
    while !to.is_empty() || !from.is_empty() {
        let (n_to, n_from) = leading_group(to, from);
        let linear = e.linearise(&at[..n_to], &to[..n_to]);
        index.extend(e.delinearise(linear, &from[..n_from]));
        (at, to, from) = (&at[n_to..], &to[n_to..], &from[n_from..]);
    }
    index
}

/// Numbers of leading axes of each shape whose extents have equal products; all axes if none have.
fn leading_group(to: &[usize], from: &[usize]) -> (usize, usize) {
    let (mut i, mut j) = (0, 0);
    let (mut a, mut b) = (1usize, 1usize);
    loop {
        if (a <= b && i < to.len()) || j == from.len() {
            a = a.saturating_mul(to[i]);
            i += 1;
        } else {
            b = b.saturating_mul(from[j]);
            j += 1;
        }
        if a == b || (i == to.len() && j == from.len()) {
            return (i, j);
        }
    }
}
