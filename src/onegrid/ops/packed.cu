// out [M, N] = x [M, K] decode(w) [N, K]^T for few rows M, from packed codes and scales, FP32 sums with K ascending.
//
// One block makes RT tiles of 16 columns n for all M = 16 MT rows. Warps of three roles share a ring of STAGES stages
// of 128 k each in shared memory, laid out as the matrix unit's own fragments, so that every load is 16 bytes wide and
// no sum waits for a decode:
//   weight warps   load 16 bytes of codes a lane, decode them to BF16, store fragments
//   x warps        load x, store fragments
//   matrix warps   mma.m16n8k16 with weights as the first operand, one step of 16 k after another
// Within a step of 16 the order of k is free (the unit adds a step's products as one), so lane t of four takes
// k = 4t .. 4t + 3 in the order 0, 2, 1, 3: what decoding by pairs of bytes gives, for weights and x alike.
//
// Set by the caller: RT, MT, RPW (tiles of a matrix warp), WW and WX (warps), STAGES, BITS of a weight (4: E2M1,
// 8: E4M3), E8M0 (power-of-two scales of 32, else E4M3 scales of 16). Sums of E2M1 are 2^-8 of the true ones until the
// end.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned char u8;

#define TILE_BYTES 4096  // 16 rows x 128 k in BF16
#define STAGE_BYTES ((RT + MT) * TILE_BYTES)
#define MATRIX_WARPS (RT / RPW)
#define FOUR (BITS == 4)
#define LOADS (BITS / 2)               // of 16 bytes a lane, for 16 rows x 128 k
#define UNITS 2                        // that a weight warp has on their way
#define AHEAD (RPW * MT <= 2 ? 4 : 2)  // steps whose fragments a matrix warp holds

__device__ __forceinline__ u32 shared_at(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void wait(u32 barrier, u32 phase) {
  u32 done;
  do {
    asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
        : "=r"(done) : "r"(barrier), "r"(phase) : "memory");
  } while (!done);
}

__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ u32 times(u32 a, u32 b) {
  u32 c;
  asm("mul.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}

__device__ __forceinline__ void store8(u32 at, u32 a, u32 b) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(at), "r"(a), "r"(b) : "memory");
}

__device__ __forceinline__ uint4 stream16(const u8* at) {  // read once: not worth the first cache
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
  return v;
}

// Byte of a fragment: row 8 h + g of its tile, step of 16 k, quarter t of the step. The exclusive or spreads both the
// stores of a half warp and the loads of a quarter warp over all banks.
__device__ __forceinline__ u32 place(u32 h, u32 g, u32 step, u32 t) {
  return step * 512 + (g >> 1) * 128 + (((((g & 1) << 2) | t) ^ step ^ ((g >> 1) & 1)) << 4) + h * 8;
}

// Both BF16 halves: what takes a code's bits, moved to BF16's fields, to its value.
__device__ __forceinline__ u32 multiplier(u32 scale) {
#if E8M0
  return (scale + (FOUR ? 118 : 120)) * 0x00800080u;
#else
  float s = __int_as_float(scale << 20) * 0x1p119f * 0x1p119f;  // E4M3's fields in FP32 are 2^-120 of its value
  return __byte_perm(__float_as_uint(s), 0, 0x3232);
#endif
}

// What a lane loads and stores of 16 rows x 128 k, and where. Half a warp has rows that differ in h (and, of E2M1, in one
// bit of g) times steps, so that its stores meet no bank twice.
struct Lane {
  u32 row, step;  // first row; first step of 16 k
  u32 spots[4];   // places of quarter 0 .. 3 of that row and step
};

__device__ __forceinline__ Lane lane_of_rows(u32 lane) {  // E4M3: a step is a piece; x: two
  const u32 half = lane >> 4, h = (lane >> 3) & 1, step = lane & 7;
  Lane at = {h * 8 + half, step};
#pragma unroll
  for (u32 t = 0; t < 4; t++) at.spots[t] = place(h, half, step, t);
  return at;
}

__device__ __forceinline__ Lane lane_of_nibbles(u32 lane) {  // E2M1: a piece is two steps
  const u32 half = lane >> 4, g = ((lane >> 3) & 1) * 2 + half, h = (lane >> 2) & 1, step = (lane & 3) * 2;
  Lane at = {h * 8 + g, step};
#pragma unroll
  for (u32 t = 0; t < 4; t++) at.spots[t] = place(h, g, step, t);
  return at;
}

// Rows two further are in the next 128 bytes, with the lowest bit of t flipped every time: see `place`.
__device__ __forceinline__ void load_rows(uint4* v, const u8* x, int row0, int k0, int K, const Lane& lane) {
  const u8* at = x + ((size_t)(row0 + lane.row) * K + k0 + lane.step * 16) * 2;
  const size_t down = (size_t)K * 4;
#pragma unroll
  for (int j = 0; j < 8; j++) {
    v[j] = __ldg((const uint4*)(at + (j >> 1) * down + (j & 1) * 16));
  }
}

