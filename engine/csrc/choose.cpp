// torch.ops.kvferry.choose: one token for each row of logits.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "choice_row.h"

namespace kvferry {
namespace {

int64_t choose_one(Row& row, const at::Tensor& logits, const Parameters& parameters) {
  const auto choose = [&](const auto* from) -> int64_t {
    return row.read(from, logits.size(0)) ? row.choose(parameters) : -1;
  };
  switch (logits.scalar_type()) {
    case at::kFloat:
      return choose(logits.const_data_ptr<float>());
    case at::kBFloat16:
      return choose(logits.const_data_ptr<c10::BFloat16>());
    default:
      return choose(logits.const_data_ptr<c10::Half>());
  }
}

at::Tensor choose(at::TensorList rows, const at::Tensor& parameters) {
  const int64_t num_rows = rows.size();
  TORCH_CHECK(parameters.scalar_type() == at::kDouble && parameters.is_contiguous() && parameters.dim() == 2 &&
                  parameters.size(0) == num_rows && parameters.size(1) == 5,
              "expected float64 parameters [", num_rows, ", 5], got ", parameters.sizes());
  for (const at::Tensor& row : rows) {
    TORCH_CHECK(row.dim() == 1 && row.size(0) > 0 && row.is_contiguous(), "expected rows of logits");
    TORCH_CHECK(row.scalar_type() == at::kFloat || row.scalar_type() == at::kBFloat16 ||
                    row.scalar_type() == at::kHalf,
                "cannot choose from ", row.scalar_type());
  }
  at::Tensor chosen = at::empty({num_rows}, parameters.options().dtype(at::kLong));
  const auto* fields = reinterpret_cast<const Parameters*>(parameters.const_data_ptr<double>());
  int64_t* to = chosen.mutable_data_ptr<int64_t>();
  at::parallel_for(0, num_rows, 1, [&](int64_t begin, int64_t end) {
    static thread_local Row row;
    for (int64_t i = begin; i < end; ++i) to[i] = choose_one(row, rows[i], fields[i]);
  });
  return chosen;
}

}  // namespace
}  // namespace kvferry

TORCH_LIBRARY_FRAGMENT(kvferry, library) {
  // rows: logits [vocab_size], float32, bfloat16 or float16 each; parameters: float64 [rows, 5]: the random
  // number, the inverse temperature (0: greedy), top_k (0: all), top_p, min_p. Returns int64 [rows]; -1 where
  // the largest logit is not finite or any is not a number.
  library.def("choose(Tensor[] rows, Tensor parameters) -> Tensor");
}

TORCH_LIBRARY_IMPL(kvferry, CPU, library) { library.impl("choose", &kvferry::choose); }
