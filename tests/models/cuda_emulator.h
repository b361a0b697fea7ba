// CUDA's threads on one thread of a CPU, for the kernels of models/*.cu: each is a context of its own that
// gives way wherever threads wait for each other. Included in front of the kernels' source:
//
//     g++ -std=c++17 -O2 -shared -fPIC -DEMULATED -include cuda_emulator.h -x c++ wavefront_kernels.cu -D… -o kernels.so
//
// Exports launch(blocks, threads, shared_bytes, pointers): runs the one kernel, with uninitialised shared memory full of NaN.
//
// Where the environment has EMULATOR_SEED, what goes to other blocks' mailboxes arrives late and in any order, and warps take their turns
// by chance; those of one block of each cluster, EMULATOR_LATE, at every 25th round alone.
#pragma once
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#ifndef SPLIT
#define SPLIT 1  // blocks of a cluster
#endif
#define __device__
#define __global__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(n)

using std::max, std::min;
struct uint4 {
  unsigned x, y, z, w;
};
struct float4 {
  float x, y, z, w;
};
struct float2 {
  float x, y;
};
struct uint2 {
  unsigned x, y;
};
struct Index {
  int x;
};
inline Index threadIdx, blockIdx;

namespace emulator {
struct Block {
  int waiting = 0;
  unsigned generation = 0;
  std::vector<uint4> shared;
};
struct Cluster {
  int waiting = 0;
  unsigned generation = 0;
};
struct Warp {
  int arrived = 0;
  unsigned generation = 0;
  unsigned a[2][32][4], b[2][32][2];
};
struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Block* block;
  Cluster* cluster;
  Warp* warp;
  int index, block_index;
  std::vector<std::pair<void*, const void*>> copies;  // asked for, and not waited for
  bool done = false;
};
inline ucontext_t scheduler;
inline Thread* running;
inline int threads_of_block;
inline int arrivals;  // of blocks at barriers, in all launches

inline bool by_chance;
inline std::mt19937 chance;
inline std::vector<std::function<void()>> sent;  // to mailboxes, on their way
inline void deliver_some() {
  if (sent.empty() || chance() % 4 == 0) return;
  std::swap(sent[chance() % sent.size()], sent.back());
  auto one = std::move(sent.back());
  sent.pop_back();
  one();
}

inline void give_way() {
  deliver_some();
  swapcontext(&running->context, &scheduler);
}

// Until all 32 threads of the warp are here.
inline void meet(Warp& warp) {
  unsigned generation = warp.generation;
  if (++warp.arrived == 32) {
    warp.arrived = 0;
    ++warp.generation;
  }
  while (warp.generation == generation) give_way();
}

inline float bits(unsigned x) {
  float y;
  memcpy(&y, &x, 4);
  return y;
}
}  // namespace emulator

inline unsigned char* shared_memory() { return reinterpret_cast<unsigned char*>(emulator::running->block->shared.data()); }

inline void __syncthreads() {
  emulator::Block& block = *emulator::running->block;
  unsigned generation = block.generation;
  if (++block.waiting == emulator::threads_of_block) {
    block.waiting = 0;
    ++block.generation;
  }
  while (block.generation == generation) emulator::give_way();
}

inline void sync_cluster() {
  emulator::Cluster& cluster = *emulator::running->cluster;
  unsigned generation = cluster.generation;
  if (++cluster.waiting == SPLIT * emulator::threads_of_block) {
    cluster.waiting = 0;
    ++cluster.generation;
  }
  while (cluster.generation == generation) emulator::give_way();
}

using PeerPlace = char*;
inline PeerPlace place_in_peer(const void* mine, int rank) {
  emulator::Block* block = emulator::running->block;
  std::ptrdiff_t offset = static_cast<const char*>(mine) - reinterpret_cast<const char*>(block->shared.data());
  emulator::Block* peer = block - emulator::running->block_index % SPLIT + rank;
  return reinterpret_cast<char*>(peer->shared.data()) + offset;
}

inline void copy_ahead(void* to, const void* from) { emulator::running->copies.push_back({to, from}); }
inline void wait_for_copies() {
  for (auto [to, from] : emulator::running->copies) memcpy(to, from, 16);
  emulator::running->copies.clear();
}

