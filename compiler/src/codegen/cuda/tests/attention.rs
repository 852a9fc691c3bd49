//! Attention in one pass over the keys.

use super::run::{check_all, check_with};
use super::*;

/// Batches, queries, keys, depth, depth of the values.
type Extents = [usize; 5];

/// One attention; the mask's shape is broadcast.
fn attention(
    rng: &mut Rng,
    dtype: DType,
    x: Extents,
    mask: Option<&[usize]>,
    causal: bool,
) -> Case {
    let [batch, n_queries, n_keys, depth, value_depth] = x;
    let mut operands = vec![
        rng.tensor(dtype, &[batch, n_queries, depth], -2.0, 2.0),
        rng.tensor(dtype, &[batch, n_keys, depth], -2.0, 2.0),
        rng.tensor(dtype, &[batch, n_keys, value_depth], -2.0, 2.0),
    ];
    operands.extend(mask.map(|shape| rng.tensor(dtype, shape, -1.0, 1.0)));
    let op = Op::Attention {
        scale: Real(1.0 / (depth as f64).sqrt()),
        causal,
    };
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
    generate(&as_cluster(body), Arch::COMMON)
        .unwrap()
        .kernels
        .into_iter()
        .map(|k| k.entry)
        .collect()
}

#[test]
fn tiles_whole_and_ragged() {
    let rng = &mut Rng(71);
    let mut all = Vec::new();
    for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
        let deep = if dtype == DType::F64 { 64 } else { 128 };
        for x in [
            [2, 1, 1, 1, 1],
            [3, 5, 7, 20, 12],
            [1, 64, 64, 64, 64],
            [2, 70, 100, 24, 40],
            [1, 33, 40, deep, deep],
        ] {
            for causal in [false, true] {
                let mask = if x[0] == 2 {
                    Some(vec![x[1], x[2]])
                } else {
                    None
                };
                all.push(attention(rng, dtype, x, mask.as_deref(), causal));
            }
        }
    }
    all.push(attention(
        rng,
        DType::F32,
        [1, 9, 40, 160, 160],
        None,
        false,
    ));
    all.push(attention(
        rng,
        DType::F32,
        [4, 20, 30, 16, 16],
        Some(&[4, 1, 30]),
        true,
    ));
    all.iter()
        .for_each(|c| assert_eq!(entries(&c.body), ["gm_attention"], "{}", c.body));
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
        for (x, causal) in [
            ([2, 5, 1000, 16, 16], false),
            ([1, 300, 900, 32, 16], true),
            ([3, 17, 600, 64, 64], false),
        ] {
            all.push(attention(rng, dtype, x, None, causal));
            all.push(attention(rng, dtype, x, Some(&[1, x[2]]), causal));
        }
    }
    for case in &all {
        assert_eq!(
            entries(&case.body),
            ["gm_attention", "gm_attention_join"],
            "{}",
            case.body
        );
    }
    check_all("attention with split keys", &all);
}

/// A block of a model: heads cut out of one matrix, fewer of keys than of queries, and what follows.
fn heads(rng: &mut Rng, dtype: DType, [len, heads, kv_heads, depth]: [usize; 4]) -> Case {
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
    let (q, k, v) = (
        part(&mut b, 0, heads),
        part(&mut b, heads, kv_heads),
        part(&mut b, heads + kv_heads, kv_heads),
    );
    let y = b
        .add1(
            Op::Attention {
                scale: Real(0.25),
                causal: false,
            },
            &[q, k, v, mask],
        )
        .unwrap();
    let y = b.cast(y, DType::F32).unwrap();
    let y = b.add_(y, residual).unwrap();
    b.output("y", y);
    let inputs = vec![
        rng.tensor(dtype, &[2, len, (heads + 2 * kv_heads) * depth], -2.0, 2.0),
        rng.tensor(DType::F32, &[2, heads, len, depth], -1.0, 1.0),
        rng.tensor(dtype, &[2, 1, 1, len], -1.0, 1.0),
    ];
    let tolerance = if dtype == DType::F32 {
        1e-6
    } else {
        2f64.powi(-8)
    };
    Case {
        body: b.finish().unwrap(),
        inputs,
        tolerance,
    }
}

