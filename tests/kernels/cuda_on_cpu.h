// Runs the kernels of csrc/*.cu on the CPU, to test them where there is no GPU: included ahead of them, it stands in for
// CUDA's headers and for the first part of device.cuh.
//
// The threads of a block are fibres. Each runs until a barrier or a warp collective, then another one does, in the order
// that the test sets (`paw_emulate`); so a missing barrier shows as a result that depends on the order. Shared memory
// starts as NaN. A barrier that some thread never reaches is an error. Not modelled: blocks that run at the same time, and
// all timing.
#pragma once
#define PAW_ON_CPU

#include <csetjmp>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#define __global__
#define __device__
#define __launch_bounds__(...)
#define SHARED(type, name) auto& name = *static_cast<type*>(cpu::shared(__COUNTER__, sizeof(type)))

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess, cudaErrorInvalidConfiguration, cudaErrorLaunchFailure };
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorLaunchFailure ? "a barrier was not reached by all" : "invalid configuration";
}

#define __CUDA_ARCH_LIST__ 0

using __nv_bfloat16 = torch::headeronly::BFloat16;
using __half = torch::headeronly::Half;
struct alignas(16) float4 {
  float x, y, z, w;
};
struct Index {
  unsigned x;
};
inline Index threadIdx, blockIdx, blockDim;
inline int min(int a, int b) { return std::min(a, b); }
inline int max(int a, int b) { return std::max(a, b); }
inline int atomicAdd(int* to, int value) { return std::exchange(*to, *to + value); }
inline float __fdividef(float a, float b) { return a / b; }
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

namespace paw {
struct Grid {
  int64_t blocks;
  int threads;
};
}  // namespace paw

namespace cpu {

constexpr size_t STACK = 64 << 10, STATIC_SHARED = 8 << 10;

struct Barrier {
  int expected, arrived = 0;
  unsigned phase = 0;
  unsigned arrive() {
    const unsigned ticket = phase;
    if (++arrived == expected) arrived = 0, phase++;
    return ticket;
  }
};

struct Warp {
  Barrier barrier{32};
  unsigned slots[2][32];
};

struct Block {
  Barrier barrier;
  std::vector<Warp> warps;
  std::vector<char> shared;
};

struct Fibre {
  Index thread;
  ucontext_t entry{};
  jmp_buf at{};
  bool started = false, done = false;
  int barriers = 0, collectives = 0;
  Barrier* waits = nullptr;
  unsigned ticket = 0;
};

struct Machine {
  int order = 0, dropped = -1, barriers = 0;  // set and read by the test: see paw_emulate
  Block block;
  std::vector<Fibre> fibres;
  std::vector<std::unique_ptr<char[]>> stacks;
  std::map<int, size_t> offsets;  // of the static shared variables, the same in every block
  size_t used = 0;
  Fibre* now = nullptr;
  jmp_buf scheduler;
  std::function<void()> kernel;
  std::mt19937 random;

