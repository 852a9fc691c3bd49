// arch: sm_80
// C = A B^T for bf16 A [m, k] and B [n, k], both row-major: 64 x 64 tiles, 32 deep, four warps of 32 x 32;
// cp.async in two stages, ldmatrix, mma.sync. Sizes are multiples of the tile.

typedef unsigned u32; typedef unsigned short u16;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void load4(u32 (&r)[4], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
}

__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Byte of a 16-byte chunk in a tile whose rows have four: chunks are permuted, so that eight rows use all banks.
__device__ __forceinline__ u32 place(int row, int chunk) { return row * 64 + ((chunk ^ (row >> 1 & 3)) << 4); }

extern "C" __global__ void __launch_bounds__(128) mma_gemm(const u16* __restrict__ a, const u16* __restrict__ b, float* __restrict__ c, int m, int n, int k) {
  __shared__ __align__(128) u16 as[2][64 * 32], bs[2][64 * 32];
  int t = threadIdx.x, lane = t % 32, warp = t / 32;
  int row0 = blockIdx.y * 64, col0 = blockIdx.x * 64;
  int warp_row = warp / 2 * 32, warp_col = warp % 2 * 32;
  float acc[2][4][4] = {};
  auto fetch = [&](int stage, int k0) {
    for (int i = t; i < 256; i += 128) {
      int r = i / 4, q = i % 4;
      copy16(shared_address(as[stage]) + place(r, q), a + (size_t)(row0 + r) * k + k0 + q * 8);
      copy16(shared_address(bs[stage]) + place(r, q), b + (size_t)(col0 + r) * k + k0 + q * 8);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  fetch(0, 0);
  for (int s = 0; s * 32 < k; s++) {
    if ((s + 1) * 32 < k) {
      fetch((s + 1) % 2, (s + 1) * 32);
      asm volatile("cp.async.wait_group 1;" ::: "memory");
    } else {
      asm volatile("cp.async.wait_group 0;" ::: "memory");
    }
    __syncthreads();
#pragma unroll
    for (int q = 0; q < 2; q++) {
      u32 x[2][4], y[2][4];
      for (int i = 0; i < 2; i++) load4(x[i], shared_address(as[s % 2]) + place(warp_row + i * 16 + lane % 16, q * 2 + lane / 16));
      for (int j = 0; j < 2; j++) load4(y[j], shared_address(bs[s % 2]) + place(warp_col + j * 16 + lane % 8 + lane / 16 * 8, q * 2 + lane / 8 % 2));
      for (int i = 0; i < 2; i++)
        for (int j = 0; j < 4; j++) multiply(acc[i][j], x[i], y[j / 2][j % 2 * 2], y[j / 2][j % 2 * 2 + 1]);
    }
    __syncthreads();
  }
  for (int i = 0; i < 2; i++)
    for (int j = 0; j < 4; j++) {
      float* to = c + (size_t)(row0 + warp_row + i * 16 + lane / 4) * n + col0 + warp_col + j * 8 + lane % 4 * 2;
      *(float2*)to = make_float2(acc[i][j][0], acc[i][j][1]);
      *(float2*)(to + 8 * n) = make_float2(acc[i][j][2], acc[i][j][3]);
    }
}
