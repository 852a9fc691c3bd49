//! The C interface: the functions of `cuda.h` under their own names. Each checks its pointers and hands over.

use crate::codes::*;
use crate::log::{self, Argument};
use crate::world::{self, Settings, World};
use crate::{capture, execute::Op, exports, memory, modules, streams};
use gristmill_emulator::{
    LaunchConfig, Pixels, Swizzle, TENSOR_MAP_BYTES, TensorElement, TensorMap, encode_tensor_map,
};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

/// Handles of all kinds.
type Handle = usize;

fn give<T>(to: *mut T, value: T) -> Outcome {
    exports::give(to, value, INVALID_VALUE)
}

macro_rules! exports {
    ($($name:ident($($arg:ident: $ty:ty),* $(,)?) => $body:expr;)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($arg: $ty),*) -> Code {
            log::call(stringify!($name), &[$((stringify!($arg), $arg.number())),*]);
            exports::code(UNKNOWN, || $body)
        }
    )*};
}

exports! {
    cuInit(flags: c_uint) => if flags == 0 { world::init() } else { Err(INVALID_VALUE) };
    cuDriverGetVersion(version: *mut c_int) => match Settings::of_process()?.driver {
        0 => Err(STUB_LIBRARY),
        driver => give(version, driver),
    };
    cuGetErrorName(code: Code, text: *mut *const c_char) => give(text, modules::text_of(code).0.as_ptr().cast());
    cuGetErrorString(code: Code, text: *mut *const c_char) => give(text, error_string(code));

    cuDeviceGetCount(count: *mut c_int) => world::with(|w| give(count, w.gpus.len() as c_int));
    cuDeviceGet(device: *mut c_int, ordinal: c_int) => with_device(ordinal, |_, _| give(device, ordinal));
    cuDeviceGetName(name: *mut c_char, size: c_int, device: c_int) => with_device(device, |w, gpu| {
        let text = format!("emulated GPU {}", w.gpus[gpu].number);
        // SAFETY: the caller's promise: room for `size` bytes.
        unsafe { copy_text(&text, name, usize::try_from(size).unwrap_or(0)) }
    });
    cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) => with_device(device, |w, _| give(bytes, w.settings.memory_bytes));
    cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) => {
        with_device(device, |w, gpu| give(value, attribute_of(w, gpu, attribute)?))
    };
    cuDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int) => with_device(device, |w, gpu| {
        let other = usize::try_from(peer).ok().filter(|&p| p < w.gpus.len()).ok_or(INVALID_DEVICE)?;
        give(can, c_int::from(w.settings.peers && other != gpu))
    });

    cuDevicePrimaryCtxRetain(context: *mut Handle, device: c_int) => with_device(device, |w, gpu| {
        w.gpus[gpu].n_retained += 1;
        give(context, gpu + 1)
    });
    cuDevicePrimaryCtxRelease_v2(device: c_int) => with_device(device, |w, gpu| {
        let retained = &mut w.gpus[gpu].n_retained;
        *retained = retained.checked_sub(1).ok_or(INVALID_CONTEXT)?;
        Ok(())
    });
    cuCtxSetCurrent(context: Handle) => world::with(|w| {
        if context > w.gpus.len() {
            return Err(INVALID_CONTEXT);
        }
        world::set_current(context);
        Ok(())
    });
    cuCtxGetCurrent(context: *mut Handle) => give(context, world::current());
    cuCtxSynchronize() => world::until(|| world::with_context(|w, gpu| {
        w.finish_gpu(gpu);
        w.check(gpu)?;
        Ok(w.is_idle(gpu))
    }));
    cuCtxEnablePeerAccess(context: Handle, flags: c_uint) => world::with_context(|w, gpu| {
        let peer = context.checked_sub(1).filter(|&p| p < w.gpus.len() && p != gpu && flags == 0).ok_or(INVALID_VALUE)?;
        if !w.settings.peers {
            return Err(PEER_ACCESS_UNSUPPORTED);
        }
        if w.gpus[gpu].peers.insert(peer) { Ok(()) } else { Err(PEER_ACCESS_ALREADY_ENABLED) }
    });

    cuStreamCreate(stream: *mut Handle, _flags: c_uint) => give(stream, streams::create_stream()?);
    cuStreamDestroy_v2(stream: Handle) => streams::destroy_stream(stream);
    cuStreamSynchronize(stream: Handle) => streams::synchronize_stream(stream);
    cuStreamQuery(stream: Handle) => streams::query_stream(stream);
    cuStreamWaitEvent(stream: Handle, event: Handle, _flags: c_uint) => streams::wait(stream, event);
    cuLaunchHostFunc(stream: Handle, function: Option<unsafe extern "C" fn(*mut c_void)>, data: *mut c_void) => {
        let function = function.ok_or(INVALID_VALUE)?;
        world::with_stream(stream, |w, _| w.ask(stream, Op::Host { function, data: data.addr() }))
    };

    cuEventCreate(event: *mut Handle, _flags: c_uint) => give(event, streams::create_event()?);
    cuEventDestroy_v2(event: Handle) => streams::destroy_event(event);
    cuEventRecord(event: Handle, stream: Handle) => streams::record(event, stream);
    cuEventSynchronize(event: Handle) => streams::synchronize_event(event);
    cuEventQuery(event: Handle) => streams::query_event(event);
    cuEventElapsedTime(ms: *mut f32, start: Handle, end: Handle) => give(ms, streams::elapsed_ms(start, end)?);

    cuMemPoolCreate(pool: *mut Handle, properties: *const PoolProperties) => {
        // SAFETY: the caller's promise: properties, or null.
        let p = unsafe { properties.as_ref() }.ok_or(INVALID_VALUE)?;
        let gpu = usize::try_from(p.location_id).map_err(|_| INVALID_DEVICE)?;
        give(pool, memory::create_pool(gpu, p.max_bytes)?)
    };
    cuMemPoolDestroy(pool: Handle) => memory::destroy_pool(pool);
    cuMemPoolTrimTo(_pool: Handle, _keep_bytes: usize) => Ok(());
    cuMemPoolSetAttribute(pool: Handle, attribute: c_int, value: *const u64) => {
        // SAFETY: the caller's promise: the attributes that are taken here have 64 bits.
        let value = unsafe { value.as_ref() }.copied().ok_or(INVALID_VALUE)?;
        world::with(|w| {
            let pool = w.pools.get_mut(&pool).ok_or(INVALID_HANDLE)?;
            if attribute == POOL_RELEASE_THRESHOLD {
                pool.release_threshold = value;
            }
            Ok(())
        })
    };
    cuMemPoolGetAttribute(pool: Handle, attribute: c_int, value: *mut u64) => match attribute {
        POOL_USED_BYTES | POOL_RESERVED_BYTES => give(value, memory::used_bytes(pool)?),
        _ => Err(INVALID_VALUE),
    };
    cuMemPoolSetAccess(pool: Handle, _access: *const c_void, _count: usize) => {
        world::with(|w| if w.pools.contains_key(&pool) { Ok(()) } else { Err(INVALID_HANDLE) })
    };
    cuMemAlloc_v2(address: *mut u64, size_bytes: usize) => give(address, memory::allocate_at_once(size_bytes)?);
    cuMemFree_v2(address: u64) => memory::free_at_once(address);
    cuMemAllocFromPoolAsync(address: *mut u64, size_bytes: usize, pool: Handle, stream: Handle) => {
        give(address, memory::allocate(pool, size_bytes, stream)?)
    };
    cuMemFreeAsync(address: u64, stream: Handle) => memory::free(address, stream);
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize) => {
        let info = memory::info()?;
        give(free, info.0)?;
        give(total, info.1)
    };
    cuMemHostAlloc(pointer: *mut usize, size_bytes: usize, _flags: c_uint) => {
        give(pointer, memory::allocate_pinned(size_bytes)?)
    };
    cuMemFreeHost(pointer: usize) => memory::free_pinned(pointer);
    cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, size_bytes: usize, stream: Handle) => {
        memory::to_device(to, from.expose_provenance(), size_bytes, stream)
    };
    cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, size_bytes: usize, stream: Handle) => {
        memory::to_host(to.expose_provenance(), from, size_bytes, stream)
    };
    cuMemcpyDtoDAsync_v2(to: u64, from: u64, size_bytes: usize, stream: Handle) => {
        memory::copy(to, from, size_bytes, stream)
    };
    cuMemcpyPeerAsync(to: u64, to_context: Handle, from: u64, from_context: Handle, size_bytes: usize, stream: Handle) => {
        let gpu = |context: Handle| context.checked_sub(1).ok_or(INVALID_CONTEXT);
        memory::copy_peer((gpu(to_context)?, to), (gpu(from_context)?, from), size_bytes, stream)
    };
    cuMemsetD8Async(to: u64, value: u8, size_bytes: usize, stream: Handle) => memory::fill(to, value, size_bytes, stream);

    cuModuleLoadDataEx(module: *mut Handle, image: *const c_void, n: c_uint, options: *const c_int, values: *const *mut c_void) => {
        // SAFETY: the caller's promise: an image, and `n` options with their values.
        unsafe { load_module(module, image, n as usize, options, values) }
    };
    cuModuleUnload(module: Handle) => modules::unload(module);
    cuModuleGetFunction(function: *mut Handle, module: Handle, name: *const c_char) => {
        // SAFETY: the caller's promise: a NUL-terminated name.
        let name = unsafe { CStr::from_ptr(name) }.to_str().map_err(|_| NOT_FOUND)?;
        give(function, modules::function(module, name)?)
    };
    cuFuncSetAttribute(function: Handle, attribute: c_int, value: c_int) => match attribute {
        FUNCTION_MAX_DYNAMIC_SHARED => modules::allow_shared(function, usize::try_from(value).map_err(|_| INVALID_VALUE)?),
        _ => Ok(()),
    };
    cuLaunchKernel(
        function: Handle, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint, shared: c_uint,
        stream: Handle, params: *const *const c_void, extra: *const *const c_void,
    ) => {
        let config = LaunchConfig {
            grid: [gx, gy, gz],
            block: [bx, by, bz],
            dynamic_shared_bytes: shared as usize,
            ..LaunchConfig::default()
        };
        if !extra.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller's promise: an argument for every parameter.
        unsafe { modules::launch(function, config, params, stream) }
    };

    cuStreamBeginCapture_v2(stream: Handle, _mode: c_int) => capture::begin(stream);
    cuStreamEndCapture(stream: Handle, graph: *mut Handle) => give(graph, capture::end(stream)?);
    cuStreamIsCapturing(stream: Handle, status: *mut c_int) => give(status, c_int::from(capture::is_capturing(stream)?));
    cuGraphInstantiateWithFlags(executable: *mut Handle, graph: Handle, _flags: u64) => {
        give(executable, capture::instantiate(graph)?)
    };
    cuGraphUpload(_graph: Handle, _stream: Handle) => Ok(());
    cuGraphLaunch(graph: Handle, stream: Handle) => capture::launch(graph, stream);
    cuGraphExecDestroy(graph: Handle) => capture::destroy(graph);
    cuGraphDestroy(graph: Handle) => capture::destroy(graph);

    cuTensorMapEncodeTiled(
        map: *mut [u8; TENSOR_MAP_BYTES], element: c_int, rank: c_uint, address: u64, sizes: *const u64, strides: *const u64,
        tile: *const c_uint, steps: *const c_uint, interleave: c_int, swizzle: c_int, _promotion: c_int, fill: c_int,
    ) => {
        if !(1..=5).contains(&rank) || interleave != 0 {
            return Err(INVALID_VALUE);
        }
        let rank = rank as usize;
        // SAFETY: the caller's promise: `rank` sizes, sides and steps, and one stride less.
        let (sizes, strides, tile, steps) = unsafe {
            (list(sizes, rank), list(strides, rank - 1), list(tile, rank), list(steps, rank))
        };
        let (element, swizzle) = (element_of(element)?, swizzle_of(swizzle)?);
        if steps.iter().any(|&s| s != 1) {
            return Err(INVALID_VALUE);
        }
        let made =
            TensorMap { element, address, sizes, strides_bytes: strides, tile, swizzle, fills_with_nan: fill != 0, pixels: None };
        give(map, encode_tensor_map(&made).map_err(|_| INVALID_VALUE)?)
    };
    cuTensorMapEncodeIm2col(
        map: *mut [u8; TENSOR_MAP_BYTES], element: c_int, rank: c_uint, address: u64, sizes: *const u64, strides: *const u64,
        lower: *const c_int, upper: *const c_int, channels: c_uint, n_pixels: c_uint, steps: *const c_uint, interleave: c_int,
        swizzle: c_int, _promotion: c_int, fill: c_int,
    ) => {
        if !(3..=5).contains(&rank) || interleave != 0 {
            return Err(INVALID_VALUE);
        }
        let rank = rank as usize;
        // SAFETY: the caller's promise: `rank` sizes and steps, one stride less, and corners of two
        // axes less.
        let (sizes, strides, lower, upper, steps) = unsafe {
            (list(sizes, rank), list(strides, rank - 1), list(lower, rank - 2), list(upper, rank - 2), list(steps, rank))
        };
        let (element, swizzle) = (element_of(element)?, swizzle_of(swizzle)?);
        // The step along the channels has no meaning; images are not skipped.
        if steps[rank - 1] != 1 {
            return Err(INVALID_VALUE);
        }
        let pixels = Some(Pixels { lower, upper, steps: steps[1..rank - 1].to_vec() });
        let tile = vec![channels, n_pixels];
        let made =
            TensorMap { element, address, sizes, strides_bytes: strides, tile, swizzle, fills_with_nan: fill != 0, pixels };
        give(map, encode_tensor_map(&made).map_err(|_| INVALID_VALUE)?)
    };
}

