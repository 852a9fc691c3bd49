//! Code on a GPU: machine code when it is for this GPU, PTX otherwise, and launches of its kernels.

use super::context::Context;
use super::gpu::Streams;
use crate::driver::DeviceCode;
use crate::error::{Error, ErrorKind};
use crate::gpu::{GpuArg, GpuCode, Launch};
use crate::sync::lock;
use cudarc::driver::sys::{CUfunction, CUfunction_attribute, CUjit_option, CUmodule};
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_int, c_void};
use std::ptr;
use std::sync::{Arc, Mutex};

/// Launches with no more arguments than this allocate nothing.
const USUAL_ARGS: usize = 64;
/// Size of the log of the driver's compiler.
const LOG_BYTES: usize = 8 << 10;

/// A module of the driver.
pub(super) struct LoadedCode {
    streams: Arc<Streams>,
    module: CUmodule,
    kernels: Mutex<HashMap<String, Kernel>>,
    /// Wait for each launch.
    checks: bool,
}

#[derive(Clone, Copy)]
struct Kernel {
    function: CUfunction,
    /// Dynamic shared memory that was asked for. Without asking, a kernel may have 48 KiB less the static part.
    shared_bytes: u32,
}

// SAFETY: handles of the driver may be used from any thread.
unsafe impl Send for LoadedCode {}
// SAFETY: as above.
unsafe impl Sync for LoadedCode {}

impl LoadedCode {
    /// Loads the machine code, or compiles the PTX if that is for another GPU or missing.
    ///
    /// Errors with `Unsupported` when the driver takes neither; the message has its compiler's log, and which driver is needed.
    pub(super) fn new(
        streams: Arc<Streams>,
        code: &GpuCode,
        checks: bool,
    ) -> Result<LoadedCode, Error> {
        let context = streams.context.clone();
        context.bind()?;
        let machine = if code.cubin.is_empty() {
            None
        } else {
            load(&context, &code.cubin).ok()
        };
        let module = match machine {
            Some(module) => module,
            None => load_text(&context, code)?,
        };
        Ok(LoadedCode {
            streams,
            module,
            kernels: Mutex::default(),
            checks,
        })
    }

    /// The kernel of a name, which may have so much dynamic shared memory.
    fn kernel(&self, entry: &str, shared_bytes: u32) -> Result<CUfunction, Error> {
        let context = &self.streams.context;
        let mut kernels = lock(&self.kernels);
        let known = kernels.get(entry).copied();
        let kernel = match known {
            Some(kernel) => kernel,
            None => Kernel {
                function: self.find(entry)?,
                shared_bytes: 0,
            },
        };
        if known.is_some() && shared_bytes <= kernel.shared_bytes {
            return Ok(kernel.function);
        }
        if shared_bytes > kernel.shared_bytes {
            let attribute =
                CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as c_int;
            // SAFETY: the function is of this module, which lives.
            let code = unsafe {
                (context.api.set_function_attribute)(
                    kernel.function,
                    attribute,
                    shared_bytes as c_int,
                )
            };
            context.check(
                code,
                &format!("giving kernel {entry} {shared_bytes} bytes of shared memory"),
            )?;
        }
        let shared_bytes = shared_bytes.max(kernel.shared_bytes);
        kernels.insert(
            entry.to_owned(),
            Kernel {
                shared_bytes,
                ..kernel
            },
        );
        Ok(kernel.function)
    }

    fn find(&self, entry: &str) -> Result<CUfunction, Error> {
        let context = &self.streams.context;
        let internal = |why: String| Error::internal(why);
        let name = CString::new(entry).map_err(|e| internal(format!("kernel {entry:?}: {e}")))?;
        let mut function = ptr::null_mut();
        // SAFETY: the module lives; the driver reads the name and writes one handle.
        match unsafe { (context.api.function)(&mut function, self.module, name.as_ptr()) } {
            0 => Ok(function),
            code => Err(internal(format!(
                "no kernel {entry:?} in its code: {}",
                context.api.text(code)
            ))),
        }
    }

    fn start(
        &self,
        function: CUfunction,
        launch: &Launch,
        params: &mut [*mut c_void],
    ) -> Result<(), Error> {
        let (context, stream) = (&self.streams.context, self.streams.compute());
        let ([gx, gy, gz], [bx, by, bz], shared) = (launch.grid, launch.block, launch.shared_bytes);
        let (params, extra) = (params.as_mut_ptr(), ptr::null_mut());
        // SAFETY: one argument per parameter of the kernel, by the maker of the program; they are read before this returns. The kernel uses
        // its buffers as the program says.
        let code = unsafe {
            (context.api.launch)(
                function,
                gx,
                gy,
                gz,
                bx,
                by,
                bz,
                shared,
                stream.handle,
                params,
                extra,
            )
        };
        context.check(code, "launching")?;
        if self.checks {
            stream.synchronize()
        } else {
            Ok(())
        }
    }
}

