// One LSTM layer of so few units that a cluster of thread blocks holds its weights: each way one launch for all steps.
//
// A cluster of SPLIT blocks owns BATCH_TILE sequences for the whole of time, and knows nothing of other clusters: there is no
// barrier among all blocks, and more clusters than find a place at once wait for their turn. A block owns OWN of the units, and
// keeps its part of the weights in registers and shared memory. What a step needs of the last one never leaves the cluster.
//
//     forward    A: the four gates of the block's units, for all of h, so that a warp has all gates of its units in its own
//                registers. B: h of all units, in each block's shared memory. Each block writes its part of the new h into all
//                blocks' shared memory.
//     backward   A: all units, for the gates of the block's own units. B: the gradients of these gates, which the block has made
//                itself. The products are parts of the gradient by h of all units: each goes into the shared memory of the block
//                that owns the unit, which adds up what has come from all.
//
// A block counts the bytes that have come, and begins a step when all are there. There is no other barrier in a cluster: each place
// is there twice, and every block that has units sends to all others, after its last look at a place, what they need before they can
// write there again. (A block without units, where they do not fill the cluster, takes no part in the forward kernel. A warp without
// units has rows of zeros, and nobody reads what it makes of them.) So a step waits for no write to global memory, and reads
// nothing from there that has not been on its way for a step.
// Registers and fragments are as in lstm.cuh. In a tile of 16 rows of the forward kernel stand 4 gates of 4 units each, gate by gate.
//
// The host (ClusterTiling.defines in models/wavefront/clusters.py) says:
//   TIME, BATCH, UNITS, DTYPE_CODE, BACKWARD, DIRECTIONS, LENGTHS   as in wavefront.cu
//   OWN, BATCH_TILE, SPLIT, IN_REGISTERS, PARTS, PER_MULTIPROCESSOR   see ClusterTiling there

#include "lstm.cuh"

constexpr int GATES = 4 * UNITS;
constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int TILES = BATCH_TILE / 8;                                   // of 8 sequences
constexpr int ALL_ROW_TILES = BACKWARD ? SPLIT * OWN / 16 : OWN / 4;    // of a block
constexpr int ROW_TILES = (ALL_ROW_TILES + WARPS - 1) / WARPS;          // of a warp
constexpr int COUNT = (BACKWARD ? 4 * OWN : UNITS) / BLOCK;             // blocks of k: IN_REGISTERS, the others in shared memory
constexpr int IN_SHARED = COUNT - IN_REGISTERS;
constexpr int USED = (UNITS + OWN - 1) / OWN;                           // blocks of a cluster that have units
constexpr int GROUPS = (BATCH + BATCH_TILE - 1) / BATCH_TILE;
constexpr size_t PLANE = (size_t)BATCH * UNITS;
constexpr int LINE = COUNT * 64 + (COUNT % 2 ? 0 : 64);                 // bytes of a sequence in B: no two lanes read one bank
constexpr int POINTS = BATCH_TILE * OWN / THREADS;                      // numbers of a thread in the pointwise part
constexpr int SLOT = BATCH_TILE + 2;                                    // of a unit's sums, one a sequence
// Forward, what comes from global memory and goes there, whole lines at a time: of a step [BATCH_TILE] of [4][OWN] numbers of
// `projected`, [4][OWN] gates, [OWN] cells, and [1 or 2][OWN] numbers of h and the output; padded so that no two lanes meet in a bank.
constexpr int INPUT = 4 * OWN + VECTOR, KEPT = 5 * OWN + 4, STATES = (1 + LENGTHS) * OWN + VECTOR;  // numbers of a sequence
constexpr int INPUT_BYTES = BATCH_TILE * INPUT * sizeof(Number), KEPT_BYTES = BATCH_TILE * KEPT * sizeof(float);
constexpr int STEP_BYTES = INPUT_BYTES + KEPT_BYTES + BATCH_TILE * STATES * sizeof(Number);
constexpr int OPERAND = BATCH_TILE * LINE;                              // bytes; two of them, of this step and the next
constexpr int BOXES = 16;                                               // bytes of two mailboxes, in front of all
constexpr int MAIL = BATCH_TILE * (BACKWARD ? SPLIT * OWN * sizeof(float) : UNITS * sizeof(Number));  // bytes of a step

