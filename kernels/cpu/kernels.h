// The kernels on plain pointers: the seam between bindings.cpp, which knows tensors, and the rest,
// which does not.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace pdserve {

// A paged cache, [num_blocks, Hkv, block_size, dim], contiguous: a row is one token of one head.
struct CacheRows {
  const void* values;  // float, or int8 where there are scales
  const float*
      scales;  // [num_blocks, Hkv, block_size], what a row's int8 are multiplied with; or null
  int64_t dim;
};

// The same to be written to.
struct CacheSlots {
  void* values;
  float* scales;
  int64_t dim;
};

// A query, and the cache that its keys are in.
struct QueryKey {
  const float* q;  // [T, Hq, keys.dim]
  int64_t q_token_stride, q_head_stride;
  CacheRows keys;
};

struct AttentionArgs {
  // Scores are the sum over both parts; the second one has dim 0 except in latent attention.
  QueryKey parts[2];
  CacheRows values;            // all caches are float, or all are int8
  const int32_t* block_table;  // [N, block_table_stride]
  int64_t block_table_stride;
  const int32_t* cu_seqlens_q;  // [N + 1]
  const int32_t* context_lens;  // [N]
  float* out;                   // [T, Hq, values.dim], contiguous
  int64_t num_seqs, num_heads, num_kv_heads, block_size;
  int64_t window;  // a query sees this many keys up to its own; 0: all
  float scale;

  // The first key that a query sees, whose own is the last before `limit`.
  int64_t first_seen(int64_t limit) const {
    return window ? std::max<int64_t>(0, limit - window) : 0;
  }
};

void paged_attention(const AttentionArgs& args);

// Of this thread's last paged_attention, for tests.
struct AttentionCounts {
  int64_t items;             // of work
  int64_t workspace_floats;  // held until the next one
};
AttentionCounts last_attention();

// Rows of x may be strided; [outer, inner] index a row, the norm is over dim contiguous floats.
struct NormRows {
  const float* x;
  int64_t outer, inner, outer_stride, inner_stride, dim;
};

void rms_norm(const NormRows& rows, const float* weight, float eps, float* out);

// residual += x; out = rms_norm(residual). All [rows, dim] with the given row strides.
void add_rms_norm(const float* x, int64_t ld_x, float* residual, const float* weight, float eps,
                  int64_t rows, int64_t dim, float* out);

struct RotaryArgs {
  const float *q, *k, *v;
  int64_t q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride,
      v_head_stride;
  const float *cos, *sin;  // [T, D / 2], contiguous
  CacheSlots k_cache, v_cache;
  const int32_t* slot_mapping;
  float* q_out;  // [T, Hq, D], contiguous
  int64_t num_tokens, num_heads, num_kv_heads, head_dim, block_size;
};

void rotary_kv_write(const RotaryArgs& args);

// Heads of a token, each dim wide.
struct HeadRows {
  const float* x;
  int64_t num_tokens, num_heads, token_stride, head_stride, dim;
};

// Pairs of neighbours, rotated; out: [T, H, dim], first of all pairs, then second of all pairs.
void interleave_rope(const HeadRows& rows, const float* cos, const float* sin, float* out);

// x [T, H, A] times a matrix per head.
struct HeadProduct {
  HeadRows x;
  const float* weight;  // [H, A, out_dim], contiguous
  int64_t out_dim;
  float* out;  // [T, H, out_dim], contiguous
};

void head_matmul(const HeadProduct& product);

struct LatentArgs {
  const float* kv;  // [T, rank + rope_dim]
  int64_t ld_kv;
  const float *weight, *cos, *sin;
  CacheSlots latent_cache, rope_cache;
  const int32_t* slot_mapping;
  int64_t num_tokens;
  float eps;
};

// Caches have one head, so that a slot is a row.
void kv_rmsnorm_rope(const LatentArgs& args);

void silu_mul(const float* gate_up, int64_t ld, int64_t rows, int64_t dim, float* out);

// Ids of either width.
struct Ids {
  const int32_t* narrow;  // or null
  const int64_t* wide;
  int64_t count;

  int64_t operator[](int64_t i) const { return narrow ? narrow[i] : wide[i]; }
};

void embedding(const float* weight, int64_t dim, const Ids& ids, float* out);

// Columns of a panel of a packed weight: [ceil(out_features / panel_cols), in_features,
// panel_cols], zero padded.
int64_t panel_cols();

void pack_weight(const float* weight, int64_t ld, int64_t out_features, int64_t in_features,
                 float* packed);

