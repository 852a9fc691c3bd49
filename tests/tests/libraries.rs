//! cuBLASLt as one more candidate of products, with the emulated one: what it computes, and when it is taken.

use crate::cuda::with_driver_of;
use gristmill::interp::{self, compare::allclose};
use gristmill::ir::{Graph, GraphBuilder, ScalarOp};
use gristmill::pipeline::{Lowered, Stage};
use gristmill::testing::{Rng, Setup, random_tensor};
use gristmill::{DType, Precision, Tensor, Tuning, tune};
use gristmill_runtime::cuda::{CudaGpu, Settings};
use gristmill_runtime::device::DeviceKind;
use gristmill_runtime::driver::Driver;
use gristmill_runtime::exec::{ExecOptions, Executor};
use gristmill_runtime::product::{Compute, Matrix, Order, Product};
use gristmill_runtime::program::{
    Buffer, BufferId, IoSpec, Kernel, KernelId, Loc, Partition, Program, Step, StepKind,
};
use gristmill_runtime::{DeviceName, ErrorKind};
use std::path::Path;
use std::sync::Arc;

/// The same product in any layout that the library can say.
#[derive(Debug)]
struct Case {
    dtype: DType,
    /// Batch of each side, which broadcast.
    batch: [Vec<usize>; 2],
    /// Rows, columns, and what is summed over.
    sizes: [usize; 3],
    /// Whether each side is stored the other way round.
    turned: [bool; 2],
    /// Whether each side is a part of a larger tensor.
    cut: [bool; 2],
    bias: bool,
    relu: bool,
}

impl Case {
    fn random(rng: &mut Rng) -> Case {
        let dtype = rng.pick(&[DType::F32, DType::F64, DType::F16, DType::BF16]);
        let batches = [
            [vec![], vec![]],
            [vec![3], vec![]],
            [vec![2, 3], vec![2, 3]],
            [vec![2], vec![1]],
            [vec![], vec![4]],
        ];
        let sizes = [0; 3].map(|_| 1 + rng.below(9));
        let [m, n, k] = [
            sizes[0],
            sizes[1],
            if rng.one_in(3) {
                50 + sizes[2]
            } else {
                sizes[2]
            },
        ];
        let yes = |rng: &mut Rng| rng.one_in(2);
        Case {
            dtype,
            batch: rng.pick(&batches),
            sizes: [m, n, k],
            turned: [yes(rng), yes(rng)],
            cut: [yes(rng), yes(rng)],
            bias: yes(rng),
            relu: yes(rng),
        }
    }

    /// Appends it to a graph; gives its inputs.
    fn add(&self, b: &mut GraphBuilder, i: usize, rng: &mut Rng) -> Vec<Tensor> {
        let [m, n, k] = self.sizes;
        let mut inputs = Vec::new();
        let sides = [("x", [m, k]), ("w", [k, n])].into_iter().enumerate().map(
            |(side, (name, [rows, columns]))| {
                let stored = if self.turned[side] {
                    [columns, rows]
                } else {
                    [rows, columns]
                };
                let wider = [
                    stored[0] + usize::from(self.cut[side]),
                    stored[1] + 2 * usize::from(self.cut[side]),
                ];
                let shape = [&self.batch[side][..], &wider[..]].concat();
                inputs.push(random_tensor(rng, self.dtype, &shape, false));
                let rank = shape.len();
                let mut v = b.input(&format!("{name}{i}"), self.dtype, shape);
                if self.cut[side] {
                    v = b.slice_axis(v, rank - 2, 1, stored[0]).unwrap();
                    v = b.slice_axis(v, rank - 1, 2, stored[1]).unwrap();
                }
                if self.turned[side] {
                    let perm: Vec<usize> = (0..rank - 2).chain([rank - 1, rank - 2]).collect();
                    v = b.transpose(v, &perm).unwrap();
                }
                v
            },
        );
        let sides: Vec<_> = sides.collect();
        let mut y = b.matmul(sides[0], sides[1]).unwrap();
        if self.bias {
            inputs.push(random_tensor(rng, self.dtype, &[n], false));
            let bias = b.input(&format!("b{i}"), self.dtype, [n]);
            y = b.map(ScalarOp::Add, &[y, bias]).unwrap();
        }
        if self.relu {
            y = b.map(ScalarOp::Relu, &[y]).unwrap();
        }
        b.output(&format!("y{i}"), y);
        inputs
    }
}

