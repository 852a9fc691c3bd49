//! The e-graph's language: tensor ops over e-classes, and the facts kept for each class.
//!
//! An e-node is a symbol and its children. Symbols of ops index a table of interned ops, attributes included, so the
//! language does not change when the op table grows.

use crate::ir::{Op, Real, Requested, ScalarOp, Type};
use egg::{DidMerge, Id, Language};
use std::collections::HashMap;
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

/// Interned ops and types, and the facts of the class about to be made.
#[derive(Default)]
pub(crate) struct Tables {
    ops: Vec<Arc<PlacedOp>>,
    op_ids: HashMap<Arc<PlacedOp>, OpId>,
    types: Vec<Arc<[Type]>>,
    type_ids: HashMap<Arc<[Type]>, TypesId>,
    pub(crate) pending: Option<Facts>,
    /// Set when two classes of different types were merged: an unsound rule.
    pub(crate) type_clash: bool,
}

impl Tables {
    pub(crate) fn intern_op(&mut self, op: PlacedOp) -> OpId {
        if let Some(&id) = self.op_ids.get(&op) {
            return id;
        }
        let (id, op) = (OpId(self.ops.len() as u32), Arc::new(op));
        self.ops.push(op.clone());
        self.op_ids.insert(op, id);
        id
    }

    pub(crate) fn intern_types(&mut self, types: Vec<Type>) -> TypesId {
        if let Some(&id) = self.type_ids.get(types.as_slice()) {
            return id;
        }
        let (id, types): (TypesId, Arc<[Type]>) = (TypesId(self.types.len() as u32), types.into());
        self.types.push(types.clone());
        self.type_ids.insert(types, id);
        id
    }

    pub(crate) fn op(&self, id: OpId) -> &Arc<PlacedOp> {
        &self.ops[id.0 as usize]
    }

    pub(crate) fn n_ops(&self) -> usize {
        self.ops.len()
    }

    pub(crate) fn types(&self, id: TypesId) -> &[Type] {
        &self.types[id.0 as usize]
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
    let constant = match op {
        Op::Constant { .. } => true,
        _ => !children.is_empty() && children.iter().all(|c| eg[*c].data.constant),
    };
    let of = |i: usize| eg[children[i]].data.uniform.map(|r| r.0);
    let ty = &eg.analysis.types(types)[0];
    let uniform = match op {
        Op::Constant { value } => value.in_memory().and_then(uniform_of),
        Op::Reshape { .. } | Op::Transpose { .. } | Op::Broadcast { .. } | Op::Slice { .. } => {
            of(0)
        }
        Op::Map(s) if ty.dtype == gristmill_runtime::DType::F32 => {
            uniform_map(*s, children.len(), &of)
        }
        _ => None,
    };
    (uniform.filter(|v| !v.is_nan()).map(Real), constant)
}

/// Folds arithmetic on uniform `f32` values, rounding as the op would.
fn uniform_map(op: ScalarOp, arity: usize, of: &dyn Fn(usize) -> Option<f64>) -> Option<f64> {
    let a = of(0)? as f32;
    let b = if arity > 1 { of(1)? as f32 } else { 0.0 };
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
pub(crate) fn uniform_of(t: &gristmill_runtime::Tensor) -> Option<f64> {
    let size = t.dtype().size_bytes();
    let bytes = t.as_bytes();
    if bytes.is_empty() || bytes[size..].iter().zip(bytes).any(|(a, b)| a != b) {
        return None;
    }
    let one = gristmill_runtime::Tensor::from_bytes(t.dtype(), &[], &bytes[..size]).ok()?;
    let value = one.to_f64s()[0];
    // Of the integers from 2^53 on, some round.
    (!t.dtype().is_int() || value.abs() < 2f64.powi(53)).then_some(value)
}
