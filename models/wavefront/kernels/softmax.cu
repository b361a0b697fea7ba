// Cross-entropy of a softmax, and its gradient by the logits and by the bias that they include: one read of the logits, one write
// of their gradient. A thread block takes one row (token) after the other: each thread keeps its columns (words) of the row in
// registers, and their gradients' sums, over all rows of the block, in shared memory.
//
// The host (models/wavefront/softmax.py) says:
//   ROWS, COLUMNS    of the logits, whole vectors a row; the first WORDS columns are words, the others must have logits that vanish
//   DTYPE_CODE       of the logits, see numbers.cuh; arithmetic is float32. 4 and 5: float32, but their gradient is written as float16,
//                    or as pairs of that, what leads and what trails
//   GRID, THREADS    thread blocks, and threads of each
//   BLOCKS           thread blocks that a multiprocessor runs at once, at least

#include "numbers.cuh"

#define SCALED (DTYPE_CODE >= 4)
#define PAIRS (DTYPE_CODE == 5)

constexpr int NUMBERS = 16 / sizeof(Number);                           // logits of a vector
constexpr int VECTORS = (COLUMNS / NUMBERS + THREADS - 1) / THREADS;  // of a thread
constexpr int WARPS = THREADS / 32;

static_assert(COLUMNS % NUMBERS == 0 && WORDS <= COLUMNS && THREADS % 32 == 0 && THREADS <= 1024, "sizes");

union Vector {  // 16 bytes
  uint4 all;
  Number of[NUMBERS];
};

#if SCALED
using Gradient = unsigned short;
using GradientVector = uint2;
__device__ inline Gradient stored(float x) { return to_float16(x); }
#else
using Gradient = Number;
using GradientVector = uint4;
__device__ inline Gradient stored(float x) { return narrow(x); }
#endif

union Gradients {  // of a vector
  GradientVector all;
  Gradient of[NUMBERS];
};

constexpr float LOG2_E = 1.44269504f, LN_2 = 0.693147181f;

