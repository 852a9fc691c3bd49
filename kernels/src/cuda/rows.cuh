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

// What `op` makes of the values of the G threads of each group; every thread gets it. G is a power of two that divides the block, which all
// arrive at together. The order of the values is the same in every run.
template <int G, int BLOCK, class T, class F> GM_DEVICE T gm_group(T value, F op) {
#pragma unroll
    for (int step = 1; step < (G < 32 ? G : 32); step *= 2) value = op(value, __shfl_xor_sync(0xffffffffu, value, step));
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
