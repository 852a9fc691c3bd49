//! Tasks behind proxies of bytes over real TCP, whose lines are slow, silent or cut.

use super::keys::{client_keys, folder, task_keys};
use super::*;
use std::io;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time;

/// Directions of a line.
const TO_SERVER: usize = 0;
const TO_CLIENT: usize = 1;

/// Most bytes read at once.
const CHUNK: usize = 16 << 10;

/// A time between the last bytes of a line and its cut, in which they are read.
const PAUSE: Duration = Duration::from_millis(20);

/// The most time between the loss of a task and the error.
const NOTICED: Duration = Duration::from_secs(5);

/// The most time between the end of a disturbance and a run with a right result.
const SETTLED: Duration = Duration::from_secs(15);

/// A way in which a direction is silent, while its connections stay open.
#[derive(Clone, Copy, PartialEq)]
enum Stall {
    /// No byte is read.
    Unread,
    /// Bytes are read, and go on with the end of the stall.
    Kept,
}

/// The end of an undisturbed time.
#[derive(Clone, Copy)]
enum Deed {
    /// Both connections end with a reset.
    Cut,
    /// Directions fall silent.
    Stall([Option<Stall>; 2]),
}

/// Rules of one direction.
#[derive(Clone, Copy, Default)]
struct Flow {
    delay: Duration,
    bytes_per_s: Option<u32>,
    stall: Option<Stall>,
    /// A deed after so many further bytes.
    after: Option<(usize, Deed)>,
}

/// Rules of all lines of a proxy, which may change at any time.
#[derive(Clone)]
struct Rules(Arc<watch::Sender<[Flow; 2]>>);

impl Rules {
    /// Waits while a stall of a direction is one of these.
    async fn unless_stalled(&self, way: usize, kinds: &[Stall]) {
        let mut rules = self.0.subscribe();
        let goes_on = |flows: &[Flow; 2]| flows[way].stall.is_none_or(|s| !kinds.contains(&s));
        rules.wait_for(goes_on).await.unwrap();
    }

    /// The number of bytes, of some, before a deed; true with those before a cut.
    fn count(&self, way: usize, n_bytes: usize) -> (usize, bool) {
        let mut counted = (n_bytes, false);
        self.0.send_if_modified(|flows| {
            let Some((left, deed)) = flows[way].after else {
                return false;
            };
            if n_bytes < left {
                flows[way].after = Some((left - n_bytes, deed));
                return false;
            }
            flows[way].after = None;
            counted = (left, matches!(deed, Deed::Cut));
            if let Deed::Stall(stalls) = deed {
                flows
                    .iter_mut()
                    .zip(stalls)
                    .for_each(|(flow, s)| flow.stall = s);
            }
            true
        });
        counted
    }

    /// Carries bytes one way until they end, or the line is cut: then true.
    async fn pump(&self, way: usize, from: &TcpStream, to: &TcpStream) -> bool {
        let (queue, mut chunks) = mpsc::unbounded_channel();
        let writing = async {
            while let Some((due, bytes)) = chunks.recv().await {
                time::sleep_until(due).await;
                if self.write(way, bytes, to).await? {
                    return Ok(true);
                }
            }
            io::Result::Ok(false)
        };
        tokio::pin!(writing);
        let ended = tokio::select! {
            ended = &mut writing => ended,
            () = self.read(way, from, queue) => writing.await,
        };
        ended.unwrap_or(false)
    }

    /// Reads until the end.
    async fn read(
        &self,
        way: usize,
        from: &TcpStream,
        queue: mpsc::UnboundedSender<(time::Instant, Vec<u8>)>,
    ) {
        loop {
            self.unless_stalled(way, &[Stall::Unread]).await;
            let mut bytes = vec![0; CHUNK];
            let n = match from
                .readable()
                .await
                .and_then(|()| from.try_read(&mut bytes))
            {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => continue,
                Err(_) | Ok(0) => return,
                Ok(n) => n,
            };
            bytes.truncate(n);
            let Flow {
                delay, bytes_per_s, ..
            } = self.0.borrow()[way];
            if let Some(rate) = bytes_per_s {
                time::sleep(Duration::from_secs(n as u64) / rate).await;
            }
            // The writer outlives the reader.
            let _ = queue.send((time::Instant::now() + delay, bytes));
        }
    }

