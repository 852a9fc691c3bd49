//! The files of bare placement problems: `task-graph/1` and `topology/1` in, `placement/1` out.
//! JSON; times in nanoseconds, sizes in bytes.

use super::explain::{Explanation, Label, Subject};
use super::shortage;
use crate::cost::{Bytes, LinkProfile, Nanos};
use crate::error::{Error, Result};
use crate::nearest::nearest;
use gristmill_solver::memory::remat::Freedom;
use gristmill_solver::search::portfolio::{Options, Solution};
use gristmill_solver::{Device, Links, Parts, Payload, Problem, Refused, Task, Tensor, Timeline};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Longest time of a task or transfer, so that sums over a million of them fit.
pub(super) const MOST_NS: u64 = 1 << 44;
/// Largest size of an output or of resident bytes: 16 TiB.
const MOST_BYTES: u64 = 1 << 44;

/// A task graph as the file has it.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TaskGraph {
    format: String,
    /// Name of the graph.
    #[serde(default)]
    pub name: String,
    /// The tasks.
    pub nodes: Vec<Node>,
    /// `[source, destination]`, indices into `nodes`.
    pub edges: Vec<[usize; 2]>,
    /// The machine that the problem was published with.
    #[serde(default)]
    pub limits: Option<Limits>,
}

/// A task.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Node {
    /// Its name.
    pub name: String,
    /// Its op, for people.
    #[serde(default)]
    pub op: String,
    /// Run time by kind of device; no kernel on kinds that are absent.
    pub cost_ns: BTreeMap<String, u64>,
    /// Size of its output.
    #[serde(default)]
    pub output_bytes: Option<u64>,
    /// Bytes that its device holds for the whole step.
    #[serde(default)]
    pub resident_bytes: u64,
    /// Tasks of one group run on one device.
    #[serde(default)]
    pub colocate: Option<String>,
    /// A device of the topology, or all of a kind: `/gpu:*`.
    #[serde(default)]
    pub device: Option<String>,
    /// One-way copy of the output between an accelerator and its host, instead of a size.
    #[serde(default)]
    pub output_host_copy_ns: Option<u64>,
    /// Part of the backward pass.
    #[serde(default)]
    pub backward: bool,
}

/// The machine that a problem of the `dnn-partitioning` set was published with.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Number of accelerators.
    pub max_accelerators: usize,
    /// Number of CPUs.
    pub max_cpus: usize,
    /// Memory of each accelerator.
    pub accelerator_bytes: u64,
}

/// Devices and links as the file has them.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Topology {
    format: String,
    /// The devices.
    pub devices: Vec<TopologyDevice>,
    #[serde(default)]
    links: Vec<Link>,
    #[serde(default)]
    default_link: Option<LinkRates>,
}

/// A device of a topology.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TopologyDevice {
    /// Its name.
    pub name: String,
    /// Its kind: a key of `cost_ns`.
    pub kind: String,
    /// Most bytes that it may hold at a time.
    #[serde(default)]
    pub memory_bytes: Option<u64>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Link {
    from: String,
    to: String,
    latency_ns: u64,
    bytes_per_second: u64,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LinkRates {
    latency_ns: u64,
    bytes_per_second: u64,
}

/// A solved problem, as the file has it.
#[derive(Clone, Debug, Serialize)]
pub struct PlacementFile<'a> {
    /// `placement/1`.
    pub format: &'static str,
    /// Predicted time of the whole graph.
    pub makespan_ns: u64,
    /// No placement is faster than this.
    pub lower_bound_ns: u64,
    /// Name of the lower bound.
    pub bound: String,
    /// `makespan / lower bound - 1`.
    pub gap: f64,
    /// True when the gap is nothing.
    pub optimal: bool,
    /// The winning algorithm.
    pub algorithm: String,
    /// Time to solve.
    pub plan_time_ns: u64,
    /// Every task.
    pub nodes: Vec<PlacedNode<'a>>,
    /// Every transfer.
    pub transfers: Vec<PlacedTransfer<'a>>,
    /// Most bytes that each device holds at a time.
    pub peak_bytes: BTreeMap<&'a str, u64>,
    /// Why, if that was asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub explain: Option<Explanation>,
}

