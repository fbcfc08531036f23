// Kernels with the mistakes that the emulation of cuda_on_cpu.h must bring to light. Each writes one float a thread.

#include "../../csrc/device.cuh"

namespace paw {

// Reads the value of the next thread without waiting for it.
__global__ void no_barrier(float* out) {
  SHARED(Partials<float>, values);
  values.of[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = values.of[(threadIdx.x + 1) % 32];
}

// Thread 0 never comes to the barrier.
__global__ void lost_thread(float* out) {
  if (threadIdx.x == 0) return;
  __syncthreads();
  out[threadIdx.x] = 1;
}

// Uses an asynchronous copy before it has arrived.
__global__ void no_wait(float* out) {
  float* const held = dynamic_shared<float>();
  out[4 * threadIdx.x] = 1;
  __pipeline_memcpy_async(held + 4 * threadIdx.x, out + 4 * threadIdx.x, 16);
  __pipeline_commit();
  out[threadIdx.x] = held[4 * threadIdx.x];
}

// The first block ends while the second may still be about to read its shared memory.
__global__ void early_end(float* out) {
  SHARED(float, mine);
  mine = 1;
  cluster_arrive();
  cluster_wait();
  if (cluster_rank() == 1) out[threadIdx.x] = *cluster_peer(&mine, 0);
}

extern "C" int run_bad(int which, float* out) {
  if (which == 0) return launch(no_barrier, {1, 32}, nullptr, out);
  if (which == 1) return launch(lost_thread, {1, 32}, nullptr, out);
  if (which == 2) return launch(no_wait, {1, 32, 1, 512}, nullptr, out);
  return launch(early_end, {2, 32, 2}, nullptr, out);
}

}  // namespace paw
