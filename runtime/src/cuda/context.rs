//! Objects of the driver with their errors: contexts, streams, events, pinned memory. Each gives itself back.

use super::CudaDevice;
use super::api::{self, Api, Code};
use crate::driver::{self, Arrival};
use crate::error::{Error, ErrorKind};
use cudarc::driver::sys::{
    self, CUcontext, CUevent, CUevent_flags, CUresult, CUstream, CUstream_flags,
};
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

/// The primary context of a device.
pub(super) struct Context {
    pub(super) api: &'static Api,
    pub(super) handle: CUcontext,
    pub(super) ordinal: u32,
    pub(super) device: CudaDevice,
}

// SAFETY: handles of the driver may be used from any thread; `bind` makes the context current where it is used.
unsafe impl Send for Context {}
// SAFETY: as above; the driver's functions are thread-safe.
unsafe impl Sync for Context {}

/// Results after which a device does nothing more for this process or for any.
const LOST: [CUresult; 6] = [
    CUresult::CUDA_ERROR_DEINITIALIZED,
    CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE,
    CUresult::CUDA_ERROR_ECC_UNCORRECTABLE,
    CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE,
    CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED,
    CUresult::CUDA_ERROR_UNKNOWN,
];
const NOT_READY: Code = CUresult::CUDA_ERROR_NOT_READY as Code;
pub(super) const OUT_OF_MEMORY: Code = CUresult::CUDA_ERROR_OUT_OF_MEMORY as Code;

impl Context {
    /// The primary context of a device, made if this is its first user. Errors with `Unsupported` when there is none.
    pub(super) fn open(ordinal: u32) -> Result<Arc<Context>, Error> {
        let device = super::device(ordinal)?;
        let api = api::get().map_err(|why| Error::new(ErrorKind::Unsupported, why))?;
        let mut handle = ptr::null_mut();
        // SAFETY: the driver writes one handle.
        let code = unsafe { (api.retain_context)(&mut handle, ordinal as c_int) };
        // Made before the check, which needs it; a context that was not retained is released in vain.
        let context = Arc::new(Context {
            api,
            handle,
            ordinal,
            device,
        });
        context.check(code, "making a context")?;
        Ok(context)
    }

    /// Makes the context current on this thread, as most calls need it.
    pub(super) fn bind(&self) -> Result<(), Error> {
        // SAFETY: the handle is that of a retained context.
        self.check(
            unsafe { (self.api.set_context)(self.handle) },
            "choosing the device",
        )
    }

    /// Turns a result into an error that names the device: `OutOfMemory`, or `DeviceFailed`.
    pub(super) fn check(&self, code: Code, what: &str) -> Result<(), Error> {
        let (device, text) = (&self.device.name, || self.api.text(code));
        let (kind, message) = match code {
            0 => return Ok(()),
            OUT_OF_MEMORY => (
                ErrorKind::OutOfMemory,
                format!("{device}: {what}: {}", text()),
            ),
            code if LOST.iter().any(|&lost| lost as Code == code) => (
                ErrorKind::DeviceFailed,
                format!("{device} was lost, noticed while {what}: {}", text()),
            ),
            _ => (
                ErrorKind::DeviceFailed,
                format!("{device}: {what}: {}", text()),
            ),
        };
        Err(Error::new(kind, message))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once, in `open`. The result no longer matters.
        unsafe { (self.api.release_context)(self.ordinal as c_int) };
    }
}

/// A stream, ordered by nothing but events.
pub(super) struct Stream {
    pub(super) context: Arc<Context>,
    pub(super) handle: CUstream,
}

// SAFETY: as for `Context`.
unsafe impl Send for Stream {}
// SAFETY: as for `Context`.
unsafe impl Sync for Stream {}

impl Stream {
    pub(super) fn new(context: &Arc<Context>) -> Result<Stream, Error> {
        let mut handle = ptr::null_mut();
        context.bind()?;
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the driver writes one handle.
        let code = unsafe { (context.api.create_stream)(&mut handle, flags) };
        context.check(code, "making a stream")?;
        Ok(Stream {
            context: context.clone(),
            handle,
        })
    }

    /// Waits until all enqueued work is done. Errors with the first failure among it.
    pub(super) fn synchronize(&self) -> Result<(), Error> {
        self.context.bind()?;
        // SAFETY: the stream lives.
        let code = unsafe { (self.context.api.synchronize_stream)(self.handle) };
        self.context.check(code, "waiting for the device")
    }

    /// Errors when its device can do nothing more. Does not wait.
    pub(super) fn check(&self) -> Result<(), Error> {
        const NOT_READY: Code = CUresult::CUDA_ERROR_NOT_READY as Code;
        self.context.bind()?;
        // SAFETY: the stream lives.
        match unsafe { (self.context.api.query_stream)(self.handle) } {
            NOT_READY => Ok(()),
            code => self.context.check(code, "computing"),
        }
    }

    /// Makes later work wait for the last record of an event, of any device.
    pub(super) fn wait(&self, event: u64) -> Result<(), Error> {
        self.context.bind()?;
        // SAFETY: stream and event live.
        let code = unsafe { (self.context.api.wait_event)(self.handle, event_handle(event), 0) };
        self.context.check(code, "waiting for an event")
    }

