// out [M, N] = x [M, K] w [N, K]^T for few rows M, weights from packed codes and scales, FP32 sums with K ascending.
//
// One block makes RT tiles of 16 columns n for all M = 16 MT rows. Four warps copy KS numbers of every row of weights
// and x, and the weights' scales, at a time into a ring of STAGES stages of shared memory. The other warps take RPW tiles
// each, decode them in registers on the way to the matrix unit (mma.m16n8k16, weights first) and add 16 k after 16 k.
// Within a step of 16 the order of k is free, since the unit adds a step's products as one: lane t of four takes the k
// that its codes happen to be, for weights and x alike.
//
// Set by the caller: RT, MT, RPW, STAGES, BITS of a weight (4: E2M1, 8: E4M3), E8M0 (power-of-two scales of 32, else E4M3
// scales of 16). Sums of E2M1 are 2^-8 of the true ones until the end.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned char u8;

#define KS 256
#define STEPS (KS / 16)
#define MATRIX_WARPS (RT / RPW)
#define COPIERS 128  // threads
#define FOUR (BITS == 4)
#define W_BYTES (KS * BITS / 8)
#define W_ROW (W_BYTES + 16)  // eight rows of 16 bytes lie in different banks
#define X_BYTES (KS * 2)
#define X_ROW (X_BYTES + 32)  // four rows of 32 bytes do
#define S_BYTES (E8M0 ? KS / 32 : KS / 16)  // scales of a row
#define X_AT (RT * 16 * W_ROW)
#define S_AT (X_AT + MT * 16 * X_ROW)
#define STAGE_BYTES (S_AT + RT * 16 * S_BYTES)

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

__device__ __forceinline__ void copy_scales(u32 to, const u8* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(S_BYTES) : "memory");
}

__device__ __forceinline__ void copy16(u32 to, const u8* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Counts as this thread's arrival once all copies that it has begun are there.
__device__ __forceinline__ void arrive_when_copied(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Four matrices of eight rows of 16 bytes: lane 4g + t gets bytes 4t .. 4t + 3 of row g of each.
__device__ __forceinline__ void matrices(u32* r, u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}

__device__ __forceinline__ void eight(u32& a, u32& b, u32 at) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "r"(at));
}

__device__ __forceinline__ u32 times(u32 a, u32 b) {
  u32 c;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}

// Both BF16 halves: what takes a code's bits, moved to BF16's fields, to its value.
__device__ __forceinline__ u32 multiplier(u32 scale) {
#if E8M0
  return (scale + (FOUR ? 118 : 120)) * 0x00800080u;
#else
  return times(times(scale * 0x00100010u, 0x7B007B00u), 0x7B007B00u);  // E4M3's fields are 2^-120 of it; twice 2^119
#endif
}

// Fragments of 16 rows x 16 k: `rows` are those of row g and of row g + 8.
__device__ __forceinline__ void decode(u32* a, u32 w_g, u32 w_h, u32 m_g, u32 m_h) {
#if FOUR  // w_g: two bytes of each row, in turn; pairs of k (0, 2) and (1, 3)
  const u32 w = w_g;
  a[0] = times(((w << 6) & 0x01C001C0u) | ((w << 12) & 0x80008000u), m_g);
  a[2] = times(((w << 2) & 0x01C001C0u) | ((w << 8) & 0x80008000u), m_g);
  a[1] = times(((w >> 2) & 0x01C001C0u) | ((w << 4) & 0x80008000u), m_h);
  a[3] = times(((w >> 6) & 0x01C001C0u) | (w & 0x80008000u), m_h);
#else
  const u32 g = __byte_perm(w_g, 0, 0x3120), h = __byte_perm(w_h, 0, 0x3120);  // pairs of k (0, 1) and (2, 3)
  a[0] = times(((g << 4) & 0x07F007F0u) | ((g << 8) & 0x80008000u), m_g);
  a[2] = times(((g >> 4) & 0x07F007F0u) | (g & 0x80008000u), m_g);
  a[1] = times(((h << 4) & 0x07F007F0u) | ((h << 8) & 0x80008000u), m_h);
  a[3] = times(((h >> 4) & 0x07F007F0u) | (h & 0x80008000u), m_h);
#endif
}

__device__ __forceinline__ void mma(float* c, const u32* a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ unsigned short to_bf16(float x) {
  unsigned short y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}

#if E8M0
#define SCALE_WORDS 2  // of a row in a stage
#else
#define SCALE_WORDS 4
#endif

__device__ __forceinline__ void load_scales(u32* s, u32 at) {
#if E8M0
  eight(s[0], s[1], at);
#else
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(s[0]), "=r"(s[1]), "=r"(s[2]), "=r"(s[3]) : "r"(at));
#endif
}

__device__ __forceinline__ u32 scale_of(const u32* s, int step) {
  const int i = E8M0 ? step / 2 : step;
  return (s[i / 4] >> (8 * (i % 4))) & 255;
}

