// out [M, N] = x [M, K] w [N, K]^T for few rows M, weights from packed codes and scales, FP32 sums with K ascending.
//
// One block makes 32 HALVES FORMS columns n for all M = 16 MT rows: a warpgroup takes 64, or half as many and zeros, so that
// more blocks share few columns; it decodes their codes in registers on the way to the matrix unit (weights are its first
// operand) and adds 16 k after 16 k. Other warps copy KS numbers of every row of weights, their scales and x at a time into
// a ring of STAGES stages of shared memory: one copies x, which may wait for the kernel before, the others what does not.
// Within a step of 16 the order of k is free, since the unit adds a step's products as one: lane t of four takes codes 4t
// to 4t + 3 as pairs (0, 2) and (1, 3), so that the first operand's columns 0 .. 7 are the even k and 8 .. 15 the odd ones.
// x lies so, see `arranged.py`.
//
// Set by the caller: FORMS, HALVES (1 or 2), MT, KS, STAGES, BITS of a weight (4: E2M1, 8: E4M3), E8M0 (power-of-two scales
// of 32, else E4M3 scales of 16), EARLY. Sums of E2M1 are 2^-8 of the true ones until the end.

#define STEPS (KS / 16)
#define MATRIX_WARPS (4 * FORMS)
#define COLUMNS (32 * HALVES * FORMS)
#define COPIERS (FORMS < 3 ? 128 : 96)  // threads; with a warp less every thread may have 16 to 32 more registers
#define FOUR (BITS == 4)
#define W_BYTES (KS * BITS / 8)
#define W_ROW (W_BYTES + 16)  // eight rows of 16 bytes lie in different banks
#define X_STEP (MT * 16 * 32)
#define X_ALL (STEPS * X_STEP)
#define S_BYTES (E8M0 ? KS / 32 : KS / 16)  // scales of a row
#define X_AT (COLUMNS * W_ROW)
#define S_AT (X_AT + X_ALL)
#define STAGE_BYTES ((S_AT + COLUMNS * S_BYTES + 127) / 128 * 128)
static_assert(KS > 128 || STAGES > 2, "codes are read eight steps ahead, while the stage before is not given back yet");
#define AT_ONCE (FORMS < 4 || MT < 2 ? 4 : 2)  // steps that are decoded together

// Codes of four steps of column g, and of g + 8 where HALVES is 2, in w[step][half].
struct Codes {
  u32 w[4][HALVES];
};

__device__ __forceinline__ Codes codes_of(u32 at, int step) {
  Codes c;
#if FOUR
#pragma unroll
  for (int s = 0; s < 4; s++)
#pragma unroll
    for (int half = 0; half < HALVES; half++) c.w[s][half] = load2(at + half * 8 * W_ROW + (step + s) * 8);
#else
#pragma unroll
  for (int i = 0; i < HALVES; i++) matrices(&c.w[4 / HALVES * i][0], at + step * 16 + i * 32);
#endif
  return c;
}

// BF16 pairs (0, 2) and (1, 3) of four codes.
__device__ __forceinline__ void decode(u32& even, u32& odd, u32 w, u32 multiplier) {
#if FOUR
  w = __byte_perm(w, 0, 0x4140);
  even = times((w & 0x000F000Fu) * 0x1040u & 0x81C081C0u, multiplier);  // a code at bit 12, for its sign, and at bit 6
  odd = times((w & 0x00F000F0u) * 0x104u & 0x81C081C0u, multiplier);
#else
  even = times(bytes_of(w, 0, 0xA280) << 4 & 0x87F087F0u, multiplier);  // bytes 0 and 2 with their signs in front
  odd = times(bytes_of(w, 0, 0xB391) << 4 & 0x87F087F0u, multiplier);
#endif
}

// A column's scales of a stage as they lie. Scales of 16 are as many as steps, so that each of four lanes keeps a quarter.
#define WORDS (E8M0 ? KS / 128 : KS / 256)