    /// Writes bytes; true if the line is cut after some of them.
    async fn write(&self, way: usize, bytes: Vec<u8>, to: &TcpStream) -> io::Result<bool> {
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            self.unless_stalled(way, &[Stall::Unread, Stall::Kept])
                .await;
            let (n, is_cut) = self.count(way, rest.len());
            let (mut now, later) = rest.split_at(n);
            while !now.is_empty() {
                to.writable().await?;
                match to.try_write(now) {
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                    written => now = &now[written?..],
                }
            }
            if is_cut {
                time::sleep(PAUSE).await;
                return Ok(true);
            }
            rest = later;
        }
        Ok(false)
    }
}

/// A proxy in front of a server.
struct Proxy {
    rules: Rules,
    accepting: JoinHandle<()>,
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl Proxy {
    fn start(at: &str, server: &str) -> Proxy {
        let rules = Rules(Arc::new(watch::channel([Flow::default(); 2]).0));
        let listener = std::net::TcpListener::bind(at).unwrap();
        listener.set_nonblocking(true).unwrap();
        let (own, server) = (rules.clone(), server.to_owned());
        let accepting = crate::server::network().unwrap().spawn(async move {
            let listener = TcpListener::from_std(listener).unwrap();
            // All lines end with the proxy.
            let mut lines = JoinSet::new();
            loop {
                tokio::select! {
                    near = listener.accept() => {
                        lines.spawn(line(near.unwrap().0, server.clone(), own.clone()));
                    }
                    Some(_) = lines.join_next() => {}
                }
            }
        });
        Proxy { rules, accepting }
    }

    /// Changes the rules of both directions.
    fn set(&self, change: impl Fn(&mut Flow)) {
        self.rules
            .0
            .send_modify(|flows| flows.iter_mut().for_each(change));
    }

    /// Does a deed after so many further bytes of a direction.
    fn after(&self, n_bytes: usize, way: usize, deed: Deed) {
        self.rules
            .0
            .send_modify(|flows| flows[way].after = Some((n_bytes, deed)));
    }

    /// Back to a good line. True if no deed is left.
    fn heal(&self) -> bool {
        let before = self.rules.0.send_replace([Flow::default(); 2]);
        before.iter().all(|flow| flow.after.is_none())
    }
}

/// The life of one line.
async fn line(near: TcpStream, server: String, rules: Rules) {
    let Ok(far) = TcpStream::connect(server).await else {
        return;
    };
    for end in [&near, &far] {
        end.set_nodelay(true).unwrap();
    }
    let is_cut = tokio::select! {
        is_cut = rules.pump(TO_SERVER, &near, &far) => is_cut,
        is_cut = rules.pump(TO_CLIENT, &far, &near) => is_cut,
    };
    if is_cut {
        for end in [&near, &far] {
            end.set_zero_linger().unwrap();
        }
    }
}

/// Limits with which a run without an end is an error soon.
fn limits_of_runs() -> Limits {
    Limits {
        run: Duration::from_secs(30),
        ..limits()
    }
}

/// Three tasks, each behind a proxy, and a client at the first without one.
struct Setting {
    client: Client,
    callable: Callable,
    proxies: Vec<Proxy>,
    /// Of the first task's proxy.
    address: String,
    _servers: Vec<Server>,
}

impl Setting {
    /// Tasks with keys, or without.
    fn new(with_keys: bool) -> Setting {
        Setting::with(with_keys, limits_of_runs())
    }

