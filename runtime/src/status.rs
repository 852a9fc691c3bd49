//! Status codes that kernels return.
//!
//! A kernel never panics and never allocates; it reports a failure by a number, which the executor turns into an [`Error`] that
//! names the node and the device.

use crate::error::{Error, ErrorKind};

/// The range was computed.
pub const OK: u32 = 0;
/// An index (gather, scatter, slice, one-hot) lies outside its axis.
pub const INDEX_OUT_OF_RANGE: u32 = 1;
/// Integer division or remainder by zero.
pub const DIVISION_BY_ZERO: u32 = 2;
/// A descriptor that the code generator wrote for a precompiled kernel is malformed: our bug.
pub const BAD_DESCRIPTOR: u32 = 3;
/// A value that is checked is NaN or infinite.
pub const NOT_FINITE: u32 = 4;

/// The error that stands for `status`, or `None` for [`OK`].
pub fn to_error(status: u32) -> Option<Error> {
    let (kind, message) = match status {
        OK => return None,
        INDEX_OUT_OF_RANGE => (
            ErrorKind::InvalidInput,
            "an index is out of range for its axis".to_owned(),
        ),
        DIVISION_BY_ZERO => (
            ErrorKind::InvalidInput,
            "integer division by zero".to_owned(),
        ),
        NOT_FINITE => (
            ErrorKind::NotFinite,
            "a value is NaN or infinite".to_owned(),
        ),
        BAD_DESCRIPTOR => (
            ErrorKind::Internal,
            "a kernel got a malformed descriptor".to_owned(),
        ),
        other => (
            ErrorKind::DeviceFailed,
            format!("kernel failed with unknown status {other}"),
        ),
    };
    Some(Error::new(kind, message))
}
