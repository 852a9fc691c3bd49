//! A run allocates nothing once the executor is made. This is a test binary of its own because it replaces the global allocator.

use gristmill_runtime::device::{DeviceKind, DeviceName};
use gristmill_runtime::exec::{ExecOptions, Executor};
use gristmill_runtime::program::*;
use gristmill_runtime::{DType, Tensor};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The system allocator, counting requests of all threads.
struct Counting;

static REQUESTS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: everything is passed on to the system allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        REQUESTS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        REQUESTS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const N: usize = 256;

/// c = a + b over f32, with the workspace as a detour.
unsafe extern "C" fn add(args: *const *mut u8, begin: u64, end: u64) -> u32 {
    // SAFETY: used with three buffers of N floats and a workspace of four bytes.
    unsafe {
        let arg = |i: usize| *args.add(i) as *mut f32;
        for i in begin as usize..end as usize {
            *arg(3) = *arg(0).add(i) + *arg(1).add(i);
            *arg(2).add(i) = *arg(3);
        }
    }
    0
}

fn cpu(index: u32) -> DeviceName {
    DeviceName::local(DeviceKind::Cpu, index)
}

fn buffer(name: &str, loc: Loc) -> Buffer {
    Buffer { name: name.into(), dtype: DType::F32, shape: vec![N], loc }
}

fn at(slot: usize) -> Loc {
    Loc::Arena { offset_bytes: slot * N * 4 }
}

fn step(kind: StepKind, deps: &[u32]) -> Step {
    Step { kind, origin: "/n".into(), deps: deps.iter().map(|&d| StepId(d)).collect() }
}

fn sum(a: u32, b: u32, c: u32, deps: &[u32]) -> Step {
    let args = [a, b, c].map(BufferId).to_vec();
    step(StepKind::Kernel { kernel: KernelId(0), args, n_outputs: 1, items: N as u64, grain: 8 }, deps)
}

fn partition(device: u32, buffers: Vec<Buffer>, steps: Vec<Step>) -> Partition {
    // SAFETY: all steps pass three buffers of N floats.
    let entry = unsafe { KernelEntry::new(add) };
    let kernels = vec![Kernel::Cpu(CpuKernel { name: "add".into(), entry, workspace_bytes_per_thread: 4 })];
    let arena_bytes = 4 * N * 4;
    let (constants, gpu_code, memory_limit) = (vec![], vec![], None);
    Partition { device: cpu(device), arena_bytes, buffers, constants, kernels, gpu_code, steps, memory_limit }
}

fn io(name: &str) -> Vec<IoSpec> {
    vec![IoSpec::new(name, DType::F32, &[N])]
}

fn program(inputs: Vec<IoSpec>, outputs: Vec<IoSpec>, partitions: Vec<Partition>) -> Program {
    Program { name: "p".into(), inputs, outputs, variables: vec![], partitions, code: vec![] }
}

/// y = 5 x, computed by a loop on device 1 that adds x to its argument three times: x + x, sent there and looped, comes back.
fn everything() -> Program {
    let body = {
        let buffers = vec![buffer("s", Loc::Input(0)), buffer("x", Loc::Input(1)), buffer("next", Loc::Output(0))];
        program([io("s"), io("x")].concat(), io("next"), vec![partition(1, buffers, vec![sum(0, 1, 2, &[])])])
    };
    let key = |from, to, tensor: &str| Key { source: cpu(from), destination: cpu(to), tensor: tensor.into() };
    let send = |key, b| StepKind::Send { key, buffer: BufferId(b) };
    let recv = |key, b| StepKind::Recv { key, buffer: BufferId(b) };
    let here = partition(
        0,
        vec![buffer("x", Loc::Input(0)), buffer("t", at(0)), buffer("u", at(1)), buffer("y", Loc::Output(0))],
        vec![
            step(recv(key(1, 0, "u"), 2), &[]),
            sum(0, 0, 1, &[]),
            step(send(key(0, 1, "t"), 1), &[1]),
            step(StepKind::Copy { src: BufferId(2), dst: BufferId(3) }, &[0]),
        ],
    );
    let three_times = Loop {
        trips: TripCount::Fixed(3),
        body: Arc::new(body),
        carried: vec![Carried { init: BufferId(1), result: BufferId(2) }],
        scan_inputs: vec![],
        scan_outputs: vec![],
        args: vec![BufferId(0)],
    };
    let there = partition(
        1,
        vec![buffer("x", Loc::Input(0)), buffer("t", at(0)), buffer("u", at(1)), buffer("v", at(2))],
        vec![
            step(recv(key(0, 1, "t"), 1), &[]),
            step(StepKind::Loop(Box::new(three_times)), &[0]),
            step(StepKind::AssignVariable { variable: 0, src: BufferId(2) }, &[1]),
            step(StepKind::ReadVariable { variable: 0, dst: BufferId(3) }, &[2]),
            step(send(key(1, 0, "u"), 3), &[3]),
        ],
    );
    let mut program = program(io("x"), io("y"), vec![here, there]);
    let (container, name) = (String::new(), "v".to_owned());
    program.variables.push(VariableSpec { container, name, dtype: DType::F32, shape: vec![N], initial: None });
    program
}

#[test]
fn runs_after_the_first_allocate_nothing() {
    for threads in [1, 2, 4] {
        let options = ExecOptions { threads, ..ExecOptions::default() };
        let executor = Executor::new(Arc::new(everything()), &options).unwrap();
        let inputs = [Tensor::from_slice(&[2f32; N], &[N]).unwrap()];
        let mut outputs = [Tensor::zeros(DType::F32, &[N]).unwrap()];
        executor.run_into(&inputs, &mut outputs).unwrap();
        let before = REQUESTS.load(Ordering::Relaxed);
        for _ in 0..200 {
            executor.run_into(&inputs, &mut outputs).unwrap();
        }
        let requests = REQUESTS.load(Ordering::Relaxed) - before;
        assert_eq!(outputs[0].as_slice::<f32>(), [10.0; N]);
        assert_eq!(requests, 0, "{threads} threads");
    }
}
