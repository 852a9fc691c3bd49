//! A GPU as the executor drives it: streams, a pool of memory, copies.

use super::api::Api;
use super::blas::{Blas, CudaProduct};
use super::code::LoadedCode;
use super::context::{Context, Event, OUT_OF_MEMORY, PinnedMemory, Stream, record};
use super::nccl::Clique;
use super::ring::Ring;
use crate::driver::{
    self, Arrival, DeviceCode, Driver, Group, HostMemory, LoadedProduct, Peer, Queue, Replay,
    Stamps,
};
use crate::dtype::DType;
use crate::error::{Error, ErrorKind};
use crate::gpu::{EncodedTensorMap, GpuCode, Pixels, Swizzle, TENSOR_MAP_BYTES, TensorMap};
use crate::product::Product;
use crate::sync::lock;
use cudarc::driver::sys::{self, CUgraph, CUgraphExec, CUmemPool_attribute, CUmemoryPool};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// Options of a device.
#[derive(Clone, Copy, Debug, Default)]
pub struct Settings {
    /// Most bytes that may be allocated; no limit but the device's when `None`.
    pub limit_bytes: Option<usize>,
    /// Wait for each launch, so that a fault names its kernel. Slow.
    pub checks: bool,
}

/// A CUDA device, or a part of one: it has streams and a pool of its own, so that several of them share a device.
///
/// One stream computes, one copies each way. Memory comes from a pool that grows as it is asked and gives nothing back to the driver until
/// this is dropped; of a device without pools, from the driver, which waits for the device each time.
pub struct CudaGpu {
    streams: Arc<Streams>,
    pool: Pool,
    ring: Mutex<Ring>,
    /// Opened when a product asks for it.
    blas: Mutex<Option<Arc<Blas>>>,
    settings: Settings,
}

/// The queues of a device: one set that works, and another for requests that a thread makes while they are captured. So requests of other threads are
/// carried out meanwhile and do not get into the graph.
pub(super) struct Streams {
    pub(super) context: Arc<Context>,
    working: Queues,
    captured: Queues,
    /// Held during a capture.
    capturing: Mutex<()>,
}

thread_local! {
    /// Address of the [`Streams`] for which this thread's requests are captured; 0 for none.
    static CAPTURES: Cell<usize> = const { Cell::new(0) };
}

impl Streams {
    fn new(context: Arc<Context>) -> Result<Streams, Error> {
        let (working, captured) = (Queues::new(&context)?, Queues::new(&context)?);
        Ok(Streams {
            context,
            working,
            captured,
            capturing: Mutex::new(()),
        })
    }

    /// The queues that a request of this thread goes into.
    fn queues(&self) -> &Queues {
        if CAPTURES.get() == ptr::from_ref(self).addr() {
            &self.captured
        } else {
            &self.working
        }
    }

    /// The stream that computes.
    pub(super) fn compute(&self) -> &Stream {
        &self.queues().compute
    }

    /// Calls `ask` while this thread's requests go into the queues for captures. Captures take turns.
    fn while_captured<T>(&self, ask: impl FnOnce(&Queues) -> T) -> T {
        /// Restores the queues of before, however `ask` ends.
        struct RestoreQueues(usize);
        impl Drop for RestoreQueues {
            fn drop(&mut self) {
                CAPTURES.set(self.0);
            }
        }
        let _turn = lock(&self.capturing);
        let _before = RestoreQueues(CAPTURES.replace(ptr::from_ref(self).addr()));
        ask(&self.captured)
    }
}

/// One stream computes, one copies each way.
struct Queues {
    compute: Stream,
    inward: Stream,
    outward: Stream,
    /// Position of each queue when another has to wait for it: computing, in, out.
    marks: [Event; 3],
}

impl Queues {
    fn new(context: &Arc<Context>) -> Result<Queues, Error> {
        let stream = || Stream::new(context);
        let mark = || Event::new(context);
        Ok(Queues {
            compute: stream()?,
            inward: stream()?,
            outward: stream()?,
            marks: [mark()?, mark()?, mark()?],
        })
    }

    fn of(&self, queue: Queue) -> &Stream {
        match queue {
            Queue::Compute => &self.compute,
            Queue::In => &self.inward,
            Queue::Out => &self.outward,
        }
    }

    /// Makes the copying queue wait for the one that computes.
    fn fork(&self, queue: Queue) -> Result<&Stream, Error> {
        self.marks[0].record(&self.compute)?;
        let stream = self.of(queue);
        stream.wait(driver::Event::raw(&self.marks[0]))?;
        Ok(stream)
    }

