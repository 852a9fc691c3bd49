//! A compiled model with many callers and many shapes: what these share, and what each has.

use gristmill::ir::{Dim, Graph, GraphBuilder, Op, ReduceKind, ScalarOp};
use gristmill::testing::Rng;
use gristmill::testing::Setup;
use gristmill::{Compiled, DType, Tensor};

/// `relu(x w) + sum over columns of x`, for any number of rows.
fn layer() -> Graph {
    let mut b = GraphBuilder::new("layer");
    let x = b.input("x", DType::F32, [Dim::from("n"), 4.into()]);
    let w: Vec<f32> = (0..16).map(|i| (i % 5) as f32 - 2.0).collect();
    let w = b.constant(Tensor::from_slice(&w, &[4, 4]).unwrap());
    let product = b.matmul(x, w).unwrap();
    let product = b.map(ScalarOp::Relu, &[product]).unwrap();
    let sums = b.reduce(ReduceKind::Sum, x, &[1], true).unwrap();
    let shape = b.ty(x).shape.clone();
    let sums = b.broadcast(sums, shape.iter().cloned()).unwrap();
    let y = b.add_(product, sums).unwrap();
    b.output("y", y);
    b.finish().unwrap()
}

/// Adds the sum of `x` to a variable, and gives its new value.
fn total() -> Graph {
    let (container, name) = (String::new(), "total".to_owned());
    let mut b = GraphBuilder::new("total");
    let x = b.input("x", DType::F32, [Dim::from("n")]);
    let read = Op::ReadVariable {
        container: container.clone(),
        name: name.clone(),
        dtype: DType::F32,
        shape: Vec::new(),
        initial: None,
    };
    let last = b.add1(read, &[]).unwrap();
    let sum = b.reduce(ReduceKind::Sum, x, &[0], false).unwrap();
    let total = b.add_(last, sum).unwrap();
    let assign = Op::AssignVariable { container, name };
    let total = b.add1(assign, &[total]).unwrap();
    b.output("total", total);
    b.finish().unwrap()
}

fn compiled(graph: fn() -> Graph, n_threads: usize) -> Compiled {
    Setup::with_threads(n_threads).compile(&graph()).unwrap()
}

fn rows(n: usize, first: usize) -> Tensor {
    let values: Vec<f32> = (0..n * 4)
        .map(|i| ((first + i * 7) % 13) as f32 * 0.25 - 1.0)
        .collect();
    Tensor::from_slice(&values, &[n, 4]).unwrap()
}

/// What a model that has no other callers gives.
fn expected(n: usize, first: usize) -> Tensor {
    let alone = compiled(layer, 1);
    alone.run([("x", rows(n, first))]).unwrap()["y"].clone()
}

#[test]
fn callers_of_any_shapes_get_the_results_of_one_that_is_alone() {
    let mut rng = Rng(14);
    let mut sizes = vec![1, 200];
    sizes.extend((0..6).map(|_| 2 + rng.below(150)));
    let wanted: Vec<Tensor> = sizes.iter().map(|&n| expected(n, n)).collect();
    for n_threads in [1, 2, 4] {
        let model = compiled(layer, n_threads);
        std::thread::scope(|scope| {
            for caller in 0..6 {
                let (model, wanted, sizes) = (&model, &wanted, &sizes);
                scope.spawn(move || {
                    for run in 0..40 {
                        let which = (caller + run) % sizes.len();
                        let n = sizes[which];
                        let outputs = model.run([("x", rows(n, n))]).unwrap();
                        assert_eq!(outputs["y"], wanted[which], "{n_threads} threads, {n} rows");
                    }
                });
            }
        });
        assert_eq!(
            model.session().n_threads(),
            n_threads - 1,
            "whatever the shapes and callers"
        );
    }
}

#[test]
fn options_bound_the_runs_in_flight() {
    let in_flight = |max_in_flight| {
        let setup = Setup::with_threads(2).with(|o| o.max_in_flight = max_in_flight);
        let model = setup.compile(&layer()).unwrap();
        model.for_inputs(&[rows(2, 0)]).unwrap().max_in_flight()
    };
    assert_eq!(in_flight(Some(1)), 1);
    assert_eq!(in_flight(Some(7)), 7);
    let n_cores = std::thread::available_parallelism().unwrap().get();
    assert_eq!(in_flight(None), n_cores);
}

fn add_to_total(model: &Compiled, values: &[f32]) -> f32 {
    let x = Tensor::from_slice(values, &[values.len()]).unwrap();
    model.run([("x", x)]).unwrap()["total"].as_slice::<f32>()[0]
}

#[test]
fn all_shapes_have_one_state() {
    let model = compiled(total, 2);
    let zero = Tensor::from_slice(&[0f32], &[]).unwrap();
    model.resources().set("", "total", &zero).unwrap();
    assert_eq!(add_to_total(&model, &[1.0]), 1.0);
    assert_eq!(add_to_total(&model, &[2.0, 3.0]), 6.0);
    assert_eq!(add_to_total(&model, &[4.0]), 10.0);
    let total = model.resources().get("", "total").unwrap().unwrap();
    assert_eq!(total.as_slice::<f32>(), [10.0]);
    model.resources().set("", "total", &zero).unwrap();
    assert_eq!(add_to_total(&model, &[5.0, 5.0]), 10.0);
}

#[test]
fn models_of_a_session_share_their_state() {
    let setup = Setup::with_threads(1);
    let session = setup.session();
    let zero = Tensor::from_slice(&[0f32], &[]).unwrap();
    session.resources().set("", "total", &zero).unwrap();
    let models = [(); 2].map(|()| session.compile(&total(), &setup.options).unwrap());
    assert_eq!(add_to_total(&models[0], &[1.0]), 1.0);
    assert_eq!(add_to_total(&models[1], &[1.0, 1.0]), 3.0);
}

/// Sums of small integers are exact, so none may be missing.
#[test]
fn callers_of_any_shapes_lose_no_assignment() {
    let model = compiled(total, 2);
    let zero = Tensor::from_slice(&[0f32], &[]).unwrap();
    model.resources().set("", "total", &zero).unwrap();
    std::thread::scope(|scope| {
        for caller in 1..=4 {
            let model = &model;
            scope.spawn(move || {
                for _ in 0..50 {
                    add_to_total(model, &vec![1.0; caller]);
                }
            });
        }
    });
    let total = model.resources().get("", "total").unwrap().unwrap();
    assert_eq!(total.as_slice::<f32>(), [50.0 * (1 + 2 + 3 + 4) as f32]);
    assert_eq!(total.dtype(), DType::F32);
}