#ifndef EMULATED
__device__ inline float power_of_2(float x) {  // to 2 units of the last place
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#endif

// What `combine` makes of all threads' x, in every thread. `slots`: [WARPS]; a barrier has to lie between its last use and this
// one, so that two calls in a row need two.
template <typename Combine>
__device__ inline float over_block(float x, float* slots, Combine combine) {
  for (int distance = 16; distance; distance /= 2) x = combine(x, from_lane(x, distance));
  if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = x;
  __syncthreads();
  x = slots[0];
  for (int warp = 1; warp < WARPS; ++warp) x = combine(x, slots[warp]);
  return x;
}

// logits [ROWS, COLUMNS], bias [COLUMNS], targets [ROWS], scale [1] → losses [ROWS], and by scale · Σ losses: d_logits
// [ROWS, COLUMNS], d_bias [GRID, COLUMNS], to be summed over GRID. A row whose target is no word: loss NaN, gradients 0 where its
// logits are finite. A logit that is infinite or NaN makes a row NaN. SCALED: scale [2], the second one the logits'.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    NAME(softmax_cross_entropy)(const Number* __restrict__ logits, const float* __restrict__ bias,
                          const long long* __restrict__ targets, const float* __restrict__ scale,
                          float* __restrict__ losses, Gradient* __restrict__ d_logits,
#if PAIRS
                          Gradient* __restrict__ trails,
#endif
                          float* __restrict__ d_bias) {
  uint4* sums = reinterpret_cast<uint4*>(shared_memory());  // [VECTORS][NUMBERS / 4][THREADS] of four float32
  float* tops = reinterpret_cast<float*>(sums + VECTORS * NUMBERS / 4 * THREADS);  // the slots of the two reductions
  float* totals = tops + WARPS;
  auto column = [](int vector) { return (vector * THREADS + (int)threadIdx.x) * NUMBERS; };
  auto sum = [&](int vector, int k) -> uint4& { return sums[(vector * NUMBERS + k) / 4 * THREADS + threadIdx.x]; };
#if SCALED
  auto logit = [undo = scale[1]](float x) { return x * undo; };
#else
  auto logit = [](Number x) { return wide(x); };
#endif
  auto add = [](unsigned& to, float x) { to = __float_as_uint(__uint_as_float(to) + x); };

  for (int vector = 0; vector < VECTORS; ++vector)
    for (int k = 0; k < NUMBERS; k += 4) sum(vector, k) = uint4{0, 0, 0, 0};

  for (int row = blockIdx.x; row < ROWS; row += GRID) {
    const size_t start = (size_t)row * COLUMNS;
    const bool is_word = targets[row] >= 0 && targets[row] < WORDS;
    const int target = is_word ? targets[row] : 0;
    float x[VECTORS][NUMBERS], top = -3.4e38f, total = 0;
#pragma unroll
    for (int vector = 0; vector < VECTORS; ++vector)
      if (column(vector) < COLUMNS) {
        const Vector read = {__ldcs(reinterpret_cast<const uint4*>(logits + start + column(vector)))};  // read once: first to leave the cache
#pragma unroll
        for (int k = 0; k < NUMBERS; k += 4) {
          const uint4 four = __ldg(reinterpret_cast<const uint4*>(bias + column(vector) + k));
          x[vector][k] = logit(read.of[k]) + __uint_as_float(four.x);
          x[vector][k + 1] = logit(read.of[k + 1]) + __uint_as_float(four.y);
          x[vector][k + 2] = logit(read.of[k + 2]) + __uint_as_float(four.z);
          x[vector][k + 3] = logit(read.of[k + 3]) + __uint_as_float(four.w);
        }
#pragma unroll
        for (int k = 0; k < NUMBERS; ++k) top = fmaxf(top, x[vector][k]);  // passes over a NaN, which the total will be
      }
    // To the base of 2: an error of `top` is a factor of all that cancels, as long as the losses' logarithm has it too.
    top = LOG2_E * over_block(top, tops, [](float a, float b) { return fmaxf(a, b); });
#pragma unroll
    for (int vector = 0; vector < VECTORS; ++vector)
      if (column(vector) < COLUMNS)
#pragma unroll
        for (int k = 0; k < NUMBERS; ++k) total += x[vector][k] = power_of_2(fmaf(x[vector][k], LOG2_E, -top));
    total = over_block(total, totals, [](float a, float b) { return a + b; });

    const float weight = is_word ? scale[0] : 0, to_gradient = weight / total;
#pragma unroll
    for (int vector = 0; vector < VECTORS; ++vector)
      if (column(vector) < COLUMNS) {
        Gradients written;
#if PAIRS
        Gradients trailing;
#endif
        const int place = target - column(vector);  // of the target in this vector
#pragma unroll
        for (int k = 0; k < NUMBERS; ++k) {
          x[vector][k] = fmaf(x[vector][k], to_gradient, place == k ? -weight : 0);
          written.of[k] = stored(x[vector][k]);
#if PAIRS
          trailing.of[k] = stored((x[vector][k] - from_float16(written.of[k])) * TRAILING);
#endif
        }
#pragma unroll
        for (int k = 0; k < NUMBERS; k += 4) {
          uint4 four = sum(vector, k);
          add(four.x, x[vector][k]), add(four.y, x[vector][k + 1]);
          add(four.z, x[vector][k + 2]), add(four.w, x[vector][k + 3]);
          sum(vector, k) = four;
        }
        *reinterpret_cast<GradientVector*>(d_logits + start + column(vector)) = written.all;
#if PAIRS
        *reinterpret_cast<GradientVector*>(trails + start + column(vector)) = trailing.all;
#endif
      }
    if (threadIdx.x == 0)
      losses[row] = is_word ? fmaf(top, LN_2, logf(total)) - (logit(logits[start + target]) + bias[target])
                            : __uint_as_float(0x7fc00000);
  }

  for (int vector = 0; vector < VECTORS && column(vector) < COLUMNS; ++vector)
    for (int k = 0; k < NUMBERS; k += 4)
      *reinterpret_cast<uint4*>(d_bias + (size_t)blockIdx.x * COLUMNS + column(vector) + k) = sum(vector, k);
}
