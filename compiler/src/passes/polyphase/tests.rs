//! Results of decomposed convolutions against those of the interpreter for the whole op.

use super::*;
use crate::interp::random::random_tensor;
use crate::interp::{self, compare::allclose};
use crate::ir::{Bindings, GraphBuilder};
use crate::options::Options;
use crate::passes::{clean, specialise};
use crate::rng::Rng;

/// One transposed convolution.
struct Case {
    op: Op,
    x: Vec<usize>,
    w: Vec<usize>,
}

impl Case {
    /// Of one to three axes; every third one has groups.
    fn random(rng: &mut Rng) -> Case {
        let n = 1 + rng.below(3);
        let groups = rng.pick(&[1, 1, 1, 2, 4]);
        let mut each = |least: usize, spread: usize| -> Vec<usize> {
            (0..n).map(|_| least + rng.below(spread)).collect()
        };
        let (strides, size) = (each(1, 4), each(1, 6));
        let window = Window {
            strides,
            dilations: vec![1; n],
            pads_low: each(0, 3),
            pads_high: each(0, 3),
        };
        let (output_pads, spatial) = (each(0, 3), each(1, 6));
        let (channels, out) = (4 * (1 + rng.below(2)), 1 + rng.below(3));
        Case {
            op: Op::ConvTranspose {
                window,
                output_pads,
                groups,
            },
            x: [&[1 + rng.below(2), channels], &spatial[..]].concat(),
            w: [&[channels, out], &size[..]].concat(),
        }
    }

    /// Of stride `stride`, size `size` and pads `pad` along each axis.
    fn square(stride: usize, size: usize, pad: usize, x: &[usize], out: usize) -> Case {
        let n = x.len() - 2;
        Case {
            op: Op::ConvTranspose {
                window: Window {
                    strides: vec![stride; n],
                    dilations: vec![1; n],
                    pads_low: vec![pad; n],
                    pads_high: vec![pad; n],
                },
                output_pads: vec![0; n],
                groups: 1,
            },
            x: x.to_vec(),
            w: [&[x[1], out], &vec![size; n][..]].concat(),
        }
    }

    /// A graph of the op with a symbolic batch; `None` where the pads remove more than there is.
    fn graph(&self, dtype: DType) -> Option<Graph> {
        let mut b = GraphBuilder::new("g");
        let sizes = self.x[1..].iter().map(|&n| Dim::from(n));
        let shape: Vec<Dim> = [Dim::symbol("n")].into_iter().chain(sizes).collect();
        let x = b.input("x", dtype, shape);
        let w = b.input("w", dtype, self.w.clone());
        let y = b.add1(self.op.clone(), &[x, w]).ok()?;
        b.output("y", y);
        Some(b.finish().unwrap())
    }

    /// The decomposed graph, if the op has phases, after a comparison of its results.
    fn check(&self, dtype: DType, tolerance: f64, rng: &mut Rng) -> Option<Graph> {
        let g = self.graph(dtype)?;
        let made = polyphase(&g).unwrap();
        crate::ir::verify::verify(&made).unwrap();
        if is_whole(&made) {
            return None;
        }
        let inputs = [&self.x, &self.w].map(|s| random_tensor(rng, dtype, s, false));
        let sizes = Bindings::from([("n".into(), self.x[0])]);
        let run = |g: &Graph| interp::run(&specialise(g, &sizes).unwrap(), &inputs).unwrap();
        let compared = allclose(&run(&g)[0], &run(&made)[0], tolerance, tolerance);
        assert!(compared.ok, "{compared}\n{g}\n{made}");
        Some(g)
    }

    /// The same of compiled code.
    fn check_compiled(&self, rng: &mut Rng) {
        let Some(g) = self.check(DType::F32, 1e-4, rng) else {
            return;
        };
        let inputs = [&self.x, &self.w].map(|s| random_tensor(rng, DType::F32, s, false));
        let sizes = Bindings::from([("n".into(), self.x[0])]);
        let expected = interp::run(&specialise(&g, &sizes).unwrap(), &inputs).unwrap();
        let compiled = crate::compile(&g, &Options::default()).unwrap();
        let executable = compiled.for_inputs(&inputs).unwrap();
        let found = executable.run(&inputs).unwrap().into_tensors();
        let compared = allclose(&expected[0], &found[0], 1e-4, 1e-4);
        assert!(compared.ok, "{compared}\n{g}");
    }
}

fn is_whole(g: &Graph) -> bool {
    g.nodes()
        .any(|(_, n)| matches!(n.op, Op::ConvTranspose { .. }))
}

fn n_convolutions(g: &Graph) -> usize {
    let is_conv = |n: &Node| matches!(n.op, Op::Conv { .. });
    g.nodes().filter(|(_, n)| is_conv(n)).count()
}

#[test]
fn random_windows_give_the_same_results() {
    let rng = &mut Rng(1);
    let checked = (0..400).filter_map(|_| Case::random(rng).check(DType::F32, 1e-4, rng));
    let n = checked.count();
    assert!(n > 300, "only {n} were decomposed");
}

#[test]
fn random_windows_compiled_give_the_same_results() {
    let rng = &mut Rng(2);
    for _ in 0..40 {
        Case::random(rng).check_compiled(rng);
    }
}

