//! Tensors on their way to another task: one stream for each task, in pieces.
//!
//! Order: the pieces of a tensor follow each other; tensors go in the order in which they were given. Blocking: the stream waits for the
//! network only, since the receiver has memory for every tensor. Bound: an executor gives one tensor per end and run. Peer gone: the runs
//! with tensors on the stream are aborted, and the next tensor opens another stream.

use crate::engine::Part;
use crate::messages::{CallableId, End, Fault, Opening, Piece, Reply};
use crate::network::Network;
use crate::pieces::{self, WithBody};
use crate::rpc;
use crate::{Limits, TaskName};
use bytes::Bytes;
use gristmill_runtime::ErrorKind;
use gristmill_runtime::exec::{Outgoing, Wire};
use http::uri::PathAndQuery;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock, Weak};
use tokio::sync::mpsc;
use tokio::task::{JoinError, JoinHandle};
use tonic::Request;
use tonic::transport::Channel;
use tonic_prost::ProstCodec;

/// Pieces in wait for the network.
const QUEUED: usize = 2;

/// A tensor for another task.
pub(crate) struct Parcel {
    pub(crate) bytes: Bytes,
    pub(crate) run: u64,
    /// Its meaning to the receiver.
    pub(crate) opening: Arc<Opening>,
    /// Ends its run if it is lost.
    pub(crate) lost: Lost,
}

/// Ends a run whose tensor was lost on the way.
pub(crate) type Lost = Arc<dyn Fn(u64, &Fault) + Send + Sync>;

/// The way to another task.
#[derive(Clone)]
pub(crate) struct Outbox(mpsc::UnboundedSender<Parcel>);

/// The task at the other end of an outbox.
pub(crate) struct Way {
    pub(crate) task: TaskName,
    pub(crate) address: String,
    pub(crate) limits: Limits,
    pub(crate) network: Network,
}

impl Outbox {
    /// Starts the way to a task.
    pub(crate) fn start(way: Way) -> Outbox {
        let (sender, parcels) = mpsc::unbounded_channel();
        tokio::spawn(carry(way, parcels));
        Outbox(sender)
    }

    pub(crate) fn send(&self, parcel: Parcel) {
        // An outbox lives as long as the server; then nothing is sent any more.
        let _ = self.0.send(parcel);
    }
}

/// The wire of a part: an outbox for each outgoing tensor.
#[derive(Default)]
pub struct PartWire(OnceLock<Ways>);

struct Ways {
    of_end: Vec<(Outbox, Arc<Opening>)>,
    lost: Lost,
}

impl PartWire {
    /// Says where the tensors of a part go, before it runs, and who is told when one is lost on the way.
    pub(crate) fn join(
        &self,
        callable: CallableId,
        part: &Arc<dyn Part>,
        of_end: Vec<(Outbox, End)>,
        tell: Lost,
    ) {
        let part = Arc::downgrade(part);
        let opening = |(outbox, end)| (outbox, Arc::new(Opening::of_end(callable, end)));
        // Joined once: a part is registered once.
        let _ = self.0.set(Ways {
            of_end: of_end.into_iter().map(opening).collect(),
            lost: Arc::new(move |run, fault| {
                abort(&part, run, fault);
                // The part may have ended long before its tensor was lost.
                tell(run, fault);
            }),
        });
    }

    /// Sends the bytes of an outgoing tensor.
    pub(crate) fn carry(&self, end: usize, run: u64, bytes: Bytes) {
        let Some(ways) = self.0.get() else { return };
        let (outbox, opening) = &ways.of_end[end];
        outbox.send(Parcel {
            run,
            bytes,
            opening: opening.clone(),
            lost: ways.lost.clone(),
        });
    }
}

impl Wire for PartWire {
    fn send(&self, tensor: Outgoing) {
        self.carry(tensor.end, tensor.run, Bytes::from_owner(tensor));
    }
}

/// An open stream.
struct Open {
    pieces: mpsc::Sender<Piece>,
    /// The reason of its end; none if it has been let end.
    end: JoinHandle<Option<Fault>>,
    channel: Channel,
    /// Numbers on it of what was opened.
    numbers: HashMap<Arc<Opening>, u32>,
    /// The last run of each with a tensor on it.
    runs: HashMap<Arc<Opening>, (Lost, u64)>,
}

