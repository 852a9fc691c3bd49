//! Connections that notice a silent other end.
//!
//! Each end sends something every second: a question of HTTP/2, and beats on the standing streams, also while
//! bytes come. So an end without a byte from the other for some seconds has lost it. (HTTP/2's own time for
//! an answer is of no use here: both question and answer wait behind the bytes under way, a megabyte and
//! more, ten seconds on a line of 1 Mbit/s.)

use crate::Limits;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioIo;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep};
use tonic::transport::Uri;
use tonic::transport::server::Connected;

/// Time for HTTP/2's own answers, which wait behind bytes under way.
pub(crate) const ANSWER: Duration = Duration::from_secs(60);

/// Most bytes read while nobody asks for them: those of a blocked writer's other end. It sends no more
/// without permission, the window of a connection, which is 5 MiB at most.
const AHEAD: usize = 8 << 20;

/// Bytes read at once then.
const PORTION: usize = 16 << 10;

/// A timer is never so late in a process at work.
const ASLEEP: Duration = Duration::from_millis(500);

/// A connection. Waiting reads and writes fail once no byte has come for a time.
pub(crate) struct Live<S> {
    stream: S,
    quiet: Duration,
    timer: Pin<Box<Sleep>>,
    /// Time of the last byte.
    last: Instant,
    /// Bytes read before they are asked for, and how many of them were since.
    ahead: Vec<u8>,
    n_given: usize,
}

impl<S: AsyncRead + Unpin> Live<S> {
    /// A new connection.
    pub(crate) fn new(stream: S, limits: &Limits) -> Live<S> {
        let quiet = limits.keep_alive + limits.keep_alive_timeout;
        Live {
            stream,
            quiet,
            timer: Box::pin(sleep(quiet)),
            last: Instant::now(),
            ahead: Vec::new(),
            n_given: 0,
        }
    }

    /// The error once nothing has come for too long; wakes the caller at that time.
    fn check(&mut self, context: &mut Context<'_>) -> Poll<io::Error> {
        loop {
            ready!(self.timer.as_mut().poll(context));
            let now = Instant::now();
            if now > self.timer.deadline() + ASLEEP {
                // This process, or machine, was stopped: what came meanwhile is yet to be read.
                self.last = now;
            }
            let due = self.last + self.quiet;
            if now >= due {
                let message = format!("no sign of life for {:?}", self.quiet);
                return Poll::Ready(io::Error::new(io::ErrorKind::TimedOut, message));
            }
            self.timer.as_mut().reset(due);
        }
    }

    /// [`Live::check`] of a waiting writer. It does not read meanwhile, so what has come is taken in here.
    fn check_writer(&mut self, context: &mut Context<'_>) -> Poll<io::Error> {
        while self.ahead.len() - self.n_given < AHEAD {
            let mut portion = [0; PORTION];
            let mut buffer = ReadBuf::new(&mut portion);
            match Pin::new(&mut self.stream).poll_read(context, &mut buffer) {
                Poll::Ready(Ok(())) if !buffer.filled().is_empty() => {
                    self.last = Instant::now();
                    self.ahead.extend_from_slice(buffer.filled());
                }
                Poll::Ready(Err(e)) => return Poll::Ready(e),
                // Whoever reads next hears of an end.
                Poll::Ready(Ok(())) | Poll::Pending => break,
            }
        }
        self.check(context)
    }

    /// A result of the stream, or the error of a waiting writer.
    fn written<T>(
        &mut self,
        polled: Poll<io::Result<T>>,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<T>> {
        match polled {
            Poll::Pending => self.check_writer(context).map(Err),
            done => done,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Live<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let own = &mut *self;
        if own.n_given < own.ahead.len() {
            let rest = &own.ahead[own.n_given..];
            let n = rest.len().min(buffer.remaining());
            buffer.put_slice(&rest[..n]);
            own.n_given += n;
            if own.n_given == own.ahead.len() {
                (own.ahead, own.n_given) = (Vec::new(), 0);
            }
            return Poll::Ready(Ok(()));
        }
        match Pin::new(&mut own.stream).poll_read(context, buffer) {
            Poll::Pending => own.check(context).map(Err),
            done => {
                own.last = Instant::now();
                done
            }
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Live<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.written(polled, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.written(polled, context)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_flush(context);
        self.written(polled, context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

impl<S: Connected> Connected for Live<S> {
    type ConnectInfo = S::ConnectInfo;

    fn connect_info(&self) -> S::ConnectInfo {
        self.stream.connect_info()
    }
}

/// Makes connections over TCP.
#[derive(Clone)]
pub(crate) struct Connector {
    tcp: HttpConnector,
    limits: Limits,
}

impl Connector {
    pub(crate) fn new(limits: &Limits) -> Connector {
        let mut tcp = HttpConnector::new();
        // With keys, others do the rest.
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        // Of all addresses of a host, each gets its share of the time.
        tcp.set_connect_timeout(Some(limits.connect));
        Connector {
            tcp,
            limits: limits.clone(),
        }
    }
}

type Connecting<T> = Pin<Box<dyn Future<Output = Result<T, Refused>> + Send>>;

/// The reason why a connection was not made.
type Refused = <HttpConnector as tower_service::Service<Uri>>::Error;

impl tower_service::Service<Uri> for Connector {
    type Response = TokioIo<Live<TcpStream>>;
    type Error = Refused;
    type Future = Connecting<Self::Response>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Refused>> {
        self.tcp.poll_ready(context)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let (connecting, limits) = (self.tcp.call(uri), self.limits.clone());
        Box::pin(async move {
            let stream = connecting.await?.into_inner();
            Ok(TokioIo::new(Live::new(stream, &limits)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    fn limits() -> Limits {
        Limits {
            keep_alive: Duration::from_secs(1),
            keep_alive_timeout: Duration::from_secs(2),
            ..Limits::default()
        }
    }

    fn on_a_clock(test: impl Future<Output = ()>) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build();
        runtime.unwrap().block_on(test);
    }

    #[test]
    fn silence_ends_a_read_and_bytes_put_it_off() {
        on_a_clock(async {
            let (near, mut far) = duplex(64);
            let mut near = Live::new(near, &limits());
            let began = Instant::now();
            tokio::spawn(async move {
                for _ in 0..4 {
                    sleep(Duration::from_secs(2)).await;
                    far.write_all(b"x").await.unwrap();
                }
                std::future::pending::<()>().await;
                drop(far);
            });
            let mut bytes = Vec::new();
            let error = near.read_to_end(&mut bytes).await.unwrap_err();
            assert_eq!(bytes, b"xxxx");
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
            assert_eq!(error.to_string(), "no sign of life for 3s");
            assert_eq!(began.elapsed().as_secs(), 8 + 3);
        });
    }

    #[test]
    fn a_writer_that_waits_sees_signs_of_life_and_keeps_them() {
        on_a_clock(async {
            let (near, mut far) = duplex(64);
            let mut near = Live::new(near, &limits());
            let began = Instant::now();
            let other = tokio::spawn(async move {
                for i in 0..4u8 {
                    sleep(Duration::from_secs(2)).await;
                    far.write_all(&[i; 3]).await.unwrap();
                }
                far
            });
            // More than the other end reads.
            let error = near.write_all(&[7; 100]).await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
            assert_eq!(began.elapsed().as_secs(), 8 + 3);
            drop(other.await.unwrap());
            let mut bytes = Vec::new();
            near.read_to_end(&mut bytes).await.unwrap();
            assert_eq!(bytes, [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]);
        });
    }
}