/// Where and when a task runs.
#[derive(Clone, Debug, Serialize)]
pub struct PlacedNode<'a> {
    /// Name of the task.
    pub name: &'a str,
    /// Its device.
    pub device: &'a str,
    /// Its start.
    pub start_ns: u64,
    /// Its end.
    pub end_ns: u64,
}

/// When an output crosses which link.
#[derive(Clone, Debug, Serialize)]
pub struct PlacedTransfer<'a> {
    /// Task whose output it is.
    pub name: &'a str,
    /// Source device.
    pub from: &'a str,
    /// Destination device.
    pub to: &'a str,
    /// When it enters the link.
    pub start_ns: u64,
    /// When it is there.
    pub end_ns: u64,
}

impl TaskGraph {
    /// Reads `task-graph/1`.
    ///
    /// Errors with line and column where the text is not such a file.
    pub fn parse(text: &str) -> Result<TaskGraph> {
        let graph: TaskGraph =
            serde_json::from_str(text).map_err(|e| Error::invalid(format!("task graph: {e}")))?;
        expect_format(&graph.format, "task-graph/1")?;
        Ok(graph)
    }

    /// The machine that this problem was published with: accelerators of kind `gpu` with their
    /// memory, and CPUs.
    ///
    /// Errors when the file has no `limits`, or outputs with a size: it says nothing of links.
    pub fn published_topology(&self) -> Result<Topology> {
        let Some(limits) = self.limits else {
            return Err(
                Error::invalid("no --topology, and the task graph has no limits")
                    .hint("--topology FILE"),
            );
        };
        if let Some(node) = self
            .nodes
            .iter()
            .find(|n| n.output_bytes.is_some_and(|b| b > 0))
        {
            return Err(
                Error::invalid("its output has a size, but nothing is known of links")
                    .at(&node.name)
                    .hint("--topology FILE"),
            );
        }
        let device = |kind: &str, i: usize, memory_bytes| {
            let (name, kind) = (format!("/{kind}:{i}"), kind.to_owned());
            TopologyDevice {
                name,
                kind,
                memory_bytes,
            }
        };
        let most = 4096;
        if limits.max_accelerators + limits.max_cpus == 0
            || limits.max_accelerators.max(limits.max_cpus) > most
        {
            let message = format!(
                "limits have {} accelerators and {} CPUs",
                limits.max_accelerators, limits.max_cpus
            );
            return Err(Error::invalid(format!(
                "{message}; expected at least one device, and at most {most} of a kind"
            )));
        }
        let accelerators =
            (0..limits.max_accelerators).map(|i| device("gpu", i, Some(limits.accelerator_bytes)));
        let devices = accelerators
            .chain((0..limits.max_cpus).map(|i| device("cpu", i, None)))
            .collect();
        let nothing = LinkRates {
            latency_ns: 0,
            bytes_per_second: u64::MAX,
        };
        Ok(Topology {
            format: "topology/1".into(),
            devices,
            links: Vec::new(),
            default_link: Some(nothing),
        })
    }

    /// The problem of this graph on a topology. Task `i` is node `i`; tensor `i` is its output.
    ///
    /// Errors, naming nodes and devices, on edges to nowhere, names that come twice, unknown
    /// devices, cycles, and nodes or groups that no device can run.
    pub fn problem(&self, topology: &Topology) -> Result<Problem> {
        expect_unique("node", self.nodes.iter().map(|n| n.name.as_str()))?;
        self.nodes.iter().try_for_each(Node::expect_sizes)?;
        let links = topology.links()?;
        self.expect_transfers(&links)?;
        let consumers = self.consumers()?;
        let mut groups: BTreeMap<&str, u32> = BTreeMap::new();
        let mut tasks = Vec::with_capacity(self.nodes.len());
        let mut tensors = Vec::with_capacity(self.nodes.len());
        for ((i, node), consumers) in self.nodes.iter().enumerate().zip(consumers) {
            let payload = match (node.output_host_copy_ns, node.output_bytes) {
                (Some(_), Some(_)) => {
                    let message =
                        "has both output_bytes and output_host_copy_ns; expected one of them";
                    return Err(Error::invalid(message).at(&node.name));
                }
                (Some(time), None) => Payload::HostCopy(Nanos(time)),
                (None, bytes) => Payload::Bytes(Bytes(bytes.unwrap_or(0))),
            };
            let n_groups = groups.len() as u32;
            tasks.push(Task {
                cost: topology.costs(node)?,
                resident: Bytes(node.resident_bytes),
                group: node
                    .colocate
                    .as_deref()
                    .map(|name| *groups.entry(name).or_insert(n_groups)),
                ..Task::default()
            });
            tensors.push((
                Tensor {
                    producer: i as u32,
                    payload,
                },
                consumers,
            ));
        }
        let parts = Parts {
            devices: topology.solver_devices(),
            links,
            tasks,
            tensors,
            constants: Vec::new(),
        };
        Problem::new(parts).map_err(|refused| self.refusal(refused, topology))
    }

