//! Round trips, damage, and refusals of images.

use super::*;
use crate::device::{DeviceKind, DeviceName};
use crate::exec::{ExecOptions, Executor};
use crate::program::*;
use crate::tensor::Tensor;
use crate::text::{Code, Text, table_offset};
use crate::{DType, ErrorKind};
use std::sync::Arc;

/// Machine code that returns 0: a kernel that does nothing.
#[cfg(target_arch = "x86_64")]
const NOTHING: &[u8] = &[0x31, 0xc0, 0xc3];
#[cfg(target_arch = "aarch64")]
const NOTHING: &[u8] = &[0x00, 0x00, 0x80, 0x52, 0xc0, 0x03, 0x5f, 0xd6];

fn buffer(name: &str, dtype: DType, n: usize, loc: Loc) -> Buffer {
    let shape = vec![n];
    let name = name.to_owned();
    Buffer {
        name,
        dtype,
        shape,
        loc,
    }
}

fn step(kind: StepKind, deps: &[u32]) -> Step {
    Step {
        kind,
        origin: "/a node".to_owned(),
        deps: deps.iter().map(|&d| StepId(d)).collect(),
    }
}

fn partition(buffers: Vec<Buffer>, constants: Vec<Tensor>, steps: Vec<Step>) -> Partition {
    Partition {
        device: DeviceName::local(DeviceKind::Cpu, 0),
        arena_bytes: 256,
        buffers,
        constants,
        kernels: Vec::new(),
        gpu_code: Vec::new(),
        steps,
        memory_limit: Some(1 << 20),
    }
}

/// A branch: its output is one constant.
fn branch(value: f32) -> Arc<Program> {
    let constant = Tensor::from_slice(&[value, 2.0], &[2]).unwrap();
    let buffers = vec![
        buffer("c", DType::F32, 2, Loc::Constant(0)),
        buffer("y", DType::F32, 2, Loc::Output(0)),
    ];
    let copy = StepKind::Copy {
        src: BufferId(0),
        dst: BufferId(1),
    };
    Arc::new(Program {
        name: "branch".to_owned(),
        outputs: vec![IoSpec::new("y", DType::F32, &[2])],
        partitions: vec![partition(buffers, vec![constant], vec![step(copy, &[])])],
        ..Program::default()
    })
}

/// A kernel that does nothing, a branch, a variable and a copy: `n` elements in and out.
fn program(n: usize) -> Arc<Program> {
    let code = Code {
        bytes: NOTHING.to_vec(),
        imports: vec!["gm_gemm_f32".to_owned()],
        calls: Vec::new(),
    };
    let text = Arc::<Text>::default();
    text.link(code, Vec::new(), gristmill_kernels::Isa::Portable)
        .unwrap();
    // SAFETY: the code keeps to the ABI, whatever its arguments.
    let function = unsafe { text.function(0) };
    let buffers = vec![
        buffer("x", DType::F32, n, Loc::Input(0)),
        buffer("y", DType::F32, n, Loc::Output(0)),
        buffer("p", DType::Bool, 1, Loc::Constant(0)),
        buffer("z", DType::F32, 2, Loc::Output(1)),
        buffer("v", DType::F32, 2, Loc::Output(2)),
    ];
    let [x, y, p, z, v] = [0, 1, 2, 3, 4].map(BufferId);
    let steps = vec![
        step(StepKind::Copy { src: x, dst: y }, &[]),
        step(
            StepKind::Kernel {
                kernel: KernelId(0),
                args: vec![x],
                n_outputs: 0,
                items: 1,
                grain: 0,
            },
            &[],
        ),
        step(
            StepKind::If(Box::new(If {
                cond: p,
                then_branch: branch(1.0),
                else_branch: branch(-1.0),
                args: vec![],
                results: vec![z],
            })),
            &[],
        ),
        step(
            StepKind::ReadVariable {
                variable: 0,
                dst: v,
            },
            &[],
        ),
    ];
    let mut main = partition(buffers, vec![Tensor::from(vec![true])], steps);
    main.kernels.push(Kernel::Cpu(CpuKernel {
        name: "nothing".to_owned(),
        function,
        workspace_bytes_per_thread: 64,
        blocks: None,
    }));
    Arc::new(Program {
        name: "model".to_owned(),
        inputs: vec![IoSpec::new("x", DType::F32, &[n])],
        outputs: vec![
            IoSpec::new("y", DType::F32, &[n]),
            IoSpec::new("z", DType::F32, &[2]),
            IoSpec::new("v", DType::F32, &[2]),
        ],
        variables: vec![VariableSpec {
            container: String::new(),
            name: "v".to_owned(),
            dtype: DType::F32,
            initial: Some(Tensor::from_slice(&[1f32, 2.0], &[2]).unwrap()),
            in_place: false,
        }],
        partitions: vec![main],
    })
}