static_assert(OWN % 32 == 0 && THREADS % OWN == 0 && BATCH_TILE % 8 == 0 && UNITS % BLOCK == 0 && OWN % BLOCK == 0, "tiling");
static_assert(SPLIT * OWN >= UNITS && IN_SHARED >= 0, "tiling");

struct Place {  // of a thread block and a thread in the work
  int cluster, rank, first_unit, first_of_group, warp, in_warp;

  __device__ Place() {
    cluster = blockIdx.x / SPLIT, rank = blockIdx.x % SPLIT;
    first_unit = rank * OWN;
    first_of_group = (DIRECTIONS > 1 ? cluster % GROUPS : cluster) * BATCH_TILE;
    warp = threadIdx.x / 32, in_warp = threadIdx.x % 32;
  }
  // An array of so many numbers for each direction, from those of this block's on.
  template <typename T>
  __device__ T* own(T* all, size_t numbers) const {
    return DIRECTIONS > 1 ? all + cluster / GROUPS * numbers : all;
  }
  // Of the thread's numbers in the pointwise part. Forward: what a warp has of its products; backward: units side by side.
  __device__ int unit(int point) const {
    return first_unit + (BACKWARD ? threadIdx.x % OWN : (warp * ROW_TILES + point / TILES) * 4 + in_warp / 4 % 4);
  }
  __device__ int in_tile(int point) const {
    return BACKWARD ? threadIdx.x / OWN + point * (THREADS / OWN) : point % TILES * 8 + in_warp % 4 * 2 + in_warp / 16;
  }
  __device__ int sequence(int point) const { return first_of_group + in_tile(point); }
  __device__ bool has(int point) const { return unit(point) < UNITS && sequence(point) < BATCH; }
};

// Two mailboxes: of this step and the next. Steps count from 1, the first that reads what others send.
struct Mail {
  Mailbox* boxes;
  const int steps;

  __device__ Mail(unsigned char* shared, int steps) : boxes(reinterpret_cast<Mailbox*>(shared)), steps(steps) {
    if (threadIdx.x == 0)
      for (int step = 1; step <= 2; ++step) {
        make_mailbox(boxes + step % 2);
        if (step <= steps) expect_bytes(boxes + step % 2, MAIL);
      }
    sync_cluster();  // all blocks have started, and have their mailboxes
  }
  __device__ void wait(int step) const {
    wait_for_bytes(boxes + step % 2, (step - 1) / 2 % 2);
    if (threadIdx.x == 0 && step + 2 <= steps) expect_bytes(boxes + step % 2, MAIL);
  }
};

struct Weights {
  uint4* in_shared;  // [IN_SHARED][WARPS][ROW_TILES][2][32]
  const Place& place;
  Fragment in_registers[IN_REGISTERS ? IN_REGISTERS : 1][ROW_TILES] = {};

  __device__ Weights(const Number* all, unsigned char* shared, const Place& place)
      : in_shared(reinterpret_cast<uint4*>(shared)), place(place) {
    const uint4* from = reinterpret_cast<const uint4*>(all);
#pragma unroll
    for (int index = 0; index < IN_REGISTERS; ++index)
#pragma unroll
      for (int tile = 0; tile < ROW_TILES; ++tile)
        in_registers[index][tile] = {part(from, index, tile, 0), part(from, index, tile, 8)};
    for (int index = IN_REGISTERS; index < COUNT; ++index)
      for (int tile = 0; tile < ROW_TILES; ++tile)
        slot(index, tile)[0] = part(from, index, tile, 0), slot(index, tile)[32] = part(from, index, tile, 8);
  }
  __device__ uint4* slot(int index, int tile) const {
    return in_shared + (((index - IN_REGISTERS) * WARPS + place.warp) * ROW_TILES + tile) * 64 + place.in_warp;
  }
  __device__ Fragment from_shared(int index, int tile) const { return {slot(index, tile)[0], slot(index, tile)[32]}; }

