//! Partitions in the memory of a device: a device that is a table of byte arrays, whose kernels are Rust functions by name.

use crate::device::{DeviceKind, DeviceName};
use crate::driver::{DeviceCode, Driver};
use crate::dtype::DType;
use crate::error::{Error, ErrorKind};
use crate::exec::{ExecOptions, Executor, Pool};
use crate::gpu::{
    EncodedTensorMap, GpuArg, GpuCode, GpuKernel, GpuParam, Launch, Swizzle, TensorMap,
};
use crate::program::*;
use crate::status;
use crate::tensor::Tensor;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// Addresses are `ALIGNMENT` times a block's number, plus an offset.
const ALIGNMENT: u64 = 1 << 20;

#[derive(Default)]
struct Blocks {
    of_number: BTreeMap<u64, Vec<u8>>,
    last: u64,
    n_encoded: usize,
}

#[derive(Default)]
struct Table(Mutex<Blocks>);

impl Table {
    fn with<T>(&self, address: u64, n: usize, f: impl FnOnce(&mut [u8]) -> T) -> Result<T, Error> {
        let mut blocks = self.0.lock().unwrap();
        let outside = || {
            Error::new(
                ErrorKind::DeviceFailed,
                format!("{n} bytes at {address:#x} are of no block"),
            )
        };
        let block = blocks
            .of_number
            .get_mut(&(address / ALIGNMENT))
            .ok_or_else(outside)?;
        let start = (address % ALIGNMENT) as usize;
        block.get_mut(start..start + n).map(f).ok_or_else(outside)
    }

    fn floats(&self, address: u64, n: usize) -> Vec<f32> {
        let floats = |b: &mut [u8]| {
            b.chunks(4)
                .map(|c| f32::from_ne_bytes(c.try_into().unwrap()))
                .collect()
        };
        self.with(address, 4 * n, floats).unwrap()
    }
}

/// The driver hands out itself as code.
#[derive(Clone, Default)]
struct Fake(Arc<Table>);

impl Driver for Fake {
    fn describe(&self) -> String {
        "a table".into()
    }

    fn allocate(&self, size_bytes: usize) -> Result<u64, Error> {
        let mut blocks = self.0.0.lock().unwrap();
        blocks.last += 1;
        let number = blocks.last;
        blocks.of_number.insert(number, vec![0xff; size_bytes]);
        Ok(number * ALIGNMENT)
    }

    fn free(&self, address: u64) {
        assert!(
            self.0
                .0
                .lock()
                .unwrap()
                .of_number
                .remove(&(address / ALIGNMENT))
                .is_some(),
            "freed twice"
        );
    }

    fn write(&self, to: u64, bytes: &[u8]) -> Result<(), Error> {
        self.0.with(to, bytes.len(), |b| b.copy_from_slice(bytes))
    }

    fn read(&self, from: u64, bytes: &mut [u8]) -> Result<(), Error> {
        self.0.with(from, bytes.len(), |b| bytes.copy_from_slice(b))
    }

    fn copy(&self, from: u64, to: u64, size_bytes: usize) -> Result<(), Error> {
        let bytes = self.0.with(from, size_bytes, |b| b.to_vec())?;
        self.write(to, &bytes)
    }

    /// An encoding is the address of the first element.
    fn encode(&self, map: &TensorMap, buffer: u64) -> Result<EncodedTensorMap, Error> {
        self.0.0.lock().unwrap().n_encoded += 1;
        let mut encoded = EncodedTensorMap([0; 128]);
        encoded.0[..8].copy_from_slice(&(buffer + map.offset_bytes).to_ne_bytes());
        Ok(encoded)
    }

    fn load(&self, code: &GpuCode) -> Result<Box<dyn DeviceCode>, Error> {
        assert_eq!(code.arch, "table");
        Ok(Box::new(self.clone()))
    }
}

