// BF16 numbers to codes and scales, with the bytes of `formats.quantize`, in one pass over memory (NVFP4: two).
//
// `blocks`: blocks of WIDTH numbers that lie one after another; SCALE 0: a power of two rounded up (MX), one byte; SCALE 2:
// E4M3 under a scale of the tensor (NVFP4), one byte. `squares`: SCALE 1: blocks of 128 x 128, an FP32 power of two (FP8).
// `tops`: the amax of tensors, in parts, which NVFP4 needs first.
//
// A product with a power of two is exact in BF16, or so small that nothing of it is left; so are its two numbers an
// instruction. A magnitude y has the E2M1 code min(2y, y + 2, y/2 + 4, 7) but for rounding, and a sum with a power of two
// that has whole numbers as its last bits rounds to the nearest, ties to even codes: the order of the four stays.
//
// Set by the caller: MANTISSA (3: E4M3, 1: E2M1), SCALE, WIDTH, CHUNKS (pieces of 8 numbers a thread). A piece is 16
// bytes; neighbouring lanes share a block. `counts` are added to: NaN and Inf, numbers beyond the format's range, and scales
// that decode to no finite number. Blocks that hold NaN or Inf have the first of these right, and nothing else.

#define FOUR (MANTISSA == 1)
#define LANES (WIDTH / 8)
#define EVERY_LANE 0xFFFFFFFFu
#define SIZES 0x7FFF7FFFu
#define FLT_MAX 3.4028234663852886e38f

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// Largest magnitude of a piece, once in even and once in odd numbers; as whole numbers, so NaN and Inf are above all.
__device__ __forceinline__ u32 tops_of(const uint4& v) {
  return larger_halves(larger_halves(v.x & SIZES, v.y & SIZES), larger_halves(v.z & SIZES, v.w & SIZES));
}

__device__ __forceinline__ u32 larger_of(u32 pair) { return max(pair & 0xFFFFu, pair >> 16); }

// Of the block that the piece belongs to.
__device__ __forceinline__ u32 top_of_block(const uint4& v) {
  u32 both = tops_of(v);
#pragma unroll
  for (int step = 1; step < LANES; step *= 2) both = larger_halves(both, __shfl_xor_sync(EVERY_LANE, both, step));
  return larger_of(both);
}

// Byte of the smallest power of two that brings a block whose largest magnitude has these BF16 bits into the range.
__device__ __forceinline__ u32 byte_of(u32 top) { return max((int)(top + (FOUR ? 63 : 31) >> 7) - (FOUR ? 2 : 8), 0); }

// Its inverse as BF16, twice.
__device__ __forceinline__ u32 inverse_of(u32 byte) { return (254 - byte) * 0x800080u; }

__device__ __forceinline__ void count(const uint4& v, float encode, u32* found) {
  const float beyond = FOUR ? 7.0f : 464.000030517578125f;  // what rounding alone does not bring to the largest
  const u32 words[4] = {v.x & SIZES, v.y & SIZES, v.z & SIZES, v.w & SIZES};
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float x = i % 2 ? high(words[i / 2]) : low(words[i / 2]);
    found[0] += !(x <= FLT_MAX);
    found[1] += x * encode >= beyond;
  }
}

__device__ __forceinline__ void report(const u32* found, u64* counts) {
#pragma unroll
  for (int i = 0; i < 3; i++) {
    const u32 sum = __reduce_add_sync(EVERY_LANE, found[i]);
    if (sum && threadIdx.x % 32 == 0) atomicAdd(counts + i, (u64)sum);
  }
}

// Codes of eight numbers. encode: what a block is multiplied by, a power of two as BF16, twice, or any FP32 number.

#if SCALE == 2
typedef float Multiplier;
#else
typedef u32 Multiplier;
#endif

#if MANTISSA == 3
typedef uint2 Codes;

__device__ __forceinline__ Codes codes_of(const uint4& v, u32 encode) {
  const u32 y[4] = {times(v.x, encode), times(v.y, encode), times(v.z, encode), times(v.w, encode)};
  return make_uint2(four_of_e4m3(low(y[0]), high(y[0]), low(y[1]), high(y[1])),
                    four_of_e4m3(low(y[2]), high(y[2]), low(y[3]), high(y[3])));
}

#else
typedef u32 Codes;

// Four bits each, from bytes that hold codes of magnitudes, of every two numbers the second first.
__device__ __forceinline__ u32 nibbles(u32 first, u32 second, const uint4& v) {
  first |= __byte_perm(v.x, v.y, 0x5713) >> 4 & 0x08080808u;
  second |= __byte_perm(v.z, v.w, 0x5713) >> 4 & 0x08080808u;
  return __byte_perm(first * 0x1001u, second * 0x1001u, 0x7531);
}

__device__ __forceinline__ u32 codes_of_two(u32 x, u32 encode) {
  const u32 y = times(x & SIZES, encode);
  const u32 steep = times_plus(y, 0x40004000u, 0x43004300u), flat = times_plus(y, 0x3F003F00u, 0x43044304u);
  return smaller(smaller(steep, plus(y, 0x43024302u)), flat);  // 128 + 2y, 130 + y, 132 + y/2
}