fn element_of(code: c_int) -> Outcome<TensorElement> {
    let at = usize::try_from(code).map_err(|_| INVALID_VALUE)?;
    ELEMENTS.get(at).copied().ok_or(INVALID_VALUE)
}

fn swizzle_of(code: c_int) -> Outcome<Swizzle> {
    let swizzles = [Swizzle::None, Swizzle::B32, Swizzle::B64, Swizzle::B128];
    let at = usize::try_from(code).map_err(|_| INVALID_VALUE)?;
    swizzles.get(at).copied().ok_or(INVALID_VALUE)
}

/// `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`.
const POOL_RELEASE_THRESHOLD: c_int = 4;
/// `CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT`.
const POOL_RESERVED_BYTES: c_int = 5;
/// `CU_MEMPOOL_ATTR_USED_MEM_CURRENT`.
const POOL_USED_BYTES: c_int = 7;
/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
const FUNCTION_MAX_DYNAMIC_SHARED: c_int = 8;
/// `CU_JIT_ERROR_LOG_BUFFER` and `.._SIZE_BYTES`.
const JIT_ERROR_LOG: (c_int, c_int) = (5, 6);

/// Elements in the order of `CUtensorMapDataType`; those that are flushed or rounded are copied as their bits are.
const ELEMENTS: [TensorElement; 13] = [
    TensorElement::U8,
    TensorElement::U16,
    TensorElement::U32,
    TensorElement::S32,
    TensorElement::U64,
    TensorElement::S64,
    TensorElement::F16,
    TensorElement::F32,
    TensorElement::F64,
    TensorElement::Bf16,
    TensorElement::F32,
    TensorElement::F32,
    TensorElement::F32,
];