    /// Makes the queue that computes wait for the copies.
    fn join(&self) -> Result<(), Error> {
        for (queue, mark) in [(Queue::In, &self.marks[1]), (Queue::Out, &self.marks[2])] {
            mark.record(self.of(queue))?;
            self.compute.wait(driver::Event::raw(mark))?;
        }
        Ok(())
    }
}

/// A stream-ordered pool.
struct Pool {
    context: Arc<Context>,
    /// Null where the device has no pools.
    handle: CUmemoryPool,
    state: Mutex<Allocations>,
}

#[derive(Default)]
struct Allocations {
    sizes: BTreeMap<u64, usize>,
    used_bytes: usize,
}

// SAFETY: the handle may be used from any thread.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl Pool {
    fn new(context: &Arc<Context>) -> Result<Pool, Error> {
        let mut handle = ptr::null_mut();
        if !context.device.has_pools {
            return Ok(Pool {
                context: context.clone(),
                handle,
                state: Mutex::default(),
            });
        }
        // SAFETY: a struct of numbers and pointers, for which zero is the default.
        let mut properties: sys::CUmemPoolProps = unsafe { std::mem::zeroed() };
        properties.allocType = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.location = location(context.ordinal);
        context.bind()?;
        // SAFETY: the driver reads the properties and writes one handle.
        let code = unsafe { (context.api.create_pool)(&mut handle, &properties) };
        context.check(code, "making a pool of memory")?;
        let pool = Pool {
            context: context.clone(),
            handle,
            state: Mutex::default(),
        };
        // Keep freed memory in the pool: a run allocates nothing, and the next model finds it.
        let mut threshold = u64::MAX;
        let attribute = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD as c_int;
        // SAFETY: the attribute has 64 bits.
        let code = unsafe {
            (context.api.set_pool_attribute)(handle, attribute, (&raw mut threshold).cast())
        };
        context.check(code, "setting the pool's threshold")?;
        Ok(pool)
    }

    fn lock(&self) -> MutexGuard<'_, Allocations> {
        lock(&self.state)
    }

    /// Lets another device copy to the memory of this pool. Memory from elsewhere is copied to without that, perhaps through the host.
    fn open_to(&self, ordinal: u32) -> bool {
        if self.handle.is_null() {
            return true;
        }
        let flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let access = sys::CUmemAccessDesc {
            location: location(ordinal),
            flags,
        };
        // SAFETY: the driver reads one description.
        unsafe { (self.context.api.set_pool_access)(self.handle, &access, 1) == 0 }
    }
}

fn location(ordinal: u32) -> sys::CUmemLocation {
    sys::CUmemLocation {
        type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        __bindgen_anon_1: sys::CUmemLocation_st__bindgen_ty_1 {
            id: ordinal as c_int,
        },
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if !self.handle.is_null() && self.context.bind().is_ok() {
            // SAFETY: made in `new`, destroyed once; its memory goes when the last allocation is given back.
            unsafe { (self.context.api.destroy_pool)(self.handle) };
        }
    }
}

impl CudaGpu {
    /// A device by the driver's number. Errors with `Unsupported` when it is not there.
    pub fn open(ordinal: u32, settings: Settings) -> Result<CudaGpu, Error> {
        let context = Context::open(ordinal)?;
        let gpu = CudaGpu {
            pool: Pool::new(&context)?,
            ring: Mutex::new(Ring::new(&context)?),
            blas: Mutex::default(),
            streams: Arc::new(Streams::new(context)?),
            settings,
        };
        gpu.open_to_peers()?;
        Ok(gpu)
    }

    /// The library of products on this device.
    fn blas(&self) -> Result<Arc<Blas>, Error> {
        let mut blas = lock(&self.blas);
        if let Some(blas) = &*blas {
            return Ok(blas.clone());
        }
        let opened = Arc::new(Blas::new(self.context())?);
        *blas = Some(opened.clone());
        Ok(opened)
    }

    fn context(&self) -> &Arc<Context> {
        &self.streams.context
    }

