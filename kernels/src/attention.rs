//! Attention in f32: `o = softmax(q k^T * scale + mask) v`. The scores never leave the cache.
//!
//! Keys and values pass in blocks; each query row keeps its largest score so far and the sum of
//! exponentials relative to it, and its output is rescaled when a block raises the maximum (Milakov
//! and Gimelshein, arXiv:1805.02867; Dao et al., arXiv:2205.14135).
//!
//! | operand | shape |
//! |---|---|
//! | `q` | `[batch, heads, n_queries, depth]` |
//! | `k` | `[batch, heads / kv_group, n_keys, depth]` |
//! | `v` | `[batch, heads / kv_group, n_keys, value_depth]` |
//! | `o` | `[batch, heads, n_queries, value_depth]` |
//!
//! Strides of the first three axes are free, the last is contiguous. Item `i` is block
//! `(batch, head, query block)`, query blocks varying fastest.

use crate::descriptor::descriptor;
use crate::epilogue::{Epilogue, MAX_BATCH, Quantize};
use crate::gemm::Product;
use crate::gemm::tile::Lhs;
use crate::isa::Isa;
use crate::pack::{pack_matrix, packed_len};
use crate::rows::BlockRows;
use crate::simd::{Simd, Task, dispatch};
use crate::{INVALID, LHS, OK, OPERANDS, OUT, RHS, UNSUPPORTED_ISA, WORKSPACE, pointer};
use std::ops::Range;

/// Query rows per item, at most: packing the keys and values costs about as much as 25 rows.
const QUERY_BLOCK: usize = 1024;
/// The same where queries see the keys before them only, and an item only those of its last query.
const CAUSAL_BLOCK: usize = 128;
/// Query rows whose scores are computed at a time, 4 tiles of AVX-512: few, so that the scores do not
/// leave the cache's nearest parts; with 168 attention took 3 % longer.
const SCORE_ROWS: usize = 56;
/// Query rows of the smallest block that threads share an attention by.
const LEAST_BLOCK: usize = 48;
/// Keys per block: scores, packed keys and packed values of usual depths fit the second-level
/// cache.
const KEY_BLOCK: usize = 256;

/// An attention. Strides are (batch, head, row), in elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionDesc {
    /// The [`Isa`] to use, as its number.
    pub isa: u32,
    /// Nonzero if query `i` sees keys `j <= i + causal_offset` only.
    pub causal: u32,
    /// See `causal`.
    pub causal_offset: isize,
    /// Factor of the scores.
    pub scale: f32,
    /// Unused, zero.
    pub reserved: u32,
    /// Batch elements.
    pub batch: usize,
    /// Heads of queries and outputs.
    pub heads: usize,
    /// Query heads that share a head of keys and values.
    pub kv_group: usize,
    /// Query rows.
    pub n_queries: usize,
    /// Key and value rows.
    pub n_keys: usize,
    /// Elements of a query and a key.
    pub depth: usize,
    /// Elements of a value.
    pub value_depth: usize,
    /// Queries.
    pub q_stride: [isize; 3],
    /// Keys.
    pub k_stride: [isize; 3],
    /// Values.
    pub v_stride: [isize; 3],
    /// Output.
    pub o_stride: [isize; 3],
    /// Mask, added to the scaled scores; its key axis is contiguous. 0 broadcasts.
    pub mask_stride: [isize; 3],
    /// Query rows per item.
    pub query_block: usize,
}

descriptor!(AttentionDesc {
    isa,
    causal,
    causal_offset,
    scale,
    reserved,
    batch,
    heads,
    kv_group,
    n_queries,
    n_keys,
    depth,
    value_depth,
    q_stride,
    k_stride,
    v_stride,
    o_stride,
    mask_stride,
    query_block,
});

