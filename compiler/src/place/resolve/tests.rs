//! Tables over soft placement, variables and colocation; texts of errors; random requests.

use super::*;
use crate::cost::CostModel;
use crate::place::{Kernels, Pin, Placement, Reason, apply_pins, check, place};
use crate::testing::{Rng, random_wiring};
use gristmill_runtime::device::DeviceName;

const READ: &str = "read_variable() {container = \"\", name = \"v\", dtype = f32, shape = [2]}";
const ASSIGN: &str = "assign_variable(%0) {container = \"\", name = \"v\"}";

/// Nodes `%1 ..` of one result over the input `%0`.
fn graph(nodes: &[String]) -> Graph {
    let line = |(i, text): (usize, &String)| format!("%{}: f32[2] = {text}\n", i + 1);
    let nodes_text: String = nodes.iter().enumerate().map(line).collect();
    let text = format!("graph \"g\" {{\n%0 = input \"x\": f32[2]\n{nodes_text}output \"y\" %1\n}}");
    Graph::parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

/// Two CPUs, and two GPUs that can run all but `exp`.
fn request(fallback: Fallback) -> Request {
    let mut devices = DeviceSet::parse("cpu:2,gpu:2", 2).unwrap();
    devices.devices[2..]
        .iter_mut()
        .for_each(|d| d.kernels = Kernels::default().without("exp", "not written"));
    Request {
        devices,
        fallback,
        ..Request::default()
    }
}

/// Devices of each node, then warnings and log.
fn resolved(g: &Graph, r: &Request) -> Result<String> {
    let found = resolve(g, r)?;
    let name = |&d: &usize| {
        let name = r.devices.devices[d].name.to_string();
        name.strip_prefix("/device:").unwrap_or(&name).to_owned()
    };
    let node = |(a, (id, n)): (&Option<Allowed>, (NodeId, &Node))| {
        let a = a.as_ref()?;
        let names: Vec<String> = a.devices.iter().map(name).collect();
        Some(format!(
            "{} [{}] {}",
            name_of(id, n),
            names.join(" "),
            a.reason
        ))
    };
    let nodes = found.allowed.iter().zip(g.nodes()).filter_map(node);
    let warnings = found.warnings.iter().map(|w| format!("warning: {w}"));
    let log = found.log.iter().map(|w| format!("log: {w}"));
    Ok(nodes
        .chain(warnings)
        .chain(log)
        .collect::<Vec<_>>()
        .join("\n"))
}

fn error(nodes: &[&str], fallback: Fallback) -> String {
    let nodes: Vec<String> = nodes.iter().map(|n| (*n).to_owned()).collect();
    resolved(&graph(&nodes), &request(fallback))
        .unwrap_err()
        .to_string()
}

fn text(nodes: &[&str], fallback: Fallback) -> String {
    let nodes: Vec<String> = nodes.iter().map(|n| (*n).to_owned()).collect();
    resolved(&graph(&nodes), &request(fallback)).unwrap()
}

#[test]
fn soft_placement_as_a_table() {
    // Request of an `exp`, which GPUs cannot run, and of a `neg`, which all can: devices by hard
    // and by soft placement.
    let all = "CPU:0 CPU:1 GPU:0 GPU:1";
    for (op, spec, hard, soft) in [
        ("exp", "", "CPU:0 CPU:1", "CPU:0 CPU:1"),
        ("exp", "cpu:1", "CPU:1", "CPU:1"),
        ("exp", "/gpu:0", "error", "CPU:0 CPU:1"),
        ("exp", "/gpu:*", "error", "CPU:0 CPU:1"),
        ("exp", "/job:localhost/task:0/gpu:1", "error", "CPU:0 CPU:1"),
        ("exp", "/device:*:1", "CPU:1", "CPU:1"),
        ("neg", "/gpu:1", "GPU:1", "GPU:1"),
        ("neg", "/gpu", "GPU:0 GPU:1", "GPU:0 GPU:1"),
        ("neg", "/gpu:7", "error", all),
        ("neg", "/device:TPU:0", "error", all),
        ("neg", "/job:ps/gpu:0", "error", "error"),
        ("neg", "/task:1", "error", "error"),
        ("neg", "/replica:2/cpu:0", "error", "error"),
    ] {
        let node = [format!("{op}(%0) on {spec:?} @ \"/n\"")];
        for (fallback, expected) in [
            (Fallback::Error, hard),
            (Fallback::Allow, soft),
            (Fallback::Warn, soft),
        ] {
            let found = resolve(&graph(&node), &request(fallback));
            let names = |a: &Allowed| {
                let names = a
                    .devices
                    .iter()
                    .map(|&d| request(fallback).devices.devices[d].name.to_string());
                names
                    .map(|n| n.replace("/device:", ""))
                    .collect::<Vec<_>>()
                    .join(" ")
            };
            let devices = found.as_ref().map_or("error".to_owned(), |r| {
                names(r.allowed[0].as_ref().unwrap())
            });
            assert_eq!(devices, expected, "{op} on {spec:?}, {fallback:?}");
            if let Ok(r) = found {
                let let_go = hard != soft;
                assert_eq!(
                    r.warnings.len(),
                    usize::from(let_go && fallback == Fallback::Warn)
                );
                assert_eq!(
                    r.log.len(),
                    usize::from(let_go && fallback == Fallback::Allow)
                );
                assert_eq!(
                    matches!(r.allowed[0].as_ref().unwrap().reason, Reason::Fallback(_)),
                    let_go
                );
            }
        }
    }
}

#[test]
fn a_request_that_many_nodes_cannot_keep_is_one_warning() {
    let node = |i: usize| format!("exp(%0) on \"/gpu:0\" @ \"/n{i}\"");
    let nodes: Vec<String> = (0..100).map(node).collect();
    let found = resolve(&graph(&nodes), &request(Fallback::Warn)).unwrap();
    let [warning] = &found.warnings[..] else {
        panic!("{} warnings", found.warnings.len());
    };
    let start = "'/n0' and 99 more nodes are placed on [/device:CPU:0, /device:CPU:1] instead: ";
    assert!(warning.starts_with(start), "{warning}");
    let found = resolve(&graph(&nodes), &request(Fallback::Allow)).unwrap();
    assert_eq!((found.warnings.len(), found.log.len()), (0, 100));
}

#[test]
fn users_of_a_variable_follow_its_first_read() {
    let read = format!("{READ} on \"/cpu:1\" by \"scope at m.rs:3\" @ \"/read\"");
    let plain = format!("{ASSIGN} @ \"/assign\"");
    insta::assert_snapshot!(text(&[&read, &plain], Fallback::Error), @r#"
    /read [CPU:1] scope at m.rs:3
    /assign [CPU:1] colocated: same variable "v", with '/read'
    "#);
    let same = format!("{ASSIGN} on \"/device:CPU:*\" @ \"/assign\"");
    insta::assert_snapshot!(text(&[&read, &same], Fallback::Error), @r#"
    /read [CPU:1] scope at m.rs:3
    /assign [CPU:1] requested device "/device:CPU:*"
    "#);
    let other = format!("{ASSIGN} on \"/gpu:0\" @ \"/assign\"");
    insta::assert_snapshot!(text(&[&read, &other], Fallback::Error), @r#"
    /read [CPU:1] scope at m.rs:3
    /assign [CPU:1] Ignoring device specification /device:GPU:0 for node '/assign' because the input edge from '/read' is a reference connection and already has a device field set to /device:CPU:1
    warning: Ignoring device specification /device:GPU:0 for node '/assign' because the input edge from '/read' is a reference connection and already has a device field set to /device:CPU:1
    "#);
    let second = format!("{READ} on \"/gpu:0\" by \"scope at m.rs:9\" @ \"/again\"");
    // What was asked of makers of the value never gives way.
    insta::assert_snapshot!(error(&[&read, &plain, &second], Fallback::Allow), @r#"
    in node "/again": Cannot colocate nodes '/read' and '/again': Cannot merge devices with incompatible types: '/device:CPU:1' and '/device:GPU:0'
      chain: '/read' (variable asked for /device:CPU:1 by scope at m.rs:3) -- same variable "v" -- '/again' (variable asked for /device:GPU:0 by scope at m.rs:9)
      colocation group: requested '/device:CPU:1', resource '/device:CPU:1', assigned '', kernels for all on [CPU, GPU]
        '/read' (read_variable): variable asked for /device:CPU:1 by scope at m.rs:3
        '/assign' (assign_variable): kernels on [CPU, GPU]
    "#);
}

#[test]
fn existing_state_pins_the_users_of_a_variable() {
    let mut r = request(Fallback::Warn);
    r.state.insert(
        (String::new(), "v".into()),
        DeviceName::parse("gpu:1").unwrap(),
    );
    let at = |device: &str| {
        graph(&[
            format!("{READ} on {device:?} @ \"/read\""),
            format!("{ASSIGN} @ \"/assign\""),
        ])
    };
    let free = graph(&[format!("{READ} @ \"/read\"")]);
    insta::assert_snapshot!(resolved(&free, &r).unwrap(), @"/read [GPU:1] where its variable is");
    // What was asked of the variable's maker cannot be released; what was asked of others can.
    insta::assert_snapshot!(resolved(&at("/cpu:0"), &r).unwrap_err(), @r#"in node "/read": its variable is on /job:localhost/replica:0/task:0/device:GPU:1 already: Cannot merge devices with incompatible types: '/device:CPU:0' and '/job:localhost/replica:0/task:0/device:GPU:1'"#);
    let user = graph(&[format!("{ASSIGN} on \"/cpu:0\" @ \"/assign\"")]);
    insta::assert_snapshot!(resolved(&user, &r).unwrap(), @r#"
    /assign [GPU:1] fallback from requested device "/device:CPU:0"
    warning: '/assign' is placed on [/device:GPU:1] instead: requested device "/device:CPU:0" cannot be had where its group or variable is
    "#);
    r.fallback = Fallback::Error;
    insta::assert_snapshot!(resolved(&user, &r).unwrap_err(), @r#"in node "/assign": its variable is on /job:localhost/replica:0/task:0/device:GPU:1 already: Cannot merge devices with incompatible types: '/device:CPU:0' and '/job:localhost/replica:0/task:0/device:GPU:1'"#);
    let stuck = graph(&[
        format!("{READ} @ \"/read\""),
        "exp(%0) with \"/read\" @ \"/user\"".into(),
    ]);
    let soft = Request {
        fallback: Fallback::Allow,
        ..r.clone()
    };
    insta::assert_snapshot!(resolved(&stuck, &soft).unwrap_err(), @r#"
    in node "/read": Cannot assign a device for operation /read: Could not keep '/read' on '/job:localhost/replica:0/task:0/device:GPU:1', where its variable is, because no supported kernel for GPU devices is available.
      chain: '/read' (assigned to /job:localhost/replica:0/task:0/device:GPU:1) -- loc:@/read -- '/user' (kernels on [CPU])
      colocation group: requested '/job:localhost/replica:0/task:0/device:GPU:1', resource '', assigned '/job:localhost/replica:0/task:0/device:GPU:1', kernels for all on [CPU]
        '/read' (read_variable): assigned to /job:localhost/replica:0/task:0/device:GPU:1
        '/user' (exp): kernels on [CPU]
      kernels of exp: CPU yes; GPU no (exp: not written) (try: a new session, whose variables are placed again)
    "#);
    let mut gone = r.clone();
    gone.state.insert(
        ("c".into(), "w".into()),
        DeviceName::parse("/gpu:9").unwrap(),
    );
    insta::assert_snapshot!(resolved(&free, &gone).unwrap_err(), @r#"variable "c/w" is on /job:localhost/replica:0/task:0/device:GPU:9 unknown device. (try: --devices with the device in it)"#);
    insta::assert_snapshot!(resolved(&at("/gpu"), &r).unwrap(), @r#"
    /read [GPU:1] requested device "/device:GPU:*"
    /assign [GPU:1] where its variable is
    "#);
}

#[test]
fn a_resource_moves_last_and_with_a_warning() {
    // The variable was asked onto a GPU, but its user has no kernel there.
    let read = format!("{READ} on \"/gpu:0\" @ \"/read\"");
    let nodes = [
        read.as_str(),
        "exp(%0) with \"/read\" by \"pin\" @ \"/user\"",
    ];
    insta::assert_snapshot!(error(&nodes, Fallback::Error), @r#"
    in node "/read": Cannot assign a device for operation /read: Could not satisfy explicit device specification '/device:GPU:0' because no supported kernel for GPU devices is available.
      chain: '/read' (variable asked for /device:GPU:0) -- loc:@/read by pin -- '/user' (kernels on [CPU])
      colocation group: requested '/device:GPU:0', resource '/device:GPU:0', assigned '', kernels for all on [CPU]
        '/read' (read_variable): variable asked for /device:GPU:0
        '/user' (exp): kernels on [CPU]
      kernels of exp: CPU yes; GPU no (exp: not written) (try: --devices with a CPU in it, or --fallback allow)
    "#);
    insta::assert_snapshot!(text(&nodes, Fallback::Warn), @r#"
    /read [CPU:0 CPU:1] fallback from requested device "/device:GPU:0"
    /user [CPU:0 CPU:1] colocated: loc:@/read by pin, with '/read'
    warning: Failed to place the graph without changing the devices of some resources; candidates are [/device:CPU:0, /device:CPU:1]. in node "/read": Cannot assign a device for operation /read: Could not satisfy explicit device specification '/device:GPU:0' because no supported kernel for GPU devices is available.
      chain: '/read' (variable asked for /device:GPU:0) -- loc:@/read by pin -- '/user' (kernels on [CPU])
      colocation group: requested '/device:GPU:0', resource '/device:GPU:0', assigned '', kernels for all on [CPU]
        '/read' (read_variable): variable asked for /device:GPU:0
        '/user' (exp): kernels on [CPU]
      kernels of exp: CPU yes; GPU no (exp: not written) (try: --devices with a CPU in it, or --fallback allow)
    warning: '/read' is placed on [/device:CPU:0, /device:CPU:1] instead: requested device "/device:GPU:0" cannot be had where its group or variable is
    "#);
    // A type that the variable's maker did not ask for goes first.
    let read = format!("{READ} @ \"/read\"");
    let nodes = [
        read.as_str(),
        "exp(%0) on \"/gpu:0\" with \"/read\" @ \"/user\"",
    ];
    insta::assert_snapshot!(text(&nodes, Fallback::Allow), @r#"
    /read [CPU:0 CPU:1] colocated: loc:@/read, with '/user'
    /user [CPU:0 CPU:1] fallback from requested device "/device:GPU:0"
    log: '/user' is placed on [/device:CPU:0, /device:CPU:1] instead: in node "/user": Cannot assign a device for operation /user: Could not satisfy explicit device specification '/device:GPU:0' because no supported kernel for GPU devices is available.
      colocation group: requested '/device:GPU:0', resource '', assigned '', kernels for all on [CPU]
        '/read' (read_variable): kernels on [CPU, GPU]
        '/user' (exp): asked for /device:GPU:0, kernels on [CPU]
      kernels of exp: CPU yes; GPU no (exp: not written) (try: --devices with a CPU in it, or --fallback allow)
    "#);
}

#[test]
fn colocation_chains_are_shortest() {
    let nodes = [
        "neg(%0) on \"/cpu:0\" by \"scope \\\"/cpu:0\\\" at m.rs:3\" with \"g\" by \"colocate_with at m.rs:4\" @ \"/a\"",
        "neg(%0) with \"g\" by \"colocate_with at m.rs:4\" with \"h\" by \"colocate_with at m.rs:5\" @ \"/b\"",
        "neg(%0) with \"h\" by \"colocate_with at m.rs:5\" with \"i\" by \"colocate_with at m.rs:6\" @ \"/c\"",
        "neg(%0) with \"g\" by \"colocate_with at m.rs:4\" @ \"/unrelated\"",
        "neg(%0) on \"/cpu:1\" by \"pin \\\"/d=/device:CPU:1\\\"\" with \"i\" by \"colocate_with at m.rs:6\" @ \"/d\"",
    ];
    insta::assert_snapshot!(error(&nodes, Fallback::Error), @r#"
    in node "/d": Cannot colocate nodes '/c' and '/d': Cannot merge devices with incompatible ids: '/device:CPU:0' and '/device:CPU:1'
      chain: '/a' (asked for /device:CPU:0 by scope "/cpu:0" at m.rs:3) -- loc:@g by colocate_with at m.rs:4 -- '/b' -- loc:@h by colocate_with at m.rs:5 -- '/c' -- loc:@i by colocate_with at m.rs:6 -- '/d' (asked for /device:CPU:1 by pin "/d=/device:CPU:1")
      colocation group: requested '/device:CPU:0', resource '', assigned '', kernels for all on [CPU, GPU]
        '/a' (neg): asked for /device:CPU:0 by scope "/cpu:0" at m.rs:3
        '/b' (neg): kernels on [CPU, GPU]
        '/c' (neg): kernels on [CPU, GPU]
        '/unrelated' (neg): kernels on [CPU, GPU]
    "#);
    insta::assert_snapshot!(text(&nodes, Fallback::Allow), @r#"
    /a [CPU:0 CPU:1] fallback from scope "/cpu:0" at m.rs:3
    /b [CPU:0 CPU:1] colocated: loc:@g by colocate_with at m.rs:4, with '/a'
    /c [CPU:0 CPU:1] colocated: loc:@i by colocate_with at m.rs:6, with '/d'
    /unrelated [CPU:0 CPU:1] colocated: loc:@g by colocate_with at m.rs:4, with '/a'
    /d [CPU:0 CPU:1] fallback from pin "/d=/device:CPU:1"
    log: '/a' is placed on [/device:CPU:0, /device:CPU:1] instead: scope "/cpu:0" at m.rs:3 cannot be had where its group or variable is
    log: '/d' is placed on [/device:CPU:0, /device:CPU:1] instead: pin "/d=/device:CPU:1" cannot be had where its group or variable is
    "#);
}

#[test]
fn jobs_never_give_way() {
    let nodes = [
        "neg(%0) on \"/job:a\" with \"/b\" @ \"/a\"",
        "neg(%0) on \"/job:localhost\" @ \"/b\"",
    ];
    assert!(
        error(&nodes, Fallback::Error)
            .contains("Cannot merge devices with incompatible jobs: '/job:")
    );
    let mut r = request(Fallback::Warn);
    r.devices.devices.push(crate::place::Device {
        name: DeviceName::parse("/job:a/cpu:0").unwrap(),
        ..r.devices.devices[0].clone()
    });
    let g = graph(&nodes.map(str::to_owned));
    insta::assert_snapshot!(resolved(&g, &r).unwrap(), @r#"
    /a [/job:a/replica:0/task:0/device:CPU:0] requested device "/job:a"
    /b [CPU:0 CPU:1 GPU:0 GPU:1] requested device "/job:localhost"
    warning: Ignoring request to colocate node '/a' with nodes in colocation group '/b' because soft placement is on and an attempt at doing so resulted in the following error: Cannot colocate nodes '/b' and '/a': Cannot merge devices with incompatible jobs: '/job:localhost' and '/job:a'
      chain: '/b' (asked for /job:localhost) -- loc:@/b -- '/a' (asked for /job:a)
    "#);
}

#[test]
fn kernels_decide_what_can_be_together() {
    let mut r = request(Fallback::Error);
    r.devices.devices[..2]
        .iter_mut()
        .for_each(|d| d.kernels = Kernels::default().without("neg", "not written"));
    let g = graph(&[
        "exp(%0) @ \"/a\"".into(),
        "neg(%0) with \"/a\" @ \"/b\"".into(),
    ]);
    insta::assert_snapshot!(resolved(&g, &r).unwrap_err(), @r#"
    in node "/b": Cannot colocate nodes '/a' and '/b' because no device type supports both of those nodes and the other nodes colocated with them
      chain: '/a' (kernels on [CPU]) -- loc:@/a -- '/b' (kernels on [GPU])
    "#);
    r.fallback = Fallback::Warn;
    insta::assert_snapshot!(resolved(&g, &r).unwrap(), @r#"
    /a [CPU:0 CPU:1] least makespan
    /b [GPU:0 GPU:1] least makespan
    warning: Ignoring request to colocate node '/b' with nodes in colocation group '/a' because soft placement is on and an attempt at doing so resulted in the following error: Cannot colocate nodes '/a' and '/b' because no device type supports both of those nodes and the other nodes colocated with them
      chain: '/a' (kernels on [CPU]) -- loc:@/a -- '/b' (kernels on [GPU])
    "#);
    let g = graph(&["exp(%0) @ \"/exp\"".into()]);
    let mut r = Request {
        devices: DeviceSet::parse("cpu:2,emu:1", 2).unwrap(),
        ..Request::default()
    };
    r.devices
        .devices
        .iter_mut()
        .for_each(|d| d.kernels = Kernels::all().without("exp", "no code generator for it yet"));
    insta::assert_snapshot!(resolved(&g, &r).unwrap_err(), @r#"
    in node "/exp": no kernel registered to support this operation: exp(f32[2]) -> f32[2]
      devices: [/device:CPU:0, /device:CPU:1, /device:EMU:0]
      kernels of exp: CPU no (exp: no code generator for it yet); EMU no (exp: no code generator for it yet) (try: --devices with a device that has the kernel)
    "#);
    let nothing = DeviceSet {
        devices: Vec::new(),
        ..r.devices.clone()
    };
    insta::assert_snapshot!(resolved(&g, &Request { devices: nothing, ..r }).unwrap_err(), @"No devices are registered (try: --devices cpu:1)");
}

#[test]
fn errors_have_what_tensorflow_says() {
    for (node, parts) in [
        (
            "neg(%0) on \"/gpu:7\" by \"scope \\\"/gpu:7\\\" at m.rs:3\" @ \"/n\"",
            vec![
                "in node \"/n\": scope \"/gpu:7\" at m.rs:3: Cannot assign a device for operation /n: ",
                "/n was explicitly assigned to /device:GPU:7 but available devices are [/device:CPU:0, /device:CPU:1, /device:GPU:0, /device:GPU:1]",
                "Make sure the device specification refers to a valid device.",
                "(try: /device:GPU:0, or --devices with the device in it)",
            ],
        ),
        (
            "exp(%0) on \"/gpu:0\" @ \"/n\"",
            vec![
                "Could not satisfy explicit device specification '/device:GPU:0' because no supported kernel for GPU devices is available.",
                "kernels of exp: CPU yes; GPU no (exp: not written)",
            ],
        ),
    ] {
        let found = error(&[node], Fallback::Error);
        parts
            .iter()
            .for_each(|p| assert!(found.contains(p), "{p:?} in {found}"));
    }
}

#[test]
fn requests_inside_a_region_count_for_the_node() {
    let body = |spec: &str| {
        format!(
            "cluster(%0) {{kind = map, anchor = 0, root = 0}} (graph \"body\" {{\n%0 = input \"a\": f32[2]\n%1: f32[2] = neg(%0) {spec} @ \"/inner\"\noutput \"r\" %1\n}})"
        )
    };
    let inside = body("on \"/gpu:1\"");
    insta::assert_snapshot!(text(&[&inside], Fallback::Error), @r#"cluster#0 [GPU:1] requested device "/device:GPU:1""#);
    let both = format!(
        "{} on \"/cpu:0\" @ \"/outer\"",
        body("on \"/gpu:1\" by \"pin\"")
    );
    insta::assert_snapshot!(error(&[&both], Fallback::Error), @r#"in node "/outer": one node holds "/outer" (requested device "/device:CPU:0") and "/inner" (pin): Cannot merge devices with incompatible types: '/device:CPU:0' and '/device:GPU:1'"#);
    let grouped = format!("{} @ \"/outer\"", body("with \"/b\""));
    insta::assert_snapshot!(text(&[&grouped, "exp(%0) on \"cpu:1\" @ \"/b\""], Fallback::Error), @r#"
    /outer [CPU:1] colocated: loc:@/b, with '/b'
    /b [CPU:1] requested device "/device:CPU:1"
    "#);
}

#[test]
fn pins_put_nodes_on_devices_and_together() {
    let mut g = graph(&[
        "neg(%0) @ \"/a/x\"".into(),
        "neg(%0) @ \"/a/y\"".into(),
        "exp(%0) @ \"/b\"".into(),
    ]);
    let mut r = request(Fallback::Error);
    r.pins = vec![
        Pin::parse("^/a=loc:@/b").unwrap(),
        Pin::parse("^/b$=cpu:1").unwrap(),
    ];
    assert_eq!(r.pins[0].to_string(), "^/a=loc:@/b");
    let direct = resolved(&g, &r).unwrap();
    apply_pins(&mut g, &mut r).unwrap();
    assert_eq!(
        resolved(&g, &r).unwrap(),
        direct,
        "pins mean the same in the graph"
    );
    insta::assert_snapshot!(direct, @r#"
    /a/x [CPU:1] colocated: loc:@/b by pin "^/a=loc:@/b", with '/b'
    /a/y [CPU:1] colocated: loc:@/b by pin "^/a=loc:@/b", with '/b'
    /b [CPU:1] pin "^/b$=/device:CPU:1"
    "#);
    r.pins = vec![
        Pin::parse("^/a=loc:@/c").unwrap(),
        Pin::parse("/z=cpu:0").unwrap(),
    ];
    insta::assert_snapshot!(apply_pins(&mut g, &mut r).unwrap_err(), @r#"
    2 problems:
      - --pin "^/a=loc:@/c" finds no "/c" among the model's 3 node paths (try: /b)
      - --pin "/z=/device:CPU:0" finds none of the model's 3 node paths (try: /b)
    "#);
    insta::assert_snapshot!(Pin::parse("/a=loc:@").unwrap_err(), @r#"--pin "/a=loc:@": no node path after loc:@ (try: --pin '^/encoder/=/device:CPU:1')"#);
}

/// Random specifications, groups and kernels on random graphs: either a placement that the checker
/// accepts, or an error.
#[test]
fn random_requests_hold_or_fail() {
    let mut rng = Rng(29);
    let (mut n_placed, mut n_soft, mut n_failed) = (0, 0, 0);
    for n in 0..400 {
        let (g, r) = random_request(&mut rng, 1 + n % 30);
        match place(&g, &r, &CostModel::default()) {
            Ok(p) => {
                check::check(&g, &r, &p).unwrap_or_else(|e| panic!("{e}\n{g}\n{}", p.to_text(&g)));
                holds(&g, &r, &p);
                n_placed += 1;
                n_soft += usize::from(
                    p.nodes
                        .iter()
                        .flatten()
                        .any(|p| matches!(p.reason, Reason::Fallback(_))),
                );
            }
            Err(e) => {
                assert!(
                    !e.to_string().is_empty() && e.kind() != crate::error::ErrorKind::Internal,
                    "{e}"
                );
                n_failed += 1;
            }
        }
    }
    assert!(
        n_placed > 100 && n_soft > 30 && n_failed > 50,
        "{n_placed} {n_soft} {n_failed}"
    );
}

fn random_request(rng: &mut Rng, n_nodes: usize) -> (Graph, Request) {
    let mut g = random_wiring(rng, n_nodes);
    let mut r = request(rng.pick(&[
        Fallback::Error,
        Fallback::Error,
        Fallback::Warn,
        Fallback::Allow,
    ]));
    r.devices.devices.push(crate::place::Device {
        name: DeviceName::parse("/job:far/task:1/cpu:0").unwrap(),
        ..r.devices.devices[0].clone()
    });
    for variable in ["v", "v8", "v1"] {
        if !rng.one_in(4) {
            continue;
        }
        let device = r.devices.devices[rng.below(4)].name.clone();
        r.state.insert((String::new(), variable.into()), device);
    }
    let ops: BTreeSet<&str> = g.nodes().map(|(_, n)| n.op.name()).collect();
    for d in 0..r.devices.devices.len() {
        for op in &ops {
            if rng.one_in(8) {
                let kernels = std::mem::take(&mut r.devices.devices[d].kernels);
                r.devices.devices[d].kernels = kernels.without(op, "drawn");
            }
        }
    }
    let specs = [
        "cpu:0",
        "cpu",
        "gpu:1",
        "/gpu",
        "/job:localhost",
        "/job:far",
        "/gpu:5",
        "/task:0/cpu:1",
    ];
    for id in (0..g.n_nodes()).map(|i| NodeId(i as u32)) {
        let mut own = DeviceRequest::default();
        if rng.one_in(8) {
            own = DeviceRequest::parse(rng.pick(&specs)).unwrap();
        }
        if rng.one_in(8) {
            own.groups.insert(
                format!("g{}", rng.below(3)).into(),
                crate::ir::AskedBy::default(),
            );
        }
        g.node_mut(id).device = own.into_requested();
    }
    (g, r)
}

/// What the checker says, said again without its code: hard specifications are kept, soft placement
/// changes type and index only, groups are uniform unless a line names the node that left.
fn holds(g: &Graph, r: &Request, p: &Placement) {
    let mut groups: BTreeMap<&str, BTreeSet<usize>> = BTreeMap::new();
    for (id, node) in g.nodes() {
        let (Some(placed), Some(own)) = (&p.nodes[id.0 as usize], &node.device) else {
            continue;
        };
        let name = &p.devices[placed.device];
        let is_user = !variable_uses(node).is_empty();
        let overridden = matches!(placed.reason, Reason::Overridden(_)) && is_user;
        assert!(
            overridden || own.spec.relaxed().fits(name),
            "{} on {name}",
            own.spec
        );
        assert!(
            overridden || r.fallback != Fallback::Error || own.spec.fits(name),
            "{} on {name}",
            own.spec
        );
        own.groups
            .keys()
            .for_each(|k| groups.entry(k).or_default().extend([placed.device]));
    }
    if r.fallback == Fallback::Error {
        assert!(
            groups.values().all(|devices| devices.len() == 1),
            "{groups:?}"
        );
    }
}

#[test]
fn a_missing_device_everywhere_is_not_told_for_every_node() {
    let nodes: Vec<String> = (0..50)
        .map(|i| format!("neg(%0) on \"/gpu:9\" @ \"/n{i}\""))
        .collect();
    let e = resolved(&graph(&nodes), &request(Fallback::Error))
        .unwrap_err()
        .to_string();
    assert_eq!(
        e.matches("was explicitly assigned to").count(),
        MAX_ERRORS,
        "{e}"
    );
    assert!(e.contains("and 40 more nodes that cannot be placed"), "{e}");
}
