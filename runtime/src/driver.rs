//! Interface of the executor to a device that has memory of its own: the CUDA driver, or an emulator of one.
//!
//! A device has three queues: one computes, one copies from the host or from staging to the device, one copies from the device. Each does what
//! it is asked in the order of the calls; nothing orders them among each other but [`Event`]s, and the order that a method states.

use crate::dtype::DType;
use crate::error::{Error, ErrorKind};
use crate::gpu::{EncodedTensorMap, GpuArg, GpuCode, Launch, TensorMap};
use crate::product::Product;
use crate::tensor::AlignedBytes;
use std::slice;
use std::sync::Arc;
use std::time::Duration;

/// One device. Addresses are the device's own; 0 is none. The methods that have a body are for devices on which everything is done when a call
/// returns.
///
/// Blocking: [`Driver::read`] and [`Driver::finish`] wait, others may return before the device is done. A failure of asynchronous work is an
/// error of a later call. Every call may come from any thread; a device that is gone makes calls fail, none waits for ever.
pub trait Driver: Send + Sync {
    /// Description for people: `NVIDIA H200, sm_90`.
    fn describe(&self) -> String;

    /// Memory of at least one byte, aligned to 256 bytes, contents undefined. Errors with `OutOfMemory`.
    fn allocate(&self, size_bytes: usize) -> Result<u64, Error>;

    /// Frees memory of [`Driver::allocate`], once all earlier requests are done.
    fn free(&self, address: u64);

    /// Copies from the host in the queue that computes; `bytes` may be changed when it returns.
    fn write(&self, to: u64, bytes: &[u8]) -> Result<(), Error>;

    /// Copies to the host, after all that the queue that computes was asked before.
    fn read(&self, from: u64, bytes: &mut [u8]) -> Result<(), Error>;

    /// Copies on the device in the queue that computes; the ranges are the same or apart.
    fn copy(&self, from: u64, to: u64, size_bytes: usize) -> Result<(), Error>;

    /// Encodes a tensor map over the buffer at this address, for arguments of launches. Errors with `Unsupported` when the device copies no tiles,
    /// with `Internal` when the map is not a good one.
    fn encode(&self, map: &TensorMap, buffer: u64) -> Result<EncodedTensorMap, Error>;

    /// Makes code ready to be launched. Errors with `Unsupported` when it is not for this device.
    fn load(&self, code: &GpuCode) -> Result<Box<dyn DeviceCode>, Error>;

    /// Makes a product ready that a library of the device computes. Errors with `Unsupported` when there is no such library, or it has no way to
    /// compute it.
    fn product(&self, product: &Product) -> Result<Box<dyn LoadedProduct>, Error> {
        let message = format!(
            "{} has no library for the product {product}",
            self.describe()
        );
        Err(Error::new(ErrorKind::Unsupported, message))
    }

    /// Memory of the host from and to which [`Driver::receive`] and [`Driver::send`] copy while the host does other things; zero.
    fn pin(&self, size_bytes: usize) -> Result<Box<dyn HostMemory>, Error> {
        Ok(Box::new(AlignedBytes::zeroed(size_bytes)?))
    }

    /// A new event, which has passed.
    fn event(&self) -> Result<Arc<dyn Event>, Error> {
        Ok(Arc::new(PassedEvent))
    }

    /// Makes the queue wait until the last mark of `event` has passed. The event may be of another device.
    fn wait(&self, _queue: Queue, _event: &dyn Event) -> Result<(), Error> {
        Ok(())
    }

    /// Copies all of `to`'s bytes from the device, after earlier requests of the queue that computes and beside later ones. Marks the end in
    /// `event`, and then calls `arrival`.
    ///
    /// # Safety
    ///
    /// `to` and `arrival` live, and no one uses `to`, until then or until [`Driver::finish`] returns.
    unsafe fn send(
        &self,
        from: u64,
        to: &dyn HostMemory,
        _event: &dyn Event,
        arrival: Option<&Arrival>,
    ) -> Result<(), Error> {
        // SAFETY: the caller's promise: no one else uses these bytes.
        self.read(from, unsafe {
            slice::from_raw_parts_mut(to.as_ptr(), to.size_bytes())
        })?;
        arrival.iter().for_each(|arrival| arrival());
        Ok(())
    }