fn about_here() -> About {
    About {
        name: "model".to_owned(),
        version: "1".to_owned(),
        system: system(),
        isa: gristmill_kernels::Isa::Portable as u32,
        features: Vec::new(),
        variants: [3, 5]
            .map(|n| Fixed {
                dims: vec![("n".to_owned(), n)],
                indexed: vec![Some(7)],
            })
            .to_vec(),
        weights: String::new(),
        measured: 0,
    }
}

/// The bytes of an image of two programs.
fn bytes_of(about: &About) -> Vec<u8> {
    let folder = std::env::temp_dir();
    let name = format!(
        "gristmill-image-{}-{:?}",
        std::process::id(),
        std::thread::current().id()
    );
    let path = folder.join(name);
    write(&path, about, &[program(3), program(5)]).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    bytes
}

fn open(bytes: &[u8]) -> Result<Image, Error> {
    // SAFETY: the images of these tests hold one function, which does nothing; those that are damaged are not run.
    unsafe { Image::from_bytes(bytes) }
}

/// The message of the error that bytes give.
fn refusal(bytes: &[u8]) -> String {
    let error = open(bytes).err().expect("an image that is refused");
    assert!(
        [ErrorKind::InvalidInput, ErrorKind::Unsupported].contains(&error.kind()),
        "{error:?}"
    );
    error.to_string()
}

/// Writes the checksums that fit what is there, as far as the table of sections can be read.
fn repair(bytes: &mut [u8]) {
    let n = u32::from_le_bytes(bytes[12..16].try_into().unwrap()) as usize;
    for i in 0..n.min(16) {
        let entry = HEAD_BYTES + i * ENTRY_BYTES;
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
        let (offset, n_bytes) = (word(entry + 8), word(entry + 16));
        let Some(section) = offset
            .checked_add(n_bytes)
            .and_then(|end| bytes.get(offset..end))
        else {
            continue;
        };
        let checksum = crc32fast::hash(section);
        bytes[entry + 4..entry + 8].copy_from_slice(&checksum.to_le_bytes());
    }
    let end = (HEAD_BYTES + n.min(64) * ENTRY_BYTES).min(bytes.len());
    bytes[CHECKSUM].fill(0);
    let checksum = crc32fast::hash(&bytes[..end]);
    bytes[CHECKSUM].copy_from_slice(&checksum.to_le_bytes());
}

#[test]
fn a_program_runs_as_it_was_written() {
    let image = open(&bytes_of(&about_here())).unwrap();
    image.verify().unwrap();
    assert_eq!(image.about(), &about_here());
    let program = image.program_for(&[&[5]]).unwrap();
    let executor = Executor::new(program.clone(), &ExecOptions::default()).unwrap();
    drop(image);
    let x = Tensor::from(vec![1f32, 2.0, 3.0, 4.0, 5.0]);
    let outputs = executor.run(std::slice::from_ref(&x)).unwrap();
    let values: Vec<Vec<f64>> = outputs.iter().map(Tensor::to_f64s).collect();
    assert_eq!(
        values,
        [
            vec![1.0, 2.0, 3.0, 4.0, 5.0],
            vec![1.0, 2.0],
            vec![1.0, 2.0]
        ]
    );
}

#[test]
fn constants_are_used_in_place_and_there_once() {
    let image = open(&bytes_of(&about_here())).unwrap();
    let initial = |p: &Program| p.variables[0].initial.clone().unwrap();
    let [a, b] = [0, 1].map(|i| initial(&image.programs()[i]));
    assert_eq!(a.as_ptr(), b.as_ptr());
    // `[1, 2]` of the variable is a branch's constant too.
    let mut own = a.clone();
    drop(image);
    own.as_mut_slice::<f32>()[0] = 9.0;
    assert_eq!(
        (own.to_f64s(), a.to_f64s()),
        (vec![9.0, 2.0], vec![1.0, 2.0])
    );
    let mut last = b;
    drop(a);
    last.as_mut_slice::<f32>()[1] = 8.0;
    assert_eq!(last.to_f64s(), [1.0, 8.0]);
}