impl AttentionDesc {
    /// An attention over contiguous `[batch, heads, rows, depth]` tensors for an instruction set,
    /// scaled by `1 / sqrt(depth)`.
    pub fn new(
        isa: Isa,
        batch: usize,
        heads: usize,
        n_queries: usize,
        n_keys: usize,
        depth: usize,
    ) -> AttentionDesc {
        let strides = |rows: usize| {
            [
                (heads * rows * depth) as isize,
                (rows * depth) as isize,
                depth as isize,
            ]
        };
        AttentionDesc {
            isa: isa as u32,
            causal: 0,
            causal_offset: 0,
            scale: 1.0 / (depth as f32).sqrt(),
            reserved: 0,
            batch,
            heads,
            kv_group: 1,
            n_queries,
            n_keys,
            depth,
            value_depth: depth,
            q_stride: strides(n_queries),
            k_stride: strides(n_keys),
            v_stride: strides(n_keys),
            o_stride: strides(n_queries),
            mask_stride: [0; 3],
            query_block: CAUSAL_BLOCK.min(n_queries.max(1)),
        }
    }

    /// Chooses blocks of queries, smaller ones where there are fewer than four for each thread.
    pub fn plan(&mut self, n_threads: usize) {
        let most = if self.causal == 0 {
            QUERY_BLOCK
        } else {
            CAUSAL_BLOCK
        };
        let even = |n_blocks: usize| self.n_queries.div_ceil(n_blocks.max(1)).max(1);
        self.query_block = even(self.n_queries.div_ceil(most));
        let is_shared = n_threads > 1 && self.n_items() < 4 * n_threads;
        if is_shared {
            let heads = (self.batch * self.heads).max(1);
            let rows = even((4 * n_threads).div_ceil(heads));
            self.query_block = rows.clamp(LEAST_BLOCK.min(self.query_block), self.query_block);
        }
    }

    /// Items of the whole attention.
    pub fn n_items(&self) -> usize {
        self.batch * self.heads * self.n_queries.div_ceil(self.query_block.max(1))
    }

    /// Bytes that each concurrent call needs at `ptrs[WORKSPACE]`.
    pub fn workspace_bytes(&self) -> usize {
        Isa::from_u32(self.isa).map_or(0, |isa| Layout::new(self, isa).elements * size_of::<f32>())
    }
}

/// Offsets of the workspace's parts, in elements, each a multiple of 64 bytes.
struct Layout {
    values: usize,
    scores: usize,
    /// Largest score so far, per query.
    largest: usize,
    /// Sum of exponentials, per query.
    sums: usize,
    /// Elements between rows of scores.
    score_ld: usize,
    elements: usize,
}

impl Layout {
    fn new(desc: &AttentionDesc, isa: Isa) -> Layout {
        let keys = KEY_BLOCK.min(desc.n_keys.max(1));
        let round = |n: usize| n.next_multiple_of(16);
        let values = round(packed_len(isa, desc.depth, keys));
        let scores = values + round(packed_len(isa, keys, desc.value_depth));
        // Rows at distances of a power of two would compete for the same cache sets.
        let score_ld = round(keys) + 16;
        let largest = scores + SCORE_ROWS.min(desc.query_block) * score_ld;
        let sums = largest + round(desc.query_block);
        Layout {
            values,
            scores,
            largest,
            sums,
            score_ld,
            elements: sums + round(desc.query_block),
        }
    }
}

