// Reductions over groups of threads: parts of a warp, warps, or several warps of a block.

struct gm_sum {
    template <class T> GM_DEVICE T operator()(T a, T b) const { return gm_add(a, b); }
    GM_DEVICE f32 operator()(f32 a, f32 b) const { return a + b; }
    GM_DEVICE f64 operator()(f64 a, f64 b) const { return a + b; }
};
struct gm_product {
    template <class T> GM_DEVICE T operator()(T a, T b) const { return gm_mul(a, b); }
    GM_DEVICE f32 operator()(f32 a, f32 b) const { return a * b; }
    GM_DEVICE f64 operator()(f64 a, f64 b) const { return a * b; }
};
struct gm_greatest {
    template <class T> GM_DEVICE T operator()(T a, T b) const { return gm_max(a, b); }
};
struct gm_least {
    template <class T> GM_DEVICE T operator()(T a, T b) const { return gm_min(a, b); }
};

// What `op` makes of the values of the G neighbouring threads of a warp; every thread gets it.
template <int G, class T, class F> GM_DEVICE T gm_lanes(T value, F op) {
#pragma unroll
    for (int step = 1; step < G; step *= 2) value = op(value, __shfl_xor_sync(0xffffffffu, value, step));
    return value;
}

// The same for the threads of a warp that are multiples of S apart.
template <int S, class T, class F> GM_DEVICE T gm_strided_lanes(T value, F op) {
#pragma unroll
    for (int step = S; step < 32; step *= 2) value = op(value, __shfl_xor_sync(0xffffffffu, value, step));
    return value;
}

// What `op` makes of the values of the G threads of each group; every thread gets it. G is a power of two that divides the block, which all
// arrive at together. The order of the values is the same in every run.
template <int G, int BLOCK, class T, class F> GM_DEVICE T gm_group(T value, F op) {
    value = gm_lanes<(G < 32 ? G : 32)>(value, op);
    if (G > 32) {
        __shared__ T of_warp[BLOCK / 32];
        if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
        __syncthreads();
        const int first = threadIdx.x / G * (G / 32);
        value = of_warp[first];
#pragma unroll
        for (int w = 1; w < G / 32; ++w) value = op(value, of_warp[first + w]);
        __syncthreads();
    }
    return value;
}

// The same for threads of equal lanes, one of each warp.
template <int BLOCK, class T, class F> GM_DEVICE T gm_warps(T value, F op) {
    __shared__ T of_thread[BLOCK];
    of_thread[threadIdx.x] = value;
    __syncthreads();
    value = of_thread[threadIdx.x % 32];
#pragma unroll
    for (int w = 1; w < BLOCK / 32; ++w) value = op(value, of_thread[threadIdx.x % 32 + w * 32]);
    __syncthreads();
    return value;
}

// Whether the element a at position i comes before b at j: NaN before all others, the first or the last of equals.
template <bool MAX, bool LAST> struct gm_better {
    template <class T, class I> GM_DEVICE bool operator()(T a, I i, T b, I j) const {
        const bool before = (MAX ? a > b : a < b) || (a != a && b == b);
        const bool after = (MAX ? b > a : b < a) || (b != b && a == a);
        return before || (!after && (LAST ? i > j : i < j));
    }
};

template <class T, class I, class F> GM_DEVICE void gm_keep_better(T& best, I& at, T value, I position, F better) {
    if (better(value, position, best, at)) {
        best = value;
        at = position;
    }
}

// The best element of the G threads of each group and its position; every thread gets them.
template <int G, int BLOCK, class T, class I, class F> GM_DEVICE void gm_group_best(T& best, I& at, F better) {
#pragma unroll
    for (int step = 1; step < (G < 32 ? G : 32); step *= 2) {
        const T value = __shfl_xor_sync(0xffffffffu, best, step);
        const I position = __shfl_xor_sync(0xffffffffu, at, step);
        gm_keep_better(best, at, value, position, better);
    }
    if (G > 32) {
        __shared__ T values[BLOCK / 32];
        __shared__ I positions[BLOCK / 32];
        if (threadIdx.x % 32 == 0) {
            values[threadIdx.x / 32] = best;
            positions[threadIdx.x / 32] = at;
        }
        __syncthreads();
        const int first = threadIdx.x / G * (G / 32);
#pragma unroll
        for (int w = 0; w < G / 32; ++w) gm_keep_better(best, at, values[first + w], positions[first + w], better);
        __syncthreads();
    }
}

// The same for threads of equal lanes, one of each warp.
template <int BLOCK, class T, class I, class F> GM_DEVICE void gm_warps_best(T& best, I& at, F better) {
    __shared__ T values[BLOCK];
    __shared__ I positions[BLOCK];
    values[threadIdx.x] = best;
    positions[threadIdx.x] = at;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < BLOCK / 32; ++w) {
        const int from = threadIdx.x % 32 + w * 32;
        gm_keep_better(best, at, values[from], positions[from], better);
    }
    __syncthreads();
}
