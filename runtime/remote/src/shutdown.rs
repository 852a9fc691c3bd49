//! The end of a server: it takes nothing new, lets runs end, and goes.
//!
//! Masters of other tasks hear of it by their streams of orders. They let go of their parts here when no run
//! needs them any more: one whose part here is done may still go on elsewhere, and fails with the loss of any
//! of its tasks.

use crate::messages::{Fault, Nothing};
use crate::rpc;
use crate::server::Task;
use gristmill_runtime::ErrorKind;
use std::time::Duration;
use tokio::sync::watch;
use tonic::body::Body;
use tonic_health::ServingStatus;

/// A server's way to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd)]
pub(crate) enum Phase {
    Serving,
    /// No new sessions, programs and runs.
    Draining,
    Stopped,
}

/// Methods of one message that begin something.
const BEGIN: [&str; 3] = [rpc::OFFER, rpc::PREPARE, rpc::INITIALISE];

/// Number of things under way.
pub(crate) struct Busy(watch::Sender<usize>);

impl Default for Busy {
    fn default() -> Busy {
        Busy(watch::channel(0).0)
    }
}

/// One of the things under way.
pub(crate) struct Underway(watch::Sender<usize>);

impl Busy {
    pub(crate) fn begin(&self) -> Underway {
        self.0.send_modify(|n| *n += 1);
        Underway(self.0.clone())
    }

    fn number(&self) -> usize {
        *self.0.borrow()
    }

    async fn until_idle(&self) {
        // The sender is here.
        let _ = self.0.subscribe().wait_for(|n| *n == 0).await;
    }
}

impl Drop for Underway {
    fn drop(&mut self) {
        self.0.send_modify(|n| *n -= 1);
    }
}

impl Task {
    /// The error of calls to a server in its last moments.
    pub(crate) fn is_stopping(&self) -> Fault {
        let message = format!("{} is shutting down", self.name);
        Fault::new(ErrorKind::DeviceFailed, message)
    }

    fn is_draining(&self) -> bool {
        *self.phase.borrow() >= Phase::Draining
    }

    /// Errors once the server takes nothing new.
    pub(crate) fn takes_more(&self) -> Result<(), Fault> {
        match self.is_draining() {
            true => Err(self.is_stopping()),
            false => Ok(()),
        }
    }

    /// Waits for the end of the server.
    pub(crate) async fn stopped(&self) {
        self.reached(Phase::Stopped).await;
    }

    /// Waits until the server takes nothing new. Its phase then.
    pub(crate) async fn draining(&self) -> Phase {
        self.reached(Phase::Draining).await
    }

    async fn reached(&self, end: Phase) -> Phase {
        let mut phase = self.phase.clone();
        let reached = phase.wait_for(|phase| *phase >= end).await;
        // The sender goes with the server, which is an end as well.
        reached.map_or(Phase::Stopped, |phase| *phase)
    }

    /// Notes a run of a client. Errors once the server takes none.
    pub(crate) fn begin_run(&self) -> Result<Underway, Fault> {
        // First noted, then asked: the server waits for those it has let begin.
        let underway = self.busy.begin();
        self.takes_more().map(|()| underway)
    }

    /// The refusal of a method that begins something, once the server takes nothing new.
    pub(crate) async fn refuse(
        &self,
        path: &str,
        request: http::Request<Body>,
    ) -> Result<http::Request<Body>, http::Response<Body>> {
        if !self.is_draining() || !BEGIN.contains(&path) {
            return Ok(request);
        }
        let fault = self.is_stopping();
        let refused = |Nothing {}| async move { Err::<Nothing, Fault>(fault) };
        Err(crate::server::unary(&self.limits, request, refused).await)
    }

    /// Takes nothing new, and waits until the runs of clients have ended, and masters have let go of their
    /// parts. Number of runs still under way after `grace`.
    pub(crate) async fn drain(&self, grace: Duration, phase: &watch::Sender<Phase>) -> usize {
        phase.send_replace(Phase::Draining);
        for service in ["", rpc::SERVICE] {
            let status = ServingStatus::NotServing;
            self.health.set_service_status(service, status).await;
        }
        let drained = async {
            self.busy.until_idle().await;
            self.held.until_idle().await;
        };
        match tokio::time::timeout(grace, drained).await {
            Ok(()) => 0,
            // Whatever is not there by then is cut off.
            Err(_) => self.busy.number() + self.held.number(),
        }
    }
}
