// arch: sm_90a -lineinfo
// One function per output row: what NVRTC makes of CUDA's single-precision functions.

extern "C" __global__ void math_f32(const float* in, float* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float x = in[i];
  int row = 0;
#define PUT(value) out[(row++) * n + i] = (value);
  PUT(sinf(x)) PUT(cosf(x)) PUT(tanf(x)) PUT(expf(x)) PUT(logf(x)) PUT(powf(x, 1.7f)) PUT(erff(x)) PUT(tanhf(x))
  PUT(sqrtf(x)) PUT(rsqrtf(x)) PUT(x / (x + 2.0f)) PUT(floorf(x)) PUT(ceilf(x)) PUT(rintf(x)) PUT(truncf(x)) PUT(fmodf(x, 3.0f))
  PUT(roundf(x)) PUT(asinf(x)) PUT(acosf(x)) PUT(atanf(x)) PUT(sinhf(x)) PUT(coshf(x)) PUT(log1pf(x)) PUT(expm1f(x))
  PUT(exp2f(x)) PUT(log2f(x)) PUT(cbrtf(x)) PUT(fminf(x, 1.0f)) PUT(fmaxf(x, 0.0f)) PUT(fabsf(x)) PUT(__expf(x)) PUT(__logf(x))
  PUT(__fdividef(x, 3.0f)) PUT(erfcf(x)) PUT(atan2f(x, 2.0f)) PUT(copysignf(x, -1.0f)) PUT(ldexpf(x, 3)) PUT(hypotf(x, 2.0f))
  PUT(remainderf(x, 2.0f)) PUT(fdimf(x, 1.0f)) PUT(lgammaf(x)) PUT(tgammaf(x)) PUT(asinhf(x)) PUT(acoshf(x)) PUT(atanhf(x))
  PUT(exp10f(x)) PUT(log10f(x)) PUT(__sinf(x)) PUT(__cosf(x)) PUT(__frcp_rz(x)) PUT(__fadd_rd(x, 0.1f)) PUT(__fmul_ru(x, 0.1f))
  PUT(__fdiv_rz(x, 3.0f)) PUT(__fmaf_rd(x, x, 0.1f)) PUT(__fsqrt_ru(x)) PUT(__saturatef(x))
}
