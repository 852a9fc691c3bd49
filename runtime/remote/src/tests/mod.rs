//! Servers of one process that pass a tensor on, without a compiler.

use crate::engine::in_thread;
use crate::environment::Machine;
use crate::network::Network;
use crate::*;
mod chain;
mod hostile;
mod keys;
mod leases;
mod pieces;
mod proxy;
mod shutdown;
mod simulation;

use gristmill_runtime::device::{DeviceKind, DeviceName};
use gristmill_runtime::exec::{
    ExecOptions, Executor, Progress, Received, RemoteEnd, VariableState,
};
use gristmill_runtime::program::*;
use gristmill_runtime::{DType, Error, ErrorKind, Tensor};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The network of this machine.
fn plain() -> Network {
    Network {
        environment: Arc::new(Machine),
        credentials: Credentials::Local,
    }
}

/// Elements of the tensor: a bit more than five pieces.
const N: usize = 330_000;

/// Programs are lists of tasks, `/job:a/task:0 /job:b/task:1`: the first gets the input and sends it to the second, and so on. A part is its
/// place in the list, after a `!` if it fails whenever `fails` says so.
struct Relay {
    version: &'static str,
    fails: Arc<AtomicBool>,
    /// Number of constants that were asked for to be sent to other tasks.
    n_sent: Arc<AtomicUsize>,
    /// Number of parts on this task.
    n_parts: Arc<AtomicUsize>,
    /// Time of a run beside that for the tensors.
    delay: Duration,
}

impl Relay {
    fn new(fails: &Arc<AtomicBool>) -> Relay {
        Relay {
            version: "1.0",
            fails: fails.clone(),
            n_sent: Arc::default(),
            n_parts: Arc::default(),
            delay: Duration::ZERO,
        }
    }
}

/// A constant with these bytes that counts how often they are asked for.
fn counted(bytes: Tensor, n: &Arc<AtomicUsize>) -> Constant {
    let (digest, size_bytes, n) = (Digest::of(bytes.as_bytes()), bytes.len(), n.clone());
    let source = Arc::new(move || {
        n.fetch_add(1, Ordering::SeqCst);
        Ok(bytes.clone())
    });
    Constant {
        digest,
        size_bytes,
        source,
    }
}

fn cpu() -> DeviceName {
    DeviceName::local(DeviceKind::Cpu, 0)
}

fn task(text: &str) -> TaskName {
    let device = DeviceName::parse(&format!("{text}/cpu:0")).unwrap();
    TaskName {
        job: device.job.unwrap(),
        task: device.task,
    }
}

fn spec_x(name: &str) -> IoSpec {
    IoSpec::new(name, DType::F32, &[N])
}

fn step(kind: StepKind, deps: &[u32]) -> Step {
    Step {
        kind,
        origin: "/relay".into(),
        deps: deps.iter().map(|&d| StepId(d)).collect(),
    }
}

/// A part of one device, which receives, or has as input, what it sends or gives. Neighbours are tasks.
fn part(before: Option<&str>, after: Option<&str>) -> Program {
    let far = |name: &str| DeviceName::parse(&format!("{name}/cpu:0")).unwrap();
    let key = |source, destination| Key {
        source,
        destination,
        tensor: "x".into(),
    };
    let buffer = |loc| Buffer {
        name: "x".into(),
        dtype: DType::F32,
        shape: vec![N],
        loc,
    };
    let (mut steps, mut buffers) = (vec![], vec![]);
    match before {
        None => buffers.push(buffer(Loc::Input(0))),
        Some(before) => {
            buffers.push(buffer(Loc::Arena { offset_bytes: 0 }));
            let key = key(far(before), cpu());
            let buffer = BufferId(0);
            steps.push(step(StepKind::Recv { key, buffer }, &[]));
        }
    }
    let deps: Vec<u32> = (0..steps.len() as u32).collect();
    let last = match after {
        Some(after) => StepKind::Send {
            key: key(cpu(), far(after)),
            buffer: BufferId(0),
        },
        None => {
            buffers.push(buffer(Loc::Output(0)));
            StepKind::Copy {
                src: BufferId(0),
                dst: BufferId(1),
            }
        }
    };
    steps.push(step(last, &deps));
    let ends = |is_there: bool, name: &str| match is_there {
        true => vec![spec_x(name)],
        false => vec![],
    };
    Program {
        name: "relay".into(),
        inputs: ends(before.is_none(), "x"),
        outputs: ends(after.is_none(), "y"),
        variables: vec![],
        partitions: vec![Partition {
            device: cpu(),
            arena_bytes: 4 * N,
            buffers,
            constants: vec![],
            kernels: vec![],
            gpu_code: vec![],
            steps,
            memory_limit: None,
        }],
    }
}

