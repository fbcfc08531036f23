// The CUDA kernels behind the operators that paw_kernels defines in Python. They use torch's stable
// ABI, so one build serves all torch releases from TORCH_TARGET_VERSION on.

#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "kernels.h"

#ifndef PAW_ON_CPU
#define PAW_NAMESPACE paw_kernels
#define PAW_DEVICE CUDA
// Weak, so that the library also loads with a torch without CUDA, which never calls it.
extern "C" __attribute__((weak)) int32_t aoti_torch_get_current_cuda_stream(int32_t device, void** stream);
#endif

namespace {

using std::optional;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// One call on the device of `like`, which is current while this object lives.
class Call {
 public:
#ifdef PAW_ON_CPU
  explicit Call(const Tensor& like) : like_(like) {}
#else
  explicit Call(const Tensor& like) : like_(like), guard_(like.get_device_index()) {
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream, "this torch has no CUDA");
    void* current = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(like.get_device_index(), &current));
    stream = static_cast<cudaStream_t>(current);
  }
#endif
  cudaStream_t stream = nullptr;

  Tensor empty(int64_t size, ScalarType type) const { return torch::stable::new_empty(like_, {size}, type); }

  template <class T>
  T* data(const Tensor& tensor, const char* name, int64_t size) const {
    STD_TORCH_CHECK(tensor.is_contiguous() && tensor.numel() == size, name, " must be contiguous, ", size, " elements");
    return located<T>(tensor, name);
  }

  template <class T>
  T* data(const optional<Tensor>& tensor, const char* name, int64_t size) const {
    return tensor ? data<T>(*tensor, name, size) : nullptr;
  }

  paw::Rows rows(const Tensor& logits, const optional<Tensor>& bias, const optional<Tensor>& target, double scale,
                 optional<double> softcap) const {
    STD_TORCH_CHECK(logits.dim() == 2 && logits.stride(1) == 1, "logits must be [n, V] with contiguous rows");
    const int64_t n = logits.size(0), V = logits.size(1);
    STD_TORCH_CHECK(V > 0 && V <= 1 << 30, "logits must have 1 to 2^30 columns, got ", V);
    return {located<float>(logits, "logits"),          logits.stride(0), data<const float>(bias, "bias", V),
            data<const int64_t>(target, "target", n), float(scale),     float(softcap.value_or(0)), int(V)};
  }

  void check(cudaError_t error) const {
    if (error == cudaSuccess) return;
    cudaGetLastError();  // clears the error, so that nothing else reports it again
    throw std::runtime_error(std::string("paw_kernels: ") + cudaGetErrorString(error));
  }

 private:
  template <class T>
  T* located(const Tensor& tensor, const char* name) const {
    const bool here = tensor.is_cuda() == like_.is_cuda() && tensor.get_device_index() == like_.get_device_index();
    STD_TORCH_CHECK(here, name, " is not on the device of the first argument");
    if constexpr (std::is_const_v<T>)
      return tensor.const_data_ptr<std::remove_const_t<T>>();
    else
      return tensor.mutable_data_ptr<T>();
  }

  const Tensor& like_;
#ifndef PAW_ON_CPU
  torch::stable::accelerator::DeviceGuard guard_;
#endif
};

paw::Type type_of(ScalarType dtype) {
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half,
                  "dtype must be float32, bfloat16 or float16");
  if (dtype == ScalarType::Float) return paw::Type::float32;
  return dtype == ScalarType::BFloat16 ? paw::Type::bfloat16 : paw::Type::float16;
}

int size_of(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(tensor.numel() <= INT32_MAX, name, " must have fewer than 2^31 elements");
  return int(tensor.numel());
}

std::tuple<Tensor, Tensor, Tensor, Tensor> row_statistics(Tensor logits, optional<Tensor> bias, Tensor target,
                                                          double scale, optional<double> softcap) {
  const Call call(logits);
  const int64_t n = logits.size(0);
  const auto empty = [&] { return call.empty(n, ScalarType::Float); };
  Tensor logp = empty(), entropy = empty(), top = empty(), log_total = empty();
  const auto to = [&](const Tensor& t) { return call.data<float>(t, "result", n); };
  const paw::Rows rows = call.rows(logits, bias, target, scale, softcap);
  call.check(paw::row_statistics(rows, n, {to(logp), to(entropy), to(top), to(log_total)}, call.stream));
  return {logp, entropy, top, log_total};
}

void row_gradient(Tensor logits, optional<Tensor> bias, Tensor target, Tensor source, Tensor top, Tensor log_total,
                  Tensor entropy, Tensor a, optional<Tensor> c, double scale, ScalarType dtype,
                  optional<double> softcap) {
  const Call call(logits);
  const int64_t n = logits.size(0), L = source.numel();
  const auto read = [&](const Tensor& t, const char* name) {
    return const_cast<float*>(call.data<const float>(t, name, n));
  };
  const paw::Statistics of{nullptr, read(entropy, "entropy"), read(top, "top"), read(log_total, "log_total")};
  const paw::Rows rows = call.rows(logits, bias, target, scale, softcap);
  call.check(paw::row_gradient(rows, call.data<const int64_t>(source, "source", L), L, of,
                               call.data<const float>(a, "a", n), call.data<const float>(c, "c", n), type_of(dtype),
                               call.stream));
}

std::tuple<Tensor, Tensor> pack(Tensor live) {
  const Call call(live);
  const int n = size_of(live, "live");
  Tensor source = call.empty(n, ScalarType::Long), count = call.empty(1, ScalarType::Long);
  call.check(paw::pack(call.data<const bool>(live, "live", n), n, call.data<int64_t>(source, "result", n),
                       call.data<int64_t>(count, "result", 1), call.stream));
  return {source, count};
}

}  // namespace

// The architectures it was built for, oldest first, 800 for sm_80. Rename this whenever an operator
// changes, so that Python never calls an older library.
extern "C" __attribute__((visibility("default"), used)) const int paw_cuda_interface_4[] = {__CUDA_ARCH_LIST__};

STABLE_TORCH_LIBRARY_IMPL(PAW_NAMESPACE, PAW_DEVICE, m) {
  m.impl("row_statistics", TORCH_BOX(&row_statistics));
  m.impl("row_gradient_", TORCH_BOX(&row_gradient));
  m.impl("pack", TORCH_BOX(&pack));
}
