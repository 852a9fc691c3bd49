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
use crate::epilogue::{Epilogue, MAX_BATCH};
use crate::gemm::Product;
use crate::gemm::tile::Lhs;
use crate::isa::Isa;
use crate::pack::{pack_matrix, packed_len};
use crate::quantize::Quantize;
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

/// Queries of a head that take keys and values where they lie, at most. Packed ones are as fast for 10
/// rows of AVX-512, 14 of AVX2 and 2 of the portable form. Rows of an item do not count: bits do not
/// depend on how items are shared.
const fn few_rows(isa: Isa) -> usize {
    match isa {
        Isa::Portable => 1,
        _ => 8,
    }
}

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
        let desc = self.grouped().unwrap_or(*self);
        Isa::from_u32(self.isa).map_or(0, |isa| Layout::new(&desc, isa).elements * size_of::<f32>())
    }

    /// The same attention with heads that share keys and values as the queries of one head, where heads
    /// have one query each: keys and values are read once for as many of them as a call computes.
    fn grouped(&self) -> Option<AttentionDesc> {
        let group = match (self.k_stride[1], self.v_stride[1]) {
            (0, 0) => self.heads,
            _ => self.kv_group,
        };
        let step = |[b, h, _]: [isize; 3]| [b, h.saturating_mul(group as isize), h];
        let applies = self.n_queries == 1
            && group > 1
            && self.heads.is_multiple_of(group)
            && self.q_stride[1] >= 0
            && self.o_stride[1] >= 0;
        applies.then(|| AttentionDesc {
            causal: 0,
            n_keys: self.visible(0),
            heads: self.heads / group,
            kv_group: 1,
            n_queries: group,
            q_stride: step(self.q_stride),
            o_stride: step(self.o_stride),
            mask_stride: step(self.mask_stride),
            query_block: group,
            ..*self
        })
    }

    /// Number of keys that query `i` sees.
    fn visible(&self, i: usize) -> usize {
        if self.causal == 0 {
            return self.n_keys;
        }
        let end = i as isize + self.causal_offset + 1;
        (end.max(0) as usize).min(self.n_keys)
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
    let end = end.min(desc.n_items());
    // SAFETY: the pointers cover the descriptor's operands.
    unsafe {
        match desc.grouped() {
            Some(grouped) => groups(isa, &grouped, ptrs, begin..end),
            None => blocks(isa, desc, ptrs, begin..end),
        }
    }
    OK
}

/// Computes blocks of queries.
///
/// # Safety
/// As for [`gm_attention_f32`].
unsafe fn blocks(isa: Isa, desc: &AttentionDesc, ptrs: *const *mut u8, items: Range<usize>) {
    let n_blocks = desc.n_queries.div_ceil(desc.query_block);
    for item in items {
        let first = item % n_blocks * desc.query_block;
        // SAFETY: by contract.
        unsafe {
            let head = Head::new(isa, desc, ptrs, item / n_blocks);
            head.queries(first, desc.query_block.min(desc.n_queries - first));
        }
    }
}

