// The numbers that kernels read and write, 16 bytes at once. DTYPE_CODE, which the host defines: 0, 3, 4 and 5 float32, 1 float16,
// 2 bfloat16. (tests/models/cuda_emulator.h has the instructions for a CPU.)
#pragma once

#define NARROW (DTYPE_CODE == 1 || DTYPE_CODE == 2)

#if NARROW
using Number = unsigned short;
#else
using Number = float;
#endif

#if DTYPE_CODE == 4
using Factor = unsigned short;  // of products: float16
#define NAME(name) name##_by_float16  // a kernel's, so that a profile tells it
#elif DTYPE_CODE == 5
using Factor = unsigned;  // a pair of float16: what leads, and what is left, times TRAILING so that it is as large and has as many bits
constexpr float TRAILING = 2048;
#define NAME(name) name##_by_pairs_of_float16
#else
using Factor = Number;
#define NAME(name) name
#endif

constexpr int VECTOR = 16 / sizeof(Factor);  // factors in 16 bytes

#ifndef EMULATED
__device__ inline unsigned char* shared_memory() {
  extern __shared__ __align__(16) unsigned char bytes[];
  return bytes;
}

// The x of the lane of the warp whose number differs in the bits of `distance`.
__device__ inline float from_lane(float x, int distance) { return __shfl_xor_sync(~0u, x, distance); }

__device__ inline float wide(float x) { return x; }

__device__ inline float from_float16(unsigned short x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}

__device__ inline float wide(unsigned short x) {
#if DTYPE_CODE == 1
  return from_float16(x);
#else
  return __uint_as_float((unsigned)x << 16);
#endif
}

__device__ inline unsigned short to_float16(float x) {
  unsigned short y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}

__device__ inline Number narrow(float x) {
#if DTYPE_CODE == 1
  return to_float16(x);
#elif DTYPE_CODE == 2
  Number y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
#else
  return x;
#endif
}
#endif