__device__ __forceinline__ void load_scales(u32* words, u32 at, u32 t) {
#pragma unroll
  for (int j = 0; j < WORDS; j++) words[j] = load4(E8M0 ? at + 4 * j : at + 16 * j + 4 * t);
}

// Their multipliers, BF16 pairs: what takes a code's bits, moved to BF16's fields, to its value.
__device__ __forceinline__ void to_multipliers(u32 (*m)[4], const u32* words) {
#pragma unroll
  for (int j = 0; j < WORDS; j++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 both = __byte_perm(words[j], 0, 0x4040 + 0x0101 * i);
#if E8M0
      m[j][i] = both * 128u + (FOUR ? 118u : 120u) * 0x00800080u;
#else
      m[j][i] = times(times(both * 16u, 0x7B007B00u), 0x7B007B00u);  // E4M3's fields are 2^-120 of it; twice 2^119
#endif
    }
  }
}

__device__ __forceinline__ u32 multiplier(const u32 (*m)[4], int step) {
#if E8M0
  return m[step / 8][step / 2 % 4];
#else
  return __shfl_sync(0xFFFFFFFFu, m[step / 16][step % 4], step % 16 / 4, 4);
#endif
}

extern "C" __global__ void __launch_bounds__(32 * MATRIX_WARPS + COPIERS + 32, 1) packed_matmul(
    const u8* __restrict__ x, const u8* __restrict__ codes, const u8* __restrict__ scales,
    const float* __restrict__ x_row, const float* __restrict__ w_row, u32* __restrict__ out, int N, int K) {
  extern __shared__ __align__(128) u8 ring[];
  __shared__ __align__(8) u64 barriers[2 * STAGES];
  const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const u32 full = shared_at(barriers), empty = full + 8 * STAGES, base = shared_at(ring);
  const int num_stages = K / KS, n0 = blockIdx.x * COLUMNS;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      make_barrier(full + 8 * s, COPIERS + 1);
      make_barrier(empty + 8 * s, MATRIX_WARPS);
    }
    barriers_made();
  }
  __syncthreads();

  if (warp == MATRIX_WARPS + COPIERS / 32) {
    wait_for_former();
    for (int stage = 0; stage < num_stages; stage++) {
      const u32 slot = stage % STAGES, barrier = full + 8 * slot;
      if (stage >= STAGES) wait(empty + 8 * slot, (stage / STAGES - 1) & 1);
      if (lane == 0) {
        arrive_expecting(barrier, X_ALL);
        bulk_copy(base + slot * STAGE_BYTES + X_AT, x + (size_t)stage * X_ALL, X_ALL, barrier);
      }
      __syncwarp();
    }
    return;
  }

  if (warp >= MATRIX_WARPS) {
    const u32 mine = threadIdx.x - 32 * MATRIX_WARPS, piece = mine % (W_BYTES / 16), first = mine / (W_BYTES / 16);
    for (int stage = 0; stage < num_stages; stage++) {
      const u32 slot = stage % STAGES, at = base + slot * STAGE_BYTES;
      if (stage >= STAGES) wait(empty + 8 * slot, (stage / STAGES - 1) & 1);
#pragma unroll
      for (u32 row = first; row < COLUMNS; row += COPIERS * 16 / W_BYTES) {  // columns beyond N: the last, never stored
        const size_t n = min(n0 + (int)row, N - 1);
        copy<16>(at + row * W_ROW + piece * 16, codes + n * (K / 8 * BITS) + stage * W_BYTES + piece * 16);
      }
      for (u32 row = mine; row < COLUMNS; row += COPIERS) {
        const size_t n = min(n0 + (int)row, N - 1);
        copy<S_BYTES>(at + S_AT + row * S_BYTES, scales + n * (K / KS * S_BYTES) + stage * S_BYTES);
      }
      arrive_when_copied(full + 8 * slot);
    }
    wait_for_copies();
    return;
  }

  const u32 g = lane >> 2, t = lane & 3, column = warp * 8 * HALVES + g;
#if FOUR
  const u32 w_lane = column * W_ROW + t * 2;
