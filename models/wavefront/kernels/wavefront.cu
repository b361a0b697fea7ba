// The wavefront of models/wavefront/schedule.py as two persistent kernels: one launch for all steps of all layers, each way.
//
// A launch is at most one thread block per multiprocessor, so that all run at once. A block owns UNIT_TILE units of one
// layer ("lane") and BATCH_TILE sequences for the whole of time: it keeps the weights that these units read in registers and
// shared memory (what does not fit comes from the L2 cache at every step), and c (backward: the gradient by c) in registers.
// At a step
//
//     1 multiply   its weights with what the last step left in global memory, on the tensor cores. The warps are COLUMN_WARPS
//                  teams; each team has sequences of its own, and in it each warp every K_WARPS-th block of the inner
//                  dimension, so that every number of these sequences is read once
//     2 gather     the warps' partial sums through shared memory
//     3 pointwise  gates, c and h; backward: the gates' gradients
//     4 barrier    among the blocks of the same sequences: sequences are independent of each other
//
// SPLIT blocks make a cluster: together they own SPLIT times the units, multiply a part of the inner dimension each, and
// add up each other's sums through distributed shared memory; so each reads 1 / SPLIT of the other operand.
//
// Products and their operands are as in lstm.cuh. Rows of A are gates in the forward kernel and units in the backward kernel.
// Factors that do not stay for the weights' gradients go through a ring of two steps, [2, lanes, batch, K].
//
// The host (Tiling.defines in models/wavefront/tiling.py) says:
//   LANES, TIME, BATCH   layers, steps, sequences
//   DIRECTIONS           1; or 2 of one layer, which know nothing of each other: the second one's numbers come after the first
//                        one's in every array but the lengths
//   UNITS                units of a layer, padded to whole blocks: the padding's weights are 0, so it stays 0
//   LAYER_UNITS          units of a layer, without the padding
//   DTYPE_CODE           see lstm.cuh. Sums and c are float32
//   BACKWARD             which of the two kernels
//   RECURRENT_DROPOUT    1: each gate sees a part of h alone, the same at all steps; see Masks
//   LENGTHS              1: each sequence has a number of steps of its own; see Ends
//   KEEP_FACTORS         1, of SCALED: what stays for the weights' gradients are the products' factors, as the products read them, and
//                        what undoes a gradient's power of two; 0: numbers
//   UNIT_TILE, BATCH_TILE, SPLIT, COLUMN_WARPS, IN_REGISTERS, IN_SHARED, PREFETCH_DEPTH, CHUNK   see Tiling there
//
// The technique: Diamos et al. 2016, "Persistent RNNs: Stashing Recurrent Weights On-Chip".

#include "lstm.cuh"

#define RING (SCALED && !KEEP_FACTORS)

#if SPLIT > 1
#define CLUSTER __cluster_dims__(SPLIT, 1, 1)
#else
#define CLUSTER
#endif

constexpr int GATES = 4 * UNITS, INPUT_UNITS = SCALED ? UNITS : LAYER_UNITS;
constexpr int WIDTH = SPLIT * UNIT_TILE;                     // units of a cluster
constexpr int ROWS = BACKWARD ? WIDTH : 4 * WIDTH;           // of A, of one thread block
constexpr int SEGMENT = (BACKWARD ? GATES : UNITS) / BLOCK;  // blocks of k from the lane itself; as many from its neighbour
constexpr int SEGMENTS = LANES > 1 ? 2 : 1;
constexpr int ROW_TILES = ROWS / 16, COLUMN_TILES = BATCH_TILE / 8 / COLUMN_WARPS;  // of a warp
constexpr int UNIT_TILES = (UNITS + WIDTH - 1) / WIDTH * SPLIT;
constexpr int GROUPS = (BATCH + BATCH_TILE - 1) / BATCH_TILE;
constexpr size_t PLANE = (size_t)BATCH * UNITS, WORDS = PLANE / VECTOR;  // of a step; of a layer's masks
constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int K_WARPS = WARPS / COLUMN_WARPS, TEAM = 32 * K_WARPS;  // warps and threads of the same sequences
constexpr int STRIDE = SPLIT * K_WARPS;                // between the blocks of k of a warp
constexpr int COUNT = (SEGMENTS * SEGMENT + STRIDE - 1) / STRIDE;  // of them: IN_REGISTERS, then IN_SHARED; the others
constexpr int STREAMED = COUNT - IN_REGISTERS - IN_SHARED;         // are read anew at every step
constexpr int PITCH = ROWS + 4;                        // of a column in shared memory: no two lanes write to one bank

static_assert(DIRECTIONS == 1 || LANES == 1, "directions are of one layer");
static_assert(ROWS % 16 == 0 && BATCH_TILE % (8 * COLUMN_WARPS) == 0 && UNITS % BLOCK == 0 && UNIT_TILE <= TEAM, "tiling");
static_assert(SCALED || !KEEP_FACTORS, "factors");
static_assert(!PAIRS || !RECURRENT_DROPOUT, "pairs");
static_assert(BACKWARD || !RECURRENT_DROPOUT || WIDTH % 16 == 0, "16 rows of a product are of one gate");
static_assert(COLUMN_TILES % CHUNK == 0 && STREAMED >= 0 && PREFETCH_DEPTH <= COUNT, "tiling");

// Sequences of a team that its threads have numbers of at the same time in the pointwise part, one thread for each unit.
constexpr int at_once() {
  int found = 1;
  while (2 * found * UNIT_TILE <= TEAM && 8 * CHUNK % (2 * found) == 0) found *= 2;
  return found;
}
constexpr int AT_ONCE = at_once(), POINTS = 8 * COLUMN_TILES / AT_ONCE;  // POINTS: sequences of a thread

