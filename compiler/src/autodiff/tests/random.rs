//! Gradients of random graphs, by differences and compiled. `GRISTMILL_RANDOM_GRAPHS=2000` tries so many instead of 60.

use super::{compare_compiled, difference};
use crate::autodiff::{GradOptions, grad};
use crate::interp::run;
use crate::ir::{Graph, Op, Origin, ReduceKind, ScalarOp, ValueId};
use crate::testing::{RandomOptions, Rng, random_graph};
use gristmill_runtime::{DType, Tensor};

/// Elements of inputs whose derivative is compared, for each graph.
const N_ELEMENTS: usize = 12;

/// Appends the sum of the sines of all results that are floats; `None` if there are none.
fn add_loss(g: &mut Graph) -> Option<ValueId> {
    let origin = Origin::new("/loss");
    let outputs: Vec<ValueId> = g.outputs.drain(..).map(|o| o.value).collect();
    let mut loss = None;
    for v in outputs
        .into_iter()
        .filter(|&v| g.ty(v).dtype.is_float())
        .collect::<Vec<_>>()
    {
        let mut add = |op: Op, inputs: &[ValueId]| g.add1(op, inputs, &origin).unwrap();
        let sine = add(Op::Map(ScalarOp::Sin), &[v]);
        let sum = Op::Reduce {
            kind: ReduceKind::Sum,
            axes: (0..g.ty(sine).rank()).collect(),
            keepdims: false,
        };
        let mut add = |op: Op, inputs: &[ValueId]| g.add1(op, inputs, &origin).unwrap();
        let sum = add(sum, &[sine]);
        loss = Some(match loss {
            Some(loss) => add(Op::Map(ScalarOp::Add), &[loss, sum]),
            None => sum,
        });
    }
    g.add_output("loss", loss?);
    loss
}

/// A random graph with a loss and the gradients of its inputs; `None` for one that has none.
fn training_graph(seed: u64, dtype: DType) -> Option<(Graph, Graph, Vec<Tensor>)> {
    let options = RandomOptions {
        n_nodes: 4 + seed as usize % 10,
        dtypes: vec![dtype],
        first_parts: seed.is_multiple_of(2),
        ..RandomOptions::default()
    };
    let (mut graph, inputs) = random_graph(seed, &options);
    let loss = add_loss(&mut graph)?;
    let floats = graph.inputs.iter().copied();
    let floats: Vec<ValueId> = floats.filter(|&v| graph.ty(v).dtype.is_float()).collect();
    let options = GradOptions {
        allow_unused: true,
        ..GradOptions::default()
    };
    match grad(&graph, loss, &floats, &options) {
        Ok(differentiated) => Some((graph, differentiated, inputs)),
        // An op on the way may have no rule.
        Err(e) if e.is_refusal() => None,
        Err(e) => panic!("seed {seed}: {e}\n{graph}"),
    }
}

/// Derivatives by differences of two steps, where they agree: a kink lies between the points otherwise.
fn smooth_difference(graph: &Graph, inputs: &[Tensor], input: usize, at: usize) -> Option<f64> {
    let [near, far] = [1.0, 4.0].map(|scale| difference(graph, inputs, input, at, scale));
    let is_smooth = (near - far).abs() <= 1e-5 * near.abs().max(1.0);
    is_smooth.then_some(near)
}

/// Compares some derivatives; gives how many.
fn check_differences(seed: u64, graph: &Graph, gradients: &[Tensor], inputs: &[Tensor]) -> usize {
    let mut rng = Rng(seed);
    let floats = (0..inputs.len()).filter(|&i| inputs[i].dtype().is_float());
    let floats: Vec<usize> = floats.filter(|&i| !inputs[i].is_empty()).collect();
    let mut n = 0;
    for _ in 0..N_ELEMENTS * usize::from(!floats.is_empty()) {
        let which = rng.below(floats.len());
        let input = floats[which];
        let at = rng.below(inputs[input].len());
        let all = (0..inputs.len()).filter(|&i| inputs[i].dtype().is_float());
        let number = all.take_while(|&i| i != input).count();
        let found = gradients[number].to_f64s()[at];
        if let Some(expected) = smooth_difference(graph, inputs, input, at) {
            let is_near = (found - expected).abs() <= 1e-4 * expected.abs().max(1.0);
            assert!(
                is_near,
                "seed {seed}: input {input}, element {at}: found {found}, expected {expected}\n{graph}"
            );
            n += 1;
        }
    }
    n
}

#[test]
fn random_graphs_have_the_gradients_of_differences() {
    let asked = std::env::var("GRISTMILL_RANDOM_GRAPHS").ok();
    let n_graphs = asked.map_or(60, |n| n.parse::<u64>().expect("a number of graphs"));
    let mut n_compared = 0;
    for seed in 0..n_graphs {
        if let Some((graph, differentiated, inputs)) = training_graph(seed, DType::F64) {
            let results = run(&differentiated, &inputs).unwrap();
            n_compared += check_differences(seed, &graph, &results[1..], &inputs);
            let compiled = compare_compiled(&differentiated, &inputs);
            compiled.unwrap_or_else(|e| panic!("seed {seed}: {e}\n{differentiated}"));
        }
        // Sizes in `f32` are rounded to blocks of memory in other ways.
        if let Some((_, differentiated, inputs)) = training_graph(seed, DType::F32) {
            let options = crate::Options::default();
            let compiled = crate::compile(&differentiated, &options).unwrap();
            let ran = compiled.run_ordered(&inputs);
            ran.unwrap_or_else(|e| panic!("seed {seed}: {e}\n{differentiated}"));
        }
    }
    assert!(n_compared as u64 > 3 * n_graphs, "{n_compared} derivatives");
}
