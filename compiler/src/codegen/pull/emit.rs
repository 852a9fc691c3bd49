//! The instructions that pull-based code needs from a back end, and index arithmetic over them.

use crate::error::Result;
use crate::ir::ScalarOp;
use crate::ir::vecprog::{VecOp, VecProg};
use gristmill_runtime::DType;
use std::fmt::Debug;
use std::hash::Hash;

/// An index, an offset or an extent, folded while it is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(in crate::codegen) enum Ix<V> {
    /// Known now.
    C(i64),
    /// Known when the code runs.
    V(V),
}

/// Type of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::codegen) enum Kind {
    /// An element of a tensor, or a truth value (`bool`).
    Element(DType),
    /// An index.
    Index,
}

/// A comparison of two indices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::codegen) enum Order {
    /// `a < b`.
    Less,
    /// `a >= b`.
    AtLeast,
    /// `0 <= a < b`, for `b >= 0`.
    Within,
    /// `a == b`.
    Equal,
}

/// Appends code to one function. Elements of half types are held as their bits, indices as signed
/// integers wide enough for every position that occurs.
pub(in crate::codegen) trait Emit: Sized {
    /// A register with an element, an index or the address of a buffer.
    type Value: Copy + Eq + Hash + Debug;

    /// An element given by the bits of its dtype, zero extended.
    fn constant(&mut self, dtype: DType, bits: u64) -> Self::Value;
    /// A primitive op on elements of dtype `from` (that of the last operand) with result `to`.
    /// Integer division by zero leaves the function with a status.
    fn primitive(
        &mut self,
        op: ScalarOp,
        from: DType,
        to: DType,
        args: &[Self::Value],
    ) -> Result<Self::Value>;
    /// The truncated quotient of two `i64` or `u64`; the divisor is at least 1.
    fn quotient(&mut self, dtype: DType, a: Self::Value, b: Self::Value) -> Self::Value;
    /// True for NaN.
    fn is_nan(&mut self, x: Self::Value) -> Self::Value;
    /// True for any float but NaN.
    fn is_number(&mut self, x: Self::Value) -> Self::Value;
    /// `yes` where `condition` is true, else `no`; both of one kind, and both computed already.
    fn choose(&mut self, condition: Self::Value, yes: Self::Value, no: Self::Value) -> Self::Value;

    /// A known index.
    fn index(&mut self, i: i64) -> Self::Value;
    /// An index as an element of `i64`.
    fn index_to_i64(&mut self, i: Self::Value) -> Self::Value;
    /// An element of `i64` that is known to be a position, as an index.
    fn i64_to_index(&mut self, x: Self::Value) -> Self::Value;
    /// 1 for true, 0 for false.
    fn truth_to_index(&mut self, x: Self::Value) -> Self::Value;
    /// `a + b`.
    fn index_add(&mut self, a: Self::Value, b: Self::Value) -> Self::Value;
    /// `a + b` for a known `b`.
    fn index_add_const(&mut self, a: Self::Value, b: i64) -> Self::Value;
    /// `a - b`.
    fn index_sub(&mut self, a: Self::Value, b: Self::Value) -> Self::Value;
    /// `-a`.
    fn index_neg(&mut self, a: Self::Value) -> Self::Value;
    /// `a * b`.
    fn index_mul(&mut self, a: Self::Value, b: Self::Value) -> Self::Value;
    /// `a * b` for a known `b`.
    fn index_mul_const(&mut self, a: Self::Value, b: i64) -> Self::Value;
    /// `a / b` for `b >= 1`. The quotient of a negative `a` is not [`Order::Within`] any extent.
    fn index_div(&mut self, a: Self::Value, b: Self::Value) -> Self::Value;
    /// `a / b` for `a >= 0` and a known `b >= 1`.
    fn index_div_const(&mut self, a: Self::Value, b: i64) -> Self::Value;
    /// The smaller one.
    fn index_min(&mut self, a: Self::Value, b: Self::Value) -> Self::Value;
    /// The larger one.
    fn index_max(&mut self, a: Self::Value, b: Self::Value) -> Self::Value;
    /// The truth value of a comparison.
    fn index_compare(&mut self, order: Order, a: Self::Value, b: Self::Value) -> Self::Value;

    /// The element of `buffer` at position `at`.
    fn load(&mut self, dtype: DType, buffer: Self::Value, at: Ix<Self::Value>) -> Self::Value;
    /// Writes the element of `buffer` at position `at`.
    fn store(&mut self, dtype: DType, value: Self::Value, buffer: Self::Value, at: Ix<Self::Value>);
    /// Leaves the function with `status` when `condition` is true.
    fn fault_if(&mut self, condition: Self::Value, status: u32);
    /// `for i in (start..end).step_by(step)` with carried values; returns them after the loop.
    fn for_loop(
        &mut self,
        start: Ix<Self::Value>,
        end: Ix<Self::Value>,
        step: i64,
        carried: &[Self::Value],
        body: impl FnOnce(&mut Self, Self::Value, &[Self::Value]) -> Result<Vec<Self::Value>>,
    ) -> Result<Vec<Self::Value>>;
    /// Values of the given kinds, computed by `yes` when `condition` holds, else by `no`; only one of them runs.
    fn branch<S>(
        &mut self,
        condition: Self::Value,
        kinds: &[Kind],
        state: &mut S,
        yes: impl FnOnce(&mut S, &mut Self) -> Result<Vec<Self::Value>>,
        no: impl FnOnce(&mut S, &mut Self) -> Result<Vec<Self::Value>>,
    ) -> Result<Vec<Self::Value>>;

