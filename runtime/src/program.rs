//! The executable program: plain data, one per run target, produced by the compiler and run by the executor.
//!
//! A [`Program`] is a list of [`Partition`]s, one per logical device. A partition owns an arena (one block of memory in which all its
//! intermediate buffers have fixed offsets), its constants, its kernels and a list of [`Step`]s. Partitions exchange tensors only through
//! `Send` and `Recv` steps with the same [`Key`].
//!
//! A device with memory of its own (a GPU, or the emulator of one) has its arena and constants there, and copies of the inputs and outputs of
//! its steps. Its kernels are [`GpuKernel`]s, whose ABI [`crate::gpu`] describes, and [`Product`]s of a library.
//!
//! [`crate::kernel_abi`] describes the ABI of kernels on CPUs.
//!
//! # Control flow
//!
//! Two step kinds are enough: [`StepKind::If`] and [`StepKind::Loop`]. ONNX `Loop` is a `Loop` with [`TripCount::While`]; ONNX `Scan`
//! (axis 0, either direction; other axes are transposed by the compiler) is a `Loop` with [`TripCount::Fixed`] and scanned inputs.
//! A sub-program is a `Program` with one partition on the same device and without `Send`/`Recv`; it runs on the same worker, in its own
//! preallocated arena, reading its arguments and writing its results in place.

mod blocks;
mod collectives;
mod hazards;
mod memory;
mod once;
mod print;
mod replicas;
mod state;
mod validate;

use crate::device::DeviceName;
use crate::driver::Reduction;
use crate::dtype::DType;
use crate::gpu::{GpuCode, GpuKernel};
use crate::product::Product;
use crate::tensor::Tensor;
use crate::text::Function;
use std::sync::Arc;

pub use crate::kernel_abi::KernelFn;
pub use blocks::{Blocks, SERIAL_NS, grain};
pub(crate) use memory::LOOP_BYTES;
pub use memory::MemoryUse;
pub use once::invariant_steps;
pub use replicas::{replica_name, replica_of};
pub(crate) use state::Resident;

/// Deepest nesting of control-flow sub-programs that [`Program::validate`] accepts; the top-level program has depth 0.
pub const MAX_NESTING: usize = 32;

/// A compiled program.
#[derive(Clone, Default)]
pub struct Program {
    /// Name of the model, or of the region for a sub-program.
    pub name: String,
    /// Inputs of a run, in order.
    pub inputs: Vec<IoSpec>,
    /// Outputs of a run, in order. Every output is written by exactly one partition.
    pub outputs: Vec<IoSpec>,
    /// State that outlives a run, named by `ReadVariable` and `AssignVariable` steps.
    pub variables: Vec<VariableSpec>,
    /// One per logical device.
    pub partitions: Vec<Partition>,
}

/// Name, dtype and shape of an input or output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IoSpec {
    /// Name in the user's model.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Extents.
    pub shape: Vec<usize>,
}

/// A variable: a handle into a resource container, keyed (container, name).
#[derive(Clone, Debug)]
pub struct VariableSpec {
    /// Container; the session's own one is `""`.
    pub container: String,
    /// Name within the container.
    pub name: String,
    /// Element type. The shape is that of the last value: each read says which it expects.
    pub dtype: DType,
    /// Value given to the variable when the container does not hold it yet; without one, reading before assigning is an error.
    pub initial: Option<Tensor>,
    /// True when [`Loc::Assigned`] is the very bytes of [`Loc::Variable`]. Only for a program whose partitions are all in
    /// the memory of the host; when the step that writes them begins, no step of any partition can still fail.
    pub in_place: bool,
}

impl VariableSpec {
    /// A variable without an initial value.
    pub fn new(container: &str, name: &str, dtype: DType) -> VariableSpec {
        VariableSpec {
            container: container.to_owned(),
            name: name.to_owned(),
            dtype,
            initial: None,
            in_place: false,
        }
    }
}

