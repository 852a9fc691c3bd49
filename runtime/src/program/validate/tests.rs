//! Malformed programs, and what the validator says of each.

use super::*;
use crate::device::{DeviceKind, DeviceName};
use crate::driver::Reduction;
use crate::product::{Compute, Matrix, Product};
use crate::program::{
    AllReduce, Carried, CpuKernel, If, Kernel, KernelId, Loop, Scanned, StepId, VariableSpec,
};
use crate::tensor::Tensor;
use crate::text::Function;
use std::sync::Arc;

unsafe extern "C" fn nothing(_args: *const *mut u8, _begin: u64, _end: u64) -> u32 {
    0
}

fn cpu(index: u32) -> DeviceName {
    DeviceName::local(DeviceKind::Cpu, index)
}

fn key(from: u32, to: u32, tensor: &str) -> Key {
    Key {
        source: cpu(from),
        destination: cpu(to),
        tensor: tensor.into(),
    }
}

fn f32s(name: &str, loc: Loc) -> Buffer {
    Buffer {
        name: name.into(),
        dtype: DType::F32,
        shape: vec![16],
        loc,
    }
}

fn at(offset_bytes: usize) -> Loc {
    Loc::Arena { offset_bytes }
}

fn call(args: &[u32], deps: &[u32]) -> Step {
    let args = args.iter().map(|&a| BufferId(a)).collect();
    let kind = StepKind::Kernel {
        kernel: KernelId(0),
        args,
        n_outputs: 1,
        items: 16,
        grain: 1,
    };
    step(kind, deps)
}

fn step(kind: StepKind, deps: &[u32]) -> Step {
    Step {
        kind,
        origin: "/n".into(),
        deps: deps.iter().map(|&d| StepId(d)).collect(),
    }
}

/// b1 = f(x); b2 = f(b1); y = f(b2), with one arena slot each.
fn chain() -> Program {
    // SAFETY: the kernel touches nothing.
    let function = unsafe { Function::of_process(nothing) };
    let partition = Partition {
        device: cpu(0),
        arena_bytes: 128,
        buffers: vec![
            f32s("x", Loc::Input(0)),
            f32s("b1", at(0)),
            f32s("b2", at(64)),
            f32s("y", Loc::Output(0)),
            f32s("c", Loc::Constant(0)),
        ],
        constants: vec![Tensor::zeros(DType::F32, &[16]).unwrap()],
        kernels: vec![Kernel::Cpu(CpuKernel {
            name: "k".into(),
            function,
            workspace_bytes_per_thread: 0,
            blocks: None,
        })],
        steps: vec![
            call(&[0, 1], &[]),
            call(&[1, 2], &[0]),
            call(&[2, 4, 3], &[1]),
        ],
        gpu_code: vec![],
        memory_limit: None,
    };
    Program {
        name: "p".into(),
        inputs: vec![IoSpec::new("x", DType::F32, &[16])],
        outputs: vec![IoSpec::new("y", DType::F32, &[16])],
        variables: vec![],
        partitions: vec![partition],
    }
}

/// The chain with a second partition: device 0 sends b1 and receives it back as b2.
fn two_devices() -> Program {
    let mut p = chain();
    let mut other = p.partitions[0].clone();
    other.device = cpu(1);
    other.buffers = vec![f32s("in", at(0)), f32s("out", at(64))];
    let send = |key, buffer| StepKind::Send {
        key,
        buffer: BufferId(buffer),
    };
    let recv = |key, buffer| StepKind::Recv {
        key,
        buffer: BufferId(buffer),
    };
    let there = recv(key(0, 1, "b1"), 0);
    other.steps = vec![
        step(there, &[]),
        call(&[0, 1], &[0]),
        step(send(key(1, 0, "b2"), 1), &[1]),
    ];
    let here = &mut p.partitions[0];
    here.steps = vec![
        call(&[0, 1], &[]),
        step(send(key(0, 1, "b1"), 1), &[0]),
        step(recv(key(1, 0, "b2"), 2), &[]),
        call(&[2, 4, 3], &[2]),
    ];
    p.partitions.push(other);
    p
}

