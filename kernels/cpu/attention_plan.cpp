// See attention_plan.h.
#include "attention_plan.h"
#include "threads.h"
#include "vec.h"

#include <algorithm>

namespace pdserve {
namespace {

constexpr int64_t kMaxSplitRows = 48;   // up to here an item is a single key tile, too
constexpr int64_t kItemsPerThread = 6;  // at least, so that no thread waits long for the last one
constexpr int64_t kItemRowsMultiple = 24;
constexpr int64_t kMaxIdleFloats = 4 << 20;  // of the workspace, 16 MB

}  // namespace

void AttentionPlan::make(const AttentionArgs& args) {
  args_ = &args;
  group_ = args.num_heads / args.num_kv_heads;
  partial_floats_ = round_up<int64_t>(args.values.dim, kLanes) + 2;
  has_even_items_ = true;
  members_.clear();
  items_.clear();
  folds_.clear();
  const int64_t rows = add_split_members();
  sort_by_blocks();
  plan_shared(std::min(kMaxItemRows, rows / (kItemsPerThread * num_threads())));
  plan_own();
  plan_whole();
  if (!has_even_items_) deal();
}

int64_t AttentionPlan::query_len(int64_t seq) const {
  return args_->cu_seqlens_q[seq + 1] - args_->cu_seqlens_q[seq];
}

// Keys that query `query` of `seq` sees.
int64_t AttentionPlan::limit(int64_t seq, int64_t query) const {
  return args_->context_lens[seq] - query_len(seq) + query + 1;
}

// The first key that query `query` of `seq` sees.
int64_t AttentionPlan::first_seen(int64_t seq, int64_t query) const {
  return args_->first_seen(limit(seq, query));
}

bool AttentionPlan::is_split(int64_t seq) const {
  return query_len(seq) <= kMaxSplitQueries || query_len(seq) * group_ <= kMaxSplitRows;
}

Member AttentionPlan::member_of(int64_t seq, int64_t first_query, int64_t num_queries) const {
  const int64_t last_query = first_query + num_queries - 1;
  const int64_t num_keys = limit(seq, last_query);
  const int64_t first_tile = first_seen(seq, first_query) / kTileKeys;
  const int64_t num_tiles = ceil_div(num_keys, kTileKeys) - first_tile;
  // A window that has moved on has hardly anything left of what sequences begin with.
  const int64_t num_whole_tiles =
      first_seen(seq, last_query) > 0 ? 0 : limit(seq, first_query) / kTileKeys;
  return {seq, first_query, num_queries, first_tile, num_tiles, num_whole_tiles, num_keys, nullptr};
}

// -> their rows, counted once for each tile and KV head
int64_t AttentionPlan::add_split_members() {
  int64_t rows = 0;
  for (int64_t seq = 0; seq < args_->num_seqs; ++seq) {
    if (query_len(seq) == 0 || !is_split(seq)) continue;
    members_.push_back(member_of(seq, 0, query_len(seq)));
    rows += args_->num_kv_heads * members_.back().num_tiles * num_rows(members_.back());
  }
  make_room(rows * partial_floats_);
  float* partials = workspace_.get();
  for (Member& member : members_) {
    if (member.num_tiles == 1) {
      member.num_whole_tiles = 0;  // it is folded at once, by an item of its own
      continue;
    }
    member.partials = partials;
    partials += args_->num_kv_heads * member.num_tiles * num_rows(member) * partial_floats_;
  }
  return rows;
}

// What a large batch took goes back when a small one comes.
void AttentionPlan::make_room(int64_t floats) {
  const bool is_excess = workspace_floats_ > kMaxIdleFloats && floats <= kMaxIdleFloats;
  if (floats <= workspace_floats_ && !is_excess) return;
  workspace_.reset();
  workspace_floats_ = 0;  // should there be no memory
  workspace_.reset(new float[floats]);
  workspace_floats_ = floats;
}

float* AttentionPlan::partials_of(const Member& member, int64_t kv_head, int64_t tile) const {
  if (!member.partials) return nullptr;
  const int64_t index = kv_head * member.num_tiles + tile - member.first_tile;
  return member.partials + index * num_rows(member) * partial_floats_;
}

const int32_t* AttentionPlan::blocks_of(const Member& member) const {
  return args_->block_table + member.seq * args_->block_table_stride;
}

int64_t AttentionPlan::num_whole_blocks(const Member& member) const {
  return ceil_div(member.num_whole_tiles * kTileKeys, args_->block_size);
}

// Those without a whole tile last: they share nothing.
void AttentionPlan::sort_by_blocks() {
  const auto end = std::partition(members_.begin(), members_.end(),
                                  [](const Member& m) { return m.num_whole_tiles > 0; });
  std::sort(members_.begin(), end, [this](const Member& a, const Member& b) {
    const int32_t *a_blocks = blocks_of(a), *b_blocks = blocks_of(b);
    if (*a_blocks != *b_blocks) return *a_blocks < *b_blocks;
    const auto [a_end, b_end] = std::mismatch(a_blocks, a_blocks + num_whole_blocks(a), b_blocks,
                                              b_blocks + num_whole_blocks(b));
    const bool a_ends = a_end == a_blocks + num_whole_blocks(a);
    const bool b_ends = b_end == b_blocks + num_whole_blocks(b);
    // NOTE: of the same long blocks one may see more tiles than another.
    if (a_ends && b_ends) return a.num_whole_tiles < b.num_whole_tiles;
    return a_ends || (!b_ends && *a_end < *b_end);
  });
}

int64_t AttentionPlan::common_tiles(const Member& a, const Member& b) const {
  const Member& shorter = a.num_whole_tiles < b.num_whole_tiles ? a : b;
  if (shorter.num_whole_tiles <= 0) return 0;
  const int32_t* blocks = blocks_of(a);
  const int64_t num_common =
      std::mismatch(blocks, blocks + num_whole_blocks(shorter), blocks_of(b)).first - blocks;
  return std::min(shorter.num_whole_tiles, num_common * args_->block_size / kTileKeys);
}

// Items of all tiles that a member has in common with another one.
void AttentionPlan::plan_shared(int64_t max_rows) {
  const auto count = static_cast<int64_t>(members_.size());
  common_.assign(count + 1, 0);
  for (int64_t i = 1; i < count; ++i) common_[i] = common_tiles(members_[i - 1], members_[i]);
  const int64_t num_tiles = *std::max_element(common_.begin(), common_.end());
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    for (int64_t first = 0, end; first < count; first = end) {
      end = first + 1;
      if (tile >= std::max(common_[first], common_[end])) continue;
      int64_t rows = num_rows(members_[first]);
      while (tile < common_[end] && rows + num_rows(members_[end]) <= max_rows)
        rows += num_rows(members_[end++]);
      if (end - first > 1) has_even_items_ = false;
      for (int64_t head = 0; head < args_->num_kv_heads; ++head)
        items_.push_back({head, tile, 1, first, end - first, rows});
    }
  }
}

