//! NVRTC's C interface as far as it is used, resolved from a library that was opened at run time.
//!
//! Types, constants and the open library are cudarc's. Its functions panic when a symbol is missing, and take statuses for Rust
//! enums, which those of another version are not: here a status is a number, and all symbols are looked up once.

use cudarc::nvrtc::sys;
use gristmill_runtime::cuda::Bindings;
use libloading::Library;
use std::ffi::{c_char, c_int};

/// `nvrtcResult`.
pub(super) type Status = c_int;
pub(super) const SUCCESS: Status = sys::nvrtcResult::NVRTC_SUCCESS as Status;
pub(super) type Handle = sys::nvrtcProgram;

pub(super) const BINDINGS: Bindings = Bindings {
    title: "NVRTC",
    names: &["nvrtc"],
    symbol: "nvrtcVersion",
    culib: sys::culib,
};

macro_rules! api {
    ($($(#[$doc:meta])* $field:ident = $symbol:literal fn($($ty:ty),*) -> $ret:ty;)*) => {
        /// The functions of one NVRTC library.
        pub(super) struct Api {
            $($(#[$doc])* pub(super) $field: unsafe extern "C" fn($($ty),*) -> $ret,)*
        }

        impl Api {
            /// Finds every function. The error names a symbol that is missing.
            ///
            /// # Safety
            /// The library is NVRTC: its symbols have the signatures of `nvrtc.h`. It stays open as long as the result is used.
            pub(super) unsafe fn resolve(library: &Library) -> Result<Api, String> {
                $(
                    // SAFETY: by contract the symbol has this signature.
                    let found = unsafe { library.get::<unsafe extern "C" fn($($ty),*) -> $ret>($symbol) };
                    let $field = *found.map_err(|e| format!("symbol {} is missing: {e}", $symbol))?;
                )*
                Ok(Api { $($field,)* })
            }
        }
    };
}

api! {
    version = "nvrtcVersion" fn(*mut c_int, *mut c_int) -> Status;
    n_archs = "nvrtcGetNumSupportedArchs" fn(*mut c_int) -> Status;
    archs = "nvrtcGetSupportedArchs" fn(*mut c_int) -> Status;
    error_string = "nvrtcGetErrorString" fn(Status) -> *const c_char;
    /// Source, name, and headers: their number, texts and names.
    create = "nvrtcCreateProgram" fn(*mut Handle, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char) -> Status;
    destroy = "nvrtcDestroyProgram" fn(*mut Handle) -> Status;
    compile = "nvrtcCompileProgram" fn(Handle, c_int, *const *const c_char) -> Status;
    log_size = "nvrtcGetProgramLogSize" fn(Handle, *mut usize) -> Status;
    log = "nvrtcGetProgramLog" fn(Handle, *mut c_char) -> Status;
    ptx_size = "nvrtcGetPTXSize" fn(Handle, *mut usize) -> Status;
    ptx = "nvrtcGetPTX" fn(Handle, *mut c_char) -> Status;
    cubin_size = "nvrtcGetCUBINSize" fn(Handle, *mut usize) -> Status;
    cubin = "nvrtcGetCUBIN" fn(Handle, *mut c_char) -> Status;
}