#ifndef MOST_LOOKS
#define MOST_LOOKS (1u << 24)  // of a block at a barrier: some five seconds
#endif

// Blocks of a group that have arrived at the barriers of this launch, and that have left the last one.
__device__ unsigned arrived[DIRECTIONS * GROUPS], left[DIRECTIONS * GROUPS];
#if SCALED
__device__ unsigned largest[3][DIRECTIONS * GROUPS];  // backward: of a group's numbers, as bits, of steps in turn
#endif

struct Place {  // of a thread block and a thread in the work
  int group, lane, rank, first_unit, first_of_group, warp, in_warp;  // rank: in its cluster; first_unit: of the cluster
  int team, k_warp, first_sequence;  // k_warp: in its team; first_sequence: of the team
  int unit, column;  // of the thread's numbers in the pointwise part; unit is -1 where it has none

  __device__ Place() {
    int block = blockIdx.x;
    group = block / (LANES * UNIT_TILES);
    lane = block / UNIT_TILES % LANES;
    rank = block % SPLIT;
    first_unit = block % UNIT_TILES / SPLIT * WIDTH;
    first_of_group = (DIRECTIONS > 1 ? group % GROUPS : group) * BATCH_TILE;
    warp = threadIdx.x / 32, in_warp = threadIdx.x % 32;
    // Of one team: a compiler that does not see it keeps 35 registers more.
    team = COLUMN_WARPS > 1 ? warp / K_WARPS : 0, k_warp = COLUMN_WARPS > 1 ? warp % K_WARPS : warp;
    first_sequence = first_of_group + team * 8 * COLUMN_TILES;
    const int in_team = COLUMN_WARPS > 1 ? threadIdx.x % TEAM : threadIdx.x;
    column = in_team / UNIT_TILE;
    unit = first_unit + rank * UNIT_TILE + in_team % UNIT_TILE;
    if (column >= AT_ONCE || unit >= UNITS) unit = -1;
  }
  // An array of so many numbers for each direction, from those of this block's on.
  template <typename T>
  __device__ T* own(T* all, size_t numbers) const {
    return DIRECTIONS > 1 ? all + group / GROUPS * numbers : all;
  }
  __device__ int block(int index) const { return index * STRIDE + rank * K_WARPS + k_warp; }
  __device__ int sequence(int point) const { return first_sequence + AT_ONCE * point + column; }
};

// -- instructions (tests/models/cuda_emulator.h has them for a CPU) --------------------------------------------------------

#ifndef EMULATED
__device__ inline void arrive(unsigned* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

__device__ inline unsigned look(const unsigned* counter) {
  unsigned seen;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
  return seen;
}
#endif

// -- products ------------------------------------------------------------------------------------------------------------

struct Sums {
  float of[ROW_TILES][COLUMN_TILES][4];
};

// One thread block's rows of A, [.., SEGMENTS · SEGMENT · BLOCK] of one lane. A warp's blocks are those of `block`.
struct Weights {
  const uint4* rows;                                // in global memory
  uint4* in_shared;                                 // [IN_SHARED][K_WARPS][ROW_TILES][2][32]
  const Place& place;
  Fragment in_registers[IN_REGISTERS ? IN_REGISTERS : 1][ROW_TILES] = {};

  __device__ Weights(const void* all, unsigned char* shared, const Place& place)
      : rows(static_cast<const uint4*>(all) + (size_t)place.lane * (BACKWARD ? UNITS : GATES) * SEGMENTS * SEGMENT * 4),
        in_shared(reinterpret_cast<uint4*>(shared)),
        place(place) {
#pragma unroll
    for (int index = 0; index < IN_REGISTERS; ++index)
#pragma unroll
      for (int tile = 0; tile < ROW_TILES; ++tile) in_registers[index][tile] = from_memory(index, tile);
    for (int index = IN_REGISTERS + place.team; index < IN_REGISTERS + IN_SHARED; index += COLUMN_WARPS)
      for (int tile = 0; tile < ROW_TILES; ++tile) {
        Fragment found = from_memory(index, tile);
        slot(index, tile)[0] = found.upper, slot(index, tile)[32] = found.lower;
      }
  }

  __device__ uint4* slot(int index, int tile) const {
    return in_shared + (((index - IN_REGISTERS) * K_WARPS + place.k_warp) * ROW_TILES + tile) * 64 + place.in_warp;
  }

  __device__ Fragment from_shared(int index, int tile) const { return {slot(index, tile)[0], slot(index, tile)[32]}; }

  __device__ Fragment from_memory(int index, int tile) const {
    int row = tile * 16 + place.in_warp / 4;
    return {part(index, row), part(index, row + 8)};
  }

  __device__ uint4 part(int index, int row) const {
    int block = place.block(index), unit = place.first_unit + row % WIDTH;
    if (unit >= UNITS || block >= SEGMENTS * SEGMENT) return uint4{0, 0, 0, 0};
    size_t of_all = BACKWARD ? unit : row / WIDTH * UNITS + unit;
    return __ldg(rows + (of_all * SEGMENTS * SEGMENT + block) * 4 + place.in_warp % 4);
  }
};

// With RECURRENT_DROPOUT, what the gates see of a lane's h: words [BATCH, UNITS / VECTOR], where bit gate · VECTOR + unit % VECTOR
// is 1 if it is seen. Forward: h is masked on its way into a product, for each gate's rows anew. Backward: rows are units, and
// the part of a sum that comes from a gate's block of k is masked on its way into the sum.
struct Masks {
  const unsigned* words;
  unsigned of_sums[ROW_TILES][COLUMN_TILES];  // backward: of Sums, bit 4 · gate + e

  __device__ Masks(const unsigned* all, const Place& place) {
    if (!RECURRENT_DROPOUT) return;
    words = all + (size_t)place.lane * BATCH * (UNITS / VECTOR);
    if (!BACKWARD) return;
#pragma unroll
    for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile)
#pragma unroll
      for (int tile = 0; tile < COLUMN_TILES; ++tile) {
        of_sums[row_tile][tile] = 0;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int unit = place.first_unit + row_tile * 16 + place.in_warp / 4 + e / 2 * 8;
          const int sequence = place.first_sequence + 8 * tile + place.in_warp % 4 * 2 + e % 2;
          if (unit >= UNITS || sequence >= BATCH) continue;
          const unsigned word = __ldg(words + (size_t)sequence * (UNITS / VECTOR) + unit / VECTOR) >> unit % VECTOR;
#pragma unroll
          for (int gate = 0; gate < 4; ++gate) of_sums[row_tile][tile] |= (word >> gate * VECTOR & 1) << (4 * gate + e);
        }
      }
  }
};

