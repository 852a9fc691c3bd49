//! NVRTC's C interface as far as it is used, resolved from a library that was opened at run time.

use libloading::Library;
use std::ffi::{c_char, c_int, c_void};

/// `nvrtcResult`: 0 is success.
pub(super) type Status = c_int;
/// `nvrtcProgram`.
pub(super) type Handle = *mut c_void;

macro_rules! api {
    ($($(#[$doc:meta])* $field:ident = $symbol:literal fn($($ty:ty),*) -> $ret:ty;)*) => {
        /// The functions of one NVRTC library, which stays open as long as this lives.
        pub(super) struct Api {
            $($(#[$doc])* pub(super) $field: unsafe extern "C" fn($($ty),*) -> $ret,)*
            /// The library, after the libraries that it needs.
            _libraries: Vec<Library>,
        }

        impl Api {
            /// Finds every function in the last of `libraries`. The error names a symbol that is missing.
            ///
            /// # Safety
            /// The last of `libraries` is NVRTC: its symbols have the signatures of `nvrtc.h`.
            pub(super) unsafe fn resolve(libraries: Vec<Library>) -> Result<Api, String> {
                let library = libraries.last().ok_or("no library")?;
                $(
                    // SAFETY: by contract the symbol has this signature.
                    let found = unsafe { library.get::<unsafe extern "C" fn($($ty),*) -> $ret>($symbol) };
                    let $field = *found.map_err(|e| format!("symbol {} is missing: {e}", $symbol))?;
                )*
                Ok(Api { $($field,)* _libraries: libraries })
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