__device__ __forceinline__ Codes codes_of(const uint4& v, u32 encode) {
  return nibbles(__byte_perm(codes_of_two(v.x, encode), codes_of_two(v.y, encode), 0x4602),
                 __byte_perm(codes_of_two(v.z, encode), codes_of_two(v.w, encode), 0x4602), v);
}

// The same in FP32, with 2^23. CAPPED: also where y is 7 or more.
template <bool CAPPED>
__device__ __forceinline__ u32 code_of_one(float x, float encode) {
  float y = __fmul_rn(fabsf(x), encode);
  if (CAPPED) y = fminf(y, 6.0f);
  const u32 steep = __float_as_uint(__fmaf_rn(y, 2.0f, 0x1p23f)), flat = __float_as_uint(__fmaf_rn(y, 0.5f, 0x1p23f + 4));
  return __vimin3_u32(steep, __float_as_uint(__fadd_rn(y, 0x1p23f + 2)), flat);
}

template <bool CAPPED>
__device__ __forceinline__ u32 codes_of_four(u32 a, u32 b, float encode) {
  const u32 first = __byte_perm(code_of_one<CAPPED>(high(a), encode), code_of_one<CAPPED>(low(a), encode), 0x0040);
  return __byte_perm(
      first, __byte_perm(code_of_one<CAPPED>(high(b), encode), code_of_one<CAPPED>(low(b), encode), 0x0040), 0x5410);
}

template <bool CAPPED = false>
__device__ __forceinline__ Codes codes_of(const uint4& v, float encode) {
  return nibbles(codes_of_four<CAPPED>(v.x, v.y, encode), codes_of_four<CAPPED>(v.z, v.w, encode), v);
}
#endif

#if SCALE == 1
extern "C" __global__ void __launch_bounds__(256) squares(
    const uint4* __restrict__ x, Codes* __restrict__ codes, float* __restrict__ scales, u64* __restrict__ counts,
    int pieces_of_row) {
  __shared__ u32 warps[8];
  const int wide = pieces_of_row / 16;  // squares of a row of them
  const size_t first = (size_t)(blockIdx.x / wide) * 128 * pieces_of_row + blockIdx.x % wide * 16;
  const size_t mine = first + threadIdx.x / 16 * pieces_of_row + threadIdx.x % 16;
  uint4 v[8];
  u32 tops = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = x[mine + (size_t)i * 16 * pieces_of_row];
#pragma unroll
  for (int i = 0; i < 8; i++) tops = larger_halves(tops, tops_of(v[i]));
  u32 top = __reduce_max_sync(EVERY_LANE, larger_of(tops));
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = top;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < 8; w++) top = max(top, warps[w]);
  const u32 byte = top ? byte_of(top) : 127, encode = inverse_of(byte);
  u32 found[3] = {0, 0, threadIdx.x == 0 && byte >= 247};
#pragma unroll
  for (int i = 0; i < 8; i++) codes[mine + (size_t)i * 16 * pieces_of_row] = codes_of(v[i], encode);
  if (top >= 0x7F80u) {
#pragma unroll
    for (int i = 0; i < 8; i++) count(v[i], low(encode), found);
  }
  if (threadIdx.x == 0) scales[blockIdx.x] = __uint_as_float(max(byte << 23, 0x00400000u));
  report(found, counts);
}
#else

#if SCALE == 2
// parts: of each tensor, FP32 [parts_of_tensor], at most 256. A block of threads reads 256 pieces of its tensor, then those
// that lie parts_of_tensor times as many further on.
extern "C" __global__ void __launch_bounds__(256) tops(
    const uint4* __restrict__ x, float* __restrict__ parts, int pieces_of_tensor, int parts_of_tensor) {
  __shared__ u32 warps[8];
  const uint4* mine = x + (size_t)(blockIdx.x / parts_of_tensor) * pieces_of_tensor;
  const int step = parts_of_tensor * 256;
  u32 tops = 0;
  for (int at = blockIdx.x % parts_of_tensor * 256 + threadIdx.x; at < pieces_of_tensor; at += step * CHUNKS) {
    uint4 v[CHUNKS];
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) v[i] = mine[min(at + i * step, pieces_of_tensor - 1)];
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) tops = larger_halves(tops, tops_of(v[i]));
  }
  const u32 top = __reduce_max_sync(EVERY_LANE, larger_of(tops));
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = top;
  __syncthreads();
  if (threadIdx.x) return;
  u32 all = top;
#pragma unroll
  for (int w = 1; w < 8; w++) all = max(all, warps[w]);
  parts[blockIdx.x] = low(all);
}

// Largest of a tensor's parts, for the whole block of threads.
__device__ __forceinline__ float largest(const float* parts, int count) {
  __shared__ u32 warps[8];
  u32 top = threadIdx.x < count ? __float_as_uint(parts[threadIdx.x]) : 0;
  top = __reduce_max_sync(EVERY_LANE, top);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = top;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < 8; w++) top = max(top, warps[w]);
  return __uint_as_float(top);
}
#endif

