//! Loops inside of an element, for ops that pull several elements of an operand.
//!
//! Slow but correct for every dtype: floats accumulate in `f64` and round once, integers in 64 bits,
//! wrapping.

use super::window::windows_over;
use super::{Emit, Ix, Puller};
use crate::codegen::body::Body;
use crate::cost::{Extents, work};
use crate::error::{Error, Result};
use crate::ir::{Node, Op, Type, ValueId};
use gristmill_runtime::DType;
use std::hash::Hash;

/// The values of an emitter.
pub(super) type ValueOf<E> = <E as Emit>::Value;

/// Body of a loop nest: the emitter, the indices of all loops, and the carried values; returns the
/// next carried values.
type NestedBody<'f, S, E> =
    dyn FnMut(&mut S, &mut E, &[Ix<ValueOf<E>>], &[ValueOf<E>]) -> Result<Vec<ValueOf<E>>> + 'f;

impl<V: Copy + Eq + Hash> Puller<'_, V> {
    /// Loops over all indices below `extents` with carried values; returns them after the loops.
    pub(super) fn loops<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        extents: &[usize],
        carried: &[V],
        f: &mut NestedBody<Self, E>,
    ) -> Result<Vec<V>> {
        self.inner_loops(e, extents, &mut Vec::new(), carried, f)
    }

    /// The loops inside those with the indices `at`.
    fn inner_loops<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        extents: &[usize],
        at: &mut Vec<Ix<V>>,
        carried: &[V],
        f: &mut NestedBody<Self, E>,
    ) -> Result<Vec<V>> {
        let Some(&extent) = extents.get(at.len()) else {
            return f(self, e, at, carried);
        };
        let mut inner = |s: &mut Self, e: &mut E, i: Ix<V>, carried: &[V]| {
            at.push(i);
            let out = s.inner_loops(e, extents, at, carried, f);
            at.pop();
            out
        };
        if extent == 1 {
            return inner(self, e, Ix::C(0), carried);
        }
        let end = Ix::C(extent as i64);
        e.for_loop(Ix::C(0), end, 1, carried, |e, i, carried| {
            self.scoped(|s| inner(s, e, Ix::V(i), carried))
        })
    }

    /// `f(sum)` where `inside` holds (or is absent), else `sum`; both of dtype `acc`.
    pub(super) fn guarded<E: Emit<Value = V>>(
        &mut self,
        e: &mut E,
        inside: Option<V>,
        acc: DType,
        sum: V,
        f: impl FnOnce(&mut Self, &mut E, V) -> Result<V>,
    ) -> Result<V> {
        match inside {
            None => f(self, e, sum),
            Some(inside) => self.branch(e, inside, acc, |s, e| f(s, e, sum), |_, _| Ok(sum)),
        }
    }
}

pub(super) fn no_code(op: &Op) -> Error {
    Error::unsupported(format!("{} has no code by elements", op.name()))
}

/// Number of operand elements that an op with an inner loop pulls for one result element.
pub(in crate::codegen) fn inner_iterations(body: &Body, op: &Op, node: &Node) -> usize {
    let n = |i: usize| body.n_elements(node.inputs[i]);
    let out = body.n_elements(node.outputs[0]).max(1);
    match op {
        Op::Reduce { .. } | Op::ArgReduce { .. } => n(0) / out,
        Op::MatMul => body.shape(node.inputs[0]).last().copied().unwrap_or(1),
        Op::Conv { .. } | Op::ConvTranspose { .. } => n(1) / body.shape(node.inputs[1])[0].max(1),
        Op::Pool { size, .. } | Op::MaxPoolIndices { size, .. } => size.iter().product(),
        Op::MaxPoolGrad { size, window, .. } => {
            let windows = (0..size.len()).map(|d| size[d] * windows_over(size, window, d));
            windows.product()
        }
        _ => flops(body, node) / out,
    }
    .max(1)
}

fn flops(body: &Body, node: &Node) -> usize {
    let types = |values: &[ValueId]| -> Vec<&Type> {
        let values = values.iter();
        values.map(|&v| body.graph.ty(v)).collect()
    };
    let (operands, results) = (types(&node.inputs), types(&node.outputs));
    work::of_op(&node.op, &operands, &results, &Extents::default()).flops as usize
}
