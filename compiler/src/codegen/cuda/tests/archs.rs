//! Generated kernels as machine code: each source of the tables of cases for one architecture, each kind of kernel for all of them.

use super::build::part_of;
use super::*;
use std::collections::BTreeSet;

/// The tables of cases that back ends share.
fn tables() -> Vec<Case> {
    let rng = &mut Rng(31);
    let mut cases = testing::tensor_ops(rng);
    cases.extend(testing::scalar_ops(rng));
    cases.extend(testing::casts(rng));
    cases.extend(testing::broadcasts(rng));
    cases.extend(testing::unary_shapes(rng));
    cases.extend(testing::hidden_rows(rng));
    cases.extend(testing::random_phases(rng, 20));
    cases
}

/// Whether a kernel of a unit calls a subroutine that keeps something on the stack: ptxas has one for divisions in double precision, and the library's
/// sine, cosine and tangent reduce great arguments by a table in an array. The prelude's own functions are in registers.
fn calls_subroutines(unit: &nvrtc::Unit, entry: &str) -> bool {
    let kernel = unit
        .source
        .split(&format!("\n{entry}("))
        .nth(1)
        .expect("the unit holds the kernel");
    let function = format!("GM_DEVICE void {}", part_of(entry));
    let parts = unit.source.split(&function).skip(1).chain([kernel]);
    let mut bodies = parts.map(|part| part.split("\n}\n").next().unwrap_or_default());
    bodies.any(|body| {
        let calls = ["f64", "sinf(", "cosf(", "tanf("];
        calls.iter().any(|name| body.contains(name))
    })
}

/// Panics unless all units compile to machine code. Gives the kernels that keep something on the stack, spilled registers or other, but for those of
/// [`calls_subroutines`].
fn compile(nvrtc: &nvrtc::Nvrtc, batches: &[Batch]) -> Vec<String> {
    let units: Vec<nvrtc::Unit> = batches.iter().flat_map(Batch::units).collect();
    let mut found = Vec::new();
    for (unit, made) in units.iter().zip(nvrtc::build(nvrtc, None, &units)) {
        let made = made.unwrap_or_else(|e| panic!("{} {}: {e}", unit.arch, unit.name));
        assert!(!made.cubin.is_empty() && !made.resources.is_empty());
        let stacked = made
            .resources
            .iter()
            .filter(|(_, r)| r.spill_store_bytes > 0 || r.stack_bytes > 0);
        found.extend(
            stacked
                .filter(|(e, _)| !calls_subroutines(unit, e))
                .map(|(e, r)| format!("{} {e}: {r:?}", unit.arch)),
        );
    }
    found
}

fn batches() -> [Batch; 7] {
    ARCHS.map(|a| Batch::new(Arch::parse(a).unwrap()))
}

/// Architectures take turns, so that every kind of case meets every one of them.
#[test]
fn tables_compile_for_an_architecture_each() {
    let Some(nvrtc) = nvrtc_or_left_out("machine code of the tables of cases") else {
        return;
    };
    let mut batches = batches();
    let n = batches.len();
    for (i, case) in tables().iter().enumerate() {
        batches[i % n].add(&as_cluster(&case.body), 0);
    }
    let stacked = compile(nvrtc, &batches);
    assert!(stacked.is_empty(), "{}", stacked.join("\n"));
}

/// Cases that are too small in the tables to become kernels of their own kind.
fn large_kinds(rng: &mut Rng) -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::F64] {
        let mut x = |shape: &[usize]| rng.tensor(dtype, shape, -1.0, 1.0);
        let attention = Op::Attention {
            scale: Real(0.125),
            causal: true,
        };
        cases.push(Case::of_op(
            &attention,
            vec![x(&[4, 64, 64]), x(&[4, 64, 64]), x(&[4, 64, 64])],
            0.0,
        ));
        cases.push(Case::of_op(
            &attention,
            vec![x(&[4, 1, 64]), x(&[4, 600, 64]), x(&[4, 600, 64])],
            0.0,
        ));
        cases.push(Case::of_op(
            &Op::MatMul,
            vec![x(&[64, 64]), x(&[64, 64])],
            0.0,
        ));
        cases.push(Case::of_op(
            &Op::MatMul,
            vec![x(&[2, 9000]), x(&[9000, 16])],
            0.0,
        ));
        cases.push(Case::of_op(
            &Op::Softmax {
                axis: 1,
                log: false,
            },
            vec![x(&[2, 20_000])],
            0.0,
        ));
        let sum = Op::Reduce {
            kind: ReduceKind::Sum,
            axes: vec![1],
            keepdims: false,
        };
        cases.push(Case::of_op(&sum, vec![x(&[1, 200_000])], 0.0));
        cases.push(Case::of_op(
            &Op::TopK {
                k: 5.into(),
                axis: 0,
                largest: true,
            },
            vec![x(&[1000])],
            0.0,
        ));
        cases.push(Case::of_op(
            &Op::CumSum {
                axis: 0,
                exclusive: false,
                reverse: false,
            },
            vec![x(&[1000])],
            0.0,
        ));
        cases.push(Case::of_op(
            &Op::Transpose { perm: vec![1, 0] },
            vec![x(&[40, 50])],
            0.0,
        ));
    }
    cases
}

/// The first cases that have a kernel of some kind, by the dtype of what it reads first.
#[test]
fn kinds_compile_for_every_architecture() {
    let Some(nvrtc) = nvrtc_or_left_out("machine code of every kind of kernel") else {
        return;
    };
    let mut cases = large_kinds(&mut Rng(32));
    cases.extend(tables());
    let mut seen = BTreeSet::new();
    let mut is_new = |case: &Case| {
        let dtype = case.inputs.first().map_or(DType::F32, Tensor::dtype);
        let size_class = (dtype.is_float(), dtype.size_bytes());
        let made = generate(&as_cluster(&case.body), Arch::COMMON).unwrap();
        let kinds = made.kernels.iter().map(|k| (k.entry.clone(), size_class));
        kinds.filter(|kind| seen.insert(kind.clone())).count() > 0
    };
    cases.retain(|c| is_new(c));
    let mut batches = batches();
    for batch in &mut batches {
        cases
            .iter()
            .for_each(|c| drop(batch.add(&as_cluster(&c.body), 0)));
    }
    let stacked = compile(nvrtc, &batches);
    assert!(stacked.is_empty(), "{}", stacked.join("\n"));
    let kinds: BTreeSet<&str> = seen.iter().map(|(entry, _)| entry.as_str()).collect();
    let own = [
        "attention",
        "attention_join",
        "contract",
        "lines",
        "map",
        "rows",
        "rows_join",
        "skinny",
        "skinny_join",
        "turned",
        "windows",
    ];
    own.iter().for_each(|k| {
        assert!(
            kinds.contains(format!("gm_{k}").as_str()),
            "{k} of {kinds:?}"
        )
    });
}
