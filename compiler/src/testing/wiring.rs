//! Random graphs whose structure matters, not their values: variables, control edges, shared and repeated outputs.

use super::Rng;
use crate::ir::{Dim, Graph, NodeId, Op, Origin, ScalarOp, Type, ValueId};
use crate::{DType, Tensor};

/// A random graph of about `n_nodes` nodes over `f32` vectors of up to a few hundred elements, empty ones among them: element-wise ops,
/// joins, slices, nodes with two results, constants, variables, control edges; inputs and constants that are outputs, and outputs named twice.
pub fn random_wiring(rng: &mut Rng, n_nodes: usize) -> Graph {
    let mut g = Graph::new("random");
    let mut values: Vec<ValueId> = Vec::new();
    for i in 0..1 + rng.below(3) {
        values.push(g.add_input(&format!("in{i}"), Type::new(DType::F32, [rng.below(200)])));
    }
    for i in 0..n_nodes {
        let origin = Origin::new(&format!("/layer/{i}"));
        let new = random_node(rng, &mut g, &values, &origin);
        let last = NodeId(g.n_nodes() as u32 - 1);
        if last.0 > 0 && rng.one_in(12) {
            let earlier = NodeId(rng.below(last.0 as usize) as u32);
            g.node_mut(last).control.push(earlier);
        }
        values.extend(new);
    }
    let mut outputs: Vec<ValueId> = (0..1 + rng.below(3))
        .map(|_| values[rng.below(values.len())])
        .collect();
    outputs.push(*values.last().expect("an input at least"));
    if rng.one_in(3) {
        outputs.push(outputs[0]);
    }
    outputs
        .iter()
        .enumerate()
        .for_each(|(i, &v)| g.add_output(&format!("out{i}"), v));
    crate::ir::verify::verify(&g).expect("random graphs are well formed");
    g
}

fn random_node(rng: &mut Rng, g: &mut Graph, values: &[ValueId], origin: &Origin) -> Vec<ValueId> {
    let first = values.len().saturating_sub(1 + rng.below(8));
    let (a, b) = (pick(rng, values, first), pick(rng, values, first));
    let n = g.ty(a).static_shape().expect("all shapes are static")[0];
    let (op, operands): (Op, Vec<ValueId>) = match rng.below(10) {
        0 => {
            let zeros = Tensor::zeros(DType::F32, &[rng.below(100)]).expect("small");
            return vec![g.add_constant(zeros, origin)];
        }
        1 | 2 if n < 500 => (Op::Concat { axis: 0 }, vec![a, b]),
        3 | 4 if n > 1 => (slice(rng, n), vec![a]),
        5 if n > 0 => {
            let values = g.add(top_k(rng, n), &[a], origin).expect("k fits");
            return vec![values[0]];
        }
        6 if rng.one_in(3) => (read_variable(), vec![]),
        7 if n == 8 || rng.one_in(8) => (assign_variable(n), vec![a]),
        8 => (Op::Map(ScalarOp::Add), vec![a, a]),
        _ => (Op::Map(ScalarOp::Neg), vec![a]),
    };
    g.add(op, &operands, origin)
        .expect("operands were chosen to fit")
}

/// A value, more often one from `first` on, so that graphs are neither chains nor flat.
fn pick(rng: &mut Rng, values: &[ValueId], first: usize) -> ValueId {
    if rng.one_in(4) {
        values[rng.below(values.len())]
    } else {
        values[first + rng.below(values.len() - first)]
    }
}

fn slice(rng: &mut Rng, n: usize) -> Op {
    let size = 1 + rng.below(n - 1);
    let start = rng.below(n - size + 1);
    Op::Slice {
        starts: vec![start.into()],
        sizes: vec![size.into()],
        steps: vec![1],
    }
}

fn top_k(rng: &mut Rng, n: usize) -> Op {
    Op::TopK {
        k: Dim::from(1 + rng.below(n)),
        axis: 0,
        largest: true,
    }
}

fn read_variable() -> Op {
    Op::ReadVariable {
        container: String::new(),
        name: "v".into(),
        dtype: DType::F32,
        shape: vec![8.into()],
        initial: None,
    }
}

fn assign_variable(n: usize) -> Op {
    Op::AssignVariable {
        container: String::new(),
        name: format!("v{n}"),
    }
}
