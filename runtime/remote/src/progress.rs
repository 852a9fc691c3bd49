//! A watch on runs that take long: where their tasks are, and since when.
//!
//! A living connection says nothing about the work at its end. So the master of a run asks the tasks still at work, once a second, for
//! the number of their steps and pieces of tensors so far. A run none of whose tasks gets on has stalled: its client is told,
//! with the place of each task; the time limit of the run ends it.

use crate::TaskName;
use crate::inbox::Inbox;
use crate::limits::Limits;
use crate::messages::Place;
use crate::runs::Run;
use crate::server::Task;
use gristmill_runtime::exec::Progress;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at};

/// A part's way through a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Stage {
    Idle,
    Inputs,
    Turn,
    Running,
}

/// The stage of a part's run, for others to read.
#[derive(Default)]
pub(crate) struct StageNow(AtomicU8);

impl StageNow {
    /// Begins a stage, which ends when the value is dropped.
    pub(crate) fn enter(&self, stage: Stage) -> impl Drop {
        self.0.store(stage as u8, Ordering::Relaxed);
        Leave(&self.0)
    }

    fn now(&self) -> Stage {
        let now = self.0.load(Ordering::Relaxed);
        let stages = [Stage::Inputs, Stage::Turn, Stage::Running];
        let found = stages.into_iter().find(|stage| *stage as u8 == now);
        found.unwrap_or(Stage::Idle)
    }

    /// The place of a part with this progress and these inputs.
    pub(crate) fn place(&self, progress: &Progress, feeds: &Inbox) -> Place {
        let text = match self.now() {
            Stage::Idle => "waits for orders".to_owned(),
            Stage::Inputs => "waits for its inputs".to_owned(),
            Stage::Turn => "waits for variables which another run has".to_owned(),
            Stage::Running => place_of(progress),
        };
        Place {
            count: progress.count.wrapping_add(feeds.n_bytes()),
            text,
        }
    }
}

struct Leave<'a>(&'a AtomicU8);

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        self.0.store(Stage::Idle as u8, Ordering::Relaxed);
    }
}

/// The place of a run within its executor, as the predicate of a sentence about its task.
fn place_of(progress: &Progress) -> String {
    let steps = progress.steps.iter();
    let steps: Vec<String> = steps
        .map(|(device, node)| format!("{node:?} on {device}"))
        .collect();
    let more = match progress.awaited.len() {
        0 | 1 => String::new(),
        n => format!(" and {} more", n - 1),
    };
    let awaited = progress.awaited.first().map(|end| {
        let (tensor, source) = (&end.key.tensor, &end.key.source);
        format!("waits for tensor {tensor:?} from {source}{more}")
    });
    match (steps.as_slice(), awaited) {
        ([], Some(awaited)) => awaited,
        ([], None) if progress.is_sending => "waits for the network to take its tensors".to_owned(),
        ([], None) => "runs".to_owned(),
        (steps, None) => format!("computes {}", steps.join(", ")),
        (steps, Some(awaited)) => format!("computes {}, and {awaited}", steps.join(", ")),
    }
}

/// The last answer of a task.
struct Seen {
    /// None if it did not answer in time.
    count: Option<u64>,
    text: String,
    /// The first answer with this number.
    since: Instant,
}

/// A watch on a run.
pub(crate) struct Watch {
    task: Arc<Task>,
    run: Run,
    ticks: Interval,
    asked: JoinSet<(TaskName, Option<Place>)>,
    seen: BTreeMap<TaskName, Seen>,
    /// Time without progress until the next warning.
    next: Duration,
}

impl Watch {
    /// A watch from now on.
    pub(crate) fn new(task: Arc<Task>, run: Run) -> Watch {
        let beat = task.limits.beat;
        let mut ticks = interval_at(Instant::now() + beat, beat);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Watch {
            next: task.limits.stall,
            task,
            run,
            ticks,
            asked: JoinSet::new(),
            seen: BTreeMap::new(),
        }
    }

