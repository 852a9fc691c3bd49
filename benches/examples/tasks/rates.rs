//! Rates of tensors and times of steps between two tasks.

use crate::cluster::{Tasks, device, one_process};
use crate::{here, median};
use gristmill::ir::{Graph, GraphBuilder, ScalarOp};
use gristmill::{Compiled, DType, Options, Result, Session, Tensor};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Instant;

const MIB: usize = 1 << 20;

/// Bytes in one write to a plain connection, as in one message between tasks.
const PIECE: usize = 256 << 10;

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

/// Prints the rate of a variable of 4 and 64 MiB from one task to the other, the bytes on the wire for each of its bytes, and the time of a step
/// with one number there and back.
pub fn measure(n_rounds: usize) -> Result<()> {
    let folder = std::env::temp_dir().join(format!("gristmill-tasks-{}", std::process::id()));
    let pairs = [Tasks::start(2, None)?, Tasks::start(2, Some(&folder))?];
    let (open, closed) = (pairs[0].session()?, pairs[1].session()?);
    let own = one_process(2)?;
    let names = [device(0), device(1)];
    let tasks = [names[0].as_str(), names[1].as_str()];
    let places = [
        ("one process", &own, ["/cpu:0", "/cpu:1"]),
        ("two tasks", &open, tasks),
        ("with keys", &closed, tasks),
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
        let connection = here(answering(n_bytes))?;
        tcp.push((n_bytes, connection, vec![0; n_bytes], Vec::new()));
    }
    for _ in 0..n_rounds {
        for case in &mut cases {
            case.round()?;
        }
        for (n_bytes, connection, into, seconds) in &mut tcp {
            let n = if *n_bytes < MIB { 200 } else { 4 };
            for _ in 0..n {
                seconds.push(here(plain(connection, into))?);
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
