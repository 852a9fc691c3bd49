// arch: sm_80 -lineinfo
// Element-wise kernels: four floats per access, a remainder, and bf16.

struct __align__(16) F4 { float x, y, z, w; };

__device__ float gelu(float x) { return 0.5f * x * (1.0f + erff(x * 0.70710678f)); }

extern "C" __global__ void gelu_of_sum(const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ out, int n) {
  int stride = gridDim.x * blockDim.x;
  int first = blockIdx.x * blockDim.x + threadIdx.x;
  for (int i = first; i < n / 4; i += stride) {
    F4 x = ((const F4*)a)[i], y = ((const F4*)b)[i];
    ((F4*)out)[i] = {gelu(x.x + y.x), gelu(x.y + y.y), gelu(x.z + y.z), gelu(x.w + y.w)};
  }
  int i = n / 4 * 4 + first;
  if (i < n) out[i] = gelu(a[i] + b[i]);
}

__device__ float widen(unsigned short h) { return __uint_as_float((unsigned)h << 16); }

extern "C" __global__ void scale_bf16(const unsigned short* __restrict__ a, unsigned short* __restrict__ out, float s, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  unsigned short h;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(widen(a[i]) * s));
  out[i] = h;
}

extern "C" __global__ void multiply_add_chain(float* data, int n, int rounds) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float a = data[i], b = 0.5f, c = 0.25f, d = 0.125f;
  for (int k = 0; k < rounds; k++) {
#pragma unroll
    for (int j = 0; j < 16; j++) {
      a = a * 0.75f + b;
      b = b * 0.5f + c;
      c = c * 0.25f + d;
      d = d * 0.125f + a;
    }
  }
  data[i] = a + b + c + d;
}