using Mailbox = unsigned long long;
struct Box {  // in a Mailbox's bytes
  int bytes;  // expected and not here
  short phase, asked;
  void look() {
    if (asked && !bytes) asked = 0, phase ^= 1;
  }
};
inline void make_mailbox(Mailbox* box) { *reinterpret_cast<Box*>(box) = {0, 0, 0}; }
inline void expect_bytes(Mailbox* box, int bytes) {
  Box& own = *reinterpret_cast<Box*>(box);
  if (own.asked) abort();  // one for each use
  own.bytes += bytes, own.asked = 1;
  own.look();
}
inline void wait_for_bytes(Mailbox* box, int parity) {
  while (reinterpret_cast<volatile Box*>(box)->phase == parity) emulator::give_way();
}
template <typename T>
void to_peer(PeerPlace place, T x, PeerPlace box) {
  auto arrive = [=] {
    memcpy(place, &x, sizeof x);
    reinterpret_cast<Box*>(box)->bytes -= sizeof x;
    reinterpret_cast<Box*>(box)->look();
  };
  if (emulator::by_chance)
    emulator::sent.push_back(arrive);
  else
    arrive();
}
inline float from_peer(const float* mine, int rank) { return *reinterpret_cast<const float*>(place_in_peer(mine, rank)); }

