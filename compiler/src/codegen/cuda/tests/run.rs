//! Generated kernels on the emulator, compared with the interpreter: the same tables of cases as the CPU's.

use super::build::{Batch, Place};
use crate::codegen::cuda::{Generated, Options, generate_with, nvrtc};
use crate::codegen::plan::{Arg, KernelPlan};
use crate::codegen::testing::{self, Case, Rng, as_cluster, graph_of};
use crate::ir::{Graph, NodeId};
use crate::target::Arch;
use crate::testing::nvrtc_or_left_out;
use gristmill_emulator::{
    Args, Checks, Device, LaunchConfig, Limits, Module, TensorMap, encode_tensor_map,
};
use gristmill_runtime::Tensor;
use gristmill_runtime::gpu::{GpuKernel, GpuParam, Launch};
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Why a run gives no results.
#[derive(Debug, PartialEq)]
enum Failure {
    Status(u32),
    Fault(String),
}

impl From<gristmill_emulator::Fault> for Failure {
    fn from(f: gristmill_emulator::Fault) -> Failure {
        Failure::Fault(f.to_string())
    }
}

/// Kernels of graphs, compiled together.
struct Kernels {
    of_graph: Vec<(Generated, Vec<Place>)>,
    modules: Vec<Module>,
}

impl Kernels {
    /// Of each graph in one of its forms.
    fn new(options: Options, graphs: &[(Graph, u8)], nvrtc: &nvrtc::Nvrtc) -> Kernels {
        let mut batch = Batch::new(Options {
            arch: options.arch.ptx_only(),
            ..options
        });
        let of_graph = graphs.iter().map(|(g, form)| batch.add(g, *form)).collect();
        let made = nvrtc::build(nvrtc, None, &batch.units());
        let module = |c: crate::Result<nvrtc::Compiled>| {
            let c = c.unwrap_or_else(|e| panic!("{e}"));
            Module::parse(&c.ptx).unwrap_or_else(|f| panic!("{f}"))
        };
        Kernels {
            of_graph,
            modules: made.into_iter().map(module).collect(),
        }
    }

    /// Runs the plan of node 0 of graph `i`. `launched` gives the launch in place of the planned one.
    fn run(
        &self,
        i: usize,
        graph: &Graph,
        inputs: &[Tensor],
        launched: fn(&GpuKernel) -> Launch,
    ) -> Result<Vec<Tensor>, Failure> {
        let (made, places) = &self.of_graph[i];
        let plan = &made.plans[&NodeId(0)];
        let device = Device::new(Limits {
            host_threads: 1,
            ..Limits::default()
        });
        let buffers = Buffers::new(&device, graph, plan, inputs)?;
        for step in &plan.steps {
            let kernel = &made.kernels[step.kernel];
            let place = &places[kernel.code];
            device.copy_in(buffers.status, &[0; 4])?;
            let address = |n: u32| buffers.address(step.args[n as usize]);
            let args = kernel.params.iter().try_fold(Args::new(), |args, p| {
                Ok::<Args, Failure>(match p {
                    GpuParam::Buffer(n) => args.u64(address(*n)),
                    GpuParam::Status => args.u64(buffers.status),
                    GpuParam::TensorMap(map) => {
                        let encoded =
                            encode_tensor_map(&TensorMap::of_buffer(map, address(map.buffer)))?;
                        args.value(64, &encoded)
                    }
                })
            })?;
            let Launch {
                grid,
                block,
                shared_bytes,
            } = launched(kernel);
            let config = LaunchConfig {
                grid,
                block,
                dynamic_shared_bytes: shared_bytes as usize,
                ..LaunchConfig::default()
            };
            let checks = Checks { races: true };
            device.launch(
                &self.modules[place.unit],
                &place.entry,
                &config,
                args.bytes(),
                &checks,
            )?;
            let mut status = [0; 4];
            device.copy_out(&mut status, buffers.status)?;
            match u32::from_le_bytes(status) {
                0 => {}
                status => return Err(Failure::Status(status)),
            }
        }
        buffers.results(&device, graph)
    }
}

/// Every buffer in an allocation of exactly its size, so that an access beside it is a fault.
struct Buffers {
    operands: Vec<u64>,
    results: Vec<u64>,
    scratch: Vec<u64>,
    packed: Vec<u64>,
    status: u64,
}

