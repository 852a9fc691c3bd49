//! A client's run of a program, on both sides: inputs go to the task, and outputs come back, in pieces where they are large.

use crate::contents::{Digest, TensorBytes};
use crate::inbox::Inbox;
use crate::messages::{Call, CallPart, Fault, Piece, ResultPart, Results, Value};
use crate::progress::Watch;
use crate::rpc::{self, Failure};
use crate::runs::gone;
use crate::server::Task;
use crate::worker::given;
use crate::{Limits, TaskName};
use bytes::Bytes;
use gristmill_runtime::program::IoSpec;
use gristmill_runtime::tensor::checked_size_bytes;
use gristmill_runtime::{ErrorKind, Tensor};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Request, Status, Streaming};
use tonic_prost::ProstCodec;

/// Told of stalls of a run.
pub(crate) type OnStall<'a> = &'a (dyn Fn(&str) + Send + Sync);

/// Longest time of a run: ten years.
const FAR: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// Number of the run in the inbox of one call.
const ONLY_RUN: u64 = 1;

/// A message, perhaps with a piece of a tensor.
trait Pieced {
    fn piece(self) -> Option<Piece>;
}

impl Pieced for CallPart {
    fn piece(self) -> Option<Piece> {
        self.piece
    }
}

impl Pieced for ResultPart {
    fn piece(self) -> Option<Piece> {
        self.piece
    }
}

/// Tensors of values; the bytes of the large ones come in pieces. Errors when these do not fit, or stay away.
async fn assembled<M: Pieced>(
    values: &[Value],
    stream: &mut Streaming<M>,
    limits: &Limits,
) -> Result<Vec<Tensor>, Fault> {
    let specs = values.iter().map(Value::spec);
    let specs: Vec<IoSpec> = specs.collect::<Result<_, Fault>>()?;
    let mut n_missing = n_apart(&specs, values, limits)?;
    let inbox = Inbox::new(specs);
    for (slot, value) in values.iter().enumerate() {
        let spec = &inbox.specs()[slot];
        let is_empty = checked_size_bytes(spec.dtype, &spec.shape)? == 0;
        match value.tensor()? {
            Some(tensor) => inbox.put(slot, ONLY_RUN, tensor),
            // No piece comes for it.
            None if is_empty => {
                inbox.put(slot, ONLY_RUN, Tensor::zeros(spec.dtype, &spec.shape)?);
            }
            None => {}
        }
    }
    while n_missing > 0 {
        let piece = next_piece(stream, limits).await?;
        let Piece {
            number,
            offset,
            data,
            ..
        } = piece;
        inbox.receive(number as usize, ONLY_RUN, offset, &data)?;
        n_missing = n_missing.saturating_sub(data.len());
    }
    inbox.gather(ONLY_RUN).await
}

/// Number of bytes on their way in pieces.
fn n_apart(specs: &[IoSpec], values: &[Value], limits: &Limits) -> Result<usize, Fault> {
    let mut n = 0usize;
    for (spec, _) in specs.iter().zip(values).filter(|(_, v)| v.data.is_none()) {
        n = n.saturating_add(checked_size_bytes(spec.dtype, &spec.shape)?);
    }
    match n <= limits.store_bytes {
        true => Ok(n),
        false => {
            let message = format!("tensors of {n} bytes are more than {}", limits.store_bytes);
            Err(Fault::new(ErrorKind::OutOfMemory, message))
        }
    }
}

async fn next_piece<M: Pieced>(stream: &mut Streaming<M>, limits: &Limits) -> Result<Piece, Fault> {
    let next = tokio::time::timeout(limits.prepare, stream.message()).await;
    let late = |_| {
        let message = format!("no byte of a tensor for {:?}", limits.prepare);
        Fault::new(ErrorKind::DeviceFailed, message)
    };
    let part = next.map_err(late)?.map_err(rpc::broken)?;
    let piece = part.and_then(M::piece).filter(|p| !p.data.is_empty());
    piece.ok_or_else(|| Fault::invalid("tensors ended before their last byte"))
}

