//! The master of a task: it divides the programs of clients over tasks, and runs them.

use crate::TaskName;
use crate::callables::Callables;
use crate::contents::{self, Digest, Document};
use crate::engine::{Plan, Share};
use crate::messages::{
    Abort, Call, CallableId, DeviceInfo, End, Fault, Hello, Io, Nothing, Prepare, Prepared,
    Register, Registered, Release, Results, SmallTensor, Step, Welcome,
};
use crate::rpc::{self, Failure};
use crate::server::Task;
use crate::worker::{given, locked};
use gristmill_runtime::ErrorKind;
use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::task::JoinSet;
use tonic::transport::Channel;

/// The programs of a task's clients, and the ways to other tasks.
#[derive(Default)]
pub(crate) struct Master {
    callables: Mutex<Callables>,
    channels: Mutex<HashMap<TaskName, Channel>>,
}

/// A program divided over tasks.
pub(crate) struct Callable {
    pub(crate) document: Document,
    /// Held during a run.
    pub(crate) state: tokio::sync::Mutex<State>,
}

#[derive(Default)]
pub(crate) struct State {
    /// None before the program is divided, and when tasks refuse it.
    plan: Option<Arc<Plan>>,
    /// Its name in the tasks; none before it is registered, and after a task was lost.
    id: Option<CallableId>,
    run: u64,
    /// Warnings of the tasks.
    warnings: Vec<String>,
}

impl State {
    /// Takes what the tasks have of the program.
    pub(crate) fn take_parts(&mut self) -> Option<(CallableId, Vec<TaskName>)> {
        let id = self.id.take()?;
        let shares = self.plan.iter().flat_map(|plan| &plan.shares);
        Some((id, shares.map(|share| share.task.clone()).collect()))
    }
}

impl Task {
    /// Divides and compiles a program for one more client; a program of the same text is the same one.
    pub(crate) async fn prepare(self: &Arc<Self>, request: Prepare) -> Result<Prepared, Fault> {
        let contents = given(request.program)?;
        let digest = given(contents.text.as_ref())?.digest()?;
        let known = locked(&self.master.callables).hold(&digest);
        let callable = match known {
            Some(callable) => callable,
            None => {
                let document = self.store.document(&contents, &self.limits)?;
                let mut callables = locked(&self.master.callables);
                callables.add(document, &self.limits)?
            }
        };
        let prepared = self.prepared(&callable).await;
        if prepared.is_err() {
            self.let_go(&digest).await;
        }
        prepared
    }

    async fn prepared(self: &Arc<Self>, callable: &Callable) -> Result<Prepared, Fault> {
        let mut state = callable.state.lock().await;
        let (plan, _) = self.registered(&callable.document, &mut state).await?;
        Ok(Prepared {
            inputs: plan.inputs.iter().map(Io::of).collect(),
            outputs: plan.outputs.iter().map(Io::of).collect(),
            placement: plan.placement.clone(),
            warnings: [plan.warnings.clone(), state.warnings.clone()].concat(),
        })
    }

    /// Divides a program over the tasks that it names, and this one.
    async fn divided(self: &Arc<Self>, program: &Document) -> Result<Plan, Fault> {
        let mut names = vec![self.name.clone()];
        for name in self.engine.tasks(program)? {
            self.spec.address(&name).map_err(Fault::from)?;
            if !names.contains(&name) {
                names.push(name);
            }
        }
        let devices = self.devices_of(&names).await?;
        self.engine.plan(program.clone(), devices).await
    }

    /// Devices of tasks. Errors with a line for each task without an answer, or with a refusal.
    async fn devices_of(
        self: &Arc<Self>,
        names: &[TaskName],
    ) -> Result<Vec<(TaskName, Vec<DeviceInfo>)>, Fault> {
        let answers = self.on_each(names.to_vec(), |task, name| async move {
            match name == task.name {
                true => Ok(task.welcome()),
                false => task.greet(&name).await,
            }
        });
        let (mut known, mut failed) = (Vec::new(), Vec::new());
        for (name, answer) in names.iter().zip(answers.await) {
            match answer {
                Ok(welcome) => known.push((name.clone(), welcome.devices)),
                Err(fault) => failed.push(fault),
            }
        }
        match failed.as_slice() {
            [] => Ok(known),
            [only] => Err(only.clone()),
            [first, ..] => {
                let lines: Vec<String> = failed.iter().map(Fault::to_string).collect();
                let message = format!(
                    "{} tasks do not answer:\n  {}",
                    lines.len(),
                    lines.join("\n  ")
                );
                Err(Fault::new(first.category(), message))
            }
        }
    }