  // Forward: all [4·units, units]. Backward: all [units, 4·units].
  __device__ uint4 part(const uint4* all, int index, int tile, int lower) const {
    const int row = place.in_warp / 4 + lower, of_all = place.warp * ROW_TILES + tile;
    if (!BACKWARD) {
      const int unit = place.first_unit + of_all * 4 + row % 4;
      if (unit >= UNITS) return uint4{0, 0, 0, 0};
      return __ldg(all + ((size_t)(row / 4 * UNITS + unit) * (UNITS / BLOCK) + index) * 4 + place.in_warp % 4);
    }
    const int unit = of_all * 16 + row, gate = index * BLOCK / OWN, column = place.first_unit + index * BLOCK % OWN;
    if (unit >= UNITS || column >= UNITS) return uint4{0, 0, 0, 0};
    return __ldg(all + ((size_t)unit * GATES + gate * UNITS + column) / BLOCK * 4 + place.in_warp % 4);
  }
};

struct Sums {
  float of[PARTS][ROW_TILES][TILES][4];  // parts: of every so manieth block of k in registers, since each product waits for its sum
};

// A · B, B [BATCH_TILE][LINE bytes] in shared memory, of rounded numbers.
__device__ inline void multiply(Sums& sums, const Weights& weights, const unsigned char* operand) {
  const Place& place = weights.place;
  const uint4* own = reinterpret_cast<const uint4*>(operand) + place.in_warp / 4 * (LINE / 16) + place.in_warp % 4;
  auto use = [&](int part, int row_tile, const Fragment& a, const uint4 (&b)[TILES]) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) multiply_add(sums.of[part][row_tile][tile], a.upper, a.lower, b[tile]);
  };
  auto load = [&](uint4 (&b)[TILES], int index) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) b[tile] = own[tile * 8 * (LINE / 16) + index * 4];
  };
#pragma unroll
  for (int index = 0; index < IN_REGISTERS; ++index) {
    uint4 b[TILES];
    load(b, index);
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile) use(index % PARTS, tile, weights.in_registers[index][tile], b);
  }
#pragma unroll 4
  for (int index = IN_REGISTERS; index < COUNT; ++index) {
    uint4 b[TILES];
    load(b, index);
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile) use(0, tile, weights.from_shared(index, tile), b);
  }
#pragma unroll
  for (int part = 1; part < PARTS; ++part)
#pragma unroll
    for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile)
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (int e = 0; e < 4; ++e) sums.of[0][row_tile][tile][e] += sums.of[part][row_tile][tile][e];
}

// As B has a number.
__device__ inline Number in_operand(Number x) {
#if DTYPE_CODE == 0
  return __uint_as_float(rounded(__float_as_uint(x)));
#else
  return x;
#endif
}

#if !BACKWARD
// The h of 4 units beside each other, of which each of 4 lanes (of distances 4 and 8) has one, to all blocks of the cluster: each
// lane to every fourth one.
__device__ inline void send(Number h, const PeerPlace (&peers)[(SPLIT + 3) / 4], int box, int at, int of_four) {
#if DTYPE_CODE == 0 || DTYPE_CODE == 3
  const float mine = h;
#else
  const float mine = __uint_as_float(h);
#endif
  const bool odd = of_four & 1, upper = of_four & 2;
  float next = from_lane(mine, 4);
  const float first = odd ? next : mine, second = odd ? mine : next;  // of this pair of units
  float third = from_lane(first, 8), fourth = from_lane(second, 8);   // of the other pair
  const unsigned a = __float_as_uint(upper ? third : first), b = __float_as_uint(upper ? fourth : second);
  const unsigned c = __float_as_uint(upper ? first : third), d = __float_as_uint(upper ? second : fourth);
#pragma unroll
  for (int k = 0; k < (SPLIT + 3) / 4; ++k) {
    if (4 * k + of_four >= USED) continue;
#if DTYPE_CODE == 0 || DTYPE_CODE == 3
    to_peer(peers[k] + at, uint4{a, b, c, d}, peers[k] + box);
#else
    to_peer(peers[k] + at, uint2{a | b << 16, c | d << 16}, peers[k] + box);
#endif
  }
}

extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(THREADS, PER_MULTIPROCESSOR) lstm_cluster_forward(
    const Number* __restrict__ weights,    // [4·units, units]: transposed
    const Number* __restrict__ projected,  // [time, batch, 4·units]: the input times its kernel
    const float* __restrict__ bias,        // [4·units]
    const Number* __restrict__ h_0,        // [batch, units]
    const float* __restrict__ c_0,
#if LENGTHS
    const int* __restrict__ lengths,       // [batch]
#endif
    Number* first,                         // [time, batch, units], h before each step
    Number* outputs,                       // [time, batch, units]
    Number* h_end, float* c_end,           // [batch, units]
    float* gates,                          // [time, batch, 4·units], i f g o
    float* cells) {                        // [time, batch, units], c after each step
  unsigned char* shared = shared_memory();
  const Place place;
#if !LENGTHS
  const int* lengths = nullptr;
#endif
  weights = place.own(weights, (size_t)GATES * UNITS), bias = place.own(bias, GATES);
  projected = place.own(projected, (size_t)TIME * BATCH * GATES), gates = place.own(gates, (size_t)TIME * BATCH * GATES);
  first = place.own(first, TIME * PLANE), outputs = place.own(outputs, TIME * PLANE), cells = place.own(cells, TIME * PLANE);
  h_0 = place.own(h_0, PLANE), c_0 = place.own(c_0, PLANE), h_end = place.own(h_end, PLANE), c_end = place.own(c_end, PLANE);
  unsigned char *operands = shared + BOXES, *on_the_way = operands + 2 * OPERAND;  // of this step and the next
  const Weights own_weights(weights, on_the_way + 2 * STEP_BYTES, place);
  const Ends<POINTS> ends(lengths, place);
  const int of_four = place.in_warp / 4 % 4;
  PeerPlace peers[(SPLIT + 3) / 4];
#pragma unroll
  for (int k = 0; k < (SPLIT + 3) / 4; ++k) peers[k] = place_in_peer(shared, min(4 * k + of_four, SPLIT - 1));

  for (int at = threadIdx.x; at < BATCH_TILE * UNITS; at += THREADS) {
    const int sequence = place.first_of_group + at / UNITS;
    const Number h = sequence < BATCH ? in_operand(to_operand(wide(h_0[(size_t)sequence * UNITS + at % UNITS]))) : narrow(0);
    reinterpret_cast<Number*>(operands + at / UNITS * LINE)[at % UNITS] = h;
  }
  float bias_of[ROW_TILES][4], c[POINTS];
  Number h[POINTS];
#pragma unroll
  for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
    for (int gate = 0; gate < 4; ++gate) {
      const int unit = place.unit(tile * TILES);
      bias_of[tile][gate] = unit < UNITS ? bias[gate * UNITS + unit] : 0;
    }
  // calls use(sequence in the tile, number in its line of `lines` · OWN, which of the lines, unit, row) for every 16 bytes.
  auto by_vectors = [&](int time, int lines, int vector, auto use) {
#pragma unroll 2
    for (int at = threadIdx.x * vector; at < BATCH_TILE * lines * OWN; at += THREADS * vector) {
      const int in_tile = at / (lines * OWN), in_line = at % (lines * OWN), unit = place.first_unit + in_line % OWN;
      if (unit >= UNITS || place.first_of_group + in_tile >= BATCH) continue;
      use(in_tile, in_line, in_line / OWN, unit, (size_t)time * BATCH + place.first_of_group + in_tile);
    }
  };
  auto inputs_of = [&](int time) { return reinterpret_cast<Number*>(on_the_way + time % 2 * STEP_BYTES); };
  auto kept_of = [&](int time) { return reinterpret_cast<float*>(on_the_way + time % 2 * STEP_BYTES + INPUT_BYTES); };
  auto states_of = [&](int time) {
    return reinterpret_cast<Number*>(on_the_way + time % 2 * STEP_BYTES + INPUT_BYTES + KEPT_BYTES);
  };
  auto load = [&](int time) {
    if (time < ends.last)
      by_vectors(time, 4, VECTOR, [&](int in_tile, int in_line, int gate, int unit, size_t row) {
        copy_ahead(inputs_of(time) + in_tile * INPUT + in_line, projected + row * GATES + gate * UNITS + unit);
      });
  };
#pragma unroll
  for (int point = 0; point < POINTS; ++point) {
    c[point] = 0, h[point] = narrow(0);
    if (!place.has(point)) continue;
    const size_t at = (size_t)place.sequence(point) * UNITS + place.unit(point);
    c[point] = c_0[at], h[point] = to_operand(wide(h_0[at]));
    first[at] = h[point];
  }
  load(0);
  wait_for_copies();
  load(1);
  const Mail mail(shared, ends.last - 1);
  if (place.rank >= USED) return;

  for (int time = 0; time < ends.last; ++time) {
    if (time) mail.wait(time);
    const bool more = time + 1 < ends.last;
    Sums sums = {};
    multiply(sums, own_weights, operands + time % 2 * OPERAND);
#pragma unroll
    for (int point = 0; point < POINTS; ++point) {
      const int in_tile = place.in_tile(point), in_block = place.unit(point) - place.first_unit;
      const Number* input = inputs_of(time) + in_tile * INPUT + in_block;
      const int row_tile = point / TILES, tile = point % TILES;
      const float(&sum)[4] = sums.of[0][row_tile][tile];  // lanes below 16: gates 0 and 2 of two sequences; above: gates 1 and 3
      const bool upper = place.in_warp / 16;              // the sequence whose gates this thread takes
      const float even = from_lane(upper ? sum[0] : sum[1], 16), odd = from_lane(upper ? sum[2] : sum[3], 16);
      const float z[4] = {upper ? even : sum[0], upper ? sum[1] : even, upper ? odd : sum[2], upper ? sum[3] : odd};
      auto sum_of = [&](int gate) { return z[gate] + bias_of[row_tile][gate] + wide(input[gate * OWN]); };
      const float i = sigmoid(sum_of(0)), f = sigmoid(sum_of(1)), g = tangent(sum_of(2)), o = sigmoid(sum_of(3));
      const float c_now = f * c[point] + i * g;
      const Number h_now = to_operand(o * tangent(c_now));
      const bool passed = ends.passed(point, time);
      c[point] = passed ? c[point] : c_now, h[point] = passed ? h[point] : h_now;
      if (more && place.unit(point) < UNITS)
        send(in_operand(h[point]), peers, (time + 1) % 2 * (int)sizeof(Mailbox),
             BOXES + ((time + 1) % 2 * BATCH_TILE + in_tile) * LINE + (place.unit(point) - of_four) * (int)sizeof(Number), of_four);
      float* kept = kept_of(time) + in_tile * KEPT + in_block;
      kept[0] = i, kept[OWN] = f, kept[2 * OWN] = g, kept[3 * OWN] = o, kept[4 * OWN] = c[point];
      Number* state = states_of(time) + in_tile * STATES + in_block;
      state[0] = h[point];
      if (LENGTHS) state[OWN] = passed ? narrow(0) : h_now;
    }
    wait_for_copies();
    __syncthreads();
    load(time + 2);
    by_vectors(time, 5, 4, [&](int in_tile, int in_line, int gate, int unit, size_t row) {
      float* to = gate < 4 ? gates + row * GATES + gate * UNITS + unit : cells + row * UNITS + unit;
      *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(kept_of(time) + in_tile * KEPT + in_line);
    });
    by_vectors(time, 1, VECTOR, [&](int in_tile, int in_line, int, int unit, size_t row) {
      const Number* state = states_of(time) + in_tile * STATES + in_line;
      *reinterpret_cast<uint4*>(outputs + row * UNITS + unit) = *reinterpret_cast<const uint4*>(state + LENGTHS * OWN);
      if (more) *reinterpret_cast<uint4*>(first + (row + BATCH) * UNITS + unit) = *reinterpret_cast<const uint4*>(state);
    });
  }
#pragma unroll
  for (int point = 0; point < POINTS; ++point) {
    if (!place.has(point)) continue;
    const size_t at = (size_t)place.sequence(point) * UNITS + place.unit(point);
    h_end[at] = h[point], c_end[at] = c[point];
  }
#if LENGTHS
  for (int time = ends.last; time < TIME; ++time)
#pragma unroll
    for (int point = 0; point < POINTS; ++point) {
      if (!place.has(point)) continue;
      const size_t at = ((size_t)time * BATCH + place.sequence(point)) * UNITS + place.unit(point);
      first[at] = outputs[at] = 0;
    }
#endif
}