/// The library has products of bytes in one form only, and sums them up exactly.
#[test]
fn a_library_multiplies_bytes() {
    with_driver_of("libraries", "a_library_multiplies_bytes", "", || {
        const SIZES: [usize; 3] = [5, 8, 12];
        let [m, n, k] = SIZES;
        let mut rng = Rng(43);
        let [x, w] = [[m, k], [n, k]].map(|shape| random_tensor(&mut rng, DType::I8, &shape, true));
        let mut b = GraphBuilder::new("g");
        let [a, t] =
            [("x", &x), ("w", &w)].map(|(name, t)| b.input(name, DType::I8, t.shape().to_vec()));
        let t = b.transpose(t, &[1, 0]).unwrap();
        let (a, t) = (
            b.cast(a, DType::I32).unwrap(),
            b.cast(t, DType::I32).unwrap(),
        );
        let y = b.matmul(a, t).unwrap();
        b.output("y", y);
        let expected = interp::run(&b.finish().unwrap(), &[x.clone(), w.clone()]).unwrap();
        let run = |order| {
            let program = Arc::new(of_one_product(SIZES, order));
            assert_eq!(program.validate(), [""; 0]);
            let driver =
                Arc::new(CudaGpu::open(0, Settings::default()).unwrap()) as Arc<dyn Driver>;
            let drivers = [(program.partitions[0].device.clone(), driver)].into();
            let executor = Executor::new(
                program,
                &ExecOptions {
                    drivers,
                    ..ExecOptions::default()
                },
            )?;
            executor.run(&[x.clone(), w.clone()])
        };
        assert_eq!(
            run(Order::Column).unwrap()[0].as_slice::<i32>(),
            expected[0].as_slice::<i32>()
        );
        // The same sizes in the other order: the library has nothing for that, and it is said of which node.
        let refused = run(Order::Row).unwrap_err();
        let said = refused.to_string();
        assert_eq!(
            (refused.kind(), refused.node()),
            (ErrorKind::Unsupported, Some("/product")),
            "{said}"
        );
        assert!(
            said.contains(
                "product p: cublasLtMatmulAlgoGetHeuristic failed: CUBLAS_STATUS_NOT_SUPPORTED (15)"
            ),
            "{said}"
        );
    });
}

/// Multiplies its first input by its second, which is `[n, k]`, or so many elements as `[k, n]`.
fn of_one_product([m, n, k]: [usize; 3], order: Order) -> Program {
    let pitch = if order == Order::Row { n } else { k };
    let lhs = Matrix {
        align_bytes: 4,
        ..Matrix::dense(DType::I8, k)
    };
    let product = Product {
        name: "p".into(),
        m,
        n,
        k,
        n_batch: 1,
        lhs,
        rhs: Matrix {
            order,
            pitch,
            ..lhs
        },
        out: Matrix {
            align_bytes: 32,
            ..Matrix::dense(DType::I32, n)
        },
        compute: Compute::I32,
        bias: None,
        relu: false,
        workspace_bytes: 0,
    };
    let io = [
        ("x", DType::I8, [m, k]),
        ("w", DType::I8, [n, k]),
        ("y", DType::I32, [m, n]),
    ];
    let locs = [Loc::Input(0), Loc::Input(1), Loc::Output(0)];
    let buffers = io
        .iter()
        .zip(locs)
        .map(|((name, dtype, shape), loc)| Buffer {
            name: (*name).into(),
            dtype: *dtype,
            shape: shape.to_vec(),
            loc,
        });
    let args = [0, 1, 2].map(BufferId).to_vec();
    let kind = StepKind::Kernel {
        kernel: KernelId(0),
        args,
        n_outputs: 1,
        items: 1,
        grain: 0,
    };
    let partition = Partition {
        device: DeviceName::local(DeviceKind::Gpu, 0),
        arena_bytes: 0,
        buffers: buffers.collect(),
        constants: vec![],
        kernels: vec![Kernel::Product(product)],
        gpu_code: vec![],
        steps: vec![Step {
            kind,
            origin: "/product".into(),
            deps: vec![],
        }],
        memory_limit: None,
    };
    let mut specs: Vec<IoSpec> = io
        .iter()
        .map(|(name, dtype, shape)| IoSpec::new(*name, *dtype, shape))
        .collect();
    let outputs = specs.split_off(2);
    let (name, variables, partitions) = ("g".into(), vec![], vec![partition]);
    Program {
        name,
        inputs: specs,
        outputs,
        variables,
        partitions,
    }
}

fn tuned(folder: Option<&Path>, measures: bool, libraries: bool) -> Setup {
    super::cuda::tuned(Tuning {
        folder: folder.map(Path::to_owned),
        measures,
        libraries,
    })
}

