// Causal attention over a paged KV cache: decode and prefill are one algorithm.
//
// A work item is (sequence, KV head, some queries, some key tiles). Its rows are the queries of all
// heads that share the KV head, so each key and value is read once for all of them. A key tile is
// always keys [128 i, 128 i + 128) of the sequence; each tile gives every row a partial (max, sum,
// output), and partials are folded in ascending tile order:
//
//   few rows (decode):  one item per tile, partials to a workspace, folded when all are done
//                       (an only tile is folded at once)
//   many rows (prefill): one item goes through all tiles and folds as it goes
//
// NOTE: both do the same arithmetic in the same order, so a row's result is the same bits in every
// batch, chunking and number of threads.
//
// Source: Milakov and Gimelshein 2018 (online softmax); Dao et al. 2022 (FlashAttention);
// Flash-Decoding (split over keys).
#include "kernels.h"
#include "microkernel.h"
#include "prefetch.h"
#include "quantized_cache.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace pdserve {
namespace {

constexpr int64_t kTileKeys = 128;
constexpr int64_t kBlockRows = 48;        // rows whose scores are held at once: 24 KB
constexpr int64_t kMaxSplitRows = 48;     // up to here an item is a single key tile,
constexpr int64_t kMaxSplitQueries = 8;   // and also with so few queries of however many heads
constexpr int64_t kMaxItemRows = 192;     // rows that share one transposed key tile
constexpr int64_t kMinRunForInPlace = 8;  // smaller blocks are copied together before P V
constexpr int64_t kLineFloats = kCacheLine / sizeof(float);

struct Item {
  int64_t seq, kv_head, first_query, num_queries, first_tile, num_tiles;
  float* partials;  // [rows, value_dim padded + 2] of a split item, or null
};

// T: what the caches hold, float or int8_t.
template <typename T>
class Attention {
 public:
  explicit Attention(const AttentionArgs& args)
      : args_(args),
        group_(args.num_heads / args.num_kv_heads),
        key_dim_(args.parts[0].keys.dim + args.parts[1].keys.dim),
        dim_(round_up<int64_t>(args.values.dim, kLanes)),
        run_(std::min(args.block_size, kTileKeys)) {}

  void run() {
    plan();
    const auto num_items = static_cast<int64_t>(items_.size());
    const auto num_folds = static_cast<int64_t>(folds_.size());
    // Tiles of decode rows are all alike, and there are many.
    const int64_t chunk =
        has_whole_items_ ? 1 : std::clamp<int64_t>(num_items / (4 * num_threads()), 1, 16);
    parallel_dynamic(num_items, chunk, [&](int64_t begin, int64_t end) {
      Scratch scratch(*this);
      for (int64_t i = begin; i < end; ++i)
        compute(items_[i], i + 1 < num_items ? &items_[i + 1] : nullptr, scratch);
    });
    parallel_dynamic(num_folds, 8, [&](int64_t begin, int64_t end) {
      Scratch scratch(*this);
      for (int64_t i = begin; i < end; ++i) fold(folds_[i], scratch);
    });
  }

 private:
  static constexpr bool kIsQuantized = std::is_same_v<T, int8_t>;

  struct Scratch {
    explicit Scratch(const Attention& a) {
      // NOTE: kept for the life of the thread; a fresh one would be paged in anew in every layer.
      thread_local std::vector<float> floats;
      const int64_t rows = std::max(kMaxItemRows, kMaxSplitQueries * a.group_);
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
    Prefetches ahead;  // what this tile's values, and the next tile, are read from

    // The item whose first tile was prefetched by this thread; a hint, it may be gone.
    static const Item*& foreseen() {
      thread_local const Item* item = nullptr;
      return item;
    }
  };

  int64_t query_len(int64_t seq) const {
    return args_.cu_seqlens_q[seq + 1] - args_.cu_seqlens_q[seq];
  }

  // Keys that query `query` of `seq` sees.
  int64_t limit(int64_t seq, int64_t query) const {
    return args_.context_lens[seq] - query_len(seq) + query + 1;
  }

  // The first key that query `query` of `seq` sees.
  int64_t first_seen(int64_t seq, int64_t query) const {
    return args_.window ? std::max<int64_t>(0, limit(seq, query) - args_.window) : 0;
  }

