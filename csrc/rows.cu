// Row kernels of the head: statistics of a softmax, and the gradient of its logits in place. Bytes
// of device memory accessed per row: 4 V for the statistics, (4 + size) V for the gradient.

#include <type_traits>

#include "device.cuh"
#include "kernels.h"

namespace paw {
namespace {

constexpr int THREADS = 256;
constexpr int LOADS = 4;         // 16-byte vectors of a thread in a tile; all of them load at once
constexpr float FLOOR = -126.f;  // exp(FLOOR) is 0; bounds log p in p log p

// top is max u, sum adds exp((u - top) scale), and dot adds these times (u - top) scale. Each has
// one sign, so log(sum) - dot / sum does not cancel. The difference is taken before scaling, so it
// is exact however large the logits are, and 0 at the top.
struct Sums {
  float top, sum, dot, scale;

  __device__ void raise(float high) {
    const float down = fmaxf((top - high) * scale, FLOOR), shrink = fast_exp(down);
    dot = shrink * (dot + down * sum);
    sum *= shrink;
    top = high;
  }

  // Logits of -inf add nothing; NaN and +inf make the sums NaN.
  template <int N>
  __device__ void add(const float (&u)[N]) {
    float high = top;
    for (float value : u) high = fmaxf(high, value);
    raise(high);
    for (float value : u) {
      const float down = (value - top) * scale, e = fast_exp(down);
      sum += e;
      dot += e * fmaxf(down, FLOOR);
    }
  }
};

__device__ Sums no_sums(float scale) { return {-3.402823466e38f, 0, 0, scale}; }  // finite, because -inf - -inf is NaN

__device__ Sums merge(Sums a, Sums b) {
  const float high = fmaxf(a.top, b.top);
  a.raise(high);
  b.raise(high);
  return {high, a.sum + b.sum, a.dot + b.dot, a.scale};
}

struct Softmax {
  float logp, entropy, log_total;

  __device__ Softmax(Sums s, float u_target) {
    log_total = logf(s.sum);
    logp = (u_target - s.top) * s.scale - log_total;
    entropy = log_total - s.dot / s.sum;
  }
};

// A row cut into aligned vectors. Vector i holds the logits 4 i - shift + {0, 1, 2, 3}, with -inf
// outside [0, V).
template <bool CAPPED>
struct Row {
  const float *x, *bias;
  float scale, softcap, inverse;
  int V, shift;
  int whole_end;  // vectors from 0 up to this one (exclusive) do not reach beyond V

  __device__ Row(const Rows& rows, int64_t k)
      : x(rows.logits + k * rows.stride), bias(rows.bias), scale(rows.scale), softcap(rows.softcap),
        inverse(1 / softcap), V(rows.V), shift(reinterpret_cast<uintptr_t>(x) / sizeof(float) % 4), whole_end(max(V - 3, 0)) {}

  __device__ int vectors() const { return (V + shift + 3) / 4; }
  __device__ int first(int i) const { return 4 * i - shift; }
  __device__ int of(int j) const { return (j + shift) / 4; }  // the vector of logit j
  __device__ bool inside(int j) const { return j >= 0 && j < V; }
  __device__ bool whole(int i) const { return unsigned(first(i)) < unsigned(whole_end); }
  __device__ const float4* vector(int i) const { return reinterpret_cast<const float4*>(x + first(i)); }

  __device__ float4 load(int i) const {
    if (whole(i)) return *vector(i);
    const auto at = [&](int j) { return inside(j) ? x[j] : -INFINITY; };
    return {at(first(i)), at(first(i) + 1), at(first(i) + 2), at(first(i) + 3)};
  }

  // The thread's vectors of the tile at `start`. Except at the ends, no load waits for another.
  __device__ void load(float4 (&to)[LOADS], int start) const {
    const bool clear = whole(start) && whole(start + LOADS * blockDim.x - 1);
#pragma unroll
    for (int u = 0; u < LOADS; u++) {
      const int i = start + u * blockDim.x + threadIdx.x;
      to[u] = clear ? *vector(i) : load(i);
    }
  }

  __device__ float capped(float logit) const { return CAPPED ? softcap * fast_tanh(logit * inverse) : logit; }

  // u of vector i.
  __device__ void logits(float4 v, int i, float* u) const {
    u[0] = v.x, u[1] = v.y, u[2] = v.z, u[3] = v.w;
    if (bias) {
      for (int k = 0; k < 4; k++)
        if (inside(first(i) + k)) u[k] += bias[first(i) + k];
    }
    for (int k = 0; k < 4; k++) u[k] = CAPPED && !inside(first(i) + k) ? u[k] : capped(u[k]);
  }

  __device__ float logit(int j) const { return capped(bias ? x[j] + bias[j] : x[j]); }

  // du/dlogit.
  __device__ float slope(float u) const {
    const float t = u * inverse;
    return CAPPED ? (1 - t) * (1 + t) : 1;
  }
};

template <class T>
struct alignas(4 * sizeof(T)) Four {
  T of[4];
};

// dL/du of one row: a [j = target] - p_j (a + c (log p_j + entropy)), where a and c include the scale.
struct Gradient {
  float top, scale, log_total, a, c, rest;

  __device__ Gradient(float top, float scale, float log_total, float entropy, float a, float c)
      : top(top), scale(scale), log_total(log_total), a(a * scale), c(c * scale), rest((a + c * entropy) * scale) {}

