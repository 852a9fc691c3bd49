//! Calls over gRPC: a path, a message, and a reply that holds an answer or an error.

use crate::environment::Environment;
use crate::messages::{Fault, Reply};
use bytes::Bytes;
use gristmill_runtime::ErrorKind;
use http::uri::PathAndQuery;
use prost::Message;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;

/// The service of a task.
pub(crate) const SERVICE: &str = "gristmill.v1.Task";

pub(crate) const HELLO: &str = "/gristmill.v1.Task/Hello";
pub(crate) const OFFER: &str = "/gristmill.v1.Task/Offer";
pub(crate) const PUT: &str = "/gristmill.v1.Task/Put";
pub(crate) const PREPARE: &str = "/gristmill.v1.Task/Prepare";
pub(crate) const ATTEND: &str = "/gristmill.v1.Task/Attend";
pub(crate) const CLOSE: &str = "/gristmill.v1.Task/Close";
pub(crate) const CALL: &str = "/gristmill.v1.Task/Call";
pub(crate) const FORGET: &str = "/gristmill.v1.Task/Forget";
pub(crate) const STATUS: &str = "/gristmill.v1.Task/Status";
pub(crate) const STATUSES: &str = "/gristmill.v1.Task/Statuses";
pub(crate) const INITIALISE: &str = "/gristmill.v1.Task/Initialise";
pub(crate) const STEPS: &str = "/gristmill.v1.Task/Steps";
pub(crate) const TENSORS: &str = "/gristmill.v1.Task/Tensors";

/// A future of a service.
pub(crate) type Answer<T> = Pin<Box<dyn Future<Output = Result<Response<T>, Status>> + Send>>;

/// The reply for a result.
pub(crate) fn reply<A: Message>(result: Result<A, Fault>) -> Reply {
    match result {
        Ok(answer) => Reply {
            fault: None,
            body: Bytes::from(answer.encode_to_vec()),
        },
        Err(fault) => Reply {
            fault: Some(fault),
            body: Bytes::new(),
        },
    }
}

/// Why a call has no answer.
#[derive(Clone, Debug)]
pub(crate) enum Failure {
    /// The other side says why.
    Fault(Fault),
    /// The connection was refused or broke.
    Lost(String),
    /// No reply within the time.
    Silent(Duration),
}

impl Failure {
    /// The error, where `who` is at `address`.
    pub(crate) fn fault(self, who: &str, address: &str) -> Fault {
        match self {
            Failure::Fault(fault) => fault,
            Failure::Lost(why) => {
                let message = format!("lost {who} at {address}: {why}");
                Fault::new(ErrorKind::DeviceFailed, message)
            }
            Failure::Silent(time) => {
                let message = format!("{who} at {address} did not answer within {time:?}");
                Fault::new(ErrorKind::DeviceFailed, message)
            }
        }
    }
}

/// Connections to an address.
pub(crate) fn channel(
    environment: &dyn Environment,
    address: &str,
    limits: &crate::Limits,
) -> Result<Channel, Fault> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"));
    let endpoint = endpoint.map_err(|e| Fault::invalid(format!("address {address:?}: {e}")))?;
    let endpoint = endpoint
        .tcp_nodelay(true)
        .connect_timeout(limits.connect)
        .http2_keep_alive_interval(limits.keep_alive)
        .keep_alive_timeout(limits.keep_alive_timeout)
        .keep_alive_while_idle(true);
    Ok(environment.channel(endpoint))
}

/// Asks once; nothing is asked again by itself.
pub(crate) async fn call<Q: Message + 'static, A: Message + Default>(
    channel: &Channel,
    path: &'static str,
    question: Q,
    at_most: Duration,
    limits: &crate::Limits,
) -> Result<A, Failure> {
    let mut client = tonic::client::Grpc::new(channel.clone())
        .max_decoding_message_size(limits.text_bytes)
        .max_encoding_message_size(limits.message_bytes);
    let asked = async {
        client.ready().await.map_err(|e| lost(&e))?;
        let codec = ProstCodec::<Q, Reply>::default();
        let path = PathAndQuery::from_static(path);
        let replied = client.unary(Request::new(question), path, codec).await;
        replied.map_err(|status| of_status(&status))
    };
    let replied = tokio::time::timeout(at_most, asked).await;
    answer(replied.map_err(|_| Failure::Silent(at_most))??.into_inner())
}

/// The answer in a reply.
pub(crate) fn answer<A: Message + Default>(reply: Reply) -> Result<A, Failure> {
    match reply.fault {
        Some(fault) => Err(Failure::Fault(fault)),
        None => A::decode(reply.body).map_err(|e| Failure::Lost(format!("a broken reply: {e}"))),
    }
}

/// The status of calls under way when their server ends, with the reason.
pub(crate) fn ending(fault: &Fault) -> Status {
    let details = Bytes::from(fault.encode_to_vec());
    Status::with_details(tonic::Code::Unavailable, fault.message.clone(), details)
}

/// Where gRPC itself failed: the server may have given a reason, too large a message is the caller's, all else is a lost connection.
pub(crate) fn of_status(status: &Status) -> Failure {
    if let (false, Ok(fault)) = (status.details().is_empty(), Fault::decode(status.details())) {
        return Failure::Fault(fault);
    }
    match status.code() {
        tonic::Code::OutOfRange | tonic::Code::ResourceExhausted => {
            Failure::Fault(Fault::invalid(status.message()))
        }
        _ => lost(status),
    }
}

/// The error of a stream that breaks.
pub(crate) fn broken(status: Status) -> Fault {
    Fault::new(ErrorKind::DeviceFailed, status.message())
}

/// The innermost cause of a failed connection says most.
pub(crate) fn lost(error: &dyn std::error::Error) -> Failure {
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    Failure::Lost(innermost.to_string())
}
