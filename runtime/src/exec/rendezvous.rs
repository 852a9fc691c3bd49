//! Where the partitions of one program meet: in-process send and receive, and the abort of a step.
//!
//! Order: each key carries at most one tensor per epoch (one run); keys are independent of each other. Blocking: `send` never blocks, it
//! copies into the key's staging memory, allocated once; `receive` does not block either, a worker that has nothing else to do waits on its
//! mailbox. Peer gone: a failing worker aborts the epoch, which ends every wait; the next epoch starts clean, and what the old one sent is
//! never received because a slot remembers its epoch.

use super::emulate::Courier;
use super::wait::{Event, Patience};
use crate::error::{Error, ErrorKind};
use crate::tensor::AlignedBytes;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Staging of one key.
struct Slot {
    /// Index of the receiving worker.
    destination: usize,
    /// Epoch of the tensor in `data`; 0 = none yet.
    epoch: AtomicU64,
    data: Mutex<AlignedBytes>,
}

/// One per worker: counts what has arrived for it, over all epochs.
#[derive(Default)]
struct Mailbox {
    arrivals: AtomicU64,
    event: Event,
}

/// The rendezvous of one executor.
pub(crate) struct Rendezvous {
    slots: Vec<Slot>,
    mailboxes: Vec<Mailbox>,
    patience: Patience,
    /// Makes tensors wait for emulated links.
    courier: Option<Courier>,
    aborted: AtomicBool,
    failure: Mutex<Option<Error>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Rendezvous {
    /// For `n_workers` workers and one slot per `(receiving worker, size in bytes)`.
    pub(crate) fn new(
        n_workers: usize,
        slots: &[(usize, usize)],
        patience: Patience,
        courier: Option<Courier>,
    ) -> Result<Rendezvous, Error> {
        let slot = |&(destination, bytes): &(usize, usize)| {
            let data = Mutex::new(AlignedBytes::zeroed(bytes)?);
            Ok(Slot { destination, epoch: AtomicU64::new(0), data })
        };
        Ok(Rendezvous {
            slots: slots.iter().map(slot).collect::<Result<_, Error>>()?,
            mailboxes: (0..n_workers).map(|_| Mailbox::default()).collect(),
            patience,
            courier,
            aborted: AtomicBool::new(false),
            failure: Mutex::new(None),
        })
    }

    /// Forgets the failure of the previous epoch. Called while no worker runs.
    pub(crate) fn begin_epoch(&self) {
        *lock(&self.failure) = None;
        self.courier.iter().for_each(Courier::begin_epoch);
        self.aborted.store(false, Ordering::Release);
    }

    /// Publishes what `fill` writes, `size_bytes` bytes, under `slot` and wakes the receiver. Errors when the slot was sent to in this epoch, sizes
    /// differ, or `fill` fails.
    pub(crate) fn send(
        &self,
        slot_idx: usize,
        epoch: u64,
        size_bytes: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let slot = &self.slots[slot_idx];
        {
            let mut data = lock(&slot.data);
            if slot.epoch.load(Ordering::Relaxed) >= epoch || data.as_slice().len() != size_bytes {
                return Err(Error::new(ErrorKind::Internal, "a key was sent twice in one run, or with another size"));
            }
            fill(data.as_mut_slice())?;
            if self.courier.is_none() {
                slot.epoch.store(epoch, Ordering::Release);
            }
        }
        match &self.courier {
            None => self.announce(slot),
            Some(courier) => courier.post(slot_idx, epoch),
        }
        Ok(())
    }

    fn announce(&self, slot: &Slot) {
        let mailbox = &self.mailboxes[slot.destination];
        mailbox.arrivals.fetch_add(1, Ordering::Release);
        mailbox.event.notify();
    }

    /// Lets the receiver see what was sent over an emulated link. One that was taken off the link before its run was aborted may come here after
    /// the next run began: its epoch never hides a later one.
    pub(crate) fn deliver(&self, slot: usize, epoch: u64) {
        self.slots[slot].epoch.fetch_max(epoch, Ordering::Release);
        self.announce(&self.slots[slot]);
    }

    /// The emulation of links, if any.
    pub(crate) fn courier(&self) -> Option<&Courier> {
        self.courier.as_ref()
    }

    /// True when `slot` holds the tensor of `epoch`.
    pub(crate) fn has_arrived(&self, slot: usize, epoch: u64) -> bool {
        self.slots[slot].epoch.load(Ordering::Acquire) == epoch
    }

    /// Gives an arrived tensor to `take`.
    pub(crate) fn receive(&self, slot: usize, take: impl FnOnce(&[u8]) -> Result<(), Error>) -> Result<(), Error> {
        take(lock(&self.slots[slot].data).as_slice())
    }

    /// Number of arrivals for `worker` so far; changes whenever something arrives.
    pub(crate) fn arrivals(&self, worker: usize) -> u64 {
        self.mailboxes[worker].arrivals.load(Ordering::Acquire)
    }

    /// Waits until [`Rendezvous::arrivals`] differs from `seen` or the epoch is aborted.
    pub(crate) fn wait_for_arrival(&self, worker: usize, seen: u64) {
        self.mailboxes[worker].event.wait_until(self.patience, || self.arrivals(worker) != seen || self.is_aborted());
    }

    /// Ends the epoch for all workers; the first error is the one reported.
    pub(crate) fn abort(&self, error: Error) {
        lock(&self.failure).get_or_insert(error);
        self.aborted.store(true, Ordering::Release);
        self.mailboxes.iter().for_each(|m| m.event.notify());
    }

    /// True once a worker has aborted the epoch.
    pub(crate) fn is_aborted(&self) -> bool {
        self.aborted.load(Ordering::Acquire)
    }

    /// The error that aborted the epoch.
    pub(crate) fn take_failure(&self) -> Option<Error> {
        lock(&self.failure).take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two_workers() -> Rendezvous {
        Rendezvous::new(2, &[(1, 3), (0, 2)], Patience::for_threads(2), None).unwrap()
    }

    fn send(r: &Rendezvous, slot: usize, epoch: u64, bytes: &[u8]) -> Result<(), Error> {
        r.send(slot, epoch, bytes.len(), |staging| {
            staging.copy_from_slice(bytes);
            Ok(())
        })
    }

    #[test]
    fn a_tensor_crosses_in_its_epoch_only() {
        let r = two_workers();
        send(&r, 0, 1, &[1, 2, 3]).unwrap();
        assert!(r.has_arrived(0, 1) && !r.has_arrived(0, 2) && !r.has_arrived(1, 1));
        let mut out = Vec::new();
        let take = |bytes: &[u8]| {
            out.extend_from_slice(bytes);
            Ok(())
        };
        r.receive(0, take).unwrap();
        assert_eq!(out, [1, 2, 3]);
        assert!(send(&r, 0, 1, &[1, 2, 3]).is_err(), "sent twice");
        assert!(send(&r, 1, 1, &[1, 2, 3]).is_err(), "wrong size");
        send(&r, 0, 2, &[4, 5, 6]).unwrap();
    }

    #[test]
    fn waiting_before_sending_is_legal() {
        let r = two_workers();
        for epoch in 1..=if cfg!(miri) { 3 } else { 500 } {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let mut seen = 0;
                    while !r.has_arrived(0, epoch) {
                        r.wait_for_arrival(1, seen);
                        seen = r.arrivals(1);
                    }
                });
                scope.spawn(|| send(&r, 0, epoch, &[epoch as u8; 3]).unwrap());
            });
        }
    }

    #[test]
    fn an_abort_ends_waits_and_the_first_error_stays() {
        let r = two_workers();
        std::thread::scope(|scope| {
            scope.spawn(|| r.wait_for_arrival(1, 0));
            r.abort(Error::invalid("first"));
            r.abort(Error::invalid("second"));
        });
        assert!(r.is_aborted());
        assert_eq!(r.take_failure(), Some(Error::invalid("first")));
        r.begin_epoch();
        assert!(!r.is_aborted());
    }
}
