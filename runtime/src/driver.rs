//! What the executor asks of a device that has memory of its own: the CUDA driver, or an emulator of one.

use crate::error::Error;
use crate::gpu::{EncodedTensorMap, GpuArg, GpuCode, Launch, TensorMap};

/// One device. Addresses are the device's own; 0 is none.
///
/// Order: what one executor asks of a driver happens in the order of the calls. Blocking: [`Driver::read`] waits for all that was asked
/// before, so what it gives is finished; other calls may return before the device is done. A failure of asynchronous work is an error of a
/// later call. Every call may come from any thread.
pub trait Driver: Send + Sync {
    /// What it is, for people: `NVIDIA H200, sm_90a`.
    fn describe(&self) -> String;

    /// Memory of at least one byte, aligned to 256 bytes, contents undefined. Errors with `OutOfMemory`.
    fn allocate(&self, size_bytes: usize) -> Result<u64, Error>;

    /// Gives back what [`Driver::allocate`] gave, once all that was asked before is done.
    fn free(&self, address: u64);

    /// Copies from the host; `bytes` may be changed when it returns.
    fn write(&self, to: u64, bytes: &[u8]) -> Result<(), Error>;

    /// Copies to the host.
    fn read(&self, from: u64, bytes: &mut [u8]) -> Result<(), Error>;

    /// Copies on the device; the ranges are the same or apart.
    fn copy(&self, from: u64, to: u64, size_bytes: usize) -> Result<(), Error>;

    /// Encodes a tensor map over the buffer at this address, for arguments of launches. Errors with `Unsupported` when the device copies no tiles,
    /// with `Internal` when the map is not a good one.
    fn encode(&self, map: &TensorMap, buffer: u64) -> Result<EncodedTensorMap, Error>;

    /// Makes code ready to be launched. Errors with `Unsupported` when it is not for this device.
    fn load(&self, code: &GpuCode) -> Result<Box<dyn Loaded>, Error>;
}

/// Code on its device.
pub trait Loaded: Send + Sync {
    /// Starts the kernel `entry` with arguments in the order of [`crate::gpu::GpuKernel::params`].
    ///
    /// Errors with `Internal` when there is no such kernel, with `DeviceFailed` when it does what it must not (now or in a later call).
    fn launch(&self, entry: &str, launch: &Launch, args: &[GpuArg]) -> Result<(), Error>;
}
