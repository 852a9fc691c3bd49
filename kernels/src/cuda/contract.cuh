// Products of tiles in shared memory, for any element type.
//
// A block of (BM / TM) * (BN / TN) threads holds a BM x BN tile of the result, TM x TN elements in the registers of each thread. Both
// operands' tiles are stored with k outermost. A thread's rows and columns come in runs of four, so that it reads four elements at a time.

// Distance of rows in shared memory: runs of four stay aligned, and columns of the left-hand side's tile fall into different banks.
template <int N> GM_DEVICE constexpr int gm_pitch() { return N + 4; }

// Row (or column) i of the thread number t in its direction, within a tile of N with T elements per thread.
template <int N, int T> GM_DEVICE int gm_of_tile(int t, int i) { return i / 4 * (4 * N / T) + t * 4 + i % 4; }

// acc += a * b; floats in one rounding.
GM_DEVICE f32 gm_multiply_add(f32 a, f32 b, f32 acc) { return fmaf(a, b, acc); }
GM_DEVICE f64 gm_multiply_add(f64 a, f64 b, f64 acc) { return fma(a, b, acc); }
template <class T> GM_DEVICE T gm_multiply_add(T a, T b, T acc) { return gm_add(gm_mul(a, b), acc); }

// Adds the product of the tiles to the thread's accumulators.
template <int BM, int BN, int BK, int TM, int TN, class T>
GM_DEVICE void gm_multiply(const T* lhs, const T* rhs, T (&acc)[TM][TN]) {
    const int tx = threadIdx.x % (BN / TN), ty = threadIdx.x / (BN / TN);
#pragma unroll
    for (int k = 0; k < BK; ++k) {
        T a[TM], b[TN];
#pragma unroll
        for (int i = 0; i < TM; ++i) a[i] = lhs[k * gm_pitch<BM>() + gm_of_tile<BM, TM>(ty, i)];
#pragma unroll
        for (int j = 0; j < TN; ++j) b[j] = rhs[k * gm_pitch<BN>() + gm_of_tile<BN, TN>(tx, j)];
#pragma unroll
        for (int i = 0; i < TM; ++i) {
#pragma unroll
            for (int j = 0; j < TN; ++j) acc[i][j] = gm_multiply_add(a[i], b[j], acc[i][j]);
        }
    }
}
