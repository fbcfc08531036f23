// The compaction scan. Its result depends only on the input, bit for bit.

#include "device.cuh"
#include "kernels.h"

namespace paw {
namespace {

constexpr int SELECT_THREADS = 1024;  // one block, so the total needs no other launch or host

__global__ void __launch_bounds__(SELECT_THREADS)
    pack_kernel(const bool* __restrict__ live, int n, int64_t* source, int64_t* count) {
  const int thread = threadIdx.x;
  BlockScan scan;
  int here = 0;
#pragma unroll 4
  for (int k = thread; k < n; k += SELECT_THREADS) here += live[k];
  const int L = scan(here).total;

  // The h-th hole below L is noted at source[L + h], then filled by the h-th live row from L on.
  // There are equally many.
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
    const Scan of = scan(mover);  // its barrier separates writing the notes from reading them
    if (mover) source[source[L + movers + of.before]] = k;
    movers += of.total;
  }
  __syncthreads();
  for (int k = L + thread; k < n; k += SELECT_THREADS) source[k] = -1;
  if (thread == 0) *count = L;
}

}  // namespace

cudaError_t pack(const bool* live, int n, int64_t* source, int64_t* count, cudaStream_t stream) {
  return launch(pack_kernel, {1, SELECT_THREADS}, stream, live, n, source, count);
}

}  // namespace paw
