// Attention without scores in memory: softmax over keys that come a tile at a time (Milakov and Gimelshein, arXiv:1805.02867; Dao,
// arXiv:2307.08691).
//
// A block holds BM queries; its threads share the BM x BN scores of a tile of keys as those of a product of tiles do. What a row has seen so far
// is its greatest score and the sum of its powers relative to that; all threads of a row know both.

// Weights of scores, relative to a base: e to the power of their difference.
struct gm_power_of_e {
    GM_DEVICE f32 operator()(f32 x, f32 base) const { return exp2f((x - base) * 1.44269504f); }
    GM_DEVICE f64 operator()(f64 x, f64 base) const { return exp(x - base); }
};
// The same of products that become scores by a factor, which is given times the logarithm of e to base two: one rounding, and one instruction less.
struct gm_power_scaled {
    f32 factor;
    GM_DEVICE f32 operator()(f32 x, f32 base) const {
        f32 r;
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(fmaf(x, factor, -(base * factor))));
        return r;
    }
};

GM_DEVICE f32 gm_exp(f32 x) { return expf(x); }
GM_DEVICE f64 gm_exp(f64 x) { return exp(x); }

template <class T> GM_DEVICE T gm_minus_infinity() { return T(-__longlong_as_double(0x7ff0000000000000ll)); }

// What weights are relative to: a row that has seen nothing yet must not become NaN by it.
template <class T> GM_DEVICE T gm_base(T greatest) { return greatest == gm_minus_infinity<T>() ? T(0) : greatest; }

// Brings the greatest of a row and the sum of its powers relative to that up to date by N elements.
template <int N, class T> GM_DEVICE void gm_see(const T (&x)[N], T& greatest, T& total) {
    T top = greatest;
#pragma unroll
    for (int i = 0; i < N; ++i) top = gm_max(top, x[i]);
    const T base = gm_base(top);
    total *= gm_exp(greatest - base);
#pragma unroll
    for (int i = 0; i < N; ++i) total += gm_exp(x[i] - base);
    greatest = top;
}

// Turns a tile's scores into weights, with keys outermost in `weights`, and brings sums and results so far to the new greatest scores.
template <int BM, int BN, int TM, int TN, int TV, class T, class F>
GM_DEVICE void gm_weigh(const T (&scores)[TM][TN], T (&greatest)[TM], T (&total)[TM], T (&result)[TM][TV], T* weights, F power) {
    const int tx = threadIdx.x % (BN / TN), ty = threadIdx.x / (BN / TN);
#pragma unroll
    for (int i = 0; i < TM; ++i) {
        T top = scores[i][0];
#pragma unroll
        for (int j = 1; j < TN; ++j) top = gm_max(top, scores[i][j]);
        top = gm_max(greatest[i], gm_lanes<BN / TN>(top, gm_greatest()));
        const T base = gm_base(top), rest = power(greatest[i], base);
        greatest[i] = top;
        T sum = T(0);
#pragma unroll
        for (int j = 0; j < TN; ++j) {
            const T weight = power(scores[i][j], base);
            weights[gm_of_tile<BN, TN>(tx, j) * gm_pitch<BM>() + gm_of_tile<BM, TM>(ty, i)] = weight;
            sum += weight;
        }
        total[i] = total[i] * rest + gm_lanes<BN / TN>(sum, gm_sum());
#pragma unroll
        for (int j = 0; j < TV; ++j) result[i][j] *= rest;
    }
}

// Attention of few queries: neighbouring threads share a key, and groups of them have keys of their own.

// Brings what a group has seen of a query up to date by N keys; a thread has W elements of each value.
template <int N, int W, class T, class F>
GM_DEVICE void gm_weigh_few(const T (&scores)[N], const T (&values)[N][W], T& greatest, T& total, T (&result)[W], F power) {
    T top = greatest;
#pragma unroll
    for (int n = 0; n < N; ++n) top = gm_max(top, scores[n]);
    const T base = gm_base(top), rest = power(greatest, base);
    greatest = top;
    total *= rest;
#pragma unroll
    for (int w = 0; w < W; ++w) result[w] *= rest;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const T weight = power(scores[n], base);
        total += weight;
#pragma unroll
        for (int w = 0; w < W; ++w) result[w] += weight * values[n][w];
    }
}

// Brings what the groups of LANES threads of a block have seen of a query to one greatest score; each group's result goes to `sums`.
template <int LANES, int BLOCK, int W, class T, class F>
GM_DEVICE void gm_join_few(T& greatest, T& total, const T (&result)[W], T* sums, F power) {
    __shared__ T tops[BLOCK / LANES], totals[BLOCK / LANES];
    const int group = threadIdx.x / LANES;
    if (threadIdx.x % LANES == 0) tops[group] = greatest;
    __syncthreads();
    T top = tops[0];
#pragma unroll
    for (int g = 1; g < BLOCK / LANES; ++g) top = gm_max(top, tops[g]);
    const T base = gm_base(top), rest = power(greatest, base);
#pragma unroll
    for (int w = 0; w < W; ++w) sums[threadIdx.x * W + w] = result[w] * rest;
    if (threadIdx.x % LANES == 0) totals[group] = total * rest;
    __syncthreads();
    greatest = top;
    total = totals[0];
#pragma unroll
    for (int g = 1; g < BLOCK / LANES; ++g) total += totals[g];
}

