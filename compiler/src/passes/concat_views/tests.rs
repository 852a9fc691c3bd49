//! Results of views of concatenations, and what is left of them.

use super::*;
use crate::interp::random::random_tensor;
use crate::interp::{self, compare::allclose};
use crate::ir::{Bindings, GraphBuilder, ScalarOp, Window};
use crate::options::Options;
use crate::passes::{clean, specialise};
use crate::rng::Rng;
use gristmill_runtime::{DType, Tensor};

fn count(g: &Graph, name: &str) -> usize {
    g.nodes().filter(|(_, n)| n.op.name() == name).count()
}

/// The graph after the pass, which gives the same results.
fn check(g: &Graph, sizes: &Bindings) -> Graph {
    let made = clean(&concat_views(g).unwrap()).unwrap();
    crate::ir::verify::verify(&made).unwrap_or_else(|e| panic!("{e}\n{g}\n{made}"));
    let mut rng = Rng(7);
    let g = specialise(g, sizes).unwrap();
    let tensor = |v: &ValueId| {
        let ty = g.ty(*v);
        random_tensor(&mut rng, ty.dtype, &ty.static_shape().unwrap(), false)
    };
    let inputs: Vec<Tensor> = g.inputs.iter().map(tensor).collect();
    let expected = interp::run(&g, &inputs).unwrap();
    let found = interp::run(&specialise(&made, sizes).unwrap(), &inputs).unwrap();
    let compiled = crate::compile(&g, &Options::default()).unwrap();
    let executable = compiled.for_inputs(&inputs).unwrap();
    let run = executable.run(&inputs).unwrap().into_tensors();
    for (i, expected) in expected.iter().enumerate() {
        for found in [&found[i], &run[i]] {
            let compared = allclose(expected, found, 1e-4, 1e-4);
            assert!(compared.ok, "{compared}\n{g}\n{made}");
        }
    }
    made
}

/// Channels last, `pieces` of channels joined and shuffled in `groups`.
fn shuffled(b: &mut GraphBuilder, lead: &[Dim], pieces: &[usize], groups: usize) -> ValueId {
    let n: usize = pieces.iter().sum();
    let part = |(i, &n): (usize, &usize)| {
        let shape = [lead, &[n.into()]].concat();
        b.input(&format!("x{i}"), DType::F32, shape)
    };
    let parts: Vec<ValueId> = pieces.iter().enumerate().map(part).collect();
    let y = b.concat(&parts, lead.len()).unwrap();
    let split = [lead, &[groups.into(), (n / groups).into()]].concat();
    let y = b.reshape(y, split).unwrap();
    let mut perm: Vec<usize> = (0..lead.len() + 2).collect();
    perm.swap(lead.len(), lead.len() + 1);
    let y = b.transpose(y, &perm).unwrap();
    b.reshape(y, [lead, &[n.into()]].concat()).unwrap()
}

fn part(b: &mut GraphBuilder, x: ValueId, start: usize, size: usize, step: i64) -> ValueId {
    let mut sizes = b.ty(x).shape.0.clone();
    let mut starts = vec![Dim::constant(0); sizes.len()];
    let mut steps = vec![1; sizes.len()];
    let last = sizes.len() - 1;
    (starts[last], sizes[last], steps[last]) = (start.into(), size.into(), step);
    let op = Op::Slice {
        starts,
        sizes,
        steps,
    };
    b.add1(op, &[x]).unwrap()
}

/// A convolution of one tap by constant weights.
fn conv(b: &mut GraphBuilder, x: ValueId, groups: usize, n_out: usize) -> ValueId {
    let n = b.ty(x).shape.0.last().unwrap().as_usize().unwrap();
    let w = random_tensor(&mut Rng(3), DType::F32, &[1, 1, n / groups, n_out], false);
    let w = b.constant(w);
    let window = Window {
        strides: vec![1; 2],
        dilations: vec![1; 2],
        pads_low: vec![0; 2],
        pads_high: vec![0; 2],
    };
    let op = Op::Conv {
        window,
        groups,
        layout: Layout::ChannelsLast,
    };
    b.add1(op, &[x, w]).unwrap()
}

fn image(batch: Dim) -> [Dim; 3] {
    [batch, 3.into(), 5.into()]
}

