//! Gradients of values that are cut into slices.

use super::*;

/// `a * tanh(b) + c` of the slices of `x` along an axis, each `[from, to]`.
fn cut(b: &mut GraphBuilder, x: ValueId, axis: usize, at: [[usize; 2]; 3]) -> Result<ValueId> {
    let part =
        |b: &mut GraphBuilder, [from, to]: [usize; 2]| b.slice_axis(x, axis, from, to - from);
    let [first, second, third] = at;
    let (p, q, r) = (part(b, first)?, part(b, second)?, part(b, third)?);
    let q = b.map(ScalarOp::Tanh, &[q])?;
    let product = b.mul(p, q)?;
    b.add_(product, r)
}

/// Numbers of pads and concatenations in the gradient.
fn counts(at: [[usize; 2]; 3]) -> [usize; 2] {
    let mut b = GraphBuilder::new("g");
    let x = b.input("x", DType::F64, [2usize, 6]);
    let y = cut(&mut b, x, 1, at).unwrap();
    let loss = b.reduce(ReduceKind::Sum, y, &[0, 1], false).unwrap();
    let gradients = b.grad(loss, &[x]).unwrap();
    b.output("gradient", gradients[0]);
    let g = b.finish().unwrap();
    let count = |is: fn(&Op) -> bool| g.nodes().filter(|(_, n)| is(&n.op)).count();
    let pads = count(|op| matches!(op, Op::Pad { .. }));
    [pads, count(|op| matches!(op, Op::Concat { .. }))]
}

#[test]
fn slices_side_by_side_have_a_concatenation_as_gradient() {
    assert_eq!(counts([[4, 6], [0, 2], [2, 4]]), [3, 1]);
    // One is used twice, and one is never.
    assert_eq!(counts([[0, 2], [2, 4], [0, 2]]), [3, 0]);
    assert_eq!(counts([[0, 2], [1, 3], [4, 6]]), [3, 0]);
    for axis in [0, 1] {
        for at in [
            [[4, 6], [0, 2], [2, 4]],
            [[0, 2], [2, 4], [0, 2]],
            [[0, 2], [1, 3], [4, 6]],
        ] {
            let build = |b: &mut GraphBuilder, x: &[ValueId]| Ok(vec![cut(b, x[0], axis, at)?]);
            let shape = if axis == 0 { [6, 3] } else { [3, 6] };
            check("slices", &[reals(&shape)], &build);
        }
    }
}
