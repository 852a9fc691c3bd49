//! Models of one session share weights, code, threads and variables, unless options keep them apart.

use crate::images::open;
use crate::lists;
use gristmill::dump::Stage;
use gristmill::ir::{Dim, Graph, GraphBuilder, ScalarOp};
use gristmill::onnx::proto::*;
use gristmill::place::Pin;
use gristmill::testing::{Rng, Setup, random_tensor};
use gristmill::train::{Init, Model, Objective, Sgd, Trainer, Training, loss};
use gristmill::{
    Compiled, DType, ErrorKind, Options, Session, Settings, TargetCpu, Tensor, compile, onnx,
};
use prost::Message;
use std::path::{Path, PathBuf};
use std::sync::Arc;

fn data(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("data")
        .join(file)
}

fn digits() -> onnx::Model {
    onnx::load(data("digits/model.onnx")).unwrap()
}

fn of_batch(n: usize) -> Options {
    Options {
        dims: [("batch".to_owned(), n)].into(),
        ..Options::default()
    }
}

fn images(n: usize) -> Tensor {
    random_tensor(&mut Rng(n as u64), DType::F32, &[n, 1, 8, 8], false)
}

fn probabilities(model: &Compiled, images: &Tensor) -> Tensor {
    model.run([("image", images.clone())]).unwrap()["probabilities"].clone()
}

fn code_bytes(model: &Compiled, images: &Tensor) -> usize {
    let executable = model.for_inputs(std::slice::from_ref(images)).unwrap();
    executable.lowered.report.code_bytes
}

#[test]
fn models_share_weights_and_code() {
    let setup = Setup::with_threads(2);
    let session = setup.session();
    let first = session.compile(&digits(), &of_batch(4)).unwrap();
    assert!(code_bytes(&first, &images(4)) > 0);
    // Another import of the file, for the same size: its kernels are those of the first one.
    let second = session.compile(&digits(), &of_batch(4)).unwrap();
    assert_eq!(code_bytes(&second, &images(4)), 0);
    let third = session.compile(&digits(), &of_batch(7)).unwrap();
    for (model, n) in [(&first, 4), (&second, 4), (&third, 7)] {
        let alone = setup.compile(&digits()).unwrap();
        assert_eq!(
            probabilities(model, &images(n)),
            probabilities(&alone, &images(n)),
            "batch {n}"
        );
    }
    assert_eq!(session.n_threads(), 1, "beside the caller's");
}

/// Code for one CPU never serves a model for another.
#[test]
fn targets_of_one_session_do_not_mix() {
    let session = Setup::with_threads(1).session();
    for name in ["x86-64-v2", "native", "x86-64-v2"] {
        let options = Options {
            target_cpu: TargetCpu::parse(name).unwrap(),
            ..of_batch(3)
        };
        let shared = session.compile(&digits(), &options).unwrap();
        let alone = compile(&digits(), &options).unwrap();
        let (shared, alone) = [&shared, &alone]
            .map(|model| probabilities(model, &images(3)))
            .into();
        assert_eq!(shared, alone, "{name}");
    }
}

/// Adds `x` to a variable, and gives the sum.
fn counter(name: &str, width: usize) -> Graph {
    let mut b = GraphBuilder::new(name);
    let x = b.input("x", DType::F32, [width]);
    let zero = Tensor::zeros(DType::F32, &[width]).unwrap();
    let total = b.variable("total", zero).unwrap();
    let sum = b.map(ScalarOp::Add, &[total, x]).unwrap();
    let sum = b.assign_variable("total", sum).unwrap();
    b.output("sum", sum);
    b.finish().unwrap()
}

fn add(model: &Compiled, value: f32) -> f32 {
    let n = model.inputs()[0].1.shape[0].as_usize().unwrap();
    let x = Tensor::from_slice(&vec![value; n], &[n]).unwrap();
    model.run([("x", x)]).unwrap()["sum"].as_slice::<f32>()[0]
}

