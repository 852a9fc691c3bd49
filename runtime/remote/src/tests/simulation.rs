//! Clusters on a simulated network with a simulated clock: real services and connections, crashes, partitions, delays.

use super::chain::{Chain, SIZE, below};
use super::task;
use crate::calls;
use crate::contents::{self, Document};
use crate::environment::Environment;
use crate::lease::Lease;
use crate::limits::Limits;
use crate::liveness::Live;
use crate::messages::{Call, Fault, Hello, Nothing, Prepare, Prepared};
use crate::network::{Credentials, Network};
use crate::rpc;
use crate::server::{Task, serve};
use crate::shutdown::Phase;
use crate::{ClusterSpec, TaskName};
use gristmill_runtime::{ErrorKind, Tensor};
use http::Uri;
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::Connected;
use tonic::transport::{Channel, Endpoint};
use turmoil::net::{TcpListener, TcpStream};

const PORT: u16 = 9000;

/// Hosts and their tasks.
const HOSTS: [(&str, &str); 3] = [
    ("ps0", "/job:ps/task:0"),
    ("worker0", "/job:worker/task:0"),
    ("worker1", "/job:worker/task:1"),
];

/// Hosts of clients, with the hosts of their sessions' tasks.
const CLIENTS: [(&str, usize); 2] = [("client0", 1), ("client1", 2)];

/// Programs of each client: one over all tasks that counts on the first, one that counts on the second of two, one within a task, and
/// two that only pass on.
const PROGRAMS: [&str; 5] = [
    "/job:ps/task:0+ /job:worker/task:0 /job:worker/task:1",
    "/job:worker/task:1 /job:worker/task:0+",
    "/job:ps/task:0+",
    "/job:worker/task:1 /job:ps/task:0 /job:worker/task:0",
    "/job:worker/task:0 /job:worker/task:1",
];

/// Time with faults, and time for all to be well again.
const FAULTS: Duration = Duration::from_secs(60);
const RECOVERY: Duration = Duration::from_secs(120);

/// Longest time to an error, from the begin of the call or of the last trouble on: twice the time for a loss to be noticed, and one for a
/// connection that is not made. A run may wait for the turn of another one, which fails first.
const IN_TIME: Duration = Duration::from_secs(8);

fn limits() -> Limits {
    Limits {
        inline_bytes: 64,
        piece_bytes: 256,
        idle_callables: 0,
        lease: Duration::from_secs(8),
        connect: Duration::from_secs(2),
        hello: Duration::from_secs(3),
        longest_wait: Duration::from_secs(2),
        ..Limits::default()
    }
}

/// More than the counts of a start of a task.
const COUNTS: u64 = 1_000_000;

/// A stream of the simulated network, which tonic asks for its peer.
struct Wire(Live<TcpStream>);

impl Connected for Wire {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl AsyncRead for Wire {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, buffer)
    }
}

impl AsyncWrite for Wire {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[std::io::IoSlice<'_>],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.0).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, c: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(c)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, c: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(c)
    }
}

/// Connections of the simulated network.
#[derive(Clone)]
struct Connector;

impl tower_service::Service<Uri> for Connector {
    type Response = hyper_util::rt::TokioIo<Live<TcpStream>>;
    type Error = std::io::Error;
    type Future =
        Pin<Box<dyn Future<Output = Result<Self::Response, std::io::Error>> + Send + 'static>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), std::io::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        Box::pin(async move {
            let host = uri.host().unwrap_or_default().to_owned();
            let stream = TcpStream::connect((host.as_str(), PORT)).await?;
            Ok(hyper_util::rt::TokioIo::new(Live::new(stream, &limits())))
        })
    }
}

struct Simulated(Arc<AtomicU64>);

impl Environment for Simulated {
    fn channel(&self, endpoint: Endpoint, _: &Limits) -> Channel {
        endpoint.connect_with_connector_lazy(Connector)
    }

    fn random(&self) -> u64 {
        below(&self.0, u64::MAX)
    }
}

/// Things that outlive a crash of their host.
#[derive(Clone)]
struct World {
    random: Arc<AtomicU64>,
    n_parts: [Arc<AtomicUsize>; 3],
    n_starts: [Arc<AtomicU64>; 3],
    /// Counts in answers, by the program that counts there.
    counts: Arc<Mutex<BTreeSet<(TaskName, u64)>>>,
    /// Set when there are no more faults.
    is_well: Arc<AtomicBool>,
    /// Begin of the last trouble.
    troubled: Arc<Mutex<Duration>>,
    longest: Arc<Mutex<Duration>>,
}

