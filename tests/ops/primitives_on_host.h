// `src/onegrid/ops/primitives.cu` and the parts of CUDA's language that our kernels use, in C++: every CUDA thread is a
// thread of the host, lanes of a warp meet where an instruction is of the whole warp, copies happen at once.

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __align__(n)
#define __launch_bounds__(...)
#define __grid_constant__

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned char u8;

struct uint4 {
  u32 x, y, z, w;
};
struct uint2 {
  u32 x, y;
};
static inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
struct Index {
  u32 x;
};
static thread_local Index threadIdx, blockIdx;
static Index gridDim;
using std::max;
using std::min;

alignas(1024) u8 ring[1 << 18];  // dynamic shared memory; addresses in shared memory count from here

static void require(bool good, const char* what) {
  if (good) return;
  fprintf(stderr, "%s\n", what);
  _Exit(9);
}

// Warps and blocks.

struct Warp {
  u32 held[32][8];
  std::barrier<> lanes{32};
};
static std::vector<std::unique_ptr<Warp>> warps;
static std::unique_ptr<std::barrier<>> block;
static u32 lane() { return threadIdx.x % 32; }
static Warp& warp() { return *warps[threadIdx.x / 32]; }
static void __syncwarp() { warp().lanes.arrive_and_wait(); }
static void __syncthreads() { block->arrive_and_wait(); }

static u32 __shfl_sync(u32, u32 value, u32 source, u32 width = 32) {
  warp().held[lane()][7] = value;
  __syncwarp();
  const u32 got = warp().held[lane() / width * width + source % width][7];
  __syncwarp();
  return got;
}
static u32 __shfl_xor_sync(u32 mask, u32 value, u32 by) { return __shfl_sync(mask, value, lane() ^ by, 32); }
static float __shfl_xor_sync(u32 mask, float value, u32 by) {
  return std::bit_cast<float>(__shfl_xor_sync(mask, std::bit_cast<u32>(value), by));
}

static u32 __reduce_add_sync(u32 mask, u32 value) {
  for (u32 by = 16; by; by /= 2) value += __shfl_xor_sync(mask, value, by);
  return value;
}
static u32 __reduce_max_sync(u32 mask, u32 value) {
  for (u32 by = 16; by; by /= 2) value = max(value, __shfl_xor_sync(mask, value, by));
  return value;
}
static bool __any_sync(u32 mask, bool value) { return __reduce_max_sync(mask, value); }
static u64 atomicAdd(u64* to, u64 value) { return std::atomic_ref<u64>(*to).fetch_add(value); }

// Numbers.

static float __uint_as_float(u32 a) { return std::bit_cast<float>(a); }
static float __int_as_float(int a) { return std::bit_cast<float>(a); }
static u32 __float_as_uint(float a) { return std::bit_cast<u32>(a); }
static int __float_as_int(float a) { return std::bit_cast<int>(a); }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __frcp_rn(float a) { return 1.0f / a; }
static u32 __vimin3_u32(u32 a, u32 b, u32 c) { return min(min(a, b), c); }
static float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static float quick_reciprocal(float a) { return __uint_as_float(__float_as_uint(1.0f / a) ^ (a != 0)); }  // an ulp off

static u32 bytes_of(u32 a, u32 b, u32 selector) {
  const u64 bytes = a | (u64)b << 32;
  u32 out = 0;
  for (int i = 0; i < 4; i++) {
    const u32 how = selector >> 4 * i & 15, byte = bytes >> 8 * (how & 7) & 255;
    out |= (how < 8 ? byte : byte >> 7 ? 255u : 0u) << 8 * i;
  }
  return out;
}
static u32 __byte_perm(u32 a, u32 b, u32 selector) { return bytes_of(a, b, selector & 0x7777); }