    fn lock_ring(&self) -> MutexGuard<'_, Ring> {
        lock(&self.ring)
    }

    /// Lets all devices that can write to the pool do so. Those that cannot get at it through the host.
    fn open_to_peers(&self) -> Result<(), Error> {
        let context = self.context();
        let mut n = 0;
        // SAFETY: the driver writes one number.
        let code = unsafe { (context.api.device_count)(&mut n) };
        context.check(code, "counting devices")?;
        for other in (0..n as u32).filter(|&o| o != context.ordinal) {
            let mut can = 0;
            // SAFETY: the driver writes one number.
            let code = unsafe {
                (context.api.can_access_peer)(&mut can, other as c_int, context.ordinal as c_int)
            };
            if code == 0 && can != 0 {
                self.pool.open_to(other);
            }
        }
        Ok(())
    }

    fn out_of_memory(&self, size_bytes: usize, used_bytes: usize) -> Error {
        let (mut free, mut total) = (0, 0);
        let context = self.context();
        // SAFETY: the driver writes two numbers.
        let known = context.bind().is_ok()
            && unsafe { (context.api.memory_info)(&mut free, &mut total) } == 0;
        let state = if known {
            format!("{free} of its {total} bytes are free")
        } else {
            "its memory is used up".into()
        };
        let limit = self
            .settings
            .limit_bytes
            .map(|l| format!(", the limit is {l}"))
            .unwrap_or_default();
        let message = format!(
            "{}: {size_bytes} bytes cannot be allocated: {used_bytes} are in use here{limit}, and {state}",
            self.describe()
        );
        Error::new(ErrorKind::OutOfMemory, message)
    }

    /// Asks the pool, again after it gave back its unused memory; or the driver where there is none. The error is the driver's.
    fn allocate_here(&self, size_bytes: usize) -> Result<u64, Error> {
        let context = self.context();
        let mut address = 0;
        // SAFETY: the driver writes one address.
        let mut ask = || unsafe {
            match self.pool.handle.is_null() {
                true => (context.api.allocate_at_once)(&mut address, size_bytes),
                false => (context.api.allocate)(
                    &mut address,
                    size_bytes,
                    self.pool.handle,
                    self.streams.compute().handle,
                ),
            }
        };
        let mut code = ask();
        if code == OUT_OF_MEMORY && !self.pool.handle.is_null() && self.finish().is_ok() {
            // SAFETY: the pool lives.
            unsafe { (context.api.trim_pool)(self.pool.handle, 0) };
            code = ask();
        }
        context.check(code, "allocating").map(|()| address)
    }
}

impl Driver for CudaGpu {
    fn describe(&self) -> String {
        let device = &self.context().device;
        let (major, minor) = device.compute_capability;
        format!("{}, sm_{major}{minor}", device.name)
    }

    fn allocate(&self, size_bytes: usize) -> Result<u64, Error> {
        self.context().bind()?;
        let mut allocated = self.pool.lock();
        let used_bytes = allocated.used_bytes;
        let fits = |limit: usize| {
            used_bytes
                .checked_add(size_bytes)
                .is_some_and(|sum| sum <= limit)
        };
        if !self.settings.limit_bytes.is_none_or(fits) {
            return Err(self.out_of_memory(size_bytes, used_bytes));
        }
        let address = self.allocate_here(size_bytes).map_err(|e| match e.kind() {
            ErrorKind::OutOfMemory => self.out_of_memory(size_bytes, used_bytes),
            _ => e,
        })?;
        // The memory is there in the order of the queue that computes, from now on for the copies as well.
        [Queue::In, Queue::Out]
            .into_iter()
            .try_for_each(|queue| self.streams.queues().fork(queue).map(drop))?;
        allocated.used_bytes += size_bytes;
        allocated.sizes.insert(address, size_bytes);
        Ok(address)
    }

    fn free(&self, address: u64) {
        let mut allocated = self.pool.lock();
        if let Some(size_bytes) = allocated.sizes.remove(&address) {
            allocated.used_bytes -= size_bytes;
        }
        // When the device is lost its memory is as well.
        if self.pool.handle.is_null() {
            if self.finish().is_ok() {
                // SAFETY: the driver gave the address, and it is given back once, when nothing uses it.
                unsafe { (self.context().api.free_at_once)(address) };
            }
        } else if self.streams.queues().join().is_ok() {
            // SAFETY: the pool gave the address, and it is given back once, after all copies.
            unsafe { (self.context().api.free)(address, self.streams.compute().handle) };
        }
    }

    fn write(&self, to: u64, bytes: &[u8]) -> Result<(), Error> {
        self.lock_ring().write(self.streams.compute(), to, bytes)
    }

