//! Solver of bare placement problems: plain data in, a plan and a lower bound out.
//!
//! It knows tasks, tensors, devices and links; nothing of graphs, ops or drivers of devices.
//! [`problem`] states the problem, [`schedule`] predicts and builds schedules, [`memory`] makes
//! them keep limits, [`search`] looks for better ones, [`bounds`] says how good any can be, and
//! [`mod@check`] judges an answer independently of all that made it.

pub mod bounds;
pub mod check;
mod link;
pub mod memory;
pub mod problem;
pub mod rng;
mod rows;
#[doc(hidden)]
pub mod samples;
pub mod schedule;
pub mod search;
mod units;

pub use link::LinkProfile;
pub use problem::{Device, Links, Parts, Payload, Problem, Refused, Task, Tensor};
pub use rows::Rows;
pub use schedule::simulate::{Limits, LinkOrder, Simulator, simulate};
pub use schedule::timeline::{Timeline, Transfer};
pub use units::{Bytes, Nanos, Picos};

#[cfg(test)]
mod tests;
