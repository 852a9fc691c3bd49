//! Vector loads and stores: runs of neighbouring elements along an axis, in accesses of up to 16 bytes.

use super::emit::{Emitter, Value, truth_test};
use crate::codegen::access::{Expression, Leaf, expression};
use crate::codegen::body::Body;
use crate::codegen::pull::{Emit, Ix, Kind, Puller, broadcast_index};
use crate::error::Result;
use crate::ir::vecprog::VecOp;
use crate::ir::{Op, ValueId};
use gristmill_runtime::DType;
use std::collections::BTreeSet;

/// Bytes of the widest access.
const WIDEST: usize = 16;

/// Access to the elements of a value along an axis.
pub(super) enum Runs {
    /// So many by so many pulls.
    Elements { width: usize, axis: usize },
    /// So many at a time, by a scalar program over strided operands.
    Vector {
        expression: Expression,
        width: usize,
        axis: usize,
    },
}

impl Runs {
    /// The widest runs of `v` along `axis` that begin and end with its lines. `in_memory` says which values are loaded.
    pub(super) fn of(
        body: &Body,
        v: ValueId,
        axis: usize,
        in_memory: &dyn Fn(ValueId) -> bool,
    ) -> Runs {
        let found = operands(body, v, axis, in_memory);
        let widest = found.as_ref().and_then(|x| {
            let moving = x.leaves.iter().filter(|l| l.strides[axis] != 0);
            let size = moving.map(|l| body.dtype(l.value).size_bytes()).max()?;
            let mut widths =
                std::iter::successors(Some(WIDEST / size), |w| Some(w / 2)).take_while(|&w| w > 1);
            widths.find(|&w| fits(body, v, x, axis, w))
        });
        match (found, widest) {
            (Some(expression), Some(width)) => Runs::Vector {
                expression,
                width,
                axis,
            },
            _ => Runs::Elements { width: 1, axis },
        }
    }

    /// Runs of a given width, in vectors where these are no wider than accesses can be.
    pub(super) fn of_width(
        body: &Body,
        v: ValueId,
        axis: usize,
        in_memory: &dyn Fn(ValueId) -> bool,
        width: usize,
    ) -> Runs {
        let narrow = |x: &Expression| {
            let moving = x.leaves.iter().filter(|l| l.strides[axis] != 0);
            moving
                .map(|l| body.dtype(l.value).size_bytes())
                .all(|size| size * width <= WIDEST)
        };
        let found = operands(body, v, axis, in_memory)
            .filter(|x| width > 1 && narrow(x) && fits(body, v, x, axis, width));
        found.map_or(Runs::Elements { width, axis }, |expression| Runs::Vector {
            expression,
            width,
            axis,
        })
    }

    /// Elements of a run.
    pub(super) fn width(&self) -> usize {
        match self {
            Runs::Elements { width, .. } | Runs::Vector { width, .. } => *width,
        }
    }

    /// The leaf of which runs are copies, if nothing is computed.
    pub(super) fn copied(&self) -> Option<&Leaf> {
        let Runs::Vector {
            expression, axis, ..
        } = self
        else {
            return None;
        };
        let [inst] = &expression.program.insts[..] else {
            return None;
        };
        expression
            .leaves
            .first()
            .filter(|l| matches!(inst.op, VecOp::Input(0)) && l.strides[*axis] == 1)
    }

