//! Small programs with kernels written in Rust, run by the real executor. All plain asserts: Miri
//! can run them, too.

mod device;
mod once;
mod overlap;
mod pool;
mod state;
mod wire;

use super::emulate::{LinkRate, wait_kernel};
use super::*;
use crate::device::{DeviceKind, DeviceName};
use crate::dtype::DType;
use crate::program::*;
use crate::status;
use crate::text::Function;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc;
use std::time::Duration;

/// Reads `n` arguments of the kernel ABI.
///
/// # Safety
/// `args` is a list of at least `N` pointers to f32.
unsafe fn f32_args<const N: usize>(args: *const *mut u8) -> [*mut f32; N] {
    // SAFETY: the caller's promise.
    std::array::from_fn(|i| unsafe { *args.add(i) } as *mut f32)
}

unsafe extern "C" fn add(args: *const *mut u8, begin: u64, end: u64) -> u32 {
    // SAFETY: used with three f32 buffers of at least `items` elements.
    unsafe {
        let [a, b, c] = f32_args(args);
        (begin as usize..end as usize).for_each(|i| *c.add(i) = *a.add(i) + *b.add(i));
    }
    status::OK
}

/// Like `add`, with the sum going through the workspace (8 bytes).
unsafe extern "C" fn add_by_workspace(args: *const *mut u8, begin: u64, end: u64) -> u32 {
    // SAFETY: as in `add`; the fourth argument is this thread's workspace.
    unsafe {
        let [a, b, c, w] = f32_args(args);
        for i in begin as usize..end as usize {
            *w = *a.add(i);
            *w.add(1) = *b.add(i);
            std::hint::black_box(w);
            *c.add(i) = *w + *w.add(1);
        }
    }
    status::OK
}

/// `c = a + b`, and fails with "index out of range" when it meets a NaN.
unsafe extern "C" fn add_finite(args: *const *mut u8, begin: u64, end: u64) -> u32 {
    // SAFETY: as in `add`.
    unsafe {
        let [a, ..]: [*mut f32; 3] = f32_args(args);
        if (begin as usize..end as usize).any(|i| (*a.add(i)).is_nan()) {
            return status::INDEX_OUT_OF_RANGE;
        }
        add(args, begin, end)
    }
}

/// Inputs: iteration (i64), condition, x. Outputs: `iteration < 3`, x + 1.
unsafe extern "C" fn count_to_four(args: *const *mut u8, _begin: u64, _end: u64) -> u32 {
    // SAFETY: used with buffers of these types only.
    unsafe {
        let iteration = *(*args.add(0) as *const i64);
        *(*args.add(3) as *mut bool) = iteration < 3 && *(*args.add(1) as *const bool);
        *(*args.add(4) as *mut f32) = *(*args.add(2) as *const f32) + 1.0;
    }
    status::OK
}

fn kernel(name: &str, entry: KernelFn, workspace: usize) -> Kernel {
    // SAFETY: the tests use each kernel with the buffers it was written for.
    let function = unsafe { Function::of_process(entry) };
    Kernel::Cpu(CpuKernel {
        name: name.into(),
        function,
        workspace_bytes_per_thread: workspace,
        blocks: None,
    })
}

fn buffer(name: &str, dtype: DType, shape: &[usize], loc: Loc) -> Buffer {
    Buffer {
        name: name.into(),
        dtype,
        shape: shape.to_vec(),
        loc,
    }
}

fn at(offset_bytes: usize) -> Loc {
    Loc::Arena { offset_bytes }
}

fn ids(ids: &[u32]) -> Vec<BufferId> {
    ids.iter().map(|&i| BufferId(i)).collect()
}

fn step(kind: StepKind, origin: &str, deps: &[u32]) -> Step {
    Step {
        kind,
        origin: origin.into(),
        deps: deps.iter().map(|&d| StepId(d)).collect(),
    }
}

fn call(kernel: u32, args: &[u32], n: usize) -> StepKind {
    StepKind::Kernel {
        kernel: KernelId(kernel),
        args: ids(args),
        n_outputs: 1,
        items: n as u64,
        grain: 4,
    }
}

fn cpu(index: u32) -> DeviceName {
    DeviceName::local(DeviceKind::Cpu, index)
}

fn partition(
    device: u32,
    arena_bytes: usize,
    buffers: Vec<Buffer>,
    kernels: Vec<Kernel>,
    steps: Vec<Step>,
) -> Partition {
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

fn program(inputs: Vec<IoSpec>, outputs: Vec<IoSpec>, partitions: Vec<Partition>) -> Program {
    Program {
        name: "test".into(),
        inputs,
        outputs,
        variables: vec![],
        partitions,
    }
}

fn f32_io(name: &str, shape: &[usize]) -> IoSpec {
    IoSpec::new(name, DType::F32, shape)
}

fn key(from: u32, to: u32, tensor: &str) -> Key {
    Key {
        source: cpu(from),
        destination: cpu(to),
        tensor: tensor.into(),
    }
}

fn executor(program: Program, threads: usize) -> Executor {
    Executor::new(
        Arc::new(program),
        &ExecOptions {
            pool: Arc::new(Pool::new(threads)),
            ..ExecOptions::default()
        },
    )
    .unwrap()
}

/// Runs `body` on a thread of its own and fails if it takes over a minute, so that a hang is a failure.
fn watched(body: impl FnOnce() + Send + 'static) {
    let (sender, receiver) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        body();
        let _ = sender.send(());
    });
    match receiver.recv_timeout(Duration::from_secs(60)) {
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("the run hangs"),
        _ => thread.join().unwrap(),
    }
}