/// `CUmemPoolProps`, as far as it is used.
#[repr(C)]
struct PoolProperties {
    allocation_type: c_int,
    handle_types: c_int,
    location_type: c_int,
    location_id: c_int,
    security: *mut c_void,
    max_bytes: usize,
}

fn with_device<T>(device: c_int, call: impl FnOnce(&mut World, usize) -> Outcome<T>) -> Outcome<T> {
    world::with(|world| {
        let gpu = usize::try_from(device)
            .ok()
            .filter(|&d| d < world.gpus.len())
            .ok_or(INVALID_DEVICE)?;
        call(world, gpu)
    })
}

fn attribute_of(world: &World, gpu: usize, attribute: c_int) -> Outcome<c_int> {
    Ok(match attribute {
        // Threads per block, warp, multiprocessors, asynchronous engines, unified addressing.
        1 => 1024,
        10 => 32,
        16 => 16,
        40 => 2,
        41 => 1,
        75 => world.settings.capability / 10,
        76 => world.settings.capability % 10,
        // Shared memory per multiprocessor, and per block when asked for.
        81 => 228 << 10,
        97 => world.gpus[gpu].device.limits().shared_bytes_per_block as c_int,
        // Pools.
        115 => c_int::from(world.settings.pools),
        _ => return Err(INVALID_VALUE),
    })
}

