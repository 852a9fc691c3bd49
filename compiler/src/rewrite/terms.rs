//! [`Terms`]: the e-graph of one tensor graph, with lookups and constructors for rules.

use super::lang::{EGraph, ENode, Facts, OpId, PlacedOp, Sym, Tables, TypesId, derive};
use crate::ir::vecprog::real_bits;
use crate::ir::{Dim, Op, Origin, Requested, ScalarOp, Type};
use egg::{Id, Language};
use gristmill_runtime::{DType, Tensor};
use std::borrow::Cow;

/// Why a rule did not fire.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Miss {
    /// The term has another form.
    NoMatch,
    /// The term is already known to be equal to the result.
    NoEffect,
    /// The form is right, but a condition fails.
    Rejected(Cow<'static, str>),
}

/// Result of a rule: the class equal to the matched one.
pub(crate) type RuleResult = Result<Id, Miss>;

/// A rejection with a fixed reason.
pub(crate) fn rejected(why: &'static str) -> Miss {
    Miss::Rejected(why.into())
}

/// The e-graph of one tensor graph.
pub(crate) struct Terms {
    pub eg: EGraph,
    /// Origins by index; see [`Facts::origin`].
    pub origins: Vec<Origin>,
    /// Origin and device of the nodes to come.
    pub origin: u32,
    pub device: Requested,
}

impl Terms {
    pub(crate) fn new() -> Terms {
        Terms {
            eg: EGraph::new(Tables::default()),
            origins: vec![Origin::default()],
            origin: 0,
            device: None,
        }
    }

    /// Adds a leaf or a structural node with known types.
    pub(crate) fn add_symbol(&mut self, sym: Sym, children: &[Id], types: Vec<Type>) -> Id {
        let children = children.iter().map(|c| self.eg.find(*c)).collect();
        let node = ENode { sym, children };
        if let Some(id) = self.eg.lookup(node.clone()) {
            return id;
        }
        let types = self.eg.analysis.intern_types(types);
        let facts = self.symbol_facts(&node, types);
        self.add_node(node, facts)
    }

    /// A projection inherits constancy and origin from the node that it projects.
    fn symbol_facts(&self, node: &ENode, types: TypesId) -> Facts {
        let (constant, origin) = match node.sym {
            Sym::Proj(_) => {
                let whole = self.facts(node.children[0]);
                (whole.constant, whole.origin)
            }
            _ => (false, self.origin),
        };
        Facts {
            types,
            uniform: None,
            constant,
            origin,
        }
    }

    /// Adds `op`, in canonical form: operands of commutative ops sorted by class, constants last.
    ///
    /// Rejected when the operands do not fit the op's type rule.
    pub(crate) fn add(&mut self, op: Op, children: &[Id]) -> RuleResult {
        let children = self.canonical_children(&op, children);
        let device = match op {
            Op::Constant { .. } => None,
            _ => self.device.clone(),
        };
        let id = self.eg.analysis.intern_op(PlacedOp { op, device });
        let sym = Sym::Op(id);
        let node = ENode { sym, children };
        if let Some(found) = self.eg.lookup(node.clone()) {
            return Ok(found);
        }
        let facts = self.op_facts(id, &node.children)?;
        Ok(self.add_node(node, facts))
    }

    fn canonical_children(&self, op: &Op, children: &[Id]) -> Box<[Id]> {
        let mut children: Box<[Id]> = children.iter().map(|c| self.eg.find(*c)).collect();
        if matches!(op, Op::Map(s) if s.is_commutative()) {
            children.sort_by_key(|c| (self.is_constant(*c), *c));
        }
        children
    }

    fn op_facts(&mut self, id: OpId, children: &[Id]) -> Result<Facts, Miss> {
        let types = self.infer(id, children)?;
        let op = &self.eg.analysis.op(id).op;
        let (uniform, constant) = derive(&self.eg, op, children, types);
        Ok(Facts {
            types,
            uniform,
            constant,
            origin: self.origin,
        })
    }

    fn add_node(&mut self, node: ENode, facts: Facts) -> Id {
        self.eg.analysis.pending = Some(facts);
        self.eg.add(node)
    }

