//! Arithmetic that Rust's own types do not have: PTX's small floats, rounding modes and approximations.

pub(crate) mod approximate;
pub(crate) mod exact;
pub(crate) mod format;
pub(crate) mod integer;
