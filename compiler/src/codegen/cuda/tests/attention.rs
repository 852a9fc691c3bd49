//! Attention in one pass over the keys.

use super::run::check_all;
use super::*;

/// Batches, queries, keys, depth, depth of the values.
type Extents = [usize; 5];

/// One attention; the mask's shape is broadcast.
fn attention(rng: &mut Rng, dtype: DType, x: Extents, mask: Option<&[usize]>, causal: bool) -> Case {
    let [batch, n_queries, n_keys, depth, value_depth] = x;
    let mut operands = vec![
        rng.tensor(dtype, &[batch, n_queries, depth], -2.0, 2.0),
        rng.tensor(dtype, &[batch, n_keys, depth], -2.0, 2.0),
        rng.tensor(dtype, &[batch, n_keys, value_depth], -2.0, 2.0),
    ];
    operands.extend(mask.map(|shape| rng.tensor(dtype, shape, -1.0, 1.0)));
    let op = Op::Attention { scale: Real(1.0 / (depth as f64).sqrt()), causal };
    // Tensor cores take weights rounded to the dtype: half a unit in the last place of each.
    let tolerance = match dtype {
        DType::F16 => 2f64.powi(-11),
        DType::BF16 => 2f64.powi(-8),
        DType::F64 => 1e-12,
        _ => 1e-6,
    };
    Case::of_op(&op, operands, tolerance)
}

fn entries(body: &Graph) -> Vec<String> {
    generate(&as_cluster(body), Arch::COMMON).unwrap().kernels.into_iter().map(|k| k.entry).collect()
}

#[test]
fn tiles_whole_and_ragged() {
    let rng = &mut Rng(71);
    let mut all = Vec::new();
    for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
        let deep = if dtype == DType::F64 { 64 } else { 128 };
        for x in
            [[2, 1, 1, 1, 1], [3, 5, 7, 20, 12], [1, 64, 64, 64, 64], [2, 70, 100, 24, 40], [1, 33, 40, deep, deep]]
        {
            for causal in [false, true] {
                let mask = if x[0] == 2 { Some(vec![x[1], x[2]]) } else { None };
                all.push(attention(rng, dtype, x, mask.as_deref(), causal));
            }
        }
    }
    all.push(attention(rng, DType::F32, [1, 9, 40, 160, 160], None, false));
    all.push(attention(rng, DType::F32, [4, 20, 30, 16, 16], Some(&[4, 1, 30]), true));
    all.iter().for_each(|c| assert_eq!(entries(&c.body), ["gm_attention"], "{}", c.body));
    // Too deep for a tile: products and a softmax.
    let deep = attention(rng, DType::F32, [1, 9, 12, 512, 512], None, false);
    assert!(!entries(&deep.body).contains(&"gm_attention".to_owned()));
    all.push(deep);
    check_all("attention in tiles", &all);
}

/// Few queries over many keys: several blocks share a tile.
#[test]
fn keys_are_split_among_blocks() {
    let rng = &mut Rng(72);
    let mut all = Vec::new();
    for dtype in [DType::F32, DType::F64, DType::BF16] {
        for (x, causal) in [([2, 1, 1000, 16, 16], false), ([1, 300, 900, 32, 16], true), ([3, 17, 600, 64, 64], false)]
        {
            all.push(attention(rng, dtype, x, None, causal));
            all.push(attention(rng, dtype, x, Some(&[1, x[2]]), causal));
        }
    }
    for case in &all {
        assert_eq!(entries(&case.body), ["gm_attention", "gm_attention_join"], "{}", case.body);
    }
    check_all("attention with split keys", &all);
}