impl DeviceCode for Fake {
    /// `add_one`: `[in, out]`, one float per thread. `fail_on_nan`: the same, with a status word. `below`: `[x, limit, next]`, `next = x + 1 < limit`.
    fn launch(&self, entry: &str, launch: &Launch, args: &[GpuArg]) -> Result<(), Error> {
        let n = launch.block[0] as usize;
        let address = |arg: &GpuArg| match arg {
            GpuArg::Address(address) => *address,
            GpuArg::TensorMap(map) => u64::from_ne_bytes(map.0[..8].try_into().unwrap()),
        };
        let args: Vec<u64> = args.iter().map(address).collect();
        let x = self.0.floats(args[0], n);
        match entry {
            "add_one" | "fail_on_nan" => {
                let bytes: Vec<u8> = x.iter().flat_map(|v| (v + 1.0).to_ne_bytes()).collect();
                self.write(args[1], &bytes)?;
                if entry == "fail_on_nan" && x.iter().any(|v| v.is_nan()) {
                    self.write(args[2], &status::INDEX_OUT_OF_RANGE.to_ne_bytes())?;
                }
                Ok(())
            }
            "below" => self.write(
                args[2],
                &[u8::from(x[0] + 1.0 < self.0.floats(args[1], 1)[0])],
            ),
            _ => Err(Error::internal(format!("no kernel {entry}"))),
        }
    }
}

fn kernel(entry: &str, params: &[GpuParam], n: u32) -> Kernel {
    let launch = Launch {
        grid: [1; 3],
        block: [n, 1, 1],
        shared_bytes: 0,
    };
    Kernel::Gpu(GpuKernel {
        name: entry.into(),
        code: 0,
        entry: entry.into(),
        launch,
        params: params.to_vec(),
    })
}

const TWO: [GpuParam; 2] = [GpuParam::Buffer(0), GpuParam::Buffer(1)];
const TWO_AND_STATUS: [GpuParam; 3] = [GpuParam::Buffer(0), GpuParam::Buffer(1), GpuParam::Status];

fn floats(name: &str, n: usize, loc: Loc) -> Buffer {
    Buffer {
        name: name.into(),
        dtype: DType::F32,
        shape: vec![n],
        loc,
    }
}

fn step(kind: StepKind, origin: &str, deps: &[u32]) -> Step {
    Step {
        kind,
        origin: origin.into(),
        deps: deps.iter().map(|&d| StepId(d)).collect(),
    }
}

fn call(kernel: u32, args: &[u32]) -> StepKind {
    let args = args.iter().map(|&a| BufferId(a)).collect();
    StepKind::Kernel {
        kernel: KernelId(kernel),
        args,
        n_outputs: 1,
        items: 1,
        grain: 0,
    }
}

fn partition(
    kind: DeviceKind,
    buffers: Vec<Buffer>,
    kernels: Vec<Kernel>,
    steps: Vec<Step>,
) -> Partition {
    let gpu_code = vec![GpuCode {
        arch: "table".into(),
        ptx: String::new(),
        cubin: Vec::new(),
    }];
    Partition {
        device: DeviceName::local(kind, 0),
        arena_bytes: 256,
        buffers,
        constants: vec![Tensor::from_slice(&[10f32], &[1]).unwrap()],
        kernels,
        gpu_code,
        steps,
        memory_limit: None,
    }
}

fn program(n: usize, partitions: Vec<Partition>) -> Arc<Program> {
    let spec = |name: &str| vec![IoSpec::new(name, DType::F32, &[n])];
    let (inputs, outputs) = (spec("x"), spec("y"));
    Arc::new(Program {
        name: "p".into(),
        inputs,
        outputs,
        variables: vec![],
        partitions,
    })
}

fn executor(program: Arc<Program>) -> (Executor, Fake) {
    let fake = Fake::default();
    let driver: Arc<dyn Driver> = Arc::new(fake.clone());
    let drivers = BTreeMap::from([(DeviceName::local(DeviceKind::Emu, 0), driver)]);
    (
        Executor::new(
            program,
            &ExecOptions {
                pool: Arc::new(Pool::new(2)),
                drivers,
                ..Default::default()
            },
        )
        .unwrap(),
        fake,
    )
}

fn arena(offset_bytes: usize) -> Loc {
    Loc::Arena { offset_bytes }
}

/// y = x + 1 + 1 on the device, the second with a status word.
fn chain() -> Arc<Program> {
    let buffers = vec![
        floats("x", 4, Loc::Input(0)),
        floats("b", 4, arena(0)),
        floats("y", 4, Loc::Output(0)),
    ];
    let kernels = vec![
        kernel("add_one", &TWO, 4),
        kernel("fail_on_nan", &TWO_AND_STATUS, 4),
    ];
    let steps = vec![
        step(call(0, &[0, 1]), "/a", &[]),
        step(call(1, &[1, 2]), "/b", &[0]),
    ];
    program(4, vec![partition(DeviceKind::Emu, buffers, kernels, steps)])
}

