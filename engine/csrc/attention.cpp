// torch.ops.kvferry.paged_attention: writes a step's keys and values into the cache's blocks, then
// attends over the blocks. The work is cut into tiles that threads take one after the other.

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <atomic>
#include <memory>

#include "operators.h"
#include "tile.h"

namespace kvferry {
namespace {

constexpr int64_t kPrefillRows = 384;  // rows of a tile of several queries: packing keys is paid back
constexpr int64_t kMinSplitKeys = 2 * kTileKeys;

struct Batch {
  const int32_t* starts;   // [num_sequences + 1]: the packed rows of each sequence
  const int32_t* lengths;  // [num_sequences]: tokens in the cache, those of this step included
  const int32_t* tables;   // [num_sequences, max_blocks]
  int64_t num_sequences, max_blocks;
};

// A single-query tile whose keys are shared out to several threads: their partial results lie
// `num_rows` apart from `first_partial` on.
struct Merge {
  Tile tile;
  int64_t first_partial, count, num_rows;
};

struct Plan {
  std::vector<Tile> tiles;
  std::vector<Merge> merges;
  int64_t max_rows = 0, max_heads = 0, num_partials = 0;
};

// Tiles of several queries go first: they are long, and end evenly when short ones follow. A tile of one
// query takes all key heads, so that it reads the cache from end to end, unless threads would be idle.
template <typename T>
Plan make_plan(const Batch& batch, const Call<T>& call, int64_t num_kv_heads, int64_t num_threads) {
  Plan plan;
  const int64_t max_queries = std::max<int64_t>(1, kPrefillRows / call.group);
  int64_t num_single = 0;
  for (int64_t s = 0; s < batch.num_sequences; ++s) {
    const int64_t count = batch.starts[s + 1] - batch.starts[s];
    num_single += count == 1;
    if (count == 1) continue;
    for (int64_t last = count; last > 0; last -= max_queries) {  // the longest of a sequence first
      const int64_t first = std::max<int64_t>(0, last - max_queries);
      const int64_t position = batch.lengths[s] - count + first;
      for (int64_t head = 0; head < num_kv_heads; ++head) {
        plan.tiles.push_back({batch.starts[s] + first, position, last - first, head, 1,
                              std::max<int64_t>(0, position + 1 - call.window), position + last - first,
                              batch.tables + s * batch.max_blocks, -1});
      }
      plan.max_rows = std::max(plan.max_rows, (last - first) * call.group);
      plan.max_heads = 1;
    }
  }
  if (num_single == 0) return plan;
  const int64_t wanted = num_threads == 1 ? 1 : (2 * num_threads + num_single - 1) / num_single;
  const int64_t heads = (num_kv_heads + std::min(wanted, num_kv_heads) - 1) / std::min(wanted, num_kv_heads);
  const int64_t max_splits = std::max<int64_t>(1, wanted * heads / num_kv_heads);
  plan.max_rows = std::max(plan.max_rows, call.group);
  plan.max_heads = std::max(plan.max_heads, heads);
  for (int64_t s = 0; s < batch.num_sequences; ++s) {
    if (batch.starts[s + 1] - batch.starts[s] != 1) continue;
    const int64_t end = batch.lengths[s];
    const int64_t begin = std::max<int64_t>(0, end - call.window);
    const int64_t splits = std::clamp<int64_t>((end - begin) / kMinSplitKeys, 1, max_splits);
    const int64_t share = round_up((end - begin + splits - 1) / splits, kTileKeys);
    for (int64_t head = 0; head < num_kv_heads; head += heads) {
      Tile tile{batch.starts[s], end - 1, 1, head, std::min(heads, num_kv_heads - head), begin, end,
                batch.tables + s * batch.max_blocks, -1};
      if (splits == 1) {
        plan.tiles.push_back(tile);
        continue;
      }
      Merge merge{tile, plan.num_partials, 0, tile.num_heads * call.group};
      for (int64_t key = begin; key < end; key += share, ++merge.count) {
        tile.first_key = key;
        tile.end_key = std::min(end, key + share);
        tile.partial = plan.num_partials;
        plan.num_partials += merge.num_rows;
        plan.tiles.push_back(tile);
      }
      plan.merges.push_back(merge);
    }
  }
  return plan;
}

template <typename T>
void merge_partials(const Merge& merge, const Call<T>& call, const float* sums, const Running* partials) {
  for (int64_t row = 0; row < merge.num_rows; ++row) {
    const int64_t first_head = merge.tile.first_head * call.group;
    T* to = call.out + (merge.tile.first_row * call.num_heads + first_head + row) * call.head_dim;
    const Running* results = partials + merge.first_partial + row;
    const float* values = sums + (merge.first_partial + row) * call.head_dim;
    Floats maximum = broadcast(kNegativeInfinity), weight{};
    for (int64_t i = 0; i < merge.count; ++i) maximum = larger(maximum, results[i * merge.num_rows].maximum);
    float total[256] = {};
    for (int64_t i = 0; i < merge.count; ++i) {
      const Floats factor = exp2(results[i * merge.num_rows].maximum - maximum);
      weight += results[i * merge.num_rows].weight * factor;
      const float* value = values + i * merge.num_rows * call.head_dim;
      for (int64_t d = 0; d < call.head_dim; ++d) total[d] += value[d] * factor[0];
    }
    const float divisor = 1.0f / sum_of(weight);
    for (int64_t d = 0; d < call.head_dim; ++d) to[d] = static_cast<T>(total[d] * divisor);
  }
}

template <typename T>
void attend(const Batch& batch, const Call<T>& call, int64_t num_kv_heads) {
  const int64_t num_threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  const Plan plan = make_plan(batch, call, num_kv_heads, num_threads);
  std::vector<float> sums(plan.num_partials * call.head_dim);
  std::vector<Running> partials(plan.num_partials);
  const int64_t num_tiles = plan.tiles.size();
  std::atomic<int64_t> next{0};
  at::parallel_for(0, std::min(num_threads, num_tiles), 1, [&](int64_t, int64_t) {
    static thread_local Scratch scratch;
    TileWorker<T> worker(call, plan.max_rows, plan.max_heads, scratch);
    for (int64_t i = next++; i < num_tiles; i = next++) {
      const Tile& following = plan.tiles[std::min(i + num_threads, num_tiles - 1)];
      worker.run(plan.tiles[i], following, sums.data(), partials.data());
    }
  });
  for (const Merge& merge : plan.merges) merge_partials(merge, call, sums.data(), partials.data());
}

// Copies row t of `from` [1, heads, tokens, head_dim] into slot slots[t] of `cache`.
template <typename T>
void write_cache(const at::Tensor& from, const int64_t* slots, const at::Tensor& cache) {
  const int64_t block_size = cache.size(1), num_heads = from.size(1), row_bytes = from.size(3) * sizeof(T);
  const int64_t from_head = from.stride(1), from_token = from.stride(2);
  const int64_t block = cache.stride(0), token = cache.stride(1), head = cache.stride(2);
  const T* source = from.const_data_ptr<T>();
  T* target = cache.mutable_data_ptr<T>();
  at::parallel_for(0, from.size(2), 256, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      T* to = target + slots[t] / block_size * block + slots[t] % block_size * token;
      for (int64_t h = 0; h < num_heads; ++h) {
        std::memcpy(to + h * head, source + t * from_token + h * from_head, row_bytes);
      }
    }
  });
}

