//! A client of a task.

use crate::calls;
use crate::contents::{self, Digest, Document};
use crate::environment::Machine;
use crate::lease::Lease;
use crate::messages::{
    Call, DeviceInfo, Fault, Hello, Look, Nothing, Prepare, Prepared, TaskStatus, TaskStatuses,
    Welcome,
};
use crate::network::{Credentials, Network};
use crate::rpc;
use crate::server::network;
use crate::status::TaskState;
use crate::{Limits, TaskName};
use gristmill_runtime::program::IoSpec;
use gristmill_runtime::{ErrorKind, Tensor};
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tonic::transport::Channel;

/// A connection of a client to a task, whose master runs programs for it.
pub struct Client {
    address: String,
    channel: Channel,
    limits: Limits,
    on_stall: Option<OnStall>,
    welcome: Welcome,
    pub(crate) lease: Lease,
}

/// Told what a run waits for that does not get on.
pub type OnStall = Arc<dyn Fn(&str) + Send + Sync>;

/// Settings of a client.
#[derive(Clone, Default)]
pub struct ClientOptions {
    /// Whom it trusts, and as whom it connects.
    pub credentials: Credentials,
    /// Told, on the thread of the run's caller, about a run none of whose tasks has got on for ten seconds,
    /// then twenty, and so on (the servers' [`Limits::stall`]): the place of each task in it.
    pub on_stall: Option<OnStall>,
    /// Bounds of messages and waits. [`Limits::run`] is the longest time of a run.
    pub limits: Limits,
}

impl From<Credentials> for ClientOptions {
    fn from(credentials: Credentials) -> ClientOptions {
        ClientOptions {
            credentials,
            ..ClientOptions::default()
        }
    }
}

impl From<&Credentials> for ClientOptions {
    fn from(credentials: &Credentials) -> ClientOptions {
        credentials.clone().into()
    }
}

impl From<Limits> for ClientOptions {
    fn from(limits: Limits) -> ClientOptions {
        ClientOptions {
            limits,
            ..ClientOptions::default()
        }
    }
}

/// A client's program, compiled by a task.
#[derive(Clone, Debug)]
pub struct Callable {
    /// Of its text.
    pub digest: Digest,
    /// Its inputs, in order.
    pub inputs: Vec<IoSpec>,
    /// Its outputs, in order.
    pub outputs: Vec<IoSpec>,
    /// The device of each node, for people.
    pub placement: String,
    /// Unmet wishes, and warnings of the tasks.
    pub warnings: Vec<String>,
}

impl Client {
    /// Connects to the task at `target`, `grpc://HOST:PORT`.
    ///
    /// Errors with `InvalidInput` on another form, on a task of another version, and with `Unsupported` beyond this machine without keys;
    /// `DeviceFailed` when there is no answer.
    pub fn connect(target: &str, version: String, options: ClientOptions) -> Result<Client, Fault> {
        let ClientOptions {
            credentials,
            on_stall,
            limits,
        } = options;
        let address = target.strip_prefix("grpc://").unwrap_or_default();
        if address
            .rsplit_once(':')
            .is_none_or(|(host, port)| host.is_empty() || port.parse::<u16>().is_err())
        {
            let message = format!("session {target:?}: expected grpc://HOST:PORT");
            return Err(Fault::invalid(message));
        }
        let network = Network {
            environment: Arc::new(Machine),
            credentials,
        };
        let (given, asked) = (limits.clone(), address.to_owned());
        let (channel, lease, welcome) = wait(async move {
            // A channel needs the threads of the network to be made.
            let channel = network.channel(&asked, None, &given);
            let channel =
                channel.map_err(|fault| fault.context(format!("session grpc://{asked}")))?;
            let hello = Hello::new(version);
            let begun = Lease::begin(&channel, hello, &asked, &given).await;
            let (lease, welcome) = begun.map_err(|fault| network.explain(fault))?;
            Ok((channel, lease, welcome))
        })?;
        Ok(Client {
            address: address.to_owned(),
            channel,
            limits,
            on_stall,
            welcome,
            lease,
        })
    }

    /// The task at the other end.
    pub fn task(&self) -> TaskName {
        self.welcome.name()
    }

    /// The devices of this task.
    pub fn devices(&self) -> &[DeviceInfo] {
        &self.welcome.devices
    }