static float of_bf16(u32 a) { return __uint_as_float(a << 16); }
static u32 to_bf16(float x) {
  const u32 bits = __float_as_uint(x);
  return x != x ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
template <class F>
static u32 halves(u32 a, u32 b, F f) {
  return to_bf16(f(of_bf16(a & 0xFFFF), of_bf16(b & 0xFFFF))) | to_bf16(f(of_bf16(a >> 16), of_bf16(b >> 16))) << 16;
}
static u32 times(u32 a, u32 b) { return halves(a, b, [](float x, float y) { return x * y; }); }
static u32 plus(u32 a, u32 b) { return halves(a, b, [](float x, float y) { return x + y; }); }
static u32 minus(u32 a, u32 b) { return halves(a, b, [](float x, float y) { return x - y; }); }
static u32 larger(u32 a, u32 b) { return halves(a, b, [](float x, float y) { return fmaxf(x, y); }); }
static u32 smaller(u32 a, u32 b) { return halves(a, b, [](float x, float y) { return fminf(x, y); }); }
static u32 smaller_or_nan(u32 a, u32 b) {
  return halves(a, b, [](float x, float y) { return x != x || y != y ? NAN : fminf(x, y); });
}
static u32 ones_where_number(u32 a) {
  const float low = of_bf16(a & 0xFFFF), high = of_bf16(a >> 16);
  return (low == low ? 0xFFFFu : 0) | (high == high ? 0xFFFF0000u : 0);
}
static u32 larger_halves(u32 a, u32 b) { return max(a & 0xFFFF, b & 0xFFFF) | max(a >> 16, b >> 16) << 16; }
static u32 times_plus(u32 a, u32 b, u32 c) {
  const auto one = [&](int shift) {
    const double sum = (double)of_bf16(a >> shift & 0xFFFF) * of_bf16(b >> shift & 0xFFFF) + of_bf16(c >> shift & 0xFFFF);
    float odd = (float)sum;  // an inexact FP32 ends in 1 here, so that the next rounding is the only one
    if (odd != sum) odd = __uint_as_float(__float_as_uint(odd) - (fabs(odd) > fabs(sum)) | 1);
    return to_bf16(odd);
  };
  return one(0) | one(16) << 16;
}

static float value_of_e4m3(u32 code) {
  const int power = code >> 3 & 15, steps = code & 7;
  const float size = (code & 127) == 127 ? NAN : power ? ldexpf(8 + steps, power - 10) : ldexpf(steps, -9);
  return code & 128 ? -size : size;
}
static u32 one_of_e4m3(float a) {  // the nearest of all codes
  static const auto values = [] {
    std::vector<double> out;
    for (u32 code = 0; code < 127; code++) out.push_back(value_of_e4m3(code));
    return out;
  }();
  if (a != a) return 0x7F;
  const double size = min(fabs((double)a), 1e9);
  u32 best = 0;
  for (u32 code = 1; code < 127; code++) {
    const double further = fabs(size - values[code]) - fabs(size - values[best]);
    if (further < 0 || (further == 0 && code % 2 == 0)) best = code;
  }
  return best | std::signbit(a) << 7;
}
static u32 four_of_e4m3(float a, float b, float c, float d) {
  return one_of_e4m3(a) | one_of_e4m3(b) << 8 | one_of_e4m3(c) << 16 | one_of_e4m3(d) << 24;
}

static u32 pair_of_bf16(float low, float high) { return to_bf16(low) | to_bf16(high) << 16; }

// Shared memory.

static u32 __cvta_generic_to_shared(const void* p) { return (u32)((const u8*)p - ring); }
static u32 shared_at(const void* p) { return __cvta_generic_to_shared(p); }
template <class T>
static T at(u32 address) {
  require(address % sizeof(T) == 0, "a load from shared memory is not aligned");
  T value;
  memcpy(&value, ring + (int)address, sizeof(T));
  return value;
}
static u32 load2(u32 a) { return at<unsigned short>(a); }
static u32 load4(u32 a) { return at<u32>(a); }

static void matrices(u32* r, u32 address) {
  require(address % 16 == 0, "a row of a matrix is not aligned");
  Warp& w = warp();
  w.held[lane()][0] = address;
  __syncwarp();
  for (int i = 0; i < 4; i++) r[i] = at<u32>(w.held[i * 8 + lane() / 4][0] + 4 * (lane() % 4));
  __syncwarp();
}

// A warpgroup's product, done at once.

struct Group {
  u32 held[128][4];
  std::barrier<> threads{128};
};
static std::vector<std::unique_ptr<Group>> groups;
static u64 tile(u32 at, u32 across, u32 down) {
  require(at % 16 == 0 && at < sizeof ring, "an operand in shared memory is not aligned");
  return (u64)(at >> 4) | (u64)(across >> 4) << 16 | (u64)(down >> 4) << 32;
}
template <int COUNT>
static void multiply(float* sum, const u32* a, u64 b) {
  Group& group = *groups[threadIdx.x / 128];
  const u32 mine = threadIdx.x % 128, start = (b & 0x3FFF) << 4, across = (b >> 16 & 0x3FFF) << 4, down = (b >> 32) << 4;
  for (int i = 0; i < 4; i++) group.held[mine][i] = a[i];
  group.threads.arrive_and_wait();
  for (int i = 0; i < 4 * COUNT; i++) {
    const u32 half = i / 2 % 2, column = i / 4 * 8 + lane() % 4 * 2 + i % 2;
    float total = 0;
    for (u32 k = 0; k < 16; k++) {
      const u32 x = group.held[mine / 32 * 32 + lane() / 4 * 4 + k % 8 / 2][half + k / 8 * 2];
      const u32 y = at<unsigned short>(start + k / 8 * across + column / 8 * down + column % 8 * 16 + k % 8 * 2);
      total += of_bf16(x >> k % 2 * 16 & 0xFFFF) * of_bf16(y);
    }
    sum[i] += total;
  }
  group.threads.arrive_and_wait();
}

// Tiles of 128 bytes a row, see `slab` and `tensor_copy`: bits 4 to 6 of an address are swapped by bits 7 to 9.
static u32 swapped(u32 at) { return at ^ (at >> 7 & 7) << 4; }
static u64 slab(u32 at) {
  require(at % 1024 == 0, "a tile of slabs is not aligned");
  return at >> 4;
}
static void sums_written() {}
template <int COUNT>
static void multiply_shared(float* sum, u64 a, u64 b) {
  const u32 mine = threadIdx.x % 128, row = mine / 32 * 16 + lane() / 4;
  const auto number = [](u64 from, u32 row, u32 k) {
    return of_bf16(at<unsigned short>(swapped(((u32)from << 4) + row * 128 + k * 2)));
  };
  for (int i = 0; i < 4 * COUNT; i++) {
    const u32 column = i / 4 * 8 + lane() % 4 * 2 + i % 2;
    float total = 0;
    for (u32 k = 0; k < 16; k++) total += number(a, row + 8 * (i / 2 % 2), k) * number(b, column, k);
    sum[i] += total;
  }
  groups[threadIdx.x / 128]->threads.arrive_and_wait();
}
template <int COUNT>
static void registers_written(u32*) {}
static void multiplication_begun() {}
template <int LEFT>
static void multiplied() {}
template <int COUNT>
static void all_multiplied(float*) {}

// Barriers, known by their addresses.

struct Barrier {
  long arrivals, left, bytes;
  u32 phase;
};
static std::mutex guard;
static std::condition_variable changed;
static std::vector<std::pair<u32, Barrier>> barriers_of_block;
static Barrier& known(u32 address) {
  for (auto& [where, barrier] : barriers_of_block)
    if (where == address) return barrier;
  require(false, "a barrier that nobody made");
  abort();
}
static void settle(Barrier& b) {
  require(b.left >= 0, "more arrivals than a barrier was made for");
  if (b.left || b.bytes) return;
  b.left = b.arrivals;
  b.phase ^= 1;
  changed.notify_all();
}
static void make_barrier(u32 address, u32 arrivals) { barriers_of_block.push_back({address, {arrivals, arrivals, 0, 0}}); }
static void barriers_made() {}
static void arrive_expecting(u32 address, u32 bytes) {
  std::lock_guard<std::mutex> hold(guard);
  Barrier& b = known(address);
  b.bytes += bytes;
  b.left--;
  settle(b);
}
static void arrive(u32 address) { arrive_expecting(address, 0); }
static void wait(u32 address, u32 phase) {
  std::unique_lock<std::mutex> hold(guard);
  changed.wait(hold, [&] { return known(address).phase != phase; });
}

// Copies.

static void bulk_copy(u32 to, const u8* from, u32 bytes, u32 address) {
  require(to % 16 == 0 && (size_t)from % 16 == 0 && bytes % 16 == 0, "a bulk copy is not aligned");
  memcpy(ring + to, from, bytes);
  std::lock_guard<std::mutex> hold(guard);
  Barrier& b = known(address);
  b.bytes -= bytes;
  settle(b);
}
struct Map {
  const void* from;
  int num_rows, row_bytes, rows, width, size;
};
static void tensor_copy(u32 to, const Map* map, int column, int row, u32 address) {
  const bool whole = map->width == 128;
  require(to % (whole ? 1024 : 128) == 0 && map->row_bytes % 16 == 0, "a copied rectangle is not aligned");
  for (int r = 0; r < map->rows; r++)
    for (int byte = 0; byte < map->width; byte++) {
      const long at = (long)column * map->size + byte;
      const bool inside = row + r < map->num_rows && at < map->row_bytes;
      const u32 where = to + r * map->width + byte;
      ring[whole ? swapped(where) : where] = inside ? ((const u8*)map->from)[(long)(row + r) * map->row_bytes + at] : 0;
    }
  std::lock_guard<std::mutex> hold(guard);
  Barrier& b = known(address);
  b.bytes -= map->width * map->rows;
  settle(b);
}
static void wait_for_former() {}
static void let_next_begin() {}

// Launching.

struct Pointer {
  void* p;
  template <class T>
  operator T*() const {
    return (T*)p;
  }
};

// The arguments' memory, from a file and back into it at the end. Each begins at a multiple of 64 bytes.
struct Held {
  struct alignas(64) Line {
    u8 bytes[64];
  };
  std::vector<std::vector<Line>> parts;
  std::vector<size_t> sizes;
  Held(std::vector<size_t> sizes) : sizes(sizes) {
    FILE* file = fopen("memory", "rb");
    for (size_t size : sizes) {
      parts.emplace_back(size / 64 + 1);
      require(fread(parts.back().data(), 1, size, file) == size, "the file of arguments is too short");
    }
    fclose(file);
  }
  ~Held() {
    FILE* file = fopen("memory", "wb");
    for (size_t i = 0; i < sizes.size(); i++) fwrite(parts[i].data(), 1, sizes[i], file);
    fclose(file);
  }
  std::vector<Line>& operator[](int i) { return parts[i]; }
};

template <class F>
static void launch(int blocks, int threads, F kernel) {
  gridDim = {(u32)blocks};
  for (int b = 0; b < blocks; b++) {
    warps.clear();
    for (int w = 0; w < threads / 32; w++) warps.push_back(std::make_unique<Warp>());
    groups.clear();
    for (int w = 0; w < threads / 128; w++) groups.push_back(std::make_unique<Group>());
    block = std::make_unique<std::barrier<>>(threads);
    barriers_of_block.clear();
    memset(ring, 0xFF, sizeof ring);
    std::vector<std::thread> running;
    for (int t = 0; t < threads; t++)
      running.emplace_back([=] {
        threadIdx = {(u32)t};
        blockIdx = {(u32)b};
        kernel();
        warps[t / 32]->lanes.arrive_and_drop();
        block->arrive_and_drop();
      });
    for (auto& thread : running) thread.join();
  }
}