    /// Errors when the largest output takes too long over a link.
    fn expect_transfers(&self, links: &Links) -> Result<()> {
        let largest = self.nodes.iter().max_by_key(|n| n.output_bytes);
        let Some((node, bytes)) = largest.and_then(|n| n.output_bytes.map(|b| (n, b))) else {
            return Ok(());
        };
        let classes = links.count_classes();
        match classes
            .iter()
            .find(|(l, n)| *n > 0 && l.transfer(Bytes(bytes)).0 > MOST_NS)
        {
            None => Ok(()),
            Some((link, _)) => {
                let message = format!(
                    "its output_bytes {bytes} take too long over a link of {} B/s; expected at most {MOST_NS} ns, about five hours",
                    link.bytes_per_second
                );
                Err(Error::invalid(message)
                    .at(&node.name)
                    .hint("a higher bytes_per_second"))
            }
        }
    }

    /// Consumers of each node, each once.
    fn consumers(&self) -> Result<Vec<Vec<u32>>> {
        let mut consumers: Vec<Vec<u32>> = vec![Vec::new(); self.nodes.len()];
        for (i, &[from, to]) in self.edges.iter().enumerate() {
            let n = self.nodes.len();
            if from >= n || to >= n {
                let bad = if from >= n { from } else { to };
                return Err(Error::invalid(format!(
                    "edge {i} [{from}, {to}]: there is no node {bad}; expected indices below {n}"
                )));
            }
            consumers[from].push(to as u32);
        }
        for row in &mut consumers {
            row.sort_unstable();
            row.dedup();
        }
        Ok(consumers)
    }

    fn refusal(&self, refused: Refused, topology: &Topology) -> Error {
        let names = |tasks: &[u32]| {
            let shown: Vec<&str> = tasks
                .iter()
                .take(8)
                .map(|&t| self.nodes[t as usize].name.as_str())
                .collect();
            let more = tasks.len().saturating_sub(shown.len());
            if more == 0 {
                shown.join(", ")
            } else {
                format!("{} and {more} more", shown.join(", "))
            }
        };
        match refused {
            Refused::Cycle(tasks) => {
                let first = tasks
                    .first()
                    .map_or("", |&t| self.nodes[t as usize].name.as_str());
                Error::invalid(format!(
                    "dependency cycle: {} -> {first}",
                    names(&tasks).replace(", ", " -> ")
                ))
                .hint("remove one of these edges")
            }
            Refused::NoDevice(task) => {
                let node = &self.nodes[task as usize];
                let kinds: Vec<&str> = node.cost_ns.keys().map(String::as_str).collect();
                let devices: Vec<String> = topology
                    .devices
                    .iter()
                    .map(|d| format!("{} ({})", d.name, d.kind))
                    .collect();
                Error::invalid(format!(
                    "no device can run it: it has times for {kinds:?}, the topology has {}",
                    devices.join(", ")
                ))
                .at(&node.name)
                .hint("a device of such a kind in the topology, or another pin")
            }
            Refused::Group(tasks) => {
                let group = tasks
                    .first()
                    .and_then(|&t| self.nodes[t as usize].colocate.as_deref())
                    .unwrap_or_default();
                Error::invalid(format!(
                    "group {group:?} has no device that all its nodes can be on: {}",
                    self.conflict(&tasks, topology)
                ))
                .hint("another pin for one of these nodes, or another group")
            }
        }
    }

