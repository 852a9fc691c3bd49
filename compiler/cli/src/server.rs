//! `gristmill server`: one task of several machines.

use crate::cluster::{ClusterArgs, TrustArgs};
use crate::output::{noteln, outln};
use crate::{args, heading, parse, signals};
use clap::Args;
use gristmill::cost::store;
use gristmill::distribute::{ClusterSpec, Credentials, ServerOptions, TaskName, serve_with};
use gristmill::{Error, Result, Settings, Tuning};
use gristmill_runtime::cpu::n_cores;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Arguments of `server`.
#[derive(Args)]
pub struct ServerArgs {
    /// Job of the task, e.g. `worker`.
    #[arg(long, value_name = "JOB", alias = "job_name", requires = "task", help_heading = heading::DEVICES)]
    job: Option<String>,
    /// Number of the task within its job.
    #[arg(long, value_name = "N", alias = "task_index", requires = "job", help_heading = heading::DEVICES)]
    task: Option<u32>,
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Address to listen at, where the one in the cluster is not this machine's own: 0.0.0.0:2222 behind a translation of addresses.
    #[arg(long, value_name = "HOST:PORT", help_heading = heading::DEVICES)]
    listen: Option<String>,
    #[command(flatten)]
    trust: TrustArgs,
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
    // Before its keys: their files are named after the task.
    cluster.address(&task)?;
    let options = ServerOptions {
        credentials: args.trust.of_task(&task)?,
        listen: args.listen.clone(),
        ..ServerOptions::default()
    };
    let whoever = match options.credentials {
        Credentials::Local => "whoever runs programs on this machine",
        Credentials::Insecure => "nothing is encrypted, and whoever reaches this address",
        Credentials::Keys(_) => "whoever has keys of the same authority",
    };
    let server = serve_with(cluster, task, &args.settings()?, options)?;
    outln!(
        "serving grpc://{} as {}, incarnation {:016x}",
        server.address(),
        server.name(),
        server.incarnation()
    );
    noteln!("{whoever} may run programs on this server, and read and change its variables");
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
        let (cluster, own) = self.cluster.read()?;
        let nameless = || Error::invalid("which task is this?").hint("--job worker --task 0");
        Ok((cluster, named.or(own).ok_or_else(nameless)?))
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
