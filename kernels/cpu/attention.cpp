// Causal attention over a paged KV cache: decode and prefill are one algorithm.
//
// A work item is (KV head, some queries, some key tiles); see attention_plan.h. Its rows are the
// queries of all heads that share the KV head, so each key and value is read once for all of them.
// A key tile is always keys [128 i, 128 i + 128) of the sequence; each tile gives every row a
// partial (max, sum, output), and partials are folded in ascending tile order: of few rows when all
// items are done, of many by the one item that goes through all tiles.
//
// NOTE: both do the same arithmetic in the same order, so a row's result is the same bits in every
// batch, chunking and number of threads.
//
// Source: Milakov and Gimelshein 2018 (online softmax); Dao et al. 2022 (FlashAttention);
// Flash-Decoding (split over keys).
#include "attention_plan.h"
#include "kernels.h"
#include "microkernel.h"
#include "prefetch.h"
#include "quantized_cache.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

namespace pdserve {
namespace {

constexpr int64_t kBlockRows = 48;        // rows whose scores are held at once: 24 KB
constexpr int64_t kMinRunForInPlace = 8;  // smaller blocks are copied together before P V
constexpr int64_t kLineFloats = kCacheLine / sizeof(float);

// Of an item: a query of one head. It sees keys [first, limit) of its sequence.
struct Row {
  int64_t first, limit;
  float* partial;  // where it is kept, or null
};

// T: what the caches hold, float or int8_t.
template <typename T>
class Attention {
 public:
  Attention(const AttentionArgs& args, const AttentionPlan& plan)
      : args_(args),
        plan_(plan),
        group_(args.num_heads / args.num_kv_heads),
        key_dim_(args.parts[0].keys.dim + args.parts[1].keys.dim),
        dim_(round_up<int64_t>(args.values.dim, kLanes)),
        run_(std::min(args.block_size, kTileKeys)) {}

  void run() {
    const auto &items = plan_.items(), &folds = plan_.folds();
    const auto num_items = static_cast<int64_t>(items.size());
    const auto num_folds = static_cast<int64_t>(folds.size());
    // Tiles of decode rows are all alike, and there are many.
    const int64_t chunk =
        plan_.has_even_items() ? std::clamp<int64_t>(num_items / (4 * num_threads()), 1, 16) : 1;
    parallel_dynamic(num_items, chunk, [&](int64_t begin, int64_t end) {
      Scratch scratch(*this);
      for (int64_t i = begin; i < end; ++i)
        compute(items[i], i + 1 < num_items ? &items[i + 1] : nullptr, scratch);
    });
    parallel_dynamic(num_folds, 8, [&](int64_t begin, int64_t end) {
      Scratch scratch(*this);
      for (int64_t i = begin; i < end; ++i) fold(folds[i], scratch);
    });
  }

 private:
  static constexpr bool kIsQuantized = std::is_same_v<T, int8_t>;

  struct Scratch {
    explicit Scratch(const Attention& a) {
      // NOTE: kept for the life of the thread; a fresh one would be paged in anew in every layer.
      thread_local std::vector<float> floats;
      thread_local std::vector<Row> kept_rows;
      const int64_t rows = std::max(kMaxItemRows, kMaxSplitQueries * a.group_);
      if (static_cast<int64_t>(kept_rows.size()) < rows) kept_rows.resize(rows);
      row = kept_rows.data();
      const std::pair<float**, int64_t> parts[] = {{&q, rows * a.key_dim_},
                                                   {&out, rows * a.dim_},
                                                   {&partial, kBlockRows * a.dim_},
                                                   {&keys, kTileKeys * a.key_dim_},
                                                   {&values, kTileKeys * a.dim_},
                                                   {&scores, kBlockRows * kTileKeys},
                                                   {&max, rows},
                                                   {&sum, rows},
                                                   {&tile_max, rows},
                                                   {&tile_sum, rows},
                                                   {&scales, kTileKeys}};
      int64_t wanted = kLineFloats;
      for (const auto& [part, size] : parts) wanted += round_up(size, kLineFloats);
      if (static_cast<int64_t>(floats.size()) < wanted) floats.resize(wanted);
      // NOTE: vectors that straddle two lines would take twice the time.
      auto at = round_up<uintptr_t>(reinterpret_cast<uintptr_t>(floats.data()), kCacheLine);
      for (const auto& [part, size] : parts) {
        *part = reinterpret_cast<float*>(at);
        at += round_up(size, kLineFloats) * sizeof(float);
      }
    }