    /// The reason in the file for the device of a node: its own pin, else its group with the pin of
    /// another node there.
    pub fn reason(&self, p: &Problem, task: usize) -> Option<String> {
        let node = &self.nodes[task];
        if let Some(pin) = &node.device {
            return Some(format!("pinned by its \"device\": {pin:?}"));
        }
        let group = node.colocate.as_ref()?;
        let members = p.members.row(p.group_of[task] as usize);
        let others = members.iter().map(|&t| &self.nodes[t as usize]);
        match others
            .clone()
            .find_map(|n| n.device.as_ref().map(|pin| (n, pin)))
        {
            Some((n, pin)) => Some(format!(
                "colocated in group {group:?} with {}, pinned to {pin:?}",
                n.name
            )),
            None => Some(format!(
                "colocated in group {group:?} of {} nodes",
                others.count()
            )),
        }
    }

    /// Two nodes of a group that exclude each other, with their devices; else all of them.
    fn conflict(&self, tasks: &[u32], topology: &Topology) -> String {
        let open = |t: u32| -> Vec<usize> {
            let costs = topology.costs(&self.nodes[t as usize]).unwrap_or_default();
            (0..costs.len()).filter(|&d| costs[d].is_finite()).collect()
        };
        let sets: Vec<(u32, Vec<usize>)> = tasks.iter().map(|&t| (t, open(t))).collect();
        let smallest = sets.iter().min_by_key(|s| s.1.len());
        let against = smallest.and_then(|a| {
            sets.iter()
                .find(|b| a.1.iter().all(|d| !b.1.contains(d)))
                .map(|b| [a, b])
        });
        let describe = |(t, devices): &(u32, Vec<usize>)| {
            let names: Vec<&str> = devices
                .iter()
                .map(|&d| topology.devices[d].name.as_str())
                .collect();
            format!(
                "{} can be on {}",
                self.nodes[*t as usize].name,
                names.join(", ")
            )
        };
        match against {
            Some(pair) => pair.map(describe).join("; "),
            None => sets
                .iter()
                .take(8)
                .map(describe)
                .collect::<Vec<_>>()
                .join("; "),
        }
    }
}

impl Node {
    /// Errors on numbers that leave no room for sums.
    fn expect_sizes(&self) -> Result<()> {
        let numbers = [
            (
                "output_bytes",
                self.output_bytes.unwrap_or(0),
                MOST_BYTES,
                "16 TiB",
            ),
            ("resident_bytes", self.resident_bytes, MOST_BYTES, "16 TiB"),
            (
                "output_host_copy_ns",
                self.output_host_copy_ns.unwrap_or(0),
                MOST_NS,
                "about five hours",
            ),
        ];
        match numbers.into_iter().find(|(_, value, most, _)| value > most) {
            None => Ok(()),
            Some((key, value, most, words)) => Err(Error::invalid(format!(
                "{key} is {value}; expected at most {most}, {words}"
            ))
            .at(&self.name)),
        }
    }
}

impl Topology {
    /// Reads `topology/1`.
    ///
    /// Errors with line and column where the text is not such a file, on names that come twice, and
    /// on links of no bandwidth.
    pub fn parse(text: &str) -> Result<Topology> {
        let topology: Topology =
            serde_json::from_str(text).map_err(|e| Error::invalid(format!("topology: {e}")))?;
        expect_format(&topology.format, "topology/1")?;
        expect_unique("device", topology.devices.iter().map(|d| d.name.as_str()))?;
        if topology.devices.is_empty() {
            return Err(Error::invalid(
                "topology: no devices; expected at least one",
            ));
        }
        let rates = topology
            .links
            .iter()
            .map(|l| l.bytes_per_second)
            .chain(topology.default_link.map(|l| l.bytes_per_second));
        if rates.into_iter().any(|r| r == 0) {
            return Err(Error::invalid(
                "topology: a link has bytes_per_second 0; expected at least 1",
            ));
        }
        let latencies = topology
            .links
            .iter()
            .map(|l| l.latency_ns)
            .chain(topology.default_link.map(|l| l.latency_ns));
        if let Some(ns) = latencies.into_iter().find(|&ns| ns > MOST_NS) {
            let message = format!(
                "topology: a link has latency_ns {ns}; expected at most {MOST_NS}, about five hours"
            );
            return Err(Error::invalid(message));
        }
        Ok(topology)
    }

