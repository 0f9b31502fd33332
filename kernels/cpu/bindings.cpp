// torch.ops.pdserve_cpu.*: checks tensors once, allocates outputs, calls the kernels on pointers.
#include "checks.h"
#include "graph.h"
#include "huge_pages.h"
#include "kernels.h"
#include "recorded.h"
#include "threads.h"

#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <optional>
#include <utility>
#include <vector>

namespace {

using at::Tensor;
using pdserve::as_ids;
using pdserve::check_contiguous;
using pdserve::check_float;
using pdserve::check_ids;
using pdserve::check_int;
using pdserve::check_size;
using pdserve::empty;
using pdserve::run;

// As run, for a check of what tensors hold; a recording holds it once.
template <typename F>
void check(std::initializer_list<Tensor> read, const F& task) {
  auto* graphs = pdserve::recording();
  if (!graphs) return task();
  std::vector<const void*> key;
  for (const Tensor& tensor : read) key.push_back(tensor.const_data_ptr());
  graphs->add_once(key, task);
}

void check_cache(const Tensor& cache, const std::optional<Tensor>& scale, const char* name) {
  if (!scale) return check_contiguous(cache, name, 4);
  TORCH_CHECK(cache.device().is_cpu() && cache.scalar_type() == at::kChar, name,
              " must be int8 on the CPU with scales, is ", cache.scalar_type(), " on ",
              cache.device());
  TORCH_CHECK(cache.dim() == 4 && cache.is_contiguous(), name, " must be contiguous with 4 dims");
  check_contiguous(*scale, "scale of a cache", 4);
  for (int64_t dim = 0; dim < 4; ++dim)
    check_size(scale->size(dim), dim < 3 ? cache.size(dim) : 1, "size of a cache's scale");
}

void check_caches(const Tensor& k_cache, const Tensor& v_cache,
                  const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale,
                  int64_t num_heads, int64_t head_dim) {
  TORCH_CHECK(k_scale.has_value() == v_scale.has_value(), "one of both caches has scales");
  check_cache(k_cache, k_scale, "k_cache");
  check_cache(v_cache, v_scale, "v_cache");
  for (int64_t dim = 0; dim < 3; ++dim)
    TORCH_CHECK(k_cache.size(dim) == v_cache.size(dim), "k_cache and v_cache differ in shape");
  check_size(k_cache.size(3), head_dim, "head_dim of the cache");
  TORCH_CHECK(k_cache.size(1) > 0 && num_heads % k_cache.size(1) == 0, num_heads,
              " query heads are no multiple of ", k_cache.size(1), " KV heads");
}

pdserve::CacheRows rows_of(const Tensor& cache, const std::optional<Tensor>& scale) {
  return {cache.const_data_ptr(), scale ? scale->const_data_ptr<float>() : nullptr, cache.size(3)};
}

pdserve::CacheSlots slots_of(Tensor& cache, std::optional<Tensor>& scale) {
  return {cache.mutable_data_ptr(), scale ? scale->mutable_data_ptr<float>() : nullptr,
          cache.size(3)};
}

// NOTE: a wrong block id would read or write another process's shared memory; checking costs a few
// ns per block.
void check_sequences(const Tensor& block_table, const Tensor& cu_seqlens_q,
                     const Tensor& context_lens, int64_t num_tokens, int64_t num_blocks,
                     int64_t block_size) {
  const int64_t num_seqs = context_lens.numel();
  check_size(cu_seqlens_q.numel(), num_seqs + 1, "length of cu_seqlens_q");
  TORCH_CHECK(block_table.size(0) >= num_seqs, "block_table has ", block_table.size(0),
              " rows for ", num_seqs, " sequences");
  const int32_t* starts = cu_seqlens_q.const_data_ptr<int32_t>();
  const int32_t* contexts = context_lens.const_data_ptr<int32_t>();
  const int32_t* table = block_table.const_data_ptr<int32_t>();
  TORCH_CHECK(starts[0] >= 0 && starts[num_seqs] <= num_tokens, "cu_seqlens_q ends at ",
              starts[num_seqs], " of ", num_tokens, " tokens");
  for (int64_t seq = 0; seq < num_seqs; ++seq) {
    const int64_t queries = starts[seq + 1] - starts[seq], context = contexts[seq];
    TORCH_CHECK(queries >= 0 && context >= 0, "sequence ", seq, " has ", queries, " queries and ",
                context, " keys");
    const int64_t blocks = (context + block_size - 1) / block_size;
    TORCH_CHECK(blocks <= block_table.size(1), "sequence ", seq, " needs ", blocks,
                " blocks, block_table has room for ", block_table.size(1));
    for (int64_t i = 0; i < blocks; ++i) {
      const int32_t block = table[seq * block_table.size(1) + i];
      TORCH_CHECK_INDEX(block >= 0 && block < num_blocks, "block id ", block, " of sequence ", seq,
                        " is not in [0, ", num_blocks, ")");
    }
  }
}

pdserve::QueryKey query_key(const Tensor& q, const Tensor& cache,
                            const std::optional<Tensor>& scale) {
  return {q.const_data_ptr<float>(), q.stride(0), q.stride(1), rows_of(cache, scale)};
}

// Attention whose args lack nothing but what is alike for all kinds of caches.
Tensor attend(pdserve::AttentionArgs& args, const Tensor& q, const Tensor& k_cache,
              const Tensor& v_cache, const Tensor& block_table, const Tensor& cu_seqlens_q,
              const Tensor& context_lens, double scale, const std::optional<Tensor>& k_scale,
              const std::optional<Tensor>& v_scale) {
  check_float(q, "q", 3);
  check_caches(k_cache, v_cache, k_scale, v_scale, q.size(1), q.size(2));
  check_int(block_table, "block_table", 2);
  check_int(cu_seqlens_q, "cu_seqlens_q", 1);
  check_int(context_lens, "context_lens", 1);
  const int64_t num_tokens = q.size(0), num_blocks = k_cache.size(0), block_size = k_cache.size(2);
  check({block_table, cu_seqlens_q, context_lens}, [=] {
    check_sequences(block_table, cu_seqlens_q, context_lens, num_tokens, num_blocks, block_size);
  });
  Tensor out = empty({q.size(0), q.size(1), v_cache.size(3)}, q.options());
  args.parts[0] = query_key(q, k_cache, k_scale);
  args.values = rows_of(v_cache, v_scale);
  args.block_table = block_table.const_data_ptr<int32_t>();
  args.block_table_stride = block_table.size(1);
  args.cu_seqlens_q = cu_seqlens_q.const_data_ptr<int32_t>();
  args.context_lens = context_lens.const_data_ptr<int32_t>();
  args.out = out.mutable_data_ptr<float>();
  args.num_seqs = context_lens.numel();
  args.num_heads = q.size(1);
  args.num_kv_heads = k_cache.size(1);
  args.block_size = block_size;
  args.scale = static_cast<float>(scale);
  run([args] { pdserve::paged_attention(args); },
      {q, k_cache, v_cache, block_table, cu_seqlens_q, context_lens, k_scale.value_or(Tensor()),
       v_scale.value_or(Tensor())});
  return out;
}

Tensor paged_attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                       const Tensor& block_table, const Tensor& cu_seqlens_q,
                       const Tensor& context_lens, double scale, int64_t window,
                       const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale) {
  TORCH_CHECK(window >= 0, "window is ", window);
  pdserve::AttentionArgs args{};
  args.window = window;
  return attend(args, q, k_cache, v_cache, block_table, cu_seqlens_q, context_lens, scale, k_scale,
                v_scale);
}