    float *q, *out, *partial, *keys, *values, *scores, *max, *sum, *tile_max, *tile_sum, *scales;
    Row* row;
    Prefetches ahead;  // what this tile's values, and the next tile, are read from

    // The item whose first tile was prefetched by this thread; a hint, it may be gone.
    static const Item*& foreseen() {
      thread_local const Item* item = nullptr;
      return item;
    }
  };

  void compute(const Item& item, const Item* next_item, Scratch& s) const {
    const int64_t rows = item.num_rows;
    load_queries(item, s);
    const bool is_folded = !s.row[0].partial;
    if (is_folded) reset(rows, s);
    const int64_t end_tile = item.first_tile + item.num_tiles;
    for (int64_t tile = item.first_tile; tile < end_tile; ++tile) {
      const int64_t first_key = tile * kTileKeys;
      const int64_t num_keys = keys_of(item, tile);
      s.ahead.clear();
      if (tile == item.first_tile && Scratch::foreseen() != &item)
        foresee(item, tile, args_.values, s.ahead);
      if (tile + 1 < end_tile)
        foresee(item, tile + 1, s.ahead);
      else if (next_item)
        foresee(*next_item, next_item->first_tile, s.ahead);
      load_keys(item, first_key, num_keys, s);
      for (int64_t row = 0; row < rows; row += kBlockRows)
        compute_block(item, first_key, row, std::min(kBlockRows, rows - row), s);
    }
    Scratch::foreseen() = next_item;
    if (is_folded) store(item, s);
  }

  // Keys of a tile that some query of the item sees.
  int64_t keys_of(const Item& item, int64_t tile) const {
    return std::min(kTileKeys, plan_.members_of(item)->num_keys - tile * kTileKeys);
  }

  void foresee(const Item& item, int64_t tile, Prefetches& ahead) const {
    for (const QueryKey& part : args_.parts)
      if (part.keys.dim > 0) foresee(item, tile, part.keys, ahead);
    foresee(item, tile, args_.values, ahead);
  }

  void foresee(const Item& item, int64_t tile, const CacheRows& cache, Prefetches& ahead) const {
    const int64_t first_key = tile * kTileKeys, num_keys = keys_of(item, tile);
    for (int64_t key = 0; key < num_keys;) {
      int64_t row;
      const int64_t run = find_run(item, first_key + key, num_keys - key, row);
      ahead.add(values_of(cache) + row * cache.dim, run * row_bytes(cache));
      key += run;
    }
  }

  static int64_t row_bytes(const CacheRows& cache) {
    return cache.dim * static_cast<int64_t>(sizeof(T));
  }