/// y = (x + x) + constant, on one device.
fn simple(n: usize, workspace: usize) -> Program {
    let buffers = vec![
        buffer("x", DType::F32, &[n], Loc::Input(0)),
        buffer("t", DType::F32, &[n], at(64)),
        buffer("c", DType::F32, &[n], Loc::Constant(0)),
        buffer("y", DType::F32, &[n], Loc::Output(0)),
    ];
    let entry = if workspace > 0 { add_by_workspace } else { add };
    let steps = vec![
        step(call(0, &[0, 0, 1], n), "/a", &[]),
        step(call(0, &[1, 2, 3], n), "/b", &[0]),
    ];
    let mut p = partition(
        0,
        64 + n * 4,
        buffers,
        vec![kernel("add", entry, workspace)],
        steps,
    );
    p.constants
        .push(Tensor::from_slice(&vec![10f32; n], &[n]).unwrap());
    program(vec![f32_io("x", &[n])], vec![f32_io("y", &[n])], vec![p])
}

/// Device 0: t = x + x, sent; receives u; y = u + x. Device 1: receives t; u = t + t, sent. With `fail`, device 1 fails on NaN.
fn there_and_back(n: usize) -> Program {
    let f32s = |name: &str, loc| buffer(name, DType::F32, &[n], loc);
    let size = (n * 4).next_multiple_of(64);
    let here = vec![
        f32s("x", Loc::Input(0)),
        f32s("t", at(0)),
        f32s("u", at(size)),
        f32s("y", Loc::Output(0)),
    ];
    let send = |key, buffer| StepKind::Send {
        key,
        buffer: BufferId(buffer),
    };
    let recv = |key, buffer| StepKind::Recv {
        key,
        buffer: BufferId(buffer),
    };
    let here_steps = vec![
        // The receive comes first in program order: it must not hold up the send that it depends on through the other device.
        step(recv(key(1, 0, "u"), 2), "/recv_u", &[]),
        step(call(0, &[0, 0, 1], n), "/t", &[]),
        step(send(key(0, 1, "t"), 1), "/send_t", &[1]),
        step(call(0, &[2, 0, 3], n), "/y", &[0]),
    ];
    let there = vec![f32s("t", at(0)), f32s("u", at(size))];
    let there_steps = vec![
        step(recv(key(0, 1, "t"), 0), "/recv_t", &[]),
        step(call(0, &[0, 0, 1], n), "/u", &[0]),
        step(send(key(1, 0, "u"), 1), "/send_u", &[1]),
    ];
    let partitions = vec![
        partition(0, 2 * size, here, vec![kernel("add", add, 0)], here_steps),
        partition(
            1,
            2 * size,
            there,
            vec![kernel("add_finite", add_finite, 0)],
            there_steps,
        ),
    ];
    program(vec![f32_io("x", &[n])], vec![f32_io("y", &[n])], partitions)
}

/// Device 0: t = x + x by `first`, sent. Device 1: receives t; y = t + t by `second`.
fn two_stages(n: usize, first: KernelFn, second: KernelFn) -> Program {
    let f32s = |name: &str, loc| buffer(name, DType::F32, &[n], loc);
    let size = (n * 4).next_multiple_of(64);
    let there = key(0, 1, "t");
    let here_steps = vec![
        step(call(0, &[0, 0, 1], n), "/t", &[]),
        step(
            StepKind::Send {
                key: there.clone(),
                buffer: BufferId(1),
            },
            "/send_t",
            &[0],
        ),
    ];
    let there_steps = vec![
        step(
            StepKind::Recv {
                key: there,
                buffer: BufferId(0),
            },
            "/recv_t",
            &[],
        ),
        step(call(0, &[0, 0, 1], n), "/y", &[0]),
    ];
    let here = vec![f32s("x", Loc::Input(0)), f32s("t", at(0))];
    let partitions = vec![
        partition(0, size, here, vec![kernel("first", first, 0)], here_steps),
        partition(
            1,
            size,
            vec![f32s("t", at(0)), f32s("y", Loc::Output(0))],
            vec![kernel("second", second, 0)],
            there_steps,
        ),
    ];
    program(vec![f32_io("x", &[n])], vec![f32_io("y", &[n])], partitions)
}

/// Runs of [`several_runs_are_in_flight`] that began, and ended, their stage; and whether each stage is busy.
static BEGUN: AtomicU64 = AtomicU64::new(0);
static ENDED: AtomicU64 = AtomicU64::new(0);
static BUSY: [AtomicBool; 2] = [const { AtomicBool::new(false) }; 2];
const N_RUNS: u64 = 12;

