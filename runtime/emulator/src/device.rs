//! The public side: modules, devices, launches.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, OnceLock, RwLock,
        atomic::{AtomicU64, Ordering},
    },
};

use gristmill_runtime::sync::{alone, lock, shared};

use crate::{
    decode::{self, program::Program},
    exec::{self, Stats},
    fault::{Fault, FaultKind, Result},
    memory::Memory,
    parse::{
        self,
        ast::{Source, Space, Variable},
    },
};

/// A parsed PTX module. Cheap to clone.
#[derive(Clone)]
pub struct Module {
    inner: Arc<ModuleInner>,
}

struct ModuleInner {
    id: u64,
    source: Source,
    kernels: HashMap<String, OnceLock<Result<Arc<Program>>>>,
}

impl Module {
    /// Parses PTX as NVRTC writes it. Kernels are decoded when they are first used; [`Module::check`] does it for all.
    ///
    /// Errors name the PTX line: [`FaultKind::Syntax`], or [`FaultKind::Unsupported`] for directives that are not there.
    pub fn parse(ptx: &str) -> Result<Module> {
        static IDS: AtomicU64 = AtomicU64::new(0);
        let source = parse::parse(ptx)?;
        let entries = source.functions.values().filter(|f| f.is_entry);
        let kernels = entries.map(|f| (f.name.clone(), OnceLock::new())).collect();
        let id = IDS.fetch_add(1, Ordering::Relaxed);
        Ok(Module {
            inner: Arc::new(ModuleInner {
                id,
                source,
                kernels,
            }),
        })
    }

    /// Names of the kernels, sorted.
    pub fn kernels(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.inner.kernels.keys().map(String::as_str).collect();
        names.sort_unstable();
        names
    }

    /// Decodes every kernel; the error lists the instructions of the first that the emulator lacks, with their lines.
    pub fn check(&self) -> Result<()> {
        self.kernels()
            .iter()
            .try_for_each(|name| self.program(name).map(drop))
    }

    /// Offset and size in bytes of each parameter of `kernel`, in order.
    pub fn parameters(&self, kernel: &str) -> Result<Vec<(usize, usize)>> {
        Ok(self
            .program(kernel)?
            .params
            .iter()
            .map(|p| (p.offset, p.size_bytes))
            .collect())
    }

    fn program(&self, kernel: &str) -> Result<Arc<Program>> {
        let decode = || decode::decode(&self.inner.source, kernel).map(Arc::new);
        match self.inner.kernels.get(kernel) {
            Some(cell) => cell.get_or_init(decode).clone(),
            None => decode(),
        }
    }
}

/// Resources of a device.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Device memory in bytes.
    pub memory_bytes: usize,
    /// Shared memory per block in bytes, static and dynamic together.
    pub shared_bytes_per_block: usize,
    /// Threads of the host that run blocks; 0 for one per core.
    pub host_threads: usize,
    /// Warp instructions of one launch, after which it ends with [`FaultKind::Budget`].
    pub instruction_budget: u64,
}

impl Default for Limits {
    /// 16 GiB, an H100's 227 KiB of shared memory, all cores, and 2^36 warp instructions (an hour or so).
    fn default() -> Limits {
        Limits {
            memory_bytes: 16 << 30,
            shared_bytes_per_block: 227 << 10,
            host_threads: 0,
            instruction_budget: 1 << 36,
        }
    }
}

/// Grid, block and cluster of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchConfig {
    /// Blocks by axis.
    pub grid: [u32; 3],
    /// Threads per block by axis.
    pub block: [u32; 3],
    /// Length of `extern __shared__` arrays.
    pub dynamic_shared_bytes: usize,
    /// Blocks per cluster by axis; `[1, 1, 1]` takes the kernel's `__cluster_dims__`.
    pub cluster: [u32; 3],
    /// All blocks run at the same time, so that they may wait for each other (`cudaLaunchCooperativeKernel`). On one
    /// thread of the host, so slower.
    pub cooperative: bool,
}

impl Default for LaunchConfig {
    /// One block of one thread.
    fn default() -> LaunchConfig {
        LaunchConfig {
            grid: [1; 3],
            block: [1; 3],
            dynamic_shared_bytes: 0,
            cluster: [1; 3],
            cooperative: false,
        }
    }
}

/// Checks beside those of bounds, alignment, divergence and deadlock, which are always made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Checks {
    /// Conflicting accesses to shared memory that nothing orders: [`FaultKind::Race`]. Makes such accesses a few times
    /// slower.
    pub races: bool,
}

/// An emulated GPU. All methods may be called from several threads; copies wait for launches to end.
pub struct Device {
    limits: Limits,
    memory: RwLock<Memory>,
    /// Addresses of the variables of each module that has been used, by module.
    globals: Mutex<HashMap<u64, Arc<HashMap<String, u64>>>>,
}

impl Device {
    /// A device without buffers.
    pub fn new(limits: Limits) -> Device {
        let memory = RwLock::new(Memory::new(limits.memory_bytes));
        Device {
            limits,
            memory,
            globals: Mutex::default(),
        }
    }

    /// Resources that the device was made with.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Bytes of device memory in use, module variables included.
    pub fn used_bytes(&self) -> usize {
        shared(&self.memory).used_bytes()
    }