  // One key tile for up to kBlockRows rows. Loading keys fetches as much as it reads, each of both
  // products half of it: as they take a third of the time each.
  void compute_block(const Item& item, int64_t first_key, int64_t row, int64_t rows,
                     Scratch& s) const {
    const Row* const block = s.row + row;
    const int64_t num_keys = std::min(kTileKeys, block[rows - 1].limit - first_key);
    if (num_keys <= 0) {
      for (int64_t r = 0; r < rows; ++r)
        if (block[r].partial) std::fill_n(block[r].partial, dim_ + 2, 0.f);
      return;
    }
    const int64_t ahead_bytes = kTileCols * row_bytes(args_.values) / 2;
    for (int64_t key = 0; key < num_keys; key += kTileCols)
      multiply_rows<kTileVecs, float, kSecondLevel>(
          {s.q + row * key_dim_, key_dim_, s.keys + key * key_dim_, kTileCols, key_dim_,
           s.scores + key, kTileKeys, false, s.ahead.take(ahead_bytes), ahead_bytes},
          rows);
    for (int64_t r = 0; r < rows; ++r)
      softmax(s.scores + r * kTileKeys, block[r].first - first_key, block[r].limit - first_key,
              num_keys, s.tile_max[r], s.tile_sum[r]);
    weigh_values(item, first_key, num_keys, rows, s);
    for (int64_t r = 0; r < rows; ++r) {
      const float* partial = s.partial + r * dim_;
      if (float* kept = block[r].partial) {
        std::memcpy(kept, partial, dim_ * sizeof(float));
        kept[dim_] = s.tile_max[r];
        kept[dim_ + 1] = s.tile_sum[r];
      } else {
        add_partial(partial, s.tile_max[r], s.tile_sum[r], row + r, s);
      }
    }
  }

  // Scaled, so that the scores need no further pass. -> s.q [rows, key_dim_], s.row
  void load_queries(const Item& item, Scratch& s) const {
    float* q = s.q;
    Row* row = s.row;
    const Member* const members = plan_.members_of(item);
    for (const Member* m = members; m < members + item.num_members; ++m) {
      float* partial = plan_.partials_of(*m, item.kv_head, item.first_tile);
      for (int64_t query = 0; query < m->num_queries; ++query) {
        const int64_t limit = m->num_keys - (m->num_queries - 1 - query);
        const int64_t first = args_.first_seen(limit);
        for (int64_t g = 0; g < group_; ++g) {
          *row++ = {first, limit, partial};
          if (partial) partial += dim_ + 2;
          q = load_query(args_.cu_seqlens_q[m->seq] + m->first_query + query,
                         item.kv_head * group_ + g, q);
        }
      }
    }
  }

  // -> behind it
  float* load_query(int64_t token, int64_t head, float* q) const {
    for (const QueryKey& part : args_.parts) {
      const float* from = part.q + token * part.q_token_stride + head * part.q_head_stride;
      for (int64_t d = 0; d < part.keys.dim; ++d) *q++ = from[d] * args_.scale;
    }
    return q;
  }

  static const T* values_of(const CacheRows& cache) { return static_cast<const T*>(cache.values); }

  // The rows of keys [key, key + return value), which lie one after the other in every cache, are
  // [row, ...); at most `wanted`.
  int64_t find_run(const Item& item, int64_t key, int64_t wanted, int64_t& row) const {
    const int64_t offset = key % args_.block_size;
    const int64_t seq = plan_.members_of(item)->seq;  // or another member's, it is the same block
    const int64_t block =
        args_.block_table[seq * args_.block_table_stride + key / args_.block_size];
    row = (block * args_.num_kv_heads + item.kv_head) * args_.block_size + offset;
    return std::min(wanted, args_.block_size - offset);
  }

  // Panels [kTileCols keys wide]: keys[panel][d][key], zero where there is no key.
  void load_keys(const Item& item, int64_t first_key, int64_t num_keys, Scratch& s) const {
    float* keys = s.keys;
    for (int64_t panel = 0; panel < num_keys; panel += kTileCols) {
      const int64_t in_panel = std::min<int64_t>(kTileCols, num_keys - panel);
      for (const QueryKey& part : args_.parts) {
        if (part.keys.dim == 0) continue;
        load_panel(item, part.keys, first_key + panel, in_panel, keys, s.ahead);
        keys += kTileCols * part.keys.dim;
      }
    }
  }

