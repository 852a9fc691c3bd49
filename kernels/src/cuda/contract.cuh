// Products of tiles in shared memory, for any element type.
//
// A block of (BM / TM) * (BN / TN) threads holds a BM x BN tile of the result, TM x TN elements in the registers of each thread. Both
// operands' tiles are stored with k outermost. A thread's rows and columns come in runs of four, so that it reads four elements at a time.
// There are two tiles of each operand: one is multiplied, the other filled.

// Distance of rows in shared memory: runs of four stay aligned, and columns of the left-hand side's tile fall into different banks.
template <int N> GM_DEVICE constexpr int gm_pitch() { return N + 4; }

// Row (or column) i of the thread number t in its direction, within a tile of N with T elements per thread.
template <int N, int T> GM_DEVICE int gm_of_tile(int t, int i) { return i / 4 * (4 * N / T) + t * 4 + i % 4; }

// acc += a * b; floats in one rounding.
GM_DEVICE f32 gm_multiply_add(f32 a, f32 b, f32 acc) { return fmaf(a, b, acc); }
GM_DEVICE f64 gm_multiply_add(f64 a, f64 b, f64 acc) { return fma(a, b, acc); }
template <class T> GM_DEVICE T gm_multiply_add(T a, T b, T acc) { return gm_add(gm_mul(a, b), acc); }

// Adds the product of the tiles to the thread's accumulators. Tiles begin at multiples of 16 bytes.
template <int BM, int BN, int BK, int TM, int TN, class T>
GM_DEVICE void gm_multiply(const T* lhs, const T* rhs, T (&acc)[TM][TN]) {
    const int tx = threadIdx.x % (BN / TN), ty = threadIdx.x / (BN / TN);
#pragma unroll
    for (int k = 0; k < BK; ++k) {
        gm_run<T, 4> a[TM / 4], b[TN / 4];
#pragma unroll
        for (int i = 0; i < TM / 4; ++i) a[i] = gm_read<4>(lhs + k * gm_pitch<BM>() + gm_of_tile<BM, TM>(ty, i * 4));
#pragma unroll
        for (int j = 0; j < TN / 4; ++j) b[j] = gm_read<4>(rhs + k * gm_pitch<BN>() + gm_of_tile<BN, TN>(tx, j * 4));
#pragma unroll
        for (int i = 0; i < TM; ++i) {
#pragma unroll
            for (int j = 0; j < TN; ++j) acc[i][j] = gm_multiply_add(a[i / 4].v[i % 4], b[j / 4].v[j % 4], acc[i][j]);
        }
    }
}

// A thread may load its element at a distance from its first row (or column) if that is less than the rows left from there on. It is one
// number for all of its elements, whose distances are constants: a condition for each would take a register each.
struct gm_all_rows {};
GM_DEVICE int gm_rows_left(int rows, int first) { return rows - first; }
GM_DEVICE gm_all_rows gm_rows_left(gm_all_rows all, int) { return all; }
GM_DEVICE bool gm_is_row(int distance, int left) { return distance < left; }
GM_DEVICE bool gm_is_row(int, gm_all_rows) { return true; }

// Hides how a position was computed. Otherwise the compiler sees that all addresses grow by a constant and keeps one of 64 bits for each
// load, for which there are no registers; one multiplication gives all addresses of an operand.
GM_DEVICE void gm_opaque(int& position) { asm volatile("" : "+r"(position)); }
GM_DEVICE void gm_opaque(long long& position) { asm volatile("" : "+l"(position)); }

