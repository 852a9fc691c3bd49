//! IR nodes that handlers add, in the current graph or region.

use super::Ctx;
use crate::error::Result;
use crate::ir::{Dim, Op, ReduceKind, ScalarOp, Shape, Type, ValueId};
use gristmill_runtime::{DType, Tensor};

/// Types of IR values.
impl Ctx<'_, '_> {
    /// Type of an IR value.
    pub fn type_of(&mut self, id: ValueId) -> Type {
        self.b().ty(id).clone()
    }

    /// Dtype of an IR value.
    pub fn dtype_of(&mut self, id: ValueId) -> DType {
        self.b().ty(id).dtype
    }

    /// Shape of an IR value.
    pub fn shape_of(&mut self, id: ValueId) -> Shape {
        self.b().ty(id).shape.clone()
    }
}

/// Constants.
impl Ctx<'_, '_> {
    /// A constant of rank 0, converted to `dtype`.
    pub fn scalar(&mut self, dtype: DType, value: f64) -> ValueId {
        self.b().scalar(dtype, value)
    }

    /// A constant of rank 0 in the dtype of `x`.
    pub fn scalar_like(&mut self, x: ValueId, value: f64) -> ValueId {
        let dtype = self.dtype_of(x);
        self.scalar(dtype, value)
    }

    /// A constant of floats converted to `dtype`.
    pub fn reals(&mut self, dtype: DType, values: &[f64], shape: &[usize]) -> Result<ValueId> {
        let t = Tensor::from_slice(values, shape)?;
        let c = self.b().constant(t);
        self.cast(c, dtype)
    }

    /// A constant of integers.
    pub fn i64s(&mut self, values: &[i64], shape: &[usize]) -> Result<ValueId> {
        let t = Tensor::from_slice(values, shape)?;
        Ok(self.b().constant(t))
    }

    /// Positions `0, 1, ..` along an axis.
    pub fn iota(&mut self, shape: impl Into<Vec<Dim>>, axis: usize) -> Result<ValueId> {
        let op = Op::Iota {
            dtype: DType::I64,
            shape: shape.into(),
            axis,
        };
        self.add(op, &[])
    }
}

/// Element-wise ops.
impl Ctx<'_, '_> {
    /// An element-wise op.
    pub fn map(&mut self, op: ScalarOp, args: &[ValueId]) -> Result<ValueId> {
        let args = self.fitted(args)?;
        self.b().map(op, &args)
    }

    /// An element-wise op of a value and a constant converted to its dtype.
    pub fn with_real(&mut self, op: ScalarOp, x: ValueId, constant: f64) -> Result<ValueId> {
        let d = self.dtype_of(x);
        let c = self.scalar(d, constant);
        self.map(op, &[x, c])
    }

    /// `x + constant`.
    pub fn add_real(&mut self, x: ValueId, constant: f64) -> Result<ValueId> {
        self.with_real(ScalarOp::Add, x, constant)
    }

    /// `x * constant`.
    pub fn mul_real(&mut self, x: ValueId, constant: f64) -> Result<ValueId> {
        self.with_real(ScalarOp::Mul, x, constant)
    }

    /// `a` where the condition holds, `b` elsewhere.
    pub fn select(&mut self, condition: ValueId, a: ValueId, b: ValueId) -> Result<ValueId> {
        self.map(ScalarOp::Select, &[condition, a, b])
    }

    /// Conversion to `dtype`.
    pub fn cast(&mut self, x: ValueId, dtype: DType) -> Result<ValueId> {
        self.b().cast(x, dtype)
    }
}

macro_rules! unary_methods {
    ($($name:ident $op:ident;)*) => {
        /// Element-wise ops of one operand.
        impl Ctx<'_, '_> { $(
            #[doc = concat!("`ScalarOp::", stringify!($op), "`.")]
            pub fn $name(&mut self, x: ValueId) -> Result<ValueId> {
                self.map(ScalarOp::$op, &[x])
            }
        )* }
    };
}

unary_methods! {
    abs Abs;
    exp Exp;
    floor Floor;
    log Log;
    neg Neg;
    round Round;
    sqrt Sqrt;
    tanh Tanh;
    sigmoid Sigmoid;
}

macro_rules! binary_methods {
    ($($name:ident $op:ident;)*) => {
        /// Element-wise ops of two operands.
        impl Ctx<'_, '_> { $(
            #[doc = concat!("`ScalarOp::", stringify!($op), "`.")]
            pub fn $name(&mut self, a: ValueId, b: ValueId) -> Result<ValueId> {
                self.map(ScalarOp::$op, &[a, b])
            }
        )* }
    };
}

binary_methods! {
    add_ Add;
    sub Sub;
    mul Mul;
    div Div;
    eq Eq;
}

/// Views, products, reductions.
impl Ctx<'_, '_> {
    /// Any op with one result.
    pub fn add(&mut self, op: Op, args: &[ValueId]) -> Result<ValueId> {
        self.b().add1(op, args)
    }

    /// The same elements under another shape.
    pub fn reshape<D: Into<Dim>>(
        &mut self,
        x: ValueId,
        shape: impl IntoIterator<Item = D>,
    ) -> Result<ValueId> {
        self.b().reshape(x, shape)
    }

    /// Permutes axes.
    pub fn transpose(&mut self, x: ValueId, perm: &[usize]) -> Result<ValueId> {
        self.b().transpose(x, perm)
    }

    /// Broadcasts to exactly `shape`.
    pub fn broadcast<D: Into<Dim>>(
        &mut self,
        x: ValueId,
        shape: impl IntoIterator<Item = D>,
    ) -> Result<ValueId> {
        self.b().broadcast(x, shape)
    }

    /// `size` elements from `start` along one axis.
    pub fn slice_axis(
        &mut self,
        x: ValueId,
        axis: usize,
        start: impl Into<Dim>,
        size: impl Into<Dim>,
    ) -> Result<ValueId> {
        self.b().slice_axis(x, axis, start, size)
    }

    /// Joins along an axis.
    pub fn concat(&mut self, parts: &[ValueId], axis: usize) -> Result<ValueId> {
        let parts = self.fitted_parts(parts, axis)?;
        self.b().concat(&parts, axis)
    }

    /// Matrix product.
    pub fn matmul(&mut self, lhs: ValueId, rhs: ValueId) -> Result<ValueId> {
        self.b().matmul(lhs, rhs)
    }

    /// Elements at `indices` along an axis.
    pub fn gather(&mut self, x: ValueId, indices: ValueId, axis: usize) -> Result<ValueId> {
        self.add(Op::Gather { axis }, &[x, indices])
    }

    /// A reduction.
    pub fn reduce(
        &mut self,
        kind: ReduceKind,
        x: ValueId,
        axes: &[usize],
        keepdims: bool,
    ) -> Result<ValueId> {
        self.b().reduce(kind, x, axes, keepdims)
    }
}

/// The product of extents.
pub(in crate::onnx) fn product(dims: &[Dim]) -> Dim {
    dims.iter().fold(Dim::constant(1), |n, d| n.product(d))
}

/// The permutation that moves axis `from` to place `to`.
pub(in crate::onnx) fn moved_axis(rank: usize, from: usize, to: usize) -> Vec<usize> {
    let mut perm: Vec<usize> = (0..rank).filter(|&a| a != from).collect();
    perm.insert(to, from);
    perm
}
