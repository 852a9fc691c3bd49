//! Plans that come back, and plans that cannot be kept.

use super::*;
use crate::cost::LinkProfile;
use crate::place::task_graph::{TaskGraph, Topology};

const GRAPH: &str = r#"{ "format": "task-graph/1", "name": "g",
  "nodes": [ { "name": "a b", "cost_ns": { "gpu": 10 } }, { "name": "c", "cost_ns": { "gpu": 10, "cpu": 5 } },
             { "name": "d", "cost_ns": { "gpu": 10 }, "colocate": "x" }, { "name": "e", "cost_ns": { "gpu": 10 }, "colocate": "x" } ],
  "edges": [[0, 1]] }"#;
const TOPOLOGY: &str = r#"{ "format": "topology/1",
  "devices": [ { "name": "/gpu:0", "kind": "gpu" }, { "name": "/gpu:1", "kind": "gpu" }, { "name": "/cpu:0", "kind": "cpu" } ],
  "default_link": { "latency_ns": 1, "bytes_per_second": 1000000000 } }"#;
const DEVICES: [&str; 3] = ["/gpu:0", "/gpu:1", "/cpu:0"];

fn problem() -> (Problem, Vec<String>) {
    let graph = TaskGraph::parse(GRAPH).unwrap();
    let names = graph.nodes.iter().map(|n| n.name.clone()).collect();
    (
        graph.problem(&Topology::parse(TOPOLOGY).unwrap()).unwrap(),
        names,
    )
}

fn read(text: &str) -> Result<Planned> {
    let (p, tasks) = problem();
    let devices = DEVICES.map(str::to_owned);
    let find = |text: &str| DEVICES.iter().position(|d| *d == text);
    let parking = vec![
        None,
        None,
        Some(LinkProfile {
            latency: Nanos(1),
            bytes_per_second: 1_000_000_000,
        }),
    ];
    let freedom = Freedom {
        may_copy: vec![true, true, false, false],
        is_held: Vec::new(),
        parking,
    };
    let names = Names {
        tasks: &tasks,
        devices: &devices,
        find: &find,
        reason: &|_| "no time there".to_owned(),
        freedom: &freedom,
    };
    Plan::parse(text, "my.plan")?.resolve(&p, &names)
}