/// Bytes in memory of whole pages that stays, with room behind them.
fn kept(bytes: &[u8], room: usize) -> &'static mut [u8] {
    let mut map = memmap2::MmapMut::map_anon((bytes.len() + room).max(1)).unwrap();
    map[..bytes.len()].copy_from_slice(bytes);
    let map: &'static mut memmap2::MmapMut = Box::leak(Box::new(map));
    &mut map[..]
}

/// The parts of an image as an executable holds them.
fn parts_of(bytes: &[u8]) -> Parts {
    let image = open(bytes).unwrap();
    let range = |kind| {
        let section = image.sections().iter().find(|s| s.kind == kind).unwrap();
        section.offset..section.offset + section.bytes
    };
    let (text, constants) = (range(Kind::Text), range(Kind::Constants));
    let table = table_offset(text.len());
    let (code, table) = kept(&bytes[text.clone()], 2 * table).split_at_mut(table);
    Parts {
        head: kept(&bytes[..text.start], 0),
        text: &code[..text.len()],
        table: &raw mut table[..4096],
        constants: kept(&bytes[constants], 0),
        folder: None,
    }
}

#[test]
#[cfg(target_arch = "x86_64")]
fn parts_of_an_executable_are_used_in_place() {
    let bytes = bytes_of(&about_here());
    let Parts {
        head,
        text,
        table,
        constants,
        folder,
    } = parts_of(&bytes);
    // SAFETY: the parts are there as long as the process, and this table is linked once; the code is not run.
    let image = unsafe {
        Image::embedded(Parts {
            head,
            text,
            table,
            constants,
            folder,
        })
    }
    .unwrap();
    image.verify().unwrap();
    assert_eq!(image.programs().len(), 2);
    let Kernel::Cpu(kernel) = &image.programs()[1].partitions[0].kernels[0] else {
        panic!("a CPU's kernel");
    };
    assert!(
        text.as_ptr_range()
            .contains(&(kernel.function.entry().unwrap() as *const u8))
    );
    let initial = image.programs()[0].variables[0].initial.clone().unwrap();
    assert!(constants.as_ptr_range().contains(&initial.as_ptr()));
    // SAFETY: the table holds addresses now.
    let first = unsafe { table.cast::<usize>().read() };
    assert_ne!(first, 0);
}

#[test]
fn parts_that_do_not_fit_are_refused() {
    let bytes = bytes_of(&about_here());
    let refused = |change: fn(&mut Parts)| {
        let mut parts = parts_of(&bytes);
        change(&mut parts);
        // SAFETY: as above.
        let opened = unsafe { Image::embedded(parts) };
        opened.err().expect("parts that are refused").to_string()
    };
    assert!(refused(|p| p.head = &p.head[..60]).contains("table of sections ends early"));
    assert!(refused(|p| p.head = &p.head[..p.head.len() - 200]).contains("end early"));
    assert!(refused(|p| p.text = &p.text[..1]).contains("text end early"));
    assert!(
        refused(|p| p.table = std::ptr::slice_from_raw_parts_mut(std::ptr::null_mut(), 0))
            .contains("not behind its text")
    );
    let unverified = refused(|p| p.constants = &p.constants[..8]);
    assert!(unverified.contains("constants end early"), "{unverified}");
}

#[test]
fn other_shapes_are_an_error_that_names_those_that_are_there() {
    let image = open(&bytes_of(&about_here())).unwrap();
    let error = image.program_for(&[&[4]]).unwrap_err().to_string();
    assert_eq!(
        error,
        "there is no code for inputs of shapes [[4]]; the image has x [3] and x [5]"
    );
}

#[test]
fn other_machines_and_formats_are_refused_by_name() {
    let with = |change: fn(&mut About)| {
        let mut about = about_here();
        change(&mut about);
        refusal(&bytes_of(&about))
    };
    let here = system();
    assert_eq!(
        with(|a| a.system = "vax-vms".to_owned()),
        format!("the image is for vax-vms, this is {here}")
    );
    assert_eq!(
        with(|a| a.features = vec!["has_quanta".to_owned()]),
        "the image needs a CPU with quanta"
    );
    assert!(with(|a| a.isa = 99).contains("an unknown instruction set"));
    let mut bytes = bytes_of(&about_here());
    bytes[8] = 9;
    assert_eq!(
        refusal(&bytes),
        "the image has format 9, this runtime reads 4"
    );
    let mut bytes = bytes_of(&about_here());
    bytes[24] ^= 1;
    repair(&mut bytes);
    assert!(refusal(&bytes).contains("made for other kernels"));
    let mut bytes = bytes_of(&about_here());
    let name = b"gm_gemm_f32";
    let at = bytes.windows(name.len()).position(|w| w == name).unwrap();
    bytes[at + 3] = b'x';
    repair(&mut bytes);
    assert!(refusal(&bytes).contains("\"gm_xemm_f32\", which this runtime does not have"));
    assert_eq!(refusal(b"PK"), "this is no image of gristmill");
    assert_eq!(refusal(b""), "this is no image of gristmill");
}