#[test]
fn symbolic_extents_give_the_same_results() {
    let rng = &mut Rng(5);
    for (stride, size, pad) in [(2, 4, 1), (2, 3, 1), (3, 3, 0), (4, 2, 0)] {
        let op = Case::square(stride, size, pad, &[1, 4, 1], 2).op;
        let mut b = GraphBuilder::new("g");
        let x = b.input("x", DType::F32, [1.into(), 4.into(), Dim::symbol("h")]);
        let w = b.input("w", DType::F32, [4, 2, size]);
        let y = b.add1(op, &[x, w]).unwrap();
        b.output("y", y);
        let g = b.finish().unwrap();
        let made = polyphase(&g).unwrap();
        assert!(!is_whole(&made), "{g}");
        for h in 1..5 {
            let sizes = Bindings::from([("h".into(), h)]);
            let inputs =
                [&[1, 4, h], &[4, 2, size]].map(|s| random_tensor(rng, DType::F32, s, false));
            let run = |g: &Graph| interp::run(&specialise(g, &sizes).unwrap(), &inputs).unwrap();
            let compared = allclose(&run(&g)[0], &run(&made)[0], 1e-4, 1e-4);
            assert!(compared.ok, "{compared}\n{made}");
        }
    }
}

#[test]
fn halves_are_rounded_once() {
    let rng = &mut Rng(3);
    for dtype in [DType::F16, DType::BF16] {
        let g = Case::square(2, 4, 1, &[1, 4, 3, 3], 2).check(dtype, 1e-2, rng);
        assert!(g.is_some(), "{dtype}");
    }
}

#[test]
fn residues_of_equal_windows_share_a_convolution() {
    let n = |case: Case| {
        let made = polyphase(&case.graph(DType::F32).unwrap()).unwrap();
        (!is_whole(&made)).then(|| n_convolutions(&made))
    };
    let image = [1, 4, 5, 5];
    // Windows that tile the output.
    assert_eq!(n(Case::square(2, 2, 0, &image, 3)), Some(1));
    assert_eq!(n(Case::square(16, 16, 0, &image, 3)), Some(1));
    // A window with and one without a shift.
    assert_eq!(n(Case::square(8, 16, 4, &[1, 4, 9], 3)), Some(2));
    assert_eq!(n(Case::square(2, 4, 1, &image, 3)), Some(4));
    // Three phases of nine have taps.
    assert_eq!(n(Case::square(3, 1, 0, &image, 3)), Some(1));
    // Stride 1 is one flipped convolution.
    assert_eq!(n(Case::square(1, 3, 1, &image, 3)), Some(1));
}

#[test]
fn others_stay_as_they_are() {
    let stays = |case: &Case, dtype| is_whole(&polyphase(&case.graph(dtype).unwrap()).unwrap());
    let image = [1, 4, 5, 5];
    assert!(stays(&Case::square(2, 2, 0, &image, 3), DType::F64));
    assert!(stays(
        &Case::square(2, 2, 0, &[1, 2, 3, 3, 3, 3], 3),
        DType::F32
    ));
    assert!(stays(&Case::square(2_000, 1, 0, &image, 3), DType::F32));
    let mut dilated = Case::square(2, 2, 0, &image, 3);
    if let Op::ConvTranspose { window, .. } = &mut dilated.op {
        window.dilations = vec![1, 2];
    }
    assert!(stays(&dilated, DType::F32));
    // Nothing but what output pads added is left.
    let mut removed = Case::square(1, 1, 0, &[1, 4, 2], 3);
    if let Op::ConvTranspose {
        window,
        output_pads,
        ..
    } = &mut removed.op
    {
        (window.pads_low[0], output_pads[0]) = (2, 3);
    }
    assert!(stays(&removed, DType::F32));
}

#[test]
fn weights_of_phases_are_constants() {
    let mut b = GraphBuilder::new("g");
    let x = b.input("x", DType::F32, [1, 4, 5, 5]);
    let w = b.constant(random_tensor(&mut Rng(4), DType::F32, &[4, 2, 3, 3], false));
    let case = Case::square(2, 3, 1, &[1, 4, 5, 5], 2);
    let y = b.add1(case.op, &[x, w]).unwrap();
    b.output("y", y);
    let made = clean(&polyphase(&b.finish().unwrap()).unwrap()).unwrap();
    let of_conv = |n: &Node| match n.op {
        Op::Conv { .. } => Some(made.constant(n.inputs[1]).is_some()),
        _ => None,
    };
    let constant: Vec<bool> = made.nodes().filter_map(|(_, n)| of_conv(n)).collect();
    assert_eq!(constant, [true; 4]);
}

#[test]
fn infinities_reach_the_windows_they_are_in() {
    let mut x = vec![1f32; 16];
    x[5] = f32::INFINITY;
    let inputs = [
        Tensor::from_slice(&x, &[1, 1, 4, 4]).unwrap(),
        Tensor::from_slice(&[1f32; 9], &[1, 1, 3, 3]).unwrap(),
    ];
    let case = Case::square(2, 3, 1, &[1, 1, 4, 4], 1);
    let sizes = Bindings::from([("n".into(), 1)]);
    let g = specialise(&case.graph(DType::F32).unwrap(), &sizes).unwrap();
    let expected = interp::run(&g, &inputs).unwrap();
    assert_eq!(
        interp::run(&polyphase(&g).unwrap(), &inputs).unwrap(),
        expected
    );
    let compiled = crate::compile(&g, &Options::default()).unwrap();
    let executable = compiled.for_inputs(&inputs).unwrap();
    assert_eq!(executable.run(&inputs).unwrap().into_tensors(), expected);
}
