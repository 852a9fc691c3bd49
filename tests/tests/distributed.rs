//! Sessions on clusters of servers: the programs of TensorFlow's chapters on distribution, and what goes wrong.

use crate::process::{Serving, gristmill, serving};
use gristmill::distribute::{ClusterSpec, Server, TaskName, TaskState, VariableState, serve};
use gristmill::ir::{Graph, GraphBuilder, Op, ScalarOp};
use gristmill::place::Fallback;
use gristmill::place::setter::{ReplicaDeviceSetter, replica_device_setter};
use gristmill::testing::Setup;
use gristmill::train::{Sgd, Trainer, Training};
use gristmill::{DType, ErrorKind, Executable, Options, Result, Session, TargetCpu, Tensor};
use std::net::TcpListener;
use std::path::Path;

/// Jobs and numbers of five tasks.
const FIVE: [(&str, u32); 5] = [
    ("ps", 0),
    ("ps", 1),
    ("worker", 0),
    ("worker", 1),
    ("worker", 2),
];

fn task((job, task): (&str, u32)) -> TaskName {
    TaskName {
        job: job.into(),
        task,
    }
}

pub fn cluster(tasks: &[(&str, u32)]) -> ClusterSpec {
    ClusterSpec::local(tasks.iter().map(|name| task(*name))).unwrap()
}

fn serve_all(spec: &ClusterSpec) -> Vec<Server> {
    let settings = Setup::with_threads(1).settings;
    let tasks = spec.tasks().map(|(name, _)| name.clone());
    tasks
        .map(|name| serve(spec.clone(), name, &settings).unwrap())
        .collect()
}

pub fn target(spec: &ClusterSpec, name: (&str, u32)) -> String {
    format!("grpc://{}", spec.address(&task(name)).unwrap())
}

pub fn open(spec: &ClusterSpec, name: (&str, u32)) -> Result<Session> {
    Session::open(&target(spec, name), &Setup::with_threads(1).settings)
}

fn run(session: &Session, graph: Graph, inputs: &[(&str, f32)]) -> Result<Vec<f32>> {
    let compiled = session.compile(&graph, &Options::default())?;
    let inputs = inputs
        .iter()
        .map(|(name, x)| (*name, Tensor::from_slice(&[*x], &[]).unwrap()));
    let outputs = compiled.run(inputs)?;
    Ok(outputs
        .iter()
        .map(|(_, t)| t.as_slice::<f32>()[0])
        .collect())
}

/// `a = x + 0.5` on one device, `b = a + 2` on another, `c = a + b` on the session's.
pub fn four(first: &str, second: &str) -> Graph {
    let mut b = GraphBuilder::new("four");
    let x = b.input("x", DType::F32, [0usize; 0]);
    let (half, two) = (b.scalar(DType::F32, 0.5), b.scalar(DType::F32, 2.0));
    let a = b
        .with_device(first, |b| b.map(ScalarOp::Add, &[x, half]))
        .unwrap();
    let sum = b
        .with_device(second, |b| b.map(ScalarOp::Add, &[a, two]))
        .unwrap();
    let c = b.map(ScalarOp::Add, &[a, sum]).unwrap();
    b.output("c", c);
    b.finish().unwrap()
}

#[test]
fn a_session_on_a_third_task_gives_four() {
    let spec = cluster(&FIVE);
    let _servers = serve_all(&spec);
    let session = open(&spec, ("worker", 2)).unwrap();
    let graph = || four("/job:ps/task:0/cpu:0", "/job:worker/task:1/cpu:0");
    assert_eq!(run(&session, graph(), &[("x", 0.5)]).unwrap(), [4.0]);
    // Many runs of one model, and another client on another task.
    let compiled = session.compile(&graph(), &Options::default()).unwrap();
    for i in 0..50 {
        let x = Tensor::from_slice(&[i as f32], &[]).unwrap();
        let c = compiled.run([("x", x)]).unwrap();
        assert_eq!(c["c"].as_slice::<f32>(), [2.0 * i as f32 + 3.0]);
    }
    let other = open(&spec, ("ps", 1)).unwrap();
    assert_eq!(run(&other, graph(), &[("x", 1.5)]).unwrap(), [6.0]);
}