    /// Pulls the run of `v` that begins at `at`, whose index along the axis is a multiple of the
    /// width. `f` gets each element's number in the run and its value.
    pub(super) fn each(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        v: ValueId,
        at: &[Ix<Value>],
        f: impl FnOnce(&mut Emitter, Ix<Value>, Value) -> Result<()>,
    ) -> Result<()> {
        let Runs::Vector {
            expression,
            width,
            axis,
        } = self
        else {
            return self.each_pulled(p, e, v, at, f);
        };
        let mut loaded = Vec::new();
        for leaf in &expression.leaves {
            let (buffer, dtype) = (p.stored[&leaf.value], p.body.dtype(leaf.value));
            let from = e.strided(leaf.offset, at, &leaf.strides);
            loaded.push(match leaf.strides[*axis] {
                0 => Ok(e.load(dtype, buffer, from)),
                _ => Err((e.load_vector(*width, buffer, from), dtype)),
            });
        }
        let k = e.open_unrolled(*width);
        let mut element = |(name, dtype): (String, DType)| {
            let element = format!("{name}.v[{}]{}", e.text(k), truth_test(dtype));
            e.define(Kind::Element(dtype), &element)
        };
        let inputs = loaded.into_iter().map(|l| l.unwrap_or_else(&mut element));
        let inputs: Vec<Value> = inputs.collect();
        let value = e.program(&expression.program, &inputs)?[0];
        f(e, Ix::V(k), value)?;
        e.close();
        Ok(())
    }

    fn each_pulled(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        v: ValueId,
        at: &[Ix<Value>],
        f: impl FnOnce(&mut Emitter, Ix<Value>, Value) -> Result<()>,
    ) -> Result<()> {
        let Runs::Elements { width, axis } = *self else {
            return Ok(());
        };
        p.scoped(|p| {
            if width == 1 {
                let value = p.value(e, v, at)?;
                return f(e, Ix::C(0), value);
            }
            let k = Ix::V(e.open_unrolled(width));
            let mut at = at.to_vec();
            at[axis] = e.add(at[axis], k);
            let value = p.value(e, v, &at)?;
            f(e, k, value)?;
            e.close();
            Ok(())
        })
    }
}

/// The scalar program of `v` over its operands, if its lines have elements.
fn operands(
    body: &Body,
    v: ValueId,
    axis: usize,
    in_memory: &dyn Fn(ValueId) -> bool,
) -> Option<Expression> {
    let has_axis = body.shape(v).len() > axis;
    expression(body, &[v], in_memory, &|_, _| false).filter(|_| has_axis)
}

/// True if the leaves of `v` are contiguous or constant along `axis`.
pub(super) fn is_dense(
    body: &Body,
    v: ValueId,
    axis: usize,
    in_memory: &dyn Fn(ValueId) -> bool,
) -> bool {
    let along = |x: &Expression| x.leaves.iter().all(|l| matches!(l.strides[axis], 0 | 1));
    operands(body, v, axis, in_memory).is_some_and(|x| along(&x))
}

/// True if every operand is constant along the axis or has whole, aligned vectors of `width` there.
fn fits(body: &Body, v: ValueId, expression: &Expression, axis: usize, width: usize) -> bool {
    let aligned = |n: i64| n % width as i64 == 0;
    let leaf_fits = |leaf: &Leaf| {
        let mut others = leaf.strides.iter().enumerate().filter(|(i, _)| *i != axis);
        // Loops hand slices of larger tensors to their bodies: such a buffer is as aligned as its own size.
        let whole = body.n_elements(leaf.value).is_multiple_of(width);
        let stride = leaf.strides[axis];
        stride == 0
            || stride == 1 && whole && aligned(leaf.offset) && others.all(|(_, &s)| aligned(s))
    };
    body.shape(v)[axis].is_multiple_of(width) && expression.leaves.iter().all(leaf_fits)
}

/// Stores a run of neighbouring results in accesses of up to 16 bytes. Runs of one are stored as elements.
pub(super) struct RunStore {
    name: String,
    dtype: DType,
    width: usize,
    /// Elements of an access.
    per_access: usize,
}

impl RunStore {
    /// Declares the run. Positions that it is stored at are multiples of `width`.
    pub(super) fn new(e: &mut Emitter, dtype: DType, width: usize) -> RunStore {
        let per_access = width.min(WIDEST / dtype.size_bytes());
        let name = e.declare_vectors(dtype, per_access, width / per_access);
        RunStore {
            name,
            dtype,
            width,
            per_access,
        }
    }

    /// Sets element `k`, an index of an unrolled loop.
    pub(super) fn set(&self, e: &mut Emitter, k: Value, value: Value) {
        let (n, k) = (self.per_access, e.text(k).to_owned());
        let line = format!("{}[{k} / {n}].v[{k} % {n}] = {};", self.name, e.text(value));
        e.line(&line);
    }

