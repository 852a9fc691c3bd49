//! Which clusters are products that a library can be asked for, and in what words.

use super::super::{Options, generate_forms, library_product};
use super::*;
use crate::codegen::kernel_forms::{LibraryForm, Preferred};
use crate::cost::signature;

/// What a library is asked for, in words; nothing where it is not.
fn product(body: &Graph) -> Option<String> {
    let cluster = as_cluster(body);
    let found = library_product(cluster.node(NodeId(0)), Options::from(Arch::COMMON)).unwrap();
    found.map(|p| p.to_string().replace(", 0 bytes of workspace", ""))
}

/// What becomes of `x w` (or of `after` on it).
fn of(
    x: (DType, &[usize]),
    w: &[usize],
    after: impl FnOnce(&mut GraphBuilder, ValueId) -> ValueId,
) -> Option<String> {
    let mut b = GraphBuilder::new("g");
    let (x, w) = (
        b.input("x", x.0, x.1.to_vec()),
        b.input("w", x.0, w.to_vec()),
    );
    let y = b.matmul(x, w).unwrap();
    let y = after(&mut b, y);
    b.output("y", y);
    product(&b.finish().unwrap())
}

fn plain(_: &mut GraphBuilder, y: ValueId) -> ValueId {
    y
}

#[test]
fn products_in_any_layout_and_batch() {
    let f = DType::F32;
    assert_eq!(
        of((f, &[5, 6]), &[6, 7], plain).unwrap(),
        "f32[5, 6] x f32[6, 7] -> f32[5, 7]"
    );
    assert_eq!(
        of((DType::BF16, &[5, 6]), &[6, 7], plain).unwrap(),
        "bf16[5, 6] x bf16[6, 7] -> bf16[5, 7]"
    );
    assert_eq!(
        of((f, &[2, 3, 5, 6]), &[6, 7], plain).unwrap(),
        "f32[30, 6] x f32[6, 7] -> f32[30, 7]",
        "one product"
    );
    assert_eq!(
        of((f, &[5, 6]), &[4, 6, 7], plain).unwrap(),
        "f32[5, 6] x f32[6, 7] -> f32[5, 7], 4 times"
    );
    assert_eq!(
        of((f, &[2, 3, 5, 6]), &[2, 3, 6, 7], plain).unwrap(),
        "f32[5, 6] x f32[6, 7] -> f32[5, 7], 6 times"
    );
    assert_eq!(
        of((f, &[2, 3, 5, 6]), &[2, 1, 6, 7], plain),
        None,
        "one stride cannot say that batch"
    );
    assert_eq!(
        of((DType::I32, &[5, 6]), &[6, 7], plain),
        None,
        "the library has no such products"
    );
    let viewed = |view: fn(&mut GraphBuilder, ValueId) -> ValueId, shape: [usize; 2]| {
        let mut b = GraphBuilder::new("g");
        let (x, w) = (
            b.input("x", DType::F32, [5, 6]),
            b.input("w", DType::F32, shape),
        );
        let w = view(&mut b, w);
        let y = b.matmul(x, w).unwrap();
        b.output("y", y);
        product(&b.finish().unwrap())
    };
    let turned = viewed(|b, w| b.transpose(w, &[1, 0]).unwrap(), [7, 6]);
    assert_eq!(turned.unwrap(), "f32[5, 6] x f32[6, 7]' -> f32[5, 7]");
    let cut = viewed(|b, w| b.slice_axis(w, 1, 2usize, 7usize).unwrap(), [6, 10]);
    assert_eq!(cut.unwrap(), "f32[5, 6] x f32[6, 7] -> f32[5, 7]");
    assert_eq!(
        viewed(|b, w| b.map(ScalarOp::Exp, &[w]).unwrap(), [6, 7]),
        None
    );
    let wide = |b: &mut GraphBuilder, w| {
        let w = b.reshape(w, [6usize, 1]).unwrap();
        b.broadcast(w, [6usize, 7]).unwrap()
    };
    assert_eq!(
        viewed(wide, [1, 6]),
        None,
        "the same column again and again"
    );
}

