//! A compiled program with a task of its own for each device, in this process: for tests of the wire.

use super::client::Elsewhere;
use super::constants::Digests;
use super::engine::{Compiler, version};
use super::plan::{rename, share};
use super::text::Wishes;
use crate::codegen::assemble::Interface;
use crate::error::Result;
use crate::options::Options;
use crate::partition;
use crate::pipeline::Lowered;
use crate::session::cluster::Remote;
use crate::session::{Session, Settings};
use gristmill_remote::{
    Client, ClientOptions, ClusterSpec, Credentials, DeviceInfo, Document, Engine, Fault, Job,
    Made, PartWire, Plan, Server, ServerOptions, TaskName,
};
use gristmill_runtime::Tensor;
use gristmill_runtime::device::DeviceName;
use gristmill_runtime::exec::VariableState;
use std::sync::Arc;
use std::time::Duration;

/// The partitions of a program, each on a server of its own, joined over the loopback device.
pub struct Spread {
    program: Elsewhere,
    _servers: Vec<Server>,
}

impl Spread {
    /// Compiles the partitions of a program again, each for its task. Their stages must be there.
    ///
    /// Errors as sessions on a cluster do, but variables may be assigned on several tasks.
    pub fn of(lowered: &Lowered, settings: &Settings, options: &Options) -> Result<Spread> {
        let n = lowered.partitions.len();
        let cluster = ClusterSpec::local((0..n).map(task))?;
        let trusted = [Credentials::Local, Credentials::Local];
        Spread::over(lowered, settings, options, (&cluster, trusted), n)
    }

    /// The same with the first task alone in this process. Servers of the others, `/job:device/task:1` and so
    /// on, are there; the cluster has all. The credentials are those of the first task and of a client.
    ///
    /// Errors as [`Spread::of`] does.
    pub fn beside(
        lowered: &Lowered,
        settings: &Settings,
        options: &Options,
        cluster: (&ClusterSpec, [Credentials; 2]),
    ) -> Result<Spread> {
        Spread::over(lowered, settings, options, cluster, 1)
    }

    /// With so many of the tasks in this process.
    fn over(
        lowered: &Lowered,
        settings: &Settings,
        options: &Options,
        (cluster, [of_tasks, of_client]): (&ClusterSpec, [Credentials; 2]),
        n_here: usize,
    ) -> Result<Spread> {
        let parts = &lowered.partitions;
        let devices: Vec<DeviceName> = parts.iter().map(|part| part.device.clone()).collect();
        let plan = plan(parts, lowered, &devices, options)?;
        let mut servers = Vec::new();
        for (number, device) in devices.iter().take(n_here).enumerate() {
            let own = settings_of(device, settings, devices.len());
            let session = Session::new(&own)?;
            let engine = Fixed {
                compiler: Compiler::new(session, task(number)),
                plan: plan.clone(),
            };
            let options = ServerOptions {
                credentials: of_tasks.clone(),
                ..ServerOptions::default()
            };
            let started = Server::start(cluster.clone(), task(number), Arc::new(engine), options);
            servers.push(started?);
        }
        let target = format!("grpc://{}", cluster.address(&task(0))?);
        let client = Client::connect(&target, version(), ClientOptions::from(of_client))?;
        let callable = client.prepare(&Document::from(String::new()))?;
        Ok(Spread {
            program: Elsewhere::new(Arc::new(client), callable),
            _servers: servers,
        })
    }

    /// Runs with inputs in the program's order.
    pub fn run(&self, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        self.program.run(inputs)
    }
}

/// The settings of a task with one of the devices.
fn settings_of(device: &DeviceName, all: &Settings, n_devices: usize) -> Settings {
    let mut own = all.clone();
    own.devices.devices.retain(|d| d.name == *device);
    for only in &mut own.devices.devices {
        only.name = DeviceName::local(device.kind, 0);
    }
    own.devices.links.clear();
    own.threads = Some((all.n_threads() / n_devices).max(1));
    own
}

fn task(number: usize) -> TaskName {
    TaskName {
        job: "device".to_owned(),
        task: number as u32,
    }
}

/// Each partition as the share of its task.
fn plan(
    parts: &[partition::Part],
    lowered: &Lowered,
    devices: &[DeviceName],
    options: &Options,
) -> Result<Plan> {
    let in_cluster = |device: &DeviceName| match devices.iter().position(|d| d == device) {
        None => device.clone(),
        Some(number) => DeviceName {
            job: Some("device".to_owned()),
            task: number as u32,
            ..DeviceName::local(device.kind, 0)
        },
    };
    let whole = Interface {
        name: lowered.program.name.clone(),
        inputs: lowered.program.inputs.clone(),
        outputs: lowered.program.outputs.clone(),
    };
    let (mut shares, known) = (Vec::new(), Digests::default());
    for (number, part) in parts.iter().enumerate() {
        let mut part = part.clone();
        part.device = in_cluster(&part.device);
        part.updates_in_place &= parts.len() < 2;
        rename(&mut part.graph, &in_cluster)?;
        let wishes = Wishes::of(options);
        let share = share(&task(number), vec![part], &whole, &wishes, &known);
        shares.push(Arc::new(share?));
    }
    Ok(Plan {
        inputs: whole.inputs,
        outputs: whole.outputs,
        shares,
        placement: String::new(),
        warnings: Vec::new(),
    })
}

/// A compiler with a plan for the only program there is.
struct Fixed {
    compiler: Compiler,
    plan: Plan,
}

impl Engine for Fixed {
    fn version(&self) -> String {
        self.compiler.version()
    }

    fn devices(&self) -> Vec<DeviceInfo> {
        self.compiler.devices()
    }

    fn tasks(&self, _: &Document) -> Result<Vec<TaskName>, Fault> {
        let shares = self.plan.shares.iter();
        Ok(shares.map(|share| share.task.clone()).collect())
    }

    fn plan(&self, _: Document, _: Vec<(TaskName, Vec<DeviceInfo>)>) -> Job<Plan> {
        let plan = self.plan.clone();
        Box::pin(async move { Ok(plan) })
    }

    fn variables(&self) -> Result<Vec<VariableState>, Fault> {
        self.compiler.variables()
    }

    fn reset(&self, containers: Vec<String>, at_most: Duration) -> Job<()> {
        self.compiler.reset(containers, at_most)
    }

    fn register(&self, part: Document, wire: Arc<PartWire>) -> Job<Made> {
        self.compiler.register(part, wire)
    }
}
