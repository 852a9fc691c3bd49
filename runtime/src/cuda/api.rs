//! The CUDA driver's C interface as far as it is used, resolved from a library that is opened at run time.
//!
//! Types, constants and the open library are cudarc's. Functions are not: cudarc's panic when a symbol is missing, and take results for
//! Rust enums, which a newer driver's codes are not. Here a result is a number, and all symbols are looked up once.

use super::bindings::{Bindings, file_of};
use super::library::{SystemLibrary, functions};
use crate::gpu::EncodedTensorMap;
use cudarc::driver::sys::{
    self, CUcontext, CUdeviceptr, CUevent, CUfunction, CUgraph, CUgraphExec, CUmodule, CUstream,
};
use std::ffi::{OsString, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

/// `CUresult`: 0 is success.
pub(super) type Code = c_int;
/// `CUmemoryPool`.
pub(super) type Pool = sys::CUmemoryPool;
/// `CUhostFn`.
pub(super) type HostFunction = unsafe extern "C" fn(*mut c_void);

const DRIVER: SystemLibrary = SystemLibrary {
    title: "CUDA driver",
    variable: "GRISTMILL_CUDA",
    names: if cfg!(windows) {
        &["nvcuda.dll"]
    } else {
        // cudarc's order: under WSL, they are two files.
        &["libcuda.so", "libcuda.so.1"]
    },
};

const BINDINGS: Bindings = Bindings {
    title: "the CUDA driver",
    names: &["cuda", "nvcuda"],
    symbol: "cuInit",
    culib: sys::culib,
};

/// The first version with all of the functions, as [`Api::version`] gives it.
const LEAST: (u32, u32) = (12, 0);

/// `CUDA_ERROR_STUB_LIBRARY`: the library is for linkers on machines without a driver.
const STUB: Code = 34;

functions! {
    /// The functions of the driver.
    pub(super) struct Api, missing: missing;
    init = "cuInit" fn(c_uint) -> Code;
    driver_version = "cuDriverGetVersion" fn(*mut c_int) -> Code;
    error_name = "cuGetErrorName" fn(Code, *mut *const c_char) -> Code;
    error_string = "cuGetErrorString" fn(Code, *mut *const c_char) -> Code;
    device_count = "cuDeviceGetCount" fn(*mut c_int) -> Code;
    device = "cuDeviceGet" fn(*mut c_int, c_int) -> Code;
    device_name = "cuDeviceGetName" fn(*mut c_char, c_int, c_int) -> Code;
    total_memory = "cuDeviceTotalMem_v2" fn(*mut usize, c_int) -> Code;
    device_attribute = "cuDeviceGetAttribute" fn(*mut c_int, c_int, c_int) -> Code;
    can_access_peer = "cuDeviceCanAccessPeer" fn(*mut c_int, c_int, c_int) -> Code;
    retain_context = "cuDevicePrimaryCtxRetain" fn(*mut CUcontext, c_int) -> Code;
    release_context = "cuDevicePrimaryCtxRelease_v2" fn(c_int) -> Code;
    set_context = "cuCtxSetCurrent" fn(CUcontext) -> Code;
    create_stream = "cuStreamCreate" fn(*mut CUstream, c_uint) -> Code;
    destroy_stream = "cuStreamDestroy_v2" fn(CUstream) -> Code;
    synchronize_stream = "cuStreamSynchronize" fn(CUstream) -> Code;
    query_stream = "cuStreamQuery" fn(CUstream) -> Code;
    wait_event = "cuStreamWaitEvent" fn(CUstream, CUevent, c_uint) -> Code;
    host_function = "cuLaunchHostFunc" fn(CUstream, HostFunction, *mut c_void) -> Code;
    create_event = "cuEventCreate" fn(*mut CUevent, c_uint) -> Code;
    destroy_event = "cuEventDestroy_v2" fn(CUevent) -> Code;
    record_event = "cuEventRecord" fn(CUevent, CUstream) -> Code;
    /// The first version, which every driver has: it gives the time of its callers' header.
    elapsed = "cuEventElapsedTime" fn(*mut f32, CUevent, CUevent) -> Code;
    query_event = "cuEventQuery" fn(CUevent) -> Code;
    synchronize_event = "cuEventSynchronize" fn(CUevent) -> Code;
    create_pool = "cuMemPoolCreate" fn(*mut Pool, *const sys::CUmemPoolProps) -> Code;
    destroy_pool = "cuMemPoolDestroy" fn(Pool) -> Code;
    trim_pool = "cuMemPoolTrimTo" fn(Pool, usize) -> Code;
    set_pool_attribute = "cuMemPoolSetAttribute" fn(Pool, c_int, *mut c_void) -> Code;
    set_pool_access = "cuMemPoolSetAccess" fn(Pool, *const sys::CUmemAccessDesc, usize) -> Code;
    allocate_at_once = "cuMemAlloc_v2" fn(*mut CUdeviceptr, usize) -> Code;
    free_at_once = "cuMemFree_v2" fn(CUdeviceptr) -> Code;
    allocate = "cuMemAllocFromPoolAsync" fn(*mut CUdeviceptr, usize, Pool, CUstream) -> Code;
    free = "cuMemFreeAsync" fn(CUdeviceptr, CUstream) -> Code;
    memory_info = "cuMemGetInfo_v2" fn(*mut usize, *mut usize) -> Code;
    allocate_host = "cuMemHostAlloc" fn(*mut *mut c_void, usize, c_uint) -> Code;
    free_host = "cuMemFreeHost" fn(*mut c_void) -> Code;
    to_device = "cuMemcpyHtoDAsync_v2" fn(CUdeviceptr, *const c_void, usize, CUstream) -> Code;
    to_host = "cuMemcpyDtoHAsync_v2" fn(*mut c_void, CUdeviceptr, usize, CUstream) -> Code;
    copy = "cuMemcpyDtoDAsync_v2" fn(CUdeviceptr, CUdeviceptr, usize, CUstream) -> Code;
    copy_peer = "cuMemcpyPeerAsync" fn(
        CUdeviceptr, CUcontext, CUdeviceptr, CUcontext, usize, CUstream,
    ) -> Code;
    load_module = "cuModuleLoadDataEx" fn(
        *mut CUmodule, *const c_void, c_uint, *mut c_int, *mut *mut c_void,
    ) -> Code;
    unload_module = "cuModuleUnload" fn(CUmodule) -> Code;
    function = "cuModuleGetFunction" fn(*mut CUfunction, CUmodule, *const c_char) -> Code;
    set_function_attribute = "cuFuncSetAttribute" fn(CUfunction, c_int, c_int) -> Code;
    /// Map, type, rank, address, sizes, strides, tile, element strides, interleave, swizzle, promotion, fill.
    encode_tensor_map = "cuTensorMapEncodeTiled" fn(
        *mut EncodedTensorMap, c_int, c_uint, CUdeviceptr, *const u64, *const u64, *const c_uint,
        *const c_uint, c_int, c_int, c_int, c_int,
    ) -> Code;
    /// Map, type, rank, address, sizes, strides, lower and upper corner, channels, pixels, element
    /// strides, then as above.
    encode_pixel_map = "cuTensorMapEncodeIm2col" fn(
        *mut EncodedTensorMap, c_int, c_uint, CUdeviceptr, *const u64, *const u64, *const c_int,
        *const c_int, c_uint, c_uint, *const c_uint, c_int, c_int, c_int, c_int,
    ) -> Code;
    launch = "cuLaunchKernel" fn(
        CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream,
        *mut *mut c_void, *mut *mut c_void,
    ) -> Code;
    begin_capture = "cuStreamBeginCapture_v2" fn(CUstream, c_int) -> Code;
    end_capture = "cuStreamEndCapture" fn(CUstream, *mut CUgraph) -> Code;
    instantiate_graph = "cuGraphInstantiateWithFlags" fn(*mut CUgraphExec, CUgraph, u64) -> Code;
    launch_graph = "cuGraphLaunch" fn(CUgraphExec, CUstream) -> Code;
    destroy_graph = "cuGraphDestroy" fn(CUgraph) -> Code;
    destroy_executable = "cuGraphExecDestroy" fn(CUgraphExec) -> Code;
}

fn missing(symbol: &str) -> String {
    if symbol == "cuInit" {
        return "no CUDA driver: the library that was opened as such has no cuInit".to_owned();
    }
    format!("the CUDA driver library lacks {symbol}; update the driver (12.0 or later is needed)")
}

/// The driver of this machine, opened and initialised once; or in words why there is none.
pub(super) fn get() -> Result<&'static Api, String> {
    static INITIALISED: OnceLock<Result<(), String>> = OnceLock::new();
    let api = opened()?;
    INITIALISED
        .get_or_init(|| initialise(api))
        .clone()
        .map(|()| api)
}

