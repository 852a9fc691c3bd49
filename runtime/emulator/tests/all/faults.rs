//! Planted bugs: each is caught, with a message that says where.

use gristmill_emulator::{Args, Device, Fault, FaultKind, Limits, Module};

use super::support::{device, download, line, module, try_run, upload};

fn caught(kernel: &str, threads: u32, args: &Args, device: &Device) -> Fault {
    let module = module("bugs/basic");
    try_run(device, &module, kernel, &line(1, threads), args).expect_err("the bug is caught")
}

/// Asserts the kind, and that the message has these parts.
fn assert_fault(fault: &Fault, kind: FaultKind, parts: &[&str]) {
    let text = fault.to_string();
    let missing: Vec<_> = parts.iter().filter(|p| !text.contains(**p)).collect();
    assert!(
        fault.kind() == kind && missing.is_empty(),
        "expected {kind:?} with {missing:?}, found {:?}: {text}",
        fault.kind()
    );
}

#[test]
fn an_access_behind_a_buffer_names_lane_address_and_buffer() {
    let device = device();
    let x = upload(&device, &[1f32; 50]);
    let y = upload(&device, &[0f32; 60]);
    let fault = caught(
        "one_too_far",
        64,
        &Args::new().u64(x).u64(y).u32(50),
        &device,
    );
    let nearest = format!("0 bytes behind the end of the buffer of 200 bytes at {x:#x}");
    let parts = [
        "out of bounds: 4-byte load",
        "warp 1, lane 18",
        "CUDA basic.cu:6",
        "block [0, 0, 0]",
        &nearest,
    ];
    assert_fault(&fault, FaultKind::OutOfBounds, &parts);
    assert!(fault.ptx_line().is_some());
}

#[test]
fn a_vector_access_must_be_aligned() {
    let device = device();
    let (x, y) = (upload(&device, &[1f32; 128]), upload(&device, &[0f32; 128]));
    let fault = caught("misaligned", 32, &Args::new().u64(x).u64(y), &device);
    assert_fault(
        &fault,
        FaultKind::Misaligned,
        &["8-byte load", "lane 0", "CUDA basic.cu:10"],
    );
}

#[test]
fn lanes_that_a_shuffle_names_must_come() {
    let device = device();
    let (x, y) = (upload(&device, &[1u32; 32]), upload(&device, &[0u32; 32]));
    let fault = caught("diverged_shuffle", 32, &Args::new().u64(x).u64(y), &device);
    assert_fault(
        &fault,
        FaultKind::Divergence,
        &[
            "diverged at a synchronising instruction",
            "lanes 0xffffff00 do not come",
        ],
    );
}

#[test]
fn a_barrier_in_a_divergent_branch() {
    let device = device();
    let fault = caught(
        "barrier_in_a_branch",
        64,
        &Args::new().u64(upload(&device, &[0u32; 64])),
        &device,
    );
    assert_fault(
        &fault,
        FaultKind::Divergence,
        &["warp 1", "lanes 0xffffff00 do not come", "CUDA basic.cu:21"],
    );
}

#[test]
fn a_barrier_that_too_few_reach_lists_the_warps() {
    let device = device();
    let fault = caught(
        "too_few_arrive",
        128,
        &Args::new().u64(upload(&device, &[0u32; 128])),
        &device,
    );
    let parts = [
        "deadlock",
        "warp 0 lanes 0xffffffff at PTX line",
        "warp 1",
        "barrier 1, 64 of 128 threads have arrived",
    ];
    assert_fault(&fault, FaultKind::Deadlock, &parts);
}

#[test]
fn an_endless_loop_uses_up_the_budget() {
    let device = Device::new(Limits {
        instruction_budget: 100_000,
        ..Limits::default()
    });
    let fault = caught(
        "endless",
        32,
        &Args::new().u64(upload(&device, &[0u32])),
        &device,
    );
    assert_fault(
        &fault,
        FaultKind::Budget,
        &["budget of instructions", "warp 0", "can run"],
    );
}

#[test]
fn traps_are_faults() {
    let device = device();
    let x: Vec<u32> = (0..32).collect();
    let fault = caught(
        "trapped",
        32,
        &Args::new().u64(upload(&device, &x)),
        &device,
    );
    assert_fault(&fault, FaultKind::Trap, &["lane 3"]);
}

