//! Attention against its definition in f64, and what scores that are no numbers do.

use super::*;
use crate::testing::{Rng, assert_close};

fn at(stride: [isize; 3], batch: usize, head: usize, row: usize) -> usize {
    (batch as isize * stride[0] + head as isize * stride[1] + row as isize * stride[2]) as usize
}

fn reference(
    d: &AttentionDesc,
    q: &[f32],
    k: &[f32],
    v: &[f32],
    mask: Option<&[f32]>,
    len: usize,
) -> Vec<f64> {
    let mut out = vec![0.0; len];
    for (batch, head) in (0..d.batch).flat_map(|b| (0..d.heads).map(move |h| (b, h))) {
        let kv = head / d.kv_group;
        for i in 0..d.n_queries {
            let score = |j: usize| -> f64 {
                if d.causal != 0 && j as isize > i as isize + d.causal_offset {
                    return f64::NEG_INFINITY;
                }
                let (q, k) = (
                    &q[at(d.q_stride, batch, head, i)..],
                    &k[at(d.k_stride, batch, kv, j)..],
                );
                let dot: f64 = (0..d.depth)
                    .map(|c| f64::from(q[c]) * f64::from(k[c]))
                    .sum();
                dot * f64::from(d.scale)
                    + mask.map_or(0.0, |mask| {
                        f64::from(mask[at(d.mask_stride, batch, head, i) + j])
                    })
            };
            let scores: Vec<f64> = (0..d.n_keys).map(score).collect();
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - largest).exp()).collect();
            let sum: f64 = weights.iter().sum();
            for c in 0..d.value_depth {
                let dot: f64 = weights
                    .iter()
                    .enumerate()
                    .map(|(j, w)| w * f64::from(v[at(d.v_stride, batch, kv, j) + c]))
                    .sum();
                out[at(d.o_stride, batch, head, i) + c] = dot / sum;
            }
        }
    }
    out
}