/// The driver, opened once, of which only its version may be asked: initialising it takes time.
pub(super) fn opened() -> Result<&'static Api, String> {
    static OPENED: OnceLock<Result<Api, String>> = OnceLock::new();
    OPENED
        .get_or_init(|| open(std::env::var_os(DRIVER.variable)))
        .as_ref()
        .map_err(String::clone)
}

fn initialise(api: &Api) -> Result<(), String> {
    // SAFETY: the first call but for the version, as `cuda.h` asks.
    let code = unsafe { (api.init)(0) };
    api.check(code, "cuInit")
}

fn open(file: Option<OsString>) -> Result<Api, String> {
    let own = DRIVER.open(file.filter(|f| !f.is_empty()))?;
    // SAFETY: a library of these names is the driver, and so is one that the user names as such.
    let version = unsafe { Api::resolve(own) }?.version()?;
    if version < LEAST {
        let (major, minor) = version;
        return Err(format!(
            "the CUDA driver is for CUDA {major}.{minor}; update it (12.0 or later is needed)"
        ));
    }
    let shared = BINDINGS.library(own);
    let shared = shared.map_err(|why| format!("no CUDA driver: {why}"))?;
    // SAFETY: the same library.
    unsafe { Api::resolve(shared) }
}

impl Api {
    /// Version of CUDA that the driver is for: `(13, 0)`.
    pub(super) fn version(&self) -> Result<(u32, u32), String> {
        let mut version = 0;
        // SAFETY: the driver writes one number.
        let code = unsafe { (self.driver_version)(&mut version) };
        self.check(code, "asking for the driver's version")?;
        let version = u32::try_from(version).unwrap_or(0);
        Ok((version / 1000, version % 1000 / 10))
    }