/// Variables dealt to parameter servers, their sum and its multiples on the first worker.
fn three_six_nine() -> Graph {
    let mut b = GraphBuilder::new("three_six_nine");
    let scope = replica_device_setter(ReplicaDeviceSetter {
        ps_tasks: 2,
        ..ReplicaDeviceSetter::default()
    });
    b.with_device(scope.unwrap(), |b| {
        let one = Tensor::from_slice(&[1.0f32], &[])?;
        let two = Tensor::from_slice(&[2.0f32], &[])?;
        let (v1, v2) = (b.variable("v1", one)?, b.variable("v2", two)?);
        let s = b.map(ScalarOp::Add, &[v1, v2])?;
        let (two, three) = (b.scalar(DType::F32, 2.0), b.scalar(DType::F32, 3.0));
        let p1 = b.map(ScalarOp::Mul, &[s, two])?;
        let p2 = b.map(ScalarOp::Mul, &[s, three])?;
        b.output("s", s);
        b.output("p1", p1);
        b.output("p2", p2);
        Ok(())
    })
    .unwrap();
    b.finish().unwrap()
}

#[test]
fn two_parameter_servers_give_three_six_and_nine() {
    let spec = cluster(&FIVE);
    let _servers = serve_all(&spec);
    let session = open(&spec, ("ps", 0)).unwrap();
    assert_eq!(
        run(&session, three_six_nine(), &[]).unwrap(),
        [3.0, 6.0, 9.0]
    );
}

/// Products with two matrices of 6 MB, one on each of two devices.
fn products(devices: [&str; 2], batch: usize) -> Graph {
    const N: usize = 1224;
    let mut b = GraphBuilder::new("products");
    let x = b.input("x", DType::F32, [batch, N]);
    let mut value = x;
    for (i, device) in devices.into_iter().enumerate() {
        let element = |k: usize| ((k * 31 + i) % 17) as f32 / 64.0 - 0.125;
        let elements: Vec<f32> = (0..N * N).map(element).collect();
        let w = b.constant(Tensor::from_slice(&elements, &[N, N]).unwrap());
        value = b.with_device(device, |b| b.matmul(value, w)).unwrap();
    }
    b.output("y", value);
    b.finish().unwrap()
}

#[test]
fn weights_and_inputs_of_any_size_cross() {
    let spec = cluster(&FIVE[..3]);
    let _servers = serve_all(&spec);
    let local = Setup::with_threads(1).session();
    for (session, batch) in [(0, 1), (1, 1100), (2, 20)] {
        let session = open(&spec, FIVE[session]).unwrap();
        let x: Vec<f32> = (0..batch * 1224).map(|i| (i % 13) as f32 / 8.0).collect();
        let x = Tensor::from_slice(&x, &[batch, 1224]).unwrap();
        let on_servers = ["/job:ps/task:0", "/job:ps/task:1"];
        let both = [(&session, on_servers), (&local, ["", ""])];
        let [far, here] = both.map(|(session, devices)| {
            let graph = products(devices, batch);
            let compiled = session.compile(&graph, &Options::default()).unwrap();
            compiled.run([("x", x.clone())]).unwrap()["y"].clone()
        });
        assert_eq!(far.as_bytes(), here.as_bytes());
    }
}

/// A counter on a device: its value after one more.
fn counter(device: &str) -> Graph {
    let mut b = GraphBuilder::new("counter");
    let count = b.with_device(device, |b| {
        let count = b.variable("count", Tensor::from_slice(&[0.0f32], &[])?)?;
        let one = b.scalar(DType::F32, 1.0);
        let next = b.map(ScalarOp::Add, &[count, one])?;
        b.assign_variable("count", next)
    });
    b.output("count", count.unwrap());
    b.finish().unwrap()
}

#[test]
fn a_variable_outlives_its_session_on_the_server() {
    let spec = cluster(&FIVE);
    let _servers = serve_all(&spec);
    let on_ps = || counter("/job:ps/task:1");
    let first = open(&spec, ("worker", 0)).unwrap();
    assert_eq!(run(&first, on_ps(), &[]).unwrap(), [1.0]);
    drop(first);
    let second = open(&spec, ("worker", 1)).unwrap();
    assert_eq!(run(&second, on_ps(), &[]).unwrap(), [2.0]);
    // Another task's variable of the name is another variable, and a local session shares nothing.
    assert_eq!(run(&second, counter("/cpu:0"), &[]).unwrap(), [1.0]);
    let local = || Setup::with_threads(1).session();
    assert_eq!(run(&local(), counter("/cpu:0"), &[]).unwrap(), [1.0]);
    assert_eq!(run(&local(), counter("/cpu:0"), &[]).unwrap(), [1.0]);
}

