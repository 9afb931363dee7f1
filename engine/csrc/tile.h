// Attention of one tile of queries over the paged keys and values of its sequence, tile of keys by tile
// of keys with a running softmax (Milakov and Gimelshein 2018; Dao et al. 2022, FlashAttention).
#pragma once

#include <algorithm>

#include "operand.h"
#include "single.h"
#include "softmax.h"

namespace kvferry {

// Keys and values of a tile stay in the nearest caches; what is fetched ahead of a single query must, too.
constexpr int64_t kTileKeys = 128, kSingleTileKeys = 64;

template <typename T>
class TileWorker {
  using W = typename WordsFor<T>::type;

 public:
  TileWorker(const Call<T>& call, int64_t max_rows, int64_t max_heads, Scratch& scratch)
      : call_(call),
        depth_(call.head_dim / W::kPerWord),
        row_(round_up(depth_, kLanes)),
        width_(round_up(call.head_dim, kLanes * W::kPerWord)),
        max_rows_(max_rows) {
    scratch.prepare([&] {
      query_ = scratch.take<uint32_t>(max_heads * max_rows * row_);
      sums_ = scratch.take<float>(max_heads * max_rows * width_);
      running_ = scratch.take<Running>(max_heads * max_rows);
      keys_ = scratch.take<uint32_t>(depth_ * kTileKeys);
      values_ = scratch.take<uint32_t>(kTileKeys / W::kPerWord * width_);
      scores_ = scratch.take<float>(kTileRows * kTileKeys);
      weights_ = scratch.take<uint32_t>(kTileRows * kTileKeys);
    });
  }

  // Writes finished rows to call.out; unfinished ones to partial_sums [.., head_dim] and partials.
  // following: the tile that this thread is likely to run next.
  void run(const Tile& tile, const Tile& following, float* partial_sums, Running* partials) {
    num_rows_ = tile.num_queries * call_.group;
    for (int64_t head = 0; head < tile.num_heads; ++head) start(tile, head);
    const int64_t step = tile.num_queries == 1 ? kSingleTileKeys : kTileKeys;
    for (int64_t key = tile.first_key; key < tile.end_key; key += step) {
      num_keys_ = std::min(step, tile.end_key - key);
      find_tokens(tile, key, tokens_);
      const bool last = key + step >= tile.end_key;
      const Tile& next = last ? following : tile;
      find_tokens(next, last ? next.first_key : key + step, next_tokens_);
      for (int64_t head = 0; head < tile.num_heads; ++head) {
        look_ahead(tile, head, next);
        if (tile.num_queries == 1) {
          attend_single(tile, head, key);
          continue;
        }
        pack_keys(tile.first_head + head);
        pack_values(tile.first_head + head);
        in_shares(kTileRows, [&](int64_t row, int64_t count) { attend(tile, head, row, count, key); });
      }
    }
    for (int64_t head = 0; head < tile.num_heads; ++head) finish(tile, head, partial_sums, partials);
  }

 private:
  // Row r of a tile and key head is query r / group, head r % group of the heads that share the key head.
  const T* query_row(const Tile& tile, int64_t head, int64_t row) const {
    return call_.query + (tile.first_row + row / call_.group) * call_.query_token_stride +
           ((tile.first_head + head) * call_.group + row % call_.group) * call_.query_head_stride;
  }

  // Equal shares of the rows: 8 rows are two times 4, not 6 and 2.
  template <typename F>
  void in_shares(int64_t most, F call) const {
    for (int64_t row = 0; row < num_rows_;) {
      const int64_t shares = (num_rows_ - row + most - 1) / most;
      const int64_t count = (num_rows_ - row + shares - 1) / shares;
      call(row, count);
      row += count;
    }
  }

  void start(const Tile& tile, int64_t head) {
    for (int64_t row = 0; row < num_rows_; ++row) {
      const T* from = query_row(tile, head, row);
      uint32_t* to = query_ + (head * max_rows_ + row) * row_;
      for (int64_t word = 0; word < depth_; word += kLanes) {
        store(to + word, load_words(from + word * W::kPerWord, depth_ - word));
      }
      running_[head * max_rows_ + row] = Running{};
    }
    std::fill_n(sums_ + head * max_rows_ * width_, num_rows_ * width_, 0.0f);
  }

