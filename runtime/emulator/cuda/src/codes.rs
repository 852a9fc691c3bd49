//! Results and constants of `cuda.h` that are used here.

use std::ffi::c_int;

/// `CUresult`.
pub type Code = c_int;

/// Result of the functions behind the C interface.
pub type Outcome<T = ()> = Result<T, Code>;

pub const SUCCESS: Code = 0;
pub const INVALID_VALUE: Code = 1;
pub const OUT_OF_MEMORY: Code = 2;
pub const NOT_INITIALIZED: Code = 3;
pub const STUB_LIBRARY: Code = 34;
pub const DEVICE_UNAVAILABLE: Code = 46;
pub const NO_DEVICE: Code = 100;
pub const INVALID_DEVICE: Code = 101;
pub const INVALID_CONTEXT: Code = 201;
pub const NO_BINARY_FOR_GPU: Code = 209;
pub const PEER_ACCESS_UNSUPPORTED: Code = 217;
pub const INVALID_PTX: Code = 218;
pub const INVALID_HANDLE: Code = 400;
pub const NOT_FOUND: Code = 500;
pub const NOT_READY: Code = 600;
pub const ILLEGAL_ADDRESS: Code = 700;
pub const PEER_ACCESS_ALREADY_ENABLED: Code = 704;
pub const ASSERT: Code = 710;
pub const MISALIGNED_ADDRESS: Code = 716;
pub const LAUNCH_FAILED: Code = 719;
pub const NOT_PERMITTED: Code = 800;
pub const NOT_SUPPORTED: Code = 801;
pub const STREAM_CAPTURE_UNSUPPORTED: Code = 900;
pub const STREAM_CAPTURE_INVALIDATED: Code = 901;
pub const STREAM_CAPTURE_UNJOINED: Code = 904;
pub const STREAM_CAPTURE_ISOLATION: Code = 905;
pub const UNKNOWN: Code = 999;

/// Name and meaning, NUL-terminated.
pub const TEXTS: &[(Code, &str, &str)] = &[
    (SUCCESS, "CUDA_SUCCESS\0", "no error\0"),
    (
        INVALID_VALUE,
        "CUDA_ERROR_INVALID_VALUE\0",
        "invalid argument\0",
    ),
    (
        OUT_OF_MEMORY,
        "CUDA_ERROR_OUT_OF_MEMORY\0",
        "out of memory\0",
    ),
    (
        NOT_INITIALIZED,
        "CUDA_ERROR_NOT_INITIALIZED\0",
        "initialization error\0",
    ),
    (
        STUB_LIBRARY,
        "CUDA_ERROR_STUB_LIBRARY\0",
        "CUDA driver is a stub library\0",
    ),
    (
        DEVICE_UNAVAILABLE,
        "CUDA_ERROR_DEVICE_UNAVAILABLE\0",
        "CUDA-capable device(s) is/are busy or unavailable\0",
    ),
    (
        NO_DEVICE,
        "CUDA_ERROR_NO_DEVICE\0",
        "no CUDA-capable device is detected\0",
    ),
    (
        INVALID_DEVICE,
        "CUDA_ERROR_INVALID_DEVICE\0",
        "invalid device ordinal\0",
    ),
    (
        INVALID_CONTEXT,
        "CUDA_ERROR_INVALID_CONTEXT\0",
        "invalid device context\0",
    ),
    (
        NO_BINARY_FOR_GPU,
        "CUDA_ERROR_NO_BINARY_FOR_GPU\0",
        "no kernel image is available for execution on the device\0",
    ),
    (
        PEER_ACCESS_UNSUPPORTED,
        "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED\0",
        "peer access is not supported\0",
    ),
    (
        INVALID_PTX,
        "CUDA_ERROR_INVALID_PTX\0",
        "a PTX JIT compilation failed\0",
    ),
    (
        INVALID_HANDLE,
        "CUDA_ERROR_INVALID_HANDLE\0",
        "invalid resource handle\0",
    ),
    (
        NOT_FOUND,
        "CUDA_ERROR_NOT_FOUND\0",
        "named symbol not found\0",
    ),
    (NOT_READY, "CUDA_ERROR_NOT_READY\0", "device not ready\0"),
    (
        ILLEGAL_ADDRESS,
        "CUDA_ERROR_ILLEGAL_ADDRESS\0",
        "an illegal memory access was encountered\0",
    ),
    (
        PEER_ACCESS_ALREADY_ENABLED,
        "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED\0",
        "peer access is already enabled\0",
    ),
    (
        ASSERT,
        "CUDA_ERROR_ASSERT\0",
        "device-side assert triggered\0",
    ),
    (
        MISALIGNED_ADDRESS,
        "CUDA_ERROR_MISALIGNED_ADDRESS\0",
        "misaligned address\0",
    ),
    (
        LAUNCH_FAILED,
        "CUDA_ERROR_LAUNCH_FAILED\0",
        "unspecified launch failure\0",
    ),
    (
        NOT_PERMITTED,
        "CUDA_ERROR_NOT_PERMITTED\0",
        "operation not permitted\0",
    ),
    (
        NOT_SUPPORTED,
        "CUDA_ERROR_NOT_SUPPORTED\0",
        "operation not supported\0",
    ),
    (
        STREAM_CAPTURE_UNSUPPORTED,
        "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED\0",
        "operation not permitted when stream is capturing\0",
    ),
    (
        STREAM_CAPTURE_INVALIDATED,
        "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED\0",
        "operation failed due to a previous error during capture\0",
    ),
    (
        STREAM_CAPTURE_UNJOINED,
        "CUDA_ERROR_STREAM_CAPTURE_UNJOINED\0",
        "capture has unjoined work in another stream\0",
    ),
    (
        STREAM_CAPTURE_ISOLATION,
        "CUDA_ERROR_STREAM_CAPTURE_ISOLATION\0",
        "dependency created on uncaptured work in another stream\0",
    ),
    (UNKNOWN, "CUDA_ERROR_UNKNOWN\0", "unknown error\0"),
];