fn in_container(name: &str) -> Options {
    Options {
        container: name.to_owned(),
        ..Options::default()
    }
}

#[test]
fn variables_are_shared_within_a_container() {
    let session = Session::new(&Settings::default()).unwrap();
    let own = Options::default();
    let [a, b] = ["a", "b"].map(|name| session.compile(&counter(name, 2), &own).unwrap());
    let apart = in_container("apart");
    let apart = session.compile(&counter("c", 2), &apart).unwrap();
    assert_eq!(
        [add(&a, 1.0), add(&b, 2.0), add(&apart, 4.0)],
        [1.0, 3.0, 4.0]
    );
    // Values outlive the models that assigned them.
    drop((a, b));
    let later = session.compile(&counter("d", 2), &own).unwrap();
    assert_eq!(add(&later, 8.0), 11.0);
    let names = session.resources().names();
    let names: Vec<(&str, &str)> = names.iter().map(|(c, n)| (&**c, &**n)).collect();
    assert_eq!(names, [("", "total"), ("apart", "total")]);
    session.resources().reset("");
    assert_eq!([add(&later, 1.0), add(&apart, 1.0)], [1.0, 5.0]);
}

/// Images have their variables in the model's container too.
#[test]
fn a_container_holds_ahead_of_time_as_well() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("counter.gmx");
    let (sizes, options) = (gristmill::aot::Sizes::new(), in_container("apart"));
    gristmill::aot::write(&counter("counter", 2), &options, &sizes, &file).unwrap();
    let image = open(&file).unwrap();
    let variables = &image.programs()[0].variables;
    let names = variables.iter().map(|v| (&*v.container, &*v.name));
    assert_eq!(names.collect::<Vec<_>>(), [("apart", "total")]);
}

