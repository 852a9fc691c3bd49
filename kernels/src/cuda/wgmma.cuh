// Products of tiles by warp groups on `sm_90a`: `wgmma` on tiles that the bulk copy engine brings (TMA).
//
// A block has three groups of four warps: one thread of the first asks for tiles, the two others multiply 64 rows each. Tiles go round in a
// ring, with a barrier that says that one is full and one that it is empty. Blocks go through the tiles of the result in strides of the grid,
// and the first group runs ahead, so that the next tile of the result is under way while the last one is stored. With CLUSTER 2, two blocks
// whose tiles lie one below the other each load half of what they share, for both.
//
// Tiles are 64 elements deep: rows of 128 bytes, 16-byte chunks permuted by the copy engine, either along k or across it (64 columns at a time).

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

#define GM_SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define GM_SUMS_16(i) GM_SUMS_4(i), GM_SUMS_4(i + 4), GM_SUMS_4(i + 8), GM_SUMS_4(i + 12)
#define GM_SUMS_64(i) GM_SUMS_16(i), GM_SUMS_16(i + 16), GM_SUMS_16(i + 32), GM_SUMS_16(i + 48)
#define GM_SUMS_32 GM_SUMS_16(0), GM_SUMS_16(16)
#define GM_SUMS_128 GM_SUMS_64(0), GM_SUMS_64(64)
#define GM_NAMES_32                                                                                                                    \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"                                                             \
    ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define GM_NAMES_64                                                                                                                    \
    GM_NAMES_32                                                                                                                        \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"                                                 \
    ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define GM_NAMES_128                                                                                                                   \
    GM_NAMES_64                                                                                                                        \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"                                                 \
    ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"                                                 \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"                                     \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
// d = a b, added to d if `keeps`; a and b are given by descriptors, and lie along k or across it.
#define GM_WGMMA(N, TYPE, NAMES, SUMS, A, B, KEEPS, ACROSS_A, ACROSS_B)                                                                  \
    asm volatile(                                                                                                                      \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %" KEEPS ", 0;\n"                                                                            \
        "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" NAMES "}, %" A ", %" B ", p, 1, 1, %" ACROSS_A ", %" ACROSS_B  \
        ";\n}\n"                                                                                                                       \
        : SUMS                                                                                                                         \
        : "l"(a), "l"(b), "r"(keeps), "n"(AT), "n"(BT))
// d += a b; a is in registers, as a fragment of 64 x 16 elements, and b lies across k.
#define GM_WGMMA_HELD(N, TYPE, NAMES, SUMS, A, B, KEEPS)                                                                                 \
    asm volatile(                                                                                                                      \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %" KEEPS ", 0;\n"                                                                            \
        "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" NAMES "}, {" A "}, %" B ", p, 1, 1, 1;\n}\n"                 \
        : SUMS                                                                                                                         \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1))

struct gm_wgmma_f16 {
    typedef f16 element;
    template <int AT, int BT> static GM_DEVICE void add(f32 (&d)[32], u64 a, u64 b, int keeps) {
        GM_WGMMA("64", "f16", GM_NAMES_32, GM_SUMS_32, "32", "33", "34", "35", "36");
    }
    template <int AT, int BT> static GM_DEVICE void add(f32 (&d)[64], u64 a, u64 b, int keeps) {
        GM_WGMMA("128", "f16", GM_NAMES_64, GM_SUMS_64(0), "64", "65", "66", "67", "68");
    }
    template <int AT, int BT> static GM_DEVICE void add(f32 (&d)[128], u64 a, u64 b, int keeps) {
        GM_WGMMA("256", "f16", GM_NAMES_128, GM_SUMS_128, "128", "129", "130", "131", "132");
    }
    static GM_DEVICE void add_held(f32 (&d)[32], const u32 (&a)[4], u64 b) {
        GM_WGMMA_HELD("64", "f16", GM_NAMES_32, GM_SUMS_32, "%32, %33, %34, %35", "36", "37");
    }
    static GM_DEVICE void add_held(f32 (&d)[64], const u32 (&a)[4], u64 b) {
        GM_WGMMA_HELD("128", "f16", GM_NAMES_64, GM_SUMS_64(0), "%64, %65, %66, %67", "68", "69");
    }
};
struct gm_wgmma_bf16 {
    typedef bf16 element;
    template <int AT, int BT> static GM_DEVICE void add(f32 (&d)[32], u64 a, u64 b, int keeps) {
        GM_WGMMA("64", "bf16", GM_NAMES_32, GM_SUMS_32, "32", "33", "34", "35", "36");
    }
    template <int AT, int BT> static GM_DEVICE void add(f32 (&d)[64], u64 a, u64 b, int keeps) {
        GM_WGMMA("128", "bf16", GM_NAMES_64, GM_SUMS_64(0), "64", "65", "66", "67", "68");
    }
    template <int AT, int BT> static GM_DEVICE void add(f32 (&d)[128], u64 a, u64 b, int keeps) {
        GM_WGMMA("256", "bf16", GM_NAMES_128, GM_SUMS_128, "128", "129", "130", "131", "132");
    }
    static GM_DEVICE void add_held(f32 (&d)[32], const u32 (&a)[4], u64 b) {
        GM_WGMMA_HELD("64", "bf16", GM_NAMES_32, GM_SUMS_32, "%32, %33, %34, %35", "36", "37");
    }
    static GM_DEVICE void add_held(f32 (&d)[64], const u32 (&a)[4], u64 b) {
        GM_WGMMA_HELD("128", "bf16", GM_NAMES_64, GM_SUMS_64(0), "%64, %65, %66, %67", "68", "69");
    }
};