/// Sends the tensors whose bytes are not among the values.
async fn send_apart<M>(
    tensors: Vec<Tensor>,
    values: &[Value],
    limits: &Limits,
    stream: &mpsc::Sender<M>,
    message: fn(Piece) -> M,
) {
    for (slot, (tensor, value)) in tensors.into_iter().zip(values).enumerate() {
        if value.data.is_some() {
            continue;
        }
        let bytes = Bytes::from_owner(TensorBytes(tensor));
        for start in (0..bytes.len()).step_by(limits.piece_bytes) {
            let stop = (start + limits.piece_bytes).min(bytes.len());
            let piece = Piece {
                number: slot as u32,
                offset: start as u64,
                data: bytes.slice(start..stop),
                ..Piece::default()
            };
            // Whoever takes no more says why, or is lost.
            if stream.send(message(piece)).await.is_err() {
                return;
            }
        }
    }
}

/// The client that waits for a run.
pub(crate) struct Caller<'a> {
    pub(crate) session: u64,
    /// The end of its patience, and that in all.
    pub(crate) deadline: Instant,
    timeout: Duration,
    answers: &'a mpsc::Sender<Result<ResultPart, Status>>,
}

impl Caller<'_> {
    pub(crate) fn has_gone(&self) -> bool {
        self.answers.is_closed()
    }

    /// Tells it of a stall, unless it is behind with reading.
    pub(crate) fn warn(&self, stall: String) {
        let part = ResultPart {
            stall: Some(stall),
            ..ResultPart::default()
        };
        let _ = self.answers.try_send(Ok(part));
    }

    /// Waits until it has gone, or its patience has ended, and tells it of stalls meanwhile. The reason.
    pub(crate) async fn impatience(&self, watch: &mut Watch, awaited: &[&TaskName]) -> Fault {
        loop {
            tokio::select! {
                () = self.gone() => return gone(),
                () = tokio::time::sleep_until(self.deadline) => {
                    return self.too_long(&watch.places(awaited));
                }
                stall = watch.stalled(awaited) => self.warn(stall),
            }
        }
    }

    /// The error when its patience has ended.
    pub(crate) fn too_long(&self, awaited: &str) -> Fault {
        let message = format!(
            "a run took longer than {:?}, and waits for {awaited}",
            self.timeout
        );
        Fault::new(ErrorKind::DeviceFailed, message)
    }

    /// Waits until it has gone.
    pub(crate) async fn gone(&self) {
        self.answers.closed().await;
    }
}