/// Variables of a task, `CONTAINER/NAME dtype[shape]`, or its error.
fn variables(tasks: &[TaskState], name: (&str, u32)) -> Vec<String> {
    let found = tasks.iter().find(|t| t.name == task(name)).unwrap();
    match &found.state {
        Err(e) => vec![e.to_string()],
        Ok(running) => {
            let text = |v: &VariableState| {
                let shape = v.shape.as_ref().map_or("none".into(), |s| format!("{s:?}"));
                format!("{}/{} {}{shape}", v.container, v.name, v.dtype)
            };
            running.variables.iter().map(text).collect()
        }
    }
}

#[test]
fn variables_are_listed_and_set_to_initial_values() {
    let spec = cluster(&FIVE[..3]);
    let mut servers = serve_all(&spec);
    let session = open(&spec, ("worker", 0)).unwrap();
    let compiled = |device: &str, container: &str| {
        let options = Options {
            container: container.into(),
            ..Options::default()
        };
        let compiled = session.compile(&counter(device), &options).unwrap();
        compiled.for_inputs(&[]).unwrap()
    };
    let [first, second] = [("/job:ps/task:0", ""), ("/job:ps/task:1", "of my own")]
        .map(|(device, container)| compiled(device, container));
    let count = |counter: &Executable| counter.run(&[]).unwrap()["count"].as_slice::<f32>()[0];
    assert_eq!(
        [&first, &second, &first, &second].map(|c| count(c)),
        [1.0, 1.0, 2.0, 2.0]
    );
    let tasks = session.cluster_tasks().unwrap();
    assert_eq!(variables(&tasks, ("ps", 0)), ["/count f32[]"]);
    assert_eq!(variables(&tasks, ("ps", 1)), ["of my own/count f32[]"]);
    assert_eq!(variables(&tasks, ("worker", 0)), [""; 0]);
    let devices = tasks
        .iter()
        .map(|t| t.state.as_ref().unwrap().devices.len());
    assert_eq!(devices.collect::<Vec<_>>(), [1, 1, 1]);
    // A container, then a model.
    session.cluster_tasks_after_reset(&["of my own"]).unwrap();
    assert_eq!([&first, &second].map(|c| count(c)), [3.0, 1.0]);
    first.initialise().unwrap();
    assert_eq!([&first, &second].map(|c| count(c)), [1.0, 2.0]);
    // Variables of one model on two tasks, changed by others.
    let sum = session
        .compile(&three_six_nine(), &Options::default())
        .unwrap();
    let sum = sum.for_inputs(&[]).unwrap();
    for (name, device) in [("v1", "/job:ps/task:0"), ("v2", "/job:ps/task:1")] {
        let mut b = GraphBuilder::new(name);
        let twice = b.with_device(device, |b| {
            let v = b.variable(name, Tensor::from_slice(&[0.0f32], &[])?)?;
            let twice = b.map(ScalarOp::Add, &[v, v])?;
            b.assign_variable(name, twice)
        });
        b.output("v", twice.unwrap());
        run(&session, b.finish().unwrap(), &[]).unwrap();
    }
    let s = |e: &Executable| e.run(&[]).unwrap()["s"].as_slice::<f32>()[0];
    assert_eq!(s(&sum), 6.0);
    sum.initialise().unwrap();
    assert_eq!(s(&sum), 3.0);
    // A local model does the same; a local session has no tasks.
    let local = Setup::with_threads(1).session();
    let here = local.compile(&counter(""), &Options::default()).unwrap();
    let here = here.for_inputs(&[]).unwrap();
    assert_eq!([count(&here), count(&here)], [1.0, 2.0]);
    here.initialise().unwrap();
    assert_eq!(count(&here), 1.0);
    let none = local.cluster_tasks().unwrap_err();
    assert_eq!(none.kind(), ErrorKind::InvalidInput);
    // A task without an answer has an error in its place.
    drop(servers.remove(1));
    let tasks = session.cluster_tasks_after_reset(&[""]).unwrap();
    let lost = &variables(&tasks, ("ps", 1))[0];
    assert!(lost.starts_with("lost /job:ps/task:1 at "), "{lost}");
    assert_eq!(count(&first), 1.0);
}

/// `count` of one task, assigned, times `factor` of another task.
fn scaled_count() -> Graph {
    let mut b = GraphBuilder::new("scaled_count");
    let factor = b.with_device("/job:ps/task:1", |b| {
        b.variable("factor", Tensor::from_slice(&[10.0f32], &[])?)
    });
    let product = b.with_device("/job:ps/task:0", |b| {
        let count = b.variable("count", Tensor::from_slice(&[0.0f32], &[])?)?;
        let one = b.scalar(DType::F32, 1.0);
        let next = b.map(ScalarOp::Add, &[count, one])?;
        let next = b.assign_variable("count", next)?;
        b.map(ScalarOp::Mul, &[next, factor?])
    });
    b.output("product", product.unwrap());
    b.finish().unwrap()
}

