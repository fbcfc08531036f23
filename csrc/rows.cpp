// Row operations of the CPU head: statistics of a softmax, and the gradient of its logits in place.
// It has a plain C interface on raw pointers (no torch, no Python headers), so building it needs
// only a C++ compiler. One thread handles each row. Blocks of a row stay in the first-level cache,
// so memory is read once per operation.

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __linux__
#include <sys/mman.h>
#endif

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

namespace {

constexpr int64_t BLOCK = 2048, LANES = 16;
const float zeros[BLOCK] = {};

constexpr float LOWEST = -88.0f;  // smallest exponent in use: exp of it is 0 here

// exp for LOWEST <= x <= 88, to about 1 ulp. It is 0 below -87.7, and NaN stays NaN. It has no
// branches, so that the compiler can vectorise it.
inline __attribute__((always_inline)) float exp_above(float x) {
  // Adding 1.5 * 2^23 rounds to an integer, held in the low mantissa bits. Adding 127 makes these
  // the bits of an exponent.
  const float magic = 12582912.0f + 127.0f;
  const float shifted = x * 1.44269504f + magic;
  const float n = shifted - magic;
  float r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * r + 1.0f) * r + 1.0f;
  uint32_t bits;
  std::memcpy(&bits, &shifted, 4);
  bits <<= 23;
  float scale;
  std::memcpy(&scale, &bits, 4);
  return p * scale;
}

inline __attribute__((always_inline)) float bounded(float x) { return x < LOWEST ? LOWEST : x; }

// tanh to about 2 ulp. It uses a polynomial where the quotient would cancel, as do device.cuh and
// _triton_kernels.py.
inline __attribute__((always_inline)) float fast_tanh(float x) {
  const float size = std::fabs(x), s = x * x;
  const float p = ((1.643756359e-2f * s - 5.267180450e-2f) * s + 1.332072492e-1f) * s - 3.333294663e-1f;
  const float e = exp_above(bounded(-2 * size)), quotient = (1 - e) / (1 + e);
  return __builtin_copysignf(size < 0.55f ? size * s * p + size : quotient, x);
}

inline __attribute__((always_inline)) void cap(const float* u, const float* b, float softcap, int64_t n, float* capped) {
  const float inverse = 1 / softcap;
#pragma omp simd
  for (int64_t j = 0; j < n; j++) capped[j] = softcap * fast_tanh((u[j] + b[j]) * inverse);
}

struct Sums {
  float top, chosen;  // the largest logit and the target's, with bias, capped, before scaling
  double sum, dot;    // of exp(z - max), and of exp(z - max) (z - max): one sign each, no cancelling
};

CLONES Sums statistics(const float* row, const float* bias, float scale, float softcap, int64_t V, int64_t target) {
  Sums of{-FLT_MAX, 0, 0, 0};  // the top is finite, because -inf - -inf is NaN
  float value[BLOCK];
  for (int64_t start = 0; start < V; start += BLOCK) {
    const int64_t n = V - start < BLOCK ? V - start : BLOCK, here = target - start;
    const float* u = row + start;
    const float* b = bias ? bias + start : zeros;
    if (softcap > 0)
      cap(u, b, softcap, n, value);
    else
      for (int64_t j = 0; j < n; j++) value[j] = u[j] + b[j];
    if (here >= 0 && here < n) of.chosen = value[here];
    // Only whole vectors from here on: one by one, the last 8 of 600 took a fifth of the time. e of
    // the padding is 0.
    const int64_t half = (n + 2 * LANES - 1) / (2 * LANES) * LANES;
    for (int64_t j = n; j < 2 * half; j++) value[j] = -INFINITY;
    float top = of.top, other = of.top;  // two, because each waits for its own previous value
#pragma omp simd reduction(max : top, other)
    for (int64_t j = 0; j < half; j++) {
      top = value[j] > top ? value[j] : top;
      other = value[half + j] > other ? value[half + j] : other;
    }
    top = other > top ? other : top;
    if (top > of.top) {
      if (of.sum > 0) {
        const double down = (double(of.top) - top) * scale, shrink = std::exp(down);
        of.dot = shrink * (of.dot + down * of.sum);
        of.sum *= shrink;
      }
      of.top = top;
    }
    float sum = 0, dot = 0;
#pragma omp simd reduction(+ : sum, dot)
    for (int64_t j = 0; j < 2 * half; j++) {
      const float down = bounded((value[j] - top) * scale);  // exactly 0 at the maximum
      const float e = exp_above(down);
      sum += e;
      dot += e * down;
    }
    of.sum += sum;
    of.dot += dot;
  }
  return of;
}

