// The operators of mixtures of experts: checks their tensors and calls the kernels. What is routed
// where is data: in a replay it is read anew.
#include "checks.h"
#include "kernels.h"
#include "recorded.h"

#include <ATen/ATen.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace {

using at::Tensor;
using pdserve::check_contiguous;
using pdserve::check_float;
using pdserve::check_size;

std::tuple<Tensor, Tensor> moe_gating_topk(const Tensor& router_logits,
                                           const std::optional<Tensor>& bias, int64_t k,
                                           bool is_sigmoid, int64_t num_groups,
                                           int64_t num_groups_per_tok, bool is_top2_sum,
                                           bool is_normalized, double scaling_factor) {
  check_float(router_logits, "router_logits", 2);
  const int64_t rows = router_logits.size(0), num_experts = router_logits.size(1);
  TORCH_CHECK(num_groups >= 1 && num_experts % num_groups == 0, num_experts,
              " experts are no multiple of ", num_groups, " groups");
  TORCH_CHECK(num_groups_per_tok >= 1 && num_groups_per_tok <= num_groups, num_groups_per_tok,
              " of ", num_groups, " groups for a token");
  const int64_t group_size = num_experts / num_groups;
  TORCH_CHECK(k >= 1 && k <= group_size * num_groups_per_tok, k, " experts for a token of ",
              group_size * num_groups_per_tok);
  TORCH_CHECK(num_groups == 1 || !is_top2_sum || group_size >= 2, "a group has one expert");
  if (bias) {
    check_contiguous(*bias, "correction_bias", 1);
    check_size(bias->numel(), num_experts, "length of correction_bias");
  }
  Tensor weights = pdserve::empty({rows, k}, router_logits.options());
  Tensor ids = pdserve::empty({rows, k}, router_logits.options().dtype(at::kLong));
  const pdserve::GatingArgs args{router_logits.const_data_ptr<float>(),
                                 router_logits.stride(0),
                                 rows,
                                 num_experts,
                                 bias ? bias->const_data_ptr<float>() : nullptr,
                                 k,
                                 num_groups,
                                 num_groups_per_tok,
                                 is_sigmoid,
                                 is_top2_sum,
                                 is_normalized,
                                 static_cast<float>(scaling_factor),
                                 weights.mutable_data_ptr<float>(),
                                 ids.mutable_data_ptr<int64_t>()};
  pdserve::run([args] { pdserve::route(args); }, {router_logits, bias.value_or(Tensor())});
  return {weights, ids};
}

std::tuple<Tensor, Tensor, Tensor> moe_init_routing(const Tensor& x, const Tensor& topk_ids,
                                                    int64_t num_experts) {
  check_float(x, "x", 2);
  TORCH_CHECK(topk_ids.dim() == 2 && topk_ids.is_contiguous(), "topk_ids must be contiguous");
  check_size(topk_ids.size(0), x.size(0), "rows of topk_ids");
  const pdserve::Ids ids = pdserve::as_ids(topk_ids.view({-1}));
  const auto longs = x.options().dtype(at::kLong);
  Tensor rows = pdserve::empty({ids.count, x.size(1)}, x.options());
  Tensor index = pdserve::empty({ids.count}, longs), sizes = pdserve::empty({num_experts}, longs);
  const pdserve::ExpertRows args{x.const_data_ptr<float>(), x.stride(0), x.size(0), x.size(1),
                                 rows.mutable_data_ptr<float>()};
  pdserve::run(
      [args, ids, num_experts, to = index.mutable_data_ptr<int64_t>(),
       counts = sizes.mutable_data_ptr<int64_t>()] {
        pdserve::check_ids(ids, num_experts);
        pdserve::sort_by_expert(args, ids, num_experts, to, counts);
      },
      {x, topk_ids});
  return {rows, index, sizes};
}

Tensor moe_finalize_routing(const Tensor& rows, const Tensor& row_index,
                            const Tensor& topk_weights) {
  check_contiguous(rows, "rows", 2);
  check_contiguous(topk_weights, "topk_weights", 2);
  const int64_t num_tokens = topk_weights.size(0), k = topk_weights.size(1);
  TORCH_CHECK(row_index.scalar_type() == at::kLong && row_index.is_contiguous(),
              "row_index must be contiguous int64, is ", row_index.scalar_type());
  check_size(row_index.numel(), num_tokens * k, "length of row_index");
  check_size(rows.size(0), num_tokens * k, "rows");
  Tensor out = pdserve::empty({num_tokens, rows.size(1)}, rows.options());
  pdserve::run(
      [from = rows.const_data_ptr<float>(), dim = rows.size(1),
       index = row_index.const_data_ptr<int64_t>(), weights = topk_weights.const_data_ptr<float>(),
       num_tokens, k, to = out.mutable_data_ptr<float>()] {
        pdserve::check_ids({nullptr, index, num_tokens * k}, num_tokens * k);
        pdserve::sum_of_experts(from, dim, index, weights, num_tokens, k, to);
      },
      {rows, row_index, topk_weights});
  return out;
}

Tensor add(const Tensor& x, const Tensor& y) {
  check_contiguous(x, "x", 2);
  check_contiguous(y, "y", 2);
  TORCH_CHECK(x.sizes() == y.sizes(), "x and y differ in shape");
  Tensor out = pdserve::empty(x.sizes(), x.options());
  pdserve::run([a = x.const_data_ptr<float>(), b = y.const_data_ptr<float>(), count = x.numel(),
                to = out.mutable_data_ptr<float>()] { pdserve::add(a, b, count, to); },
               {x, y});
  return out;
}

