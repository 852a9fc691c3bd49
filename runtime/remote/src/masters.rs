//! The masters with a stream of orders to a task.

use crate::TaskName;
use crate::messages::Fault;
use crate::worker::locked;
use gristmill_runtime::ErrorKind;
use std::collections::HashMap;
use std::sync::Mutex;

/// The start of each task with streams, and their number; more than one when the end of a broken one is noticed late.
#[derive(Default)]
pub(crate) struct Masters(Mutex<HashMap<TaskName, (u64, usize)>>);

impl Masters {
    /// Notes a stream. Errors while another start of the same task has one.
    pub(crate) fn enter(&self, name: &TaskName, incarnation: u64) -> Result<(), Fault> {
        let mut masters = locked(&self.0);
        let (other, n) = masters.entry(name.clone()).or_insert((incarnation, 0));
        if *other != incarnation {
            let message = format!(
                "{name} is connected already, as incarnation {other:016x}, and incarnation {incarnation:016x} wants its place"
            );
            return Err(Fault::new(ErrorKind::DeviceFailed, message)
                .with_hint("one task has one server; try again if it was restarted a moment ago"));
        }
        *n += 1;
        Ok(())
    }

    /// Notes the end of a stream.
    pub(crate) fn leave(&self, name: &TaskName, incarnation: u64) {
        let mut masters = locked(&self.0);
        if let Some((own, n)) = masters.get_mut(name)
            && *own == incarnation
        {
            *n -= 1;
            if *n == 0 {
                masters.remove(name);
            }
        }
    }
}