  bool is_split(int64_t seq) const {
    return query_len(seq) <= kMaxSplitQueries || query_len(seq) * group_ <= kMaxSplitRows;
  }

  void plan() {
    int64_t partial_floats = 0, prefill_rows = 0;
    for (int64_t seq = 0; seq < args_.num_seqs; ++seq) {
      const int64_t rows = query_len(seq) * group_;
      if (is_split(seq))
        partial_floats += args_.num_kv_heads * num_tiles(seq) * rows * (dim_ + 2);
      else
        prefill_rows += args_.num_kv_heads * rows;
    }
    workspace_.reset(new float[partial_floats]);
    // Smaller items where there are few, so that no thread waits long for the last one.
    const int64_t wanted = ceil_div<int64_t>(prefill_rows, 6 * num_threads());
    const int64_t item_rows = std::clamp<int64_t>(round_up<int64_t>(wanted, 24), 24, kMaxItemRows);
    const int64_t item_queries = std::max<int64_t>(1, item_rows / group_);
    float* partials = workspace_.get();
    for (int64_t seq = 0; seq < args_.num_seqs; ++seq) {
      if (is_split(seq))
        partials = plan_split(seq, partials);
      else
        plan_whole(seq, item_queries);
    }
    if (has_whole_items_) deal();
  }

  // The longest items first in both halves of the list, which threads begin with; see threads.h.
  void deal() {
    std::stable_sort(items_.begin(), items_.end(), [](const Item& a, const Item& b) {
      return a.num_queries * a.num_tiles > b.num_queries * b.num_tiles;
    });
    std::vector<Item> dealt;
    for (size_t first : {0, 1})
      for (size_t i = first; i < items_.size(); i += 2) dealt.push_back(items_[i]);
    items_ = std::move(dealt);
  }

  int64_t num_tiles(int64_t seq) const {
    return ceil_div<int64_t>(args_.context_lens[seq], kTileKeys) - first_seen(seq, 0) / kTileKeys;
  }

  float* plan_split(int64_t seq, float* partials) {
    const int64_t queries = query_len(seq), tiles = num_tiles(seq);
    if (queries == 0) return partials;
    const int64_t first_tile = first_seen(seq, 0) / kTileKeys;
    for (int64_t head = 0; head < args_.num_kv_heads; ++head) {
      if (tiles == 1) {
        items_.push_back({seq, head, 0, queries, first_tile, 1, nullptr});
        continue;
      }
      folds_.push_back({seq, head, 0, queries, first_tile, tiles, partials});
      for (int64_t tile = first_tile; tile < first_tile + tiles; ++tile) {
        items_.push_back({seq, head, 0, queries, tile, 1, partials});
        partials += queries * group_ * (dim_ + 2);
      }
    }
    return partials;
  }

  void plan_whole(int64_t seq, int64_t item_queries) {
    const int64_t queries = query_len(seq);
    has_whole_items_ = true;
    for (int64_t head = 0; head < args_.num_kv_heads; ++head) {
      for (int64_t first = 0; first < queries; first += item_queries) {
        const int64_t count = std::min(item_queries, queries - first);
        const int64_t first_tile = first_seen(seq, first) / kTileKeys;
        const int64_t end_tile = ceil_div<int64_t>(limit(seq, first + count - 1), kTileKeys);
        items_.push_back({seq, head, first, count, first_tile, end_tile - first_tile, nullptr});
      }
    }
  }

  void compute(const Item& item, const Item* next_item, Scratch& s) const {
    const int64_t rows = item.num_queries * group_;
    load_queries(item, s.q);
    if (!item.partials) reset(rows, s);
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
    if (!item.partials) store(item, s);
  }

