//! Runs of programs: a master tells all tasks at once, and collects the outputs.

use crate::TaskName;
use crate::calls::Caller;
use crate::contents::Digest;
use crate::engine::{Plan, Share};
use crate::master::{Callable, Installed, State};
use crate::messages::{Abort, Fault, Place};
use crate::progress::Watch;
use crate::rpc::Failure;
use crate::server::Task;
use crate::steps::RunOf;
use gristmill_runtime::program::IoSpec;
use gristmill_runtime::{ErrorKind, Tensor};
use std::sync::Arc;
use tokio::sync::MutexGuard;
use tokio::task::{JoinError, JoinSet};
use tokio::time::Instant;

/// A run of a program on all its tasks.
#[derive(Clone)]
pub(crate) struct Run {
    number: u64,
    of: Arc<Installed>,
}

impl Run {
    fn key(&self) -> RunOf {
        (self.of.id, self.number)
    }
}

impl Task {
    /// Runs a program once. A run that nobody wants any more is given up, and commits nothing.
    pub(crate) async fn call(
        self: &Arc<Self>,
        digest: &Digest,
        feeds: Vec<Tensor>,
        caller: &Caller<'_>,
    ) -> Result<Vec<Tensor>, Fault> {
        let callable = self.callable(digest)?;
        let mut state = self.state_in_turn(&callable, caller).await?;
        let of = self.registered(&callable.document, &mut state).await?;
        let sessions = &self.master.sessions;
        sessions.check_variables(caller.session, &of)?;
        check_feeds(&of.plan, &feeds)?;
        state.run += 1;
        let number = state.run;
        let run = Run { number, of };
        // From here on it fails with the loss of any of its tasks.
        run.of.outputs.begin(number);
        let ran = self.run_in_turn(&run, feeds, caller).await;
        run.of.outputs.end(run.number);
        let (fault, is_lost) = match ran {
            Ok(fetches) => return Ok(fetches),
            Err(failed) => failed,
        };
        // Where a task does not answer, its parts may be in any state: the next run begins anew.
        if is_lost {
            self.forget_parts(&mut state);
        }
        Err(fault)
    }

