//! Contents with symbols in them, as tensors or as errors.

use crate::error::{Error, Result};
use crate::ir::dim::Atom;
use crate::ir::{Dim, GraphBuilder, ReduceKind, ScalarOp, Type, ValueId};
use gristmill_runtime::Tensor;
use std::collections::{BTreeMap, BTreeSet};

/// Elements with symbols in them that are computed when a graph runs.
const MAX_SYMBOLIC: usize = 64;

/// The error for contents that must be known, but contain symbols.
pub(super) fn depends_on_symbols(part: &str, dims: &[Dim]) -> Error {
    let mut symbols = BTreeSet::new();
    for d in dims {
        d.visit_symbols(&mut |s| symbols.extend([s.to_owned()]));
    }
    let names: Vec<&str> = symbols.iter().map(String::as_str).collect();
    let flags: Vec<String> = names.iter().map(|s| format!("--set {s}=N")).collect();
    Error::unsupported(format!(
        "{part} computed from the dims {} must be known",
        names.join(", ")
    ))
    .hint(format!("give the dims: {}", flags.join(" ")))
}

/// A tensor whose elements are expressions over symbols, computed from the extents when the graph
/// runs.
///
/// The value of a symbol is that of `known`, or else a sum of that many ones. Binding the symbols
/// makes all of this constant.
pub(super) fn symbolic_tensor(
    b: &mut GraphBuilder,
    dims: &[Dim],
    ty: &Type,
    known: &BTreeMap<String, ValueId>,
) -> Result<ValueId> {
    let n = dims.len();
    if n > MAX_SYMBOLIC {
        return Err(depends_on_symbols(&format!("{n} elements"), dims));
    }
    let mut elements = Vec::new();
    for d in dims {
        let e = symbolic_scalar(b, d, known)?;
        elements.push(b.reshape(e, [1usize])?);
    }
    let all = match elements[..] {
        [only] => only,
        _ => b.concat(&elements, 0)?,
    };
    let all = b.cast(all, ty.dtype)?;
    b.reshape(all, ty.shape.0.iter())
}

/// A dim as an `i64` of rank 0; see [`symbolic_tensor`].
pub(super) fn symbolic_scalar(
    b: &mut GraphBuilder,
    d: &Dim,
    known: &BTreeMap<String, ValueId>,
) -> Result<ValueId> {
    let (constant, atoms) = d.parts();
    let mut sum = b.constant(Tensor::scalar(constant));
    for (atom, k) in atoms {
        let value = symbolic_atom(b, atom, known)?;
        let k = b.constant(Tensor::scalar(k));
        let term = b.mul(value, k)?;
        sum = b.add_(sum, term)?;
    }
    Ok(sum)
}

fn symbolic_atom(
    b: &mut GraphBuilder,
    atom: &Atom,
    known: &BTreeMap<String, ValueId>,
) -> Result<ValueId> {
    match atom {
        Atom::Symbol(s) if known.contains_key(&**s) => Ok(known[&**s]),
        Atom::Symbol(s) => {
            let one = b.constant(Tensor::scalar(1i64));
            let ones = b.broadcast(one, [Dim::symbol(s)])?;
            b.reduce(ReduceKind::Sum, ones, &[0], false)
        }
        Atom::FloorDiv(d, by) => {
            // Floor by way of the remainder that has the sign of the divisor: division truncates.
            let (x, by) = (
                symbolic_scalar(b, d, known)?,
                b.constant(Tensor::scalar(*by)),
            );
            let rest = b.map(ScalarOp::Mod, &[x, by])?;
            let exact = b.sub(x, rest)?;
            b.div(exact, by)
        }
        Atom::Mul(x, y) => {
            let (x, y) = (symbolic_scalar(b, x, known)?, symbolic_scalar(b, y, known)?);
            b.mul(x, y)
        }
        Atom::Min(all) => symbolic_extreme(b, ScalarOp::Min, all, known),
        Atom::Max(all) => symbolic_extreme(b, ScalarOp::Max, all, known),
    }
}

fn symbolic_extreme(
    b: &mut GraphBuilder,
    op: ScalarOp,
    operands: &[Dim],
    known: &BTreeMap<String, ValueId>,
) -> Result<ValueId> {
    let mut extreme = symbolic_scalar(b, &operands[0], known)?;
    for d in &operands[1..] {
        let other = symbolic_scalar(b, d, known)?;
        extreme = b.map(op, &[extreme, other])?;
    }
    Ok(extreme)
}