// The numbers of x whose bits are 1, from bit 0 on; the others are 0.
__device__ inline unsigned masked(unsigned x, unsigned bits) {
  return VECTOR == 4 ? x & -(bits & 1) : x & ((bits & 1) * 0xffffu | (bits >> 1 & 1) * 0xffff0000u);
}
__device__ inline uint4 masked(uint4 x, unsigned bits) {
  constexpr int EACH = VECTOR / 4;
  return {masked(x.x, bits), masked(x.y, bits >> EACH), masked(x.z, bits >> 2 * EACH), masked(x.w, bits >> 3 * EACH)};
}

// Rows of B, one a sequence, `pitch` numbers apart: blocks below SEGMENT at `own`, the others at `neighbour`; null: zeros.
struct Operand {
  const Factor *own, *neighbour;
  int pitch;
};

// What stays for the products of the weights' gradients, in rows.
#if KEEP_FACTORS
using Kept = Factor;
__device__ inline void stay(Kept* row, int index, Kept x) { put(row, index, x); }
__device__ inline Kept stayed(const Kept* row, int index) { return got(row, index); }
#else
using Kept = Number;
__device__ inline void stay(Kept* row, int index, Kept x) { row[index] = x; }
__device__ inline Kept stayed(const Kept* row, int index) { return row[index]; }
#endif

#if RING
constexpr int RING_PITCH = BACKWARD ? GATES : SEGMENTS * UNITS;
__device__ inline Factor* of_ring(Factor* ring, int step, int lane) {
  return ring + ((step & 1) * LANES * DIRECTIONS + lane) * (size_t)BATCH * RING_PITCH;
}
#endif

// This warp's share of A · B.
__device__ inline void multiply(Sums& sums, const Weights& weights, const Operand& operand, const Masks& masks) {
  const Place& place = weights.place;
  uint4 values[PREFETCH_DEPTH][COLUMN_TILES];  // a ring of blocks on their way
  unsigned seen[PREFETCH_DEPTH][COLUMN_TILES];
  Fragment streamed[STREAMED ? PREFETCH_DEPTH : 1][ROW_TILES];
#if PAIRS
  Sums trailing = {};  // times TRAILING
#endif

  auto load = [&](int slot, int index) {
    const int block = place.block(index);
    const Factor* source = block < SEGMENT ? operand.own : operand.neighbour;
    const bool there = source && block < SEGMENTS * SEGMENT;
    const uint4* from = reinterpret_cast<const uint4*>(source + (block < SEGMENT ? block : block - SEGMENT) * BLOCK);
#pragma unroll
    for (int tile = 0; tile < COLUMN_TILES; ++tile) {
      const int sequence = place.first_sequence + 8 * tile + place.in_warp / 4;
      values[slot][tile] = uint4{0, 0, 0, 0};
      if (there && sequence < BATCH)  // past the L1 cache: other thread blocks have just written it
        values[slot][tile] = __ldcg(from + (size_t)sequence * (operand.pitch / VECTOR) + place.in_warp % 4);
      if (!RECURRENT_DROPOUT || BACKWARD) continue;
      seen[slot][tile] = ~0u;
      if (block < SEGMENT && sequence < BATCH)
        seen[slot][tile] = __ldg(masks.words + (size_t)sequence * (UNITS / VECTOR) + block * 4 + place.in_warp % 4);
    }
    if (STREAMED && index >= IN_REGISTERS + IN_SHARED)
#pragma unroll
      for (int tile = 0; tile < ROW_TILES; ++tile) streamed[slot][tile] = weights.from_memory(index, tile);
  };

  auto use = [&](int slot, int index, int row_tile, const Fragment& a) {
#pragma unroll
    for (int tile = 0; tile < COLUMN_TILES; ++tile) {
      float(&sum)[4] = sums.of[row_tile][tile];
      const uint4 b = values[slot][tile];
#if PAIRS
      multiply_trailing(trailing.of[row_tile][tile], a.upper, a.lower, b);
#endif
      if (!RECURRENT_DROPOUT) {
        multiply_add(sum, a.upper, a.lower, b);
      } else if (!BACKWARD) {
        multiply_add(sum, a.upper, a.lower, masked(b, seen[slot][tile] >> row_tile * 16 / WIDTH * VECTOR));
      } else {
        const int block = place.block(index);
        const unsigned bits = block < SEGMENT ? masks.of_sums[row_tile][tile] >> block * BLOCK / UNITS * 4 : ~0u;
        float part[4] = {};
        multiply_add(part, a.upper, a.lower, b);
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[e] += bits >> e & 1 ? part[e] : 0;
      }
    }
  };

  auto round = [&](int slot) {
#pragma unroll
    for (int tile = 0; tile < COLUMN_TILES; ++tile) values[slot][tile] = rounded(values[slot][tile]);
  };

#pragma unroll
  for (int index = 0; index < PREFETCH_DEPTH; ++index) load(index, index);
#pragma unroll
  for (int index = 0; index < IN_REGISTERS; ++index) {
    round(index % PREFETCH_DEPTH);
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile) use(index % PREFETCH_DEPTH, index, tile, weights.in_registers[index][tile]);
    if (index + PREFETCH_DEPTH < COUNT) load(index % PREFETCH_DEPTH, index + PREFETCH_DEPTH);
  }
  for (int first = IN_REGISTERS; first < COUNT; first += PREFETCH_DEPTH)
