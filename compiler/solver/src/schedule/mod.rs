//! Schedules: simulation of a placement, list scheduling, and the parts that both are made of.

pub mod algorithms;
pub mod baechi;
pub mod critical_chain;
mod gaps;
pub mod list;
pub mod previous;
pub mod ranks;
pub mod receive;
pub mod simulate;
pub mod timeline;
mod times;