fn spec() -> ClusterSpec {
    let tasks = HOSTS.map(|(host, name)| (task(name), format!("{host}:{PORT}")));
    ClusterSpec::new(tasks).unwrap()
}

fn simulated(world: &World) -> Network {
    Network {
        environment: Arc::new(Simulated(world.random.clone())),
        // The hosts of a simulation have addresses of their own.
        credentials: Credentials::Insecure,
    }
}

/// A task from its start to its crash.
async fn host(world: World, i: usize) -> turmoil::Result {
    let n_starts = world.n_starts[i].fetch_add(1, Ordering::SeqCst);
    world.n_parts[i].store(0, Ordering::SeqCst);
    let engine = Arc::new(Chain {
        // All counts of a task are different ones.
        count: Arc::new(tokio::sync::Mutex::new(n_starts * COUNTS)),
        n_parts: world.n_parts[i].clone(),
        random: world.random.clone(),
    });
    let network = simulated(&world);
    let (_phase, seen) = watch::channel(Phase::Serving);
    let own = Task::new(spec(), task(HOSTS[i].1), engine, (limits(), network), seen);
    let listener = TcpListener::bind(("0.0.0.0", PORT)).await?;
    let (accepted, incoming) = mpsc::channel(16);
    tokio::spawn(async move {
        loop {
            let accepted_one = listener.accept().await;
            let stream = accepted_one.map(|(stream, _)| Wire(Live::new(stream, &limits())));
            if accepted.send(stream).await.is_err() {
                return;
            }
        }
    });
    let served = serve(Arc::new(own), ReceiverStream::new(incoming));
    Ok(served.await?)
}

/// A session of a client.
struct Session {
    channel: Channel,
    lease: Lease,
    programs: Vec<Document>,
    /// Starts of tasks, by the counts that came from there.
    starts: BTreeMap<TaskName, u64>,
}

impl Session {
    async fn open(world: &World, address: &str) -> Result<Session, Fault> {
        let limits = limits();
        let channel = simulated(world).channel(address, None, &limits)?;
        let hello = Hello::new("1.0".into());
        let (lease, _) = Lease::begin(&channel, hello, address, &limits).await?;
        Ok(Session {
            channel,
            lease,
            programs: Vec::new(),
            starts: BTreeMap::new(),
        })
    }

    async fn prepare(&mut self, program: &str) -> Result<(), Fault> {
        let limits = limits();
        let document = Document::from(program.to_owned());
        let brought = contents::bring(&self.channel, &document, &limits).await;
        brought.map_err(|failure| failure.fault("the task", ""))?;
        let request = Prepare {
            program: Some(document.contents()),
            session: self.lease.session,
        };
        let prepared = rpc::call(
            &self.channel,
            rpc::PREPARE,
            request,
            limits.prepare,
            &limits,
        );
        let Prepared { .. } = prepared.await.map_err(|f| f.fault("the task", ""))?;
        self.programs.push(document);
        Ok(())
    }

    async fn call(&self, program: usize, x: Tensor) -> Result<Vec<u8>, Fault> {
        self.lease.check()?;
        let program = (self.lease.session, self.programs[program].digest());
        let called = calls::call(&self.channel, program, vec![x], (&limits(), &|_| ())).await;
        let y = called.map_err(|failure| failure.fault("the task", ""))?;
        Ok(y[0].as_bytes().to_vec())
    }

    async fn initialise(&self, program: usize) -> Result<(), Fault> {
        let limits = limits();
        let request = Call {
            program: self.programs[program].digest().to_bytes(),
            session: self.lease.session,
            ..Call::default()
        };
        let done = rpc::call(
            &self.channel,
            rpc::INITIALISE,
            request,
            limits.hello,
            &limits,
        );
        let Nothing {} = done.await.map_err(|f| f.fault("the task", ""))?;
        Ok(())
    }
}

/// A tensor of a call.
fn input(number: u64) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..SIZE as u64).map(|i| (i * 7 + number) as u8).collect();
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    bytes[8..16].fill(0);
    bytes
}