__device__ __forceinline__ void store_rows(const uint4* v, u32 tile, const Lane& lane) {
#pragma unroll
  for (int j = 0; j < 8; j++) {
    const u32 t = (j & 1) * 2, flip = (j >> 1) & 1, at = tile + (j >> 1) * 128;
    store8(at + lane.spots[t ^ flip], __byte_perm(v[j].x, v[j].y, 0x5410), __byte_perm(v[j].x, v[j].y, 0x7632));
    store8(at + lane.spots[(t + 1) ^ flip], __byte_perm(v[j].z, v[j].w, 0x5410), __byte_perm(v[j].z, v[j].w, 0x7632));
  }
}

struct Unit {  // 16 rows x 128 k of weights, as loaded by one warp
  uint4 codes[LOADS];
  u32 scales[LOADS];
};

__device__ __forceinline__ void load_unit(
    Unit& u, const u8* codes, const u8* scales, int n0, int k0, int K, const Lane& lane) {
  const size_t row = n0 + lane.row;
  const int k = k0 + lane.step * 16, width = E8M0 ? 32 : 16, down = FOUR ? 4 : 2;
  const u8* at = codes + (FOUR ? (row * K + k) / 2 : row * K + k);
  const u8* scale = scales + row * (K / width) + k / width;
#pragma unroll
  for (int j = 0; j < LOADS; j++) {
    u.codes[j] = stream16(at + (size_t)j * down * (FOUR ? K / 2 : K));
    const u8* from = scale + (size_t)j * down * (K / width);
    u.scales[j] = E8M0 ? __ldg(from) : __ldg((const unsigned short*)from);
  }
}

__device__ __forceinline__ void store_unit(const Unit& u, u32 tile, const Lane& lane) {
#pragma unroll
  for (int j = 0; j < LOADS; j++) {
    const u32 word[4] = {u.codes[j].x, u.codes[j].y, u.codes[j].z, u.codes[j].w};
#if FOUR
#pragma unroll
    for (int s = 0; s < 2; s++) {
      const u32 m = multiplier(E8M0 ? u.scales[j] : (u.scales[j] >> (8 * s)) & 255);
      const u32 at = tile + j * 256 + s * 512;
#pragma unroll
      for (int q = 0; q < 2; q++) {  // eight codes: quarters 2q and 2q + 1 of the step
        const u32 w = __byte_perm(word[2 * s + q], 0, 0x3120);
        const u32 a = ((w << 6) & 0x01C001C0u) | ((w << 12) & 0x80008000u);
        const u32 b = ((w << 2) & 0x01C001C0u) | ((w << 8) & 0x80008000u);
        const u32 c = ((w >> 2) & 0x01C001C0u) | ((w << 4) & 0x80008000u);
        const u32 d = ((w >> 6) & 0x01C001C0u) | (w & 0x80008000u);
        store8(at + lane.spots[(2 * q) ^ s], times(a, m), times(b, m));
        store8(at + lane.spots[(2 * q + 1) ^ s], times(c, m), times(d, m));
      }
    }
#else
    const u32 m = multiplier(u.scales[j]);
#pragma unroll
    for (int t = 0; t < 4; t++) {
      const u32 w = word[t];
      const u32 a = ((w << 4) & 0x07F007F0u) | ((w << 8) & 0x80008000u);
      const u32 b = ((w >> 4) & 0x07F007F0u) | (w & 0x80008000u);
      store8(tile + j * 128 + lane.spots[t ^ (j & 1)], times(a, m), times(b, m));
    }
#endif
  }
}

__device__ __forceinline__ void mma(float* c, const uint4& a, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.x), "r"(a.z), "r"(a.y), "r"(a.w), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint4 fragment(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}

__device__ __forceinline__ unsigned short to_bf16(float x) {
  unsigned short y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}

