// torch.ops.kvferry.pack_linear and packed_linear: a linear layer whose weight is packed once.

#include "linear.h"

#include <ATen/Parallel.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "operators.h"

namespace kvferry {
namespace {

// Weights that a thread should have at least: less than this is done before another thread wakes.
constexpr int64_t kThreadBytes = 128 << 10;

int64_t elements_per_word(at::ScalarType dtype) {
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kBFloat16, "cannot pack weights of ", dtype);
  return dtype == at::kFloat ? 1 : 2;
}

at::Tensor pack_linear(const at::Tensor& weight) {
  TORCH_CHECK(weight.dim() == 2, "expected [outputs, inputs], got ", weight.sizes());
  const int64_t per_word = elements_per_word(weight.scalar_type());
  const int64_t num_outputs = weight.size(0), num_inputs = weight.size(1);
  const int64_t depth = (num_inputs + per_word - 1) / per_word, panels = (num_outputs + kPanel - 1) / kPanel;
  at::Tensor padded = weight;
  if (num_inputs % per_word != 0) padded = at::constant_pad_nd(weight, {0, 1});
  padded = padded.contiguous();
  at::Tensor packed = at::zeros({panels, depth, kPanel}, weight.options().dtype(at::kInt));
  const auto* from = static_cast<const uint32_t*>(padded.const_data_ptr());
  auto* to = static_cast<uint32_t*>(packed.mutable_data_ptr());
  at::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t count = std::min<int64_t>(kPanel, num_outputs - panel * kPanel);
      for (int64_t k = 0; k < depth; ++k) {
        for (int64_t o = 0; o < count; ++o) {
          to[(panel * depth + k) * kPanel + o] = from[(panel * kPanel + o) * depth + k];
        }
      }
    }
  });
  return packed;
}

template <typename T>
void multiply(const at::Tensor& input, const at::Tensor& weight, const T* bias, const at::Tensor& out) {
  const int64_t panels = weight.size(0), depth = weight.size(1);
  const Product<T> product{input.const_data_ptr<T>(), input.size(0), input.stride(0), depth,
                           static_cast<const uint32_t*>(weight.const_data_ptr()), bias,
                           out.mutable_data_ptr<T>(), out.size(1)};
  const int64_t grain = std::max<int64_t>(1, kThreadBytes / (depth * kPanel * sizeof(uint32_t)));
  at::parallel_for(0, panels, grain,
                   [&](int64_t begin, int64_t end) { multiply_panels(product, begin, end); });
}

// The shape of the result, for torch.compile.
at::Tensor packed_linear_meta(const at::Tensor& input, const at::Tensor&, const std::optional<at::Tensor>&,
                              int64_t num_outputs) {
  std::vector<c10::SymInt> size = input.sym_sizes().vec();
  size.back() = num_outputs;
  return at::empty_symint(size, input.options());
}

}  // namespace

at::Tensor packed_linear(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                         int64_t num_outputs) {
  const int64_t per_word = elements_per_word(input.scalar_type()), num_inputs = input.size(-1);
  TORCH_CHECK(weight.dim() == 3 && weight.scalar_type() == at::kInt && weight.is_contiguous() &&
                  weight.size(2) == kPanel && weight.size(0) == (num_outputs + kPanel - 1) / kPanel &&
                  weight.size(1) == (num_inputs + per_word - 1) / per_word,
              "weight was not packed for ", num_inputs, " inputs and ", num_outputs, " outputs");
  TORCH_CHECK(!bias || (bias->scalar_type() == input.scalar_type() && bias->is_contiguous() &&
                        bias->numel() == num_outputs),
              "bias");
  std::vector<int64_t> size = input.sizes().vec();
  size.back() = num_outputs;
  at::Tensor rows = input.reshape({-1, num_inputs});
  if (num_inputs % per_word != 0) rows = at::constant_pad_nd(rows, {0, 1});
  if (rows.stride(1) != 1) rows = rows.contiguous();
  at::Tensor out = at::empty({rows.size(0), num_outputs}, input.options());
  if (input.scalar_type() == at::kFloat) {
    multiply<float>(rows, weight, bias ? bias->const_data_ptr<float>() : nullptr, out);
  } else {
    multiply<c10::BFloat16>(rows, weight, bias ? bias->const_data_ptr<c10::BFloat16>() : nullptr, out);
  }
  return out.view(size);
}

}  // namespace kvferry

TORCH_LIBRARY_FRAGMENT(kvferry, library) {
  // weight: float32 or bfloat16 [outputs, inputs]. Returns words, int32 [panels, words of an input row,
  // outputs of a panel], zero where padded. The layout is this machine's.
  library.def("pack_linear(Tensor weight) -> Tensor");
  // input: [..., inputs] of the packed weight's dtype; bias: [num_outputs] of the same. Sums in float32.
  library.def("packed_linear(Tensor input, Tensor weight, Tensor? bias, int num_outputs) -> Tensor");
}

TORCH_LIBRARY_IMPL(kvferry, CPU, library) {
  library.impl("pack_linear", &kvferry::pack_linear);
  library.impl("packed_linear", &kvferry::packed_linear);
}

TORCH_LIBRARY_IMPL(kvferry, Meta, library) { library.impl("packed_linear", &kvferry::packed_linear_meta); }
