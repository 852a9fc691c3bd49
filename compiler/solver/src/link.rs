//! Rates of the connection between two devices.

use crate::{Bytes, Nanos};

/// A directed connection between two devices; it moves one tensor at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkProfile {
    /// Time before the first byte.
    pub latency: Nanos,
    /// Bytes per second after that.
    pub bytes_per_second: u64,
}

impl LinkProfile {
    /// Between logical devices of one process: a wake-up, and two copies through memory.
    pub const IN_PROCESS: LinkProfile = LinkProfile {
        latency: Nanos(2_000),
        bytes_per_second: 10_000_000_000,
    };

    /// Time of one transfer on an idle link.
    pub fn transfer(&self, size: Bytes) -> Nanos {
        let rate = self.bytes_per_second.max(1);
        // The product of 34 bits with 1e9 fits in 64; larger tensors take the slow way.
        let ns = match size.0.checked_mul(1_000_000_000) {
            Some(product) => product.div_ceil(rate),
            None => {
                let ns = (u128::from(size.0) * 1_000_000_000).div_ceil(u128::from(rate));
                u64::try_from(ns).unwrap_or(u64::MAX)
            }
        };
        self.latency + Nanos(ns)
    }
}