    /// Writes the run to `buffer` at position `at`.
    pub(super) fn finish(self, e: &mut Emitter, buffer: Value, at: Ix<Value>) {
        let (n, name) = (self.per_access, &self.name);
        let at = e.val(at);
        if self.width == 1 {
            let value = e.named(Kind::Element(self.dtype), format!("{name}[0].v[0]"));
            return e.store(self.dtype, value, buffer, Ix::V(at));
        }
        let i = e.open_unrolled(self.width / n);
        let to = format!("{} + {} + {} * {n}", e.text(buffer), e.text(at), e.text(i));
        let line = format!("gm_store<{n}>({to}, {name}[{}]);", e.text(i));
        e.line(&line);
        e.close();
    }
}

/// Operands of an epilogue that are loaded for a whole run of results, in accesses of up to 16 bytes.
pub(super) struct RunLoads(Vec<LoadedRun>);

/// A run in registers: accesses of so many elements.
struct LoadedRun {
    value: ValueId,
    name: String,
    per_access: usize,
}

impl RunLoads {
    /// Loads the element-wise operands of `roots` with elements side by side along the last axis. The
    /// run begins at `at`, an index into the shape of the results, with a multiple of `width` as its
    /// last component; `known` need not be loaded.
    pub(super) fn new(
        p: &Puller<Value>,
        e: &mut Emitter,
        roots: &[ValueId],
        known: ValueId,
        at: &[Ix<Value>],
        width: usize,
    ) -> RunLoads {
        let found = match width {
            1 => Vec::new(),
            _ => side_by_side(p, roots, known),
        };
        let fits = |v: &ValueId| {
            p.body
                .shape(*v)
                .last()
                .is_some_and(|d| d.is_multiple_of(width))
        };
        let load = |v: ValueId| {
            let (dtype, shape) = (p.body.dtype(v), p.body.shape(v));
            let per_access = width.min(WIDEST / dtype.size_bytes());
            let n = width / per_access;
            let name = e.declare_vectors(dtype, per_access, n);
            let from = e.linearise(&broadcast_index(shape, at), shape);
            for i in 0..n {
                let from = e.add(from, Ix::C((i * per_access) as i64));
                let from = format!("{} + {}", e.text(p.stored[&v]), e.position(from));
                e.line(&format!("{name}[{i}] = gm_load<{per_access}>({from});"));
            }
            LoadedRun {
                value: v,
                name,
                per_access,
            }
        };
        RunLoads(found.into_iter().filter(fits).map(load).collect())
    }

    /// Lets pulls for the result at `at` find element `k` of each operand, an index of an unrolled loop.
    pub(super) fn remember(
        &self,
        p: &mut Puller<Value>,
        e: &mut Emitter,
        k: Value,
        at: &[Ix<Value>],
    ) {
        for run in &self.0 {
            let (dtype, n) = (p.body.dtype(run.value), run.per_access);
            let k = e.text(k);
            let element = format!("{}[{k} / {n}].v[{k} % {n}]{}", run.name, truth_test(dtype));
            let element = e.define(Kind::Element(dtype), &element);
            let at = broadcast_index(p.body.shape(run.value), at);
            p.remember(run.value, &at, element);
        }
    }
}

/// The element-wise operands of some values in memory, but for those of one element along the last axis.
fn side_by_side(p: &Puller<Value>, roots: &[ValueId], known: ValueId) -> Vec<ValueId> {
    let (mut found, mut seen) = (Vec::new(), BTreeSet::from([known]));
    let mut todo = roots.to_vec();
    while let Some(v) = todo.pop() {
        if !seen.insert(v) {
            continue;
        }
        let node = p.body.graph.def_node(v);
        if p.stored.contains_key(&v) {
            let moves = p.body.shape(v).last().is_some_and(|&d| d > 1);
            found.extend(moves.then_some(v));
        } else if let Some(node) = node.filter(|n| matches!(n.op, Op::Map(_))) {
            todo.extend(&node.inputs);
        }
    }
    found
}