void check(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
           const at::Tensor& key_cache, const at::Tensor& value_cache, const at::Tensor& slots,
           const at::Tensor& starts, const at::Tensor& lengths, const at::Tensor& tables) {
  const int64_t head_dim = key_cache.size(3), tokens = query.size(2), kv_heads = key_cache.size(2);
  TORCH_CHECK(head_dim % 8 == 0 && head_dim <= 256, "head size ", head_dim, " is no multiple of 8 up to 256");
  for (const at::Tensor& t : {query, key, value}) {
    TORCH_CHECK(t.dim() == 4 && t.size(0) == 1 && t.size(2) == tokens && t.size(3) == head_dim &&
                    t.stride(3) == 1 && t.scalar_type() == key_cache.scalar_type(),
                "expected [1, heads, ", tokens, ", ", head_dim, "] of the cache's dtype, got ", t.sizes(),
                " of ", t.scalar_type());
  }
  TORCH_CHECK(key.size(1) == kv_heads && value.size(1) == kv_heads && query.size(1) % kv_heads == 0,
              "heads do not fit the cache's ", kv_heads);
  TORCH_CHECK(key_cache.stride(3) == 1 && key_cache.sizes() == value_cache.sizes() &&
                  key_cache.strides() == value_cache.strides(),
              "key and value cache must have one layout");
  TORCH_CHECK(slots.scalar_type() == at::kLong && slots.numel() == tokens && slots.is_contiguous(),
              "slots must be ", tokens, " contiguous int64");
  const int64_t num_sequences = lengths.numel();
  for (const at::Tensor& t : {starts, lengths, tables}) {
    TORCH_CHECK(t.scalar_type() == at::kInt && t.is_contiguous(), "step metadata must be contiguous int32");
  }
  TORCH_CHECK(starts.numel() == num_sequences + 1 && tables.dim() == 2 && tables.size(0) == num_sequences,
              "step metadata of different lengths");
  TORCH_CHECK(starts.const_data_ptr<int32_t>()[0] == 0 &&
                  starts.const_data_ptr<int32_t>()[num_sequences] == tokens,
              "starts must lead from 0 to ", tokens);
}