    fn read(&self, from: u64, bytes: &mut [u8]) -> Result<(), Error> {
        self.lock_ring().read(self.streams.compute(), from, bytes)
    }

    fn copy(&self, from: u64, to: u64, size_bytes: usize) -> Result<(), Error> {
        copy(self.streams.compute(), from, to, size_bytes)
    }

    fn encode(&self, map: &TensorMap, buffer: u64) -> Result<EncodedTensorMap, Error> {
        let context = self.context();
        let mut encoded = EncodedTensorMap([0; TENSOR_MAP_BYTES]);
        if let Some(problem) = map.problem(u64::MAX) {
            return Err(Error::internal(format!("{map:?}: {problem}")));
        }
        let (element, address) = (element(map.dtype), buffer.saturating_add(map.offset_bytes));
        let (rank, steps) = (map.sizes.len() as u32, map.steps());
        let (sizes, strides, steps) = (
            map.sizes.as_ptr(),
            map.strides_bytes.as_ptr(),
            steps.as_ptr(),
        );
        let (tile, swizzle) = (&map.tile, swizzle(map.swizzle));
        let promotion = sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B as c_int;
        let (api, to) = (&context.api, &mut encoded);
        context.bind()?;
        // SAFETY: the driver writes one map, and reads `rank` sizes and steps, one stride less, and
        // as many sides, or two corners of the spatial axes: a map without problems has them.
        #[rustfmt::skip]
        let code = unsafe {
            match &map.pixels {
                None => (api.encode_tensor_map)(
                    to, element, rank, address, sizes, strides, tile.as_ptr(), steps, 0, swizzle, promotion, 0,
                ),
                Some(Pixels { lower, upper, .. }) => (api.encode_pixel_map)(
                    to, element, rank, address, sizes, strides, lower.as_ptr(), upper.as_ptr(), tile[0], tile[1],
                    steps, 0, swizzle, promotion, 0,
                ),
            }
        };
        match code {
            0 => Ok(encoded),
            code => Err(Error::internal(format!(
                "{map:?}: {}",
                context.api.text(code)
            ))),
        }
    }

    fn load(&self, code: &GpuCode) -> Result<Box<dyn DeviceCode>, Error> {
        Ok(Box::new(LoadedCode::new(
            self.streams.clone(),
            code,
            self.settings.checks,
        )?))
    }

    fn product(&self, product: &Product) -> Result<Box<dyn LoadedProduct>, Error> {
        Ok(Box::new(CudaProduct::new(
            self.streams.clone(),
            self.blas()?,
            product,
            self.settings.checks,
        )?))
    }

    fn pin(&self, size_bytes: usize) -> Result<Box<dyn HostMemory>, Error> {
        Ok(Box::new(PinnedMemory::new(self.context(), size_bytes)?))
    }

    fn event(&self) -> Result<Arc<dyn driver::Event>, Error> {
        Ok(Arc::new(Event::new(self.context())?))
    }

    fn wait(&self, queue: Queue, event: &dyn driver::Event) -> Result<(), Error> {
        if event.raw() == 0 {
            Ok(())
        } else {
            self.streams.queues().of(queue).wait(event.raw())
        }
    }

    unsafe fn send(
        &self,
        from: u64,
        to: &dyn HostMemory,
        event: &dyn driver::Event,
        arrival: Option<&Arrival>,
    ) -> Result<(), Error> {
        let stream = self.streams.queues().fork(Queue::Out)?;
        // SAFETY: the caller's promise: so many bytes that no one uses until the copy is done.
        let code = unsafe {
            (self.context().api.to_host)(to.as_ptr().cast(), from, to.size_bytes(), stream.handle)
        };
        self.context().check(code, "copying to the host")?;
        record(stream, event.raw())?;
        // SAFETY: the caller's promise.
        arrival.map_or(Ok(()), |arrival| unsafe { stream.call(arrival) })
    }

    fn receive_after_computing(&self) -> Result<(), Error> {
        self.streams.queues().fork(Queue::In).map(drop)
    }

    unsafe fn receive(
        &self,
        from: &dyn HostMemory,
        to: u64,
        event: &dyn driver::Event,
    ) -> Result<(), Error> {
        let stream = self.streams.queues().of(Queue::In);
        self.context().bind()?;
        // SAFETY: the caller's promise: so many bytes that no one changes until the copy is done.
        let code = unsafe {
            (self.context().api.to_device)(
                to,
                from.as_ptr().cast(),
                from.size_bytes(),
                stream.handle,
            )
        };
        self.context().check(code, "copying from the host")?;
        record(stream, event.raw())
    }