    /// Evaluates a scalar program; `VecOp::Input(n)` reads `inputs[n]`.
    fn program(&mut self, p: &VecProg, inputs: &[Self::Value]) -> Result<Vec<Self::Value>> {
        let mut registers: Vec<Self::Value> = Vec::with_capacity(p.insts.len());
        for inst in &p.insts {
            let value = match &inst.op {
                VecOp::Input(n) => inputs[*n as usize],
                VecOp::Const(bits) => self.constant(inst.dtype, *bits),
                VecOp::Op(op) => {
                    let args: Vec<Self::Value> =
                        inst.args.iter().map(|r| registers[r.0 as usize]).collect();
                    let from = inst.args.last().map_or(inst.dtype, |&r| p.dtype(r));
                    self.primitive(*op, from, inst.dtype, &args)?
                }
            };
            registers.push(value);
        }
        Ok(p.outputs.iter().map(|r| registers[r.0 as usize]).collect())
    }

    /// One element-wise op of the table, composites included, on operands of the given dtypes.
    fn scalar_op(
        &mut self,
        op: ScalarOp,
        dtypes: &[DType],
        args: &[Self::Value],
    ) -> Result<Self::Value> {
        Ok(self.program(&VecProg::of_op(op, dtypes), args)?[0])
    }

    /// Conversion as the op table defines it.
    fn convert(&mut self, x: Self::Value, from: DType, to: DType) -> Result<Self::Value> {
        if from == to {
            Ok(x)
        } else {
            self.scalar_op(ScalarOp::Cast(to), &[from], &[x])
        }
    }

    /// True when both operands are.
    fn both(&mut self, a: Self::Value, b: Self::Value) -> Result<Self::Value> {
        self.primitive(ScalarOp::And, DType::Bool, DType::Bool, &[a, b])
    }

    /// True when one of the operands is.
    fn either(&mut self, a: Self::Value, b: Self::Value) -> Result<Self::Value> {
        self.primitive(ScalarOp::Or, DType::Bool, DType::Bool, &[a, b])
    }

    /// True when the operand is false.
    fn negated(&mut self, a: Self::Value) -> Result<Self::Value> {
        self.primitive(ScalarOp::Not, DType::Bool, DType::Bool, &[a])
    }

    /// The value of an index.
    fn val(&mut self, x: Ix<Self::Value>) -> Self::Value {
        match x {
            Ix::C(c) => self.index(c),
            Ix::V(v) => v,
        }
    }

    /// `x + y`.
    fn add(&mut self, x: Ix<Self::Value>, y: Ix<Self::Value>) -> Ix<Self::Value> {
        match (x, y) {
            (Ix::C(a), Ix::C(b)) => Ix::C(a.wrapping_add(b)),
            (Ix::C(0), z) | (z, Ix::C(0)) => z,
            (Ix::V(v), Ix::C(c)) | (Ix::C(c), Ix::V(v)) => Ix::V(self.index_add_const(v, c)),
            (Ix::V(a), Ix::V(b)) => Ix::V(self.index_add(a, b)),
        }
    }

    /// `x * factor`.
    fn mul(&mut self, x: Ix<Self::Value>, factor: i64) -> Ix<Self::Value> {
        match (x, factor) {
            (Ix::C(a), f) => Ix::C(a.wrapping_mul(f)),
            (_, 0) => Ix::C(0),
            (x, 1) => x,
            (Ix::V(v), f) => Ix::V(self.index_mul_const(v, f)),
        }
    }

    /// `x / d` and `x % d` for `x >= 0`.
    fn div_rem(&mut self, x: Ix<Self::Value>, d: usize) -> (Ix<Self::Value>, Ix<Self::Value>) {
        match (x, d.max(1) as i64) {
            (Ix::C(a), d) => (Ix::C(a / d), Ix::C(a % d)),
            (x, 1) => (x, Ix::C(0)),
            (Ix::V(v), d) => {
                let q = self.index_div_const(v, d);
                let back = self.index_mul_const(q, d);
                (Ix::V(q), Ix::V(self.index_sub(v, back)))
            }
        }
    }

    /// Coordinates in `shape` of the element at row-major position `linear`.
    fn delinearise(&mut self, linear: Ix<Self::Value>, shape: &[usize]) -> Vec<Ix<Self::Value>> {
        let mut coords = vec![Ix::C(0); shape.len()];
        let mut rest = linear;
        // The outermost axis that is not 1 takes the last quotient as it is.
        let first = shape.iter().position(|&d| d != 1);
        for i in (0..shape.len()).rev() {
            if Some(i) == first {
                coords[i] = rest;
            } else if shape[i] != 1 {
                (rest, coords[i]) = self.div_rem(rest, shape[i]);
            }
        }
        coords
    }

    /// The truth value of a comparison of `x` with the known index `n`.
    fn compare_const(&mut self, order: Order, x: Ix<Self::Value>, n: i64) -> Self::Value {
        let (x, n) = (self.val(x), self.index(n));
        self.index_compare(order, x, n)
    }

    /// True when `next` is and all `conditions` so far are; `None` stands for no condition.
    fn all(&mut self, conditions: Option<Self::Value>, next: Self::Value) -> Result<Self::Value> {
        match conditions {
            None => Ok(next),
            Some(conditions) => self.both(conditions, next),
        }
    }

    /// Row-major position of `coords` in `shape`.
    fn linearise(&mut self, coords: &[Ix<Self::Value>], shape: &[usize]) -> Ix<Self::Value> {
        let mut at = Ix::C(0);
        for (&c, &d) in coords.iter().zip(shape) {
            at = self.mul(at, d as i64);
            at = self.add(at, c);
        }
        at
    }
}