    fn with(with_keys: bool, limits: Limits) -> Setting {
        let (spec, real) = (cluster(&THREE), cluster(&THREE));
        let address =
            |spec: &ClusterSpec, name: &str| spec.address(&task(name)).unwrap().to_owned();
        let keys = folder(&spec);
        let credentials = |of_keys: Credentials| match with_keys {
            true => of_keys,
            false => Credentials::Local,
        };
        let server = |name: &str| {
            let options = ServerOptions {
                credentials: credentials(task_keys(keys.path(), name)),
                listen: Some(address(&real, name)),
                limits: limits.clone(),
            };
            let engine = Arc::new(Relay::new(&Arc::default()));
            Server::start(spec.clone(), task(name), engine, options).unwrap()
        };
        let servers = THREE.into_iter().map(server).collect();
        let proxy = |name| Proxy::start(&address(&spec, name), &address(&real, name));
        let proxies = THREE.into_iter().map(proxy).collect();
        let target = format!("grpc://{}", address(&real, THREE[0]));
        let of_client = credentials(client_keys(keys.path()));
        let options = ClientOptions {
            credentials: of_client,
            ..limits.clone().into()
        };
        let client = Client::connect(&target, "1.0".into(), options).unwrap();
        let callable = client.prepare(&Document::from(THREE.join(" "))).unwrap();
        let setting = Setting {
            client,
            callable,
            proxies,
            address: address(&spec, THREE[0]),
            _servers: servers,
        };
        setting.run(0).unwrap();
        setting
    }

    /// A run; a result is right.
    fn run(&self, number: usize) -> Result<(), Fault> {
        let x = values(number as f32);
        let y = self.client.call(&self.callable, std::slice::from_ref(&x))?;
        assert_eq!(y.len(), 1);
        assert!(
            y[0].as_bytes() == x.as_bytes(),
            "run {number}: another tensor"
        );
        Ok(())
    }

    /// A run that may fail, soon, for the loss of a task.
    fn try_run(&self, number: usize) -> Result<(), Fault> {
        let began = Instant::now();
        let ran = self.run(number);
        if let Err(fault) = &ran {
            assert_eq!(fault.category(), ErrorKind::DeviceFailed, "{fault}");
        }
        assert!(began.elapsed() < NOTICED, "{:?}: {ran:?}", began.elapsed());
        ran
    }

    /// Runs until one does not fail, and once more.
    fn settle(&self, number: usize) {
        let began = Instant::now();
        while let Err(fault) = self.try_run(number) {
            assert!(began.elapsed() < SETTLED, "{fault}");
            std::thread::sleep(Duration::from_millis(100));
        }
        self.run(number + 1).unwrap();
    }

    /// A run in which a line to a task is cut, and those after it.
    fn cut(&self, to: usize, n_bytes: usize, way: usize) {
        self.proxies[to].after(n_bytes, way, Deed::Cut);
        // A cut at the end of a run may leave it whole.
        if let Err(fault) = self.try_run(n_bytes) {
            assert!(fault.to_string().contains(THREE[to]), "{fault}");
        }
        let is_done = self.proxies[to].heal();
        assert!(
            is_done || way == TO_CLIENT,
            "no cut after {n_bytes} bytes to {to}"
        );
        self.settle(n_bytes + 1);
    }

    /// A run in which lines to a task fall silent, and those after it.
    fn stall(&self, to: usize, n_bytes: usize, stalls: [Option<Stall>; 2]) {
        self.proxies[to].after(n_bytes, TO_SERVER, Deed::Stall(stalls));
        let fault = self.try_run(n_bytes).unwrap_err();
        assert!(fault.to_string().contains(THREE[to]), "{fault}");
        assert!(self.proxies[to].heal());
        self.settle(n_bytes + 1);
    }
}

/// Positions in a tensor, most of them within a piece.
fn positions(seed: u64) -> impl Iterator<Item = usize> {
    let next = |n: &u64| {
        Some(
            n.wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407),
        )
    };
    let numbers = std::iter::successors(Some(seed), next).skip(1);
    numbers.map(|n| 1 + (n >> 33) as usize % (4 * N - 1))
}

