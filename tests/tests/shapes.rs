//! Models with symbolic dims: kernels are fused once, for all shapes.

use super::multi_device::setup;
use gristmill::interp::{self, compare::allclose};
use gristmill::ir::{Bindings, Dim, Graph, GraphBuilder, Op, ScalarOp};
use gristmill::pipeline::Scope;
use gristmill::testing::{
    RandomOptions, Rng, nvrtc_or_left_out, random_graph, random_indices, random_tensor, specialise,
    with_symbols,
};
use gristmill::{Compiled, DType, Tensor};

/// Extents that become symbols.
const SYMBOLS: [(usize, &str); 2] = [(23, "a"), (29, "b")];

/// A random graph with symbols, and the inputs that the same graph without them has.
fn symbolic_graph(seed: u64) -> Option<(Graph, Vec<Tensor>)> {
    let sizes = RandomOptions {
        n_nodes: 3 + seed as usize % 16,
        large_extents: SYMBOLS.map(|(n, _)| n).to_vec(),
        ..RandomOptions::default()
    };
    let (graph, inputs) = random_graph(seed, &sizes);
    let symbolic = with_symbols(&graph, &SYMBOLS).ok()?;
    let is_used = !symbolic.symbols().is_empty() && !symbolic.outputs.is_empty();
    is_used.then_some((symbolic, inputs))
}

/// Inputs of other shapes: random floats; integers, which may be indices, of the given inputs.
fn resized(bound: &Graph, inputs: &[Tensor], rng: &mut Rng) -> Vec<Tensor> {
    let typed = bound.inputs.iter().map(|&v| bound.ty(v));
    let resized = typed.zip(inputs).map(|(ty, given)| {
        let shape = ty.static_shape().expect("all symbols are bound");
        if ty.dtype.is_float() {
            return random_tensor(rng, ty.dtype, &shape, false);
        }
        let (size, n) = (ty.dtype.size_bytes(), shape.iter().product());
        let elements: Vec<&[u8]> = given.as_bytes().chunks(size).collect();
        let bytes: Vec<u8> = elements
            .iter()
            .cycle()
            .take(n)
            .copied()
            .flatten()
            .copied()
            .collect();
        Tensor::from_bytes(ty.dtype, &shape, &bytes).expect("as many bytes as elements")
    });
    resized.collect()
}

/// One run of a model, and the shapes that its kernels were chosen for.
fn run(model: &Compiled, inputs: &[Tensor]) -> gristmill::Result<(Vec<Tensor>, Scope)> {
    let named = model.inputs().iter().map(|(name, _)| name.clone());
    let inputs = model.bind(named.zip(inputs.iter().cloned()))?;
    let executable = model.for_inputs(&inputs)?;
    let scope = executable.lowered.report.scope;
    Ok((executable.run(&inputs)?.into_tensors(), scope))
}

/// Runs a graph for some sizes; gives how many runs there were, and how many of them had the kernels of all shapes.
fn check_sizes(seed: u64, devices: &str, opt_level: u8, n_sizes: usize) -> [usize; 2] {
    let Some((graph, inputs)) = symbolic_graph(seed) else {
        return [0, 0];
    };
    let mut rng = Rng(seed);
    let model = setup(devices, opt_level).compile(&graph).unwrap();
    let mut counts = [0, 0];
    let mut sizes = SYMBOLS.map(|(_, symbol)| (symbol.to_owned(), 1));
    for i in 0..n_sizes {
        // All change, or one does, as where a cache grows.
        let changing = match i {
            0 => 0..0,
            _ if i % 2 == 1 => 0..SYMBOLS.len(),
            _ => rng.below(SYMBOLS.len())..SYMBOLS.len(),
        };
        for (_, size) in &mut sizes[changing] {
            *size = 1 + rng.below(40);
        }
        let sizes = Bindings::from(sizes.clone());
        let what = format!("seed {seed}, level {opt_level} on {devices}, {sizes:?}\n{graph}");
        // Where a part of an axis is cut out or an axis is split, not all sizes fit.
        let Ok(bound) = specialise(&graph, &sizes) else {
            continue;
        };
        let inputs = resized(&bound, &inputs, &mut rng);
        let found = run(&model, &inputs);
        // An index that other sizes leave outside may be of a value that nothing uses.
        let Ok(expected) = interp::run(&bound, &inputs) else {
            continue;
        };
        let (found, scope) = found.unwrap_or_else(|e| panic!("{e}\n{what}"));
        for (e, f) in expected.iter().zip(&found) {
            let c = allclose(e, f, 0.0, 0.0);
            assert!(c.ok || c.scaled_err() <= 1e-4, "{c}\n{what}");
        }
        counts = [
            counts[0] + 1,
            counts[1] + usize::from(scope != Scope::Alone),
        ];
    }
    counts
}