inline void __threadfence() {}
inline void __trap() { abort(); }
inline unsigned __float_as_uint(float x) {
  unsigned y;
  memcpy(&y, &x, 4);
  return y;
}
inline float __uint_as_float(unsigned x) { return emulator::bits(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline uint4 __ldg(const uint4* p) { return *p; }
inline unsigned __ldg(const unsigned* p) { return *p; }
inline int __ldg(const int* p) { return *p; }
inline uint4 __ldcg(const uint4* p) { return *p; }
inline unsigned __ldcg(const unsigned* p) { return *p; }
inline uint4 __ldcs(const uint4* p) { return *p; }
inline float __expf(float x) { return expf(x); }
inline unsigned atomicAdd(unsigned* p, unsigned x) { return std::exchange(*p, *p + x); }
inline unsigned atomicMax(unsigned* p, unsigned x) { return std::exchange(*p, max(*p, x)); }
inline void arrive(unsigned* counter) { ++*counter, ++emulator::arrivals; }
inline unsigned look(const unsigned* counter) {
  emulator::give_way();
  return *counter;
}

inline float from_float16(unsigned short x) {
  _Float16 y;
  memcpy(&y, &x, 2);
  return y;
}
inline float wide(float x) { return x; }
inline float wide(unsigned short x) {
#if DTYPE_CODE == 2
  return emulator::bits((unsigned)x << 16);
#else
  return from_float16(x);
#endif
}
inline unsigned short to_float16(float x) {
  unsigned short y;
  _Float16 h = x;
  memcpy(&y, &h, 2);
  return y;
}
#if DTYPE_CODE == 1
inline unsigned short narrow(float x) { return to_float16(x); }
#elif DTYPE_CODE == 2
inline unsigned short narrow(float x) {
  unsigned z;
  memcpy(&z, &x, 4);
  return (z + 0x7fff + (z >> 16 & 1)) >> 16;
}
#else
inline float narrow(float x) { return x; }
#endif

inline float power_of_2(float x) { return exp2f(x); }

// __shfl_xor_sync of a whole warp, by the way of `mma` below.
inline float from_lane(float x, int distance) {
  emulator::Warp& warp = *emulator::running->warp;
  int lane = emulator::running->index % 32;
  unsigned half = warp.generation % 2;
  memcpy(&warp.a[half][lane][0], &x, 4);
  emulator::meet(warp);
  return emulator::bits(warp.a[half][lane ^ distance][0]);
}

// mma.sync.m16n8k8 (tf32) and m16n8k16 (float16, bfloat16) with the fragments of the PTX manual.
inline void mma(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  emulator::Warp& warp = *emulator::running->warp;
  int lane = emulator::running->index % 32;
  unsigned half = warp.generation % 2;  // two sets: a fast thread may already be at the next one
  unsigned a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
  memcpy(warp.a[half][lane], a, sizeof a);
  memcpy(warp.b[half][lane], b, sizeof b);
  emulator::meet(warp);

  constexpr int PER_REGISTER = DTYPE_CODE == 0 || DTYPE_CODE == 3 ? 1 : 2;
  auto number = [](unsigned x, int part) {
#if DTYPE_CODE == 0 || DTYPE_CODE == 3
    return emulator::bits(x & 0xffffe000u);  // as the tensor cores cut it
#else
    return wide((unsigned short)(x >> 16 * part));
#endif
  };
  for (int e = 0; e < 4; ++e) {
    int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
    for (int k = 0; k < 8 * PER_REGISTER; ++k) {
      int owner = k / PER_REGISTER % 4, upper = k / PER_REGISTER / 4;
      c[e] += number(warp.a[half][row % 8 * 4 + owner][row / 8 + 2 * upper], k % PER_REGISTER) *
              number(warp.b[half][column * 4 + owner][upper], k % PER_REGISTER);
    }
  }
}

namespace emulator {
template <typename... Parameters, size_t... Places>
void call(void (*kernel)(Parameters...), void** pointers, std::index_sequence<Places...>) {
  kernel(static_cast<Parameters>(pointers[Places])...);
}

template <typename... Parameters>
int parameters(void (*)(Parameters...)) {
  return sizeof...(Parameters);
}

inline void (*entry)(void**);
inline void** arguments;

inline void start() {
  entry(arguments);
  running->done = true;
  give_way();
}

// False where no thread got on: the kernel would hang.
inline bool launch(int blocks, int threads, int shared_bytes, void** pointers, void (*kernel)(void**)) {
  entry = kernel, arguments = pointers, threads_of_block = threads;
  std::vector<Block> all_blocks(blocks);
  std::vector<Cluster> clusters((blocks + SPLIT - 1) / SPLIT);
  std::vector<Warp> warps(blocks * threads / 32);
  std::vector<Thread> all(blocks * threads);
  constexpr int STACK = 1 << 16;
  constexpr int AHEAD_OF_OTHERS = 8;  // a warp goes on until it waits for another, so that a missing barrier shows
  for (int k = 0; k < blocks * threads; ++k) {
    Thread& thread = all[k];
    Block& block = all_blocks[k / threads];
    if (block.shared.empty()) block.shared.assign(shared_bytes / 16 + 1, uint4{~0u, ~0u, ~0u, ~0u});
    thread.stack.reset(new char[STACK]);
    thread.block = &block, thread.cluster = &clusters[k / threads / SPLIT], thread.warp = &warps[k / 32];
    thread.index = k % threads, thread.block_index = k / threads;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = STACK;
    makecontext(&thread.context, start, 0);
  }
  const char* seed = getenv("EMULATOR_SEED");
  const char* late = getenv("EMULATOR_LATE");
  const int late_block = late ? atoi(late) : -1;
  by_chance = seed, sent.clear();
  if (seed) chance.seed(atoi(seed));
  long idle_rounds = 0;
  long round = 0;
  for (size_t left = all.size(); left; ++round) {
    size_t before = left;
    left = 0;
    for (size_t first = 0; first < all.size(); first += 32) {  // a warp
      const bool is_late = all[first].block_index % SPLIT == late_block && round % 25;
      const bool skipped = by_chance && (is_late || chance() % 3 == 0);
      for (int pass = 0; pass < AHEAD_OF_OTHERS && !skipped; ++pass)
        for (size_t k = first; k < first + 32; ++k) {
          Thread& thread = all[k];
          if (thread.done) continue;
          running = &thread;
          threadIdx.x = thread.index, blockIdx.x = thread.block_index;
          swapcontext(&scheduler, &thread.context);
        }
      for (size_t k = first; k < first + 32; ++k) left += !all[k].done;
    }
    idle_rounds = left == before ? idle_rounds + 1 : 0;
    if (idle_rounds > 10000) return false;
  }
  return true;
}
}  // namespace emulator
