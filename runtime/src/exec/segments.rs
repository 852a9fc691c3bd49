//! A device's partition that sends or receives on its way, asked for in program order and in pieces: runs of steps that only compute are captured once,
//! and replayed from then on.
//!
//! Copies from and to other partitions stay outside: the host may have to wait for a tensor before it enqueues one, they are ordered by events that
//! others wait for too, and so they go on beside the kernels that follow.

use super::frame::{Frame, PreparedStep};
use super::step::{Context, Stop};
use crate::driver::{Driver, Replay};
use crate::error::Error;
use std::ops::Range;

/// Launches from which one request for all of them is less than as many requests.
const LEAST_LAUNCHES: usize = 3;

/// The pieces of a partition.
pub(crate) struct Segments {
    pieces: Vec<Piece>,
}

struct Piece {
    steps: Range<usize>,
    state: State,
}

enum State {
    /// Asked for step by step.
    Steps,
    /// To be captured when it is next asked for.
    New,
    Captured(Box<dyn Replay>),
}

impl Segments {
    /// Of a partition whose steps may run in program order. `None` when there is nothing to capture.
    pub(crate) fn of(frame: &Frame) -> Option<Segments> {
        let computes = |i: usize| {
            matches!(
                frame.steps[i],
                PreparedStep::Launch(_) | PreparedStep::Copy { .. }
            )
        };
        let (mut pieces, mut i) = (Vec::new(), 0);
        while i < frame.steps.len() {
            let end = (i..frame.steps.len())
                .find(|&j| !computes(j))
                .unwrap_or(frame.steps.len());
            let is_long = end - i >= LEAST_LAUNCHES;
            let (steps, state) = if is_long {
                (i..end, State::New)
            } else {
                (i..end.max(i + 1), State::Steps)
            };
            i = steps.end;
            pieces.push(Piece { steps, state });
        }
        pieces
            .iter()
            .any(|p| matches!(p.state, State::New))
            .then_some(Segments { pieces })
    }

    /// Number of pieces that are replayed.
    pub(crate) fn n_captured(&self) -> usize {
        self.pieces
            .iter()
            .filter(|p| matches!(p.state, State::Captured(_)))
            .count()
    }

    /// Asks for all steps in program order.
    pub(crate) fn run(
        &mut self,
        worker: usize,
        frame: &mut Frame,
        driver: &dyn Driver,
        context: &mut Context<'_>,
    ) -> Result<(), Stop> {
        frame.statuses.clear(&frame.addresses.memory)?;
        for piece in &mut self.pieces {
            match piece.state {
                State::Steps => piece
                    .steps
                    .clone()
                    .try_for_each(|i| run_step(worker, frame, i, driver, context))?,
                _ => piece.replay(frame, driver, context)?,
            }
        }
        Ok(())
    }
}

impl Piece {
    fn replay(
        &mut self,
        frame: &mut Frame,
        driver: &dyn Driver,
        context: &mut Context<'_>,
    ) -> Result<(), Stop> {
        if context.rendezvous.is_aborted() {
            return Err(Stop::Aborted);
        }
        let device = context.device;
        let on_device = |e: Error| e.context(format!("on {device}"));
        // Events from outside cannot be waited for inside.
        self.steps
            .clone()
            .try_for_each(|i| frame.wait_for_copies(i))
            .map_err(on_device)?;
        if let State::New = self.state {
            let steps = self.steps.clone();
            let mut ask = || {
                steps
                    .clone()
                    .try_for_each(|i| frame.start_step(i, context).map_err(Stop::into_error))
            };
            self.state = driver
                .capture(false, &mut ask)
                .map_err(on_device)?
                .map_or(State::Steps, State::Captured);
        }
        match &self.state {
            State::Captured(replay) => Ok(replay.start().map_err(on_device)?),
            _ => self
                .steps
                .clone()
                .try_for_each(|i| frame.run_step(i, context)),
        }
    }
}

/// Runs a step; a tensor that it receives is waited for.
fn run_step(
    worker: usize,
    frame: &mut Frame,
    i: usize,
    driver: &dyn Driver,
    context: &mut Context<'_>,
) -> Result<(), Stop> {
    let (rendezvous, device) = (context.rendezvous, context.device);
    let on_device = |e: Error| e.context(format!("on {device}"));
    if let PreparedStep::RecvOnDevice { slot, .. } = frame.steps[i] {
        loop {
            // Read before looking, so that no arrival is missed.
            let seen = rendezvous.arrivals(worker);
            if rendezvous.has_arrived(slot, context.epoch) {
                break;
            }
            if rendezvous.is_aborted() {
                return Err(Stop::Aborted);
            }
            rendezvous
                .wait_for_arrival(worker, seen, Some(driver))
                .map_err(on_device)?;
        }
    }
    frame.run_step(i, context)
}