impl DeviceCode for LoadedCode {
    fn launch(&self, entry: &str, launch: &Launch, args: &[GpuArg]) -> Result<(), Error> {
        let named = |e: Error| e.context(format!("kernel {entry}"));
        self.streams.context.bind()?;
        let function = self.kernel(entry, launch.shared_bytes)?;
        let address = |arg: &GpuArg| match arg {
            GpuArg::Address(address) => ptr::from_ref(address).cast_mut().cast::<c_void>(),
            GpuArg::TensorMap(map) => ptr::from_ref(map).cast_mut().cast(),
        };
        if args.len() > USUAL_ARGS {
            let mut params: Vec<*mut c_void> = args.iter().map(address).collect();
            return self.start(function, launch, &mut params).map_err(named);
        }
        let mut params = [ptr::null_mut(); USUAL_ARGS];
        params
            .iter_mut()
            .zip(args)
            .for_each(|(param, arg)| *param = address(arg));
        self.start(function, launch, &mut params[..args.len()])
            .map_err(named)
    }
}

impl Drop for LoadedCode {
    fn drop(&mut self) {
        if self.streams.context.bind().is_ok() {
            // SAFETY: loaded in `new`, unloaded once. The executor has waited for its kernels.
            unsafe { (self.streams.context.api.unload_module)(self.module) };
        }
    }
}

/// Loads an image. The error is the result and the compiler's log.
fn load(context: &Context, image: &[u8]) -> Result<CUmodule, (c_int, String)> {
    let mut log = vec![0u8; LOG_BYTES];
    let mut options = [
        CUjit_option::CU_JIT_ERROR_LOG_BUFFER as c_int,
        CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES as c_int,
    ];
    let mut values: [*mut c_void; 2] = [
        log.as_mut_ptr().cast(),
        ptr::without_provenance_mut(LOG_BYTES - 1),
    ];
    let mut module = ptr::null_mut();
    // SAFETY: machine code knows its length, text ends with a zero (see `load_text`); the options have the values that the driver expects of
    // them, and the log stays until it returns.
    let code = unsafe {
        let (options, values) = (options.as_mut_ptr(), values.as_mut_ptr());
        (context.api.load_module)(&mut module, image.as_ptr().cast(), 2, options, values)
    };
    let said = CStr::from_bytes_until_nul(&log)
        .map(|t| t.to_string_lossy().into_owned())
        .unwrap_or_default();
    if code == 0 {
        Ok(module)
    } else {
        Err((code, said))
    }
}

fn load_text(context: &Context, code: &GpuCode) -> Result<CUmodule, Error> {
    let mut text = code.ptx.clone().into_bytes();
    text.push(0);
    load(context, &text).map_err(|(result, said)| {
        let said = if said.is_empty() {
            said
        } else {
            format!("\n{said}")
        };
        let message = format!(
            "code for {} cannot be loaded on {}: {}{}{said}",
            code.arch,
            context.device.name,
            context.api.text(result),
            version_note(&code.ptx)
        );
        Error::new(ErrorKind::Unsupported, message)
    })
}

/// `; it was made by CUDA 13.0, the driver is for CUDA 12.4: ..`, when that is the cause.
fn version_note(ptx: &str) -> String {
    let made = made_by(ptx);
    let (Some(made), Ok(driver)) = (made, super::driver_version()) else {
        return String::new();
    };
    if made <= driver {
        return String::new();
    }
    format!(
        "; it was made by NVRTC of CUDA {}.{}, the driver is for CUDA {}.{}: a driver for CUDA {}.{} or later is needed, or an NVRTC of CUDA {}",
        made.0, made.1, driver.0, driver.1, made.0, made.1, driver.0
    )
}

/// Version of the toolkit as the head of its PTX states it: `// Cuda compilation tools, release 13.0, V13.0.88`.
fn made_by(ptx: &str) -> Option<(u32, u32)> {
    let line = ptx
        .lines()
        .take(20)
        .find(|l| l.contains("compilation tools, release "))?;
    let (major, minor) = line
        .split("release ")
        .nth(1)?
        .split(',')
        .next()?
        .split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_toolkit_is_named_in_its_ptx() {
        let head = "//\n// Generated by NVIDIA NVVM Compiler\n// Cuda compilation tools, release 12.9, V12.9.86\n.version 8.8";
        assert_eq!(super::made_by(head), Some((12, 9)));
        assert_eq!(super::made_by(".version 8.8"), None);
    }
}
