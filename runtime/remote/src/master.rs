//! The master of a task: it divides the programs of clients over tasks, and runs them.

use crate::TaskName;
use crate::callables::Callables;
use crate::contents::{self, Digest, Document};
use crate::engine::{Plan, Share, in_thread};
use crate::inbox::Inbox;
use crate::links::Link;
use crate::messages::{
    Call, CallableId, DeviceInfo, End, Fault, Io, Nothing, Prepare, Prepared, Register, Registered,
    VariableInfo, Welcome,
};
use crate::rpc::{self, Failure};
use crate::server::Task;
use crate::sessions::Sessions;
use crate::worker::{given, locked};
use gristmill_runtime::ErrorKind;
use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;
use tokio::task::JoinSet;
use tonic::transport::Channel;

/// The programs of a task's clients, and the ways to other tasks.
#[derive(Default)]
pub(crate) struct Master {
    callables: Mutex<Callables>,
    channels: Mutex<HashMap<TaskName, Channel>>,
    pub(crate) links: Mutex<HashMap<TaskName, Link>>,
    pub(crate) sessions: Sessions,
    /// Registered programs.
    installed: Mutex<HashMap<CallableId, Weak<Installed>>>,
}

impl Master {
    /// A program, unless it is gone.
    pub(crate) fn program(&self, id: CallableId) -> Option<Arc<Installed>> {
        locked(&self.installed).get(&id).and_then(Weak::upgrade)
    }

    /// Lets the runs of all programs fail that have a part on a lost task. It may have done its part of a run: a tensor of it may be lost on
    /// the way.
    pub(crate) fn fail_runs(&self, lost: &TaskName, fault: &Fault) {
        let installed: Vec<_> = locked(&self.installed).values().cloned().collect();
        for installed in installed.iter().filter_map(Weak::upgrade) {
            if installed.has_part_on(lost) {
                installed.outputs.fail_now(fault.clone());
            }
        }
    }
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
    /// None before the program is registered, and after a task was lost.
    installed: Option<Arc<Installed>>,
    /// Number of runs under its name.
    pub(crate) run: u64,
    /// True once the task has forgotten the program.
    is_forgotten: bool,
}

/// A program on its tasks.
pub(crate) struct Installed {
    pub(crate) plan: Arc<Plan>,
    /// Its name in the tasks.
    pub(crate) id: CallableId,
    /// Outputs of the run under way.
    pub(crate) outputs: Arc<Inbox>,
    /// The shares whose turns a run takes, in order; true if it assigns variables there.
    pub(crate) turns: Vec<(Arc<Share>, bool)>,
    /// True if there is one turn, taken with the step of its share: no step holds anything else which other
    /// runs wait for, so there is no circle.
    turn_with_step: bool,
    pub(crate) tasks: Vec<OnTask>,
    /// Warnings of the tasks.
    warnings: Vec<String>,
}

/// A program's part on a task.
pub(crate) struct OnTask {
    pub(crate) name: TaskName,
    /// The start of the task when it got the part.
    pub(crate) incarnation: u64,
    /// Its variables, by container and name.
    pub(crate) variables: Vec<(String, String)>,
    /// The stream of orders to it; none within a task.
    link: Option<Link>,
}

/// A task, what it says of its part, and the link to it; none to this task.
type OnceRegistered = (TaskName, Registered, Option<Link>);

impl Installed {
    /// The shares whose turns a run takes before its steps.
    pub(crate) fn turns_before(&self) -> impl Iterator<Item = &Arc<Share>> {
        let before = self.turns.iter().filter(|_| !self.turn_with_step);
        before.map(|(share, _)| share)
    }

    /// True if the step of a share takes the turn of its run.
    pub(crate) fn takes_turn_with_step(&self, share: &Share) -> bool {
        let is_it = |(own, _): &(Arc<Share>, bool)| own.task == share.task;
        self.turn_with_step && self.turns.iter().any(is_it)
    }

    /// Its tasks.
    pub(crate) fn names(&self) -> Vec<&TaskName> {
        self.tasks.iter().map(|task| &task.name).collect()
    }

    /// The task of an output. Errors without one.
    pub(crate) fn task_of_output(&self, output: usize) -> Result<&TaskName, Fault> {
        let shares = &self.plan.shares;
        let share = shares.iter().find(|share| share.outputs.contains(&output));
        let share =
            share.ok_or_else(|| Fault::invalid(format!("the program has no output {output}")))?;
        Ok(&share.task)
    }

