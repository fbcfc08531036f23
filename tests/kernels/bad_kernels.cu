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

extern "C" int run_bad(int which, float* out) {
  if (which == 0) return launch(no_barrier, {1, 32}, nullptr, out);
  return launch(lost_thread, {1, 32}, nullptr, out);
}

}  // namespace paw
