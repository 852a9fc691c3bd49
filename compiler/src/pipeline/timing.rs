//! The timed passes, in order, and the state that all of them share.

use super::Config;
use crate::error::Result;
use crate::ir::Graph;
use crate::ir::verify::verify;
use crate::report::{Pass, Report};
use crate::rewrite::Deadline;
use crate::units::time_ns;
use std::time::Instant;

/// Times passes and checks their graphs.
pub(super) struct Passes<'o> {
    pub(super) config: Config<'o>,
    pub(super) deadline: Deadline,
    pub(super) report: Report,
}

impl Passes<'_> {
    pub(super) fn new(config: Config<'_>) -> Passes<'_> {
        Passes {
            config,
            deadline: Deadline::after(config.options.budget),
            report: Report::default(),
        }
    }

    /// True when the budget is over; a warning names the part that is left out.
    pub(super) fn is_late(&mut self, left_out: &str) -> bool {
        let late = self.deadline.has_passed();
        if late {
            self.warn_late(left_out);
        }
        late
    }

    pub(super) fn warn_late(&mut self, left_out: &str) {
        let budget_ns = self
            .config
            .options
            .budget
            .map_or(0, |b| b.as_nanos() as u64);
        let warning = format!("the budget of {} was over: {left_out}", time_ns(budget_ns));
        if !self.report.warnings.contains(&warning) {
            self.report.warnings.push(warning);
        }
    }

    /// Runs a pass; its time is added to that of earlier runs of the same pass.
    pub(super) fn run<T>(
        &mut self,
        pass: Pass,
        body: impl FnOnce(&mut Report) -> Result<T>,
    ) -> Result<T> {
        let started = Instant::now();
        let result = body(&mut self.report)?;
        self.report.add_time(pass, started.elapsed());
        Ok(result)
    }

    /// The graph if stages are kept; otherwise an empty one, so that its weights can be released.
    pub(super) fn keep(&self, g: Graph) -> Graph {
        if self.config.options.keep_stages {
            g
        } else {
            Graph::default()
        }
    }

    pub(super) fn check(&self, g: &Graph) -> Result<()> {
        if self.config.options.check {
            verify(g)
        } else {
            Ok(())
        }
    }
}
