//! Staging of tensors between partitions, and their copies beside the kernels of both.
//!
//! A tensor that crosses is staged once: in memory of the host, pinned if either end is a device, or, when the sending device reaches the
//! receiving one, in memory of the latter. A device's copies go into its queues for copies; events order them with its kernels, so
//! neither end waits for them.

use super::memory::{Block, Memory};
use crate::driver::{Arrival, Driver, Event, HostMemory, Queue};
use crate::error::Error;
use std::slice;
use std::sync::Arc;

/// A tensor's place between the partitions, allocated once.
pub(crate) struct Staging {
    place: Place,
    /// Marks the copy of a sending device.
    sent: Option<Arc<dyn Event>>,
    size_bytes: usize,
}

enum Place {
    Host(Arc<dyn HostMemory>),
    /// On the receiving device.
    Device(Block),
}

impl Staging {
    /// For a tensor from the memory `source` to the memory `target`.
    pub(crate) fn new(
        size_bytes: usize,
        source: &Memory,
        target: &Memory,
    ) -> Result<Staging, Error> {
        let sent = source.driver().map(|driver| driver.event()).transpose()?;
        let reached = |(from, to): (&Arc<dyn Driver>, &Arc<dyn Driver>)| {
            to.peer().is_some_and(|peer| from.reaches(peer))
        };
        let place = match source
            .driver()
            .zip(target.driver())
            .filter(|&ends| reached(ends))
        {
            Some(_) => Place::Device(target.allocate(size_bytes)?),
            // A device that receives copies from it while its host goes on, so its own pinned memory comes first.
            None => Place::Host(
                if target.driver().is_some() {
                    target
                } else {
                    source
                }
                .pin(size_bytes)?
                .into(),
            ),
        };
        Ok(Staging {
            place,
            sent,
            size_bytes,
        })
    }

    pub(crate) fn size_bytes(&self) -> usize {
        self.size_bytes
    }

    /// The staged bytes, when they are on the host.
    pub(crate) fn on_host(&self) -> Option<*mut [u8]> {
        match &self.place {
            Place::Host(memory) => Some(std::ptr::slice_from_raw_parts_mut(
                memory.as_ptr(),
                memory.size_bytes(),
            )),
            Place::Device(_) => None,
        }
    }

    /// The same memory, for as long as it is needed.
    pub(crate) fn shared(&self) -> Option<Arc<dyn HostMemory>> {
        match &self.place {
            Place::Host(memory) => Some(memory.clone()),
            Place::Device(_) => None,
        }
    }

    /// Marks the copy of a sending device.
    pub(crate) fn sent(&self) -> Option<&Arc<dyn Event>> {
        self.sent.as_ref()
    }

    /// Asks a device to send from one of its buffers; `arrival` is called when the bytes are on the host.
    ///
    /// # Safety
    ///
    /// `from` is the address of as many bytes. The staging lives, and no one else uses it, until the device has finished.
    pub(crate) unsafe fn send(
        &self,
        driver: &dyn Driver,
        target: &Memory,
        from: u64,
        arrival: Option<&Arrival>,
    ) -> Result<(), Error> {
        let sent = self.sent.as_ref().expect("a sending device has an event");
        match (&self.place, target.driver().and_then(|t| t.peer())) {
            (Place::Device(block), Some(peer)) => driver.push(
                from,
                peer,
                block.as_ptr().addr() as u64,
                self.size_bytes,
                &**sent,
            ),
            // SAFETY: the caller's promise.
            (Place::Host(memory), _) => unsafe { driver.send(from, &**memory, &**sent, arrival) },
            (Place::Device(_), None) => unreachable!("only memory of a peer is reached"),
        }
    }

    /// Enqueues a device's copy of the staged tensor into one of its buffers, and marks the end in `received`.
    ///
    /// # Safety
    ///
    /// As for [`Staging::send`], for the buffer `to`.
    pub(crate) unsafe fn receive(
        &self,
        driver: &dyn Driver,
        to: u64,
        received: &dyn Event,
    ) -> Result<(), Error> {
        self.sent
            .as_ref()
            .map_or(Ok(()), |sent| driver.wait(Queue::In, &**sent))?;
        match &self.place {
            // SAFETY: the caller's promise.
            Place::Host(memory) => unsafe { driver.receive(&**memory, to, received) },
            Place::Device(block) => {
                driver.unstage(block.as_ptr().addr() as u64, to, self.size_bytes, received)
            }
        }
    }
}

/// The bytes of memory of the host.
///
/// # Safety
///
/// No one changes them while the slice lives.
pub(crate) unsafe fn bytes_of(memory: &dyn HostMemory) -> &[u8] {
    // SAFETY: so many bytes are there, and the caller promises that no one changes them.
    unsafe { slice::from_raw_parts(memory.as_ptr(), memory.size_bytes()) }
}
