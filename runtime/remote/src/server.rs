//! The server of a task.

use crate::client::wait;
use crate::connections;
use crate::contents::Store;
use crate::engine::Engine;
use crate::environment::Machine;
use crate::keys::Peer;
use crate::liveness::ANSWER;
use crate::master::Master;
use crate::messages::{Chunk, Fault, Hello, Nothing, Piece, Reply, TaskAddress, WIRE, Welcome};
use crate::network::{Credentials, NEEDS_KEYS, Network};
use crate::pieces::{Carrying, Incoming};
use crate::rpc::{self, Answer, reply};
use crate::shutdown::{Busy, Phase};
use crate::worker::{Worker, given};
use crate::{ClusterSpec, Limits, TaskName};
use gristmill_runtime::{Error, ErrorKind};
use std::convert::Infallible;
use std::future::Future;
use std::net::{TcpListener, ToSocketAddrs};
use std::pin::Pin;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::body::Body;
use tonic::server::{Grpc, NamedService, StreamingService, UnaryService};
use tonic::transport::server::{Connected, TcpConnectInfo, TlsConnectInfo};
use tonic::{Request, Response, Streaming};
use tonic_health::pb::health_server::HealthServer;
use tonic_health::server::{HealthReporter, HealthService};
use tonic_prost::ProstCodec;

/// Time for connections to close after the end of the service.
const LINGER: Duration = Duration::from_secs(2);

/// Threads of the process for the network. Kernels have threads of their own.
const N_THREADS: usize = 2;

/// The threads of all servers and sessions of a process.
pub(crate) fn network() -> Result<&'static Runtime, Error> {
    static NETWORK: OnceLock<Result<Runtime, String>> = OnceLock::new();
    let made = NETWORK.get_or_init(|| {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let builder = builder.worker_threads(N_THREADS).enable_all();
        let named = builder.thread_name("gristmill network");
        named.build().map_err(|e| e.to_string())
    });
    made.as_ref().map_err(|e| {
        let message = format!("threads for the network could not be started: {e}");
        Error::new(ErrorKind::DeviceFailed, message)
    })
}

/// A task of a cluster.
pub(crate) struct Task {
    pub(crate) spec: ClusterSpec,
    pub(crate) name: TaskName,
    pub(crate) incarnation: u64,
    pub(crate) limits: Limits,
    pub(crate) network: Network,
    pub(crate) engine: Arc<dyn Engine>,
    /// Texts and constants of programs and parts.
    pub(crate) store: Store,
    pub(crate) worker: Worker,
    pub(crate) master: Master,
    pub(crate) phase: watch::Receiver<Phase>,
    /// Runs of clients, and parts of other masters.
    pub(crate) busy: Busy,
    pub(crate) held: Busy,
    /// Answers of the service `grpc.health.v1.Health`.
    pub(crate) health: HealthReporter,
    /// Number of the last registered program.
    pub(crate) last_id: AtomicU64,
}

impl Hello {
    pub(crate) fn new(version: String) -> Hello {
        Hello {
            wire: WIRE,
            version,
            ..Hello::default()
        }
    }
}

impl Task {
    /// A task with an incarnation of its own.
    pub(crate) fn new(
        spec: ClusterSpec,
        name: TaskName,
        engine: Arc<dyn Engine>,
        (limits, network): (Limits, Network),
        phase: watch::Receiver<Phase>,
    ) -> Task {
        Task {
            spec,
            name,
            incarnation: network.random().max(1),
            limits,
            network,
            engine,
            store: Store::default(),
            worker: Worker::default(),
            master: Master::default(),
            phase,
            busy: Busy::default(),
            held: Busy::default(),
            health: HealthReporter::new(),
            last_id: AtomicU64::new(0),
        }
    }

    pub(crate) fn addresses(&self) -> Vec<TaskAddress> {
        let tasks = self.spec.tasks();
        let one = |(name, address): (&TaskName, &str)| TaskAddress {
            job: name.job.clone(),
            task: name.task,
            address: address.to_owned(),
        };
        tasks.map(one).collect()
    }