  void find_tokens(const Tile& tile, int64_t first_key, int64_t* tokens) {
    int64_t block = first_key / call_.block_size, slot = first_key % call_.block_size;
    const int64_t count = std::min(kTileKeys, tile.end_key - first_key);
    for (int64_t n = 0; n < count; ++n) {
      tokens[n] = tile.blocks[block] * call_.block_stride + slot * call_.token_stride;
      if (++slot == call_.block_size) {
        slot = 0;
        ++block;
      }
    }
    // What is computed for keys that are not there is not used.
    std::fill(tokens + count, tokens + round_up(count, kLanes), tokens[count - 1]);
  }

  // kLanes words of a row of which `count` are left.
  static Words load_words(const T* from, int64_t count) {
    return count >= kLanes ? W::load_row(from) : W::load_row(from, count * W::kPerWord);
  }

  // What is read after this head's keys and values, one row of which is fetched for each row read: the next
  // head's rows of this tile of keys, or the first head's of the next.
  void look_ahead(const Tile& tile, int64_t head, const Tile& next) {
    const bool last = head + 1 == tile.num_heads;
    const int64_t offset = (last ? next.first_head : tile.first_head + head + 1) * call_.head_stride;
    tokens_ahead_ = last ? next_tokens_ : tokens_;
    keys_ahead_ = call_.keys + offset;
    values_ahead_ = call_.values + offset;
  }

  // Into the second level cache: rows a power of two apart would drive each other from the first.
  void fetch(const T* row) const {
    for (int64_t d = 0; d < call_.head_dim; d += 64 / sizeof(T)) __builtin_prefetch(row + d, 0, 2);
  }

  // keys_: [depth, kTileKeys] words, zero beyond the last key.
  void pack_keys(int64_t head) {
    const T* from = call_.keys + head * call_.head_stride;
    for (int64_t n = 0; n < num_keys_; n += kLanes) {
      for (int i = 0; i < kLanes; ++i) fetch(keys_ahead_ + tokens_ahead_[n + i]);
      int64_t word = 0;
      if (n + kLanes <= num_keys_) {
        for (; word + kLanes <= depth_; word += kLanes) {
          Words rows[kLanes];
#pragma GCC unroll 16
          for (int i = 0; i < kLanes; ++i) rows[i] = W::load_row(from + tokens_[n + i] + word * W::kPerWord);
          transpose(rows);
#pragma GCC unroll 16
          for (int i = 0; i < kLanes; ++i) store(keys_ + (word + i) * kTileKeys + n, rows[i]);
        }
      }
      for (; word < depth_; word += kLanes) {
        Words rows[kLanes] = {};
        for (int i = 0; i < kLanes && n + i < num_keys_; ++i) {
          rows[i] = load_words(from + tokens_[n + i] + word * W::kPerWord, depth_ - word);
        }
        transpose(rows);
        for (int64_t i = 0; i < std::min<int64_t>(kLanes, depth_ - word); ++i) store(keys_ + (word + i) * kTileKeys + n, rows[i]);
      }
    }
  }

  // values_: [keys / kPerWord, width] words, zero beyond the last key and beyond head_dim.
  void pack_values(int64_t head) {
    static constexpr T kZeros[256] = {};
    const T* from = call_.values + head * call_.head_stride;
    for (int64_t n = 0; n < num_keys_; n += W::kPerWord) {
      const T* rows[W::kPerWord];
      for (int i = 0; i < W::kPerWord; ++i) {
        rows[i] = n + i < num_keys_ ? from + tokens_[n + i] : kZeros;
        fetch(values_ahead_ + tokens_ahead_[n + i]);
      }
      W::join_rows(rows, call_.head_dim, values_ + n / W::kPerWord * width_);
    }
  }

