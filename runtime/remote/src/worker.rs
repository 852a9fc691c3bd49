//! The worker of a task: it compiles and runs parts for masters.

use crate::contents::Document;
use crate::engine::{Made, Part};
use crate::inbox::Inbox;
use crate::keys::Peer;
use crate::masters::Masters;
use crate::messages::{
    Abort, CallableId, End, Fault, Nothing, Opening, Piece, Place, Registered, Value, VariableInfo,
};
use crate::names::task_of;
use crate::outbox::{Lost, Outbox, PartWire, Way};
use crate::pieces::Incoming;
use crate::progress::{Stage, StageNow};
use crate::server::Task;
use crate::turn::{StateUse, Turn};
use crate::{Limits, TaskName};
use gristmill_runtime::{ErrorKind, Tensor};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// The compiled parts of a task.
#[derive(Default)]
pub(crate) struct Worker {
    pub(crate) masters: Masters,
    parts: Mutex<HashMap<CallableId, Arc<Hosted>>>,
    pub(crate) outboxes: Mutex<HashMap<String, Outbox>>,
}

/// A compiled part.
pub(crate) struct Hosted {
    master: TaskName,
    part: Arc<dyn Part>,
    /// Keeps the constants in the store, for other parts.
    _document: Document,
    incoming: Vec<End>,
    /// Inputs from the master.
    feeds: Arc<Inbox>,
    /// Index among the program's outputs of each output.
    pub(crate) outputs: Vec<u32>,
    /// The last run that its master gave up.
    given_up: AtomicU64,
    /// The last begun run, and the last one with a turn.
    last_run: AtomicU64,
    last_turn: AtomicU64,
    /// True if the part assigns variables.
    assigns: bool,
    /// The run that has the turn of the part's variables.
    turn: Mutex<Option<Held>>,
    stage: StageNow,
}

/// The turn of a run.
struct Held {
    run: u64,
    turn: Turn,
}

/// Where pieces of a stream go.
enum Goal {
    /// To a transfer of a part.
    End(Weak<Hosted>, usize),
    /// To an input of a part, or an output of a program.
    Slot(Weak<Inbox>, usize),
}

impl Goal {
    /// Takes a piece, unless its program is gone. After an error its run fails, and others on the stream go on.
    fn take(&self, piece: Piece) {
        let run = piece.run;
        match self {
            Goal::End(hosted, end) => {
                let Some(hosted) = hosted.upgrade() else {
                    return;
                };
                let offset = usize::try_from(piece.offset).unwrap_or(usize::MAX);
                let taken = hosted.part.receive(*end, run, offset, &piece.data);
                if let Err(e) = taken {
                    hosted.part.abort(run, e);
                }
            }
            Goal::Slot(inbox, slot) => {
                let Some(inbox) = inbox.upgrade() else {
                    return;
                };
                let taken = inbox.receive(*slot, run, piece.offset, &piece.data);
                if let Err(fault) = taken {
                    inbox.fail(run, fault);
                }
            }
        }
    }
}

pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A field of every message of its kind.
pub(crate) fn given<T>(field: Option<T>) -> Result<T, Fault> {
    field.ok_or_else(|| Fault::invalid("a message lacks one of its fields"))
}

impl Hosted {
    /// A part with its master and text, its tensors from other tasks, and the numbers of its outputs.
    fn new(
        (master, document): (TaskName, Document),
        part: Arc<dyn Part>,
        (incoming, outputs): (Vec<End>, Vec<u32>),
    ) -> Hosted {
        Hosted {
            master,
            feeds: Arc::new(Inbox::new(part.inputs())),
            outputs,
            assigns: part.state_use() == StateUse::Assigns,
            part,
            _document: document,
            incoming,
            given_up: AtomicU64::new(0),
            last_run: AtomicU64::new(0),
            last_turn: AtomicU64::new(0),
            turn: Mutex::default(),
            stage: StageNow::default(),
        }
    }

    /// The inputs of a run, once those in pieces are here.
    pub(crate) async fn gathered(&self, run: u64, feeds: &[Value]) -> Result<Vec<Tensor>, Fault> {
        for (slot, value) in feeds.iter().enumerate() {
            if let Some(tensor) = value.tensor()? {
                self.feeds.put(slot, run, tensor);
            }
        }
        self.feeds.gather(run).await
    }