/// Description of a result; for the last fault, the emulator's message.
fn error_string(code: Code) -> *const c_char {
    let said = world::with(|w| {
        let own = w
            .fault
            .as_ref()
            .filter(|(c, _)| *c == code)
            .map(|(_, text)| text.clone());
        // Callers keep the pointer: as long as the process lives.
        Ok(own.map(|text| text.into_raw().cast_const()))
    });
    said.ok()
        .flatten()
        .unwrap_or(modules::text_of(code).1.as_ptr().cast())
}

/// # Safety
///
/// `list` is the address of `n` values.
unsafe fn list<T: Copy>(list: *const T, n: usize) -> Vec<T> {
    // SAFETY: the caller's promise.
    (0..n).map(|i| unsafe { *list.add(i) }).collect()
}

/// Writes text and a NUL, cut to the room that there is.
///
/// # Safety
///
/// `to` has `size` bytes.
unsafe fn copy_text(text: &str, to: *mut c_char, size: usize) -> Outcome {
    let n = text.len().min(size.checked_sub(1).ok_or(INVALID_VALUE)?);
    // SAFETY: `n` is less than the caller's `size`.
    unsafe {
        to.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), n);
        to.add(n).write(0);
    }
    Ok(())
}

/// # Safety
///
/// `image` is machine code or NUL-terminated text; there are `n` options with values.
unsafe fn load_module(
    module: *mut Handle,
    image: *const c_void,
    n: usize,
    options: *const c_int,
    values: *const *mut c_void,
) -> Outcome {
    // SAFETY: the caller's promise.
    match unsafe { modules::load(image.cast()) } {
        Ok(handle) => give(module, handle),
        Err((code, text)) => {
            // SAFETY: the caller's promise.
            let (options, values) = unsafe { (list(options, n), list(values, n)) };
            let value = |name: c_int| options.iter().position(|o| *o == name).map(|i| values[i]);
            if let (Some(log), Some(size)) = (value(JIT_ERROR_LOG.0), value(JIT_ERROR_LOG.1)) {
                // SAFETY: the caller's promise: a buffer of the stated size.
                unsafe { copy_text(&text, log.cast(), size.addr())? };
            }
            Err(code)
        }
    }
}
