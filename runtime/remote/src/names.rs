//! Names of devices: in the task that has them, they are local; in others, they have its job and number.

use crate::TaskName;
use crate::messages::{End, Fault};
use gristmill_runtime::device::DeviceName;

/// The task of a device; none for a local one.
pub(crate) fn task_of(device: &DeviceName) -> Option<TaskName> {
    let job = device.job.clone()?;
    let task = device.task;
    Some(TaskName { job, task })
}

/// A device of `task` as all other tasks name it.
pub fn global(task: &TaskName, device: &DeviceName) -> DeviceName {
    match device.is_local() {
        true => DeviceName {
            job: Some(task.job.clone()),
            task: task.task,
            ..device.clone()
        },
        false => device.clone(),
    }
}

/// A device as `task` names it.
pub fn local(task: &TaskName, device: &DeviceName) -> DeviceName {
    match task_of(device).as_ref() == Some(task) {
        true => DeviceName::local(device.kind, device.index),
        false => device.clone(),
    }
}

impl End {
    /// Both devices. Errors with `InvalidInput` on other text.
    pub(crate) fn devices(&self) -> Result<[DeviceName; 2], Fault> {
        let parse = |text: &str| DeviceName::parse(text).map_err(Fault::from);
        Ok([parse(&self.source)?, parse(&self.destination)?])
    }

    /// An end of a task with names as all tasks understand them.
    pub(crate) fn global(&self, task: &TaskName) -> Result<End, Fault> {
        let [source, destination] = self.devices()?.map(|d| global(task, &d).to_string());
        Ok(End {
            source,
            destination,
            ..self.clone()
        })
    }

    /// The same end with names as a task has them.
    pub(crate) fn local(&self, task: &TaskName) -> Result<End, Fault> {
        let [source, destination] = self.devices()?.map(|d| local(task, &d).to_string());
        Ok(End {
            source,
            destination,
            ..self.clone()
        })
    }
}