impl Buffers {
    fn new(
        device: &Device,
        graph: &Graph,
        plan: &KernelPlan,
        inputs: &[Tensor],
    ) -> Result<Buffers, Failure> {
        let upload = |t: &Tensor| -> Result<u64, Failure> {
            let address = device.alloc(t.size_bytes().max(1))?;
            device.copy_in(address, t.as_bytes())?;
            Ok(address)
        };
        let empty = |bytes: usize| Ok(device.alloc(bytes.max(1))?);
        Ok(Buffers {
            operands: inputs.iter().map(upload).collect::<Result<_, Failure>>()?,
            results: results_of(graph)
                .iter()
                .map(|t| empty(t.size_bytes()))
                .collect::<Result<_, Failure>>()?,
            scratch: plan
                .scratch
                .iter()
                .map(|&n| empty(n))
                .collect::<Result<_, Failure>>()?,
            packed: plan
                .packed
                .iter()
                .map(|c| upload(c.elements.tensor()))
                .collect::<Result<_, Failure>>()?,
            status: device.alloc(4)?,
        })
    }

    fn address(&self, arg: Arg) -> u64 {
        match arg {
            Arg::Operand(i) => self.operands[i as usize],
            Arg::Result(i) => self.results[i as usize],
            Arg::Scratch(i) => self.scratch[i as usize],
            Arg::Packed(i) => self.packed[i as usize],
        }
    }

    fn results(&self, device: &Device, graph: &Graph) -> Result<Vec<Tensor>, Failure> {
        let mut results = results_of(graph);
        for (t, &address) in results.iter_mut().zip(&self.results) {
            device.copy_out(t.as_bytes_mut(), address)?;
        }
        Ok(results)
    }
}

fn results_of(graph: &Graph) -> Vec<Tensor> {
    let tensor =
        |ty: &crate::ir::Type| Tensor::zeros(ty.dtype, &ty.static_shape().unwrap()).unwrap();
    graph
        .outputs
        .iter()
        .map(|o| tensor(graph.ty(o.value)))
        .collect()
}

/// So few blocks, and threads where a kernel leaves that open, that most kernels go through their items in several strides.
fn few_threads(kernel: &GpuKernel) -> Launch {
    let Launch {
        block,
        shared_bytes,
        ..
    } = kernel.launch;
    let fixed = [
        "gm_contract",
        "gm_rows",
        "gm_attention",
        "gm_skinny",
        "gm_turned",
        "gm_lines",
        "gm_bundle",
    ];
    let is_open = !fixed.contains(&kernel.entry.as_str());
    Launch {
        grid: [2, 1, 1],
        block: if is_open { [32, 1, 1] } else { block },
        shared_bytes,
    }
}

/// As the code generator says.
fn planned(kernel: &GpuKernel) -> Launch {
    kernel.launch
}

/// [`check_with`] the default options.
pub fn check_all(what: &str, cases: &[Case]) {
    check_with(Arch::COMMON.into(), what, cases);
}

/// Runs every case twice: as planned, and with few threads. Then runs once what forms there are beside the first ones, each in the smallest of the
/// cases that have it.
pub fn check_with(options: Options, what: &str, cases: &[Case]) {
    let Some(nvrtc) = nvrtc_or_left_out(what) else {
        return;
    };
    let first: Vec<(&Case, u8)> = cases.iter().map(|c| (c, 0)).collect();
    check_forms(options, &first, &[planned, few_threads], nvrtc);
    check_forms(options, &other_forms(options, cases), &[planned], nvrtc);
}

/// Cases with the numbers of forms that no smaller one has: what is said of them, but for how many blocks share a result, and what is summed up in.
fn other_forms(options: Options, cases: &[Case]) -> Vec<(&Case, u8)> {
    let mut by_size: Vec<&Case> = cases.iter().collect();
    by_size.sort_by_key(|c| c.inputs.iter().map(Tensor::len).sum::<usize>());
    let (mut seen, mut all) = (BTreeSet::new(), Vec::new());
    for case in by_size {
        let graph = as_cluster(&case.body);
        let made = |form| {
            generate_with(&graph, Options { form, ..options })
                .unwrap_or_else(|e| panic!("{graph}\n{e}"))
        };
        let n = made(0).forms[&NodeId(0)].n;
        for form in 1..n {
            let made = made(form);
            let choice = made.forms[&NodeId(0)].choices.iter().find(|c| c.number > 0);
            let choice = choice
                .unwrap_or_else(|| panic!("form {form} of {n} is no other\n{}", made.listing));
            let (words, parts) = choice
                .form
                .split_once(", in ")
                .unwrap_or((&choice.form, ""));
            if seen.insert((words.to_owned(), parts.is_empty())) {
                all.push((case, form));
            }
        }
    }
    all
}