void packed_rows(const float* packed, int64_t in_features, const Ids& ids, float* out);

struct LinearArgs {
  const float* x;  // [rows, in_features]
  int64_t ld_x, rows, in_features, out_features;
  const float* packed;
  const float* bias;  // or null; padded with zeros to whole panels
  float* out;         // [rows, out_features], contiguous
};

inline int64_t out_features_of(const LinearArgs& args) { return args.out_features; }

void linear(const LinearArgs& args);

// Several products of the same sizes, rows apart: the threads need not meet between them.
void linear_each(const std::vector<LinearArgs>& products);

// A weight in 4 or 8 bits: W = value * scale + offset, both shared by group_size neighbours of a
// row. See quantized.h for the panels.
struct QuantizedShape {
  int64_t out_features, in_features, group_size;
  int num_bits;
  bool has_offset;
  // Scale and offset are float16 in the panels, else float32. With 16 bits, which have neither:
  // values are float16, else bfloat16.
  bool has_half_factors;
  // What rows of x are rounded to in a product: 16, or with weights of 4 bits 8. With weights of 16
  // bits they are not.
  int input_bits;
};

int64_t quantized_panel_bytes(const QuantizedShape& shape);

// values: [out_features, in_features] int8, or of 16 bits; scale, offset (or null): [out_features,
// groups], neither with 16 bits.
void pack_quantized(const QuantizedShape& shape, const void* values, const float* scale,
                    const float* offset, uint8_t* packed);

void quantized_rows(const QuantizedShape& shape, const uint8_t* packed, const Ids& ids, float* out);

struct QuantizedLinearArgs {
  QuantizedShape shape;
  const float* x;  // [rows, in_features]
  int64_t ld_x, rows;
  const uint8_t* packed;
  const float* bias;  // or null; padded with zeros to whole panels
  float* out;         // [rows, out_features], contiguous
};

inline int64_t out_features_of(const QuantizedLinearArgs& args) { return args.shape.out_features; }

void quantized_linear(const QuantizedLinearArgs& args);

// As linear_each.
void quantized_linear_each(const std::vector<QuantizedLinearArgs>& products);

// The same of weights of 16 bits, and of 8 and 4.
void half_linear_each(const std::vector<QuantizedLinearArgs>& products);
void integer_linear_each(const std::vector<QuantizedLinearArgs>& products);

// The choice of a token's experts; see kernels.gating.
struct GatingArgs {
  const float* logits;  // [rows, num_experts]
  int64_t ld, rows, num_experts;
  const float* bias;  // [num_experts], added to scores for the choice; or null
  int64_t k, num_groups, num_groups_per_tok;
  bool is_sigmoid;     // scores, else softmax
  bool is_top2_sum;    // a group's score, else its best expert's
  bool is_normalized;  // weights are divided by their sum
  float scaling_factor;
  float* weights;  // [rows, k]
  int64_t* ids;    // [rows, k], different ones, in range whatever the logits are
};

void route(const GatingArgs& args);

struct ExpertRows {
  const float* x;  // [num_tokens, dim]
  int64_t ld, num_tokens, dim;
  float* out;  // [num_tokens * k, dim], contiguous
};

// ids: [num_tokens * k]. Row i of out is the token of choice index[i]: choices sorted by expert,
// the first of equals first. sizes: [num_experts], rows of each.
void sort_by_expert(const ExpertRows& rows, const Ids& ids, int64_t num_experts, int64_t* index,
                    int64_t* sizes);

// The way back: out[token] is the weighted sum of its rows, added in the order of its choices.
// weights: [num_tokens, k], by choice; index: all of [0, num_tokens * k), from sort_by_expert.
void sum_of_experts(const float* rows, int64_t dim, const int64_t* index, const float* weights,
                    int64_t num_tokens, int64_t k, float* out);

void add(const float* x, const float* y, int64_t count, float* out);

struct LogitRows {
  const float* logits;
  int64_t ld, count, vocab_size;
};

// tokens: [count], the first of the largest of each row; NaN is no number to it.
void argmax(const LogitRows& rows, int64_t* tokens);

// Options are by row. See kernels.drawing.
struct DrawArgs {
  LogitRows rows;
  const float* inverse_temperature;
  const float* log_min_p;  // or null
  const int64_t* top_k;    // or null; vocab_size: off
  const double* top_p;     // or null; 1: off
  const double* numbers;   // in [0, 1)
  int64_t* tokens;         // in range whatever the logits are
};

void draw(const DrawArgs& args);

}  // namespace pdserve