    /// Errors with the driver's words, unless the result is success.
    pub(super) fn check(&self, code: Code, what: &str) -> Result<(), String> {
        if code == 0 {
            return Ok(());
        }
        if code == STUB {
            let file = file_of(self.init as usize).unwrap_or_else(|| "libcuda.so".to_owned());
            return Err(format!(
                "no CUDA driver: {file} is a stub of the CUDA toolkit; remove its folder from the loader's paths"
            ));
        }
        let text = self.text(code);
        Err(format!(
            "the CUDA driver was found, but {what} failed: {text}"
        ))
    }

    /// Name and description of a result: `CUDA_ERROR_OUT_OF_MEMORY, out of memory`.
    pub(super) fn text(&self, code: Code) -> String {
        let ask = |f: unsafe extern "C" fn(Code, *mut *const c_char) -> Code| {
            let mut text = std::ptr::null();
            // SAFETY: the driver gives a NUL-terminated text of its own, or leaves null.
            unsafe {
                f(code, &mut text);
                (!text.is_null()).then(|| {
                    std::ffi::CStr::from_ptr(text)
                        .to_string_lossy()
                        .into_owned()
                })
            }
        };
        match (ask(self.error_name), ask(self.error_string)) {
            (Some(name), Some(text)) => format!("{name}, {text}"),
            _ => format!("CUDA error {code}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "looks for a shared library")]
    fn a_library_that_is_not_there_or_no_driver_is_an_answer() {
        let e = open(Some("libno-such-driver.so".into())).err().unwrap();
        assert!(
            e.starts_with("no CUDA driver: libno-such-driver.so was not found"),
            "{e}"
        );
        if cfg!(target_os = "linux") {
            let e = open(Some("libc.so.6".into())).err().unwrap();
            assert!(
                e.contains("no CUDA driver: ") && e.contains("has no cuInit"),
                "{e}"
            );
        }
    }
}
