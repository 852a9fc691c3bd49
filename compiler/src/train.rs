//! Training: schedules, optimisers and updates, made of ordinary nodes of a graph.
//!
//! [`Update::apply`] adds to a graph the nodes that change its variables by given gradients. All that it keeps from
//! step to step (moments, averages, the number of steps) are variables too, so that a file of the state has them:
//! `optimizer/step`, `optimizer/NAME/SLOT` and `average/NAME`.
//!
//! The formulas are PyTorch's; where Keras' differ, the documentation of the item says so.

mod optimizer;
mod schedule;
#[cfg(test)]
mod tests;
mod update;

pub use optimizer::{Adam, Optimizer, Sgd};
pub use schedule::{Curve, Decay, Exponential, Piecewise, Schedule, WarmUp};
pub use update::{Group, Parameter, Step, Update, WeightDecay};
