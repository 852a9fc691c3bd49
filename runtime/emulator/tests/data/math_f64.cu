// arch: sm_90a -lineinfo
// The same in double precision; several of these are functions that are called.

extern "C" __global__ void math_f64(const double* in, double* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  double x = in[i];
  int row = 0;
#define PUT(value) out[(row++) * n + i] = (value);
  PUT(sin(x)) PUT(cos(x)) PUT(tan(x)) PUT(exp(x)) PUT(log(x)) PUT(pow(x, 2.5)) PUT(erf(x)) PUT(tanh(x))
  PUT(sqrt(x)) PUT(rsqrt(x)) PUT(x / 3.0) PUT(floor(x)) PUT(ceil(x)) PUT(rint(x)) PUT(trunc(x)) PUT(fmod(x, 3.0))
  PUT(round(x)) PUT(asin(x)) PUT(acos(x)) PUT(atan(x)) PUT(sinh(x)) PUT(cosh(x)) PUT(log1p(x)) PUT(expm1(x))
  PUT(exp2(x)) PUT(log2(x)) PUT(cbrt(x)) PUT(fmin(x, 1.0)) PUT(fmax(x, 0.0)) PUT(fabs(x)) PUT(lgamma(x)) PUT(erfc(x))
  PUT(atan2(x, 2.0)) PUT(asinh(x)) PUT(__dadd_rz(x, 0.1)) PUT(__dmul_rd(x, 0.1)) PUT(__ddiv_ru(x, 3.0)) PUT(__fma_rz(x, x, 0.1))
}
