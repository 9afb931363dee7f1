// torch.ops.kvferry.rms_norm, rotary and swiglu: what stands between the linear layers of a decoder, in
// bfloat16, each in one call. They round where transformers' own modules do, so that results agree.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <cmath>
#include <tuple>

#include "linear.h"
#include "operators.h"

namespace kvferry {
namespace {

using Element = c10::BFloat16;

// Elements that a thread should have at least.
constexpr int64_t kThreadElements = 32 << 10;

int64_t grain(int64_t row_elements) { return std::max<int64_t>(1, kThreadElements / row_elements); }

// The first kLanes of `count` elements, missing ones zero.
Floats load_floats(const Element* from, int64_t count) {
  return count >= kLanes ? to_floats(from) : bits<Floats>(SingleWords<Element>::load_row(from, count));
}

void store_floats(Element* to, Floats values, int64_t count) {
  if (count >= kLanes) return store_rounded(to, values);
  Element padded[kLanes];
  store_rounded(padded, values);
  std::copy_n(padded, count, to);
}

Floats round(Floats values) {
  Element rounded[kLanes];
  store_rounded(rounded, values);
  return to_floats(rounded);
}

void check(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK(tensor.scalar_type() == at::kBFloat16 && tensor.stride(-1) == 1, name,
              " must be bfloat16, contiguous along its last dimension");
}

void normalise(const Element* x, const Element* weight, Element* out, int64_t size, float epsilon, float offset,
               bool round_first) {
  Floats squares{};
  for (int64_t i = 0; i < size; i += kLanes) {
    const Floats values = load_floats(x + i, size - i);
    squares += values * values;
  }
  const float factor = 1.0f / std::sqrt(sum_of(squares) / static_cast<float>(size) + epsilon);
  for (int64_t i = 0; i < size; i += kLanes) {
    Floats values = load_floats(x + i, size - i) * factor;
    if (round_first) values = round(values);
    store_floats(out + i, values * (load_floats(weight + i, size - i) + offset), size - i);
  }
}

}  // namespace

at::Tensor rms_norm(const at::Tensor& input, const at::Tensor& weight, double epsilon, double offset,
                    bool round_first) {
  check(weight, "weight");
  const int64_t size = input.size(-1);
  TORCH_CHECK(weight.dim() == 1 && weight.size(0) == size, "expected a weight of ", size);
  const at::Tensor rows = input.contiguous();
  check(rows, "input");
  at::Tensor out = at::empty_like(rows);
  const Element *x = rows.const_data_ptr<Element>(), *scales = weight.const_data_ptr<Element>();
  Element* to = out.mutable_data_ptr<Element>();
  at::parallel_for(0, rows.numel() / size, grain(size), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      normalise(x + row * size, scales, to + row * size, size, static_cast<float>(epsilon),
                static_cast<float>(offset), round_first);
    }
  });
  return out;
}

namespace {

// Turns one head. cos and sin have an angle for every element.
void turn(const Element* x, const Element* cos, const Element* sin, Element* out, int64_t half) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t count = half - i;
    const Floats low = load_floats(x + i, count), high = load_floats(x + half + i, count);
    store_floats(out + i,
                 round(low * load_floats(cos + i, count)) - round(high * load_floats(sin + i, count)), count);
    store_floats(out + half + i,
                 round(high * load_floats(cos + half + i, count)) +
                     round(low * load_floats(sin + half + i, count)),
                 count);
  }
}