#pragma unroll
    for (int a = 0; a < PREFETCH_DEPTH; ++a) {
      const int index = first + a, slot = (IN_REGISTERS + a) % PREFETCH_DEPTH;
      if (index >= COUNT) break;
      round(slot);
#pragma unroll
      for (int tile = 0; tile < ROW_TILES; ++tile)
        use(slot, index, tile,
            STREAMED && index >= IN_REGISTERS + IN_SHARED ? streamed[slot][tile] : weights.from_shared(index, tile));
      if (index + PREFETCH_DEPTH < COUNT) load(slot, index + PREFETCH_DEPTH);
    }
#if PAIRS
#pragma unroll
  for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile)
#pragma unroll
    for (int tile = 0; tile < COLUMN_TILES; ++tile)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums.of[row_tile][tile][e] += trailing.of[row_tile][tile][e] * (1 / TRAILING);
#endif
}

// All threads that add up sums together.
__device__ inline void meet() {
  if (SPLIT > 1)
    sync_cluster();
  else
    __syncthreads();
}

// Adds up the warps' sums through shared memory, [WARPS][CHUNK][8][PITCH], and calls use(point, total), where total[gate]
// is the sum of this thread's row of that gate (backward: of its one row, gate 0). In a cluster each block adds up its own first.
template <typename Use>
__device__ inline void gather(const Sums& sums, float* shared, const Place& place, Use use) {
  constexpr int COLUMNS = 8 * CHUNK, OF_WARP = COLUMNS * PITCH;
  float* of_team = shared + place.team * K_WARPS * OF_WARP;
#pragma unroll
  for (int from = 0; from < COLUMN_TILES; from += CHUNK) {
    if (from) meet();  // the first time the barrier of the group has seen to it that all have read the last step's
#pragma unroll
    for (int c = 0; c < CHUNK; ++c)
#pragma unroll
      for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile) {
        float* to = of_team + place.k_warp * OF_WARP + (c * 8 + place.in_warp % 4 * 2) * PITCH + row_tile * 16 + place.in_warp / 4;
        const float(&of)[4] = sums.of[row_tile][from + c];
        to[0] = of[0], to[PITCH] = of[1], to[8] = of[2], to[PITCH + 8] = of[3];
      }
    if (SPLIT > 1 && K_WARPS > 1) {
      __syncthreads();
      for (int at = threadIdx.x % TEAM; at < COLUMNS * (ROWS / 4); at += TEAM) {
        float4* first = reinterpret_cast<float4*>(of_team + at / (ROWS / 4) * PITCH) + at % (ROWS / 4);
        float4 sum = *first;
#pragma unroll
        for (int warp = 1; warp < K_WARPS; ++warp) {
          const float4 more = first[warp * (OF_WARP / 4)];
          sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
        }
        *first = sum;
      }
    }
    meet();
    if (place.unit < 0) continue;
    float totals[COLUMNS / AT_ONCE][BACKWARD ? 1 : 4];  // all of them before the first is used: they are on their way together
#pragma unroll
    for (int point = 0; point < COLUMNS / AT_ONCE; ++point)
#pragma unroll
      for (int gate = 0; gate < (BACKWARD ? 1 : 4); ++gate) {
        const float* at = of_team + (point * AT_ONCE + place.column) * PITCH + gate * WIDTH + place.unit - place.first_unit;
        float sum = *at;
        if (SPLIT == 1)
#pragma unroll
          for (int warp = 1; warp < K_WARPS; ++warp) sum += at[warp * OF_WARP];
        totals[point][gate] = sum;
      }
#pragma unroll
    for (int next = 1; next < SPLIT; ++next)
#pragma unroll
      for (int point = 0; point < COLUMNS / AT_ONCE; ++point)
#pragma unroll
        for (int gate = 0; gate < (BACKWARD ? 1 : 4); ++gate) {
          const float* at = of_team + (point * AT_ONCE + place.column) * PITCH + gate * WIDTH + place.unit - place.first_unit;
          totals[point][gate] += from_peer(at, (place.rank + next) % SPLIT);
        }
#pragma unroll
    for (int point = 0; point < COLUMNS / AT_ONCE; ++point) {
      const int own = from * 8 / AT_ONCE + point;
      if (place.sequence(own) < BATCH) use(own, totals[point]);
    }
  }
}

// -- the barrier of a group ----------------------------------------------------------------------------------------------

// A block tells its group that what it wrote can be read; what it does until it waits costs nothing. `first`: of one thread, before.
template <typename First>
__device__ inline void tell_group(const Place& place, First first) {
  __syncthreads();
  if (threadIdx.x == 0) first(), arrive(arrived + place.group);
}
__device__ inline void tell_group(const Place& place) {
  tell_group(place, [] {});
}

__device__ inline void wait_for_group(const Place& place, unsigned times) {
  if (threadIdx.x == 0)
    for (unsigned looks = 0; look(arrived + place.group) < times * LANES * UNIT_TILES; ++looks)
      if (looks > MOST_LOOKS) __trap();  // a block of the group has no place to run: an error and no hang
  __syncthreads();
}