#[test]
fn variables_of_a_restarted_task_are_lost_until_they_are_set() {
    let spec = cluster(&FIVE[..3]);
    let settings = Setup::with_threads(1).settings;
    let mut servers = serve_all(&spec);
    let sessions = [0, 1].map(|_| open(&spec, ("worker", 0)).unwrap());
    let compiled = |session: &Session, graph: &Graph| {
        let compiled = session.compile(graph, &Options::default()).unwrap();
        compiled.for_inputs(&[]).unwrap()
    };
    let run = |model: &Executable| {
        let outputs = model.run(&[])?;
        let (_, value) = outputs.iter().next().unwrap();
        Ok::<f32, gristmill::Error>(value.as_slice::<f32>()[0])
    };
    let scaled = sessions.each_ref().map(|s| compiled(s, &scaled_count()));
    let plain = counter("/job:ps/task:0/cpu:0");
    let plain = sessions.each_ref().map(|s| compiled(s, &plain));
    assert_eq!(run(&scaled[0]).unwrap(), 10.0);
    assert_eq!(run(&plain[0]).unwrap(), 2.0);
    // The second session has not used the count so far.
    drop(servers.remove(0));
    let lost = run(&scaled[0]).unwrap_err();
    assert_eq!(lost.kind(), ErrorKind::DeviceFailed);
    assert!(
        lost.to_string().contains("lost /job:ps/task:0 at "),
        "{lost}"
    );
    servers.push(serve(spec.clone(), task(FIVE[0]), &settings).unwrap());
    let without = "/job:ps/task:0 was restarted, and the values of \"count\" that this session has used are lost \
        (try: set the model's variables to their initial values, or open another session)";
    for model in [&scaled[0], &plain[0], &scaled[0]] {
        let error = run(model).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DeviceFailed);
        assert_eq!(error.to_string(), without);
    }
    assert_eq!(run(&plain[1]).unwrap(), 1.0);
    assert_eq!(run(&scaled[1]).unwrap(), 20.0);
    // Values of the other session count, until the first one sets its own.
    assert!(run(&plain[0]).is_err());
    plain[0].initialise().unwrap();
    assert_eq!(run(&scaled[0]).unwrap(), 10.0);
    assert_eq!(run(&plain[1]).unwrap(), 2.0);
    // A reset of the container is as good.
    let last = servers.pop();
    drop(last);
    servers.push(serve(spec.clone(), task(FIVE[0]), &settings).unwrap());
    for model in &plain {
        assert_eq!(run(model).unwrap_err().to_string(), without);
    }
    sessions[1].cluster_tasks_after_reset(&[""]).unwrap();
    assert_eq!(run(&plain[1]).unwrap(), 1.0);
    assert_eq!(run(&plain[0]).unwrap_err().to_string(), without);
    // Values after the reset can be lost as well.
    let last = servers.pop();
    drop(last);
    servers.push(serve(spec.clone(), task(FIVE[0]), &settings).unwrap());
    assert_eq!(run(&plain[1]).unwrap_err().to_string(), without);
    let third = open(&spec, ("ps", 1)).unwrap();
    assert_eq!(run(&compiled(&third, &scaled_count())).unwrap(), 10.0);
}

/// Adds to a variable on one task 1 and, from another task, the least of another variable and 0. `index` picks an element of a list of three
/// there.
fn add_from(own: (&str, &str), other: (&str, &str)) -> Graph {
    let mut b = GraphBuilder::new("add_from");
    let index = b.input("index", DType::I64, [0usize; 0]);
    let zero = || Tensor::from_slice(&[0.0f32], &[]).unwrap();
    let from = b.with_device(other.1, |b| {
        let v = b.variable(other.0, zero())?;
        let list = b.constant(Tensor::from_slice(&[0.0f32, 0.0, 0.0], &[3])?);
        let op = Op::Gather { axis: 0 };
        let picked = b.add(op, &[list, index])?;
        b.output("picked", picked[0]);
        let none = b.scalar(DType::F32, 0.0);
        b.map(ScalarOp::Min, &[v, none])
    });
    let next = b.with_device(own.1, |b| {
        let v = b.variable(own.0, zero())?;
        let one = b.scalar(DType::F32, 1.0);
        let sum = b.map(ScalarOp::Add, &[v, one])?;
        let sum = b.map(ScalarOp::Add, &[sum, from.unwrap()])?;
        b.assign_variable(own.0, sum)
    });
    b.output("next", next.unwrap());
    b.finish().unwrap()
}

