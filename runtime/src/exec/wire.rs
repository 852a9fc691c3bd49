//! Transfers from and to devices of other tasks.
//!
//! An end of a transfer is remote if its other device is not local. Such tensors are staged like all others, but for
//! values of variables not assigned by the program, which are lent as they are. A [`Wire`] takes the outgoing ones, and whoever reads the
//! incoming ones gives them to [`Executor::receive`]. Runs are numbered by their caller: one run of all tasks has one number.
//!
//! Order: each end carries one tensor per run, in pieces from its first byte to its last. Blocking: neither side waits for the other; a run
//! begins when the wire has given back all staging, or is aborted. Bound: one tensor per end; a piece for a later run is taken
//! if no run is under way (its tensor is received as soon as it begins), one for an earlier run is dropped. Peer gone: whoever notices
//! calls [`Executor::abort`].

use super::rendezvous::Rendezvous;
use super::wait::Event;
use super::{Executor, Transaction};
use crate::driver::HostMemory;
use crate::error::{Error, ErrorKind};
use crate::program::Key;
use crate::sync::lock;
use crate::tensor::Tensor;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Takes the tensors of an executor to other tasks.
pub trait Wire: Send + Sync {
    /// Takes a tensor, from the thread of a worker or of a driver: it returns at once, and sends later. The memory is lent until the tensor is
    /// dropped; the next run waits for it. A failure to send is told by [`Executor::abort`].
    fn send(&self, tensor: Outgoing);
}

/// An end of a transfer whose other end is in another task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteEnd {
    /// The tensor, its source and its destination.
    pub key: Key,
    /// Its size.
    pub size_bytes: usize,
}

/// A tensor on its way to another task: bytes in memory lent by the executor.
pub struct Outgoing {
    /// Index among [`Executor::outgoing`].
    pub end: usize,
    /// Number of the run.
    pub run: u64,
    bytes: Bytes,
    lent: Arc<Lent>,
}

/// The bytes of an outgoing tensor.
pub(crate) enum Bytes {
    Staged(Arc<dyn HostMemory>),
    /// The value of a variable: whoever assigns it meanwhile does so elsewhere.
    Shared(Tensor),
}

impl AsRef<[u8]> for Outgoing {
    fn as_ref(&self) -> &[u8] {
        match &self.bytes {
            // SAFETY: staging is written while a run sends to it, once per run, and the next run waits until this is dropped.
            Bytes::Staged(memory) => unsafe { super::transfer::bytes_of(&**memory) },
            Bytes::Shared(value) => value.as_bytes(),
        }
    }
}

impl fmt::Debug for Outgoing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (end, run, n) = (self.end, self.run, self.as_ref().len());
        write!(f, "tensor {end} of run {run}, {n} bytes")
    }
}

impl Drop for Outgoing {
    fn drop(&mut self) {
        if self.lent.n.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.lent.returned.notify();
        }
    }
}

/// Number of tensors in the hands of a wire.
#[derive(Default)]
struct Lent {
    n: AtomicUsize,
    returned: Event,
}

/// The remote ends of a rendezvous.
#[derive(Default)]
pub(crate) struct Remote {
    wire: Option<Arc<dyn Wire>>,
    lent: Arc<Lent>,
    /// True if other runs do not write to variables meanwhile.
    pub(crate) lends: bool,
    /// Outgoing and incoming ends, these with their slots.
    pub(crate) outgoing: Vec<RemoteEnd>,
    pub(crate) incoming: Vec<(RemoteEnd, usize)>,
}