/// Names of the kernels that are a library's.
fn products(lowered: &Lowered) -> Vec<String> {
    let kernels = &lowered.program.partitions[0].kernels;
    kernels
        .iter()
        .filter(|k| matches!(k, Kernel::Product(_)))
        .map(|k| k.name().to_owned())
        .collect()
}

/// Many products in one model, all of them by the library, in runs that are asked for one by one and in captured ones.
#[test]
fn a_library_computes_random_products() {
    with_driver_of(
        "libraries",
        "a_library_computes_random_products",
        "clock=threads,product=100",
        || {
            let mut rng = Rng(41);
            let mut b = GraphBuilder::new("products");
            let cases: Vec<Case> = (0..10).map(|_| Case::random(&mut rng)).collect();
            let inputs: Vec<Tensor> = cases
                .iter()
                .enumerate()
                .flat_map(|(i, c)| c.add(&mut b, i, &mut rng))
                .collect();
            let graph = b.finish().unwrap();
            let compiled = tuned(None, true, true).compile(&graph).unwrap();
            let executable = compiled.for_inputs(&inputs).unwrap();
            let lowered = &executable.lowered;
            assert!(
                lowered.report.warnings.is_empty(),
                "{:?}",
                lowered.report.warnings
            );
            assert_eq!(
                products(lowered).len(),
                cases.len(),
                "{:?}\n{}",
                lowered.report,
                lowered.program
            );
            let expected = interp::run(&graph, &inputs).unwrap();
            for run in 0..3 {
                let found = executable.run(&inputs).unwrap().into_tensors();
                for ((case, e), f) in cases.iter().zip(&expected).zip(&found) {
                    let most = match case.dtype {
                        DType::F16 | DType::BF16 => 1.0 / 64.0,
                        _ => 1e-5,
                    };
                    let c = allclose(e, f, 0.0, 0.0);
                    assert!(c.scaled_err() <= most, "run {run}, {case:?}: {c}");
                }
            }
        },
    );
}

/// `relu(x w + b)` of f32.
fn layer() -> (Graph, Vec<Tensor>) {
    let mut b = GraphBuilder::new("layer");
    b.set_origin("/layer");
    let shapes = [vec![24usize, 32], vec![32, 40], vec![40]];
    let [x, w, bias] =
        [0, 1, 2].map(|i| b.input(["x", "w", "b"][i], DType::F32, shapes[i].clone()));
    let y = b.matmul(x, w).unwrap();
    let y = b.map(ScalarOp::Add, &[y, bias]).unwrap();
    let y = b.map(ScalarOp::Relu, &[y]).unwrap();
    b.output("y", y);
    let inputs = shapes
        .iter()
        .map(|shape| random_tensor(&mut Rng(42), DType::F32, shape, false))
        .collect();
    (b.finish().unwrap(), inputs)
}

/// Compiles the layer, runs it and checks the result; gives what `look` sees.
fn run_layer<T>(setup: &Setup, look: impl FnOnce(&Lowered) -> T) -> T {
    let (graph, inputs) = layer();
    let compiled = setup.compile(&graph).unwrap();
    let executable = compiled.for_inputs(&inputs).unwrap();
    let found = executable.run(&inputs).unwrap().into_tensors();
    let c = allclose(
        &interp::run(&graph, &inputs).unwrap()[0],
        &found[0],
        0.0,
        0.0,
    );
    let most = if setup.options.precision == Precision::Tf32 {
        1.0 / 256.0
    } else {
        1e-5
    };
    assert!(c.scaled_err() < most, "{c}");
    look(&executable.lowered)
}