/// The part of one logical device.
#[derive(Clone, Debug)]
pub struct Partition {
    /// The device; unique within the program.
    pub device: DeviceName,
    /// Size of the arena.
    pub arena_bytes: usize,
    /// All buffers that steps name; [`BufferId`] indexes it.
    pub buffers: Vec<Buffer>,
    /// Tensors that live as long as the program (weights, packed weights, descriptors).
    pub constants: Vec<Tensor>,
    /// Entry points; [`KernelId`] indexes it. All are for this device's kind.
    pub kernels: Vec<Kernel>,
    /// The code of GPU kernels; [`GpuKernel::code`] indexes it.
    pub gpu_code: Vec<GpuCode>,
    /// In a legal serial order; [`StepId`] indexes it.
    pub steps: Vec<Step>,
    /// Declared limit of the device's memory in bytes; the executor refuses a program that needs more.
    pub memory_limit: Option<usize>,
}

/// Index into [`Partition::buffers`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BufferId(pub u32);

/// Index into [`Partition::kernels`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KernelId(pub u32);

/// Index into [`Partition::steps`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StepId(pub u32);

/// A dense row-major tensor at a known place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Name of the value, for dumps and errors.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Extents.
    pub shape: Vec<usize>,
    /// Where the bytes are.
    pub loc: Loc,
}

/// Where a buffer's bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Loc {
    /// In the partition's arena; the offset is a multiple of [`crate::tensor::ALIGN_BYTES`]. Buffers may overlap: aliases (views of the
    /// same bytes) and reuse over time, the latter ordered by [`Step::deps`].
    Arena {
        /// Offset of the first byte.
        offset_bytes: usize,
    },
    /// Index into [`Partition::constants`]; never written.
    Constant(u32),
    /// Index into [`Program::inputs`]; never written.
    Input(u32),
    /// Index into [`Program::outputs`]; may be read again after it was written.
    Output(u32),
    /// The value that a variable has when the run begins: index into [`Program::variables`]; never written. Not in sub-programs.
    Variable(u32),
    /// The value that a variable has from the end of the run on, if it ends well: index into
    /// [`Program::variables`]; may be read again after it was written. Not in sub-programs.
    Assigned(u32),
}

/// A kernel of a partition.
#[derive(Clone, Debug)]
pub enum Kernel {
    /// On cores of this machine.
    Cpu(CpuKernel),
    /// On a GPU, or the emulator of one.
    Gpu(GpuKernel),
    /// By a library of the device.
    Product(Product),
}

impl Kernel {
    /// Symbol name, for dumps and profiles.
    pub fn name(&self) -> &str {
        match self {
            Kernel::Cpu(k) => &k.name,
            Kernel::Gpu(k) => &k.name,
            Kernel::Product(p) => &p.name,
        }
    }

    /// Bytes of scratch per running thread, passed as the last argument; 0 = no such argument.
    pub fn workspace_bytes_per_thread(&self) -> usize {
        match self {
            Kernel::Cpu(k) => k.workspace_bytes_per_thread,
            Kernel::Gpu(_) | Kernel::Product(_) => 0,
        }
    }

    /// Its blocks, if it works by blocks.
    fn blocks(&self) -> Option<Blocks> {
        match self {
            Kernel::Cpu(k) => k.blocks,
            Kernel::Gpu(_) | Kernel::Product(_) => None,
        }
    }
}

/// A kernel for CPUs.
#[derive(Clone, Debug)]
pub struct CpuKernel {
    /// Symbol name, for dumps and profiles.
    pub name: String,
    /// Entry point.
    pub function: Function,
    /// Bytes of scratch per running thread, passed as the last argument; 0 = no such argument.
    pub workspace_bytes_per_thread: usize,
    /// For a kernel that works by blocks, on one step: items and workspace follow from the number of threads.
    pub blocks: Option<Blocks>,
}

/// One step of a partition.
#[derive(Clone, Debug)]
pub struct Step {
    /// Operation and operands.
    pub kind: StepKind,
    /// Path of the node in the user's model, for errors.
    pub origin: String,
    /// Steps of the same partition that must be done before: those that write operands of this one, and those that still use memory which
    /// this one writes. All ids are smaller than this step's own.
    pub deps: Vec<StepId>,
}

