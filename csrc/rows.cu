// Row kernels of the head: statistics of a softmax and the gradient of its logits in place, or both in one read.
// Bytes of device memory a row: 4 V for the statistics, (4 + size) V for the gradient, (4 + size) V for both at once.

#include <type_traits>

#include "device.cuh"
#include "kernels.h"

namespace paw {
namespace {

constexpr int THREADS = 256;
constexpr int LOADS = 4;         // 16-byte vectors of a thread in a tile: as many loads in flight
constexpr int DEPTH = 4;         // tiles of asynchronous copies in flight
constexpr float FLOOR = -126.f;  // exp(FLOOR) is 0: bounds a logarithm that is multiplied by its own exponential

// top of u, sum of exp((u - top) scale), and dot of these times (u - top) scale: each has one sign, so log(sum) - dot / sum
// does not cancel. A difference is taken before it is scaled: exact however large the logits are, and 0 at the top.
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

__device__ Sums no_sums(float scale) { return {-3.402823466e38f, 0, 0, scale}; }  // a finite top: -inf - -inf is NaN

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

// A row cut into aligned vectors: vector i holds the logits 4 i - shift + {0, 1, 2, 3}, with -inf outside of [0, V).
template <bool CAPPED>
struct Row {
  const float *x, *bias;
  float scale, softcap, inverse;
  int V, shift;
  int whole_end;  // vectors that begin before it, from 0 on, do not reach beyond V

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

  // The thread's vectors of the tile at `start`. Away from the ends no load waits for another.
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

  // Then, by the same thread, the target.
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
    // 16-bit values of the first v vectors lie on the first v / 2 + 1: all threads must have read those.
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

// One row's part of Slopes.
struct Slope {
  float scale, base, low, high, power, pull, ref, c;

  __device__ Slope(const Slopes& of, int64_t k)
      : scale(of.scale[k]), base(of.base[k]), low(of.low[k]), high(of.high[k]), power(of.power[k]),
        pull(of.pull ? of.pull[k] : 0), ref(of.pull ? of.ref[k] : 0), c(of.c ? of.c[k] : 0) {}

