//! Tensors of a run as they arrive: inputs of a part, outputs of a program.
//!
//! Order: the pieces of a tensor follow each other; those of different tensors may mix. Blocking: only [`Inbox::gather`] waits. Bound: one
//! tensor for each slot. A piece for a run before the last one is dropped, one for a later run begins it. Peer gone: whoever notices calls
//! [`Inbox::fail`].

use crate::messages::Fault;
use crate::worker::locked;
use gristmill_runtime::program::IoSpec;
use gristmill_runtime::tensor::Spares;
use gristmill_runtime::{DType, Tensor};
use std::sync::Mutex;
use tokio::sync::Notify;

/// A slot for each tensor of a run.
pub(crate) struct Inbox {
    specs: Vec<IoSpec>,
    state: Mutex<State>,
    changed: Notify,
    spares: Spares,
}

struct State {
    run: u64,
    /// The last ended run.
    ended: u64,
    slots: Vec<Option<Filling>>,
    failed: Option<Fault>,
}

struct Filling {
    tensor: Tensor,
    n_bytes: usize,
}

impl Filling {
    fn is_whole(&self) -> bool {
        self.n_bytes == self.tensor.size_bytes()
    }
}

impl Inbox {
    pub(crate) fn new(specs: Vec<IoSpec>) -> Inbox {
        let state = State {
            run: 0,
            ended: 0,
            slots: specs.iter().map(|_| None).collect(),
            failed: None,
        };
        Inbox {
            spares: Spares::of(specs.len()),
            specs,
            state: Mutex::new(state),
            changed: Notify::new(),
        }
    }

    pub(crate) fn specs(&self) -> &[IoSpec] {
        &self.specs
    }

    /// Does something for a run, which then is the one under way. Nothing for a run that has ended, or failed.
    fn during<T>(&self, run: u64, act: impl FnOnce(&mut State) -> T) -> Option<T> {
        let state = &mut *locked(&self.state);
        if run <= state.ended || run < state.run {
            return None;
        }
        if run > state.run {
            state.run = run;
            state.failed = None;
            state.slots.fill_with(|| None);
        }
        state.failed.is_none().then(|| act(state))
    }

    /// Takes a piece of a tensor. Errors with `InvalidInput` on a gap, and on too many bytes.
    pub(crate) fn receive(
        &self,
        slot: usize,
        run: u64,
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), Fault> {
        let Some(spec) = self.specs.get(slot) else {
            let n = self.specs.len();
            return Err(Fault::invalid(format!("tensor {slot} of {n}")));
        };
        let taken = self.during(run, |state| {
            let slot = &mut state.slots[slot];
            let filling = match slot {
                Some(filling) => filling,
                None => slot.insert(Filling {
                    tensor: self.spares.tensor(spec.dtype, &spec.shape)?,
                    n_bytes: 0,
                }),
            };
            filling.take(offset, bytes)
        });
        match taken {
            None | Some(Ok(false)) => Ok(()),
            Some(Ok(true)) => {
                self.changed.notify_waiters();
                Ok(())
            }
            Some(Err(fault)) => Err(fault.context(format!("tensor {:?}", spec.name))),
        }
    }

    /// Takes a whole tensor.
    pub(crate) fn put(&self, slot: usize, run: u64, tensor: Tensor) {
        let n_bytes = tensor.size_bytes();
        self.during(run, |state| {
            if let Some(slot) = state.slots.get_mut(slot) {
                *slot = Some(Filling { tensor, n_bytes });
            }
        });
        self.changed.notify_waiters();
    }

    /// Lets a run fail, unless it has failed before.
    pub(crate) fn fail(&self, run: u64, fault: Fault) {
        self.during(run, |state| state.failed = Some(fault));
        self.changed.notify_waiters();
    }

    /// Begins a run, which then is the one under way.
    pub(crate) fn begin(&self, run: u64) {
        self.during(run, |_| ());
    }

    /// Lets the run under way fail, if there is one.
    pub(crate) fn fail_now(&self, fault: Fault) {
        let run = locked(&self.state).run;
        self.fail(run, fault);
    }

    /// Bytes of the run under way.
    pub(crate) fn n_bytes(&self) -> u64 {
        let slots = &locked(&self.state).slots;
        slots.iter().flatten().map(|f| f.n_bytes as u64).sum()
    }