    /// Runs the part once its inputs are there, in the run's turn, had or taken now. Where the part only reads variables, its turn ends.
    pub(crate) async fn run(
        &self,
        run: u64,
        takes_turn: bool,
        feeds: impl Future<Output = Result<Vec<Tensor>, Fault>>,
    ) -> Result<Vec<Tensor>, Fault> {
        self.note(run);
        let gathered = async {
            let inputs = self.stage.enter(Stage::Inputs);
            let feeds = feeds.await?;
            drop(inputs);
            match takes_turn {
                true => self.take_turn(run).await.map(|()| feeds),
                false => Ok(feeds),
            }
        };
        let ran = match gathered.await {
            Ok(feeds) => {
                let ran = self.run_in_turn(run, feeds.clone()).await;
                feeds.into_iter().for_each(|feed| self.feeds.recycle(feed));
                ran
            }
            Err(fault) => {
                self.part.skip(run);
                Err(fault)
            }
        };
        if !self.assigns {
            self.leave_turn(run);
        }
        self.feeds.end(run);
        let follows = self.given_up.load(Ordering::Acquire) >= run;
        ran.map_err(|fault| match follows {
            true => fault.derived(),
            false => fault,
        })
    }

    /// Runs the part in the run's turn, or without one if it never had any.
    async fn run_in_turn(&self, run: u64, feeds: Vec<Tensor>) -> Result<Vec<Tensor>, Fault> {
        let had_turn = self.last_turn.load(Ordering::Acquire) == run;
        let _running = self.stage.enter(Stage::Running);
        match self.turn_of(run) {
            Some(turn) => turn.run(run, feeds).await,
            None if had_turn => {
                self.part.skip(run);
                Err(turn_is_gone())
            }
            None => self.part.clone().run(run, feeds).await,
        }
    }

    /// Ends the turn of a run, without its assignments.
    fn leave_turn(&self, run: u64) {
        locked(&self.turn).take_if(|held| held.run <= run);
    }

    /// The turn of a run.
    fn turn_of(&self, run: u64) -> Option<Turn> {
        let held = locked(&self.turn);
        let held = held.as_ref().filter(|held| held.run == run);
        held.map(|held| held.turn.clone())
    }

    /// Commits a run in its turn.
    pub(crate) async fn commit(&self, run: u64) -> Result<(), Fault> {
        let held = locked(&self.turn).take_if(|held| held.run == run);
        held.ok_or_else(turn_is_gone)?.turn.commit().await
    }

    /// Takes the turn of a run.
    pub(crate) async fn take_turn(&self, run: u64) -> Result<(), Fault> {
        self.note(run);
        let _waits = self.stage.enter(Stage::Turn);
        let turn = tokio::select! {
            held = self.part.clone().hold() => held?,
            fault = self.feeds.failure(run) => return Err(fault.derived()),
        };
        let mut held = locked(&self.turn);
        if self.given_up.load(Ordering::Acquire) >= run {
            return Err(Fault::invalid("the run was given up").derived());
        }
        self.last_turn.store(run, Ordering::Release);
        *held = Some(Held { run, turn });
        Ok(())
    }

    /// The place of its run.
    pub(crate) fn place(&self) -> Place {
        self.stage.place(&self.part.progress(), &self.feeds)
    }

    /// Notes a run, before it begins.
    pub(crate) fn note(&self, run: u64) {
        self.last_run.fetch_max(run, Ordering::AcqRel);
    }

    /// Sets the part's variables to their initial values, unless runs have them for too long.
    pub(crate) async fn initialise(&self, limits: &Limits) -> Result<(), Fault> {
        self.part.clone().initialise(limits.variables).await
    }

    /// Gives up a run.
    pub(crate) fn give_up(&self, run: u64, cause: Fault) {
        self.given_up.fetch_max(run, Ordering::AcqRel);
        self.feeds.fail(run, cause.clone());
        self.part.abort(run, cause.into());
        // Last: a run without its turn would take another one.
        self.leave_turn(run);
    }
}

fn turn_is_gone() -> Fault {
    Fault::new(ErrorKind::DeviceFailed, "the turn of a run was given up")
}

impl Worker {
    /// Adds a part. Errors if there is one of its name.
    fn add(&self, id: CallableId, part: Hosted) -> Result<(), Fault> {
        match locked(&self.parts).entry(id) {
            Entry::Occupied(_) => Err(Fault::invalid("a part is there already")),
            Entry::Vacant(free) => {
                free.insert(Arc::new(part));
                Ok(())
            }
        }
    }
}

impl Task {
    /// Compiles a part. Whoever runs it is told of its tensors that are lost on the way to other tasks.
    pub(crate) async fn compile(
        &self,
        (id, master): (CallableId, TaskName),
        document: Document,
        outputs: Vec<u32>,
        tell: Lost,
    ) -> Result<Registered, Fault> {
        let wire = Arc::new(PartWire::default());
        let made = self.engine.register(document.clone(), wire.clone()).await?;
        let Made { part, warnings } = made;
        let (state_use, holds_devices) = (part.state_use(), part.holds_devices());
        let variables = part.variables().into_iter().map(VariableInfo::of).collect();
        let outgoing: Vec<End> = part.outgoing().iter().map(End::of).collect();
        let incoming: Vec<End> = part.incoming().iter().map(End::of).collect();
        let ways = outgoing.iter().map(|end| self.way(end));
        wire.join(id, &part, ways.collect::<Result<_, Fault>>()?, tell);
        let hosted = Hosted::new((master, document), part, (incoming.clone(), outputs));
        self.worker.add(id, hosted)?;
        Ok(Registered {
            outgoing,
            incoming,
            warnings,
            has_variables: state_use >= StateUse::Reads,
            assigns: state_use == StateUse::Assigns,
            holds_devices,
            incarnation: self.incarnation,
            variables,
        })
    }

