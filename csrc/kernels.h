// The CUDA kernels as functions on raw device pointers. Each starts one kernel on `stream` and answers its error code.
// Legend: n rows of V logits, L rows that have a gradient; every other array has one element a row unless noted.
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
  float *top, *log_total;  // max u, and logsumexp(z - top scale): apart, because their sum would round small ones away
};

enum class Type { float32, bfloat16, float16 };

cudaError_t row_statistics(Rows rows, int64_t n, Statistics out, cudaStream_t stream);

// Row k < L of the logits becomes, in place, scale (a (1[j = y] - p_j) - c p_j (log p_j + H)) du/dlogit of row source[k],
// written as `type` from the first byte of row k on. source[k] is k, or at least L while row k is no source: so rows are
// independent. logp is not read; c may be null.
cudaError_t row_gradient(Rows rows, const int64_t* source, int64_t L, Statistics of, const float* a, const float* c,
                         Type type, cudaStream_t stream);

// source[k] for k < L = count[0]: k where live[k], else one of the live rows from L on, ascending. -1 from L on.
cudaError_t pack(const bool* live, int n, int64_t* source, int64_t* count, cudaStream_t stream);

}  // namespace paw