/// Computes items `begin..end` of an [`AttentionDesc`].
///
/// `ptrs[LHS]` is `q`, `ptrs[RHS]` is `k`, `ptrs[OPERANDS]` is `v`, `ptrs[OPERANDS + 1]` is the
/// mask or null, `ptrs[OUT]` is `o`, `ptrs[WORKSPACE]` this call's own workspace. A query that sees
/// no key gives NaN, as arithmetic has it; a weight that is no normal number counts as 0. Returns `OK`,
/// `INVALID` or `UNSUPPORTED_ISA`.
///
/// # Safety
/// The pointers cover the descriptor's operands; no other thread writes these items' part of `o`,
/// or uses the workspace.
pub unsafe extern "C" fn gm_attention_f32(
    desc: *const AttentionDesc,
    ptrs: *const *mut u8,
    begin: usize,
    end: usize,
) -> u32 {
    // SAFETY: the descriptor is valid by contract.
    let desc = unsafe { &*desc };
    let Some(isa) = Isa::usable(desc.isa) else {
        return UNSUPPORTED_ISA;
    };
    if desc.query_block == 0 || desc.kv_group == 0 || desc.q_stride[2] < 0 || desc.o_stride[2] < 0 {
        return INVALID;
    }
    let n_blocks = desc.n_queries.div_ceil(desc.query_block);
    for item in begin..end.min(desc.n_items()) {
        let first = item % n_blocks * desc.query_block;
        // SAFETY: the pointers cover the descriptor's operands.
        unsafe {
            let head = Head::new(isa, desc, ptrs, item / n_blocks);
            head.queries(first, desc.query_block.min(desc.n_queries - first));
        }
    }
    OK
}

/// One head of one batch element.
struct Head<'a> {
    isa: Isa,
    desc: &'a AttentionDesc,
    layout: Layout,
    q: *const f32,
    k: *const f32,
    v: *const f32,
    o: *mut f32,
    mask: *const f32,
    workspace: *mut f32,
}

/// A product of the attention, as [`Head::product`] takes it: `c[m, n] (+)= a[m, k] @ b`.
struct MatMul {
    m: usize,
    n: usize,
    k: usize,
    a: *const f32,
    lda: isize,
    /// Packed.
    b: *const f32,
    c: *mut f32,
    ldc: usize,
    /// Adds to `c` instead of overwriting it.
    accumulate: bool,
}

impl<'a> Head<'a> {
    /// Head `index` of the `batch * heads` ones.
    ///
    /// # Safety
    /// The pointers cover the descriptor's operands.
    unsafe fn new(
        isa: Isa,
        desc: &'a AttentionDesc,
        ptrs: *const *mut u8,
        index: usize,
    ) -> Head<'a> {
        let (batch, head) = (index / desc.heads, index % desc.heads);
        let kv_head = head / desc.kv_group;
        let offset = |[b, h, _]: [isize; 3], head: usize| batch as isize * b + head as isize * h;
        // SAFETY: by contract.
        unsafe {
            let mask = pointer(ptrs, OPERANDS + 1).cast_const();
            Head {
                isa,
                desc,
                layout: Layout::new(desc, isa),
                q: pointer(ptrs, LHS).wrapping_offset(offset(desc.q_stride, head)),
                k: pointer(ptrs, RHS).wrapping_offset(offset(desc.k_stride, kv_head)),
                v: pointer(ptrs, OPERANDS).wrapping_offset(offset(desc.v_stride, kv_head)),
                o: pointer(ptrs, OUT).wrapping_offset(offset(desc.o_stride, head)),
                mask: if mask.is_null() {
                    mask
                } else {
                    mask.wrapping_offset(offset(desc.mask_stride, head))
                },
                workspace: pointer(ptrs, WORKSPACE),
            }
        }
    }
}

