// arch: sm_90a
// Tiles in im2col mode, of one, two and three spatial axes: 64 pixels of 16 channels, from a start for each block; and one that a cluster of two shares.

typedef unsigned u32; typedef unsigned long long u64; typedef unsigned short u16;

struct alignas(64) Map { u64 words[16]; };

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ u32 begin(u64* bar) {
  u32 at = shared_address(bar);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(at));
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], 4096;" ::"r"(at) : "memory");
  }
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  return at;
}

__device__ __forceinline__ void finish(u32 bar, const float* tile, float* y) {
  asm volatile("{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%0], 0;\n@p bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(bar) : "memory");
  for (int i = threadIdx.x; i < 1024; i += blockDim.x) y[blockIdx.x * 1024 + i] = tile[i];
}

#define LOAD "cp.async.bulk.tensor."
#define MODE ".shared::cluster.global.im2col.mbarrier::complete_tx::bytes"

extern "C" __global__ void pixels_3d(const __grid_constant__ Map map, const int* starts, u16 x, float* y) {
  __shared__ __align__(128) float tile[1024];
  __shared__ __align__(8) u64 bar;
  const u32 at = begin(&bar);
  const int* s = starts + blockIdx.x * 3;
  if (threadIdx.x == 0)
    asm volatile(LOAD "3d" MODE " [%0], [%1, {%3, %4, %5}], [%2], {%6};"
                 ::"r"(shared_address(tile)), "l"(&map), "r"(at), "r"(s[0]), "r"(s[1]), "r"(s[2]), "h"(x) : "memory");
  finish(at, tile, y);
}

extern "C" __global__ void pixels_4d(const __grid_constant__ Map map, const int* starts, u16 x, u16 y_offset, float* y) {
  __shared__ __align__(128) float tile[1024];
  __shared__ __align__(8) u64 bar;
  const u32 at = begin(&bar);
  const int* s = starts + blockIdx.x * 4;
  if (threadIdx.x == 0)
    asm volatile(LOAD "4d" MODE " [%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};"
                 ::"r"(shared_address(tile)), "l"(&map), "r"(at), "r"(s[0]), "r"(s[1]), "r"(s[2]), "r"(s[3]), "h"(x), "h"(y_offset) : "memory");
  finish(at, tile, y);
}

// A tile of four axes: a map in im2col mode does not fit it.
extern "C" __global__ void tile_4d(const __grid_constant__ Map map, float* y) {
  __shared__ __align__(128) float tile[1024];
  __shared__ __align__(8) u64 bar;
  const u32 at = begin(&bar);
  if (threadIdx.x == 0)
    asm volatile(LOAD "4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %3, %3, %3}], [%2];"
                 ::"r"(shared_address(tile)), "l"(&map), "r"(at), "r"(0) : "memory");
  finish(at, tile, y);
}

extern "C" __global__ void pixels_5d(const __grid_constant__ Map map, const int* starts, u16 x, u16 y_offset, u16 z, float* y) {
  __shared__ __align__(128) float tile[1024];
  __shared__ __align__(8) u64 bar;
  const u32 at = begin(&bar);
  const int* s = starts + blockIdx.x * 5;
  if (threadIdx.x == 0)
    asm volatile(LOAD "5d" MODE " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], {%8, %9, %10};"
                 ::"r"(shared_address(tile)), "l"(&map), "r"(at), "r"(s[0]), "r"(s[1]), "r"(s[2]), "r"(s[3]), "r"(s[4]), "h"(x), "h"(y_offset), "h"(z)
                 : "memory");
  finish(at, tile, y);
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) pixels_shared(const __grid_constant__ Map map, const int* starts, u16 x, u16 y_offset, float* y) {
  __shared__ __align__(128) float tile[1024];
  __shared__ __align__(8) u64 bar;
  const u32 at = begin(&bar);
  const int* s = starts + blockIdx.x * 4;
  if (threadIdx.x == 0 && blockIdx.x % 2 == 0)
    asm volatile(LOAD "4d" MODE ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8}, %9;"
                 ::"r"(shared_address(tile)), "l"(&map), "r"(at), "r"(s[0]), "r"(s[1]), "r"(s[2]), "r"(s[3]), "h"(x), "h"(y_offset), "h"((u16)3)
                 : "memory");
  finish(at, tile, y);
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