Tensor mla_paged_attention(const Tensor& q_latent, const Tensor& q_rope, const Tensor& latent_cache,
                           const Tensor& rope_cache, const Tensor& block_table,
                           const Tensor& cu_seqlens_q, const Tensor& context_lens, double scale,
                           const std::optional<Tensor>& latent_scale,
                           const std::optional<Tensor>& rope_scale) {
  check_float(q_rope, "q_rope", 3);
  check_caches(latent_cache, rope_cache, latent_scale, rope_scale, q_latent.size(1),
               q_latent.size(2));
  check_size(latent_cache.size(1), 1, "heads of the latent cache");
  check_size(q_rope.size(0), q_latent.size(0), "tokens of q_rope");
  check_size(q_rope.size(1), q_latent.size(1), "heads of q_rope");
  check_size(q_rope.size(2), rope_cache.size(3), "width of q_rope");
  pdserve::AttentionArgs args{};
  args.parts[1] = query_key(q_rope, rope_cache, rope_scale);
  return attend(args, q_latent, latent_cache, latent_cache, block_table, cu_seqlens_q, context_lens,
                scale, latent_scale, latent_scale);
}

void check_slots(const Tensor& slot_mapping, int64_t num_tokens, int64_t num_slots) {
  check_int(slot_mapping, "slot_mapping", 1);
  check_size(slot_mapping.numel(), num_tokens, "length of slot_mapping");
  check({slot_mapping}, [=, slots = slot_mapping.const_data_ptr<int32_t>()] {
    for (int64_t t = 0; t < num_tokens; ++t)
      TORCH_CHECK_INDEX(slots[t] >= -1 && slots[t] < num_slots, "slot ", slots[t], " of ",
                        num_slots);
  });
}