  template <class T>
  void arrange(std::vector<T>& items) {
    if (order == 1) std::reverse(items.begin(), items.end());
    if (order > 1) std::shuffle(items.begin(), items.end(), random);
  }
};
inline Machine machine;

inline void wait(Barrier& barrier, unsigned ticket) {
  Fibre& now = *machine.now;
  now.waits = &barrier, now.ticket = ticket;
  while (barrier.phase == ticket)
    if (_setjmp(now.at) == 0) _longjmp(machine.scheduler, 1);
}

inline bool dropped() { return machine.now->barriers++ == machine.dropped; }

inline void* shared(int id, size_t bytes) {
  const auto [entry, added] = machine.offsets.try_emplace(id, machine.used);
  if (added) machine.used += (bytes + 15) / 16 * 16;
  return machine.block.shared.data() + entry->second;
}

template <class T>
T exchange(T value, int from) {
  Fibre& now = *machine.now;
  Warp& warp = machine.block.warps[now.thread.x / 32];
  unsigned(&slots)[32] = warp.slots[now.collectives++ % 2];
  std::memcpy(&slots[now.thread.x % 32], &value, 4);
  wait(warp.barrier, warp.barrier.arrive());
  std::memcpy(&value, &slots[from], 4);
  return value;
}

inline void start() {
  machine.kernel();
  machine.now->done = true;
  _longjmp(machine.scheduler, 1);
}

inline void resume(Fibre& fibre) {
  machine.now = &fibre;
  threadIdx = fibre.thread;
  if (_setjmp(machine.scheduler) != 0) return;
  if (fibre.started) _longjmp(fibre.at, 1);
  fibre.started = true;
  setcontext(&fibre.entry);
}

// Whether every thread of the block came to its end.
inline bool run_block(const paw::Grid& grid, int64_t index) {
  Machine& m = machine;
  blockIdx.x = unsigned(index);
  m.block = {{grid.threads}, std::vector<Warp>(grid.threads / 32), std::vector<char>(STATIC_SHARED, '\xff')};
  m.fibres.clear();
  std::vector<int> turns(grid.threads);
  std::iota(turns.begin(), turns.end(), 0);
  for (int t : turns) m.fibres.push_back({{unsigned(t)}});
  for (size_t t = 0; t < m.fibres.size(); t++) {
    if (t == m.stacks.size()) m.stacks.emplace_back(new char[STACK]);
    ucontext_t& entry = m.fibres[t].entry;
    getcontext(&entry);
    entry.uc_stack.ss_sp = m.stacks[t].get(), entry.uc_stack.ss_size = STACK;
    makecontext(&entry, start, 0);
  }
  m.arrange(turns);
  const unsigned idle_warp = m.random() % (grid.threads / 32);  // moves only when nobody else can
  const auto idle = [&](const Fibre& fibre) { return m.order > 1 && fibre.thread.x / 32 == idle_warp; };
  size_t running = turns.size();
  const auto sweep = [&](bool idlers) {
    bool moved = false;
    for (int t : turns) {
      Fibre& fibre = m.fibres[t];
      const bool waiting = fibre.waits && fibre.waits->phase == fibre.ticket;
      if (fibre.done || waiting || idle(fibre) != idlers) continue;
      resume(fibre);
      moved = true;
      if (!fibre.done) continue;
      running--;
      m.barriers = std::max(m.barriers, fibre.barriers);
    }
    return moved;
  };
  while (running > 0) {
    if (m.order > 1) m.arrange(turns);
    if (!sweep(false) && !sweep(true)) return false;
  }
  return true;
}

inline cudaError_t run(const paw::Grid& grid, std::function<void()> kernel) {
  if (grid.threads % 32 != 0 || grid.threads > 1024) return cudaErrorInvalidConfiguration;
  Machine& m = machine;
  m.kernel = std::move(kernel), m.random.seed(m.order), blockDim.x = grid.threads;
  m.offsets.clear(), m.used = 0;
  std::vector<int64_t> blocks(grid.blocks);
  std::iota(blocks.begin(), blocks.end(), 0);
  m.arrange(blocks);
  for (int64_t index : blocks)
    if (!run_block(grid, index)) return cudaErrorLaunchFailure;
  return cudaSuccess;
}

}  // namespace cpu

inline void __syncthreads() {
  if (cpu::dropped()) return;
  cpu::Barrier& barrier = cpu::machine.block.barrier;
  cpu::wait(barrier, barrier.arrive());
}
inline unsigned own_lane() { return threadIdx.x % 32; }
template <class T>
T __shfl_sync(unsigned, T value, int from) { return cpu::exchange(value, from); }
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) { return cpu::exchange(value, own_lane() ^ mask); }
template <class T>
T __shfl_up_sync(unsigned, T value, int by) { return cpu::exchange(value, own_lane() < by ? own_lane() : own_lane() - by); }

namespace paw {

inline float fast_exp(float x) { return expf(x); }
template <class T>
void narrow(T* to, float x, float y) { to[0] = x, to[1] = y; }
template <class... P, class... A>
cudaError_t launch(void (*kernel)(P...), Grid grid, cudaStream_t, A... arguments) {
  return cpu::run(grid, [&] { kernel(P(arguments)...); });
}

}  // namespace paw

// Sets the order of turns (0 forward, 1 backward, above a seed) and which barrier of each thread to leave out (counted
// from 0; -1 for none). Answers the number of barriers that a thread met since the last call.
extern "C" inline __attribute__((used)) int paw_emulate(int order, int dropped) {
  cpu::machine.order = order, cpu::machine.dropped = dropped;
  return std::exchange(cpu::machine.barriers, 0);
}
