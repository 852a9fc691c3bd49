//! Connections to tasks: who may be at the other end, and how it is known.

use crate::environment::Environment;
use crate::keys::Keys;
use crate::liveness::ANSWER;
use crate::messages::Fault;
use crate::{Limits, TaskName};
use gristmill_runtime::ErrorKind;
use std::net::{IpAddr, ToSocketAddrs};
use std::sync::Arc;
use tonic::transport::{Channel, Endpoint};

/// Whom a task or client trusts. A task compiles and runs programs for all it trusts, and gives them its variables.
#[derive(Clone, Debug, Default)]
pub enum Credentials {
    /// All users of this machine, and nobody beyond it: only loopback addresses are served and connected to.
    #[default]
    Local,
    /// Whoever can reach the address. Nothing is encrypted, and nobody knows who is at the other end.
    Insecure,
    /// Holders of keys of one authority. Connections are encrypted, and both ends prove who they are.
    Keys(Keys),
}

/// Parts of the messages of connections that the other end closed, which may have been for the lack of keys. The reason it gave may be lost.
const SIGNS: [&str; 6] = [
    "pipe",
    "reset",
    "closed",
    "frame",
    "not connected",
    "protocol error",
];

/// The network of a task or client.
#[derive(Clone)]
pub(crate) struct Network {
    pub(crate) environment: Arc<dyn Environment>,
    pub(crate) credentials: Credentials,
}

impl Network {
    /// Connections to a task at an address; to whichever is there if none is given. They are made when they are first used, and again when
    /// they broke.
    pub(crate) fn channel(
        &self,
        address: &str,
        task: Option<&TaskName>,
        limits: &Limits,
    ) -> Result<Channel, Fault> {
        let fail = |e: tonic::transport::Error| Fault::invalid(format!("address {address:?}: {e}"));
        let scheme = match &self.credentials {
            Credentials::Keys(_) => "https",
            Credentials::Local | Credentials::Insecure => "http",
        };
        let endpoint = Endpoint::from_shared(format!("{scheme}://{address}")).map_err(fail)?;
        let mut endpoint = endpoint
            .connect_timeout(limits.connect)
            .http2_keep_alive_interval(limits.keep_alive)
            .keep_alive_timeout(ANSWER)
            .keep_alive_while_idle(true);
        match &self.credentials {
            Credentials::Keys(keys) => {
                let tls = keys.to(task).timeout(limits.connect);
                endpoint = endpoint.tls_config(tls).map_err(fail)?;
            }
            Credentials::Insecure => {}
            Credentials::Local => match is_loopback(address) {
                Err(why) => return Err(Fault::invalid(format!("address {address:?}: {why}"))),
                Ok(true) => {}
                Ok(false) => return Err(beyond(address)),
            },
        }
        Ok(self.environment.channel(endpoint, limits))
    }

    /// The error where a task did not answer for the first time.
    pub(crate) fn explain(&self, fault: Fault) -> Fault {
        let hint = match self.credentials {
            Credentials::Keys(_) => "it may have refused these keys: are they of its authority?",
            _ => "if it serves with keys, this needs `--keys DIR` too",
        };
        // The reason comes last; names and addresses before it may be of any kind.
        let why = fault.message.rsplit(": ").next().unwrap_or_default();
        let is_broken = |sign: &str| why.contains(sign);
        match SIGNS.into_iter().any(is_broken) && fault.category() == ErrorKind::DeviceFailed {
            true => fault.with_hint(hint),
            false => fault,
        }
    }

    /// A random number.
    pub(crate) fn random(&self) -> u64 {
        self.environment.random()
    }
}

/// The remedy where other machines take part.
pub(crate) const NEEDS_KEYS: &str = "beyond one machine, servers and clients need keys: make them with `gristmill keys DIR --cluster FILE`, and give them with \
                                     `--keys DIR`; or say `--insecure` where all who reach the address may run programs";

/// The error of an address of another machine without keys.
fn beyond(address: &str) -> Fault {
    let message = format!("{address} is beyond this machine");
    Fault::new(ErrorKind::Unsupported, message).with_hint(NEEDS_KEYS)
}

/// True for an address of this machine alone. A host without a number is looked up.
fn is_loopback(address: &str) -> Result<bool, String> {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    if let Ok(ip) = bare.parse::<IpAddr>() {
        return Ok(ip.is_loopback());
    }
    let look = || address.to_socket_addrs().map_err(|e| e.to_string());
    let found: Vec<_> = match tokio::runtime::Handle::try_current() {
        // The lookup of a name may take seconds, in which this thread has other work.
        Ok(_) => tokio::task::block_in_place(look),
        Err(_) => look(),
    }?
    .collect();
    match found.is_empty() {
        true => Err("no host has such a name".to_owned()),
        false => Ok(found.iter().all(|a| a.ip().is_loopback())),
    }
}
