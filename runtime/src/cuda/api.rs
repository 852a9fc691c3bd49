//! The CUDA driver's C interface as far as it is used, resolved from a library that is opened at run time.
//!
//! Types and constants are those of the cudarc bindings. Functions are not: those panic when a symbol is missing, and take results for Rust
//! enums, which a newer driver's codes are not. Here a result is a number, and all symbols are looked up once.

use crate::gpu::EncodedTensorMap;
use cudarc::driver::sys::{
    self, CUcontext, CUdeviceptr, CUevent, CUfunction, CUgraph, CUgraphExec, CUmodule, CUstream,
};
use libloading::Library;
use std::ffi::{OsString, c_char, c_int, c_uint, c_void};
use std::path::Path;
use std::sync::OnceLock;

/// `CUresult`: 0 is success.
pub(super) type Code = c_int;
/// `CUmemoryPool`.
pub(super) type Pool = sys::CUmemoryPool;
/// `CUhostFn`.
pub(super) type HostFunction = unsafe extern "C" fn(*mut c_void);

/// Names the driver's library, instead of the places where the system's loader looks.
const VARIABLE: &str = "GRISTMILL_CUDA";

/// What the loader is asked for.
const NAMES: &[&str] = if cfg!(windows) {
    &["nvcuda.dll"]
} else {
    &["libcuda.so.1", "libcuda.so"]
};