#[test]
fn what_follows_is_a_bias_and_a_relu() {
    let bias = |b: &mut GraphBuilder, y: ValueId, shape: &[usize], dtype| {
        let bias = b.input("b", dtype, shape.to_vec());
        b.add_(bias, y).unwrap()
    };
    let (f, x) = (DType::F32, [4usize, 5, 6]);
    let with = |after: &dyn Fn(&mut GraphBuilder, ValueId) -> ValueId| of((f, &x), &[6, 8], after);
    assert_eq!(
        with(&|b, y| bias(b, y, &[8], f)).unwrap(),
        "f32[20, 6] x f32[6, 8] -> f32[20, 8], bias"
    );
    let heads = with(&|b, y| {
        let y = b.reshape(y, [20usize, 2, 4]).unwrap();
        let y = bias(b, y, &[2, 4], f);
        b.map(ScalarOp::Relu, &[y]).unwrap()
    });
    assert_eq!(
        heads.unwrap(),
        "f32[20, 6] x f32[6, 8] -> f32[20, 8], bias, relu"
    );
    assert_eq!(
        with(&|b, y| bias(b, y, &[5, 8], f)),
        None,
        "another vector for each row"
    );
    assert_eq!(with(&|b, y| bias(b, y, &[1], f)), None, "a number");
    assert_eq!(
        with(&|b, y| b.map(ScalarOp::Gelu, &[y]).unwrap()),
        None,
        "the library's is another"
    );
    assert_eq!(with(&|b, y| b.add_(y, y).unwrap()), None);
    assert_eq!(with(&|b, y| b.transpose(y, &[0, 2, 1]).unwrap()), None);
    let relu_first = with(&|b, y| {
        let y = b.map(ScalarOp::Relu, &[y]).unwrap();
        bias(b, y, &[8], f)
    });
    assert_eq!(relu_first, None);
    let half = of((DType::F16, &x), &[6, 8], |b, y| {
        bias(b, y, &[8], DType::F16)
    });
    assert_eq!(half.unwrap(), "f16[20, 6] x f16[6, 8] -> f16[20, 8], bias");
    // Rounded to half before the bias, which the library would not do.
    let rounded = of((DType::BF16, &x), &[6, 8], |b, y| {
        let y = b.cast(y, f).unwrap();
        bias(b, y, &[8], f)
    });
    assert_eq!(rounded, None);
}

/// Bytes and half types that are widened to be multiplied are the library's own operands.
#[test]
fn operands_are_taken_as_they_are_stored() {
    let widened = |from: DType, to: DType, n: usize| {
        let mut b = GraphBuilder::new("g");
        let (x, w) = (b.input("x", from, [8, 12]), b.input("w", from, [n, 12]));
        let w = b.transpose(w, &[1, 0]).unwrap();
        let (x, w) = (b.cast(x, to).unwrap(), b.cast(w, to).unwrap());
        let y = b.matmul(x, w).unwrap();
        b.output("y", y);
        product(&b.finish().unwrap())
    };
    assert_eq!(
        widened(DType::I8, DType::I32, 4).unwrap(),
        "i8[8, 12] x i8[12, 4]' -> i32[8, 4]"
    );
    assert_eq!(
        widened(DType::BF16, DType::F32, 4).unwrap(),
        "bf16[8, 12] x bf16[12, 4]' -> f32[8, 4]"
    );
    assert_eq!(widened(DType::U8, DType::I32, 4), None);
    assert_eq!(widened(DType::F32, DType::F64, 4), None);
}

/// The plan of a product has one step, after the kernels of the other clusters, and the listing says so.
#[test]
fn a_product_comes_after_our_kernels() {
    let mut b = GraphBuilder::new("g");
    let (x, w) = (
        b.input("x", DType::F32, [5, 6]),
        b.input("w", DType::F32, [6, 7]),
    );
    let y = b.matmul(x, w).unwrap();
    b.output("y", y);
    let cluster = as_cluster(&b.finish().unwrap());
    let library = LibraryForm {
        name: "L 1.0".into(),
        workspace_bytes: 10,
        ns: 1,
    };
    let preferred = Preferred {
        form: 3,
        library: Some(library),
        ..Preferred::default()
    };
    let forms = [(signature(&cluster, cluster.node(NodeId(0))), preferred)].into();
    let made = generate_forms(&cluster, Arch::COMMON.into(), &forms).unwrap();
    let plan = &made.plans[&NodeId(0)];
    assert_eq!(
        (made.kernels.len(), made.products.len(), plan.steps.len()),
        (0, 1, 1)
    );
    assert_eq!(
        (
            plan.steps[0].kernel,
            plan.steps[0].n_outputs,
            &plan.scratch[..]
        ),
        (0, 2, &[10 + 192][..])
    );
    let said =
        "form 4 of 4, predicted: L 1.0, f32[5, 6] x f32[6, 7] -> f32[5, 7], 10 bytes of workspace";
    assert!(made.listing.contains(said), "{}", made.listing);
}