    /// Divides and compiles a program over the tasks named in it.
    pub fn prepare(&self, program: &Document) -> Result<Callable, Fault> {
        self.lease.check()?;
        let (channel, document, limits) =
            (self.channel.clone(), program.clone(), self.limits.clone());
        let (who, address) = (self.task().to_string(), self.address.clone());
        wait(async move {
            let brought = contents::bring(&channel, &document, &limits).await;
            brought.map_err(|failure| failure.fault(&who, &address))
        })?;
        let request = Prepare {
            program: Some(program.contents()),
            session: self.lease.session,
        };
        let prepared: Prepared = self.ask(rpc::PREPARE, request, self.limits.prepare)?;
        let specs = |io: &[crate::messages::Io]| {
            let specs = io.iter().map(|io| io.spec());
            specs.collect::<Result<Vec<IoSpec>, Fault>>()
        };
        Ok(Callable {
            digest: program.digest(),
            inputs: specs(&prepared.inputs)?,
            outputs: specs(&prepared.outputs)?,
            placement: prepared.placement,
            warnings: prepared.warnings,
        })
    }

    /// Runs a program once.
    pub fn call(&self, callable: &Callable, feeds: &[Tensor]) -> Result<Vec<Tensor>, Fault> {
        let (channel, limits) = (self.channel.clone(), self.limits.clone());
        self.lease.check()?;
        let (digest, feeds) = ((self.lease.session, callable.digest), feeds.to_vec());
        let (who, address) = (self.task().to_string(), self.address.clone());
        // Whoever is told may take its time: this thread does nothing but wait, and those of the network have
        // other work.
        let (said, sayings) = std::sync::mpsc::channel();
        network()?.spawn(async move {
            let stalls = said.clone();
            // The caller waits below.
            let tell = move |stall: &str| drop(stalls.send(Err(stall.to_owned())));
            let called = calls::call(&channel, digest, feeds, (&limits, &tell)).await;
            let _ = said.send(Ok(called.map_err(|failure| failure.fault(&who, &address))));
        });
        for saying in sayings {
            match saying {
                Ok(called) => return called,
                Err(stall) => self.on_stall.iter().for_each(|told| told(&stall)),
            }
        }
        Err(panicked())
    }

    /// Sets the variables of a program to its initial values, on all its tasks.
    pub fn initialise(&self, callable: &Callable) -> Result<(), Fault> {
        let request = self.about(callable);
        let Nothing {} = self.ask(rpc::INITIALISE, request, self.about_variables())?;
        Ok(())
    }

    /// All tasks of the cluster, after these containers were set to initial values on each of them.
    pub fn tasks(&self, reset: &[&str]) -> Result<Vec<TaskState>, Fault> {
        let reset = reset.iter().map(|&name| name.to_owned()).collect();
        let session = self.lease.session;
        let look = Look { reset, session };
        let statuses: TaskStatuses = self.ask(rpc::STATUSES, look, self.about_variables())?;
        statuses.tasks.into_iter().map(TaskStatus::state).collect()
    }

    /// Tells the task that this client needs a program no more.
    pub fn forget(&self, callable: &Callable) -> Result<(), Fault> {
        self.lease.check()?;
        let request = self.about(callable);
        let Nothing {} = self.ask(rpc::FORGET, request, self.limits.hello)?;
        Ok(())
    }

    /// Time for orders about variables: those of a task wait for its runs, and parts may have to be compiled.
    fn about_variables(&self) -> Duration {
        let Limits {
            variables,
            prepare,
            hello,
            ..
        } = self.limits;
        variables + 2 * prepare + hello
    }

    fn about(&self, callable: &Callable) -> Call {
        Call {
            program: callable.digest.to_bytes(),
            session: self.lease.session,
            ..Call::default()
        }
    }

    fn ask<Q: prost::Message + 'static, A: prost::Message + Default + 'static>(
        &self,
        path: &'static str,
        question: Q,
        at_most: Duration,
    ) -> Result<A, Fault> {
        let (channel, limits) = (self.channel.clone(), self.limits.clone());
        let (who, address) = (self.task().to_string(), self.address.clone());
        wait(async move {
            let answered = rpc::call(&channel, path, question, at_most, &limits).await;
            answered.map_err(|failure| failure.fault(&who, &address))
        })
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let closing = (
            self.lease.session,
            self.channel.clone(),
            self.limits.clone(),
        );
        // Without an answer the session ends by itself.
        let _ = wait(async move {
            let (session, channel, limits) = closing;
            Lease::close(session, channel, limits).await;
            Ok(())
        });
    }
}

/// Does work on the threads of the network, wherever the caller is.
pub(crate) fn wait<T: Send + 'static>(
    work: impl Future<Output = Result<T, Fault>> + Send + 'static,
) -> Result<T, Fault> {
    let (sender, receiver) = std::sync::mpsc::channel();
    network()?.spawn(async move {
        // The caller waits below.
        let _ = sender.send(work.await);
    });
    receiver.recv().unwrap_or_else(|_| Err(panicked()))
}

fn panicked() -> Fault {
    Fault::new(ErrorKind::Internal, "a task of the session panicked")
}
