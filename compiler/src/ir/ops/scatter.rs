//! Writes at computed positions; updates join in row-major order.

use super::gather::{check_bounded, check_index_dtype, element_offsets, tuple_len, tuple_offsets};
use super::{Extremum, Op, ScatterKind};
use crate::error::{Error, Result};
use crate::ir::dim::Dim;
use crate::ir::eval::Call;
use crate::ir::eval::scalar::{Scalar, Wide, extreme};
use crate::ir::eval::view::count;
use crate::ir::gradient::Vjp;
use crate::ir::graph::{Graph, ValueId};
use crate::ir::infer::{Inferred, check_axis};
use crate::ir::scalar::ScalarOp::{self, Eq};
use crate::ir::types::{Shape, Type};
use crate::ir::work;
use crate::ir::work::{Count, Sizes, WorkClass};
use gristmill_runtime::{DType, Tensor, with_dtype};

pub(super) fn scatter_elements_infer(op: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    attrs!(op, ScatterElements { axis });
    check_axis(*axis, &args[0])?;
    check_index_dtype(&args[1])?;
    if args[1].shape != args[2].shape
        || args[0].rank() != args[1].rank()
        || args[0].dtype != args[2].dtype
    {
        return Err(format!(
            "data {}, indices {} and updates {} do not fit together",
            args[0], args[1], args[2]
        ));
    }
    check_bounded("indices", &args[1], &args[0], Some(*axis))?;
    Ok(vec![args[0].clone()])
}

pub(super) fn scatter_elements_eval(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c.op, ScatterElements { axis, kind });
    let (data, updates) = (c.inputs[0], c.inputs[2]);
    let offsets = element_offsets(data.shape(), c.inputs[1], *axis)?;
    let mut out = data.clone();
    with_dtype!(data.dtype(), T => {
        let to = out.as_mut_slice::<T>();
        for (o, &v) in offsets.into_iter().zip(updates.as_slice::<T>()) {
            to[o] = join(*kind, to[o], v)?;
        }
    });
    Ok(vec![out])
}

pub(super) fn scatter_nd_infer(_: &Op, args: &[Type], _: &[Graph]) -> Inferred {
    let k = tuple_len(&args[0], &args[1], 0)?;
    let lead = &args[1].shape[..args[1].rank() - 1];
    let expected: Vec<Dim> = lead.iter().chain(&args[0].shape[k..]).cloned().collect();
    if args[2].dtype != args[0].dtype || args[2].shape.0 != expected {
        return Err(format!(
            "updates must be {}{}, got {}",
            args[0].dtype,
            Shape(expected),
            args[2]
        ));
    }
    Ok(vec![args[0].clone()])
}

pub(super) fn scatter_nd_eval(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c.op, ScatterNd { kind });
    let (data, at, updates) = (c.inputs[0], c.inputs[1], c.inputs[2]);
    let mut out = data.clone();
    if count(at.shape()) == 0 && updates.is_empty() {
        return Ok(vec![out]);
    }
    let (offsets, slice) = tuple_offsets(data.shape(), at, 0)?;
    if slice == 0 {
        return Ok(vec![out]);
    }
    with_dtype!(data.dtype(), T => {
        let to = out.as_mut_slice::<T>();
        for (o, new) in offsets.into_iter().zip(updates.as_slice::<T>().chunks_exact(slice)) {
            for (old, &v) in to[o..o + slice].iter_mut().zip(new) {
                *old = join(*kind, *old, v)?;
            }
        }
    });
    Ok(vec![out])
}

/// Joins an update with the present element; half types compute in `f32` and round each time.
fn join<T: Scalar>(kind: ScatterKind, old: T, new: T) -> Result<T> {
    let arithmetic = |op: ScalarOp| match (T::binary(op), old.to_wide(), new.to_wide()) {
        (Some(f), ..) => Ok(f(old, new)),
        (None, Wide::Float(a), Wide::Float(b)) => {
            let f = f32::binary(op).expect("f32 adds and multiplies");
            Ok(T::from_wide(Wide::Float(f(a as f32, b as f32).into())))
        }
        _ => Err(Error::unsupported(format!(
            "scatter with {op} of {}",
            T::DTYPE
        ))),
    };
    match kind {
        ScatterKind::Set => Ok(new),
        ScatterKind::Add => arithmetic(ScalarOp::Add),
        ScatterKind::Mul => arithmetic(ScalarOp::Mul),
        ScatterKind::Max => Ok(extreme(old, new, Extremum::Max)),
        ScatterKind::Min => Ok(extreme(old, new, Extremum::Min)),
    }
}

/// One operation per element of the last operand, the updates.
pub(super) fn scatter_work(s: &Sizes) -> Count {
    work::count(WorkClass::Scatter, s.elements(s.operands.last()))
}

/// Positions written by a scatter.
enum Positions {
    Elements { axis: usize },
    Tuples,
}

impl Positions {
    fn write(&self, kind: ScatterKind) -> Op {
        match *self {
            Positions::Elements { axis } => Op::ScatterElements { axis, kind },
            Positions::Tuples => Op::ScatterNd { kind },
        }
    }

    fn read(&self) -> Op {
        match *self {
            Positions::Elements { axis } => Op::GatherElements { axis },
            Positions::Tuples => Op::GatherNd { batch_dims: 0 },
        }
    }
}

/// A scatter under differentiation.
struct Scatter<'v, 'g> {
    v: &'v mut Vjp<'g>,
    at: Positions,
    g: ValueId,
}