at::Tensor turn_heads(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const int64_t num_heads = x.size(1), num_tokens = x.size(2), size = x.size(3);
  at::Tensor out = at::empty({1, num_tokens, num_heads, size}, x.options());
  const Element *from = x.const_data_ptr<Element>(), *cosines = cos.const_data_ptr<Element>(),
                *sines = sin.const_data_ptr<Element>();
  Element* to = out.mutable_data_ptr<Element>();
  at::parallel_for(0, num_tokens, grain(num_heads * size), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t h = 0; h < num_heads; ++h) {
        turn(from + h * x.stride(1) + t * x.stride(2), cosines + t * cos.stride(1), sines + t * sin.stride(1),
             to + (t * num_heads + h) * size, size / 2);
      }
    }
  });
  return out.transpose(1, 2);
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> rotary(const at::Tensor& query, const at::Tensor& key, const at::Tensor& cos,
                                          const at::Tensor& sin) {
  const int64_t num_tokens = query.size(2), size = query.size(-1);
  for (const at::Tensor& x : {query, key}) {
    check(x, "query and key");
    TORCH_CHECK(x.dim() == 4 && x.size(0) == 1 && x.size(2) == num_tokens && x.size(3) == size && size % 2 == 0,
                "expected [1, heads, ", num_tokens, ", ", size, "], got ", x.sizes());
  }
  for (const at::Tensor& angles : {cos, sin}) {
    check(angles, "cos and sin");
    TORCH_CHECK(angles.dim() == 3 && angles.size(0) == 1 && angles.size(1) == num_tokens && angles.size(2) == size,
                "expected [1, ", num_tokens, ", ", size, "], got ", angles.sizes());
  }
  return {turn_heads(query, cos, sin), turn_heads(key, cos, sin)};
}

namespace {

// gate = silu(gate) * up
void gate_with(Element* gate, const Element* up, int64_t begin, int64_t end) {
  const Floats most = broadcast(127.0f);
  for (int64_t i = begin; i < end; i += kLanes) {
    const int64_t count = end - i;
    const Floats x = load_floats(gate + i, count);
    const Floats power = x * -1.44269504f;  // e^-x = 2^power, which exp2 knows up to 2^127
    const Floats silu = power > most ? Floats{} : x / (1.0f + exp2(power));
    store_floats(gate + i, round(silu) * load_floats(up + i, count), count);
  }
}

}  // namespace

at::Tensor swiglu(const at::Tensor& input, const at::Tensor& gate_weight, const at::Tensor& up_weight,
                  const at::Tensor& down_weight, int64_t num_inner, int64_t num_outputs) {
  at::Tensor gate = packed_linear(input, gate_weight, {}, num_inner);
  const at::Tensor up = packed_linear(input, up_weight, {}, num_inner);
  check(gate, "input");
  Element* gates = gate.mutable_data_ptr<Element>();
  const Element* ups = up.const_data_ptr<Element>();
  at::parallel_for(0, gate.numel(), kThreadElements,
                   [&](int64_t begin, int64_t end) { gate_with(gates, ups, begin, end); });
  return packed_linear(gate, down_weight, {}, num_outputs);
}

}  // namespace kvferry

TORCH_LIBRARY_FRAGMENT(kvferry, library) {
  // All tensors but packed weights are bfloat16.
  // input / sqrt(mean(input^2) + epsilon) * (weight + offset) along the last dimension; round_first: the
  // quotient is rounded before it is scaled.
  library.def("rms_norm(Tensor input, Tensor weight, float epsilon, float offset, bool round_first) -> Tensor");
  // query, key: [1, heads, tokens, head_dim]; cos, sin: [1, tokens, head_dim]. Turns element i with element
  // i + head_dim / 2.
  library.def("rotary(Tensor query, Tensor key, Tensor cos, Tensor sin) -> (Tensor, Tensor)");
  // down(silu(gate(input)) * up(input)), each weight packed by pack_linear.
  library.def(
      "swiglu(Tensor input, Tensor gate_weight, Tensor up_weight, Tensor down_weight, int num_inner, "
      "int num_outputs) -> Tensor");
}

TORCH_LIBRARY_IMPL(kvferry, CPU, library) {
  library.impl("rms_norm", &kvferry::rms_norm);
  library.impl("rotary", &kvferry::rotary);
  library.impl("swiglu", &kvferry::swiglu);
}
