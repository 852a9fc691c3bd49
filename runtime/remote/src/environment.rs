//! Sockets and random numbers of a task or client: those of the machine, or of a simulation.

use crate::Limits;
use crate::liveness::Connector;
use std::hash::{BuildHasher, Hasher};
use tonic::transport::{Channel, Endpoint};

/// Connections to other tasks, and random numbers.
pub(crate) trait Environment: Send + Sync + 'static {
    /// Connections to an address, made when they are first used, and again when they broke.
    fn channel(&self, endpoint: Endpoint, limits: &Limits) -> Channel;

    /// A random number.
    fn random(&self) -> u64;
}

/// The machine: TCP, and random numbers as the standard library seeds its maps.
pub(crate) struct Machine;

impl Environment for Machine {
    fn channel(&self, endpoint: Endpoint, limits: &Limits) -> Channel {
        endpoint.connect_with_connector_lazy(Connector::new(limits))
    }

    fn random(&self) -> u64 {
        let mut hasher = std::hash::RandomState::new().build_hasher();
        hasher.write_u32(std::process::id());
        hasher.finish()
    }
}
