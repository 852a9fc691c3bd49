//! Benches of gristmill.

pub mod placed;