/// Computes in a stage of its own, which fails when it is busy.
///
/// # Safety
/// As for `add`.
unsafe fn add_in_stage(stage: usize, args: *const *mut u8, begin: u64, end: u64) -> u32 {
    if BUSY[stage].swap(true, Ordering::SeqCst) {
        return status::INDEX_OUT_OF_RANGE;
    }
    // SAFETY: the caller's promise.
    let done = unsafe { add(args, begin, end) };
    BUSY[stage].store(false, Ordering::SeqCst);
    done
}

unsafe extern "C" fn first_stage(args: *const *mut u8, begin: u64, end: u64) -> u32 {
    BEGUN.fetch_add(1, Ordering::SeqCst);
    // SAFETY: as in `add`.
    unsafe { add_in_stage(0, args, begin, end) }
}

/// Goes on once the run behind this one has begun.
unsafe extern "C" fn second_stage(args: *const *mut u8, begin: u64, end: u64) -> u32 {
    let others = (ENDED.load(Ordering::SeqCst) + 2).min(N_RUNS);
    while BEGUN.load(Ordering::SeqCst) < others {
        std::thread::yield_now();
    }
    ENDED.fetch_add(1, Ordering::SeqCst);
    // SAFETY: as in `add`.
    unsafe { add_in_stage(1, args, begin, end) }
}

/// The second device does not go on before the first one has begun the next run; each computes for one run at a time, in order.
#[test]
fn several_runs_are_in_flight() {
    watched(|| {
        let options = ExecOptions {
            pool: Arc::new(Pool::new(2)),
            ..ExecOptions::default()
        };
        let lanes = Lanes::new(
            Arc::new(two_stages(3, first_stage, second_stage)),
            &options,
            3,
        )
        .unwrap();
        let next = AtomicU64::new(0);
        let repeat = || loop {
            let run = next.fetch_add(1, Ordering::SeqCst);
            if run >= N_RUNS {
                return;
            }
            let x: Vec<f32> = (0..3).map(|i| (run * 10 + i) as f32).collect();
            let y = lanes.run(&[Tensor::from_slice(&x, &[3]).unwrap()]).unwrap();
            assert_eq!(
                y[0].as_slice::<f32>(),
                x.iter().map(|x| 4.0 * x).collect::<Vec<_>>()
            );
        };
        std::thread::scope(|s| (0..4).for_each(|_| drop(s.spawn(repeat))));
    });
}

#[test]
fn a_run_that_fails_leaves_those_behind_it_alone() {
    watched(|| {
        let options = ExecOptions {
            pool: Arc::new(Pool::new(2)),
            ..ExecOptions::default()
        };
        for (first, second) in [(add as KernelFn, add_finite as KernelFn), (add_finite, add)] {
            let lanes = Lanes::new(Arc::new(two_stages(2, first, second)), &options, 2).unwrap();
            let repeat = |x: f32| {
                for _ in 0..20 {
                    match lanes.run(&[Tensor::from_slice(&[x, x], &[2]).unwrap()]) {
                        Ok(y) => assert_eq!(y[0].as_slice::<f32>(), [4.0 * x; 2]),
                        Err(e) => assert!(x.is_nan(), "{e}"),
                    }
                }
            };
            std::thread::scope(|s| {
                [1.0, f32::NAN, 3.0]
                    .into_iter()
                    .for_each(|x| drop(s.spawn(move || repeat(x))))
            });
        }
    });
}

/// Each run has memory of its own; constants are the program's.
#[test]
fn a_limit_is_for_all_runs_in_flight() {
    let limited = |limit| {
        let mut p = simple(16, 0);
        p.partitions[0].memory_limit = Some(limit);
        p
    };
    let (_, memory) = limited(0).memory_use()[0].clone();
    let (own, shared) = (memory.arena_bytes, memory.constant_bytes);
    let options = ExecOptions {
        pool: Arc::new(Pool::new(1)),
        ..ExecOptions::default()
    };
    let new = |limit, n| Lanes::new(Arc::new(limited(limit)), &options, n).map(|l| l.n_lanes());
    assert_eq!(new(3 * own + shared, 3).unwrap(), 3);
    let error = new(3 * own + shared - 1, 3).unwrap_err();
    assert!(
        error.kind() == ErrorKind::OutOfMemory
            && error.to_string().contains("for 3 runs in flight"),
        "{error}"
    );
}

#[test]
fn addresses_of_elements_are_inputs_and_outputs() {
    let executor = executor(simple(3, 0), 2);
    let (x, mut y) = ([0f32, 1.0, 2.0, 3.0], [7f32; 5]);
    let (from, to) = (x[1..].as_ptr().cast(), y[1..].as_mut_ptr().cast());
    // SAFETY: three elements are behind each address.
    unsafe { executor.run_raw(&[from], &[to]) }.unwrap();
    assert_eq!(y, [7.0, 12.0, 14.0, 16.0, 7.0]);
    let refused = |inputs: &[*const u8], outputs: &[*mut u8]| {
        // SAFETY: refused before anything is read.
        let error = unsafe { executor.run_raw(inputs, outputs) }.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        error.to_string()
    };
    assert_eq!(refused(&[], &[to]), "expected 1 inputs, got 0");
    let between = from.wrapping_add(2);
    assert!(refused(&[between], &[to]).contains("expected a multiple of 4"));
    assert!(refused(&[from], &[std::ptr::null_mut()]).contains("output \"y\" is at 0x0"));
}

