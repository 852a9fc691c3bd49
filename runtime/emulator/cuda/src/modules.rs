//! Modules, functions and launches.

use crate::codes::*;
use crate::execute::Op;
use crate::log;
use crate::world;
use gristmill_emulator::{LaunchConfig, Module};
use std::ffi::{CStr, c_void};

/// Shared memory beyond this has to be asked for by an attribute of the function.
const DEFAULT_SHARED_BYTES: usize = 48 << 10;

/// A module of a context.
pub struct LoadedModule {
    gpu: usize,
    module: Module,
}

/// A kernel of a module.
#[derive(Clone)]
pub struct Function {
    pub gpu: usize,
    module: Module,
    entry: String,
    /// Most bytes of dynamic shared memory.
    max_shared_bytes: usize,
}

/// A launch with its arguments.
#[derive(Clone)]
pub struct LaunchCall {
    pub module: Module,
    pub entry: String,
    pub config: LaunchConfig,
    pub params: Vec<u8>,
}

/// Name and meaning of a result.
pub fn text_of(code: Code) -> (&'static str, &'static str) {
    let found = TEXTS.iter().find(|(c, ..)| *c == code);
    found.map_or(
        ("CUDA_ERROR_UNKNOWN\0", "unknown error\0"),
        |(_, name, text)| (name, text),
    )
}

/// Loads PTX, or refuses machine code. The error comes with the compiler's log.
///
/// # Safety
///
/// The image is machine code or NUL-terminated text.
pub unsafe fn load(image: *const u8) -> Result<usize, (Code, String)> {
    const MACHINE_CODE: &[u8] = b"\x7fELF";
    // SAFETY: machine code is longer than its mark, and text has no byte after its last that is looked at.
    let is_machine_code = MACHINE_CODE
        .iter()
        .enumerate()
        .all(|(i, b)| unsafe { image.add(i).read() } == *b);
    if is_machine_code {
        return Err((NO_BINARY_FOR_GPU, "the emulator takes PTX only".to_owned()));
    }
    // SAFETY: the caller's promise.
    let image = unsafe { CStr::from_ptr(image.cast()) }.to_bytes();
    let module = std::str::from_utf8(image).map_err(|e| (INVALID_PTX, e.to_string()))?;
    let module = Module::parse(module).and_then(|m| m.check().map(|()| m));
    let module = module.map_err(|fault| (INVALID_PTX, fault.to_string()))?;
    let loaded = world::with_context(|world, gpu| {
        let handle = world.handle();
        world.modules.insert(handle, LoadedModule { gpu, module });
        Ok(handle)
    });
    loaded.map_err(|code| (code, String::new()))
}

pub fn unload(module: usize) -> Outcome {
    world::with(|world| {
        let found = world.modules.remove(&module).ok_or(INVALID_HANDLE)?;
        world.finish_gpu(found.gpu);
        world.gpus[found.gpu]
            .device
            .unload(&found.module)
            .map_err(|_| INVALID_VALUE)
    })
}

pub fn function(module: usize, name: &str) -> Outcome<usize> {
    world::with_context(|world, gpu| {
        let found = world
            .modules
            .get(&module)
            .filter(|m| m.gpu == gpu)
            .ok_or(INVALID_HANDLE)?;
        if !found.module.kernels().contains(&name) {
            return Err(NOT_FOUND);
        }
        let (module, entry) = (found.module.clone(), name.to_owned());
        let handle = world.handle();
        world.functions.insert(
            handle,
            Function {
                gpu,
                module,
                entry,
                max_shared_bytes: DEFAULT_SHARED_BYTES,
            },
        );
        Ok(handle)
    })
}

pub fn allow_shared(function: usize, size_bytes: usize) -> Outcome {
    world::with_context(|world, gpu| {
        let most = world.gpus[gpu].device.limits().shared_bytes_per_block;
        let found = world.functions.get_mut(&function).ok_or(INVALID_HANDLE)?;
        found.max_shared_bytes = size_bytes;
        if size_bytes <= most {
            Ok(())
        } else {
            Err(INVALID_VALUE)
        }
    })
}

/// Asks for a launch. `params` holds the address of each argument.
///
/// # Safety
///
/// It has as many as the kernel has parameters, each of the parameter's size.
pub unsafe fn launch(
    function: usize,
    config: LaunchConfig,
    params: *const *const c_void,
    stream: usize,
) -> Outcome {
    world::with_stream(stream, |world, gpu| {
        let found = world
            .functions
            .get(&function)
            .filter(|f| f.gpu == gpu)
            .ok_or(INVALID_HANDLE)?;
        if config.dynamic_shared_bytes > found.max_shared_bytes || config.grid.contains(&0) {
            return Err(INVALID_VALUE);
        }
        log::note("kernel", &found.entry);
        let call = LaunchCall {
            module: found.module.clone(),
            entry: found.entry.clone(),
            config,
            // SAFETY: the caller's promise.
            params: unsafe { found.params(params)? },
        };
        world.ask(stream, Op::Launch(call))
    })
}

impl Function {
    /// Bytes of the arguments, laid out as the kernel's parameters.
    ///
    /// # Safety
    ///
    /// As for [`launch`].
    unsafe fn params(&self, params: *const *const c_void) -> Outcome<Vec<u8>> {
        let layout = self.module.parameters(&self.entry);
        let layout = layout.map_err(|_| INVALID_VALUE)?;
        let n_bytes = layout.iter().map(|(at, size)| at + size).max();
        let mut bytes = vec![0; n_bytes.unwrap_or(0)];
        for (i, (at, size)) in layout.into_iter().enumerate() {
            // SAFETY: the caller's promise.
            let arg = unsafe { std::slice::from_raw_parts((*params.add(i)).cast::<u8>(), size) };
            bytes[at..at + size].copy_from_slice(arg);
        }
        Ok(bytes)
    }
}