/// Adds 1 to a variable on one task, and picks an element of a list of three on another.
fn count_and_pick(own: (&str, &str), other: &str) -> Graph {
    let mut b = GraphBuilder::new("count_and_pick");
    let index = b.input("index", DType::I64, [0usize; 0]);
    let next = b.with_device(own.1, |b| {
        let v = b.variable(own.0, Tensor::from_slice(&[0.0f32], &[])?)?;
        let one = b.scalar(DType::F32, 1.0);
        let sum = b.map(ScalarOp::Add, &[v, one])?;
        b.assign_variable(own.0, sum)
    });
    b.output("next", next.unwrap());
    let picked = b.with_device(other, |b| {
        let list = b.constant(Tensor::from_slice(&[1.0f32, 2.0, 3.0], &[3])?);
        b.add(Op::Gather { axis: 0 }, &[list, index])
    });
    b.output("picked", picked.unwrap()[0]);
    b.finish().unwrap()
}

#[test]
fn a_step_over_tasks_assigns_once_all_are_done() {
    let spec = cluster(&FIVE[..3]);
    let _servers = serve_all(&spec);
    let [v, w] = [("v", "/job:ps/task:0"), ("w", "/job:ps/task:1")];
    let session = open(&spec, ("worker", 0)).unwrap();
    // The assigned value depends on the other task, or on nothing there: then its part may be done when the other one fails.
    let mut expected = 0.0;
    for graph in [add_from(v, w), count_and_pick(v, w.1)] {
        let compiled = session.compile(&graph, &Options::default()).unwrap();
        let run = |index: i64| {
            let index = Tensor::from_slice(&[index], &[]).unwrap();
            let ran = compiled.run([("index", index)]);
            ran.map(|outputs| outputs["next"].as_slice::<f32>()[0])
        };
        expected += 2.0;
        assert_eq!(
            [run(0).unwrap(), run(2).unwrap()],
            [expected - 1.0, expected]
        );
        for _ in 0..20 {
            let failed = run(7).unwrap_err();
            assert_eq!(failed.kind(), ErrorKind::InvalidInput, "{failed}");
            assert!(failed.to_string().contains("/job:ps/task:1"), "{failed}");
        }
        expected += 1.0;
        assert_eq!(run(1).unwrap(), expected);
    }
}

#[test]
fn turns_on_several_tasks_are_never_in_a_circle() {
    let spec = cluster(&FIVE[..3]);
    let _servers = serve_all(&spec);
    let [v, w] = [("v", "/job:ps/task:0"), ("w", "/job:ps/task:1")];
    let read = || {
        let mut b = GraphBuilder::new("read");
        for (name, device) in [w, v] {
            let zero = Tensor::from_slice(&[0.0f32], &[]).unwrap();
            let value = b.with_device(device, |b| b.variable(name, zero)).unwrap();
            b.output(name, value);
        }
        b.finish().unwrap()
    };
    const N: usize = 60;
    let steps: [(&str, u32, Graph); 6] = [
        ("ps", 0, add_from(v, w)),
        ("ps", 1, add_from(w, v)),
        ("worker", 0, add_from(v, w)),
        ("worker", 0, add_from(w, v)),
        ("ps", 0, read()),
        ("ps", 1, read()),
    ];
    std::thread::scope(|scope| {
        for (job, number, graph) in &steps {
            let session = open(&spec, (*job, *number)).unwrap();
            let compiled = session.compile(graph, &Options::default()).unwrap();
            scope.spawn(move || {
                let mut before = [0.0f32; 2];
                for i in 0..N {
                    let index = Tensor::from_slice(&[i as i64 % 3], &[]).unwrap();
                    if !compiled.inputs().is_empty() {
                        compiled.run([("index", index)]).unwrap();
                        continue;
                    }
                    let read = compiled.run([] as [(&str, Tensor); 0]).unwrap();
                    let now = ["v", "w"].map(|name| read[name].as_slice::<f32>()[0]);
                    assert!(
                        now[0] >= before[0] && now[1] >= before[1],
                        "{before:?}, {now:?}"
                    );
                    before = now;
                }
            });
        }
    });
    let session = open(&spec, ("worker", 0)).unwrap();
    let sums = session.compile(&read(), &Options::default()).unwrap();
    let sums = sums.run([] as [(&str, Tensor); 0]).unwrap();
    let sums = ["v", "w"].map(|name| sums[name].as_slice::<f32>()[0]);
    assert_eq!(sums, [2.0 * N as f32; 2]);
}