  __device__ float off_target(float u) const {
    const float logp = (u - top) * scale - log_total;
    return -fast_exp(logp) * (c * fmaxf(logp, FLOOR) + rest);
  }

  // Writes vector i of the row, given its logits, as if the target were not in it.
  template <class T, class R>
  __device__ void store(T* out, const R& row, int i, float4 x) const {
    const int j = row.first(i);
    float u[4];
    Four<T> d;
    row.logits(x, i, u);
    for (float& value : u) value = off_target(value) * row.slope(value);
    narrow(d.of, u[0], u[1]);
    narrow(d.of + 2, u[2], u[3]);
    if (row.whole(i) && reinterpret_cast<uintptr_t>(out + j) % sizeof(d) == 0) {
      *reinterpret_cast<Four<T>*>(out + j) = d;
    } else {
      for (int k = 0; k < 4; k++)
        if (row.inside(j + k)) out[j + k] = d.of[k];
    }
  }

  // Then the same thread writes the target.
  template <class T, class R>
  __device__ void store_target(T* out, const R& row, int target, float u) const {
    alignas(2 * sizeof(T)) T d[2];
    narrow(d, (off_target(u) + a) * row.slope(u), 0);
    out[target] = d[0];
  }
};

template <bool CAPPED>
__global__ void __launch_bounds__(THREADS, 4) statistics_kernel(Rows rows, Statistics out) {
  const int64_t k = blockIdx.x;
  const Row<CAPPED> row(rows, k);
  Sums sums = no_sums(row.scale);
  for (int start = 0; start < row.vectors(); start += LOADS * blockDim.x) {
    float4 x[LOADS];
    float u[4 * LOADS];
    row.load(x, start);
#pragma unroll
    for (int v = 0; v < LOADS; v++) row.logits(x[v], start + v * blockDim.x + threadIdx.x, u + 4 * v);
    sums.add(u);
  }
  const float u_target = row.logit(rows.target[k]);
  sums = block_reduce(sums, no_sums(row.scale));
  if (threadIdx.x > 0) return;
  const Softmax of(sums, u_target);
  out.logp[k] = of.logp;
  out.entropy[k] = of.entropy;
  out.top[k] = sums.top;
  out.log_total[k] = of.log_total;
}

template <class T, bool CAPPED>
__global__ void __launch_bounds__(THREADS, 4)
    gradient_kernel(Rows rows, const int64_t* source, Statistics of, const float* a, const float* c) {
  const int64_t k = blockIdx.x, i = source[k];
  const Row<CAPPED> row(rows, i);
  T* const out = reinterpret_cast<T*>(rows.logits + k * rows.stride);
  const Gradient gradient(of.top[i], row.scale, of.log_total[i], of.entropy[i], a[i], c ? c[i] : 0);
  const int target = rows.target[i], tile = LOADS * blockDim.x;
  const bool mine = row.of(target) % blockDim.x == threadIdx.x;
  const float u_target = mine ? row.logit(target) : 0;  // before it is overwritten
  int safe = 0;
  for (int start = 0; start < row.vectors(); start += tile) {
    float4 x[LOADS];
    row.load(x, start);
    // 16-bit values of the first v vectors overwrite the first v / 2 + 1, so all threads must have
    // read those.
    if (sizeof(T) < sizeof(float) && start >= safe) {
      __syncthreads();
      safe = 2 * start + tile;
    }
#pragma unroll
    for (int u = 0; u < LOADS; u++) {
      const int v = start + u * blockDim.x + threadIdx.x;
      gradient.store(out, row, v, x[u]);
    }
  }
  if (mine) gradient.store_target(out, row, target, u_target);
}

// Number of threads of a block for that many vectors: whole warps, at most enough for one tile.
int threads(int vectors) {
  const int warps = (vectors + 32 * LOADS - 1) / (32 * LOADS);
  return 32 * (warps < 1 ? 1 : warps < THREADS / 32 ? warps : THREADS / 32);
}

int vectors(int V) { return (V + 6) / 4; }  // of the worst-aligned row

// Calls launch(capped), where capped is a type with a constant value.
template <class Launch>
cudaError_t with(float softcap, Launch launch) {
  return softcap > 0 ? launch(std::true_type()) : launch(std::false_type());
}

// Calls launch(T(), capped) with the T of `type`.
template <class Launch>
cudaError_t with(Type type, float softcap, Launch launch) {
  return with(softcap, [&](auto capped) {
    if (type == Type::float32) return launch(float(), capped);
    return type == Type::bfloat16 ? launch(__nv_bfloat16(), capped) : launch(__half(), capped);
  });
}

}  // namespace

cudaError_t row_statistics(Rows rows, int64_t n, Statistics out, cudaStream_t stream) {
  return with(rows.softcap, [&](auto capped) {
    return launch(statistics_kernel<capped.value>, {n, threads(vectors(rows.V))}, stream, rows, out);
  });
}

cudaError_t row_gradient(Rows rows, const int64_t* source, int64_t L, Statistics of, const float* a, const float* c,
                         Type type, cudaStream_t stream) {
  return with(type, rows.softcap, [&](auto t, auto capped) {
    const auto kernel = gradient_kernel<decltype(t), capped.value>;
    return launch(kernel, {L, threads(vectors(rows.V))}, stream, rows, source, of, a, c);
  });
}

}  // namespace paw
