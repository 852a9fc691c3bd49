//! The placement study: makespans against the classic list schedulers and against proven bounds,
//! memory caps, graphs without communication, and the growth of planning time. `cargo bench --bench
//! placement [-- SECTION ..]`; sections: links, caps, identical, scale. Under `cargo test` one small
//! row.
//!
//! Times of planning are of this machine; makespans are of the simulator and the same everywhere.

use gristmill::cost::{Bytes, LinkProfile, Nanos};
use gristmill::place::task_graph::{TaskGraph, Topology};
use gristmill::testing::Rng;
use gristmill_solver::search::portfolio::{self, Algorithm, Options, Solution};
use gristmill_solver::{Device, Links, Parts, Payload, Problem, Task, Tensor};
use std::fmt;
use std::fs::DirEntry;
use std::path::Path;
use std::time::Instant;

/// The 18 rows of the study: graph, devices, GB/s of every link; latency is 10 us.
const ROWS: [(&str, usize, u64); 18] = [
    ("inception_v3.fwd", 2, 12),
    ("inception_v3.fwd", 4, 12),
    ("inception_v3.fwd", 4, 150),
    ("inception_v3.train", 2, 12),
    ("inception_v3.train", 4, 12),
    ("inception_v3.train", 4, 150),
    ("nasnetamobile.fwd", 2, 12),
    ("nasnetamobile.fwd", 4, 12),
    ("nasnetamobile.fwd", 4, 150),
    ("nasnetamobile.train", 2, 12),
    ("nasnetamobile.train", 4, 12),
    ("nasnetamobile.train", 4, 150),
    ("nasnetalarge.fwd", 2, 12),
    ("nasnetalarge.fwd", 4, 12),
    ("nasnetalarge.fwd", 4, 150),
    ("nasnetalarge.train", 2, 12),
    ("nasnetalarge.train", 4, 12),
    ("nasnetalarge.train", 4, 150),
];

/// The rules that the portfolio is measured against.
const RULES: [Algorithm; 4] = [
    Algorithm::Heft,
    Algorithm::HeftAppend,
    Algorithm::Greedy,
    Algorithm::Etf,
];

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if !arguments.iter().any(|a| a == "--bench") {
        links(&[("squeezenet1_0.fwd", 2, 12)]);
        return;
    }
    let wanted = |section: &str| {
        arguments.iter().all(|a| a.starts_with("--")) || arguments.iter().any(|a| a == section)
    };
    if wanted("links") {
        links(&ROWS);
    }
    if wanted("caps") {
        caps();
    }
    if wanted("identical") {
        identical();
    }
    if wanted("scale") {
        scale();
    }
}

fn folder() -> &'static Path {
    Path::new(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../tests/data/placement"
    ))
}