#[test]
fn random_graphs_of_random_sizes() {
    let mut total = [0, 0];
    for seed in 0..150 {
        let counts = check_sizes(seed, "cpu:1", [2, 0, 1, 3][seed as usize % 4], 5);
        total = [total[0] + counts[0], total[1] + counts[1]];
    }
    let [n_runs, n_shared] = total;
    assert!(n_runs > 150, "{n_runs} runs");
    assert!(
        n_shared * 10 >= n_runs * 9,
        "{n_shared} of {n_runs} runs have shared kernels"
    );
}

#[test]
fn random_graphs_of_random_sizes_on_emulated_gpus() {
    if nvrtc_or_left_out("random graphs of random sizes on emulated GPUs").is_none() {
        return;
    }
    for (seed, devices) in (200..224).zip(["emu:1", "cpu:1,emu:1"].into_iter().cycle()) {
        check_sizes(seed, devices, 2, 2);
    }
}

/// Rows of a table, weighted: the gathering loops and the products' epilogues depend on sizes.
fn weighted_rows() -> Graph {
    let mut b = GraphBuilder::new("weighted rows");
    let table = b.input("table", DType::F32, [Dim::from("rows"), 24.into()]);
    let at = b.input("at", DType::I64, [Dim::from("n")]);
    let rows = b.add1(Op::Gather { axis: 0 }, &[table, at]).unwrap();
    let turned = b.transpose(rows, &[1, 0]).unwrap();
    let sums = b.add1(cum_sum(), &[turned]).unwrap();
    let y = b.map(ScalarOp::Tanh, &[sums]).unwrap();
    b.output("y", y);
    b.finish().unwrap()
}

fn cum_sum() -> Op {
    Op::CumSum {
        axis: 1,
        exclusive: false,
        reverse: false,
    }
}

#[test]
fn code_is_generated_for_the_first_shapes_only() {
    let graph = weighted_rows();
    let model = setup("cpu:1", 2).compile(&graph).unwrap();
    let mut rng = Rng(7);
    let mut code_bytes = Vec::new();
    for (n_rows, n) in [(23, 12), (31, 17), (40, 9), (57, 100), (11, 30)] {
        let table = random_tensor(&mut rng, DType::F32, &[n_rows, 24], false);
        let at = random_indices(&mut rng, DType::I64, &[n], n_rows);
        let inputs = [table, at];
        let executable = model.for_inputs(&inputs).unwrap();
        code_bytes.push(executable.lowered.report.code_bytes);
        let sizes = Bindings::from([("rows".to_owned(), n_rows), ("n".to_owned(), n)]);
        let expected = interp::run(&specialise(&graph, &sizes).unwrap(), &inputs).unwrap();
        let found = executable.run(&inputs).unwrap().into_tensors();
        let c = allclose(&expected[0], &found[0], 1e-5, 1e-5);
        assert!(c.ok, "{n} of {n_rows} rows: {c}");
    }
    assert!(
        code_bytes[0] > 0,
        "the first shapes have constants in their code"
    );
    assert!(code_bytes[1] > 0, "code that reads what differed");
    assert_eq!(code_bytes[2..], [0, 0, 0], "{code_bytes:?}");
}

/// Layers that differ in weights and in a factor, each a product between maps over all rows.
fn layers(factors: &[f32]) -> Graph {
    let mut rng = Rng(11);
    let mut b = GraphBuilder::new("layers");
    let mut x = b.input("x", DType::F32, [Dim::from("rows"), 48.into()]);
    for &factor in factors {
        let weight = b.constant(random_tensor(&mut rng, DType::F32, &[48, 48], false));
        let bias = b.constant(random_tensor(&mut rng, DType::F32, &[48], false));
        let factor = b.constant(Tensor::scalar(factor));
        let product = b.matmul(x, weight).unwrap();
        let sum = b.map(ScalarOp::Add, &[product, bias]).unwrap();
        let bent = b.map(ScalarOp::Tanh, &[sum]).unwrap();
        let scaled = b.map(ScalarOp::Mul, &[bent, factor]).unwrap();
        let softmax = Op::Softmax {
            axis: 1,
            log: false,
        };
        x = b.add1(softmax, &[scaled]).unwrap();
    }
    b.output("y", x);
    b.finish().unwrap()
}

