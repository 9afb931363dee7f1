// How elements are multiplied. An operand is packed into 32-bit words: one float, or, where the machine
// multiplies pairs of bfloat16 into float sums, two neighbours along the summed dimension.
#pragma once

#include <algorithm>

#include "simd.h"

namespace kvferry {

// Words of one float. T is how the cache holds it.
template <typename T>
struct SingleWords {
  using Element = T;
  static constexpr int kPerWord = 1;
  static constexpr int kPowerTerms = 6;  // of exp2, for weights of this precision

  static Floats multiply_add(Words a, Words b, Floats sum) { return sum + bits<Floats>(a) * bits<Floats>(b); }
  static Floats multiply_add(uint32_t a, Words b, Floats sum) { return multiply_add(broadcast(a), b, sum); }
  // kLanes words of a row, or the first `count`, the rest zero.
  static Words load_row(const T* from) { return bits<Words>(to_floats(from)); }
  static Words load_row(const T* from, int64_t count) {
    T padded[kLanes] = {};
    std::memcpy(padded, from, count * sizeof(T));
    return load_row(padded);
  }
  // The rows that share a word become one row of words, padded to a multiple of kLanes.
  static void join_rows(const T* const* rows, int64_t num_columns, uint32_t* to) {
    int64_t column = 0;
    for (; column + kLanes <= num_columns; column += kLanes) store(to + column, load_row(rows[0] + column));
    if (column < num_columns) store(to + column, load_row(rows[0] + column, num_columns - column));
  }
  // The first Vectors vectors of what join_rows makes; columns from num_columns on are zero.
  template <int Vectors>
  static void join(const T* const* rows, int64_t num_columns, Words* to) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) {
      const int64_t rest = num_columns - v * kLanes;
      to[v] = rest >= kLanes ? load_row(rows[0] + v * kLanes) : load_row(rows[0] + v * kLanes, rest);
    }
  }
  static void store_weights(uint32_t* row, int64_t column, Floats weights) { store(row + column, weights); }
};

#if defined(__AVX512BF16__)
// Words of two bfloat16: the even one in the low half.
struct PairedWords {
  using Element = c10::BFloat16;
  static constexpr int kPerWord = 2;
  static constexpr int kPowerTerms = 4;

  static Floats multiply_add(Words a, Words b, Floats sum) {
    return bits<Floats>(_mm512_dpbf16_ps(bits<__m512>(sum), bits<__m512bh>(a), bits<__m512bh>(b)));
  }
  static Floats multiply_add(uint32_t a, Words b, Floats sum) { return multiply_add(broadcast(a), b, sum); }
  static Words load_row(const Element* from) { return load<Words>(from); }
  static Words load_row(const Element* from, int64_t count) {
    return bits<Words>(_mm512_maskz_loadu_epi16(_bzhi_u32(~0u, count), from));
  }
  static void join_rows(const Element* const* rows, int64_t num_columns, uint32_t* to) {
    for (int64_t column = 0; column < num_columns; column += 2 * kLanes) {
      const Element* from[] = {rows[0] + column, rows[1] + column};
      Words joined[2];
      join<2>(from, num_columns - column, joined);
      store(to + column, joined[0]);
      if (column + kLanes < num_columns) store(to + column + kLanes, joined[1]);
    }
  }
  template <int Vectors>
  static void join(const Element* const* rows, int64_t num_columns, Words* to) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7,
                                         38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; v += 2) {
      const int64_t rest = std::min<int64_t>(2 * kLanes, num_columns - v * kLanes);
      const __m512i a = bits<__m512i>(load_row(rows[0] + v * kLanes, rest));
      const __m512i b = bits<__m512i>(load_row(rows[1] + v * kLanes, rest));
      to[v] = bits<Words>(_mm512_permutex2var_epi16(a, low, b));
      to[v + 1] = bits<Words>(_mm512_permutex2var_epi16(a, high, b));
    }
  }
  static void store_weights(uint32_t* row, int64_t column, Floats weights) {
    store(reinterpret_cast<Element*>(row) + column, _mm512_cvtneps_pbh(bits<__m512>(weights)));
  }
};
#endif

template <typename T>
struct WordsFor {
  using type = SingleWords<T>;
};
#if defined(__AVX512BF16__)
template <>
struct WordsFor<c10::BFloat16> {
  using type = PairedWords;
};
#endif

// C = (C * scale, or 0) + A B for Rows rows and Vectors vectors of columns, the sums held in registers.
// a: [Rows, depth] words, b: [depth, columns] words, c: [Rows, columns] floats; strides in elements.
template <typename W, int Rows, int Vectors>
inline void multiply_block(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride,
                           int64_t depth, const float* scale, float* c, int64_t c_stride) {
  Floats sums[Rows][Vectors];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) {
      sums[r][v] = scale ? load<Floats>(c + r * c_stride + v * kLanes) * scale[r] : Floats{};
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    Words column[Vectors];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) column[v] = load<Words>(b + k * b_stride + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) {
        sums[r][v] = W::multiply_add(a[r * a_stride + k], column[v], sums[r][v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) store(c + r * c_stride + v * kLanes, sums[r][v]);
  }
}

// As multiply_block, for any multiple of kLanes columns.
template <typename W, int Rows>
void multiply_rows(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride, int64_t depth,
                   const float* scale, float* c, int64_t c_stride, int64_t num_columns) {
  int64_t column = 0;
  for (; column + kTileVectors * kLanes <= num_columns; column += kTileVectors * kLanes) {
    multiply_block<W, Rows, kTileVectors>(a, a_stride, b + column, b_stride, depth, scale, c + column,
                                          c_stride);
  }
  for (; column < num_columns; column += kLanes) {
    multiply_block<W, Rows, 1>(a, a_stride, b + column, b_stride, depth, scale, c + column, c_stride);
  }
}

// As multiply_rows, for 1 to kTileRows rows.
template <typename W>
void multiply(int64_t num_rows, const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride,
              int64_t depth, const float* scale, float* c, int64_t c_stride, int64_t num_columns) {
  static_assert(kTileRows == 6);
  constexpr decltype(&multiply_rows<W, 1>) by_rows[] = {
      multiply_rows<W, 1>, multiply_rows<W, 2>, multiply_rows<W, 3>,
      multiply_rows<W, 4>, multiply_rows<W, 5>, multiply_rows<W, 6>};
  by_rows[num_rows - 1](a, a_stride, b, b_stride, depth, scale, c, c_stride, num_columns);
}

}  // namespace kvferry