/// Runs every case in one of its forms, once for each way to launch it.
fn check_forms(
    options: Options,
    cases: &[(&Case, u8)],
    launches: &[fn(&GpuKernel) -> Launch],
    nvrtc: &nvrtc::Nvrtc,
) {
    let graphs: Vec<(Graph, u8)> = cases
        .iter()
        .map(|(c, form)| (as_cluster(&c.body), *form))
        .collect();
    let kernels = Kernels::new(options, &graphs, nvrtc);
    let next = AtomicUsize::new(0);
    let work = || {
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            let Some((case, _)) = cases.get(i) else {
                return;
            };
            for &launched in launches {
                let run = |graph: &Graph, inputs: &[Tensor]| {
                    kernels
                        .run(i, graph, inputs, launched)
                        .map_err(|f| format!("{}\n{f:?}", kernels.of_graph[i].0.listing))
                };
                if let Err(panic) = catch_unwind(AssertUnwindSafe(|| case.check(run))) {
                    next.store(usize::MAX / 2, Ordering::Relaxed);
                    resume_unwind(panic);
                }
            }
        }
    };
    std::thread::scope(|s| {
        let n = gristmill_runtime::cpu::n_cores();
        let running: Vec<_> = (0..n).map(|_| s.spawn(work)).collect();
        running
            .into_iter()
            .for_each(|t| t.join().unwrap_or_else(|panic| resume_unwind(panic)));
    });
}

#[test]
fn every_scalar_op_on_every_dtype() {
    check_all(
        "element-wise CUDA kernels",
        &testing::scalar_ops(&mut Rng(1)),
    );
}

#[test]
fn every_cast() {
    check_all("CUDA kernels of casts", &testing::casts(&mut Rng(2)));
}

/// `every_cast` goes by arithmetic, these by the instructions that architectures have from sm_89 on.
#[test]
fn casts_of_8_bits_by_the_hardware() {
    let arch = Arch::parse("sm_89").unwrap();
    check_with(
        arch.into(),
        "CUDA kernels of casts of 8 bits",
        &testing::float8_casts(),
    );
}

#[test]
fn broadcasts_and_shapes() {
    let mut cases = testing::broadcasts(&mut Rng(3));
    cases.extend(testing::unary_shapes(&mut Rng(5)));
    check_all("CUDA kernels over shapes", &cases);
}

#[test]
fn every_tensor_op() {
    check_all(
        "CUDA kernels of every tensor op",
        &testing::tensor_ops(&mut Rng(4)),
    );
}

#[test]
fn special_values_through_every_selection() {
    check_all(
        "CUDA kernels over special values",
        &testing::special_selections(&mut Rng(8)),
    );
}

#[test]
fn attention_and_softmax_of_hidden_rows() {
    check_all(
        "CUDA kernels of hidden rows",
        &testing::hidden_rows(&mut Rng(9)),
    );
}

#[test]
fn random_bodies() {
    let rng = &mut Rng(41);
    let mut cases = testing::random_maps(rng, 60);
    cases.extend(testing::random_phases(rng, 60));
    check_all("CUDA kernels of random bodies", &cases);
}

#[test]
fn faults_are_reported_as_status() {
    let Some(nvrtc) = nvrtc_or_left_out("faults of CUDA kernels") else {
        return;
    };
    let cases = testing::faults(&mut Rng(6));
    let graphs: Vec<Graph> = cases
        .iter()
        .map(|(op, operands, _)| as_cluster(&graph_of(op, operands)))
        .collect();
    let graphs: Vec<(Graph, u8)> = graphs.into_iter().map(|g| (g, 0)).collect();
    let kernels = Kernels::new(Arch::COMMON.into(), &graphs, nvrtc);
    for (i, (op, operands, expected)) in cases.iter().enumerate() {
        assert_eq!(
            kernels.run(i, &graphs[i].0, operands, planned),
            Err(Failure::Status(*expected)),
            "{op:?}"
        );
    }
}
