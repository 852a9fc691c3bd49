//! The masters with a stream of orders to a task.

use crate::messages::Fault;
use crate::worker::locked;
use crate::{Limits, TaskName};
use gristmill_runtime::ErrorKind;
use std::collections::HashMap;
use std::sync::Mutex;
use tokio::sync::Notify;

#[derive(Default)]
pub(crate) struct Masters {
    /// The start of each task with streams, and their number; more than one when the end of a broken one is noticed late.
    starts: Mutex<HashMap<TaskName, (u64, usize)>>,
    /// Told when the last stream of a start has ended.
    left: Notify,
}

impl Masters {
    /// Notes a stream. While another start of the same task has one, waits as long as the end of a broken connection may take to be noticed,
    /// as the task may just have been restarted; then errors.
    pub(crate) async fn enter(
        &self,
        name: &TaskName,
        incarnation: u64,
        limits: &Limits,
    ) -> Result<(), Fault> {
        let noticed = 2 * (limits.keep_alive + limits.keep_alive_timeout);
        let entered = async {
            loop {
                let left = self.left.notified();
                if self.try_enter(name, incarnation).is_ok() {
                    return;
                }
                left.await;
            }
        };
        match tokio::time::timeout(noticed, entered).await {
            Ok(()) => Ok(()),
            Err(_) => self.try_enter(name, incarnation),
        }
    }

    fn try_enter(&self, name: &TaskName, incarnation: u64) -> Result<(), Fault> {
        let mut masters = locked(&self.starts);
        // Parts are known by the incarnation of their master.
        let taken = masters
            .iter()
            .find(|(other, start)| start.0 == incarnation && *other != name);
        if let Some((other, _)) = taken {
            return Err(Fault::invalid(format!(
                "{name} has the incarnation of {other}"
            )));
        }
        let (other, n) = masters.entry(name.clone()).or_insert((incarnation, 0));
        if *other != incarnation {
            let message = format!(
                "{name} is connected already, as incarnation {other:016x}, and incarnation {incarnation:016x} wants its place"
            );
            return Err(Fault::new(ErrorKind::DeviceFailed, message)
                .with_hint("one task has one server; stop the other one"));
        }
        *n += 1;
        Ok(())
    }

    /// Notes the end of a stream.
    pub(crate) fn leave(&self, name: &TaskName, incarnation: u64) {
        let mut masters = locked(&self.starts);
        if let Some((own, n)) = masters.get_mut(name)
            && *own == incarnation
        {
            *n -= 1;
            if *n == 0 {
                masters.remove(name);
                self.left.notify_waiters();
            }
        }
    }
}