#[test]
fn every_flipped_bit_of_the_head_is_found() {
    let good = bytes_of(&about_here());
    let constants = open(&good).unwrap().sections().last().copied().unwrap();
    let sections = open(&good).unwrap().sections().to_vec();
    let is_in = |at: usize| {
        let mut eager = sections.iter().filter(|s| s.kind != Kind::Constants);
        let head = HEAD_BYTES + sections.len() * ENTRY_BYTES;
        at < head || eager.any(|s| (s.offset..s.offset + s.bytes).contains(&at))
    };
    let mut bytes = good.clone();
    for at in (0..constants.offset).filter(|at| is_in(*at)) {
        for bit in 0..8 {
            bytes[at] ^= 1 << bit;
            refusal(&bytes);
            bytes[at] ^= 1 << bit;
        }
    }
    let mut bytes = good.clone();
    bytes[constants.offset] ^= 1;
    let image = open(&bytes).unwrap();
    let error = image.verify().unwrap_err().to_string();
    assert_eq!(
        error,
        "the image is damaged: the checksum of its constants differs"
    );
}

#[test]
fn what_checksums_do_not_find_is_refused_or_valid() {
    let good = bytes_of(&about_here());
    let sections = open(&good).unwrap().sections().to_vec();
    let tables = sections.iter().filter(|s| s.kind != Kind::Constants);
    let within = tables.flat_map(|s| s.offset..s.offset + s.bytes);
    let head = 0..HEAD_BYTES + sections.len() * ENTRY_BYTES;
    let mut n_refused = 0;
    for at in head.chain(within) {
        for bit in 0..8 {
            let mut bytes = good.clone();
            bytes[at] ^= 1 << bit;
            repair(&mut bytes);
            match open(&bytes) {
                Ok(image) => {
                    let programs = image.programs().iter();
                    assert!(programs.flat_map(|p| p.validate()).next().is_none());
                }
                Err(_) => n_refused += 1,
            }
        }
    }
    assert!(n_refused > 1000, "{n_refused}");
}

#[test]
fn truncated_and_extended_images_are_refused() {
    let good = bytes_of(&about_here());
    for n in (0..good.len())
        .step_by(61)
        .chain(good.len() - 9..good.len())
    {
        refusal(&good[..n]);
    }
    assert!(refusal(&[&good[..], &[0]].concat()).contains("it has"));
}

#[test]
fn random_tables_never_crash_the_reader() {
    let good = bytes_of(&about_here());
    let sections = open(&good).unwrap().sections().to_vec();
    let programs = sections[1];
    let mut state = 1u64;
    let mut random = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 33) as usize
    };
    for _ in 0..5_000 {
        let mut bytes = good.clone();
        for _ in 0..1 + random() % 4 {
            let at = programs.offset + random() % programs.bytes;
            bytes[at] = [0, 1, 0x7f, 0x80, 0xff, random() as u8][random() % 6];
        }
        repair(&mut bytes);
        drop(open(&bytes));
    }
}

#[test]
fn functions_of_the_process_are_not_written() {
    unsafe extern "C" fn nothing(_: *const *mut u8, _: u64, _: u64) -> u32 {
        0
    }
    let mut program = (*program(3)).clone();
    let Kernel::Cpu(kernel) = &mut program.partitions[0].kernels[0] else {
        panic!("a kernel of a CPU");
    };
    // SAFETY: it does nothing.
    kernel.function = unsafe { crate::text::Function::of_process(nothing) };
    let path = std::env::temp_dir().join("gristmill-never-written.gmx");
    let error = write(&path, &about_here(), &[Arc::new(program)]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(!path.exists());
}

#[test]
fn a_program_that_opening_would_refuse_is_not_written() {
    let about = about_here();
    assert!(Contents::of(&about, &[program(3)]).is_ok());
    let mut wrong = Program::clone(&program(3));
    wrong.partitions[0].buffers[1].loc = Loc::Output(2);
    let refused = Contents::of(&about, &[Arc::new(wrong)]).err().unwrap();
    assert_eq!(refused.kind(), ErrorKind::Internal);
    assert!(refused.to_string().contains("is malformed"), "{refused}");
}