/// Runs a program on a task.
pub(crate) async fn call(
    channel: &Channel,
    (session, program): (u64, Digest),
    feeds: Vec<Tensor>,
    (limits, on_stall): (&Limits, OnStall<'_>),
) -> Result<Vec<Tensor>, Failure> {
    let (parts, queue) = mpsc::channel(2);
    let timeout = limits.run.min(FAR);
    let call = Call {
        program: program.to_bytes(),
        feeds: Value::of_all(&feeds, limits),
        session,
        timeout_ms: timeout.as_millis() as u64,
    };
    tokio::spawn(ask(call, feeds, limits.clone(), parts));
    // The task is the first to lose patience, and says what it waited for; it may have to compile parts
    // before.
    let at_most = timeout + limits.hello + limits.prepare + limits.abort;
    let first = tokio::time::timeout(at_most, begin(channel, queue, limits, on_stall)).await;
    let (mut answer, first) = first.map_err(|_| Failure::Silent(at_most))??;
    if let Some(fault) = first.fault {
        return Err(Failure::Fault(fault));
    }
    let results = given(first.results).map_err(Failure::Fault)?;
    let tensors = assembled(&results.fetches, &mut answer, limits).await;
    tensors.map_err(Failure::Fault)
}

/// Sends a call with its inputs.
async fn ask(call: Call, feeds: Vec<Tensor>, limits: Limits, parts: mpsc::Sender<CallPart>) {
    let values = call.feeds.clone();
    let call = CallPart {
        call: Some(call),
        ..CallPart::default()
    };
    let message = |piece| CallPart {
        piece: Some(piece),
        ..CallPart::default()
    };
    if parts.send(call).await.is_ok() {
        send_apart(feeds, &values, &limits, &parts, message).await;
    }
}

/// Opens the streams of a call, and waits for an error or the results. Stalls before them are told.
async fn begin(
    channel: &Channel,
    queue: mpsc::Receiver<CallPart>,
    limits: &Limits,
    on_stall: OnStall<'_>,
) -> Result<(Streaming<ResultPart>, ResultPart), Failure> {
    let mut client = tonic::client::Grpc::new(channel.clone())
        .max_decoding_message_size(limits.message_bytes)
        .max_encoding_message_size(limits.message_bytes);
    client.ready().await.map_err(|e| rpc::lost(&e))?;
    let codec = ProstCodec::<CallPart, ResultPart>::default();
    let path = http::uri::PathAndQuery::from_static(rpc::CALL);
    let request = Request::new(ReceiverStream::new(queue));
    let answer = client.streaming(request, path, codec).await;
    let mut answer = answer.map_err(|s| rpc::of_status(&s))?.into_inner();
    loop {
        let part = answer.message().await.map_err(|s| rpc::of_status(&s))?;
        let part = part.ok_or_else(|| Failure::Lost("no answer".to_owned()))?;
        match part.stall {
            Some(stall) => on_stall(&stall),
            None => return Ok((answer, part)),
        }
    }
}

impl Task {
    /// Answers a client's run.
    pub(crate) fn answer_call(
        self: Arc<Self>,
        parts: Streaming<CallPart>,
    ) -> ReceiverStream<Result<ResultPart, Status>> {
        let (answers, out) = mpsc::channel(2);
        tokio::spawn(async move {
            // Until the last output is with the client.
            let underway = self.begin_run();
            let called = match &underway {
                Ok(_) => tokio::select! {
                    called = self.called(parts, &answers) => called,
                    () = self.stopped() => Err(self.is_stopping()),
                },
                Err(fault) => Err(fault.clone()),
            };
            let (fault, fetches) = match called {
                Ok(fetches) => (None, fetches),
                Err(fault) => (Some(fault), Vec::new()),
            };
            let values = Value::of_all(&fetches, &self.limits);
            let first = ResultPart {
                results: fault.is_none().then(|| Results {
                    fetches: values.clone(),
                }),
                fault,
                ..ResultPart::default()
            };
            let message = |piece| {
                Ok(ResultPart {
                    piece: Some(piece),
                    ..ResultPart::default()
                })
            };
            // An absent client needs no answer.
            if answers.send(Ok(first)).await.is_ok() {
                send_apart(fetches, &values, &self.limits, &answers, message).await;
            }
        });
        ReceiverStream::new(out)
    }

    async fn called(
        self: &Arc<Self>,
        mut parts: Streaming<CallPart>,
        answers: &mpsc::Sender<Result<ResultPart, Status>>,
    ) -> Result<Vec<Tensor>, Fault> {
        let first = tokio::time::timeout(self.limits.hello, parts.message()).await;
        let silent = |_| Fault::invalid("a client opened a call and said nothing");
        let first = first.map_err(silent)?.map_err(rpc::broken)?;
        let call = given(first.and_then(|part| part.call))?;
        let digest = Digest::from_bytes(&call.program)?;
        let session = call.session;
        self.master.sessions.check(session)?;
        let timeout = Duration::from_millis(call.timeout_ms).min(FAR);
        let caller = Caller {
            session,
            deadline: Instant::now() + timeout,
            timeout,
            answers,
        };
        let feeds = assembled(&call.feeds, &mut parts, &self.limits);
        let feeds = tokio::time::timeout_at(caller.deadline, feeds).await;
        let feeds = feeds.map_err(|_| caller.too_long("its inputs"))??;
        self.call(&digest, feeds, &caller).await
    }
}