    /// The same work for each of several things, at once; results in their order.
    async fn on_each<Q, A, F>(
        self: &Arc<Self>,
        of: Vec<Q>,
        work: impl Fn(Arc<Task>, Q) -> F,
    ) -> Vec<Result<A, Fault>>
    where
        A: Send + 'static,
        F: Future<Output = Result<A, Fault>> + Send + 'static,
    {
        let mut running = JoinSet::new();
        let mut results: Vec<Option<Result<A, Fault>>> = Vec::new();
        for (i, thing) in of.into_iter().enumerate() {
            let work = work(self.clone(), thing);
            running.spawn(async move { (i, work.await) });
            results.push(None);
        }
        while let Some(joined) = running.join_next().await {
            if let Ok((i, result)) = joined {
                results[i] = Some(result);
            }
        }
        let panicked = || {
            Err(Fault::new(
                ErrorKind::Internal,
                "a task of the server panicked",
            ))
        };
        results
            .into_iter()
            .map(|r| r.unwrap_or_else(panicked))
            .collect()
    }

    fn channel(&self, name: &TaskName) -> Result<Channel, Fault> {
        let mut channels = locked(&self.master.channels);
        if let Some(channel) = channels.get(name) {
            return Ok(channel.clone());
        }
        let address = self.spec.address(name).map_err(Fault::from)?;
        let channel = rpc::channel(address, &self.limits)?;
        channels.insert(name.clone(), channel.clone());
        Ok(channel)
    }