#[test]
fn one_device_with_any_number_of_threads() {
    for threads in [1, 2, 5] {
        for workspace in [0, 8] {
            for n in [0, 1, 3, 100, 1000] {
                let executor = executor(simple(n, workspace), threads);
                for round in 0..3 {
                    let x: Vec<f32> = (0..n).map(|i| (i + round) as f32).collect();
                    let y = executor
                        .run(&[Tensor::from_slice(&x, &[n]).unwrap()])
                        .unwrap();
                    let expected: Vec<f32> = x.iter().map(|x| x + x + 10.0).collect();
                    assert_eq!(
                        y[0].as_slice::<f32>(),
                        expected,
                        "{threads} {workspace} {n}"
                    );
                }
            }
        }
    }
}

#[test]
fn tensors_cross_devices_in_every_run() {
    watched(|| {
        for threads in [1, 2, 6] {
            let executor = executor(there_and_back(33), threads);
            assert_eq!(executor.threads_per_device(), (threads / 2).max(1));
            for round in 0..if cfg!(miri) { 3 } else { 300 } {
                let y = executor
                    .run(&[Tensor::from_slice(&[round as f32; 33], &[33]).unwrap()])
                    .unwrap();
                assert_eq!(y[0].as_slice::<f32>(), [5.0 * round as f32; 33]);
            }
        }
    });
}

/// Both steps wait for the first kernel; the send has the higher id.
#[test]
fn a_ready_send_goes_before_ready_kernels() {
    watched(|| {
        let mut p = there_and_back(4);
        let home = &mut p.partitions[0];
        home.arena_bytes += 64;
        home.buffers.push(buffer("v", DType::F32, &[4], at(128)));
        home.steps
            .insert(2, step(call(0, &[1, 0, 4], 4), "/v", &[1]));
        let e = executor(p, 2);
        e.start_profile().unwrap();
        e.run(&[Tensor::from_slice(&[1f32; 4], &[4]).unwrap()])
            .unwrap();
        let spans = &e.step_spans()[0];
        assert!(spans[3].1 <= spans[2].0, "the send waits for a kernel");
    });
}

#[test]
fn a_failing_device_ends_the_run_everywhere_and_the_next_run_works() {
    watched(|| {
        for threads in [1, 4] {
            let executor = executor(there_and_back(64), threads);
            for round in 0..if cfg!(miri) { 2 } else { 50 } {
                let bad = executor
                    .run(&[Tensor::from_slice(&[f32::NAN; 64], &[64]).unwrap()])
                    .unwrap_err();
                assert_eq!(
                    bad.to_string(),
                    "in node \"/u\": on /device:CPU:1: an index is out of range for its axis"
                );
                assert_eq!(
                    (bad.kind(), bad.node()),
                    (ErrorKind::InvalidInput, Some("/u"))
                );
                let y = executor
                    .run(&[Tensor::from_slice(&[round as f32; 64], &[64]).unwrap()])
                    .unwrap();
                assert_eq!(y[0].as_slice::<f32>(), [5.0 * round as f32; 64]);
            }
        }
    });
}

#[test]
fn a_sleeping_executor_wakes_up_and_concurrent_callers_take_turns() {
    watched(|| {
        let executor = executor(there_and_back(16), 4);
        std::thread::sleep(Duration::from_millis(20));
        std::thread::scope(|scope| {
            for caller in 0..3 {
                let executor = &executor;
                scope.spawn(move || {
                    for _ in 0..if cfg!(miri) { 2 } else { 50 } {
                        let y = executor
                            .run(&[Tensor::from_slice(&[caller as f32; 16], &[16]).unwrap()])
                            .unwrap();
                        assert_eq!(y[0].as_slice::<f32>(), [5.0 * caller as f32; 16]);
                    }
                });
            }
        });
    });
}

#[test]
fn inputs_and_outputs_are_checked() {
    let executor = executor(simple(4, 0), 1);
    let error = |inputs: &[Tensor]| executor.run(inputs).unwrap_err().to_string();
    let x = Tensor::zeros(DType::F32, &[4]).unwrap();
    assert_eq!(error(&[]), "expected 1 inputs [\"x\"], got 0");
    assert_eq!(
        error(&[x.reshaped(&[2, 2]).unwrap()]),
        "input \"x\": expected f32[4], got f32[2, 2]"
    );
    assert_eq!(
        error(&[Tensor::zeros(DType::I64, &[4]).unwrap()]),
        "input \"x\": expected f32[4], got i64[4]"
    );
    let bad = executor
        .run_into(
            std::slice::from_ref(&x),
            &mut [Tensor::zeros(DType::F32, &[5]).unwrap()],
        )
        .unwrap_err();
    assert_eq!(bad.to_string(), "output \"y\": expected f32[4], got f32[5]");
    // An output that shares bytes with the input gets bytes of its own.
    let mut y = [x.clone()];
    executor.run_into(std::slice::from_ref(&x), &mut y).unwrap();
    assert_eq!(
        (x.as_slice::<f32>(), y[0].as_slice::<f32>()),
        (&[0.0; 4][..], &[10.0; 4][..])
    );
}

