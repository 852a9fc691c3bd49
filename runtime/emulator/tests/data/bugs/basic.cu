// arch: sm_80 -lineinfo
// Planted bugs that need no asynchronous hardware; line numbers are in the tests.

extern "C" __global__ void one_too_far(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i <= n) y[i] = x[i] * 2.0f;
}

extern "C" __global__ void misaligned(const float* x, float* y) {
  ((float2*)y)[threadIdx.x] = *(const float2*)(x + 2 * threadIdx.x + 1);
}

extern "C" __global__ void diverged_shuffle(const int* x, int* y) {
  int v = x[threadIdx.x];
  if (threadIdx.x < 8) v += __shfl_xor_sync(~0u, v, 1);
  __syncthreads();
  y[threadIdx.x] = v;
}

extern "C" __global__ void barrier_in_a_branch(int* y) {
  if (threadIdx.x < 40) __syncthreads();
  y[threadIdx.x] = 1;
  __syncthreads();
}

extern "C" __global__ void too_few_arrive(int* y) {
  if (threadIdx.x < 64) asm volatile("bar.sync 1, 128;");
  y[threadIdx.x] = 1;
}

extern "C" __global__ void endless(volatile int* flag) {
  while (*flag == 0) {}
}

extern "C" __global__ void trapped(const int* x) {
  if (x[threadIdx.x] == 3) __trap();
}

extern "C" __global__ void beyond_shared(int* y, int k) {
  __shared__ int s[64];
  s[threadIdx.x] = threadIdx.x;
  __syncthreads();
  y[threadIdx.x] = s[threadIdx.x + k];
}

__constant__ int table[32];

extern "C" __global__ void into_constants(int* y) {
  asm volatile("st.global.u32 [%0], 1;" ::"l"(&table[threadIdx.x]));
  y[threadIdx.x] = table[threadIdx.x];
}