    /// Waits for a stall, and describes it. Nothing is lost when this is given up, and begun again.
    pub(crate) async fn stalled(&mut self, awaited: &[&TaskName]) -> String {
        loop {
            tokio::select! {
                _ = self.ticks.tick() => self.ask(awaited),
                Some(answer) = self.asked.join_next() => {
                    if let Ok((name, place)) = answer {
                        self.note(name, place);
                    }
                    if let Some(warning) = self.warning(awaited) {
                        return warning;
                    }
                }
            }
        }
    }

    /// Asks tasks where they are.
    fn ask(&mut self, awaited: &[&TaskName]) {
        for &name in awaited {
            let (task, run, name) = (self.task.clone(), self.run.clone(), name.clone());
            self.asked.spawn(async move {
                let at_most = task.limits.beat;
                let place = task.place_on(&run, &name);
                let place = tokio::time::timeout(at_most, place).await;
                (name, place.ok().and_then(Result::ok))
            });
        }
    }

    fn note(&mut self, name: TaskName, place: Option<Place>) {
        let (count, text) = match place {
            Some(place) => (Some(place.count), place.text),
            None => (None, "does not answer".to_owned()),
        };
        match self.seen.get_mut(&name) {
            Some(seen) if seen.count == count => seen.text = text,
            _ => {
                let since = Instant::now();
                let seen = Seen { count, text, since };
                self.seen.insert(name, seen);
            }
        }
    }

    /// A warning when no awaited task has got on for long, and longer than before the last one.
    fn warning(&mut self, awaited: &[&TaskName]) -> Option<String> {
        let idle = |name: &&TaskName| self.seen.get(*name).map(|seen| seen.since.elapsed());
        let idle = awaited.iter().map(idle).min()??;
        let Limits { stall, .. } = self.task.limits;
        if idle < stall {
            self.next = stall;
        }
        (idle >= self.next).then(|| {
            self.next = idle * 2;
            let places = self.places(awaited);
            format!("no part of a run gets on: {places}")
        })
    }

    /// The tasks, each with its place if that is known.
    pub(crate) fn places(&self, awaited: &[&TaskName]) -> String {
        let place = |name: &&TaskName| match self.seen.get(*name) {
            None => name.to_string(),
            Some(seen) => {
                let seconds = seen.since.elapsed().as_secs();
                format!("{name} ({}, for {seconds} s)", seen.text)
            }
        };
        let places: Vec<String> = awaited.iter().map(place).collect();
        places.join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gristmill_runtime::device::DeviceName;
    use gristmill_runtime::exec::RemoteEnd;
    use gristmill_runtime::program::Key;

    #[test]
    fn places_say_what_is_computed_and_what_is_absent() {
        let device = |text: &str| DeviceName::parse(text).unwrap();
        let mut progress = Progress {
            count: 3,
            steps: Vec::new(),
            awaited: Vec::new(),
            is_sending: true,
        };
        let place = |progress: &Progress| place_of(progress);
        let sends = "waits for the network to take its tensors";
        assert_eq!(place(&progress), sends);
        progress.is_sending = false;
        assert_eq!(place(&progress), "runs");
        let end = |tensor: &str| RemoteEnd {
            key: Key {
                source: device("/job:ps/task:0/cpu:0"),
                destination: device("cpu:0"),
                tensor: tensor.into(),
            },
            size_bytes: 4,
        };
        progress.awaited = vec![end("x"), end("y")];
        let source = device("/job:ps/task:0/cpu:0");
        let waits = format!("waits for tensor \"x\" from {source} and 1 more");
        assert_eq!(place(&progress), waits);
        progress.steps = vec![(device("cpu:1"), "/a".into())];
        let both = format!("computes \"/a\" on {}, and {waits}", device("cpu:1"));
        assert_eq!(place(&progress), both);
    }

    #[test]
    fn a_stage_ends_with_its_value() {
        let stage = StageNow::default();
        let turn = stage.enter(Stage::Turn);
        assert_eq!(stage.now(), Stage::Turn);
        drop(turn);
        assert_eq!(stage.now(), Stage::Idle);
    }
}