    /// The state of a program, once the runs before have ended.
    async fn state_in_turn<'a>(
        &self,
        callable: &'a Callable,
        caller: &Caller<'_>,
    ) -> Result<MutexGuard<'a, State>, Fault> {
        let locked = callable.state.lock();
        tokio::pin!(locked);
        let mut idle = self.limits.stall;
        loop {
            tokio::select! {
                biased;
                state = &mut locked => return Ok(state),
                () = caller.gone() => return Err(gone()),
                () = tokio::time::sleep_until(caller.deadline) => {
                    return Err(caller.too_long("an earlier run of the same model"));
                }
                () = tokio::time::sleep(idle) => {
                    idle *= 2;
                    caller.warn("a run waits for an earlier one of the same model".to_owned());
                }
            }
        }
    }

    /// A run with the turns that it needs. Errors as [`Task::run_all`].
    async fn run_in_turn(
        self: &Arc<Self>,
        run: &Run,
        feeds: Vec<Tensor>,
        caller: &Caller<'_>,
    ) -> Result<Vec<Tensor>, (Fault, bool)> {
        let mut watch = Watch::new(self.clone(), run.clone());
        for share in run.of.turns_before() {
            let taken = self.turn_in_time(run, share, caller, &mut watch).await;
            taken.inspect_err(|(fault, _)| self.abort_all(run, fault))?;
        }
        let fetches = self.run_all(run, feeds, caller, &mut watch).await?;
        if run.of.turns.iter().any(|(_, assigns)| *assigns) {
            let done = match caller.has_gone() {
                false => self.commit(run).await,
                true => Err(gone()),
            };
            done.map_err(|fault| {
                self.abort_all(run, &fault);
                of_task(fault)
            })?;
        }
        Ok(fetches)
    }

    /// Takes the turn of a task before the deadline. Errors as [`Task::run_all`].
    async fn turn_in_time(
        self: &Arc<Self>,
        run: &Run,
        share: &Share,
        caller: &Caller<'_>,
        watch: &mut Watch,
    ) -> Result<(), (Fault, bool)> {
        let awaited = [&share.task];
        tokio::select! {
            done = self.turn(run, share, false) => done.map_err(of_task),
            fault = run.of.outputs.failure(run.number) => Err(of_task(fault)),
            fault = caller.impatience(watch, &awaited) => Err((fault, false)),
        }
    }

    /// Takes the turn of a task, or commits the run there.
    async fn turn(
        self: &Arc<Self>,
        run: &Run,
        share: &Share,
        is_commit: bool,
    ) -> Result<(), Fault> {
        let done = match share.task == self.name {
            true => self.turn_here(run, is_commit).await,
            false => run.of.link(&share.task)?.turn(run.key(), is_commit).await,
        };
        done.map_err(|fault| fault.of_task(&share.task))
    }

    async fn turn_here(&self, run: &Run, is_commit: bool) -> Result<(), Fault> {
        let hosted = self.hosted(run.of.id)?;
        match is_commit {
            true => hosted.commit(run.number).await,
            false => hosted.take_turn(run.number).await,
        }
    }

    /// Commits a run on all tasks where it assigns. Where it has only read, its turn has ended.
    async fn commit(self: &Arc<Self>, run: &Run) -> Result<(), Fault> {
        let turns = run.of.turns.iter();
        let assigning = turns.filter(|(_, assigns)| *assigns);
        let shares = assigning.map(|(share, _)| share.clone()).collect();
        let committed = self.on_each(shares, |task, share| {
            let run = run.clone();
            async move {
                let at_most = task.limits.hello;
                let done = tokio::time::timeout(at_most, task.turn(&run, &share, true)).await;
                done.unwrap_or_else(|_| Err(task.fault_of(&share.task, Failure::Silent(at_most))))
            }
        });
        committed.await.into_iter().collect()
    }

    /// The steps of a run, at once. The first failure ends all others. Errors with the first failure of its own, not one in consequence of
    /// another, and says whether a task was lost.
    async fn run_all(
        self: &Arc<Self>,
        run: &Run,
        feeds: Vec<Tensor>,
        caller: &Caller<'_>,
        watch: &mut Watch,
    ) -> Result<Vec<Tensor>, (Fault, bool)> {
        let mut running = self.begin(run, feeds);
        let mut failed = Failed::default();
        let mut last_moment = Instant::now();
        let mut awaited = run.of.names();
        loop {
            let has_failed = failed.first.is_some();
            let (fault, is_lost) = tokio::select! {
                ended = running.join_next() => match ended.map(joined) {
                    Some(Ok(task)) => {
                        awaited.retain(|name| **name != task);
                        continue;
                    }
                    Some(Err(fault)) => of_task(fault),
                    None if has_failed => break,
                    None => match fetched(run, caller).await {
                        Ok(fetches) => return Ok(fetches),
                        Err(failed) => failed,
                    },
                },
                fault = run.of.outputs.failure(run.number), if !has_failed => of_task(fault),
                fault = caller.impatience(watch, &awaited), if !has_failed => (fault, false),
                // Silent tasks are given up.
                () = tokio::time::sleep_until(last_moment), if has_failed => break,
            };
            if !has_failed {
                last_moment = Instant::now() + self.limits.abort;
                self.abort_all(run, &fault);
            }
            if failed.note(fault, is_lost) {
                // All tasks forget their parts: nobody waits for these to end.
                break;
            }
        }
        failed.is_lost |= !running.is_empty();
        Err((failed.first.unwrap_or_default(), failed.is_lost))
    }

    /// Begins the steps of a run.
    fn begin(self: &Arc<Self>, run: &Run, feeds: Vec<Tensor>) -> JoinSet<Result<TaskName, Fault>> {
        let mut running = JoinSet::new();
        for share in &run.of.plan.shares {
            let own = share.inputs.iter().map(|&i| feeds[i].clone()).collect();
            running.spawn(self.clone().run_share(run.clone(), share.clone(), own));
        }
        running
    }

    /// The place of a task in a run.
    pub(crate) async fn place_on(&self, run: &Run, name: &TaskName) -> Result<Place, Fault> {
        match *name == self.name {
            true => Ok(self.hosted(run.of.id)?.place()),
            false => run.of.link(name)?.locate(run.of.id).await,
        }
    }

    /// The share of a task in a run, here or there.
    async fn run_share(
        self: Arc<Self>,
        run: Run,
        share: Arc<Share>,
        feeds: Vec<Tensor>,
    ) -> Result<TaskName, Fault> {
        let ran = match share.task == self.name {
            true => self.run_here(&run, &share, feeds).await,
            false => self.run_there(&run, &share, feeds).await,
        };
        match ran {
            Ok(()) => Ok(share.task.clone()),
            Err(fault) if fault.is_derived => Err(fault),
            Err(fault) => Err(fault.of_task(&share.task)),
        }
    }

    async fn run_here(&self, run: &Run, share: &Share, feeds: Vec<Tensor>) -> Result<(), Fault> {
        let hosted = self.hosted(run.of.id)?;
        let takes_turn = run.of.takes_turn_with_step(share);
        let ran = hosted.run(run.number, takes_turn, async { Ok(feeds) });
        let fetches = ran.await?;
        for (&output, tensor) in share.outputs.iter().zip(fetches) {
            run.of.outputs.put(output, run.number, tensor);
        }
        Ok(())
    }

    async fn run_there(
        self: &Arc<Self>,
        run: &Run,
        share: &Share,
        feeds: Vec<Tensor>,
    ) -> Result<(), Fault> {
        let link = run.of.link(&share.task)?;
        let (id, number) = run.key();
        let of = (id, number, run.of.takes_turn_with_step(share));
        let values = link.step(self, of, feeds, &run.of.outputs).await?;
        if values.len() != share.outputs.len() {
            let (n, expected) = (values.len(), share.outputs.len());
            return Err(Fault::invalid(format!(
                "{n} outputs came, expected {expected}"
            )));
        }
        for (&output, value) in share.outputs.iter().zip(&values) {
            check_type("output", &run.of.plan.outputs[output], &value.spec()?)?;
            if let Some(tensor) = value.tensor()? {
                run.of.outputs.put(output, run.number, tensor);
            }
        }
        Ok(())
    }

    /// Tells all tasks to give up a run, and does not wait for them.
    fn abort_all(&self, run: &Run, cause: &Fault) {
        for share in &run.of.plan.shares {
            let order = Abort {
                callable: Some(run.of.id),
                run: run.number,
                cause: Some(cause.clone()),
            };
            // An absent part has no runs.
            let _ = match share.task == self.name {
                true => self.abort(order),
                false => run.of.link(&share.task).map(|link| link.abort(order)),
            };
        }
    }
}

