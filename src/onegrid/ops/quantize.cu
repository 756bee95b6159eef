// Quantize and decode BF16 numbers in one pass over memory, with the bytes of the definition in `formats`.
//
// `flat`: blocks of WIDTH numbers that lie one after another, a power-of-two scale each. All of it is exact or rounded
// once in BF16 itself, two numbers an instruction: products with powers of two, and the sum with an anchor that leaves
// the element's mantissa bits. `rows`: NVFP4, a block is 16 numbers, an amax per row; scaled in FP32.
//
// Set by the caller: WIDTH, FOUR (E2M1, else E4M3), POWERS (1: the rule of FP8 blocks, else that of MX), EARLY, CHUNKS
// (pieces of 8 numbers a thread), ARRANGED (1: also in the order of `arranged.py`). A thread's piece is 16 bytes;
// WIDTH / 8 neighbouring lanes share a block.

#define SIGNS 0x80008000u

__device__ __forceinline__ u32 capped(u32 a, u32 b) {
  return FOUR ? smaller(a, b) : smaller_or_nan(a, b);  // E2M1 has no NaN: the largest value
}

// Signs of x; in E2M1 those of NaN are dropped.
__device__ __forceinline__ u32 signs(u32 x) {
#if FOUR
  return x & SIGNS & ones_where_number(x);
#else
  return x & SIGNS;
#endif
}

__device__ __forceinline__ float amax_of(const uint4& v) {
  const u32 m = 0x7FFF7FFFu;
  u32 top = larger(larger(larger(0, v.x & m), v.y & m), larger(larger(0, v.z & m), v.w & m));
#pragma unroll
  for (int step = 1; step < WIDTH / 8; step *= 2) top = larger(top, __shfl_xor_sync(0xFFFFFFFFu, top, step));
  return fmaxf(__uint_as_float(top << 16), __uint_as_float(top & 0xFFFF0000u));
}

// Powers of two in both halves of a word, as BF16.
__device__ __forceinline__ void powers(float amax, u32& encode, u32& decode) {
#if POWERS != 1
  const int bits = __float_as_int(amax * (FOUR ? 0x1.555556p-3f : 0x1.24924ap-9f));  // RN(1/6), RN(1/448)
  const int byte = bits <= 0x400000 ? 0 : min(((bits - 1) >> 23) + 1, 254);
  encode = max((254 - byte) << 7, 0x40);
  decode = max(byte << 7, 0x40);
#else
  const u32 quotient = min(__float_as_uint(__fdiv_rn(448.0f, amax)), 0x7F7FFFFFu) & 0x7F800000u;
  const float scale = amax > 0.0f && amax < __int_as_float(0x7F800000) ? __uint_as_float(quotient) : 1.0f;
  encode = __float_as_uint(scale) >> 16;
  decode = __float_as_uint(__fdiv_rn(1.0f, scale)) >> 16;
#endif
  encode *= 0x10001u;
  decode *= 0x10001u;
}

__device__ __forceinline__ u32 value(u32 x, u32 encode, u32 decode) {
  const u32 largest = FOUR ? 0x40C040C0u : 0x43E043E0u;   // 6, 448
  const u32 above = FOUR ? 0x03000300u : 0x02000200u;     // exponent of the anchor over that of the number
  const u32 smallest = FOUR ? 0x42804280u : 0x3E803E80u;  // anchor of subnormal elements: 2^6, 2^-2
  const u32 y = capped(times(x & 0x7FFF7FFFu, encode), largest);
  const u32 anchor = larger((y & 0x7F807F80u) + above, smallest);
  return times(minus(plus(y, anchor), anchor), decode | signs(x));
}

// Piece `at` of a row among `rows` in the order of `arranged.py`: its even numbers, and its odd ones.
__device__ __forceinline__ void arrange(uint2* __restrict__ arranged, const uint4& y, int row, int at, int rows) {
  uint2* to = arranged + ((size_t)(at / 2) * 2 * rows + row) * 2 + at % 2;
  to[0] = make_uint2(__byte_perm(y.x, y.y, 0x5410), __byte_perm(y.z, y.w, 0x5410));
  to[2 * rows] = make_uint2(__byte_perm(y.x, y.y, 0x7632), __byte_perm(y.z, y.w, 0x7632));
}

