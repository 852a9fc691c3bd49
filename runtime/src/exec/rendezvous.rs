//! Where the partitions of one program meet: in-process send and receive, and the abort of a step.
//!
//! Order: each key carries at most one tensor per epoch (one run); keys are independent of each other. Blocking: `send` never blocks, it
//! copies into the key's staging memory, allocated once, or asks its device to; `receive` does not block either, a worker that has nothing else
//! to do waits on its mailbox. A tensor that a device sends to another has arrived as soon as the copy was asked for: the receiver's copy waits
//! for it on the device. Peer gone: a failing worker aborts the epoch, which ends every wait; the next epoch starts clean, and tensors of the old one are
//! never received because a slot remembers its epoch. Tensors to and from other tasks: [`super::wire`].

use super::emulate::Courier;
use super::progress::Gauge;
use super::transfer::Staging;
use super::wait::{Event as Wakeup, Patience};
use super::wire::{Bytes, Remote, Runs};
use crate::driver::{Driver, Event, HostMemory};
use crate::error::Error;
use crate::sync::lock;
use crate::tensor::Tensor;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Interval of the checks of its device by a waiting worker.
const LOOKED_AFTER: Duration = Duration::from_millis(20);

/// Staging of one key.
struct Slot {
    receiver: Receiver,
    /// The staging's memory, where it is lent to the wire: a driver may announce a tensor while the staging is locked.
    outgoing: Option<Arc<dyn HostMemory>>,
    /// Epoch of the tensor in `data`; 0 = none yet.
    epoch: AtomicU64,
    staging: Mutex<Staging>,
}

/// Receiver of a slot's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Receiver {
    /// The worker of this index.
    Worker(usize),
    /// The wire, as the tensor of this outgoing end.
    Wire(usize),
}

/// Receiver and staging memory of a slot.
pub(crate) struct SlotSpec {
    pub(crate) receiver: Receiver,
    pub(crate) staging: Staging,
}

/// One per worker: counts the tensors that have arrived for it, over all epochs.
#[derive(Default)]
struct Mailbox {
    arrivals: AtomicU64,
    event: Wakeup,
    gauge: Gauge,
}

/// The rendezvous of one executor.
pub(crate) struct Rendezvous {
    slots: Vec<Slot>,
    mailboxes: Vec<Mailbox>,
    pub(crate) patience: Patience,
    /// Makes tensors wait for emulated links.
    courier: Option<Courier>,
    pub(crate) remote: Remote,
    pub(crate) runs: Mutex<Runs>,
    /// The current run.
    epoch: AtomicU64,
    aborted: AtomicBool,
    failure: Mutex<Option<Error>>,
}

impl Rendezvous {
    /// For `n_workers` workers.
    pub(crate) fn new(
        n_workers: usize,
        slots: Vec<SlotSpec>,
        patience: Patience,
        courier: Option<Courier>,
        remote: Remote,
    ) -> Rendezvous {
        let slot = |SlotSpec { receiver, staging }| Slot {
            receiver,
            outgoing: match receiver {
                Receiver::Worker(_) => None,
                Receiver::Wire(_) => staging.shared(),
            },
            epoch: AtomicU64::new(0),
            staging: Mutex::new(staging),
        };
        Rendezvous {
            slots: slots.into_iter().map(slot).collect(),
            mailboxes: (0..n_workers).map(|_| Mailbox::default()).collect(),
            patience,
            courier,
            runs: Mutex::new(Runs::new(remote.incoming.len())),
            remote,
            epoch: AtomicU64::new(0),
            aborted: AtomicBool::new(false),
            failure: Mutex::new(None),
        }
    }

    /// Begins a run, with the failure of the previous one forgotten. Called while no worker runs.
    pub(crate) fn begin_epoch(&self, epoch: u64) {
        self.epoch.store(epoch, Ordering::Release);
        *lock(&self.failure) = None;
        self.courier.iter().for_each(Courier::begin_epoch);
        self.aborted.store(false, Ordering::Release);
        self.begin_run(epoch);
    }

