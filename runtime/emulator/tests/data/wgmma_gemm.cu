// arch: sm_90a
// C = A B^T for bf16 A [m, k] and B [n, k]: one producer warp group that loads tiles by TMA into a ring, two consumer
// groups of 64 x 128 with wgmma; C leaves by stmatrix and a TMA store. Persistent over tiles of 128 x 128, 64 deep.

typedef unsigned u32; typedef unsigned long long u64; typedef unsigned short u16;

struct alignas(64) Map { u64 words[16]; };

#define STAGES 3
#define A_BYTES (128 * 128)
#define B_BYTES (128 * 128)

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count)); }
__device__ __forceinline__ void expect(u32 bar, u32 bytes) { asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory"); }
__device__ __forceinline__ void arrive(u32 bar) { asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
__device__ __forceinline__ void wait(u32 bar, u32 parity) {
  asm volatile("{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(bar), "r"(parity) : "memory");
}
__device__ __forceinline__ void load_tile(u32 to, const Map* map, u32 bar, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
               ::"r"(to), "l"(map), "r"(bar), "r"(x), "r"(y) : "memory");
}
// K-major, 128-byte swizzle, eight rows every 1024 bytes.
__device__ __forceinline__ u64 descriptor(u32 at) { return (u64)((at & 0x3ffff) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62; }

__device__ __forceinline__ void multiply(float (&d)[64], u64 a, u64 b, int keep) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
    "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, p, 1, 1, 0, 0;\n}\n"
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
      "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
      "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
      "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
    : "l"(a), "l"(b), "r"(keep));
}

extern "C" __global__ void __launch_bounds__(384, 1) wgmma_gemm(const __grid_constant__ Map ma, const __grid_constant__ Map mb, const __grid_constant__ Map mc, int m, int n, int k) {
  extern __shared__ __align__(1024) unsigned char ring[];
  __shared__ __align__(8) u64 full[STAGES], empty[STAGES];
  int group = threadIdx.x / 128, steps = k / 64, across = n / 128, tiles = m / 128 * across;
  u32 sa = shared_address(ring), sb = sa + STAGES * A_BYTES, sc = sb + STAGES * B_BYTES, fb = shared_address(full), eb = shared_address(empty);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) { init(fb + 8 * i, 1); init(eb + 8 * i, 2); }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  int stage = 0; u32 parity = 0;
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == 0)
      for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x)
        for (int s = 0; s < steps; s++) {
          wait(eb + 8 * stage, parity ^ 1);
          expect(fb + 8 * stage, A_BYTES + B_BYTES);
          load_tile(sa + stage * A_BYTES, &ma, fb + 8 * stage, s * 64, tile / across * 128);
          load_tile(sb + stage * B_BYTES, &mb, fb + 8 * stage, s * 64, tile % across * 128);
          if (++stage == STAGES) { stage = 0; parity ^= 1; }
        }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, half = group - 1;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      float d[64];
      for (int s = 0; s < steps; s++) {
        wait(fb + 8 * stage, parity);
        u32 a = sa + stage * A_BYTES + half * 64 * 128, b = sb + stage * B_BYTES;
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int q = 0; q < 4; q++) multiply(d, descriptor(a + q * 32), descriptor(b + q * 32), s | q ? 1 : 0);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        if (threadIdx.x % 128 == 0) arrive(eb + 8 * stage);
        if (++stage == STAGES) { stage = 0; parity ^= 1; }
      }
      // C as bf16, 64 columns per box of 128 bytes, then one thread stores both boxes.
      u32 box = sc + half * 16384;
#pragma unroll
      for (int j = 0; j < 8; j++) {
        u32 v[4];
        for (int q = 0; q < 4; q++) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v[q]) : "f"(d[j * 8 + q * 2 + 1]), "f"(d[j * 8 + q * 2]));
        int row = warp * 16 + lane % 16, chunk = j * 2 + lane / 16;
        u32 to = box + chunk / 8 * 8192 + row * 128 + ((chunk % 8 ^ row % 8) << 4);
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      asm volatile("bar.sync %0, 128;" ::"r"(half + 1) : "memory");
      if (threadIdx.x % 128 == 0) {
        for (int h = 0; h < 2; h++)
          asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];"
                       ::"l"(&mc), "r"(box + h * 8192), "r"(tile % across * 128 + h * 64), "r"(tile / across * 128 + half * 64) : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
      }
      asm volatile("bar.sync %0, 128;" ::"r"(half + 1) : "memory");
    }
  }
}
