// arch: sm_80
// One block per row: shuffles, then shared memory, three passes.

__device__ float warp_max(float x) {
  for (int o = 16; o > 0; o /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, o));
  return x;
}

__device__ float warp_sum(float x) {
  for (int o = 16; o > 0; o /= 2) x += __shfl_xor_sync(~0u, x, o);
  return x;
}

extern "C" __global__ void softmax(const float* __restrict__ x, float* __restrict__ y, int columns) {
  __shared__ float part[32];
  const float* row = x + (size_t)blockIdx.x * columns;
  float* to = y + (size_t)blockIdx.x * columns;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;

  float most = -3.4e38f;
  for (int i = threadIdx.x; i < columns; i += blockDim.x) most = fmaxf(most, row[i]);
  most = warp_max(most);
  if (lane == 0) part[warp] = most;
  __syncthreads();
  most = warp_max(lane < warps ? part[lane] : -3.4e38f);
  __syncthreads();

  float sum = 0;
  for (int i = threadIdx.x; i < columns; i += blockDim.x) sum += __expf(row[i] - most);
  sum = warp_sum(sum);
  if (lane == 0) part[warp] = sum;
  __syncthreads();
  sum = warp_sum(lane < warps ? part[lane] : 0.0f);

  for (int i = threadIdx.x; i < columns; i += blockDim.x) to[i] = __expf(row[i] - most) / sum;
}
