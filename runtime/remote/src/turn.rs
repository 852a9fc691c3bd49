//! Turns on the variables of a part, held between the messages of a master.
//!
//! A run over several tasks takes the turns of all tasks with variables first, in the order of the tasks' names, and commits when all parts are
//! done. So two runs never wait for each other, and a run changes nothing unless all of it ends well.

use crate::engine::Job;
use crate::messages::Fault;
use gristmill_runtime::exec::Executor;
use gristmill_runtime::{ErrorKind, Tensor};
use std::sync::Arc;
use tokio::sync::{mpsc, oneshot};

/// Use of variables by a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StateUse {
    /// Not at all.
    None,
    /// It reads some.
    Reads,
    /// It assigns some.
    Assigns,
}

/// A turn, in the hands of a thread of its own. Dropping it takes back all assignments of its run.
#[derive(Clone)]
pub struct Turn(mpsc::UnboundedSender<Wish>);

/// A wish of whoever has a turn.
pub(crate) enum Wish {
    Run(
        u64,
        Vec<Tensor>,
        oneshot::Sender<Result<Vec<Tensor>, Fault>>,
    ),
    Commit(oneshot::Sender<()>),
}

impl Turn {
    /// A turn, and the wishes of whoever has it.
    pub(crate) fn new() -> (Turn, mpsc::UnboundedReceiver<Wish>) {
        let (sender, wishes) = mpsc::unbounded_channel();
        (Turn(sender), wishes)
    }

    /// Takes a turn on the variables of an executor's program, once the runs before it have ended.
    pub fn of(executor: Arc<Executor>) -> Job<Turn> {
        let (begun, held) = oneshot::channel();
        tokio::task::spawn_blocking(move || {
            let transaction = executor.begin_turn();
            let (turn, mut wishes) = Turn::new();
            if begun.send(turn).is_err() {
                return;
            }
            while let Some(wish) = wishes.blocking_recv() {
                match wish {
                    Wish::Run(run, feeds, done) => {
                        let ran = executor.run_in_turn(&transaction, run, &feeds);
                        // Whoever waited may have given up.
                        let _ = done.send(ran.map_err(Fault::from));
                    }
                    Wish::Commit(done) => {
                        transaction.commit();
                        let _ = done.send(());
                        return;
                    }
                }
            }
        });
        Box::pin(async move { held.await.map_err(|_| gone()) })
    }

    /// Runs the part within the turn.
    pub(crate) async fn run(&self, run: u64, feeds: Vec<Tensor>) -> Result<Vec<Tensor>, Fault> {
        let (done, ran) = oneshot::channel();
        let sent = self.0.send(Wish::Run(run, feeds, done));
        sent.map_err(|_| gone())?;
        ran.await.map_err(|_| gone())?
    }

    /// Makes the assignments visible, and ends the turn.
    pub(crate) async fn commit(self) -> Result<(), Fault> {
        let (done, committed) = oneshot::channel();
        let sent = self.0.send(Wish::Commit(done));
        sent.map_err(|_| gone())?;
        committed.await.map_err(|_| gone())
    }
}

fn gone() -> Fault {
    Fault::new(ErrorKind::Internal, "the thread of a turn has ended")
}