    /// Waits until `found` finds something.
    async fn wait<T>(&self, found: impl Fn(&mut State) -> Option<T>) -> T {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            // From here on no change is missed.
            changed.as_mut().enable();
            if let Some(found) = found(&mut locked(&self.state)) {
                return found;
            }
            changed.await;
        }
    }

    /// Waits for all tensors of a run. Errors when it fails before.
    pub(crate) async fn gather(&self, run: u64) -> Result<Vec<Tensor>, Fault> {
        self.begin(run);
        self.wait(|state| {
            if state.run != run || state.ended >= run {
                return Some(Err(Fault::invalid(format!("run {run} has ended before"))));
            }
            if let Some(fault) = &state.failed {
                return Some(Err(fault.clone()));
            }
            let is_whole = |slot: &Option<Filling>| slot.as_ref().is_some_and(Filling::is_whole);
            if !state.slots.iter().all(is_whole) {
                return None;
            }
            let taken = state.slots.iter_mut().filter_map(Option::take);
            Some(Ok(taken.map(|filling| filling.tensor).collect()))
        })
        .await
    }

    /// Waits for the failure of a run.
    pub(crate) async fn failure(&self, run: u64) -> Fault {
        let failed = |state: &mut State| state.failed.clone().filter(|_| state.run == run);
        self.wait(failed).await
    }

    /// Ends a run: what else comes for it is dropped.
    pub(crate) fn end(&self, run: u64) {
        let state = &mut *locked(&self.state);
        state.ended = state.ended.max(run);
        if state.run <= run {
            state.slots.fill_with(|| None);
        }
    }

    /// Takes back a gathered tensor, for its memory.
    pub(crate) fn recycle(&self, tensor: Tensor) {
        self.spares.give(tensor);
    }
}

impl Filling {
    /// Takes a piece; true if it was the last.
    fn take(&mut self, offset: u64, bytes: &[u8]) -> Result<bool, Fault> {
        if offset != self.n_bytes as u64 {
            let expected = self.n_bytes;
            let message = format!("byte {offset} came, byte {expected} was expected");
            return Err(Fault::invalid(message));
        }
        let (size, stop) = (self.tensor.size_bytes(), self.n_bytes + bytes.len());
        let room = self.tensor.as_bytes_mut().get_mut(self.n_bytes..stop);
        let room =
            room.ok_or_else(|| Fault::invalid(format!("more than its {size} bytes came")))?;
        room.copy_from_slice(bytes);
        self.n_bytes = stop;
        if self.is_whole() && self.tensor.dtype() == DType::Bool {
            let shape = self.tensor.shape().to_vec();
            self.tensor = self.tensor.reinterpreted(DType::Bool, &shape)?;
        }
        Ok(self.is_whole())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::network;
    use std::sync::Arc;

    fn inbox() -> Arc<Inbox> {
        let specs = [("a", DType::U8), ("b", DType::Bool)];
        let specs = specs.map(|(name, dtype)| IoSpec::new(name, dtype, &[4]));
        Arc::new(Inbox::new(specs.into()))
    }

    #[test]
    fn tensors_are_put_together_and_late_pieces_dropped() {
        let inbox = inbox();
        let gathered = |run| network().unwrap().block_on(inbox.gather(run));
        // Pieces before anybody waits, mixed.
        inbox.receive(0, 1, 0, &[1, 2]).unwrap();
        inbox.receive(1, 1, 0, &[0, 7, 1, 0]).unwrap();
        inbox.receive(0, 1, 2, &[3, 4]).unwrap();
        let first = gathered(1).unwrap();
        assert_eq!(first[0].as_bytes(), [1, 2, 3, 4]);
        assert_eq!(first[1].as_bytes(), [0, 1, 1, 0]);
        inbox.end(1);
        inbox.receive(0, 1, 17, &[9; 99]).unwrap();
        // A later run forgets what an earlier one left.
        inbox.receive(0, 2, 0, &[5, 5]).unwrap();
        inbox.receive(0, 3, 0, &[6; 4]).unwrap();
        inbox.receive(0, 2, 2, &[5, 5]).unwrap();
        inbox.put(1, 3, Tensor::zeros(DType::Bool, &[4]).unwrap());
        assert_eq!(gathered(3).unwrap()[0].as_bytes(), [6; 4]);
        inbox.end(3);
        assert!(gathered(2).is_err());
    }

    #[test]
    fn gaps_surplus_and_failures_are_errors() {
        let inbox = inbox();
        let error = |taken: Result<(), Fault>| taken.unwrap_err().to_string();
        let gap = error(inbox.receive(0, 1, 1, &[1]));
        assert_eq!(gap, "tensor \"a\": byte 1 came, byte 0 was expected");
        let surplus = error(inbox.receive(0, 1, 0, &[1; 5]));
        assert_eq!(surplus, "tensor \"a\": more than its 4 bytes came");
        assert_eq!(error(inbox.receive(2, 1, 0, &[1])), "tensor 2 of 2");
        let network = network().unwrap();
        let (waiting, failing) = (inbox.clone(), inbox.clone());
        let waiting = network.spawn(async move { waiting.gather(1).await });
        network.spawn(async move {
            failing.fail(1, Fault::invalid("gone"));
            failing.fail(1, Fault::invalid("later"));
        });
        let failed = network.block_on(waiting).unwrap();
        assert_eq!(failed.unwrap_err().to_string(), "gone");
        assert_eq!(network.block_on(inbox.failure(1)).to_string(), "gone");
        // The next run begins anew.
        inbox.receive(0, 2, 0, &[1; 4]).unwrap();
        inbox.put(1, 2, Tensor::zeros(DType::Bool, &[4]).unwrap());
        assert_eq!(network.block_on(inbox.gather(2)).unwrap().len(), 2);
    }
}