    /// Makes [`Driver::receive`] and [`Driver::unstage`] come after earlier requests of the queue that computes: for when these use the memory that
    /// the copies write.
    fn receive_after_computing(&self) -> Result<(), Error> {
        Ok(())
    }

    /// Copies all of `from`'s bytes to the device, beside the kernels, and marks the end in `event`.
    ///
    /// # Safety
    ///
    /// `from` lives, and no one changes it, until then or until [`Driver::finish`] returns.
    unsafe fn receive(
        &self,
        from: &dyn HostMemory,
        to: u64,
        _event: &dyn Event,
    ) -> Result<(), Error> {
        // SAFETY: the caller's promise: no one changes these bytes.
        self.write(to, unsafe {
            slice::from_raw_parts(from.as_ptr(), from.size_bytes())
        })
    }

    /// Copies on the device in the queue of [`Driver::receive`], likewise.
    fn unstage(
        &self,
        from: u64,
        to: u64,
        size_bytes: usize,
        _event: &dyn Event,
    ) -> Result<(), Error> {
        self.copy(from, to, size_bytes)
    }

    /// The device's name among those of the driver, if the driver copies between devices' memories.
    fn peer(&self) -> Option<Peer> {
        None
    }

    /// True when [`Driver::push`] copies straight to memory of `peer`.
    fn reaches(&self, _peer: Peer) -> bool {
        false
    }

    /// Copies to memory of a device that is reached, as [`Driver::send`] does to the host's. Errors with `Unsupported` when it is not.
    fn push(
        &self,
        _from: u64,
        peer: Peer,
        _to: u64,
        _size_bytes: usize,
        _event: &dyn Event,
    ) -> Result<(), Error> {
        let message = format!("{} does not reach device {}", self.describe(), peer.ordinal);
        Err(Error::new(ErrorKind::Unsupported, message))
    }

    /// Devices of this driver, no two of them one device, that reduce together: ranks are in the order of the list, and one of them is this. Takes a
    /// while. Errors with `Unsupported` when there is no library for it.
    fn group(&self, _ranks: &[Peer]) -> Result<Arc<dyn Group>, Error> {
        Err(Error::new(
            ErrorKind::Unsupported,
            format!("{} does not reduce with others", self.describe()),
        ))
    }

    /// Stamps for the queue that computes; `None` where everything is done when a call returns, so that the host's clock tells.
    fn stamps(&self, _n: usize) -> Result<Option<Box<dyn Stamps>>, Error> {
        Ok(None)
    }

    /// True when a kernel is done as the call that starts it returns, so that an error of that call is the kernel's own. Otherwise it may be that
    /// of any kernel before it.
    fn waits_for_kernels(&self) -> bool {
        true
    }

    /// Errors when the device can do nothing more: it is gone, or a kernel faulted. Does not wait.
    fn check(&self) -> Result<(), Error> {
        Ok(())
    }

    /// Waits for all that was asked.
    fn finish(&self) -> Result<(), Error> {
        Ok(())
    }

    /// The requests that `ask` makes, not carried out: kernels, copies on the device, and, `with_copies`, sends and receives with their events, all in
    /// one thread. `None` when this device, or one of the requests, cannot be replayed.
    fn capture(
        &self,
        _with_copies: bool,
        _ask: &mut dyn FnMut() -> Result<(), Error>,
    ) -> Result<Option<Box<dyn Replay>>, Error> {
        Ok(None)
    }
}

/// A queue of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queue {
    /// Kernels, and copies between them.
    Compute,
    /// Copies to the device.
    In,
    /// Copies from the device.
    Out,
}

/// Names a device to others of the same driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The driver's number of it.
    pub ordinal: u32,
    /// The driver's own name of its context.
    pub context: u64,
    /// The driver's own name of the queue that computes.
    pub compute: u64,
}

/// Operator of an all-reduce.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// Their sum; integers wrap.
    Sum,
    /// Their product; integers wrap.
    Prod,
    /// The greatest.
    Max,
    /// The least.
    Min,
}

