//! A client's side of its session: a stream that stays open, and is opened again when it breaks.

use crate::Limits;
use crate::messages::{Attend, Close, Fault, Hello, Nothing, Reply, Welcome};
use crate::rpc::{self, Failure};
use crate::worker::locked;
use gristmill_runtime::ErrorKind;
use http::uri::PathAndQuery;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Request, Streaming};
use tonic_prost::ProstCodec;

/// A session on a task. Dropping it leaves the session to its lease; [`Lease::close`] ends it.
pub(crate) struct Lease {
    pub(crate) session: u64,
    /// The reason once the session is lost.
    ended: Arc<Mutex<Option<Fault>>>,
    stop: watch::Sender<()>,
}

/// The task at the other end of a session.
#[derive(Clone)]
struct Way {
    channel: Channel,
    hello: Hello,
    who: String,
    address: String,
    limits: Limits,
}

/// An open stream of a session.
struct Open {
    /// The stream ends with it.
    words: mpsc::Sender<Attend>,
    answers: Streaming<Reply>,
}

impl Lease {
    /// Begins a session on the task at `address`.
    pub(crate) async fn begin(
        channel: &Channel,
        hello: Hello,
        address: &str,
        limits: &Limits,
    ) -> Result<(Lease, Welcome), Fault> {
        let mut way = Way {
            channel: channel.clone(),
            hello,
            who: "the task".to_owned(),
            address: address.to_owned(),
            limits: limits.clone(),
        };
        let (open, welcome) = way.open(0).await.map_err(|failure| way.fault(failure))?;
        way.who = welcome.name().to_string();
        let (stop, stopped) = watch::channel(());
        let ended = Arc::new(Mutex::new(None));
        let (session, reason) = (welcome.session, ended.clone());
        tokio::spawn(async move {
            if let Some(fault) = way.keep(session, open, stopped).await {
                *locked(&reason) = Some(fault);
            }
        });
        let lease = Lease {
            session,
            ended,
            stop,
        };
        Ok((lease, welcome))
    }

    /// Errors once the session is lost.
    pub(crate) fn check(&self) -> Result<(), Fault> {
        match &*locked(&self.ended) {
            None => Ok(()),
            Some(fault) => Err(fault.clone()),
        }
    }

    /// Ends the stream without a word, as the end of a process does.
    #[cfg(test)]
    pub(crate) fn abandon(&self) {
        let _ = self.stop.send(());
    }

    /// Ends the session, unless the task does not answer.
    pub(crate) async fn close(session: u64, channel: Channel, limits: Limits) {
        let at_most = limits.keep_alive + limits.keep_alive_timeout;
        let order = Close { session };
        let closed = rpc::call::<_, Nothing>(&channel, rpc::CLOSE, order, at_most, &limits);
        // Otherwise its lease ends it.
        let _ = closed.await;
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // The stream may have ended by itself.
        let _ = self.stop.send(());
    }
}

impl Way {
    fn fault(&self, failure: Failure) -> Fault {
        failure.fault(&self.who, &self.address)
    }

    /// Opens a stream of a session, or of a new one.
    async fn open(&self, session: u64) -> Result<(Open, Welcome), Failure> {
        let opened = tokio::time::timeout(self.limits.hello, self.opened(session)).await;
        opened.map_err(|_| Failure::Silent(self.limits.hello))?
    }

    async fn opened(&self, session: u64) -> Result<(Open, Welcome), Failure> {
        let (words, queue) = mpsc::channel(1);
        let attend = Attend {
            hello: Some(self.hello.clone()),
            session,
        };
        // The queue has room for one.
        let _ = words.send(attend).await;
        let mut client = tonic::client::Grpc::new(self.channel.clone())
            .max_decoding_message_size(self.limits.text_bytes)
            .max_encoding_message_size(self.limits.message_bytes);
        client.ready().await.map_err(|e| rpc::lost(&e))?;
        let codec = ProstCodec::<Attend, Reply>::default();
        let path = PathAndQuery::from_static(rpc::ATTEND);
        let answer = client.streaming(Request::new(ReceiverStream::new(queue)), path, codec);
        let mut answers = answer.await.map_err(|s| rpc::of_status(&s))?.into_inner();
        let first = answers.message().await.map_err(|s| rpc::of_status(&s))?;
        let first = first.ok_or_else(|| Failure::Lost("no answer".to_owned()))?;
        let open = Open { words, answers };
        Ok((open, rpc::answer(first)?))
    }

    /// Keeps a session until it is told to stop, or the session is lost, which it gives the reason for.
    async fn keep(
        self,
        session: u64,
        mut open: Open,
        mut stopped: watch::Receiver<()>,
    ) -> Option<Fault> {
        loop {
            tokio::select! {
                _ = stopped.changed() => return None,
                never = rpc::beat(&open.words, self.limits.keep_alive, Attend::default) => match never {},
                reason = end_of(&mut open.answers) => if let Some(fault) = reason {
                    return Some(fault.with_hint(ANOTHER));
                },
            }
            open = tokio::select! {
                _ = stopped.changed() => return None,
                opened = self.open_again(session) => match opened {
                    Ok(open) => open,
                    Err(fault) => return Some(fault.with_hint(ANOTHER)),
                },
            };
        }
    }

    /// Tries again and again, after longer and longer waits.
    async fn open_again(&self, session: u64) -> Result<Open, Fault> {
        let began = tokio::time::Instant::now();
        let mut wait = FIRST_WAIT;
        for _ in 0..self.limits.tries {
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(self.limits.longest_wait);
            match self.open(session).await {
                Ok((open, _)) => return Ok(open),
                Err(Failure::Fault(fault)) => return Err(fault),
                Err(_) => {}
            }
        }
        let message = format!(
            "lost {} at {}: {} tries within {:.0?} met no answer",
            self.who,
            self.address,
            self.limits.tries,
            began.elapsed()
        );
        Err(Fault::new(ErrorKind::DeviceFailed, message))
    }
}

/// The remedy when a session is lost.
const ANOTHER: &str = "open another session";

/// The wait before the first try to open a broken stream again.
const FIRST_WAIT: Duration = Duration::from_millis(100);

/// Waits for the end of a stream; the task may give a reason.
async fn end_of(answers: &mut Streaming<Reply>) -> Option<Fault> {
    rpc::after_beats(answers).await.ok()?.fault
}