// parts, amax, factor: NVFP4 only. amax and 1 over the encode scale are written for each tensor, FP32.
// As many blocks of threads a multiprocessor as leave registers for all pieces: else the compiler loads some of them later.
extern "C" __global__ void __launch_bounds__(256, SCALE == 2 || CHUNKS > 4 ? 3 : 5) blocks(
    const uint4* __restrict__ x, Codes* __restrict__ codes, u8* __restrict__ scales, u64* __restrict__ counts,
    const float* __restrict__ parts, float* __restrict__ amax, float* __restrict__ factor, int pieces, int blocks_of_tensor,
    int parts_of_tensor) {
  // The last blocks of threads first: the cache still holds what the pass over `tops` has read last.
  const u32 block = SCALE == 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const u32 tensor = SCALE == 2 ? block / blocks_of_tensor : 0, part = SCALE == 2 ? block % blocks_of_tensor : block;
  const int lane = threadIdx.x % 32, start = (part * 8 + threadIdx.x / 32) * 32 * CHUNKS;  // a warp's pieces lie together
  const int left = pieces - start - lane;
  const size_t first = (size_t)tensor * pieces + start;
  uint4 v[CHUNKS];
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) v[i] = i * 32 < left ? x[first + lane + i * 32] : make_uint4(0, 0, 0, 0);
  u32 found[3] = {0, 0, 0}, top[CHUNKS], bytes[CHUNKS];
#if SCALE == 2
  const float all = largest(parts + (size_t)tensor * parts_of_tensor, parts_of_tensor);
  float scale = fminf(__fdiv_rn(2688.0f, all), FLT_MAX);
  if (all == 0.0f || scale == 0.0f) scale = 1.0f;
  const float sixth = __fmul_rn(scale, 0x1.555556p-3f), inverse = __frcp_rn(scale);
  if (part == 0 && threadIdx.x == 0) {
    amax[tensor] = all;
    factor[tensor] = inverse;
    const bool decodes = all >= (float)(2688.0 / 3.4028234663852886e38) && all <= (float)(3.4028234663852886e38 / 448.0);
    found[2] = all != 0.0f && !decodes;
  }
#endif
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) top[i] = top_of_block(v[i]);
  Multiplier encode[CHUNKS];
  bool unusual = false;
#if SCALE == 0
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    bytes[i] = byte_of(top[i]);
    encode[i] = inverse_of(bytes[i]);
    unusual |= top[i] >= 0x7F80u || bytes[i] >= (FOUR ? 253 : 247);
  }
#else
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    bytes[i] = one_of_e4m3(__fmul_rn(low(top[i]), sixth));
    encode[i] = __fmul_rn(value_of_e4m3(bytes[i]), inverse);  // its reciprocal, to begin with
  }
  if (inverse > 0x1p-100f && inverse < 0x1p100f) {
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
      const float near = quick_reciprocal(encode[i]);  // of 0: Inf, and NaN below, which is left out
      encode[i] = fminf(__fmaf_rn(near, __fmaf_rn(-encode[i], near, 1.0f), near), FLT_MAX);
    }
  } else {
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) encode[i] = fminf(__frcp_rn(encode[i]), FLT_MAX);
  }
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) unusual |= !(low(top[i]) * encode[i] < 7.0f);  // NaN and Inf too
#endif
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    const Codes made = codes_of(v[i], encode[i]);
    if (i * 32 < left) codes[first + lane + i * 32] = made;
  }
  if (__any_sync(EVERY_LANE, unusual)) {  // once more, a piece at a time
#pragma unroll 1
    for (int i = 0; i < CHUNKS; i++) {
      const uint4 again = i * 32 < left ? x[first + lane + i * 32] : make_uint4(0, 0, 0, 0);
      const u32 top = top_of_block(again);
#if SCALE == 0
      count(again, low(inverse_of(byte_of(top))), found);
      found[2] += byte_of(top) >= (FOUR ? 253 : 247) && lane % LANES == 0;
#else
      const float block = value_of_e4m3(one_of_e4m3(__fmul_rn(low(top), sixth)));
      const float encode = fminf(__frcp_rn(__fmul_rn(block, inverse)), FLT_MAX);
      count(again, encode, found);
      if (i * 32 < left) codes[first + lane + i * 32] = codes_of<true>(again, encode);
#endif
    }
  }
  // Every lane of a block knows its byte: each stores that of another chunk.
#pragma unroll
  for (int i = 0; i < CHUNKS; i += LANES) {
    const int chunk = lane % LANES;
    u32 byte = bytes[i];
#pragma unroll
    for (int j = 1; j < LANES; j++) byte = chunk == j ? bytes[i + j] : byte;
    if ((i + chunk) * 32 < left + chunk) scales[first / LANES + (i + chunk) * (32 / LANES) + lane / LANES] = byte;
  }
  report(found, counts);
}
#endif