#[test]
fn attention_agrees_with_the_reference() {
    let mut rng = Rng(81);
    for isa in Isa::available() {
        for round in 0..240 {
            let batch = rng.pick(&[1, 2]);
            let (few, many) = ([1, 1, 2, 3, 4, 8, 9], [1, 3, 17, 70, 190]);
            let (heads, n_queries) = match round % 4 {
                0 => (rng.pick(&[2, 4]), rng.pick(&many)),
                _ => (rng.pick(&[2, 4, 12]), rng.pick(&few)),
            };
            let any = 1 + rng.below(530);
            let n_keys = rng.pick(&[1, 5, 64, 257, 530, any]);
            let depth = rng.pick(&[1, 4, 16, 33, 64]);
            let mut d = AttentionDesc::new(Isa::current(), batch, heads, n_queries, n_keys, depth);
            (d.isa, d.kv_group, d.value_depth) = (
                isa as u32,
                rng.pick(&[1, 2, heads]),
                rng.pick(&[depth, 7, 150]),
            );
            d.query_block = rng.pick(&[64, 5, 190]);
            d.scale *= rng.pick(&[1.0, -1.0]);
            // Projections' own layout, [batch, rows, heads, depth], as often as separate heads.
            let strides = |rows: usize, heads: usize, depth: usize, fused: bool| match fused {
                true => [rows * heads * depth, depth, heads * depth].map(|s| s as isize),
                false => [rows * heads * depth, rows * depth, depth].map(|s| s as isize),
            };
            let (kv_heads, fused) = (heads / d.kv_group, rng.below(2) == 0);
            d.q_stride = strides(n_queries, heads, depth, fused);
            d.k_stride = strides(n_keys, kv_heads, depth, fused);
            d.v_stride = strides(n_keys, kv_heads, d.value_depth, fused);
            d.o_stride = strides(n_queries, heads, d.value_depth, fused);
            if rng.below(4) == 0 {
                (d.k_stride[1], d.v_stride[1]) = (0, 0);
            }
            d.causal = rng.pick(&[0, 1]);
            d.causal_offset = rng.pick(&[n_keys as isize - n_queries as isize, 2]).max(0);
            let mask_row = n_keys as isize;
            let mask_head = n_queries as isize * mask_row;
            d.mask_stride = rng.pick(&[[0, mask_head, mask_row], [0, 0, mask_row], [0; 3]]);
            let with_mask = rng.below(2) == 0;
            let q: Vec<f32> = rng
                .vec(batch * heads * n_queries * depth)
                .iter()
                .map(|x| x * 6.0)
                .collect();
            let k: Vec<f32> = rng
                .vec(batch * kv_heads * n_keys * depth)
                .iter()
                .map(|x| x * 3.0)
                .collect();
            let v = rng.vec(batch * kv_heads * n_keys * d.value_depth);
            // Some keys hidden, never the first, so that every query sees one.
            let mask: Vec<f32> = (0..heads * n_queries * n_keys)
                .map(|i| {
                    if i % n_keys > 0 && rng.below(4) == 0 {
                        f32::NEG_INFINITY
                    } else {
                        rng.unit()
                    }
                })
                .collect();
            let mut o = vec![f32::NAN; batch * heads * n_queries * d.value_depth];
            let mut workspace = vec![f32::NAN; d.workspace_bytes() / 4];
            let ptrs = [
                q.as_ptr() as *mut u8,
                k.as_ptr() as *mut u8,
                o.as_mut_ptr().cast(),
                workspace.as_mut_ptr().cast(),
                v.as_ptr() as *mut u8,
                if with_mask {
                    mask.as_ptr() as *mut u8
                } else {
                    std::ptr::null_mut()
                },
            ];
            let run = |begin: usize, end: usize| {
                // SAFETY: the buffers have the sizes that the descriptor describes.
                let status = unsafe { gm_attention_f32(&d, ptrs.as_ptr(), begin, end) };
                assert_eq!(status, OK);
            };
            let n = d.n_items();
            (0..n).for_each(|i| run(i, i + 1));
            let alone = o.clone();
            o.fill(f32::NAN);
            run(n / 2, n);
            run(0, n / 2);
            assert_eq!(o, alone, "{isa} mask {with_mask} {d:?}");
            let want = reference(&d, &q, &k, &v, with_mask.then_some(&mask[..]), o.len());
            assert_close(&o, &want, 2e-5, &format!("{isa} mask {with_mask} {d:?}"));
        }
    }
}

/// A NaN or an infinite score makes its query's output NaN and no other's; blocks of keys that are
/// all hidden count for nothing.
#[test]
fn scores_that_are_no_numbers_stay_in_their_row() {
    let mut rng = Rng(33);
    for isa in Isa::available() {
        let sizes = [1, 5, 16, 49, 64, 100, 256, 300, 520];
        for (n_keys, rows) in sizes.into_iter().flat_map(|n| [(n, 4), (n, 12)]) {
            let mut d = AttentionDesc::new(isa, 1, 1, rows, n_keys, 8);
            d.mask_stride = [0, 0, n_keys as isize];
            let (q, k, v) = (rng.vec(8 * rows), rng.vec(8 * n_keys), rng.vec(8 * n_keys));
            let mut mask = vec![0f32; rows * n_keys];
            let hidden = n_keys - 1 - rng.below(n_keys.min(20));
            mask[..hidden].fill(f32::NEG_INFINITY);
            let mut want = mask.clone();
            // The NaN is alone among hidden keys, the infinity among others.
            let nan = rng.below(n_keys);
            mask[n_keys..2 * n_keys].fill(f32::NEG_INFINITY);
            mask[n_keys + nan] = f32::NAN;
            mask[2 * n_keys + rng.below(n_keys)] = f32::INFINITY;
            want[n_keys..].fill(0.0);
            let run = |mask: &[f32]| {
                let mut o = vec![0f32; 8 * rows];
                let mut workspace = vec![f32::NAN; d.workspace_bytes() / 4];
                let ptrs = [
                    q.as_ptr() as *mut u8,
                    k.as_ptr() as *mut u8,
                    o.as_mut_ptr().cast(),
                    workspace.as_mut_ptr().cast(),
                    v.as_ptr() as *mut u8,
                    mask.as_ptr() as *mut u8,
                ];
                // SAFETY: the buffers have the sizes that the descriptor describes.
                let status = unsafe { gm_attention_f32(&d, ptrs.as_ptr(), 0, d.n_items()) };
                assert_eq!(status, OK);
                o
            };
            let (got, without) = (run(&mask), run(&want));
            assert!(
                got[8..24].iter().all(|x| x.is_nan()),
                "{isa} {n_keys}: {got:?}"
            );
            assert_eq!((&got[..8], &got[24..]), (&without[..8], &without[24..]));
            let expected = reference(&d, &q, &k, &v, Some(&want), 8 * rows);
            assert_close(&without, &expected, 2e-5, &format!("{isa} {n_keys}"));
        }
    }
}

