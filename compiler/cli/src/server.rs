//! `gristmill server`: one task of several machines.

use crate::output::{noteln, outln};
use crate::{args, heading, load, parse, signals};
use clap::Args;
use gristmill::cost::store;
use gristmill::distribute::{ClusterSpec, TaskName, serve};
use gristmill::{Error, Result, Settings, Tuning};
use gristmill_runtime::cpu::n_cores;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Name of the variable that describes a cluster to TensorFlow.
const TF_CONFIG: &str = "TF_CONFIG";

/// Arguments of `server`.
#[derive(Args)]
pub struct ServerArgs {
    /// Job of the task, e.g. `worker`.
    #[arg(long, value_name = "JOB", alias = "job_name", requires = "task", help_heading = heading::DEVICES)]
    job: Option<String>,
    /// Number of the task within its job.
    #[arg(long, value_name = "N", alias = "task_index", requires = "job", help_heading = heading::DEVICES)]
    task: Option<u32>,
    /// Jobs, tasks and addresses, in TOML or JSON: the same file for all tasks. Default: the host lists, or the variable TF_CONFIG.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["ps_hosts", "worker_hosts"], help_heading = heading::DEVICES)]
    cluster: Option<PathBuf>,
    /// Addresses of the tasks of the job `ps`, between commas.
    #[arg(long, value_name = "HOST:PORT,..", alias = "ps_hosts", requires = "job", help_heading = heading::DEVICES)]
    ps_hosts: Option<String>,
    /// Addresses of the tasks of the job `worker`, between commas.
    #[arg(long, value_name = "HOST:PORT,..", alias = "worker_hosts", requires = "job", help_heading = heading::DEVICES)]
    worker_hosts: Option<String>,
    /// Logical devices of the task, as in `--devices` of the compiling verbs.
    #[arg(long, default_value = "cpu:1", value_name = "LIST", help_heading = heading::DEVICES)]
    devices: String,
    /// CPU threads shared by all logical CPU devices. Default: one per core.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1024), help_heading = heading::DEVICES)]
    threads: Option<u16>,
    /// Time for runs under way to end after Ctrl-C or a request to terminate; a second one ends the server at once.
    #[arg(long, default_value = "30s", value_name = "TIME", value_parser = parse::time, help_heading = heading::DEVICES)]
    grace: Duration,
}

/// Time between two looks for a signal.
const LOOK: Duration = Duration::from_millis(50);

/// Runs the verb: serves until a signal comes, then ends in good order.
pub fn server(args: &ServerArgs) -> Result<()> {
    let (cluster, task) = args.place()?;
    let interrupt = signals::interrupt()?;
    let server = serve(cluster, task, &args.settings()?)?;
    outln!(
        "serving grpc://{} as {}, incarnation {:016x}",
        server.address(),
        server.name(),
        server.incarnation()
    );
    noteln!("whoever runs programs on this machine may use this server and read its variables");
    while !interrupt.load(Ordering::Relaxed) {
        if let Some(ended) = server.wait(LOOK) {
            return Ok(ended?);
        }
    }
    noteln!("shutting down: runs under way have {:?} to end", args.grace);
    match server.shut_down(args.grace) {
        0 => {}
        n => noteln!("cut off {n} runs"),
    }
    Ok(())
}

impl ServerArgs {
    /// The cluster, and the own task.
    fn place(&self) -> Result<(ClusterSpec, TaskName)> {
        let named = self.job.clone().zip(self.task);
        let named = named.map(|(job, task)| TaskName { job, task });
        let hosts = [("ps", &self.ps_hosts), ("worker", &self.worker_hosts)];
        let hosts = hosts.map(|(job, hosts)| Some((job, hosts.as_deref()?)));
        let hosts: Vec<(&str, &str)> = hosts.into_iter().flatten().collect();
        let nameless = || Error::invalid("which task is this?").hint("--job worker --task 0");
        if let Some(path) = &self.cluster {
            let parsed = ClusterSpec::parse(&load::text(path)?);
            let cluster = parsed.map_err(|e| e.context(path.display()))?;
            return Ok((cluster, named.ok_or_else(nameless)?));
        }
        if !hosts.is_empty() {
            return Ok((ClusterSpec::of_hosts(hosts)?, named.ok_or_else(nameless)?));
        }
        let Ok(config) = std::env::var(TF_CONFIG) else {
            let message = "a server needs a cluster";
            let hint = "--cluster FILE, --ps-hosts and --worker-hosts, or the variable TF_CONFIG";
            return Err(Error::invalid(message).hint(hint));
        };
        let (cluster, own) = ClusterSpec::of_tf_config(&config)?;
        Ok((cluster, named.unwrap_or(own)))
    }

    fn settings(&self) -> Result<Settings> {
        let threads = self.threads.map_or_else(n_cores, usize::from);
        Ok(Settings {
            devices: args::devices(&self.devices, threads)?,
            threads: Some(threads),
            tuning: Tuning {
                folder: store::folder(),
                ..Tuning::default()
            },
            ..Settings::default()
        })
    }
}
