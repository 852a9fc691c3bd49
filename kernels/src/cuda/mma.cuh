// Products of tiles by tensor cores: `mma.sync`, fed from a ring of tiles in shared memory.
//
// Every step of the instruction takes 32 bytes of k per row: two chunks of 16 bytes. Tiles are rows of chunks, permuted so that eight rows at
// one chunk, which is what `ldmatrix` reads and what eight neighbouring threads write, fall into different banks.

GM_DEVICE u32 gm_shared(const void* p) { return u32(__cvta_generic_to_shared(p)); }

// Instructions: type of the operands in memory and of the sums, and c += a b for 16 x 8 sums.
struct gm_mma_f16 {
    typedef f16 element;
    typedef f32 sum;
    static GM_DEVICE void add(f32 (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#if __CUDA_ARCH__ >= 800
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                : "r"(a[2 * h]), "r"(a[2 * h + 1]), "r"(b[h]));
        }
#endif
    }
};
#if __CUDA_ARCH__ >= 800
struct gm_mma_bf16 {
    typedef bf16 element;
    typedef f32 sum;
    static GM_DEVICE void add(f32 (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
};
// f32 operands rounded to 10 bits of fraction, to nearest.
struct gm_mma_tf32 {
    typedef f32 element;
    typedef f32 sum;
    static GM_DEVICE u32 rounded(u32 x) {
        u32 r;
        asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(__uint_as_float(x)));
        return r;
    }
    static GM_DEVICE void add(f32 (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
        asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(rounded(a[0])), "r"(rounded(a[1])), "r"(rounded(a[2])), "r"(rounded(a[3])), "r"(rounded(b[0])),
              "r"(rounded(b[1])));
    }
};
// Bytes, each operand with or without a sign; what holds them does not matter. Sums wrap.
#define GM_MMA_BYTES(NAME, A, B)                                                                                                       \
    struct NAME {                                                                                                                      \
        typedef i8 element;                                                                                                            \
        typedef i32 sum;                                                                                                               \
        static GM_DEVICE void add(i32 (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {                                                   \
            asm("mma.sync.aligned.m16n8k32.row.col.s32." A "." B ".s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"            \
                : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])                                                                       \
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                                                   \
        }                                                                                                                              \
    };
GM_MMA_BYTES(gm_mma_i8, "s8", "s8")
GM_MMA_BYTES(gm_mma_u8, "u8", "u8")
GM_MMA_BYTES(gm_mma_i8_u8, "s8", "u8")
GM_MMA_BYTES(gm_mma_u8_i8, "u8", "s8")
#endif

// Four 8 x 8 matrices of 16-bit elements; lane l gives the row l % 8 of matrix l / 8. Bits are not looked at, so two elements of 8 bits or
// half an element of 32 do as well, unless transposed.
GM_DEVICE void gm_load_matrices(u32 (&r)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}
GM_DEVICE void gm_load_matrices_transposed(u32 (&r)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}

GM_DEVICE void gm_store_chunk(u32 to, uint4 x) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

// Copies of 16 bytes to shared memory, in groups; without a source, zeros.
#if __CUDA_ARCH__ >= 800
GM_DEVICE void gm_copy_chunk(u32 to, const void* from, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}
GM_DEVICE void gm_copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> GM_DEVICE void gm_copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }
#else
GM_DEVICE void gm_copies_end() {}
template <int LEFT> GM_DEVICE void gm_copies_wait() {}
#endif

// Order of a product's tiles: in bands of 8 rows of tiles, and within a band column by column, so that blocks that run at the same time share
// what they read.
template <class I> struct gm_place {
    I row, column;
};
template <class I> GM_DEVICE gm_place<I> gm_raster(I tile, I rows, I columns) {
    const I band = tile / (8 * columns), left = rows - band * 8, height = left < 8 ? left : 8, within = tile - band * 8 * columns;
    return {band * 8 + within % height, within / height};
}

// A tile of ROWS rows of WIDTH elements.
template <int ROWS, int WIDTH, class T> struct gm_tile {
    enum {
        per_chunk = 16 / sizeof(T),
        chunks = WIDTH / per_chunk,
        n_chunks = ROWS * chunks,
        bytes = n_chunks * 16,
        rows_in_128_bytes = chunks < 8 ? 8 / chunks : 1,
        permuted = chunks < 8 ? chunks - 1 : 7
    };
    // Byte of a chunk.
    static GM_DEVICE u32 place(int row, int chunk) {
        return row * (chunks * 16) + ((chunk ^ (row / rows_in_128_bytes & permuted)) * 16);
    }
};

// Where 16 bytes of an operand are, if they are inside of it.
struct gm_source {
    const void* from;
    bool inside;
};

// A tile that THREADS threads copy: `from(row, column, k0)` is the source of the chunk that begins there.
template <class TILE, int THREADS, class I, class F> struct gm_copied {
    F from;
    enum { each = TILE::n_chunks / THREADS };
#if __CUDA_ARCH__ < 800
    uint4 held[each];
#endif
    GM_DEVICE void start(u32 to, I k0) {
#pragma unroll
        for (int i = 0; i < each; ++i) {
            const int n = i * THREADS + int(threadIdx.x), row = n / TILE::chunks, chunk = n % TILE::chunks;
            const gm_source source = from(row, chunk * TILE::per_chunk, k0);
#if __CUDA_ARCH__ >= 800
            gm_copy_chunk(to + TILE::place(row, chunk), source.from, source.inside);
#else
            held[i] = source.inside ? *static_cast<const uint4*>(source.from) : uint4{0, 0, 0, 0};
#endif
        }
    }
    GM_DEVICE void finish(u32 to) {
#if __CUDA_ARCH__ < 800
#pragma unroll
        for (int i = 0; i < each; ++i) {
            const int n = i * THREADS + int(threadIdx.x);
            gm_store_chunk(to + TILE::place(n / TILE::chunks, n % TILE::chunks), held[i]);
        }
#endif
    }
};

// A tile whose elements are computed one by one: `element(row, column, k0)`. They wait in registers until `finish`.
template <class T, class TILE, int THREADS, class I, class F> struct gm_pulled {
    F element;
    enum { each = TILE::n_chunks / THREADS };
    gm_vector<T, TILE::per_chunk> held[each];
    GM_DEVICE void start(u32 to, I k0) {
#pragma unroll
        for (int i = 0; i < each; ++i) {
            const int n = i * THREADS + int(threadIdx.x), row = n / TILE::chunks, column = n % TILE::chunks * TILE::per_chunk;
#pragma unroll
            for (int e = 0; e < TILE::per_chunk; ++e) held[i].v[e] = element(row, column + e, k0);
        }
    }
    GM_DEVICE void finish(u32 to) {
#pragma unroll
        for (int i = 0; i < each; ++i) {
            const int n = i * THREADS + int(threadIdx.x);
            gm_store_chunk(to + TILE::place(n / TILE::chunks, n % TILE::chunks), held[i].raw);
        }
    }
};

// The product of a block: BM x BN sums, WM x WN in each warp, BK deep steps through a ring of STAGES tiles of each operand. An operand's tile
// has k along its rows, or across them (for 16-bit elements only).
template <class M, int BM, int BN, int BK, int WM, int WN, int STAGES, bool LHS_ALONG_K, bool RHS_ALONG_K> struct gm_block_product {
    typedef typename M::element T;
    typedef typename M::sum sum;
    typedef gm_tile<LHS_ALONG_K ? BM : BK, LHS_ALONG_K ? BK : BM, T> lhs_tile;
    typedef gm_tile<RHS_ALONG_K ? BN : BK, RHS_ALONG_K ? BK : BN, T> rhs_tile;
    enum {
        warps_across = BN / WN,
        threads = BM / WM * warps_across * 32,
        stage_bytes = lhs_tile::bytes + rhs_tile::bytes,
        depth = BK * sizeof(T) / 32,
        slabs = WM / 16,
        slab_pitch = WN + 8
    };
    sum acc[WM / 16][WN / 8][4];

    template <class I, class F> static GM_DEVICE gm_copied<lhs_tile, threads, I, F> copied_lhs(F from) { return {from}; }
    template <class I, class F> static GM_DEVICE gm_copied<rhs_tile, threads, I, F> copied_rhs(F from) { return {from}; }
    template <class I, class F> static GM_DEVICE gm_pulled<T, lhs_tile, threads, I, F> pulled_lhs(F element) { return {element}; }
    template <class I, class F> static GM_DEVICE gm_pulled<T, rhs_tile, threads, I, F> pulled_rhs(F element) { return {element}; }

    static GM_DEVICE int warp_row() { return int(threadIdx.x) / 32 / warps_across * WM; }
    static GM_DEVICE int warp_column() { return int(threadIdx.x) / 32 % warps_across * WN; }

    // Adds the product of the tiles in a stage.
    GM_DEVICE void multiply(u32 stage) {
#pragma unroll
        for (int q = 0; q < depth; ++q) {
            u32 a[WM / 16][4], b[WN / 8][2];
            load(a, b, stage, q);
#pragma unroll
            for (int i = 0; i < WM / 16; ++i) {
#pragma unroll
                for (int j = 0; j < WN / 8; ++j) M::add(acc[i][j], a[i], b[j]);
            }
        }
    }

    // What step q of the tiles in a stage multiplies.
    static GM_DEVICE void load(u32 (&a)[WM / 16][4], u32 (&b)[WN / 8][2], u32 stage, int q) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < WM / 16; ++i) {
            const int row = warp_row() + i * 16;
            if (LHS_ALONG_K) {
                gm_load_matrices(a[i], stage + lhs_tile::place(row + lane % 16, q * 2 + lane / 16));
            } else {
                gm_load_matrices_transposed(a[i], stage + lhs_tile::place(q * 16 + lane % 8 + lane / 16 * 8, row / 8 + lane / 8 % 2));
            }
        }
#pragma unroll
        for (int j = 0; j < WN / 16; ++j) {
            const int column = warp_column() + j * 16;
            u32 r[4];
            if (RHS_ALONG_K) {
                const u32 at = rhs_tile::place(column + lane % 8 + lane / 16 * 8, q * 2 + lane / 8 % 2);
                gm_load_matrices(r, stage + lhs_tile::bytes + at);
            } else {
                const u32 at = rhs_tile::place(q * 16 + lane % 16, column / 8 + lane / 16);
                gm_load_matrices_transposed(r, stage + lhs_tile::bytes + at);
            }
#pragma unroll
            for (int h = 0; h < 4; ++h) b[2 * j + h / 2][h % 2] = r[h];
        }
    }

    // Sums up `steps` tiles, the first at `k0`. `ring` is STAGES * stage_bytes of shared memory that no one uses; afterwards no one does again.
    template <class L, class R, class I> GM_DEVICE void run(u32 ring, I k0, int steps, L lhs, R rhs) {
#pragma unroll
        for (int i = 0; i < WM / 16; ++i) {
#pragma unroll
            for (int j = 0; j < WN / 8; ++j) {
#pragma unroll
                for (int r = 0; r < 4; ++r) acc[i][j][r] = 0;
            }
        }
#pragma unroll
        for (int s = 0; s < STAGES - 1; ++s) {
            if (s < steps) {
                const u32 to = ring + s * stage_bytes;
                lhs.start(to, k0 + I(s) * BK);
                rhs.start(to + lhs_tile::bytes, k0 + I(s) * BK);
                lhs.finish(to);
                rhs.finish(to + lhs_tile::bytes);
            }
            gm_copies_end();
        }
        gm_copies_wait<STAGES - 2>();
        __syncthreads();
        u32 now = ring, next = ring + (STAGES - 1) * stage_bytes;
        for (int step = 0; step < steps; ++step) {
            // What was multiplied in the last step is free: the tiles of STAGES - 1 steps ahead go there.
            const bool more = step + STAGES - 1 < steps;
            if (more) {
                lhs.start(next, k0 + I(step + STAGES - 1) * BK);
                rhs.start(next + lhs_tile::bytes, k0 + I(step + STAGES - 1) * BK);
            }
            gm_copies_end();
            multiply(now);
            if (more) {
                lhs.finish(next);
                rhs.finish(next + lhs_tile::bytes);
            }
            gm_copies_wait<STAGES - 2>();
            __syncthreads();
            next = now;
            now = now == ring + (STAGES - 1) * stage_bytes ? ring : now + stage_bytes;
        }
        gm_copies_wait<0>();
        __syncthreads();
    }

    // Sums go on through shared memory, 16 rows of each warp at a time, so that threads get them side by side. The pitch keeps the stores of
    // half a warp in different banks. Slab i begins at this row and column of the tile.
    static GM_DEVICE int slab_row(int i) { return warp_row() + i * 16; }
    static GM_DEVICE int slab_column(int i) { return warp_column(); }
    static GM_DEVICE sum* slab(u8* shared) { return reinterpret_cast<sum*>(shared) + threadIdx.x / 32 * (16 * slab_pitch); }
    GM_DEVICE void put(sum* to, int i) const {
        const int lane = threadIdx.x % 32;
        __syncwarp();
#pragma unroll
        for (int j = 0; j < WN / 8; ++j) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                gm_vector<sum, 2> pair;
                pair.v[0] = acc[i][j][2 * h];
                pair.v[1] = acc[i][j][2 * h + 1];
                gm_store<2>(to + (lane / 4 + h * 8) * slab_pitch + j * 8 + lane % 4 * 2, pair);
            }
        }
        __syncwarp();
    }
};
