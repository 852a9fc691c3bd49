// arch: sm_80
// Integers of every width, bits, carries, and warp intrinsics.

typedef unsigned char u8; typedef unsigned short u16; typedef unsigned u32; typedef unsigned long long u64;

extern "C" __global__ void integers(const int* a, const int* b, long long* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  int x = a[i], y = b[i];
  long long l = (long long)x * 0x123456789LL + y, m = (long long)y << 7 | 1;
  int row = 0;
#define PUT(value) out[(row++) * n + i] = (long long)(value);
  PUT(x + y) PUT(x - y) PUT(x * y) PUT(y ? x / y : 0) PUT(y ? x % y : 0) PUT((u32)x / 7u) PUT((u32)x % 7u) PUT(x / 3)
  PUT(__mulhi(x, y)) PUT(__umulhi(x, y)) PUT(__popc(x)) PUT(__clz(x)) PUT(__brev(x)) PUT(__ffs(x)) PUT(__byte_perm(x, y, 0x5140)) PUT(__funnelshift_l(x, y, 5))
  PUT(__funnelshift_rc(x, y, 40)) PUT(__sad(x, y, 3)) PUT(__dp4a(x, y, 5)) PUT(__dp2a_lo(x, y, 5)) PUT(__mul24(x, y)) PUT(abs(x)) PUT(min(x, y)) PUT(max((u32)x, (u32)y))
  PUT(l / m) PUT(l % m) PUT((u64)l / (u64)m) PUT(__popcll(l)) PUT(__clzll(l)) PUT(__brevll(l)) PUT(__ffsll(l)) PUT(__mul64hi(l, m))
  PUT(l << (y & 63)) PUT(l >> (y & 63)) PUT((u64)l >> (y & 63)) PUT((signed char)x) PUT((u8)x) PUT((short)x) PUT((u16)x) PUT(l * m)
  PUT((short)(x + y)) PUT((u8)(x * y)) PUT(__vadd2(x, y)) PUT((float)x) PUT((double)l) PUT((u32)(float)(x & 0xffff)) PUT(x > y) PUT(l == m)
}

extern "C" __global__ void warps(const int* a, int* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  int x = a[i], row = 0;
#undef PUT
#define PUT(value) out[(row++) * n + i] = (int)(value);
  PUT(__shfl_sync(~0u, x, 5)) PUT(__shfl_up_sync(~0u, x, 3)) PUT(__shfl_down_sync(~0u, x, 7, 16)) PUT(__shfl_xor_sync(~0u, x, 9, 16))
  PUT(__ballot_sync(~0u, x & 1)) PUT(__any_sync(~0u, x == 3)) PUT(__all_sync(~0u, x >= 0)) PUT(__match_any_sync(~0u, x & 3))
  PUT(__reduce_add_sync(~0u, x)) PUT(__reduce_max_sync(~0u, x)) PUT(__reduce_xor_sync(~0u, x)) PUT(__activemask())
  if (x & 1) { PUT(__shfl_sync(__activemask(), x, __ffs(__activemask()) - 1)) } else { PUT(-1) }
  int p; unsigned m = __match_all_sync(~0u, x / 1000000, &p); PUT(m) PUT(p)
}
