//! The time of a message there and back over a standing gRPC stream between two processes: what a step over two tasks cannot beat.
//!
//! `round_trip [N]`: the median of N messages (2,000), after a tenth of them.

use bytes::Bytes;
use http::uri::PathAndQuery;
use std::convert::Infallible;
use std::io::{BufRead, BufReader};
use std::pin::Pin;
use std::process::{Command, Stdio};
use std::task::{Context, Poll};
use std::time::Instant;
use tokio::sync::mpsc;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::{TcpListenerStream, UnboundedReceiverStream};
use tonic::body::Body;
use tonic::server::{Grpc, NamedService, StreamingService};
use tonic::transport::{Endpoint, Server};
use tonic::{Request, Response, Status, Streaming};
use tonic_prost::ProstCodec;

type Failure = Box<dyn std::error::Error>;
type Codec = ProstCodec<Bytes, Bytes>;
type Answer<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Gives every message back.
#[derive(Clone)]
struct Echo;

impl NamedService for Echo {
    const NAME: &'static str = "echo.Echo";
}

impl StreamingService<Bytes> for Echo {
    type Response = Bytes;
    type ResponseStream = UnboundedReceiverStream<Result<Bytes, Status>>;
    type Future = Answer<Result<Response<Self::ResponseStream>, Status>>;

    fn call(&mut self, request: Request<Streaming<Bytes>>) -> Self::Future {
        let (sender, answers) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            let mut messages = request.into_inner();
            while let Some(message) = messages.next().await {
                // Nobody listens any more.
                let _ = sender.send(message);
            }
        });
        Box::pin(async move { Ok(Response::new(UnboundedReceiverStream::new(answers))) })
    }
}

impl tower_service::Service<http::Request<Body>> for Echo {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Answer<Result<http::Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        Box::pin(async { Ok(Grpc::new(Codec::default()).streaming(Echo, request).await) })
    }
}

async fn serve() -> Result<(), Failure> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    println!("{}", listener.local_addr()?);
    let connections = TcpListenerStream::new(listener).map(|connection| {
        let connection = connection?;
        connection.set_nodelay(true)?;
        Ok::<_, std::io::Error>(connection)
    });
    let server = Server::builder().add_service(Echo);
    Ok(server.serve_with_incoming(connections).await?)
}

async fn measure(address: &str, n: usize) -> Result<f64, Failure> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))?.tcp_nodelay(true);
    let mut client = tonic::client::Grpc::new(endpoint.connect().await?);
    client.ready().await?;
    let (sender, messages) = mpsc::unbounded_channel();
    let request = Request::new(UnboundedReceiverStream::new(messages));
    let path = PathAndQuery::from_static("/echo.Echo/Echo");
    let mut answers = client.streaming(request, path, Codec::default()).await?;
    let mut times = Vec::new();
    for i in 0..n + n / 10 {
        let started = Instant::now();
        sender.send(Bytes::from_static(&[1; 4]))?;
        answers.get_mut().message().await?;
        if i >= n / 10 {
            times.push(started.elapsed().as_secs_f64());
        }
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

fn main() -> Result<(), Failure> {
    let word = std::env::args().nth(1);
    // As many threads as tasks have for the network.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    if word.as_deref() == Some("serve") {
        return runtime.block_on(serve());
    }
    let n = word.map_or(Ok(2000), |n| n.parse())?;
    let mut process = Command::new(std::env::current_exe()?)
        .arg("serve")
        .stdout(Stdio::piped())
        .spawn()?;
    let mut address = String::new();
    BufReader::new(process.stdout.take().ok_or("no output")?).read_line(&mut address)?;
    let measured = runtime.block_on(measure(address.trim(), n.max(10)));
    process.kill()?;
    process.wait()?;
    println!("{:.1} us there and back", measured? * 1e6);
    Ok(())
}