    /// Publishes the `size_bytes` bytes that `fill` writes under `slot` and wakes the receiver. Errors when the slot was sent to in this epoch, sizes
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
            let staging = lock(&slot.staging);
            check_send(slot, &staging, epoch, size_bytes)?;
            let bytes = staging
                .on_host()
                .expect("what the host sends is staged there");
            // SAFETY: under the lock, and before the receiver is told: no one else uses the bytes.
            fill(unsafe { &mut *bytes })?;
            if self.courier.is_none() {
                slot.epoch.store(epoch, Ordering::Release);
            }
        }
        match &self.courier {
            None => self.announce(slot_idx, epoch),
            Some(courier) => courier.post(slot_idx, epoch),
        }
        Ok(())
    }

    /// Lends a tensor under `slot`, which the wire receives, without a copy. Errors as [`Rendezvous::send`].
    pub(crate) fn lend(&self, slot_idx: usize, epoch: u64, value: Tensor) -> Result<(), Error> {
        let slot = &self.slots[slot_idx];
        let Receiver::Wire(end) = slot.receiver else {
            return Err(Error::internal("only the wire is lent a variable"));
        };
        check_send(slot, &lock(&slot.staging), epoch, value.size_bytes())?;
        slot.epoch.store(epoch, Ordering::Release);
        self.remote.send(end, epoch, Bytes::Shared(value));
        Ok(())
    }

    /// True when the tensors of a slot leave this process, and may be lent to the wire.
    pub(crate) fn lends(&self, slot: usize) -> bool {
        self.remote.lends && matches!(self.slots[slot].receiver, Receiver::Wire(_))
    }

    /// Lets a device send under `slot`: `ask` asks it to. The receiver is told now when it is a device as well, or else by
    /// [`Rendezvous::deliver`], by the device's copy.
    pub(crate) fn send_from_device(
        &self,
        slot_idx: usize,
        size_bytes: usize,
        to_device: bool,
        ask: impl FnOnce(&Staging) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let slot = &self.slots[slot_idx];
        let staging = lock(&slot.staging);
        check_send(slot, &staging, self.epoch(), size_bytes)?;
        ask(&staging)?;
        drop(staging);
        if to_device {
            self.deliver(slot_idx, self.epoch());
        }
        Ok(())
    }

    /// Number of the current run.
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// Tells a slot's receiver of its tensor.
    fn announce(&self, slot: usize, epoch: u64) {
        match self.slots[slot].receiver {
            Receiver::Worker(worker) => {
                let mailbox = &self.mailboxes[worker];
                mailbox.arrivals.fetch_add(1, Ordering::Release);
                mailbox.event.notify();
            }
            Receiver::Wire(end) => {
                let memory = self.slots[slot].outgoing.clone();
                let memory = memory.expect("what leaves the task is staged on the host");
                self.remote.send(end, epoch, Bytes::Staged(memory));
            }
        }
    }

    /// Writes into the staging of a tensor from another task.
    pub(crate) fn write_staging(&self, slot: usize, offset: usize, bytes: &[u8]) {
        let staging = lock(&self.slots[slot].staging);
        let staged = staging
            .on_host()
            .expect("what arrives from another task is staged on the host");
        // SAFETY: under the lock, and before the receiver is told: no one else uses the bytes.
        let staged = unsafe { &mut *staged };
        staged[offset..offset + bytes.len()].copy_from_slice(bytes);
    }

    /// Lets the receiver see a tensor sent over an emulated link, or by a device. One that was taken off the link before its run was aborted may come here after
    /// the next run began: its epoch never hides a later one.
    pub(crate) fn deliver(&self, slot: usize, epoch: u64) {
        self.slots[slot].epoch.fetch_max(epoch, Ordering::Release);
        self.announce(slot, epoch);
    }

    /// The emulation of links, if any.
    pub(crate) fn courier(&self) -> Option<&Courier> {
        self.courier.as_ref()
    }

    /// True when `slot` holds the tensor of `epoch`.
    pub(crate) fn has_arrived(&self, slot: usize, epoch: u64) -> bool {
        self.slots[slot].epoch.load(Ordering::Acquire) == epoch
    }

    /// Gives an arrived tensor to `take`, on the host.
    pub(crate) fn receive(
        &self,
        slot: usize,
        take: impl FnOnce(&[u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let staging = lock(&self.slots[slot].staging);
        let bytes = staging
            .on_host()
            .expect("what the host receives is staged there");
        // SAFETY: the tensor is there, so its sender is done with the bytes in this run.
        take(unsafe { &*bytes })
    }

    /// Gives the staging of an arrived tensor to a device.
    pub(crate) fn receive_on_device(
        &self,
        slot: usize,
        ask: impl FnOnce(&Staging) -> Result<(), Error>,
    ) -> Result<(), Error> {
        ask(&lock(&self.slots[slot].staging))
    }

    /// Event at the end of the copy of a device that sends under `slot`.
    pub(crate) fn sent(&self, slot: usize) -> Option<Arc<dyn Event>> {
        lock(&self.slots[slot].staging).sent().cloned()
    }

    /// Progress of a worker.
    pub(crate) fn gauge(&self, worker: usize) -> &Gauge {
        &self.mailboxes[worker].gauge
    }

    /// Number of arrivals for `worker` so far; changes whenever something arrives.
    pub(crate) fn arrivals(&self, worker: usize) -> u64 {
        self.mailboxes[worker].arrivals.load(Ordering::Acquire)
    }

    /// Waits until [`Rendezvous::arrivals`] differs from `seen` or the epoch is aborted. A worker of a device checks it now and then: the
    /// awaited tensor may have to come from that device first. Errors when the device can do nothing more.
    pub(crate) fn wait_for_arrival(
        &self,
        worker: usize,
        seen: u64,
        device: Option<&dyn Driver>,
    ) -> Result<(), Error> {
        let (event, done) = (&self.mailboxes[worker].event, || {
            self.arrivals(worker) != seen || self.is_aborted()
        });
        self.gauge(worker).rest();
        let Some(device) = device else {
            event.wait_until(self.patience, done);
            return Ok(());
        };
        while !event.wait_for(LOOKED_AFTER, self.patience, done) {
            device.check()?;
        }
        Ok(())
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

fn check_send(slot: &Slot, staging: &Staging, epoch: u64, size_bytes: usize) -> Result<(), Error> {
    if slot.epoch.load(Ordering::Relaxed) >= epoch || staging.size_bytes() != size_bytes {
        return Err(Error::internal(
            "a key was sent twice in one run, or with another size",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::memory::Memory;
    use super::*;

    fn two_workers() -> Rendezvous {
        let slot = |(worker, size_bytes)| SlotSpec {
            receiver: Receiver::Worker(worker),
            staging: Staging::new(size_bytes, &Memory::Host, &Memory::Host).unwrap(),
        };
        Rendezvous::new(
            2,
            [(1, 3), (0, 2)].map(slot).into(),
            Patience::for_threads(2),
            None,
            Remote::default(),
        )
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
                        r.wait_for_arrival(1, seen, None).unwrap();
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
            scope.spawn(|| r.wait_for_arrival(1, 0, None));
            r.abort(Error::invalid("first"));
            r.abort(Error::invalid("second"));
        });
        assert!(r.is_aborted());
        assert_eq!(r.take_failure(), Some(Error::invalid("first")));
        r.begin_epoch(2);
        assert!(!r.is_aborted());
    }
}