#else
extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(THREADS, PER_MULTIPROCESSOR) lstm_cluster_backward(
    const Number* __restrict__ weights,    // [units, 4·units]
    const float* __restrict__ gates,       // of the forward pass, like the next two
    const float* __restrict__ cells,
    const float* __restrict__ c_0,
    const Number* __restrict__ d_outputs,  // [time, batch, units]
    const Number* __restrict__ d_h_end,    // [batch, units]
    const float* __restrict__ d_c_end,
#if LENGTHS
    const int* __restrict__ lengths,
#endif
    Number* d_first,                       // [time, batch, 4·units]: by the gates' sums
    Number* d_h_0, float* d_c_0,           // [batch, units]
    float* d_bias) {                       // [clusters, THREADS / OWN, 4·units], to be added up over the first two axes
  unsigned char* shared = shared_memory();
  const Place place;
#if !LENGTHS
  const int* lengths = nullptr;
#endif
  weights = place.own(weights, (size_t)GATES * UNITS);
  gates = place.own(gates, (size_t)TIME * BATCH * GATES), cells = place.own(cells, TIME * PLANE);
  d_first = place.own(d_first, (size_t)TIME * BATCH * GATES), d_outputs = place.own(d_outputs, TIME * PLANE);
  c_0 = place.own(c_0, PLANE), d_h_end = place.own(d_h_end, PLANE), d_c_end = place.own(d_c_end, PLANE);
  d_h_0 = place.own(d_h_0, PLANE), d_c_0 = place.own(d_c_0, PLANE);
  unsigned char* operands = shared + BOXES;                          // [2][BATCH_TILE][4][OWN] numbers
  float* parts = reinterpret_cast<float*>(operands + 2 * OPERAND);   // [2][SPLIT][OWN][SLOT]: of each block, at this step and the next
  constexpr int PART = OWN * SLOT, STEP = SPLIT * PART;
  const Weights own_weights(weights, operands + 2 * OPERAND + 2 * STEP * sizeof(float), place);
  const Ends<POINTS> ends(lengths, place);
  const int unit = place.unit(0), in_block = threadIdx.x % OWN;
  const bool there = unit < UNITS;
  PeerPlace peers[ROW_TILES], boxes[ROW_TILES];  // this block's part in the block that owns a tile's units, and its mailboxes
#pragma unroll
  for (int tile = 0; tile < ROW_TILES; ++tile) {
    const int row = (place.warp * ROW_TILES + tile) * 16;
    const float* at = parts + place.rank * PART + (row % OWN + place.in_warp / 4) * SLOT + place.in_warp % 4 * 2;
    peers[tile] = place_in_peer(at, min(row / OWN, SPLIT - 1)), boxes[tile] = place_in_peer(shared, min(row / OWN, SPLIT - 1));
  }
  float d_bias_of[4] = {}, d_c[POINTS], c[POINTS], d_h_kept[POINTS];  // kept: of an h that stands still
  float gate_of[POINTS][4] = {}, c_before[POINTS] = {}, d_output[POINTS] = {};  // of the next step, on their way
  auto load = [&](int time) {
#pragma unroll
    for (int point = 0; point < POINTS; ++point) {
      if (!place.has(point)) continue;
      const size_t state = (size_t)place.sequence(point) * UNITS + unit, row = (size_t)time * BATCH + place.sequence(point);
#pragma unroll
      for (int gate = 0; gate < 4; ++gate) gate_of[point][gate] = gates[row * GATES + gate * UNITS + unit];
      c_before[point] = time ? cells[row * UNITS + unit - PLANE] : c_0[state];
      d_output[point] = ends.passed(point, time) ? 0 : wide(d_outputs[row * UNITS + unit]);
      if (time + 1 == ends.last) d_output[point] += wide(d_h_end[state]);
    }
  };
#pragma unroll
  for (int point = 0; point < POINTS; ++point) {
    d_c[point] = c[point] = d_h_kept[point] = 0;
    if (!place.has(point)) continue;
    const size_t at = (size_t)place.sequence(point) * UNITS + unit;
    d_c[point] = d_c_end[at];
    if (const int end = ends.of[point]) c[point] = cells[(end - 1) * PLANE + at];
  }
  if (ends.last) load(ends.last - 1);
  const Mail mail(shared, ends.last);

  // One step more than forward: at time -1 stands the gradient by the initial h.
  for (int time = ends.last - 1; time >= -1; --time) {
    float d_h[POINTS] = {};
    const int step = ends.last - 1 - time;
    if (step) {
      mail.wait(step);
      const float* found = parts + step % 2 * STEP + in_block * SLOT;
#pragma unroll
      for (int rank = 0; rank < SPLIT; ++rank)
#pragma unroll
        for (int point = 0; point < POINTS; ++point) d_h[point] += found[rank * PART + place.in_tile(point)];
    }
    if (time < 0) {
#pragma unroll
      for (int point = 0; point < POINTS; ++point) {
        if (!place.has(point)) continue;
        const size_t at = (size_t)place.sequence(point) * UNITS + unit;
        d_h[point] += d_h_kept[point];
        if (!ends.last) d_h[point] += wide(d_h_end[at]);
        d_h_0[at] = to_operand(d_h[point]), d_c_0[at] = d_c[point];
      }
      break;
    }
    unsigned char* operand = operands + step % 2 * OPERAND;
    Number d_gates[POINTS][4];
#pragma unroll
    for (int point = 0; point < POINTS; ++point) {
      d_h[point] += d_h_kept[point] + d_output[point];
      const bool passed = ends.passed(point, time);
      const float i = gate_of[point][0], f = gate_of[point][1], g = gate_of[point][2], o = gate_of[point][3];
      const float tanh_c = tangent(c[point]), d_c_now = d_c[point] + d_h[point] * o * (1 - tanh_c * tanh_c);
      const float of[4] = {d_c_now * g * i * (1 - i), d_c_now * c_before[point] * f * (1 - f), d_c_now * i * (1 - g * g),
                           d_h[point] * tanh_c * o * (1 - o)};
      d_h_kept[point] = passed ? d_h[point] : 0;
      d_c[point] = passed ? d_c[point] : d_c_now * f, c[point] = passed ? c[point] : c_before[point];
#pragma unroll
      for (int gate = 0; gate < 4; ++gate) {
        d_gates[point][gate] = passed || !place.has(point) ? narrow(0) : to_operand(of[gate]);
        if (!passed && place.has(point)) d_bias_of[gate] += of[gate];
        reinterpret_cast<Number*>(operand + place.in_tile(point) * LINE)[gate * OWN + in_block] = in_operand(d_gates[point][gate]);
      }
    }
    __syncthreads();
    if (time) load(time - 1);
    Sums sums = {};
    multiply(sums, own_weights, operand);
#pragma unroll
    for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile) {
      if (place.warp * ROW_TILES + row_tile >= ALL_ROW_TILES) continue;
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        const float(&sum)[4] = sums.of[0][row_tile][tile];
        const int at = ((step + 1) % 2 * STEP + tile * 8) * (int)sizeof(float);
        const PeerPlace box = boxes[row_tile] + (step + 1) % 2 * (int)sizeof(Mailbox);
        to_peer(peers[row_tile] + at, float2{sum[0], sum[1]}, box);
        to_peer(peers[row_tile] + at + 8 * SLOT * (int)sizeof(float), float2{sum[2], sum[3]}, box);
      }
    }
#pragma unroll
    for (int point = 0; point < POINTS; ++point) {
      if (!place.has(point)) continue;
      Number* to = d_first + ((size_t)time * BATCH + place.sequence(point)) * GATES + unit;
#pragma unroll
      for (int gate = 0; gate < 4; ++gate) to[gate * UNITS] = d_gates[point][gate];
    }
  }
#if LENGTHS
  for (int time = ends.last; time < TIME; ++time)
#pragma unroll
    for (int point = 0; point < POINTS; ++point) {
      if (!place.has(point)) continue;
      Number* to = d_first + ((size_t)time * BATCH + place.sequence(point)) * GATES + unit;
#pragma unroll
      for (int gate = 0; gate < 4; ++gate) to[gate * UNITS] = 0;
    }
#endif
  if (!there) return;
#pragma unroll
  for (int gate = 0; gate < 4; ++gate)
    d_bias[((size_t)place.cluster * (THREADS / OWN) + threadIdx.x / OWN) * GATES + gate * UNITS + unit] = d_bias_of[gate];
}
#endif