/// An executor, or a failure in its place, which counts itself.
struct Relayed {
    executor: Arc<Executor>,
    fails: Option<Arc<AtomicBool>>,
    n_parts: Arc<AtomicUsize>,
    delay: Duration,
}

impl Drop for Relayed {
    fn drop(&mut self) {
        self.n_parts.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Part for Relayed {
    fn inputs(&self) -> Vec<IoSpec> {
        Part::inputs(&*self.executor)
    }

    fn outgoing(&self) -> Vec<RemoteEnd> {
        Part::outgoing(&*self.executor)
    }

    fn incoming(&self) -> Vec<RemoteEnd> {
        Part::incoming(&*self.executor)
    }

    fn state_use(&self) -> StateUse {
        Part::state_use(&*self.executor)
    }

    fn holds_devices(&self) -> bool {
        Part::holds_devices(&*self.executor)
    }

    fn variables(&self) -> Vec<VariableState> {
        Part::variables(&*self.executor)
    }

    fn hold(self: Arc<Self>) -> Job<Turn> {
        self.executor.clone().hold()
    }

    fn run(self: Arc<Self>, run: u64, feeds: Vec<Tensor>) -> Job<Vec<Tensor>> {
        match &self.fails {
            Some(fails) if fails.load(Ordering::SeqCst) => in_thread(move || {
                let error = Error::new(ErrorKind::OutOfMemory, "no room").at("/relay");
                self.executor.abort(run, error.clone());
                Err(error.into())
            }),
            _ => Box::pin(async move {
                tokio::time::sleep(self.delay).await;
                self.executor.clone().run(run, feeds).await
            }),
        }
    }

    fn skip(&self, run: u64) {
        self.executor.skip(run);
    }

    fn initialise(self: Arc<Self>, at_most: Duration) -> Job<()> {
        self.executor.clone().initialise(at_most)
    }

    fn receive(&self, end: usize, run: u64, at: usize, bytes: &[u8]) -> Result<Received, Error> {
        self.executor.receive(end, run, at, bytes)
    }

    fn abort(&self, run: u64, error: Error) {
        self.executor.abort(run, error);
    }

    fn progress(&self) -> Progress {
        self.executor.progress()
    }
}

impl Engine for Relay {
    fn version(&self) -> String {
        self.version.into()
    }

    fn devices(&self) -> Vec<DeviceInfo> {
        vec![DeviceInfo {
            name: cpu().to_string(),
            ..DeviceInfo::default()
        }]
    }

    fn tasks(&self, program: &Document) -> Result<Vec<TaskName>, Fault> {
        let tasks = program
            .text()
            .split(' ')
            .map(|t| task(t.trim_end_matches('!')));
        Ok(tasks.collect())
    }

    fn plan(&self, program: Document, _: Vec<(TaskName, Vec<DeviceInfo>)>) -> Job<Plan> {
        let held = program.constants().values();
        let counted = held.map(|c| (c.digest, counted((c.source)().unwrap(), &self.n_sent)));
        let constants: BTreeMap<_, _> = counted.collect();
        // The first part stays with the master in the test that counts.
        let constants = [program.constants().clone(), constants];
        let program = program.text().to_owned();
        let stages: Vec<&str> = program.split(' ').collect();
        let share = |(i, stage): (usize, &&str)| Share {
            task: task(stage.trim_end_matches('!')),
            part: Document::new(format!("{i} {program}"), constants[i.min(1)].clone()),
            inputs: if i == 0 { vec![0] } else { vec![] },
            outputs: if i + 1 == stages.len() {
                vec![0]
            } else {
                vec![]
            },
        };
        let plan = Plan {
            inputs: vec![spec_x("x")],
            outputs: vec![spec_x("y")],
            shares: stages.iter().enumerate().map(share).map(Arc::new).collect(),
            warnings: vec!["of the plan".into()],
            placement: program.clone(),
        };
        Box::pin(async move { Ok(plan) })
    }

    fn variables(&self) -> Result<Vec<VariableState>, Fault> {
        Ok(Vec::new())
    }

    fn reset(&self, _: Vec<String>, _: Duration) -> Job<()> {
        Box::pin(async { Ok(()) })
    }

    fn register(&self, part_text: Document, wire: Arc<PartWire>) -> Job<Made> {
        for digest in part_text.constants().keys() {
            let bytes = part_text.constant(digest).unwrap();
            assert_eq!(Digest::of(bytes.as_bytes()), *digest);
        }
        let (fails, n_parts, delay) = (self.fails.clone(), self.n_parts.clone(), self.delay);
        in_thread(move || {
            let words: Vec<&str> = part_text.text().split(' ').collect();
            let (i, stages) = (words[0].parse::<usize>().unwrap(), &words[1..]);
            let name = |i: usize| stages.get(i).map(|s| s.trim_end_matches('!'));
            let before = i.checked_sub(1).and_then(name);
            let options = ExecOptions {
                wire: Some(wire),
                ..ExecOptions::default()
            };
            let program = Arc::new(part(before, name(i + 1)));
            let executor = Arc::new(Executor::new(program, &options)?);
            let fails = stages[i].ends_with('!').then_some(fails);
            Ok(Made {
                part: {
                    n_parts.fetch_add(1, Ordering::SeqCst);
                    Arc::new(Relayed {
                        executor,
                        fails,
                        n_parts,
                        delay,
                    })
                },
                warnings: vec![format!("of part {i}")],
            })
        })
    }
}

fn cluster(tasks: &[&str]) -> ClusterSpec {
    ClusterSpec::local(tasks.iter().map(|text| task(text))).unwrap()
}

fn limits() -> Limits {
    Limits {
        connect: Duration::from_secs(2),
        ..Limits::default()
    }
}

fn start(spec: &ClusterSpec, name: &str, fails: &Arc<AtomicBool>) -> Result<Server, Fault> {
    let engine = Arc::new(Relay::new(fails));
    Server::start(spec.clone(), task(name), engine, limits().into())
}

fn connect(spec: &ClusterSpec, name: &str) -> Result<Client, Fault> {
    let target = format!("grpc://{}", spec.address(&task(name)).unwrap());
    Client::connect(&target, "1.0".into(), limits().into())
}

fn values(first: f32) -> Tensor {
    let values: Vec<f32> = (0..N).map(|i| first + i as f32).collect();
    Tensor::from_slice(&values, &[N]).unwrap()
}

const THREE: [&str; 3] = ["/job:ps/task:0", "/job:worker/task:0", "/job:worker/task:1"];

#[test]
fn a_tensor_goes_through_three_tasks_in_every_run() {
    let spec = cluster(&THREE);
    let fails = Arc::default();
    let servers = THREE.map(|name| start(&spec, name, &fails).unwrap());
    assert_ne!(servers[0].incarnation(), servers[1].incarnation());
    let client = connect(&spec, THREE[1]).unwrap();
    assert_eq!(client.task(), task(THREE[1]));
    let callable = client.prepare(&Document::from(THREE.join(" "))).unwrap();
    let of_parts = THREE
        .iter()
        .enumerate()
        .map(|(i, task)| format!("{task}: of part {i}"));
    let warnings: Vec<String> = std::iter::once("of the plan".to_owned())
        .chain(of_parts)
        .collect();
    assert_eq!(callable.warnings, warnings);
    for run in 0..20 {
        let x = values(run as f32);
        let y = client.call(&callable, std::slice::from_ref(&x)).unwrap();
        assert_eq!(y[0].as_bytes(), x.as_bytes());
    }
    let short = Tensor::zeros(DType::F32, &[3]).unwrap();
    let error = client.call(&callable, &[short]).unwrap_err().to_string();
    assert_eq!(error, format!("input \"x\": expected f32[{N}], got f32[3]"));
    let error = client.call(&callable, &[]).unwrap_err().to_string();
    assert_eq!(error, "expected 1 inputs, got 0");
    // An idle program stays for a while.
    client.forget(&callable).unwrap();
    client.call(&callable, &[values(0.0)]).unwrap();
    // Servers end at once, whatever streams are open.
    let began = Instant::now();
    drop(servers);
    assert!(began.elapsed() < Duration::from_secs(4));
    let lost = client.call(&callable, &[values(0.0)]).unwrap_err();
    assert_eq!(lost.category(), ErrorKind::DeviceFailed);
}

#[test]
fn constants_reach_each_task_once_whatever_their_size() {
    let spec = cluster(&THREE);
    let n_sent = Arc::new(AtomicUsize::new(0));
    let limits = Limits {
        idle_callables: 1,
        unclaimed: Duration::from_secs(2),
        ..limits()
    };
    let servers = THREE.map(|name| {
        let engine = Relay {
            n_sent: n_sent.clone(),
            ..Relay::new(&Arc::default())
        };
        Server::start(
            spec.clone(),
            task(name),
            Arc::new(engine),
            limits.clone().into(),
        )
        .unwrap()
    });
    // 9 MiB, more than a message may have, and one byte.
    let large: Vec<u8> = (0..9u32 << 20).map(|i| (i * 7 + (i >> 9)) as u8).collect();
    let constants = [large, vec![3]].map(|bytes| Tensor::from_slice(&bytes, &[bytes.len()]));
    let n_loaded = Arc::new(AtomicUsize::new(0));
    let program = |order: [usize; 3], n: &Arc<AtomicUsize>| {
        let constants = constants.iter().map(|bytes| {
            let constant = counted(bytes.clone().unwrap(), n);
            (constant.digest, constant)
        });
        Document::new(order.map(|i| THREE[i]).join(" "), constants.collect())
    };
    let client = connect(&spec, THREE[0]).unwrap();
    let first = client.prepare(&program([0, 1, 2], &n_loaded)).unwrap();
    // Two constants to the session's task, and from there to two others.
    let counts = || [&n_loaded, &n_sent].map(|n| n.load(Ordering::SeqCst));
    assert_eq!(counts(), [2, 4]);
    // Another program with them, and another client of the same program.
    let second = client.prepare(&program([0, 2, 1], &n_loaded)).unwrap();
    let other = connect(&spec, THREE[0]).unwrap();
    let third = other.prepare(&program([0, 1, 2], &n_loaded)).unwrap();
    assert_eq!(counts(), [2, 4]);
    for callable in [&first, &second, &third] {
        client.call(callable, &[values(1.0)]).unwrap();
    }
    // One idle program stays, and its constants with it.
    [first, second]
        .iter()
        .for_each(|c| client.forget(c).unwrap());
    let again = client.prepare(&program([0, 2, 1], &n_loaded)).unwrap();
    assert_eq!(counts(), [2, 4]);
    client.forget(&again).unwrap();
    other.forget(&third).unwrap();
    let third = other.prepare(&program([0, 1, 2], &n_loaded)).unwrap();
    assert_eq!(counts(), [2, 4]);
    let gone = client.call(&again, &[values(1.0)]).unwrap_err().to_string();
    let expected = format!("/job:ps/task:0 does not have program {}", again.digest);
    assert_eq!(gone, expected);
    // Once no program has them, they go.
    other.forget(&third).unwrap();
    let [only, another] = [THREE[0], THREE[1]].map(|name| {
        let document = Document::from(name.to_owned());
        other.prepare(&document).unwrap()
    });
    [only, another]
        .iter()
        .for_each(|c| other.forget(c).unwrap());
    std::thread::sleep(Duration::from_millis(2800));
    client.prepare(&program([0, 1, 2], &n_loaded)).unwrap();
    assert_eq!(counts(), [4, 8]);
    drop(servers);
}

#[test]
fn damaged_and_oversized_contents_are_refused() {
    let spec = cluster(&THREE[..1]);
    let limits = Limits {
        store_bytes: 2 << 20,
        text_bytes: 1 << 10,
        ..limits()
    };
    let engine = Arc::new(Relay::new(&Arc::default()));
    let _server = Server::start(spec.clone(), task(THREE[0]), engine, limits.into()).unwrap();
    let client = connect(&spec, THREE[0]).unwrap();
    let refused = |constant: Constant| {
        let constants = [(constant.digest, constant)].into();
        let document = Document::new(THREE[0], constants);
        client.prepare(&document).unwrap_err().to_string()
    };
    let bytes = |n: usize| Tensor::from_slice(&vec![7u8; n], &[n]).unwrap();
    let mut damaged = counted(bytes(2000), &Arc::default());
    damaged.digest = Digest::of(b"something else");
    let said = refused(damaged);
    assert!(said.contains(" arrived as "), "{said}");
    let said = refused(counted(bytes(3 << 20), &Arc::default()));
    assert_eq!(said, "3145728 bytes are more than 2097152");
    let unreadable = Constant {
        source: Arc::new(|| Err(Fault::invalid("the file is gone"))),
        ..counted(bytes(3000), &Arc::default())
    };
    assert_eq!(refused(unreadable), "the file is gone");
    let mut longer = counted(bytes(4000), &Arc::default());
    longer.source = Arc::new(move || Ok(bytes(5000)));
    assert!(refused(longer).contains(" arrived as "));
    let text = THREE[0].to_owned() + &" ".repeat(2000);
    let long = client.prepare(&Document::from(text)).unwrap_err();
    assert_eq!(long.to_string(), "a text of 2014 bytes, more than 1024");
    let one = client
        .prepare(&Document::from(THREE[0].to_owned()))
        .unwrap();
    client.call(&one, &[values(1.0)]).unwrap();
}

#[test]
fn a_failure_in_one_task_ends_the_run_and_the_next_run_works() {
    let spec = cluster(&THREE);
    let fails = Arc::new(AtomicBool::new(false));
    let _servers = THREE.map(|name| start(&spec, name, &fails).unwrap());
    let client = connect(&spec, THREE[2]).unwrap();
    for failing in 0..3 {
        let mut stages = THREE.map(str::to_owned);
        stages[failing].push('!');
        let callable = client.prepare(&Document::from(stages.join(" "))).unwrap();
        for round in 0..4 {
            fails.store(round % 2 == 0, Ordering::SeqCst);
            let began = Instant::now();
            let ran = client.call(&callable, &[values(round as f32)]);
            match round % 2 {
                0 => {
                    let error = ran.unwrap_err();
                    assert_eq!(error.category(), ErrorKind::OutOfMemory);
                    let expected = format!("in node \"/relay\": {}: no room", THREE[failing]);
                    assert_eq!(error.to_string(), expected);
                    assert!(began.elapsed() < Duration::from_secs(3));
                }
                _ => assert_eq!(ran.unwrap()[0].as_bytes(), values(round as f32).as_bytes()),
            }
        }
    }
}

#[test]
fn tasks_that_are_not_there_are_named() {
    let spec = cluster(&THREE);
    let fails = Arc::default();
    let _server = start(&spec, THREE[0], &fails).unwrap();
    let client = connect(&spec, THREE[0]).unwrap();
    let error = client
        .prepare(&Document::from(THREE.join(" ")))
        .unwrap_err();
    assert_eq!(error.category(), ErrorKind::DeviceFailed);
    let shown = error.to_string();
    for name in &THREE[1..] {
        let address = spec.address(&task(name)).unwrap();
        assert!(
            shown.contains(&format!("lost {name} at {address}: ")),
            "{shown}"
        );
    }
    // Tasks that a program does not name are not asked for.
    let callable = client
        .prepare(&Document::from(THREE[0].to_owned()))
        .unwrap();
    client.call(&callable, &[values(1.0)]).unwrap();
    let unknown = client
        .prepare(&Document::from("/job:chief/task:0".to_owned()))
        .unwrap_err();
    let expected = "/job:chief/task:0 is not in the cluster: its jobs are ps, worker";
    assert_eq!(unknown.to_string(), expected);
    let nobody = connect(&spec, THREE[1]).err().unwrap().to_string();
    assert!(
        nobody.starts_with("lost the task at 127.0.0.1:"),
        "{nobody}"
    );
}

#[test]
fn a_restarted_task_is_noticed_and_the_next_run_works() {
    let spec = cluster(&THREE[..2]);
    let fails = Arc::default();
    let _first = start(&spec, THREE[0], &fails).unwrap();
    let second = start(&spec, THREE[1], &fails).unwrap();
    let client = connect(&spec, THREE[0]).unwrap();
    for order in [[0, 1], [1, 0]] {
        let program = order.map(|i| THREE[i]).join(" ");
        let callable = client.prepare(&Document::from(program)).unwrap();
        client.call(&callable, &[values(1.0)]).unwrap();
    }
    let there_and_not = [[0, 1], [1, 0]].map(|order| {
        let program = order.map(|i| THREE[i]).join(" ");
        client.prepare(&Document::from(program)).unwrap()
    });
    drop(second);
    for callable in &there_and_not {
        let began = Instant::now();
        let error = client.call(callable, &[values(2.0)]).unwrap_err();
        assert_eq!(error.category(), ErrorKind::DeviceFailed, "{error}");
        assert!(
            began.elapsed() < Duration::from_secs(4),
            "{:?}",
            began.elapsed()
        );
    }
    let second = start(&spec, THREE[1], &fails).unwrap();
    for callable in &there_and_not {
        let y = client.call(callable, &[values(3.0)]).unwrap();
        assert_eq!(y[0].as_bytes(), values(3.0).as_bytes());
    }
    // A client that comes after another restart meets no error.
    drop(second);
    let _second = start(&spec, THREE[1], &fails).unwrap();
    let other = connect(&spec, THREE[0]).unwrap();
    for order in [[0, 1], [1, 0]] {
        let program = order.map(|i| THREE[i]).join(" ");
        let callable = other.prepare(&Document::from(program)).unwrap();
        let y = other.call(&callable, &[values(4.0)]).unwrap();
        assert_eq!(y[0].as_bytes(), values(4.0).as_bytes());
    }
}

#[test]
fn others_are_refused_with_the_difference() {
    let spec = cluster(&THREE);
    let fails = Arc::default();
    let _first = start(&spec, THREE[0], &fails).unwrap();
    let twice = start(&spec, THREE[0], &fails).err().unwrap().to_string();
    let expected = "the port is taken; another server, perhaps of the same task, runs there";
    assert!(twice.ends_with(expected), "{twice}");
    // The same tasks but for one address.
    let moved = spec.tasks().map(|(name, address)| {
        let is_last = *name == task(THREE[2]);
        (
            name.clone(),
            if is_last {
                "10.0.0.9:7".to_owned()
            } else {
                address.to_owned()
            },
        )
    });
    let moved = ClusterSpec::new(moved).unwrap();
    let _second = start(&moved, THREE[1], &fails).unwrap();
    let client = connect(&spec, THREE[0]).unwrap();
    let error = client
        .prepare(&Document::from(THREE[..2].join(" ")))
        .unwrap_err();
    let address = spec.address(&task(THREE[2])).unwrap();
    let expected = format!(
        "/job:ps/task:0 and /job:worker/task:0 are of different clusters:\n  /job:worker/task:1: {address} in the cluster of \
         /job:ps/task:0, 10.0.0.9:7 in that of /job:worker/task:0"
    );
    assert_eq!(error.to_string(), expected);
    let far = start(&moved, THREE[2], &fails).err().unwrap();
    assert_eq!(far.category(), ErrorKind::Unsupported);
    let target = format!("grpc://{}", spec.address(&task(THREE[0])).unwrap());
    let other = Client::connect(&target, "2.0".into(), limits().into())
        .err()
        .unwrap();
    let expected =
        "the client is gristmill 2.0 (messages 3), /job:ps/task:0 is gristmill 1.0 (messages 3)";
    assert_eq!(other.to_string(), expected);
    for target in [
        "127.0.0.1:22",
        "grpc://",
        "grpc://:1",
        "grpc://a",
        "grpc://10.0.0.9:7",
    ] {
        assert!(Client::connect(target, "1.0".into(), limits().into()).is_err());
    }
}
