//! Pull-based scalar code: the value of a tensor at an index, emitted recursively through maps, views and reductions.
//!
//! A value with a buffer is loaded; everything else is computed where it is used. [`super::phases`]
//! decides which values have buffers. Equal requests within one basic block share their code. The
//! target is the back end's [`Emit`]: Cranelift IR for the CPU, CUDA source for the GPU.

mod emit;
mod heavy;
mod memory;

use super::body::{Body, const_dim};
use crate::error::{Error, Result};
use crate::ir::{Node, Op, PadMode, ScalarOp, ValueId};
pub(super) use emit::{Emit, Ix, Kind, Order};
use gristmill_runtime::{DType, status};
pub(super) use heavy::{accumulator, beats, extreme_bits, inner_iterations, mean, reduced_index};
use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;

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
        let which = node.outputs.iter().position(|&o| o == v);
        let which = which.ok_or_else(|| Error::internal("a value is no result of its node"))?;
        self.node_value(e, node, which, at)
            .map_err(|err| err.context(node.op.name()).at_origin(&node.origin))
    }

    fn node_value<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        node: &Node,
        which: usize,
        at: &[Ix<V>],
    ) -> Result<V> {
        match &node.op {
            Op::Map(op) => {
                let args = node
                    .inputs
                    .iter()
                    .map(|&x| self.broadcast_value(e, x, at))
                    .collect::<Result<Vec<V>>>()?;
                let dtypes: Vec<DType> = node.inputs.iter().map(|&x| self.body.dtype(x)).collect();
                e.scalar_op(*op, &dtypes, &args)
            }
            Op::Constant { value } if value.len() == 1 => {
                let t = value.tensor()?;
                let mut bits = [0; 8];
                bits[..t.size_bytes()].copy_from_slice(t.as_bytes());
                Ok(e.constant(t.dtype(), u64::from_le_bytes(bits)))
            }
            Op::Iota { dtype, axis, .. } => {
                let i = e.val(at[*axis]);
                let i = e.index_to_i64(i);
                e.convert(i, DType::I64, *dtype)
            }
            Op::Broadcast { .. } => self.broadcast_value(e, node.inputs[0], at),
            Op::Reshape { .. } => {
                let x = node.inputs[0];
                let at = reshape_index(e, at, self.body.shape(node.outputs[0]), self.body.shape(x));
                self.value(e, x, &at)
            }
            Op::Transpose { perm } => {
                let mut from = vec![Ix::C(0); at.len()];
                perm.iter().zip(at).for_each(|(&p, &i)| from[p] = i);
                self.value(e, node.inputs[0], &from)
            }
            Op::Slice { starts, steps, .. } => {
                let mut from = Vec::with_capacity(at.len());
                for ((&i, start), &step) in at.iter().zip(starts).zip(steps) {
                    let moved = e.mul(i, step);
                    from.push(e.add(moved, Ix::C(const_dim(start)?)));
                }
                self.value(e, node.inputs[0], &from)
            }
            Op::Pad { low, mode, .. } => self.pad(e, node, low, *mode, at),
            Op::Concat { axis } => self.concat(e, node, *axis, 0, at),
            Op::Gather { axis } => self.gather(e, node, *axis, at),
            Op::GatherElements { axis } => {
                let n = self.body.shape(node.inputs[0])[*axis];
                let mut from = at.to_vec();
                from[*axis] = self.index(e, node.inputs[1], at, n)?;
                self.value(e, node.inputs[0], &from)
            }
            Op::GatherNd { batch_dims } => self.gather_nd(e, node, *batch_dims, at),
            _ => self.heavy_value(e, node, which, at),
        }
    }

    /// Element of `x` where the index belongs to a shape that `x` broadcasts to.
    pub(super) fn broadcast_value<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        x: ValueId,
        at: &[Ix<V>],
    ) -> Result<V> {
        let shape = self.body.shape(x);
        let lead = at.len() - shape.len();
        let from: Vec<Ix<V>> = shape
            .iter()
            .zip(&at[lead..])
            .map(|(&d, &i)| if d == 1 { Ix::C(0) } else { i })
            .collect();
        self.value(e, x, &from)
    }

    /// Element of an index tensor as a checked position in an axis of extent `n`; negative ones count from the end.
    pub(super) fn index<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        indices: ValueId,
        at: &[Ix<V>],
        n: usize,
    ) -> Result<Ix<V>> {
        let raw = self.value(e, indices, at)?;
        let i = e.convert(raw, self.body.dtype(indices), DType::I64)?;
        let zero = e.constant(DType::I64, 0);
        let negative = e.primitive(ScalarOp::Lt, DType::I64, DType::Bool, &[i, zero])?;
        let extent = e.constant(DType::I64, n as u64);
        let wrapped = e.primitive(ScalarOp::Add, DType::I64, DType::I64, &[i, extent])?;
        let i = e.choose(negative, wrapped, i);
        let limit = e.constant(DType::U64, n as u64);
        let unsigned = e.convert(i, DType::I64, DType::U64)?;
        let outside = e.primitive(ScalarOp::Ge, DType::U64, DType::Bool, &[unsigned, limit])?;
        e.fault_if(outside, status::INDEX_OUT_OF_RANGE);
        Ok(Ix::V(e.i64_to_index(i)))
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
        let n_index_axes = self.body.shape(indices).len();
        let i = self.index(
            e,
            indices,
            &at[axis..axis + n_index_axes],
            self.body.shape(data)[axis],
        )?;
        let from: Vec<Ix<V>> = at[..axis]
            .iter()
            .copied()
            .chain([i])
            .chain(at[axis + n_index_axes..].to_vec())
            .collect();
        self.value(e, data, &from)
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
        let (index_shape, data_shape) = (self.body.shape(indices), self.body.shape(data));
        let lead = index_shape.len() - 1;
        let mut from = at[..batch_dims].to_vec();
        for t in 0..index_shape[lead] {
            let tuple_at: Vec<Ix<V>> = at[..lead]
                .iter()
                .copied()
                .chain([Ix::C(t as i64)])
                .collect();
            from.push(self.index(e, indices, &tuple_at, data_shape[batch_dims + t])?);
        }
        from.extend_from_slice(&at[lead..]);
        self.value(e, data, &from)
    }

    fn concat<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        node: &Node,
        axis: usize,
        first: usize,
        at: &[Ix<V>],
    ) -> Result<V> {
        let extent = |s: &Self, i: usize| s.body.shape(node.inputs[i])[axis];
        // Empty parts hold no index.
        let Some(part) = (first..node.inputs.len()).find(|&i| extent(self, i) > 0) else {
            return Err(Error::internal("an index into an empty join"));
        };
        let n = extent(self, part);
        let x = node.inputs[part];
        if (part + 1..node.inputs.len()).all(|i| extent(self, i) == 0) {
            return self.value(e, x, at);
        }
        let (position, limit) = (e.val(at[axis]), e.index(n as i64));
        let here = e.index_compare(Order::Less, position, limit);
        let ty = Kind::Element(self.body.dtype(x));
        let values = e.branch(
            here,
            &[ty],
            self,
            |s, e| s.scoped(|s| Ok(vec![s.value(e, x, at)?])),
            |s, e| {
                let mut rest = at.to_vec();
                rest[axis] = e.add(at[axis], Ix::C(-(n as i64)));
                s.scoped(|s| Ok(vec![s.concat(e, node, axis, part + 1, &rest)?]))
            },
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
        let x = node.inputs[0];
        let (shape, out) = (self.body.shape(x), self.body.shape(node.outputs[0]));
        let mut from = Vec::with_capacity(at.len());
        let mut inside = None;
        for axis in 0..at.len() {
            let j = e.add(at[axis], Ix::C(-(low[axis] as i64)));
            let n = shape[axis];
            from.push(match mode {
                _ if out[axis] == n => j,
                PadMode::Constant => {
                    let (position, limit) = (e.val(j), e.index(n as i64));
                    let within = e.index_compare(Order::Within, position, limit);
                    inside = Some(match inside {
                        None => within,
                        Some(i) => e.both(i, within)?,
                    });
                    j
                }
                _ => border(e, j, n as i64, mode),
            });
        }
        let Some(inside) = inside else {
            return self.value(e, x, &from);
        };
        let ty = Kind::Element(self.body.dtype(x));
        let fill = node.inputs[1];
        if shape.contains(&0) {
            return self.value(e, fill, &[]);
        }
        let values = e.branch(
            inside,
            &[ty],
            self,
            |s, e| s.scoped(|s| Ok(vec![s.value(e, x, &from)?])),
            |s, e| s.scoped(|s| Ok(vec![s.value(e, fill, &[])?])),
        )?;
        Ok(values[0])
    }
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

/// The index in `from` of the element at index `at` in `to`; both shapes hold the same elements in row-major order.
///
/// Axes are matched in groups of equal extent products, so that only axes which are really split or joined are divided.
fn reshape_index<E: Emit>(
    e: &mut E,
    at: &[Ix<E::Value>],
    to: &[usize],
    from: &[usize],
) -> Vec<Ix<E::Value>> {
    let mut index = vec![Ix::C(0); from.len()];
    let (mut i, mut j) = (0, 0);
    while i < to.len() || j < from.len() {
        let (i0, j0) = (i, j);
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
                break;
            }
        }
        let linear = e.linearise(&at[i0..i], &to[i0..i]);
        index[j0..j].copy_from_slice(&e.delinearise(linear, &from[j0..j]));
    }
    index
}