/// Identifies a transfer. At run time a key also carries the epoch of the run, so that a stale arrival is never taken for a fresh one.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// Sending device.
    pub source: DeviceName,
    /// Receiving device.
    pub destination: DeviceName,
    /// Name of the tensor; unique per (source, destination).
    pub tensor: String,
}

/// Operation of a step.
#[derive(Clone, Debug)]
pub enum StepKind {
    /// Runs a kernel over `items` work items.
    Kernel {
        /// The kernel.
        kernel: KernelId,
        /// Inputs, then outputs (without workspace, which the executor appends).
        args: Vec<BufferId>,
        /// Number of outputs: the last ones of `args`.
        n_outputs: u32,
        /// Number of work items; 0 makes the step a no-op. A GPU's kernel has one, whatever it launches.
        items: u64,
        /// Fewest items worth giving to a thread; 0 = run all items as one range on one thread.
        grain: u64,
    },
    /// Publishes a copy of `buffer` under `key`. Never blocks.
    Send {
        /// The transfer; its source is this partition's device.
        key: Key,
        /// The tensor.
        buffer: BufferId,
    },
    /// Waits for `key` and writes it into `buffer`. Waiting before the tensor was sent is legal and does not hold up other ready steps.
    Recv {
        /// The transfer; its destination is this partition's device.
        key: Key,
        /// Where to put it: dtype and shape of the sent buffer.
        buffer: BufferId,
    },
    /// Copies `src` to `dst`: same size in bytes, no overlap unless they are the same bytes.
    Copy {
        /// From.
        src: BufferId,
        /// To.
        dst: BufferId,
    },
    /// Reduces a buffer with those of other devices.
    AllReduce(Box<AllReduce>),
    /// Runs one of two sub-programs.
    If(Box<If>),
    /// Runs a sub-program repeatedly.
    Loop(Box<Loop>),
    /// Copies the current value of a variable into `dst`, as one indivisible read. Where every use of the variable
    /// is at a fixed place of the program, its buffers at [`Loc::Variable`] and [`Loc::Assigned`] need no copies.
    ReadVariable {
        /// Index into [`Program::variables`].
        variable: u32,
        /// To: dtype and shape of the variable.
        dst: BufferId,
    },
    /// Sets a variable to the contents of `src`, as one indivisible write.
    AssignVariable {
        /// Index into [`Program::variables`].
        variable: u32,
        /// From: dtype and shape of the variable.
        src: BufferId,
    },
}

/// Operands of [`StepKind::AllReduce`]: one of its ranks.
///
/// Its device does nothing else until every rank has come to it, so each step of the partition comes before or after it by its dependencies.
#[derive(Clone, Debug)]
pub struct AllReduce {
    /// Name, the same for all ranks; unique per program.
    pub key: String,
    /// Index of this device among `devices`.
    pub rank: u32,
    /// Devices of all ranks, in order.
    pub devices: Vec<DeviceName>,
    /// The operator.
    pub kind: Reduction,
    /// This device's elements.
    pub src: BufferId,
    /// The result: dtype and size of `src`.
    pub dst: BufferId,
}

/// Operands of [`StepKind::If`]. Both branches take `args` as their inputs and give `results` as their outputs.
#[derive(Clone, Debug)]
pub struct If {
    /// `bool` with one element.
    pub cond: BufferId,
    /// Runs when `cond` is true.
    pub then_branch: Arc<Program>,
    /// Runs when it is false.
    pub else_branch: Arc<Program>,
    /// Inputs of either branch, in order.
    pub args: Vec<BufferId>,
    /// Outputs of either branch, in order. They overlap neither `args` nor each other.
    pub results: Vec<BufferId>,
}

/// Number of iterations of a loop, or the operands that decide it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TripCount {
    /// Exactly so many times (ONNX `Scan`). The body has neither iteration number nor condition.
    Fixed(u64),
    /// ONNX `Loop`. The body's first two inputs are the iteration number (`i64`, one element) and the condition (`bool`, one element), its
    /// first output is the next condition.
    While {
        /// `i64`, one element: most iterations (negative counts as 0); `None` = no bound.
        max_trips: Option<BufferId>,
        /// `bool`, one element: whether to run the first iteration. `None` = the condition is ignored throughout, as ONNX says; then
        /// `max_trips` must be there. (Pass a constant `true` to let only the body's condition end the loop.)
        condition: Option<BufferId>,
    },
}