// The sum of the groups' results in column c.
template <int GROUPS, int COLUMNS, class T> GM_DEVICE T gm_column_few(const T* sums, int c) {
    T sum = sums[c];
#pragma unroll
    for (int g = 1; g < GROUPS; ++g) sum += sums[g * COLUMNS + c];
    return sum;
}

#if __CUDA_ARCH__ >= 800

// The same by tensor cores: each warp has 16 queries, each thread parts of two of them, eight apart. Rows in shared memory are D + 8 elements apart.

// Instruction for an element type.
template <class H> struct gm_mma_of;
template <> struct gm_mma_of<f16> { typedef gm_mma_f16 type; };
template <> struct gm_mma_of<bf16> { typedef gm_mma_bf16 type; };

// Two elements of a fragment, the first in the lower half.
GM_DEVICE u32 gm_pair(f32 x, f32 y, f16) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(r) : "f"(x), "f"(y));
    return r;
}
GM_DEVICE u32 gm_pair(f32 x, f32 y, bf16) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(r) : "f"(x), "f"(y));
    return r;
}

// Accumulators of two neighbouring products, as a left-hand operand of one.
template <class H> GM_DEVICE void gm_fragment(u32 (&to)[4], const f32 (&low)[4], const f32 (&high)[4], H) {
    to[0] = gm_pair(low[0], low[1], H());
    to[1] = gm_pair(low[2], low[3], H());
    to[2] = gm_pair(high[0], high[1], H());
    to[3] = gm_pair(high[2], high[3], H());
}

// The warp's queries, as left-hand operands.
template <int D, class H> GM_DEVICE void gm_load_queries(const H* queries, u32 (&query)[D / 16][4]) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane % 16;
#pragma unroll
    for (int d = 0; d < D / 16; ++d) gm_load_matrices(query[d], gm_shared(queries + row * (D + 8) + d * 16 + lane / 16 * 8));
}

// scores += queries * keys^T for N keys in rows.
template <class H, int D, int N>
GM_DEVICE void gm_multiply_keys(const u32 (&query)[D / 16][4], const H* keys, f32 (&scores)[N / 8][4]) {
    const int lane = threadIdx.x % 32;
    const H* from = keys + (lane % 8 + lane / 16 * 8) * (D + 8) + lane / 8 % 2 * 8;
#pragma unroll
    for (int d = 0; d < D / 16; ++d) {
#pragma unroll
        for (int n = 0; n < N / 16; ++n) {
            u32 key[4];
            gm_load_matrices(key, gm_shared(from + n * 16 * (D + 8) + d * 16));
            gm_mma_of<H>::type::add(scores[2 * n], query[d], {key[0], key[1]});
            gm_mma_of<H>::type::add(scores[2 * n + 1], query[d], {key[2], key[3]});
        }
    }
}

// Turns scores into weights where they are, and brings sums to the new greatest scores; `rest` is what results so far must be multiplied by.
template <int N, class F>
GM_DEVICE void gm_weigh(f32 (&scores)[N][4], f32 (&greatest)[2], f32 (&total)[2], f32 (&rest)[2], F power) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        f32 top = greatest[i];
#pragma unroll
        for (int n = 0; n < N; ++n) top = gm_max(top, gm_max(scores[n][2 * i], scores[n][2 * i + 1]));
        top = gm_lanes<4>(top, gm_greatest());
        const f32 base = gm_base(top);
        rest[i] = power(greatest[i], base);
        greatest[i] = top;
        f32 sum = 0.0f;
#pragma unroll
        for (int n = 0; n < N; ++n) {
#pragma unroll
            for (int j = 2 * i; j < 2 * i + 2; ++j) {
                scores[n][j] = power(scores[n][j], base);
                sum += scores[n][j];
            }
        }
        total[i] = total[i] * rest[i] + gm_lanes<4>(sum, gm_sum());
    }
}
template <int V> GM_DEVICE void gm_scale(f32 (&result)[V][4], const f32 (&rest)[2]) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
#pragma unroll
        for (int j = 0; j < 4; ++j) result[v][j] *= rest[j / 2];
    }
}

// result += weights * values: the accumulators of two neighbouring products are the left-hand operand of one.
template <class H, int D, int N>
GM_DEVICE void gm_multiply_values(const f32 (&weights)[N / 8][4], const H* values, f32 (&result)[D / 8][4]) {
    const int lane = threadIdx.x % 32;
    const H* from = values + lane % 16 * (D + 8) + lane / 16 * 8;
#pragma unroll
    for (int n = 0; n < N / 16; ++n) {
        const f32 (&low)[4] = weights[2 * n], (&high)[4] = weights[2 * n + 1];
        u32 weight[4];
        gm_fragment(weight, low, high, H());
#pragma unroll
        for (int d = 0; d < D / 16; ++d) {
            u32 value[4];
            gm_load_matrices_transposed(value, gm_shared(from + n * 16 * (D + 8) + d * 16));
            gm_mma_of<H>::type::add(result[2 * d], weight, {value[0], value[1]});
            gm_mma_of<H>::type::add(result[2 * d + 1], weight, {value[2], value[3]});
        }
    }
}

#endif