fn problem(name: &str, n: usize, gigabytes_per_second: u64, memory: Option<Bytes>) -> Problem {
    let text = std::fs::read_to_string(folder().join(format!("pipedream/{name}.json")))
        .expect("the graph is there");
    let limit = memory.map_or(String::new(), |m| format!(r#", "memory_bytes": {}"#, m.0));
    let device = |i: usize| format!(r#"{{ "name": "/gpu:{i}", "kind": "gpu"{limit} }}"#);
    let devices: Vec<String> = (0..n).map(device).collect();
    let topology = format!(
        r#"{{ "format": "topology/1", "devices": [{}], "default_link": {{ "latency_ns": 10000, "bytes_per_second": {gigabytes_per_second}000000000 }} }}"#,
        devices.join(", ")
    );
    let graph = TaskGraph::parse(&text).expect("a good graph");
    graph
        .problem(&Topology::parse(&topology).expect("a good topology"))
        .expect("a good problem")
}

fn solve(p: &Problem) -> (Solution, f64) {
    let started = Instant::now();
    let solution = portfolio::solve(p, &Options::new(p), &Algorithm::name)
        .expect("the portfolio proposes something");
    (solution, started.elapsed().as_secs_f64())
}

fn ms(t: Nanos) -> f64 {
    t.0 as f64 / 1e6
}

/// Geometric mean.
fn mean(ratios: &[f64]) -> f64 {
    (ratios.iter().map(|r| r.ln()).sum::<f64>() / ratios.len().max(1) as f64).exp()
}

fn links(rows: &[(&str, usize, u64)]) {
    println!(
        "graph, devices, GB/s | heft, heft-append, greedy, etf (ms) | ours (ms), by | of best rule | of bound, which | plan (s)"
    );
    let (mut slow, mut fast) = (Vec::new(), Vec::new());
    for &(name, n, rate) in rows {
        let p = problem(name, n, rate, None);
        let rules = RULES.map(|a| a.run(&p, &[0]).map_or(f64::INFINITY, |t| ms(t.makespan)));
        let best = rules.into_iter().fold(f64::INFINITY, f64::min);
        let (s, seconds) = solve(&p);
        let (ours, bound) = (ms(s.timeline.makespan), ms(s.lower_bound));
        println!(
            "{name}, {n}, {rate} | {:.1}, {:.1}, {:.1}, {:.1} | {ours:.1}, {} | {:.3} | {:.3}, {} | {seconds:.2}",
            rules[0],
            rules[1],
            rules[2],
            rules[3],
            s.algorithm,
            ours / best,
            ours / bound,
            s.bound
        );
        if rate < 100 {
            slow.push(ours / best)
        } else {
            fast.push(ours / bound)
        }
    }
    println!(
        "geometric means: slow links {:.4} of the best rule, fast links {:.4} of the bound",
        mean(&slow),
        mean(&fast)
    );
}

/// Devices with a share of the memory that the whole graph needs: against Baechi's placers.
fn caps() {
    println!("graph, devices, cap (%) | m-etf, m-sct (ms) | ours (ms), by | plan (s)");
    let mut tally = Tally::default();
    for name in &pipedream_names() {
        let whole = problem(name, 1, 12, None);
        let need = solve(&whole).0.timeline.peak_bytes(&whole)[0];
        let caps = |n| [100, 60, 40, 30].map(|percent| (n, percent));
        for (n, percent) in [1, 2, 4, 8].into_iter().flat_map(caps) {
            let p = problem(name, n, 12, Some(Bytes(need.0 / 100 * percent)));
            let theirs =
                [Algorithm::MEtf, Algorithm::MSct].map(|a| a.run(&p, &[0]).map(|t| t.makespan));
            let (s, seconds) = solve(&p);
            let ours = (s.score.0 == Bytes::ZERO).then_some(s.timeline.makespan);
            tally.count(ours, theirs.into_iter().flatten().min());
            let show = |t: Option<Nanos>| t.map_or("-".to_owned(), |t| format!("{:.1}", ms(t)));
            println!(
                "{name}, {n}, {percent} | {}, {} | {}, {} | {seconds:.2}",
                show(theirs[0]),
                show(theirs[1]),
                show(ours),
                s.algorithm
            );
        }
    }
    println!("{tally}");
}

fn pipedream_names() -> Vec<String> {
    let name = |entry: std::io::Result<DirEntry>| {
        let file_name = entry.ok()?.file_name();
        Some(file_name.to_str()?.strip_suffix(".json")?.to_owned())
    };
    let entries = std::fs::read_dir(folder().join("pipedream")).expect("the folder is there");
    let mut names: Vec<String> = entries.filter_map(name).collect();
    names.sort();
    names
}

/// Outcomes of our makespan against the best of others.
#[derive(Default)]
struct Tally {
    n_better: usize,
    n_equal: usize,
    n_worse: usize,
    n_only_ours: usize,
    n_nobody: usize,
}

impl Tally {
    fn count(&mut self, ours: Option<Nanos>, theirs: Option<Nanos>) {
        let outcome = match (ours, theirs) {
            (Some(a), Some(b)) if a < b => &mut self.n_better,
            (Some(a), Some(b)) if a == b => &mut self.n_equal,
            (Some(_), None) => &mut self.n_only_ours,
            (None, None) => &mut self.n_nobody,
            _ => &mut self.n_worse,
        };
        *outcome += 1;
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "better {}, equal {}, worse {}, feasible only for ours {}, for nobody {}",
            self.n_better, self.n_equal, self.n_worse, self.n_only_ours, self.n_nobody
        )
    }
}

/// Random graphs without communication on identical processors.
fn identical() {
    println!("tasks, processors | proven optimal | mean gap (%) | slowest plan (s)");
    let (mut all, mut all_proven) = (0, 0);
    for (n, processors) in [50, 100]
        .into_iter()
        .flat_map(|n| [2, 4, 8, 16].map(|p| (n, p)))
    {
        let (mut proven, mut gap, mut slowest) = (0, 0.0, 0.0f64);
        const GRAPHS: u64 = 25;
        for seed in 0..GRAPHS {
            let p = random_graph(n, processors, seed);
            let (s, seconds) = solve(&p);
            proven += u32::from(s.timeline.makespan == s.lower_bound);
            gap += s.timeline.makespan.0 as f64 / s.lower_bound.0 as f64 - 1.0;
            slowest = slowest.max(seconds);
        }
        all += GRAPHS as u32;
        all_proven += proven;
        println!(
            "{n}, {processors} | {proven} of {GRAPHS} | {:.3} | {slowest:.2}",
            100.0 * gap / GRAPHS as f64
        );
    }
    println!("proven optimal: {all_proven} of {all}");
}

/// Tasks of 1 to 20 us with random forward edges, drawn in three ways; links cost nothing.
fn random_graph(n: usize, processors: usize, seed: u64) -> Problem {
    let mut rng = Rng(seed * 7919 + n as u64);
    let free = LinkProfile {
        latency: Nanos::ZERO,
        bytes_per_second: 1_000_000_000,
    };
    let n_layers = 3 + rng.below(n / 4);
    let layer: Vec<usize> = (0..n).map(|t| t * n_layers / n).collect();
    let style = rng.below(3);
    let density = 2 + rng.below(6);
    let edge = |a: usize, b: usize, rng: &mut Rng| match style {
        0 => layer[b] == layer[a] + 1 && rng.below(10) < density,
        1 => layer[b] > layer[a] && rng.below(n) < density,
        _ => b - a < 12 && rng.below(20) < density,
    };
    let tensors = (0..n).map(|a| {
        let consumers = (a + 1..n)
            .filter(|&b| edge(a, b, &mut rng))
            .map(|b| b as u32)
            .collect();
        (
            Tensor {
                producer: a as u32,
                payload: Payload::Bytes(Bytes::ZERO),
            },
            consumers,
        )
    });
    let tensors = tensors.collect();
    let task = |rng: &mut Rng| Task {
        cost: vec![Nanos(1_000 * (1 + rng.below(20) as u64)); processors],
        ..Task::default()
    };
    make(
        processors,
        free,
        (0..n).map(|_| task(&mut rng)).collect(),
        tensors,
    )
}

fn make(
    n_devices: usize,
    link: LinkProfile,
    tasks: Vec<Task>,
    tensors: Vec<(Tensor, Vec<u32>)>,
) -> Problem {
    let devices = vec![
        Device {
            memory: None,
            is_host: false
        };
        n_devices
    ];
    let links = Links::uniform(n_devices, link);
    Problem::new(Parts {
        devices,
        links,
        tasks,
        tensors,
        constants: Vec::new(),
    })
    .expect("edges go forward")
}

/// Growth of planning time, on 8 devices.
fn scale() {
    println!("tasks, edges | problem | heft | etf | whole run (ms) | makespan of bound");
    for n in [1_000, 10_000, 100_000, 1_000_000] {
        let started = Instant::now();
        let p = wide_graph(n, 8);
        let made = started.elapsed().as_secs_f64() * 1e3;
        let time = |a: Algorithm| {
            let started = Instant::now();
            a.run(&p, &[0]);
            started.elapsed().as_secs_f64() * 1e3
        };
        let (heft, etf) = (time(Algorithm::Heft), time(Algorithm::Etf));
        let (s, seconds) = solve(&p);
        println!(
            "{n}, {} | {made:.1} | {heft:.1} | {etf:.1} | {:.1} | {:.3}",
            p.consumers.n_items(),
            seconds * 1e3,
            s.timeline.makespan.0 as f64 / s.lower_bound.0 as f64
        );
    }
}

/// About two edges a task, each from one of the 30 tasks before; up to 4 MB over links of 12 GB/s.
fn wide_graph(n: usize, n_devices: usize) -> Problem {
    let mut rng = Rng(3);
    let link = LinkProfile {
        latency: Nanos(10_000),
        bytes_per_second: 12_000_000_000,
    };
    let task = |rng: &mut Rng| Task {
        cost: vec![Nanos(20_000 + rng.below(400_000) as u64); n_devices],
        ..Task::default()
    };
    let tasks = (0..n).map(|_| task(&mut rng)).collect();
    let mut consumers: Vec<Vec<u32>> = vec![Vec::new(); n];
    for t in 1..n {
        for _ in 0..1 + rng.below(3) {
            let before = t - 1 - rng.below(30.min(t));
            if !consumers[before].contains(&(t as u32)) {
                consumers[before].push(t as u32);
            }
        }
    }
    let tensor = |(t, consumers): (usize, Vec<u32>), rng: &mut Rng| {
        (
            Tensor {
                producer: t as u32,
                payload: Payload::Bytes(Bytes(rng.below(4_000_000) as u64)),
            },
            consumers,
        )
    };
    let tensors = consumers
        .into_iter()
        .enumerate()
        .map(|c| tensor(c, &mut rng))
        .collect();
    make(n_devices, link, tasks, tensors)
}
