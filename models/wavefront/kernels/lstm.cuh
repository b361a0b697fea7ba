// What the kernels of an LSTM have in common: products of fragments on the tensor cores, activations, and what blocks of a
// cluster do together. DTYPE_CODE, which the host defines, 0: float32 (weights rounded to tf32 by the host); 1: float16; 2: bfloat16;
// 3: float32, each product as three of tf32 (of the leading and the trailing halves), to a few units of float32's last place; 4: float32,
// but the products' factors are float16, which has as many bits of a number as tf32, times powers of two that keep them in its range;
// 5: float32, whose factors, times such powers, are sums of two float16, and products sums of three, as precise as 3's down to 2^-28 of
// the largest number of a power.
//
// Products are C[row, sequence] = sum over k of A[row, k] · B[sequence, k], both operands with k contiguous, so that a lane of
// mma.sync finds its share of a fragment in 16 consecutive bytes. (The order of k within a block is then not the one of the PTX
// manual, but the same one for A and B.)
#pragma once

#include "numbers.cuh"

#define PAIRS (DTYPE_CODE == 5)
#define SCALED (DTYPE_CODE == 4 || PAIRS)

#if DTYPE_CODE == 1 || SCALED
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#elif DTYPE_CODE == 2
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#else
#define MMA "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
#endif

constexpr int BLOCK = 4 * VECTOR;  // k of one block: two mma.sync; of PAIRS one of each product

// x, times its power of two, at `index` of a row of factors. Of PAIRS 16 bytes hold what leads in four numbers, then what trails.
#if PAIRS
__device__ inline void put(Factor* row, int index, Factor x) {
  unsigned short* at = reinterpret_cast<unsigned short*>(row + index / 4 * 4) + index % 4;
  at[0] = x & 0xffff, at[4] = x >> 16;
}
__device__ inline Factor got(const Factor* row, int index) {
  const unsigned short* at = reinterpret_cast<const unsigned short*>(row + index / 4 * 4) + index % 4;
  return at[0] | (unsigned)at[4] << 16;
}
__device__ inline Factor to_factor(float x) {
  const unsigned short leads = to_float16(x);
  const float rest = x - from_float16(leads);
  return leads | (unsigned)(rest == rest ? to_float16(rest * TRAILING) : 0) << 16;  // no number: an infinity has no rest
}
#else
__device__ inline void put(Factor* row, int index, Factor x) { row[index] = x; }
__device__ inline Factor got(const Factor* row, int index) { return row[index]; }
#if SCALED
__device__ inline Factor to_factor(float x) { return to_float16(x); }
#endif
#endif

#if SCALED
// The power of two that brings what is `largest` at most below 2^15, as halves.powers; `undone`: its inverse. A step's gradients may be
// smaller than what is a model's own, so that their powers may be larger.
__device__ inline unsigned exponent(float largest) { return min(254u, max(27u, __float_as_uint(largest) >> 23)); }
__device__ inline float power(float largest) { return __uint_as_float(268 - exponent(largest) << 23); }
__device__ inline float undone(float largest) { return __uint_as_float(exponent(largest) - 14 << 23); }
#endif

struct Fragment {  // of 16 rows of A in one block of k: this lane's share of the upper and of the lower 8
  uint4 upper, lower;
};

// What a product reads: with any NaN as the one NaN that rounding to tf32 leaves one, see `rounded`.
__device__ inline Number to_operand(float x) {
#if DTYPE_CODE == 0 || DTYPE_CODE == 3
  x = x == x ? x : __uint_as_float(0x7fc00000);
#endif
  return narrow(x);
}

// -- instructions (tests/models/cuda_emulator.h has them for a CPU) --------------------------------------------------------

#ifndef EMULATED
// Another block of the cluster's number at the place of `mine`.
__device__ inline float from_peer(const float* mine, int rank) {
  unsigned address = __cvta_generic_to_shared(mine);
  float found;
  asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(found) : "r"(address) : "memory");
  return found;
}

__device__ inline void sync_cluster() {
  __syncwarp();  // .aligned asks for warps that have converged
  asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The place in a block of the cluster that is at `mine` in this one; bytes may be added.
using PeerPlace = unsigned;
__device__ inline PeerPlace place_in_peer(const void* mine, int rank) {
  unsigned address = __cvta_generic_to_shared(mine);
  asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
  return address;
}

// 16 bytes of global memory to shared memory, and until what this thread has asked for is there.
__device__ inline void copy_ahead(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// A mailbox counts the bytes that come into this block's shared memory, so that nobody has to wait for what else is on its way. Once
// for each use one thread says how many bytes there will be; parity: of the use, from 0 on.
using Mailbox = unsigned long long;
__device__ inline void make_mailbox(Mailbox* box) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"((unsigned)__cvta_generic_to_shared(box)) : "memory");
}
__device__ inline void expect_bytes(Mailbox* box, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cluster.shared::cta.b64 _, [%0], %1;" ::"r"((unsigned)__cvta_generic_to_shared(box)), "r"(bytes)
               : "memory");
}
__device__ inline void wait_for_bytes(Mailbox* box, int parity) {
  asm volatile(
      "{\n\t.reg .pred done;\nagain:\n\tmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n\t@!done bra again;\n\t}" ::"r"(
          (unsigned)__cvta_generic_to_shared(box)),
      "r"(parity)
      : "memory");
}
#define ST_ASYNC "st.async.shared::cluster.mbarrier::complete_tx::bytes"
__device__ inline void to_peer(PeerPlace place, float2 x, PeerPlace box) {
  asm volatile(ST_ASYNC ".v2.f32 [%0], {%1, %2}, [%3];" ::"r"(place), "f"(x.x), "f"(x.y), "r"(box) : "memory");
}
__device__ inline void to_peer(PeerPlace place, uint2 x, PeerPlace box) {
  asm volatile(ST_ASYNC ".v2.u32 [%0], {%1, %2}, [%3];" ::"r"(place), "r"(x.x), "r"(x.y), "r"(box) : "memory");
}
__device__ inline void to_peer(PeerPlace place, uint4 x, PeerPlace box) {
  asm volatile(ST_ASYNC ".v4.u32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(place), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(box)
               : "memory");
}

