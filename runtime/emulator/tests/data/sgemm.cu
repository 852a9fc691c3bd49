// arch: sm_80
// C = A B in single precision, row-major: 64 x 64 tiles, four by four per thread, guarded edges.

#define TILE 64
#define DEPTH 16

extern "C" __global__ void __launch_bounds__(256) sgemm(const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ c, int m, int n, int k) {
  __shared__ float as[DEPTH][TILE + 4], bs[DEPTH][TILE];
  int t = threadIdx.x, tx = t % 16, ty = t / 16;
  int row0 = blockIdx.y * TILE, col0 = blockIdx.x * TILE;
  float acc[4][4] = {};
  for (int k0 = 0; k0 < k; k0 += DEPTH) {
    for (int i = t; i < TILE * DEPTH; i += 256) {
      int r = i / DEPTH, q = i % DEPTH;
      as[q][r] = row0 + r < m && k0 + q < k ? a[(size_t)(row0 + r) * k + k0 + q] : 0.0f;
    }
    for (int i = t; i < TILE * DEPTH; i += 256) {
      int q = i / TILE, col = i % TILE;
      bs[q][col] = col0 + col < n && k0 + q < k ? b[(size_t)(k0 + q) * n + col0 + col] : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int q = 0; q < DEPTH; q++) {
      float x[4], y[4];
      for (int i = 0; i < 4; i++) x[i] = as[q][ty * 4 + i];
      for (int j = 0; j < 4; j++) y[j] = bs[q][tx * 4 + j];
      for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) acc[i][j] += x[i] * y[j];
    }
    __syncthreads();
  }
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 4; j++) {
      int r = row0 + ty * 4 + i, col = col0 + tx * 4 + j;
      if (r < m && col < n) c[(size_t)r * n + col] = acc[i][j];
    }
}