    /// Calls `arrival` once the stream comes here.
    ///
    /// # Safety
    ///
    /// It lives until then.
    pub(super) unsafe fn call(&self, arrival: &Arrival) -> Result<(), Error> {
        unsafe extern "C" fn arrived(data: *mut c_void) {
            // SAFETY: `data` is the address of an `Arrival` that lives (the contract of `call`).
            let arrival: &Arrival = unsafe { &*data.cast() };
            arrival();
        }
        self.context.bind()?;
        let data = ptr::from_ref(arrival).cast_mut().cast();
        // SAFETY: the stream lives; the function takes the value that `data` points to.
        let code = unsafe { (self.context.api.host_function)(self.handle, arrived, data) };
        self.context.check(code, "asking for a call")
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: made in `new`, destroyed once.
            unsafe { (self.context.api.destroy_stream)(self.handle) };
        }
    }
}

/// An event.
pub(super) struct Event {
    context: Arc<Context>,
    handle: CUevent,
}

// SAFETY: as for `Context`.
unsafe impl Send for Event {}
// SAFETY: as for `Context`.
unsafe impl Sync for Event {}

impl Event {
    /// Without timing.
    pub(super) fn new(context: &Arc<Context>) -> Result<Event, Error> {
        Event::with_flags(context, CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    /// With timing.
    pub(super) fn timed(context: &Arc<Context>) -> Result<Event, Error> {
        Event::with_flags(context, CUevent_flags::CU_EVENT_DEFAULT)
    }

    fn with_flags(context: &Arc<Context>, flags: CUevent_flags) -> Result<Event, Error> {
        let (mut handle, flags) = (ptr::null_mut(), flags as u32);
        context.bind()?;
        // SAFETY: the driver writes one handle.
        let code = unsafe { (context.api.create_event)(&mut handle, flags) };
        context.check(code, "making an event")?;
        Ok(Event {
            context: context.clone(),
            handle,
        })
    }

    /// Records the event after the work enqueued so far on a stream of the same context.
    pub(super) fn record(&self, stream: &Stream) -> Result<(), Error> {
        record(stream, driver::Event::raw(self))
    }

    /// Time from the last record of this event to that of another; both have timing and are done.
    pub(super) fn until(&self, end: &Event) -> Result<Duration, Error> {
        let mut ms = 0f32;
        self.context.bind()?;
        // SAFETY: both events live; the driver writes one number.
        let code = unsafe { (self.context.api.elapsed)(&mut ms, self.handle, end.handle) };
        self.context.check(code, "asking for a time")?;
        Ok(Duration::from_secs_f64(f64::from(ms.max(0.0)) / 1e3))
    }

    /// True once the work before the last record is done.
    pub(super) fn is_done(&self) -> Result<bool, Error> {
        self.context.bind()?;
        // SAFETY: the event lives.
        match unsafe { (self.context.api.query_event)(self.handle) } {
            NOT_READY => Ok(false),
            code => self
                .context
                .check(code, "waiting for other devices")
                .map(|()| true),
        }
    }

    pub(super) fn synchronize(&self) -> Result<(), Error> {
        self.context.bind()?;
        // SAFETY: the event lives.
        let code = unsafe { (self.context.api.synchronize_event)(self.handle) };
        self.context.check(code, "waiting for an event")
    }
}

/// Records an event after the work enqueued on a stream so far.
pub(super) fn record(stream: &Stream, event: u64) -> Result<(), Error> {
    stream.context.bind()?;
    // SAFETY: stream and event live.
    let code = unsafe { (stream.context.api.record_event)(event_handle(event), stream.handle) };
    stream.context.check(code, "recording an event")
}

/// The driver's handle of an event, from [`driver::Event::raw`].
fn event_handle(event: u64) -> CUevent {
    ptr::with_exposed_provenance_mut(event as usize)
}

impl driver::Event for Event {
    fn raw(&self) -> u64 {
        self.handle.expose_provenance() as u64
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: made in `new`, destroyed once.
            unsafe { (self.context.api.destroy_event)(self.handle) };
        }
    }
}

/// Memory of the host that every device of the driver copies from and to by itself. Cached, so that reading it is as fast as any other.
pub(super) struct PinnedMemory {
    context: Arc<Context>,
    pointer: *mut c_void,
    size_bytes: usize,
}

// SAFETY: plain bytes; who reads and writes when is their users' affair.
unsafe impl Send for PinnedMemory {}
// SAFETY: as above.
unsafe impl Sync for PinnedMemory {}

impl PinnedMemory {
    /// At least one byte, all zero.
    pub(super) fn new(context: &Arc<Context>, size_bytes: usize) -> Result<PinnedMemory, Error> {
        let mut pointer = ptr::null_mut();
        context.bind()?;
        let room = size_bytes.max(1);
        // Pinned for all contexts, since any device may copy from it.
        // SAFETY: the driver writes one pointer.
        let code = unsafe {
            (context.api.allocate_host)(&mut pointer, room, sys::CU_MEMHOSTALLOC_PORTABLE)
        };
        context.check(code, "pinning memory of the host")?;
        // SAFETY: the driver gave so many bytes.
        unsafe { pointer.cast::<u8>().write_bytes(0, room) };
        Ok(PinnedMemory {
            context: context.clone(),
            pointer,
            size_bytes,
        })
    }
}

impl driver::HostMemory for PinnedMemory {
    fn as_ptr(&self) -> *mut u8 {
        self.pointer.cast()
    }

    fn size_bytes(&self) -> usize {
        self.size_bytes
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: allocated in `new`, freed once; the driver waits for copies that use it.
            unsafe { (self.context.api.free_host)(self.pointer) };
        }
    }
}