// What would read or write outside the cache.
void check_bounds(const Batch& batch, const int64_t* slots, int64_t num_tokens, const at::Tensor& cache) {
  const int64_t num_blocks = cache.size(0), block_size = cache.size(1);
  for (int64_t t = 0; t < num_tokens; ++t) {
    TORCH_CHECK(slots[t] >= 0 && slots[t] < num_blocks * block_size, "slot ", slots[t],
                " is outside the cache");
  }
  for (int64_t s = 0; s < batch.num_sequences; ++s) {
    const int64_t count = batch.starts[s + 1] - batch.starts[s];
    TORCH_CHECK(count >= 1 && count <= batch.lengths[s], "sequence ", s, " has ", count, " queries");
    const int64_t used = (batch.lengths[s] + block_size - 1) / block_size;
    TORCH_CHECK(used <= batch.max_blocks, "sequence ", s, " is longer than its block table");
    for (int64_t b = 0; b < used; ++b) {
      const int64_t block = batch.tables[s * batch.max_blocks + b];
      TORCH_CHECK(block >= 0 && block < num_blocks, "block ", block, " is outside the cache");
    }
  }
}

}  // namespace

at::Tensor paged_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                           const at::Tensor& key_cache, const at::Tensor& value_cache,
                           const at::Tensor& slots, const at::Tensor& starts, const at::Tensor& lengths,
                           const at::Tensor& tables, double scale, int64_t window,
                           double softcap) {
  check(query, key, value, key_cache, value_cache, slots, starts, lengths, tables);
  const Batch batch{starts.const_data_ptr<int32_t>(), lengths.const_data_ptr<int32_t>(),
                    tables.const_data_ptr<int32_t>(), lengths.numel(), tables.size(1)};
  const int64_t num_tokens = query.size(2), num_heads = query.size(1), kv_heads = key.size(1);
  check_bounds(batch, slots.const_data_ptr<int64_t>(), num_tokens, key_cache);
  at::Tensor out = at::empty({1, num_tokens, num_heads, query.size(3)}, query.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, query.scalar_type(), "paged_attention", [&] {
    if constexpr (!std::is_same_v<scalar_t, double>) {
      write_cache<scalar_t>(key, slots.const_data_ptr<int64_t>(), key_cache);
      write_cache<scalar_t>(value, slots.const_data_ptr<int64_t>(), value_cache);
      const Call<scalar_t> call{query.const_data_ptr<scalar_t>(), query.stride(2), query.stride(1),
                                key_cache.const_data_ptr<scalar_t>(), value_cache.const_data_ptr<scalar_t>(),
                                key_cache.stride(0), key_cache.stride(1), key_cache.stride(2),
                                out.mutable_data_ptr<scalar_t>(), num_heads, num_heads / kv_heads,
                                query.size(3), key_cache.size(1), static_cast<float>(scale),
                                static_cast<float>(softcap), window > 0 ? window : int64_t{1} << 40};
      attend(batch, call, kv_heads);
    } else {
      TORCH_CHECK(false, "float64 is not supported");
    }
  });
  return out;
}

}  // namespace kvferry

TORCH_LIBRARY(kvferry, library) {
  // query, key, value: [1, heads, tokens, head_dim]; caches: [blocks, block_size, kv_heads, head_dim];
  // slots: int64 [tokens]; starts: int32 [sequences + 1]; lengths: int32 [sequences];
  // tables: int32 [sequences, max_blocks]. window 0: all keys; softcap 0: none.
  // Returns [1, tokens, heads, head_dim].
  library.def(
      "paged_attention(Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
      "Tensor slots, Tensor starts, Tensor lengths, Tensor tables, float scale, int window, float softcap) "
      "-> Tensor");
}

TORCH_LIBRARY_IMPL(kvferry, CPU, library) { library.impl("paged_attention", &kvferry::paged_attention); }