/// The library is taken where it was faster, with and without timing again, and shown; not without its time, and not against the user's will.
#[test]
fn a_library_that_is_faster_is_taken() {
    with_driver_of(
        "libraries",
        "a_library_that_is_faster_is_taken",
        "clock=threads,product=100",
        || {
            let dir = tempfile::tempdir().unwrap();
            run_layer(&tuned(Some(dir.path()), false, true), |l| {
                assert!(products(l).is_empty(), "it was not timed")
            });
            run_layer(&tuned(None, true, false), |l| {
                assert!(products(l).is_empty(), "nobody wants it")
            });
            for measures in [true, false] {
                run_layer(&tuned(Some(dir.path()), measures, true), |l| {
                    assert!(
                        products(l).len() == 1
                            && l.report.notes.is_empty()
                            && l.report.warnings.is_empty()
                    );
                    let shown = "f32[24, 32] x f32[32, 40] -> f32[24, 40], bias, relu, 0 bytes of workspace";
                    let text = |stage| l.text(stage, false).unwrap();
                    for (stage, expected) in [
                        (Stage::Schedule, format!(" by a library: {shown}")),
                        (
                            Stage::Cuda,
                            format!(
                                "tuned on emulated GPU 0, driver 13.0: cuBLASLt 13.0.0, {shown}"
                            ),
                        ),
                    ] {
                        assert!(
                            text(stage).contains(&expected),
                            "{expected}: {}",
                            text(stage)
                        );
                    }
                    let table = l.report.tuned_text();
                    assert!(
                        table.contains("100 us") && table.contains("  cuBLASLt 13.0.0  (/layer)"),
                        "{table}"
                    );
                });
            }
            run_layer(&tuned(Some(dir.path()), false, false), |l| {
                assert!(
                    products(l).is_empty() && l.report.notes.is_empty(),
                    "{:?}",
                    l.report.notes
                );
            });
            // In another precision it is another product.
            let tf32 = tuned(Some(dir.path()), true, true).with(|o| o.precision = Precision::Tf32);
            run_layer(&tf32, |l| {
                assert!(
                    l.text(Stage::Schedule, false)
                        .unwrap()
                        .contains(", tf32, bias")
                )
            });
            // Winners of a library that is not the one that is there now.
            let kept = std::fs::read_to_string(tune::path(dir.path())).unwrap();
            assert!(
                kept.contains("\"name\":\"cuBLASLt 13.0.0\",\"ns\":100000"),
                "{kept}"
            );
            std::fs::write(
                tune::path(dir.path()),
                kept.replace("cuBLASLt 13.0.0", "cuBLASLt 12.9.1"),
            )
            .unwrap();
            run_layer(&tuned(Some(dir.path()), false, true), |l| {
                let notes = l.report.notes.concat();
                assert!(
                    products(l).is_empty()
                        && notes.contains("it is cuBLASLt 13.0.0 that is there now"),
                    "{notes}"
                );
                assert!(l.report.text(1).contains(&notes));
            });
            run_layer(&tuned(Some(dir.path()), true, true), |l| {
                assert_eq!(products(l).len(), 1, "it is timed again")
            });
        },
    );
}

#[test]
fn a_library_that_is_slower_is_not_taken() {
    with_driver_of(
        "libraries",
        "a_library_that_is_slower_is_not_taken",
        "clock=threads,product=1000000000",
        || {
            let dir = tempfile::tempdir().unwrap();
            for measures in [true, false] {
                run_layer(&tuned(Some(dir.path()), measures, true), |l| {
                    assert!(products(l).is_empty())
                });
            }
            let kept = std::fs::read_to_string(tune::path(dir.path())).unwrap();
            assert!(
                kept.contains("\"library\":{\"name\":\"cuBLASLt 13.0.0\",\"ns\":1000000000000"),
                "{kept}"
            );
        },
    );
}

/// What a library computes wrongly is not kept, however fast it is.
fn check_wrong(setup: &Setup, expected: &str) {
    let dir = tempfile::tempdir().unwrap();
    let mut setup = setup.clone();
    setup.settings.tuning.folder = Some(dir.path().to_owned());
    run_layer(&setup, |l| {
        let [warning] = &l.report.warnings[..] else {
            panic!("{:?}", l.report.warnings)
        };
        assert!(
            products(l).is_empty()
                && warning.contains("in node \"/layer\"")
                && warning.contains(expected),
            "{warning}"
        );
    });
    let kept = std::fs::read_to_string(tune::path(dir.path())).unwrap();
    assert!(
        kept.contains("\"library\":{\"name\":\"cuBLASLt 13.0.0\",\"ns\":null"),
        "{kept}"
    );
}

#[test]
fn a_library_that_is_wrong_is_not_taken() {
    with_driver_of(
        "libraries",
        "a_library_that_is_wrong_is_not_taken",
        "clock=threads,product=100,wrong_product=sum",
        || {
            check_wrong(
                &tuned(None, true, true),
                "cuBLASLt 13.0.0: its result is wrong",
            );
        },
    );
}

#[test]
fn a_library_that_hides_what_is_no_number_is_not_taken() {
    let name = "a_library_that_hides_what_is_no_number_is_not_taken";
    with_driver_of(
        "libraries",
        name,
        "clock=threads,product=100,wrong_product=relu",
        || {
            check_wrong(
                &tuned(None, true, true),
                "cuBLASLt 13.0.0: an operand is not a number",
            );
        },
    );
}