#[test]
fn limits_and_foreign_devices_are_refused() {
    let new = |p: Program| {
        Executor::new(Arc::new(p), &ExecOptions::default())
            .map(|_| ())
            .unwrap_err()
    };
    let mut p = simple(100, 0);
    p.partitions[0].memory_limit = Some(500);
    let error = new(p);
    assert_eq!(error.kind(), ErrorKind::OutOfMemory);
    assert!(
        error
            .to_string()
            .starts_with("/device:CPU:0 needs 864 bytes"),
        "{error}"
    );
    assert!(
        error
            .to_string()
            .contains("its limit is 500 bytes; the plan's peak is"),
        "{error}"
    );
    let mut p = simple(100, 0);
    p.partitions[0].device.kind = DeviceKind::Gpu;
    assert_eq!(new(p).kind(), ErrorKind::Unsupported);
}

/// Takes a, b of [n]; gives a + b.
fn add_branch(n: usize) -> Program {
    let f32s = |name: &str, loc| buffer(name, DType::F32, &[n], loc);
    let buffers = vec![
        f32s("a", Loc::Input(0)),
        f32s("b", Loc::Input(1)),
        f32s("c", Loc::Output(0)),
    ];
    let p = partition(
        0,
        0,
        buffers,
        vec![kernel("add", add, 0)],
        vec![step(call(0, &[0, 1, 2], n), "/sum", &[])],
    );
    program(
        vec![f32_io("a", &[n]), f32_io("b", &[n])],
        vec![f32_io("c", &[n])],
        vec![p],
    )
}

/// Takes a, b of [n]; gives b.
fn copy_branch(n: usize) -> Program {
    let mut p = add_branch(n);
    p.partitions[0].kernels.clear();
    p.partitions[0].steps = vec![step(
        StepKind::Copy {
            src: BufferId(1),
            dst: BufferId(2),
        },
        "/copy",
        &[],
    )];
    p
}

#[test]
fn the_condition_picks_a_branch() {
    let buffers = vec![
        buffer("cond", DType::Bool, &[], Loc::Input(0)),
        buffer("x", DType::F32, &[3], Loc::Input(1)),
        buffer("y", DType::F32, &[3], Loc::Output(0)),
    ];
    let branches = If {
        cond: BufferId(0),
        then_branch: Arc::new(add_branch(3)),
        else_branch: Arc::new(copy_branch(3)),
        args: ids(&[1, 1]),
        results: ids(&[2]),
    };
    let p = partition(
        0,
        0,
        buffers,
        vec![],
        vec![step(StepKind::If(Box::new(branches)), "/if", &[])],
    );
    let inputs = vec![IoSpec::new("cond", DType::Bool, &[]), f32_io("x", &[3])];
    let executor = executor(program(inputs, vec![f32_io("y", &[3])], vec![p]), 2);
    let x = Tensor::from_slice(&[1f32, 2.0, 3.0], &[3]).unwrap();
    for (cond, expected) in [
        (true, [2f32, 4.0, 6.0]),
        (false, [1.0, 2.0, 3.0]),
        (true, [2.0, 4.0, 6.0]),
    ] {
        let y = executor.run(&[Tensor::scalar(cond), x.clone()]).unwrap();
        assert_eq!(y[0].as_slice::<f32>(), expected);
    }
}

/// Running sums of the rows of an [n, 2] tensor, from the last row if `reverse`: carried s += row; every s is stacked.
fn running_sum(n: usize, reverse: bool) -> Program {
    let body = {
        let f32s = |name: &str, loc| buffer(name, DType::F32, &[2], loc);
        let buffers = vec![
            f32s("s", Loc::Input(0)),
            f32s("row", Loc::Input(1)),
            f32s("next", Loc::Output(0)),
            f32s("stacked", Loc::Output(1)),
        ];
        let copy = StepKind::Copy {
            src: BufferId(2),
            dst: BufferId(3),
        };
        let steps = vec![
            step(call(0, &[0, 1, 2], 2), "/body/add", &[]),
            step(copy, "/body/copy", &[0]),
        ];
        let p = partition(0, 0, buffers, vec![kernel("add", add, 0)], steps);
        let outputs = vec![f32_io("next", &[2]), f32_io("stacked", &[2])];
        program(
            vec![f32_io("s", &[2]), f32_io("row", &[2])],
            outputs,
            vec![p],
        )
    };
    let scan = |buffer| Scanned {
        buffer: BufferId(buffer),
        reverse,
    };
    let scan = Loop {
        trips: TripCount::Fixed(n as u64),
        body: Arc::new(body),
        carried: vec![Carried {
            init: BufferId(0),
            result: BufferId(2),
        }],
        scan_inputs: vec![scan(1)],
        scan_outputs: vec![scan(3)],
        args: vec![],
        once: vec![],
    };
    let buffers = vec![
        buffer("zero", DType::F32, &[2], Loc::Input(0)),
        buffer("rows", DType::F32, &[n, 2], Loc::Input(1)),
        buffer("sum", DType::F32, &[2], Loc::Output(0)),
        buffer("sums", DType::F32, &[n, 2], Loc::Output(1)),
    ];
    let p = partition(
        0,
        0,
        buffers,
        vec![],
        vec![step(StepKind::Loop(Box::new(scan)), "/scan", &[])],
    );
    let inputs = vec![f32_io("zero", &[2]), f32_io("rows", &[n, 2])];
    program(
        inputs,
        vec![f32_io("sum", &[2]), f32_io("sums", &[n, 2])],
        vec![p],
    )
}