#[test]
fn layers_that_are_alike_keep_their_weights() {
    let mut rng = Rng(5);
    for factors in [[1.5, 1.5, 1.5, 1.5], [0.5, 2.0, 3.0, 5.0]] {
        let graph = layers(&factors);
        for devices in ["cpu:1", "cpu:2"] {
            let model = setup(devices, 2).compile(&graph).unwrap();
            for n_rows in [16, 5, 64, 33, 1, 200, 64, 0, 7] {
                let inputs = [random_tensor(&mut rng, DType::F32, &[n_rows, 48], false)];
                let (found, scope) = run(&model, &inputs).unwrap();
                let expected = interp::run(&graph, &inputs).unwrap();
                let c = allclose(&expected[0], &found[0], 1e-5, 1e-5);
                assert!(
                    c.ok && scope != Scope::Alone,
                    "{n_rows} rows on {devices}: {c}"
                );
            }
        }
    }
}

#[test]
fn sizes_that_contradict_a_rule_are_errors() {
    let mut b = GraphBuilder::new("cut");
    let x = b.input("x", DType::F32, [Dim::from("n")]);
    let cut = b.slice_axis(x, 0, 4, 8).unwrap();
    let y = b.map(ScalarOp::Tanh, &[cut]).unwrap();
    b.output("y", y);
    let graph = b.finish().unwrap();
    let model = setup("cpu:1", 2).compile(&graph).unwrap();
    for (n, fits) in [
        (20, true),
        (12, true),
        (15, true),
        (11, false),
        (3, false),
        (40, true),
    ] {
        let inputs = [random_tensor(&mut Rng(n as u64), DType::F32, &[n], false)];
        let found = run(&model, &inputs);
        assert_eq!(found.is_ok(), fits, "{n} elements: {:?}", found.err());
    }
}

/// Products of `n` rows of two weights, which agree in their first `n_equal` rows.
fn cut_weights(n_equal: usize) -> Graph {
    let mut b = GraphBuilder::new("cut weights");
    for i in 0..2 {
        let x = b.input(&format!("x{i}"), DType::F32, [4.into(), Dim::from("n")]);
        let mut rng = Rng(3);
        let mut values = random_tensor(&mut rng, DType::F32, &[48, 24], false)
            .as_slice::<f32>()
            .to_vec();
        for v in &mut values[n_equal * 24..] {
            *v += i as f32;
        }
        let weight = b.constant(Tensor::from_slice(&values, &[48, 24]).unwrap());
        let rows = b.slice_axis(weight, 0, 0, Dim::from("n")).unwrap();
        let y = b.matmul(x, rows).unwrap();
        b.output(&format!("y{i}"), y);
    }
    b.finish().unwrap()
}

/// Runs one compiled graph at sizes that grow, shrink, repeat and vanish; each result equals that of
/// a fresh compilation to the bit. Gives how many runs had each scope.
fn check_orders(
    graph: &Graph,
    devices: &str,
    sizes: &[usize],
    inputs: &dyn Fn(usize) -> Vec<Tensor>,
) -> [usize; 3] {
    let model = setup(devices, 2).compile(graph).unwrap();
    let mut scopes = [0; 3];
    for &n in sizes {
        let inputs = inputs(n);
        let (found, scope) = run(&model, &inputs).unwrap();
        let fresh = setup(devices, 2).compile(graph).unwrap();
        let (expected, _) = run(&fresh, &inputs).unwrap();
        for (e, f) in expected.iter().zip(&found) {
            let same = e.shape() == f.shape() && e.as_bytes() == f.as_bytes();
            assert!(
                same,
                "{n} on {devices} after other sizes: {f} instead of {e}\n{graph}"
            );
        }
        scopes[scope as usize] += 1;
    }
    scopes
}

const ORDER: [usize; 14] = [4, 2, 5, 48, 48, 1, 0, 7, 16, 3, 17, 47, 2, 5];

#[test]
fn weights_that_agree_in_part_are_told_apart_at_every_size() {
    let inputs = |n: usize| -> Vec<Tensor> {
        let mut rng = Rng(n as u64);
        (0..2)
            .map(|_| random_tensor(&mut rng, DType::F32, &[4, n], false))
            .collect()
    };
    for n_equal in [0, 1, 2, 4, 16, 48] {
        let graph = cut_weights(n_equal);
        let [_, _, n_resized] = check_orders(&graph, "cpu:1", &ORDER, &inputs);
        assert_eq!(n_resized, ORDER.len() - 1, "all but the first");
        check_orders(&graph, "cpu:2", &ORDER, &inputs);
    }
    if nvrtc_or_left_out("weights that agree in part, on an emulated GPU").is_some() {
        check_orders(&cut_weights(4), "emu:1", &ORDER[..6], &inputs);
    }
}

#[test]
fn alike_layers_are_the_same_in_every_order_of_sizes() {
    let inputs = |n: usize| {
        vec![random_tensor(
            &mut Rng(n as u64),
            DType::F32,
            &[n, 48],
            false,
        )]
    };
    for devices in ["cpu:1", "cpu:2"] {
        check_orders(&layers(&[1.5, 1.5, 0.5, 1.5]), devices, &ORDER, &inputs);
    }
}