    pub(crate) fn welcome(&self) -> Welcome {
        Welcome {
            version: self.engine.version(),
            task: Some(TaskAddress {
                job: self.name.job.clone(),
                task: self.name.task,
                address: self.spec.address(&self.name).unwrap_or_default().to_owned(),
            }),
            incarnation: self.incarnation,
            devices: self.engine.devices(),
            cluster: self.addresses(),
            session: 0,
        }
    }

    /// Errors with the difference when another task or client has another program or cluster, or wants another task.
    pub(crate) fn greeted(&self, hello: &Hello) -> Result<Welcome, Fault> {
        let (own, others) = (self.engine.version(), &hello.version);
        let who = hello.from.clone().unwrap_or("the client".to_owned());
        if hello.wire != WIRE || *others != own {
            let message = format!(
                "{who} is gristmill {others} (messages {}), {} is gristmill {own} (messages {WIRE})",
                hello.wire, self.name
            );
            return Err(Fault::invalid(message).with_hint("use one version on all machines"));
        }
        let name = self.name.to_string();
        if let Some(wanted) = hello.to.as_ref().filter(|wanted| **wanted != name) {
            let message = format!("{who} wants {wanted}, and {name} answers at its address");
            return Err(Fault::invalid(message));
        }
        if !hello.cluster.is_empty() {
            let tasks = hello.cluster.iter().map(|t| {
                let name = TaskName {
                    job: t.job.clone(),
                    task: t.task,
                };
                (name, t.address.clone())
            });
            let theirs = ClusterSpec::new(tasks).map_err(Fault::from)?;
            if theirs.digest() != self.spec.digest() {
                let lines = theirs.differences(&who, &self.spec, &name);
                let message = format!(
                    "{who} and {name} are of different clusters:\n  {}",
                    lines.join("\n  ")
                );
                return Err(Fault::invalid(message).with_hint("give all tasks the same cluster"));
            }
        }
        Ok(self.welcome())
    }

    /// Errors as [`Task::greeted`] does, and when the greeting is not of the task at the other end.
    fn greeted_by(&self, hello: &Hello, peer: &Peer) -> Result<Welcome, Fault> {
        self.sender(hello, peer)?;
        self.greeted(hello)
    }

    /// The task a greeting is from. Errors when it is not in the cluster, and when it is not the one at the other end.
    pub(crate) fn sender(&self, hello: &Hello, peer: &Peer) -> Result<TaskName, Fault> {
        let from = given(hello.from.clone())?;
        let mut tasks = self.spec.tasks().map(|(name, _)| name);
        let found = tasks.find(|name| name.to_string() == from).cloned();
        let found =
            found.ok_or_else(|| Fault::invalid(format!("{from} is not a task of the cluster")))?;
        peer.check_task(&found)?;
        Ok(found)
    }

    /// The greeting of another task.
    pub(crate) fn hello(&self, to: &TaskName) -> Hello {
        Hello {
            from: Some(self.name.to_string()),
            to: Some(to.to_string()),
            cluster: self.addresses(),
            incarnation: self.incarnation,
            ..Hello::new(self.engine.version())
        }
    }

    /// Lets go now and then of what nobody needs any more.
    async fn keep_tidy(self: Arc<Self>) {
        loop {
            let soon = self.limits.unclaimed.min(self.limits.lease) / 4;
            tokio::time::sleep(soon).await;
            self.store.tidy(&self.limits);
            self.end_expired().await;
        }
    }

    async fn answer(
        self: Arc<Self>,
        path: String,
        request: http::Request<Body>,
    ) -> http::Response<Body> {
        let peer = self.peer(&request);
        let permitted = peer.and_then(|peer| rpc::permit(&path, &peer).map(|()| peer));
        let peer = match permitted {
            Ok(peer) => peer,
            Err(fault) => {
                let fault = fault.of_task(&self.name);
                return rpc::status(tonic::Code::PermissionDenied, &fault).into_http();
            }
        };
        match self.refuse(&path, request).await {
            Ok(request) if rpc::OF_TASKS.contains(&&*path) => {
                self.answer_task(path, peer, request).await
            }
            Ok(request) => self.answer_client(path, request).await,
            Err(refusal) => refusal,
        }
    }

