// Lines by blocks: running sums, and sorted candidates.

// The sum of the values of all threads up to the own one, without it if EXCLUSIVE; `all` becomes that of the whole block.
template <int BLOCK, bool EXCLUSIVE, class T> GM_DEVICE T gm_running(T value, T& all) {
    __shared__ T of_warp[BLOCK / 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    T sum = value;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const T other = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum = gm_sum()(other, sum);
    }
    if (lane == 31) of_warp[warp] = sum;
    if (EXCLUSIVE) {
        sum = __shfl_up_sync(0xffffffffu, sum, 1);
        if (lane == 0) sum = T(0);
    }
    __syncthreads();
    T before = T(0);
    all = T(0);
#pragma unroll
    for (int w = 0; w < BLOCK / 32; ++w) {
        if (w == warp) before = all;
        all = gm_sum()(all, of_warp[w]);
    }
    __syncthreads();
    return gm_sum()(before, sum);
}

// Whether the element a at position i comes before b at j, least first: NaN after all others, the first of equals first.
struct gm_ascending {
    template <class T, class I> GM_DEVICE bool operator()(T a, I i, T b, I j) const {
        const bool before = a < b || (b != b && a == a);
        const bool after = b < a || (a != a && b == b);
        return before || (!after && i < j);
    }
};

// Sorts the first `count` of N candidates (Batcher, 1968); N is a power of two. What is behind them is `worst`, at a position behind all. All threads
// of the block arrive together, and leave so.
template <int BLOCK, int N, class T, class I, class F>
GM_DEVICE void gm_sort(T (&values)[N], I (&positions)[N], int count, T worst, I behind, F better) {
    int size = 32;
    while (size < count) size *= 2;
    for (int i = count + threadIdx.x; i < size; i += BLOCK) {
        values[i] = worst;
        positions[i] = behind;
    }
    __syncthreads();
    for (int run = 2; run <= size; run *= 2) {
        for (int step = run / 2; step > 0; step /= 2) {
            for (int t = threadIdx.x; t < size / 2; t += BLOCK) {
                const int i = t / step * 2 * step + t % step, j = i + step;
                const bool forward = (i & run) == 0;
                const T a = values[i], b = values[j];
                const I p = positions[i], q = positions[j];
                if (better(b, q, a, p) == forward) {
                    values[i] = b, values[j] = a;
                    positions[i] = q, positions[j] = p;
                }
            }
            __syncthreads();
        }
    }
}