    /// Allocates `size_bytes` bytes, aligned to 256. Fresh memory is all ones (NaN as a float), so that a read
    /// before the first write shows. Errors with [`FaultKind::OutOfMemory`].
    pub fn alloc(&self, size_bytes: usize) -> Result<u64> {
        self.memory_mut(|memory| memory.allocate(size_bytes, None, false))
    }

    /// Frees a buffer by its first address.
    pub fn free(&self, address: u64) -> Result<()> {
        self.memory_mut(|memory| memory.free(address))
    }

    /// Copies `bytes` to the device. Errors with [`FaultKind::OutOfBounds`].
    pub fn copy_in(&self, to: u64, bytes: &[u8]) -> Result<()> {
        self.memory_mut(|memory| memory.write(to, bytes))
    }

    /// Copies from the device into `bytes`. Errors with [`FaultKind::OutOfBounds`].
    pub fn copy_out(&self, bytes: &mut [u8], from: u64) -> Result<()> {
        self.memory_mut(|memory| memory.read(from, bytes))
    }

    /// Copies `size_bytes` bytes on the device; the ranges may overlap. Errors with [`FaultKind::OutOfBounds`].
    pub fn copy_within(&self, to: u64, from: u64, size_bytes: usize) -> Result<()> {
        self.memory_mut(|memory| memory.copy_within(to, from, size_bytes))
    }

    /// Sets `size_bytes` bytes to `value`. Errors with [`FaultKind::OutOfBounds`].
    pub fn fill(&self, to: u64, value: u8, size_bytes: usize) -> Result<()> {
        self.memory_mut(|memory| memory.fill(to, value, size_bytes))
    }

    /// Address of a `__device__` or `__constant__` variable of `module`, by its name in the PTX.
    pub fn global(&self, module: &Module, name: &str) -> Result<u64> {
        self.load(module)?.get(name).copied().ok_or_else(|| {
            Fault::new(
                FaultKind::InvalidCall,
                format!("no variable `{name}` in global memory of the module"),
            )
        })
    }

    /// Frees the variables of `module`; another launch would make them anew.
    pub fn unload(&self, module: &Module) -> Result<()> {
        let mut globals = lock(&self.globals);
        let Some(variables) = globals.remove(&module.inner.id) else {
            return Ok(());
        };
        variables
            .values()
            .try_for_each(|address| self.free(*address))
    }

    /// Runs `kernel` to its end. `params` are the parameters' bytes, laid out as [`Module::parameters`] says
    /// ([`Args`](crate::Args) does it for the usual types).
    ///
    /// Whatever is wrong with the call or with the kernel is a [`Fault`]; buffers then hold the stores made until
    /// then.
    pub fn launch(
        &self,
        module: &Module,
        kernel: &str,
        config: &LaunchConfig,
        params: &[u8],
        checks: &Checks,
    ) -> Result<Stats> {
        let program = module.program(kernel)?;
        let globals = self.load(module)?;
        let memory = shared(&self.memory);
        let call = exec::Call {
            program: &program,
            globals: &globals,
            memory: &memory,
            config,
            params,
            checks,
        };
        exec::launch(&call, &self.limits, &module.inner.source.files)
    }

    /// Makes the module's variables, once.
    fn load(&self, module: &Module) -> Result<Arc<HashMap<String, u64>>> {
        let mut globals = lock(&self.globals);
        if let Some(found) = globals.get(&module.inner.id) {
            return Ok(found.clone());
        }
        let made =
            Arc::new(self.memory_mut(|memory| place_variables(memory, &module.inner.source))?);
        globals.insert(module.inner.id, made.clone());
        Ok(made)
    }

    fn memory_mut<T>(&self, f: impl FnOnce(&mut Memory) -> Result<T>) -> Result<T> {
        f(&mut alone(&self.memory))
    }
}

/// Allocates and initialises the variables in global and constant memory.
fn place_variables(memory: &mut Memory, source: &Source) -> Result<HashMap<String, u64>> {
    let in_functions = source.functions.values().flat_map(|f| &f.variables);
    let all = source.variables.iter().chain(in_functions);
    let variables: Vec<_> = all
        .filter(|v| matches!(v.space, Space::Global | Space::Const))
        .collect();
    let mut addresses = HashMap::new();
    for variable in &variables {
        let is_constant = variable.space == Space::Const;
        let address = memory.allocate(variable.size_bytes, Some(&variable.name), is_constant)?;
        memory.fill(address, 0, variable.size_bytes)?;
        memory.write(address, &variable.init)?;
        addresses.insert(variable.name.clone(), address);
    }
    for variable in &variables {
        write_pointers(memory, variable, &addresses)?;
    }
    Ok(addresses)
}

/// Writes the addresses of other variables into a variable.
fn write_pointers(
    memory: &mut Memory,
    variable: &Variable,
    addresses: &HashMap<String, u64>,
) -> Result<()> {
    let start = addresses[&variable.name];
    for (offset, name, addend) in &variable.pointers {
        let target = addresses.get(name).ok_or_else(|| {
            let what = format!("variable `{}` refers to `{name}`", variable.name);
            Fault::new(FaultKind::Unsupported, what)
        })?;
        let value = target.wrapping_add_signed(*addend);
        memory.write(start + *offset as u64, &value.to_le_bytes())?;
    }
    Ok(())
}