#[test]
fn what_a_cluster_does_not_do_is_said() {
    let spec = cluster(&FIVE[..3]);
    let _servers = serve_all(&spec);
    let session = open(&spec, ("worker", 0)).unwrap();
    let error = |graph: Graph| session.compile(&graph, &Options::default()).err().unwrap();
    let unknown = error(four("/job:chief/task:0", "/cpu:0"));
    let expected = "/job:chief/task:0 is not in the cluster: its jobs are ps, worker";
    assert_eq!(unknown.to_string(), expected);
    let unknown = error(four("/job:ps/task:7", "/cpu:0"));
    let expected = "/job:ps/task:7 is not in the cluster: tasks of ps are 0, 1";
    assert_eq!(unknown.to_string(), expected);
    let no_gpu = error(four("/job:ps/task:1/gpu:0", "/cpu:0"));
    assert_eq!(no_gpu.kind(), ErrorKind::InvalidInput);
    assert!(
        no_gpu
            .to_string()
            .contains("/job:ps/replica:0/task:1/device:CPU:0"),
        "{no_gpu}"
    );
    let options = Options {
        fallback: Fallback::Warn,
        ..Options::default()
    };
    let soft = session
        .compile(&four("/job:ps/task:1/gpu:0", "/cpu:0"), &options)
        .unwrap();
    let x = Tensor::from_slice(&[0.5f32], &[]).unwrap();
    let executable = soft.for_inputs(&[x]).unwrap();
    let warnings = executable.lowered.report.warnings.join("\n");
    assert!(warnings.to_lowercase().contains("gpu:0"), "{warnings:?}");
    // A step that assigns on two tasks.
    let mut b = GraphBuilder::new("both");
    for (name, device) in [("v", "/job:ps/task:0"), ("w", "/job:ps/task:1")] {
        let next = b.with_device(device, |b| {
            let v = b.variable(name, Tensor::from_slice(&[0.0f32], &[])?)?;
            let next = b.map(ScalarOp::Exp, &[v])?;
            b.assign_variable(name, next)
        });
        b.output(name, next.unwrap());
    }
    let both = error(b.finish().unwrap());
    assert_eq!(both.kind(), ErrorKind::Unsupported);
    let expected = "a model assigns variables on /job:ps/task:0 and /job:ps/task:1; on more than one task this is not supported yet";
    assert!(both.to_string().contains(expected), "{both}");
    let options = Options {
        keep_stages: true,
        ..Options::default()
    };
    let stages = session
        .compile(&four("/cpu:0", "/cpu:0"), &options)
        .err()
        .unwrap();
    assert_eq!(stages.kind(), ErrorKind::Unsupported);
    let options = Options {
        target_cpu: TargetCpu::parse("x86-64-v2").unwrap(),
        ..Options::default()
    };
    let level = session.compile(&four("/cpu:0", "/cpu:0"), &options);
    assert_eq!(level.err().unwrap().kind(), ErrorKind::Unsupported);
    let trained = Trainer::in_session(&session, "none", &Training::from(Sgd::default()), |_| {
        panic!("the graph is not built")
    });
    let trained = trained.err().unwrap().to_string();
    assert!(
        trained.starts_with("training is not supported in a session on a cluster"),
        "{trained}"
    );
    let nobody = Session::open("grpc://127.0.0.1:1", &Setup::with_threads(1).settings);
    let nobody = nobody.err().unwrap();
    assert_eq!(nobody.kind(), ErrorKind::DeviceFailed);
    assert!(
        nobody
            .to_string()
            .starts_with("lost the task at 127.0.0.1:1: "),
        "{nobody}"
    );
}

/// A cluster as its file.
pub fn toml(spec: &ClusterSpec) -> String {
    let jobs = spec.jobs().into_iter().map(|job| {
        let own = spec.tasks().filter(|(name, _)| name.job == job);
        let own: Vec<String> = own
            .map(|(name, at)| format!("{} = {at:?}", name.task))
            .collect();
        format!("{job} = {{ {} }}\n", own.join(", "))
    });
    format!("[jobs]\n{}", jobs.collect::<String>())
}

/// Starts a server as a process.
pub fn process(folder: &Path, name: (&str, u32)) -> Serving {
    let number = name.1.to_string();
    let args = [
        "server",
        "--job",
        name.0,
        "--task",
        &number,
        "--threads",
        "1",
        "--cluster",
        "cluster.toml",
    ];
    serving(folder, &[], &args)
}

