// Row operations of the CPU head: statistics of a softmax, and the gradient of its logits in place.
// Plain C interface on raw pointers (no torch, no Python headers), so building it needs a C++ compiler and nothing else.
// Every row is one thread's; blocks of a row stay in the first-level cache, so memory is read once per operation.

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

namespace {

constexpr int64_t BLOCK = 2048;
const float zeros[BLOCK] = {};

// exp for x <= 88, to about 1 ulp; 0 below -87.3; NaN stays NaN. Branch-free, so that the compiler can vectorise it.
inline __attribute__((always_inline)) float fast_exp(float x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, held in the low mantissa bits
  const float bounded = x < -87.3f ? -87.3f : x;
  const float shifted = bounded * 1.44269504f + magic;
  const float n = shifted - magic;
  float r = bounded - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  int32_t bits;
  std::memcpy(&bits, &shifted, 4);
  bits = (bits - 0x4B400000 + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, 4);
  return x < -87.3f ? 0.0f : p * scale;
}

CLONES void statistics(const float* row, const float* bias, float scale, int64_t V, float* max_out, double* sum_out,
                       double* dot_out) {
  float top = -INFINITY;  // before scaling
  double sum = 0, dot = 0;  // of exp(z - max), and of exp(z - max) (z - max): both keep their sign, nothing cancels
  for (int64_t start = 0; start < V; start += BLOCK) {
    const int64_t n = V - start < BLOCK ? V - start : BLOCK;
    const float* z = row + start;
    const float* b = bias ? bias + start : zeros;
    float block_top = top;
#pragma omp simd reduction(max : block_top)
    for (int64_t j = 0; j < n; j++) {
      const float value = z[j] + b[j];
      block_top = value > block_top ? value : block_top;
    }
    if (block_top > top) {
      if (sum > 0) {
        const double down = (double(top) - block_top) * scale, shrink = std::exp(down);
        dot = shrink * (dot + down * sum);
        sum *= shrink;
      }
      top = block_top;
    }
    float block_sum = 0, block_dot = 0;
#pragma omp simd reduction(+ : block_sum, block_dot)
    for (int64_t j = 0; j < n; j++) {
      const float down = (z[j] + b[j] - top) * scale;  // exactly 0 at the maximum
      const float e = fast_exp(down);
      block_sum += e;
      block_dot += e * (down < -87.3f ? 0.0f : down);
    }
    sum += block_sum;
    dot += block_dot;
  }
  *max_out = top;
  *sum_out = sum;
  *dot_out = dot;
}

CLONES void gradient(const float* row, float* out, const float* bias, float scale, int64_t V, float log_sum,
                     float entropy, float a, float c) {
  for (int64_t start = 0; start < V; start += BLOCK) {
    const int64_t n = V - start < BLOCK ? V - start : BLOCK;
    const float* z = row + start;
    const float* b = bias ? bias + start : zeros;
    float* d = out + start;
#pragma omp simd
    for (int64_t j = 0; j < n; j++) {
      const float logp = (z[j] + b[j]) * scale - log_sum;
      const float p = fast_exp(logp);
      d[j] = -scale * (a * p + c * p * ((logp < -87.3f ? 0.0f : logp) + entropy));
    }
  }
}

}  // namespace

extern "C" {

// logits [n, V], rows `stride` apart; bias [V] or null; target [n] in [0, V). z = (logits + bias) scale.
// Writes logp, entropy and log_sum = logsumexp(z), [n] each.
void paw_row_statistics(const float* logits, int64_t stride, const float* bias, const int64_t* target, float scale,
                        int64_t n, int64_t V, float* logp, float* entropy, float* log_sum, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (n > 1 && n * V > 32768)
  for (int64_t i = 0; i < n; i++) {
    const float* row = logits + i * stride;
    float top;
    double sum, dot;
    statistics(row, bias, scale, V, &top, &sum, &dot);
    const double log_total = std::log(sum);
    const int64_t y = target[i];
    const float z = row[y] + (bias ? bias[y] : 0.0f);
    logp[i] = float((double(z) - top) * scale - log_total);
    entropy[i] = float(log_total - dot / sum);
    log_sum[i] = float(double(top) * scale + log_total);
  }
}

// Row k < L of logits becomes dL/dlogits of row source[k]: scale (a (1[j = y] - p_j) - c p_j (log p_j + H)).
// target, log_sum, entropy, a and c (or null) belong to the n rows before packing. Each source[k] is k, or lies at or
// beyond L while row k is no source: then no row that is written is read by another.
void paw_row_gradient(float* logits, int64_t stride, const float* bias, const int64_t* target, const int64_t* source,
                      const float* log_sum, const float* entropy, const float* a, const float* c, float scale,
                      int64_t L, int64_t V, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (L > 1 && L * V > 32768)
  for (int64_t k = 0; k < L; k++) {
    const int64_t i = source[k];
    float* out = logits + k * stride;
    gradient(logits + i * stride, out, bias, scale, V, log_sum[i], entropy[i], a[i], c ? c[i] : 0.0f);
    out[target[i]] += scale * a[i];
  }
}
}
