//! What a GPU's memory and its link to the host can do, measured.

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
        let (from, to) = (self.allocate(size_bytes.max(link_bytes))?, self.allocate(size_bytes)?);
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

    /// Mean time of a request, made again and again. The device has finished when it returns.
    pub(super) fn time(&self, ask: &mut dyn FnMut() -> Result<(), Error>) -> Result<Duration, Error> {
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