/// A block of a model: heads cut out of one matrix, fewer of keys than of queries, and what follows.
fn heads(rng: &mut Rng, dtype: DType) -> Case {
    let (len, heads, kv_heads, depth) = (37usize, 4usize, 2usize, 16usize);
    let mut b = GraphBuilder::new("heads");
    let x = b.input("x", dtype, [2, len, (heads + 2 * kv_heads) * depth]);
    let residual = b.input("residual", DType::F32, [2, heads, len, depth]);
    let mask = b.input("mask", dtype, [2, 1, 1, len]);
    let part = |b: &mut GraphBuilder, first: usize, n: usize| {
        let y = b.slice_axis(x, 2, first * depth, n * depth).unwrap();
        let y = b.reshape(y, [2, len, n, depth]).unwrap();
        let y = b.transpose(y, &[0, 2, 1, 3]).unwrap();
        let y = b.reshape(y, [2, n, 1, len, depth]).unwrap();
        let y = b.broadcast(y, [2, n, heads / n, len, depth]).unwrap();
        b.reshape(y, [2, heads, len, depth]).unwrap()
    };
    let (q, k, v) = (part(&mut b, 0, heads), part(&mut b, heads, kv_heads), part(&mut b, heads + kv_heads, kv_heads));
    let y = b.add1(Op::Attention { scale: Real(0.25), causal: false }, &[q, k, v, mask]).unwrap();
    let y = b.cast(y, DType::F32).unwrap();
    let y = b.add_(y, residual).unwrap();
    b.output("y", y);
    let inputs = vec![
        rng.tensor(dtype, &[2, len, (heads + 2 * kv_heads) * depth], -2.0, 2.0),
        rng.tensor(DType::F32, &[2, heads, len, depth], -1.0, 1.0),
        rng.tensor(dtype, &[2, 1, 1, len], -1.0, 1.0),
    ];
    let tolerance = if dtype == DType::F32 { 1e-6 } else { 2f64.powi(-8) };
    Case { body: b.finish().unwrap(), inputs, tolerance }
}

#[test]
fn neighbours_join_the_attention() {
    let rng = &mut Rng(73);
    let cases = [DType::F32, DType::F16, DType::BF16].map(|d| heads(rng, d));
    cases.iter().for_each(|c| assert_eq!(entries(&c.body), ["gm_attention"], "{}", c.body));
    check_all("attention with neighbours", &cases);
}

#[test]
fn canonical_attention() {
    let rng = &mut Rng(74);
    insta::assert_snapshot!(
        "attention_elements",
        listing(&attention(rng, DType::F32, [2, 64, 64, 64, 64], None, true).body)
    );
    let fragments = attention(rng, DType::F16, [2, 80, 64, 64, 64], Some(&[80, 64]), false);
    insta::assert_snapshot!("attention_fragments", listing(&fragments.body));
    insta::assert_snapshot!(
        "attention_split",
        listing(&attention(rng, DType::F32, [2, 1, 600, 64, 64], None, false).body)
    );
}

/// No architecture spills; copies and products are those of tensor cores from sm_80 on.
#[test]
fn tiles_stay_on_chip() {
    let Some(nvrtc) = nvrtc_or_left_out("resources of attention") else { return };
    let rng = &mut Rng(75);
    let forms = [
        (DType::F32, [128, 64, 64, 64, 64]),
        (DType::F32, [128, 64, 64, 128, 128]),
        (DType::F16, [128, 64, 64, 64, 64]),
        (DType::BF16, [128, 64, 64, 128, 128]),
    ];
    for (dtype, x) in forms {
        let g = as_cluster(&attention(rng, dtype, x, None, true).body);
        for arch in ARCHS {
            let arch = Arch::parse(arch).unwrap();
            let made = generate(&g, arch).unwrap();
            let compiled = nvrtc.compile(&made.units[0]).unwrap();
            let r = compiled.resources["gm_attention"];
            assert!(r.stack_bytes == 0 && r.spill_store_bytes == 0, "{arch} {dtype}: {r:?}");
            let tensor = dtype != DType::F32 && arch.capability() >= 80;
            for instruction in ["mma.sync", "ldmatrix", "cp.async"] {
                assert_eq!(compiled.ptx.contains(instruction), tensor, "{arch} {dtype}: {instruction}");
            }
        }
    }
}