// Before products read registers, and before they read or write sums, that were written otherwise.
GM_DEVICE void gm_products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Products so far form a group.
GM_DEVICE void gm_products_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most LEFT groups are under way. The sums belong to the wait: no use of them can move in front of it.
template <int LEFT> GM_DEVICE void gm_products_wait(f32 (&d)[32]) {
    asm volatile("wgmma.wait_group.sync.aligned %32;" : GM_SUMS_32 : "n"(LEFT) : "memory");
}
template <int LEFT> GM_DEVICE void gm_products_wait(f32 (&d)[64]) {
    asm volatile("wgmma.wait_group.sync.aligned %64;" : GM_SUMS_64(0) : "n"(LEFT) : "memory");
}
template <int LEFT> GM_DEVICE void gm_products_wait(f32 (&d)[128]) {
    asm volatile("wgmma.wait_group.sync.aligned %128;" : GM_SUMS_128 : "n"(LEFT) : "memory");
}

// A tensor map, by value: what the copy engine knows of an operand.
struct alignas(64) gm_map {
    u64 words[16];
};

// Barriers in shared memory, each of 8 bytes.
GM_DEVICE void gm_barrier_init(u32 at, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
}
GM_DEVICE void gm_barrier_expect(u32 at, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}
// Of this block, or of another in the cluster. Barriers order copies and products, which are asynchronous and have ended by then; no thread
// reads what another wrote. So all scopes are the block's: in that of the cluster, an arrival would wait for all memory of the GPU, and a wait
// would empty the first-level cache, in each step.
GM_DEVICE void gm_barrier_arrive(u32 at) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}
GM_DEVICE void gm_barrier_arrive(u32 at, int rank) {
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.release.cta.shared::cluster.b64 _, [there];\n}\n" ::"r"(at),
        "r"(rank)
        : "memory");
}
GM_DEVICE void gm_barrier_wait(u32 at, u32 parity) {
    u32 done = 0;
    while (!done) {
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
            : "=r"(done)
            : "r"(at), "r"(parity)
            : "memory");
    }
}
GM_DEVICE int gm_cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return int(rank);
}
GM_DEVICE void gm_cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Registers of a group that multiplies, at the cost of the one that fetches.
GM_DEVICE void gm_fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 40;"); }
GM_DEVICE void gm_more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 232;"); }

// Asks for the tile at these coordinates, innermost first, for this block or for all blocks of the cluster at the same place.
#define GM_LOAD_TILE(DIMS, AT, ...)                                                                                                    \
    if (shares) {                                                                                                                      \
        asm volatile("cp.async.bulk.tensor." DIMS                                                                                      \
                     ".shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {" AT "}], [%2], %3;" ::"r"( \
                         to),                                                                                                          \
                     "l"(map), "r"(barrier), "h"(u16(3)), __VA_ARGS__                                                                   \
                     : "memory");                                                                                                      \
    } else {                                                                                                                           \
        asm volatile("cp.async.bulk.tensor." DIMS                                                                                      \
                     ".shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {" AT "}], [%2];" ::"r"(to),                  \
                     "l"(map), "r"(barrier), "h"(u16(3)), __VA_ARGS__                                                                   \
                     : "memory");                                                                                                      \
    }