    /// The other end of a request's connection.
    fn peer(&self, request: &http::Request<Body>) -> Result<Peer, Fault> {
        let Credentials::Keys(_) = &self.network.credentials else {
            return Ok(Peer::Anyone);
        };
        let info = request.extensions().get::<TlsConnectInfo<TcpConnectInfo>>();
        let certificates = info.and_then(TlsConnectInfo::peer_certs);
        let own = certificates.and_then(|certificates| certificates.first().cloned());
        own.map(Peer::Holder)
            .ok_or_else(|| Fault::invalid("a connection without a certificate"))
    }

    /// Orders of clients, and what is for all.
    async fn answer_client(
        self: Arc<Self>,
        path: String,
        request: http::Request<Body>,
    ) -> http::Response<Body> {
        let (task, limits) = (self.clone(), self.limits.clone());
        match path.as_str() {
            rpc::STATUSES => {
                unary(&limits, request, |q| async move { task.statuses(q).await }).await
            }
            rpc::INITIALISE => {
                unary(
                    &limits,
                    request,
                    |q| async move { task.initialise(q).await },
                )
                .await
            }
            rpc::ATTEND => {
                let most = limits.text_bytes;
                both_ways(most, request, |words| task.attend(words)).await
            }
            rpc::CLOSE => unary(&limits, request, |q| async move { task.close(q).await }).await,
            rpc::OFFER => unary(&limits, request, |q| async move { task.offered(q) }).await,
            rpc::PREPARE => unary(&limits, request, |q| async move { task.prepare(q).await }).await,
            rpc::CALL => {
                both_ways(limits.message_bytes, request, |parts| {
                    task.answer_call(parts)
                })
                .await
            }
            rpc::FORGET => unary(&limits, request, |q| async move { task.forget(q).await }).await,
            rpc::PUT => {
                let own = task.clone();
                let work = |chunks| async move { own.put(chunks).await };
                task.carried::<Chunk, _>(request, work).await
            }
            _ => unknown(&path),
        }
    }

    /// Orders of other tasks.
    async fn answer_task(
        self: Arc<Self>,
        path: String,
        peer: Peer,
        request: http::Request<Body>,
    ) -> http::Response<Body> {
        let (limits, limit) = (self.limits.clone(), self.limits.message_bytes);
        let task = self;
        match path.as_str() {
            rpc::HELLO => {
                let work = |q: Hello| async move { task.greeted_by(&q, &peer) };
                unary(&limits, request, work).await
            }
            rpc::STEPS => both_ways(limit, request, |orders| task.steps(orders, peer)).await,
            rpc::STATUS => unary(&limits, request, |q| async move { task.status(q).await }).await,
            _ => {
                let own = task.clone();
                let work = |pieces| async move { own.tensors(pieces, &peer).await };
                task.carried::<Piece, _>(request, work).await
            }
        }
    }
}

/// The answer to a call of no method.
fn unknown(path: &str) -> http::Response<Body> {
    tonic::Status::unimplemented(format!("there is no method {path:?}")).into_http()
}

/// A method of one message.
struct Unary<F>(Option<F>);

impl<Q, A, F, W> UnaryService<Q> for Unary<(F, std::marker::PhantomData<fn() -> A>)>
where
    A: prost::Message + 'static,
    F: FnOnce(Q) -> W,
    W: Future<Output = Result<A, Fault>> + Send + 'static,
{
    type Response = Reply;
    type Future = Answer<Reply>;

    fn call(&mut self, request: Request<Q>) -> Answer<Reply> {
        answered(self.0.take().map(|(work, _)| work(request.into_inner())))
    }
}