extern "C" __global__ void __launch_bounds__(32 * MATRIX_WARPS + COPIERS, 1) packed_matmul(
    const u8* __restrict__ x, const u8* __restrict__ codes, const u8* __restrict__ scales,
    const float* __restrict__ x_row, const float* __restrict__ w_row, unsigned short* __restrict__ out, int N, int K) {
  extern __shared__ __align__(128) u8 ring[];
  __shared__ __align__(8) u64 barriers[2 * STAGES];
  const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const u32 full = shared_at(barriers), empty = full + 8 * STAGES, base = shared_at(ring);
  const int num_stages = K / KS, n0 = blockIdx.x * RT * 16;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(full + 8 * s), "n"(COPIERS) : "memory");
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(empty + 8 * s), "r"(MATRIX_WARPS) : "memory");
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  if (warp >= MATRIX_WARPS) {
    const u32 mine = threadIdx.x - 32 * MATRIX_WARPS;
    const u32 x_piece = mine % (X_BYTES / 16), x_first = mine / (X_BYTES / 16);
    const u8* x_from = x + (size_t)x_first * K * 2 + x_piece * 16;
    const u32 w_piece = mine % (W_BYTES / 16), w_first = mine / (W_BYTES / 16);
    const u8* w_from = codes + w_piece * 16;
    const size_t row_bytes = (size_t)K * BITS / 8;
    for (int stage = 0; stage < num_stages; stage++) {
      const u32 slot = stage % STAGES, at = base + slot * STAGE_BYTES;
      if (stage >= STAGES) wait(empty + 8 * slot, (stage / STAGES - 1) & 1);
#pragma unroll
      for (u32 j = 0; j < MT * X_BYTES / COPIERS; j++) {
        const u32 down = j * (COPIERS * 16 / X_BYTES);
        copy16(at + X_AT + (x_first + down) * X_ROW + x_piece * 16, x_from + (size_t)down * K * 2);
      }
      x_from += X_BYTES;
#pragma unroll
      for (u32 j = 0; j < RT * W_BYTES / COPIERS; j++) {  // columns beyond N are made of the last, and never stored
        const u32 row = w_first + j * (COPIERS * 16 / W_BYTES);
        copy16(at + row * W_ROW + w_piece * 16, w_from + min(n0 + (int)row, N - 1) * row_bytes);
      }
      for (u32 row = mine; row < RT * 16; row += COPIERS) {
        const size_t from = (size_t)min(n0 + (int)row, N - 1) * (K / KS * S_BYTES) + stage * S_BYTES;
        copy_scales(at + S_AT + row * S_BYTES, scales + from);
      }
      arrive_when_copied(full + 8 * slot);
      w_from += W_BYTES;
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    return;
  }

  const u32 g = lane >> 2, t = lane & 3;
  float sum[RPW][2 * MT][4] = {};
  // Rows of the four matrices, and which 16 bytes of theirs: tiles of two times two, columns last.
  const u32 w_lane = warp * RPW * 16 * W_ROW + (((lane >> 3) & 1) * 8 + (lane & 7)) * W_ROW + (lane >> 4) * 16;
#if FOUR
  const u32 x_lane = X_AT + g * X_ROW + ((t & 1) * 8 + (t >> 1) * 4) * 2;
  const u32 keeps = t < 2 ? 0x5140 : 0x7362, sends = t < 2 ? 0x7362 : 0x5140;
#else
  const u32 x_lane = X_AT + g * X_ROW + t * 8;
#endif
  u32 slot = 0, phase = 0;
  for (int stage = 0; stage < num_stages; stage++) {
    const u32 at = base + slot * STAGE_BYTES;
    wait(full + 8 * slot, phase);
    u32 scale[RPW][2][SCALE_WORDS];
#pragma unroll
    for (int r = 0; r < RPW; r++) {
      const u32 first = at + S_AT + ((warp * RPW + r) * 16 + g) * S_BYTES;
      load_scales(scale[r][0], first);
      load_scales(scale[r][1], first + 8 * S_BYTES);
    }
    u32 w[RPW][4], two[RPW][2];
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
      u32 b[2 * MT][2];
#pragma unroll
      for (int c = 0; c < 2 * MT; c++) {
        eight(b[c][0], b[c][1], at + x_lane + c * 8 * X_ROW + s * 32);
#if FOUR
        const u32 low = __byte_perm(b[c][0], b[c][1], 0x5410), high = __byte_perm(b[c][0], b[c][1], 0x7632);
        b[c][0] = low, b[c][1] = high;
#endif
      }
#pragma unroll
      for (int r = 0; r < RPW; r++) {
        u32 a[4];
        const u32 tile = at + w_lane + r * 16 * W_ROW;
#if FOUR
        if (s % 4 == 0) matrices(w[r], tile + s * 8);
        if (s % 2 == 0) {  // 32 k of two rows: lanes t and t ^ 2 exchange, so that each has four k of either step
          const u32 row_g = w[r][s % 4], row_h = w[r][s % 4 + 1];
          const u32 kept = __byte_perm(row_g, row_h, keeps);
          const u32 got = __shfl_xor_sync(0xFFFFFFFFu, __byte_perm(row_g, row_h, sends), 2);
          two[r][0] = t < 2 ? kept : got;
          two[r][1] = t < 2 ? got : kept;
        }
        decode(a, two[r][s % 2], 0, multiplier(scale_of(scale[r][0], s)), multiplier(scale_of(scale[r][1], s)));
#else
        if (s % 2 == 0) matrices(w[r], tile + s * 16);
        decode(a, w[r][s % 2 * 2], w[r][s % 2 * 2 + 1], multiplier(scale_of(scale[r][0], s)),
               multiplier(scale_of(scale[r][1], s)));
#endif
#pragma unroll
        for (int c = 0; c < 2 * MT; c++) mma(sum[r][c], a, b[c][0], b[c][1]);
      }
    }
    __syncwarp();
    if (lane == 0) arrive(empty + 8 * slot);
    if (++slot == STAGES) slot = 0, phase ^= 1;
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
}