/// One call, with whatever must be there before. `session` is none after an error that ends it.
async fn attempt(
    world: &World,
    address: &str,
    session: &mut Option<Session>,
    number: u64,
) -> Result<(), Fault> {
    if session.is_none() {
        *session = Some(Session::open(world, address).await?);
    }
    let open = session.as_mut().unwrap();
    if open.programs.len() < PROGRAMS.len() {
        open.prepare(PROGRAMS[open.programs.len()]).await?;
        return Ok(());
    }
    let program = below(&world.random, PROGRAMS.len() as u64) as usize;
    let counting = PROGRAMS[program].split(' ').find(|s| s.ends_with('+'));
    let counting = counting.map(|stage| task(stage.trim_end_matches('+')));
    let sent = input(number);
    let mut came = open
        .call(program, Tensor::from_slice(&sent, &[SIZE])?)
        .await;
    if matches!(&came, Err(e) if e.message.ends_with("that this session has used are lost")) {
        open.initialise(program).await?;
        open.starts.remove(&counting.unwrap());
        return Ok(());
    }
    if let Ok(bytes) = &mut came {
        let count = u64::from_le_bytes(bytes[8..16].try_into().unwrap());
        match counting {
            None => assert_eq!(count, 0),
            Some(counting) => {
                let start = count / COUNTS;
                let known = *open.starts.entry(counting.clone()).or_insert(start);
                assert_eq!(known, start, "{counting} lost its count without an error");
                let counted = (counting, count);
                assert!(
                    world.counts.lock().unwrap().insert(counted.clone()),
                    "{counted:?} twice"
                );
            }
        }
        bytes[8..16].fill(0);
        assert_eq!(*bytes, sent, "call {number} of {}", PROGRAMS[program]);
    }
    came.map(|_| ())
}

/// Time of the simulation.
fn now() -> Duration {
    turmoil::sim_elapsed().unwrap()
}

