//! The critical chain in words.

use super::Subject;
use gristmill_solver::schedule::critical_chain::{Chain, Step, Wait};
use serde::Serialize;

/// A link of the chain, for people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ChainStep {
    /// `task` or `transfer`.
    pub kind: &'static str,
    /// Task, or maker of the tensor.
    pub name: String,
    /// Device, or source and destination of a transfer.
    pub place: String,
    /// Start.
    pub start_ns: u64,
    /// End.
    pub end_ns: u64,
    /// Why it did not start earlier.
    pub waited_for: String,
}

/// The chain in words.
pub(super) fn describe(s: &Subject, chain: &Chain) -> Vec<ChainStep> {
    let t = &s.solution.timeline;
    let name = |step: Step| match step {
        Step::Task(i) => s.tasks[i as usize].name.clone(),
        Step::Transfer(i) => s.maker(t.transfers[i as usize].tensor).to_owned(),
    };
    let mut before: Option<Step> = None;
    let mut out = Vec::with_capacity(chain.steps.len());
    for &(step, wait) in &chain.steps {
        let (kind, place, start, end) = match step {
            Step::Task(i) => {
                let i = i as usize;
                ("task", s.device_of(i).to_owned(), t.start[i], t.end[i])
            }
            Step::Transfer(i) => {
                let x = t.transfers[i as usize];
                let place = format!(
                    "{} -> {}",
                    s.devices[x.from as usize], s.devices[x.to as usize]
                );
                ("transfer", place, x.start, x.end)
            }
        };
        let earlier = before.map(name).unwrap_or_default();
        let waited_for = match wait {
            Wait::Nothing => "nothing".to_owned(),
            Wait::Operand => format!("operand {earlier}"),
            Wait::Transfer => format!("transfer of {earlier}"),
            Wait::Busy if kind == "task" => format!("{place}, busy with {earlier}"),
            Wait::Busy => format!("the link, busy with {earlier}"),
            Wait::Held => format!("its turn or memory, after {earlier}"),
        };
        out.push(ChainStep {
            kind,
            name: name(step),
            place,
            start_ns: start.0,
            end_ns: end.0,
            waited_for,
        });
        before = Some(step);
    }
    out
}