    /// Time of a node on each device, infinite where its pin or its kinds do not allow it.
    fn costs(&self, node: &Node) -> Result<Vec<Nanos>> {
        let pinned =
            |d: &TopologyDevice| node.device.as_deref().is_none_or(|pin| self.fits(pin, d));
        if let Some(pin) = node
            .device
            .as_deref()
            .filter(|pin| !self.devices.iter().any(|d| self.fits(pin, d)))
        {
            let names: Vec<&str> = self.devices.iter().map(|d| d.name.as_str()).collect();
            let near = nearest(pin, names.iter().copied(), 1)
                .first()
                .copied()
                .unwrap_or(names[0]);
            let message = format!(
                "its device {pin:?} is not in the topology; available: {}",
                names.join(", ")
            );
            return Err(Error::invalid(message).at(&node.name).hint(near));
        }
        if let Some((kind, ns)) = node.cost_ns.iter().find(|(_, ns)| **ns > MOST_NS) {
            let message = format!(
                "cost_ns of {kind:?} is {ns}; expected at most {MOST_NS}, about five hours"
            );
            return Err(Error::invalid(message).at(&node.name));
        }
        let cost = |d: &TopologyDevice| match node.cost_ns.get(&d.kind) {
            Some(&ns) if pinned(d) => Nanos(ns),
            _ => Nanos::INFINITY,
        };
        Ok(self.devices.iter().map(cost).collect())
    }

    /// True if a pin names a device: its name, or `/KIND:*` for all devices of a kind. Where no
    /// device is of that kind the wildcard is one of names.
    fn fits(&self, pin: &str, device: &TopologyDevice) -> bool {
        let Some(prefix) = pin.strip_suffix('*').filter(|p| p.ends_with(':')) else {
            return pin == device.name;
        };
        let kind = prefix.strip_prefix('/').and_then(|p| p.strip_suffix(':'));
        match kind.filter(|k| self.devices.iter().any(|d| d.kind == *k)) {
            Some(kind) => device.kind == kind,
            None => device.name.starts_with(prefix),
        }
    }

    fn solver_devices(&self) -> Vec<Device> {
        let device = |d: &TopologyDevice| Device {
            memory: d.memory_bytes.map(Bytes),
            is_host: d.kind == "cpu",
        };
        self.devices.iter().map(device).collect()
    }

    fn links(&self) -> Result<Links> {
        let n = self.devices.len();
        let index = |name: &str| {
            let found = self.devices.iter().position(|d| d.name == name);
            found.ok_or_else(|| {
                Error::invalid(format!(
                    "topology: a link names {name:?}, which is not among the devices"
                ))
            })
        };
        let mut given = vec![self.default_link.is_some(); n * n];
        let default = self.default_link.map_or(
            LinkRates {
                latency_ns: 0,
                bytes_per_second: 1,
            },
            |l| l,
        );
        let mut links = Links::uniform(n, default.profile());
        let mut named: BTreeMap<(usize, usize), LinkProfile> = BTreeMap::new();
        for link in &self.links {
            let (from, to) = (index(&link.from)?, index(&link.to)?);
            given[from * n + to] = true;
            let rates = LinkRates {
                latency_ns: link.latency_ns,
                bytes_per_second: link.bytes_per_second,
            };
            if named
                .insert((from, to), rates.profile())
                .is_some_and(|before| before != rates.profile())
            {
                let message = format!(
                    "topology: the link from {} to {} comes twice, with different rates",
                    link.from, link.to
                );
                return Err(Error::invalid(message).hint("one of them"));
            }
            links.set(from, to, rates.profile());
        }
        let missing = (0..n * n).find(|&i| !given[i] && i / n != i % n);
        match missing {
            None => Ok(links),
            Some(i) => Err(Error::invalid(format!(
                "topology: no link from {} to {}, and no default_link",
                self.devices[i / n].name,
                self.devices[i % n].name
            ))),
        }
    }
}

impl LinkRates {
    fn profile(self) -> LinkProfile {
        LinkProfile {
            latency: Nanos(self.latency_ns),
            bytes_per_second: self.bytes_per_second,
        }
    }
}

fn expect_format(found: &str, expected: &str) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "format is {found:?}; expected {expected:?}"
    )))
}

fn expect_unique<'a>(what: &str, names: impl Iterator<Item = &'a str>) -> Result<()> {
    let mut seen = std::collections::BTreeSet::new();
    for name in names {
        if !seen.insert(name) {
            return Err(Error::invalid(format!(
                "{what} {name:?} comes twice; names must differ"
            )));
        }
    }
    Ok(())
}