    fn infer(&mut self, op: OpId, children: &[Id]) -> Result<TypesId, Miss> {
        let op = self.eg.analysis.op(op).clone();
        let spec = op.op.spec();
        let args: Vec<Type> = children.iter().map(|c| self.ty(*c).clone()).collect();
        if args.len() < spec.arity.0 || args.len() > spec.arity.1 {
            return Err(rejected("wrong number of operands"));
        }
        let types = (spec.infer)(&op.op, &args, &[]).map_err(|m| Miss::Rejected(m.into()))?;
        Ok(self.eg.analysis.intern_types(types))
    }

    /// Adds an element-wise op.
    pub(crate) fn map(&mut self, op: ScalarOp, args: &[Id]) -> RuleResult {
        self.add(Op::Map(op), args)
    }

    /// A constant of rank 0, `value` converted to `dtype`.
    pub(crate) fn scalar(&mut self, dtype: DType, value: f64) -> Id {
        let bits = real_bits(dtype, value).to_le_bytes();
        let t = Tensor::from_bytes(dtype, &[], &bits[..dtype.size_bytes()]).expect("one element");
        self.add(Op::constant(t), &[])
            .expect("a constant has no operand that could misfit")
    }

    /// `x` under another shape; `x` itself when it has that shape. Composes with a reshape below.
    pub(crate) fn reshape(&mut self, x: Id, shape: Vec<Dim>) -> RuleResult {
        if *self.ty(x).shape == shape {
            return Ok(self.eg.find(x));
        }
        // One level only: classes that are reshapes of each other form a cycle.
        let below = self.operands_of(x, is_reshape);
        let is_undone = |y: &Id| *self.ty(*y).shape == shape;
        let undone: Vec<Id> = below.iter().copied().filter(is_undone).collect();
        if let Some(y) = self.united(&undone) {
            return Ok(y);
        }
        let source = below.first().copied().unwrap_or(x);
        self.add(Op::Reshape { shape }, &[source])
    }

    /// `x` with permuted axes. Composes with a transpose below, best with one that it undoes; a transpose that only moves
    /// axes of extent 1 becomes a reshape.
    pub(crate) fn transpose(&mut self, x: Id, perm: &[usize]) -> RuleResult {
        if is_identity(perm) {
            return Ok(self.eg.find(x));
        }
        let shape = &self.ty(x).shape;
        if perm.iter().filter(|&&p| !shape[p].is(1)).is_sorted() {
            let shape = perm.iter().map(|&p| shape[p].clone()).collect();
            return self.reshape(x, shape);
        }
        // One level only: classes that are transposes of each other form a cycle.
        let below = self.transposes_of(x);
        let undone = below.iter().filter(|(q, _)| is_identity(&compose(q, perm)));
        let undone: Vec<Id> = undone.map(|(_, y)| *y).collect();
        if let Some(y) = self.united(&undone) {
            return Ok(y);
        }
        let (perm, source) = match below.first() {
            Some((q, y)) => (compose(q, perm), *y),
            None => (perm.to_vec(), x),
        };
        self.add(Op::Transpose { perm }, &[source])
    }

    /// One class out of several that the same one-to-one view takes to the same result, so that they are equal.
    fn united(&mut self, classes: &[Id]) -> Option<Id> {
        let first = *classes.first()?;
        for other in &classes[1..] {
            self.eg.union(first, *other);
        }
        Some(self.eg.find(first))
    }

    /// All transposes in a class: permutation and operand.
    pub(crate) fn transposes_of(&self, x: Id) -> Vec<(Vec<usize>, Id)> {
        self.find_all(x, |op, ch| match op {
            Op::Transpose { perm } => Some((perm.clone(), ch[0])),
            _ => None,
        })
    }

    /// `x` repeated to exactly `shape`; `x` itself when it has that shape.
    pub(crate) fn broadcast(&mut self, x: Id, shape: Vec<Dim>) -> RuleResult {
        if *self.ty(x).shape == shape {
            Ok(self.eg.find(x))
        } else {
            self.add(Op::Broadcast { shape }, &[x])
        }
    }

    pub(crate) fn facts(&self, id: Id) -> &Facts {
        &self.eg[id].data
    }