// The product of a block: what a thread sums up in `acc`. An operand whose neighbours lie along k is loaded so that neighbouring threads read them.
template <class T, int BM, int BN, int BK, int TM, int TN, bool LHS_ALONG_K, bool RHS_ALONG_K> struct gm_thread_product {
    enum {
        threads = BM / TM * (BN / TN),
        lhs_each = BM * BK / threads,
        rhs_each = BN * BK / threads,
        lhs_size = BK * gm_pitch<BM>(),
        stage_size = lhs_size + BK * gm_pitch<BN>()
    };
    T acc[TM][TN];

    // Place of a thread's element number i in a tile of W rows or columns, as a sum of what the thread and what the number says.
    template <int W, bool ALONG_K> static GM_DEVICE int distance(int i) {
        return ALONG_K ? i * (threads / BK) : threads < W ? i % (W / threads) * threads : 0;
    }
    template <int W, bool ALONG_K> static GM_DEVICE int along(int i) {
        const int t = threadIdx.x;
        return distance<W, ALONG_K>(i) + (ALONG_K ? t / BK : threads < W ? t : t % W);
    }
    template <int W, bool ALONG_K> static GM_DEVICE int deep(int i) {
        const int t = threadIdx.x;
        return ALONG_K ? t % BK : threads < W ? i / (W / threads) : i * (threads / W) + t / W;
    }

    // Sums up `steps` tiles, the first at `k0`: `lhs(along, deep, k0)` is an element of one of `rows`, `rhs` of one of `columns`. `shared`
    // has two stages, which no one uses before and afterwards.
    template <class I, class L, class R, class M, class N>
    GM_DEVICE void run(T* shared, I k0, int steps, L lhs, R rhs, M rows, N columns) {
        const auto rows_left = gm_rows_left(rows, along<BM, LHS_ALONG_K>(0));
        const auto columns_left = gm_rows_left(columns, along<BN, RHS_ALONG_K>(0));
        T held_lhs[lhs_each], held_rhs[rhs_each];
        const auto fetch_lhs = [&](I k) {
#pragma unroll
            for (int i = 0; i < lhs_each; ++i) {
                const bool is_row = gm_is_row(distance<BM, LHS_ALONG_K>(i), rows_left);
                held_lhs[i] = is_row ? lhs(along<BM, LHS_ALONG_K>(i), deep<BM, LHS_ALONG_K>(i), k) : T(0);
            }
        };
        const auto fetch_rhs = [&](I k) {
#pragma unroll
            for (int i = 0; i < rhs_each; ++i) {
                const bool is_column = gm_is_row(distance<BN, RHS_ALONG_K>(i), columns_left);
                held_rhs[i] = is_column ? rhs(along<BN, RHS_ALONG_K>(i), deep<BN, RHS_ALONG_K>(i), k) : T(0);
            }
        };
        const auto put_lhs = [&](T* to) {
#pragma unroll
            for (int i = 0; i < lhs_each; ++i) {
                to[deep<BM, LHS_ALONG_K>(i) * gm_pitch<BM>() + along<BM, LHS_ALONG_K>(i)] = held_lhs[i];
            }
        };
        const auto put_rhs = [&](T* to) {
#pragma unroll
            for (int i = 0; i < rhs_each; ++i) {
                to[lhs_size + deep<BN, RHS_ALONG_K>(i) * gm_pitch<BN>() + along<BN, RHS_ALONG_K>(i)] = held_rhs[i];
            }
        };
#pragma unroll
        for (int i = 0; i < TM; ++i) {
#pragma unroll
            for (int j = 0; j < TN; ++j) acc[i][j] = T(0);
        }
        fetch_lhs(k0);
        fetch_rhs(k0);
        put_lhs(shared);
        put_rhs(shared);
        __syncthreads();
        for (int step = 1; step <= steps; ++step) {
            // One operand waits in registers at a time, under half of the products each.
            I k = k0 + I(step) * BK;
            gm_opaque(k);
            T *const now = shared + (step % 2 ? 0 : stage_size), *const next = shared + (step % 2 ? stage_size : 0);
            const T *a = now, *b = now + lhs_size;
            if (step < steps) fetch_lhs(k);
            gm_multiply<BM, BN, BK / 2, TM, TN>(a, b, acc);
            if (step < steps) {
                put_lhs(next);
                fetch_rhs(k);
            }
            gm_multiply<BM, BN, BK / 2, TM, TN>(a + BK / 2 * gm_pitch<BM>(), b + BK / 2 * gm_pitch<BN>(), acc);
            if (step < steps) put_rhs(next);
            __syncthreads();
        }
    }
};
