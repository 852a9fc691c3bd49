//! Contents with symbols in them, as tensors or as errors.

use crate::error::{Error, Result};
use crate::ir::dim::Atom;
use crate::ir::{Dim, GraphBuilder, ReduceKind, ScalarOp, Type, ValueId};
use gristmill_runtime::Tensor;
use std::collections::{BTreeMap, BTreeSet, HashMap};

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
    let mut arithmetic = Arithmetic::new(b, known);
    let mut elements = Vec::new();
    for d in dims {
        let e = arithmetic.dim(d)?;
        elements.push(arithmetic.b.reshape(e, [1usize])?);
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
    Arithmetic::new(b, known).dim(d)
}

/// Nodes that compute dims, one for each different part.
struct Arithmetic<'a> {
    b: &'a mut GraphBuilder,
    /// Values of symbols.
    known: &'a BTreeMap<String, ValueId>,
    /// Values of atoms so far.
    atoms: HashMap<Atom, ValueId>,
}

impl Arithmetic<'_> {
    fn new<'a>(b: &'a mut GraphBuilder, known: &'a BTreeMap<String, ValueId>) -> Arithmetic<'a> {
        Arithmetic {
            b,
            known,
            atoms: HashMap::new(),
        }
    }

    fn dim(&mut self, d: &Dim) -> Result<ValueId> {
        let (constant, atoms) = d.parts();
        let mut sum = self.number(constant);
        for (atom, k) in atoms {
            let value = self.atom(atom)?;
            let k = self.number(k);
            let term = self.b.mul(value, k)?;
            sum = self.b.add_(sum, term)?;
        }
        Ok(sum)
    }

    fn number(&mut self, value: i64) -> ValueId {
        self.b.constant(Tensor::scalar(value))
    }

    fn atom(&mut self, atom: &Atom) -> Result<ValueId> {
        if let Some(&made) = self.atoms.get(atom) {
            return Ok(made);
        }
        let made = self.new_atom(atom)?;
        self.atoms.insert(atom.clone(), made);
        Ok(made)
    }

    fn new_atom(&mut self, atom: &Atom) -> Result<ValueId> {
        match atom {
            Atom::Symbol(s) if self.known.contains_key(&**s) => Ok(self.known[&**s]),
            Atom::Symbol(s) => {
                let one = self.number(1);
                let ones = self.b.broadcast(one, [Dim::symbol(s)])?;
                self.b.reduce(ReduceKind::Sum, ones, &[0], false)
            }
            Atom::FloorDiv(d, by) => {
                // Floor by way of the remainder that has the sign of the divisor: division truncates.
                let (x, by) = (self.dim(d)?, self.number(*by));
                let rest = self.b.map(ScalarOp::Mod, &[x, by])?;
                let exact = self.b.sub(x, rest)?;
                self.b.div(exact, by)
            }
            Atom::Mul(x, y) => {
                let (x, y) = (self.dim(x)?, self.dim(y)?);
                self.b.mul(x, y)
            }
            Atom::Min(all) => self.extreme(ScalarOp::Min, all),
            Atom::Max(all) => self.extreme(ScalarOp::Max, all),
        }
    }

    fn extreme(&mut self, op: ScalarOp, operands: &[Dim]) -> Result<ValueId> {
        let mut extreme = self.dim(&operands[0])?;
        for d in &operands[1..] {
            let other = self.dim(d)?;
            extreme = self.b.map(op, &[extreme, other])?;
        }
        Ok(extreme)
    }
}
