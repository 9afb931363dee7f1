// Chooses a token of one row of logits. engine/truncation.py says what the parameters mean; this does the same
// row by row. A cutoff is found by bisection: how much lies above a threshold is told by one pass over the row,
// and only what lies between the last two thresholds is sorted.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "simd.h"

namespace kvferry {

constexpr int64_t kPiece = 128;
constexpr int64_t kMaxSorted = 256, kMaxBisections = 24;
constexpr double kLog2E = 1.4426950408889634;

// A row of the operator's `parameters`.
struct Parameters {
  double drawn, inverse_temperature, top_k, top_p, min_p;
};

struct Amount {
  double mass = 0;
  int64_t count = 0;
};

inline bool is_zero(Ints values) {
  const Ints zeros{};
  return std::memcmp(&values, &zeros, sizeof(Ints)) == 0;
}

// One row. Memory is kept from row to row.
class Row {
 public:
  // False where the largest logit is not finite or any is not a number.
  template <typename T>
  bool read(const T* from, int64_t size) {
    num_pieces_ = (size + kPiece - 1) / kPiece;
    logits_.resize(num_pieces_ * kPiece);
    weights_.resize(logits_.size());
    largest_.resize(num_pieces_);
    Ints broken{};
    for (int64_t piece = 0; piece < num_pieces_; ++piece) {
      float* to = logits_.data() + piece * kPiece;
      T padded[kPiece];
      const T* source = from + piece * kPiece;
      if (size - piece * kPiece < kPiece) {
        std::fill(std::copy(source, from + size, padded), padded + kPiece, static_cast<T>(kNegativeInfinity));
        source = padded;
      }
      Floats most = broadcast(kNegativeInfinity);
      for (int64_t i = 0; i < kPiece; i += kLanes) {
        const Floats values = to_floats(source + i);
        broken |= values != values;
        most = larger(values, most);
        store(to + i, values);
      }
      largest_[piece] = max_of(most)[0];
    }
    most_ = *std::max_element(largest_.begin(), largest_.end());
    return is_zero(broken) && std::isfinite(most_);
  }

  int64_t choose(const Parameters& parameters) {
    if (parameters.inverse_temperature == 0) return first_largest();
    scale_ = static_cast<float>(parameters.inverse_temperature * kLog2E);
    const double total = weigh();
    if (parameters.top_k > 0 || parameters.top_p < 1 || parameters.min_p > 0) truncate(parameters, total);
    return draw(parameters.drawn);
  }

 private:
  template <typename F>
  void for_each_equal(float value, F call) const {
    for (int64_t piece = 0; piece < num_pieces_; ++piece) {
      if (largest_[piece] < value) continue;
      Ints found{};
      for (int64_t i = piece * kPiece; i < (piece + 1) * kPiece; i += kLanes) {
        found |= load<Floats>(&logits_[i]) == value;
      }
      if (is_zero(found)) continue;
      for (int64_t i = piece * kPiece; i < (piece + 1) * kPiece; ++i) {
        if (logits_[i] == value && !call(i)) return;
      }
    }
  }

  int64_t first_largest() const {
    int64_t first = 0;
    for_each_equal(most_, [&](int64_t i) {
      first = i;
      return false;
    });
    return first;
  }

  Floats weight_of(Floats logits) const { return exp2((logits - most_) * scale_); }

  // Weights relative to the largest; returns their sum.
  double weigh() {
    double total = 0;
    for (int64_t piece = 0; piece < num_pieces_; ++piece) {
      Floats sum{};
      for (int64_t i = piece * kPiece; i < (piece + 1) * kPiece; i += kLanes) {
        const Floats weights = weight_of(load<Floats>(&logits_[i]));
        sum += weights;
        store(&weights_[i], weights);
      }
      total += sum_of(sum);
    }
    return total;
  }

  Amount from(float threshold) const {
    Amount amount;
    Ints count{};
    for (int64_t piece = 0; piece < num_pieces_; ++piece) {
      if (largest_[piece] < threshold) continue;
      Floats mass{};
      for (int64_t i = piece * kPiece; i < (piece + 1) * kPiece; i += kLanes) {
        const Ints above = load<Floats>(&logits_[i]) >= threshold;  // -1 in every lane where it is so
        mass += bits<Floats>(load<Ints>(&weights_[i]) & above);
        count -= above;
      }
      amount.mass += sum_of(mass);
    }
    for (int lane = 0; lane < kLanes; ++lane) amount.count += count[lane];
    return amount;
  }

