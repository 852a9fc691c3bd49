//! Gradients, a column of the op table: the rule by which each op passes cotangents of its results to its operands.
//!
//! A rule computes the vector-Jacobian product of one node. It sees the node through [`Vjp`] and emits ops of the table,
//! so that gradients have gradients. The pass `autodiff` applies the rules to a graph.
//!
//! Rules hold for symbolic extents. At kinks they follow PyTorch and JAX: `relu` and `abs` have the slope 0 at 0, and ties of
//! `max` and `min` share. The borders of `clamp` belong to its interior (PyTorch 2.15 gives 0 or a half there).

mod vjp;

pub use vjp::Vjp;
pub(crate) use vjp::{gradient_origin, no_gradient};

use crate::error::Result;

/// Computes the cotangents of a node's operands from those of its results.
pub type Rule = fn(&mut Vjp) -> Result<()>;

/// Gradient of an op.
#[derive(Clone, Copy, Debug)]
pub enum Gradient {
    /// A rule gives the cotangents of the operands.
    Rule(Rule),
    /// A region is chosen by the first operand and takes the others: the pass makes a node that chooses among the gradients of
    /// the regions.
    Branches,
    /// A region is run for each step: the pass makes a node that runs its gradient for each, the other way.
    Steps,
    /// A region is run a number of times: where the number is known, the pass makes a node of [`Gradient::Steps`] of it first.
    Iterations,
    /// The derivative is zero wherever it exists, or no operand and result are both floating point.
    Zero,
    /// There is no gradient, for this reason: a node on the path of a gradient is an error.
    None(&'static str),
}

/// Reason of ops whose rule is still to be written.
pub(super) const NO_RULE: Gradient = Gradient::None("there is no gradient rule yet");
