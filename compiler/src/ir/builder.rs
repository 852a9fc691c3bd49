//! Builds graphs in Rust, shapes checked as they are built; an error names the caller's line.
//!
//! ```
//! use gristmill::ir::{Dim, GraphBuilder};
//! use gristmill::DType;
//! let mut b = GraphBuilder::new("scale");
//! let x = b.input("x", DType::F32, [Dim::from("batch"), 4.into()]);
//! let two = b.scalar(DType::F32, 2.0);
//! let y = b.mul(x, two)?;
//! b.output("y", y);
//! let graph = b.finish()?;
//! # Ok::<(), gristmill::Error>(())
//! ```

use super::constant::ConstData;
use super::dim::Dim;
use super::graph::{BuilderId, Graph, NodeId, Origin, ValueId};
use super::ops::{Op, ReduceKind};
use super::scalar::ScalarOp;
use super::scope::{NewNode, Scopes};
use super::types::{Shape, Type};
use super::verify::verify;
use crate::error::{Error, Result};
use crate::ir::vecprog::real_bits;
use gristmill_runtime::device::DeviceSpec;
use gristmill_runtime::{DType, Tensor};
use std::panic::Location;
use std::sync::atomic::{AtomicU32, Ordering};

/// Builds a [`Graph`] node by node.
///
/// Every method that adds a node returns an error when the operands do not fit, or are values of
/// another builder. Nodes carry the innermost origin set by [`GraphBuilder::set_origin`], or else
/// file and line of the calling Rust code.
pub struct GraphBuilder {
    pub(super) graph: Graph,
    pub(super) scopes: Scopes,
    origin: Option<Origin>,
    id: BuilderId,
    /// The first result from elsewhere.
    misfit: Option<Error>,
    /// The number of batches so far; none for the number of steps.
    pub(super) batches_done: Option<ValueId>,
    /// Parts of a batch with statistics of their own.
    pub(super) n_parts: usize,
}

/// A number that no other builder of the process has.
fn next_id() -> BuilderId {
    static LAST: AtomicU32 = AtomicU32::new(0);
    BuilderId(LAST.fetch_add(1, Ordering::Relaxed).wrapping_add(1))
}

fn line_of(at: &Location<'_>) -> Origin {
    Origin::new(&format!("{}:{}", at.file(), at.line()))
}

impl GraphBuilder {
    /// A builder of an empty graph.
    pub fn new(name: &str) -> GraphBuilder {
        GraphBuilder {
            graph: Graph::new(name),
            scopes: Scopes::default(),
            origin: None,
            id: next_id(),
            misfit: None,
            batches_done: None,
            n_parts: 1,
        }
    }

    /// The graph so far.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// Type of a value. Panics when it is a value of another builder.
    #[track_caller]
    pub fn ty(&self, v: ValueId) -> &Type {
        if let Err(message) = self.own(v) {
            panic!("{message}");
        }
        self.graph.ty(v)
    }

    /// Errors when a value cannot be of this builder.
    pub(super) fn own(&self, v: ValueId) -> Result<(), String> {
        if v.may_be_of(self.id) && (v.0 as usize) < self.graph.n_values() {
            return Ok(());
        }
        Err(format!(
            "value {} is not of graph {:?}, but of another builder's",
            v.0, self.graph.name
        ))
    }

    /// [`GraphBuilder::own`] as an error at the caller's line.
    pub(crate) fn check_own(&self, v: ValueId, at: &Location<'_>) -> Result<()> {
        let own = self.own(v);
        own.map_err(|message| Error::invalid(message).at_origin(&line_of(at)))
    }

    /// The graph so far, for passes that append to it.
    pub(crate) fn graph_mut(&mut self) -> &mut Graph {
        &mut self.graph
    }

    /// A value that a pass has appended, as one that this builder gives out.
    pub(crate) fn adopted(&self, v: ValueId) -> ValueId {
        v.of(self.id)
    }

