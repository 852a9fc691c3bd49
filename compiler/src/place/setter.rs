//! Device functions for scopes: variables on parameter servers with the rest on workers, and ops
//! spread over devices.

use crate::error::{Error, Result};
use crate::ir::{DeviceScope, NewNode, Op, Type};
use crate::options::Deal;
use gristmill_runtime::device::DeviceSpec;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Weight of a node for the least loaded choice; see [`Strategy::Greedy`].
pub type Load = Box<dyn FnMut(NewNode<'_>) -> Result<u64> + Send>;

/// Distribution of nodes over tasks or devices.
#[derive(Default)]
pub enum Strategy {
    /// In turn.
    #[default]
    RoundRobin,
    /// To the one with the least load so far, the first of equals; the node's load is added to it.
    Greedy(Load),
}

impl Strategy {
    /// Least loaded by [`result_bytes`].
    pub fn greedy_bytes() -> Strategy {
        Strategy::Greedy(Box::new(result_bytes))
    }
}

impl fmt::Debug for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Strategy::RoundRobin => "RoundRobin",
            Strategy::Greedy(_) => "Greedy(..)",
        })
    }
}

/// Bytes of a node's only result. Errors when it has several, or a dim is not known.
pub fn result_bytes(node: NewNode<'_>) -> Result<u64> {
    let [ty] = node.results else {
        return Err(Error::invalid(format!(
            "{} must have a single output, it has {}",
            node.op.name(),
            node.results.len()
        )));
    };
    let bytes = ty.size_bytes().ok_or_else(|| {
        Error::invalid(format!(
            "{}: shape of {ty} must be fully defined",
            node.op.name()
        ))
    });
    bytes.map(|b| b as u64)
}

/// Elements of a node's only result, whatever their size. Errors as [`result_bytes`].
pub fn result_elements(node: NewNode<'_>) -> Result<u64> {
    let bytes = result_bytes(node)?;
    Ok(bytes
        / node
            .results
            .first()
            .map_or(1, |ty: &Type| ty.dtype.size_bytes().max(1)) as u64)
}

/// Loads of devices or tasks to which things are dealt.
pub(crate) struct Loads {
    loads: Vec<u64>,
    /// The number of things that were dealt in turn.
    n_dealt: usize,
}

impl Loads {
    /// No load yet, on `n` devices or tasks; at least one.
    pub(crate) fn new(n: usize) -> Loads {
        Loads {
            loads: vec![0; n],
            n_dealt: 0,
        }
    }

    /// The next one in turn.
    pub(crate) fn next(&mut self) -> usize {
        self.n_dealt += 1;
        (self.n_dealt - 1) % self.loads.len()
    }

    /// The one for a thing of some bytes.
    pub(crate) fn deal(&mut self, bytes: u64, deal: Deal) -> usize {
        match deal {
            Deal::InTurn => self.next(),
            Deal::BySize => self.least(bytes),
        }
    }

    /// Adds to the load of one.
    pub(crate) fn add(&mut self, i: usize, load: u64) {
        self.loads[i] = self.loads[i].saturating_add(load);
    }

    /// The one with the least load, the first of equals; it gets a further load.
    pub(crate) fn least(&mut self, load: u64) -> usize {
        let least = (0..self.loads.len()).min_by_key(|&i| self.loads[i]);
        let least = least.expect("there is at least one choice");
        self.add(least, load);
        least
    }
}

/// A strategy at work; uses of one variable get one choice, made and counted at the first.
struct Dealer {
    strategy: Strategy,
    loads: Loads,
    of_variable: BTreeMap<(String, String), usize>,
}

impl Dealer {
    fn new(strategy: Strategy, n: usize) -> Dealer {
        Dealer {
            strategy,
            loads: Loads::new(n),
            of_variable: BTreeMap::new(),
        }
    }

    fn choose(&mut self, node: NewNode<'_>) -> Result<usize> {
        let variable = match node.op {
            Op::ReadVariable {
                container, name, ..
            }
            | Op::AssignVariable { container, name } => Some((container.clone(), name.clone())),
            _ => None,
        };
        if let Some(chosen) = variable.as_ref().and_then(|v| self.of_variable.get(v)) {
            return Ok(*chosen);
        }
        let chosen = match &mut self.strategy {
            Strategy::RoundRobin => self.loads.next(),
            Strategy::Greedy(load) => self.loads.least(load(node)?),
        };
        if let Some(variable) = variable {
            self.of_variable.insert(variable, chosen);
        }
        Ok(chosen)
    }
}