#[test]
fn three_processes_give_four() {
    let folder = tempfile::tempdir().unwrap();
    let three = [FIVE[0], FIVE[3], FIVE[4]];
    let spec = cluster(&three);
    std::fs::write(folder.path().join("cluster.toml"), toml(&spec)).unwrap();
    let servers = three.map(|name| process(folder.path(), name));
    for (server, name) in servers.iter().zip(three) {
        let expected = format!(
            "serving {} as {}, incarnation ",
            target(&spec, name),
            task(name)
        );
        assert!(server.line.starts_with(&expected), "{}", server.line);
    }
    let graph = four("/job:ps/task:0/cpu:0", "/job:worker/task:1/cpu:0");
    std::fs::write(folder.path().join("four.ir"), graph.to_string()).unwrap();
    let x = Tensor::from_slice(&[0.5f32], &[]).unwrap();
    gristmill::write_npz(folder.path().join("x.npz"), [("x", &x)]).unwrap();
    let session = target(&spec, three[2]);
    let args = [
        "run",
        "four.ir",
        "--inputs",
        "x.npz",
        "--session",
        &session,
        "--log-device-placement",
        "--outputs",
        "c.npz",
    ];
    let ran = gristmill(folder.path(), &args);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    let outputs = gristmill::read_npz(folder.path().join("c.npz")).unwrap();
    assert_eq!(outputs[0].1.as_slice::<f32>(), [4.0]);
    for device in [
        "/job:ps/replica:0/task:0/",
        "/job:worker/replica:0/task:1/",
        "/job:worker/replica:0/task:2/",
    ] {
        assert!(ran.stderr.contains(device), "{}", ran.stderr);
    }
    let hasty = [&args[..], &["--step-timeout", "0ms"]].concat();
    let late = gristmill(folder.path(), &hasty);
    assert_eq!(late.code, Some(6), "{}", late.stderr);
    assert!(
        late.stderr
            .contains("a run took longer than 0ns, and waits for "),
        "{}",
        late.stderr
    );
    let listed = gristmill(folder.path(), &["devices", "--session", &session]);
    assert_eq!(listed.code, Some(0), "{}", listed.stderr);
    for name in three {
        let device = format!("  {}/device:CPU:0\n", task(name));
        assert!(listed.stdout.contains(&device), "{}", listed.stdout);
    }
    // A counter from three processes of clients.
    let one = counter("/job:ps/task:0/cpu:0").to_string();
    std::fs::write(folder.path().join("counter.ir"), one).unwrap();
    let count = |more: &[&str]| {
        let args = [
            "run",
            "counter.ir",
            "--session",
            &session,
            "--outputs",
            "n.npz",
        ];
        let ran = gristmill(folder.path(), &[&args[..], more].concat());
        assert_eq!(ran.code, Some(0), "{}", ran.stderr);
        let n = gristmill::read_npz(folder.path().join("n.npz")).unwrap();
        n[0].1.as_slice::<f32>()[0]
    };
    assert_eq!(
        [count(&[]), count(&[]), count(&["--initialise"])],
        [1.0, 2.0, 1.0]
    );
    let reset = ["variables", "--session", &session, "--reset", ""];
    let listed = gristmill(folder.path(), &reset);
    assert_eq!(listed.code, Some(0), "{}", listed.stderr);
    let expected = format!(
        "{}\n  count: f32[]\n{}\n  no variables\n{}\n  no variables\n",
        task(three[0]),
        task(three[1]),
        task(three[2])
    );
    assert_eq!(listed.stdout, expected);
    assert_eq!(count(&[]), 1.0);
    // A model without devices of its own, with pins: as on one machine.
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/data/digits/model.onnx");
    let args = ["run", model, "--set", "batch=3", "--outputs", "here.npz"];
    assert_eq!(gristmill(folder.path(), &args).code, Some(0));
    let pins = [PINNED[0], "--pin", PINNED[1]];
    let args = [
        "run",
        model,
        "--set",
        "batch=3",
        "--expect",
        "here.npz",
        "--session",
        &session,
        "--pin",
    ];
    let ran = gristmill(folder.path(), &[&args[..], &pins].concat());
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
}

/// Pins of the digits model.
const PINNED: [&str; 2] = [
    "Conv=/job:ps/task:0/cpu:0",
    "linear=/job:worker/task:1/cpu:0",
];