#[test]
fn shared_memory_has_bounds() {
    let device = device();
    let fault = caught(
        "beyond_shared",
        64,
        &Args::new().u64(upload(&device, &[0u32; 64])).u32(1),
        &device,
    );
    assert_fault(
        &fault,
        FaultKind::OutOfBounds,
        &["shared address 0x100, of 0x100 bytes", "warp 1, lane 31"],
    );
}

#[test]
fn constants_are_read_only() {
    let device = device();
    let fault = caught(
        "into_constants",
        32,
        &Args::new().u64(upload(&device, &[0u32; 32])),
        &device,
    );
    assert_fault(
        &fault,
        FaultKind::Misuse,
        &["constant memory is read-only", "`table`"],
    );
}

#[test]
fn wrong_calls_are_refused_before_anything_runs() {
    let device = device();
    let module = module("bugs/basic");
    let y = Args::new().u64(upload(&device, &[0u32; 32]));
    let cases = [
        (
            "nothing",
            line(1, 32),
            y.clone(),
            "no kernel `nothing` in the module, which has [barrier_in_a_branch, beyond",
        ),
        (
            "endless",
            line(1, 2048),
            y.clone(),
            "2048 threads per block",
        ),
        (
            "endless",
            line(0, 32),
            y.clone(),
            "a grid of [0, 1, 1] blocks has none",
        ),
        (
            "endless",
            line(1, 32),
            Args::new().u32(1),
            "4 bytes of parameters given, 8 expected",
        ),
    ];
    for (kernel, config, args, part) in cases {
        let fault = try_run(&device, &module, kernel, &config, &args).expect_err("a wrong call");
        assert_fault(&fault, FaultKind::InvalidCall, &[part]);
    }
    let mut config = line(1, 32);
    config.dynamic_shared_bytes = 1 << 20;
    let fault =
        try_run(&device, &module, "endless", &config, &y).expect_err("too much shared memory");
    assert_fault(
        &fault,
        FaultKind::OutOfMemory,
        &["needs 1048576 bytes of shared memory"],
    );
}

#[test]
fn copies_and_frees_are_checked() {
    let device = device();
    let x = upload(&device, &[1u32; 8]);
    assert_eq!(
        device
            .copy_in(x + 4, &[0; 32])
            .expect_err("too long")
            .kind(),
        FaultKind::OutOfBounds
    );
    assert_eq!(
        device
            .copy_out(&mut [0; 33], x)
            .expect_err("too long")
            .kind(),
        FaultKind::OutOfBounds
    );
    assert_eq!(
        device.free(x + 1).expect_err("not a buffer").kind(),
        FaultKind::InvalidCall
    );
    device.free(x).unwrap();
    assert_eq!(
        device.free(x).expect_err("freed before").kind(),
        FaultKind::InvalidCall
    );
    assert_eq!(device.used_bytes(), 0);
    let fault = device
        .alloc(usize::MAX / 2)
        .expect_err("more than the device has");
    assert_fault(&fault, FaultKind::OutOfMemory, &["out of device memory"]);
}

/// A kernel with one parameter besides the address of its result, which reaches it by a generic address.
fn on_parameters(body: &str) -> Module {
    let text = format!(
        ".version 9.0\n.target sm_90a\n.address_size 64\n.visible .entry k(.param .u64 out, .param .u64 in) {{\n\
         .reg .b64 %rd<6>;\nld.param.u64 %rd1, [out];\nmov.b64 %rd2, in;\ncvta.param.u64 %rd2, %rd2;\n\
         {body}\nret;\n}}\n"
    );
    Module::parse(&text).expect("the kernel is well-formed")
}

#[test]
fn parameters_are_read_through_generic_addresses_and_not_written() {
    let device = device();
    let out = upload(&device, &[0u64]);
    let args = Args::new().u64(out).u64(0x1234_5678_9abc_def0);
    let read = on_parameters("ld.u64 %rd3, [%rd2];\nst.global.u64 [%rd1], %rd3;");
    try_run(&device, &read, "k", &line(1, 1), &args).expect("parameters can be read");
    assert_eq!(download::<u64>(&device, out, 1), [0x1234_5678_9abc_def0]);
    let write = on_parameters("st.u64 [%rd2], %rd1;");
    let fault = try_run(&device, &write, "k", &line(1, 1), &args).expect_err("a write");
    assert_fault(&fault, FaultKind::Misuse, &["parameters are read-only"]);
}