  // Keys of a tile that some query of the item sees.
  int64_t keys_of(const Item& item, int64_t tile) const {
    const int64_t last_query = item.first_query + item.num_queries - 1;
    return std::min(kTileKeys, limit(item.seq, last_query) - tile * kTileKeys);
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
    const int64_t last_query = item.first_query + (row + rows - 1) / group_;
    const int64_t num_keys = std::min(kTileKeys, limit(item.seq, last_query) - first_key);
    if (num_keys <= 0) {
      if (item.partials) std::fill_n(item.partials + row * (dim_ + 2), rows * (dim_ + 2), 0.f);
      return;
    }
    const int64_t ahead_bytes = kTileCols * row_bytes(args_.values) / 2;
    for (int64_t key = 0; key < num_keys; key += kTileCols)
      multiply_rows<kTileVecs, float, kSecondLevel>(
          {s.q + row * key_dim_, key_dim_, s.keys + key * key_dim_, kTileCols, key_dim_,
           s.scores + key, kTileKeys, false, s.ahead.take(ahead_bytes), ahead_bytes},
          rows);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t query = item.first_query + (row + r) / group_;
      softmax(s.scores + r * kTileKeys, first_seen(item.seq, query) - first_key,
              limit(item.seq, query) - first_key, num_keys, s.tile_max[r], s.tile_sum[r]);
    }
    weigh_values(item, first_key, num_keys, rows, s);
    for (int64_t r = 0; r < rows; ++r) {
      const float* partial = s.partial + r * dim_;
      if (item.partials) {
        float* kept = item.partials + (row + r) * (dim_ + 2);
        std::memcpy(kept, partial, dim_ * sizeof(float));
        kept[dim_] = s.tile_max[r];
        kept[dim_ + 1] = s.tile_sum[r];
      } else {
        add_partial(partial, s.tile_max[r], s.tile_sum[r], row + r, s);
      }
    }
  }

  // Scaled, so that the scores need no further pass. -> [rows, key_dim_], row = query * group_ +
  // head of the group.
  void load_queries(const Item& item, float* q) const {
    const int64_t first = args_.cu_seqlens_q[item.seq] + item.first_query;
    for (int64_t query = 0; query < item.num_queries; ++query) {
      for (int64_t g = 0; g < group_; ++g) {
        for (const QueryKey& part : args_.parts) {
          const float* from = part.q + (first + query) * part.q_token_stride +
                              (item.kv_head * group_ + g) * part.q_head_stride;
          for (int64_t d = 0; d < part.keys.dim; ++d) *q++ = from[d] * args_.scale;
        }
      }
    }
  }

  static const T* values_of(const CacheRows& cache) { return static_cast<const T*>(cache.values); }

  // The rows of keys [key, key + return value), which lie one after the other in every cache, are
  // [row, ...); at most `wanted`.
  int64_t find_run(const Item& item, int64_t key, int64_t wanted, int64_t& row) const {
    const int64_t offset = key % args_.block_size;
    const int64_t block =
        args_.block_table[item.seq * args_.block_table_stride + key / args_.block_size];
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
    const int64_t rows = item.num_queries * group_;
    reset(rows, s);
    const float* partial = item.partials;
    for (int64_t tile = 0; tile < item.num_tiles; ++tile)
      for (int64_t row = 0; row < rows; ++row, partial += dim_ + 2)
        add_partial(partial, partial[dim_], partial[dim_ + 1], row, s);
    store(item, s);
  }

  // A row that saw no key becomes zeros.
  void store(const Item& item, const Scratch& s) const {
    const int64_t first = args_.cu_seqlens_q[item.seq] + item.first_query;
    for (int64_t row = 0; row < item.num_queries * group_; ++row) {
      const int64_t head = item.kv_head * group_ + row % group_;
      float* to = args_.out + ((first + row / group_) * args_.num_heads + head) * args_.values.dim;
      const float norm = s.sum[row] == 0.f ? 0.f : 1.f / s.sum[row];
      for (int64_t d = 0; d < args_.values.dim; ++d) to[d] = s.out[row * dim_ + d] * norm;
    }
  }

  const AttentionArgs& args_;
  const int64_t group_;    // query heads per KV head
  const int64_t key_dim_;  // both parts
  const int64_t dim_;      // value_dim padded to whole vectors
  const int64_t run_;      // keys that may lie one after the other
  bool has_whole_items_ = false;
  std::vector<Item> items_;
  std::vector<Item> folds_;
  std::unique_ptr<float[]> workspace_;
};

}  // namespace

void paged_attention(const AttentionArgs& args) {
  if (args.values.scales)
    Attention<int8_t>(args).run();
  else
    Attention<float>(args).run();
}

}  // namespace pdserve
