//! Tensors and steps between two tasks, each a process of this machine, beside plain TCP and beside two devices of one process.
//!
//! `tasks [N]`: medians of N rounds (15), without keys and with them, in turn. Prints the rate of a variable of 4 and 64 MiB from one task to the
//! other, the bytes on the wire for one of its bytes, and the time of a step with one number there and back.

use gristmill::distribute::{
    ClusterSpec, Credentials, Keys, ServerOptions, TaskName, make_keys, serve_with,
};
use gristmill::ir::{Graph, GraphBuilder, ScalarOp};
use gristmill::place::DeviceSet;
use gristmill::{Compiled, DType, Options, Result, Session, Settings, Tensor};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

const MIB: usize = 1 << 20;

/// Bytes in one write to a plain connection, as in one message between tasks.
const PIECE: usize = 256 << 10;

/// Devices of both tasks, as the session's task names them.
const TASKS: [&str; 2] = ["/job:worker/task:0/cpu:0", "/job:worker/task:1/cpu:0"];

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let done = match words.first().map(String::as_str) {
        Some("serve") => serve(&words[1..]),
        n => measure(n.map_or(15, |n| n.parse().expect("a number of rounds"))),
    };
    if let Err(e) = done {
        eprintln!("error: {e}");
        std::process::exit(2);
    }
}

fn task(task: u32) -> TaskName {
    TaskName {
        job: "worker".into(),
        task,
    }
}

fn settings() -> Settings {
    Settings {
        threads: Some(1),
        ..Settings::default()
    }
}

/// A task, until its input ends: `serve NUMBER ADDRESS ADDRESS [KEYS]`.
fn serve(words: &[String]) -> Result<()> {
    let number = u32::from(words[0] == "1");
    let spec = ClusterSpec::new((0..).map(task).zip(words[1..3].to_vec()))?;
    let options = ServerOptions {
        credentials: match words.get(3) {
            None => Credentials::Local,
            Some(folder) => Credentials::Keys(Keys::of_task(folder.as_ref(), &task(number))?),
        },
        ..ServerOptions::default()
    };
    let server = serve_with(spec, task(number), &settings(), options)?;
    println!("ready");
    let _ = std::io::stdin().read(&mut [0]);
    drop(server);
    Ok(())
}

/// Two tasks as processes, and a session on the first.
struct Pair {
    session: Session,
    processes: Vec<Child>,
}