    fn unstage(
        &self,
        from: u64,
        to: u64,
        size_bytes: usize,
        event: &dyn driver::Event,
    ) -> Result<(), Error> {
        let stream = self.streams.queues().of(Queue::In);
        copy(stream, from, to, size_bytes)?;
        record(stream, event.raw())
    }

    fn peer(&self) -> Option<Peer> {
        let context = self.context();
        Some(Peer {
            ordinal: context.ordinal,
            context: context.handle.expose_provenance() as u64,
            compute: self.streams.compute().handle.expose_provenance() as u64,
        })
    }

    fn group(&self, ranks: &[Peer]) -> Result<Arc<dyn Group>, Error> {
        Ok(Arc::new(Clique::new(ranks, self.settings.checks)?))
    }

    fn reaches(&self, peer: Peer) -> bool {
        let context = self.context();
        let (mut can, from, to) = (0, context.ordinal as c_int, peer.ordinal as c_int);
        // Logical devices of one GPU always reach each other.
        // SAFETY: the driver writes one number.
        from == to || unsafe { (context.api.can_access_peer)(&mut can, from, to) == 0 && can != 0 }
    }

    fn push(
        &self,
        from: u64,
        peer: Peer,
        to: u64,
        size_bytes: usize,
        event: &dyn driver::Event,
    ) -> Result<(), Error> {
        let (context, stream) = (self.context(), self.streams.queues().fork(Queue::Out)?);
        let there = ptr::with_exposed_provenance_mut(peer.context as usize);
        if there == context.handle {
            // Logical devices of one GPU.
            copy(stream, from, to, size_bytes)?;
            return record(stream, event.raw());
        }
        // SAFETY: both contexts live; the executor gives addresses of buffers of this size, which are in use by this copy alone.
        let code = unsafe {
            (context.api.copy_peer)(to, there, from, context.handle, size_bytes, stream.handle)
        };
        context.check(code, "copying to another device")?;
        record(stream, event.raw())
    }

    fn stamps(&self, n: usize) -> Result<Option<Box<dyn Stamps>>, Error> {
        let events = (0..n)
            .map(|_| Event::timed(self.context()))
            .collect::<Result<_, Error>>()?;
        Ok(Some(Box::new(Timeline {
            streams: self.streams.clone(),
            events,
        })))
    }

    fn waits_for_kernels(&self) -> bool {
        self.settings.checks
    }

    fn check(&self) -> Result<(), Error> {
        self.streams.compute().check()
    }

    fn finish(&self) -> Result<(), Error> {
        let Queues {
            compute,
            inward,
            outward,
            ..
        } = self.streams.queues();
        [compute, inward, outward]
            .into_iter()
            .try_for_each(Stream::synchronize)
    }

    fn capture(
        &self,
        with_copies: bool,
        ask: &mut dyn FnMut() -> Result<(), Error>,
    ) -> Result<Option<Box<dyn Replay>>, Error> {
        if self.settings.checks {
            return Ok(None);
        }
        let graph = self.capture_graph(with_copies, ask)?;
        Ok(graph.map(|g| Box::new(g) as Box<dyn Replay>))
    }
}

/// Events with timing, for stamps of the stream that computes.
struct Timeline {
    streams: Arc<Streams>,
    events: Vec<Event>,
}

impl Stamps for Timeline {
    fn stamp(&self, i: usize) -> Result<(), Error> {
        self.events[i].record(self.streams.compute())
    }

    fn between(&self, from: usize, to: usize) -> Result<Duration, Error> {
        self.events[from].until(&self.events[to])
    }
}

/// The driver's name of a dtype. It has no bytes and short integers with a sign: only the bits are copied.
fn element(dtype: DType) -> c_int {
    use sys::CUtensorMapDataType as T;
    let element = match dtype {
        DType::U16 | DType::I16 => T::CU_TENSOR_MAP_DATA_TYPE_UINT16,
        DType::U32 => T::CU_TENSOR_MAP_DATA_TYPE_UINT32,
        DType::I32 => T::CU_TENSOR_MAP_DATA_TYPE_INT32,
        DType::U64 => T::CU_TENSOR_MAP_DATA_TYPE_UINT64,
        DType::I64 => T::CU_TENSOR_MAP_DATA_TYPE_INT64,
        DType::F16 => T::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        DType::F32 => T::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        DType::F64 => T::CU_TENSOR_MAP_DATA_TYPE_FLOAT64,
        DType::BF16 => T::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        // Of 8 bits.
        _ => T::CU_TENSOR_MAP_DATA_TYPE_UINT8,
    };
    element as c_int
}