void check_angles(const Tensor& cos, const Tensor& sin, int64_t num_tokens, int64_t dim) {
  TORCH_CHECK(dim % 2 == 0, "rotated width ", dim, " is odd");
  for (const Tensor* t : {&cos, &sin}) {
    check_contiguous(*t, "cos and sin", 2);
    check_size(t->size(0), num_tokens, "rows of cos and sin");
    check_size(t->size(1), dim / 2, "width of cos and sin");
  }
}

Tensor interleave_rope(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  check_float(x, "x", 3);
  check_angles(cos, sin, x.size(0), x.size(2));
  Tensor out = empty(x.sizes(), x.options());
  const pdserve::HeadRows rows{
      x.const_data_ptr<float>(), x.size(0), x.size(1), x.stride(0), x.stride(1), x.size(2)};
  run([rows, c = cos.const_data_ptr<float>(), s = sin.const_data_ptr<float>(),
       to = out.mutable_data_ptr<float>()] { pdserve::interleave_rope(rows, c, s, to); },
      {x, cos, sin});
  return out;
}

void kv_rmsnorm_rope(const Tensor& kv, const Tensor& weight, const Tensor& cos, const Tensor& sin,
                     Tensor& latent_cache, Tensor& rope_cache, const Tensor& slot_mapping,
                     double eps, std::optional<Tensor> latent_scale,
                     std::optional<Tensor> rope_scale) {
  check_float(kv, "kv", 2);
  check_contiguous(weight, "weight", 1);
  check_caches(latent_cache, rope_cache, latent_scale, rope_scale, 1, weight.numel());
  check_size(kv.size(1), latent_cache.size(3) + rope_cache.size(3), "width of kv");
  check_angles(cos, sin, kv.size(0), rope_cache.size(3));
  check_slots(slot_mapping, kv.size(0), latent_cache.size(0) * latent_cache.size(2));
  const pdserve::LatentArgs args{kv.const_data_ptr<float>(),
                                 kv.stride(0),
                                 weight.const_data_ptr<float>(),
                                 cos.const_data_ptr<float>(),
                                 sin.const_data_ptr<float>(),
                                 slots_of(latent_cache, latent_scale),
                                 slots_of(rope_cache, rope_scale),
                                 slot_mapping.const_data_ptr<int32_t>(),
                                 kv.size(0),
                                 static_cast<float>(eps)};
  run([args] { pdserve::kv_rmsnorm_rope(args); },
      {kv, weight, cos, sin, latent_cache, rope_cache, slot_mapping,
       latent_scale.value_or(Tensor()), rope_scale.value_or(Tensor())});
}