pub(crate) async fn unary<Q, A, W>(
    limits: &Limits,
    request: http::Request<Body>,
    work: impl FnOnce(Q) -> W + Send,
) -> http::Response<Body>
where
    Q: prost::Message + Default + 'static,
    A: prost::Message + 'static,
    W: Future<Output = Result<A, Fault>> + Send + 'static,
{
    let mut grpc = Grpc::new(ProstCodec::<Reply, Q>::default())
        .max_decoding_message_size(limits.message_bytes)
        .max_encoding_message_size(limits.text_bytes);
    let service = Unary(Some((work, std::marker::PhantomData::<fn() -> A>)));
    grpc.unary(service, request).await
}

/// The reply to a method that is called once. It goes on when nobody waits for it any more, so that nothing is half done.
fn answered<A: prost::Message + 'static>(
    work: Option<impl Future<Output = Result<A, Fault>> + Send + 'static>,
) -> Answer<Reply> {
    Box::pin(async move {
        match work {
            Some(work) => Ok(Response::new(reply_of(tokio::spawn(work)).await)),
            None => Err(tonic::Status::internal("a method was called twice")),
        }
    })
}

async fn reply_of<A: prost::Message>(doing: JoinHandle<Result<A, Fault>>) -> Reply {
    let panicked = |e| {
        let message = format!("a task of the server panicked: {e}");
        Err(Fault::new(ErrorKind::Internal, message))
    };
    reply(doing.await.unwrap_or_else(panicked))
}

/// A method of many messages with many answers.
impl<Q, A, F> StreamingService<Q> for Unary<(F, std::marker::PhantomData<fn() -> A>)>
where
    A: Send + 'static,
    F: FnOnce(Streaming<Q>) -> ReceiverStream<Result<A, tonic::Status>>,
{
    type Response = A;
    type ResponseStream = ReceiverStream<Result<A, tonic::Status>>;
    type Future = Answer<Self::ResponseStream>;

    fn call(&mut self, request: Request<Streaming<Q>>) -> Self::Future {
        let answers = self.0.take().map(|(work, _)| work(request.into_inner()));
        let again = || tonic::Status::internal("a method was called twice");
        Box::pin(async move { answers.map(Response::new).ok_or_else(again) })
    }
}

async fn both_ways<Q, A>(
    limit: usize,
    request: http::Request<Body>,
    work: impl FnOnce(Streaming<Q>) -> ReceiverStream<Result<A, tonic::Status>> + Send,
) -> http::Response<Body>
where
    Q: prost::Message + Default + 'static,
    A: prost::Message + 'static,
{
    let mut grpc = Grpc::new(ProstCodec::<A, Q>::default())
        .max_decoding_message_size(limit)
        .max_encoding_message_size(limit);
    let service = Unary(Some((work, std::marker::PhantomData::<fn() -> A>)));
    grpc.streaming(service, request).await
}

impl Task {
    /// A method of many messages with bytes of tensors, which gRPC's code does not read, and one reply, after
    /// signs of life.
    async fn carried<Q, W>(
        self: Arc<Self>,
        request: http::Request<Body>,
        work: impl FnOnce(Incoming<Q>) -> W + Send,
    ) -> http::Response<Body>
    where
        Q: Carrying,
        W: Future<Output = Result<Nothing, Fault>> + Send + 'static,
    {
        let (head, body) = request.into_parts();
        let doing = tokio::spawn(work(Incoming::new(body, &self.limits)));
        let (answers, out) = mpsc::channel(2);
        let most = self.limits.text_bytes;
        tokio::spawn(async move {
            let sign = || Ok(Reply::beat());
            let last = tokio::select! {
                last = reply_of(doing) => last,
                () = self.stopped() => reply::<Nothing>(Err(self.is_stopping())),
                never = rpc::beat(&answers, self.limits.keep_alive, sign) => match never {},
            };
            // Whoever waited may have gone.
            let _ = answers.send(Ok(last)).await;
        });
        let empty = http::Request::from_parts(head, Body::empty());
        let replies = |_: Streaming<Nothing>| ReceiverStream::new(out);
        both_ways(most, empty, replies).await
    }
}

