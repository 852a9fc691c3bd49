//! Measured rates of a GPU's memory and of its link to the host.

use super::CudaGpu;
use crate::driver::Driver;
use crate::error::Error;
use std::time::{Duration, Instant};

/// Times of copies, each the mean of several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyTimes {
    /// On the device: so many bytes are read and as many written.
    pub on_device: Duration,
    /// From pinned memory of the host.
    pub to_device: Duration,
    /// To pinned memory of the host.
    pub to_host: Duration,
}

/// Copies that are timed together, after one that is not.
const N_COPIES: u32 = 10;

impl CudaGpu {
    /// Times copies of `size_bytes` bytes on the device, and of `link_bytes` from and to the host. Errors with `OutOfMemory` when there is no room for
    /// twice the former.
    pub fn time_copies(&self, size_bytes: usize, link_bytes: usize) -> Result<CopyTimes, Error> {
        let from = self.allocate(size_bytes.max(link_bytes))?;
        let to = self.allocate(size_bytes).inspect_err(|_| self.free(from))?;
        let (pinned, event) = (self.pin(link_bytes)?, self.event()?);
        let times = CopyTimes {
            on_device: self.time(&mut || self.copy(from, to, size_bytes))?,
            // SAFETY: the pinned memory lives until the device has finished, which `time` waits for, and no one else uses it.
            to_device: self.time(&mut || unsafe { self.receive(&*pinned, from, &*event) })?,
            // SAFETY: as above.
            to_host: self.time(&mut || unsafe { self.send(from, &*pinned, &*event, None) })?,
        };
        self.free(from);
        self.free(to);
        Ok(times)
    }

    /// Time of a single copy of so many bytes from pinned memory of the host to the device, and back, with all that waiting for it takes: the least
    /// of several.
    pub fn time_link(&self, size_bytes: usize) -> Result<[Duration; 2], Error> {
        let (address, pinned, event) = (
            self.allocate(size_bytes.max(1))?,
            self.pin(size_bytes)?,
            self.event()?,
        );
        // SAFETY: the pinned memory lives until the device has finished, which `least_time` waits for, and no one else uses it.
        let to_device =
            self.least_time(&mut || unsafe { self.receive(&*pinned, address, &*event) });
        // SAFETY: as above.
        let to_host =
            self.least_time(&mut || unsafe { self.send(address, &*pinned, &*event, None) });
        self.free(address);
        Ok([to_device?, to_host?])
    }

    /// Time of a single copy of so many bytes straight to another device. `None` when this one does not reach it.
    pub fn time_push(&self, to: &CudaGpu, size_bytes: usize) -> Result<Option<Duration>, Error> {
        let Some(peer) = to.peer().filter(|&peer| self.reaches(peer)) else {
            return Ok(None);
        };
        let (here, there, event) = (
            self.allocate(size_bytes.max(1))?,
            to.allocate(size_bytes.max(1))?,
            self.event()?,
        );
        to.finish()?;
        let time = self.least_time(&mut || self.push(here, peer, there, size_bytes, &*event));
        self.free(here);
        to.free(there);
        time.map(Some)
    }

    /// Least time of a request that is waited for.
    fn least_time(&self, ask: &mut dyn FnMut() -> Result<(), Error>) -> Result<Duration, Error> {
        let mut least = Duration::MAX;
        for _ in 0..=N_COPIES {
            let started = Instant::now();
            ask()?;
            self.finish()?;
            least = least.min(started.elapsed());
        }
        Ok(least)
    }

    /// Mean time of a request, made again and again. The device has finished when it returns.
    pub(super) fn time(
        &self,
        ask: &mut dyn FnMut() -> Result<(), Error>,
    ) -> Result<Duration, Error> {
        let mut n_times = |n: u32| {
            let started = Instant::now();
            let asked = (0..n).try_for_each(|_| ask());
            self.finish()?;
            asked.map(|()| started.elapsed() / n)
        };
        n_times(1)?;
        n_times(N_COPIES)
    }
}