#[test]
fn plans_come_back() {
    let (p, tasks) = problem();
    let text = write(
        "g",
        &tasks,
        &DEVICES.map(str::to_owned),
        &[1, 2, 0, 0],
        Nanos(15),
        &[],
    );
    insta::assert_snapshot!(text, @r#"
    plan/1
    # graph "g"
    # devices /gpu:0, /gpu:1, /cpu:0
    # predicted makespan 15 ns (15 ns)
    "a b" = /gpu:1
    c = /cpu:0
    d = /gpu:0
    e = /gpu:0
    "#);
    let planned = read(&text).unwrap();
    assert_eq!(
        planned.tasks.iter().map(|l| l.0).collect::<Vec<_>>(),
        [1, 2, 0, 0]
    );
    let solution = solve(&p, &planned, &Options::new(&p), &Algorithm::name).unwrap();
    assert_eq!(solution.timeline.device, [1, 2, 0, 0]);
    // Other devices are faster, so the bound of the problem is below what the plan can reach.
    assert!(solution.lower_bound < solution.timeline.makespan);
    assert_eq!(solution.algorithm, "plan");
}

#[test]
fn plans_that_cannot_be_kept_say_where_and_why() {
    let whole = "\"a b\" = /gpu:1\nc = /cpu:0\nd = /gpu:0\ne = /gpu:0\n";
    let cases = [
        "a = /gpu:0".to_owned(),
        "plan/1\nc /cpu:0\n\nc = /gpu:0 1\n\"c = x".to_owned(),
        format!("plan/1\n{whole}# again\nc = /gpu:0\n"),
        format!("plan/1\n{}", whole.replace("c = /cpu:0", "cc = /cpu:1")),
        format!("plan/1\n{}", whole.replace("/gpu:0", "/cpu:0")),
        format!("plan/1\n{}", whole.replace("e = /gpu:0", "e = /gpu:1")),
        "plan/1\nc = /cpu:0\nd=/gpu:0".to_owned(),
    ];
    let errors: Vec<String> = cases
        .iter()
        .map(|text| read(text).unwrap_err().to_string())
        .collect();
    insta::assert_snapshot!(errors.join("\n"), @r#"
    my.plan, line 1: "a = /gpu:0"; expected "plan/1" (try: --plan-out FILE, which writes plans)
    3 problems:
      - my.plan, line 2: expected `node = device`
      - my.plan, line 4: "1" after the device; expected nothing, `runs NODE for USER, ...` or `parks NODE for USER, ...` (names with spaces need quotes)
      - my.plan, line 5: "\"c = x" does not begin with a string
    my.plan, line 7: node "c" comes twice; first in line 3
    my.plan, line 3: there is no node "cc" to place (try: c)
    2 problems:
      - my.plan, line 4: d cannot be on /cpu:0: no time there; it can be on /gpu:0, /gpu:1
      - my.plan, line 5: e cannot be on /cpu:0: no time there; it can be on /gpu:0, /gpu:1
    my.plan, line 5: e is on /gpu:1, but line 4 puts d on /gpu:0; they must be together
    my.plan: no line for a b, e; expected one for every node (try: a plan of the same graph and options)
    "#);
}

#[test]
fn names_are_quoted_where_they_must_be() {
    for node in ["a", "a b", "a=b", "a,b", "#a", "\"", "", "a\nb", "ü/é:1"] {
        assert_eq!(
            entry(&format!("{} = /gpu:0", quoted(node))),
            Ok((node.to_owned(), "/gpu:0".to_owned(), None))
        );
    }
}

/// Copies of the task that feeds `c`.
#[test]
fn copies_are_read_and_written() {
    let whole = "plan/1\n\"a b\" = /gpu:1\nc = /gpu:0\nd = /gpu:0\ne = /gpu:0\n";
    let runs = read(&format!("{whole}x = /gpu:0 runs \"a b\" for c\n")).unwrap();
    assert_eq!(
        runs.copies,
        [Copy {
            task: 0,
            parked: None,
            device: 0,
            users: vec![1]
        }]
    );
    let parks = read(&format!("{whole}x = /cpu:0  parks  \"a b\"  for c\n")).unwrap();
    assert_eq!(
        parks.copies,
        [Copy {
            task: 0,
            parked: Some(0),
            device: 2,
            users: vec![1]
        }]
    );
    assert_eq!(
        read(&format!(
            "{whole}x = /cpu:0 parks result 0 of \"a b\" for c\n"
        ))
        .unwrap(),
        parks
    );
    // A copy can take the results of another: that which is used comes after its user.
    let both = read(&format!(
        "{whole}x = /cpu:0 parks \"a b\" for \"c 2\"\n\"c 2\" = /gpu:1 runs c for c\n"
    ));
    assert!(
        both.unwrap_err()
            .to_string()
            .contains("c does not take what c makes")
    );
    let (p, mut names) = problem();
    names.push("a b (copy)".to_owned());
    assert_eq!(
        copy_lines::text(&p, &runs.copies[0], &names),
        " runs \"a b\" for c"
    );
    assert_eq!(
        copy_lines::text(&p, &parks.copies[0], &names),
        " parks \"a b\" for c"
    );
    let text = write(
        "g",
        &names,
        &DEVICES.map(str::to_owned),
        &[1, 0, 0, 0, 0],
        Nanos(1),
        &[" runs \"a b\" for c".to_owned()],
    );
    assert_eq!(read(&text).unwrap().copies, runs.copies);
}

#[test]
fn copies_that_cannot_be_say_where_and_why() {
    let whole = "plan/1\n\"a b\" = /gpu:1\nc = /gpu:0\nd = /gpu:0\ne = /gpu:0\n";
    let cases = [
        (
            "x = /gpu:0 run c",
            "line 6: \"run c\" after the device; expected nothing, `runs NODE for USER, ...`",
        ),
        ("x = /gpu:0 runs c", "after the device; expected nothing"),
        (
            "x = /gpu:0 runs c for",
            "after the device; expected nothing",
        ),
        (
            "x = /gpu:0 runs \"a b\" for c,",
            "after the device; expected nothing",
        ),
        (
            "x = /gpu:0 runs \"a b\" for c d",
            "after the device; expected nothing",
        ),
        (
            "d = /gpu:0 runs \"a b\" for c",
            "line 6: node \"d\" comes twice; first in line 4",
        ),
        (
            "x = /gpu:0 runs cc for c",
            "there is no node \"cc\" to place (try: c",
        ),
        (
            "x = /gpu:7 runs \"a b\" for c",
            "there is no device \"/gpu:7\"; available: /gpu:0",
        ),
        (
            "x = /gpu:0 runs d for e",
            "line 6: d does not run again: only nodes do whose effect",
        ),
        (
            "x = /cpu:0 runs \"a b\" for c",
            "line 6: a b cannot be on /cpu:0; it can be on /gpu:0, /gpu:1",
        ),
        (
            "x = /gpu:0 runs \"a b\" for cc",
            "line 6: there is no node or copy \"cc\" (try: c",
        ),
        (
            "x = /gpu:0 runs \"a b\" for d",
            "line 6: d does not take what a b makes",
        ),
        (
            "x = /gpu:0 parks \"a b\" for c",
            "line 6: a b is on /gpu:1 and is not parked on /gpu:0: tensors of devices",
        ),
        (
            "x = /cpu:0 parks result 3 of \"a b\" for c",
            "line 6: a b has no result 3 that is used; it has 1",
        ),
        (
            "x = /cpu:0 parks d for c",
            "line 6: c does not take what d makes",
        ),
        (
            "x = /gpu:0 runs \"a b\" for c\ny = /cpu:0 parks \"a b\" for c",
            "line 7: c takes that already from the copy in line 6",
        ),
        (
            "x = /gpu:0 runs c for x",
            "line 6: x and its users are copies of each other",
        ),
    ];
    for (lines, part) in cases {
        let error = read(&format!("{whole}{lines}\n")).unwrap_err().to_string();
        assert!(error.contains(part), "{lines}\n{error}");
    }
}
