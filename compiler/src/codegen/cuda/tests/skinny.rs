//! Products with few rows or columns.

use super::run::check_all;
use super::*;

fn entries(body: &Graph) -> Vec<String> {
    generate(&as_cluster(body), Arch::COMMON)
        .unwrap()
        .kernels
        .into_iter()
        .map(|k| k.entry)
        .collect()
}

/// `lhs rhs`, each as it is or stored transposed.
fn product(
    rng: &mut Rng,
    dtype: DType,
    lead: &[usize],
    [m, k, n]: [usize; 3],
    turned: [bool; 2],
) -> Case {
    let mut b = GraphBuilder::new("product");
    let mut inputs = Vec::new();
    let mut operand = |b: &mut GraphBuilder, name: &str, shape: [usize; 2], turned: bool| {
        let stored = if turned { [shape[1], shape[0]] } else { shape };
        let stored: Vec<usize> = lead.iter().copied().chain(stored).collect();
        inputs.push(rng.tensor(dtype, &stored, -2.0, 2.0));
        let v = b.input(name, dtype, stored.iter().copied());
        let mut perm: Vec<usize> = (0..stored.len()).collect();
        perm.swap(lead.len(), lead.len() + 1);
        if turned {
            b.transpose(v, &perm).unwrap()
        } else {
            v
        }
    };
    let (lhs, rhs) = (
        operand(&mut b, "lhs", [m, k], turned[0]),
        operand(&mut b, "rhs", [k, n], turned[1]),
    );
    let y = b.matmul(lhs, rhs).unwrap();
    b.output("y", y);
    Case {
        body: b.finish().unwrap(),
        inputs,
        tolerance: 1e-6,
    }
}

#[test]
fn few_rows_and_few_columns() {
    let rng = &mut Rng(81);
    let mut all = Vec::new();
    for dtype in [
        DType::F32,
        DType::F64,
        DType::F16,
        DType::BF16,
        DType::I8,
        DType::U64,
    ] {
        for extents in [
            [1, 64, 200],
            [3, 100, 37],
            [8, 33, 64],
            [200, 64, 1],
            [65, 48, 5],
            [1, 300, 1],
        ] {
            for turned in [[false, false], [false, true], [true, false]] {
                all.push(product(rng, dtype, &[], extents, turned));
            }
        }
    }
    // Odd extents, whose elements are read one by one; batches; so many lines that a group has several.
    all.push(product(
        rng,
        DType::F32,
        &[3, 2],
        [2, 40, 50],
        [false, true],
    ));
    all.push(product(rng, DType::F32, &[], [2, 50, 333], [false, false]));
    all.push(product(rng, DType::F32, &[6], [50, 40, 1], [false, false]));
    all.push(product(rng, DType::F32, &[], [2, 32, 16500], [false, true]));
    all.iter()
        .for_each(|c| assert_eq!(entries(&c.body)[0], "gm_skinny", "{}", c.body));
    check_all("skinny products", &all);
}

/// Few lines and a long sum: several blocks share it.
#[test]
fn long_sums_are_split_among_blocks() {
    let rng = &mut Rng(82);
    let mut all = Vec::new();
    for (dtype, extents, turned) in [
        (DType::F32, [1, 9000, 16], [false, false]),
        (DType::F32, [4, 40000, 7], [false, true]),
        (DType::BF16, [2, 16384, 24], [false, false]),
        (DType::I32, [5, 9001, 3], [false, false]),
    ] {
        all.push(product(rng, dtype, &[], extents, turned));
    }
    for case in &all {
        assert_eq!(
            entries(&case.body),
            ["gm_skinny", "gm_skinny_join"],
            "{}",
            case.body
        );
    }
    check_all("skinny products with long sums", &all);
}

/// `gelu(x (cast(w) * scale)^T + bias)`: weights of a half type are read as they are stored, and all else happens on the way.
#[test]
fn neighbours_join_the_product() {
    let rng = &mut Rng(83);
    let mut cases = Vec::new();
    for (k, n) in [(96usize, 80usize), (70000, 8)] {
        let mut b = GraphBuilder::new("layer");
        let (x, w) = (
            b.input("x", DType::F32, [1, 2, k]),
            b.input("w", DType::F16, [n, k]),
        );
        let (scale, bias) = (
            b.input("scale", DType::F32, [n, 1]),
            b.input("bias", DType::F32, [n]),
        );
        let w = b.cast(w, DType::F32).unwrap();
        let w = b.mul(w, scale).unwrap();
        let w = b.transpose(w, &[1, 0]).unwrap();
        let y = b.matmul(x, w).unwrap();
        let y = b.add_(y, bias).unwrap();
        let y = b.map(ScalarOp::Gelu, &[y]).unwrap();
        b.output("y", y);
        let inputs = vec![
            rng.tensor(DType::F32, &[1, 2, k], -1.0, 1.0),
            rng.tensor(DType::F16, &[n, k], -1.0, 1.0),
            rng.tensor(DType::F32, &[n, 1], -1.0, 1.0),
            rng.tensor(DType::F32, &[n], -1.0, 1.0),
        ];
        cases.push(Case {
            body: b.finish().unwrap(),
            inputs,
            tolerance: 1e-6,
        });
    }
    insta::assert_snapshot!("skinny_layer", listing(&cases[0].body));
    assert_eq!(entries(&cases[0].body), ["gm_skinny"]);
    assert_eq!(entries(&cases[1].body), ["gm_skinny", "gm_skinny_join"]);
    check_all("skinny products with neighbours", &cases);
}

/// Weights are read 16 bytes at a time, stored either way.
#[test]
fn weights_are_read_in_vectors() {
    let Some(nvrtc) = nvrtc_or_left_out("the accesses of skinny products") else {
        return;
    };
    let rng = &mut Rng(84);
    for turned in [false, true] {
        let case = product(rng, DType::F32, &[], [4, 1024, 4096], [false, turned]);
        let made = generate(&as_cluster(&case.body), Arch::COMMON).unwrap();
        let compiled = nvrtc.compile(&made.units[0]).unwrap();
        assert!(
            moves(&compiled.ptx, "ld.global.nc.v4", 32),
            "{turned}: {}",
            compiled.ptx
        );
        let r = compiled.resources["gm_skinny"];
        assert!(
            r.stack_bytes == 0 && r.spill_store_bytes == 0,
            "{turned}: {r:?}"
        );
    }
}
