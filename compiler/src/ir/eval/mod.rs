//! Reference evaluators, a column of the op table: each defines its op on whole tensors.
//!
//! Floating-point sums and products accumulate in `f64` and round once at the end, so that results are as good as the dtype allows
//! and do not depend on an order; integers wrap. Element-wise ops run their scalar program one primitive at a time, each rounding to
//! its dtype. The type rule has accepted operands and attributes before an evaluator sees them.
//!
//! Errors carry `InvalidInput` for faults that only the data shows (an index out of range, an integer division by zero), and `OutOfMemory`
//! for impossible sizes.

mod contract;
mod erf;
mod index;
mod map;
mod pool;
mod reduce;
mod roi;
pub mod scalar;
mod select;
mod sort;
pub(crate) mod view;

pub use erf::erf;
pub use map::run_program;
pub(super) use roi::roi_align;
pub(super) use select::{non_max_suppression, non_zero, unique};

use super::dim::{Bindings, Dim};
use super::ops::Op;
use super::types::{Shape, Type};
use super::vecprog::VecProg;
use crate::error::{Error, ErrorKind, Result};
use gristmill_kernels::random;
use gristmill_runtime::tensor::checked_size_bytes;
use gristmill_runtime::{DType, Tensor};

/// Evaluation of an op.
#[derive(Clone, Copy)]
pub enum Evaluator {
    /// From operands and attributes alone.
    Tensors(fn(&Call) -> Result<Vec<Tensor>>),
    /// `If`: runs one of two regions.
    Branch,
    /// `Loop`: runs its region a number of times.
    Repeat,
    /// `Scan`: runs its region for each element of sequences.
    Scan,
    /// A cluster or a segment: runs its region once.
    Body,
    /// From operands and attributes alone; the results have as many elements as these decide.
    Selection(fn(&Call) -> Result<Vec<Tensor>>),
    /// Gives a symbol its value.
    Extent,
    /// The operand, its extents checked.
    Shaped,
    /// Reads a variable.
    Read,
    /// Assigns a variable.
    Assign,
    /// Sends to another device.
    Send,
    /// Receives from another device.
    Receive,
    /// A part of a whole that is elsewhere, which the graph before partitioning evaluates.
    Elsewhere,
}

/// One evaluation.
pub struct Call<'a> {
    /// The op; no attribute is symbolic.
    pub op: &'a Op,
    /// Operands, which its type rule has accepted.
    pub inputs: &'a [&'a Tensor],
    /// Shape of the first result.
    pub shape: &'a [usize],
}

/// The extents of a shape under bindings. Errors when one is unknown or negative.
pub(crate) fn concrete(shape: &[Dim], bindings: &Bindings) -> Result<Vec<usize>> {
    let shape = Shape(shape.to_vec()).bind(bindings);
    shape
        .as_static()
        .ok_or_else(|| Error::invalid(format!("shape {shape} is not known, or negative")))
}

/// Evaluates an op that needs nothing but its operands. Its attributes must not be symbolic.
///
/// Errors are internal for ops with regions, state or transfers.
pub fn eval_tensors(op: &Op, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
    let Evaluator::Tensors(eval) = op.spec().eval else {
        let message = format!("{} cannot be evaluated from its operands alone", op.name());
        return Err(Error::internal(message));
    };
    let shapes = result_shapes(op, inputs)?;
    eval(&Call {
        op,
        inputs,
        shape: &shapes[0],
    })
}

/// Evaluates an op whose operands decide the extents of its results.
pub fn eval_selection(op: &Op, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
    let Evaluator::Selection(eval) = op.spec().eval else {
        let message = format!("{} does not select elements", op.name());
        return Err(Error::internal(message));
    };
    let ty = |t: &&Tensor| Type::new(t.dtype(), t.shape().iter().copied());
    let types: Vec<Type> = inputs.iter().map(ty).collect();
    (op.spec().infer)(op, &types, &[]).map_err(Error::invalid)?;
    let shape = &[];
    eval(&Call { op, inputs, shape })
}

/// Shapes of the results by the op's type rule. Errors when operands do not fit, or sizes are impossible.
fn result_shapes(op: &Op, inputs: &[&Tensor]) -> Result<Vec<Vec<usize>>> {
    let ty = |t: &&Tensor| Type::new(t.dtype(), t.shape().iter().copied());
    let types: Vec<Type> = inputs.iter().map(ty).collect();
    let types = (op.spec().infer)(op, &types, &[]).map_err(Error::invalid)?;
    types.iter().map(checked_shape).collect()
}

