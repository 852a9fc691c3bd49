//! Emulated GPUs: in builds with the feature `emulator` only, since it is a tenth of a build that
//! models on CPUs and GPUs do not need.

use crate::error::Result;
use gristmill_runtime::driver::Driver;
use std::sync::Arc;

/// True in a build that has the emulator: only there it is offered.
pub const IS_BUILT_IN: bool = cfg!(any(test, feature = "emulator"));

/// Bytes of memory of an emulated GPU without a limit. Errors with `Unsupported` in a build without
/// the emulator.
#[cfg(any(test, feature = "emulator"))]
pub(super) fn memory_bytes() -> Result<u64> {
    Ok(gristmill_emulator::Limits::default().memory_bytes as u64)
}

/// A new emulated GPU. Errors with `Unsupported` in a build without the emulator.
#[cfg(any(test, feature = "emulator"))]
pub(crate) fn open(limit_bytes: Option<usize>, check_races: bool) -> Result<Arc<dyn Driver>> {
    use gristmill_emulator::{Checks, EmulatedGpu, Limits};
    let defaults = Limits::default();
    let limits = Limits {
        memory_bytes: limit_bytes.unwrap_or(defaults.memory_bytes),
        ..defaults
    };
    Ok(Arc::new(EmulatedGpu::new(
        limits,
        Checks { races: check_races },
    )))
}

#[cfg(not(any(test, feature = "emulator")))]
fn absent() -> crate::Error {
    crate::Error::unsupported("this gristmill was built without the GPU emulator")
        .hint("cargo run --release --features emulator -- ..")
}

/// Bytes of memory of an emulated GPU without a limit. Errors with `Unsupported` in a build without
/// the emulator.
#[cfg(not(any(test, feature = "emulator")))]
pub(super) fn memory_bytes() -> Result<u64> {
    Err(absent())
}

/// A new emulated GPU. Errors with `Unsupported` in a build without the emulator.
#[cfg(not(any(test, feature = "emulator")))]
pub(crate) fn open(_limit_bytes: Option<usize>, _check_races: bool) -> Result<Arc<dyn Driver>> {
    Err(absent())
}
