//! The parts of a program as an image holds them. The order of fields and the numbers of variants are the format: a change of either is
//! a new [`FORMAT`](super::FORMAT).

use super::codec::{Item, Reader, Writer, choice, damaged, not_written, record};
use crate::device::{DeviceKind, DeviceName};
use crate::driver::Reduction;
use crate::dtype::DType;
use crate::error::Error;
use crate::gpu::GpuCode;
use crate::program::{
    AllReduce, Blocks, Buffer, BufferId, Carried, CpuKernel, If, IoSpec, Kernel, KernelId, Key,
    Loc, Loop, Partition, Program, Scanned, Step, StepId, StepKind, TripCount, VariableSpec,
};
use gristmill_kernels::Blocked;

record! {
    Program { name, inputs, outputs, variables, partitions }
    IoSpec { name, dtype, shape }
    VariableSpec { container, name, dtype, initial, in_place }
    Partition {
        device, arena_bytes, buffers, constants, kernels, gpu_code, steps, memory_limit,
    }
    DeviceName { job, replica, task, kind, index }
    Buffer { name, dtype, shape, loc }
    CpuKernel { name, function, workspace_bytes_per_thread, blocks }
    Blocks { kind, descriptor, cost_ns }
    Step { kind, origin, deps }
    Key { source, destination, tensor }
    AllReduce { key, rank, devices, kind, src, dst }
    If { cond, then_branch, else_branch, args, results }
    Loop { trips, body, carried, scan_inputs, scan_outputs, args, once }
    Carried { init, result }
    Scanned { buffer, reverse }
}

choice! {
    Blocked { 1 Gemm, 2 Conv, 3 Winograd, 4 Attention }
    DeviceKind { 0 Cpu, 1 Gpu, 2 Emu }
    Reduction { 0 Sum, 1 Prod, 2 Max, 3 Min }
    Loc {
        0 Arena { offset_bytes },
        1 Constant(i),
        2 Input(i),
        3 Output(i),
        4 Variable(i),
        5 Assigned(i),
    }
    Kernel { 0 Cpu(kernel) }
    TripCount { 0 Fixed(n), 1 While { max_trips, condition } }
    StepKind {
        0 Kernel { kernel, args, n_outputs, items, grain },
        1 Send { key, buffer },
        2 Recv { key, buffer },
        3 Copy { src, dst },
        4 AllReduce(reduce),
        5 If(branches),
        6 Loop(repeated),
        7 ReadVariable { variable, dst },
        8 AssignVariable { variable, src },
    }
}

macro_rules! indices {
    ($($ty:ident),*) => {$(
        impl Item for $ty {
            fn write(&self, w: &mut Writer) -> Result<(), Error> {
                self.0.write(w)
            }

            fn read(r: &mut Reader) -> Result<$ty, Error> {
                Item::read(r).map($ty)
            }
        }
    )*};
}

indices!(BufferId, KernelId, StepId);

impl Item for DType {
    fn write(&self, w: &mut Writer) -> Result<(), Error> {
        self.name().to_owned().write(w)
    }

    fn read(r: &mut Reader) -> Result<DType, Error> {
        let name = String::read(r)?;
        DType::parse(&name).ok_or_else(|| damaged("an unknown dtype"))
    }
}

impl Item for GpuCode {
    fn write(&self, _: &mut Writer) -> Result<(), Error> {
        Err(not_written(self))
    }

    fn read(_: &mut Reader) -> Result<GpuCode, Error> {
        Err(damaged("code of a GPU"))
    }
}
