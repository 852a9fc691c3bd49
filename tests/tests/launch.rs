//! All tasks of a cluster, started and ended together.

use crate::distributed::{cluster, target, toml};
use crate::process::{Serving, gristmill, serving};
use std::net::TcpListener;
use std::path::Path;
use std::time::{Duration, Instant};

/// Tasks of the cluster.
const TASKS: [(&str, u32); 3] = [("ps", 0), ("worker", 0), ("worker", 1)];

fn launched(folder: &Path) -> Serving {
    serving(
        folder,
        &[],
        &["launch", "--cluster", "cluster.toml", "--threads", "3"],
    )
}

/// Waits until no task has its port any more.
fn wait_for_ports(addresses: &[String]) {
    let began = Instant::now();
    while addresses
        .iter()
        .any(|address| TcpListener::bind(address).is_err())
    {
        assert!(
            began.elapsed() < Duration::from_secs(10),
            "a server goes on"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn tasks_of_this_machine_start_and_end_together() {
    let folder = tempfile::tempdir().unwrap();
    let spec = cluster(&TASKS);
    let elsewhere = "\"7\" = \"192.0.2.1:2222\" }\n";
    let file = toml(&spec).replacen(" }\n", &format!(", {elsewhere}"), 1);
    std::fs::write(folder.path().join("cluster.toml"), file).unwrap();
    let addresses: Vec<String> = spec
        .tasks()
        .map(|(_, address)| address.to_owned())
        .collect();
    let mut launch = launched(folder.path());
    let is_first = TASKS.iter().any(|(job, task)| {
        let begin = format!("/job:{job}/task:{task}: serving grpc://127.0.0.1:");
        launch.line.starts_with(&begin)
    });
    assert!(is_first, "{}", launch.line);
    let session = target(&spec, TASKS[0]);
    let began = Instant::now();
    loop {
        // The other servers may still be on their way.
        let listed = gristmill(folder.path(), &["devices", "--session", &session]);
        let all = TASKS.map(|(job, task)| format!("  /job:{job}/task:{task}/device:CPU:0\n"));
        if listed.code == Some(0) && all.iter().all(|line| listed.stdout.contains(line)) {
            break;
        }
        assert!(
            began.elapsed() < Duration::from_secs(30),
            "{}",
            listed.stdout
        );
    }
    launch.signal("TERM");
    let ended = launch.child.wait().unwrap();
    assert_eq!(ended.code(), Some(0));
    wait_for_ports(&addresses);
}

#[test]
fn a_task_that_fails_ends_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let spec = cluster(&TASKS);
    std::fs::write(folder.path().join("cluster.toml"), toml(&spec)).unwrap();
    let mut addresses: Vec<String> = spec
        .tasks()
        .map(|(_, address)| address.to_owned())
        .collect();
    let taken = TcpListener::bind(addresses.remove(2)).unwrap();
    let ended = gristmill(folder.path(), &["launch", "--cluster", "cluster.toml"]);
    assert_eq!(ended.code, Some(2), "{}", ended.stderr);
    for part in [
        "/job:worker/task:1: error: ",
        "the port is taken",
        "/job:worker/task:1 has ended with exit status: 2, and the others with it",
    ] {
        assert!(ended.stderr.contains(part), "{}", ended.stderr);
    }
    wait_for_ports(&addresses);
    drop(taken);
}

#[test]
fn another_verb_runs_for_each_task() {
    let folder = tempfile::tempdir().unwrap();
    let file = "[jobs]\nworker = [\"127.0.0.1:4711\", \"127.0.0.1:4712\"]\n";
    std::fs::write(folder.path().join("cluster.toml"), file).unwrap();
    let launch = |more: &[&str]| {
        gristmill(
            folder.path(),
            &[&["launch", "--cluster", "cluster.toml"], more].concat(),
        )
    };
    let listed = launch(&["--", "devices", "--devices", "cpu:3"]);
    assert_eq!(listed.code, Some(0), "{}", listed.stderr);
    for task in ["/job:worker/task:0: ", "/job:worker/task:1: "] {
        let of_task = listed.stdout.lines().filter(|line| line.starts_with(task));
        assert!(
            of_task.clone().any(|line| line.contains("CPU:2")),
            "{}",
            listed.stdout
        );
    }
    for (more, said) in [
        (&["--", "serve"][..], "\"serve\" is not a verb"),
        (
            &["--insecure", "--", "devices"],
            "--insecure is for servers",
        ),
    ] {
        let refused = launch(more);
        assert_eq!(refused.code, Some(2), "{}", refused.stderr);
        assert!(refused.stderr.contains(said), "{}", refused.stderr);
    }
    let far = "[jobs]\nworker = [\"192.0.2.1:4711\"]\n";
    std::fs::write(folder.path().join("cluster.toml"), far).unwrap();
    let refused = launch(&[]);
    assert_eq!(refused.code, Some(2), "{}", refused.stderr);
    assert!(
        refused.stderr.contains("no task is on this machine"),
        "{}",
        refused.stderr
    );
}
