// What paged attention computes as one item of work, and who shares an item.
//
//   few rows (decode):   one item per tile; its partials go to a workspace, and are folded when all
//                        are done. An only tile is folded at once.
//   many rows (prefill): one item goes through all tiles.
//
// Decode rows of sequences that begin with the same cache blocks share the items of these: a tile
// is read, and its keys are transposed, once for all of them. Sequences are sorted by their blocks,
// so that those that have a tile in common are neighbours:
//
//   sequence   blocks    first tile   second tile
//   2          a b | c   shared       shared with 0
//   0          a b | c   with all     shared with 2
//   1          a b | d   of a b       its own
//
// NOTE: only tiles that every query sees whole are shared: they need no mask, and a row's partial
// is the same bits as it is alone.
#pragma once

#include "kernels.h"

#include <memory>
#include <vector>

namespace pdserve {

constexpr int64_t kTileKeys = 128;
constexpr int64_t kMaxSplitQueries = 8;  // up to here an item is a single key tile
constexpr int64_t kMaxItemRows = 192;  // that share one transposed key tile; a query may have more

// Consecutive queries of one sequence.
struct Member {
  int64_t seq, first_query, num_queries;
  int64_t first_tile, num_tiles;  // that one of them sees
  int64_t num_whole_tiles;        // from the first key on, that each of them sees all of
  int64_t num_keys;               // that the last one sees
  float* partials;  // [Hkv, num_tiles, rows, value_dim padded + 2] of one that is split, or null
};

// Its rows are those of its members one after the other: queries of all heads that share the KV
// head. Several members have the one tile in common, in the same blocks.
struct Item {
  int64_t kv_head, first_tile, num_tiles;
  int64_t first_member, num_members;
  int64_t num_rows;
};

class AttentionPlan {
 public:
  // args must outlive the plan's use. The plan may be made again for others.
  void make(const AttentionArgs& args);

  const std::vector<Item>& items() const { return items_; }
  // For each KV head of a member whose tiles are several items: to be folded when all are done.
  const std::vector<Item>& folds() const { return folds_; }
  // Items that take about the same time: no prompts, nothing shared.
  bool has_even_items() const { return has_even_items_; }

  const Member* members_of(const Item& item) const { return members_.data() + item.first_member; }
  // Held for partials.
  int64_t workspace_floats() const { return workspace_floats_; }
  // [rows, value_dim padded + 2], or null
  float* partials_of(const Member& member, int64_t kv_head, int64_t tile) const;

 private:
  int64_t query_len(int64_t seq) const;
  int64_t limit(int64_t seq, int64_t query) const;
  int64_t first_seen(int64_t seq, int64_t query) const;
  bool is_split(int64_t seq) const;
  int64_t num_rows(const Member& member) const { return member.num_queries * group_; }
  Member member_of(int64_t seq, int64_t first_query, int64_t num_queries) const;

  int64_t add_split_members();
  void make_room(int64_t floats);
  void sort_by_blocks();
  const int32_t* blocks_of(const Member& member) const;
  int64_t num_whole_blocks(const Member& member) const;
  int64_t common_tiles(const Member& a, const Member& b) const;
  void plan_shared(int64_t max_rows);
  void plan_own();
  void plan_whole();
  void deal();

  const AttentionArgs* args_ = nullptr;
  int64_t group_ = 0;           // query heads per KV head
  int64_t partial_floats_ = 0;  // of a row
  bool has_even_items_ = true;
  std::vector<Member> members_;
  std::vector<int64_t> common_;  // tiles that a member has in common with the one before it
  std::vector<Item> items_, folds_, dealt_;
  int64_t workspace_floats_ = 0;
  std::unique_ptr<float[]> workspace_;
};

}  // namespace pdserve
