//! Servers and sessions as processes beyond one machine, with keys and without.

use crate::distributed::{cluster, four, target, toml};
use crate::process::{Serving, gristmill, serving};
use gristmill::Tensor;
use gristmill::distribute::ClusterSpec;
use std::path::Path;

/// Tasks of the cluster.
const TASKS: [(&str, u32); 2] = [("ps", 0), ("worker", 0)];

/// The address of a task on all networks of this machine.
fn everywhere(spec: &ClusterSpec, name: (&str, u32)) -> String {
    target(spec, name).replace("grpc://127.0.0.1:", "0.0.0.0:")
}

fn serve(folder: &Path, spec: &ClusterSpec, name: (&str, u32), trust: &[&str]) -> Serving {
    let (number, listen) = (name.1.to_string(), everywhere(spec, name));
    let args = [
        "server",
        "--job",
        name.0,
        "--task",
        &number,
        "--threads",
        "1",
    ];
    let cluster = ["--cluster", "cluster.toml", "--listen", &listen];
    serving(folder, &[], &[&args[..], &cluster, trust].concat())
}

#[test]
fn processes_with_keys_run_over_two_tasks() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let spec = cluster(&TASKS);
    std::fs::write(path.join("cluster.toml"), toml(&spec)).unwrap();
    let made = gristmill(path, &["keys", "all", "--cluster", "cluster.toml"]);
    assert_eq!(made.code, Some(0), "{}", made.stderr);
    assert!(
        made.stderr.contains("keep ca.key to yourself"),
        "{}",
        made.stderr
    );
    // Each machine has its own files, as the guide says.
    for (name, stem) in [("ps", "ps-0"), ("worker", "worker-0"), ("user", "client")] {
        std::fs::create_dir(path.join(name)).unwrap();
        for file in [
            "ca.pem".into(),
            format!("{stem}.pem"),
            format!("{stem}.key"),
        ] {
            std::fs::copy(path.join("all").join(&file), path.join(name).join(&file)).unwrap();
        }
    }
    let servers = TASKS.map(|name| serve(path, &spec, name, &["--keys", name.0]));
    for (server, name) in servers.iter().zip(TASKS) {
        let expected = format!("serving {} as ", target(&spec, name));
        assert!(server.line.starts_with(&expected), "{}", server.line);
    }
    let graph = four("/job:ps/task:0/cpu:0", "/job:worker/task:0/cpu:0");
    std::fs::write(path.join("four.ir"), graph.to_string()).unwrap();
    let x = Tensor::from_slice(&[0.5f32], &[]).unwrap();
    gristmill::write_npz(path.join("x.npz"), [("x", &x)]).unwrap();
    let session = target(&spec, TASKS[1]);
    let run = |trust: &[&str]| {
        let args = [
            "run",
            "four.ir",
            "--inputs",
            "x.npz",
            "--outputs",
            "c.npz",
            "--session",
            &session,
        ];
        gristmill(path, &[&args[..], trust].concat())
    };
    let ran = run(&["--keys", "user"]);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    let outputs = gristmill::read_npz(path.join("c.npz")).unwrap();
    assert_eq!(outputs[0].1.as_slice::<f32>(), [4.0]);
    for verb in ["devices", "variables"] {
        let listed = gristmill(path, &[verb, "--session", &session, "--keys", "user"]);
        assert_eq!(listed.code, Some(0), "{}", listed.stderr);
        assert!(
            listed.stdout.contains("/job:ps/task:0"),
            "{}",
            listed.stdout
        );
    }
    for (trust, code, reason) in [
        (&[][..], 6, "--keys DIR"),
        (&["--insecure"], 6, "--keys DIR"),
        (&["--keys", "ps"], 2, "ps/client.pem: No such file"),
    ] {
        let ran = run(trust);
        assert_eq!(ran.code, Some(code), "{}", ran.stderr);
        assert!(ran.stderr.contains(reason), "{}", ran.stderr);
    }
}

#[test]
fn other_machines_take_part_only_where_somebody_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let spec = cluster(&TASKS[1..]);
    std::fs::write(path.join("cluster.toml"), toml(&spec)).unwrap();
    let listen = everywhere(&spec, TASKS[1]);
    let args = [
        "server",
        "--job",
        "worker",
        "--task",
        "0",
        "--cluster",
        "cluster.toml",
        "--listen",
        &listen,
    ];
    let refused = gristmill(path, &args);
    assert_eq!(refused.code, Some(3), "{}", refused.stderr);
    assert!(
        refused
            .stderr
            .contains("0.0.0.0, which other machines reach"),
        "{}",
        refused.stderr
    );
    assert!(refused.stderr.contains("--keys DIR"), "{}", refused.stderr);
    let _server = serve(path, &spec, TASKS[1], &["--insecure"]);
    let session = target(&spec, TASKS[1]);
    let listed = gristmill(path, &["devices", "--session", &session, "--insecure"]);
    assert_eq!(listed.code, Some(0), "{}", listed.stderr);
    let far = ["devices", "--session", "grpc://10.1.2.3:4711"];
    let refused = gristmill(path, &far);
    assert_eq!(refused.code, Some(3), "{}", refused.stderr);
    assert!(
        refused
            .stderr
            .contains("10.1.2.3:4711 is beyond this machine"),
        "{}",
        refused.stderr
    );
    for verb in [&["devices"][..], &["run", "m.ir"]] {
        let alone = gristmill(path, &[verb, &["--insecure"]].concat());
        assert_eq!(alone.code, Some(2), "{}", alone.stderr);
        assert!(
            alone
                .stderr
                .contains("--insecure is for a session on a cluster"),
            "{}",
            alone.stderr
        );
    }
}