#[cfg(test)]
mod tests {
    use super::*;
    use cudarc::driver::sys::CUresult::{self, *};

    /// The numbers and names are those of the bindings, which were made from the header.
    #[test]
    fn results_are_those_of_the_header() {
        const RESULTS: [CUresult; 27] = [
            CUDA_SUCCESS,
            CUDA_ERROR_INVALID_VALUE,
            CUDA_ERROR_OUT_OF_MEMORY,
            CUDA_ERROR_NOT_INITIALIZED,
            CUDA_ERROR_STUB_LIBRARY,
            CUDA_ERROR_DEVICE_UNAVAILABLE,
            CUDA_ERROR_NO_DEVICE,
            CUDA_ERROR_INVALID_DEVICE,
            CUDA_ERROR_INVALID_CONTEXT,
            CUDA_ERROR_NO_BINARY_FOR_GPU,
            CUDA_ERROR_PEER_ACCESS_UNSUPPORTED,
            CUDA_ERROR_INVALID_PTX,
            CUDA_ERROR_INVALID_HANDLE,
            CUDA_ERROR_NOT_FOUND,
            CUDA_ERROR_NOT_READY,
            CUDA_ERROR_ILLEGAL_ADDRESS,
            CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED,
            CUDA_ERROR_ASSERT,
            CUDA_ERROR_MISALIGNED_ADDRESS,
            CUDA_ERROR_LAUNCH_FAILED,
            CUDA_ERROR_NOT_PERMITTED,
            CUDA_ERROR_NOT_SUPPORTED,
            CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
            CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
            CUDA_ERROR_STREAM_CAPTURE_UNJOINED,
            CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
            CUDA_ERROR_UNKNOWN,
        ];
        for (code, name, _) in TEXTS {
            let known = RESULTS
                .iter()
                .find(|r| **r as Code == *code)
                .map(|r| format!("{r:?}\0"));
            assert_eq!(known.as_deref(), Some(*name), "{code}");
        }
    }
}