fn checked_shape(ty: &Type) -> Result<Vec<usize>> {
    let shape = concrete(&ty.shape, &Bindings::new())?;
    checked_size_bytes(ty.dtype, &shape)?;
    Ok(shape)
}

/// Binds the attributes of a call's op, or errors: the table pairs each evaluator with its op.
macro_rules! attrs {
    ($call:expr, $variant:ident { $($field:ident),* }) => {
        let Op::$variant { $($field),* , .. } = $call.op else {
            return Err($call.mismatch(stringify!($variant)));
        };
    };
}

impl Call<'_> {
    fn mismatch(&self, variant: &str) -> Error {
        Error::internal(format!(
            "evaluator of {variant} used for {}",
            self.op.name()
        ))
    }

    /// Zeros where the result has no elements.
    fn empty(&self) -> Option<Result<Vec<Tensor>>> {
        let zeros = || one(Ok(Tensor::zeros(self.inputs[0].dtype(), self.shape)?));
        self.shape.contains(&0).then(zeros)
    }
}

fn one(result: Result<Tensor>) -> Result<Vec<Tensor>> {
    Ok(vec![result?])
}

pub(super) fn map(c: &Call) -> Result<Vec<Tensor>> {
    let Op::Map(op) = c.op else {
        return Err(c.mismatch("Map"));
    };
    let dtypes: Vec<_> = c.inputs.iter().map(|t| t.dtype()).collect();
    run_program(&VecProg::of_op(*op, &dtypes), c.inputs, c.shape)
}

pub(super) fn constant(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c, Constant { value });
    one(value.tensor())
}

pub(super) fn iota(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c, Iota { dtype, axis });
    one(view::iota(*dtype, c.shape, *axis))
}

pub(super) fn random_bits(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c, RandomBits { seed });
    let stream = c.inputs[0].as_slice::<i64>()[0] as u64;
    let mut bits = Tensor::zeros(DType::U32, c.shape)?;
    let blocks = bits.as_mut_slice::<u32>().chunks_mut(random::WORDS);
    for (number, words) in blocks.enumerate() {
        words.copy_from_slice(&random::block(*seed, stream, number as u64)[..words.len()]);
    }
    Ok(vec![bits])
}

pub(super) fn broadcast(c: &Call) -> Result<Vec<Tensor>> {
    one(view::broadcast(c.inputs[0], c.shape))
}

pub(super) fn reshape(c: &Call) -> Result<Vec<Tensor>> {
    one(Ok(c.inputs[0].reshaped(c.shape)?))
}

pub(super) fn transpose(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c, Transpose { perm });
    one(view::transpose(c.inputs[0], perm))
}

/// An empty slice may start outside of its operand.
pub(super) fn slice(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c, Slice { starts, steps });
    if let Some(empty) = c.empty() {
        return empty;
    }
    let starts = concrete(starts, &Bindings::new())?;
    one(view::slice(c.inputs[0], &starts, c.shape, steps))
}

pub(super) fn pad(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c, Pad { low, high, mode });
    let value = c.inputs.get(1).copied();
    one(view::pad(c.inputs[0], value, low, high, *mode))
}

pub(super) fn concat(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c, Concat { axis });
    one(view::concat(c.inputs, *axis, c.shape))
}

pub(super) fn gather(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c, Gather { axis });
    one(index::gather(c.inputs[0], c.inputs[1], *axis, c.shape))
}

pub(super) fn gather_elements(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c, GatherElements { axis });
    one(index::gather_elements(c.inputs[0], c.inputs[1], *axis))
}

pub(super) fn gather_nd(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c, GatherNd { batch_dims });
    let (data, indices) = (c.inputs[0], c.inputs[1]);
    one(index::gather_nd(data, indices, *batch_dims, c.shape))
}

pub(super) fn check_indices(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c, CheckIndices { extents });
    let extents: Option<Vec<usize>> = extents.iter().map(Dim::as_usize).collect();
    let extents = extents.ok_or_else(|| Error::internal("an extent is not known"))?;
    one(index::check_indices(c.inputs[0], &extents))
}

pub(super) fn check_finite(c: &Call) -> Result<Vec<Tensor>> {
    let x = c.inputs[0];
    match x.to_f64s().iter().find(|e| !e.is_finite()) {
        Some(e) => {
            let message = format!("an element is {e}, expected finite ones");
            Err(Error::new(ErrorKind::NotFinite, message))
        }
        None => one(Ok(x.clone())),
    }
}