// The last block to leave sets the counters back for the next launch: all have seen their last barrier, and none has told of
// another since.
__device__ inline void leave(const Place& place) {
  meet();  // nobody reads this block's shared memory any more
  if (threadIdx.x != 0) return;
  __threadfence();
  if (atomicAdd(left + place.group, 1u) == LANES * UNIT_TILES - 1) {
    __threadfence();
    arrived[place.group] = 0, left[place.group] = 0;
#if SCALED
    for (int turn = 0; turn < 3; ++turn) largest[turn][place.group] = 0;
#endif
  }
}

#if SCALED
// The larger one of `most` and x without its sign; infinities and NaN are what they are in float16 too.
__device__ inline float larger(float most, float x) { return fabsf(x) <= 3.402823466e38f ? fmaxf(most, fabsf(x)) : most; }
#endif

// -- the kernels ---------------------------------------------------------------------------------------------------------

#if !BACKWARD
// Operands of the products, here (but with RING) and of the weights' gradients: first [time, batch, units], the h of lane 0 before each
// step; rest [lanes - 1, time, batch, 2·units], of every further lane its h before each step and, beside it, the output of the lane
// below at the step.
extern "C" __global__ void CLUSTER __launch_bounds__(THREADS, 1) NAME(lstm_wavefront_forward)(
    const Factor* __restrict__ weights,    // [lanes, 4·units, SEGMENTS·units]: recurrent | kernel, transposed
    const Number* __restrict__ projected,  // [time, batch, 4·INPUT_UNITS]: lane 0's input times its kernel
    const float* __restrict__ bias,        // [lanes, 4·units]
    const Number* __restrict__ h_0,        // [lanes, batch, units]
    const float* __restrict__ c_0,
#if SCALED
    const float* __restrict__ scales,      // [1 + lanes]: what h is multiplied by; what a lane's sums are multiplied by
    const float* __restrict__ input_scales,  // [time, batch]: what `projected` is multiplied by
#endif
#if RECURRENT_DROPOUT
    const unsigned* __restrict__ seen,     // [lanes, batch, UNITS / VECTOR], see Masks
#endif
#if LENGTHS
    const int* __restrict__ lengths,       // [batch], see Ends
#endif
    Kept* first,
#if LANES > 1
    Kept* rest,
#endif
    Number* outputs,                       // [time, batch, units], of the last lane
    Number* h_end, float* c_end,           // [lanes, batch, units]
    float* gates,                          // [lanes, time, batch, 4·units], i f g o
    float* cells                           // [lanes, time, batch, units], c after each step
#if RING
    , Factor* ring                         // of h and the output of the lane below
#endif
) {
  unsigned char* shared = shared_memory();
  Place place;
  const int lane = place.lane, unit = place.unit;
#if LANES == 1
  Kept* rest = first;
#endif
#if !RECURRENT_DROPOUT
  const unsigned* seen = nullptr;
#endif
#if !LENGTHS
  const int* lengths = nullptr;
#endif
#if DIRECTIONS > 1
  weights = place.own(weights, (size_t)GATES * UNITS), bias = place.own(bias, GATES);
  if (RECURRENT_DROPOUT) seen = place.own(seen, WORDS);
  projected = place.own(projected, (size_t)TIME * BATCH * 4 * INPUT_UNITS), gates = place.own(gates, (size_t)TIME * BATCH * GATES);
  first = rest = place.own(first, TIME * PLANE), outputs = place.own(outputs, TIME * PLANE), cells = place.own(cells, TIME * PLANE);
  h_0 = place.own(h_0, PLANE), c_0 = place.own(c_0, PLANE), h_end = place.own(h_end, PLANE), c_end = place.own(c_end, PLANE);
#endif
  const Weights own_weights(weights, shared, place);
  const Masks masks(seen, place);
  const Ends<POINTS> ends(lengths, place);
  float* partial = reinterpret_cast<float*>(shared + (size_t)IN_SHARED * K_WARPS * ROW_TILES * 1024);
  const int pitch = lane ? 2 * UNITS : UNITS;
#if SCALED
  const int of_lanes = DIRECTIONS > 1 ? place.group / GROUPS : lane;
  const float h_scale = scales[0], undo = scales[1 + of_lanes];
  if (DIRECTIONS > 1) input_scales = place.own(input_scales, TIME * BATCH);
  auto factor = [&](float h) { return to_factor(h * h_scale); };
#else
  auto factor = [](Number h) { return h; };
#endif
#if KEEP_FACTORS
  auto kept = factor;
#else
  auto kept = [](Number h) { return h; };
#endif
  Kept* operand = lane ? rest + (size_t)(lane - 1) * TIME * 2 * PLANE : first;
  float bias_of[4], c[POINTS];
#pragma unroll
  for (int gate = 0; gate < 4; ++gate) bias_of[gate] = unit < 0 ? 0 : bias[lane * GATES + gate * UNITS + unit];
#pragma unroll
  for (int point = 0; point < POINTS; ++point) {
    c[point] = 0;
    if (unit < 0 || place.sequence(point) >= BATCH) continue;
    size_t at = (size_t)place.sequence(point) * UNITS + unit;
    c[point] = c_0[lane * PLANE + at];
    const Number h = to_operand(wide(h_0[lane * PLANE + at]));
    stay(operand + (size_t)place.sequence(point) * pitch, unit, kept(h));
#if RING
    put(of_ring(ring, 0, of_lanes) + (size_t)place.sequence(point) * RING_PITCH, unit, factor(h));
#endif
    if (!(KEEP_FACTORS ? ends.of[point] : ends.last)) h_end[lane * PLANE + at] = h, c_end[lane * PLANE + at] = c[point];
  }

  tell_group(place);

  float gates_of[POINTS][4];  // of the last step, to be kept for the backward pass
  auto keep = [&](int time) {
    if (time < 0 || time >= ends.last || unit < 0) return;
#pragma unroll
    for (int point = 0; point < POINTS; ++point) {
      if (place.sequence(point) >= BATCH) continue;
      const size_t row = ((size_t)lane * TIME + time) * BATCH + place.sequence(point);
#pragma unroll
      for (int gate = 0; gate < 4; ++gate) gates[row * GATES + gate * UNITS + unit] = gates_of[point][gate];
      cells[row * UNITS + unit] = c[point];
    }
  };

  for (int step = 0; step < ends.last + LANES - 1; ++step) {
    const int time = step - lane;
    const bool active = time >= 0 && time < ends.last;
    keep(time - 1);
    // On their way while the barrier waits: nothing is done to them before, or that would wait for them.
    Number input[POINTS][4];
    float input_scale[POINTS];
    if (active && lane == 0 && unit >= 0)
#pragma unroll
      for (int point = 0; point < POINTS; ++point) {
        const size_t row = (size_t)time * BATCH + place.sequence(point);
        if (place.sequence(point) >= BATCH) continue;
#if SCALED
        input_scale[point] = input_scales[row];
#endif
#pragma unroll
        for (int gate = 0; gate < 4; ++gate)
          input[point][gate] = unit < LAYER_UNITS ? projected[(row * 4 + gate) * INPUT_UNITS + unit] : 0;
      }
    wait_for_group(place, step + 1);

    if (active) {
      Sums sums = {};
      const Kept* now = operand + (size_t)time * BATCH * pitch;
#if RING
      const Factor* factors = of_ring(ring, time, of_lanes);
      multiply(sums, own_weights, {factors, lane ? factors + UNITS : nullptr, RING_PITCH}, masks);
#else
      multiply(sums, own_weights, {now, lane ? now + UNITS : nullptr, pitch}, masks);
#endif
      gather(sums, partial, place, [&](int point, const auto& total) {
        const int sequence = place.sequence(point);
        float z[4];
#pragma unroll
        for (int gate = 0; gate < 4; ++gate) {
#if SCALED
          z[gate] = total[gate] * undo + bias_of[gate] + (lane ? 0 : wide(input[point][gate]) * input_scale[point]);
#else
          z[gate] = total[gate] + bias_of[gate] + (lane ? 0 : wide(input[point][gate]));
#endif
        }
        const float i = sigmoid(z[0]), f = sigmoid(z[1]), g = tangent(z[2]), o = sigmoid(z[3]);
        const float c_before = c[point];
        c[point] = f * c[point] + i * g;
        gates_of[point][0] = i, gates_of[point][1] = f, gates_of[point][2] = g, gates_of[point][3] = o;
        const Number h = to_operand(o * tangent(c[point]));
        Number output = h;
        Kept stays = kept(h);
        const size_t at = (size_t)sequence * UNITS + unit;
#if KEEP_FACTORS  // which are no h to end with
        if (time + 1 == ends.of[point]) h_end[lane * PLANE + at] = h, c_end[lane * PLANE + at] = c[point];
#endif
#if LENGTHS
        if (ends.passed(point, time)) c[point] = c_before, stays = stayed(now + (size_t)sequence * pitch, unit), output = 0;
#endif
        if (time + 1 < ends.last)
          stay(operand + ((size_t)(time + 1) * BATCH + sequence) * pitch, unit, stays);
#if !KEEP_FACTORS
        else
          h_end[lane * PLANE + at] = stays, c_end[lane * PLANE + at] = c[point];
#endif
        if (lane + 1 < LANES)
          stay(rest + (((size_t)lane * TIME + time) * BATCH + sequence) * 2 * UNITS, UNITS + unit, stays);
        else
          outputs[time * PLANE + at] = output;
#if RING
        const Factor passed_on = factor(stays);
        const size_t row = (size_t)sequence * RING_PITCH;
        if (time + 1 < ends.last) put(of_ring(ring, time + 1, of_lanes) + row, unit, passed_on);
        if (lane + 1 < LANES) put(of_ring(ring, time, of_lanes + 1) + row, UNITS + unit, passed_on);
#endif
      });
    }
    if (step < ends.last + LANES - 2) tell_group(place);
  }
  keep(ends.last + LANES - 2 - lane);
#if LENGTHS
  if (unit >= 0)
    for (int time = ends.last; time < TIME; ++time)
#pragma unroll
      for (int point = 0; point < POINTS; ++point) {
        if (place.sequence(point) >= BATCH) continue;
        const size_t row = (size_t)time * BATCH + place.sequence(point);
        stay(operand + row * pitch, unit, 0);
        if (lane + 1 < LANES)
          stay(rest + ((size_t)lane * TIME * BATCH + row) * 2 * UNITS, UNITS + unit, 0);
        else
          outputs[row * UNITS + unit] = 0;
      }
#endif
  leave(place);
}

