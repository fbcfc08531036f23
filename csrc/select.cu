// Segment sums, top-alpha selection and the compaction scan: each result depends on nothing but the input, bit for bit.

#include "device.cuh"
#include "kernels.h"

namespace paw {
namespace {

constexpr int SELECT_THREADS = 1024;  // one block: neither needs another launch, nor the host, to know its total

__global__ void __launch_bounds__(256)
    segment_kernel(const float* __restrict__ values, const int64_t* __restrict__ offsets, bool mean, float* out) {
  const int64_t begin = offsets[blockIdx.x], end = offsets[blockIdx.x + 1];
  double sum = 0;
#pragma unroll 4
  for (int64_t t = begin + threadIdx.x; t < end; t += blockDim.x) sum += values[t];
  sum = block_reduce(sum, 0.0);
  if (threadIdx.x == 0) out[blockIdx.x] = float(mean && end > begin ? sum / (end - begin) : sum);
}

// Orders as the scores do; -0 equals 0.
__device__ unsigned sort_key(float score) {
  const unsigned bits = __float_as_uint(score + 0.f);
  return bits >> 31 ? ~bits : bits | 0x80000000;
}

// Radix select: the byte of the threshold is settled from the highest to the lowest, by counting the scores that agree
// with the bytes before. Then one scan in index order deals out the places left to scores equal to the threshold.
__global__ void __launch_bounds__(SELECT_THREADS)
    top_alpha_kernel(const float* __restrict__ score, const bool* __restrict__ valid, int N, double alpha,
                     bool* __restrict__ selected) {
  struct State {
    int count[256];
    unsigned threshold;
    int places;
  };
  SHARED(State, state);
  const int thread = threadIdx.x;

  BlockScan scan;
  int here = 0;
#pragma unroll 4
  for (int i = thread; i < N; i += SELECT_THREADS) here += valid[i];
  const int n_valid = scan(here).total;
  int places = int(ceil(alpha * n_valid - 1e-9));
  unsigned threshold = 0;

  for (int shift = 24; shift >= 0 && places > 0; shift -= 8) {
    if (thread < 256) state.count[thread] = 0;
    __syncthreads();
#pragma unroll 4
    for (int i = thread; i < N; i += SELECT_THREADS) {
      const unsigned key = sort_key(score[i]);
      if (valid[i] && uint64_t(key) >> (shift + 8) == uint64_t(threshold) >> (shift + 8))
        atomicAdd(&state.count[key >> shift & 255], 1);
    }
    __syncthreads();
    const int byte = 255 - thread, count = thread < 256 ? state.count[byte] : 0;
    const int above = scan(count).before;
    if (above < places && places <= above + count) {
      state.threshold = threshold | unsigned(byte) << shift;
      state.places = places - above;
    }
    __syncthreads();
    threshold = state.threshold;
    places = state.places;
  }

  const bool any = places > 0;
  int ties = 0;
  for (int start = 0; start < N; start += SELECT_THREADS) {
    const int i = start + thread;
    const bool taking = any && i < N && valid[i];
    const unsigned key = taking ? sort_key(score[i]) : 0;
    const Scan tie = scan(taking && key == threshold);
    if (i < N) selected[i] = taking && (key > threshold || (key == threshold && ties + tie.before < places));
    ties += tie.total;
  }
}

__global__ void __launch_bounds__(SELECT_THREADS)
    pack_kernel(const bool* __restrict__ live, int n, int64_t* source, int64_t* count) {
  const int thread = threadIdx.x;
  BlockScan scan;
  int here = 0;
#pragma unroll 4
  for (int k = thread; k < n; k += SELECT_THREADS) here += live[k];
  const int L = scan(here).total;

  // The h-th hole below L is noted at source[L + h], then filled by the h-th live row from L on: there are as many.
  int holes = 0;
  for (int start = 0; start < L; start += SELECT_THREADS) {
    const int k = start + thread;
    const bool hole = k < L && !live[k];
    const Scan of = scan(hole);
    if (k < L) source[hole ? L + holes + of.before : k] = k;
    holes += of.total;
  }
  int movers = 0;
  for (int start = L; start < n; start += SELECT_THREADS) {
    const int k = start + thread;
    const bool mover = k < n && live[k];
    const Scan of = scan(mover);  // its barrier stands between the notes and their readers
    if (mover) source[source[L + movers + of.before]] = k;
    movers += of.total;
  }
  __syncthreads();
  for (int k = L + thread; k < n; k += SELECT_THREADS) source[k] = -1;
  if (thread == 0) *count = L;
}

}  // namespace

cudaError_t segment_reduce(const float* values, const int64_t* offsets, int64_t N, bool mean, float* out,
                           cudaStream_t stream) {
  return launch(segment_kernel, {N, 256}, stream, values, offsets, mean, out);
}

cudaError_t top_alpha(const float* score, const bool* valid, int N, double alpha, bool* selected, cudaStream_t stream) {
  return launch(top_alpha_kernel, {1, SELECT_THREADS}, stream, score, valid, N, alpha, selected);
}

cudaError_t pack(const bool* live, int n, int64_t* source, int64_t* count, cudaStream_t stream) {
  return launch(pack_kernel, {1, SELECT_THREADS}, stream, live, n, source, count);
}

}  // namespace paw