impl Head<'_> {
    /// Number of keys that query `i` sees.
    fn visible(&self, i: usize) -> usize {
        if self.desc.causal == 0 {
            return self.desc.n_keys;
        }
        let end = i as isize + self.desc.causal_offset + 1;
        (end.max(0) as usize).min(self.desc.n_keys)
    }

    fn out_row(&self, i: usize) -> *mut f32 {
        self.o.wrapping_offset(i as isize * self.desc.o_stride[2])
    }

    /// Computes the output of queries `first..first + n`.
    ///
    /// # Safety
    /// The pointers cover the head; the workspace is this call's own.
    unsafe fn queries(&self, first: usize, n: usize) {
        let d = self.desc;
        let (largest, sums) = (
            self.workspace.wrapping_add(self.layout.largest),
            self.workspace.wrapping_add(self.layout.sums),
        );
        let n_keys = self.visible(first + n - 1);
        // SAFETY: rows of the output and entries of the workspace that are this item's own.
        unsafe {
            for i in 0..n {
                *largest.add(i) = f32::NEG_INFINITY;
                *sums.add(i) = 0.0;
                if n_keys == 0 {
                    std::ptr::write_bytes(self.out_row(first + i), 0, d.value_depth);
                }
            }
            for start in (0..n_keys).step_by(KEY_BLOCK) {
                let keys = start..n_keys.min(start + KEY_BLOCK);
                self.pack(&keys);
                for part in (0..n).step_by(SCORE_ROWS) {
                    self.block(first, part..n.min(part + SCORE_ROWS), &keys);
                }
            }
            let divide = Divide {
                rows: n,
                cols: d.value_depth,
                out: self.out_row(first),
                ld: d.o_stride[2] as usize,
                sums,
            };
            dispatch(self.isa, divide);
        }
    }

    /// Packs the keys and the values of `keys`.
    ///
    /// # Safety
    /// As for [`Head::queries`].
    unsafe fn pack(&self, keys: &Range<usize>) {
        let (d, n_keys) = (self.desc, keys.len());
        let k = self.k.wrapping_offset(keys.start as isize * d.k_stride[2]);
        let v = self.v.wrapping_offset(keys.start as isize * d.v_stride[2]);
        let (packed_k, packed_v) = (
            self.workspace,
            self.workspace.wrapping_add(self.layout.values),
        );
        // SAFETY: rows of the inputs, and parts of the workspace as large as the layout counted.
        unsafe {
            pack_matrix(self.isa, d.depth, n_keys, k, 1, d.k_stride[2], packed_k);
            pack_matrix(
                self.isa,
                n_keys,
                d.value_depth,
                v,
                d.v_stride[2],
                1,
                packed_v,
            );
        }
    }

    /// Adds the part of `keys`, which are packed, to the output of the item's queries `part`; the
    /// item's first query is `first`.
    ///
    /// # Safety
    /// As for [`Head::queries`].
    unsafe fn block(&self, first: usize, part: Range<usize>, keys: &Range<usize>) {
        let (d, layout) = (self.desc, &self.layout);
        let scores = self.workspace.wrapping_add(layout.scores);
        let row = first + part.start;
        let dot = MatMul {
            m: part.len(),
            n: keys.len(),
            k: d.depth,
            a: self.q.wrapping_offset(row as isize * d.q_stride[2]),
            lda: d.q_stride[2],
            b: self.workspace,
            c: scores,
            ldc: layout.score_ld,
            accumulate: false,
        };
        let weigh = MatMul {
            m: part.len(),
            n: d.value_depth,
            k: keys.len(),
            a: scores,
            lda: layout.score_ld as isize,
            b: self.workspace.wrapping_add(layout.values),
            c: self.out_row(row),
            ldc: d.o_stride[2] as usize,
            accumulate: keys.start > 0,
        };
        // SAFETY: rows of the inputs, and parts of the workspace as large as the layout counted.
        unsafe {
            self.product(&dot);
            dispatch(self.isa, self.scores_of(first, &part, keys));
            self.product(&weigh);
        }
    }

    /// The scores of queries `first + part` for `keys`, for their softmax.
    fn scores_of(&self, first: usize, part: &Range<usize>, keys: &Range<usize>) -> BlockRows {
        let (d, layout, row) = (self.desc, &self.layout, first + part.start);
        let mask = self.mask.wrapping_offset(row as isize * d.mask_stride[2]);
        let of_query = |offset: usize| self.workspace.wrapping_add(offset + part.start);
        BlockRows {
            n_rows: part.len(),
            n: keys.len(),
            n_seen: match d.causal {
                0 => [keys.len() as isize, 0],
                _ => [row as isize + d.causal_offset + 1 - keys.start as isize, 1],
            },
            scores: self.workspace.wrapping_add(layout.scores),
            score_ld: layout.score_ld,
            mask: match self.mask.is_null() {
                true => self.mask,
                false => mask.wrapping_add(keys.start),
            },
            mask_ld: d.mask_stride[2],
            scale: d.scale,
            largest: of_query(layout.largest),
            sums: of_query(layout.sums),
            out: self.out_row(row),
            out_ld: d.o_stride[2] as usize,
            n_out: d.value_depth,
        }
    }

    /// # Safety
    /// The operands are readable and the output is writable.
    unsafe fn product(&self, p: &MatMul) {
        // SAFETY: no ops, so no operands.
        let epilogue = unsafe { Epilogue::resolve(&[], std::ptr::null(), [0; MAX_BATCH]) };
        let product = Product {
            isa: self.isa,
            n: p.n,
            k: p.k,
            lhs: Lhs::strided(p.a, p.lda as usize),
            b: p.b,
            c: p.c,
            ldc: p.ldc,
            accumulate: p.accumulate,
            epilogue: &epilogue,
            epilogue_col: 0,
            integers: None,
            quantize: Quantize::default(),
        };
        // SAFETY: by contract.
        unsafe { product.block(0..p.m, 0..p.n.div_ceil(self.isa.nr())) }
    }
}