impl Remote {
    /// Errors with `Unsupported` when there are ends, and no wire.
    pub(crate) fn new(
        wire: Option<Arc<dyn Wire>>,
        outgoing: Vec<RemoteEnd>,
        incoming: Vec<(RemoteEnd, usize)>,
    ) -> Result<Remote, Error> {
        let mut ends = outgoing.iter().chain(incoming.iter().map(|(end, _)| end));
        if let (None, Some(end)) = (&wire, ends.next()) {
            let key = &end.key;
            let message = format!(
                "tensor {:?} goes from {} to {}, a device of another task: it takes a session on a cluster",
                key.tensor, key.source, key.destination
            );
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        Ok(Remote {
            wire,
            lent: Arc::default(),
            lends: true,
            outgoing,
            incoming,
        })
    }

    /// Lends a tensor to the wire.
    pub(crate) fn send(&self, end: usize, run: u64, bytes: Bytes) {
        let Some(wire) = &self.wire else { return };
        self.lent.n.fetch_add(1, Ordering::AcqRel);
        wire.send(Outgoing {
            end,
            run,
            bytes,
            lent: self.lent.clone(),
        });
    }

    pub(crate) fn is_lent(&self) -> bool {
        self.lent.n.load(Ordering::Acquire) > 0
    }
}

/// Numbers of runs.
#[derive(Default)]
pub(crate) struct Runs {
    /// The run under way.
    current: Option<u64>,
    /// The last ended run.
    ended: u64,
    /// A run aborted before its begin.
    doomed: Option<(u64, Error)>,
    /// By end: how far its tensor has arrived.
    arriving: Vec<Arriving>,
    /// Number of pieces so far, over all runs.
    n_pieces: u64,
}

#[derive(Clone, Copy, Default)]
struct Arriving {
    run: u64,
    n_bytes: usize,
    is_whole: bool,
}

impl Arriving {
    /// With so many more bytes, from `offset` on. Errors with what is wrong about them.
    fn and(self, run: u64, offset: usize, n: usize, size: usize) -> Result<Arriving, String> {
        let so_far = match self.run < run {
            true => Arriving::default(),
            false => self,
        };
        let expected = so_far.n_bytes;
        if self.run > run || offset != expected {
            return Err(format!("byte {offset} came, byte {expected} was expected"));
        }
        let stop = offset.checked_add(n).filter(|stop| *stop <= size);
        match stop {
            Some(n_bytes) if !so_far.is_whole => Ok(Arriving {
                run,
                n_bytes,
                is_whole: n_bytes == size,
            }),
            _ => Err(format!("more than its {size} bytes came")),
        }
    }
}

impl Runs {
    /// With so many incoming tensors.
    pub(crate) fn new(n_incoming: usize) -> Runs {
        Runs {
            arriving: vec![Arriving::default(); n_incoming],
            ..Runs::default()
        }
    }
}

/// The fate of a piece of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// More bytes are to come.
    Part,
    /// The tensor is complete, and its receiver goes on.
    Whole,
    /// The run has ended, or was aborted: the bytes were dropped.
    Late,
}

impl Rendezvous {
    /// The number of the next run: the caller's, or the one after the last.
    pub(crate) fn number(&self, run: Option<u64>) -> Result<u64, Error> {
        let ended = lock(&self.runs).ended;
        match run {
            None => Ok(ended + 1),
            Some(run) if run > ended => Ok(run),
            Some(run) => Err(Error::invalid(format!(
                "run {run} cannot begin: run {ended} has ended before it"
            ))),
        }
    }

    /// Waits until the wire has given back all staging. Errors when the run is aborted before.
    pub(crate) fn wait_for_staging(&self, run: u64) -> Result<(), Error> {
        if !self.remote.is_lent() {
            return Ok(());
        }
        let doom = || {
            let runs = lock(&self.runs);
            let doomed = runs.doomed.as_ref();
            doomed.and_then(|(doomed, e)| (*doomed == run).then(|| e.clone()))
        };
        let is_over = || !self.remote.is_lent() || doom().is_some();
        let lent = &self.remote.lent;
        lent.returned.wait_until(self.patience, is_over);
        match doom() {
            Some(error) if self.remote.is_lent() => Err(error),
            _ => Ok(()),
        }
    }

    /// Notes the begin of a run, and aborts it if it is doomed.
    pub(crate) fn begin_run(&self, run: u64) {
        let mut runs = lock(&self.runs);
        runs.current = Some(run);
        if let Some((_, error)) = runs.doomed.take_if(|(doomed, _)| *doomed == run) {
            self.abort(error);
        }
    }

    /// Notes the end of a run: further pieces for it are dropped.
    pub(crate) fn end_run(&self, run: u64) {
        let mut runs = lock(&self.runs);
        runs.current.take_if(|current| *current == run);
        runs.ended = runs.ended.max(run);
        let ended = runs.ended;
        runs.doomed.take_if(|(doomed, _)| *doomed <= ended);
    }

    /// Aborts a run under way, or dooms a later one.
    fn abort_run(&self, run: u64, error: Error) {
        let mut runs = lock(&self.runs);
        if runs.current == Some(run) {
            self.abort(error);
        } else if run > runs.ended {
            // Of one run the first error counts; an older one never began.
            if runs.doomed.as_ref().is_none_or(|(doomed, _)| *doomed < run) {
                runs.doomed = Some((run, error));
            }
            drop(runs);
            self.remote.lent.returned.notify();
        }
    }

    /// Number of pieces so far, over all runs, and the tensors of the current run that are not here yet.
    pub(crate) fn arrivals_of_run(&self) -> (u64, Vec<RemoteEnd>) {
        let runs = lock(&self.runs);
        let is_here = |arriving: &Arriving| arriving.is_whole && Some(arriving.run) == runs.current;
        let incoming = self.remote.incoming.iter().zip(&runs.arriving);
        let absent = incoming.filter(|(_, arriving)| runs.current.is_some() && !is_here(arriving));
        let absent = absent.map(|((end, _), _)| end.clone());
        (runs.n_pieces, absent.collect())
    }