#[test]
fn another_type_of_a_variable_is_refused() {
    let session = Session::new(&Settings::default()).unwrap();
    let first = session
        .compile(&counter("first", 2), &Options::default())
        .unwrap();
    let wider = counter("wider", 3);
    let error = session.compile(&wider, &Options::default()).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    insta::assert_snapshot!(error, @r#"variable "total" of "wider" is f32[3], but the session has it as f32[2] from "first" (try: Options::container keeps the variables of models apart)"#);
    assert_eq!(add(&first, 1.0), 1.0);
    // A model that cannot be compiled declares nothing.
    let pinned = Options {
        pins: vec![Pin::parse("/no/such/node=cpu:0").unwrap()],
        ..in_container("wide")
    };
    assert!(session.compile(&counter("failed", 5), &pinned).is_err());
    let apart = session.compile(&wider, &in_container("wide")).unwrap();
    assert_eq!(add(&apart, 2.0), 2.0);
}

/// `w x` for `x` of some elements, to be trained.
fn line_of(width: usize) -> impl Fn(&mut Model) -> gristmill::Result<Objective> {
    move |m| {
        let x = m.input("x", DType::F32, [Dim::from("batch"), width.into()]);
        let want = m.input("want", DType::F32, [Dim::from("batch"), 1.into()]);
        let y = m.scope("line", |m| {
            let w = m.variable("weights", &[width, 1], Init::Constant(0.0))?;
            m.builder().matmul(x, w)
        })?;
        let loss = loss::mean_squared_error(m.builder(), y, want)?;
        Ok(Objective::new(loss))
    }
}

/// `w x`, with a variable of the name that the trainer's model has.
fn line() -> Graph {
    let mut b = GraphBuilder::new("line");
    let x = b.input("x", DType::F32, [Dim::from("batch"), 1.into()]);
    let w = b.variable("line/weights", Tensor::zeros(DType::F32, &[1, 1]).unwrap());
    let y = b.matmul(x, w.unwrap()).unwrap();
    b.output("y", y);
    b.finish().unwrap()
}

fn column(values: &[f32]) -> Tensor {
    Tensor::from_slice(values, &[values.len(), 1]).unwrap()
}

#[test]
fn a_model_of_the_session_computes_with_trained_variables() {
    let session = Session::new(&Settings::default()).unwrap();
    let trainer = |container: &str| {
        let training = Training {
            seed: 1,
            options: in_container(container),
            ..Training::from(Sgd::default())
        };
        let trainer = Trainer::in_session(&session, "line", &training, line_of(1));
        trainer.unwrap()
    };
    let [first, second] = ["", "second"].map(trainer);
    let reader = session.compile(&line(), &Options::default()).unwrap();
    for _ in 0..3 {
        first
            .step([("x", column(&[1.0, 2.0])), ("want", column(&[3.0, 6.0]))])
            .unwrap();
    }
    let w = first.value("line/weights").unwrap().unwrap();
    let w = w.as_slice::<f32>()[0];
    assert!(w > 0.0);
    let read = reader.run([("x", column(&[1.0]))]).unwrap();
    assert_eq!(read["y"].as_slice::<f32>(), [w]);
    assert_eq!(
        [first.n_steps().unwrap(), second.n_steps().unwrap()],
        [3, 0]
    );
    assert_eq!(session.n_threads(), gristmill_runtime::cpu::n_cores() - 1);
}

#[test]
fn placements_are_logged_on_request() {
    let mut setup = Setup::on("cpu:2", 2);
    let silent = setup.session();
    let options = Options::default();
    silent.compile(&counter("silent", 2), &options).unwrap();
    assert_eq!(silent.placement_log(), "");
    setup.settings.log_device_placement = true;
    let session = setup.session();
    let mut b = GraphBuilder::new("placed");
    b.set_origin("/layer/exp");
    let x = b.input("x", DType::F32, [4usize]);
    let y = b
        .with_device("/cpu:1", |b| b.map(ScalarOp::Exp, &[x]))
        .unwrap();
    b.output("y", y);
    let graph = b.finish().unwrap();
    for _ in 0..2 {
        session.compile(&graph, &options).unwrap();
    }
    assert_eq!(
        session.placement_log(),
        "/layer/exp: (exp): /job:localhost/replica:0/task:0/device:CPU:1\n"
    );
}

/// A file of `x w`, where all elements of the large `w` are the same.
fn write_product(path: &Path, element: f32) {
    let w = TensorProto {
        name: "w".to_owned(),
        data_type: 1,
        dims: vec![256, 256],
        raw_data: element.to_le_bytes().repeat(256 * 256).into(),
        ..Default::default()
    };
    let graph = GraphProto {
        name: "product".to_owned(),
        node: vec![lists::node("MatMul", &["x", "w"], "y")],
        initializer: vec![w],
        input: vec![lists::info("x", lists::tensor(Some(&["1", "256"])))],
        output: vec![lists::info("y", TypeProto::default())],
        ..Default::default()
    };
    let standard = OperatorSetIdProto {
        domain: String::new(),
        version: 18,
    };
    let model = ModelProto {
        ir_version: 9,
        graph: Some(graph),
        opset_import: vec![standard],
        ..Default::default()
    };
    std::fs::write(path, model.encode_to_vec()).unwrap();
}

#[test]
fn weights_of_a_file_that_was_replaced_are_read_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    let session = Session::new(&Settings::default()).unwrap();
    let compiled = |element: f32| {
        write_product(&path, element);
        let model = onnx::load(&path).unwrap();
        session.compile(&model, &Options::default()).unwrap()
    };
    let sum = |model: &Compiled| {
        let x = Tensor::from_slice(&[1f32; 256], &[1, 256]).unwrap();
        model.run([("x", x)]).unwrap()["y"].as_slice::<f32>()[0]
    };
    let first = compiled(1.0);
    assert_eq!(sum(&first), 256.0);
    let one = session.held_bytes();
    let same = compiled(1.0);
    assert_eq!(sum(&same), 256.0);
    assert!(
        session.held_bytes() < one + one / 2,
        "weights are there twice"
    );
    let second = compiled(2.0);
    assert_eq!([sum(&second), sum(&first)], [512.0, 256.0]);
    let before = session.held_bytes();
    drop(second);
    assert!(
        session.held_bytes() + (256 << 10) <= before,
        "caches end with their model"
    );
}