  void load_panel(const Item& item, const CacheRows& cache, int64_t first_key, int64_t num_keys,
                  float* panel, Prefetches& ahead) const {
    if (kIsQuantized && num_keys < kTileCols) std::fill_n(panel, kTileCols * cache.dim, 0.f);
    for (int64_t key = 0; key < num_keys;) {
      int64_t row;
      const int64_t run = find_run(item, first_key + key, num_keys - key, row);
      const T* rows = values_of(cache) + row * cache.dim;
      const int64_t room = kTileCols - key;
      if constexpr (kIsQuantized) {
        widen_transposed(rows, cache.scales + row, run, cache.dim, panel + key, kTileCols, room);
        ahead.fetch(run * row_bytes(cache));
      } else {
        const int64_t padded = key + run == num_keys ? room : run;
        transpose_padded(rows, cache.dim, run, cache.dim, panel + key, kTileCols, padded,
                         [&] { ahead.fetch(kLanes * kLanes * int64_t{sizeof(T)}); });
      }
      key += run;
    }
  }

  // scores -> exp(score - max) in [first, visible), zero elsewhere. Scores are padded to whole tile
  // columns.
  static void softmax(float* scores, int64_t first, int64_t visible, int64_t num_keys, float& max,
                      float& sum) {
    const int64_t padded = round_up<int64_t>(num_keys, kLanes);
    visible = std::clamp<int64_t>(visible, 0, num_keys);
    first = std::clamp<int64_t>(first, 0, visible);
    std::fill(scores, scores + first, kMinusInf);
    std::fill(scores + visible, scores + padded, kMinusInf);
    if (visible == first) {
      std::fill_n(scores, padded, 0.f);
      max = kMinusInf;
      sum = 0.f;
      return;
    }
    Vec highest(kMinusInf);
    for (int64_t i = 0; i < padded; i += kLanes)
      highest = at::vec::maximum(highest, Vec::loadu(scores + i));
    max = max_lanes(highest);
    const Vec shift(max);
    Vec total(0.f);
    for (int64_t i = 0; i < padded; i += kLanes) {
      const Vec weight = (Vec::loadu(scores + i) - shift).exp_u20();
      weight.store(scores + i);
      total = total + weight;
    }
    sum = sum_lanes(total);
  }

  // partial[rows, dim_] = scores[rows, num_keys] V; V in place where blocks are long enough.
  void weigh_values(const Item& item, int64_t first_key, int64_t num_keys, int64_t rows,
                    Scratch& s) const {
    const CacheRows& cache = args_.values;
    if constexpr (kIsQuantized) scale_weights(item, first_key, num_keys, rows, s);
    // Where many rows share them, bytes are widened once for all.
    const bool in_place =
        run_ >= kMinRunForInPlace && cache.dim == dim_ && !(kIsQuantized && rows > kTileRows);
    for (int64_t key = 0; key < num_keys;) {
      int64_t row;
      const int64_t run = find_run(item, first_key + key, num_keys - key, row);
      const T* values = values_of(cache) + row * cache.dim;
      if (in_place) {
        const int64_t ahead_bytes = run * row_bytes(cache) / 2;
        multiply(
            ProductOf<T, kSecondLevel>{s.scores + key, kTileKeys, values, cache.dim, run, s.partial,
                                       dim_, key > 0, s.ahead.take(ahead_bytes), ahead_bytes},
            rows, dim_);
      } else {
        for (int64_t i = 0; i < run; ++i)
          copy_wide(values + i * cache.dim, cache.dim, s.values + (key + i) * dim_);
      }
      key += run;
    }
    if (!in_place)
      multiply(Product{s.scores, kTileKeys, s.values, dim_, num_keys, s.partial, dim_, false}, rows,
               dim_);
  }

  // One row of a cache as floats, padded with zeros to dim_.
  void copy_wide(const T* from, int64_t dim, float* to) const {
    int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes) load_wide(from + d).store(to + d);
    for (; d < dim; ++d) to[d] = static_cast<float>(from[d]);
    std::fill(to + dim, to + dim_, 0.f);
  }

