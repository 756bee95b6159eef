// out [M, N] = x [M, K] w [N, K]^T for few rows M, BF16, FP32 sums with K ascending in steps of 16.
//
// One block makes COLUMNS columns n for all M = 16 MT rows; a warpgroup takes 64 of them, weights are the matrix unit's
// first operand. Two threads bring slabs of 64 k by the copy engine, COLUMNS rows of w and 16 MT of x, into a ring of STAGES
// stages of shared memory, SLABS at a time: one the weights, which may begin before the kernel ahead has ended, the other x.
// The last warpgroup may have fewer columns than 64; what lies behind them is multiplied too and never stored.
//
// Set by the caller: COLUMNS (a multiple of 8), FORMS (warpgroups), MT, SLABS, STAGES, EARLY.

#define MATRIX_WARPS (4 * FORMS)
#define W_SLAB (COLUMNS * 128)
#define X_SLAB (MT * 16 * 128)
#define STAGE_BYTES (SLABS * (W_SLAB + X_SLAB))

extern "C" __global__ void __launch_bounds__(32 * MATRIX_WARPS + 64, 1) few_matmul(
    const __grid_constant__ Map w, const __grid_constant__ Map x, u32* __restrict__ out, int N, int K) {
  extern __shared__ __align__(1024) u8 ring[];
  __shared__ __align__(8) u64 barriers[2 * STAGES];
  const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const u32 full = shared_at(barriers), empty = full + 8 * STAGES, base = (shared_at(ring) + 1023) & ~1023u;
  const int num_stages = K / (64 * SLABS), n0 = blockIdx.x * COLUMNS;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      make_barrier(full + 8 * s, 2);
      make_barrier(empty + 8 * s, MATRIX_WARPS);
    }
    barriers_made();
  }
  __syncthreads();

  if (warp >= MATRIX_WARPS) {
    const bool rows = warp > MATRIX_WARPS;
    if (lane == 0) {
      if (rows) wait_for_former();
      for (int stage = 0; stage < num_stages; stage++) {
        const u32 slot = stage % STAGES, barrier = full + 8 * slot, at = base + slot * STAGE_BYTES;
        if (stage >= STAGES) wait(empty + 8 * slot, (stage / STAGES - 1) & 1);
        arrive_expecting(barrier, SLABS * (rows ? X_SLAB : W_SLAB));
#pragma unroll
        for (int s = 0; s < SLABS; s++) {
          const int k = (stage * SLABS + s) * 64;
          if (rows) tensor_copy(at + SLABS * W_SLAB + s * X_SLAB, &x, k, 0, barrier);
          else tensor_copy(at + s * W_SLAB, &w, k, n0, barrier);
        }
      }
    }
    return;
  }

  const u32 form = warp / 4;
  float sum[MT * 8] = {};
  u32 slot = 0, phase = 0;
  for (int stage = 0; stage < num_stages; stage++) {
    // The shuffles say that these are the same for all lanes.
    const u32 at = __shfl_sync(0xFFFFFFFFu, base + slot * STAGE_BYTES, 0), mine = __shfl_sync(0xFFFFFFFFu, form, 0);
    wait(full + 8 * slot, phase);
    sums_written();
    const u64 weights = slab(at + mine * 64 * 128), rows = slab(at + SLABS * W_SLAB);
#pragma unroll
    for (int s = 0; s < SLABS; s++)
#pragma unroll
      for (int k = 0; k < 4; k++)
        multiply_shared<2 * MT>(sum, weights + (s * W_SLAB + k * 32) / 16, rows + (s * X_SLAB + k * 32) / 16);
    multiplication_begun();
    multiplied<1>();
    if (stage > 0 && lane == 0) arrive(empty + 8 * (slot ? slot - 1 : STAGES - 1));  // products of the stage before have ended
    if (++slot == STAGES) slot = 0, phase ^= 1;
  }
  all_multiplied<8 * MT>(sum);
  wait_for_former();  // whoever still reads what lies at out

  // Lanes 4g + t and 4g + t ^ 4 hold two columns side by side: each stores one row of both.
  const u32 g = lane >> 2, t = lane & 3;
  const int odd = g & 1;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int pair = (int)(warp * 16 + g) + 8 * half - odd, n = n0 + pair;
#pragma unroll
    for (int j = 0; j < 2 * MT; j++) {
      const float first = sum[4 * j + 2 * half], second = sum[4 * j + 2 * half + 1];
      const float theirs = __shfl_xor_sync(0xFFFFFFFFu, odd ? first : second, 4);
      const int row = 8 * j + 2 * t + odd;
      const u32 both = odd ? pair_of_bf16(theirs, second) : pair_of_bf16(first, theirs);
      if (pair < COLUMNS && n < N) out[((size_t)row * N + n) / 2] = both;
    }
  }
}