    /// The stream of orders to another task.
    pub(crate) fn link(&self, name: &TaskName) -> Result<&Link, Fault> {
        let found = self.tasks.iter().find(|task| task.name == *name);
        let link = found.and_then(|task| task.link.as_ref());
        link.ok_or_else(|| {
            let message = format!("{name} has no part of the program");
            Fault::new(ErrorKind::Internal, message)
        })
    }

    /// True if a task may have forgotten its part, or wants to.
    fn is_broken(&self) -> bool {
        let mut links = self.tasks.iter().filter_map(|task| task.link.as_ref());
        links.any(|link| link.has_ended() || link.is_leaving())
    }

    fn has_part_on(&self, name: &TaskName) -> bool {
        self.tasks.iter().any(|task| task.name == *name)
    }
}

impl Task {
    /// Divides and compiles a program for one more client; a program of the same text is the same one.
    pub(crate) async fn prepare(self: &Arc<Self>, request: Prepare) -> Result<Prepared, Fault> {
        let (session, sessions) = (request.session, &self.master.sessions);
        sessions.check(session)?;
        let digest = {
            let program = given(request.program.as_ref())?;
            given(program.text.as_ref())?.digest()?
        };
        let prepared = self.prepare_held(request).await?;
        // A client that waits no more has it until the session ends, which may be now.
        match sessions.hold(session, digest) {
            Ok(()) => Ok(prepared),
            Err(fault) => {
                self.let_go(&digest).await;
                Err(fault)
            }
        }
    }

    async fn prepare_held(self: &Arc<Self>, request: Prepare) -> Result<Prepared, Fault> {
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
        let mut prepared = self.prepared(&callable).await;
        if matches!(&prepared, Err(fault) if fault.category() == ErrorKind::OutOfMemory) {
            self.clone().evict_idle(0).await;
            prepared = self.prepared(&callable).await;
        }
        if prepared.is_err() {
            self.let_go(&digest).await;
        }
        prepared
    }

    async fn prepared(self: &Arc<Self>, callable: &Callable) -> Result<Prepared, Fault> {
        let mut state = callable.state.lock().await;
        let installed = self.registered(&callable.document, &mut state).await?;
        let plan = &installed.plan;
        Ok(Prepared {
            inputs: plan.inputs.iter().map(Io::of).collect(),
            outputs: plan.outputs.iter().map(Io::of).collect(),
            placement: plan.placement.clone(),
            warnings: [plan.warnings.clone(), installed.warnings.clone()].concat(),
        })
    }

