// Products of a few rows with a packed weight: each weight is read once, in order, as fast as memory
// gives it, while the sums of all rows stay in registers.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>

#include "operand.h"

namespace kvferry {

// A panel holds the weights of kPanel outputs: for every word of the input, one word of each output.
constexpr int kPanelVectors = 2, kPanel = kPanelVectors * kLanes;

// Rows multiplied at once: their sums and the weights must fit the registers.
#if defined(__AVX512BF16__)
constexpr int kMaxRows = 14;
#elif defined(__AVX2__) && !defined(__AVX512F__)
constexpr int kMaxRows = 4;
#else
constexpr int kMaxRows = 12;
#endif

// How far ahead of its use a weight is asked for: the core's own prefetcher stops at every page. A panel
// that meets several parts of the rows is in the cache after the first; the last asks for the next panel.
constexpr int64_t kPrefetchBytes = 8 << 10, kMaxPanelAhead = 128 << 10;

// Inputs that are multiplied with every panel should stay in the second cache meanwhile.
constexpr int64_t kInputBytes = 512 << 10;

// Two neighbouring bfloat16, for machines that do not multiply such pairs.
struct WidenedPairs {
  using Element = c10::BFloat16;
  static constexpr int kPerWord = 2;

  static Floats multiply_add(uint32_t a, Words b, Floats sum) {
    sum += broadcast(bits<float>(a << 16)) * bits<Floats>(b << 16);
    return sum + broadcast(bits<float>(a & 0xffff0000u)) * bits<Floats>(b & 0xffff0000u);
  }
};

template <typename T>
struct LinearWords {
  using type = SingleWords<T>;
};
template <>
struct LinearWords<c10::BFloat16> {
#if defined(__AVX512BF16__)
  using type = PairedWords;
#else
  using type = WidenedPairs;
#endif
};

inline void store_rounded(float* to, Floats values) { store(to, values); }
inline void store_rounded(c10::BFloat16* to, Floats values) {
#if defined(__AVX512BF16__)
  store(to, _mm512_cvtneps_pbh(bits<__m512>(values)));
#else
  const Words word = bits<Words>(values);
  const Words nearest = (word + 0x7fff + ((word >> 16) & 1)) >> 16;
  const Words quiet = (word >> 16) | 0x40;  // a NaN must not round to an infinity
  store(to, __builtin_convertvector(values == values ? nearest : quiet, Shorts));
#endif
}

// What all pieces of a product share. Strides in elements.
template <typename T>
struct Product {
  const T* input;  // [num_rows, depth words]
  int64_t num_rows, input_stride, depth;
  const uint32_t* weight;  // [panels, depth, kPanel] words
  const T* bias;           // [num_outputs] or null
  T* out;                  // [num_rows, num_outputs]
  int64_t num_outputs;
};

// One panel for Rows rows from `row` on; asks for weights `ahead` bytes before it uses them.
template <typename T, int Rows>
void multiply_panel(const Product<T>& product, int64_t row, int64_t panel, int64_t ahead) {
  using W = typename LinearWords<T>::type;
  const T* input = product.input + row * product.input_stride;
  const uint32_t* weight = product.weight + panel * product.depth * kPanel;
  Floats sums[Rows][kPanelVectors] = {};
  for (int64_t k = 0; k < product.depth; ++k, weight += kPanel) {
    Words words[kPanelVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; ++v) {
      __builtin_prefetch(reinterpret_cast<const char*>(weight + v * kLanes) + ahead);
      words[v] = load<Words>(weight + v * kLanes);
    }
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const uint32_t word = load<uint32_t>(input + r * product.input_stride + k * W::kPerWord);
#pragma GCC unroll 4
      for (int v = 0; v < kPanelVectors; ++v) sums[r][v] = W::multiply_add(word, words[v], sums[r][v]);
    }
  }
  const int64_t first = panel * kPanel, count = std::min<int64_t>(kPanel, product.num_outputs - first);
  Floats bias[kPanelVectors] = {};
  if (product.bias) {
    T padded[kPanel] = {};
    std::copy_n(product.bias + first, count, padded);
    for (int v = 0; v < kPanelVectors; ++v) bias[v] = to_floats(padded + v * kLanes);
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
    T* to = product.out + (row + r) * product.num_outputs + first;
    T padded[kPanel];
    T* target = count == kPanel ? to : padded;
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; ++v) store_rounded(target + v * kLanes, sums[r][v] + bias[v]);
    if (count != kPanel) std::copy_n(padded, count, to);
  }
}

template <typename T, int... I>
inline void multiply_part(const Product<T>& product, int64_t row, int64_t count, int64_t panel,
                          int64_t ahead, std::integer_sequence<int, I...>) {
  constexpr decltype(&multiply_panel<T, 1>) by_rows[] = {multiply_panel<T, I + 1>...};
  by_rows[count - 1](product, row, panel, ahead);
}

// All rows for the panels [begin, end).
template <typename T>
void multiply_panels(const Product<T>& product, int64_t begin, int64_t end) {
  using W = typename LinearWords<T>::type;
  const int64_t row_bytes = product.depth * W::kPerWord * sizeof(T);
  const int64_t panel_bytes = product.depth * kPanel * sizeof(uint32_t);
  const int64_t rows_at_once = std::max<int64_t>(kMaxRows, kInputBytes / row_bytes);
  for (int64_t first = 0; first < product.num_rows; first += rows_at_once) {
    const int64_t num_rows = std::min(rows_at_once, product.num_rows - first);
    const int64_t num_parts = (num_rows + kMaxRows - 1) / kMaxRows;
    const int64_t last_ahead = num_parts > 1 && panel_bytes <= kMaxPanelAhead ? panel_bytes : kPrefetchBytes;
    for (int64_t panel = begin; panel < end; ++panel) {
      for (int64_t part = 0; part < num_parts; ++part) {  // of sizes that differ by one at most
        const int64_t from = num_rows * part / num_parts, to = num_rows * (part + 1) / num_parts;
        multiply_part(product, first + from, to - from, panel,
                      part + 1 == num_parts ? last_ahead : kPrefetchBytes,
                      std::make_integer_sequence<int, kMaxRows>{});
      }
    }
  }
}

}  // namespace kvferry
