//! Runs of programs: a master tells all tasks at once, and collects the outputs.

use crate::contents::Digest;
use crate::engine::{Plan, Share};
use crate::inbox::Inbox;
use crate::messages::{Abort, CallableId, Fault};
use crate::server::Task;
use gristmill_runtime::program::IoSpec;
use gristmill_runtime::{ErrorKind, Tensor};
use std::sync::Arc;
use tokio::task::JoinSet;
use tokio::time::Instant;

/// A run of a program on all its tasks.
#[derive(Clone)]
pub(crate) struct Run {
    id: CallableId,
    number: u64,
    plan: Arc<Plan>,
    /// The outputs so far.
    outputs: Arc<Inbox>,
}

impl Task {
    /// Runs a program once.
    pub(crate) async fn call(
        self: &Arc<Self>,
        digest: &Digest,
        feeds: Vec<Tensor>,
    ) -> Result<Vec<Tensor>, Fault> {
        let callable = self.callable(digest)?;
        let mut state = callable.state.lock().await;
        let (plan, id, outputs) = self.registered(&callable.document, &mut state).await?;
        check_feeds(&plan, &feeds)?;
        state.run += 1;
        let run = Run {
            id,
            number: state.run,
            plan,
            outputs,
        };
        let ran = self.run_all(&run, feeds).await;
        run.outputs.end(run.number);
        let (fault, is_lost) = match ran {
            Ok(fetches) => return Ok(fetches),
            Err(failed) => failed,
        };
        // Where a task does not answer, its parts may be in any state: the next run begins anew.
        if is_lost && let Some((id, names)) = state.take_parts() {
            self.forget_parts(id, names).await;
        }
        Err(fault)
    }

    /// The steps of a run, at once. The first failure ends all others. Errors with the first failure of its own, not one in consequence of
    /// another, and says whether a task was lost.
    async fn run_all(
        self: &Arc<Self>,
        run: &Run,
        feeds: Vec<Tensor>,
    ) -> Result<Vec<Tensor>, (Fault, bool)> {
        let mut running = self.begin(run, feeds);
        let mut failed = Failed::default();
        let mut deadline = Instant::now() + self.limits.run;
        loop {
            let has_failed = failed.first.is_some();
            let fault = tokio::select! {
                ended = running.join_next() => match ended {
                    Some(Ok(Ok(()))) => continue,
                    Some(Ok(Err(fault))) => fault,
                    Some(Err(e)) => panicked(&e),
                    None if has_failed => break,
                    None => match self.fetched(run, deadline).await {
                        Ok(fetches) => return Ok(fetches),
                        Err(fault) => fault,
                    },
                },
                fault = run.outputs.failure(run.number), if !has_failed => fault,
                // Silent tasks are given up.
                () = tokio::time::sleep_until(deadline) => match has_failed {
                    true => break,
                    false => too_long(self.limits.run),
                },
            };
            if !has_failed {
                deadline = Instant::now() + self.limits.abort;
                self.abort_all(run, &fault);
            }
            failed.note(fault);
        }
        failed.is_lost |= !running.is_empty();
        Err((failed.first.unwrap_or_default(), failed.is_lost))
    }

    /// Begins the steps of a run.
    fn begin(self: &Arc<Self>, run: &Run, feeds: Vec<Tensor>) -> JoinSet<Result<(), Fault>> {
        let mut running = JoinSet::new();
        for share in &run.plan.shares {
            let own = share.inputs.iter().map(|&i| feeds[i].clone()).collect();
            running.spawn(self.clone().run_share(run.clone(), share.clone(), own));
        }
        running
    }

    /// The outputs of a run whose steps have all ended well: large ones may be on their way.
    async fn fetched(&self, run: &Run, deadline: Instant) -> Result<Vec<Tensor>, Fault> {
        let gathered = run.outputs.gather(run.number);
        let gathered = tokio::time::timeout_at(deadline, gathered).await;
        gathered.unwrap_or_else(|_| Err(too_long(self.limits.run)))
    }

