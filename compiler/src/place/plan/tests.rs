//! Plans that come back, and plans that cannot be kept.

use super::*;
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
    (graph.problem(&Topology::parse(TOPOLOGY).unwrap()).unwrap(), names)
}

fn read(text: &str) -> Result<Planned> {
    let (p, tasks) = problem();
    let devices = DEVICES.map(str::to_owned);
    let find = |text: &str| DEVICES.iter().position(|d| *d == text);
    let names = Names { tasks: &tasks, devices: &devices, find: &find, reason: &|_| "no time there".to_owned() };
    Plan::parse(text, "my.plan")?.resolve(&p, &names)
}

#[test]
fn plans_come_back() {
    let (p, tasks) = problem();
    let text = write("g", &tasks, &DEVICES.map(str::to_owned), &[1, 2, 0, 0], Nanos(15));
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
    assert_eq!(planned.iter().map(|l| l.0).collect::<Vec<_>>(), [1, 2, 0, 0]);
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
    let errors: Vec<String> = cases.iter().map(|text| read(text).unwrap_err().to_string()).collect();
    insta::assert_snapshot!(errors.join("\n"), @r#"
    my.plan, line 1: "a = /gpu:0"; expected "plan/1" (try: --plan-out FILE, which writes plans)
    3 problems:
      - my.plan, line 2: expected `node = device`
      - my.plan, line 4: "1" after the device; names with spaces need quotes
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
    for node in ["a", "a b", "a=b", "#a", "\"", "", "a\nb", "ü/é:1"] {
        assert_eq!(entry(&format!("{} = /gpu:0", quoted(node))), Ok((node.to_owned(), "/gpu:0".to_owned())));
    }
}