#[test]
fn tensors_over_long_lines_arrive_and_take_their_time() {
    let setting = Setting::new(false);
    let delay = Duration::from_millis(100);
    setting
        .proxies
        .iter()
        .for_each(|proxy| proxy.set(|flow| flow.delay = delay));
    for number in 1..4 {
        let began = Instant::now();
        setting.run(number).unwrap();
        // One line after the other, to the second task, the third, and back to the first.
        assert!(began.elapsed() >= 3 * delay, "{:?}", began.elapsed());
    }
}

#[test]
fn a_slow_line_is_not_taken_for_a_lost_one() {
    // 8 and 1 Mbit/s: questions of HTTP/2 wait behind the bytes under way, for up to 8 seconds.
    for bytes_per_s in [1_000_000, 125_000] {
        let setting = Setting::new(false);
        setting.proxies[1].set(|flow| flow.bytes_per_s = Some(bytes_per_s));
        let began = Instant::now();
        setting.run(1).unwrap();
        let least = Duration::from_secs(4 * N as u64) / bytes_per_s;
        assert!(began.elapsed() >= least, "{:?}", began.elapsed());
    }
}

#[test]
fn large_messages_on_a_slow_line_are_not_taken_for_a_loss() {
    // The tensor is part of its messages: of a call, of an order to another task, of both answers.
    let large = Limits {
        inline_bytes: 2 << 20,
        ..limits_of_runs()
    };
    let mut setting = Setting::with(false, large.clone());
    let program = Document::from([1, 2].map(|i| THREE[i]).join(" "));
    // 2 Mbit/s, both ways, to the session's task and to the first of the program.
    for proxy in &setting.proxies[..2] {
        proxy.set(|flow| flow.bytes_per_s = Some(250_000));
    }
    let target = format!("grpc://{}", setting.address);
    setting.client = Client::connect(&target, "1.0".into(), large.into()).unwrap();
    setting.callable = setting.client.prepare(&program).unwrap();
    setting.run(1).unwrap();
}

#[test]
fn a_client_on_a_slow_line_is_not_taken_for_a_lost_one() {
    let mut setting = Setting::new(false);
    // 1.2 Mbit/s, both ways.
    let bytes_per_s = 150_000;
    setting.proxies[0].set(|flow| flow.bytes_per_s = Some(bytes_per_s));
    let target = format!("grpc://{}", setting.address);
    let client = Client::connect(&target, "1.0".into(), limits_of_runs().into());
    setting.client = client.unwrap();
    let began = Instant::now();
    let constant = Tensor::from_slice(&vec![3u8; 600_000], &[600_000]).unwrap();
    let constant = counted(constant, &Arc::default());
    let constants = [(constant.digest, constant)].into();
    let program = Document::new(THREE[0].to_owned(), constants);
    setting.callable = setting.client.prepare(&program).unwrap();
    setting.run(1).unwrap();
    // A constant there, a tensor there, and back.
    let least = Duration::from_secs(600_000 + 8 * N as u64) / bytes_per_s;
    assert!(began.elapsed() >= least, "{:?}", began.elapsed());
}

#[test]
fn silent_lines_end_a_run_and_the_next_ones_work() {
    let setting = Setting::new(false);
    setting.stall(1, 300_000, [Some(Stall::Kept), None]);
    setting.stall(2, 700_000, [None, Some(Stall::Kept)]);
    setting.stall(1, 1_100_000, [Some(Stall::Unread); 2]);
}

#[test]
fn lines_cut_within_a_piece_end_a_run_and_the_next_ones_work() {
    let setting = Setting::new(false);
    for to in 0..3 {
        for n_bytes in positions(to as u64).take(5) {
            setting.cut(to, n_bytes, TO_SERVER);
        }
        for n_bytes in positions(to as u64 + 10).take(3) {
            setting.cut(to, n_bytes % 200 + 1, TO_CLIENT);
        }
    }
}

#[test]
fn silent_and_cut_lines_with_keys_end_a_run_and_the_next_ones_work() {
    let setting = Setting::new(true);
    for (to, n_bytes) in positions(20).take(3).enumerate() {
        setting.cut(to, n_bytes, TO_SERVER);
    }
    setting.stall(2, 500_000, [Some(Stall::Kept); 2]);
}