#[test]
fn callers_of_several_models_do_not_disturb_each_other() {
    let session = Setup::with_threads(2).session();
    let options = Options::default();
    let models = [digits(), digits()].map(|m| session.compile(&m, &options).unwrap());
    let counter = session.compile(&counter("counter", 2), &options).unwrap();
    let expected: Vec<Tensor> = (1..9)
        .map(|n| probabilities(&compile(&digits(), &options).unwrap(), &images(n)))
        .collect();
    std::thread::scope(|scope| {
        for caller in 0..8 {
            let (models, counter, expected) = (&models, &counter, &expected);
            scope.spawn(move || {
                for run in 0..12 {
                    let n = 1 + (caller + run) % 8;
                    let found = probabilities(&models[run % 2], &images(n));
                    assert_eq!(found, expected[n - 1]);
                    add(counter, 1.0);
                }
            });
        }
    });
    assert_eq!(add(&counter, 0.0), 96.0);
    // The session ends with its last model.
    drop(session);
    let [first, second] = models;
    drop(first);
    assert_eq!(probabilities(&second, &images(3)), expected[2]);
}

/// Kernels on a host's pool: of one thread or several, from inside of it, and after its owner has let it go.
#[test]
fn runs_on_a_rayon_pool() {
    let options = Options::default();
    let expected = probabilities(&compile(&digits(), &options).unwrap(), &images(64));
    for n in [1, 2, 5] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(n).build();
        let pool = Arc::new(pool.unwrap());
        let session = Session::new(&Settings::rayon(&pool)).unwrap();
        let model = session.compile(&digits(), &options).unwrap();
        let run = || assert_eq!(probabilities(&model, &images(64)), expected, "{n} threads");
        run();
        pool.install(run);
        pool.scope(|scope| (0..8).for_each(|_| scope.spawn(|_| run())));
        assert_eq!(session.n_threads(), 0);
        drop(pool);
        run();
    }
}

/// Text, code and bytes do not depend on the number of threads of compilation.
#[test]
fn any_number_of_threads_compiles_the_same() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["bert_dynamo", "unet_dynamo", "mobilenet_script"] {
        let model = onnx::load(data("models").join(name).join("model.onnx")).unwrap();
        let of = |n_threads: usize| {
            let file = folder.path().join("model.gmx");
            let setup = Setup::with_threads(n_threads);
            let (session, sizes) = (setup.session(), gristmill::aot::Sizes::new());
            let written = session.write_image(&model, &setup.options, &sizes, &file);
            written.unwrap();
            let text = |stage| session.text(&model, &setup.options, stage).unwrap();
            (
                std::fs::read(&file).unwrap(),
                [Stage::Clif, Stage::Asm].map(text),
            )
        };
        let one = of(1);
        for n in [2, 5] {
            assert!(of(n) == one, "{name} on {n} threads");
        }
    }
}

#[test]
fn a_session_needs_a_device_and_a_number_for_each_gpu() {
    let mut none = Settings::default();
    none.devices.devices.clear();
    let mut short = Setup::on("gpu:2", 1).settings;
    short.gpus = vec![0];
    let errors = [none, short].map(|s| Session::new(&s).err().unwrap().to_string());
    insta::assert_snapshot!(errors.join("\n"), @r"
    a session needs a device (try: DeviceSet::default())
    /device:GPU:1 is not among the 1 visible GPUs, [0] (try: --visible-gpus with one number for each; a number may be there more than once)
    ");
}