/// The chain whose middle step is an `If` over the chain itself and a loop over it.
fn nested(depth: usize) -> Program {
    let mut p = chain();
    let inner = Arc::new(if depth > 1 {
        nested(depth - 1)
    } else {
        chain()
    });
    let branches = If {
        cond: BufferId(5),
        then_branch: inner.clone(),
        else_branch: inner,
        args: vec![BufferId(1)],
        results: vec![BufferId(2)],
    };
    let part = &mut p.partitions[0];
    part.constants.push(Tensor::scalar(true));
    part.buffers.push(Buffer {
        name: "cond".into(),
        dtype: DType::Bool,
        shape: vec![],
        loc: Loc::Constant(1),
    });
    part.steps[1] = step(StepKind::If(Box::new(branches)), &[0]);
    p
}

/// Applies `change` to a good program and expects exactly the violations that contain `expected`.
fn check(mut p: Program, change: impl FnOnce(&mut Program), expected: &[&str]) {
    assert_eq!(p.validate(), Vec::<String>::new(), "good before the change");
    change(&mut p);
    let found = p.validate();
    let good =
        found.len() == expected.len() && found.iter().zip(expected).all(|(f, e)| f.contains(e));
    assert!(good, "expected {expected:#?}, found {found:#?}");
}

fn first(p: &mut Program) -> &mut Partition {
    &mut p.partitions[0]
}

#[test]
fn buffers_are_checked() {
    check(
        chain(),
        |p| first(p).buffers[1].loc = at(32),
        &[
            "offset 32 is not a multiple of 64",
            "output \"b2\" overlaps",
        ],
    );
    check(
        chain(),
        |p| first(p).buffers[2].loc = at(128),
        &["64 bytes at 128 leave the arena of 128 bytes"],
    );
    check(
        chain(),
        |p| first(p).buffers[2].loc = at(usize::MAX - 63),
        &["leave the arena"],
    );
    check(
        chain(),
        |p| first(p).buffers[2].shape = vec![usize::MAX, 2],
        &["does not fit in memory"],
    );
    check(
        chain(),
        |p| first(p).buffers[0].loc = Loc::Input(1),
        &["Input(1) does not exist"],
    );
    check(
        chain(),
        |p| first(p).buffers[0].dtype = DType::I32,
        &["i32[16] at Input(0), which is f32[16]"],
    );
    check(
        chain(),
        |p| first(p).buffers[4].shape = vec![17],
        &["68 bytes at a constant of 64 bytes"],
    );
    check(
        chain(),
        |p| first(p).buffers[4].loc = Loc::Constant(7),
        &["Constant(7) does not exist"],
    );
    check(
        chain(),
        |p| p.outputs[0].shape = vec![1 << 62, 4],
        &["\"y\": a tensor", "buffer 3 \"y\""],
    );
}

#[test]
fn steps_are_checked() {
    check(
        chain(),
        |p| first(p).steps[1].deps = vec![StepId(1)],
        &["depends on step 1, which does not come before"],
    );
    check(
        chain(),
        |p| first(p).steps[1] = call(&[1, 99], &[0]),
        &["buffer 99 does not exist"],
    );
    check(
        chain(),
        |p| first(p).kernels.clear(),
        &["kernel 0", "kernel 0", "kernel 0"],
    );
    check(
        chain(),
        |p| first(p).steps[1] = call(&[], &[0]),
        &["1 outputs among 0 arguments"],
    );
    check(
        chain(),
        |p| first(p).steps.push(call(&[1, 4], &[2])),
        &["writes \"c\", which is at Constant(0)"],
    );
    check(
        chain(),
        |p| first(p).steps.push(call(&[1, 0], &[2])),
        &["writes \"x\", which is at Input(0)"],
    );
    check(
        chain(),
        |p| drop(first(p).steps.pop()),
        &["output \"y\" is never written"],
    );
    let copy = |shape: usize| {
        move |p: &mut Program| {
            first(p).buffers.push(Buffer {
                shape: vec![shape],
                ..f32s("t", at(64))
            });
            first(p).steps[1] = step(
                StepKind::Copy {
                    src: BufferId(1),
                    dst: BufferId(5),
                },
                &[0],
            );
        }
    };
    check(chain(), copy(16), &[]);
    check(chain(), copy(15), &["copies 64 bytes to 60 bytes"]);
}