    /// Where a tensor goes, and its end there.
    fn way(&self, end: &End) -> Result<(Outbox, End), Fault> {
        let [_, destination] = end.devices()?;
        let task = task_of(&destination);
        let task =
            task.ok_or_else(|| Fault::invalid(format!("{destination} is not a device of a task")))?;
        Ok((self.outbox(&task)?, end.global(&self.name)?.local(&task)?))
    }

    /// The way to another task.
    pub(crate) fn outbox(&self, task: &TaskName) -> Result<Outbox, Fault> {
        let address = self.spec.address(task).map_err(Fault::from)?;
        let mut outboxes = locked(&self.worker.outboxes);
        let outbox = outboxes.entry(address.to_owned()).or_insert_with(|| {
            Outbox::start(Way {
                task: task.clone(),
                address: address.to_owned(),
                limits: self.limits.clone(),
                network: self.network.clone(),
            })
        });
        Ok(outbox.clone())
    }

    pub(crate) fn hosted(&self, id: CallableId) -> Result<Arc<Hosted>, Fault> {
        let found = locked(&self.worker.parts).get(&id).cloned();
        found.ok_or_else(|| self.has_no_part())
    }

    pub(crate) fn has_no_part(&self) -> Fault {
        let message = format!(
            "{} does not have this program: was it restarted?",
            self.name
        );
        Fault::new(ErrorKind::DeviceFailed, message)
    }

    /// Gives up a run.
    pub(crate) fn abort(&self, order: Abort) -> Result<(), Fault> {
        let hosted = self.hosted(given(order.callable)?)?;
        hosted.give_up(order.run, given(order.cause)?);
        Ok(())
    }

    /// Forgets a part, and gives up its run.
    pub(crate) fn release(&self, id: CallableId, cause: &Fault) {
        let released = locked(&self.worker.parts).remove(&id);
        if let Some(hosted) = released {
            hosted.give_up(hosted.last_run.load(Ordering::Acquire), cause.clone());
        }
    }

    /// Takes tensors of another task until its stream ends.
    pub(crate) async fn tensors(
        &self,
        mut pieces: Incoming<Piece>,
        peer: &Peer,
    ) -> Result<Nothing, Fault> {
        let mut goals: Vec<Goal> = Vec::new();
        while let Some(mut piece) = pieces.next().await? {
            if let Some(opening) = piece.opening.take() {
                if piece.number as usize != goals.len() {
                    return Err(Fault::invalid("tensors of a stream are not in order"));
                }
                let most = 2 * self.limits.openings;
                if goals.len() >= most {
                    let message = format!("a stream opens more than {most} tensors");
                    return Err(Fault::invalid(message));
                }
                goals.push(self.goal(opening, peer)?);
            }
            let goal = goals.get(piece.number as usize);
            let goal = goal.ok_or_else(|| Fault::invalid("a tensor was not opened"))?;
            goal.take(piece);
        }
        Ok(Nothing {})
    }

    /// The tensor another task means. Errors when it is not of the task at the other end.
    fn goal(&self, opening: Opening, peer: &Peer) -> Result<Goal, Fault> {
        let id = given(opening.callable)?;
        if let Some(output) = opening.fetch {
            let Some(installed) = self.master.program(id) else {
                return Ok(Goal::Slot(Weak::new(), 0));
            };
            peer.check_task(installed.task_of_output(output as usize)?)?;
            let inbox = Arc::downgrade(&installed.outputs);
            return Ok(Goal::Slot(inbox, output as usize));
        }
        // A released part takes no more tensors: they may have been on their way.
        let Ok(hosted) = self.hosted(id) else {
            return Ok(Goal::Slot(Weak::new(), 0));
        };
        if let Some(feed) = opening.feed {
            peer.check_task(&hosted.master)?;
            return Ok(Goal::Slot(Arc::downgrade(&hosted.feeds), feed as usize));
        }
        let end = given(opening.end)?;
        let source = task_of(&end.devices()?[0]);
        let nameless = || Fault::invalid(format!("{} is not a device of a task", end.source));
        peer.check_task(&source.ok_or_else(nameless)?)?;
        let index = hosted.incoming.iter().position(|own| *own == end);
        let index = index.ok_or_else(|| {
            let (tensor, source) = (&end.tensor, &end.source);
            Fault::invalid(format!(
                "{} expects no tensor {tensor:?} from {source}",
                self.name
            ))
        })?;
        Ok(Goal::End(Arc::downgrade(&hosted), index))
    }
}
