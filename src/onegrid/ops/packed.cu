// out [M, N] = x [M, K] w [N, K]^T for few rows M, weights from packed codes and scales, FP32 sums with K ascending.
//
// One block makes COLUMNS columns n for all M = 16 MT rows. A warpgroup takes 64, or 32 and zeros, so that more blocks share
// few columns; where the last has fewer, what lies behind them is multiplied too and never stored. It decodes their codes in
// registers on the way to the matrix unit (weights are its first operand) and adds 16 k after 16 k. Three threads bring what
// is read by the copy engine: chunks of 128 bytes of every row of codes and the rows of x that belong to them, CHUNKS at a
// time, into a ring of STAGES stages of shared memory, and 16 scales of every row into another. Codes and scales may come
// before the kernel ahead has ended, x may not.
// Within a step of 16 the order of k is free, since the unit adds a step's products as one: lane t of four takes codes 4t
// to 4t + 3 as pairs (0, 2) and (1, 3), so that the first operand's columns 0 .. 7 are the even k and 8 .. 15 the odd ones.
// x lies so, see `arranged.py`.
//
// Set by the caller: COLUMNS (a multiple of 8 HALVES), FORMS (warpgroups), HALVES (of 32 columns, 1 or 2), MT, CHUNKS, STAGES,
// BITS of a weight (4: E2M1, 8: E4M3), E8M0 (power-of-two scales of 32, else E4M3 scales of 16), EARLY. K is a multiple of
// 512. Sums of E2M1 are 2^-8 of the true ones until the end.

#define MATRIX_WARPS (4 * FORMS)
#define FOUR (BITS == 4)
#define STEPS (FOUR ? 16 : 8)  // of a chunk
#define X_STEP (MT * 16 * 32)
#define CHUNK_BYTES (COLUMNS * 128)
#define X_AT (CHUNKS * CHUNK_BYTES)
#define X_ALL (CHUNKS * STEPS * X_STEP)
#define STAGE_BYTES (X_AT + X_ALL)
#define SCALE_SLOTS 3
#define SCALE_BYTES (COLUMNS * 16)
#define SCALE_CHUNKS (E8M0 ? (FOUR ? 2 : 4) : 1)  // to which 16 scales of a row belong
#define AT_LEAST (CHUNKS < SCALE_CHUNKS ? SCALE_CHUNKS : CHUNKS)
#define UNROLLED (AT_LEAST < 2 ? 2 : AT_LEAST)  // chunks. With one, ptxas lets no product run on beside the next decoding
#define QUARTERS (STEPS / 4)  // of a chunk, four steps each
#define AHEAD (FORMS < 3 && !FOUR ? 2 : 1)  // quarters whose codes are read before their turn
#define AT_ONCE (FORMS < 3 ? 4 : 2)  // steps that are decoded together

// Codes of four steps of column g, and of g + 8 where HALVES is 2, in w[step][half].
struct Codes {
  u32 w[4][HALVES];
};

