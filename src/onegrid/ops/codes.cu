// BF16 numbers to codes and scales in one pass over memory, with the bytes of `formats.quantize`.
//
// `blocks`: blocks of WIDTH numbers that lie one after another; SCALE 0: a power of two rounded up (MX), one byte; SCALE 2:
// E4M3 under a scale of the tensor (NVFP4), one byte. `squares`: SCALE 1: blocks of 128 x 128, an FP32 power of two (FP8).
// A number times its block's multiplier is a FP32 product of which the smaller steps are rounded off by adding a power of
// two; what the sum has more than that power is the code's last bits, and the power itself says the rest.
//
// Set by the caller: MANTISSA (3: E4M3, 1: E2M1), SCALE, WIDTH, CHUNKS (pieces of 8 numbers a thread). A piece is 16
// bytes; neighbouring lanes share a block. Codes of NaN and Inf mean nothing; `counts` says how many there were, how many
// numbers were beyond the format's range, and how many scales decode to no finite number: three numbers a block of threads.

#define FOUR (MANTISSA == 1)
#define MAX (FOUR ? 6.0f : 448.0f)
#define BEYOND (FOUR ? 7.0f : 464.000030517578125f)  // what rounding alone does not bring to MAX
#define LANES (WIDTH / 8)

// Code of a magnitude that is at most the largest of a format: M bits of mantissa, normal from 2^LEAST on.
template <int M, int LEAST>
__device__ __forceinline__ u32 code_of(float y) {
  constexpr int SHIFT = 23 - M, SMALLEST = LEAST + SHIFT + 127;
  const int power = max((__float_as_int(y) & 0x7F800000) + (SHIFT << 23), SMALLEST << 23);
  return __float_as_int(__fadd_rn(y, __int_as_float(power))) - power + (power >> SHIFT) - (SMALLEST << M);
}

__device__ __forceinline__ float magnitude(u32 half) { return __uint_as_float((half & 0x7FFFu) << 16); }

__device__ __forceinline__ u32 element(u32 half, float encode) {
  const float y = fminf(__fmul_rn(magnitude(half), encode), MAX);
  return FOUR ? code_of<1, 0>(y) | (half >> 12 & 8u) : code_of<3, -6>(y) | (half >> 8 & 0x80u);
}

// Largest magnitude of a piece as the bits of a BF16; NaN and Inf are larger than all numbers.
__device__ __forceinline__ u32 top_of(const uint4& v) {
  const u32 m = 0x7FFF7FFFu;
  const u32 both = larger_halves(larger_halves(v.x & m, v.y & m), larger_halves(v.z & m, v.w & m));
  return max(both & 0xFFFFu, both >> 16);
}

__device__ __forceinline__ void count(const uint4& v, u32 top, float encode, int* found) {
  if (top < 0x7F80u && !(magnitude(top) * encode >= BEYOND)) return;
  const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const u32 half = words[i / 2] >> 16 * (i % 2) & 0x7FFFu;
    found[0] += half >= 0x7F80u;
    found[1] += half <= 0x7F80u && magnitude(half) * encode >= BEYOND;
  }
}

__device__ __forceinline__ void store(const uint4& v, float encode, u32* codes, size_t piece) {
  const u32 words[4] = {v.x, v.y, v.z, v.w};
  u32 out[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const u32 code = element(words[i / 2] >> 16 * (i % 2) & 0xFFFFu, encode);
    if (FOUR) out[0] |= code << 4 * i;
    else out[i / 4] |= code << 8 * (i % 4);
  }
  if (FOUR) codes[piece] = out[0];
  else reinterpret_cast<uint2*>(codes)[piece] = make_uint2(out[0], out[1]);
}

// The block's sums of what its 256 threads have found.
__device__ __forceinline__ void report(int* found, int* counts) {
  __shared__ int warps[8][3];
#pragma unroll
  for (int i = 0; i < 3; i++) {
#pragma unroll
    for (int step = 16; step; step /= 2) found[i] += (int)__shfl_xor_sync(0xFFFFFFFFu, (u32)found[i], step);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32][i] = found[i];
  }
  __syncthreads();
  if (threadIdx.x < 3) {
    int sum = 0;
    for (int w = 0; w < 8; w++) sum += warps[w][threadIdx.x];
    counts[blockIdx.x * 3 + threadIdx.x] = sum;
  }
}

