//! A cluster: jobs, their tasks, and the addresses of these.

use crate::contents::Digest;
use gristmill_runtime::{Error, ErrorKind};
use std::collections::BTreeMap;
use std::fmt;
use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};

/// The job of a process without a cluster.
const LOCAL_JOB: &str = "localhost";

/// Ports of [`ClusterSpec::local`].
const FIRST_PORT: u16 = 10_000;
const N_PORTS: u16 = 20_000;

/// A task of a cluster.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TaskName {
    /// Its job, such as `worker`.
    pub job: String,
    /// Its number within the job.
    pub task: u32,
}

impl fmt::Display for TaskName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "/job:{}/task:{}", self.job, self.task)
    }
}

/// Jobs, their tasks, and the address of each task, `HOST:PORT`. A job is a group of tasks with a common role; all tasks of a
/// cluster need the same specification, of which [`ClusterSpec::digest`] is proof.
///
/// (TensorFlow's `ClusterSpec`; Abadi et al., "TensorFlow: large-scale machine learning on heterogeneous distributed systems", 2015,
/// section 3.3.)
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterSpec {
    tasks: BTreeMap<TaskName, String>,
}

impl ClusterSpec {
    /// A cluster of tasks at addresses.
    ///
    /// Errors with `InvalidInput` without a task, on a name no device could have, on an address without host or port, and on two tasks at
    /// one address.
    pub fn new(tasks: impl IntoIterator<Item = (TaskName, String)>) -> Result<ClusterSpec, Error> {
        let mut spec = ClusterSpec {
            tasks: BTreeMap::new(),
        };
        for (name, address) in tasks {
            check_job(&name.job)?;
            check_address(&name, &address)?;
            if let Some((other, _)) = spec.tasks.iter().find(|(_, own)| **own == address) {
                let message = format!(
                    "{other} and {name} are both at {address}: each task has an address of its own"
                );
                return Err(Error::invalid(message));
            }
            spec.tasks.insert(name, address);
        }
        match spec.tasks.is_empty() {
            true => Err(Error::invalid("a cluster without a task")),
            false => Ok(spec),
        }
    }

    /// All tasks with their addresses, by job and number.
    pub fn tasks(&self) -> impl Iterator<Item = (&TaskName, &str)> {
        self.tasks
            .iter()
            .map(|(name, address)| (name, address.as_str()))
    }

    /// Names of the jobs, in order.
    pub fn jobs(&self) -> Vec<&str> {
        let mut jobs: Vec<&str> = self.tasks.keys().map(|name| name.job.as_str()).collect();
        jobs.dedup();
        jobs
    }

    /// Number of tasks of a job.
    pub fn n_tasks(&self, job: &str) -> usize {
        self.tasks.keys().filter(|name| name.job == job).count()
    }

    /// The address of a task.
    ///
    /// Errors with `InvalidInput`, naming the jobs or the tasks there are, when it is not in the cluster.
    pub fn address(&self, name: &TaskName) -> Result<&str, Error> {
        if let Some(address) = self.tasks.get(name) {
            return Ok(address);
        }
        let own = self.tasks.keys().filter(|other| other.job == name.job);
        let numbers: Vec<String> = own.map(|other| other.task.to_string()).collect();
        let message = match numbers.is_empty() {
            true => format!(
                "{name} is not in the cluster: its jobs are {}",
                self.jobs().join(", ")
            ),
            false => format!(
                "{name} is not in the cluster: tasks of {} are {}",
                name.job,
                numbers.join(", ")
            ),
        };
        Err(Error::invalid(message))
    }

    /// Tasks on this machine, at ports that are free now: below 32768, where systems take none for connections.
    ///
    /// Errors with `DeviceFailed` when there are not enough.
    pub fn local(names: impl IntoIterator<Item = TaskName>) -> Result<ClusterSpec, Error> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        // Processes begin at different ports.
        let first = std::process::id().wrapping_mul(61);
        let mut ports = (0..N_PORTS).map(|_| {
            let next = first.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
            FIRST_PORT + (next % u32::from(N_PORTS)) as u16
        });
        let mut free = || ports.find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok());
        let mut tasks = Vec::new();
        for name in names {
            let none = || Error::new(ErrorKind::DeviceFailed, "no port of this machine is free");
            tasks.push((name, format!("127.0.0.1:{}", free().ok_or_else(none)?)));
        }
        ClusterSpec::new(tasks)
    }

    /// SHA-256 of the tasks and addresses, in hexadecimal digits: the same for the same cluster, however it was written down.
    pub fn digest(&self) -> String {
        let tasks = self.tasks.iter();
        let lines = tasks.map(|(name, address)| format!("{name} {address}\n"));
        Digest::of(lines.collect::<String>().as_bytes()).to_string()
    }

    /// The tasks that two specifications disagree about, a line each: what one of them has, and what another one has.
    pub fn differences(&self, own: &str, other: &ClusterSpec, others: &str) -> Vec<String> {
        let names: Vec<&TaskName> = self.tasks.keys().chain(other.tasks.keys()).collect();
        let mut lines = Vec::new();
        for name in names {
            let both = [self, other].map(|spec| spec.tasks.get(name).map(String::as_str));
            if both[0] != both[1] {
                let [here, there] = both.map(|address| address.unwrap_or("nothing"));
                lines.push(format!(
                    "{name}: {here} in the cluster of {own}, {there} in that of {others}"
                ));
            }
        }
        lines.sort_unstable();
        lines.dedup();
        lines
    }
}

/// Errors on a job name that no device could have.
fn check_job(job: &str) -> Result<(), Error> {
    let is_letter = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let begins = job.starts_with(|c: char| c.is_ascii_alphabetic());
    if !begins || !job.chars().all(is_letter) {
        let message = format!("job {job:?}: expected a letter, then letters, digits and '_'");
        return Err(Error::invalid(message));
    }
    match job == LOCAL_JOB {
        true => Err(Error::invalid(format!(
            "job {job:?}: it is the name of a process without a cluster; use another name"
        ))),
        false => Ok(()),
    }
}

/// Errors on an address without host or port.
fn check_address(name: &TaskName, address: &str) -> Result<(), Error> {
    let fail = |why: &str| {
        let message = format!(
            "{name}: address {address:?}: {why}, expected HOST:PORT, as in 10.0.0.7:2222 or [::1]:2222"
        );
        Err(Error::invalid(message))
    };
    let Some((host, port)) = address.rsplit_once(':') else {
        return fail("no port");
    };
    let is_bracketed = host.starts_with('[') && host.ends_with(']');
    let is_written = |c: char| !c.is_whitespace() && !c.is_control() && !"/@#?".contains(c);
    match port.parse::<u16>() {
        Err(_) | Ok(0) => fail("the port is no number from 1 to 65535"),
        Ok(_) if host.is_empty() => fail("no host"),
        Ok(_) if host.contains(':') && !is_bracketed => {
            fail("a host with colons and without brackets")
        }
        Ok(_) if !host.chars().all(is_written) => fail("no host has such a name"),
        Ok(_) => Ok(()),
    }
}