#[test]
fn neighbours_join_the_attention() {
    let rng = &mut Rng(73);
    let cases = [DType::F32, DType::F16, DType::BF16].map(|d| heads(rng, d, [37, 4, 2, 16]));
    cases
        .iter()
        .for_each(|c| assert_eq!(entries(&c.body), ["gm_attention"], "{}", c.body));
    check_all("attention with neighbours", &cases);
}

/// `select(empty, 0, attention) * scale`, for a single query as well: its axis has one element.
#[test]
fn ops_of_two_operands_join_the_attention() {
    let rng = &mut Rng(76);
    let mut all = Vec::new();
    for (n_queries, n_keys) in [(1, 9), (1, 700), (5, 9), (5, 700)] {
        let mut b = GraphBuilder::new("masked");
        let shapes = [n_queries, n_keys, n_keys].map(|n| [2, 4, n, 8]);
        let [q, k, v] = ["q", "k", "v"].map(|name| {
            let shape = shapes[if name == "q" { 0 } else { 1 }];
            b.input(name, DType::F32, shape)
        });
        let empty = b.input("empty", DType::Bool, [2, 1, n_queries, 1]);
        let scale = b.input("scale", DType::F32, [n_queries, 8]);
        let attention = Op::Attention {
            scale: Real(0.5),
            causal: false,
        };
        let y = b.add1(attention, &[q, k, v]).unwrap();
        let zero = b.scalar(DType::F32, 0.0);
        let y = b.map(ScalarOp::Select, &[empty, zero, y]).unwrap();
        let y = b.mul(y, scale).unwrap();
        b.output("y", y);
        let mut inputs = shapes
            .map(|s| rng.tensor(DType::F32, &s, -1.0, 1.0))
            .to_vec();
        inputs.push(rng.tensor(DType::Bool, &[2, 1, n_queries, 1], 0.0, 1.0));
        inputs.push(rng.tensor(DType::F32, &[n_queries, 8], -1.0, 1.0));
        let body = b.finish().unwrap();
        let kernels = ["gm_attention", "gm_attention_join"];
        assert_eq!(entries(&body), kernels[..if n_keys > 9 { 2 } else { 1 }]);
        all.push(Case {
            body,
            inputs,
            tolerance: 1e-6,
        });
    }
    check_all("ops of two operands after attention", &all);
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
    let groups = attention(rng, DType::F16, [64, 130, 140, 64, 128], None, true);
    insta::assert_snapshot!(
        "attention_groups",
        generate(&as_cluster(&groups.body), hopper())
            .unwrap()
            .listing
    );
    insta::assert_snapshot!(
        "attention_split",
        listing(&attention(rng, DType::F32, [2, 1, 600, 64, 64], None, false).body)
    );
}

fn hopper() -> Arch {
    Arch::parse("sm_90a").unwrap()
}

/// Large attentions: whole and ragged tiles, masks, heads that share keys, values of another depth, and what has to be stored first.
fn for_groups(rng: &mut Rng) -> Vec<Case> {
    let (f16, bf16) = (DType::F16, DType::BF16);
    let mut all = vec![
        attention(rng, bf16, [64, 128, 128, 64, 64], None, false),
        attention(rng, f16, [22, 300, 290, 64, 64], None, true),
        attention(rng, bf16, [33, 200, 150, 128, 128], None, true),
        attention(rng, f16, [32, 130, 300, 72, 40], Some(&[130, 300]), false),
        heads(rng, bf16, [160, 16, 4, 64]),
    ];
    let mut b = GraphBuilder::new("negated");
    let shape = [64, 128, 64];
    let [q, k, v] = ["q", "k", "v"].map(|name| b.input(name, f16, shape));
    let q = b.map(ScalarOp::Neg, &[q]).unwrap();
    let y = b
        .add1(
            Op::Attention {
                scale: Real(-0.125),
                causal: false,
            },
            &[q, k, v],
        )
        .unwrap();
    b.output("y", y);
    let inputs = (0..3).map(|_| rng.tensor(f16, &shape, -2.0, 2.0)).collect();
    all.push(Case {
        body: b.finish().unwrap(),
        inputs,
        tolerance: 2f64.powi(-11),
    });
    all
}