/// The first two of three queries see no key, the third the first one; and the same of a group of
/// three heads.
#[test]
fn queries_that_see_no_key_give_nan() {
    let (q, k, v) = (vec![1f32; 12], vec![1f32; 20], Rng(5).vec(20));
    let run = |d: &AttentionDesc| {
        let mut o = vec![0f32; 12];
        let mut workspace = vec![f32::NAN; d.workspace_bytes() / 4];
        let ptrs = [
            q.as_ptr() as *mut u8,
            k.as_ptr() as *mut u8,
            o.as_mut_ptr().cast(),
            workspace.as_mut_ptr().cast(),
            v.as_ptr() as *mut u8,
            std::ptr::null_mut(),
        ];
        // SAFETY: the buffers have the sizes that the descriptor describes.
        let status = unsafe { gm_attention_f32(d, ptrs.as_ptr(), 0, d.n_items()) };
        assert_eq!(status, OK);
        o
    };
    for isa in Isa::available() {
        let mut d = AttentionDesc::new(isa, 1, 1, 3, 5, 4);
        (d.causal, d.causal_offset) = (1, -2);
        let o = run(&d);
        assert!(o[..8].iter().all(|x| x.is_nan()), "{isa}: {o:?}");
        assert_eq!(o[8..], v[..4], "{isa}");
        let mut d = AttentionDesc::new(isa, 1, 3, 1, 5, 4);
        (d.kv_group, d.causal, d.causal_offset) = (3, 1, 0);
        assert_eq!(run(&d), v[..4].repeat(3), "{isa}");
        d.causal_offset = -1;
        assert!(run(&d).iter().all(|x| x.is_nan()), "{isa}");
    }
}

/// Rounding errors of large scores are larger than the exponents of all weights.
#[test]
fn the_largest_of_huge_scores_takes_all() {
    for isa in Isa::available() {
        for (n_queries, n_keys, chosen) in
            [(1, 300, 3), (1, 300, 290), (20, 300, 3), (20, 300, 290)]
        {
            let d = AttentionDesc::new(isa, 1, 1, n_queries, n_keys, 64);
            let q = vec![13681f32; n_queries * 64];
            let mut k = vec![0f32; n_keys * 64];
            k[chosen * 64..][..64].fill(13681.0);
            let v = Rng(6).vec(n_keys * 64);
            let mut o = vec![0f32; n_queries * 64];
            let mut workspace = vec![f32::NAN; d.workspace_bytes() / 4];
            let ptrs = [
                q.as_ptr() as *mut u8,
                k.as_ptr() as *mut u8,
                o.as_mut_ptr().cast(),
                workspace.as_mut_ptr().cast(),
                v.as_ptr() as *mut u8,
                std::ptr::null_mut(),
            ];
            // SAFETY: the buffers have the sizes that the descriptor describes.
            let status = unsafe { gm_attention_f32(&d, ptrs.as_ptr(), 0, d.n_items()) };
            assert_eq!(status, OK);
            let want = v[chosen * 64..][..64].repeat(n_queries);
            assert_eq!(o, want, "{isa} {n_queries} {chosen}");
        }
    }
}