/// Computes rows of a [`AttentionDesc::grouped`] attention, each an item; those of one head together.
///
/// # Safety
/// As for [`gm_attention_f32`].
unsafe fn groups(isa: Isa, desc: &AttentionDesc, ptrs: *const *mut u8, items: Range<usize>) {
    let mut item = items.start;
    while item < items.end {
        let first = item % desc.n_queries;
        let n = (desc.n_queries - first).min(items.end - item);
        // SAFETY: by contract.
        unsafe { Head::new(isa, desc, ptrs, item / desc.n_queries).queries(first, n) };
        item += n;
    }
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
    /// Packed, or rows of keys or values.
    b: *const f32,
    /// Distance of keys or values.
    ldb: isize,
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
        let n_keys = d.visible(first + n - 1);
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
                if d.n_queries <= few_rows(self.isa) {
                    self.few(first, n, &keys);
                    continue;
                }
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
        let (k, v) = self.rows_of(keys);
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

    /// The first row of the keys and of the values of `keys`.
    fn rows_of(&self, keys: &Range<usize>) -> (*const f32, *const f32) {
        let (d, at) = (self.desc, keys.start as isize);
        (
            self.k.wrapping_offset(at * d.k_stride[2]),
            self.v.wrapping_offset(at * d.v_stride[2]),
        )
    }

    /// Adds the part of `keys`, which are packed, to the output of the item's queries `part`; the
    /// item's first query is `first`.
    ///
    /// # Safety
    /// As for [`Head::queries`].
    unsafe fn block(&self, first: usize, part: Range<usize>, keys: &Range<usize>) {
        let mut products = self.products(first + part.start, part.len(), keys);
        products[0].b = self.workspace;
        products[1].b = self.workspace.wrapping_add(self.layout.values);
        // SAFETY: rows of the inputs, and parts of the workspace as large as the layout counted.
        unsafe {
            self.product(&products[0]);
            dispatch(self.isa, self.scores_of(first, &part, keys));
            self.product(&products[1]);
        }
    }

    /// Adds the part of `keys` to the output of queries `first..first + n`, a few.
    ///
    /// # Safety
    /// As for [`Head::queries`].
    unsafe fn few(&self, first: usize, n: usize, keys: &Range<usize>) {
        let [dot, weigh] = self.products(first, n, keys);
        // SAFETY: rows of the inputs, and parts of the workspace as large as the layout counted.
        unsafe {
            dispatch(self.isa, Dots(dot));
            dispatch(self.isa, self.scores_of(first, &(0..n), keys));
            dispatch(self.isa, WeightedSums(weigh));
        }
    }

    /// The products of `n` queries, `row` being the first, with keys where they lie, and of their
    /// weights with values.
    fn products(&self, row: usize, n: usize, keys: &Range<usize>) -> [MatMul; 2] {
        let (d, layout) = (self.desc, &self.layout);
        let scores = self.workspace.wrapping_add(layout.scores);
        let (k, v) = self.rows_of(keys);
        let dot = MatMul {
            m: n,
            n: keys.len(),
            k: d.depth,
            a: self.q.wrapping_offset(row as isize * d.q_stride[2]),
            lda: d.q_stride[2],
            b: k,
            ldb: d.k_stride[2],
            c: scores,
            ldc: layout.score_ld,
            accumulate: false,
        };
        let weigh = MatMul {
            m: n,
            n: d.value_depth,
            k: keys.len(),
            a: scores,
            lda: layout.score_ld as isize,
            b: v,
            ldb: d.v_stride[2],
            c: self.out_row(row),
            ldc: d.o_stride[2] as usize,
            accumulate: keys.start > 0,
        };
        [dot, weigh]
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

/// Dot products of rows of `a` with rows of `b`.
struct Dots(MatMul);

impl Task for Dots {
    type Out = ();

    /// Safety: `a` and `b` are readable for `m` and `n` rows of `k` elements, `c` is writable.
    #[inline(always)]
    unsafe fn run<S: Simd>(self, s: S) {
        let p = &self.0;
        for j in (0..p.n).step_by(S::LANES) {
            let rest = p.n - j;
            let b = p.b.wrapping_offset(j as isize * p.ldb);
            for i in 0..p.m {
                // SAFETY: row `i`, and at most `rest` rows of `b`.
                unsafe {
                    let a = p.a.wrapping_offset(i as isize * p.lda);
                    let dots = match rest >= S::LANES {
                        true => self.dots::<S, false>(s, a, b, S::LANES),
                        false => self.dots::<S, true>(s, a, b, rest),
                    };
                    s.store_n(p.c.add(i * p.ldc + j), rest, dots);
                }
            }
        }
    }
}

impl Dots {
    /// The products of row `a` with a vector's lanes of rows of `b`, of which there are `n`.
    ///
    /// # Safety
    /// The rows are readable.
    #[inline(always)]
    unsafe fn dots<S: Simd, const PARTIAL: bool>(
        &self,
        s: S,
        a: *const f32,
        b: *const f32,
        n: usize,
    ) -> S::F {
        let (depth, ldb) = (self.0.k, self.0.ldb);
        // Lanes without a row take the last one.
        let row = |r: usize| match PARTIAL {
            true => b.wrapping_offset(r.min(n - 1) as isize * ldb),
            false => b.wrapping_offset(r as isize * ldb),
        };
        let (mut acc, mut c) = ([s.zero(); 16], 0);
        // SAFETY: whole vectors, then a partial one, of each row.
        unsafe {
            while c + S::LANES <= depth {
                let x = s.load(a.add(c));
                for (r, acc) in acc.iter_mut().enumerate().take(S::LANES) {
                    *acc = s.mul_acc(x, s.load(row(r).add(c)), *acc);
                }
                c += S::LANES;
            }
            if c < depth {
                let x = s.load_n(a.add(c), depth - c);
                for (r, acc) in acc.iter_mut().enumerate().take(S::LANES) {
                    *acc = s.mul_acc(x, s.load_n(row(r).add(c), depth - c), *acc);
                }
            }
        }
        s.sums(acc)
    }
}

/// Sums of rows of `b` with weights `a`.
struct WeightedSums(MatMul);

impl Task for WeightedSums {
    type Out = ();

    /// Safety: `a` is readable for `m` rows of `k` elements, `b` for `k` rows of `n` elements, `c` is
    /// writable, and readable if the product adds to it.
    #[inline(always)]
    unsafe fn run<S: Simd>(self, s: S) {
        let mut i = 0;
        while i < self.0.m {
            // SAFETY: as many rows as there are.
            i += unsafe {
                match self.0.m - i {
                    1 => self.rows::<S, 1>(s, i),
                    2 | 3 => self.rows::<S, 2>(s, i),
                    _ => self.rows::<S, 4>(s, i),
                }
            };
        }
    }
}

impl WeightedSums {
    /// Rows `i..i + R`, whose number it returns.
    ///
    /// # Safety
    /// As for `run`.
    #[inline(always)]
    unsafe fn rows<S: Simd, const R: usize>(&self, s: S, i: usize) -> usize {
        // Sums that are in registers together with what is added to them.
        let n_sums = if S::LANES == 16 { 16 } else { 8 };
        let mut j = 0;
        while j < self.0.n {
            let n = (self.0.n - j).div_ceil(S::LANES).min(n_sums / R);
            // SAFETY: at most one vector of `n` is partial.
            j += S::LANES
                * unsafe {
                    match n {
                        1 => self.tile::<S, R, 1>(s, i, j),
                        2 | 3 => self.tile::<S, R, 2>(s, i, j),
                        4..=7 => self.tile::<S, R, 4>(s, i, j),
                        _ => self.tile::<S, R, 8>(s, i, j),
                    }
                };
        }
        R
    }

    /// `R` rows from `i` of `V` vectors of columns from `j`; the last vector may be partial. Returns
    /// `V`.
    ///
    /// # Safety
    /// As for `run`.
    #[inline(always)]
    unsafe fn tile<S: Simd, const R: usize, const V: usize>(
        &self,
        s: S,
        i: usize,
        j: usize,
    ) -> usize {
        let p = &self.0;
        let rest = p.n - j - (V - 1) * S::LANES;
        let mut acc = [[s.zero(); V]; R];
        // SAFETY: weights of rows, and rows of the output.
        unsafe {
            let (a, mut b) = (p.a.wrapping_offset(i as isize * p.lda), p.b.wrapping_add(j));
            for l in 0..p.k {
                let row = load_row::<S, V>(s, b, rest);
                for (r, acc) in acc.iter_mut().enumerate() {
                    let weight = s.splat(*a.offset(r as isize * p.lda).add(l));
                    for (acc, &x) in acc.iter_mut().zip(&row) {
                        *acc = s.mul_acc(weight, x, *acc);
                    }
                }
                b = b.wrapping_offset(p.ldb);
            }
            for (r, &acc) in acc.iter().enumerate() {
                self.store(s, p.c.add((i + r) * p.ldc + j), acc, rest);
            }
        }
        V
    }

    /// Stores a row's sums at `c`, or adds them; the last vector has `rest` lanes.
    ///
    /// # Safety
    /// As for `run`.
    #[inline(always)]
    unsafe fn store<S: Simd, const V: usize>(
        &self,
        s: S,
        c: *mut f32,
        mut sums: [S::F; V],
        rest: usize,
    ) {
        // SAFETY: by contract.
        unsafe {
            if self.0.accumulate {
                let before = load_row::<S, V>(s, c, rest);
                for (sum, &x) in sums.iter_mut().zip(&before) {
                    *sum = s.add(x, *sum);
                }
            }
            for (v, &sum) in sums.iter().enumerate() {
                s.store_n(c.add(v * S::LANES), rest + (V - 1 - v) * S::LANES, sum);
            }
        }
    }
}

/// `V` vectors of a row, the last of `rest` lanes.
///
/// # Safety
/// They are readable.
#[inline(always)]
unsafe fn load_row<S: Simd, const V: usize>(s: S, x: *const f32, rest: usize) -> [S::F; V] {
    std::array::from_fn(|v| {
        let x = x.wrapping_add(v * S::LANES);
        // SAFETY: by contract.
        unsafe {
            match v + 1 < V || rest >= S::LANES {
                true => s.load(x),
                false => s.load_n(x, rest),
            }
        }
    })
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
mod tests;
