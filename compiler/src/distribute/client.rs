//! Sessions on a cluster.

use super::constants::DIGESTS;
use super::engine::version;
use super::text::ProgramText;
use crate::error::{Error, Result};
use crate::ir::Graph;
use crate::options::{AllReduce, Options};
use crate::place::{self, Fallback, Objective, Request};
use crate::session::cluster::{Cluster, Remote};
use crate::session::{Session, Settings};
use crate::target::TargetCpu;
use gristmill_remote::{Callable, Client, ClientOptions, TaskState};
use gristmill_runtime::Tensor;
use gristmill_runtime::program::IoSpec;
use std::sync::Arc;

impl Session {
    /// A session on a task of a cluster, `grpc://HOST:PORT`: models compiled into it run there. Nodes go to the devices of their pins,
    /// of any task (`/job:ps/task:0/cpu:0`), and without a pin to devices of the session's own task. Of the settings, only those for the
    /// caches and logs of this process have an effect.
    ///
    /// Errors: `InvalidInput` on another form of address, and on a task of another version; `Unsupported` for an address beyond this machine, for
    /// which [`Session::open_with`] takes keys; `DeviceFailed` when there is no answer.
    pub fn open(target: &str, settings: &Settings) -> Result<Session> {
        Session::open_with(target, settings, ClientOptions::default())
    }

    /// A session as [`Session::open`] makes it, with other options:
    /// [`Credentials`](gristmill_remote::Credentials), a longest time of a run, a function told about stalls.
    ///
    /// Errors as [`Session::open`] does, and with `DeviceFailed` or `InvalidInput` when one end does not accept the other.
    pub fn open_with(
        target: &str,
        settings: &Settings,
        options: impl Into<ClientOptions>,
    ) -> Result<Session> {
        let client = Client::connect(target, version(), options.into())?;
        let cluster = OnTask {
            target: target.to_owned(),
            client: Arc::new(client),
        };
        Session::on_cluster(settings, Arc::new(cluster))
    }
}

/// A task of a cluster, as a session uses it.
struct OnTask {
    target: String,
    client: Arc<Client>,
}

impl Cluster for OnTask {
    fn target(&self) -> &str {
        &self.target
    }

    fn tasks(&self, reset: &[&str]) -> Result<Vec<TaskState>> {
        Ok(self.client.tasks(reset)?)
    }

    fn compile(&self, mut graph: Graph, options: &Options) -> Result<Box<dyn Remote>> {
        check(options, &self.target)?;
        // Pins become requests here: no regular expression crosses the network. The task knows which devices there are.
        let mut request = Request {
            pins: options.pins.clone(),
            fallback: Fallback::Allow,
            ..Request::default()
        };
        place::apply_pins(&mut graph, &mut request)?;
        let program = ProgramText::document(&graph, options, &DIGESTS)?;
        let callable = self.client.prepare(&program)?;
        Ok(Box::new(Elsewhere::new(self.client.clone(), callable)))
    }
}

/// Errors with `Unsupported` on options for one process.
fn check(options: &Options, target: &str) -> Result<()> {
    let not_there = [
        (options.plan.is_some(), "a plan for all nodes"),
        (options.data_parallel.is_some(), "a batch shared by devices"),
        (options.updates_overlap, "overlapping updates"),
        (
            options.objective != Objective::Latency,
            "another objective than latency",
        ),
        (options.keep_stages, "texts of the stages"),
        (options.budget.is_some(), "a time limit of the search"),
        (
            options.target_cpu != TargetCpu::Native,
            "another target CPU",
        ),
        (options.gpu_arch.is_some(), "a GPU architecture"),
        (options.all_reduce != AllReduce::Auto, "a way of all-reduce"),
    ];
    match not_there.iter().find(|(is_asked, _)| *is_asked) {
        None => Ok(()),
        Some((_, what)) => {
            let message = format!("{what} in a session on a cluster ({target}), not supported yet");
            Err(Error::unsupported(message).hint("use a session of this process"))
        }
    }
}

/// A model that tasks have compiled.
pub(super) struct Elsewhere {
    client: Arc<Client>,
    callable: Callable,
}

impl Elsewhere {
    pub(super) fn new(client: Arc<Client>, callable: Callable) -> Elsewhere {
        Elsewhere { client, callable }
    }
}

impl Remote for Elsewhere {
    fn inputs(&self) -> &[IoSpec] {
        &self.callable.inputs
    }

    fn outputs(&self) -> &[IoSpec] {
        &self.callable.outputs
    }

    fn placement(&self) -> &str {
        &self.callable.placement
    }

    fn warnings(&self) -> &[String] {
        &self.callable.warnings
    }

    fn initialise(&self) -> Result<()> {
        Ok(self.client.initialise(&self.callable)?)
    }

    fn run(&self, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        Ok(self.client.call(&self.callable, inputs)?)
    }
}

impl Drop for Elsewhere {
    fn drop(&mut self) {
        // A task that is gone has forgotten it.
        let _ = self.client.forget(&self.callable);
    }
}