  // A weight takes up the scale of its value, so that values are multiplied as they are.
  void scale_weights(const Item& item, int64_t first_key, int64_t num_keys, int64_t rows,
                     Scratch& s) const {
    const int64_t padded = round_up<int64_t>(num_keys, kLanes);
    for (int64_t key = 0; key < num_keys;) {
      int64_t row;
      const int64_t run = find_run(item, first_key + key, num_keys - key, row);
      std::memcpy(s.scales + key, args_.values.scales + row, run * sizeof(float));
      key += run;
    }
    std::fill(s.scales + num_keys, s.scales + padded, 0.f);
    for (int64_t r = 0; r < rows; ++r) {
      float* weights = s.scores + r * kTileKeys;
      for (int64_t key = 0; key < padded; key += kLanes)
        (Vec::loadu(weights + key) * Vec::loadu(s.scales + key)).store(weights + key);
    }
  }

  void reset(int64_t rows, Scratch& s) const {
    std::fill_n(s.out, rows * dim_, 0.f);
    std::fill_n(s.max, rows, kMinusInf);
    std::fill_n(s.sum, rows, 0.f);
  }

  void add_partial(const float* partial, float max, float sum, int64_t row, Scratch& s) const {
    if (sum == 0.f) return;
    const float highest = std::max(s.max[row], max);
    // NOTE: exp(0) is 1; that of the other side costs as much as all the rest.
    const float keep = s.max[row] == highest ? 1.f : std::exp(s.max[row] - highest);
    const float add = max == highest ? 1.f : std::exp(max - highest);
    s.max[row] = highest;
    s.sum[row] = std::fma(s.sum[row], keep, sum * add);
    float* out = s.out + row * dim_;
    for (int64_t d = 0; d < dim_; d += kLanes)
      at::vec::fmadd(Vec::loadu(out + d), Vec(keep), Vec::loadu(partial + d) * Vec(add))
          .store(out + d);
  }

  void fold(const Item& item, Scratch& s) const {
    reset(item.num_rows, s);
    const float* partial =
        plan_.partials_of(*plan_.members_of(item), item.kv_head, item.first_tile);
    for (int64_t tile = 0; tile < item.num_tiles; ++tile)
      for (int64_t row = 0; row < item.num_rows; ++row, partial += dim_ + 2)
        add_partial(partial, partial[dim_], partial[dim_ + 1], row, s);
    store(item, s);
  }

  // Of an item of one member. A row that saw no key becomes zeros.
  void store(const Item& item, const Scratch& s) const {
    const Member& member = *plan_.members_of(item);
    const int64_t first = args_.cu_seqlens_q[member.seq] + member.first_query;
    for (int64_t row = 0; row < item.num_rows; ++row) {
      const int64_t head = item.kv_head * group_ + row % group_;
      float* to = args_.out + ((first + row / group_) * args_.num_heads + head) * args_.values.dim;
      const float norm = s.sum[row] == 0.f ? 0.f : 1.f / s.sum[row];
      for (int64_t d = 0; d < args_.values.dim; ++d) to[d] = s.out[row * dim_ + d] * norm;
    }
  }

  const AttentionArgs& args_;
  const AttentionPlan& plan_;
  const int64_t group_;    // query heads per KV head
  const int64_t key_dim_;  // both parts
  const int64_t dim_;      // value_dim padded to whole vectors
  const int64_t run_;      // keys that may lie one after the other
};

// NOTE: kept for the life of the thread: its lists would be made anew in every layer.
AttentionPlan& plan_of_thread() {
  thread_local AttentionPlan plan;
  return plan;
}

}  // namespace

void paged_attention(const AttentionArgs& args) {
  AttentionPlan& plan = plan_of_thread();
  plan.make(args);
  if (args.values.scales)
    Attention<int8_t>(args, plan).run();
  else
    Attention<float>(args, plan).run();
}

AttentionCounts last_attention() {
  const AttentionPlan& plan = plan_of_thread();
  return {static_cast<int64_t>(plan.items().size()), plan.workspace_floats()};
}

}  // namespace pdserve