extern "C" __global__ void __launch_bounds__(256) flat(
    const uint4* __restrict__ x, uint4* __restrict__ out, uint2* __restrict__ arranged, int count, int pieces) {
  wait_for_former();
  let_next_begin();
  const int first = blockIdx.x * 256 * CHUNKS + threadIdx.x;
  uint4 v[CHUNKS];
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) v[i] = x[min(first + i * 256, count - 1)];
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    u32 encode, decode;
    powers(amax_of(v[i]), encode, decode);
    uint4 y;
    y.x = value(v[i].x, encode, decode);
    y.y = value(v[i].y, encode, decode);
    y.z = value(v[i].z, encode, decode);
    y.w = value(v[i].w, encode, decode);
    const int at = first + i * 256;
    if (at < count) {
      out[at] = y;
      if (ARRANGED) arrange(arranged, y, at / pieces, at % pieces, count / pieces);
    }
  }
}

#if FOUR && WIDTH == 16
__device__ __forceinline__ float rounded(float y) {
  y = fminf(y, 6.0f);
  const float anchor = __int_as_float(max((__float_as_int(y) & 0x7F800000) + (22 << 23), 0x4A800000));
  return __fsub_rn(__fadd_rn(y, anchor), anchor);
}

__device__ __forceinline__ u32 block_value(u32 x, float encode, u32 block) {
  const float low = rounded(__fmul_rn(__uint_as_float((x & 0x7FFFu) << 16), encode));
  const float high = rounded(__fmul_rn(__uint_as_float(x & 0x7FFF0000u), encode));
  return times(__byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632), block | signs(x));
}

extern "C" __global__ void __launch_bounds__(256) rows(
    const uint4* __restrict__ x, uint4* __restrict__ out, uint2* __restrict__ arranged, float* __restrict__ amax, int pieces,
    int stride) {
  wait_for_former();
  let_next_begin();
  const size_t row = blockIdx.x;
  uint4 v[CHUNKS];
  float top[CHUNKS], all = 0.0f;
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    const int at = threadIdx.x + i * 256;
    v[i] = at < pieces ? x[row * stride + at] : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) all = fmaxf(all, top[i] = amax_of(v[i]));
#pragma unroll
  for (int step = 16; step; step /= 2) all = fmaxf(all, __shfl_xor_sync(0xFFFFFFFFu, all, step));
  __shared__ float warps[8];
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = all;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 8; i++) all = fmaxf(all, warps[i]);
  if (threadIdx.x == 0) amax[row] = all;
  const float flt_max = 3.4028234663852886e38f;
  float scale = fminf(__fdiv_rn(2688.0f, all), flt_max);
  if (all == 0.0f || scale == 0.0f) scale = 1.0f;
  const float sixth = __fmul_rn(scale, 0x1.555556p-3f), inverse = __frcp_rn(scale);
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    float b = fminf(__fmul_rn(top[i], sixth), 448.0f);
    const float anchor = fmaxf(__int_as_float((__float_as_int(b) & 0x7F800000) + (20 << 23)), 0x1p14f);
    b = __fsub_rn(__fadd_rn(b, anchor), anchor);
    const float encode = fminf(__frcp_rn(__fmul_rn(b, inverse)), flt_max);
    const u32 block = (__float_as_uint(b) >> 16) * 0x10001u;
    uint4 y;
    y.x = block_value(v[i].x, encode, block);
    y.y = block_value(v[i].y, encode, block);
    y.z = block_value(v[i].z, encode, block);
    y.w = block_value(v[i].w, encode, block);
    const int at = threadIdx.x + i * 256;
    if (at < pieces) {
      out[row * pieces + at] = y;
      if (ARRANGED) arrange(arranged, y, row, at, gridDim.x);
    }
  }
}
#endif