/// A unit of ShuffleNet: one half goes through, the other to a convolution.
fn unit(batch: Dim, pieces: &[usize], groups: usize, at: usize) -> Graph {
    let mut b = GraphBuilder::new("g");
    let n: usize = pieces.iter().sum();
    let y = shuffled(&mut b, &image(batch), pieces, groups);
    let (low, high) = (part(&mut b, y, 0, at, 1), part(&mut b, y, at, n - at, 1));
    let z = conv(&mut b, high, 1, 4);
    let joined = b.concat(&[low, z], 3).unwrap();
    b.output("y", joined);
    b.finish().unwrap()
}

#[test]
fn halves_of_a_shuffle_are_joined_from_the_operands() {
    for batch in [Dim::constant(2), Dim::symbol("n")] {
        let sizes = Bindings::from([("n".into(), 3)]);
        let made = check(&unit(batch, &[6, 6], 2, 6), &sizes);
        assert_eq!(count(&made, "transpose"), 0, "{made}");
        // Both halves, and what follows; weights are folded.
        assert_eq!(count(&made, "concat"), 3, "{made}");
        assert_eq!(count(&made, "slice"), 4, "{made}");
        assert_eq!(count(&made, "constant"), 1, "{made}");
    }
}

#[test]
fn pieces_that_groups_cut_stay() {
    let is_shuffled = |pieces: &[usize], groups, at| {
        let g = unit(Dim::constant(1), pieces, groups, at);
        let made = check(&g, &Bindings::new());
        let perm: &[usize] = &[0, 1, 2, 4, 3];
        let is_whole = |n: &Node| {
            matches!(&n.op, Op::Transpose { perm: p } if p == perm)
                && made.ty(n.outputs[0]).shape.n_elements().is(180)
        };
        made.nodes().any(|(_, n)| is_whole(n))
    };
    assert!(is_shuffled(&[5, 7], 2, 6));
    // The slices are of the shuffle, which is one copy.
    assert!(!is_shuffled(&[6, 6], 2, 5));
    assert!(!is_shuffled(&[8, 4], 3, 6), "a piece of two groups");
    assert!(!is_shuffled(&[4, 4, 4], 3, 3));
}

#[test]
fn a_whole_shuffle_is_one_copy_and_its_sums_permute_weights() {
    let graph = |groups: &[usize]| {
        let mut b = GraphBuilder::new("g");
        let y = shuffled(&mut b, &image(1.into()), &[6, 6], 2);
        for (i, &groups) in groups.iter().enumerate() {
            let z = conv(&mut b, y, groups, 12);
            b.output(&format!("y{i}"), z);
        }
        check(&b.finish().unwrap(), &Bindings::new())
    };
    for groups in [&[1, 12][..], &[4]] {
        let made = graph(groups);
        let n = (count(&made, "transpose"), count(&made, "reshape"));
        assert_eq!((n, count(&made, "concat")), ((0, 3), 1), "{made}");
    }
    let made = graph(&[1, 1]);
    assert_eq!((count(&made, "reshape"), count(&made, "concat")), (0, 1));
}

#[test]
fn a_concatenation_that_is_needed_itself_stays() {
    let mut b = GraphBuilder::new("g");
    let x = b.input("x", DType::F32, [2usize, 4]);
    let z = b.input("z", DType::F32, [2usize, 4]);
    let y = b.concat(&[x, z], 1).unwrap();
    let (p, q) = (part(&mut b, y, 1, 5, 1), part(&mut b, y, 3, 5, 1));
    let (p, q) = (
        b.map(ScalarOp::Exp, &[p]).unwrap(),
        b.map(ScalarOp::Neg, &[q]).unwrap(),
    );
    b.output("p", p);
    b.output("q", q);
    // Slices that overlap are more than the concatenation.
    assert_eq!(
        count(&check(&b.graph().clone(), &Bindings::new()), "concat"),
        1
    );
    b.output("y", y);
    assert_eq!(
        count(&check(&b.finish().unwrap(), &Bindings::new()), "concat"),
        1
    );
}