#if SCALE != 1
// sixth, inverse: of each tensor, FP32: its scale times 1/6, and 1 over it; NVFP4 only.
extern "C" __global__ void __launch_bounds__(256) blocks(
    const uint4* __restrict__ x, u32* __restrict__ codes, u8* __restrict__ scales, int* __restrict__ counts,
    const float* __restrict__ sixth, const float* __restrict__ inverse, int pieces, int pieces_of_tensor) {
  const int first = blockIdx.x * 256 * CHUNKS + threadIdx.x;
  uint4 v[CHUNKS];
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) v[i] = x[min(first + i * 256, pieces - 1)];
  int found[3] = {0, 0, 0};
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    const int piece = min(first + i * 256, pieces - 1);
    const bool mine = first + i * 256 < pieces;
    u32 top = top_of(v[i]);
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) top = max(top, __shfl_xor_sync(0xFFFFFFFFu, top, step));
    const float amax = magnitude(top);
#if SCALE == 0
    const int bits = __float_as_int(__fmul_rn(amax, FOUR ? 0x1.555556p-3f : 0x1.24924ap-9f));  // RN(1/6), RN(1/448)
    const int byte = bits <= 0x400000 ? 0 : min(((bits - 1) >> 23) + 1, 254);
    const float encode = __int_as_float(max((254 - byte) << 23, 0x00400000));
    const float decode = __int_as_float(max(byte << 23, 0x00400000));
    const bool overflows = __fmul_rn(decode, MAX) == __int_as_float(0x7F800000);
#else
    const int tensor = piece / pieces_of_tensor;
    const u32 byte = code_of<3, -6>(fminf(__fmul_rn(amax, sixth[tensor]), 448.0f));
    const float block = byte < 8 ? byte * 0x1p-9f : __uint_as_float((byte << 20) + (120u << 23));
    const float encode = fminf(__frcp_rn(__fmul_rn(block, inverse[tensor])), 3.4028234663852886e38f);
    const bool overflows = false;  // that is a matter of the tensor's scale
#endif
    if (mine) {
      count(v[i], top, encode, found);
      store(v[i], encode, codes, piece);
      if (piece % LANES == 0) {
        scales[piece / LANES] = byte;
        found[2] += overflows;
      }
    }
  }
  report(found, counts);
}
#else
extern "C" __global__ void __launch_bounds__(256) squares(
    const uint4* __restrict__ x, u32* __restrict__ codes, float* __restrict__ scales, int* __restrict__ counts,
    int pieces_of_row) {
  __shared__ u32 tops[8];
  const int wide = pieces_of_row / 16;  // squares of a row of them
  const size_t first = (size_t)(blockIdx.x / wide) * 128 * pieces_of_row + blockIdx.x % wide * 16;
  const size_t mine = first + (size_t)(threadIdx.x / 16) * pieces_of_row + threadIdx.x % 16;
  uint4 v[8];
  u32 top = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = x[mine + (size_t)i * 16 * pieces_of_row];
#pragma unroll
  for (int i = 0; i < 8; i++) top = max(top, top_of(v[i]));
#pragma unroll
  for (int step = 16; step; step /= 2) top = max(top, __shfl_xor_sync(0xFFFFFFFFu, top, step));
  if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = top;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < 8; w++) top = max(top, tops[w]);
  const float amax = magnitude(top);
  const u32 quotient = min(__float_as_uint(__fdiv_rn(MAX, amax)), 0x7F7FFFFFu) & 0x7F800000u;
  const float encode = top && top < 0x7F80u ? __uint_as_float(quotient) : 1.0f, decode = __fdiv_rn(1.0f, encode);
  int found[3] = {0, 0, threadIdx.x == 0 && __fmul_rn(decode, MAX) == __int_as_float(0x7F800000)};
#pragma unroll
  for (int i = 0; i < 8; i++) {
    count(v[i], top, encode, found);
    store(v[i], encode, codes, mine + (size_t)i * 16 * pieces_of_row);
  }
  if (threadIdx.x == 0) scales[blockIdx.x] = decode;
  report(found, counts);
}
#endif
