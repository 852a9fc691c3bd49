//! Kernels of one cluster in one launch.

use super::run::check_all;
use super::*;

fn entries(body: &Graph) -> Vec<String> {
    let made = generate(&as_cluster(body), Arch::COMMON).unwrap();
    made.kernels.into_iter().map(|k| k.entry).collect()
}

/// A body whose results do not depend on each other, in the order of their kernels.
struct Independent {
    b: GraphBuilder,
    inputs: Vec<Tensor>,
    n_results: usize,
}

impl Independent {
    fn new() -> Independent {
        Independent {
            b: GraphBuilder::new("independent"),
            inputs: Vec::new(),
            n_results: 0,
        }
    }

    fn input(&mut self, rng: &mut Rng, dtype: DType, shape: &[usize]) -> ValueId {
        let name = format!("x{}", self.inputs.len());
        self.inputs.push(rng.tensor(dtype, shape, -2.0, 2.0));
        self.b.input(&name, dtype, shape.iter().copied())
    }

    fn output(&mut self, v: ValueId) {
        self.b.output(&format!("y{}", self.n_results), v);
        self.n_results += 1;
    }

    fn map(&mut self, rng: &mut Rng, dtype: DType, shape: &[usize]) -> ValueId {
        let [x, y] = [0, 1].map(|_| self.input(rng, dtype, shape));
        let sum = self.b.add_(x, y).unwrap();
        let product = self.b.mul(sum, x).unwrap();
        self.output(product);
        product
    }

    fn sum(&mut self, rng: &mut Rng, dtype: DType, shape: &[usize], axes: &[usize]) {
        let x = self.input(rng, dtype, shape);
        let y = self.b.reduce(ReduceKind::Sum, x, axes, false).unwrap();
        self.output(y);
    }

    fn case(self) -> Case {
        Case {
            body: self.b.finish().unwrap(),
            inputs: self.inputs,
            tolerance: 1e-6,
        }
    }
}

/// Three shapes with one kernel each, of which two have the same code and differ in their buffers.
#[test]
fn maps_of_several_shapes_are_one_launch() {
    let rng = &mut Rng(301);
    let mut body = Independent::new();
    for shape in [[8, 24], [5, 1], [8, 24], [600, 3]] {
        body.map(rng, DType::F32, &shape);
    }
    let case = body.case();
    assert_eq!(entries(&case.body), ["gm_bundle"]);
    let made = generate(&as_cluster(&case.body), Arch::COMMON).unwrap();
    assert_eq!(made.listing.matches("GM_DEVICE void part").count(), 3);
    check_all("maps of several shapes", &[case]);
}

/// Reductions that are split among blocks have a second kernel, which waits for the first.
#[test]
fn reductions_are_launched_by_levels() {
    let rng = &mut Rng(302);
    let mut body = Independent::new();
    body.sum(rng, DType::F32, &[140_000], &[0]);
    body.sum(rng, DType::F32, &[70, 33], &[1]);
    body.sum(rng, DType::F16, &[2100, 40], &[0]);
    body.sum(rng, DType::F32, &[140_000], &[0]);
    body.sum(rng, DType::I32, &[3, 1000], &[1]);
    let case = body.case();
    assert_eq!(entries(&case.body), ["gm_bundle", "gm_bundle"]);
    check_all("reductions of several shapes", &[case]);
}

/// Readers of a result come after it, and kernels with faults have launches of their own.
#[test]
fn kernels_wait_for_what_they_read() {
    let rng = &mut Rng(303);
    let mut body = Independent::new();
    let x = body.map(rng, DType::F32, &[6, 40]);
    body.map(rng, DType::F32, &[50]);
    let total = body.b.reduce(ReduceKind::Sum, x, &[1], false).unwrap();
    body.output(total);
    let dividend = body.input(rng, DType::I32, &[7]);
    let divisor = body
        .b
        .constant(Tensor::from_slice(&[3i32, -1, 2, 5, 7, 1, 4], &[7]).unwrap());
    let quotient = body.b.div(dividend, divisor).unwrap();
    body.output(quotient);
    let case = body.case();
    assert_eq!(entries(&case.body), ["gm_bundle", "gm_map", "gm_rows"]);
    check_all("kernels that wait for others", &[case]);
}

/// A launch has 32 kernels at most.
#[test]
fn many_kernels_are_several_launches() {
    let rng = &mut Rng(304);
    let mut body = Independent::new();
    for i in 0..40 {
        body.map(rng, DType::F32, &[3 + i, 2]);
    }
    let case = body.case();
    assert_eq!(entries(&case.body), ["gm_bundle", "gm_bundle"]);
    check_all("many kernels", &[case]);
}