#[derive(Clone)]
struct Service(Arc<Task>);

impl NamedService for Service {
    const NAME: &'static str = rpc::SERVICE;
}

impl tower_service::Service<http::Request<Body>> for Service {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<http::Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let (task, path) = (self.0.clone(), request.uri().path().to_owned());
        Box::pin(async move {
            tokio::select! {
                answer = task.clone().answer(path, request) => Ok(answer),
                // Calls under way end with the server.
                () = task.stopped() => Ok(rpc::status(tonic::Code::Unavailable, &task.is_stopping()).into_http()),
            }
        })
    }
}

/// Settings of a server.
#[derive(Clone, Debug, Default)]
pub struct ServerOptions {
    /// Who may connect, and as whom the task connects to others.
    pub credentials: Credentials,
    /// The address to listen at, `HOST:PORT`, where it differs from the one in the cluster, at which others find the task: `0.0.0.0:2222` behind a
    /// translation of addresses.
    pub listen: Option<String>,
    /// Bounds of messages and waits.
    pub limits: Limits,
}

impl From<Limits> for ServerOptions {
    fn from(limits: Limits) -> ServerOptions {
        ServerOptions {
            limits,
            ..ServerOptions::default()
        }
    }
}

/// A task in service. Dropping it ends the service.
pub struct Server {
    name: TaskName,
    address: String,
    pub(crate) task: Arc<Task>,
    phase: watch::Sender<Phase>,
    ended: std::sync::mpsc::Receiver<Result<(), Error>>,
}

impl Server {
    /// Serves as a task of a cluster, at its address. Several servers of one process are possible.
    ///
    /// Errors with `InvalidInput` when the task is not in the cluster, its address is not one of this machine's or is taken; `Unsupported` when
    /// it is not a loopback address, and there are no keys: other machines could then give orders to this one.
    pub fn start(
        spec: ClusterSpec,
        name: TaskName,
        engine: Arc<dyn Engine>,
        options: ServerOptions,
    ) -> Result<Server, Fault> {
        let ServerOptions {
            credentials,
            listen,
            limits,
        } = options;
        let address = spec.address(&name)?.to_owned();
        let listener = listener(listen.as_ref().unwrap_or(&address), &credentials);
        let listener = listener.map_err(|fault| fault.context(&name))?;
        let network = network()?;
        let (phase, seen) = watch::channel(Phase::Serving);
        let environment = Arc::new(Machine);
        let around = (
            limits,
            Network {
                environment,
                credentials,
            },
        );
        let task = Task::new(spec, name.clone(), engine, around, seen);
        let task = Arc::new(task);
        let served = task.clone();
        let (end, ended) = std::sync::mpsc::channel();
        let label = name.to_string();
        network.spawn(async move {
            let served = serve_at(served, listener).await;
            let served = served.map_err(|e| {
                Error::new(
                    ErrorKind::DeviceFailed,
                    format!("{label}: the server failed: {e}"),
                )
            });
            // Whoever waits may have gone.
            let _ = end.send(served);
        });
        Ok(Server {
            name,
            address,
            task,
            phase,
            ended,
        })
    }

    /// The task.
    pub fn name(&self) -> &TaskName {
        &self.name
    }

    /// Where it serves, `HOST:PORT`.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// A number of its own for each start of a task.
    pub fn incarnation(&self) -> u64 {
        self.task.incarnation
    }

    /// Waits for the end of the service, which only a failure brings.
    pub fn join(self) -> Result<(), Error> {
        self.ended.recv().unwrap_or(Ok(()))
    }

    /// Waits as [`Server::join`] does, at most for a time. None if the server still serves.
    pub fn wait(&self, at_most: Duration) -> Option<Result<(), Error>> {
        match self.ended.recv_timeout(at_most) {
            Ok(ended) => Some(ended),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => Some(Ok(())),
        }
    }