    /// The share of a task in a run, here or there.
    async fn run_share(
        self: Arc<Self>,
        run: Run,
        share: Arc<Share>,
        feeds: Vec<Tensor>,
    ) -> Result<(), Fault> {
        let ran = match share.task == self.name {
            true => self.run_here(&run, &share, feeds).await,
            false => self.run_there(&run, &share, feeds).await,
        };
        ran.map_err(|fault| match fault.is_derived {
            true => fault,
            false => fault.context(&share.task),
        })
    }

    async fn run_here(&self, run: &Run, share: &Share, feeds: Vec<Tensor>) -> Result<(), Fault> {
        let hosted = self.hosted(run.id)?;
        let fetches = hosted.run(run.number, async { Ok(feeds) }).await?;
        for (&output, tensor) in share.outputs.iter().zip(fetches) {
            run.outputs.put(output, run.number, tensor);
        }
        Ok(())
    }

    async fn run_there(
        self: &Arc<Self>,
        run: &Run,
        share: &Share,
        feeds: Vec<Tensor>,
    ) -> Result<(), Fault> {
        let of = (run.id, run.number);
        let values = self.step_on(&share.task, of, feeds, &run.outputs).await?;
        if values.len() != share.outputs.len() {
            let (n, expected) = (values.len(), share.outputs.len());
            return Err(Fault::invalid(format!(
                "{n} outputs came, expected {expected}"
            )));
        }
        for (&output, value) in share.outputs.iter().zip(&values) {
            check_type("output", &run.plan.outputs[output], &value.spec()?)?;
            if let Some(tensor) = value.tensor()? {
                run.outputs.put(output, run.number, tensor);
            }
        }
        Ok(())
    }

    /// Tells all tasks to give up a run, and does not wait for them.
    fn abort_all(&self, run: &Run, cause: &Fault) {
        for share in &run.plan.shares {
            let order = Abort {
                callable: Some(run.id),
                run: run.number,
                cause: Some(cause.clone()),
            };
            match share.task == self.name {
                true => {
                    // An absent part has no runs.
                    let _ = self.abort(order);
                }
                false => self.abort_on(&share.task, order),
            }
        }
    }
}

/// Failures of a run so far.
#[derive(Default)]
struct Failed {
    /// The first one, or the first independent one.
    first: Option<Fault>,
    /// True when a task does not answer, or a device failed.
    is_lost: bool,
}

impl Failed {
    fn note(&mut self, fault: Fault) {
        self.is_lost |= fault.category() == ErrorKind::DeviceFailed;
        let was_derived = self.first.as_ref().is_none_or(|f| f.is_derived);
        if self.first.is_none() || was_derived && !fault.is_derived {
            self.first = Some(fault);
        }
    }
}

fn panicked(e: &tokio::task::JoinError) -> Fault {
    Fault::new(
        ErrorKind::Internal,
        format!("a task of the server panicked: {e}"),
    )
}

fn too_long(limit: std::time::Duration) -> Fault {
    let message = format!("a run took longer than {limit:?}");
    Fault::new(ErrorKind::DeviceFailed, message)
}

/// Errors unless there is a tensor of the right type for each input.
fn check_feeds(plan: &Plan, feeds: &[Tensor]) -> Result<(), Fault> {
    if feeds.len() != plan.inputs.len() {
        let (want, got) = (plan.inputs.len(), feeds.len());
        return Err(Fault::invalid(format!("expected {want} inputs, got {got}")));
    }
    for (spec, feed) in plan.inputs.iter().zip(feeds) {
        check_type("input", spec, &IoSpec::new("", feed.dtype(), feed.shape()))?;
    }
    Ok(())
}

fn check_type(what: &str, expected: &IoSpec, found: &IoSpec) -> Result<(), Fault> {
    if (expected.dtype, &expected.shape) == (found.dtype, &found.shape) {
        return Ok(());
    }
    Err(Fault::invalid(format!(
        "{what} {:?}: expected {}{:?}, got {}{:?}",
        expected.name, expected.dtype, expected.shape, found.dtype, found.shape
    )))
}
