// PTX instructions as functions: all that our CUDA C++ uses beyond the language. `tests/ops/primitives_on_host.h` says the
// same in C++, so that the kernels run on a CPU too.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned char u8;

// Programmatic dependent launch: until the kernel before this one has ended and what it wrote can be read.
__device__ __forceinline__ void wait_for_former() {
#if EARLY
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may be launched, once every thread has come here or ended.
__device__ __forceinline__ void let_next_begin() {
#if EARLY
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Two numbers of 16 bits in a word, BF16 and each rounded once where nothing else is said.

#define OF_TWO(name, instruction)                                   \
  __device__ __forceinline__ u32 name(u32 a, u32 b) {               \
    u32 c;                                                          \
    asm(instruction " %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));     \
    return c;                                                       \
  }
OF_TWO(times, "mul.rn.bf16x2")
OF_TWO(plus, "add.rn.bf16x2")
OF_TWO(minus, "sub.rn.bf16x2")
OF_TWO(larger, "max.bf16x2")   // NaN is ignored
OF_TWO(smaller, "min.bf16x2")  // NaN is ignored
OF_TWO(smaller_or_nan, "min.NaN.bf16x2")
OF_TWO(larger_halves, "max.u16x2")  // as whole numbers

__device__ __forceinline__ u32 ones_where_number(u32 a) {  // all bits of a half that is no NaN
  u32 c;
  asm("set.num.u32.bf16x2 %0, %1, %1;" : "=r"(c) : "r"(a));
  return c;
}

__device__ __forceinline__ u32 times_plus(u32 a, u32 b, u32 c) {  // of BF16: a b + c, rounded once
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// E4M3, rounded to nearest, ties to even codes; beyond the largest it is the largest, NaN is 0x7F, zeros keep their signs.

__device__ __forceinline__ u32 one_of_e4m3(float a) {
  unsigned short y;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, 0f00000000, %1;" : "=h"(y) : "f"(a));
  return y;
}

__device__ __forceinline__ u32 four_of_e4m3(float a, float b, float c, float d) {  // a in the lowest byte
  u32 y;
  asm("{.reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, %2, %1; cvt.rn.satfinite.e4m3x2.f32 h, %4, %3; mov.b32 %0, {l, h};}"
      : "=r"(y) : "f"(a), "f"(b), "f"(c), "f"(d));
  return y;
}

__device__ __forceinline__ float value_of_e4m3(u32 code) {
  float y;
  asm("{.reg .b16 l, h; .reg .b32 p; cvt.rn.f16x2.e4m3x2 p, %1; mov.b32 {l, h}, p; cvt.f32.f16 %0, l;}"
      : "=f"(y) : "h"((unsigned short)code));
  return y;
}

__device__ __forceinline__ u32 pair_of_bf16(float low, float high) {
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

__device__ __forceinline__ float quick_reciprocal(float a) {  // the first steps; not rounded yet
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(a));
  return y;
}

// Four of the eight bytes of a and b, by four bits each; from 8 on a byte's sign, eight times. (`__byte_perm` takes three.)
__device__ __forceinline__ u32 bytes_of(u32 a, u32 b, u32 selector) {
  u32 c;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(c) : "r"(a), "r"(b), "r"(selector));
  return c;
}

// Shared memory, by its address in the block's window.

__device__ __forceinline__ u32 shared_at(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ u32 load2(u32 at) {
  unsigned short h;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(h) : "r"(at));
  return h;
}

__device__ __forceinline__ u32 load4(u32 at) {
  u32 a;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(a) : "r"(at));
  return a;
}

// Four matrices of eight rows of 16 bytes, whose addresses the lanes bring: lane 4g + t gets bytes 4t .. 4t + 3 of row g
// of each.
__device__ __forceinline__ void matrices(u32* r, u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}

// A warpgroup's product: sum [64, 8 COUNT] += a [64, 16] b [8 COUNT, 16]^T, BF16 with FP32 sums. Of warp w of four lane
// 4g + t holds rows 16 w + g and g + 8: in a, columns 2t, 2t + 1 of both and then 2t + 8, 2t + 9 of both; in sum, for every
// eight columns, 2t, 2t + 1 of one row and then of the other. b lies in shared memory as `tile` says. It runs on beside
// the threads: registers of a and b's memory have to stay until `multiplied` has seen it.
//
// Where b begins (units of 16 bytes may be added), bytes from its columns k 0 .. 7 to k 8 .. 15, and from eight of its rows
// to the next eight. Eight rows of eight numbers lie together, 128 bytes.
__device__ __forceinline__ u64 tile(u32 at, u32 across, u32 down) {
  return (u64)((at & 0x3FFFF) >> 4) | (u64)(across >> 4) << 16 | (u64)(down >> 4) << 32;
}

// Between the last write to COUNT registers of first operands and the product that reads them.
template <int COUNT>
__device__ __forceinline__ void registers_written(u32* a) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+r"(a[i])::"memory");
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

#define OF_SUM(i) "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3])
#define OF_EIGHT(i) OF_SUM(i), OF_SUM(i + 4)
template <int COUNT>
__device__ __forceinline__ void multiply(float* sum, const u32* a, u64 b) {
  if constexpr (COUNT == 2)
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, "
        "{%8, %9, %10, %11}, %12, 1, 1, 1, 0;"
        : OF_EIGHT(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  else if constexpr (COUNT == 4)
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
        "%13, %14, %15}, {%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
        : OF_EIGHT(0), OF_EIGHT(8) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  else if constexpr (COUNT == 6)
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
        "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, {%24, %25, %26, %27}, %28, 1, 1, 1, 0;"
        : OF_EIGHT(0), OF_EIGHT(8), OF_EIGHT(16) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  else
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
        "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
        : OF_EIGHT(0), OF_EIGHT(8), OF_EIGHT(16), OF_EIGHT(24)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// A tile of rows of 64 k, 128 bytes each, as `tensor_copy` lays them down. Both operands of a product may lie so.
__device__ __forceinline__ u64 slab(u32 at) { return (u64)((at & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62; }

// Ahead of products whose operands all lie in shared memory.
__device__ __forceinline__ void sums_written() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// As `multiply`, with a in shared memory as `slab` says.
template <int COUNT>
__device__ __forceinline__ void multiply_shared(float* sum, u64 a, u64 b) {
  if constexpr (COUNT == 2)
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, 1, 1, 1, 0, 0;"
        : OF_EIGHT(0) : "l"(a), "l"(b));
  else if constexpr (COUNT == 4)
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
        "%13, %14, %15}, %16, %17, 1, 1, 1, 0, 0;"
        : OF_EIGHT(0), OF_EIGHT(8) : "l"(a), "l"(b));
  else if constexpr (COUNT == 6)
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
        "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, %24, %25, 1, 1, 1, 0, 0;"
        : OF_EIGHT(0), OF_EIGHT(8), OF_EIGHT(16) : "l"(a), "l"(b));
  else
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
        "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, 1, 1, 1, 0, 0;"
        : OF_EIGHT(0), OF_EIGHT(8), OF_EIGHT(16), OF_EIGHT(24) : "l"(a), "l"(b));
}

__device__ __forceinline__ void multiplication_begun() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until all but the last LEFT groups of products have ended.
template <int LEFT>
__device__ __forceinline__ void multiplied() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Until all have; only behind this may COUNT sums be read. Nothing else keeps a compiler from reading them before.
template <int COUNT>
__device__ __forceinline__ void all_multiplied(float* sum) {
  multiplied<0>();
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(sum[i])::"memory");
}

// Barriers in shared memory: a phase ends when all arrivals and all bytes that were announced have come.

__device__ __forceinline__ void make_barrier(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barriers_made() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

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

__device__ __forceinline__ void arrive_expecting(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// A multiple of 16 bytes by the copy engine, which reports them to the barrier.
__device__ __forceinline__ void bulk_copy(u32 to, const u8* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// A rectangle of a matrix by the copy engine: rows from `row`, each so many bytes from column `column` as the map says, laid
// one after another; beyond the matrix there are zeros. Rows of 128 bytes begin at a multiple of 1,024, their pieces of 16
// bytes swapped by the row (CU_TENSOR_MAP_SWIZZLE_128B): piece p of row r is where piece p ^ r % 8 would be, so that eight
// rows of one piece lie in different banks. `cuda_source.TensorMap` makes the map.
struct __align__(64) Map {
  u8 bytes[128];
};
__device__ __forceinline__ void tensor_copy(u32 to, const Map* map, int column, int row, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
      ::"r"(to), "l"(map), "r"(barrier), "r"(column), "r"(row) : "memory");
}