#[test]
fn scan_carries_slices_and_stacks_both_ways() {
    for n in [0, 1, 2, 3, 4] {
        for reverse in [false, true] {
            let executor = executor(running_sum(n, reverse), 1);
            let rows: Vec<f32> = (0..2 * n).map(|i| i as f32).collect();
            let init = Tensor::from_slice(&[100f32, 200.0], &[2]).unwrap();
            let outputs = executor
                .run(&[init, Tensor::from_slice(&rows, &[n, 2]).unwrap()])
                .unwrap();
            let (mut sum, mut sums) = ([100f32, 200.0], vec![0.0; 2 * n]);
            for i in 0..n {
                let row = if reverse { n - 1 - i } else { i };
                sum = [sum[0] + rows[2 * row], sum[1] + rows[2 * row + 1]];
                sums[2 * row..2 * row + 2].copy_from_slice(&sum);
            }
            assert_eq!(outputs[0].as_slice::<f32>(), sum, "{n} {reverse}");
            assert_eq!(outputs[1].as_slice::<f32>(), sums, "{n} {reverse}");
        }
    }
}

/// A loop whose body counts x up and asks to end after four iterations; `stacked` slices of x are planned.
fn counting_loop(with_condition: bool, stacked: Option<usize>) -> Program {
    let body = {
        let mut buffers = vec![
            buffer("i", DType::I64, &[], Loc::Input(0)),
            buffer("c", DType::Bool, &[], Loc::Input(1)),
            buffer("x", DType::F32, &[], Loc::Input(2)),
            buffer("more", DType::Bool, &[], Loc::Output(0)),
            buffer("next", DType::F32, &[], Loc::Output(1)),
        ];
        let run = StepKind::Kernel {
            kernel: KernelId(0),
            args: ids(&[0, 1, 2, 3, 4]),
            n_outputs: 2,
            items: 1,
            grain: 0,
        };
        let mut steps = vec![step(run, "/body/count", &[])];
        let mut outputs = vec![IoSpec::new("more", DType::Bool, &[]), f32_io("next", &[])];
        if stacked.is_some() {
            buffers.push(buffer("slice", DType::F32, &[], Loc::Output(2)));
            outputs.push(f32_io("slice", &[]));
            steps.push(step(
                StepKind::Copy {
                    src: BufferId(4),
                    dst: BufferId(5),
                },
                "/body/copy",
                &[0],
            ));
        }
        let p = partition(
            0,
            0,
            buffers,
            vec![kernel("count", count_to_four, 0)],
            steps,
        );
        let inputs = vec![
            IoSpec::new("i", DType::I64, &[]),
            IoSpec::new("c", DType::Bool, &[]),
            f32_io("x", &[]),
        ];
        program(inputs, outputs, vec![p])
    };
    let mut buffers = vec![
        buffer("max", DType::I64, &[], Loc::Input(0)),
        buffer("cond", DType::Bool, &[], Loc::Input(1)),
        buffer("x", DType::F32, &[], Loc::Input(2)),
        buffer("y", DType::F32, &[], Loc::Output(0)),
    ];
    let mut outputs = vec![f32_io("y", &[])];
    if let Some(n) = stacked {
        buffers.push(buffer("ys", DType::F32, &[n], Loc::Output(1)));
        outputs.push(f32_io("ys", &[n]));
    }
    let condition = with_condition.then_some(BufferId(1));
    let counting = Loop {
        trips: TripCount::While {
            max_trips: Some(BufferId(0)),
            condition,
        },
        body: Arc::new(body),
        carried: vec![Carried {
            init: BufferId(2),
            result: BufferId(3),
        }],
        scan_inputs: vec![],
        scan_outputs: stacked
            .map(|_| Scanned {
                buffer: BufferId(4),
                reverse: false,
            })
            .into_iter()
            .collect(),
        args: vec![],
        once: vec![],
    };
    let p = partition(
        0,
        0,
        buffers,
        vec![],
        vec![step(StepKind::Loop(Box::new(counting)), "/loop", &[])],
    );
    let inputs = vec![
        IoSpec::new("max", DType::I64, &[]),
        IoSpec::new("cond", DType::Bool, &[]),
        f32_io("x", &[]),
    ];
    program(inputs, outputs, vec![p])
}