    /// The type of an operand; an error that names the caller's line when it is no value of this
    /// builder.
    #[track_caller]
    pub(crate) fn operand(&self, v: ValueId) -> Result<&Type> {
        self.check_own(v, Location::caller())?;
        Ok(self.graph.ty(v))
    }

    /// Origin of the nodes to come, e.g. a node path of the user's model.
    pub fn set_origin(&mut self, origin: &str) {
        self.origin = Some(Origin::new(origin));
    }

    /// Runs `f` with an origin for the nodes that it adds, e.g. `"tower 1/dense"`; then restores the
    /// origin before. Errors, listings and pins name nodes by their origin, which is the caller's
    /// file and line by default: the same for all nodes of a loop.
    pub fn with_origin<T>(
        &mut self,
        origin: &str,
        f: impl FnOnce(&mut GraphBuilder) -> Result<T>,
    ) -> Result<T> {
        let before = self.origin.replace(Origin::new(origin));
        let made = f(self);
        self.origin = before;
        made
    }

    /// Adds an input.
    pub fn input<D: Into<Dim>>(
        &mut self,
        name: &str,
        dtype: DType,
        shape: impl IntoIterator<Item = D>,
    ) -> ValueId {
        let v = self.graph.add_input(name, Type::new(dtype, shape));
        v.of(self.id)
    }

    /// Names a result. That it is a value of this builder is for [`GraphBuilder::finish`] to say.
    #[track_caller]
    pub fn output(&mut self, name: &str, value: ValueId) {
        match self.operand(value) {
            Ok(_) => self.graph.add_output(name, value),
            Err(e) => {
                let e = e.context(format!("output {name:?}"));
                self.misfit.get_or_insert(e);
            }
        }
    }

    /// The finished graph, verified.
    pub fn finish(self) -> Result<Graph> {
        if let Some(e) = self.misfit {
            return Err(e);
        }
        verify(&self.graph)?;
        Ok(self.graph)
    }

    /// The graph as it is, for regions whose outputs were already named.
    pub fn into_graph(self) -> Graph {
        self.graph
    }

    /// Adds any op.
    #[track_caller]
    pub fn add(&mut self, op: Op, inputs: &[ValueId]) -> Result<Vec<ValueId>> {
        self.add_with_regions(op, inputs, Vec::new())
    }

    /// Adds any op with one result.
    #[track_caller]
    pub fn add1(&mut self, op: Op, inputs: &[ValueId]) -> Result<ValueId> {
        Ok(self.add(op, inputs)?[0])
    }

    /// Adds an op with regions.
    #[track_caller]
    pub fn add_with_regions(
        &mut self,
        op: Op,
        inputs: &[ValueId],
        regions: Vec<Graph>,
    ) -> Result<Vec<ValueId>> {
        // Asked here, since a closure would be its own caller.
        let at = Location::caller();
        for &v in inputs {
            self.operand(v).map_err(|e| e.context(op.name()))?;
        }
        let origin = self.origin.clone().unwrap_or_else(|| line_of(at));
        let is_placed = !matches!(op, Op::Constant { .. });
        let mut results = self.graph.add_with_regions(op, inputs, regions, &origin)?;
        if is_placed && self.scopes.is_any() {
            self.apply_scopes()?;
        }
        for v in &mut results {
            *v = v.of(self.id);
        }
        Ok(results)
    }

    /// Gives the last node the requests of the open scopes.
    fn apply_scopes(&mut self) -> Result<()> {
        let last = NodeId(self.graph.n_nodes() as u32 - 1);
        let node = self.graph.node(last);
        let results: Vec<Type> = node
            .outputs
            .iter()
            .map(|&v| self.graph.ty(v).clone())
            .collect();
        let new = NewNode {
            op: &node.op,
            origin: node.origin.as_str(),
            results: &results,
            device: &DeviceSpec::default(),
        };
        let request = self
            .scopes
            .request(new)
            .map_err(|e| e.at_origin(&node.origin))?;
        let node = self.graph.node_mut(last);
        node.device = request.into_requested();
        node.control = self.scopes.after();
        Ok(())
    }