    /// Type of a class with one result; of the first result otherwise.
    pub(crate) fn ty(&self, id: Id) -> &Type {
        &self.eg.analysis.types(self.facts(id).types)[0]
    }

    pub(crate) fn shape(&self, id: Id) -> Vec<Dim> {
        self.ty(id).shape.0.clone()
    }

    pub(crate) fn rank(&self, id: Id) -> usize {
        self.ty(id).rank()
    }

    /// Value of all elements, when known and the same.
    pub(crate) fn uniform(&self, id: Id) -> Option<f64> {
        self.facts(id).uniform.map(|r| r.0)
    }

    pub(crate) fn is_constant(&self, id: Id) -> bool {
        self.facts(id).constant
    }

    /// The first answer of `f` over the class's op nodes on the device at hand: (op, children).
    pub(crate) fn find<T>(
        &self,
        class: Id,
        mut f: impl FnMut(&Op, &[Id]) -> Option<T>,
    ) -> Option<T> {
        self.eg[class].nodes.iter().find_map(|n| {
            let Sym::Op(id) = n.sym else { return None };
            let placed = self.eg.analysis.op(id);
            if placed.device != self.device && !matches!(placed.op, Op::Constant { .. }) {
                return None;
            }
            f(&placed.op, n.children())
        })
    }

    /// All answers of `f` over the nodes that [`Terms::find`] visits.
    pub(crate) fn find_all<T>(
        &self,
        class: Id,
        mut f: impl FnMut(&Op, &[Id]) -> Option<T>,
    ) -> Vec<T> {
        let mut all = Vec::new();
        self.find(class, |op, ch| {
            all.extend(f(op, ch));
            None::<()>
        });
        all
    }

    /// First operands of the class's nodes of some op.
    pub(crate) fn operands_of(&self, class: Id, is_op: fn(&Op) -> bool) -> Vec<Id> {
        self.find_all(class, |op, ch| is_op(op).then(|| ch[0]))
    }

    /// First operand of the class's first node of some op.
    pub(crate) fn operand_of(&self, class: Id, is_op: fn(&Op) -> bool) -> Option<Id> {
        self.find(class, |op, ch| is_op(op).then(|| ch[0]))
    }

    /// The first answer of `f` over operands of the class's `op` nodes; both orders are tried for commutative ops.
    pub(crate) fn find_map<T>(
        &self,
        class: Id,
        op: ScalarOp,
        mut f: impl FnMut(&[Id]) -> Option<T>,
    ) -> Option<T> {
        self.find(class, |o, ch| match o {
            Op::Map(o) if *o != op => None,
            Op::Map(o) if o.is_commutative() => f(ch).or_else(|| f(&[ch[1], ch[0]])),
            Op::Map(_) => f(ch),
            _ => None,
        })
    }

    /// Operand of a unary element-wise op in the class.
    pub(crate) fn unary(&self, class: Id, op: ScalarOp) -> Option<Id> {
        self.find_map(class, op, |ch| Some(ch[0]))
    }

    /// Shape of an element-wise op over these operands.
    pub(crate) fn map_shape(&self, args: &[Id]) -> Option<Vec<Dim>> {
        args.iter().try_fold(Vec::new(), |s, a| {
            crate::ir::broadcast_shapes(&s, &self.ty(*a).shape).ok()
        })
    }

    /// True when two ids name the same class.
    pub(crate) fn same(&self, a: Id, b: Id) -> bool {
        self.eg.find(a) == self.eg.find(b)
    }
}

/// True when all extents are 1.
pub(crate) fn are_units(shape: &[Dim]) -> bool {
    shape.iter().all(|d| d.is(1))
}

pub(crate) fn is_reshape(op: &Op) -> bool {
    matches!(op, Op::Reshape { .. })
}

/// True when axis `i` stays axis `i` for all axes.
pub(crate) fn is_identity(perm: &[usize]) -> bool {
    perm.iter().enumerate().all(|(i, &p)| i == p)
}

/// The permutation that does `first`, then `second`.
pub(crate) fn compose(first: &[usize], second: &[usize]) -> Vec<usize> {
    second.iter().map(|&s| first[s]).collect()
}