    /// Asks another task.
    async fn ask<Q: prost::Message + 'static, A: prost::Message + Default>(
        &self,
        name: &TaskName,
        path: &'static str,
        question: Q,
        at_most: Duration,
    ) -> Result<A, Fault> {
        let channel = self.channel(name)?;
        let answered = rpc::call(&channel, path, question, at_most, &self.limits).await;
        answered.map_err(|failure| self.fault_of(name, failure))
    }

    /// The error where another task did not answer.
    fn fault_of(&self, name: &TaskName, failure: Failure) -> Fault {
        let address = self.spec.address(name).unwrap_or_default();
        failure.fault(&name.to_string(), address)
    }

    /// Another task's answer to a greeting: it has the same cluster and program.
    async fn greet(&self, name: &TaskName) -> Result<Welcome, Fault> {
        let hello = Hello {
            from: Some(self.name.to_string()),
            to: Some(name.to_string()),
            cluster: self.addresses(),
            ..Hello::new(self.engine.version())
        };
        let asked = self.ask(name, rpc::HELLO, hello, self.limits.hello);
        asked.await
    }

    /// Divides a program, and compiles its parts on their tasks, unless they have them.
    async fn registered(
        self: &Arc<Self>,
        program: &Document,
        state: &mut State,
    ) -> Result<(Arc<Plan>, CallableId), Fault> {
        let plan = match &state.plan {
            Some(plan) => plan.clone(),
            None => Arc::new(self.divided(program).await?),
        };
        if let Some(id) = state.id {
            return Ok((plan, id));
        }
        // Whoever refuses it may have other devices than it had.
        state.plan = None;
        let id = CallableId {
            master: self.incarnation,
            number: self.last_id.fetch_add(1, Ordering::Relaxed) + 1,
        };
        let warnings = self.register_all(&plan, id).await?;
        *state = State {
            plan: Some(plan.clone()),
            id: Some(id),
            run: 0,
            warnings,
        };
        Ok((plan, id))
    }

    /// Compiles the parts of a program on their tasks; gives the warnings. After an error no task has a part.
    async fn register_all(
        self: &Arc<Self>,
        plan: &Plan,
        id: CallableId,
    ) -> Result<Vec<String>, Fault> {
        let shares = plan.shares.clone();
        let names: Vec<TaskName> = shares.iter().map(|share| share.task.clone()).collect();
        let answers = self.on_each(shares, |task, share| task.register_on(share, id));
        let (mut ends, mut warnings) = (Vec::new(), Vec::new());
        let mut failed = None;
        for (name, answer) in names.iter().zip(answers.await) {
            match answer {
                Ok(registered) => {
                    let own = registered.warnings.iter().map(|w| format!("{name}: {w}"));
                    warnings.extend(own);
                    ends.push((name.clone(), registered));
                }
                Err(fault) => failed = failed.or(Some(fault.context(name))),
            }
        }
        let checked = failed.map_or_else(|| check_ends(&ends), Err);
        match checked {
            Ok(()) => Ok(warnings),
            Err(fault) => {
                self.forget_parts(id, names).await;
                Err(fault)
            }
        }
    }

    /// Has a part compiled, here or on another task.
    async fn register_on(
        self: Arc<Self>,
        share: Arc<Share>,
        id: CallableId,
    ) -> Result<Registered, Fault> {
        if share.task == self.name {
            return self.compile(id, share.part.clone()).await;
        }
        let channel = self.channel(&share.task)?;
        let brought = contents::bring(&channel, &share.part, &self.limits).await;
        brought.map_err(|failure| self.fault_of(&share.task, failure))?;
        let order = Register {
            callable: Some(id),
            part: Some(share.part.contents()),
        };
        let at_most = self.limits.prepare;
        self.ask(&share.task, rpc::REGISTER, order, at_most).await
    }

    /// Tells tasks to forget a program. A silent one has forgotten it, or will.
    pub(crate) async fn forget_parts(self: &Arc<Self>, id: CallableId, names: Vec<TaskName>) {
        let forgotten = self.on_each(names, |task, name| async move {
            match name == task.name {
                true => {
                    task.release(id);
                    Ok(Nothing {})
                }
                false => {
                    let order = Release { callable: Some(id) };
                    let at_most = task.limits.hello;
                    task.ask(&name, rpc::RELEASE, order, at_most).await
                }
            }
        });
        forgotten.await;
    }

    /// Notes that a client needs a program no more.
    pub(crate) async fn forget(self: &Arc<Self>, request: Call) -> Result<Nothing, Fault> {
        self.let_go(&Digest::from_bytes(&request.program)?).await;
        Ok(Nothing {})
    }

    /// Counts one client less, and forgets the programs that were idle for longest.
    async fn let_go(self: &Arc<Self>, digest: &Digest) {
        let idle = {
            let mut callables = locked(&self.master.callables);
            callables.let_go(digest);
            callables.take_idle(self.limits.idle_callables)
        };
        for callable in idle {
            let parts = callable.state.lock().await.take_parts();
            if let Some((id, names)) = parts {
                self.forget_parts(id, names).await;
            }
        }
    }

    /// Runs a program once.
    pub(crate) async fn call(self: &Arc<Self>, request: Call) -> Result<Results, Fault> {
        let digest = Digest::from_bytes(&request.program)?;
        let found = locked(&self.master.callables).get(&digest);
        let callable = found.ok_or_else(|| {
            let message = format!("{} does not have program {digest}", self.name);
            Fault::invalid(message).with_hint("compile it again: the task may have been restarted")
        })?;
        let mut state = callable.state.lock().await;
        let (plan, id) = self.registered(&callable.document, &mut state).await?;
        check_feeds(&plan, &request.feeds)?;
        state.run += 1;
        let steps = plan.shares.iter().map(|share| {
            let step = Step {
                callable: Some(id),
                run: state.run,
                feeds: share
                    .inputs
                    .iter()
                    .map(|&i| request.feeds[i].clone())
                    .collect(),
            };
            (share.clone(), step)
        });
        let ran = self.run_all(steps.collect(), id, state.run).await;
        match ran {
            Ok(results) => joined(&plan, results),
            Err((fault, is_lost)) => {
                // Where a task does not answer, its parts may be in any state: the next run begins anew.
                if is_lost && let Some((id, names)) = state.take_parts() {
                    self.forget_parts(id, names).await;
                }
                Err(fault)
            }
        }
    }

    /// The steps of a run, at once. The first failure ends all others. Errors with the first failure of its own, not one in consequence of
    /// another, and says whether a task was lost.
    async fn run_all(
        self: &Arc<Self>,
        steps: Vec<(Arc<Share>, Step)>,
        id: CallableId,
        run: u64,
    ) -> Result<Vec<(Arc<Share>, Results)>, (Fault, bool)> {
        let names: Vec<TaskName> = steps.iter().map(|(share, _)| share.task.clone()).collect();
        let mut running = JoinSet::new();
        for (share, step) in steps {
            running.spawn(self.clone().step_on(share, step));
        }
        let (mut so_far, mut patience) = (Gathered::default(), self.limits.run);
        loop {
            match tokio::time::timeout(patience, running.join_next()).await {
                Ok(None) => break,
                Ok(Some(Ok((share, ran)))) => {
                    if let Some(fault) = so_far.take(share, ran) {
                        patience = self.limits.abort;
                        self.abort_all(id, run, &names, fault);
                    }
                }
                // Silent tasks are given up.
                Ok(Some(Err(_))) | Err(_) => {
                    so_far.is_lost = true;
                    break;
                }
            }
        }
        if so_far.failed.is_none() && so_far.is_lost {
            let message = format!("a run took longer than {:?}", self.limits.run);
            let fault = Fault::new(ErrorKind::DeviceFailed, message);
            self.abort_all(id, run, &names, fault.clone());
            so_far.failed = Some(fault);
        }
        match so_far.failed {
            None => Ok(so_far.results),
            Some(fault) => Err((fault, so_far.is_lost)),
        }
    }

    /// A step, here or on another task.
    async fn step_on(
        self: Arc<Self>,
        share: Arc<Share>,
        step: Step,
    ) -> (Arc<Share>, Result<Results, Fault>) {
        let ran = match share.task == self.name {
            true => self.step(step).await,
            false => {
                let at_most = self.limits.run;
                self.ask(&share.task, rpc::STEP, step, at_most).await
            }
        };
        (share, ran)
    }

    /// Tells all tasks to give up a run, and does not wait for them.
    fn abort_all(self: &Arc<Self>, id: CallableId, run: u64, names: &[TaskName], cause: Fault) {
        let order = Abort {
            callable: Some(id),
            run,
            cause: Some(cause),
        };
        for name in names {
            let (task, name, order) = (self.clone(), name.clone(), order.clone());
            tokio::spawn(async move {
                let at_most = task.limits.abort;
                // A lost task has no such run any more.
                let _: Result<Nothing, Fault> = match name == task.name {
                    true => Task::abort(&task, order),
                    false => task.ask(&name, rpc::ABORT, order, at_most).await,
                };
            });
        }
    }
}

