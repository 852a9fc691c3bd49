//! A pull, a worker's part and a push, one after the other, are the whole step.

use super::{PushPull, push_pull};
use crate::Tensor;
use crate::interp::{self, Store, compare::allclose};
use crate::ir::verify::verify;
use crate::ir::{Graph, Op, Origin, ReduceKind};
use crate::passes::Rebuild;
use crate::testing::{RandomOptions, random_graph};
use std::collections::BTreeMap;

type Values = BTreeMap<String, Tensor>;

/// The outputs of a graph for inputs by name.
fn outputs(g: &Graph, given: &Values, store: &mut Store) -> Values {
    let inputs: Vec<Tensor> = g.input_names.iter().map(|n| given[n].clone()).collect();
    let values = interp::run_with_state(g, &inputs, store).unwrap();
    let names = g.outputs.iter().map(|o| o.name.clone());
    names.zip(values).collect()
}

fn in_parts(parts: &PushPull, inputs: &Values, store: &mut Store) -> Values {
    let mut given = inputs.clone();
    for g in [&parts.pull, &parts.compute, &parts.push] {
        given.extend(outputs(g, &given, store));
    }
    given
}

/// The graph with a sum over no axes behind each input of numbers: a worker makes it, and may pass it on.
fn with_sums(g: &Graph) -> Graph {
    let mut r = Rebuild::new(g);
    for &v in &g.inputs {
        let sum = Op::Reduce {
            kind: ReduceKind::Sum,
            axes: Vec::new(),
            keepdims: false,
        };
        if let Ok(sum) = r.graph.add1(sum, &[r.get(v)], &Origin::default()) {
            r.set(v, sum);
        }
    }
    for (id, node) in g.nodes() {
        r.copy(id, node).unwrap();
    }
    for o in &g.outputs {
        let value = r.get(o.value);
        r.graph.add_output(&o.name, value);
    }
    r.graph
}

#[test]
fn the_parts_of_a_step_are_the_step() {
    let (mut n_cut, mut n_passed, mut n_refused) = (0, 0, 0);
    for seed in 0..4000 {
        let options = RandomOptions {
            n_nodes: 6 + seed as usize % 9,
            n_variables: 1 + seed as usize % 3,
            initial_values: true,
            ..RandomOptions::default()
        };
        let (g, inputs) = random_graph(seed, &options);
        let g = with_sums(&g);
        let Ok(parts) = push_pull(&g, &[]) else {
            n_refused += 1;
            continue;
        };
        for part in [&parts.pull, &parts.compute, &parts.push] {
            verify(part).unwrap();
        }
        assert!(!parts.compute.has_state(), "seed {seed}");
        n_cut += usize::from(parts.push.n_nodes() > 0);
        n_passed += parts.push.inputs.len();
        let inputs: Values = g.input_names.iter().cloned().zip(inputs).collect();
        let (mut one, mut own) = (Store::new(), Store::new());
        for run in 0..3 {
            let expected = outputs(&g, &inputs, &mut one);
            let found = in_parts(&parts, &inputs, &mut own);
            for (name, e) in &expected {
                let c = allclose(e, &found[name], 1e-6, 1e-6);
                assert!(c.ok, "seed {seed}, run {run}, output {name}: {c}\n{g}");
            }
        }
    }
    assert!(
        n_cut > 300 && n_passed > 200,
        "{n_cut} {n_passed} {n_refused}"
    );
}
