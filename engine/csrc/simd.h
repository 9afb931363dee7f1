// Vectors as wide as the machine's registers, in the compiler's own vector types, so that one source
// serves AVX-512, AVX2, NEON and what comes next. Intrinsics appear only where those types fall short:
// 16-bit floats.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

namespace kvferry {

// A multiplication keeps kTileRows x kTileVectors sums in registers, beside kTileVectors operands.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kTileRows = 6, kTileVectors = 4;
#elif defined(__AVX2__)
constexpr int kLanes = 8, kTileRows = 6, kTileVectors = 2;
#else
constexpr int kLanes = 4, kTileRows = 6, kTileVectors = 4;
#endif

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Shorts __attribute__((vector_size(kLanes * 2)));

template <typename V>
inline V load(const void* from) {
  V vector;
  std::memcpy(&vector, from, sizeof(V));
  return vector;
}

// The first `count` elements, the rest zero.
template <typename V, typename T>
inline V load_some(const T* from, int64_t count) {
  V vector{};
  std::memcpy(&vector, from, count * sizeof(T));
  return vector;
}

template <typename V>
inline void store(void* to, V vector) {
  std::memcpy(to, &vector, sizeof(V));
}

template <typename V, typename T>
inline V bits(T value) {
  static_assert(sizeof(V) == sizeof(T));
  V same;
  std::memcpy(&same, &value, sizeof(V));
  return same;
}

inline Floats broadcast(float value) { return value - Floats{}; }
inline Words broadcast(uint32_t value) { return value - Words{}; }

inline Words widen(Shorts shorts) { return __builtin_convertvector(shorts, Words); }

// kLanes elements as floats.
inline Floats to_floats(const float* from) { return load<Floats>(from); }
inline Floats to_floats(const c10::BFloat16* from) { return bits<Floats>(widen(load<Shorts>(from)) << 16); }
inline Floats to_floats(const c10::Half* from) {
#if defined(__AVX512F__)
  return bits<Floats>(_mm512_cvtph_ps(load<__m256i>(from)));
#elif defined(__F16C__) && defined(__AVX2__)
  return bits<Floats>(_mm256_cvtph_ps(load<__m128i>(from)));
#else
  Floats floats;
  for (int i = 0; i < kLanes; ++i) floats[i] = static_cast<float>(from[i]);
  return floats;
#endif
}

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// 2^x for x <= 127: the integer part goes into the exponent, the rest through the Taylor series of
// e^(x ln 2). With 6 terms the first omitted one is below one unit in the last place, with 4 below a tenth of
// that of a bfloat16. 0 where 2^x is denormal.
template <int Terms = 6>
inline Floats exp2(Floats x) {
  constexpr float kTerms[] = {1.0f,           6.9314718e-1f, 2.4022651e-1f, 5.5504109e-2f,
                              9.6181291e-3f, 1.3333558e-3f, 1.5403530e-4f};
  const Floats least = broadcast(-126.0f);
  const Floats rounder = broadcast(12582912.0f);  // 1.5 * 2^23: adding it leaves the nearest integer
  const Floats clamped = larger(x, least);
  const Floats rounded = clamped + rounder;
  const Floats f = clamped - (rounded - rounder);
  Floats p = broadcast(kTerms[Terms]);
#pragma GCC unroll 6
  for (int i = Terms - 1; i >= 0; --i) p = p * f + kTerms[i];
  const Ints exponent = (bits<Ints>(rounded) - bits<Ints>(rounder)) << 23;
  const Floats power = bits<Floats>(bits<Ints>(p) + exponent);
  return x < least ? Floats{} : power;
}

// tanh(x) = 1 - 2 / (e^2x + 1)
inline Floats tanh(Floats x) {
  const Floats doubled = x * 2.8853901f;  // 2 log2(e)
  const Floats most = broadcast(126.0f);
  return 1.0f - 2.0f / (exp2(doubled < most ? doubled : most) + 1.0f);
}

// Calls `call` with `count`, 1 to Most, as a constant.
template <int Most, typename F>
inline void by_count(int64_t count, F call) {
  if (count == Most) {
    call(std::integral_constant<int, Most>{});
  } else if constexpr (Most > 1) {
    by_count<Most - 1>(count, call);
  }
}

template <int... I>
inline Words shuffle(Words a, Words b, std::integer_sequence<int, I...>, Ints picked) {
#if defined(__clang__)
  (void)picked;
  return __builtin_shufflevector(a, b, I...);
#else
  return __builtin_shuffle(a, b, picked);
#endif
}

template <int Step, int... I>
inline Floats rotate(Floats x, std::integer_sequence<int, I...>) {
  return bits<Floats>(shuffle(bits<Words>(x), bits<Words>(x),
                              std::integer_sequence<int, ((I + Step) % kLanes)...>{},
                              Ints{((I + Step) % kLanes)...}));
}

// Combines all lanes pairwise; every lane holds the result.
template <typename F, int Step = kLanes / 2>
inline Floats reduce(Floats x, F combine) {
  if constexpr (Step == 0) {
    return x;
  } else {
    const Floats other = rotate<Step>(x, std::make_integer_sequence<int, kLanes>{});
    return reduce<F, Step / 2>(combine(x, other), combine);
  }
}

inline Floats max_of(Floats x) { return reduce(x, [](Floats a, Floats b) { return larger(a, b); }); }
inline float sum_of(Floats x) { return reduce(x, [](Floats a, Floats b) { return a + b; })[0]; }

// Swaps the off-diagonal Step x Step squares of every 2 Step x 2 Step square of rows.
template <int Step, int... I>
inline void swap_squares(Words* rows, std::integer_sequence<int, I...>) {
  using Low = std::integer_sequence<int, ((I & Step) ? kLanes + I - Step : I)...>;
  using High = std::integer_sequence<int, ((I & Step) ? kLanes + I : I + Step)...>;
  const Ints low = {((I & Step) ? kLanes + I - Step : I)...};
  const Ints high = {((I & Step) ? kLanes + I : I + Step)...};
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (i & Step) continue;
    const Words a = rows[i], b = rows[i + Step];
    rows[i] = shuffle(a, b, Low{}, low);
    rows[i + Step] = shuffle(a, b, High{}, high);
  }
}

// Transposes a square of kLanes x kLanes words.
inline void transpose(Words* rows) {
  using Lanes = std::make_integer_sequence<int, kLanes>;
  swap_squares<1>(rows, Lanes{});
  swap_squares<2>(rows, Lanes{});
  if constexpr (kLanes > 4) swap_squares<4>(rows, Lanes{});
  if constexpr (kLanes > 8) swap_squares<8>(rows, Lanes{});
}

}  // namespace kvferry