/// The steps of a run so far.
#[derive(Default)]
struct Gathered {
    results: Vec<(Arc<Share>, Results)>,
    failed: Option<Fault>,
    /// True when a task does not answer, or a device failed.
    is_lost: bool,
}

impl Gathered {
    /// Takes the end of a step. Gives the failure if it is the first.
    fn take(&mut self, share: Arc<Share>, ran: Result<Results, Fault>) -> Option<Fault> {
        let fault = match ran {
            Ok(result) => {
                self.results.push((share, result));
                return None;
            }
            Err(fault) if fault.is_derived => fault,
            Err(fault) => fault.context(&share.task),
        };
        self.is_lost |= fault.category() == ErrorKind::DeviceFailed;
        let is_first = self.failed.is_none();
        let was_derived = self.failed.as_ref().is_some_and(|f| f.is_derived);
        if is_first || was_derived && !fault.is_derived {
            self.failed = Some(fault.clone());
        }
        is_first.then_some(fault)
    }
}

/// The outputs of a program, out of those of its parts.
fn joined(plan: &Plan, results: Vec<(Arc<Share>, Results)>) -> Result<Results, Fault> {
    let mut fetches: Vec<Option<SmallTensor>> = vec![None; plan.outputs.len()];
    for (share, result) in results {
        for (&output, tensor) in share.outputs.iter().zip(result.fetches) {
            fetches[output] = Some(tensor);
        }
    }
    let missing = || Fault::new(ErrorKind::Internal, "no task has made an output");
    let fetches = fetches.into_iter().map(|f| f.ok_or_else(missing));
    Ok(Results {
        fetches: fetches.collect::<Result<_, Fault>>()?,
    })
}

/// Errors unless there is a tensor of the right type for each input. The tasks look at their bytes.
fn check_feeds(plan: &Plan, feeds: &[SmallTensor]) -> Result<(), Fault> {
    if feeds.len() != plan.inputs.len() {
        let (want, got) = (plan.inputs.len(), feeds.len());
        return Err(Fault::invalid(format!("expected {want} inputs, got {got}")));
    }
    for (spec, feed) in plan.inputs.iter().zip(feeds) {
        let expected = Io::of(spec);
        if (&expected.dtype, &expected.shape) != (&feed.dtype, &feed.shape) {
            let message = format!(
                "input {:?}: expected {}{:?}, got {}{:?}",
                spec.name, spec.dtype, spec.shape, feed.dtype, feed.shape
            );
            return Err(Fault::invalid(message));
        }
    }
    Ok(())
}

/// Errors unless each tensor from a task arrives in another one, with the same size.
fn check_ends(tasks: &[(TaskName, Registered)]) -> Result<(), Fault> {
    let mut sides: BTreeMap<End, [usize; 2]> = BTreeMap::new();
    for (name, registered) in tasks {
        for (side, ends) in [&registered.outgoing, &registered.incoming]
            .iter()
            .enumerate()
        {
            for end in *ends {
                sides.entry(end.global(name)?).or_default()[side] += 1;
            }
        }
    }
    match sides.iter().find(|(_, n)| **n != [1, 1]) {
        None => Ok(()),
        Some((end, [n_sent, n_received])) => {
            let message = format!(
                "tensor {:?} of {} bytes from {} to {} is sent {n_sent} times and received {n_received} times",
                end.tensor, end.size_bytes, end.source, end.destination
            );
            Err(Fault::new(ErrorKind::Internal, message))
        }
    }
}