#[test]
fn loops_end_by_count_or_condition() {
    let run = |p: &Executor, max: i64, cond: bool| {
        p.run(&[
            Tensor::scalar(max),
            Tensor::scalar(cond),
            Tensor::scalar(0f32),
        ])
    };
    let y = |p: &Executor, max, cond| run(p, max, cond).unwrap()[0].as_slice::<f32>()[0];
    let counted = executor(counting_loop(false, None), 1);
    // Without a condition operand the body's condition is ignored.
    for (max, expected) in [(0, 0.0), (-3, 0.0), (1, 1.0), (4, 4.0), (7, 7.0)] {
        assert_eq!(y(&counted, max, false), expected);
    }
    let conditional = executor(counting_loop(true, None), 1);
    for (max, cond, expected) in [(10, true, 4.0), (3, true, 3.0), (10, false, 0.0)] {
        assert_eq!(y(&conditional, max, cond), expected);
    }
    let stacked = executor(counting_loop(true, Some(3)), 1);
    assert_eq!(
        run(&stacked, 3, true).unwrap()[1].as_slice::<f32>(),
        [1.0, 2.0, 3.0]
    );
    let message = |max| run(&stacked, max, true).unwrap_err().to_string();
    let place = "in node \"/loop\": on /device:CPU:0: loop";
    assert_eq!(
        message(2),
        format!("{place} ended after 2 iterations, but \"ys\" was compiled for 3")
    );
    assert_eq!(
        message(9),
        format!("{place} runs past the 3 slices of \"ys\" that it was compiled for")
    );
}

/// v = v + x; y = v, which begins with 1 and 2.
fn counter() -> Program {
    let f32s = |name: &str, loc| buffer(name, DType::F32, &[2], loc);
    let buffers = vec![
        f32s("x", Loc::Input(0)),
        f32s("v", at(0)),
        f32s("y", Loc::Output(0)),
    ];
    let read = StepKind::ReadVariable {
        variable: 0,
        dst: BufferId(1),
    };
    let assign = StepKind::AssignVariable {
        variable: 0,
        src: BufferId(2),
    };
    let steps = vec![
        step(read, "/read", &[]),
        step(call(0, &[0, 1, 2], 2), "/add", &[0]),
        step(assign, "/assign", &[1]),
    ];
    let p = partition(0, 64, buffers, vec![kernel("add", add, 0)], steps);
    let mut p = program(vec![f32_io("x", &[2])], vec![f32_io("y", &[2])], vec![p]);
    p.variables = vec![VariableSpec {
        container: "c".into(),
        name: "v".into(),
        dtype: DType::F32,
        initial: Some(Tensor::from_slice(&[1f32, 2.0], &[2]).unwrap()),
        in_place: false,
    }];
    p
}

#[test]
fn variables_outlive_runs_and_executors() {
    let mut p = counter();
    let resources = Arc::new(Resources::default());
    let options = ExecOptions {
        pool: Arc::new(Pool::new(1)),
        resources: resources.clone(),
        ..ExecOptions::default()
    };
    let x = Tensor::from_slice(&[10f32, 20.0], &[2]).unwrap();
    let run = |e: &Executor| {
        e.run(std::slice::from_ref(&x))
            .map(|y| y[0].as_slice::<f32>().to_vec())
    };
    let first = Executor::new(Arc::new(p.clone()), &options).unwrap();
    assert_eq!(run(&first).unwrap(), [11.0, 22.0]);
    let second = Executor::new(Arc::new(p.clone()), &options).unwrap();
    assert_eq!(run(&second).unwrap(), [21.0, 42.0]);
    assert_eq!(run(&first).unwrap(), [31.0, 62.0]);
    assert_eq!(
        resources.get("c", "v").unwrap().unwrap().as_slice::<f32>(),
        [31.0, 62.0]
    );
    resources.reset("c");
    assert_eq!(run(&first).unwrap(), [11.0, 22.0]);
    resources.set("c", "v", &x).unwrap();
    assert_eq!(run(&first).unwrap(), [20.0, 40.0]);
    assert_eq!(
        executor(p.clone(), 1)
            .run(std::slice::from_ref(&x))
            .unwrap()[0]
            .as_slice::<f32>(),
        [11.0, 22.0]
    );

    p.variables[0].initial = None;
    let error = executor(p.clone(), 1)
        .run(std::slice::from_ref(&x))
        .unwrap_err()
        .to_string();
    let expected = "in node \"/read\": on /device:CPU:0: variable \"v\" of container \"c\" is read before it was assigned";
    assert_eq!(error, expected);
    let other_dtype = Tensor::from_slice(&[1i64, 2], &[2]).unwrap();
    assert!(resources.set("c", "v", &other_dtype).is_err());
    let wider = Tensor::from_slice(&[1f32, 2.0, 3.0], &[3]).unwrap();
    resources.set("c", "v", &wider).unwrap();
    let error = run(&first).unwrap_err().to_string();
    assert!(
        error.ends_with("has the shape [3], and is read as [2]"),
        "{error}"
    );
    assert_eq!(resources.get("c", "v").unwrap().unwrap().shape(), [3]);
}

