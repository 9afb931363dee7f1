// The operators, for those that are made of others. Shapes as where each is registered.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace kvferry {

at::Tensor packed_linear(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                         int64_t num_outputs);

at::Tensor rms_norm(const at::Tensor& input, const at::Tensor& weight, double epsilon, double offset,
                    bool round_first);

std::tuple<at::Tensor, at::Tensor> rotary(const at::Tensor& query, const at::Tensor& key, const at::Tensor& cos,
                                          const at::Tensor& sin);

at::Tensor swiglu(const at::Tensor& input, const at::Tensor& gate_weight, const at::Tensor& up_weight,
                  const at::Tensor& down_weight, int64_t num_inner, int64_t num_outputs);

at::Tensor paged_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                           const at::Tensor& key_cache, const at::Tensor& value_cache, const at::Tensor& slots,
                           const at::Tensor& starts, const at::Tensor& lengths, const at::Tensor& tables,
                           double scale, int64_t window, double softcap);

}  // namespace kvferry