/// A value carried from iteration to iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Carried {
    /// Value before the first iteration.
    pub init: BufferId,
    /// Value after the last one; same dtype and shape. Overlaps no other operand of the loop.
    pub result: BufferId,
}

/// A tensor whose slices along axis 0 are taken or given by the iterations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scanned {
    /// The whole tensor. For outputs, axis 0 is exactly the number of iterations: a loop that ends with another count is an error at run
    /// time that names the node.
    pub buffer: BufferId,
    /// Iteration `i` of `n` uses slice `n - 1 - i` (`n` being the extent of axis 0) instead of slice `i`.
    pub reverse: bool,
}

/// Operands of [`StepKind::Loop`].
///
/// Body inputs: \[iteration, condition\] (only [`TripCount::While`]), carried values, slices of `scan_inputs`, `args`.
/// Body outputs: \[condition\] (only `While`), carried values, slices of `scan_outputs`.
#[derive(Clone, Debug)]
pub struct Loop {
    /// Number of iterations.
    pub trips: TripCount,
    /// Sub-program of one iteration.
    pub body: Arc<Program>,
    /// Values carried between iterations.
    pub carried: Vec<Carried>,
    /// Tensors read slice by slice; their extent of axis 0 bounds the iterations (passing it is an error).
    pub scan_inputs: Vec<Scanned>,
    /// Tensors written slice by slice.
    pub scan_outputs: Vec<Scanned>,
    /// Values that every iteration sees unchanged.
    pub args: Vec<BufferId>,
    /// Steps of the body, in order, which run in the first iteration alone: some of [`invariant_steps`].
    pub once: Vec<StepId>,
}

impl Program {
    /// Calls `f` with all kernels of CPUs, those of sub-programs too.
    pub fn visit_cpu_kernels(&self, f: &mut impl FnMut(&CpuKernel)) {
        for partition in &self.partitions {
            for kernel in &partition.kernels {
                if let Kernel::Cpu(kernel) = kernel {
                    f(kernel);
                }
            }
            let bodies = partition.steps.iter().flat_map(|s| s.kind.sub_programs());
            bodies.for_each(|body| body.visit_cpu_kernels(f));
        }
    }

    /// True when it, or a sub-program, assigns variables.
    pub fn assigns(&self) -> bool {
        let mut buffers = self.partitions.iter().flat_map(|p| &p.buffers);
        let mut steps = self.partitions.iter().flat_map(|p| &p.steps);
        buffers.any(|b| matches!(b.loc, Loc::Assigned(_)))
            || steps.any(|step| {
                let is_assignment = matches!(step.kind, StepKind::AssignVariable { .. });
                is_assignment || step.kind.sub_programs().iter().any(|p| p.assigns())
            })
    }

    /// True for a device of another task: transfers from and to it have their other end there. A device with a partition is not one.
    pub fn is_remote(&self, device: &DeviceName) -> bool {
        let is_here = || self.partitions.iter().any(|p| p.device == *device);
        !device.is_local() && !is_here()
    }

    /// True when it, or a sub-program, uses variables.
    pub fn has_state(&self) -> bool {
        let steps = self.partitions.iter().flat_map(|p| &p.steps);
        let mut sub_programs = steps.flat_map(|step| step.kind.sub_programs());
        !self.variables.is_empty() || sub_programs.any(|p| p.has_state())
    }
}

impl IoSpec {
    /// An input or output description.
    pub fn new(name: impl Into<String>, dtype: DType, shape: &[usize]) -> IoSpec {
        IoSpec {
            name: name.into(),
            dtype,
            shape: shape.to_vec(),
        }
    }
}

impl Buffer {
    /// Size of the elements in bytes.
    ///
    /// Saturates instead of overflowing: [`Program::validate`] refuses such a buffer.
    pub fn size_bytes(&self) -> usize {
        crate::tensor::checked_size_bytes(self.dtype, &self.shape).unwrap_or(usize::MAX)
    }
}
