//! A run allocates nothing once the executor is made. This is a test binary of its own because it replaces the global allocator.

use gristmill_runtime::cuda::{CudaGpu, Settings};
use gristmill_runtime::device::{DeviceKind, DeviceName};
use gristmill_runtime::driver::{Driver, Reduction};
use gristmill_runtime::exec::{ExecOptions, Executor, Pool};
use gristmill_runtime::gpu::{GpuCode, GpuKernel, GpuParam, Launch};
use gristmill_runtime::product::{Compute, Matrix, Order, Product};
use gristmill_runtime::program::*;
use gristmill_runtime::text::Function;
use gristmill_runtime::{DType, Tensor};
use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
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
    Buffer {
        name: name.into(),
        dtype: DType::F32,
        shape: vec![N],
        loc,
    }
}

fn at(slot: usize) -> Loc {
    Loc::Arena {
        offset_bytes: slot * N * 4,
    }
}

fn step(kind: StepKind, deps: &[u32]) -> Step {
    Step {
        kind,
        origin: "/n".into(),
        deps: deps.iter().map(|&d| StepId(d)).collect(),
    }
}

fn sum(a: u32, b: u32, c: u32, deps: &[u32]) -> Step {
    let args = [a, b, c].map(BufferId).to_vec();
    step(
        StepKind::Kernel {
            kernel: KernelId(0),
            args,
            n_outputs: 1,
            items: N as u64,
            grain: 8,
        },
        deps,
    )
}

fn partition(device: u32, buffers: Vec<Buffer>, steps: Vec<Step>) -> Partition {
    // SAFETY: all steps pass three buffers of N floats.
    let function = unsafe { Function::of_process(add) };
    let kernels = vec![Kernel::Cpu(CpuKernel {
        name: "add".into(),
        function,
        workspace_bytes_per_thread: 4,
        blocks: None,
    })];
    let arena_bytes = 4 * N * 4;
    let (constants, gpu_code, memory_limit) = (vec![], vec![], None);
    Partition {
        device: cpu(device),
        arena_bytes,
        buffers,
        constants,
        kernels,
        gpu_code,
        steps,
        memory_limit,
    }
}

fn io(name: &str) -> Vec<IoSpec> {
    vec![IoSpec::new(name, DType::F32, &[N])]
}

fn program(inputs: Vec<IoSpec>, outputs: Vec<IoSpec>, partitions: Vec<Partition>) -> Program {
    Program {
        name: "p".into(),
        inputs,
        outputs,
        variables: vec![],
        partitions,
    }
}

/// y = 5 x, computed by a loop on device 1 that adds x to its argument three times: x + x, sent there and looped, comes back.
fn everything() -> Program {
    let body = {
        let buffers = vec![
            buffer("s", Loc::Input(0)),
            buffer("x", Loc::Input(1)),
            buffer("next", Loc::Output(0)),
        ];
        program(
            [io("s"), io("x")].concat(),
            io("next"),
            vec![partition(1, buffers, vec![sum(0, 1, 2, &[])])],
        )
    };
    let key = |from, to, tensor: &str| Key {
        source: cpu(from),
        destination: cpu(to),
        tensor: tensor.into(),
    };
    let send = |key, b| StepKind::Send {
        key,
        buffer: BufferId(b),
    };
    let recv = |key, b| StepKind::Recv {
        key,
        buffer: BufferId(b),
    };
    let here = partition(
        0,
        vec![
            buffer("x", Loc::Input(0)),
            buffer("t", at(0)),
            buffer("u", at(1)),
            buffer("y", Loc::Output(0)),
        ],
        vec![
            step(recv(key(1, 0, "u"), 2), &[]),
            sum(0, 0, 1, &[]),
            step(send(key(0, 1, "t"), 1), &[1]),
            step(
                StepKind::Copy {
                    src: BufferId(2),
                    dst: BufferId(3),
                },
                &[0],
            ),
        ],
    );
    let three_times = Loop {
        trips: TripCount::Fixed(3),
        body: Arc::new(body),
        carried: vec![Carried {
            init: BufferId(1),
            result: BufferId(2),
        }],
        scan_inputs: vec![],
        scan_outputs: vec![],
        args: vec![BufferId(0)],
        once: vec![],
    };
    let there = partition(
        1,
        vec![
            buffer("x", Loc::Input(0)),
            buffer("t", at(0)),
            buffer("u", at(1)),
            buffer("v", at(2)),
        ],
        vec![
            step(recv(key(0, 1, "t"), 1), &[]),
            step(StepKind::Loop(Box::new(three_times)), &[0]),
            step(
                StepKind::AssignVariable {
                    variable: 0,
                    src: BufferId(2),
                },
                &[1],
            ),
            step(
                StepKind::ReadVariable {
                    variable: 0,
                    dst: BufferId(3),
                },
                &[2],
            ),
            step(send(key(1, 0, "u"), 3), &[3]),
        ],
    );
    let mut program = program(io("x"), io("y"), vec![here, there]);
    let (container, name) = (String::new(), "v".to_owned());
    let spec = VariableSpec::new(&container, &name, DType::F32);
    program.variables.push(spec);
    program
}

