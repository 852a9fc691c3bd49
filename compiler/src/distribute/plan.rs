//! A master's plan: a graph divided over tasks.

use super::constants::Digests;
use super::text::{PartText, ProgramText, Wishes};
use crate::codegen::assemble::Interface;
use crate::cost::{Bytes, DeviceProfile, LinkProfile, Nanos};
use crate::error::{Error, Result};
use crate::ir::{AskedBy, DeviceRequest, Graph, Op};
use crate::partition::Part;
use crate::pipeline::{self, Config};
use crate::place::DeviceSet;
use crate::session::Settings;
use gristmill_remote::{DeviceInfo, Document, Plan, Share, TaskName, global, local};
use gristmill_runtime::device::{DeviceName, DeviceSpec};
use gristmill_runtime::program::IoSpec;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// A link between tasks until it is measured: as between processes of one machine.
const BETWEEN_TASKS: LinkProfile = LinkProfile {
    latency: Nanos(100_000),
    bytes_per_second: 1_000_000_000,
};

/// The tasks named by the nodes of a program.
pub(super) fn tasks(program: &Document, own: &TaskName, known: &Digests) -> Result<Vec<TaskName>> {
    let (graph, _) = ProgramText::parse(program, known)?;
    let mut found = BTreeSet::new();
    for (_, node) in graph.nodes() {
        if let Some(asked) = &node.device {
            found.insert(task_of(&asked.spec, own));
        }
    }
    Ok(found.into_iter().collect())
}

/// The task of a specification. Without a job it is the session's own; without a number, the first of its job.
fn task_of(spec: &DeviceSpec, own: &TaskName) -> TaskName {
    let task = match spec.job {
        None => own.task,
        Some(_) => 0,
    };
    TaskName {
        job: spec.job.clone().unwrap_or_else(|| own.job.clone()),
        task: spec.task.unwrap_or(task),
    }
}

/// Gives every node a task: its own wish, or the session's task.
fn fill(graph: &mut Graph, own: &TaskName) {
    let ids: Vec<_> = graph.nodes().map(|(id, _)| id).collect();
    for id in ids {
        let node = graph.node_mut(id);
        let asked = node.device.as_deref().cloned();
        let mut asked = asked.unwrap_or_else(|| {
            let why = AskedBy::new("the session's task");
            DeviceRequest::of(DeviceSpec::default(), why)
        });
        let TaskName { job, task } = task_of(&asked.spec, own);
        asked.spec.job = Some(job);
        asked.spec.task = Some(task);
        asked.spec.replica = asked.spec.replica.or(Some(0));
        node.device = Some(Arc::new(asked));
    }
}

/// The devices of all tasks, with their names in the cluster.
fn device_set(tasks: &[(TaskName, Vec<DeviceInfo>)]) -> Result<DeviceSet> {
    let mut set = DeviceSet {
        devices: Vec::new(),
        ..DeviceSet::default()
    };
    let mut task_of = Vec::new();
    for (number, (task, devices)) in tasks.iter().enumerate() {
        for info in devices {
            let name = global(task, &DeviceName::parse(&info.name)?);
            let threads = info.profile.parse().map_err(|_| {
                let text = &info.profile;
                Error::invalid(format!("{name}: {text:?} is not a number of threads"))
            })?;
            let mut one = DeviceSet::of(std::slice::from_ref(&name), threads);
            one.devices[0].memory = (info.memory_bytes > 0).then_some(Bytes(info.memory_bytes));
            set.devices.append(&mut one.devices);
            task_of.push(number);
        }
    }
    for (from, a) in task_of.iter().enumerate() {
        for (to, b) in task_of.iter().enumerate() {
            if a != b {
                set.links.insert((from, to), BETWEEN_TASKS);
            }
        }
    }
    Ok(set)
}

/// A device's rates for other tasks: its threads.
pub(super) fn rates(profile: &DeviceProfile) -> String {
    profile.n_threads.to_string()
}

/// Divides a client's program over devices of tasks, of which the first is the session's own.
pub(super) fn plan(
    program: &Document,
    tasks: &[(TaskName, Vec<DeviceInfo>)],
    settings: &Settings,
    known: &Digests,
) -> Result<Plan> {
    let (mut graph, wishes) = ProgramText::parse(program, known)?;
    let Some((own, _)) = tasks.first() else {
        return Err(Error::internal("a plan without a task"));
    };
    fill(&mut graph, own);
    let options = wishes.options()?;
    let settings = Settings {
        devices: device_set(tasks)?,
        kept: None,
        ..settings.clone()
    };
    let config = Config {
        settings: &settings,
        options: &options,
    };
    let fused = pipeline::fused(graph, config)?;
    let divided = pipeline::partitioned_anywhere(fused, config)?;
    let of_task = by_task(divided.partitions, tasks)?;
    check_state(&of_task)?;
    let is_shared = of_task.len() > 1;
    let shares = of_task.into_iter();
    let shares = shares.map(|(task, mut parts)| {
        // A run over several tasks changes nothing before all of them are done.
        parts
            .iter_mut()
            .for_each(|part| part.updates_in_place &= !is_shared);
        let share = share(task, parts, &divided.interface, &wishes, known)?;
        Ok(Arc::new(share))
    });
    Ok(Plan {
        shares: shares.collect::<Result<_>>()?,
        warnings: divided.report.warnings,
        inputs: divided.interface.inputs.clone(),
        outputs: divided.interface.outputs.clone(),
        placement: divided.placement.device_log(&divided.clusters),
    })
}