async fn carry(way: Way, mut parcels: mpsc::UnboundedReceiver<Parcel>) {
    let Way {
        task,
        address,
        limits,
        network,
    } = way;
    let who = task.to_string();
    let mut open: Option<Open> = None;
    let open_on = |channel| Open::new(channel, &who, &address);
    loop {
        let parcel = match &mut open {
            None => parcels.recv().await,
            Some(stream) => tokio::select! {
                parcel = parcels.recv() => parcel,
                fault = &mut stream.end => {
                    let fault = ended(fault);
                    open.take().into_iter().for_each(|stream| stream.abort_runs(&fault));
                    continue;
                }
            },
        };
        let Some(parcel) = parcel else {
            // Whatever is on the way may still be lost.
            if let Some(stream) = open.take() {
                stream.let_end().await;
            }
            return;
        };
        let stream = match open.take() {
            Some(stream) if stream.numbers.len() < limits.openings => stream,
            Some(stream) => {
                let channel = stream.channel.clone();
                tokio::spawn(stream.let_end());
                open_on(channel)
            }
            // A connection of its own: whoever does not read tensors does not hold up orders.
            None => match network.channel(&address, Some(&task), &limits) {
                Ok(channel) => open_on(channel),
                Err(fault) => {
                    (parcel.lost)(parcel.run, &fault);
                    continue;
                }
            },
        };
        open = stream.send(parcel, limits.piece_bytes).await;
    }
}

impl Open {
    fn new(channel: Channel, who: &str, address: &str) -> Open {
        let (pieces, queue) = mpsc::channel(QUEUED);
        let (own, who, address) = (channel.clone(), who.to_owned(), address.to_owned());
        let end = tokio::spawn(async move {
            let ended = stream(own, queue).await;
            ended.map(|failure| failure.fault(&who, &address))
        });
        Open {
            pieces,
            end,
            channel,
            numbers: HashMap::new(),
            runs: HashMap::new(),
        }
    }

    /// Ends the stream once its tensors are there.
    async fn let_end(mut self) {
        // No more pieces come.
        self.pieces = mpsc::channel(1).0;
        if let Some(fault) = (&mut self.end).await.unwrap_or_else(|e| Some(panicked(&e))) {
            self.abort_runs(&fault);
        }
    }

    /// Sends a tensor; gives the stream back unless it has ended.
    async fn send(mut self, parcel: Parcel, piece_bytes: usize) -> Option<Open> {
        let Parcel { bytes, run, .. } = parcel;
        let next = self.numbers.len() as u32;
        let number = self.numbers.entry(parcel.opening.clone());
        let number = *number.or_insert(next);
        let mut opening = (number == next).then(|| Opening::clone(&parcel.opening));
        self.runs.insert(parcel.opening, (parcel.lost, run));
        let mut offset = 0;
        loop {
            let stop = (offset + piece_bytes).min(bytes.len());
            let piece = Piece {
                number,
                opening: opening.take(),
                run,
                offset: offset as u64,
                data: bytes.slice(offset..stop),
            };
            if self.pieces.send(piece).await.is_err() {
                let fault = (&mut self.end).await;
                let fault = ended(fault);
                self.abort_runs(&fault);
                return None;
            }
            if stop == bytes.len() {
                return Some(self);
            }
            offset = stop;
        }
    }

    fn abort_runs(&self, fault: &Fault) {
        let runs = self.runs.values();
        runs.for_each(|(lost, run)| lost(*run, fault));
    }
}

/// The reason for the end of a stream.
fn ended(fault: Result<Option<Fault>, JoinError>) -> Fault {
    let early = || Fault::new(ErrorKind::DeviceFailed, "a task takes no more tensors");
    match fault {
        Ok(fault) => fault.unwrap_or_else(early),
        Err(e) => panicked(&e),
    }
}

fn panicked(e: &JoinError) -> Fault {
    Fault::new(ErrorKind::Internal, format!("a stream panicked: {e}"))
}

fn abort(part: &Weak<dyn Part>, run: u64, fault: &Fault) {
    if let Some(part) = part.upgrade() {
        part.abort(run, fault.clone().into());
    }
}

/// The life of a stream. The reason of its end; none if all pieces were taken.
async fn stream(channel: Channel, queue: mpsc::Receiver<Piece>) -> Option<rpc::Failure> {
    let mut client = tonic::client::Grpc::new(WithBody::new(channel, pieces::sending(queue)));
    if let Err(e) = client.ready().await {
        return Some(rpc::lost(&e));
    }
    let codec = ProstCodec::<Piece, Reply>::default();
    let path = PathAndQuery::from_static(rpc::TENSORS);
    let request = Request::new(tokio_stream::empty());
    let mut answers = match client.streaming(request, path, codec).await {
        Err(status) => return Some(rpc::of_status(&status)),
        Ok(answers) => answers.into_inner(),
    };
    match rpc::after_beats(&mut answers).await {
        Err(failure) => Some(failure),
        Ok(reply) => reply.fault.map(rpc::Failure::Fault),
    }
}