#[test]
fn inputs_and_outputs_cross_and_memory_is_given_back() {
    let (executor, fake) = executor(chain());
    for x in [[1f32, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]] {
        let y = executor
            .run(&[Tensor::from_slice(&x, &[4]).unwrap()])
            .unwrap();
        assert_eq!(y[0].as_slice::<f32>(), x.map(|v| v + 2.0));
    }
    assert!(
        executor.peak_bytes() >= 256 + 4 + 32,
        "arena, constant, copies of input and output"
    );
    drop(executor);
    // The last thread of the executor to end lets go of its memory.
    let is_empty = || fake.0.0.lock().unwrap().of_number.is_empty();
    (0..10_000)
        .take_while(|_| !is_empty())
        .for_each(|_| std::thread::sleep(std::time::Duration::from_millis(1)));
    assert!(is_empty());
}

#[test]
fn a_status_word_names_the_node_and_the_next_run_is_clean() {
    let (executor, _) = executor(chain());
    let e = executor
        .run(&[Tensor::from_slice(&[1f32, f32::NAN, 3.0, 4.0], &[4]).unwrap()])
        .unwrap_err();
    assert_eq!((e.kind(), e.node()), (ErrorKind::InvalidInput, Some("/b")));
    assert!(e.to_string().contains("/device:EMU:0"), "{e}");
    assert!(
        executor
            .run(&[Tensor::zeros(DType::F32, &[4]).unwrap()])
            .is_ok()
    );
}

/// y = (x + 1) + 1, where the second launch gets its operand as a tensor map: encoded once for all runs, since the buffer stays where it is.
#[test]
fn tensor_maps_are_encoded_for_their_buffers() {
    let map = |sizes: &[u64]| {
        GpuParam::TensorMap(Box::new(TensorMap {
            buffer: 0,
            dtype: DType::F32,
            offset_bytes: 16,
            sizes: sizes.to_vec(),
            strides_bytes: vec![],
            tile: vec![4],
            swizzle: Swizzle::None,
            pixels: None,
        }))
    };
    let with = |sizes: &[u64]| {
        let buffers = vec![
            floats("x", 8, Loc::Input(0)),
            floats("b", 8, arena(0)),
            floats("y", 8, Loc::Output(0)),
        ];
        let kernels = vec![
            kernel("add_one", &TWO, 8),
            kernel("add_one", &[map(sizes), GpuParam::Buffer(1)], 4),
        ];
        let steps = vec![
            step(call(0, &[0, 1]), "/a", &[]),
            step(call(0, &[0, 2]), "/b", &[0]),
            step(call(1, &[1, 2]), "/c", &[1]),
        ];
        program(8, vec![partition(DeviceKind::Emu, buffers, kernels, steps)])
    };
    let (executor, fake) = executor(with(&[4]));
    for _ in 0..3 {
        let x = Tensor::from_slice(&[0f32, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], &[8]).unwrap();
        let y = executor.run(&[x]).unwrap();
        assert_eq!(
            y[0].as_slice::<f32>(),
            [6.0, 7.0, 8.0, 9.0, 5.0, 6.0, 7.0, 8.0]
        );
    }
    assert_eq!(fake.0.0.lock().unwrap().n_encoded, 1);
    let beyond = with(&[5]).validate();
    assert!(
        beyond
            .iter()
            .any(|v| v.contains("ends at byte 36 of a buffer of 32")),
        "{beyond:?}"
    );
}

/// The host sends x to the device and receives x + 1.
#[test]
fn tensors_cross_between_host_and_device() {
    let [host, device] = [DeviceKind::Cpu, DeviceKind::Emu].map(|k| DeviceName::local(k, 0));
    let key = |from: &DeviceName, to: &DeviceName| Key {
        source: from.clone(),
        destination: to.clone(),
        tensor: "t".into(),
    };
    let (there, back) = (key(&host, &device), key(&device, &host));
    let send = |key: &Key, buffer: u32| StepKind::Send {
        key: key.clone(),
        buffer: BufferId(buffer),
    };
    let recv = |key: &Key, buffer: u32| StepKind::Recv {
        key: key.clone(),
        buffer: BufferId(buffer),
    };
    let on_host = partition(
        DeviceKind::Cpu,
        vec![
            floats("x", 4, Loc::Input(0)),
            floats("y", 4, Loc::Output(0)),
        ],
        vec![],
        vec![
            step(send(&there, 0), "/send", &[]),
            step(recv(&back, 1), "/recv", &[]),
        ],
    );
    let on_device = partition(
        DeviceKind::Emu,
        vec![
            floats("a", 4, arena(0)),
            floats("b", 4, arena(64)),
            floats("c", 4, arena(128)),
        ],
        vec![kernel("add_one", &TWO, 4)],
        vec![
            step(recv(&there, 0), "/recv", &[]),
            step(call(0, &[0, 1]), "/add", &[0]),
            step(
                StepKind::Copy {
                    src: BufferId(1),
                    dst: BufferId(2),
                },
                "/copy",
                &[1],
            ),
            step(send(&back, 2), "/send", &[2]),
        ],
    );
    let (executor, _) = executor(program(4, vec![on_host, on_device]));
    for k in 0..20 {
        let y = executor
            .run(&[Tensor::from_slice(&[k as f32; 4], &[4]).unwrap()])
            .unwrap();
        assert_eq!(y[0].as_slice::<f32>(), [k as f32 + 1.0; 4]);
    }
}

