//! Kernels for GPUs as plain data: what a compiler makes and a device, real or emulated, launches.
//!
//! A kernel takes one address per entry of [`GpuKernel::params`], 64-bit each. Buffers are dense and aligned as the module doc of
//! [`crate::program`] says. The status word is a `u32` that is 0 before the launch; a kernel that fails leaves a code of [`crate::status`]
//! there, the greatest of those that its threads met, and what it wrote has no meaning then. Any number of blocks in `x` computes the same:
//! kernels go through their items in strides of the whole grid.

/// The code of one or more kernels for one architecture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuCode {
    /// What it is made for: `sm_90a`.
    pub arch: String,
    /// PTX, as text.
    pub ptx: String,
    /// Machine code.
    pub cubin: Vec<u8>,
}

/// A kernel and how it is launched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuKernel {
    /// Name in dumps and profiles; unique in a program.
    pub name: String,
    /// Which code, as an index into the list beside the kernels.
    pub code: usize,
    /// Entry point there.
    pub entry: String,
    /// Threads that run it.
    pub launch: Launch,
    /// What it takes, in order.
    pub params: Vec<GpuParam>,
}

/// Threads of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Blocks in x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block in x, y and z.
    pub block: [u32; 3],
    /// Shared memory of a block in bytes, beyond what the code declares.
    pub shared_bytes: u32,
}

/// A parameter of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuParam {
    /// The address of a buffer: an index into the arguments of the step that launches the kernel.
    Buffer(u32),
    /// The address of the status word.
    Status,
}