#[test]
fn operands_may_overlap_exactly_in_place_only() {
    check(chain(), |p| first(p).buffers[2].loc = at(0), &[]);
    let partly = |p: &mut Program| {
        first(p).buffers[2] = Buffer {
            shape: vec![32],
            ..f32s("b2", at(0))
        };
    };
    check(chain(), partly, &["output \"b2\" overlaps operand \"b1\""]);
    check(
        nested(1),
        |p| first(p).buffers[2].loc = at(0),
        &["output \"b2\" overlaps operand \"b1\""],
    );
}

/// A program of one step: y = x times c, each 4 x 4, by a library of a GPU.
fn product() -> Program {
    let dense = Matrix::dense(DType::F32, 4);
    let product = Product {
        name: "k".into(),
        m: 4,
        n: 4,
        k: 4,
        n_batch: 1,
        lhs: dense,
        rhs: dense,
        out: dense,
        compute: Compute::F32,
        bias: None,
        relu: false,
        workspace_bytes: 0,
    };
    let mut p = chain();
    first(&mut p).device = DeviceName::local(DeviceKind::Gpu, 0);
    first(&mut p).kernels = vec![Kernel::Product(product)];
    first(&mut p).steps = vec![call(&[0, 4, 3], &[])];
    p
}

#[test]
fn products_of_libraries_are_checked() {
    check(product(), |_| {}, &[]);
    check(
        product(),
        |p| first(p).device = cpu(0),
        &["product k is for a GPU"],
    );
    check(
        product(),
        |p| first(p).steps[0] = call(&[0, 3], &[]),
        &["product k: 2 arguments, expected 3"],
    );
    check(
        product(),
        |p| first(p).steps[0] = call(&[0, 4, 0, 3], &[]),
        &["product k: 4 arguments, expected 3"],
    );
    check(
        product(),
        |p| first(p).buffers[0].dtype = DType::I32,
        &["which is f32[16]", "lhs is f32, its buffer i32"],
    );
    let no_output = |p: &mut Program| {
        let StepKind::Kernel { n_outputs, .. } = &mut first(p).steps[0].kind else {
            panic!("a kernel")
        };
        *n_outputs = 0;
    };
    check(
        product(),
        no_output,
        &[
            "output \"y\" is never written",
            "product k: 0 outputs, expected 1",
        ],
    );
    // A library may read its operands after it has written some of the result.
    let in_place = |p: &mut Program| {
        first(p).steps.insert(
            0,
            step(
                StepKind::Copy {
                    src: BufferId(0),
                    dst: BufferId(1),
                },
                &[],
            ),
        );
        first(p).steps[1] = call(&[1, 4, 2], &[0]);
        first(p).steps.push(step(
            StepKind::Copy {
                src: BufferId(2),
                dst: BufferId(3),
            },
            &[1],
        ));
        first(p).buffers[2].loc = at(0);
    };
    check(
        product(),
        in_place,
        &["output \"b2\" overlaps operand \"b1\""],
    );
}

#[test]
fn hazards_are_found() {
    check(
        chain(),
        |p| first(p).steps[1].deps.clear(),
        &["steps 0 (/n) and 1 (/n) touch the same bytes"],
    );
    check(
        chain(),
        |p| first(p).steps.swap(1, 2),
        &["step 1 (/n): depends on step 1, which does not come before it"],
    );
    // Reading b2 before anything wrote it.
    check(
        chain(),
        |p| first(p).steps[1] = call(&[2, 1], &[0]),
        &["reads \"b2\" before", "reads \"b2\" before"],
    );
    // A fourth step reuses b1's memory: it must wait for step 1, which reads b1; step 0, which wrote it, comes before that.
    let reuse =
        |deps: &'static [u32]| move |p: &mut Program| first(p).steps.push(call(&[0, 1], deps));
    check(chain(), reuse(&[1]), &[]);
    check(chain(), reuse(&[2]), &[]);
    check(chain(), reuse(&[0]), &["steps 1 (/n) and 3 (/n)"]);
    // Order through many steps, across the blocks that the check works in (a few under Miri, which is slow).
    let (n_steps, broken_step) = if cfg!(miri) {
        (100u32, 51)
    } else {
        (3000, 2001)
    };
    let long = |broken: Option<usize>| {
        move |p: &mut Program| {
            for i in 3..n_steps {
                let dep = if broken == Some(i as usize) { 0 } else { i - 1 };
                first(p)
                    .steps
                    .push(call(&[if i % 2 == 0 { 1 } else { 0 }, 1], &[dep]));
            }
        }
    };
    check(chain(), long(None), &[]);
    let expected = format!("steps {} (/n) and {broken_step} (/n)", broken_step - 1);
    check(chain(), long(Some(broken_step)), &[&expected]);
}