macro_rules! api {
    ($($(#[$doc:meta])* $field:ident = $symbol:literal fn($($ty:ty),*);)*) => {
        /// The functions of the driver.
        pub(super) struct Api {
            $($(#[$doc])* pub(super) $field: unsafe extern "C" fn($($ty),*) -> Code,)*
            _library: Library,
        }

        impl Api {
            /// Finds every function. The error names a symbol that is missing.
            ///
            /// # Safety
            /// The library is a CUDA driver: its symbols have the signatures of `cuda.h`.
            unsafe fn resolve(library: Library) -> Result<Api, String> {
                $(
                    // SAFETY: by contract the symbol has this signature.
                    let found = unsafe { library.get::<unsafe extern "C" fn($($ty),*) -> Code>($symbol) };
                    let $field = *found.map_err(|_| match $symbol {
                        "cuInit" => "no CUDA driver: the library that was opened as such has no cuInit".to_owned(),
                        symbol => format!("the CUDA driver library lacks {symbol}; update the driver (12.0 or later is needed)"),
                    })?;
                )*
                Ok(Api { $($field,)* _library: library })
            }
        }
    };
}

api! {
    init = "cuInit" fn(c_uint);
    driver_version = "cuDriverGetVersion" fn(*mut c_int);
    error_name = "cuGetErrorName" fn(Code, *mut *const c_char);
    error_string = "cuGetErrorString" fn(Code, *mut *const c_char);
    device_count = "cuDeviceGetCount" fn(*mut c_int);
    device = "cuDeviceGet" fn(*mut c_int, c_int);
    device_name = "cuDeviceGetName" fn(*mut c_char, c_int, c_int);
    total_memory = "cuDeviceTotalMem_v2" fn(*mut usize, c_int);
    device_attribute = "cuDeviceGetAttribute" fn(*mut c_int, c_int, c_int);
    can_access_peer = "cuDeviceCanAccessPeer" fn(*mut c_int, c_int, c_int);
    retain_context = "cuDevicePrimaryCtxRetain" fn(*mut CUcontext, c_int);
    release_context = "cuDevicePrimaryCtxRelease_v2" fn(c_int);
    set_context = "cuCtxSetCurrent" fn(CUcontext);
    create_stream = "cuStreamCreate" fn(*mut CUstream, c_uint);
    destroy_stream = "cuStreamDestroy_v2" fn(CUstream);
    synchronize_stream = "cuStreamSynchronize" fn(CUstream);
    query_stream = "cuStreamQuery" fn(CUstream);
    wait_event = "cuStreamWaitEvent" fn(CUstream, CUevent, c_uint);
    host_function = "cuLaunchHostFunc" fn(CUstream, HostFunction, *mut c_void);
    create_event = "cuEventCreate" fn(*mut CUevent, c_uint);
    destroy_event = "cuEventDestroy_v2" fn(CUevent);
    record_event = "cuEventRecord" fn(CUevent, CUstream);
    /// The first version, which every driver has: it gives the time of its callers' header.
    elapsed = "cuEventElapsedTime" fn(*mut f32, CUevent, CUevent);
    query_event = "cuEventQuery" fn(CUevent);
    synchronize_event = "cuEventSynchronize" fn(CUevent);
    create_pool = "cuMemPoolCreate" fn(*mut Pool, *const sys::CUmemPoolProps);
    destroy_pool = "cuMemPoolDestroy" fn(Pool);
    trim_pool = "cuMemPoolTrimTo" fn(Pool, usize);
    set_pool_attribute = "cuMemPoolSetAttribute" fn(Pool, c_int, *mut c_void);
    set_pool_access = "cuMemPoolSetAccess" fn(Pool, *const sys::CUmemAccessDesc, usize);
    allocate_at_once = "cuMemAlloc_v2" fn(*mut CUdeviceptr, usize);
    free_at_once = "cuMemFree_v2" fn(CUdeviceptr);
    allocate = "cuMemAllocFromPoolAsync" fn(*mut CUdeviceptr, usize, Pool, CUstream);
    free = "cuMemFreeAsync" fn(CUdeviceptr, CUstream);
    memory_info = "cuMemGetInfo_v2" fn(*mut usize, *mut usize);
    allocate_host = "cuMemHostAlloc" fn(*mut *mut c_void, usize, c_uint);
    free_host = "cuMemFreeHost" fn(*mut c_void);
    to_device = "cuMemcpyHtoDAsync_v2" fn(CUdeviceptr, *const c_void, usize, CUstream);
    to_host = "cuMemcpyDtoHAsync_v2" fn(*mut c_void, CUdeviceptr, usize, CUstream);
    copy = "cuMemcpyDtoDAsync_v2" fn(CUdeviceptr, CUdeviceptr, usize, CUstream);
    copy_peer = "cuMemcpyPeerAsync" fn(CUdeviceptr, CUcontext, CUdeviceptr, CUcontext, usize, CUstream);
    load_module = "cuModuleLoadDataEx" fn(*mut CUmodule, *const c_void, c_uint, *mut c_int, *mut *mut c_void);
    unload_module = "cuModuleUnload" fn(CUmodule);
    function = "cuModuleGetFunction" fn(*mut CUfunction, CUmodule, *const c_char);
    set_function_attribute = "cuFuncSetAttribute" fn(CUfunction, c_int, c_int);
    /// Map, type, rank, address, sizes, strides, tile, element strides, interleave, swizzle, promotion, fill.
    encode_tensor_map = "cuTensorMapEncodeTiled" fn(*mut EncodedTensorMap, c_int, c_uint, CUdeviceptr, *const u64, *const u64, *const c_uint, *const c_uint, c_int, c_int, c_int, c_int);
    launch = "cuLaunchKernel" fn(CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream, *mut *mut c_void, *mut *mut c_void);
    begin_capture = "cuStreamBeginCapture_v2" fn(CUstream, c_int);
    end_capture = "cuStreamEndCapture" fn(CUstream, *mut CUgraph);
    instantiate_graph = "cuGraphInstantiateWithFlags" fn(*mut CUgraphExec, CUgraph, u64);
    launch_graph = "cuGraphLaunch" fn(CUgraphExec, CUstream);
    destroy_graph = "cuGraphDestroy" fn(CUgraph);
    destroy_executable = "cuGraphExecDestroy" fn(CUgraphExec);
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
        .get_or_init(|| open(std::env::var_os(VARIABLE)))
        .as_ref()
        .map_err(String::clone)
}

fn initialise(api: &Api) -> Result<(), String> {
    // SAFETY: the first call but for the version, as `cuda.h` asks.
    match unsafe { (api.init)(0) } {
        0 => Ok(()),
        code => Err(format!(
            "the CUDA driver was found, but cuInit failed: {}",
            api.text(code)
        )),
    }
}

fn open(stated: Option<OsString>) -> Result<Api, String> {
    let names = match stated.filter(|path| !path.is_empty()) {
        Some(path) => vec![path],
        None => NAMES.iter().map(OsString::from).collect(),
    };
    // What is there and cannot be opened is the reason rather than what is not there.
    let mut reason = None;
    // SAFETY: loading the driver library runs its constructors, which is what opening it at run time means.
    let library = names
        .iter()
        .find_map(|name| match unsafe { Library::new(name) } {
            Ok(library) => Some(library),
            Err(e) => {
                // The cause is what the loader says; the error itself only names the call.
                let why = std::error::Error::source(&e)
                    .map_or_else(|| e.to_string(), ToString::to_string);
                let path = Path::new(name);
                let refused =
                    || format!("no CUDA driver: {} cannot be opened: {why}", path.display());
                reason = reason.take().or_else(|| path.exists().then(refused));
                None
            }
        });
    let library = library.ok_or_else(|| {
        let names: Vec<_> = names.iter().map(|n| n.to_string_lossy()).collect();
        reason.unwrap_or_else(|| format!("no CUDA driver: {} was not found", names.join(" or ")))
    })?;
    // SAFETY: a library of one of these names is the driver, and so is what the user names as such.
    unsafe { Api::resolve(library) }
}

impl Api {
    /// What a result means: `CUDA_ERROR_OUT_OF_MEMORY, out of memory`.
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
        assert_eq!(e, "no CUDA driver: libno-such-driver.so was not found");
        if cfg!(target_os = "linux") {
            let e = open(Some("libc.so.6".into())).err().unwrap();
            assert!(
                e.contains("no CUDA driver: ") && e.contains("has no cuInit"),
                "{e}"
            );
            let text = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
            let e = open(Some(text.into())).err().unwrap();
            assert!(
                e.starts_with("no CUDA driver: ")
                    && e.contains("Cargo.toml")
                    && !e.contains("was not found"),
                "{e}"
            );
        }
    }
}
