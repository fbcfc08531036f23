// The CUDA kernels as functions on raw device pointers. Each starts one kernel on `stream` and
// returns its error code. Notation: n rows of V logits, L rows that have a gradient. Other arrays
// have one element per row unless noted.
#pragma once

#include <cstdint>

#ifndef PAW_ON_CPU
#include <cuda_runtime_api.h>
#endif

namespace paw {

struct Rows {
  float* logits;  // [n, V], rows `stride` apart
  int64_t stride;
  const float* bias;      // [V] or null; u = logits + bias, z = u scale
  const int64_t* target;  // in [0, V)
  float scale;
  float softcap;  // above 0: u = softcap tanh((logits + bias) / softcap)
  int V;
};

struct Statistics {
  float *logp, *entropy;
  float *top, *log_total;  // max u, logsumexp(z - top scale); their sum would lose small values
};

enum class Type { float32, bfloat16, float16 };

cudaError_t row_statistics(Rows rows, int64_t n, Statistics out, cudaStream_t stream);

// In place, row k < L of the logits becomes scale (a (1[j = y] - p_j) - c p_j (log p_j + H))
// du/dlogit of row source[k], written as `type` starting at the first byte of row k. source[k] is
// k, or it is at least L and no row reads row k, so rows are independent. logp is not read. c may
// be null.
cudaError_t row_gradient(Rows rows, const int64_t* source, int64_t L, Statistics of, const float* a, const float* c,
                         Type type, cudaStream_t stream);

// source[k] for k < L = count[0]: k where live[k], else one of the live rows from L on, ascending. -1 from L on.
cudaError_t pack(const bool* live, int n, int64_t* source, int64_t* count, cudaStream_t stream);

}  // namespace paw
