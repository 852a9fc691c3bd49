//! The compiler of a task.

use super::constants::{DIGESTS, Digests};
use super::plan::{self, rates};
use super::text::PartText;
use crate::error::Result;
use crate::pipeline::{self, Config};
use crate::session::{Session, Settings};
use gristmill_remote::{
    ClusterSpec, DeviceInfo, Document, Engine, Fault, Job, Made, PartWire, Plan, Server,
    ServerOptions, TaskName, in_thread, in_thread_within,
};
use gristmill_runtime::exec::{ExecOptions, Executor, VariableState};
use std::sync::Arc;
use std::time::Duration;

/// Version of the program, and of the ops that graphs may have.
pub(super) fn version() -> String {
    env!("CARGO_PKG_VERSION").to_owned()
}

/// Serves this machine alone as a task of a cluster, with the devices of the settings. Its variables live as long as the server, whatever
/// sessions use them.
///
/// Errors with `InvalidInput` when the task is not in the cluster, its address is not this machine's or is taken; with `Unsupported` for an
/// address that other machines reach; and as [`Session::new`] does.
///
/// The server ends when it is dropped; [`Server::join`] waits for a failure.
pub fn serve(cluster: ClusterSpec, task: TaskName, settings: &Settings) -> Result<Server> {
    serve_with(cluster, task, settings, ServerOptions::default())
}

/// Serves as [`serve`] does, those whom the options trust: holders of [`Keys`](gristmill_remote::Keys) on any machine.
///
/// Errors as [`serve`] does; any address may be served with keys.
pub fn serve_with(
    cluster: ClusterSpec,
    task: TaskName,
    settings: &Settings,
    options: ServerOptions,
) -> Result<Server> {
    let session = Session::new(settings)?;
    let engine = Arc::new(Compiler::new(session, task.clone()));
    Ok(Server::start(cluster, task, engine, options)?)
}

/// A compiler and executor with the devices of a session.
pub(super) struct Compiler {
    /// Devices, threads, weights, code and variables of the task.
    session: Session,
    task: TaskName,
}

impl Compiler {
    pub(super) fn new(session: Session, task: TaskName) -> Compiler {
        Compiler { session, task }
    }
}

impl Engine for Compiler {
    fn version(&self) -> String {
        version()
    }

    fn devices(&self) -> Vec<DeviceInfo> {
        let devices = self.session.settings().devices.devices.iter();
        let info = |d: &crate::place::Device| DeviceInfo {
            name: d.name.to_string(),
            memory_bytes: d.memory_limit.or(d.memory).map_or(0, |bytes| bytes.0),
            profile: rates(&d.profile),
        };
        devices.map(info).collect()
    }

    fn tasks(&self, program: &Document) -> Result<Vec<TaskName>, Fault> {
        Ok(plan::tasks(program, &self.task, &DIGESTS)?)
    }

    fn plan(&self, program: Document, devices: Vec<(TaskName, Vec<DeviceInfo>)>) -> Job<Plan> {
        let session = self.session.clone();
        in_thread(move || {
            let planned = plan::plan(&program, &devices, session.settings(), &DIGESTS);
            Ok(planned?)
        })
    }

    fn variables(&self) -> Result<Vec<VariableState>, Fault> {
        Ok(self.session.resources().states())
    }

    fn reset(&self, containers: Vec<String>, at_most: Duration) -> Job<()> {
        let resources = self.session.resources().clone();
        in_thread_within(at_most, move |wanted| {
            let names: Vec<&str> = containers.iter().map(String::as_str).collect();
            resources.reset_if(&names, || wanted.ask());
            Ok(())
        })
    }

    fn register(&self, part: Document, wire: Arc<PartWire>) -> Job<Made> {
        let session = self.session.clone();
        in_thread(move || Ok(compile(&session, &part, &DIGESTS, wire)?))
    }
}

/// Compiles a part for the devices of a session.
pub(super) fn compile(
    session: &Session,
    part: &Document,
    known: &Digests,
    wire: Arc<PartWire>,
) -> Result<Made> {
    let (interface, parts, options) = PartText::parse(part, known)?;
    for part in &parts {
        session.variables().declare(&part.graph)?;
    }
    let config = Config {
        settings: session.settings(),
        options: &options,
    };
    let (program, warnings) = pipeline::generate_here(interface, parts, session, config)?;
    let program = Arc::new(program);
    let exec_options = ExecOptions {
        pool: session.pool().clone(),
        resources: session.resources().clone(),
        drivers: session.drivers(&program)?,
        wire: Some(wire),
        ..ExecOptions::default()
    };
    Ok(Made {
        part: Arc::new(Executor::new(program, &exec_options)?),
        warnings,
    })
}