// Weights of y = x W[g]^T, one group after another; see kernels.ops.GroupedLinear.
class GroupedLinear : public torch::CustomClassHolder {
 public:
  GroupedLinear(int64_t out_features, int64_t in_features) : weights_(std::make_shared<Weights>()) {
    weights_->out_features = out_features;
    weights_->in_features = in_features;
  }

  // The next group, packed as by pack_weight.
  void add(const Tensor& packed) {
    check_contiguous(packed, "packed", 3);
    check_size(packed.size(1), weights_->in_features, "depth of a panel");
    check_size(packed.size(2), pdserve::panel_cols(), "panel width");
    add_panels(packed);
    weights_->shapes.push_back({});
  }

  // The next group, packed as by pack_quantized. All groups are of one of both kinds.
  void add_quantized(const Tensor& packed, int64_t group_size, int64_t num_bits, bool has_offset,
                     bool has_half_factors, int64_t input_bits) {
    const auto shape = pdserve::make_shape(weights_->out_features, weights_->in_features, group_size,
                                           num_bits, has_offset, has_half_factors, input_bits);
    TORCH_CHECK(packed.scalar_type() == at::kByte && packed.is_contiguous() && packed.dim() == 2,
                "packed must be contiguous bytes with 2 dims");
    check_size(packed.size(1), pdserve::quantized_panel_bytes(shape), "bytes of a panel");
    add_panels(packed);
    weights_->shapes.push_back(shape);
    weights_->are_quantized = true;
  }

  Tensor grouped_linear(const Tensor& x, const Tensor& group_sizes) const {
    check_float(x, "x", 2);
    check_size(x.size(1), weights_->in_features, "width of x");
    TORCH_CHECK(group_sizes.scalar_type() == at::kLong && group_sizes.is_contiguous(),
                "group_sizes must be contiguous int64, is ", group_sizes.scalar_type());
    Tensor out = pdserve::empty({x.size(0), weights_->out_features}, x.options());
    pdserve::run(
        [weights = std::shared_ptr<const Weights>(weights_), from = x.const_data_ptr<float>(),
         ld = x.stride(0), rows = x.size(0), sizes = group_sizes.const_data_ptr<int64_t>(),
         num_sizes = group_sizes.numel(), to = out.mutable_data_ptr<float>()] {
          weights->check_sizes(sizes, num_sizes, rows);
          weights->are_quantized ? weights->multiply_quantized(from, ld, sizes, to)
                                 : weights->multiply(from, ld, sizes, to);
        },
        {x, group_sizes});
    return out;
  }

 private:
  struct Weights {
    int64_t out_features, in_features;
    bool are_quantized = false;
    std::vector<Tensor> packed;
    std::vector<pdserve::QuantizedShape> shapes;

    void check_sizes(const int64_t* sizes, int64_t num_sizes, int64_t rows) const {
      int64_t sum = 0, least = 0;
      for (int64_t i = 0; i < num_sizes; ++i) {
        sum += sizes[i];
        least = std::min(least, sizes[i]);
      }
      const auto num_groups = static_cast<int64_t>(packed.size());
      TORCH_CHECK_VALUE(num_sizes == num_groups && sum == rows && least >= 0, num_sizes,
                        " group sizes with sum ", sum, " for ", rows, " rows, ", num_groups,
                        " groups");
    }

    void multiply(const float* x, int64_t ld, const int64_t* sizes, float* out) const {
      std::vector<pdserve::LinearArgs> products;
      for (size_t group = 0; group < packed.size(); ++group) {
        if (const int64_t rows = sizes[group])
          products.push_back({x, ld, rows, in_features, out_features,
                              packed[group].const_data_ptr<float>(), nullptr, out});
        x += sizes[group] * ld;
        out += sizes[group] * out_features;
      }
      pdserve::linear_each(products);
    }

    void multiply_quantized(const float* x, int64_t ld, const int64_t* sizes, float* out) const {
      std::vector<pdserve::QuantizedLinearArgs> products;
      for (size_t group = 0; group < packed.size(); ++group) {
        if (const int64_t rows = sizes[group])
          products.push_back({shapes[group], x, ld, rows, packed[group].const_data_ptr<uint8_t>(),
                              nullptr, out});
        x += sizes[group] * ld;
        out += sizes[group] * out_features;
      }
      pdserve::quantized_linear_each(products);
    }
  };

  void add_panels(const Tensor& packed) {
    const int64_t cols = pdserve::panel_cols();
    check_size(packed.size(0), (weights_->out_features + cols - 1) / cols, "number of panels");
    weights_->packed.push_back(packed);
  }

  std::shared_ptr<Weights> weights_;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(pdserve_cpu, m) {
  m.def(
      "moe_gating_topk(Tensor router_logits, Tensor? correction_bias, int k, bool is_sigmoid=False, "
      "int num_groups=1, int num_groups_per_tok=1, bool is_top2_sum=False, "
      "bool is_normalized=False, float scaling_factor=1.0) -> (Tensor, Tensor)");
  m.def(
      "moe_init_routing(Tensor x, Tensor topk_ids, int num_experts) -> (Tensor, Tensor, Tensor)");
  m.def("moe_finalize_routing(Tensor rows, Tensor row_index, Tensor topk_weights) -> Tensor");
  m.def("add(Tensor x, Tensor y) -> Tensor");
  m.class_<GroupedLinear>("GroupedLinear")
      .def(torch::init<int64_t, int64_t>())
      .def("add", &GroupedLinear::add)
      .def("add_quantized", &GroupedLinear::add_quantized)
      .def("call", &GroupedLinear::grouped_linear);
}

TORCH_LIBRARY_IMPL(pdserve_cpu, CPU, m) {
  m.impl("moe_gating_topk", moe_gating_topk);
  m.impl("moe_init_routing", moe_init_routing);
  m.impl("moe_finalize_routing", moe_finalize_routing);
  m.impl("add", add);
}
