//! A watch on runs that take long: where their tasks are, and since when.
//!
//! A living connection says nothing about the work at its end. So the master of a run asks the tasks still at
//! work, once a second, for the number of their steps and pieces of tensors so far. A run none of whose tasks
//! gets on has stalled: its client is told, with the place of each task; the time limit of the run ends it.

use crate::TaskName;
use crate::inbox::Inbox;
use crate::limits::Limits;
use crate::messages::Place;
use crate::rpc;
use crate::runs::Run;
use crate::server::Task;
use gristmill_runtime::exec::Progress;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::{Instant, Interval};

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

/// The last news of a task.
struct Seen {
    /// Of its last answer.
    count: Option<u64>,
    text: String,
    /// The first answer with this number, or the first question.
    since: Instant,
    /// The time of a question without an answer so far.
    asked: Option<Instant>,
}

/// A watch on a run.
pub(crate) struct Watch {
    task: Arc<Task>,
    run: Run,
    ticks: Interval,
    answers: JoinSet<(TaskName, Option<Place>)>,
    seen: BTreeMap<TaskName, Seen>,
    /// Time without progress until the next warning.
    next: Duration,
}

impl Watch {
    /// A watch from now on.
    pub(crate) fn new(task: Arc<Task>, run: Run) -> Watch {
        Watch {
            next: task.limits.stall,
            ticks: rpc::ticks(task.limits.beat),
            task,
            run,
            answers: JoinSet::new(),
            seen: BTreeMap::new(),
        }
    }

    /// Waits for a stall, and describes it. Nothing is lost when this is given up, and begun again.
    pub(crate) async fn stalled(&mut self, awaited: &[&TaskName]) -> String {
        loop {
            tokio::select! {
                _ = self.ticks.tick() => {
                    if let Some(warning) = self.warning(awaited) {
                        return warning;
                    }
                    self.ask(awaited);
                }
                Some(answer) = self.answers.join_next() => if let Ok((name, place)) = answer {
                    self.note(&name, place);
                },
            }
        }
    }

    /// Asks tasks where they are, but for those which have not answered yet: their line may be slow.
    fn ask(&mut self, awaited: &[&TaskName]) {
        let now = Instant::now();
        for &name in awaited {
            let seen = self.seen.entry(name.clone()).or_insert_with(|| Seen {
                count: None,
                text: String::new(),
                since: now,
                asked: None,
            });
            if seen.asked.is_some() {
                continue;
            }
            seen.asked = Some(now);
            let (task, run, name) = (self.task.clone(), self.run.clone(), name.clone());
            self.answers.spawn(async move {
                let place = task.place_on(&run, &name).await;
                (name, place.ok())
            });
        }
    }

    fn note(&mut self, name: &TaskName, place: Option<Place>) {
        let Some(seen) = self.seen.get_mut(name) else {
            return;
        };
        seen.asked = None;
        // Without an answer its loss ends the run.
        let Some(Place { count, text }) = place else {
            return;
        };
        if seen.count != Some(count) {
            (seen.count, seen.since) = (Some(count), Instant::now());
        }
        seen.text = text;
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
        let late = self.task.limits.keep_alive + self.task.limits.keep_alive_timeout;
        let place = |name: &&TaskName| {
            let Some(seen) = self.seen.get(*name) else {
                return name.to_string();
            };
            let is_late = seen.asked.is_some_and(|asked| asked.elapsed() > late);
            let text = match seen.count {
                _ if is_late => "does not answer",
                Some(_) => &seen.text,
                None => return name.to_string(),
            };
            let seconds = seen.since.elapsed().as_secs();
            format!("{name} ({text}, for {seconds} s)")
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