/// Failures of a run so far.
#[derive(Default)]
struct Failed {
    /// The first one, or the first independent one.
    first: Option<Fault>,
    /// True when a task does not answer, or a device failed, of its own.
    is_lost: bool,
}

impl Failed {
    /// Notes a failure, perhaps of a lost task; true once there is one.
    fn note(&mut self, fault: Fault, is_lost: bool) -> bool {
        self.is_lost |= is_lost && !fault.is_derived;
        let was_derived = self.first.as_ref().is_none_or(|f| f.is_derived);
        if self.first.is_none() || was_derived && !fault.is_derived {
            self.first = Some(fault);
        }
        self.is_lost
    }
}

fn joined(ended: Result<Result<TaskName, Fault>, JoinError>) -> Result<TaskName, Fault> {
    ended.unwrap_or_else(|e| {
        let message = format!("a task of the server panicked: {e}");
        Err(Fault::new(ErrorKind::Internal, message))
    })
}

pub(crate) fn gone() -> Fault {
    Fault::invalid("the client has gone")
}

/// A failure of a task, and whether the task does not answer, or its device failed.
fn of_task(fault: Fault) -> (Fault, bool) {
    let is_lost = fault.category() == ErrorKind::DeviceFailed;
    (fault, is_lost)
}

/// The outputs of a run whose steps have all ended well: large ones may be on their way.
async fn fetched(run: &Run, caller: &Caller<'_>) -> Result<Vec<Tensor>, (Fault, bool)> {
    tokio::select! {
        gathered = run.of.outputs.gather(run.number) => gathered.map_err(of_task),
        () = caller.gone() => Err((gone(), false)),
        () = tokio::time::sleep_until(caller.deadline) => {
            Err((caller.too_long("outputs on their way"), false))
        }
    }
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
