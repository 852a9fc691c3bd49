//! Memory for tensors from task to task: places for their bytes, and little beside.

use crate::distributed::{cluster, open, process, toml};
use crate::process::Serving;
use gristmill::ir::{Graph, GraphBuilder};
use gristmill::{DType, Options, Tensor};
use std::fs;

const MIB: usize = 1 << 20;

/// Bytes of the variable.
const SIZE: usize = 256 * MIB;

const TASKS: [(&str, u32); 2] = [("worker", 0), ("ps", 0)];

/// The first number of a variable of the second task, taken on the first.
fn crossing() -> Graph {
    let mut b = GraphBuilder::new("crossing");
    let v = b.with_device("/job:ps/task:0", |b| {
        b.variable("v", Tensor::zeros(DType::F32, &[SIZE / 4])?)
    });
    let first = b.with_device("/job:worker/task:0", |b| b.slice_axis(v.unwrap(), 0, 0, 1));
    b.output("first", first.unwrap());
    b.finish().unwrap()
}

/// A size of a process in bytes: `VmRSS` now, or `VmHWM` at its most.
fn memory(server: &Serving, field: &str) -> usize {
    let status = fs::read_to_string(format!("/proc/{}/status", server.child.id())).unwrap();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap();
    let number = line.split_whitespace().nth(1).unwrap();
    number.parse::<usize>().unwrap() << 10
}

/// Begins the search for the most memory anew.
fn forget_peak(server: &Serving) {
    fs::write(format!("/proc/{}/clear_refs", server.child.id()), "5").unwrap();
}

#[test]
fn tensors_need_their_places_and_little_more() {
    let folder = tempfile::tempdir().unwrap();
    let spec = cluster(&TASKS);
    fs::write(folder.path().join("cluster.toml"), toml(&spec)).unwrap();
    let servers = TASKS.map(|name| process(folder.path(), name));
    let [start_worker, start_ps] = [0, 1].map(|i| memory(&servers[i], "VmRSS"));
    let session = open(&spec, TASKS[0]).unwrap();
    let program = session.compile(&crossing(), &Options::default()).unwrap();
    let run = || {
        let first = program.run_ordered(&[]).unwrap();
        assert_eq!(first["first"].as_slice::<f32>(), [0.0]);
    };
    run();
    let [worker, ps] = [0, 1].map(|i| memory(&servers[i], "VmHWM"));
    // The contents from the client, the staged tensor, and where the program has it; there the contents are the variable.
    let [worker, ps] = [worker - start_worker, ps - start_ps];
    assert!(worker <= 3 * SIZE + 32 * MIB, "{} MiB", worker / MIB);
    assert!(ps <= SIZE + 32 * MIB, "{} MiB", ps / MIB);
    let before = [0, 1].map(|i| {
        forget_peak(&servers[i]);
        memory(&servers[i], "VmRSS")
    });
    for _ in 0..3 {
        run();
    }
    for (server, before) in servers.iter().zip(before) {
        let more = memory(server, "VmHWM").saturating_sub(before);
        assert!(
            more <= 8 * MIB,
            "{} MiB beside the tensor's places",
            more / MIB
        );
    }
}