#else
  const u32 w_lane = (warp * 8 * HALVES + lane % (8 * HALVES)) * W_ROW + lane / (8 * HALVES) * 16;
#endif
  const u32 s_lane = S_AT + column * S_BYTES;
  float sum[MT * 8] = {};
  u32 a[2][AT_ONCE][4] = {}, m[HALVES][WORDS][4], scales_of[HALVES][WORDS];
  u32 slot = 0, phase = 0, at = base;
  wait(full, 0);
  Codes now = codes_of(at + w_lane, 0), next = codes_of(at + w_lane, 4), after;  // of these four steps, of four later
#pragma unroll
  for (int half = 0; half < HALVES; half++) load_scales(scales_of[half], at + s_lane + half * 8 * S_BYTES, t);
  for (int stage = 0; stage < num_stages; stage++) {
    const u32 before = empty + 8 * (slot ? slot - 1 : STAGES - 1);
    const u32 x_at = __shfl_sync(0xFFFFFFFFu, base + slot * STAGE_BYTES + X_AT, 0);  // says that it is the same for all
    const u64 rows = tile(x_at, X_STEP / 2, 128);
#pragma unroll
    for (int half = 0; half < HALVES; half++) to_multipliers(m[half], scales_of[half]);
#pragma unroll
    for (int s = 0; s < STEPS; s += AT_ONCE) {
      if (s % 4 == 0) {  // what comes eight steps later
        if (s + 8 == STEPS) {
          if (++slot == STAGES) slot = 0, phase ^= 1;
          at = base + slot * STAGE_BYTES;
          if (stage + 1 < num_stages) {
            wait(full + 8 * slot, phase);
#pragma unroll
            for (int half = 0; half < HALVES; half++) load_scales(scales_of[half], at + s_lane + half * 8 * S_BYTES, t);
          }
        }
        if (s + 8 < STEPS || stage + 1 < num_stages) after = codes_of(at + w_lane, (s + 8) % STEPS);
      }
      u32(*const to)[4] = a[s / AT_ONCE & 1];
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
#pragma unroll
        for (int half = 0; half < HALVES; half++)
          decode(to[i][half], to[i][2 + half], now.w[(s + i) % 4][half], multiplier(m[half], s + i));
      }
      registers_written<4 * AT_ONCE>(to[0]);
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) multiply<2 * MT>(sum, to[i], rows + (s + i) * (X_STEP / 16));
      multiplication_begun();
      multiplied<1>();
      if (s == 0 && stage > 0) {  // products of the stage before have ended
        __syncwarp();
        if (lane == 0) arrive(before);
      }
      if ((s + AT_ONCE) % 4 == 0) now = next, next = after;
    }
  }
  all_multiplied<8 * MT>(sum);
  wait_for_former();  // for x_row, and whoever still reads what lies at out

  // Lanes 4g + t and 4g + t ^ 4 hold two columns side by side: each stores one row of both.
  const int n = n0 + column, odd = g & 1;
#pragma unroll
  for (int half = 0; half < HALVES; half++) {
#pragma unroll
    for (int j = 0; j < 2 * MT; j++) {
      float mine[2];
#pragma unroll
      for (int e = 0; e < 2; e++) {
        mine[e] = sum[4 * j + 2 * half + e] * (FOUR ? 256.0f : 1.0f);
#if !E8M0
        const int row = 8 * j + 2 * t + e, of = min(n + 8 * half, N - 1);
        mine[e] = __fmul_rn(__fmul_rn(mine[e], __uint_as_float(0x34149B93u)), __fmul_rn(x_row[row], w_row[of]));  // 1 / 2688^2
#endif
      }
      const float theirs = __shfl_xor_sync(0xFFFFFFFFu, mine[1 - odd], 4);
      const int row = 8 * j + 2 * t + odd, pair = n + 8 * half - odd;
      const u32 both = odd ? pair_of_bf16(theirs, mine[1]) : pair_of_bf16(mine[0], theirs);
      if (pair < N) out[((size_t)row * N + pair) / 2] = both;
    }
  }
}