#else
extern "C" __global__ void CLUSTER __launch_bounds__(THREADS, 1) NAME(lstm_wavefront_backward)(
    const Factor* __restrict__ weights,    // [lanes, units, SEGMENTS·4·units]: recurrent | kernel of the lane above
    const float* __restrict__ gates,       // of the forward pass, like the next two
    const float* __restrict__ cells,
    const float* __restrict__ c_0,
    const Number* __restrict__ d_outputs,  // [time, batch, units]
    const Number* __restrict__ d_h_end,    // [lanes, batch, units]
    const float* __restrict__ d_c_end,
#if SCALED
    const float* __restrict__ scales,      // [4 + lanes + time], see `bound`: of all; what undoes a lane's weights' scale; of outputs
#endif
#if RECURRENT_DROPOUT
    const unsigned* __restrict__ seen,
#endif
#if LENGTHS
    const int* __restrict__ lengths,
#endif
    Kept* d_first,                         // [time, batch, 4·units]: of lane 0, by the gates' sums
#if LANES > 1
    Kept* d_rest,                          // [lanes - 1, time, batch, 4·units]: of every further lane
#endif
    Number* d_h_0, float* d_c_0,           // [lanes, batch, units]
    float* d_bias                          // [GROUPS, COLUMN_WARPS·AT_ONCE, lanes, 4·units], to be added up over the first two
#if KEEP_FACTORS
    , float* d_undone                      // [lanes, time, batch]: what undoes their power of two; tiny past a sequence's end
#endif
#if RING
    , Factor* ring                         // of the gradients by the gates' sums
#endif
) {
  unsigned char* shared = shared_memory();
  Place place;
  const int lane = place.lane, unit = place.unit;
#if LANES == 1
  Kept* d_rest = d_first;
#endif
#if !RECURRENT_DROPOUT
  const unsigned* seen = nullptr;
#endif
#if !LENGTHS
  const int* lengths = nullptr;
#endif
#if DIRECTIONS > 1
  weights = place.own(weights, (size_t)GATES * UNITS);
  if (RECURRENT_DROPOUT) seen = place.own(seen, WORDS);
  gates = place.own(gates, (size_t)TIME * BATCH * GATES), cells = place.own(cells, TIME * PLANE);
  d_first = d_rest = place.own(d_first, (size_t)TIME * BATCH * GATES), d_outputs = place.own(d_outputs, TIME * PLANE);
  c_0 = place.own(c_0, PLANE), d_h_end = place.own(d_h_end, PLANE), d_c_end = place.own(d_c_end, PLANE);
  d_h_0 = place.own(d_h_0, PLANE), d_c_0 = place.own(d_c_0, PLANE);
#endif
  const Weights own_weights(weights, shared, place);
  const Masks masks(seen, place);
  const Ends<POINTS> ends(lengths, place);
  float* partial = reinterpret_cast<float*>(shared + (size_t)IN_SHARED * K_WARPS * ROW_TILES * 1024);
  Kept* d_own = lane ? d_rest + (size_t)(lane - 1) * TIME * 4 * PLANE : d_first;
  float d_bias_of[4] = {}, d_c[POINTS], c[POINTS], d_h_kept[POINTS];  // kept: of an h that stands still
#pragma unroll
  for (int point = 0; point < POINTS; ++point) {
    d_c[point] = c[point] = d_h_kept[point] = 0;
    if (unit < 0 || place.sequence(point) >= BATCH) continue;
    size_t at = (size_t)place.sequence(point) * UNITS + unit;
    d_c[point] = d_c_end[lane * PLANE + at];
    if (const int end = ends.of[point]) c[point] = cells[((size_t)lane * TIME + end - 1) * PLANE + at];
  }

#if SCALED
  const int of_lanes = DIRECTIONS > 1 ? place.group / GROUPS : lane;
  // The gradients by the gates' sums of a step differ by orders of magnitude from another's. Before a step they are known to be `bound` at
  // most: by the largest of the last step's and of those by c, `most`, and of what comes from outside at this step (see `_bounds` in
  // persistent.py). The power of two for that is the step's, of all blocks of the group: written so that all find the very same.
  const float h_end = scales[0], of_sums = scales[1], c_end = scales[2], of_c = scales[3], undo_weights = scales[4 + of_lanes];
  const float* of_outputs = scales + 4 + LANES * DIRECTIONS;
  auto bound = [&](unsigned most_bits, float outside, float by_c) {
    const float most = __uint_as_float(most_bits);
    return (fmaxf(most, by_c) + fmaf(of_sums, most, outside)) * of_c;
  };
  unsigned* of_block = reinterpret_cast<unsigned*>(partial + WARPS * CHUNK * 8 * PITCH);
  if (threadIdx.x == 0) *of_block = 0;
  float bounded = 0;  // what the last step's were at most
#endif
  if (COLUMN_WARPS > 1 || SCALED) __syncthreads();  // the other teams' share of the weights

  // One step more than forward: at time -1 stands the gradient by the initial h.
  for (int step = ends.last + LANES - 2; step >= -1; --step) {
    const int time = step - lane;
    const bool active = time >= -1 && time < ends.last;
    float gate_of[POINTS][4], c_before[POINTS];  // on their way while the barrier waits
    Number d_output[POINTS];
#if NARROW
    Number d_h_last[POINTS];  // a sum of two is no narrow number
#endif
    if (active && time >= 0 && unit >= 0)
#pragma unroll
      for (int point = 0; point < POINTS; ++point)
        if (place.sequence(point) < BATCH) {
          const size_t at = (size_t)place.sequence(point) * UNITS + unit, kept = ((size_t)lane * TIME + time) * PLANE;
          const float* gates_now = gates + kept * 4 + (size_t)place.sequence(point) * GATES + unit;
#pragma unroll
          for (int gate = 0; gate < 4; ++gate) gate_of[point][gate] = gates_now[gate * UNITS];
          c_before[point] = time ? cells[kept - PLANE + at] : c_0[lane * PLANE + at];
          d_output[point] = lane + 1 < LANES || ends.passed(point, time) ? 0 : d_outputs[time * PLANE + at];
#if NARROW
          d_h_last[point] = time + 1 == ends.last ? d_h_end[lane * PLANE + at] : 0;
#else
          if (time + 1 == ends.last) d_output[point] += d_h_end[lane * PLANE + at];
#endif
        }
    const int turn = ends.last + LANES - 2 - step;  // from 0 on
    if (turn) wait_for_group(place, turn);
#if SCALED
    const unsigned last_most = turn ? __ldcg(largest[(turn + 2) % 3] + place.group) : 0;
    const bool at_ends = LENGTHS || turn < LANES;  // of some sequence or lane
    const float outside = (at_ends ? h_end : 0) + (step < LANES - 1 ? 0 : of_outputs[step - (LANES - 1)]), by_c = at_ends ? c_end : 0;
    const float undo = undone(bounded);
    float most = 0;
#endif

    if (active) {
      Sums sums = {};
      const bool has_next = time + 1 < ends.last, has_above = lane + 1 < LANES && time >= 0;
#if RING
      multiply(sums, own_weights,
               {has_next ? of_ring(ring, turn + 1, of_lanes) : nullptr, has_above ? of_ring(ring, turn + 1, of_lanes + 1) : nullptr,
                GATES}, masks);
#else
      multiply(sums, own_weights,
               {has_next ? d_own + (size_t)(time + 1) * 4 * PLANE : nullptr,
                has_above ? d_rest + ((size_t)lane * TIME + time) * 4 * PLANE : nullptr, GATES}, masks);
#endif
#if SCALED
      const float scale = power(bounded = bound(last_most, outside, by_c));
#endif
      gather(sums, partial, place, [&](int point, const auto& total) {
        const int sequence = place.sequence(point);
        const size_t at = (size_t)sequence * UNITS + unit;
        float d_h = total[0];
#if SCALED
        d_h = d_h * undo * undo_weights;
#endif
#if RING
        Factor* factors = of_ring(ring, turn, of_lanes) + (size_t)sequence * GATES;
#endif
        if (LENGTHS) d_h += d_h_kept[point];
        if (time < 0) {
#if LENGTHS
          if (!ends.last) d_h += wide(d_h_end[lane * PLANE + at]);
#endif
          d_h_0[lane * PLANE + at] = to_operand(d_h);
          d_c_0[lane * PLANE + at] = d_c[point];
          return;
        }
        d_h += wide(d_output[point]);
#if NARROW
        d_h += wide(d_h_last[point]);
#endif
        Kept* to = d_own + ((size_t)time * BATCH + sequence) * GATES;
#if KEEP_FACTORS
        if (unit == 0)
          d_undone[((size_t)of_lanes * TIME + time) * BATCH + sequence] = undone(ends.passed(point, time) ? 0 : bounded);
#endif
        if (ends.passed(point, time)) {
          d_h_kept[point] = d_h;
#pragma unroll
          for (int gate = 0; gate < 4; ++gate) {
            stay(to, gate * UNITS + unit, 0);
#if RING
            put(factors, gate * UNITS + unit, 0);
#endif
          }
          return;
        }
        d_h_kept[point] = 0;
        const float i = gate_of[point][0], f = gate_of[point][1], g = gate_of[point][2], o = gate_of[point][3];
        const float tanh_c = tangent(c[point]);
        d_c[point] += d_h * o * (1 - tanh_c * tanh_c);
        const float d_gates[4] = {d_c[point] * g * i * (1 - i), d_c[point] * c_before[point] * f * (1 - f),
                                  d_c[point] * i * (1 - g * g), d_h * tanh_c * o * (1 - o)};
        d_c[point] *= f;
        c[point] = c_before[point];
#pragma unroll
        for (int gate = 0; gate < 4; ++gate) {
          d_bias_of[gate] += d_gates[gate];
#if SCALED
          const Factor factor = to_factor(d_gates[gate] * scale);
          most = larger(most, d_gates[gate]);
#endif
#if RING
          put(factors, gate * UNITS + unit, factor);
#endif
#if KEEP_FACTORS
          stay(to, gate * UNITS + unit, factor);
#else
          stay(to, gate * UNITS + unit, to_operand(d_gates[gate]));
#endif
        }
#if SCALED
        most = larger(most, d_c[point]);
#endif
      });
    }
#if SCALED
    if (step < 0) continue;
    if (!active) bounded = bound(last_most, outside, by_c);
#pragma unroll
    for (int distance = 16; distance; distance /= 2) most = fmaxf(most, from_lane(most, distance));
    if (place.in_warp == 0) atomicMax(of_block, __float_as_uint(most));
    tell_group(place, [&] {
      atomicMax(largest[turn % 3] + place.group, *of_block);
      *of_block = 0;
      if (blockIdx.x % (LANES * UNIT_TILES) == 0) largest[(turn + 1) % 3][place.group] = 0;  // all have read it before they came here
    });
#else
    if (step >= 0) tell_group(place);
#endif
  }
#if LENGTHS
  if (unit >= 0)
    for (int time = ends.last; time < TIME; ++time)
#pragma unroll
      for (int point = 0; point < POINTS; ++point) {
        if (place.sequence(point) >= BATCH) continue;
        Kept* to = d_own + ((size_t)time * BATCH + place.sequence(point)) * GATES;
#pragma unroll
        for (int gate = 0; gate < 4; ++gate) stay(to, gate * UNITS + unit, 0);
#if KEEP_FACTORS
        if (unit == 0) d_undone[((size_t)of_lanes * TIME + time) * BATCH + place.sequence(point)] = undone(0);
#endif
      }
#endif
  if (unit >= 0)
#pragma unroll
    for (int gate = 0; gate < 4; ++gate)
      d_bias[((((size_t)place.group * COLUMN_WARPS + place.team) * AT_ONCE + place.column) * LANES + lane) * GATES + gate * UNITS +
             unit] = d_bias_of[gate];
  leave(place);
}
#endif
