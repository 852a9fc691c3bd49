//! Constant weights of products of integers. Where a model holds them as signed bytes they stay so:
//! neither read nor made four times as large before code generation packs them.

use super::integers::{Centred, padded_words, signed_bytes};
use super::{MAX_DEPTH, are_signed_bytes, evaluated, is_zero, widened};
use crate::error::Result;
use crate::interp;
use crate::ir::constant::WIDEN;
use crate::ir::{ConstData, Graph, NodeId, Op, ValueId};
use gristmill_runtime::{DType, Tensor};

/// Constant weights.
pub(super) enum Weights {
    /// Signed bytes.
    Bytes(ConstData),
    /// Integers in `i32`.
    Whole(Tensor),
}

impl Weights {
    /// The signed bytes of a constant which `v` widens and centres on 0, under views (last first). `None`
    /// for other values, constant or not.
    pub(super) fn stored(g: &Graph, v: ValueId, views: &[NodeId]) -> Result<Option<Weights>> {
        let Some(x) = Centred::of(g, v, Vec::new()) else {
            return Ok(None);
        };
        let Some(bytes) = g.constant(x.bytes).filter(|c| c.dtype() == DType::I8) else {
            return Ok(None);
        };
        if let Some(zero) = x.zero {
            let zero = evaluated(g, zero, MAX_DEPTH)?;
            if !zero.is_some_and(|z| is_zero(&z)) {
                return Ok(None);
            }
        }
        let mut bytes = bytes.clone();
        for &view in views.iter().rev() {
            let node = g.node(view);
            let shape = g.ty(node.outputs[0]).static_shape();
            let moves = matches!(node.op, Op::Transpose { .. } | Op::Reshape { .. });
            let Some(shape) = shape.filter(|_| moves) else {
                return Ok(None);
            };
            bytes = made(&node.op, bytes, DType::I8, &shape)?;
        }
        Ok(Some(Weights::Bytes(bytes)))
    }

    /// Constant integers in `i32`: signed bytes are held as such.
    pub(super) fn of(t: Tensor) -> Result<Weights> {
        if !are_signed_bytes(&t) {
            return Ok(Weights::Whole(t));
        }
        let bytes: Vec<i8> = t.as_slice::<i32>().iter().map(|&v| v as i8).collect();
        let bytes = Tensor::from_slice(&bytes, t.shape())?;
        Ok(Weights::Bytes(bytes.into()))
    }

    pub(super) fn shape(&self) -> &[usize] {
        match self {
            Weights::Bytes(bytes) => bytes.shape(),
            Weights::Whole(t) => t.shape(),
        }
    }

    /// The elements in `i32`.
    pub(super) fn whole(&self) -> Result<Tensor> {
        match self {
            Weights::Bytes(bytes) => widened::<i8>(&bytes.tensor()?),
            Weights::Whole(t) => Ok(t.clone()),
        }
    }

    /// The constant in `i32`, made of the bytes when it is needed.
    pub(super) fn constant(self) -> Result<ConstData> {
        match self {
            Weights::Bytes(bytes) => {
                let shape = bytes.shape().to_vec();
                made(WIDEN, bytes, DType::I32, &shape)
            }
            Weights::Whole(t) => Ok(t.into()),
        }
    }

    pub(super) fn are_signed_bytes(&self) -> bool {
        matches!(self, Weights::Bytes(_))
    }

    /// The weights with `axis` padded to whole words by zeros.
    pub(super) fn in_words(self, axis: usize) -> Result<Weights> {
        match self {
            Weights::Bytes(bytes) if is_in_words(&bytes, axis) => Ok(Weights::Bytes(bytes)),
            Weights::Bytes(bytes) => {
                let padded = padded_words(bytes.tensor()?, axis)?;
                Ok(Weights::Bytes(padded.into()))
            }
            Weights::Whole(t) => padded_words(t, axis).map(Weights::Whole),
        }
    }

    /// Weights of signed bytes whose sum these are: themselves, or up to three for bytes minus a zero point.
    pub(super) fn parts(self) -> Result<Vec<Weights>> {
        match self {
            Weights::Bytes(_) => Ok(vec![self]),
            Weights::Whole(t) => signed_bytes(t)?.into_iter().map(Weights::of).collect(),
        }
    }
}

fn is_in_words(bytes: &ConstData, axis: usize) -> bool {
    bytes.shape()[axis].is_multiple_of(super::WORD)
}

/// The result of an op on a constant: a large one later, a small one now.
fn made(op: &Op, x: ConstData, dtype: DType, shape: &[usize]) -> Result<ConstData> {
    if let Some(later) = ConstData::made(op, &[&x], dtype, shape) {
        return Ok(later);
    }
    let result = interp::eval(op, &[&x.tensor()?], &[])?.remove(0);
    Ok(result.into())
}
