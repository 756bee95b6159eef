// x [M, K] BF16, K of whole steps, in the order in which `packed.cu` reads it: for every 16 k the even and then the odd
// ones of all rows. A thread takes 16 numbers of a row.
extern "C" __global__ void __launch_bounds__(128) arrange(const uint4* __restrict__ x, uint4* __restrict__ out, int rows, int steps) {
  wait_for_former();
  let_next_begin();
  const int i = blockIdx.x * 128 + threadIdx.x;
  if (i >= rows * steps) return;
  const int step = i % steps, row = i / steps;
  const uint4 a = x[2 * i], b = x[2 * i + 1];
  uint4* to = out + (size_t)step * rows * 2 + row;
  to[0] = make_uint4(__byte_perm(a.x, a.y, 0x5410), __byte_perm(a.z, a.w, 0x5410), __byte_perm(b.x, b.y, 0x5410),
                     __byte_perm(b.z, b.w, 0x5410));
  to[rows] = make_uint4(__byte_perm(a.x, a.y, 0x7632), __byte_perm(a.z, a.w, 0x7632), __byte_perm(b.x, b.y, 0x7632),
                        __byte_perm(b.z, b.w, 0x7632));
}