/// Operands of one rank of an all-reduce.
#[derive(Clone, Copy, Debug)]
pub struct Reduce {
    /// The operator.
    pub reduction: Reduction,
    /// Type of the elements.
    pub dtype: DType,
    /// Address of the rank's own elements.
    pub from: u64,
    /// Where the result goes.
    pub to: u64,
    /// Number of elements.
    pub n_elements: usize,
}

/// Devices that reduce together. All ranks must be asked for the same in the same order, each by one thread at a time.
///
/// A call that waits polls `is_over`: once that holds, or something has failed, it releases the rank's queue, whatever the other ranks do, and the
/// results of the queue's requests are undefined. The group must then be renewed before it is asked again.
pub trait Group: Send + Sync {
    /// Asks the queue that computes of a rank's device, and waits until it was asked. False when that was over before.
    fn all_reduce(
        &self,
        rank: usize,
        reduce: &Reduce,
        is_over: &dyn Fn() -> bool,
    ) -> Result<bool, Error>;

    /// Waits until a rank has done its all-reduces. False when the run was over before.
    fn settle(&self, rank: usize, is_over: &dyn Fn() -> bool) -> Result<bool, Error>;

    /// Makes the group as good as new, if it has to. No rank is being asked.
    fn renew(&self) -> Result<(), Error>;
}

/// Called when bytes have arrived, on any thread; it must not call a driver.
pub type Arrival = Box<dyn Fn() + Send + Sync>;

/// A point in a queue. It may be marked again and again; who waits, waits for the last mark before.
pub trait Event: Send + Sync {
    /// The driver's own name of it; 0 where everything is done when a call returns.
    fn raw(&self) -> u64;
}

/// Times at which a device's queue that computes came to points of it. A point may be stamped again and again.
pub trait Stamps: Send + Sync {
    /// Stamps point `i` when all that was asked before is done.
    fn stamp(&self, i: usize) -> Result<(), Error>;

    /// Time from one point's last stamp to that of another. The device has finished since.
    fn between(&self, from: usize, to: usize) -> Result<Duration, Error>;
}

/// The event of a device on which everything is done when a call returns.
pub struct PassedEvent;

impl Event for PassedEvent {
    fn raw(&self) -> u64 {
        0
    }
}

/// Bytes of the host.
pub trait HostMemory: Send + Sync {
    /// The first byte, aligned to 64 bytes.
    fn as_ptr(&self) -> *mut u8;

    /// Their number.
    fn size_bytes(&self) -> usize;
}

impl HostMemory for AlignedBytes {
    fn as_ptr(&self) -> *mut u8 {
        AlignedBytes::as_ptr(self)
    }

    fn size_bytes(&self) -> usize {
        self.as_slice().len()
    }
}

/// Code on its device.
pub trait DeviceCode: Send + Sync {
    /// Starts the kernel `entry` with arguments in the order of [`crate::gpu::GpuKernel::params`].
    ///
    /// Errors with `Internal` when there is no such kernel, with `DeviceFailed` when it faults (now or in a later call).
    fn launch(&self, entry: &str, launch: &Launch, args: &[GpuArg]) -> Result<(), Error>;
}

/// A product of a library, ready on its device.
pub trait LoadedProduct: Send + Sync {
    /// Computes it in the queue that computes. Errors with `DeviceFailed` when the library says that it cannot.
    fn start(&self, args: &ProductArgs) -> Result<(), Error>;

    /// Bytes of workspace that it uses, at most those that it was told it may.
    fn workspace_bytes(&self) -> usize;
}

/// Addresses of a product's buffers; 0 for a buffer that it does not have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProductArgs {
    /// Buffer of the left-hand side.
    pub lhs: u64,
    /// Buffer of the right-hand side.
    pub rhs: u64,
    /// Buffer of the bias.
    pub bias: u64,
    /// Buffer of the result.
    pub out: u64,
    /// The workspace, aligned to [`crate::product::WORKSPACE_ALIGN_BYTES`].
    pub workspace: u64,
}

/// Requests that can be made again.
pub trait Replay: Send + Sync {
    /// Asks for all of it in the queue that computes.
    fn start(&self) -> Result<(), Error>;
}
