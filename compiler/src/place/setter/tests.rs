//! Who gets which task or device.

use super::*;
use crate::DType;
use crate::ir::{Dim, GraphBuilder, ScalarOp};

/// Adds a read of a variable, an assignment to it, or (without a name) a plain node, and gives its
/// device.
enum Step {
    Read(&'static str, DType, usize),
    Assign(&'static str),
    Plain,
}
use Step::{Assign, Plain, Read};

fn devices(scope: DeviceScope, steps: &[(Step, &str)]) -> Result<Vec<String>> {
    let mut b = GraphBuilder::new("g");
    let x = b.input("x", DType::F32, [2usize]);
    let container = String::new;
    b.with_device(scope, |b| {
        for (step, own) in steps {
            b.with_device(*own, |b| match step {
                Read(name, dtype, n) => {
                    let (name, shape) = ((*name).to_owned(), vec![(*n).into()]);
                    b.add1(
                        Op::ReadVariable {
                            container: container(),
                            name,
                            dtype: *dtype,
                            shape,
                            initial: None,
                        },
                        &[],
                    )
                }
                Assign(name) => b.add1(
                    Op::AssignVariable {
                        container: container(),
                        name: (*name).into(),
                    },
                    &[x],
                ),
                Plain => b.map(ScalarOp::Exp, &[x]),
            })?;
        }
        Ok(())
    })?;
    let text = |n: &crate::ir::Node| {
        n.device
            .as_ref()
            .map_or(String::new(), |d| d.spec.to_string())
    };
    Ok(b.graph().nodes().map(|(_, n)| text(n)).collect())
}

fn setter(ps_tasks: usize) -> ReplicaDeviceSetter {
    ReplicaDeviceSetter {
        ps_tasks,
        ..ReplicaDeviceSetter::default()
    }
}

fn read(name: &'static str) -> Step {
    Read(name, DType::F32, 2)
}

#[test]
fn variables_go_round_the_parameter_servers() {
    let scope = replica_device_setter(setter(2)).unwrap();
    let steps = [
        (read("a"), ""),
        (Plain, ""),
        (Assign("a"), ""),
        (read("b"), ""),
        (read("c"), "/cpu:0"),
        (Assign("d"), ""),
        (read("b"), ""),
        (Plain, "/task:3/gpu:0"),
    ];
    assert_eq!(
        devices(scope, &steps).unwrap(),
        [
            "/job:ps/task:0",
            "/job:worker",
            "/job:ps/task:0",
            "/job:ps/task:1",
            "/job:ps/task:0/device:CPU:0",
            "/job:ps/task:1",
            "/job:ps/task:1",
            "/job:worker/task:3/device:GPU:0",
        ]
    );
}

#[test]
fn own_fields_count_more_and_another_job_is_not_counted() {
    let scope = replica_device_setter(setter(3)).unwrap();
    let steps = [
        (read("a"), "/job:other"),
        (read("b"), "/job:ps/task:7"),
        (read("c"), ""),
        (read("d"), "/job:ps"),
    ];
    let found = devices(scope, &steps).unwrap();
    assert_eq!(
        found,
        [
            "/job:other",
            "/job:ps/task:7",
            "/job:ps/task:1",
            "/job:ps/task:2"
        ]
    );
    // Without a job to go to, no task is chosen.
    let scope = replica_device_setter(ReplicaDeviceSetter {
        ps_device: "/cpu:0".into(),
        ..setter(2)
    })
    .unwrap();
    assert_eq!(
        devices(scope, &[(read("a"), ""), (Plain, "")]).unwrap(),
        ["/device:CPU:0", "/job:worker"]
    );
    let scope = replica_device_setter(ReplicaDeviceSetter {
        merge_devices: false,
        ..setter(2)
    })
    .unwrap();
    assert_eq!(
        devices(
            scope,
            &[(read("a"), "/cpu:0"), (Plain, "/gpu:1"), (read("b"), "")]
        )
        .unwrap(),
        ["/device:CPU:0", "/device:GPU:1", "/job:ps/task:0"]
    );
}

#[test]
fn the_cluster_says_how_many_servers_there_are() {
    let cluster = |job: &str, n: usize| {
        Some(BTreeMap::from([(
            job.to_owned(),
            vec!["host:1".to_owned(); n],
        )]))
    };
    for (ps_tasks, cluster, expected) in [
        (0, None, ["", "", ""]),
        (1, cluster("worker", 2), ["", "", ""]),
        (1, cluster("ps", 0), ["", "", ""]),
        (
            1,
            cluster("ps", 2),
            ["/job:ps/task:0", "/job:ps/task:1", "/job:worker"],
        ),
    ] {
        let scope = replica_device_setter(ReplicaDeviceSetter {
            cluster,
            ..setter(ps_tasks)
        })
        .unwrap();
        assert_eq!(
            devices(scope, &[(read("a"), ""), (read("b"), ""), (Plain, "")]).unwrap(),
            expected
        );
    }
    assert!(
        replica_device_setter(ReplicaDeviceSetter {
            worker_device: "/tpu".into(),
            ..setter(1)
        })
        .is_err()
    );
}

#[test]
fn the_least_loaded_server_is_next() {
    let steps = || {
        [
            (Read("a", DType::F64, 10), ""),
            (Read("b", DType::F32, 12), ""),
            (Read("c", DType::F32, 1), ""),
            (Read("d", DType::F32, 5), ""),
            (Read("e", DType::F32, 100), ""),
        ]
    };
    let tasks = |strategy: Strategy| -> Vec<String> {
        let scope = replica_device_setter(ReplicaDeviceSetter {
            ps_strategy: strategy,
            ..setter(2)
        })
        .unwrap();
        let found = devices(scope, &steps()).unwrap();
        found
            .iter()
            .map(|d| d.strip_prefix("/job:ps/task:").unwrap().to_owned())
            .collect()
    };
    // Bytes: 80 | 48, 52, 72 | ..; elements: 10 | 12; 11; 16 | ..
    assert_eq!(tasks(Strategy::greedy_bytes()), ["0", "1", "1", "1", "1"]);
    assert_eq!(
        tasks(Strategy::Greedy(Box::new(result_elements))),
        ["0", "1", "0", "0", "1"]
    );
}

#[test]
fn bytes_need_one_result_of_known_shape() {
    let mut b = GraphBuilder::new("g");
    let x = b.input("x", DType::F32, [Dim::symbol("n")]);
    let v = b.input("v", DType::F32, [4usize]);
    let mut error = |f: &dyn Fn(&mut GraphBuilder) -> Result<()>| {
        b.with_device(
            spread(&["cpu:0", "cpu:1"], Strategy::greedy_bytes()).unwrap(),
            f,
        )
        .unwrap_err()
        .to_string()
    };
    let e = error(&|b| b.map(ScalarOp::Exp, &[x]).map(drop));
    assert!(
        e.contains("exp: shape of f32[n] must be fully defined"),
        "{e}"
    );
    let e = error(&|b| {
        b.add(
            Op::TopK {
                k: 2.into(),
                axis: 0,
                largest: true,
            },
            &[v],
        )
        .map(drop)
    });
    assert!(
        e.contains("top_k must have a single output, it has 2"),
        "{e}"
    );
}

#[test]
fn nodes_are_spread_over_devices() {
    let scope = spread(&["/gpu:0", "/gpu:1"], Strategy::RoundRobin).unwrap();
    let steps = [(Plain, ""), (Plain, "/cpu"), (Plain, "/job:a"), (Plain, "")];
    assert_eq!(
        devices(scope, &steps).unwrap(),
        [
            "/device:GPU:0",
            "/device:CPU:*",
            "/job:a/device:GPU:1",
            "/device:GPU:0"
        ]
    );
    let scope = spread(&["/gpu:0", "/gpu:1"], Strategy::greedy_bytes()).unwrap();
    let steps = [
        (Read("a", DType::F32, 100), ""),
        (Plain, ""),
        (Plain, ""),
        (Plain, ""),
    ];
    assert_eq!(
        devices(scope, &steps).unwrap(),
        [
            "/device:GPU:0",
            "/device:GPU:1",
            "/device:GPU:1",
            "/device:GPU:1"
        ]
    );
    assert!(
        spread(&[], Strategy::RoundRobin).is_err()
            && spread(&["/tpu"], Strategy::RoundRobin).is_err()
    );
}