/// The parts of each task.
fn by_task(
    parts: Vec<Part>,
    tasks: &[(TaskName, Vec<DeviceInfo>)],
) -> Result<BTreeMap<&TaskName, Vec<Part>>> {
    let mut of_task: BTreeMap<&TaskName, Vec<Part>> = BTreeMap::new();
    for part in parts {
        let mut names = tasks.iter().map(|(name, _)| name);
        let own = names.find(|name| local(name, &part.device).is_local());
        let own = own.ok_or_else(|| Error::internal(format!("{} has no task", part.device)))?;
        of_task.entry(own).or_default().push(part);
    }
    Ok(of_task)
}

/// Errors when several tasks assign variables: one might be lost between the commits of others.
fn check_state(of_task: &BTreeMap<&TaskName, Vec<Part>>) -> Result<()> {
    let is_assignment = |op: &Op| matches!(op, Op::AssignVariable { .. });
    let assigns = |part: &Part| {
        let mut nodes = part.graph.nodes();
        let found = nodes.find(|(_, node)| is_assignment(&node.op));
        found.map(|(_, node)| node.origin.clone())
    };
    let first_of = |parts: &Vec<Part>| parts.iter().filter_map(assigns).next();
    let assigning = of_task
        .iter()
        .filter_map(|(task, parts)| Some((task, first_of(parts)?)));
    let assigning: Vec<_> = assigning.collect();
    let [(one, _), (other, origin), ..] = assigning.as_slice() else {
        return Ok(());
    };
    let message = format!(
        "a model assigns variables on {one} and {other}; on more than one task this is not supported yet"
    );
    let error = Error::unsupported(message).at_origin(origin);
    Err(error.hint("pin the variables that it assigns to devices of one task"))
}

/// The share of a task, with its names of devices.
pub(super) fn share(
    task: &TaskName,
    mut parts: Vec<Part>,
    whole: &Interface,
    wishes: &Wishes,
    known: &Digests,
) -> Result<Share> {
    let sorted = |numbers: BTreeSet<u32>| numbers.into_iter().collect::<Vec<u32>>();
    let inputs = sorted(parts.iter().flat_map(|p| p.inputs.clone()).collect());
    let outputs = sorted(parts.iter().flat_map(|p| p.outputs.clone()).collect());
    for part in &mut parts {
        part.device = local(task, &part.device);
        renumber(&mut part.inputs, &inputs);
        renumber(&mut part.outputs, &outputs);
        rename(&mut part.graph, &|device| local(task, device))?;
        check_collectives(&part.graph)?;
    }
    let some = |specs: &[IoSpec], numbers: &[u32]| -> Vec<IoSpec> {
        numbers.iter().map(|&n| specs[n as usize].clone()).collect()
    };
    let interface = Interface {
        name: whole.name.clone(),
        inputs: some(&whole.inputs, &inputs),
        outputs: some(&whole.outputs, &outputs),
    };
    let wide = |numbers: Vec<u32>| numbers.into_iter().map(|n| n as usize).collect();
    Ok(Share {
        task: task.clone(),
        part: PartText::document(&interface, &parts, wishes, known)?,
        inputs: wide(inputs),
        outputs: wide(outputs),
    })
}

/// Indices among all inputs or outputs become indices among some of them.
fn renumber(numbers: &mut [u32], some: &[u32]) {
    for n in numbers {
        *n = some.partition_point(|other| other < n) as u32;
    }
}

/// Gives the devices of a part other names.
pub(super) fn rename(graph: &mut Graph, name: &dyn Fn(&DeviceName) -> DeviceName) -> Result<()> {
    let named = |text: &str| -> Result<String> { Ok(name(&DeviceName::parse(text)?).to_string()) };
    let ids: Vec<_> = graph.nodes().map(|(id, _)| id).collect();
    for id in ids {
        let node = graph.node_mut(id);
        match &mut node.op {
            Op::Send { to, .. } => *to = named(to)?,
            Op::Recv { from, .. } => *from = named(from)?,
            Op::Collective { devices, .. } => {
                let names = devices.iter().map(|device| named(device));
                *devices = names.collect::<Result<_>>()?;
            }
            _ => {}
        }
        // Every node of a part is on its device.
        node.device = None;
    }
    Ok(())
}

/// Errors on an all-reduce by a library over several tasks.
fn check_collectives(graph: &Graph) -> Result<()> {
    for (_, node) in graph.nodes() {
        let Op::Collective { devices, .. } = &node.op else {
            continue;
        };
        let is_local = |text: &String| DeviceName::parse(text).is_ok_and(|d| d.is_local());
        if !devices.iter().all(is_local) {
            let message = "an all-reduce by a library over several tasks";
            return Err(Error::unsupported(message).at_origin(&node.origin));
        }
    }
    Ok(())
}
