// arch: sm_90a
// Clusters of two: sums through distributed shared memory, and a tile that one block loads for both.

typedef unsigned u32; typedef unsigned long long u64;

struct alignas(64) Map { u64 words[16]; };

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ u32 rank() { u32 r; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
__device__ __forceinline__ void cluster_barrier() { asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory"); }

extern "C" __global__ void __cluster_dims__(2, 1, 1) cluster_sum(const float* x, float* y) {
  __shared__ float part[64];
  part[threadIdx.x] = x[blockIdx.x * 64 + threadIdx.x];
  cluster_barrier();
  u32 other; float v;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(other) : "r"(shared_address(&part[63 - threadIdx.x])), "r"(rank() ^ 1));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(other) : "memory");
  y[blockIdx.x * 64 + threadIdx.x] = part[threadIdx.x] + v;
  cluster_barrier();
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) multicast(const __grid_constant__ Map map, float* y) {
  __shared__ __align__(128) float tile[2][16][16];
  __shared__ __align__(8) u64 bar;
  u32 at = shared_address(&bar);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(2048) : "memory");
  }
  cluster_barrier();
  if (threadIdx.x == 0)
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;"
                 ::"r"(shared_address(tile[rank()])), "l"(&map), "r"(at), "r"((int)(blockIdx.x / 2 * 16) - 4), "r"((int)(rank() * 16)), "h"((unsigned short)3) : "memory");
  asm volatile("{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%0], 0;\n@p bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(at) : "memory");
  for (int i = threadIdx.x; i < 512; i += blockDim.x) y[blockIdx.x * 512 + i] = ((float*)tile)[i];
  cluster_barrier();
}

extern "C" __global__ void tile_sum(const __grid_constant__ Map map, int k) {
  __shared__ __align__(128) float tile[8][32];
  for (int i = threadIdx.x; i < 256; i += blockDim.x) ((float*)tile)[i] = (float)(i + k * blockIdx.x);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3}], [%1];"
                 ::"l"(&map), "r"(shared_address(tile)), "r"(8), "r"(-2) : "memory");
    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
  }
}

extern "C" __global__ void ranges(const float* x, float* y) {
  __shared__ __align__(16) float part[256];
  __shared__ __align__(8) u64 bar;
  u32 at = shared_address(&bar);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.proxy.async.shared::cta;" ::"r"(at));
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], 1024;" ::"r"(at) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 1024, [%2];" ::"r"(shared_address(part)), "l"(x + blockIdx.x * 256), "r"(at) : "memory");
  }
  __syncthreads();
  asm volatile("{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%0], 0;\n@p bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(at) : "memory");
  part[threadIdx.x] *= 2.0f;
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 1024;" ::"l"(y + blockIdx.x * 256), "r"(shared_address(part)) : "memory");
    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
  }
}