/// Divides rows of the output by their sums.
struct Divide {
    rows: usize,
    cols: usize,
    out: *mut f32,
    ld: usize,
    sums: *const f32,
}

impl Task for Divide {
    type Out = ();

    /// Safety: `out` is writable for the rows, `sums` readable for as many elements.
    #[inline(always)]
    unsafe fn run<S: Simd>(self, s: S) {
        for i in 0..self.rows {
            // SAFETY: by contract; at most `cols` elements of each row.
            unsafe {
                let (row, factor) = (self.out.add(i * self.ld), s.splat(1.0 / *self.sums.add(i)));
                for j in (0..self.cols).step_by(S::LANES) {
                    let rest = self.cols - j;
                    s.store_n(row.add(j), rest, s.mul(s.load_n(row.add(j), rest), factor));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
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
            for _ in 0..60 {
                let (batch, heads) = (rng.pick(&[1, 2]), rng.pick(&[2, 4]));
                let (n_queries, n_keys) = (
                    rng.pick(&[1, 3, 17, 70, 190]),
                    rng.pick(&[1, 5, 64, 257, 530]),
                );
                let depth = rng.pick(&[4, 16, 33, 64]);
                let mut d =
                    AttentionDesc::new(Isa::current(), batch, heads, n_queries, n_keys, depth);
                (d.isa, d.kv_group, d.value_depth) =
                    (isa as u32, rng.pick(&[1, 2]), rng.pick(&[depth, 7]));
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
                d.causal = rng.pick(&[0, 1]);
                d.causal_offset = n_keys as isize - n_queries as isize;
                if d.causal_offset < 0 {
                    d.causal_offset = 0;
                }
                d.mask_stride = rng.pick(&[[0, 0, n_keys as isize], [0, 0, 0]]);
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
                let mask: Vec<f32> = (0..n_queries * n_keys)
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
                let n = d.n_items();
                for (begin, end) in [(n / 2, n), (0, n / 2)] {
                    // SAFETY: the buffers have the sizes that the descriptor describes.
                    let status = unsafe { gm_attention_f32(&d, ptrs.as_ptr(), begin, end) };
                    assert_eq!(status, OK);
                }
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
            for n_keys in [1, 5, 16, 49, 64, 100, 256, 300, 520] {
                let mut d = AttentionDesc::new(isa, 1, 1, 4, n_keys, 8);
                d.mask_stride = [0, 0, n_keys as isize];
                let (q, k, v) = (rng.vec(32), rng.vec(8 * n_keys), rng.vec(8 * n_keys));
                let mut mask = vec![0f32; 4 * n_keys];
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
                    let mut o = vec![0f32; 32];
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
                let expected = reference(&d, &q, &k, &v, Some(&want), 32);
                assert_close(&without, &expected, 2e-5, &format!("{isa} {n_keys}"));
            }
        }
    }
}