/// Both ways between devices 0 and 1 take `latency_ns`, and a microsecond for each byte.
fn slow_links(latency_ns: u64) -> ExecOptions {
    let rate = LinkRate {
        latency_ns,
        bytes_per_second: 1_000_000,
    };
    let transport =
        Transport::Emulated([((cpu(0), cpu(1)), rate), ((cpu(1), cpu(0)), rate)].into());
    ExecOptions {
        pool: Arc::new(Pool::new(2)),
        transport,
        ..ExecOptions::default()
    }
}

#[test]
fn emulated_links_carry_tensors_at_their_rate() {
    watched(|| {
        let executor = Executor::new(Arc::new(there_and_back(50)), &slow_links(1_000_000)).unwrap();
        for round in 0..4 {
            let begin = std::time::Instant::now();
            let y = executor
                .run(&[Tensor::from_slice(&[round as f32; 50], &[50]).unwrap()])
                .unwrap();
            assert_eq!(y[0].as_slice::<f32>(), [5.0 * round as f32; 50]);
            // Two ways of 1 ms and 200 bytes at 1 byte per us each.
            assert!(begin.elapsed() >= Duration::from_micros(2400));
            let crossings = executor.crossings();
            let keys: Vec<&Key> = crossings.iter().map(|c| &c.key).collect();
            assert_eq!(keys, [&key(0, 1, "t"), &key(1, 0, "u")]);
            for c in &crossings {
                assert_eq!(
                    (c.size_bytes, c.end - c.start),
                    (200, Duration::from_micros(1200))
                );
            }
            assert!(crossings[0].end <= crossings[1].start);
        }
    });
}

#[test]
fn what_an_aborted_run_sent_never_arrives_in_the_next() {
    // Device 1 fails while a tensor for it is on its way.
    let mut p = there_and_back(8);
    p.partitions[1]
        .buffers
        .push(buffer("x", DType::F32, &[8], Loc::Input(0)));
    p.partitions[1]
        .buffers
        .push(buffer("w", DType::F32, &[8], at(64)));
    p.partitions[1].arena_bytes = 128;
    p.partitions[1].buffers[1].loc = at(0);
    p.partitions[1]
        .steps
        .insert(0, step(call(0, &[2, 2, 3], 8), "/w", &[]));
    p.partitions[1].steps[2].deps = vec![StepId(1)];
    p.partitions[1].steps[3].deps = vec![StepId(2)];
    watched(move || {
        let executor = Executor::new(Arc::new(p), &slow_links(20_000_000)).unwrap();
        for round in 0..3 {
            let bad = executor
                .run(&[Tensor::from_slice(&[f32::NAN; 8], &[8]).unwrap()])
                .unwrap_err();
            assert_eq!(bad.node(), Some("/w"));
            let y = executor
                .run(&[Tensor::from_slice(&[round as f32; 8], &[8]).unwrap()])
                .unwrap();
            assert_eq!(y[0].as_slice::<f32>(), [5.0 * round as f32; 8]);
        }
    });
}

#[test]
fn a_missing_emulated_link_is_refused() {
    for bytes_per_second in [None, Some(0)] {
        let mut links = std::collections::BTreeMap::new();
        links.insert(
            (cpu(1), cpu(0)),
            LinkRate {
                latency_ns: 0,
                bytes_per_second: 1,
            },
        );
        links.extend(bytes_per_second.map(|b| {
            (
                (cpu(0), cpu(1)),
                LinkRate {
                    latency_ns: 0,
                    bytes_per_second: b,
                },
            )
        }));
        let options = ExecOptions {
            pool: Arc::new(Pool::new(2)),
            transport: Transport::Emulated(links),
            ..ExecOptions::default()
        };
        let error = Executor::new(Arc::new(there_and_back(4)), &options)
            .err()
            .unwrap();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        let expected = "no emulated link of at least 1 byte/s from /device:CPU:0 to /device:CPU:1, over which \"t\" is sent";
        assert_eq!(error.to_string(), expected);
    }
}

#[test]
fn a_waiting_kernel_takes_its_items_in_nanoseconds() {
    let wait = StepKind::Kernel {
        kernel: KernelId(0),
        args: vec![],
        n_outputs: 0,
        items: 3_000_000,
        grain: 0,
    };
    let steps = vec![step(wait.clone(), "/a", &[]), step(wait, "/b", &[])];
    let executor = executor(
        program(
            vec![],
            vec![],
            vec![partition(0, 0, vec![], vec![wait_kernel()], steps)],
        ),
        2,
    );
    assert_eq!(executor.step_spans(), [[]], "nothing is profiled yet");
    executor.start_profile().unwrap();
    executor.run(&[]).unwrap();
    executor.run(&[]).unwrap();
    let [a, b] = executor.step_spans()[0][..] else {
        panic!("two steps")
    };
    assert!(
        a.1 <= b.0
            && a.1 - a.0 >= Duration::from_millis(3)
            && b.1 - b.0 >= Duration::from_millis(3)
    );
    assert!(executor.step_times()[0].iter().all(|&ns| ns >= 6_000_000));
}
