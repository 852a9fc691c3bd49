// arch: sm_80
// Counts and weights per bin: atomics in shared memory, then in global memory.

extern "C" __global__ void histogram(const unsigned* __restrict__ key, const float* __restrict__ weight, unsigned* counts, float* sums, int n) {
  __shared__ unsigned own[64];
  if (threadIdx.x < 64) own[threadIdx.x] = 0;
  __syncthreads();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    atomicAdd(&own[key[i] % 64], 1u);
    atomicAdd(&sums[key[i] % 64], weight[i]);
  }
  __syncthreads();
  if (threadIdx.x < 64) atomicAdd(&counts[threadIdx.x], own[threadIdx.x]);
}