// From a chunk's address with the lane's offset. Pieces of 16 bytes lie where `tensor_copy` swapped them to.
__device__ __forceinline__ Codes codes_of(u32 at, int step) {
  Codes c;
#if FOUR
#pragma unroll
  for (int s = 0; s < 4; s++)
#pragma unroll
    for (int half = 0; half < HALVES; half++) c.w[s][half] = load2((at ^ (step + s) / 2 * 16) + half * 1024 + (s & 1) * 8);
#else
#pragma unroll
  for (int i = 0; i < HALVES; i++) matrices(&c.w[4 / HALVES * i][0], at ^ (step + 2 * i) * 16);
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

// A column's scales of a chunk as they lie. Scales of 16 are as many as steps, so that each of four lanes keeps a quarter.
#define WORDS (E8M0 ? STEPS / 8 : 1)
#define ALL_WORDS (SCALE_CHUNKS * WORDS)  // of 16 scales

__device__ __forceinline__ void load_scales(u32* words, u32 at, u32 t) {
#pragma unroll
  for (int j = 0; j < ALL_WORDS; j++) words[j] = load4(at + (E8M0 ? 4 * j : 4 * t));
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

extern "C" __global__ void __launch_bounds__(32 * MATRIX_WARPS + 96, 1) packed_matmul(
    const u8* __restrict__ x, const __grid_constant__ Map codes, const __grid_constant__ Map scales,
    const float* __restrict__ x_row, const float* __restrict__ w_row, u32* __restrict__ out, int N, int K) {
  extern __shared__ __align__(1024) u8 ring[];
  __shared__ __align__(8) u64 barriers[2 * (STAGES + SCALE_SLOTS)];
  const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const u32 full = shared_at(barriers), empty = full + 8 * STAGES, scales_full = full + 16 * STAGES,
            scales_empty = scales_full + 8 * SCALE_SLOTS, base = (shared_at(ring) + 1023) & ~1023u,
            scales_at = base + STAGES * STAGE_BYTES;
  const int num_chunks = K / (16 * STEPS), num_stages = num_chunks / CHUNKS, n0 = blockIdx.x * COLUMNS;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      make_barrier(full + 8 * s, 2);
      make_barrier(empty + 8 * s, MATRIX_WARPS);
    }
    for (int s = 0; s < SCALE_SLOTS; s++) {
      make_barrier(scales_full + 8 * s, 1);
      make_barrier(scales_empty + 8 * s, MATRIX_WARPS);
    }
    barriers_made();
  }
  __syncthreads();

  if (warp >= MATRIX_WARPS) {
    if (lane > 0) return;
    if (warp == MATRIX_WARPS) {
      for (int stage = 0; stage < num_stages; stage++) {
        const u32 slot = stage % STAGES;
        if (stage >= STAGES) wait(empty + 8 * slot, (stage / STAGES - 1) & 1);
        arrive_expecting(full + 8 * slot, X_AT);
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
          tensor_copy(base + slot * STAGE_BYTES + c * CHUNK_BYTES, &codes, (stage * CHUNKS + c) * 128, n0, full + 8 * slot);
      }
    } else if (warp == MATRIX_WARPS + 1) {
      for (int piece = 0; piece * SCALE_CHUNKS < num_chunks; piece++) {
        const u32 slot = piece % SCALE_SLOTS;
        if (piece >= SCALE_SLOTS) wait(scales_empty + 8 * slot, (piece / SCALE_SLOTS - 1) & 1);
        arrive_expecting(scales_full + 8 * slot, SCALE_BYTES);
        tensor_copy(scales_at + slot * SCALE_BYTES, &scales, piece * 16, n0, scales_full + 8 * slot);
      }
    } else {
      wait_for_former();
      for (int stage = 0; stage < num_stages; stage++) {
        const u32 slot = stage % STAGES;
        if (stage >= STAGES) wait(empty + 8 * slot, (stage / STAGES - 1) & 1);
        arrive_expecting(full + 8 * slot, X_ALL);
        bulk_copy(base + slot * STAGE_BYTES + X_AT, x + (size_t)stage * X_ALL, X_ALL, full + 8 * slot);
      }
    }
    return;
  }

  const u32 g = lane >> 2, t = lane & 3, column = warp * 8 * HALVES + g;
#if FOUR
  const u32 w_lane = column * 128 + g * 16 + t * 2;
#else
  const u32 w_lane = (warp * 8 * HALVES + lane % (8 * HALVES)) * 128 + (lane / (8 * HALVES) ^ lane % 8) * 16;
#endif
  float sum[MT * 8] = {};
  u32 a[2][AT_ONCE][4] = {}, m[HALVES][WORDS][4], scales_of[HALVES][ALL_WORDS];
  u64 rows = 0;
  u32 before = 0, x_slot = 0;                   // of the products
  u32 slot = 0, phase = 0, at = base + w_lane;  // of the codes, ahead of them
  u32 scale_slot = 0, scale_phase = 0;
  Codes codes_in[2 * AHEAD];  // of four steps each, in turns
  wait(full, 0);
#pragma unroll
  for (int q = 0; q < AHEAD; q++) codes_in[q] = codes_of(at, 4 * q);
  wait(scales_full, 0);
#pragma unroll
  for (int half = 0; half < HALVES; half++) load_scales(scales_of[half], scales_at + (column + 8 * half) * 16, t);
  for (int first = 0; first < num_chunks; first += UNROLLED) {
#pragma unroll
    for (int c = 0; c < UNROLLED; c++) {
      if (c % CHUNKS == 0) {
        before = empty + 8 * (x_slot ? x_slot - 1 : STAGES - 1);
        // The shuffle says that it is the same for all lanes.
        rows = tile(__shfl_sync(0xFFFFFFFFu, base + x_slot * STAGE_BYTES + X_AT, 0), X_STEP / 2, 128);
        if (++x_slot == STAGES) x_slot = 0;
      } else rows += STEPS * X_STEP / 16;
#pragma unroll
      for (int half = 0; half < HALVES; half++) to_multipliers(m[half], scales_of[half] + c % SCALE_CHUNKS * WORDS);
#pragma unroll
      for (int s = 0; s < STEPS; s += 4) {
        const int quarter = c * QUARTERS + s / 4, later = quarter + AHEAD, of_chunk = later / QUARTERS;
        if (first + of_chunk < num_chunks) {
          if (later % QUARTERS == 0) {
            at += CHUNK_BYTES;
            if (of_chunk % CHUNKS == 0) {
              if (++slot == STAGES) slot = 0, phase ^= 1;
              at = base + slot * STAGE_BYTES + w_lane;
              wait(full + 8 * slot, phase);
            }
          }
          codes_in[later % (2 * AHEAD)] = codes_of(at, later % QUARTERS * 4);
        }
        if (s + 4 == STEPS && (c + 1) % SCALE_CHUNKS == 0 && first + c + 1 < num_chunks) {
          __syncwarp();
          if (lane == 0) arrive(scales_empty + 8 * scale_slot);
          if (++scale_slot == SCALE_SLOTS) scale_slot = 0, scale_phase ^= 1;
          wait(scales_full + 8 * scale_slot, scale_phase);
          const u32 of_column = scales_at + scale_slot * SCALE_BYTES + column * 16;
#pragma unroll
          for (int half = 0; half < HALVES; half++) load_scales(scales_of[half], of_column + half * 128, t);
        }
        const Codes& now = codes_in[quarter % (2 * AHEAD)];
#pragma unroll
        for (int e = 0; e < 4; e += AT_ONCE) {
          u32(*const to)[4] = a[(s + e) / AT_ONCE & 1];
#pragma unroll
          for (int i = 0; i < AT_ONCE; i++) {
#pragma unroll
            for (int half = 0; half < HALVES; half++)
              decode(to[i][half], to[i][2 + half], now.w[e + i][half], multiplier(m[half], s + e + i));
          }
          registers_written<4 * AT_ONCE>(to[0]);
#pragma unroll
          for (int i = 0; i < AT_ONCE; i++) multiply<2 * MT>(sum, to[i], rows + (s + e + i) * (X_STEP / 16));
          multiplication_begun();
          multiplied<1>();
          if (s + e == 0 && c % CHUNKS == 0 && first + c > 0) {  // products of the stage before have ended
            __syncwarp();
            if (lane == 0) arrive(before);
          }
        }
      }
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
      if (column + 8 * half - odd < COLUMNS && pair < N) out[((size_t)row * N + pair) / 2] = both;
    }
  }
}