/// An answer about a solved problem: makespan, bound and the rest beside the timeline.
pub struct Verdict {
    /// No placement is faster than this.
    pub lower_bound: Nanos,
    /// Name of the lower bound.
    pub bound: String,
    /// The winning algorithm.
    pub algorithm: String,
    /// Time to solve.
    pub plan_time: Nanos,
}

/// The answer file of a timeline.
pub fn answer<'a>(
    graph: &'a TaskGraph,
    topology: &'a Topology,
    p: &Problem,
    timeline: &Timeline,
    verdict: Verdict,
) -> PlacementFile<'a> {
    let device = |d: u32| topology.devices[d as usize].name.as_str();
    let nodes = graph.nodes.iter().enumerate().map(|(t, node)| PlacedNode {
        name: &node.name,
        device: device(timeline.device[t]),
        start_ns: timeline.start[t].0,
        end_ns: timeline.end[t].0,
    });
    let transfers = timeline.transfers.iter().map(|t| PlacedTransfer {
        name: &graph.nodes[p.tensors[t.tensor as usize].producer as usize].name,
        from: device(t.from),
        to: device(t.to),
        start_ns: t.start.0,
        end_ns: t.end.0,
    });
    let peaks = timeline.peak_bytes(p);
    let (makespan, bound) = (timeline.makespan.0, verdict.lower_bound.0);
    PlacementFile {
        format: "placement/1",
        makespan_ns: makespan,
        lower_bound_ns: bound,
        bound: verdict.bound,
        gap: if bound == 0 {
            if makespan == 0 { 0.0 } else { f64::MAX }
        } else {
            makespan as f64 / bound as f64 - 1.0
        },
        optimal: makespan == bound,
        algorithm: verdict.algorithm,
        plan_time_ns: verdict.plan_time.0,
        nodes: nodes.collect(),
        transfers: transfers.collect(),
        peak_bytes: peaks
            .iter()
            .enumerate()
            .map(|(d, b)| (device(d as u32), b.0))
            .collect(),
        explain: None,
    }
}

/// The subject of explanations of a solved task graph.
pub fn subject<'a>(
    graph: &'a TaskGraph,
    topology: &Topology,
    p: &'a Problem,
    solution: &'a Solution,
    options: Options,
) -> Subject<'a> {
    let label = |(t, node): (usize, &Node)| Label {
        name: node.name.clone(),
        op: node.op.clone(),
        merged: Vec::new(),
        reason: graph.reason(p, t),
        is_copy: false,
    };
    Subject {
        name: &graph.name,
        problem: p,
        base: p,
        freedom: &NO_FREEDOM,
        copies: &[],
        objective: super::Objective::Latency,
        stream: None,
        solution,
        devices: topology.devices.iter().map(|d| d.name.clone()).collect(),
        tasks: graph.nodes.iter().enumerate().map(label).collect(),
        sources: None,
        downgrades: Vec::new(),
        options,
    }
}

/// Bare problems run every task once.
static NO_FREEDOM: Freedom = Freedom {
    may_copy: Vec::new(),
    is_held: Vec::new(),
    parking: Vec::new(),
};

/// The error of a problem whose memory limits no placement was found to keep; the nearest one needs
/// `peaks`.
pub fn over_memory(graph: &TaskGraph, topology: &Topology, p: &Problem, peaks: &[Bytes]) -> Error {
    let group = |task: usize| {
        let name = graph.nodes[task].colocate.as_ref()?;
        let members = p.members.row(p.group_of[task] as usize);
        let shown: Vec<&str> = members
            .iter()
            .take(4)
            .map(|&t| graph.nodes[t as usize].name.as_str())
            .collect();
        let more = if members.len() > shown.len() {
            ", ..."
        } else {
            ""
        };
        Some(format!(
            "{name:?} of {} nodes ({}{more})",
            members.len(),
            shown.join(", ")
        ))
    };
    let names = shortage::Names {
        task: &|t| format!("node {:?}", graph.nodes[t].name),
        group: &group,
        devices: topology.devices.iter().map(|d| d.name.clone()).collect(),
        limit: &|d, new| format!("memory_bytes of {} at {}", topology.devices[d].name, new.0),
        tensors: Vec::new(),
        other_ways: "",
    };
    shortage::error(p, peaks, &names)
}

#[cfg(test)]
mod tests;
