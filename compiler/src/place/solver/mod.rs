//! The solver of bare placement problems: it knows tasks, tensors, devices and links, and nothing of models.
//!
//! [`problem`] states the problem, [`mod@simulate`] predicts what a placement costs, the algorithms propose placements.

pub mod algorithms;
pub mod baechi;
pub mod bounds;
pub mod calls;
pub mod chain;
pub mod check;
pub mod copies;
pub mod exact;
pub mod fit;
pub mod fold;
mod gaps;
pub mod list;
mod memory;
pub mod pipeline;
pub mod portfolio;
pub mod previous;
pub mod problem;
pub mod ranks;
pub mod receive;
pub mod refine;
mod rows;
#[cfg(test)]
pub mod samples;
pub mod simulate;
pub mod singles;
pub mod slices;
pub mod timeline;
mod times;

pub use problem::{Device, Links, Parts, Payload, Problem, Refused, Task, Tensor};
pub use rows::Rows;
pub use simulate::{Limits, LinkOrder, Simulator, simulate};
pub use timeline::{Timeline, Transfer};

#[cfg(test)]
mod invariants;
#[cfg(test)]
mod tests;
