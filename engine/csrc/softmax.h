// The running softmax of one query and head, over one tile of keys.
#pragma once

#include <algorithm>

#include "operand.h"
#include "work.h"

namespace kvferry {

constexpr float kLog2E = 1.44269504f;

inline void hide_outside(float* scores, int64_t begin, int64_t end, int64_t columns) {
  std::fill(scores, scores + std::min(begin, columns), kNegativeInfinity);
  std::fill(scores + std::max<int64_t>(end, 0), scores + columns, kNegativeInfinity);
}

// Divided by the softcap: the largest is 1.
inline void cap_scores(float* scores, int64_t columns, float factor) {
  for (int64_t n = 0; n < columns; n += kLanes) store(scores + n, tanh(load<Floats>(scores + n) * factor));
}

// Turns the scores of columns [begin, end) into weights relative to 2^maximum, the others' into 0.
// Returns what the sums so far must be multiplied by.
template <typename W, typename T>
float weigh(const Call<T>& call, float* scores, int64_t begin, int64_t end, int64_t columns, uint32_t* weights,
            Running& running) {
  const bool capped = call.softcap > 0;
  if (capped) cap_scores(scores, columns, call.scale / call.softcap);
  if (begin > 0 || end < columns) hide_outside(scores, begin, end, columns);
  Floats largest = load<Floats>(scores);
  for (int64_t n = kLanes; n < columns; n += kLanes) largest = larger(largest, load<Floats>(scores + n));
  // To base 2, which is cheaper to raise.
  const float scale = (capped ? call.softcap : call.scale) * kLog2E;
  const Floats maximum = larger(running.maximum, max_of(largest) * scale);
  const Floats base = maximum == kNegativeInfinity ? Floats{} : maximum;
  const Floats decay = exp2(running.maximum - base);
  Floats weight = running.weight * decay;
  for (int64_t n = 0; n < columns; n += kLanes) {
    const Floats p = exp2<W::kPowerTerms>(load<Floats>(scores + n) * scale - base);
    weight += p;
    W::store_weights(weights, n, p);
  }
  running.maximum = maximum;
  running.weight = weight;
  return decay[0];
}

}  // namespace kvferry