GM_DEVICE void gm_load_tile(u32 to, const gm_map* map, u32 barrier, bool shares, int x, int y) {
    GM_LOAD_TILE("2d", "%4, %5", "r"(x), "r"(y))
}
GM_DEVICE void gm_load_tile(u32 to, const gm_map* map, u32 barrier, bool shares, int x, int y, int z) {
    GM_LOAD_TILE("3d", "%4, %5, %6", "r"(x), "r"(y), "r"(z))
}
GM_DEVICE void gm_load_tile(u32 to, const gm_map* map, u32 barrier, bool shares, int x, int y, int z, int w) {
    GM_LOAD_TILE("4d", "%4, %5, %6, %7", "r"(x), "r"(y), "r"(z), "r"(w))
}
GM_DEVICE void gm_load_tile(u32 to, const gm_map* map, u32 barrier, bool shares, int x, int y, int z, int w, int v) {
    GM_LOAD_TILE("5d", "%4, %5, %6, %7, %8", "r"(x), "r"(y), "r"(z), "r"(w), "r"(v))
}

// Asks for a tile of pixels in im2col mode: channel, spatial axes and image of the first, then what an element of the filter adds to the
// places of all of them.
#define GM_LOAD_PIXELS(DIMS, AT, OFFSETS, ...)                                                                                         \
    asm volatile("cp.async.bulk.tensor." DIMS                                                                                          \
                 ".shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], [%1, {" AT "}], [%2], {" OFFSETS "};" ::"r"(to),      \
                 "l"(map), "r"(barrier), __VA_ARGS__                                                                                    \
                 : "memory");
GM_DEVICE void gm_load_pixels(u32 to, const gm_map* map, u32 barrier, int c, int x, int n, u16 dx) {
    GM_LOAD_PIXELS("3d", "%3, %4, %5", "%6", "r"(c), "r"(x), "r"(n), "h"(dx))
}
GM_DEVICE void gm_load_pixels(u32 to, const gm_map* map, u32 barrier, int c, int x, int y, int n, u16 dx, u16 dy) {
    GM_LOAD_PIXELS("4d", "%3, %4, %5, %6", "%7, %8", "r"(c), "r"(x), "r"(y), "r"(n), "h"(dx), "h"(dy))
}
GM_DEVICE void gm_load_pixels(u32 to, const gm_map* map, u32 barrier, int c, int x, int y, int z, int n, u16 dx, u16 dy, u16 dz) {
    GM_LOAD_PIXELS("5d", "%3, %4, %5, %6, %7", "%8, %9, %10", "r"(c), "r"(x), "r"(y), "r"(z), "r"(n), "h"(dx), "h"(dy), "h"(dz))
}

// What `wgmma` is told of a tile: eight rows every 1024 bytes and, across k, 64 columns every `across` bytes; 128-byte permutation.
GM_DEVICE u64 gm_descriptor(u32 at, u32 across) {
    return u64((at & 0x3ffff) >> 4) | u64(across >> 4) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62;
}

// Where a ring's next stage is, and how often the ring has gone round, modulo 2.
template <int STAGES, int STAGE_BYTES> struct gm_ring {
    u32 stages, barriers;
    int stage;
    u32 parity;
    GM_DEVICE u32 tile() const { return stages + stage * STAGE_BYTES; }
    GM_DEVICE u32 full() const { return barriers + stage * 8; }
    GM_DEVICE u32 empty() const { return barriers + (STAGES + stage) * 8; }
    GM_DEVICE void go_on() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
    // One thread sets the barriers up; so many give a stage back.
    GM_DEVICE void init(int users) const {
        for (int s = 0; s < STAGES; ++s) {
            gm_barrier_init(barriers + s * 8, 1);
            gm_barrier_init(barriers + (STAGES + s) * 8, users);
        }
    }
};
// Barriers that one thread has set up are there for all, and for the copy engine.
GM_DEVICE void gm_barriers_ready() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
}