impl Pair {
    fn start(keys: Option<&Path>) -> Result<Pair> {
        let spec = ClusterSpec::local([0, 1].map(task))?;
        let addresses: Vec<&str> = spec.tasks().map(|(_, address)| address).collect();
        let folder = keys.and_then(Path::to_str);
        if let Some(folder) = keys {
            make_keys(folder, &spec, 1)?;
        }
        let start = |number: &str| {
            let mut process = Command::new(std::env::current_exe().expect("it runs"))
                .args(["serve", number])
                .args(&addresses)
                .args(folder)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .expect("this program starts again");
            let out = process.stdout.as_mut().expect("it is piped");
            let read = BufReader::new(out).read_line(&mut String::new());
            read.expect("it says that it is ready");
            process
        };
        let processes = ["0", "1"].map(start).into();
        let credentials = match keys {
            None => Credentials::Local,
            Some(folder) => Credentials::Keys(Keys::of_client(folder)?),
        };
        let target = format!("grpc://{}", addresses[0]);
        Ok(Pair {
            session: Session::open_with(&target, &settings(), &credentials)?,
            processes,
        })
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        for process in &mut self.processes {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// The first number of a variable of the second device, taken on the first.
fn crossing(devices: [&str; 2], n: usize) -> Result<Graph> {
    let mut b = GraphBuilder::new("crossing");
    let all = b.with_device(devices[1], |b| {
        b.variable(
            &format!("v{n}"),
            Tensor::from_slice(&vec![1.0f32; n], &[n])?,
        )
    })?;
    let first = b.with_device(devices[0], |b| b.slice_axis(all, 0, 0, 1))?;
    b.output("first", first);
    b.finish()
}

/// A number that the second device adds to, and the first one again.
fn there_and_back(devices: [&str; 2]) -> Result<Graph> {
    let mut b = GraphBuilder::new("there_and_back");
    let mut x = b.input("x", DType::F32, [1]);
    for device in [devices[1], devices[0]] {
        x = b.with_device(device, |b| {
            let one = b.scalar(DType::F32, 1.0);
            b.map(ScalarOp::Add, &[x, one])
        })?;
    }
    b.output("y", x);
    b.finish()
}

/// A program, and what it runs with.
struct Case {
    name: String,
    program: Compiled,
    inputs: Vec<Tensor>,
    n_bytes: usize,
    seconds: Vec<f64>,
    on_wire: Vec<f64>,
}

impl Case {
    fn new(name: String, session: &Session, graph: &Graph, n_bytes: usize) -> Result<Case> {
        let program = session.compile(graph, &Options::default())?;
        let inputs = match n_bytes {
            4 => vec![Tensor::from_slice(&[1.0f32], &[1])?],
            _ => vec![],
        };
        Ok(Case {
            name,
            program,
            inputs,
            n_bytes,
            seconds: vec![],
            on_wire: vec![],
        })
    }

    fn round(&mut self) -> Result<()> {
        let n = if self.n_bytes < MIB { 200 } else { 4 };
        self.program.run_ordered(&self.inputs)?;
        let (before, started) = (on_loopback(), Instant::now());
        for _ in 0..n {
            self.program.run_ordered(&self.inputs)?;
        }
        self.seconds
            .push(started.elapsed().as_secs_f64() / f64::from(n));
        self.on_wire.push((on_loopback() - before) / f64::from(n));
        Ok(())
    }
}

/// Bytes that the loopback interface has carried.
fn on_loopback() -> f64 {
    let read = std::fs::read_to_string("/sys/class/net/lo/statistics/rx_bytes");
    read.ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(f64::NAN)
}

/// Seconds for bytes over a plain connection, from a question of one byte on.
fn plain(connection: &mut TcpStream, into: &mut [u8]) -> std::io::Result<f64> {
    let started = Instant::now();
    connection.write_all(&[0])?;
    connection.read_exact(into)?;
    Ok(started.elapsed().as_secs_f64())
}

/// A connection whose other end answers each byte with `n_bytes`.
fn answering(n_bytes: usize) -> std::io::Result<TcpStream> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let connection = TcpStream::connect(listener.local_addr()?)?;
    connection.set_nodelay(true)?;
    let (mut other, _) = listener.accept()?;
    other.set_nodelay(true)?;
    std::thread::spawn(move || {
        let piece = vec![1; PIECE.min(n_bytes)];
        while other.read_exact(&mut [0]).is_ok() {
            for _ in 0..n_bytes / piece.len() {
                if other.write_all(&piece).is_err() {
                    return;
                }
            }
        }
    });
    Ok(connection)
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

fn measure(n_rounds: usize) -> Result<()> {
    let folder = std::env::temp_dir().join(format!("gristmill-tasks-{}", std::process::id()));
    let (open, closed) = (Pair::start(None)?, Pair::start(Some(&folder))?);
    let here = Session::new(&Settings {
        devices: DeviceSet::parse("cpu:2", 1)?,
        ..settings()
    })?;
    let places = [
        ("one process", &here, ["/cpu:0", "/cpu:1"]),
        ("two tasks", &open.session, TASKS),
        ("with keys", &closed.session, TASKS),
    ];
    let sizes = [4, 4 * MIB, 64 * MIB];
    let mut cases = Vec::new();
    for n_bytes in sizes {
        for (name, session, devices) in places {
            let graph = match n_bytes {
                4 => there_and_back(devices)?,
                n => crossing(devices, n / 4)?,
            };
            cases.push(Case::new(name.to_owned(), session, &graph, n_bytes)?);
        }
    }
    let mut tcp = Vec::new();
    for n_bytes in sizes {
        let connection = answering(n_bytes).expect("loopback is there");
        tcp.push((n_bytes, connection, vec![0; n_bytes], Vec::new()));
    }
    for _ in 0..n_rounds {
        for case in &mut cases {
            case.round()?;
        }
        for (n_bytes, connection, into, seconds) in &mut tcp {
            let n = if *n_bytes < MIB { 200 } else { 4 };
            for _ in 0..n {
                seconds.push(plain(connection, into).expect("the other end goes on"));
            }
        }
    }
    let rate = |n_bytes: usize, seconds: f64| n_bytes as f64 / seconds / 1e9;
    for (n_bytes, _, _, seconds) in &tcp {
        let s = median(seconds);
        println!(
            "{n_bytes:>9} B  plain TCP    {:9.1} us  {:6.2} GB/s",
            s * 1e6,
            rate(*n_bytes, s)
        );
        for case in cases.iter().filter(|case| case.n_bytes == *n_bytes) {
            let own = median(&case.seconds);
            println!(
                "{n_bytes:>9} B  {:11}  {:9.1} us  {:6.2} GB/s  {:.2} of TCP's rate  {:.3} bytes on the wire for each",
                case.name,
                own * 1e6,
                rate(*n_bytes, own),
                s / own,
                median(&case.on_wire) / *n_bytes as f64
            );
        }
    }
    // Keys of this run are of no use to others.
    let _ = std::fs::remove_dir_all(folder);
    Ok(())
}
