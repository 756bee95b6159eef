// out [M, N] = x [M, K] w [N, K]^T for few rows M, weights from packed codes and scales, FP32 sums with K ascending.
//
// One block makes NT tiles of 8 columns n for all M = 16 MT rows. Its matrix warps take TPW tiles of M / WR rows each,
// decode the codes in registers on the way to the matrix unit (mma.m16n8k16, rows of x first) and add 16 k after 16 k.
// Other warps copy KS numbers of every row of weights and x, and the weights' scales, at a time into a ring of STAGES
// stages of shared memory: one copies rows of x, which may wait for the kernel before, four copy what does not.
// Within a step of 16 the order of k is free, since the unit adds a step's products as one: lane t of four takes those
// that `matrices` gives it of x, k 2t, 2t + 1, 2t + 8 and 2t + 9.
//
// Set by the caller: NT, TPW, WR, MT, KS, STAGES, BITS of a weight (4: E2M1, 8: E4M3), E8M0 (power-of-two scales of 32,
// else E4M3 scales of 16), EARLY. Sums of E2M1 are 2^-8 of the true ones until the end.

#define STEPS (KS / 16)
#define MATRIX_WARPS (NT / TPW * WR)
#define MINE (MT / WR)  // tiles of 16 rows of a matrix warp
#define COPIERS 128     // threads
#define FOUR (BITS == 4)
#define W_BYTES (KS * BITS / 8)
#define W_ROW (W_BYTES + 16)  // eight rows of 16 bytes lie in different banks
#define X_BYTES (KS * 2)
#define X_ROW (X_BYTES + 16)
#define S_BYTES (E8M0 ? KS / 32 : KS / 16)  // scales of a row
#define X_AT (NT * 8 * W_ROW)
#define S_AT (X_AT + MT * 16 * X_ROW)
#define STAGE_BYTES ((S_AT + NT * 8 * S_BYTES + 127) / 128 * 128)

struct Codes {
  u32 first, second;  // of k 2t, 2t + 1 and of k 2t + 8, 2t + 9
};

__device__ __forceinline__ Codes load_codes(u32 at, int step) {
#if FOUR
  return {load1(at + step * 8), load1(at + step * 8 + 4)};
#else
  return {load2(at + step * 16), load2(at + step * 16 + 8)};
#endif
}

// BF16 pairs of what `load_codes` gives.
__device__ __forceinline__ void decode(u32* b, Codes codes, u32 multiplier) {
#if FOUR
  u32 w = codes.first | codes.second << 8;
  w |= w << 12;
  b[0] = times(((w << 6) & 0x01C001C0u) | ((w << 12) & 0x80008000u), multiplier);
  b[1] = times(((w >> 2) & 0x01C001C0u) | ((w << 4) & 0x80008000u), multiplier);
#else
  const u32 w = __byte_perm(codes.first, codes.second, 0x5140);
  b[0] = times(((w << 4) & 0x07F007F0u) | ((w << 8) & 0x80008000u), multiplier);
  b[1] = times(((w >> 4) & 0x07F007F0u) | (w & 0x80008000u), multiplier);
#endif
}

// A column's multipliers of a stage, BF16 pairs: what takes a code's bits, moved to BF16's fields, to its value. Scales of
// 16 are as many as steps, so that each of four lanes keeps a quarter of them.
#define WORDS (E8M0 ? KS / 128 : KS / 256)