  // Brings `count` rows up to date with the packed tile of keys that starts at `first_key`.
  void attend(const Tile& tile, int64_t head, int64_t first, int64_t count, int64_t first_key) {
    const int64_t last_position = tile.first_position + (first + count - 1) / call_.group;
    const int64_t first_position = tile.first_position + first / call_.group;
    if (first_key > last_position || first_key + num_keys_ + call_.window <= first_position + 1) return;
    // The keys that the last row sees.
    const int64_t num_keys = std::min(num_keys_, last_position + 1 - first_key);
    const int64_t columns = round_up(num_keys, kLanes);
    multiply<W>(count, query_ + (head * max_rows_ + first) * row_, row_, keys_, kTileKeys, depth_,
                nullptr, scores_, kTileKeys, columns);
    float decay[kTileRows];
    for (int64_t r = 0; r < count; ++r) {
      const int64_t position = tile.first_position + (first + r) / call_.group;
      const int64_t begin = std::max<int64_t>(0, position + 1 - call_.window - first_key);
      const int64_t end = std::min(num_keys, position + 1 - first_key);
      decay[r] = weigh_row(r, begin, end, columns, running_[head * max_rows_ + first + r]);
    }
    multiply<W>(count, weights_, kTileKeys, values_, width_, (num_keys + W::kPerWord - 1) / W::kPerWord,
                decay, sums_ + (head * max_rows_ + first) * width_, width_, round_up(call_.head_dim, kLanes));
  }

  // As `attend`, all rows of a single query.
  void attend_single(const Tile& tile, int64_t head, int64_t first_key) {
    const int64_t offset = (tile.first_head + head) * call_.head_stride;
    const CacheRows<T> keys{call_.keys + offset, tokens_, keys_ahead_, tokens_ahead_};
    const CacheRows<T> values{call_.values + offset, tokens_, values_ahead_, tokens_ahead_};
    const int64_t columns = round_up(num_keys_, kLanes);
    in_shares(kSingleRows, [&](int64_t row, int64_t count) {
      const int64_t first = head * max_rows_ + row;
      by_count<kSingleRows>(count, [&](auto rows) {
        constexpr int Rows = decltype(rows)::value;
        for (int64_t n = 0; n < num_keys_; n += kLanes) {
          score_keys<W, Rows>(query_ + first * row_, row_, keys, n, call_.head_dim, scores_, kTileKeys);
        }
        float decay[Rows];
        for (int r = 0; r < Rows; ++r) decay[r] = weigh_row(r, 0, num_keys_, columns, running_[first + r]);
        add_values<W, Rows>(weights_, kTileKeys, values, (num_keys_ + W::kPerWord - 1) / W::kPerWord,
                            call_.head_dim, decay, sums_ + first * width_, width_);
      });
    });
  }

  float weigh_row(int64_t r, int64_t begin, int64_t end, int64_t columns, Running& running) {
    return weigh<W>(call_, scores_ + r * kTileKeys, begin, end, columns, weights_ + r * kTileKeys, running);
  }

  void finish(const Tile& tile, int64_t head, float* partial_sums, Running* partials) {
    for (int64_t row = 0; row < num_rows_; ++row) {
      const float* sums = sums_ + (head * max_rows_ + row) * width_;
      const Running& running = running_[head * max_rows_ + row];
      if (tile.partial >= 0) {
        const int64_t slot = tile.partial + head * num_rows_ + row;
        std::copy_n(sums, call_.head_dim, partial_sums + slot * call_.head_dim);
        partials[slot] = running;
        continue;
      }
      const int64_t query_head = (tile.first_head + head) * call_.group + row % call_.group;
      const int64_t out_row = (tile.first_row + row / call_.group) * call_.num_heads + query_head;
      T* to = call_.out + out_row * call_.head_dim;
      const float factor = 1.0f / sum_of(running.weight);
      for (int64_t d = 0; d < call_.head_dim; ++d) to[d] = static_cast<T>(sums[d] * factor);
    }
  }

  const Call<T>& call_;
  const int64_t depth_;     // words of a row of queries or keys
  const int64_t row_;       // the same, padded
  const int64_t width_;     // columns of a row of values, padded
  const int64_t max_rows_;  // rows of a tile and key head
  int64_t num_rows_ = 0, num_keys_ = 0;
  uint32_t* query_;    // [heads, rows, row]
  float* sums_;        // [heads, rows, width]
  Running* running_;   // [heads, rows]
  uint32_t* keys_;     // [depth, kTileKeys]
  uint32_t* values_;   // [kTileKeys / kPerWord, width]
  float* scores_;      // [kTileRows, kTileKeys]
  uint32_t* weights_;  // [kTileRows, kTileKeys / kPerWord], rows kTileKeys apart
  // Where the keys of this tile and of the next start in the cache, in elements.
  int64_t tokens_[kTileKeys] = {}, next_tokens_[kTileKeys] = {};
  const int64_t* tokens_ahead_ = tokens_;
  const T* keys_ahead_ = nullptr;
  const T* values_ahead_ = nullptr;
};

}  // namespace kvferry