    /// Writes a piece of a tensor into its staging.
    fn receive_piece(
        &self,
        end: usize,
        run: u64,
        offset: usize,
        bytes: &[u8],
    ) -> Result<Received, Error> {
        let Some((remote, slot)) = self.remote.incoming.get(end) else {
            let n = self.remote.incoming.len();
            return Err(Error::invalid(format!("end {end} of {n} ends")));
        };
        let fail = |why: String| {
            let (tensor, source) = (&remote.key.tensor, &remote.key.source);
            Error::invalid(format!("tensor {tensor:?} from {source}, run {run}: {why}"))
        };
        // Held to the end: no run begins or ends between the check of its number and the last byte.
        let mut runs = lock(&self.runs);
        if run <= runs.ended || runs.current == Some(run) && self.is_aborted() {
            return Ok(Received::Late);
        }
        if let Some(current) = runs.current.filter(|current| *current != run) {
            return Err(fail(format!("it came during run {current}")));
        }
        let so_far = runs.arriving[end];
        let next = so_far.and(run, offset, bytes.len(), remote.size_bytes);
        let next = next.map_err(fail)?;
        self.write_staging(*slot, offset, bytes);
        runs.arriving[end] = next;
        runs.n_pieces += 1;
        if !next.is_whole {
            return Ok(Received::Part);
        }
        self.deliver(*slot, run);
        Ok(Received::Whole)
    }
}

impl Executor {
    /// The tensors for other tasks, in an order of its own.
    pub fn outgoing(&self) -> &[RemoteEnd] {
        &self.shared.rendezvous.remote.outgoing
    }

    /// The tensors from other tasks, in an order of its own.
    pub fn incoming(&self) -> impl ExactSizeIterator<Item = &RemoteEnd> {
        let incoming = &self.shared.rendezvous.remote.incoming;
        incoming.iter().map(|(end, _)| end)
    }

    /// True when tensors go to other tasks, or come from them.
    pub fn has_remote_ends(&self) -> bool {
        !self.outgoing().is_empty() || self.incoming().len() > 0
    }

    /// [`Executor::run_into`] as the caller's run of this number, larger than those of all runs before.
    ///
    /// Errors as the other does, and with `InvalidInput` for a smaller number. The number is used up even so.
    pub fn run_as(&self, run: u64, inputs: &[Tensor], outputs: &mut [Tensor]) -> Result<(), Error> {
        let checked = self.checked(inputs, outputs);
        let ran = checked.and_then(|operands| self.run_committed(operands, Some(run)));
        if ran.is_err() {
            self.shared.rendezvous.end_run(run);
        }
        ran
    }

    /// Uses up the number of a run without a run: pieces of its tensors are dropped.
    pub fn skip(&self, run: u64) {
        self.shared.rendezvous.end_run(run);
    }

    /// True if runs use variables, and if they assign some.
    pub fn state_use(&self) -> [bool; 2] {
        [self.has_state, self.assigns]
    }

    /// Begins a turn on the variables for [`Executor::run_in_turn`]: see [`Resources::begin_as`](super::Resources::begin_as).
    pub fn begin_turn(&self) -> Transaction<'_> {
        self.resources.begin_as(self.assigns)
    }

    /// [`Executor::run_as`] within a turn, whose commit makes the assignments visible.
    ///
    /// Errors with `Internal` as [`Executor::run_in`] as well.
    pub fn run_in_turn(
        &self,
        turn: &Transaction<'_>,
        run: u64,
        inputs: &[Tensor],
    ) -> Result<Vec<Tensor>, Error> {
        let ran = self.run_part(turn, inputs, Some(run));
        if ran.is_err() {
            self.shared.rendezvous.end_run(run);
        }
        ran
    }

    /// Takes a piece of an incoming tensor, `bytes` from `offset` on; `end` is an index among [`Executor::incoming`]. It may come before its
    /// run begins. An empty tensor is one empty piece.
    ///
    /// Errors with `InvalidInput` on an unknown end, on a gap, on too many bytes, and for a run later than the one under way. What came
    /// before stays as it is.
    pub fn receive(
        &self,
        end: usize,
        run: u64,
        offset: usize,
        bytes: &[u8],
    ) -> Result<Received, Error> {
        let rendezvous = &self.shared.rendezvous;
        rendezvous.receive_piece(end, run, offset, bytes)
    }

    /// Aborts a run, which then fails with `error`; one still to begin fails then. Of several errors the first one counts. Nothing
    /// happens to an ended run.
    pub fn abort(&self, run: u64, error: Error) {
        self.shared.rendezvous.abort_run(run, error);
    }
}
