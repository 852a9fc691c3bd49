//! Connections to a server, of which there is a bounded number.

use crate::Limits;
use crate::liveness::Live;
use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::{Connected, TcpConnectInfo};

/// Time between two tries to accept a connection after one has failed, as it does when the process has no descriptor left.
const PAUSE: Duration = Duration::from_millis(50);

/// A connection with its place among those of the server.
pub(crate) struct Connection {
    stream: Live<TcpStream>,
    _place: OwnedSemaphorePermit,
}

/// Connections in the order in which they come, and the work of accepting them, which has no end. When all places are taken, others wait for
/// one. The listener ends with the stream.
pub(crate) fn accept(
    listener: TcpListener,
    limits: Limits,
) -> (
    ReceiverStream<io::Result<Connection>>,
    impl Future<Output = Infallible>,
) {
    let places = Arc::new(Semaphore::new(limits.connections));
    let (accepted, connections) = mpsc::channel(1);
    let accepting = async move {
        tokio::select! {
            () = accept_all(&listener, &places, &accepted, &limits) => {}
            () = accepted.closed() => {}
        }
        drop(listener);
        std::future::pending().await
    };
    (ReceiverStream::new(connections), accepting)
}

async fn accept_all(
    listener: &TcpListener,
    places: &Arc<Semaphore>,
    accepted: &mpsc::Sender<io::Result<Connection>>,
    limits: &Limits,
) {
    // Nobody closes the semaphore.
    while let Ok(place) = places.clone().acquire_owned().await {
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        // Without it, small messages are late at worst.
        let _ = stream.set_nodelay(true);
        let connection = Connection {
            stream: Live::new(stream, limits),
            _place: place,
        };
        if accepted.send(Ok(connection)).await.is_err() {
            return;
        }
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

impl Connected for Connection {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.stream.connect_info()
    }
}