pub(super) fn scatter_gradient(v: &mut Vjp) -> Result<()> {
    let (kind, at) = match v.op() {
        Op::ScatterElements { axis, kind } => (kind, Positions::Elements { axis }),
        Op::ScatterNd { kind } => (kind, Positions::Tuples),
        _ => return v.refuse("the op is no scatter"),
    };
    let g = v.g()?;
    let mut of = Scatter { v, at, g };
    match kind {
        ScatterKind::Add => of.add(),
        ScatterKind::Set => of.set(),
        ScatterKind::Mul => of.mul(),
        ScatterKind::Max | ScatterKind::Min => of.extremum(),
    }
}

impl Scatter<'_, '_> {
    /// A copy of `data` with `updates` joined in.
    fn write(&mut self, kind: ScatterKind, data: ValueId, updates: ValueId) -> Result<ValueId> {
        let indices = self.v.x(1);
        self.v.emit(self.at.write(kind), &[data, indices, updates])
    }

    /// The elements at the positions of the updates.
    fn read(&mut self, data: ValueId) -> Result<ValueId> {
        let indices = self.v.x(1);
        self.v.emit(self.at.read(), &[data, indices])
    }

    fn add(&mut self) -> Result<()> {
        self.v.give(0, self.g)?;
        if self.v.needs(2) {
            let read = self.read(self.g)?;
            self.v.give(2, read)?;
        }
        Ok(())
    }

    /// Written elements of the data have no gradient, nor do replaced updates.
    fn set(&mut self) -> Result<()> {
        if self.v.needs(0) {
            let zeros = self.v.zeros_like(self.v.x(2))?;
            let kept = self.write(ScatterKind::Set, self.g, zeros)?;
            self.v.give(0, kept)?;
        }
        if self.v.needs(2) {
            let is_last = self.winners()?;
            let read = self.read(self.g)?;
            let gradient = self.v.keep(is_last, read)?;
            self.v.give(2, gradient)?;
        }
        Ok(())
    }

    /// True for the updates in the result: their numbers are written in their place, and read back.
    fn winners(&mut self) -> Result<ValueId> {
        let data = self.v.shape(self.v.x(0));
        let updates = self.v.ty(self.v.x(2)).clone();
        let count = Op::Iota {
            dtype: DType::I64,
            shape: vec![updates.shape.n_elements()],
            axis: 0,
        };
        let numbers = self.v.emit(count, &[])?;
        let numbers = self.v.reshape(numbers, &updates.shape)?;
        let nobody = self.v.full(DType::I64, &data, -1.0)?;
        let written = self.write(ScatterKind::Set, nobody, numbers)?;
        let read = self.read(written)?;
        self.v.map(Eq, &[read, numbers])
    }

    /// The product of the other factors of an element.
    fn mul(&mut self) -> Result<()> {
        if self.v.needs(0) {
            let ones = self.ones_like(self.v.x(0))?;
            let others = self.write(ScatterKind::Mul, ones, self.v.x(2))?;
            let gradient = self.v.mul(self.g, others)?;
            self.v.give(0, gradient)?;
        }
        if self.v.needs(2) {
            self.mul_updates()?;
        }
        Ok(())
    }

    fn ones_like(&mut self, v: ValueId) -> Result<ValueId> {
        let ty = self.v.ty(v).clone();
        self.v.full(ty.dtype, &ty.shape, 1.0)
    }

    /// By division where no update of the element is 0. An update of 0 counts as 1, and gets the product if it is the only
    /// one.
    /// A second derivative holds where no update is 0.
    fn mul_updates(&mut self) -> Result<()> {
        let (data, updates) = (self.v.x(0), self.v.x(2));
        let dtype = self.v.ty(updates).dtype;
        let is_zero = self.v.with_number(Eq, updates, 0.0)?;
        let zeros = self.v.cast(is_zero, dtype)?;
        let none = self.v.zeros_like(data)?;
        let n_zeros = self.write(ScatterKind::Add, none, zeros)?;
        let n_zeros = self.read(n_zeros)?;
        let others_are_not = self.v.map(Eq, &[n_zeros, zeros])?;
        let factors = self.v.replace(is_zero, 1.0, updates)?;
        let all = self.write(ScatterKind::Mul, data, factors)?;
        let all = self.v.mul(self.g, all)?;
        let all = self.read(all)?;
        let gradient = self.v.div(all, factors)?;
        let gradient = self.v.keep(others_are_not, gradient)?;
        self.v.give(2, gradient)
    }

    /// Data and updates equal to the result share.
    fn extremum(&mut self) -> Result<()> {
        let (data, updates, y) = (self.v.x(0), self.v.x(2), self.v.y());
        let own = self.equal(data, y)?;
        let reached = self.read(y)?;
        let theirs = self.equal(updates, reached)?;
        let n = self.write(ScatterKind::Add, own, theirs)?;
        let share = self.v.div(self.g, n)?;
        if self.v.needs(0) {
            let gradient = self.v.mul(own, share)?;
            self.v.give(0, gradient)?;
        }
        if self.v.needs(2) {
            let share = self.read(share)?;
            let gradient = self.v.mul(theirs, share)?;
            self.v.give(2, gradient)?;
        }
        Ok(())
    }

    /// 1 where two values are equal, else 0.
    fn equal(&mut self, a: ValueId, b: ValueId) -> Result<ValueId> {
        let dtype = self.v.ty(a).dtype;
        let is_equal = self.v.map(Eq, &[a, b])?;
        self.v.cast(is_equal, dtype)
    }
}