Tensor head_matmul(const Tensor& x, const Tensor& weight) {
  check_float(x, "x", 3);
  check_contiguous(weight, "weight", 3);
  check_size(weight.size(0), x.size(1), "heads of weight");
  check_size(weight.size(1), x.size(2), "depth of weight");
  Tensor out = empty({x.size(0), x.size(1), weight.size(2)}, x.options());
  const pdserve::HeadProduct product{
      {x.const_data_ptr<float>(), x.size(0), x.size(1), x.stride(0), x.stride(1), x.size(2)},
      weight.const_data_ptr<float>(),
      weight.size(2),
      out.mutable_data_ptr<float>()};
  run([product] { pdserve::head_matmul(product); }, {x, weight});
  return out;
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  TORCH_CHECK(x.dim() == 2 || x.dim() == 3, "x must have 2 or 3 dims, has ", x.dim());
  check_float(x, "x", x.dim());
  check_contiguous(weight, "weight", 1);
  check_size(weight.numel(), x.size(-1), "length of weight");
  Tensor out = empty(x.sizes(), x.options());
  const bool heads = x.dim() == 3;
  const pdserve::NormRows rows{x.const_data_ptr<float>(), x.size(0),
                               heads ? x.size(1) : 1,     x.stride(0),
                               heads ? x.stride(1) : 0,   x.size(-1)};
  run(
      [rows, scale = weight.const_data_ptr<float>(), eps, to = out.mutable_data_ptr<float>()] {
        pdserve::rms_norm(rows, scale, static_cast<float>(eps), to);
      },
      {x, weight});
  return out;
}

Tensor add_rms_norm(const Tensor& x, Tensor& residual, const Tensor& weight, double eps) {
  check_float(x, "x", 2);
  check_contiguous(residual, "residual", 2);
  check_contiguous(weight, "weight", 1);
  TORCH_CHECK(x.sizes() == residual.sizes(), "x and residual differ in shape");
  check_size(weight.numel(), x.size(1), "length of weight");
  Tensor out = empty(x.sizes(), x.options());
  run(
      [from = x.const_data_ptr<float>(), ld = x.stride(0), rows = x.size(0), dim = x.size(1),
       total = residual.mutable_data_ptr<float>(), scale = weight.const_data_ptr<float>(), eps,
       to = out.mutable_data_ptr<float>()] {
        pdserve::add_rms_norm(from, ld, total, scale, static_cast<float>(eps), rows, dim, to);
      },
      {x, residual, weight});
  return out;
}

Tensor rotary_kv_write(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos,
                       const Tensor& sin, Tensor& k_cache, Tensor& v_cache,
                       const Tensor& slot_mapping, std::optional<Tensor> k_scale,
                       std::optional<Tensor> v_scale) {
  check_float(q, "q", 3);
  check_float(k, "k", 3);
  check_float(v, "v", 3);
  const int64_t num_tokens = q.size(0), head_dim = q.size(2);
  check_caches(k_cache, v_cache, k_scale, v_scale, q.size(1), head_dim);
  check_size(v_cache.size(3), head_dim, "head_dim of v_cache");
  TORCH_CHECK(k.sizes() == v.sizes(), "k and v differ in shape");
  check_size(k.size(0), num_tokens, "tokens of k");
  check_size(k.size(1), k_cache.size(1), "heads of k");
  check_size(k.size(2), head_dim, "head_dim of k");
  check_angles(cos, sin, num_tokens, head_dim);
  check_slots(slot_mapping, num_tokens, k_cache.size(0) * k_cache.size(2));
  Tensor out = empty(q.sizes(), q.options());
  pdserve::RotaryArgs args{};
  args.q = q.const_data_ptr<float>();
  args.k = k.const_data_ptr<float>();
  args.v = v.const_data_ptr<float>();
  args.q_token_stride = q.stride(0);
  args.q_head_stride = q.stride(1);
  args.k_token_stride = k.stride(0);
  args.k_head_stride = k.stride(1);
  args.v_token_stride = v.stride(0);
  args.v_head_stride = v.stride(1);
  args.cos = cos.const_data_ptr<float>();
  args.sin = sin.const_data_ptr<float>();
  args.k_cache = slots_of(k_cache, k_scale);
  args.v_cache = slots_of(v_cache, v_scale);
  args.slot_mapping = slot_mapping.const_data_ptr<int32_t>();
  args.q_out = out.mutable_data_ptr<float>();
  args.num_tokens = num_tokens;
  args.num_heads = q.size(1);
  args.num_kv_heads = k.size(1);
  args.head_dim = head_dim;
  args.block_size = k_cache.size(2);
  run([args] { pdserve::rotary_kv_write(args); },
      {q, k, v, cos, sin, k_cache, v_cache, slot_mapping, k_scale.value_or(Tensor()),
       v_scale.value_or(Tensor())});
  return out;
}