/// A client, whose calls give the right result or an error in time; after the faults they succeed.
async fn client(world: World, i: usize) -> turmoil::Result {
    let address = format!("{}:{PORT}", HOSTS[CLIENTS[i].1].0);
    let mut session = None;
    let (mut number, mut n_well) = (i as u64, 0);
    let mut well_since = None;
    while n_well < 40 {
        let began = now();
        let ran = attempt(&world, &address, &mut session, number).await;
        if ran.is_err() {
            let took = now() - began.max(*world.troubled.lock().unwrap());
            let mut longest = world.longest.lock().unwrap();
            *longest = took.max(*longest);
            if took > IN_TIME {
                return Err(format!("call {number} took {took:?}: {ran:?}").into());
            }
        }
        number += CLIENTS.len() as u64;
        if world.is_well.load(Ordering::SeqCst) {
            let since = *well_since.get_or_insert_with(Instant::now);
            if since.elapsed() > RECOVERY {
                return Err(format!("calls go on to fail: {ran:?}").into());
            }
            n_well = if ran.is_ok() { n_well + 1 } else { 0 };
        }
        if let Err(fault) = ran {
            if fault.category() != ErrorKind::DeviceFailed {
                return Err(format!("another error than a loss: {fault:?}").into());
            }
            if fault.hint.as_deref() == Some("open another session") {
                session = None;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        tokio::time::sleep(Duration::from_millis(below(&world.random, 50))).await;
    }
    if let Some(Session { channel, lease, .. }) = session {
        Lease::close(lease.session, channel, limits()).await;
    }
    Ok(())
}

/// A fault, and its end.
enum Trouble {
    Down(usize),
    Cut(String, String),
    Held(String, String),
    /// Messages of a host stay on their way, and then the host goes down.
    HeldAndDown(usize, String),
}

impl Trouble {
    fn begin(sim: &mut turmoil::Sim<'_>, random: &AtomicU64) -> Trouble {
        let mut names: Vec<&str> = HOSTS.iter().map(|(host, _)| *host).collect();
        names.extend(CLIENTS.iter().map(|(host, _)| *host));
        let a = below(random, 3) as usize;
        let other = || {
            let b = below(random, names.len() as u64 - 1) as usize;
            names[if b >= a { b + 1 } else { b }].to_owned()
        };
        match below(random, 5) {
            0 => {
                sim.crash(HOSTS[a].0);
                Trouble::Down(a)
            }
            1 => {
                let b = other();
                sim.partition(HOSTS[a].0, b.as_str());
                Trouble::Cut(HOSTS[a].0.into(), b)
            }
            2 => {
                let b = other();
                sim.partition_oneway(HOSTS[a].0, b.as_str());
                Trouble::Cut(HOSTS[a].0.into(), b)
            }
            kind => {
                let b = other();
                sim.hold(HOSTS[a].0, b.as_str());
                match kind {
                    3 => Trouble::Held(HOSTS[a].0.into(), b),
                    _ => Trouble::HeldAndDown(a, b),
                }
            }
        }
    }

    /// Ends the trouble, or goes on with the next one.
    fn end(self, sim: &mut turmoil::Sim<'_>) -> Option<Trouble> {
        match self {
            Trouble::Down(i) => sim.bounce(HOSTS[i].0),
            Trouble::Cut(a, b) => sim.repair(a, b),
            Trouble::Held(a, b) => sim.release(a, b),
            Trouble::HeldAndDown(a, b) => {
                sim.crash(HOSTS[a].0);
                sim.release(HOSTS[a].0, b);
                return Some(Trouble::Down(a));
            }
        }
        None
    }
}

/// A simulation from its seed. The longest time to an error, and the number of calls that counted.
fn simulate(seed: u64) -> (Duration, usize) {
    let world = World {
        random: Arc::new(AtomicU64::new(seed)),
        n_parts: Default::default(),
        n_starts: Default::default(),
        counts: Arc::default(),
        is_well: Arc::default(),
        troubled: Arc::default(),
        longest: Arc::default(),
    };
    let mut sim = turmoil::Builder::new()
        .rng_seed(seed)
        .tick_duration(Duration::from_millis(5))
        .simulation_duration(FAULTS + RECOVERY + RECOVERY)
        .min_message_latency(Duration::from_millis(2))
        .max_message_latency(Duration::from_millis(15))
        .tcp_capacity(4096)
        .build();
    for (i, (name, _)) in HOSTS.iter().enumerate() {
        let world = world.clone();
        sim.host(*name, move || host(world.clone(), i));
    }
    for (i, (name, _)) in CLIENTS.iter().enumerate() {
        sim.client(*name, client(world.clone(), i));
    }
    let random = AtomicU64::new(!seed);
    let mut next = Duration::from_secs(2);
    let mut trouble: Option<Trouble> = None;
    let step = |sim: &mut turmoil::Sim<'_>| {
        let stepped = sim.step();
        stepped.unwrap_or_else(|e| panic!("seed {seed}, at {:?}: {e}", sim.elapsed()))
    };
    while sim.elapsed() < FAULTS {
        step(&mut sim);
        if sim.elapsed() < next {
            continue;
        }
        trouble = match trouble.take() {
            Some(trouble) => trouble.end(&mut sim),
            None => {
                *world.troubled.lock().unwrap() = sim.elapsed();
                Some(Trouble::begin(&mut sim, &random))
            }
        };
        next = sim.elapsed() + Duration::from_millis(200 + below(&random, 6000));
    }
    while let Some(on) = trouble {
        trouble = on.end(&mut sim);
    }
    world.is_well.store(true, Ordering::SeqCst);
    while !step(&mut sim) {}
    // Sessions are closed; what masters lost sight of goes with their leases.
    let end = sim.elapsed() + 2 * limits().lease;
    while sim.elapsed() < end {
        step(&mut sim);
    }
    let left = world.n_parts.each_ref().map(|n| n.load(Ordering::SeqCst));
    assert_eq!(left, [0; 3], "seed {seed}: parts that nobody needs");
    let longest = *world.longest.lock().unwrap();
    let n_counted = world.counts.lock().unwrap().len();
    (longest, n_counted)
}

/// The variable with the number of seeds; default: 50.
const SEEDS: &str = "GRISTMILL_TEST_SEEDS";

/// Simulations from every second seed.
fn simulate_all(first: u64) {
    let n_seeds = std::env::var(SEEDS).map_or(50, |n| n.parse().unwrap());
    let (mut longest, mut n_all) = (Duration::ZERO, 0);
    for seed in (first..n_seeds).step_by(2) {
        let (time, n_counted) = simulate(seed);
        assert!(n_counted > 20, "seed {seed}: {n_counted}");
        longest = longest.max(time);
        n_all += n_counted;
    }
    println!("{n_seeds} seeds: {n_all} counts, longest error {longest:?}");
}

#[test]
fn calls_are_right_or_fail_in_time_whatever_is_lost() {
    simulate_all(0);
}

#[test]
fn calls_are_right_or_fail_in_time_whatever_is_lost_elsewhere() {
    simulate_all(1);
}
