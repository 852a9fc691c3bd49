//! The tasks of a session's cluster, with their devices and variables.

use crate::error::{Error, Result};
use crate::session::Session;
use gristmill_remote::{RunningTask, TaskName};

/// A task of a cluster.
#[derive(Clone, Debug)]
pub struct TaskState {
    /// Its name.
    pub name: TaskName,
    /// Where it serves, `HOST:PORT`.
    pub address: String,
    /// Its devices and variables. An error if it does not answer, or refuses to.
    pub state: Result<RunningTask>,
}

impl Session {
    /// All tasks of the session's cluster, in the order of their names.
    ///
    /// Errors with `InvalidInput` in a session of this process, and with `DeviceFailed` when the session's task does not answer.
    pub fn cluster_tasks(&self) -> Result<Vec<TaskState>> {
        self.cluster_tasks_after_reset(&[])
    }

    /// Sets all variables of containers to their initial values, on every task of the session's cluster, and lists the tasks. Each task waits for
    /// its runs. A variable without an initial value counts as never assigned. The empty name is the container of models without one.
    ///
    /// Errors as [`Session::cluster_tasks`]; a task without an answer has an error in the list, and may reset its
    /// variables later.
    pub fn cluster_tasks_after_reset(&self, containers: &[&str]) -> Result<Vec<TaskState>> {
        let Some(cluster) = self.cluster() else {
            let message = "a session of this process has no tasks";
            return Err(Error::invalid(message).hint("Session::open(\"grpc://HOST:PORT\", ..)"));
        };
        let state = |task: gristmill_remote::TaskState| TaskState {
            name: task.name,
            address: task.address,
            state: task.state.map_err(Error::from),
        };
        let tasks = cluster.tasks(containers)?;
        Ok(tasks.into_iter().map(state).collect())
    }
}