pub(super) fn scatter_elements(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c, ScatterElements { axis, kind });
    let (data, indices, updates) = (c.inputs[0], c.inputs[1], c.inputs[2]);
    one(index::scatter_elements(
        data, indices, updates, *axis, *kind,
    ))
}

pub(super) fn scatter_nd(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c, ScatterNd { kind });
    one(index::scatter_nd(
        c.inputs[0],
        c.inputs[1],
        c.inputs[2],
        *kind,
    ))
}

pub(super) fn reduce(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c, Reduce { kind, axes });
    one(reduce::reduce(c.inputs[0], *kind, axes, c.shape))
}

pub(super) fn arg_reduce(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(
        c,
        ArgReduce {
            kind,
            axis,
            select_last
        }
    );
    one(reduce::arg_reduce(
        c.inputs[0],
        *kind,
        *axis,
        *select_last,
        c.shape,
    ))
}

pub(super) fn softmax(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c, Softmax { axis, log });
    one(reduce::softmax(c.inputs[0], *axis, *log))
}

pub(super) fn layer_norm(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c, LayerNorm { epsilon });
    let (x, gamma, beta) = (c.inputs[0], c.inputs[1], c.inputs[2]);
    one(reduce::layer_norm(x, gamma, beta, epsilon.0))
}

pub(super) fn rms_norm(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c, RmsNorm { epsilon });
    one(reduce::rms_norm(c.inputs[0], c.inputs[1], epsilon.0))
}

pub(super) fn standardize(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c, Standardize { axes, epsilon });
    one(reduce::standardize(c.inputs[0], axes, epsilon.0))
}

pub(super) fn matmul(c: &Call) -> Result<Vec<Tensor>> {
    c.empty()
        .unwrap_or_else(|| one(contract::matmul(c.inputs[0], c.inputs[1], c.shape)))
}

pub(super) fn conv(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(
        c,
        Conv {
            window,
            groups,
            layout
        }
    );
    if let Some(empty) = c.empty() {
        return empty;
    }
    let (x, weights) = (c.inputs[0], c.inputs[1]);
    one(contract::conv(
        x, weights, window, *groups, *layout, c.shape,
    ))
}

pub(super) fn conv_transpose(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c, ConvTranspose { window, groups });
    if let Some(empty) = c.empty() {
        return empty;
    }
    let (x, weights) = (c.inputs[0], c.inputs[1]);
    one(contract::conv_transpose(
        x, weights, window, *groups, c.shape,
    ))
}

pub(super) fn pool(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(
        c,
        Pool {
            kind,
            size,
            window,
            layout
        }
    );
    one(pool::pool(
        c.inputs[0],
        *kind,
        size,
        window,
        *layout,
        c.shape,
    ))
}

pub(super) fn max_pool_indices(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c, MaxPoolIndices { size, window });
    pool::max_pool(c.inputs[0], size, window, c.shape)
}

pub(super) fn max_pool_grad(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(
        c,
        MaxPoolGrad {
            size,
            window,
            layout
        }
    );
    let (x, g) = (c.inputs[0], c.inputs[1]);
    one(pool::max_pool_grad(x, g, size, window, *layout))
}

pub(super) fn attention(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c, Attention { scale, causal });
    if let Some(empty) = c.empty() {
        return empty;
    }
    let qkv = [c.inputs[0], c.inputs[1], c.inputs[2]];
    let mask = c.inputs.get(3).copied();
    one(contract::attention(qkv, mask, scale.0, *causal, c.shape))
}

pub(super) fn top_k(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c, TopK { axis, largest });
    sort::top_k(c.inputs[0], *axis, *largest, c.shape)
}

pub(super) fn cum_sum(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(
        c,
        CumSum {
            axis,
            exclusive,
            reverse
        }
    );
    one(reduce::cum_sum(c.inputs[0], *axis, *exclusive, *reverse))
}

pub(super) fn all_reduce(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c, AllReduce { kind });
    reduce::all_reduce(c.inputs, *kind)
}

pub(super) fn all_reduce_rank(c: &Call) -> Result<Vec<Tensor>> {
    attrs!(c, AllReduceRank { kind });
    let mut all = reduce::all_reduce(c.inputs, *kind)?;
    all.truncate(1);
    Ok(all)
}