__device__ inline void mma(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  asm(MMA "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
#endif

// The tensor cores cut float32 to tf32; half a unit more makes that rounding to the nearest. CUDA's own NaN, all bits set,
// would become a zero, but operand B, which comes here, has gone through `to_operand`. The weights (A) the host has rounded: those from
// memory are loaded ahead, and whatever was done to them here would wait for them.
__device__ inline unsigned rounded(unsigned x) {
#if DTYPE_CODE == 0
  x += 0x1000;
#endif
  return x;
}
__device__ inline uint4 rounded(uint4 x) { return {rounded(x.x), rounded(x.y), rounded(x.z), rounded(x.w)}; }

// Of float32, the part that tf32 holds, and the rest, of which the tensor cores lose one unit of float32's last place at most.
__device__ inline unsigned leading(unsigned x) { return (x + 0x1000) & 0xffffe000; }
__device__ inline unsigned trailing(unsigned x) {
  return __float_as_uint(__uint_as_float(x) - __uint_as_float(leading(x)));
}

// Adds A · B of one fragment of A and one of B, two mma.sync of k.
__device__ inline void multiply_add(float (&c)[4], uint4 upper, uint4 lower, uint4 b) {
#if DTYPE_CODE == 3
  mma(c, trailing(upper.x), trailing(lower.x), trailing(upper.y), trailing(lower.y), leading(b.x), leading(b.y));
  mma(c, leading(upper.x), leading(lower.x), leading(upper.y), leading(lower.y), trailing(b.x), trailing(b.y));
  mma(c, leading(upper.x), leading(lower.x), leading(upper.y), leading(lower.y), leading(b.x), leading(b.y));
  mma(c, trailing(upper.z), trailing(lower.z), trailing(upper.w), trailing(lower.w), leading(b.z), leading(b.w));
  mma(c, leading(upper.z), leading(lower.z), leading(upper.w), leading(lower.w), trailing(b.z), trailing(b.w));
  mma(c, leading(upper.z), leading(lower.z), leading(upper.w), leading(lower.w), leading(b.z), leading(b.w));
#elif PAIRS
  mma(c, upper.x, lower.x, upper.y, lower.y, b.x, b.y);
#else
  mma(c, upper.x, lower.x, upper.y, lower.y, b.x, b.y);
  mma(c, upper.z, lower.z, upper.w, lower.w, b.z, b.w);
#endif
}

#if PAIRS
// The two products with what trails in one of them.
__device__ inline void multiply_trailing(float (&c)[4], uint4 upper, uint4 lower, uint4 b) {
  mma(c, upper.z, lower.z, upper.w, lower.w, b.x, b.y);
  mma(c, upper.x, lower.x, upper.y, lower.y, b.z, b.w);
}
#endif

// To float32's precision, or to 1e-7 of 1 where the products are coarser by far.
#if DTYPE_CODE == 3 || PAIRS
__device__ inline float sigmoid(float x) { return 1 / (1 + expf(-x)); }
__device__ inline float tangent(float x) { return tanhf(x); }
#else
__device__ inline float sigmoid(float x) { return __fdividef(1, 1 + __expf(-x)); }
__device__ inline float tangent(float x) { return 1 - 2 * __fdividef(1, 1 + __expf(2 * x)); }
#endif

// With LENGTHS, the steps of each sequence. Past its end its states stand still, its outputs are 0, and nothing flows into its
// gates; their gradients are 0, so that no product nor sum needs to know of it. Past the longest sequence of a group its blocks
// pass no barrier any more: they fill what is left with zeros.
template <int POINTS>
struct Ends {
  int of[POINTS];
#if LENGTHS
  int last = 0;  // steps of the longest sequence of the group (cluster.cu: of the cluster)
#else
  enum : int { last = TIME };
#endif

  template <typename Place>
  __device__ Ends(const int* lengths, const Place& place) {
#pragma unroll
    for (int point = 0; point < POINTS; ++point)
      of[point] = LENGTHS && place.sequence(point) < BATCH ? max(0, min(TIME, __ldg(lengths + place.sequence(point)))) : TIME;
#if LENGTHS
    for (int sequence = place.first_of_group; sequence < min(BATCH, place.first_of_group + BATCH_TILE); ++sequence)
      last = max(last, min(TIME, __ldg(lengths + sequence)));
#endif
  }
  __device__ bool passed(int point, int time) const { return LENGTHS && time >= of[point]; }
};