#[test]
fn transfers_match_one_to_one() {
    let unsent = |p: &mut Program| p.partitions[0].steps[1] = call(&[0, 1], &[0]);
    check(
        two_devices(),
        unsent,
        &["tensor \"b1\" from /device:CPU:0 to /device:CPU:1: sent 0 times, received 1 times"],
    );
    check(
        two_devices(),
        |p| drop(p.partitions[1].steps.pop()),
        &["tensor \"b2\" from /device:CPU:1 to /device:CPU:0: sent 0 times, received 1 times"],
    );
    check(
        two_devices(),
        |p| p.partitions[1].buffers[0].shape = vec![8],
        &["sent as (F32, [16]), received as (F32, [8])"],
    );
    check(
        two_devices(),
        |p| p.partitions[1].device = cpu(2),
        &["does not belong here", "does not belong here"],
    );
    check(
        two_devices(),
        |p| p.partitions[1].device = cpu(0),
        &[
            "two partitions on /device:CPU:0",
            "does not belong",
            "does not belong",
        ],
    );
    // Device 0 now sends only after it has received what device 1 makes of it.
    check(
        two_devices(),
        |p| {
            let here = &mut p.partitions[0].steps;
            here.swap(1, 2);
            here[2].deps.push(StepId(1));
        },
        &["steps wait for themselves through transfers"],
    );
}

#[test]
fn sub_programs_are_checked() {
    check(
        nested(2),
        |p| first(p).buffers[5].dtype = DType::U8,
        &["condition is (U8, []), expected one bool"],
    );
    let change_branch = |p: &mut Program, change: &dyn Fn(&mut Program)| {
        let StepKind::If(s) = &mut first(p).steps[1].kind else {
            unreachable!("the middle step")
        };
        change(Arc::make_mut(&mut s.then_branch));
    };
    let other_device = |p: &mut Program| first(p).device = cpu(1);
    check(
        nested(1),
        |p| change_branch(p, &other_device),
        &["sub-program is not one partition on the same device"],
    );
    let unordered = |p: &mut Program| first(p).steps[1].deps.clear();
    check(
        nested(1),
        |p| change_branch(p, &unordered),
        &["in sub-program: /device:CPU:0: steps 0 (/n) and 1 (/n)"],
    );
    let two_inputs = |p: &mut Program| p.inputs.push(p.inputs[0].clone());
    check(
        nested(1),
        |p| change_branch(p, &two_inputs),
        &["sub-program takes"],
    );
    let deep = nested(2).partitions[0].steps[1].clone();
    assert!(matches!(deep.kind, StepKind::If(_)));
    assert!(
        nested_chain(MAX_NESTING + 1)
            .validate()
            .iter()
            .any(|v| v.contains("nested deeper than 32"))
    );
    assert_eq!(nested_chain(MAX_NESTING).validate(), Vec::<String>::new());
}

/// `depth` nested loops of one trip: unlike `nested`, one sub-program per level.
fn nested_chain(depth: usize) -> Program {
    let mut p = chain();
    if depth > 0 {
        let body = Arc::new(nested_chain(depth - 1));
        let carried = vec![Carried {
            init: BufferId(1),
            result: BufferId(2),
        }];
        let once = TripCount::Fixed(1);
        let s = Loop {
            trips: once,
            body,
            carried,
            scan_inputs: vec![],
            scan_outputs: vec![],
            args: vec![],
            once: vec![],
        };
        p.partitions[0].steps[1] = step(StepKind::Loop(Box::new(s)), &[0]);
    }
    p
}