    /// A constant.
    #[track_caller]
    pub fn constant(&mut self, value: impl Into<ConstData>) -> ValueId {
        self.add1(
            Op::Constant {
                value: value.into(),
            },
            &[],
        )
        .expect("a constant has no operand that could misfit")
    }

    /// The value of a variable of the session's own container: `initial` until a run has assigned
    /// another. Of the same shape, whatever the size of a run: see [`GraphBuilder::read_variable`].
    #[track_caller]
    pub fn variable(&mut self, name: &str, initial: impl Into<ConstData>) -> Result<ValueId> {
        let initial = initial.into();
        self.add1(
            Op::ReadVariable {
                container: String::new(),
                name: name.to_owned(),
                dtype: initial.dtype(),
                shape: initial.shape().iter().map(|&n| n.into()).collect(),
                initial: Some(initial),
            },
            &[],
        )
    }

    /// The value of a variable of the session's own container, which an earlier run has assigned or
    /// the caller has set. Symbols in its shape are those of inputs: it may grow from run to run.
    #[track_caller]
    pub fn read_variable<D: Into<Dim>>(
        &mut self,
        name: &str,
        dtype: DType,
        shape: impl IntoIterator<Item = D>,
    ) -> Result<ValueId> {
        self.add1(
            Op::ReadVariable {
                container: String::new(),
                name: name.to_owned(),
                dtype,
                shape: shape.into_iter().map(Into::into).collect(),
                initial: None,
            },
            &[],
        )
    }

    /// Sets a variable of the session's own container, from the end of a run that ends well; reads
    /// behind it have the new value. Gives that.
    #[track_caller]
    pub fn assign_variable(&mut self, name: &str, value: ValueId) -> Result<ValueId> {
        let (container, name) = (String::new(), name.to_owned());
        self.add1(Op::AssignVariable { container, name }, &[value])
    }

    /// A constant of rank 0, `value` converted to `dtype`.
    #[track_caller]
    pub fn scalar(&mut self, dtype: DType, value: f64) -> ValueId {
        let bits = real_bits(dtype, value).to_le_bytes();
        let t = Tensor::from_bytes(dtype, &[], &bits[..dtype.size_bytes()]).expect("one element");
        self.constant(t)
    }

    /// An element-wise op.
    #[track_caller]
    pub fn map(&mut self, op: ScalarOp, inputs: &[ValueId]) -> Result<ValueId> {
        self.add1(Op::Map(op), inputs)
    }

    /// Conversion to `dtype`; nothing when the value has it already.
    #[track_caller]
    pub fn cast(&mut self, x: ValueId, dtype: DType) -> Result<ValueId> {
        if self.operand(x)?.dtype == dtype {
            Ok(x)
        } else {
            self.map(ScalarOp::Cast(dtype), &[x])
        }
    }

    /// The same elements under another shape; nothing when the shape is the same.
    #[track_caller]
    pub fn reshape<D: Into<Dim>>(
        &mut self,
        x: ValueId,
        shape: impl IntoIterator<Item = D>,
    ) -> Result<ValueId> {
        let shape: Vec<Dim> = shape.into_iter().map(Into::into).collect();
        if *self.operand(x)?.shape == shape {
            Ok(x)
        } else {
            self.add1(Op::Reshape { shape }, &[x])
        }
    }

    /// Permutes axes; nothing for the identity.
    #[track_caller]
    pub fn transpose(&mut self, x: ValueId, perm: &[usize]) -> Result<ValueId> {
        let rank = self.operand(x)?.rank();
        let identity = perm.len() == rank && perm.iter().enumerate().all(|(i, &p)| i == p);
        if identity {
            Ok(x)
        } else {
            self.add1(
                Op::Transpose {
                    perm: perm.to_vec(),
                },
                &[x],
            )
        }
    }