#[test]
fn the_script_of_host_lists_serves_and_odd_lists_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let spec = cluster(&[("ps", 0), ("ps", 1), ("worker", 0)]);
    let hosts: Vec<&str> = spec.tasks().map(|(_, address)| address).collect();
    let both = format!("{},{}", hosts[0], hosts[1]);
    let start = |job: &str, index: &str, ps: &str| {
        let (job, index) = (format!("--job_name={job}"), format!("--task_index={index}"));
        let (ps, workers) = (
            format!("--ps_hosts={ps}"),
            format!("--worker_hosts={}", hosts[2]),
        );
        serving(
            folder.path(),
            &[],
            &["server", &ps, &workers, &job, &index, "--threads=1"],
        )
    };
    // The worker of the script has one host where the others have two.
    let _servers = [
        start("ps", "0", &both),
        start("ps", "1", &both),
        start("worker", "0", hosts[0]),
    ];
    let open = |host| Session::open(&format!("grpc://{host}"), &Setup::with_threads(1).settings);
    let session = open(hosts[0]).unwrap();
    let graph = four("/job:ps/task:1", "/cpu:0");
    assert_eq!(run(&session, graph, &[("x", 0.5)]).unwrap(), [4.0]);
    let odd = run(&session, four("/job:worker", "/cpu:0"), &[("x", 0.5)]).unwrap_err();
    let expected = format!(
        "/job:ps/task:0 and /job:worker/task:0 are of different clusters:\n  /job:ps/task:1: {} in the cluster of /job:ps/task:0, nothing \
         in that of /job:worker/task:0 (try: give all tasks the same cluster)",
        hosts[1]
    );
    assert_eq!(odd.to_string(), expected);
    let config =
        r#"{"cluster": {"worker": ["127.0.0.1:HERE"]}, "task": {"type": "worker", "index": 0}}"#;
    let one = cluster(&[("worker", 0)]);
    let port = one
        .address(&task(("worker", 0)))
        .unwrap()
        .rsplit_once(':')
        .unwrap()
        .1;
    let config = config.replace("HERE", port);
    let server = serving(folder.path(), &[("TF_CONFIG", &config)], &["server"]);
    assert!(
        server.line.contains("as /job:worker/task:0, "),
        "{}",
        server.line
    );
}

#[test]
fn servers_that_cannot_start_say_why() {
    let folder = tempfile::tempdir().unwrap();
    let file = |text: &str| std::fs::write(folder.path().join("cluster.toml"), text).unwrap();
    let error = |args: &[&str]| {
        let all = [&["server", "--cluster", "cluster.toml"], args].concat();
        let ended = gristmill(folder.path(), &all);
        (ended.code, ended.stderr)
    };
    file("[jobs]\nworker = [\"127.0.0.1:4711\", \"10.1.2.3:4711\"]\n");
    let (code, said) = error(&["--job", "ps", "--task", "0"]);
    assert_eq!(code, Some(2));
    assert!(
        said.contains("/job:ps/task:0 is not in the cluster: its jobs are worker"),
        "{said}"
    );
    let (code, said) = error(&[]);
    assert_eq!(code, Some(2));
    assert!(said.contains("which task is this?"), "{said}");
    let (code, said) = error(&["--job", "worker", "--task", "1"]);
    assert_eq!(code, Some(3));
    assert!(
        said.contains("10.1.2.3, which other machines reach"),
        "{said}"
    );
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    file(&format!(
        "[jobs]\nworker = [\"{}\"]\n",
        taken.local_addr().unwrap()
    ));
    let (code, said) = error(&["--job", "worker", "--task", "0"]);
    assert_eq!(code, Some(2));
    assert!(said.contains("the port is taken"), "{said}");
    let nobody = ["run", "m.ir", "--session", "grpc://127.0.0.1:1"];
    std::fs::write(folder.path().join("m.ir"), four("", "").to_string()).unwrap();
    let ended = gristmill(folder.path(), &nobody);
    assert_eq!(ended.code, Some(6));
    for flag in [
        ["--devices", "cpu:2"],
        ["--target-cpu", "x86-64-v2"],
        ["--budget", "1s"],
    ] {
        let both = [&nobody[..], &flag].concat();
        assert_eq!(gristmill(folder.path(), &both).code, Some(2), "{flag:?}");
    }
    let compiled = gristmill(folder.path(), &["compile", "m.ir", "-o", "m.gmx"]);
    assert_eq!(compiled.code, Some(0), "{}", compiled.stderr);
    let image = gristmill(
        folder.path(),
        &["run", "m.gmx", "--session", "grpc://127.0.0.1:1"],
    );
    assert_eq!(image.code, Some(2));
    assert!(
        image.stderr.contains("an image holds machine code"),
        "{}",
        image.stderr
    );
}