#[test]
fn loops_are_checked() {
    let with_loop = |change: &dyn Fn(&mut Loop)| {
        let mut p = nested_chain(1);
        let StepKind::Loop(s) = &mut first(&mut p).steps[1].kind else {
            unreachable!("the middle step")
        };
        change(s);
        p.validate().join("\n")
    };
    assert_eq!(with_loop(&|_| ()), "");
    let endless = TripCount::While {
        max_trips: None,
        condition: None,
    };
    assert!(with_loop(&|s| s.trips = endless).contains("loop never ends"));
    let scanned = Scanned {
        buffer: BufferId(4),
        reverse: false,
    };
    assert!(
        with_loop(&|s| s.scan_inputs.push(scanned))
            .contains("scanned tensor [16] does not fit Fixed(1)")
    );
    // The first step of the body reads the carried value, the second what the first writes.
    for (once, problem) in [
        (vec![0], "must run in each iteration"),
        (vec![1], "must run in each iteration"),
        (vec![7], "must run in each iteration"),
        (vec![1, 0], "steps of the first iteration are not in order"),
    ] {
        let once: Vec<StepId> = once.into_iter().map(StepId).collect();
        assert!(with_loop(&|s| s.once = once.clone()).contains(problem));
    }
    let by_float = TripCount::While {
        max_trips: Some(BufferId(4)),
        condition: None,
    };
    assert!(
        with_loop(&|s| s.trips = by_float).contains("trip count is (F32, [16]), expected one i64")
    );
    let overlapping = Carried {
        init: BufferId(1),
        result: BufferId(1),
    };
    assert!(
        with_loop(&|s| s.carried[0] = overlapping)
            .contains("output \"b1\" overlaps operand \"b1\"")
    );
}

#[test]
fn steps_of_the_same_operands_and_bytes_of_their_own_are_invariant() {
    let found = |p: &Program, n_args| -> Vec<u32> {
        let steps = invariant_steps(p, n_args);
        steps.into_iter().map(|step| step.0).collect()
    };
    let mut p = chain();
    assert!(found(&p, 0).is_empty());
    assert_eq!(found(&p, 1), [0]);
    // The last step writes an output, which is elsewhere in each iteration.
    first(&mut p).steps[2] = call(&[4, 3], &[1]);
    assert_eq!(found(&p, 1), [0]);
    // The second writes a part of the same bytes.
    first(&mut p).buffers[2].loc = at(32);
    assert!(found(&p, 1).is_empty());
}

#[test]
fn variables_are_checked() {
    let variable = |initial: DType| VariableSpec {
        container: "c".into(),
        name: "v".into(),
        dtype: DType::F32,
        initial: Some(Tensor::zeros(initial, &[16]).unwrap()),
        in_place: false,
    };
    let read = |p: &mut Program| {
        first(p).steps[1] = step(
            StepKind::ReadVariable {
                variable: 0,
                dst: BufferId(2),
            },
            &[0],
        )
    };
    check(chain(), read, &["variable 0 is None"]);
    check(
        chain(),
        |p| p.variables = vec![variable(DType::F32), variable(DType::F32)],
        &["declared twice"],
    );
    check(
        chain(),
        |p| p.variables = vec![variable(DType::I32)],
        &["initial value has another dtype"],
    );
}

/// Two devices that both receive before they send: each send is ready at once, but not in program order.
#[test]
fn programs_that_need_another_order_are_known() {
    let gpu = |index| DeviceName::local(DeviceKind::Gpu, index);
    let key = |from, to| Key {
        source: gpu(from),
        destination: gpu(to),
        tensor: "t".into(),
    };
    let partition = |own: u32, receives_first: bool| {
        let mut kinds = vec![
            StepKind::Recv {
                key: key(1 - own, own),
                buffer: BufferId(1),
            },
            StepKind::Send {
                key: key(own, 1 - own),
                buffer: BufferId(0),
            },
        ];
        if !receives_first {
            kinds.reverse();
        }
        Partition {
            device: gpu(own),
            arena_bytes: 64,
            buffers: vec![f32s("s", Loc::Input(0)), f32s("r", at(0))],
            constants: vec![],
            kernels: vec![],
            gpu_code: vec![],
            steps: kinds.into_iter().map(|kind| step(kind, &[])).collect(),
            memory_limit: None,
        }
    };
    for (receive_first, in_order) in [
        ([true, true], false),
        ([true, false], true),
        ([false, false], true),
    ] {
        let partitions = vec![
            partition(0, receive_first[0]),
            partition(1, receive_first[1]),
        ];
        let program = Program {
            partitions,
            outputs: vec![],
            ..chain()
        };
        assert_eq!(
            (program.validate(), program.runs_in_order()),
            (Vec::<String>::new(), in_order),
            "{receive_first:?}"
        );
    }
}