Tensor silu_mul(const Tensor& gate_up) {
  check_float(gate_up, "gate_up", 2);
  TORCH_CHECK(gate_up.size(1) % 2 == 0, "gate_up has an odd width ", gate_up.size(1));
  const int64_t dim = gate_up.size(1) / 2;
  Tensor out = empty({gate_up.size(0), dim}, gate_up.options());
  run([from = gate_up.const_data_ptr<float>(), ld = gate_up.stride(0), rows = gate_up.size(0), dim,
       to = out.mutable_data_ptr<float>()] { pdserve::silu_mul(from, ld, rows, dim, to); },
      {gate_up});
  return out;
}

Tensor embedding(const Tensor& token_ids, const Tensor& weight) {
  check_contiguous(weight, "weight", 2);
  const pdserve::Ids ids = as_ids(token_ids);
  Tensor out = empty({ids.count, weight.size(1)}, weight.options());
  run(
      [ids, limit = weight.size(0), dim = weight.size(1), from = weight.const_data_ptr<float>(),
       to = out.mutable_data_ptr<float>()] {
        check_ids(ids, limit);
        pdserve::embedding(from, dim, ids, to);
      },
      {token_ids, weight});
  return out;
}

Tensor pack_weight(const Tensor& weight) {
  check_float(weight, "weight", 2);
  const int64_t cols = pdserve::panel_cols(), panels = (weight.size(0) + cols - 1) / cols;
  Tensor packed = pdserve::empty_in_huge_pages({panels, weight.size(1), cols}, weight.options());
  pdserve::pack_weight(weight.const_data_ptr<float>(), weight.stride(0), weight.size(0),
                       weight.size(1), packed.mutable_data_ptr<float>());
  return packed;
}

void check_packed(const Tensor& packed, int64_t out_features) {
  check_contiguous(packed, "packed", 3);
  check_size(packed.size(2), pdserve::panel_cols(), "panel width");
  TORCH_CHECK(out_features >= 0 && out_features <= packed.size(0) * packed.size(2), "out_features ",
              out_features, " of ", packed.size(0), " panels");
}

Tensor packed_rows(const Tensor& packed, const Tensor& row_ids, int64_t out_features) {
  check_packed(packed, out_features);
  const pdserve::Ids ids = as_ids(row_ids);
  Tensor out = empty({ids.count, packed.size(1)}, packed.options());
  run(
      [ids, out_features, in_features = packed.size(1), from = packed.const_data_ptr<float>(),
       to = out.mutable_data_ptr<float>()] {
        check_ids(ids, out_features);
        pdserve::packed_rows(from, in_features, ids, to);
      },
      {row_ids, packed});
  return out;
}

Tensor linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias,
              int64_t out_features) {
  check_float(x, "x", 2);
  check_packed(packed, out_features);
  check_size(x.size(1), packed.size(1), "width of x");
  if (bias) {
    check_contiguous(*bias, "bias", 1);
    check_size(bias->numel(), packed.size(0) * packed.size(2), "length of the padded bias");
  }
  Tensor out = empty({x.size(0), out_features}, x.options());
  const pdserve::LinearArgs args{x.const_data_ptr<float>(),
                                 x.stride(0),
                                 x.size(0),
                                 x.size(1),
                                 out_features,
                                 packed.const_data_ptr<float>(),
                                 bias ? bias->const_data_ptr<float>() : nullptr,
                                 out.mutable_data_ptr<float>()};
  run([args] { pdserve::linear(args); }, {x, packed, bias.value_or(Tensor())});
  return out;
}