template <bool WITH_ENTROPY>
inline __attribute__((always_inline)) void gradient_of(const float* row, float* out, const float* bias, float scale,
                                                       float softcap, int64_t V, int64_t target, float top,
                                                       float log_total, float entropy, float a, float c) {
  const float minus_a = -scale * a, minus_c = -scale * c;
  float capped[BLOCK];
  for (int64_t start = 0; start < V; start += BLOCK) {
    const int64_t n = V - start < BLOCK ? V - start : BLOCK, here = target - start;
    const float* u = row + start;
    const float* b = bias ? bias + start : zeros;
    float* d = out + start;
    if (softcap > 0) {
      cap(u, b, softcap, n, capped);
      u = capped, b = zeros;
    }
#pragma omp simd
    for (int64_t j = 0; j < n; j++) {
      const float logp = bounded((u[j] + b[j] - top) * scale - log_total);
      const float p = exp_above(logp);
      d[j] = WITH_ENTROPY ? p * (minus_c * (logp + entropy) + minus_a) : p * minus_a;
    }
    if (here >= 0 && here < n) d[here] += scale * a;
    if (softcap > 0) {
      const float inverse = 1 / softcap;
#pragma omp simd
      for (int64_t j = 0; j < n; j++) {
        const float t = capped[j] * inverse;
        d[j] *= (1 - t) * (1 + t);
      }
    }
  }
}

CLONES void gradient(const float* row, float* out, const float* bias, float scale, float softcap, int64_t V,
                     int64_t target, float top, float log_total, float entropy, float a, float c) {
  if (c == 0)
    gradient_of<false>(row, out, bias, scale, softcap, V, target, top, log_total, entropy, a, c);
  else
    gradient_of<true>(row, out, bias, scale, softcap, V, target, top, log_total, entropy, a, c);
}

}  // namespace

extern "C" {

// Rename this whenever a function below changes, so that Python never calls an older library.
extern const int paw_cpu_interface_4 = 4;

// logits [n, V], rows `stride` apart; bias [V] or null; target [n] in [0, V). u = logits + bias, or with a softcap > 0
// softcap tanh(u / softcap); z = u scale. Writes logp, entropy, top = max u and log_total = logsumexp(z - top scale), [n] each.
void paw_row_statistics(const float* logits, int64_t stride, const float* bias, const int64_t* target, float scale,
                        float softcap, int64_t n, int64_t V, float* logp, float* entropy, float* top, float* log_total,
                        int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (n > 1 && n * V > 32768)
  for (int64_t i = 0; i < n; i++) {
    const Sums of = statistics(logits + i * stride, bias, scale, softcap, V, target[i]);
    const double log_sum = std::log(of.sum);
    logp[i] = float((double(of.chosen) - of.top) * scale - log_sum);
    entropy[i] = float(log_sum - of.dot / of.sum);
    top[i] = of.top;
    log_total[i] = float(log_sum);
  }
}

// Row k < L of logits becomes dL/dlogits of row source[k]: scale (a (1[j = y] - p_j) - c p_j (log
// p_j + H)) du/dlogit. target, top, log_total, entropy, a and c (or null) belong to the n rows
// before packing. Each source[k] is k, or it is at least L and no row reads row k. So no row reads
// a row that is overwritten.
void paw_row_gradient(float* logits, int64_t stride, const float* bias, const int64_t* target, const int64_t* source,
                      const float* top, const float* log_total, const float* entropy, const float* a, const float* c,
                      float scale, float softcap, int64_t L, int64_t V, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (L > 1 && L * V > 32768)
  for (int64_t k = 0; k < L; k++) {
    const int64_t i = source[k];
    gradient(logits + i * stride, logits + k * stride, bias, scale, softcap, V, target[i], top[i], log_total[i],
             entropy[i], a[i], c ? c[i] : 0.0f);
  }
}

// Writes source [n] and the number of chosen rows, as in `_native.pack`.
int64_t paw_pack(const bool* chosen, int64_t n, int64_t* source) {
  int64_t L = 0;
  for (int64_t i = 0; i < n; i++) L += chosen[i];
  for (int64_t k = 0, mover = L; k < n; k++) {
    source[k] = k < L ? k : -1;
    if (k >= L || chosen[k]) continue;
    while (!chosen[mover]) mover++;
    source[k] = mover++;
  }
  return L;
}

// Whether all of values [n] are in [0, limit).
bool paw_in_range(const int64_t* values, int64_t n, int64_t limit) {
  uint64_t most = 0;  // negative values become the largest
  for (int64_t i = 0; i < n; i++) most = uint64_t(values[i]) > most ? values[i] : most;
  return n == 0 || most < uint64_t(limit);
}

// Whether all of values [n] are finite.
bool paw_finite(const uint32_t* values, int64_t n) {
  uint32_t most = 0;
  for (int64_t i = 0; i < n; i++) most = (values[i] << 1) > most ? values[i] << 1 : most;
  return most < 0xFF000000u;
}

// Maps memory that is about to be written at once. A fault for each page would take 1.5 times as
// long.
void paw_claim(char* start, int64_t bytes, int threads) {
#ifdef __linux__
  constexpr int64_t PAGE = 4096, STEP = 8 << 20;
  constexpr int POPULATE_WRITE = 23;  // Linux 5.14; an error without effect before that
  char* const first = start + (-reinterpret_cast<intptr_t>(start) & (PAGE - 1));
  const int64_t size = (bytes - (first - start)) / PAGE * PAGE;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t at = 0; at < size; at += STEP) madvise(first + at, size - at < STEP ? size - at : STEP, POPULATE_WRITE);
#endif
}
}
