// torch.ops.kvferry.decoder_layer: a whole layer of a decoder in one call. With few rows its small operators
// take less time than Python needs to call them.

#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "linear.h"
#include "operators.h"

namespace kvferry {
namespace {

using Element = c10::BFloat16;
constexpr int64_t kThreadElements = 32 << 10;

at::Tensor add(const at::Tensor& a, const at::Tensor& b) {
  at::Tensor out = at::empty_like(a);
  const Element *x = a.const_data_ptr<Element>(), *y = b.const_data_ptr<Element>();
  Element* to = out.mutable_data_ptr<Element>();
  at::parallel_for(0, a.numel(), kThreadElements, [&](int64_t begin, int64_t end) {
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) store_rounded(to + i, to_floats(x + i) + to_floats(y + i));
    for (; i < end; ++i) to[i] = x[i] + y[i];
  });
  return out;
}

struct Norm {
  at::Tensor weight;
  double epsilon, offset;
  bool round_first;

  Norm(const at::Tensor& weight, at::ArrayRef<double> constants)
      : weight(weight), epsilon(constants[0]), offset(constants[1]), round_first(constants[2] != 0) {}

  at::Tensor operator()(const at::Tensor& input) const {
    return rms_norm(input, weight, epsilon, offset, round_first);
  }
};

at::Tensor decoder_layer(const at::Tensor& hidden, const at::Tensor& cos, const at::Tensor& sin,
                         at::TensorList weights, const c10::List<std::optional<at::Tensor>>& biases,
                         at::ArrayRef<double> norms, int64_t num_inner, const at::Tensor& cache, int64_t layer,
                         const at::Tensor& slots, const at::Tensor& starts, const at::Tensor& lengths,
                         const at::Tensor& tables, double scale, int64_t window, double softcap) {
  TORCH_CHECK(weights.size() == 9 && biases.size() == 4 && norms.size() == 6, "lists of wrong lengths");
  TORCH_CHECK(hidden.dim() == 3 && hidden.size(0) == 1 && hidden.is_contiguous() &&
                  hidden.scalar_type() == at::kBFloat16,
              "expected contiguous bfloat16 [1, tokens, size], got ", hidden.sizes());
  TORCH_CHECK(cache.dim() == 6, "expected a cache of blocks, got ", cache.sizes());
  const int64_t num_tokens = hidden.size(1), size = hidden.size(2);
  const int64_t num_kv_heads = cache.size(4), head_dim = cache.size(5);
  // What the output projection takes, two to a word.
  const int64_t num_query = weights[4].size(1) * 2, num_kv = num_kv_heads * head_dim;
  const Norm first(weights[0], norms.slice(0, 3)), second(weights[5], norms.slice(3, 3));

  at::Tensor x = first(hidden);
  const auto heads = [&](int64_t index, int64_t num_outputs) {
    const at::Tensor out = packed_linear(x, weights[index], biases[index - 1], num_outputs);
    return out.view({1, num_tokens, -1, head_dim}).transpose(1, 2);
  };
  const at::Tensor value = heads(3, num_kv);
  const auto [query, key] = rotary(heads(1, num_query), heads(2, num_kv), cos, sin);
  const at::Tensor blocks = cache.select(1, layer);
  x = paged_attention(query, key, value, blocks.select(1, 0), blocks.select(1, 1), slots, starts, lengths, tables,
                      scale, window, softcap);
  x = packed_linear(x.view({1, num_tokens, num_query}), weights[4], biases[3], size);
  const at::Tensor middle = add(hidden, x);
  return add(middle, swiglu(second(middle), weights[6], weights[7], weights[8], num_inner, size));
}

}  // namespace
}  // namespace kvferry

TORCH_LIBRARY_FRAGMENT(kvferry, library) {
  // hidden: bfloat16 [1, tokens, size]; cos, sin: as of rotary. weights: norm, query, key, value, output, norm,
  // gate, up, down, the linear ones packed; biases of the first four; norms: epsilon, offset and round_first of
  // both norms. cache: [blocks, layers, 2, block_size, kv_heads, head_dim]; the rest as of paged_attention.
  library.def(
      "decoder_layer(Tensor hidden, Tensor cos, Tensor sin, Tensor[] weights, Tensor?[] biases, float[] norms, "
      "int num_inner, Tensor(a!) cache, int layer, Tensor slots, Tensor starts, Tensor lengths, Tensor tables, "
      "float scale, int window, float softcap) -> Tensor");
}

TORCH_LIBRARY_IMPL(kvferry, CPU, library) { library.impl("decoder_layer", &kvferry::decoder_layer); }
