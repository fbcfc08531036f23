// Machine-level helpers that the kernels share. tests/kernels/cuda_on_cpu.h defines the CUDA names
// and the names of the first part for the CPU.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifndef PAW_ON_CPU

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define SHARED(type, name) __shared__ type name

namespace paw {

// exp in one multiplication and one instruction. Results below 1e-38 are 0.
__device__ inline float fast_exp(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * 1.44269504f));
  return result;
}

__device__ inline void narrow(float* to, float x, float y) { to[0] = x, to[1] = y; }
__device__ inline void narrow(__nv_bfloat16* to, float x, float y) {
  *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(x, y);
}
__device__ inline void narrow(__half* to, float x, float y) {
  *reinterpret_cast<__half2*>(to) = __floats2half2_rn(x, y);
}

struct Grid {
  int64_t blocks;
  int threads;
};

template <class... P, class... A>
cudaError_t launch(void (*kernel)(P...), Grid grid, cudaStream_t stream, A... arguments) {
  if (grid.blocks == 0) return cudaSuccess;
  if (grid.blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  kernel<<<unsigned(grid.blocks), grid.threads, 0, stream>>>(P(arguments)...);
  return cudaGetLastError();
}

}  // namespace paw

#endif  // PAW_ON_CPU

namespace paw {

// tanh to about 2 ulp. It uses a polynomial where the quotient would cancel.
__device__ inline float fast_tanh(float x) {
  const float size = fabsf(x), s = x * x;
  const float p = ((1.643756359e-2f * s - 5.267180450e-2f) * s + 1.332072492e-1f) * s - 3.333294663e-1f;
  const float e = fast_exp(-2 * size), quotient = __fdividef(1 - e, 1 + e);
  return copysignf(size < 0.55f ? size * s * p + size : quotient, x);
}

constexpr unsigned FULL = 0xffffffff;

__device__ inline int lane() { return threadIdx.x % 32; }
__device__ inline int warp() { return threadIdx.x / 32; }

template <class T>
struct Partials {
  T of[32];  // one per warp
};

__device__ inline double merge(double a, double b) { return a + b; }

// Merges the 32 values of a warp in a fixed order. merge(T, T) must commute.
template <class T>
__device__ T warp_reduce(T value) {
  for (int mask = 16; mask > 0; mask /= 2) {
    T other;
    unsigned words[sizeof(T) / 4];
    memcpy(words, &value, sizeof(T));
    for (unsigned& word : words) word = __shfl_xor_sync(FULL, word, mask);
    memcpy(&other, words, sizeof(T));
    value = merge(value, other);
  }
  return value;
}

// The same over a block. Only warp 0 gets the result. Call it once in a kernel. `none` is neutral.
template <class T>
__device__ T block_reduce(T value, T none) {
  SHARED(Partials<T>, partials);
  value = warp_reduce(value);
  if (lane() == 0) partials.of[warp()] = value;
  __syncthreads();
  if (warp() > 0) return none;
  return warp_reduce(lane() < blockDim.x / 32 ? partials.of[lane()] : none);
}

__device__ inline int warp_scan(int value) {
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(FULL, value, distance);
    if (lane() >= distance) value += other;
  }
  return value;
}

struct Scan {
  int before, total;
};

// Sums the values of the block's threads before this one, and of all threads. A kernel has one
// object for any number of calls. The calls alternate between two buffers, so one barrier per call
// is enough.
class BlockScan {
 public:
  __device__ Scan operator()(int value) {
    SHARED(Buffers, buffers);
    int(&sums)[32] = buffers.of[turn_ ^= 1];
    const int here = warp_scan(value);
    if (lane() == 31) sums[warp()] = here;
    __syncthreads();
    const int warps = warp_scan(lane() < blockDim.x / 32 ? sums[lane()] : 0);
    const int before = __shfl_sync(FULL, warps, (warp() + 31) % 32), total = __shfl_sync(FULL, warps, 31);
    return {(warp() > 0 ? before : 0) + here - value, total};
  }

 private:
  struct Buffers {
    int of[2][32];
  };
  int turn_ = 0;
};

}  // namespace paw