#[test]
fn attention_of_warp_groups() {
    let cases = for_groups(&mut Rng(76));
    let mut forms = Vec::new();
    for case in &cases {
        let text = generate(&as_cluster(&case.body), hopper()).unwrap().listing;
        let form = text
            .split("gm_group_attention<")
            .nth(1)
            .unwrap_or_else(|| panic!("{text}"));
        forms.push(form.split('>').next().unwrap_or_default().to_owned());
    }
    insta::assert_snapshot!(forms.join("\n"), @r"
    gm_wgmma_bf16, 64, 64, 4
    gm_wgmma_f16, 64, 64, 4
    gm_wgmma_bf16, 128, 128, 4
    gm_wgmma_f16, 128, 64, 4
    gm_wgmma_bf16, 64, 64, 4
    gm_wgmma_f16, 64, 64, 4
    ");
    check_with(hopper().into(), "attention of warp groups", &cases);
    // Few queries, and deep ones.
    for x in [
        [64, 64, 128, 64, 64],
        [64, 128, 128, 32, 32],
        [20, 128, 128, 64, 64],
    ] {
        let small = attention(&mut Rng(77), DType::BF16, x, None, false);
        assert!(
            !generate(&as_cluster(&small.body), hopper())
                .unwrap()
                .listing
                .contains("gm_group_attention<")
        );
    }
}

/// All that warp groups hold is in registers, of which they get what the group that fetches gives up; and while the products of one tile's values
/// are under way, the next one's weights are computed.
#[test]
fn warp_groups_multiply_and_weigh_at_once() {
    let Some(nvrtc) = nvrtc_or_left_out("machine code of attention by warp groups") else {
        return;
    };
    let mut n_loops = Vec::new();
    for case in for_groups(&mut Rng(78)) {
        let made = generate(&as_cluster(&case.body), hopper()).unwrap();
        let i = made
            .kernels
            .iter()
            .find(|k| k.entry == "gm_attention")
            .unwrap()
            .code;
        let compiled = nvrtc.compile(&made.units[i]).unwrap();
        let r = compiled.resources["gm_attention"];
        assert!(r.stack_bytes == 0 && r.spill_store_bytes == 0, "{r:?}");
        // `setmaxnreg` moves registers between groups of a block that was given all: 40 + 2 * 232 of 3 * 168.
        assert_eq!(r.registers, 168);
        // ptxas says so when it waits for each product by itself.
        assert!(!compiled.log.contains("(C75"), "{}", compiled.log);
        let text = machine_code(nvrtc, &compiled.cubin, "attention");
        n_loops.extend(text.map(|text| overlaps(&text)));
    } // The first and the last case have a single tile of keys.
    assert!(
        n_loops.is_empty() || n_loops == [false, true, true, true, true, false],
        "{n_loops:?}"
    );
}

/// Whether there is a loop over the tiles of keys. Then the powers of a whole tile are between the wait for the scores and that for the results.
fn overlaps(text: &str) -> bool {
    assert!(
        text.contains("HGMMA") && !text.contains("LDL") && !text.contains("STL"),
        "{text}"
    );
    let Some(after) = text.split("WARPGROUP.DEPBAR.LE gsb0, 0x1").nth(1) else {
        return false;
    };
    let between = after.split("WARPGROUP.DEPBAR").next().unwrap_or_default();
    let n = between.matches("MUFU.EX2").count();
    assert!(n >= 64, "{n} powers while values are multiplied");
    true
}

/// No architecture spills; copies and products are those of tensor cores from sm_80 on.
#[test]
fn tiles_stay_on_chip() {
    let Some(nvrtc) = nvrtc_or_left_out("resources of attention") else {
        return;
    };
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
            assert!(
                r.stack_bytes == 0 && r.spill_store_bytes == 0,
                "{arch} {dtype}: {r:?}"
            );
            let tensor = dtype != DType::F32 && arch.capability() >= 80;
            for instruction in ["mma.sync", "ldmatrix", "cp.async"] {
                assert_eq!(
                    compiled.ptx.contains(instruction),
                    tensor,
                    "{arch} {dtype}: {instruction}"
                );
            }
        }
    }
}