extern "C" __global__ void __launch_bounds__(32 * (MATRIX_WARPS + WW + WX), 1) packed_matmul(
    const u8* __restrict__ x, const u8* __restrict__ codes, const u8* __restrict__ scales,
    const float* __restrict__ x_row, const float* __restrict__ w_row, unsigned short* __restrict__ out, int N, int K) {
  extern __shared__ __align__(1024) u8 ring[];
  __shared__ __align__(8) u64 barriers[2 * STAGES];
  const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const u32 full = shared_at(barriers), empty = full + 8 * STAGES, base = shared_at(ring);
  const int num_stages = K / 128, n0 = blockIdx.x * RT * 16;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(full + 8 * s), "r"(RT + MT) : "memory");
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(empty + 8 * s), "r"(MATRIX_WARPS) : "memory");
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  if (warp < MATRIX_WARPS) {
    float sum[RPW][2 * MT][4] = {};
    uint4 a[AHEAD][RPW], b[AHEAD][MT];
    const u32 g = lane >> 2, t = lane & 3;
    const u32 mine = place(0, g, 0, t);
    auto load = [&](u32 at, u32 s) {  // fragments of a step, from the stage at `at`
      const u32 here = at + (mine ^ (s << 4)) + s * 512;
#pragma unroll
      for (int r = 0; r < RPW; r++) a[s % AHEAD][r] = fragment(here + (warp * RPW + r) * TILE_BYTES);
#pragma unroll
      for (int p = 0; p < MT; p++) b[s % AHEAD][p] = fragment(here + (RT + p) * TILE_BYTES);
    };
    wait(full, 0);
#pragma unroll
    for (u32 s = 0; s < AHEAD - 1; s++) load(base, s);
    u32 slot = 0, phase = 0;
    for (int stage = 0; stage < num_stages; stage++) {
      const u32 at = base + slot * STAGE_BYTES, used = empty + 8 * slot;
      if (++slot == STAGES) slot = 0, phase ^= 1;
      const u32 next = base + slot * STAGE_BYTES;
#pragma unroll
      for (u32 s = 0; s < 8; s++) {
        if (s + AHEAD - 1 < 8) {
          load(at, s + AHEAD - 1);
        } else if (stage + 1 < num_stages) {
          if (s + AHEAD - 1 == 8) wait(full + 8 * slot, phase);
          load(next, s + AHEAD - 9);
        }
#pragma unroll
        for (int r = 0; r < RPW; r++) {
#pragma unroll
          for (int p = 0; p < MT; p++) {
            mma(sum[r][2 * p], a[s % AHEAD][r], b[s % AHEAD][p].x, b[s % AHEAD][p].y);
            mma(sum[r][2 * p + 1], a[s % AHEAD][r], b[s % AHEAD][p].z, b[s % AHEAD][p].w);
          }
        }
      }
      __syncwarp();
      if (lane == 0) arrive(used);
    }
#pragma unroll
    for (int r = 0; r < RPW; r++) {
#pragma unroll
      for (int c = 0; c < 2 * MT; c++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int n = n0 + (warp * RPW + r) * 16 + g + (e >> 1) * 8, m = c * 8 + 2 * t + (e & 1);
          if (n < N) {
            float v = sum[r][c][e];
#if FOUR
            v *= 256.0f;
#endif
#if !E8M0
            v = __fmul_rn(__fmul_rn(v, __uint_as_float(0x34149B93u)), __fmul_rn(x_row[m], w_row[n]));
#endif
            out[(size_t)m * N + n] = to_bf16(v);
          }
        }
      }
    }
  } else if (warp < MATRIX_WARPS + WW) {
    const Lane mine = FOUR ? lane_of_nibbles(lane) : lane_of_rows(lane);
    const int first = warp - MATRIX_WARPS, count = num_stages * RT;
    Unit units[UNITS];
    auto fetch = [&](Unit& unit, int q) {  // columns beyond N are made of the last ones and never stored
      load_unit(unit, codes, scales, min(n0 + (q % RT) * 16, N - 16), q / RT * 128, K, mine);
    };
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
      if (first + i * WW < count) fetch(units[i], first + i * WW);
    }
    for (int q0 = first; q0 < count; q0 += UNITS * WW) {
#pragma unroll
      for (int i = 0; i < UNITS; i++) {
        const int q = q0 + i * WW;
        if (q < count) {
          const int stage = q / RT;
          const u32 slot = stage % STAGES;
          if (stage >= STAGES) wait(empty + 8 * slot, (stage / STAGES - 1) & 1);
          store_unit(units[i], base + slot * STAGE_BYTES + (q % RT) * TILE_BYTES, mine);
          __syncwarp();
          if (lane == 0) arrive(full + 8 * slot);
          if (q + UNITS * WW < count) fetch(units[i], q + UNITS * WW);
        }
      }
    }
  } else {
    const Lane mine = lane_of_rows(lane);
    const int first = warp - MATRIX_WARPS - WW, count = num_stages * MT;
    for (int q = first; q < count; q += WX) {
      const int stage = q / MT, tile = q % MT;
      const u32 slot = stage % STAGES;
      uint4 v[8];
      load_rows(v, x, tile * 16, stage * 128, K, mine);
      if (stage >= STAGES) wait(empty + 8 * slot, (stage / STAGES - 1) & 1);
      store_rows(v, base + slot * STAGE_BYTES + (RT + tile) * TILE_BYTES, mine);
      __syncwarp();
      if (lane == 0) arrive(full + 8 * slot);
    }
  }
}