    /// Broadcasts to exactly `shape`; nothing when the shape is the same.
    #[track_caller]
    pub fn broadcast<D: Into<Dim>>(
        &mut self,
        x: ValueId,
        shape: impl IntoIterator<Item = D>,
    ) -> Result<ValueId> {
        let shape: Vec<Dim> = shape.into_iter().map(Into::into).collect();
        if *self.operand(x)?.shape == shape {
            Ok(x)
        } else {
            self.add1(Op::Broadcast { shape }, &[x])
        }
    }

    /// `size` elements from `start` along one axis, whole along the others.
    #[track_caller]
    pub fn slice_axis(
        &mut self,
        x: ValueId,
        axis: usize,
        start: impl Into<Dim>,
        size: impl Into<Dim>,
    ) -> Result<ValueId> {
        let Shape(mut sizes) = self.operand(x)?.shape.clone();
        let mut starts = vec![Dim::constant(0); sizes.len()];
        let steps = vec![1; sizes.len()];
        if axis < sizes.len() {
            starts[axis] = start.into();
            sizes[axis] = size.into();
        }
        self.add1(
            Op::Slice {
                starts,
                sizes,
                steps,
            },
            &[x],
        )
    }

    /// Joins along an axis.
    #[track_caller]
    pub fn concat(&mut self, parts: &[ValueId], axis: usize) -> Result<ValueId> {
        self.add1(Op::Concat { axis }, parts)
    }

    /// Reduces axes (sorted here).
    #[track_caller]
    pub fn reduce(
        &mut self,
        kind: ReduceKind,
        x: ValueId,
        axes: &[usize],
        keepdims: bool,
    ) -> Result<ValueId> {
        let mut axes = axes.to_vec();
        axes.sort_unstable();
        axes.dedup();
        self.add1(
            Op::Reduce {
                kind,
                axes,
                keepdims,
            },
            &[x],
        )
    }

    /// Positions of the elements other than 0, `[rank, count]`: as many as a run shows, which `count`
    /// stands for from here on. See [`Op::NonZero`].
    #[track_caller]
    pub fn non_zero(&mut self, x: ValueId, count: &str) -> Result<ValueId> {
        let count = Dim::symbol(count);
        self.add1(Op::NonZero { count }, &[x])
    }

    /// Lets `symbol` stand for the value of an `i64` of rank 0 from here on, as a dim. The result is
    /// the operand. See [`Op::Extent`].
    #[track_caller]
    pub fn extent(&mut self, x: ValueId, symbol: &str) -> Result<ValueId> {
        let symbol = symbol.to_owned();
        self.add1(Op::Extent { symbol }, &[x])
    }

    /// Reduces values of one type element by element, and gives each the result where it is made:
    /// see [`Op::AllReduce`]. In a device scope all happens there.
    #[track_caller]
    pub fn all_reduce(&mut self, kind: ReduceKind, values: &[ValueId]) -> Result<Vec<ValueId>> {
        self.add(Op::AllReduce { kind }, values)
    }

    /// Matrix product.
    #[track_caller]
    pub fn matmul(&mut self, lhs: ValueId, rhs: ValueId) -> Result<ValueId> {
        self.add1(Op::MatMul, &[lhs, rhs])
    }
}

macro_rules! binary_methods {
    ($($(#[$doc:meta])* $name:ident $op:ident;)*) => {
        impl GraphBuilder { $(
            $(#[$doc])*
            #[track_caller]
            pub fn $name(&mut self, a: ValueId, b: ValueId) -> Result<ValueId> {
                self.map(ScalarOp::$op, &[a, b])
            }
        )* }
    };
}

binary_methods! {
    /// Sum.
    add_ Add;
    /// Difference.
    sub Sub;
    /// Product.
    mul Mul;
    /// Quotient.
    div Div;
    /// Maximum.
    max Max;
    /// Minimum.
    min Min;
}
