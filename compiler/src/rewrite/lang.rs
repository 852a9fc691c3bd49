//! The e-graph's language: tensor ops over e-classes, and the facts kept for each class.
//!
//! An e-node is a symbol and its children. Symbols of ops index a table of interned ops, attributes included, so the
//! language does not change when the op table grows.

use crate::ir::{Op, Real, Requested, ScalarOp, Type};
use egg::{DidMerge, Id, Language};
use gristmill_runtime::{DType, Tensor};
use std::borrow::Borrow;
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;

/// Index of an interned op.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct OpId(pub u32);

/// Index of an interned list of result types.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct TypesId(pub u32);

/// Head of an e-node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Sym {
    /// Graph input.
    Input(u32),
    /// A node of the source graph kept as it is: regions, state, transfers, control edges. Children: operands, then the
    /// classes of the nodes that must run before.
    Opaque(u32),
    /// An interned op.
    Op(OpId),
    /// One result of a node with several.
    Proj(u32),
    /// All results of the graph, then the nodes kept for their effect.
    Roots,
}

/// An e-node.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct ENode {
    pub sym: Sym,
    pub children: Box<[Id]>,
}

impl Language for ENode {
    type Discriminant = Sym;

    fn discriminant(&self) -> Sym {
        self.sym
    }
    fn matches(&self, other: &ENode) -> bool {
        self.sym == other.sym && self.children.len() == other.children.len()
    }
    fn children(&self) -> &[Id] {
        &self.children
    }
    fn children_mut(&mut self) -> &mut [Id] {
        &mut self.children
    }
}

/// An op together with the device that the user asked for: equal ops on different devices are different e-nodes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PlacedOp {
    pub op: Op,
    pub device: Requested,
}

/// Facts about an e-class.
#[derive(Clone, Debug)]
pub(crate) struct Facts {
    /// Types of the results: one, but for nodes with several results.
    pub types: TypesId,
    /// The value of all elements, when they are known to be the same. Never NaN.
    pub uniform: Option<Real>,
    /// True when the class depends on constants only, so that constant folding will compute it.
    pub constant: bool,
    /// Index of the origin: that of the earliest node.
    pub origin: u32,
}

/// Distinct values, numbered in the order in which they came.
struct Interner<T: ?Sized> {
    values: Vec<Arc<T>>,
    ids: HashMap<Arc<T>, u32>,
}

impl<T: ?Sized> Default for Interner<T> {
    fn default() -> Interner<T> {
        Interner {
            values: Vec::new(),
            ids: HashMap::new(),
        }
    }
}

impl<T: ?Sized + Eq + Hash> Interner<T> {
    fn intern(&mut self, value: impl Borrow<T> + Into<Arc<T>>) -> u32 {
        let key: &T = value.borrow();
        if let Some(&id) = self.ids.get(key) {
            return id;
        }
        let (id, value) = (self.values.len() as u32, value.into());
        self.values.push(value.clone());
        self.ids.insert(value, id);
        id
    }
}

/// Interned ops and types, and the facts of the class about to be made.
#[derive(Default)]
pub(crate) struct Tables {
    ops: Interner<PlacedOp>,
    types: Interner<[Type]>,
    pub(crate) pending: Option<Facts>,
    /// Set when two classes of different types were merged: an unsound rule.
    pub(crate) type_clash: bool,
}

impl Tables {
    pub(crate) fn intern_op(&mut self, op: PlacedOp) -> OpId {
        OpId(self.ops.intern(op))
    }

    pub(crate) fn intern_types(&mut self, types: Vec<Type>) -> TypesId {
        TypesId(self.types.intern(types))
    }

    pub(crate) fn op(&self, id: OpId) -> &Arc<PlacedOp> {
        &self.ops.values[id.0 as usize]
    }

    pub(crate) fn n_ops(&self) -> usize {
        self.ops.values.len()
    }

    pub(crate) fn types(&self, id: TypesId) -> &[Type] {
        &self.types.values[id.0 as usize]
    }
}

pub(crate) type EGraph = egg::EGraph<ENode, Tables>;

