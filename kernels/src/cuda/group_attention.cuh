// Attention by warp groups on `sm_90a` (Shah et al., arXiv:2407.08608): products by `wgmma`, tiles by the bulk copy engine.
//
// A block has 128 queries, 64 in each of two groups of four warps; one thread of a third group asks for tiles of 128 keys and of their values,
// which take turns in a ring. Scores are registers, and so are the weights that the values are multiplied by. While the values of one tile are
// multiplied, the scores of the next become weights; and while one group computes weights, the other has its products under way: they pass the
// turn by named barriers.
//
// Tiles are 128 rows of 128 bytes, 16-byte chunks permuted by the copy engine; 64 columns each, the second half of a row behind the first.

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// For D columns of queries and keys and V of values, 64 or 128.
template <class M, int D, int V, int STAGES> struct gm_group_attention {
    typedef typename M::element element;
    enum {
        rows = 128,
        box_bytes = rows * 128,
        query_bytes = D / 64 * box_bytes,
        stage_bytes = (D > V ? D : V) / 64 * box_bytes
    };
    f32 result[V / 8][4], total[2], greatest[2];

    // The ring of keys and values; the queries have barriers of their own.
    struct tiles {
        gm_ring<STAGES, stage_bytes> ring;
        u32 queries, query_parity;
        GM_DEVICE u32 query_full() const { return ring.barriers + 2 * STAGES * 8; }
        GM_DEVICE u32 query_empty() const { return query_full() + 8; }
    };

    static GM_DEVICE int group() { return __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0) - 1; }

    // Sets the barriers up. Shared memory has the queries, then the ring, then barriers.
    static GM_DEVICE tiles begin(u8* shared) {
        const u32 at = gm_shared(shared);
        const tiles t = {{at + query_bytes, at + query_bytes + STAGES * stage_bytes, 0, 0}, at, 0};
        if (threadIdx.x == 0) {
            t.ring.init(2);
            gm_barrier_init(t.query_full(), 1);
            gm_barrier_init(t.query_empty(), 2);
            gm_barriers_ready();
        }
        __syncthreads();
        return t;
    }

    // One thread asks for a block's queries, and for keys and values `start` to `end` in the order in which they are used: `load(to, barrier,
    // column, first)`, in each case, for 64 columns of the rows from `first` on.
    template <class I, class Q, class K, class W>
    static GM_DEVICE void fetch(tiles& t, I start, I end, Q queries, K keys, W values) {
        gm_barrier_wait(t.query_empty(), t.query_parity ^ 1);
        t.query_parity ^= 1;
        gm_barrier_expect(t.query_full(), query_bytes);
        for (int c = 0; c < D / 64; ++c) queries(t.queries + c * box_bytes, t.query_full(), c * 64, 0);
        for (I k = start; k < end + rows; k += rows) {
            if (k < end) ask<D>(t.ring, keys, k);
            if (k > start) ask<V>(t.ring, values, k - rows);
        }
    }
    template <int WIDTH, class I, class F> static GM_DEVICE void ask(gm_ring<STAGES, stage_bytes>& r, F load, I first) {
        gm_barrier_wait(r.empty(), r.parity ^ 1);
        gm_barrier_expect(r.full(), WIDTH / 64 * box_bytes);
        for (int c = 0; c < WIDTH / 64; ++c) load(r.tile() + c * box_bytes, r.full(), c * 64, int(first));
        r.go_on();
    }

    // A turn is passed by one group, and waited for by the other; the first group has the first one, and takes the last.
    static GM_DEVICE void first_turn() {
        if (group() == 1) pass_turn();
    }
    static GM_DEVICE void last_turn() {
        if (group() == 0) take_turn();
    }
    static GM_DEVICE void take_turn() { asm volatile("bar.sync %0, 256;" ::"r"(1 + group()) : "memory"); }
    static GM_DEVICE void pass_turn() { asm volatile("bar.arrive %0, 256;" ::"r"(2 - group()) : "memory"); }

    static GM_DEVICE void release(u32 barrier) {
        if (threadIdx.x % 128 == 0) gm_barrier_arrive(barrier);
    }

    // Waits for the next tile; gives it, and where it is given back.
    struct taken {
        u32 tile, empty;
    };
    static GM_DEVICE taken take(gm_ring<STAGES, stage_bytes>& r) {
        gm_barrier_wait(r.full(), r.parity);
        const taken t = {r.tile(), r.empty()};
        r.go_on();
        return t;
    }

    // scores = queries * keys^T, and result += weights * values; both go on.
    static GM_DEVICE void multiply_keys(u32 queries, u32 keys, f32 (&scores)[64]) {
#pragma unroll
        for (int q = 0; q < D / 16; ++q) {
            const u32 at = q / 4 * box_bytes + q % 4 * 32;
            const u64 a = gm_descriptor(queries + group() * (box_bytes / 2) + at, box_bytes), b = gm_descriptor(keys + at, box_bytes);
            M::template add<0, 0>(scores, a, b, q);
        }
        gm_products_end();
    }
    GM_DEVICE void multiply_values(const u32 (&weights)[8][4], u32 values) {
#pragma unroll
        for (int q = 0; q < 8; ++q) M::add_held(sums(), weights[q], gm_descriptor(values + q * 2048, box_bytes));
        gm_products_end();
    }
    // The result as one row of registers.
    GM_DEVICE f32 (&sums())[V / 2] { return reinterpret_cast<f32(&)[V / 2]>(result); }

    // What products read stays as it is until they have been waited for.
    static GM_DEVICE void hold(u32 (&x)[8][4]) {
#pragma unroll
        for (int q = 0; q < 8; ++q) asm volatile("" : "+r"(x[q][0]), "+r"(x[q][1]), "+r"(x[q][2]), "+r"(x[q][3])::"memory");
    }
    static GM_DEVICE void narrow(u32 (&weights)[8][4], const f32 (&scores)[16][4]) {
#pragma unroll
        for (int q = 0; q < 8; ++q) gm_fragment(weights[q], scores[2 * q], scores[2 * q + 1], element());
    }

    // The attention to keys `start` to `end`. `score(scores, k)` makes scores of products with the keys from `k` on, as far as `power` does not.
    template <class I, class S, class P> GM_DEVICE void run(tiles& t, I start, I end, S score, P power) {
        f32 scores[16][4], rest[2];
        u32 weights[8][4];
        f32(&products)[64] = reinterpret_cast<f32(&)[64]>(scores);
#pragma unroll
        for (int v = 0; v < V / 8; ++v) {
#pragma unroll
            for (int j = 0; j < 4; ++j) result[v][j] = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            total[i] = 0.0f;
            greatest[i] = gm_minus_infinity<f32>();
        }
        // The loop stays one, whatever is known of its length: see below.
        int left = int((end - start + rows - 1) / rows) - 1;
        asm volatile("" : "+r"(left));
        gm_barrier_wait(t.query_full(), t.query_parity);
        t.query_parity ^= 1;
        taken keys = take(t.ring);
        take_turn();
        gm_products_begin();
        multiply_keys(t.queries, keys.tile, products);
        gm_products_wait<0>(products);
        pass_turn();
        release(keys.empty);
        score(scores, start);
        gm_weigh(scores, greatest, total, rest, power);
        narrow(weights, scores);
        if (left > 0) keys = take(t.ring);
        for (I k = start + rows; left > 0; k += rows) {
            --left;
            take_turn();
            gm_products_begin();
            multiply_keys(t.queries, keys.tile, products);
            const taken values = take(t.ring);
            gm_products_begin();
            multiply_values(weights, values.tile);
            pass_turn();
            gm_products_wait<1>(products);
            release(keys.empty);
            score(scores, k);
            gm_weigh(scores, greatest, total, rest, power);
            // The loop in `take` keeps the wait behind the weights: ptxas moves it up as far as it can.
            if (left > 0) keys = take(t.ring);
            gm_products_wait<0>(sums());
            hold(weights);
            release(values.empty);
            gm_scale(result, rest);
            narrow(weights, scores);
        }
        release(t.query_empty());
        const taken values = take(t.ring);
        gm_products_begin();
        multiply_values(weights, values.tile);
        gm_products_wait<0>(sums());
        hold(weights);
        release(values.empty);
#pragma unroll
        for (int i = 0; i < 2; ++i) rest[i] = 1.0f / total[i];
        gm_scale(result, rest);
    }
};

#endif
