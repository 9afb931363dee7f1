// Products of a single query's rows with keys and values as they lie in the cache. For so few rows, packing
// a tile of keys costs more than it saves.
#pragma once

#include <algorithm>

#include "operand.h"

namespace kvferry {

constexpr int kSingleRows = 4;  // query heads at once: with their operands their sums must fit the registers
constexpr int kKeysAtOnce = 4;  // that share each load of a query's words

// Lane i: the sum of a[i] and its partner a[i ^ Step] where i lacks Step, the same of b where it has it.
template <int Step, int... I>
inline Floats fold(Floats a, Floats b, std::integer_sequence<int, I...>) {
  using Same = std::integer_sequence<int, ((I & Step) ? kLanes + I : I)...>;
  using Other = std::integer_sequence<int, ((I & Step) ? kLanes + (I ^ Step) : I ^ Step)...>;
  const Ints same = {((I & Step) ? kLanes + I : I)...};
  const Ints other = {((I & Step) ? kLanes + (I ^ Step) : I ^ Step)...};
  const Words x = bits<Words>(a), y = bits<Words>(b);
  return bits<Floats>(shuffle(x, y, Same{}, same)) + bits<Floats>(shuffle(x, y, Other{}, other));
}

// Of 2 Step vectors: lane i of the result sums, in vector i % (2 Step), the lanes that are equal to i modulo
// 2 Step. With Step = kLanes / 2 that is each vector's whole sum.
template <int Step>
inline Floats fold_all(const Floats* vectors) {
  if constexpr (Step == 0) {
    return vectors[0];
  } else {
    Floats half[Step];
#pragma GCC unroll 8
    for (int i = 0; i < Step; ++i) {
      half[i] = fold<Step>(vectors[i], vectors[i + Step], std::make_integer_sequence<int, kLanes>{});
    }
    return fold_all<Step / 2>(half);
  }
}

// Rows of the cache: row n begins at `base + tokens[n]`; those that are needed next are fetched meanwhile.
template <typename T>
struct CacheRows {
  const T* base;
  const int64_t* tokens;
  const T* base_ahead;
  const int64_t* tokens_ahead;
};

// scores[r][n] = query row r times key n, for kLanes keys from `first` on.
// query: [Rows, words of head_dim, padded with zeros to whole vectors].
template <typename W, int Rows>
void score_keys(const uint32_t* query, int64_t query_stride, const CacheRows<typename W::Element>& keys,
                int64_t first, int64_t head_dim, float* scores, int64_t scores_stride) {
  constexpr int kGroups = kLanes / kKeysAtOnce, kElements = kLanes * W::kPerWord;
  Floats folded[Rows][kGroups];
#pragma GCC unroll 4
  for (int group = 0; group < kGroups; ++group) {
    Floats sums[Rows][kKeysAtOnce] = {};
    const auto add = [&](int64_t d, auto load_key) {
      Words row[Rows];
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) row[r] = load<Words>(query + r * query_stride + d / W::kPerWord);
#pragma GCC unroll 4
      for (int i = 0; i < kKeysAtOnce; ++i) {
        const int64_t n = first + group + i * kGroups;
        __builtin_prefetch(keys.base_ahead + keys.tokens_ahead[n] + d, 0, 2);
        const Words key = load_key(keys.base + keys.tokens[n] + d);
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) sums[r][i] = W::multiply_add(row[r], key, sums[r][i]);
      }
    };
    int64_t d = 0;
    for (; d + kElements <= head_dim; d += kElements) add(d, [](auto* key) { return W::load_row(key); });
    if (d < head_dim) add(d, [&](auto* key) { return W::load_row(key, head_dim - d); });
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      // Lane i is so far about key i % kGroups of the groups, and about the one of i / kGroups in its group.
      const auto lanes = std::make_integer_sequence<int, kLanes>{};
      folded[r][group] = fold<kLanes / 4>(fold<kLanes / 2>(sums[r][0], sums[r][2], lanes),
                                          fold<kLanes / 2>(sums[r][1], sums[r][3], lanes), lanes);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) store(scores + r * scores_stride + first, fold_all<kGroups / 2>(folded[r]));
}

// Columns [column, column + Vectors * kLanes) of: sums[r] = sums[r] * decay[r] + the values weighted.
template <typename W, int Rows, int Vectors>
void add_columns(const uint32_t* weights, int64_t weights_stride, const CacheRows<typename W::Element>& values,
                 int64_t num_words, int64_t column, int64_t head_dim, const float* decay, float* sums,
                 int64_t sums_stride) {
  Floats totals[Rows][Vectors];
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) {
      totals[r][v] = load<Floats>(sums + r * sums_stride + column + v * kLanes) * decay[r];
    }
  }
  for (int64_t word = 0; word < num_words; ++word) {
    const typename W::Element* rows[W::kPerWord];
#pragma GCC unroll 2
    for (int i = 0; i < W::kPerWord; ++i) {
      const int64_t n = word * W::kPerWord + i;
      rows[i] = values.base + values.tokens[n] + column;
      for (int v = 0; v < Vectors; v += W::kPerWord) {
        __builtin_prefetch(values.base_ahead + values.tokens_ahead[n] + column + v * kLanes, 0, 2);
      }
    }
    Words joined[Vectors];
    W::template join<Vectors>(rows, head_dim - column, joined);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      const uint32_t weight = weights[r * weights_stride + word];
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) totals[r][v] = W::multiply_add(weight, joined[v], totals[r][v]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) {
      store(sums + r * sums_stride + column + v * kLanes, totals[r][v]);
    }
  }
}

// weights: [Rows, num_words] words of neighbouring values' weights; sums: [Rows, head_dim, padded].
template <typename W, int Rows>
void add_values(const uint32_t* weights, int64_t weights_stride, const CacheRows<typename W::Element>& values,
                int64_t num_words, int64_t head_dim, const float* decay, float* sums, int64_t sums_stride) {
  int64_t column = 0;
  for (; column + kTileVectors * kLanes <= head_dim; column += kTileVectors * kLanes) {
    add_columns<W, Rows, kTileVectors>(weights, weights_stride, values, num_words, column, head_dim, decay, sums,
                                       sums_stride);
  }
  for (; column < head_dim; column += W::kPerWord * kLanes) {
    add_columns<W, Rows, W::kPerWord>(weights, weights_stride, values, num_words, column, head_dim, decay, sums,
                                      sums_stride);
  }
}

}  // namespace kvferry