#[test]
fn slices_of_single_pieces_need_no_concatenation() {
    let mut b = GraphBuilder::new("g");
    let x = b.input("x", DType::F32, [Dim::symbol("n"), 4.into()]);
    let z = b.input("z", DType::F32, [Dim::symbol("n"), 3.into()]);
    let y = b.concat(&[x, z], 1).unwrap();
    for (i, (start, size, step)) in [(0, 4, 1), (1, 2, 1), (4, 3, 1)].into_iter().enumerate() {
        let p = part(&mut b, y, start, size, step);
        let p = b.map(ScalarOp::Exp, &[p]).unwrap();
        b.output(&format!("y{i}"), p);
    }
    let made = check(&b.graph().clone(), &Bindings::from([("n".into(), 3)]));
    assert_eq!(
        (count(&made, "concat"), count(&made, "slice")),
        (0, 1),
        "{made}"
    );
    // Steps through a joint, and backwards, are left alone.
    let p = part(&mut b, y, 6, 4, -2);
    b.output("p", p);
    let made = check(&b.finish().unwrap(), &Bindings::from([("n".into(), 3)]));
    assert_eq!(count(&made, "concat"), 1);
}

/// A view of `x` by a random op.
fn random_view(b: &mut GraphBuilder, rng: &mut Rng, x: ValueId) -> ValueId {
    let shape: Vec<usize> = b.ty(x).static_shape().unwrap();
    let rank = shape.len();
    match rng.below(4) {
        0 => {
            let mut perm: Vec<usize> = (0..rank).collect();
            perm.swap(rng.below(rank), rng.below(rank));
            b.transpose(x, &perm).unwrap()
        }
        1 if rank > 1 => {
            let at = rng.below(rank - 1);
            let merged = shape[at] * shape[at + 1];
            b.reshape(x, [&shape[..at], &[merged], &shape[at + 2..]].concat())
                .unwrap()
        }
        2 if rank < 5 => {
            let at = rng.below(rank);
            let n = rng.pick(&[1, 2, 3]);
            let n = if shape[at].is_multiple_of(n) { n } else { 1 };
            let pair = if rng.below(2) == 0 {
                [n, shape[at] / n]
            } else {
                [shape[at] / n, n]
            };
            b.reshape(x, [&shape[..at], &pair, &shape[at + 1..]].concat())
                .unwrap()
        }
        _ => random_slice(b, rng, x, &shape),
    }
}

fn random_slice(b: &mut GraphBuilder, rng: &mut Rng, x: ValueId, shape: &[usize]) -> ValueId {
    let at = rng.below(shape.len());
    let mut sizes = shape.to_vec();
    let mut starts = vec![0; shape.len()];
    let mut steps = vec![1; shape.len()];
    let halves = shape[at] / 2;
    (starts[at], sizes[at], steps[at]) = match rng.below(8) {
        0 => (shape[at].saturating_sub(1), shape[at], -1),
        1 => (0, rng.below(shape[at] + 1), 1),
        2 | 3 => (halves, shape[at] - halves, 1),
        _ => (0, halves, 1),
    };
    let dims = |v: Vec<usize>| v.into_iter().map(Dim::from).collect();
    let op = Op::Slice {
        starts: dims(starts),
        sizes: dims(sizes),
        steps,
    };
    b.add1(op, &[x]).unwrap()
}

/// Views of a concatenation, one of which may be a result.
fn random_graph(rng: &mut Rng) -> Graph {
    let mut b = GraphBuilder::new("g");
    let shape = [2, rng.pick(&[1, 3, 4]), rng.pick(&[2, 6])];
    let axis = rng.below(3);
    let parts: Vec<ValueId> = (0..1 + rng.below(3))
        .map(|i| {
            let mut shape = shape;
            shape[axis] = rng.pick(&[0, 1, 2, 2, 4, 4, 6]);
            b.input(&format!("x{i}"), DType::F32, shape)
        })
        .collect();
    let mut values = vec![b.concat(&parts, axis).unwrap()];
    for _ in 0..2 + rng.below(6) {
        let recent = values.len().saturating_sub(3);
        let x = values[recent + rng.below(values.len() - recent)];
        values.push(random_view(&mut b, rng, x));
    }
    for (i, &v) in values.iter().enumerate().skip(1) {
        if rng.below(3) == 0 || i + 1 == values.len() {
            let y = if rng.below(4) == 0 {
                v
            } else {
                b.map(ScalarOp::Neg, &[v]).unwrap()
            };
            b.output(&format!("y{i}"), y);
        }
    }
    b.finish().unwrap()
}

#[test]
fn random_views_give_the_same_results() {
    let mut rng = Rng(1);
    let mut n_changed = 0;
    for _ in 0..300 {
        let g = clean(&random_graph(&mut rng)).unwrap();
        let made = check(&g, &Bindings::new());
        n_changed += usize::from(count(&made, "concat") != count(&g, "concat"));
    }
    assert!(n_changed > 20, "{n_changed} graphs changed");
}
