// A call of the operator, the pieces it is cut into, and the memory to do one in.
#pragma once

#include <vector>

#include "simd.h"

namespace kvferry {

inline int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// What all tiles of a call share. Strides in elements; head_dim is contiguous everywhere.
template <typename T>
struct Call {
  const T* query;
  int64_t query_token_stride, query_head_stride;
  const T* keys;
  const T* values;
  int64_t block_stride, token_stride, head_stride;
  T* out;  // [num_tokens, num_heads, head_dim]
  int64_t num_heads, group, head_dim, block_size;  // group: query heads that share a key head
  float scale, softcap;                            // softcap 0: none
  int64_t window;                                  // keys a query sees, itself included
};

// One piece of work: some queries of one sequence, for some key heads, over some of the keys.
struct Tile {
  int64_t first_row;       // of the packed batch
  int64_t first_position;  // of that row's token in its sequence
  int64_t num_queries;
  int64_t first_head, num_heads;  // key heads
  int64_t first_key, end_key;
  const int32_t* blocks;  // the sequence's block table
  int64_t partial;        // where to leave an unfinished result; -1: the keys are all here
};

// The running softmax of one query and head. Weights, and the sums of values weighted with them, are
// relative to 2^maximum.
struct Running {
  Floats maximum = broadcast(kNegativeInfinity);  // the same in all lanes
  Floats weight{};                                // by lane: the sum of the weights is the sum of the lanes
};

// Working memory of one thread, kept between calls.
class Scratch {
 public:
  // Memory for `count` values of T.
  template <typename T>
  T* take(int64_t count) {
    const int64_t first = used_;
    used_ += (count * sizeof(T) + sizeof(Line) - 1) / sizeof(Line);
    return reinterpret_cast<T*>(lines_.data() + first);
  }
  // Calls `lay_out` to learn the size, then again to hand out the memory.
  template <typename F>
  void prepare(F lay_out) {
    used_ = 0;
    lay_out();
    if (static_cast<int64_t>(lines_.size()) < used_) lines_.resize(used_);
    used_ = 0;
    lay_out();
  }

 private:
  struct alignas(64) Line {
    char bytes[64];
  };
  std::vector<Line> lines_;
  int64_t used_ = 0;
};

}  // namespace kvferry