// flags: addresses, see threads.h.
void set_lent_threads(const std::vector<int64_t>& flags) {
  std::vector<const pdserve::BusyFlag*> pointers;
  for (const int64_t address : flags)
    pointers.push_back(reinterpret_cast<const pdserve::BusyFlag*>(address));
  pdserve::set_lent_threads(std::move(pointers));
}

}  // namespace

TORCH_LIBRARY(pdserve_cpu, m) {
  m.def(
      "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, "
      "Tensor cu_seqlens_q, Tensor context_lens, float scale, int window=0, "
      "Tensor? k_scale=None, Tensor? v_scale=None) -> Tensor");
  m.def(
      "mla_paged_attention(Tensor q_latent, Tensor q_rope, Tensor latent_cache, Tensor rope_cache, "
      "Tensor block_table, Tensor cu_seqlens_q, Tensor context_lens, float scale, "
      "Tensor? latent_scale=None, Tensor? rope_scale=None) -> Tensor");
  m.def("interleave_rope(Tensor x, Tensor cos, Tensor sin) -> Tensor");
  m.def(
      "kv_rmsnorm_rope(Tensor kv, Tensor weight, Tensor cos, Tensor sin, Tensor(a!) latent_cache, "
      "Tensor(b!) rope_cache, Tensor slot_mapping, float eps, Tensor(c!)? latent_scale=None, "
      "Tensor(d!)? rope_scale=None) -> ()");
  m.def("head_matmul(Tensor x, Tensor weight) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("add_rms_norm(Tensor x, Tensor(a!) residual, Tensor weight, float eps) -> Tensor");
  m.def(
      "rotary_kv_write(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, "
      "Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, Tensor(c!)? k_scale=None, "
      "Tensor(d!)? v_scale=None) -> Tensor");
  m.def("silu_mul(Tensor gate_up) -> Tensor");
  m.def("embedding(Tensor token_ids, Tensor weight) -> Tensor");
  m.def("set_lent_threads(int[] flags) -> ()", set_lent_threads);
  m.class_<pdserve::Graphs>("Graphs")
      .def(torch::init<>())
      .def("begin", &pdserve::Graphs::begin)
      .def("end", &pdserve::Graphs::end)
      .def("cancel", &pdserve::Graphs::cancel)
      .def("replay", &pdserve::Graphs::replay)
      .def("profile", &pdserve::Graphs::profile)
      .def("empty", &pdserve::Graphs::empty)
      .def("alias", &pdserve::Graphs::alias)
      .def("num_bytes", &pdserve::Graphs::num_bytes)
      .def("num_tasks", &pdserve::Graphs::num_tasks)
      .def("num_recorded", &pdserve::Graphs::num_recorded);
  m.def("pack_weight(Tensor weight) -> Tensor");
  m.def("packed_rows(Tensor packed, Tensor row_ids, int out_features) -> Tensor");
  m.def("linear(Tensor x, Tensor packed, Tensor? bias, int out_features) -> Tensor");
  m.def("panel_cols() -> int", [] { return pdserve::panel_cols(); });
  m.def("last_attention() -> (int, int)", [] {
    const auto [items, workspace_floats] = pdserve::last_attention();
    return std::make_tuple(items, workspace_floats);
  });
}

TORCH_LIBRARY_IMPL(pdserve_cpu, CPU, m) {
  m.impl("paged_attention", paged_attention);
  m.impl("mla_paged_attention", mla_paged_attention);
  m.impl("interleave_rope", interleave_rope);
  m.impl("kv_rmsnorm_rope", kv_rmsnorm_rope);
  m.impl("head_matmul", head_matmul);
  m.impl("rms_norm", rms_norm);
  m.impl("add_rms_norm", add_rms_norm);
  m.impl("rotary_kv_write", rotary_kv_write);
  m.impl("silu_mul", silu_mul);
  m.impl("embedding", embedding);
  m.impl("pack_weight", pack_weight);
  m.impl("packed_rows", packed_rows);
  m.impl("linear", linear);
}
