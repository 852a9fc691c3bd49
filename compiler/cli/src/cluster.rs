//! Arguments of verbs on several machines: the cluster, and whom to trust.

use crate::{heading, load};
use clap::Args;
use gristmill::distribute::{ClusterSpec, Credentials, Keys, TaskName};
use gristmill::{Error, Result};
use std::path::PathBuf;

/// Name of the variable that describes a cluster to TensorFlow.
const TF_CONFIG: &str = "TF_CONFIG";

/// Where jobs, tasks and addresses are written down.
#[derive(Args)]
pub struct ClusterArgs {
    /// Jobs, tasks and addresses, in TOML or JSON: the same file for all tasks. Default: the host lists, or the variable TF_CONFIG.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["ps_hosts", "worker_hosts"], help_heading = heading::DEVICES)]
    cluster: Option<PathBuf>,
    /// Addresses of the tasks of the job `ps`, between commas.
    #[arg(long, value_name = "HOST:PORT,..", alias = "ps_hosts", help_heading = heading::DEVICES)]
    ps_hosts: Option<String>,
    /// Addresses of the tasks of the job `worker`, between commas.
    #[arg(long, value_name = "HOST:PORT,..", alias = "worker_hosts", help_heading = heading::DEVICES)]
    worker_hosts: Option<String>,
}

impl ClusterArgs {
    /// The cluster, and the own task where the variable names it.
    pub fn read(&self) -> Result<(ClusterSpec, Option<TaskName>)> {
        let hosts = [("ps", &self.ps_hosts), ("worker", &self.worker_hosts)];
        let hosts = hosts.map(|(job, hosts)| Some((job, hosts.as_deref()?)));
        let hosts: Vec<(&str, &str)> = hosts.into_iter().flatten().collect();
        if let Some(path) = &self.cluster {
            let parsed = ClusterSpec::parse(&load::text(path)?);
            return Ok((parsed.map_err(|e| e.context(path.display()))?, None));
        }
        if !hosts.is_empty() {
            return Ok((ClusterSpec::of_hosts(hosts)?, None));
        }
        let Ok(config) = std::env::var(TF_CONFIG) else {
            let hint = "--cluster FILE, --ps-hosts and --worker-hosts, or the variable TF_CONFIG";
            return Err(Error::invalid("which cluster?").hint(hint));
        };
        let (cluster, own) = ClusterSpec::of_tf_config(&config)?;
        Ok((cluster, Some(own)))
    }
}

/// Whom a verb trusts on a network.
#[derive(Args)]
pub struct TrustArgs {
    /// Folder with keys, which `gristmill keys` makes: with them, other machines take part. A server needs `ca.pem` and the files of its task,
    /// others need `ca.pem` and those of clients.
    #[arg(long, value_name = "DIR", conflicts_with = "insecure", help_heading = heading::DEVICES)]
    keys: Option<PathBuf>,
    /// Let other machines take part without keys: nothing is encrypted, and whoever reaches a server runs programs there, and reads and changes
    /// its variables.
    #[arg(long, help_heading = heading::DEVICES)]
    insecure: bool,
}

impl TrustArgs {
    /// As a task.
    pub fn of_task(&self, task: &TaskName) -> Result<Credentials> {
        match &self.keys {
            Some(folder) => Ok(Credentials::Keys(Keys::of_task(folder, task)?)),
            None => Ok(self.without_keys()),
        }
    }

    /// As a client.
    pub fn of_client(&self) -> Result<Credentials> {
        match &self.keys {
            Some(folder) => Ok(Credentials::Keys(Keys::of_client(folder)?)),
            None => Ok(self.without_keys()),
        }
    }

    /// Errors if one is given: what runs in this process needs neither.
    pub fn needs_session(&self) -> Result<()> {
        let given = match (&self.keys, self.insecure) {
            (Some(_), _) => "--keys",
            (None, true) => "--insecure",
            (None, false) => return Ok(()),
        };
        let message = format!("{given} is for a session on a cluster");
        Err(Error::invalid(message).hint("--session grpc://HOST:PORT"))
    }

    /// The same flags for a server.
    pub fn flags(&self) -> Vec<String> {
        let keys = self
            .keys
            .iter()
            .map(|folder| format!("--keys={}", folder.display()));
        keys.chain(self.insecure.then(|| "--insecure".to_owned()))
            .collect()
    }

    /// Errors if one is given for another verb than `server`.
    pub fn needs_server(&self, verb: &str) -> Result<()> {
        match self.flags().first() {
            None => Ok(()),
            Some(flag) => {
                let message = format!("{flag} is for servers, and each task runs {verb:?}");
                Err(Error::invalid(message).hint("give it behind the verb"))
            }
        }
    }

    fn without_keys(&self) -> Credentials {
        match self.insecure {
            true => Credentials::Insecure,
            false => Credentials::Local,
        }
    }
}