  __device__ float a(float logp) const {
    const float above = logp - base, finite = above < -1e30f ? -1e30f : above;  // NaN stays, 0 * inf does not occur
    const float clipped = logp < low || logp > high ? 0 : scale * expf(power * finite);
    const float gap = ref - logp > 20 ? 20 : ref - logp, gap_exp = expf(gap);  // beyond the clamp, and never infinite
    return clipped + (pull == 0 || gap_exp - gap - 1 > 10 ? 0 : pull * (1 - gap_exp));
  }
};

struct Answer {
  float top, log_total, entropy, a;
};

// A cluster of blocks holds one row, `part` vectors in each block's shared memory.
template <class T, bool CAPPED>
__global__ void __launch_bounds__(THREADS, 4) loss_kernel(Rows rows, Slopes slopes, Statistics out, float* a, int part) {
  SHARED(Sums, mine);
  SHARED(Answer, answer);
  float4* const held = dynamic_shared<float4>();  // each thread reads only what it copied itself: no barrier
  const int rank = cluster_rank(), size = cluster_size();
  const int64_t k = blockIdx.x / size;
  const Row<CAPPED> row(rows, k);
  const int begin = rank * part, count = min(part, row.vectors() - begin), tile = LOADS * blockDim.x;

  const auto fetch = [&](int start) {
    for (int v = start + threadIdx.x; v < min(start + tile, count); v += blockDim.x) {
      if (row.whole(begin + v))
        __pipeline_memcpy_async(held + v, row.vector(begin + v), sizeof(float4));
      else
        held[v] = row.load(begin + v);
    }
    __pipeline_commit();
  };
  for (int d = 0; d < DEPTH; d++) fetch(d * tile);
  const int target = rows.target[k];
  const float u_target = row.logit(target);  // while no block of the cluster overwrites it
  const Slope slope(slopes, k);

  Sums sums = no_sums(row.scale);
  for (int start = 0; start < count; start += tile) {
    fetch(start + DEPTH * tile);
    __pipeline_wait_prior(DEPTH);
    float u[4 * LOADS];
#pragma unroll
    for (int l = 0; l < LOADS; l++) {
      const int v = start + l * blockDim.x + threadIdx.x;
      if (v < count)
        row.logits(held[v], begin + v, u + 4 * l);
      else
        row.logits({-INFINITY, -INFINITY, -INFINITY, -INFINITY}, row.vectors(), u + 4 * l);
    }
    sums.add(u);
  }
  sums = block_reduce(sums, no_sums(row.scale));
  if (threadIdx.x == 0) mine = sums;
  cluster_arrive();
  cluster_wait();

  if (warp() == 0) {
    sums = warp_reduce(lane() < size ? *cluster_peer(&mine, lane()) : no_sums(row.scale));
    if (lane() == 0) {
      const Softmax of(sums, u_target);
      const float slope_a = slope.a(of.logp);
      answer = {sums.top, of.log_total, of.entropy, slope_a};
      if (rank == 0) {
        out.logp[k] = of.logp;
        out.entropy[k] = of.entropy;
        a[k] = slope_a;
      }
    }
  }
  __syncthreads();
  cluster_arrive();  // waited for at the end: a block's sums must outlive the reading of them
  if (answer.a != 0 || slope.c != 0) {  // the caller decides so too: not by the products, which may underflow
    const Gradient gradient(answer.top, row.scale, answer.log_total, answer.entropy, answer.a, slope.c);
    T* const to = reinterpret_cast<T*>(rows.logits + k * rows.stride);
#pragma unroll LOADS
    for (int v = threadIdx.x; v < count; v += blockDim.x) gradient.store(to, row, begin + v, held[v]);
    const int v = row.of(target) - begin;
    if (v >= 0 && v < count && v % blockDim.x == threadIdx.x) gradient.store_target(to, row, target, u_target);
  }
  cluster_wait();
}

__global__ void __launch_bounds__(THREADS) move_kernel(Rows rows, const int64_t* source, int words) {
  const int64_t k = blockIdx.x, i = source[k];
  if (i == k) return;
  const float* const from = rows.logits + i * rows.stride;
  float* const to = rows.logits + k * rows.stride;
  const bool aligned = (reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to)) % sizeof(float4) == 0;
  const int vectors = aligned ? words / 4 : 0;
#pragma unroll LOADS
  for (int v = threadIdx.x; v < vectors; v += blockDim.x)
    reinterpret_cast<float4*>(to)[v] = reinterpret_cast<const float4*>(from)[v];
  for (int w = 4 * vectors + threadIdx.x; w < words; w += blockDim.x) to[w] = from[w];
}

// Threads of a block that has so many vectors: whole warps, at most one tile's.
int threads(int vectors) {
  const int warps = (vectors + 32 * LOADS - 1) / (32 * LOADS);
  return 32 * (warps < 1 ? 1 : warps < THREADS / 32 ? warps : THREADS / 32);
}

int vectors(int V) { return (V + 6) / 4; }  // of the worst aligned row

// launch(capped), a type with a constant value.
template <class Launch>
cudaError_t with(float softcap, Launch launch) {
  return softcap > 0 ? launch(std::true_type()) : launch(std::false_type());
}

// launch(T(), capped) with the T of `type`.
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

cudaError_t row_loss(Rows rows, int64_t n, Slopes slopes, Statistics out, float* a, Type type, int cluster,
                     cudaStream_t stream) {
  const int part = (vectors(rows.V) + cluster - 1) / cluster;
  const Grid grid{n * cluster, threads(part), cluster, part * int64_t(sizeof(float4))};
  return with(type, rows.softcap, [&](auto t, auto capped) {
    return launch(loss_kernel<decltype(t), capped.value>, grid, stream, rows, slopes, out, a, part);
  });
}

cudaError_t row_move(Rows rows, const int64_t* source, int64_t L, Type type, cudaStream_t stream) {
  const int words = type == Type::float32 ? rows.V : (rows.V + 1) / 2;
  return launch(move_kernel, {L, threads(words / 4)}, stream, rows, source, words);
}

}  // namespace paw
