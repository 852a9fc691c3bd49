//! The worker of a task: it compiles parts that masters send, and runs them.

use crate::contents::Document;
use crate::engine::{Made, Part};
use crate::messages::{
    Abort, CallableId, End, Fault, Nothing, Piece, Register, Registered, Release, Results, Step,
    small, tensors,
};
use crate::names::task_of;
use crate::outbox::{Outbox, PartWire};
use crate::server::Task;
use gristmill_runtime::ErrorKind;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use tonic::Streaming;

/// The parts that a task has compiled.
#[derive(Default)]
pub(crate) struct Worker {
    parts: Mutex<HashMap<CallableId, Arc<Hosted>>>,
    outboxes: Mutex<HashMap<String, Outbox>>,
}

struct Hosted {
    part: Arc<dyn Part>,
    /// Keeps the constants in the store, for other parts.
    _document: Document,
    incoming: Vec<End>,
    /// The last run that its master gave up.
    given_up: AtomicU64,
}

pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A field that every message of its kind has.
pub(crate) fn given<T>(field: Option<T>) -> Result<T, Fault> {
    field.ok_or_else(|| Fault::invalid("a message lacks a field that it always has"))
}

impl Task {
    /// Compiles a part for a master.
    pub(crate) async fn register(&self, order: Register) -> Result<Registered, Fault> {
        let document = self.store.document(&given(order.part)?, &self.limits)?;
        self.compile(given(order.callable)?, document).await
    }

    /// Compiles a part.
    pub(crate) async fn compile(
        &self,
        id: CallableId,
        document: Document,
    ) -> Result<Registered, Fault> {
        let wire = Arc::new(PartWire::default());
        let made = self.engine.register(document.clone(), wire.clone()).await?;
        let Made { part, warnings } = made;
        let outgoing: Vec<End> = part.outgoing().iter().map(End::of).collect();
        let incoming: Vec<End> = part.incoming().iter().map(End::of).collect();
        let ways = outgoing.iter().map(|end| self.way(end));
        wire.join(id, &part, ways.collect::<Result<_, Fault>>()?);
        let hosted = Hosted {
            part,
            _document: document,
            incoming: incoming.clone(),
            given_up: AtomicU64::new(0),
        };
        locked(&self.worker.parts).insert(id, Arc::new(hosted));
        Ok(Registered {
            outgoing,
            incoming,
            warnings,
        })
    }

    /// Where a tensor goes, and its end there.
    fn way(&self, end: &End) -> Result<(Outbox, Arc<End>), Fault> {
        let [_, destination] = end.devices()?;
        let task = task_of(&destination);
        let task =
            task.ok_or_else(|| Fault::invalid(format!("{destination} is not a device of a task")))?;
        let address = self.spec.address(&task).map_err(Fault::from)?;
        let mut outboxes = locked(&self.worker.outboxes);
        let outbox = outboxes
            .entry(address.to_owned())
            .or_insert_with(|| {
                Outbox::start(task.to_string(), address.to_owned(), self.limits.clone())
            })
            .clone();
        let there = end.global(&self.name)?.local(&task)?;
        Ok((outbox, Arc::new(there)))
    }

    fn hosted(&self, id: CallableId) -> Result<Arc<Hosted>, Fault> {
        let found = locked(&self.worker.parts).get(&id).cloned();
        found.ok_or_else(|| {
            let message = format!(
                "{} does not have this program: was it restarted?",
                self.name
            );
            Fault::new(ErrorKind::DeviceFailed, message)
        })
    }

    /// Runs a part once.
    pub(crate) async fn step(&self, order: Step) -> Result<Results, Fault> {
        let hosted = self.hosted(given(order.callable)?)?;
        let feeds = tensors(&order.feeds)?;
        let ran = hosted.part.clone().run(order.run, feeds).await;
        let follows = || hosted.given_up.load(Ordering::Acquire) == order.run;
        match ran {
            Ok(fetches) => Ok(Results {
                fetches: small(&fetches),
            }),
            Err(fault) if follows() => Err(fault.derived()),
            Err(fault) => Err(fault),
        }
    }

    /// Gives up a run.
    pub(crate) fn abort(&self, order: Abort) -> Result<Nothing, Fault> {
        let hosted = self.hosted(given(order.callable)?)?;
        hosted.given_up.store(order.run, Ordering::Release);
        hosted.part.abort(order.run, given(order.cause)?.into());
        Ok(Nothing {})
    }

    /// Forgets a part.
    pub(crate) fn release(&self, id: CallableId) {
        locked(&self.worker.parts).remove(&id);
    }

    /// Forgets a part for its master.
    pub(crate) fn released(&self, order: Release) -> Result<Nothing, Fault> {
        self.release(given(order.callable)?);
        Ok(Nothing {})
    }

    /// Takes tensors of another task until its stream ends.
    pub(crate) async fn tensors(&self, mut stream: Streaming<Piece>) -> Result<Nothing, Fault> {
        let mut ends: Vec<(Weak<Hosted>, usize)> = Vec::new();
        let broken = |e: tonic::Status| Fault::new(ErrorKind::DeviceFailed, e.message());
        while let Some(piece) = stream.message().await.map_err(broken)? {
            if let Some(opening) = piece.opening {
                if piece.number as usize != ends.len() {
                    return Err(Fault::invalid("ends of a stream are not in order"));
                }
                let (id, end) = (given(opening.callable)?, given(opening.end)?);
                ends.push(self.incoming(id, &end)?);
            }
            let end = ends.get(piece.number as usize);
            let (hosted, end) = end.ok_or_else(|| Fault::invalid("an end was not opened"))?;
            // A part that is released takes no more tensors.
            let Some(hosted) = hosted.upgrade() else {
                continue;
            };
            let offset = usize::try_from(piece.offset).unwrap_or(usize::MAX);
            let taken = hosted.part.receive(*end, piece.run, offset, &piece.data);
            if let Err(e) = taken {
                hosted.part.abort(piece.run, e.clone());
                return Err(e.into());
            }
        }
        Ok(Nothing {})
    }

    /// The end of a part that another task means.
    fn incoming(&self, id: CallableId, end: &End) -> Result<(Weak<Hosted>, usize), Fault> {
        let hosted = self.hosted(id)?;
        let index = hosted.incoming.iter().position(|own| own == end);
        let index = index.ok_or_else(|| {
            let (tensor, source) = (&end.tensor, &end.source);
            Fault::invalid(format!(
                "{} expects no tensor {tensor:?} from {source}",
                self.name
            ))
        })?;
        Ok((Arc::downgrade(&hosted), index))
    }
}