  // From the largest down, as many as it takes to reach a count or a mass. Tokens without weight are never
  // drawn: a cutoff below them is none. Returns what is kept, and sets the cutoff.
  template <typename F>
  Amount cut(F reached) {
    float low = most_ - 127 / scale_, high = std::nextafter(most_, -kNegativeInfinity);  // one above the largest
    Amount at_low = from(low), at_high;
    if (!reached(at_low)) return at_low;
    for (int64_t i = 0; i < kMaxBisections && at_low.count - at_high.count > kMaxSorted; ++i) {
      const float middle = low + (high - low) / 2;
      if (!(middle > low && middle < high)) break;
      const Amount amount = from(middle);
      (reached(amount) ? low : high) = middle;
      (reached(amount) ? at_low : at_high) = amount;
    }
    between_.clear();
    for (int64_t piece = 0; piece < num_pieces_; ++piece) {
      if (largest_[piece] < low) continue;
      for (int64_t i = piece * kPiece; i < (piece + 1) * kPiece; ++i) {
        if (logits_[i] >= low && logits_[i] < high) between_.emplace_back(logits_[i], weights_[i]);
      }
    }
    std::sort(between_.begin(), between_.end(), std::greater<>());
    Amount kept = at_high;
    num_equal_ = 0;
    threshold_ = high;
    for (const auto& [logit, weight] : between_) {
      num_equal_ = logit == threshold_ ? num_equal_ + 1 : 1;
      threshold_ = logit;
      kept.mass += weight;
      kept.count += 1;
      if (reached(kept)) break;
    }
    return kept;
  }

  void truncate(const Parameters& parameters, double total) {
    threshold_ = kNegativeInfinity;
    num_equal_ = logits_.size();
    if (parameters.top_k > 0) {
      total = cut([&](const Amount& amount) { return amount.count >= parameters.top_k; }).mass;
    }
    if (parameters.top_p < 1) {
      cut([&](const Amount& amount) { return amount.mass >= parameters.top_p * total; });
    }
    const double lowest = most_ + std::log(parameters.min_p) / parameters.inverse_temperature;
    if (static_cast<float>(lowest) > threshold_) {
      threshold_ = static_cast<float>(lowest);
      num_equal_ = logits_.size();
    }
    // Of equal tokens the lower ids come first.
    int64_t num_left = num_equal_;
    for_each_equal(threshold_, [&](int64_t i) {
      if (num_left-- <= 0) weights_[i] = 0;
      return true;
    });
    for (int64_t piece = 0; piece < num_pieces_; ++piece) {
      for (int64_t i = piece * kPiece; i < (piece + 1) * kPiece; i += kLanes) {
        const Ints above = load<Floats>(&logits_[i]) >= threshold_;
        store(&weights_[i], load<Ints>(&weights_[i]) & above);
      }
    }
  }

  // The first token at which the running sum exceeds its share of the whole; at most the last with a weight.
  int64_t draw(double drawn) {
    running_.resize(num_pieces_);
    double sum = 0;
    for (int64_t piece = 0; piece < num_pieces_; ++piece) {
      Floats weights{};
      for (int64_t i = piece * kPiece; i < (piece + 1) * kPiece; i += kLanes) weights += load<Floats>(&weights_[i]);
      sum += sum_of(weights);
      running_[piece] = sum;
    }
    const double target = drawn * sum;
    int64_t piece = 0;
    while (running_[piece] <= target && running_[piece] < sum) ++piece;
    double before = piece == 0 ? 0 : running_[piece - 1];
    int64_t last = piece * kPiece;
    for (int64_t i = piece * kPiece; i < (piece + 1) * kPiece; ++i) {
      if (weights_[i] == 0) continue;
      last = i;
      before += weights_[i];
      if (before > target) break;
    }
    return last;
  }

  int64_t num_pieces_ = 0;
  float most_ = 0, scale_ = 0, threshold_ = 0;
  int64_t num_equal_ = 0;  // of those equal to the threshold so many are kept
  std::vector<float> logits_, weights_, largest_;
  std::vector<double> running_;
  std::vector<std::pair<float, float>> between_;  // logit and weight
};

}  // namespace kvferry