impl egg::Analysis<ENode> for Tables {
    type Data = Facts;

    fn make(eg: &mut EGraph, _: &ENode, _: Id) -> Facts {
        eg.analysis
            .pending
            .take()
            .expect("facts are set before an e-node is added")
    }

    fn remake(eg: &mut EGraph, node: &ENode, id: Id) -> Facts {
        let old = eg[id].data.clone();
        let Sym::Op(op) = node.sym else { return old };
        let op = eg.analysis.op(op).clone();
        let (uniform, constant) = derive(eg, &op.op, &node.children, old.types);
        Facts {
            uniform,
            constant,
            ..old
        }
    }

    fn merge(&mut self, a: &mut Facts, b: Facts) -> DidMerge {
        self.type_clash |= a.types != b.types;
        debug_assert_eq!(
            self.types(a.types),
            self.types(b.types),
            "an unsound rule merged classes of different types"
        );
        let before = (a.uniform.is_some(), a.constant);
        let b_has = (b.uniform.is_some(), b.constant);
        a.uniform = a.uniform.or(b.uniform);
        a.constant |= b.constant;
        a.origin = a.origin.min(b.origin);
        let after = (a.uniform.is_some(), a.constant);
        DidMerge(after != before, after != b_has)
    }
}

/// Uniform value and constancy of `op` applied to classes.
pub(crate) fn derive(
    eg: &EGraph,
    op: &Op,
    children: &[Id],
    types: TypesId,
) -> (Option<Real>, bool) {
    let facts = || children.iter().map(|c| &eg[*c].data);
    let constant = match op {
        Op::Constant { .. } => true,
        _ => !children.is_empty() && facts().all(|f| f.constant),
    };
    let is_folded = !matches!(op, Op::Map(_)) || eg.analysis.types(types)[0].dtype == DType::F32;
    let operands: Vec<_> = facts().map(|f| f.uniform.map(|r| r.0)).collect();
    let uniform = uniform_result(op, &operands).filter(|v| is_folded && !v.is_nan());
    (uniform.map(Real), constant)
}

/// Value of all elements of a result, from those of the operands where they are uniform. Views and
/// arithmetic are followed.
fn uniform_result(op: &Op, operands: &[Option<f64>]) -> Option<f64> {
    match op {
        Op::Constant { value } => value.in_memory().and_then(uniform_of),
        Op::Reshape { .. } | Op::Transpose { .. } | Op::Broadcast { .. } | Op::Slice { .. } => {
            operands[0]
        }
        Op::Map(s) => uniform_map(*s, operands),
        _ => None,
    }
}

/// Folds arithmetic on uniform `f32` values, rounding as the op would.
fn uniform_map(op: ScalarOp, operands: &[Option<f64>]) -> Option<f64> {
    let a = operands[0]? as f32;
    let b = operands.get(1).copied().unwrap_or(Some(0.0))? as f32;
    let r = match op {
        ScalarOp::Add => a + b,
        ScalarOp::Sub => a - b,
        ScalarOp::Mul => a * b,
        ScalarOp::Div => a / b,
        ScalarOp::Neg => -a,
        ScalarOp::Sqrt => a.sqrt(),
        ScalarOp::Recip => 1.0 / a,
        ScalarOp::Rsqrt => 1.0 / a.sqrt(),
        _ => return None,
    };
    Some(f64::from(r))
}

/// The value of all elements of a non-empty tensor, when they are the same and `f64` holds it exactly.
pub(crate) fn uniform_of(t: &Tensor) -> Option<f64> {
    let size = t.dtype().size_bytes();
    let bytes = t.as_bytes();
    if bytes.is_empty() || bytes[size..].iter().zip(bytes).any(|(a, b)| a != b) {
        return None;
    }
    let one = Tensor::from_bytes(t.dtype(), &[], &bytes[..size]).ok()?;
    let value = one.to_f64s()[0];
    // Of the integers from 2^53 on, some round.
    (!t.dtype().is_int() || value.abs() < 2f64.powi(53)).then_some(value)
}