/// One test, since requests of all threads are counted.
#[test]
fn runs_after_the_first_allocate_nothing() {
    if std::env::var_os(IN_CHILD).is_some() {
        return across_gpus_without_allocations();
    }
    for threads in [1, 2, 4] {
        let options = ExecOptions {
            pool: Arc::new(Pool::new(threads)),
            ..ExecOptions::default()
        };
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
    start_with_emulated_driver();
}

/// Set in the process whose CUDA driver is the emulated one.
const IN_CHILD: &str = "GRISTMILL_TEST_IN_CHILD";

/// `twice`: `[in, out, status]`, one float per thread.
const TWICE: &str = "
.version 8.0
.target sm_80
.address_size 64
.visible .entry twice(.param .u64 from, .param .u64 to, .param .u64 status) {
    .reg .f32 %f<3>;
    .reg .b32 %r<2>;
    .reg .b64 %rd<6>;
    ld.param.u64 %rd1, [from];
    ld.param.u64 %rd2, [to];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd4, %rd1, %rd3;
    add.s64 %rd5, %rd2, %rd3;
    ld.global.f32 %f1, [%rd4];
    add.f32 %f2, %f1, %f1;
    st.global.f32 [%rd5], %f2;
    ret;
}
";

fn gpu(index: u32) -> DeviceName {
    DeviceName::local(DeviceKind::Gpu, index)
}

fn on_gpu(index: u32, buffers: Vec<Buffer>, steps: Vec<Step>) -> Partition {
    let launch = Launch {
        grid: [1; 3],
        block: [N as u32, 1, 1],
        shared_bytes: 0,
    };
    let params = vec![GpuParam::Buffer(0), GpuParam::Buffer(1), GpuParam::Status];
    let kernel = GpuKernel {
        name: "twice".into(),
        code: 0,
        entry: "twice".into(),
        launch,
        params,
    };
    let gpu_code = vec![GpuCode {
        arch: "sm_80".into(),
        ptx: TWICE.into(),
        cubin: vec![],
    }];
    let kernels = vec![Kernel::Gpu(kernel)];
    Partition {
        device: gpu(index),
        kernels,
        gpu_code,
        ..partition(0, buffers, steps)
    }
}

fn twice(from: u32, to: u32, deps: &[u32]) -> Step {
    let args = [from, to].map(BufferId).to_vec();
    step(
        StepKind::Kernel {
            kernel: KernelId(0),
            args,
            n_outputs: 1,
            items: 1,
            grain: 0,
        },
        deps,
    )
}

/// y = 16 x and z = 3 x: GPU 0 sends 2 x to the host, and 4 x to GPU 1, which doubles twice.
fn across_gpus(sends_to_gpu: bool) -> Program {
    let key = |from: DeviceName, to: DeviceName| Key {
        source: from,
        destination: to,
        tensor: "t".into(),
    };
    let to_host = key(gpu(0), cpu(0));
    let send = |key: &Key, b| StepKind::Send {
        key: key.clone(),
        buffer: BufferId(b),
    };
    let recv = |key: &Key, b| StepKind::Recv {
        key: key.clone(),
        buffer: BufferId(b),
    };
    let x = || buffer("x", Loc::Input(0));
    let mut first = on_gpu(
        0,
        vec![
            x(),
            buffer("a", at(0)),
            buffer("b", at(1)),
            buffer("y", Loc::Output(0)),
        ],
        vec![
            twice(0, 1, &[]),
            step(send(&to_host, 1), &[0]),
            twice(1, 2, &[0]),
        ],
    );
    let host = partition(
        0,
        vec![x(), buffer("a", at(0)), buffer("z", Loc::Output(1))],
        vec![step(recv(&to_host, 1), &[]), sum(0, 1, 2, &[0])],
    );
    let mut partitions = vec![host];
    if sends_to_gpu {
        let to_gpu = key(gpu(0), gpu(1));
        // The output is the other GPU's.
        first.buffers.pop();
        first.steps.push(step(send(&to_gpu, 2), &[2]));
        // What was sent is overwritten at once: that waits for the copy.
        first.steps.push(twice(0, 2, &[3]));
        let buffers = vec![
            buffer("b", at(0)),
            buffer("c", at(1)),
            buffer("y", Loc::Output(0)),
        ];
        let steps = vec![
            step(recv(&to_gpu, 0), &[]),
            twice(0, 1, &[0]),
            twice(1, 2, &[1]),
        ];
        partitions.push(on_gpu(1, buffers, steps));
    } else {
        first
            .steps
            .extend([twice(2, 1, &[1, 2]), twice(1, 3, &[3])]);
    }
    partitions.push(first);
    let io = |name: &str| IoSpec::new(name, DType::F32, &[N]);
    program(vec![io("x")], vec![io("y"), io("z")], partitions)
}

/// y = 24 x and z = 19 x: a GPU sends 2 x and later 16 x to the host, which gives it 3 x meanwhile.
fn received_in_the_middle() -> Program {
    let key = |from: DeviceName, to: DeviceName, tensor: &str| Key {
        source: from,
        destination: to,
        tensor: tensor.into(),
    };
    let [two, sixteen] = ["two", "sixteen"].map(|name| key(gpu(0), cpu(0), name));
    let three = key(cpu(0), gpu(0), "three");
    let send = |key: &Key, b| StepKind::Send {
        key: key.clone(),
        buffer: BufferId(b),
    };
    let recv = |key: &Key, b| StepKind::Recv {
        key: key.clone(),
        buffer: BufferId(b),
    };
    let x = || buffer("x", Loc::Input(0));
    // Places are used again as soon as that may be.
    let on_device = on_gpu(
        0,
        vec![
            x(),
            buffer("2x", at(0)),
            buffer("4x", at(1)),
            buffer("8x", at(2)),
            buffer("16x", at(3)),
            buffer("3x", at(1)),
            buffer("6x", at(2)),
            buffer("12x", at(0)),
            buffer("y", Loc::Output(0)),
        ],
        vec![
            twice(0, 1, &[]),
            step(send(&two, 1), &[0]),
            twice(1, 2, &[0]),
            twice(2, 3, &[2]),
            twice(3, 4, &[3]),
            step(send(&sixteen, 4), &[4]),
            step(recv(&three, 5), &[3]),
            twice(5, 6, &[4, 6]),
            twice(6, 7, &[1, 2, 7]),
            twice(7, 8, &[8]),
        ],
    );
    let host = partition(
        0,
        vec![
            x(),
            buffer("2x", at(0)),
            buffer("3x", at(1)),
            buffer("16x", at(2)),
            buffer("z", Loc::Output(1)),
        ],
        vec![
            step(recv(&two, 1), &[]),
            sum(0, 1, 2, &[0]),
            step(send(&three, 2), &[1]),
            step(recv(&sixteen, 3), &[]),
            sum(2, 3, 4, &[1, 3]),
        ],
    );
    let io = |name: &str| IoSpec::new(name, DType::F32, &[N]);
    program(vec![io("x")], vec![io("y"), io("z")], vec![host, on_device])
}

/// y = 10 x and z = 20 x: two GPUs sum 8 x and 2 x.
fn reduced() -> Program {
    let sum = |rank, src, dst| {
        let (key, devices) = ("sum".to_owned(), vec![gpu(0), gpu(1)]);
        let (src, dst) = (BufferId(src), BufferId(dst));
        StepKind::AllReduce(Box::new(AllReduce {
            key,
            rank,
            devices,
            kind: Reduction::Sum,
            src,
            dst,
        }))
    };
    let x = || buffer("x", Loc::Input(0));
    let first = on_gpu(
        0,
        vec![
            x(),
            buffer("2x", at(0)),
            buffer("4x", at(1)),
            buffer("8x", at(2)),
            buffer("y", Loc::Output(0)),
        ],
        vec![
            twice(0, 1, &[]),
            twice(1, 2, &[0]),
            twice(2, 3, &[1]),
            step(sum(0, 3, 4), &[2]),
        ],
    );
    let second = on_gpu(
        1,
        vec![
            x(),
            buffer("2x", at(0)),
            buffer("10x", at(1)),
            buffer("z", Loc::Output(1)),
        ],
        vec![
            twice(0, 1, &[]),
            step(sum(1, 1, 2), &[0]),
            twice(2, 3, &[1]),
        ],
    );
    let io = |name: &str| IoSpec::new(name, DType::F32, &[N]);
    program(vec![io("x")], vec![io("y"), io("z")], vec![first, second])
}

/// y = 16 x and z = 3 x, as in [`across_gpus`], where a library multiplies the 4 x 64 elements of 2 x by twice the identity.
fn with_a_product() -> Program {
    const SIDE: usize = 64;
    let mut program = across_gpus(false);
    let first = &mut program.partitions[1];
    let dense = Matrix::dense(DType::F32, SIDE);
    let product = Product {
        name: "product".into(),
        m: N / SIDE,
        n: SIDE,
        k: SIDE,
        n_batch: 1,
        lhs: dense,
        rhs: Matrix {
            order: Order::Column,
            ..dense
        },
        out: dense,
        compute: Compute::F32,
        bias: Some(0),
        relu: true,
        workspace_bytes: 1000,
    };
    let identity: Vec<f32> = (0..SIDE * SIDE)
        .map(|i| if i % (SIDE + 1) == 0 { 2.0 } else { 0.0 })
        .collect();
    first
        .constants
        .push(Tensor::from_slice(&identity, &[SIDE, SIDE]).unwrap());
    first
        .constants
        .push(Tensor::zeros(DType::F32, &[SIDE]).unwrap());
    let n_bytes = product.workspace_buffer_bytes();
    let of = |name: &str, dtype, shape: &[usize], loc| Buffer {
        name: name.into(),
        dtype,
        shape: shape.to_vec(),
        loc,
    };
    first.arena_bytes += 2 * n_bytes;
    first.buffers.extend([
        of("2 I", DType::F32, &[SIDE, SIDE], Loc::Constant(0)),
        of("bias", DType::F32, &[SIDE], Loc::Constant(1)),
        // Not where the library needs it to begin.
        of(
            "workspace",
            DType::U8,
            &[n_bytes],
            Loc::Arena {
                offset_bytes: 4 * N * 4 + 64,
            },
        ),
    ]);
    first.kernels.push(Kernel::Product(product));
    let args = [1, 4, 5, 2, 6].map(BufferId).to_vec();
    first.steps[2].kind = StepKind::Kernel {
        kernel: KernelId(1),
        args,
        n_outputs: 2,
        items: 1,
        grain: 0,
    };
    program
}

/// A program, what it multiplies its input by, and how many pieces of each partition are one request.
type Case = (Program, [f32; 2], &'static [usize]);

fn across_gpus_without_allocations() {
    let cases: [Case; 5] = [
        (with_a_product(), [16.0, 3.0], &[0, 1]),
        (across_gpus(false), [16.0, 3.0], &[0, 1]),
        (across_gpus(true), [16.0, 3.0], &[0, 0, 0]),
        (received_in_the_middle(), [24.0, 19.0], &[0, 2]),
        (reduced(), [10.0, 20.0], &[1, 0]),
    ];
    for (i, (program, factors, captured)) in cases.into_iter().enumerate() {
        let open = |i| Arc::new(CudaGpu::open(i, Settings::default()).unwrap()) as Arc<dyn Driver>;
        let drivers = (0..2)
            .map(|i| (gpu(i), open(i)))
            .collect::<BTreeMap<_, _>>();
        let options = ExecOptions {
            pool: Arc::new(Pool::new(3)),
            drivers,
            ..ExecOptions::default()
        };
        let executor = Executor::new(Arc::new(program), &options).unwrap();
        let mut outputs = [0; 2].map(|_| Tensor::zeros(DType::F32, &[N]).unwrap());
        let inputs = [1f32, 2.0, 3.0].map(|x| [Tensor::from_slice(&[x; N], &[N]).unwrap()]);
        // The second run is captured, where that can be.
        (0..3).for_each(|_| executor.run_into(&inputs[0], &mut outputs).unwrap());
        let before = REQUESTS.load(Ordering::Relaxed);
        for run in 0..30 {
            executor.run_into(&inputs[run % 3], &mut outputs).unwrap();
            let x = (run % 3 + 1) as f32;
            assert_eq!(
                outputs[0].as_slice::<f32>(),
                [factors[0] * x; N],
                "case {i}, run {run}"
            );
            assert_eq!(
                outputs[1].as_slice::<f32>(),
                [factors[1] * x; N],
                "case {i}, run {run}"
            );
        }
        assert_eq!(REQUESTS.load(Ordering::Relaxed) - before, 0, "case {i}");
        assert_eq!(executor.captured(), captured, "case {i}");
    }
}

/// Runs the test again in a process of its own, whose CUDA driver is the emulated one. That driver's own allocations are not counted: it has its own
/// allocator.
fn start_with_emulated_driver() {
    let test = std::env::current_exe().unwrap();
    let (prefix, suffix) = (std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    let library: PathBuf = test.with_file_name(format!("{prefix}gristmill_emulated_cuda{suffix}"));
    let output = Command::new(&test)
        .args([
            "--exact",
            "runs_after_the_first_allocate_nothing",
            "--nocapture",
        ])
        .envs([
            ("GRISTMILL_CUDA", library.as_path()),
            ("GRISTMILL_NCCL", library.as_path()),
            ("GRISTMILL_CUBLASLT", library.as_path()),
            ("EMULATED_CUDA", "devices=2".as_ref()),
            (IN_CHILD, "1".as_ref()),
        ])
        .env_remove("CUDA_VISIBLE_DEVICES")
        .output()
        .unwrap();
    let text = [output.stdout, output.stderr]
        .map(|b| String::from_utf8_lossy(&b).into_owned())
        .concat();
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}"
    );
}