// The product of a block: 128 x BN sums, 64 x BN in each group that multiplies.
template <class M, int BN, int STAGES, bool LHS_ALONG_K, bool RHS_ALONG_K, int CLUSTER> struct gm_group_product {
    enum {
        lhs_bytes = 128 * 128,
        rhs_bytes = BN * 128,
        stage_bytes = lhs_bytes + rhs_bytes,
        // Sums leave 64 columns of 16 rows of a warp at a time.
        slabs = BN / 64,
        slab_pitch = 64 + 4,
        slab_bytes = 16 * slab_pitch * 4
    };
    f32 sum[BN / 2];

    typedef gm_ring<STAGES, stage_bytes> ring;

    // The same number in all lanes, as the compiler can see: what follows from it is computed once for a warp.
    static GM_DEVICE int group() { return __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0) - 1; }
    static GM_DEVICE int warp_row() { return int(threadIdx.x) / 32 * 16 - 64; }
    static GM_DEVICE int block_row() { return CLUSTER > 1 ? gm_cluster_rank() : 0; }

    // Sets the barriers up, for all blocks of the cluster. Shared memory has tiles, then slabs, then barriers.
    static GM_DEVICE ring begin(u8* shared) {
        const u32 tiles = gm_shared(shared);
        const ring r = {tiles, tiles + STAGES * stage_bytes + 8 * slab_bytes, 0, 0};
        if (threadIdx.x == 0) {
            r.init(2 * CLUSTER);
            gm_barriers_ready();
        }
        end();
        return r;
    }

    // Blocks of a cluster stay until none of them needs another's shared memory.
    static GM_DEVICE void end() {
        __syncwarp();
        if (CLUSTER > 1) {
            gm_cluster_sync();
        } else {
            __syncthreads();
        }
    }

    // One thread asks for `steps` tiles of both operands: `lhs(to, barrier, shares, first, k0)` for that which begins at row `first`.
    template <class L, class R> static GM_DEVICE void fetch(ring& r, int steps, L lhs, R rhs) {
        const int rank = block_row();
        for (int step = 0; step < steps; ++step) {
            gm_barrier_wait(r.empty(), r.parity ^ 1);
            gm_barrier_expect(r.full(), stage_bytes);
            const u32 to = r.tile();
            for (int i = 0; i < (LHS_ALONG_K ? 1 : 2); ++i) lhs(to + i * 8192, r.full(), false, i * 64, step * 64);
            // This block's share of the right-hand side.
            for (int i = 0; i < (RHS_ALONG_K ? 1 : BN / 64 / CLUSTER); ++i) {
                const int first = rank * (BN / CLUSTER) + i * 64;
                rhs(to + lhs_bytes + first * 128, r.full(), CLUSTER > 1, first, step * 64);
            }
            r.go_on();
        }
    }

    static GM_DEVICE void release(u32 empty) {
        if (threadIdx.x % 128 == 0) {
            gm_barrier_arrive(empty);
            if (CLUSTER > 1) gm_barrier_arrive(empty, gm_cluster_rank() ^ 1);
        }
    }

    // Sums up `steps` tiles; a tile is free once the product after its own has been started and its own has ended.
    GM_DEVICE void run(ring& r, int steps) {
        u32 before = 0;
        const u64 lhs = gm_descriptor(r.stages + group() * 8192, 8192), rhs = gm_descriptor(r.stages + lhs_bytes, 8192);
        for (int step = 0; step < steps; ++step) {
            gm_barrier_wait(r.full(), r.parity);
            // Descriptors count chunks of 16 bytes.
            const u32 tile = r.stage * (stage_bytes / 16);
            gm_products_begin();
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                const u64 a = lhs + tile + q * ((LHS_ALONG_K ? 32 : 2048) / 16);
                const u64 b = rhs + tile + q * ((RHS_ALONG_K ? 32 : 2048) / 16);
                M::template add<!LHS_ALONG_K, !RHS_ALONG_K>(sum, a, b, step | q);
            }
            gm_products_end();
            gm_products_wait<1>(sum);
            if (step > 0) release(before);
            before = r.empty();
            r.go_on();
        }
        gm_products_wait<0>(sum);
        release(before);
    }

    // The sums of 64 columns of a warp's rows, as `gm_block_product` has them.
    static GM_DEVICE int slab_row(int i) { return warp_row(); }
    static GM_DEVICE int slab_column(int i) { return i * 64; }
    static GM_DEVICE f32* slab(u8* shared) {
        return reinterpret_cast<f32*>(shared + STAGES * stage_bytes + (threadIdx.x / 32 - 4) * slab_bytes);
    }
    GM_DEVICE void put(f32* to, int i) const {
        const int lane = threadIdx.x % 32;
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 8; ++j) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                gm_vector<f32, 2> pair;
                pair.v[0] = sum[i * 32 + j * 4 + 2 * h];
                pair.v[1] = sum[i * 32 + j * 4 + 2 * h + 1];
                gm_store<2>(to + (lane / 4 + h * 8) * slab_pitch + j * 8 + lane % 4 * 2, pair);
            }
        }
        __syncwarp();
    }
};

#endif