    /// Ends the service in good order: at once it says in answers to health checks (`grpc.health.v1`) that it does not serve, and takes no new
    /// sessions, programs and runs; runs under way have `grace` to end. Number of runs that were cut off.
    pub fn shut_down(self, grace: Duration) -> usize {
        let (task, phase) = (self.task.clone(), self.phase.clone());
        let drained = wait(async move { Ok(task.drain(grace, &phase).await) });
        drained.unwrap_or_default()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself.
        self.phase.send_replace(Phase::Stopped);
        let _ = self.ended.recv_timeout(Duration::from_secs(5));
    }
}

async fn serve_at(task: Arc<Task>, listener: TcpListener) -> Result<(), String> {
    let listener = tokio::net::TcpListener::from_std(listener).map_err(|e| e.to_string())?;
    let (connections, accepting) = connections::accept(listener, task.limits.clone());
    tokio::select! {
        served = serve(task, connections) => served,
        never = accepting => match never {},
    }
}

/// Serves those who connect, until the server ends.
pub(crate) async fn serve<C>(
    task: Arc<Task>,
    incoming: impl Stream<Item = std::io::Result<C>>,
) -> Result<(), String>
where
    C: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
{
    let limits = task.limits.clone();
    let (ending, health) = (task.clone(), task.health.clone());
    let stopped = async move { ending.stopped().await };
    health.set_serving::<Service>().await;
    let tidied = task.clone();
    let tidy = async move { tidied.keep_tidy().await };
    let ending = task.clone();
    let overdue = async move {
        ending.stopped().await;
        tokio::time::sleep(LINGER).await;
    };
    let mut builder = tonic::transport::Server::builder();
    if let Credentials::Keys(keys) = &task.network.credentials {
        let tls = keys.of_server().timeout(limits.connect);
        builder = builder.tls_config(tls).map_err(|e| e.to_string())?;
    }
    let served = builder
        .http2_keepalive_interval(Some(limits.keep_alive))
        .http2_keepalive_timeout(Some(ANSWER))
        .max_frame_size(frame_bytes(&limits))
        .add_service(HealthServer::new(HealthService::from_health_reporter(
            health,
        )))
        .add_service(Service(task))
        .serve_with_incoming_shutdown(incoming, stopped);
    tokio::select! {
        served = served => served.map_err(|e| e.to_string()),
        () = tidy => Ok(()),
        // Whoever still holds a connection open loses it.
        () = overdue => Ok(()),
    }
}

/// Largest frame to a server. A piece in one frame needs fewer calls of the system than one in many.
fn frame_bytes(limits: &Limits) -> u32 {
    // Between the bounds of RFC 9113, section 6.5.2.
    limits.piece_bytes.clamp(1 << 14, (1 << 24) - 1) as u32
}

fn listener(address: &str, credentials: &Credentials) -> Result<TcpListener, Fault> {
    let fail = |why: String| Fault::invalid(format!("address {address:?}: {why}"));
    let found = address.to_socket_addrs().map_err(|e| fail(e.to_string()))?;
    let found: Vec<_> = found.collect();
    if let Credentials::Local = credentials
        && let Some(open) = found.iter().find(|a| !a.ip().is_loopback())
    {
        let message = format!(
            "address {address:?} is {}, which other machines reach",
            open.ip()
        );
        return Err(Fault::new(ErrorKind::Unsupported, message).with_hint(NEEDS_KEYS));
    }
    let listener = TcpListener::bind(found.as_slice()).map_err(|e| match e.kind() {
        std::io::ErrorKind::AddrInUse => {
            fail("the port is taken; another server, perhaps of the same task, runs there".into())
        }
        _ => fail(e.to_string()),
    })?;
    listener
        .set_nonblocking(true)
        .map_err(|e| fail(e.to_string()))?;
    Ok(listener)
}