__device__ __forceinline__ void load_multipliers(u32 (*m)[4], u32 at, u32 t) {
#pragma unroll
  for (int j = 0; j < WORDS; j++) {
    const u32 word = load4(E8M0 ? at + 4 * j : at + 16 * j + 4 * t);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 both = __byte_perm(word, 0, 0x4040 + 0x0101 * i);
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
  const int num_stages = K / KS, n0 = blockIdx.x * NT * 8;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      make_barrier(full + 8 * s, 2 * COPIERS + 1);
      make_barrier(empty + 8 * s, MATRIX_WARPS);
    }
    barriers_made();
  }
  __syncthreads();

  if (warp == MATRIX_WARPS + COPIERS / 32) {
    wait_for_former();
    let_next_begin();
    for (int stage = 0; stage < num_stages; stage++) {
      const u32 slot = stage % STAGES, to = base + slot * STAGE_BYTES + X_AT, barrier = full + 8 * slot;
      if (stage >= STAGES) wait(empty + 8 * slot, (stage / STAGES - 1) & 1);
      if (lane == 0) arrive_expecting(barrier, MT * 16 * X_BYTES);
      __syncwarp();
      for (u32 row = lane; row < MT * 16; row += 32)
        bulk_copy(to + row * X_ROW, x + ((size_t)row * K + stage * KS) * 2, X_BYTES, barrier);
    }
    return;
  }

  if (warp >= MATRIX_WARPS) {
    const u32 mine = threadIdx.x - 32 * MATRIX_WARPS;
    const u32 bytes = (NT * 8 - mine + COPIERS - 1) / COPIERS * W_BYTES;  // of its rows
    for (int stage = 0; stage < num_stages; stage++) {
      const u32 slot = stage % STAGES, at = base + slot * STAGE_BYTES, barrier = full + 8 * slot;
      if (stage >= STAGES) wait(empty + 8 * slot, (stage / STAGES - 1) & 1);
      arrive_expecting(barrier, mine < NT * 8 ? bytes : 0);
      for (u32 row = mine; row < NT * 8; row += COPIERS) {  // columns beyond N are made of the last, and never stored
        const size_t n = min(n0 + (int)row, N - 1);
        bulk_copy(at + row * W_ROW, codes + n * (K / 8 * BITS) + stage * W_BYTES, W_BYTES, barrier);
        copy<S_BYTES>(at + S_AT + row * S_BYTES, scales + n * (K / KS * S_BYTES) + stage * S_BYTES);
      }
      arrive_when_copied(barrier);
    }
    wait_for_copies();
    return;
  }

  wait_for_former();  // for x_row, and whoever still reads what lies at out
  let_next_begin();
  const u32 g = lane >> 2, t = lane & 3, column = warp / WR * TPW * 8 + g, first_row = warp % WR * MINE * 16;
  const u32 w_lane = column * W_ROW + t * (FOUR ? 1 : 2), s_lane = S_AT + column * S_BYTES;
  const u32 x_lane = X_AT + (first_row + (lane & 15)) * X_ROW + (lane >> 4) * 16;
  float sum[TPW][MINE][4] = {};
  u32 a[2][MINE][4], m[TPW][WORDS][4], slot = 0, phase = 0, at = base;
  Codes w[2][TPW];
  wait(full, 0);
#pragma unroll
  for (int c = 0; c < MINE; c++) matrices(a[0][c], at + x_lane + c * 16 * X_ROW);
#pragma unroll
  for (int r = 0; r < TPW; r++) {
    w[0][r] = load_codes(at + w_lane + r * 8 * W_ROW, 0);
    load_multipliers(m[r], at + s_lane + r * 8 * S_BYTES, t);
  }
  for (int stage = 0; stage < num_stages; stage++) {
    const u32 here = empty + 8 * slot;
    const bool more = stage + 1 < num_stages;
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
      const int next = (s + 1) % STEPS;
      u32 factor[TPW];
#pragma unroll
      for (int r = 0; r < TPW; r++) factor[r] = multiplier(m[r], s);
      if (next == 0 && more) {
        if (++slot == STAGES) slot = 0, phase ^= 1;
        at = base + slot * STAGE_BYTES;
        wait(full + 8 * slot, phase);
#pragma unroll
        for (int r = 0; r < TPW; r++) load_multipliers(m[r], at + s_lane + r * 8 * S_BYTES, t);
      }
      if (next || more) {  // what the next step reads
#pragma unroll
        for (int c = 0; c < MINE; c++) matrices(a[(s + 1) & 1][c], at + x_lane + c * 16 * X_ROW + next * 32);
#pragma unroll
        for (int r = 0; r < TPW; r++) w[(s + 1) & 1][r] = load_codes(at + w_lane + r * 8 * W_ROW, next);
      }
#pragma unroll
      for (int r = 0; r < TPW; r++) {
        u32 b[2];
        decode(b, w[s & 1][r], factor[r]);
#pragma unroll
        for (int c = 0; c < MINE; c++) mma(sum[r][c], a[s & 1][c], b);
      }
    }
    __syncwarp();
    if (lane == 0) arrive(here);
  }

#pragma unroll
  for (int r = 0; r < TPW; r++) {
    const int n = n0 + (warp / WR * TPW + r) * 8 + 2 * t;
    if (n >= N) continue;
#pragma unroll
    for (int c = 0; c < MINE; c++) {
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        const int row = first_row + c * 16 + e * 4 + g;
        float low = sum[r][c][e] * (FOUR ? 256.0f : 1.0f), high = sum[r][c][e + 1] * (FOUR ? 256.0f : 1.0f);
#if !E8M0
        const float inverse = __uint_as_float(0x34149B93u);  // 1 / 2688^2
        low = __fmul_rn(__fmul_rn(low, inverse), __fmul_rn(x_row[row], w_row[n]));
        high = __fmul_rn(__fmul_rn(high, inverse), __fmul_rn(x_row[row], w_row[n + 1]));
#endif
        out[((size_t)row * N + n) / 2] = pair_of_bf16(low, high);
      }
    }
  }
}