// Items of the tiles that a member has for itself.
void AttentionPlan::plan_own() {
  const auto count = static_cast<int64_t>(members_.size());
  for (int64_t i = 0; i < count; ++i) {
    const Member& member = members_[i];
    const int64_t rows = num_rows(member), end_tile = member.first_tile + member.num_tiles;
    // NOTE: who has a tile in common sees the first one.
    const int64_t first_tile = member.first_tile + std::max(common_[i], common_[i + 1]);
    for (int64_t head = 0; head < args_->num_kv_heads; ++head) {
      for (int64_t tile = first_tile; tile < end_tile; ++tile)
        items_.push_back({head, tile, 1, i, 1, rows});
      if (member.num_tiles != 1)
        folds_.push_back({head, member.first_tile, member.num_tiles, i, 1, rows});
    }
  }
}

void AttentionPlan::plan_whole() {
  int64_t rows = 0;
  for (int64_t seq = 0; seq < args_->num_seqs; ++seq)
    if (!is_split(seq)) rows += args_->num_kv_heads * query_len(seq) * group_;
  if (rows == 0) return;
  has_even_items_ = false;
  const int64_t wanted = ceil_div<int64_t>(rows, kItemsPerThread * num_threads());
  const int64_t item_rows =
      std::clamp(round_up(wanted, kItemRowsMultiple), kItemRowsMultiple, kMaxItemRows);
  const int64_t item_queries = std::max<int64_t>(1, item_rows / group_);
  for (int64_t seq = 0; seq < args_->num_seqs; ++seq) {
    if (is_split(seq)) continue;
    for (int64_t first = 0; first < query_len(seq); first += item_queries) {
      const Member member = member_of(seq, first, std::min(item_queries, query_len(seq) - first));
      const auto index = static_cast<int64_t>(members_.size());
      members_.push_back(member);
      for (int64_t head = 0; head < args_->num_kv_heads; ++head)
        items_.push_back({head, member.first_tile, member.num_tiles, index, 1, num_rows(member)});
    }
  }
  std::stable_sort(items_.begin(), items_.end(), [](const Item& a, const Item& b) {
    return a.num_rows * a.num_tiles > b.num_rows * b.num_tiles;
  });
}

// Both halves of the list, which threads begin with, get of the first items; see threads.h. With
// prompts these are the longest, else those that are shared.
void AttentionPlan::deal() {
  dealt_.clear();
  for (size_t first : {0, 1})
    for (size_t i = first; i < items_.size(); i += 2) dealt_.push_back(items_[i]);
  items_.swap(dealt_);
}

}  // namespace pdserve