/// Arguments of [`replica_device_setter`], with TensorFlow's names and defaults.
#[derive(Debug)]
pub struct ReplicaDeviceSetter {
    /// Number of tasks of the parameter-server job; with none the setter does nothing.
    pub ps_tasks: usize,
    /// Device of variables.
    pub ps_device: String,
    /// Device of everything else.
    pub worker_device: String,
    /// True to fill open fields of nodes with a device from inner scopes.
    pub merge_devices: bool,
    /// Addresses of the tasks of each job. When given, it says how many parameter servers there
    /// are.
    pub cluster: Option<BTreeMap<String, Vec<String>>>,
    /// Ops for parameter servers.
    pub ps_ops: BTreeSet<String>,
    /// Choice of the task of a variable.
    pub ps_strategy: Strategy,
}

impl Default for ReplicaDeviceSetter {
    fn default() -> ReplicaDeviceSetter {
        ReplicaDeviceSetter {
            ps_tasks: 0,
            ps_device: "/job:ps".into(),
            worker_device: "/job:worker".into(),
            merge_devices: true,
            cluster: None,
            ps_ops: ["read_variable", "assign_variable"]
                .map(str::to_owned)
                .into(),
            ps_strategy: Strategy::RoundRobin,
        }
    }
}

/// A scope that puts variables on parameter servers and the rest on workers (TensorFlow's
/// `replica_device_setter`).
///
/// A variable gets `ps_device` with the task that the strategy chooses, which is asked only when
/// `ps_device` has a job that the node's own device does not change; the node's own fields then
/// count more. Other nodes are merged with `worker_device` the same way. Without parameter servers,
/// or when the cluster lacks their job, the scope asks for nothing.
///
/// Errors when a device cannot be read.
pub fn replica_device_setter(setter: ReplicaDeviceSetter) -> Result<DeviceScope> {
    let ps_device = DeviceSpec::parse(&setter.ps_device)?;
    let worker_device = DeviceSpec::parse(&setter.worker_device)?;
    let n_tasks = match &setter.cluster {
        Some(jobs) => ps_device
            .job
            .as_ref()
            .and_then(|job| jobs.get(job))
            .map_or(0, Vec::len),
        None => setter.ps_tasks,
    };
    if n_tasks == 0 {
        return Ok(DeviceScope::Spec(DeviceSpec::default()));
    }
    let (merge_devices, ps_ops) = (setter.merge_devices, setter.ps_ops);
    let mut dealer = Dealer::new(setter.ps_strategy, n_tasks);
    Ok(DeviceScope::function(move |node| {
        let own = node.device.clone();
        if !merge_devices && !own.is_open() {
            return Ok(own);
        }
        if ps_device.is_open() || !ps_ops.contains(node.op.name()) {
            return Ok(own.fill(&worker_device));
        }
        let mut device = ps_device.clone();
        if device.job.is_some()
            && own
                .job
                .as_ref()
                .is_none_or(|job| Some(job) == device.job.as_ref())
        {
            device.task = Some(dealer.choose(node)? as u32);
        }
        Ok(own.fill(&device))
    }))
}

/// A scope that deals nodes out over devices. Nodes that have a device type or index from inner
/// scopes are left alone and not counted.
///
/// Errors when there is no device, or one cannot be read.
pub fn spread(devices: &[&str], strategy: Strategy) -> Result<DeviceScope> {
    let specs = devices
        .iter()
        .map(|d| Ok(DeviceSpec::parse(d)?))
        .collect::<Result<Vec<_>>>()?;
    if specs.is_empty() {
        return Err(Error::invalid("nodes cannot be spread over no device"));
    }
    let mut dealer = Dealer::new(strategy, specs.len());
    Ok(DeviceScope::function(move |node| {
        let own = node.device.clone();
        if own.device_type.is_some() || own.index.is_some() {
            return Ok(own);
        }
        Ok(own.fill(&specs[dealer.choose(node)?]))
    }))
}

#[cfg(test)]
mod tests;
