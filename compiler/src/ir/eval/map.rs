//! Element-wise evaluation: a [`VecProg`] runs instruction by instruction, each over whole buffers.

use super::scalar::{Scalar, comparison, from_bits};
use super::view;
use crate::error::{Error, Result};
use crate::ir::ScalarOp;
use crate::ir::vecprog::{VecOp, VecProg};
use gristmill_runtime::{DType, Tensor, with_dtype};

/// Runs a program over operands that broadcast together, and gives its results broadcast to `shape`.
///
/// Registers keep their own, possibly smaller, shape, so that a value of one element is computed once. Errors for
/// an integer division by zero and when memory runs out.
pub fn run_program(
    program: &VecProg,
    operands: &[&Tensor],
    shape: &[usize],
) -> Result<Vec<Tensor>> {
    let mut last_use = vec![usize::MAX; program.insts.len()];
    for (i, inst) in program.insts.iter().enumerate() {
        inst.args.iter().for_each(|a| last_use[a.0 as usize] = i);
    }
    program
        .outputs
        .iter()
        .for_each(|r| last_use[r.0 as usize] = usize::MAX);
    let mut registers: Vec<Option<Tensor>> = Vec::with_capacity(program.insts.len());
    for (i, inst) in program.insts.iter().enumerate() {
        let value = match &inst.op {
            VecOp::Input(n) => operands
                .get(*n as usize)
                .map(|&t| t.clone())
                .ok_or_else(|| {
                    Error::internal(format!("program reads operand {n} of {}", operands.len()))
                })?,
            VecOp::Const(bits) => from_bits(inst.dtype, *bits),
            VecOp::Op(op) => {
                let args: Vec<&Tensor> = inst.args.iter().map(|a| live(&registers, a.0)).collect();
                primitive(*op, &args)?
            }
        };
        registers.push(Some(value));
        for a in inst.args.iter().filter(|a| last_use[a.0 as usize] == i) {
            registers[a.0 as usize] = None;
        }
    }
    program
        .outputs
        .iter()
        .map(|r| view::broadcast(live(&registers, r.0), shape))
        .collect()
}

fn live(registers: &[Option<Tensor>], r: u32) -> &Tensor {
    registers[r as usize]
        .as_ref()
        .expect("registers are kept up to their last use")
}

/// One primitive op over operands that broadcast together. Operand dtypes must have been checked by
/// [`ScalarOp::result_dtype`].
pub fn primitive(op: ScalarOp, args: &[&Tensor]) -> Result<Tensor> {
    let mut shape = Vec::new();
    for t in args {
        shape = view::broadcast_shape(&shape, t.shape())?;
    }
    let wide: Vec<Tensor> = args
        .iter()
        .map(|t| spread(t, &shape))
        .collect::<Result<_>>()?;
    let dtype = wide.last().map_or(DType::Bool, Tensor::dtype);
    match (op, wide.as_slice()) {
        (ScalarOp::Cast(to), [x]) => {
            with_dtype!(dtype, T => with_dtype!(to, U => map1::<T, U>(x, &shape, |v| U::from_wide(v.to_wide()))))
        }
        (ScalarOp::BitCast(to), [x]) => Ok(Tensor::from_bytes(to, &shape, x.as_bytes())?),
        (ScalarOp::Select, [c, a, b]) => with_dtype!(dtype, T => select::<T>([c, a, b], &shape)),
        (_, [x]) => {
            with_dtype!(dtype, T => map1::<T, T>(x, &shape, T::unary(op).ok_or_else(|| no_op(op, dtype))?))
        }
        (_, [a, b]) => with_dtype!(dtype, T => match comparison::<T>(op) {
            Some(f) => map2::<T, bool>(a, b, &shape, f),
            None => {
                exclude_zero_divisor(op, a, b, &shape)?;
                map2::<T, T>(a, b, &shape, T::binary(op).ok_or_else(|| no_op(op, dtype))?)
            }
        }),
        _ => Err(no_op(op, dtype)),
    }
}

fn no_op(op: ScalarOp, dtype: DType) -> Error {
    Error::internal(format!("{op} of {dtype} is not a primitive"))
}

/// The tensor itself when it has one element or all of them, else its broadcast; so steps are 0 or 1.
fn spread(t: &Tensor, shape: &[usize]) -> Result<Tensor> {
    let n = view::count(shape);
    if t.len() == 1 || t.len() == n {
        Ok(t.clone())
    } else {
        view::broadcast(t, shape)
    }
}

/// An integer remainder or quotient by 0 has no value.
fn exclude_zero_divisor(op: ScalarOp, a: &Tensor, b: &Tensor, shape: &[usize]) -> Result<()> {
    let divides = matches!(op, ScalarOp::Div | ScalarOp::Rem | ScalarOp::Mod) && a.dtype().is_int();
    if !divides || shape.contains(&0) {
        return Ok(());
    }
    let size = b.dtype().size_bytes();
    match b
        .as_bytes()
        .chunks_exact(size)
        .position(|e| e.iter().all(|&byte| byte == 0))
    {
        Some(i) => Err(Error::invalid(format!(
            "integer division by zero at element {i} of the divisor {}{:?}",
            b.dtype(),
            b.shape()
        ))),
        None => Ok(()),
    }
}

/// Elements of an operand with one element or all of them.
fn elements<T: Scalar>(t: &Tensor) -> (&[T], usize) {
    (t.as_slice(), usize::from(t.len() != 1))
}

fn map1<T: Scalar, U: Scalar>(x: &Tensor, shape: &[usize], f: impl Fn(T) -> U) -> Result<Tensor> {
    let mut out = Tensor::zeros(U::DTYPE, shape)?;
    let (x, step) = elements::<T>(x);
    out.as_mut_slice::<U>()
        .iter_mut()
        .enumerate()
        .for_each(|(i, o)| *o = f(x[i * step]));
    Ok(out)
}

fn map2<T: Scalar, U: Scalar>(
    a: &Tensor,
    b: &Tensor,
    shape: &[usize],
    f: fn(T, T) -> U,
) -> Result<Tensor> {
    let mut out = Tensor::zeros(U::DTYPE, shape)?;
    let ((a, step_a), (b, step_b)) = (elements::<T>(a), elements::<T>(b));
    out.as_mut_slice::<U>()
        .iter_mut()
        .enumerate()
        .for_each(|(i, o)| *o = f(a[i * step_a], b[i * step_b]));
    Ok(out)
}

fn select<T: Scalar>([c, a, b]: [&Tensor; 3], shape: &[usize]) -> Result<Tensor> {
    let mut out = Tensor::zeros(T::DTYPE, shape)?;
    let ((c, step_c), (a, step_a), (b, step_b)) =
        (elements::<bool>(c), elements::<T>(a), elements::<T>(b));
    for (i, o) in out.as_mut_slice::<T>().iter_mut().enumerate() {
        *o = if c[i * step_c] {
            a[i * step_a]
        } else {
            b[i * step_b]
        };
    }
    Ok(out)
}
