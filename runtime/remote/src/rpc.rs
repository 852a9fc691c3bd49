//! Calls over gRPC: a path, a message, and a reply with an answer or an error.

use crate::keys::{self, Peer};
use crate::messages::{Fault, Reply};
use bytes::Bytes;
use gristmill_runtime::ErrorKind;
use http::uri::PathAndQuery;
use prost::Message;
use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at};
use tonic::transport::Channel;
use tonic::{Request, Response, Status, Streaming};
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

/// Methods for tasks, and for clients; others are for both.
pub(crate) const OF_TASKS: [&str; 4] = [HELLO, STEPS, STATUS, TENSORS];
const OF_CLIENTS: [&str; 7] = [ATTEND, CLOSE, PREPARE, CALL, FORGET, STATUSES, INITIALISE];

/// Errors unless a method is for this end.
pub(crate) fn permit(path: &str, peer: &Peer) -> Result<(), Fault> {
    let permitted = match path {
        path if OF_TASKS.contains(&path) => peer.check_any_task(),
        path if OF_CLIENTS.contains(&path) => peer.check_client(),
        _ => peer.check_any_task().or_else(|_| peer.check_client()),
    };
    permitted.map_err(|fault| fault.context(path.rsplit('/').next().unwrap_or(path)))
}

/// A future of a service.
pub(crate) type Answer<T> = Pin<Box<dyn Future<Output = Result<Response<T>, Status>> + Send>>;

/// The reply for a result.
pub(crate) fn reply<A: Message>(result: Result<A, Fault>) -> Reply {
    match result {
        Ok(answer) => Reply {
            body: Bytes::from(answer.encode_to_vec()),
            ..Reply::default()
        },
        Err(fault) => Reply {
            fault: Some(fault),
            ..Reply::default()
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

/// The reply to a call with many messages, after signs of life.
pub(crate) async fn after_beats(answers: &mut Streaming<Reply>) -> Result<Reply, Failure> {
    loop {
        match answers.message().await {
            Ok(Some(reply)) if reply.is_beat => {}
            Ok(Some(reply)) => return Ok(reply),
            Ok(None) => return Err(Failure::Lost("no answer".to_owned())),
            Err(status) => return Err(of_status(&status)),
        }
    }
}

/// Moments with so much time between them, the first after that time.
pub(crate) fn ticks(every: Duration) -> Interval {
    let every = every.max(Duration::from_millis(1));
    let mut ticks = interval_at(Instant::now() + every, every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

/// Gives signs of life, unless others are under way.
pub(crate) async fn beat<M>(to: &mpsc::Sender<M>, every: Duration, sign: fn() -> M) -> Infallible {
    let mut ticks = ticks(every);
    loop {
        ticks.tick().await;
        let _ = to.try_send(sign());
    }
}

/// The status of a call which a server refuses or ends, with the reason.
pub(crate) fn status(code: tonic::Code, fault: &Fault) -> Status {
    let details = Bytes::from(fault.encode_to_vec());
    Status::with_details(code, fault.message.clone(), details)
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

/// The error of a broken stream.
pub(crate) fn broken(status: Status) -> Fault {
    Fault::new(ErrorKind::DeviceFailed, innermost(&status))
}

/// The error of a failed connection.
pub(crate) fn lost(error: &(dyn std::error::Error + 'static)) -> Failure {
    Failure::Lost(innermost(error))
}

/// The innermost cause of an error says most.
pub(crate) fn innermost(error: &(dyn std::error::Error + 'static)) -> String {
    let mut innermost = error;
    loop {
        let io = innermost.downcast_ref::<std::io::Error>();
        let wrapped = io.and_then(|io| io.get_ref()?.downcast_ref());
        if let Some(tls) = wrapped.or(innermost.downcast_ref()) {
            return keys::reason(tls);
        }
        match innermost.source() {
            Some(source) => innermost = source,
            None => break,
        }
    }
    // Some errors have passed through text.
    let said = innermost.to_string();
    match said.strip_prefix("received fatal alert: ") {
        Some(alert) => keys::refusal(alert),
        None => said,
    }
}