/// A loop on the device: `x += 1` while it is below the constant 10. Header, condition and carried value are in the device's memory.
#[test]
fn control_flow_reads_its_conditions_from_the_device() {
    let scalar = |name: &str, dtype: DType, loc: Loc| Buffer {
        name: name.into(),
        dtype,
        shape: vec![1],
        loc,
    };
    let below = [
        GpuParam::Buffer(0),
        GpuParam::Buffer(1),
        GpuParam::Buffer(2),
    ];
    let spec = |name: &str, dtype: DType| IoSpec::new(name, dtype, &[1]);
    let inputs = vec![
        spec("i", DType::I64),
        spec("c", DType::Bool),
        spec("x", DType::F32),
    ];
    let outputs = vec![spec("c", DType::Bool), spec("x", DType::F32)];
    let body = partition(
        DeviceKind::Emu,
        vec![
            floats("x", 1, Loc::Input(2)),
            floats("limit", 1, Loc::Constant(0)),
            floats("x", 1, Loc::Output(1)),
            scalar("c", DType::Bool, Loc::Output(0)),
        ],
        vec![kernel("add_one", &TWO, 1), kernel("below", &below, 1)],
        vec![
            step(call(0, &[0, 2]), "/add", &[]),
            step(call(1, &[0, 1, 3]), "/below", &[]),
        ],
    );
    let (partitions, variables) = (vec![body], vec![]);
    let body = Arc::new(Program {
        name: "body".into(),
        inputs,
        outputs,
        variables,
        partitions,
    });
    let mut outer = partition(
        DeviceKind::Emu,
        vec![
            floats("x", 1, Loc::Input(0)),
            floats("y", 1, Loc::Output(0)),
            scalar("true", DType::Bool, Loc::Constant(0)),
        ],
        vec![],
        vec![step(
            StepKind::Loop(Box::new(Loop {
                trips: TripCount::While {
                    max_trips: None,
                    condition: Some(BufferId(2)),
                },
                body,
                carried: vec![Carried {
                    init: BufferId(0),
                    result: BufferId(1),
                }],
                scan_inputs: vec![],
                scan_outputs: vec![],
                args: vec![],
                once: vec![],
            })),
            "/loop",
            &[],
        )],
    );
    outer.constants = vec![Tensor::from_slice(&[true], &[1]).unwrap()];
    let (executor, _) = executor(program(1, vec![outer]));
    for (x, y) in [(3.0f32, 10.0f32), (4.0, 10.0), (40.0, 41.0)] {
        let out = executor
            .run(&[Tensor::from_slice(&[x], &[1]).unwrap()])
            .unwrap();
        assert_eq!(out[0].as_slice::<f32>(), [y], "from {x}");
    }
}

#[test]
fn a_device_without_driver_and_kernels_of_another_kind_are_refused() {
    let e = Executor::new(chain(), &ExecOptions::default())
        .err()
        .unwrap();
    assert_eq!(e.kind(), ErrorKind::Unsupported);
    let mut wrong = (*chain()).clone();
    wrong.partitions[0].device = DeviceName::local(DeviceKind::Cpu, 0);
    assert!(
        wrong.validate().iter().any(|v| v.contains("is for a GPU")),
        "{:?}",
        wrong.validate()
    );
    let mut wrong = (*chain()).clone();
    wrong.partitions[0].gpu_code.clear();
    assert!(
        wrong
            .validate()
            .iter()
            .any(|v| v.contains("code 0 does not exist")),
        "{:?}",
        wrong.validate()
    );
}
