//! Tasks as they are: their devices and variables, and orders about all variables of a container or program.

use crate::contents::Digest;
use crate::engine::variables_in_use;
use crate::messages::{
    Call, Fault, Look, Nothing, TaskAddress, TaskStatus, TaskStatuses, VariableInfo, Welcome,
};
use crate::rpc;
use crate::server::Task;
use crate::worker::given;
use crate::{DeviceInfo, TaskName};
use gristmill_runtime::DType;
use gristmill_runtime::exec::VariableState;
use std::sync::Arc;

/// A task of a cluster, as a client sees it.
#[derive(Clone, Debug)]
pub struct TaskState {
    /// Its name.
    pub name: TaskName,
    /// Where it serves.
    pub address: String,
    /// None if it does not answer, or refuses to.
    pub state: Result<RunningTask, Fault>,
}

/// A task in service.
#[derive(Clone, Debug)]
pub struct RunningTask {
    /// A number of its own for each start.
    pub incarnation: u64,
    /// Its devices.
    pub devices: Vec<DeviceInfo>,
    /// Its variables, by container and name.
    pub variables: Vec<VariableState>,
}

impl VariableInfo {
    /// Its container and name.
    pub(crate) fn key(&self) -> (String, String) {
        (self.container.clone(), self.name.clone())
    }

    pub(crate) fn of(variable: VariableState) -> VariableInfo {
        VariableInfo {
            container: variable.container,
            name: variable.name,
            dtype: variable.dtype.name().to_owned(),
            has_value: variable.shape.is_some(),
            shape: variable
                .shape
                .into_iter()
                .flatten()
                .map(|n| n as u64)
                .collect(),
        }
    }

    fn state(self) -> Result<VariableState, Fault> {
        let dtype = DType::parse(&self.dtype);
        let dtype = dtype.ok_or_else(|| Fault::invalid(format!("no dtype {:?}", self.dtype)))?;
        let shape = self.shape.into_iter().map(|n| n as usize);
        Ok(VariableState {
            container: self.container,
            name: self.name,
            dtype,
            shape: self.has_value.then(|| shape.collect()),
        })
    }
}

impl TaskStatus {
    /// As a client sees it.
    pub(crate) fn state(self) -> Result<TaskState, Fault> {
        let TaskAddress { job, task, address } = given(self.task)?;
        let variables = self.variables.into_iter().map(VariableInfo::state);
        let variables = variables.collect::<Result<_, Fault>>()?;
        let running = match self.fault {
            Some(fault) => Err(fault),
            None => {
                let welcome = given(self.welcome)?;
                Ok(RunningTask {
                    incarnation: welcome.incarnation,
                    devices: welcome.devices,
                    variables,
                })
            }
        };
        Ok(TaskState {
            name: TaskName { job, task },
            address,
            state: running,
        })
    }
}

impl Task {
    /// This task, after containers were reset.
    pub(crate) async fn status(&self, order: Look) -> Result<TaskStatus, Fault> {
        if !order.reset.is_empty() {
            let _underway = self.begin_run()?;
            let at_most = self.limits.variables;
            self.engine.reset(order.reset, at_most).await?;
        }
        let variables = self.engine.variables()?.into_iter();
        let welcome = self.welcome();
        Ok(TaskStatus {
            task: welcome.task.clone(),
            fault: None,
            welcome: Some(welcome),
            variables: variables.map(VariableInfo::of).collect(),
        })
    }

    /// All tasks of the cluster, after containers were reset. Whoever does not answer says so in its place.
    pub(crate) async fn statuses(self: &Arc<Self>, order: Look) -> Result<TaskStatuses, Fault> {
        let names: Vec<TaskName> = self.spec.tasks().map(|(name, _)| name.clone()).collect();
        let answers = self.on_each(names.clone(), |task, name| {
            let order = order.clone();
            async move {
                if name == task.name {
                    return task.status(order).await;
                }
                let _: Welcome = task.greet(&name).await?;
                let at_most = task.limits.prepare;
                task.ask(&name, rpc::STATUS, order, at_most).await
            }
        });
        let mut tasks = Vec::new();
        for (name, answer) in names.into_iter().zip(answers.await) {
            if answer.is_ok() && !order.reset.is_empty() {
                let sessions = &self.master.sessions;
                sessions.note_reset(order.session, &name, &order.reset);
            }
            let address = self.spec.address(&name).map_err(Fault::from)?;
            tasks.push(answer.unwrap_or_else(|fault| TaskStatus {
                task: Some(TaskAddress {
                    job: name.job,
                    task: name.task,
                    address: address.to_owned(),
                }),
                fault: Some(fault),
                ..TaskStatus::default()
            }));
        }
        Ok(TaskStatuses { tasks })
    }

    /// Sets the variables of a program to its initial values, on all its tasks.
    pub(crate) async fn initialise(self: &Arc<Self>, request: Call) -> Result<Nothing, Fault> {
        let _underway = self.begin_run()?;
        let sessions = &self.master.sessions;
        sessions.check(request.session)?;
        let callable = self.callable(&Digest::from_bytes(&request.program)?)?;
        // No run of the program goes on meanwhile.
        let at_most = self.limits.variables;
        let state = tokio::time::timeout(at_most, callable.state.lock()).await;
        let mut state = state.map_err(|_| variables_in_use(at_most))?;
        let installed = self.registered(&callable.document, &mut state).await?;
        let names = installed.tasks.iter().map(|on| on.name.clone()).collect();
        let answers = self.on_each(names, |task, name| {
            let of = installed.clone();
            async move {
                let done = match name == task.name {
                    true => task.hosted(of.id)?.initialise(&task.limits).await,
                    false => of.link(&name)?.initialise(&task, of.id).await,
                };
                done.map_err(|fault| fault.of_task(&name))
            }
        });
        let done: Result<Vec<()>, Fault> = answers.await.into_iter().collect();
        done?;
        sessions.note_values(request.session, &installed)?;
        Ok(Nothing {})
    }
}