    /// Divides a program over the tasks it names, and this one.
    async fn divided(self: &Arc<Self>, program: &Document) -> Result<Plan, Fault> {
        let mut names = vec![self.name.clone()];
        let (engine, own) = (self.engine.clone(), program.clone());
        for name in in_thread(move || engine.tasks(&own)).await? {
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
    pub(crate) async fn on_each<Q, A, F>(
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

    pub(crate) fn channel(&self, name: &TaskName) -> Result<Channel, Fault> {
        let mut channels = locked(&self.master.channels);
        if let Some(channel) = channels.get(name) {
            return Ok(channel.clone());
        }
        let address = self.spec.address(name).map_err(Fault::from)?;
        let channel = self.network.channel(address, Some(name), &self.limits)?;
        channels.insert(name.clone(), channel.clone());
        Ok(channel)
    }

    /// Asks another task.
    pub(crate) async fn ask<Q: prost::Message + 'static, A: prost::Message + Default>(
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
    pub(crate) fn fault_of(&self, name: &TaskName, failure: Failure) -> Fault {
        let address = self.spec.address(name).unwrap_or_default();
        failure.fault(&name.to_string(), address)
    }

    /// Another task's answer to a greeting: it has the same cluster and program.
    pub(crate) async fn greet(&self, name: &TaskName) -> Result<Welcome, Fault> {
        let asked = self.ask(name, rpc::HELLO, self.hello(name), self.limits.hello);
        asked.await.map_err(|fault| self.network.explain(fault))
    }

    /// Divides a program, and compiles its parts on their tasks, unless they have them.
    pub(crate) async fn registered(
        self: &Arc<Self>,
        program: &Document,
        state: &mut State,
    ) -> Result<Arc<Installed>, Fault> {
        if state.is_forgotten {
            return Err(self.absent(&program.digest()));
        }
        match &state.installed {
            Some(installed) if !installed.is_broken() => return Ok(installed.clone()),
            Some(_) => self.forget_parts(state),
            None => {}
        }
        let plan = match &state.plan {
            Some(plan) => plan.clone(),
            None => Arc::new(self.divided(program).await?),
        };
        // Whoever refuses it may have other devices than it had.
        state.plan = None;
        let id = CallableId {
            master: self.incarnation,
            number: self.last_id.fetch_add(1, Ordering::Relaxed) + 1,
        };
        let tasks = self.register_all(&plan, id).await?;
        let installed = Arc::new(Task::installed(&plan, id, &tasks));
        let known = Arc::downgrade(&installed);
        locked(&self.master.installed).insert(id, known);
        *state = State {
            plan: Some(plan),
            installed: Some(installed.clone()),
            ..State::default()
        };
        Ok(installed)
    }

    /// Has all tasks forget a program. A lost one forgets it by itself.
    pub(crate) fn forget_parts(&self, state: &mut State) {
        let Some(installed) = state.installed.take() else {
            return;
        };
        locked(&self.master.installed).remove(&installed.id);
        for task in &installed.tasks {
            self.forget_part(installed.id, task.link.as_ref());
        }
    }

    /// Lets a task go: each program with a part there forgets its parts once its run has ended.
    pub(crate) fn let_leave(self: &Arc<Self>, name: &TaskName) {
        for callable in locked(&self.master.callables).all() {
            let (task, name) = (self.clone(), name.clone());
            tokio::spawn(async move {
                let mut state = callable.state.lock().await;
                let installed = state.installed.as_ref();
                if installed.is_some_and(|installed| installed.has_part_on(&name)) {
                    task.forget_parts(&mut state);
                }
            });
        }
    }

    /// Has a task forget a part; without a link it is this one.
    fn forget_part(&self, id: CallableId, link: Option<&Link>) {
        let message = "the master has released the program";
        match link {
            Some(link) => link.release(id),
            None => self.release(id, &Fault::new(ErrorKind::DeviceFailed, message)),
        }
    }

    /// A program whose tasks have compiled their parts.
    fn installed(plan: &Arc<Plan>, id: CallableId, tasks: &[OnceRegistered]) -> Installed {
        let own = tasks.iter().flat_map(|(name, registered, _)| {
            let own = registered.warnings.iter();
            own.map(move |warning| format!("{name}: {warning}"))
        });
        let on_task = |(name, registered, link): &OnceRegistered| OnTask {
            name: name.clone(),
            incarnation: registered.incarnation,
            variables: registered.variables.iter().map(VariableInfo::key).collect(),
            link: link.clone(),
        };
        let turns = turns(plan, tasks);
        let holds = tasks.iter().any(|(_, part, _)| part.holds_devices);
        Installed {
            id,
            outputs: Arc::new(Inbox::new(plan.outputs.clone())),
            turn_with_step: turns.len() == 1 && !holds,
            turns,
            tasks: tasks.iter().map(on_task).collect(),
            warnings: own.collect(),
            plan: plan.clone(),
        }
    }

    /// Compiles the parts of a program on their tasks; gives what these say, in the order of the shares. After an error no task has a part.
    async fn register_all(
        self: &Arc<Self>,
        plan: &Plan,
        id: CallableId,
    ) -> Result<Vec<OnceRegistered>, Fault> {
        let link = |share: &Arc<Share>| match share.task == self.name {
            true => Ok(None),
            false => self.link(&share.task).map(Some),
        };
        let links: Result<Vec<Option<Link>>, Fault> = plan.shares.iter().map(link).collect();
        let links = links?;
        let parts = plan.shares.iter().cloned().zip(links.clone()).collect();
        let answers = self.on_each(parts, |task, (share, link)| {
            task.register_on(share, link, id)
        });
        let (mut tasks, mut failed) = (Vec::new(), None);
        let shares = plan.shares.iter().zip(&links);
        for ((share, link), answer) in shares.zip(answers.await) {
            match answer {
                Ok(registered) => tasks.push((share.task.clone(), registered, link.clone())),
                Err(fault) => failed = failed.or(Some(fault.of_task(&share.task))),
            }
        }
        let checked = failed.map_or_else(|| check_ends(&tasks), Err);
        if checked.is_err() {
            let links = links.iter();
            links.for_each(|link| self.forget_part(id, link.as_ref()));
        }
        checked.map(|()| tasks)
    }

    /// Has a part compiled, here or at the other end of a link.
    async fn register_on(
        self: Arc<Self>,
        share: Arc<Share>,
        link: Option<Link>,
        id: CallableId,
    ) -> Result<Registered, Fault> {
        let outputs = share.outputs.iter().map(|&i| i as u32).collect();
        let Some(link) = link else {
            let master = Arc::downgrade(&self);
            let tell = move |run: u64, fault: &Fault| {
                let task = master.upgrade();
                let inbox = task.and_then(|task| task.master.program(id));
                let inbox = inbox.map(|installed| installed.outputs.clone());
                inbox.iter().for_each(|i| i.fail(run, fault.clone()));
            };
            let part = share.part.clone();
            let of = (id, self.name.clone());
            return self.compile(of, part, outputs, Arc::new(tell)).await;
        };
        let channel = self.channel(&share.task)?;
        let brought = contents::bring(&channel, &share.part, &self.limits).await;
        brought.map_err(|failure| self.fault_of(&share.task, failure))?;
        let order = Register {
            callable: Some(id),
            part: Some(share.part.contents()),
            outputs,
        };
        link.register(&self, order).await
    }

    /// A program of a client.
    pub(crate) fn callable(&self, digest: &Digest) -> Result<Arc<Callable>, Fault> {
        let found = locked(&self.master.callables).get(digest);
        found.ok_or_else(|| self.absent(digest))
    }

    fn absent(&self, digest: &Digest) -> Fault {
        let message = format!("{} does not have program {digest}", self.name);
        Fault::invalid(message).with_hint("compile it again")
    }

    /// Notes that a client needs a program no more.
    pub(crate) async fn forget(self: &Arc<Self>, request: Call) -> Result<Nothing, Fault> {
        let digest = Digest::from_bytes(&request.program)?;
        if self.master.sessions.let_go(request.session, &digest) {
            self.let_go(&digest).await;
        }
        Ok(Nothing {})
    }

    /// Counts one client less, and forgets the programs that were idle for longest.
    pub(crate) async fn let_go(self: &Arc<Self>, digest: &Digest) {
        locked(&self.master.callables).let_go(digest);
        let idle = self.take_idle(self.limits.idle_callables);
        // A run of such a program may go on for long: nobody waits for it.
        tokio::spawn(self.clone().evict(idle));
    }

    /// Takes out programs without a client but the `most` that were used last.
    fn take_idle(&self, most: usize) -> Vec<Arc<Callable>> {
        locked(&self.master.callables).take_idle(most)
    }

    /// Forgets programs without a client but the `most` that were used last.
    pub(crate) async fn evict_idle(self: Arc<Self>, most: usize) {
        let idle = self.take_idle(most);
        self.evict(idle).await;
    }

    async fn evict(self: Arc<Self>, idle: Vec<Arc<Callable>>) {
        for callable in idle {
            let mut state = callable.state.lock().await;
            state.is_forgotten = true;
            self.forget_parts(&mut state);
        }
    }
}

/// The shares whose turns a run takes before it begins, in the order of their tasks' names, which is the same for all masters: then runs never
/// wait for each other in a circle. A part that is alone takes its turn itself.
fn turns(plan: &Plan, tasks: &[OnceRegistered]) -> Vec<(Arc<Share>, bool)> {
    let all = plan.shares.iter().zip(tasks);
    let with = all.filter(|(_, (_, registered, _))| registered.has_variables);
    let with = with.map(|(share, (_, registered, _))| (share.clone(), registered.assigns));
    let mut with: Vec<(Arc<Share>, bool)> = with.collect();
    if plan.shares.len() < 2 {
        return Vec::new();
    }
    with.sort_by(|(a, _), (b, _)| a.task.cmp(&b.task));
    with
}

/// Errors unless each tensor from a task arrives in another one, with the same size.
fn check_ends(tasks: &[OnceRegistered]) -> Result<(), Fault> {
    let mut sides: BTreeMap<End, [usize; 2]> = BTreeMap::new();
    for (name, registered, _) in tasks {
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