fn gpu(index: u32) -> DeviceName {
    DeviceName::local(DeviceKind::Gpu, index)
}

fn rank(key: &str, rank: u32, src: u32, dst: u32, deps: &[u32]) -> Step {
    let (key, devices) = (key.to_owned(), vec![gpu(0), gpu(1)]);
    let (src, dst) = (BufferId(src), BufferId(dst));
    step(
        StepKind::AllReduce(Box::new(AllReduce {
            key,
            rank,
            devices,
            kind: Reduction::Sum,
            src,
            dst,
        })),
        deps,
    )
}

/// Each GPU sums its input with the other's, twice.
fn reductions() -> Program {
    let steps = |r: u32| vec![rank("a", r, 0, 1, &[]), rank("b", r, 1, 2, &[0])];
    let on = |r: u32| Partition {
        device: gpu(r),
        buffers: vec![
            f32s("x", Loc::Input(r)),
            f32s("s", at(0)),
            f32s("y", Loc::Output(r)),
        ],
        constants: vec![],
        kernels: vec![],
        steps: steps(r),
        ..chain().partitions.remove(0)
    };
    let io = |name: &str| {
        (0..2)
            .map(|i| IoSpec::new(format!("{name}{i}"), DType::F32, &[16]))
            .collect()
    };
    Program {
        inputs: io("x"),
        outputs: io("y"),
        partitions: vec![on(0), on(1)],
        ..chain()
    }
}

/// What breaks a program, and what is said of it.
type Case<'a> = (&'a dyn Fn(&mut Program), &'static str);

#[test]
fn collectives_are_whole_and_nothing_passes_them() {
    assert_eq!(reductions().validate(), [""; 0]);
    assert!(reductions().runs_in_order());
    let broken = |change: &dyn Fn(&mut Program)| {
        let mut p = reductions();
        change(&mut p);
        p.validate().join("\n")
    };
    let all_reduce = |p: &mut Program, d: usize, i: usize, change: &dyn Fn(&mut AllReduce)| {
        if let StepKind::AllReduce(s) = &mut p.partitions[d].steps[i].kind {
            change(s);
        }
    };
    let cases: [Case<'_>; 7] = [
        (
            &|p| p.partitions[0].steps[1].deps.clear(),
            "/device:GPU:0: nothing orders 1 steps and \"b\"",
        ),
        (
            &|p| all_reduce(p, 1, 0, &|s| s.kind = Reduction::Max),
            "\"a\": ranks have different devices, kinds",
        ),
        (
            &|p| all_reduce(p, 1, 0, &|s| s.rank = 0),
            "rank 0 of \"a\" does not belong here",
        ),
        (
            &|p| all_reduce(p, 1, 0, &|s| s.key = "c".into()),
            "\"c\": not every rank of",
        ),
        (
            &|p| all_reduce(p, 1, 1, &|s| s.devices.truncate(1)),
            "rank 1 of \"b\" does not belong here",
        ),
        (
            &|p| p.partitions[0].buffers[1].dtype = DType::I32,
            "reduces (F32, [16]) to (I32, [16])",
        ),
        // Each device waits in another one.
        (
            &|p| {
                all_reduce(p, 1, 0, &|s| s.key = "b".into());
                all_reduce(p, 1, 1, &|s| s.key = "a".into());
            },
            "4 of 4 steps wait for themselves",
        ),
    ];
    for (change, expected) in cases {
        let found = broken(change);
        assert!(found.contains(expected), "{expected}: {found}");
    }
}