fn swizzle(swizzle: Swizzle) -> c_int {
    use sys::CUtensorMapSwizzle as S;
    let swizzle = match swizzle {
        Swizzle::None => S::CU_TENSOR_MAP_SWIZZLE_NONE,
        Swizzle::B32 => S::CU_TENSOR_MAP_SWIZZLE_32B,
        Swizzle::B64 => S::CU_TENSOR_MAP_SWIZZLE_64B,
        Swizzle::B128 => S::CU_TENSOR_MAP_SWIZZLE_128B,
    };
    swizzle as c_int
}

fn copy(stream: &Stream, from: u64, to: u64, size_bytes: usize) -> Result<(), Error> {
    if from == to || size_bytes == 0 {
        return Ok(());
    }
    stream.context.bind()?;
    // SAFETY: the executor gives addresses of buffers of this size, apart from each other, that no one else uses.
    let code = unsafe { (stream.context.api.copy)(to, from, size_bytes, stream.handle) };
    stream.context.check(code, "copying on the device")
}

impl CudaGpu {
    /// `None` when the driver refuses to capture or to make a graph of it.
    fn capture_graph(
        &self,
        with_copies: bool,
        ask: &mut dyn FnMut() -> Result<(), Error>,
    ) -> Result<Option<Graph>, Error> {
        let api = self.context().api;
        self.context().bind()?;
        let graph = self
            .streams
            .while_captured(|queues| capture(api, queues, with_copies, ask));
        if graph.is_null() {
            return Ok(None);
        }
        let mut executable: CUgraphExec = ptr::null_mut();
        // SAFETY: the graph lives until it is destroyed here; the driver writes one handle.
        let made = unsafe {
            let made = (api.instantiate_graph)(&mut executable, graph, 0);
            (api.destroy_graph)(graph);
            made
        };
        Ok((made == 0).then(|| Graph {
            streams: self.streams.clone(),
            executable,
        }))
    }
}

/// Graph of the requests that `ask` makes of these queues; null when they cannot be captured.
fn capture(
    api: &Api,
    queues: &Queues,
    with_copies: bool,
    ask: &mut dyn FnMut() -> Result<(), Error>,
) -> CUgraph {
    let mut graph: CUgraph = ptr::null_mut();
    let compute = &queues.compute;
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL as c_int;
    // SAFETY: the stream lives.
    if unsafe { (api.begin_capture)(compute.handle, mode) } != 0 {
        return graph;
    }
    // The queues for copies take part from the start, so that their first requests belong to the capture.
    let fork = |queue| {
        if with_copies {
            queues.fork(queue).map(drop)
        } else {
            Ok(())
        }
    };
    let asked = fork(Queue::In)
        .and_then(|()| fork(Queue::Out))
        .and_then(|()| ask());
    let asked = asked.and_then(|()| if with_copies { queues.join() } else { Ok(()) });
    // SAFETY: the stream is being captured; the driver writes one handle.
    let ended = unsafe { (api.end_capture)(compute.handle, &mut graph) };
    if asked.is_err() && ended == 0 && !graph.is_null() {
        // SAFETY: the graph was made here, and nothing has it.
        unsafe { (api.destroy_graph)(graph) };
        graph = ptr::null_mut();
    }
    if ended == 0 { graph } else { ptr::null_mut() }
}

/// A captured graph, ready to be launched.
struct Graph {
    streams: Arc<Streams>,
    executable: CUgraphExec,
}

// SAFETY: launches are asked for by one thread at a time, under the executor's lock; the handle belongs to no thread.
unsafe impl Send for Graph {}
// SAFETY: as above.
unsafe impl Sync for Graph {}

impl Replay for Graph {
    fn start(&self) -> Result<(), Error> {
        let context = &self.streams.context;
        context.bind()?;
        // SAFETY: graph and stream live.
        let code =
            unsafe { (context.api.launch_graph)(self.executable, self.streams.compute().handle) };
        context.check(code, "launching a graph")
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.streams.context.bind().is_ok() {
            // SAFETY: made in `capture_graph`, destroyed once.
            unsafe { (self.streams.context.api.destroy_executable)(self.executable) };
        }
    }
}
